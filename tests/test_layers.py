"""Compares every family's blocks with an independent truth in float64: outputs and all gradients, for the same weights.

The truths are the papers' equations, a token at a time, or transformers' own layers. The layers' casts to float32 are
undone here. Their weights are made from ours by differentiable functions, so that gradients reach our tensors. A new
family needs a row in TRUTHS.

    python -m pytest tests/test_layers.py
"""

import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import table
from operators import F64, attention_true, conv_true, distance, graded, one_scan, recurrence
from torch.func import functional_call
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.rwkv import modeling_rwkv

import families  # noqa: F401
import optim
from mixers import STEPS
from model import LM, ModelConfig

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = (1, 3, 64, 130)  # less than a convolution's width, a chunk, more than two
SIZES = [{"n_embd": 32, "n_head": 2, "d_conv": 4, "d_state": 2}, {"n_embd": 48, "n_head": 3, "d_conv": 2, "d_state": 1},
         {"n_embd": 16, "n_head": 1, "d_conv": 3, "d_state": 5, "expand": 3}]
WINDOW = 7


class Weights(dict):
    """A block's parameters by name."""

    def linear(self, name, x):
        return F.linear(x, self[f"{name}.weight"], self.get(f"{name}.bias"))


# ------------------------------------------------------------------------------------------------------- the equations

def rms(x, eps=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def shifted(x, mu):
    """For each row of mu, x mixed with the token before."""
    return [x + (F.pad(x, (0, 0, 1, -1)) - x) * m for m in mu]


def turned(pairs, steps):
    """Pairs of numbers (B, T, H, n, 2), rotated by their position times 10000^(-i / steps)."""
    frequency = 10000.0 ** -(torch.arange(pairs.shape[3], dtype=F64) / steps)
    angle = torch.arange(pairs.shape[1])[:, None, None] * frequency
    turn = torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)


def scan_block(u, p, config):
    """Mamba's block with its scan, with Algorithm 1, or with Eq. 6 and the whole k k^T."""
    x, z = p.linear("in_proj", u).split(config.expand * config.n_embd, -1)
    x = conv_true(x, p["conv_weight"], p["conv_bias"])
    r, k, q = p.linear("x_proj", x).split([math.ceil(config.n_embd / 16), config.d_state, config.d_state], -1)
    update = {"longhorn_exact": "exact"}.get(config.model, config.model)
    rates = {"A": -p["A_log"].exp()} if update == "mamba" else {}
    y = one_scan(update, x, p.linear("dt_proj", r), k, q, D=p["D"], z=z, dt_bias=p["dt_bias"], **rates)["y"]
    return p.linear("out_proj", y)


def attention(x, p, config):
    q, k, v = (a.unflatten(-1, (config.n_head, -1)) for a in p.linear("qkv", x).chunk(3, -1))
    q, k = (turned(a.unflatten(-1, (2, -1)).mT, q.shape[3] / 2).mT.flatten(-2) for a in (q, k))
    o = attention_true(q, k, v, window=WINDOW if config.model == "swa" else None)["y"]
    return p.linear("out_proj", o.flatten(2))


def swiglu(x, p, config):
    return p.linear("w2", F.silu(p.linear("w1", x)) * p.linear("w3", x))


def gla(x, p, config):
    heads = lambda a: a.unflatten(-1, (config.n_head, -1))
    q, k = map(heads, p.linear("qk", x).chunk(2, -1))
    log_decay = heads(F.logsigmoid(p.linear("forget2", p.linear("forget1", x))) / 16)
    o, _ = recurrence(q / math.sqrt(q.shape[3]), k, heads(p.linear("v", x)), log_decay.exp())
    if config.model == "gla_released":  # keys are scaled like queries, which only eps notices, and means are removed
        o = o / math.sqrt(q.shape[3])
        o = o - o.mean(-1, keepdim=True)
    return p.linear("out_proj", F.silu(p.linear("gate", x)) * rms(o).flatten(2))


def retention(x, p, config):
    heads = lambda a: a.unflatten(-1, (config.n_head, -1))
    q, k = map(heads, p.linear("qk", x).chunk(2, -1))
    n = q.shape[3]
    q, k = (turned(a.unflatten(-1, (-1, 2)), n // 2 - 1).flatten(-2) for a in (q, k))
    v, g = p.linear("vg", x).chunk(2, -1)
    decay = 1 - 2.0 ** (-5 - torch.arange(config.n_head, dtype=F64))
    o, _ = recurrence(q, k / math.sqrt(n), heads(v), decay)
    return p.linear("out_proj", F.silu(g) * rms(o, 1e-6 if config.model == "retnet_released" else 1e-5).flatten(2))


def retnet_glu(x, p, config):
    h = p.linear("w1", x)
    return p.linear("w2", h * (1 + torch.erf(h / math.sqrt(2))) / 2 * p.linear("w3", x))


def rwkv_time(x, p, config):
    heads = lambda a: a.unflatten(-1, (config.n_head, -1))
    x_r, x_k, x_v, x_g = shifted(x, p["mu"])
    r, k, v = heads(p.linear("receptance", x_r)), heads(p.linear("key", x_k)), heads(p.linear("value", x_v))
    o, _ = recurrence(r, k, v, (-p["decay"].exp()).exp(), p["bonus"])
    o = (o - o.mean(-1, keepdim=True)) / (o.var(-1, correction=0, keepdim=True) + 64e-5).sqrt()
    return p.linear("output", (o.flatten(2) * p["norm_weight"] + p["norm_bias"]) * F.silu(p.linear("gate", x_g)))


def rwkv_channel(x, p, config):
    x_r, x_k = shifted(x, p["mu"])
    return p.linear("receptance", x_r).sigmoid() * p.linear("value", p.linear("key", x_k).relu() ** 2)


def delta(x, p, config):
    """DeltaNet and MesaNet."""
    q, k, v = conv_true(p.linear("qkv", x), p["conv_weight"]).unflatten(-1, (3, config.n_head, -1)).unbind(2)
    k = unit(k) if config.normalize_keys else k
    kk = k.square().sum(-1)
    beta = p.linear("beta", x).sigmoid()
    beta = {"explicit": beta, "implicit": beta / (1 + beta * kk), "exact": -torch.expm1(-beta * kk) / kk}[config.step]
    more = {}
    if config.model == "mesa":
        more = {"alpha": p.linear("forget", x).sigmoid(), "ridge": F.softplus(p["ridge"]) + 0.25}
    o, _ = recurrence(unit(q) / math.sqrt(q.shape[3]), k, v, beta=beta, **more)
    return p.linear("out_proj", (rms(o) * p["norm_weight"]).flatten(2))


# --------------------------------------------------------------------------------------------------------- transformers

class Wide:
    """Stands in for the module torch, with float64 in place of float32."""

    float32 = float = F64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture(autouse=True)
def without_casts(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    for module in (modeling_kimi_linear, modeling_mamba2, modeling_qwen3_next, modeling_rwkv):
        monkeypatch.setattr(module, "torch", Wide())


# their name and our name, for parameters that are used unchanged
QWEN3_NEXT = """
dt_bias          dt_bias
A_log            A_log
norm.weight      norm_weight
out_proj.weight  out_proj.weight
"""
KIMI_LINEAR = """
forget_gate.f_a_proj.weight  forget1.weight
forget_gate.f_b_proj.weight  forget2.weight
forget_gate.dt_bias          dt_bias
b_proj.weight                beta.weight
g_a_proj.weight              gate1.weight
g_b_proj.weight              gate2.weight
o_norm.weight                norm_weight
o_proj.weight                out_proj.weight
"""
MAMBA2 = """
in_proj.weight   in_proj.weight
conv1d.bias      conv_bias
dt_bias          dt_bias
A_log            A_log
D                skip
norm.weight      norm_weight
out_proj.weight  out_proj.weight
"""
RWKV4 = """
receptance.weight  receptance.weight
key.weight         key.weight
value.weight       value.weight
"""
RWKV4_TIME = """
receptance.weight  receptance.weight
key.weight         key.weight
value.weight       value.weight
output.weight      output.weight
time_decay         decay
time_first         bonus
"""


def theirs_of(module, x, p, names, **made):
    """The output of their module with our parameters. `names` and `made` must list all parameters of the module."""
    weights = {theirs: p[ours] for theirs, ours in table(names)} | {n.replace("__", "."): a for n, a in made.items()}
    if "conv_weight" in p:
        weights["conv1d.weight"] = p["conv_weight"][:, None]
    y = functional_call(module.double().eval(), weights, (x,), strict=True)
    return y[0] if isinstance(y, tuple) else y


def qwen3_next(x, p, config):
    H = config.n_head
    d = config.n_embd
    n = d // H // 2
    theirs = modeling_qwen3_next.Qwen3NextGatedDeltaNet(transformers.Qwen3NextConfig(
        hidden_size=d, num_hidden_layers=1, linear_num_value_heads=H, linear_num_key_heads=H, linear_key_head_dim=n,
        linear_value_head_dim=2 * n, linear_conv_kernel_dim=config.d_conv, rms_norm_eps=1e-5, hidden_act="silu",
        layer_types=["linear_attention"]), 0)
    by_head = lambda *maps: torch.cat([a.unflatten(0, (H, -1)) for a in maps], 1).flatten(0, 1)
    qkv = p["qkv.weight"].split([H * n, H * n, d])
    return theirs_of(theirs, x, p, QWEN3_NEXT, in_proj_qkvz__weight=by_head(*qkv, p["gate.weight"]),
                     in_proj_ba__weight=by_head(p["beta.weight"], p["forget.weight"]))


def kimi_linear(x, p, config):
    """Their output gate has no bias, as in the paper. Our bias, as in flash-linear-attention, starts at 0."""
    theirs = modeling_kimi_linear.KimiLinearDeltaAttention(transformers.KimiLinearConfig(
        hidden_size=config.n_embd, num_hidden_layers=1, linear_num_heads=config.n_head,
        linear_head_dim=config.n_embd // config.n_head, linear_conv_kernel_dim=config.d_conv, rms_norm_eps=1e-5,
        hidden_act="silu", layer_types=["linear_attention"]), 0)
    q, k, v = p["qkv.weight"].chunk(3)
    return theirs_of(theirs, x, p, KIMI_LINEAR, q_proj__weight=q, k_proj__weight=k, v_proj__weight=v,
                     forget_gate__A_log=p["A_log"][None, None, :, None])


def mamba2(x, p, config):
    theirs = modeling_mamba2.Mamba2Mixer(transformers.Mamba2Config(
        hidden_size=config.n_embd, num_heads=config.expand * config.n_head, head_dim=config.n_embd // config.n_head,
        state_size=8 * config.d_state, n_groups=1, num_hidden_layers=1, expand=config.expand,
        conv_kernel=config.d_conv, chunk_size=32), 0)
    return theirs_of(theirs, x, p, MAMBA2)


def rwkv4(module, names, x, p, config):
    """Their parameter is the weight of the present token, 1 - mu; ours is that of the previous token, mu."""
    theirs = module(transformers.RwkvConfig(
        hidden_size=config.n_embd, attention_hidden_size=config.n_embd, intermediate_size=len(p["key.weight"]),
        num_hidden_layers=2, context_length=200), 1)
    mixed = zip(("time_mix_receptance", "time_mix_key", "time_mix_value"), (1 - p["mu"])[:, None, None], strict=False)
    return theirs_of(theirs, x, p, names, **dict(mixed))


def rwkv4_time(x, p, config):
    return rwkv4(modeling_rwkv.RwkvSelfAttention, RWKV4_TIME, x, p, config)


def rwkv4_channel(x, p, config):
    return rwkv4(modeling_rwkv.RwkvFeedForward, RWKV4, x, p, config)


# ------------------------------------------------------------------------------------------------------------- the list

TRUTHS = {  # family: the truth of each branch in which it differs from the others
    **dict.fromkeys(("longhorn", "longhorn_exact", "mamba"), [scan_block]),
    "llama": [attention, swiglu], "swa": [attention], "gla": [gla], "gla_released": [gla],
    **dict.fromkeys(("retnet", "retnet_released"), [retention, retnet_glu]),
    "rwkv": [rwkv_time, rwkv_channel], "deltanet": [delta], "mesa": [delta],
    "gated_deltanet": [qwen3_next], "kda": [kimi_linear], "mamba2": [mamba2],
    "rwkv4": [rwkv4_time, rwkv4_channel],
}
FLOAT32 = ("llama", "swa", "retnet", "retnet_released")  # their angles are always float32


def shaken(lm):
    """The model in float64, with large matrices and vectors away from ones and zeros, so that a forgotten one shows."""
    with torch.no_grad():
        for name, p in lm.named_parameters():
            if name in optim.decayed(lm):
                p.normal_(0, p.shape[1] ** -0.5)
            elif not name.endswith(("A_log", "decay")):
                p.add_(torch.empty_like(p).uniform_(-0.3, 0.3))
    return lm.double()


@pytest.mark.parametrize("family, changes", [
    *((family, sizes) for family in TRUTHS for sizes in SIZES),
    *(("deltanet", {**SIZES[0], "step": step, "normalize_keys": unit}) for step in STEPS for unit in (True, False)),
], ids=str)
def test_a_block_and_its_gradients_equal_the_truth(family, changes):
    torch.manual_seed(0)
    config = ModelConfig(model=family, n_layer=2, vocab_size=8, mlp_multiple=8, window=WINDOW, **changes)
    for branch, truth in zip(shaken(LM(config)).layers[1].branches, TRUTHS[family], strict=False):
        block = branch.mixer
        p = dict(block.named_parameters())
        if family == "kda":
            p.pop("gate2.bias").data.zero_()
        ours = lambda x, block=block, **p: functional_call(block, p, (x,))[0]
        true = lambda x, truth=truth, **p: truth(x, Weights(p), config)
        for T in LENGTHS:
            a = {"x": torch.randn(2, T, config.n_embd, dtype=F64), **p}
            got, want = graded(ours, a), graded(true, a)
            least = 1e-3 * max(v.norm().item() for v in want.values())  # a gradient may be rounding alone
            for name, v in want.items():
                assert distance(got[name], v, least) < (1e-5 if family in FLOAT32 else 1e-11), (T, name)
