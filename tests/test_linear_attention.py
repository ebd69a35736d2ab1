"""Tests of the linear attentions alone; test_conformance.py has the tests that every operator shares.

    python -m pytest tests/test_linear_attention.py
"""

import pytest
import torch
from operators import EPS, F32, F64, OPERATORS, bare, cast, wrong

from kernels import linear_attention as la
from kernels import ops

pytestmark = pytest.mark.usefixtures("poison", "one_thread")


@pytest.mark.parametrize("begins", [(7,), (8,), (24,), (1, 2, 30)], ids=str)
def test_wkv4_is_right_for_documents_whose_keys_are_far_apart(begins):
    """Each document's keys are a hundred below the previous ones: without a reset its own weights would underflow."""
    k, v = torch.randn(2, 1, 33, 3)
    decay, bonus = torch.rand(2, 3) + 1e-3
    starts = torch.zeros(1, 33, dtype=torch.bool)
    starts[:, list(begins)] = True
    k = (k - 100 * starts.cumsum(1)[..., None]).requires_grad_()
    with ops.documents(starts):
        o = la.wkv4(k, v, decay, bonus)[0]
    parts = zip(k.tensor_split(begins, 1), v.tensor_split(begins, 1), strict=True)
    alone = torch.cat([la.wkv4_ref(*part, decay, bonus)[0] for part in parts], 1)
    torch.testing.assert_close(o, alone, rtol=1e-4, atol=1e-4)
    got, wanted = (torch.autograd.grad(x.square().sum(), k)[0] for x in (o, alone))
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", ("", "torch"))
@pytest.mark.parametrize("top", (la.NOTHING, -torch.inf))
def test_an_empty_wkv4_state_equals_no_state(backend, top):
    row = OPERATORS["wkv4"]
    a = row.draw(20)
    zero = torch.zeros(2, 3, dtype=F64)
    empty = lambda **a: row.run(backend, **a, num=zero, den=zero, max=zero + top)
    assert not wrong("wkv4", bare(row, a), run=empty)


OF_TWO = torch.ones(2, 8, 2, 5)  # two heads, but the values have three


@pytest.mark.parametrize("case,change,words", [
    ("mesa", {"state": (1, 2, 3)}, r"state must be \(H, U\), got 3 entries"),
    ("wkv4", {"state": (1, 2)}, r"state must be \(num, den, max\), got 2 entries"),
    ("shared", {"q": OF_TWO, "k": OF_TWO}, r"v must be \(2, 8, 2, 7\) for .*")])
def test_wrong_states_and_heads_are_refused_in_one_line(case, change, words):
    row = OPERATORS[case]
    a = bare(row, row.draw(8))
    with pytest.raises(ValueError, match=f"^{row.op}: {words}$"):
        getattr(la, row.op)(**{**a, **change})


def test_mesa_takes_as_many_steps_as_its_keys_need():
    row = OPERATORS["mesa"]
    a = row.draw(100, B=1, H=1, K=32, V=8)
    a["k"] *= 30
    assert not wrong("mesa", cast(row, a, F32), tolerance=2e-3 / EPS)
    usual = row.draw(40, B=3, H=1, K=31, V=2)  # as many steps as a GPU takes
    assert not wrong("mesa", usual, tolerance=3e8)
