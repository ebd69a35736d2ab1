# 1.46M parameters; Longhorn has 1.49M.
include("laptop.py")
model = "kda"
n_head = 6  # heads of 32, so gates of rank 32
