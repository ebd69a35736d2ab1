"""Runs all measurements for a machine with a GPU: commands with a time limit, each with its own record.

    make gpu                             # three calls, one after the other, each of at most nine minutes:
    make gpu STAGES=correctness          # do the kernels build, and are they right?
    make gpu STAGES=speed                # how fast are they, why, and would another tuning be faster?
    make gpu STAGES=training             # what does that mean for a training step?
    make gpu STAGES=build,tests          # only these stages
    make gpu PYTHON=python3 OUT=elsewhere      # with your own interpreter; installs nothing
    make gpu ARGS=--dry-run              # the same stages and files with tiny sizes on a CPU; measures nothing
    python bench/gpu.py --check FOLDER   # can these records be sent in?

A stage is a process with a time limit. If a requirement is missing, the stage is skipped and says what is missing. If
the kernels do not build, or one of their tests fails, all later stages are left out, because they would time wrong
kernels. No other failure stops anything. If the tests run out of time and none has failed, the later stages still run.
The exit status is 1 if any stage failed. Each stage leaves two files in results/gpu_<device>/:

    <stage>.json    the record, with machine, date, commit, clock and how the stage ended
    <stage>.log     all output
"""

import contextlib
import importlib.util
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

try:
    import torch
except ImportError:
    sys.exit(f"bench/gpu.py: error: {sys.executable} has no torch: choose another interpreter with make gpu "
             "PYTHON=..., or let plain make gpu install .venv")
import configurator  # noqa: E402
from bench.measure import check_out, new_record, write_record  # noqa: E402
from common.errors import ConfigError, main_error  # noqa: E402
from configurator import Seconds  # noqa: E402
from kernels import cuda  # noqa: E402
from runtime.records import fields, read_json  # noqa: E402

CALLS = {"correctness": ("build", "tests", "memcheck", "racecheck", "fused"),
         "speed": ("build", "scan_cuda", "profile", "convolution", "loss", "variants"),
         "training": ("build", "training", "training_4096", "training_8192", "training_graphs")}
BUDGET_S = 530  # per call: the build takes 95 s on 4 cores, 25 on 16; later stages get the rest
PATIENCE_S = 3  # between SIGTERM and SIGKILL
SANITIZER = "compute-sanitizer"
CLOCK = "nvidia-smi --id=0 --query-gpu=clocks.sm,clocks.max.sm,utilization.gpu --format=csv,noheader,nounits -lms 200"
CHECKED = ("build", "tests", "memcheck", "racecheck")  # stages that must not fail


class Stage(NamedTuple):
    name: str
    limit_s: float
    command: list
    needs: tuple = ()  # Python packages and programs that must be installed
    budget: object = None  # the stage's seconds -> the --budget_s of its command


# ----------------------------------------------------------------------------------------------------------- the stages

def stages(out, dry_run):
    def ours(name, words):
        """The command for one of our programs, which writes the stage's record."""
        return [sys.executable, *words.split(), f"--out={out / name}.json"]

    def ops(name, function):
        return ours(name, f"bench/ops.py {function}") + ["--dry-run"] * dry_run

    def sanitized(name):
        # without PyTorch's cache each tensor is a separate allocation, so an access past its end is detected
        words = (f"env PYTORCH_NO_CUDA_MEMORY_CACHING=1 {SANITIZER} --tool {name} --error-exitcode 9 "
                 "--report-api-errors no --print-limit 20")
        return Stage(name, 40, [*words.split(), *ops(name, "small")], (SANITIZER,))

    def training(name, T, tokens=32768, more=""):
        """The stage that times compiled training steps of the 120M models on random tokens."""
        words = (f"bench/step.py --rounds=5 --families=longhorn,llama --device=cuda --size=120M --compile --kernels "
                 f"--block_size={T} --batch_size={tokens // T} {more}")
        if dry_run:
            words = ("bench/step.py --rounds=5 --families=longhorn --kernels --n_layer=1 --n_embd=32 --n_head=2 "
                     "--vocab_size=128 --block_size=16")
        return Stage(name, 70, ours(name, words), budget=lambda seconds: seconds / 3)

    ncu = "ncu --clock-control none --launch-count 12 --kernel-name regex:forward|backward".split()
    for section in "SpeedOfLight SchedulerStats WarpStateStats MemoryWorkloadAnalysis LaunchStats Occupancy".split():
        ncu += ["--section", section]
    scan = "bench/scan.py --device=cuda" + " --dry-run --rounds=2" * dry_run
    return [
        Stage("build", 150, ops("build", "build")),
        Stage("tests", 200, gpu_tests(), ("pytest", "hypothesis")),
        sanitized("memcheck"),
        sanitized("racecheck"),
        Stage("fused", 30, pytest("tests/test_fused.py"), ("pytest", "hypothesis")),  # other libraries' kernels
        Stage("scan_cuda", 160, ours("scan_cuda", scan), budget=lambda seconds: seconds - 30),
        Stage("profile", 40, ncu + ops("profile", "profiled"), ("ncu",)),
        Stage("convolution", 30, ops("convolution", "convolution")),
        Stage("loss", 30, ops("loss", "loss")),
        Stage("variants", 80, ops("variants", "variants"), budget=lambda seconds: seconds),
        training("training", 1024),
        training("training_4096", 4096),
        training("training_8192", 8192),
        training("training_graphs", 1024, tokens=8192, more="--graphs")]  # so few tokens that the GPU waits for Python


def pytest(*words):
    command = [sys.executable, "-m", "pytest", "-v", "-rN", "--tb=short", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist"):  # in parallel: most of a test is a Python loop over time
        command += ["-n", str(min(12, os.cpu_count() or 1)), "--dist=worksteal"]
    return [*command, *words]


def gpu_tests():
    """The command for all tests called test_gpu..., and for the tests of the loss on "cuda"."""
    files = []
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        if re.search(r"^def test_gpu", path.read_text(), re.M):
            files.append(f"tests/{path.name}")
    return pytest(*files, "-k", "test_gpu or test_loss and cuda]")


# ----------------------------------------------------------------------------------------------------------- the runner

def run_limited(command, limit_s, log):
    """Run a command with its output in the file `log`; returns its exit status, or None if it was killed.

    At the limit the command and all its children get SIGTERM and, PATIENCE_S later, SIGKILL.
    """
    with open(log, "wb") as file:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT,
                                 env={**os.environ, "PYTHONUNBUFFERED": "1"}, start_new_session=True)
        try:
            return child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:  # also after an interrupt
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
                    os.killpg(child.pid, number)
                    child.wait(PATIENCE_S)


def at_its_clock(f, *arguments):
    """Return (f(*arguments), what `sm_clock` says of the GPU meanwhile, or {} if nvidia-smi does not answer)."""
    try:
        watcher = subprocess.Popen(CLOCK.split(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return f(*arguments), {}
    try:
        result = f(*arguments)
    finally:
        watcher.kill()
        lines, _ = watcher.communicate()  # the pipe's buffer holds 13 minutes of lines
    return result, sm_clock(lines)


def sm_clock(lines):
    """Return {"samples", "median_mhz", "least_mhz", "most_mhz", "limit_mhz"} from nvidia-smi's lines "clock, limit,
    percent busy". Lines do not count if the GPU was idle for more than half of the time."""
    rows = [[int(word) for word in row] for row in re.findall(r"^(\d+), (\d+), (\d+)$", lines, re.M)]
    busy = [mhz for mhz, _, percent in rows if percent >= 50]
    if not busy:
        return {}
    return {"samples": len(busy), "median_mhz": statistics.median(busy), "least_mhz": min(busy), "most_mhz": max(busy),
            "limit_mhz": rows[0][1]}


def run_stage(stage, out, limit_s, dry_run=False):
    """Run a stage, write its record, and return the record. Its entry "clock" is the GPU's clock. Its entry "stage"
    says how the stage ended: status (ok, failed, over time, or skipped), reason, exit_status, command, seconds."""
    record = out / f"{stage.name}.json"
    log = out / f"{stage.name}.log"
    record.unlink(missing_ok=True)
    command = list(stage.command)
    if stage.budget:
        command.append(f"--budget_s={max(1.0, stage.budget(limit_s - 5)):.0f}")
    started = time.monotonic()
    exit_status = None
    text = ""
    ran_at = {}
    missing = [name for name in stage.needs if not (importlib.util.find_spec(name) or shutil.which(name))]
    if missing:
        status = "skipped"
        reason = f"{missing[0]} is not installed"
    else:
        try:
            exit_status, ran_at = at_its_clock(run_limited, command, limit_s, log)
            text = log.read_text(errors="replace")
            status, reason = verdict(stage, limit_s, exit_status, text)
        except OSError as error:
            status = "failed"
            reason = str(error)
    ended = read_json(record) if record.exists() else new_record(stage.name, finished=status == "ok")
    if "pytest" in stage.needs:
        ended |= counts(text)
    ended["dry_run"] = dry_run
    ended["clock"] = ran_at
    ended["stage"] = {"command": " ".join(command).replace(f"{ROOT}/", ""), "status": status, "reason": reason,
                      "exit_status": exit_status, "limit_seconds": round(limit_s, 1),
                      "seconds": round(time.monotonic() - started, 2), "summary": summary(ended, text)}
    write_record(record, ended)
    return ended


def verdict(stage, limit_s, exit_status, text):
    """Return (status, reason) of a finished stage."""
    if exit_status is None:
        return "over time", f"killed at its limit of {limit_s:.0f} s; its results up to then are kept"
    if exit_status < 0:
        return "failed", f"ended by signal {-exit_status} ({signal.Signals(-exit_status).name})"
    if SANITIZER in stage.needs:
        counted = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
        if not counted or "Device not supported" in text:
            return "skipped", f"{SANITIZER} does not work here: {last_line(text)}"
        if max(map(int, counted)):
            return "failed", f"{max(map(int, counted))} errors or hazards, see {stage.name}.log"
    if exit_status:
        return "failed", last_line(text) or f"exit status {exit_status}"
    return "ok", ""


def last_line(text):
    return text.strip().rpartition("\n")[2].strip()[:240]


def counts(text):
    """Count the tests that have ended so far in pytest's output, from one process or several. Returns {"passed",
    "failed", "skipped"}."""
    found = re.findall(r"^(?:\[gw\d+\] \[ *\d+%\] |tests/\S+::.* )(PASSED|FAILED|ERROR|SKIPPED)\b", text, re.M)
    return {"passed": found.count("PASSED"), "failed": found.count("FAILED") + found.count("ERROR"),
            "skipped": found.count("SKIPPED")}


def summary(record, text):
    if "passed" in record:
        return f"{record['passed']} passed, {record['skipped']} skipped, {record['failed']} failed"
    return "; ".join(re.findall(r"^in short: (.*)", text, re.M))


def limit_of(left_s, stage, later):
    """Return a stage's time limit when `left_s` seconds are left: its own, plus what later stages do not need."""
    return min(left_s, max(stage.limit_s, left_s - sum(other.limit_s for other in later)))


def is_wrong(record):
    """True if the remaining stages must be skipped after this build or these tests. Tests that ran out of time do
    not count as wrong if some had passed and none had failed."""
    status = record["stage"]["status"]
    if status == "over time" and "passed" in record:
        return record["failed"] > 0 or record["passed"] == 0
    return status in ("failed", "over time")


def run_call(wanted, out, budget_s, dry_run, done):
    """Run stages within the budget, and print a line for each. Returns how many failed or were left out.

    done: {name: record} of earlier calls; new records are added to it. Stages that succeeded are not repeated.
    """
    began = time.monotonic()
    failed = 0
    for i, stage in enumerate(wanted):
        spent = time.monotonic() - began
        wrong = [name for name in ("build", "tests") if name in done and is_wrong(done[name])]
        if stage.name in done and done[stage.name]["stage"]["status"] == "ok":
            continue
        if wrong or budget_s - spent < 5:
            reason = f"{wrong[0]} failed" if wrong else f"{spent:.0f} of {budget_s:.0f} s are spent"
            print(f"{stage.name:13}  left out   {reason}; --stages={stage.name} runs it alone", flush=True)
            failed += 1
            continue
        done[stage.name] = record = run_stage(stage, out, limit_of(budget_s - spent, stage, wanted[i + 1:]), dry_run)
        ended = record["stage"]
        words = " | ".join(filter(None, (ended["summary"], ended["reason"])))
        print(f"{stage.name:13}  {ended['status']:9}{ended['seconds']:7.1f} s  {words}", flush=True)
        failed += ended["status"] in ("failed", "over time")
    return failed


# --------------------------------------------------------------------------------------------------- checking a folder

def faults(folder):
    """Yields a line for each reason not to accept a folder of records. Raises BadRecord for a damaged record."""
    records = {path.stem: read_json(path) for path in sorted(folder.glob("*.json"))}
    if "tests" not in records:
        yield "there is no tests.json, and no measurement counts without tests: run make gpu STAGES=correctness"
        return
    for name, record in records.items():
        with fields(f"{name}.json"):
            for fault in (*faults_of(name, record, records["tests"]["environment"]), *number_faults(record)):
                yield f"{name}.json: {fault}"


def faults_of(name, record, tests_ran):
    ran = record["environment"]
    for part in ("gpu", "torch", "commit"):
        if ran[part] != tests_ran[part]:
            yield f"its {part} is {ran[part]}, but in tests.json it is {tests_ran[part]}"
    if ran["uncommitted_changes"] is not False:
        yield "it was measured with uncommitted changes, or outside git"
    if record.get("dry_run"):
        yield "a dry run measures nothing"
    if name in CHECKED and record["stage"]["status"] not in ("ok", "skipped"):
        yield f"{record['stage']['status']}: {record['stage']['reason']}"
    if name == "tests" and (record["failed"] or not record["passed"]):
        yield f"{record['passed']} tests passed and {record['failed']} failed"
    for row in record.get("correctness", []):
        if not row["right"]:
            yield f"wrong: {row['family']} {' '.join(str(row[n]) for n in 'BTDN')} {row['dtype']}"


def number_faults(record, place=""):
    """Yields a line for each time, loss or error in a record, at any depth, that is negative or not finite."""
    if isinstance(record, dict):
        for name, entry in record.items():
            yield from number_faults(entry, f"{place}.{name}" if place else name)
    elif isinstance(record, list):
        for entry in record:
            yield from number_faults(entry, place)
    elif place.endswith(("seconds", "_loss", "relative_error")):
        if not isinstance(record, (int, float)) or not 0 <= record < math.inf:
            yield f"{place} is {record}"


def check(folder):
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; make gpu prints where its records are")
    lines = list(faults(folder))
    for line in lines:
        print(f"refused: {line}")
    if not lines:
        ran = read_json(folder / "tests.json")["environment"]
        print(f"accepted: {ran['gpu']}, torch {ran['torch']}, commit {ran['commit'][:10]}")
        print(f"for results/README.md: | `{folder.name}/` | `make gpu` | {ran['commit'][:7]} |")
    return int(bool(lines))


# ----------------------------------------------------------------------------------------------------------------- main

STAGES = tuple(stage.name for stage in stages(Path(), False))


@dataclass
class Options:
    out: Path = None  # folder for the records (results/gpu_<device>/; with --dry-run out/gpu_dry/)
    budget_s: Seconds = BUDGET_S  # seconds per call
    stages: tuple[Literal[(*CALLS, *STAGES)], ...] = tuple(CALLS)  # calls, or single stages, which form one call
    dry_run: bool = False  # tiny sizes on the CPU, as a test
    check: Path = None  # folder: check whether its records can be sent in


def choose_folder(args):
    """Return the folder for the records. Raises ConfigError if nothing can be measured here."""
    usual = "out/gpu_dry"
    if not args.dry_run:
        if not torch.cuda.is_available():
            raise ConfigError(f"PyTorch {torch.__version__} sees no GPU here; nothing was run and nothing written")
        usual = "results/gpu_" + re.sub(r"\W+", "_", torch.cuda.get_device_name().lower())
    return (args.out or ROOT / usual).resolve()


def main(argv):
    args = configurator.read(Options, argv, __doc__)
    if args.check:
        return check(args.check)
    out = choose_folder(args)
    check_out(out / "build.json", args.dry_run)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the running stage
    os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], *(f"{home}/bin" for home in cuda.homes())])
    failed = 0
    done = {}
    calls = {name: CALLS[name] for name in args.stages if name in CALLS}
    if alone := [name for name in args.stages if name not in CALLS]:
        calls["stages"] = alone
    for name, wanted in calls.items():
        print(f"{name}: at most {args.budget_s:.0f} s")
        chosen = [stage for stage in stages(out, args.dry_run) if stage.name in wanted]
        failed += run_call(chosen, out, args.budget_s, args.dry_run, done)
    print(f"records: {out}")
    return int(failed > 0)


if __name__ == "__main__":
    with main_error("bench/gpu.py"):
        sys.exit(main(sys.argv[1:]))
