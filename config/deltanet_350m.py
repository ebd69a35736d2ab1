include("paper_350m.py")
model = "deltanet"
mlp_multiple = 736  # SwiGLU 2944 wide: as many parameters as Longhorn
