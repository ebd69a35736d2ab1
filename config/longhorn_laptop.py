# 3 layers of two Longhorn blocks on bytes, 1.49M parameters; on learned tokens: longhorn_bpe.py.
include("laptop.py")
model = "longhorn"
