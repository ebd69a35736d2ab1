# RWKV beside longhorn_laptop.py: the same tokens, order and schedule; 1.49M parameters, as Longhorn.
# Nothing here was tuned for RWKV; all families' settings are those found for Longhorn.
model = "rwkv"
n_layer = 3
n_head = 3
n_embd = 192
mlp_multiple = 224  # channel mix 672 wide: as many parameters as Longhorn
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
eval_block_size = 1024
eval_batch_size = 8
log_interval = 20
