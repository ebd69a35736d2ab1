# 1.47M parameters; Longhorn has 1.49M.
include("laptop.py")
model = "mamba2"
d_state = 4  # 32 numbers per channel, to match Longhorn's parameter count
