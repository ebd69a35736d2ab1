include("paper_120m.py")
model = "gated_deltanet"
n_head = 6  # heads of 64 and 128: a state about as large as Longhorn's (8% smaller)
mlp_multiple = 736  # SwiGLU 2208 wide, to match Longhorn's parameter count
