include("paper_340m.py")
model = "gated_deltanet"
n_head = 8  # heads of 64 and 128
