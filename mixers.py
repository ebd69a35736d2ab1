"""What the families of model.py share, and the mixers beside the six of the paper's Table 1: RWKV-4 and DeltaNet.

    RWKV-4     wkv_t = (num' + e^{u + k_t} v_t) / (den' + e^{u + k_t}),  num = e^{-w} num' + e^{k_t} v_t,  den alike
    DeltaNet   S_t = (I - beta_t k_t^T k_t) S_{t-1} + beta_t k_t^T v_t,  o_t = q_t S_t,  |k| = 1

DeltaNet's step is Longhorn's with a learned step size in place of beta / (1 + beta |k|^2). Only its normalised keys
keep beta |k|^2 below 2; Longhorn does not need them.

A mixer's methods are listed in model.py, which imports this file.
"""

import math

import torch
import torch.nn as nn
from torch.utils.weak import WeakIdKeyDictionary

from kernels.linear_attention import delta_rule, wkv4
from kernels.ops import causal_conv1d, conv_state, rms_norm

# --------------------------------------------------------------------------------------------------- shared by families


def dense(fan_in):
    """PyTorch's default for a linear map: uniform within +-1/sqrt(fan_in)."""
    return "uniform", fan_in**-0.5


def xavier(fan_out, fan_in, gain):
    """Glorot's uniform for a map (fan_out, fan_in)."""
    return "uniform", gain * math.sqrt(6 / (fan_in + fan_out))


def to_residual(config):
    """GPT-2's scale for what writes to the residual stream: its variance does not grow with the number of branches."""
    return "normal", 0.02 / math.sqrt(config.n_branches)


def split_heads(config, multiple=1):
    """Channels per head. Raises ValueError where heads do not divide n_embd into multiples of `multiple`."""
    if config.n_embd % (config.n_head * multiple):
        raise ValueError(f"n_embd {config.n_embd} over n_head {config.n_head} is no number of channels per head that "
                         f"{multiple} divides: choose an n_head that divides {config.n_embd // multiple}")
    return config.n_embd // config.n_head


def head_norm(x, weight=1.0, eps=1e-5, backend=None):
    """RMSNorm over the channels of each head, without parameters: x (B, T, H, n), times a number or a weight (n,)."""
    if not isinstance(weight, torch.Tensor):
        weight = torch.full(x.shape[-1:], weight, device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
    return rms_norm(x, weight, eps, backend)


# Keys that `append_to_cache` returned -> (buffers of keys and values with free room behind them; the values returned).
ROOMS = WeakIdKeyDictionary()


def append_to_cache(cache, k, v):
    """Append k and v (B, H, T, n) to a (keys, values) cache. The cache passed in is not modified.

    They are written into free room behind it, so that a new token does not copy all before it; when the room is used
    up, a quarter more is made. The room belongs to the very tensors that were returned, and the first caller to
    continue them gets it. Any other continuation, or a cache that was cut, sorted, expanded, moved or loaded, begins
    with a copy. With gradients or when compiling: torch.cat.
    """
    past_k, past_v = cache
    past, T = past_k.shape[2], past_k.shape[2] + k.shape[2]
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.cat([past_k.to(k.dtype), k], 2), torch.cat([past_v.to(v.dtype), v], 2)
    room_k, room_v, values = ROOMS.pop(past_k, (None, None, None))  # of two threads one gets it
    if not (values is past_v and T <= room_k.shape[2] and k.dtype == room_k.dtype and k.shape[:2] == room_k.shape[:2]
            and room_k.is_inference() == torch.is_inference_mode_enabled()):
        room_k, room_v = (a.new_empty(*a.shape[:2], T + max(32, T // 4), a.shape[3]) for a in (k, v))
        room_k[:, :, :past], room_v[:, :, :past] = past_k, past_v
    room_k[:, :, past:T], room_v[:, :, past:T] = k, v
    keys, values = room_k[:, :, :T], room_v[:, :, :T]
    ROOMS[keys] = room_k, room_v, values
    return keys, values


def token_shift(x, last):
    """The token before each: x (B, T, d) shifted by one step, with `last` (B, d), or zeros, in front."""
    first = torch.zeros_like(x[:, :1]) if last is None else last[:, None].to(x.dtype)
    return torch.cat([first, x[:, :-1]], 1)  # (B, T, d)


def ramp(n):
    """0, 1/(n-1), ..., 1 in float64; 0 alone for n = 1."""
    return torch.arange(n, dtype=torch.float64) / max(1, n - 1)


def rwkv_mu(config, layer):
    """How much of the token before RWKV's channels take at first: (a, {letter: mu (d,)}), a the layer's depth in 0..1.

    Peng et al. 2023, appendix: early channels and late layers look at the present, k less than r. In float64.
    """
    a, c = layer / max(1, config.n_layer - 1), 1 - layer / config.n_layer
    i = torch.arange(config.n_embd, dtype=torch.float64) / config.n_embd
    return a, {"k": 1 - i**c, "v": 1 - (i**c + 0.3 * a), "r": 1 - i ** (c / 2), "g": 1 - i ** (c / 2)}


# --------------------------------------------------------------------------------------------------------------- RWKV-4

class RWKV4TimeMix(nn.Module):
    """RWKV-4's attention without softmax (Peng et al. 2023, Eq. 11 to 18; the paper's Appendix A.4).

        x_c = x + (x_before - x) * mu_c  for c in r, k, v
        r, k, v = W_r x_r, W_k x_k, W_v x_v
        out = W_o (sigmoid(r) * wkv(k, v, w, u)),  w = exp(decay) > 0
    """

    operator = "wkv4"

    def __init__(self, config, layer):
        super().__init__()
        d, self.layer, self.backend = config.n_embd, layer, config.backend
        self.mu = nn.Parameter(torch.empty(3, d))  # of r, k, v
        self.decay = nn.Parameter(torch.empty(d))
        self.bonus = nn.Parameter(torch.empty(d))
        self.receptance = nn.Linear(d, d, bias=False)
        self.key = nn.Linear(d, d, bias=False)
        self.value = nn.Linear(d, d, bias=False)
        self.output = nn.Linear(d, d, bias=False)

    def forward(self, x, state=None):
        last, *past = (None, None) if state is None else state
        change = token_shift(x, last) - x  # (B, T, d)
        r, k, v = (torch.addcmul(x, change, mu) for mu in self.mu.to(x.dtype))
        r, k, v = self.receptance(r), self.key(k), self.value(v)  # (B, T, d) each
        y, past = wkv4(k, v, self.decay.exp(), self.bonus, None if state is None else past, backend=self.backend)
        y = self.output(torch.sigmoid(r) * y)
        return y, None if state is None else (x[:, -1].clone(), *past)

    def initial_state(self, batch_size, device):
        zero = torch.zeros(batch_size, self.decay.numel(), device=device)
        return zero, zero, zero, zero - 1e38  # last token; numerator, denominator, and the exponent common to both

    def init_table(self, config):
        d = config.n_embd
        a, mu = rwkv_mu(config, self.layer)
        zigzag = (torch.arange(d, dtype=torch.float64) + 1) % 3 - 1
        return {"mu": ("tensor", torch.stack([mu[c] for c in "rkv"])),
                "decay": ("tensor", -5 + 8 * ramp(d) ** (0.7 + 1.3 * a)),
                "bonus": ("tensor", math.log(0.3) + 0.5 * zigzag),
                "receptance.weight": ("normal", 0.02), "key.weight": ("normal", 0.02), "value.weight": ("normal", 0.02),
                "output.weight": to_residual(config)}

    def mixing_flops(self, T):
        # per channel, output: bonus and maximum (2), two exponentials (4), numerator, denominator, ratio (6);
        # state: decay and maximum (2), two exponentials (4), numerator and denominator (5)
        return 23 * self.decay.numel()


# ------------------------------------------------------------------------------------------------------------- DeltaNet

class DeltaNet(nn.Module):
    """The delta rule over heads, with short convolutions (Schlag et al. 2021; Yang et al. 2024).

        q, k, v = silu(causal_conv(W_qkv x));  q, k divided by their length;  beta = sigmoid(W_b x);  all per head
        S = (I - beta k^T k) S' + beta k^T v;  o = (q / sqrt(n)) S
        out = W_o (RMSNorm_head(o) * weight)
    """

    operator = "delta_rule"

    def __init__(self, config, layer):
        super().__init__()
        d, self.H, self.W = config.n_embd, config.n_head, config.d_conv
        self.n, self.backend = split_heads(config), config.backend
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(3 * d, self.W))
        self.beta = nn.Linear(d, self.H, bias=False)
        self.norm_weight = nn.Parameter(torch.empty(self.n))  # shared by the heads
        self.out_proj = nn.Linear(d, d, bias=False)

    def forward(self, x, state=None):
        before, S = (None, None) if state is None else state
        qkv = self.qkv(x)  # (B, T, 3 d)
        c = causal_conv1d(qkv, self.conv_weight, None, before, backend=self.backend)  # one call for all three
        qk, v = c.unflatten(-1, (3 * self.H, self.n)).split([2 * self.H, self.H], 2)  # (B, T, 2 H, n), (B, T, H, n)
        # x / sqrt(|x|^2 + 1e-6), written as RMSNorm, which has a kernel: over the root of the mean square, times n^-1/2
        q, k = head_norm(qk, self.n**-0.5, 1e-6 / self.n, self.backend).chunk(2, 2)  # (B, T, H, n) each
        beta = torch.sigmoid(self.beta(x))  # (B, T, H)
        o, S = delta_rule(q * self.n**-0.5, k, v, beta, S, backend=self.backend)  # (B, T, H, n)
        y = self.out_proj(head_norm(o, self.norm_weight, backend=self.backend).flatten(2))
        return y, None if state is None else (conv_state(qkv, before, self.W), S)

    def initial_state(self, batch_size, device):
        return (torch.zeros(batch_size, self.W - 1, 3 * self.H * self.n, device=device),
                torch.zeros(batch_size, self.H, self.n, self.n, device=device))

    def init_table(self, config):
        return {"qkv.weight": ("normal", 0.02), "conv_weight": dense(self.W), "beta.weight": ("normal", 0.02),
                "norm_weight": ("constant", 1.0), "out_proj.weight": to_residual(config)}

    def mixing_flops(self, T):
        # per state: k S (2), S += (2), q S (2); per value: the error and beta (2), its three convolutions
        return self.H * self.n * (6 * self.n + 2 + 3 * 2 * self.W)

    def projections(self):
        return {"qkv.weight": [self.H * self.n] * 3}
