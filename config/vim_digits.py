include("digits.py")
model = "vim"
n_embd = 62  # 133 thousand parameters, like ViL with 64
