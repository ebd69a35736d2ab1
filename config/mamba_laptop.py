# 1.50M parameters to Longhorn's 1.49M, which has no A.
include("laptop.py")
model = "mamba"
