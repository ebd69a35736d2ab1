"""Everything there is to know from a machine with a GPU, in one command of at most nine minutes, without a network.

    make gpu                             # in .venv, like the other targets
    make gpu PYTHON=python3              # with the interpreter given; installs nothing
    make gpu OUT=elsewhere ARGS="--stages=training"

Stages, each a process of its own with a time limit; what one lacks is said and skipped, and what fails stops no other:
environment, build, tests, gradients, benchmark, convolution, training, memcheck, racecheck, initcheck. Out come
gpu.json (written after every stage), gpu.log (all output), scan_cuda.json and .png from bench/scan.py. Exit status 1 if any stage failed.

The surprise: a stage hands its numbers over a file, line by line, so one that is killed half way keeps what it had found.
"""

import argparse
import datetime
import functools
import importlib
import importlib.util
import json
import os
import re
import runpy
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

import records  # noqa: E402
from configurator import main_error  # noqa: E402

BUDGET_S = 530
PATIENCE_S = 3  # between the request to end and the end
OPTIONAL = {"mamba_ssm": "mamba_ssm.ops.selective_scan_interface", "fla": "fla.ops.gla", "flash_attn": "flash_attn",
            "causal_conv1d": "causal_conv1d", "triton": "triton", "pytest": "pytest", "hypothesis": "hypothesis",
            "matplotlib": "matplotlib", "safetensors": "safetensors", "tqdm": "tqdm"}


# ---------------------------------------------------------------------------------------------------------- the runner

class Skip(Exception):
    """Why a stage does not run here."""


class Stage(NamedTuple):
    name: str
    limit_s: float
    command: object                       # (context) -> [argument, ...]; may raise Skip
    summary: object = lambda records, text: ""  # (records, output) -> the numbers that matter, in a line
    verdict: object = None                # (exit status, output) -> (status, reason) where the exit status does not say


class Context(NamedTuple):
    out: Path
    dry_run: bool
    seconds: float = 0.0                  # that the stage has
    record: str = ""                      # the file that it writes its records to

    def inner(self, stage):
        """The command of a stage that is a function of this file."""
        command = [sys.executable, str(Path(__file__).resolve()), f"--stage={stage}", f"--record={self.record}",
                   f"--budget_s={self.seconds:.0f}"]
        return command + ["--dry_run"] * self.dry_run


def run_limited(command, limit_s, log, environment=None):
    """Run a command with its output appended to the file `log`; returns (exit status or None if it was killed, seconds).

    At its limit it gets SIGTERM and, PATIENCE_S later, SIGKILL, with all that it started.
    """
    start = time.monotonic()
    with open(log, "ab") as file:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
                                 env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}, start_new_session=True)
        try:
            status = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:  # also on the way out of an interrupt
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(child.pid, number)
                except (ProcessLookupError, PermissionError):
                    pass
                if child.poll() is None:
                    try:
                        child.wait(PATIENCE_S)
                    except subprocess.TimeoutExpired:
                        pass
    return status, time.monotonic() - start


def read_records(path):
    """The JSON lines of a file; a torn last line is dropped."""
    found = []
    for line in Path(path).read_text(errors="replace").splitlines() if Path(path).exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def run_stage(stage, context, limit_s, log, environment=None):
    """One stage, as a record: status is ok, failed, over time or skipped; with its reason, seconds, records and last words."""
    with tempfile.TemporaryDirectory() as folder:
        context = context._replace(seconds=max(1.0, limit_s - 5), record=str(Path(folder) / "records.jsonl"))
        result = {"stage": stage.name, "limit_seconds": round(limit_s, 1)}
        try:
            command = stage.command(context)
        except Skip as reason:
            return {**result, "status": "skipped", "reason": str(reason), "seconds": 0.0, "records": []}
        shown = [Path(sys.executable).name if word == sys.executable else word.replace(f"{ROOT}/", "")
                 for word in command if not word.startswith("--record=")]
        with open(log, "a") as file:
            file.write(f"\n===== {stage.name}: {' '.join(shown)}\n")
        begin = os.path.getsize(log)
        try:
            status, seconds = run_limited(command, limit_s, log, environment)
        except OSError as error:
            return {**result, "command": shown, "status": "failed", "reason": str(error), "seconds": 0.0, "records": []}
        with open(log, "rb") as file:
            file.seek(begin)
            text = file.read().decode(errors="replace")
        found = read_records(context.record)
    result |= {"command": shown, "exit_status": status, "seconds": round(seconds, 2), "records": found}
    if status is None:
        verdict = "over time", f"killed at its limit of {limit_s:.0f} s; what it had found by then is kept"
    elif stage.verdict and status >= 0:
        verdict = stage.verdict(status, text)
    elif status < 0:
        verdict = "failed", f"ended by signal {-status} ({signal.Signals(-status).name})"
    else:
        verdict = ("ok", None) if status == 0 else ("failed", last_words(text) or f"exit status {status}")
    result["status"], result["reason"] = verdict
    try:
        result["summary"] = stage.summary(found, text)
    except Exception as error:  # a summary is a convenience
        result["summary"] = f"no summary ({type(error).__name__}: {error})"
    result["last_lines"] = text[-1500:].splitlines()[-12:] if result["status"] != "ok" else []
    return result


def last_words(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:240] if lines else ""


def run_all(stages, context, budget_s, environment=None, about=None):
    """All stages within the budget; gpu.json is written before the first and after each. Returns their records."""
    context.out.mkdir(parents=True, exist_ok=True)
    log, began = context.out / "gpu.log", time.monotonic()
    log.write_text("")
    stretch = max(1.0, budget_s / sum(stage.limit_s for stage in stages))  # fewer stages may take longer each
    record = {"record": "gpu", "dry_run": context.dry_run, "finished": False, "budget_seconds": budget_s,
              "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"), **(about or {}), "stages": []}

    def save():
        from bench.measure import finite

        records.write_json(context.out / "gpu.json", finite(record))

    save()
    for stage in stages:
        spent = time.monotonic() - began
        limit_s = min(stage.limit_s * stretch, budget_s - spent)
        if budget_s - spent < 5:
            result = {"stage": stage.name, "status": "left out", "seconds": 0.0, "records": [],
                      "reason": f"{spent:.0f} of {budget_s:.0f} s are spent: --stages={stage.name} runs it alone"}
        else:
            print(f"[{spent:4.0f} s] {stage.name} (at most {limit_s:.0f} s) ...", flush=True)
            result = run_stage(stage, context, limit_s, log, environment)
        record["stages"].append(result)
        save()
        words = result.get("summary") or result.get("reason") or ""
        print(f"[{time.monotonic() - began:4.0f} s] {stage.name}: {result['status']} in {result['seconds']:.0f} s"
              + (f": {words}" if words else ""), flush=True)
        for line in result.get("last_lines", []):
            print(f"         | {line}")
    record["finished"], record["seconds"] = True, round(time.monotonic() - began, 1)
    save()
    return record["stages"]


def print_summary(results, out):
    width = max(len(r["stage"]) for r in results)
    print(f"\n{'stage':{width}}  {'status':9}  seconds  numbers")
    for r in results:
        words = " | ".join(w for w in (r.get("summary"), r.get("reason")) if w)
        print(f"{r['stage']:{width}}  {r['status']:9}  {r['seconds']:7.1f}  {words}")
    print(f"records: {out / 'gpu.json'}, {out / 'gpu.log'}")


def worst(results):
    """The exit status: 1 where a stage failed, ran over its time or found no time at all."""
    return int(any(r["status"] in ("failed", "over time", "left out") for r in results))


# ---------------------------------------------------------------------------------------------------- stage: environment

def environment(emit, dry_run, budget_s):
    """What this machine has: driver, compilers, and which optional packages import."""
    import torch

    from bench import scan_cuda
    from bench.measure import in_one_line

    device = scan_cuda.DryRun() if dry_run else scan_cuda.Gpu()
    emit(device=device.describe(), sources=scan_cuda.sources())
    for name, *arguments in (("nvidia-smi",), ("nvcc", "--version"), ("compute-sanitizer", "--version"), ("g++", "--version")):
        path = tool(name)
        if path is None:
            emit(tool=name, found=False)
            continue
        run = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=30)
        lines = [line for line in (run.stdout + run.stderr).splitlines() if line.strip()]
        print("\n".join(lines))
        version = next((line.strip() for line in lines if re.search(r"release|version", line, re.I)), lines[0] if lines else "")
        emit(tool=name, found=True, path=path, exit_status=run.returncode, version=version[:160])
    nvrtc = sorted(p.name for p in Path(torch.__file__).parent.parent.glob("nvidia/**/libnvrtc.so*"))
    emit(tool="libnvrtc", found=bool(nvrtc), version=", ".join(nvrtc))
    for name, module in OPTIONAL.items():
        try:
            importlib.import_module(module)
            emit(package=name, imports=True, version=str(getattr(sys.modules[name], "__version__", "")))
        except Exception as error:  # an extension built for another PyTorch fails in its own ways
            emit(package=name, imports=False, reason=in_one_line(error))


def tool(name):
    """The path of a program of the CUDA toolkit, or None."""
    folders = [os.path.join(os.environ[v], "bin") for v in ("CUDA_HOME", "CUDA_PATH") if v in os.environ]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join([*folders, "/usr/local/cuda/bin"]))


def environment_summary(found, text):
    device = next((r["device"] for r in found if "device" in r), {})
    fused = ("mamba_ssm", "fla", "flash_attn", "causal_conv1d")
    packages = [r["package"] for r in found if r.get("imports") and r["package"] in fused]
    driver = (device.get("nvidia_smi") or {}).get("driver_version", "unknown")
    missing = [r["tool"] for r in found if r.get("found") is False]
    return (f"{device.get('name')}, driver {driver}, torch {device.get('torch')}, CUDA {device.get('cuda')}; fused packages: "
            f"{', '.join(packages) or 'none'}" + (f"; not found: {', '.join(missing)}" if missing else ""))


# ---------------------------------------------------------------------------------------------- stages: build, one small scan

# family, B, T, D, N, dtype: what the later stages need, and the small ones for the sanitizer
BUILDS = [("longhorn", 64, 32, 1536, 16, "bfloat16"), ("longhorn", 64, 32, 1536, 16, "float32"),
          ("mamba", 64, 32, 1536, 16, "bfloat16"), ("longhorn", 64, 32, 1536, 64, "bfloat16"),
          ("mamba", 64, 32, 1536, 64, "bfloat16"), ("mamba", 64, 32, 1536, 16, "float32"),
          ("longhorn", 64, 32, 1536, 16, "float16"), ("exact", 64, 32, 1536, 16, "bfloat16")]
# As many lanes as channels where rows are many, more lanes where few, whole chunks and blocks or a rest; T of 256 and more is
# split into segments.
SMALL = [("longhorn", 264, 32, 128, 16, "bfloat16"), ("longhorn", 1, 256, 128, 16, "float32"),
         ("longhorn", 288, 33, 20, 16, "bfloat16"), ("longhorn", 1, 300, 150, 16, "float32"),
         ("longhorn", 1, 40, 70, 64, "bfloat16"), ("mamba", 2, 70, 150, 16, "float32"), ("exact", 2, 70, 150, 16, "float32"),
         ("mamba", 1, 300, 150, 16, "bfloat16")]
# (B, T, D, N) of the tests on a GPU (tests/test_cuda.py), whose kernels `build` compiles side by side beforehand.
TESTED = [(2, 65, 70, 16), (1, 300, 33, 16), (3, 129, 64, 64), (1, 33, 5, 3), (2, 40, 20, 128), (72, 128, 512, 16),
          (72, 40, 512, 64), (1, 3000, 100, 16), (72, 64, 512, 64), (72, 64, 256, 16), (1, 1024, 128, 16)]


def one_scan(family, B, T, D, N, dtype, device):
    """Seconds of forward and backward at a shape, from inputs made on the CPU; RuntimeError where a result is not finite."""
    import torch

    from bench import measure, scan_cuda

    a = measure.make_inputs(B, T, D, N, getattr(torch, dtype))
    a = {n: v.to(device.name) for n, v in (measure.as_mamba(a) if family == "mamba" else a).items()}
    start = time.perf_counter()
    args = {n: v.requires_grad_() for n, v in a.items()}
    y, hT = scan_cuda.scans(family, device.backend)[0](**args)
    grads = torch.autograd.grad(y, list(args.values()), torch.ones_like(y))
    results = [v.detach().cpu() for v in (y, hT, *grads)]
    seconds = time.perf_counter() - start
    if not all(v.isfinite().all() for v in results):
        raise RuntimeError(f"{family} at B={B} T={T} D={D} N={N} {dtype}: a result is not finite")
    return seconds


def tested_kernels():
    """The arguments of build.build_cuda for every kernel that the tests will ask for on this GPU."""
    import torch

    from kernels import build

    gpu = torch.cuda.get_device_properties(0)
    shapes = {(update, build.cuda_shape(*shape, gpu.multi_processor_count, update != "exact"))
              for update in build.UPDATES for shape in TESTED}
    return [(update, dtype, shape, f"sm_{gpu.major}{gpu.minor}") for update, shape in sorted(shapes) for dtype in build.DTYPES]


def build(emit, dry_run, budget_s):
    """The first call of every kernel that the stages after this one use: it compiles, or finds what was compiled before."""
    from concurrent.futures import ThreadPoolExecutor

    from bench import measure, scan_cuda
    from kernels import build

    device, failed = scan_cuda.DryRun() if dry_run else scan_cuda.Gpu(), []

    def first_call(what):
        family, B, T, D, N, dtype = what
        if dry_run:
            B, D = min(B, 2), min(D, 64)
        try:
            emit(build=what, first_call_seconds=one_scan(family, B, T, D, N, dtype, device))
        except Exception as error:
            failed.append(f"{family} N={N} {dtype}: {measure.in_one_line(error)}")
            emit(build=what, reason=measure.in_one_line(error))

    def built(build, *what):
        try:
            return bool(build(*what))
        except OSError as error:
            failed.append(measure.in_one_line(error))
            return False

    for what in BUILDS[:1]:
        first_call(what)  # alone: the time that a user waits for
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        if not dry_run:
            start = time.perf_counter()
            wanted = tested_kernels()
            scans = pool.map(lambda kernels: built(build.build_cuda, *kernels), wanted)
            convolutions = pool.map(lambda dtype: built(build.build_cuda_conv, dtype, 4, wanted[0][-1]), build.DTYPES)
            emit(kernels_of_the_tests=sum([*scans, *convolutions]), seconds=time.perf_counter() - start)
    for what in BUILDS[1:] + SMALL:  # one after another: of an error that all later calls report too, the first is named
        first_call(what)
    if failed:
        sys.exit(f"{len(failed)} did not build or run: {failed[0]}")


def build_summary(found, text):
    first = next((r["first_call_seconds"] for r in found if "first_call_seconds" in r), None)
    good = sum("first_call_seconds" in r for r in found)
    how = "compiled" if "built in" in text else "cached"
    return f"{good} of {len(BUILDS + SMALL)} run" + ("" if first is None else f"; the first call took {first:.1f} s ({how})")


def small(emit, dry_run, budget_s):
    """A few small scans and convolutions, forward and backward: what the sanitizer watches."""
    import torch

    from bench import scan_cuda
    from kernels.ops import causal_conv1d

    class Small(scan_cuda.Gpu):
        def __init__(self):  # no buffers: they would be watched too
            pass

    for what in SMALL:
        emit(scan=what, seconds=one_scan(*what, scan_cuda.DryRun() if dry_run else Small()))
    device = "cpu" if dry_run else "cuda"
    for T in (1, 70, 128):
        a = {"x": torch.randn(2, T, 70).bfloat16(), "weight": torch.randn(70, 4), "state": torch.randn(2, 3, 70)}
        results = conv_steps(causal_conv1d, {n: v.to(device) for n, v in a.items()}, torch.ones(2, T, 70, device=device))[2]
        if not all(v.isfinite().all() for v in results.values()):
            raise RuntimeError(f"the convolution at T={T}: a result is not finite")
        emit(convolution=T)


# ------------------------------------------------------------------------------------------------------ stage: gradients

PAPER = (64, 1024, 1536, 16)
GRADIENTS = [("longhorn", PAPER, "bfloat16", {}), ("longhorn", PAPER, "float32", {}), ("mamba", PAPER, "bfloat16", {}),
             ("longhorn", PAPER, "bfloat16", {"key": 1000.0, "logit": 1000.0}), ("longhorn", PAPER, "float32", {"key": 1000.0}),
             ("longhorn", (16, 4096, 1536, 16), "bfloat16", {}), ("longhorn", (64, 1024, 1536, 64), "bfloat16", {}),
             ("exact", PAPER, "bfloat16", {}), ("mamba", PAPER, "float32", {}), ("longhorn", PAPER, "float32", {"logit": 1000.0}),
             ("longhorn", (2, 4096, 1536, 16), "bfloat16", {})]  # few rows: T in segments


def gradients(emit, dry_run, budget_s):
    """Every result and gradient at the paper's shapes against the loop in float64 on the same GPU, the whole problem: its
    PyTorch form recomputes each 64 steps, so that float64 fits. Then: two runs to the bit, and what the backward keeps."""
    import torch

    from bench import measure, scan_cuda

    device, began, wrong, longest = scan_cuda.DryRun() if dry_run else scan_cuda.Gpu(), time.perf_counter(), [], 0.0

    def compare(family, shape, dtype, extreme):
        a = measure.make_inputs(*shape, getattr(torch, dtype), device=device.name, **extreme)
        a = measure.as_mamba(a) if family == "mamba" else a
        kernels, loop = scan_cuda.scans(family, device.backend)[0], scan_cuda.scans(family, "torch")[0]
        got = measure.values_and_gradients(kernels, a)
        again = measure.values_and_gradients(kernels, a)
        same = all(torch.equal(again[n], v) for n, v in got.items())
        del again
        kept = kept_bytes(lambda: kernels(**{n: v.detach().requires_grad_() for n, v in a.items()}), a)
        true = measure.values_and_gradients(loop, a, torch.float64)
        found = measure.compare(got, true, 2e-5 if extreme else 64 * measure.EPS)
        B, T, D, N = shape
        return {"results": found, "two_runs_agree_to_the_bit": same,
                "not_finite": sum(int((~v.isfinite()).sum()) for v in got.values()), "kept_bytes": kept,
                "kept_bytes_a_token_channel_and_state": kept / (B * T * D * N)}

    for family, shape, dtype, extreme in GRADIENTS:
        if dry_run:
            shape = (min(shape[0], 2), min(shape[1], 80), 48, shape[3])
        case = dict(family=family, **dict(zip("BTDN", shape, strict=True)), dtype=dtype, **extreme)
        start = time.perf_counter()
        if start - began + longest * shape[1] / 1024 > budget_s:
            emit(**case, left_out=f"{start - began:.0f} of {budget_s:.0f} s are spent")
            continue
        try:
            row = compare(family, shape, dtype, extreme)
            row["right"] = all(r["right"] for r in row["results"].values()) and not row["not_finite"] and \
                row["two_runs_agree_to_the_bit"]
        except Exception as error:
            row = {"right": False, "reason": measure.in_one_line(error)}
        row["seconds"] = time.perf_counter() - start
        longest = max(longest, row["seconds"] * 1024 / shape[1])
        emit(**case, **measure.finite(row))
        words = scan_cuda.describe_case({**case, **row})
        print(f"{family}: {words}" + ("" if row.get("two_runs_agree_to_the_bit", True) else "; TWO RUNS DIFFER"), flush=True)
        if not row["right"]:
            wrong.append(f"{family}: {words}")
        device.free()
        if not device.alive():
            sys.exit(f"the GPU's context is lost after {family}: {words}")
    if wrong:
        sys.exit(f"{len(wrong)} of {len(GRADIENTS)} wrong: {wrong[0]}")


def kept_bytes(forward, a):
    """Bytes that autograd keeps of a call beside its inputs."""
    import torch

    kept, given = {}, {v.untyped_storage().data_ptr() for v in a.values()}

    def pack(v):
        if v.untyped_storage().data_ptr() not in given:
            kept[v.untyped_storage().data_ptr()] = v.untyped_storage().nbytes()
        return v

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda v: v):
        results = forward()
    del results
    return sum(kept.values())


def gradients_summary(found, text):
    done = [r for r in found if "right" in r]
    errors = {}
    for r in done:
        for name, e in (r.get("results") or {}).items():
            if e["relative_error"] is not None and not ("key" in r or "logit" in r):
                errors.setdefault(r["dtype"], []).append((e["relative_error"], name))
    worst_of = ", ".join(f"{dtype} {max(e)[0]:.1e} ({max(e)[1]})" for dtype, e in errors.items())
    kept = next((r["kept_bytes_a_token_channel_and_state"] for r in done if "kept_bytes" in r), None)
    return (f"{sum(r['right'] for r in done)} of {len(done)} right; worst {worst_of or '-'}"
            + ("" if kept is None else f"; keeps {kept:.3f} bytes a token, channel and state"))


# ---------------------------------------------------------------------------------------------------- stage: convolution

def convolution(emit, dry_run, budget_s):
    """The short convolution with SiLU at the models' widths: ours, PyTorch's and causal-conv1d's, round after round."""
    import torch

    from bench import measure, scan_cuda
    from kernels import fused
    from kernels.ops import causal_conv1d

    device = scan_cuda.DryRun() if dry_run else scan_cuda.Gpu()
    bandwidth, lost = device.copy_bandwidth(), []
    contenders = {"ours": lambda **a: causal_conv1d(**a, backend=device.backend),
                  "torch": lambda **a: causal_conv1d(**a, backend="torch")}
    try:
        theirs = fused.load("causal-conv1d", "causal_conv1d", "causal_conv1d_fn")
        contenders["causal_conv1d"] = functools.partial(fused.mamba_conv, theirs)
    except RuntimeError as error:
        emit(contender="causal_conv1d", left_out=measure.in_one_line(error))
    for B, T, D in [(2, 80, 48)] if dry_run else [(64, 1024, 1536), (16, 4096, 1536), (8, 1024, 2048)]:
        both = torch.randn(B, T, 2 * D, device=device.name).bfloat16()  # x is half of a projection, as in the models
        a = {"x": both[..., :D], "weight": torch.randn(D, 4, device=device.name), "bias": torch.randn(D, device=device.name)}
        dy, steps, seconds = torch.randn_like(a["x"]).contiguous(), {}, {}
        for name, f in contenders.items():
            try:
                *steps[name], got = conv_steps(f, a, dy)
                seconds[name] = []
                if name == "ours":  # before it is timed
                    true = conv_steps(contenders["torch"], {n: v.double() for n, v in a.items()}, dy)[2]
                    wrong = [n for n, v in measure.compare(got, true, 64 * measure.EPS).items() if not v["right"]]
                    lost += [f"wrong at B={B} T={T} D={D}: {', '.join(wrong)}"] * bool(wrong)
                    del true
                del got
            except Exception as error:
                emit(contender=name, B=B, T=T, D=D, reason=measure.in_one_line(error))
                lost += [f"{name} at B={B} T={T} D={D}: {measure.in_one_line(error)}"] * (name == "ours")
        for _ in range(3 if dry_run else 20):
            for name in seconds:
                seconds[name].append([device.laps(step)[0] for step in steps[name]])
        for name, laps in seconds.items():
            row = {}
            for what, passes, times in zip(("forward", "backward"), (2, 3), zip(*laps, strict=True), strict=True):
                row[what] = measure.spread(times)
                row[what]["share_of_bandwidth"] = passes * dy.numel() * 2 / bandwidth / row[what]["median_seconds"]
            emit(contender=name, B=B, T=T, D=D, **row)
            print(f"{name} B={B} T={T} D={D}: " + ", ".join(f"{what} {r['median_seconds'] * 1e3:.3f} ms, "
                  f"{r['share_of_bandwidth']:.0%} of the copy bandwidth" for what, r in row.items()), flush=True)
    if lost:
        sys.exit(lost[0])


def conv_steps(f, a, dy):
    """(forward, backward) of f(**a) as calls without arguments, and what they gave by name."""
    import torch

    args, kept = {n: v.detach().requires_grad_() for n, v in a.items()}, {}

    def forward():
        kept["y"] = f(**args)
        return kept["y"]

    def backward():
        return torch.autograd.grad(kept["y"], list(args.values()), dy.to(kept["y"].dtype))

    results = {"y": forward().detach(), **{f"d{n}": g for n, g in zip(args, backward(), strict=True)}}
    return forward, backward, results


def convolution_summary(found, text):
    rows = [r for r in found if "forward" in r]
    words = [f"{r['contender']} " + " / ".join(f"{r[p]['median_seconds'] * 1e3:.2f}" for p in ("forward", "backward"))
             for r in rows if all(r[n] == rows[0][n] for n in "BTD")]
    return f"ms forward / backward: {', '.join(words) or 'none'}"


# ------------------------------------------------------------------------------------------------------- stage: training

def training(emit, dry_run, budget_s):
    """Training steps of the 120M models on random tokens, eager and, while time is left, compiled."""
    import torch

    from bench import measure

    began, compile_seconds = time.perf_counter(), []
    torch.set_float32_matmul_precision("high")  # as train.py does
    try:
        from train import peak_flops
    except ImportError as error:
        print(f"no MFU: train.py cannot be imported ({error})")
        peak_flops = lambda name: None
    # the pairs that matter most first: what train.py does at the paper's length, then where LLaMA is said to fall behind
    pairs = [(False, 1024), (True, 1024), (False, 4096), (False, 8192), (True, 4096), (True, 8192)]
    runs = [(compile_, T, family) for compile_, T in pairs for family in ("longhorn", "llama")]
    failed, compile_fails, tokens_of = [], set(), {}
    for compile_, T, family in runs:
        what = dict(model=f"{family}_120m", T=T // 64 if dry_run else T, compiled=compile_)
        left = budget_s - (time.perf_counter() - began)
        if left < (1.3 * max(compile_seconds, default=60.0) if compile_ else 5):  # 60: a guess, until one is known
            emit(**what, left_out=f"{left:.0f} s left")
            continue
        if compile_ and family in compile_fails:
            emit(**what, left_out="torch.compile failed at a shorter length")
            continue
        if compile_ and dry_run and T > 1024:
            emit(**what, left_out="dry run")
            continue
        # As much as memory holds, for all runs of a length alike: where T is long rows are few, and many fill a GPU better.
        start, row, tokens = time.perf_counter(), None, tokens_of.get(T, 131072)
        while row is None:
            try:
                row = train_steps(family, what["T"], compile_, max(1, tokens // T), dry_run, peak_flops)
            except torch.OutOfMemoryError:
                words = "out of memory"
            except Exception as error:
                words = measure.in_one_line(error)
            if row is None and words == "out of memory" and tokens > T:
                tokens //= 2
                clean_up(dry_run)
            elif row is None:
                row = {"reason": words}
                failed.append(f"{what['model']} at T={T}{' compiled' if compile_ else ''}: {words}")
                if compile_:
                    compile_fails.add(family)
        tokens_of[T] = tokens
        row["seconds"] = time.perf_counter() - start
        if compile_:
            compile_seconds.append(row["seconds"])
        emit(**what, **measure.finite(row))
        print(f"{what['model']} T={what['T']}{' compiled' if compile_ else ''}: {speed(row)}", flush=True)
        clean_up(dry_run)
    eager = [w for w in failed if " compiled" not in w]
    if eager:
        sys.exit(f"{len(failed)} of {len(runs)} runs failed: {eager[0]}")


def speed(row):
    if "reason" in row:
        return row["reason"]
    return (f"{row['tokens_per_second']:,.0f} tokens/s" + (f", MFU {row['mfu']:.1%}" if row["mfu"] else "")
            + (f", peak {row['peak_bytes'] / 2**30:.1f} GiB" if row["peak_bytes"] else "")
            + f", loss {row['first_loss']:.3f} -> {row['last_loss']:.3f}")


def clean_up(dry_run):
    import gc

    import torch

    gc.collect()
    torch._dynamo.reset()
    if not dry_run:
        torch.cuda.empty_cache()


def train_steps(family, T, compile_, batch_size, dry_run, peak_flops, seconds=3.0):
    """Forward, backward and AdamW on random tokens, as train.py does one micro-batch a step; a record of the speed."""
    from dataclasses import fields

    import torch

    from model import LM, ModelConfig

    device = torch.device("cpu" if dry_run else "cuda")
    values = runpy.run_path(str(ROOT / "config" / f"{family}_120m.py"))
    values = {f.name: values[f.name] for f in fields(ModelConfig) if f.name in values} | {"block_size": T}
    if dry_run:
        values |= {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 128}
    torch.manual_seed(0)
    with device:
        model = LM(ModelConfig(**values))
    optimizer = torch.optim.AdamW(model.optimizer_groups(0.1), lr=6e-4, betas=(0.9, 0.95), fused=True)
    runs = torch.compile(model) if compile_ else model
    batches = [torch.randint(values["vocab_size"], (batch_size, T + 1), device=device) for _ in range(4)]
    synchronize = (lambda: None) if dry_run else torch.cuda.synchronize

    def step(i):
        tokens = batches[i % len(batches)]
        with torch.autocast(device.type, torch.bfloat16):
            loss = runs(tokens[:, :-1], tokens[:, 1:], loss_only=True)[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    start = time.perf_counter()
    first_loss = step(0).item()
    first_step = time.perf_counter() - start
    step(1), step(2)
    synchronize()
    if not dry_run:
        torch.cuda.reset_peak_memory_stats()
    steps, times = 0, []
    while steps < 6 or (sum(times) < seconds and steps < 40 and not dry_run):
        start = time.perf_counter()
        loss = [step(3 + steps + i) for i in range(2)][-1].item()  # waits for the device every other step
        times.append(time.perf_counter() - start)
        steps += 2
    rate = 2 * batch_size * T / sorted(times)[len(times) // 2]
    flops = model.flops_per_token(T)["total"]
    peak = None if dry_run else peak_flops(torch.cuda.get_device_name())
    if not loss == loss:
        raise RuntimeError(f"the loss is {loss} after {steps + 3} steps")
    return {"batch_size": batch_size, "steps": steps, "tokens_per_second": rate, "first_step_seconds": first_step,
            "pair_of_steps_seconds": [round(t, 5) for t in times], "flops_per_token": flops, "peak_flops": peak,
            "mfu": rate * flops / peak if peak else None, "parameters": model.parameter_count()["total"],
            "peak_bytes": None if dry_run else torch.cuda.max_memory_allocated(), "first_loss": first_loss, "last_loss": loss}


def training_summary(found, text):
    rows = {(r["model"].split("_")[0], r["T"], r["compiled"]): r for r in found if "tokens_per_second" in r}
    words = []
    for T, compiled in sorted({key[1:] for key in rows}):  # like with like: compiled or not
        pair = [rows.get((family, T, compiled)) for family in ("longhorn", "llama")]
        rates = " / ".join("-" if r is None else short_speed(r) for r in pair)
        alike = all(pair) and pair[0]["batch_size"] == pair[1]["batch_size"]
        ratio = f" = {pair[0]['tokens_per_second'] / pair[1]['tokens_per_second']:.2f}" if alike else ""
        words.append(f"T={T} {rates}{ratio}")
    failures = [f"{r['model']} T={r['T']}{' compiled' if r['compiled'] else ''}: {r['reason']}" for r in found if "reason" in r]
    return "; ".join([f"tokens/s longhorn / llama: {', '.join(words) or 'none'}", *failures])


def short_speed(row):
    return (f"{row['tokens_per_second'] / 1e3:.0f}k" + (f" MFU {row['mfu']:.0%}" if row["mfu"] else "")
            + (" compiled" if row["compiled"] else ""))


# ------------------------------------------------------------------------------------- stages: tests, benchmark, sanitizer

def tests(context):
    if importlib.util.find_spec("pytest") is None:
        raise Skip("pytest is not installed in this Python")
    if importlib.util.find_spec("hypothesis") is None:
        raise Skip("hypothesis is not installed in this Python, and tests/test_scan.py needs it")
    files = [f"tests/{path.name}" for path in sorted((ROOT / "tests").glob("test_*.py"))
             if re.search(r"^def test_gpu", path.read_text(), re.M)]
    return [sys.executable, "-m", "pytest", "-q", "-rfEs", "--tb=short", "-p", "no:cacheprovider", *files, "-k", "test_gpu",
            *["--collect-only"] * context.dry_run]


def tests_summary(found, text):
    counts = [line.strip("= ") for line in text.splitlines() if re.search(r"\d+ (passed|failed|errors?|skipped)|collected", line)]
    return counts[-1] if counts else ""


def tests_verdict(status, text):
    if status == 0:
        return "ok", None
    which = "; ".join(re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.M)[:3])
    return "failed", "no test is called test_gpu..." if status == 5 else f"exit status {status}: {which or last_words(text)}"


def benchmark(context):
    command = [sys.executable, "bench/scan.py", "--device=cuda", "--preset=paper", "--even_if_wrong",
               f"--budget_s={max(1, context.seconds - 10):.0f}", f"--out={context.out / 'scan_cuda.json'}"]
    return command + ["--dry_run", "--rounds=2"] * context.dry_run


def in_short(found, text):
    return "; ".join(re.findall(r"^in short: (.*)", text, re.M))


def sanitizer(name):
    def command(context):
        path = tool("compute-sanitizer")
        if path is None:
            raise Skip("compute-sanitizer is not installed")
        # each tensor an allocation of its own: a step beyond its end is then seen
        return ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", path, "--tool", name, "--error-exitcode", "9",
                "--report-api-errors", "no", "--print-limit", "20", *context.inner("small")]

    def verdict(status, text):
        counted = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
        if not counted or "Device not supported" in text:
            return "skipped", f"compute-sanitizer does not work here: {last_words(text)}"
        errors = max(map(int, counted))
        if errors:
            return "failed", f"{errors} errors or hazards, see gpu.log"
        return ("ok", None) if status == 0 else ("failed", last_words(text))

    summary = lambda found, text: next(iter(re.findall(r"(?:ERROR|RACECHECK) SUMMARY: .*", text)), "")
    return Stage(name, 40, command, summary, verdict)


FUNCTIONS = {f.__name__: f for f in (environment, build, gradients, convolution, training, small)}
STAGES = [Stage("environment", 40, lambda c: c.inner("environment"), environment_summary),
          Stage("build", 70, lambda c: c.inner("build"), build_summary),
          Stage("tests", 100, tests, tests_summary, tests_verdict),
          Stage("gradients", 60, lambda c: c.inner("gradients"), gradients_summary),
          Stage("benchmark", 130, benchmark, in_short),
          Stage("convolution", 30, lambda c: c.inner("convolution"), convolution_summary),
          Stage("training", 210, lambda c: c.inner("training"), training_summary),
          sanitizer("memcheck"), sanitizer("racecheck"), sanitizer("initcheck")]


# ----------------------------------------------------------------------------------------------------------------- main

def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="folder of the records (results/; with --dry-run out/gpu_dry/)")
    parser.add_argument("--budget_s", type=float, default=BUDGET_S, help="seconds of all stages together (%(default)s)")
    parser.add_argument("--stages", default="", help=f"some of them, separated by commas: {', '.join(s.name for s in STAGES)}")
    parser.add_argument("--dry-run", "--dry_run", action="store_true",
                        help="the same stages on the CPU at tiny sizes: no measurement")
    parser.add_argument("--stage", choices=FUNCTIONS, help="run one stage in this process (make gpu calls it so)")
    parser.add_argument("--record", help="with --stage: append its records to this file, JSON lines")
    args = parser.parse_args(argv)
    args.out = args.out or str(ROOT / ("out/gpu_dry" if args.dry_run else "results"))
    known = [s.name for s in STAGES]
    unknown = [name for name in filter(None, args.stages.split(",")) if name not in known]
    if unknown:
        parser.error(f"--stages={unknown[0]}: no such stage; they are {', '.join(known)}")
    if not args.budget_s >= 1:
        parser.error(f"--budget_s={args.budget_s:g}: must be at least 1")
    return args


def run_function(args):
    """One stage that is a function of this file: its records go to a file, a line each, its words to the output."""
    def emit(**record):
        line = json.dumps(record)
        if args.record:
            with open(args.record, "a") as file:
                file.write(line + "\n")
        print(line, flush=True)  # whole: the file is gone if the runner is killed too

    FUNCTIONS[args.stage](emit, args.dry_run, args.budget_s)


def refuse(why):
    print(f"bench/gpu.py: {why}", file=sys.stderr)
    return 1


def main(argv=None):
    args = parse(argv)
    if args.stage:
        return run_function(args)
    out = Path(args.out).resolve()
    if args.dry_run and out.is_relative_to(ROOT / "results"):
        return refuse("--dry_run measures nothing, so its records do not belong in results/: choose another --out")
    try:
        import torch
    except ImportError:
        return refuse(f"{sys.executable} has no torch: make gpu PYTHON=... takes another interpreter, plain make gpu makes .venv")
    if not args.dry_run and not torch.cuda.is_available():
        return refuse(f"PyTorch {torch.__version__} sees no GPU here; nothing was run and nothing written")
    from bench.measure import refuse_uncommitted

    refuse_uncommitted(out, "another --out (make gpu OUT=...)")
    stages = [s for s in STAGES if s.name in (args.stages.split(",") if args.stages else [s.name for s in STAGES])]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the stage under way is ended too
    results = run_all(stages, Context(out, args.dry_run), args.budget_s, about={"environment": records.environment()})
    print_summary(results, out)
    return worst(results)


if __name__ == "__main__":
    with main_error("bench/gpu.py"):
        sys.exit(main())
