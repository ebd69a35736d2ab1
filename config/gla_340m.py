include("paper_340m.py")
model = "gla"
