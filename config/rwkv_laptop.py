# 1.49M parameters, like Longhorn.
include("laptop.py")
model = "rwkv"
mlp_multiple = 224  # channel mix 672 wide, to match Longhorn's parameter count
