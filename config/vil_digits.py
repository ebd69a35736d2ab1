include("digits.py")
model = "vil"
