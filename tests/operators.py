"""All operators in one list: how to draw their arguments, and a float64 truth written from the papers' recurrences.

A new operator is a row of OPERATORS; test_conformance.py tests all rows alike. This file also has the functions that
run the CUDA kernels on a CPU, or plant a mistake in a source.
"""

import contextlib
import ctypes
import functools
import itertools
import math
import os
import re
import shutil
import subprocess
from collections import namedtuple
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import mixers  # noqa: F401
from kernels import build, cuda, launch, ops
from kernels import linear_attention as la
from kernels.ops import attention, causal_conv1d, conv_state, rms_norm
from kernels.scan import longhorn_scan, selective_scan

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
EPS = torch.finfo(F32).eps
TINY = 1e-15  # smaller gradients count as 0: at a logit of -88 beta is 1e-38, times k^2 of about 1e12

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: nothing ran on one")

# The fields of a row:
#   run        run(backend=, **arguments) returns {"y": the result, name of a state: the state after it}
#   true       the same from float64 arguments
#   draw       draw(T, **sizes) returns arguments by name, in float64
#   shapes     sizes to draw, also odd ones
#   states     the arguments that hold the state
#   optional   other arguments that may be absent
#   seen       seen(results) returns the part of the results to compare
#   autocast   what autocast rounds: the "arguments" with a time dimension, the "result" or nothing
#   tolerance  in eps
#   cancels    arguments with a time dimension whose gradient may be nearly zero
Operator = namedtuple("Operator", "op run true draw shapes states optional seen autocast tolerance cancels",
                      defaults=((), (), lambda results: results, "", 32, ()))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def shown(a):
    return None if a is None else a[..., None]


# ------------------------------------------------------------------------------------------------------ the recurrences

def recurrence(q, k, v, alpha=None, bonus=None, beta=None, ridge=None, state=None):
    """Return (o, state) for q, k (B, T, H, K) and v (B, T, H, V), by the papers' formulas, a step at a time. Delta
    rules use their whole transition matrix. alpha: the decay (H,), (B, T, H) or (B, T, H, K)."""
    B, T, heads, V = v.shape
    q, k = q.expand(B, T, heads, -1), k.expand(B, T, heads, -1)
    eye = torch.eye(k.shape[3], dtype=v.dtype, device=v.device)
    os = [v[:, :0]]
    H, S = state if isinstance(state, tuple) else (torch.zeros_like(eye), state)
    S = v.new_zeros(B, heads, len(eye), V) if S is None else S
    alpha = v.new_ones(heads) if alpha is None else alpha
    alpha = (alpha if alpha.dim() == 4 else alpha[..., None]).expand_as(k)
    for t in range(T):
        K, x = k[:, t, :, :, None], v[:, t, :, None]  # (B, H, K, 1), (B, H, 1, V)
        before = S
        S = alpha[:, t, ..., None] * S
        b = 1.0 if beta is None else beta[:, t, :, None, None]
        if beta is not None and ridge is None:
            S = (eye - b * K @ K.mT) @ S
        S = S + b * K @ x
        read = q[:, t, :, None]
        seen = S if bonus is None else before + bonus[:, None, None] * K @ x
        if ridge is not None:
            H = alpha[:, t, ..., None] * H + b * K @ K.mT
            read = read @ torch.linalg.inv(H + torch.diag_embed(ridge)).mT
        os.append((read @ seen).transpose(1, 2))
    return torch.cat(os, 1), S if ridge is None else (H, S)


def scan_true(update, h0=None, cu_seqlens=None, reverse=False, **a):
    """Compute Longhorn's Algorithm 1, its Eq. 6 or Mamba's scan, for each packed sequence alone."""
    ends = [0, a["x"].shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    turned = lambda v: v.flip(1) if reverse else v
    ys = []
    states = []
    for s, (i, j) in enumerate(itertools.pairwise(ends)):
        steps = {n: turned(v[:, i:j]) for n, v in a.items() if v.dim() > 2}
        out = one_scan(update, **a | steps, h0=h0 if cu_seqlens is None else h0[s:s + 1])
        ys.append(turned(out["y"]))
        states.append(out["h0"])
    return {"y": torch.cat(ys, 1), "h0": torch.cat(states)}


def one_scan(update, x, dt, k, q, A=None, D=None, z=None, dt_bias=None, h0=None):
    """Compute a scan as a `recurrence` with one head per channel and values of width 1. k, q: (B, T, N), or
    (B, T, D, N) if they differ between channels."""
    logit = dt if dt_bias is None else dt + dt_bias
    k, q = (a if a.dim() == 4 else a[:, :, None] for a in (k, q))
    state = shown(h0)
    if update.startswith("mamba"):
        delta = torch.logaddexp(logit, torch.zeros_like(logit)) if update == "mamba" else logit
        y, S = recurrence(q, k, shown(delta * x), (shown(delta) * A).exp(), state=state)
    else:
        beta = logit.sigmoid()
        eps = beta / (1 + beta * k.square().sum(-1))  # Eq. 6
        if update == "exact":
            y, S = recurrence(q, k, shown(x), beta=eps, state=state)
        else:  # step 3 of Algorithm 1
            y, S = recurrence(q, k, shown(eps * x), 1 - shown(eps) * k.square(), state=state)
    y = y[..., 0] if D is None else y[..., 0] + D * x
    return {"y": y if z is None else y * F.silu(z), "h0": S[..., 0]}


def wkv4_true(k, v, decay, bonus, num=None, den=None, max=None):
    """Compute wkv4 as a `recurrence` per channel with keys e^k and two values, v and 1. The result for v is divided by
    the result for 1."""
    one = torch.ones_like(k)
    state = None if den is None else (torch.stack([num, den], -1) * max.exp()[..., None])[:, :, None]  # (B, D, 1, 2)
    o, S = recurrence(shown(one), shown(k.exp()), torch.stack([v, one], -1), (-decay).exp(), bonus.exp(), state=state)
    num, den = S[:, :, 0].unbind(-1)
    return {"y": o[..., 0] / o[..., 1], "mean": num / den, "weight": den.log()}


def conv_true(x, weight, bias=None, state=None, silu=True, reverse=False):
    if reverse:
        return conv_true(x.flip(1), weight, bias, state, silu).flip(1)
    B, T, D = x.shape
    W = weight.shape[1]
    past = x.new_zeros(B, W - 1, D) if state is None else state
    y = F.conv1d(torch.cat([past, x], 1).transpose(1, 2), weight[:, None], bias, groups=D).transpose(1, 2)
    return F.silu(y) if silu else y


def attention_true(q, k, v, past_k=None, past_v=None, window=None):
    if past_k is not None:
        k, v = torch.cat([past_k, k], 1), torch.cat([past_v, v], 1)
    T, S = q.shape[1], k.shape[1]
    age = torch.arange(S - T, S)[:, None] - torch.arange(S)  # each key's age at each query
    scores = torch.einsum("bthn,bshn->bhts", q, k) / math.sqrt(q.shape[3])
    scores = scores.masked_fill((age < 0) | (age >= (window or S)), -torch.inf)
    return {"y": torch.einsum("bhts,bshn->bthn", scores.softmax(-1), v), "past_k": k, "past_v": v}


# ------------------------------------------------------------------------------------------------------------ arguments

def inputs(update, B, T, D, N, dtype=F32, key=1.0, logit=None, value=1.0, without=()):
    """Return random arguments of a scan. `logit`: dt is +-logit everywhere. `key` and `value` scale k and x."""
    rand = functools.partial(torch.randn, generator=generator())
    dt = 2 * rand(B, T, D) if logit is None else logit * rand(B, T, D).sign()
    a = dict(x=value * rand(B, T, D), dt=dt, k=key * rand(B, T, N), q=rand(B, T, N), D=rand(D), z=rand(B, T, D),
             dt_bias=rand(D), h0=rand(B, D, N))
    a = {n: v.to(dtype) if n in ("x", "dt", "k", "q", "z") else v for n, v in a.items() if n not in without}
    if update.startswith("mamba"):
        a["A"] = -torch.rand(D, N, generator=generator(5)) * 4
        a["dt"] = a["dt"].clamp(max=30)  # with a delta of 1000 the state would overflow in the loop too
        if update != "mamba":  # dt is delta itself, so it must be positive
            a.update({n: a[n].abs() / 4 for n in ("dt", "dt_bias") if n in a})
    return a


def packed(update, lengths, D, N, dtype=F32):
    """Arguments for sequences of these lengths packed in one row, with cu_seqlens."""
    a = inputs(update, 1, sum(lengths), D, N, dtype=dtype)
    a["h0"] = torch.randn(len(lengths), D, N, generator=generator(3))
    return a, torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def conv_inputs(B, T, D, W, dtype=F32, bias=True, state=True):
    rand = functools.partial(torch.randn, generator=generator())
    a = dict(x=rand(B, T, D).to(dtype), weight=rand(D, W))
    if bias:
        a["bias"] = rand(D)
    if state:
        a["state"] = rand(B, W - 1, D)
    return a


def attention_inputs(case, T, B=2, H=3, K=5, V=7, past=9):
    """Return random arguments for the operators of linear_attention.py and for softmax attention."""
    rand = functools.partial(torch.randn, generator=generator(T), dtype=F64)
    if case == "wkv4":
        return {"k": 2 * rand(B, T, H), "v": rand(B, T, H), "decay": rand(H).exp(), "bonus": rand(H),
                "num": rand(B, H), "den": rand(B, H).exp(), "max": rand(B, H)}
    if case == "attention":
        steps = {"q": T, "k": T, "v": T, "past_k": past, "past_v": past}
        return {n: rand(B, steps, H, 2 * K) for n, steps in steps.items()}
    heads = 1 if case == "shared" else H
    a = {"q": rand(B, T, heads, K), "k": F.normalize(rand(B, T, heads, K), dim=-1), "v": rand(B, T, H, V)}
    if case in (*DELTA, "mesa"):
        a["beta"] = 2 * torch.rand(B, T, H, generator=generator(T + 1), dtype=F64)
    if case in ("retention", "bonus"):
        a["log_decay"] = -(rand(H) - 3).exp()
    elif case != "delta_rule":
        a["log_decay"] = -(2 * rand(B, T, H, *([K] if case in ("gla", "kda") else [])) - 2).exp()
    if case == "bonus":
        a["bonus"] = rand(H)
    if case == "mesa":
        a["ridge"] = 0.25 + torch.rand(H, K, generator=generator(T + 2), dtype=F64)
        root = rand(B, H, K, K)
        a["H"] = root @ root.mT * 4 / K
    a["state"] = rand(B, H, K, V)
    return a


# ------------------------------------------------------------------------------------------------------------- the list

DELTA = ("delta_rule", "gated_delta_rule", "kda")


def sizes(**choices):
    """Return as many sizes as the longest list of choices has. Shorter lists start over."""
    n = max(map(len, choices.values()))
    return [{name: values[i % len(values)] for name, values in choices.items()} for i in range(n)]


T_CHUNKS = sizes(T=(1, 2, 7, 8, 9, 16, 17, 40))
WIDTHS = sizes(T=[20], B=(1, 2, 4, 1, 3), H=(1, 3, 2, 2, 1), K=(1, 1, 3, 16, 17), V=(1, 4, 1, 32, 2))
T_SCANS = sizes(T=(1, 2, 31, 32, 33, 63, 64, 65, 97), B=[2], D=[17], N=(16, 4))
T_SCANS += sizes(T=[37], B=(2, 3), D=(1, 16, 5, 17, 33), N=(1, 1, 2, 3, 3, 4, 5, 5, 8, 8, 8, 16, 16, 16, 32, 64, 128))


def scan_row(update):
    scan = functools.partial(longhorn_scan, exact=True) if update == "exact" else longhorn_scan

    def run(backend="", k=None, q=None, keep=True, **a):
        if update.startswith("mamba"):
            names = {"x": "u", "dt": "delta", "dt_bias": "delta_bias"}
            out = selective_scan(**{names.get(n, n): v for n, v in a.items()}, B=k, C=q, return_last_state=keep,
                                 delta_softplus=update == "mamba", backend=backend)
        else:
            out = scan(k=k, q=q, **a, return_state=keep, backend=backend)
        y, hT = out if keep else (out, None)
        return {"y": y} if hT is None else {"y": y, "h0": hT}

    op = "selective_scan" if update.startswith("mamba") else "longhorn_scan"
    draw = lambda T, B=2, D=5, N=3, **how: double(inputs(update, B, T, D, N, **how))
    shapes = T_SCANS if update == "longhorn" else T_SCANS[::3]
    return Operator(op, run, functools.partial(scan_true, update), draw, shapes, ("h0",), ("D", "z", "dt_bias"),
                    autocast="arguments", tolerance=16)


def linear_row(case):
    op = {"gla": "gated_linear_attention", "bonus": "retention", "by token": "retention", "shared": "retention"}.get(
        case, case)

    def given(H=None, **a):  # makes H, and so its gradient, symmetric
        return a if H is None else a | {"state": ((H + H.mT) / 2, a["state"])}

    def run(backend="", **a):
        o, S = getattr(la, op)(**given(**a), backend=backend)
        return after(o, S)

    def after(o, S):
        return {"y": o} | ({"H": S[0], "state": S[1]} if isinstance(S, tuple) else {} if S is None else {"state": S})

    def true(log_decay=None, **a):
        o, S = recurrence(**given(**a), alpha=None if log_decay is None else log_decay.exp())
        return after(o, S)

    states = ("H", "state") if case == "mesa" else ("state",)
    return Operator(op, run, true, functools.partial(attention_inputs, case), T_CHUNKS + WIDTHS, states,
                    tolerance=64 if case == "mesa" else 32)


def wkv4_run(backend="", num=None, den=None, max=None, **a):
    o, state = la.wkv4(**a, state=None if den is None else (num, den, max), backend=backend)
    return {"y": o, **dict(zip(("num", "den", "max"), state or (), strict=bool(state)))}


def wkv4_seen(a):
    """Return the results in a form that does not depend on the state's maximum, which only scales num and den."""
    return {"y": a["y"], "mean": a["num"] / a["den"], "weight": a["den"].log() + a["max"]} if "num" in a else a


def conv_run(backend="", state=None, **a):
    return {"y": causal_conv1d(**a, state=state, backend=backend),
            "state": conv_state(a["x"], state, a["weight"].shape[1])}


def conv_truths(state=None, **a):
    W = a["weight"].shape[1]
    past = a["x"].new_zeros(len(a["x"]), W - 1, a["x"].shape[2]) if state is None else state
    return {"y": conv_true(**a, state=state), "state": torch.cat([past, a["x"]], 1)[:, a["x"].shape[1]:]}


def attention_run(q, k, v, past_k=None, past_v=None, window=None, backend=""):
    if past_k is not None:
        k, v = torch.cat([past_k.to(k.dtype), k], 1), torch.cat([past_v.to(k.dtype), v], 1)
    y = attention(*(a.transpose(1, 2) for a in (q, k, v)), window=window, backend=backend)
    return {"y": y.transpose(1, 2), "past_k": k, "past_v": v}


def attention_row(window, shapes):
    run, true = (functools.partial(f, window=window) for f in (attention_run, attention_true))
    return Operator("attention", run, true, functools.partial(attention_inputs, "attention"), shapes,
                    ("past_k", "past_v"), autocast="arguments", cancels=("q", "k", "v"))


def norm_inputs(T, B=2, D=70):
    return {"x": torch.randn(B, T, D, generator=generator()), "weight": torch.randn(D, generator=generator(1))}


def norm_true(x, weight, eps=1e-5):
    return {"y": x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight}


OPERATORS = {
    **{update: scan_row(update) for update in ("longhorn", "exact", "mamba", "mamba without softplus")},
    **{case: linear_row(case) for case in ("gla", "retention", "bonus", "by token", "shared", *DELTA, "mesa")},
    "wkv4": Operator("wkv4", wkv4_run, wkv4_true, functools.partial(attention_inputs, "wkv4"),
                     [shape | dict(K=1, V=1) for shape in T_CHUNKS + WIDTHS], ("num", "den", "max"), seen=wkv4_seen),
    "conv": Operator("causal_conv1d", conv_run, conv_truths, lambda T, B=2, D=5, W=4: double(conv_inputs(B, T, D, W)),
                     sizes(T=9 * [1, 3, 7, 33], D=[19], W=range(1, 10)) + sizes(
                         T=[40], B=[3], D=(1, 5, 16, 17, 33), W=(3, 4)) + [dict(T=65, D=70)],
                     ("state",), ("bias",), autocast="arguments", tolerance=16),
    "rms_norm": Operator("rms_norm", lambda backend="", **a: {"y": rms_norm(**a, backend=backend)}, norm_true,
                         lambda T, **sizes: double(norm_inputs(T, **sizes)),
                         sizes(T=(1, 7, 32, 65, 20), D=(5, 15, 16, 17, 300)),
                         autocast="result", tolerance=16),
    "attention": attention_row(None, sizes(T=(1, 7, 1, 6, 6), past=(0, 0, 5, 3, 1))),
    "window": attention_row(5, sizes(T=(1, 1, 130, 70, 3), past=(0, 9, 0, 30, 90))),
}
NATIVE = ("longhorn", "exact", "mamba", "mamba without softplus", "conv", "rms_norm")  # with kernels of their own


# ----------------------------------------------------------------------------------------------------------- comparison

def double(a):
    return {n: v.double() if torch.is_tensor(v) else v for n, v in a.items()}


def timed(row, a):
    """The names of the arguments with a time dimension."""
    return [n for n, v in a.items() if torch.is_tensor(v) and v.dim() > 2 and n not in row.states]


def cast(row, a, dtype):
    """Return the arguments in a dtype. In 16 bits, states and arguments without a time dimension are float32, as in a
    model."""
    half = timed(row, a) if dtype.itemsize == 2 else a
    return {n: v.to(dtype if n in half else F32) for n, v in a.items()}


def bare(row, a):
    """Return the arguments that are neither states nor optional."""
    return {n: v for n, v in a.items() if n not in (*row.states, *row.optional)}


def graded(f, a, only=None):
    """Return f's results for these arguments (a single tensor is "y"), and the gradient of each argument. The results
    get fixed random gradients. `only`: the name of the only result that gets one."""
    a = {n: v.detach().requires_grad_() for n, v in a.items()}
    y = f(**a)
    y = {"y": y} if torch.is_tensor(y) else y
    g = generator(5)
    dy = {n: torch.randn(v.shape, generator=g).to(BF16).to(v) for n, v in y.items()}
    names = [only] if only else [n for n in y if y[n].requires_grad]
    grads = torch.autograd.grad([y[n] for n in names], list(a.values()), [dy[n] for n in names],
                                materialize_grads=True)
    return {**{n: v.detach() for n, v in y.items()}, **{"d" + n: g for n, g in zip(a, grads, strict=True)}}


def distance(got, true, terms=0.0):
    """Return the error relative to the true result's norm, or to `terms`, the norm of what it sums, if larger."""
    return ((got.double() - true).norm() / (max(true.norm().item(), terms) + TINY)).item()


def allowed(got, true, factor=16):
    """Return the allowed error relative to the norm: `factor` eps of the dtype used to compute. A 16-bit result may
    also be off by half a unit in the last place, or by 0.32 units on average over many numbers."""
    if got.dtype.itemsize > 2:
        return factor * torch.finfo(got.dtype).eps
    # float16 results below 6e-5 are subnormal: there the rounding error is absolute
    absolute = 3e-8 * math.sqrt(true.numel()) / (true.norm().item() + TINY) if got.dtype == F16 else 0.0
    return factor * EPS + (0.32 if got.numel() >= 1000 else 0.5) * torch.finfo(got.dtype).eps + absolute


def wrong(name, a, backend="", only=None, slack=None, run=None, true=None, tolerance=None, **how):
    """Return where `run` gets an operator or its gradients wrong: {result: (error, tolerance)}, or {} if it agrees.

    The truth is computed from the same arguments in float64. run, true: functions to use instead of the row's. slack:
    {result: an error that is allowed}. how: further arguments for both functions.
    """
    row = OPERATORS[name]
    run = run or functools.partial(row.run, backend=backend)
    true = true or row.true
    got = graded(lambda **a: row.seen(run(**a, **how)), a, only)
    assert got["y"].dtype == next(iter(a.values())).dtype
    want = graded(lambda **a: row.seen(true(**a, **how)), double(a), only)
    # A parameter's gradient is a sum over batch and time: its terms may cancel, but their rounding errors do not. A
    # state may fade to almost nothing over time.
    cancels = ["d" + n for n in a if n in row.cancels or n not in timed(row, a)]
    beyond = {}
    for n, value in want.items():
        error = distance(got[n], value, want["y"].norm().item() if n in cancels else 0.0)
        bound = max(allowed(got[n], value, tolerance or row.tolerance), slack[n] if slack else 0.0)
        if got[n].shape != value.shape or not error <= bound:  # so that NaN fails
            beyond[n] = error, bound
    return beyond


@contextlib.contextmanager
def what_autograd_keeps():
    """Yields {address: bytes} of the memory that autograd saves for the backward in this context."""
    kept = {}

    def pack(v):
        kept[v.untyped_storage().data_ptr()] = v.untyped_storage().nbytes()
        return v

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
        yield kept


def in_halves(run, name):
    """Return `run` with this argument passed as one of two `halves` (z as the second). Its gradient then lies in
    every other piece of memory."""
    def run_half(**a):
        return run(**a | {name: ops.halves(torch.cat([a[name], a[name]], -1))[name == "z"]})
    return run_half


def views(v):
    """The same numbers in other memory layouts."""
    n = v.shape[-1]
    middle = torch.full((*v.shape[:-1], 2 * n + 3), math.nan, dtype=v.dtype)
    middle[..., 1:1 + n] = v
    every = torch.full((v.shape[0], 2 * v.shape[1], v.shape[2]), math.nan, dtype=v.dtype)
    every[:, 1::2] = v
    return middle[..., 1:1 + n], every[:, 1::2], v.transpose(1, 2).contiguous().transpose(1, 2)


# -------------------------------------------------------------------------------------- sources, and CUDA on a CPU

def source_text(source=build.SCAN):
    """A kernel source with lanes.h in place of its #include."""
    header = build.HEADER.read_text().replace("#pragma once\n", "")
    text, n = re.subn(r'#include "(kernels/)?lanes\.h"\n', lambda _: header, source.read_text())
    assert n == 1
    return text


def with_mistake(text, place, mistake):
    """Return the source with `mistake` in front of the line that a comment marks as `test: place`."""
    text, n = re.subn(rf"(?m)^.*\btest: {place}$", lambda line: f"{mistake} {line[0]}", text)
    assert n == 1, place
    return text


SHIM, DRIVER = (Path(__file__).resolve().parent.parent / "tools" / name
                for name in ("cuda_shim.h", "cuda_driver_shim.h"))
THREADS = 64  # two warps: enough for sums over warps, and quicker than the 128 of a GPU
COMPILER = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "c++")), None)


def source_of(update):
    return source_text(build.source_of(update).path)


# Compiling takes most of these tests' time. So we do not optimise, and use C++17, whose headers compile faster.
# Without -fno-gnu-unique all kernels of a process would share the shim's variables, whatever their THREADS.
FLAGS = ("-O0", "-std=c++17", "-shared", "-fPIC", "-fno-gnu-unique")


def load_shim(folder, update, *key, source=None, flags=FLAGS, threads=THREADS):
    """Compile kernels with a driver that runs them on the CPU, and return their module.

    update, *key: an update, dtype, P, L; or "conv", dtype, W, channels per lane; or "loss", dtype, room.
    """
    text = f'#include "{SHIM}"\n{source or source_of(update)}\n#include "{DRIVER}"\n'
    command = [COMPILER, *flags, "-Wno-unknown-pragmas", "-DLONGHORN_SHIM", f"-DTHREADS={threads}",
               *cuda.defines(update, *key)]

    def make(to):
        to.with_suffix(".cpp").write_text(text)
        run = subprocess.run([*command, str(to.with_suffix(".cpp")), "-o", str(to)], capture_output=True, text=True)
        if run.returncode:
            raise OSError(run.stderr)

    path, _ = build._cached("shim", "", [*command, text], (SHIM, DRIVER), folder, make)
    source = build.source_of(update)
    lib = cuda.declare(ctypes.CDLL(str(path)))
    return cuda.Module(b"", source.kernels, ctypes.sizeof(source.args), lib)


def use(monkeypatch, module, segments=1):
    """Have backend='cpu' launch the CUDA kernels of `module` as on a GPU, with a scan's T split into `segments`.

    module: one module, or a pair of modules for the forward and the backward.
    """
    class ShimKernels(launch.Kernels):
        def __init__(self, args_class, x, update=None, rows=None, gated=True, backward=False, **sizes):
            (B, T, D), self.dtype, self.device = x.shape, x.dtype, x.device
            self.module = module[backward] if isinstance(module, tuple) else module
            sizes |= dict(splits=-(-D // self.module.channels))
            if update is not None:
                sizes |= dict(update=launch.UPDATES.index(update)) | launch.segment_sizes(T, segments)
            self.segments = sizes["segments"] if update is not None else -(-T // build.CONV_TILE)
            self.aligned = launch.alignment(update, self.segments, self.dtype, self.module)
            self.args = args_class(B=rows or B, T=T, D=D, **sizes)

        def run(self, function):
            self.launch(function, None)

    monkeypatch.setattr(launch, "Kernels", ShimKernels)
    kept_states = launch.kept_states
    monkeypatch.setattr(launch, "kept_states", lambda x, N: kept_states(mock.Mock(is_cuda=True), N))


def use_alone(monkeypatch, module):
    """Have the loss or the sums on a CPU launch the kernel of `module` as on a GPU."""
    monkeypatch.setattr(ops, "loss_module", lambda *key: module)
    monkeypatch.setattr(launch, "sums_module", lambda *key: module)
    monkeypatch.setattr(launch, "in_stream", lambda device, run: run(None))


def loss_wrong(logits, targets):
    """Return what the loss kernel gets wrong: the targets' log-probabilities, or the gradient that replaces the logits.
    """
    log_p = logits.double().log_softmax(1)
    p = log_p.exp()
    of_targets = log_p.gather(1, targets[:, None])[:, 0]
    at_target = F.one_hot(targets, logits.shape[1])
    found, kept = logits.clone(), logits.clone()
    errors = {"log_p": (ops.log_probabilities(found, targets, True) - of_targets).abs() - 32 * EPS,
              "without a gradient": (ops.log_probabilities(kept, targets, False) - of_targets).abs() - 32 * EPS,
              "kept": (kept - logits).nan_to_num().abs()}
    half = torch.finfo(logits.dtype).eps / 2 * (p - at_target).abs() + torch.finfo(logits.dtype).smallest_normal * EPS
    half += 1e-7 * (logits.dtype == F16)  # subnormal numbers
    errors["gradient"] = (found.double() - (p - at_target)).abs() - half - 64 * EPS * p - EPS * at_target
    return {n: error.max() for n, error in errors.items() if not (error <= 0).all()}


PAIRS = (8, 2)  # P, L: what a GPU runs at N = 16


def native_scan(**a):
    return OPERATORS["longhorn"].run("cpu", **a)


def conv_wrong(dtype, W, B, T, D, run=conv_run, **how):
    """Return where the convolution is wrong, with the optional arguments and without. Without them, the result gets
    two gradients."""
    a = conv_inputs(B, T, D, W, dtype)
    bare = conv_inputs(B, T, D, W, dtype, bias=False, state=False)
    twice = lambda f: lambda **a: {"y": (y := f(**a)["y"]), "again": ops.again(y)}
    return wrong("conv", a, only="y", run=run, **how) | wrong(
        "conv", bare, run=twice(run), true=twice(conv_truths), silu=False, **how)
