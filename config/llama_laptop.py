# 1.49M parameters, as Longhorn. It validates at 256, the length it was trained at: to compare, give both that length.
include("laptop.py")
model = "llama"
mlp_multiple = 192  # SwiGLU 576 wide: as many parameters as Longhorn
eval_block_size = 256
