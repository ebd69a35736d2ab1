"""tools/scan_mma.py in Triton's interpreter (or on a GPU), against the recurrence in float64, with every gradient.

    make test-fused
"""

import os
from unittest import mock

import pytest
import torch
from operators import double, graded, recurrence, shown

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="no GPU here, and no interpreter: make test-fused runs this kernel on a CPU")
scan_mma = pytest.importorskip("tools.scan_mma", reason="no Triton here: make test-fused installs it")


@pytest.fixture(autouse=True, scope="module")
def interpreter():
    """Triton's interpreter spends half of its time on preparing the language at each call. Here it does so once."""
    if not INTERPRETED:
        yield
        return
    from triton.language import standard
    from triton.runtime import interpreter

    scopes = [interpreter._patch_lang(f.fn) for f in (scan_mma.forward_kernel, standard.sum)]
    with mock.patch.object(interpreter, "_patch_lang"):
        yield
    for scope in reversed(scopes):
        scope.restore()


def truth(e, x, k, q, h0=None):
    """Step 3 of Algorithm 1 with eps given: one head per channel, with values of width 1."""
    e, x, k, q = e[..., None], x[..., None], k[:, :, None], q[:, :, None]
    y, S = recurrence(q, k, e * x, 1 - e * k.square(), state=shown(h0))
    return {"y": y[..., 0], "hT": S[..., 0]}


def draw(B=1, T=17, D=20, N=16, key=1.0, slot=None):
    """Random arguments by name, with Longhorn's step sizes for keys of this scale.

    With `slot`, each key is `slot` in one state and 0 elsewhere, and e k^2 is 0.999. So each step overwrites what the
    step before it wrote, and the state stays as large as h0."""
    g = torch.Generator().manual_seed(T)
    normal = lambda *shape: torch.randn(*shape, generator=g)
    a = {"x": normal(B, T, D), "k": key * normal(B, T, N), "q": normal(B, T, N), "h0": normal(B, D, N)}
    e = 1 / (1 + torch.exp(-normal(B, T, D)) + a["k"].square().sum(-1, keepdim=True))
    if slot is not None:
        a["k"] = slot * (torch.arange(N) == 1).float().expand(B, T, N)
        a["h0"] /= slot
        e = torch.full_like(e, 0.999 / slot**2)
    return {"e": e, **a}


def errors(a, precision, dtype=torch.float32):
    """{name: largest error / largest value of the recurrence in float64}, for results and gradients.

    x, k and q are in `dtype`."""
    a = {n: v.to(DEVICE, dtype if n in "xkq" else torch.float32) for n, v in a.items()}
    got = graded(lambda **a: dict(zip(("y", "hT"), scan_mma.longhorn_scan(**a, precision=precision), strict=True)), a)
    assert (got["y"].dtype, got["hT"].dtype) == (dtype, torch.float32)
    true = graded(truth, double(a))
    return {n: ((got[n].double() - v).abs().max() / v.abs().max()).item() for n, v in true.items()}


@pytest.fixture
def short_segments(monkeypatch):
    monkeypatch.setattr(scan_mma, "SEGMENT", 8)


def test_300_steps_in_float32_are_right_to_a_millionth():
    found = errors(draw(T=300, D=64), "ieee")
    assert max(found.values()) < 1e-6, found


def test_300_steps_in_tf32_that_overwrite_one_slot_are_right_to_a_thousandth():
    found = errors(draw(T=299, slot=1.0), "tf32")
    assert max(found.values()) < 1e-3, found


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("case", [
    dict(B=2, T=3, D=70, N=20), dict(T=11, D=1, N=64, key=1000.0), dict(N=1, key=0.01), dict(slot=1.0)], ids=str)
def test_in_float32_it_computes_the_recurrence(case):
    found = errors(draw(**case), "ieee")
    assert max(found.values()) < 1e-6, found


@pytest.mark.usefixtures("short_segments")
@pytest.mark.parametrize("case", [
    dict(D=64), dict(slot=0.1), dict(slot=30.0), dict(T=11, N=33, key=0.01)], ids=str)
def test_tf32_costs_a_thousandth_at_most(case):
    """The error is also at least a hundred-thousandth, because operands are rounded."""
    found = errors(draw(**case), "tf32")
    assert 1e-5 < max(found.values()) < 1e-3, found


@pytest.mark.usefixtures("short_segments")
def test_16_bits_without_a_state_are_right_to_a_thousandth():
    a = draw(T=9)
    a.pop("h0")
    found = errors(a, "ieee", torch.float16)
    assert max(found.values()) < 1e-3, found
