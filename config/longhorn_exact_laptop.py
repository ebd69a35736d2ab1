# The full transition of Eq. 6: any difference from longhorn_laptop.py is due to the diagonal approximation.
include("laptop.py")
model = "longhorn_exact"
