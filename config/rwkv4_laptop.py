# 1.49M parameters, like Longhorn.
include("laptop.py")
model = "rwkv4"
