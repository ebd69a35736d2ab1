"""Speed and memory of the scan: each implementation of longhorn_scan, and a plain loop.

    python bench/scan.py --device=cpu              # time: a minute or two, mostly the plain loop
    python bench/scan.py --device=cpu --memory     # memory: bytes kept and peak at T = 1024, 4096, 16384
    python bench/scan.py --T=1024 --B=4 --dtype=bfloat16 --out=record.json
    python bench/scan.py --device=cuda --save      # on a GPU, with Mamba's scan, GLA and attention: see scan_cuda.py

First the native kernels are compared with the loop in float64; if they are wrong, nothing is timed. After a warm-up all
implementations take turns, round after round, so that other load on the machine affects all of them alike.

The plain loop is slow for a reason that is easy to miss. Indexing x[:, t] makes autograd write a zero tensor (B, T, D)
at every step, which is quadratic in T. `longhorn_scan_ref` uses unbind instead, and is linear.
"""

import functools
import gc
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import configurator  # noqa: E402
from bench import measure, scan_cuda  # noqa: E402
from bench.measure import DTYPES, EPS, Threads, leaves, make_inputs  # noqa: E402
from common.errors import ConfigError, main_error  # noqa: E402
from configurator import Count, Seconds  # noqa: E402
from kernels import build, choose  # noqa: E402
from kernels.scan import longhorn_scan, longhorn_scan_ref  # noqa: E402

PASSES = ("forward", "forward_backward")


# ------------------------------------------------------------------------------------------------------ implementations

def plain_loop(x, dt, k, q, D=None, z=None, dt_bias=None):
    """Algorithm 1 written the obvious way: index the step, update the state, append."""
    S = torch.zeros(x.shape[0], x.shape[2], k.shape[2])  # (B, D, N)
    ys = []
    for t in range(x.shape[1]):
        beta = torch.sigmoid(dt[:, t] if dt_bias is None else dt[:, t] + dt_bias)  # (B, D)
        eps = beta / (1 + beta * (k[:, t] ** 2).sum(-1, keepdim=True))  # (B, D)
        S = (1 - eps[..., None] * k[:, t, None] ** 2) * S + (eps * x[:, t])[..., None] * k[:, t, None]  # (B, D, N)
        y = (S * q[:, t, None]).sum(-1)  # (B, D)
        if D is not None:
            y = y + D * x[:, t]
        ys.append(y if z is None else y * F.silu(z[:, t]))
    return torch.stack(ys, 1).to(x.dtype)  # (B, T, D)


BODIES = {"plain loop": plain_loop, "longhorn_scan_ref": longhorn_scan_ref,
          **{backend: functools.partial(longhorn_scan, backend=backend) for backend in ("torch", "cpu")}}


# ----------------------------------------------------------------------------------------------------------------- time

def check(a):
    """Compute and print the native kernels' errors; exits if one is above its tolerance."""
    true = measure.values_and_gradients(lambda **kw: longhorn_scan_ref(**kw, return_state=True), a, torch.float64)
    got = measure.values_and_gradients(lambda **kw: longhorn_scan(**kw, return_state=True, backend="cpu"), a)
    comparisons = measure.compare(got, true, slack=16 * EPS)
    errors = ", ".join(f"{n} {r['relative_error']:.1e}" for n, r in comparisons.items())
    print(f"relative error against the loop in float64: {errors}")
    wrong = [f"{n} (at most {r['tolerance']:.1e})" for n, r in comparisons.items() if not r["right"]]
    if wrong:
        sys.exit(f"bench/scan.py: the native kernels are wrong in {', '.join(wrong)}, so nothing was timed. "
                 "For details run python -m pytest tests/test_conformance.py")
    return {key: {n: r[key] for n, r in comparisons.items()} for key in ("relative_error", "tolerance")}


def time_bodies(B, T, D, N, dtype, extras, repeats, slow_repeats):
    """Time every implementation in turn, forward alone and forward + backward: the native kernels `repeats` times per
    round, the others once."""
    a = make_inputs(B, T, D, N, dtype, extras)
    accuracy = check(a)
    dy = torch.randn(B, T, D, generator=torch.Generator().manual_seed(2)).to(dtype)
    warm_up = {name: v[:, :4] if v.dim() == 3 else v for name, v in a.items()}
    times = {}
    for name in BODIES:
        once(name, "forward_backward", warm_up, dy[:, :4])
        for direction in PASSES:
            times[name, direction] = []
    once("cpu", "forward_backward", a, dy)
    for _ in range(slow_repeats):
        for name, direction in times:
            gc.collect()
            for _ in range(repeats if name == "cpu" else 1):
                times[name, direction].append(once(name, direction, a, dy))
    seconds, ratios, rates = {}, {}, []
    for (name, direction), samples in times.items():
        seconds.setdefault(name, {})[direction] = measure.spread(samples)
    moved = measure.bytes_moved(B, T, D, N, dtype.itemsize, extras)
    for direction in PASSES:
        best = seconds["cpu"][direction]["median_seconds"]
        rates.append(moved[direction] / best)
        for name in BODIES:
            ratios.setdefault(name, {})[direction] = seconds[name][direction]["median_seconds"] / best
    return {"B": B, "T": T, "D": D, "N": N, "dtype": str(dtype).removeprefix("torch."), "with_D_z_dt_bias": extras,
            **accuracy, "seconds": seconds, "times_the_native_kernels": ratios,
            "native": {"tokens_per_second": B * T / best,
                       "bytes_per_second": dict(zip(PASSES, rates, strict=True))}}


def once(name, direction, a, dy):
    """Seconds of one run; the leaves of a gradient are made before."""
    graded = leaves(a)
    start = time.perf_counter()
    if direction == "forward":
        BODIES[name](**a)
    else:
        torch.autograd.grad(BODIES[name](**graded), list(graded.values()), dy)
    return time.perf_counter() - start


def print_times(row):
    print(f"{'':20}{'forward':>12}{'quartiles':>22}{'x cpu':>8}{'fwd + bwd':>13}{'quartiles':>22}{'x cpu':>8}    (ms)")
    for name, seconds in row["seconds"].items():
        line = f"  {name:18}"
        for direction, width in zip(PASSES, (12, 13), strict=True):
            t = seconds[direction]
            ratio = row["times_the_native_kernels"][name][direction]
            line += f"{1e3 * t['median_seconds']:{width}.2f}{measure.quartiles(t, 2):>22}{ratio:8.0f}"
        print(line)
    native = row["native"]
    rates = " and ".join(f"{rate / 1e9:.1f} GB/s" for rate in native["bytes_per_second"].values())
    print(f"  cpu: {rates}, counting the bytes that must move; {native['tokens_per_second']:,.0f} tokens/s\n")


# --------------------------------------------------------------------------------------------------------------- memory

def measure_memory(B, T, D, N, dtype):
    """Bytes that the native scan keeps for the backward (inputs and chunk states), and the peak over both passes."""
    a = leaves(make_inputs(B, T, D, N, dtype, extras=False))
    dy, ys = torch.ones(B, T, D, dtype=dtype), []
    peak = measure.Peak()
    kept = measure.kept_bytes(lambda: ys.append(BODIES["cpu"](**a)))
    torch.autograd.grad(ys.pop(), list(a.values()), dy)
    return {"B": B, "T": T, "D": D, "N": N, "dtype": str(dtype).removeprefix("torch."),
            "peak_bytes_above_inputs": peak.bytes(), "kept_bytes": sum(kept.values()),
            "input_bytes": sum(v.untyped_storage().nbytes() for v in a.values()),
            "chunk_state_bytes": measure.chunk_state_bytes(B, T, D, N),
            "BTD_bytes": 4 * B * T * D, "BTDN_bytes": 4 * B * T * D * N}


def print_memory(rows):
    names = {"kept_bytes": "kept", "input_bytes": "inputs of it", "chunk_state_bytes": "chunk states",
             "peak_bytes_above_inputs": "peak above", "BTD_bytes": "4 B T D", "BTDN_bytes": "4 B T D N"}
    print(f"{'T':>8}" + "".join(f"{n:>15}" for n in names.values()) + "    (MiB)")
    for r in rows:
        cells = ["-" if r[n] is None else f"{r[n] / 2**20:.1f}" for n in names]
        print(f"{r['T']:8}" + "".join(f"{cell:>15}" for cell in cells))
    last = rows[-1]
    print(f"At T = {last['T']} it keeps {last['kept_bytes'] / last['BTD_bytes']:.1f} x 4 B T D: x, dt, and one state "
          f"per {build.CHUNK} steps, {last['N'] / build.CHUNK:g} x 4 B T D. All states: {last['N']} x 4 B T D.\n")


# ----------------------------------------------------------------------------------------------------------------- main

@dataclass
class Options:
    device: Literal["cpu", "cuda"] = "cpu"
    B: Count = None  # batch size (8; 1 with --memory; cuda: 64K tokens)
    T: Count = None  # steps (256; 1024, 4096 and 16384 with --memory; cuda: 1024 to 32768)
    D: Count = None  # channels (512; cuda: 1536 and 2048)
    N: Count = None  # state size per channel (16; cuda: 16 and 64)
    dtype: Literal[tuple(DTYPES)] = None  # of x, dt, k, q, z (float32; cuda: bfloat16)
    out: Path = None  # write the record to this JSON file
    save: bool = False  # write the record to results/scan_cpu.json, scan_cpu_memory.json or scan_cuda.json
    # --- with --device=cpu
    repeats: Count = 30  # runs of the native kernels per round
    slow_repeats: Count = 5  # rounds, and runs of the loops
    threads: Threads = None  # threads of PyTorch and the kernels (PyTorch's choice)
    memory: bool = False  # measure memory instead of time
    # --- with --device=cuda
    rounds: Count = 10  # rounds of all contenders in turn
    budget_s: Seconds = math.inf  # start no new shape after this many seconds
    without: tuple[Literal[tuple(scan_cuda.CONTENDERS)], ...] = ()  # contenders to leave out
    dry_run: bool = False  # run the same code on the CPU at tiny sizes, as a test


def main(argv):
    args = configurator.read(Options, argv, __doc__)
    if args.device == "cuda":
        if args.memory:
            raise ConfigError("--memory is for --device=cpu: with --device=cuda every time comes with the peak memory")
        return scan_cuda.main(args)
    if args.threads:
        torch.set_num_threads(args.threads)
    if reason := choose.unavailable("cpu"):
        sys.exit(f"bench/scan.py: the native kernels cannot run here, so there is nothing to measure: {reason}")
    benchmark = "scan_memory" if args.memory else "scan"
    saved = ROOT / "results" / benchmark.replace("scan", "scan_cpu")
    out = args.out or (saved.with_suffix(".json") if args.save else None)
    measure.check_out(out)
    record = measure.new_record(benchmark, threads=torch.get_num_threads(), lanes=build.library().longhorn_lanes())
    print(measure.headline(record))
    rows = memory_rows(args) if args.memory else time_rows(args)
    if out:
        measure.write_record(out, record | {"rows": rows, "finished": True})
        print(f"record: {out}")


def memory_rows(args):
    B, D, N, dtype = args.B or 1, args.D or 512, args.N or 16, DTYPES[args.dtype or "float32"]
    measure_memory(B, 64, D, N, dtype)  # warm-up
    print(f"\nB={B} D={D} N={N} {dtype}: memory that the scan keeps for the backward, and the peak of both passes")
    rows = [measure_memory(B, T, D, N, dtype) for T in ([args.T] if args.T else (1024, 4096, 16384))]
    print_memory(rows)
    return rows


def time_rows(args):
    B, T, D, N, dtype = args.B or 8, args.T or 256, args.D or 512, args.N or 16, DTYPES[args.dtype or "float32"]
    rows = []
    for extras in (False, True):
        print(f"\nB={B} T={T} D={D} N={N} {dtype}{', with D, z and dt_bias' if extras else ''}")
        rows.append(time_bodies(B, T, D, N, dtype, extras, args.repeats, args.slow_repeats))
        print_times(rows[-1])
    return rows


if __name__ == "__main__":
    with main_error("bench/scan.py"):
        sys.exit(main(sys.argv[1:]))
