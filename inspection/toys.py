"""Small models of the same code, for the check at the start (self_check.py)."""

import contextlib
import re
from dataclasses import replace

import torch

from initialisation import seed_device
from kernels import linear_attention, ops

T = 42  # tokens of a toy
CUTS = [1, 22, 1, 18]  # lengths of the pieces that are read through the state; the last one outgrows the first cache
DOCUMENTS = [1, 2, 13, 17, 9]  # lengths of packed documents
SHORT = {  # constants during the check: T tokens pass through at least five chunks, pieces or blocks of each kind
    (linear_attention, "CHUNK"): 8, (linear_attention, "GLA_CHUNK"): 8, (ops, "PIECE"): 8,
    (ops, "WINDOW_QUERIES"): 8, (ops, "LOGITS_AT_ONCE"): {"cpu": 64 * 8, "cuda": 64 * 8}}
IN_ONE = {(ops, "PIECE"): 1024}  # plain loops without recomputation, which imports torch._dynamo: 2 seconds of CPU
SIZES = dict(n_embd=32, n_head=2, vocab_size=64, mlp_multiple=16, block_size=256, window=8)


@contextlib.contextmanager
def constants(values):
    """In this context the constants {(module, name): value} have these values."""
    before = {key: getattr(*key) for key in values}
    try:
        for key, value in values.items():
            setattr(*key, value)
        yield
    finally:
        for key, value in before.items():
            setattr(*key, value)


def pair_of(model, device):
    """(toy, the same toy with plain operators, inputs), at the first sizes that run. Raises the first error if none
    do."""
    errors = []
    for sizes in sizes_to_try(model):
        try:
            toy = plain = toy_of(model, device, model.config.backend, **sizes)
            if model.config.backend != "torch":
                plain = toy_of(model, device, "torch", **sizes)
            batch = [a.to(device) for a in batch_of(toy)]
            with torch.no_grad(), repeated(toy):
                toy(*batch, loss_only=True)
            return toy, plain, batch
        except Exception as error:  # such as a width that its heads do not divide
            errors.append(error)
    raise errors[0]


def sizes_to_try(model):
    """Settings of toys: small; as wide as two heads; as wide as the model; and more of its layers and other sizes."""
    if hasattr(model, "toy"):
        return [{}]
    c = model.config
    two_heads, as_wide = {"n_embd": 2 * (c.n_embd // c.n_head)}, dict(n_embd=c.n_embd, n_head=c.n_head)
    sizes = [SIZES, SIZES | two_heads, SIZES | as_wide | {"mlp_multiple": c.mlp_multiple}, {}, SIZES | {"whole": True}]
    if sum(p.numel() for p in model.parameters()) < 3e7:
        sizes.append({"whole": True})
    return sizes


def toy_of(model, device, backend, whole=False, **sizes):
    """A small model of the same code, in training mode: of its layers those at the first and the last place of each
    family, unless `whole`. `kept` are their numbers in the model. It has the same weights with every backend."""
    torch.manual_seed(0)
    if hasattr(model, "toy"):
        toy = model.toy(backend)
        toy.kept = range(len(getattr(toy, "layers", [])))
        return scattered(toy.to(device))
    config = replace(model.config, **sizes, backend=backend, end_of_text=0)
    ends = {}
    for i, family in enumerate(config.families):
        ends.setdefault(family, [i, i])[1] = i
    config.places = range(config.n_layer) if whole else sorted(set(sum(ends.values(), [])))
    toy = type(model)(config)
    toy.kept = config.places
    if len(toy.layers) > len(toy.kept):  # built by code that does not look at `places`
        toy.layers = torch.nn.ModuleList(toy.layers[i] for i in toy.kept)
    return scattered(toy.to(device))


@torch.no_grad()
def scattered(toy):
    """The toy, its weights scattered as training would, so that no branch is too small or symmetric to show an edit. A
    small embedding and a large last norm reveal a different eps, or a cap on the logits."""
    for name, p in toy.named_parameters():
        if name == "norm.weight":
            p.mul_(30)
        elif name != "embed.weight":
            p.add_(torch.randn_like(p) * (0.5 * p.shape[-1] ** -0.5 if p.dim() > 1 else 0.1))
    return toy


def original(toy, name):
    """The name that a toy's parameter has in the model."""
    return re.sub(r"layers\.(\d+)", lambda match: f"layers.{toy.kept[int(match[1])]}", name, count=1)


def batch_of(toy):
    """(x, y) for a toy: its own toy_batch(); or tokens and targets (2, T); or one row of packed documents."""
    if hasattr(toy, "toy_batch"):
        return toy.toy_batch()
    idx = torch.randperm(2 * T + 2).view(2, T + 1) % toy.config.vocab_size  # all tokens of a small vocabulary
    if toy.config.documents == "pack":
        idx = idx[:1].clamp(min=1)
        idx[0, torch.tensor(DOCUMENTS).cumsum(0) - 1] = toy.config.end_of_text
    return idx[:, :-1], idx[:, 1:]


def document_starts(rows):
    """(B, T) of rows (B, T, d): True where packed documents of the lengths in DOCUMENTS begin; the last is longer."""
    starts = torch.zeros(rows.shape[:2], dtype=torch.bool, device=rows.device)
    starts[:, torch.tensor(DOCUMENTS[:-1]).cumsum(0)] = True
    return starts


@contextlib.contextmanager
def repeated(model):
    """In this context the model draws the same random numbers every time; then its buffers are as they were."""
    seed_device(next(model.parameters()), 1)
    buffers = [(m, name, b, b.clone()) for m in model.modules() for name, b in m.named_buffers(recurse=False)]
    yield
    with torch.no_grad():
        for module, name, buffer, value in buffers:
            setattr(module, name, buffer.copy_(value))
