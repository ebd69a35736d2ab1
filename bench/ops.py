"""Runs the operators on a GPU, for the stages of bench/gpu.py: do they build, are they right, how fast are they?

    python bench/ops.py build            # compiles every kernel that the tests and benchmarks use
    python bench/ops.py small            # small scans and convolutions, for compute-sanitizer to watch
    python bench/ops.py profiled         # one forward and backward of some scans, for Nsight Compute
    python bench/ops.py convolution      # compared with float64, then timed beside PyTorch and causal-conv1d
    python bench/ops.py loss             # the same for the head and its loss, in one kernel and in PyTorch
    python bench/ops.py variants         # the scan in other tunings, each compiled and timed in its own process

The record is written after every row, so a killed process loses no finished row.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import configurator  # noqa: E402
from bench import measure, scan  # noqa: E402
from bench.measure import DTYPES, a_pass, in_one_line, values_and_gradients  # noqa: E402
from common.errors import ConfigError, main_error  # noqa: E402
from configurator import Seconds  # noqa: E402
from kernels import build as native  # noqa: E402
from kernels import choose, launch, ops  # noqa: E402
from runtime.records import read_json  # noqa: E402

# (B, T, D, N) in the benchmark and in the GPU tests (tests/test_cuda.py): `build` compiles their kernels
BENCHMARKED = [(64, 1024, 1536, 16), (64, 1024, 1536, 64), (2, 32768, 1536, 16), (2, 32768, 2048, 64)]
TESTED = [(2, 65, 70, 16), (1, 300, 33, 16), (3, 129, 64, 64), (1, 33, 5, 3), (2, 40, 20, 128), (72, 128, 512, 16),
          (72, 40, 512, 64), (1, 3000, 100, 16), (1, 3072, 256, 16), (72, 64, 512, 64), (72, 64, 256, 16),
          (1, 1024, 128, 16)]
CONV_WIDTHS = (4, 1, 3, 8)  # in the models and in tests/operators.py
VOCABULARIES = (50304, 301, 128256)  # in the benchmark and in tests/test_ops.py
# family, B, T, D, N, dtype. The kernels use one lane per channel (many rows) or several (few rows), with whole chunks
# and blocks or a remainder. Whole chunks with T = 256 are split into segments.
SMALL = [
    ("longhorn", 264, 32, 128, 16, "bfloat16"),
    ("longhorn", 1, 256, 128, 16, "float32"),
    ("longhorn", 288, 33, 20, 16, "bfloat16"),
    ("longhorn", 1, 300, 150, 16, "float32"),
    ("longhorn", 1, 40, 70, 64, "bfloat16"),
    ("mamba", 2, 70, 150, 16, "float32"),
    ("exact", 2, 70, 150, 16, "float32"),
    ("mamba", 1, 256, 128, 16, "bfloat16"),
]
# B, T, D, N; the backward splits T of the last shape
TIMED = [(64, 1024, 1536, 16), (64, 1024, 1536, 64), (8, 4096, 1536, 16)]
TINY = [(2, 64, 64, 16)]  # in place of TIMED in a dry run
VARIANTS = ["", "FORWARD_BLOCKS=3", "FORWARD_BLOCKS=5", "BACKWARD_BLOCKS=2", "STAGES=4", "KEYS=8",
            "LONGER=1",  # values for constants in longhorn_scan.cu
            # states per lane, whether T is split, and how finely: launch.cuda_shape and cuda_segments
            "P=4", "P=8", "SPLIT_BELOW=0", "SPLIT_BELOW=1", "FILL=2", "FILL=4"]
LAST_VARIANT_S = 20  # seconds to compile and time one variant


class Run:
    """One run of a function below: its device, time budget and record."""

    def __init__(self, args):
        self.dry_run = args.dry_run
        self.out = args.out or ROOT / "out" / f"{args.function}.json"
        measure.check_out(self.out, args.dry_run)
        self.ends = time.monotonic() + args.budget_s
        self.gpu = measure.Cpu() if args.dry_run else measure.Gpu()
        self.rounds = 3 if args.dry_run else 20
        self.shapes = TINY if args.dry_run else TIMED
        self.record = measure.new_record(args.function, dry_run=args.dry_run, rows=[])

    def emit(self, **row):
        """Add a row to the record, and print it."""
        self.record["rows"].append(row)
        print(json.dumps(row), flush=True)
        measure.write_record(self.out, self.record)

    def random(self, *shape):
        return torch.randn(shape, device=self.gpu.name)

    def time(self, shape, contenders, ours=None, **about):
        """Time the contenders, and emit their rows. Raises ConfigError if `ours` was not timed."""
        for row in measure.time_contenders(contenders, self.gpu, self.rounds):
            self.emit(shape=shape, **about, **row)
            if "reason" in row and row["contender"] == ours:
                raise ConfigError(f"{ours} was not timed: {row['reason']}")


# ------------------------------------------------------------------------------------------------------- build, and run

def keys(properties):
    """Return the arguments of build_cuda for every kernel that the tests and benchmarks launch on a GPU."""
    architecture = f"sm_{properties.major}{properties.minor}"
    room = properties.multi_processor_count, properties.shared_memory_per_multiprocessor
    found = {("sums", torch.float32, (native.BLOCK_SUMS,), architecture): None}
    for dtype in choose.DTYPES:
        for update in launch.UPDATES:
            for size in BENCHMARKED + TESTED:
                for backward in (False, True):
                    layout = launch.cuda_shape(update, *size, *room, update != "exact", backward)
                    found[update, dtype, layout, architecture] = None
        for width in CONV_WIDTHS:
            for at_once in (1, 2) if dtype.itemsize == 2 else (1,):
                found["conv", dtype, (width, at_once), architecture] = None
        for V in VOCABULARIES:
            found["loss", dtype, (ops.loss_room(dtype, V, room[1]),), architecture] = None
    return list(found)


def build(run):
    """Compile one kernel by itself, to see how long a user waits, then all kernels in parallel."""
    if run.dry_run:  # the kernels for the CPU
        run.emit(kernels=1, seconds=native.build()[1])
        return
    wanted = keys(run.gpu.properties)
    start = time.perf_counter()
    first_s = native.build_cuda(*wanted[0])[1]
    run.emit(first_kernel_seconds=first_s)
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        jobs = {key: pool.submit(native.build_cuda, *key) for key in wanted}
    failed = [f"{key}: {in_one_line(job.exception())}" for key, job in jobs.items() if job.exception()]
    seconds = time.perf_counter() - start
    run.emit(kernels=len(jobs) - len(failed), seconds=seconds)
    if failed:
        raise ConfigError(f"{len(failed)} of {len(jobs)} kernels did not compile: {failed[0]}")
    print(f"in short: {len(jobs)} kernels in {seconds:.1f} s, the first in {first_s:.1f} s (0.0: compiled before)")


def small(run):
    for family, *shape, dtype in SMALL:
        a = inputs(run, shape, DTYPES[dtype])
        if family == "mamba":
            a = measure.as_mamba(a)
        run.emit(scan=family, **dict(zip("BTDN", shape, strict=True)), dtype=dtype)
        check_finite(values_and_gradients(scan.scans(family, run.gpu.name), a))
    for T in (1, 70, 128):
        a = {"x": run.random(2, T, 70).bfloat16(), "weight": run.random(70, 4), "state": run.random(2, 3, 70)}
        run.emit(convolution=T)
        check_finite(values_and_gradients(conv(run.gpu.name), a))
    for V, dtype in ((301, torch.bfloat16), (128_256, torch.float32)):  # one row fits shared memory, one does not
        a = {"x": run.random(5, 16).to(dtype), "weight": run.random(V, 16).to(dtype)}
        run.emit(loss=V)
        check_finite(values_and_gradients(small_loss, a))


def small_loss(x, weight):
    return ops.linear_cross_entropy(x, weight, torch.arange(len(x), device=x.device)), None


def check_finite(results):
    for name, v in results.items():
        if not v.isfinite().all():
            raise ConfigError(f"{name} is not finite")


def profiled(run):
    for shape in run.shapes:
        values_and_gradients(scan.scans("longhorn", run.gpu.name), inputs(run, shape))
        run.emit(shape=shape)


def inputs(run, shape, dtype=torch.bfloat16):
    return measure.make_inputs(*shape, dtype, run.gpu.name)


# ---------------------------------------------------------------------------------------------------------- time

def check_right(what, f, plain, a, slack):
    if wrong := measure.faults(f, plain, a, slack):
        raise ConfigError(f"{what} is wrong in {wrong}: it was not timed")


def in_short(rows, directions=("forward", "backward")):
    """Prints a line with the times at the first shape."""
    words = []
    for row in rows:
        if "forward" in row and row["shape"] == rows[0]["shape"]:
            times = " / ".join(f"{1e3 * row[d]['median_seconds']:.2f}" for d in directions)
            words.append(f"{row.get('defines', row['contender']) or 'as it is'} {times}")
    print(f"in short: ms {' / '.join(directions)}: {', '.join(words)}")


def conv(backend):
    """Return f(**a) -> (y, None), in the form that values_and_gradients needs."""
    return lambda **a: (ops.causal_conv1d(**a, backend=backend), None)


def convolution(run):
    """Check and time the short convolution with SiLU, at the models' widths."""
    ours = run.gpu.name
    bandwidth = run.gpu.copy_bandwidth()
    for B, T, D in [(2, 80, 48)] if run.dry_run else [(64, 1024, 1536), (16, 4096, 1536), (8, 1024, 2048)]:
        both = run.random(B, T, 2 * D).bfloat16()  # x is half of a projection, as in the models
        a = {"x": both[..., :D], "weight": run.random(D, 4), "bias": run.random(D)}
        check_right(f"the convolution at B={B} T={T} D={D}", conv(ours), conv("torch"), a, 64 * measure.EPS)
        dy = run.random(B, T, D).bfloat16()
        contenders = {}
        for backend in (ours, "torch", "fused"):
            f = functools.partial(ops.causal_conv1d, backend=backend)
            contenders[backend] = functools.partial(a_pass, f, a, dy)
        run.time((B, T, D), contenders, ours, copy_bytes_per_second=bandwidth)
    in_short(run.record["rows"])


def loss(run):
    """Check and time the head and its loss, with 32K tokens and a vocabulary of 50,304. The forward already computes
    the gradient of the logits, so compare the sums of forward and backward."""
    n, D, V = (64, 16, 128) if run.dry_run else (32768, 768, VOCABULARIES[0])
    if not run.dry_run and ops.loss_module(torch.bfloat16, V, torch.device(run.gpu.name, 0)) is None:
        raise ConfigError("the loss kernel was not built: see above")
    a = {"x": run.random(n, D).bfloat16(), "weight": run.random(V, D).bfloat16() / 32}
    targets = torch.randint(V, (n,), device=run.gpu.name)

    def head(backend=None, in_slices=False, **a):
        without = mock.patch.object(ops, "loss_module", lambda *key: None)
        with without if in_slices else contextlib.nullcontext():
            return ops.linear_cross_entropy(**a, targets=targets[:len(a["x"])], backend=backend)

    some = a | {"x": a["x"][:n // 8]}  # float64 takes 8 bytes per logit
    check_right("the loss", lambda **a: (head(**a), None), lambda **a: (head("torch", **a), None), some, 0.01)
    settings = {"one kernel": {}, "PyTorch's in slices": {"in_slices": True}, "torch": {"backend": "torch"}}
    contenders = {}
    dy = torch.ones((), device=run.gpu.name)
    for name, how in settings.items():
        contenders[name] = functools.partial(a_pass, functools.partial(head, **how), a, dy)
    run.time((n, D, V), contenders)
    in_short(run.record["rows"], ["forward_backward"])


def timed(run):
    """Check the scan, compiled with $LONGHORN_CUDA_DEFINES, at a small shape. Then time it at the shapes of TIMED."""
    row = scan.check_case("longhorn", (2, 64, 256, 16), "bfloat16", {}, run.gpu)
    if not row["right"]:
        raise ConfigError(scan.describe_case(row))
    for shape in run.shapes:
        a = inputs(run, shape)
        ours = functools.partial(scan.our_longhorn, None, a, torch.randn_like(a["x"]), run.gpu)
        run.time(shape, {"ours": ours}, "ours")


def variants(run):
    for defines in VARIANTS[:1] if run.dry_run else VARIANTS:
        if time.monotonic() > run.ends - LAST_VARIANT_S:
            run.emit(left_out=defines)
            break
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder) / "timed.json"
            command = [sys.executable, __file__, "timed", f"--out={record}", *["--dry-run"] * run.dry_run]
            environ = os.environ | {"LONGHORN_CUDA_DEFINES": defines}
            ended = subprocess.run(command, capture_output=True, text=True, env=environ)
            for row in read_json(record)["rows"] if record.exists() else []:
                run.emit(defines=defines, **row)
        if ended.returncode:
            words = (ended.stdout + ended.stderr).strip().splitlines()[-1:]
            run.emit(defines=defines, failed=words)
            if not defines:  # any other variant may fail
                raise ConfigError(f"the scan as it is: {words}")
    in_short(run.record["rows"])


# ----------------------------------------------------------------------------------------------------------------- main

FUNCTIONS = {f.__name__: f for f in (build, small, profiled, convolution, loss, timed, variants)}


@dataclass
class Options:
    function: Literal[tuple(FUNCTIONS)]  # what to run, see above
    out: Path = None  # write the record to this JSON file (out/FUNCTION.json)
    budget_s: Seconds = 600.0  # seconds for variants
    dry_run: bool = False  # tiny sizes on the CPU, as a test


def main(argv):
    args = configurator.read(Options, argv, __doc__)
    run = Run(args)
    FUNCTIONS[args.function](run)
    measure.finish(run.out, run.record)


if __name__ == "__main__":
    with main_error("bench/ops.py"):
        main(sys.argv[1:])
