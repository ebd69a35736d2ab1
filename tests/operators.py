"""Inputs, independent results and tolerances for the operators."""

import contextlib
import ctypes
import functools
import math
import os
import re
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint

import mixers  # noqa: F401
from kernels import build, cuda, launch
from kernels import linear_attention as la
from kernels.ops import causal_conv1d
from kernels.scan import longhorn_scan, longhorn_scan_ref, selective_scan, selective_scan_ref

EPS = torch.finfo(torch.float32).eps
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
ROWS, OPTIONAL = ("x", "dt", "k", "q", "z"), ("D", "z", "dt_bias", "h0")
TINY = 1e-15  # below it a gradient is nothing: at a logit of -88 beta is 1e-38, times k^2 of 1e12 or so


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: nothing ran on one")


def by_our_names(f, softplus):
    """Mamba's scan under the argument names of longhorn_scan."""
    def scan(x, dt, k, q, A, D=None, z=None, dt_bias=None, h0=None, return_state=False, cu_seqlens=None, **kw):
        return f(x, dt, A, k, q, D, z, dt_bias, softplus, return_state, h0, cu_seqlens, **kw)
    return scan


SCANS = {"longhorn": (longhorn_scan, longhorn_scan_ref),
         "exact": tuple(functools.partial(f, exact=True) for f in (longhorn_scan, longhorn_scan_ref)),
         "mamba": tuple(by_our_names(f, True) for f in (selective_scan, selective_scan_ref)),
         "mamba without softplus": tuple(by_our_names(f, False) for f in (selective_scan, selective_scan_ref))}


def inputs(update, B, T, D, N, dtype=F32, key=1.0, logit=None, value=1.0, without=()):
    """Random arguments by name; `logit` sets dt to +- that, `key` and `value` scale k and x."""
    g = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(*shape, generator=g)
    dt = 2 * rand(B, T, D) if logit is None else logit * rand(B, T, D).sign()
    a = dict(x=value * rand(B, T, D), dt=dt, k=key * rand(B, T, N), q=rand(B, T, N), D=rand(D), z=rand(B, T, D),
             dt_bias=rand(D), h0=rand(B, D, N))
    a = {n: v.to(dtype) if n in ROWS else v for n, v in a.items() if n not in without}
    if update.startswith("mamba"):
        a["A"] = -torch.rand(D, N, generator=torch.Generator().manual_seed(5)) * 4
        if update != "mamba":  # delta itself: positive
            a.update({n: a[n].abs() / 4 for n in ("dt", "dt_bias") if n in a})
    return a


def packed(update, lengths, D, N, dtype=F32):
    """Arguments of sequences of these lengths in one row, and cu_seqlens."""
    a = inputs(update, 1, sum(lengths), D, N, dtype=dtype)
    a["h0"] = torch.randn(len(lengths), D, N, generator=torch.Generator().manual_seed(3))
    return a, torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def weights(y, hT):
    """Of a random linear loss of y and hT; y's in bfloat16, so that every dtype sees the same numbers."""
    g = torch.Generator().manual_seed(1)
    dy = torch.randn(y.shape, generator=g).to(BF16).to(y.dtype)
    return dy, torch.randn(hT.shape, generator=g).to(hT.dtype)


def results(f, a, wide=False, through="both", **kw):
    """y, hT and the gradient of every argument, of that loss through y, hT or both."""
    a = {n: v.detach().to(F64 if wide else v.dtype).requires_grad_() for n, v in a.items()}
    y, hT = f(**a, return_state=True, **kw)
    dy, dhT = weights(y, hT)
    loss = sum(l for l, wanted in (((y * dy).sum(), "y"), ((hT * dhT).sum(), "hT")) if through in ("both", wanted))
    grads = torch.autograd.grad(loss, list(a.values()), materialize_grads=True)
    return {"y": y.detach(), "hT": hT.detach(), **{"d" + n: g for n, g in zip(a, grads, strict=True)}}


def distance(got, true, terms=0.0):
    """Error relative to the norm of the true result, or of the terms it is the sum of; of zeros, relative to TINY."""
    return ((got.double() - true).norm() / (max(true.norm().item(), terms) + TINY)).item()


def tolerance(got, true):
    eps = torch.finfo(got.dtype).eps
    if got.dtype == F32:
        return 16 * EPS
    # float16 results below 6e-5 are subnormal: there the rounding error is absolute
    absolute = 3e-8 * math.sqrt(true.numel()) / (true.norm().item() + TINY) if got.dtype == F16 else 0.0
    return 16 * EPS + (0.29 if got.numel() >= 1000 else 0.5) * eps + absolute


def failures(update, a, through="both", slack=None, fast=None, slow=None, **kw):
    """What the native kernels get wrong: {result: (error, tolerance)}; empty when they agree with the truth.

    fast, slow: other functions than the two of SCANS; slack: {result: an error that is allowed}.
    """
    fast, slow = fast or SCANS[update][0], slow or SCANS[update][1]
    true = results(slow, a, wide=True, through=through, **kw)
    got = results(fast, a, through=through, backend="cpu", **kw)
    # these two sum over batch and time: with one channel the terms may cancel, and their rounding errors do not
    gate = torch.nn.functional.silu(a["z"].double()) if "z" in a else 1.0
    dD_terms = (weights(true["y"], true["hT"])[0] * gate * a["x"]).norm().item() if through != "hT" else 0.0
    terms, wrong = {"ddt_bias": true["ddt"].norm().item(), "dD": dD_terms}, {}
    for name, want in true.items():
        error = distance(got[name], want, terms.get(name, 0.0))
        bound = max(tolerance(got[name], want), slack[name] if slack else 0.0)
        if not error <= bound:  # so that NaN fails
            wrong[name] = (error, bound)
    return wrong


def source_text(source=build.SCAN):
    """A source of the kernels with lanes.h in the place of its #include."""
    header = build.HEADER.read_text().replace("#pragma once\n", "")
    text, n = re.subn(r'#include "(kernels/)?lanes\.h"\n', lambda _: header, source.read_text())
    assert n == 1
    return text


def with_mistake(text, place, mistake):
    """The source with `mistake` in front of the line that a comment marks as `test: place`."""
    text, n = re.subn(rf"(?m)^.*\btest: {place}$", lambda line: f"{mistake} {line[0]}", text)
    assert n == 1, place
    return text


def views(v):
    """The same numbers laid out otherwise."""
    n = v.shape[-1]
    middle, step = (torch.full((*v.shape[:-1], 2 * n + 3), math.nan, dtype=v.dtype) for _ in range(2))
    middle[..., 1:1 + n], step[..., 0:2 * n:2] = v, v
    every = torch.full((v.shape[0], 2 * v.shape[1], v.shape[2]), math.nan, dtype=v.dtype)
    every[:, 1::2] = v
    yield from (middle[..., 1:1 + n], step[..., 0:2 * n:2], every[:, 1::2])
    yield v.transpose(0, 1).contiguous().transpose(0, 1)
    yield v.transpose(1, 2).contiguous().transpose(1, 2)


def agree(got, true, terms=0.0):
    return got.shape == true.shape and distance(got, true, terms) <= tolerance(got, true)


def disagreeing(got, true, terms=None):
    """The names of results that are not the true ones. terms: as for `distance`, by name."""
    return [n for n in true if not agree(got[n], true[n], (terms or {}).get(n, 0.0))]


def graded(f, a, only=None, **kw):
    """What f makes of these arguments, one tensor as "y" or several by name, and the gradient of each argument under
    fixed random ones of all results, or of `only` one."""
    a = {n: v.detach().requires_grad_() for n, v in a.items()}
    y = f(**a, **kw)
    y = {"y": y} if torch.is_tensor(y) else y
    g = torch.Generator().manual_seed(5)
    dy = {n: torch.randn(v.shape, generator=g).to(BF16).to(v) for n, v in y.items()}
    names = [only] if only else list(y)
    grads = torch.autograd.grad([y[n] for n in names], list(a.values()), [dy[n] for n in names],
                                materialize_grads=True)
    return {**{n: v.detach() for n, v in y.items()}, **{"d" + n: g for n, g in zip(a, grads, strict=True)}}


@contextlib.contextmanager
def what_autograd_keeps():
    """{address: bytes} of the memory that is saved for backwards within."""
    kept = {}

    def pack(v):
        kept[v.untyped_storage().data_ptr()] = v.untyped_storage().nbytes()
        return v

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
        yield kept


def double(args):
    return {n: v.double() for n, v in args.items()}


def conv_inputs(B, T, D, W, dtype=F32, bias=True, state=True, seed=0):
    g = torch.Generator().manual_seed(seed)
    a = dict(x=torch.randn(B, T, D, generator=g).to(dtype), weight=torch.randn(D, W, generator=g))
    if bias:
        a["bias"] = torch.randn(D, generator=g)
    if state:
        a["state"] = torch.randn(B, W - 1, D, generator=g)
    return a


def conv_true(x, weight, bias=None, state=None, silu=True, reverse=False):
    if reverse:
        return conv_true(x.flip(1), weight, bias, state, silu).flip(1)
    B, T, D = x.shape
    W = weight.shape[1]
    past = x.new_zeros(B, W - 1, D) if state is None else state
    y = F.conv1d(torch.cat([past, x], 1).transpose(1, 2), weight[:, None], bias, groups=D).transpose(1, 2)
    return F.silu(y) if silu else y


def conv_wrong(a, device="cpu", backend=None, **kw):
    """The results and gradients of the convolution that are wrong."""
    there = {n: v.to(device) for n, v in a.items()}
    got = {n: v.cpu() for n, v in graded(causal_conv1d, there, backend=backend, **kw).items()}
    true = graded(conv_true, double(a), **kw)
    # these two sum over batch and time, where terms may cancel and their rounding errors do not
    return disagreeing(got, true, dict.fromkeys(("dweight", "dbias"), true["dx"].norm().item() * 0.1))


OPS = {"gla": "gated_linear_attention", "retention": "retention", "bonus": "retention", "by token": "retention",
       "shared": "retention", "delta_rule": "delta_rule", "gated_delta_rule": "gated_delta_rule", "kda": "kda",
       "mesa": "mesa", "wkv4": "wkv4"}
DELTA = ("delta_rule", "gated_delta_rule", "kda")


def attention_inputs(case, T, B=2, H=3, K=5, V=7, dtype=F64, state=True, seed=0):
    """The named arguments of a case, in float64 but representable in `dtype`."""
    g = torch.Generator().manual_seed(seed + T)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=F64)
    if case == "wkv4":
        a = {"k": 2 * draw(B, T, H), "v": draw(B, T, H), "decay": draw(H).exp(), "bonus": draw(H)}
        if state:
            a |= {"num": draw(B, H), "den": draw(B, H).exp(), "max": draw(B, H)}
    else:
        heads = 1 if case == "shared" else H
        a = {"q": draw(B, T, heads, K), "k": F.normalize(draw(B, T, heads, K), dim=-1), "v": draw(B, T, H, V)}
        if case in (*DELTA, "mesa"):
            a["beta"] = 2 * torch.rand(B, T, H, generator=g, dtype=F64)
        if case in ("retention", "bonus"):
            a["log_decay"] = -(draw(H) - 3).exp()
        elif case != "delta_rule":
            a["log_decay"] = -(2 * draw(B, T, H, *([K] if case in ("gla", "kda") else [])) - 2).exp()
        if case == "bonus":
            a["bonus"] = draw(H)
        if case == "mesa":
            a["ridge"] = 0.25 + torch.rand(H, K, generator=g, dtype=F64)
            if state:
                root = draw(B, H, K, K)
                a["H"] = root @ root.mT * 4 / K
        if state:
            a["state"] = draw(B, H, K, V)
    return {n: x.to(dtype).double() for n, x in a.items()}


def outputs(f, a, **kw):
    """{name: tensor} of one call; wkv4's state is taken apart, and its maximum, a mere scale, multiplied in."""
    a = dict(a)
    if "H" in a:
        H = a.pop("H")
        a["state"] = ((H + H.mT) / 2, a["state"])  # symmetric, its gradient too
    if "decay" not in a:
        o, S = f(**a, **kw)
        return {"o": o, "S": S} if torch.is_tensor(S) else {"o": o, "U": S[1], "S": S[0]}
    state = tuple(a.pop(n) for n in ("num", "den", "max")) if "num" in a else a.pop("state", None)
    o, (num, den, top) = f(**a, state=state, **kw)
    return {"o": o, "mean": num / den, "weight": den.log() + top}


def graded_outputs(f, a, dtype=F64, only=None, **kw):
    """`graded` of an operator of OPS, computed in `dtype`."""
    return graded(lambda **a: outputs(f, a, **kw), {n: x.to(dtype) for n, x in a.items()}, only)


def both(case):
    """An operator and its loop."""
    loop = "delta_rule" if case in DELTA else OPS[case]
    return getattr(la, OPS[case]), getattr(la, f"{loop}_ref")


def by_hand(q, k, v, log_decay=None, bonus=None, beta=None, ridge=None, state=None):
    """(o, state): the recurrence of the paper with the whole transition matrix of each step."""
    B, T, heads, V = v.shape
    q, k = q.expand(B, T, heads, -1), k.expand(B, T, heads, -1)
    eye, os = torch.eye(k.shape[3], dtype=v.dtype), []
    H, S = state if isinstance(state, tuple) else (torch.zeros_like(eye), state)
    S = v.new_zeros(B, heads, len(eye), V) if S is None else S
    alpha = torch.ones(heads, dtype=v.dtype) if log_decay is None else log_decay.exp()
    alpha = (alpha if alpha.dim() == 4 else alpha[..., None]).expand_as(k)
    for t in range(T):
        K, x = k[:, t, :, :, None], v[:, t, :, None]  # (B, H, K, 1), (B, H, 1, V)
        D, before = torch.diag_embed(alpha[:, t]), S
        b = 1.0 if beta is None else beta[:, t, :, None, None]
        delta_rule = beta is not None and ridge is None
        S = ((eye - b * K @ K.mT) @ D if delta_rule else D) @ S + b * K @ x
        read, seen = q[:, t, :, None], S if bonus is None else before + bonus[:, None, None] * K @ x
        if ridge is not None:
            H = D @ H + b * K @ K.mT
            read = read @ torch.linalg.inv(H + torch.diag_embed(ridge))
        os.append((read @ seen)[:, :, 0])
    return torch.stack(os, 1), S if ridge is None else (H, S)


SHIM, DRIVER = (Path(__file__).resolve().parent.parent / "tools" / name
                for name in ("cuda_shim.h", "cuda_driver_shim.h"))
THREADS = 64  # two warps: enough for sums over warps, and quicker than the 128 of a GPU
COMPILER = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "c++")), None)


def source_of(update):
    return source_text(build.CONV if update == "conv" else build.SCAN)


# Compiling takes most of these tests' time: no optimisation, and C++17, whose headers are faster to compile.
FLAGS = ("-O0", "-std=c++17", "-shared", "-fPIC")


def load_shim(folder, update, *key, source=None, flags=FLAGS, threads=THREADS):
    """A module of the kernels of update, dtype, P, L (or "conv", dtype, W), with a driver that runs them on the CPU."""
    text = f'#include "{SHIM}"\n{source or source_of(update)}\n#include "{DRIVER}"\n'
    command = [COMPILER, *flags, "-Wno-unknown-pragmas", "-DLONGHORN_SHIM", f"-DTHREADS={threads}",
               *cuda.defines(update, *key)]

    def make(to):
        to.with_suffix(".cpp").write_text(text)
        run = subprocess.run([*command, str(to.with_suffix(".cpp")), "-o", str(to)], capture_output=True, text=True)
        if run.returncode:
            raise OSError(run.stderr)

    path, _ = build._cached("shim", "", [*command, text], (SHIM, DRIVER), folder, make)
    conv = update == "conv"
    kernels, args = (cuda.CONV_KERNELS, build.ConvArgs) if conv else (cuda.SCAN_KERNELS, build.ScanArgs)
    return cuda.Module(b"", kernels, ctypes.sizeof(args), cuda.declare(ctypes.CDLL(str(path))))


def use(monkeypatch, module, segments=1):
    """Have backend='cpu' launch the CUDA kernels of `module` as on a GPU, with T of a scan split into `segments`."""
    class ShimKernels(launch.Kernels):
        def __init__(self, args_class, x, update=None, rows=None, gated=True, backward=False, **sizes):
            (B, T, D), self.dtype, self.device = x.shape, x.dtype, x.device
            self.module = module
            sizes |= dict(splits=-(-D // self.module.channels))
            if update is not None:
                sizes |= dict(update=launch.UPDATES.index(update)) | launch.segment_sizes(T, segments)
            self.segments = sizes["segments"] if update is not None else -(-T // build.CONV_TILE)
            self.aligned = 16 if update is not None and self.segments > 1 else 1
            self.args = args_class(B=rows or B, T=T, D=D, **sizes)

        def run(self, function):
            self.launch(function, None)

    monkeypatch.setattr(launch, "Kernels", ShimKernels)
    kept_states = launch.kept_states
    monkeypatch.setattr(launch, "kept_states", lambda x, N: kept_states(mock.Mock(is_cuda=True), N))


PAIRS = (8, 2)  # P, L: what a GPU runs at N = 16


def native_scan(**a):
    return longhorn_scan(**a, backend="cpu")


def conv_failures(dtype, W, B, T, D, **kw):
    """What the convolution gets wrong, with and without the optional arguments."""
    a, bare = conv_inputs(B, T, D, W, dtype), conv_inputs(B, T, D, W, dtype, bias=False, state=False)
    return conv_wrong(a, **kw) + conv_wrong(bare, silu=False, **kw)
