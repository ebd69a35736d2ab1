"""The steps of the delta rule, transformers' Mamba-2 with the same weights, the cache of a window, and --as_released.
The blocks of the newer families are in test_model.py, their operators in test_linear_attention.py.

    python -m pytest tests/test_newer_families.py
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import optim
from experiments.scaling.parameters import SIZES
from mixers import STEPS
from model import LM, ModelConfig
from runtime import counting
from tests.test_model import in_chunks, numel, shake, tiny, tokens

F64 = torch.float64
pytestmark = pytest.mark.usefixtures("one_thread")


# ------------------------------------------------------------------------------------------------ the step, and blocks

@pytest.mark.parametrize("step", STEPS)
def test_steps_and_their_gradients(step):
    """In float32 and float64 from |k| of 0 to 1e3, against numpy's long double."""
    size, b = torch.tensor([0.0, 1e-6, 1e-3, 0.03, 0.3, 0.9, 1.0, 1.1, 3.0, 10.0, 1e3], dtype=F64), 0.75
    size = size.float().double()
    kk = size.numpy().astype(np.longdouble) ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        wanted = {"explicit": b + 0 * kk, "implicit": b / (1 + b * kk),
                  "exact": np.where(kk > 0, -np.expm1(-b * kk) / kk, b)}[step]
        exact_slope = np.where(b * kk < 1e-4, -b**2 / 2 + b**3 * kk / 3 - b**4 * kk**2 / 8,
                               (b * kk * np.exp(-b * kk) + np.expm1(-b * kk)) / kk**2)
        slope = {"explicit": 0 * kk, "implicit": -(b**2) / (1 + b * kk) ** 2, "exact": exact_slope}[step]
    for dtype in (F64, torch.float32):
        length, beta = size.clone().to(dtype).requires_grad_(), torch.full_like(size, b, dtype=dtype).requires_grad_()
        eps = STEPS[step](beta, length.square())
        d, = torch.autograd.grad(eps.sum(), length, allow_unused=True)
        d = torch.zeros_like(length) if d is None else d
        tolerance = dict(rtol=64 * torch.finfo(dtype).eps, atol=1e-30)
        torch.testing.assert_close(eps.double(), torch.from_numpy(wanted.astype(np.float64)), **tolerance)
        want = torch.from_numpy((slope * 2).astype(np.float64)) * size
        torch.testing.assert_close(d.double(), want, **tolerance)


def test_mamba2_is_transformers_mamba2():
    """Logits, and the gradient of every parameter."""
    import transformers  # in requirements-test.txt: without it this test fails, it is not left out

    lm = shake(tiny("mamba2", n_embd=32, n_layer=1, n_head=2, d_state=2, vocab_size=96, block_size=75))
    theirs = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(
        hidden_size=32, num_heads=4, head_dim=16, state_size=16, n_groups=1, num_hidden_layers=2, vocab_size=96,
        expand=2, conv_kernel=4, tie_word_embeddings=True, use_cache=False)).eval()
    names = {"conv1d.weight": "conv_weight", "conv1d.bias": "conv_bias", "D": "skip", "norm.weight": "norm_weight"}
    params, ours, same = dict(theirs.named_parameters()), dict(lm.named_parameters()), {
        "backbone.embeddings.weight": "embed.weight", "backbone.norm_f.weight": "norm.weight"}
    for name in params.keys() - same.keys():
        _, _, i, branch = name.split(".", 3)
        inner = branch.removeprefix("mixer.")
        same[name] = f"layers.0.branches.{i}.{branch if inner == branch else f'mixer.{names.get(inner, inner)}'}"
    assert set(same.values()) == set(ours)
    with torch.no_grad():
        for name, p in params.items():
            p.copy_(ours[same[name]].view_as(p))
    idx, targets = tokens(2, 75, 96), tokens(2, 75, 96, seed=2)
    (logits, loss), expected = lm(idx, targets), theirs(idx).logits
    torch.testing.assert_close(logits, expected, rtol=2e-5, atol=2e-5)
    loss.backward()
    F.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    for name, p in params.items():
        got = ours[same[name]].grad.view_as(p)
        assert (got - p.grad).norm() < 2e-4 * p.grad.norm() + 1e-7, name


# ---------------------------------------------------------------------------------------------------------- the window

@torch.no_grad()
def test_the_cache_of_a_window_ends_where_it_ends():
    lm, idx = tiny("swa", n_layer=1, window=5), tokens(2, 60)
    logits, state = in_chunks(lm, idx, [20, 1, 1, 38])
    assert numel(state) == 2 * 2 * 5 * 32 == 2 * counting.state_size(lm, 60)
    assert counting.state_size(lm, 3) == 2 * 3 * 32
    torch.testing.assert_close(logits, lm(idx)[0], rtol=1e-5, atol=1e-5)
    recent = lm(idx[:, -5:])[0][:, -1]  # rotary angles are differences: what was read before the window is nothing
    torch.testing.assert_close(logits[:, -1], recent, rtol=1e-5, atol=1e-5)


# --------------------------------------------------------------------------------------------------------- as released

@torch.no_grad()
def test_as_released():
    """What differs outside of the blocks of GLA and RetNet; the counts are those of the released code."""
    with torch.device("meta"):
        lms = [LM(ModelConfig(model="rwkv", as_released=True, **size)) for size in SIZES.values()]
    assert [counting.parameter_count(lm)["total"] for lm in lms] == [124_447_776, 354_797_312]
    lm, idx = shake(tiny("rwkv", as_released=True)), tokens(2, 24)
    whole, (logits, state) = lm(idx)[0], in_chunks(lm, idx, [5, 1, 18])
    torch.testing.assert_close(logits, whole, rtol=2e-5, atol=2e-5)
    h = lm.embed(idx) + lm.positions.weight[:24]
    for layer in lm.layers:
        h, _ = layer(h)
    torch.testing.assert_close(whole, lm.norm(h) @ lm.embed.weight.T)
    with pytest.raises(ValueError, match="^RWKV as released has positions up to block_size 24, not 25: [^\n]*$"):
        lm(idx[:, :1], state=state)
    for family in ("rwkv", "retnet", "gla"):
        lm = LM(ModelConfig(model=family, as_released=True, n_layer=2, n_head=2, n_embd=256, vocab_size=64))
        assert set(optim.decayed(lm, as_released=True)) == {n for n, p in lm.named_parameters() if p.dim() >= 2}
        last = {"rwkv": "1.mixer.value", "retnet": "1.mixer.w2", "gla": "1.mixer.w2"}[family]
        assert lm.get_parameter(f"layers.0.branches.{last}.weight").std().item() == pytest.approx(0.02, rel=0.03)
    retnet = LM(ModelConfig(model="retnet", as_released=True, n_layer=1, n_head=2, n_embd=64, vocab_size=64))
    x = torch.randn(1, 3, 64) * 1e-3
    scale = x.square().mean(-1, keepdim=True)
    torch.testing.assert_close(retnet.norm(x), x / (scale + 1e-6).sqrt())
