"""optim.py: which parameter goes where, and Muon on fused projections against torch.optim.Muon on separate matrices.

    python -m pytest tests/test_optim.py
"""

from types import SimpleNamespace

import pytest
import torch

import families  # noqa: F401
import optim
from model import FAMILIES, LM, ModelConfig
from optim import Muon, build_optimizers, muon_matrices, set_learning_rate

SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 64, "mlp_multiple": 16}


def build(family, optimizer, change=lambda lm: None):
    torch.manual_seed(0)
    lm = LM(ModelConfig(model=family, **SMALL))
    change(lm)
    return lm, build_optimizers(lm, SimpleNamespace(optimizer=optimizer, learning_rate=1e-2, weight_decay=0.1,
                                                    beta1=0.9, beta2=0.95))


def share(lm):
    first, second = (layer.branches[0].mixer for layer in lm.layers)
    second.in_proj, second.out_proj.weight = first.in_proj, first.out_proj.weight


def compute(lm):
    torch.nn.utils.parametrizations.weight_norm(lm.layers[1].branches[0].mixer.out_proj)


def described(lm, optimizers):
    """(names of parameters, weight decay) of each group."""
    names = {p: name for name, p in lm.named_parameters()}
    groups = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            groups.append((sorted(names[p] for p in group["params"]), group["weight_decay"]))
    return groups


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("family, change", [*((family, lambda lm: None) for family in FAMILIES), ("longhorn", share),
                                            ("longhorn", compute)])
def test_every_parameter_is_in_one_group(family, change, optimizer):
    """Also a parameter that two maps share, or from which a parametrization computes the weight."""
    lm, optimizers = build(family, optimizer, change)
    names = {name for name, _ in lm.named_parameters()}
    decayed = set(optim.decayed(lm))
    assert decayed == {name for name in names if name.endswith(".weight") and lm.get_parameter(name).dim() == 2}
    matrices = {name for name in decayed if ".mixer." in name and optimizer == "muon"}
    expected = [(sorted(decayed - matrices), 0.1), (sorted(names - decayed), 0.0)]
    if matrices:
        expected.insert(0, (sorted(matrices), 0.1))
    assert described(lm, optimizers) == expected
    assert isinstance(optimizers[0], Muon) == (optimizer == "muon") and len(optimizers) == 1 + bool(matrices)
    adamw = optimizers[-1].defaults
    assert (adamw["lr"], adamw["betas"]) == (1e-2, (0.9, 0.95)) and optimizers[0].param_groups[0]["lr"] == 1e-2


def test_the_schedule_scales_each_groups_own_rate():
    _, optimizers = build("longhorn", "muon")
    optimizers[1].param_groups[1]["initial_lr"] = 5.0
    for factor in (0.5, 0.1, 1.0):  # times the initial rate, not the last one
        set_learning_rate(optimizers, factor)
        assert [o.param_groups[0]["lr"] for o in optimizers] == pytest.approx([factor * 1e-2] * 2)
        assert optimizers[1].param_groups[1]["lr"] == pytest.approx(factor * 5.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_a_fused_projection_are_matrices_of_their_own(family):
    """Two steps equal those of torch.optim.Muon on copies of the separate maps."""
    lm, optimizers = build(family, "muon")
    rows = muon_matrices(lm)
    assert all(sum(parts) == len(lm.get_parameter(name)) for name, parts in rows.items())
    separate = {name: [torch.nn.Parameter(part.clone()) for part in lm.get_parameter(name).detach().split(parts)]
                for name, parts in rows.items()}
    plain = torch.optim.Muon([part for parts in separate.values() for part in parts], lr=1e-2, weight_decay=0.1,
                             adjust_lr_fn="match_rms_adamw")
    for step in range(2):
        for name, parts in separate.items():
            grad = torch.randn(lm.get_parameter(name).shape, generator=torch.Generator().manual_seed(step + len(name)))
            lm.get_parameter(name).grad = grad.clone()
            for part, g in zip(parts, grad.split(rows[name]), strict=True):
                part.grad = g.clone()
        optimizers[0].step()
        plain.step()
    for name, parts in separate.items():
        assert torch.equal(lm.get_parameter(name), torch.cat([part.detach() for part in parts])), name
    optimizers[0].zero_grad()
    assert all(lm.get_parameter(name).grad is None for name in rows)
    optimizers[0].step()  # must not fail: a map that forward does not use has no gradient


@pytest.mark.parametrize("family, name, rows", [
    ("longhorn", "in_proj.weight", [64, 64]), ("mamba", "x_proj.weight", [2, 16, 16]),
    ("llama", "qkv.weight", [32] * 3),
    ("gla", "qk.weight", [16, 16]), ("retnet", "vg.weight", [56, 56]), ("deltanet", "qkv.weight", [32] * 3),
    ("llama", "out_proj.weight", [32])])
def test_which_maps_are_fused(family, name, rows):
    assert muon_matrices(LM(ModelConfig(model=family, **SMALL)))[f"layers.0.branches.0.mixer.{name}"] == rows
