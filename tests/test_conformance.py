"""The same tests for every operator: a new operator needs only its row in OPERATORS.

The truth is computed in float64 from the same rounded arguments, so that the error is the operator's own. Tolerances
are relative to the norm of the true result: 16 eps of the dtype used to compute, which is float32 even for 16-bit
arguments. Matrix products have 32 eps, and Mesa, which solves equations, has 64. A 16-bit result may also be off by
half a unit in the last place.

    python -m pytest tests/test_conformance.py
"""

import contextlib
import functools
import itertools
import re

import pytest
import torch
from operators import (
    BF16,
    EPS,
    F16,
    F32,
    F64,
    NATIVE,
    OPERATORS,
    bare,
    cast,
    distance,
    double,
    generator,
    graded,
    in_halves,
    timed,
    views,
    what_autograd_keeps,
    wrong,
)
from torch.utils.checkpoint import checkpoint

from kernels import choose, ops
from kernels import linear_attention as la

EVERY = pytest.mark.parametrize("name", OPERATORS)
REVERSIBLE = [name for name in NATIVE if name != "rms_norm"]
OF_KERNELS = pytest.mark.parametrize("name", NATIVE)

pytestmark = pytest.mark.usefixtures("poison", "one_thread")


def small(name, T=20, dtype=F32):
    """(the operator's row, small arguments for it)."""
    row = OPERATORS[name]
    return row, cast(row, row.draw(T), dtype)


def equal(got, want):
    return all(torch.equal(got[n], want[n]) for n in want)


@pytest.fixture
def short_chunks(monkeypatch):
    """Shortens chunks to 8 and 16 steps, so that short sequences cross the borders of chunks."""
    monkeypatch.setattr(la, "GLA_CHUNK", 8)
    for module, name in ((la, "CHUNK"), (ops, "PIECE"), (ops, "WINDOW_QUERIES")):
        monkeypatch.setattr(module, name, 16)


SHORT = pytest.mark.usefixtures("short_chunks")


# ---------------------------------------------------------------------------------------------------- against the truth

@SHORT
@EVERY
@pytest.mark.parametrize("backend", ("", "torch"))
def test_values_and_every_gradient_are_right(name, backend):
    """Tries odd sizes and every dtype, with all optional arguments and with none, forward and in reverse."""
    row = OPERATORS[name]
    beyond = {}
    exact = F32 if name in NATIVE and not backend else F64
    for i, sizes in enumerate(row.shapes[::4] if backend else row.shapes):
        a = row.draw(**sizes)
        a = bare(row, a) if i % 3 == 2 else a
        for dtype in (exact, (BF16, F16)[i % 2]):
            given, tolerance = cast(row, a, dtype), row.tolerance * (2 if backend else 1)  # a loop's errors add up
            if dtype.itemsize == 2 and rounds_often(name, backend, dtype, sizes):
                tolerance = 4 * torch.finfo(dtype).eps / EPS
            errors = wrong(name, given, backend, tolerance=tolerance)
            if name in REVERSIBLE and i % 4 == 1:
                only = "y" if name == "conv" else None
                errors |= {"reversed": wrong(name, given, backend, only, tolerance=2 * tolerance, reverse=True)}
            beyond |= {(str(sizes), dtype, n): e for n, e in errors.items() if e}
    assert not beyond


def rounds_often(name, backend, dtype, sizes):
    """True where PyTorch's operators run, which also round intermediate results."""
    if name in ("attention", "window"):
        return True
    return name == "conv" and (backend or sizes.get("W") == 9) or name == "rms_norm" and (backend or dtype == F16)


@EVERY
def test_every_choice_of_optional_arguments_gives_right_results(name):
    """Also tries every choice of results that the loss depends on."""
    row, a = small(name, 35)
    beyond = {}
    for given in itertools.product((True, False), repeat=len(row.optional) + 1):
        left_out = list(itertools.compress(row.optional, given)) + list(row.states if given[-1] else ())
        some = {n: v for n, v in a.items() if n not in left_out}
        for only in (None, *row.seen(row.run(**some))):
            beyond |= {(given, only, n): e for n, e in wrong(name, some, only=only).items()}
    assert not beyond


@EVERY
@pytest.mark.parametrize("backend", ("", "torch"))
def test_pieces_with_the_state_carried_equal_the_whole(name, backend):
    """Gradients agree too. Kernels give the same bits, since they do the same arithmetic at every step. Only the whole
    is compared with the truth, with chunks as long as in training."""
    row = OPERATORS[name]
    a = cast(row, row.draw(100), F32 if name in NATIVE else F64)
    assert not wrong(name, a, backend)
    whole = timed(row, a)
    given = {n: v for n, v in a.items() if n in row.states}

    def pieces(**a):
        ys = []
        t = 0
        for steps in (1, 2, 29, 33, 1, 34):
            part = {n: v[:, t:t + steps] if n in whole else v for n, v in a.items()}
            out = row.run(**part, backend=backend)
            ys.append(out.pop("y"))
            a = a | out
            t += steps
        return {"y": torch.cat(ys, 1), **out}

    assert not wrong(name, a, run=pieces, true=row.run)
    if name in NATIVE and not backend:
        assert equal(pieces(**a), row.run(**a))
    assert equal(given, {n: a[n] for n in given})


LENGTHS = ((1, 1, 10, 3, 12, 13), (16, 16, 8), (39, 1))  # they end after one token, in a chunk, at its border


def alone(f):
    """f, applied to each document by itself."""
    def run(**a):
        rows = []
        for b, lengths in enumerate(LENGTHS):
            ends = itertools.accumulate(lengths)
            parts = ({n: v[b:b + 1, end - length:end] if v.dim() > 2 else v for n, v in a.items()}
                     for end, length in zip(ends, lengths, strict=True))
            rows.append(torch.cat([f(**part)["y"] for part in parts], 1))
        return {"y": torch.cat(rows)}
    return run


@SHORT
@EVERY
@pytest.mark.parametrize("backend", ("", "torch"))
def test_packed_documents_give_what_each_gives_alone(name, backend):
    """Gradients agree too, and stay the same to the bit if the backward recomputes the forward once or twice."""
    row = OPERATORS[name]
    starts = torch.zeros(3, 40, dtype=torch.bool)
    for b, lengths in enumerate(LENGTHS):
        starts[b, torch.tensor(lengths).cumsum(0)[:-1]] = True
    a = {n: v for n, v in row.draw(40, B=3).items() if n not in row.states}
    given = cast(row, a, F32 if name in NATIVE else F64)
    run = lambda **a: {"y": row.run(**a, backend=backend)["y"]}
    with ops.documents(starts):
        assert not wrong(name, given, run=run, true=alone(row.true), tolerance=64)
        forward = graded(run, given)
        given = {n: v.requires_grad_() for n, v in given.items()}
        kept = checkpoint(run, **given, use_reentrant=False, context_fn=ops.same_documents)["y"]
    g = torch.randn(kept.shape, generator=generator(5)).to(BF16).to(kept)
    for retain in True, False:
        grads = torch.autograd.grad(kept, list(given.values()), g, retain)  # outside the context, as in training
        assert equal(dict(zip(given, grads, strict=True)), {n: forward["d" + n] for n in given})


# ------------------------------------------------------------------------------------------------------ dtypes, devices

@EVERY
@pytest.mark.parametrize("backend", ("", "torch"))
def test_autocast_rounds_what_a_row_says_and_never_float64(name, backend):
    row, a = small(name)
    run = lambda **a: row.run(**a, backend=backend)
    with torch.autocast("cpu", BF16):
        got = graded(run, a)
        exact = run(**double(a))
    given = cast(row, a, BF16) if row.autocast == "arguments" else a
    want = run(**given)
    want["y"] = want["y"].to(BF16) if row.autocast else want["y"]
    assert got["y"].dtype == want["y"].dtype and all(got["d" + n].dtype == F32 for n in a)
    assert distance(got["y"], want["y"].double()) < (4e-3 if row.autocast and "cpu" not in row.op else 1e-6)
    assert all(v.dtype == F64 for v in exact.values()) and distance(exact["y"], run(**double(a))["y"]) < 1e-13


@SHORT
@EVERY
def test_meta_tensors_get_the_right_shapes_and_dtypes(name):
    row, a = small(name)
    for given in (a, cast(row, a, BF16)):
        want = row.run(**given)
        got = row.run(**{n: v.to("meta") for n, v in given.items()})
        assert all((got[n].shape, got[n].dtype) == (want[n].shape, want[n].dtype) and got[n].is_meta for n in want)


@SHORT
@EVERY
def test_plain_makes_one_operator_run_in_pytorch(name):
    row, a = small(name, 40)
    fast, plain = (row.run(**a, backend=backend)["y"] for backend in ("", "torch"))
    assert not torch.equal(fast, plain), "both implementations round alike, so this test cannot tell which one ran"
    with choose.plain(*(op for op in choose.BODIES if op != row.op)):
        assert torch.equal(row.run(**a)["y"], fast)
        with choose.plain(row.op):
            assert torch.equal(row.run(**a, backend="cpu")["y"], plain)
        assert torch.equal(row.run(**a)["y"], fast)


@SHORT
@EVERY
def test_memory_grows_with_the_length_and_not_with_its_square(name):
    def kept(T, backend):
        row = OPERATORS[name]
        with what_autograd_keeps() as storages:
            row.run(**{n: v.requires_grad_() for n, v in bare(row, row.draw(T, B=1)).items()}, backend=backend)
        return sum(storages.values())

    assert kept(128, "") < 2.2 * kept(64, "")
    if name not in ("attention", "window", "rms_norm", "conv"):  # the rest must not keep the state of every step
        assert kept(48, "torch") < kept(32, "torch") * 2


@SHORT
@pytest.mark.parametrize("name", ("longhorn", "kda", "mesa", "wkv4"))
def test_an_operator_compiles_as_one_graph(name):
    """Uses aot_eager, which is torch.compile without the minute of code generation."""
    row, a = small(name, 17 if name == "mesa" else 9, F32 if name in NATIVE else F64)
    torch._dynamo.reset()
    compiled = torch.compile(row.run, fullgraph=True, backend="aot_eager")
    assert not wrong(name, a, run=compiled, true=row.run)


# ---------------------------------------------------------------------------------------------------------- the kernels

@OF_KERNELS
@pytest.mark.parametrize("dtype", (F32, BF16, F16))
def test_views_give_the_same_bits_as_contiguous_tensors(name, dtype):
    """Arguments and incoming gradients are views: y.sum() hands the backward an expanded view with stride 0."""
    if name == "rms_norm" and dtype == F16:
        pytest.skip("computed by PyTorch")
    row = OPERATORS[name]
    a = cast(row, row.draw(35, D=17), dtype)
    for how in ({}, {"reverse": True})[:1 + (name in REVERSIBLE)]:
        run = functools.partial(row.run, **how)
        want = graded(run, a)
        for n in (*timed(row, a), *row.states):
            for i, view in enumerate(views(a[n])):
                assert torch.equal(view, a[n]) and not view.is_contiguous()
                assert equal(graded(run, {**a, n: view}), want), (n, i)
            assert equal(graded(in_halves(run, n), a), want), n
    y = run(**{n: v.requires_grad_() for n, v in a.items()})["y"]
    for dy in (want["y"], torch.ones((), dtype=dtype).expand(y.shape)):
        whole, *others = (torch.autograd.grad(y, list(a.values()), view, retain_graph=True)
                          for view in (dy.contiguous(), dy, *views(dy)))
        assert all(all(map(torch.equal, other, whole)) for other in others)


@OF_KERNELS
def test_two_runs_agree_to_the_bit(name, threads):
    row = OPERATORS[name]
    runs = []
    a = cast(row, row.draw(150, B=3, D=70), F32)
    for number in (1, 1, 2, 2, 2, 5):  # of five threads, each has one group of channels or none
        threads(number)
        runs.append(graded(row.run, a))
    assert equal(runs[0], runs[1]) and equal(runs[2], runs[3]) and equal(runs[2], runs[4])
    # only dk and dq may depend on the number of threads, which changes the order of the sum over channels
    for other in (runs[2], runs[5]):
        assert {n for n in other if not torch.equal(runs[0][n], other[n])} <= {"dk", "dq"}
        assert all(distance(runs[0][n], other[n].double()) <= 4 * EPS for n in other)


@OF_KERNELS
def test_torch_func_and_forward_mode_are_right(name):
    """Kernels have only a forward and a backward, and would silently drop tangents."""
    row = OPERATORS[name]
    a = cast(row, row.draw(5, D=5), F32)
    tangents = {n: torch.randn(v.shape, generator=generator(7)) for n, v in a.items()}
    run, true = (lambda a, f=f, **how: f(**a, **how) for f in (in_halves(row.run, "x"), row.true))
    close = lambda got, want: all(distance(got[n], want[n]) < 32 * EPS for n in want)
    want = torch.func.jvp(true, (double(a),), (double(tangents),))[1]
    assert close(torch.func.jvp(run, (a,), (tangents,))[1], want)
    with pytest.raises(RuntimeError, match=rf"^{row.op}: backend 'cpu' cannot run [^\n]*forward-mode [^\n]*'$"):
        torch.func.jvp(functools.partial(run, backend="cpu"), (a,), (tangents,))
    gradient = lambda f: torch.func.grad(lambda a: sum(v.square().sum() for v in f(a).values()))
    want = gradient(true)(double(a))
    assert close(gradient(run)(a), want)
    got = torch.func.vmap(gradient(run))({n: torch.stack([v, v + 1 if n == "x" else v]) for n, v in a.items()})
    assert close({n: v[0] for n, v in got.items()}, want) and distance(got["x"][0], got["x"][1]) > 0.1


@OF_KERNELS
def test_a_second_derivative_is_refused(name):
    row, a = small(name, 5)
    x = a["x"].requires_grad_()
    once = pytest.raises(RuntimeError, match=r"^\w+: the kernels are differentiable once: use [^\n]*$")
    for backend, ends in (("", once), ("torch", contextlib.nullcontext())):
        y = in_halves(row.run, "x")(**a, backend=backend)["y"]
        (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        with ends:
            assert torch.autograd.grad(g.sum(), x)[0].norm() > 0


# ------------------------------------------------------------------------------------------------------------- extremes

def put(**values):
    """Replaces drawn arguments by these values."""
    return lambda a: a | {n: torch.as_tensor(v, dtype=F64).expand_as(a[n]).clone() for n, v in values.items()}


def times(size):
    return lambda a: a | {"x": size * a["x"]}


def closed(a):
    """Sets some gates to 0 or 1, and some step sizes to 2 or nearly 0."""
    g = generator(1)
    for n, often, value in (("log_decay", 0.5, 0.0), ("log_decay", 0.2, -1e4), ("log_decay", 0.1, -torch.inf),
                            ("beta", 0.3, 2.0), ("beta", 0.3, 1e-9)):
        if n in a:
            a[n] = a[n].masked_fill(torch.rand(a[n].shape, generator=g) < often, value)
    return a


def keys(size):
    """Scales the keys to this length, and the step size to match."""
    def change(a):
        a["k"] *= size
        if "beta" in a and "ridge" not in a:
            a["beta"] /= 1 + a["beta"] * a["k"].square().sum(-1)
        return a
    return change


STRENGTHS = {"strong": put(log_decay=-torch.tensor([-1.0, 2.0, 5.0]).exp()),
             "weak": put(log_decay=-torch.tensor([-20.0, -14.0, -8.0]).exp())}
DELTA = {"closed": closed, "short": keys(1e-3), "long": keys(1e3)}
fades = torch.tensor([-8.0, 1.6, 5.0]).exp()
course = torch.arange(40.0)[:, None]
KINDS = {  # operator: {name: a function that changes the drawn arguments}
    "gla": {"closed": closed, "strong": put(log_decay=-20.0)}, "retention": STRENGTHS, "bonus": STRENGTHS,
    "by token": {"closed": closed}, "shared": {"closed": closed}, "gated_delta_rule": DELTA, "kda": DELTA,
    "mesa": {"closed": closed, "short": keys(1e-3), "asked nothing": put(q=0.0)},
    "delta_rule": {"same key": lambda a: put(k=a["k"][:, :1], beta=2.0)(a), "replace": put(beta=1.0),
                   "reflect": put(beta=2.0), "short": keys(1e-3), "long": keys(1e3)},
    "wkv4": {"large": lambda a: put(k=50 * a["k"].clamp(-2, 2), decay=fades)(a), "slow": put(decay=1e-6),
             "alternating": put(k=100 * torch.cos(torch.pi * course), decay=fades),
             "falling": put(k=100 - 5 * course, decay=fades)},
    "rms_norm": {size: times(size) for size in (0.0, 1e-30, 1e-15, 1e15)},
    "conv": {size: times(size) for size in (0.0, 1e-30, 1e3, 1e15)}}


@SHORT
@pytest.mark.parametrize("name,kind", [(name, kind) for name, kinds in KINDS.items() for kind in kinds], ids=str)
def test_extreme_arguments_give_right_results(name, kind):
    """Results and gradients are finite and right. In wkv4 the exponential of 100 has an error of 100 eps. If every step
    reflects along the same key, an error along that key never fades."""
    row = OPERATORS[name]
    a = cast(row, KINDS[name][kind](row.draw(40)), F32)
    tolerance = 640 if name == "wkv4" else 1300 if kind == "same key" else row.tolerance
    assert not wrong(name, a, tolerance=tolerance)  # values that are not finite fail too
    assert not wrong(name, double(a), tolerance=tolerance)


SIZES = [dict(key=1e-3), dict(key=1e3), dict(logit=300.0), dict(value=1e6), dict(key=1e3, logit=1000.0), dict(key=0.0)]
MORE = [dict(key=1e6), dict(logit=0.0), dict(value=1e-6), dict(key=1e6, logit=1000.0), dict(key=1e-20, logit=88.0),
        dict(key=1e18), dict(key=1e18, logit=1000.0)]


@SHORT
@pytest.mark.parametrize("name,N,sizes", [
    *(("longhorn", N, sizes) for N in (1, 16) for sizes in SIZES + MORE),
    *((name, 8, sizes) for name in ("exact", "mamba", "mamba without softplus") for sizes in SIZES)], ids=str)
def test_scans_of_extreme_arguments_err_about_as_much_as_the_loop(name, N, sizes):
    """Some cases are ill-conditioned: with N = 1 and a huge key, 1 - eps k^2 cancels, and no float32 arithmetic is
    exact. Kernels may err four times as much as the loop; with keys of 1e18 they only have to be finite."""
    row = OPERATORS[name]
    a = cast(row, row.draw(40, D=17, N=N, **sizes), F32)
    loop, kernels = (graded(functools.partial(row.run, backend=backend), a) for backend in ("torch", ""))
    assert all(v.isfinite().all() for out in (loop, kernels) for v in out.values())
    if sizes.get("key", 1) < 1e9:
        slack = {n: 4 * distance(loop[n], v) for n, v in graded(row.true, double(a)).items()}
        assert N != 16 or max(slack.values()) < 1e-4, "at the usual size the slack must stay small"
        assert not wrong(name, a, slack=slack)


# ------------------------------------------------------------------------------------------------------------- refusals

@pytest.mark.filterwarnings("ignore")  # PyTorch warns about nested and sparse tensors
@pytest.mark.parametrize("name", [name for name in OPERATORS if OPERATORS[name].op != "attention"])
@pytest.mark.parametrize("backend", ("", "torch"))
def test_an_argument_that_does_not_fit_is_refused_in_one_line(name, backend):
    """Each argument gets a wrong shape, dtype, device or type, and the line says what is wrong."""
    row, a = small(name)
    row.run(**a, backend=backend)  # arguments that passed once are not checked again
    for n, v in a.items():
        deeper = v[..., None]
        empty = v[..., :0]
        cases = [(torch.cat([v, v], -1), ""), (deeper, str(tuple(deeper.shape))), (empty, str(tuple(empty.shape))),
                 (v.long(), "torch.int64"), (v.to("meta"), "meta"), (v.to_sparse(), "torch.sparse_coo"),
                 (v.numpy(), "ndarray")]
        if name in NATIVE:
            cases.append((torch.nested.nested_tensor(list(v)), "nested"))
            cases += [(None, "None")] if n in ("x", "dt", "k", "weight") else []
        for bad, words in cases if n != "H" else ():
            with pytest.raises(ValueError, match=rf"^({row.op}|scan): [^\n]*{re.escape(words)}[^\n]*\Z"):
                row.run(**{**a, n: bad}, backend=backend)
