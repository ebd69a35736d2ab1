# Longhorn with Eq. 6's whole transition beside longhorn_laptop.py: the same tokens, order and schedule, and the same parameters.
# What differs is what the diagonal approximation costs, in loss and in time.
model = "longhorn_exact"
n_layer = 3
n_head = 3
n_embd = 192
d_state = 8  # as Longhorn's
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
