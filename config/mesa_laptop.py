# 1.50M parameters to Longhorn's 1.49M.
include("laptop.py")
model = "mesa"
mlp_multiple = 192  # SwiGLU 576 wide: as many parameters as Longhorn
