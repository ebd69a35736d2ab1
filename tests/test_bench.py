"""The benchmarks as far as a machine without a GPU can tell: each runs and writes its record, a wrong kernel or state
is not timed, and refusals are one line. Numbers taken here mean nothing.

    python -m pytest tests/test_bench.py
"""

import gc
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import generate, gpu, measure, scan, scan_cuda, step
from bench.gpu import Context, Skip, Stage
from experiments import extrapolation, online_learning
from kernels import ops
from model import LM, Longhorn, ModelConfig
from runtime import counting, distributed, records
from runtime.errors import ConfigError
from train import TrainConfig

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
    assert len(longhorn["kernels"]) == 20 and 1 in [calls for _, calls, name in longhorn["kernels"] if "AdamW" in name]


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


def test_a_timed_step_compiles_what_training_compiles(monkeypatch):
    """The layers, one by one."""
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda f: compiled.append(f.__self__) or f)
    config = ModelConfig(n_layer=3, n_embd=32, n_head=2, block_size=16, vocab_size=64)
    trial = step.Trial({"name": "x", "config": config, "peer": None, "batch_size": 2, "device": "cpu",
                        "dtype": "float32", "compile": True, "threads": 1})
    assert compiled == list(trial.model.layers)
    compiled.clear()
    in_training = LM(config)
    distributed.parallelize(in_training, TrainConfig(compile=True), None)
    assert compiled == list(in_training.layers)


@pytest.mark.parametrize("family", ["llama", "mamba", "rwkv4"])
def test_peers_have_our_parameters_and_learn(family):
    config = ModelConfig(model=family, n_layer=2, n_embd=32, n_head=2, block_size=16, vocab_size=64)
    trial = step.Trial({"name": "x", "config": config, "peer": "transformers", "batch_size": 2, "device": "cpu",
                        "dtype": "float32", "compile": False, "threads": 1})
    total = sum(p.numel() for group in trial.optimizer.param_groups for p in group["params"])
    assert total == pytest.approx(counting.parameter_count(LM(config))["total"], rel=0.01)
    assert trial.step() > trial.step()


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
    return lambda context: [sys.executable, "-c", code.replace("RECORD", repr(context.record))]


def test_stages_of_a_gpu_succeed_fail_are_killed_and_skipped(tmp_path):
    def skip(context):
        raise Skip("pytest is not installed in this Python")

    record = "import json; open(RECORD, 'w').write(json.dumps({'x': float('nan'), 'n': 3}))\nprint('all well')"
    stages = [Stage("slow", 1, python("import time; time.sleep(1000)")),  # first: no stage has left it any time
              Stage("good", 60, python(record), lambda rows, text: f"n is {rows[0]['n']}, {text.strip()}"),
              Stage("bad", 60, python("print('before'); raise SystemExit('out of luck')")), Stage("absent", 60, skip),
              Stage("no program", 60, lambda context: ["/no/such/program"]),
              Stage("crash", 60, python("import os; os.abort()"))]
    results = gpu.run_all(stages, Context(tmp_path, True), sum(stage.limit_s for stage in stages), {})
    assert [r["status"] for r in results] == ["over time", "ok", "failed", "skipped", "failed", "failed"]
    slow, good, bad, _, program, crash = results
    assert good["summary"] == "n is 3, all well" and bad["reason"] == "out of luck"
    assert "killed at its limit" in slow["reason"] and "No such file" in program["reason"]
    assert crash["reason"] == "ended by signal 6 (SIGABRT)"
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["finished"] is True and written["stages"][1]["records"] == [{"x": None, "n": 3}]
    assert "out of luck" in (tmp_path / "gpu.log").read_text()


def test_what_does_not_build_is_not_timed_and_a_success_is_not_repeated(tmp_path):
    """Also in later calls. Time that a stage leaves goes to the next ones."""
    stages, done = [Stage(name, 10, python("print('x')")) for name in "abc"], {}
    run = lambda *stages: gpu.run_all(stages, Context(tmp_path, True), 40, {}, done)
    results = run(*stages[:2])
    assert results[0]["limit_seconds"] == 30 and 30 < results[1]["limit_seconds"] <= 40
    again = run(*stages)
    assert again[:2] == results and again[2]["status"] == "ok"
    run(Stage("build", 10, python("raise SystemExit(1)")))
    assert run(Stage("d", 10, stages[0].command))[0]["reason"] == "build: failed"


@pytest.mark.parametrize("passed, failed, later", [(1, [], "ok"), (1, ["tests/x.py::a"], "left out"),
                                                   (0, [], "left out")])
def test_tests_that_were_cut_stop_what_follows_unless_all_had_passed(passed, failed, later, tmp_path):
    cut = {"stage": "tests", "status": "over time", "records": [{"passed": passed, "skipped": 0, "failed": failed}]}
    stage = Stage("b", 60, python("print('x')"))
    (result,) = gpu.run_all([stage], Context(tmp_path, True), 60, {}, {"tests": cut})
    assert result["status"] == later


def test_tests_that_were_cut_leave_what_they_printed():
    text = ("tests/test_ops.py::test_gpu_c \n[gw1] [  1%] PASSED tests/test_cuda.py::test_gpu_a[1-x y] \n"
            "[gw0] [ 33%] FAILED tests/test_cuda.py::test_gpu_b[x y] \n[gw1] [100%] SKIPPED tests/test_ops.py::test_c\n"
            "tests/test_ops.py::test_gpu_d \ntests/test_ops.py::test_gpu_e[in one process] PASSED [ 4%]")
    assert gpu.tests_read(text) == [{"passed": 2, "skipped": 1, "failed": ["tests/test_cuda.py::test_gpu_b[x y]"]}]


def test_stages_of_a_gpu_on_the_cpu(tmp_path, monkeypatch):
    """The functions of stages run; the commands of others can be parsed; calls name all of them."""
    rows = []
    monkeypatch.setattr(ops, "LOGITS_AT_ONCE", {})
    for stage in ("environment", "build", "small", "convolution", "loss"):
        gpu.FUNCTIONS[stage](lambda **record: rows.append(json.loads(json.dumps(record))), True, 10)
    assert rows[0]["device"]["torch"] and sum("scan" in r for r in rows) == len(gpu.SMALL)
    assert [r["contender"] for r in rows if "contender" in r] == [
        "cpu", "torch", "fused", *(f"slices of 2^{power}" for power in (24, 26, 28, 30)), "torch"]
    assert {stage for call in gpu.CALLS.values() for stage in call} == {stage.name for stage in gpu.STAGES}
    context, commands = Context(tmp_path, False, seconds=120, record="/r"), {s.name: s.command for s in gpu.STAGES}
    limits = {s.name: s.limit_s for s in gpu.STAGES}
    assert all(sum(limits[stage] for stage in call) <= gpu.BUDGET_S < 540 for call in gpu.CALLS.values())
    for name, T in (("training", 1024), ("training_8192", 8192)):
        _, script, *arguments, out = commands[name](context)
        args = step.parse(["--device=cpu" if a == "--device=cuda" else a for a in arguments])
        assert script == "bench/step.py" and out == f"--out={tmp_path}/{name}.json"
        assert args.block_size == T and args.block_size * args.batch_size == 32768 and args.compile


def test_the_stage_of_tests_runs_those_of_a_gpu(tmp_path):
    (tmp_path / "test_x.py").write_text("""import pytest
devices = pytest.mark.parametrize("device", ("cpu", "cuda"))
def test_gpu_a(): pass
def test_cpu(): assert 0
@devices
@pytest.mark.parametrize("width", (1, 2))
def test_conv(width, device): assert device == "cuda"
@devices
def test_loss(device): assert 0
""")
    command = gpu.tests(Context(tmp_path, True))
    files = [word for word in command if word.startswith("tests/")]
    assert {"tests/test_cuda.py", "tests/test_ops.py"} <= set(files)
    command = [word for word in command if word not in files]
    run = subprocess.run([*command, "test_x.py"], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0 and re.search("^=+ 3 passed", run.stdout, re.M)


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
        (scan.main, "--save"), (scan.main, "--save --memory"), (scan.main, "--out=results/y.json"),
        (scan.main, "--save --device=cuda"), (generate.main, "--save"), (step.main, "--save"),
        (online_learning.main, "--save"), (gpu.main, "--out=results/gpu_x"),
        (extrapolation.main, "run --preset=laptop --save"))),
    (scan.main, "--device=cuda --dry_run --save", "does not belong in results/"),
    (scan.main, "--device=cuda --dry_run --without=rnn", "--without=rnn: no such contender; they are longhorn_scan"),
    (scan.main, "--device=cuda", "PyTorch sees no GPU (use --device=cpu"),
    (gpu.main, f"--dry_run --out='{ROOT}/results'", "do not belong in results/"),
    (gpu.main, "--out=never", "sees no GPU here; nothing was run and nothing written"),
    (scan.parse, "--memory --device=cuda", "--memory is for --device=cpu"),
    (scan.parse, "--rounds=0", "--rounds=0: must be at least 1"),
    (scan.parse, "--threads=100000", "--threads=100000: must be at least 1, and at most"),
    (gpu.parse, "--stages=tests,magic", "--stages=magic: no such call or stage"),
    (gpu.parse, "--budget_s=nan", "--budget_s=nan: must be at least 1"),
    (step.parse, "--families=llama,rnn", "--families=rnn: no such family; they are longhorn, mamba"),
    (step.parse, "--batch_size=0", "--batch_size=0: must be at least 1"),
    (step.parse, "--save --n_embd=64", "--save with --n_embd: results/ is for the named sizes only"),
    (step.parse, "--device=cuda", "PyTorch sees no GPU; use --device=cpu"),
    (generate.parse, "--contexts=1K", "--contexts=1K: must be whole numbers"),
    (generate.parse, "--new_tokens=0", "--new_tokens=0: must be at least 1")])
def test_refusals(call, argument, words, capsys, monkeypatch):
    monkeypatch.setattr(measure, "code_version", lambda: {"uncommitted_changes": True})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: words == UNCOMMITTED)
    monkeypatch.setattr(records, "environment", lambda: pytest.fail("it went on"))
    monkeypatch.chdir(ROOT)
    with pytest.raises((SystemExit, ConfigError)) as end:
        call(shlex.split(argument))
    line = str(end.value) if isinstance(end.value, ConfigError) else capsys.readouterr().err.strip().splitlines()[-1]
    assert words in line and "\n" not in line and not (ROOT / "never").exists()
