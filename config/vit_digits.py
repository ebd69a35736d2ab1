# Two residual branches per layer: 3 layers of width 60 have 134 thousand parameters, like ViL and ViM.
include("digits.py")
model = "vit"
n_layer = 3
n_embd = 60
n_head = 3
