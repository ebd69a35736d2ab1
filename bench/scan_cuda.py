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

    @property
    def tokens(self):
        return self.B * self.T

    def __str__(self):
        return f"B={self.B} T={self.T} D={self.D} N={self.N}"


def shapes(tokens=(65536, 524288), lengths=(1024, 4096, 32768), widths=(1536, 2048), states=(16, 64)):
    """All shapes, most important first: the paper's width and state, then more tokens, more states, more width."""
    return [Shape(n // T, T, D, N) for D in widths for N in states for n in tokens for T in lengths]


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
    f, H = imported("fla.ops.gla", "chunk_gla"), max(1, shape.D // 128)
    if shape.D % H:
        raise LeftOut(f"D {shape.D} is not a whole number of heads of 128")
    g = torch.Generator(device.name).manual_seed(3)
    q, k, gate = (torch.randn(shape.B, shape.T, H, shape.N, generator=g, device=device.name) for _ in range(3))
    values = dict(q=q, k=k, v=a["x"].view(shape.B, shape.T, H, -1), g=F.logsigmoid(gate) / 16)  # its layer's gate
    values = leaves({n: v.to(a["x"].dtype) for n, v in values.items()})
    return Pass(lambda: f(**values)[0], list(values.values()), dy.view_as(values["v"]))


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


SCANS = {"longhorn_scan": our_longhorn, "selective_scan": our_mamba, "mamba_ssm": mamba_ssm}
CONTENDERS = SCANS | {"fla_chunk_gla": fla_chunk_gla, "attention": attention}


# ---------------------------------------------------------------------------------------------------------- correctness

MAMBA_SSM = "mamba_ssm.ops.selective_scan_interface", "selective_scan_fn"
KERNELS_OF = {"longhorn": "longhorn_scan", "exact": "longhorn_scan", "mamba": "selective_scan"}
PAPER = (64, 1024, 1536, 16)


def cases(tiny=False):
    """[(family, (B, T, D, N), dtype, extremes)]: sizes that are not multiples of a block or chunk, extreme values, and
    the paper's shapes; the last one has few rows, so that T is split into segments."""
    extremes = (dict(key=1000.0), dict(logit=1000.0), dict(key=1000.0, logit=1000.0))
    B, T, D = (2, 40, 24) if tiny else (2, 257, 200)
    some = [(family, (B, T, D, N), dtype, {}) for family in ("longhorn", "mamba") for N, dtype in (
        (16, "bfloat16"), (16, "float32"), (16, "float16"), (64, "bfloat16"), (64, "float32"))]
    some += [("longhorn", (1, T, 72, 16), dtype, extreme) for dtype in ("float32", "bfloat16") for extreme in extremes]
    return some if tiny else some + [
        ("longhorn", PAPER, "bfloat16", {}), ("longhorn", PAPER, "float32", {}), ("mamba", PAPER, "bfloat16", {}),
        ("longhorn", PAPER, "bfloat16", extremes[2]), ("longhorn", PAPER, "float32", extremes[0]),
        ("longhorn", (16, 4096, 1536, 16), "bfloat16", {}), ("longhorn", (64, 1024, 1536, 64), "bfloat16", {}),
        ("exact", PAPER, "bfloat16", {}), ("mamba", PAPER, "float32", {}), ("longhorn", PAPER, "float32", extremes[1]),
        ("longhorn", (2, 4096, 1536, 16), "bfloat16", {})]


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
        a = as_mamba(a) if family.startswith("mamba") else a
        got, again = (measure.values_and_gradients(scans(family, device.backend), a) for _ in range(2))
        same = all(torch.equal(again.pop(n), v) for n, v in got.items())
        # the torch backend recomputes pieces in its backward, so that float64 fits in memory
        true = measure.values_and_gradients(scans(family, "torch"), a, torch.float64)
        same = None if family == "mamba_ssm" else same  # atomic sums, whose order changes from run to run
        comparisons = measure.compare(got, true, slack(family, shape[1], extreme))
    except Exception as error:
        return {**row, "right": False, "reason": in_one_line(error)}
    right = same is not False and all(r["right"] for r in comparisons.values())
    return {**row, "right": right, "two_runs_agree": same, "results": comparisons}


def slack(family, T, extreme):
    """The relative error that a result in float32 may have after T steps."""
    if family == "mamba_ssm":  # fast math
        return 1e-3
    # an error of 2 ulp in a decay near 1 counts T times: Mamba's, whose exponential the hardware approximates
    return 2e-5 if extreme else 64 * EPS + 2 * T * EPS * (family == "mamba")


def check(device, tiny=False, budget_s=math.inf):
    """Run and print all cases that fit in budget_s seconds; returns (records, {contender: why it is not timed})."""
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
            return rows, dict.fromkeys(KERNELS_OF.values(), f"the GPU is unusable after {describe_case(row)}")
    return rows, wrong


def describe_case(row):
    case = " ".join(f"{n}={row[n]}" for n in "BTDN") + f" {row['dtype']}"
    case += "".join(f" |{n}|={row[n]:g}" for n in ("key", "logit") if n in row)
    if "results" not in row:
        return f"{case}: {row['reason']}"
    errors = {n: r["relative_error"] for n, r in row["results"].items() if not r["right"] or row["right"]}
    if not errors:
        return f"{case}: WRONG, two runs differ"
    name = max(errors, key=lambda n: (math.isnan(errors[n]), errors[n]))
    most = row["results"][name]["tolerance"]
    return f"{case}: {'ok' if row['right'] else 'WRONG'}, largest error {name} {errors[name]:.1e} (at most {most:.1e})"


# ----------------------------------------------------------------------------------------------------------------- time

class Lost(Exception):
    """A contender made the GPU's context unusable: nothing more can be measured in this process."""


def runs_for(pass_seconds, rounds):
    """The number of rounds for a contender: all, or as many as fit in CONTENDER_SECONDS, but at least three."""
    return max(min(3, rounds), min(rounds, int(CONTENDER_SECONDS / max(pass_seconds, 1e-9))))


def time_contenders(contenders, device, rounds=10, without=None):
    """Time every contender's passes in turn: a list with one row per contender, either times or a 'reason'.

    contenders: {name: function () -> Pass, which may raise LeftOut}; without: {contender: why it is left out}. Raises
    Lost, naming the contender.
    """
    ready, rows, runs, without = {}, {name: {"contender": name} for name in contenders}, {}, without or {}

    def with_autograd(p):
        ys = []
        return device.laps(lambda: ys.append(p.call()), lambda: torch.autograd.grad(ys[0], p.wanted, p.dy))

    @torch.no_grad()
    def without_autograd(p):
        return device.laps(p.call)

    def warm_up(name):
        if name in without:
            raise LeftOut(without[name])
        p = contenders[name]()
        with_autograd(p)  # the first call may build, load or tune
        rows[name]["peak_bytes_above_inputs"] = device.peak_above(lambda: with_autograd(p))
        without_autograd(p)
        runs[name] = runs_for(sum(with_autograd(p)), rounds)
        ready[name] = p

    def one_round(name):
        if name in ready:
            (forward,) = without_autograd(ready[name])
            with_states, backward = with_autograd(ready[name])
            return forward, backward, with_states + backward

    def attempt(f, name):
        try:
            return f(name)
        except LeftOut as reason:
            words = str(reason)
        except Exception as error:
            words = in_one_line(error)
        ready.pop(name, None)  # outside `except`, whose traceback keeps the failed call's tensors alive
        rows[name] = {"contender": name, "reason": words}
        device.free()
        if not device.alive():
            raise Lost(f"{name} made the GPU unusable ({words}): continue with --without='{name}'")

    for name in contenders:
        attempt(warm_up, name)
    times = measure.in_turn({name: lambda name=name: attempt(one_round, name) for name in runs}, runs)
    for name in ready:
        rows[name] |= {direction: measure.spread(seconds) for direction, seconds in
                       zip(PASSES, zip(*times[name], strict=True), strict=True)}
    return list(rows.values())


def measure_shape(shape, dtype, device, bandwidth, rounds, without):
    """The rows of all CONTENDERS at one shape; bandwidth: bytes per second of a copy."""
    a = make_inputs(*shape, dtype, device=device.name)
    g = torch.Generator(device.name).manual_seed(2)
    dy = torch.randn(shape.B, shape.T, shape.D, generator=g, device=device.name).to(dtype)
    contenders = {name: functools.partial(f, shape, a, dy, device) for name, f in CONTENDERS.items()}
    rows = time_contenders(contenders, device, rounds, without)
    moved = bytes_of_passes(shape, dtype.itemsize)
    for row in rows:
        for direction in PASSES if "reason" not in row else ():
            share = moved[direction] / bandwidth / row[direction]["median_seconds"]
            row[direction]["share_of_bandwidth"] = share if row["contender"] in SCANS else None
    return rows


def bytes_of_passes(shape, itemsize):
    """Bytes that a scan moves in each of PASSES."""
    moved = measure.bytes_moved(*shape, itemsize)
    return moved | {"backward": moved["forward_backward"] - moved["forward"] - measure.chunk_state_bytes(*shape)}


def print_shape(entry):
    print(f"\n{entry['shape']['name']} {entry['dtype']} ({entry['tokens']:,} tokens); share: of the copy bandwidth")
    print(f"  {'':20}" + "".join(f"{p.replace('_', ' + ') + ' ms':>28}{'share':>7}" for p in PASSES)
          + f"{'peak MiB':>10}{'Mtok/s':>8}")
    for row in entry["rows"]:
        line = f"  {row['contender']:20}"
        if "reason" in row:
            print(f"{line}{'-':>28}  {row['reason']}")
            continue
        for t in (row[p] for p in PASSES):
            cell = f"{1e3 * t['median_seconds']:.3f} ({measure.quartiles(t, 3)})"
            share = t["share_of_bandwidth"]
            line += f"{cell:>28}{'-' if share is None else f'{share:.0%}':>7}"
        peak = row["peak_bytes_above_inputs"]
        rate = entry["tokens"] / row["forward_backward"]["median_seconds"]
        print(line + f"{'-' if peak is None else f'{peak / 2**20:.0f}':>10}{rate / 1e6:8.1f}")


def in_short(record):
    """Yields lines: the number of right comparisons, and every contender's forward + backward at the first two
    shapes."""
    rows = record["correctness"]
    yield f"{sum(r['right'] for r in rows)} of {len(rows)} comparisons with the loop in float64 are right"
    for entry in record["shapes"][:2]:
        rows = {r["contender"]: r for r in entry["rows"] if "reason" not in r}
        times = {n: r["forward_backward"]["median_seconds"] for n, r in rows.items()}
        words = [f"{n} {1e3 * t:.2f} ms" for n, t in times.items()]
        if "longhorn_scan" in times:
            share = rows["longhorn_scan"]["forward"]["share_of_bandwidth"]
            words.append(f"longhorn_scan's forward at {share:.0%} of the copy bandwidth")
        yield f"{entry['shape']['name']} forward + backward: {', '.join(words) or 'nothing timed'}"


# ----------------------------------------------------------------------------------------------------------------- main

def chosen_shapes(args):
    if any((args.B, args.T, args.D, args.N)):
        T = args.T or 1024
        return [Shape(args.B or max(1, 65536 // T), T, args.D or 1536, args.N or 16)]
    tiny = dict(tokens=(128, 256), lengths=(16, 64), widths=(128,), states=(16,))
    return shapes(**tiny) if args.dry_run else shapes()


def main(args):
    """Run for bench/scan.py --device=cuda; returns the exit status. Raises ConfigError if nothing can be measured."""
    began = time.perf_counter()
    out = Path(args.out) if args.out else SAVED if args.save else None
    without = dict.fromkeys(filter(None, args.without.split(",")), "left out by --without")
    unknown = [name for name in without if name not in CONTENDERS]
    if unknown:
        raise ConfigError(f"--without={unknown[0]}: no such contender; they are {', '.join(CONTENDERS)}")
    if args.dry_run and out is not None and SAVED.parent in out.resolve().parents:
        raise ConfigError("--dry_run measures nothing, so its record does not belong in results/: choose another --out")
    if not args.dry_run and not torch.cuda.is_available():
        raise ConfigError("PyTorch sees no GPU (use --device=cpu, or --dry_run to try the code)")
    if not args.out:  # bench/gpu.py passes --out and has checked it before its first stage
        measure.check_out(out)
    try:
        device = DryRun() if args.dry_run else Gpu()
        about = device.describe()
    except RuntimeError as error:
        raise ConfigError(f"the GPU does not answer: {in_one_line(error)}") from None
    dtype = DTYPES[args.dtype or "bfloat16"]
    record = measure.new_record("scan_cuda", dry_run=args.dry_run, device=about, shapes=[], left_out=[],
                                dtype=str(dtype).removeprefix("torch."), with_D_z_dt_bias=True)

    def save(finished=False):
        record["seconds"], record["finished"] = time.perf_counter() - began, finished
        if out is not None:
            measure.write_record(out, record)

    print(f"{measure.headline(record, about['name'])}\nkernels against the loop in float64:", flush=True)
    record["correctness"], record["wrong"] = check(device, args.dry_run, args.budget_s / 3)
    save()
    if not device.alive():
        raise ConfigError(next(iter(record["wrong"].values())))
    without |= record["wrong"]
    if not args.dry_run and "mamba_ssm" not in without:
        record["mamba_ssm"], reason = check_mamba_ssm()
        without |= {"mamba_ssm": reason} if reason else {}
        print(f"mamba_ssm: {reason or record['mamba_ssm']}")
    record["copy_bytes_per_second"] = bandwidth = device.copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e9:,.0f} GB/s", flush=True)
    lost = None
    for shape in chosen_shapes(args):
        spent = time.perf_counter() - began
        entry = {"shape": {**shape._asdict(), "name": str(shape)}, "tokens": shape.tokens, "dtype": record["dtype"]}
        if lost or spent > args.budget_s:
            reason = lost or f"{spent:.0f} of {args.budget_s:g} s are used up (--budget_s)"
            record["left_out"].append({"shape": str(shape), "reason": reason})
            continue
        try:
            entry["rows"] = measure_shape(shape, dtype, device, bandwidth, args.rounds, without)
        except Exception as error:  # for example, the inputs do not fit in memory
            lost = str(error) if isinstance(error, Lost) else None
            record["left_out"].append({"shape": str(shape), "reason": lost or in_one_line(error)})
        device.free()
        if "rows" in entry:
            record["shapes"].append(entry)
            print_shape(entry)
            sys.stdout.flush()
        save()
    for skipped in record["left_out"]:
        print(f"left out: {skipped['shape']} ({skipped['reason']})")
    save(finished=lost is None)
    if out is not None:
        print(f"record: {out}")
    for line in in_short(record):
        print(f"in short: {line}")
    for name, why in record["wrong"].items():
        print(f"bench/scan.py: {name} was not timed: {why}", file=sys.stderr)
    failed = [r for e in record["shapes"] for r in e["rows"]
              if r["contender"] == "longhorn_scan" and "reason" in r and "--without" not in r["reason"]]
    return int(bool(record["wrong"] or lost or failed or not record["shapes"]))


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
