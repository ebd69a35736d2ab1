# Two residual branches per layer: with 3 layers of 60, 134 thousand parameters, as ViL and ViM.
include("digits.py")
model = "vit"
n_layer = 3
n_embd = 60
n_head = 3
