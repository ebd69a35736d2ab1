# Two CPU cores, five minutes: bytes of the Python standard library. Longhorn, unless a file that includes this one says
# otherwise; the settings are those found for Longhorn, and nothing was tuned for the other families.
# Small steps of many short windows learn most in so little time.
n_layer = 3
n_head = 3
n_embd = 192
d_state = 8  # half the scan's work, and no worse in so short a run
block_size = 256
dataset = "pystdlib"

batch_tokens = 1024
micro_batch_size = 4
max_iters = 4600
learning_rate = 1.5e-3  # peak
min_lr = 0.0
beta2 = 0.99

eval_interval = 1000
eval_tokens = 65536
eval_block_size = 1024  # validation reads on to four times the training length with the same state
log_interval = 20
