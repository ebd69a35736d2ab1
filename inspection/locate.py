"""Where two versions of the code differ, in words: for the lines of the check at the start (self_check.py)."""

import contextlib
import sys
import traceback
from pathlib import Path

import torch

from inspection.toys import (
    CUTS,
    DOCUMENTS,
    LEAST,
    differences,
    document_starts,
    gradients,
    in_float64,
    is_finite,
    loss_alone,
    loss_of_whole,
    loss_through_state,
    original,
    output_and_gradients,
    packing,
    random_rows,
    repeated,
    through_state,
)
from kernels import choose, ops

ROOT = Path(__file__).resolve().parents[1]


class Alone(torch.nn.Module):
    """A branch's mixer or norm, called as a branch is."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x, state=None):
        out = self.part(x) if state is None else self.part(x, state)
        return out if isinstance(out, tuple) else (out, None)

    def initial_state(self, batch_size, device):
        return self.part.initial_state(batch_size, device) if hasattr(self.part, "initial_state") else None


def who(toy, differs):
    """The mixers for which differs(module) is true, as 'model.py: ScanBlock.forward (Mamba)', and the norms; if neither
    are, the branches; the layers; or the model."""
    def alone(module):
        try:
            return differs(module)
        except Exception:  # it does not run alone: its layer passes it more than is usual
            return False

    branches = [branch for _, branch in toy.branches()]
    mixers = [of_mixer(branch) for branch in branches if alone(Alone(branch.mixer))]
    norms = [place(type(branch.norm).forward) for branch in branches if alone(Alone(branch.norm))]
    for modules in (branches, getattr(toy, "blocks", toy.layers)) if not mixers + norms else ():
        norms = norms or [place(type(module).forward) for module in modules if alone(module)]
    return ", ".join(dict.fromkeys(mixers + norms)) or place(type(toy).forward)


def of_mixer(branch):
    return f"{place(type(branch.mixer).forward)} ({type(branch.mixer).__name__})"


def place(function):
    """'model.py: LM.forward'."""
    file = f"{function.__module__.replace('.', '/')}.py"
    if file == "__main__.py":  # as experiments/vision/classify.py
        file = Path(sys.modules["__main__"].__file__).resolve().relative_to(ROOT)
    return f"{file}: {function.__qualname__}"


def described(error):
    """'IndexError: index 1 is out of range (model.py, line 439)', in the project's own file."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if ROOT in Path(f.filename).parents]
    where = f" ({Path(frames[-1].filename).relative_to(ROOT)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def which_operator(toy, plain, batch, tally):
    """The operator whose two versions differ, with their places; else the mixers that differ, or the model."""
    trains = gradients(toy, loss_alone, batch)
    for op in choose.BODIES:
        with choose.plain(op):
            slow = gradients(toy, loss_alone, batch)
        if tally.excess(slow, trains)[0] > 0.5 if is_finite(trains) else is_finite(slow):
            return operator_places(toy, op)
    twins, x = dict(zip(parts_of(toy), parts_of(plain), strict=True)), random_rows(toy)
    places = who(toy, lambda part: max(differences(output_and_gradients(part, x), output_and_gradients(
        twins.get(part) or Alone(twins[part.part]), x)).values()) > LEAST)
    return f"{places} with --backend={toy.config.backend or '(empty)'} and with --backend=torch"


def parts_of(toy):
    return [*getattr(toy, "blocks", toy.layers), *(part for _, b in toy.branches() for part in (b, b.mixer, b.norm))]


def operator_places(toy, op):
    """'longhorn_scan.cu: Exact, kernels/scan.py: _scan and kernels/scan.py: _exact_step, _loop (longhorn_scan)': both
    versions, with the functions that only one of them runs in the mixers and norms that differ."""
    x, ran, exact = random_rows(toy), ({}, {}), False
    starts = document_starts(x) if toy.config.documents == "pack" else None
    for part in (Alone(part) for _, branch in toy.branches() for part in (branch.mixer, branch.norm)):
        with ops.documents(starts), contextlib.suppress(Exception):  # what does not run alone is left out
            output_and_gradients(part, x)  # shapes are checked at the first call only
            fast, by_kernels = functions_of(output_and_gradients, part, x)
            with choose.plain(op):
                slow, by_loops = functions_of(output_and_gradients, part, x)
            if max(differences(fast, slow).values()) > LEAST:
                exact = exact or getattr(part.part, "exact", False)
                ran[0].update(by_kernels), ran[1].update(by_loops)
    places = []
    for table, mine, others in zip(choose.BODIES[op], ran, ran[::-1], strict=True):
        file, _, names = (table.replace("Longhorn", "Exact") if exact else table).partition(": ")
        more = [f for f in mine if f not in others and f.partition(": ")[2] not in names.split(", ")]
        files = {file: [n for n in names.split(", ") if f"{file}: {n}" in mine or not more or file.endswith(".cu")]}
        for f in reversed(more):
            files.setdefault(f.partition(": ")[0], []).append(f.partition(": ")[2])
        places.append(", ".join(f"{file}: {', '.join(names)}" for file, names in files.items() if names))
    return f"{places[0]} and {places[1]} ({op})"


def functions_of(run, *args):
    """(run(*args), {'kernels/scan.py: _loop': None} of the functions in kernels/ that it calls, but for build.py)."""
    codes, before, folder = {}, sys.getprofile(), Path(ops.__file__).parent

    def note(frame, event, _):  # at every call: it only collects
        if event == "call":
            codes[frame.f_code] = frame.f_globals

    sys.setprofile(note)
    try:
        result = run(*args)
    finally:
        sys.setprofile(before)
    files = {code: Path(code.co_filename) for code, names in codes.items() if code.co_name in names}
    return result, {f"kernels/{file.name}: {code.co_name}": None for code, file in files.items()
                    if file.parent == folder and file.name != "build.py"}


def which_state(toy, batch, tally):
    """The operator whose plain version keeps the right state, else the mixers that differ through the state."""
    def agrees(*plain):
        with choose.plain(*plain):
            with torch.no_grad():
                ys = {"the logits": through_state(toy, batch[0])}, {"the logits": toy(batch[0])[0]}
            both = [ys, [gradients(toy, loss, batch) for loss in (loss_through_state, loss_of_whole)]]
            return all(tally.excess(got, wanted)[0] < 1 for got, wanted in both)

    for op in choose.BODIES if toy.config.backend != "torch" else ():
        if agrees(op):
            return f"{' and '.join(choose.BODIES[op])} ({op})"
    if toy.config.documents == "pack":
        with packing(False, toy):
            if agrees():
                return place(type(toy).through_documents)
    return who(toy, lambda module: differs_by_state(module, random_rows(toy)))


def apart(a, b):
    """Whether two tensors differ by more than rounding."""
    return max(differences({"": in_float64(a)}, {"": in_float64(b)}).values()) > LEAST


def differs_by_state(module, x, allowed=LEAST):
    """Whether whole sequences and states differ, with gradients or without (where a cache grows in place)."""
    if hasattr(module, "branches"):
        start = [b.initial_state(len(x), x.device) for b in module.branches]
    else:
        start = module.initial_state(len(x), x.device)
    for graded in (True, False):
        with torch.set_grad_enabled(graded):
            ys = output_and_gradients(module, x), output_and_gradients(module, x, start, CUTS)
        if max(differences(*ys).values()) > allowed:
            return True
    return False


def differs_by_mode(module, x):
    """Whether training and eval mode, in which it leaves the module, differ."""
    trains = module.train()(x)[0]
    return apart(module.eval()(x)[0], trains)


def which_by_gradients(toy, batch):
    """The operator whose plain version is the same with gradients and under torch.no_grad, else the mixers that
    differ."""
    def differs(run, *args):
        with torch.no_grad(), repeated(toy):
            without = run(*args)
        with torch.enable_grad(), repeated(toy):
            return apart(run(*args), without)

    for op in choose.BODIES if toy.config.backend != "torch" else ():
        with choose.plain(op):
            if not differs(loss_alone, toy, *batch):
                return f"{' and '.join(choose.BODIES[op])} ({op})"
    return who(toy, lambda module: differs(lambda x: module(x)[0], random_rows(toy)))


def looks_ahead(module, x):
    """Whether outputs depend on a later token."""
    return apart(*(module(a)[0][:, :-1] for a in (x, torch.cat([x[:, :-1], -x[:, -1:]], 1))))


def leaks(module, x):
    """Whether packed documents differ from each document alone."""
    alone = torch.cat([module(part)[0] for part in x.split(DOCUMENTS, 1)], 1)
    with ops.documents(document_starts(x)):
        return apart(module(x)[0], alone)


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
    not_finite = lambda module: not is_finite(output_and_gradients(module, random_rows(toy)))
    return f"first behind {bad[0]}" if bad else f"see {who(toy, not_finite)}"
