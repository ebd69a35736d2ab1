# 1.49M parameters, like Longhorn; a window of 128.
include("laptop.py")
model = "swa"
mlp_multiple = 192  # SwiGLU 576 wide, to match Longhorn's parameter count
