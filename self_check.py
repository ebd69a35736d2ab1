"""The check at every start: whatever exists twice in the code must compute the same.

Some of the code has two bodies: an operator has a kernel and a plain PyTorch spelling, a model runs over whole sequences
and through its state, and its loss comes with logits or without. Someone who edits one of the two would train one model
and sample another. So train.py builds a toy of the same model from the same code and compares loss and every gradient:

    loss alone   what training asks for, and the loss of the logits
    operators    the backend that trains, and --backend=torch
    state        the whole sequence, and the same tokens in chunks and single steps

Unedited they agree to about 1e-5; half a step size or a dropped gate shows as 1e-2 or more. `--self_check=off` skips it.
"""

import time

import torch

from configurator import ConfigError
from kernels import build

CUTS = [33, 1, 1, 31]  # lengths of the pieces read through the state: 66 tokens, more than a chunk of any operator
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}


def self_check(model):
    """One line on what agreed. Raises ConfigError, one line with both places and the way out, where two bodies differ.

    `model` offers toy(backend) -> a small model of the same code, and toy_batch() -> (x, y) for it; it is not changed, nor
    is the random state.
    """
    began, device, backend = time.perf_counter(), next(model.parameters()).device, model.config.backend
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            torch.manual_seed(0)
            toy = scatter(model.toy(backend=backend)).to(device).eval()
            plain = model.toy(backend="torch").to(device).eval()
            plain.load_state_dict(toy.state_dict())
            batch = [a.to(device) for a in toy.toy_batch()]
            agreed, worst = compare(toy, plain, batch)
        except (ValueError, RuntimeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"self-check: a small model of this kind does not run: {error}") from error
        finally:
            torch.set_float32_matmul_precision(precision)
    return f"self-check: {', '.join(agreed)} agree to {worst:.0e} ({1000 * (time.perf_counter() - began):.0f} ms)"


def compare(toy, plain, batch):
    """([what agreed], largest difference). Raises ConfigError for the first pair that differs."""
    agreed, errors, backend = [], [0.0], toy.config.backend
    dtype = torch.bfloat16 if backend == "fused" else torch.float32  # some of those kernels take 16 bits only
    autocast = torch.autocast(batch[1].device.type, dtype, enabled=dtype != torch.float32)
    run = lambda m, loss=whole: gradients(m, loss, batch, autocast)
    trains = run(toy)
    if backend != "torch":
        name, error = difference(trains, run(toy, from_logits))
        if error > TOLERANCE[dtype]:
            places = f"{place(type(toy).forward)} with logits and {' / '.join(build.BODIES['linear_cross_entropy'])}"
            raise ConfigError(f"self-check: the loss alone and the loss of the logits disagree by {error:.0e} in {name}: edit "
                              f"both ({places}), or train with --backend=torch")
        agreed.append("the loss alone and from logits")
        errors.append(error)
        name, error = difference(trains, run(plain))
        if error > TOLERANCE[dtype]:
            raise ConfigError(f"{what_differs(toy, plain, run, dtype)} disagree by {error:.0e} in {name}: edit both, or train "
                              "with --backend=torch, which runs plain PyTorch everywhere")
        agreed.append(f"{backend or 'native'} and plain operators")
        errors.append(error)
    without = [type(b.mixer).__name__ for _, b in toy.branches() if not b.has_state]
    if without or not hasattr(toy, "initial_state"):
        agreed.append(f"(state left out: {', '.join(dict.fromkeys(without)) or type(toy).__name__} keeps none)")
    else:
        name, error = difference(trains, run(toy, through_state))
        if error > TOLERANCE[dtype]:
            raise ConfigError(f"self-check: {where_state_differs(toy, batch, autocast)} computes another result through its "
                              f"state than over the whole sequence: they disagree by {error:.0e} in {name}: edit both paths, "
                              "or what is sampled is not what was trained")
        agreed.append("whole sequences and states")
        errors.append(error)
    return agreed, max(errors)


@torch.no_grad()
def scatter(model):
    """Weights as scattered as after training, so that no branch is too small, or too symmetric, to show an edit."""
    for p in model.parameters():
        p.add_(torch.randn_like(p) * (0.5 * p.shape[-1] ** -0.5 if p.dim() > 1 else 0.1))
    return model


def whole(model, x, y):
    return model(x, y, loss_only=True)[1]


def from_logits(model, x, y):
    return model(x, y)[1]


def through_state(model, x, y):
    """The loss of the same tokens, read in the pieces of CUTS."""
    state, loss = model.initial_state(len(x)), 0.0
    for x_part, y_part in zip(x.split(CUTS, 1), y.split(CUTS, 1), strict=True):
        _, part, state = model(x_part, y_part, state=state)
        loss = loss + part * (x_part.shape[1] / x.shape[1])
    return loss


def gradients(model, loss_of, batch, autocast):
    """{name: value}: the loss, and the gradient of every parameter that has one, in float32 on the CPU."""
    with torch.enable_grad(), autocast:
        loss = loss_of(model, *batch)
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    grads = {f"the gradient of {n}": g for n, g in zip(named, grads, strict=True) if g is not None}
    return {name: a.detach().float().cpu() for name, a in {"the loss": loss, **grads}.items()}


def difference(got, wanted):
    """(where, how much) two results differ most: |got - wanted| / |wanted| by the 2-norm; inf for nan or a missing one."""
    floor = 1e-6 * max(float(a.norm()) for a in wanted.values())  # a gradient of nothing but rounding
    errors = {}
    for name in {**wanted, **got}:
        if name not in wanted or name not in got:
            errors[name] = float("inf")
            continue
        error = float((got[name] - wanted[name]).norm() / (wanted[name].norm() + floor))
        errors[name] = error if error == error else float("inf")
    name = max(errors, key=errors.get)
    return name, errors[name]


def what_differs(toy, plain, run, dtype):
    """The operator whose two bodies differ, with their places; the model itself where it is none of them."""
    trains = run(toy)
    for op, (fast, slow) in build.BODIES.items():
        with build.plain(op):
            if difference(trains, run(toy))[1] > TOLERANCE[dtype] / 2:
                return f"self-check: {fast} and {slow} ({op})"
    return f"self-check: {type(toy).__name__} with --backend={toy.config.backend} and with --backend=torch"


def where_state_differs(toy, batch, autocast):
    """The mixers whose output through the state differs, as 'GLA (model.py)'; else the model."""
    from model import where_is

    x = torch.randn(2, batch[0].shape[1], toy.config.n_embd, device=batch[0].device)
    found = {}
    with torch.no_grad(), autocast:
        for _, branch in toy.branches():
            state, parts = branch.initial_state(len(x), x.device), []
            for part in x.split(CUTS, 1):
                y, state = branch(part, state)
                parts.append(y)
            y = branch(x)[0]
            if (torch.cat(parts, 1) - y).norm() > 1e-3 * y.norm():
                found[f"{where_is(type(branch.mixer))} in its forward"] = None
    return ", ".join(found) or place(type(toy).forward)


def place(function):
    """'model.py: LM.forward'."""
    return f"{function.__module__.replace('.', '/')}.py: {function.__qualname__}"
