include("vil_small.py")
model = "vim"
