# 1.49M parameters, as Longhorn.
include("laptop.py")
model = "rwkv"
mlp_multiple = 224  # channel mix 672 wide: as many parameters as Longhorn
