"""optim.py: the group of each parameter, and Muon on fused projections against torch.optim.Muon on separate matrices.

    python -m pytest tests/test_optim.py
"""

from types import SimpleNamespace

import pytest
import torch
from helpers import table

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


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("family, change", [*((family, lambda lm: None) for family in FAMILIES), ("longhorn", share),
                                            ("longhorn", compute)])
def test_every_parameter_is_in_one_group(family, change, optimizer):
    """This includes a parameter that two maps share, and one from which a parametrization computes a weight."""
    lm, optimizers = build(family, optimizer, change)
    names = {p: name for name, p in lm.named_parameters()}
    matrices = {name for p, name in names.items() if name.endswith(".weight") and p.dim() == 2}
    of_muon = {name for name in matrices if ".mixer." in name and optimizer == "muon"}
    assert set(optim.decayed(lm)) == matrices
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    expected = [(of_muon, 0.1)] if of_muon else []
    expected += [(matrices - of_muon, 0.1), (set(names.values()) - matrices, 0.0)]
    assert [({names[p] for p in group["params"]}, group["weight_decay"]) for group in groups] == expected
    assert sum(len(group["params"]) for group in groups) == len(names) and {group["lr"] for group in groups} == {1e-2}
    assert [type(optimizer) for optimizer in optimizers] == ([Muon] if of_muon else []) + [optim.AdamW]
    assert optimizers[-1].defaults["betas"] == (0.9, 0.95)


def test_the_schedule_scales_each_groups_own_rate():
    _, optimizers = build("longhorn", "muon")
    optimizers[1].param_groups[1]["initial_lr"] = 5.0
    for factor in (0.5, 0.1, 1.0):  # times the initial rate, not the last one
        set_learning_rate(optimizers, factor)
        assert [o.param_groups[0]["lr"] for o in optimizers] == pytest.approx([factor * 1e-2] * 2)
        assert optimizers[1].param_groups[1]["lr"] == pytest.approx(factor * 5.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_muon_treats_the_parts_of_a_fused_projection_as_separate_matrices(family):
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


FUSED = """
longhorn  in_proj.weight   64 64
mamba     x_proj.weight    2 16 16
llama     qkv.weight       32 32 32
gla       qk.weight        16 16
retnet    vg.weight        56 56
deltanet  qkv.weight       32 32 32
llama     out_proj.weight  32
"""


@pytest.mark.parametrize("family, name, rows", table(FUSED))
def test_fused_maps_have_the_right_parts(family, name, rows):
    parts = muon_matrices(LM(ModelConfig(model=family, **SMALL)))[f"layers.0.branches.0.mixer.{name}"]
    assert " ".join(map(str, parts)) == rows
