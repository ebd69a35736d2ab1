# nanoGPT's first example under its own name, but with Longhorn, for two epochs.
# First run: python data/shakespeare_char/prepare.py
include("longhorn_laptop.py")
dataset = "shakespeare_char"
max_iters = 2000
eval_interval = 250
eval_block_size = 0  # the same as in training
