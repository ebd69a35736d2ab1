# Train as in the code that the authors released; give this file after a 120M or 350M config:
#     python train.py config/gla_350m.py config/as_released.py --out_dir=out/gla_350m_as_released
as_released = True  # RWKV, RetNet and GLA; weight decay on all matrices; windows drawn at random with replacement
batch_tokens = 491520
max_iters = 5001
min_lr = 6e-5  # for both sizes
