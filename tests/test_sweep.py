"""Sweeps of a stand-in for train.py that takes no time, the plans of presets, and the paper's settings.

test_chaos.py kills sweeps of train.py itself; test_cluster.py runs them under Slurm and Ray.
"""

import contextlib
import io
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from faults import both_have, cell_events, drive, gated, notes, wait_until
from helpers import ROOT, refuse, refused, run_program, succeed, table, write_folder
from safetensors.torch import save_file

from common.errors import ConfigError
from experiments import report, sweep
from experiments.sweeps import engines, machine, runner
from experiments.sweeps.runner import Cell
from model import FAMILIES, SwiGLU
from runtime import records
from runtime.records import BadRecord, is_finished


def run(cells, folder, script, jobs=2, nproc=1, gpus=()):
    with contextlib.closing(engines.open_engine("", "", folder, jobs, nproc, gpus)) as engine:
        return runner.run_cells(cells, folder, engine, script)


@pytest.fixture
def drive_gated(start, tmp_path, stand_in):
    """drive_gated(n) starts a driver of n cells. The first two cells wait until the file `gate` exists."""
    return lambda n=4: drive(start, tmp_path, stand_in, gated(tmp_path, n))


def has_run(folder, *checkpoints, finished=False):
    """Write the files of a run that has begun and has kept checkpoints of these steps."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    for step in checkpoints:
        save_file({}, folder / f"checkpoint-{step}.safetensors", {"meta": json.dumps({"step": step}), "crc32": "0"})
    if finished:
        (folder / "result.json").write_text('{"steps": 1}')


def environment_of(folder):
    return json.loads((folder / "env").read_text())


def test_unfinished_cells_run_and_failures_are_reported(tmp_path, stand_in, capsys):
    cells = [Cell("bad", ["--fail=b"]), Cell("quiet", ["--quiet=1"]), Cell("a", []), Cell("done", [])]
    has_run(tmp_path / "done", finished=True)
    failed = run(cells, tmp_path, stand_in, jobs=1)
    assert list(failed) == ["bad", "quiet"] and "out of luck with b (exit 3" in failed["bad"]
    assert "stopped before its end" in failed["quiet"]  # with exit code 0
    assert is_finished(tmp_path / "a") and not (tmp_path / "done/notes").exists()
    printed = capsys.readouterr().out
    for words in ("3 of 4 cells to run, 1 at a time", "bad: FAILED", "val_loss 1.0000",
                  "0 queued, 0 running, 2 done, 2 failed", "2 of 4 cells are finished"):
        assert words in printed
    cells[0].argv = cells[1].argv = []
    assert run(cells, tmp_path, stand_in) == {}  # runs the failures again
    assert [cell_events(tmp_path, name).count("started") for name in ("bad", "a")] == [2, 1]


@pytest.mark.parametrize("printed, why", [
    ("a.py: error: no data\nSee the manual.", "a.py: error: no data"), ("Killed\n-----\nsubmitit INFO bye", "Killed"),
    ("", "it printed nothing")])
def test_a_cell_failed_for_the_reason_that_its_last_try_printed(tmp_path, printed, why):
    (tmp_path / "out.txt").write_text(f"$ train.py\na.py: error: old\n$ train.py\n{printed}\n")
    assert runner.last_words(tmp_path / "out.txt", "exit 2") == f"{why} (exit 2; all of it in {tmp_path}/out.txt)"


def test_as_many_cells_run_at_a_time_as_jobs_says(tmp_path, stand_in, monkeypatch):
    """With three cells on eight cores, each gets two threads."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(engines, "cores", lambda: 8)
    cells = [Cell(f"c{i}", ["--together=3"]) for i in range(5)]
    assert run(cells, tmp_path, stand_in, jobs=3) == {}
    spans = [(float(n[0][1]), float(n[-1][1])) for n in (notes(tmp_path, c.name) for c in cells)]
    assert max(sum(began <= t < ended for began, ended in spans) for t, _ in spans) == 3
    assert {environment_of(tmp_path / c.name)["OMP_NUM_THREADS"] for c in cells} == {"2"}


BESIDE_EACH_OTHER = """
recall/mqar.py run --mixers=gla --Ts=64                2  on 2 GPU(s), 8 at a time
sweep.py laptop longhorn --sizes=460K                  2  on 2 GPU(s), 2 at a time
sweep.py laptop longhorn --sizes=460K                  0  on 6 CPU core(s), 6 at a time
sweep.py paper longhorn --sizes=120M                   2  on 2 GPU(s), 1 at a time by 2 processes each
sweep.py paper longhorn --sizes=120M --nproc=1 --jobs=3  2  3 at a time
"""


@pytest.mark.parametrize("line, gpus, words", table(BESIDE_EACH_OTHER))
def test_an_experiment_says_how_many_cells_run_at_a_time(monkeypatch, line, gpus, words):
    monkeypatch.setattr(runner, "cores", lambda: 6)
    monkeypatch.setattr(runner, "visible_gpus", lambda: list(range(int(gpus))))
    program, *argv = line.split()
    assert f"{words}\n" in succeed([*argv, "--dry-run"], program=f"experiments/{program}").out


@pytest.mark.parametrize("seconds, words", [(599, "599 s"), (600, "10 min"), (5970, "100 min"), (6000, "1.7 h"),
                                            (3.6e7, "10,000.0 h")])
def test_durations_have_a_fitting_unit(seconds, words):
    assert runner.hours(seconds) == words


def test_each_cell_has_a_gpu_or_nproc_gpus_of_its_own(tmp_path, stand_in, monkeypatch):
    devices = lambda cells: {environment_of(tmp_path / c.name)["CUDA_VISIBLE_DEVICES"] for c in cells}
    cells = [Cell(f"c{i}", ["--together=2"]) for i in range(4)]
    run(cells, tmp_path, stand_in, gpus=["4", "7"])
    assert devices(cells[:2]) == devices(cells) == {"4", "7"}
    cells = [Cell(f"t{i}", ["--together=6"]) for i in range(2)]
    alone = lambda c, folder, *_: [sys.executable, stand_in, *c.argv, f"--out_dir={folder / c.name}"]
    monkeypatch.setattr(Cell, "command", alone)
    run(cells, tmp_path, stand_in, nproc=2, gpus=["0", "1", "2", "3"])
    assert devices(cells) == {"0,1", "2,3"}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_cells_of_a_killed_driver_save_while_those_of_the_next_driver_wait(tmp_path, drive_gated):
    driver = drive_gated()
    wait_until(both_have(tmp_path, "held"))
    driver.kill()
    wait_until(both_have(tmp_path, "saving"))
    driver.wait()
    again = drive_gated()
    wait_until(lambda: all("is in use by process" in (tmp_path / f"{c}.txt").read_text() for c in ("c0", "c1")))
    (tmp_path / "gate").touch()
    assert again.wait(120) == 0 and "failed {}" in again.said()
    for name in ("c0", "c1"):
        assert cell_events(tmp_path, name) == ["started", "from0", "started", "saved", "from1", "ended"]
    assert is_finished(tmp_path / "c2") and is_finished(tmp_path / "c3")


def test_a_sweep_has_one_driver(tmp_path, drive_gated):
    """A second driver is refused in a line that names the first. A killed driver leaves nothing behind."""
    first = drive_gated()
    wait_until(both_have(tmp_path, "held"))
    second = drive_gated()
    assert second.wait(60) == 2 and len(second.said().splitlines()) == 1
    assert f"is driven by process {first.pid} on {platform.node()}" in second.said() and "--cluster" in second.said()
    (tmp_path / "gate").touch()
    first.kill()
    first.wait()
    assert drive_gated().wait(60) == 0


def test_a_killed_cell_goes_on_if_it_got_further(tmp_path, drive_gated):
    """A cell that got no further has failed: it would be killed again and again."""
    driver = drive_gated(2)
    wait_until(both_have(tmp_path, "held"))
    (tmp_path / "c0" / "checkpoint-0.safetensors").touch()
    for name in ("c0", "c1"):
        os.kill(int((tmp_path / name / "pid").read_text()), signal.SIGKILL)
    wait_until(lambda: "c1: FAILED" in driver.said() and cell_events(tmp_path, "c0")[-1] == "from1")
    (tmp_path / "gate").touch()
    assert driver.wait(60) == 0 and "c0: signal 9 after" in driver.said()
    assert "failed {'c1': 'it printed nothing (signal 9; all of it in " in driver.said()


def test_the_bar_of_a_terminal_shows_the_counts(tmp_path, stand_in, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    run([Cell(f"c{i}", []) for i in range(3)], tmp_path, stand_in, jobs=1)
    shown = terminal.getvalue()
    assert "2 queued, 1 running, 0 done, 0 failed" in shown and "0 queued, 0 running, 3 done, 0 failed, about" in shown


def test_a_plan_grows_and_a_cell_that_began_keeps_its_arguments(tmp_path):
    runner.write_plan(tmp_path, [Cell("a", ["--d_state=8"], {"seed": 1})], preset="laptop", models=["gla"])
    with pytest.raises(ConfigError, match="the plan's cells lack 'stage'"):  # a sweep of recall has none
        sweep.find_rates(sweep.PRESETS["duel"], tmp_path, None)
    runner.write_plan(tmp_path, [Cell("b", ["y"], {"seed": 2})], models=["mamba", "gla"])
    assert runner.read_plan(tmp_path) == {"preset": "laptop", "models": ["gla", "mamba"], "cells": {
        "a": {"seed": 1, "argv": ["--d_state=8"]}, "b": {"seed": 2, "argv": ["y"]}}}
    began = ["--d_state=16", "--eval_batch_size=32"]
    runner.write_plan(tmp_path, [Cell("a", began)])  # nothing has run yet
    has_run(tmp_path / "a")
    with pytest.raises(ConfigError, match="a in .* ran with other arguments .d_state=16, d_state=8.: choose another"):
        runner.write_plan(tmp_path, [Cell("a", ["--d_state=8"])])
    cell = Cell("a", ["--d_state=16", "--eval_interval=9"])  # settings that change no result may differ
    runner.write_plan(tmp_path, [cell])
    assert cell.argv == runner.read_plan(tmp_path)["cells"]["a"]["argv"] == began


def test_a_sweep_is_the_papers_if_all_of_its_commands_are(tmp_path):
    found = []
    for argv in ["longhorn"], [], ["--steps=64"], ["longhorn"]:
        of_paper = sweep.Sweep(["paper", *argv])
        of_paper.preset, of_paper.folder = of_paper.chosen(), tmp_path
        runner.write_plan(tmp_path, [], **of_paper.about())
        found.append(runner.read_plan(tmp_path)["paper"])
    assert found == [True, True, False, False]


@pytest.mark.parametrize("recorded, said", [  # if there are two versions, one is the present code
    (["1"], None), (["2"], "cafe0: model.py"), (["2", "1"], None), ([], None)])
def test_a_sweep_of_other_code_goes_on_and_says_so(tmp_path, monkeypatch, capsys, recorded, said):
    now = {"code": "abcd", "code_files": {"model.py": "1", "sweep.py": "7"}}
    monkeypatch.setattr(records, "code_identity", lambda: now, raising=False)
    runner.say_changed_code(tmp_path)  # before there is a plan
    runner.write_plan(tmp_path, [Cell(f"c{i}", []) for i in range(3)])
    for i, version in enumerate(recorded):
        has_run(tmp_path / f"c{i}")
        files = {"model.py": version, "only_there.py": "9"}
        record = {"environment": {"code": f"cafe{i}", "code_files": files}}
        (tmp_path / f"c{i}/config.json").write_text(json.dumps(record))
    runner.say_changed_code(tmp_path)
    out = capsys.readouterr().out
    assert said in out and "--accept_code" in out if said else out == ""
    with pytest.raises(ConfigError, match="--accept_code=f00d: the code is .*abcd"):
        runner.say_changed_code(tmp_path, ["abcd", "f00d"])


def chosen(*argv):
    return sweep.Sweep(argv).chosen()


def every_cell(preset):
    rates = {(m, s): 2e-3 for m in preset.models for s in preset.sizes}
    search = []
    for model, size in rates:
        search += sweep.search_cells(preset, model, size, sweep.first_rates(preset.sizes[size].rates, 2e-3))
    return search + sweep.reported_cells(preset, rates)


def test_the_paper_preset_has_the_papers_settings():
    """The settings of Section 5.2 and Table 5 are written out by hand."""
    cells = every_cell(sweep.PRESETS["paper"])
    sizes = {"120M": (12, 768, 12, 4800, 6e-4), "350M": (24, 1024, 16, 13500, 3e-4)}
    # min_lr -1 is a tenth of the peak, warmup_iters -1 is 5% of the steps
    same = dict(batch_tokens=524288, dataset="openwebtext", vocab_size=50304, schedule="cosine", beta1=0.9, beta2=0.95,
                weight_decay=0.1, grad_clip=1.0, min_lr=-1, warmup_iters=-1, eval_block_size=0)
    for c in cells:
        config = sweep.load(c.argv)
        layers = config.n_layer, config.n_embd, config.n_head
        assert (*layers, config.max_iters, config.learning_rate) == sizes[c.at["size"].removesuffix(" at 4096")]
        assert config.block_size == (4096 if "4096" in c.at["size"] else 1024) == c.at["context"]
        assert {key: getattr(config, key) for key in same} == same
        assert config.batch_tokens % (config.block_size * config.micro_batch_size * 8) == 0  # eight GPUs
    assert Counter((c.at["model"], c.at["size"]) for c in cells) == dict.fromkeys(itertools.product(
        sweep.FAMILIES, ("120M", "350M", "120M at 4096", "350M at 4096")), 1)


@pytest.mark.parametrize("argv, search, seed", [
    (["duel", "longhorn", "mamba"], 2 * (4 + 3) * 4, 2 * 2 * 16 * 3), (["laptop"], 6 * 2 * 4, 6 * (5 + 3) * 3)])
def test_runs_of_a_preset_differ_only_as_planned(argv, search, seed):
    """Runs are counted by hand: families x seeds x rates, families x seeds x budgets, and one cosine per size."""
    preset = chosen(*argv)
    cells = every_cell(preset)
    assert len({c.name for c in cells}) == len(cells)
    assert Counter(c.at["stage"] for c in cells) == {"search": search, "seed": seed, "cosine": 2}
    sweep.check_settings(cells)
    seeds = {}
    for c in cells:
        config, stage = sweep.load(c.argv), c.at["stage"]
        assert config.schedule == ("cosine" if stage == "cosine" else "wsd")
        assert config.warmup_iters == 26  # 5% of the search's steps
        seeds.setdefault(stage, set()).add(config.seed)
    assert min(seeds["search"]) == 1 and max(seeds["search"]) < min(seeds["seed"]) == min(seeds["cosine"]) == 1001


ALIKE = """
laptop  1.5M  0.02   longhorn mamba llama gla retnet rwkv
laptop  460K  0.031  longhorn mamba llama gla retnet rwkv
law     60K   0.01   longhorn llama gla rwkv gated_deltanet
law     130K  0.01   longhorn llama gla rwkv gated_deltanet
law     250K  0.01   longhorn llama gla rwkv gated_deltanet
"""


@pytest.mark.parametrize("preset, size, within, models", table(ALIKE))
def test_families_have_about_longhorns_number_of_parameters(preset, size, within, models):
    cells = [sweep.make_cell(sweep.PRESETS[preset], "seed", model, size, None, None, 1) for model in models.split()]
    sweep.estimate(cells)
    for cell in cells:
        assert cell.at["parameters"] == pytest.approx(cells[0].at["parameters"], rel=float(within))


def test_the_law_runs_one_family_and_size_after_another():
    """Budgets in MB and seeds are written out by hand. A seed's longest run is trained from the start, and its shorter
    runs only in their last fifth."""
    preset = chosen("law", "longhorn", "gla", "llama")
    cells = sweep.reported_cells(preset, dict.fromkeys(itertools.product(preset.models, preset.sizes), 2e-3))
    budgets, places = [16, 8, 4, 2, 1, 0.5], []
    for model, seeds, also in (("longhorn", 2, [0.25]), ("gla", 4, []), ("llama", 2, [])):
        for size in ("130K", "460K", "1.5M", "60K", "250K"):
            places += itertools.product([model], [size], range(1001, 1001 + seeds), budgets + also)
    assert [(c.at["model"], c.at["size"], c.at["seed"], c.at["steps"] / 1024) for c in cells] == places
    assert preset.size("retnet", "60K").seeds == 4 and preset.size("mamba", "60K").budgets[0] == 256
    assert [c.at["steps"] - c.at["from"] for c in cells[:7]] == [16384, 1638, 819, 410, 205, 102, 51]
    config = sweep.load(cells[-1].argv)
    assert (config.dtype, config.final_eval_tokens, config.eval_block_size) == ("float32", 0, 0)


def test_the_law_on_a_gpu_is_a_ladder_to_the_papers_120M(monkeypatch, capsys):
    """The ladder has five sizes, each with 20 to 200 tokens per parameter."""
    preset = chosen("law_gpu", "longhorn")
    cells = sweep.reported_cells(preset, dict.fromkeys(itertools.product(preset.models, preset.sizes), 1e-3))
    sweep.estimate(cells)
    per_parameter = {size: [] for size in ("8M", "15M", "30M", "60M", "120M")}
    for cell in cells:
        per_parameter[cell.at["size"]].append(cell.at["tokens"] / cell.at["parameters"])
    for found in per_parameter.values():
        assert sorted(found) == pytest.approx([20, 20, 43, 43, 93, 93, 200, 200], rel=0.01)
    assert cells[-1].at["parameters"] == pytest.approx(128.6e6, rel=1e-3)  # the paper's 120M
    monkeypatch.setattr(runner, "visible_gpus", lambda: ["0"])
    for named in [], ["--gpu=H100"]:  # a GPU that is here, or a named GPU that need not be
        assert sweep.main(["law", "longhorn", "--dry-run", *named]) == 0
        monkeypatch.undo()
        assert "=out/scaling_law_gpu/longhorn_8M_" in capsys.readouterr().out


def test_rates_of_a_width_come_from_the_line_through_other_widths():
    """By hand, in powers of two, the line through three rates has a slope of -1/2 with an error of sqrt(1/12). With two
    rates, the last one is scaled by 1 / width."""
    found = {2**6: 2**-8, 2**7: 2**-9, 2**8: 2**-9}
    assert sweep.rate_by_width(found, 32) == pytest.approx(2 ** (-26 / 3 + 1))
    line = sweep.line_of_rates(found)
    assert (line.slope, line.stderr) == pytest.approx((-0.5, 12**-0.5))
    assert sweep.rate_by_width({64: 5e-3, 128: 3e-3}, 96) == pytest.approx(4e-3)

    # on a GPU, a search begins with rates a factor of 2 apart around 0.5 / width
    assert sweep.first_rates(3, sweep.PRESETS["law_gpu"].rate_times_width / 256) == [9.77e-4, 1.95e-3, 3.91e-3]


def test_the_numbers_of_a_plan_are_right_at_budgets_that_do_not_divide(capsys):
    """333 and 101 steps of 1,024 tokens: a fifth is decay, and a branch trains only after it leaves its trunk."""
    preset = chosen("duel", "longhorn", "mamba", "--sizes=460K", "--steps=333", "--budgets=101", "--seeds=1")
    trunk, branch = sweep.seed_cells(preset, "longhorn", "460K", 2e-3, 1001, {333, 101})
    assert "--keep_steps=81,266" in trunk.argv and not trunk.after and trunk.at["from"] == 0
    assert branch.after == trunk.name and branch.argv[-1].endswith(f"/{trunk.name}@81") and branch.at["from"] == 81
    (search, *_) = sweep.search_cells(preset, "longhorn", "460K", [2e-3])
    assert search.at["steps"] == 166
    cells = [trunk, branch]
    sweep.estimate(cells)
    assert [c.at["tokens"] for c in cells] == [333 * 1024, 101 * 1024]
    trained = [333 * 1024, (101 - 81) * 1024]
    per_token = [c.at["flops"] / n for c, n in zip(cells, trained, strict=True)]
    parameters = trunk.at["parameters"]
    assert per_token[0] == per_token[1] and 5.5 * parameters < per_token[0] < 9 * parameters  # 6 N plus the states
    seconds = [8 + 3.9e-5 * n + 1.12e-11 * c.at["flops"] for c, n in zip(cells, trained, strict=True)]
    assert [c.seconds for c in cells] == pytest.approx(seconds)
    trunk.seconds, branch.seconds = 9000, 3000
    sweep.Sweep(["laptop"]).say_plan(cells, 3, "6 CPU core(s)")
    head, rule, *lines, total, about = capsys.readouterr().out.splitlines()
    words = [word.strip() for word in lines[0].split("|")]
    assert words[1:7] == ["longhorn", "460K", "256", "466.6K", "341K", "seed"] and "103.4K" in lines[1]
    assert total == f"2 runs, {trunk.at['flops'] + branch.at['flops']:.2g} FLOPs on 6 CPU core(s), 3 at a time"
    assert about.startswith("about 67 min on cores")


def test_the_hours_of_a_loop_over_time_are_timed(monkeypatch, capsys):
    """Only the mixers of the two layers move the clock. The fastest of three micro-batches counts."""
    now, takes = [0], iter([9, 9, 3, 3, 5, 5])

    class Slow(SwiGLU):
        def forward(self, x, state=None):
            now[0] += next(takes)
            return super().forward(x)

    monkeypatch.setattr(sweep.time, "perf_counter", lambda: now[0])
    monkeypatch.setitem(FAMILIES, "mamba", [Slow])
    plan = sweep.Sweep(["duel", "longhorn", "mamba"])
    plan.timed = {("longhorn", "460K"): 1e-3}
    cells = every_cell(chosen("duel", "longhorn", "mamba", "--sizes=460K"))
    sweep.estimate(cells, plan.timed)
    assert (cells[0].seconds, cells[-1].seconds) == pytest.approx((8 + 512 * 1.024, 8 + (256 - 205) * 6))
    for larger in False, True:  # a larger model is not timed
        cells[-1].at["model"] = "llama" if larger else "mamba"
        plan.say_plan(cells, 2, "2 CPU core(s)")
        said = capsys.readouterr().out
        assert said.endswith("; tokens/s, timed here: longhorn 460K 1,000, mamba 460K 171\n")
        assert ("AMD" in said) == larger


# An H200 reached 324,386 tokens per second with 23.3 GB. An H100 has the same peak, 989 TFLOP/s, and an A100 has 312.
# Mamba was not measured, and its 350M takes 2.26e9 FLOPs per token. A run keeps three checkpoints of 12 bytes per
# parameter.
MINUTES = 4800 * 524288 / 324386 / 8 / 60
WAITS = 4800 * 0.0649087  # seconds, for steps of 8 sequences on an H200, where Python was the limit
SHARE = 4800 * 524288 * 783.9e6 / 2250e12 / 64 / WAITS
# arguments after `paper longhorn mamba --dry-run`; how many times the next words are printed; other words
PLANS = f"""
--gpu=H100 --gpus=8            8  torchrun --standalone --nproc_per_node=8 train.py
        longhorn 120M 128.6M 2.517B 32 23 of 80 GB 26%, measured {MINUTES:.0f} min 1
        mamba 350M at 4096 371.5M 7.078B 4 32 of 80 GB 25%, assumed 2.2 h 1
        the dataset openwebtext is not prepared here
        8 runs, 38.4B tokens, 7.2e+19 FLOPs on 8 x H100, 1 at a time: about 10.0 h in all
        disk: 72 GB for checkpoints; 14 GB of tokens
--gpu=a100                     8  nproc_per_node=8  23 of 80 GB 26%, measured {MINUTES * 989 / 312:.0f} min
--gpu="NVIDIA A100-SXM4-40GB"  8  nproc_per_node=8  23 of 40 GB 26%, measured {MINUTES * 989 / 312:.0f} min
--gpu=rtx-4090 --gpus=4        8  nproc_per_node=4  longhorn 350M 370M 7.078B 8 18 of 24 GB 27%, measured
        longhorn_350m.py --seed=1337 --micro_batch_size=8 --out_dir
--gpu=H100 --gpus=12 --nproc=4     8  nproc_per_node=4  on 12 x H100, 3 at a time
--gpu=B200 --gpus=64 --sizes=120M  2  torchrun --nnodes=8 --node_rank=$RANK --master_addr=$HOST --nproc_per_node=8 train
        longhorn 120M 128.6M 2.517B 8 7 of 180 GB {SHARE:.0%}, waits for Python {WAITS + 8:.0f} s
        mamba 120M 129.2M 2.517B 8 7 of 180 GB {SHARE:.0%}, waits for Python {WAITS + 8:.0f} s
--gpu=H200 --gpus=64 --cluster=slurm   1  torch.distributed.run --standalone --nproc_per_node=8 train.py
        longhorn 350M at 4096 370M 7.078B 4 32 of 141 GB 25%, assumed 2.3 h
        on 64 x H200, 8 at a time: about 2.3 h in all  (slurm: gpus=8; ray: num_gpus=8)
        --out_dir=out/scaling_paper/longhorn_120M_4800steps_lr0.0006_seed1337 --resume=auto
--gpu="GH200 480GB" --sizes=1b3 --steps=2000 --seeds=2     4  nproc_per_node=8
        longhorn 1b3 1.332B 4.194B 8 53 of 96 GB  longhorn_1b3.py --max_iters=2000 --seed=1338 --out_dir
--sizes=350M                   2  train.py  this takes years here; a plan for GPUs: --dry-run --gpus=8 --gpu=H100
"""


@pytest.mark.parametrize("line, times, words, others", [(*row[:3], row[3:]) for row in table(PLANS)])
def test_a_plan_can_be_for_gpus_that_are_not_here(monkeypatch, line, times, words, others):
    monkeypatch.setattr("data.prepared.find_dataset", lambda name: Path("nothing"))
    argv = ["paper", "longhorn", "mamba", "--dry-run", *shlex.split(line)]
    said = re.sub(r"[ |]+", " ", succeed(argv, program="experiments/sweep.py").out)
    assert said.count(words) == int(times) and [each for each in others if each not in said] == []


def test_the_hours_of_a_plan_follow_its_order():
    """Searches run first, then the trunk of 50 s beside others, then its branch. Families can run one by one."""
    at = lambda model, stage: {"model": model, "stage": stage, "parameters": 1e9, "tokens": 1, "flops": 1}
    cells = [Cell(name, [], at(model, stage), seconds, after) for name, model, stage, seconds, after in (
        ("trunk", "gla", "seed", 50, ""), ("search", "gla", "search", 9, ""), ("other", "gla", "seed", 20, ""),
        ("branch", "gla", "seed", 5, "trunk"), ("mamba", "mamba", "seed", 7, ""), ("second", "mamba", "seed", 3, ""))]
    assert machine.seconds_of(cells, 2, True) == 9 + 55 + 7
    assert machine.seconds_of(cells, 2, False) == 9 + 55 and machine.seconds_of(cells, 1, False) == 94
    with pytest.raises(ConfigError, match="12 GPUs for a run are not whole nodes of 8: choose --nproc=8"):
        machine.say_plan([], [], "H100", 24, 12)


def row_of_plan(line, gigabytes=9999, nproc=6, records=(), **waiting):
    """The row of one run in a plan: micro-batch, memory, share of the peak, seconds and the arguments that it adds.

    The run has 60e9 parameters, 10e9 of them in the embedding. A quarter of the peak of six H100s takes 3000 seconds. A
    step is 30 sequences, 3 at a time."""
    at = {"model": "gla", "size": "60B", "parameters": 60e9, "embedding": 10e9, "tokens": 3e8, "from": 300_000,
          "flops": 3000 * 6 * 989e12 / 4}
    config = sweep.load("--n_layer=5 --n_embd=1000 --vocab_size=50000 --block_size=1000000 --batch_tokens=30000000 "
                        f"--max_iters=310000 --micro_batch_size=3 --compile {line}".split())
    cell = Cell("run", [], at)
    with mock.patch.dict(machine.gpus.GPUS, H100=(989e12, gigabytes * 1e9)):
        machine.place(cell, config, nproc, "H100", dict(records), waiting or {"gla": 1e-3, "llama": 2e-3})
    return "{micro-batch}: {memory}, {of the peak}, ".format(**at) + f"{cell.seconds:.0f} s {cell.argv}"


# 3e6 tokens take 60 x 5 x 1000 + 2 x 50,000 bytes each, so 1200 GB beside 16 x 60. Start and end take 8 seconds.
@pytest.mark.parametrize("line, words", table("""
--dtype=bfloat16           3: 2160 of 9999 GB, 25%, assumed, 3008 s []
--dtype=float32            3: 3360 of 9999 GB, 25%, assumed, 6008 s []
--optimizer=muon           3: 1960 of 9999 GB, 25%, assumed, 3008 s []
--recompute=block          3: 1500 of 9999 GB, 25%, assumed, 4008 s []
--recompute=every_other    3: 1836 of 9999 GB, 25%, assumed, 3608 s []
--parallel=fsdp            3: 1560 of 9999 GB, 25%, assumed, 3008 s []
--compile=false            3: 2160 of 9999 GB, 25%, assumed, 3008 s []
--parallel=fsdp --optimizer=muon --recompute=block --dtype=float32   3: 1347 of 9999 GB, 25%, assumed, 8008 s []
"""))
def test_a_plan_follows_the_settings_of_a_run(line, words):
    assert row_of_plan(line) == words
    measured = row_of_plan(line, records={("gla", 60e9, 10**6): (3, 0.4, 2000e9), ("gla", 1, 2): (1, 0.6, 3)})
    if "bf" in line:
        words = "3: 2000 of 9999 GB, 40%, measured, 1883 s []"
    elif "compile" not in line:  # half the time, except for start and end
        words = re.sub("25%(.*) (.*) s", lambda m: f"50%{m[1]} {int(m[2]) // 2 + 4} s", words)
    assert measured == words


def test_a_plan_shards_within_a_machine_halves_micro_batches_and_waits_for_python():
    assert row_of_plan("--parallel=hsdp", nproc=30).startswith("1: 720 of ")  # 960 / 8 + 80 + 120, and 400
    assert row_of_plan("", 1500) == "1: 1360 of 1500 GB, 25%, assumed, 3008 s ['--micro_batch_size=1']"
    with pytest.raises(ConfigError, match="gla 60B does not fit: one sequence takes 1360.0 GB, and H100 has 1400"):
        row_of_plan("", 1400)
    steps = "--max_iters=1300000"  # a million steps of 2 micro-batches and 5 layers
    for waiting, seconds in ({"gla": 1e-3, "llama": 2e-3}, 10008), ({"mamba": 3e-3, "llama": 2e-3}, 30008):
        assert f"%, waits for Python, {seconds} s" in row_of_plan(steps, **waiting)


def test_a_plan_says_which_data_are_missing_or_read_often(tmp_path, capsys):
    for tokens, said in (65536, ""), (65535, f"{tmp_path} has 65,535 tokens to train on: the longest run reads each "
                                             "4 times\n"):
        write_folder(tmp_path, tokens, 300)
        cells = every_cell(chosen("duel", "gla", "gla@a", "--sizes=460K", f"--dataset={tmp_path}:.25,none:.75"))
        sweep.check_data(cells, dry_run=True)
        assert capsys.readouterr().out == f"{said}the dataset none is not prepared here\n"
    with pytest.raises(ConfigError, match="none"):
        sweep.check_data(cells, dry_run=False)


def test_a_plan_counts_the_vocabulary_of_the_dataset(tmp_path):
    """Each token has a row of the embedding, which is also the output map. As in train.py, rows are rounded up to a
    multiple of 64."""
    counts = {}
    for tokens in (0, 256, 2000):
        if tokens:
            (tmp_path / "meta.json").write_text(json.dumps({"vocab_size": tokens}))
        [cell, *_] = every_cell(chosen("duel", "longhorn", "mamba", "--sizes=1.5M", f"--dataset={tmp_path}"))
        sweep.estimate([cell])
        counts[tokens] = cell.at["parameters"]
    assert counts == {0: 1485888, 256: 1485888, 2000: 1485888 + (2048 - 256) * 192}


@pytest.fixture
def of_a_seed(tmp_path):
    """of_a_seed(*budgets): the cells of Longhorn at 460K with seed 1001, in tmp_path."""
    preset = chosen("duel", "longhorn", "mamba")
    return lambda *budgets: sweep.seed_cells(preset, "longhorn", "460K", 2e-3, 1001, budgets, tmp_path)


def test_further_budgets_branch_from_the_checkpoints_that_exist(tmp_path, of_a_seed):
    """Shorter, equal and longer budgets are added to a finished trunk. An unfinished one cannot be branched from."""
    first = of_a_seed(1024)
    runner.write_plan(tmp_path, first)
    more = lambda: of_a_seed(256, 1024, 2048)
    assert [c.after for c in more()] == ["", more()[0].name, more()[0].name]
    has_run(tmp_path / first[0].name, 819, finished=True)
    cells = longer, same, shorter = more()
    assert longer.after == first[0].name and longer.at["from"] == 819 and "--keep_steps=1638" in longer.argv
    assert not shorter.after and shorter.at["from"] == 0  # no checkpoint from before its decay was kept
    runner.write_plan(tmp_path, cells)
    assert same.argv == first[0].argv  # as it began
    (tmp_path / first[0].name / "checkpoint-819.safetensors").unlink()  # as if deleted to make room
    has_run(tmp_path / longer.name, finished=True)
    assert [c.at["from"] for c in more()] == [819, 0, 0]  # the finished run keeps its beginning


def test_a_run_that_has_begun_goes_on_as_it_began(tmp_path, of_a_seed):
    """The run keeps the checkpoints it was told to keep, from which other budgets branch, and no others."""
    first = of_a_seed(1024, 512)
    runner.write_plan(tmp_path, first)
    has_run(tmp_path / first[0].name, 410)
    cells = trunk, longer, shorter = of_a_seed(1024, 700, 512)
    runner.write_plan(tmp_path, cells)
    assert trunk.argv == first[0].argv and trunk.argv[-1] == "--keep_steps=410,819"
    assert longer.after == shorter.after == trunk.name and [c.at["from"] for c in cells] == [0, 410, 410]


SMALL = sweep.Size(("--n_layer=2", "--n_head=2", "--n_embd=128"), 1024, (256, 512), seeds=5, search=2)
LARGE = sweep.PRESETS["laptop"].sizes["1.5M"]


@pytest.mark.parametrize("argv, sizes", [
    ("--sizes=1.5M --search=4", {"1.5M": replace(LARGE, search=4)}),
    ("--sizes=1.5M --sizes=250K:n_embd=96", {  # the smallest size has a search, since none comes before it
        "1.5M": replace(LARGE, search=2), "250K": replace(SMALL, argv=("--n_embd=96",))})])
def test_the_command_line_changes_and_adds_sizes(argv, sizes):
    assert chosen("laptop", "longhorn", *argv.split()).sizes == sizes


# family; the pattern, step and normalize_keys of its runs; their seeds
LABELS = """
longhorn*3,llama                               longhorn*3,llama explicit True  1001 1002
longhorn@again                                 explicit True                   2001 2002
deltanet                                       explicit True                   1001 1002
deltanet@step=implicit                         implicit True                   1001 1002
deltanet@step=implicit,normalize_keys=false    implicit False                  1001 1002
"""


def test_families_of_a_sweep_share_seeds_unless_a_word_says_otherwise():
    """A label, which is one word, gives a family other seeds; a setting keeps the seeds. A pattern is a family.
    Settings for every run reach every run."""
    models = [model for model, *_ in table(LABELS)]
    cells = every_cell(chosen("duel", *models, "--wandb=offline", "--seeds=2", "--budgets=512"))
    assert len({c.name for c in cells}) == len(cells)
    seen = {}
    for c in cells:
        config = sweep.load(c.argv)
        assert "*" not in c.name and "," not in c.name and config.wandb == "offline"
        if c.at["stage"] == "seed":
            kind = f"{config.pattern} {config.step} {config.normalize_keys}".strip()
            seen.setdefault((c.at["model"], kind), set()).add(str(config.seed))
    assert seen == {(model, kind): {*seeds.split()} for model, kind, seeds in table(LABELS)}


@pytest.mark.parametrize("named, seen, ids", [
    ("", 2, [0, 1]), ("1,0", 2, ["1", "0"]), ("-1", 0, []), ("NoDevFiles", 0, []), ("0,1", 1, None), ("7", 0, None)])
def test_gpus_that_are_not_there_are_refused(monkeypatch, named, seen, ids):
    """CUDA would hide all GPUs after the first missing one, and their runs would train on the CPU."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    if ids is None:
        with pytest.raises(ConfigError, match=f"of the GPUs {named} .* PyTorch sees {seen}"):
            runner.visible_gpus()
    else:
        assert runner.visible_gpus() == ids


@pytest.fixture
def pretend(monkeypatch):
    """pretend(loss, fails) makes every cell end at once with loss(at), and returns the growing list of cells that ran.

    A cell whose loss is None has diverged. Cells named in `fails` do not end and have no record."""
    def pretend(loss, fails=()):
        ran = []

        def run_cells(cells, folder, *_):
            ran.extend(c.name for c in cells if not is_finished(folder / c.name))
            for c in cells:
                if c.name not in fails:
                    has_run(folder / c.name, finished=True)
            return {c.name: "out of luck" for c in cells if c.name in fails}

        def read_run(folder, at):
            if not is_finished(folder):
                raise BadRecord("not run")
            if loss(at) is None:
                raise BadRecord("its loss is None: it diverged")
            return {"loss_of_choosing_files": loss(at), "val_loss": -loss(at)}
        monkeypatch.setattr(runner, "run_cells", run_cells)
        monkeypatch.setattr(sweep, "read_run", read_run)
        monkeypatch.setattr(sweep, "check_data", lambda *_: None)
        monkeypatch.setattr(sweep.Sweep, "report", lambda *_: {})
        return ran
    return pretend


def planned(folder, stage):
    """{name: place} of the cells of a stage."""
    return {name: at for name, at in runner.read_plan(folder)["cells"].items() if at["stage"] == stage}


def families_reported(folder):
    return {at["model"] for at in planned(folder, "seed").values()}


@pytest.mark.parametrize("best, tried, chose", [(3e-3, 4, 3e-3), (2e-2, 6, 2e-2), (1, 7, 6.36e-2), (1e-9, 7, 1.24e-4)])
def test_a_search_goes_beyond_its_edge_three_times_at_most(tmp_path, pretend, best, tried, chose):
    """A finished search chooses the same rate again, although it has rates beyond the first ones by then."""
    ran = pretend(lambda at: 1 + math.log(at["learning_rate"] / best) ** 2)
    argv = ["laptop", "gla", "--sizes=460K,1.5M", "--seeds=1", f"--out={tmp_path}"]
    assert sweep.main(argv) == 0
    search, seeds = planned(tmp_path, "search"), planned(tmp_path, "seed")
    assert sum(at["seed"] == 1 for at in search.values()) == tried
    rates = {(at["size"], at["learning_rate"]) for at in seeds.values()}
    assert len(rates) == 2 and dict(rates) == pytest.approx({"460K": chose, "1.5M": chose * 128 / 192}, rel=0.02)
    (tmp_path / "plan.json").write_text(json.dumps(runner.read_plan(tmp_path) | {"cells": search}))
    ran.clear()
    assert sweep.main(argv) == 0 and ran == [] and planned(tmp_path, "seed").keys() == seeds.keys()


def test_a_law_runs_family_by_family_and_goes_on_with_other_presets(tmp_path, pretend):
    """The rates of 60K and 250K come from the line through the other sizes. law_half then runs 460K at half its
    rate, and law_predicted continues the first seed."""
    best = {"130K": 6e-3, "460K": 4e-3, "1.5M": 2e-3}
    ran = pretend(lambda at: 1 + math.log(at["learning_rate"] / best.get(at["size"], 1)) ** 2)
    run = lambda preset: sweep.main([preset, "llama", "longhorn", "--budgets=512", f"--out={tmp_path}"])
    assert run("law") == 0
    assert [name.split("_")[0] for name in ran] == ["llama"] * (8 + 8 + 3 + 20) + ["longhorn"] * 39
    rates = {at["size"]: at["learning_rate"] for at in planned(tmp_path, "seed").values() if at["model"] == "llama"}
    slope, at_1 = np.polyfit(np.log([64, 128, 192]), np.log(list(best.values())), 1)
    on_line = {size: math.exp(at_1) * width**slope for size, width in (("60K", 40), ("250K", 96))}
    assert rates == pytest.approx(best | on_line, rel=3e-3)
    searches = {(at["size"], at["steps"]) for at in planned(tmp_path, "search").values()}
    assert searches == {("130K", 2048), ("460K", 2048), ("1.5M", 1024)}
    ran.clear()
    assert run("law_half") == 0 and len(ran) == 2 * 2 and all("460K_rate_2_" in name for name in ran)
    assert {at["learning_rate"] for at in planned(tmp_path, "seed").values() if at["size"] == "460K rate/2"} == {2e-3}
    has_run(tmp_path / "longhorn_130K_16384steps_lr0.006_seed1001", 13107, finished=True)
    ran.clear()
    assert run("law_predicted") == 0 and len(ran) == 2 * 4
    begins = {name: at["from"] for name, at in planned(tmp_path, "seed").items() if at["steps"] == 28672}
    assert begins.pop("longhorn_130K_28672steps_lr0.006_seed1001") == 13107 and set(begins.values()) == {0}


def test_rates_that_diverge_lose_and_a_family_that_always_diverged_is_left_out(tmp_path, pretend):
    pretend(lambda at: None if at["model"] == "gla" or at["learning_rate"] > 5e-3 else 1 + at["learning_rate"])
    assert sweep.main(["duel", "longhorn", "gla", "--seeds=1", f"--out={tmp_path}"]) == 0
    assert families_reported(tmp_path) == {"longhorn"}


def test_a_stopped_sweep_gets_a_line(tmp_path, pretend, monkeypatch):
    pretend(lambda at: 1.0)
    monkeypatch.setattr(runner, "run_cells", mock.Mock(side_effect=KeyboardInterrupt("3 cells are left")))
    stopped = run_program(lambda: sweep.main(["laptop", "gla", "--sizes=460K", f"--out={tmp_path}"]))
    refused(stopped, "stopped: 3 cells are left", quiet=False)


def test_a_report_of_a_sweep_gets_its_options(monkeypatch):
    monkeypatch.setattr(report, "write", write := mock.Mock(return_value={}))
    assert sweep.main(["report", "a", "--out=b", "--accept_code=c", "--save", "--style=d"]) == 0
    write.assert_called_once_with(Path("a"), Path("b"), accept_code=("c",), save_it=True, style=Path("d"))


def test_no_rate_is_chosen_while_a_run_of_the_search_is_missing(tmp_path, pretend):
    fails = ["gla_460K_512steps_lr0.00398_seed2"]
    ran = pretend(lambda at: 1.0 + abs(at["learning_rate"] - 2e-3), fails)
    argv = ["duel", "longhorn", "gla", "--sizes=460K", "--seeds=1", f"--out={tmp_path}"]
    assert sweep.main(argv) == 1
    assert families_reported(tmp_path) == {"longhorn"}
    ran.clear()
    again = fails.pop()
    assert sweep.main(argv) == 0 and ran[0] == again
    assert families_reported(tmp_path) == {"longhorn", "gla"}


def test_a_sweep_grows_by_what_is_new(tmp_path, pretend, capsys):
    """It can grow by seeds, sizes, budgets and families. The rate that seeds ran at stays, and a label keeps its
    meaning. --dry-run says what would begin."""
    ran = pretend(lambda at: 1 + abs(at["learning_rate"] - 3e-3))

    def run(*argv):
        ran.clear()
        argv = ["laptop", *argv, f"--out={tmp_path}", "--steps=80"]
        assert sweep.main([*argv, "--dry-run"]) == 0 and ran == []
        begins = capsys.readouterr().out.splitlines()[-1]
        assert sweep.main(argv) == 0
        assert f"/{ran[0]} " in begins if ran else "all runs are finished" in begins
        return ran
    first = "gla", "--sizes=460K", "--budgets=64"
    assert len(run(*first, "--seeds=2")) == 8 + 4 + 1 and run(*first, "--seeds=2") == []
    rate = next(iter(planned(tmp_path, "seed").values()))["learning_rate"]
    assert run(*first, "--seeds=3") == [f"gla_460K_{steps}steps_lr{rate:g}_seed1003" for steps in (80, 64)]
    assert run(*first, "--seeds=3", "--budgets=64,96") == [  # a longer budget runs for two seeds
        f"gla_460K_96steps_lr{rate:g}_seed{seed}" for seed in (1001, 1002)]
    assert len(run(*first, "--sizes=80K:n_layer=1,n_embd=64,n_head=1", "--seeds=1")) == 10 + 2 + 1
    assert run("gla", "--sizes=460K", "--seeds=1", "--budgets=48") == [f"gla_460K_48steps_lr{rate:g}_seed1001"]
    assert len(run("mamba", *first, "--seeds=1")) == 8 + 2 + 1  # the cosine too: mamba is this command's first family
    plan = runner.read_plan(tmp_path)
    assert set(plan["sizes"]) == {"460K", "80K"} and plan["models"] == ["gla", "mamba"] and plan["warmup"] == 26
    with pytest.raises(SystemExit):
        run("gla", "--sizes=80K:n_layer=2", "--seeds=1")


REFUSED = """
duel longhorn longhorn*3,llama --dry-run    no llama in 2 layers; set n_layer to 4 or more
duel gla                                    give two families
duel gla gla@block_size=512 --dry-run       eval_block_size at 460K is 256 in gla's config and 512 in
duel gla@a gla@b --dry-run                  gla@WORD twice: both would have the same seeds
laptop nothing                              missing: config/nothing_laptop.py; write
laptop --budgets=28 --dry-run               warmup of 26 and decay of 6 steps exceed max_iters 28
laptop gla --sizes=460K,120M                --sizes=460K,120M: there are 460K, 1.5M, 120m, 1b3, 340m,
laptop --sizes=460K:n_layer=2               or another label
laptop --sizes=a,b:n_layer=2                or another label
laptop --sizes=a:n_layer=2 --sizes=a:n_layer=3                 laptop, a; give one
laptop --sizes=9K:seed=2                    the sweep sets seed
laptop gla@seed=3 --dry-run                 --seed=3: the sweep sets seed
laptop gla gla@batch_tokens=512 --dry-run   such runs are not compared
laptop gla@step=exact,b --dry-run           unknown
paper --gpu=H100                            give --gpu=NAME and --dry-run
paper --dry-run --gpus=8                    --gpu=NAME
paper rwkv4 --dry-run --gpu=H100            missing: config/rwkv4_120m.py, config/rwkv4_350m.py; write each
paper gla --dry-run --gpu=K80               --gpu=K80: known GPUs are GH200 480GB, GH200, H200, H100 PCIe
paper X --dry-run                           llama, longhorn, mamba, mamba2, mesa, retnet, rwkv
paper gla --dry-run --gpu=H100 --gpus=12    the 512 sequences of a step: choose 8 or 16, fewer by --nproc, or another
paper gla --dry-run --gpu=H100-4GB          gla 350M does not fit: one sequence takes
paper gla --dry-run --batch_tokens=500000   not a multiple of block_size 1024: the nearest is 499712
paper gla --dry-run --gpu=H100 --gpus=1 --parallel=fsdp    --parallel=fsdp on 1 GPU(s): give a run at least 2
paper gla --dry-run --gpu=H100 --parallel=hsdp             at least 16
laptop --sizes=9K:max_iters=2               see FAMILY, --seeds, --steps, --budgets
paper gla --dry-run --gpu=H100 --nproc=16   --nproc=16: more than --gpus=8
paper gla --dry-run --gpu=4xH200            --gpu=4xH200: known GPUs are GH200 480GB, GH200, H200,
paper gla --dry-run --gpu=H100 --gpus=16 --nproc=16 --cluster=slurm    a run is a job on one node: choose --nproc=8
paper gla --dry-run --budgets=9             runs have the schedule and rate of their configs: leave out --budgets
paper gla --dry-run --search=1              leave out --budgets and --search
paper gla --dry-run --block_size=4096       --block_size: 120M at 4096 sets it: choose other --sizes
laptop gla --dry-run --n_embd=64            --n_embd: 460K sets it
paper config/gla_120m.py --dry-run           name a family here, and config/FAMILY_SIZE.py by --sizes=SIZE
"""


@pytest.mark.parametrize("line, words", table(REFUSED))
def test_mistakes_get_one_line(line, words):
    refuse(line.split(), words, program="experiments/sweep.py")


def test_a_config_of_another_model_is_refused_when_the_plan_is_made(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "config", tmp_path / "config")
    laptop = (ROOT / "config/longhorn_laptop.py").read_text()
    for name, model in (("mine", "mine"), ("yours", "longhorn")):
        (tmp_path / f"config/{name}_laptop.py").write_text(f"{laptop}\nmodel = {model!r}\n")
    monkeypatch.setattr(sweep, "REPO", tmp_path)
    plan = lambda name: every_cell(chosen("laptop", name, "--sizes=460K"))
    with pytest.raises(ConfigError, match="config/yours_laptop.py sets model to longhorn: write model = 'yours' there"):
        plan("yours")
    with pytest.raises(ConfigError, match="^config/mine_laptop.py: .*mine"):
        sweep.estimate(plan("mine"))
