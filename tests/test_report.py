"""experiments/scaling/report.py on sweeps made up here from known laws: what it tells, what it leaves out, how its page looks in a browser."""

import html
import itertools
import json
import math
import random
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from urllib.parse import unquote

import pytest

from configurator import ConfigError  # noqa: E402
from experiments.scaling import report, sweep

# E, A, alpha, B, beta of each made-up family
LAWS = {"retnet": (0.99, 32.0, 0.35, 66.0, 0.35), "gla": (0.97, 31.0, 0.35, 62.0, 0.35), "rwkv": (0.96, 30.0, 0.35, 62.0, 0.35),
        "mamba": (0.94, 30.0, 0.35, 58.0, 0.35), "llama": (0.88, 33.0, 0.35, 63.0, 0.35),
        "longhorn": (0.94, 29.8, 0.35, 56.0, 0.35)}
SIZES = {"130K": 130_000, "460K": 460_000, "1.5M": 1_490_000}
STEPS, BATCH, COMMIT = 1024, 1024, "ab0d75f4c4503846ed9a8589c3bd2bf01782ed6f"


def make_sweep(folder, models=LAWS, sizes=SIZES, contexts=(256,), seeds=(1337, 1338, 1339), rates=(2e-3, 5e-3), noise=0.002,
               ladder=(320, 3200), gpu=None, **about):
    """A finished sweep in `folder`, in the format of train.py. The second rate is the best one. Returns its cells' names.

    Losses are E + A / N^alpha + B / D^beta of LAWS, `noise` the standard deviation over seeds; `about` goes into the plan.
    """
    dice, cells = random.Random(0), {}
    for model in models:
        for size, n in sizes.items():
            for context in contexts:
                best = rates[min(1, len(rates) - 1)]
                wanted = [("rate", STEPS, rate, seeds[0]) for rate in rates] + [("seed", STEPS, best, s) for s in seeds[1:]]
                wanted += [("ladder", steps, best, seeds[0]) for steps in ladder]
                for stage, steps, rate, seed in wanted:
                    name = f"{model}_{size}_{context}_{steps}steps_lr{rate:g}_seed{seed}"
                    cells[name] = {"stage": stage, "model": model, "size": size, "context": context, "steps": steps,
                                   "learning_rate": rate, "seed": seed, "argv": [f"config/{model}_laptop.py"]}
                    E, A, alpha, B, beta = LAWS.get(model, LAWS["gla"])
                    loss = (E + A / n**alpha + B / (steps * BATCH)**beta + 0.03 * abs(math.log(rate / best))
                            - 0.01 * math.log2(context / 256) + dice.gauss(0, noise))
                    make_run(folder / name, model, n, context, steps, rate, seed, loss, gpu)
    folder.joinpath("plan.json").write_text(json.dumps({"preset": "laptop", "paper": False, "commit": COMMIT, "cores": 2,
                                                        "machine": gpu or "AMD EPYC", "cells": cells} | about))
    return list(cells)


def make_run(folder, model, n, context, steps, rate, seed, loss, gpu=None):
    """config.json, log.jsonl and result.json of one run, as train.py writes them."""
    folder.mkdir(parents=True)
    tokens, embedding = steps * BATCH, 256 * 64
    config = {"model": model, "n_layer": 3, "n_head": 3, "n_embd": 192, "block_size": context, "vocab_size": 256,
              "out_dir": f"out/table1_laptop/{folder.name}", "resume": "auto", "seed": seed, "dataset": "pystdlib",
              "batch_tokens": BATCH, "batch_size": 4, "max_iters": steps, "learning_rate": rate, "min_lr": 0.0,
              "warmup_iters": -1, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.99, "grad_clip": 1.0,
              "eval_interval": -(-steps // 6), "eval_tokens": 131072, "final_eval_tokens": 131072, "eval_block_size": 256,
              "dtype": "bfloat16"}
    splits = {"train": {"tokens": 30886142, "sha256": "10d1"}, "val": {"tokens": 639206, "sha256": "801d"}}
    record = {"config": config, "environment": {"commit": COMMIT, "uncommitted_changes": False, "cpu": "AMD EPYC", "cores": 2,
                                                "gpu": gpu, "command": "python train.py"},
              "derived": {"processes": 1, "tokens": tokens, "parameters": {"embedding": embedding, "total": n}},
              "data": {"dataset": "pystdlib", "splits": splits}, "time": "2026-11-20T11:33:15+00:00"}
    (folder / "config.json").write_text(json.dumps(record, indent=1) + "\n")
    seconds, events = 6 * n * tokens / 1e11, []
    for step in sorted({*range(-(-steps // 6), steps, -(-steps // 6)), steps}):
        done = step / steps
        events.append({"event": "train", "step": step, "tokens": step * BATCH, "train_loss": loss + 0.1, "lr": rate,
                       "grad_norm": 0.7, "tokens_per_second": 15000, "memory_bytes": 6e8, "seconds": seconds * done})
        on_the_way = loss + 60 * ((step * BATCH)**-0.35 - tokens**-0.35) + 0.05 * (1 - done)
        events.append({"event": "eval", "step": step, "tokens": step * BATCH, "val_loss": loss if step == steps else on_the_way,
                       "val_tokens": 131072, "seconds": seconds * done})
    (folder / "log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    result = {"model": model, "val_loss": loss, "val_tokens": 131072, "best_val_loss": loss, "steps": steps, "skipped_steps": 0,
              "tokens": tokens, "seconds": round(seconds, 3), "tokens_per_second": 14959, "parameters": n,
              "flops": 6 * n * tokens, "memory_bytes": 611409920, "processes": 1, "device_name": gpu or "cpu",
              "dtype": "bfloat16", "commit": COMMIT, "seed": seed, "val_bits_per_byte": loss / math.log(2)}
    (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")


def change(path, **values):
    """Set keys of a JSON file, or remove them (...); a__b is key b of the table a."""
    record = json.loads(path.read_text())
    for key, value in values.items():
        *parents, last = key.split("__")
        at = record
        for p in parents:
            at = at[p]
        if value is ...:
            del at[last]
        else:
            at[last] = value
    path.write_text(json.dumps(record))


EVIL = "<script>alert('x')</script>|$x_"  # a family that would be a tag in HTML, a column in Markdown, a formula in a figure


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(folder, paths, report.json, report.html) of a whole sweep with one damaged run: drawn once, read by many tests."""
    folder = tmp_path_factory.mktemp("sweeps") / "table1 laptop#1"
    folder.mkdir()
    make_sweep(folder, models=[*LAWS, EVIL])
    (folder / "gla_460K_256_1024steps_lr0.005_seed1339/result.json").write_text('{"model": "gl')
    paths = report.write(folder, bootstrap=40)
    return folder, paths, json.loads(paths["report.json"].read_text()), paths["report.html"].read_text()


@pytest.fixture
def told(tmp_path, monkeypatch):
    """told(damage, **arguments of make_sweep): (report.json, table1.md, what the figures show) of a small sweep of Longhorn and
    Mamba after `damage(folder, names)`. Nothing is drawn: a figure takes a second."""
    shown = []
    monkeypatch.setattr(report, "picture", lambda panels, *paths, columns=1: shown.extend(p.alt for p in panels))

    def tell(damage=None, **sweep_arguments):
        names = make_sweep(tmp_path, **{"models": ("longhorn", "mamba"), **sweep_arguments})
        if damage:
            damage(tmp_path, names)
        paths = report.write(tmp_path, bootstrap=0)
        return json.loads(paths["report.json"].read_text()), paths["table1.md"].read_text(), shown
    return tell


def cell_of(numbers, model, size, context=256):
    return next(c for c in numbers["table"] if (c["model"], c["size"], c["context"]) == (model, size, context))


# ------------------------------------------------------------------------------------------- reading a sweep's records

@pytest.mark.parametrize("code, said", [(None, False), ("12ab", True)])
def test_what_a_plus_behind_a_commit_means_is_said(tmp_path, code, said):
    (name, *_) = make_sweep(tmp_path, models=("longhorn",), sizes={"130K": 130_000}, seeds=(1337,), ladder=())
    change(tmp_path / name / "config.json", environment__changed_code=code)
    run = sweep.read_run(tmp_path / name, {})
    ((_, lines),) = report.reproduce_blocks(SimpleNamespace(plan={}, runs=[run], folder=tmp_path))
    assert any("(+: with changes that were not committed)" in line for line in lines) == said


def test_of_two_arguments_the_later_one_is_the_plans(tmp_path):
    """As where the command line overrides what the preset gives every run."""
    (name, *_) = make_sweep(tmp_path, models=("longhorn",), sizes={"130K": 130_000}, seeds=(1337,), ladder=())
    for first, second, left_out in ((64, 131072, []), (131072, 64, [name])):
        argv = ["config/longhorn_laptop.py", f"--eval_tokens={first}", f"--eval_tokens={second}"]
        change(tmp_path / "plan.json", **{f"cells__{name}__argv": argv})
        assert list(sweep.read_runs(tmp_path)[1]) == left_out


def test_a_clean_sweep_is_read_whole(tmp_path):
    names = make_sweep(tmp_path)
    runs, left_out = sweep.read_runs(tmp_path)
    assert len(names) == 108 and [r.name for r in runs] == names and left_out == {}
    run = next(r for r in runs if r.name == "mamba_460K_256_320steps_lr0.005_seed1337")
    assert (run.model, run.size, run.context, run.tokens, run.learning_rate, run.seed) == (
        "mamba", "460K", 256, 327680, 5e-3, 1337)
    assert (run.parameters, run.embedding, run.flops) == (460_000, 16384, 6 * 460_000 * 327680)
    assert run.curve[-1] == (327680, run.loss) and len(run.curve) == 6 and run.processes == 1 and run.commit == COMMIT
    E, A, alpha, B, beta = LAWS["mamba"]
    assert abs(run.loss - (E + A / 460e3**alpha + B / 327680**beta)) < 0.01


DAMAGE = {  # how: (what is done to a run's folder, what its reason must say)
    "torn result": (lambda f: cut(f / "result.json"), "result.json is damaged"),
    "empty result": (lambda f: (f / "result.json").write_text(""), "result.json is damaged"),
    "result is a list": (lambda f: (f / "result.json").write_text("[1]"), "result.json is damaged"),
    "torn config": (lambda f: cut(f / "config.json"), "config.json is damaged"),
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "binary config": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), "config.json is damaged"),
    "torn log": (lambda f: cut(f / "log.jsonl"), "log.jsonl is damaged"),
    "no log": (lambda f: (f / "log.jsonl").unlink(), "log.jsonl is damaged"),
    "log without its end": (lambda f: drop_last_line(f / "log.jsonl"), "does not end with the loss"),
    "log of numbers": (lambda f: (f / "log.jsonl").write_text("1\n2\n"), "log.jsonl is damaged"),
    "null loss": (lambda f: change(f / "result.json", val_loss=None), "diverged"),
    "NaN loss": (lambda f: change(f / "result.json", val_loss=math.nan), "diverged"),
    "loss is text": (lambda f: change(f / "result.json", val_loss="1.5"), "diverged"),
    "hole": (shutil.rmtree, "not run"),
    "not finished": (lambda f: (f / "result.json").unlink(), "not finished (step 1024)"),
    "other commit in the result": (lambda f: change(f / "result.json", commit="0" * 40), "disagree: commit"),
    "other seed in the config": (lambda f: change(f / "config.json", config__seed=7), "disagree: seed"),
    "shorter than planned": (lambda f: change(f / "result.json", steps=1000), "disagree: steps"),
    "other commit": (lambda f: (change(f / "config.json", environment__commit="0" * 40),
                                change(f / "result.json", commit="0" * 40)), "not comparable: commit"),
    "changed files": (lambda f: change(f / "config.json", environment__uncommitted_changes=True), "not comparable: commit"),
    "code that changed": (lambda f: change(f / "config.json", code_versions=[COMMIT, COMMIT + "+12ab", COMMIT]),
                          f"its code changed while it was down: {COMMIT}, then {COMMIT}+12ab, then {COMMIT}"),
    "other weights to begin with": (lambda f: change(f / "config.json", config__init_from="out/a"), "not comparable: init_from"),
    "other data": (lambda f: change(f / "config.json", data__splits__val__sha256="ffff"), "not comparable: data"),
    "other validation": (lambda f: change(f / "result.json", val_tokens=7), "not comparable: validation tokens"),
    "other weight decay": (lambda f: change(f / "config.json", config__weight_decay=0.0), "not comparable: weight_decay"),
    "missing key": (lambda f: change(f / "config.json", derived={}), "lack 'parameters'"),
    "another model's folder": (lambda f: replace_by(f, f.parent / f.name.replace("longhorn", "mamba")),
                               "another run's records: model"),
    "another seed's folder": (lambda f: replace_by(f, f.parent / f.name.replace("1339", "1337")), "another run's records: seed"),
    "another budget's folder": (lambda f: replace_by(f, f.parent / "longhorn_460K_256_320steps_lr0.005_seed1337"),
                                "another run's records"),
}


DAMAGE |= {
    "no validation tokens": (lambda f: change(f / "result.json", val_tokens=...), "lack"),
    "worse than guessing": (lambda f: change(f / "result.json", val_loss=50.0), "no better than guessing"),
    "null seconds": (lambda f: change(f / "result.json", seconds=None), "seconds"),
    "FLOPs in words": (lambda f: change(f / "result.json", flops="many"), "flops"),
    "no parameters": (lambda f: change(f / "result.json", parameters=0), "parameters"),
    "loss beyond floats": (lambda f: change(f / "result.json", val_loss=10**400), "val_loss"),
    "another size's folder": (lambda f: replace_by(f, f.parent / f.name.replace("460K", "130K")), "another run's records"),
    "not finished, log of numbers": (lambda f: ((f / "result.json").unlink(), (f / "log.jsonl").write_text("1")), ""),
    "not finished, binary log": (lambda f: ((f / "result.json").unlink(), (f / "log.jsonl").write_bytes(b"\xff\xfe")), ""),
}


def cut(path):
    path.write_text(path.read_text().rstrip()[:-20])


def drop_last_line(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def replace_by(folder, other):
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


VICTIM = "longhorn_460K_256_1024steps_lr0.005_seed1339"


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_run_is_named_and_left_out(tmp_path, how):
    names = make_sweep(tmp_path, models=("longhorn", "mamba"))
    damage, reason = DAMAGE[how]
    damage(tmp_path / VICTIM)
    runs, left_out = sweep.read_runs(tmp_path)
    assert list(left_out) == [VICTIM] and reason in left_out[VICTIM] and "\n" not in left_out[VICTIM]
    assert [r.name for r in runs] == [n for n in names if n != VICTIM]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cells": []}', '{"cells": {"a": 1}}', "\ufffd"])
def test_a_damaged_plan_is_one_sentence(tmp_path, text):
    tmp_path.joinpath("plan.json").write_text(text)
    with pytest.raises(ConfigError, match="plan.json cannot be read"):
        report.write(tmp_path)


def test_no_plan_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="holds no sweep"):
        report.write(tmp_path)


# ------------------------------------------------------------------------------------------------------------ the numbers

def test_the_table_is_mean_and_spread_over_the_seeds_at_the_best_rate(whole):
    folder, _, numbers, page = whole
    losses = [json.loads((folder / f"longhorn_1.5M_256_1024steps_lr0.005_seed{s}/result.json").read_text())["val_loss"]
              for s in (1337, 1338, 1339)]
    cell = cell_of(numbers, "longhorn", "1.5M")
    assert cell["mean_loss"] == pytest.approx(fmean(losses)) and cell["sd_loss"] == pytest.approx(stdev(losses))
    assert list(cell["losses"].values()) == losses and cell["bits_per_byte"] == pytest.approx(fmean(losses) / math.log(2))
    assert (cell["learning_rate"], cell["learning_rates_tried"], cell["learning_rate_is"]) == (5e-3, [2e-3, 5e-3], "highest")
    assert f"{fmean(losses):.4f} \u00b1 {stdev(losses):.4f} (3)" in page
    assert cell["hours"] == {"CPU hours": pytest.approx(cell["seconds"] / 3600, rel=0.01)} and "GPU hours" not in page
    damaged = cell_of(numbers, "gla", "460K")
    assert len(damaged["losses"]) == 2 and "460K, GLA: 2 of 3 planned seeds are usable." in page
    assert "result.json is damaged" in numbers["left_out"]["gla_460K_256_1024steps_lr0.005_seed1339"]


def test_a_winner_is_bold_only_where_it_is_significant(whole, told):
    _, paths, numbers, page = whole
    won = {w["size"]: w for w in numbers["winners"]}
    assert won["130K"]["winner"] == "longhorn" and max(won["130K"]["p"].values()) < 0.05
    best = cell_of(numbers, "longhorn", "130K")
    marked = f"{best['mean_loss']:.4f} \u00b1"
    assert f"<strong>{marked}" in page and f"**{marked}" in paths["table1.md"].read_text()
    assert page.count("<strong>") == sum(w["winner"] is not None for w in won.values())
    numbers, text, _ = told(seeds=(1337,))
    assert [w["winner"] for w in numbers["winners"]] == [None] * 3 and "**" not in text
    assert "Longhorn is lowest, but cannot be tested against Mamba: Longhorn has 1 and Mamba has 1 of the two seeds" in text
    assert "at none of them significantly below" in text and "with 1 seed" in text


def test_noise_is_no_winner(told):
    numbers, text, _ = told(noise=0.1)
    assert any(w["winner"] is None and "not significantly" in w["reason"] for w in numbers["winners"])
    assert text.count("**") == 2 * sum(w["winner"] is not None for w in numbers["winners"])


def test_the_law_is_recovered(whole):
    numbers = whole[2]
    for model in LAWS:
        fit = next(f for f in numbers["fits"] if f["model"] == model and f["embeddings"])
        assert fit["alpha"] == pytest.approx(0.35, abs=0.1) and fit["beta"] == pytest.approx(0.35, abs=0.1), model
        low, high = fit["intervals"]["alpha"]
        assert low <= fit["alpha"] <= high
        without = next(f for f in numbers["fits"] if f["model"] == model and not f["embeddings"])
        assert without["alpha"] < fit["alpha"]  # the same loss over a wider range of N
    assert len(numbers["fits"]) == 14


def test_sample_efficiency_is_that_of_the_curves(whole):
    numbers, page = whole[2:]
    for pair in numbers["sample_efficiency"]:
        assert pair["a"] == "longhorn" and pair["along_the_runs"]["at_end"] > 1
        assert len(pair["along_the_runs"]["loss"]) == len(pair["along_the_runs"]["ratio"])
    pair = next(p for p in numbers["sample_efficiency"] if (p["b"], p["size"]) == ("retnet", "130K"))
    (E, A, alpha, B, beta), worse = LAWS["longhorn"], LAWS["retnet"]
    excess = worse[0] - E + (worse[1] - A) / 130e3**alpha
    expected = lambda D: D / ((worse[3] / D**beta + excess) / B)**(-1 / beta)  # by the laws, b at D tokens
    assert pair["between_budgets"]["at_end"] == pytest.approx(expected(3200 * BATCH), rel=0.15)
    assert f"{pair['between_budgets']['at_end']:.2f}\u00d7" in page and "The paper reports 1.8\u00d7" in page


def test_pairs_and_embeddings_can_be_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "picture", lambda *a, **k: None)
    make_sweep(tmp_path, models=("gla", "llama", "mamba"), ladder=())
    numbers = json.loads(report.write(tmp_path, tmp_path / "new/report", embeddings=False, pairs=[("mamba", "gla")], bootstrap=0)[
        "report.json"].read_text())
    assert {(p["a"], p["b"]) for p in numbers["sample_efficiency"]} == {("mamba", "gla")}
    assert {f["embeddings"] for f in numbers["fits"]} == {False}
    assert all(p["between_budgets"] is None for p in numbers["sample_efficiency"])


# --------------------------------------------------------------------------------------------------- what cannot be told

def test_the_rate_stands_when_the_first_seeds_record_is_lost(told):
    numbers, text, _ = told(lambda folder, names: shutil.rmtree(folder / "longhorn_460K_256_1024steps_lr0.005_seed1337"))
    cell = cell_of(numbers, "longhorn", "460K")
    assert cell["learning_rate"] == 5e-3 and list(cell["losses"]) == ["1338", "1339"]
    assert "seed 1337 has no usable run at learning rate 0.005" in text and "2 of 3 planned seeds" in text


def test_a_rate_that_diverged_was_tried(told):
    def damage(folder, names):
        change(folder / "longhorn_460K_256_1024steps_lr0.02_seed1337/result.json", val_loss=None)
    numbers, _, _ = told(damage, rates=(2e-3, 5e-3, 2e-2), noise=0)
    cell = cell_of(numbers, "longhorn", "460K")
    assert cell["learning_rates_tried"] == [2e-3, 5e-3, 2e-2] and cell["learning_rate_is"] is None


def test_a_hole_is_a_dash_with_its_reason(told):
    def damage(folder, names):
        for name in names:
            if name.startswith("mamba_460K"):
                change(folder / name / "result.json", val_loss=None)
    numbers, text, _ = told(damage)
    assert cell_of(numbers, "mamba", "460K")["mean_loss"] is None and "| \u2013 |" in text
    assert "460K, Mamba: no usable run (its loss is None: it diverged)" in text
    assert "460K: 1 families with a loss: nothing to compare" in text
    fits = [f for f in numbers["fits"] if f["model"] == "mamba"]
    assert all("2 values of N" in " ".join(f["warnings"]) and f["alpha"] is None for f in fits)


def test_the_same_run_twice_is_counted_once(told):
    def damage(folder, names):
        plan = json.loads((folder / "plan.json").read_text())
        name = "longhorn_460K_256_1024steps_lr0.005_seed1338"
        shutil.copytree(folder / name, folder / "copy")
        plan["cells"]["copy"] = plan["cells"][name]
        (folder / "plan.json").write_text(json.dumps(plan))
    numbers, _, _ = told(damage)
    assert "copy" in numbers["left_out"] and len(cell_of(numbers, "longhorn", "460K")["losses"]) == 3


@pytest.mark.parametrize("sizes, ladder, said", [
    ({"130K": 130_000}, (), "cannot show how the loss falls"),
    ({"130K": 130_000, "131K": 130_000}, (), "cannot show how the loss falls"),  # equal sizes
    ({"130K": 130_000}, (320, 3200), "cannot be told apart with 1 value of N"),
    (SIZES, (), "E, B and beta cannot be told apart with 1 value of D")])
def test_what_cannot_be_fitted_is_said(told, sizes, ladder, said):
    numbers, text, shown = told(sizes=sizes, ladder=ladder)
    assert said in text and "biased even without noise" in text
    assert all((f["cannot"] is not None) == ("how the loss falls" in said) for f in numbers["fits"])
    assert any("against training tokens" in alt for alt in shown) and any("against parameters" in alt for alt in shown)


def test_nothing_usable_is_a_report_too(told):
    numbers, text, shown = told(lambda folder, names: [shutil.rmtree(folder / n) for n in names])
    assert numbers["runs_used"] == 0 and len(numbers["left_out"]) == 36 and not shown
    assert "0 of 36 runs are used" in text and "not run (36)" in text and "There is no usable run." in text


def test_a_cell_without_a_place_is_left_out(told):
    def damage(folder, names):
        plan = json.loads((folder / "plan.json").read_text())
        plan["cells"][VICTIM] = {"argv": []}
        (folder / "plan.json").write_text(json.dumps(plan))
    numbers, _, _ = told(damage)
    assert "no place in the table" in numbers["left_out"][VICTIM] and numbers["runs_used"] == 35


def test_a_plan_without_cells_is_a_report_too(told):
    _, text, _ = told(lambda folder, names: (folder / "plan.json").write_text('{"cells": {}}'))
    assert "0 of 0 runs are used" in text


def test_one_cell_alone_can_be_drawn(tmp_path):
    make_sweep(tmp_path, models=("longhorn",), sizes={"460K": 460_000}, seeds=(1,), rates=(1e-3,), ladder=())
    paths = report.write(tmp_path)
    assert paths["figure5.png"].stat().st_size > 10_000 and "fit.png" not in paths and "efficiency.png" not in paths


# ------------------------------------------------------------------------------------------------------ the paper's numbers

PAPERS = {"120M": 128_600_000, "350M": 369_800_000}


def test_the_papers_figures_stand_beside_the_papers_cells_only(told):
    numbers, text, _ = told(sizes=PAPERS, contexts=(1024, 4096), seeds=(1337,), rates=(6e-4,), ladder=(), paper=True,
                            gpu="NVIDIA H100 80GB HBM3")
    assert cell_of(numbers, "longhorn", "350M", 4096)["paper_loss"] == 2.859
    assert re.search(r"\d\.\d{4} \(1\); paper 2\.859", text) and "128.6M; paper 128.6M" in text
    assert "GPU hours" in text and "CPU hours" not in text and list(numbers["cost"]["hours"]) == ["GPU hours"]
    assert "only one" in text


@pytest.mark.parametrize("about", [{"paper": False}, {"paper": "yes"}, {}])
def test_other_cells_get_no_figure_of_the_paper(told, about):
    numbers, text, _ = told(sizes=PAPERS, contexts=(1024, 512), seeds=(1337,), ladder=(), **about)
    assert all(c["paper_loss"] is None for c in numbers["table"]) and "; paper" not in text
    assert "The paper's numbers, not ours" in text  # its own table is there for orientation, and says whose it is


def test_the_papers_table_is_copied_right():
    assert report.PAPER["longhorn"] == {"120M": (128.6, 3.225, 3.192), "350M": (369.8, 2.888, 2.859)}
    assert report.PAPER["llama"] == {"120M": (124.4, 3.247, 3.273), "350M": (357.7, 2.891, 2.883)}
    total = sum(v for sizes in report.PAPER.values() for numbers in sizes.values() for v in numbers)
    assert total == pytest.approx(3023.192, abs=0.001)


# ------------------------------------------------------------------------------------------------------------- the files

def test_every_number_of_the_record_is_finite(whole):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")
    json.loads(whole[1]["report.json"].read_text(), parse_constant=refuse)


def test_the_same_records_give_the_same_files(whole, tmp_path):
    folder, paths, _, _ = whole
    found = report.analyse(folder, bootstrap=40)
    style = report.looks({e.model for e in found.entries})
    panels = report.figure5(found.entries, found.fits, style)
    report.picture(panels, tmp_path / "again.svg", columns=2)
    assert (tmp_path / "again.svg").read_bytes() == paths["figure5.svg"].read_bytes()
    assert report.as_json(found) == json.loads(paths["report.json"].read_text())


def test_the_report_needs_no_torch():
    code = "import sys; from experiments.scaling import report; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).resolve().parent.parent, check=True)


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    make_sweep(tmp_path, models=("longhorn",), sizes={"460K": 460_000}, ladder=())
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to .*choose another --out"):
        report.write(tmp_path, tmp_path / "file")


class Page(HTMLParser):
    """Tags that stand open, every (tag, attributes), and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_is_whole_and_asks_for_nothing(whole):
    folder, paths, _, text = whole
    page = Page(text)
    assert page.open == [] and not [t for t, _ in page.tags if t in ("script", "iframe", "object", "base", "form")]
    assert EVIL in page.text and "<script" not in text and "url(" not in text and "@import" not in text
    for tag, attributes in page.tags:
        assert not [a for a in attributes if a.startswith("on")]
        if tag == "img":
            assert attributes["src"].startswith("data:image/svg+xml;base64,") and len(attributes["alt"]) > 30
        for link in [attributes["href"]] if "href" in attributes else []:
            if link.startswith("#"):
                assert any(a.get("id") == link[1:] for _, a in page.tags)
            elif link != "data:,":
                assert (paths["report.html"].parent / unquote(link)).is_file(), link
    links = [a["href"] for t, a in page.tags if t == "a" and not a["href"].startswith("#")]
    assert len(links) == 3 * len(json.loads((folder / "plan.json").read_text())["cells"])


def test_markdown_tables_are_whole(whole):
    lines = whole[1]["table1.md"].read_text().splitlines()
    for i, line in enumerate(lines):
        if line.startswith("|---"):
            columns = line.count("|")
            for row in [lines[i - 1], *itertools.takewhile(lambda row: row.startswith("|"), lines[i:])]:
                assert len(re.findall(r"(?<!\\)\|", row)) == columns, row
    assert "<script" not in "\n".join(lines) and "](figure5.png)" in "\n".join(lines)


MEASURE = """<script>addEventListener("load", () => {
 const wide = [...document.querySelectorAll("body *")].filter(e => e.getBoundingClientRect().right > innerWidth + 1
   && !e.closest(".scroll")).map(e => e.tagName + " " + e.textContent.slice(0, 40))
 parent.postMessage({width: innerWidth, page: document.documentElement.scrollWidth, wide, images:
   [...document.images].map(i => i.complete && i.naturalWidth), font: parseFloat(getComputedStyle(document.body).fontSize),
   asked: performance.getEntriesByType("resource").map(r => r.name).filter(n => !n.startsWith("data:"))}, "*") })</script>"""


def test_the_page_in_a_browser(whole, tmp_path):
    """At a phone's and a desktop's width: nothing wider than the window, every figure there, nothing fetched, no error."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip("no chromium or google-chrome to look at the page with")
    # a window of a headless browser is at least 500 wide, and the page of a file may not look into another's: a frame that tells
    (tmp_path / "report.html").write_text(whole[3].replace("</body>", MEASURE + "</body>"), encoding="utf-8")
    (tmp_path / "frames.html").write_text(
        "<body><pre></pre><script>const told = []; onmessage = e => { told.push(e.data); "
        "document.querySelector('pre').textContent = JSON.stringify(told) }; console.error('heard')</script>"
        + "".join(f'<iframe src="report.html" style="border:0" width="{w}" height="900"></iframe>' for w in (390, 1200)))
    run = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         f"--user-data-dir={tmp_path / 'user'}",
         "--window-size=1400,1000", "--enable-logging=stderr", "--virtual-time-budget=10000", "--dump-dom",
         (tmp_path / "frames.html").as_uri()], capture_output=True, text=True, timeout=60)
    told = json.loads(html.unescape(re.search("<pre>(.*?)</pre>", run.stdout, re.S)[1]))
    assert sorted(t["width"] for t in told) == [390, 1200]
    for t in told:
        assert t["page"] <= t["width"] and t["wide"] == [], t
        assert len(t["images"]) == 4 + 3 + 7 and all(t["images"]) and t["font"] >= 16 and t["asked"] == []
    console = [line for line in run.stderr.splitlines() if ":CONSOLE" in line]
    assert len(console) == 1 and "heard" in console[0], console


def longer_runs(folder, model, keep):
    """Runs of a family at twice the tokens, much better, beside its others or in their place."""
    plan = json.loads((folder / "plan.json").read_text())
    for name, at in list(plan["cells"].items()):
        if at["model"] == model and at["stage"] != "ladder":
            longer = name.replace(f"{STEPS}steps", f"{2 * STEPS}steps")
            plan["cells"][longer] = {**at, "steps": 2 * STEPS}
            make_run(folder / longer, model, SIZES[at["size"]], at["context"], 2 * STEPS, at["learning_rate"], at["seed"],
                     1.0 + at["seed"] / 1e6)
            if not keep:
                del plan["cells"][name]
                shutil.rmtree(folder / name)
    (folder / "plan.json").write_text(json.dumps(plan))


@pytest.mark.parametrize("keep", [True, False])
def test_families_are_compared_at_the_tokens_that_all_of_them_saw(tmp_path, keep):
    make_sweep(tmp_path, models=("longhorn", "mamba"), sizes={"460K": SIZES["460K"]}, ladder=())
    before = report.analyse(tmp_path, bootstrap=0)
    longer_runs(tmp_path, "mamba", keep)
    found = report.analyse(tmp_path, bootstrap=0)
    tokens = {e.model: e.tokens for e in found.entries}
    won = found.won["460K", 256]
    if keep:
        assert tokens == {"longhorn": STEPS * BATCH, "mamba": STEPS * BATCH}
        assert won == before.won["460K", 256]
        assert any("not averaged" in n for e in found.entries for n in e.notes)
    else:
        assert tokens == {"longhorn": STEPS * BATCH, "mamba": 2 * STEPS * BATCH}
        assert won.family is None and "different numbers of tokens" in won.reason


def test_records_that_are_not_what_the_plan_asked_for(tmp_path):
    names = make_sweep(tmp_path, models=("longhorn",), sizes={"460K": SIZES["460K"]}, ladder=())
    plan = json.loads((tmp_path / "plan.json").read_text())
    plan["cells"][names[0]]["argv"] += ["--n_layer=3", "--min_lr=0", "--dtype=auto", "--vocab_size=0"]  # as it ran
    plan["cells"][names[1]]["argv"] += ["--n_layer=9"]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    runs, left_out = sweep.read_runs(tmp_path)
    assert left_out == {names[1]: "another run's records: n_layer is 3, the plan says 9"} and len(runs) == len(names) - 1
