"""The loss against PyTorch's in float64, and tests that only the convolution, the norm or attention needs.

test_conformance.py has the tests that every operator shares.

    python -m pytest tests/test_ops.py
"""

import functools
import gc
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from operators import (
    BF16,
    EPS,
    F16,
    F32,
    F64,
    conv_inputs,
    conv_true,
    distance,
    graded,
    on_gpu,
    what_autograd_keeps,
    wrong,
)
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from initialisation import draw
from kernels import build, ops
from kernels.ops import again, attention, causal_conv1d, halves, linear_cross_entropy
from model import Longhorn, ModelConfig

pytestmark = pytest.mark.usefixtures("poison")


# ---------------------------------------------------------------------------------------------------- short convolution


@on_gpu
@pytest.mark.parametrize("dtype", (F32, BF16, F16))
@pytest.mark.parametrize("B,T,D,W", [(3, 40, 17, 3), (2, 65, 70, 4), (3, 300, 256, 4), (2, 130, 33, 8), (1, 7, 9, 1)])
def test_gpu_conv_is_that_of_float64(dtype, B, T, D, W):
    on_cpu = lambda **a: {"y": causal_conv1d(**{n: v.cuda() for n, v in a.items()}).cpu()}
    assert not wrong("conv", conv_inputs(B, T, D, W, dtype), run=on_cpu, true=lambda **a: {"y": conv_true(**a)})


@on_gpu
def test_gpu_conv_takes_more_than_two_to_the_31_elements():
    B, T, D = 33, 65536, 1024
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GB")
    x, weight = torch.randn(B, T, D, device="cuda", dtype=BF16), torch.randn(D, 4, device="cuda")
    assert x.numel() > 2**31 and torch.equal(causal_conv1d(x, weight)[-1:], causal_conv1d(x[-1:], weight))


def test_the_convolution_rounds_every_number_right():
    """Elements are compared one by one, because a norm shows only the typical error. bfloat16 is rounded to nearest
    even, and NaN stays NaN. Exponentials are right to a few units in the last place, however small."""
    x = torch.arange(0x3F80, 0x4000, dtype=torch.int16).view(BF16).view(1, -1, 1)  # all of [1, 2)
    for factor in (1.5, 1.25, 1.0078125):
        y = causal_conv1d(x, torch.full((1, 1), factor), silu=False)
        assert torch.equal(y, (x.float() * factor).to(BF16))
    nan = torch.tensor([-1], dtype=torch.int32).view(F32).view(1, 1)  # all bits set: rounding it up overflows
    assert causal_conv1d(x, nan, silu=False).isnan().all()
    x = torch.linspace(-80, 80, 4001).view(1, -1, 1)
    y, true = causal_conv1d(x, torch.ones(1, 1)).double(), F.silu(x.double())
    assert ((y - true).abs() <= 8 * EPS * true.abs()).all()


# ------------------------------------------------------------------------------------------------------- head and loss

def loss_inputs(n, D, V, dtype=F32, device="cpu", ignored=0.2):
    """x (n, D), weight (V, D), both rounded to `dtype`, and targets (n,), some of them ignored."""
    g = torch.Generator().manual_seed(n + 7 * D + 11 * V)
    x, weight = torch.randn(n, D, generator=g), torch.randn(V, D, generator=g) / math.sqrt(D)
    targets = torch.where(torch.rand(n, generator=g) < ignored, -1, torch.randint(V, (n,), generator=g))
    return x.to(device, dtype), weight.to(device, dtype), targets.to(device)


def in_two(x, weight, targets):
    """The same loss in PyTorch's two steps."""
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
    assert ours[0].dtype == torch.promote_types(x.dtype, F32) and [g.dtype for g in ours[1:]] == [x.dtype] * 2
    for got, in_steps, want in zip(ours, plain, true, strict=True):
        assert distance(got, want) <= max(1.5 * distance(in_steps, want), 4 * torch.finfo(got.dtype).eps)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("at_once", (1, 640), ids=lambda n: f"{n}logits")
@pytest.mark.parametrize("dtype", (F64, F32, BF16, F16))
@pytest.mark.parametrize("n,D,V", ((1, 1, 2), (50, 16, 64), (129, 24, 301)))
def test_loss_is_no_further_from_float64_than_in_two_steps(n, D, V, dtype, at_once, device, monkeypatch):
    monkeypatch.setitem(ops.LOGITS_AT_ONCE, device, at_once)  # one row at a time, or several with a remainder
    loss_agrees(*loss_inputs(n, D, V, dtype, device, ignored=0.2 if n > 1 else 0), factor=3 / 7)


@on_gpu
def test_gpu_loss_takes_more_than_two_to_the_31_logits():
    x, weight, targets = loss_inputs(45000, 8, 50304, BF16, "cuda")
    ends = torch.tensor([*range(100), *range(-100, 0)])
    loss, dx, dweight = loss_and_gradients(linear_cross_entropy, x, weight, targets, float((targets != -1).sum()))
    counted = float((targets[ends] != -1).sum())
    true = loss_true(x[ends], weight, targets[ends], counted)
    assert loss.isfinite() and distance(dx[ends], true[1]) < 0.01 and dweight.isfinite().all()


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
        # a mean over 2^6 targets divides exactly, so both round the same numbers
        assert all(g.dtype == F32 and distance(g, w.double()) < 1e-6 for g, w in zip(got, want, strict=True))


def test_loss_does_not_round_the_factor_of_all_gradients():
    x, weight, targets = loss_inputs(64, 32, 100, BF16, ignored=0)
    factor = 1 + 0.99 / 256  # bfloat16 has 1 and 1 + 1 / 128, and nothing between
    true = loss_true(x, weight, targets, factor)
    with torch.autocast("cpu", BF16):
        got = loss_and_gradients(linear_cross_entropy, x.float(), weight.float(), targets, factor)
    for g, t in zip(got[1:], true[1:], strict=True):
        assert ((g.double() * t).sum() / t.square().sum()).item() == pytest.approx(1, abs=1e-3)


def test_loss_in_float16_neither_underflows_nor_overflows():
    """With 4096 targets the gradient of a logit is about 1e-3 / 4096, below float16's smallest normal number. Then half
    of 2^15 targets are the same token, and one channel of x has a mean of 20: their sum exceeds float16."""
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


def test_loss_is_right_without_targets_or_beside_an_ignored_infinity():
    x, weight, targets = loss_inputs(6, 4, 9, ignored=0)
    for n in (6, 0):  # like PyTorch's mean
        loss, *gradients = loss_and_gradients(linear_cross_entropy, x[:n], weight, torch.full_like(targets[:n], -1))
        assert loss.isnan() and not any(g.any() for g in gradients)
    x[2], targets[2] = math.inf, -1
    loss, dx, dweight = loss_and_gradients(linear_cross_entropy, x, weight, targets)
    assert loss.isfinite() and not dx[0].isnan().any() and dx[0].norm() > 0
    transposed = x[::3].t().contiguous().t()
    for some, of in ((x[:2].unflatten(0, (1, 2)), targets[:2][None]), (x[0], targets[0]), (transposed, targets[::3])):
        true = in_two(some.reshape(-1, 4).double(), weight.double(), of.reshape(-1))
        assert distance(linear_cross_entropy(some, weight, of), true) < 1e-6


class Seen(TorchDispatchMode):
    """Collects the names of all operators that run, and the tensors that they create."""

    def __init__(self):
        super().__init__()
        self.names, self.made = [], []

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        self.names.append(str(f))
        self.made += [part for part in tree_leaves(out) if isinstance(part, torch.Tensor)]
        return out


def test_loss_keeps_two_bytes_a_logit_and_never_makes_all_in_float32(monkeypatch):
    monkeypatch.setitem(ops.LOGITS_AT_ONCE, "cpu", 4096)
    x, weight, targets = loss_inputs(256, 8, 512, BF16)
    x.requires_grad_(), weight.requires_grad_()
    with Seen() as seen, what_autograd_keeps() as kept:
        linear_cross_entropy(x, weight, targets).backward()
    logits = x.shape[0] * weight.shape[0]
    assert sum(kept.values()) <= 2 * logits + 2 * (x.numel() + weight.numel()) + 8 * len(x)
    large = [t for t in seen.made if t.numel() > max(4096, weight.numel())]
    assert large and all(t.dtype == BF16 for t in large) and len({t.untyped_storage().data_ptr() for t in large}) == 1


@on_gpu
@pytest.mark.parametrize("V", (301, 50304, 128256))
@pytest.mark.parametrize("dtype", (F32, BF16))
def test_gpu_loss_is_pytorchs_and_repeats_to_the_bit(V, dtype):
    x, weight, targets = loss_inputs(50, 16, V, dtype, "cuda", ignored=0)
    first, second = (loss_and_gradients(linear_cross_entropy, x, weight, targets) for _ in range(2))
    assert ops.loss_module(dtype, V, x.device) is not None and all(map(torch.equal, first, second))
    loss = linear_cross_entropy(x.requires_grad_(), weight, targets)
    with mock.patch.object(ops, "loss_module", lambda *key: None):
        plain = linear_cross_entropy(x, weight, targets)
    assert abs(loss - plain) <= 1e-6
    got, wanted = (a.grad_fn.saved_tensors[2].double() for a in (loss, plain))  # the gradients of the logits
    ulp = torch.finfo(dtype).eps
    assert ((got - wanted).abs() <= ulp * wanted.abs() + 64 * EPS * ulp).all()


def test_a_line_says_that_the_kernel_of_the_loss_cannot_be_built(monkeypatch):
    lines = []
    monkeypatch.setattr(build, "say_once", lines.append)
    monkeypatch.setattr(ops.choose, "unavailable", lambda device: "no nvcc")
    gpu = torch.device("cuda", 0)
    assert ops.loss_module.__wrapped__(BF16, 320, gpu) is None and lines[0].endswith("takes longer (no nvcc)")
    assert ops.loss_module.__wrapped__(F64, 320, gpu) is None and len(lines) == 1
    monkeypatch.setattr(ops.choose, "unavailable", lambda device: None)
    h200 = mock.Mock(shared_memory_per_multiprocessor=228 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    monkeypatch.setattr(ops.launch, "gpu_module", mock.Mock(side_effect=OSError("could not build loss.cu")))
    with pytest.raises(OSError, match="loss.cu"):  # an edited kernel that does not compile
        ops.loss_module.__wrapped__(BF16, 320, gpu)


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


# ------------------------------------------------------------------------------------------ two halves, two gradients

def block_and_rows(width):
    block = Longhorn(ModelConfig(n_embd=4, d_state=3), 0)
    draw(block, torch.tensor(0))
    return block, torch.randn(2, 40, width, requires_grad=True)


def living(shape):
    """The number of tensors of this shape in memory."""
    gc.collect()
    return sum(isinstance(a, torch.Tensor) and a.shape == shape for a in gc.get_objects())


@pytest.mark.parametrize("use", (
    lambda mix, x, z: mix(x, z)[0] - mix(x, z, reverse=True)[0],
    lambda mix, x, z: mix(x, z.detach())[0],
    lambda mix, x, z: mix(x.detach(), z)[0] * z,
    lambda mix, x, z: z.register_hook(lambda g: 3 * g) and checkpoint(mix, x, z, use_reentrant=False)[0]))
def test_gradients_of_halves_are_those_of_chunk(use):
    """Gradients also agree when a graph is used again, although those of x and z may be parts of one tensor."""
    block, both = block_and_rows(16)
    gradients = []
    for split in (halves, lambda both: both.chunk(2, -1)):
        x, z = split(both)
        y = use(block.mix, x, z).square().sum()
        before = living(both.shape)
        for of in ((x, z), both, both):
            of_these = torch.autograd.grad(y, of, retain_graph=True, materialize_grads=True)
            gradients += map(torch.clone, of_these)  # a view would keep the whole tensor
        del of_these
        assert living(both.shape) == before + 2, "memory is not freed"
    assert all(map(torch.equal, gradients[:4], gradients[4:]))


def test_the_backward_of_a_block_joins_no_halves_and_adds_no_gradients():
    """The backward joins only the gradients of r, k and q. Modes that trace, count or choose what to recompute
    see this: the operators go through the dispatcher, forward and backward."""
    block, u = block_and_rows(4)
    graphs = []
    keep = lambda graph, inputs: graphs.append(graph.code) or make_boxed_func(graph)
    compiled = torch.compile(block, fullgraph=True, backend=aot_autograd(fw_compiler=keep))
    gradient = lambda f: torch.autograd.grad(f(u)[0].sum(), u)[0]
    with Seen() as seen:
        want = gradient(block)
    assert {"longhorn.causal_conv1d_forward.default", "longhorn.causal_conv1d_backward.default"} <= set(seen.names)
    assert torch.equal(gradient(compiled), want) and torch.equal(gradient(block), want)
    assert seen.names.count("aten.cat.default") == graphs[1].count("aten.cat.default") == 1
    assert "aten.add" not in " ".join(seen.names) + graphs[1]


@pytest.mark.parametrize("dtype", (F32, BF16, F16))
@pytest.mark.parametrize("use", (
    lambda y, again: y * again(y).sin(), lambda y, again: again(y).sin(),
    lambda y, again: y.mul_(2) * again(y).sin()))
def test_the_convolution_adds_two_gradients_as_autograd_does(use, dtype):
    run = lambda name: graded(lambda **a: use(causal_conv1d(**a), name), conv_inputs(2, 37, 21, 4, dtype))
    got, want = run(again), run(lambda y: y)
    assert all(torch.equal(got[n], want[n]) for n in want)


# ------------------------------------------------------------------------------------------------------- misfits, modes

heads = dict(q=torch.ones(2, 3, 4, 8), k=torch.ones(2, 3, 6, 8), v=torch.ones(2, 3, 6, 8))
loss = dict(x=torch.ones(6, 4), weight=torch.ones(9, 4), targets=torch.zeros(6).long())
MISFITS = [  # operator, its arguments, changes to them, words of the error
    *((attention, heads, change, r"q must be \(B, H, T, n\), k and v ") for change in (
        dict(q=torch.ones(3, 4, 8)), dict(v=torch.ones(2, 3, 5, 8)), dict(q=torch.ones(2, 3, 7, 8)),
        dict(k=torch.ones(2, 3, 6, 7)))),
    (attention, heads, dict(window=0), "window must be at least 1, got 0"),
    (linear_cross_entropy, loss, dict(weight=torch.ones(9, 3)), r"weight \(9, 3\)"),
    (linear_cross_entropy, loss, dict(targets=torch.zeros(5).long()), r"targets \(5,\)"),
    (linear_cross_entropy, loss, dict(weight=torch.ones(4)), r"weight \(4,\)"),
    (linear_cross_entropy, loss, dict(x=torch.ones(6, 4).long()), "floating point")]


@pytest.mark.parametrize("f,args,change,words", MISFITS)
def test_misfits_are_refused_in_one_line(f, args, change, words):
    f(**args)
    with pytest.raises(ValueError, match=rf"^{f.__name__}: [^\n]*{words}[^\n]*\Z"):
        f(**{**args, **change})


@pytest.mark.parametrize("token", (9, -2))
def test_a_target_outside_the_vocabulary_is_refused(token):
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        linear_cross_entropy(**{**loss, "targets": torch.full((6,), token)})


def test_a_window_never_looks_at_the_whole_text(monkeypatch):
    seen, plain = [], F.scaled_dot_product_attention
    monkeypatch.setattr(F, plain.__name__, lambda *a, **kw: seen.append(a[1].shape[2]) or plain(*a, **kw))
    for window in (5, 64, 100):
        attention(*torch.randn(3, 1, 1, 400, 8), window=window)
        assert max(seen) < window + max(window, ops.WINDOW_QUERIES)


def test_rms_norm_takes_any_shape_and_eps():
    for shape, eps in (((33,), 1e-5), ((2, 3, 5, 16), 0.5), ((1, 2), 0.5)):
        a = {"x": torch.randn(shape), "weight": torch.randn(shape[-1])}
        assert not wrong("rms_norm", a, eps=eps)
