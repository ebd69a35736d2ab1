include("paper_1b3.py")
model = "gla"
