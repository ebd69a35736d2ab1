"""The report of sweeps that are made up from known laws: what it says, what it leaves out, what a saved sweep keeps."""

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
from urllib.parse import unquote

import pytest

from configurator import ConfigError
from experiments.scaling import figures, report, runs

REPO = Path(__file__).resolve().parent.parent
# E, A, alpha, B, beta of each made-up family
LAWS = {"retnet": (0.99, 32.0, 0.35, 66.0, 0.35), "gla": (0.97, 31.0, 0.35, 62.0, 0.35),
        "rwkv": (0.96, 30.0, 0.35, 62.0, 0.35), "mamba": (0.94, 30.0, 0.35, 58.0, 0.35),
        "llama": (0.88, 33.0, 0.35, 63.0, 0.35), "longhorn": (0.94, 29.8, 0.35, 56.0, 0.35)}
SIZES = {"130K": 130_000, "460K": 460_000, "1.5M": 1_490_000}
STEPS, BATCH = 1024, 1024
CODE, FILES = "ab0d75f4c450", {"train.py": "1" * 12, "model.py": "2" * 12}


def make_sweep(folder, models=LAWS, sizes=SIZES, contexts=(256,), seeds=(1337, 1338, 1339), rates=(2e-3, 5e-3),
               noise=0.002, ladder=(320, 3200), gpu=None, **about):
    """A finished sweep in `folder`, as train.py writes it. The second rate is the best one. Returns its cells' names.

    Losses are E + A / N^alpha + B / D^beta of LAWS with `noise` over seeds; `about` goes into the plan.
    """
    dice, cells = random.Random(0), {}
    for model, (size, n), context in itertools.product(models, sizes.items(), contexts):
        best = rates[min(1, len(rates) - 1)]
        wanted = [("rate", STEPS, rate, seeds[0]) for rate in rates] + [("seed", STEPS, best, s) for s in seeds[1:]]
        for stage, steps, rate, seed in wanted + [("ladder", steps, best, seeds[0]) for steps in ladder]:
            name = f"{model}_{size}_{context}_{steps}steps_lr{rate:g}_seed{seed}"
            cells[name] = {"stage": stage, "model": model, "size": size, "context": context, "steps": steps,
                           "learning_rate": rate, "seed": seed, "argv": [f"config/{model}_laptop.py"]}
            E, A, alpha, B, beta = LAWS.get(model, LAWS["gla"])
            loss = (E + A / n**alpha + B / (steps * BATCH)**beta + 0.03 * abs(math.log(rate / best))
                    - 0.01 * math.log2(context / 256) + dice.gauss(0, noise))
            make_run(folder / name, model, n, context, steps, rate, seed, loss, gpu)
    plan = {"preset": "laptop", "paper": False, "machine": gpu or "AMD EPYC", "cells": cells}
    folder.joinpath("plan.json").write_text(json.dumps(plan | about))
    return list(cells)


def make_run(folder, model, n, context, steps, rate, seed, loss, gpu=None):
    """config.json, log.jsonl and result.json of one run."""
    folder.mkdir(parents=True)
    tokens = steps * BATCH
    config = {"model": model, "n_layer": 3, "block_size": context, "vocab_size": 256, "resume": "auto", "seed": seed,
              "out_dir": f"out/table1_laptop/{folder.name}", "dataset": "pystdlib", "batch_tokens": BATCH,
              "micro_batch_size": 4, "max_iters": steps, "learning_rate": rate, "min_lr": 0.0, "warmup_iters": -1,
              "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.99, "grad_clip": 1.0, "eval_interval": -(-steps // 6),
              "eval_tokens": 131072, "final_eval_tokens": 131072, "eval_block_size": 256, "dtype": "bfloat16"}
    record = {"config": config, "environment": {"code": CODE, "code_files": FILES, "commit": "f" * 40, "torch": "2.13",
                                                "cpu": "AMD EPYC", "gpu": gpu, "command": "python train.py"},
              "derived": {"tokens": tokens, "parameters": {"embedding": 256 * 64, "total": n}, "decayed": ["a"]},
              "data": {"splits": {"train": {"sha256": "10d1"}, "val": {"sha256": "801d"}}}, "code_versions": [CODE],
              "time": "2026-11-20T11:33:15+00:00"}
    (folder / "config.json").write_text(json.dumps(record))
    seconds, events = 6 * n * tokens / 1e11, []
    for step in sorted({*range(-(-steps // 6), steps, -(-steps // 6)), steps}):
        at = {"step": step, "tokens": step * BATCH, "seconds": seconds * step / steps}
        on_the_way = loss + 60 * ((step * BATCH)**-0.35 - tokens**-0.35) + 0.05 * (1 - step / steps)
        events += [{"event": "train", **at, "train_loss": loss + 0.1},
                   {"event": "eval", **at, "val_loss": loss if step == steps else on_the_way}]
    (folder / "log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    result = {"model": model, "val_loss": loss, "val_tokens": 131072, "steps": steps, "tokens": tokens, "seed": seed,
              "seconds": seconds, "parameters": n, "flops": 6 * n * tokens, "processes": 1, "code": CODE,
              "device_name": gpu or "cpu", "val_bits_per_byte": loss / math.log(2)}
    (folder / "result.json").write_text(json.dumps(result))


def change(path, **values):
    """Set keys of a JSON file, or remove them (...); a__b is key b of the table a."""
    record = json.loads(path.read_text())
    for key, value in values.items():
        *parents, last = key.split("__")
        table = record
        for p in parents:
            table = table[p]
        if value is ...:
            del table[last]
        else:
            table[last] = value
    path.write_text(json.dumps(record))


def other_code(folder, code="beef", files=None):
    """The same run by other code."""
    files = files or FILES | {"model.py": "9" * 12}
    change(folder / "config.json", environment__code=code, environment__code_files=files, code_versions=[code])
    change(folder / "result.json", code=code)


def old_record(folder, commit="f" * 40, changed_code=None):
    """The run's records as older versions wrote them: no code, but a commit and a hash of what was changed since."""
    change(folder / "config.json", environment__code=..., environment__code_files=..., code_versions=...,
           config__micro_batch_size=..., config__batch_size=4, environment__commit=commit,
           environment__changed_code=changed_code)
    change(folder / "result.json", code=..., commit=commit)


EVIL = "<script>alert('x')</script>|$x_"  # a tag in HTML, a column in Markdown, a formula in a figure


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(folder, paths, report.json, report.html) of a whole sweep with one damaged run: drawn once, read many times."""
    folder = tmp_path_factory.mktemp("sweeps") / "table1 laptop#1"
    folder.mkdir()
    make_sweep(folder, models=[*LAWS, EVIL])
    (folder / "gla_460K_256_1024steps_lr0.005_seed1339/result.json").write_text('{"model": "gl')
    paths = report.write(folder, bootstrap=40)
    return folder, paths, json.loads(paths["report.json"].read_text()), paths["report.html"].read_text()


@pytest.fixture
def told(tmp_path, monkeypatch):
    """told(damage, **arguments of make_sweep): (report.json, table1.md, what the figures show) of Longhorn and Mamba.

    `damage(folder, names)` comes before the report. Nothing is drawn, which would take a second per figure.
    """
    shown = []

    def picture(panels, path, kind="png"):
        shown.extend(p.alt for p in panels)
        if kind == "png":
            path.touch()
    monkeypatch.setattr(figures, "picture", picture)

    def tell(damage=None, accept_code=(), **sweep_arguments):
        names = make_sweep(tmp_path, **{"models": ("longhorn", "mamba"), **sweep_arguments})
        if damage:
            damage(tmp_path, names)
        paths = report.write(tmp_path, bootstrap=0, accept_code=accept_code)
        return json.loads(paths["report.json"].read_text()), paths["table1.md"].read_text(), shown
    return tell


def cell_of(numbers, model, size, context=256):
    return next(c for c in numbers["table"] if (c["model"], c["size"], c["context"]) == (model, size, context))


# -------------------------------------------------------------------------------------------------- reading the records

def test_a_clean_sweep_is_read_whole(tmp_path):
    names = make_sweep(tmp_path)
    change(tmp_path / VICTIM / "config.json", environment__commit="0" * 40)  # of the same sources
    found = runs.read_sweep(tmp_path)
    assert len(names) == 108 and [r.name for r in found.runs] == names and found.left_out == {}
    run = next(r for r in found.runs if r.name == "mamba_460K_256_320steps_lr0.005_seed1337")
    assert (run.model, run.size, run.context, run.tokens, run.learning_rate, run.seed) == (
        "mamba", "460K", 256, 327680, 5e-3, 1337)
    assert (run.parameters, run.embedding, run.flops, run.code) == (460_000, 16384, 6 * 460_000 * 327680, CODE)
    assert run.curve[-1] == (327680, run.loss) and len(run.curve) == 6
    E, A, alpha, B, beta = LAWS["mamba"]
    assert abs(run.loss - (E + A / 460e3**alpha + B / 327680**beta)) < 0.01


def cut(path):
    path.write_text(path.read_text().rstrip()[:-20])


def drop_last_line(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def replace_by(folder, old, new):
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / folder.name.replace(old, new), folder)


DAMAGE = {  # how: (what is done to a run's folder, what its reason must say)
    "result is a list": (lambda f: (f / "result.json").write_text("[1]"), "result.json is damaged"),
    "no config": (lambda f: (f / "config.json").unlink(), "no config.json"),
    "torn log": (lambda f: cut(f / "log.jsonl"), "log.jsonl is damaged"),
    "log without its end": (lambda f: drop_last_line(f / "log.jsonl"), "does not end with the loss"),
    "NaN loss": (lambda f: change(f / "result.json", val_loss=math.nan), "diverged"),
    "worse than guessing": (lambda f: change(f / "result.json", val_loss=50.0), "not below guessing's"),
    "loss beyond floats": (lambda f: change(f / "result.json", val_loss=10**400), "val_loss"),
    "not run": (shutil.rmtree, "not run"),
    "not finished": (lambda f: (f / "result.json").unlink(), "not finished (step 1024)"),
    "other code in the result": (lambda f: change(f / "result.json", code="0" * 12), "disagree: code"),
    "other code": (other_code, f"other code, beef, than most runs, {CODE}: --accept_code=beef joins it"),
    "older code": (old_record, f"other code, {'f' * 12}, than"),
    "code that changed": (lambda f: change(f / "config.json", code_versions=[CODE, "beef", CODE]),
                          f"its code changed while it was down: {CODE}, then beef, then {CODE}"),
    "other weights": (lambda f: change(f / "config.json", config__init_from="out/a"), "not comparable: init_from"),
    "Muon": (lambda f: change(f / "config.json", config__optimizer="muon"), "optimizer muon where most have adamw"),
    "other data": (lambda f: change(f / "config.json", data__splits__val__sha256="ffff"), "not comparable: data"),
    "other evaluation": (lambda f: change(f / "result.json", val_tokens=7), "not comparable: validation tokens"),
    "other weight decay": (lambda f: change(f / "config.json", config__weight_decay=0.0), "comparable: weight_decay"),
    "no parameters": (lambda f: change(f / "result.json", parameters=0), "parameters"),
    "another model's folder": (lambda f: replace_by(f, "longhorn", "mamba"), "another run's records: model"),
    "another size's folder": (lambda f: replace_by(f, "460K", "130K"), "another run's records: they were written to"),
}
VICTIM = "longhorn_460K_256_1024steps_lr0.005_seed1339"


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_run_is_named_and_left_out(tmp_path, how):
    """Also of the saved sweep, which keeps the reason where the records cannot be kept."""
    names = make_sweep(tmp_path, models=("longhorn", "mamba"), ladder=())
    damage, reason = DAMAGE[how]
    damage(tmp_path / VICTIM)
    runs.save(tmp_path, tmp_path / "saved.json")
    for source in (tmp_path, tmp_path / "saved.json"):
        found = runs.read_sweep(source)
        assert list(found.left_out) == [VICTIM] and reason in found.left_out[VICTIM]
        assert "\n" not in found.left_out[VICTIM] and [r.name for r in found.runs] == [n for n in names if n != VICTIM]


@pytest.mark.parametrize("text", ["{", "[]", '{"cells": []}', '{"cells": {"a": 1}}', '{"cells": {"../a": {}}}'])
def test_a_damaged_plan_or_saved_sweep_is_one_sentence(tmp_path, text):
    with pytest.raises(ConfigError, match="holds no sweep"):
        report.write(tmp_path)
    for name, source in (("plan.json", tmp_path), ("saved.json", tmp_path / "saved.json")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match="plan.json cannot be read|saved.json is no saved sweep") as error:
            report.write(source)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("first, second, left_out", [("131072", "64", True), ("64", "131072", False)])
def test_of_two_arguments_the_later_one_is_the_plans(tmp_path, first, second, left_out):
    """As where the command line overrides what the preset gives every run."""
    name, other = make_sweep(tmp_path, models=("longhorn",), sizes={"130K": 130_000}, seeds=(1,), ladder=())
    change(tmp_path / "plan.json", **{f"cells__{name}__argv": [f"--eval_tokens={first}", f"--eval_tokens={second}"],
                                      f"cells__{other}__argv": ["--min_lr=0", "--dtype=auto", "--vocab_size=0"]})
    assert list(runs.read_sweep(tmp_path).left_out) == [name] * left_out


# --------------------------------------------------------------------------------------------------- code, saved sweeps

def test_versions_of_the_code_stand_side_by_side_and_are_joined_on_request(told, tmp_path):
    def damage(folder, names):
        other_code(folder / VICTIM)
        for seed in (1337, 1338):
            other_code(folder / VICTIM.replace("1339", str(seed)), "cafe", FILES | {"train.py": "8" * 12})
        change(folder / VICTIM.replace("460K", "130K") / "config.json", code_versions=[CODE, "beef"])
    numbers, text, _ = told(damage)
    versions = {c["code"]: (c["runs"], c["used"], c["changed_files"]) for c in numbers["code"]}
    assert versions == {CODE: (32, 32, []), "cafe": (2, 0, ["train.py"]), "beef": (1, 0, ["model.py"])}
    assert list(versions)[0] == CODE and "| beef | ffffffffffff | 1 | 0 | model.py |" in text
    assert "only runs of one version are compared" in text and len(numbers["left_out"]) == 3
    found = json.loads(report.write(tmp_path, bootstrap=0, accept_code=("beef",))["report.json"].read_text())
    assert {c["code"]: c["used"] for c in found["code"]} == {CODE: 33, "cafe": 0, "beef": 1}
    assert "those of beef are compared with the others because --accept" in (tmp_path / "table1.md").read_text()
    assert "cafe" in str(found["left_out"]) and "beef" not in str(found["left_out"])
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to .*choose another --out"):
        report.write(tmp_path, tmp_path / "file", bootstrap=0)
    with pytest.raises(ConfigError, match="--accept_code=f00d: the runs of .* have ab0d75f4c450, beef, cafe"):
        report.write(tmp_path, accept_code=("f00d",))


def test_a_sweep_of_older_records_is_read(tmp_path):
    for name in make_sweep(tmp_path, models=("longhorn",), ladder=()):
        old_record(tmp_path / name, changed_code="12ab" if name == VICTIM else None)
    found = runs.read_sweep(tmp_path)
    assert {r.code for r in found.runs} == {"f" * 12} and list(found.left_out) == [VICTIM]
    assert len(runs.read_sweep(tmp_path, ("f" * 12 + "+12ab",)).runs) == len(found.runs) + 1
    assert found.code[0]["changed_files"] is None


def test_a_saved_sweep_gives_the_same_report(told, tmp_path, monkeypatch):
    before, text, _ = told(lambda folder, names: cut(folder / VICTIM / "result.json"))
    monkeypatch.setattr(report, "REPO", tmp_path)
    paths = report.write(tmp_path, bootstrap=0, save_it=True)
    saved = paths[f"{tmp_path.name}.json"]
    assert saved == tmp_path / "results" / f"{tmp_path.name}.json" and saved.stat().st_size < 100_000
    again = report.write(saved, tmp_path / "again", bootstrap=0)
    assert json.loads(again["report.json"].read_text()) == before and again["table1.md"].read_text() == text
    assert (tmp_path / "results" / tmp_path.name / "table1.md").read_text() == text
    runs.save(saved, tmp_path / "twice.json")
    assert (tmp_path / "twice.json").read_bytes() == saved.read_bytes()


def test_a_saved_sweep_keeps_its_numbers_exactly(tmp_path):
    (name, *_) = make_sweep(tmp_path, models=("longhorn",), ladder=())
    steps = [{"event": "train", "step": i, "train_loss": 1 / i} for i in range(1, 101)]
    with open(tmp_path / name / "log.jsonl", "r+") as log:
        lines = [json.dumps(e) + "\n" for e in steps] + log.readlines()
        log.seek(0)
        log.writelines(lines)
    runs.save(tmp_path, tmp_path / "saved.json")
    whole, saved = (runs.read_sweep(source).runs for source in (tmp_path, tmp_path / "saved.json"))
    for a, b in zip(whole, saved, strict=True):
        assert a.config | {"out_dir": ""} == b.config | {"out_dir": ""} and a.curve == b.curve
        b.config, b.environment = a.config, a.environment
        assert a == b
    train = [e for e in runs.load(tmp_path / "saved.json")[1][name].events if e["event"] == "train"]
    assert len(train) == 24 and train[0] == steps[0] and all(e["train_loss"] == 1 / e["step"] for e in train[:-6])


def test_the_published_sweep_gives_the_published_table():
    """results/table1_laptop.json: README's numbers."""
    found = runs.read_sweep(REPO / "results/table1_laptop.json")
    means = {(e.model, e.size): round(e.mean, 3) for e in report.collect(found)}
    assert len(found.runs) == 114 and means["longhorn", "1.5M"] == 1.340 and means["mamba", "130K"] == 1.528
    assert means["retnet", "460K"] == 1.764


# ---------------------------------------------------------------------------------------------------------- the numbers

def test_the_table_is_mean_and_spread_over_the_seeds_at_the_best_rate(whole):
    folder, _, numbers, page = whole
    losses = [json.loads((folder / f"longhorn_1.5M_256_1024steps_lr0.005_seed{s}/result.json").read_text())["val_loss"]
              for s in (1337, 1338, 1339)]
    cell = cell_of(numbers, "longhorn", "1.5M")
    assert cell["mean_loss"] == pytest.approx(fmean(losses)) and cell["sd_loss"] == pytest.approx(stdev(losses))
    assert list(cell["losses"].values()) == losses
    assert cell["bits_per_byte"] == pytest.approx(fmean(losses) / math.log(2))
    assert (cell["learning_rate"], cell["learning_rates_tried"]) == (5e-3, [2e-3, 5e-3])
    assert f"{fmean(losses):.4f} \u00b1 {stdev(losses):.4f} (3)" in page and "0.005, highest" in page
    assert cell["hours"] == {"CPU hours": pytest.approx(cell["seconds"] / 3600, rel=0.01)} and "GPU hours" not in page
    assert len(cell_of(numbers, "gla", "460K")["losses"]) == 2 and "460K, GLA: 2 of 3 planned seeds are usable." in page
    (why,) = numbers["left_out"]
    assert "result.json is damaged" in why and why.split(" (")[0] in page


def test_a_winner_is_bold_only_where_it_is_significant(whole, told):
    _, paths, numbers, page = whole
    won = {w["size"]: w for w in numbers["winners"]}
    assert won["130K"]["winner"] == "longhorn" and max(won["130K"]["p"].values()) < 0.05
    marked = f"{cell_of(numbers, 'longhorn', '130K')['mean_loss']:.4f} \u00b1"
    assert f"<strong>{marked}" in page and f"**{marked}" in paths["table1.md"].read_text()
    assert page.count("<strong>") == sum(w["winner"] is not None for w in won.values())
    numbers, text, _ = told(seeds=(1337,))
    assert [w["winner"] for w in numbers["winners"]] == [None] * 3 and "**" not in text
    assert "Longhorn is lowest, but cannot be tested against Mamba: Longhorn has 1 and Mamba has 1 of the two" in text


def test_noise_is_no_winner(told):
    numbers, text, _ = told(noise=0.1)
    assert any(w["winner"] is None and "not significantly" in w["reason"] for w in numbers["winners"])
    assert text.count("**") == 2 * sum(w["winner"] is not None for w in numbers["winners"])


def test_the_law_is_recovered(whole):
    numbers = whole[2]
    for model in LAWS:
        fit, without = (f for f in numbers["fits"] if f["model"] == model)
        assert fit["alpha"] == pytest.approx(0.35, abs=0.1) and fit["beta"] == pytest.approx(0.35, abs=0.1), model
        low, high = fit["intervals"]["alpha"]
        assert low <= fit["alpha"] <= high and f"{fit['alpha']:.3g} ({low:.3g} .. {high:.3g})" in whole[3]
        assert without["alpha"] < fit["alpha"]  # the same loss over a wider range of N
    assert len(numbers["fits"]) == 14


def test_sample_efficiency_is_that_of_the_curves(whole):
    numbers, page = whole[2:]
    for pair in numbers["sample_efficiency"]:
        assert pair["a"] == "longhorn" and pair["along_the_runs"]["at_end"] > 1
    pair = next(p for p in numbers["sample_efficiency"] if (p["b"], p["size"]) == ("retnet", "130K"))
    (E, A, alpha, B, beta), worse = LAWS["longhorn"], LAWS["retnet"]
    excess = worse[0] - E + (worse[1] - A) / 130e3**alpha
    expected = lambda D: D / ((worse[3] / D**beta + excess) / B)**(-1 / beta)  # by the laws, b at D tokens
    assert pair["between_budgets"]["at_end"] == pytest.approx(expected(3200 * BATCH), rel=0.15)
    assert f"{pair['between_budgets']['at_end']:.2f}\u00d7" in page and "The paper reports 1.8\u00d7" in page


@pytest.mark.parametrize("keep", [True, False])
def test_families_are_compared_at_the_tokens_that_all_of_them_saw(told, keep):
    """Mamba's runs at twice the tokens, much better, beside its others or in their place."""
    def damage(folder, names):
        plan = json.loads((folder / "plan.json").read_text())
        for name, at in list(plan["cells"].items()):
            if at["model"] == "mamba":
                longer = name.replace(f"{STEPS}steps", f"{2 * STEPS}steps")
                plan["cells"][longer] = {**at, "steps": 2 * STEPS}
                make_run(folder / longer, "mamba", 460_000, 256, 2 * STEPS, at["learning_rate"], at["seed"],
                         1.0 + at["seed"] / 1e6)
                if not keep:
                    del plan["cells"][name]
        (folder / "plan.json").write_text(json.dumps(plan))
    numbers, text, _ = told(damage, sizes={"460K": 460_000}, ladder=())
    assert [c["tokens"] for c in numbers["table"]] == [STEPS * BATCH * (1 if keep else 2), STEPS * BATCH]
    assert ("not averaged" if keep else "saw different numbers of tokens") in text
    assert keep or numbers["winners"][0]["winner"] is None


# -------------------------------------------------------------------------------------------------- what cannot be told

def test_the_rate_stands_when_the_first_seeds_record_is_lost(told):
    numbers, text, _ = told(lambda folder, names: shutil.rmtree(folder / VICTIM.replace("1339", "1337")))
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
    assert "460K, Mamba: no usable run, see below" in text and "its loss is None: it diverged (6)" in text
    assert "460K: 1 families with a loss: nothing to compare" in text
    fits = [f for f in numbers["fits"] if f["model"] == "mamba"]
    assert all("2 values of N" in " ".join(f["warnings"]) and f["alpha"] is None for f in fits)


def test_the_same_run_twice_and_a_cell_without_a_place_do_not_count(told):
    def damage(folder, names):
        name = "longhorn_460K_256_1024steps_lr0.005_seed1338"
        shutil.copytree(folder / name, folder / "copy")
        change(folder / "copy/config.json", config__out_dir="copy")
        plan = json.loads((folder / "plan.json").read_text())
        plan["cells"] |= {"copy": plan["cells"][name], VICTIM.replace("460K", "130K"): {"argv": []}}
        (folder / "plan.json").write_text(json.dumps(plan))
    numbers, _, _ = told(damage)
    assert {names[0] for names in numbers["left_out"].values()} == {"copy", VICTIM.replace("460K", "130K")}
    assert len(cell_of(numbers, "longhorn", "460K")["losses"]) == 3 and numbers["runs_used"] == 35


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


@pytest.mark.parametrize("empty_plan", [False, True])
def test_nothing_usable_is_a_report_too(told, empty_plan):
    def damage(folder, names):
        for name in names:
            shutil.rmtree(folder / name)
        if empty_plan:
            (folder / "plan.json").write_text('{"cells": {}}')
    numbers, text, shown = told(damage)
    assert f"0 of {0 if empty_plan else 36} runs are used" in text and "There is no usable run." in text
    assert not shown and ("not run (36)" in text) != empty_plan


def test_the_papers_figures_stand_beside_the_papers_cells_only(told, tmp_path):
    paper = dict(sizes={"120M": 128_600_000, "350M": 369_800_000}, seeds=(1337,), rates=(6e-4,), ladder=())
    numbers, text, _ = told(**paper, contexts=(1024, 4096), paper=True, gpu="NVIDIA H100 80GB HBM3")
    assert cell_of(numbers, "longhorn", "350M", 4096)["paper_loss"] == 2.859
    assert re.search(r"\d\.\d{4} \(1\); paper 2\.859", text) and "128.6M; paper 128.6M" in text
    assert "GPU hours" in text and "CPU hours" not in text and "only one" in text
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    numbers, text, _ = told(**paper, contexts=(1024, 512), paper="yes")
    assert all(c["paper_loss"] is None for c in numbers["table"]) and "; paper" not in text
    assert "The paper's numbers, not ours" in text


# ------------------------------------------------------------------------------------------------------------ the files

def test_the_report_needs_no_torch():
    code = "import sys; from experiments.scaling import report; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=REPO, check=True)


class Page(HTMLParser):
    """Tags that stand open, every (tag, attributes), and the text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_is_whole_asks_for_nothing_and_escapes_names(whole):
    folder, paths, numbers, text = whole
    page = Page(text)
    assert page.open == [] and not [t for t, _ in page.tags if t in ("script", "iframe", "object", "base", "form")]
    assert EVIL in page.text and "<script" not in text and "url(" not in text and "@import" not in text
    links = [a["href"] for t, a in page.tags if t == "a"]
    assert len(links) == numbers["planned"] and all((folder / unquote(link)).is_dir() for link in links)
    images = [a for t, a in page.tags if t == "img"]
    assert len(images) == 4 + 3 and any(EVIL in a["alt"] for a in images)
    assert all(a["src"].startswith("data:image/svg+xml;base64,") and len(a["src"]) > 5000 for a in images)
    assert all(not a.startswith("on") for _, attributes in page.tags for a in attributes)
    json.loads(paths["report.json"].read_text(), parse_constant=pytest.fail)  # NaN is no JSON


def test_markdown_tables_are_whole(whole):
    lines = whole[1]["table1.md"].read_text().splitlines()
    for i, line in enumerate(lines):
        if line.startswith("|---"):
            for row in [lines[i - 1], *itertools.takewhile(lambda row: row.startswith("|"), lines[i:])]:
                assert len(re.findall(r"(?<!\\)\|", row)) == line.count("|"), row
    assert "<script" not in "\n".join(lines) and "](figure5.png)" in "\n".join(lines)
