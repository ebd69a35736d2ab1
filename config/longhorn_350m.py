include("paper_350m.py")
model = "longhorn"
