"""All measurements for a machine with a GPU, in three calls of at most nine minutes each, without a network.

    make gpu                             # the three calls, one after the other
    make gpu STAGES=correctness          # do the kernels build, and are they right?
    make gpu STAGES=speed                # how fast are they, why, and would another tuning be faster?
    make gpu STAGES=training             # what does that mean for a training step, recall and the sweep?
    make gpu PYTHON=python3 OUT=elsewhere      # with your own interpreter; installs nothing
    make gpu ARGS=--dry_run              # the same stages and files with tiny sizes on a CPU; measures nothing

A call is a list of stages (CALLS). Each stage is a separate process with a time limit, and may also use what earlier
ones have left. A stage that lacks something names it and is skipped. If the kernels do not build, or one of their tests
fails, all later stages and calls are left out, because they would time wrong kernels. Any other failure stops nothing;
neither do tests that run out of time, if none has failed. Output, in results/gpu_<device>/: gpu_<call>.json (after
every stage) and gpu_<call>.log (all output), and the records of bench/scan.py and bench/step.py. The exit status is 1
if any stage failed. `python bench/check_gpu.py FOLDER` says whether the records can be sent in.

Stages that are functions of this file pass their numbers as JSON lines in a file, so a killed stage keeps the numbers
that it had; the others write their own records as they go, or are read from what they printed.
"""

import argparse
import functools
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from runtime.errors import ConfigError, main_error  # noqa: E402

BUDGET_S = 530
PATIENCE_S = 3  # between SIGTERM and SIGKILL
PACKAGES = {"mamba_ssm": "mamba_ssm.ops.selective_scan_interface", "fla": "fla.ops.gla", "flash_attn": "flash_attn",
            "causal_conv1d": "causal_conv1d", "triton": "triton"}


# ----------------------------------------------------------------------------------------------------------- the runner

class Skip(Exception):
    """The reason why a stage does not run here."""


def by_exit_status(status, text):
    return ("ok", None) if status == 0 else ("failed", last_line(text) or f"exit status {status}")


class Stage(NamedTuple):
    name: str
    limit_s: float
    command: object                           # (context) -> [argument, ...]; may raise Skip
    summary: object = lambda rows, text: ""  # (records, output) -> a line with the main numbers
    verdict: object = by_exit_status          # (exit status, output) -> (status, reason)
    read: object = lambda text: []            # output -> records, of a stage that writes none


class Context(NamedTuple):
    out: Path
    dry_run: bool
    seconds: float = 0.0  # time limit of the stage
    record: str = ""      # file for the stage's records
    name: str = "gpu"     # name of the call's own records

    def inner(self, stage):
        """The command for a stage that is a function of this file."""
        command = [sys.executable, str(Path(__file__).resolve()), f"--stage={stage}", f"--record={self.record}",
                   f"--budget_s={self.seconds:.0f}"]
        return command + ["--dry_run"] * self.dry_run


def run_limited(command, limit_s, log):
    """Run a command, appending its output to the file `log`; returns (exit status, or None if it was killed; seconds).

    At the limit the command and all its children get SIGTERM and, PATIENCE_S later, SIGKILL.
    """
    start = time.monotonic()
    with open(log, "ab") as file:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
                                 env={**os.environ, "PYTHONUNBUFFERED": "1"}, start_new_session=True)
        try:
            status = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:  # also after an interrupt
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(child.pid, number)
                    child.wait(PATIENCE_S)
                except (ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
                    pass
    return status, time.monotonic() - start


def read_records(path):
    """The JSON lines of a file; a torn last line is dropped."""
    rows = []
    for line in Path(path).read_text(errors="replace").splitlines() if Path(path).exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def run_stage(stage, context, limit_s, log):
    """Run a stage; returns its record: status (ok, failed, over time or skipped), reason, seconds, records, summary."""
    with tempfile.TemporaryDirectory() as folder:
        context = context._replace(seconds=max(1.0, limit_s - 5), record=str(Path(folder) / "records.jsonl"))
        result = {"stage": stage.name, "limit_seconds": round(limit_s, 1), "seconds": 0.0, "records": []}
        try:
            command = stage.command(context)
        except Skip as reason:
            return result | {"status": "skipped", "reason": str(reason)}
        shown = " ".join(word for word in command if not word.startswith("--record=")).replace(f"{ROOT}/", "")
        with open(log, "a") as file:
            file.write(f"\n===== {stage.name}: {shown}\n")
        begin = os.path.getsize(log)
        try:
            status, seconds = run_limited(command, limit_s, log)
        except OSError as error:
            return result | {"command": shown, "status": "failed", "reason": str(error)}
        with open(log, "rb") as file:
            file.seek(begin)
            text = file.read().decode(errors="replace")
        rows = read_records(context.record) or stage.read(text)
    if status is None:
        verdict = "over time", f"killed at its limit of {limit_s:.0f} s; its results up to then are kept"
    elif status < 0:
        verdict = "failed", f"ended by signal {-status} ({signal.Signals(-status).name})"
    else:
        verdict = stage.verdict(status, text)
    summary = summary_of(stage, rows, text)
    return result | {"command": shown, "exit_status": status, "seconds": round(seconds, 2), "records": rows,
                     "status": verdict[0], "reason": verdict[1], "summary": summary}


def summary_of(stage, rows, text):
    try:
        return stage.summary(rows, text)
    except Exception as error:  # the records are kept anyway
        return f"no summary ({type(error).__name__}: {error})"


def last_line(text):
    return next((line.strip()[:240] for line in reversed(text.splitlines()) if line.strip()), "")


def run_all(stages, context, budget_s, about, done=None):
    """Run all stages within the budget, writing the record before the first and after each. Returns their results.

    done: {name: result} of earlier calls; what succeeded there is not repeated. It is updated.
    """
    from bench.measure import write_record

    log, began, done = context.out / f"{context.name}.log", time.monotonic(), {} if done is None else done
    record = about | {"dry_run": context.dry_run, "budget_seconds": budget_s, "stages": []}
    write_record(context.out / f"{context.name}.json", record)
    log.write_text("")
    for i, stage in enumerate(stages):
        left = budget_s - (time.monotonic() - began)
        limit_s = min(left, max(stage.limit_s, left - sum(later.limit_s for later in stages[i + 1:])))
        gate = next((f"{name}: {done[name]['status']}" for name in GATES if closed(done.get(name))), None)
        if stage.name in done and done[stage.name]["status"] == "ok":
            result = done[stage.name]
        elif gate or left < 5:
            reason = gate or f"{budget_s - left:.0f} of {budget_s:.0f} s are spent: --stages={stage.name} runs it alone"
            result = {"stage": stage.name, "status": "left out", "seconds": 0.0, "records": [], "reason": reason}
        else:
            print(f"[{budget_s - left:4.0f} s] {stage.name} (at most {limit_s:.0f} s) ...", flush=True)
            result = done[stage.name] = run_stage(stage, context, limit_s, log)
        record["stages"].append(result)
        record |= {"finished": stage is stages[-1], "seconds": round(time.monotonic() - began, 1)}
        write_record(context.out / f"{context.name}.json", record)
    return record["stages"]


def closed(result):
    """Whether nothing may follow this stage: a build that did not end, or a test that failed. Tests that were cut stop
    nothing if some had passed and none had failed."""
    if result is None or result["status"] != "over time":
        return result is not None and result["status"] == "failed"
    return result["stage"] != "tests" or not result["records"][0]["passed"] or bool(result["records"][0]["failed"])


def print_summary(results, path):
    width = max(len(r["stage"]) for r in results)
    print(f"\n{'stage':{width}}  {'status':9}  seconds  numbers")
    for r in results:
        words = " | ".join(w for w in (r.get("summary"), r.get("reason")) if w)
        print(f"{r['stage']:{width}}  {r['status']:9}  {r['seconds']:7.1f}  {words}")
    print(f"records: {path}.json, {path}.log")


# --------------------------------------------------------------------------------------------------- stage: environment

def device(dry_run, **kwargs):
    from bench import scan_cuda

    return scan_cuda.DryRun() if dry_run else scan_cuda.Gpu(**kwargs)


def environment(emit, dry_run, budget_s):
    """This machine's GPU, driver and compilers, and which optional packages can be imported."""
    from bench.measure import LeftOut, imported

    emit(device=device(dry_run).describe())
    for name in ("nvcc", "compute-sanitizer", "g++"):
        path = tool(name)
        run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30) if path else None
        emit(tool=name, path=path, version=run and last_line(run.stdout))
    for name, module in PACKAGES.items():
        try:
            imported(module, "__name__")
            emit(package=name, version=str(getattr(sys.modules[name], "__version__", "")))
        except LeftOut as reason:
            emit(package=name, missing=str(reason))


def tool(name):
    """The path of a program from the CUDA toolkit, or None."""
    folders = [os.path.join(os.environ[v], "bin") for v in ("CUDA_HOME", "CUDA_PATH") if v in os.environ]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join([*folders, "/usr/local/cuda/bin"]))


def environment_summary(rows, text):
    gpu = rows[0]["device"]
    missing = [r.get("tool") or r["package"] for r in rows[1:] if r.get("missing") or not r.get("path", True)]
    return f"{gpu['name']}, torch {gpu['torch']}, CUDA {gpu.get('cuda')}; not found: {', '.join(missing) or 'nothing'}"


# ------------------------------------------------------------------------------------------------- stages: build, small

# (B, T, D, N) in the benchmark and in the GPU tests (tests/test_cuda.py): `build` compiles their kernels
BENCHMARKED = [(64, 1024, 1536, 16), (64, 1024, 1536, 64), (2, 32768, 1536, 16), (2, 32768, 2048, 64)]
TESTED = [(2, 65, 70, 16), (1, 300, 33, 16), (3, 129, 64, 64), (1, 33, 5, 3), (2, 40, 20, 128), (72, 128, 512, 16),
          (72, 40, 512, 64), (1, 3000, 100, 16), (1, 3072, 256, 16), (72, 64, 512, 64), (72, 64, 256, 16),
          (1, 1024, 128, 16)]
TINY = [(2, 64, 64, 16)]  # for a dry run
# family, B, T, D, N, dtype: as many lanes as channels (many rows) or more (few rows), whole chunks and blocks or a
# remainder; whole ones with T = 256 are split into segments
SMALL = [("longhorn", 264, 32, 128, 16, "bfloat16"), ("longhorn", 1, 256, 128, 16, "float32"),
         ("longhorn", 288, 33, 20, 16, "bfloat16"), ("longhorn", 1, 300, 150, 16, "float32"),
         ("longhorn", 1, 40, 70, 64, "bfloat16"), ("mamba", 2, 70, 150, 16, "float32"),
         ("exact", 2, 70, 150, 16, "float32"), ("mamba", 1, 256, 128, 16, "bfloat16")]


def build(emit, dry_run, budget_s):
    """Compile every kernel that the later stages use: one by itself, as long as a user waits, then all in parallel."""
    from concurrent.futures import ThreadPoolExecutor

    from bench.measure import in_one_line
    from kernels import build

    if dry_run:
        emit(kernels=1, seconds=build.build()[1])
        return
    p = device(dry_run).properties
    architecture = f"sm_{p.major}{p.minor}"
    shape = lambda update, size: build.cuda_shape(update, *size, p.multi_processor_count,
                                                        p.shared_memory_per_multiprocessor, update != "exact")
    wanted = dict.fromkeys((build.build_cuda, update, dtype, shape(update, size), architecture)
                           for size in BENCHMARKED + TESTED for update in build.UPDATES for dtype in build.DTYPES)
    wanted |= dict.fromkeys((build.build_cuda, "conv", dtype, (width,), architecture)
                            for width in (4, 1, 3, 8) for dtype in build.DTYPES)  # the models', and tests/test_ops.py's
    start = time.perf_counter()
    first, *arguments = next(iter(wanted))
    emit(first_kernel_seconds=first(*arguments)[1])
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        jobs = {job_key: pool.submit(*job_key) for job_key in wanted}
    failed = [f"{job_key[1:]}: {in_one_line(job.exception())}" for job_key, job in jobs.items() if job.exception()]
    emit(kernels=len(jobs) - len(failed), seconds=time.perf_counter() - start)
    if failed:
        sys.exit(f"{len(failed)} of {len(jobs)} kernels did not compile: {failed[0]}")


def build_summary(rows, text):
    first = "".join(f", the first in {r['first_kernel_seconds']:.1f} s" for r in rows if "first_kernel_seconds" in r)
    return f"{rows[-1]['kernels']} kernels in {rows[-1]['seconds']:.1f} s{first} (0.0: compiled before)"


def small(emit, dry_run, budget_s):
    """A few small scans and convolutions, forward and backward, for the sanitizers."""
    import torch

    from bench import measure, scan_cuda
    from kernels.ops import causal_conv1d

    gpu = device(dry_run, flush_bytes=0)  # the sanitizers would watch a buffer too
    for family, B, T, D, N, dtype in SMALL:
        a = measure.make_inputs(B, T, D, N, measure.DTYPES[dtype])
        a = {n: v.to(gpu.name) for n, v in (measure.as_mamba(a) if family == "mamba" else a).items()}
        results = measure.values_and_gradients(scan_cuda.scans(family, gpu.backend), a)
        if not all(v.isfinite().all() for v in results.values()):
            raise RuntimeError(f"{family} at B={B} T={T} D={D} N={N} {dtype}: a result is not finite")
        emit(scan=family, B=B, T=T, D=D, N=N, dtype=dtype)
    for T in (1, 70, 128):
        a = {"x": torch.randn(2, T, 70).bfloat16(), "weight": torch.randn(70, 4), "state": torch.randn(2, 3, 70)}
        a = {n: v.to(gpu.name) for n, v in a.items()}
        results = results_of(functools.partial(causal_conv1d, backend=gpu.backend), a, torch.ones_like(a["x"]))
        if not all(v.isfinite().all() for v in results.values()):
            raise RuntimeError(f"the convolution at T={T}: a result is not finite")
        emit(convolution=T)


# ------------------------------------------------------------------------------------------- stages: profile, variants

# B, T, D, N; T of the last is split in the backward
TIMED = [(64, 1024, 1536, 16), (64, 1024, 1536, 64), (8, 4096, 1536, 16)]
VARIANTS = ["", "FORWARD_BLOCKS=3", "FORWARD_BLOCKS=5", "BACKWARD_BLOCKS=2", "STAGES=4", "KEYS=8",
            "LONGER=1",  # values for constants in longhorn_scan.cu
            # whether T is split, and how finely: build.cuda_segments
            "SPLIT_BELOW=0", "SPLIT_BELOW=1", "FILL=2", "FILL=4"]


def profiled(emit, dry_run, budget_s):
    """Run each shape of TIMED once, forward and backward, in bfloat16."""
    from bench import measure, scan_cuda

    gpu = device(dry_run, flush_bytes=0)
    for B, T, D, N in TINY if dry_run else TIMED:
        a = measure.make_inputs(B, T, D, N, measure.DTYPES["bfloat16"], device=gpu.name)
        measure.values_and_gradients(scan_cuda.scans("longhorn", gpu.backend), a)
        emit(B=B, T=T, D=D, N=N)


def timed(emit, dry_run, budget_s):
    """Time the scan at the shapes of TIMED, as compiled with $LONGHORN_CUDA_DEFINES, after a check at a small shape."""
    import torch

    from bench import measure, scan_cuda

    gpu = device(dry_run)
    row = scan_cuda.check_case("longhorn", (2, 64, 256, 16), "bfloat16", {}, gpu)
    if not row["right"]:
        sys.exit(scan_cuda.describe_case(row))
    for B, T, D, N in TINY if dry_run else TIMED:
        a = measure.make_inputs(B, T, D, N, measure.DTYPES["bfloat16"], device=gpu.name)
        dy = torch.randn(B, T, D, device=gpu.name).bfloat16()
        contender = {"ours": lambda a=a, dy=dy: scan_cuda.our_longhorn(None, a, dy, gpu)}
        row = scan_cuda.time_contenders(contender, gpu, 3 if dry_run else 20)[0]
        emit(B=B, T=T, D=D, N=N, **row)
        if "reason" in row:
            sys.exit(f"our scan was not timed: {row['reason']}")


def variants(emit, dry_run, budget_s):
    """`timed` for each of VARIANTS, in separate processes."""
    began, failed = time.monotonic(), []
    for defines in VARIANTS[:1] if dry_run else VARIANTS:
        if time.monotonic() - began > budget_s - 20:
            return emit(left_out=defines)
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder) / "records.jsonl"
            command = [sys.executable, __file__, "--stage=timed", f"--record={record}", *["--dry_run"] * dry_run]
            run = subprocess.run(command, capture_output=True, text=True,
                                 env=os.environ | {"LONGHORN_CUDA_DEFINES": defines})
            for row in read_records(record):
                emit(defines=defines, **row)
        if run.returncode:
            failed.append(f"{defines or 'as it is'}: {last_line(run.stdout + run.stderr)}")
            emit(defines=defines, failed=failed[-1])
    if failed and failed[0].startswith("as it is"):  # other variants may fail: they are only trials
        sys.exit(failed[0])


def times_summary(rows, text):
    """A line with the times of each variant or contender at the first shape."""
    rows = [r for r in rows if "forward" in r]
    words = []
    for r in rows:
        if all(r.get(n) == rows[0].get(n) for n in "BTDN"):
            times = " / ".join(f"{1e3 * r[direction]['median_seconds']:.2f}" for direction in ("forward", "backward"))
            words.append(f"{r.get('defines', r['contender']) or 'as it is'} {times}")
    return f"ms forward / backward: {', '.join(words)}"


# --------------------------------------------------------------------------------------------------- stage: convolution

def convolution(emit, dry_run, budget_s):
    """Time the short convolution with SiLU at the models' widths: ours, PyTorch's and causal-conv1d's, in turn."""
    import torch

    from bench import measure, scan_cuda
    from kernels.ops import causal_conv1d

    gpu = device(dry_run)
    bandwidth, failed = gpu.copy_bandwidth(), []
    for B, T, D in [(2, 80, 48)] if dry_run else [(64, 1024, 1536), (16, 4096, 1536), (8, 1024, 2048)]:
        both = torch.randn(B, T, 2 * D, device=gpu.name).bfloat16()  # x is half of a projection, as in the models
        a = {"x": both[..., :D], "weight": torch.randn(D, 4, device=gpu.name), "bias": torch.randn(D, device=gpu.name)}
        dy = torch.randn(B, T, D, device=gpu.name).bfloat16()
        conv = lambda backend: functools.partial(causal_conv1d, backend=backend)
        true = results_of(conv("torch"), {n: v.double() for n, v in a.items()}, dy)
        errors = measure.compare(results_of(conv(gpu.backend), a, dy), true, 64 * measure.EPS)
        failed += [f"wrong at B={B} T={T} D={D}: {n}" for n, r in errors.items() if not r["right"]]
        del true

        def contender(backend, a=a, dy=dy):
            args = measure.leaves(a)
            return scan_cuda.Pass(lambda: causal_conv1d(**args, backend=backend), list(args.values()), dy)

        contenders = {backend: functools.partial(contender, backend) for backend in (gpu.backend, "torch", "fused")}
        for row in scan_cuda.time_contenders(contenders, gpu, 3 if dry_run else 20):
            for direction, passes in (("forward", 2), ("backward", 3)) if "reason" not in row else ():
                times = row[direction]
                times["share_of_bandwidth"] = passes * dy.numel() * 2 / bandwidth / times["median_seconds"]
            emit(B=B, T=T, D=D, copy_bytes_per_second=bandwidth, **row)
            if row["contender"] == gpu.backend and "reason" in row:
                failed.append(f"our convolution was not timed: {row['reason']}")
    if failed:
        sys.exit(failed[0])


def results_of(f, a, dy):
    """{"y", "dx", ...}: f(**a) and its gradients for dy."""
    import torch

    from bench.measure import leaves

    args = leaves(a)
    y = f(**args)
    grads = torch.autograd.grad(y, list(args.values()), dy.to(y.dtype))
    return {"y": y.detach(), **{f"d{n}": g for n, g in zip(args, grads, strict=True)}}


# --------------------------------------------------------------------------------------------------------- stage: loss

def loss(emit, dry_run, budget_s):
    """Time the head and its loss for 32K tokens and a vocabulary of 50,304: slices of several sizes, and PyTorch's."""
    import torch

    from bench import measure, scan_cuda
    from kernels import ops

    gpu = device(dry_run)
    n, D, V = (64, 16, 128) if dry_run else (32768, 768, 50304)
    normal = lambda *shape: torch.randn(shape, device=gpu.name).bfloat16()
    a = {"x": normal(n, D), "weight": normal(V, D) / 32}
    targets, dy = torch.randint(V, (n,), device=gpu.name), torch.ones((), device=gpu.name)
    head = lambda backend, n=n: functools.partial(ops.linear_cross_entropy, targets=targets[:n], backend=backend)
    few = n // 8  # float64 takes 8 bytes per logit
    some = a | {"x": a["x"][:few]}
    true = results_of(head("torch", few), {name: v.double() for name, v in some.items()}, dy)
    errors = measure.compare(results_of(head(None, few), some, dy), true, 0.01)
    if wrong := [name for name, r in errors.items() if not r["right"]]:
        sys.exit(f"the loss is wrong in {', '.join(wrong)}: nothing was timed")

    def contender(at_once, backend=None):
        args = measure.leaves(a)

        def call():
            ops.LOGITS_AT_ONCE[gpu.name] = at_once
            return head(backend)(**args)

        return scan_cuda.Pass(call, list(args.values()), dy)

    contenders = {f"slices of 2^{power}": functools.partial(contender, 1 << power) for power in (24, 26, 28, 30)}
    contenders["torch"] = functools.partial(contender, 1, "torch")
    for row in scan_cuda.time_contenders(contenders, gpu, 3 if dry_run else 20):
        emit(B=n, T=1, D=D, N=V, **row)


def loss_summary(rows, text):
    """The gradient of the logits is made in the forward, with autograd only: so the sum counts."""
    times = (f"{r['contender']} {1e3 * r['forward_backward']['median_seconds']:.1f}" for r in rows if "forward" in r)
    return f"ms forward + backward: {', '.join(times)}"


# --------------------------------------------------------------------------------------- stages that are other programs

def pytest(*arguments):
    for package in ("pytest", "hypothesis"):
        if importlib.util.find_spec(package) is None:
            raise Skip(f"{package} is not installed in this Python")
    several = ["-n", str(min(12, os.cpu_count() or 1)), "--dist=worksteal"]  # most of a test is a loop over time
    several = several if importlib.util.find_spec("xdist") else []
    return [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", *several, *arguments]


def tests(context):
    """The tests called test_gpu..., and those of the convolution with "cuda" as their device. Those of the loss compile
    27 graphs, and are left to make test."""
    files = [f"tests/{path.name}" for path in sorted((ROOT / "tests").glob("test_*.py"))
             if re.search(r"^def test_gpu", path.read_text(), re.M)]
    return pytest(*files, "-k", "test_gpu or test_conv and cuda]")


def fused(context):
    """The operators on other libraries' kernels; those of a library that is not installed are skipped."""
    return pytest("tests/test_fused.py")


def output_of(stage, log):
    """What a stage printed, in the text of a call's log: the lines between its header and the next one."""
    _, *parts = re.split(rf"^===== {stage}: .*\n", log, flags=re.M)
    return re.split(r"^===== \w+: ", parts[-1], flags=re.M)[0] if parts else ""


def tests_read(text):
    """What the tests' output says so far: [{"passed", "skipped": numbers, "failed": names}]."""
    text = re.sub(r"^\[gw\d+\] \[ *\d+%\] ([A-Z]+) (tests/.*\S) *$", r"\2 \1", text, flags=re.M)  # of several processes
    outcomes = re.findall(r"^(tests/\S+::\S.*?) (PASSED|FAILED|ERROR|SKIPPED)", text, re.M)
    count = lambda wanted: sum(outcome == wanted for _, outcome in outcomes)
    return [{"passed": count("PASSED"), "skipped": count("SKIPPED"),
             "failed": [name for name, outcome in outcomes if outcome in ("FAILED", "ERROR")]}]


def tests_summary(rows, text):
    return "{passed} passed, {skipped} skipped, ".format(**rows[0]) + f"{len(rows[0]['failed'])} failed"


def benchmark(context):
    command = [sys.executable, "bench/scan.py", "--device=cuda", f"--budget_s={max(1, context.seconds - 30):.0f}",
               f"--out={context.out / 'scan_cuda.json'}"]
    return command + ["--dry_run", "--rounds=2"] * context.dry_run


def mamba_ssm(context):
    """Compare mamba-ssm's kernels with the loop in float64."""
    if context.dry_run or importlib.util.find_spec("mamba_ssm") is None:
        raise Skip("dry run" if context.dry_run else "mamba-ssm is not installed")
    return [sys.executable, "bench/scan_cuda.py"]


def training(name, T):
    """A stage that times compiled training steps of the 120M models on random tokens, 32K per step, as in train.py."""
    def command(context):
        families = "longhorn,llama"
        sizes = f"--size=120M --block_size={T} --batch_size={32768 // T} --compile --kernels".split()
        if context.dry_run:  # one family without compiling takes seconds
            families, sizes = "longhorn", "--n_layer=1 --n_embd=32 --n_head=2 --vocab_size=128 --block_size=16".split()
        device = "cpu" if context.dry_run else "cuda"
        return [sys.executable, "bench/step.py", f"--families={families}", f"--device={device}", *sizes, "--rounds=5",
                f"--budget_s={max(1, context.seconds / 3):.0f}", f"--out={context.out}/{name}.json"]

    return Stage(name, 70, command, in_short)


def in_short(rows, text):
    return "; ".join(re.findall(r"^in short: (.*)", text, re.M))


def sanitizer(name):
    def command(context):
        path = tool("compute-sanitizer")
        if path is None:
            raise Skip("compute-sanitizer is not installed")
        # without PyTorch's cache each tensor is a separate allocation, so that an access beyond its end is detected
        return ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", path, "--tool", name, "--error-exitcode", "9",
                "--report-api-errors", "no", "--print-limit", "20", *context.inner("small")]

    def verdict(status, text):
        counted = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
        if not counted or "Device not supported" in text:
            return "skipped", f"compute-sanitizer does not work here: {last_line(text)}"
        errors = max(map(int, counted))
        if errors:
            return "failed", f"{errors} errors or hazards, see gpu.log"
        return by_exit_status(status, text)

    return Stage(name, 40, command, verdict=verdict)


def profile(context):
    """Profile small scans with Nsight Compute, to see what limits the kernels."""
    path = tool("ncu")
    if path is None:
        raise Skip("ncu (Nsight Compute) is not installed")
    sections = "SpeedOfLight SchedulerStats WarpStateStats MemoryWorkloadAnalysis LaunchStats Occupancy".split()
    return [path, "--clock-control", "none", *(word for name in sections for word in ("--section", name)),
            "--launch-count", "12", "--kernel-name", "regex:forward|backward", *context.inner("profiled")]


def preset(name, limit_s, *command_line):
    """A stage that runs an experiment's sweep for as long as there is time; the same command resumes it."""
    def command(context):
        inside = context.out.is_relative_to(ROOT / "results")  # where no checkpoints belong
        out = (ROOT / "out" if inside else context.out) / name
        return ["timeout", f"{context.seconds:.0f}", sys.executable, *command_line, f"--out={out}",
                *["--dry-run"] * context.dry_run]

    def verdict(status, text):
        if status == 124:  # from timeout
            return "ok", "its time is up: the same command resumes it"
        return by_exit_status(status, text)

    return Stage(name, limit_s, command, lambda rows, text: last_line(text), verdict)


FUNCTIONS = {f.__name__: f for f in (environment, build, convolution, loss, small, profiled, timed, variants)}
# At most 530 s per call: the build takes 95 s on 4 cores, 25 on 16, and what it leaves goes to the next stages.
STAGES = [Stage("environment", 40, lambda c: c.inner("environment"), environment_summary),
          Stage("build", 150, lambda c: c.inner("build"), build_summary),
          Stage("tests", 200, tests, tests_summary, read=tests_read),
          sanitizer("memcheck"), sanitizer("racecheck"),
          Stage("mamba_ssm", 30, mamba_ssm, in_short),
          Stage("fused", 30, fused, tests_summary, read=tests_read),
          Stage("benchmark", 160, benchmark, in_short),
          Stage("profile", 40, profile),
          Stage("convolution", 30, lambda c: c.inner("convolution"), times_summary),
          Stage("loss", 30, lambda c: c.inner("loss"), loss_summary),
          Stage("variants", 80, lambda c: c.inner("variants"), times_summary),
          training("training", 1024), training("training_4096", 4096), training("training_8192", 8192),
          preset("recall_gpu", 60, "experiments/recall/mqar.py", "run", "--preset=gpu"),
          preset("table1_gpu", 70, "experiments/scaling/sweep.py", "gpu")]
GATES = ("build", "tests")
CALLS = {"correctness": ("environment", "build", "tests", "memcheck", "racecheck", "mamba_ssm", "fused"),
         "speed": ("environment", "build", "benchmark", "profile", "convolution", "loss", "variants"),
         "training": ("environment", "build", "training", "training_4096", "training_8192", "recall_gpu", "table1_gpu")}


# ----------------------------------------------------------------------------------------------------------------- main

def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [s.name for s in STAGES]
    parser.add_argument("--out", help="folder for the records (results/gpu_<device>/; with --dry-run out/gpu_dry/)")
    parser.add_argument("--budget_s", type=float, default=BUDGET_S, help="seconds per call (%(default)s)")
    parser.add_argument("--stages", default="", help=f"comma-separated calls ({', '.join(CALLS)}: all), or stages "
                        f"({', '.join(known)}), which make one call")
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="tiny sizes on the CPU, as a test")
    parser.add_argument("--stage", choices=FUNCTIONS, help="run one stage in this process (used by the runner)")
    parser.add_argument("--record", help="with --stage: append its records to this file, as JSON lines")
    args = parser.parse_args(argv)
    args.out = Path(args.out or (ROOT / "out/gpu_dry" if args.dry_run else device_folder())).resolve()
    names = args.stages.split(",") if args.stages else list(CALLS)
    alone = [name for name in names if name not in CALLS]
    unknown = [name for name in alone if name not in known]
    if unknown:
        parser.error(f"--stages={unknown[0]}: no such call or stage; they are {', '.join([*CALLS, *known])}")
    args.calls = {f"gpu_{name}": CALLS[name] for name in names if name in CALLS} | ({"gpu": alone} if alone else {})
    if not args.budget_s >= 1:
        parser.error(f"--budget_s={args.budget_s:g}: must be at least 1")
    return args


def device_folder():
    """results/gpu_nvidia_h100_80gb_hbm3, or results/ without a GPU, where nothing will be measured."""
    try:
        import torch
    except ImportError:  # `main` says so
        return ROOT / "results"
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return ROOT / "results" / ("gpu_" + re.sub(r"\W+", "_", name.lower())) if name else ROOT / "results"


def run_function(args):
    """Run a stage that is a function of this file; its records go to args.record, one line each."""
    def emit(**record):
        line = json.dumps(record)
        if args.record:
            with open(args.record, "a") as file:
                file.write(line + "\n")
        print(line, flush=True)  # for the log: the file is lost if the runner is killed too

    FUNCTIONS[args.stage](emit, args.dry_run, args.budget_s)


def main(argv=None):
    args = parse(argv)
    if args.stage:
        return run_function(args)
    if args.dry_run and args.out.is_relative_to(ROOT / "results"):
        raise ConfigError("--dry_run measures nothing, so its records do not belong in results/: choose another --out")
    try:
        import torch
    except ImportError:
        raise ConfigError(f"{sys.executable} has no torch: choose another interpreter with make gpu PYTHON=..., or let "
                          "plain make gpu install .venv") from None
    if not args.dry_run and not torch.cuda.is_available():
        raise ConfigError(f"PyTorch {torch.__version__} sees no GPU here; nothing was run and nothing written")
    from bench.measure import check_out, new_record

    for name in args.calls:
        check_out(args.out / f"{name}.json", "another --out (make gpu OUT=...)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the running stage
    results, done = [], {}
    for name, stages in args.calls.items():
        print(f"{name}: at most {args.budget_s:.0f} s")
        stages = [s for s in STAGES if s.name in stages]
        ran = run_all(stages, Context(args.out, args.dry_run, name=name), args.budget_s, new_record("gpu"), done)
        print_summary(ran, args.out / name)
        results += ran
    return int(any(r["status"] in ("failed", "over time", "left out") for r in results))


if __name__ == "__main__":
    with main_error("bench/gpu.py"):
        sys.exit(main())
