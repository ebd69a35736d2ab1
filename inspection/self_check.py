"""The check at every start: code that exists in two versions must compute the same.

Some code exists twice. An operator has a kernel and a plain PyTorch version. A model runs on whole sequences and
through its state, and computes its loss with or without logits. Editing only one of the two would train one model
and sample another. So train.py builds a toy from the same code, with the first and the last layer of each family, and
makes the comparisons of TABLE. To add a comparison, write a function for each new side, and a row.

The tolerance of a tensor is the larger of LEAST and FACTOR times the plain operators' own error in float32, measured
against the same toy in float64. Where the two sides sum in different orders, OTHER_ORDER replaces LEAST. If training
computes in bfloat16, the rows of IN_16_BITS compare in bfloat16. There the tolerance of operators and states is
ROUNDING times the plain operators' own error. Kernels of other libraries that take only 16 bits are compared only
there.

`--self_check=off` skips the check, `--self_check=only` stops after it.
"""

import contextlib
import copy
import functools
import inspect
import math
import os
import statistics
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F

from common.errors import ROOT, ConfigError, described
from inspection.toys import (
    CUTS,
    DOCUMENTS,
    IN_ONE,
    batch_of,
    constants,
    is_packed,
    original,
    repeated,
    short,
    sizes_to_try,
    toy_of,
)
from kernels import build, choose, ops
from model import tensors_of

SCANS = ("longhorn_scan", "selective_scan")
LEAST = 1e-5  # a difference below this is rounding
OTHER_ORDER = 2e-4  # allowed where the two sides sum in different orders: a toy may amplify rounding
FACTOR = 10
NAN = 1e30  # stands for nan and inf
ROUNDING = 3  # allowed multiple of the plain operators' own error in 16 bits


# --------------------------------------------------------------- what a side computes: (model, x, y) -> {name: tensor}

LOSS = "the loss"
LOGITS = "the logits"
EARLY = "the logits before the last token"
LAST = "the logits of the last token"
ENDS = "the logits where pieces end"
OTHERS = "the logits of the other rows"


def loss_alone(model, x, y):
    """The loss as training and evaluation compute it."""
    return {LOSS: model(x, y, loss_only=True)[1]}


def loss_alone_again(model, x, y):
    return loss_alone(model, x, y)


def loss_alone_compiled(model, x, y):
    """The loss if torch.compile traces the layers, without its code generator."""
    layers = list(dict.fromkeys(getattr(model, "layers", [model])))
    for layer in layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager")
    try:
        return loss_alone(model, x, y)
    except Exception as error:
        raise ConfigError("self-check: a small version of this model runs, but not if its layers are compiled: "
                          f"{described(error)}: {COMPILED.way_out}") from error
    finally:
        for layer in layers:
            del layer.forward


def both(model, x, y):
    logits, loss = model(x, y)
    return {LOGITS: logits, LOSS: loss}


def whole(model, x, y):
    """Logits without targets, and the parts of these logits that other sides compute alone."""
    logits = model(x)[0]
    ends = [piece[:, -1:] for piece in logits.tensor_split(CUTS, 1)]
    return scored(logits, y) | {OTHERS: logits[1:], EARLY: logits[:, :-1], LAST: ends[-1], ENDS: torch.cat(ends, 1)}


def scored(logits, y):
    """Logits and their plain cross-entropy: whatever loss is trained on, sampling uses these logits."""
    values = {LOGITS: logits}
    if y.shape == logits.shape[:-1]:
        values[LOSS] = F.cross_entropy(logits.flatten(0, -2), y.flatten(), ignore_index=-1)
    return values


def after_another_row(model, x, y):
    """Logits of the other rows after the first row is replaced, then of all rows as they are."""
    other = x.clone()
    other[0] = x[-1]
    return {OTHERS: model(other)[0][1:], LOGITS: model(x)[0]}


def with_another_end(model, x, y):
    other = x.clone()
    other[:, -1] = (x[:, -1] + 1) % model.config.vocab_size
    return {EARLY: model(other)[0][:, :-1]}


def with_last_only(model, x, y):
    return {LAST: model(x, last_only=True)[0]}


def each_document(model, x, y):
    parts = []
    model.config.documents = "join"
    for row, lengths in zip(x.split(1), DOCUMENTS, strict=True):
        for document in row.split(lengths, 1):
            parts.append(model(document)[0])
    model.config.documents = "pack"
    return {LOGITS: torch.cat(parts, 1).unflatten(1, x.shape)[0]}


def through_state(model, x, y):
    return scored(in_pieces(model, x, CUTS[1:]), y)


def as_sampled(model, x, y):
    return {ENDS: in_pieces(model, x, CUTS, last_only=True)}


def in_pieces(model, x, cuts, **last_only):
    """Logits of x, read in pieces. With last_only, only the logits of each piece's last token; then two states are also
    continued with another token, which must not change them."""
    if len(x) > 1 and is_packed(model) and any(0 in a.shape for a in tensors_of(model.initial_state(1))):
        # a cache that grows has one length for all rows, so no single row can be emptied
        return torch.cat([in_pieces(model, row, cuts, **last_only) for row in x.split(1)])
    state = model.initial_state(len(x))
    parts = []
    for i, part in enumerate(x.tensor_split(cuts, 1)):
        if last_only and i == 1:
            continue_otherwise(model, part, state)
        logits, _, after = model(part, state=state, **last_only)
        if last_only and i == 2:
            continue_otherwise(model, part, state)
        parts.append(logits)
        state = after
    return torch.cat(parts, 1)


def continue_otherwise(model, part, state):
    model.heard = False
    model((part[:, :1] + 1) % model.config.vocab_size, state=state)
    model.heard = True


def squares_of_scans(model, x, y):
    """The sum of the squared outputs of one mixer per class with a scan, over five chunks, to compare compiled code."""
    rows = torch.randn(1, 4 * build.CHUNK + 8, model.config.n_embd, device=x.device)
    squares = 0.0
    mixers = {type(b.mixer): b.mixer for _, b in model.branches() if getattr(b.mixer, "operator", None) in SCANS}
    starts = torch.arange(rows.shape[1], device=x.device)[None] % 57 == 3
    with ops.documents(starts if is_packed(model) else None):
        for mixer in mixers.values():
            squares = squares + output(mixer(rows)).square().sum()
    return {LOSS: squares}


def output(out):
    """A module's output without its state."""
    return out[0] if isinstance(out, tuple) else out


# ------------------------------------------------------------------------------------------------------------ the table

class Kind(NamedTuple):
    words: str  # what agrees, for the line that self_check returns
    how: str  # what the two sides are, printed after the place where they differ
    way_out: str
    least: float = OTHER_ORDER
    factor: float = FACTOR


OFF = "--self_check=off trains without the check"
RANDOM = Kind("", ", run twice in training mode from the same random state,", "the model is not deterministic: draw "
              f"random numbers from PyTorch, and keep no state in the model, or {OFF}", LEAST, 0)
ALWAYS_RANDOM = Kind("", ", run twice on the same tokens in eval mode,", "the model is not deterministic: draw random "
                     "numbers and change buffers only if self.training, as F.dropout(x, p, self.training) does, or "
                     f"{OFF}", LEAST, 0)
MODES = Kind("training and eval mode", " in training and in eval mode",
             "edit both modes, or you evaluate and sample another model than you train", LEAST)
GRADED = MODES._replace(words="", how=" with gradients and under torch.no_grad")
COMPILED = Kind("compiled layers and layers as they are", " compiled and as it is",
                "train with --compile=false, or with another version of PyTorch")
LOSSES = Kind("the loss alone and from logits", ", the loss alone and the loss from logits (kernels/ops.py: "
              "cross_entropy, _LinearCrossEntropy),", "edit both, or --loss_from_logits=true, which trains on the loss "
              "of the logits (and needs more memory)", LEAST)
OPERATORS = Kind("{kernels} and plain operators", " with --backend={backend} and with --backend=torch",
                 "edit both, or train with --backend=torch, which runs plain PyTorch everywhere")
STATES = Kind("whole sequences and states", " over the whole sequence and through the state",
              "edit both paths, or you sample another model than you train; for positions, count the tokens in the "
              "state, as CountingTimeMix of families/released.py does")
AHEAD = Kind("", " before two different last tokens", f"it sees later tokens: mix earlier tokens only, or {OFF}", LEAST,
             0)
ROWS = Kind("", " beside two different rows", f"it mixes rows of a batch: compute each row by itself, or {OFF}", LEAST,
            0)
SCORED = Kind("", " in eval mode, its loss and the cross-entropy of its logits,", "add terms and factors only if "
              "self.training, or reported losses cannot be compared", LEAST, 0)
DOCUMENT = Kind("documents", " over packed documents and over each document alone",
                "start each document from an empty state, as token_shift of mixers.py does, or use --documents=join")


class Side(NamedTuple):
    run: object  # one of the functions above
    mode: str = "either"  # train, eval; either: train, or eval if training is random; other: the opposite of either
    graded: bool = False  # also compare the gradient of each parameter
    plain: bool = False  # with plain operators
    rounded: bool = False  # under autocast to training's 16 bits
    one_row: bool = False  # only one row, because loops in 16 bits are slow


class Row(NamedTuple):
    kind: Kind
    one: Side
    other: Side
    needs: str = ""  # names that must be in Check.has
    only: str = ""  # the one name to compare; else all names that both sides have
    usual: tuple = ()  # two sides whose difference is the usual error; else it is the rounding of float32


STARTS = Side(loss_alone, "train")
TRAINS = Side(loss_alone, graded=True)
LOGGED = Side(both, graded=True)
PLAIN = LOGGED._replace(plain=True)
OTHER = Side(both, "other")
SCANNED = Side(squares_of_scans, graded=True)
EVALUATES = Side(whole, "eval")
BESIDE = Side(both, "eval")
AFTER = Side(after_another_row, "eval")
IN_EVAL = Side(loss_alone, "eval")
IN_TRAINING = Side(whole, "train")
ROUNDED = Side(whole, "eval", rounded=True, one_row=True)
ROUNDED_LOSS = ROUNDED._replace(run=loss_alone, graded=True)
ROUNDED_PLAIN = ROUNDED._replace(run=both, graded=True, plain=True)
EXACT = ROUNDED_PLAIN._replace(rounded=False)
TABLE = (
    Row(ALWAYS_RANDOM, EVALUATES, AFTER, only=LOGITS),
    Row(RANDOM, STARTS, Side(loss_alone_again, "train")),
    Row(GRADED, Side(loss_alone), TRAINS),
    Row(COMPILED, Side(loss_alone_compiled, graded=True), TRAINS, "compiled"),
    Row(LOSSES, LOGGED, TRAINS, "kernels"),
    Row(OPERATORS, PLAIN, TRAINS, "kernels"),
    Row(LOSSES, OTHER, Side(loss_alone, "other"), "kernels"),
    Row(OPERATORS, OTHER._replace(plain=True), OTHER, "kernels random"),
    Row(OPERATORS, SCANNED._replace(plain=True), SCANNED, "kernels scans"),
    Row(MODES, BESIDE, Side(both, "train"), "steady", LOGITS),
    Row(STATES._replace(words="", how=" with and without targets", least=LEAST), BESIDE, EVALUATES, "all_logits",
        LOGITS),
    Row(SCORED, IN_EVAL, EVALUATES, "tokens", LOSS),
    Row(AHEAD, Side(with_another_end, "eval"), EVALUATES, "tokens"),
    Row(ROWS, AFTER, EVALUATES, only=OTHERS),
    Row(AHEAD, Side(with_another_end, "train"), IN_TRAINING, "random tokens"),
    Row(ROWS, AFTER._replace(mode="train"), IN_TRAINING, "random", OTHERS),
    Row(STATES._replace(words="", how=" with and without last_only"), Side(with_last_only, "eval"), EVALUATES,
        "last_only"),
    Row(DOCUMENT, EVALUATES, Side(each_document, "eval"), "packed"),
    Row(STATES, Side(as_sampled, "eval"), EVALUATES, "state last_only"),
    Row(STATES, Side(through_state, "eval", graded=True), EVALUATES._replace(graded=True), "state"),
    Row(GRADED, EVALUATES, EVALUATES._replace(graded=True), "state", LOGITS),
)
IN_16_BITS = (
    Row(OPERATORS._replace(least=LEAST, factor=ROUNDING), ROUNDED_LOSS, EXACT, usual=(ROUNDED_PLAIN, EXACT)),
    Row(LOSSES._replace(least=1e-4, factor=0), ROUNDED, ROUNDED._replace(run=loss_alone)),
    Row(OPERATORS._replace(least=LEAST, factor=ROUNDING), ROUNDED_PLAIN, EXACT, usual=(ROUNDED_LOSS, EXACT)),
    Row(STATES._replace(factor=ROUNDING), ROUNDED._replace(run=through_state), ROUNDED, "state", LOGITS,
        (ROUNDED_PLAIN, EXACT)),
)


# ------------------------------------------------------------------------------------------------------------ the check

def self_check(model, dtype=torch.float32, compiled=False):
    """Return a line that says what agreed. Raises ConfigError with both places and the way out if two versions differ.

    dtype: training's dtype of matrix products; compiled: True if training compiles layers. A model that is not an LM
    needs toy(backend) -> a small model of the same code, and toy_batch() -> (x, y) if its inputs are not tokens.
    Neither the model nor the random state is changed.
    """
    began = time.perf_counter()
    device = next(model.parameters()).device
    backend = model.config.backend
    in_16_bits = dtype != torch.float32 and backend != "torch"
    precision = torch.get_float32_matmul_precision()
    way_out = (f"correct that, or if other sizes run define toy(self, backend) in {type(model).__name__} to return a "
               "model of such sizes, as Vision of experiments/vision/classify.py does")
    torch.set_float32_matmul_precision("highest")
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), constants(short(is_packed(model))):
        try:
            with choose.plain("libraries") if in_16_bits else contextlib.nullcontext():
                check = Check(model, device, dtype, compiled)
                way_out = "correct that"
                line = check.in_float32()
            if in_16_bits:
                line += check.in_16_bits()
        except ConfigError:
            raise
        except Exception as error:  # an edit may raise anything
            raise ConfigError(f"self-check: a small version of this model does not run: {described(error)}: {way_out}, "
                              f"or {OFF}") from error
        finally:
            torch.set_float32_matmul_precision(precision)
    return f"self-check: {line} ({1000 * (time.perf_counter() - began):.0f} ms)"


class Gap(NamedTuple):
    """How much two sides differ in one tensor."""
    excess: float = 0.0  # error / allowed
    error: float = 0.0
    usual: float = 0.0
    allowed: float = 0.0
    name: str = ""


class Check:
    """A model's toys, and the values computed with them."""

    def __init__(self, model, device, dtype, compiled):
        self.device = device
        self.dtype = dtype
        self.backend = model.config.backend
        self.known = {}  # {side: its values}
        self.build(model)
        self.varies = bool(self.drew)  # draws random numbers or changes buffers in training mode
        toy = self.toy
        mixers = [branch.mixer for _, branch in toy.branches()]
        tokens = not hasattr(toy, "toy_batch")
        has = {  # what a row may need
            "kernels": self.backend != "torch",
            "compiled": compiled,
            "random": self.varies,
            "steady": not self.varies,
            "scans": any(getattr(mixer, "operator", None) in SCANS for mixer in mixers),
            "state": all(hasattr(mixer, "initial_state") for mixer in mixers),
            "tokens": tokens,
            "packed": tokens and is_packed(toy),
            "last_only": tokens and "last_only" in inspect.signature(toy.forward).parameters,
            "all_logits": self.value(BESIDE)[LOGITS].shape == self.value(EVALUATES)[LOGITS].shape,
        }
        self.has = {name for name, true in has.items() if true}
        native = "native" if choose.unavailable(device.type) is None else "the fastest"
        self.words = {"kernels": self.backend or native, "backend": self.backend or "(empty)",
                      "dtype": str(dtype).removeprefix("torch.")}

    def build(self, model):
        """Build the toy, the same toy with plain operators, and their inputs, at the first sizes that run. Raises the
        last error if no sizes run."""
        failed = None
        for sizes in sizes_to_try(model):
            try:
                self.toy = self.plain = toy_of(model, self.device, self.backend, **sizes)
                if self.backend != "torch":
                    self.plain = toy_of(model, self.device, "torch", **sizes)
                self.batch = [a.to(self.device) for a in batch_of(self.toy)]
                return self.value(STARTS)
            except Exception as error:  # such as a width that its heads do not divide
                failed = error
        raise failed

    def in_float32(self):
        """Return a line that says what agreed. Raises ConfigError for the first row of TABLE whose sides differ."""
        self.refuse_nan()
        gaps = self.compared(TABLE)
        worst = max(gaps.values(), key=lambda gap: gap.error)
        agreed = dict.fromkeys(row.kind.words.format(**self.words) for row in gaps)
        without = dict.fromkeys(type(b.mixer).__name__ for _, b in self.toy.branches() if not b.has_state)
        left_out = f"; state left out: {', '.join(without)} keeps none" if without else ""
        return f"{', '.join(filter(None, agreed))} agree to {worst.error:.0e} ({worst.allowed:.0e} allowed){left_out}"

    def in_16_bits(self):
        """Say how well the operators agree. Raises ConfigError for the first row of IN_16_BITS whose sides differ."""
        gap = self.compared(IN_16_BITS)[IN_16_BITS[0]]
        times = gap.error / max(gap.usual, LEAST)
        return f"; in {self.words['dtype']} to {times:.1f} times the plain operators' rounding"

    def compared(self, table):
        """{row: its largest Gap} for all rows that apply. Raises ConfigError for the first row whose sides differ."""
        largest = {}
        for row in table:
            if set(row.needs.split()) <= self.has:
                largest[row] = gap = max(self.gaps(row, self.value), default=Gap())
                if gap.excess > 1:
                    self.refuse(row, gap)
        return largest

    # ------------------------------------------------------------------------------------------------- values of sides

    def value(self, side):
        """{name: value} of a side's loss or logits and of every parameter's gradient, if it has one."""
        side = self.resolved(side)
        if side not in self.known:
            self.known[side] = self.measured(side)
        return self.known[side]

    def resolved(self, side):
        """The side with its mode filled in, so that sides that compute the same are equal."""
        mode = side.mode
        if mode in ("either", "other"):
            mode = "train" if (mode == "either") != self.varies else "eval"
        return side._replace(mode=mode, plain=side.plain and self.backend != "torch")

    def measured(self, side, model=None):
        side = self.resolved(side)
        model = model or (self.plain if side.plain else self.toy)
        batch = [a[:1] if side.one_row else a for a in self.batch]
        wide = next(model.parameters()).dtype
        batch = [a.to(wide) if a.is_floating_point() else a for a in batch]
        model.train(side.mode == "train")
        pieces = IN_ONE if side.plain or side.one_row else {}
        with constants(pieces), repeated(model) as self.drew, torch.set_grad_enabled(side.graded):
            with torch.autocast(self.device.type, self.dtype, enabled=side.rounded):
                values = side.run(model, *batch)
            if side.graded:
                named = {f"the gradient of {name}": p for name, p in model.named_parameters() if p.requires_grad}
                grads = torch.autograd.grad(values[LOSS], list(named.values()), materialize_grads=True)
                values |= zip(named, grads, strict=True)
        return {name: exact(a) for name, a in values.items()}

    def gaps(self, row, value):
        """The Gap between a row's two sides in each tensor of value(side)."""
        errors = differences(value(row.one), value(row.other), row.only)
        gaps = []
        if row.usual:  # not by tensor: a tiny tensor may be right by chance; a mistake is 100 times the rounding
            usual = root_mean_square(differences(*map(value, row.usual), row.only))
            errors = {max(errors, key=errors.get): root_mean_square(errors)}
        for name, error in errors.items():
            if not row.usual:
                asked = row.kind.factor and error > row.kind.least  # only then: it takes time
                usual = self.usual.get(branch_of(name), self.usual["typical"]) if asked else 0.0
            allowed = max(row.kind.least, row.kind.factor * usual)
            gaps.append(Gap(error / allowed, error, usual, allowed, name))
        return gaps

    @functools.cached_property
    def usual(self):
        """{branch: largest error} of the plain operators in float32 against float64, and the median of all as
        "typical"."""
        try:
            side = TRAINS if self.backend == "torch" else PLAIN
            errors = differences(self.value(side), self.measured(side, copy.deepcopy(self.plain).double()))
        except Exception:  # code that mixes dtypes, or cannot be copied
            return {"typical": 2e-5}
        usual = {"typical": statistics.median(errors.values())}
        for name, error in errors.items():
            usual[branch_of(name)] = max(min(error, 1e-3), usual.get(branch_of(name), 0.0))
        return usual

    # -------------------------------------------------------------------------------------------------- where they part

    def refuse(self, row, gap):
        """Raises ConfigError with the place where a row's sides begin to differ."""
        kind = row.kind
        rounded = row in IN_16_BITS
        how = kind.how.format(**self.words)
        way_out = kind.way_out
        operator = self.operator(row, gap)
        if operator:
            fast, slow = choose.places(operator, self.backend, self.device.type, self.dtype if rounded else None)
            where = f"{fast} and {slow} ({operator})"
            if way_out in (OPERATORS.way_out, LOSSES.way_out):
                how = ""
            if fast != choose.BODIES[operator][0]:
                way_out = f"train with --backend={self.device.type}, which calls no other library"
        else:
            where = self.module(row)
        if rounded:
            where = f"in {self.words['dtype']} {where}"
        by = f"{gap.error:.0e}"
        if kind is SCORED:
            by = f"{float(self.value(row.one)[LOSS] - self.value(row.other)[LOSS]):.1e} nats"
        raise ConfigError(f"self-check: {where}{how} disagree by {by} in {original(self.toy, gap.name)} "
                          f"({gap.usual:.0e} is usual, {gap.allowed:.0e} allowed): {way_out}")

    def operator(self, row, gap):
        """The operator whose plain implementation would make a row's sides agree, or None."""
        if row.kind in (RANDOM, ALWAYS_RANDOM, COMPILED):
            return None
        asked = set()

        def noted(operator, *args, body=choose.choose, **kwargs):
            asked.add(operator)
            return body(operator, *args, **kwargs)

        with constants({(choose, "choose"): noted}):
            self.gaps(row, self.measured)
        left = []
        for operator in asked:
            with choose.plain(operator), constants(IN_ONE):
                left.append((max(self.gaps(row, self.measured)).excess, operator))
        best, operator = min(left, default=(gap.excess, ""))
        return operator if best < gap.excess / 2 else None

    def module(self, row):
        """The place where a row's sides begin to differ: the first module whose output differs for the same input, or
        the last module whose gradient differs."""
        toy = self.toy
        if row.kind.how == STATES.how and is_packed(toy):
            toy.config.documents = "join"
            joined = max(self.gaps(row, self.measured))
            toy.config.documents = "pack"
            if joined.excess < 1:
                return place(type(toy).through_documents)
        one = self.calls(row.one)
        other = self.calls(row.other)
        errors = {}
        ratios = {}
        for name in [name for name in one if name in other]:
            given, returned = one[name]
            also_given, returned_then = other[name]
            errors[name] = apart(returned, returned_then, row.kind)
            ratios[name] = errors[name] / max(apart(given, also_given, row.kind), LEAST / 10)
        best = max(ratios.values(), default=0.0)
        if best > 10:
            name = next(name for name, ratio in ratios.items() if ratio > best / 4)
            inside = [inner for inner, ratio in ratios.items()  # their input is rounded, but their error as large
                      if inner.startswith(f"{name}.") and ratio > 10 and errors[inner] > errors[name] / 2]
            return self.place_of((inside or [name])[0])
        wrong = [gap.name for gap in self.gaps(row, self.measured) if gap.excess > 1]
        return self.place_behind(wrong if max(errors.values(), default=0.0) < LEAST else [])

    def calls(self, side):
        """{name: (its inputs, its outputs)}, a list each, for all modules that are not PyTorch's own, in the order in
        which they return."""
        calls = {}

        def note(name, module, args, out):
            heard = getattr(self.toy, "heard", True) and not torch.compiler.is_compiling()
            if heard and torch.is_tensor(output(out)):
                given, returned = calls.setdefault(name, ([], []))
                given.append(args[0])
                returned.append(output(out))

        with contextlib.ExitStack() as hooks:
            for name, module in (self.plain if side.plain else self.toy).named_modules():
                if name and not type(module).__module__.startswith("torch."):
                    hooks.enter_context(module.register_forward_hook(functools.partial(note, name)))
            self.measured(side)
        return calls

    def place_of(self, name):
        module = type(self.toy.get_submodule(name))
        return place(module.forward) + (f" ({module.__name__})" if ".mixer" in name else "")

    def place_behind(self, wrong):
        """Where the backward pass went wrong: in the mixer of the last branch with a gradient among `wrong`, or in the
        model."""
        behind = [name for name, _ in self.toy.branches() if any(f" {name}." in tensor for tensor in wrong)]
        if not behind or "the loss" in wrong or "the gradient of norm.weight" in wrong:
            return place(type(self.toy).forward)
        return self.place_of(f"{behind[-1]}.mixer")

    def refuse_nan(self):
        """Raises ConfigError if both the kernels and the plain operators compute nan."""
        values = self.value(TRAINS)
        wrong = [name for name, a in values.items() if a.abs().max() >= NAN]
        if not wrong or all(a.abs().max() < NAN for a in self.value(PLAIN).values()):
            return
        calls = self.calls(TRAINS)
        names = [name for name, (_, returned) in calls.items() if not all(a.isfinite().all() for a in returned)]
        where = self.place_of(names[0]) if names else self.place_behind(wrong)
        raise ConfigError("self-check: the loss of a small version of this model or its gradient is nan: "
                          f"see {where}: correct that, or {OFF}")


def branch_of(name):
    """The part of a tensor's name before its mixer: "the gradient of layers.0.branches.1"."""
    return name.partition(".mixer.")[0]


def exact(a):
    """`a` in float64 on the CPU, with NAN in place of nan and inf."""
    return a.detach().double().cpu().nan_to_num(NAN, NAN, NAN)


def differences(got, wanted, only=""):
    """{name: |got - wanted| / |wanted|} in the 2-norm, for the names that both have, or for one of them (`only`)."""
    names = [name for name in got if name in wanted and only in (name, "")]
    floor = 1e-30 + 1e-6 * max([float(wanted[name].norm()) for name in names if name != LOGITS], default=0.0)
    return {name: float((got[name] - wanted[name]).norm() / (wanted[name].norm() + floor))  # gradients may be rounding
            for name in names}


def root_mean_square(errors):
    return math.hypot(*errors.values()) / math.sqrt(len(errors))


def apart(one, other, kind):
    """The difference between two tensors (B, T, d), each a list of pieces along T, where they should be equal; 0 if
    they cannot be compared."""
    if one[0].dim() != 3:
        return 0.0
    a = exact(torch.cat(one, 1))
    b = exact(torch.cat(other, 1))
    T = min(a.shape[1], b.shape[1])
    part = slice(T) if kind is ROWS else slice(-T, -1)  # the last token may differ
    rows = min(len(a), len(b)) - (kind is ROWS)  # and so may the first row
    a = a[-rows:, part]
    b = b[-rows:, part]
    return differences({"": a}, {"": b})[""] if a.shape == b.shape else 0.0


# ------------------------------------------------------------------------------------------------------------- in words

def place(function):
    """Name a function and its file: 'model.py: LM.forward'."""
    file = inspect.getsourcefile(inspect.unwrap(function))
    return f"{os.path.relpath(file, ROOT)}: {function.__qualname__}"
