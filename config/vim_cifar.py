include("cifar.py")
model = "vim"
n_embd = 188  # 3.28M parameters, like ViL with 192
