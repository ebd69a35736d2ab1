# 1.50M parameters; Longhorn, which has no A, has 1.49M.
include("laptop.py")
model = "mamba"
