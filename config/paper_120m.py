# Table 5 of the paper, 120M: 12 layers of width 768 on OpenWebText, 4800 steps of 0.5M tokens (2.5B).
# Long context: --block_size=4096 --micro_batch_size=8 --out_dir=out/longhorn_120m_4096
n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
vocab_size = 50304  # GPT-2's 50257 padded to a multiple of 64
dataset = "openwebtext"

batch_tokens = 524288
micro_batch_size = 32
max_iters = 4800
learning_rate = 6e-4  # peak; 5% warmup, then a cosine to a tenth

eval_interval = 250
eval_tokens = 524288
compile = True
