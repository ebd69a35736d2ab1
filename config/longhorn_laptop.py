# Longhorn on two CPU cores in five minutes, the default of `make train`: bytes of the Python standard library.
# Small steps of many short windows learn most in so little time; validation reads on to 1024 tokens with the same state.
model = "longhorn"
n_layer = 3  # 6 Longhorn blocks
n_head = 3
n_embd = 192
d_state = 8  # half the scan's work, and no worse in so short a run
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
