include("cifar.py")
model = "vil"
