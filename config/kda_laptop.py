# 1.46M parameters to Longhorn's 1.49M.
include("laptop.py")
model = "kda"
n_head = 6  # heads of 32: gates of that rank
