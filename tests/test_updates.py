"""Mamba's selective scan, the exact Longhorn, and packed sequences: kernels against the loops.

The comparison is that of test_scan.py, and the loops themselves are held against formulas written otherwise.

    python -m pytest tests/test_updates.py
"""

import ctypes
import functools
import inspect
import os
from unittest import mock

import pytest
import torch
from test_scan import (
    BF16,
    EPS,
    EVERY,
    F16,
    F32,
    SCANS,
    distance,
    failures,
    failures_of,
    inputs,
    inputs_of,
    results,
    source_text,
    with_mistake,
)

from kernels import build
from kernels.scan import longhorn_scan, longhorn_scan_ref, selective_scan, selective_scan_ref

pytestmark = pytest.mark.usefixtures("poison")


@EVERY
@pytest.mark.parametrize("dtype", (BF16, F16))
def test_half_types(update, dtype):
    for shape in ((2, 65, 17, 16), (1, 33, 5, 3), (2, 1, 5, 1), (2, 129, 33, 16), (2, 65, 16, 64)):
        assert not failures_of(update, inputs_of(update, *shape, dtype=dtype))


@EVERY
def test_finite_inputs_give_finite_results(update):
    for key in (0.0, 1e-20, 1e10, 1e18):
        for logit in (-1000.0, -88.0, 0.0, 20.0, 1000.0):
            if update.startswith("mamba") and (logit > 20 or key > 1e10):
                continue  # no step size and no key: its state overflows in the loop too
            a = inputs_of(update, 1, 34, 17, 16, key=key)
            a["dt"].fill_(max(logit, 0.0) if update == "mamba without softplus" else logit)
            a["z"][0, ::2], a["z"][0, 1::2] = 1000.0, -1000.0
            got = results(SCANS[update][0], a)
            assert not [n for n, v in got.items() if not v.isfinite().all()], (key, logit)


@pytest.mark.parametrize("update,lengths", [("longhorn", [8, 12]), ("mamba", None)])
def test_compiles_as_one_graph(update, lengths):
    a, cu = packed(update, lengths, 5, 4) if lengths else (inputs_of(update, 2, 70, 5, 4), None)
    fast = SCANS[update][0]
    want = results(fast, a, cu_seqlens=cu)
    torch._dynamo.reset()
    got = results(torch.compile(fast, fullgraph=True, backend="aot_eager"), a, cu_seqlens=cu)
    assert all(torch.equal(got[n], want[n]) for n in want)


@EVERY
@pytest.mark.parametrize("backend", ("cpu", "torch"))
def test_autocast_leaves_parameters_in_float32(update, backend):
    a = {n: v.requires_grad_() for n, v in inputs_of(update, 2, 40, 17, 16).items()}
    scan = functools.partial(SCANS[update][0], return_state=True, backend=backend)
    with torch.autocast("cpu", BF16):
        y, hT = scan(**a)
        grads = torch.autograd.grad(y.float().sum() + hT.sum(), list(a.values()))
    assert y.dtype == BF16 and hT.dtype == F32 and all(g.dtype == F32 for g in grads)
    rounded = {n: v.detach().to(BF16) if n in ("x", "dt", "k", "q", "z") else v.detach() for n, v in a.items()}
    want, hT_want = scan(**rounded)
    assert torch.equal(y, want) and torch.equal(hT, hT_want)


# ------------------------------------------------------------------------------------- the loops against other formulas

def test_selective_scan_against_a_closed_form():
    """S_T = sum_s (prod_{t > s} exp(delta_t A)) delta_s u_s B_s, from cumulative sums; no recurrence anywhere."""
    a = {n: v.double() for n, v in inputs_of("mamba", 2, 20, 3, 4).items()}
    u, A, h0 = a["x"], a["A"], a["h0"]
    delta = torch.log1p(torch.exp(a["dt"] + a["dt_bias"]))
    total = torch.cumsum(delta[..., None] * A, 1)  # (B, T, D, N)
    add = (delta * u)[..., None] * a["k"][:, :, None]
    y = torch.empty_like(u)
    for t in range(20):
        weight = torch.exp(total[:, t, None] - total[:, :t + 1])
        S = (weight * add[:, :t + 1]).sum(1) + torch.exp(total[:, t]) * h0
        y[:, t] = ((S * a["q"][:, t, None]).sum(-1) + a["D"] * u[:, t]) * a["z"][:, t] * a["z"][:, t].sigmoid()
    got, hT = SCANS["mamba"][1](**a, return_state=True)
    torch.testing.assert_close(got, y, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(hT, S, rtol=1e-10, atol=1e-12)


def test_exact_longhorn_is_the_full_matrix_of_eq6():
    a = {n: v.double() for n, v in inputs(2, 9, 3, 4, without=("D", "z")).items()}
    S, ys = a["h0"], []
    for t in range(9):
        beta, k = (a["dt"][:, t] + a["dt_bias"]).sigmoid(), a["k"][:, t]
        eps = beta / (1 + beta * (k * k).sum(-1, keepdim=True))  # (B, D)
        transition = torch.eye(4) - eps[..., None, None] * (k[:, :, None] * k[:, None, :])[:, None]  # (B, D, N, N)
        S = torch.einsum("bdnm,bdm->bdn", transition, S) + (eps * a["x"][:, t])[..., None] * k[:, None]
        ys.append((S * a["q"][:, t, None]).sum(-1))
    y, hT = longhorn_scan_ref(**a, return_state=True, exact=True)
    torch.testing.assert_close(y, torch.stack(ys, 1), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(hT, S, rtol=1e-10, atol=1e-12)


def test_selective_scan_has_mamba_ssms_signature():
    """The arguments of mamba_ssm.ops.selective_scan_interface.selective_scan_fn by name and in their order."""
    names = "u delta A B C D z delta_bias delta_softplus return_last_state".split()
    assert list(inspect.signature(selective_scan).parameters)[:len(names)] == names
    a = inputs_of("mamba", 2, 12, 5, 3)
    args = [a["x"], a["dt"].abs(), a["A"], a["k"], a["q"], a["D"], a["z"], a["dt_bias"].abs(), True]
    y, hT = selective_scan(*args, True)
    assert torch.equal(selective_scan(*args), y) and hT.shape == (2, 5, 3) and hT.dtype == F32
    want, hT_want = selective_scan_ref(*(v.double() if torch.is_tensor(v) else v for v in args), True)
    assert distance(y, want) < 16 * EPS and distance(hT, hT_want) < 16 * EPS


# ----------------------------------------------------------------------------------------------------- packed sequences

def packed(update, lengths, D, N, dtype=F32):
    a = inputs_of(update, 1, sum(lengths), D, N, dtype=dtype)
    a["h0"] = torch.randn(len(lengths), D, N, generator=torch.Generator().manual_seed(3))
    return a, torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def flipped(f):
    """f from the last step to the first, by flips alone; packed sequences each for itself."""
    def run(reverse, cu_seqlens=None, **a):
        ends = [0, a["x"].shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
        flip = lambda v: torch.cat([v[:, i:j].flip(1) for i, j in zip(ends, ends[1:], strict=False)], 1)
        a = {n: flip(v) if n in ("x", "dt", "k", "q", "z") else v for n, v in a.items()}
        y, hT = f(**a, cu_seqlens=cu_seqlens)
        return flip(y), hT
    return run


@EVERY
@pytest.mark.parametrize("backend", ("cpu", "torch"))
def test_reverse_is_the_scan_of_what_is_flipped(update, backend):
    (fast, slow), kw = SCANS[update], {"reverse": True}
    if backend == "torch":  # the loops themselves, beside the kernels
        fast = lambda backend, **a: SCANS[update][0](**a, backend="torch")
    for shape, dtype in (((3, 33, 19, 16), F32), ((2, 70, 5, 3), F32), ((1, 9, 5, 4), BF16)):
        a = inputs_of(update, *shape, dtype=dtype)
        assert not failures(a, fast=fast, slow=flipped(slow), **kw)
        assert not failures({n: a[n] for n in a if n not in ("h0", "D", "z")}, "y", fast=fast, slow=flipped(slow), **kw)
    a, cu = packed(update, [3, 0, 40, 1], 17, 16)
    assert not failures(a, fast=fast, slow=flipped(slow), cu_seqlens=cu, **kw)


@EVERY
@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [32, 32], [31, 33, 1, 64], [3, 0, 40, 0]], ids=str)
def test_packed_sequences_are_separate_sequences(update, lengths):
    """The kernels with cu_seqlens, against the float64 loop over each sequence alone; every gradient."""
    half, cu = packed(update, lengths, 20, 3, BF16)
    assert not failures_of(update, half, cu_seqlens=cu.int())
    a, cu = packed(update, lengths, 17, 16)
    assert not failures_of(update, a, cu_seqlens=cu)
    y, hT = SCANS[update][0](**a, cu_seqlens=cu, return_state=True)
    for s, (start, end) in enumerate(zip(cu.tolist(), cu.tolist()[1:], strict=False)):
        if start == end:
            assert torch.equal(hT[s], a["h0"][s])
            continue
        alone = {n: v[:, start:end] if n in ("x", "dt", "k", "q", "z") else v for n, v in a.items()}
        y_alone, h_alone = SCANS[update][0](**{**alone, "h0": a["h0"][s:s + 1]}, return_state=True)
        assert torch.equal(y[:, start:end], y_alone) and torch.equal(hT[s:s + 1], h_alone)


@pytest.mark.parametrize("cu,words", [
    (torch.tensor([0, 5]), ["rise from 0 to T = 20", "[0, 5]"]), (torch.tensor([1, 20]), ["rise from 0"]),
    (torch.tensor([0, 12, 8, 20]), ["rise from 0", "[0, 12, 8, 20]"]), (torch.tensor([20]), ["(S + 1,)", "(1,)"]),
    (torch.tensor([0.0, 20.0]), ["int32 or int64", "float32"]), (torch.tensor([[0, 20]]), ["(1, 2)"]),
    (torch.tensor([0, 20], device="meta"), ["cu_seqlens is on meta"]), ([0, 20], ["cu_seqlens must be"])], ids=str)
def test_wrong_cu_seqlens_are_one_line(cu, words):
    a, _ = packed("longhorn", [8, 12], 5, 4)
    del a["h0"]
    for f in (longhorn_scan, longhorn_scan_ref):
        f(**a, cu_seqlens=torch.tensor([0, 8, 20]))  # the values are checked in every call
        with pytest.raises(ValueError) as error:
            f(**a, cu_seqlens=cu)
        assert "\n" not in str(error.value) and all(w in str(error.value) for w in words), error.value


def test_packed_h0_is_zero_or_one_per_sequence():
    a, cu = packed("longhorn", [8, 12], 5, 4)
    without = {n: v for n, v in a.items() if n != "h0"}
    from_zero = longhorn_scan(**a | {"h0": torch.zeros(2, 5, 4)}, cu_seqlens=cu)
    assert torch.equal(longhorn_scan(**without, cu_seqlens=cu), from_zero)
    assert not torch.equal(longhorn_scan(**without), from_zero)
    with pytest.raises(ValueError, match=r"h0 must be \(2, 5, 4\).*got \(1, 5, 4\)"):
        longhorn_scan(**{**a, "h0": a["h0"][:1]}, cu_seqlens=cu)
    twice = {n: torch.cat([v, v]) if v.dim() == 3 else v for n, v in a.items()}
    with pytest.raises(ValueError, match="B = 2: flatten"):
        longhorn_scan(**twice, cu_seqlens=cu)


# ------------------------------------------------------------------------------------------ deliberately broken kernels

MUTANTS = {  # name: (update, place in longhorn_scan.cu or lanes.h, the mistake there, which BROKEN switches on)
    "half the step size": ("longhorn", "step", "if (BROKEN) { Step<V> s = longhorn_step(x, dt, bias, kk); "
                           "s.size = 0.5f * s.size; return s; }"),
    "twice the gradient of the step size": ("longhorn", "step gradients", "if (BROKEN) de = 2.0f * de;"),
    "step size without |k|^2": ("longhorn", "norm of keys", "if (BROKEN) sum = 0.0f;"),
    "the gradient does not decay": ("longhorn", "decay of G", "if (BROKEN) return g;"),
    "the state after the step": ("longhorn", "state before", "const vec *before = kept.S + (t + BROKEN) * N;"),
    "the states of the chunk before": ("longhorn", "chunk state", "if (BROKEN && chunk) saved -= N * a.D;"),
    "dk without its second term": ("longhorn", "dk", "if (BROKEN) a.dk[to + t * N + j] = sums[t * N + j]; else"),
    "dk of every split in one place": ("longhorn", "split", "if (BROKEN) to = (row.start + t0) * N;"),
    "the exponent is not clamped": ("longhorn", "clamp", "if (!BROKEN)"),
    "a short exponential": ("longhorn", "exp", "if (BROKEN) p = vec{};"),
    "bfloat16 truncates": ("longhorn", "rounding", "if (BROKEN) rounded = u >> 16;"),
    "packed rows read at the first token": ("longhorn", "row", "if (BROKEN && a.cu) return {a.cu[r], "
                                            "a.cu[r + 1] - a.cu[r], a.cu[r] / CHUNK + r, 0, 0};"),
    "chunk states run into one another": ("longhorn", "row", "if (BROKEN && a.cu) return {a.cu[r], "
                                          "a.cu[r + 1] - a.cu[r], a.cu[r] / CHUNK, 0, a.cu[r]};"),
    "a rate's gradient of one step": ("mamba", "rate gradient", "if (BROKEN) drate = V{};"),
    "a short logarithm": ("mamba", "log1p", "if (BROKEN) p = V{};"),
    "a short power of 2": ("mamba", "exp2", "if (BROKEN) p = vec{};"),
    "the error of the diagonal": ("exact", "residual", "if (BROKEN) sum[0] = sum[1] = vec{};"),
    "G without the rank-one pull": ("exact", "pull of G", "if (BROKEN) Gk = V{};"),
}


def build_broken(folder):
    """(library, switch): every broken kernel in one library; a bit of the int `switch` selects each."""
    text = source_text()
    for i, (_, place, mistake) in enumerate(MUTANTS.values()):
        text = with_mistake(text, place, mistake.replace("BROKEN", f"(broken >> {i} & 1)"))
    folder.mkdir(exist_ok=True)
    source = folder / f"broken.{os.getpid()}.cu"
    source.write_text('extern "C" { int broken = 0; }\n' + text)
    flags = build._flags
    with mock.patch.object(build, "_flags", lambda openmp: [*flags(openmp), "-O1"]):  # in half the time of -O3
        lib = build.load(build.build([source, build.CONV], folder)[0])
    return lib, ctypes.c_int.in_dll(lib, "broken")


@pytest.mark.parametrize("name", [None, *MUTANTS], ids=["as it is", *MUTANTS])
def test_broken_kernels_are_caught(name, broken, threads, monkeypatch):
    lib = broken(*[name] if name else [])
    monkeypatch.setattr(build, "library", lambda: lib)
    threads(2)

    def caught():  # a few cases that reach every line of the kernels
        for update in [MUTANTS[name][0]] if name else SCANS:
            yield failures_of(update, inputs_of(update, 1, 70, 33, 16))
            a, cu = packed(update, [40, 33, 7], 20, 16)
            yield failures_of(update, a, cu_seqlens=cu)
        yield failures(inputs(1, 40, 16, 16, logit=300.0))
        yield failures(inputs(2, 33, 21, 16, BF16))

    assert any(caught()) == bool(name)
