"""experiments/extrapolation.py: cutting text, reading it in chunks, positions, memory, norms, records.

Most of it runs on tiny models and on a planted one, whose logits depend on a counter in its state: its loss at each
position is known beforehand, so that a sequence that began with another's state would show.
"""

import dataclasses
import functools
import itertools
import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import helpers
import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import write_folder
from scipy import stats

import configurator
import families  # noqa: F401
from data import prepared
from data.pystdlib import prepare as pystdlib
from experiments import extrapolation as ex
from experiments import figures, records
from experiments.extrapolation_report import mean_and_error
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
    """No figure is drawn but in one test, and memory is not searched before each length; both take long."""
    monkeypatch.setattr("bench.measure.gc.collect", lambda: None)
    if request.function is not test_a_preset_is_trained_read_and_reported:
        monkeypatch.setattr(figures, "draw", lambda panels, path, style: path.touch())


def some_rows(K=3, M=64, seed=0):
    return torch.randint(64, (K, M + 1), generator=torch.Generator().manual_seed(seed))


def token_losses(lm, x, y):
    """(B, T) of whole forward passes, without a state."""
    with torch.no_grad():
        return F.cross_entropy(lm(x)[0].flatten(0, 1), y.flatten(), reduction="none").view(x.shape).double().numpy()


class Planted(nn.Module):
    """The token 0 after p others costs height(p), where the text is all zeros. Its state counts the tokens read."""

    def __init__(self, height):
        super().__init__()
        self.embed, self.height = nn.Embedding(2, 1), height

    def branches(self):
        return [("planted", SimpleNamespace(mixer=None))]

    def initial_state(self, B):
        return [[torch.zeros(B)]]

    def forward(self, x, state):
        p = state[0][0][:, None] + torch.arange(x.shape[1])
        loss = self.height(p).double()
        logits = torch.stack([torch.zeros_like(loss), torch.log(torch.expm1(loss))], -1)  # the first costs `loss`
        return logits, None, [[state[0][0] + x.shape[1]]]


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
def test_chunks_give_the_loss_of_whole_sequences(family):
    lm, rows = tiny(family), some_rows()
    for T, chunk, batch_size in ((64, 24, 2), (8, 24, 1)):
        x, y = rows[:, :-1].reshape(-1, T), rows[:, 1:].reshape(-1, T)
        losses, state_bytes = ex.read_length(lm, rows, T, chunk, batch_size)
        assert np.allclose(losses.reshape(-1, T), token_losses(lm, x, y), rtol=1e-4)
        assert state_bytes == 4 * counting.state_size(lm, T)


def measure(lm, rows, lengths, trained=16):
    lengths_read, states = ex.measure(lm, rows, lengths, trained, 16, 1)
    return json.loads(json.dumps(lengths_read)), states


def test_a_planted_loss_that_grows_with_position_is_seen(capsys):
    rows = torch.zeros(4, 129, dtype=torch.long)
    lengths_read, _ = measure(Planted(lambda p: 1 + 0.01 * p), rows, [16, 64, 128])
    for row, T in zip(lengths_read, (16, 64, 128), strict=True):
        assert row["loss"] == pytest.approx(1 + 0.01 * (T - 1) / 2, abs=1e-5) and row["tokens"] == 4 * 128
        assert row["perplexity"] == pytest.approx(math.exp(row["loss"])) and row["sequences"] == 4 * 128 // T
    last = lengths_read[-1]
    assert "difference" not in lengths_read[0] and last["against"] == 16
    assert last["difference"] == pytest.approx(0.56, abs=1e-5)
    assert last["difference_standard_error"] < 1e-6  # all sequences change alike
    by_place = last["difference_by_place"]
    assert by_place["edges"][-2:] == [64, 128] and by_place["difference"][:4] == pytest.approx([0] * 4, abs=1e-6)
    assert by_place["difference"][-1] == pytest.approx(0.01 * (95.5 - 7.5), abs=1e-5)
    assert f"128  loss {last['loss']:.4f} +- 0.0000, perplexity" in capsys.readouterr().out.splitlines()[2]


def test_differences_are_paired():
    """Sequences that differ widely, and a change that is the same in all: the difference has no error, the loss has."""
    easy = np.array([[1.0], [3.0], [5.0]]) + np.zeros(64)
    row = ex.summary(easy + 0.25, 16, (4, easy))
    assert row["loss"] == 3.25 and row["loss_standard_error"] == pytest.approx(2 / math.sqrt(3))
    assert row["difference"] == 0.25 and row["difference_standard_error"] == 0 and row["against"] == 4
    assert math.isnan(mean_and_error([1.0])[1]) and math.isnan(mean_and_error([1.0, None])[0])


def test_an_allocation_that_fails_ends_the_reading_there(capsys):
    def planted(error):
        def height(p):
            if p.max() >= 20:
                raise error
            return 0.01 * p
        return measure(Planted(height), torch.zeros(2, 65, dtype=torch.long), [16, 32, 64])

    (only,), states = planted(torch.OutOfMemoryError("CUDA out of memory. Tried"))
    assert only["length"] == 16 and states == {} and "32 and longer left out: memory ran" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="shapes"):  # what is no lack of memory is an error
        planted(RuntimeError("shapes do not fit"))


# ---------------------------------------------------------------------------------------------------------------- norms

@pytest.mark.parametrize("family, pick", [
    ("longhorn", lambda s: s[1]), ("gla", lambda s: s), ("rwkv", lambda s: s[1]), ("rwkv4", lambda s: s[1] / s[2])])
def test_norms_are_those_of_the_state(family, pick):
    lm, rows, at = tiny(family), some_rows(), [4, 16, 40, 64]
    norms = ex.state_norms(lm, rows, at, 24)
    # longhorn has two mixers a layer, the others one and an MLP
    assert [int(name.split()[0]) for name in norms] == ([0, 1, 2, 3] if family == "longhorn" else [0, 2])
    for j, p in enumerate(at):
        with torch.no_grad():
            states = sum(lm(rows[:, :p], state=lm.initial_state(3))[2], [])
        for name, entry in norms.items():
            s = pick(states[int(name.split()[0])]).double()
            assert entry["positions"][j] == p
            rms = np.mean([math.sqrt((one**2).mean()) for one in s.numpy()])
            assert entry["rms"][j] == pytest.approx(rms, rel=1e-3)


def test_limited_attention_sees_what_a_fresh_window_sees():
    """One layer: token t of a long text, limited to 16, is predicted as the last of a text of those 16 tokens alone."""
    torch.manual_seed(0)
    lm, rows = LM(ModelConfig(model="llama", **{**SHAPE, "n_layer": 1})).eval(), some_rows(2, 64)
    losses, _ = ex.read_length(ex.limited(lm, 16), rows, 64, 20, 2)
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
        for name in ("longhorn", "llama"):
            save_run(Path(folder) / name, name, corpus)
        return {c.name: "it diverged" for c in cells if c.name not in ("longhorn", "llama")}

    monkeypatch.setattr(runner, "run_cells", run_cells)
    monkeypatch.setattr(pystdlib, "prepare", lambda out, documents: asked.update(prepared=documents))
    monkeypatch.setattr(ex, "ROOT", tmp_path)
    monkeypatch.setitem(ex.PRESETS["laptop"], "lengths", [16, 256])
    assert main(["run", "--preset=laptop", "--chunk=32", f"--out={out}"]) == 1  # some were not trained
    assert asked == {"prepared": "package", "cells": ex.plan("laptop")}
    assert "FAILED mamba: it diverged" in capsys.readouterr().out
    longhorn, llama, limited = json.loads(out.read_text())["extrapolation"]
    assert [r["run"] for r in (longhorn, llama, limited)] == ["longhorn", "llama", "llama, last 16 tokens"]
    text = longhorn["text"]
    assert text == llama["text"] and text["starts"] == [0, 340] and text["documents"] == ["a", "c"]
    assert text["trained_on_this_data"]
    data = prepared.Tokens(corpus)
    assert llama["checkpoint"]["code"] == "abc" and llama["checkpoint"]["data"] == data.sha256
    rows = torch.from_numpy(np.stack([data.val[s:s + 257] for s in (0, 340)]).astype(np.int64))
    want = token_losses(tiny("llama"), rows[:, :-1], rows[:, 1:]).mean(1)
    assert llama["lengths"][-1]["losses_of_longest_sequences"] == pytest.approx(want, rel=1e-5)
    assert llama["state_norms"] == {} and longhorn["state_norms"]["0 Longhorn"]["positions"] == [16, 256]
    text = re.sub(" +", " ", out.with_suffix(".md").read_text())
    assert "2 sequences of 256 tokens of corpus, within documents" in text and "NOT all" not in text
    assert out.with_suffix(".png").stat().st_size > 10_000
    runs = records.read(out)
    assert runs.loss_256.tolist() == [r["lengths"][-1]["loss"] for r in (longhorn, llama, limited)]
    folder = out.with_suffix("")  # of the training runs: the evaluations are in the file beside it
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps({"cells": {r: {"run": r, "argv": []} for r in runs.run}}))
    assert records.read(folder).loss_256.tolist() == runs.loss_256.tolist()


def test_a_run_read_again_takes_the_place_of_its_records(corpus, tmp_path):
    """Trained again in the same folder, as another family; lengths are 1 to 16 times the training length."""
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
    assert runs.lengths[1][1]["against"] == 4 and runs.state_norms[1]["0 GLA"]["positions"] == [8]
    write_folder(corpus, 500, 700, 64, documents={"val": [{"name": "a", "start": 0, "tokens": 256}]})
    assert [x["length"] for x in read("short", "gla").lengths[2]] == [16, 32, 64, 128]  # 256 need 257 tokens


def page_of(path, kept):
    path.write_text(json.dumps({"extrapolation": kept}))
    main(["report", str(path)])
    return re.sub(" +", " ", path.with_suffix(".md").read_text())


def kept_in_results(name):
    return json.loads((ROOT / f"results/extrapolation_{name}.json").read_text())["extrapolation"]


def test_each_kind_of_number_of_a_page_is_that_of_its_record(tmp_path):
    """By hand: means and standard errors over three seeds, or over sequences where there is one; MiB; Welch."""
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
    loud = max(branch["rms"][-1] for branch in run["state_norms"].values())
    costs = next(line for line in page.splitlines() if line.startswith("| longhorn | 16384 |"))
    assert (f" {last['state_bytes_per_sequence'] / 1048576:.3f} | {last['peak_bytes'] / 1048576:.0f} | "
            f"{last['tokens_per_second']:,.0f} | ") in costs and costs.endswith(f" {loud:.3g} |")


def test_a_page_says_what_is_missing_or_not_comparable(tmp_path):
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
    longhorn["state_norms"]["0 Longhorn"]["rms"][-1] = None
    page = page_of(tmp_path / "edited.json", [longhorn])
    assert "| longhorn | 256 | nan" in page and re.search(r"\| longhorn \| 16384 .* nan \|\n", page)


@pytest.mark.parametrize("argv, word", [
    ("--lengths=16,1024", "1024 tokens, and one more"), ("--lengths=16,24,64", "24 does not divide"),
    ("--lengths=4,x", "expected"), ("--lengths=0,16", "lengths 0 must be at least 1"), ("--chunk=0", "chunk 0 must"),
    ("--eval_tokens=255 --lengths=256", "--eval_tokens=255"), ("--dataset=no", "no dataset folder"),
    ("--out=folder", ".json"), ("--checkpoint run more/run", "2 folders of 1 names"),
    ("--checkpoint no", "no checkpoint"), ("run --preset=phone", "phone"),
    ("run --preset=laptop nothing", "config/nothing_laptop.py does not exist"), ("report .", "holds no sweep")])
def test_a_mistake_is_one_line(corpus, tmp_path, monkeypatch, capsys, argv, word):
    monkeypatch.chdir(tmp_path)
    for name in ("run", "more/run"):
        save_run(tmp_path / name, "longhorn", corpus)
    argv = argv.split()
    if argv[0].startswith("--"):
        argv = ["--out=records.json", *([] if argv[0] == "--checkpoint" else ["--checkpoint=run"]), *argv]
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2 and word in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "records.json").exists()


def test_other_text_than_that_of_training_has_to_be_named(corpus, tmp_path, monkeypatch, capsys):
    """In a copy without git too, where a record's commit is null."""
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
    return {c.name: configurator.load(TrainConfig, [str(ROOT / c.argv[0]), *c.argv[1:]]) for c in cells}


def test_other_steps_families_and_patterns_take_part():
    configs = configs_of(ex.plan("steps"))
    assert {(c.model, c.step, c.normalize_keys, c.seed) for c in configs.values()} == set(itertools.product(
        ["deltanet"], ("explicit", "implicit", "exact"), (True, False), (1, 2, 3))) and len(configs) == 18
    cells = ex.plan("laptop", ["longhorn,swa", "longhorn@n_layer=4"], [7])
    hybrid, deep = configs_of(cells).values()
    assert [(c.pattern, c.n_layer, c.seed) for c in (hybrid, deep)] == [("longhorn,swa", 3, 7), ("", 4, 7)]
    assert cells[0].name == "longhorn_swa_seed_7" and cells[0].at == {"run": "longhorn,swa, seed 7"}


@pytest.mark.parametrize("preset", ["laptop", "gpu"])
def test_the_plan_of_a_preset(preset):
    configs, sizes = configs_of(ex.plan(preset)), {}
    for name, config in configs.items():
        assert (config.model, config.dataset, config.eval_block_size) == (name, "pystdlib_packages", config.block_size)
        with torch.device("meta"):
            lm = LM(dataclasses.replace(config, vocab_size=256))
        sizes[name] = counting.parameter_count(lm)["total"]
    assert list(configs) == ["longhorn", "mamba", "llama", "gla", "retnet", "rwkv", "deltanet"]
    for key in ("block_size", "batch_tokens", "max_iters", "learning_rate", "min_lr", "seed", "n_layer", "n_embd"):
        assert len({getattr(c, key) for c in configs.values()}) == 1, key
    lengths = ex.PRESETS[preset]["lengths"]
    assert lengths[0] == configs["longhorn"].block_size and lengths[-1] >= 16 * lengths[0]
    assert all(lengths[-1] % T == 0 for T in lengths)
    assert all(abs(n / sizes["longhorn"] - 1) < 0.07 for n in sizes.values()), sizes
