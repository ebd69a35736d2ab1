include("paper_350m.py")
model = "mamba2"
