# CIFAR-10 from the hub: meant for 20 minutes on one GPU, not run yet.
task = "images"
dataset = "hf:uoft-cs/cifar10"
image_size = 32
patch_size = 4
n_layer = 12
n_embd = 192
n_head = 6
workers = 8

batch_images = 256
micro_batch_size = 256
epochs = 100
learning_rate = 1e-3  # peak
min_lr = 1e-5
beta2 = 0.999
weight_decay = 0.1

min_crop = 0.4
mirror = True
rand_augment = 5
smoothing = 0.1
drop_path = 0.1

eval_interval = 1000
log_interval = 50
