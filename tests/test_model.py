"""model.py and mixers.py: the same tests for every family, then most families against their equations, token by token.

LLaMA and Mamba are compared with transformers in test_export.py, whole layers of others in test_layers.py. The counts,
FLOPs and initialisation of today's families are written down here a second time, by hand; a new family in FAMILIES
passes through all other tests.
"""

import dataclasses
import inspect
import itertools
import json
import math
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import mpmath
import pytest
import torch
import torch.nn.functional as F
from helpers import copied_tree, table
from operators import OPERATORS, conv_true, recurrence
from scipy import stats
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import configurator
import families
import initialisation as parameters
import mixers
import model
import optim
import sample
import train
from common.errors import ConfigError
from inspection import counting
from kernels import choose
from kernels.cache import ROOMS, append_to_cache
from model import FAMILIES, LM, ModelConfig
from runtime import distributed
from tools import parameters as sizes
from tools.parameters import SIZES, TABLE1

ALL_FAMILIES = pytest.mark.parametrize("family", FAMILIES)
ENDLESS = pytest.mark.parametrize("family", [family for family in FAMILIES if family not in model.POSITIONS])
CONFIG = Path(__file__).resolve().parent.parent / "config"


def config(family, **changes):
    small = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 24, "vocab_size": 64}
    return ModelConfig(**{"model": family, **small, **changes})


def tiny(family, seed=0, **changes):
    """A small model with matrices so large that every branch affects the logits."""
    torch.manual_seed(seed)
    lm = LM(config(family, **changes)).eval()
    matrices = dict(lm.named_parameters())
    with torch.no_grad():
        for name in optim.decayed(lm):
            matrices[name].normal_(0, 0.3 if name == "embed.weight" else matrices[name].shape[1] ** -0.5)
    return lm


def tokens(B, T, vocab_size=64, seed=1):
    return torch.randint(vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def close(a, b, tolerance=2e-5):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def numel(state):
    """Numbers in a state: tensors in any nesting of lists and tuples."""
    return state.numel() if isinstance(state, torch.Tensor) else sum(map(numel, state))


def in_chunks(lm, idx, splits):
    """Logits (B, T, vocab_size) through the state, and the state after the last."""
    state = lm.initial_state(len(idx))
    parts = []
    for part in idx.split(splits, 1):
        logits, _, state = lm(part, state=state)
        parts.append(logits)
    return torch.cat(parts, 1), state


# ------------------------------------------------------------------------------------------ sequences, chunks and steps

@ALL_FAMILIES
@torch.no_grad()
def test_chunks_with_their_state_equal_the_whole(family):
    """So no token affects earlier ones: a chunk has not seen what follows."""
    lm, idx = tiny(family, window=13, block_size=48), tokens(2, 24)  # two layers of it see 24 back
    whole = lm(idx)[0]
    logits, state = in_chunks(lm, idx, [1, 1, 5, 1, 14, 1, 1])
    close(logits, whole, 1e-4)  # float32, matrices several times as large as at the start of training
    after = lm(idx, state=state)[0]
    assert torch.equal(lm(idx, state=state)[0], after), "the state was not left as it was"
    other = lm(torch.cat([(idx[:, :1] + 1) % 64, idx[:, 1:]], 1))[0]
    assert (other - whole).abs().amax((0, 2)).min() > 1e-6, "a later position does not see the first token"


@ALL_FAMILIES
@torch.no_grad()
def test_shapes_loss_and_last_only(family):
    lm = tiny(family)
    idx = tokens(3, 10)
    targets = tokens(3, 10, seed=2)
    logits, loss = lm(idx)
    assert logits.shape == (3, 10, 64) and loss is None
    p = logits.double().log_softmax(-1)
    targets[0], targets[1, 3:] = -1, -1
    keep = targets >= 0
    _, loss = lm(idx, targets)
    close(loss.double(), -p[keep].gather(-1, targets[keep][:, None]).mean())
    none, alone = lm(idx, targets, loss_only=True)
    assert none is None
    close(alone, loss)
    with pytest.raises(ValueError, match="loss_only needs targets"):
        lm(idx, loss_only=True)
    close(lm(idx, last_only=True)[0], logits[:, -1:])
    close(lm(idx, state=lm.initial_state(3), last_only=True)[0], logits[:, -1:])
    assert lm.bfloat16()(idx, targets)[1].dtype == torch.float32


# ------------------------------------------------------------------------------------------------------------- learning

def trained(family, dtype, recompute, **changes):
    """The model, its logits and loss, and each parameter's gradient by name."""
    lm = tiny(family, **changes)
    idx = tokens(3, 24, 63)
    y = tokens(3, 24, seed=2)
    idx[0, 7], idx[1, 3], idx[1, 21] = 63, 63, 63
    distributed.prepare_layers(lm, SimpleNamespace(compile=False, recompute=recompute))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits, loss = lm(idx, y)
    names = [name for name, _ in lm.named_parameters()]
    return lm, logits, loss, dict(zip(names, torch.autograd.grad(loss, list(lm.parameters())), strict=True))


@ALL_FAMILIES
def test_training_in_either_dtype_with_and_without_recomputation(family):
    """Every parameter gets a gradient. Recomputed layers train to the same bits. In bfloat16 all values agree with
    float32 relative to the whole, gradients only loosely: the first o of a head is (q . k) v, whose norm magnifies
    rounding where q . k is nearly 0."""
    noisy = {"gla": 0.8, "gla_released": 0.9, "retnet": 0.5, "rwkv": 0.5}  # one that is not there at all differs by 1
    differ = lambda a, b, least=1e-6: ((a - b).norm() / (b.norm() + least)).item()
    how = {"documents": "join" if family in model.POSITIONS else "pack", "end_of_text": 63}
    _, logits, _, grads = trained(family, torch.float32, "none", **how)
    _, rounded, loss, near = trained(family, torch.bfloat16, "none", **how)
    _, _, same, again = trained(family, torch.bfloat16, "block", **how)
    assert torch.equal(loss, same) and [n for n, g in near.items() if not torch.equal(g, again[n])] == []
    assert differ(rounded, logits) < 0.05
    largest = max(g.norm() for g in grads.values())
    for name, g in grads.items():
        assert g.isfinite().all() and (g != 0).float().mean() > (0.5 if name != "embed.weight" else 0.99), name
        assert differ(near[name], g, 0.01 * largest) < noisy.get(family, 0.2), name
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        idx = tokens(2, 24)
        assert differ(in_chunks(tiny(family), idx, [5, 1, 18])[0], tiny(family)(idx)[0]) < 0.05


def test_compiled_equals_eager():
    """It is one graph. test_conformance.py compiles every operator and its backward."""
    torch.compiler.reset()
    lm = tiny("longhorn", pattern="longhorn,llama")
    idx = tokens(2, 16)
    targets = tokens(2, 16, seed=2)
    run = torch.compile(lm, backend="eager", fullgraph=True)
    (logits, loss), (compiled_logits, compiled_loss) = lm(idx, targets), run(idx, targets)
    close(compiled_logits, logits)
    close(compiled_loss, loss)
    alone = run(idx, targets, loss_only=True)
    assert alone[0] is None  # as a graph's output the logits would get a gradient as large as they are
    close(alone[1], loss)


# ------------------------------------------------------------------------------------------------ counted a second time

# exact counts at 120M and 350M: of LLaMA and Mamba what transformers has, all within 1% of the paper's where it has one
PARAMETERS = {
    "longhorn": (128_563_968, 369_968_128),
    "mamba": (129_153_792, 371_540_992),
    "llama": (123_587_328, 359_842_816),
    "gla": (123_822_336, 360_469_504),
    "retnet": (129_116_928, 373_212_160),
    "rwkv": (123_661_344, 353_748_736),
    "rwkv_released": (124_447_776, 354_797_312),  # Table 1's 124.4M and 354.8M
    "rwkv4": (130_750_464, 378_941_440),
    "deltanet": (123_809_280, 360_532_480),
    "longhorn_exact": (128_563_968, 369_968_128),
}


@pytest.mark.parametrize("size", SIZES)
@ALL_FAMILIES
def test_parameter_count(family, size):
    with torch.device("meta"):
        lm = LM(ModelConfig(model=family, **SIZES[size]))
    count = sum(p.numel() for p in lm.parameters())
    parts = counting.parameter_count(lm)
    assert parts["total"] == count == sum(n for part, n in parts.items() if part != "total")
    assert parts["embedding"] == 50304 * SIZES[size]["n_embd"]
    if family in PARAMETERS:
        assert count == PARAMETERS[family][list(SIZES).index(size)]
    if family in TABLE1:
        assert count == pytest.approx(TABLE1[family][size], rel=0.01)


# family -> forward FLOPs per token and layer beside the linear maps: 2 heads, 64 channels, T = 24, N = 16, d_conv 4
MIXING = {
    # eps k, x - k S, S +=, S q: 1 + 2 + 2 + 2 per state (Mamba: delta A, exp and its product, S +=, S q: the same);
    # step size, skip, gate = 8 per channel; the convolution: two branches of 128 channels, 7 * 16 + 8 + 2 * 4
    "longhorn": 32_768,
    "mamba": 32_768,
    "longhorn_exact": 33_024,  # k S summed over the states first: 1 more per channel
    # each of the 64 channels of q and of v meets (24 + 1) / 2 tokens on average: 2 * 2 * 64 * 12.5
    "llama": 3_200,
    # a S, S +=, q S = 1 + 2 + 2 for each number of the state, which is 2 heads of 16 x 32
    "gla": 5_120,
    "retnet": 18_240,  # of 32 x 57
    "rwkv": 10_560,  # of 32 x 32; r . u k, times v, added to o: 3 + 1 + 1 per channel
    "rwkv4": 1_472,  # 23 per channel
    # k S, S +=, q S = 2 + 2 + 2; the error and beta = 2 per value; three convolutions
    "deltanet": 13_952,
    # and a S or diag(a) S; values twice as wide as keys, which are half as wide as the model
    "gated_deltanet": 8_320,
    "kda": 16_000,
    # H and U decay and take in a token, 3 each, and x U is 2; 30 steps of 2 per number of H, of 10 per channel of k
    "mesa": 160_000,
    # a S, S +=, C S of 8 * 16 numbers per channel; step size, skip, gate = 5; the convolution of 128 + 2 * 8 * 16
    "mamba2": 171_264,
    # half of block_size, 12: the first 12 see all before them, 2 * 2 * 64 * (78 + 12 * 12) / 24
    "swa": 2_368,
}
LONGER = {"llama": 2 * 2 * 64 * 50.5, "swa": 2 * 2 * 64 * (78 + 88 * 12) / 100}  # at T = 100


def counted(lm):
    """(parameters, forward FLOPs per token, numbers in the state)"""
    parts = counting.parameter_count(lm)
    assert parts.pop("total") == sum(parts.values()) == sum(p.numel() for p in lm.parameters())
    return sum(parts.values()), counting.flops_per_token(lm)["forward"], counting.state_size(lm)


def test_counts_of_a_model_that_is_edited_again_and_again():
    lm = tiny("longhorn,llama")
    parameters, flops, state = counted(lm)
    lm.embed.requires_grad_(False)
    assert counted(lm) == (parameters, flops, state)
    lm.temperature = nn.Parameter(torch.ones(1))
    assert counted(lm) == (parameters + 1, flops, state)
    lm.layers[0].more = nn.Linear(32, 48)
    parameters, flops = parameters + 1 + 33 * 48, flops + 2 * 32 * 48
    assert counted(lm) == (parameters, flops, state)
    lm.head = nn.Linear(32, 64, bias=False)
    lm.head.weight = lm.embed.weight
    assert counted(lm) == (parameters, flops, state)
    lm.head = nn.Linear(32, 64, bias=False)
    lm.config.tie_head = False
    assert counted(lm) == (parameters + 64 * 32, flops, state)


def test_what_stands_in_two_places_has_its_parameters_once_and_runs_twice():
    """One layer used twice, whose two norms are one; compared with torch's sum and a model of two layers."""
    lm, plain = tiny("llama", n_layer=2), tiny("llama", n_layer=2)
    lm.layers[1], first = lm.layers[0], lm.layers[0].branches
    first[1].norm = first[0].norm
    assert counted(lm)[1:] == counted(plain)[1:]
    lm.layers[0].active_share = 1 / 4
    maps = sum(2 * m.weight.numel() for m in first.modules() if isinstance(m, nn.Linear))
    mixing = sum(counting.mixing_flops(branch.mixer, 24) or 0 for branch in first)
    assert counting.flops_per_token(lm, 24)["forward"] == 2 * (maps + mixing) / 4 + 2 * lm.embed.weight.numel()


@ALL_FAMILIES
def test_flops_per_token(family):
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 24, "vocab_size": 96}
    lm = LM(ModelConfig(model=family, **shape))
    B = 2
    T = 24
    flops = counting.flops_per_token(lm)
    assert flops["total"] == flops["forward"] + flops["backward"] and flops["backward"] == 2 * flops["forward"]
    assert not counting.left_out(lm), "a family of ours leaves something out"
    maps = sum(m.weight.numel() for m in lm.modules() if isinstance(m, torch.nn.Linear))
    mixing = flops["forward"] - 2 * maps - 2 * 96 * 64
    if by_hand := MIXING.get(plain := family.removesuffix("_released")):
        assert mixing == 2 * by_hand
        longer = counting.flops_per_token(lm, 100)["forward"] - flops["forward"]
        assert longer == pytest.approx(2 * (LONGER.get(plain, by_hand) - by_hand))
    with FlopCounterMode(display=False) as counter:  # what PyTorch counts: linear maps are mm
        lm(tokens(B, T, 96))
    forward = counter.get_flop_counts()["Global"]
    linear = sum(forward.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    assert linear == B * T * (flops["forward"] - mixing)


def read(name):
    return dataclasses.asdict(configurator.load(train.TrainConfig, [str(CONFIG / f"{name}.py")]))


@pytest.mark.parametrize("family", [family for family in FAMILIES if (CONFIG / f"{family}_laptop.py").exists()])
def test_laptop_models_are_of_one_size_and_train_alike(family):
    """Their parameters are within 2% of Longhorn's, with the same tokens, order and schedule: only the mixer
    differs."""
    ours = read(f"{family}_laptop")
    theirs = read("longhorn_laptop")
    assert ours["model"] == family
    ours["vocab_size"] = theirs["vocab_size"] = 256  # bytes
    count = lambda c: counting.parameter_count(LM(ModelConfig(**{k: c[k] for k in vars(ModelConfig())})))["total"]
    with torch.device("meta"):
        assert count(ours) == pytest.approx(count(theirs), rel=0.02)
    may_differ = {"model", "mlp_multiple", "d_state", "n_head"} | ({"eval_block_size"} if family == "llama" else set())
    assert {k for k, v in theirs.items() if ours[k] != v} <= may_differ


@ENDLESS
@torch.no_grad()
def test_state_size_is_that_of_the_state_and_constant_for_all_but_attention(family):
    for changes in ({"d_state": 4}, {"n_layer": 1, "d_conv": 1}):
        lm = tiny(family, **changes)
        assert numel(lm(tokens(3, 10), state=lm.initial_state(3))[2]) == 3 * counting.state_size(lm, 10)
    state = lm.initial_state(1)
    idx = tokens(1, 40)
    for t in range(40):
        _, _, state = lm(idx[:, t:t + 1], state=state, last_only=True)
        assert numel(state) == counting.state_size(lm, t + 1)
    caches = any(issubclass(b, model.Attention) for b in FAMILIES[family])
    assert (counting.state_size(lm, 40) > counting.state_size(lm, 10)) == caches
    assert (counting.state_size(lm, 40) > counting.state_size(lm, 20)) == (caches and family != "swa")  # window 12
    held = lambda state: sum(a.untyped_storage().nbytes() // 4 for a in model.tensors_of(state))
    at_once = lm(idx, state=lm.initial_state(1))[2]
    assert max(held(s) / numel(s) for s in (state, at_once)) <= 2, "a view keeps the past alive"


def keys_and_values(steps):
    return tuple(torch.randn(2, 2, 3, steps, 5))


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode, torch.enable_grad))
@pytest.mark.parametrize("change", [
    lambda k, v: (k, v), lambda k, v: (k[:, :, :-4], v[:, :, :-4]), lambda k, v: (k.double(), v.double()),
    lambda k, v: (k, torch.randn_like(v))], ids=["as it was", "cut", "of another dtype", "of other values"])
def test_a_cache_continues_whatever_was_done_to_it(change, mode):
    """It can be continued twice: neither continuation writes into the other's past."""
    with mode():
        cache = cache_of(keys_and_values(0), keys_and_values(10), keys_and_values(1))
    with torch.no_grad():
        cache = change(*cache)
        ways = [(cache, keys_and_values(3), keys_and_values(2)) for _ in range(2)]
        begun = [cache_of(*way[:2]) for way in ways]
        for way, after in zip(ways, begun, strict=True):
            for got, *parts in zip(cache_of(after, way[2]), *way, strict=True):
                assert torch.equal(got, torch.cat([part.float() for part in parts], 2))


def cache_of(cache, *parts):
    for part in parts:
        cache = append_to_cache(cache, *part)
    return cache


def test_a_token_does_not_copy_the_cache_and_a_graph_holds_no_room():
    cache = keys_and_values(0)
    moves = 0
    with torch.no_grad():
        for _ in range(300):
            before = cache[0].data_ptr()
            cache = append_to_cache(cache, *keys_and_values(1))
            moves += cache[0].data_ptr() != before
        assert moves < 12 and cache[0].shape[2] == 300
        assert cache[0].untyped_storage().nbytes() <= 1.25 * cache[0].numel() * 4 + 32 * cache[0][:, :, 0].numel() * 4
        rooms = len(ROOMS)
        new = keys_and_values(2)
        compiled = torch.compile(append_to_cache, backend="eager", fullgraph=True)(cache, *new)
        assert len(ROOMS) == rooms and all(map(torch.equal, compiled, cache_of(cache, new)))
        assert append_to_cache(cache_of(cache, new), *(a.bfloat16() for a in new))[0].dtype == torch.bfloat16


# ----------------------------------------------------------------------------------------- initialisation, weight decay

def expected_init(family, layer, branch, d, L, H, N=16, W=4):
    """{name of a parameter within its mixer: (kind, scale) or values} as in the papers' code, for those that are not
    normal with an SD of 0.02, or of 0.02 over the root of the number of residual branches."""
    kaiming = lambda fan_in: ("uniform", fan_in**-0.5)
    xavier = lambda fan_in, fan_out, gain: ("uniform", gain * math.sqrt(6 / (fan_in + fan_out)))
    one = ("constant", 1)
    zero = ("constant", 0)
    low = 2**-2.5
    wide = int(1.8 * d) // H * H
    a = layer / max(1, L - 1)
    c = 1 - layer / L
    i = [j / d for j in range(d)]
    mu_k = [1 - x**c for x in i]
    mu_v = [1 - (x**c + 0.3 * a) for x in i]
    mu_r = [1 - x ** (c / 2) for x in i]
    d_ramp, h_ramp = ([j / max(1, n - 1) for j in range(n)] for n in (d, H))
    scan = {"in_proj.weight": kaiming(d), "conv_weight": kaiming(W), "conv_bias": kaiming(W), "dt_bias": zero, "D": one,
            "x_proj.weight": kaiming(2 * d), "dt_proj.weight": kaiming(math.ceil(d / 16)),
            "out_proj.weight": ("uniform", (2 * d) ** -0.5 / math.sqrt(2 * L))}
    delta = {"conv_weight": kaiming(W), "norm_weight": one}
    step_size = ("step size", (1e-3, 0.1))
    return {
        "longhorn": scan, "longhorn_exact": scan,
        "mamba": {**scan, "dt_bias": step_size,
                  "A_log": [[math.log(j + 1) for j in range(N)]] * (2 * d)},
        "gla": {"qk.weight": xavier(d, d // 2, low), "forget1.weight": xavier(d, 16, low),
                "forget2.weight": xavier(16, d // 2, low), "forget2.bias": zero, "gate.bias": zero},
        "retnet": {"qk.weight": xavier(d, d, low), "vg.weight": xavier(d, wide, low),
                   "out_proj.weight": xavier(wide, d, 0.5)},
        "deltanet": delta, "gated_deltanet": {**delta, "dt_bias": step_size, "A_log": ("log", (0, 16))},
        "kda": {**delta, "dt_bias": step_size, "A_log": ("log", (1, 16)), "gate2.bias": zero},
        "mesa": {**delta, "forget.bias": zero, "beta.bias": zero, "ridge": ("constant", math.log(math.expm1(0.75)))},
        "mamba2": {name: scan[name] for name in ("in_proj.weight", "conv_weight", "conv_bias", "out_proj.weight")} | {
            "dt_bias": step_size, "A_log": ("log", (1, 16)), "skip": one, "norm_weight": one},
        "rwkv": {"mu": [mu_k, mu_k] if branch else [mu_r, mu_k, mu_v, mu_r], "norm_weight": one, "norm_bias": zero,
                 "decay": [-6 + 5 * x ** (0.7 + 1.3 * a) for x in h_ramp], "bonus": [a * (1 - x) for x in h_ramp]},
        "rwkv4": {"mu": [mu_k, mu_k] if branch else [mu_r, mu_k, mu_v],
                  "decay": [-5 + 8 * x ** (0.7 + 1.3 * a) for x in d_ramp],
                  "bonus": [math.log(0.3) + (-0.5, 0, 0.5)[(j + 1) % 3] for j in range(d)]},
    }.get(family if family == "retnet_released" else family.removesuffix("_released"), {})


LAWS = {  # kind of an initialisation: (what was drawn, from the parameter; its distribution, from the scale)
    "normal": (lambda p: p, lambda scale: stats.norm(0, scale)),
    "uniform": (lambda p: p, lambda scale: stats.uniform(-scale, 2 * scale)),
    "step size": (F.softplus, lambda ends: stats.loguniform(*ends)),
    "log": (torch.exp, lambda ends: stats.uniform(ends[0], ends[1] - ends[0])),
}
RESIDUAL = {"out_proj.weight", "w2.weight", "output.weight"}  # and RWKV's channel mix's value


@pytest.mark.parametrize("L, H", [(2, 4), (1, 1)])
@ALL_FAMILIES
def test_every_parameter_starts_as_its_paper_says(family, L, H):
    torch.manual_seed(0)
    d = 256
    lm = LM(config(family, n_embd=d, n_layer=L, n_head=H, vocab_size=1024))
    for name, p in lm.named_parameters():
        p = p.detach().double()
        expected = ("normal", 0.02)
        if re.fullmatch(r"(layers\.\d+\.branches\.\d+\.|embed_)?norm\.(weight|bias)", name):
            expected = "constant", float(name.endswith("weight"))
        elif name not in ("embed.weight", "positions.weight"):
            layer = int(name.split(".")[1])
            branch = int(name.split(".")[3])
            inner = name.split(".mixer.")[1]
            writes = inner in RESIDUAL or (inner == "value.weight" and branch)
            if family.endswith("_released"):  # whose code scales RWKV's time mix only
                writes = inner == "output.weight"
            plain = "normal", 0.02 / math.sqrt(2 * L) if writes else 0.02
            expected = expected_init(family, layer, branch, d, L, H).get(inner, plain)
        if isinstance(expected, list) or expected[0] == "constant":
            wanted = torch.tensor(expected if isinstance(expected, list) else expected[1], dtype=torch.float64)
            close(p, wanted.expand_as(p), 1e-6)
            continue
        kind, scale = expected
        drawn, law = (f(x) for f, x in zip(LAWS[kind], (p, scale), strict=True))
        (low, high), slack = law.support(), 6 / math.sqrt(p.numel())  # six standard errors, about
        assert low - 1e-3 <= drawn.min() and drawn.max() <= high + 1e-3 * abs(high), name
        assert abs(drawn.mean() - law.mean()) < law.std() * slack, name
        assert p.numel() < 8 or drawn.std() == pytest.approx(law.std(), rel=slack), name
        assert stats.kstest(drawn.flatten()[:5000], law.cdf).pvalue > 1e-4, f"{name} is not {kind}"
    _, loss = lm(tokens(4, 24, 1024), tokens(4, 24, 1024, seed=2))
    assert abs(loss.item() - math.log(1024)) < 0.2, "not the loss of a uniform guess"


def test_an_edit_leaves_the_draws_of_all_other_parameters():
    """With another width of the convolution, one more layer or another family, parameters of the same name and shape
    are equal."""
    def starts(family="longhorn", seed=7, **changes):
        torch.manual_seed(seed)
        return dict(LM(config(family, **changes)).named_parameters())

    drawn = starts()
    for changed in (starts(d_conv=3), starts(n_layer=3, pattern="longhorn,llama,mamba"), starts("mamba")):
        same = [name for name, p in changed.items() if name in drawn and p.shape == drawn[name].shape
                and not name.endswith(("out_proj.weight", "dt_bias", "conv_bias"))]  # of another scale or law
        assert len(same) > 7 and all(torch.equal(changed[name], drawn[name]) for name in same)
    assert not torch.equal(starts(seed=8)["embed.weight"], drawn["embed.weight"])
    layers = [p for name, p in drawn.items() if name.endswith("in_proj.weight")]
    assert not any(torch.equal(p, q) for p, q in itertools.combinations(layers, 2))
    a, b = starts(), LM(config("longhorn"))  # a second model from the same stream of PyTorch
    assert torch.equal(a["embed.weight"], drawn["embed.weight"]) and not torch.equal(b.embed.weight, a["embed.weight"])


class Written(model.GLA):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.write()


WRITES = {  # what a constructor does: the parameter that it writes to
    "out_proj.weight": lambda m: nn.init.zeros_(m.out_proj.weight),
    "gate.bias": lambda m: m.gate.bias.data[3:].fill_(-2.0),
    "gate.weight": lambda m: m.gate.weight.data.mul_(0.5),
    "v.weight": lambda m: m.v.weight.data.copy_(m.gate.weight),
    "forget2.bias": lambda m: setattr(m.forget2.bias, "data", torch.zeros(16)),
}


@pytest.mark.parametrize("name, dtype", [*((name, torch.float32) for name in WRITES), *(
    ("gate.weight", dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64))])
def test_what_is_written_where_a_start_is_drawn_is_refused(name, dtype, monkeypatch):
    """Models are built in other dtypes as transformers does, whatever the width: 5 is dt_rank here."""
    monkeypatch.setitem(FAMILIES, "written", [Written])
    monkeypatch.setattr(Written, "write", WRITES[name], raising=False)
    torch.set_default_dtype(dtype)
    try:
        assert all(p.isfinite().all() for p in LM(config("longhorn", n_embd=66)).parameters())
        with pytest.raises(ValueError, match=rf"^Written\.{name} .*: write start=\.\.\., or drop one of the two$"):
            LM(config("written"))
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_embedding_is_nan_until_it_is_drawn_and_what_has_no_start_keeps_its_values(monkeypatch):
    def build_layers(self, config):
        assert self.embed.weight.isnan().all()
        self.embed.weight.data.zero_()
        return []

    monkeypatch.setattr(LM, "build_layers", build_layers)
    with pytest.raises(ValueError, match=r"^LM\.embed\.weight "):
        LM(config("gla"))
    monkeypatch.undo()
    monkeypatch.setitem(FAMILIES, "written", [Written])
    ones = nn.Parameter(torch.ones(32, 32))
    monkeypatch.setattr(Written, "write", lambda m: setattr(m.v, "weight", ones), raising=False)
    assert (LM(config("written")).layers[0].branches[0].mixer.v.weight == 1).all()


@pytest.mark.parametrize("make, words", [
    (lambda: parameters.parameter(3, start=torch.zeros(3)), r"start=tensor\(\[0.*\) is not a function of the"),
    (lambda: parameters.linear(4, 12, parts=[4, 4]), r"parts \[4, 4\] must add up to the 12 rows")])
def test_a_start_that_is_no_function_and_parts_that_lack_rows(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_logarithms_start_above_minus_infinity():
    p = torch.empty(5)
    parameters.log_uniform(0.0, 1e-9)(p)
    close(p.exp(), torch.full((5,), 1e-4))


@ALL_FAMILIES
def test_matrices_and_the_embedding_decay_and_nothing_else(family):
    lm = LM(config(family))
    named = dict(lm.named_parameters())
    decayed = optim.decayed(lm)
    free = r"A_log|\bD$|bias|norm|conv|time_|mu|decay|bonus|ridge"
    for name, p in named.items():
        assert (name in decayed) == (p.ndim == 2 and not re.search(free, name)), name
    assert "embed.weight" in decayed and len(decayed) == len(set(decayed))


# ---------------------------------------------------------------------------------------- against other implementations

def shake(lm):
    """Moves vectors away from their start, so that a forgotten one shows."""
    with torch.no_grad():
        for name, p in lm.named_parameters():
            if name not in optim.decayed(lm) and not name.endswith(("A_log", "decay")):
                p.add_(torch.empty_like(p).uniform_(-0.3, 0.3))
    return lm


heads = lambda x: x.unflatten(-1, (4, -1))
rms = lambda x, eps=1e-5: x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
unit = lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def gla_by_hand(x, linear, p, config):
    q, k = (heads(a) for a in linear("qk", x).chunk(2, -1))
    log_decay = heads(F.logsigmoid(linear("forget2", linear("forget1", x))) / 16)
    o, _ = recurrence(q / math.sqrt(q.shape[3]), k, heads(linear("v", x)), log_decay.exp())
    if config.model == "gla_released":  # keys as short as queries, seen by the norm's eps alone; means taken off
        o = o / math.sqrt(q.shape[3])
        o = o - o.mean(-1, keepdim=True)
    return linear("out_proj", F.silu(linear("gate", x)) * rms(o).flatten(2))


def retention_by_hand(x, linear, p, config):
    q, k = (heads(a) for a in linear("qk", x).chunk(2, -1))
    n = q.shape[3]
    angle = torch.arange(x.shape[1])[:, None, None] * 10000.0 ** -(torch.arange(n // 2).double() / (n // 2 - 1))
    turn = torch.polar(torch.ones_like(angle), angle)
    q, k = (torch.view_as_real(torch.view_as_complex(a.unflatten(-1, (-1, 2))) * turn).flatten(-2) for a in (q, k))
    v, g = linear("vg", x).chunk(2, -1)
    o, _ = recurrence(q, k / math.sqrt(n), heads(v), 1 - 2.0 ** (-5 - torch.arange(4).double()))
    return linear("out_proj", F.silu(g) * rms(o, 1e-6 if config.model == "retnet_released" else 1e-5).flatten(2))


def retnet_glu_by_hand(x, linear, p, config):
    h = linear("w1", x)
    return linear("w2", h * (1 + torch.erf(h / math.sqrt(2))) / 2 * linear("w3", x))


def rwkv_time_by_hand(x, linear, p, config):
    x_r, x_k, x_v, x_g = (x + (F.pad(x, (0, 0, 1, -1)) - x) * mu for mu in p["mu"])
    r, k, v = heads(linear("receptance", x_r)), heads(linear("key", x_k)), heads(linear("value", x_v))
    o, _ = recurrence(r, k, v, (-p["decay"].exp()).exp(), p["bonus"])
    o = (o - o.mean(-1, keepdim=True)) / (o.var(-1, correction=0, keepdim=True) + 64e-5).sqrt()
    return linear("output", (o.flatten(2) * p["norm_weight"] + p["norm_bias"]) * F.silu(linear("gate", x_g)))


def rwkv_channel_by_hand(x, linear, p, config):
    x_r, x_k = (x + (F.pad(x, (0, 0, 1, -1)) - x) * mu for mu in p["mu"])
    return linear("receptance", x_r).sigmoid() * linear("value", linear("key", x_k).relu() ** 2)


def delta_by_hand(x, linear, p, config):
    """DeltaNet and MesaNet; the gated ones are in test_layers.py."""
    q, k, v = (heads(a) for a in conv_true(linear("qkv", x), p["conv_weight"]).chunk(3, -1))
    q = unit(q) / math.sqrt(q.shape[3])
    k = unit(k) if config.normalize_keys else k
    beta = linear("beta", x).sigmoid()
    kk = k.square().sum(-1)
    a = {}
    if config.model == "mesa":
        a = {"alpha": linear("forget", x).sigmoid(), "ridge": F.softplus(p["ridge"]) + 0.25}
    step = {"explicit": beta, "implicit": beta / (1 + beta * kk), "exact": -torch.expm1(-beta * kk) / kk}[config.step]
    o, _ = recurrence(q, k, v, beta=step, **a)
    return linear("out_proj", (rms(o) * p["norm_weight"]).flatten(2))


def longhorn_by_hand(u, linear, p, config):
    """Algorithm 1, or Eq. 6 with the whole k k^T, inside Mamba's block."""
    x, z = linear("in_proj", u).chunk(2, -1)
    x = conv_true(x, p["conv_weight"], p["conv_bias"])
    N = config.d_state
    r, k, q = linear("x_proj", x).split([p["dt_proj.weight"].shape[1], N, N], -1)
    scan = OPERATORS["exact" if config.model == "longhorn_exact" else "longhorn"].true
    y = scan(x=x, dt=linear("dt_proj", r), k=k, q=q, D=p["D"], z=z, dt_bias=p["dt_bias"])["y"]
    return linear("out_proj", y)


EQUATIONS = {**dict.fromkeys(("gla", "gla_released"), [gla_by_hand]),
             **dict.fromkeys(("retnet", "retnet_released"), [retention_by_hand, retnet_glu_by_hand]),
             "rwkv": [rwkv_time_by_hand, rwkv_channel_by_hand],
             "longhorn": [longhorn_by_hand], "longhorn_exact": [longhorn_by_hand],
             **dict.fromkeys(("deltanet", "mesa"), [delta_by_hand])}


@pytest.mark.parametrize("family, changes", [
    *((family, {}) for family in EQUATIONS),
    *((family, {"backend": "torch"}) for family in ("longhorn", "longhorn_exact")),
    *(("deltanet", {"step": step, "normalize_keys": unit}) for step in mixers.STEPS for unit in (True, False)),
], ids=str)
@torch.no_grad()
def test_a_block_is_its_equations(family, changes):
    """Beside float32's rounding, only RetNet's angle and decay differ, which are always float32."""
    lm = shake(tiny(family, n_head=4, d_conv=3, d_state=5, **changes))
    for branch, equations in zip(lm.layers[0].branches, EQUATIONS[family], strict=False):  # SwiGLU: as in LLaMA
        block = branch.mixer
        if "longhorn" in family:
            block.x_proj.weight.mul_(2)  # keys that really forget
        block.double()
        x = torch.randn(2, 70, 32, dtype=torch.float64)  # more than a chunk of 64
        y, state = block(x)
        assert state is None
        p = dict(block.named_parameters())
        linear = lambda name, x, p=p: F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))
        close(y, equations(x, linear, p, lm.config), 1e-6 if "retnet" in family else 1e-12)


@pytest.mark.parametrize("family", ["llama", "swa", "retnet"])
@torch.no_grad()
def test_positions_are_not_rounded_to_16_bits(family):
    """At positions that bfloat16 cannot tell apart."""
    block = tiny(family, n_layer=1).layers[0].branches[0].mixer
    x = torch.randn(1, 700, 32)
    late = block(x)[0][:, 400:]
    with torch.autocast("cpu", torch.bfloat16):
        rounded = block(x)[0][:, 400:]
    assert (rounded - late).norm() < 0.05 * late.norm()


@pytest.mark.parametrize("family", ["deltanet", "gated_deltanet", "kda", "mesa", "mamba2"])
def test_step_sizes_and_decays_are_not_rounded_to_16_bits(family):
    block = tiny(family, n_layer=1).layers[0].branches[0].mixer
    operator = getattr(mixers, block.operator)
    with torch.autocast("cpu", torch.bfloat16), mock.patch.object(mixers, block.operator, wraps=operator) as called:
        block(torch.randn(2, 5, 32))
    given = inspect.signature(operator).bind(*called.call_args.args, **called.call_args.kwargs).arguments
    assert {given[name].dtype for name in ("beta", "log_decay") if name in given} == {torch.float32}


@pytest.mark.parametrize("step", mixers.STEPS)
def test_steps_and_their_gradients(step):
    """For |k| from 0 to 1e3, compared with 50-digit arithmetic."""
    b = 0.75
    size = torch.tensor([0.0, 1e-6, 1e-3, 0.03, 0.3, 0.9, 1.0, 1.1, 3.0, 10.0, 1e3])
    formula = {"explicit": lambda kk: b, "implicit": lambda kk: b / (1 + b * kk),
               "exact": lambda kk: -mpmath.expm1(-b * kk) / kk if kk else b}[step]
    with mpmath.workdps(50):
        wanted = [float(formula(mpmath.mpf(s) ** 2)) for s in size.tolist()]
        slope = [float(mpmath.diff(lambda s: formula(s**2), s)) for s in size.tolist()]
    length = size.requires_grad_()
    eps = mixers.STEPS[step](torch.full_like(length, b), length.square())
    d, = torch.autograd.grad(eps.sum() + 0 * length.sum(), length)
    torch.testing.assert_close(eps, torch.tensor(wanted), rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(d, torch.tensor(slope), rtol=1e-5, atol=1e-30)


@torch.no_grad()
def test_as_released():
    """RWKV's embedding gets positions, which have an end; RetNet's norms have another eps."""
    lm = shake(tiny("rwkv_released"))
    idx = tokens(2, 24)
    whole = lm(idx)[0]
    state = in_chunks(lm, idx, [24])[1]
    h = lm.embed(idx) + lm.positions.weight[:24]
    for layer in lm.layers:
        h, _, _ = layer(h)
    close(whole, lm.norm(h) @ lm.embed.weight.T)
    with pytest.raises(ValueError, match="^rwkv_released has positions up to block_size 24, not 25: [^\n]*$"):
        lm(idx[:, :1], state=state)
    x = torch.randn(1, 3, 32) * 1e-3
    close(LM(config("retnet_released")).norm(x), rms(x, 1e-6))


# ------------------------------------------------------------------------------------------------------------- backends

@ALL_FAMILIES
@torch.no_grad()
def test_the_backend_of_the_config_reaches_every_operator(family, monkeypatch):
    """The mixer's, the norms' and the convolution's; train.py's line names the mixer's."""
    asked = {}
    chosen = choose.choose
    monkeypatch.setattr(choose, "choose", lambda op, backend, *a, **how: asked.setdefault(op, set()).add(backend)
                        or chosen(op, "", *a, **how))
    tiny(family, n_layer=1, backend="torch")(tokens(1, 3), tokens(1, 3))
    operator = FAMILIES[family][0].operator
    assert operator in asked and set().union(*asked.values()) == {"torch"}
    monkeypatch.undo()
    assert counting.computed_by(tiny(family, n_layer=1, backend="torch")) == f"{operator} (torch)"


# -------------------------------------------------------------------------------------------------- mixers of one's own

class Mean(nn.Module):
    """The mean of the tokens so far: a mixer with nothing but a forward."""

    def __init__(self, config, layer):
        super().__init__()
        self.linear = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        return self.linear(x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])


def test_a_mixer_is_its_forward(monkeypatch):
    """A line says what it leaves out."""
    monkeypatch.setitem(FAMILIES, "mean", [Mean])
    torch.manual_seed(0)
    lm = LM(config("mean"))
    drawn = nn.Linear(32, 32).weight.std().item()
    weight = lm.layers[1].branches[0].mixer.linear.weight
    assert weight.std().item() == pytest.approx(drawn, rel=0.1), "PyTorch's own initialisation"
    line, = counting.left_out(lm)
    assert all(word in line for word in ("Mean (", "cannot sample", "linear maps"))
    assert counting.flops_per_token(lm)["forward"] == 2 * 64 * 32 + 2 * 2 * 32 * 32 and counting.state_size(lm) == 0
    assert counting.parameter_count(lm) == {"embedding": 64 * 32, "norms": 3 * 32, "Mean": 2 * (32 * 32 + 32),
                                            "total": sum(p.numel() for p in lm.parameters())}
    assert counting.computed_by(lm) == "Mean"
    with pytest.raises(ValueError, match=r"^Mean \([^\n]*keeps no state[^\n]*initial_state[^\n]*$"):
        sample.generate(lm, tokens(4, 16), 3)


def test_the_flops_of_a_users_mixer_with_a_known_operator(monkeypatch):
    class Windowed(Mean):
        operator, H, n = "attention", 2, 16

    monkeypatch.setitem(FAMILIES, "own", [Windowed])
    lm = LM(config("own"))  # the head, two maps, and 4 of 7 tokens on average
    assert counting.flops_per_token(lm, 7)["forward"] == 2 * 64 * 32 + 2 * 2 * 32 * 32 + 2 * 4 * 2 * 16 * 4
    assert "linear maps only" not in counting.left_out(lm)[0]
    Windowed.operator = "atention"
    assert "no operator of kernels/: did you mean 'attention'?" in counting.left_out(lm)[0]


def test_the_parameters_of_a_config(capsys, tmp_path):
    (tmp_path / "mine.py").write_text("dataset = 'none_here'")
    sizes.main([str(tmp_path / "mine.py")])
    assert "there is no dataset" in (said := capsys.readouterr()).err and "--vocab_size=" in said.err
    with pytest.raises(ConfigError, match="there is no dataset"):  # that was typed
        sizes.main([str(CONFIG / "longhorn_laptop.py"), "--dataset=none_here"])
    sizes.main([str(CONFIG / "longhorn_laptop.py"), "--vocab_size=256", "--n_layer=6"])
    assert re.search(r"^longhorn +6 x 192 +2\.92M ", capsys.readouterr().out, re.M)


PAGE = (CONFIG.parent / "docs" / "adding-a-model.md").read_text()
BLOCKS = re.findall(r"`families/(\w+)\.py`[^`]*```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def of_the_page():
    """The families in docs/adding-a-model.md, as printed, added to FAMILIES."""
    with mock.patch.dict(FAMILIES):
        for name, text in BLOCKS:
            exec(text, {"__name__": f"families.{name}"})
            assert torch.isfinite(LM(config(name))(tokens(2, 9), tokens(2, 9))[1])
        yield


@pytest.mark.usefixtures("of_the_page")
def test_values_passed_between_layers():
    """With states, recomputation and packed documents, like any family. If the whole share is the first layer's, the
    other layers' own values do not matter."""
    test_chunks_with_their_state_equal_the_whole("first_value")
    for documents in ("join", "pack"):
        kept, again = (trained("first_value", torch.float32, how, documents=documents, end_of_text=63)[3]
                       for how in ("none", "block"))
        assert all(torch.equal(gradient, again[name]) for name, gradient in kept.items())
    test_packed_documents_are_those_read_alone("first_value")
    lm = tiny("longhorn", pattern="first_value,llama", n_layer=4)
    idx = tokens(2, 24)
    first, later = (lm.layers[i].branches[0].mixer for i in (0, 2))
    later.share.data.fill_(100.0)
    before = lm(idx)[0]
    later.v.weight.data.neg_()
    assert torch.equal(lm(idx)[0], before)
    first.v.weight.data.neg_()
    assert not torch.allclose(lm(idx)[0], before, atol=0.1)


@pytest.mark.parametrize("passes, results", [(True, 2), (True, 1), (False, 3)])
def test_a_mixer_with_other_results_is_named(passes, results, monkeypatch):
    class Own(nn.Linear):
        def __init__(self, config, layer):
            super().__init__(32, 32)
            if passes:
                self.passes = True

        def forward(self, x, *others):
            return (x, None, None)[:results] if results > 1 else x

    monkeypatch.setitem(FAMILIES, "own", [Own])
    with pytest.raises(ValueError, match=r"^Own \([^\n]*\): forward must return y, [^\n]* passes = True [^\n]*$"):
        LM(config("own"))(tokens(3, 9))  # a tensor of length 3 is no three results


@pytest.mark.parametrize("how, words", [
    ("x[:, -1]", r"forward returned \(2, 32, torch.float32\) for x \(2, 9, 32, torch.float32\): return y of x's shape"),
    ("x[:1]", r"\(1, 9, 32,"), ("x.double()", r"\(2, 9, 32, torch.float64\)"), ("None", "returned None for x"),
    ("x", "forward must return y, or y and the next state if it is given one"),
    ("(x, x)", r"initial_state\(2, device\) has a tensor \(1, 3\): give it \(2, ...\)")])
def test_a_mixer_that_returns_something_else_is_named(how, words, monkeypatch):
    """Also what would be broadcast over rows, or make all later layers wider."""
    class Own(Mean):
        forward = eval(f"lambda self, x, state=None: {how}")
        initial_state = lambda self, batch_size, device: torch.zeros(1 if how == "(x, x)" else 2, 3)

    monkeypatch.setitem(FAMILIES, "own", [Own])
    lm = LM(config("own"))
    with pytest.raises(ValueError, match=rf"^Own \([^\n]*\): [^\n]*{words}"):
        lm(tokens(2, 9)), lm(tokens(2, 9), state=lm.initial_state(2))


@pytest.mark.parametrize("row, words", [
    ([lambda config: None], r"takes 1 .* 2 were given \(model.py, line \d+\): its row of FAMILIES is a list"),
    ([lambda config, layer: config.d], r"no attribute 'd' \(tests/test_model.py, line"), (Mean, "not iterable")])
def test_a_family_that_cannot_be_built_is_named(row, words, monkeypatch):
    monkeypatch.setitem(FAMILIES, "own", row)
    with pytest.raises(ValueError, match=f"^own cannot be built: .*{words}"):
        LM(config("own"))


@pytest.mark.parametrize("flops", ["12 d", lambda: 12])
def test_flops_that_are_no_number_are_named(flops, monkeypatch):
    monkeypatch.setattr(Mean, "flops", flops, raising=False)
    with pytest.raises(ValueError, match=r"^Mean \(.*\): flops is .*: give a number, or a function of T$"):
        counting.mixing_flops(Mean(config("longhorn"), 0), 9)


@pytest.mark.usefixtures("of_the_page")
def test_a_recurrence_of_ones_own():
    test_chunks_with_their_state_equal_the_whole("leaky")
    test_packed_documents_are_those_read_alone("leaky")


@pytest.mark.parametrize("text", ["import nothing_there\n", "x = (\n", "FAMILIES['x'] = []\n", "exit(0)\n",
                                  "from model import FAMILIES as known\nknown['gla'] = [print]\n",
                                  "from model import FAMILIES as known\nknown['mine'] = []\n"])
def test_a_file_that_cannot_be_imported_is_a_line_with_its_name(text, tmp_path, monkeypatch, capsys):
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.delitem(sys.modules, "families.broken", raising=False)
    monkeypatch.setattr(families, "__path__", [str(tmp_path)])
    with mock.patch.dict(FAMILIES), pytest.raises(SystemExit, match="2"):
        exec(Path(families.__file__).read_text(), {"__name__": "families", "__path__": families.__path__})
    assert re.fullmatch(r"families/broken\.py: error: [^\n]+\n", capsys.readouterr().err)


PROGRAMS = """
import runpy, shlex, sys
for command in sys.argv[1:]:
    sys.argv = shlex.split(command)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stop:
        assert not stop.code, command
"""


@pytest.mark.usefixtures("of_the_page")
def test_families_of_files_of_ones_own_are_known_to_every_program(data, tmp_path):
    """The blocks of the page as printed, in a copy of this tree."""
    root, out = tmp_path / "copy", tmp_path / "run"
    path, text = re.search(r"`(config/\w+\.py)`:\n\n((?:    .*\n)+)", PAGE).groups()
    (copied_tree(root) / path).write_text(textwrap.dedent(text))
    for name, text in BLOCKS:
        (root / "families" / f"{name}.py").write_text(text)
    train = (f"train.py {path} --dataset={data} --out_dir={out} --pattern=average,first_value --n_layer=2 --n_embd=32 "
             "--n_head=2 --block_size=32 --batch_tokens=256 --schedule=constant --eval_interval=0 --eval_block_size=32 "
             "--recompute=block --resume=auto --max_iters=")
    commands = [f"{train}3", f"{train}6 --self_check=off",
                f"sample.py --out_dir={out} --temperature=0 --max_new_tokens=8",
                f"export.py --out_dir={out} --to={tmp_path / 'hf'}",
                f"experiments/extrapolation.py --checkpoint {out} --lengths=32,64 --eval_tokens=256 "
                f"--out={tmp_path / 'far.json'}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LONGHORN_BUILD_DIR": str(CONFIG.parent / "build")}
    said = subprocess.run([sys.executable, "-c", PROGRAMS, *commands], cwd=root, env=environment, capture_output=True,
                          text=True)
    assert said.returncode == 0, said.stderr
    code = json.loads((out / "config.json").read_text())["environment"]["code_files"]
    assert {f"families/{name}.py" for name, _ in BLOCKS} <= code.keys()


# ------------------------------------------------------------------------------------------------------------- patterns

@pytest.mark.parametrize("pattern, expected", [
    ("", ["gla"] * 5), ("llama", ["llama"] * 5), ("longhorn*3,llama", ["longhorn"] * 3 + ["llama", "longhorn"]),
    (" rwkv , mamba * 2 ", ["rwkv", "mamba", "mamba", "rwkv", "mamba"]),
    ("longhorn*5,llama", ["longhorn"] * 5), ("longhorn*4,llama,longhorn", ["longhorn"] * 4 + ["llama"])])
def test_a_pattern_is_repeated_to_n_layer(pattern, expected):
    c = config("gla", pattern=pattern, n_layer=5)
    assert c.families == expected
    if "5" not in pattern:
        return c.check_pattern()
    with pytest.raises(ValueError, match=r"'longhorn\*5,llama': no llama in 5 layers; set n_layer to 6 or more"):
        c.check_pattern()  # training does


@pytest.mark.parametrize("pattern", ["longhorn*2,llama", "rwkv4,mamba,gla", "gla,retnet,rwkv"])
def test_a_hybrid_is_its_layers(pattern):
    """Its counts, FLOPs and state are the sums over its layers; it reads in chunks and samples like one family."""
    hybrid = tiny("longhorn", pattern=pattern, n_layer=3)
    layers = [tiny(family, n_layer=1) for family in hybrid.config.families]
    layers_flops = lambda lm: counting.flops_per_token(lm, 20)["forward"] - 2 * 64 * 32  # without the head
    assert layers_flops(hybrid) == sum(map(layers_flops, layers))
    assert counting.state_size(hybrid, 20) == sum(counting.state_size(lm, 20) for lm in layers)
    assert counting.parameter_count(hybrid)["total"] == sum(p.numel() for p in hybrid.parameters())
    assert (type(hybrid.embed_norm), type(hybrid.norm)) == (type(layers[0].embed_norm), type(layers[-1].norm))
    idx = tokens(2, 24)
    with torch.no_grad():
        logits, state = in_chunks(hybrid, idx, [5, 1, 18])
        close(logits, hybrid(idx)[0])
    assert numel(state) == 2 * counting.state_size(hybrid, 24)


def test_the_scale_of_residual_writes_follows_the_branches_of_the_model(monkeypatch):
    """GPT-2's 0.02 / sqrt(residual branches), however many a layer has."""
    monkeypatch.setitem(FAMILIES, "mean", [Mean])
    lm = LM(config("longhorn", pattern="mean,llama", n_embd=64))
    assert lm.config.n_branches == 3 == len(lm.branches())
    assert lm.layers[1].branches[1].mixer.w2.weight.std().item() == pytest.approx(0.02 / math.sqrt(3), rel=0.05)


# ----------------------------------------------------------------------------------------------------------- generation

@ENDLESS
@torch.no_grad()
def test_greedy_generation_is_the_argmax_of_the_whole(family):
    lm = tiny(family, block_size=8)
    idx = tokens(2, 6)
    out = sample.generate(lm, idx, 6, temperature=0)
    assert out.shape == (2, 12) and torch.equal(out[:, :6], idx)
    for t in range(6, 12):  # past block_size too
        assert torch.equal(out[:, t], lm(out[:, :t])[0][:, -1].argmax(-1))
    streamed = list(sample.stream(lm, idx, 6, temperature=0, chunk=4))  # and the prompt in pieces
    assert all(token.shape == (2,) for token in streamed) and torch.equal(torch.stack(streamed, 1), out[:, 6:])


def test_top_k_and_top_p_cut_the_tail():
    p = torch.tensor([[0.05, 0.4, 0.3, 0.15, 0.1]]).repeat(4000, 1)
    draw = lambda **how: sample.sample_token(p.log(), generator=torch.Generator().manual_seed(0), **how)
    seen = lambda **how: set(draw(**how).tolist())
    assert seen() == seen(top_k=99) == seen(top_p=1.0) == {0, 1, 2, 3, 4}
    assert seen(top_k=1) == seen(top_p=0.39) == seen(temperature=1e-3) == seen(temperature=0, top_k=2) == {1}
    assert seen(top_k=3) == {1, 2, 3} and seen(top_p=0.86) == {1, 2, 3, 4}
    assert seen(top_p=0.41) == seen(top_k=3, top_p=0.5) == {1, 2}  # the first that reaches top_p is kept
    assert len(sample.sample_token(torch.zeros(100, 2), top_p=0.5).unique()) == 1  # reached exactly: no more is needed
    close(torch.bincount(draw(top_k=2), minlength=5) / 4000, torch.tensor([0, 4 / 7, 3 / 7, 0, 0]), 0.03)
    close(torch.bincount(draw(temperature=0.5), minlength=5) / 4000, p[0] ** 2 / (p[0] ** 2).sum(), 0.03)
    for beyond in ({"top_k": 0}, {"top_p": 1.1}):
        with pytest.raises(ValueError, match="top_p"):
            draw(**beyond)


# ------------------------------------------------------------------------------------------------------------- refusals

IMPOSSIBLE = """
{"model": "longhron"}                       unknown model 'longhron': choose one of longhorn,
{"pattern": "llama,longhron"}               'longhron'
{"pattern": "longhorn,"}                    longhorn*3,llama
{"pattern": "longhorn*0"}                   longhorn*3,llama
{"pattern": "longhorn llama"}               longhorn*3,llama
{"pattern": "longhorn*99999"}               longhorn*3,llama
{"model": "swa", "window": -1}              window -1
{"model": "deltanet", "step": "midpoint"}   'midpoint'
{"n_embd": 0}                               n_embd 0 must be
{"n_layer": 1025}                           n_layer 1025 must be
{"dt_rank": -1}                             dt_rank -1 must be
{"norm_eps": 0.0}                           norm_eps 0.0 must be
{"model": "llama", "n_head": 3}             n_embd 32 is not a multiple of n_head 3 times 2: choose
{"model": "llama", "n_head": 32}            divides 16
{"model": "gated_deltanet", "n_head": 32}   divides 16
{"model": "rwkv", "n_head": 3}              divides 32
{"backend": "fsued"}                        'fsued'
{"model": "rwkv_released", "documents": "pack"}    documents=pack: positions
{"model": "mean", "documents": "pack"}      documents=pack: Mean (test_model.py)
"""  # LLaMA with one channel per head has no pair to rotate


@pytest.mark.parametrize("changes, words", table(IMPOSSIBLE))
def test_impossible_models_are_refused_in_a_line(changes, words, monkeypatch):
    monkeypatch.setitem(FAMILIES, "mean", [Mean])
    with pytest.raises(ValueError, match=rf"^[^\n]*{re.escape(words)}[^\n]*\Z"):
        LM(config("longhorn", **json.loads(changes)))


def test_what_no_sequence_can_be_is_refused_in_a_line():
    lm = tiny("llama", n_layer=1)
    idx = tokens(2, 5)
    for wrong, words in ((idx[:, :0], r"\(2, 0\)"), (idx[0], r"\(5,\)"), (idx[:0], r"\(0, 5\)"), (idx * 1.0, "float")):
        with pytest.raises(ValueError, match=rf"^idx must be \(B, T\) of int64, both at least 1, got .*{words}.*$"):
            lm(wrong)
    with pytest.raises(ValueError, match="^max_new_tokens -1 must be 0 or more$"):
        sample.generate(lm, idx, -1)
    assert torch.equal(sample.generate(lm, idx, 0), idx)
    for state in (lm.initial_state(3), lm.initial_state(1), lm.initial_state(2)[1:]):
        with pytest.raises(ValueError, match=r"^state does not fit 1 layers and a batch of 2: [^\n]*$"):
            lm(idx, state=state)


def test_the_table_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(sizes, "FAMILIES", ("longhorn", "rwkv4"))
    sizes.main([])
    head, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 8 and "Table 1" in head
    row = next(r for r in rows if r.startswith("longhorn ") and "350M" in r)
    assert ["longhorn", "350M", f"{PARAMETERS['longhorn'][1] / 1e6:.2f}M", "369.8M"] == row.split()[:4]
    assert row.split()[-1] == f"{48 * 2048 * (16 + 3) / 1e6:.2f}M"


@ENDLESS
def test_packed_documents_are_those_read_alone(family):
    """Logits and every gradient, with documents of one token, and of none after a row's last token."""
    lm = tiny(family, n_layer=1, documents="pack", end_of_text=63)
    idx = tokens(3, 30, 63)
    y = tokens(3, 30)
    for row, at in ((0, [0, 1, 2, 10, 13, 20]), (1, [17, 29])):
        idx[row, at] = 63
    logits, loss = lm(idx, y)
    grads = torch.autograd.grad(loss, list(lm.parameters()))
    with torch.no_grad():  # through a state, in pieces that end before, at and after the end of a document
        cuts = [1, 1, 9, 9, 1, 9]
        parts = [idx]
        if family in ("llama", "swa"):
            with pytest.raises(ValueError, match="documents=pack: documents end at different places .* one at a time"):
                in_chunks(lm, idx, cuts)
            parts = idx.split(1)
        through = torch.cat([in_chunks(lm, part, cuts)[0] for part in parts])
    close(through, logits, 1e-4)
    lm.config.documents = "join"
    assert not torch.allclose(lm(idx)[0], logits, atol=1e-2)
    total = 0.0
    for row in range(3):
        ends = [0, *((idx[row, :-1] == 63).nonzero()[:, 0] + 1).tolist(), 30]
        for a, b in itertools.pairwise(ends):
            alone, loss = lm(idx[row:row + 1, a:b], y[row:row + 1, a:b])
            close(logits[row:row + 1, a:b], alone, 1e-4)
            total += loss * (b - a) / idx.numel()
    wanted = torch.autograd.grad(total, list(lm.parameters()))
    for (name, _), got, right in zip(lm.named_parameters(), grads, wanted, strict=True):
        assert (got - right).norm() <= 1e-4 * right.norm() + 1e-7, name
