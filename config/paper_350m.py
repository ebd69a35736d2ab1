# Table 5 of the paper, 350M: 24 layers of width 1024 on OpenWebText, 13500 steps of 0.5M tokens (7B).
# Long context: --block_size=4096 --micro_batch_size=4 --out_dir=out/longhorn_350m_4096
n_layer = 24
n_head = 16
n_embd = 1024
block_size = 1024
vocab_size = 50304  # GPT-2's 50257 padded to a multiple of 64
dataset = "openwebtext"

batch_tokens = 524288
micro_batch_size = 16
max_iters = 13500
learning_rate = 3e-4  # peak; 5% warmup, then a cosine to a tenth

eval_interval = 500
eval_tokens = 524288
compile = True
