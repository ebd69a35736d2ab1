"""What is the scans' own; test_conformance.py asks them what it asks every operator.

    python -m pytest tests/test_scan.py
"""

import ctypes
import functools
import inspect

import pytest
import torch
from operators import BF16, F16, OPERATORS, graded, inputs, packed, timed, what_autograd_keeps, wrong

from kernels import build
from kernels.scan import longhorn_scan, longhorn_scan_ref, selective_scan

pytestmark = pytest.mark.usefixtures("poison")
EVERY = pytest.mark.parametrize("update", ("longhorn", "exact", "mamba", "mamba without softplus"))


def test_selective_scan_has_mamba_ssms_signature():
    """The arguments of mamba_ssm.ops.selective_scan_interface.selective_scan_fn, by name and in their order."""
    names = "u delta A B C D z delta_bias delta_softplus return_last_state".split()
    assert list(inspect.signature(selective_scan).parameters)[:len(names)] == names


@EVERY
@pytest.mark.parametrize("backend", ("", "torch"))
@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [32, 32], [31, 33, 1, 64], [3, 0, 40, 0]], ids=str)
def test_packed_sequences_are_separate_sequences(update, backend, lengths):
    """Every gradient, in both directions; and to the bit the kernels over each sequence alone."""
    half, cu = packed(update, lengths, 20, 3, BF16)
    assert not wrong(update, half, backend, cu_seqlens=cu.int())
    a, cu = packed(update, lengths, 17, 16)
    assert not wrong(update, a, backend, cu_seqlens=cu, tolerance=32)
    assert not wrong(update, a, backend, cu_seqlens=cu, reverse=True, tolerance=32)
    row = OPERATORS[update]
    y, hT = row.run(**a, cu_seqlens=cu, backend=backend).values()
    for s, (start, end) in enumerate(zip(cu.tolist(), cu.tolist()[1:], strict=False)):
        alone = {n: v[:, start:end] if n in timed(row, a) else v for n, v in a.items()}
        alone["h0"] = a["h0"][s:s + 1]
        if start == end:
            assert torch.equal(hT[s:s + 1], alone["h0"])
        else:
            y_alone, h_alone = row.run(**alone, backend=backend).values()
            assert torch.equal(y[:, start:end], y_alone) and torch.equal(hT[s:s + 1], h_alone)
    from_zero = row.run(**{**a, "h0": torch.zeros_like(a["h0"])}, cu_seqlens=cu, backend=backend)
    a.pop("h0")
    assert torch.equal(row.run(**a, cu_seqlens=cu, backend=backend)["y"], from_zero["y"])


def test_scratch_memory_is_written_before_it_is_read():
    """glibc can fill what malloc hands out with a byte of our choice: 0x7f7f7f7f as a float is 3e38."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) or pytest.skip("this C library has no mallopt")
    mallopt(-6, 0x80)  # M_PERTURB: allocated bytes are its complement
    try:
        beyond = [wrong("longhorn", inputs("longhorn", B, 45, 21, N)) for B, N in ((2, 5), (1, 16))]
    finally:
        mallopt(-6, 0)
    assert beyond == [{}, {}]


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


def test_packed_sequences_compile_as_one_graph():
    a, cu = packed("longhorn", [8, 12], 5, 4)
    torch._dynamo.reset()
    run = functools.partial(OPERATORS["longhorn"].run, cu_seqlens=cu)
    got, want = graded(torch.compile(run, fullgraph=True, backend="aot_eager"), a), graded(run, a)
    assert all(torch.equal(got[n], want[n]) for n in want)


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


@pytest.mark.parametrize("name,bad,words", [  # of (1, 8, 3), two states and two sequences
    ("cu_seqlens", torch.tensor([0, 5]), r"rise from 0 to T = 8, got \[0, 5\]"),
    ("cu_seqlens", torch.tensor([1, 8]), "rise"), ("cu_seqlens", torch.tensor([0, 6, 4, 8]), "rise"),
    ("cu_seqlens", torch.tensor([8]), r"\(1,\)"), ("cu_seqlens", torch.tensor([[0, 8]]), r"\(1, 2\)"),
    ("cu_seqlens", torch.tensor([0.0, 8.0]), "int32 or int64 .*float32"),
    ("cu_seqlens", torch.tensor([0, 8], device="meta"), "cu_seqlens is on meta"),
    ("h0", torch.ones(1, 3, 2), r"h0 must be \(2, 3, 2\) .* got \(1, 3, 2\)"),
    ("x", torch.ones(2, 8, 3), "B = 2: flatten"),
    ("dt", torch.ones(1, 7, 3), r"dt must be \(1, 8, 3\)")])
def test_sequences_that_do_not_fit_are_refused_in_a_line(name, bad, words):
    a, ends = packed("longhorn", [4, 4], 3, 2)
    for f in (longhorn_scan, longhorn_scan_ref):
        f(**a, cu_seqlens=ends)
        with pytest.raises(ValueError, match=rf"^scan: [^\n]*{words}[^\n]*\Z"):
            f(**{**a, "cu_seqlens": ends, name: bad})
