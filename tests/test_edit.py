"""Tests of edit.py. Its decisions agree with other ways to compute them. Its course runs on a stand-in for train.py
that takes no time, and once on train.py itself."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ROOT, TINY, arguments, copied_tree, record, succeed, table, write_files, write_folder
from scipy import stats

from common.files import write_text
from data import prepared
from experiments import compare, edit, edit_probe, edit_simulation, figures
from experiments.sweeps import engines
from runtime import records as runtime_records

DRAW = figures.draw

# Trains as model.py says: the loss follows a law of the budget, shifted by SHIFT, with noise that both versions share
# and noise of each version. It counts its runs, and dies once, edits the tree or fails where model.py says so.
STAND_IN = textwrap.dedent("""
    import json, os, random, sys  # no more: each takes a tenth of such a run's time
    import model
    given = dict(a[2:].split("=", 1) for a in sys.argv[1:] if a.startswith("--"))
    out, seed, steps = given["out_dir"], int(given["seed"]), int(given["max_iters"])
    assert "branch" not in given or os.path.exists(given["branch"].split("@")[0] + "/result.json")
    def write(name, text, how="w"):
        with open(os.path.join(out, name), how) as f:
            f.write(text)
    os.makedirs(out, exist_ok=True)
    write("runs", "ran ", "a")
    if seed == 3 and model.DIES and not os.path.exists(out + "/died"):
        write("died", ""); os.kill(os.getpid(), 9)
    if model.EDITS:
        write(model.EDITS, "SHIFT = 9.0")
    if model.FAILS and seed == 2:
        write("config.json", '{"config": {"max_bad_steps": 1}}')
        write("log.jsonl", '{"event": "%s", "step": 4}' % ("skipped" * ("finite" in model.FAILS)))
        sys.exit("train.py: error: " + model.FAILS)
    loss = 2 + 0.4 * (steps / 16) ** -0.49 + random.Random(seed * model.VARIES).gauss(0, 0.01) + model.SHIFT
    loss += random.Random(f"{seed} {model.SEED} {steps}").gauss(0, model.NOISE)
    config = {"model": "longhorn", "vocab_size": 256, "block_size": 16, "batch_tokens": model.BATCH, "max_iters": steps,
              "seed": seed, "learning_rate": float(given["learning_rate"]), "out_dir": out,
              "dtype": model.DTYPE}
    tokens, seconds = steps * model.BATCH, 1e4 * model.SLOW / (100 + seed)
    result = {"model": "longhorn", "val_loss": loss, "val_tokens": 100, "val_document_tokens": [60, 40],
              "val_document_losses": [loss, loss], "seconds": seconds, "flops": tokens, "parameters": 10,
              "processes": 1, "tokens": tokens, "tokens_per_second": round(tokens / seconds), "seed": seed,
              "code": "v2" + model.SEED, "steps": steps, "device_name": "cpu", "dtype": model.DTYPE}
    events = [{"event": "train", "step": s, "tokens": 64 * s, "train_loss": loss} for s in range(1, steps + 1)]
    events.append({"event": "eval", "step": steps, "tokens": 64 * steps, "val_loss": loss})
    write("log.jsonl", "".join(json.dumps(e) + "\\n" for e in events))
    write("config.json", json.dumps({
        "config": config, "time": "2026-01-01T00:00:00+00:00",
        "environment": {"code": "v2" + model.SEED, "cpu": "x"}, "code_versions": ["v2" + model.SEED],
        "derived": {"parameters": {"embedding": 1, "total": 10}, "flops_per_token": 1, "processes": 1},
        "data": {"identity": {"train": model.DATA, "val": "v"}}}))
    write("result.json", json.dumps(result))
""")
PROBE = """
import glob, hashlib, json, os, sys
sys.path[0] = os.getcwd()
import model
files = {name: hashlib.sha256(open(name, "rb").read()).hexdigest()
         for name in ["train.py", "model.py", sys.argv[1], *glob.glob("*/*.py")]}
print(json.dumps({"files": files, "learning_rate": 0.01, "dataset": "words", "batch_tokens": 64,
                  "eval_block_size": model.WINDOW, "parameters": 10 + model.MORE,
                  "state": 4, "FLOPs per token": 9, "draws": {"w": [5, "same"], "v": [5, str(model.MORE)]}}))
"""
JUDGE = """
import json, os, sys
sys.path[0] = os.getcwd()
import model
print(json.dumps({"reported": 2.0, "plain": 2.0 + model.ADDS, "beside": 3.0, "alone": 3.0 + model.PEEKS}))
"""
MODEL = {"SHIFT": 0.0, "NOISE": 0.001, "SEED": "a", "DIES": False, "EDITS": "", "FAILS": "", "DATA": "d", "MORE": 0,
         "WINDOW": 16, "DTYPE": "float32", "SLOW": 1.0, "ADDS": 0.0, "PEEKS": 0.0, "BATCH": 64, "VARIES": 1}


@pytest.fixture
def repo(tmp_path, monkeypatch):
    """A git repository with the stand-in, and MODEL at HEAD, in place of edit.py's REPO."""
    repo = tmp_path / "repo"
    write_files(repo, {"train.py": STAND_IN, "model.py": written(), "config/longhorn_laptop.py": "",
                       ".gitignore": "out/\n", "evaluation/validation.py": "", "data/loader.py": ""})
    write_folder(repo / "data" / "words")
    git(repo, "init", "-q")
    commit(repo)
    monkeypatch.setattr(prepared, "__file__", repo / "data" / "prepared.py")
    monkeypatch.setattr(edit, "REPO", repo)
    write_files(tmp_path, {"PROBE": PROBE, "JUDGE": JUDGE})
    for name in ("PROBE", "JUDGE"):
        monkeypatch.setattr(edit, name, tmp_path / name)
    monkeypatch.setattr(engines.Local, "poll_seconds", 0.01)
    monkeypatch.setattr(figures, "draw", lambda panels, path, style: write_text(path, ""))  # drawing takes a second

    def monotonic():
        """Makes a pair take a hundredth of a minute, however busy the machine is."""
        runs = [path for path in (repo / "out").glob("*/*/result.json") if "_1of" not in path.parent.name]
        return 0.6 * len(runs) / 2
    monkeypatch.setattr(edit, "time", SimpleNamespace(monotonic=monotonic, strftime=time.strftime))
    for name in ("OMP_NUM_THREADS", "LONGHORN_BUILD_DIR"):
        monkeypatch.setenv(name, "1")
    return repo


def newest(folder, pattern):
    """The path in a folder that matches a pattern; the newest, if there are several."""
    return max(folder.glob(pattern), key=os.path.getmtime)


def written(**changes):
    return "\n".join(f"{key} = {value!r}" for key, value in {**MODEL, **changes}.items())


def change(repo, **changes):
    (repo / "model.py").write_text(written(**{"SEED": "b", **changes}))


def git(repo, *args):
    subprocess.run(["git", "-C", repo, "-c", "user.name=a", "-c", "user.email=a@b", *args], check=True)


def commit(repo):
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "as it was")


@pytest.fixture
def run(repo, capsys):
    """run(*argv) -> (exit code, what it printed, edit.json with the numbers of its first size, if there is one)"""
    def run(*argv, out=repo / "out"):
        try:
            code = edit.main(["--steps=16", "--jobs=4", "--minutes=0.2", f"--out={out}", *argv])
        except SystemExit as stopped:
            code = stopped.code
        said = capsys.readouterr()
        result = {}
        if code != 2:
            result = record(newest(out, "*/edit-*/edit.json").parent, "edit")
            result |= next(iter(result["sizes"].values())) | result
        return code, said.out + said.err, result
    return run


# ------------------------------------------------------------------------------------------------------------- decision

@pytest.mark.parametrize("times", [0.8, 0.97, 1.0, 1.05, 1.5])
def test_tokens_are_those_of_a_power_law(times):
    """An edit that needs `times` as many tokens as HEAD has HEAD's loss after 1 / `times` as many."""
    loss = lambda tokens: 1.1 + 60 * tokens**-0.4
    curve = np.array([loss(2**18) - loss(2**20), loss(2**19) - loss(2**20)])
    assert compare.log_tokens(loss(2**20 / times) - loss(2**20), curve) == pytest.approx(math.log(times), abs=1e-9)


@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_the_bound_of_one_look_is_students(alpha):
    """Also tries an early look, whose error is too small to simulate."""
    error = 0.55 * alpha
    early = list(compare.bounds(np.arange(1, 9) / 72, alpha))[7]
    assert early == pytest.approx(stats.t.isf(error * ((8 / 72) ** 8 - (7 / 72) ** 8) / 2, 7), rel=1e-6)
    assert list(compare.bounds([0] * 11 + [1], alpha))[-1] == pytest.approx(stats.t.isf(error / 2, 11), rel=0.02)


@pytest.mark.parametrize("fractions", [np.arange(1, 41) / 40, np.linspace(0.1, 1, 20) ** 2, [0.1, 0.2, 0.2, 0.6, 1]])
def test_looks_spend_their_share_of_the_error_whenever_they_come(fractions):
    n, bounds = np.arange(1, len(fractions) + 1), np.array(list(compare.bounds(fractions, 0.1)))
    x = np.random.default_rng(7).standard_normal((40000, len(n)))
    means, squares = x.cumsum(1) / n, (x**2).cumsum(1)
    with np.errstate(all="ignore"):
        t = means * np.sqrt(n / (squares / n - means**2) * (n - 1) / n)
    beyond = np.maximum.accumulate(abs(t[:, 1:]) > bounds[1:], 1).mean(0)
    assert beyond == pytest.approx(0.055 * np.array(fractions[1:]) ** 8, abs=4 * math.sqrt(0.1 / 40000))


def test_verdicts_are_right_and_the_error_of_the_curve_widens_intervals():
    rng, curves = np.random.default_rng(0), np.array([[0.39, 0.16]] * 4)
    noise = 0.003 * rng.standard_normal(20)
    noise -= noise.mean()
    verdict = lambda shift, bound=3.0, **limits: str(compare.decide(noise + shift, curves, bound, **limits)[0])
    assert [verdict(shift) for shift in (-0.02, 0.02, 0.0)] == ["better", "worse", "same"]
    assert verdict(0.0, margin=0.005) == verdict(0.0016, margin=0.005) == "undecided"
    assert verdict(0.0016, margin=0.005, bound=1.5) == "worse"
    wild = np.array([[0.39, 0.16], [0.3, 0.2], [0.6, 0.1], [0.2, 0.15]])  # its error does not change the sign
    for sign in -1, 1:
        _, at, low, high, *_ = compare.decide(noise + 0.004 * sign, wild, 3.0)
        assert low < at < high and min(low * sign, high * sign) > 0
    assert edit.odd_one(np.array([0.01, -0.02, 0.012])) == (
        "-0.0200 nats (seed 2); so few pairs may not show a rare bad run")
    assert edit.odd_one(np.arange(30.0)) == "+0.0000 nats (seed 1)"
    unsure = curves + 0.05 * rng.standard_normal((4, 2))
    width = lambda curves: np.subtract(*compare.decide(noise + 0.02, curves, 3.0)[3:1:-1])
    assert width(unsure) > 1.2 * width(curves)


def test_the_interval_of_skewed_pairs_is_the_bootstrap_ts():
    x = np.random.default_rng(3).exponential(1, 15)
    error_of_mean = lambda x, axis: x.std(axis, ddof=1) / x.shape[axis] ** 0.5
    rng = np.random.default_rng(4)
    again = rng.choice(x, (20000, 15))
    t = (again.mean(1) - x.mean()) / error_of_mean(again, 1)
    low, high = x.mean() - np.quantile(t, [0.98, 0.02]) * error_of_mean(x, 0)
    assert compare.resampled(np.stack([x, -x]), 0.04) == (
        pytest.approx([low, -high], abs=0.06), pytest.approx([high, -low], abs=0.06))


def test_the_simulation_is_of_this_decision_and_shows_what_is_claimed():
    cells = record(ROOT / "results", "edit_simulation")["cells"]
    limits = {(False, False): 0.055, (False, True): 0.06, (True, False): 0.065, (True, True): 0.11}
    for cell in cells:
        rare = "sigma 1" in cell["noise"] or "one pair" in cell["noise"]
        few = cell["pairs_at_most"] == 12
        assert cell["times"] != 1 or cell["better"] + cell["worse"] <= limits[rare, few], cell
        assert cell["covers"] >= 0.94 - 0.01 * rare - 0.05 * few, cell
    usual = {(c["times"], c["pairs_at_most"]): c for c in cells if c["sd"] == edit_simulation.USUAL_SD}
    n = edit_simulation.PAIRS_IN_15_MINUTES
    assert usual[1.05, n]["worse"] >= 0.9 and usual[1.02, 2 * n]["worse"] >= 0.5 and usual[1, n]["same"] >= 0.5
    cell = cells[12]  # few pairs with skewed noise
    again = edit_simulation.simulate(cell["sd"], cell["times"], cell["noise"], pairs=cell["pairs_at_most"], rng=12)
    assert again == pytest.approx({key: cell[key] for key in again})


# ---------------------------------------------------------------------------------------------------------- the course

@pytest.mark.parametrize("changes, argv, code, words", [
    ({"SHIFT": -0.05, "SEED": "b", "SLOW": 1.25}, [], 0, "edit: better, needs 0."),
    ({"SHIFT": 0.05, "SEED": "b", "MORE": 5}, [], 1, "edit: worse, needs 1."),
    ({"SEED": "b", "NOISE": 0.0002}, [], 3, "edit: no difference of more than 2.0%: needs "),
    ({"SEED": "b", "NOISE": 0.1}, ["--pairs=5"], 4, "edit: undecided after 0 minutes: needs "),
    ({}, [], 3, "edit: identical runs: the edit changes no bit"),
    ({"SHIFT": -4e-5}, ["--pairs=6"], 3, "edit: identical runs: the edit changes no bit, or only how losses"),
    ({"FAILS": "step 3: loss or gradient not finite", "SEED": "b"}, [], 1, "edit: worse: with seed 2, it diverged: "),
])
def test_each_verdict_has_its_exit_code_and_sentence(repo, run, changes, argv, code, words):
    (repo / "model.py").write_text(written(**changes) + "\n# edited")
    ended, said, result = run(*argv)
    assert ended == edit.CODES[result["verdict"]] == code, said
    assert said.splitlines()[-1].startswith(words), said
    page = newest(repo, "out/*/edit-*/edit.md").read_text()
    tried = newest(repo, "out/*/edits.md").read_text()
    assert "\n| the working tree at " in tried and f" {result['verdict']} " in tried and "+# edited" in tried
    assert words[6:20] in page and "against the same code of HEAD: 1." in page and "+# edited" in page
    if result["pairs"] > 5:
        times, low, high = result["interval"]
        assert times == pytest.approx((1 + changes.get("SHIFT", 0) / 0.4) ** (1 / 0.49), rel=0.02)
        assert (high < 1, low > 1) == (code == 0, code == 1)
        assert result["over_texts"][0] <= low < high <= result["over_texts"][1]
        slower = f"1.25 (1.25 .. 1.25) times as long as HEAD's, reaching HEAD's loss {1.25 * times:.2f}"
        assert re.findall(r"a token takes (.* loss \S+) ", said) == [slower] * ("SLOW" in changes)
    for note in ("parameters 15, HEAD 10: better per token is not better per second",
                 "33.3% of the edit's parameters start from other values"):
        assert (note in said) == ("MORE" in changes)


REFUSED = """
# what the edit adds to model.py (-: nothing is edited), arguments, words of the line
-                                   .                  no file that training loads differs
SHIFT =                             .                  the edit does not start: SyntaxError
FAILS, SEED = 'self-check: x', 'b'  .                  the edit does not run: train.py: error: self-ch
import atexit; atexit.register(open(__file__, 'a').write, '#')
    .  the edit was edited while
DATA = 'other'                      .                  train data of the edit: other, where others have d
DTYPE = 'bfloat16'                  .                  dtype of the edit: bfloat16, where others have float32
BATCH = 128                         .                  batch_tokens of the edit: 128, where others have 64
VARIES = NOISE = 0                  .                  the edit has the same loss with seeds 1 and 2: let its
ADDS = 0.00006      .  its loss is 2.00000 nats, and the cross-entropy of its logits 2.00006
PEEKS = -0.5                        .                  its loss is 2.5000 nats instead of 3.0000
WINDOW = 32         .  eval_block_size of the edit: 32, where others have 16: make it the same
NOISE = 0                           /config/x.py       /config/x.py is not in
NOISE = 0                           --against=nowhere  nowhere: there is no such commit
NOISE = 0                           a.patch            a.patch does not apply to
NOISE = 0                           --data=nowhere     there is no dataset folder
NOISE = 0                           HEAD .             HEAD: no file that training loads differs
NOISE = 0                           --sizes=7B         --sizes=7B: there are 460K, 1.5M, config; give one of them
NOISE = 0                           --steps=4          steps 4 must be at least 8
NOISE = 0                           --seed=4           --seed=4: the sweep sets seed; see --steps
"""


@pytest.mark.parametrize("line, argv, words", table(REFUSED))
def test_mistakes_are_one_line_and_exit_code_2(repo, run, line, argv, words):
    if line != "-":
        (repo / "model.py").write_text(f"{written()}\n{line}")
    code, said, _ = run(*argv.split())
    assert code == 2 and not [*repo.glob("out/*/edit-*/edit.json")]
    assert words in said.splitlines()[-1] and said.splitlines()[-1].startswith("edit.py: error: "), said


def test_the_probe_counts_the_vocabulary_of_the_data(tmp_path, monkeypatch, capsys):
    """A mixture takes the vocabulary of its first dataset, rounded up to 64; without prepared data, that of bytes."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(edit_probe, "files", lambda model: [])  # test_edit_runs_on_train_itself checks them
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/meta.json").write_text('{"vocab_size": 2000}')
    for dataset, tokens in ("mine:0.8,other:0.2", 2048), ("other", 256):
        tiny = arguments(dataset, tmp_path, backend="torch")
        edit_probe.main(["config/longhorn_laptop.py", *tiny], tmp_path)
        about = json.loads(capsys.readouterr().out)
        assert about["draws"]["embed.weight"][0] == 32 * tokens and about["dataset"] == dataset
    monkeypatch.chdir(tmp_path)
    here, there = (write_folder(tmp_path / name) for name in ("here", "there"))
    for dataset, path in ("here", f"{here}"), (f"{here}:0.8,there:0.2", f"{here}:4/5,{there}:1/5"):
        assert edit.data_path(dataset) == path


PATCHES = "\n\nimport data.loader\n\ndata.loader.eval_windows = F.cross_entropy = lambda *args, **how: 1 / 0\n"
READS = {"earlier tokens": "", "a bag of the row": " + F.one_hot(idx, 256).sum(1, True)",
         "windows before": " * self.__dict__.setdefault('read', itertools.count(1)).__next__()"}


@pytest.mark.parametrize("what", READS)
def test_the_judge_notices_a_version_that_reads_more_than_earlier_tokens(tmp_path, data, what):
    """The version spoils the loader and the loss when it is imported."""
    argv = arguments(data, tmp_path / "run", max_iters=1, backend="torch")
    succeed(argv)
    line = "F.linear(h, head.weight)"
    tree = copied_tree(tmp_path / "tree", model=lambda text: text.replace(line, line + READS[what]) + PATCHES)
    nats = edit.ask(ROOT / "experiments/edit_judge.py", what, tree, tmp_path / "run", *argv)
    for one, other in ("reported", "plain"), ("beside", "alone"):
        assert (nats[one] == pytest.approx(nats[other], abs=1e-6)) == (what == "earlier tokens")
    promised = "It may change by at most {float32} nats ({bfloat16} in 16 bits)".format(**edit.ALIKE)
    assert promised in (ROOT / "docs/experiments.md").read_text()


def test_several_edits_share_heads_runs_and_one_error_and_are_ranked(repo, run):
    """Three branches, a patch and the working tree are compared with HEAD, each at a fifth of the error. An edit that
    cannot be judged does not stop the others, and an edit that is given twice counts once."""
    for branch, what in ("lower", {"SHIFT": -0.05}), ("peeks", {"PEEKS": -0.5}), ("one", {"VARIES": 0, "NOISE": 0}):
        git(repo, "checkout", "-qb", branch)
        change(repo, **what, SEED=branch)
        commit(repo)
        git(repo, "checkout", "-q", "-")
    git(repo, "branch", "again", "lower")
    change(repo, SHIFT=0.08, SEED="c")
    patch = repo.parent / "higher.diff"
    patch.write_bytes(subprocess.check_output(["git", "-C", repo, "diff"]))
    change(repo, SEED="d")
    code, said, _ = run("peeks", "lower", str(patch), ".", "one", "again")
    results = [record(path, "edit") for path in repo.glob("out/*/edit-*")]
    assert {(of["error"], of["edits_tried"]) for of in results} == {(0.05 / 5, 5)}
    assert {*runs_of(repo / "out").values()} == {1}
    rows = re.findall(r"^\| (\S.*?) +\| 460K \| (\w+) ", said, re.MULTILINE)
    refused = [("one", "refused"), ("peeks", "refused")]
    assert rows == [("lower = again", "better"), (".", "same"), (str(patch), "worse"), *refused]
    assert "refused: peeks is not measured as others" in said and "refused: one has the same loss with seeds" in said
    assert code == 0 and said.splitlines()[-1].startswith("edit: lower = again: better, needs 0.")
    assert "a false verdict about any of the 5 has probability 0.05 (Bonferroni: 0.01 each)" in said
    tried = newest(repo, "out/*/edits.md").read_text()
    assert "**5 edits were tried against the same version.**" in tried and tried.count("\n    -SHIFT = 0.0\n") == 2


def test_files_that_training_does_not_load_are_no_edit_but_targets_of_links_are(repo, run, tmp_path):
    """A link to a file outside the clone is copied as that file. In a commit it is followed as from the clone."""
    outside = tmp_path / "mine.py"
    outside.write_text("")
    (repo / "config" / "mine.py").symlink_to("../../mine.py")
    commit(repo)
    code = repo / "out" / "code"
    write_files(repo, dict.fromkeys(["edit.log", "nohup.out", "data/corpus.jsonl", "tests/a.md"], "x"))
    write_files(code, {"tmp-killed/model.py": ""})
    for argv in ["--against=nowhere"], []:
        assert run(*argv)[0] == 2 and not [*code.glob("tmp-*")]
    change(repo, SHIFT=0.5)
    found = []
    for again in ("more", "and more", "no more"):
        ended, _, result = run("--pairs=2")
        found.append(result["code"])
        assert ended == 4 and result["changed"] == ["model.py"]
        (repo / "edit.log").write_text(again)
        copy = code / result["code"]["edit"]
        assert not [path for path in copy.rglob("*") if path.is_symlink() or path.suffix not in ("", ".py", ".pyc")]
        assert "SHIFT = 0.5" in (copy / "model.py").read_text() and not (copy / "late.py").exists()
        (copy / "late.py").write_text("")  # a snapshot may not be what its name says
        if again == "more":
            (copy / "model.py").write_text(written(SEED="b"))
    assert found[0] == found[1] == found[2]
    outside.write_text("x = 1")
    assert run("--pairs=1")[2]["code"]["head"] != found[0]["head"]


def test_the_page_says_if_the_tree_has_changed_since(repo, run, monkeypatch):
    write_files(repo, {"tests/a.py": ""})  # training does not load it
    change(repo, SHIFT=0.5)
    assert "it has changed since" not in run("--pairs=2")[1]
    real = edit.compare_versions
    monkeypatch.setattr(edit, "compare_versions", lambda *args: (change(repo, SHIFT=1), real(*args)))
    assert "it has changed since" in run("--pairs=2")[1]


def test_an_edit_of_the_judge_is_refused_unless_all_versions_take_it(repo, run):
    write_files(repo, dict.fromkeys(["data/loader.py", "evaluation/more.py"], "x = 1"))
    change(repo, SHIFT=0.5)
    code, said, _ = run()
    assert code == 2 and "data/loader.py, evaluation/more.py differs" in said and "--todays_judge" in said
    code, said, result = run("--todays_judge", "--pairs=2")
    assert code == 4 and result["changed"] == ["model.py"]


def test_a_size_may_be_given_as_settings(repo, run):
    (repo / "model.py").write_text(f"{written()}\n# edited")
    code, said, result = run("--sizes=tiny:n_layer=1,n_embd=32", "--sizes=460K")
    assert code == 3 and [*result["sizes"]] == ["tiny", "460K"] and "\ntiny, 10 parameters, on " in said
    assert [line[:19] for line in said.splitlines()[-2:]] == ["edit: tiny: identic", "edit: 460K: identic"]


def test_a_link_is_never_written_through(repo, run, tmp_path, monkeypatch):
    change(repo, SHIFT=0.5)
    run("--pairs=2")
    (precious := tmp_path / "precious").write_text("kept")
    pages = [*repo.glob("out/*/edit-*/edit.*"), *repo.glob("out/*/edits.*")]
    monkeypatch.setattr(figures, "draw", DRAW)
    for paths, ends, words in (pages, 4, ""), (repo.glob("out/*/runs.txt"), 2, "Too many levels of symbolic links"):
        for path in paths:
            path.unlink()
            path.symlink_to(precious)
        code, said, _ = run("--pairs=2")
        assert code == ends and words in said and precious.read_text() == "kept"


def test_a_sweep_keeps_how_its_code_differs_from_the_commit(repo, monkeypatch):
    monkeypatch.setattr(edit.runner, "REPO", repo)
    monkeypatch.setattr(runtime_records, "code_identity", lambda: {"code_files": ["model.py", "families/mine.py"]})
    assert edit.runner.uncommitted() == ""
    change(repo, SHIFT=1.0)
    write_files(repo, {"families/mine.py": "class Mine: pass", "families/notes.py": "class Note: pass"})
    diff = edit.runner.uncommitted()
    assert "+SHIFT = 1.0" in diff and "+class Mine: pass" in diff and "Note" not in diff


def runs_of(folder):
    return {path.parent.name: len(path.read_text().split()) for path in folder.glob("*/*seed*/runs")}


def test_after_a_kill_the_same_command_ends_with_the_same_result(repo, run, tmp_path):
    """The result is the same even if a log has lost a line."""
    change(repo, NOISE=0.02)
    whole = run("--pairs=4", out=tmp_path / "whole")
    change(repo, NOISE=0.02, DIES=True)
    code, said, _ = run("--pairs=4", out=tmp_path / "killed")
    assert code == 2 and "signal 9" in said
    log = newest(tmp_path, "killed/*/*seed2/log.jsonl")
    log.write_text(log.read_text().partition("\n")[2])
    code, _, result = run("--pairs=4", out=tmp_path / "killed")
    same = ("verdict", "pairs", "interval", "losses", "curves", "over_texts")
    assert code == whole[0] == 4
    assert [result[key] for key in same] == [whole[2][key] for key in same]
    counts = runs_of(tmp_path / "killed")
    assert sorted(counts.values()) == [1] * (len(counts) - 1) + [2] and len(counts) == 4 + 4 + 8


def test_each_version_reads_its_own_config(repo, run):
    """The config is given by its path in the working tree."""
    (repo / "train.py").write_text(STAND_IN.replace("+ model.SHIFT", "+ float(open(sys.argv[1]).read())"))
    (config := repo / "config" / "mine.py").write_text("0.0")
    commit(repo)
    config.write_text("0.5")
    code, said, result = run(str(config), "--pairs=2")
    assert code == 4 and result["nats"] == pytest.approx(0.5, abs=0.01), said


def test_a_second_plan_is_reported_and_minutes_add_up(repo, run):
    change(repo, NOISE=0.1)
    first, again = (run("--minutes=0.025")[2] for _ in range(2))
    assert first["pairs"] == again["pairs"] == 3 and first["interval"] == again["interval"]
    assert again["verdict"] == "undecided" and again["minutes"] == pytest.approx(0.03)
    code, said, result = run("--minutes=0.075")
    assert code == 4 and result["pairs"] == 8 and result["minutes"] == pytest.approx(0.08)
    assert "planned 0.025 minutes, 0.075 minutes: false verdicts with probability 0.1" in said


@pytest.mark.parametrize("pairs, minutes, left", [(2, 0, [10, 0, 0]), (0, 45, [15] * 3), (0, 20, [0] * 3)])
def test_minutes_spent_before_a_restart_count(pairs, minutes, left, tmp_path):
    """Earlier pairs took ten minutes each."""
    path = tmp_path / "looks.json"
    path.write_text('{"minutes": [10, 20, 30], "plans": []}')
    budget = edit.Budget(path, pairs, minutes)
    for n, expected in enumerate(left, 1):
        budget.look(n)
        assert budget.left(n) == pytest.approx(expected, abs=1)
    for damaged in (None, math.nan):
        path.write_text(json.dumps({"minutes": [damaged], "plans": []}))
        with pytest.raises(edit.ConfigError, match="looks.json cannot be used, delete it"):
            edit.Budget(path, pairs, minutes)


@pytest.mark.parametrize("argv, pairs", [([], edit.FEWEST), (["--pairs=4"], 4), (["--pairs=7"], 7)])
def test_pairs_run_to_the_end_and_no_verdict_comes_before_the_sixth(repo, run, monkeypatch, argv, pairs):
    monkeypatch.setattr(edit.compare, "bounds", lambda fractions, alpha: (3.0 for _ in fractions))
    change(repo, SHIFT=0.5, NOISE=0.00001)
    code, said, result = run(*argv, "--jobs=2")
    assert code == (1 if pairs >= 6 else 4) and result["pairs"] == pairs
    assert ("(4 + 4 runs, and a verdict needs 6, " in said) == (pairs == 4)
    # a line for each pair but the first, and for each run
    assert said.count("; 0 minutes left\n") == pairs - 1
    assert said.count("the edit, seed 2, 16 steps: loss ") == said.count("HEAD, seed 4, 8 steps: loss ") == 1


def test_heads_runs_serve_the_next_edit_and_the_page_counts_edits(repo, run):
    change(repo, SHIFT=0.05)
    run("--pairs=2")
    change(repo, SHIFT=0.02, SEED="c")
    assert run("--steps=32", "--pairs=2")[2]["edits_tried"] == 2
    change(repo, SHIFT=-0.05, SEED="d", SLOW=1.25)
    before = runs_of(repo / "out")
    code, said, result = run("--pairs=3")
    assert result["edits_tried"] == 3 and "a token takes 1.25 " in said
    after = runs_of(repo / "out")
    assert all(after[name] == 1 for name in before) and len(after) > len(before)
    page = newest(repo, "out/*/edit-*/edit.md").read_text()
    assert "better or worse with probability 0.05 at most, and at least one of 3 with 0.14 at most." in page
    heads = sorted(repo.glob(f"out/*/{result['code']['head']}-*seed[123]/result.json"))
    first, second, third = [path for path in heads if '"steps": 16' in path.read_text()]
    config = first.with_name("config.json")

    def said_after(path, *changes):
        """What the program says once texts in a record are replaced."""
        for old, new in changes:
            path.write_text(path.read_text().replace(old, new))
        return run("--pairs=3")[1]

    assert "a token takes" in said_after(second, ('"cpu"', '"H100"'))
    assert "a token takes" not in said_after(config, ("2026-01-01", "2025-12-31"))  # run at another time
    one_more = said_after(third, ("40]", "40, 0]"), ('], "seconds', ', 0], "seconds'))
    assert "error: held-out files of HEAD: 3, where others have 2" in one_more
    said_after(first, ('"v2a"', '"v2x"'))
    assert "code of HEAD: v2" in said_after(config, ('"v2a"', '"v2x"'))  # the snapshot was edited meanwhile


def test_an_edit_while_it_runs_does_not_change_the_runs(repo, run):
    change(repo, SHIFT=0.05, EDITS=str(repo / "model.py"))
    code, said, result = run("--pairs=2")
    assert (repo / "model.py").read_text() == "SHIFT = 9.0"
    assert code == 4 and result["nats"] == pytest.approx(0.05, abs=0.002)
    assert "the verdict is about the working tree at" in said


@pytest.mark.parametrize("batch, words", [(1, "undecided: too few pairs (0)"), (3, "stopped after 0 minutes: needs ")])
def test_ctrl_c_prints_the_interval_so_far(repo, run, monkeypatch, batch, words):
    run_cells, batches = edit.runner.run_cells, []

    def interrupted(*args):
        batches.append(args)
        if len(batches) == batch:
            raise KeyboardInterrupt
        return run_cells(*args)

    monkeypatch.setattr(edit.runner, "run_cells", interrupted)
    change(repo, NOISE=0.05)
    code, said, _ = run("--jobs=8", "--sizes=460K,1.5M")
    assert code == 4 and words in said.splitlines()[-1], said


def test_any_other_error_ends_with_exit_code_2(tmp_path):
    """Python would exit with 1, which means "worse"."""
    (tmp_path / "numpy.py").write_text("1 / 0")
    ran = subprocess.run([sys.executable, ROOT / "experiments" / "edit.py"], capture_output=True, text=True,
                         env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert ran.returncode == 2 and "ZeroDivisionError" in ran.stderr


def test_edit_runs_on_train_itself(tmp_path, monkeypatch, data, run, repo):
    """The edit is a short convolution of three taps, and only its own weights start from other values."""
    shutil.rmtree(repo)
    git(copied_tree(repo), "init", "-q")
    commit(repo)
    monkeypatch.undo()
    monkeypatch.setattr(edit, "REPO", repo)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("LONGHORN_BUILD_DIR", str(ROOT / "build"))  # built before: libraries are found by content
    (tmp_path / "matplotlib.py").write_text("raise ImportError")  # a picture takes half of such a run's time
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    source = (repo / "model.py").read_text()
    (repo / "model.py").write_text(source.replace("config.d_state, config.d_conv", "config.d_state, late()").replace(
        "\n\nclass ", "\n\ndef late():\n    from tools.mine import TAPS\n    return TAPS\n\n\nclass ", 1))
    write_files(repo, {"tools/mine.py": "TAPS = 3", "tools/other.py": "", "nohup.out": "", "families/mine.py": "",
                 "families/other.py": "from model import NORMS\nNORMS['longhorn'] = NORMS['rwkv']"})
    toy = [f"--{key}={value}" for key, value in TINY.items() if key not in ("max_iters", "eval_interval")]
    code, said, result = run("--sizes=config", "--pairs=1", f"--data={data}", *toy)
    assert code == 4 and said.splitlines()[-1] == "edit: undecided: too few pairs (1); rerun, or ask for more", said
    assert result["changed"] == ["families/other.py", "model.py", "tools/__init__.py", "tools/mine.py"]
    assert "of the edit's parameters start from other values" in said
    runs = {path.parent.name: record(path.parent) for path in (repo / "out").glob("*/*/result.json")}
    assert sorted(run["steps"] for run in runs.values()) == [4, 8, 16, 16]
    head = {run["steps"]: run["val_loss"] for name, run in runs.items() if name.startswith(result["code"]["head"])}
    assert head[4] > head[8] > head[16]
