include("paper_350m.py")
model = "kda"
