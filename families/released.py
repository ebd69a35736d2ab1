"""RWKV, RetNet and GLA as the paper's authors released them. The differences from mixers.py and model.py:

    rwkv_released     a learned position is added to the embedding, which gives Table 1's parameter count to the digit
    retnet_released   an eps of 1e-6 in all norms, every weight N(0, 0.02)
    gla_released      k / sqrt(n) too, LayerNorm per head without parameters, maps to the residual stream N(0, 0.02)
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from initialisation import normal, to_draw
from kernels.linear_attention import gated_linear_attention
from mixers import Retention, RetNetGLU, RWKVChannelMix, RWKVTimeMix
from model import FAMILIES, GLA, NORMS, POSITIONS, RMSNorm, SwiGLU


class CountingTimeMix(RWKVTimeMix):
    """RWKV's time mix, with a state that also counts the tokens so far, for LearnedPositions."""

    def forward(self, x, state=None):
        if state is None:
            return super().forward(x)
        *state, seen = state
        y, state = super().forward(x, state)
        return y, (*state, seen + x.shape[1])

    def initial_state(self, batch_size, device):
        seen = torch.zeros(batch_size, dtype=torch.int64, device=device)
        return (*super().initial_state(batch_size, device), seen)


class LearnedPositions(nn.Embedding):
    """Positions (1, T, n_embd) to add to the embeddings of T tokens that follow the tokens in the state."""

    def __init__(self, config):
        super().__init__(config.block_size, config.n_embd)
        to_draw(self.weight, normal(0.02))

    def forward(self, T, state=None):
        """Raises ValueError beyond block_size."""
        past = 0 if state is None else int(state[0][0][-1][0])  # counted by the first layer's first branch
        if past + T > len(self.weight):
            raise ValueError(f"rwkv_released has positions up to block_size {len(self.weight)}, not {past + T}: use "
                             "model=rwkv")
        return self.weight[None, past:past + T]


class UnscaledChannelMix(RWKVChannelMix):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.value.weight.start = normal(0.02)


class PlainRetention(Retention):
    norm_eps = 1e-6

    def __init__(self, config, layer):
        super().__init__(config, layer)
        for module in (self.qk, self.vg, self.out_proj):
            module.weight.start = normal(0.02)


class PlainRetNetGLU(RetNetGLU):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.w2.weight.start = normal(0.02)


class ShortKeyGLA(GLA):
    """GLA with keys k / sqrt(n); the norm cancels this scale up to its eps."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.out_proj.weight.start = normal(0.02)

    def forward(self, x, state=None):
        heads = lambda a: a.unflatten(-1, (self.H, -1))
        q, k = (heads(a * self.n**-0.5) for a in self.qk(x).chunk(2, -1))  # (B, T, H, n) each
        log_a = F.logsigmoid(self.forget2(self.forget1(x))) / 16  # (B, T, d/2)
        o, S = gated_linear_attention(q, k, heads(self.v(x)), heads(log_a), state, backend=self.backend)
        o = F.layer_norm(o, o.shape[-1:])  # (B, T, H, 2 n)
        y = self.out_proj(F.silu(self.gate(x)) * o.flatten(2))
        return y, None if state is None else S


class UnscaledSwiGLU(SwiGLU):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.w2.weight.start = normal(0.02)


FAMILIES |= {
    "rwkv_released": [CountingTimeMix, UnscaledChannelMix],
    "retnet_released": [PlainRetention, PlainRetNetGLU],
    "gla_released": [ShortKeyGLA, UnscaledSwiGLU],
}
NORMS |= {"rwkv_released": NORMS["rwkv"], "retnet_released": lambda config: RMSNorm(config, 1e-6)}
POSITIONS["rwkv_released"] = LearnedPositions
