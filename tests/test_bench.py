"""Tests of the benchmarks that need no GPU: each benchmark runs and writes its record, a wrong kernel or state is never
timed, and a refusal is one line. The timings mean nothing.

    python -m pytest tests/test_bench.py
"""

import functools
import gc
import json
import multiprocessing
import os
import pickle
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bench import generate, gpu, measure, scan, step
from bench import ops as bench_ops
from bench.gpu import Stage
from common.errors import ConfigError
from experiments import extrapolation, objectives
from inspection import counting
from model import LM, Longhorn, ModelConfig
from runtime import records
from runtime.records import read_json

ROOT = Path(gpu.__file__).resolve().parent.parent
environment = functools.cache(records.environment)
SHAPE = dict(n_layer=1, n_embd=32, n_head=2, block_size=16, vocab_size=64)
TINY = [*(f"--{name}={size}" for name, size in SHAPE.items()), "--threads=1"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Skips the garbage collection before each timing, which takes 0.3 s; timings do not matter here."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)
    monkeypatch.setattr(measure.Cpu, "flush_bytes", 1 << 16)
    monkeypatch.setattr(records, "environment", environment)


@pytest.fixture
def run(tmp_path):
    """run(main, *arguments): (exit status, record)."""
    out = tmp_path / "record.json"
    return lambda main, *arguments: (main([*arguments, f"--out={out}"]), read_json(out))


@pytest.fixture
def here(monkeypatch):
    """Runs workers in this process."""
    def begin(self, *made_of, **row):
        make, spec = pickle.loads(pickle.dumps(made_of))
        self.held = make(spec)
        self.row = row | self.held.about()

    def ask(self, method, *arguments, limit_s):
        return pickle.loads(pickle.dumps(getattr(self.held, method)(*arguments)))

    monkeypatch.setattr(measure.Worker, "__init__", begin)
    monkeypatch.setattr(measure.Worker, "ask", ask)


# ---------------------------------------------------------------------------------------------------------- smoke runs

SMALL = ["--rounds=2", "--T=8", "--B=2", "--D=64", "--N=4"]


@pytest.mark.parametrize("device, contenders", [
    (["--device=cpu"], scan.ON_CPU), (["--device=cuda", "--dry_run"], scan.ON_GPU)])
def test_the_scan_benchmark_has_a_row_for_each_contender(device, contenders, run, capsys):
    status, record = run(scan.main, *device, *SMALL)
    assert status == 0 and record["finished"] is True and record["dry_run"] is ("--dry_run" in device)
    assert "in short: 3 of 3 comparisons" in capsys.readouterr().out
    rows = {r["contender"]: r for r in record["shapes"][0]["rows"]}
    assert list(rows) == list(contenders) and "share_of_bandwidth" in rows["longhorn_scan"]["backward"]
    assert "mamba_ssm" not in rows or "GPU" in rows["mamba_ssm"]["reason"]


def test_a_wrong_scan_is_not_timed(run, monkeypatch):
    honest = scan.longhorn_scan

    def wrong(*a, backend, **kw):
        results = honest(*a, backend=backend, **kw)
        return results if backend == "torch" else (results[0] * 1.01, *results[1:])

    monkeypatch.setattr(scan, "longhorn_scan", wrong)
    status, record = run(scan.main, *SMALL)
    ours, mamba, *_ = record["shapes"][0]["rows"]
    assert status == 1 and "WRONG: y by" in ours["reason"] and "forward" in mamba


def test_contenders_take_turns_alone_and_then_with_the_backward(monkeypatch):
    """Each contender is timed for at most two seconds, but at least three times."""
    def laps(self, *steps):
        for lap in steps:
            lap()
        return [0.25] if len(steps) == 1 else [0.125, 0.5]

    monkeypatch.setattr(measure.Cpu, "laps", laps)
    a = functools.partial(measure.a_pass, lambda x: 2 * x, {"x": torch.ones(3)}, torch.ones(3))
    timed, absent = measure.time_contenders({"a": a, "b": lambda: measure.imported("absent", "f")}, measure.Cpu())
    assert [timed[name]["samples_seconds"] for name in measure.PASSES] == [[0.25] * 3, [0.5] * 3, [0.625] * 3]
    assert absent == {"contender": "b", "reason": "not installed"}


def test_the_step_benchmark_writes_its_record_after_every_round(here, monkeypatch, tmp_path):
    """An interrupt then leaves a record of the finished rounds."""
    written = []
    monkeypatch.setattr(measure, "write_record", lambda out, record: written.append(json.loads(json.dumps(record))))
    assert step.main([*TINY, "--families=longhorn", "--rounds=2", "--kernels", f"--out={tmp_path}/step.json"]) == 0
    assert [(r["finished"], r["rows"][0]["seconds"]["runs"]) for r in written] == [(False, 1), (False, 2), (True, 2)]
    (row,) = written[-1]["rows"]
    assert row["parameters"] == counting.parameter_count(LM(ModelConfig(**SHAPE)))["total"]
    assert row["last_loss"] < row["first_loss"] < 5
    assert row["tokens_per_second"] == pytest.approx(4 * 16 / row["seconds"]["median_seconds"])
    assert len(row["kernels"]) > 20 and 1 in [calls for _, calls, name in row["kernels"] if "AdamW" in name]
    milliseconds = sum(kernel[0] for kernel in row["kernels"])
    assert row["kernel_milliseconds"] == pytest.approx(milliseconds, rel=0.2) and row["idle_milliseconds"] > 0
    with pytest.raises(measure.LeftOut, match="they need a GPU"):
        step.main([*TINY, "--families=longhorn", "--graphs", f"--out={tmp_path}/step.json"])


class Held:
    """A stand-in for the object that a worker holds; raises ValueError if `turn` is None."""

    def __init__(self, turn):
        print("which kernels", file=sys.stderr)
        self.turn = turn or int("x")

    def about(self):
        return {"parameters": 1}


def test_a_worker_says_why_it_ended(monkeypatch):
    """The worker is forked, which is quick. Real workers are not, because PyTorch's threads and CUDA may be running."""
    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda way: context)
    row = measure.Worker(Held, None).row
    assert row["reason"].startswith("ValueError: invalid literal for int()") and row["stderr"] == ["which kernels"]
    for turn, reason in ((lambda: time.sleep(10), "ran past its limit of 1 s"),
                         (lambda: os._exit(3), "its process ended with status 3")):
        worker = measure.Worker(Held, turn, name="a")
        assert worker.row == {"name": "a", "parameters": 1, "stderr": ["which kernels"]}
        assert worker.ask("turn", limit_s=1) == {} == worker.ask("about", limit_s=1)
        assert worker.row["reason"] == reason


def test_overlapping_kernels_of_two_streams_count_once():
    assert step.busy_and_idle([(9, 10), (1, 4)]) == (4, 5)  # spans may come in any order
    assert step.busy_and_idle([(0, 10), (2, 3), (8, 12), (15, 16)]) == (13, 3)


def test_the_generate_benchmark_measures_states_and_refuses_wrong_ones(here, run, monkeypatch):
    arguments = [*TINY, "--families=llama,longhorn", "--contexts=8,40", "--chunk=16", "--new_tokens=5"]
    status, record = run(generate.main, *arguments)
    llama, longhorn = (row["contexts"] for row in record["rows"])
    assert status == 0 and [c["state_bytes"] for c in llama] == [4 * 2 * 32 * 8, 4 * 2 * 32 * 40]
    assert longhorn[0]["state_bytes"] == longhorn[1]["state_bytes"] and longhorn[1]["decode"]["new_tokens"] == 5
    forward = Longhorn.forward

    def forgets(self, u, state=None):
        y, after = forward(self, u, state)
        wrong = torch.is_autocast_enabled("cpu") == (dtype == "bfloat16")
        return y, after and (after[0], torch.zeros_like(after[1])) if wrong else after

    monkeypatch.setattr(Longhorn, "forward", forgets)
    for dtype in ("float32", "bfloat16"):
        with pytest.raises(measure.LeftOut, match="the state is wrong: logits"):
            run(generate.main, *arguments, f"--dtype={dtype}")


@pytest.mark.parametrize("stage, status, reason", [
    (Stage("x", 1, ["sleep", "1000"]), "over time", "killed at its limit of 1 s"),
    (Stage("x", 60, ["sh", "-c", "kill -ABRT $$"]), "failed", "ended by signal 6 (SIGABRT)"),
    (Stage("x", 60, [], ("no_such_package",)), "skipped", "no_such_package is not installed")])
def test_a_gpu_stage_that_does_not_succeed_says_why(stage, status, reason, tmp_path):
    """An older record is deleted."""
    (tmp_path / "x.json").write_text('{"old": 1}')
    gpu.run_stage(stage, tmp_path, stage.limit_s)
    record = read_json(tmp_path / "x.json")
    assert record["stage"]["status"] == status and record["stage"]["reason"].startswith(reason)
    assert "old" not in record and {"date", "environment"} <= set(record)


SMI = """#!/bin/sh
printf '345, 1980, 0\\n1755, 1980, 100\\n[N/A], 1980, 99\\n1980, 1980, 50\\n1800, 1980, 97\\n17'
: > "${0%/*}/said"
exec sleep 1000
"""
MEASURES = """
until [ -e said ]; do sleep 0.01; done
echo '{"n": [NaN]}' > x.json
echo 'in short: well'
"""


def test_a_gpu_stage_records_how_it_ended_and_the_clock(tmp_path, monkeypatch):
    """The clock counts only while the GPU was busy; a line that is cut or says "[N/A]" is ignored."""
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    gpu.run_stage(Stage("x", 60, ["sh", "-c", MEASURES], budget=lambda seconds: seconds - 30), tmp_path, 60)
    record = read_json(tmp_path / "x.json")
    assert (tmp_path / "x.log").read_text() == "in short: well\n"
    assert record["n"] == [None] and record["dry_run"] is False
    assert record["stage"]["command"].endswith(" --budget_s=25")
    assert record["clock"] == {"samples": 3, "median_mhz": 1800, "least_mhz": 1755, "most_mhz": 1980,
                               "limit_mhz": 1980}
    assert record["stage"].items() >= {"status": "ok", "summary": "well", "exit_status": 0, "limit_seconds": 60}.items()


def test_a_stage_gets_the_time_that_others_do_not_need():
    short, long = Stage("", 10, []), Stage("", 50, [])
    assert [gpu.limit_of(left_s, short, [long]) for left_s in (100, 55, 7)] == [50, 10, 7]
    limits = {stage.name: stage.limit_s for stage in gpu.stages(ROOT, False)}
    assert set(limits) == {stage for call in gpu.CALLS.values() for stage in call}
    assert max(sum(limits[stage] for stage in call) for call in gpu.CALLS.values()) <= gpu.BUDGET_S < 540


def test_after_a_failed_build_stages_are_left_out_and_no_success_is_repeated(tmp_path, capsys):
    """A failed build counts in later calls too. A call returns how many stages failed or were left out."""
    add = ["sh", "-c", f"printf x >> {tmp_path}/ran"]
    done = {}
    good = Stage("a", 10, add)
    build = Stage("build", 10, ["false"])
    call = lambda *stages, budget_s=60: gpu.run_call(stages, tmp_path, budget_s, True, done)
    assert call(good) == 0 and call(good, build, Stage("b", 10, add), Stage("c", 10, [])) == 3
    assert (tmp_path / "ran").read_text() == "x" and "b              left out   build failed" in capsys.readouterr().out
    del done["build"]
    assert call(Stage("d", 10, add), budget_s=4.9) == 1 and "of 5 s are spent" in capsys.readouterr().out


def test_results_printed_before_the_tests_were_cut_short_count():
    text = ("tests/test_ops.py::test_gpu_c \n[gw1] [  1%] PASSED tests/test_cuda.py::test_gpu_a[1-x y] \n"
            "[gw0] [ 33%] FAILED tests/test_cuda.py::test_gpu_b[x y] \n[gw1] [100%] SKIPPED tests/test_ops.py::test_c\n"
            "tests/test_ops.py::test_gpu_d \ntests/test_ops.py::test_gpu_e[in one process] PASSED [ 4%]\nPASSED")
    assert gpu.counts(text) == {"passed": 2, "failed": 1, "skipped": 1}


@pytest.mark.parametrize("name, rows", [
    ("build", 1), ("small", 6), ("convolution", 3), ("loss", 3)])
def test_each_function_of_ops_has_a_dry_run_on_the_cpu(name, rows, run, monkeypatch):
    monkeypatch.setattr(bench_ops, "SMALL", bench_ops.SMALL[-1:])
    _, record = run(bench_ops.main, name, "--dry-run")
    assert record["finished"] is record["dry_run"] is True and len(record["rows"]) == rows
    if name in ("convolution", "loss"):
        monkeypatch.setattr(measure, "wrong_in", lambda comparisons: "y by 1")
        with pytest.raises(ConfigError, match="is wrong in y by 1: it was not timed"):
            run(bench_ops.main, name, "--dry-run")


def test_a_variant_is_timed(run, monkeypatch):
    """Times the variant in this process."""
    environment()
    here = lambda command, **how: subprocess.CompletedProcess(command, bench_ops.main(command[2:]) or 0)
    monkeypatch.setattr(subprocess, "run", here)
    _, record = run(bench_ops.main, "variants", "--dry-run")
    assert [row["contender"] for row in record["rows"]] == ["ours"] and "forward" in record["rows"][0]


RAN = ('"environment": {"gpu": "NVIDIA H100 80GB HBM3", "torch": "2.11.0", "commit": "aaaaaaaaaaaa", '
       '"uncommitted_changes": false}')
CASE = '{"family": "mamba", "B": 1, "T": 2, "D": 3, "N": 4, "dtype": "float32", "right": true}'
SENT = {  # the fields that gpu.faults checks
    "tests": f'{{{RAN}, "dry_run": false, "passed": 2, "failed": 0, "stage": {{"status": "ok", "reason": ""}}}}',
    "scan_cuda": f'{{{RAN}, "correctness": [{CASE}]}}',
    "training": f'{{{RAN}, "rows": [{{"last_loss": 9.0, "mfu": null, "samples_seconds": [0.1]}}]}}'}


@pytest.mark.parametrize("name, old, new, words", [
    ("tests", '"failed": 0', '"failed": 1', "2 tests passed and 1 failed"),
    ("tests", '"ok"', '"over time"', "over time: "),
    ("tests", 'run": false', 'run": true', "a dry run measures nothing"),
    ("scan_cuda", "true", "false", "wrong: mamba 1 2 3 4 float32"),
    ("training", "aaaaaaaaaaaa", "bbbb", "its commit is bbbb, but in tests.json it is aaaaaaaaaaaa"),
    ("training", "false", "null", "it was measured with uncommitted changes, or outside git"),
    ("training", "0.1", "-1", "rows.samples_seconds is -1"), ("training", "9.0", "NaN", "rows.last_loss is nan")])
def test_records_that_cannot_be_sent_in_are_refused(name, old, new, words, tmp_path, capsys):
    for stem, text in SENT.items():
        (tmp_path / f"{stem}.json").write_text(text)
    assert gpu.main([f"--check={tmp_path}"]) == 0 and "accepted: NVIDIA H100" in capsys.readouterr().out
    path = tmp_path / f"{name}.json"
    path.write_text(path.read_text().replace(old, new))
    assert gpu.main([f"--check={tmp_path}"]) == 1 and capsys.readouterr().out == f"refused: {name}.json: {words}\n"
    (tmp_path / "tests.json").unlink()
    assert [line.split(",")[0] for line in gpu.faults(tmp_path)] == ["there is no tests.json"]


def test_make_takes_the_interpreter_it_is_given():
    env = {"PATH": os.environ["PATH"]}
    lines = lambda *arguments: subprocess.run(["make", "-n", "-B", *arguments], cwd=ROOT, capture_output=True,
                                              text=True, env=env).stdout
    given = lines("gpu", "PYTHON=python3", "OUT=some where", "ARGS=--stages=tests")
    assert shlex.split(given) == ["python3", "bench/gpu.py", "--out=some where", "--stages=tests"]
    assert ".venv/bin/python bench/gpu.py" in lines("gpu") and "pip install" in lines("gpu")
    assert shlex.split(lines("train", "OUT=some where").splitlines()[-2])[-1] == "--out_dir=some where"


# ------------------------------------------------------------------------------------------------------------ refusals

def test_without_a_gpu_a_benchmark_names_the_options_for_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="^PyTorch sees no GPU: use --device=cpu, or --dry-run "):
        bench_ops.main(["loss"])


@pytest.mark.parametrize("main, arguments", [
    (scan.main, ["--save"]), (scan.main, [f"--out={ROOT}/results/y.json"]), (generate.main, ["--save"]),
    (step.main, ["--save"]), (objectives.main, ["--save"]), (gpu.main, ["--dry-run", f"--out={ROOT}/results/gpu_x"]),
    (lambda argv: extrapolation.Extrapolation(argv).run(), ["run", "--save"])])
def test_results_takes_no_record_of_uncommitted_code(main, arguments, monkeypatch):
    """Each program refuses before it measures."""
    monkeypatch.setattr(measure, "code_version", lambda: {"uncommitted_changes": True})
    monkeypatch.setattr(records, "environment", lambda: pytest.fail("it went on"))
    with pytest.raises(ConfigError, match="results/ is for records of a commit, and this tree has|in results/: give"):
        main(arguments)
