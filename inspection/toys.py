"""Small models built from the same code, for the check at the start (self_check.py)."""

import contextlib
import re
from dataclasses import replace

import torch

from initialisation import seed_device
from kernels import linear_attention, ops

T = {False: 41, True: 23}  # tokens in each of a toy's two rows; True: of packed documents
CUTS = (1, 12, 13)  # where the pieces read through the state begin; the last piece outgrows the first cache
DOCUMENTS = ([1, 2, 7, 13], [7, 1, 2, 13])  # lengths of the documents in each row
IN_ONE = {(ops, "PIECE"): 1024}  # plain loops in one piece: recomputing would import torch._dynamo, 2 seconds of CPU
SIZES = dict(n_embd=32, n_head=2, vocab_size=64, mlp_multiple=16, block_size=256, window=8)


def short(packed):
    """Constants during the check. They are so small that the tokens fill at least five chunks, pieces or blocks of each
    kind, and a single target is left over."""
    size = 4 if packed else 8
    return {(linear_attention, "CHUNK"): size, (linear_attention, "GLA_CHUNK"): size, (ops, "PIECE"): size,
            (ops, "WINDOW_QUERIES"): size, (ops, "LOGITS_AT_ONCE"): {"cpu": 64 * 9, "cuda": 64 * 9}}


def is_packed(model):
    return getattr(model.config, "documents", "join") == "pack"


@contextlib.contextmanager
def constants(values):
    """Set the constants {(module, name): value} inside this context."""
    before = {key: getattr(*key) for key in values}
    try:
        for key, value in values.items():
            setattr(*key, value)
        yield
    finally:
        for key, value in before.items():
            setattr(*key, value)


def sizes_to_try(model):
    """Settings of toys to try in turn: small; as wide as two heads; with the model's own sizes; with all its layers."""
    if hasattr(model, "toy"):
        return [{}]
    if model.config.n_embd % model.config.n_head:  # in the toy, too: a mixer may refuse such heads
        return [SIZES | {"n_head": 3}, {}]
    two_heads = 2 * (model.config.n_embd // model.config.n_head)
    sizes = [SIZES, SIZES | {"n_embd": two_heads}, {}, SIZES | {"whole": True}]
    if sum(p.numel() for p in model.parameters()) < 3e7:
        sizes.append({"whole": True})
    return sizes


def toy_of(model, device, backend, whole=False, **sizes):
    """Build a small model from the same code, in training mode, with the same weights for every backend. It has the
    first and the last layer of each family, or all layers if `whole`; config.places lists them."""
    torch.manual_seed(0)
    if hasattr(model, "toy"):
        return scattered(model.toy(backend).to(device))
    config = replace(model.config, **sizes, backend=backend, end_of_text=0)
    families = config.families
    last = {family: i for i, family in enumerate(families)}
    config.places = range(len(families)) if whole else sorted({*map(families.index, families), *last.values()})
    toy = type(model)(config)
    if len(toy.layers) > len(config.places):  # built by code that ignores `places`
        toy.layers = torch.nn.ModuleList(toy.layers[i] for i in config.places)
    return scattered(toy.to(device))


@torch.no_grad()
def scattered(toy):
    """The toy with randomised weights, as after training, so that no branch is too small or symmetric to show an edit.
    A small embedding and a large last norm reveal a different eps, or a cap on the logits."""
    for name, p in toy.named_parameters():
        if name == "norm.weight":
            p.mul_(30)
        elif name != "embed.weight":
            p.add_(torch.randn_like(p) * (0.5 * p.shape[-1] ** -0.5 if p.dim() > 1 else 0.1))
        if "bias" in name:  # biases of step sizes start below 0
            p[::2].normal_(0.0, 0.5)
    return toy


def original(toy, name):
    """The name that a toy's parameter has in the model."""
    return re.sub(r"layers\.(\d+)", lambda match: f"layers.{toy.config.places[int(match[1])]}", name, count=1)


def batch_of(toy):
    """(x, y) for a toy: its own toy_batch(); or tokens and targets (2, T), packed as DOCUMENTS says. Some targets are
    -1."""
    if hasattr(toy, "toy_batch"):
        return toy.toy_batch()
    packed = is_packed(toy)
    idx = torch.randperm(2 * T[packed] + 2).view(2, -1) % toy.config.vocab_size  # all tokens of a small vocabulary
    if packed:
        idx.clamp_(min=1)
        for row, lengths in zip(idx, DOCUMENTS, strict=True):
            row[torch.tensor(lengths).cumsum(0) - 1] = toy.config.end_of_text
    x = idx[:, :-1]
    y = idx[:, 1:].clone()
    y[:, ::7] = -1
    return x, y


@contextlib.contextmanager
def repeated(model):
    """In this context the model draws the same random numbers every time; afterwards its buffers are restored. Yields a
    list, to which the end of the context adds what has changed: the random state, and names of buffers."""
    changed = []
    p = next(model.parameters())
    seed_device(p, 1)
    random = random_state(p)
    buffers = [(m, *named, named[1].clone()) for m in model.modules() for named in m.named_buffers(recurse=False)]
    yield changed
    if not torch.equal(random, random_state(p)):
        changed.append("random state")
    with torch.no_grad():
        for module, name, buffer, value in buffers:
            if not torch.equal(buffer, value):
                changed.append(name)
            setattr(module, name, buffer.copy_(value))


def random_state(p):
    """PyTorch's random state on the CPU and on the parameter's device."""
    states = [torch.get_rng_state()]
    if p.is_cuda:
        states.append(torch.cuda.get_rng_state(p.device))
    return torch.cat(states)
