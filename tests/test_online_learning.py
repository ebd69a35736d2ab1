"""experiments/objectives.py: every claim of its table, the minimiser behind it, the mixers that train, and --add.

Most tests check that something wrong is noticed: a comparison of nothing would also give a table of zeros.
"""

import functools
import inspect
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import mixers
import model
from common.errors import ConfigError
from experiments import objectives as ol
from experiments.objectives import UPDATES
from tools import parameters

pytestmark = pytest.mark.usefixtures("one_thread")
DRAWS = 5
ROW = {row.name: row for row in UPDATES}
TRAINED = [(family, row) for row in UPDATES for family in row.mixers]


@pytest.mark.parametrize("name", ROW)
def test_each_claim_is_as_the_table_says_and_an_error_of_a_millionth_is_noticed(name):
    row = ROW[name]
    checked = ol.check(row, DRAWS, seed=1)
    assert checked["found"] and checked["smallest_curvature"] > 0
    assert checked["minimises"] == row.holds and (checked["off"] <= 1e-8) == row.holds
    if row.holds:
        wrong = replace(row, update=lambda *a: row.update(*a) * (1 + 1e-6))
        assert not ol.check(wrong, 3, seed=1)["minimises"]
    else:
        assert checked["off_ordinary"] > 0.01 and row.note


def test_an_update_that_is_wrong_for_long_keys_alone_does_not_pass():
    update = lambda S, k, x, p: ol.longhorn_exact(S, k, x, p) * (1 + (k.norm() > 5))
    assert not ol.check(replace(ROW["Longhorn, Eq. 6"], update=update), 9, seed=1)["minimises"]


def test_minimiser_finds_a_known_minimum():
    target = torch.tensor([[1.0, -2.0, 300.0], [1e5, 0.0, 1e-3]], dtype=torch.float64)
    weight = torch.tensor([[1.0, 1e6, 1e-3], [1.0, 2.0, 3.0]], dtype=torch.float64)
    S, low, step = ol.minimise(lambda S: (weight * (S - target).square()).sum(), torch.zeros(2, 3, dtype=torch.float64))
    assert ((S - target).abs() <= 1e-10 * target.abs().clamp(min=1e-3)).all() and step < 1e-10
    assert low == pytest.approx(1e-9, rel=1e-6)
    S, _, step = ol.minimise(lambda S: ((S - target).cosh().log() + 1e-3 * (S - target).square()).sum(),
                             target + torch.tensor([5.0, -5.0, 8.0]))  # not a quadratic
    assert (S - target).abs().max() < 1e-7 and step < 1e-8


@pytest.mark.parametrize("loss,says", [
    (lambda S, S_prev, k, x, p: -(S - S_prev).square().sum(), "no unique minimum"),
    (lambda S, S_prev, k, x, p: (S @ k - x).square().sum(), "no unique minimum"),
    (lambda S, S_prev, k, x, p: (S - S_prev).pow(3).sum(), "NO"),
    (lambda S, S_prev, k, x, p: (S - S_prev).abs().sum() + 0.1 * S.square().sum(), "no")])
def test_objectives_without_a_minimum_to_find_do_not_pass(loss, says):
    checked = ol.check(replace(ROW["linear attention"], objective=loss), 2, seed=0)
    assert not checked["minimises"] and not checked["found"] and says in ol.verdict(checked)


def test_draws_reach_the_extremes():
    S, k, x, p = zip(*ol.draws(48, False, 0), strict=True)
    lengths, betas = [a.norm().item() for a in k], torch.cat([a.beta for a in p])
    assert min(lengths) == pytest.approx(1e-3) and max(lengths) == pytest.approx(1e3)
    assert betas.min() == 1e-6 and betas.max() == 1 - 1e-6
    assert any((a == 0).all() for a in S) and any(a.abs().max() > 50 for a in S)
    assert all(abs(length - 1) < 1e-12 for length in lengths[:16])


def test_every_recurrent_family_has_a_row():
    assert ol.families  # importing it adds the families of mixers.py and families/
    rows = dict(TRAINED)
    assert set(parameters.TABLE1) - {"llama"} <= rows.keys() <= set(model.FAMILIES) and len(rows) == len(TRAINED)


@pytest.mark.parametrize("family, row", TRAINED)
def test_mixer_is_the_update_of_its_row(family, row):
    for backend in ("", "torch"):
        assert ol.mixer_off(family, row.update, backend) <= ol.MIXER_HOLDS
    others = {"longhorn": ol.longhorn_exact, "longhorn_exact": ol.longhorn,
              "rwkv4": lambda S, k, x, p: 0.5 * S + 0.5 * x}
    assert ol.mixer_off(family, others.get(family, ol.linear_attention)) > 100 * ol.MIXER_HOLDS


def test_a_changed_mixer_is_noticed(monkeypatch):
    retention = mixers.retention
    changed = lambda q, k, v, g, *args, **kwargs: retention(q, k, v, 1.01 * g, *args, **kwargs)
    changed.__signature__ = inspect.signature(retention)
    monkeypatch.setattr(mixers, "retention", changed)
    assert ol.mixer_off("retnet", ol.retnet) > 10 * ol.MIXER_HOLDS
    monkeypatch.setattr(model.Longhorn, "scan", lambda self, x, dt, k, q, z, h0: (x, h0))  # does not call the operator
    with pytest.raises(RuntimeError, match="longhorn_scan 0 times"):
        ol.mixer_off("longhorn", ol.longhorn)


def test_the_diagonal_costs_as_much_as_computed_by_hand():
    """In the computation by hand, the minimiser takes the place of Eq. 6, because it does not know the update."""
    assert abs(ol.diagonal_cost(1, 0.5, 1 / 3, 1, 0)["missed"]) < 1e-12  # one key has no others to disturb
    keys, values = ol.make_pairs(64, 2, 4, 0.5, seed=0)
    assert (keys.norm(dim=1) - 1).abs().max() < 1e-12 and (keys @ keys.T).mean() == pytest.approx(0.5, abs=0.1)
    S, p = torch.zeros(2, 4).double(), SimpleNamespace(beta=0.5 * torch.ones(2).double())
    left = 0.0
    possible = 0.0
    for t, (k, x) in enumerate(zip(keys, values, strict=True)):  # a key of length 1 writes a third: 0.5 / (1 + 0.5)
        before, S = S, ol.longhorn(S, k, x, p)
        if t >= 32:
            loss = functools.partial(ol.longhorn_loss, S_prev=before, k=k, x=x, p=p)
            least = loss(ol.minimise(ol.longhorn_loss, before, before, k, x, p)[0])
            left += loss(S) - least
            possible += loss(before) - least
    missed = ol.diagonal_cost(4, 0.5, 1 / 3, 1, 0, d=2)["missed"]
    assert missed == pytest.approx((left / possible).item(), rel=1e-9)


FILE = """
import torch
name = "Longhorn that forgets"

def objective(S, S_prev, k, x, p):
    return (S - p.gamma * S_prev).square().sum() + (p.beta * (S @ k - x).square()).sum()

def update(S_prev, k, x, p):
    S = p.gamma * S_prev
    return S + torch.outer(p.beta / (1 + p.beta * (k @ k)) * (x - S @ k), k)
"""


def test_an_added_file_goes_through_everything(tmp_path, monkeypatch, capsys):
    added, out = tmp_path / "added.py", tmp_path / "new" / "record.json"
    added.write_text(FILE)
    for name, value in {"UPDATES": [ROW["Longhorn, Eq. 7"]], "DRAWS": 6, "STREAMS": 2, "COSINES": (0.0, 0.5)}.items():
        monkeypatch.setattr(ol, name, value)
    assert ol.main([f"--add={added}", f"--out={out}"]) == 0
    record, markdown = json.loads(out.read_text()), out.with_suffix(".md").read_text()
    assert record["benchmark"] == "online_learning" and record["finished"] and record["draws"] == 6
    eq_7, mine = record["checks"]
    assert not eq_7["minimises"] and mine["minimises"]
    assert mine["name"] == "Longhorn that forgets" and mine["off"] < 1e-12
    assert markdown.strip() in capsys.readouterr().out
    cells = lambda row: next(line for line in markdown.splitlines() if line.startswith(row)).split("|")
    shown = [cell.strip() for cell in cells("| Longhorn, Eq. 7")[3:6]]
    assert shown == ["NO", f"{eq_7['off_ordinary']:.0e}", f"{eq_7['off']:.0e}"]
    missed = [c["missed"] for c in record["diagonal"] if c["N"] == 16 and c["writes"] == 0.9]
    assert [float(cell) for cell in cells("| 16 | 0.90")[3:5]] == pytest.approx(missed, abs=0.005)
    assert out.with_suffix(".png").stat().st_size > 20_000


def test_a_result_against_the_files_claim_is_named_and_is_an_error(tmp_path, monkeypatch, capsys):
    added = tmp_path / "added.py"
    added.write_text(FILE)
    rows = [ROW["linear attention"], ROW["Longhorn, Eq. 7"], ol.read_update(added)]
    checks = [{"minimises": row.holds, "off": 0.5, "mixers": {family: 1e-5 for family in row.mixers}} for row in rows]
    assert ol.unexpected({"checks": checks}, rows) == []
    for wrong in checks[0], checks[2]:  # an added row claims nothing
        wrong["minimises"] = False
    checks[1]["mixers"]["longhorn"] = math.nan
    first, second = ol.unexpected({"checks": checks}, rows)
    assert first.startswith("linear attention: the update is not") and "longhorn: its mixer differs by nan" in second
    broken = replace(ROW["linear attention"], update=ol.retnet)
    for name, value in {"UPDATES": [broken], "DRAWS": 3, "COSINES": ()}.items():
        monkeypatch.setattr(ol, name, value)
    monkeypatch.setattr(ol.figures, "draw", lambda panels, path: None)
    assert ol.main([f"--out={tmp_path}/a.json"]) == 1
    assert "contrary to this file's claim" in capsys.readouterr().err


@pytest.mark.parametrize("old, new, word", [
    ("    return S + torch.outer(", "    return (S / 0) + torch.outer(", "inf"),
    ("    S = p.gamma * S_prev\n", "    return S_prev.float()\n", "torch.float32"),
    ("(S @ k - x).square()).sum()", "(S @ k - x).square())", r"of shape \(\)"),
    ("def objective(", "def loss(", "define objective"),
    ("def objective(", "import nowhere\ndef objective(", "nowhere")])
def test_a_mistake_in_an_added_file_is_one_line(tmp_path, old, new, word):
    assert old in FILE
    path = tmp_path / "added.py"
    path.write_text(FILE.replace(old, new))
    with pytest.raises(ConfigError, match=word) as error:
        ol.check(ol.read_update(path), 12, 0)
    assert "\n" not in str(error.value)
