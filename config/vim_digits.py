include("digits.py")
model = "vim"
n_embd = 60  # 149 thousand parameters, as ViL with 64
