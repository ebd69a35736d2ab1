# Five minutes on two CPU cores, on bytes of the Python standard library. The model is Longhorn unless a file that
# includes this one changes it. Settings were tuned for Longhorn and not for the other families.
# Many small steps with short windows learn the most in so little time.
n_layer = 3
n_head = 3
n_embd = 192
d_state = 8  # half the scan's work, and no worse in such a short run
block_size = 256
dataset = "pystdlib"

batch_tokens = 1024
micro_batch_size = 4
max_iters = 4600
learning_rate = 1.5e-3  # peak learning rate
min_lr = 0.0
beta2 = 0.99

eval_interval = 1000
eval_tokens = 65536
eval_block_size = 1024  # validation windows are four times as long as training windows
log_interval = 20
