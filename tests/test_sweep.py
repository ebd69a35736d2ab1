"""Sweeps on a stand-in for train.py that takes no time, and Table 1's plans against the paper's settings."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import records
from configurator import ConfigError
from experiments.scaling import runs, sweep, table1
from experiments.scaling.sweep import Cell

REPO = Path(__file__).resolve().parent.parent

# Notes when it began and ended, its GPU and its threads; saves `at` when asked to stop, and resumes from it.
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
            time.sleep(0.5)  # a large checkpoint on a slow disk
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
    assert [sweep.finished(folder, c) for c in cells] == [True, False, True, True]
    assert not (folder / "done" / "notes").exists()
    printed = capsys.readouterr().out
    assert "3 of 4 cells to run" in printed and "bad: FAILED" in printed and "validation loss 1.0000" in printed
    cells[1].argv = []
    assert sweep.run_cells(cells, folder, jobs=2, script=str(stand_in), gpus=[]) == {}  # the failure again
    assert len([n for n in notes(folder, "bad") if n[0] == "began"]) == 2
    assert len([n for n in notes(folder, "a") if n[0] == "began"]) == 1


def test_so_many_at_a_time(tmp_path, stand_in):
    cells = [Cell(f"c{i}", ["--steps=10"]) for i in range(5)]
    assert sweep.run_cells(cells, tmp_path, jobs=3, script=str(stand_in), gpus=[]) == {}
    spans = [(float(n[0][1]), float(n[-1][1])) for n in (notes(tmp_path, c.name) for c in cells)]
    assert max(sum(began <= t < ended for began, ended in spans) for t, _ in spans) == 3
    threads = json.loads((tmp_path / "c0" / "env").read_text())["OMP_NUM_THREADS"]
    assert threads == os.environ.get("OMP_NUM_THREADS", str(max(1, sweep.cores() // 3)))


def test_one_a_gpu_and_torchrun_over_all(tmp_path, stand_in, monkeypatch):
    cells = [Cell(f"c{i}", ["--steps=8"]) for i in range(4)]
    sweep.run_cells(cells, tmp_path, jobs=2, script=str(stand_in), gpus=["4", "7"])
    devices = lambda c: json.loads((tmp_path / c.name / "env").read_text())["CUDA_VISIBLE_DEVICES"]
    assert {*map(devices, cells[:2])} == {*map(devices, cells)} == {"4", "7"}
    command = cells[0].command(REPO / "out/x", nproc=8)
    assert command[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=8"]
    assert command[-4:] == ["train.py", "--steps=8", "--out_dir=out/x/c0", "--resume=auto"]
    cells = [Cell(f"t{i}", ["--steps=8"]) for i in range(2)]
    alone = lambda c, folder, *_: [sys.executable, str(stand_in), *c.argv, f"--out_dir={folder / c.name}"]
    monkeypatch.setattr(Cell, "command", alone)
    sweep.run_cells(cells, tmp_path, jobs=2, nproc=2, script=str(stand_in), gpus=["0", "1", "2", "3"])
    assert {*map(devices, cells)} == {"0,1", "2,3"}


RUNNER = """
import sys; sys.path.insert(0, {repo!r})
from experiments.scaling import sweep
cells = [sweep.Cell(f"c{{i}}", ["--steps=20"] if i < 2 else []) for i in range(4)]  # two to be disturbed
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


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_killed_at_any_moment_it_resumes(tmp_path, stand_in, how):
    if how == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux tells children that their parent died")
    runner = start(tmp_path, stand_in)
    until(lambda: (tmp_path / "c1" / "env").exists() and (tmp_path / "c0" / "env").exists())
    time.sleep(0.2)
    runner.send_signal(how)
    again = start(tmp_path, stand_in) if how == signal.SIGKILL else None  # at once, while the cells still save
    said = runner.communicate(timeout=20)[0]
    if how != signal.SIGKILL:
        assert "stopped: 4 of 4 cells are left" in said
        again = start(tmp_path, stand_in)
    assert "failed {}" in again.communicate(timeout=60)[0]
    for name in ("c0", "c1"):
        what = [n[0] for n in notes(tmp_path, name)]
        assert what == ["began", "from0", "saved", "began", what[4], "ended"]  # it resumed, and never two at once
        assert what[4].startswith("from") and what[4] != "from0"
    assert (tmp_path / "c2" / "result.json").exists() and (tmp_path / "c3" / "result.json").exists()


def test_a_plan_grows_and_a_broken_one_is_named(tmp_path):
    sweep.write_plan(tmp_path, [Cell("a", ["x"], {"seed": 1})], preset="laptop")
    sweep.write_plan(tmp_path, [Cell("b", ["y"], {"seed": 2})])
    plan = sweep.read_plan(tmp_path)
    assert plan["preset"] == "laptop"
    assert plan["cells"] == {"a": {"seed": 1, "argv": ["x"]}, "b": {"seed": 2, "argv": ["y"]}}
    (tmp_path / "plan.json").write_text('{"cells": ')  # the rest of what can be wrong: test_report.py
    with pytest.raises(ConfigError, match="plan.json cannot be read"):
        sweep.read_plan(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write to .*file/out .Not a directory.: choose another --out"):
        sweep.write_plan(tmp_path / "file" / "out", [])


def test_a_cell_that_began_keeps_its_arguments(tmp_path):
    sweep.write_plan(tmp_path, [Cell("a", ["--d_state=8"])])
    sweep.write_plan(tmp_path, [Cell("a", ["--d_state=16", "--eval_batch_size=32"])])  # nothing ran yet
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="a in .* ran with other arguments .d_state=16, d_state=8.: choose another"):
        sweep.write_plan(tmp_path, [Cell("a", ["--d_state=8"])])
    cell = Cell("a", ["--d_state=16", "--eval_interval=9"])  # what changes no result may differ
    sweep.write_plan(tmp_path, [cell])
    assert cell.argv == sweep.read_plan(tmp_path)["cells"]["a"]["argv"] == ["--d_state=16", "--eval_batch_size=32"]


def test_the_identity_of_code():
    """A hash of what was imported; of older records the commit, where a README that was edited is no other code."""
    assert sweep.code_of({"code": "0123456789ab", "commit": "c", "uncommitted_changes": True}) == "0123456789ab"
    old = {"commit": "c" * 40, "uncommitted_changes": True}
    assert sweep.code_of({**old, "changed_code": None}) == "c" * 12
    assert sweep.code_of({**old, "changed_code": "12ab"}) == "c" * 12 + "+12ab"
    assert sweep.code_of(old) == "c" * 12 + "+changed"
    assert sweep.code_of({**old, "uncommitted_changes": False}) == "c" * 12
    assert sweep.code_of({"commit": None, "uncommitted_changes": None, "changed_code": None}) is None


@pytest.mark.parametrize("recorded, said", [
    ([{"model.py": "1", "only_there.py": "9"}], None), ([{"model.py": "2"}], "cafe0: model.py"), ([{}], "unknown"),
    ([{"model.py": "2"}, {"model.py": "1"}], None), ([], None)])  # one of its versions is this one
def test_a_sweep_of_other_code_goes_on_and_says_so(tmp_path, monkeypatch, capsys, recorded, said):
    now = {"code": "abcd", "code_files": {"model.py": "1", "table1.py": "7"}}
    monkeypatch.setattr(records, "code_identity", lambda: now, raising=False)
    sweep.say_changed_code(tmp_path)
    sweep.write_plan(tmp_path, [Cell(f"c{i}", []) for i in range(3)])
    for i, files in enumerate(recorded):
        (tmp_path / f"c{i}").mkdir()
        record = {"environment": {"code": f"cafe{i}", "code_files": files}}
        (tmp_path / f"c{i}" / "config.json").write_text(json.dumps(record))
    sweep.say_changed_code(tmp_path)
    out = capsys.readouterr().out
    assert said in out and "--accept_code" in out if said else out == ""


def chosen(*argv):
    return table1.chosen(table1.parser().parse_args(["run", *argv]))


def every_cell(preset):
    first = table1.first_cells(preset)
    return first + table1.more_cells(preset, {table1.place(c.at): c.at["learning_rate"] for c in first})


def test_the_paper_preset_is_the_papers():
    """Section 5.2 and Table 5, written out here by hand."""
    cells = every_cell(table1.PRESETS["paper"])
    assert len(cells) == 24 and len({c.name for c in cells}) == 24
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
    cells = every_cell(preset)
    assert len({c.name for c in cells}) == len(cells)
    kinds = set()
    for c in cells:
        config = table1.load(c.argv)
        common = [getattr(config, key, None) for key in runs.SAME_IN_A_SWEEP]
        kinds.add((*common, config.dataset, config.block_size))
        assert (config.model, config.seed, config.max_iters) == (c.at["model"], c.at["seed"], c.at["steps"])
        assert config.learning_rate == c.at["learning_rate"] and f"seed{config.seed}" in c.name
    assert len(kinds) == 1, "settings that must not differ within a sweep"
    one_each = {(c.at["model"], c.at["size"]): c for c in cells}.values()
    table1.estimate(one_each)
    for size in preset.sizes:  # the families are of a size
        counts = [c.at["parameters"] for c in one_each if c.at["size"] == size]
        assert len(counts) == 6 and max(counts) / min(counts) < 1.12, (size, counts)
    if name == "laptop":  # smallest, middle and largest of a ladder: an isoFLOP line
        ours = [c for c in cells if c.at["model"] == "longhorn"]
        table1.estimate(ours)
        flops = {(c.at["size"], c.at["steps"]): c.at["flops"] for c in ours}
        line = [flops["130K", 3200], flops["460K", 1024], flops["1.5M", 320]]
        assert max(line) / min(line) < 1.2 and all(c.seconds > 0 for c in ours)


def test_command_line_choices():
    preset = chosen("--models=longhorn,gla", "--sizes=460K", "--seeds=1,2", "--lrs=1e-3,2e-3", "--steps=512,160")
    assert (preset.models, preset.seeds, preset.lrs, preset.steps) == (("longhorn", "gla"), (1, 2), (1e-3, 2e-3), 512)
    assert preset.ladder == {"460K": (160,)} and not any(chosen("--steps=512").ladder.values())
    first = table1.first_cells(preset, ["--wandb=offline"])
    assert len(first) == 4 and all("--wandb=offline" in c.argv for c in first)
    best = {("gla", "460K", 256): 2e-3}  # longhorn's runs failed: nothing of it follows
    assert {(c.at["model"], c.at["stage"], c.at["steps"]) for c in table1.more_cells(preset, best)} == {
        ("gla", "seed", 512), ("gla", "ladder", 160)}
    sized = table1.first_cells(chosen("--models=longhorn", "--lrs=3e-3", "--sizes=130K", "--sizes=250K:n_embd=96"))
    assert [c.at["size"] for c in sized] == ["130K", "250K"] and table1.load(sized[1].argv).n_embd == 96
    (c,) = table1.first_cells(chosen("--models=longhorn", "--sizes=130K", "--lrs=0.0031622777"), ["--log_interval=1"])
    assert table1.load(c.argv).learning_rate == c.at["learning_rate"] == 0.00316228 and "lr0.00316228_" in c.name
    assert table1.load(c.argv).log_interval == 1 and "--log_interval=32" in c.argv  # the command line wins


def test_a_sweep_grows_by_what_is_new(tmp_path, monkeypatch):
    """A second command with one more seed runs that seed's cells; a label keeps its meaning."""
    ran = []

    def run_cells(cells, folder, *_):
        ran.extend(c.name for c in cells if not sweep.finished(folder, c))
        for c in cells:
            (folder / c.name).mkdir(exist_ok=True)
            for file in ("result.json", "config.json"):
                (folder / c.name / file).write_text("{}")
        return {}
    monkeypatch.setattr(sweep, "run_cells", run_cells)
    monkeypatch.setattr(table1, "read_run", lambda folder, at: type("Run", (), {"loss": at["learning_rate"]}))
    monkeypatch.setattr(table1, "check_data", lambda *_: None)
    monkeypatch.setattr(table1, "write_report", lambda *_: {})

    def run(*argv):
        ran.clear()
        assert table1.main(["run", f"--out={tmp_path}", "--models=gla", "--lrs=1e-3,3e-3", "--steps=8", *argv]) == 0
        return ran
    assert len(run("--sizes=130K", "--seeds=1,2")) == 3 and run("--sizes=130K", "--seeds=1,2") == []
    assert run("--sizes=130K", "--seeds=1,2,3") == ["gla_130K_256_8steps_lr0.001_seed3"]
    assert len(run("--sizes=130K", "--sizes=80K:n_layer=1,n_embd=64,n_head=1", "--seeds=1")) == 2
    assert len(run("--sizes=130K", "--seeds=1", "--models=gla,mamba")) == 2
    plan = sweep.read_plan(tmp_path)
    assert len(plan["cells"]) == 8 and len(plan["commands"]) == 1 and set(plan["sizes"]) == {"130K", "80K"}
    with pytest.raises(SystemExit):
        run("--sizes=80K:n_layer=2", "--seeds=1")


def test_the_best_rate_may_be_one_of_an_earlier_command(tmp_path, monkeypatch):
    at = {"stage": "rate", "model": "gla", "size": "S", "context": 256, "steps": 9, "seed": 1}
    old = [Cell(f"r{rate}", [], {**at, "learning_rate": rate}) for rate in (1e-3, 3e-3)]
    sweep.write_plan(tmp_path, [*old, Cell("long", [], {**at, "steps": 99, "learning_rate": 5e-3})])
    losses = {"r0.001": 2.0, "r0.003": 1.0, "r0.02": 3.0, "long": 0.5}
    monkeypatch.setattr(table1, "read_run", lambda folder, at: type("Run", (), {"loss": losses[folder.name]}))
    new = [Cell("r0.02", [], {**at, "learning_rate": 2e-2})]
    assert table1.best_rates(new, tmp_path) == {("gla", "S", 256): 3e-3}


@pytest.mark.parametrize("argv, word", [
    (["run", "--seed=3"], "--seed=3"), (["run", "more"], "more"), (["run", "--wandb"], "--wandb"),
    (["run", "--learning_rat=1", "--dry-run"], "did you mean '--learning_rate'"), (["report", "nowhere"], "no sweep"),
    (["run", "--lrs=1e-3,x"], "numbers are expected"), (["run", "--lrs=0"], "above 0"),
    (["run", "--seeds=1,1"], "once"),
    (["run", "--contexts=0"], "above 0"), (["run", "--seeds=-1"], "0 or more"), (["run", "--jobs=-1"], "0 or more"),
    (["run", "--batch_tokens=0", "--dry-run"], "batch_tokens 0 must be at least 1"),
    (["run", "--sizes=120M"], "preset laptop has 130K, 460K, 1.5M; define another size as --sizes=120M:n_layer"),
    (["run", "--sizes=460K:n_layer=2"], "choose another label"), (["run", "--sizes=a,b:n_layer=2"], "LABEL:key=value"),
    (["run", "--sizes=9K:n_layer"], "LABEL:key=value"), (["run", "--sizes=9K:seed=2"], "a size cannot set seed"),
    (["run", "--sizes=9K:n_lair=2", "--dry-run"], "did you mean '--n_layer'"),
    (["run", "--models=nothing"], "config/nothing_laptop.py does not exist")])
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


def test_a_config_of_another_model_is_refused_with_the_plan(tmp_path, monkeypatch):
    shutil.copytree(REPO / "config", tmp_path / "config")
    laptop = (REPO / "config/longhorn_laptop.py").read_text()
    for name, model in (("mine", "mine"), ("yours", "longhorn")):
        (tmp_path / f"config/{name}_laptop.py").write_text(f"{laptop}\nmodel = {model!r}\n")
    monkeypatch.setattr(table1, "REPO", tmp_path)
    plan = lambda name: table1.first_cells(chosen(f"--models={name}", "--sizes=130K"))
    assert table1.load(plan("mine")[0].argv).model == "mine"
    with pytest.raises(ConfigError, match="config/yours_laptop.py sets model to longhorn: write model = 'yours' there"):
        plan("yours")
    with pytest.raises(ConfigError, match="^config/mine_laptop.py: .*mine"):
        table1.estimate(plan("mine"))


def test_configs_that_differ_are_named_before_anything_runs():
    cells = [Cell("a", ["config/longhorn_laptop.py"], {"model": "longhorn"}),
             Cell("b", ["config/llama_laptop.py", "--batch_tokens=2048"], {"model": "llama"})]
    with pytest.raises(ConfigError, match="batch_tokens is 1024 in longhorn's config and 2048 in llama's"):
        table1.check_settings(cells)
