# The default of `make train`: longhorn_laptop.py with tokens of three bytes, so that a step reads three times as much
# text.
# 3 layers of two Longhorn blocks, 1.83M parameters.
include("longhorn_laptop.py")
dataset = "pystdlib_bpe"  # prepared by data/pystdlib_bpe/prepare.py
schedule = "wsd"
