"""The models of the recall benchmark: two layers of one mixer each on model.py's skeleton, and the mixers that are new here.

    attention    softmax(q k^T / sqrt(d)) v, one head, learned positions, biases
    BaseConv     y = conv(x) * (W x + b) + x                      conv: 3 taps in the first layer, T in the second
    Based        first layer BaseConv; second y_t = sum_s w_ts v_s / sum_s w_ts,  w = 1 + q.k + (q.k)^2 / 2,  q, k of 8
    Hyena        y = W_o (x_2 * conv_T(x_1 * v)),  x_1, x_2, v = conv_3(W x)

Sources: Arora et al. 2023 (BaseConv, the benchmark), Arora et al. 2024 (Based), Poli et al. 2023 (Hyena).

The surprise: Based's attention is linear because w = phi(q) . phi(k) with 1 + 8 + 64 features, so that it is retention
without decay; and since a column of ones among the values adds up the weights, the same call gives the denominator.

A branch's methods are listed in model.py. Add one of your own with a line in MIXERS.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kernels.linear_attention import retention  # noqa: E402
from kernels.ops import causal_conv1d, conv_state  # noqa: E402
from mixers import DeltaNet, RWKV4TimeMix, dense, scan_backend, to_residual  # noqa: E402
from model import GLA, LM, NORM_OF_EMBEDDING, NORMS, Longhorn, LonghornExact, Mamba, ModelConfig, Residual, RMSNorm  # noqa: E402

# ------------------------------------------------------------------------------------------------------------ convolutions


class LongConv(nn.Module):
    """A depthwise causal convolution as long as the context, its kernel given by a small MLP of the lag.

        t = lag / T;  a = sin(w (W_1 [t, cos 2 pi t, sin 2 pi t] + b_1));  a = sin(w (W_2 a + b_2));  kernel = W_3 a
        with a window: kernel * exp(-t |delta|), delta evenly from ln(0.01) / 1.5 to ln(0.01) / 0.3 over the channels

    w is learned from 10 on, a hidden unit: with 1 the kernel would start as smooth as its three features. Kernels are not
    decayed, so that these are parameters and no nn.Linear.
    """

    HIDDEN = 64

    def __init__(self, config, window):
        super().__init__()
        self.T, d, h = config.block_size, config.n_embd, self.HIDDEN
        self.w1, self.b1 = nn.Parameter(torch.empty(3, h)), nn.Parameter(torch.empty(h))
        self.w2, self.b2 = nn.Parameter(torch.empty(h, h)), nn.Parameter(torch.empty(h))
        self.w3, self.frequency = nn.Parameter(torch.empty(h, d)), nn.Parameter(torch.empty(h))
        t = torch.arange(self.T)[:, None] / self.T
        self.register_buffer("features", torch.cat([t, (2 * math.pi * t).cos(), (2 * math.pi * t).sin()], 1), persistent=False)
        delta = torch.linspace(math.log(0.01) / 1.5, math.log(0.01) / 0.3, d)
        self.register_buffer("window", (-t * delta.abs()).exp() if window else None, persistent=False)

    def kernel(self):
        """The taps by lag, (T, d)."""
        a = torch.sin(self.frequency * (self.features @ self.w1 + self.b1))  # (T, hidden)
        k = torch.sin(self.frequency * (a @ self.w2 + self.b2)) @ self.w3  # (T, d)
        return k if self.window is None else k * self.window

    def forward(self, u, past=None):
        """y_t = sum_lag kernel_lag u_{t - lag}: u (B, T, d), led by `past` (B, ., d), -> (B, T, d) in u's dtype."""
        whole = u if past is None else torch.cat([past.to(u.dtype), u], 1)
        n = whole.shape[1]
        if n > self.T:
            raise ValueError(f"a sequence of {n} tokens, but the long convolution has {self.T} taps: give a larger block_size")
        with torch.autocast(u.device.type, enabled=False):
            f = lambda a: torch.fft.rfft(a.transpose(-1, -2).to(self.w1.dtype), 2 * n)  # twice as long: nothing wraps around
            y = torch.fft.irfft(f(whole) * f(self.kernel()[:n]), 2 * n)[..., n - u.shape[1]:n]  # (B, d, T)
        return y.transpose(1, 2).to(u.dtype)

    def init_table(self):
        return {"w1": dense(3), "b1": dense(3), "w2": dense(self.HIDDEN), "b2": dense(self.HIDDEN), "w3": dense(self.HIDDEN),
                "frequency": ("constant", 10.0)}

    def flops(self, T):
        return 2 * 10 * math.log2(2 * T) + 6  # a token and channel: two transforms of 2 T, a product; the kernel's is shared


def named(prefix, table):
    return {f"{prefix}.{name}": how for name, how in table.items()}


class BaseConv(nn.Module):
    """y = conv(x) * (W x + b) + x with a depthwise causal convolution of 3 taps (Arora et al. 2023)."""

    W = 3

    def __init__(self, config, layer):
        super().__init__()
        self.backend = scan_backend(config)
        self.proj = nn.Linear(config.n_embd, config.n_embd)
        self.conv_weight = nn.Parameter(torch.empty(config.n_embd, self.W))
        self.conv_bias = nn.Parameter(torch.empty(config.n_embd))

    def forward(self, x, state=None):
        c = causal_conv1d(x, self.conv_weight, self.conv_bias, state, silu=False, backend=self.backend)  # (B, T, d)
        return torch.addcmul(x, c, self.proj(x)), None if state is None else conv_state(x, state, self.W)

    def initial_state(self, batch_size, device):
        return torch.zeros(batch_size, self.W - 1, self.proj.in_features, device=device)

    def init_table(self, config):
        return {"proj.weight": to_residual(config), "proj.bias": ("constant", 0.0), "conv_weight": dense(self.W),
                "conv_bias": dense(self.W)}

    def mixing_flops(self, T):
        return self.proj.in_features * (2 * self.W + 2)

    def state_size(self, T):
        return self.proj.in_features * (self.W - 1)


class LongBaseConv(nn.Module):
    """y = conv(x) * (W x + b) + x with a convolution of T taps: it has to keep every input."""

    def __init__(self, config, layer):
        super().__init__()
        self.proj = nn.Linear(config.n_embd, config.n_embd)
        self.conv = LongConv(config, window=False)

    def forward(self, x, state=None):
        y = torch.addcmul(x, self.conv(x, state), self.proj(x))
        return y, None if state is None else torch.cat([state, x], 1)

    def initial_state(self, batch_size, device):
        return torch.zeros(batch_size, 0, self.proj.in_features, device=device)

    def init_table(self, config):
        return {"proj.weight": to_residual(config), "proj.bias": ("constant", 0.0), **named("conv", self.conv.init_table())}

    def mixing_flops(self, T):
        return self.proj.in_features * (self.conv.flops(T) + 2)

    def state_size(self, T):
        return self.proj.in_features * T


class Hyena(nn.Module):
    """Hyena of order 2: x_1, x_2, v = conv_3(W x);  y = W_o (x_2 * (conv_T(u) + D u)), u = x_1 * v (Poli et al. 2023)."""

    W = 3

    def __init__(self, config, layer):
        super().__init__()
        d, self.backend = config.n_embd, scan_backend(config)
        self.in_proj = nn.Linear(d, 3 * d, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(3 * d, self.W))
        self.conv_bias = nn.Parameter(torch.empty(3 * d))
        self.long = LongConv(config, window=True)
        self.D = nn.Parameter(torch.empty(d))
        self.out_proj = nn.Linear(d, d, bias=False)

    def forward(self, x, state=None):
        before, past = (None, None) if state is None else state
        xs = self.in_proj(x)  # (B, T, 3 d)
        c = causal_conv1d(xs, self.conv_weight, self.conv_bias, before, silu=False, backend=self.backend)
        x1, x2, v = c.chunk(3, -1)  # (B, T, d) each
        u = x1 * v
        y = self.out_proj(x2 * torch.addcmul(self.long(u, past), self.D.to(u.dtype), u))
        return y, None if state is None else (conv_state(xs, before, self.W), torch.cat([past, u], 1))

    def initial_state(self, batch_size, device):
        d = self.D.numel()
        return torch.zeros(batch_size, self.W - 1, 3 * d, device=device), torch.zeros(batch_size, 0, d, device=device)

    def init_table(self, config):
        return {"in_proj.weight": ("normal", 0.02), "conv_weight": dense(self.W), "conv_bias": dense(self.W),
                **named("long", self.long.init_table()), "D": ("normal", 1.0), "out_proj.weight": to_residual(config)}

    def mixing_flops(self, T):
        return self.D.numel() * (3 * 2 * self.W + self.long.flops(T) + 4)

    def state_size(self, T):
        return self.D.numel() * (3 * (self.W - 1) + T)


# --------------------------------------------------------------------------------------------------------------- attention

class TaylorAttention(nn.Module):
    """Based's linear attention: weights 1 + s + s^2 / 2 for e^s, s = q.k / sqrt(n), n = 8, over their sum (Arora et al. 2024).

        phi(x) = [1, x / n^(1/4), (x outer x) / sqrt(2 n)];  S = S' + phi(k)^T [v, 1]
        [num, den] = phi(q) S;  y = W_o (num / den)
    """

    n = 8

    def __init__(self, config, layer):
        super().__init__()
        d = config.n_embd
        self.qk = nn.Linear(d, 2 * self.n, bias=False)
        self.v = nn.Linear(d, d, bias=False)
        self.out_proj = nn.Linear(d, d, bias=False)

    def features(self, x):
        """phi: (..., n) -> (..., 1 + n + n^2)."""
        outer = (x[..., :, None] * x[..., None, :]).flatten(-2) * (2 * self.n) ** -0.5
        return torch.cat([torch.ones_like(x[..., :1]), x * self.n**-0.25, outer], -1)

    def forward(self, x, state=None):
        q, k = self.qk(x).unflatten(-1, (2, 1, self.n)).unbind(2)  # (B, T, 1, n) each
        v = self.v(x)[:, :, None]  # (B, T, 1, d)
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        no_decay = torch.zeros(1, device=x.device)
        o, S = retention(self.features(q), self.features(k), v, no_decay, state=state, kernel="torch")  # (B, T, 1, d + 1)
        y = self.out_proj((o[..., :-1] / o[..., -1:]).squeeze(2))
        return y, None if state is None else S

    def initial_state(self, batch_size, device):
        return torch.zeros(batch_size, 1, 1 + self.n + self.n**2, self.v.in_features + 1, device=device)

    def init_table(self, config):
        return {"qk.weight": ("normal", 0.02), "v.weight": ("normal", 0.02), "out_proj.weight": to_residual(config)}

    def mixing_flops(self, T):
        return 4 * self.state_size(T) + 2 * (2 * self.n**2 + self.n)  # phi(k)^T v added (2), phi(q) S (2); phi twice

    def state_size(self, T):
        return (1 + self.n + self.n**2) * (self.v.in_features + 1)


class Attention(nn.Module):
    """The benchmark's attention: one head, biases, weights dropped with 0.1; positions come with the embedding (Recall)."""

    dropout = 0.1

    def __init__(self, config, layer):
        super().__init__()
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.out_proj = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x, state=None):
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)  # (B, 1, T, d) each
        if state is not None:
            k, v = torch.cat([state[0], k], 2), torch.cat([state[1], v], 2)
        T, past = q.shape[2], k.shape[2] - q.shape[2]
        mask = torch.ones(T, past + T, dtype=torch.bool, device=x.device).tril(past) if past else None
        y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout if self.training else 0.0, is_causal=mask is None)
        return self.out_proj(y[:, 0]), None if state is None else (k, v)

    def initial_state(self, batch_size, device):
        empty = torch.zeros(batch_size, 1, 0, self.out_proj.in_features, device=device)
        return empty, empty

    def init_table(self, config):
        return {"qkv.weight": ("normal", 0.02), "qkv.bias": ("constant", 0.0), "out_proj.weight": to_residual(config),
                "out_proj.bias": ("constant", 0.0)}

    def mixing_flops(self, T):
        return 4 * self.out_proj.in_features * (T + 1) / 2

    def state_size(self, T):
        return 2 * T * self.out_proj.in_features


# ------------------------------------------------------------------------------------------------------------------- model

MIXERS = {  # the branches of the two layers
    "attention": [Attention, Attention],
    "based": [BaseConv, TaylorAttention],
    "hyena": [Hyena, Hyena],
    "rwkv4": [RWKV4TimeMix, RWKV4TimeMix],  # the form that the paper cites
    "baseconv": [BaseConv, LongBaseConv],
    "mamba": [Mamba, Mamba],
    "longhorn": [Longhorn, Longhorn],
    # beside Figure 4
    "deltanet": [DeltaNet, DeltaNet],
    "gla": [GLA, GLA],
    "longhorn_exact": [LonghornExact, LonghornExact],
}
POSITIONS = {"attention"}  # mixers that cannot tell the order of tokens by themselves
HEAD_WIDTH = 64  # of mixers with several heads


def recall_model(mixer, n_embd, T, vocab_size, kernel="", scan_backend=""):
    """The Recall of a mixer. Raises ValueError for an unknown one, or a width that its heads do not divide."""
    if mixer not in MIXERS:
        raise ValueError(f"unknown mixer {mixer!r}: choose one of {', '.join(MIXERS)}")
    if n_embd < 1 or n_embd > HEAD_WIDTH and n_embd % HEAD_WIDTH:
        raise ValueError(f"n_embd {n_embd} is not a whole number of heads of {HEAD_WIDTH}: choose a multiple of it, or less")
    return Recall(ModelConfig(model=mixer, n_layer=2, n_head=max(1, n_embd // HEAD_WIDTH), n_embd=n_embd, block_size=T,
                              vocab_size=vocab_size, kernel=kernel, scan_backend=scan_backend))


class Recall(LM):
    """LM with the layers of MIXERS, that answers at the queries only: `model(idx, where)` -> what the head takes there.

    Two plain pre-norm residual branches without MLP, the same for every mixer.
    """

    def __init__(self, config):
        nn.Module.__init__(self)  # LM's own would take the layers of a family
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        Norm = NORMS.get(config.model, RMSNorm)
        self.embed_norm = Norm(config) if config.model in NORM_OF_EMBEDDING else nn.Identity()
        self.positions = nn.Embedding(config.block_size, config.n_embd) if config.model in POSITIONS else None
        self.branches = nn.ModuleList(Residual(config, branch, i) for i, branch in enumerate(MIXERS[config.model]))
        self.norm = Norm(config)
        self.init_weights()

    def init_table(self):
        return {**super().init_table(), "positions.weight": ("normal", 0.02)}

    def forward(self, idx, where):
        """idx (B, T) integers, where (B, P) positions -> (B, P, n_embd): its products with the embedding are the logits."""
        h = self.embed(idx.long())  # (B, T, n_embd)
        if self.positions is not None:
            h = h + self.positions.weight[:h.shape[1]]
        h = self.embed_norm(h)
        for branch in self.branches:
            h, _ = branch(h)
        return self.norm(h.gather(1, where.long()[..., None].expand(-1, -1, h.shape[2])))

    def step_flops(self, T, pairs):
        """Forward and backward FLOPs of one example, the head at its queries only."""
        head = 2 * self.embed.weight.numel()
        return T * self.flops_per_token(T)["total"] - 3 * head * (T - pairs)
