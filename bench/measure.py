"""What the measurements of the scans share: inputs, the comparison with the float64 loop, bytes and operations by count.

    relative error = |got - true| / |true|            by the 2-norm; NaN anywhere makes it NaN, which passes no test

The surprise: at logits of -1000 a true gradient can be smaller than float32 can hold, so errors are relative to the norm
or to TINY, whichever is more.
"""

import math
import sys
from pathlib import Path
from statistics import median, quantiles

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from configurator import ConfigError  # noqa: E402
from kernels import build  # noqa: E402
from records import code_version  # noqa: E402

EPS = torch.finfo(torch.float32).eps
TINY = 1e-15
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def make_inputs(B, T, D, N, dtype, extras=True, device="cpu", key=1.0, logit=None):
    """Random arguments of longhorn_scan by name; `extras` adds D, z and dt_bias, `key` scales k, `logit` sets dt to +- it."""
    g = torch.Generator(device).manual_seed(0)
    shapes = dict(x=(B, T, D), dt=(B, T, D), k=(B, T, N), q=(B, T, N))
    if extras:
        shapes |= dict(D=(D,), z=(B, T, D), dt_bias=(D,))
    a = {}
    for name, shape in shapes.items():
        v = torch.randn(*shape, generator=g, device=device)
        v = v * key if name == "k" else v.sign() * logit if name == "dt" and logit is not None else v
        a[name] = v.to(dtype) if v.dim() == 3 else v
    return a


def as_mamba(a):
    """The same tensors as arguments of selective_scan: A is -1, ..., -N in every channel, as Mamba starts."""
    D, N = a["x"].shape[2], a["k"].shape[2]
    A = -torch.arange(1.0, N + 1, device=a["x"].device).repeat(D, 1)  # (D, N)
    names = dict(x="u", dt="delta", k="B", q="C", D="D", z="z", dt_bias="delta_bias")
    return {"u": a["x"], "delta": a["dt"], "A": A} | {names[n]: v for n, v in a.items() if n not in ("x", "dt")}


def values_and_gradients(f, a, dtype=None, dh=True):
    """y, hT and the gradient of every argument, of a fixed random linear loss; in `dtype` where it is given.

    f(**a) returns (y, hT).
    """
    (B, T, D), N = next(iter(a.values())).shape, next(v for n, v in a.items() if n in ("k", "B")).shape[2]
    x = next(iter(a.values()))
    g = torch.Generator(x.device).manual_seed(1)
    dy = torch.randn(B, T, D, generator=g, device=x.device).to(x.dtype)
    dhT = torch.randn(B, D, N, generator=g, device=x.device)
    args = {n: v.detach().to(dtype or v.dtype, copy=True).requires_grad_() for n, v in a.items()}
    y, hT = f(**args)
    grads = torch.autograd.grad((y, hT), list(args.values()), (dy.to(y.dtype), dhT.to(hT.dtype)))
    return {"y": y.detach(), "hT": hT.detach(), **{"d" + n: g for n, g in zip(args, grads, strict=True)}}


def compare(got, true, slack):
    """{name: {"relative_error", "tolerance", "right"}}: the tolerance is `slack` plus half a unit of the result's dtype."""
    found = {}
    for name, want in true.items():
        have = got[name]
        rounding = 0.0 if have.dtype == torch.float32 else torch.finfo(have.dtype).eps / 2
        error = ((have.double() - want).norm() / (want.norm() + TINY)).item()
        tolerance = slack + rounding
        found[name] = {"relative_error": error, "tolerance": tolerance, "right": error <= tolerance}  # NaN is not right
    return found


def work(B, T, D, N, itemsize, extras):
    """Bytes that must move and floating-point operations by count: each tensor read or written once, Eq. 7's arithmetic."""
    wide, narrow, chunks = B * T * D * itemsize, B * T * N * itemsize, 4 * B * math.ceil(T / build.CHUNK) * D * N
    z = int(extras)
    forward = (3 + z) * wide + 2 * narrow                  # x, dt, k, q (z) in, y out
    backward = (3 + z + 2 + z) * wide + 4 * narrow         # x, dt, k, q, dy (z) in, dx, ddt, dk, dq (dz) out
    states = B * T * D
    return {"forward": {"bytes": forward, "flops": states * (7 * N + 30)},  # 7 a state; exp, reciprocal, gate: about 30
            # with autograd the forward writes the chunk states and the backward reads them, and recomputes (9 a state,
            # dq is added up there) before it walks back (15 a state)
            "forward_backward": {"bytes": forward + backward + 2 * chunks,
                                 "flops": states * (7 * N + 30 + 9 * N + 40 + 15 * N + 30)}}


def spread(seconds):
    """Median, quartiles and best of measured seconds, for a record."""
    low, _, high = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return {"median_seconds": median(seconds), "quartile_seconds": [low, high], "fastest_seconds": min(seconds),
            "runs": len(seconds)}


def refuse_uncommitted(out, instead="another --out"):
    """Raises ConfigError where a record is to go to `out` in results/ and the code is not as it was committed; `instead`: the
    other way out. Where git does not know, nothing is refused."""
    if out is not None and Path(out).resolve().is_relative_to(ROOT / "results") and code_version()["uncommitted_changes"]:
        raise ConfigError("results/ is for records of a commit, and this tree has uncommitted changes (git status lists them): "
                          f"commit them, or give {instead}")


def finite(record):
    """The record with every number that is not finite as null, which JSON can hold."""
    if isinstance(record, dict):
        return {k: finite(v) for k, v in record.items()}
    if isinstance(record, (list, tuple)):
        return [finite(v) for v in record]
    return None if isinstance(record, float) and not math.isfinite(record) else record


def in_one_line(error, limit=240):
    """What went wrong, for a record: the kind and the first line of an exception."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    words = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {words}"[:limit]
