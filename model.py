"""The families of the paper on one skeleton: embedding, layers of residual branches, norm, tied head.

A layer is a list of branches, h = h + mixer(norm(h)), and a family is that list (FAMILIES, below the mixers): LLaMA's
is [Attention, SwiGLU]; Longhorn has no MLP and uses two Longhorn branches where LLaMA has those two. To add a family:
one class with a `forward`, one row in FAMILIES, one file in config/. The families of Table 1 and sliding windows are
here; RWKV-4, the newer ones and what several families share are in mixers.py.

A branch also takes and returns its state. So the model that trains on whole sequences generates token by token, and
reads a long text in chunks, with the same code.

    paper       here           shape
    d           n_embd         width of the residual stream
    -           d_inner        2 d, width of the scan
    m           d_state, N     state size per channel
    x_t         x              (B, T, d_inner)
    k_t, q_t    k, q           (B, T, N)
    W_beta x_t  dt             (B, T, d_inner), through rank dt_rank
    S_t         h              (B, d_inner, N), float32
    -           H, n           heads, and channels per head of q and k (of v too, where both are equally wide)
    S_t         S              (B, H, n, channels of v per head), float32: the state of families with heads

`python model.py` prints parameters, FLOPs and state sizes beside the paper's Table 1.
"""

import itertools
import math
import re
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import build
from kernels.linear_attention import gated_linear_attention, retention
from kernels.ops import attention, causal_conv1d, conv_state, documents, linear_cross_entropy, rms_norm
from kernels.scan import longhorn_scan, selective_scan
from mixers import (
    KDA,
    STEPS,
    DeltaNet,
    GatedDeltaNet,
    Mamba2,
    Mesa,
    RWKV4TimeMix,
    append_to_cache,
    dense,
    head_norm,
    ramp,
    rwkv_mu,
    split_heads,
    to_residual,
    token_shift,
    unscaled_as_released,
    xavier,
)


@dataclass
class ModelConfig:
    # --- model
    model: str = "longhorn"  # family: longhorn, mamba, llama, gla, retnet, rwkv or another key of FAMILIES in model.py
    pattern: str = ""  # families of the layers, repeated to n_layer, as longhorn*3,llama; empty: model in every layer
    n_layer: int = 12  # layers; those of the paper's families have two residual branches each
    n_head: int = 12  # heads (families with heads)
    n_embd: int = 768  # width of the residual stream
    block_size: int = 1024  # tokens of context in training
    vocab_size: int = 50304  # GPT-2's 50257 padded to a multiple of 64
    d_state: int = 16  # state size per channel, N
    d_conv: int = 4  # width of the short causal convolution
    expand: int = 2  # width of the scan over n_embd
    dt_rank: int = 0  # rank of the step size's projection; 0: n_embd / 16 rounded up
    mlp_multiple: int = 256  # hidden widths of SwiGLU and of RWKV's channel mix are rounded up to a multiple of it
    step: Literal["explicit", "implicit", "exact"] = "explicit"  # of the delta rule; see STEPS in mixers.py
    normalize_keys: bool = True  # divide the keys of the delta rule by their length
    window: int = 0  # tokens that swa sees; 0: half of block_size
    as_released: bool = False  # RWKV, RetNet, GLA, weight decay and windows as in the code of the paper
    documents: Literal["join", "pack"] = "join"  # a window's: read through, or each from an empty state (pack)
    end_of_text: int = -1  # with pack: the token that ends a document; -1: the dataset's
    backend: str = ""  # of the operators: torch (plain PyTorch, to edit), cpu, cuda, fused; empty: the fastest

    @property
    def families(self):
        """The family of every layer. Raises ValueError, one line, for a pattern that cannot be read."""
        pattern = self.pattern or self.model
        parts = [re.fullmatch(r"\s*(\w+?)\s*(?:\*\s*([1-9]\d{0,3}))?\s*", part) for part in pattern.split(",")]
        if not all(parts):
            raise ValueError(f"pattern {pattern!r}: give names of families, as longhorn*3,llama")
        names = [part[1] for part in parts for _ in range(int(part[2] or 1))]
        for name in names:
            if name not in FAMILIES:
                raise ValueError(f"unknown model {name!r}: choose one of {', '.join(FAMILIES)}")
        return list(itertools.islice(itertools.cycle(names), self.n_layer))

    @property
    def n_branches(self):
        """Residual branches of the whole model: the more there are, the smaller each begins (see to_residual)."""
        return sum(len(FAMILIES[family]) for family in self.families)


MIX_TOKENS = (None, *build.BODIES)  # what a mixer's `operator` may be for --documents=pack
BACKENDS = ("", "torch", "cpu", "cuda", "fused")

# -------------------------------------------------------------------------------------------------------------- mixers
# A mixer is an nn.Module, made of (config, layer's index). Only `forward` is needed; Branch has the other defaults.
#   forward(x, state=None) -> (y, state)  x, y (B, T, n_embd); state: tensors (B, ...); None: start empty, keep none
#   initial_state(batch_size, device)     what `forward` takes before the first token
#   init_table(config)                    parameter name -> (kind, scale), see LM.init_table
#   mixing_flops(T)                       forward FLOPs per token beside its linear maps, averaged over T positions
#   state_size(T)                         numbers kept per sequence after T tokens
#   projections()                         weight of fused linear maps -> rows of each, for Muon
#   operator                              the operator that mixes the tokens, a key of kernels.build.BODIES


class ScanBlock(nn.Module):
    """The block of Mamba and Longhorn, which differ in the scan alone (Algorithm 1, Figure 3; Gu & Dao 2023).

        x, z = split(W_in u)
        x = silu(causal_conv(x))
        r, k, q = split(W_x x);  dt = W_dt r                      Mamba calls k, q: B, C
        y = scan(x, dt, k, q, z)
        out = W_out y
    """

    def __init__(self, config, layer):
        super().__init__()
        d, self.N, self.W = config.n_embd, config.d_state, config.d_conv
        self.d_inner, self.R = config.expand * d, config.dt_rank or math.ceil(d / 16)
        self.backend = config.backend
        self.in_proj = nn.Linear(d, 2 * self.d_inner, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(self.d_inner, self.W))
        self.conv_bias = nn.Parameter(torch.empty(self.d_inner))
        self.x_proj = nn.Linear(self.d_inner, self.R + 2 * self.N, bias=False)
        self.dt_proj = nn.Linear(self.R, self.d_inner, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(self.d_inner))
        self.D = nn.Parameter(torch.empty(self.d_inner))
        self.out_proj = nn.Linear(self.d_inner, d, bias=False)

    def forward(self, u, state=None):
        x_before, h0 = (None, None) if state is None else state
        x, z = self.in_proj(u).chunk(2, -1)  # (B, T, d_inner) each, views
        c, dt, k, q = self.scanned(x, x_before)
        y, hT = self.scan(c, dt, k, q, z, h0)  # (B, T, d_inner), (B, d_inner, N)
        y = self.out_proj(y)
        return y, None if state is None else (conv_state(x, x_before, self.W), hT)

    def scanned(self, x, x_before=None, reverse=False):
        """What the scan reads beside z: x behind the convolution, dt, k, q. Image models read in reverse too."""
        c = causal_conv1d(x, self.conv_weight, self.conv_bias, x_before, reverse=reverse, backend=self.backend)
        r, k, q = self.x_proj(c).split([self.R, self.N, self.N], -1)  # (B, T, R), (B, T, N), (B, T, N)
        return c, self.dt_proj(r), k, q  # c, dt (B, T, d_inner)

    def initial_state(self, batch_size, device):
        return (torch.zeros(batch_size, self.W - 1, self.d_inner, device=device),
                torch.zeros(batch_size, self.d_inner, self.N, device=device))

    def init_table(self, config):
        return {"in_proj.weight": dense(config.n_embd), "conv_weight": dense(self.W), "conv_bias": dense(self.W),
                "x_proj.weight": dense(self.d_inner), "dt_proj.weight": dense(self.R), "dt_bias": ("constant", 0.0),
                "D": ("constant", 1.0), "out_proj.weight": ("uniform", (self.d_inner * config.n_branches) ** -0.5)}

    def projections(self):
        return {"in_proj.weight": [self.d_inner, self.d_inner], "x_proj.weight": [self.R, self.N, self.N]}

    def mixing_flops(self, T):
        # per channel and state: eps k (1), x - k S (2), S += (2), S q (2); Mamba: delta A (1), exp (1), its product
        # (1), S += (2), S q (2); per channel: step size, skip and gate (8), the convolution
        return self.d_inner * (7 * self.N + 8 + 2 * self.W)


class Longhorn(ScanBlock):
    """S_ij = (1 - eps_i k_j^2) S_ij + eps_i x_i k_j (Eq. 7), eps = b / (1 + b |k|^2), b = sigmoid(dt + dt_bias)."""

    operator = "longhorn_scan"

    def scan(self, x, dt, k, q, z, h0, reverse=False):
        return longhorn_scan(x, dt, k, q, self.D, z, self.dt_bias, h0, return_state=True, reverse=reverse,
                             backend=self.backend)


class LonghornExact(Longhorn):
    """Longhorn without the diagonal approximation: S_i = (I - eps_i k k^T) S_i + eps_i x_i k per channel i (Eq. 6)."""

    def scan(self, x, dt, k, q, z, h0, reverse=False):
        return longhorn_scan(x, dt, k, q, self.D, z, self.dt_bias, h0, return_state=True, exact=True,
                             reverse=reverse, backend=self.backend)

    def mixing_flops(self, T):
        # k S summed over the states (2 per state, as k S alone), then x - k S (1)
        return super().mixing_flops(T) + self.d_inner


class Mamba(ScanBlock):
    """S_ij = exp(d_i A_ij) S_ij + d_i x_i k_j, d = softplus(dt + dt_bias), A = -exp(A_log) (Gu & Dao 2023)."""

    operator = "selective_scan"

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.A_log = nn.Parameter(torch.empty(self.d_inner, self.N))

    def scan(self, x, dt, k, q, z, h0, reverse=False):
        A = -self.A_log.exp()  # (d_inner, N)
        keep = h0 is not None  # mamba-ssm's kernel has no gradient of the last state
        out = selective_scan(x, dt, A, k, q, self.D, z, self.dt_bias, delta_softplus=True, return_last_state=keep,
                             h0=h0, reverse=reverse, backend=self.backend)
        return out if keep else (out, None)

    def init_table(self, config):
        A_log = torch.arange(1, self.N + 1, dtype=torch.float64).log().expand(self.d_inner, self.N)
        return {**super().init_table(config), "A_log": ("tensor", A_log), "dt_bias": ("step size", (1e-3, 0.1))}


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions of base 10000 (LLaMA): softmax(q k^T / sqrt(n)) v."""

    operator = "attention"

    def __init__(self, config, layer):
        super().__init__()
        d, self.H, self.n = config.n_embd, config.n_head, split_heads(config, multiple=2)  # rotary pairs
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.out_proj = nn.Linear(d, d, bias=False)
        self.backend = config.backend

    def forward(self, x, state=None):
        B, T, d = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.H, self.n).permute(2, 0, 3, 1, 4)  # (B, H, T, n) each
        past = 0 if state is None else state[0].shape[2]
        angle = rotary_angles(past, past + T, self.n, x.device)  # (T, n/2), float32
        q, k = (apply_rotary(a, angle.cos(), angle.sin()) for a in (q, k))
        if state is not None:
            k, v = state = append_to_cache(state, k, v)
        y = attention(q, k, v, backend=self.backend)  # (B, H, T, n): softmax(q k^T / sqrt(n)) v over the past
        return self.out_proj(y.transpose(1, 2).reshape(B, T, d)), state

    def initial_state(self, batch_size, device):
        empty = torch.zeros(batch_size, self.H, 0, self.n, device=device)
        return empty, empty

    def init_table(self, config):
        return {"qkv.weight": ("normal", 0.02), "out_proj.weight": to_residual(config)}

    def projections(self):
        return {"qkv.weight": [self.qkv.in_features] * 3}

    def mixing_flops(self, T):
        return 4 * self.out_proj.in_features * (T + 1) / 2  # q k^T and the weighted sum over the visible tokens

    def state_size(self, T):
        return 2 * T * self.out_proj.in_features  # the cache


def apply_rotary(x, cos, sin):
    """RoPE on (B, H, T, n): the pairs (x_i, x_{i + n/2}) are rotated by position times frequency i."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)  # float32 until here, whatever x is


def rotary_angles(first, last, n, device):
    """Angles (last - first, n / 2) of the positions from `first` on, base 10000, float32."""
    frequency = 10000.0 ** -(torch.arange(0, n, 2, device=device) / n)
    return torch.arange(first, last, device=device)[:, None] * frequency


class SlidingWindow(Attention):
    """LLaMA's attention to the last `window` tokens, itself among them; 0: half of block_size. Its cache holds as many.

    Only differences of rotary angles matter, so the cache holds keys before their rotation, and the oldest in it is at
    position 0: the angles stay small however long the text is.
    """

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.window = config.window or max(1, config.block_size // 2)

    def forward(self, x, state=None):
        B, T, d = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.H, self.n).permute(2, 0, 3, 1, 4)  # (B, H, T, n) each
        if state is not None:
            k, v = (torch.cat([past.to(a.dtype), a], 2) for past, a in zip(state, (k, v), strict=True))
            state = tuple(a[:, :, -self.window:].clone() for a in (k, v))  # a view would keep all of them
        S = k.shape[2]
        angle = rotary_angles(0, S, self.n, x.device)  # (S, n/2)
        q, k = apply_rotary(q, angle[S - T:].cos(), angle[S - T:].sin()), apply_rotary(k, angle.cos(), angle.sin())
        y = attention(q, k, v, self.window, backend=self.backend)  # (B, H, T, n)
        return self.out_proj(y.transpose(1, 2).reshape(B, T, d)), state

    def mixing_flops(self, T):
        w = min(T, self.window)  # token t of the first w sees t, all others w
        return 4 * self.out_proj.in_features * (w * (w + 1) / 2 + (T - w) * w) / T

    def state_size(self, T):
        return super().state_size(min(T, self.window))


class SwiGLU(nn.Module):
    """W_2 (silu(W_1 x) * W_3 x), hidden width 8 d / 3 rounded up to a multiple of mlp_multiple (LLaMA)."""

    operator = None  # it mixes channels, not tokens
    activation = staticmethod(F.silu)

    def __init__(self, config, layer):
        super().__init__()
        hidden = self.hidden(config)
        self.w1 = nn.Linear(config.n_embd, hidden, bias=False)
        self.w3 = nn.Linear(config.n_embd, hidden, bias=False)
        self.w2 = nn.Linear(hidden, config.n_embd, bias=False)

    def hidden(self, config):
        return round_up(8 * config.n_embd / 3, config.mlp_multiple)

    def forward(self, x, state=None):
        return self.w2(self.activation(self.w1(x)) * self.w3(x)), state

    def initial_state(self, batch_size, device):
        return ()

    def init_table(self, config):
        return {"w1.weight": ("normal", 0.02), "w3.weight": ("normal", 0.02), "w2.weight": to_residual(config)}


def round_up(width, multiple):
    return math.ceil(width / multiple) * multiple


class GLA(nn.Module):
    """Gated linear attention: a forget gate for every channel of the keys (Yang et al. 2023, Section 4).

        q, k = split(W_qk x);  v = W_v x;  a = sigmoid(W_2 W_1 x + b)^(1/16)       q, k, a: d / 2 wide, v: d; W_1 to 16
        S = diag(a) S' + k^T v;  o = (q / sqrt(n)) S
        out = W_o (silu(W_g x + b_g) * RMSNorm_head(o))

    As released: k / sqrt(n) too, and LayerNorm per head, without parameters.
    """

    operator = "gated_linear_attention"

    def __init__(self, config, layer):
        super().__init__()
        d, self.H, self.backend = config.n_embd, config.n_head, config.backend
        self.n = split_heads(config, multiple=2) // 2  # keys are half as wide as values
        self.as_released = config.as_released
        self.qk = nn.Linear(d, d, bias=False)
        self.v = nn.Linear(d, d, bias=False)
        self.forget1 = nn.Linear(d, 16, bias=False)
        self.forget2 = nn.Linear(16, d // 2)
        self.gate = nn.Linear(d, d)
        self.out_proj = nn.Linear(d, d, bias=False)

    def forward(self, x, state=None):
        heads = lambda a: a.unflatten(-1, (self.H, -1))
        q, k = self.qk(x).chunk(2, -1)  # (B, T, d/2) each
        log_a = F.logsigmoid(self.forget2(self.forget1(x))) / 16  # (B, T, d/2)
        k = k * self.n**-0.5 if self.as_released else k
        o, S = gated_linear_attention(heads(q * self.n**-0.5), heads(k), heads(self.v(x)), heads(log_a), state,
                                      backend=self.backend)  # (B, T, H, 2 n), (B, H, n, 2 n)
        o = F.layer_norm(o, o.shape[-1:]) if self.as_released else head_norm(o, backend=self.backend)
        y = self.out_proj(F.silu(self.gate(x)) * o.flatten(2))
        return y, None if state is None else S

    def initial_state(self, batch_size, device):
        return torch.zeros(batch_size, self.H, self.n, 2 * self.n, device=device)

    def init_table(self, config):
        d = config.n_embd
        return {"qk.weight": xavier(d // 2, d, 2**-2.5), "v.weight": ("normal", 0.02),
                "forget1.weight": xavier(16, d, 2**-2.5), "forget2.weight": xavier(d // 2, 16, 2**-2.5),
                "forget2.bias": ("constant", 0.0), "gate.weight": ("normal", 0.02), "gate.bias": ("constant", 0.0),
                "out_proj.weight": unscaled_as_released(config)}

    def projections(self):
        return {"qk.weight": [self.H * self.n] * 2}

    def mixing_flops(self, T):
        return 5 * self.H * self.n * 2 * self.n  # of the recurrence, per state: a S (1), k^T v added (2), q S (2)


class GLAMLP(SwiGLU):
    """SwiGLU; as released, its last map starts as large as the others."""

    def init_table(self, config):
        return {**super().init_table(config), "w2.weight": unscaled_as_released(config)}


class Retention(nn.Module):
    """RetNet's retention: a fixed decay per head, and rotated queries and keys (Sun et al. 2023, Eq. 5 to 8).

        q, k = split(W_qk x);  v, g = split(W_vg x)      v, g: int(1.8 d) wide, rounded down to a multiple of the heads
        q, k rotated at position t, channel pair i of m, by t * 10000^(-i/(m-1));  k / sqrt(n)
        S = gamma_h S' + k^T v,  gamma_h = 1 - 2^(-5-h);  o = q S
        out = W_o (silu(g) * RMSNorm_head(o))

    The published code also divides o by sums of absolute weights before the norm. The norm cancels that only where its
    eps is negligible beside mean(o^2): at 1e-5 the first token differs by 24%. Left out here. As released: an eps of
    1e-6 in all norms, every weight N(0, 0.02).
    """

    operator = "retention"

    def __init__(self, config, layer):
        super().__init__()
        d, self.H, self.n = config.n_embd, config.n_head, split_heads(config, multiple=2)  # rotary pairs
        self.n_v, self.backend = retnet_width(config) // self.H, config.backend
        self.norm_eps = retnet_eps(config)
        self.qk = nn.Linear(d, 2 * d, bias=False)
        self.vg = nn.Linear(d, 2 * self.H * self.n_v, bias=False)
        self.out_proj = nn.Linear(self.H * self.n_v, d, bias=False)

    def rotate(self, x, t):
        """Rotate the pairs (even, odd) of the last dimension of x (..., n) by t * frequency; t as x[..., 0]."""
        m = self.n // 2
        angle = t[..., None] * 10000.0 ** -(torch.arange(m, device=x.device) / max(1, m - 1))  # (..., m), float32
        cos, sin = angle.cos(), angle.sin()
        even, odd = x[..., ::2], x[..., 1::2]  # float32 by promotion: the state is rotated by T, so rounding would show
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2).to(x.dtype)

    def forward(self, x, state=None):
        T = x.shape[1]
        t = torch.arange(T, device=x.device)[:, None]  # (T, 1): the same for all heads
        qk = self.rotate(self.qk(x).unflatten(-1, (2 * self.H, self.n)), t)  # (B, T, 2 H, n)
        q, k = qk.chunk(2, 2)  # (B, T, H, n) each
        v, g = self.vg(x).chunk(2, -1)  # (B, T, H n_v) each
        log_decay = torch.log1p(-(2.0 ** (-5 - torch.arange(self.H, device=x.device))))  # (H,)
        v = v.unflatten(-1, (self.H, -1))  # (B, T, H, n_v)
        o, S = retention(q, k * self.n**-0.5, v, log_decay, state=state, backend=self.backend)
        y = self.out_proj(F.silu(g) * head_norm(o, eps=self.norm_eps, backend=self.backend).flatten(2))
        if state is None:
            return y, None
        # only differences of angles matter: rotate the keys in the state back by T, and the next token is at 0 again
        back = torch.full((), -T, device=x.device)
        return y, self.rotate(S.transpose(2, 3), back).transpose(2, 3)  # (B, H, n, n_v)

    def initial_state(self, batch_size, device):
        return torch.zeros(batch_size, self.H, self.n, self.n_v, device=device)

    def init_table(self, config):
        d, wide = config.n_embd, self.H * self.n_v
        if config.as_released:
            return dict.fromkeys(("qk.weight", "vg.weight", "out_proj.weight"), ("normal", 0.02))
        return {"qk.weight": xavier(d, d, 2**-2.5), "vg.weight": xavier(wide, d, 2**-2.5),
                "out_proj.weight": xavier(d, wide, 0.5)}

    def projections(self):
        return {"qk.weight": [self.H * self.n] * 2, "vg.weight": [self.H * self.n_v] * 2}

    def mixing_flops(self, T):
        return 5 * self.H * self.n * self.n_v  # of the recurrence, per state: gamma S (1), k^T v added (2), q S (2)


def retnet_width(config):
    return int(1.8 * config.n_embd) // config.n_head * config.n_head


def retnet_eps(config):
    return 1e-6 if config.as_released else 1e-5


class RetNetGLU(GLAMLP):
    """W_2 (gelu(W_1 x) * W_3 x), as wide as the values of the retention beside it: Table 1's RetNet."""

    activation = staticmethod(F.gelu)

    def hidden(self, config):
        return retnet_width(config)


class RWKVTimeMix(nn.Module):
    """RWKV's time mix as Table 1 counts it: 5.1, Eagle's with one decay and one bonus per head (Peng et al. 2024).

        x_c = x + (x_before - x) * mu_c  for c in r, k, v, g
        r, k, v = W_r x_r, W_k x_k, W_v x_v;  g = silu(W_g x_g);  w = exp(-exp(decay)) per head
        o = r (S' + u k^T v);  S = w S' + k^T v
        out = W_o (GroupNorm_head(o) * g)

    As released, the model adds a learned position to the embedding; the state of the first layer then counts tokens.
    """

    operator = "retention"

    def __init__(self, config, layer):
        super().__init__()
        d, self.H, self.layer = config.n_embd, config.n_head, layer
        self.counts = config.as_released and layer == 0
        self.n, self.backend = split_heads(config), config.backend
        self.mu = nn.Parameter(torch.empty(4, d))  # of r, k, v, g
        self.decay = nn.Parameter(torch.empty(self.H))
        self.bonus = nn.Parameter(torch.empty(self.H))
        self.receptance = nn.Linear(d, d, bias=False)
        self.key = nn.Linear(d, d, bias=False)
        self.value = nn.Linear(d, d, bias=False)
        self.gate = nn.Linear(d, d, bias=False)
        self.norm_weight = nn.Parameter(torch.empty(d))
        self.norm_bias = nn.Parameter(torch.empty(d))
        self.output = nn.Linear(d, d, bias=False)

    def forward(self, x, state=None):
        last, S, *seen = (None, None) if state is None else state
        change = token_shift(x, last) - x  # (B, T, d)
        r, k, v, g = (torch.addcmul(x, change, mu) for mu in self.mu.to(x.dtype))
        heads = lambda a: a.unflatten(-1, (self.H, self.n))  # (B, T, H, n)
        r, k, v = heads(self.receptance(r)), heads(self.key(k)), heads(self.value(v))
        o, S = retention(r, k, v, -self.decay.exp(), self.bonus, S, backend=self.backend)  # (B, T, H, n), (B, H, n, n)
        o = F.layer_norm(o, (self.n,), eps=64e-5).flatten(2)  # a group norm whose groups are the heads of one token
        o = torch.addcmul(self.norm_bias.to(o.dtype), o, self.norm_weight.to(o.dtype))
        y = self.output(o * F.silu(self.gate(g)))
        return y, None if state is None else (x[:, -1].clone(), S, *(n + x.shape[1] for n in seen))

    def initial_state(self, batch_size, device):
        return (torch.zeros(batch_size, self.H * self.n, device=device),
                torch.zeros(batch_size, self.H, self.n, self.n, device=device),
                *([torch.zeros(batch_size, dtype=torch.int64, device=device)] if self.counts else []))

    def init_table(self, config):
        a, mu = rwkv_mu(config, self.layer)
        h = ramp(self.H)
        linear = {f"{name}.weight": ("normal", 0.02) for name in ("receptance", "key", "value", "gate")}
        return {"mu": ("tensor", torch.stack([mu[c] for c in "rkvg"])),
                "decay": ("tensor", -6 + 5 * h ** (0.7 + 1.3 * a)), "bonus": ("tensor", a * (1 - h)),
                "norm_weight": ("constant", 1.0), "norm_bias": ("constant", 0.0), **linear,
                "output.weight": to_residual(config)}

    def mixing_flops(self, T):
        # per state: r S (2), w S (1), k^T v added (2); per channel: r . u k (3), times v, added to o (2)
        return self.H * self.n * (5 * self.n + 5)


class RWKVChannelMix(nn.Module):
    """sigmoid(W_r x_r) * W_v relu(W_k x_k)^2 of shifted tokens, hidden 3 d or the next multiple of mlp_multiple."""

    operator = None  # it mixes channels
    factor = 3

    def __init__(self, config, layer):
        super().__init__()
        d, self.layer = config.n_embd, layer
        hidden = round_up(self.factor * d, config.mlp_multiple)
        self.mu = nn.Parameter(torch.empty(2, d))  # of r, k
        self.receptance = nn.Linear(d, d, bias=False)
        self.key = nn.Linear(d, hidden, bias=False)
        self.value = nn.Linear(hidden, d, bias=False)

    def forward(self, x, state=None):
        change = token_shift(x, state) - x  # (B, T, d)
        r, k = (torch.addcmul(x, change, mu) for mu in self.mu.to(x.dtype))
        y = torch.sigmoid(self.receptance(r)) * self.value(F.relu(self.key(k)).square())
        return y, None if state is None else x[:, -1].clone()

    def initial_state(self, batch_size, device):
        return torch.zeros(batch_size, self.mu.shape[1], device=device)

    def init_table(self, config):
        _, mu = rwkv_mu(config, self.layer)
        return {"mu": ("tensor", torch.stack([mu["k"], mu["k"]])), "receptance.weight": ("normal", 0.02),
                "key.weight": ("normal", 0.02), "value.weight": unscaled_as_released(config)}


class RWKV4ChannelMix(RWKVChannelMix):
    """The same with a hidden width of 4 d."""

    factor = 4


FAMILIES = {
    "longhorn": [Longhorn, Longhorn],
    "mamba": [Mamba, Mamba],
    "llama": [Attention, SwiGLU],
    "gla": [GLA, GLAMLP],
    "retnet": [Retention, RetNetGLU],
    "rwkv": [RWKVTimeMix, RWKVChannelMix],
    # beside Table 1
    "rwkv4": [RWKV4TimeMix, RWKV4ChannelMix],
    "deltanet": [DeltaNet, SwiGLU],
    "gated_deltanet": [GatedDeltaNet, SwiGLU],
    "kda": [KDA, SwiGLU],
    "mesa": [Mesa, SwiGLU],
    "mamba2": [Mamba2, Mamba2],
    "swa": [SlidingWindow, SwiGLU],
    "longhorn_exact": [LonghornExact, LonghornExact],
}


# ------------------------------------------------------------------------------------------------------------ skeleton

class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, config, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_embd))
        self.eps, self.backend = eps, config.backend

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps, backend=self.backend)


# Of all others: RMSNorm. RWKV-4's norms have a bias in its published weights and in transformers, its reference here.
NORMS = {"rwkv": lambda config: nn.LayerNorm(config.n_embd, bias=False),
         "rwkv4": lambda config: nn.LayerNorm(config.n_embd),
         "retnet": lambda config: RMSNorm(config, retnet_eps(config))}
NORM_OF_EMBEDDING = {"rwkv4"}  # families that norm what enters the first layer


class Branch(nn.Module):
    """mixer(norm(h)), what one branch adds to the residual stream; and the defaults of all that a mixer leaves out."""

    def __init__(self, norm, mixer):
        super().__init__()
        self.norm, self.mixer = norm, mixer

    def forward(self, h, state=None):
        x = self.norm(h)
        out = self.mixer(x, state) if self.has_state else self.mixer(x)
        return out if isinstance(out, tuple) else (out, None)

    @property
    def has_state(self):
        return hasattr(self.mixer, "initial_state")

    def initial_state(self, batch_size, device):
        """Raises ValueError, one line, for a mixer that keeps no state."""
        if not self.has_state:
            raise ValueError(f"{where_is(type(self.mixer))} keeps no state, so it cannot sample or read in chunks: "
                             "write its initial_state(batch_size, device) and forward(x, state) -> (y, state)")
        return self.mixer.initial_state(batch_size, device)

    def init_table(self, config):
        """{} for a mixer without one: its parameters keep the values that its constructor gave them."""
        return self.mixer.init_table(config) if hasattr(self.mixer, "init_table") else {}

    def mixing_flops(self, T):
        return self.mixer.mixing_flops(T) if hasattr(self.mixer, "mixing_flops") else 0

    def state_size(self, T):
        """Counted from initial_state, unless the mixer says that it grows with T."""
        if hasattr(self.mixer, "state_size"):
            return self.mixer.state_size(T)
        return sum(a.numel() for a in tensors_of(self.mixer.initial_state(1, "meta"))) if self.has_state else 0


class Layer(nn.Module):
    """The branches of one layer, one after another. For parallel branches, add up what they make of the same h here."""

    def __init__(self, config, mixers, index, norm=RMSNorm):
        super().__init__()
        self.branches = nn.ModuleList(Branch(norm(config), mixer(config, index)) for mixer in mixers)

    def forward(self, h, state=None):
        after = []
        for branch, s in zip(self.branches, state or [None] * len(self.branches), strict=True):
            y, s = branch(h, s)
            h = h + y
            after.append(s)
        return h, after


def where_is(cls):
    """'Mamba (model.py)'."""
    return f"{cls.__name__} ({cls.__module__.replace('.', '/')}.py)"


def check_tokens(idx):
    if idx.dim() != 2 or idx.numel() == 0 or idx.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"idx must be (B, T) of int64, both at least 1, got {tuple(idx.shape)} {idx.dtype}")


def tensors_of(state):
    """The tensors of a state, in any nesting of lists and tuples."""
    if isinstance(state, (list, tuple)):
        return [a for part in state for a in tensors_of(part)]
    return [state] if isinstance(state, torch.Tensor) else []


class LM(nn.Module):
    """Language model of any family or pattern of families: `logits, loss = LM(config)(idx, targets)`.

    Raises ValueError for an unknown family or backend or sizes that do not fit together, RuntimeError for a backend
    that is not installed.
    """

    def __init__(self, config):
        super().__init__()
        for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "d_state", "d_conv", "expand",
                     "mlp_multiple"):
            most = 1024 if name == "n_layer" else 2**31 - 1
            if not 1 <= getattr(config, name) <= most:
                raise ValueError(f"{name} {getattr(config, name)} must be at least 1, and at most {most}")
        if config.dt_rank < 0:
            raise ValueError(f"dt_rank {config.dt_rank} must be at least 1, or 0 for n_embd / 16")
        if config.window < 0:
            raise ValueError(f"window {config.window} must be at least 1, or 0 for half of block_size")
        if config.step not in STEPS:
            raise ValueError(f"unknown step {config.step!r}: choose one of {', '.join(STEPS)}")
        if config.backend not in BACKENDS:
            raise ValueError(f"unknown backend {config.backend!r}: choose one of {', '.join(BACKENDS[1:])}, or none")
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(self.build_layers(config))
        families = config.families  # the first and the last layer's say which norms stand before and behind all layers
        norm = lambda family: NORMS.get(family, RMSNorm)(config)
        self.embed_norm = norm(families[0]) if families[0] in NORM_OF_EMBEDDING else nn.Identity()
        self.norm = norm(families[-1])
        self.positions = None
        if config.as_released and families[0] == "rwkv":
            self.positions = nn.Embedding(config.block_size, config.n_embd)
        self.init_weights()
        own = [branch.mixer for _, branch in self.branches() if getattr(branch.mixer, "operator", "") not in MIX_TOKENS]
        if config.documents == "pack" and own:
            raise ValueError(f"documents=pack: {where_is(type(own[0]))} names no operator of kernels/ that mixes its "
                             "tokens, and only those begin anew with a document: use --documents=join")
        if config.documents == "pack" and self.positions is not None:
            raise ValueError("documents=pack: RWKV as released counts positions from the window's first token: use "
                             "--documents=join")

    def build_layers(self, config):
        """The layers that the config's pattern names."""
        return [Layer(config, FAMILIES[name], i, NORMS.get(name, RMSNorm)) for i, name in enumerate(config.families)]

    def forward(self, idx, targets=None, state=None, last_only=False, loss_only=False):
        """Predict the next token at every position.

        Args:
            idx: (B, T) int64 tokens; targets: (B, T) int64, -1 where no loss is wanted.
            state: what `initial_state` or the call before returned; the tokens then continue that sequence.
            last_only: logits of the last position only, (B, 1, vocab_size): enough to go on generating.
            loss_only: None for the logits, which in 16 bits then take a sixth of the memory (`linear_cross_entropy`).

        Returns:
            (logits, loss), logits (B, T, vocab_size), loss the mean cross-entropy in nats or None without targets;
            with a state (logits, loss, state).

        Raises ValueError for an idx of another shape or dtype, for a state of another model or batch size, and for
        loss_only without targets.
        """
        check_tokens(idx)
        if loss_only and targets is None:
            raise ValueError("loss_only needs targets: give them, or leave loss_only out")
        keep = state is not None
        if keep and (len(state) != len(self.layers) or {len(a) for a in tensors_of(state) if a.dim() > 1} - {len(idx)}):
            raise ValueError(f"state is not one of {len(self.layers)} layers for a batch of {len(idx)}: start from "
                             f"initial_state({len(idx)}), or from what the call before returned")
        h, after = self.embed_norm(self.embed(idx)), []  # (B, T, n_embd)
        if self.positions is not None:
            h = h + self.position_embedding(idx.shape[1], state)
        pack = self.config.documents == "pack" and not keep  # a state belongs to one document
        with documents((idx == self.config.end_of_text).roll(1, 1) if pack else None):
            for layer, s in zip(self.layers, state if keep else [None] * len(self.layers), strict=True):
                h, s = layer(h, s)
                after.append(s)
        h = self.norm(h[:, -1:] if last_only else h)
        logits = loss = None
        if loss_only and self.config.backend != "torch" and not torch.compiler.is_compiling():
            loss = linear_cross_entropy(h, self.embed.weight, targets, ignore_index=-1)
        else:  # with loss_only too: torch.compile fuses these lines
            logits = F.linear(h, self.embed.weight)  # (B, T, vocab_size)
            if targets is not None:
                wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
                loss = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=-1)
        logits = None if loss_only else logits
        return (logits, loss, after) if keep else (logits, loss)

    def position_embedding(self, T, state):
        """(1, T, n_embd), of the T tokens after those that the state has read. Raises ValueError beyond block_size."""
        past = 0 if state is None else int(state[0][0][-1][0])
        if past + T > len(self.positions.weight):
            raise ValueError(f"RWKV as released has positions up to block_size {len(self.positions.weight)}, not "
                             f"{past + T}: leave as_released out")
        return self.positions.weight[None, past:past + T]

    def toy(self, backend):
        """A small model of the same code, for runtime/self_check.py: every family of this one once, in one layer."""
        families = list(dict.fromkeys(self.config.families))
        return type(self)(replace(self.config, pattern=",".join(families), n_layer=len(families), n_embd=32, n_head=2,
                                  vocab_size=64, mlp_multiple=16, block_size=128, window=24, backend=backend,
                                  documents="join", end_of_text=0))

    def toy_batch(self):
        """Tokens and targets (2, 66) for a toy."""
        idx = torch.randint(self.config.vocab_size, (2, 67))
        return idx[:, :-1], idx[:, 1:]

    def branches(self):
        """Every Branch with its name, in the order in which they run."""
        return [(name, module) for name, module in self.named_modules() if isinstance(module, Branch)]

    def initial_state(self, batch_size):
        """The state before the first token: per layer, per branch. Raises ValueError for a mixer that keeps none."""
        return [[branch.initial_state(batch_size, self.embed.weight.device) for branch in layer.branches]
                for layer in self.layers]

    @torch.no_grad()
    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, generator=None, chunk=4096):
        """Yield `max_new_tokens` tensors (B,) sampled after the prompt idx (B, T >= 1), from the recurrent state.

        The prompt is read in chunks; then time and memory per token are constant for recurrent families, and grow with
        the cache for attention. temperature 0 takes the most likely token; top_k and top_p cut the tail first.
        """
        check_tokens(idx)
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens {max_new_tokens} must be 0 or more")
        state = self.initial_state(idx.shape[0])
        for part in idx.split(chunk, 1):
            logits, _, state = self(part, state=state, last_only=True)
        for i in range(max_new_tokens):
            token = sample_token(logits[:, -1].float(), temperature, top_k, top_p, generator)
            yield token
            if i + 1 < max_new_tokens:
                logits, _, state = self(token[:, None], state=state, last_only=True)

    def generate(self, idx, max_new_tokens, **sampling):
        """idx (B, T) with `max_new_tokens` more tokens behind it; see `stream` for the sampling arguments."""
        return torch.cat([idx, *(token[:, None] for token in self.stream(idx, max_new_tokens, **sampling))], 1)

    # ---------------------------------------------------------------------------------- initialisation, bookkeeping

    def init_table(self):
        """Parameter name -> (kind, scale) of all that have an entry; the others keep what their constructor drew.

        'normal' standard deviation, 'uniform' bound, 'constant' value, 'tensor' values; 'step size' (low, high): the
        inverse softplus of a log-uniform number between them, so that softplus gives it back (Mamba's dt_bias); 'log'
        (low, high): the logarithm of a uniform number between them.
        """
        table = {"embed.weight": ("normal", 0.02)}
        if self.positions is not None:
            table["positions.weight"] = "normal", 0.02
        for name, _ in self.named_parameters():
            if name.split(".")[-2:-1] in (["norm"], ["embed_norm"]):
                table[name] = ("constant", 1.0 if name.endswith("weight") else 0.0)
        for name, branch in self.branches():
            own = branch.init_table(self.config)
            table.update({f"{name}.mixer.{parameter}": how for parameter, how in own.items()})
            missing = [n for n, _ in branch.mixer.named_parameters() if n not in own] if own else []
            if missing:
                raise ValueError(f"{where_is(type(branch.mixer))}: init_table does not say how {missing[0]!r} starts: "
                                 f"add {missing[0]!r}: (kind, scale), whose kinds are listed at LM.init_table")
        return table

    @torch.no_grad()
    def init_weights(self):
        """Draw every parameter that `init_table` names."""
        table = self.init_table()
        for name, p in self.named_parameters():
            kind, scale = table.get(name, (None, None))
            if kind == "normal":
                p.normal_(0.0, scale)
            elif kind == "uniform":
                p.uniform_(-scale, scale)
            elif kind == "tensor":
                p.copy_(scale)
            elif kind == "step size":
                step = p.uniform_(*map(math.log, scale)).exp().clamp(min=1e-4)
                p.copy_(step + torch.log(-torch.expm1(-step)))
            elif kind == "log":
                p.uniform_(*scale).clamp_(min=1e-4).log_()
            elif kind == "constant":
                p.fill_(scale)

    def decayed(self):
        """Names of the parameters that weight decay applies to: matrices of linear maps and the embedding; as
        released, all of two or more dimensions."""
        if self.config.as_released:
            return [name for name, p in self.named_parameters() if p.dim() >= 2]
        return [f"{name}.weight" for name, m in self.named_modules() if isinstance(m, (nn.Linear, nn.Embedding))]

    def computed_by(self):
        """The operators that mix the tokens, each with where it runs: 'longhorn_scan (cpu), attention (cpu)'."""
        device, words = self.embed.weight.device.type, {}
        for _, branch in self.branches():
            operator = getattr(branch.mixer, "operator", type(branch.mixer).__name__)
            if operator in build.BODIES:
                operator += f" ({build.choose(operator, self.config.backend, device)})"
            words[operator] = None
        return ", ".join(filter(None, words)) or "nothing"

    def defaults(self):
        """A line on each class of mixers that relies on defaults: what it leaves out, and what happens then."""
        what = {"init_table": "its parameters start as its constructor left them", "initial_state": "it cannot sample",
                "mixing_flops": "FLOPs count its linear maps only"}
        lines = []
        for cls in dict.fromkeys(type(branch.mixer) for _, branch in self.branches()):
            optional = {"mixing_flops"} if getattr(cls, "operator", "") is None else set()  # it has linear maps only
            missing = [name for name in what if not hasattr(cls, name) and name not in optional]
            said = [f"no {name}: {what[name]}" for name in missing]
            lines += [f"{where_is(cls)} has {'; '.join(said)}"] if said else []
        return lines

    def parameter_count(self):
        """Parameters by part: embedding (tied with the head), mixers by class, norms, and their total."""
        count = lambda module: sum(p.numel() for p in module.parameters())
        parts = {"embedding": self.embed.weight.numel(), "norms": count(self.norm) + count(self.embed_norm),
                 **({} if self.positions is None else {"positions": self.positions.weight.numel()})}
        for _, branch in self.branches():
            name = type(branch.mixer).__name__
            parts[name] = parts.get(name, 0) + count(branch.mixer)
            parts["norms"] += count(branch.norm)
        return {**parts, "total": sum(parts.values())}

    def flops_per_token(self, T=None):
        """FLOPs per token of a sequence of T (default block_size): {'forward', 'backward', 'total'}.

        A linear map of n weights costs 2 n forward; the head counts, the embedding look-up does not; causal attention
        counts the visible half only, a recurrence what it takes token by token, however it is computed. The backward is
        twice the forward; recomputation is not counted.
        """
        T = T or self.config.block_size
        linear = sum(2 * m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        forward = linear + 2 * self.embed.weight.numel() + sum(b.mixing_flops(T) for _, b in self.branches())
        return {"forward": forward, "backward": 2 * forward, "total": 3 * forward}

    def state_size(self, T=None):
        """Numbers kept per sequence after T tokens (default block_size), over all layers."""
        return sum(branch.state_size(T or self.config.block_size) for _, branch in self.branches())


def sample_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """One token (B,) from logits (B, V). temperature 0: the most likely one. Raises ValueError for bad settings."""
    if temperature < 0 or (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
        raise ValueError(f"temperature {temperature} must be >= 0, top_k {top_k} >= 1, top_p {top_p} in (0, 1]")
    if temperature == 0:
        return logits.argmax(-1)
    # differences to the largest, so that a small temperature overflows to -inf, never to inf; at least `tiny`, or 0 / 0
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, torch.finfo(torch.float32).tiny)
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p is not None:
        ordered, order = logits.sort(-1, descending=True)
        p = ordered.softmax(-1)
        ordered = ordered.masked_fill(p.cumsum(-1) - p >= top_p, -torch.inf)  # keeps the first that reaches top_p
        logits = torch.full_like(logits, -torch.inf).scatter(-1, order, ordered)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


if __name__ == "__main__":
    from experiments.scaling import parameters

    parameters.main()
