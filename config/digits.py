# scikit-learn's handwritten digits, 8 x 8 pixels: a minute on one quiet CPU core. The model is ViL unless a file that
# includes this one changes it.
task = "images"
dataset = "digits"
channels = 1
image_size = 8
patch_size = 2
n_layer = 4
n_embd = 64
n_head = 4
d_state = 8

batch_images = 64
micro_batch_size = 64
epochs = 25
learning_rate = 2e-3  # peak
min_lr = 0.0
beta2 = 0.999
weight_decay = 0.05
# There are only 1,347 images: without the next two settings ViL's accuracy is two points lower. Training crops are
# zoomed in, so validation zooms in too, by the usual fraction for ImageNet.
min_crop = 0.5
smoothing = 0.1
eval_crop = 0.875

eval_interval = 100
log_interval = 10
