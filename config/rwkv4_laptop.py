# 1.49M parameters, as Longhorn.
include("laptop.py")
model = "rwkv4"
