"""Where two versions of the code differ, in words: for the lines of the check at the start (self_check.py)."""

import sys
import traceback
from pathlib import Path

import torch

from kernels import build, ops
from runtime.toys import (
    CUTS,
    DOCUMENTS,
    LEAST,
    differences,
    gradients,
    is_finite,
    loss_alone,
    original,
    output_and_gradients,
    random_rows,
    repeated,
)


def who(toy, differs):
    """The mixers of the branches for which differs(branch) is true, as 'model.py: ScanBlock.forward (Mamba)'; if there
    are none, the layers'; or the model."""
    mixers = [of_mixer(branch) for _, branch in toy.branches() if differs(branch)]
    layers = [place(type(layer).forward) for layer in toy.layers if not mixers and differs(layer)]
    return ", ".join(dict.fromkeys(mixers or layers)) or place(type(toy).forward)


def of_mixer(branch):
    return f"{place(type(branch.mixer).forward)} ({type(branch.mixer).__name__})"


def place(function):
    """'model.py: LM.forward'."""
    return f"{function.__module__.replace('.', '/')}.py: {function.__qualname__}"


def described(error):
    """'IndexError: index 1 is out of range (model.py, line 439)', in the project's own file."""
    root = Path(__file__).resolve().parents[1]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if root in Path(f.filename).parents]
    where = f" ({Path(frames[-1].filename).relative_to(root)}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


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
