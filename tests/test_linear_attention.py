"""The chunked recurrences against their loops, with every gradient, and the loops against formulas without a state.

Tolerances are relative to the norm of the true result, computed in float64 from the same inputs: 32 eps of the dtype
that is computed in, and half a unit more where the result is rounded to bfloat16.

    python -m pytest tests/test_linear_attention.py
"""

import importlib
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kernels import build, fused, ops
from kernels import linear_attention as la

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 130)
OPS = {"gla": "gated_linear_attention", "retention": "retention", "bonus": "retention", "delta_rule": "delta_rule",
       "wkv4": "wkv4"}
HEADS = ("gla", "retention", "bonus", "delta_rule")

pytestmark = pytest.mark.usefixtures("poison")


def inputs(case, T, B=2, H=3, K=5, V=7, dtype=F64, state=True, seed=0):
    """The named arguments of a case, in float64 but representable in `dtype`."""
    g = torch.Generator().manual_seed(seed + T)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=F64)
    if case == "wkv4":
        a = {"k": 2 * draw(B, T, H), "v": draw(B, T, H), "decay": draw(H).exp(), "bonus": draw(H)}
        if state:
            a |= {"num": draw(B, H), "den": draw(B, H).exp(), "max": draw(B, H)}
    else:
        a = {"q": draw(B, T, H, K), "k": F.normalize(draw(B, T, H, K), dim=-1), "v": draw(B, T, H, V)}
        if case == "gla":
            a["log_decay"] = -(2 * draw(B, T, H, K) - 2).exp()
        elif case == "delta_rule":
            a["beta"] = 1.5 * torch.rand(B, T, H, generator=g, dtype=F64)
        else:
            a["log_decay"] = -(draw(H) - 3).exp()
        if case == "bonus":
            a["bonus"] = draw(H)
        if state:
            a["state"] = draw(B, H, K, V)
    return {n: x.to(dtype).double() for n, x in a.items()}


def outputs(f, a, **kw):
    """{name: tensor} of one call; wkv4's state is taken apart, and its maximum, a mere scale, multiplied in."""
    a = dict(a)
    if "decay" not in a:
        o, S = f(**a, **kw)
        return {"o": o, "S": S}
    state = tuple(a.pop(n) for n in ("num", "den", "max")) if "num" in a else None
    o, (num, den, top) = f(**a, state=state, **kw)
    return {"o": o, "mean": num / den, "weight": den.log() + top}


def graded(f, a, dtype=F64, only=None, **kw):
    """Outputs, and the gradient of every argument under fixed random ones of the outputs (or of `only` one of them)."""
    a = {n: x.to(dtype).detach().requires_grad_() for n, x in a.items()}
    y = outputs(f, a, **kw)
    g = torch.Generator().manual_seed(5)
    dy = {n: torch.randn(x.shape, generator=g).to(BF16) for n, x in y.items()}
    names = [only] if only else list(y)
    grads = torch.autograd.grad([y[n] for n in names], list(a.values()), [dy[n].to(y[n].dtype) for n in names],
                                allow_unused=True)
    return {**{n: x.detach() for n, x in y.items()},
            **{"d" + n: torch.zeros_like(x) if d is None else d for (n, x), d in zip(a.items(), grads, strict=True)}}


def wrong(got, true, dtype, factor=32):
    """The names whose error is beyond the tolerance, with error over tolerance."""
    found = {}
    for n, t in true.items():
        # a decay or bonus of a head is a sum over batch, time and width, whose terms cancel and whose errors do not;
        # what is left of the first state after a long time is as small as one likes
        scale = t.norm().item() + (true["o"].norm().item() if n in ("dlog_decay", "ddecay", "dbonus", "dstate") else 0)
        bound = factor * torch.finfo(dtype).eps * scale + 1e-30
        if got[n].dtype == BF16:
            bound += 0.5 * torch.finfo(BF16).eps * scale
        error = (got[n].double() - t).norm().item()
        if not error <= bound:  # NaN too
            found[n] = error / bound
    return found


def both(case, module=la):
    return getattr(module, OPS[case]), getattr(la, OPS[case] + "_ref")


# ------------------------------------------------------------------------------------- the loops against plain formulas

def pairs(q, k, v, weight, S0, S0_weight):
    """o_t = sum over s <= t of (q_t * weight(t, s) * k_s) . v_s + (q_t * S0_weight(t)) S0, in numpy."""
    o = np.zeros_like(v)
    B, T, H, _ = q.shape
    for b in range(B):
        for h in range(H):
            for t in range(T):
                o[b, t, h] = (q[b, t, h] * S0_weight(b, t, h)) @ S0[b, h]
                for s in range(t + 1):
                    o[b, t, h] += (q[b, t, h] * weight(b, t, s, h) * k[b, s, h]).sum() * v[b, s, h]
    return o


def test_gla_loop_is_the_sum_over_pairs():
    a = inputs("gla", 9)
    o, S = la.gated_linear_attention_ref(**a)
    q, k, v, g, S0 = (x.numpy() for x in a.values())
    want = pairs(q, k, v, lambda b, t, s, h: np.exp(g[b, s + 1:t + 1, h].sum(0)), S0,
                 lambda b, t, h: np.exp(g[b, :t + 1, h].sum(0)))
    assert np.abs(o.numpy() - want).max() < 1e-13
    S_want = np.exp(g.sum(1))[..., None] * S0
    for s in range(9):
        S_want += (np.exp(g[:, s + 1:].sum(1)) * k[:, s])[..., None] * v[:, s, :, None, :]
    assert np.abs(S.numpy() - S_want).max() < 1e-13


@pytest.mark.parametrize("case", ("retention", "bonus"))
def test_retention_loop_is_the_sum_over_pairs(case):
    a = inputs(case, 9)
    o, S = la.retention_ref(**a)
    a = {n: x.numpy() for n, x in a.items()}
    w, S0 = np.exp(a["log_decay"]), a["state"]
    if case == "retention":
        weight, first = lambda b, t, s, h: w[h] ** (t - s), lambda b, t, h: w[h] ** (t + 1)
    else:
        u = a["bonus"]
        weight, first = lambda b, t, s, h: u[h] if s == t else w[h] ** (t - s - 1), lambda b, t, h: w[h] ** t
    assert np.abs(o.numpy() - pairs(a["q"], a["k"], a["v"], weight, S0, first)).max() < 1e-13
    S_want = w[:, None, None] ** 9 * S0
    for s in range(9):
        S_want = S_want + w[:, None, None] ** (8 - s) * a["k"][:, s, :, :, None] * a["v"][:, s, :, None, :]
    assert np.abs(S.numpy() - S_want).max() < 1e-13


def test_delta_rule_loop_is_the_product_of_full_matrices():
    a = inputs("delta_rule", 9)
    o, S = la.delta_rule_ref(**a)
    q, k, v, beta, S0 = (x.numpy() for x in a.values())
    for b in range(2):
        for h in range(3):
            M = S0[b, h]
            for t in range(9):
                kk = np.outer(k[b, t, h], k[b, t, h])
                M = (np.eye(5) - beta[b, t, h] * kk) @ M + beta[b, t, h] * np.outer(k[b, t, h], v[b, t, h])
                assert np.abs(o[b, t, h].numpy() - q[b, t, h] @ M).max() < 1e-13
            assert np.abs(S[b, h].numpy() - M).max() < 1e-13


def test_wkv4_loop_is_a_softmax_over_the_past():
    a = inputs("wkv4", 9)
    y = outputs(la.wkv4_ref, a)
    k, v, w, u, num, den, top = (x.numpy() for x in a.values())
    for t in range(10):  # at t = 9 the state itself
        weights = [np.exp(top - t * w) * den] + [np.exp(k[:, s] - (t - 1 - s) * w) for s in range(t)]
        values = [num / den] + [v[:, s] for s in range(t)]
        if t < 9:
            weights.append(np.exp(u + k[:, t]))
            values.append(v[:, t])
        mean = sum(x * y for x, y in zip(weights, values, strict=True)) / sum(weights)
        assert np.abs((y["o"][:, t] if t < 9 else y["mean"]).numpy() - mean).max() < 1e-13
    assert np.abs(y["weight"].numpy() - np.log(sum(weights))).max() < 1e-13


@pytest.mark.parametrize("begins", [(7,), (8,), (24,), (1, 2, 30)], ids=str)
def test_wkv4_of_documents_whose_keys_are_far_apart(begins):
    """The keys of each document are a hundred below those before it: what is left of its own would underflow."""
    k, v, decay, bonus = torch.randn(1, 33, 3), torch.randn(1, 33, 3), torch.rand(3) + 1e-3, torch.randn(3)
    starts = torch.zeros(1, 33, dtype=torch.bool)
    starts[:, list(begins)] = True
    k = (k - 100 * starts.cumsum(1)[..., None]).requires_grad_()
    with ops.documents(starts):
        o = la.wkv4(k, v, decay, bonus)[0]
    ends = [0, *begins, 33]
    parts = [slice(*pair) for pair in zip(ends, ends[1:], strict=False)]
    alone = torch.cat([la.wkv4_ref(k[:, part], v[:, part], decay, bonus)[0] for part in parts], 1)
    torch.testing.assert_close(o, alone, rtol=1e-4, atol=1e-4)
    got, wanted = (torch.autograd.grad(x.square().sum(), k)[0] for x in (o, alone))
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


def test_an_empty_wkv4_state_is_none():
    a = inputs("wkv4", 20, state=False)
    zero = torch.zeros(2, 3, dtype=F64)
    got = outputs(la.wkv4, {**a, "num": zero, "den": zero, "max": zero + la.NOTHING})
    for f in (la.wkv4, la.wkv4_ref):
        assert not wrong(outputs(f, a), got, F64)
    minus_infinity = outputs(la.wkv4, {**a, "num": zero, "den": zero, "max": zero - torch.inf})
    assert not wrong(minus_infinity, got, F64)


# ----------------------------------------------------------------------------------------- the chunks against the loops

@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("case", OPS)
def test_values_and_every_gradient(case, T):
    """float64 against the loop, with and without a state; float32 against the loop in float64."""
    fast, loop = both(case)
    for state in (True, False):
        a = inputs(case, T, dtype=F32, state=state)
        true = graded(loop, a)
        assert wrong(graded(fast, a), true, F64) == {}
        got = graded(fast, a, F32)
        assert all(x.dtype == F32 for x in got.values())
        assert wrong(got, true, F32) == {}


@pytest.mark.parametrize("sizes", ((1, 1, 1, 1), (2, 3, 1, 4), (4, 2, 3, 1), (1, 2, 16, 32), (3, 1, 33, 2)))
@pytest.mark.parametrize("case", OPS)
def test_other_widths(case, sizes):
    fast, loop = both(case)
    a = inputs(case, 70, *sizes)
    for only in ("o", None):  # the gradient of the output alone, and with that of the state
        assert wrong(graded(fast, a, only=only), graded(loop, a, only=only), F64) == {}


@pytest.mark.parametrize("case", OPS)
def test_bfloat16_is_rounded_once(case):
    """bfloat16 in and out, computed in float32; decays of a whole head and states stay float32, as in a model."""
    fast, loop = both(case)
    a = inputs(case, 100, dtype=BF16)
    got = outputs(fast, {n: x.to(F32 if x.dim() < 3 or n == "state" else BF16) for n, x in a.items()})
    assert got["o"].dtype == BF16 and got.get("S", got.get("mean")).dtype == F32
    assert wrong(got, outputs(loop, a), F32) == {}


@pytest.mark.parametrize("case", OPS)
@pytest.mark.parametrize("T", (1, 70))
def test_autocast_does_not_touch_it_and_meta_tensors_have_shapes(case, T):
    fast, _ = both(case)
    a = {n: x.float() for n, x in inputs(case, T).items()}
    want = outputs(fast, a)
    with torch.autocast("cpu", dtype=BF16):
        got = outputs(fast, a)
    assert all(torch.equal(got[n], want[n]) for n in want)
    got = outputs(fast, {n: x.to("meta") for n, x in a.items()})
    assert all((got[n].shape, got[n].dtype) == (want[n].shape, want[n].dtype) and got[n].is_meta for n in want)


@pytest.mark.parametrize("case", OPS)
def test_pieces_with_the_state_carried_equal_the_whole(case):
    fast, _ = both(case)
    a = inputs(case, 150)

    def pieces(**a):
        state, os = a.pop("state"), []
        timed = [n for n, x in a.items() if x is not None and x.dim() >= 3]
        for first, last in zip((0, 1, 30, 94, 95), (1, 30, 94, 95, 150), strict=True):
            o, state = fast(**{n: x[:, first:last] if n in timed else x for n, x in a.items()}, state=state)
            os.append(o)
        return torch.cat(os, 1), state

    assert wrong(graded(pieces, a), graded(fast, a), F64) == {}


@pytest.mark.parametrize("case", OPS)
def test_gradcheck(case, monkeypatch):
    monkeypatch.setattr(la, "CHUNK", 2)
    monkeypatch.setattr(la, "GLA_CHUNK", 2)
    a = inputs(case, 5, 1, 2, 2, 3)
    for f in both(case):
        assert torch.autograd.gradcheck(lambda *x, f=f: tuple(outputs(f, dict(zip(a, x, strict=True))).values()),
                                        [x.requires_grad_() for x in a.values()], fast_mode=True)


@pytest.mark.parametrize("case", OPS)
def test_memory_grows_with_the_length_and_not_with_its_square(case):
    fast, _ = both(case)

    def saved(T):
        kept, a = [], inputs(case, T, 1, 1, 8, 8, state=False)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
            outputs(fast, {n: x.requires_grad_() for n, x in a.items()})
        return sum(kept)

    assert saved(1024) < 2.2 * saved(512)


# ------------------------------------------------------------------------------------------------------------- extremes

def extreme(case, kind, T=130):
    a = inputs(case, T)
    if case == "gla":
        g = torch.Generator().manual_seed(1)
        closed = torch.rand(a["log_decay"].shape, generator=g) < 0.3
        a["log_decay"] = {"strong": torch.full_like(a["log_decay"], -20.0), "none": torch.zeros_like(a["log_decay"]),
                          "mixed": torch.where(closed, -20.0, 0.0).double(),
                          "absurd": torch.where(closed, -1e4, -1e-4).double()}[kind]
    elif case == "delta_rule":
        if kind == "same key":
            a["k"] = a["k"][:, :1].expand_as(a["k"]).clone()
        a["beta"] = torch.full_like(a["beta"], 1.0 if kind == "replace" else 2.0)
    elif case == "wkv4":
        course = lambda k: k.double()[:, None].expand_as(a["k"]).clone()
        a["k"] = {"large": 50 * a["k"].clamp(-2, 2), "alternating": course(100 * torch.cos(torch.pi * torch.arange(T))),
                  "falling": course(torch.linspace(100, -100, T)), "slow": a["k"]}[kind]
        decay = torch.full((3,), 1e-6) if kind == "slow" else torch.tensor([-8.0, 0.0, 5.0]).exp()
        a["decay"] = decay.double()
    else:
        a["log_decay"] = {"strong": -torch.tensor([-1.0, 2.0, 5.0]).exp(), "none": torch.zeros(3),
                          "weak": -torch.tensor([-20.0, -14.0, -8.0]).exp()}[kind].double()
    return a


KINDS = [(case, kind) for case, kinds in {
    "gla": ("strong", "none", "mixed", "absurd"), "retention": ("strong", "none"), "bonus": ("strong", "weak"),
    "delta_rule": ("same key", "replace", "reflect"), "wkv4": ("large", "alternating", "falling", "slow")}.items()
         for kind in kinds]


@pytest.mark.parametrize(("case", "kind"), KINDS)
def test_extremes(case, kind):
    """Finite and right, gradients too. In wkv4 an exponent of 100 carries an error of 100 eps into its exponential; an
    error along a key that every step reflects stays for good."""
    fast, loop = both(case)
    a = {n: x.float().double() for n, x in extreme(case, kind).items()}
    true = graded(loop, a)
    assert all(x.isfinite().all() for x in true.values())
    factor = 640 if case == "wkv4" else 1300 if kind == "same key" else 32
    assert wrong(graded(fast, a), true, F64, factor) == {}
    assert wrong(graded(fast, a, F32), true, F32, factor) == {}


# ----------------------------------------------------------------------------------------------------- planted mistakes

MISTAKES = [
    ("gla", "Q2 * decay1[..., None, :]], -2)", "Q2 * decay2[..., None, :]], -2)"),
    ("gla", "S = decay * S + new", "S = S + new"),
    ("gla", "decay, m = decay1 * decay2, 2 * m", "decay, m = decay2, 2 * m"),
    ("retention", "((i + 1 - late) * g).exp()", "((i - late) * g).exp()"),
    ("retention", "k_fade[:, C - n:]", "k_fade[:, :n]"),
    ("retention", "log_decay.repeat(B)[:, None], t", "log_decay.repeat_interleave(B)[:, None], t"),
    ("bonus", "apart = i[:, None] - i - late", "apart = i[:, None] - i"),
    ("bonus", "bonus.repeat(B)[:, None]", "0 * bonus.repeat(B)[:, None]"),
    ("delta_rule", ").tril(-1)  # (B H, n, n)", ").tril()  * 0"),
    ("delta_rule", "b_c * torch.baddbmm(v_c, K[:, :n]", "torch.baddbmm(b_c * v_c, K[:, :n]"),
    ("wkv4", "S = x_n + p_n * S", "S = x_n + S"),
    ("wkv4", "(before - decay - m).exp()", "(before - decay - m).detach().exp()"),
    ("wkv4", "tuple(a[:, T - 1].clone()", "tuple(a[:, -1].clone()"),
    ("wkv4", "m = torch.maximum(torch.stack(ms, 2), cut(torch.stack(tops, 1)[:, :, None] - steps * decay, begun))",
     "m = torch.stack(ms, 2)"),
]


@pytest.mark.parametrize(("case", "right", "mistake"), MISTAKES)
def test_a_planted_mistake_is_seen(case, right, mistake):
    source = Path(la.__file__).read_text()
    assert source.count(right) == 1
    module = types.ModuleType("mistaken")
    exec(compile(source.replace(right, mistake), "mistaken", "exec"), module.__dict__)
    fast, loop = both(case, module)
    a = inputs(case, 100)
    found = wrong(graded(fast, a), graded(loop, a), F64, 160)
    if case == "wkv4":  # a wrong shift is only seen where it overflows
        a = extreme(case, "falling")
        found |= wrong(graded(fast, a, F32), graded(loop, a), F32, 160)
    assert found


# ------------------------------------------------------------------------------------------------ compile, meta, errors

@pytest.mark.parametrize("case", ("gla", "wkv4"))
def test_compiles_without_a_break(case):
    fast, _ = both(case)
    a = inputs(case, 40, 1, 2, 3, 3)
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
    assert wrong(graded(compiled, a), graded(fast, a), F64) == {}


def test_bad_shapes_are_named():
    for case, name, bad, words in (
            ("gla", "k", torch.ones(2, 8, 3, 4),
             r"gated_linear_attention: k must be \(2, 8, 3, 5\) .* got \(2, 8, 3, 4\)"),
            ("gla", "q", torch.ones(2, 8, 5), r"gated_linear_attention: q must be \(B, T, H, K\), .* got \(2, 8, 5\)"),
            ("gla", "state", torch.ones(2, 3, 7, 5), r"gated_linear_attention: state must be \(2, 3, 5, 7\)"),
            ("gla", "v", torch.ones(2, 0, 3, 7), r"gated_linear_attention: v must be .* every size at least 1"),
            ("gla", "v", torch.ones(2, 8, 3, 7, dtype=torch.int64),
             r"gated_linear_attention: v must be floating point of [^\\n]*, got torch.int64"),
            ("gla", "v", torch.ones(2, 8, 3, 7, device="meta"), r"gated_linear_attention: v is on meta, q on cpu"),
            ("retention", "log_decay", torch.ones(2), r"retention: log_decay must be \(3,\)"),
            ("retention", "log_decay", torch.ones(2, 8, 2), r"retention: log_decay must be \(2, 8, 3\)"),
            ("bonus", "bonus", torch.ones(2), r"retention: bonus must be \(3,\) .* got \(2,\)"),
            ("delta_rule", "beta", torch.ones(2, 8, 3, 1), r"delta_rule: beta must be \(2, 8, 3\)"),
            ("wkv4", "decay", torch.ones(4), r"wkv4: decay must be \(3,\) .* got \(4,\)"),
            ("wkv4", "den", torch.ones(3, 2), r"wkv4: state's den must be \(2, 3\)")):
        fast, _ = both(case)
        with pytest.raises(ValueError, match=words) as error:
            outputs(fast, {**inputs(case, 8), name: bad})
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"wkv4: state must be \(num, den, max\), got 2 entries"):
        la.wkv4(*torch.ones(2, 1, 8, 3), *torch.ones(2, 3), state=(1, 2))


# ------------------------------------------------------------------------------------------------------------- dispatch

@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(build, "say_once", lines.append)
    fused.load.cache_clear()
    yield lines
    fused.load.cache_clear()


@pytest.fixture
def as_if_cuda(monkeypatch):
    monkeypatch.setattr(fused, "GPU", "cpu")


@pytest.fixture
def library(monkeypatch):
    """A stand-in for flash-linear-attention that computes the loops and keeps what it was called with."""
    calls = []

    def put(op, loop):
        def function(q, k, v, scale, initial_state, output_final_state, **rest):
            calls.append({"op": op, "dtypes": {x.dtype for x in (q, k, v)}, "state": initial_state, **rest})
            assert scale == 1.0 and output_final_state and q.dim() == 4
            return loop(q, k, v, *rest.values(), state=initial_state)
        _, module, name, _ = fused.LIBRARIES[op]
        stand_in = types.ModuleType(module)
        setattr(stand_in, name, function)
        monkeypatch.setitem(sys.modules, module, stand_in)

    for package in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    put("gated_linear_attention", la.gated_linear_attention_ref)
    put("delta_rule", la.delta_rule_ref)
    put("retention", lambda q, k, v, g, state: la.retention_ref(q, k, v, g, state=state) if g.dim() == 1 else
        la.gated_linear_attention_ref(q, k, v, g[..., None].expand_as(q), state=state))
    return calls


def test_a_library_that_is_not_there_is_a_reason(said, monkeypatch, as_if_cuda):
    a = {n: x.float() for n, x in inputs("gla", 3).items()}
    for error, words in (
            (ModuleNotFoundError("No module named 'fla'", name="fla"), "is not installed"),
            (ModuleNotFoundError("No module named 'triton'", name="triton"), "does not find triton"),
            (RuntimeError("0 active drivers\n([])"), r"does not import (0 active drivers ([]))")):
        def broken(name, error=error):
            raise error
        monkeypatch.setattr(importlib, "import_module", broken)
        fused.load.cache_clear()
        la.gated_linear_attention(**a)  # chunks
        with pytest.raises(RuntimeError) as raised:
            la.gated_linear_attention(**a, backend="fused")
        assert str(raised.value) == ("gated_linear_attention: backend 'fused' cannot run here: flash-linear-attention "
                                     f"{words}: leave backend empty, or pip install -r requirements-gpu.txt on a "
                                     "machine with a GPU")


@pytest.mark.parametrize("state", (True, False))
@pytest.mark.parametrize("case", HEADS)
def test_the_library_is_called_right(case, state, said, as_if_cuda, library):
    """In its own layout it computes what the loop does, gradients included, also with a bonus, which it does not know.
    A single step is not worth its chunks."""
    fast, loop = both(case)
    dtype = BF16 if case == "delta_rule" else F32  # its delta rule refuses float32
    for T in (2, 20):
        library.clear()
        a = inputs(case, T, dtype=dtype, state=state)
        got = outputs(fast, {n: x.to(F32 if n in ("state", "log_decay", "bonus") else dtype) for n, x in a.items()})
        assert wrong(got, outputs(loop, a), F32) == {}
        call, = library
        assert call["dtypes"] == {dtype} and (call["state"] is not None) == state and got["S"].dtype == F32
        if case in ("retention", "bonus"):
            assert call["g_gamma"].shape == (3,)
        if dtype == F32:
            assert wrong(graded(fast, a, F32), graded(loop, a), F32) == {}
            assert case == "gla" or library[-1]["g"].shape == (2, T, 3)  # learnt, so given for every step
    outputs(fast, {n: x.to(dtype) for n, x in inputs(case, 1, state=state).items()}, backend="fused")
    assert len(library) == (2 if dtype == F32 else 1)
    assert said and set(said) == {f"{OPS[case]}: flash-linear-attention"}


def test_what_the_library_cannot_do_goes_to_chunks(as_if_cuda, library):
    la.gated_linear_attention(**inputs("gla", 3))  # float64
    with torch.autocast("cpu", dtype=BF16):
        o, _ = la.gated_linear_attention(**inputs("gla", 3))
        assert o.dtype == F64
    a = {n: x.float() for n, x in inputs("delta_rule", 3).items()}
    la.delta_rule(**a)
    with pytest.raises(RuntimeError, match="delta_rule: backend 'fused' cannot run here: .* takes bfloat16, float16, "):
        la.delta_rule(**a, backend="fused")
    wide = {n: x.to(BF16) for n, x in inputs("delta_rule", 3, 1, 1, 257, 2).items()}
    with pytest.raises(RuntimeError, match="up to a width of 256, not 257"):
        la.delta_rule(**wide, backend="fused")
    assert library == []


def test_under_autocast_the_library_gets_the_lower_type(as_if_cuda, library):
    a = {n: x.float() for n, x in inputs("gla", 20).items()}
    with torch.autocast("cpu", dtype=BF16):
        o, S = la.gated_linear_attention(**a)
    assert library[0]["dtypes"] == {BF16} and library[0]["g"].dtype == F32
    assert (o.dtype, S.dtype) == (F32, F32)


@pytest.mark.parametrize("case", OPS)
def test_torch_backend_is_the_loop_in_pieces(case):
    """Over more than one piece, with every gradient, and memory that does not grow with the states of all steps."""
    fast, loop = both(case)
    for T in (3, 130):
        a = inputs(case, T)
        assert wrong(graded(fast, a, backend="torch"), graded(loop, a), F64) == {}
    kept = []
    a = {n: x.requires_grad_() for n, x in inputs(case, 192, 1, 1, 32, 32, state=False).items()}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        outputs(fast, a, backend="torch")
    assert sum(kept) < 192 * 32 * 32
