"""The chunked recurrences against their loops, with every gradient, and the loops against other formulas.

Tolerances are relative to the norm of the true result, computed in float64 from the same inputs: 32 eps of the dtype
that is computed in (more for Mesa, which solves), and half a unit more where the result is rounded to bfloat16.

    python -m pytest tests/test_linear_attention.py
"""

import importlib
import re
from unittest import mock

import numpy as np
import pytest
import torch
from operators import (
    BF16,
    DELTA,
    F32,
    F64,
    OPS,
    attention_inputs,
    both,
    by_hand,
    graded_outputs,
    outputs,
    what_autograd_keeps,
)

import families  # noqa: F401
from kernels import fused, ops
from kernels import linear_attention as la
from model import LM, ModelConfig

LENGTHS = (1, 2, 63, 64, 65, 130)
ALL_CASES = pytest.mark.parametrize("case", OPS)

pytestmark = pytest.mark.usefixtures("poison", "one_thread")


def wrong(got, true, dtype, factor=None):
    """The names whose error is beyond the tolerance, with error over tolerance."""
    beyond, factor = {}, factor or (64 if "U" in true else 32)  # Mesa solves
    for n, t in true.items():
        # a decay or bonus of a head is a sum over batch, time and width, whose terms cancel and whose errors do not;
        # what is left of the first state after a long time is as small as one likes
        scale = t.norm().item() + (true["o"].norm().item() if n in ("dlog_decay", "ddecay", "dbonus", "dstate") else 0)
        bound = factor * torch.finfo(dtype).eps * scale + 1e-30
        bound += (got[n].dtype == BF16) * torch.finfo(BF16).eps / 2 * scale
        error = (got[n].double() - t).norm().item()
        if not error <= bound:  # NaN too
            beyond[n] = error / bound
    return beyond


# ------------------------------------------------------------------------------------- the loops against plain formulas


@pytest.mark.parametrize("T", (2, 65))
@pytest.mark.parametrize("case", list(OPS)[:-1])
def test_loop_is_the_product_of_full_matrices(case, T):
    a = attention_inputs(case, T)
    assert wrong(graded_outputs(both(case)[1], a), graded_outputs(by_hand, a), F64) == {}


def test_wkv4_loop_is_a_softmax_over_the_past():
    a = attention_inputs("wkv4", 9)
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
    a = attention_inputs("wkv4", 20, state=False)
    zero = torch.zeros(2, 3, dtype=F64)
    got = outputs(la.wkv4, {**a, "num": zero, "den": zero, "max": zero + la.NOTHING})
    for f in (la.wkv4, la.wkv4_ref):
        assert not wrong(outputs(f, a), got, F64)
    minus_infinity = outputs(la.wkv4, {**a, "num": zero, "den": zero, "max": zero - torch.inf})
    assert not wrong(minus_infinity, got, F64)


# ----------------------------------------------------------------------------------------- the chunks against the loops

@pytest.mark.parametrize("case, T", [*((case, T) for case in OPS for T in LENGTHS),
                                     *((case, T) for case in ("gla", "kda") for T in (15, 17, 31, 32, 33)),
                                     ("shared", 1000), ("kda", 1000), ("mesa", 1000)])
def test_values_and_every_gradient(case, T):
    """float64 against the loop, with and without a state; float32 against the loop in float64."""
    fast, loop = both(case)
    for state in (True, False):
        a = attention_inputs(case, T, dtype=F32, state=state)
        true = graded_outputs(loop, a)
        assert wrong(graded_outputs(fast, a), true, F64) == {}
        got = graded_outputs(fast, a, F32)
        assert all(x.dtype == F32 for x in got.values())
        assert wrong(got, true, F32) == {}


@pytest.mark.parametrize("sizes", ((1, 1, 1, 1), (2, 3, 1, 4), (4, 2, 3, 1), (1, 2, 16, 32), (3, 1, 33, 2)))
@ALL_CASES
def test_other_widths(case, sizes):
    fast, loop = both(case)
    a = attention_inputs(case, 70, *sizes)
    factor = 1e8 if case == "mesa" and sizes[2] == 33 else None  # 30 steps of conjugate gradients are too few for 33
    for only in ("o", None):  # the gradient of the output alone, and with that of the state
        assert wrong(graded_outputs(fast, a, only=only), graded_outputs(loop, a, only=only), F64, factor) == {}


@ALL_CASES
def test_bfloat16_is_rounded_once(case):
    """bfloat16 in and out, computed in float32; decays of a whole head and states stay float32, as in a model."""
    fast, loop = both(case)
    a = attention_inputs(case, 100, dtype=BF16)
    got = outputs(fast, {n: x.to(F32 if x.dim() < 3 or n in ("state", "H") else BF16) for n, x in a.items()})
    assert got["o"].dtype == BF16 and got.get("S", got.get("mean")).dtype == F32
    assert wrong(got, outputs(loop, a), F32) == {}


@ALL_CASES
@pytest.mark.parametrize("T", (1, 70))
def test_autocast_does_not_touch_it_and_meta_tensors_have_shapes(case, T):
    fast, _ = both(case)
    a = {n: x.float() for n, x in attention_inputs(case, T).items()}
    want = outputs(fast, a)
    with torch.autocast("cpu", dtype=BF16):
        got = outputs(fast, a)
    assert all(torch.equal(got[n], want[n]) for n in want)
    got = outputs(fast, {n: x.to("meta") for n, x in a.items()})
    assert all((got[n].shape, got[n].dtype) == (want[n].shape, want[n].dtype) and got[n].is_meta for n in want)


@ALL_CASES
def test_pieces_with_the_state_carried_equal_the_whole(case):
    fast, _ = both(case)
    a = attention_inputs(case, 150)

    def pieces(**a):
        state, os = a.pop("state"), []
        timed = [n for n, x in a.items() if x is not None and x.dim() >= 3]
        for first, last in zip((0, 1, 30, 94, 95), (1, 30, 94, 95, 150), strict=True):
            o, state = fast(**{n: x[:, first:last] if n in timed else x for n, x in a.items()}, state=state)
            os.append(o)
        return torch.cat(os, 1), state

    assert wrong(graded_outputs(pieces, a), graded_outputs(fast, a), F64) == {}


def numbers_kept(case, *sizes, **kw):
    """By autograd, after a forward without a first state in float64."""
    a = {n: x.requires_grad_() for n, x in attention_inputs(case, *sizes, state=False).items()}
    with what_autograd_keeps() as kept:
        outputs(both(case)[0], a, **kw)
    return sum(kept.values()) // 8


@ALL_CASES
def test_memory_grows_with_the_length_and_not_with_its_square(case):
    assert numbers_kept(case, 1024, 1, 1, 8, 8) < 2.2 * numbers_kept(case, 512, 1, 1, 8, 8)


# ------------------------------------------------------------------------------------------------------------- extremes

def extreme(case, kind, T=130):
    """kind: "closed" gates of 0, 1 and between; "short" and "long" keys, with a step to match; the others by name."""
    a = attention_inputs(case, T)
    g = torch.Generator().manual_seed(1)
    often = lambda name, p: torch.rand(a[name].shape, generator=g) < p
    if kind == "closed":
        none, full = often("log_decay", 0.2), often("log_decay", 0.5)
        a["log_decay"] = a["log_decay"].where(~full, 0).where(~none, -1e4).where(~often("log_decay", 0.1), -torch.inf)
        if "beta" in a:
            a["beta"] = a["beta"].where(~often("beta", 0.3), 2.0).where(~often("beta", 0.3), 1e-9)
    elif kind in ("short", "long"):
        a["k"] = a["k"] * {"short": 1e-3, "long": 1e3}[kind]
        if case in DELTA:
            a["beta"] = a["beta"] / (1 + a["beta"] * a["k"].square().sum(-1))
    elif case == "gla":
        a["log_decay"] = torch.full_like(a["log_decay"], -20.0)
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
        a["log_decay"] = {"strong": -torch.tensor([-1.0, 2.0, 5.0]).exp(),
                          "weak": -torch.tensor([-20.0, -14.0, -8.0]).exp()}[kind].double()
    return a


KINDS = {"gla": ("closed", "strong"), "retention": ("strong", "weak"), "bonus": ("strong", "weak"),
         "by token": ("closed",), "shared": ("closed",), "gated_delta_rule": ("closed", "short", "long"),
         "delta_rule": ("same key", "replace", "reflect", "short", "long"), "kda": ("closed", "short", "long"),
         "mesa": ("closed", "short"), "wkv4": ("large", "alternating", "falling", "slow")}


@pytest.mark.parametrize(("case", "kind"), [(case, kind) for case, kinds in KINDS.items() for kind in kinds])
def test_extremes(case, kind):
    """Finite and right, gradients too. In wkv4 an exponent of 100 carries an error of 100 eps into its exponential; an
    error along a key that every step reflects stays for good."""
    fast, loop = both(case)
    a = {n: x.float().double() for n, x in extreme(case, kind).items()}
    true = graded_outputs(loop, a)
    assert all(x.isfinite().all() for x in true.values())
    factor = 640 if case == "wkv4" else 1300 if kind == "same key" else None
    assert wrong(graded_outputs(fast, a), true, F64, factor) == {}
    assert wrong(graded_outputs(fast, a, F32), true, F32, factor) == {}


# ------------------------------------------------------------------------------------------------ compile, meta, errors

@pytest.mark.parametrize("case", ("gla", "wkv4", "mesa"))
def test_compiles_without_a_break(case):
    fast, _ = both(case)
    a = attention_inputs(case, 40, 1, 2, 3, 3)
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager")
    assert wrong(graded_outputs(compiled, a), graded_outputs(fast, a), F64) == {}


def test_the_graph_of_a_mesa_layer_is_small():
    """With its loops unrolled it has over 10,000 nodes at T = 1024."""
    layer = LM(ModelConfig(model="mesa", n_layer=1, n_embd=8, n_head=1, vocab_size=8)).layers[0]
    graphs = []
    torch.compile(layer.forward, backend=lambda graph, _: graphs.append(graph) or graph.forward)(torch.ones(1, 1024, 8))
    assert sum(len(graph.graph.nodes) for graph in graphs) < 2000 and len(graphs) == 1


MISFITS = [  # case, the argument that does not fit, words
    ("gla", "k", torch.ones(2, 8, 3, 4), r"k must be \(2, 8, 3, 5\) .* got \(2, 8, 3, 4\)"),
    ("gla", "q", torch.ones(2, 8, 5), r"q must be \(B, T, H, K\), .* got \(2, 8, 5\)"),
    ("gla", "state", torch.ones(2, 3, 7, 5), r"state must be \(2, 3, 5, 7\)"),
    ("gla", "v", torch.ones(2, 0, 3, 7), "v must be .* every size at least 1"),
    ("gla", "v", torch.ones(2, 8, 3, 7).long(), "v must be floating point of .* got torch.int64"),
    ("retention", "log_decay", torch.ones(2), r"log_decay must be \(3,\)"),
    ("by token", "log_decay", torch.ones(2, 8, 2), r"log_decay must be \(2, 8, 3\)"),
    ("bonus", "bonus", torch.ones(2), r"bonus must be \(3,\) .* got \(2,\)"),
    ("delta_rule", "beta", torch.ones(2, 8, 3, 1), r"beta must be \(2, 8, 3\)"),
    ("mesa", "ridge", torch.ones(3), r"ridge must be \(3, 5\)"),
    ("mesa", "state", (1, 2, 3), r"state must be \(H, U\), got 3 entries"),
    ("wkv4", "decay", torch.ones(4), r"decay must be \(3,\) .* got \(4,\)"),
    ("wkv4", "den", torch.ones(3, 2), r"state's den must be \(2, 3\)"),
    ("wkv4", "state", (1, 2), r"state must be \(num, den, max\), got 2 entries")]


@pytest.mark.parametrize("case, name, bad, words", MISFITS)
def test_misfits_are_one_line(case, name, bad, words):
    a = {**attention_inputs(case, 8, state=not isinstance(bad, tuple)), name: bad}
    with pytest.raises(ValueError, match=rf"^{OPS[case]}: {words}[^\n]*\Z"):
        outputs(both(case)[0], a)


# ------------------------------------------------------------------------------------------------------------- dispatch

@pytest.fixture
def calls(library):
    """What flash-linear-attention was called with: a stand-in that computes the loops."""
    calls = []

    def by_loop(loop):
        def function(q, k, v, scale, initial_state, output_final_state, **rest):
            dtypes = {x.dtype for x in (q, k, v, rest.get("beta", v))}
            calls.append({"dtypes": dtypes, "state": initial_state, **rest})
            assert scale == 1.0 and output_final_state and q.shape == k.shape and q.shape[:3] == v.shape[:3]
            return loop(q, k, v, *rest.values(), state=initial_state)
        return function

    def chunk_mesa_net(q, k, v, g, beta, lamb, *, h_kk_init, h_kv_init, output_final_state, max_CG_iteration):
        calls.append({"dtypes": {x.dtype for x in (q, k, v)}, "state": h_kk_init})
        o, (H, U) = la.mesa_ref(q, k, v, beta, g, lamb, state=None if h_kk_init is None else (h_kk_init, h_kv_init))
        return o, H, U

    loops = {"gated_linear_attention": la.gated_linear_attention_ref, "retention": la.retention_ref,
             **dict.fromkeys(DELTA, la.delta_rule_ref)}
    for op, loop in loops.items():
        library(op, by_loop(loop))
    library("mesa", chunk_mesa_net)
    return calls


def test_a_library_that_is_not_there_is_a_reason(library, monkeypatch):
    a = {n: x.to(BF16) for n, x in attention_inputs("gla", 3).items()}
    for error, words in (
            (ModuleNotFoundError("No module named 'fla'", name="fla"), "is not installed"),
            (ModuleNotFoundError("No module named 'triton'", name="triton"), "needs triton"),
            (RuntimeError("0 active drivers\n([])"), r"cannot be imported (0 active drivers ([]))")):
        monkeypatch.setattr(importlib, "import_module", mock.Mock(side_effect=error))
        fused.load.cache_clear()
        la.gated_linear_attention(**a)  # chunks
        with pytest.raises(RuntimeError, match=f"cannot run here: flash-linear-attention {re.escape(words)}: leave"):
            la.gated_linear_attention(**a, backend="fused")


@pytest.mark.parametrize("triton, gpu, right", [
    ("3.6.0", 9, False), ("3.7.0", 9, False), ("3.7.1", 9, True), ("3.3.1", 9, True), ("3.6.0", 8, True)])
def test_a_triton_with_wrong_gradients_is_left_alone(triton, gpu, right, calls, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (gpu, 0))
    monkeypatch.setattr(importlib.metadata, "version", {"triton": triton}.get)
    for case in ("retention", "gated_delta_rule", "gla"):
        a = {n: x.to(BF16) for n, x in attention_inputs(case, 20).items()}
        calls.clear()
        both(case)[0](**a)
        assert len(calls) == (right or case == "gla"), case
        if not calls:
            with pytest.raises(RuntimeError, match=f"needs Triton 3.7.1 .* {triton} computes wrong gradients"):
                both(case)[0](**a, backend="fused")


@pytest.fixture
def exact(calls, monkeypatch):
    """The stand-in computes in float32, which the library would do in 11 bits."""
    monkeypatch.setattr(fused, "refusal", lambda op, dtype: None)
    return calls


BY_LIBRARY = pytest.mark.parametrize("case", list(OPS)[:-1])


@BY_LIBRARY
@pytest.mark.parametrize("T", (2, 20))
@pytest.mark.parametrize("state", (True, False))
def test_the_library_is_called_right(case, T, state, exact):
    """In its own layout it computes what the loop does, gradients included, also with a bonus, which it does not know.
    """
    fast, loop = both(case)
    dtype = BF16 if case in (*DELTA, "mesa") else F32
    a = attention_inputs(case, T, dtype=dtype, state=state, V=5)
    got = outputs(fast, {n: x.to(dtype if n in ("q", "k", "v", "beta") else F32) for n, x in a.items()})
    assert wrong(got, outputs(loop, a), F32) == {} and got["S"].dtype == F32
    call, = exact
    assert call["dtypes"] == {dtype} and (call["state"] is not None) == state
    if case in ("retention", "bonus"):
        assert call["g_gamma"].shape == (3,)
    if dtype == F32:
        assert wrong(graded_outputs(fast, a, F32), graded_outputs(loop, a), F32) == {}
        assert case == "gla" or exact[-1]["g"].shape == (2, T, 3)  # learnt, so given for every step


@BY_LIBRARY
def test_a_single_step_is_not_worth_the_librarys_chunks_and_more_are_said_once(case, library, exact):
    for T, called in ((1, 0), (2, 1), (20, 2)):
        a = attention_inputs(case, T, V=5)
        outputs(both(case)[0], {n: x.to(BF16) for n, x in a.items()}, backend="fused")
        assert len(exact) == called
    wait, *copies = dict.fromkeys(library.said)
    assert wait.startswith(f"{OPS[case]}: ") and wait.endswith("tuned at their first start, for minutes")
    assert bool(copies) == (case == "shared")


@pytest.mark.filterwarnings("error:Dynamo detected")
def test_the_library_is_called_from_compiled_code(calls, library):
    """As its functions are marked: not compiled themselves."""
    name = "fla.ops.simple_gla"
    library("retention", torch.compiler.disable(importlib.import_module(name).chunk_simple_gla))
    a = {n: x.to(BF16) for n, x in attention_inputs("shared", 20, state=False).items()}
    compiled = torch.compile(lambda **a: la.retention(**a)[0], backend="aot_eager")
    assert torch.equal(compiled(**a), la.retention(**a)[0]) and len(calls) == 2


def test_what_the_library_cannot_do_goes_to_chunks(calls):
    a = {n: x.float() for n, x in attention_inputs("gla", 20).items()}
    with torch.autocast("cpu", dtype=BF16):  # it gets 16 bits
        o, S = la.gated_linear_attention(**a)
    call = calls.pop()
    assert call["dtypes"] == {BF16} and call["g"].dtype == o.dtype == S.dtype == F32
    la.gated_linear_attention(**attention_inputs("gla", 3))  # float64
    with torch.autocast("cpu", dtype=BF16):
        assert la.gated_linear_attention(**attention_inputs("gla", 3))[0].dtype == F64
    assert calls == []


@pytest.mark.parametrize("case,dtype,K,V,words", [
    ("gla", F32, 5, 7, "takes bfloat16, "), ("delta_rule", BF16, 257, 2, "up to a width of 256, not 257"),
    ("mesa", BF16, 5, 7, "of one width, at most 128, not 5 and 7"),
    ("mesa", BF16, 129, 129, "at most 128, not 129 and 129")])
def test_what_the_library_cannot_do_is_refused_if_it_is_asked_for(case, dtype, K, V, words, calls):
    a = {n: x.to(dtype) for n, x in attention_inputs(case, 3, 1, 1, K, V, state=False).items()}
    outputs(both(case)[0], a)
    assert calls == []
    with pytest.raises(RuntimeError, match=f"{OPS[case]}: backend 'fused' cannot run here: .*{words}"):
        outputs(both(case)[0], a, backend="fused")


@ALL_CASES
def test_torch_backend_is_the_loop_in_pieces(case):
    """Over more than one piece, with every gradient, and memory that does not grow with the states of all steps."""
    fast, loop = both(case)
    for T in (3, 130):
        a = attention_inputs(case, T)
        assert wrong(graded_outputs(fast, a, backend="torch"), graded_outputs(loop, a), F64) == {}
    assert numbers_kept(case, 192, 1, 1, 32, 32, backend="torch") < 192 * 32 * 32
