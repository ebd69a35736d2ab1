"""experiments/extrapolation.py: cutting text, reading it in chunks, positions, memory, records."""

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import re
import shutil
from pathlib import Path

import helpers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import write_folder
from scipy import stats

import families  # noqa: F401
from data import prepared
from data.pystdlib import prepare as pystdlib
from experiments import extrapolation as ex
from experiments import figures, records, sweep
from experiments.sweeps import runner
from inspection import counting
from model import LM, ModelConfig
from train import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
SHAPE = dict(n_layer=2, n_embd=32, n_head=2, d_state=4, mlp_multiple=16, vocab_size=64, block_size=16)


main = ex.main
tiny = functools.partial(helpers.tiny, **SHAPE)


@pytest.fixture(autouse=True)
def quick(monkeypatch, request):
    """Draws no figures, which takes long, except in one test."""
    if request.function is not test_a_preset_is_trained_read_and_reported:
        monkeypatch.setattr(figures, "draw", lambda panels, path, style: path.touch())


def some_rows(K=3, M=64, seed=0):
    return torch.randint(64, (K, M + 1), generator=torch.Generator().manual_seed(seed))


def token_losses(lm, x, y):
    """The losses (B, T) of whole forward passes, without a state."""
    with torch.no_grad():
        return F.cross_entropy(lm(x)[0].flatten(0, 1), y.flatten(), reduction="none").view(x.shape).double().numpy()


# ------------------------------------------------------------------------------------------------------------- the text

def test_longest_sequences_stay_within_documents():
    documents = [{"name": n, "start": s, "tokens": t}
                 for n, s, t in (("a", 0, 100), ("b", 100, 31), ("c", 131, 64), ("d", 195, 32))]
    starts, names = ex.longest_sequences(227, documents, 31)  # 31 tokens predict 30 and are too few; 32 are enough
    assert starts == [0, 31, 62, 131, 162, 195] and names == ["a", "a", "a", "c", "c", "d"]
    longest = ([0, 31, 131, 195], ["a", "a", "c", "d"])
    assert ex.longest_sequences(227, documents, 31, 4 * 31 + 30) == longest
    assert ex.longest_sequences(227, documents, 110) == ([0, 110], None)  # no document is so long: they lie end to end
    assert ex.longest_sequences(1001, None, 100) == ([100 * i for i in range(10)], None)
    assert ex.longest_sequences(1001, None, 100, 300) == ([0, 300, 600], None)


# -------------------------------------------------------------------------------------------------------------- reading

@pytest.mark.parametrize("family", ("longhorn", "llama"))
def test_losses_at_each_length_are_those_of_whole_passes(family, capsys):
    """Texts are read in chunks of 24 tokens, one sequence at a time."""
    lm, rows = tiny(family), some_rows(3, 128)
    measured = ex.measure(lm, rows, [4, 8, 128], 8, 24, 1)
    losses = {}
    for row in measured:
        T = row["length"]
        losses[T] = token_losses(lm, rows[:, :-1].reshape(-1, T), rows[:, 1:].reshape(-1, T)).reshape(3, 128)
        means = losses[T].mean(1)
        wanted = {"loss": means.mean(), "perplexity": math.exp(means.mean()), "tokens": 384, "sequences": 384 // T}
        assert {key: row[key] for key in wanted} == pytest.approx(wanted, rel=1e-5)
        assert row["losses_of_longest_sequences"] == pytest.approx(means, rel=1e-5)
        assert row["loss_standard_error"] == pytest.approx(stats.sem(means), rel=1e-3)
    change, last = losses[128] - losses[8], measured[-1]
    assert "difference" not in measured[0] | measured[1] and last["against"] == 8
    assert last["difference"] == pytest.approx(change.mean(), abs=1e-6)
    assert last["difference_standard_error"] == pytest.approx(stats.sem(change.mean(1)), rel=1e-3)
    by_place = last["difference_by_place"]
    assert by_place["edges"] == [0, 1, 2, 4, 8, 16, 32, 64, 128]
    places = [change[:, low:high].mean() for low, high in itertools.pairwise(by_place["edges"])]
    assert by_place["difference"] == pytest.approx(places, abs=1e-5)
    assert f"128  loss {last['loss']:.4f} +- " in capsys.readouterr().out.splitlines()[2]


@pytest.mark.parametrize("words, is_memory", [("CUDA out of memory. Tried", True), ("shapes do not fit", False)])
def test_longer_texts_are_left_out_once_memory_runs_out(words, is_memory, monkeypatch, capsys):
    read = ex.read

    def fails(lm, x, y, chunk):
        if x.shape[1] > 16:
            raise RuntimeError(words)
        return read(lm, x, y, chunk)

    monkeypatch.setattr(ex, "read", fails)
    with contextlib.nullcontext() if is_memory else pytest.raises(RuntimeError, match=words):
        (only,) = ex.measure(tiny(), some_rows(), [16, 32, 64], 16, 16, 1)
        assert only["length"] == 16 and "32 and longer left out: memory ran" in capsys.readouterr().out


def test_limited_attention_sees_what_a_fresh_window_sees():
    """With one layer and attention limited to 16 tokens, each token of a long text is predicted as from the 16 tokens
    before it alone."""
    torch.manual_seed(0)
    lm, rows = LM(ModelConfig(model="llama", **{**SHAPE, "n_layer": 1})).eval(), some_rows(2, 64)
    losses = ex.read_length(ex.limited(lm, 16), rows, 64, 20, 2)
    for t in (15, 16, 30, 63):
        alone = token_losses(lm, rows[:, t - 15:t + 1], rows[:, t - 14:t + 2])[:, -1]
        assert losses[:, t] == pytest.approx(alone, rel=1e-4)


# ----------------------------------------------------------------------------------------- checkpoints, records, report

@pytest.fixture
def corpus(tmp_path):
    documents = [{"name": "a", "start": 0, "tokens": 300}, {"name": "b", "start": 300, "tokens": 40},
                 {"name": "c", "start": 340, "tokens": 360}]
    return write_folder(tmp_path / "corpus", 500, 700, 64, documents={"val": documents})


def save_run(folder, family, corpus):
    config = dataclasses.asdict(TrainConfig(model=family, dataset=str(corpus), dtype="float32", **SHAPE))
    folder.parent.mkdir(parents=True, exist_ok=True)
    helpers.make_run(folder, tiny(family), config=config, data=prepared.Tokens(corpus).sha256, code_versions=["abc"])
    (folder / "config.json").write_text(json.dumps({"environment": {"code": "abc"}}))
    return folder


def test_a_preset_is_trained_read_and_reported(corpus, tmp_path, monkeypatch, capsys):
    asked, out = {}, tmp_path / "new" / "out.json"

    def run_cells(cells, folder, engine, program):
        asked.update(cells=cells)
        failed = {c.name: "it diverged" for c in cells}
        for name in ("longhorn", "llama"):
            save_run(Path(folder) / name, name, corpus)
            del failed[name]
        return failed

    monkeypatch.setattr(runner, "run_cells", run_cells)
    monkeypatch.setattr(pystdlib, "prepare", lambda out, documents: asked.update(prepared=documents))
    monkeypatch.setattr(runner, "REPO", tmp_path)
    monkeypatch.setitem(ex.PRESETS["laptop"], "lengths", [16, 256])
    assert main(["run", "--preset=laptop", "--chunk=32", f"--out={out}"]) == 1  # some were not trained
    assert asked == {"prepared": "package", "cells": ex.plan("laptop")}
    assert "FAILED mamba: it diverged" in capsys.readouterr().out
    runs = records.read(out)
    assert runs.run.tolist() == ["longhorn", "llama", "llama, last 16 tokens"]
    text, data = runs.text[0], prepared.Tokens(corpus)
    assert text == runs.text[1] and text["starts"] == [0, 340] and text["documents"] == ["a", "c"]
    assert text["trained_on_this_data"]
    assert runs.checkpoint[1]["code"] == "abc" and runs.checkpoint[1]["data"] == data.sha256
    rows = torch.from_numpy(np.stack([data.val[0:257], data.val[340:597]]).astype(np.int64))
    want = token_losses(tiny("llama"), rows[:, :-1], rows[:, 1:]).mean(1)
    assert runs.lengths[1][-1]["losses_of_longest_sequences"] == pytest.approx(want, rel=1e-5)
    assert runs.loss_256[1] == pytest.approx(want.mean(), rel=1e-5)
    page = re.sub(" +", " ", out.with_suffix(".md").read_text())
    assert "2 sequences of 256 tokens of corpus, within documents" in page and "NOT all" not in page
    assert out.with_suffix(".png").stat().st_size > 10_000
    folder = out.with_suffix("")  # of the training runs; their evaluations are in the file beside it
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps({"cells": {run: {"run": run, "argv": []} for run in runs.run}}))
    assert records.read(folder).loss_256.tolist() == runs.loss_256.tolist()


def test_a_run_read_again_replaces_its_records(corpus, tmp_path):
    """The run is trained again in its folder as another family. Lengths are 1 to 16 times the training length."""
    out = tmp_path / "again.json"

    def read(name, family, *options):
        main(["--checkpoint", str(save_run(tmp_path / name, family, corpus)), f"--out={out}", *options])
        return records.read(out)

    runs = read("llama", "llama")
    assert runs.run.tolist() == ["llama", "llama, last 16 tokens"]
    assert [x["length"] for x in runs.lengths[0]] == [16, 32, 64, 128, 256]
    shutil.rmtree(tmp_path / "llama")
    assert read("llama", "longhorn").run.tolist() == ["llama"]
    runs = read("other", "gla", "--lengths=8,4")  # shorter than the training length
    assert runs.run.tolist() == ["llama", "other"] and [x["length"] for x in runs.lengths[1]] == [4, 8]
    assert runs.lengths[1][1]["against"] == 4
    write_folder(corpus, 500, 700, 64, documents={"val": [{"name": "a", "start": 0, "tokens": 256}]})
    assert [x["length"] for x in read("short", "gla").lengths[2]] == [16, 32, 64, 128]  # 256 need 257 tokens


def page_of(path, kept):
    path.write_text(json.dumps({"extrapolation": kept}))
    main(["report", str(path)])
    return re.sub(" +", " ", path.with_suffix(".md").read_text())


def kept_in_results(name):
    return helpers.record(ROOT / "results", f"extrapolation_{name}")["extrapolation"]


def test_each_kind_of_number_of_a_page_is_that_of_its_record(tmp_path):
    """Computed by hand: means and standard errors over three seeds, or over sequences of a single seed, and Welch's
    test."""
    page = page_of(tmp_path / "steps.json", kept_in_results("steps"))
    at, cells = {}, []
    for run in kept_in_results("steps"):
        at.setdefault(run["run"].partition(", seed")[0], []).append({x["length"]: x for x in run["lengths"]})
    for T in (256, 16384):
        losses = [seed[T]["loss"] for seed in at["deltanet"]]
        cells.append(f"{math.exp(np.mean(losses)):.3f}, loss {np.mean(losses):.3f} \u00b1 {stats.sem(losses):.3f}")
    changes = [seed[16384]["difference"] for seed in at["deltanet"]]
    assert f"| deltanet | 256 | {cells[0]} |" in page
    assert f"{cells[1]} ({np.mean(changes):+.3f} \u00b1 {stats.sem(changes):.3f}) |\n" in page
    a, b = ([seed[256]["loss"] for seed in at[name]] for name in ("deltanet@step=implicit", "deltanet"))
    interval = stats.ttest_ind(a, b, equal_var=False).confidence_interval()
    difference = f"{np.mean(a) - np.mean(b):+.3f} ({interval.low:+.3f} .. {interval.high:+.3f})"
    assert f"| deltanet@step=implicit minus deltanet | {difference} |" in page
    run = kept_in_results("laptop")[0]
    page, last = page_of(tmp_path / "laptop.json", kept_in_results("laptop")), run["lengths"][-1]
    change = f"({last['difference']:+.3f} \u00b1 {last['difference_standard_error']:.3f})"
    assert f"{math.exp(last['loss']):.3f} {change} |\n| mamba " in page


def test_a_page_says_what_is_missing_or_not_comparable(tmp_path):
    of_seeds = kept_in_results("steps")
    of_seeds[0]["checkpoint"]["tokens"] = 1
    page, without = page_of(tmp_path / "a.json", of_seeds), page_of(tmp_path / "b.json", of_seeds[1:])
    assert "not comparable: tokens 1 where most have 2048000 (1): deltanet, seed 1" in page
    assert {*without.splitlines()} & {*page.splitlines()} > {*re.findall(r"\| deltanet \|.*", without)}
    longhorn, _, llama, *_ = kept_in_results("laptop")
    llama["lengths"].pop()  # memory ran out
    llama["lengths"][1] |= {"loss": None, "perplexity": None, "difference": None}
    llama["text"]["sha256"] = "other"
    llama |= {"device": "NVIDIA H100", "dtype": "float16", "date": "2026-12-01T00:00:00"}
    page = page_of(tmp_path / "edited.json", [longhorn, llama])
    assert "nan (+nan" in page and "NOT all curves" in page
    assert re.search(r"\| llama \| 256 \|.* \u2013 \|\n", page)
    assert all(new in page for new in ("AMD EPYC, NVIDIA H100;", "bfloat16 and float16;", " to 2026-12-01;"))
    for x in longhorn["lengths"]:
        x |= {"loss": None, "loss_standard_error": None}  # it diverged
    longhorn["text"]["documents"] = None
    page = page_of(tmp_path / "edited.json", [longhorn])
    assert "| longhorn | 256 | nan" in page and "end to end, across documents" in page


REFUSED = """
--checkpoint=run --lengths=16,1024             1024 tokens, and one more
--checkpoint=run --lengths=16,24,64            24 does not divide
--checkpoint=run --eval_tokens=255 --lengths=256   --eval_tokens=255
--checkpoint=run --dataset=no                  no dataset folder
--checkpoint run more/run                      2 folders with 1 names
--checkpoint no                                no checkpoint
report .                                       holds no sweep
run --preset=laptop nothing                    missing: config/nothing_laptop.py; write
"""


@pytest.mark.parametrize("line, words", helpers.table(REFUSED))
def test_a_mistake_is_one_line(corpus, tmp_path, monkeypatch, line, words):
    monkeypatch.chdir(tmp_path)
    for name in ("run", "more/run"):
        save_run(tmp_path / name, "longhorn", corpus)
    helpers.refuse([*line.split(), "--out=records.json"], words, program="experiments/extrapolation.py")
    assert not (tmp_path / "records.json").exists()


def test_text_other_than_that_of_training_has_to_be_named(corpus, tmp_path, monkeypatch, capsys):
    """This also holds in a copy without git, where a record's commit is null."""
    monkeypatch.setattr("runtime.records.code_version", lambda: {"commit": None, "uncommitted_changes": None})
    run, out = str(save_run(tmp_path / "run", "longhorn", corpus)), tmp_path / "records.json"
    write_folder(corpus, [0] * 700, [0] * 700, 64)
    with pytest.raises(SystemExit):
        main(["--checkpoint", run, f"--out={out}"])
    assert re.search("is not what .* was trained on .* name other text with --dataset", capsys.readouterr().err)
    main(["--checkpoint", run, f"--dataset={corpus}", "--lengths=16,64", "--eval_tokens=64", f"--out={out}"])
    text = records.read(out).text[0]
    assert text["trained_on_this_data"] is False and text["documents"] is None and text["starts"] == [0]


# -------------------------------------------------------------------------------------------------------------- presets

def configs_of(cells):
    return {c.name: sweep.load(c.argv) for c in cells}


def test_other_steps_families_and_patterns_can_be_planned():
    configs = configs_of(ex.plan("steps"))
    assert {(c.model, c.step, c.normalize_keys, c.seed) for c in configs.values()} == set(itertools.product(
        ["deltanet"], ("explicit", "implicit", "exact"), (True, False), (1, 2, 3))) and len(configs) == 18
    cells = ex.plan("laptop", ["longhorn,swa", "longhorn@n_layer=4"], [7])
    hybrid, deep = configs_of(cells).values()
    assert [(c.pattern, c.n_layer, c.seed) for c in (hybrid, deep)] == [("longhorn,swa", 3, 7), ("", 4, 7)]
    assert figures.name_of("longhorn*3,swa@n_layer=4") == "Longhorn*3 + Sliding window@n_layer=4"
    assert cells[0].name == "longhorn_swa_seed_7" and cells[0].at == {"run": "longhorn,swa, seed 7"}


@pytest.mark.parametrize("preset", ["laptop", "gpu"])
def test_the_runs_of_a_preset_differ_only_in_family(preset):
    configs, sizes = configs_of(ex.plan(preset)), []
    for name, config in configs.items():
        assert (config.model, config.dataset, config.eval_block_size) == (name, "pystdlib_packages", config.block_size)
        with torch.device("meta"):
            sizes.append(counting.parameter_count(LM(dataclasses.replace(config, vocab_size=256)))["total"])
    assert list(configs) == ["longhorn", "mamba", "llama", "gla", "retnet", "rwkv", "deltanet"]
    for key in ("block_size", "batch_tokens", "max_iters", "learning_rate", "min_lr", "seed", "n_layer", "n_embd"):
        assert len({getattr(c, key) for c in configs.values()}) == 1, key
    lengths = ex.PRESETS[preset]["lengths"]
    assert lengths[0] == configs["longhorn"].block_size and lengths[-1] >= 16 * lengths[0]
    assert all(lengths[-1] % T == 0 for T in lengths)
    assert sizes == pytest.approx([sizes[0]] * 7, rel=0.07)
