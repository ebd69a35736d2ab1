include("deit_tiny.py")
n_embd = 384
n_head = 6
