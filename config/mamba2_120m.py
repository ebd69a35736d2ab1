include("paper_120m.py")
model = "mamba2"
