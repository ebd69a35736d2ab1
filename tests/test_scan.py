"""The native scan against the plain loop in float64: values, hT and every gradient; then its invariants and its edges.

The loop is fed the same rounded inputs, so what is measured is the kernel alone. The kernels compute in float32
whatever the input type, which gives two tolerances, both relative to the norm of the true result:

    float32 results (always hT, dD, ddt_bias, dh0)     16 eps(float32) = 2e-6; 5e-7 was the worst seen
    results rounded to a half type of unit eps / 2     at most eps / 2, and over many elements 0.29 eps on average

test_updates.py has kernels that are wrong on purpose, each of which must fail the comparison that the real ones pass.
All outputs are filled with NaN first, so that an element left unwritten shows.

    python -m pytest tests/test_scan.py
"""

import ctypes
import functools
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from kernels import build, scan
from kernels.scan import longhorn_scan, longhorn_scan_ref, selective_scan, selective_scan_ref

EPS = torch.finfo(torch.float32).eps
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
NAMES = ("x", "dt", "k", "q", "D", "z", "dt_bias", "h0")
OPTIONAL = ("D", "z", "dt_bias", "h0")
TINY = 1e-15  # below it a gradient is nothing: at a logit of -88 beta is 1e-38, times k^2 of 1e12 or so
property_test = settings(max_examples=40, deadline=None, derandomize=True)


pytestmark = pytest.mark.usefixtures("poison")


# ---------------------------------------------------------------------------------------------------- the comparison

def inputs(B, T, D, N, dtype=F32, key=1.0, logit=None, value=1.0, without=(), seed=0):
    """Random arguments by name; `logit` sets dt to +- that, `key` and `value` scale k and x."""
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g)
    dt = 2 * rand(B, T, D) if logit is None else logit * rand(B, T, D).sign()
    a = dict(x=value * rand(B, T, D), dt=dt, k=key * rand(B, T, N), q=rand(B, T, N), D=rand(D), z=rand(B, T, D),
             dt_bias=rand(D), h0=rand(B, D, N))
    return {n: v.to(dtype) if n in ("x", "dt", "k", "q", "z") else v for n, v in a.items() if n not in without}


def results(f, a, wide=False, through="both", terms_of_dD=False, **kw):
    """y, hT and the gradient of every argument, of a random linear loss through y, hT or both."""
    a = {n: v.detach().to(torch.float64 if wide else v.dtype).requires_grad_() for n, v in a.items()}
    y, hT = f(**a, return_state=True, **kw)
    g = torch.Generator().manual_seed(1)
    dy = torch.randn(y.shape, generator=g).to(BF16).to(y.dtype)  # bf16 so that every dtype sees the same numbers
    dhT = torch.randn(hT.shape, generator=g).to(hT.dtype)
    loss = sum(l for l, wanted in (((y * dy).sum(), "y"), ((hT * dhT).sum(), "hT")) if through in ("both", wanted))
    grads = torch.autograd.grad(loss, list(a.values()), allow_unused=True)
    tensors = {"y": y.detach(), "hT": hT.detach(), **{"d" + n: g for n, g in zip(a, grads, strict=True)}}
    if terms_of_dD:
        gate = torch.nn.functional.silu(a["z"]) if "z" in a else 1.0
        return tensors, (dy * gate * a["x"]).norm().item() if through != "hT" else 0.0
    return tensors


def distance(got, true, terms=0.0):
    """Error relative to the norm of the true result, or of the terms it is the sum of; of zeros, relative to TINY."""
    return ((got.double() - true).norm() / (max(true.norm().item(), terms) + TINY)).item()


def tolerance(got, true):
    eps = torch.finfo(got.dtype).eps
    if got.dtype == F32:
        return 16 * EPS
    # float16 results below 6e-5 are subnormal: there the rounding error is absolute
    absolute = 3e-8 * math.sqrt(true.numel()) / (true.norm().item() + TINY) if got.dtype == F16 else 0.0
    return 16 * EPS + (0.29 if got.numel() >= 1000 else 0.5) * eps + absolute


def failures(a, through="both", slack=None, fast=longhorn_scan, slow=longhorn_scan_ref, **kw):
    """What the native kernels get wrong: {result: (error, tolerance)}; empty when they agree with the truth."""
    true, dD_terms = results(slow, a, wide=True, through=through, terms_of_dD=True, **kw)
    got = results(fast, a, through=through, backend="cpu", **kw)
    # these two sum over batch and time: with one channel the terms may cancel, and their rounding errors do not
    terms = {"ddt_bias": true["ddt"].norm().item(), "dD": dD_terms}
    wrong = {}
    for name, value in got.items():
        if value is None:
            if true[name] is not None and true[name].norm() > 0:
                wrong[name] = ("missing",)
            continue
        want = torch.zeros_like(value, dtype=torch.float64) if true[name] is None else true[name]
        error = distance(value, want, terms.get(name, 0.0))
        bound = max(tolerance(value, want), slack[name] if slack else 0.0)
        if not error <= bound:  # so that NaN fails
            wrong[name] = (error, bound)
    return wrong


# ------------------------------------------------------------------------------------------- Longhorn and its relatives

def by_our_names(f, softplus):
    """Mamba's scan under the argument names of longhorn_scan."""
    def scan(x, dt, k, q, A, D=None, z=None, dt_bias=None, h0=None, return_state=False, cu_seqlens=None, **kw):
        return f(x, dt, A, k, q, D, z, dt_bias, softplus, return_state, h0, cu_seqlens, **kw)
    return scan


SCANS = {"longhorn": (longhorn_scan, longhorn_scan_ref),
         "exact": tuple(functools.partial(f, exact=True) for f in (longhorn_scan, longhorn_scan_ref)),
         "mamba": tuple(by_our_names(f, True) for f in (selective_scan, selective_scan_ref)),
         "mamba without softplus": tuple(by_our_names(f, False) for f in (selective_scan, selective_scan_ref))}
EVERY = pytest.mark.parametrize("update", SCANS)
OTHERS = list(SCANS)[1:]


def inputs_of(update, *shape, **kw):
    a = inputs(*shape, **kw)
    if update.startswith("mamba"):
        a["A"] = -torch.rand(shape[2], shape[3], generator=torch.Generator().manual_seed(5)) * 4
        if update != "mamba":  # delta itself: positive
            a.update({n: a[n].abs() / 4 for n in ("dt", "dt_bias") if n in a})
    return a


def failures_of(update, a, **kw):
    fast, slow = SCANS[update]
    return failures(a, fast=fast, slow=slow, **kw)


# -------------------------------------------------------------------------------------------------- against the truth

LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 300)
STATES = (1, 2, 3, 4, 5, 8, 16, 32, 64, 128)
CHANNELS = (1, 5, 16, 17, 33)


@pytest.mark.parametrize("update,B,T,D,N", [
    *(("longhorn", 2, T, 17, N) for N in (4, 16) for T in LENGTHS),
    *(("longhorn", 1 + D % 3, 37, D, N) for N in STATES for D in CHANNELS),
    *((update, 2, *shape) for update in OTHERS for shape in (
        (1, 17, 16), (33, 33, 8), (70, 17, 4), (129, 20, 16), (40, 3, 1), (37, 18, 64)))])
def test_kernels_agree_with_the_loop(update, B, T, D, N):
    assert not failures_of(update, inputs_of(update, B, T, D, N))


@EVERY
@pytest.mark.parametrize("present", range(16))
def test_every_choice_of_optional_arguments(update, present):
    without = [n for i, n in enumerate(OPTIONAL) if not present >> i & 1]
    assert not failures_of(update, inputs_of(update, 2, 35, 18, 16, without=without))
    through = "hT" if present % 3 else "y"
    assert not failures_of(update, inputs_of(update, 3, 40, 18, 3, without=without), through=through)


@pytest.mark.parametrize("wanted", NAMES)
def test_gradient_of_one_argument_alone(wanted):
    a, g = inputs(2, 40, 17, 16), torch.Generator().manual_seed(1)
    true = results(longhorn_scan_ref, a, wide=True)["d" + wanted]
    a[wanted].requires_grad_()
    y, hT = longhorn_scan(**a, return_state=True)
    dy, dhT = torch.randn(y.shape, generator=g).to(BF16).float(), torch.randn(hT.shape, generator=g)
    assert distance(*torch.autograd.grad((y, hT), a[wanted], (dy, dhT)), true) <= 16 * EPS


EXTREMES = [dict(key=1e-3), dict(key=1e3), dict(key=1e6), dict(logit=300.0), dict(logit=1000.0), dict(logit=0.0),
            dict(value=1e6), dict(value=1e-6), dict(key=1e3, value=1e6), dict(key=1e6, logit=1000.0),
            dict(key=1e-3, logit=300.0)]


@pytest.mark.parametrize("update,kw,N", [
    *(("longhorn", kw, N) for N in (1, 5, 16) for kw in EXTREMES),
    *((update, kw, 8) for update in OTHERS for kw in (dict(key=1e-3), dict(key=1e3), dict(logit=300.0), dict(value=1e6),
                                                      dict(key=1e3, logit=1000.0)))], ids=str)
def test_extreme_values(update, kw, N):
    """Some of these are ill-conditioned (N = 1 and a huge key: 1 - eps k^2 cancels), so that no float32 arithmetic can
    be exact there: then the kernels may err four times as much as the loop does in float32."""
    a = inputs_of(update, 2, 40, 17, N, **kw)
    if update.startswith("mamba"):
        a["dt"] = a["dt"].clamp(max=30)  # a delta of 1000 is no step size: its state overflows in the loop too
    fast, slow = SCANS[update]
    assert all(v.isfinite().all() for v in results(fast, a).values())
    true, loop = results(slow, a, wide=True), results(slow, a)
    slack = {n: 4 * distance(loop[n], true[n]) for n in true}
    assert not failures_of(update, a, slack=slack)
    if N == 16:
        assert not {n for n, s in slack.items() if s > 2e-5}  # the slack is not what makes the usual size pass


def test_scratch_memory_is_written_before_it_is_read():
    """glibc can fill what malloc hands out with a byte of our choice: 0x7f7f7f7f as a float is 3e38."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) or pytest.skip("this C library has no mallopt")
    a = inputs(2, 45, 21, 5), inputs(1, 45, 21, 16)
    mallopt(-6, 0x80)  # M_PERTURB: allocated bytes are its complement
    try:
        wrong = [failures(v) for v in a]
    finally:
        mallopt(-6, 0)
    assert wrong == [{}, {}]


# ----------------------------------------------------------------------------------------------- sources with mistakes

def source_text(source=build.SCAN):
    """A source of the kernels with lanes.h in the place of its #include."""
    header = build.HEADER.read_text().replace("#pragma once\n", "")
    text, n = re.subn(r'#include "(kernels/)?lanes\.h"\n', lambda _: header, source.read_text())
    assert n == 1
    return text


def with_mistake(text, place, mistake):
    """The source with `mistake` in front of the line that a comment marks as `test: place`."""
    text, n = re.subn(rf"(?m)^.*\btest: {place}$", lambda line: f"{mistake} {line[0]}", text)
    assert n == 1, place
    return text


# ------------------------------------------------------------------------------------------------------ the loop itself

def whole_loop(x, dt, k, q, D, z, dt_bias, h0, return_state=True, A=None, update="longhorn"):
    name = {"mamba": "mamba_softplus", "mamba without softplus": "mamba"}.get(update, update)
    return scan._loop(name, x, dt, k, q, A, D, z, dt_bias, h0)


@EVERY
def test_torch_backend_equals_the_loop(update):
    """It runs in pieces that the backward recomputes."""
    a = inputs_of(update, 2, 150, 5, 4)
    want = results(functools.partial(whole_loop, update=update), a, wide=True)
    got = results(SCANS[update][0], a, wide=True, backend="torch")
    assert all(distance(got[n], want[n]) <= 1e-14 for n in want)
    got = results(SCANS[update][0], inputs_of(update, 2, 150, 5, 4, dtype=BF16), backend="torch")
    assert got["y"].dtype == got["dx"].dtype == BF16 and got["hT"].dtype == got["dh0"].dtype == F32


def test_hand_computed_step():
    """beta = 1/2, k = (1, 2), x = 3, S_0 = (1, 1): eps = 0.5 / (1 + 0.5 * 5) = 1/7."""
    one = torch.tensor
    args = one([[[3.0]]]), one([[[0.0]]]), one([[[1.0, 2.0]]]), one([[[1.0, 10.0]]])
    want = [6 / 7 + 3 / 7, 3 / 7 + 6 / 7]  # (1 - eps k_j^2) S_j + eps x k_j
    for f in (longhorn_scan, longhorn_scan_ref):
        y, hT = f(*args, h0=one([[[1.0, 1.0]]]), return_state=True)
        assert hT[0, 0].tolist() == pytest.approx(want, rel=4 * EPS)
        assert y.item() == pytest.approx(want[0] + 10 * want[1], rel=4 * EPS)


@given(N=st.integers(1, 6), seed=st.integers(0, 1000), logit=st.floats(-5, 5), key=st.sampled_from([0.1, 1.0, 10.0]))
@property_test
def test_a_step_minimises_eq5(N, seed, logit, key):
    """With the full matrix I - eps k k^T, S_t is the minimiser of Eq. 5; the scan's diagonal equals it for N = 1."""
    g = torch.Generator().manual_seed(seed)
    S0, x = torch.randn(3, N, generator=g).double(), torch.randn(3, generator=g).double()
    k, dt = key * torch.randn(N, generator=g).double(), logit + torch.randn(3, generator=g).double()
    # the gradient of |S - S0|^2 + |S k - x|^2_diag(beta) is zero where S_i (I + beta_i k k^T) = S0_i + beta_i x_i k
    beta = dt.sigmoid()
    normal = torch.eye(N).double() + beta[:, None, None] * torch.outer(k, k)
    solved = torch.linalg.solve(normal, S0 + (beta * x)[:, None] * k)
    for f, dtype, tolerance in ((longhorn_scan_ref, torch.float64, 1e-9), (longhorn_scan, F32, 1e-4)):
        x1, dt1, k1, S1 = (v[None].to(dtype) for v in (x[None], dt[None], k[None], S0))
        for exact in (True, False) if N == 1 else (True,):
            _, hT = f(x1, dt1, k1, k1, h0=S1, return_state=True, exact=exact)
            assert torch.allclose(hT[0].double(), solved, rtol=tolerance, atol=tolerance / 10)


# ----------------------------------------------------------------------------------------------- chunks and determinism

@given(cuts=st.lists(st.integers(1, 99), max_size=4, unique=True), N=st.sampled_from([1, 3, 16]),
       dtype=st.sampled_from([F32, BF16]))
@property_test
def test_chunks_with_carried_state_equal_the_whole(cuts, N, dtype):
    """To the bit, whatever the cuts: a step is the same arithmetic wherever it stands."""
    a = inputs(2, 100, 19, N, dtype)
    want, hT = longhorn_scan(**a, return_state=True)
    edges, h, ys = [0, *sorted(cuts), 100], a["h0"], []
    for first, last in zip(edges, edges[1:], strict=False):
        part = {n: v[:, first:last] if n in ("x", "dt", "k", "q", "z") else v for n, v in a.items()}
        y, h = longhorn_scan(**{**part, "h0": h}, return_state=True)
        ys.append(y)
    assert torch.equal(torch.cat(ys, 1), want) and torch.equal(h, hT)


@pytest.mark.parametrize("cut", (1, 32, 45))
def test_gradients_through_two_chunks_equal_the_whole(cut):
    def two(h0, D, dt_bias, return_state, backend, **a):
        rest = dict(D=D, dt_bias=dt_bias, return_state=True)
        y1, h = longhorn_scan(**{n: v[:, :cut] for n, v in a.items()}, h0=h0, **rest)
        y2, h = longhorn_scan(**{n: v[:, cut:] for n, v in a.items()}, h0=h, **rest)
        return torch.cat([y1, y2], 1), h

    assert not failures(inputs(2, 70, 19, 16), fast=two)


@pytest.mark.parametrize("update,B,D,N", [("longhorn", 1, 33, 16), ("longhorn", 3, 70, 5), ("longhorn", 2, 16, 1),
                                          *((update, 3, 33, 16) for update in OTHERS)])
def test_two_runs_agree_to_the_bit(update, B, D, N, threads):
    a, runs = inputs_of(update, B, 100, D, N), []
    for number in (1, 1, 2, 2, 2):
        threads(number)
        runs.append(results(SCANS[update][0], a))
    for i, j in ((0, 1), (2, 3), (2, 4)):
        assert all(torch.equal(runs[i][n], runs[j][n]) for n in runs[i])
    # between thread counts only dk and dq may differ, by the order in which splits of the channels are added
    assert {n for n in runs[0] if not torch.equal(runs[0][n], runs[2][n])} <= {"dk", "dq"}
    assert all(distance(runs[0][n], runs[2][n].double()) <= 4 * EPS for n in ("dk", "dq"))


# ---------------------------------------------------------------------------------------------------------------- views

def views(v):
    """The same numbers laid out otherwise."""
    n = v.shape[-1]
    half, middle, step = (torch.full((*v.shape[:-1], 2 * n + 3), math.nan, dtype=v.dtype) for _ in range(3))
    half[..., n + 3:], middle[..., 1:1 + n], step[..., 0:2 * n:2] = v, v, v
    every = torch.full((v.shape[0], 2 * v.shape[1], v.shape[2]), math.nan, dtype=v.dtype)
    every[:, 1::2] = v
    yield from (half[..., n + 3:], middle[..., 1:1 + n], step[..., 0:2 * n:2], every[:, 1::2])
    yield v.transpose(0, 1).contiguous().transpose(0, 1)
    yield v.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("update,dtype,D,N", [
    *(("longhorn", dtype, D, N) for dtype in (F32, BF16) for D, N in ((17, 16), (32, 5))),
    *((update, F32, 33, 16) for update in OTHERS)])
def test_views_equal_contiguous_to_the_bit(update, dtype, D, N):
    f, a = SCANS[update][0], inputs_of(update, 2, 35, D, N, dtype=dtype)
    want = results(f, a)
    for name in ("x", "dt", "k", "q", "z", "h0"):
        for i, view in enumerate(views(a[name])):
            assert torch.equal(view, a[name]) and not view.is_contiguous()
            got = results(f, {**a, name: view})
            assert all(torch.equal(got[n], want[n]) for n in want), (name, i)


def test_gradients_that_arrive_as_views():
    """y.sum() hands the backward an expanded dy of stride 0, a transposed consumer a transposed one."""
    a = {n: v.requires_grad_() for n, v in inputs(2, 35, 17, 16).items()}
    for use in (lambda y: y, lambda y: y.transpose(1, 2).contiguous() * torch.arange(35.0),
                lambda y: y[:, ::2], lambda y: y[..., 3:9]):
        got = torch.autograd.grad(use(longhorn_scan(**a)).sum(), list(a.values()))
        true = use(longhorn_scan_ref(**{n: v.double() for n, v in a.items()})).sum()
        want = torch.autograd.grad(true, list(a.values()))
        assert all(distance(u, v.double()) <= 32 * EPS for u, v in zip(got, want, strict=True))


# ------------------------------------------------------------------------------------------------ as a PyTorch operator

@pytest.mark.parametrize("update,cu", [("longhorn", None), ("mamba_softplus", torch.tensor([0, 33, 34]))])
def test_opcheck(update, cu):
    """These sequences leave no gap in the chunk states, whose unwritten numbers would differ."""
    torch.use_deterministic_algorithms(False)
    a = inputs_of(update, 1, 34, 3, 2) | {"h0": torch.zeros(1 if cu is None else 2, 3, 2)}
    args = [a.get(n) for n in ("x", "dt", "k", "q", "A", "D", "z", "dt_bias", "h0")]
    y, hT, chunks = torch.ops.longhorn.scan(*args, cu, update, True, False)
    torch.library.opcheck(torch.ops.longhorn.scan_backward.default, (
        torch.randn_like(y), None, *args[:5], *[None] * 4, cu, update, True, False, chunks))
    args = [None if v is None else v.requires_grad_() for v in args]
    torch.library.opcheck(torch.ops.longhorn.scan.default, (*args, cu, update, True, cu is None))


def test_mixed_dtypes_are_promoted():
    a = inputs(1, 5, 3, 2)
    y = longhorn_scan(a["x"].to(BF16), a["dt"], a["k"].to(F16), a["q"])
    assert y.dtype == BF16
    assert torch.equal(y, longhorn_scan(a["x"].to(BF16).float(), a["dt"], a["k"].to(F16).float(), a["q"]).to(BF16))


@pytest.mark.parametrize("backend", ("cpu", "torch"))
def test_inside_activation_checkpointing(backend):
    a = inputs(2, 70, 17, 3)
    want = results(longhorn_scan, a, backend=backend)

    def f(*, return_state, **a):
        return checkpoint(longhorn_scan, **a, return_state=return_state, backend=backend, use_reentrant=False)

    got = results(f, a)
    assert all(torch.equal(got[n], want[n]) for n in want)


# --------------------------------------------------------------------------------------------------------------- memory

def saved_bytes(f, a):
    """Bytes of distinct storages that autograd keeps after the forward."""
    kept = {}
    pack = lambda v: kept.update({v.untyped_storage().data_ptr(): v.untyped_storage().nbytes()}) or v
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
        y, hT = f(**{n: v.requires_grad_() for n, v in a.items()}, return_state=True)
    return sum(kept.values())


def test_native_keeps_the_inputs_and_the_chunk_states():
    a, state = inputs(1, 2048, 64, 16), 4 * 64 * 16
    given = sum(v.untyped_storage().nbytes() for v in a.values())
    assert saved_bytes(longhorn_scan, a) <= given + math.ceil(2048 / build.CHUNK) * state
    short = inputs(1, 512, 64, 16)
    assert saved_bytes(whole_loop, short) > 3 * 512 * state  # the hook sees a loop that keeps every state
    assert saved_bytes(functools.partial(longhorn_scan, backend="torch"), short) < 512 * state  # it recomputes


# --------------------------------------------------------------------------------------------------------------- errors

# of (B, T, D, N) = (2, 4, 3, 2): the update, an argument, what is made of it, words of the refusal
sized = lambda *shape, **kw: lambda a: torch.zeros(*shape, **kw)
BAD = [("longhorn", "x", sized(4, 3), "x must be (B, T, D)", "(4, 3)"),
       ("longhorn", "x", sized(2, 0, 3), "at least 1", "(2, 0, 3)"),
       ("longhorn", "dt", sized(2, 5, 3), "dt must be (2, 4, 3)", "(2, 5, 3)"),
       ("longhorn", "dt", lambda a: None, "dt must be (2, 4, 3)", "None"),
       ("longhorn", "k", sized(1, 4, 2), "k must be (2, 4, 2)", "(1, 4, 2)"),
       ("longhorn", "q", sized(2, 4, 7), "q must be (2, 4, 2)", "(2, 4, 7)"),
       ("longhorn", "z", sized(2, 4, 1), "z must be (2, 4, 3)", "(2, 4, 1)"),
       ("longhorn", "D", sized(1, 3), "D must be (3,)", "(1, 3)"),
       ("longhorn", "dt_bias", sized(1, 3), "dt_bias must be (3,)", "(1, 3)"),
       ("longhorn", "h0", sized(2, 2, 3), "h0 must be (2, 3, 2)", "(2, 2, 3)"),
       ("longhorn", "k", sized(2, 4, 2, device="meta"), "k is on meta", "x on cpu"),
       ("longhorn", "dt", lambda a: a.long(), "dt must be floating point", "torch.int64"),
       ("longhorn", "q", lambda a: a.to(torch.float8_e4m3fn), "q must be floating point", "float8"),
       ("longhorn", "h0", lambda a: a.numpy(), "h0 must be a torch.Tensor", "ndarray"),
       ("longhorn", "z", lambda a: a.to_sparse(), "z must be a strided tensor", "sparse"),
       ("longhorn", "x", lambda a: torch.nested.nested_tensor(list(a)), "x must be a strided tensor", "nested"),
       ("mamba", "A", sized(2, 3), "A must be (3, 2)", "(2, 3)"), ("mamba", "A", lambda a: None, "A must be"),
       ("mamba", "dt", lambda a: a.tolist(), "delta must be a torch.Tensor", "list"),
       ("mamba", "k", sized(2, 4, 4), "C must be (2, 4, 4)", "(2, 4, 2)")]


@pytest.mark.filterwarnings("ignore")  # PyTorch's, on nested and sparse tensors
@pytest.mark.parametrize("update,name,change,words", [(*row[:3], row[3:]) for row in BAD])
def test_misfits_are_one_line(update, name, change, words):
    a = inputs_of(update, 2, 4, 3, 2)
    for f in SCANS[update]:
        f(**a)  # what has passed is not checked again
        with pytest.raises(ValueError) as error:
            f(**{**a, name: change(a[name])})
        assert "\n" not in str(error.value) and all(w in str(error.value) for w in words), error.value


def test_meta_tensors_have_shapes():
    y, hT = longhorn_scan(**{n: v.to("meta") for n, v in inputs(1, 2, 3, 2, BF16).items()}, return_state=True)
    assert (y.shape, y.dtype, hT.shape, hT.dtype) == ((1, 2, 3), BF16, (1, 3, 2), F32)
