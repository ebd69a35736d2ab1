"""The check at every start: code that exists in two versions must compute the same.

Some code exists twice: an operator has a kernel and a plain PyTorch version, a model runs on whole sequences and
through its state, and its loss is computed with or without logits. Editing only one of the two would train one model
and sample another. So train.py builds a toy from the same code, with the first and the last layer of each family, and
compares the loss and every gradient:

    loss alone   the loss that training computes, and the loss computed from logits
    operators    the training backend, and --backend=torch
    mode         training and eval mode, unless the model draws random numbers in training
    state        whole sequences, and the same tokens in chunks and single steps
    documents    with --documents=pack: packed documents, and each document alone

It also stops at a model that is not deterministic, and at one whose logits depend on later tokens.

Each tensor may differ by FACTOR times the error that the plain operators make in float32, measured against the same toy
in float64. If training computes in bfloat16, the operators are compared once more in bfloat16, where they may have
ROUNDING times the plain operators' own error; other libraries' kernels that take 16 bits only are compared there alone.

`--self_check=off` skips the check, `--self_check=only` stops after it.
"""

import contextlib
import copy
import inspect
import itertools
import math
import re
import statistics
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch

from kernels import build, linear_attention, ops
from runtime.errors import ConfigError

T = 42  # tokens of a toy
CUTS = [22, 1, 1, 18]  # lengths of the pieces that are read through the state
DOCUMENTS = [1, 2, 13, 17, 9]  # lengths of packed documents
SHORT = {  # constants during the check: T tokens pass through at least five chunks, pieces or blocks of each kind
    (linear_attention, "CHUNK"): 8, (linear_attention, "GLA_CHUNK"): 8, (ops, "PIECE"): 8,
    (ops, "WINDOW_QUERIES"): 8, (ops, "LOGITS_AT_ONCE"): {"cpu": 64 * 8, "cuda": 64 * 8}}
IN_ONE = {(ops, "PIECE"): 1024}  # the plain loops without recomputation
SIZES = dict(n_embd=32, n_head=2, vocab_size=64, mlp_multiple=16, block_size=128, window=8)
SCANS = ("longhorn_scan", "selective_scan")
FACTOR, LEAST = 10, 1e-5
ROUNDING = 3  # how often the plain operators' own error in 16 bits may be reached
TORCH = "edit both, or train with --backend=torch, which runs plain PyTorch everywhere"
LOGITS = "edit both, or --loss_from_logits=true, which trains on the loss of the logits (at more memory)"
STATE = "edit both paths, or what is sampled is not what was trained"
MODES = "edit both modes, or what is evaluated and sampled is not what was trained"
POSITIONS = "; if positions are added, count the tokens in the state, as RWKVTimeMix of mixers.py does"
OFF = "--self_check=off trains without the check"


def self_check(model, dtype=torch.float32):
    """Returns a line on what agreed. Raises ConfigError, naming both places and the way out, if two versions differ.

    dtype: of training's matrix products. A model that is not an LM must have toy(backend) -> a small model of the same
    code; toy_batch() -> (x, y) gives its inputs if they are not tokens. Neither the model nor the random state is
    changed.
    """
    began, device = time.perf_counter(), next(model.parameters()).device
    precision, rounds = torch.get_float32_matmul_precision(), dtype != torch.float32 and model.config.backend != "torch"
    torch.set_float32_matmul_precision("highest")
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), constants(SHORT):
        try:
            with build.without_libraries() if rounds else contextlib.nullcontext():
                toy, plain, batch = toys(model, device)
                packed = getattr(model.config, "documents", "join") == "pack"
                line = compare(toy, plain, batch, packed, LEAST)
            line += f"; {compare_rounded(toy, plain, batch, dtype)}" if rounds else ""
        except ConfigError:
            raise
        except Exception as error:  # an edit may raise anything
            raise ConfigError(f"self-check: a small version of this model does not run: {described(error)}: define "
                              f"toy(self, backend) in {type(model).__name__}, returning a model of sizes that run, as "
                              f"Recall of experiments/recall/models.py does, or {OFF}") from error
        finally:
            torch.set_float32_matmul_precision(precision)
    return f"self-check: {line} ({1000 * (time.perf_counter() - began):.0f} ms)"


# ---------------------------------------------------------------------------------------------------------------- toys

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


def batch_of(toy):
    """(x, y) for a toy: its own toy_batch(), or tokens and targets (2, T)."""
    if hasattr(toy, "toy_batch"):
        return toy.toy_batch()
    idx = torch.randint(toy.config.vocab_size, (2, T + 1))
    return idx[:, :-1], idx[:, 1:]


def packed_batch(toy, batch):
    """(x, y), one row of documents of the lengths in DOCUMENTS."""
    idx = torch.cat([batch[0][:1], batch[1][:1, -1:]], 1).clamp(min=1)  # (1, T + 1)
    idx[0, torch.tensor(DOCUMENTS).cumsum(0) - 1] = toy.config.end_of_text
    return idx[:, :-1], idx[:, 1:]


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


# ---------------------------------------------------------------------------------------------------------- comparisons

class Tally:
    """What agreed so far, and how well. usual: {tensor: error of the plain operators in float32}, "typical" for the
    others."""

    def __init__(self, toy, usual, least):
        self.toy, self.usual, self.least, self.agreed, self.worst = toy, usual, least, [], (0.0, 0.0)

    def excess(self, got, wanted):
        """(largest error as a multiple of what is allowed, that error, what is allowed, what is usual, tensor)."""
        errors = differences(got, wanted)
        usual = {name: self.usual.get(name, self.usual["typical"]) for name in errors}
        allowed = {name: max(self.least, FACTOR * usual[name]) for name in errors}
        return max((errors[n] / allowed[n], errors[n], allowed[n], usual[n], n) for n in errors)

    def agree(self, words, got, wanted, places, way_out):
        """Raises ConfigError if two {name: tensor} differ; places() then says where they come from."""
        excess, error, allowed, usual, name = self.excess(got, wanted)
        if excess > 1:
            where = places()
            way_out += POSITIONS * (way_out == STATE and where.startswith(place(type(self.toy).forward)))
            raise ConfigError(f"self-check: {where} disagree by {error:.0e} in {original(self.toy, name)} "
                              f"({usual:.0e} is usual, {allowed:.0e} allowed): {way_out}")
        self.worst = max(self.worst, (error, usual))
        self.agreed += [] if words in self.agreed else [words]

    def __str__(self):
        worst, usual = self.worst
        agreed = sorted(self.agreed, key=lambda words: words != "documents")
        return f"{', '.join(agreed)} agree to {worst:.0e} ({usual:.0e} is usual)" if agreed else "nothing to compare"


def compare(toy, plain, batch, packed, least):
    """A line on what agreed. Raises ConfigError for the first pair that differs."""
    rows = packed_batch(toy, batch) if packed else batch
    toy.eval()
    with torch.no_grad():
        once, twice = ({"the logits": toy(batch[0])[0]} for _ in range(2))
    refuse_noise(once, twice, least, "in eval mode", "draw random numbers and change buffers only if self.training, as "
                 "F.dropout(x, p, self.training) does")
    toy.train()
    varies = varies_in_training(toy, batch[0])
    with packing(packed, toy, plain):
        trains, tally = compare_training(toy, plain, rows, varies, least)
    toy.eval()
    with torch.no_grad():
        if not varies:
            compare_modes(toy, batch[0], once, tally)
        if not hasattr(toy, "toy_batch"):
            compare_reading(toy, batch[0], once["the logits"], rows if packed else None, tally)
    without = [type(b.mixer).__name__ for _, b in toy.branches() if not b.has_state]
    if without:
        return f"{tally}; state left out: {', '.join(dict.fromkeys(without))} keeps none"
    compare_states(toy, batch, once["the logits"], tally, None if packed else trains)
    return str(tally)


def compare_rounded(toy, plain, batch, dtype):
    """A line on how well the operators that train in a 16-bit dtype agree with float32: within ROUNDING times the plain
    operators' own error in that dtype. Raises ConfigError, naming the operator, if they do not.

    An error is the root mean square over the loss and all gradients: a single one of two numbers may be right by
    chance, and a mistake in any of them is a hundred times the rounding.
    """
    device, number = batch[1].device.type, str(dtype).removeprefix("torch.")
    toy.eval(), plain.eval()
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


@torch.no_grad()
def varies_in_training(toy, x):
    """Whether the model draws random numbers or changes buffers in training mode."""
    state = lambda: [torch.get_rng_state(), *([torch.cuda.get_rng_state(x.device)] if x.is_cuda else []),
                     *(b.clone() for b in toy.buffers())]
    with repeated(toy):
        before = state()
        toy(x)
        return any(not torch.equal(a, b) for a, b in zip(before, state(), strict=True))


def compare_training(toy, plain, batch, varies, least):
    """(the loss and gradients, a Tally): the loss alone and from logits, fast and plain operators. Gradients are
    compared in training mode, or in eval mode if `varies`: float32 and float64 do not draw the same random numbers."""
    backend = toy.config.backend
    with repeated(toy), torch.no_grad():
        once = {"the loss": loss_alone(toy.train(), *batch)}
    with repeated(toy), torch.no_grad():
        again = {"the loss": loss_alone(toy, *batch)}
    refuse_noise(again, once, least, "in training mode and from the same random state",
                 "draw random numbers from PyTorch only, and keep no state in the model")
    toy.train(not varies), plain.train(not varies)
    trains = gradients(toy, loss_alone, batch)
    slow = trains if backend == "torch" else gradients(plain, loss_of_logits, batch)
    if not is_finite(trains) and not is_finite(slow):
        raise ConfigError(f"self-check: the loss of a small version of this model is {float(trains['the loss'])}, or "
                          f"its gradient has no numbers: {first_nan(toy, batch)}: correct that, or {OFF}")
    tally = Tally(toy, rounding(plain, batch, slow), least)
    if backend == "torch":
        return trains, tally
    operators = f"{backend or 'native'} and plain operators"
    of_operator = lambda: which_operator(toy, plain, batch, tally)
    if not is_finite(trains):
        tally.agree(operators, slow, trains, of_operator, TORCH)
    ways = lambda: (f"{place(type(toy).forward)} and kernels/ops.py: cross_entropy, the loss from logits, and "
                    "kernels/ops.py: _LinearCrossEntropy, the loss alone,")
    tally.agree("the loss alone and from logits", gradients(toy, loss_of_logits, batch), trains, ways, LOGITS)
    with torch.no_grad():
        with repeated(toy), build.plain("linear_cross_entropy"):
            got = {"the loss": loss_alone(toy, *batch)}
        both = " and ".join(reversed(build.BODIES["linear_cross_entropy"]))
        tally.agree("the loss alone and from logits", got, trains, lambda: both, LOGITS)
    tally.agree(operators, slow, trains, of_operator, TORCH)
    toy.train(varies), plain.train(varies)  # the other mode
    runs = []
    for model, loss in ((toy, loss_alone), (toy, loss_of_logits), (plain, loss_of_logits))[:3 if varies else 2]:
        with repeated(model), torch.no_grad():
            runs.append({"the loss": loss(model, *batch)})
    mode = f"in {'training' if varies else 'eval'} mode"
    tally.agree("the loss alone and from logits", runs[1], runs[0], lambda: f"{mode} {ways()}", LOGITS)
    tally.agree(operators, runs[-1], runs[1], lambda: f"{mode} {of_operator()}", TORCH)
    scans = {type(b.mixer): b for _, b in toy.branches() if getattr(b.mixer, "operator", None) in SCANS}
    for branch in scans.values():  # their chunks are compiled
        x, op = random_rows(toy, 4 * build.CHUNK + 1)[:1], branch.mixer.operator
        fast = output_and_gradients(branch, x)
        with build.plain(op), constants(IN_ONE):
            slow = output_and_gradients(branch, x)
        tally.agree(operators, slow, fast, lambda op=op: operator_places(toy, op), TORCH)
    return trains, tally


def compare_modes(toy, x, evaluated, tally):
    """The logits in training mode, and those in eval mode, in which it leaves the toy."""
    trains = {"the logits": toy.train()(x)[0]}
    places = lambda: who(toy, lambda branch: differs_by_mode(branch, random_rows(toy)))
    tally.agree("training and eval mode", evaluated, trains,
                lambda: f"{places()} in training and in eval mode", MODES)
    toy.eval()


def compare_reading(toy, x, logits, packed_rows, tally):
    """In eval mode: another last token, the last position only, and each document alone."""
    forward = place(type(toy).forward)
    other = toy(torch.cat([x[:, :-1], (x[:, -1:] + 1) % toy.config.vocab_size], 1))[0]
    error = max(differences({"": other[:, :-1]}, {"": logits[:, :-1]}).values())
    if error > tally.least:
        places = who(toy, lambda branch: looks_ahead(branch, random_rows(toy)))
        raise ConfigError(f"self-check: {places} sees later tokens: changing the last one moves the logits before it "
                          f"by {error:.0e} ({tally.least:.0e} allowed): mix earlier tokens only, or {OFF}")
    if "last_only" in inspect.signature(toy.forward).parameters:
        tally.agree("whole sequences and states", {"the logits": toy(x, last_only=True)[0]},
                    {"the logits": logits[:, -1:]}, lambda: f"{forward} with and without last_only", STATE)
    if packed_rows is not None:
        documents = packed_rows[0][0].split(DOCUMENTS)
        padded = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)  # what follows a document changes nothing
        alone = torch.cat([row[:len(d)] for row, d in zip(toy(padded)[0], documents, strict=True)])
        with packing(True, toy):
            packed = toy(packed_rows[0])[0][0]
        tally.agree("documents", {"the logits": packed}, {"the logits": alone}, lambda: (
            f"{who(toy, lambda b: leaks(b, random_rows(toy)))} over packed documents and over each document alone"),
            "start each document empty, as token_shift of mixers.py does, or use --documents=join")


def compare_states(toy, batch, logits, tally, trains):
    """In eval mode: whole sequences, and the same tokens through the state. trains: loss and gradients of the whole
    that are known already, and used if the loss is the same; None if packed documents are trained on, so that the
    rounding of gradients without packing is not known: then only the loss is compared."""
    x, y = batch
    places = lambda: f"{which_state(toy, x)} over the whole sequence and through the state"
    last = {"last_only": True} if "last_only" in inspect.signature(toy.forward).parameters else {}
    with torch.no_grad():
        state, steps = toy.initial_state(len(x)), []
        for part in x.split(CUTS, 1):  # as in sampling, where a cache grows in place
            step, _, state = toy(part, state=state, **last)
            steps.append(step[:, -1])
        loss = loss_alone(toy, x, y)
    ends = torch.tensor(CUTS).cumsum(0) - 1
    tally.agree("whole sequences and states", {"the logits": torch.stack(steps, 1)}, {"the logits": logits[:, ends]},
                places, STATE)
    if trains is None:
        with torch.no_grad():
            tally.agree("whole sequences and states", {"the loss": loss_through_state(toy, x, y)}, {"the loss": loss},
                        places, STATE)
        return
    same = torch.equal(loss.double().cpu(), trains["the loss"])
    tally.agree("whole sequences and states", gradients(toy, loss_through_state, batch),
                trains if same else gradients(toy, loss_alone, batch), places, STATE)


# ------------------------------------------------------------------------------------------------------------- one run

def loss_alone(model, x, y):
    """The loss as training computes it."""
    return model(x, y, loss_only=True)[1]


def loss_of_logits(model, x, y):
    return model(x, y)[1]


def loss_through_state(model, x, y):
    """The loss of the same tokens, read in the pieces of CUTS."""
    state, loss = model.initial_state(len(x)), 0.0
    for x_part, y_part in zip(x.split(CUTS, 1), y.split(CUTS, 1), strict=True):
        _, part, state = model(x_part, y_part, state=state)
        loss = loss + part * (x_part.shape[1] / x.shape[1])
    return loss


def gradients(model, loss_of, batch):
    """{name: value} of the loss and of every parameter's gradient, if it has one, in float64 on the CPU."""
    named = dict(model.named_parameters())
    with repeated(model), torch.enable_grad():
        loss = loss_of(model, *batch)
        grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    grads = {f"the gradient of {n}": g for n, g in zip(named, grads, strict=True) if g is not None}
    return {name: a.detach().double().cpu() for name, a in {"the loss": loss, **grads}.items()}


@contextlib.contextmanager
def repeated(model):
    """In this context the model draws the same random numbers every time; then its buffers are as they were."""
    torch.manual_seed(1)
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


def rounding(plain, batch, slow):
    """{name: error} of the plain operators in float32 (`slow`) against float64, and their median as "typical". A tensor
    of few numbers may agree by chance: it gets the largest error in its branch."""
    try:
        with constants(IN_ONE):
            wide = [a.double() if a.is_floating_point() else a for a in batch]
            usual = differences(slow, gradients(copy.deepcopy(plain).double(), loss_of_logits, wide))
    except Exception:  # code that mixes dtypes, or cannot be copied
        return {"typical": 2e-5}
    usual = {name: min(error, 1e-3) if math.isfinite(error) else 0.0 for name, error in usual.items()}
    branch, largest = lambda name: name.partition(".mixer.")[0], {}
    for name, error in usual.items():
        largest[branch(name)] = max(error, largest.get(branch(name), 0.0))
    usual = {name: error if slow[name].numel() >= 64 else largest[branch(name)] for name, error in usual.items()}
    return {**usual, "typical": statistics.median(usual.values())}


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


# --------------------------------------------------------------------------------------------------- where they differ

def refuse_noise(got, wanted, least, when, way_out):
    """Raises ConfigError if two runs on the same tokens differ. If both are nan, another line says so."""
    error, name = max((error, name) for name, error in differences(got, wanted).items())
    if error > least and not (got[name].isnan().any() and wanted[name].isnan().any()):
        raise ConfigError(f"self-check: the model is not deterministic: two runs on the same tokens, {when}, differ by "
                          f"{error:.0e} in {name}: {way_out}, or {OFF}")


def first_nan(toy, batch):
    """The first branch of a toy whose output is not finite, in words."""
    bad, hooks = [], []
    for name, branch in toy.branches():
        label = f"{original(toy, name)} ({of_mixer(branch)})"
        hooks.append(branch.register_forward_hook(lambda _, args, out, label=label: bad.extend(
            [label] if args[0].isfinite().all() and not out[0].isfinite().all() else [])))
    with repeated(toy), torch.no_grad():
        loss_alone(toy, *batch)
    for hook in hooks:
        hook.remove()
    return f"first behind {bad[0]}" if bad else f"no branch makes it: see {place(type(toy).forward)}"


def which_operator(toy, plain, batch, tally):
    """The operator whose two versions differ, with their places; else the mixers that differ, or the model."""
    trains = gradients(toy, loss_alone, batch)
    for op in build.BODIES:
        with build.plain(op):
            slow = gradients(toy, loss_alone, batch)
        if tally.excess(slow, trains)[0] > 0.5 if is_finite(trains) else is_finite(slow):
            return operator_places(toy, op)
    pairs, x = zip(toy.branches(), plain.branches(), strict=True), random_rows(toy)
    mixers = [of_mixer(a) for (_, a), (_, b) in pairs
              if max(differences(output_and_gradients(a, x), output_and_gradients(b, x)).values()) > LEAST]
    return (f"{', '.join(dict.fromkeys(mixers)) or place(type(toy).forward)} with "
            f"--backend={toy.config.backend or '(empty)'} and with --backend=torch")


def operator_places(toy, op):
    """'longhorn_scan.cu: Exact and kernels/scan.py: _exact_step, _loop, _step_size (longhorn_scan)': the two versions,
    with the functions that only one of them runs in the mixers that differ."""
    x, starts, ran, exact = random_rows(toy), None, ({}, {}), False
    if toy.config.documents == "pack":
        starts = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
        starts[:, torch.tensor(DOCUMENTS[:-1]).cumsum(0)] = True
    for _, branch in toy.branches():
        with ops.documents(starts):
            fast, by_kernels = functions_of(output_and_gradients, branch, x)
            with build.plain(op):
                slow, by_loops = functions_of(output_and_gradients, branch, x)
        if max(differences(fast, slow).values()) > LEAST:
            exact = exact or getattr(branch.mixer, "exact", False)
            ran[0].update(by_kernels), ran[1].update(by_loops)
    places = []
    for table, mine, others in zip(build.BODIES[op], ran, ran[::-1], strict=True):
        file, _, names = table.partition(": ")
        if file.endswith(".cu"):
            places.append(table.replace("Longhorn", "Exact") if exact else table)
            continue
        more = [f for f in mine if f not in others and f.partition(": ")[2] not in names.split(", ")]
        known = [name for name in names.split(", ") if f"{file}: {name}" in mine or not more]
        words = [*known, *(f.removeprefix(f"{file}: ") for f in reversed(more))]
        places.append(f"{file}: {', '.join(words)}")
    return f"{places[0]} and {places[1]} ({op})"


def functions_of(run, *args):
    """(run(*args), {'kernels/scan.py: _loop': None} of the functions in kernels/ that it calls)."""
    ran, before = {}, sys.getprofile()

    def note(frame, event, _):
        file, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if event == "call" and file.parent == Path(ops.__file__).parent and name in frame.f_globals:
            ran[f"kernels/{file.name}: {name}"] = None

    sys.setprofile(note)
    try:
        return run(*args), ran
    finally:
        sys.setprofile(before)


def random_rows(toy, length=T):
    torch.manual_seed(2)
    return torch.randn(2, length, toy.config.n_embd, device=next(toy.parameters()).device)


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
            return {"the output": y.double().cpu()}
        named = {"x": x, **dict(branch.named_parameters())}
        grads = torch.autograd.grad(y.square().sum(), list(named.values()), allow_unused=True)
    grads = {f"the gradient of {n}": g for n, g in zip(named, grads, strict=True) if g is not None}
    return {name: a.detach().double().cpu() for name, a in {"the output": y, **grads}.items()}


def who(toy, differs):
    """The mixers of the branches for which differs(branch) is true, as 'model.py: ScanBlock.forward (Mamba)'; if there
    are none, the layers'; or the model."""
    mixers = [of_mixer(branch) for _, branch in toy.branches() if differs(branch)]
    layers = [place(type(layer).forward) for layer in toy.layers if not mixers and differs(layer)]
    return ", ".join(dict.fromkeys(mixers or layers)) or place(type(toy).forward)


def which_state(toy, x):
    """The operator whose plain version keeps the right state, else the mixers that differ through the state."""
    def agrees(*plain):
        with build.plain(*plain), torch.no_grad():
            state, parts = toy.initial_state(len(x)), []
            for part in x.split(CUTS, 1):
                logits, _, state = toy(part, state=state)
                parts.append(logits)
            return max(differences({"": torch.cat(parts, 1)}, {"": toy(x)[0]}).values()) < LEAST

    operators = dict.fromkeys(getattr(b.mixer, "operator", None) for _, b in toy.branches())
    for op in operators if toy.config.backend != "torch" and not agrees() else ():
        if op in build.BODIES and agrees(op):
            return f"{' and '.join(build.BODIES[op])} ({op})"
    return who(toy, lambda branch: differs_by_state(branch, random_rows(toy)))


def differs_by_state(branch, x):
    """Whether whole sequences and states differ, with gradients or without (where a cache grows in place)."""
    if hasattr(branch, "branches"):
        start = [b.initial_state(len(x), x.device) for b in branch.branches]
    else:
        start = branch.initial_state(len(x), x.device)
    for graded in (True, False):
        with torch.set_grad_enabled(graded):
            ys = output_and_gradients(branch, x), output_and_gradients(branch, x, start, CUTS)
        if max(differences(*ys).values()) > LEAST:
            return True
    return False


def differs_by_mode(branch, x):
    """Whether training and eval mode, in which it leaves the branch, differ."""
    trains = {"": branch.train()(x)[0].double().cpu()}
    return max(differences({"": branch.eval()(x)[0].double().cpu()}, trains).values()) > LEAST


def looks_ahead(branch, x):
    """Whether outputs depend on a later token."""
    other = torch.cat([x[:, :-1], -x[:, -1:]], 1)
    ys = ({"": branch(a)[0][:, :-1].double().cpu()} for a in (x, other))
    return max(differences(*ys).values()) > LEAST


def leaks(branch, x):
    """Whether packed documents differ from each document alone."""
    starts = torch.zeros(x.shape[:2], dtype=torch.bool, device=x.device)
    starts[:, torch.tensor(DOCUMENTS[:-1]).cumsum(0)] = True
    alone = torch.cat([branch(part)[0] for part in x.split(DOCUMENTS, 1)], 1)
    with ops.documents(starts):
        return max(differences({"": branch(x)[0].double().cpu()}, {"": alone.double().cpu()}).values()) > LEAST


def of_mixer(branch):
    return f"{place(type(branch.mixer).forward)} ({type(branch.mixer).__name__})"


def place(function):
    """'model.py: LM.forward'."""
    return f"{function.__module__.replace('.', '/')}.py: {function.__qualname__}"


def original(toy, name):
    """The name that a toy's parameter has in the model."""
    return re.sub(r"layers\.(\d+)", lambda match: f"layers.{toy.kept[int(match[1])]}", name, count=1)


def described(error):
    """'IndexError: index 1 is out of range (model.py, line 439)', in the project's own file."""
    root = Path(__file__).resolve().parents[1]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if root in Path(f.filename).parents]
    where = f" ({Path(frames[-1].filename).relative_to(root)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
