"""The inside of a Mamba or Longhorn block as one operator, against the same lines of scan.py and ops.py.

Forwards to the bit; backwards no further from the lines in float64 than the lines with kernels are, or than rounding.

    python -m pytest tests/test_scan_block.py
"""

import functools
import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from test_ops import graded
from test_scan import BF16, EPS, F16, F32, distance

import model
import scan_block as scan_module
from bench.gpu import TESTED
from kernels.ops import causal_conv1d
from kernels.scan import longhorn_scan, selective_scan
from model import LM, Longhorn, ModelConfig
from scan_block import can_run, scan_block

pytestmark = pytest.mark.usefixtures("poison")

UPDATES = ("longhorn", "exact", "mamba_softplus", "mamba")
SHAPES = [  # B, T, d, N, W, R
    (2, 37, 17, 16, 4, 2), (1, 1, 1, 1, 1, 1), (3, 70, 33, 3, 4, 5), (1, 33, 16, 16, 8, 1), (2, 64, 48, 8, 4, 3),
    (1, 2, 5, 4, 4, 1)]


def block_inputs(update, B, T, d, N, W, R, dtype=F32, device="cpu"):
    g = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(*shape, generator=g)
    a = dict(xz=rand(B, T, 2 * d).to(dtype), conv_weight=rand(d, W), conv_bias=rand(d), x_weight=rand(R + 2 * N, d) / d**0.5,
             dt_weight=rand(d, R) / R**0.5, D=rand(d), dt_bias=rand(d))
    if update.startswith("mamba"):
        a["A"] = -rand(d, N).exp()
    if update == "mamba":  # without softplus: step sizes that are positive
        a["dt_weight"], a["dt_bias"] = a["dt_weight"] / 10, a["dt_bias"].abs() + 0.5
    return {n: v.to(device) for n, v in a.items()}


def spelled_out(xz, conv_weight, conv_bias, x_weight, dt_weight, D, dt_bias, A=None, update=None, backend=None):
    x, z = xz.chunk(2, -1)
    c = causal_conv1d(x, conv_weight, conv_bias, backend=backend)
    R, N = dt_weight.shape[1], (x_weight.shape[0] - dt_weight.shape[1]) // 2
    r, k, q = F.linear(c, x_weight.to(c.dtype)).split([R, N, N], -1)
    dt = F.linear(r, dt_weight.to(c.dtype))
    if A is None:
        return longhorn_scan(c, dt, k, q, D, z, dt_bias, exact=update == "exact", backend=backend)
    return selective_scan(c, dt, A, k, q, D, z, dt_bias, delta_softplus=update == "mamba_softplus", backend=backend)


def in_one(A=None, **a):
    return scan_block(A=A, **a)


def block_failures(update, a):
    """{result: (its error, that of the lines with kernels)} where the operator is worse than these and than rounding."""
    got, lines = ({n: v.cpu() for n, v in graded(f, a, update=update).items()} for f in (in_one, spelled_out))
    true = graded(spelled_out, {n: v.double().cpu() for n, v in a.items()}, update=update, backend="torch")
    assert torch.equal(got["y"], lines["y"]) and all(got[n].dtype == lines[n].dtype for n in lines)
    rounding = 16 * EPS + (torch.finfo(a["xz"].dtype).eps if a["xz"].dtype != F32 else 0.0)  # of what is between, too
    wrong = {}
    for n, v in got.items():
        error, theirs = distance(v, true[n]), distance(lines[n], true[n])
        if not error <= max(1.2 * theirs, rounding):
            wrong[n] = error, theirs
    return wrong


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_the_lines(update, shape):
    assert not block_failures(update, block_inputs(update, *shape))
    assert not block_failures(update, block_inputs(update, *shape, dtype=BF16))


def test_long_rows_of_several_tasks():
    assert not block_failures("longhorn", block_inputs("longhorn", 1, 500, 100, 16, 4, 6))
    assert not block_failures("mamba_softplus", block_inputs("mamba_softplus", 5, 200, 64, 16, 4, 4, BF16))


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: nothing ran on one")


@on_gpu
@pytest.mark.parametrize("update,dtype", [*((update, BF16) for update in UPDATES), ("longhorn", F32), ("longhorn", F16)])
@pytest.mark.parametrize("B,T,d,N", [  # kernels that are built for test_cuda.py; small, for the truth comes from the CPU
    shape for shape in TESTED if shape[3] == 16 and shape[1] <= 1024 and math.prod(shape) < 2e7])
def test_gpu_block_agrees_with_the_lines(update, dtype, B, T, d, N):
    torch.set_float32_matmul_precision("highest")
    assert not block_failures(update, block_inputs(update, B, T, d, N, 4, 5, dtype, "cuda"))


@on_gpu
def test_gpu_block_compiles_and_repeats_to_the_bit():
    a = block_inputs("longhorn", 72, 128, 512, 16, 4, 8, BF16, "cuda")
    compiled = torch.compile(in_one, fullgraph=True, backend="aot_eager")
    want = graded(in_one, a, update="longhorn")
    for f in (in_one, compiled):
        got = graded(f, a, update="longhorn")
        assert all(torch.equal(got[n], want[n]) for n in want)


@pytest.mark.parametrize("update", UPDATES)
def test_opcheck(update):
    torch.use_deterministic_algorithms(False)
    a = {n: v.requires_grad_() for n, v in block_inputs(update, 2, 34, 3, 2, 4, 2).items()}
    args = [a.get(n) for n in ("xz", "conv_weight", "conv_bias", "x_weight", "dt_weight", "A", "D", "dt_bias")]
    torch.library.opcheck(torch.ops.longhorn.scan_block.default, (*args, update, True))
    plain = [None if v is None else v.detach() for v in args]
    torch.library.opcheck(torch.ops.longhorn.scan_block.default, (*plain, update, False))
    y, *kept = torch.ops.longhorn.scan_block(*plain, update, True)
    torch.library.opcheck(torch.ops.longhorn.scan_block_backward.default, (torch.randn_like(y), *plain, *kept, update))


def test_gradient_of_one_argument_alone():
    a = block_inputs("longhorn", 2, 35, 17, 16, 4, 2)
    whole = graded(in_one, a, update="longhorn")
    dy = torch.randn(whole["y"].shape, generator=torch.Generator().manual_seed(9)).to(BF16).to(F32)
    for name in a:
        one = {n: v.detach().requires_grad_(n == name) for n, v in a.items()}
        scan_block(**one, A=None, update="longhorn").backward(dy)
        assert torch.equal(one[name].grad, whole["d" + name]) and [n for n, v in one.items() if v.grad is not None] == [name]


def test_states_are_kept_only_for_a_backward(monkeypatch):
    kept, forward = [], scan_module.scan_forward
    monkeypatch.setattr(scan_module, "scan_forward", lambda *a: kept.append(a[-1]) or forward(*a))
    a = block_inputs("longhorn", 1, 3, 5, 2, 4, 1)
    needed = {n: v.clone().requires_grad_() for n, v in a.items()}
    in_one(**a, update="longhorn")
    in_one(**needed, update="longhorn")
    with torch.no_grad():
        in_one(**needed, update="longhorn")
    assert kept == [False, True, False]


def test_a_second_derivative_is_refused():
    a = {n: v.requires_grad_() for n, v in block_inputs("longhorn", 1, 3, 5, 2, 4, 1).items()}
    grad, = torch.autograd.grad(scan_block(**a, A=None, update="longhorn").sum(), a["xz"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.sum().backward()


@pytest.mark.parametrize("name,shape", [
    ("xz", (2, 5, 9)), ("xz", (2, 10)), ("xz", (2, 0, 10)), ("xz", ()), ("conv_bias", (4,)), ("x_weight", (7, 5)),
    ("x_weight", (1, 5)), ("x_weight", ()), ("dt_weight", (4, 2)), ("dt_weight", (5,)), ("conv_weight", (5, 0)), ("D", (6,)),
    ("A", (5, 2))])
def test_shapes_that_do_not_fit_are_said(name, shape):
    a = block_inputs("longhorn", 2, 5, 5, 2, 4, 2) | {"A": None}
    with pytest.raises(ValueError, match="scan_block: "):
        scan_block(**a | {name: torch.zeros(shape)}, update="longhorn")


def test_other_arguments_that_do_not_fit_are_said():
    a = block_inputs("longhorn", 2, 5, 5, 2, 4, 2) | {"A": None}
    with pytest.raises(ValueError, match="D is on meta, xz on cpu: move them"):
        scan_block(**a | {"D": a["D"].to("meta")}, update="longhorn")
    for update in ("longhorn_softplus", "Mamba"):
        with pytest.raises(ValueError, match="unknown update '.*': choose one of longhorn,"):
            scan_block(**a, update=update)
    with pytest.raises(ValueError, match="no A do not go with update 'mamba'"):
        scan_block(**a, update="mamba")
    with pytest.raises(ValueError, match="conv_weight must be a torch.Tensor, got NoneType"):
        scan_block(**a | {"conv_weight": None}, update="longhorn")


def test_where_no_kernel_runs_it_is_said():
    for xz, W in ((torch.zeros(1, 2, 4, dtype=F16), 4), (torch.zeros(1, 2, 4).double(), 4), (torch.zeros(1, 2, 4), 9)):
        assert not can_run(xz, W)
        with pytest.raises(ValueError, match="kernels do not run here"):
            scan_block(xz, torch.zeros(2, W), torch.zeros(2), torch.zeros(5, 2), torch.zeros(2, 1), None, torch.zeros(2),
                       torch.zeros(2), "longhorn")
    assert can_run(torch.zeros(1, 2, 4), 4) and not can_run(torch.zeros(1, 2, 4), 4, "torch")
    with torch.autocast("cpu", F16):
        assert not can_run(torch.zeros(1, 2, 4), 4)
    half = {n: v.to(F16) for n, v in block_inputs("longhorn", 1, 3, 5, 2, 4, 1).items()}
    args = [half.get(n) for n in ("xz", "conv_weight", "conv_bias", "x_weight", "dt_weight", "A", "D", "dt_bias")]
    y, *kept = torch.ops.longhorn.scan_block(*args, "longhorn", True)
    with pytest.raises(ValueError, match="the kernels write torch.float32 here, not torch.float16"):  # twice as many bytes
        torch.ops.longhorn.scan_block_backward(y, *args, *kept, "longhorn")


@pytest.mark.parametrize("without", ("conv_bias", "D", "dt_bias"))
def test_without_an_optional_tensor(without):
    a = block_inputs("longhorn", 2, 35, 17, 16, 4, 2)
    del a[without]
    got, want = (graded(f, a, update="longhorn", **{without: None}) for f in (in_one, spelled_out))
    assert torch.equal(got["y"], want["y"]) and all(distance(got[n], want[n].double()) <= 32 * EPS for n in want)


def test_several_gradients_at_once():
    a = {n: v.requires_grad_() for n, v in block_inputs("longhorn", 1, 5, 6, 4, 4, 2).items()}
    y = scan_block(**a, A=None, update="longhorn")
    dys = torch.randn(3, *y.shape)
    grads = lambda dy: torch.autograd.grad(y, list(a.values()), dy, retain_graph=True)
    together = torch.func.vmap(grads)(dys)
    assert all(torch.equal(g[i], one) for i, dy in enumerate(dys) for g, one in zip(together, grads(dy), strict=True))


# ------------------------------------------------------------------------------------------------- in the block of model.py

def loss_of(lm):
    idx = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(3))
    return lm(idx[:, :-1], idx[:, 1:])[1]


def tiny(family="longhorn"):
    torch.manual_seed(0)
    return LM(ModelConfig(model=family, n_layer=1, n_head=2, n_embd=32, block_size=40, vocab_size=64))


@pytest.fixture
def calls(monkeypatch):
    """How often model.py asked for the operator."""
    made = []
    monkeypatch.setattr(model, "scan_block", lambda *a: made.append(1) or scan_block(*a))
    return made


def unmark(lm):
    """Have the model run as ScanBlock.forward spells it out."""
    for branch in lm.branches:
        branch.branch.conv = functools.partial(branch.branch.conv)
    return lm


@pytest.mark.parametrize("family", ("longhorn", "longhorn_exact", "mamba"))
@pytest.mark.parametrize("dtype", (F32, BF16))
def test_a_model_learns_alike_with_and_without(family, dtype, calls):
    grads = []
    for lm in (tiny(family), unmark(tiny(family))):
        with torch.autocast("cpu", dtype, enabled=dtype == BF16):
            loss = loss_of(lm)
        loss.backward()
        grads.append({"loss": loss.detach(), **{n: p.grad for n, p in lm.named_parameters()}})
    assert len(calls) == 2
    assert torch.equal(grads[0]["loss"], grads[1]["loss"])
    assert all(distance(g, grads[1][n].double()) < (0.02 if dtype == BF16 else 3e-6) for n, g in grads[0].items())


class Halved(Longhorn):
    def scan(self, x, dt, k, q, z, h0):
        return super().scan(x, dt, k / 2, q, z, h0)


class Inherits(Halved):
    pass


class HalvesFor:
    def scan(self, x, dt, k, q, z, h0):
        return super().scan(x, dt, k / 2, q, z, h0)


class MixedIn(HalvesFor, Longhorn):
    pass


class BoundLater(Longhorn):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.scan = lambda x, dt, k, q, z, h0: Longhorn.scan(self, x, dt, k / 2, q, z, h0)


class Wraps(Longhorn):
    @functools.wraps(Longhorn.scan)
    def scan(self, x, dt, k, q, z, h0):
        return Longhorn.scan(self, x, dt, k / 2, q, z, h0)


@pytest.mark.parametrize("mixer", (Halved, Inherits, MixedIn, BoundLater, Wraps), ids=lambda c: c.__name__)
@torch.no_grad()
def test_another_scan_is_what_trains(mixer, calls, monkeypatch):
    monkeypatch.setitem(model.FAMILIES, "halved", [mixer])
    halved = tiny("halved")
    monkeypatch.setitem(model.FAMILIES, "halved", [Longhorn])
    plain = tiny("halved")
    plain.load_state_dict(halved.state_dict())
    assert loss_of(plain) != loss_of(halved)
    plain.branches[0].branch.x_proj.weight[2:18] /= 2  # dt_rank 2, then 16 keys
    assert torch.allclose(loss_of(plain), loss_of(halved), atol=1e-6)
    assert len(calls) == 2  # those of `plain`


def test_another_convolution_is_what_trains(calls, monkeypatch):
    class NoConvolution(Longhorn):
        def conv(self, x, before):
            return F.silu(x)

    monkeypatch.setitem(model.FAMILIES, "none", [NoConvolution])
    lm = tiny("none")
    loss_of(lm).backward()
    assert not calls and lm.branches[0].branch.conv_weight.grad is None


class Adapted(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def with_bias(m):
    m.bias = nn.Parameter(torch.ones(m.out_features))


@pytest.mark.parametrize("name", ("x_proj", "dt_proj"))
@pytest.mark.parametrize("change", [
    lambda m: m.register_forward_hook(lambda module, inputs, y: 2 * y), with_bias, lambda m: setattr(m, "__class__", Adapted),
    lambda m: m.register_forward_pre_hook(lambda module, inputs: (2 * inputs[0],)),
    lambda m: setattr(m, "forward", lambda x: 2 * F.linear(x, m.weight))],
    ids=("hook", "bias", "class", "pre-hook", "forward"))
@torch.no_grad()
def test_changed_projections_are_what_trains(name, change, calls):
    lm = tiny()
    before, idx = loss_of(lm), torch.randint(64, (1, 9))
    calls.clear()
    for branch in lm.branches:
        change(getattr(branch.branch, name))
    assert loss_of(lm) != before and not calls
    assert torch.allclose(lm(idx)[0], lm(idx, state=lm.initial_state(1))[0], atol=1e-6)


def test_backward_hooks_are_heard():
    lm, heard = tiny(), []
    lm.branches[0].branch.x_proj.register_full_backward_hook(lambda *_: heard.append(1))
    loss_of(lm).backward()
    assert heard == [1]


def test_dtypes_that_the_operator_leaves_to_the_parts(calls):
    idx = torch.randint(64, (1, 20))
    lm = LM(ModelConfig(n_layer=1, n_head=2, n_embd=32, block_size=40, vocab_size=64, scan_backend="cpu")).half()
    lm(idx, idx)[1].backward()
    block, u = tiny().double().branches[0].branch, torch.randn(1, 9, 32).double()
    want = block(u)[0]
    with torch.autocast("cpu", BF16):
        got = block(u)[0]
    assert got.dtype == want.dtype == torch.float64 and torch.equal(got, want) and not calls
