# 1.46M parameters; Longhorn has 1.49M.
include("laptop.py")
model = "retnet"
