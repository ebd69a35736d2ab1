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
    named, matrices, optimizers = dict(model.named_parameters()), {}, []
    with_decay = set(decayed(model))
    if config.optimizer == "muon":
        matrices = {name: rows for name, rows in muon_matrices(model).items() if name in named}  # shared ones once
        optimizers.append(Muon([(named[name], rows) for name, rows in matrices.items()], lr=config.learning_rate,
                               weight_decay=config.weight_decay))
    rest = {name: p for name, p in named.items() if name not in matrices}
    groups = [{"params": [p for name, p in rest.items() if name in with_decay], "weight_decay": config.weight_decay},
              {"params": [p for name, p in rest.items() if name not in with_decay], "weight_decay": 0.0}]
    optimizers.append(AdamW([group for group in groups if group["params"]], lr=config.learning_rate,
                            betas=(config.beta1, config.beta2), fused=True))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def decayed(model):
    """Names of the parameters with weight decay: matrices of linear maps and the embedding."""
    named = dict(model.named_parameters())  # without what a parametrization computes
    return [f"{name}.weight" for name, m in model.named_modules()
            if isinstance(m, (nn.Linear, nn.Embedding)) and f"{name}.weight" in named]


def set_learning_rate(optimizers, factor):
    """Set every group's rate to `factor` times its initial rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group["initial_lr"]


def muon_matrices(model):
    """{name: rows of each part} of every linear map in the layers. A fused projection, such as in_proj for x and z, has
    several parts (initialisation.py)."""
    return {f"{name}.mixer.{inner}.weight": getattr(module, "parts", None) or [module.out_features]
            for name, branch in model.branches() for inner, module in branch.mixer.named_modules()
            if isinstance(module, nn.Linear)}


class Muon(never_compiled(torch.optim.Muon)):
    """torch.optim.Muon with the parts of a fused projection orthogonalised separately: x|z are two maps in one matrix.

    matrices: [(parameter (m, n), rows of its parts, which add up to m)]. Updates are scaled to AdamW's size (Liu et al.
    2025), so that one learning rate suits both. A sharded matrix is gathered for its step, one matrix at a time,
    because orthogonalisation needs all of it; its momentum stays sharded.
    """

    def __init__(self, matrices, lr, weight_decay):
        self.rows = [rows for _, rows in matrices]
        super().__init__([p for p, _ in matrices], lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")

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
            p_whole, grad, momentum_whole = map(distributed.whole, (p, p.grad, momentum))  # unchanged if not sharded
            muon(*(list(a.split(rows)) for a in (p_whole, grad, momentum_whole)), **settings, has_complex=False)
            if p_whole is not p:
                p.copy_(distributed.cut_like(p_whole, p))
                momentum.copy_(distributed.cut_like(momentum_whole, p))
