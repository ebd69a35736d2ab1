include("paper_350m.py")
model = "mesa"
mlp_multiple = 736  # SwiGLU 2944 wide, to match Longhorn's parameter count
