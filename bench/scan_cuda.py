"""The scan on a GPU, beside what does the same job or takes its place: what `bench/scan.py --device=cuda` runs.

    python bench/scan.py --device=cuda --save                    # the paper's 24 shapes, results/scan_cuda.json and .png
    python bench/scan.py --device=cuda --preset=quick            # four of them
    python bench/scan.py --device=cuda --T=2048 --D=1024 --N=32  # one of your own

In this order: the kernels against the loop in float64, at modest shapes and at keys of 1000 and logits of +-1000; the
device's copy bandwidth; then, shape by shape, every contender warmed up, all in turn, round after round, between CUDA
events: forward without autograd, then forward and backward with it, the second laps apart.

Two floors, of Longhorn's job, for every scan of a shape:
    memory    bytes by count (measure.work: inputs and outputs once, a state every 32 steps) / measured copy bandwidth
    issue     instructions a (token, channel) x tokens x channels / 32 lanes / (multiprocessors x 4 schedulers x top clock)
The instructions are those of INSTRUCTIONS below. GLA and attention do another job: their own bytes, no issue floor.

The surprise: before every timed pass gigabytes are written. That empties the cache, and it keeps the device busy for so
long that the host has queued the whole pass before the clock starts: else a short kernel is timed with Python's overhead.
"""

import datetime
import gc
import hashlib
import importlib
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

import records  # noqa: E402
from bench.measure import (  # noqa: E402
    DTYPES,
    EPS,
    as_mamba,
    compare,
    finite,
    in_one_line,
    make_inputs,
    refuse_uncommitted,
    spread,
    values_and_gradients,
    work,
)
from kernels.scan import longhorn_scan, longhorn_scan_ref, selective_scan, selective_scan_ref  # noqa: E402

SAVED = ROOT / "results" / "scan_cuda.json"
PASSES = ("forward", "backward", "forward_backward")
# By the disassembly of a probe for sm_90, one lane a channel, N = 16, x, dt, z and y in bfloat16: about 100 instructions
# forward, of which 4 a state multiply or add. The backward recomputes (8 a state), walks back (8) and sums over channels (4):
# 4 times as many, which is what tools/instructions.py finds unavoidable too.
INSTRUCTIONS = {"a state": 4, "a step": 36, "backward": 4}
SLOW_SECONDS = 10.0  # a contender whose pass takes longer is left out of what follows
CONTENDER_SECONDS = 2.0  # of timed passes a shape, beyond the first three rounds


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


def shapes(preset, tokens=(65536, 524288), lengths=(1024, 4096, 32768), widths=(1536, 2048), states=(16, 64)):
    """The shapes of a preset, most telling first: the paper's width and state, then more tokens, more states, more width."""
    all_ = [Shape(n // T, T, D, N) for D in widths for N in states for n in tokens for T in lengths]
    return all_ if preset == "paper" else all_[:len(lengths) + 1]


# -------------------------------------------------------------------------------------------------- bytes and the floors

def counted_bytes(contender, shape, itemsize):
    """Bytes that a pass of the contender must move, by pass."""
    wide = shape.tokens * shape.D * itemsize
    if contender == "attention":  # q, k, v in, y out; q, k, v, y, dy in, dq, dk, dv out
        forward, backward = 4 * wide, 8 * wide
    elif contender == "fla_chunk_gla":  # q, k, g of H heads of N, v and y of D; the same and dy in, their gradients out
        narrow = shape.tokens * gla_heads(shape) * shape.N * itemsize
        forward, backward = 3 * narrow + 2 * wide, 6 * narrow + 3 * wide
    else:
        w = work(*shape, itemsize, True)
        forward, both = w["forward"]["bytes"], w["forward_backward"]["bytes"]
        chunks = work_chunks(shape)
        return {"forward": forward, "backward": both - forward - chunks, "forward_backward": both}
    return {"forward": forward, "backward": backward, "forward_backward": forward + backward}


def work_chunks(shape):
    """Bytes of the states that the forward keeps, float32."""
    from kernels import build

    return 4 * shape.B * math.ceil(shape.T / build.CHUNK) * shape.D * shape.N


def instructions(N, forward=None, backward=None):
    """Instructions a (token, channel) by pass: the table's, or those given."""
    forward = forward or INSTRUCTIONS["a state"] * N + INSTRUCTIONS["a step"]
    backward = backward or INSTRUCTIONS["backward"] * forward
    return {"forward": forward, "backward": backward, "forward_backward": forward + backward}


def floors(shape, itemsize, bandwidth, issue_rate, forward=None, backward=None):
    """Seconds that a scan of the shape needs at least, by pass: {'memory', 'issue'}, None where the rate is unknown.

    bandwidth in bytes a second, issue_rate in warp instructions a second.
    """
    moved, issued = counted_bytes("longhorn_scan", shape, itemsize), instructions(shape.N, forward, backward)
    lanes = shape.tokens * shape.D / 32
    return {p: {"memory": moved[p] / bandwidth if bandwidth else None,
                "issue": issued[p] * lanes / issue_rate if issue_rate else None} for p in PASSES}


# --------------------------------------------------------------------------------------------------------------- device

class Gpu:
    """The clock, the memory counter and the measured rates of a GPU."""

    name, backend = "cuda", "cuda"

    def __init__(self):
        self.properties = torch.cuda.get_device_properties(0)
        size = min(4 << 30, self.properties.total_memory // 16)
        self.flushed = torch.empty(size, dtype=torch.uint8, device="cuda")

    def laps(self, *steps):
        """Seconds of each step, on the device, one after the other from an empty cache."""
        self.flushed.zero_()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
        events[0].record()
        for step, event in zip(steps, events[1:], strict=True):
            step()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:], strict=False)]

    def copy_bandwidth(self):
        """Bytes read and written a second by the median of 20 large copies."""
        source = torch.randint(0, 256, self.flushed.shape, dtype=torch.uint8, device="cuda")
        seconds = [self.laps(lambda: self.flushed.copy_(source))[0] for _ in range(23)][3:]
        return 2 * source.numel() / spread(seconds)["median_seconds"]

    def peak_above(self, step):
        """Bytes allocated at the most during the step, above what was before it."""
        self.free()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def free(self):
        gc.collect()
        try:
            torch.cuda.empty_cache()
        except RuntimeError:  # the context is lost: `alive` will tell
            pass

    def alive(self):
        """False after an error that makes every later call of this process fail, such as a write out of bounds."""
        try:
            torch.cuda.synchronize()
            return torch.zeros(1, device="cuda").item() == 0
        except RuntimeError:
            return False

    def state(self):
        """Clocks, temperature and power now."""
        return nvidia_smi("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")

    def describe(self):
        p, smi = self.properties, nvidia_smi("name", "driver_version", "clocks.max.sm", "memory.total", "power.limit")
        clock = (smi or {}).get("clocks.max.sm") or getattr(p, "clock_rate", 0) / 1e3  # MHz
        return {"name": p.name, "capability": f"{p.major}.{p.minor}", "multiprocessors": p.multi_processor_count,
                "memory_bytes": p.total_memory, "l2_bytes": getattr(p, "L2_cache_size", None), "top_sm_clock_mhz": clock or None,
                "nvidia_smi": smi, "torch": torch.__version__, "cuda": torch.version.cuda,
                "warp_instructions_per_second": p.multi_processor_count * 4 * clock * 1e6 if clock else None}


class DryRun(Gpu):
    """Stands in for a GPU where there is none: its numbers mean nothing, and no record of them goes to results/."""

    name, backend = "cpu", "cpu"

    def __init__(self):
        self.flushed = torch.empty(1 << 20, dtype=torch.uint8)

    def laps(self, *steps):
        times = [time.perf_counter()]
        for step in steps:
            step()
            times.append(time.perf_counter())
        return [b - a for a, b in zip(times, times[1:], strict=False)]

    def copy_bandwidth(self):
        source = torch.zeros_like(self.flushed)
        return 2 * source.numel() / self.laps(lambda: self.flushed.copy_(source))[0]

    def peak_above(self, step):
        step()

    def free(self):
        gc.collect()

    def alive(self):
        return True

    def state(self):
        return None

    def describe(self):
        return {"name": "dry run on a CPU", "torch": torch.__version__, "warp_instructions_per_second": 1e9}


def nvidia_smi(*fields):
    """{field: number or text} of the first GPU, or None where nvidia-smi does not answer."""
    try:
        run = subprocess.run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"],
                             capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if run.returncode or not run.stdout.strip():
        return None
    found = {}
    for field, text in zip(fields, run.stdout.splitlines()[0].split(","), strict=False):
        try:
            found[field] = text.strip() if field in ("name", "driver_version") else float(text)
        except ValueError:
            found[field] = text.strip()
    return {f: v for f, v in found.items() if not str(v).startswith("[")}  # [N/A]


def sources():
    """What the kernels were built from, by the first digits of their sha256: a copy without .git has no commit."""
    return {name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest()[:16]
            for name in ("longhorn_scan.cu", "lanes.h", "scan.py", "kernels/build.py", "kernels/cuda.py") if (ROOT / name).exists()}


# ----------------------------------------------------------------------------------------------------------- contenders

class LeftOut(Exception):
    """Why a contender does not run at a shape."""


class Pass(NamedTuple):
    call: object      # () -> y
    wanted: list      # the tensors whose gradients the backward computes
    dy: torch.Tensor


def imported(module, name):
    """A function of an optional package; LeftOut says what is missing."""
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name == module.split(".")[0]:
            raise LeftOut("not installed") from None
        raise LeftOut(in_one_line(error)) from None
    except Exception as error:  # an extension built for another PyTorch, say
        raise LeftOut(in_one_line(error)) from None


def leaves(a):
    return {n: v.detach().requires_grad_() for n, v in a.items()}


def our_longhorn(shape, a, dy, device, backend=None):
    a = leaves(a)
    return Pass(lambda: longhorn_scan(**a, backend=backend or device.backend), list(a.values()), dy)


def our_mamba(shape, a, dy, device):
    a = leaves(as_mamba(a))
    return Pass(lambda: selective_scan(**a, delta_softplus=True, backend=device.backend), list(a.values()), dy)


def mamba_ssm(shape, a, dy, device):
    """In its own layout, (B, D, T) with time contiguous: the transposition is not timed."""
    f = imported("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn")
    own = lambda v: v.transpose(1, 2).contiguous() if v.dim() == 3 else v
    a = leaves({n: own(v) for n, v in as_mamba(a).items()})
    return Pass(lambda: f(**a, delta_softplus=True), list(a.values()), own(dy))


def torch_loop(shape, a, dy, device):
    if shape.T > 1024 or shape.tokens * shape.D * shape.N > 65536 * 1536 * 16:
        raise LeftOut("timed only up to T = 1024, 64K tokens, D = 1536 and N = 16")
    return our_longhorn(shape, a, dy, device, "torch")


def gla_heads(shape, V=128):
    return max(1, shape.D // V)


def fla_chunk_gla(shape, a, dy, device):
    """H heads with keys of N and values of 128 channels: a state of H N 128 = D N, and D channels out."""
    f, H = imported("fla.ops.gla", "chunk_gla"), gla_heads(shape)
    if shape.D % H:
        raise LeftOut(f"D {shape.D} is not a whole number of heads of 128")
    g = torch.Generator(device.name).manual_seed(3)
    q, k, gate = (torch.randn(shape.B, shape.T, H, shape.N, generator=g, device=device.name) for _ in range(3))
    values = dict(q=q, k=k, v=a["x"].view(shape.B, shape.T, H, -1), g=F.logsigmoid(gate) / 16)  # its layer's gate
    values = leaves({n: v.to(a["x"].dtype) for n, v in values.items()})
    return Pass(lambda: f(**values)[0], list(values.values()), dy.view_as(values["v"]))


def attention(shape, a, dy, device):
    """Causal, flash, D channels in heads of 64; x, dt and z serve as q, k and v."""
    if shape.D % 64:
        raise LeftOut(f"D {shape.D} is not a whole number of heads of 64")
    heads = lambda v: v.view(shape.B, shape.T, shape.D // 64, 64).transpose(1, 2)  # (B, H, T, 64)
    q, k, v = (heads(a[n]).detach().requires_grad_() for n in ("x", "dt", "z"))

    def call():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return Pass(call, [q, k, v], heads(dy))


CONTENDERS = {"longhorn_scan": our_longhorn, "selective_scan": our_mamba, "mamba_ssm": mamba_ssm,
              "longhorn_scan torch": torch_loop, "fla_chunk_gla": fla_chunk_gla, "attention": attention}
OURS = {"longhorn_scan": "longhorn", "selective_scan": "mamba"}
NOTES = {"mamba_ssm": "selective_scan_fn in its own layout (B, D, T); the transposition is not timed",
         "fla_chunk_gla": "D / 128 heads, keys of N, values of 128: as many numbers of state",
         "attention": "scaled_dot_product_attention, causal, flash, heads of 64; x, dt, z as q, k, v"}


# ---------------------------------------------------------------------------------------------------------- correctness

def cases(tiny=False):
    """What the kernels must get right before they are timed: sizes that divide by nothing, and extreme values."""
    size = (2, 40, 24) if tiny else (2, 257, 200)
    small = (1, 33, 24) if tiny else (1, 100, 72)
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    return [(dict(zip("BTDN", (*size, N), strict=True), dtype=dtype), 64 * EPS)
            for N, dtype in ((16, bf16), (16, f32), (16, f16), (64, bf16), (64, f32))] + \
           [(dict(zip("BTDN", (*small, 16), strict=True), dtype=dtype, **extreme), 2e-5)
            for dtype in (f32, bf16) for extreme in (dict(key=1000.0), dict(logit=1000.0), dict(key=1000.0, logit=1000.0))]


def scans(family, backend):
    """(the kernels, the loop) of longhorn, exact (its full transition) or mamba, both f(**a) -> (y, hT)."""
    if family != "mamba":
        state = dict(exact=family == "exact", return_state=True)
        return lambda **a: longhorn_scan(**a, **state, backend=backend), lambda **a: longhorn_scan_ref(**a, **state)
    state = dict(delta_softplus=True, return_last_state=True)
    return (lambda **a: selective_scan(**a, **state, backend=backend), lambda **a: selective_scan_ref(**a, **state))


def check_case(family, case, slack, device):
    """One comparison, as a record: errors and tolerances of y, hT and every gradient; {'reason'} if it did not run."""
    row = {"family": family, **case, "dtype": str(case["dtype"]).removeprefix("torch.")}
    try:
        a = make_inputs(**case, device=device.name)
        a = as_mamba(a) if family == "mamba" else a
        kernels, loop = scans(family, device.backend)
        found = compare(values_and_gradients(kernels, a), values_and_gradients(loop, a, torch.float64), slack)
    except Exception as error:
        return {**row, "right": False, "reason": in_one_line(error)}
    return {**row, "right": all(r["right"] for r in found.values()), "results": found}


def check(device, tiny=False, say=print):
    """All cases; the records, and {contender: why it is not to be trusted}."""
    rows, wrong = [], {}
    for contender, family in OURS.items():
        for case, slack in cases(tiny):
            if family == "mamba" and ("key" in case or "logit" in case):
                continue
            row = check_case(family, case, slack, device)
            rows.append(row)
            say(f"  {contender:16} {describe_case(row)}", flush=True)
            if not row["right"]:
                wrong.setdefault(contender, f"wrong or failed: {describe_case(row)}")
            if not device.alive():
                return rows, dict.fromkeys(OURS, f"the GPU's context was lost by {contender}: {describe_case(row)}")
    return rows, wrong


def describe_case(row):
    case = " ".join(f"{n}={row[n]}" for n in ("B", "T", "D", "N")) + f" {row['dtype']}"
    case += "".join(f" |{n}|={row[n]:g}" for n in ("key", "logit") if n in row)
    if "results" not in row:
        return f"{case}: {row['reason']}"
    bad = [n for n, r in row["results"].items() if not r["right"]] or row["results"]
    name = max(bad, key=lambda n: (math.isnan(row["results"][n]["relative_error"]), row["results"][n]["relative_error"]))
    r = row["results"][name]
    return f"{case}: {'ok' if row['right'] else 'WRONG'}, worst {name} {r['relative_error']:.1e} (at most {r['tolerance']:.1e})"


# ----------------------------------------------------------------------------------------------------------------- time

def fits(budget, spent, expected):
    """Whether work of `expected` seconds, begun after `spent`, ends within the budget."""
    return spent + expected <= budget


def runs_for(pass_seconds, rounds):
    """Rounds that a contender takes part in: all of them, or as many as CONTENDER_SECONDS allow, at least three."""
    return max(min(3, rounds), min(rounds, int(CONTENDER_SECONDS / max(pass_seconds, 1e-9))))


def measure_shape(shape, dtype, device, rates, rounds=10, without=None, contenders=None, given=(None, None)):
    """All contenders at one shape, interleaved: a list of rows, one a contender, each with times or with a reason."""
    contenders, without = contenders or CONTENDERS, without or {}
    a = make_inputs(*shape, dtype, device=device.name)
    g = torch.Generator(device.name).manual_seed(2)
    dy = torch.randn(shape.B, shape.T, shape.D, generator=g, device=device.name).to(dtype)
    ready, runs, rows, times = {}, {}, {}, {}

    def steps(p):
        kept = []
        return lambda: kept.append(p.call()), lambda: torch.autograd.grad(kept[0], p.wanted, p.dy)

    def without_autograd(p):
        with torch.no_grad():
            p.call()

    def both(p):
        for step in steps(p):
            step()

    def warm_up(name, build):
        if name in without:
            raise LeftOut(without[name])
        p = build(shape, a, dy, device)
        both(p)  # whatever the first call builds, loads or tunes
        rows[name] = {"peak_bytes_above_inputs": device.peak_above(lambda: both(p))}
        without_autograd(p)
        runs[name] = runs_for(sum(device.laps(*steps(p))), rounds)
        ready[name], times[name] = p, {what: [] for what in PASSES}

    def one_round(name):
        forward, = device.laps(lambda: without_autograd(ready[name]))
        with_states, backward = device.laps(*steps(ready[name]))
        for what, seconds in zip(PASSES, (forward, backward, with_states + backward), strict=True):
            times[name][what].append(seconds)

    def attempt(name, f, *args):
        try:
            f(name, *args)
            return
        except LeftOut as reason:
            words = str(reason)
        except Exception as error:
            words = in_one_line(error)
        ready.pop(name, None)  # outside of `except`, whose traceback keeps the tensors of the failed call alive
        rows[name] = {"contender": name, "reason": words}
        device.free()
        if not device.alive():
            raise Lost(name, list(rows.values()))

    for name, build in contenders.items():
        attempt(name, warm_up, build)
    for round_ in range(rounds):
        for name in list(ready):
            if round_ < runs[name]:
                attempt(name, one_round)
    floor = floors(shape, dtype.itemsize, rates["bandwidth"], rates["issue"], *given)
    for name in ready:
        moved = counted_bytes(name, shape, dtype.itemsize)
        row = {"contender": name, **rows[name]}
        for what in PASSES:
            t = spread(times[name][what])
            s = t["median_seconds"]
            t["bytes_per_second"] = moved[what] / s
            t["memory_floor_share"] = moved[what] / rates["bandwidth"] / s if rates["bandwidth"] else None
            scan = name not in ("fla_chunk_gla", "attention")
            t["issue_floor_share"] = floor[what]["issue"] / s if scan and rates["issue"] else None
            row[what] = t
        row["tokens_per_second"] = shape.tokens / row["forward_backward"]["median_seconds"]
        rows[name] = row
    return [rows[name] for name in contenders], floor


class Lost(Exception):
    """A contender left the GPU's context unusable: nothing more can be measured in this process."""

    def __init__(self, contender, rows):
        super().__init__(f"after an error in {contender} this process can use the GPU no more; "
                         f"go on with --without={contender!r}")
        self.contender, self.rows = contender, rows


def print_shape(entry, say=print):
    ms = lambda s: "-" if s is None else f"{1e3 * s:.{3 if s < 0.01 else 1}f}"
    low = ", ".join(f"{p.replace('_', ' + ')} {ms(f['memory'])} / {ms(f['issue'])}" for p, f in entry["floor_seconds"].items())
    say(f"\n{entry['shape']['name']} {entry['dtype']} ({entry['tokens']:,} tokens); floors in ms, memory / issue: {low}")
    say(f"  {'':20}" + "".join(f"{p.replace('_', ' + ') + ' ms':>25}{'GB/s':>7}{'mem':>6}{'issue':>6}" for p in PASSES)
        + f"{'peak MiB':>10}{'Mtok/s':>8}")
    percent = lambda share: "-" if share is None else f"{share:.0%}"
    for row in entry["rows"]:
        line = f"  {row['contender'] + ('*' if row.get('wrong') else ''):20}"
        if "reason" in row:
            say(f"{line}{'-':>25}  {row['reason']}")
            continue
        for p in PASSES:
            t = row[p]
            a, b = t["quartile_seconds"]
            cell = f"{ms(t['median_seconds'])} ({ms(a)}..{ms(b)})"
            line += f"{cell:>25}{t['bytes_per_second'] / 1e9:7.0f}{percent(t['memory_floor_share']):>6}"
            line += f"{percent(t['issue_floor_share']):>6}"
        peak = row["peak_bytes_above_inputs"]
        say(line + f"{'-' if peak is None else f'{peak / 2**20:.0f}':>10}{row['tokens_per_second'] / 1e6:8.1f}")


def in_short(record):
    """The first two shapes in a line each: forward + backward of the scans and of attention, and where the forward stands."""
    for entry in record["shapes"][:2]:
        rows = {r["contender"]: r for r in entry["rows"] if "reason" not in r and not r.get("wrong")}
        times = {n: r["forward_backward"]["median_seconds"] for n, r in rows.items()}
        words = [f"{n} {1e3 * t:.2f} ms" for n, t in times.items() if n != "longhorn_scan torch"]
        if "longhorn_scan" in times and "mamba_ssm" in times:
            words.append(f"{times['mamba_ssm'] / times['longhorn_scan']:.2f} times as fast as mamba_ssm")
        if "longhorn_scan" in times:
            shares = [rows["longhorn_scan"]["forward"][f"{kind}_floor_share"] for kind in ("memory", "issue")]
            reached = " / ".join("-" if s is None else f"{s:.0%}" for s in shares)
            words.append(f"longhorn_scan's forward at {reached} of the memory / issue floor")
        yield f"{entry['shape']['name']} forward + backward: {', '.join(words) or 'nothing timed'}"


def draw(record, path):
    """Tokens a second of forward + backward by T: a row of axes for each (D, N), a column for each number of tokens.

    Returns the path, or why nothing was drawn.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return "no picture: matplotlib is not installed"
    entries = [e for e in record["shapes"] if any("reason" not in r for r in e["rows"])]
    if not entries:
        return "no picture: nothing was timed"
    widths = list(dict.fromkeys((e["shape"]["D"], e["shape"]["N"]) for e in entries))
    tokens = sorted({e["tokens"] for e in entries})
    figure, grid = plt.subplots(len(widths), len(tokens), figsize=(5.2 * len(tokens), 3.6 * len(widths)), dpi=130, squeeze=False)
    colours = {name: f"C{i}" for i, name in enumerate(CONTENDERS)}
    for i, (D, N) in enumerate(widths):
        for j, n in enumerate(tokens):
            axes, lines = grid[i][j], {}
            for e in entries:
                if (e["shape"]["D"], e["shape"]["N"], e["tokens"]) == (D, N, n):
                    for row in e["rows"]:
                        if "reason" not in row and not row.get("wrong"):
                            lines.setdefault(row["contender"], []).append((e["shape"]["T"], row["tokens_per_second"]))
            for name, points in lines.items():
                axes.plot(*zip(*sorted(points), strict=True), "o-", label=name, color=colours.get(name), ms=4)
            axes.set(xscale="log", yscale="log", xlabel="T", title=f"D = {D}, N = {N}, {n:,} tokens a pass",
                     ylabel="tokens/s, forward + backward")
            axes.grid(alpha=0.3, which="both")
            if lines:
                axes.set_xticks(sorted({t for points in lines.values() for t, _ in points}))
                axes.get_xaxis().set_major_formatter(matplotlib.ticker.ScalarFormatter())
                axes.minorticks_off()
                axes.legend(fontsize=8)
    where = f"{record['device']['name']}, {record['dtype']}, torch {record['device']['torch']}, {record['date'][:10]}"
    figure.suptitle(("DRY RUN, NOT A MEASUREMENT: " if record["dry_run"] else "") + where)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return path


# ----------------------------------------------------------------------------------------------------------------- main

def chosen_shapes(args):
    given = [args.B, args.T, args.D, args.N]
    if any(given):
        T = args.T or 1024
        return [Shape(args.B or max(1, 65536 // T), T, args.D or 1536, args.N or 16)]
    if args.dry_run:
        return shapes(args.preset, tokens=(128, 256), lengths=(16, 64), widths=(128,), states=(16,))
    return shapes(args.preset)


def main(args):
    """Runs what bench/scan.py --device=cuda was asked for; returns the exit status."""
    began = time.perf_counter()
    out = Path(args.out) if args.out else SAVED if args.save else None
    unknown = [name for name in filter(None, args.without.split(",")) if name not in CONTENDERS]
    if unknown:
        return refuse(f"--without={unknown[0]}: no such contender; they are {', '.join(CONTENDERS)}")
    if args.dry_run and out is not None and SAVED.parent in out.resolve().parents:
        return refuse(f"--dry_run measures nothing, so its record does not belong in {SAVED.parent.name}/: choose another --out")
    if not args.dry_run and not torch.cuda.is_available():
        return refuse("PyTorch sees no GPU (use --device=cpu, or --dry_run to try the code)")
    if not args.out:  # bench/gpu.py, which gives one, has asked before its first stage: what it measures is not lost half way
        refuse_uncommitted(out)
    try:
        device = DryRun() if args.dry_run else Gpu()
        about = device.describe()
    except RuntimeError as error:
        return refuse(f"the GPU does not answer: {in_one_line(error)}")
    dtype = DTYPES[args.dtype or "bfloat16"]
    record = {"benchmark": "scan_cuda", "dry_run": args.dry_run, "finished": False,
              "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
              "environment": records.environment(), "sources": sources(), "device": about,
              "dtype": str(dtype).removeprefix("torch."), "with_D_z_dt_bias": True, "notes": NOTES,
              "instructions": {"table": INSTRUCTIONS, "forward": args.instructions_forward,
                               "backward": args.instructions_backward},
              "correctness": [], "wrong": {}, "shapes": [], "left_out": []}

    def save(final=False):
        record["seconds"], record["finished"] = time.perf_counter() - began, final
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            records.write_json(out, finite(record))

    driver = (about.get("nvidia_smi") or {}).get("driver_version", "unknown")
    print(f"{about['name']}, driver {driver}, torch {torch.__version__}, commit "
          f"{(record['environment']['commit'] or 'none')[:10]}\nkernels against the loop in float64:", flush=True)
    record["correctness"], record["wrong"] = check(device, tiny=args.dry_run)
    save()
    if not device.alive():
        print(f"bench/scan.py: {next(iter(record['wrong'].values()))}; nothing was timed", file=sys.stderr)
        return 1
    record["copy_bytes_per_second"] = bandwidth = device.copy_bandwidth()
    device.free()
    rates = {"bandwidth": bandwidth, "issue": about["warp_instructions_per_second"]}
    issue = f"{rates['issue'] / 1e12:.2f}e12 warp instructions/s" if rates["issue"] else "issue rate unknown"
    print(f"copy bandwidth {bandwidth / 1e9:,.0f} GB/s, {issue} at the top clock", flush=True)
    without = dict.fromkeys(filter(None, args.without.split(",")), "left out by --without")
    if not args.even_if_wrong:
        without |= record["wrong"]
    lost, longest, size = None, 0.0, 1
    gc.collect()
    gc.freeze()  # what is imported is not looked through again whenever memory is given back: a tenth of a second each time
    for shape in chosen_shapes(args):
        start = time.perf_counter()
        expected = longest * max(1.0, shape.tokens * shape.D * shape.N / size)
        entry = {"shape": {**shape._asdict(), "name": str(shape)}, "tokens": shape.tokens, "dtype": record["dtype"]}
        if lost or not fits(args.budget_s, start - began, expected):
            spent = f"budget of {args.budget_s:g} s: {start - began:.0f} s spent, about {expected:.0f} s needed"
            reason = str(lost) if lost else spent
            record["left_out"].append({"shape": str(shape), "reason": reason})
            continue
        entry["gpu_before"] = device.state()
        try:
            entry["rows"], entry["floor_seconds"] = measure_shape(
                shape, dtype, device, rates, args.rounds, without, given=(args.instructions_forward, args.instructions_backward))
        except Lost as error:
            lost, entry["rows"], entry["floor_seconds"] = error, [r for r in error.rows if "reason" in r], {}
        except Exception as error:  # the inputs do not fit, say
            entry["failed"] = in_one_line(error)
        if "failed" in entry:
            record["left_out"].append({"shape": str(shape), "reason": entry["failed"]})
            device.free()
            continue
        entry["gpu_after"], entry["seconds"] = device.state(), time.perf_counter() - start
        looped = any(row["contender"] == "longhorn_scan torch" and "reason" not in row for row in entry["rows"])  # the first only
        if entry["seconds"] > longest and not looped:
            longest, size = entry["seconds"], shape.tokens * shape.D * shape.N
        for row in entry["rows"]:
            if row["contender"] in record["wrong"]:
                row["wrong"] = True
            if "reason" not in row and row["forward_backward"]["median_seconds"] > SLOW_SECONDS:
                without[row["contender"]] = f"took {row['forward_backward']['median_seconds']:.0f} s a pass at {shape}"
        record["shapes"].append(entry)
        print_shape(entry)
        sys.stdout.flush()
        save()
        device.free()
    gc.unfreeze()
    for skipped in record["left_out"]:
        print(f"left out: {skipped['shape']} ({skipped['reason']})")
    save(final=lost is None)
    if out is not None:
        try:
            drawn = draw(record, out.with_suffix(".png"))
        except Exception as error:
            drawn = f"no picture: {in_one_line(error)}"
        print(f"record: {out}; {drawn if str(drawn).startswith('no ') else f'picture: {drawn}'}")
    for line in in_short(record):
        print(f"in short: {line}")
    for name, why in record["wrong"].items():
        print(f"bench/scan.py: {name} is {why}; {'timed all the same, marked *' if args.even_if_wrong else 'not timed'}",
              file=sys.stderr)
    ours_failed = [r["reason"] for e in record["shapes"] for r in e["rows"]
                   if r["contender"] == "longhorn_scan" and "reason" in r and "--without" not in r["reason"]]
    return int(bool(record["wrong"] or lost or ours_failed or not record["shapes"]))


def refuse(why):
    print(f"bench/scan.py: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit("python bench/scan.py --device=cuda runs this")
