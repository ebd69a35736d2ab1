"""The check at every start: code that exists in two versions must compute the same.

Some code exists twice: an operator has a kernel and a plain PyTorch version, a model runs on whole sequences and
through its state, and its loss is computed with or without logits. Editing only one of the two would train one model
and sample another. So train.py builds a toy model from the same code and compares the loss and every gradient:

    operators    the training backend, and --backend=torch
    loss alone   the loss that training computes, and the loss computed from logits
    state        whole sequences, and the same tokens in chunks and single steps

All in float32, and if training computes in bfloat16, the operators once more in bfloat16. Other libraries' kernels that
take 16 bits only are compared there alone.

Unedited code agrees to about 1e-6; half a step size or a dropped gate shows as 1e-2 or more.
`--self_check=off` skips it.
"""

import contextlib
import itertools
import math
import time
from dataclasses import replace

import torch

from kernels import build
from runtime.errors import ConfigError

CUTS = [33, 1, 1, 31]  # lengths of the pieces read through the state: 66 tokens, more than any operator's chunk
TOLERANCE = 2e-4
ROUNDING = 3  # how often the plain operators' own error in 16 bits may be reached
TORCH = "edit both, or train with --backend=torch, which runs plain PyTorch everywhere"


def self_check(model, dtype=torch.float32):
    """Returns a line on what agreed. Raises ConfigError, naming both places and the way out, if two versions differ.

    dtype: of training's matrix products. A model that is not an LM must have toy(backend) -> a small model of the same
    code, and that one toy_batch() -> (x, y). Neither the model nor the random state is changed.
    """
    began, device, backend = time.perf_counter(), next(model.parameters()).device, model.config.backend
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            torch.manual_seed(0)
            toy = scatter(toy_of(model, backend)).to(device).eval()
            plain = toy_of(model, "torch").to(device).eval()
            plain.load_state_dict(toy.state_dict())
            batch = [a.to(device) for a in batch_of(toy)]
            rounded = backend != "torch" and dtype != torch.float32
            with build.without_libraries() if rounded else contextlib.nullcontext():
                agreed, worst, left_out = compare(toy, plain, batch)
            if rounded:
                left_out = f"; {compare_rounded(toy, plain, batch, dtype)}{left_out}"
            if getattr(model.config, "documents", "join") == "pack":
                toy.config.documents = plain.config.documents = "pack"
                with build.without_libraries() if rounded else contextlib.nullcontext():
                    agreed, worst = ["documents", *agreed], max(worst, *compare(toy, plain, batch, states=False)[1:2])
        except (ValueError, RuntimeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"self-check: a small version of this model does not run: {error}: --self_check=off "
                              "trains without the check") from error
        finally:
            torch.set_float32_matmul_precision(precision)
    outcome = f"{', '.join(agreed)} agree to {worst:.0e}" if agreed else "nothing to compare"
    return f"self-check: {outcome}{left_out} ({1000 * (time.perf_counter() - began):.0f} ms)"


def toy_of(model, backend):
    """A small model of the same code: one layer per family."""
    if hasattr(model, "toy"):
        return model.toy(backend)
    families = list(dict.fromkeys(model.config.families))
    return type(model)(replace(model.config, pattern=",".join(families), n_layer=len(families), n_embd=32, n_head=2,
                               vocab_size=64, mlp_multiple=16, block_size=128, window=24, backend=backend,
                               documents="join", end_of_text=0))


def batch_of(toy):
    """(x, y) for a toy: its own toy_batch(), or tokens and targets (2, 66)."""
    if hasattr(toy, "toy_batch"):
        return toy.toy_batch()
    idx = torch.randint(toy.config.vocab_size, (2, 67))
    return idx[:, :-1], idx[:, 1:]


def compare(toy, plain, batch, states=True):
    """([what agreed], largest difference, what was left out). Raises ConfigError for the first pair that differs."""
    agreed, errors, backend = [], [0.0], toy.config.backend
    from_logits = lambda m, x, y: m(x, y)[1]
    run = lambda m, loss=loss_alone: gradients(m, loss, batch)
    trains = run(toy)

    def agree(words, got, places, way_out):
        name, error = difference(got, {n: trains[n] for n in got} if len(got) == 1 else trains)
        if error > TOLERANCE:
            raise ConfigError(f"self-check: {places()} disagree by {error:.0e} in {name}: {way_out}")
        agreed.append(words)
        errors.append(error)

    if backend != "torch":
        agree("the loss alone and from logits", run(toy, from_logits), lambda: f"{place(type(toy).forward)} with "
              f"logits and {build.BODIES['linear_cross_entropy'][0]}, the loss alone,", TORCH)
        agree(f"{backend or 'native'} and plain operators", run(plain), lambda: which_operator(toy, run), TORCH)
    if not states:  # a state belongs to one document
        return agreed, max(errors), ""
    without = [type(b.mixer).__name__ for _, b in toy.branches() if not b.has_state]
    if without:
        return agreed, max(errors), f"; state left out: {', '.join(dict.fromkeys(without))} keeps none"
    with torch.no_grad():
        sampled = {"the loss": through_state(toy, *batch).float().cpu()}  # as in sampling, where a cache grows in place
    for got in (sampled, run(toy, through_state)):
        agree("whole sequences and states", got, lambda: f"{which_mixer(toy, batch)} over the whole "
              "sequence and through the state", "edit both paths, or what is sampled is not what was trained")
    return list(dict.fromkeys(agreed)), max(errors), ""


def compare_rounded(toy, plain, batch, dtype):
    """A line on how well the operators that train in a 16-bit dtype agree with float32: within ROUNDING times the plain
    operators' own error in that dtype. Raises ConfigError, naming the operator, if they do not.

    An error is the root mean square over the loss and all gradients: a single one of two numbers may be right by
    chance, and a mistake in any of them is a hundred times the rounding.
    """
    device, number = batch[1].device.type, str(dtype).removeprefix("torch.")
    true = gradients(plain, loss_alone, batch)
    with torch.autocast(device, dtype):
        errors = lambda m: differences(gradients(m, loss_alone, batch), true)
        size = lambda errors: math.hypot(*errors.values())
        rounding, trained = errors(plain), errors(toy)
        times = size(trained) / size(rounding)
        if times <= ROUNDING:
            return f"in {number} to {times:.1f} times the plain operators' rounding"
        name, left = max(trained, key=trained.get), {}
        for op in build.BODIES:
            with build.plain(op):
                left[op] = size(errors(toy))
        op = min(left, key=left.get)
        fast, slow = build.places(op, toy.config.backend, device, dtype)
    way_out = TORCH if fast == build.BODIES[op][0] else f"train with --backend={device}, which calls no other library"
    raise ConfigError(f"self-check: in {number} {fast} and {slow} ({op}) disagree by {trained[name]:.0e} in {name}, "
                      f"{times:.0f} times the rounding of plain operators: {way_out}")


def loss_alone(model, x, y):
    """The loss as training computes it."""
    return model(x, y, loss_only=True)[1]


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


def through_state(model, x, y):
    """The loss of the same tokens, read in the pieces of CUTS."""
    state, loss = model.initial_state(len(x)), 0.0
    for x_part, y_part in zip(x.split(CUTS, 1), y.split(CUTS, 1), strict=True):
        _, part, state = model(x_part, y_part, state=state)
        loss = loss + part * (x_part.shape[1] / x.shape[1])
    return loss


def gradients(model, loss_of, batch):
    """{name: value} of the loss and of every parameter's gradient, if it has one, in float32 on the CPU."""
    with torch.enable_grad():
        loss = loss_of(model, *batch)
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    grads = {f"the gradient of {n}": g for n, g in zip(named, grads, strict=True) if g is not None}
    return {name: a.detach().float().cpu() for name, a in {"the loss": loss, **grads}.items()}


def differences(got, wanted):
    """{name: error}, |got - wanted| / |wanted| in the 2-norm; inf if nan or missing."""
    floor = 1e-6 * max(float(a.norm()) for a in wanted.values())  # for gradients that are only rounding errors
    errors = {}
    for name in {**wanted, **got}:
        both = name in wanted and name in got
        error = float((got[name] - wanted[name]).norm() / (wanted[name].norm() + floor)) if both else math.nan
        errors[name] = math.inf if math.isnan(error) else error
    return errors


def difference(got, wanted):
    """(name, error) of the largest of `differences`."""
    errors = differences(got, wanted)
    name = max(errors, key=errors.get)
    return name, errors[name]


def which_operator(toy, run):
    """The operator whose two versions differ, with their places; the model itself if no operator differs."""
    trains, device = run(toy), next(toy.parameters()).device.type
    for op in build.BODIES:
        with build.plain(op):
            differs = difference(run(toy), trains)[1] > TOLERANCE / 2
        if differs:
            return f"{' and '.join(build.places(op, toy.config.backend, device, torch.float32))} ({op})"
    return f"{place(type(toy).forward)} with --backend={toy.config.backend or '(empty)'} and with --backend=torch"


def which_mixer(toy, batch):
    """The mixers that differ through the state, as 'model.py: ScanBlock.forward (Mamba)'; the model if none does."""
    x = torch.randn(2, batch[0].shape[1], toy.config.n_embd, device=batch[0].device, requires_grad=True)
    differing = {}
    for (_, branch), graded in itertools.product(toy.branches(), (True, False)):
        with torch.set_grad_enabled(graded):
            state, parts = branch.initial_state(len(x), x.device), []
            for part in x.split(CUTS, 1):
                y, state = branch(part, state)
                parts.append(y)
            ys = [torch.cat(parts, 1), branch(x)[0]]
        if graded:
            ys += [torch.autograd.grad(y.square().sum(), x)[0] for y in ys]
        if any((a - b).norm() > TOLERANCE / 2 * b.norm() for a, b in zip(ys[::2], ys[1::2], strict=True)):
            differing[f"{place(type(branch.mixer).forward)} ({type(branch.mixer).__name__})"] = None
    return ", ".join(differing) or place(type(toy).forward)


def place(function):
    """'model.py: LM.forward'."""
    return f"{function.__module__.replace('.', '/')}.py: {function.__qualname__}"
