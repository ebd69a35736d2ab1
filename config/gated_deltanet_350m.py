include("paper_350m.py")
model = "gated_deltanet"
n_head = 8  # heads of 64 and 128: a state as large as Longhorn's
mlp_multiple = 736  # SwiGLU 2944 wide, to match Longhorn's parameter count
