# LLaMA beside longhorn_laptop.py: the same tokens, order, schedule and evaluation; 1.38M parameters to Longhorn's 1.49M.
# It validates on 256 tokens, as it was trained: rotary attention does not read on to 1024 without having seen them.
model = "llama"
n_layer = 3
n_head = 3
n_embd = 192
block_size = 256
dataset = "pystdlib"

batch_tokens = 1024
batch_size = 4
max_iters = 4600
learning_rate = 1.5e-3  # peak
min_lr = 0.0
beta2 = 0.99

eval_interval = 1000
eval_tokens = 65536
eval_batch_size = 32
log_interval = 20
