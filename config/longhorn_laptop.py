# 3 layers of two Longhorn blocks, 1.49M parameters; of tokens in place of bytes: longhorn_bpe.py.
include("laptop.py")
model = "longhorn"
