"""The scan on a GPU, compared with other scans and with GLA and attention; `bench/scan.py --device=cuda` runs this.

    python bench/scan.py --device=cuda --save                    # the paper's 24 shapes, results/scan_cuda.json
    python bench/scan.py --device=cuda --T=2048 --D=1024 --N=32  # your own shape

First every result and gradient is compared with the loop in float64 on the same GPU: at odd sizes, with keys of 1000
and logits of +-1000, and at the paper's shapes. Wrong kernels are not timed. mamba-ssm, if installed, is compared in
the same way (`python bench/scan_cuda.py` does only that). Then, for each shape, all contenders take turns, round after
round, between CUDA events: the forward without autograd, then forward and backward with it.

The times of scans come with a share of the copy bandwidth, measured on the same device: the bytes that a scan must move
(measure.bytes_moved) over the time. GLA and attention do a different job and have none.

Gigabytes are written before every timed pass. That empties the cache, and keeps the device busy until the host has
queued the whole pass: otherwise the time of a short kernel would include Python's overhead.
"""

import functools
import gc
import itertools
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import measure  # noqa: E402
from bench.measure import DTYPES, EPS, LeftOut, as_mamba, imported, in_one_line, leaves, make_inputs  # noqa: E402
from common.errors import ConfigError, main_error  # noqa: E402
from kernels.scan import longhorn_scan, selective_scan  # noqa: E402

SAVED = ROOT / "results" / "scan_cuda.json"
PASSES = ("forward", "backward", "forward_backward")
CONTENDER_SECONDS = 2.0  # time limit of passes per shape and contender, after the first three rounds


class Shape(NamedTuple):
    B: int
    T: int
    D: int
    N: int

    def __str__(self):
        return f"B={self.B} T={self.T} D={self.D} N={self.N}"


def shapes():
    """All shapes, most important first: the paper's width and state, then more tokens, more states, more width."""
    found = []
    for D, N, tokens, T in itertools.product((1536, 2048), (16, 64), (65536, 524288), (1024, 4096, 32768)):
        found.append(Shape(tokens // T, T, D, N))
    return found


# --------------------------------------------------------------------------------------------------------------- device

class Gpu:
    """The clock, the memory counter and the copy bandwidth of a GPU."""

    name, backend = "cuda", "cuda"

    def __init__(self, flush_bytes=4 << 30):
        self.properties = torch.cuda.get_device_properties(0)
        size = min(flush_bytes, self.properties.total_memory // 16)
        self.flushed = torch.empty(size, dtype=torch.uint8, device="cuda")

    def laps(self, *steps):
        """Seconds of each step on the device, in sequence, starting from an empty cache."""
        self.flushed.zero_()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
        events[0].record()
        for step, event in zip(steps, events[1:], strict=True):
            step()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:], strict=False)]

    def copy_bandwidth(self):
        """Bytes read and written per second: the median of 20 large copies."""
        source = torch.randint(0, 256, self.flushed.shape, dtype=torch.uint8, device=self.name)
        seconds = [self.laps(lambda: self.flushed.copy_(source))[0] for _ in range(23)][3:]
        return 2 * source.numel() / measure.spread(seconds)["median_seconds"]

    def peak_above(self, step):
        """Peak of allocated bytes during the step, above the bytes allocated before."""
        peak = measure.Peak("cuda")
        step()
        torch.cuda.synchronize()
        return peak.bytes()

    def free(self):
        gc.collect()
        try:
            torch.cuda.empty_cache()
        except RuntimeError:  # the context is lost; `alive` reports that
            pass

    def alive(self):
        """False after an error that makes every later call of this process fail, such as a write out of bounds."""
        try:
            torch.cuda.synchronize()
            return torch.zeros(1, device="cuda").item() == 0
        except RuntimeError:
            return False

    def describe(self):
        p = self.properties
        return {"name": p.name, "capability": f"{p.major}.{p.minor}", "multiprocessors": p.multi_processor_count,
                "memory_bytes": p.total_memory, "torch": torch.__version__, "cuda": torch.version.cuda,
                "nvidia_smi": nvidia_smi("driver_version", "clocks.max.sm", "clocks.sm", "temperature.gpu")}


class DryRun(Gpu):
    """Stands in for a missing GPU. Its numbers mean nothing and never go to results/."""

    name, backend = "cpu", "cpu"

    def __init__(self):
        self.flushed = torch.empty(1 << 20, dtype=torch.uint8)

    def laps(self, *steps):
        times = [time.perf_counter()]
        for step in steps:
            step()
            times.append(time.perf_counter())
        return [b - a for a, b in zip(times, times[1:], strict=False)]

    def peak_above(self, step):
        step()

    def alive(self):
        return True

    def describe(self):
        return {"name": "dry run on a CPU", "torch": torch.__version__}


def nvidia_smi(*fields):
    """{field: text} for the first GPU, or None if nvidia-smi does not answer."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    return dict(zip(fields, lines[0].split(", "), strict=False)) if lines else None


# ----------------------------------------------------------------------------------------------------------- contenders

class Pass(NamedTuple):
    call: object      # () -> y
    wanted: list      # tensors whose gradients the backward computes
    dy: torch.Tensor


def our_longhorn(shape, a, dy, device):
    a = leaves(a)
    return Pass(lambda: longhorn_scan(**a, backend=device.backend), list(a.values()), dy)


def our_mamba(shape, a, dy, device):
    a = leaves(as_mamba(a))
    return Pass(lambda: selective_scan(**a, delta_softplus=True, backend=device.backend), list(a.values()), dy)


def mamba_ssm(shape, a, dy, device):
    """mamba-ssm in its own layout, (B, D, T) with time contiguous; the transposition is not timed."""
    if device.name != "cuda":
        raise LeftOut("its kernels need a GPU")
    f = imported(*MAMBA_SSM)
    a = leaves({n: time_last(v) for n, v in as_mamba(a).items()})
    return Pass(lambda: f(**a, delta_softplus=True), list(a.values()), time_last(dy))


def time_last(v):
    return v.transpose(1, 2).contiguous() if v.dim() == 3 else v


def check_mamba_ssm():
    """Compare mamba-ssm with the loop in float64: (description, or None; the reason why it is not timed, or None). Runs
    in a separate process, because a kernel error makes the GPU unusable for its process."""
    command = [sys.executable, __file__]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=90)
    except subprocess.TimeoutExpired:
        return None, "90 s were not enough to check its kernels"
    last = [line for line in (run.stdout + run.stderr).splitlines() if line.strip()][-1:] or [""]
    return (None, last[0]) if run.returncode else (last[0].removeprefix("in short: "), None)


def fla_chunk_gla(shape, a, dy, device):
    """D / 128 heads with keys of N and values of 128 channels: a state of D N numbers, like the scan's."""
    f = imported("fla.ops.gla", "chunk_gla")
    if shape.D % 128:
        raise LeftOut(f"D {shape.D} is not a whole number of heads of 128")
    g = torch.Generator(device.name).manual_seed(3)
    random = torch.randn(3, shape.B, shape.T, shape.D // 128, shape.N, generator=g, device=device.name)
    q, k, gate = random.to(a["x"].dtype)
    v = a["x"].unflatten(-1, (-1, 128))
    a = leaves({"q": q, "k": k, "v": v, "g": F.logsigmoid(gate) / 16})  # its layer's gate
    return Pass(lambda: f(**a)[0], list(a.values()), dy.view_as(v))


def attention(shape, a, dy, device):
    """PyTorch's causal flash attention, D channels in heads of 64; x, dt and z serve as q, k and v."""
    if shape.D % 64:
        raise LeftOut(f"D {shape.D} is not a whole number of heads of 64")
    heads = lambda v: v.view(shape.B, shape.T, shape.D // 64, 64).transpose(1, 2)  # (B, H, T, 64)
    q, k, v = (heads(a[n]).detach().requires_grad_() for n in ("x", "dt", "z"))

    def call():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return Pass(call, [q, k, v], heads(dy))


def longhorn_mma(shape, a, dy, device):
    """The prototype of the same recurrence on tensor cores, in TF32. Less work than the others': no D and z, and the
    step sizes are given."""
    if device.name != "cuda":
        raise LeftOut("its kernels need a GPU")
    scan = imported("tools.scan_mma", "longhorn_scan")

    def with_step_sizes(x, dt, k, q):
        return scan(1 / (1 + torch.exp(-dt) + k.square().sum(-1, keepdim=True)), x, k, q)

    small = make_inputs(1, 101, 200, shape.N, torch.float32, extras=False, device=device.name)
    got = measure.values_and_gradients(with_step_sizes, small)
    true = measure.values_and_gradients(scans("longhorn", "torch"), small, torch.float64)
    wrong = [name for name, result in measure.compare(got, true, 1e-3).items() if not result["right"]]
    if wrong:
        raise LeftOut(f"wrong in {', '.join(wrong)}")
    e = 1 / (1 + torch.exp(-a["dt"].float()) + a["k"].float().square().sum(-1, keepdim=True))  # (B, T, D)
    a = leaves({"e": e.to(dy.dtype), "x": a["x"], "k": a["k"], "q": a["q"]})
    return Pass(lambda: scan(**a)[0], list(a.values()), dy)


SCANS = {"longhorn_scan": our_longhorn, "selective_scan": our_mamba, "mamba_ssm": mamba_ssm}
CONTENDERS = SCANS | {"longhorn_mma": longhorn_mma, "fla_chunk_gla": fla_chunk_gla, "attention": attention}


# ---------------------------------------------------------------------------------------------------------- correctness

MAMBA_SSM = "mamba_ssm.ops.selective_scan_interface", "selective_scan_fn"
KERNELS_OF = {"longhorn": "longhorn_scan", "exact": "longhorn_scan", "mamba": "selective_scan"}

KEYS, LOGITS = {"key": 1000.0}, {"logit": 1000.0}
PAPER = (64, 1024, 1536, 16)
AT_THE_PAPERS = [  # family, (B, T, D, N), dtype, extremes; the last has few rows, so that T is split into segments
    ("longhorn", PAPER, "bfloat16", {}), ("longhorn", PAPER, "float32", {}), ("mamba", PAPER, "bfloat16", {}),
    ("longhorn", PAPER, "bfloat16", KEYS | LOGITS), ("longhorn", PAPER, "float32", KEYS),
    ("longhorn", (16, 4096, 1536, 16), "bfloat16", {}), ("longhorn", (64, 1024, 1536, 64), "bfloat16", {}),
    ("exact", PAPER, "bfloat16", {}), ("mamba", PAPER, "float32", {}), ("longhorn", PAPER, "float32", LOGITS),
    ("longhorn", (2, 4096, 1536, 16), "bfloat16", {})]


def cases(tiny=False):
    """Sizes that are not multiples of a block or chunk, extreme values, and the paper's shapes."""
    B, T, D = (2, 40, 24) if tiny else (2, 257, 200)
    found = []
    for family in ("longhorn", "mamba"):
        for N, dtype in ((16, "bfloat16"), (16, "float32"), (16, "float16"), (64, "bfloat16"), (64, "float32")):
            found.append((family, (B, T, D, N), dtype, {}))
    for dtype in ("float32", "bfloat16"):
        for extreme in (KEYS, LOGITS, KEYS | LOGITS):
            found.append(("longhorn", (1, T, 72, 16), dtype, extreme))
    return found if tiny else found + AT_THE_PAPERS


def scans(family, backend):
    """f(**a) -> (y, hT) for longhorn, exact (Eq. 6) or mamba; (y, None) for mamba_ssm, whose hT has no gradient."""
    if family == "mamba_ssm":
        if backend == "torch":
            return lambda **a: (selective_scan(**a, delta_softplus=True, backend=backend), None)
        f = imported(*MAMBA_SSM)
        return lambda **a: (f(**{n: time_last(v) for n, v in a.items()}, delta_softplus=True).transpose(1, 2), None)
    if family == "mamba":
        return lambda **a: selective_scan(**a, delta_softplus=True, return_last_state=True, backend=backend)
    return lambda **a: longhorn_scan(**a, exact=family == "exact", return_state=True, backend=backend)


def check_case(family, shape, dtype, extreme, device):
    """A comparison with the loop in float64, as a record: errors and tolerances for y, hT and every gradient, and
    whether two runs agree to the bit; or {'reason'} if it did not run."""
    row = {"family": family, **dict(zip("BTDN", shape, strict=True)), "dtype": dtype, **extreme}
    try:
        a = make_inputs(*shape, DTYPES[dtype], device=device.name, **extreme)
        if family.startswith("mamba"):
            a = as_mamba(a)
        got = measure.values_and_gradients(scans(family, device.backend), a)
        if family == "mamba_ssm":
            same = None  # atomic sums, whose order changes from run to run
        else:
            again = measure.values_and_gradients(scans(family, device.backend), a)
            same = all(torch.equal(again[name], v) for name, v in got.items())
            del again
        # the torch backend recomputes pieces in its backward, so that float64 fits in memory
        true = measure.values_and_gradients(scans(family, "torch"), a, torch.float64)
        results = measure.compare(got, true, slack(family, shape[1], extreme))
    except Exception as error:
        return {**row, "right": False, "reason": in_one_line(error)}
    right = same is not False and all(r["right"] for r in results.values())
    return {**row, "right": right, "two_runs_agree": same, "results": results}


def slack(family, T, extreme):
    """The relative error that a result in float32 may have after T steps."""
    if family == "mamba_ssm":  # fast math
        return 1e-3
    # an error of 2 ulp in a decay near 1 counts T times: Mamba's, whose exponential the hardware approximates
    if extreme:
        return 2e-5
    return 64 * EPS + (2 * T * EPS if family == "mamba" else 0)


def check(device, tiny=False, budget_s=math.inf):
    """Run and print all cases that fit in budget_s seconds; returns (records, {contender: why it is not timed}).
    Raises ConfigError if the GPU is unusable afterwards."""
    rows, wrong, began = [], {}, time.perf_counter()
    for case in cases(tiny):
        if time.perf_counter() - began > budget_s:
            print(f"  {len(cases(tiny)) - len(rows)} more comparisons are left out: {budget_s:.0f} s are used up")
            break
        row = check_case(*case, device)
        rows.append(row)
        print(f"  {row['family']:9} {describe_case(row)}", flush=True)
        device.free()
        if not row["right"]:
            wrong.setdefault(KERNELS_OF[row["family"]], describe_case(row))
        if not device.alive():
            raise ConfigError(f"the GPU is unusable after {describe_case(row)}")
    return rows, wrong


def describe_case(row):
    case = f"B={row['B']} T={row['T']} D={row['D']} N={row['N']} {row['dtype']}"
    for name in ("key", "logit"):
        if name in row:
            case += f" |{name}|={row[name]:g}"
    if "reason" in row:
        return f"{case}: {row['reason']}"
    results = {name: r for name, r in row["results"].items() if row["right"] or not r["right"]}
    if not results:
        return f"{case}: WRONG, two runs differ"
    name = max(results, key=lambda name: (math.isnan(results[name]["relative_error"]),
                                          results[name]["relative_error"]))
    return (f"{case}: {'ok' if row['right'] else 'WRONG'}, largest error {name} {results[name]['relative_error']:.1e} "
            f"(at most {results[name]['tolerance']:.1e})")


# ----------------------------------------------------------------------------------------------------------------- time

def forward(timed, device):
    with torch.no_grad():
        return device.laps(timed.call)


def forward_backward(timed, device):
    """[seconds of the forward, seconds of the backward]"""
    ys = []
    return device.laps(lambda: ys.append(timed.call()), lambda: torch.autograd.grad(ys[0], timed.wanted, timed.dy))


def warm_up(make, device, row):
    """The Pass of a contender, which has run; its peak goes to the row."""
    timed = make()
    forward_backward(timed, device)  # the first call may build, load or tune
    row["peak_bytes_above_inputs"] = device.peak_above(lambda: forward_backward(timed, device))
    forward(timed, device)
    return timed


def one_round(timed, device):
    """The seconds of PASSES."""
    alone = forward(timed, device)
    with_states, backward = forward_backward(timed, device)
    return *alone, backward, with_states + backward


def attempt(f, device, row, *more):
    """f(device, *more), or None: then the row has a 'reason'. Raises ConfigError if the GPU is unusable after it."""
    try:
        return f(device, *more)
    except LeftOut as reason:
        row["reason"] = str(reason)
    except Exception as error:
        row["reason"] = in_one_line(error)
    device.free()  # outside `except`, whose traceback keeps the failed call's tensors alive
    if not device.alive():
        name = row["contender"]
        raise ConfigError(f"{name} made the GPU unusable ({row['reason']}): leave it out with --without='{name}'")
    return None


def time_contenders(contenders, device, rounds=10):
    """All contenders in turn, {name: function () -> Pass}: a row for each, either with times or with a 'reason'."""
    rows, ready, times = [], {}, {}
    for name, make in contenders.items():
        row = {"contender": name}
        rows.append(row)
        timed = attempt(functools.partial(warm_up, make), device, row, row)
        seconds = timed and attempt(functools.partial(one_round, timed), device, row)
        if seconds:
            ready[name] = timed
            times[name] = runs_for(seconds[-1], rounds) * [None]
    for round_ in range(rounds):
        for row in rows:
            name = row["contender"]
            if "reason" not in row and round_ < len(times[name]):
                times[name][round_] = attempt(functools.partial(one_round, ready[name]), device, row)
                if "reason" in row:
                    del ready[name]
    for row in rows:
        if "reason" not in row:
            for direction, seconds in zip(PASSES, zip(*times[row["contender"]], strict=True), strict=True):
                row[direction] = measure.spread(seconds)
    return rows


def runs_for(pass_seconds, rounds):
    """The number of rounds for a contender: all, or as many as fit in CONTENDER_SECONDS, but at least three."""
    return max(min(3, rounds), min(rounds, int(CONTENDER_SECONDS / max(pass_seconds, 1e-9))))


def time_shape(record, shape, device, rounds, without):
    """Time all CONTENDERS at one shape, for the record; returns the reason why it was left out, or None. without:
    {contender: why it is not timed}."""
    dtype = DTYPES[record["dtype"]]
    contenders = {}
    try:
        a = make_inputs(*shape, dtype, device=device.name)
        g = torch.Generator(device.name).manual_seed(2)
        dy = torch.randn(shape.B, shape.T, shape.D, generator=g, device=device.name).to(dtype)
        for name, f in CONTENDERS.items():
            if name not in without:
                contenders[name] = functools.partial(f, shape, a, dy, device)
        rows = time_contenders(contenders, device, rounds)
    except torch.OutOfMemoryError as error:
        return in_one_line(error)
    finally:
        device.free()
    moved = bytes_of_passes(shape, dtype.itemsize)
    for row in rows:
        if "reason" not in row and row["contender"] in SCANS:
            for direction in PASSES:
                share = moved[direction] / record["copy_bytes_per_second"] / row[direction]["median_seconds"]
                row[direction]["share_of_bandwidth"] = share
    rows += [{"contender": name, "reason": why} for name, why in without.items()]
    record["shapes"].append({"shape": {**shape._asdict(), "name": str(shape)}, "tokens": shape.B * shape.T,
                             "dtype": record["dtype"], "rows": rows})
    print_shape(record["shapes"][-1])
    return None


def bytes_of_passes(shape, itemsize):
    """Bytes that a scan moves in each of PASSES."""
    moved = measure.bytes_moved(*shape, itemsize)
    return moved | {"backward": moved["forward_backward"] - moved["forward"] - measure.chunk_state_bytes(*shape)}


def print_shape(entry):
    print(f"\n{entry['shape']['name']} {entry['dtype']}, milliseconds (share of the copy bandwidth)")
    for row in entry["rows"]:
        words = []
        for direction in () if "reason" in row else PASSES:
            words.append(f"{direction} {1e3 * row[direction]['median_seconds']:.3f}")
            if row["contender"] in SCANS:
                words[-1] += f" ({row[direction]['share_of_bandwidth']:.0%})"
        print(f"  {row['contender']:16}{row.get('reason') or ', '.join(words)}", flush=True)


def in_short(record):
    """Prints the number of right comparisons, and every contender's forward + backward at the first two shapes."""
    right = sum(row["right"] for row in record["correctness"])
    print(f"in short: {right} of {len(record['correctness'])} comparisons with the loop in float64 are right")
    for entry in record["shapes"][:2]:
        words = []
        for row in entry["rows"]:
            if "reason" not in row:
                words.append(f"{row['contender']} {1e3 * row['forward_backward']['median_seconds']:.2f} ms")
        print(f"in short: {entry['shape']['name']} forward + backward: {', '.join(words) or 'nothing timed'}")


# ----------------------------------------------------------------------------------------------------------------- main

def chosen_shapes(args):
    if args.B or args.T or args.D or args.N:
        T = args.T or 1024
        return [Shape(args.B or max(1, 65536 // T), T, args.D or 1536, args.N or 16)]
    return [Shape(8, 16, 128, 16), Shape(4, 64, 128, 16)] if args.dry_run else shapes()


def settle(args):
    """(file for the record, or None; {contender: why it is left out}). Raises ConfigError for what cannot be run."""
    out = args.out or (SAVED if args.save else None)
    if not args.dry_run and not torch.cuda.is_available():
        raise ConfigError("PyTorch sees no GPU (use --device=cpu, or --dry_run to try the code)")
    measure.check_out(out, dry_run=args.dry_run)
    return out, dict.fromkeys(args.without, "left out by --without")


def main(args):
    """Run for bench/scan.py --device=cuda; returns the exit status. Raises ConfigError if nothing can be measured."""
    began = time.perf_counter()
    out, without = settle(args)
    device = DryRun() if args.dry_run else Gpu()
    record = measure.new_record("scan_cuda", dry_run=args.dry_run, device=device.describe(), shapes=[], left_out=[],
                                dtype=args.dtype or "bfloat16", with_D_z_dt_bias=True)
    print(f"{measure.headline(record, record['device']['name'])}\nkernels against the loop in float64:", flush=True)
    record["correctness"], record["wrong"] = check(device, args.dry_run, args.budget_s / 3)
    measure.write_record(out, record)
    without |= record["wrong"]
    if not args.dry_run and "mamba_ssm" not in without:
        record["mamba_ssm"], reason = check_mamba_ssm()
        print(f"mamba_ssm: {reason or record['mamba_ssm']}")
        if reason:
            without["mamba_ssm"] = reason
    record["copy_bytes_per_second"] = device.copy_bandwidth()
    print(f"copy bandwidth {record['copy_bytes_per_second'] / 1e9:,.0f} GB/s", flush=True)

    for shape in chosen_shapes(args):
        spent = time.perf_counter() - began
        if spent > args.budget_s:
            reason = f"{spent:.0f} of {args.budget_s:g} s are used up (--budget_s)"
        else:
            reason = time_shape(record, shape, device, args.rounds, without)
        if reason:
            record["left_out"].append({"shape": str(shape), "reason": reason})
            print(f"left out: {shape} ({reason})")
        record["seconds"] = time.perf_counter() - began
        measure.write_record(out, record)

    measure.write_record(out, record | {"finished": True})
    if out:
        print(f"record: {out}")
    in_short(record)
    for name, why in record["wrong"].items():
        print(f"bench/scan.py: {name} was not timed: {why}", file=sys.stderr)
    return int(bool(record["wrong"]) or not record["shapes"] or not ours_were_timed(record, without))


def ours_were_timed(record, without):
    """Whether our scan was timed at each shape, unless it was to be left out."""
    for entry in record["shapes"]:
        for row in entry["rows"]:
            if row["contender"] == "longhorn_scan" and row.get("reason") != without.get("longhorn_scan"):
                return False
    return True


def compare_mamba_ssm():
    """Compare mamba-ssm's kernels with the loop in float64 at two shapes. Raises ConfigError if they differ."""
    try:
        imported(*MAMBA_SSM)
    except LeftOut as reason:
        raise ConfigError(f"mamba-ssm: {reason}") from None
    if not torch.cuda.is_available():
        raise ConfigError("mamba-ssm's kernels need a GPU, and PyTorch sees none")
    gpu = Gpu(flush_bytes=0)
    for shape in [(2, 1024, 256, 16), (2, 4096, 256, 64)]:
        row = check_case("mamba_ssm", shape, "bfloat16", {}, gpu)
        print(describe_case(row))
        if not row["right"]:
            raise ConfigError(describe_case(row))
    print(f"in short: mamba_ssm {sys.modules['mamba_ssm'].__version__}, agrees with the loop in float64 at 2 shapes")


if __name__ == "__main__":
    with main_error("bench/scan_cuda.py", OSError):
        compare_mamba_ssm()
