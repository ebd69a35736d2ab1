# ImageNet-1K with Vision Mamba's recipe for its smallest model (Zhu et al. 2024): 300 epochs, batches of 1024. Pass the
# unpacked images as --dataset=FOLDER, or log in to the hub for the dataset below.
task = "images"
dataset = "hf:ILSVRC/imagenet-1k"
image_size = 224
patch_size = 16
n_layer = 24
n_embd = 192
workers = 12

batch_images = 1024
micro_batch_size = 128
epochs = 300
learning_rate = 1e-3  # peak
min_lr = 1e-5
warmup_iters = 5 * 1251  # 5 epochs of 1,281,167 images
weight_decay = 0.1
beta2 = 0.999
grad_clip = 0.0  # no clipping

min_crop = 0.08
mirror = True
rand_augment = 9
mixup = 0.5  # blends with a uniform weight; timm draws it from Beta(0.8, 0.8)
cutmix = 0.5
erasing = 0.25
repeats = 3
smoothing = 0.1
eval_crop = 0.875
ema = 0.99996

eval_interval = 1251
log_interval = 50
