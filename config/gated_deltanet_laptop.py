# 1.50M parameters to Longhorn's 1.49M.
include("laptop.py")
model = "gated_deltanet"
mlp_multiple = 192  # SwiGLU 576 wide: as many parameters as Longhorn
