# 1.46M parameters to Longhorn's 1.49M.
include("laptop.py")
model = "retnet"
