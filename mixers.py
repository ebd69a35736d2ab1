"""What the families of model.py share, and the mixers that are not beside the skeleton in model.py.

    RWKV-4           wkv = (num' + e^{u + k} v) / (den' + e^{u + k}),  num = e^{-w} num' + e^k v,  den alike
    DeltaNet         S = (I - eps k^T k) S' + eps k^T v                    o = q S
    gated DeltaNet   the same of a S', one decay a per head                o = q S
    KDA              the same of diag(a) S', one per channel of the keys   o = q S
    Mesa             H = a H' + beta k^T k,  U = a U' + beta k^T v         o = q (H + diag(L))^-1 U
    Mamba-2          S = a S' + D B^T x                                    y = C S

The error of a memory that answers k with v is dS/dt = -k^T (k S - v). A delta rule takes one step of it per token, and
STEPS says which: eps = beta is forward Euler's, DeltaNet's own, and only keys of length 1 keep its beta |k|^2 below 2;
backward Euler's is Longhorn's, here with one eps per head, and is stable for keys of any length; the third is the flow.

A mixer's methods are listed in model.py, which imports this file.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.weak import WeakIdKeyDictionary

from kernels.linear_attention import delta_rule, gated_delta_rule, kda, mesa, retention, wkv4
from kernels.ops import causal_conv1d, conv_state, documents_of, rms_norm

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


def wide(a):
    """a in float32, float64 as it is: step sizes and decays are not rounded to 16 bits."""
    return a.to(torch.promote_types(a.dtype, torch.float32))


def split_heads(config, multiple=1):
    """Channels per head. Raises ValueError where heads do not divide n_embd into multiples of `multiple`."""
    if config.n_embd % (config.n_head * multiple):
        times = f" times {multiple}" * (multiple > 1)
        raise ValueError(f"n_embd {config.n_embd} is no multiple of n_head {config.n_head}{times}: choose an n_head "
                         f"that divides {config.n_embd // multiple}")
    return config.n_embd // config.n_head


def unscaled_as_released(config):
    """`to_residual`, but in the released code of RWKV's channel mix, of RetNet and of GLA."""
    return ("normal", 0.02) if config.as_released else to_residual(config)


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
    """The token before each: x (B, T, d) shifted by one step, with `last` (B, d), or zeros, in front, and
    zeros where a document begins."""
    first = torch.zeros_like(x[:, :1]) if last is None else last[:, None].to(x.dtype)
    before, found = torch.cat([first, x[:, :-1]], 1), documents_of(x) if last is None else None  # (B, T, d)
    return before if found is None else before.masked_fill(found.starts[..., None], 0)


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


# --------------------------------------------------------------------------------------- the delta rule and its kindred

def share(x):
    """(1 - e^-x) / x of x >= 0, and its gradient, without cancellation: below 1 its series, to float64's last bit."""
    below, y = x.clamp(max=1), 1.0
    for n in range(18, 1, -1):
        y = 1 - below / n * y
    return torch.where(x < 1, y, -torch.expm1(-x) / x.clamp(min=1))


STEPS = {  # --step: eps of S = (I - eps k^T k) S' + eps k^T v, from beta and |k|^2
    "explicit": lambda beta, kk: beta,  # forward Euler: DeltaNet
    "implicit": lambda beta, kk: beta / (1 + beta * kk),  # backward Euler: Longhorn's Theorem 3.1
    "exact": lambda beta, kk: beta * share(beta * kk),  # (1 - exp(-beta |k|^2)) / |k|^2: the flow (arXiv 2512.12602)
}


class DeltaNet(nn.Module):
    """The delta rule over heads, with short convolutions (Schlag et al. 2021; Yang et al. 2024).

        q, k, v = silu(causal_conv(W_qkv x));  q, k divided by their length;  beta = sigmoid(W_b x);  all per head
        S = (I - eps k^T k) S' + eps k^T v;  o = (q / sqrt(n)) S                   eps from beta and |k| by `step`
        out = W_o (RMSNorm_head(o) * weight)

    normalize_keys=False leaves k as long as it is. The families below change `mix` and `gated`.
    """

    operator = "delta_rule"
    values = 1  # width of a value over that of a key

    def __init__(self, config, layer):
        super().__init__()
        d, self.H, self.W = config.n_embd, config.n_head, config.d_conv
        self.n_v = split_heads(config, multiple=self.values)
        self.n, self.backend = self.n_v // self.values, config.backend
        self.step, self.normalize_keys = STEPS[config.step], config.normalize_keys
        self.qkv = nn.Linear(d, self.H * (2 * self.n + self.n_v), bias=False)
        self.conv_weight = nn.Parameter(torch.empty(self.qkv.out_features, self.W))
        self.beta = nn.Linear(d, self.H, bias=False)
        self.norm_weight = nn.Parameter(torch.empty(self.n_v))  # shared by the heads
        self.out_proj = nn.Linear(d, d, bias=False)

    def forward(self, x, state=None):
        before, S = (None, None) if state is None else state
        qkv = self.qkv(x)  # (B, T, H (2 n + n_v))
        c = causal_conv1d(qkv, self.conv_weight, None, before, backend=self.backend)  # one call for all three
        qk, v = c.split([2 * self.H * self.n, self.H * self.n_v], -1)
        qk, v = qk.unflatten(-1, (2 * self.H, self.n)), v.unflatten(-1, (self.H, self.n_v))  # (B, T, H, n_v)
        # x / sqrt(|x|^2 + 1e-6), written as RMSNorm, which has a kernel: over the root of the mean square, times n^-1/2
        q, k = head_norm(qk, self.n**-0.5, 1e-6 / self.n, self.backend).chunk(2, 2)  # (B, T, H, n) each
        k = k if self.normalize_keys else qk[:, :, self.H:]
        o, S = self.mix(x, q * self.n**-0.5, k, v, S)  # (B, T, H, n_v)
        y = self.out_proj(self.gated(head_norm(o, self.norm_weight, backend=self.backend).flatten(2), x))
        return y, None if state is None else (conv_state(qkv, before, self.W), S)

    def eps(self, x, k):
        """The step size of each token (B, T, H), float32."""
        return self.step(wide(torch.sigmoid(self.beta(x))), wide(k).square().sum(-1))

    def mix(self, x, q, k, v, S):
        return delta_rule(q, k, v, self.eps(x, k), S, backend=self.backend)

    def gated(self, o, x):
        return o

    def initial_state(self, batch_size, device):
        return (torch.zeros(batch_size, self.W - 1, self.qkv.out_features, device=device),
                torch.zeros(batch_size, self.H, self.n, self.n_v, device=device))

    def init_table(self, config):
        return {"qkv.weight": ("normal", 0.02), "conv_weight": dense(self.W), "beta.weight": ("normal", 0.02),
                "norm_weight": ("constant", 1.0), "out_proj.weight": to_residual(config)}

    def mixing_flops(self, T):
        # per state: k S (2), S += (2), q S (2); per value: the error and beta (2); three convolutions
        return self.H * (6 * self.n * self.n_v + 2 * self.n_v + (2 * self.n + self.n_v) * 2 * self.W)

    def projections(self):
        return {"qkv.weight": [self.H * self.n] * 2 + [self.H * self.n_v]}


class GatedDeltaNet(DeltaNet):
    """DeltaNet whose state decays first, by one number per head and token (Yang et al. 2024b, arXiv 2412.06464).

        a = exp(-exp(A_log) softplus(W_a x + b));  S = (I - eps k^T k) a S' + eps k^T v        values twice the keys
        out = W_o (RMSNorm_head(o) * weight * silu(W_g x))
    """

    operator = "gated_delta_rule"
    values = 2

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.forget = nn.Linear(config.n_embd, self.H, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(self.H))
        self.A_log = nn.Parameter(torch.empty(self.H))
        self.gate = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def mix(self, x, q, k, v, S):
        log_a = -wide(self.A_log).exp() * F.softplus(wide(self.forget(x)) + self.dt_bias)  # (B, T, H)
        return gated_delta_rule(q, k, v, self.eps(x, k), log_a, S, backend=self.backend)

    def gated(self, o, x):
        return o * F.silu(self.gate(x))

    def init_table(self, config):
        return {**super().init_table(config), "forget.weight": ("normal", 0.02), "gate.weight": ("normal", 0.02),
                "dt_bias": ("step size", (1e-3, 0.1)), "A_log": ("log", (0.0, 16.0))}

    def mixing_flops(self, T):
        return super().mixing_flops(T) + self.H * self.n * self.n_v  # a S


class KDA(DeltaNet):
    """Kimi delta attention: a decay per channel of the keys, gates of low rank (Kimi Team 2025, arXiv 2510.26692).

        a = exp(-exp(A_log) softplus(W_2 W_1 x + b));  S = (I - eps k^T k) diag(a) S' + eps k^T v   A_log per head
        out = W_o (RMSNorm_head(o) * weight * sigmoid(W_4 W_3 x + c))                    W_1, W_3 to the width of a head
    """

    operator = "kda"

    def __init__(self, config, layer):
        super().__init__(config, layer)
        d = config.n_embd
        self.forget1 = nn.Linear(d, self.n, bias=False)
        self.forget2 = nn.Linear(self.n, d, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(d))
        self.A_log = nn.Parameter(torch.empty(self.H))
        self.gate1 = nn.Linear(d, self.n, bias=False)
        self.gate2 = nn.Linear(self.n, d)

    def mix(self, x, q, k, v, S):
        rate = F.softplus(wide(self.forget2(self.forget1(x))) + self.dt_bias).unflatten(-1, (self.H, self.n))
        log_a = -wide(self.A_log).exp()[:, None] * rate  # (B, T, H, n)
        return kda(q, k, v, self.eps(x, k), log_a, S, backend=self.backend)

    def gated(self, o, x):
        return o * torch.sigmoid(self.gate2(self.gate1(x)))

    def init_table(self, config):
        linear = {f"{name}.weight": ("normal", 0.02) for name in ("forget1", "forget2", "gate1", "gate2")}
        return {**super().init_table(config), **linear, "gate2.bias": ("constant", 0.0),
                "dt_bias": ("step size", (1e-3, 0.1)), "A_log": ("log", (1.0, 16.0))}

    def mixing_flops(self, T):
        return super().mixing_flops(T) + self.H * self.n * self.n_v  # diag(a) S


class Mesa(DeltaNet):
    """MesaNet: the regression on all that was seen, solved anew at every token (von Oswald et al. 2025, 2506.05233).

        a = sigmoid(W_a x + b);  beta = sigmoid(W_b x + c);  L = softplus(ridge) + 1/4 per channel of the keys
        H = a H' + beta k^T k;  U = a U' + beta k^T v;  o = (q / sqrt(n)) (H + diag(L))^-1 U
        out = W_o (RMSNorm_head(o) * weight)

    The delta rule takes one step towards this regression's solution per token and remembers no H. `step` has no part.
    """

    operator = "mesa"

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.beta = nn.Linear(config.n_embd, self.H)
        self.forget = nn.Linear(config.n_embd, self.H)
        self.ridge = nn.Parameter(torch.empty(self.H, self.n))

    def mix(self, x, q, k, v, S):
        log_a, beta = F.logsigmoid(wide(self.forget(x))), wide(torch.sigmoid(self.beta(x)))  # (B, T, H) each
        return mesa(q, k, v, beta, log_a, F.softplus(self.ridge) + 0.25, S, backend=self.backend)

    def initial_state(self, batch_size, device):
        before, U = super().initial_state(batch_size, device)
        return before, (torch.zeros(batch_size, self.H, self.n, self.n, device=device), U)

    def init_table(self, config):
        linear = {"forget.weight": ("normal", 0.02), "forget.bias": ("constant", 0.0), "beta.bias": ("constant", 0.0)}
        return {**super().init_table(config), **linear, "ridge": ("constant", math.log(math.expm1(0.75)))}  # L = 1

    def mixing_flops(self, T):
        # per number of H: a H (1), k^T k added (2), 30 steps of p H (60); of U: 1, 2 and x U (2); per channel of k: its
        # steps (10 each); three convolutions
        return self.H * self.n * (63 * self.n + 5 * self.n_v + 300 + 3 * 2 * self.W)


# -------------------------------------------------------------------------------------------------------------- Mamba-2

class Mamba2(nn.Module):
    """Mamba-2: one decay per head and token, so that a chunk is matrix products (Dao & Gu 2024, arXiv 2405.21060).

        z, x, B, C, dt = split(W_in u);  x, B, C = silu(causal_conv(x, B, C) + b)
        D = softplus(dt + dt_bias);  S = exp(-exp(A_log) D) S' + D B^T x;  y = C S + skip * x         per head
        out = W_out (RMSNorm(y * silu(z)) * weight)

    N = 8 d_state numbers per channel, where Mamba has d_state: 128, as in the paper, at the default of 16. B and C are
    shared by all heads; a head has n_embd / n_head channels, so there are expand times n_head.
    """

    operator = "retention"

    def __init__(self, config, layer):
        super().__init__()
        d, self.N, self.W, self.backend = config.n_embd, 8 * config.d_state, config.d_conv, config.backend
        self.P, self.H, self.d_inner = split_heads(config), config.expand * config.n_head, config.expand * d
        self.in_proj = nn.Linear(d, 2 * self.d_inner + 2 * self.N + self.H, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(self.d_inner + 2 * self.N, self.W))
        self.conv_bias = nn.Parameter(torch.empty(self.d_inner + 2 * self.N))
        self.dt_bias = nn.Parameter(torch.empty(self.H))
        self.A_log = nn.Parameter(torch.empty(self.H))
        self.skip = nn.Parameter(torch.empty(self.H))
        self.norm_weight = nn.Parameter(torch.empty(self.d_inner))
        self.out_proj = nn.Linear(self.d_inner, d, bias=False)

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
        y = self.out_proj(rms_norm(y, self.norm_weight, backend=self.backend))
        return y, None if state is None else (conv_state(xBC, before, self.W), S)

    def initial_state(self, batch_size, device):
        return (torch.zeros(batch_size, self.W - 1, self.d_inner + 2 * self.N, device=device),
                torch.zeros(batch_size, self.H, self.N, self.P, device=device))

    def init_table(self, config):
        return {"in_proj.weight": dense(config.n_embd), "conv_weight": dense(self.W), "conv_bias": dense(self.W),
                "dt_bias": ("step size", (1e-3, 0.1)), "A_log": ("log", (1.0, 16.0)), "skip": ("constant", 1.0),
                "norm_weight": ("constant", 1.0),
                "out_proj.weight": ("uniform", (self.d_inner * config.n_branches) ** -0.5)}

    def mixing_flops(self, T):
        # per state: a S (1), B^T x added (2), C S (2); per channel: step size, skip and gate (5); the convolutions
        return self.d_inner * (5 * self.N + 5) + (self.d_inner + 2 * self.N) * 2 * self.W

    def projections(self):
        return {"in_proj.weight": [self.d_inner, self.d_inner, self.N, self.N, self.H]}
