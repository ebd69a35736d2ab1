# 1.50M parameters; Longhorn has 1.49M.
include("laptop.py")
model = "deltanet"
mlp_multiple = 192  # SwiGLU 576 wide, to match Longhorn's parameter count
