"""Parts that the benchmarks share: inputs, comparison with a float64 loop, timing in turns, peak memory, records.

    relative error = |got - true| / (|true| + TINY)       2-norms; any NaN makes it NaN, which counts as wrong

TINY is needed because at logits of -1000 a true gradient can be smaller than float32 can represent.

Contenders take turns, round after round, so that other load on the machine affects all alike. `time_contenders` calls
operators in this process. A `Worker` is a process that holds a model.

On a GPU, gigabytes are written before every timed pass. This empties the cache and keeps the device busy until the host
has queued the whole pass. Otherwise the time of a short kernel would include Python's overhead.
"""

import contextlib
import ctypes
import datetime
import functools
import gc
import importlib
import io
import json
import math
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, NamedTuple

import torch

from common.errors import ConfigError
from configurator import Range
from kernels import build
from runtime import records
from runtime.records import code_version

ROOT = Path(__file__).resolve().parent.parent
EPS = torch.finfo(torch.float32).eps
TINY = 1e-15
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# OpenMP ends the process if it cannot have this many threads.
Threads = Annotated[int, Range(1, 16 * (os.cpu_count() or 1))]
PASSES = ("forward", "backward", "forward_backward")
CONTENDER_SECONDS = 2.0  # time limit of a contender's passes, after the first three rounds
START_S = 600  # time limit for building the kernels, and for torch.compile


# ---------------------------------------------------------------------------------------------------- inputs and errors

def make_inputs(B, T, D, N, dtype, device="cpu", key=1.0, logit=None):
    """Return random arguments of longhorn_scan by name: x, dt, z (B, T, D) and k, q (B, T, N) in `dtype`, and D,
    dt_bias (D,) in float32. key: a factor on k. logit: dt is +logit or -logit everywhere."""
    g = torch.Generator(device).manual_seed(0)
    shapes = dict(x=(B, T, D), dt=(B, T, D), k=(B, T, N), q=(B, T, N), D=(D,), z=(B, T, D), dt_bias=(D,))
    a = {name: torch.randn(*shape, generator=g, device=device) for name, shape in shapes.items()}
    a["k"] = a["k"] * key
    if logit is not None:
        a["dt"] = a["dt"].sign() * logit
    return {name: v.to(dtype) if v.dim() == 3 else v for name, v in a.items()}


def as_mamba(a):
    """The same tensors as arguments of selective_scan; A is -1, ..., -N in every channel, Mamba's initial values."""
    D, N = a["x"].shape[2], a["k"].shape[2]
    A = -torch.arange(1.0, N + 1, device=a["x"].device).repeat(D, 1)  # (D, N)
    return dict(u=a["x"], delta=a["dt"], A=A, B=a["k"], C=a["q"], D=a["D"], z=a["z"], delta_bias=a["dt_bias"])


def leaves(a):
    """The same tensors as leaves that require gradients."""
    return {n: v.detach().requires_grad_() for n, v in a.items()}


def values_and_gradients(f, a, dtype=None):
    """Return y, hT and the gradient of every argument by name, for a fixed random linear loss.

    dtype: compute in this dtype. f(**a) returns (y, hT); if hT is None, it is left out.
    """
    x = next(iter(a.values()))
    g = torch.Generator(x.device).manual_seed(1)
    args = leaves({name: v.to(dtype or v.dtype, copy=True) for name, v in a.items()})
    results = {name: v for name, v in zip(("y", "hT"), f(**args), strict=True) if v is not None}
    weights = []
    for name, v in results.items():
        weight = torch.randn(v.shape, generator=g, device=x.device)
        weight = weight.to(x.dtype) if name == "y" else weight  # the same numbers in every dtype
        weights.append(weight.to(v.dtype))
    gradients = torch.autograd.grad(list(results.values()), list(args.values()), weights)
    values = {name: v.detach() for name, v in results.items()}
    return values | {f"d{name}": g for name, g in zip(args, gradients, strict=True)}


def compare(got, true, slack):
    """Return {name: {"relative_error", "tolerance", "right"}}. The tolerance is `slack`, plus half a unit in the last
    place for results in 16 bits."""
    comparisons = {}
    for name, want in true.items():
        have = got[name]
        rounding = 0.0 if have.dtype == torch.float32 else torch.finfo(have.dtype).eps / 2
        error = ((have.double() - want).norm() / (want.norm() + TINY)).item()
        tolerance = slack + rounding
        comparisons[name] = {"relative_error": error, "tolerance": tolerance, "right": error <= tolerance}  # NaN: false
    return comparisons


def wrong_in(comparisons):
    """List everything that is wrong, as 'y by 1.0e-02 (at most 2.0e-06), ...'. Returns '' if all is right."""
    words = []
    for name, row in comparisons.items():
        if not row["right"]:
            words.append(f"{name} by {row['relative_error']:.1e} (at most {row['tolerance']:.1e})")
    return ", ".join(words)


def faults(f, plain, a, slack):
    """Compare f(**a) with plain(**a) in float64, and return what `wrong_in` says."""
    true = values_and_gradients(plain, a, torch.float64)
    return wrong_in(compare(values_and_gradients(f, a), true, slack))


# --------------------------------------------------------------------------------------------------------------- device

class Cpu:
    """The CPU as a device for measurements: its clock, copy bandwidth and description."""

    name = "cpu"
    flush_bytes = 1 << 26

    @functools.cached_property
    def flushed(self):
        return torch.empty(self.flush_bytes, dtype=torch.uint8, device=self.name)

    def laps(self, *steps):
        """Run the steps in sequence, and return the seconds of each."""
        times = [time.perf_counter()]
        for step in steps:
            step()
            times.append(time.perf_counter())
        return [b - a for a, b in zip(times, times[1:], strict=False)]

    def copy_bandwidth(self):
        """Bytes read and written per second: the median of 20 large copies."""
        source = torch.randint(0, 256, self.flushed.shape, dtype=torch.uint8, device=self.name)
        seconds = [self.laps(lambda: self.flushed.copy_(source))[0] for _ in range(23)][3:]
        return 2 * source.numel() / median(seconds)

    def recover(self):
        """Free memory. Returns False if every later call in this process would fail, as after an out-of-bounds write on
        a GPU."""
        gc.collect()
        return True

    def describe(self):
        return {"name": records.cpu_model(), "lanes": build.library().longhorn_lanes()}


class Gpu(Cpu):
    name = "cuda"

    def __init__(self):
        if not torch.cuda.is_available():
            raise ConfigError("PyTorch sees no GPU: use --device=cpu, or --dry-run to try the code")
        self.properties = torch.cuda.get_device_properties(0)
        self.flush_bytes = min(4 << 30, self.properties.total_memory // 16)

    def laps(self, *steps):
        """Run the steps in sequence, from an empty cache, and return the device's seconds for each."""
        self.flushed.zero_()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
        events[0].record()
        for step, event in zip(steps, events[1:], strict=True):
            step()
            event.record()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:], strict=False)]

    def recover(self):
        gc.collect()
        try:
            torch.cuda.empty_cache()
            torch.cuda.synchronize()
            return torch.zeros(1, device="cuda").item() == 0
        except RuntimeError:
            return False

    def describe(self):
        p = self.properties
        return {"name": p.name, "capability": f"{p.major}.{p.minor}", "multiprocessors": p.multi_processor_count,
                "memory_bytes": p.total_memory}


class Peak:
    """Peak memory above the usage when this object was created: allocated on a GPU, resident on a CPU."""

    def __init__(self, device="cpu"):
        self.cuda = torch.device(device).type == "cuda"
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        else:
            with contextlib.suppress(AttributeError, OSError):  # not Linux
                ctypes.CDLL(None).malloc_trim(0)
                Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the resident size
        self.before = self._most()

    def bytes(self):
        """The peak in bytes, or None if the system does not report it."""
        return None if self.before is None else self._most() - self.before

    def _most(self):
        if self.cuda:
            return torch.cuda.max_memory_allocated()
        with contextlib.suppress(OSError):
            return 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


# ---------------------------------------------------------------------------------------------- operators taking turns

class Pass(NamedTuple):
    """One pass of a contender: call() returns y. The backward takes dy to the gradients of the tensors `wanted`."""

    call: object
    wanted: list
    dy: torch.Tensor


def a_pass(f, a, dy):
    """Return the Pass for y = f(**a) and the gradients of all arguments."""
    a = leaves(a)
    return Pass(lambda: f(**a), list(a.values()), dy)


class Contender:
    """An operator that takes turns with others. Holds its row of the record, its Pass, and the seconds of PASSES in
    each turn so far."""

    def __init__(self, name, make, device, rounds):
        self.row = {"contender": name}
        self.device = device
        self.rounds = rounds
        self.seconds = []
        self.attempt(self.warm_up, make)

    def attempt(self, f, *arguments):
        """Call f(*arguments), unless an earlier attempt failed. A failure puts its 'reason' in the row. Raises
        ConfigError if it made the GPU unusable."""
        if "reason" in self.row:
            return
        try:
            return f(*arguments)
        except Exception as error:
            self.row["reason"] = in_one_line(error)
        self.run = None
        if not self.device.recover():  # outside `except`, whose traceback keeps the failed call's tensors alive
            name = self.row["contender"]
            raise ConfigError(f"{name} made the GPU unusable ({self.row['reason']}): leave it out with "
                              f"--without={name}")

    def warm_up(self, make):
        """Run the first passes, which may build, load or tune. Then time a pass, to see how many fit in
        CONTENDER_SECONDS."""
        self.run = make()
        self.both()
        peak = Peak(self.device.name)
        self.both()
        self.row["peak_bytes_above_inputs"] = peak.bytes()
        self.forward()
        self.turn()
        fitting = int(CONTENDER_SECONDS / max(self.seconds.pop()[-1], 1e-9))
        self.rounds = min(self.rounds, max(3, fitting))

    def forward(self):
        with torch.no_grad():
            return self.device.laps(self.run.call)

    def both(self):
        """Return [seconds of the forward, seconds of the backward]."""
        call, wanted, dy = self.run
        ys = []
        return self.device.laps(lambda: ys.append(call()), lambda: torch.autograd.grad(ys[0], wanted, dy))

    def turn(self):
        (forward,) = self.forward()
        with_states, backward = self.both()
        self.seconds.append((forward, backward, with_states + backward))


def time_contenders(contenders, device, rounds=10):
    """Time all contenders, {name: function () -> Pass}, in turn. Returns a row for each, with times or with a
    'reason'."""
    entrants = [Contender(name, make, device, rounds) for name, make in contenders.items()]
    for done in range(rounds):
        for entrant in entrants:
            if done < entrant.rounds:
                entrant.attempt(entrant.turn)
    for entrant in entrants:
        if "reason" not in entrant.row:
            for direction, seconds in zip(PASSES, zip(*entrant.seconds, strict=True), strict=True):
                entrant.row[direction] = spread(seconds)
    return [entrant.row for entrant in entrants]


def spread(seconds):
    """Return measured seconds for a record, rounded to nanoseconds, with median, quartiles and minimum."""
    seconds = [round(s, 9) for s in seconds]
    low, _, high = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
    return {"median_seconds": median(seconds), "quartile_seconds": [low, high], "fastest_seconds": min(seconds),
            "runs": len(seconds), "samples_seconds": seconds}


def quartiles(times, digits=1):
    """Format the quartiles for a table: 'low .. high' in milliseconds."""
    return " .. ".join(f"{1e3 * s:.{digits}f}" for s in times["quartile_seconds"])


def or_dash(value, form, unit=1):
    """Format a cell of a table: value / unit in this form, or a dash for None."""
    return "-" if value is None else format(value / unit, form)


# ------------------------------------------------------------------------------------------------ models taking turns

def serve(pipe, make, spec):
    """A worker's main function: call make(spec), then answer (seconds, method, arguments) until the pipe closes."""
    output = io.StringIO()  # lines about the chosen kernels belong in the record, not in the table
    with contextlib.redirect_stderr(output), contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        try:
            signal.alarm(START_S)  # ends the process, even inside a kernel
            held = make(spec)
            while True:
                signal.alarm(0)
                limit_s, method, arguments = pipe.recv()
                signal.alarm(limit_s)
                answer = getattr(held, method)(*arguments)
                pipe.send(answer | said(output))
        except Exception as error:  # including EOFError if the other end has closed; then `send` fails, too
            pipe.send({"reason": in_one_line(error)} | said(output))


def said(output):
    """Return the last lines of a worker's standard error, for its record."""
    return {"stderr": output.getvalue().replace(f"{ROOT}/", "").splitlines()[-20:]}


class Worker:
    """A process that holds the object make(spec), whose methods return dicts. The process ends with this Worker.

    row: the object's row of the record, which begins with the given entries and about(). If a failure ended the
    process, its 'reason' is in the row.
    """

    def __init__(self, make, spec, **row):
        # fork from a process that has only imported torch: this is quick, and neither CUDA nor OpenMP runs there
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "model", "train"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, make, spec), daemon=True)
        self.process.start()
        theirs.close()
        self.row = row
        self.spent = 0.0  # seconds spent on answers
        self.row |= self.ask("about", limit_s=START_S)

    def ask(self, method, *arguments, limit_s):
        """Return the method's answer, or {} after any failure."""
        if "reason" in self.row:
            return {}
        began = time.perf_counter()
        try:
            self.pipe.send((math.ceil(limit_s), method, arguments))
            answer = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(5)
            answer = {"reason": how_it_ended(self.process.exitcode, limit_s)}
        self.spent += time.perf_counter() - began
        for name in ("reason", "stderr"):
            if name in answer:
                self.row[name] = answer.pop(name)
        return answer


def how_it_ended(status, limit_s):
    if status == -signal.SIGALRM:
        return f"ran past its limit of {limit_s:.0f} s"
    return f"its process ended with status {status}" + (", perhaps out of memory" if status == -signal.SIGKILL else "")


# -------------------------------------------------------------------------------------------------------------- records

def check_out(out, dry_run=False):
    """Create the folder of the record `out` before anything is measured. Raises OSError or ConfigError if the folder
    is not writable, and ConfigError for a folder in results/ in a dry run or with uncommitted changes."""
    if Path(out).resolve().is_relative_to(ROOT / "results"):
        if dry_run:
            raise ConfigError("a dry run measures nothing, so its record does not belong in results/: give another "
                              "--out")
        if code_version()["uncommitted_changes"]:
            raise ConfigError("results/ is for records of a commit, and this tree has uncommitted changes (see git "
                              "status): commit them, or give another --out")
    folder = Path(out).parent
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot write to {folder}: give another --out")


def record_file(args, name, dry_run=False):
    """Return the record's path: --out, else results/<name>.json with --save, else out/<name>.json. Raises ConfigError
    if it cannot be written."""
    out = Path(args.out or ROOT / ("results" if args.save else "out") / f"{name}.json").resolve()
    if out.suffix != ".json":
        raise ConfigError(f"--out={args.out}: name a .json file; any table or picture goes beside it")
    check_out(out, dry_run)
    return out


def new_record(benchmark, **about):
    """Return the start of a record: the benchmark, date, machine and code."""
    date = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    return {"benchmark": benchmark, "finished": False, "date": date, "environment": records.environment(), **about}


def headline(record, device=None):
    """Return a line with a record's machine, versions, date and commit."""
    ran = record["environment"]
    return (f"{device or ran['cpu']}, {torch.get_num_threads()} threads, torch {ran['torch']}, {record['date'][:10]}, "
            f"commit {(ran['commit'] or 'none')[:10]}")


def write_record(out, record):
    """Write a record. Non-finite numbers become null, because JSON has no NaN."""
    records.write_json(out, json.loads(json.dumps(record), parse_constant=lambda name: None))


def finish(out, record, **more):
    write_record(out, record | {"finished": True, **more})
    print(f"record: {out}")


# ------------------------------------------------------------------------------------------------------ what cannot run

class LeftOut(ConfigError):
    """Raised with the reason why a contender or model does not run here."""


def imported(module, name):
    """Return the attribute `name` of an optional module. Raises LeftOut with the reason if it cannot be imported."""
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # for example an extension built for another PyTorch
        missing = isinstance(error, ModuleNotFoundError) and error.name == module.split(".")[0]
        raise LeftOut("not installed" if missing else in_one_line(error)) from None


def in_one_line(error):
    """Describe an exception in one line for a record: its type and the first line of its message."""
    if isinstance(error, LeftOut):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    words = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {words}"[:240]
