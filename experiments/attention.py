"""Plain attention for the ViT and the recall benchmark; LLaMA's attention is in model.py."""

import torch.nn as nn
import torch.nn.functional as F

from initialisation import constant, linear, normal, to_residual
from model import split_heads


class Attention(nn.Module):
    """softmax(q k^T / sqrt(n)) v, with biases and without positions. A subclass may make it causal or add dropout."""

    operator = "F.scaled_dot_product_attention"
    causal = False
    dropout = 0.0  # on the attention weights, in training

    def __init__(self, config, layer):
        super().__init__()
        self.n = split_heads(config)
        d = config.n_embd
        self.qkv = linear(d, 3 * d, start=normal(0.02), bias=constant(0.0), parts=[d, d, d])
        self.out_proj = linear(d, d, start=to_residual(config), bias=constant(0.0))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.n)).permute(2, 0, 3, 1, 4)  # (B, H, T, n) each
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def flops(self, T):
        """FLOPs per token of q k^T and the weighted sum."""
        keys = (T + 1) / 2 if self.causal else T
        return 4 * self.out_proj.in_features * keys
