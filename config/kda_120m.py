include("paper_120m.py")
model = "kda"
