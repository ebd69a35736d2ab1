# DeiT's sizes, weight decay and drop path (Touvron et al. 2021).
include("imagenet.py")
model = "vit"
n_layer = 12
n_head = 3
weight_decay = 0.05
drop_path = 0.1
