"""Runs the operators on a GPU, for the stages of bench/gpu.py: do they build, are they right, how fast are they?

    python bench/ops.py environment      # the GPU, its driver and compilers, the optional packages
    python bench/ops.py build            # compiles every kernel that the tests and benchmarks use
    python bench/ops.py small            # small scans and convolutions, for compute-sanitizer to watch
    python bench/ops.py profiled         # one forward and backward of some scans, for Nsight Compute
    python bench/ops.py convolution      # compared with float64, then timed beside PyTorch's and causal-conv1d's
    python bench/ops.py loss             # the same for the head and its loss, in slices of several sizes
    python bench/ops.py variants         # the scan in other tunings, each compiled and timed in a process of its own

--out=FILE takes the record, which is written after every row: a killed process leaves what it had.
"""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import configurator  # noqa: E402
from bench import measure, scan_cuda  # noqa: E402
from bench.measure import DTYPES, LeftOut, imported, in_one_line, leaves, values_and_gradients  # noqa: E402
from common.errors import ConfigError, main_error  # noqa: E402
from configurator import Seconds  # noqa: E402
from kernels import build as native  # noqa: E402
from kernels import choose, cuda, launch, ops  # noqa: E402
from runtime.records import read_json  # noqa: E402

PACKAGES = {"mamba_ssm": "mamba_ssm.ops.selective_scan_interface", "fla": "fla.ops.gla", "flash_attn": "flash_attn",
            "causal_conv1d": "causal_conv1d", "triton": "triton"}
PROGRAMS = ("nvcc", "compute-sanitizer", "ncu", "g++")
# (B, T, D, N) in the benchmark and in the GPU tests (tests/test_cuda.py): `build` compiles their kernels
BENCHMARKED = [(64, 1024, 1536, 16), (64, 1024, 1536, 64), (2, 32768, 1536, 16), (2, 32768, 2048, 64)]
TESTED = [(2, 65, 70, 16), (1, 300, 33, 16), (3, 129, 64, 64), (1, 33, 5, 3), (2, 40, 20, 128), (72, 128, 512, 16),
          (72, 40, 512, 64), (1, 3000, 100, 16), (1, 3072, 256, 16), (72, 64, 512, 64), (72, 64, 256, 16),
          (1, 1024, 128, 16)]
CONV_WIDTHS = (4, 1, 3, 8)  # the models', and tests/operators.py's
# family, B, T, D, N, dtype: as many lanes as channels (many rows) or more (few rows), whole chunks and blocks or a
# remainder; whole ones with T = 256 are split into segments
SMALL = [("longhorn", 264, 32, 128, 16, "bfloat16"), ("longhorn", 1, 256, 128, 16, "float32"),
         ("longhorn", 288, 33, 20, 16, "bfloat16"), ("longhorn", 1, 300, 150, 16, "float32"),
         ("longhorn", 1, 40, 70, 64, "bfloat16"), ("mamba", 2, 70, 150, 16, "float32"),
         ("exact", 2, 70, 150, 16, "float32"), ("mamba", 1, 256, 128, 16, "bfloat16")]
# B, T, D, N; T of the last is split in the backward
TIMED = [(64, 1024, 1536, 16), (64, 1024, 1536, 64), (8, 4096, 1536, 16)]
TINY = [(2, 64, 64, 16)]  # in place of TIMED in a dry run
VARIANTS = ["", "FORWARD_BLOCKS=3", "FORWARD_BLOCKS=5", "BACKWARD_BLOCKS=2", "STAGES=4", "KEYS=8",
            "LONGER=1",  # values for constants in longhorn_scan.cu
            # whether T is split, and how finely: launch.cuda_segments
            "SPLIT_BELOW=0", "SPLIT_BELOW=1", "FILL=2", "FILL=4"]
LAST_VARIANT_S = 20  # a variant is compiled and timed in so many seconds


class Run:
    """The device, the time there is, and the record of one of the functions below."""

    def __init__(self, name, dry_run, budget_s, out):
        self.dry_run = dry_run
        self.ends = time.monotonic() + budget_s
        self.out = out
        # the sanitizers and the profiler would watch the buffer that is flushed before a time is taken
        flush = {"flush_bytes": 0} if name in ("small", "profiled") else {}
        self.gpu = scan_cuda.DryRun() if dry_run else scan_cuda.Gpu(**flush)
        self.rounds = 3 if dry_run else 20
        self.timed = TINY if dry_run else TIMED
        self.record = measure.new_record(name, dry_run=dry_run, rows=[])

    def emit(self, **row):
        """Add a row to the record, and print it."""
        self.record["rows"].append(row)
        print(json.dumps(row), flush=True)
        measure.write_record(self.out, self.record)

    def random(self, *shape):
        return torch.randn(shape, device=self.gpu.name)


def environment(run):
    device = run.gpu.describe()
    run.emit(device=device, compiler=cuda.compiler_version("nvcc") if cuda.nvcc() else None)
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    for name, module in PACKAGES.items():
        try:
            imported(module, "__name__")
            run.emit(package=name, version=str(getattr(sys.modules[name], "__version__", "")))
        except LeftOut as reason:
            missing.append(name)
            run.emit(package=name, missing=str(reason))
    print(f"in short: {device['name']}, torch {device['torch']}, CUDA {device.get('cuda')}; "
          f"not found: {', '.join(missing) or 'nothing'}")


# ------------------------------------------------------------------------------------------------------- build, and run

def keys(properties):
    """The arguments of build_cuda for every kernel that the tests and benchmarks launch on a GPU."""
    architecture = f"sm_{properties.major}{properties.minor}"
    room = properties.multi_processor_count, properties.shared_memory_per_multiprocessor
    found = {}
    for dtype in choose.DTYPES:
        for update in launch.UPDATES:
            for size in BENCHMARKED + TESTED:
                layout = launch.cuda_shape(update, *size, *room, update != "exact")
                found[update, dtype, layout, architecture] = None
        for width in CONV_WIDTHS:
            found["conv", dtype, (width,), architecture] = None
    return list(found)


def build(run):
    """One kernel by itself, as long as a user waits, then all in parallel."""
    if run.dry_run:  # those for the CPU
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
        run.emit(scan=family, B=shape[0], T=shape[1], D=shape[2], N=shape[3], dtype=dtype)
        check_finite(values_and_gradients(scan_cuda.scans(family, run.gpu.backend), a))
    for T in (1, 70, 128):
        a = {"x": run.random(2, T, 70).bfloat16(), "weight": run.random(70, 4), "state": run.random(2, 3, 70)}
        run.emit(convolution=T)
        check_finite(values_and_gradients(conv(run.gpu.backend), a))


def check_finite(results):
    for name, v in results.items():
        if not v.isfinite().all():
            raise ConfigError(f"{name} is not finite")


def profiled(run):
    for shape in run.timed:
        values_and_gradients(scan_cuda.scans("longhorn", run.gpu.backend), inputs(run, shape))
        run.emit(shape=shape)


def inputs(run, shape, dtype=torch.bfloat16):
    return {name: v.to(run.gpu.name) for name, v in measure.make_inputs(*shape, dtype).items()}


# ---------------------------------------------------------------------------------------------------------- time

def check_right(errors, what):
    for name, row in errors.items():
        if not row["right"]:
            raise ConfigError(f"{what} is wrong in {name} by {row['relative_error']:.1e} "
                              f"(at most {row['tolerance']:.1e}): it was not timed")


def a_pass(f, a, dy):
    """Function () -> the Pass of f(**a), made when it is its turn."""
    def make():
        args = leaves(a)
        return scan_cuda.Pass(lambda: f(**args), list(args.values()), dy)

    return make


def in_short(rows, directions=("forward", "backward")):
    """Prints a line with the times at the first shape."""
    words = []
    for row in rows:
        if "forward" in row and row["shape"] == rows[0]["shape"]:
            times = " / ".join(f"{1e3 * row[d]['median_seconds']:.2f}" for d in directions)
            words.append(f"{row.get('defines', row['contender']) or 'as it is'} {times}")
    print(f"in short: ms {' / '.join(directions)}: {', '.join(words)}")


def conv(backend):
    """f(**a) -> (y, None), as values_and_gradients wants it."""
    return lambda **a: (ops.causal_conv1d(**a, backend=backend), None)


def convolution(run):
    """The short convolution with SiLU at the models' widths."""
    bandwidth = run.gpu.copy_bandwidth()
    for B, T, D in [(2, 80, 48)] if run.dry_run else [(64, 1024, 1536), (16, 4096, 1536), (8, 1024, 2048)]:
        both = run.random(B, T, 2 * D).bfloat16()  # x is half of a projection, as in the models
        a = {"x": both[..., :D], "weight": run.random(D, 4), "bias": run.random(D)}
        dy = run.random(B, T, D).bfloat16()
        true = values_and_gradients(conv("torch"), a, torch.float64)
        errors = measure.compare(values_and_gradients(conv(run.gpu.backend), a), true, 64 * measure.EPS)
        check_right(errors, f"the convolution at B={B} T={T} D={D}")
        del true
        contenders = {}
        for backend in (run.gpu.backend, "torch", "fused"):
            contenders[backend] = a_pass(functools.partial(ops.causal_conv1d, backend=backend), a, dy)
        for row in scan_cuda.time_contenders(contenders, run.gpu, run.rounds):
            if "reason" not in row:
                moved = B * T * D * 2  # bytes of x; forward x, y; backward x, dy, dx
                for direction, tensors in (("forward", 2), ("backward", 3)):
                    share = tensors * moved / bandwidth / row[direction]["median_seconds"]
                    row[direction]["share_of_bandwidth"] = share
            elif row["contender"] == run.gpu.backend:
                raise ConfigError(f"our convolution was not timed: {row['reason']}")
            run.emit(shape=(B, T, D), copy_bytes_per_second=bandwidth, **row)
    in_short(run.record["rows"])


def loss(run):
    """32K tokens and a vocabulary of 50,304. The gradient of the logits is made in the forward, so the sum counts."""
    n, D, V = (64, 16, 128) if run.dry_run else (32768, 768, 50304)
    a = {"x": run.random(n, D).bfloat16(), "weight": run.random(V, D).bfloat16() / 32}
    targets = torch.randint(V, (n,), device=run.gpu.name)

    def head(backend=None, at_once=None, **a):
        if at_once:
            ops.LOGITS_AT_ONCE[run.gpu.name] = at_once
        return ops.linear_cross_entropy(**a, targets=targets[:len(a["x"])], backend=backend)

    some = a | {"x": a["x"][:n // 8]}  # float64 takes 8 bytes per logit
    true = values_and_gradients(lambda **a: (head("torch", **a), None), some, torch.float64)
    check_right(measure.compare(values_and_gradients(lambda **a: (head(**a), None), some), true, 0.01), "the loss")
    del true
    dy = torch.ones((), device=run.gpu.name)
    contenders = {}
    for power in (24, 26, 28, 30):
        contenders[f"slices of 2^{power}"] = a_pass(functools.partial(head, at_once=1 << power), a, dy)
    contenders["torch"] = a_pass(functools.partial(head, "torch"), a, dy)
    for row in scan_cuda.time_contenders(contenders, run.gpu, run.rounds):
        run.emit(shape=(n, D, V), **row)
    in_short(run.record["rows"], ["forward_backward"])


def timed(run):
    """The scan at the shapes of TIMED, as compiled with $LONGHORN_CUDA_DEFINES, after a check at a small shape."""
    row = scan_cuda.check_case("longhorn", (2, 64, 256, 16), "bfloat16", {}, run.gpu)
    if not row["right"]:
        raise ConfigError(scan_cuda.describe_case(row))
    for shape in run.timed:
        a = inputs(run, shape)
        dy = torch.randn_like(a["x"])
        ours = functools.partial(scan_cuda.our_longhorn, None, a, dy, run.gpu)
        (row,) = scan_cuda.time_contenders({"ours": ours}, run.gpu, run.rounds)
        run.emit(shape=shape, **row)
        if "reason" in row:
            raise ConfigError(f"our scan was not timed: {row['reason']}")


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
            if not defines:  # the others are only trials
                raise ConfigError(f"the scan as it is: {words}")
    in_short(run.record["rows"])


# ----------------------------------------------------------------------------------------------------------------- main

FUNCTIONS = {f.__name__: f for f in (environment, build, small, profiled, convolution, loss, timed, variants)}


@dataclass
class Options:
    function: Literal[tuple(FUNCTIONS)]  # what to run, see above
    out: Path = None  # write the record to this JSON file
    budget_s: Seconds = 600.0  # for variants
    dry_run: bool = False  # tiny sizes on the CPU, as a test


def main(argv):
    args = configurator.read(Options, argv, __doc__)
    measure.check_out(args.out, dry_run=args.dry_run)
    if not args.dry_run and not torch.cuda.is_available():
        raise ConfigError("PyTorch sees no GPU (--dry-run tries the code on a CPU)")
    run = Run(args.function, args.dry_run, args.budget_s, args.out)
    FUNCTIONS[args.function](run)
    measure.write_record(args.out, run.record | {"finished": True})


if __name__ == "__main__":
    with main_error("bench/ops.py"):
        main(sys.argv[1:])
