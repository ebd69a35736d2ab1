include("imagenet.py")
model = "vil"
