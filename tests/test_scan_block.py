"""The inside of a Mamba or Longhorn block as one operator, against the same lines of scan.py and ops.py.

Forwards to the bit; backwards no further from the lines in float64 than the lines with kernels are, or than rounding.

    python -m pytest tests/test_scan_block.py
"""


import pytest
import torch
import torch.nn.functional as F
from test_ops import graded
from test_scan import BF16, EPS, F16, F32, distance

import model
from bench.gpu import TESTED
from model import LM, Longhorn, ModelConfig
from ops import causal_conv1d
from scan import longhorn_scan, selective_scan
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
@pytest.mark.parametrize("B,T,d,N", [shape for shape in TESTED if shape[3] == 16])  # kernels that are built for test_cuda.py
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


def test_gradient_of_one_argument_alone_and_none_without_need():
    a = block_inputs("longhorn", 2, 35, 17, 16, 4, 2)
    whole = graded(in_one, a, update="longhorn")
    dy = torch.randn(whole["y"].shape, generator=torch.Generator().manual_seed(9)).to(BF16).to(F32)
    for name in a:
        one = {n: v.detach().requires_grad_(n == name) for n, v in a.items()}
        scan_block(**one, A=None, update="longhorn").backward(dy)
        assert torch.equal(one[name].grad, whole["d" + name]) and [n for n, v in one.items() if v.grad is not None] == [name]
    chunks = torch.ops.longhorn.scan_block(*(a.get(n) for n in ("xz", "conv_weight", "conv_bias", "x_weight", "dt_weight", "A",
                                                               "D", "dt_bias")), "longhorn", False)[-1]
    assert chunks.numel() == 0


def test_a_second_derivative_is_refused():
    a = {n: v.requires_grad_() for n, v in block_inputs("longhorn", 1, 3, 5, 2, 4, 1).items()}
    grad, = torch.autograd.grad(scan_block(**a, A=None, update="longhorn").sum(), a["xz"], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        grad.sum().backward()


@pytest.mark.parametrize("name,shape", [("xz", (2, 5, 9)), ("xz", (2, 10)), ("conv_bias", (4,)), ("x_weight", (7, 5)),
                                        ("x_weight", (1, 5)), ("dt_weight", (4, 2)), ("D", (6,)), ("A", (5, 2))])
def test_shapes_that_do_not_fit_are_said(name, shape):
    a = block_inputs("longhorn", 2, 5, 5, 2, 4, 2) | {"A": None}
    with pytest.raises(ValueError, match="scan_block: "):
        scan_block(**a | {name: torch.zeros(shape)}, update="longhorn")


def test_where_no_kernel_runs_it_is_said():
    for xz, W in ((torch.zeros(1, 2, 4, dtype=F16), 4), (torch.zeros(1, 2, 4).double(), 4), (torch.zeros(1, 2, 4), 9)):
        assert not can_run(xz, W)
        with pytest.raises(ValueError, match="no kernels"):
            scan_block(xz, torch.zeros(2, W), torch.zeros(2), torch.zeros(5, 2), torch.zeros(2, 1), None, torch.zeros(2),
                       torch.zeros(2), "longhorn")
    assert can_run(torch.zeros(1, 2, 4), 4) and not can_run(torch.zeros(1, 2, 4), 4, "torch")
    with torch.autocast("cpu", torch.float16):
        assert not can_run(torch.zeros(1, 2, 4), 4)


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


@pytest.mark.parametrize("family", ("longhorn", "longhorn_exact", "mamba"))
@pytest.mark.parametrize("dtype", (F32, BF16))
def test_a_model_learns_alike_with_and_without(family, dtype, calls, monkeypatch):
    grads = []
    for update in (True, False):
        lm = tiny(family)
        if not update:
            for branch in lm.branches:
                branch.branch.update = None
        with torch.autocast("cpu", dtype, enabled=dtype == BF16):
            loss = loss_of(lm)
        loss.backward()
        grads.append({"loss": loss.detach(), **{n: p.grad for n, p in lm.named_parameters()}})
    assert len(calls) == 2
    assert torch.equal(grads[0]["loss"], grads[1]["loss"])
    assert all(distance(g, grads[1][n].double()) < (0.02 if dtype == BF16 else 3e-6) for n, g in grads[0].items())


def test_another_scan_or_convolution_is_what_trains(calls, monkeypatch):
    class Halved(Longhorn):
        def scan(self, x, dt, k, q, z, h0):
            return super().scan(x, dt, k / 2, q, z, h0)

    class Inherits(Halved):
        pass

    class Named(Longhorn):
        update = "exact"

        def scan(self, x, dt, k, q, z, h0):
            return longhorn_scan(x, dt, k, q, self.D, z, self.dt_bias, h0, return_state=True, exact=True)

    assert (Halved.update, Inherits.update, Named.update) == (None, None, "exact")
    for mixer in (Halved, Inherits):
        monkeypatch.setitem(model.FAMILIES, "halved", [mixer])
        halved = tiny("halved")
        monkeypatch.setitem(model.FAMILIES, "halved", [Longhorn])
        plain = tiny("halved")
        plain.load_state_dict(halved.state_dict())
        with torch.no_grad():
            different = loss_of(plain) != loss_of(halved)
            plain.branches[0].branch.x_proj.weight[2:18] /= 2  # dt_rank 2, then 16 keys
            assert different and torch.allclose(loss_of(plain), loss_of(halved), atol=1e-6)
    assert len(calls) == 4  # those of `plain`


def test_hooks_and_replaced_projections_are_heard(calls):
    lm = tiny()
    first, second = (branch.branch for branch in lm.branches)
    seen = []
    handle = first.x_proj.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))

    class Adapted(torch.nn.Linear):
        def forward(self, x):
            seen.append("adapted")
            return super().forward(x)

    second.dt_proj = Adapted(second.R, second.d_inner, bias=False)
    loss_of(lm)
    assert seen == [(2, 39, 34), "adapted"] and not calls
    handle.remove()
    loss_of(lm)
    assert len(calls) == 1
