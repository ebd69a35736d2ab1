"""The native scans against the plain loops in float64: values, hT and every gradient; then their invariants and edges.

The loop is fed the same rounded inputs, so what is measured is the kernel alone. The kernels compute in float32
whatever the input type, which gives two tolerances, both relative to the norm of the true result:

    float32 results (always hT, dA, dD, ddt_bias, dh0)  16 eps(float32) = 2e-6; 5e-7 was the worst seen
    results rounded to a half type of unit eps / 2      at most eps / 2, and over many elements 0.29 eps on average

All outputs are filled with NaN first, so that an element left unwritten shows. The loops themselves are held against
formulas written otherwise in test_model.py, test_export.py and experiments/objectives.py.

    python -m pytest tests/test_scan.py
"""

import ctypes
import functools
import inspect
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import (
    BF16,
    EPS,
    F16,
    F32,
    OPTIONAL,
    ROWS,
    SCANS,
    distance,
    failures,
    inputs,
    packed,
    results,
    views,
    weights,
    what_autograd_keeps,
)

from kernels import build
from kernels.scan import longhorn_scan, longhorn_scan_ref, selective_scan

NAMES = ("x", "dt", "k", "q", "D", "z", "dt_bias", "h0")
property_test = settings(max_examples=40, deadline=None, derandomize=True)

pytestmark = pytest.mark.usefixtures("poison")


EVERY = pytest.mark.parametrize("update", SCANS)
OTHERS = list(SCANS)[1:]


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
    assert not failures(update, inputs(update, B, T, D, N))


@EVERY
@pytest.mark.parametrize("dtype", (BF16, F16))
def test_half_types(update, dtype):
    for shape in ((2, 65, 17, 16), (1, 33, 5, 3), (2, 1, 5, 1), (2, 129, 33, 16), (2, 65, 16, 64)):
        assert not failures(update, inputs(update, *shape, dtype=dtype))


@EVERY
@pytest.mark.parametrize("present", range(16))
def test_every_choice_of_optional_arguments(update, present):
    without = [n for i, n in enumerate(OPTIONAL) if not present >> i & 1]
    assert not failures(update, inputs(update, 2, 35, 18, 16, without=without))
    through = "hT" if present % 3 else "y"
    assert not failures(update, inputs(update, 3, 40, 18, 3, without=without), through=through)


@pytest.mark.parametrize("wanted", NAMES)
def test_gradient_of_one_argument_alone(wanted):
    a = inputs("longhorn", 2, 40, 17, 16)
    true = results(longhorn_scan_ref, a, wide=True)["d" + wanted]
    a[wanted].requires_grad_()
    y, hT = longhorn_scan(**a, return_state=True)
    assert distance(*torch.autograd.grad((y, hT), a[wanted], weights(y, hT)), true) <= 16 * EPS


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
    a = inputs(update, 2, 40, 17, N, **kw)
    if update.startswith("mamba"):
        a["dt"] = a["dt"].clamp(max=30)  # a delta of 1000 is no step size: its state overflows in the loop too
    true, loop = (results(SCANS[update][1], a, wide=wide) for wide in (True, False))
    slack = {n: 4 * distance(loop[n], true[n]) for n in true}
    assert not failures(update, a, slack=slack)
    if N == 16:
        assert not {n for n, s in slack.items() if s > 2e-5}  # the slack is not what makes the usual size pass


@EVERY
def test_finite_inputs_give_finite_results(update):
    for key in (0.0, 1e-20, 1e10, 1e18):
        for logit in (-1000.0, -88.0, 0.0, 20.0, 1000.0):
            if update.startswith("mamba") and (logit > 20 or key > 1e10):
                continue  # no step size and no key: its state overflows in the loop too
            a = inputs(update, 1, 34, 17, 16, key=key)
            a["dt"].fill_(max(logit, 0.0) if update == "mamba without softplus" else logit)
            a["z"][0, ::2], a["z"][0, 1::2] = 1000.0, -1000.0
            got = results(SCANS[update][0], a)
            assert not [n for n, v in got.items() if not v.isfinite().all()], (key, logit)


def test_scratch_memory_is_written_before_it_is_read():
    """glibc can fill what malloc hands out with a byte of our choice: 0x7f7f7f7f as a float is 3e38."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) or pytest.skip("this C library has no mallopt")
    mallopt(-6, 0x80)  # M_PERTURB: allocated bytes are its complement
    try:
        wrong = [failures("longhorn", inputs("longhorn", B, 45, 21, N)) for B, N in ((2, 5), (1, 16))]
    finally:
        mallopt(-6, 0)
    assert wrong == [{}, {}]


# ------------------------------------------------------------------------------------------------------ the loop itself

def test_selective_scan_has_mamba_ssms_signature():
    """The arguments of mamba_ssm.ops.selective_scan_interface.selective_scan_fn, by name and in their order."""
    names = "u delta A B C D z delta_bias delta_softplus return_last_state".split()
    assert list(inspect.signature(selective_scan).parameters)[:len(names)] == names


# ---------------------------------------------------------------------------------- chunks, packed sequences, backwards

@given(cuts=st.lists(st.integers(1, 99), max_size=4, unique=True), N=st.sampled_from([1, 3, 16]),
       dtype=st.sampled_from([F32, BF16]))
@property_test
def test_chunks_with_carried_state_equal_the_whole(cuts, N, dtype):
    """To the bit, whatever the cuts: a step is the same arithmetic wherever it stands."""
    a = inputs("longhorn", 2, 100, 19, N, dtype)
    want, hT = longhorn_scan(**a, return_state=True)
    edges, h, ys = [0, *sorted(cuts), 100], a["h0"], []
    for first, last in zip(edges, edges[1:], strict=False):
        part = {n: v[:, first:last] if n in ROWS else v for n, v in a.items()}
        y, h = longhorn_scan(**{**part, "h0": h}, return_state=True)
        ys.append(y)
    assert torch.equal(torch.cat(ys, 1), want) and torch.equal(h, hT)


def flipped(f):
    """f from the last step to the first, by flips alone; packed sequences each for itself."""
    def run(reverse, cu_seqlens=None, **a):
        ends = [0, a["x"].shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        flip = lambda v: torch.cat([v[:, i:j].flip(1) for i, j in zip(ends, ends[1:], strict=False)], 1)
        y, hT = f(**{n: flip(v) if n in ROWS else v for n, v in a.items()}, cu_seqlens=cu_seqlens)
        return flip(y), hT
    return run


@EVERY
@pytest.mark.parametrize("backend", ("cpu", "torch"))
def test_reverse_is_the_scan_of_what_is_flipped(update, backend):
    fast, slow = SCANS[update]
    kw = dict(fast=lambda backend, **a: fast(**a, backend="torch")) if backend == "torch" else {}
    kw |= dict(slow=flipped(slow), reverse=True)
    for shape, dtype in (((3, 33, 19, 16), F32), ((2, 70, 5, 3), F32), ((1, 9, 5, 4), BF16)):
        a = inputs(update, *shape, dtype=dtype)
        assert not failures(update, a, **kw)
        assert not failures(update, {n: a[n] for n in a if n not in ("h0", "D", "z")}, "y", **kw)
    a, cu = packed(update, [3, 0, 40, 1], 17, 16)
    assert not failures(update, a, cu_seqlens=cu, **kw)


@EVERY
@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [32, 32], [31, 33, 1, 64], [3, 0, 40, 0]], ids=str)
def test_packed_sequences_are_separate_sequences(update, lengths):
    """Against the float64 loop over each sequence alone, every gradient; and to the bit the kernels over each."""
    half, cu = packed(update, lengths, 20, 3, BF16)
    assert not failures(update, half, cu_seqlens=cu.int())
    a, cu = packed(update, lengths, 17, 16)
    assert not failures(update, a, cu_seqlens=cu)
    y, hT = SCANS[update][0](**a, cu_seqlens=cu, return_state=True)
    for s, (start, end) in enumerate(zip(cu.tolist(), cu.tolist()[1:], strict=False)):
        if start == end:
            assert torch.equal(hT[s], a["h0"][s])
            continue
        alone = {n: v[:, start:end] if n in ROWS else v for n, v in a.items()}
        y_alone, h_alone = SCANS[update][0](**{**alone, "h0": a["h0"][s:s + 1]}, return_state=True)
        assert torch.equal(y[:, start:end], y_alone) and torch.equal(hT[s:s + 1], h_alone)
    without = {n: v for n, v in a.items() if n != "h0"}
    from_zero = SCANS[update][0](**without, h0=torch.zeros_like(a["h0"]), cu_seqlens=cu)
    assert torch.equal(SCANS[update][0](**without, cu_seqlens=cu), from_zero)


@pytest.mark.parametrize("update,B,D,N", [("longhorn", 1, 33, 16), ("longhorn", 3, 70, 5), ("longhorn", 2, 16, 1),
                                          *((update, 3, 33, 16) for update in OTHERS)])
def test_two_runs_agree_to_the_bit(update, B, D, N, threads):
    a, runs = inputs(update, B, 100, D, N), []
    for number in (1, 1, 2, 2, 2, 5):  # of five each has a group of channels or none
        threads(number)
        runs.append(results(SCANS[update][0], a))
    for i, j in ((0, 1), (2, 3), (2, 4)):
        assert all(torch.equal(runs[i][n], runs[j][n]) for n in runs[i])
    # between thread counts only dk and dq may differ, by the order in which splits of the channels are added
    for other in (runs[2], runs[5]):
        assert {n for n in other if not torch.equal(runs[0][n], other[n])} <= {"dk", "dq"}
        assert all(distance(runs[0][n], other[n].double()) <= 4 * EPS for n in ("dk", "dq"))


# ---------------------------------------------------------------------------------------------------------------- views


@pytest.mark.parametrize("update,dtype,D,N", [
    *(("longhorn", dtype, D, N) for dtype in (F32, BF16) for D, N in ((17, 16), (32, 5))),
    *((update, F32, 33, 16) for update in OTHERS)])
def test_views_equal_contiguous_to_the_bit(update, dtype, D, N):
    f, a = SCANS[update][0], inputs(update, 2, 35, D, N, dtype=dtype)
    for reverse in (False, True):
        want = results(f, a, reverse=reverse)
        for name, i in itertools.product((*ROWS, "h0"), range(5)):
            view = list(views(a[name]))[i]
            assert torch.equal(view, a[name]) and not view.is_contiguous()
            got = results(f, {**a, name: view}, reverse=reverse)
            assert all(torch.equal(got[n], want[n]) for n in want), (name, i)


def test_gradients_that_arrive_as_views():
    """y.sum() hands the backward an expanded dy of stride 0, a transposed consumer a transposed one."""
    a = {n: v.requires_grad_() for n, v in inputs("longhorn", 2, 35, 17, 16).items()}
    for use in (lambda y: y, lambda y: y.transpose(1, 2).contiguous() * torch.arange(35.0)):
        got = torch.autograd.grad(use(longhorn_scan(**a)).sum(), list(a.values()))
        true = use(longhorn_scan_ref(**{n: v.double() for n, v in a.items()})).sum()
        want = torch.autograd.grad(true, list(a.values()))
        assert all(distance(u, v.double()) <= 32 * EPS for u, v in zip(got, want, strict=True))


# ------------------------------------------------------------------------------------------------ as a PyTorch operator

@pytest.mark.parametrize("update,cu", [("longhorn", None), ("mamba_softplus", torch.tensor([0, 33, 34]))])
def test_opcheck(update, cu):
    """These sequences leave no gap in the chunk states, whose unwritten numbers would differ."""
    torch.use_deterministic_algorithms(False)
    a = inputs(update, 1, 34, 3, 2) | {"h0": torch.zeros(1 if cu is None else 2, 3, 2)}
    args = [a.get(n) for n in ("x", "dt", "k", "q", "A", "D", "z", "dt_bias", "h0")]
    y, hT, chunks = torch.ops.longhorn.scan(*args, cu, update, True, False)
    torch.library.opcheck(torch.ops.longhorn.scan_backward.default, (
        torch.randn_like(y), None, *args[:5], *[None] * 4, cu, update, True, False, chunks))
    args = [None if v is None else v.requires_grad_() for v in args]
    torch.library.opcheck(torch.ops.longhorn.scan.default, (*args, cu, update, True, cu is None))


@pytest.mark.parametrize("update,lengths", [("longhorn", [8, 12]), ("mamba", None)])
def test_compiles_as_one_graph(update, lengths):
    a, cu = packed(update, lengths, 5, 4) if lengths else (inputs(update, 2, 70, 5, 4), None)
    want = results(SCANS[update][0], a, cu_seqlens=cu)
    torch._dynamo.reset()
    got = results(torch.compile(SCANS[update][0], fullgraph=True, backend="aot_eager"), a, cu_seqlens=cu)
    assert all(torch.equal(got[n], want[n]) for n in want)


@EVERY
@pytest.mark.parametrize("backend", ("cpu", "torch"))
def test_autocast_leaves_parameters_in_float32(update, backend):
    a = {n: v.requires_grad_() for n, v in inputs(update, 2, 40, 17, 16).items()}
    scan = functools.partial(SCANS[update][0], return_state=True, backend=backend)
    with torch.autocast("cpu", BF16):
        y, hT = scan(**a)
        grads = torch.autograd.grad(y.float().sum() + hT.sum(), list(a.values()))
    assert y.dtype == BF16 and hT.dtype == F32 and all(g.dtype == F32 for g in grads)
    rounded = {n: v.detach().to(BF16) if n in ROWS else v.detach() for n, v in a.items()}
    want, hT_want = scan(**rounded)
    assert torch.equal(y, want) and torch.equal(hT, hT_want)


def test_mixed_dtypes_are_promoted():
    a = inputs("longhorn", 1, 5, 3, 2)
    y = longhorn_scan(a["x"].to(BF16), a["dt"], a["k"].to(F16), a["q"])
    assert y.dtype == BF16
    assert torch.equal(y, longhorn_scan(a["x"].to(BF16).float(), a["dt"], a["k"].to(F16).float(), a["q"]).to(BF16))


@pytest.mark.parametrize("backend,T,kept", [("cpu", 2048, 2048 // build.CHUNK), ("torch", 512, 512)])
def test_what_autograd_keeps(backend, T, kept):
    """Beside the inputs the kernels keep a state per chunk; the loop, which computes them again, less than all."""
    a = inputs("longhorn", 1, T, 64, 16)
    given = sum(v.untyped_storage().nbytes() for v in a.values()) if backend == "cpu" else 0
    with what_autograd_keeps() as storages:
        y, hT = longhorn_scan(**{n: v.requires_grad_() for n, v in a.items()}, return_state=True, backend=backend)
    assert sum(storages.values()) <= given + kept * 4 * 64 * 16


# ------------------------------------------------------------------------------------------------------------- refusals

sized = lambda *shape, **kw: lambda a: torch.zeros(*shape, **kw)
cu = lambda *ends: lambda _: torch.tensor(ends)
BAD = [  # of (B, T, D, N) = (2, 4, 3, 2): the update, an argument, what is made of it, words of the refusal
    ("longhorn", "x", sized(4, 3), "x must be (B, T, D)", "(4, 3)"),
    ("longhorn", "x", sized(2, 0, 3), "at least 1", "(2, 0, 3)"),
    ("longhorn", "dt", sized(2, 5, 3), "dt must be (2, 4, 3)", "(2, 5, 3)"),
    ("longhorn", "dt", lambda a: None, "dt must be (2, 4, 3)", "None"),
    ("longhorn", "k", sized(1, 4, 2), "k must be (2, 4, 2)", "(1, 4, 2)"),
    ("longhorn", "q", sized(2, 4, 7), "q must be (2, 4, 2)"), ("longhorn", "z", sized(2, 4, 1), "z must be (2, 4, 3)"),
    ("longhorn", "D", sized(1, 3), "D must be (3,)"), ("longhorn", "dt_bias", sized(1, 3), "dt_bias must be (3,)"),
    ("longhorn", "h0", sized(2, 2, 3), "h0 must be (2, 3, 2)", "(2, 2, 3)"),
    ("longhorn", "k", sized(2, 4, 2, device="meta"), "k is on meta", "x on cpu"),
    ("longhorn", "dt", lambda a: a.long(), "dt must be floating point", "torch.int64"),
    ("longhorn", "h0", lambda a: a.numpy(), "h0 must be a torch.Tensor", "ndarray"),
    ("longhorn", "z", lambda a: a.to_sparse(), "z must be a strided tensor", "sparse"),
    ("longhorn", "x", lambda a: torch.nested.nested_tensor(list(a)), "x must be a strided tensor", "nested"),
    ("mamba", "A", sized(2, 3), "A must be (3, 2)", "(2, 3)"),
    ("mamba", "dt", sized(2, 5, 3), "delta must be (2, 4, 3)"),
    ("mamba", "k", sized(2, 4, 4), "C must be (2, 4, 4)", "(2, 4, 2)"),
    ("longhorn", "cu_seqlens", cu(0, 4), "B = 2: flatten"),
    # of the same rows packed, T = 8
    ("packed", "cu_seqlens", cu(0, 5), "rise from 0 to T = 8", "[0, 5]"), ("packed", "cu_seqlens", cu(1, 8), "rise"),
    ("packed", "cu_seqlens", cu(0, 6, 4, 8), "rise from 0", "[0, 6, 4, 8]"), ("packed", "cu_seqlens", cu(8), "(1,)"),
    ("packed", "cu_seqlens", cu(0.0, 8.0), "int32 or int64", "float32"),
    ("packed", "cu_seqlens", lambda _: torch.tensor([[0, 8]]), "(1, 2)"),
    ("packed", "cu_seqlens", lambda _: torch.tensor([0, 8], device="meta"), "cu_seqlens is on meta"),
    ("packed", "h0", lambda h0: h0[:1], "h0 must be (2, 3, 2)", "got (1, 3, 2)")]


@pytest.mark.filterwarnings("ignore")  # PyTorch's, on nested and sparse tensors
@pytest.mark.parametrize("update,name,change,words", [(*row[:3], row[3:]) for row in BAD])
def test_misfits_are_one_line(update, name, change, words):
    a = inputs(update, 2, 4, 3, 2)
    if update == "packed":
        a, ends = packed("longhorn", [4, 4], 3, 2)
        a["cu_seqlens"] = ends
    for f in SCANS.get(update, SCANS["longhorn"]):
        f(**a)  # what has passed is not checked again, but for the values of cu_seqlens
        with pytest.raises(ValueError) as error:
            f(**{**a, name: change(a.get(name))})
        assert "\n" not in str(error.value) and all(w in str(error.value) for w in words), error.value
