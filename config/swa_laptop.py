# 1.49M parameters, as Longhorn; a window of 128.
include("laptop.py")
model = "swa"
mlp_multiple = 192  # SwiGLU 576 wide: as many parameters as Longhorn
