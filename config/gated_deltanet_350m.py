include("paper_350m.py")
model = "gated_deltanet"
n_head = 8  # heads of 64 and 128: a state about as large as Longhorn's (8% smaller)
mlp_multiple = 736  # SwiGLU 2944 wide, to match Longhorn's parameter count
