# The default of `make train`: 3 layers of two Longhorn blocks, 1.49M parameters.
include("laptop.py")
model = "longhorn"
