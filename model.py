"""The skeleton (embedding, layers of residual branches, norm, tied head), and Longhorn, Mamba, GLA and LLaMA on it.

A layer is a list of branches, each h = h + mixer(norm(h)). A family is the list of its mixers, a row of FAMILIES below.
LLaMA is [Attention, SwiGLU]. Longhorn has no MLP and uses two Longhorn branches instead. To add a family: one class
with a `forward`, one row in FAMILIES, one file in config/. The other families are in mixers.py and families/, which add
their rows to FAMILIES when they are imported.

A branch also takes and returns a state, so the code that trains on whole sequences also generates token by token and
reads long texts in chunks.

    paper       here           shape
    d           n_embd         width of the residual stream
    -           d_inner        2 d, width of the scan
    m           d_state, N     state size per channel
    x_t         x              (B, T, d_inner)
    k_t, q_t    k, q           (B, T, N)
    W_beta x_t  dt             (B, T, d_inner), through rank dt_rank
    S_t         h              (B, d_inner, N), float32
    -           H, n           heads, and channels per head of q and k (and of v, if equally wide)
    S_t         S              (B, H, n, channels of v per head), float32: the state of families with heads

`python tools/parameters.py` prints parameters, FLOPs and state sizes next to the paper's Table 1.
"""

import itertools
import math
import operator
import re
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F

from common.errors import ConfigError, described
from common.torch_private import constant_when_compiled
from initialisation import (
    arange,
    constant,
    dense,
    draw,
    linear,
    normal,
    parameter,
    step_size,
    to_draw,
    to_residual,
    uniform,
    values,
    xavier,
)
from kernels import choose
from kernels.cache import append_to_cache
from kernels.linear_attention import gated_linear_attention
from kernels.ops import (
    again,
    attention,
    causal_conv1d,
    conv_state,
    cross_entropy,
    documents,
    halves,
    linear_cross_entropy,
    rms_norm,
)
from kernels.scan import longhorn_scan, selective_scan


@dataclass
class ModelConfig:
    # --- model
    model: str = "longhorn"  # family: longhorn, mamba, llama, gla, retnet, rwkv, or another in FAMILIES
    pattern: str = ""  # families of the layers, repeated to n_layer, e.g. longhorn*3,llama; empty: model in every layer
    n_layer: int = 12  # layers; two residual branches each, in the paper's families
    n_head: int = 12  # number of heads, in families with heads
    n_embd: int = 768  # width of the residual stream
    block_size: int = 1024  # context length in training, in tokens
    vocab_size: int = 50304  # GPT-2's 50257 padded to a multiple of 64
    d_state: int = 16  # state size per channel, N
    d_conv: int = 4  # width of the short causal convolution
    expand: int = 2  # width of the scan, as a multiple of n_embd
    dt_rank: int = 0  # rank of the step size's projection; 0: n_embd / 16 rounded up
    mlp_multiple: int = 256  # round hidden widths of SwiGLU and RWKV's channel mix up to a multiple of this
    step: Literal["explicit", "implicit", "exact"] = "explicit"  # step of the delta rule; see STEPS in mixers.py
    normalize_keys: bool = True  # delta rule: divide keys by their length
    window: int = 0  # tokens in the attention window of the family swa; 0: half of block_size
    documents: Literal["join", "pack"] = "join"  # pack: start each document in a window from an empty state
    end_of_text: int = -1  # with pack: the token that ends a document; -1: the dataset's
    loss_from_logits: bool = False  # train on LM.forward's logits, so that you can edit them; needs more memory
    norm_eps: float = 1e-5  # eps of the norms before branches and before the head
    tie_head: bool = True  # use the embedding as the head; false: give the head its own matrix
    backend: str = ""  # which operators run: torch (plain PyTorch, to edit), cpu, cuda, fused; empty: the fastest

    places = range(1024)  # indices of the layers to build (the self-check builds fewer)

    @property
    def unrolled(self):
        """The families in the pattern, before it is repeated. Raises ValueError if it cannot be parsed."""
        pattern, names = self.pattern or self.model, []
        for part in pattern.split(","):
            parsed = re.fullmatch(r"\s*(\w+?)\s*(?:\*\s*([1-9]\d{0,3}))?\s*", part)
            if not parsed:
                raise ValueError(f"pattern {pattern!r}: expected family names, such as longhorn*3,llama")
            family, times = parsed.groups()
            if family not in FAMILIES:
                others = "" if "rwkv" in FAMILIES else "; `import families` adds the others"
                raise ValueError(f"unknown model {family!r}: choose one of {', '.join(FAMILIES)}{others}")
            names += [family] * int(times or 1)
        return names

    @property
    def families(self):
        """The family of each layer: the pattern, repeated or cut to n_layer."""
        return list(itertools.islice(itertools.cycle(self.unrolled), self.n_layer))

    def check_pattern(self):
        """Raises ValueError if n_layer is too small for each family of the pattern to have a layer."""
        names, n = self.unrolled, self.n_layer
        for family in names[n:]:
            if family not in names[:n]:
                raise ValueError(f"pattern {self.pattern!r}: no {family} in {n} layers; set n_layer to {len(names)} or "
                                 "more, or give a shorter pattern")

    @property
    def n_branches(self):
        """Residual branches in the whole model: the more there are, the smaller each one starts (see to_residual)."""
        return sum(len(FAMILIES[family]) for family in self.families)


MIX_TOKENS = (None, *choose.BODIES)  # values of a mixer's `operator` that work with --documents=pack
BACKENDS = ("", *choose.BACKENDS)

# -------------------------------------------------------------------------------------------------------------- mixers
# A mixer is an nn.Module built from (config, layer index). Its constructor sets how each parameter starts
# (initialisation.py). A mixer has:
#   forward(x, state=None) -> (y, state)  x, y (B, T, n_embd); state: tensors (B, ...); None: start empty, return None
#   initial_state(batch_size, device)     the state before the first token; mixers without it have forward(x) -> y
#   passes = True                         forward(x, state, passed) -> (y, state, passed): `passed` comes from the
#                                         previous mixer with passes (None in the first) and goes on to the next one
#   operator                              name of the operator that mixes tokens, a key of kernels.choose.BODIES;
#                                         FLOPs are counted by operator (inspection/counting.py), else set `flops`


class ScanBlock(nn.Module):
    """The block of Mamba and Longhorn, which differ only in the scan (Algorithm 1, Figure 3; Gu & Dao 2023).

        x, z = split(W_in u)
        x = silu(causal_conv(x))
        r, k, q = split(W_x x);  dt = W_dt r                      Mamba calls k and q B and C
        y = scan(x, dt, k, q, z)
        out = W_out y
    """

    def __init__(self, config, layer):
        super().__init__()
        d, self.N, self.W = config.n_embd, config.d_state, config.d_conv
        self.d_inner, self.R = config.expand * d, config.dt_rank or math.ceil(d / 16)
        self.backend = config.backend
        self.in_proj = linear(d, 2 * self.d_inner, start=dense(d), parts=[self.d_inner, self.d_inner])  # x, z
        self.conv_weight = parameter(self.d_inner, self.W, start=dense(self.W))
        self.conv_bias = parameter(self.d_inner, start=dense(self.W))
        self.x_proj = linear(self.d_inner, self.R + 2 * self.N, start=dense(self.d_inner),
                             parts=[self.R, self.N, self.N])  # r, k, q
        self.dt_proj = linear(self.R, self.d_inner, start=dense(self.R))
        self.dt_bias = parameter(self.d_inner, start=constant(0.0))
        self.D = parameter(self.d_inner, start=constant(1.0))
        self.out_proj = linear(self.d_inner, d, start=uniform((self.d_inner * config.n_branches) ** -0.5))

    def forward(self, u, state=None):
        x_before, h0 = (None, None) if state is None else state
        x, z = halves(self.in_proj(u))  # (B, T, d_inner) each, views
        y, hT = self.mix(x, z, x_before, h0)  # (B, T, d_inner), (B, d_inner, N)
        y = self.out_proj(y)
        return y, None if state is None else (conv_state(x, x_before, self.W), hT)

    def mix(self, x, z, x_before=None, h0=None, reverse=False):
        """Apply the convolution and the scan. Image models also run them in reverse."""
        x = causal_conv1d(x, self.conv_weight, self.conv_bias, x_before, reverse=reverse, backend=self.backend)
        # again(x) is x, but lets the convolution's backward add the gradients from here and from the scan
        r, k, q = self.x_proj(again(x)).split([self.R, self.N, self.N], -1)  # (B, T, R), (B, T, N), (B, T, N)
        dt = self.dt_proj(r)  # (B, T, d_inner)
        return self.scan(x, dt, k, q, z, h0, **({"reverse": True} if reverse else {}))

    def initial_state(self, batch_size, device):
        return (torch.zeros(batch_size, self.W - 1, self.d_inner, device=device),
                torch.zeros(batch_size, self.d_inner, self.N, device=device))


class Longhorn(ScanBlock):
    """S_ij = (1 - eps_i k_j^2) S_ij + eps_i x_i k_j (Eq. 7), eps = b / (1 + b |k|^2), b = sigmoid(dt + dt_bias)."""

    operator = "longhorn_scan"
    exact = False  # the diagonal approximation

    def scan(self, x, dt, k, q, z, h0, reverse=False):
        return longhorn_scan(x, dt, k, q, self.D, z, self.dt_bias, h0, return_state=True, exact=self.exact,
                             reverse=reverse, backend=self.backend)


class Mamba(ScanBlock):
    """S_ij = exp(d_i A_ij) S_ij + d_i x_i k_j, d = softplus(dt + dt_bias), A = -exp(A_log) (Gu & Dao 2023)."""

    operator = "selective_scan"

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.dt_bias.start = step_size(1e-3, 0.1)
        decay = arange(1, self.N + 1).log().expand(self.d_inner, self.N)
        self.A_log = parameter(self.d_inner, self.N, start=values(decay))

    def scan(self, x, dt, k, q, z, h0, reverse=False):
        A = -self.A_log.exp()  # (d_inner, N)
        keep = h0 is not None  # mamba-ssm's kernel has no gradient for the last state
        out = selective_scan(x, dt, A, k, q, self.D, z, self.dt_bias, delta_softplus=True, return_last_state=keep,
                             h0=h0, reverse=reverse, backend=self.backend)
        return out if keep else (out, None)


def split_heads(config, multiple=1):
    """Channels per head. Raises ValueError if n_embd is not divisible by n_head * multiple."""
    if config.n_embd % (config.n_head * multiple):
        times = f" times {multiple}" if multiple > 1 else ""
        raise ValueError(f"n_embd {config.n_embd} is not a multiple of n_head {config.n_head}{times}: choose an n_head "
                         f"that divides {config.n_embd // multiple}")
    return config.n_embd // config.n_head


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions of base 10000 (LLaMA): softmax(q k^T / sqrt(n)) v."""

    operator = "attention"

    def __init__(self, config, layer):
        super().__init__()
        d = config.n_embd
        self.H = config.n_head
        self.n = split_heads(config, multiple=2)  # rotary pairs
        self.qkv = linear(d, 3 * d, start=normal(0.02), parts=[d, d, d])
        self.out_proj = linear(d, d, start=to_residual(config))
        self.backend = config.backend

    def forward(self, x, state=None):
        B, T, d = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.H, self.n).permute(2, 0, 3, 1, 4)  # (B, H, T, n) each
        past = 0 if state is None else state[0].shape[2]
        cos, sin = rotary_tables(past, past + T, self.n // 2, x.device, constant=state is None)  # (T, n/2) each
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        if state is not None:
            k, v = state = append_to_cache(state, k, v)
        y = attention(q, k, v, backend=self.backend)  # (B, H, T, n): softmax(q k^T / sqrt(n)) v over the past
        return self.out_proj(y.transpose(1, 2).reshape(B, T, d)), state

    def initial_state(self, batch_size, device):
        empty = torch.zeros(batch_size, self.H, 0, self.n, device=device)
        return empty, empty


def apply_rotary(x, cos, sin):
    """RoPE on (B, H, T, n): rotate the pairs (x_i, x_{i + n/2}) by position times frequency i."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)  # computed in float32


def rotary_tables(first, last, pairs, device, steps=None, constant=False):
    """Cosine and sine of the rotary angles at positions first .. last - 1: two float32 tensors (last - first, pairs).

    The angle of pair i is position * 10000 ** -(i / steps), and steps is `pairs` by default. constant: bake the tables
    into compiled layers. Recomputing the tables for every channel took a fifth of LLaMA's step on an H200.
    """
    if constant:  # operator.index: plain integers, also for the compiler
        return constant_rotary_tables(operator.index(first), operator.index(last), pairs, device, steps)
    frequency = 10000.0 ** -(torch.arange(pairs, device=device) / (steps or pairs))
    angle = torch.arange(first, last, device=device)[:, None] * frequency
    return angle.cos(), angle.sin()


@constant_when_compiled
def constant_rotary_tables(*args):
    return rotary_tables(*args)


class SwiGLU(nn.Module):
    """W_2 (silu(W_1 x) * W_3 x), hidden width 8 d / 3 rounded up to a multiple of mlp_multiple (LLaMA)."""

    operator = None  # mixes channels, not tokens
    activation = staticmethod(F.silu)

    def __init__(self, config, layer):
        super().__init__()
        d = config.n_embd
        hidden = self.hidden(config)
        self.w1 = linear(d, hidden, start=normal(0.02))
        self.w3 = linear(d, hidden, start=normal(0.02))
        self.w2 = linear(hidden, d, start=to_residual(config))

    def hidden(self, config):
        return round_up(8 * config.n_embd / 3, config.mlp_multiple)

    def forward(self, x, state=None):
        return self.w2(self.activation(self.w1(x)) * self.w3(x)), state

    def initial_state(self, batch_size, device):
        return ()


def round_up(width, multiple):
    return math.ceil(width / multiple) * multiple


def head_norm(x, weight=1.0, eps=1e-5, backend=None):
    """RMSNorm over the channels of each head: x (B, T, H, n), times `weight`, a number or a tensor (n,)."""
    if not isinstance(weight, torch.Tensor):
        dtype = torch.promote_types(x.dtype, torch.float32)
        weight = torch.full(x.shape[-1:], weight, device=x.device, dtype=dtype)
    return rms_norm(x, weight, eps, backend)


class GLA(nn.Module):
    """Gated linear attention: a forget gate per channel of the keys (Yang et al. 2023, Section 4).

        q, k = split(W_qk x);  v = W_v x;  a = sigmoid(W_2 W_1 x + b)^(1/16)    widths: q, k, a: d / 2; v: d; W_1 x: 16
        S = diag(a) S' + k^T v;  o = (q / sqrt(n)) S
        out = W_o (silu(W_g x + b_g) * RMSNorm_head(o))
    """

    operator = "gated_linear_attention"

    def __init__(self, config, layer):
        super().__init__()
        d = config.n_embd
        self.H = config.n_head
        self.n = split_heads(config, multiple=2) // 2  # keys are half as wide as values
        self.backend = config.backend
        self.qk = linear(d, d, start=xavier(d // 2, d, 2**-2.5), parts=[d // 2, d // 2])
        self.v = linear(d, d, start=normal(0.02))
        self.forget1 = linear(d, 16, start=xavier(16, d, 2**-2.5))
        self.forget2 = linear(16, d // 2, start=xavier(d // 2, 16, 2**-2.5), bias=constant(0.0))
        self.gate = linear(d, d, start=normal(0.02), bias=constant(0.0))
        self.out_proj = linear(d, d, start=to_residual(config))

    def forward(self, x, state=None):
        heads = lambda a: a.unflatten(-1, (self.H, -1))
        q, k = self.qk(x).chunk(2, -1)  # (B, T, d/2) each
        q, k = heads(q * self.n**-0.5), heads(k)  # (B, T, H, n) each
        log_a = heads(F.logsigmoid(self.forget2(self.forget1(x))) / 16)  # (B, T, H, n)
        v = heads(self.v(x))  # (B, T, H, 2 n)
        o, S = gated_linear_attention(q, k, v, log_a, state, backend=self.backend)  # (B, T, H, 2 n), (B, H, n, 2 n)
        o = head_norm(o, backend=self.backend).flatten(2)  # (B, T, d)
        y = self.out_proj(F.silu(self.gate(x)) * o)
        return y, None if state is None else S

    def initial_state(self, batch_size, device):
        return torch.zeros(batch_size, self.H, self.n, 2 * self.n, device=device)


FAMILIES = {  # mixers.py and the files in families/ add more
    "longhorn": [Longhorn, Longhorn],
    "mamba": [Mamba, Mamba],
    "llama": [Attention, SwiGLU],
    "gla": [GLA, SwiGLU],
}
NORMS = {}  # family -> function(config) that builds its norm; all other families use RMSNorm
EMBEDDING_NORMS = set()  # families that normalise the embedding
POSITIONS = {}  # family -> its learned positions


# ------------------------------------------------------------------------------------------------------------ skeleton

class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, config, eps=0.0):
        super().__init__()
        self.weight = parameter(config.n_embd, start=constant(1.0))
        self.eps = eps or config.norm_eps
        self.backend = config.backend

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps, backend=self.backend)


class Branch(nn.Module):
    """mixer(norm(h)), one term added to the residual stream."""

    def __init__(self, norm, mixer):
        super().__init__()
        self.norm, self.mixer = norm, mixer

    def forward(self, h, state=None, passed=None):
        x = self.norm(h)
        if hasattr(self.mixer, "passes"):
            out = self.mixer(x, state, passed)
        else:
            out = self.mixer(x, state) if self.has_state else self.mixer(x)
            out = (*out, passed) if isinstance(out, tuple) else (out, None, passed)
        if not (isinstance(out, tuple) and len(out) == 3) or state is not None and out[1] is None:
            raise ConfigError(f"{where_is(type(self.mixer))}: forward must return y, or (y, state) if it is given a "
                              "state; with passes = True it must return (y, state, passed)")
        y = out[0]
        if not torch.is_tensor(y) or y.shape != h.shape or torch.promote_types(y.dtype, h.dtype) != h.dtype:
            raise ConfigError(f"{where_is(type(self.mixer))}: forward returned "
                              f"{(*y.shape, y.dtype) if torch.is_tensor(y) else str(y)[:80]} for x "
                              f"{(*h.shape, h.dtype)}: return y of x's shape (B, T, n_embd) and at most its precision")
        return out

    @property
    def has_state(self):
        return hasattr(self.mixer, "initial_state")

    def initial_state(self, batch_size, device):
        """The mixer's state before the first token. Raises ValueError if it keeps none."""
        if not self.has_state:
            raise ValueError(f"{where_is(type(self.mixer))} keeps no state, so it cannot sample or read in chunks: "
                             "add initial_state(batch_size, device) and forward(x, state) -> (y, state)")
        state = self.mixer.initial_state(batch_size, device)
        for a in tensors_of(state):
            if a.dim() > 1 and len(a) != batch_size:
                raise ConfigError(f"{where_is(type(self.mixer))}: initial_state({batch_size}, device) has a tensor "
                                  f"{tuple(a.shape)}: make it ({batch_size}, ...), with a row per sequence")
        return state


class Layer(nn.Module):
    """The branches of one layer, in sequence. For parallel branches, sum their outputs for the same h here."""

    def __init__(self, config, mixers, index, norm=RMSNorm, branch=Branch):
        super().__init__()
        self.branches = nn.ModuleList(branch(norm(config), mixer(config, index)) for mixer in mixers)

    def forward(self, h, state=None, passed=None):
        after = []
        for branch, s in zip(self.branches, state or [None] * len(self.branches), strict=True):
            y, s, passed = branch(h, s, passed)
            h = h + y
            after.append(s)
        return h, after, passed


def where_is(cls):
    """Name a class and its file: 'Mamba (model.py)'."""
    return f"{cls.__name__} ({cls.__module__.replace('.', '/')}.py)"


def check_tokens(idx):
    if idx.dim() != 2 or idx.numel() == 0 or idx.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"idx must be (B, T) of int64, both at least 1, got {tuple(idx.shape)} {idx.dtype}")


def tensors_of(state):
    """The tensors in a state, however nested in lists and tuples."""
    if isinstance(state, torch.Tensor):
        return [state]
    found = []
    if isinstance(state, (list, tuple)):
        for part in state:
            found += tensors_of(part)
    return found


def emptied(state, empty, rows):
    """Return `state` with some rows, (B,) bool, reset to `empty`. Raises ValueError if that would shorten the cache of
    only some rows."""
    if rows.all():
        return empty
    if isinstance(state, (list, tuple)):
        return type(state)(emptied(part, new, rows) for part, new in zip(state, empty, strict=True))
    if state.shape != empty.shape:
        raise ValueError("documents=pack: documents end at different places in the rows of a batch, but attention's "
                         "cache has one length for all rows: read the rows one at a time")
    return torch.where(rows.view(-1, *[1] * (state.dim() - 1)), empty.to(state.dtype), state)


def norm_of(family):
    return NORMS.get(family, RMSNorm)


def check_sizes(config):
    """Raises ValueError for impossible sizes and for an unknown backend."""
    for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "d_state", "d_conv", "expand",
                 "mlp_multiple"):
        most = 1024 if name == "n_layer" else 2**31 - 1
        if not 1 <= getattr(config, name) <= most:
            raise ValueError(f"{name} {getattr(config, name)} must be at least 1, and at most {most}")
    if config.dt_rank < 0:
        raise ValueError(f"dt_rank {config.dt_rank} must be at least 1, or 0 for n_embd / 16")
    if config.window < 0:
        raise ValueError(f"window {config.window} must be at least 1, or 0 for half of block_size")
    if config.norm_eps <= 0:
        raise ValueError(f"norm_eps {config.norm_eps} must be above 0")
    if config.backend not in BACKENDS:
        raise ValueError(f"unknown backend {config.backend!r}: choose one of {', '.join(BACKENDS[1:])}, or none")


class LM(nn.Module):
    """A language model of any family or pattern of families: `logits, loss = LM(config)(idx, targets)`.

    Raises ValueError for an unknown family or backend and for sizes that do not fit together, RuntimeError for a
    backend that is not installed.
    """

    def __init__(self, config):
        super().__init__()
        check_sizes(config)
        self.config = config
        # Draw the seed first: PyTorch's constructors consume random numbers. Avoid randint and Embedding(V, d): on the
        # meta device they spend a second on imports.
        seed = torch.empty((), dtype=torch.int64).random_(2**31)
        self.embed = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.n_embd), freeze=False)
        to_draw(self.embed.weight, normal(0.02))
        self.layers = nn.ModuleList(self.build_layers(config))
        first, last = config.families[0], config.families[-1]  # their norms come before and after the layers
        self.embed_norm = norm_of(first)(config) if first in EMBEDDING_NORMS else nn.Identity()
        self.norm = norm_of(last)(config)
        if not config.tie_head:
            self.head = linear(config.n_embd, config.vocab_size, start=normal(0.02))
        self.positions = POSITIONS[first](config) if first in POSITIONS else None
        draw(self, seed)
        if config.documents == "pack":
            self.check_documents()

    def build_layers(self, config):
        """Build the layers of the config's pattern."""
        layers = []
        for i, family in enumerate(config.families):
            if i in config.places:
                try:
                    layers.append(Layer(config, FAMILIES[family], i, norm_of(family)))
                except (TypeError, AttributeError, NameError) as error:
                    raise ConfigError(f"{family} cannot be built: {described(error)}: its row of FAMILIES is a list of "
                                      "classes, each an nn.Module built from (config, layer)") from error
        return layers

    def check_documents(self):
        """Raises ValueError if a mixer or learned positions would leak from one packed document into the next."""
        for _, branch in self.branches():
            if getattr(branch.mixer, "operator", "") not in MIX_TOKENS:
                raise ValueError(f"documents=pack: {where_is(type(branch.mixer))} mixes tokens without an operator of "
                                 "kernels/, and only these operators reset at document boundaries: set operator = None "
                                 "if its forward resets too (docs/adding-a-model.md), or use --documents=join")
        if self.positions is not None:
            raise ValueError("documents=pack: positions are counted from the window's first token, not from the "
                             "document's: use --documents=join")

    def forward(self, idx, targets=None, state=None, last_only=False, loss_only=False):
        """Predict the next token at every position.

        Args:
            idx: (B, T) int64 tokens; targets: (B, T) int64, -1 at positions without a loss.
            state: from `initial_state` or the previous call; the tokens then continue that sequence.
            last_only: logits of the last position only, (B, 1, vocab_size): enough for generation.
            loss_only: return None as logits; in 16 bits this takes a sixth of the memory (`linear_cross_entropy`).

        Returns:
            (logits, loss), or (logits, loss, state) if a state was given. logits: (B, T, vocab_size); loss: the mean
            cross-entropy in nats, or None without targets.

        Raises ValueError for an idx of the wrong shape or dtype, a state of another model or batch size, and loss_only
        without targets.
        """
        check_tokens(idx)
        if loss_only and targets is None:
            raise ValueError("loss_only needs targets: pass them, or drop loss_only")
        if state is not None:
            self.check_state(state, len(idx))
        if state is not None and self.config.documents == "pack":
            h, after = self.through_documents(idx, state)
        else:
            h, after = self.through_layers(idx, state)  # (B, T, n_embd)
        if last_only:
            h = h[:, -1:]
        h = self.norm(h)
        head = self.embed if self.config.tie_head else self.head
        logits = loss = None
        from_logits = self.config.loss_from_logits or self.config.backend == "torch" or torch.compiler.is_compiling()
        if loss_only and not from_logits:
            loss = linear_cross_entropy(h, head.weight, targets)
        else:  # also with loss_only, if compiling: torch.compile fuses these lines
            logits = F.linear(h, head.weight)  # (B, T, vocab_size)
            if targets is not None:
                loss = cross_entropy(logits, targets)
        if loss_only:
            logits = None
        return (logits, loss) if state is None else (logits, loss, after)

    def check_state(self, state, batch_size):
        """Raises ValueError for a state of another model or batch size."""
        sizes = {len(a) for a in tensors_of(state) if a.dim() > 1}
        if len(state) != len(self.layers) or sizes - {batch_size}:
            raise ValueError(f"state does not fit {len(self.layers)} layers and a batch of {batch_size}: start from "
                             f"initial_state({batch_size}), or from the state that the previous call returned")

    def through_layers(self, idx, state=None):
        """Run the layers, and return (the last layer's output (B, T, n_embd), the next state)."""
        h = self.embed_norm(self.embed(idx))  # (B, T, n_embd)
        if self.positions is not None:
            h = h + self.positions(idx.shape[1], state)  # (1, T, n_embd)
        starts = None  # (B, T), where documents begin
        if self.config.documents == "pack" and state is None:
            starts = (idx == self.config.end_of_text).roll(1, 1)
        after = []
        passed = None  # from one mixer to the next, see `passes` above
        with documents(starts):
            for layer, s in zip(self.layers, state or [None] * len(self.layers), strict=True):
                h, s, passed = layer(h, s, passed)
                after.append(s)
        return h, after

    def through_documents(self, idx, state):
        """Like through_layers, but for packed documents read with a state. The token that ends a document empties the
        state, because in training every document starts from an empty state."""
        ends = idx == self.config.end_of_text  # (B, T)
        cuts = ends.any(0).nonzero()[:, 0] + 1
        cuts = cuts[cuts < idx.shape[1]].tolist()
        parts = []
        for part in idx.tensor_split(cuts, 1):
            h, state = self.through_layers(part, state)
            ended = part[:, -1] == self.config.end_of_text  # (B,)
            if ended.any():
                state = emptied(state, self.initial_state(len(idx)), ended)
            parts.append(h)
        return torch.cat(parts, 1), state

    def branches(self):
        """[(name, Branch)] in the order in which they run."""
        return [(name, module) for name, module in self.named_modules() if isinstance(module, Branch)]

    def initial_state(self, batch_size):
        """The state before the first token, per layer and branch. Raises ValueError for a mixer that keeps none."""
        device = self.embed.weight.device
        return [[branch.initial_state(batch_size, device) for branch in layer.branches] for layer in self.layers]
