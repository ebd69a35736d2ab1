"""The check at every start: code that exists in two versions must compute the same.

Some code exists twice: an operator has a kernel and a plain PyTorch version, a model runs on whole sequences and
through its state, and its loss is computed with or without logits. Editing only one of the two would train one model
and sample another. So train.py builds a toy from the same code, with the first and the last layer of each family, and
compares the loss and every gradient:

    loss alone   the loss that training computes, and the loss computed from logits
    operators    the training backend, and --backend=torch
    mode         training and eval mode, unless the model draws random numbers in training; with gradients and without
    state        whole sequences, and the same tokens in chunks and single steps; logits with targets and without
    documents    with --documents=pack: packed documents, and each document alone
    compiled     with --compile: layers as torch.compile traces them, and as they are

It also stops at a model that is not deterministic, and at one whose logits depend on later tokens.

Each tensor may differ by FACTOR times the error that the plain operators make in float32, measured against the same toy
in float64, or by LEAST; by OTHER_ORDER where the two sum in another order. If training computes in bfloat16, operators,
losses and states are compared once more in bfloat16, where operators and states may have ROUNDING times the plain
operators' own error; other libraries' kernels that take 16 bits only are compared there alone.

`--self_check=off` skips the check, `--self_check=only` stops after it.
"""

import contextlib
import copy
import inspect
import math
import statistics
import time

import torch

from common.errors import ConfigError
from inspection import locate
from inspection.toys import (
    CUTS,
    DOCUMENTS,
    IN_ONE,
    LEAST,
    SHORT,
    constants,
    differences,
    document_starts,
    gradients,
    is_finite,
    loss_alone,
    loss_of_logits,
    loss_of_whole,
    loss_through_state,
    original,
    output_and_gradients,
    packed_batch,
    packing,
    random_rows,
    repeated,
    through_state,
    toys,
)
from kernels import build, choose, ops

SCANS = ("longhorn_scan", "selective_scan")
FACTOR = 10
OTHER_ORDER = 2e-4  # allowed between operators and states, which sum in other orders: a toy may amplify rounding
ROUNDING = 3  # how often the plain operators' own error in 16 bits may be reached
TORCH = "edit both, or train with --backend=torch, which runs plain PyTorch everywhere"
LOGITS = "edit both, or --loss_from_logits=true, which trains on the loss of the logits (at more memory)"
STATE = "edit both paths, or what is sampled is not what was trained"
MODES = "edit both modes, or what is evaluated and sampled is not what was trained"
POSITIONS = "; if positions are added, count the tokens in the state, as CountingTimeMix of families/released.py does"
OFF = "--self_check=off trains without the check"


def self_check(model, dtype=torch.float32, compiled=False):
    """Returns a line on what agreed. Raises ConfigError, naming both places and the way out, if two versions differ.

    dtype: of training's matrix products; compiled: layers are compiled in training. A model that is not an LM must have
    toy(backend) -> a small model of the same code; toy_batch() -> (x, y) gives its inputs if they are not tokens.
    Neither the model nor the random state is changed.
    """
    began, device = time.perf_counter(), next(model.parameters()).device
    in_16_bits = dtype != torch.float32 and model.config.backend != "torch"
    precision = torch.get_float32_matmul_precision()
    way_out = (f"define toy(self, backend) in {type(model).__name__}, returning a model of sizes that run, as Recall "
               "of experiments/recall/models.py does")
    torch.set_float32_matmul_precision("highest")
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), constants(SHORT):
        try:
            with choose.without_libraries() if in_16_bits else contextlib.nullcontext():
                toy, plain, batch = toys(model, device)
                way_out = "correct that"
                packed = getattr(model.config, "documents", "join") == "pack"
                line = compare(toy, plain, batch, packed, compiled)
            with constants(IN_ONE):
                line += f"; {compare_rounded(toy, plain, batch, dtype)}" if in_16_bits else ""
        except ConfigError:
            raise
        except Exception as error:  # an edit may raise anything
            raise ConfigError(f"self-check: a small version of this model does not run: {locate.described(error)}: "
                              f"{way_out}, or {OFF}") from error
        finally:
            torch.set_float32_matmul_precision(precision)
    return f"self-check: {line} ({1000 * (time.perf_counter() - began):.0f} ms)"


# ---------------------------------------------------------------------------------------------------------- comparisons

class Tally:
    """What agreed so far, and how well. usual: {tensor: error of the plain operators in float32}, "typical" for the
    others."""

    def __init__(self, toy, usual):
        self.toy, self.usual, self.agreed, self.worst = toy, usual, [], (0.0, 0.0)

    def excess(self, got, wanted, least=OTHER_ORDER):
        """(largest error as a multiple of what is allowed, that error, what is allowed, what is usual, tensor)."""
        errors = differences(got, wanted)
        usual = {name: self.usual.get(name, self.usual["typical"]) for name in errors}
        allowed = {name: max(least, FACTOR * usual[name]) for name in errors}
        return max((errors[n] / allowed[n], errors[n], allowed[n], usual[n], n) for n in errors)

    def agree(self, words, got, wanted, places, way_out):
        """Raises ConfigError if two {name: tensor} differ; places() then says where they come from."""
        excess, error, allowed, usual, name = self.excess(
            got, wanted, LEAST if way_out in (LOGITS, MODES) else OTHER_ORDER)
        if excess > 1:
            where = places()
            way_out += POSITIONS * (f"{locate.place(type(self.toy).forward)} over the whole" in where)
            refuse(where, error, original(self.toy, name), usual, allowed, way_out)
        self.worst = max(self.worst, (error, usual))
        self.agreed += [words] * bool(words and words not in self.agreed)

    def __str__(self):
        worst, usual = self.worst
        agreed = sorted(self.agreed, key=lambda words: words != "documents")
        return f"{', '.join(agreed)} agree to {worst:.0e} ({usual:.0e} is usual)" if agreed else "nothing to compare"


def refuse(where, error, name, usual, allowed, way_out):
    raise ConfigError(f"self-check: {where} disagree by {error:.0e} in {name} ({usual:.0e} is usual, {allowed:.0e} "
                      f"allowed): {way_out}")


def compare(toy, plain, batch, packed, compiled):
    """A line on what agreed. Raises ConfigError for the first pair that differs."""
    rows = packed_batch(toy, batch) if packed else batch
    toy.eval()
    with torch.no_grad():
        once, twice = ({"the logits": toy(batch[0])[0]} for _ in range(2))
    refuse_noise(once, twice, "in eval mode", "draw random numbers and change buffers only if self.training, as "
                 "F.dropout(x, p, self.training) does")
    toy.train()
    varies = varies_in_training(toy, batch[0])
    with packing(packed, toy, plain):
        tally = compare_training(toy, plain, rows, varies, compiled)
    toy.eval()
    with torch.no_grad():
        if not varies:
            compare_modes(toy, batch[0], once, tally)
        beside = {"the logits": toy(*batch)[0]}
        if beside["the logits"].shape == once["the logits"].shape:  # Recall's are of queries only
            tally.agree("", beside, once, lambda: f"{locate.place(type(toy).forward)} with and without targets", STATE)
        if not hasattr(toy, "toy_batch"):
            compare_reading(toy, batch[0], once["the logits"], rows if packed else None, tally)
    without = [type(b.mixer).__name__ for _, b in toy.branches() if not b.has_state]
    if without:
        return f"{tally}; state left out: {', '.join(dict.fromkeys(without))} keeps none"
    with packing(packed, toy):
        compare_states(toy, rows, tally)
    return str(tally)


@torch.no_grad()
def varies_in_training(toy, x):
    """Whether the model draws random numbers or changes buffers in training mode."""
    state = lambda: [torch.get_rng_state(), *([torch.cuda.get_rng_state(x.device)] if x.is_cuda else []),
                     *(b.clone() for b in toy.buffers())]
    with repeated(toy):
        before = state()
        toy(x)
        return any(not torch.equal(a, b) for a, b in zip(before, state(), strict=True))


def compare_training(toy, plain, batch, varies, compiled):
    """A Tally: the loss alone and from logits, fast and plain operators, gradients on and off, compiled layers and
    layers as they are. Gradients are compared in training mode, or in eval mode if `varies`: float32 and float64 do not
    draw the same random numbers."""
    backend = toy.config.backend
    with repeated(toy), torch.no_grad():
        once = {"the loss": loss_alone(toy.train(), *batch)}
    with repeated(toy), torch.no_grad():
        again = {"the loss": loss_alone(toy, *batch)}
    refuse_noise(again, once, "in training mode and from the same random state",
                 "draw random numbers from PyTorch only, and keep no state in the model")
    toy.train(not varies), plain.train(not varies)
    trains = gradients(toy, loss_alone, batch)
    with constants(IN_ONE):  # recomputing pieces imports torch._dynamo, two seconds of CPU
        slow = trains if backend == "torch" else gradients(plain, loss_of_logits, batch)
    if not is_finite(trains) and not is_finite(slow):
        raise ConfigError(f"self-check: the loss of a small version of this model is {float(trains['the loss'])}, or "
                          f"its gradient has no numbers: {locate.first_nan(toy, batch)}: correct that, or {OFF}")
    tally = Tally(toy, rounding(plain, batch, slow))
    fast = backend or ("native" if choose.unavailable(batch[0].device.type) is None else "the fastest")
    operators = f"{fast} and plain operators"
    of_operator = lambda: locate.which_operator(toy, plain, batch, tally)
    if not is_finite(trains):
        tally.agree(operators, slow, trains, of_operator, TORCH)
    with repeated(toy), torch.no_grad():
        got = {"the loss": loss_alone(toy, *batch)}
    tally.agree("", got, trains, lambda: f"{locate.which_by_gradients(toy, batch)} with gradients and under "
                "torch.no_grad", MODES)
    if compiled:
        compare_compiled(toy, batch, trains, tally)
    if backend == "torch":
        return tally
    ways = lambda: two_losses(toy)
    tally.agree("the loss alone and from logits", gradients(toy, loss_of_logits, batch), trains, ways, LOGITS)
    with torch.no_grad():
        with repeated(toy), choose.plain("linear_cross_entropy"):
            got = {"the loss": loss_alone(toy, *batch)}
        both = " and ".join(reversed(choose.BODIES["linear_cross_entropy"]))
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
    scans = {type(b.mixer): b.mixer for _, b in toy.branches() if getattr(b.mixer, "operator", None) in SCANS}
    for mixer in scans.values():  # their chunks are compiled
        x, op = random_rows(toy, 4 * build.CHUNK + 8)[:1], mixer.operator
        with ops.documents(document_starts(x) if toy.config.documents == "pack" else None):
            fast = output_and_gradients(locate.Alone(mixer), x)
            with choose.plain(op), constants(IN_ONE):
                slow = output_and_gradients(locate.Alone(mixer), x)
        tally.agree(operators, slow, fast, lambda op=op: locate.operator_places(toy, op), TORCH)
    return tally


def compare_compiled(toy, batch, trains, tally):
    """Loss and gradients of layers that torch.compile has traced, without its code generator, and as they are:
    `trains`."""
    layers = list(dict.fromkeys(getattr(toy, "layers", [toy])))
    way_out = "train with --compile=false, or with another version of PyTorch"
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager")
    try:
        traced = gradients(toy, loss_alone, batch)
    except Exception as error:
        raise ConfigError(f"self-check: a small version of this model runs, but not if its layers are compiled: "
                          f"{locate.described(error)}: {way_out}") from error
    finally:
        for layer in layers:
            del layer.forward
        torch.compiler.reset()  # training would compare its inputs with the toy's graphs first
    places = ", ".join(dict.fromkeys(locate.place(type(layer).forward) for layer in layers))
    tally.agree("compiled layers and layers as they are", traced, trains, lambda: f"{places} compiled and as it is",
                way_out)


def two_losses(toy):
    return (f"{locate.place(type(toy).forward)} and kernels/ops.py: cross_entropy, the loss from logits, and "
            "kernels/ops.py: _LinearCrossEntropy, the loss alone,")


def compare_modes(toy, x, evaluated, tally):
    """The logits in training mode, and those in eval mode, in which it leaves the toy."""
    trains = {"the logits": toy.train()(x)[0]}
    places = lambda: locate.who(toy, lambda branch: locate.differs_by_mode(branch, random_rows(toy)))
    tally.agree("training and eval mode", evaluated, trains,
                lambda: f"{places()} in training and in eval mode", MODES)
    toy.eval()


def compare_reading(toy, x, logits, packed_rows, tally):
    """In eval mode: another last token, the last position only, and each document alone."""
    forward = locate.place(type(toy).forward)
    other = toy(torch.cat([x[:, :-1], (x[:, -1:] + 1) % toy.config.vocab_size], 1))[0]
    error = max(differences({"": other[:, :-1]}, {"": logits[:, :-1]}).values())
    if error > LEAST:
        places = locate.who(toy, lambda branch: locate.looks_ahead(branch, random_rows(toy)))
        raise ConfigError(f"self-check: {places} sees later tokens: changing the last one moves the logits before it "
                          f"by {error:.0e} ({LEAST:.0e} allowed): mix earlier tokens only, or {OFF}")
    if "last_only" in inspect.signature(toy.forward).parameters:
        tally.agree("whole sequences and states", {"the logits": toy(x, last_only=True)[0]},
                    {"the logits": logits[:, -1:]}, lambda: f"{forward} with and without last_only", STATE)
    if packed_rows is not None:
        documents = packed_rows[0][0].split(DOCUMENTS)
        padded = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)  # what follows a document changes nothing
        alone = torch.cat([row[:len(d)] for row, d in zip(toy(padded)[0], documents, strict=True)])
        with packing(True, toy):
            packed = toy(packed_rows[0])[0][0]
        places = lambda: locate.who(toy, lambda branch: locate.leaks(branch, random_rows(toy)))
        tally.agree("documents", {"the logits": packed}, {"the logits": alone},
                    lambda: f"{places()} over packed documents and over each document alone",
                    "start each document empty, as token_shift of mixers.py does, or use --documents=join")


def compare_states(toy, batch, tally):
    """In eval mode: whole sequences, and the same tokens through the state."""
    x = batch[0]
    places = lambda: f"{locate.which_state(toy, batch, tally)} over the whole sequence and through the state"
    last = {"last_only": True} if "last_only" in inspect.signature(toy.forward).parameters else {}
    with torch.no_grad():
        state, steps = toy.initial_state(len(x)), []
        for part in x.split(CUTS, 1):  # as in sampling, where a cache grows in place
            step, _, state = toy(part, state=state, **last)
            steps.append(step[:, -1])
        logits = toy(x)[0]
    ends = torch.tensor(CUTS).cumsum(0) - 1
    tally.agree("whole sequences and states", {"the logits": torch.stack(steps, 1)}, {"the logits": logits[:, ends]},
                places, STATE)
    tally.agree("whole sequences and states", gradients(toy, loss_through_state, batch),
                gradients(toy, loss_of_whole, batch), places, STATE)


def compare_rounded(toy, plain, batch, dtype):
    """A line on how well the operators that train in a 16-bit dtype agree with float32: within ROUNDING times the plain
    operators' own error in that dtype. Raises ConfigError, naming the operator, if they do not, or if the loss alone
    and from logits, or whole sequences and states, differ in that dtype only.

    An error is the root mean square over the loss and all gradients: a single one of two numbers may be right by
    chance, and a mistake in any of them is a hundred times the rounding.
    """
    device, number = batch[1].device.type, str(dtype).removeprefix("torch.")
    toy.eval(), plain.eval()
    some = batch if hasattr(toy, "toy_batch") else [a[:1, :26] for a in batch]  # four chunks: loops in 16 bits are slow
    true = gradients(plain, loss_alone, some)
    with torch.autocast(device, dtype):
        errors = lambda m: differences(gradients(m, loss_alone, some), true)
        size = lambda errors: math.hypot(*errors.values())
        rounding, trained = errors(plain), errors(toy)
        times = size(trained) / size(rounding)
        if times <= ROUNDING:
            compare_rounded_paths(toy, plain, [a[:1] for a in batch], number)
            return f"in {number} to {times:.1f} times the plain operators' rounding"
        name, left = max(trained, key=trained.get), {}
        for op in choose.BODIES:
            with choose.plain(op):
                left[op] = size(errors(toy))
        op = min(left, key=left.get)
        fast, slow = choose.places(op, toy.config.backend, device, dtype)
    way_out = TORCH if fast == choose.BODIES[op][0] else f"train with --backend={device}, which calls no other library"
    raise ConfigError(f"self-check: in {number} {fast} and {slow} ({op}) disagree by {trained[name]:.0e} in {name}, "
                      f"{times:.0f} times the rounding of plain operators: {way_out}")


@torch.no_grad()
def compare_rounded_paths(toy, plain, batch, number):
    """In eval mode and under autocast to a 16-bit dtype: the loss alone and from logits, whole sequences and states."""
    x, y = batch
    alone, of_logits = ({"the loss": loss(toy, x, y)} for loss in (loss_alone, loss_of_logits))
    Tally(toy, {"typical": 1e-5}).agree("", of_logits, alone, lambda: f"in {number} {two_losses(toy)}", LOGITS)
    if all(b.has_state for _, b in toy.branches()):
        with torch.autocast(x.device.type, enabled=False):
            true = plain(x)[0]  # other libraries' kernels take 16 bits only
        usual, = differences({"": plain(x)[0]}, {"": true}).values()
        error, = differences({"": through_state(toy, x)}, {"": toy(x)[0]}).values()
        if error > max(ROUNDING * usual, OTHER_ORDER):
            places = locate.who(toy, lambda m: locate.differs_by_state(m, random_rows(toy), ROUNDING * usual))
            refuse(f"in {number} {places} over the whole sequence and through the state", error, "the logits", usual,
                   ROUNDING * usual, STATE)


# ----------------------------------------------------------------------------------------------------------- tolerances

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


def refuse_noise(got, wanted, when, way_out):
    """Raises ConfigError if two runs on the same tokens differ. If both are nan, another line says so."""
    error, name = max((error, name) for name, error in differences(got, wanted).items())
    if error > LEAST and not (got[name].isnan().any() and wanted[name].isnan().any()):
        raise ConfigError(f"self-check: the model is not deterministic: two runs on the same tokens, {when}, differ by "
                          f"{error:.0e} in {name}: {way_out}, or {OFF}")
