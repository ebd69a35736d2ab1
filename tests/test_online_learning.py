"""experiments/online_learning.py: every claim of its table, the minimiser behind it, the mixers that train, and --add.

Most tests here are about what must not hold: a comparison that compares nothing would also give a table of zeros.
"""

import inspect
import json
import math
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import mixers
import model
from experiments import online_learning as ol
from experiments.online_learning import ROW, UPDATES
from experiments.scaling import parameters
from runtime.errors import ConfigError

pytestmark = pytest.mark.usefixtures("one_thread")
DRAWS = 5


def draw(N=4, d=3, seed=0, **given):
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    return normal(d, N), normal(N), normal(d), ol.settings(d, N, **given)


@pytest.mark.parametrize("name", ROW)
def test_the_claim_is_as_the_table_says_and_a_millionth_is_seen(name):
    row = ROW[name]
    checked = ol.check(row, DRAWS, seed=1)
    assert checked["found"] and checked["smallest_curvature"] > 0
    assert checked["minimises"] == row.holds and (checked["off"] <= 1e-8) == row.holds
    if not row.holds:
        assert checked["off_ordinary"] > 0.01 and row.note
    else:
        wrong = replace(row, update=lambda *a: row.update(*a) * (1 + 1e-6))
        assert not ol.check(wrong, 3, seed=1)["minimises"]
    if name == "GLA, as printed":
        other_sign = replace(row, update=lambda S, k, x, p: S * p.alpha - torch.outer(x, k))
        assert ol.check(other_sign, DRAWS, seed=1)["minimises"]


def test_an_update_that_is_wrong_for_long_keys_alone_does_not_pass():
    update = lambda S, k, x, p: ol.longhorn_exact(S, k, x, p) * (1 + (k.norm() > 5))
    assert not ol.check(replace(ROW["Longhorn, Eq. 6"], update=update), 24, seed=1)["minimises"]


def test_where_eq7_is_the_minimiser():
    S, k, x, p = draw()
    along = torch.tensor([0.0, 2.0, 0.0, 0.0], dtype=torch.float64)
    same = lambda *a: torch.allclose(ol.longhorn(*a), ol.longhorn_exact(*a), rtol=1e-14, atol=1e-14)
    assert same(torch.zeros_like(S), k, x, p) and same(S, along, x, p) and same(*draw(N=1))
    assert not same(S, k, x, p)


def test_minimiser_finds_a_minimum_that_is_known():
    target = torch.tensor([[1.0, -2.0, 300.0], [1e5, 0.0, 1e-3]], dtype=torch.float64)
    weight = torch.tensor([[1.0, 1e6, 1e-3], [1.0, 2.0, 3.0]], dtype=torch.float64)
    S, low, step = ol.minimise(lambda S: (weight * (S - target).square()).sum(), torch.zeros(2, 3, dtype=torch.float64))
    assert ((S - target).abs() <= 1e-10 * target.abs().clamp(min=1e-3)).all() and step < 1e-10
    assert low == pytest.approx(1e-9, rel=1e-6)
    S, _, step = ol.minimise(lambda S: (S - target).cosh().log().sum() + 1e-3 * (S - target).square().sum(),
                             target + torch.tensor([[5.0, -5.0, 3.0], [1.0, 0.0, 8.0]]).double())  # not a quadratic
    assert (S - target).abs().max() < 1e-7 and step < 1e-8


@pytest.mark.parametrize("loss,says", [
    (lambda S, S_prev, k, x, p: -(S - S_prev).square().sum(), "no unique minimum"),
    (lambda S, S_prev, k, x, p: (S @ k - x).square().sum(), "no unique minimum"),
    (lambda S, S_prev, k, x, p: (S - S_prev).pow(3).sum(), "NO"),
    (lambda S, S_prev, k, x, p: (S - S_prev).abs().sum() + 0.1 * S.square().sum(), "no")])
def test_objectives_without_a_minimum_to_find_are_not_passed(loss, says):
    checked = ol.check(replace(ROW["linear attention"], objective=loss), 4, seed=0)
    assert not checked["minimises"] and not checked["found"] and says in ol.verdict(checked)


def test_draws_reach_the_extremes():
    S, k, x, p = zip(*ol.draws(48, False, 0), strict=True)
    lengths, betas = [a.norm().item() for a in k], torch.cat([a.beta for a in p])
    assert min(lengths) == pytest.approx(1e-3) and max(lengths) == pytest.approx(1e3)
    assert betas.min() == 1e-6 and betas.max() == 1 - 1e-6
    assert any((a == 0).all() for a in S) and any(a.abs().max() > 50 for a in S)
    assert {a.shape[1] for a in S} >= {1, 8, 16}
    assert all(abs(length - 1) < 1e-12 for length in lengths[:16])


def test_every_recurrent_family_has_a_row():
    rows = [f for row in UPDATES for f in row.mixers]
    assert set(parameters.TABLE1) - {"llama"} <= set(rows) <= set(model.FAMILIES) and len(rows) == len(set(rows))


@pytest.mark.parametrize("family", [f for row in UPDATES for f in row.mixers])
def test_mixer_is_the_update_of_its_row(family):
    row, = (row for row in UPDATES if family in row.mixers)
    assert ol.mixer_off(family, row.update) <= ol.MIXER_HOLDS
    assert ol.mixer_off(family, row.update, backend="torch") <= ol.MIXER_HOLDS
    others = {"longhorn": ol.longhorn_exact, "longhorn_exact": ol.longhorn,
              "rwkv4": lambda S, k, x, p: 0.5 * S + 0.5 * x}
    assert ol.mixer_off(family, others.get(family, ol.linear_attention)) > 100 * ol.MIXER_HOLDS


def test_all_families_are_there_in_a_process_of_its_own():
    """The tests import families themselves; the program must too."""
    code = "from experiments import online_learning as ol; ol.operator_call('rwkv4', 'torch')"
    subprocess.run([sys.executable, "-c", code], cwd=ol.ROOT, check=True)


def test_a_changed_mixer_is_seen(monkeypatch):
    longhorn, retention, delta_rule = model.longhorn_scan, mixers.retention, mixers.delta_rule
    for family, module, name, changed in (
            ("longhorn", model, "longhorn_scan", lambda x, dt, *a, **kw: longhorn(x, dt + 0.01, *a, **kw)),
            ("retnet", mixers, "retention", lambda q, k, v, g, *a, **kw: retention(q, k, v, 1.01 * g, *a, **kw)),
            ("deltanet", mixers, "delta_rule", lambda q, k, v, b, *a, **kw: delta_rule(q, k, v, 0.99 * b, *a, **kw))):
        update = next(row.update for row in UPDATES if family in row.mixers)
        with monkeypatch.context() as m:
            changed.__signature__ = inspect.signature(getattr(module, name))
            m.setattr(module, name, changed)
            assert ol.mixer_off(family, update) > 10 * ol.MIXER_HOLDS, family
    monkeypatch.setattr(model.Longhorn, "scan", lambda self, x, dt, k, q, z, h0: (x, h0))  # no longer the scan
    with pytest.raises(RuntimeError, match="longhorn_scan 0 times"):
        ol.mixer_off("longhorn", ol.longhorn)
    monkeypatch.setattr(mixers.DeltaNet, "mix", lambda self, x, q, k, v, S: [
        mixers.delta_rule(q, k, v, self.eps(x, k), S) for _ in range(2)][0])
    with pytest.raises(RuntimeError, match="delta_rule 2 times"):
        ol.mixer_off("deltanet", ol.deltanet)


def test_orthogonal_keys_are_recalled_whole_and_random_ones_as_theory_says():
    eye, values = torch.eye(16, dtype=torch.float64), torch.randn(16, 16, dtype=torch.float64)
    p = ol.settings(16, 16)
    for name in ("linear attention", "Longhorn, Eq. 6", "Longhorn, Eq. 7", "DeltaNet"):
        assert ol.recall(ROW[name], p, eye, values).abs().max() < 1e-12
    assert ol.recall(ROW["RetNet"], p, eye, values)[0, -1] > 1e-3  # what it forgot cannot be had back by one gain
    pairs = lambda seed: ol.make_pairs(64, 16, 16, 0.0, torch.Generator().manual_seed(seed))
    got = [ol.recall(ROW["linear attention"], p, *pairs(seed))[0, -1] for seed in range(8)]
    noise = 63 / 16  # n - 1 other pairs, each 1 / N of a value's square
    assert sum(got).item() / 8 == pytest.approx(noise / (1 + noise), abs=0.03)


def test_least_squares_floor_is_one():
    keys, values = ol.make_pairs(48, 64, 16, 0.0, torch.Generator().manual_seed(0))
    S = torch.linalg.lstsq(keys, values).solution.T
    assert ol.lost(keys @ S.T, values) == pytest.approx(ol.least_squares_floor(48), abs=0.03)
    assert ol.least_squares_floor(16) == 0 and ol.least_squares_floor(32) == 0.5


def test_recall_rows_choose_the_best_and_survive_a_state_that_explodes():
    delta = ROW["DeltaNet"]
    rows = [replace(delta, tune=({"rate": 0.2}, {"rate": 1e9})), replace(delta, name="all", tune=())]
    tuned, plain = ol.recall_rows(rows, 0.0, 2, 0)
    assert all(b <= s + 1e-12 for b, s in zip(tuned["best"], tuned["start"], strict=True))
    assert tuned["best"][-1] < tuned["start"][-1]
    assert tuned["setting"][-1] == {"rate": 0.2} and plain["best"] == plain["start"] == tuned["start"]
    assert tuned["newest"][-1] < 0.6 < 0.8 < tuned["best"][-1]  # the last 8 of 128 are not yet written over
    low, high = tuned["best_quartiles"][-1]
    assert low <= tuned["best"][-1] <= high
    explodes = replace(delta, update=lambda S, k, x, p: 1e9 * S + torch.outer(x, k))
    exploded, = ol.recall_rows([explodes], 0.0, 1, 0)
    assert exploded["start"][-1] == math.inf


def test_a_pair_written_again():
    reads = {row.name: ol.written_again(row, 0) for row in UPDATES if row.tune is not None}
    assert reads["linear attention"] == pytest.approx(list(ol.TIMES))
    assert reads["Longhorn, Eq. 6"][-1] == pytest.approx(1) and max(reads["Longhorn, Eq. 6"]) <= 1 + 1e-12
    assert reads["RetNet"][-1] == pytest.approx(32, rel=1e-3)
    key = ol.make_pairs(1, 16, 16, 0.0, torch.Generator().manual_seed(0))[0][0]
    by_hand = (1 - (1 - key.square() / 3) ** torch.tensor(ol.TIMES)[:, None]).sum(1)  # eps = 1/3; each number by itself
    assert reads["Longhorn, Eq. 7"] == pytest.approx(by_hand.tolist(), rel=1e-9)
    assert 10 < reads["Longhorn, Eq. 7"][-1] < 16  # on its way to N


def test_what_the_diagonal_costs():
    missed = lambda N, c: ol.diagonal_cost(N, c, 1 / 3, 1, 0)["missed"]
    assert abs(missed(1, 0.5)) < 1e-12
    assert 0 < missed(16, 0.0) < missed(16, 0.75) < 1 and missed(4, 0.75) < missed(16, 0.75)


def test_the_record_in_results_is_what_this_code_gives():
    """A part of it; ordinary rounding apart."""
    record = json.loads((ol.ROOT / "results" / "online_learning.json").read_text())
    close = lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-9)
    names = [r["name"] for r in record["recall"]["correlated"]]
    row, = ol.recall_rows([replace(ROW["RetNet"], tune=ROW["RetNet"].tune[:2])], 0.5, record["streams"], record["seed"])
    want = record["recall"]["correlated"][names.index("RetNet")]
    close(row["start"], want["start"])
    close(row["start_quartiles"], want["start_quartiles"])
    for entry in record["diagonal"]:
        if entry["N"] == 4 and entry["correlation"] in (0, 0.5):
            cost = ol.diagonal_cost(4, entry["correlation"], entry["writes"], 4, record["seed"])
            close(cost["missed"], entry["missed"])


FILE = """
import torch
name = "Longhorn that forgets"
tune = [{"gamma": 1.0, "key": 2.0}]

def objective(S, S_prev, k, x, p):
    return (S - p.gamma * S_prev).square().sum() + (p.beta * (S @ k - x).square()).sum()

def update(S_prev, k, x, p):
    S = p.gamma * S_prev
    return S + torch.outer(p.beta / (1 + p.beta * (k @ k)) * (x - S @ k), k)
"""


def test_an_added_file_goes_through_everything(tmp_path, monkeypatch, capsys):
    added, out = tmp_path / "added.py", tmp_path / "new" / "record.json"
    added.write_text(FILE)
    monkeypatch.setattr(ol, "UPDATES", [ROW[n] for n in ("linear attention", "Longhorn, Eq. 6", "Longhorn, Eq. 7")])
    monkeypatch.setattr(ol, "PAIRS", (4, 8, 16, 32, 64, 128))
    assert ol.main(["--quick", f"--add={added}", f"--out={out}"]) == 0
    printed, record = capsys.readouterr().out, json.loads(out.read_text())
    assert record["benchmark"] == "online_learning" and record["environment"]["torch"] and record["finished"]
    check = record["checks"][-1]
    assert check["name"] == "Longhorn that forgets" and check["minimises"] and check["off"] < 1e-12
    assert [r["name"] for r in record["recall"]["correlated"]][-1] == "Longhorn that forgets"
    assert "Longhorn that forgets" in record["written_again"]
    markdown = out.with_suffix(".md").read_text()
    assert all(line in printed for line in markdown.splitlines()) and markdown.count("| Longhorn that forgets") == 6
    assert out.with_suffix(".png").stat().st_size > 50_000
    # what is wrong is reported, and for a row of this file it is an error
    rows = [*ol.UPDATES, ol.read_update(added)]
    assert ol.unexpected(record, rows) == []
    for at in (0, -1):
        record["checks"][at]["minimises"] = False
    record["checks"][2]["mixers"]["longhorn"] = math.nan
    first, second = ol.unexpected(record, rows)
    assert first.startswith("linear attention: the update is not") and "longhorn: its mixer differs by nan" in second


@pytest.mark.parametrize("change,says", [
    (("    return S + torch.outer", "    S_prev += 1; return S + torch.outer"), "changed S_prev in place"),
    (("    return S + torch.outer(", "    return (S / 0) + torch.outer("), "finite, for keys of length 0.001"),
    (("    S = p.gamma * S_prev\n", "    return S_prev.float()\n"), r"returned .* torch.float32, expected the new S"),
    (("(S @ k - x).square()).sum()", "(S @ k - x).square())"), "objective must be a single number"),
    (("    return (S - p.gamma", "    return (S / 0 - p.gamma"), "objective must be a single number, and it and the"),
    (("def objective(", "def loss("), r"defines no function objective\(S, S_prev, k, x, p\)"),
    (('"Longhorn that forgets"', '"RetNet"'), "a row named 'RetNet' already exists"),
    (('{"gamma": 1.0,', '{"gama": 1.0,'), "tune must be a list of settings such as"),
    (("def objective(", "import nowhere\ndef objective("), "does not run .*No module named 'nowhere'"),
    (("tune = [", "tune = 5; _ = ["), "tune must be a list of settings"), (["--out=/"], "such as record.json"),
    (["--out=a.png"], "such as a.json"), (["--save", "--add=a.py"], "choose a file with --out")])
def test_mistakes_are_one_line(tmp_path, capsys, change, says):
    """In an added file, or on the command line."""
    if isinstance(change, list):
        with pytest.raises(SystemExit):
            ol.main(change)
        assert says in capsys.readouterr().err.splitlines()[-1]
        return
    assert change[0] in FILE
    path = tmp_path / "added.py"
    path.write_text(FILE.replace(*change))
    with pytest.raises(ConfigError, match=says) as error:
        ol.check(ol.read_update(path), 12, 0)
    assert "\n" not in str(error.value)
