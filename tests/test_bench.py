"""The benchmarks as far as a machine without a GPU can tell: each runs and writes its record, a wrong kernel or state
is not timed, and refusals are one line. Numbers taken here mean nothing.

    python -m pytest tests/test_bench.py
"""

import copy
import functools
import gc
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import generate, gpu, measure, scan, scan_cuda, step
from bench import ops as bench_ops
from bench.gpu import Stage
from common.errors import ConfigError
from experiments import extrapolation, objectives
from inspection import counting
from kernels import ops
from model import LM, Longhorn, ModelConfig
from runtime import records

ROOT = Path(gpu.__file__).resolve().parent.parent
TINY = ["--n_layer=1", "--n_embd=32", "--n_head=2", "--block_size=16", "--vocab_size=64", "--threads=1"]


@pytest.fixture(autouse=True)
def no_search(monkeypatch):
    """A search of all that PyTorch and the tests hold takes 0.3 s, before each time taken; and no time counts here."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)


# ---------------------------------------------------------------------------------------------------------- smoke runs

def test_scan(tmp_path, monkeypatch):
    arguments = ["--B=1", "--T=8", "--D=8", "--N=4", "--repeats=2", "--slow_repeats=2"]
    for extra, key in (([], "seconds"), (["--memory"], "kept_bytes")):
        out = tmp_path / f"{key}.json"
        scan.main([*arguments, *extra, f"--out={out}"])
        assert all(row[key] for row in json.loads(out.read_text())["rows"])
    honest = scan.longhorn_scan
    monkeypatch.setattr(scan, "longhorn_scan", lambda *a, **kw: tuple(1.01 * r for r in honest(*a, **kw)))
    with pytest.raises(SystemExit, match="wrong in y .*nothing was timed"):
        scan.main(arguments)


def test_scan_on_a_gpu_tried_without_one(tmp_path, capsys):
    arguments = ["--device=cuda", "--dry_run", "--rounds=1", "--T=8", "--B=2", "--D=64", "--N=4"]
    assert scan.main([*arguments, f"--out={tmp_path}/record.json"]) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["dry_run"] is True and record["finished"] is True and "commit" in record["environment"]
    assert len(record["correctness"]) == 16 and all(row["right"] for row in record["correctness"])
    rows = {r["contender"]: r for r in record["shapes"][0]["rows"]}
    assert list(rows) == list(scan_cuda.CONTENDERS) and "GPU" in rows["mamba_ssm"]["reason"]
    assert "in short: 16 of 16 comparisons" in capsys.readouterr().out


def test_step(tmp_path):
    """In processes of their own. Three heads do not divide 32 channels: LLaMA's own message is its reason."""
    out = tmp_path / "step.json"
    assert step.main([*TINY, "--n_head=3", "--families=llama,longhorn", "--rounds=2", "--kernels", f"--out={out}"]) == 1
    llama, longhorn = json.loads(out.read_text())["rows"]
    assert llama["reason"].startswith("ValueError: n_embd 32 is not a multiple of n_head 3") and "seconds" not in llama
    lm = LM(ModelConfig(n_layer=1, n_embd=32, n_head=2, block_size=16, vocab_size=64))
    assert longhorn["parameters"] == counting.parameter_count(lm)["total"] and longhorn["seconds"]["runs"] == 2
    assert longhorn["last_loss"] < longhorn["first_loss"] < 5
    assert longhorn["tokens_per_second"] == pytest.approx(4 * 16 / longhorn["seconds"]["median_seconds"])
    assert len(longhorn["kernels"]) > 20 and 1 in [calls for _, calls, name in longhorn["kernels"] if "AdamW" in name]
    milliseconds = sum(row[0] for row in longhorn["kernels"])
    assert longhorn["kernel_milliseconds"] == pytest.approx(milliseconds, rel=0.2) and longhorn["idle_milliseconds"] > 0


@pytest.mark.parametrize("spans, busy_and_idle", [
    ([], (0, 0)), ([(5, 7)], (2, 0)), ([(9, 10), (1, 4)], (4, 5)),  # as they end, not as they began
    ([(0, 10), (2, 3), (8, 12), (15, 16)], (13, 3))])  # two streams
def test_kernels_of_two_streams_count_once(spans, busy_and_idle):
    assert step.busy_and_idle(spans) == busy_and_idle


def test_a_cut_step_leaves_the_rounds_that_ended(tmp_path, monkeypatch):
    """Cut in its third round, by an error in place of a signal."""
    class Model:
        begun, turns = {"parameters": 1, "flops_per_token": 1.0}, 0

        def __init__(self, make, spec):
            pass

        def ask(self, method, untimed, timed, limit_s):
            self.turns += timed
            if self.turns == 3:
                raise KeyboardInterrupt
            return {"losses": [5.0 - self.turns], "seconds": [1.0 + self.turns] * timed}

        def end(self):
            pass

    out = tmp_path / "step.json"
    monkeypatch.setattr(step, "Worker", Model)
    with pytest.raises(KeyboardInterrupt):
        step.main([*TINY, "--families=llama", f"--out={out}"])
    record = json.loads(out.read_text())
    assert record["finished"] is False and record["rows"][0]["seconds"]["samples_seconds"] == [2.0, 3.0]


def trial(family, **spec):
    config = ModelConfig(model=family, n_layer=2, n_embd=32, n_head=2, block_size=16, vocab_size=64)
    return step.Trial({"name": "x", "config": config, "peer": None, "batch_size": 2, "device": "cpu",
                       "dtype": "float32", "compile": False, "threads": 1} | spec)


@pytest.mark.parametrize("family", ["llama", "mamba", "rwkv4"])
def test_peers_have_our_parameters_and_learn(family):
    peer = trial(family, peer="transformers")
    total = sum(p.numel() for group in peer.optimizer.param_groups for p in group["params"])
    assert total == pytest.approx(counting.parameter_count(LM(peer.config))["total"], rel=0.01)
    assert peer.step() > peer.step()


def test_generate(tmp_path, monkeypatch):
    out = tmp_path / "generate.json"
    assert generate.main([*TINY, "--families=llama,longhorn", "--contexts=8,40", "--chunk=16", "--new_tokens=5",
                          f"--out={out}"]) == 0
    llama, longhorn = json.loads(out.read_text())["rows"]
    assert [c["state_bytes"] for c in llama["contexts"]] == [4 * 2 * 32 * 8, 4 * 2 * 32 * 40]
    assert len({c["state_bytes"] for c in longhorn["contexts"]}) == 1 and out.with_suffix(".png").exists()
    lm, forward = LM(ModelConfig(n_layer=1, n_embd=32, n_head=2, vocab_size=64)).eval(), Longhorn.forward

    def forgets(self, u, state=None):
        y, after = forward(self, u, state)
        return y, after and (after[0], torch.zeros_like(after[1]))

    assert generate.check(lm)[0] is None
    monkeypatch.setattr(Longhorn, "forward", forgets)
    assert generate.check(lm)[0].startswith("the state is wrong: logits")


def python(code):
    return [sys.executable, "-c", code]


@pytest.mark.parametrize("stage, status, reason", [
    (Stage("slow", 1, python("import time; time.sleep(1000)")), "over time", "killed at its limit of 1 s"),
    (Stage("crash", 60, python("import os; os.abort()")), "failed", "ended by signal 6 (SIGABRT)"),
    (Stage("absent", 60, [], packages=("no_such_package",)), "skipped", "no_such_package is not installed")])
def test_a_stage_of_a_gpu_that_does_not_succeed_says_why(stage, status, reason, tmp_path):
    """A record of before does not stay."""
    (tmp_path / f"{stage.name}.json").write_text('{"old": 1}')
    assert gpu.run_stage(stage, tmp_path, stage.limit_s)
    record = json.loads((tmp_path / f"{stage.name}.json").read_text())
    assert record["stage"]["status"] == status and record["stage"]["reason"].startswith(reason)
    assert "old" not in record and {"date", "environment"} <= set(record)


def test_a_stage_of_a_gpu_adds_how_it_ended_to_its_record(tmp_path):
    write = f"import json; json.dump({{'n': float('nan')}}, open('{tmp_path}/x.json', 'w'))\nprint('in short: well')"
    gpu.run_stage(Stage("x", 60, python(write)), tmp_path, 60)
    record = json.loads((tmp_path / "x.json").read_text())
    assert record["n"] is None and record["dry_run"] is False and (tmp_path / "x.log").read_text() == "in short: well\n"
    assert [record["stage"][name] for name in ("status", "summary", "exit_status", "limit_seconds")] == [
        "ok", "well", 0, 60]


def test_a_stage_holds_the_clock_at_which_it_ran(tmp_path, monkeypatch):
    """Of the times when the GPU was busy; a line that was cut or says "[N/A]" is none."""
    lines = ["345, 1980, 0", "1755, 1980, 100", "[N/A], 1980, 99", "1980, 1980, 50", "1800, 1980, 97", "17"]
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + "exec sleep 1000\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    record = gpu.run_stage(Stage("x", 60, python("import time; time.sleep(1)")), tmp_path, 60)
    assert record["clock"] == {"samples": 3, "median_mhz": 1800, "least_mhz": 1755, "most_mhz": 1980,
                               "limit_mhz": 1980}


def test_a_stage_gets_the_time_that_others_do_not_need():
    a, b, c = (Stage(name, limit_s, []) for name, limit_s in (("a", 10), ("b", 20), ("c", 30)))
    assert gpu.limit_of(100, a, [b, c]) == 50 and gpu.limit_of(70, b, [c]) == 40
    assert gpu.limit_of(45, b, [c]) == 20 and gpu.limit_of(7, c, []) == 7
    limits = {stage.name: stage.limit_s for stage in gpu.stages(ROOT, False)}
    assert set(limits) == {stage for call in gpu.CALLS.values() for stage in call}
    assert all(sum(limits[stage] for stage in call) <= gpu.BUDGET_S < 540 for call in gpu.CALLS.values())


def test_what_does_not_build_is_not_timed_and_a_success_is_not_repeated(tmp_path, capsys):
    """Also in later calls. Every failure and every stage left out counts."""
    add = f"open('{tmp_path}/ran', 'a').write('x')"
    done, good, build = {}, Stage("a", 10, python(add)), Stage("build", 10, python("raise SystemExit(1)"))
    run = lambda *stages, budget_s=60: gpu.run_call(stages, tmp_path, budget_s, True, done)
    assert run(good) == 0 and run(good, build, Stage("b", 10, python(add)), Stage("c", 10, [])) == 3
    assert (tmp_path / "ran").read_text() == "x" and "b              left out   build failed" in capsys.readouterr().out
    del done["build"]
    assert run(Stage("d", 10, python(add)), budget_s=4.9) == 1 and "of 5 s are spent" in capsys.readouterr().out


def test_tests_that_were_cut_leave_what_they_printed():
    text = ("tests/test_ops.py::test_gpu_c \n[gw1] [  1%] PASSED tests/test_cuda.py::test_gpu_a[1-x y] \n"
            "[gw0] [ 33%] FAILED tests/test_cuda.py::test_gpu_b[x y] \n[gw1] [100%] SKIPPED tests/test_ops.py::test_c\n"
            "tests/test_ops.py::test_gpu_d \ntests/test_ops.py::test_gpu_e[in one process] PASSED [ 4%]\nPASSED")
    assert gpu.counts(text) == {"passed": 2, "failed": 1, "skipped": 1}


@pytest.mark.parametrize("name", ["environment", "build", "small", "convolution", "loss", "variants"])
def test_what_runs_operators_on_a_gpu_tried_on_the_cpu(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ops, "LOGITS_AT_ONCE", {})
    bench_ops.main([name, "--dry-run", f"--out={tmp_path}/{name}.json"])
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert record["finished"] is True and record["dry_run"] is True and "commit" in record["environment"]
    assert len(record["rows"]) == {"environment": 6, "build": 1, "small": len(bench_ops.SMALL) + 3, "convolution": 3,
                                   "loss": 5, "variants": 1}[name]
    if name in ("convolution", "loss"):
        honest = measure.compare
        monkeypatch.setattr(measure, "compare", lambda *a: {n: r | {"right": False} for n, r in honest(*a).items()})
        with pytest.raises(ConfigError, match="is wrong in y by .*: it was not timed"):
            bench_ops.main([name, "--dry-run"])


RAN = {"gpu": "NVIDIA H100 80GB HBM3", "torch": "2.11.0", "commit": "a" * 40, "uncommitted_changes": False}
SENT = {  # what gpu.faults looks at
    "build": {"dry_run": False, "stage": {"status": "ok", "reason": ""}},
    "tests": {"dry_run": False, "passed": 2, "failed": 0, "stage": {"status": "ok", "reason": ""}},
    "scan_cuda": {"dry_run": False, "correctness": [
        {"family": "mamba", "B": 1, "T": 2, "D": 3, "N": 4, "dtype": "float32", "right": True,
         "results": {"dA": {"relative_error": 1e-7}}}]},
    "training": {"rows": [{"last_loss": 9.0, "mfu": None, "seconds": {"median_seconds": 0.1,
                                                                      "samples_seconds": [0.1]}}]}}


@pytest.mark.parametrize("place, value, words", [
    ("tests.failed", 1, "tests.json: 2 tests passed and 1 failed"),
    ("scan_cuda.correctness.0.right", False, "wrong: mamba 1 2 3 4 float32"), ("build.dry_run", True, "a dry run"),
    ("training.environment.commit", "b" * 40, "its commit is bb"),
    ("training.environment.uncommitted_changes", None, "uncommitted changes, or outside git"),
    ("training.rows.0.last_loss", math.nan, "rows.last_loss is nan")])
def test_records_that_cannot_be_sent_in_are_refused(place, value, words, tmp_path, capsys):
    records = {name: {"environment": dict(RAN), **copy.deepcopy(record)} for name, record in SENT.items()}
    for doctored in (False, True):
        if doctored:
            *keys, last = (int(key) if key.isdigit() else key for key in place.split("."))
            functools.reduce(lambda entry, key: entry[key], keys, records)[last] = value
        for name, record in records.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(record))
        assert gpu.main([f"--check={tmp_path}"]) == int(doctored)
        printed = capsys.readouterr().out
        assert "refused: " in printed and words in printed if doctored else "accepted: NVIDIA H100" in printed
    (tmp_path / "tests.json").unlink()
    assert [line.split(",")[0] for line in gpu.faults(tmp_path)] == ["there is no tests.json"]


def test_make_takes_the_interpreter_it_is_given():
    ours = ("PYTHON", "OUT", "ARGS", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")  # the last three where make runs these tests
    env = {k: v for k, v in os.environ.items() if k not in ours}
    lines = lambda *arguments: subprocess.run(["make", "-n", "-B", *arguments], cwd=ROOT, capture_output=True,
                                              text=True, env=env).stdout
    given = lines("gpu", "PYTHON=python3", "OUT=some where", "ARGS=--stages=tests")
    assert shlex.split(given) == ["python3", "bench/gpu.py", "--out=some where", "--stages=tests"]
    assert ".venv/bin/python bench/gpu.py" in lines("gpu") and "pip install" in lines("gpu")
    train, sample = (shlex.split(line) for line in lines("train", "OUT=some where").splitlines()[-2:])
    assert train[1] == "train.py" and sample[1] == "sample.py"
    assert "--out_dir=some where" in train and "--out_dir=some where" in sample


# ------------------------------------------------------------------------------------------------------------ refusals

UNCOMMITTED = "results/ is for records of a commit, and this tree has uncommitted changes"


@pytest.mark.parametrize("call, argument, words", [
    # each script says so before it measures
    *((main, arguments, UNCOMMITTED) for main, arguments in (
        (scan.main, "--save"), (scan.main, "--out=results/y.json"), (generate.main, "--save"), (step.main, "--save"),
        (objectives.main, "--save"), (gpu.main, "--out=results/gpu_x"),
        (extrapolation.main, "run --preset=laptop --save"))),
    (scan.main, "--device=cuda --dry_run --save", "a dry run measures nothing"),
    (gpu.main, "--check=never", "never: no such folder"),
    (gpu.main, "--out=never", "sees no GPU here; nothing was run and nothing written")])
def test_refusals(call, argument, words, capsys, monkeypatch):
    monkeypatch.setattr(measure, "code_version", lambda: {"uncommitted_changes": True})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: words == UNCOMMITTED)
    monkeypatch.setattr(records, "environment", lambda: pytest.fail("it went on"))
    monkeypatch.chdir(ROOT)
    with pytest.raises((SystemExit, ConfigError)) as end:
        call(shlex.split(argument))
    line = str(end.value) if isinstance(end.value, ConfigError) else capsys.readouterr().err.strip().splitlines()[-1]
    assert words in line and "\n" not in line and not (ROOT / "never").exists()
