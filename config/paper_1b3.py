# Section 5.3 of the paper, 1.3B: 24 layers of width 2048, 100B tokens of SlimPajama, 47,684 steps of 2M tokens.
# The paper does not say if embedding and head are tied; here they are. Memory and time: docs/scale.md
n_layer = 24
n_head = 16
n_embd = 2048
block_size = 2048
vocab_size = 32000  # Mistral's tokenizer
dataset = "slimpajama"

batch_tokens = 2**21
micro_batch_size = 8
max_iters = 47684
learning_rate = 3e-4  # peak; cosine to a tenth of it
warmup_iters = 477  # 1B tokens
weight_decay = 0.01

eval_interval = 500
eval_tokens = 2**21
compile = True
parallel = "fsdp"
