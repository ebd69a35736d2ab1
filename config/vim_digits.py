include("digits.py")
model = "vim"
n_embd = 62  # 133 thousand parameters, as ViL with 64
