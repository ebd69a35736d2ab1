"""Small models of the same code, and what one run of them computes: for the check at the start (self_check.py)."""

import contextlib
import itertools
import math
import re
from dataclasses import replace

import torch
import torch.nn.functional as F

from initialisation import seed_device
from kernels import linear_attention, ops

T = 42  # tokens of a toy
CUTS = [1, 22, 1, 18]  # lengths of the pieces that are read through the state; the last one outgrows the first cache
DOCUMENTS = [1, 2, 13, 17, 9]  # lengths of packed documents
SHORT = {  # constants during the check: T tokens pass through at least five chunks, pieces or blocks of each kind
    (linear_attention, "CHUNK"): 8, (linear_attention, "GLA_CHUNK"): 8, (ops, "PIECE"): 8,
    (ops, "WINDOW_QUERIES"): 8, (ops, "LOGITS_AT_ONCE"): {"cpu": 64 * 8, "cuda": 64 * 8}}
IN_ONE = {(ops, "PIECE"): 1024}  # the plain loops without recomputation
SIZES = dict(n_embd=32, n_head=2, vocab_size=64, mlp_multiple=16, block_size=256, window=8)
LEAST = 1e-5  # a difference below this is rounding


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


def toys(model, device):
    """(toy, the same toy with plain operators, inputs), at the first sizes that run. Raises the first error if none
    do."""
    errors = []
    for sizes in sizes_to_try(model):
        try:
            pair = []
            for backend in dict.fromkeys((model.config.backend, "torch")):
                torch.manual_seed(0)  # what the constructors draw, other than parameters, is the same in both
                pair.append(toy_of(model, backend, **sizes).to(device))
            toy, plain = pair[0], pair[-1]
            scatter(toy)
            with torch.no_grad():
                for a, b in itertools.chain(*(zip(getattr(plain, kind)(), getattr(toy, kind)(), strict=True)
                                              for kind in ("parameters", "buffers"))):
                    a.copy_(b)
                batch = [a.to(device) for a in batch_of(toy)]
                with repeated(toy):
                    toy(*batch, loss_only=True)
            return toy, plain, batch
        except Exception as error:  # such as a width that its heads do not divide
            errors.append(error)
    raise errors[0]


def sizes_to_try(model):
    """Settings of toys: small; as wide as two heads; as wide as the model; and more of its layers and other sizes."""
    if hasattr(model, "toy"):
        return [{}]
    c, small_enough = model.config, sum(p.numel() for p in model.parameters()) < 3e7
    wide = dict(n_embd=c.n_embd, n_head=c.n_head, mlp_multiple=c.mlp_multiple)
    sizes = [SIZES, {**SIZES, "n_embd": 2 * (c.n_embd // c.n_head)}, {**SIZES, **wide}, {}, {**SIZES, "whole": True}]
    return sizes + [{"whole": True}] * small_enough


def toy_of(model, backend, whole=False, **sizes):
    """A small model of the same code, in training mode: of its layers those at the first and the last place of each
    family, unless `whole`. `kept` are their numbers in the model."""
    if hasattr(model, "toy"):
        toy = model.toy(backend)
        toy.kept = range(len(getattr(toy, "layers", [])))
        return toy
    config = replace(model.config, **sizes, backend=backend, documents="join", end_of_text=0)
    places = {}
    for i, family in enumerate(config.families):
        places.setdefault(family, [i, i])[1] = i
    config.places = range(config.n_layer) if whole else sorted({i for ends in places.values() for i in ends})
    toy = type(model)(config)
    toy.kept = config.places
    if len(toy.layers) > len(toy.kept):  # built by code that does not look at `places`
        toy.layers = torch.nn.ModuleList(toy.layers[i] for i in toy.kept)
    return toy


def original(toy, name):
    """The name that a toy's parameter has in the model."""
    return re.sub(r"layers\.(\d+)", lambda match: f"layers.{toy.kept[int(match[1])]}", name, count=1)


def batch_of(toy):
    """(x, y) for a toy: its own toy_batch(), or tokens and targets (2, T)."""
    if hasattr(toy, "toy_batch"):
        return toy.toy_batch()
    idx = torch.randperm(2 * T + 2).view(2, T + 1) % toy.config.vocab_size  # all tokens of a small vocabulary
    return idx[:, :-1], idx[:, 1:]


def packed_batch(toy, batch):
    """(x, y), one row of documents of the lengths in DOCUMENTS."""
    idx = torch.cat([batch[0][:1], batch[1][:1, -1:]], 1).clamp(min=1)  # (1, T + 1)
    idx[0, torch.tensor(DOCUMENTS).cumsum(0) - 1] = toy.config.end_of_text
    return idx[:, :-1], idx[:, 1:]


def random_rows(toy, length=T):
    device = next(toy.parameters()).device
    return torch.randn(2, length, toy.config.n_embd, device=device, generator=torch.Generator(device).manual_seed(2))


def document_starts(x):
    """(B, T) of x (B, T, d): True where packed documents of the lengths in DOCUMENTS begin; the last one is longer if T
    is."""
    starts = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    starts[:, torch.tensor(DOCUMENTS[:-1]).cumsum(0)] = True
    return starts


@torch.no_grad()
def scatter(model):
    """Scatter the weights as training would, so that no branch is too small or symmetric to show an edit. A small
    embedding and a large last norm reveal a different eps, or a cap on the logits."""
    for name, p in model.named_parameters():
        if name == "norm.weight":
            p.mul_(30)
        elif name != "embed.weight":
            p.add_(torch.randn_like(p) * (0.5 * p.shape[-1] ** -0.5 if p.dim() > 1 else 0.1))
    return model


# -------------------------------------------------------------------------------------------------------------- one run

def loss_alone(model, x, y):
    """The loss as training computes it."""
    return model(x, y, loss_only=True)[1]


def loss_of_logits(model, x, y):
    return model(x, y)[1]


def loss_of_whole(model, x, y):
    """The plain loss of the logits without targets: whatever loss is trained on, sampling follows these."""
    return F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten())


def loss_through_state(model, x, y):
    return F.cross_entropy(through_state(model, x).flatten(0, 1), y.flatten())


def through_state(model, x):
    """The logits of x, read in the pieces of CUTS."""
    state, parts = model.initial_state(len(x)), []
    for part in x.split(CUTS, 1):
        logits, _, state = model(part, state=state)
        parts.append(logits)
    return torch.cat(parts, 1)


def gradients(model, loss_of, batch):
    """{name: value} of the loss and of every parameter's gradient, if it has one, in float64 on the CPU."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with repeated(model), torch.enable_grad():
        loss = loss_of(model, *batch)
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    grads = {f"the gradient of {n}": g for n, g in zip(named, grads, strict=True) if g is not None}
    return {name: in_float64(a) for name, a in {"the loss": loss, **grads}.items()}


def output_and_gradients(branch, x, state=None, cuts=None):
    """{name: value} of a branch's or a layer's output for x, or from a state in the pieces of `cuts`, and the gradients
    of its squared norm."""
    x, ys = x.detach().requires_grad_(torch.is_grad_enabled()), []
    with repeated(branch):
        for part in x.split(cuts or x.shape[1], 1):
            y, state = branch(part, state)
            ys.append(y)
        y = torch.cat(ys, 1)
        if not torch.is_grad_enabled():
            return {"the output": in_float64(y)}
        named = {"x": x, **{name: p for name, p in branch.named_parameters() if p.requires_grad}}
        grads = torch.autograd.grad(y.square().sum(), list(named.values()), allow_unused=True)
    grads = {f"the gradient of {n}": g for n, g in zip(named, grads, strict=True) if g is not None}
    return {name: in_float64(a) for name, a in {"the output": y, **grads}.items()}


def in_float64(a):
    """A tensor in float64 on the CPU."""
    return a.detach().double().cpu()


@contextlib.contextmanager
def repeated(model):
    """In this context the model draws the same random numbers every time; then its buffers are as they were."""
    seed_device(next(model.parameters()), 1)
    buffers = [(m, name, b, b.clone()) for m in model.modules() for name, b in m.named_buffers(recurse=False)]
    yield
    with torch.no_grad():
        for module, name, buffer, value in buffers:
            setattr(module, name, buffer.copy_(value))


@contextlib.contextmanager
def packing(packed, *toys):
    """In this context documents=pack if `packed`, otherwise and afterwards join."""
    for toy in toys:
        toy.config.documents = "pack" if packed else "join"
    yield
    for toy in toys:
        toy.config.documents = "join"


def is_finite(tensors):
    return all(a.isfinite().all() for a in tensors.values())


def differences(got, wanted):
    """{name: error}, |got - wanted| / |wanted| in the 2-norm; inf if nan or missing."""
    floor = 1e-6 * max(float(a.norm()) for a in wanted.values())  # for gradients that are only rounding errors
    errors = {}
    for name in {**wanted, **got} if len(got) > 1 else got:
        both = name in wanted and name in got
        error = float((got[name] - wanted[name]).norm() / (wanted[name].norm() + floor)) if both else math.nan
        errors[name] = math.inf if math.isnan(error) else error
    return errors
