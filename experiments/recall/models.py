"""The models of the recall benchmark: model.py's skeleton with one mixer per layer, and the mixers used only here.

    Attention   softmax(q k^T / sqrt(d)) v, one head, biases, learned positions
    BaseConv    y = conv(x) * (W x + b) + x              3 taps in the first layer, one per token in the second
    Based       BaseConv, then y_t = sum_s w_ts v_s / sum_s w_ts,  w = 1 + q.k + (q.k)^2 / 2,  q, k of 8 channels
    Hyena       y = W_o (x_2 * conv(x_1 * v)) + b_o,  x_1, x_2, v = conv_3(W x + b)

Sources: Arora et al. 2023, arXiv 2312.04927 (BaseConv, the benchmark and its implementation of Hyena and attention),
Arora et al. 2024 (Based), Poli et al. 2023 (Hyena).

Based's attention is linear because w = phi(q) . phi(k) with 1 + 8 + 64 features, so it is retention without decay. A
column of ones in the values adds up the weights, so the same call computes the denominator.

model.py explains what a mixer is. Every family takes part with its first mixer. The benchmark's own mixers keep no
state, since they read whole sequences only. To add your own, add a row to MIXERS.
"""

import itertools
import math
from dataclasses import replace

import torch
import torch.nn as nn
import torch.nn.functional as F

import families  # noqa: F401  so that all take part
from experiments.attention import Attention
from initialisation import constant, dense, linear, normal, parameter, to_residual
from inspection import counting
from kernels.linear_attention import retention
from kernels.ops import causal_conv1d, cross_entropy, linear_cross_entropy
from mixers import DeltaNet
from model import FAMILIES, LM, POSITIONS, Layer, norm_of

# ---------------------------------------------------------------------------------------------------- long convolutions

class LongConv(nn.Module):
    """y_t = sum_lag taps[lag] u_{t - lag}, by FFT: u (B, T, d) -> (B, T, d) in u's dtype. A small network computes the
    taps, (T, d), from the lag, in the weights' dtype and without autocast.

        taps = W_out relu(W_1 f + b_1) + b_out, 16 wide
        f = [lag / (T - 1), cos(v lag), -sin(v lag)],  v = 2 pi / T * 1e-4 as published, so the last two are nearly 1, 0

    Raises ValueError for more tokens than taps.
    """

    widths = (3, 16)

    def __init__(self, T, d):
        super().__init__()
        lag = torch.arange(T)[:, None]
        t, angle = lag / max(1, T - 1), lag * (2e-4 * math.pi / T)
        self.register_buffer("features", torch.cat([t, angle.cos(), -angle.sin()], 1), persistent=False)  # (T, 3)
        self.hidden = nn.ModuleList(linear(n, m, start=normal(0.02), bias=constant(0.0))
                                    for n, m in itertools.pairwise(self.widths))
        self.out = linear(self.widths[-1], d, start=normal(0.02), bias=constant(0.0))

    def taps(self):
        a = self.features
        for hidden in self.hidden:
            a = F.relu(hidden(a))
        return self.out(a)

    def forward(self, u):
        T = u.shape[1]
        if T > len(self.features):
            raise ValueError(f"a sequence of {T} tokens, but the long convolution has {len(self.features)} taps: "
                             "give a larger block_size")
        with torch.autocast(u.device.type, enabled=False):
            taps = self.taps()[:T]
        fft = lambda a: torch.fft.rfft(a.transpose(-1, -2), 2 * T)  # padded to twice the length: nothing wraps around
        y = torch.fft.irfft(fft(u.to(taps.dtype)) * fft(taps), 2 * T)[..., :T]  # (B, d, T)
        return y.transpose(1, 2).to(u.dtype)

    def flops(self, T):
        """FLOPs per token: two transforms of length 2 T and a product per channel, minus the network, which
        inspection/counting.py counts per token although it runs once per batch."""
        network = sum(2 * m.weight.numel() for m in [*self.hidden, self.out])
        return self.out.out_features * (2 * 10 * math.log2(2 * T) + 6) - network


class DecayingConv(LongConv):
    """Hyena's taps = W_out a * exp(-|delta| lag / (T - 1)),  delta from ln(0.01) / 1.5 to ln(0.01) / 0.3 over d,
    a = sin(w * (W_i a + b_i)) for i = 1, 2, 3 from a = f, 64 wide, w learned.
    """

    widths = (3, 64, 64, 64)

    def __init__(self, T, d):
        super().__init__(T, d)
        self.out = linear(self.widths[-1], d, start=normal(0.02))  # without a bias
        self.frequency = parameter(self.widths[-1], start=constant(1.0))
        delta = torch.linspace(math.log(0.01) / 1.5, math.log(0.01) / 0.3, d)
        self.register_buffer("decay", (-self.features[:, :1] * delta.abs()).exp(), persistent=False)  # (T, d)

    def taps(self):
        a = self.features
        for hidden in self.hidden:
            a = torch.sin(self.frequency * hidden(a))
        return self.out(a) * self.decay


class BaseConv(nn.Module):
    """y = conv(x) * (W x + b) + x with a depthwise causal convolution of 3 taps (Arora et al. 2023)."""

    operator = "causal_conv1d"
    W = 3

    def __init__(self, config, layer):
        super().__init__()
        self.backend = config.backend
        d = config.n_embd
        self.proj = linear(d, d, start=normal(0.02), bias=constant(0.0))
        self.conv_weight = parameter(d, self.W, start=dense(self.W))
        self.conv_bias = parameter(d, start=dense(self.W))

    def forward(self, x):
        c = causal_conv1d(x, self.conv_weight, self.conv_bias, silu=False, backend=self.backend)  # (B, T, d)
        return torch.addcmul(x, c, self.proj(x))

    def flops(self, T):
        return self.proj.in_features * (2 * self.W + 2)

    def inputs_kept(self, T):
        return self.proj.in_features * (self.W - 1)


class LongBaseConv(nn.Module):
    """y = (conv(x) + x) * (W x + b) + x with a convolution as long as the context."""

    def __init__(self, config, layer):
        super().__init__()
        self.proj = linear(config.n_embd, config.n_embd, start=normal(0.02), bias=constant(0.0))
        self.filter = LongConv(config.block_size, config.n_embd)

    def forward(self, x):
        return torch.addcmul(x, self.filter(x) + x, self.proj(x))  # (B, T, d)

    def flops(self, T):
        return self.filter.flops(T) + 3 * self.proj.in_features

    def inputs_kept(self, T):
        return self.proj.in_features * T


class Hyena(nn.Module):
    """Hyena of order 2 (Poli et al. 2023).

        x_1, x_2, v = conv_3(W x + b)
        y = W_o (x_2 * (conv_T(u) + D u)) + b_o,  u = x_1 * v
    """

    W = 3

    def __init__(self, config, layer):
        super().__init__()
        d, self.backend = config.n_embd, config.backend
        self.in_proj = linear(d, 3 * d, start=normal(0.02), bias=constant(0.0), parts=[d, d, d])
        self.conv_weight = parameter(3 * d, self.W, start=dense(self.W))
        self.conv_bias = parameter(3 * d, start=dense(self.W))
        self.filter = DecayingConv(config.block_size, d)
        self.D = parameter(d, start=normal(1.0))
        self.out_proj = linear(d, d, start=to_residual(config), bias=constant(0.0))

    def forward(self, x):
        c = causal_conv1d(self.in_proj(x), self.conv_weight, self.conv_bias, silu=False, backend=self.backend)
        x1, x2, v = c.chunk(3, -1)  # (B, T, d) each
        u = x1 * v
        return self.out_proj(x2 * torch.addcmul(self.filter(u), self.D.to(u.dtype), u))

    def flops(self, T):
        return self.filter.flops(T) + self.D.numel() * (3 * 2 * self.W + 4)

    def inputs_kept(self, T):
        return self.D.numel() * (3 * (self.W - 1) + T)


# ----------------------------------------------------------------------------------------------------------- attention

class TaylorAttention(nn.Module):
    """Based's linear attention (Arora et al. 2024): weights 1 + s + s^2 / 2 in place of e^s, s = q.k / sqrt(n), n = 8.

        phi(x) = [1, x / n^(1/4), (x outer x) / sqrt(2 n)];  S = S' + phi(k)^T [v, 1], which is the whole state
        [num, den] = phi(q) S;  y = W_o (num / den)
    """

    operator = "retention"
    n = 8

    def __init__(self, config, layer):
        super().__init__()
        d, self.backend = config.n_embd, config.backend
        self.qk = linear(d, 2 * self.n, start=normal(0.02), parts=[self.n, self.n])
        self.v = linear(d, d, start=normal(0.02))
        self.out_proj = linear(d, d, start=to_residual(config))

    def features(self, x):
        """phi: (..., n) -> (..., 1 + n + n^2)."""
        outer = (x[..., :, None] * x[..., None, :]).flatten(-2) * (2 * self.n) ** -0.5
        return torch.cat([torch.ones_like(x[..., :1]), x * self.n**-0.25, outer], -1)

    def forward(self, x):
        q, k = self.qk(x).unflatten(-1, (2, 1, self.n)).unbind(2)  # (B, T, 1, n) each
        v = self.v(x)[:, :, None]  # (B, T, 1, d)
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
        o, _ = retention(self.features(q), self.features(k), v, torch.zeros(1, device=x.device),
                         backend=self.backend)  # (B, T, 1, d + 1)
        return self.out_proj((o[..., :-1] / o[..., -1:]).squeeze(2))

    def flops(self, T):
        # phi(k)^T v added (2), phi(q) S (2); phi twice
        return 4 * self.inputs_kept(T) + 2 * (2 * self.n**2 + self.n)

    def inputs_kept(self, T):
        return (1 + self.n + self.n**2) * (self.v.in_features + 1)


class OneHead(Attention):
    """The benchmark's attention: one head, biases, dropout of 0.1 on the weights. `Recall` adds learned positions."""

    causal = True
    dropout = 0.1

    def __init__(self, config, layer):
        super().__init__(replace(config, n_head=1), layer)

    def inputs_kept(self, T):
        return 2 * self.n * T


# --------------------------------------------------------------------------------------------------------------- model

def having(mixer, **settings):
    """The mixer with these settings."""
    return lambda config, layer: mixer(replace(config, **settings), layer)


# name -> mixers of the layers, repeated to n_layer
MIXERS = {family: mixers[:1] for family, mixers in FAMILIES.items()}
MIXERS |= {
    "attention": [OneHead],
    "based": [BaseConv, TaylorAttention],
    "hyena": [Hyena],
    "baseconv": [BaseConv, LongBaseConv],
    # the step of the delta rule; free: keys of any length
    "deltanet_implicit": [having(DeltaNet, step="implicit")],
    "deltanet_exact": [having(DeltaNet, step="exact")],
    "deltanet_free": [having(DeltaNet, normalize_keys=False)],
    "deltanet_implicit_free": [having(DeltaNet, step="implicit", normalize_keys=False)],
    "deltanet_exact_free": [having(DeltaNet, step="exact", normalize_keys=False)],
}
NO_DROPOUT = {"mamba", "longhorn", "longhorn_exact"}  # the benchmark's Mamba block has none; all others drop 0.1


class DroppingLayer(Layer):
    """A layer that drops a tenth of its input during training."""

    def forward(self, h, *given):
        return super().forward(F.dropout(h, 0.1, self.training), *given)


class Positions(nn.Embedding):
    """A learned vector for each position, added to the embedding."""

    def __init__(self, config):
        super().__init__(config.block_size, config.n_embd)
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, T, state):
        return self.weight[:T]


POSITIONS["attention"] = Positions  # the other mixers know the order without them


class Recall(LM):
    """LM with one mixer of MIXERS per layer and no MLP; the loss is taken at the queries only.

    Its config is an experiments.recall.cell.RecallConfig. Raises ValueError for an unknown mixer.
    """

    def build_layers(self, config):
        if config.model not in MIXERS:
            raise ValueError(f"unknown mixer {config.model!r}: choose one of {', '.join(MIXERS)}")
        mixers = MIXERS[config.model]
        layers = []
        for i in range(config.n_layer):
            kind = Layer if i or config.model in NO_DROPOUT else DroppingLayer
            layers.append(kind(config, [mixers[i % len(mixers)]], i, norm_of(config.model)))
        return layers

    def forward(self, idx, targets=None, state=None, loss_only=False):
        """Answer at the queries.

        Args:
            idx: (B, T) integers; targets: (B, T) int64, the value at each query and -1 elsewhere.
            state: from `initial_state` or the previous call; loss_only: return None as logits.

        Returns:
            (logits, loss), or (logits, loss, state) if a state is given. logits: (queries, vocab_size) in the order of
            examples, without targets (B, T, vocab_size). loss: nats per query, None without targets.
        """
        h, after = self.through_layers(idx, state)
        h = self.norm(h)  # (B, T, n_embd)
        if targets is not None:
            asked = targets >= 0
            h, targets = h[asked], targets[asked]  # (queries, n_embd), (queries,)
        if loss_only and not self.config.loss_from_logits:
            logits, loss = None, linear_cross_entropy(h, self.embed.weight, targets, backend=self.config.backend)
        else:
            logits = F.linear(h, self.embed.weight)
            loss = None if targets is None else cross_entropy(logits, targets)
            logits = None if loss_only else logits
        return (logits, loss) if state is None else (logits, loss, after)

    def forward_flops(self, T):
        """FLOPs per token, as for any LM, but the head runs only at queries."""
        return counting.forward_flops(self.modules(), T) + 2 * self.embed.weight.numel() * self.config.pairs / T
