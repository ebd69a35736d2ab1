include("paper_1b3.py")
model = "gated_deltanet"
n_head = 8  # heads of 128 and 256
