include("imagenet.py")
model = "vim"
