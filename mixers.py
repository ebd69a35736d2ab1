"""The other families that the project compares; importing this file adds them to model.py's FAMILIES.

    RetNet           S = gamma S' + k^T v, one decay per head               o = q S
    RWKV             S = w S' + k^T v, one decay per head                   o = r (S' + u k^T v)
    sliding window   softmax over the last `window` tokens
    exact Longhorn   S = (I - eps k k^T) S' + eps x k, without the diagonal approximation
    RWKV-4           wkv = (num' + e^{u + k} v) / (den' + e^{u + k}),  num = e^{-w} num' + e^k v,  den alike
    DeltaNet         S = (I - eps k^T k) S' + eps k^T v                     o = q S
    gated DeltaNet   DeltaNet on a S', one decay per head                   o = q S
    KDA              DeltaNet on diag(a) S', a decay per channel of keys    o = q S
    Mesa             H = a H' + beta k^T k,  U = a U' + beta k^T v          o = q (H + diag(L))^-1 U
    Mamba-2          S = a S' + D B^T x                                     y = C S

A memory that should answer k with v follows the gradient flow dS/dt = -k^T (k S - v). A delta rule takes one step along
this flow per token; STEPS lists three kinds of step. Forward Euler (eps = beta) is DeltaNet's. It is stable for
beta |k|^2 < 2, which keys of length 1 ensure. Backward Euler is Longhorn's, here with one eps per head. It is stable
for keys of any length. The exact step follows the flow without error.

model.py explains what a mixer is.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from initialisation import (
    arange,
    constant,
    dense,
    linear,
    log_uniform,
    normal,
    parameter,
    step_size,
    to_residual,
    uniform,
    values,
    xavier,
)
from kernels.linear_attention import NOTHING, delta_rule, gated_delta_rule, kda, mesa, retention, wkv4
from kernels.ops import attention, causal_conv1d, conv_state, documents_of, rms_norm
from model import (
    EMBEDDING_NORMS,
    FAMILIES,
    NORMS,
    Attention,
    Longhorn,
    SwiGLU,
    apply_rotary,
    head_norm,
    rotary_tables,
    round_up,
    split_heads,
)

# --------------------------------------------------------------------------------------------------- shared by families


def wide(a):
    """a in float32 at least: step sizes and decays must not be rounded to 16 bits."""
    return a.to(torch.promote_types(a.dtype, torch.float32))


def token_shift(x, last, mus):
    """For each mu (d,) in mus, mix x (B, T, d) with the previous token. The first token is mixed with `last` (B, d) or
    zeros, the first token of a packed document with zeros."""
    first = torch.zeros_like(x[:, :1]) if last is None else last[:, None].to(x.dtype)
    before = torch.cat([first, x[:, :-1]], 1)  # (B, T, d)
    packed = documents_of(x) if last is None else None
    before = before if packed is None else before.masked_fill(packed.starts[..., None], 0)
    change = before - x
    return [torch.addcmul(x, change, mu) for mu in mus.to(x.dtype)]


def ramp(n):
    """0, 1/(n-1), ..., 1 in float64; 0 alone for n = 1."""
    return arange(n) / max(1, n - 1)


def rwkv_mu(config, layer):
    """RWKV's initial token-shift mix per channel: (a, {letter: mu (d,)}), a the layer's depth in 0..1.

    Late channels and late layers look more at the current token, k less so than r (Peng et al. 2023, appendix).
    """
    a = layer / max(1, config.n_layer - 1)
    c = 1 - layer / config.n_layer
    i = arange(config.n_embd) / config.n_embd
    r = 1 - i ** (c / 2)
    return a, {"k": 1 - i**c, "v": 1 - (i**c + 0.3 * a), "r": r, "g": r}


# ------------------------------------------------------------------------------- RetNet, RWKV, windows, exact Longhorn

class Retention(nn.Module):
    """RetNet's retention: a fixed decay per head, rotated queries and keys (Sun et al. 2023, Eq. 5 to 8).

        q, k = split(W_qk x);  v, g = split(W_vg x)            v, g: int(1.8 d) wide, rounded down to a multiple of H
        q, k rotated at position t, channel pair i of m, by t * 10000^(-i/(m-1));  k / sqrt(n)
        S = gamma_h S' + k^T v,  gamma_h = 1 - 2^(-5-h);  o = q S
        out = W_o (silu(g) * RMSNorm_head(o))

    The published code also divides o by sums of absolute weights before the norm; this code does not. The norm cancels
    the division only if its eps is negligible next to mean(o^2): at 1e-5 the first token differs by 24%.
    """

    operator = "retention"
    norm_eps = 1e-5

    def __init__(self, config, layer):
        super().__init__()
        d = config.n_embd
        width = retnet_width(config)
        self.H = config.n_head
        self.n = split_heads(config, multiple=2)  # rotary pairs
        self.n_v = width // self.H
        self.backend = config.backend
        self.qk = linear(d, 2 * d, start=xavier(d, d, 2**-2.5), parts=[d, d])
        self.vg = linear(d, 2 * width, start=xavier(width, d, 2**-2.5), parts=[width, width])
        self.out_proj = linear(width, d, start=xavier(d, width, 0.5))

    def rotate(self, x, first, last, constant=False):
        """Rotate the pairs (even, odd) in the last dimension of x (..., T, H, n), at positions first .. last - 1."""
        m = self.n // 2
        cos, sin = rotary_tables(first, last, m, x.device, max(1, m - 1), constant)  # (T, m) each
        cos, sin = cos[:, None], sin[:, None]
        even, odd = x[..., ::2], x[..., 1::2]
        turned = [even * cos - odd * sin, odd * cos + even * sin]  # float32: rounding would show in the state
        return torch.stack(turned, -1).flatten(-2).to(x.dtype)

    def forward(self, x, state=None):
        T = x.shape[1]
        qk = self.qk(x).unflatten(-1, (2 * self.H, self.n))  # (B, T, 2 H, n)
        q, k = self.rotate(qk, 0, T, constant=state is None).chunk(2, 2)  # (B, T, H, n) each
        v, g = self.vg(x).chunk(2, -1)  # (B, T, H n_v) each
        v = v.unflatten(-1, (self.H, -1))  # (B, T, H, n_v)
        log_decay = torch.log1p(-(2.0 ** (-5 - torch.arange(self.H, device=x.device))))  # (H,)
        o, S = retention(q, k * self.n**-0.5, v, log_decay, state=state, backend=self.backend)
        o = head_norm(o, eps=self.norm_eps, backend=self.backend).flatten(2)  # (B, T, H n_v)
        y = self.out_proj(F.silu(g) * o)
        if state is None:
            return y, None
        # only differences of angles matter: rotate the state's keys back by T, so that the next token is again at 0
        return y, self.rotate(S.transpose(2, 3), -T, 1 - T).transpose(2, 3)  # (B, H, n, n_v)

    def initial_state(self, batch_size, device):
        return torch.zeros(batch_size, self.H, self.n, self.n_v, device=device)


def retnet_width(config):
    return int(1.8 * config.n_embd) // config.n_head * config.n_head


class RetNetGLU(SwiGLU):
    """W_2 (gelu(W_1 x) * W_3 x), as wide as the retention's values, as in Table 1's RetNet."""

    activation = staticmethod(F.gelu)

    def hidden(self, config):
        return retnet_width(config)


class RWKVTimeMix(nn.Module):
    """The time mix of RWKV 5.1 (Table 1's RWKV): Eagle's with one decay and one bonus per head (Peng et al. 2024).

        x_c = x + (x_before - x) * mu_c  for c in r, k, v, g
        r, k, v = W_r x_r, W_k x_k, W_v x_v;  g = silu(W_g x_g);  w = exp(-exp(decay)) per head
        o = r (S' + u k^T v);  S = w S' + k^T v
        out = W_o (GroupNorm_head(o) * g)
    """

    operator = "retention"

    def __init__(self, config, layer):
        super().__init__()
        d = config.n_embd
        self.H = config.n_head
        self.n = split_heads(config)
        self.backend = config.backend
        depth, mu = rwkv_mu(config, layer)
        h = ramp(self.H)
        self.mu = parameter(4, d, start=values(torch.stack([mu[c] for c in "rkvg"])))
        self.decay = parameter(self.H, start=values(-6 + 5 * h ** (0.7 + 1.3 * depth)))
        self.bonus = parameter(self.H, start=values(depth * (1 - h)))
        self.receptance = linear(d, d, start=normal(0.02))
        self.key = linear(d, d, start=normal(0.02))
        self.value = linear(d, d, start=normal(0.02))
        self.gate = linear(d, d, start=normal(0.02))
        self.norm_weight = parameter(d, start=constant(1.0))
        self.norm_bias = parameter(d, start=constant(0.0))
        self.output = linear(d, d, start=to_residual(config))

    def forward(self, x, state=None):
        last, S = (None, None) if state is None else state
        r, k, v, g = token_shift(x, last, self.mu)  # (B, T, d) each
        heads = lambda a: a.unflatten(-1, (self.H, self.n))  # (B, T, H, n)
        r = heads(self.receptance(r))
        k = heads(self.key(k))
        v = heads(self.value(v))
        o, S = retention(r, k, v, -self.decay.exp(), self.bonus, S, backend=self.backend)  # (B, T, H, n), (B, H, n, n)
        o = F.layer_norm(o, (self.n,), eps=64e-5).flatten(2)  # a group norm with one group per head
        o = torch.addcmul(self.norm_bias.to(o.dtype), o, self.norm_weight.to(o.dtype))
        y = self.output(o * F.silu(self.gate(g)))
        return y, None if state is None else (x[:, -1].clone(), S)

    def initial_state(self, batch_size, device):
        last = torch.zeros(batch_size, self.H * self.n, device=device)
        S = torch.zeros(batch_size, self.H, self.n, self.n, device=device)
        return last, S


class RWKVChannelMix(nn.Module):
    """sigmoid(W_r x_r) * W_v relu(W_k x_k)^2 of shifted tokens; hidden width 3 d, rounded up to a multiple of
    mlp_multiple."""

    operator = None  # mixes channels
    factor = 3

    def __init__(self, config, layer):
        super().__init__()
        d = config.n_embd
        hidden = round_up(self.factor * d, config.mlp_multiple)
        _, mu = rwkv_mu(config, layer)
        self.mu = parameter(2, d, start=values(torch.stack([mu["k"], mu["k"]])))  # of r, k
        self.receptance = linear(d, d, start=normal(0.02))
        self.key = linear(d, hidden, start=normal(0.02))
        self.value = linear(hidden, d, start=to_residual(config))

    def forward(self, x, state=None):
        r, k = token_shift(x, state, self.mu)  # (B, T, d) each
        y = torch.sigmoid(self.receptance(r)) * self.value(F.relu(self.key(k)).square())
        return y, None if state is None else x[:, -1].clone()

    def initial_state(self, batch_size, device):
        return torch.zeros(batch_size, self.mu.shape[1], device=device)


class RWKV4ChannelMix(RWKVChannelMix):
    """RWKVChannelMix with a hidden width of 4 d."""

    factor = 4


class SlidingWindow(Attention):
    """LLaMA's attention over the last `window` tokens, including the current token; 0: half of block_size. The cache
    holds `window` tokens.

    Only differences of rotary angles matter. So the cache holds keys before rotation, and its oldest key is at position
    0. The angles stay small however long the text is.
    """

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.window = config.window or max(1, config.block_size // 2)

    def forward(self, x, state=None):
        B, T, d = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.H, self.n).permute(2, 0, 3, 1, 4)  # (B, H, T, n) each
        if state is not None:
            past_k, past_v = state
            k = torch.cat([past_k.to(k.dtype), k], 2)
            v = torch.cat([past_v.to(v.dtype), v], 2)
            state = k[:, :, -self.window:].clone(), v[:, :, -self.window:].clone()  # a view would keep older keys alive
        S = k.shape[2]
        cos, sin = rotary_tables(0, S, self.n // 2, x.device, constant=state is None)  # (S, n/2) each
        q, k = apply_rotary(q, cos[S - T:], sin[S - T:]), apply_rotary(k, cos, sin)
        y = attention(q, k, v, self.window, backend=self.backend)  # (B, H, T, n)
        return self.out_proj(y.transpose(1, 2).reshape(B, T, d)), state


class LonghornExact(Longhorn):
    """Longhorn without the diagonal approximation: S_i = (I - eps_i k k^T) S_i + eps_i x_i k per channel i (Eq. 6)."""

    exact = True


# --------------------------------------------------------------------------------------------------------------- RWKV-4

class RWKV4TimeMix(nn.Module):
    """RWKV-4's attention without softmax (Peng et al. 2023, Eq. 11 to 18; Longhorn's paper, Appendix A.4).

        x_c = x + (x_before - x) * mu_c  for c in r, k, v
        r, k, v = W_r x_r, W_k x_k, W_v x_v
        out = W_o (sigmoid(r) * wkv(k, v, w, u)),  w = exp(decay) > 0
    """

    operator = "wkv4"

    def __init__(self, config, layer):
        super().__init__()
        d = config.n_embd
        self.backend = config.backend
        depth, mu = rwkv_mu(config, layer)
        zigzag = (arange(d) + 1) % 3 - 1
        self.mu = parameter(3, d, start=values(torch.stack([mu[c] for c in "rkv"])))
        self.decay = parameter(d, start=values(-5 + 8 * ramp(d) ** (0.7 + 1.3 * depth)))
        self.bonus = parameter(d, start=values(math.log(0.3) + 0.5 * zigzag))
        self.receptance = linear(d, d, start=normal(0.02))
        self.key = linear(d, d, start=normal(0.02))
        self.value = linear(d, d, start=normal(0.02))
        self.output = linear(d, d, start=to_residual(config))

    def forward(self, x, state=None):
        last, *past = (None, None) if state is None else state
        r, k, v = token_shift(x, last, self.mu)  # (B, T, d) each
        r, k, v = self.receptance(r), self.key(k), self.value(v)  # (B, T, d) each
        past = None if state is None else past
        y, past = wkv4(k, v, self.decay.exp(), self.bonus, past, backend=self.backend)
        y = self.output(torch.sigmoid(r) * y)
        return y, None if state is None else (x[:, -1].clone(), *past)

    def initial_state(self, batch_size, device):
        zero = torch.zeros(batch_size, self.decay.numel(), device=device)
        return zero, zero, zero, zero + NOTHING  # last token; numerator, denominator, their common exponent


# ----------------------------------------------------------------------------------------- the delta rule and relatives

def share(x):
    """(1 - e^-x) / x for x >= 0, without cancellation in value or gradient. For x < 1 it sums the series, exact in
    float64."""
    below = x.clamp(max=1)
    y = 1.0
    for n in range(18, 1, -1):
        y = 1 - below / n * y
    return torch.where(x < 1, y, -torch.expm1(-x) / x.clamp(min=1))


STEPS = {  # --step: eps of S = (I - eps k^T k) S' + eps k^T v, from beta and |k|^2
    "explicit": lambda beta, kk: beta,  # forward Euler: DeltaNet
    "implicit": lambda beta, kk: beta / (1 + beta * kk),  # backward Euler: Longhorn's Theorem 3.1
    "exact": lambda beta, kk: beta * share(beta * kk),  # (1 - exp(-beta |k|^2)) / |k|^2: the flow (arXiv 2512.12602)
}


class DeltaNet(nn.Module):
    """The delta rule with heads and short convolutions (Schlag et al. 2021; Yang et al. 2024).

        q, k, v = silu(causal_conv(W_qkv x));  q, k divided by their length;  beta = sigmoid(W_b x);  all per head
        S = (I - eps k^T k) S' + eps k^T v;  o = (q / sqrt(n)) S                   eps from beta and |k| by `step`
        out = W_o (RMSNorm_head(o) * weight)

    normalize_keys=False leaves k as it is. The families below override `mix` and `gated`.
    """

    operator = "delta_rule"
    values = 1  # width of a value / width of a key

    def __init__(self, config, layer):
        super().__init__()
        if config.step not in STEPS:
            raise ValueError(f"unknown step {config.step!r}: choose one of {', '.join(STEPS)}")
        d = config.n_embd
        self.H = config.n_head
        self.W = config.d_conv
        self.n_v = split_heads(config, multiple=self.values)
        self.n = self.n_v // self.values
        self.backend = config.backend
        self.step = STEPS[config.step]
        self.normalize_keys = config.normalize_keys
        parts = [self.H * self.n, self.H * self.n, self.H * self.n_v]  # q, k, v
        self.qkv = linear(d, sum(parts), start=normal(0.02), parts=parts)
        self.conv_weight = parameter(self.qkv.out_features, self.W, start=dense(self.W))
        self.beta = linear(d, self.H, start=normal(0.02))
        self.norm_weight = parameter(self.n_v, start=constant(1.0))  # shared by the heads
        self.out_proj = linear(d, d, start=to_residual(config))

    def forward(self, x, state=None):
        before, S = (None, None) if state is None else state
        qkv = self.qkv(x)  # (B, T, H (2 n + n_v))
        c = causal_conv1d(qkv, self.conv_weight, None, before, backend=self.backend)  # one call for q, k and v
        qk, v = c.split([2 * self.H * self.n, self.H * self.n_v], -1)
        qk = qk.unflatten(-1, (2 * self.H, self.n))  # (B, T, 2 H, n)
        v = v.unflatten(-1, (self.H, self.n_v))  # (B, T, H, n_v)
        # x / sqrt(|x|^2 + 1e-6), written as RMSNorm, which has a kernel: x over its root mean square, times n^-1/2
        q, k = head_norm(qk, self.n**-0.5, 1e-6 / self.n, self.backend).chunk(2, 2)  # (B, T, H, n) each
        if not self.normalize_keys:
            k = qk[:, :, self.H:]
        o, S = self.mix(x, q * self.n**-0.5, k, v, S)  # (B, T, H, n_v)
        o = head_norm(o, self.norm_weight, backend=self.backend).flatten(2)  # (B, T, H n_v)
        y = self.out_proj(self.gated(o, x))
        return y, None if state is None else (conv_state(qkv, before, self.W), S)

    def eps(self, x, k):
        """The step size of each token (B, T, H), float32."""
        beta = wide(torch.sigmoid(self.beta(x)))
        return self.step(beta, wide(k).square().sum(-1))

    def mix(self, x, q, k, v, S):
        return delta_rule(q, k, v, self.eps(x, k), S, backend=self.backend)

    def gated(self, o, x):
        return o

    def initial_state(self, batch_size, device):
        before = torch.zeros(batch_size, self.W - 1, self.qkv.out_features, device=device)
        S = torch.zeros(batch_size, self.H, self.n, self.n_v, device=device)
        return before, S


class GatedDeltaNet(DeltaNet):
    """DeltaNet whose state decays first, by one factor per head and token (Yang et al. 2024b, arXiv 2412.06464).

        a = exp(-exp(A_log) softplus(W_a x + b));  S = (I - eps k^T k) a S' + eps k^T v        values twice as wide as k
        out = W_o (RMSNorm_head(o) * weight * silu(W_g x))
    """

    operator = "gated_delta_rule"
    values = 2

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.forget = linear(config.n_embd, self.H, start=normal(0.02))
        self.dt_bias = parameter(self.H, start=step_size(1e-3, 0.1))
        self.A_log = parameter(self.H, start=log_uniform(0.0, 16.0))
        self.gate = linear(config.n_embd, config.n_embd, start=normal(0.02))

    def mix(self, x, q, k, v, S):
        log_a = -wide(self.A_log).exp() * F.softplus(wide(self.forget(x)) + self.dt_bias)  # (B, T, H)
        return gated_delta_rule(q, k, v, self.eps(x, k), log_a, S, backend=self.backend)

    def gated(self, o, x):
        return o * F.silu(self.gate(x))


class KDA(DeltaNet):
    """Kimi delta attention: a decay per channel of the keys, low-rank gates (Kimi Team 2025, arXiv 2510.26692).

        a = exp(-exp(A_log) softplus(W_2 W_1 x + b));  S = (I - eps k^T k) diag(a) S' + eps k^T v   A_log per head
        out = W_o (RMSNorm_head(o) * weight * sigmoid(W_4 W_3 x + c))                     W_1 x, W_3 x as wide as a head
    """

    operator = "kda"

    def __init__(self, config, layer):
        super().__init__(config, layer)
        d = config.n_embd
        self.forget1 = linear(d, self.n, start=normal(0.02))
        self.forget2 = linear(self.n, d, start=normal(0.02))
        self.dt_bias = parameter(d, start=step_size(1e-3, 0.1))
        self.A_log = parameter(self.H, start=log_uniform(1.0, 16.0))
        self.gate1 = linear(d, self.n, start=normal(0.02))
        self.gate2 = linear(self.n, d, start=normal(0.02), bias=constant(0.0))

    def mix(self, x, q, k, v, S):
        rate = F.softplus(wide(self.forget2(self.forget1(x))) + self.dt_bias)  # (B, T, d)
        rate = rate.unflatten(-1, (self.H, self.n))
        log_a = -wide(self.A_log).exp()[:, None] * rate  # (B, T, H, n)
        return kda(q, k, v, self.eps(x, k), log_a, S, backend=self.backend)

    def gated(self, o, x):
        return o * torch.sigmoid(self.gate2(self.gate1(x)))


class Mesa(DeltaNet):
    """MesaNet: the regression on all tokens so far, solved again at every token (von Oswald et al. 2025, 2506.05233).

        a = sigmoid(W_a x + b);  beta = sigmoid(W_b x + c);  L = softplus(ridge) + 1/4 per channel of the keys
        H = a H' + beta k^T k;  U = a U' + beta k^T v;  o = (q / sqrt(n)) (H + diag(L))^-1 U
        out = W_o (RMSNorm_head(o) * weight)

    The delta rule takes one step per token towards this regression's solution and keeps no H. --step has no effect.
    v is convolved and passed through SiLU like q and k; in flash-linear-attention's layer it is W_v x alone.
    """

    operator = "mesa"

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.beta = linear(config.n_embd, self.H, start=normal(0.02), bias=constant(0.0))
        self.forget = linear(config.n_embd, self.H, start=normal(0.02), bias=constant(0.0))
        self.ridge = parameter(self.H, self.n, start=constant(math.log(math.expm1(0.75))))  # L = 1

    def mix(self, x, q, k, v, S):
        log_a = F.logsigmoid(wide(self.forget(x)))  # (B, T, H)
        beta = wide(torch.sigmoid(self.beta(x)))  # (B, T, H)
        ridge = F.softplus(self.ridge) + 0.25  # (H, n)
        return mesa(q, k, v, beta, log_a, ridge, S, backend=self.backend)

    def initial_state(self, batch_size, device):
        before, U = super().initial_state(batch_size, device)
        H = torch.zeros(batch_size, self.H, self.n, self.n, device=device)
        return before, (H, U)


# -------------------------------------------------------------------------------------------------------------- Mamba-2

class Mamba2(nn.Module):
    """Mamba-2: one decay per head and token, so that chunks are matrix products (Dao & Gu 2024, arXiv 2405.21060).

        z, x, B, C, dt = split(W_in u);  x, B, C = silu(causal_conv(x, B, C) + b)
        D = softplus(dt + dt_bias);  S = exp(-exp(A_log) D) S' + D B^T x;  y = C S + skip * x         per head
        out = W_out (RMSNorm(y * silu(z)) * weight)

    N = 8 d_state (Mamba: d_state): 128 at the default of 16, as in Mamba-2's paper. All heads share B and C. A head has
    n_embd / n_head channels, so there are expand * n_head heads.
    """

    operator = "retention"

    def __init__(self, config, layer):
        super().__init__()
        d = config.n_embd
        self.N = 8 * config.d_state
        self.W = config.d_conv
        self.P = split_heads(config)
        self.H = config.expand * config.n_head
        self.d_inner = config.expand * d
        self.backend = config.backend
        convolved = self.d_inner + 2 * self.N
        parts = [self.d_inner, self.d_inner, self.N, self.N, self.H]  # z, x, B, C, dt
        self.in_proj = linear(d, sum(parts), start=dense(d), parts=parts)
        self.conv_weight = parameter(convolved, self.W, start=dense(self.W))
        self.conv_bias = parameter(convolved, start=dense(self.W))
        self.dt_bias = parameter(self.H, start=step_size(1e-3, 0.1))
        self.A_log = parameter(self.H, start=log_uniform(1.0, 16.0))
        self.skip = parameter(self.H, start=constant(1.0))
        self.norm_weight = parameter(self.d_inner, start=constant(1.0))
        self.out_proj = linear(self.d_inner, d, start=uniform((self.d_inner * config.n_branches) ** -0.5))

    def forward(self, u, state=None):
        before, S = (None, None) if state is None else state
        z, xBC, dt = self.in_proj(u).split([self.d_inner, self.d_inner + 2 * self.N, self.H], -1)
        c = causal_conv1d(xBC, self.conv_weight, self.conv_bias, before, backend=self.backend)
        x, B, C = c.split([self.d_inner, self.N, self.N], -1)
        x = x.unflatten(-1, (self.H, self.P))  # (B, T, H, P)
        B, C = B[:, :, None], C[:, :, None]  # (B, T, 1, N) each
        dt = F.softplus(wide(dt) + self.dt_bias)  # (B, T, H)
        y, S = retention(C, B, x * dt[..., None], -wide(self.A_log).exp() * dt, state=S, backend=self.backend)
        y = torch.addcmul(y, x, self.skip[:, None]).flatten(2) * F.silu(z)  # (B, T, d_inner)
        y = rms_norm(y, self.norm_weight, backend=self.backend).to(u.dtype)
        y = self.out_proj(y)
        return y, None if state is None else (conv_state(xBC, before, self.W), S)

    def initial_state(self, batch_size, device):
        before = torch.zeros(batch_size, self.W - 1, self.d_inner + 2 * self.N, device=device)
        S = torch.zeros(batch_size, self.H, self.N, self.P, device=device)
        return before, S


# ------------------------------------------------------------------------------------------------------------- families

FAMILIES |= {
    "retnet": [Retention, RetNetGLU],
    "rwkv": [RWKVTimeMix, RWKVChannelMix],
    # not in Table 1
    "rwkv4": [RWKV4TimeMix, RWKV4ChannelMix],
    "deltanet": [DeltaNet, SwiGLU],
    "gated_deltanet": [GatedDeltaNet, SwiGLU],
    "kda": [KDA, SwiGLU],
    "mesa": [Mesa, SwiGLU],
    "mamba2": [Mamba2, Mamba2],
    "swa": [SlidingWindow, SwiGLU],
    "longhorn_exact": [LonghornExact, LonghornExact],
}
# RWKV-4's norms have a bias in the published weights and in transformers, our reference.
NORMS |= {"rwkv": lambda config: nn.LayerNorm(config.n_embd, config.norm_eps, bias=False),
          "rwkv4": lambda config: nn.LayerNorm(config.n_embd, config.norm_eps)}
EMBEDDING_NORMS.add("rwkv4")
