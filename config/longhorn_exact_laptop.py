# Eq. 6's whole transition instead of its diagonal: what differs from longhorn_laptop.py is what the approximation costs.
include("laptop.py")
model = "longhorn_exact"
