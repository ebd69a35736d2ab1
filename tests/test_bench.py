"""The benchmarks as far as a machine without a GPU can tell: each runs and writes its record, a wrong kernel is not
timed, a limit ends what it limits, and refusals are one line. Numbers taken here mean nothing.

    python -m pytest tests/test_bench.py
"""

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
from bench.gpu import Context, Skip, Stage
from experiments import extrapolation, online_learning
from model import LM, Longhorn, ModelConfig
from runtime import counting, records
from runtime.errors import ConfigError

ROOT = Path(gpu.__file__).resolve().parent.parent
TINY = ["--n_layer=1", "--n_embd=32", "--n_head=2", "--block_size=16", "--vocab_size=64", "--threads=1"]


@pytest.fixture(autouse=True)
def no_search(monkeypatch):
    """A search of all that PyTorch and the tests hold takes 0.3 s, before each time taken; and no time counts here."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)


# ----------------------------------------------------------------------------------------------------- pure functions

def test_bytes_by_hand():
    # B=2, T=64, D=8, N=4, bfloat16: a wide tensor has 2*64*8*2 = 2048 bytes, a narrow one 1024, the states of 2 chunks
    # 4*2*2*8*4 = 512
    moved = measure.bytes_moved(2, 64, 8, 4, 2)
    assert moved["forward"] == 4 * 2048 + 2 * 1024  # x, dt, z in, y out; k, q
    backward = 7 * 2048 + 4 * 1024 + 512  # x, dt, z, dy in, dx, ddt, dz out; k, q, dk, dq; states read
    assert moved["forward_backward"] == moved["forward"] + backward + 512  # states written
    assert measure.bytes_moved(2, 64, 8, 4, 2, extras=False)["forward"] == 3 * 2048 + 2 * 1024


def test_comparison():
    true = {"y": torch.ones(4, dtype=torch.float64), "dk": torch.zeros(3, dtype=torch.float64)}
    assert all(r["right"] for r in measure.compare({"y": torch.ones(4), "dk": torch.zeros(3)}, true, 1e-6).values())
    wrong = measure.compare({"y": torch.full((4,), 1.01), "dk": torch.full((3,), torch.nan)}, true, 1e-6)
    assert not wrong["y"]["right"] and not wrong["dk"]["right"]
    assert wrong["y"]["relative_error"] == pytest.approx(0.01, rel=1e-3)
    in_bf16 = measure.compare({"y": torch.ones(4, dtype=torch.bfloat16)}, {"y": true["y"]}, 1e-6)
    assert in_bf16["y"]["tolerance"] == 1e-6 + 2**-8


def test_contenders_take_turns_and_ratios_are_of_medians():
    calls = []
    timed = {name: lambda name=name: calls.append(name) or len(calls) for name in "abc"}
    assert measure.in_turn(timed, {"a": 3, "b": 1, "c": 2}) == {"a": [1, 4, 6], "b": [2], "c": [3, 5]}
    assert measure.spread([3.0, 1.0, 2.0]) == {"median_seconds": 2.0, "quartile_seconds": [1.5, 2.5],
                                               "fastest_seconds": 1.0, "runs": 3}
    llama, mamba = ({"name": name, "seconds": {"median_seconds": seconds}, "flops_per_token": 1e6,
                     "tokens_per_second": 1e3 / seconds} for name, seconds in (("llama", 0.01), ("mamba", 0.015)))
    rows = step.derive([llama, mamba, {"name": "gla", "reason": "no"}], peak=1e12)
    assert rows[0]["mfu"] == pytest.approx(0.1) and rows[1]["times_llama"] == pytest.approx(1.5)


# ---------------------------------------------------------------------------------------------------------- smoke runs

def test_scan(tmp_path):
    for extra, key in (([], "seconds"), (["--memory"], "kept_bytes")):
        out = tmp_path / f"{key}.json"
        scan.main(["--B=1", "--T=8", "--D=8", "--N=4", "--repeats=2", "--slow_repeats=2", *extra, f"--out={out}"])
        assert all(row[key] for row in json.loads(out.read_text())["rows"])


def test_scan_on_a_gpu_tried_without_one(tmp_path, capsys):
    arguments = ["--device=cuda", "--dry_run", "--rounds=1", "--T=8", "--B=2", "--D=64", "--N=4"]
    assert scan.main([*arguments, f"--out={tmp_path}/record.json"]) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["dry_run"] is True and record["finished"] is True and "commit" in record["environment"]
    assert len(record["correctness"]) == 16 and all(row["right"] for row in record["correctness"])
    rows = {r["contender"]: r for r in record["shapes"][0]["rows"]}
    assert list(rows) == list(scan_cuda.CONTENDERS) and "GPU" in rows["mamba_ssm"]["reason"]
    assert "in short: 16 of 16 comparisons" in capsys.readouterr().out


def test_step(tmp_path, capsys):
    """In processes of their own. Three heads do not divide 32 channels: LLaMA's own message is its reason."""
    out = tmp_path / "step.json"
    assert step.main([*TINY, "--n_head=3", "--families=llama,longhorn", "--rounds=2", f"--out={out}"]) == 1
    llama, longhorn = json.loads(out.read_text())["rows"]
    assert llama["reason"].startswith("ValueError: n_embd 32 is not a multiple of n_head 3") and "seconds" not in llama
    lm = LM(ModelConfig(n_layer=1, n_embd=32, n_head=2, block_size=16, vocab_size=64))
    assert longhorn["parameters"] == counting.parameter_count(lm)["total"] and longhorn["seconds"]["runs"] == 2
    assert longhorn["last_loss"] < longhorn["first_loss"] < 5
    assert longhorn["tokens_per_second"] == pytest.approx(4 * 16 / longhorn["seconds"]["median_seconds"])


def test_generate(tmp_path):
    out = tmp_path / "generate.json"
    assert generate.main([*TINY, "--families=llama,longhorn", "--contexts=8,40", "--chunk=16", "--new_tokens=5",
                          f"--out={out}"]) == 0
    llama, longhorn = json.loads(out.read_text())["rows"]
    assert [c["state_bytes"] for c in llama["contexts"]] == [4 * 2 * 32 * 8, 4 * 2 * 32 * 40]
    assert len({c["state_bytes"] for c in longhorn["contexts"]}) == 1 and out.with_suffix(".png").exists()


@pytest.mark.parametrize("family", ["llama", "mamba", "rwkv4"])
def test_peers_have_our_parameters_and_learn(family):
    pytest.importorskip("transformers")
    config = ModelConfig(model=family, n_layer=2, n_embd=32, n_head=2, block_size=16, vocab_size=64)
    trial = step.Trial({"name": "x", "config": config, "peer": "transformers", "batch_size": 2, "device": "cpu",
                        "dtype": "float32", "compile": False, "threads": 1})
    decayed, rest = trial.optimizer.param_groups
    total = sum(p.numel() for group in (decayed, rest) for p in group["params"])
    assert abs(total / counting.parameter_count(LM(config))["total"] - 1) < 0.01
    assert decayed["weight_decay"] == 0.1 and rest["weight_decay"] == 0 and len(decayed["params"]) > 2
    assert all(p.dim() == 2 for p in decayed["params"])
    first = trial.step()
    assert trial.step() < first


# -------------------------------------------------------------------------------------------------- correctness first

def test_a_wrong_kernel_is_not_timed(monkeypatch):
    honest = scan.longhorn_scan
    monkeypatch.setattr(scan, "longhorn_scan", lambda *a, **kw: tuple(1.01 * r for r in honest(*a, **kw)))
    with pytest.raises(SystemExit, match="wrong in y .*nothing was timed"):
        scan.main(["--B=1", "--T=4", "--D=8", "--N=4"])


def test_a_wrong_or_unsteady_kernel_of_a_gpu_is_named(monkeypatch):
    right, factors = scan_cuda.scans, iter([1.0, 1.0 + 1e-7])

    def wrong(family, backend):
        f = right(family, backend)
        if backend == "torch":
            return f
        factor = 1.5 if family == "mamba" else next(factors)
        return lambda **a: tuple(factor * r for r in f(**a))

    monkeypatch.setattr(scan_cuda, "scans", wrong)
    case = ((2, 40, 24, 16), "float32", {})
    monkeypatch.setattr(scan_cuda, "cases", lambda tiny: [("longhorn", *case), ("mamba", *case)])
    rows, reasons = scan_cuda.check(scan_cuda.DryRun(), tiny=True)
    assert "two runs differ" in reasons["longhorn_scan"] and rows[0]["two_runs_agree"] is False
    assert "WRONG, largest error" in reasons["selective_scan"]


def test_a_model_with_a_wrong_state_is_not_timed(monkeypatch):
    lm, forward = LM(ModelConfig(n_layer=1, n_embd=32, n_head=2, vocab_size=64)).eval(), Longhorn.forward
    assert generate.check(lm)[0] is None

    def forgets(self, u, state=None):
        y, after = forward(self, u, state)
        return y, after and (after[0], torch.zeros_like(after[1]))

    monkeypatch.setattr(Longhorn, "forward", forgets)
    assert generate.check(lm)[0].startswith("the state is wrong: logits")
    monkeypatch.setattr(Longhorn, "forward", lambda self, u, state=None: (u * math.nan, state))
    assert generate.check(lm)[0].startswith("the state is wrong: logits differ by nan")


# ------------------------------------------------------------------------------------------------------- bench/gpu.py

def python(code):
    return lambda context: [sys.executable, "-c", code.replace("RECORD", repr(context.record))]


WAITS = "import time; time.sleep(1000)"


def test_stages_succeed_fail_are_killed_and_skipped(tmp_path, capsys):
    def skip(context):
        raise Skip("pytest is not installed in this Python")

    record = "import json; open(RECORD, 'w').write(json.dumps({'x': float('nan'), 'n': 3}))\nprint('all well')"
    stages = [Stage("good", 60, python(record), lambda rows, text: f"n is {rows[0]['n']}, {text.strip()}"),
              Stage("bad", 60, python("print('before'); raise SystemExit('out of luck')")),
              Stage("slow", 1, python(WAITS)), Stage("absent", 60, skip),
              Stage("no program", 60, lambda context: ["/no/such/program"]),
              Stage("crash", 60, python("import os; os.abort()"))]
    results = gpu.run_all(stages, Context(tmp_path, True), 400, {})
    assert [r["status"] for r in results] == ["ok", "failed", "over time", "skipped", "failed", "failed"]
    good, bad, slow, absent, program, crash = results
    assert good["summary"] == "n is 3, all well" and bad["reason"] == "out of luck"
    assert "killed at its limit" in slow["reason"] and "No such file" in program["reason"]
    assert crash["reason"] == "ended by signal 6 (SIGABRT)"
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["finished"] is True and written["stages"][0]["records"] == [{"x": None, "n": 3}]
    assert "out of luck" in (tmp_path / "gpu.log").read_text()
    stages = [Stage(name, 60, python(f"raise SystemExit({name != 'b'})")) for name in ("build", "b")]
    results = gpu.run_all(stages, Context(tmp_path, True), 400, {})
    assert results[1]["reason"] == "build: failed", "what does not build is not timed"


def test_what_a_killed_stage_started_ends_with_it(tmp_path, monkeypatch):
    """It ignores SIGTERM, and has a child of its own, which holds the end of a pipe that we read."""
    monkeypatch.setattr(gpu, "PATIENCE_S", 0.5)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    code = ("import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            f"f = open({str(fifo)!r}, 'w'); f.write('x'); f.flush(); "
            f"subprocess.Popen([sys.executable, '-c', {WAITS!r}], pass_fds=[f.fileno()]).wait()")
    status, _ = gpu.run_limited([sys.executable, "-c", code], 5, tmp_path / "log")
    os.set_blocking(reader, True)
    text = b"".join(iter(lambda: os.read(reader, 16), b""))  # ends when nobody can write any more
    os.close(reader)
    assert status is None and text == b"x"


def test_calls_name_every_stage_and_their_commands_can_be_parsed(tmp_path):
    assert {stage for call in gpu.CALLS.values() for stage in call} == {stage.name for stage in gpu.STAGES}
    context, commands = Context(tmp_path, False, seconds=120, record="/r"), {s.name: s.command for s in gpu.STAGES}
    assert commands["benchmark"](context)[1:] == ["bench/scan.py", "--device=cuda", "--budget_s=90",
                                                  f"--out={tmp_path}/scan_cuda.json"]
    for name, extra in (("training", []), ("training_compiled", ["--compile"])):
        _, script, *arguments, out = commands[name](context)
        args = step.parse(["--device=cpu" if a == "--device=cuda" else a for a in arguments])
        assert script == "bench/step.py" and out == f"--out={tmp_path}/{name}.json"
        assert args.families == ["longhorn", "llama"] and args.n_layer == 12 and args.compile == bool(extra)
        assert args.block_size * args.batch_size == 32768


def test_inner_stages_on_the_cpu(monkeypatch):
    rows = []
    emit = lambda **record: rows.append(json.loads(json.dumps(record)))
    for stage in ("environment", "build", "small", "convolution"):
        gpu.FUNCTIONS[stage](emit, True, 10)
    assert rows[0]["device"]["torch"] and sum("scan" in r for r in rows) == len(gpu.SMALL)
    assert [r["contender"] for r in rows if "contender" in r] == ["cpu", "torch", "fused"]
    honest = gpu.conv_results
    monkeypatch.setattr(gpu, "conv_results", lambda a, dy, backend: {n: v * (1 + (backend == "cpu"))
                                                                     for n, v in honest(a, dy, backend).items()})
    with pytest.raises(SystemExit, match="wrong at B=2 T=80 D=48: y"):
        gpu.convolution(emit, True, 10)


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

@pytest.mark.parametrize("main, arguments", [
    (scan.main, "--save"), (scan.main, "--save --memory"), (scan.main, "--out=results/y.json"),
    (scan.main, "--save --device=cuda"), (generate.main, "--save"), (step.main, "--save"),
    (online_learning.main, "--save"), (gpu.main, ""),
    (lambda: extrapolation.main(sys.argv[1:]), "run --preset=laptop --save")])
def test_results_take_no_record_of_an_uncommitted_tree(monkeypatch, main, arguments):
    """Each script says so before it measures."""
    monkeypatch.setattr(measure, "code_version", lambda: {"uncommitted_changes": True})
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["script", *arguments.split()])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in arguments or main is gpu.main)
    monkeypatch.setattr(records, "environment", lambda: pytest.fail("it went on"))
    with pytest.raises(ConfigError, match="uncommitted changes"):
        main()


@pytest.mark.parametrize("call, argument, words", [
    (scan.main, "--device=cuda --dry_run --save", "does not belong in results/"),
    (scan.main, "--device=cuda --dry_run --without=rnn", "--without=rnn: no such contender; they are longhorn_scan"),
    (scan.main, "--device=cuda", "PyTorch sees no GPU (use --device=cpu"),
    (gpu.main, f"--dry_run --out='{ROOT}/results'", "do not belong in results/"),
    (gpu.main, "--out=never", "sees no GPU here; nothing was run and nothing written"),
    (scan.parse, "--memory --device=cuda", "--memory is for --device=cpu"),
    (scan.parse, "--rounds=0", "--rounds=0: must be at least 1"),
    (gpu.parse, "--stages=tests,magic", "--stages=magic: no such call or stage"),
    (gpu.parse, "--budget_s=nan", "--budget_s=nan: must be at least 1"),
    (step.parse, "--families=llama,rnn", "--families=rnn: no such family; they are longhorn, mamba"),
    (step.parse, "--batch_size=0", "--batch_size=0: must be at least 1"),
    (step.parse, "--save --n_embd=64", "--save with --n_embd: results/ is for the named sizes only"),
    (step.parse, "--device=cuda", "PyTorch sees no GPU; use --device=cpu"),
    (generate.parse, "--contexts=1K", "--contexts=1K: must be whole numbers"),
    (generate.parse, "--new_tokens=0", "--new_tokens=0: must be at least 1")])
def test_refusals(call, argument, words, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises((SystemExit, ConfigError)) as end:
        call(shlex.split(argument))
    line = str(end.value) if isinstance(end.value, ConfigError) else capsys.readouterr().err.strip().splitlines()[-1]
    assert words in line and "\n" not in line and not (ROOT / "never").exists()
