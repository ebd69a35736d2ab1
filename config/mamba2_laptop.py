# 1.47M parameters to Longhorn's 1.49M.
include("laptop.py")
model = "mamba2"
d_state = 4  # 32 numbers per channel: as many parameters as Longhorn
