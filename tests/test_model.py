"""Tests of model.py, mixers.py and families/, the same for every family in FAMILIES.

The self-check compares what a family can compute in two ways, such as with states or with packed documents.
test_layers.py compares its blocks with independent truths. test_export.py compares whole LLaMA and Mamba models with
transformers. The counts, FLOPs and initialisation of the present families are written out here a second time, by hand.
"""

import dataclasses
import functools
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

import helpers
import mpmath
import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, copied_tree, table
from scipy import stats
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import configurator
import families
import initialisation
import mixers
import model
import sample
import train
from common.errors import ConfigError
from inspection import counting
from inspection.self_check import self_check
from kernels import choose
from kernels.cache import ROOMS, append_to_cache
from model import FAMILIES, LM, ModelConfig
from runtime import distributed
from tools import parameters as sizes
from tools.parameters import SIZES, TABLE1

ALL_FAMILIES = pytest.mark.parametrize("family", FAMILIES)
ENDLESS = pytest.mark.parametrize("family", [family for family in FAMILIES if family not in model.POSITIONS])
CONFIG = ROOT / "config"
tiny = functools.partial(helpers.tiny, vocab_size=64)


def config(family, **changes):
    small = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 24, "vocab_size": 64}
    return ModelConfig(**{"model": family, **small, **changes})


def tokens(B, T, vocab_size=64, seed=1):
    return torch.randint(vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def close(a, b, tolerance=2e-5):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def numel(state):
    return sum(a.numel() for a in model.tensors_of(state))


# ----------------------------------------------------------------------------------------------- what all families do

PAGE = (CONFIG.parent / "docs" / "adding-a-model.md").read_text()
BLOCKS = dict(re.findall(r"`families/(\w+)\.py`[^`]*```python\n(.*?)```", PAGE, re.DOTALL))


@pytest.fixture
def of_the_page():
    """Adds the families in docs/adding-a-model.md to FAMILIES, exactly as printed."""
    with mock.patch.dict(FAMILIES):
        for name, text in BLOCKS.items():
            exec(text, {"__name__": f"families.{name}"})
        yield


@pytest.fixture
def documents(family):
    """Settings that pack documents, unless the family has learned positions or does not say how it mixes tokens."""
    return {"documents": "join" if family in (*model.POSITIONS, "average") else "pack", "end_of_text": 63}


EVERY_FAMILY = pytest.mark.parametrize("family", [*FAMILIES, *BLOCKS])


@EVERY_FAMILY
def test_what_a_family_computes_in_two_ways_agrees(of_the_page, family, documents):
    """The self-check compares whole sequences with states, packed documents with single ones, and kernels with plain
    operators, also in bfloat16."""
    line = self_check(LM(config(family, n_layer=3, window=13, **documents)), torch.bfloat16)
    assert "whole sequences and states agree to " in line and " in bfloat16 to " in line
    assert ("documents, " in line) == (documents["documents"] == "pack")


def trained(recompute, lm, idx):
    """The gradient of each parameter, by name."""
    distributed.prepare_layers(lm, SimpleNamespace(compile=False, recompute=recompute))
    with torch.autocast("cpu", torch.bfloat16):
        lm(idx, tokens(3, 24, seed=2))[1].backward()
    return {name: p.grad for name, p in lm.named_parameters()}


@EVERY_FAMILY
def test_every_parameter_learns_and_alike_if_layers_are_recomputed(of_the_page, family, documents):
    idx = tokens(3, 24)
    idx[0, 7], idx[1, 3], idx[1, 21] = 63, 63, 63
    kept, again = (trained(how, tiny(family, **documents), idx) for how in ("none", "block"))
    for name, gradient in kept.items():
        assert gradient.isfinite().all() and torch.equal(gradient, again[name]), name
        if name == "layers.0.branches.0.mixer.share":  # the page's first layer mixes its values with themselves
            continue
        assert gradient.count_nonzero() > (0.99 if name == "embed.weight" else 0.5) * gradient.numel(), name
    assert tiny(family).bfloat16()(idx, idx)[1].dtype == torch.float32


@torch.no_grad()
def test_the_loss_ignores_targets_of_minus_one():
    """The loss is the same without logits. A compiled graph must not return them: they would get a gradient as large as
    they are."""
    torch.compiler.reset()
    lm = tiny("longhorn,llama", tie_head=False)
    idx, targets = tokens(3, 10), tokens(3, 10, seed=2)
    targets[0], targets[1, 3:] = -1, -1
    counts = targets >= 0
    logits, loss = lm(idx, targets)
    close(loss.double(), -logits.double().log_softmax(-1)[counts].gather(-1, targets[counts][:, None]).mean())
    compiled = torch.compile(lm, backend="eager", fullgraph=True)
    for run in lm, compiled:
        nothing, alone = run(idx, targets, loss_only=True)
        assert nothing is None
        close(alone, loss)
    close(lm(idx, last_only=True)[0], logits[:, -1:])
    lm.head.weight.zero_()
    assert not lm(idx)[0].any()


# ------------------------------------------------------------------------------------------------ counted a second time

# Exact counts at 120M and 350M. For LLaMA and Mamba they equal those of transformers. Where the paper gives a count,
# they are within 1% of it.
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
def test_parameter_counts_are_right_and_close_to_the_papers(family, size):
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


# Forward FLOPs per token and layer without the linear maps, for 2 heads, 64 channels, T = 24, N = 16 and d_conv = 4.
MIXING = {
    # eps k, x - k S, S +=, S q: 1 + 2 + 2 + 2 per state (as many for Mamba: delta A, exp and its product, S +=, S q);
    # step size, skip, gate = 8 per channel; the convolution: two branches of 128 channels, 7 * 16 + 8 + 2 * 4
    "longhorn": 32_768,
    "mamba": 32_768,
    "longhorn_exact": 33_024,  # k S summed over the states first: 1 more per channel
    # each of the 64 channels of q and of v meets (24 + 1) / 2 tokens on average: 2 * 2 * 64 * 12.5
    "llama": 3_200,
    # a S, S +=, q S = 1 + 2 + 2 for each number of the state, 2 heads of 16 x 32
    "gla": 5_120,
    "retnet": 18_240,  # 2 heads of 32 x 57
    "rwkv": 10_560,  # 2 heads of 32 x 32; r . u k, times v, added to o: 3 + 1 + 1 per channel
    "rwkv4": 1_472,  # 23 per channel
    # k S, S +=, q S = 2 + 2 + 2; the error and beta = 2 per value; three convolutions
    "deltanet": 13_952,
    # the same plus a S or diag(a) S; keys are half as wide as the model, values twice as wide as keys
    "gated_deltanet": 8_320,
    "kda": 16_000,
    # to decay H and U and add a token costs 3 each, x U 2; 30 steps cost 2 per number of H and 10 per channel of k
    "mesa": 160_000,
    # a S, S +=, C S of 8 * 16 numbers per channel; step size, skip, gate = 5; the convolution of 128 + 2 * 8 * 16
    "mamba2": 171_264,
    # a window of 12, half of block_size: the first 12 tokens see all before them, 2 * 2 * 64 * (78 + 12 * 12) / 24
    "swa": 2_368,
}
LONGER = {"llama": 2 * 2 * 64 * 50.5, "swa": 2 * 2 * 64 * (78 + 88 * 12) / 100}  # at T = 100


def counted(lm):
    """(parameters, forward FLOPs per token, numbers in the state)"""
    parts = counting.parameter_count(lm)
    assert parts.pop("total") == sum(parts.values()) == sum(p.numel() for p in lm.parameters())
    return sum(parts.values()), counting.flops_per_token(lm)["forward"], counting.state_size(lm)


def test_counts_follow_every_edit_of_a_model():
    lm = tiny("longhorn,llama")
    lm.embed.requires_grad_(False)
    tied, untied = (nn.Linear(32, 64, bias=False) for _ in range(2))
    tied.weight = lm.embed.weight
    for name, value, more, in_maps in (
            ("temperature", nn.Parameter(torch.ones(1)), 1, 0), ("more", nn.Linear(32, 48), 33 * 48, 32 * 48),
            ("head", tied, 0, 0), ("head", untied, 32 * 64, 0)):
        before = counted(lm)
        setattr(lm, name, value)
        assert counted(lm) == (before[0] + more, before[1] + 2 * in_maps, before[2]), name


def test_a_shared_layer_has_its_parameters_once_and_runs_twice():
    """One layer is used twice, and its branches share a norm. torch's sum and a model of two layers count the same."""
    lm, plain = tiny("llama", n_layer=2), tiny("llama", n_layer=2)
    lm.layers[1], first = lm.layers[0], lm.layers[0].branches
    first[1].norm = first[0].norm
    assert counted(lm)[1:] == counted(plain)[1:]
    lm.layers[0].active_share = 1 / 4
    maps = sum(2 * m.weight.numel() for m in first.modules() if isinstance(m, nn.Linear))
    mixing = sum(counting.mixing_flops(branch.mixer, 24) or 0 for branch in first)
    assert counting.flops_per_token(lm, 24)["forward"] == 2 * (maps + mixing) / 4 + 2 * lm.embed.weight.numel()


@ALL_FAMILIES
def test_flops_are_those_counted_by_hand_and_by_pytorch(family):
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 24, "vocab_size": 96}
    lm = LM(ModelConfig(model=family, **shape))
    B = 2
    T = 24
    flops = counting.flops_per_token(lm)
    assert (flops["backward"], flops["total"]) == (2 * flops["forward"], 3 * flops["forward"])
    assert not counting.left_out(lm), "the count leaves out a part of one of our own families"
    maps = sum(m.weight.numel() for m in lm.modules() if isinstance(m, torch.nn.Linear))
    mixing = flops["forward"] - 2 * maps - 2 * 96 * 64
    if by_hand := MIXING.get(plain := family.removesuffix("_released")):
        assert mixing == 2 * by_hand
        longer = counting.flops_per_token(lm, 100)["forward"] - flops["forward"]
        assert longer == pytest.approx(2 * (LONGER.get(plain, by_hand) - by_hand))
    with FlopCounterMode(display=False) as counter:  # PyTorch counts linear maps as mm or addmm
        lm(tokens(B, T, 96))
    forward = counter.get_flop_counts()["Global"]
    linear = sum(forward.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    assert linear == B * T * (flops["forward"] - mixing)


def read(name):
    return dataclasses.asdict(configurator.load(train.TrainConfig, [str(CONFIG / f"{name}.py")]))


@pytest.mark.parametrize("family", [family for family in FAMILIES if (CONFIG / f"{family}_laptop.py").exists()])
def test_laptop_models_have_the_same_size_and_train_alike(family):
    """Their parameter counts are within 2% of Longhorn's. Tokens, order and schedule are the same: only the mixer
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


@pytest.mark.parametrize("d_conv", (1, 4))
@ENDLESS
@torch.no_grad()
def test_state_size_is_that_of_the_state_and_only_attentions_grows(family, d_conv):
    lm = tiny(family, n_layer=1, d_conv=d_conv, d_state=4)
    state = lm.initial_state(3)
    idx = tokens(3, 40)
    for t in range(40):
        _, _, state = lm(idx[:, t:t + 1], state=state, last_only=True)
        assert numel(state) == 3 * counting.state_size(lm, t + 1)
    grows = [counting.state_size(lm, 40) > counting.state_size(lm, T) for T in (10, 20)]
    assert grows == {"llama": [True, True], "swa": [True, False]}.get(family, [False, False])  # a window of 12
    at_once = lm(idx, state=lm.initial_state(3))[2]
    for parts in map(model.tensors_of, (state, at_once)):
        held = sum(a.untyped_storage().nbytes() for a in parts)
        assert held <= 2 * sum(a.nbytes for a in parts), "a view keeps the past alive"


def keys_and_values(steps):
    return tuple(torch.randn(2, 2, 3, steps, 5))


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode, torch.enable_grad))
@pytest.mark.parametrize("change", [
    lambda k, v: (k, v), lambda k, v: (k[:, :, :-4], v[:, :, :-4]), lambda k, v: (k.double(), v.double()),
    lambda k, v: (k, torch.randn_like(v))], ids=["as it was", "cut", "of another dtype", "of other values"])
def test_a_cache_continues_whatever_was_done_to_it(change, mode):
    """One cache can be continued twice: neither continuation writes into the other's past."""
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


def test_few_tokens_copy_the_cache_and_a_graph_has_no_spare_room():
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

# How the papers' code initialises each parameter at a width of 256. The first row that exists counts: for the mixer's
# class, for one of its bases, for the name alone, or *. The scale of a map to the residual stream is divided by the
# square root of the number of branches.
STARTS = {name: row for name, *row in table("""
*                            normal                0.02
norm.weight                  constant              1
norm.bias                    constant              0
embed_norm.weight            constant              1
embed_norm.bias              constant              0
in_proj.weight               uniform               0.0625          d^-1/2
conv_weight                  uniform               0.5             W^-1/2
conv_bias                    uniform               0.5
x_proj.weight                uniform               0.0441942       (2 d)^-1/2
dt_proj.weight               uniform               0.25            (d / 16)^-1/2
ScanBlock.out_proj.weight    uniform to residual   0.0441942       (2 d)^-1/2
Mamba2.out_proj.weight       uniform to residual   0.0441942
dt_bias                      step size             0.001 0.1
Longhorn.dt_bias             constant              0
A_log                        log                   1 16
GatedDeltaNet.A_log          log                   0 16
D                            constant              1
skip                         constant              1
norm_weight                  constant              1
norm_bias                    constant              0
ridge                        constant              0.1106466       log(e^0.75 - 1), whose softplus is 0.75
gate.bias                    constant              0
gate2.bias                   constant              0
forget.bias                  constant              0
forget2.bias                 constant              0
beta.bias                    constant              0
GLA.qk.weight                uniform               0.0220971       2^-2.5 (6 / (d + d/2))^1/2
GLA.forget1.weight           uniform               0.0262553       2^-2.5 (6 / (d + 16))^1/2
GLA.forget2.weight           uniform               0.0360844       2^-2.5 (6 / (16 + d/2))^1/2
Retention.qk.weight          uniform               0.0191366       2^-2.5 (6 / 2 d)^1/2
Retention.vg.weight          uniform               0.0161823       2^-2.5 (6 / (d + 460))^1/2
Retention.out_proj.weight    uniform               0.0457706       2^-1 (6 / (d + 460))^1/2
out_proj.weight              normal to residual    0.02
output.weight                normal to residual    0.02
w2.weight                    normal to residual    0.02
RWKVChannelMix.value.weight  normal to residual    0.02
# as released
PlainRetention.qk.weight        normal             0.02
PlainRetention.vg.weight        normal             0.02
PlainRetention.out_proj.weight  normal             0.02
PlainRetNetGLU.w2.weight        normal             0.02
ShortKeyGLA.out_proj.weight     normal             0.02
UnscaledSwiGLU.w2.weight        normal             0.02
UnscaledChannelMix.value.weight  normal            0.02
""")}
LAWS = {  # {kind of start: (parameter -> what was drawn, numbers of its row -> distribution)}
    "normal": (lambda p: p, lambda scale: stats.norm(0, scale)),
    "uniform": (lambda p: p, lambda scale: stats.uniform(-scale, 2 * scale)),
    "step size": (F.softplus, stats.loguniform),
    "log": (torch.exp, lambda low, high: stats.uniform(low, high - low)),
}


def values_of(mixer, name, layer, d, L, H):
    """The values of a parameter that is not drawn but differs by channel or head; else None."""
    a = layer / max(1, L - 1)
    c = 1 - layer / L
    i = torch.arange(d, dtype=torch.float64) / d
    d_ramp, h_ramp = (torch.arange(n, dtype=torch.float64) / max(1, n - 1) for n in (d, H))
    r, k, v = 1 - i ** (c / 2), 1 - i**c, 1 - (i**c + 0.3 * a)
    values = {
        model.Mamba: {"A_log": torch.arange(1.0, 17).log()},
        mixers.RWKVTimeMix: {"mu": torch.stack([r, k, v, r]), "bonus": a * (1 - h_ramp),
                             "decay": -6 + 5 * h_ramp ** (0.7 + 1.3 * a)},
        mixers.RWKV4TimeMix: {"mu": torch.stack([r, k, v]), "decay": -5 + 8 * d_ramp ** (0.7 + 1.3 * a),
                              "bonus": math.log(0.3) + torch.tensor([0.0, 0.5, -0.5]).repeat(d)[:d]},
        mixers.RWKVChannelMix: {"mu": torch.stack([k, k])},
    }
    return next((values[above].get(name) for above in type(mixer).__mro__ if above in values), None)


@pytest.mark.parametrize("L, H", [(2, 4), (1, 1)])
@ALL_FAMILIES
def test_every_parameter_starts_as_its_paper_says(family, L, H):
    torch.manual_seed(0)
    d = 256
    lm = LM(config(family, n_embd=d, n_layer=L, n_head=H, vocab_size=1024))
    for full_name, p in lm.named_parameters():
        p = p.detach().double()
        branch, _, _ = full_name.rpartition(".mixer.")
        mixer = lm.get_submodule(f"{branch}.mixer" if branch else "")
        name = re.sub(r".*\.(mixer|branches\.\d+)\.", "", full_name)
        values = values_of(mixer, name, int(branch.split(".")[1]), d, L, H) if branch else None
        names = [f"{above.__name__}.{name}" for above in type(mixer).__mro__] + [name, "*"]
        kind, numbers, *_ = next(STARTS[n] for n in names if n in STARTS)
        numbers = [float(number) for number in numbers.split()]
        if values is not None or kind == "constant":
            close(p, torch.as_tensor(numbers if values is None else values).double().expand_as(p), 1e-6)
            continue
        if kind.endswith(" to residual"):
            numbers = [numbers[0] / math.sqrt(2 * L)]
        drawn, law = LAWS[kind.removesuffix(" to residual")]
        drawn, law = drawn(p), law(*numbers)
        low, high = law.support()
        assert low - 1e-3 <= drawn.min() and drawn.max() <= high + 1e-3 * abs(high), full_name
        slack = 6 / math.sqrt(p.numel())  # about six standard errors
        assert p.numel() < 8 or drawn.std() == pytest.approx(law.std(), rel=slack), full_name
        assert stats.kstest(drawn.flatten()[:5000], law.cdf).pvalue > 1e-4, f"{full_name} is not {kind} {numbers}"
    _, loss = lm(tokens(4, 24, 1024), tokens(4, 24, 1024, seed=2))
    assert abs(loss.item() - math.log(1024)) < 0.2, "not the loss of a uniform guess"


def test_an_edit_does_not_change_how_other_parameters_start():
    """Parameters of the same name and shape are equal after a change of convolution width, depth or family."""
    def starts(family="longhorn", seed=7, **changes):
        torch.manual_seed(seed)
        return dict(LM(config(family, **changes)).named_parameters())

    drawn = starts()
    after = LM(config("longhorn")).embed.weight
    for changed in (starts(), starts(d_conv=3), starts(n_layer=3, pattern="longhorn,llama,mamba"), starts("mamba")):
        same = [name for name, p in changed.items() if name in drawn and p.shape == drawn[name].shape
                and not name.endswith(("out_proj.weight", "dt_bias", "conv_bias"))]  # their scale or law changes
        assert len(same) > 7 and all(torch.equal(changed[name], drawn[name]) for name in same)
    layers = [p for name, p in drawn.items() if name.endswith("in_proj.weight")]
    embeddings = [drawn["embed.weight"], after, starts(seed=8)["embed.weight"]]
    for p, q in (*itertools.combinations(layers, 2), *itertools.combinations(embeddings, 2)):
        assert not torch.equal(p, q)


class Written(model.GLA):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.write()


@pytest.fixture
def written(monkeypatch):
    """written(write) builds a model whose mixers call write(mixer) at the end of their constructors."""
    monkeypatch.setitem(FAMILIES, "written", [Written])

    def build(write, **changes):
        monkeypatch.setattr(Written, "write", write, raising=False)
        return LM(config("written", **changes))
    return build


WRITES = {  # {parameter: how a constructor writes to it}
    "out_proj.weight": lambda m: nn.init.zeros_(m.out_proj.weight),
    "gate.bias": lambda m: m.gate.bias.data[3:].fill_(-2.0),
    "gate.weight": lambda m: m.gate.weight.data.mul_(0.5),
    "v.weight": lambda m: m.v.weight.data.copy_(m.gate.weight),
    "forget2.bias": lambda m: setattr(m.forget2.bias, "data", torch.zeros(16)),
}


@pytest.mark.parametrize("name, dtype", [*((name, torch.float32) for name in WRITES), *(
    ("gate.weight", dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64))])
def test_writing_to_a_parameter_whose_start_is_drawn_later_is_refused(name, dtype, written):
    """A model of any width can be built in other dtypes, as transformers does. Here dt_rank is 5."""
    torch.set_default_dtype(dtype)
    try:
        lm = LM(config("longhorn", n_embd=66))
        assert all(p.isfinite().all() for p in lm.parameters()) and lm.layers[0].branches[0].mixer.R == 5
        with pytest.raises(ValueError, match=rf"^Written\.{name} .*: write start=\.\.\., or drop one of the two$"):
            written(WRITES[name])
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_embedding_is_nan_until_drawn_and_parameters_without_a_start_keep_their_values(written, monkeypatch):
    ones = nn.Parameter(torch.ones(32, 32))
    lm = written(lambda m: setattr(m.v, "weight", ones))
    assert (lm.layers[0].branches[0].mixer.v.weight == 1).all()

    def build_layers(self, config):
        assert self.embed.weight.isnan().all()
        self.embed.weight.data.zero_()
        return []

    monkeypatch.setattr(LM, "build_layers", build_layers)
    with pytest.raises(ValueError, match=r"^LM\.embed\.weight "):
        LM(config("gla"))


@pytest.mark.parametrize("make, words", [
    (lambda: initialisation.parameter(3, start=torch.zeros(3)), r"start=tensor\(\[0.*\) is not a function of the"),
    (lambda: initialisation.linear(4, 12, parts=[4, 4]), r"parts \[4, 4\] must add up to the 12 rows")])
def test_a_start_that_is_not_a_function_and_parts_that_lack_rows_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_logarithms_start_above_minus_infinity():
    p = torch.empty(5)
    initialisation.log_uniform(0.0, 1e-9)(p)
    close(p.exp(), torch.full((5,), 1e-4))


# ------------------------------------------------------------------------------------------------- beside the blocks

@pytest.mark.parametrize("family", ["llama", "swa", "retnet"])
@torch.no_grad()
def test_positions_are_not_rounded_to_16_bits(family):
    """The comparison begins at position 400, where bfloat16 rounds neighbouring positions to the same number."""
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


def test_the_exact_step_and_its_gradient_are_right():
    """For beta |k|^2 from 0 to 1e6, they are compared with 50-digit arithmetic. test_layers.py compares all steps."""
    x = torch.tensor([0.0, 1e-12, 1e-6, 1e-3, 0.1, 0.8, 1.0, 1.2, 9.0, 100.0, 1e6], requires_grad=True)
    formula = lambda x: -mpmath.expm1(-x) / x if x else mpmath.mpf(1)
    with mpmath.workdps(50):
        wanted = [float(formula(mpmath.mpf(s))) for s in x.tolist()]
        slope = [float(mpmath.diff(formula, s)) if s else -0.5 for s in x.tolist()]
    share = mixers.share(x)
    share.sum().backward()
    torch.testing.assert_close(share, torch.tensor(wanted), rtol=1e-5, atol=1e-30)
    torch.testing.assert_close(x.grad, torch.tensor(slope), rtol=1e-5, atol=1e-30)


@torch.no_grad()
def test_released_rwkv_has_positions_and_released_retnet_its_own_eps():
    """RWKV adds positions to the embedding, up to block_size. RetNet's norms have another eps."""
    lm = tiny("rwkv_released")
    idx = tokens(2, 24)
    logits, _, state = lm(idx, state=lm.initial_state(2))
    h = lm.embed(idx) + lm.positions.weight[:24]
    for layer in lm.layers:
        h, _, _ = layer(h)
    close(logits, lm.norm(h) @ lm.embed.weight.T)
    with pytest.raises(ValueError, match="^rwkv_released has positions up to block_size 24, not 25: [^\n]*$"):
        lm(idx[:, :1], state=state)
    for family, eps in (("retnet_released", 1e-6), ("retnet", 2e-3), ("rwkv", 2e-3), ("rwkv4", 2e-3)):
        h = torch.randn(1, 3, 32) * 0.03
        h -= h.mean(-1, keepdim=True)
        close(LM(config(family, norm_eps=2e-3)).norm(h), h / (h.square().mean(-1, keepdim=True) + eps).sqrt())


# ------------------------------------------------------------------------------------------------------------- backends

@ALL_FAMILIES
@torch.no_grad()
def test_the_backend_of_the_config_reaches_every_operator(family, monkeypatch):
    """The mixer, the norms and the convolution all use this backend. computed_by names the mixer's operator with it."""
    asked = {}
    chosen = choose.choose
    monkeypatch.setattr(choose, "choose", lambda op, backend, *a, **how: asked.setdefault(op, set()).add(backend)
                        or chosen(op, "", *a, **how))
    tiny(family, n_layer=1, backend="torch")(tokens(1, 3), tokens(1, 3))
    operator = FAMILIES[family][0].operator
    assert operator in asked and set().union(*asked.values()) == {"torch"}
    monkeypatch.undo()
    assert counting.computed_by(tiny(family, n_layer=1, backend="torch")) == f"{operator} (torch)"


# -------------------------------------------------------------------------------------------------------- custom mixers

class Mean(nn.Module):
    """The mean of the tokens so far: a mixer with nothing but a forward."""

    def __init__(self, config, layer):
        super().__init__()
        self.linear = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        return self.linear(x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None])


def test_a_mixer_needs_only_a_forward(monkeypatch):
    """One line says what a model with such a mixer cannot do and what is not counted."""
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


def test_the_flops_of_a_users_mixer_are_counted_if_its_operator_is_known(monkeypatch):
    class Windowed(Mean):
        operator, H, n = "attention", 2, 16

    monkeypatch.setitem(FAMILIES, "own", [Windowed])
    lm = LM(config("own"))  # the head, two maps, and 4 of 7 tokens on average
    assert counting.flops_per_token(lm, 7)["forward"] == 2 * 64 * 32 + 2 * 2 * 32 * 32 + 2 * 4 * 2 * 16 * 4
    assert "linear maps only" not in counting.left_out(lm)[0]
    Windowed.operator = "atention"
    assert "no operator of kernels/: did you mean 'attention'?" in counting.left_out(lm)[0]


@torch.no_grad()
def test_values_are_passed_between_layers(of_the_page):
    """If a later layer takes all of its values from the first layer, its own values do not matter."""
    lm = tiny("longhorn", pattern="first_value,llama", n_layer=4)
    idx = tokens(2, 24)
    first, later = (lm.layers[i].branches[0].mixer for i in (0, 2))
    later.share.data.fill_(100.0)
    before = lm(idx)[0]
    later.v.weight.data.neg_()
    assert torch.equal(lm(idx)[0], before)
    first.v.weight.data.neg_()
    assert not torch.allclose(lm(idx)[0], before, atol=0.1)


OTHERS = """
x[:, -1]         forward returned (3, 32, torch.float32) for x (3, 9, 32, torch.float32): return y of x's shape
x[:1]            (1, 9, 32,
x.double()       (3, 9, 32, torch.float64)
None             returned None for x
x                forward must return y, or (y, state) if it is given a state
(x, x)           initial_state(3, device) has a tensor (1, 3): make it (3, ...)
(x, None, None)  with passes = True
passes: x        with passes = True
passes: (x, x)   with passes = True
"""


@pytest.mark.parametrize("returned, words", table(OTHERS))
def test_a_mixer_that_returns_something_wrong_is_named(returned, words, monkeypatch):
    """Some results would be broadcast over rows, or would make all later layers float64. A tensor of length 3 does not
    count as three results."""
    class Own(Mean):
        forward = eval(f"lambda self, x, state=None, passed=None: {returned.removeprefix('passes: ')}")
        initial_state = lambda self, batch_size, device: torch.zeros(1 if returned == "(x, x)" else 3, 3)

    if returned.startswith("passes"):
        Own.passes = True
    monkeypatch.setitem(FAMILIES, "own", [Own])
    lm = LM(config("own"))
    with pytest.raises(ValueError, match=rf"^Own \([^\n]*\): [^\n]*{re.escape(words)}[^\n]*\Z"):
        lm(tokens(3, 9)), lm(tokens(3, 9), state=lm.initial_state(3))


@pytest.mark.parametrize("row, words", [
    ([lambda config: None], r"takes 1 .* 2 were given \(model.py, line \d+\): its row of FAMILIES is a list"),
    ([lambda config, layer: config.d], r"no attribute 'd' \(tests/test_model.py, line"), (Mean, "not iterable")])
def test_a_family_that_cannot_be_built_is_named(row, words, monkeypatch):
    monkeypatch.setitem(FAMILIES, "own", row)
    with pytest.raises(ValueError, match=f"^own cannot be built: .*{words}"):
        LM(config("own"))


@pytest.mark.parametrize("flops", ["12 d", lambda: 12])
def test_flops_that_are_not_a_number_are_named(flops, monkeypatch):
    monkeypatch.setattr(Mean, "flops", flops, raising=False)
    with pytest.raises(ValueError, match=r"^Mean \(.*\): flops is .*: give a number, or a function of T$"):
        counting.mixing_flops(Mean(config("longhorn"), 0), 9)


@pytest.mark.parametrize("text", ["import nothing_there\n", "x = (\n", "FAMILIES['x'] = []\n", "exit(0)\n",
                                  "from model import FAMILIES as known\nknown['gla'] = [print]\n",
                                  "from model import FAMILIES as known\nknown['mine'] = []\n"])
def test_a_file_that_cannot_be_imported_is_named_in_one_line(text, tmp_path, monkeypatch, capsys):
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


def test_every_program_knows_families_in_a_users_files(data, tmp_path):
    """The page's code blocks are run as printed, in a copy of this tree."""
    root, out = tmp_path / "copy", tmp_path / "run"
    path, text = re.search(r"`(config/\w+\.py)`:\n\n((?:    .*\n)+)", PAGE).groups()
    (copied_tree(root) / path).write_text(textwrap.dedent(text))
    for name, text in BLOCKS.items():
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
    assert {f"families/{name}.py" for name in BLOCKS} <= code.keys()


# ------------------------------------------------------------------------------------------------------------- patterns

PATTERNS = """
llama                       llama llama llama llama llama
longhorn*3,llama            longhorn longhorn longhorn llama longhorn
rwkv , mamba * 2 ,gla       rwkv mamba mamba gla rwkv
longhorn*4,llama,longhorn   longhorn longhorn longhorn longhorn llama
"""


@pytest.mark.parametrize("pattern, expected", table(PATTERNS))
def test_a_pattern_is_repeated_to_n_layer(pattern, expected):
    c = config("gla", pattern=pattern, n_layer=5)
    assert " ".join(c.families) == expected
    c.check_pattern()


def test_training_refuses_a_pattern_with_a_family_that_has_no_layer():
    with pytest.raises(ValueError, match=r"'longhorn\*5,llama': no llama in 5 layers; set n_layer to 6 or more"):
        config("gla", pattern="longhorn*5,llama", n_layer=5).check_pattern()


@pytest.mark.parametrize("pattern", ["longhorn*2,llama", "rwkv4,mamba,gla", "gla,retnet,rwkv"])
def test_a_hybrid_is_the_sum_of_its_layers(pattern):
    """A hybrid's FLOPs and state are sums over its layers. The first and the last layer decide the kinds of norm."""
    hybrid = LM(config("longhorn", pattern=pattern, n_layer=3))
    layers = [LM(config(family, n_layer=1)) for family in hybrid.config.families]
    layers_flops = lambda lm: counting.flops_per_token(lm, 20)["forward"] - 2 * 64 * 32  # without the head
    assert layers_flops(hybrid) == sum(map(layers_flops, layers))
    assert counting.state_size(hybrid, 20) == sum(counting.state_size(lm, 20) for lm in layers)
    assert (type(hybrid.embed_norm), type(hybrid.norm)) == (type(layers[0].embed_norm), type(layers[-1].norm))


def test_the_scale_of_residual_writes_follows_the_branches_of_the_model(monkeypatch):
    """The scale is GPT-2's 0.02 / sqrt(residual branches), however many branches a layer has."""
    monkeypatch.setitem(FAMILIES, "mean", [Mean])
    lm = LM(config("longhorn", pattern="mean,llama", n_embd=64))
    assert lm.config.n_branches == 3 == len(lm.branches())
    assert lm.layers[1].branches[1].mixer.w2.weight.std().item() == pytest.approx(0.02 / math.sqrt(3), rel=0.05)


# ----------------------------------------------------------------------------------------------------------- generation

@torch.no_grad()
def test_greedy_generation_is_the_argmax_over_the_whole_sequence():
    """This also holds beyond block_size, and with the prompt read in pieces."""
    lm = tiny("longhorn,llama,swa", n_layer=3, block_size=8)
    idx = tokens(2, 6)
    out = sample.generate(lm, idx, 6, temperature=0)
    assert out.shape == (2, 12) and torch.equal(out[:, :6], idx)
    assert torch.equal(out[:, 6:], lm(out[:, :-1])[0][:, 5:].argmax(-1))
    streamed = list(sample.stream(lm, idx, 6, temperature=0, chunk=4))
    assert torch.equal(torch.stack(streamed, 1), out[:, 6:])


P = torch.tensor([0.05, 0.4, 0.3, 0.15, 0.1])
KEPT = """
{"top_k": 99}                    0 1 2 3 4
{"top_p": 1.0}                   0 1 2 3 4
{"top_p": 0.86}                  1 2 3 4
{"top_k": 3}                     1 2 3
{"top_p": 0.41}                  1 2
{"top_k": 3, "top_p": 0.5}       1 2
{"top_k": 1}                     1
{"top_p": 0.39}                  1
{"temperature": 0.001}           1
{"temperature": 0, "top_k": 2}   1
"""


def drawn(**how):
    return sample.sample_token(P.log().repeat(4000, 1), generator=torch.Generator().manual_seed(0), **how)


@pytest.mark.parametrize("how, kept", table(KEPT))
def test_top_k_and_top_p_cut_the_tail(how, kept):
    """Tokens are kept up to and including the one that reaches top_p."""
    assert " ".join(map(str, drawn(**json.loads(how)).unique().tolist())) == kept


def test_tokens_are_drawn_with_the_right_probabilities():
    share = lambda **how: torch.bincount(drawn(**how), minlength=5) / 4000
    close(share(top_k=2), torch.tensor([0, 4 / 7, 3 / 7, 0, 0]), 0.03)
    close(share(temperature=0.5), P**2 / (P**2).sum(), 0.03)
    assert len(sample.sample_token(torch.zeros(100, 2), top_p=0.5).unique()) == 1  # one token reaches top_p exactly
    for beyond in ({"top_k": 0}, {"top_p": 1.1}):
        with pytest.raises(ValueError, match="top_p"):
            drawn(**beyond)


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


def test_impossible_inputs_are_refused_in_a_line():
    lm = tiny("llama", n_layer=1)
    idx = tokens(2, 5)
    for wrong, words in ((idx[:, :0], r"\(2, 0\)"), (idx[0], r"\(5,\)"), (idx[:0], r"\(0, 5\)"), (idx * 1.0, "float")):
        with pytest.raises(ValueError, match=rf"^idx must be \(B, T\) of int64, both at least 1, got .*{words}.*$"):
            lm(wrong)
    with pytest.raises(ValueError, match="^max_new_tokens -1 must be 0 or more$"):
        sample.generate(lm, idx, -1)
    assert torch.equal(sample.generate(lm, idx, 0), idx)
    with pytest.raises(ValueError, match="^loss_only needs targets: "):
        lm(idx, loss_only=True)
    for state in (lm.initial_state(3), lm.initial_state(1), lm.initial_state(2)[1:]):
        with pytest.raises(ValueError, match=r"^state does not fit 1 layers and a batch of 2: [^\n]*$"):
            lm(idx, state=state)
    lm.config.documents, lm.config.end_of_text = "pack", idx[0, 2]
    with pytest.raises(ValueError, match="^documents=pack: documents end at different places [^\n]* one at a time$"):
        lm(idx, state=lm.initial_state(2))


def test_the_parameters_of_all_sizes_or_of_a_config_are_printed(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sizes, "FAMILIES", ("longhorn", "rwkv4"))
    sizes.main([])
    head, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 8 and "Table 1" in head
    row = next(r for r in rows if r.startswith("longhorn ") and "350M" in r)
    assert re.match(r"longhorn +350M +369\.97M +369\.8M ", row) and row.endswith(f" {48 * 2048 * (16 + 3) / 1e6:.2f}M")
    laptop = str(CONFIG / "longhorn_laptop.py")
    sizes.main([laptop, "--vocab_size=256", "--n_layer=6"])
    assert re.search(r"^longhorn +6 x 192 +2\.92M ", capsys.readouterr().out, re.M)
    (tmp_path / "mine.py").write_text("dataset = 'none_here'")
    sizes.main([str(tmp_path / "mine.py")])
    assert re.search("there is no dataset.*--vocab_size=", capsys.readouterr().err)
    with pytest.raises(ConfigError, match="there is no dataset"):  # a dataset that was typed must exist
        sizes.main([laptop, "--dataset=none_here"])
