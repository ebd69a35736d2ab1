# The whole transition of Eq. 6: what differs from longhorn_laptop.py is the cost of the diagonal approximation.
include("laptop.py")
model = "longhorn_exact"
