"""Tests of the scans alone; test_conformance.py has the tests that every operator shares.

    python -m pytest tests/test_scan.py
"""

import ast
import ctypes
import functools
import inspect
import json
import math
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from unittest import mock

import pytest
import torch
import transformers
from helpers import ROOT, table
from operators import BF16, F16, OPERATORS, graded, inputs, one_scan, packed, what_autograd_keeps, wrong
from transformers.models.mamba import modeling_mamba

from kernels import build, compat
from kernels.compat import selective_scan_fn
from kernels.scan import longhorn_scan

pytestmark = pytest.mark.usefixtures("poison")
EVERY = pytest.mark.parametrize("update", ("longhorn", "exact", "mamba", "mamba without softplus"))


def mamba_ssms(u, delta, A, B, C, D=None, z=None, delta_bias=None, update="mamba"):
    """The recurrence in mamba-ssm's layout: time comes last, and each channel has the B and C of its group."""
    time_first = lambda a: a.movedim(-1, 1)
    of_channels = lambda a: a[:, None] if a.dim() == 3 else a.repeat_interleave(len(A) // a.shape[1], 1)
    z = None if z is None else time_first(z)
    k, q = (time_first(of_channels(a)) for a in (B, C))  # (batch, T, 1 or D, N)
    out = one_scan(update, time_first(u), time_first(delta), k, q, A, D, z, delta_bias)
    return {**out, "y": out["y"].mT}


@pytest.mark.parametrize("batch,T,D,N,groups,softplus,without", [
    (2, 33, 6, 5, None, True, ()), (3, 1, 12, 3, 4, True, ("D", "delta_bias")),
    (2, 45, 10, 8, 2, False, ("delta_bias", "z")), (1, 7, 5, 2, 5, True, ("D", "z", "delta_bias"))])
def test_mamba_ssms_function_is_its_recurrence(batch, T, D, N, groups, softplus, without):
    """Results and every gradient agree in mamba-ssm's layout, also through the last state."""
    draw = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + N))
    rows = (batch, N, T) if groups is None else (batch, groups, N, T)
    a = {"u": draw(batch, D, T), "delta": draw(batch, D, T), "A": -draw(D, N).exp(), "B": draw(*rows),
         "C": draw(*rows).flip(-1), "D": draw(D), "z": draw(batch, D, T).flip(1), "delta_bias": draw(D).flip(0)}
    if not softplus:
        a["delta"] = a["delta"].exp() / 4
    a = {name: v for name, v in a.items() if name not in without}
    ours = partial(selective_scan_fn, delta_softplus=softplus, return_last_state=True)
    true = partial(mamba_ssms, update="mamba" if softplus else "mamba without softplus")
    run = lambda **a: dict(zip(("y", "h0"), ours(**a), strict=True))
    for dtype in (torch.float32, BF16):
        given = {name: v.to(dtype) if v.dim() > 2 else v for name, v in a.items()}
        assert not wrong("mamba", given, run=run, true=true)


@pytest.mark.parametrize("changes, words", [
    ({"B": torch.ones(4, 3)}, "a B or C without time"), ({"A": torch.ones(4, 3, dtype=torch.complex64)}, "complex"),
    ({"C": torch.ones(1, 2, 3, 5)}, "must agree"),
    ({"B": torch.ones(1, 3, 3, 5), "C": torch.ones(1, 3, 3, 5)}, "3 groups must divide the 4 channels"),
    ({"delta": torch.ones(1, 4, 6)}, r"delta must be \(1, 5, 4\)")])
def test_mamba_ssms_function_refuses_wrong_arguments(changes, words):
    a = {"u": torch.ones(1, 4, 5), "delta": torch.ones(1, 4, 5), "A": -torch.ones(4, 3), "B": torch.ones(1, 3, 5),
         "C": torch.ones(1, 3, 5)}
    selective_scan_fn(**a)
    with pytest.raises(ValueError, match=words):
        selective_scan_fn(**{**a, **changes})


def test_the_program_of_the_page_is_the_scan():
    """The sequence is longer than two of its chunks, which the backward recomputes."""
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/kernels.md").read_text(), re.DOTALL)
    names = {}
    exec(program, names)
    a = inputs("longhorn", 2, 77, 5, 3, torch.float64, without=("D", "z", "dt_bias", "h0"))
    got, true = (graded(scan, a) for scan in (names["scan"], partial(longhorn_scan, backend="torch")))
    for name in true:
        torch.testing.assert_close(got[name], true[name], rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(not hasattr(modeling_mamba, "mamba_selective_scan"),
                    reason="this version of transformers calls a scan on a GPU only")
def test_hugging_faces_mamba_runs_on_our_scan_with_the_lines_of_the_page(monkeypatch):
    """The logits are right, and so are the tokens generated through its cache."""
    monkeypatch.setattr(modeling_mamba, "mamba_selective_scan", modeling_mamba.mamba_selective_scan)  # restored later
    torch.manual_seed(0)
    theirs = transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2))
    idx = torch.randint(64, (2, 33))
    run = lambda: (theirs.eval()(idx).logits, theirs.generate(idx[:, :5], max_new_tokens=8, do_sample=False))
    with torch.no_grad():
        logits, text = run()
        page = (ROOT / "docs/kernels.md").read_text()
        (lines,) = re.findall(r"    from transformers.models.mamba.*?\n\n", page, re.DOTALL)
        exec(inspect.cleandoc(lines), {})
        monkeypatch.setattr(compat, "selective_scan", mock.Mock(side_effect=compat.selective_scan))
        close, same = run()
    assert (logits - close).abs().max() <= 1e-6 * logits.abs().max() and torch.equal(text, same)
    assert compat.selective_scan.call_count == 4  # two layers, for the sequence and for the prompt


def test_the_scans_run_in_another_project(tmp_path):
    """The scans need only the files that the page names."""
    for folder in ("kernels", "common"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "longhorn_scan.cu", tmp_path)
    lines = ("import torch; from kernels.compat import longhorn_scan, selective_scan_fn; x = torch.ones(1, 2, 3);"
             "print(selective_scan_fn(x, x, -torch.ones(2, 1), x[:, :1], x[:, :1])[0, 0].tolist(),"
             "longhorn_scan(x, x, x, x).shape)")
    environment = {**os.environ, "LONGHORN_BUILD_DIR": str(ROOT / "build")}  # holds a library for this content
    run = subprocess.run([sys.executable, "-c", lines], cwd=tmp_path, capture_output=True, text=True, env=environment)
    numbers = [1.0, 1 + math.exp(-1), 1 + math.exp(-1) + math.exp(-2)]
    said = run.stdout.split("] ")
    assert json.loads(said[0] + "]") == pytest.approx(numbers, rel=1e-6) and "[1, 2, 3]" in said[1], run.stderr


@EVERY
@pytest.mark.parametrize("backend", ("", "torch"))
@pytest.mark.parametrize("lengths", [[31, 0, 33, 1], [32, 32, 0]], ids=str)
def test_packed_sequences_are_separate_sequences(update, backend, lengths):
    """Results and every gradient agree, in both directions."""
    row = OPERATORS[update]
    half, cu = packed(update, lengths, 20, 3, BF16)
    assert not wrong(update, half, backend, cu_seqlens=cu.int())
    a, cu = packed(update, lengths, 17, 16)
    assert not wrong(update, a, backend, cu_seqlens=cu, reverse=True, tolerance=32)
    from_zero = row.run(**{**a, "h0": torch.zeros_like(a["h0"])}, cu_seqlens=cu, backend=backend)
    a.pop("h0")
    assert torch.equal(row.run(**a, cu_seqlens=cu, backend=backend)["y"], from_zero["y"])


def test_scratch_memory_is_written_before_it_is_read():
    """glibc can fill what malloc returns with a byte of our choice: 0x7f7f7f7f as a float is 3e38."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) or pytest.skip("this C library has no mallopt")
    mallopt(-6, 0x80)  # M_PERTURB: allocated bytes are its complement
    try:
        beyond = [wrong("longhorn", inputs("longhorn", B, 45, 21, N)) for B, N in ((2, 5), (1, 16))]
    finally:
        mallopt(-6, 0)
    assert beyond == [{}, {}]


def test_our_operators_pass_opcheck():
    """These sequences leave no gap in the chunk states, where unwritten numbers would differ."""
    torch.use_deterministic_algorithms(False)
    cu = torch.tensor([0, 33, 34])
    a = inputs("mamba", 1, 34, 3, 2, BF16) | {"h0": torch.zeros(2, 3, 2)}
    args = [a.get(n) for n in ("x", "dt", "k", "q", "A", "D", "z", "dt_bias", "h0")]
    y, hT, chunks = torch.ops.longhorn.scan(*args, cu, "mamba_softplus", True, False)
    torch.library.opcheck(torch.ops.longhorn.scan_backward.default, (
        torch.randn_like(y), None, *args[:7], None, None, cu, "mamba_softplus", True, False, chunks,
        torch.zeros(1, 34, 6, dtype=BF16)[..., 3:]))
    settings = cu, "mamba_softplus", True, False
    torch.library.opcheck(torch.ops.longhorn.scan_forward.default, (*args, *settings))
    torch.library.opcheck(torch.ops.longhorn.scan.default, (*(v.requires_grad_() for v in args), *settings))
    x = torch.ones(1, 3, 3)
    given = x, x, x, x[0], None, None, True, False, None
    torch.library.opcheck(torch.ops.longhorn.causal_conv1d_backward.default, given)


def test_packed_sequences_compile_as_one_graph():
    a, cu = packed("longhorn", [8, 12], 5, 4)
    torch._dynamo.reset()
    run = functools.partial(OPERATORS["longhorn"].run, cu_seqlens=cu)
    got = graded(torch.compile(run, fullgraph=True, backend="aot_eager"), a)
    want = graded(run, a)
    assert all(torch.equal(got[n], want[n]) for n in want)


def test_mixed_dtypes_are_promoted():
    a = inputs("longhorn", 1, 5, 3, 2)
    y = longhorn_scan(a["x"].to(BF16), a["dt"], a["k"].to(F16), a["q"])
    assert y.dtype == BF16
    assert torch.equal(y, longhorn_scan(a["x"].to(BF16).float(), a["dt"], a["k"].to(F16).float(), a["q"]).to(BF16))


@pytest.mark.parametrize("backend,T,kept", [("cpu", 2048, 2048 // build.CHUNK), ("torch", 512, 512)])
def test_autograd_keeps_few_states(backend, T, kept):
    """Besides the inputs, the kernels keep one state per chunk. The loop recomputes states and keeps only some."""
    a = inputs("longhorn", 1, T, 64, 16)
    given = sum(v.untyped_storage().nbytes() for v in a.values()) if backend == "cpu" else 0
    with what_autograd_keeps() as storages:
        y, hT = longhorn_scan(**{n: v.requires_grad_() for n, v in a.items()}, return_state=True, backend=backend)
    assert sum(storages.values()) <= given + kept * 4 * 64 * 16


# Argument; its shape, or the numbers of cu_seqlens; words of the error. x is (1, 8, 3), N = 2, two sequences.
MISFITS = """
cu_seqlens  [0, 5]        rise from 0 to T = 8, got [0, 5]
cu_seqlens  [1, 8]        rise
cu_seqlens  [0, 6, 4, 8]  rise
cu_seqlens  [[0, 8]]      (1, 2)
cu_seqlens  [0.0, 8.0]    torch.float32
h0          (1, 3, 2)     h0 must be (2, 3, 2)
x           (2, 8, 3)     B = 2: flatten
dt          (1, 7, 3)     dt must be (1, 8, 3)
"""


@pytest.mark.parametrize("backend", ("", "torch"))
def test_sequences_that_do_not_fit_are_refused_in_a_line(backend):
    a, ends = packed("longhorn", [4, 4], 3, 2)
    scan = partial(longhorn_scan, backend=backend)
    scan(**a, cu_seqlens=ends)
    bad = [("cu_seqlens", ends.to("meta"), "cu_seqlens is on meta")]
    for name, given, words in table(MISFITS):
        given = ast.literal_eval(given)
        bad.append((name, torch.tensor(given) if isinstance(given, list) else torch.ones(given), words))
    for name, given, words in bad:
        with pytest.raises(ValueError, match=rf"^scan: [^\n]*{re.escape(words)}[^\n]*\Z"):
            scan(**{**a, "cu_seqlens": ends, name: given})
