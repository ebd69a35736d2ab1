"""Optimisers: AdamW for everything, or Muon for the layers' matrices and AdamW for the rest.

    decayed matrices   weights of linear maps and the embedding: weight_decay
    the rest           norms, biases, convolutions, the scans' own parameters: no decay
    --optimizer=muon   Muon (Jordan et al. 2024) for the layers' linear maps, AdamW for the rest

Each group has its own `initial_lr`, and the schedule in train.py scales all of them by one factor. To add an optimiser,
append it to the list that `build_optimizers` returns.
"""

import torch
import torch.nn as nn

from common.torch_private import muon, never_compiled
from runtime import distributed

AdamW = never_compiled(torch.optim.AdamW)


def build_optimizers(model, config):
    """A model's optimisers, with every parameter in exactly one group.

    config: optimizer ("adamw" or "muon"), learning_rate, weight_decay, beta1, beta2.
    """
    with_decay = set(decayed(model))
    matrices = muon_matrices(model) if config.optimizer == "muon" else {}
    for_muon, for_decay, the_rest = [], [], []
    for name, p in model.named_parameters():  # a shared parameter comes once
        if name in matrices:
            for_muon.append((p, matrices[name]))
        elif name in with_decay:
            for_decay.append(p)
        else:
            the_rest.append(p)
    optimizers = []
    if for_muon:
        optimizers.append(Muon(for_muon, lr=config.learning_rate, weight_decay=config.weight_decay))
    groups = []
    if for_decay:
        groups.append({"params": for_decay, "weight_decay": config.weight_decay})
    if the_rest:
        groups.append({"params": the_rest, "weight_decay": 0.0})
    betas = config.beta1, config.beta2
    optimizers.append(AdamW(groups, lr=config.learning_rate, betas=betas, fused=True))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def decayed(model):
    """Names of the parameters with weight decay: matrices of linear maps and the embedding."""
    named = dict(model.named_parameters())  # leaves out weights that a parametrization computes
    names = []
    for module_name, module in model.named_modules():
        name = f"{module_name}.weight"
        if isinstance(module, (nn.Linear, nn.Embedding)) and name in named:
            names.append(name)
    return names


def set_learning_rate(optimizers, factor):
    """Set every group's rate to `factor` times its initial rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group["initial_lr"]


def muon_matrices(model):
    """{name: rows of each part} for every linear map in the layers. A fused projection, such as in_proj for x and z,
    has several parts (initialisation.py)."""
    matrices = {}
    for branch_name, branch in model.branches():
        for name, module in branch.mixer.named_modules():
            if isinstance(module, nn.Linear):
                rows = getattr(module, "parts", None) or [module.out_features]
                matrices[f"{branch_name}.mixer.{name}.weight"] = rows
    return matrices


class Muon(never_compiled(torch.optim.Muon)):
    """torch.optim.Muon with the parts of a fused projection orthogonalised separately: x|z are two maps in one matrix.

    matrices: [(parameter (m, n), rows of its parts, which add up to m)]. Updates are scaled to AdamW's size (Liu et al.
    2025), so that one learning rate suits both. Orthogonalisation needs the whole matrix, so sharded matrices are
    gathered for the step, one at a time; their momentum stays sharded.
    """

    def __init__(self, matrices, lr, weight_decay):
        self.rows = [rows for _, rows in matrices]
        parameters = [p for p, _ in matrices]
        super().__init__(parameters, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, closure=None):
        (group,) = self.param_groups
        settings = {name: value for name, value in group.items() if name not in ("params", "initial_lr")}
        for p, rows in zip(group["params"], self.rows, strict=True):
            if p.grad is None:  # forward did not use this linear map
                continue
            state = self.state[p]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p.grad)
            momentum = state["momentum_buffer"]
            whole = distributed.whole(p)  # p itself, if it is not sharded
            whole_grad, whole_momentum = distributed.whole(p.grad), distributed.whole(momentum)
            parts = [list(matrix.split(rows)) for matrix in (whole, whole_grad, whole_momentum)]
            muon(*parts, **settings, has_complex=False)
            if whole is not p:
                p.copy_(distributed.cut_like(whole, p))
                momentum.copy_(distributed.cut_like(whole_momentum, momentum))
