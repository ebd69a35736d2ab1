"""The short convolution, RMSNorm and the loss against PyTorch's in float64, with every gradient.

Tolerances as in test_scan.py: relative to the norm of the true result, 16 eps(float32) for what stays float32, half a
unit of the type (0.29 on average) for what is rounded to bfloat16 or float16.

    python -m pytest tests/test_ops.py
"""

import functools
import math
import re

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import (
    BF16,
    F16,
    F32,
    SCANS,
    agree,
    conv_inputs,
    conv_true,
    conv_wrong,
    disagreeing,
    distance,
    double,
    graded,
    inputs,
    on_gpu,
    views,
    what_autograd_keeps,
)
from torch.utils._python_dispatch import TorchDispatchMode

from common import torch_private
from kernels import build, ops
from kernels.ops import attention, causal_conv1d, conv_state, linear_cross_entropy, rms_norm
from kernels.scan import longhorn_scan, selective_scan_ref

EPS = torch.finfo(torch.float32).eps

pytestmark = pytest.mark.usefixtures("poison")


# ---------------------------------------------------------------------------------------------------- short convolution


@pytest.mark.parametrize("W", range(1, 10))
@pytest.mark.parametrize("T", (1, 3, 7, 33))
def test_conv_every_width_and_short_inputs(W, T):
    """T shorter than W - 1 too, where most of the window is state; W = 9 is PyTorch's."""
    for silu in (True, False):
        assert conv_wrong(conv_inputs(2, T, 19, W), silu=silu) == []
        assert conv_wrong(conv_inputs(2, T, 19, W), silu=silu, reverse=True) == []
        assert conv_wrong(conv_inputs(2, T, 5, W), silu=silu, backend="torch") == []
        assert conv_wrong(conv_inputs(1, T, 5, W, state=False), silu=silu) == []
        assert conv_wrong(conv_inputs(1, T, 16, W, bias=False, state=False), silu=silu) == []


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])


@DEVICES
@pytest.mark.parametrize("dtype,B,T,D,W", [
    *((dtype, 3, 40, D, W) for dtype in (F32, BF16, F16) for D in (1, 5, 16, 17, 33) for W in (3, 4)),
    *((dtype, 2, 65, 70, 4) for dtype in (F32, BF16, F16)), *((dtype, 3, 300, 256, 4) for dtype in (F32, BF16, F16)),
    (BF16, 1, 1, 5, 4), (F32, 2, 130, 33, 8), (BF16, 1, 7, 9, 1), (F32, 1, 9, 5, 9)])
def test_conv_every_channel_count_and_dtype(dtype, B, T, D, W, device):
    for kw in (dict(), dict(bias=False), dict(bias=False, state=False)):
        for silu in (True, False):
            assert conv_wrong(conv_inputs(B, T, D, W, dtype, **kw), device, silu=silu) == []


@on_gpu
def test_gpu_conv_of_views_repeats_to_the_bit_and_compiles():
    a = {n: v.cuda() for n, v in conv_inputs(4, 200, 96, 4, BF16).items()}
    wide = torch.cat([a["x"], a["x"] * torch.nan], -1)
    want, compiled = graded(causal_conv1d, a), torch.compile(causal_conv1d, fullgraph=True, backend="aot_eager")
    for f, x in ((causal_conv1d, a["x"]), (causal_conv1d, wide.chunk(2, -1)[0]), (compiled, a["x"])):
        got = graded(f, {**a, "x": x})
        assert all(torch.equal(got[n], want[n]) for n in want)


@on_gpu
def test_gpu_conv_of_more_than_two_to_the_31_elements():
    B, T, D = 33, 65536, 1024
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GB")
    x, weight = torch.randn(B, T, D, device="cuda", dtype=BF16), torch.randn(D, 4, device="cuda")
    assert x.numel() > 2**31 and torch.equal(causal_conv1d(x, weight)[-1:], causal_conv1d(x[-1:], weight))


@given(T=st.integers(1, 20), W=st.integers(1, 9), cuts=st.lists(st.integers(1, 19), max_size=4, unique=True),
       start=st.booleans())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_conv_in_pieces_equals_the_whole(T, W, cuts, start):
    """conv_state carries what the next call needs, also through pieces shorter than W - 1."""
    a = conv_inputs(2, T, 5, W, state=start)
    x, state = a.pop("x"), a.pop("state", None)
    want = causal_conv1d(x, **a, state=state)
    edges, ys, s = [0, *sorted(c for c in cuts if c < T), T], [], state
    for first, last in zip(edges, edges[1:], strict=False):
        ys.append(causal_conv1d(x[:, first:last], **a, state=s))
        s = conv_state(x[:, first:last], s, W)
        assert s.shape == (2, W - 1, 5)
    close = torch.equal if W <= 8 else torch.allclose
    assert close(torch.cat(ys, 1), want)
    past = torch.zeros(2, W - 1, 5) if state is None else state
    assert torch.equal(s, torch.cat([past, x], 1)[:, T:])


@pytest.mark.parametrize("dtype", (F32, BF16))
@pytest.mark.parametrize("f", (causal_conv1d, rms_norm))
def test_views_equal_contiguous_to_the_bit(f, dtype):
    a = conv_inputs(2, 20, 17, 4, dtype) if f is causal_conv1d else norm_inputs((6, 8, 17), dtype)
    for kw in ({"reverse": True}, {}) if f is causal_conv1d else ({},):
        want = graded(f, a, **kw)
        for n in {"x", "state"} & a.keys():
            for view in views(a[n]):
                got = graded(f, {**a, n: view}, **kw)
                assert not view.is_contiguous() and all(torch.equal(got[n], want[n]) for n in want)
    x = a["x"].requires_grad_()
    (g,) = torch.autograd.grad(f(x, a["weight"]).sum(), x)  # dy of stride 0
    (h,) = torch.autograd.grad(f(x, a["weight"]), x, torch.ones_like(x))
    assert torch.equal(g, h)


@pytest.mark.parametrize("scale", (0.0, 1e-30, 1e-15, 1e3, 1e6, 1e15))
def test_extreme_values_stay_finite(scale):
    for f, a in ((causal_conv1d, conv_inputs(1, 10, 17, 4)), (rms_norm, norm_inputs((4, 17)))):
        assert all(v.isfinite().all() for v in graded(f, {**a, "x": a["x"] * scale}).values())


def test_every_number_is_rounded_right():
    """Element by element, where norms show the typical error: bfloat16 to nearest even, NaN stays NaN, exponentials to
    a few units however small."""
    x = torch.arange(0x3F80, 0x4000, dtype=torch.int16).view(BF16).view(1, -1, 1)  # all of [1, 2)
    for factor in (1.5, 1.25, 1.0078125):
        y = causal_conv1d(x, torch.full((1, 1), factor), silu=False)
        assert torch.equal(y, (x.float() * factor).to(BF16))
    nan = torch.tensor([-1], dtype=torch.int32).view(F32).view(1, 1)  # all bits set: rounding it up overflows
    assert causal_conv1d(x, nan, silu=False).isnan().all()
    x = torch.linspace(-80, 80, 4001).view(1, -1, 1)
    y, true = causal_conv1d(x, torch.ones(1, 1)).double(), F.silu(x.double())
    assert ((y - true).abs() <= 8 * EPS * true.abs()).all()


# -------------------------------------------------------------------------------------------------------------- RMSNorm

def norm_inputs(shape, dtype=F32):
    g = torch.Generator().manual_seed(0)
    return dict(x=torch.randn(*shape, generator=g).to(dtype), weight=torch.randn(shape[-1], generator=g))


def norm_true(x, weight, eps=1e-5):
    return F.rms_norm(x, weight.shape, weight, eps)


def norm_wrong(a, **kw):
    got, true = graded(rms_norm, a, **kw), graded(norm_true, double(a), **kw)
    # dx is a difference that cancels as D shrinks; for one channel it is nearly nothing
    scale = true["y"].norm().item() if a["x"].shape[-1] < 4 else 0.0
    return disagreeing(got, true, {"dx": scale, "dweight": scale})


@pytest.mark.parametrize("D", (1, 2, 15, 16, 17, 300))
@pytest.mark.parametrize("dtype", (F32, BF16))
def test_rms_norm(D, dtype):
    for shape in ((D,), (1, D), (7, D), (63, D), (65, D), (2, 50, D), (2, 3, 5, D)):
        assert norm_wrong(norm_inputs(shape, dtype)) == []
    assert norm_wrong(norm_inputs((4, D), dtype), eps=0.5) == []


# ------------------------------------------------------------------------------------------------------------ attention

def attention_inputs(T, past, dtype=F32):
    g = torch.Generator().manual_seed(T + past)
    steps = {"q": T, "k": past + T, "v": past + T}
    return {name: torch.randn(2, 3, n, 8, generator=g).to(dtype) for name, n in steps.items()}


def attention_true(q, k, v, window=None):
    """One query at a time."""
    past, rows = k.shape[2] - q.shape[2], []
    for t in range(q.shape[2]):
        seen = slice(max(0, past + t + 1 - (window or past + t + 1)), past + t + 1)
        scores = torch.einsum("bhn,bhsn->bhs", q[:, :, t], k[:, :, seen]) / math.sqrt(q.shape[3])
        rows.append(torch.einsum("bhs,bhsn->bhn", scores.softmax(-1), v[:, :, seen]))
    return torch.stack(rows, 2)


@pytest.mark.parametrize("T,past,window", [
    (1, 0, None), (7, 0, None), (1, 5, None), (6, 3, None), (1, 0, 1), (130, 0, 5), (200, 70, 64), (150, 9, 100),
    (3, 90, 8)])
def test_attention(T, past, window, monkeypatch):
    a, seen, plain = attention_inputs(T, past), [], F.scaled_dot_product_attention
    true = graded(attention_true, double(a), window=window)
    monkeypatch.setattr(F, plain.__name__, lambda *a, **kw: seen.append(a[1].shape[2]) or plain(*a, **kw))
    for backend in ("", "cpu", "torch"):
        got = graded(attention, a, window=window, backend=backend)
        assert not disagreeing(got, true, dict.fromkeys(true, true["y"].norm().item()))
        half = attention(**{n: v.to(BF16) for n, v in a.items()}, window=window, backend=backend)
        assert half.dtype == BF16 and (half.double() - true["y"]).norm() < 0.02 * true["y"].norm()
        with torch.autocast("cpu", BF16):
            assert attention(**a, window=window, backend=backend).dtype == BF16
    if window:  # it never looks at the whole text
        assert max(seen) < window + max(window, ops.WINDOW_QUERIES)


# ----------------------------------------------------------------------------------------------- other people's kernels

def test_fused_convolution_is_causal_conv1ds_in_its_own_layout(library):
    seen = []

    def causal_conv1d_fn(x, weight, bias=None, activation=None):
        seen.append((tuple(x.shape), activation))
        return conv_true(x.transpose(1, 2), weight, bias, silu=activation == "silu").transpose(1, 2)

    library("causal_conv1d", causal_conv1d_fn)
    a = conv_inputs(2, 9, 8, 4, state=False)
    for silu in (True, False):
        got, true = graded(causal_conv1d, a, backend="fused", silu=silu), graded(conv_true, double(a), silu=silu)
        assert not disagreeing(got, true)
    assert seen == [((2, 8, 9), "silu"), ((2, 8, 9), None)]
    part = {**a, "x": torch.randn(2, 9, 12)[..., :8]}
    for other in (conv_inputs(2, 9, 8, 4), conv_inputs(2, 9, 8, 5, state=False), conv_inputs(2, 9, 12, 4, state=False),
                  part):  # what it lacks: this repository's
        assert torch.equal(causal_conv1d(**other, backend="fused"), causal_conv1d(**other))
    assert len(seen) == 2
    with torch.autocast("cpu", BF16):
        assert causal_conv1d(a["x"], a["weight"].to(BF16), backend="fused").dtype == BF16


def test_fused_scan_is_mamba_ssms_in_its_own_layout(library):
    seen = []

    def selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False,
                          return_last_state=False):
        seen.append([tuple(u.shape), tuple(B.shape), return_last_state])
        u, delta, B, C, z = (a.transpose(1, 2) for a in (u, delta, B, C, z))
        return selective_scan_ref(u, delta, A, B, C, D, z, delta_bias, delta_softplus).transpose(1, 2)

    library("selective_scan", selective_scan_fn)
    a = inputs("mamba", 2, 9, 5, 3, without=("h0",))
    fast, slow = SCANS["mamba"]
    got, true = graded(fast, a, backend="fused"), graded(slow, double(a))
    assert not disagreeing(got, true, dict.fromkeys(true, true["y"].norm().item()))
    assert seen == [[(2, 5, 9), (2, 3, 9), False]]
    for more in (dict(h0=torch.ones(2, 5, 3)), dict(return_state=True)):
        assert all(map(torch.equal, *(fast(**a, **more, backend=backend) for backend in ("fused", ""))))
    with ops.documents(torch.arange(9).expand(2, 9) == 4):
        assert torch.equal(*(fast(**a, backend=backend) for backend in ("fused", "")))
    with pytest.raises(RuntimeError, match="backend 'fused' cannot run here: mamba-ssm takes float32, bfloat16"):
        fast(**double(a), backend="fused")
    assert len(seen) == 1


def test_fused_attention_is_flash_attns_in_its_own_layout(library):
    seen = []

    def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1)):
        seen.append((tuple(q.shape), tuple(k.shape), causal, window_size))
        q, k, v = (a.transpose(1, 2) for a in (q, k, v))
        window = None if window_size[0] < 0 else window_size[0] + 1  # flash-attn's leaves out the query's own key
        return attention(q, k, v, window, backend="torch").transpose(1, 2)

    library("attention", flash_attn_func)
    a = attention_inputs(4, 2, BF16)
    for window in (None, 3):
        got, true = (attention(**b, window=window, backend=f) for b, f in ((a, "fused"), (double(a), "torch")))
        assert (got.double() - true).norm() < 0.02 * true.norm()
    # aligned at the end, as flash-attn since 2.1
    assert seen == [((2, 4, 3, 8), (2, 6, 3, 8), True, size) for size in ((-1, -1), (2, 0))]


# ------------------------------------------------------------------------------------------------------- head and loss

def loss_inputs(n, D, V, dtype=F32, device="cpu", ignored=0.2):
    """x (n, D), weight (V, D), both as `dtype` has them, and targets (n,), some of them to be ignored."""
    g = torch.Generator().manual_seed(n + 7 * D + 11 * V)
    x, weight = torch.randn(n, D, generator=g), torch.randn(V, D, generator=g) / math.sqrt(D)
    targets = torch.where(torch.rand(n, generator=g) < ignored, -1, torch.randint(V, (n,), generator=g))
    return x.to(device, dtype), weight.to(device, dtype), targets.to(device)


def in_two(x, weight, targets):
    """The same in PyTorch's two steps."""
    exact = torch.promote_types(x.dtype, F32)
    return F.cross_entropy(F.linear(x, weight).to(exact), targets, ignore_index=-1)


def loss_and_gradients(f, x, weight, targets, factor=1.0):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = f(x, weight, targets)
    return loss.detach(), *torch.autograd.grad(loss * factor, (x, weight))


def loss_true(x, weight, targets, factor=1.0):
    return loss_and_gradients(in_two, x.double(), weight.double(), targets, factor)


def loss_agrees(x, weight, targets, factor=1.0):
    true = loss_true(x, weight, targets, factor)
    ours, plain = (loss_and_gradients(f, x, weight, targets, factor) for f in (linear_cross_entropy, in_two))
    assert ours[0].dtype == F32 and [g.dtype for g in ours[1:]] == [x.dtype] * 2
    for got, in_steps, want in zip(ours, plain, true, strict=True):
        assert distance(got, want) <= max(1.5 * distance(in_steps, want), 4 * torch.finfo(got.dtype).eps)


@DEVICES
@pytest.mark.parametrize("at_once", (1, 640, 2**20), ids=lambda n: f"{n}logits")
@pytest.mark.parametrize("dtype", (F32, BF16, F16))
@pytest.mark.parametrize("n,D,V", ((1, 1, 2), (50, 16, 64), (129, 24, 301)))
def test_loss_is_no_further_from_float64_than_in_two_steps(n, D, V, dtype, at_once, device, monkeypatch):
    monkeypatch.setitem(ops.LOGITS_AT_ONCE, device, at_once)  # a row at a time, several with a rest, all
    loss_agrees(*loss_inputs(n, D, V, dtype, device, ignored=0.2 if n > 1 else 0), factor=3 / 7)


@on_gpu
def test_gpu_loss_of_more_than_two_to_the_31_logits():
    x, weight, targets = loss_inputs(45000, 8, 50304, BF16, "cuda")
    ends = torch.tensor([*range(100), *range(-100, 0)])
    loss, dx, dweight = loss_and_gradients(linear_cross_entropy, x, weight, targets, float((targets != -1).sum()))
    counted = float((targets[ends] != -1).sum())
    true = loss_true(x[ends], weight, targets[ends], counted)
    assert loss.isfinite() and distance(dx[ends], true[1]) < 0.01 and dweight.isfinite().all()


def test_loss_of_float64_is_exact():
    x, weight, targets = loss_inputs(30, 8, 20, torch.float64)
    x.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: linear_cross_entropy(x, w, targets), (x, weight))


def test_loss_of_the_torch_backend_is_pytorchs_and_autocast_rounds_as_a_linear_map_does():
    plain = functools.partial(linear_cross_entropy, backend="torch")
    for dtype in (torch.float64, F32):
        x, weight, targets = loss_inputs(64, 32, 100, dtype, ignored=0)
        assert all(map(torch.equal, *(loss_and_gradients(f, x, weight, targets) for f in (plain, in_two))))
    for f in (plain, linear_cross_entropy):
        whole = f(x.unflatten(0, (4, 16)), weight, targets.unflatten(0, (4, 16)))
        torch.testing.assert_close(whole, f(x, weight, targets), rtol=1e-6, atol=0)
        with torch.autocast("cpu", BF16):
            got, want = (loss_and_gradients(g, x, weight, targets) for g in (f, in_two))
        # a mean over 2^6: the same numbers are rounded
        assert all(g.dtype == F32 and distance(g, w.double()) < 1e-6 for g, w in zip(got, want, strict=True))


def test_loss_does_not_round_the_factor_of_all_gradients():
    x, weight, targets = loss_inputs(64, 32, 100, BF16, ignored=0)
    factor = 1 + 0.99 / 256  # of 1 or 1 + 1 / 128 in bfloat16
    true = loss_true(x, weight, targets, factor)
    with torch.autocast("cpu", BF16):
        got = loss_and_gradients(linear_cross_entropy, x.float(), weight.float(), targets, factor)
    for g, t in zip(got[1:], true[1:], strict=True):
        assert ((g.double() * t).sum() / t.square().sum()).item() == pytest.approx(1, abs=1e-3)


def test_loss_in_float16_neither_underflows_nor_overflows():
    """One in 4096 targets: a gradient of each logit around 1e-3 / 4096 is below float16's smallest normal number. Half
    of 2^15 targets are one token, and a channel of x has a mean of 20: their sum is beyond float16."""
    x, weight, targets = loss_inputs(4096, 8, 1000, F16, ignored=0)
    true = loss_true(x, weight, targets)
    ours, plain = (loss_and_gradients(f, x, weight, targets)[2] for f in (linear_cross_entropy, in_two))
    assert 3 * distance(ours, true[2]) < distance(plain, true[2])
    x, weight, targets = loss_inputs(2**15, 4, 50, F16, ignored=0)
    x[:, 1] += 20
    targets[::2] = 3
    true = loss_true(x, weight, targets, 2.0**10)
    for got, want in zip(loss_and_gradients(linear_cross_entropy, x, weight, targets, 2.0**10), true, strict=True):
        assert distance(got, want) < 2e-3


def test_loss_that_ignores_all_none_or_an_infinity():
    x, weight, targets = loss_inputs(6, 4, 9, ignored=0)
    for n in (6, 0):  # as PyTorch's mean
        loss, *gradients = loss_and_gradients(linear_cross_entropy, x[:n], weight, torch.full_like(targets[:n], -1))
        assert loss.isnan() and not any(g.any() for g in gradients)
    x[2], targets[2] = math.inf, -1
    loss, dx, dweight = loss_and_gradients(linear_cross_entropy, x, weight, targets)
    assert loss.isfinite() and not dx[0].isnan().any() and dx[0].norm() > 0
    transposed = x[::3].t().contiguous().t()
    for some, of in ((x[:2].unflatten(0, (1, 2)), targets[:2][None]), (x[0], targets[0]), (transposed, targets[::3])):
        true = in_two(some.reshape(-1, 4).double(), weight.double(), of.reshape(-1))
        assert distance(linear_cross_entropy(some, weight, of), true) < 1e-6


def test_loss_keeps_two_bytes_a_logit_and_never_makes_all_in_float32(monkeypatch):
    monkeypatch.setitem(ops.LOGITS_AT_ONCE, "cpu", 4096)
    x, weight, targets = loss_inputs(256, 8, 512, BF16)
    made = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            out = f(*args, **(kwargs or {}))
            made.extend(o for o in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(o, torch.Tensor))
            return out

    x.requires_grad_(), weight.requires_grad_()
    with Sizes(), what_autograd_keeps() as kept:
        linear_cross_entropy(x, weight, targets).backward()
    logits = x.shape[0] * weight.shape[0]
    assert sum(kept.values()) <= 2 * logits + 2 * (x.numel() + weight.numel()) + 8 * len(x)
    large = [t for t in made if t.numel() > max(4096, weight.numel())]
    assert large and all(t.dtype == BF16 for t in large) and len({t.untyped_storage().data_ptr() for t in large}) == 1


@pytest.fixture
def compiled_on_cpu(monkeypatch):
    """The CPU computes the loss as a GPU does, and nothing is compiled yet."""
    torch.compiler.reset()
    torch_private.compiled_for_any_rows.cache_clear()
    monkeypatch.setitem(ops.SLICES, "cpu", ops.compiled_loss_of_slice)
    monkeypatch.setitem(ops.LOGITS_AT_ONCE, "cpu", 12 * 320)  # slices of 12 rows, and one of 2


def slice_inputs(dtype, V=320):
    return loss_inputs(50, 16, V, dtype, ignored=0)


def compiled_loss_agrees(x, weight, targets, monkeypatch):
    """In 16 bits a gradient of a logit may be rounded to the neighbouring number."""
    exact = x.dtype == torch.float64
    monkeypatch.setattr(build, "say_once", pytest.fail)
    loss = linear_cross_entropy(x.requires_grad_(), weight, targets)
    assert torch_private.compiled_for_any_rows.cache_info().currsize == 1
    monkeypatch.delitem(ops.SLICES, x.device.type)
    plain = linear_cross_entropy(x, weight, targets)
    assert abs(loss - plain) <= (1e-12 if exact else 1e-6)
    got, wanted = (a.grad_fn.saved_tensors[2] for a in (loss, plain))  # the gradients of the logits
    if not exact:  # read as integers, neighbouring numbers of one sign differ by 1
        got, wanted = got.view(torch.int16).int(), wanted.view(torch.int16).int()
    assert (got - wanted).abs().max() <= (1e-12 if exact else 1)


@pytest.mark.xfail(torch.__version__.startswith("2.11."), reason="for a CPU, on which the loss is not compiled, "
                   "PyTorch 2.11 reads the target's logit after it was overwritten; for GPUs it does not")
@pytest.mark.parametrize("dtype", (torch.float64, BF16))
def test_compiled_loss_is_the_plain_one(dtype, compiled_on_cpu, monkeypatch):
    compiled_loss_agrees(*slice_inputs(dtype), monkeypatch)


@on_gpu
@pytest.mark.parametrize("dtype", (torch.float64, BF16))
@pytest.mark.parametrize("V", (301, 50304))
def test_gpu_compiled_loss_is_the_plain_one(V, dtype, compiled_on_cpu, monkeypatch):
    compiled_loss_agrees(*loss_inputs(1000, 64, V, dtype, "cuda", ignored=0), monkeypatch)


def test_a_loss_that_cannot_be_compiled_is_the_plain_one_and_says_so(compiled_on_cpu, monkeypatch):
    def without_a_compiler(*args, **kwargs):
        raise RuntimeError("Failed to find C compiler\nand more")

    lines = []
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: without_a_compiler)
    monkeypatch.setattr(build, "say_once", lines.append)
    x, weight, targets = slice_inputs(F32)
    got = loss_and_gradients(linear_cross_entropy, x, weight, targets)
    assert len(lines) == 1 and lines[0].endswith("takes longer (Failed to find C compiler)")
    assert all(map(torch.equal, got, loss_and_gradients(linear_cross_entropy, x, weight, targets)))
    assert distance(got[0], in_two(x.double(), weight.double(), targets)) < 1e-6
    torch_private.compiled_for_any_rows.cache_clear()


def test_the_compiled_loss_makes_no_second_matrix_of_logits():
    from torch._inductor.utils import run_and_get_code  # takes a second

    logits, targets = torch.zeros(50, 320, dtype=BF16), torch.zeros(50, dtype=torch.int64)
    compiled = torch.compile(ops.loss_in_two_kernels, fullgraph=True)
    _, (code, *_) = run_and_get_code(compiled, logits, targets, True)
    made = re.findall(r"empty_strided_\w+\(\((.*?)\)", code)
    assert made and not any("320" in shape for shape in made)


def test_loss_makes_the_gradients_that_are_asked_for_and_differentiates_once():
    x, weight, targets = loss_inputs(20, 8, 30)
    _, *gradients = loss_and_gradients(linear_cross_entropy, x, weight, targets)
    for i, want in enumerate(gradients):
        args = [x, weight, targets]
        args[i] = args[i].clone().requires_grad_()
        linear_cross_entropy(*args).backward()
        assert torch.equal(args[i].grad, want)
    assert not linear_cross_entropy(x, weight, targets).requires_grad
    weight.requires_grad_()
    with torch.no_grad():
        assert not linear_cross_entropy(x, weight, targets).requires_grad
    with pytest.raises(RuntimeError, match=r"^linear_cross_entropy: it is differentiable once: [^\n]*$"):
        torch.autograd.grad(linear_cross_entropy(x, weight, targets), weight, create_graph=True)


# -------------------------------------------------------------------------------------------------------------- misfits

conv = dict(x=torch.ones(2, 6, 5), weight=torch.ones(5, 4), bias=torch.ones(5), state=torch.ones(2, 3, 5))
norm = dict(x=torch.ones(2, 5), weight=torch.ones(5))
heads = dict(q=torch.ones(2, 3, 4, 8), k=torch.ones(2, 3, 6, 8), v=torch.ones(2, 3, 6, 8))
loss = dict(x=torch.ones(6, 4), weight=torch.ones(9, 4), targets=torch.zeros(6).long())
MISFITS = [  # operator, its arguments, what is changed, words
    (causal_conv1d, conv, dict(weight=torch.ones(4, 4)), r"\(4, 4\)"),
    (causal_conv1d, conv, dict(weight=torch.ones(5, 0)), r"\(5, 0\)"),
    (causal_conv1d, conv, dict(bias=torch.ones(4)), r"\(4,\)"),
    (causal_conv1d, conv, dict(state=torch.ones(2, 4, 5)), r"\(2, 4, 5\)"),
    (causal_conv1d, conv, dict(x=torch.ones(6, 5)), r"\(6, 5\)"),
    (causal_conv1d, conv, dict(x=None), "x must be a torch.Tensor, got NoneType"),
    (causal_conv1d, conv, dict(state=conv["x"].to_sparse()), "state must be a strided tensor"),
    (rms_norm, norm, dict(weight=torch.ones(4)), r"weight must be \(5,\) for x"),
    (rms_norm, norm, dict(x=torch.ones(2, 0), weight=torch.ones(0)), r"D at least 1, got \(2, 0\)"),
    (rms_norm, norm, dict(x=torch.ones(())), r"at least 1, got \(\)"),
    *((attention, heads, change, r"q must be \(B, H, T, n\), k and v ") for change in (
        dict(q=torch.ones(3, 4, 8)), dict(v=torch.ones(2, 3, 5, 8)), dict(q=torch.ones(2, 3, 7, 8)),
        dict(k=torch.ones(2, 3, 6, 7)))),
    (attention, heads, dict(window=0), "window must be at least 1, got 0"),
    (linear_cross_entropy, loss, dict(weight=torch.ones(9, 3)), r"weight \(9, 3\)"),
    (linear_cross_entropy, loss, dict(targets=torch.zeros(5).long()), r"targets \(5,\)"),
    (linear_cross_entropy, loss, dict(weight=torch.ones(4)), r"weight \(4,\)"),
    (linear_cross_entropy, loss, dict(x=torch.ones(6, 4).long()), "floating point")]


@pytest.mark.parametrize("f,args,change,words", MISFITS)
def test_misfits_are_one_line(f, args, change, words):
    f(**args)
    with pytest.raises(ValueError, match=rf"^{f.__name__}: [^\n]*{words}[^\n]*\Z"):
        f(**{**args, **change})


@pytest.mark.parametrize("token", (9, -2))
def test_a_target_outside_the_vocabulary_is_refused(token):
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        linear_cross_entropy(**{**loss, "targets": torch.full((6,), token)})


# --------------------------------------------------------------------------------------------------------------- as ops

def test_opcheck():
    torch.use_deterministic_algorithms(False)
    ops = torch.ops.longhorn
    a = conv_inputs(1, 5, 3, 3)
    plain = list(a.values())
    torch.library.opcheck(ops.causal_conv1d.default, (*(v.clone().requires_grad_() for v in plain), True, False))
    torch.library.opcheck(ops.causal_conv1d_backward.default, (torch.randn(1, 5, 3), *plain[:2], None, None, True,
                                                                 False))
    x, weight = norm_inputs((4, 6)).values()
    torch.library.opcheck(ops.rms_norm.default, (x.requires_grad_(), weight.requires_grad_(), 1e-5, F32))
    torch.library.opcheck(ops.rms_norm_backward.default,
                          (torch.randn(4, 6), x.detach(), weight.detach(), 1e-5, F32, torch.rand(4)))


def test_modes_see_the_operators():
    """Which trace, count or choose what to recompute: so they go through the dispatcher, forward and backward."""
    seen = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, f, types, args=(), kwargs=None):
            seen.append(str(f))
            return f(*args, **(kwargs or {}))

    with Names():
        graded(causal_conv1d, conv_inputs(1, 5, 3, 3))
    assert {"longhorn.causal_conv1d.default", "longhorn.causal_conv1d_backward.default"} <= set(seen)


def test_compiles_as_one_graph():
    """aot_eager, as in test_scan.py: all of torch.compile but the minute of code generation."""
    def f(x, weight, bias, state, scale):
        return rms_norm(causal_conv1d(x, weight, bias, state), scale)

    a = {**conv_inputs(2, 9, 5, 4), "scale": torch.randn(5)}
    want = graded(f, a)
    torch._dynamo.reset()
    got = graded(torch.compile(f, fullgraph=True, backend="aot_eager"), a)
    assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("f,a", [(causal_conv1d, conv_inputs(2, 9, 5, 4)), (rms_norm, norm_inputs((40, 33)))])
def test_autocast_rounds_x_or_the_result_and_no_parameter(f, a):
    with torch.autocast("cpu", BF16):
        got = graded(f, a)
        assert f(**a, backend="torch").dtype == BF16
    assert got["y"].dtype == BF16 and all(got["d" + n].dtype == F32 for n in a)
    if f is causal_conv1d:
        assert torch.equal(got["y"], f(**{**a, "x": a["x"].to(BF16)}))
    else:
        assert not disagreeing(got, graded(norm_true, double(a)))
    with torch.autocast("cpu", F16):
        y = f(**a)
    assert y.dtype == F16 and (y.double() - f(**double(a))).norm() < 4 * torch.finfo(F16).eps * y.double().norm()


def test_two_runs_agree_to_the_bit(threads):
    conv, norm, runs = conv_inputs(3, 70, 33, 4), norm_inputs((300, 33)), []
    for number in (1, 2, 2):
        threads(number)
        runs.append([*graded(causal_conv1d, conv).values(), *graded(rms_norm, norm).values()])
    assert all(torch.equal(u, v) for run in runs[1:] for u, v in zip(runs[0], run, strict=True))  # whatever the threads


def scan_case(update):
    """The kernels and the loop of a scan, y and hT as one vector, and their arguments."""
    a = inputs(update, 2, 5, 3, 2)
    flat = lambda y, hT: torch.cat([y.flatten(), hT.flatten()])
    run = lambda f: lambda *v, **kw: flat(*f(**dict(zip(a, v, strict=True)), return_state=True, **kw))
    return *map(run, SCANS[update]), a


@pytest.mark.parametrize("f,true,args", [
    (causal_conv1d, conv_true, conv_inputs(2, 6, 5, 4)), (rms_norm, norm_true, norm_inputs((4, 17))),
    *map(scan_case, SCANS)], ids=["causal_conv1d", "rms_norm", *SCANS])
def test_torch_func_and_forward_mode_are_right(f, true, args):
    """Kernels have a forward and a backward alone: without care they drop tangents unsaid."""
    args, wide = tuple(args.values()), tuple(double(args).values())
    g = torch.Generator().manual_seed(7)
    tangents = tuple(torch.randn(v.shape, generator=g) for v in args)
    want = torch.func.jvp(true, wide, tuple(v.double() for v in tangents))[1]
    assert agree(torch.func.jvp(f, args, tangents)[1], want)
    with forward_ad.dual_level():
        assert agree(forward_ad.unpack_dual(f(*map(forward_ad.make_dual, args, tangents))).tangent, want)
    with pytest.raises(RuntimeError, match=r"^(causal_conv1d|rms_norm|longhorn_scan|selective_scan): backend "
                       r"'cpu' cannot run [^\n]*forward-mode [^\n]*'$"):
        torch.func.jvp(functools.partial(f, backend="cpu"), args, tangents)
    squared = lambda *args, f: f(*args).square().sum()
    of_kernels, of_truth = (functools.partial(squared, f=g) for g in (f, true))
    want, grad = torch.func.grad(of_truth)(*wide), torch.func.grad(of_kernels)
    assert agree(grad(*args), want)
    got = torch.func.vmap(grad)(*(torch.stack([v, v + 1 if v is args[0] else v]) for v in args))
    assert agree(got[0], want) and distance(got[0], got[1]) > 0.1
    assert agree(torch.func.hessian(of_kernels)(*args), torch.func.hessian(of_truth)(*wide))


@pytest.mark.parametrize("f,a", [(rms_norm, norm_inputs((4, 17))), (longhorn_scan, inputs("longhorn", 1, 5, 3, 2))])
def test_second_derivative_is_refused(f, a):
    x = a["x"].clone().requires_grad_()
    (g,) = torch.autograd.grad(f(**{**a, "x": x}).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^(rms_norm|scan): the kernels are differentiable once: use [^\n]*$"):
        torch.autograd.grad(g.sum(), x)
    (g,) = torch.autograd.grad(f(**{**a, "x": x}, backend="torch").square().sum(), x, create_graph=True)
    assert torch.autograd.grad(g.sum(), x)[0].norm() > 0
