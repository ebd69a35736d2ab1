"""Shared by the benchmarks: inputs, comparison with the float64 loop, timing in turn, peak memory, records.

    relative error = |got - true| / (|true| + TINY)       2-norms; any NaN makes it NaN, which counts as wrong

TINY is needed because at logits of -1000 a true gradient can be smaller than float32 can represent.
"""

import ctypes
import datetime
import errno
import gc
import importlib
import math
import os
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated

import torch

from common.errors import ConfigError
from common.files import temporary
from configurator import Range
from kernels import build
from runtime import records
from runtime.records import code_version

ROOT = Path(__file__).resolve().parent.parent
EPS = torch.finfo(torch.float32).eps
TINY = 1e-15
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# The system refuses more, and OpenMP then ends the process.
Threads = Annotated[int, Range(1, 16 * (os.cpu_count() or 1))]


# ---------------------------------------------------------------------------------------------------- inputs and errors

def make_inputs(B, T, D, N, dtype, extras=True, device="cpu", key=1.0, logit=None):
    """Random arguments of longhorn_scan by name: x, dt (B, T, D) and k, q (B, T, N) in `dtype`.

    extras: also D, dt_bias (D,) in float32 and z (B, T, D). key: a factor on k. logit: dt is +logit or -logit
    everywhere.
    """
    g = torch.Generator(device).manual_seed(0)
    shapes = dict(x=(B, T, D), dt=(B, T, D), k=(B, T, N), q=(B, T, N))
    if extras:
        shapes |= dict(D=(D,), z=(B, T, D), dt_bias=(D,))
    a = {name: torch.randn(*shape, generator=g, device=device) for name, shape in shapes.items()}
    a["k"] = a["k"] * key
    if logit is not None:
        a["dt"] = a["dt"].sign() * logit
    return {name: v.to(dtype) if v.dim() == 3 else v for name, v in a.items()}


def as_mamba(a):
    """The same tensors as arguments of selective_scan; A is -1, ..., -N in every channel, Mamba's initial values."""
    D, N = a["x"].shape[2], a["k"].shape[2]
    A = -torch.arange(1.0, N + 1, device=a["x"].device).repeat(D, 1)  # (D, N)
    names = dict(x="u", dt="delta", k="B", q="C", D="D", z="z", dt_bias="delta_bias")
    return {"u": a["x"], "delta": a["dt"], "A": A} | {names[n]: v for n, v in a.items() if n not in ("x", "dt")}


def leaves(a):
    """The same tensors as leaves that require gradients."""
    return {n: v.detach().requires_grad_() for n, v in a.items()}


def values_and_gradients(f, a, dtype=None):
    """y, hT and the gradient of every argument, for a fixed random linear loss; computed in `dtype` if given.

    f(**a) returns (y, hT); if hT is None, it is left out.
    """
    x = next(iter(a.values()))
    g = torch.Generator(x.device).manual_seed(1)
    args = leaves({name: v.to(dtype or v.dtype, copy=True) for name, v in a.items()})
    results, weights = {}, []
    for name, v in zip(("y", "hT"), f(**args), strict=True):
        if v is not None:
            weight = torch.randn(v.shape, generator=g, device=x.device)
            weight = weight.to(x.dtype) if name == "y" else weight  # the same numbers in every dtype
            results[name] = v
            weights.append(weight.to(v.dtype))
    gradients = torch.autograd.grad(list(results.values()), list(args.values()), weights)
    values = {name: v.detach() for name, v in results.items()}
    return values | {f"d{name}": g for name, g in zip(args, gradients, strict=True)}


def compare(got, true, slack):
    """{name: {"relative_error", "tolerance", "right"}}; the tolerance is `slack` plus half a unit in the last place of
    the result's dtype."""
    comparisons = {}
    for name, want in true.items():
        have = got[name]
        rounding = 0.0 if have.dtype == torch.float32 else torch.finfo(have.dtype).eps / 2
        error = ((have.double() - want).norm() / (want.norm() + TINY)).item()
        tolerance = slack + rounding
        comparisons[name] = {"relative_error": error, "tolerance": tolerance, "right": error <= tolerance}  # NaN: no
    return comparisons


# ------------------------------------------------------------------------------------------------------ time and memory

def spread(seconds):
    """Measured seconds for a record, to the nanosecond, with their median, quartiles and minimum."""
    seconds = [round(s, 9) for s in seconds]
    low, _, high = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return {"median_seconds": median(seconds), "quartile_seconds": [low, high], "fastest_seconds": min(seconds),
            "runs": len(seconds), "samples_seconds": seconds}


def quartiles(times, digits=1):
    """'low .. high' in milliseconds, for a table."""
    return " .. ".join(f"{1e3 * s:.{digits}f}" for s in times["quartile_seconds"])


def or_dash(value, form, unit):
    """A cell of a table: value / unit in this form, or a dash for None."""
    return "-" if value is None else format(value / unit, form)


def bytes_moved(B, T, D, N, itemsize, extras=True):
    """{"forward", "forward_backward"}: bytes that the scan must read and write, counting every tensor once.

    With autograd the forward also writes one state per chunk, in float32, and the backward reads them.
    """
    wide, narrow = B * T * D * itemsize, B * T * N * itemsize
    z = int(extras)
    forward = (3 + z) * wide + 2 * narrow                    # x, dt, (z) in, y out; k, q in
    backward = (3 + z + 2 + z) * wide + 4 * narrow           # x, dt, dy, (z) in, dx, ddt, (dz) out; k, q in, dk, dq out
    return {"forward": forward, "forward_backward": forward + backward + 2 * chunk_state_bytes(B, T, D, N)}


def chunk_state_bytes(B, T, D, N):
    """Bytes of the states that the scan's forward keeps for the backward."""
    return 4 * B * math.ceil(T / build.CHUNK) * D * N


def kept_bytes(forward):
    """{address: bytes} of the storages that autograd keeps for the backward pass of forward()."""
    kept = {}

    def pack(v):
        kept[v.untyped_storage().data_ptr()] = v.untyped_storage().nbytes()
        return v

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
        results = forward()
    del results
    return kept


class Peak:
    """Peak memory above the usage when this object was created: allocated on a GPU, resident on a CPU."""

    def __init__(self, device="cpu"):
        self.cuda = torch.device(device).type == "cuda"
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            try:
                ctypes.CDLL(None).malloc_trim(0)
                Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the resident size
                self.before = self._resident()
            except (AttributeError, OSError):
                self.before = None

    def bytes(self):
        """The peak in bytes, or None if the system does not report it."""
        peak = torch.cuda.max_memory_allocated() if self.cuda else self._resident()
        return None if peak is None or self.before is None else peak - self.before

    def _resident(self):
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
            return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
        except (OSError, StopIteration):
            return None


# -------------------------------------------------------------------------------------------------------------- records

def check_out(out, instead="another --out", dry_run=False):
    """Create a record's folder before anything is measured. Raises ConfigError if `out`, a file or None, cannot be
    written, or is in results/ in a dry run or with uncommitted changes. `instead`: what the message suggests."""
    if out is None:
        return
    if Path(out).resolve().is_relative_to(ROOT / "results"):
        if dry_run:
            raise ConfigError(f"a dry run measures nothing, so its record does not belong in results/: give {instead}")
        if code_version()["uncommitted_changes"]:
            raise ConfigError("results/ is for records of a commit, and this tree has uncommitted changes (see git "
                              f"status): commit them, or give {instead}")
    try:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        if Path(out).is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        tmp = Path(temporary(out))
        tmp.touch()
        tmp.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {out} ({error.strerror}): give {instead}") from None


def record_file(args, name):
    """--out, or with --save results/<name>.json, or out/<name>.json. Raises ConfigError where it cannot be written."""
    out = Path(args.out or ROOT / ("results" if args.save else "out") / f"{name}.json").resolve()
    if out.suffix != ".json":
        raise ConfigError(f"--out={args.out}: name a .json file; the table and the picture go beside it")
    check_out(out)  # before anything is measured
    return out


def new_record(benchmark, **about):
    """The start of a record: the benchmark, date, machine and code."""
    date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    return {"benchmark": benchmark, "finished": False, "date": date, "environment": records.environment(), **about}


def headline(record, device=None):
    """A line with a record's machine, versions, date and commit."""
    ran = record["environment"]
    return (f"{device or ran['cpu']}, {torch.get_num_threads()} threads, torch {ran['torch']}, {record['date'][:10]}, "
            f"commit {(ran['commit'] or 'none')[:10]}")


def write_record(out, record):
    """Write a record to the file `out`, unless that is None; non-finite numbers become null."""
    if out is not None:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        records.write_json(out, finite(record))


def finite(record):
    """The record with None for every non-finite number, because JSON has no NaN."""
    if isinstance(record, dict):
        return {k: finite(v) for k, v in record.items()}
    if isinstance(record, (list, tuple)):
        return [finite(v) for v in record]
    return None if isinstance(record, float) and not math.isfinite(record) else record


# ------------------------------------------------------------------------------------------------------ what cannot run

class LeftOut(Exception):
    """The reason why a contender or model does not run here."""


def imported(module, name):
    """The attribute `name` of an optional module. Raises LeftOut, naming what is missing."""
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        missing = error.name == module.split(".")[0]
        raise LeftOut("not installed" if missing else in_one_line(error)) from None
    except Exception as error:  # for example an extension built for another PyTorch
        raise LeftOut(in_one_line(error)) from None


def in_one_line(error, limit=240):
    """An exception as one line for a record: its type and the first line of its message."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    words = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {words}"[:limit]
