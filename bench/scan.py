"""How fast the scan is, and how much it keeps: every body of longhorn_scan beside the loop anyone would write first.

    python bench/scan.py --device=cpu              # time: a minute or two, most of it the plain loop
    python bench/scan.py --device=cpu --memory     # memory: bytes kept and peak, T = 1024, 4096, 16384
    python bench/scan.py --T=1024 --B=4 --dtype=bfloat16 --out=record.json
    python bench/scan.py --device=cuda --save      # a GPU, beside Mamba's scan, GLA and attention: see scan_cuda.py

In this order: the native kernels against the loop in float64 (it refuses to time what is wrong), a warm-up, then all
bodies in turn, round after round, so that whatever else the machine does falls on all alike; median and quartiles.

The surprise is how bad the obvious loops are. Indexing x[:, t] makes autograd write a whole zero tensor (B, T, D) for
every step, which is quadratic in T, and indexing precomputed A_t and B_t (Eq. 1) one of (B, T, D, N); `longhorn_scan_ref`
differs from the former by an unbind and is linear.
"""

import argparse
import ctypes
import datetime
import gc
import math
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import records  # noqa: E402
from bench.measure import DTYPES, EPS, compare, make_inputs, refuse_uncommitted, spread, values_and_gradients, work  # noqa: E402
from configurator import main_error  # noqa: E402
from kernels import build  # noqa: E402
from kernels.scan import longhorn_scan, longhorn_scan_ref  # noqa: E402

SAVED = Path(__file__).resolve().parent.parent / "results" / "scan_cpu.json"


# -------------------------------------------------------------------------------------------------------------- bodies

def plain_loop(x, dt, k, q, D=None, z=None, dt_bias=None):
    """Algorithm 1 as one would write it: index the step, update the state, append."""
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


def loop_over_eq1(x, dt, k, q, D=None, z=None, dt_bias=None):
    """S_t = A_t * S_{t-1} + B_t (Eq. 1) as reference implementations of SSMs write it: A and B of all steps first, then the
    loop indexes them. Autograd writes a zero tensor (B, T, D, N) for every step."""
    beta = torch.sigmoid(dt if dt_bias is None else dt + dt_bias)  # (B, T, D)
    eps = (beta / (1 + beta * (k * k).sum(-1, keepdim=True)))[..., None]  # (B, T, D, 1)
    decay, add = 1 - eps * (k * k)[:, :, None], eps * x[..., None] * k[:, :, None]  # (B, T, D, N)
    S, ys = torch.zeros_like(decay[:, 0]), []
    for t in range(x.shape[1]):
        S = decay[:, t] * S + add[:, t]  # (B, D, N)
        ys.append((S * q[:, t, None]).sum(-1))
    y = torch.stack(ys, 1) if D is None else torch.stack(ys, 1) + D * x
    return (y if z is None else y * F.silu(z)).to(x.dtype)  # (B, T, D)


BODIES = {"loop over Eq. 1": loop_over_eq1, "plain loop": plain_loop, "longhorn_scan_ref": longhorn_scan_ref,
          "torch": lambda **a: longhorn_scan(**a, backend="torch"), "cpu": lambda **a: longhorn_scan(**a, backend="cpu")}


def forward_and_backward(f, a, dy):
    y = f(**a)
    return torch.autograd.grad(y, list(a.values()), dy)


# --------------------------------------------------------------------------------------------------------- correctness

def check(a):
    """The errors, printed; exits where one is above its type's tolerance (tests/test_scan.py says how it comes about)."""
    true = values_and_gradients(lambda **kw: longhorn_scan_ref(**kw, return_state=True), a, torch.float64)
    got = values_and_gradients(lambda **kw: longhorn_scan(**kw, return_state=True, backend="cpu"), a)
    found = compare(got, true, slack=16 * EPS)
    print("relative error against the loop in float64: " + ", ".join(f"{n} {r['relative_error']:.1e}" for n, r in found.items()))
    wrong = [f"{n} {r['relative_error']:.1e} (at most {r['tolerance']:.1e})" for n, r in found.items() if not r["right"]]
    if wrong:
        sys.exit(f"bench/scan.py: the native kernels are wrong in {', '.join(wrong)}; not timed. "
                 "Look closer: python -m pytest tests/test_scan.py")
    return {what: {n: r[what] for n, r in found.items()} for what in ("relative_error", "tolerance")}


# ---------------------------------------------------------------------------------------------------------------- time

def time_bodies(B, T, D, N, dtype, extras, repeats, slow_repeats):
    """Every body, forward alone and forward + backward, interleaved. The slow ones run `slow_repeats` times, the kernels
    `repeats` times in each of those rounds."""
    from tqdm import tqdm

    a = make_inputs(B, T, D, N, dtype, extras)
    accuracy = check(a)
    dy = torch.randn(B, T, D, generator=torch.Generator().manual_seed(2)).to(dtype)
    graded = {n: v.clone().requires_grad_() for n, v in a.items()}

    def once(f, backward):
        start = time.perf_counter()
        forward_and_backward(f, graded, dy) if backward else f(**a)
        return time.perf_counter() - start

    for _ in range(5):
        once(BODIES["cpu"], True)
        once(BODIES["cpu"], False)
    short = {n: v[:, :4] if v.dim() == 3 else v for n, v in graded.items()}
    for f in BODIES.values():
        forward_and_backward(f, short, dy[:, :4])
    slowest = "loop over Eq. 1"  # tens of seconds: two rounds
    times = {(name, backward): [] for name in BODIES for backward in (False, True)}
    with tqdm(total=slow_repeats * len(times), leave=False, disable=not sys.stderr.isatty()) as bar:
        for round_ in range(slow_repeats):
            for (name, backward), seconds in times.items():
                bar.set_description(f"{name}, forward{' + backward' if backward else ''}")
                gc.collect()
                for _ in range(repeats if name == "cpu" else 0 if name == slowest and round_ > 1 else 1):
                    seconds.append(once(BODIES[name], backward))
                bar.update()
    timed = {name: {"forward": spread(times[name, False]), "forward_backward": spread(times[name, True])} for name in BODIES}
    best = {what: t["median_seconds"] for what, t in timed["cpu"].items()}
    ratios = {name: {what: t["median_seconds"] / best[what] for what, t in both.items()} for name, both in timed.items()}
    counted = work(B, T, D, N, dtype.itemsize, extras)
    rates = {f"{what}_{unit}_per_second": counted[what][unit] / best[what] for what in best for unit in ("bytes", "flops")}
    return {"B": B, "T": T, "D": D, "N": N, "dtype": str(dtype).removeprefix("torch."), "with_D_z_dt_bias": extras, **accuracy,
            "seconds": timed, "times_the_native_kernels": ratios, "work": counted,
            "native": {**rates, "tokens_per_second": B * T / best["forward_backward"]}}


def print_times(r):
    print(f"{'':20}{'forward':>12}{'quartiles':>22}{'x cpu':>8}{'fwd + bwd':>13}{'quartiles':>22}{'x cpu':>8}{'runs':>6}    (ms)")
    for name, both in r["seconds"].items():
        line = f"  {name:18}"
        for what, width in (("forward", 12), ("forward_backward", 13)):
            t, times = both[what], r["times_the_native_kernels"][name][what]
            low, high = (f"{1e3 * s:.2f}" for s in t["quartile_seconds"])
            line += f"{1e3 * t['median_seconds']:{width}.2f}{low + ' .. ' + high:>22}{times:8.0f}"
        print(line + f"{both['forward_backward']['runs']:6}")
    rate = lambda what: (f"{r['native'][what + '_bytes_per_second'] / 1e9:.1f} GB/s and "
                         f"{r['native'][what + '_flops_per_second'] / 1e9:.0f} GFLOP/s")
    print(f"  cpu: forward {rate('forward')}, forward + backward {rate('forward_backward')}, by count; "
          f"{r['native']['tokens_per_second']:,.0f} tokens/s\n")


# -------------------------------------------------------------------------------------------------------------- memory

def peak_since_reset():
    """Peak resident bytes since `reset_peak`; None where /proc does not tell."""
    try:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        return None


def reset_peak():
    """Give freed memory back and start the peak again from what is resident; returns that, or None."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (AttributeError, OSError):
        return None
    return peak_since_reset()


def measure_memory(B, T, D, N, dtype):
    """What the native scan keeps for its backward (inputs, chunk states), and the peak above the inputs of both passes."""
    a = {n: v.requires_grad_() for n, v in make_inputs(B, T, D, N, dtype, extras=False).items()}
    dy, kept = torch.ones(B, T, D, dtype=dtype), {}

    def pack(v):
        kept[v.untyped_storage().data_ptr()] = v.untyped_storage().nbytes()
        return v

    before = reset_peak()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
        y = BODIES["cpu"](**a)
    torch.autograd.grad(y, list(a.values()), dy)
    peak = peak_since_reset()
    given = sum(v.untyped_storage().nbytes() for v in a.values())
    return {"B": B, "T": T, "D": D, "N": N, "dtype": str(dtype).removeprefix("torch."), "kept_bytes": sum(kept.values()),
            "input_bytes": given, "chunk_state_bytes": 4 * B * math.ceil(T / build.CHUNK) * D * N,
            "peak_bytes_above_inputs": None if before is None or peak is None else peak - before,
            "BTD_bytes": 4 * B * T * D, "BTDN_bytes": 4 * B * T * D * N}


def print_memory(rows):
    mib = lambda b: "n/a" if b is None else f"{b / 2**20:.1f}"
    names = {"kept_bytes": "kept", "input_bytes": "of it inputs", "chunk_state_bytes": "chunk states",
             "peak_bytes_above_inputs": "peak above", "BTD_bytes": "4 B T D", "BTDN_bytes": "4 B T D N"}
    print(f"{'T':>8}" + "".join(f"{n:>15}" for n in names.values()) + "    (MiB)")
    for r in rows:
        print(f"{r['T']:8}" + "".join(f"{mib(r[n]):>15}" for n in names))
    first, last = rows[0], rows[-1]
    if last["T"] > first["T"]:
        print(f"T x {last['T'] / first['T']:g}: kept x {last['kept_bytes'] / first['kept_bytes']:.1f}, which is linear.")
    print(f"At T = {last['T']} it keeps {last['kept_bytes'] / last['BTD_bytes']:.1f} x 4 B T D: x, dt, and a state every "
          f"{build.CHUNK} steps, N / {build.CHUNK} = {last['N'] / build.CHUNK:g}. All would be {last['N']} x 4 B T D.\n")


# ---------------------------------------------------------------------------------------------------------------- main

def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--B", type=int, help="batch size (8; 1 with --memory; cuda: 64K tokens)")
    parser.add_argument("--T", type=int, help="steps (256; 1024, 4096 and 16384 with --memory; cuda: the preset's)")
    parser.add_argument("--D", type=int, help="channels (512; cuda: the preset's)")
    parser.add_argument("--N", type=int, help="state size (16; cuda: the preset's)")
    parser.add_argument("--dtype", choices=DTYPES, help="of x, dt, k, q, z (float32; cuda: bfloat16)")
    parser.add_argument("--out", help="write the record, JSON, to this file")
    parser.add_argument("--save", action="store_true", help="write it to results/scan_cpu.json, results/scan_cpu_memory.json "
                        "or results/scan_cuda.json")
    cpu = parser.add_argument_group("with --device=cpu")
    cpu.add_argument("--repeats", type=int, default=30, help="runs of the native kernels a round (%(default)s)")
    cpu.add_argument("--slow_repeats", type=int, default=5, help="rounds, and runs of every other body (%(default)s)")
    cpu.add_argument("--threads", type=int, help="of PyTorch and the kernels (PyTorch's choice)")
    cpu.add_argument("--memory", action="store_true", help="measure memory instead of time")
    gpu = parser.add_argument_group("with --device=cuda")
    gpu.add_argument("--preset", default="paper", choices=("paper", "quick"), help="24 shapes, or 4 of them (%(default)s)")
    gpu.add_argument("--rounds", type=int, default=10, help="rounds of all contenders in turn (%(default)s)")
    gpu.add_argument("--budget_s", type=float, default=math.inf, help="start no shape that would end after so many seconds")
    gpu.add_argument("--without", default="", help="contenders to leave out, separated by commas")
    gpu.add_argument("--even_if_wrong", action="store_true", help="also time what fails the comparison; it is marked")
    gpu.add_argument("--instructions_forward", type=float, help="a (token, channel), for the issue floor (4 N + 36)")
    gpu.add_argument("--instructions_backward", type=float, help="likewise (5 times the forward's)")
    gpu.add_argument("--dry_run", action="store_true", help="the same code on the CPU at tiny sizes: no measurement")
    args = parser.parse_args(argv)
    for name in ("B", "T", "D", "N", "repeats", "slow_repeats", "threads", "rounds", "budget_s", "instructions_forward",
                 "instructions_backward"):
        if getattr(args, name) is not None and not getattr(args, name) >= 1:
            parser.error(f"--{name}={getattr(args, name)}: must be at least 1")
    if args.memory and args.device == "cuda":
        parser.error("--memory is for --device=cpu: with --device=cuda the peak stands beside every time")
    return args


def main():
    args = parse()
    if args.device == "cuda":
        from bench import scan_cuda

        sys.exit(scan_cuda.main(args))
    args.D, args.N, args.dtype = args.D or 512, args.N or 16, args.dtype or "float32"
    if args.threads:
        torch.set_num_threads(args.threads)
    reason = build.unavailable("cpu")
    if reason:
        sys.exit(f"bench/scan.py: the native kernels cannot run here, so there is nothing to measure: {reason}")
    out = args.out or (SAVED.with_stem(SAVED.stem + "_memory") if args.memory else SAVED) if args.save or args.out else None
    refuse_uncommitted(out)
    dtype = DTYPES[args.dtype]
    where, date = records.environment(), datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    record = {"benchmark": "scan_memory" if args.memory else "scan", "date": date, "threads": torch.get_num_threads(),
              "lanes": build.library().longhorn_lanes(), "environment": where}
    commit = (where["commit"] or "none")[:10]
    print(f"{where['cpu']}, {record['threads']} threads, torch {where['torch']}, {date[:10]}, commit {commit}")
    if args.memory:
        B = args.B or 1
        measure_memory(B, 64, args.D, args.N, dtype)  # whatever the first call loads
        print(f"\nB={B} D={args.D} N={args.N} {args.dtype}: what the scan keeps for its backward, and the peak of both passes")
        record["rows"] = [measure_memory(B, T, args.D, args.N, dtype) for T in ([args.T] if args.T else (1024, 4096, 16384))]
        print_memory(record["rows"])
    else:
        record["rows"] = []
        for extras in (False, True):
            B, T = args.B or 8, args.T or 256
            print(f"\nB={B} T={T} D={args.D} N={args.N} {args.dtype}{', with D, z and dt_bias' if extras else ''}")
            record["rows"].append(time_bodies(B, T, args.D, args.N, dtype, extras, args.repeats, args.slow_repeats))
            print_times(record["rows"][-1])
    if out:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        records.write_json(out, record)
        print(f"record: {out}")


if __name__ == "__main__":
    with main_error("bench/scan.py"):
        main()
