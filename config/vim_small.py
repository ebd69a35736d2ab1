include("imagenet.py")
model = "vim"
n_embd = 384
batch_images = 512
warmup_iters = 5 * 2502
eval_interval = 2502
weight_decay = 0.05
drop_path = 0.05
