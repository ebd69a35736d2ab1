# The 340M size used in other papers, on 15B tokens: the shape of paper_350m.py, 28,611 steps of 0.5M tokens.
n_layer = 24
n_head = 16
n_embd = 1024
block_size = 2048
vocab_size = 32000  # Mistral's tokenizer
dataset = "slimpajama"

batch_tokens = 2**19
micro_batch_size = 16
max_iters = 28611
learning_rate = 1e-3  # peak; cosine to a tenth of it
warmup_iters = 954  # 0.5B tokens

eval_interval = 500
eval_tokens = 2**19
compile = True
