include("cifar.py")
model = "vit"
n_layer = 7
n_embd = 196
n_head = 7
