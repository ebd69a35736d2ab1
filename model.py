"""The families of the paper on one skeleton: embedding, residual branches, norm, tied head.

A layer is a list of residual branches, h = h + branch(norm(h)), and a family is nothing but that list (FAMILIES, below the
branches): LLaMA's is [Attention, SwiGLU]; Longhorn has no MLP and uses two Longhorn branches where LLaMA has those two.
To add a family: one class with `forward(x, state) -> (y, state)`, one line in FAMILIES, one file in config/. The six
families of Table 1 are here; RWKV-4 and DeltaNet, and what several families share, are in mixers.py.

The surprise: every branch also takes and returns its state, so the model that trains on whole sequences generates one
token at a time, or reads a long text in chunks, with the same code.

    paper       here           shape
    d           n_embd         width of the residual stream
    -           d_inner        2 d, width of the scan
    m           d_state, N     state size of a channel
    x_t         x              (B, T, d_inner)
    k_t, q_t    k, q           (B, T, N)
    W_beta x_t  dt             (B, T, d_inner), through rank dt_rank
    S_t         h              (B, d_inner, N), float32
    -           H, n           heads, and channels of a head of q and k (of v, too, where both are as wide)
    S_t         S              (B, H, n, channels of a head of v), float32: the state of families with heads

`python model.py` prints parameters, FLOPs and state sizes beside the paper's Table 1.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

import mixers
from kernels import build, fused
from kernels.linear_attention import choose_kernel, gated_linear_attention, retention
from kernels.ops import causal_conv1d, conv_state, linear_cross_entropy, rms_norm
from kernels.scan import longhorn_scan, selective_scan
from mixers import (
    DeltaNet,
    RWKV4TimeMix,
    dense,
    head_norm,
    norm_backend,
    ramp,
    rwkv_mu,
    split_heads,
    to_residual,
    xavier,
)
from scan_block import also_in_scan_block, can_run, is_plain, marked, scan_block


@dataclass
class ModelConfig:
    # --- model
    model: str = "longhorn"  # family: longhorn, mamba, llama, gla, retnet, rwkv, rwkv4, deltanet or longhorn_exact
    n_layer: int = 12  # layers; each is two residual branches
    n_head: int = 12  # heads (families with heads)
    n_embd: int = 768  # width of the residual stream
    block_size: int = 1024  # tokens of context in training
    vocab_size: int = 50304  # GPT-2's 50257 padded to a multiple of 64
    d_state: int = 16  # state size of a channel, N
    d_conv: int = 4  # width of the short causal convolution
    expand: int = 2  # width of the scan over n_embd
    dt_rank: int = 0  # rank of the step size's projection; 0: n_embd / 16 rounded up
    mlp_multiple: int = 256  # hidden widths of SwiGLU and of RWKV's channel mix are rounded up to a multiple of it
    scan_backend: str = ""  # of the native kernels: cpu, cuda or torch; empty: the fastest there is
    kernel: str = ""  # of the mixer: torch (plain) or fused (Triton, mamba-ssm, flash-attn); empty: the best that runs here


KERNELS = ("", "torch", "fused")


# ------------------------------------------------------------------------------------------------------------- branches
# A branch is an nn.Module, made of (config, layer), with
#   forward(x, state) -> (y, state)     x, y (B, T, n_embd); state None: start empty and keep nothing; else tensors (B, ...)
#   initial_state(batch_size, device)   what `forward` takes before the first token
#   init_table(config)                  parameter name -> (kind, scale), see LM.init_weights
#   mixing_flops(T)                     forward FLOPs a token beside its linear maps, averaged over T positions
#   state_size(T)                       numbers kept a sequence after T tokens


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
        self.backend = mixers.scan_backend(config)
        self.in_proj = nn.Linear(d, 2 * self.d_inner, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(self.d_inner, self.W))
        self.conv_bias = nn.Parameter(torch.empty(self.d_inner))
        self.x_proj = nn.Linear(self.d_inner, self.R + 2 * self.N, bias=False)
        self.dt_proj = nn.Linear(self.R, self.d_inner, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(self.d_inner))
        self.D = nn.Parameter(torch.empty(self.d_inner))
        self.out_proj = nn.Linear(self.d_inner, d, bias=False)

    def rates(self):
        """Mamba's A (d_inner, N), or None."""

    @also_in_scan_block("conv")
    def conv(self, x, before):
        return causal_conv1d(x, self.conv_weight, self.conv_bias, before, backend=self.backend)  # (B, T, d_inner)

    def in_one(self, xz):
        """Whether scan_block does what `forward` spells out: on its kernels, where nobody replaced or watches a part."""
        return (marked(self.conv) and marked(self.scan) and is_plain(self.x_proj) and is_plain(self.dt_proj)
                and can_run(xz, self.W, backend=self.backend))

    def forward(self, u, state=None):
        x_before, h0 = (None, None) if state is None else state
        xz = self.in_proj(u)  # (B, T, 2 d_inner)
        if state is None and self.in_one(xz):  # c, r, k, q, y below, as one operator
            y = scan_block(xz, self.conv_weight, self.conv_bias, self.x_proj.weight, self.dt_proj.weight, self.rates(), self.D,
                           self.dt_bias, marked(self.scan))
            return self.out_proj(y), None
        x, z = xz.chunk(2, -1)  # (B, T, d_inner) each, views
        c = self.conv(x, x_before)  # (B, T, d_inner)
        r, k, q = self.x_proj(c).split([self.R, self.N, self.N], -1)  # (B, T, R), (B, T, N), (B, T, N)
        y, hT = self.scan(c, self.dt_proj(r), k, q, z, h0)  # (B, T, d_inner), (B, d_inner, N)
        y = self.out_proj(y)
        return y, None if state is None else (conv_state(x, x_before, self.W), hT)

    def initial_state(self, batch_size, device):
        return (torch.zeros(batch_size, self.W - 1, self.d_inner, device=device),
                torch.zeros(batch_size, self.d_inner, self.N, device=device))

    def init_table(self, config):
        branches = 2 * config.n_layer
        return {"in_proj.weight": dense(config.n_embd), "conv_weight": dense(self.W), "conv_bias": dense(self.W),
                "x_proj.weight": dense(self.d_inner), "dt_proj.weight": dense(self.R), "dt_bias": ("constant", 0.0),
                "D": ("constant", 1.0), "out_proj.weight": ("uniform", (self.d_inner * branches) ** -0.5)}

    def mixing_flops(self, T):
        # a channel and state: eps k (1), x - k S (2), S += (2), S q (2); Mamba: delta A (1), exp (1), its product (1),
        # S += (2), S q (2); a channel: step size, skip and gate (8), the conv
        return self.d_inner * (7 * self.N + 8 + 2 * self.W)

    def state_size(self, T):
        return self.d_inner * (self.N + self.W - 1)


class Longhorn(ScanBlock):
    """S_ij = (1 - eps_i k_j^2) S_ij + eps_i x_i k_j (Eq. 7), eps = beta / (1 + beta |k|^2), beta = sigmoid(dt + dt_bias)."""

    def __init__(self, config, layer):
        if config.kernel == "fused":
            raise RuntimeError("kernel 'fused': nobody's library has Longhorn's scan: leave kernel empty")
        super().__init__(config, layer)

    @also_in_scan_block("longhorn")
    def scan(self, x, dt, k, q, z, h0):
        return longhorn_scan(x, dt, k, q, self.D, z, self.dt_bias, h0, return_state=True, backend=self.backend)


class LonghornExact(Longhorn):
    """Longhorn without the diagonal approximation: S_i = (I - eps_i k k^T) S_i + eps_i x_i k for each channel i (Eq. 6)."""

    @also_in_scan_block("exact")
    def scan(self, x, dt, k, q, z, h0):
        return longhorn_scan(x, dt, k, q, self.D, z, self.dt_bias, h0, return_state=True, exact=True, backend=self.backend)

    def mixing_flops(self, T):
        return super().mixing_flops(T) + self.d_inner  # k S summed over the states (2 a state, as k S alone), then x - k S (1)


class Mamba(ScanBlock):
    """S_ij = exp(delta_i A_ij) S_ij + delta_i x_i k_j, delta = softplus(dt + dt_bias), A = -exp(A_log) (Gu & Dao 2023)."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.A_log = nn.Parameter(torch.empty(self.d_inner, self.N))
        self.fused_scan, self.fused_conv = fused.load_mamba() if config.kernel == "fused" else (None, None)

    def in_one(self, xz):
        return self.fused_scan is None and self.fused_conv is None and super().in_one(xz)

    def rates(self):
        return -self.A_log.exp()

    @also_in_scan_block("conv")
    def conv(self, x, before):
        if self.fused_conv is None or before is not None:
            return super().conv(x, before)
        return fused.mamba_conv(self.fused_conv, x, self.conv_weight, self.conv_bias)

    @also_in_scan_block("mamba_softplus")
    def scan(self, x, dt, k, q, z, h0):
        A = self.rates()  # (d_inner, N)
        if self.fused_scan is None or h0 is not None:  # mamba-ssm's scan starts from zero only
            return selective_scan(x, dt, A, k, q, self.D, z, self.dt_bias, delta_softplus=True, return_last_state=True, h0=h0,
                                  backend=self.backend)
        return fused.mamba_scan(self.fused_scan, x, dt, A, k, q, self.D, z, self.dt_bias), None

    def init_table(self, config):
        A_log = torch.arange(1, self.N + 1, dtype=torch.float64).log().expand(self.d_inner, self.N)
        return {**super().init_table(config), "A_log": ("tensor", A_log), "dt_bias": ("step size", (1e-3, 0.1))}


def rotate(x, cos, sin):
    """RoPE on (B, H, T, n): the pairs (x_i, x_{i + n/2}) turned by position times frequency i."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)  # float32 until here, whatever x is


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions (LLaMA): softmax(q k^T / sqrt(n)) v, base 10000 on all of q, k."""

    def __init__(self, config, layer):
        super().__init__()
        d, self.H = config.n_embd, config.n_head
        if d % self.H or d // self.H % 2:
            raise ValueError(f"n_embd {d} over n_head {self.H} is not an even whole number of channels a head: choose an "
                             f"n_head that divides {d // 2}")
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.out_proj = nn.Linear(d, d, bias=False)
        self.plain, self.flash = config.kernel == "torch", fused.load_attention() if config.kernel == "fused" else None

    def attend(self, q, k, v):
        """softmax(q k^T / sqrt(n)) v over the visible past: q (B, H, T, n), k and v (B, H, past + T, n) -> (B, H, T, n)."""
        T, past = q.shape[2], k.shape[2] - q.shape[2]
        if self.flash is not None:
            return fused.attention(self.flash, q, k, v)
        mask = None
        if self.plain or past and T > 1:
            mask = torch.ones(T, past + T, dtype=torch.bool, device=q.device).tril(past)
        if self.plain:
            scores = (q @ k.transpose(2, 3) * q.shape[3] ** -0.5).masked_fill(~mask, -torch.inf)  # (B, H, T, past + T)
            return scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(v.dtype) @ v
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and T > 1)

    def forward(self, x, state=None):
        B, T, d = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.H, d // self.H).permute(2, 0, 3, 1, 4)  # (B, H, T, n) each
        past = 0 if state is None else state[0].shape[2]
        frequency = 10000.0 ** -(torch.arange(0, d // self.H, 2, device=x.device) / (d // self.H))
        angle = torch.arange(past, past + T, device=x.device)[:, None] * frequency  # (T, n/2), float32
        q, k = (rotate(a, angle.cos(), angle.sin()) for a in (q, k))
        if state is not None:
            k, v = state = mixers.append_to_cache(state, k, v)
        y = self.out_proj(self.attend(q, k, v).transpose(1, 2).reshape(B, T, d))
        return y, state

    def initial_state(self, batch_size, device):
        empty = torch.zeros(batch_size, self.H, 0, self.out_proj.in_features // self.H, device=device)
        return empty, empty

    def init_table(self, config):
        return {"qkv.weight": ("normal", 0.02), "out_proj.weight": to_residual(config)}

    def mixing_flops(self, T):
        return 4 * self.out_proj.in_features * (T + 1) / 2  # q k^T and the weighted sum over the (T + 1) / 2 visible tokens

    def state_size(self, T):
        return 2 * T * self.out_proj.in_features


class SwiGLU(nn.Module):
    """W_2 (silu(W_1 x) * W_3 x), hidden width 8 d / 3 rounded up to a multiple of mlp_multiple (LLaMA)."""

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

    def mixing_flops(self, T):
        return 0

    def state_size(self, T):
        return 0


def round_up(width, multiple):
    return math.ceil(width / multiple) * multiple


class GLA(nn.Module):
    """Gated linear attention: a forget gate for every channel of the keys (Yang et al. 2023, Section 4).

        q, k = split(W_qk x);  v = W_v x;  a = sigmoid(W_2 W_1 x + b)^(1/16)       q, k, a: d / 2 wide, v: d; W_1 to 16
        S = diag(a) S' + k^T v;  o = (q / sqrt(n)) S
        out = W_o (silu(W_g x + b_g) * RMSNorm_head(o))
    """

    def __init__(self, config, layer):
        super().__init__()
        d, self.H = config.n_embd, config.n_head
        if d % (2 * self.H):
            raise ValueError(f"n_embd {d} gives GLA keys of {d // 2}, which n_head {self.H} does not divide: choose an n_head "
                             f"that divides {d // 2}")
        self.n, self.kernel, self.norm_backend = d // 2 // self.H, config.kernel or None, norm_backend(config)
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
        o, S = gated_linear_attention(heads(q * self.n**-0.5), heads(k), heads(self.v(x)), heads(log_a), state,
                                      kernel=self.kernel)  # (B, T, H, 2 n), (B, H, n, 2 n)
        y = self.out_proj(F.silu(self.gate(x)) * head_norm(o, backend=self.norm_backend).flatten(2))
        return y, None if state is None else S

    def initial_state(self, batch_size, device):
        return torch.zeros(batch_size, self.H, self.n, 2 * self.n, device=device)

    def init_table(self, config):
        d = config.n_embd
        return {"qk.weight": xavier(d // 2, d, 2**-2.5), "v.weight": ("normal", 0.02), "forget1.weight": xavier(16, d, 2**-2.5),
                "forget2.weight": xavier(d // 2, 16, 2**-2.5), "forget2.bias": ("constant", 0.0), "gate.weight": ("normal", 0.02),
                "gate.bias": ("constant", 0.0), "out_proj.weight": to_residual(config)}

    def mixing_flops(self, T):
        return 5 * self.state_size(T)  # as the recurrence has them: a S (1), k^T v added (2), q S (2)

    def state_size(self, T):
        return self.H * self.n * 2 * self.n


class Retention(nn.Module):
    """RetNet's retention: a fixed decay a head, and rotated queries and keys (Sun et al. 2023, Eq. 5 to 8).

        q, k = split(W_qk x);  v, g = split(W_vg x)      v, g: int(1.8 d) wide, rounded down to a multiple of the heads
        q, k turned at position t, channel pair i of m, by t * 10000^(-i/(m-1));  k / sqrt(n)
        S = gamma_h S' + k^T v,  gamma_h = 1 - 2^(-5-h);  o = q S
        out = W_o (silu(g) * RMSNorm_head(o))

    The published code divides o by sums of absolute weights before the norm, which takes that away again: left out.
    """

    def __init__(self, config, layer):
        super().__init__()
        d, self.H = config.n_embd, config.n_head
        if d % self.H or d // self.H % 2:
            raise ValueError(f"n_embd {d} over n_head {self.H} is not an even whole number of channels a head: choose an "
                             f"n_head that divides {d // 2}")
        self.n, self.n_v = d // self.H, retnet_width(config) // self.H
        self.kernel, self.norm_backend = config.kernel or None, norm_backend(config)
        self.qk = nn.Linear(d, 2 * d, bias=False)
        self.vg = nn.Linear(d, 2 * self.H * self.n_v, bias=False)
        self.out_proj = nn.Linear(self.H * self.n_v, d, bias=False)

    def turn(self, x, t):
        """The pairs (even, odd) of the last dimension of x (..., n) turned by angle t * frequency, t like x[..., 0]."""
        m = self.n // 2
        angle = t[..., None] * 10000.0 ** -(torch.arange(m, device=x.device) / max(1, m - 1))  # (..., m), float32
        cos, sin = angle.cos(), angle.sin()
        even, odd = x[..., ::2], x[..., 1::2]  # float32 by promotion: the state is turned by T, so that a rounded turn would show
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2).to(x.dtype)

    def forward(self, x, state=None):
        T = x.shape[1]
        t = torch.arange(T, device=x.device)[:, None]  # (T, 1): alike for all heads
        qk = self.turn(self.qk(x).unflatten(-1, (2 * self.H, self.n)), t)  # (B, T, 2 H, n)
        q, k = qk.chunk(2, 2)  # (B, T, H, n) each
        v, g = self.vg(x).chunk(2, -1)  # (B, T, H n_v) each
        log_decay = torch.log1p(-(2.0 ** (-5 - torch.arange(self.H, device=x.device))))  # (H,)
        o, S = retention(q, k * self.n**-0.5, v.unflatten(-1, (self.H, -1)), log_decay, state=state, kernel=self.kernel)
        y = self.out_proj(F.silu(g) * head_norm(o, backend=self.norm_backend).flatten(2))  # o (B, T, H, n_v)
        if state is None:
            return y, None
        # angles matter by their difference only: the keys in the state are turned back by T, and the next token is at 0 again
        back = torch.full((), -T, device=x.device)
        return y, self.turn(S.transpose(2, 3), back).transpose(2, 3)  # (B, H, n, n_v)

    def initial_state(self, batch_size, device):
        return torch.zeros(batch_size, self.H, self.n, self.n_v, device=device)

    def init_table(self, config):
        d, wide = config.n_embd, self.H * self.n_v
        return {"qk.weight": xavier(d, d, 2**-2.5), "vg.weight": xavier(wide, d, 2**-2.5),
                "out_proj.weight": xavier(d, wide, 0.5)}

    def mixing_flops(self, T):
        return 5 * self.state_size(T)  # as the recurrence has them: gamma S (1), k^T v added (2), q S (2)

    def state_size(self, T):
        return self.H * self.n * self.n_v


def retnet_width(config):
    return int(1.8 * config.n_embd) // config.n_head * config.n_head


class RetNetGLU(SwiGLU):
    """W_2 (gelu(W_1 x) * W_3 x), as wide as the values of the retention beside it: Table 1's RetNet."""

    activation = staticmethod(F.gelu)

    def hidden(self, config):
        return retnet_width(config)


class RWKVTimeMix(nn.Module):
    """RWKV's time mix as Table 1 counts it: the 5.1 form, Eagle's with one decay and one bonus a head (Peng et al. 2024).

        x_c = x + (x_before - x) * mu_c  for c in r, k, v, g
        r, k, v = W_r x_r, W_k x_k, W_v x_v;  g = silu(W_g x_g);  w = exp(-exp(decay)), a head
        o = r (S' + u k^T v);  S = w S' + k^T v
        out = W_o (GroupNorm_head(o) * g)
    """

    def __init__(self, config, layer):
        super().__init__()
        d, self.H, self.layer = config.n_embd, config.n_head, layer
        self.n, self.kernel = split_heads(config), config.kernel or None
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
        last, S = (None, None) if state is None else state
        change = mixers.token_shift(x, last) - x  # (B, T, d)
        r, k, v, g = (torch.addcmul(x, change, mu) for mu in self.mu.to(x.dtype))
        r, k, v = (a.unflatten(-1, (self.H, self.n)) for a in (self.receptance(r), self.key(k), self.value(v)))  # (B, T, H, n)
        o, S = retention(r, k, v, -self.decay.exp(), self.bonus, S, kernel=self.kernel)  # (B, T, H, n), (B, H, n, n)
        o = F.layer_norm(o, (self.n,), eps=64e-5).flatten(2)  # a group norm whose groups are the heads of one token
        y = self.output(torch.addcmul(self.norm_bias.to(o.dtype), o, self.norm_weight.to(o.dtype)) * F.silu(self.gate(g)))
        return y, None if state is None else (x[:, -1].clone(), S)

    def initial_state(self, batch_size, device):
        return (torch.zeros(batch_size, self.H * self.n, device=device),
                torch.zeros(batch_size, self.H, self.n, self.n, device=device))

    def init_table(self, config):
        a, mu = rwkv_mu(config, self.layer)
        h = ramp(self.H)
        linear = {f"{name}.weight": ("normal", 0.02) for name in ("receptance", "key", "value", "gate")}
        return {"mu": ("tensor", torch.stack([mu[c] for c in "rkvg"])), "decay": ("tensor", -6 + 5 * h ** (0.7 + 1.3 * a)),
                "bonus": ("tensor", a * (1 - h)), "norm_weight": ("constant", 1.0), "norm_bias": ("constant", 0.0), **linear,
                "output.weight": to_residual(config)}

    def mixing_flops(self, T):
        # a state: r S (2), w S (1), k^T v added (2); a channel: r . u k (3), times v, added to o (2)
        return self.H * self.n * (5 * self.n + 5)

    def state_size(self, T):
        return self.H * self.n * (self.n + 1)


class RWKVChannelMix(nn.Module):
    """sigmoid(W_r x_r) * W_v relu(W_k x_k)^2 of shifted tokens, hidden 3 d or the next multiple of mlp_multiple."""

    factor = 3

    def __init__(self, config, layer):
        super().__init__()
        d, self.layer, hidden = config.n_embd, layer, round_up(self.factor * config.n_embd, config.mlp_multiple)
        self.mu = nn.Parameter(torch.empty(2, d))  # of r, k
        self.receptance = nn.Linear(d, d, bias=False)
        self.key = nn.Linear(d, hidden, bias=False)
        self.value = nn.Linear(hidden, d, bias=False)

    def forward(self, x, state=None):
        change = mixers.token_shift(x, state) - x  # (B, T, d)
        r, k = (torch.addcmul(x, change, mu) for mu in self.mu.to(x.dtype))
        y = torch.sigmoid(self.receptance(r)) * self.value(F.relu(self.key(k)).square())
        return y, None if state is None else x[:, -1].clone()

    def initial_state(self, batch_size, device):
        return torch.zeros(batch_size, self.mu.shape[1], device=device)

    def init_table(self, config):
        _, mu = rwkv_mu(config, self.layer)
        return {"mu": ("tensor", torch.stack([mu["k"], mu["k"]])), "receptance.weight": ("normal", 0.02),
                "key.weight": ("normal", 0.02), "value.weight": to_residual(config)}

    def mixing_flops(self, T):
        return 0

    def state_size(self, T):
        return self.mu.shape[1]


class RWKV4ChannelMix(RWKVChannelMix):
    """The same with a hidden width of 4 d."""

    factor = 4


FAMILIES = {
    "longhorn": [Longhorn, Longhorn],
    "mamba": [Mamba, Mamba],
    "llama": [Attention, SwiGLU],
    "gla": [GLA, SwiGLU],
    "retnet": [Retention, RetNetGLU],
    "rwkv": [RWKVTimeMix, RWKVChannelMix],
    # beside Table 1
    "rwkv4": [RWKV4TimeMix, RWKV4ChannelMix],
    "deltanet": [DeltaNet, SwiGLU],
    "longhorn_exact": [LonghornExact, LonghornExact],
}


def mixing_by(config, device):
    """Whose code mixes the tokens of this family on 'cpu' or 'cuda', in a few words: train.py prints it."""
    words = [_mixing_by(branch, config, device) for branch in FAMILIES[config.model]]
    return ", ".join(dict.fromkeys(w for w in words if w)) or "nothing"


def _mixing_by(branch, config, device):
    """The same of one branch; '' for one that mixes channels."""
    is_a = lambda *classes: isinstance(branch, type) and issubclass(branch, classes)
    if is_a(SwiGLU, RWKVChannelMix):
        return ""
    if is_a(Attention):
        return {"": "PyTorch's scaled_dot_product_attention", "torch": "a plain softmax", "fused": "flash-attn"}[config.kernel]
    if is_a(GLA, Retention, RWKVTimeMix, DeltaNet):
        op = "gla" if is_a(GLA) else "delta_rule" if is_a(DeltaNet) else "retention"
        return {"torch": "chunks in PyTorch", "fused": "flash-linear-attention"}[choose_kernel(config.kernel or None, op, device)]
    if is_a(RWKV4TimeMix):
        return "chunks in PyTorch"
    if is_a(Mamba) and config.kernel == "fused":
        return "mamba-ssm"
    if is_a(ScanBlock):
        chosen = build.choose("scan", mixers.scan_backend(config), device, False)
        return {"cpu": "longhorn_scan.cu on the CPU", "cuda": "longhorn_scan.cu", "torch": "a loop in PyTorch"}[chosen]
    return "its own code"


# ------------------------------------------------------------------------------------------------------------- skeleton

class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + 1e-5) * weight."""

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_embd))
        self.backend = norm_backend(config)

    def forward(self, x):
        return rms_norm(x, self.weight, 1e-5, self.backend)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(variance(x) + 1e-5) * weight."""

    def __init__(self, config):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(config.n_embd)), None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class BiasedLayerNorm(LayerNorm):
    """LayerNorm + bias."""

    def __init__(self, config):
        super().__init__(config)
        self.bias = nn.Parameter(torch.empty(config.n_embd))


# RWKV-4's norms have a bias in its published weights and in transformers, which is what it is checked against
NORMS = {"rwkv": LayerNorm, "rwkv4": BiasedLayerNorm}  # of all the others: RMSNorm
NORM_OF_EMBEDDING = {"rwkv4"}  # families that norm what enters the first layer


class Residual(nn.Module):
    """h + branch(norm(h)), with the branch's state."""

    def __init__(self, config, branch, layer):
        super().__init__()
        self.norm = NORMS.get(config.model, RMSNorm)(config)
        self.branch = branch(config, layer)

    def forward(self, h, state=None):
        y, state = self.branch(self.norm(h), state)
        return h + y, state


def check_tokens(idx):
    if idx.dim() != 2 or idx.numel() == 0 or idx.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"idx must be (B, T) of int64, both at least 1, got {tuple(idx.shape)} {idx.dtype}")


def batch_sizes(state):
    """The first size of every tensor of two or more dimensions in a state, in any nesting of lists and tuples."""
    if isinstance(state, (list, tuple)):
        return [n for part in state for n in batch_sizes(part)]
    return [state.shape[0]] if isinstance(state, torch.Tensor) and state.dim() > 1 else []


class LM(nn.Module):
    """Language model of any family: `logits, loss = LM(config)(idx, targets)`.

    Raises ValueError for an unknown family or kernel or sizes that do not fit together, RuntimeError for a kernel that is
    not installed.
    """

    def __init__(self, config):
        super().__init__()
        if config.model not in FAMILIES:
            raise ValueError(f"unknown model {config.model!r}: choose one of {', '.join(FAMILIES)}")
        for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "d_state", "d_conv", "expand",
                     "mlp_multiple"):
            if getattr(config, name) < 1:
                raise ValueError(f"{name} {getattr(config, name)} must be at least 1")
        if config.dt_rank < 0:
            raise ValueError(f"dt_rank {config.dt_rank} must be at least 1, or 0 for n_embd / 16")
        if config.kernel not in KERNELS:
            raise ValueError(f"unknown kernel {config.kernel!r}: choose torch or fused, or leave it empty")
        if config.kernel == "torch" and config.scan_backend not in ("", "torch"):
            raise ValueError(f"kernel 'torch' and scan_backend {config.scan_backend!r} contradict each other: choose one")
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        Norm = NORMS.get(config.model, RMSNorm)
        self.embed_norm = Norm(config) if config.model in NORM_OF_EMBEDDING else nn.Identity()
        self.branches = nn.ModuleList(Residual(config, b, i) for i in range(config.n_layer) for b in FAMILIES[config.model])
        self.norm = Norm(config)
        self.init_weights()

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

        Raises ValueError for an idx of another shape or dtype, for a state of other branches or another batch size, and for
        loss_only without targets.
        """
        check_tokens(idx)
        if loss_only and targets is None:
            raise ValueError("loss_only asks for a loss: give targets too")
        keep = state is not None
        if keep and (len(state) != len(self.branches) or set(batch_sizes(state)) - {idx.shape[0]}):
            raise ValueError(f"state is not one of {len(self.branches)} branches for a batch of {idx.shape[0]}: start from "
                             f"initial_state({idx.shape[0]}), or from what the call before returned")
        states = state if keep else [None] * len(self.branches)
        h = self.embed_norm(self.embed(idx))  # (B, T, n_embd)
        after = []
        for branch, s in zip(self.branches, states, strict=True):
            h, s = branch(h, s)
            after.append(s)
        h, logits, loss = self.norm(h[:, -1:] if last_only else h), None, None
        if loss_only and not torch.compiler.is_compiling():
            loss = linear_cross_entropy(h, self.embed.weight, targets, ignore_index=-1)
        else:  # with loss_only too: torch.compile fuses these lines, and keeps the logits alone
            logits = F.linear(h, self.embed.weight)  # (B, T, vocab_size)
            if targets is not None:
                loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-1)
        logits = None if loss_only else logits
        return (logits, loss, after) if keep else (logits, loss)

    def initial_state(self, batch_size):
        """The state before the first token: a list with one entry a residual branch."""
        return [branch.branch.initial_state(batch_size, self.embed.weight.device) for branch in self.branches]

    @torch.no_grad()
    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, generator=None, chunk=4096):
        """Yield `max_new_tokens` tensors (B,) sampled after the prompt idx (B, T >= 1), from the recurrent state.

        The prompt is read in chunks; then time and memory a token are constant for recurrent families, and grow with the
        cache for attention. temperature 0 takes the most likely token; top_k and top_p cut the tail before sampling.
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

    # -------------------------------------------------------------------------- initialisation, optimiser, bookkeeping

    def init_table(self):
        """Parameter name -> (kind, scale) of all of them.

        'normal' standard deviation, 'uniform' bound, 'constant' value, 'tensor' values; 'step size' (low, high): the
        inverse softplus of a log-uniform number between them, so that softplus gives it back (Mamba's dt_bias).
        """
        table = {"embed.weight": ("normal", 0.02)}
        for name, _ in self.named_parameters():
            if name.split(".")[-2] in ("norm", "embed_norm"):
                table[name] = ("constant", 1.0 if name.endswith("weight") else 0.0)
        for i, branch in enumerate(self.branches):
            table.update({f"branches.{i}.branch.{name}": how for name, how in branch.branch.init_table(self.config).items()})
        return table

    @torch.no_grad()
    def init_weights(self):
        """Draw every parameter as `init_table` says."""
        table = self.init_table()
        for name, p in self.named_parameters():
            if name not in table:
                residual, _, own = name.partition(".branch.")
                branch = type(self.get_submodule(residual).branch).__name__
                raise ValueError(f"{branch}.init_table does not say how {own!r} starts: add {own!r}: (kind, scale), whose kinds "
                                 "are listed at LM.init_table")
            kind, scale = table[name]
            if kind == "normal":
                p.normal_(0.0, scale)
            elif kind == "uniform":
                p.uniform_(-scale, scale)
            elif kind == "tensor":
                p.copy_(scale)
            elif kind == "step size":
                step = p.uniform_(*map(math.log, scale)).exp().clamp(min=1e-4)
                p.copy_(step + torch.log(-torch.expm1(-step)))
            else:
                p.fill_(scale)

    def decayed(self):
        """Names of the parameters that weight decay applies to: matrices of linear maps and the embedding, nothing else."""
        return [f"{name}.weight" for name, m in self.named_modules() if isinstance(m, (nn.Linear, nn.Embedding))]

    def optimizer_groups(self, weight_decay):
        """Two parameter groups for AdamW: decayed matrices, and the rest without decay."""
        names = set(self.decayed())
        named = dict(self.named_parameters())
        return [{"params": [p for n, p in named.items() if n in names], "weight_decay": weight_decay},
                {"params": [p for n, p in named.items() if n not in names], "weight_decay": 0.0}]

    def parameter_count(self):
        """Parameters by part: embedding (tied with the head), branches by class, norms, and their total."""
        count = lambda module: sum(p.numel() for p in module.parameters())
        parts = {"embedding": self.embed.weight.numel(), "norms": count(self.norm) + count(self.embed_norm)}
        for branch in self.branches:
            name = type(branch.branch).__name__
            parts[name] = parts.get(name, 0) + count(branch.branch)
            parts["norms"] += count(branch.norm)
        return {**parts, "total": sum(parts.values())}

    def flops_per_token(self, T=None):
        """FLOPs a token of a sequence of T (default block_size): {'forward', 'backward', 'total'}.

        A linear map of n weights costs 2 n forward; the head counts, the embedding look-up does not; causal attention
        counts the visible half only, a recurrence what it takes token by token, however it is computed. The backward is
        twice the forward; recomputation is not counted.
        """
        T = T or self.config.block_size
        linear = sum(2 * m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear)) + 2 * self.embed.weight.numel()
        forward = linear + sum(b.branch.mixing_flops(T) for b in self.branches)
        return {"forward": forward, "backward": 2 * forward, "total": 3 * forward}

    def state_size(self, T=None):
        """Numbers kept a sequence after T tokens (default block_size), over all layers."""
        return sum(b.branch.state_size(T or self.config.block_size) for b in self.branches)


def sample_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """One token (B,) from logits (B, V). temperature 0: the most likely one. Raises ValueError for settings out of range."""
    if temperature < 0 or (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
        raise ValueError(f"temperature {temperature} must be >= 0, top_k {top_k} >= 1, top_p {top_p} in (0, 1]")
    if temperature == 0:
        return logits.argmax(-1)
    # differences to the largest, so that a small temperature overflows to -inf, never to inf; and a normal number, or 0 / 0
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


# ---------------------------------------------------------------------------------------------------------------- table

SIZES = {"120M": {"n_layer": 12, "n_head": 12, "n_embd": 768}, "350M": {"n_layer": 24, "n_head": 16, "n_embd": 1024}}
TABLE1 = {  # the paper's counts
    "longhorn": {"120M": 128.6e6, "350M": 369.8e6}, "mamba": {"120M": 129.2e6, "350M": 371.5e6},
    "llama": {"120M": 124.4e6, "350M": 357.7e6}, "gla": {"120M": 123.8e6, "350M": 361.1e6},
    "retnet": {"120M": 129.1e6, "350M": 373.2e6}, "rwkv": {"120M": 124.4e6, "350M": 354.8e6},
}


def table(T=1024):
    """Rows of (family, size, parameters, the paper's count or None, forward+backward FLOPs a token, state a sequence of T)."""
    rows = []
    for family in FAMILIES:
        for size, shape in SIZES.items():
            with torch.device("meta"):
                lm = LM(ModelConfig(model=family, block_size=T, **shape))
            paper = TABLE1.get(family, {}).get(size)
            rows.append((family, size, lm.parameter_count()["total"], paper, lm.flops_per_token()["total"], lm.state_size()))
    return rows


def main():
    print(f"{'family':14} {'size':5} {'parameters':>12} {'Table 1':>9} {'off':>6} {'FLOPs/token':>12} {'state at 1024':>14}")
    for family, size, parameters, paper, flops, state in table():
        beside = f"{paper / 1e6:8.1f}M {parameters / paper - 1:+6.1%}" if paper else f"{'-':>9} {'-':>6}"
        print(f"{family:14} {size:5} {parameters / 1e6:11.1f}M {beside} "
              f"{flops / 1e6:11.0f}M {state / 1e6:13.2f}M")


if __name__ == "__main__":
    main()
