"""The families of the paper on one skeleton: embedding, residual branches, norm, tied head.

A layer is a list of residual branches, h = h + branch(norm(h)), and a family is nothing but that list (FAMILIES, at the
end): LLaMA's is [Attention, SwiGLU]; Longhorn has no MLP and uses two Longhorn branches where LLaMA has those two.
To add a family: one class with `forward(x, state) -> (y, state)`, one line in FAMILIES, one file in config/.

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

`python model.py` prints parameters, FLOPs and state sizes beside the paper's Table 1.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from ops import causal_conv1d, conv_state, rms_norm
from scan import longhorn_scan


@dataclass
class ModelConfig:
    # --- model
    model: str = "longhorn"  # family: longhorn or llama
    n_layer: int = 12  # layers; each is two residual branches
    n_head: int = 12  # attention heads (families with heads)
    n_embd: int = 768  # width of the residual stream
    block_size: int = 1024  # tokens of context in training
    vocab_size: int = 50304  # GPT-2's 50257 padded to a multiple of 64
    d_state: int = 16  # state size of a channel, N
    d_conv: int = 4  # width of the short causal convolution
    expand: int = 2  # width of the scan over n_embd
    dt_rank: int = 0  # rank of the step size's projection; 0: n_embd / 16 rounded up
    scan_backend: str = ""  # of the native kernels: cpu, cuda or torch; empty: the fastest there is


def dense(fan_in):
    """PyTorch's default for a linear map: uniform within +-1/sqrt(fan_in)."""
    return "uniform", fan_in**-0.5


# ------------------------------------------------------------------------------------------------------------- branches
# A branch is an nn.Module with
#   forward(x, state) -> (y, state)     x, y (B, T, n_embd); state None: start empty and keep nothing
#   initial_state(batch_size, device)   what `forward` takes before the first token
#   init_table(config)                  parameter name -> (kind, scale), see LM.init_weights
#   mixing_flops(T)                     forward FLOPs a token beside its linear maps, averaged over T positions
#   state_size(T)                       numbers kept a sequence after T tokens


class Longhorn(nn.Module):
    """The paper's block: Mamba's with the scan replaced (Algorithm 1, Figure 3).

        x, z = split(W_in u)
        x = silu(causal_conv(x))
        r, k, q = split(W_x x);  dt = W_dt r
        y = longhorn_scan(x, dt, k, q, D, z, dt_bias)         eps = beta / (1 + beta |k|^2), beta = sigmoid(dt + dt_bias)
        out = W_out y
    """

    def __init__(self, config):
        super().__init__()
        d, self.N, self.W = config.n_embd, config.d_state, config.d_conv
        self.d_inner, self.R = config.expand * d, config.dt_rank or math.ceil(d / 16)
        self.backend = config.scan_backend or None
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
        c = causal_conv1d(x, self.conv_weight, self.conv_bias, x_before, backend=self.backend)  # (B, T, d_inner)
        r, k, q = self.x_proj(c).split([self.R, self.N, self.N], -1)  # (B, T, R), (B, T, N), (B, T, N)
        y, hT = longhorn_scan(c, self.dt_proj(r), k, q, self.D, z, self.dt_bias, h0, return_state=True, backend=self.backend)
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
        # a channel and state: eps k (1), x - k S (2), S += (2), S q (2); a channel: step size, skip and gate (8), the conv
        return self.d_inner * (7 * self.N + 8 + 2 * self.W)

    def state_size(self, T):
        return self.d_inner * (self.N + self.W - 1)


def rotate(x, cos, sin):
    """RoPE on (B, H, T, n): the pairs (x_i, x_{i + n/2}) turned by position times frequency i."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions (LLaMA): softmax(q k^T / sqrt(n)) v, base 10000 on all of q, k."""

    def __init__(self, config):
        super().__init__()
        d, self.H = config.n_embd, config.n_head
        if d % self.H or d // self.H % 2:
            raise ValueError(f"n_embd {d} over n_head {self.H} is not an even whole number of channels a head: choose an "
                             f"n_head that divides {d // 2}")
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.out_proj = nn.Linear(d, d, bias=False)

    def forward(self, x, state=None):
        B, T, d = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.H, d // self.H).permute(2, 0, 3, 1, 4)  # (B, H, T, n) each
        past = 0 if state is None else state[0].shape[2]
        frequency = 10000.0 ** -(torch.arange(0, d // self.H, 2, device=x.device) / (d // self.H))
        angle = torch.arange(past, past + T, device=x.device)[:, None] * frequency  # (T, n/2), float32
        cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if state is not None:
            k, v = torch.cat([state[0].to(k.dtype), k], 2), torch.cat([state[1].to(v.dtype), v], 2)
        mask = None
        if past and T > 1:
            mask = torch.ones(T, past + T, dtype=torch.bool, device=x.device).tril(past)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and T > 1)  # (B, H, T, n)
        y = self.out_proj(y.transpose(1, 2).reshape(B, T, d))
        return y, None if state is None else (k, v)

    def initial_state(self, batch_size, device):
        empty = torch.zeros(batch_size, self.H, 0, self.out_proj.in_features // self.H, device=device)
        return empty, empty

    def init_table(self, config):
        return {"qkv.weight": ("normal", 0.02), "out_proj.weight": ("normal", 0.02 / math.sqrt(2 * config.n_layer))}

    def mixing_flops(self, T):
        return 4 * self.out_proj.in_features * (T + 1) / 2  # q k^T and the weighted sum over the (T + 1) / 2 visible tokens

    def state_size(self, T):
        return 2 * T * self.out_proj.in_features


class SwiGLU(nn.Module):
    """W_2 (silu(W_1 x) * W_3 x), hidden width 8 d / 3 rounded up to a multiple of 256 (LLaMA)."""

    def __init__(self, config):
        super().__init__()
        hidden = math.ceil(8 * config.n_embd / 3 / 256) * 256
        self.w1 = nn.Linear(config.n_embd, hidden, bias=False)
        self.w3 = nn.Linear(config.n_embd, hidden, bias=False)
        self.w2 = nn.Linear(hidden, config.n_embd, bias=False)

    def forward(self, x, state=None):
        return self.w2(F.silu(self.w1(x)) * self.w3(x)), state

    def initial_state(self, batch_size, device):
        return ()

    def init_table(self, config):
        return {"w1.weight": ("normal", 0.02), "w3.weight": ("normal", 0.02),
                "w2.weight": ("normal", 0.02 / math.sqrt(2 * config.n_layer))}

    def mixing_flops(self, T):
        return 0

    def state_size(self, T):
        return 0


FAMILIES = {
    "longhorn": [Longhorn, Longhorn],
    "llama": [Attention, SwiGLU],
}


# ------------------------------------------------------------------------------------------------------------- skeleton

class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + 1e-5) * weight."""

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_embd))
        self.backend = "torch" if config.scan_backend == "torch" else None  # the norm has kernels for the CPU only

    def forward(self, x):
        return rms_norm(x, self.weight, 1e-5, self.backend)


class Residual(nn.Module):
    """h + branch(norm(h)), with the branch's state."""

    def __init__(self, config, branch):
        super().__init__()
        self.norm = RMSNorm(config)
        self.branch = branch(config)

    def forward(self, h, state=None):
        y, state = self.branch(self.norm(h), state)
        return h + y, state


class LM(nn.Module):
    """Language model of any family: `logits, loss = LM(config)(idx, targets)`.

    Raises ValueError for an unknown family or sizes that do not fit together.
    """

    def __init__(self, config):
        super().__init__()
        if config.model not in FAMILIES:
            raise ValueError(f"unknown model {config.model!r}: choose one of {', '.join(FAMILIES)}")
        for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "d_state", "d_conv", "expand"):
            if getattr(config, name) < 1:
                raise ValueError(f"{name} {getattr(config, name)} must be at least 1")
        if config.dt_rank < 0:
            raise ValueError(f"dt_rank {config.dt_rank} must be at least 1, or 0 for n_embd / 16")
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.branches = nn.ModuleList(Residual(config, b) for _ in range(config.n_layer) for b in FAMILIES[config.model])
        self.norm = RMSNorm(config)
        self.init_weights()

    def forward(self, idx, targets=None, state=None, last_only=False):
        """Predict the next token at every position.

        Args:
            idx: (B, T) int64 tokens; targets: (B, T) int64, -1 where no loss is wanted.
            state: what `initial_state` or the call before returned; the tokens then continue that sequence.
            last_only: logits of the last position only, (B, 1, vocab_size): enough to go on generating.

        Returns:
            (logits, loss), logits (B, T, vocab_size), loss the mean cross-entropy in nats or None without targets;
            with a state (logits, loss, state).
        """
        keep = state is not None
        states = state if keep else [None] * len(self.branches)
        h = self.embed(idx)  # (B, T, n_embd)
        after = []
        for branch, s in zip(self.branches, states, strict=True):
            h, s = branch(h, s)
            after.append(s)
        logits = F.linear(self.norm(h[:, -1:] if last_only else h), self.embed.weight)  # (B, T, vocab_size)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-1)
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
        """Parameter name -> (kind, scale): 'normal' standard deviation, 'uniform' bound, 'constant' value. All of them."""
        table = {"embed.weight": ("normal", 0.02), "norm.weight": ("constant", 1.0)}
        for i, branch in enumerate(self.branches):
            table[f"branches.{i}.norm.weight"] = ("constant", 1.0)
            table.update({f"branches.{i}.branch.{name}": how for name, how in branch.branch.init_table(self.config).items()})
        return table

    @torch.no_grad()
    def init_weights(self):
        """Draw every parameter as `init_table` says."""
        table = self.init_table()
        for name, p in self.named_parameters():
            kind, scale = table[name]
            if kind == "normal":
                p.normal_(0.0, scale)
            elif kind == "uniform":
                p.uniform_(-scale, scale)
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
        parts = {"embedding": self.embed.weight.numel(), "norms": self.norm.weight.numel()}
        for branch in self.branches:
            name = type(branch.branch).__name__
            parts[name] = parts.get(name, 0) + sum(p.numel() for p in branch.branch.parameters())
            parts["norms"] += branch.norm.weight.numel()
        return {**parts, "total": sum(parts.values())}

    def flops_per_token(self, T=None):
        """FLOPs a token of a sequence of T (default block_size): {'forward', 'backward', 'total'}.

        A linear map of n weights costs 2 n forward; the head counts, the embedding look-up does not; causal attention
        counts the visible half only. The backward is twice the forward; recomputation is not counted.
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
    logits = logits / temperature
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
TABLE1 = {"longhorn": {"120M": 128.6e6, "350M": 369.8e6}, "llama": {"120M": 124.4e6, "350M": 357.7e6}}  # paper's counts


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
    print(f"{'family':10} {'size':5} {'parameters':>12} {'Table 1':>9} {'off':>6} {'FLOPs/token':>12} {'state at 1024':>14}")
    for family, size, parameters, paper, flops, state in table():
        beside = f"{paper / 1e6:8.1f}M {parameters / paper - 1:+6.1%}" if paper else f"{'-':>9} {'-':>6}"
        print(f"{family:10} {size:5} {parameters / 1e6:11.1f}M {beside} "
              f"{flops / 1e6:11.0f}M {state / 1e6:13.2f}M")


if __name__ == "__main__":
    main()
