include("paper_120m.py")
model = "mesa"
mlp_multiple = 736  # SwiGLU 2208 wide, to match Longhorn's parameter count
