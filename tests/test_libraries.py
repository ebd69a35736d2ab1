"""Operators on other libraries' kernels. Stand-ins compute on this CPU and show what a library would be called with.

test_fused.py runs the libraries' own kernels.

    python -m pytest tests/test_libraries.py
"""

import importlib
import re
from unittest import mock

import pytest
import torch
from helpers import table
from operators import BF16, DELTA, F32, F64, OPERATORS, cast, conv_inputs, conv_true, double, wrong

from kernels import fused, ops
from kernels import linear_attention as la
from kernels.scan import selective_scan

LINEAR = [name for name in OPERATORS if OPERATORS[name].op in fused.BY_DEFAULT]

pytestmark = pytest.mark.usefixtures("poison", "one_thread")


def given(name, T, dtype=F32, state=False, **sizes):
    """The row's `run`, and arguments that the library takes."""
    row = OPERATORS[name]
    sizes = {"conv": {"D": 8}, **{op: {"V": 5} for op in LINEAR}}.get(name, {}) | sizes
    a = cast(row, row.draw(T, **sizes), dtype)
    return row.run, a if state else {n: v for n, v in a.items() if n not in row.states}


@pytest.fixture
def calls(library):
    """A list of calls: (operator, dtypes, other arguments). The stand-ins compute from the libraries' own layouts, so
    that any other layout gives wrong results."""
    calls = []

    def seen(op, *tensors, **rest):
        calls.append((op, {v.dtype for v in tensors}, rest))

    def by_loop(op, loop):
        def function(q, k, v, scale, initial_state, output_final_state, **rest):
            seen(op, q, k, v, rest.get("beta", v), state=initial_state, **rest)
            assert scale == 1.0 and output_final_state and q.shape == k.shape and q.shape[:3] == v.shape[:3]
            return loop(q, k, v, *rest.values(), state=initial_state)
        return function

    def chunk_mesa_net(q, k, v, g, beta, lamb, *, h_kk_init, h_kv_init, output_final_state, max_CG_iteration):
        seen("mesa", q, k, v, state=h_kk_init)
        assert output_final_state
        o, (H, U) = la.mesa_ref(q, k, v, beta, g, lamb, state=None if h_kk_init is None else (h_kk_init, h_kv_init))
        return o, H, U

    def causal_conv1d_fn(x, weight, bias=None, activation=None):
        seen("causal_conv1d", x)
        return conv_true(x.transpose(1, 2), weight, bias, silu=activation == "silu").transpose(1, 2)

    def selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False):
        seen("selective_scan", u, B)
        u, delta, B, C, z = (a.transpose(1, 2) for a in (u, delta, B, C, z))
        y = selective_scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus, backend="torch")
        return y.transpose(1, 2)

    def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1)):
        seen("attention", q, k)
        q, k, v = (a.transpose(1, 2) for a in (q, k, v))
        window = None if window_size[0] < 0 else window_size[0] + 1  # flash-attn does not count the query's own key
        return ops.attention(q, k, v, window, backend="torch").transpose(1, 2)

    loops = {"gated_linear_attention": la.gated_linear_attention_ref, "retention": la.retention_ref,
             **dict.fromkeys(DELTA, la.delta_rule_ref)}
    for op, loop in loops.items():
        library(op, by_loop(op, loop))
    for op, function in (("mesa", chunk_mesa_net), ("causal_conv1d", causal_conv1d_fn), ("attention", flash_attn_func),
                         ("selective_scan", selective_scan_fn)):
        library(op, function)
    return calls


@pytest.fixture
def exact(calls, monkeypatch):
    """Makes stand-ins compute in float32 what a library would compute in 11 bits."""
    monkeypatch.setattr(fused, "refusal", lambda op, dtype: None)
    return calls


@pytest.mark.parametrize("T", (2, 20))
@pytest.mark.parametrize("state", (True, False))
@pytest.mark.parametrize("name", LINEAR)
def test_linear_attention_is_right_in_the_librarys_own_layout(name, state, T, exact):
    """Every gradient is right too. The library also gets 16 bits; a bonus, which it lacks, is computed here."""
    run, a = given(name, T, state=state)
    assert not wrong(name, a, "fused")
    constant = name in ("retention", "bonus")
    if constant:
        assert exact[0][2]["g"].shape == (2, T, 3)  # learnt, so given for every step
    exact.clear()
    run, a = given(name, T, BF16, state)
    out = run(**a)
    (op, dtypes, rest), = exact
    assert op == OPERATORS[name].op and dtypes == {BF16} and (rest["state"] is not None) == state
    assert ("g_gamma" in rest) == constant and all(rest[n].dtype == F32 for n in ("g", "g_gamma") if n in rest)
    assert out["y"].dtype == BF16 and out["state"].dtype == F32


@pytest.mark.parametrize("name, state, how", [
    ("conv", False, {}), ("conv", False, {"silu": False}), ("conv", False, {"reverse": True}), ("mamba", False, {}),
    ("mamba", False, {"reverse": True}), ("attention", False, {}), ("window", False, {}), ("attention", True, {})])
def test_the_other_operators_are_right_in_their_own_layouts(name, state, how, exact):
    """flash-attn aligns the queries with the last keys."""
    run, a = given(name, 9, state=state)
    how_run = {"backend": "fused"} | ({"keep": False} if name == "mamba" else {})
    ours, true = (lambda f=f, more=more, **a: {"y": f(**a, **more)["y"]}
                  for f, more in ((run, how_run), (OPERATORS[name].true, {})))
    assert not wrong(name, a, run=ours, true=true, tolerance=64, **how)
    assert [call[:2] for call in exact] == [(OPERATORS[name].op, {F32})]
    with torch.autocast("cpu", BF16):
        assert ours(**a, **how)["y"].dtype == BF16


def test_calls_that_a_library_lacks_are_computed_here(exact):
    """Libraries lack states, wide convolutions, and channels or strides that are no multiple of 8."""
    part = {**conv_inputs(2, 9, 8, 4, state=False), "x": torch.randn(2, 9, 12)[..., :8]}
    _, scan = given("mamba", 9)
    lacking = [("conv", conv_inputs(2, 9, 8, 4)), ("conv", conv_inputs(2, 9, 8, 5, state=False)), ("conv", part),
               ("conv", conv_inputs(2, 9, 12, 4, state=False)), ("mamba", scan),
               ("mamba", {**scan, "h0": torch.ones(2, 5, 3), "keep": False})]
    same = lambda run, a: torch.equal(run(**a, backend="fused")["y"], run(**a)["y"])
    assert all(same(OPERATORS[name].run, a) for name, a in lacking)
    with ops.documents(torch.arange(9).expand(2, 9) == 4):
        assert same(OPERATORS["mamba"].run, {**scan, "keep": False})
    assert exact == []


def test_a_missing_library_is_named_in_the_refusal(library, monkeypatch):
    run, a = given("gla", 3, BF16)
    for error, words in (
            (ModuleNotFoundError("No module named 'fla'", name="fla"), "is not installed"),
            (ModuleNotFoundError("No module named 'triton'", name="triton"), "needs triton"),
            (RuntimeError("0 active drivers\n([])"), r"cannot be imported (0 active drivers ([]))")):
        monkeypatch.setattr(importlib, "import_module", mock.Mock(side_effect=error))
        fused.missing.cache_clear()
        run(**a)  # in our chunks
        with pytest.raises(RuntimeError, match=f"cannot run here: flash-linear-attention {re.escape(words)}: leave"):
            run(**a, backend="fused")


VERSIONS = """
# Triton  fla    GPU  left alone
3.6.0     0.6.0  9    retention gated_delta_rule
3.7.0     0.6.0  9    retention gated_delta_rule
3.7.1     0.5.9  9    delta_rule
3.3.1     0.5.9  9    none
3.6.0     0.5.9  8    none
"""


@pytest.mark.parametrize("triton, fla, gpu, left", table(VERSIONS))
def test_versions_with_wrong_gradients_are_left_alone(triton, fla, gpu, left, calls, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (int(gpu), 0))
    monkeypatch.setattr(importlib.metadata, "version", {"triton": triton, "fla-core": fla}.get)
    found = {op: why for op in ("retention", "gated_delta_rule", "delta_rule") if (why := fused.missing(op))}
    assert " ".join(found) == left.removeprefix("none")
    for why in found.values():
        assert re.search("^flash-.* needs .* or later on a Hopper GPU: [0-9.]+ computes wrong gradients$", why)
    monkeypatch.setattr(importlib.metadata, "version", mock.Mock(side_effect=ModuleNotFoundError))
    assert fused.missing("gated_linear_attention") is None  # whatever a nightly's Triton is called


@pytest.mark.parametrize("name", LINEAR)
def test_single_steps_are_computed_here_and_longer_calls_announced_once(name, library, calls):
    for T, called in ((1, 0), (2, 1), (20, 2)):
        run, a = given(name, T, BF16)
        run(**a, backend="fused")
        assert len(calls) == called
    wait, *copies = dict.fromkeys(library.said)
    assert wait.startswith(f"{OPERATORS[name].op}: ") and wait.endswith("minutes on tuning its kernels at first use")
    assert bool(copies) == (name == "shared")


@pytest.mark.filterwarnings("error:Dynamo detected")
def test_the_library_is_called_from_compiled_code(calls, library):
    """Its functions are marked as not to be compiled themselves."""
    library("retention", torch.compiler.disable(importlib.import_module("fla.ops.simple_gla").chunk_simple_gla))
    run, a = given("shared", 20, BF16)
    compiled = torch.compile(lambda **a: la.retention(**a)[0], backend="eager")
    assert torch.equal(compiled(**a), la.retention(**a)[0]) and len(calls) == 2


def test_calls_that_the_library_cannot_take_go_to_our_chunks(calls):
    run, a = given("gated_delta_rule", 20)
    with torch.autocast("cpu", dtype=BF16):  # the library gets 16 bits
        out = run(**a)
    _, dtypes, rest = calls.pop()
    assert dtypes == {BF16} and rest["g"].dtype == out["y"].dtype == out["state"].dtype == F32
    run(**a)  # float32
    with torch.autocast("cpu", dtype=BF16):
        assert run(**double(a))["y"].dtype == F64
    assert calls == []


@pytest.mark.parametrize("name,dtype,K,V,words", [
    ("gla", F32, 5, 7, "takes bfloat16, "), ("delta_rule", BF16, 257, 2, "up to a width of 256, not 257"),
    ("mesa", BF16, 8, 7, "of one width, at most 128, not 8 and 7"),
    ("mesa", BF16, 129, 129, "at most 128, not 129 and 129")])
def test_calls_that_the_library_cannot_take_are_refused_if_it_is_asked_for(name, dtype, K, V, words, calls):
    run, a = given(name, 3, dtype, B=1, H=1, K=K, V=V)
    run(**a)
    assert calls == []
    with pytest.raises(RuntimeError, match=f"{OPERATORS[name].op}: backend 'fused' cannot run here: .*{words}"):
        run(**a, backend="fused")
    run, a = given(name, 3, BF16, B=1, H=1, K=K - 1, V=min(V, K - 1))
    run(**a)
    assert len(calls) == 1, "the library must run at its limit"
