# 1.49M parameters, like Longhorn. It validates at its training length of 256: compare models at that length.
include("laptop.py")
model = "llama"
mlp_multiple = 192  # SwiGLU 576 wide, to match Longhorn's parameter count
eval_block_size = 256
