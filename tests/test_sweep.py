"""The sweep's machinery on a stand-in for train.py that takes no time, and Table 1's plans against the paper's settings."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from configurator import ConfigError
from experiments.scaling import sweep, table1
from experiments.scaling.sweep import Cell

REPO = Path(__file__).resolve().parent.parent

# Notes in its folder when it began and ended, its GPU and its threads; saves `at` when asked to stop, and goes on from it.
STAND_IN = textwrap.dedent("""
    import json, os, pathlib, signal, sys, time
    settings = dict(a[2:].split("=", 1) for a in sys.argv[1:] if a.startswith("--"))
    out = pathlib.Path(settings["out_dir"]); out.mkdir(parents=True, exist_ok=True)
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    note = lambda what: open(out / "notes", "a").write(f"{what} {time.time()}\\n")
    note("began")
    at = int((out / "at").read_text()) if (out / "at").exists() else 0
    note(f"from{at}")
    (out / "env").write_text(json.dumps({k: os.environ.get(k) for k in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")}))
    if settings.get("fail"):
        print("Traceback ..."); print("out of luck with " + settings["fail"]); sys.exit(3)
    for i in range(at, int(settings.get("steps", 1))):
        time.sleep(0.05)
        if asked:
            time.sleep(1.0)  # a large checkpoint on a slow disk
            (out / "at").write_text(str(i)); note("saved"); sys.exit(0)
    (out / "result.json").write_text(json.dumps({"val_loss": 1.0})); note("ended")
""")


@pytest.fixture
def stand_in(tmp_path):
    path = tmp_path / "stand_in.py"
    path.write_text(STAND_IN)
    return path


def notes(folder, name):
    return [line.split() for line in (folder / name / "notes").read_text().splitlines()]


def test_it_runs_what_is_not_finished_and_reports_failures(tmp_path, stand_in, capsys):
    folder = tmp_path / "sweep"
    cells = [Cell("a", []), Cell("bad", ["--fail=b"]), Cell("c", []), Cell("done", [])]
    (folder / "done").mkdir(parents=True)
    (folder / "done" / "result.json").write_text("{}")
    failed = sweep.run_cells(cells, folder, jobs=2, script=str(stand_in), gpus=[])
    assert list(failed) == ["bad"] and "out of luck with b (exit 3" in failed["bad"]
    assert sweep.finished(folder, cells[0]) and sweep.finished(folder, cells[2]) and not sweep.finished(folder, cells[1])
    assert not (folder / "done" / "notes").exists()
    printed = capsys.readouterr().out
    assert "3 of 4 cells to run" in printed and "bad: FAILED" in printed and "validation loss 1.0000" in printed
    cells[1].argv = []
    assert sweep.run_cells(cells, folder, jobs=2, script=str(stand_in), gpus=[]) == {}  # the failure again, the rest not
    assert len([n for n in notes(folder, "bad") if n[0] == "began"]) == 2
    assert len([n for n in notes(folder, "a") if n[0] == "began"]) == 1


@pytest.mark.parametrize("jobs", [1, 3])
def test_so_many_at_a_time(tmp_path, stand_in, jobs):
    cells = [Cell(f"c{i}", ["--steps=15"]) for i in range(2 * jobs)]
    assert sweep.run_cells(cells, tmp_path, jobs=jobs, script=str(stand_in), gpus=[]) == {}
    spans = [(float(n[0][1]), float(n[-1][1])) for n in (notes(tmp_path, c.name) for c in cells)]
    most = max(sum(began <= t < ended for began, ended in spans) for t, _ in spans)
    assert most == jobs
    threads = json.loads((tmp_path / "c0" / "env").read_text())["OMP_NUM_THREADS"]
    assert threads == os.environ.get("OMP_NUM_THREADS", str(max(1, sweep.cores() // jobs)))


def test_one_a_gpu_and_torchrun_over_all(tmp_path, stand_in, monkeypatch):
    cells = [Cell(f"c{i}", ["--steps=8"]) for i in range(4)]
    sweep.run_cells(cells, tmp_path, jobs=2, script=str(stand_in), gpus=["4", "7"])
    seen = [json.loads((tmp_path / c.name / "env").read_text())["CUDA_VISIBLE_DEVICES"] for c in cells]
    assert set(seen[:2]) == {"4", "7"} and set(seen) == {"4", "7"}
    command = cells[0].command(REPO / "out/x", nproc=8)
    assert command[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=8"]
    assert command[-4:] == ["train.py", "--steps=8", "--out_dir=out/x/c0", "--resume=auto"]
    cells = [Cell(f"t{i}", ["--steps=8"]) for i in range(2)]
    python = sweep.sys.executable
    monkeypatch.setattr(Cell, "command", lambda c, folder, *_: [python, str(stand_in), *c.argv, f"--out_dir={folder / c.name}"])
    sweep.run_cells(cells, tmp_path, jobs=2, nproc=2, script=str(stand_in), gpus=["0", "1", "2", "3"])
    seen = {json.loads((tmp_path / c.name / "env").read_text())["CUDA_VISIBLE_DEVICES"] for c in cells}
    assert seen == {"0,1", "2,3"}


RUNNER = """
import sys; sys.path.insert(0, {repo!r})
from experiments.scaling import sweep
cells = [sweep.Cell(f"c{{i}}", ["--steps=30"] if i < 2 else []) for i in range(4)]  # two to be disturbed
try:
    print("failed", sweep.run_cells(cells, {folder!r}, jobs=2, script={script!r}, gpus=[]))
except KeyboardInterrupt as stopped:
    print("stopped:", stopped)
"""


def start(folder, script):
    text = RUNNER.format(repo=str(REPO), folder=str(folder), script=str(script))
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def until(true, seconds=20):
    end = time.time() + seconds
    while not true():
        assert time.time() < end, "it did not happen in time"
        time.sleep(0.02)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_at_any_moment_it_goes_on(tmp_path, stand_in, how):
    if how == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux tells children that their parent died")
    runner = start(tmp_path, stand_in)
    until(lambda: (tmp_path / "c1" / "env").exists() and (tmp_path / "c0" / "env").exists())
    time.sleep(0.3)
    runner.send_signal(how)
    again = start(tmp_path, stand_in) if how == signal.SIGKILL else None  # at once, while the cells still save
    said = runner.communicate(timeout=20)[0]
    if how != signal.SIGKILL:
        assert "stopped: 4 of 4 cells are left" in said
        again = start(tmp_path, stand_in)
    assert "failed {}" in again.communicate(timeout=60)[0]
    for name in ("c0", "c1"):
        what = [n[0] for n in notes(tmp_path, name)]
        assert what == ["began", "from0", "saved", "began", what[4], "ended"]  # it went on, and never two at once
        assert what[4].startswith("from") and what[4] != "from0"
    assert (tmp_path / "c2" / "result.json").exists() and (tmp_path / "c3" / "result.json").exists()


def test_a_plan_is_added_to_and_a_broken_one_is_named(tmp_path):
    sweep.write_plan(tmp_path, [Cell("a", ["x"], {"seed": 1})], preset="laptop")
    sweep.write_plan(tmp_path, [Cell("b", ["y"], {"seed": 2})])
    plan = sweep.read_plan(tmp_path)
    assert plan["preset"] == "laptop" and plan["cells"] == {"a": {"seed": 1, "argv": ["x"]}, "b": {"seed": 2, "argv": ["y"]}}
    for damage in ('{"cells": ', "[]", '{"cells": [1]}', '{"cells": {"a": 1}}', '{"cells": {"../a": {}}}'):
        (tmp_path / "plan.json").write_text(damage)
        with pytest.raises(ConfigError, match="plan.json cannot be read"):
            sweep.read_plan(tmp_path)
    with pytest.raises(ConfigError, match="holds no sweep"):
        sweep.read_plan(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write to .*file/out .Not a directory.: choose another --out"):
        sweep.write_plan(tmp_path / "file" / "out", [])


# ----------------------------------------------------------------------------------------------------------- Table 1's plan

def test_the_paper_preset_is_the_papers():
    """Section 5.2 and Table 5, written out here by hand."""
    cells = table1.first_cells(table1.PRESETS["paper"])
    assert len(cells) == 24 and len({c.name for c in cells}) == 24
    assert table1.more_cells(table1.PRESETS["paper"], table1.best_rates([], ".")) == []
    for c in cells:
        config = table1.load(c.argv)
        large = c.at["size"] == "350M"
        assert (config.n_layer, config.n_embd, config.n_head) == ((24, 1024, 16) if large else (12, 768, 12))
        assert (config.max_iters, config.learning_rate) == ((13500, 3e-4) if large else (4800, 6e-4))
        assert config.batch_tokens == 524288 and config.dataset == "openwebtext" and config.vocab_size == 50304
        assert config.block_size == c.at["context"] and config.batch_tokens % (config.block_size * 8) == 0
        assert (config.beta1, config.beta2, config.weight_decay, config.grad_clip) == (0.9, 0.95, 0.1, 1.0)
        assert config.min_lr == -1 and config.warmup_iters == -1  # a tenth of the peak, 5% of the steps
        assert config.eval_block_size == 0
    assert {(c.at["model"], c.at["size"], c.at["context"]) for c in cells} == {
        (m, s, t) for m in table1.FAMILIES for s in ("120M", "350M") for t in (1024, 4096)}


@pytest.mark.parametrize("name", ["laptop", "gpu"])
def test_runs_of_a_ladder_differ_in_nothing_else(name):
    preset = table1.PRESETS[name]
    first = table1.first_cells(preset)
    best = {(c.at["model"], c.at["size"], c.at["context"]): c.at["learning_rate"] for c in first}
    cells = first + table1.more_cells(preset, best)
    assert len({c.name for c in cells}) == len(cells)
    kinds = set()
    for c in cells:
        config = table1.load(c.argv)
        kinds.add(tuple(getattr(config, key) for key in sweep.SAME_IN_A_SWEEP) + (config.dataset, config.block_size))
        assert (config.model, config.seed, config.max_iters) == (c.at["model"], c.at["seed"], c.at["steps"])
        assert config.learning_rate == c.at["learning_rate"] and f"seed{config.seed}" in c.name
    assert len(kinds) == 1, "settings that must not differ within a sweep"
    for size in preset.sizes:  # the families are of a size
        counts = parameters([c for c in first if c.at["size"] == size])
        assert max(counts) / min(counts) < 1.12, (size, counts)


def parameters(cells):
    import dataclasses

    import torch

    from model import LM, ModelConfig

    counts = []
    for argv in {tuple(c.argv[:-3]): c.argv for c in cells}.values():
        settings = {**dataclasses.asdict(table1.load(argv)), "vocab_size": 256}
        with torch.device("meta"):
            model = LM(ModelConfig(**{f.name: settings[f.name] for f in dataclasses.fields(ModelConfig)}))
        counts.append(model.parameter_count()["total"])
    return counts


def test_equal_compute_lies_on_a_diagonal():
    """The ladder's smallest, middle and largest run have FLOPs within a fifth of each other: an isoFLOP line."""
    preset = table1.PRESETS["laptop"]
    first = table1.first_cells(preset)
    best = {(c.at["model"], c.at["size"], c.at["context"]): c.at["learning_rate"] for c in first}
    cells = [c for c in first + table1.more_cells(preset, best)
             if c.at["model"] == "longhorn" or c.at["size"] == "130K"]  # of the other families a size each: they are measured
    for _ in table1.estimate(cells, 1):
        pass
    flops = {(c.at["size"], c.at["steps"]): c.at["flops"] for c in cells if c.at["model"] == "longhorn"}
    line = [flops["130K", 3200], flops["460K", 1024], flops["1.5M", 320]]
    assert max(line) / min(line) < 1.2
    assert all(c.seconds > 0 and c.at["tokens"] == c.at["steps"] * 1024 for c in cells)


def test_command_line_choices(tmp_path):
    def chosen(*argv):
        return table1.chosen(table1.parser().parse_args(["run", *argv]))

    preset = chosen("--models=longhorn,gla", "--sizes=460K", "--seeds=1,2", "--lrs=1e-3,2e-3", "--tokens=524288")
    assert (preset.models, preset.seeds, preset.lrs, preset.steps) == (("longhorn", "gla"), (1, 2), (1e-3, 2e-3), 512)
    assert preset.ladder["460K"] == (160,) and preset.ladder["130K"] == (160, 1600)
    first = table1.first_cells(preset, ["--wandb=offline"])
    assert len(first) == 4 and all("--wandb=offline" in c.argv for c in first)
    best = {("gla", "460K", 256): 2e-3}  # longhorn's runs failed: nothing of it follows
    assert {(c.at["model"], c.at["stage"], c.at["learning_rate"]) for c in table1.more_cells(preset, best)} == {
        ("gla", "seed", 2e-3), ("gla", "ladder", 2e-3)}
    with pytest.raises(ConfigError, match="preset laptop has 130K, 460K, 1.5M"):
        chosen("--sizes=120M")
    with pytest.raises(ConfigError, match="less than one step"):
        chosen("--tokens=100")
    with pytest.raises(ConfigError, match="config/nothing_laptop.py is not there"):
        table1.first_cells(chosen("--models=nothing"))


@pytest.mark.parametrize("argv, word", [
    (["run", "--seed=3"], "--seed=3"), (["run", "more"], "more"), (["run", "--wandb"], "--wandb"),
    (["run", "--learning_rat=1", "--dry-run"], "did you mean '--learning_rate'"), (["report", "nowhere"], "holds no sweep"),
    (["run", "--lrs=1e-3,x"], "numbers are expected"), (["run", "--lrs=0"], "above 0"), (["run", "--seeds=1,1"], "once"),
    (["run", "--contexts=0"], "above 0"), (["run", "--seeds=-1"], "0 or more"), (["run", "--jobs=-1"], "0 or more"),
    (["run", "--batch_size=0", "--dry-run"], "batch_size 0 must be at least 1")])
def test_mistakes_get_one_line(argv, word, capsys):
    with pytest.raises(SystemExit) as stop:
        table1.main(argv)
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2 and word in last and "error:" in last


def test_a_report_without_matplotlib_is_refused_at_once(monkeypatch, capsys):
    monkeypatch.setattr(sweep.importlib.util, "find_spec", lambda name: None)
    for argv in (["run", "--dry-run"], ["report", "nowhere"]):
        with pytest.raises(SystemExit):
            table1.main(argv)
        assert "pip install matplotlib" in capsys.readouterr().err


def test_a_sweep_of_another_commit_is_not_gone_on_with(tmp_path):
    sweep.write_plan(tmp_path, [Cell("a", [])], commit="0" * 40)
    table1.same_commit(tmp_path)  # nothing finished yet: fine
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "result.json").write_text("{}")
    (tmp_path / "a" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="was begun at commit 000000000000"):
        table1.same_commit(tmp_path)


def test_the_version_of_the_code():
    """A README that was edited is no other code, a model.py is; old records know only that something was."""
    assert sweep.version({"commit": "c", "uncommitted_changes": True, "changed_code": None}) == "c"
    assert sweep.version({"commit": "c", "uncommitted_changes": True, "changed_code": "12ab"}) == "c+12ab"
    assert sweep.version({"commit": "c", "uncommitted_changes": True}) == "c+changed"
    assert sweep.version({"commit": "c", "uncommitted_changes": False}) == "c"
    assert sweep.version({"commit": None, "uncommitted_changes": None, "changed_code": None}) is None


def test_a_cell_that_began_keeps_its_arguments(tmp_path):
    sweep.write_plan(tmp_path, [Cell("a", ["--d_state=8"])])
    sweep.write_plan(tmp_path, [Cell("a", ["--d_state=16"])])  # nothing ran yet
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="ran with other arguments"):
        sweep.write_plan(tmp_path, [Cell("a", ["--d_state=8"])])
    sweep.write_plan(tmp_path, [Cell("a", ["--d_state=16"])])


def test_a_rate_is_the_one_in_its_name():
    preset = table1.chosen(table1.parser().parse_args(["run", "--models=longhorn", "--sizes=130K", "--lrs=0.0031622777"]))
    (c,) = table1.first_cells(preset)
    assert table1.load(c.argv).learning_rate == c.at["learning_rate"] == 0.00316228 and "lr0.00316228_" in c.name


def test_a_preset_yields_to_the_command_line():
    (c,) = table1.first_cells(table1.chosen(table1.parser().parse_args(
        ["run", "--models=longhorn", "--sizes=130K", "--lrs=3e-3"])), ["--log_interval=1"])
    assert table1.load(c.argv).log_interval == 1 and "--log_interval=32" in c.argv  # experiments/scaling/sweep.py reads both


def test_a_config_of_another_model_is_refused_with_the_plan(tmp_path, monkeypatch):
    (tmp_path / "config").mkdir()
    laptop = (REPO / "config/longhorn_laptop.py").read_text()
    for name, model in (("mine", "mine"), ("yours", "longhorn")):
        (tmp_path / f"config/{name}_laptop.py").write_text(f"{laptop}\nmodel = {model!r}\n")
    monkeypatch.setattr(table1, "REPO", tmp_path)
    plan = lambda name: table1.first_cells(table1.chosen(table1.parser().parse_args(["run", f"--models={name}", "--sizes=130K"])))
    assert table1.load(plan("mine")[0].argv).model == "mine"
    with pytest.raises(ConfigError, match="config/yours_laptop.py is to give yours, but its model is longhorn"):
        plan("yours")
    with pytest.raises(ConfigError, match="^config/mine_laptop.py: unknown model 'mine': choose one of longhorn"):
        next(table1.estimate(plan("mine"), 1))


def test_configs_that_differ_are_named_before_anything_runs():
    cells = [Cell("a", ["config/longhorn_laptop.py"], {"model": "longhorn"}),
             Cell("b", ["config/llama_laptop.py", "--batch_tokens=2048"], {"model": "llama"})]
    with pytest.raises(ConfigError, match="batch_tokens is 1024 in longhorn's config and 2048 in llama's"):
        table1.check_settings(cells)


def test_the_best_rate_may_be_one_of_an_earlier_command(tmp_path, monkeypatch):
    at = {"stage": "rate", "model": "gla", "size": "S", "context": 256, "steps": 9, "seed": 1}
    old = [Cell(f"r{rate}", [], {**at, "learning_rate": rate}) for rate in (1e-3, 3e-3)]
    sweep.write_plan(tmp_path, [*old, Cell("long", [], {**at, "steps": 99, "learning_rate": 5e-3})])
    losses = {"r0.001": 2.0, "r0.003": 1.0, "r0.02": 3.0, "long": 0.5}
    monkeypatch.setattr(sweep, "read_run", lambda folder, at: type("Run", (), {"loss": losses[folder.name]}))
    new = [Cell("r0.02", [], {**at, "learning_rate": 2e-2})]
    assert table1.best_rates(new, tmp_path) == {("gla", "S", 256): 3e-3}
