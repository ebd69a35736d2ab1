"""Did my edit help? Trains both versions in pairs of runs until it can tell, and answers in one sentence.

    python experiments/edit.py                        the working tree against HEAD, or --against=COMMIT
    python experiments/edit.py config/kda_laptop.py --data=mine --sizes=460K,1.5M --minutes=60
    python experiments/edit.py A B fix.patch .        several: commits, branches, patches of HEAD, the working tree
    edit: better, needs 0.96 (0.93 .. 0.99) times the tokens of HEAD (16 + 16 runs, 3 minutes)

All versions run from snapshots of the files that training loads, so you can go on editing. The runs of a pair share
seed, tokens and the initial values of all parameters that both have, so most of the noise cancels. From the sixth pair
on, a sequential test after each pair decides whether to stop; with --pairs, all pairs run. Several edits share HEAD's
runs, the minutes and one probability of a false verdict, and are ranked. Kill it at any time: the same command resumes.
HEAD's runs are reused for the next edit, and edits.html beside them lists all edits that were tried.

Exit codes: 0 better, 1 worse or diverges, 2 a mistake, 3 no difference above --margin, 4 undecided; with several edits,
the code of the best. Each version trains at its config's learning rate, scaled to the width of the size. Schedule (wsd,
to 0), budget, evaluation and seeds are set here and override the config. An edit is refused if its loss is not the
cross-entropy of its logits, or if its logits depend on more than the preceding tokens (edit_judge.py). The other edits
go on.
"""

import os
import sys

if __name__ == "__main__":  # an uncaught error would end with exit code 1, which means "worse"
    sys.excepthook = lambda *error: (sys.__excepthook__(*error), os._exit(2))

import contextlib
import difflib
import hashlib
import itertools
import json
import shutil
import subprocess
import tempfile
import textwrap
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated

import numpy as np
from scipy import special

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from common.errors import ConfigError, printable  # noqa: E402
from common.files import append, lock_folder, write_text  # noqa: E402
from configurator import Range, Whole  # noqa: E402
from data.mixture import parse_mixture  # noqa: E402
from data.prepared import Tokens, find_dataset  # noqa: E402
from evaluation.tasks import table  # noqa: E402
from experiments import compare, pages, records, sweep  # noqa: E402
from experiments.figures import Curve, Panel  # noqa: E402
from experiments.sweeps import runner  # noqa: E402
from experiments.sweeps.experiment import Experiment, Where  # noqa: E402
from runtime.loss_curve import points  # noqa: E402
from runtime.records import BadRecord, cpu_model, fields, is_finished, read_json, write_json  # noqa: E402

CODES = {"better": 0, "same": 3, "undecided": 4, "worse": 1, "refused": 2}  # the best verdict first
SIZES = {size: list(s.argv) for size, s in sweep.PRESETS["duel"].sizes.items()} | {"config": []}
CURVE_PAIRS, FEWEST = 4, 6  # pairs that also run HEAD for 1/4 and 1/2 of the budget; fewest pairs before a verdict
PROBE = REPO / "experiments" / "edit_probe.py"
JUDGE = REPO / "experiments" / "edit_judge.py"
ROUNDING = 5e-5  # allowed difference in nats between two sums of the same losses
ALIKE = {"float32": 5e-4, "bfloat16": 2e-3}  # the same, for 64 tokens computed in other batches


# ------------------------------------------------------------------------------------------------------------- versions

@dataclass
class Version:
    """A version of the code to train. root: a snapshot of `files` {path: hash} of `tree`; name: for sentences; about:
    a description; changed: the files that differ from HEAD's; out: the folder of an edit's record."""

    name: str
    about: str
    tree: Path
    root: Path = None
    out: Path = None
    changed: list = ()
    files: dict = field(default_factory=dict)
    probes: dict = field(default_factory=dict)  # {size: what edit_probe.py says}
    sides: dict = field(default_factory=dict)  # {size: Side}

    @property
    def verdict(self):
        """The verdict of all sizes; "undecided" if they disagree."""
        verdicts = {side.numbers["verdict"] for side in self.sides.values()}
        return verdicts.pop() if len(verdicts) == 1 else "undecided"


def output(command, otherwise, **how):
    """Run a command and return what it prints. If it fails, raises ConfigError with `otherwise` and its last line."""
    ran = subprocess.run([*map(str, command)], capture_output=True, **how)
    if ran.returncode:
        words = ran.stderr.decode(errors="replace").strip() or "no output"
        raise ConfigError(f"{otherwise}: {words.splitlines()[-1]}")
    return ran.stdout


def ask(program, name, root, *arguments):
    """Run edit_probe.py or edit_judge.py on a version and return its record. Raises ConfigError if it fails."""
    said = output([sys.executable, program, *arguments], f"{name} does not start", cwd=root)
    return json.loads(said.splitlines()[-1])


def commit_of(name):
    """The hash of a commit or branch."""
    return output(["git", "-C", REPO, "rev-parse", "--verify", f"{name}^{{commit}}"],
                  f"{name}: there is no such commit in {REPO}").decode().strip()


def checkout(code, commit, patch=None):
    """Write the files of a commit to a new folder in `code`, apply the patch, if any, and return the folder. Links out
    of the clone keep their targets. Raises ConfigError if the patch does not apply."""
    tree = Path(tempfile.mkdtemp(dir=code, prefix="tmp-"))
    archive = output(["git", "-C", REPO, "archive", commit], "git archive fails")
    output(["tar", "-xf", "-", "-C", tree], f"no snapshot of {commit[:10]} in {code}", input=archive)
    for path in tree.rglob("*"):
        if path.is_symlink() and not path.exists():
            target = REPO / path.parent.relative_to(tree) / os.readlink(path)
            path.unlink()
            path.symlink_to(target)
    if patch:
        outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(code)}  # otherwise git would use the clone above
        output(["git", "-C", tree, "apply", Path(patch).resolve()], f"{patch} does not apply to {commit[:10]}",
               env=outside)
    return tree


def take_todays_judge(tree):
    """Replace a version's evaluation and loader with those of the working tree."""
    for folder in ("evaluation", "data"):
        for path in (tree / folder).glob("*.py"):
            path.unlink()
        for path in (REPO / folder).glob("*.py"):
            shutil.copyfile(path, tree / folder / path.name)


def snapshot(version, code, sizes):
    """Copy the files that training at these sizes loads from a version's tree to code/<their hash>, following links. A
    copy that was changed since is made again. Raises ConfigError if the version does not start, or if the tree is
    edited meanwhile."""
    for size, argv in sizes.items():
        probe = ask(PROBE, version.name, version.tree, *argv, REPO / "data")  # data/ tells the vocabulary
        version.probes[size] = probe
        version.files |= probe["files"]
    version.root = code / short_hash(sorted(version.files.items()))
    code_there = {path.relative_to(version.root).as_posix() for path in version.root.rglob("*.py")}
    if holds(version.root, version.files) and code_there <= version.files.keys():  # families/ loads every file in it
        return
    copy = Path(tempfile.mkdtemp(dir=code, prefix="tmp-"))
    for name in version.files:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(version.tree / name, copy / name)
    if not holds(copy, version.files):
        raise ConfigError(f"{version.name} was edited while this program was starting: start it again")
    shutil.rmtree(version.root, ignore_errors=True)
    copy.rename(version.root)


def holds(folder, files):
    """True if a folder has these files, {path: hash}."""
    there = [name for name in files if (folder / name).is_file()]
    return files == {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in there}


def short_hash(value):
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


def versions_of(args, code, sizes):
    """[HEAD's Version, one per edit ...] with snapshots in `code`; edits of equal content are merged. Raises
    ConfigError."""
    remove_trees(code)  # left by a killed run
    began = time.strftime("%H:%M")
    head = commit_of(args.against)
    found = [Version(args.against, f"{args.against} ({head[:10]})", checkout(code, head))]
    for word in args.edits or ["."]:
        if word == ".":
            name = word if len(args.edits) > 1 else "the edit"
            found.append(Version(name, f"the working tree at {began}", REPO))
        elif word.endswith((".patch", ".diff")):
            found.append(Version(word, f"{word}, applied to {head[:10]}", checkout(code, head, word)))
        else:
            commit = commit_of(word)
            found.append(Version(word, f"{word} ({commit[:10]})", checkout(code, commit)))
    for version in found:
        if args.todays_judge and version.tree != REPO:
            take_todays_judge(version.tree)
        snapshot(version, code, sizes)
    remove_trees(code)
    edits = {}
    for edit in found[1:]:
        first = edits.setdefault(edit.root, edit)
        if first is not edit:
            first.name += f" = {edit.name}"
    return [found[0], *edits.values()]


def remove_trees(code):
    for tree in code.glob("tmp-*"):
        shutil.rmtree(tree, ignore_errors=True)


def changes(head, edit):
    """(names of the files that differ, lines of their diff). Raises ConfigError if no file differs, or if the edit
    changes how runs are judged."""
    changed = sorted({name for name, _ in head.files.items() ^ edit.files.items()})
    if not changed:
        raise ConfigError(f"{edit.name}: no file that training loads differs from {head.name}'s: save your edit, or "
                          "give --against=COMMIT")
    judge = [name for name in changed if name.startswith("evaluation/") or Path(name).parent == Path("data")]
    if judge:
        raise ConfigError(f"{', '.join(judge)} differs: an edit must not change evaluation, loader or tokenizer; "
                          "--todays_judge takes the working tree's for all versions")
    diff = []
    for name in changed:
        texts = []
        for version in (head, edit):
            path = version.root / name
            texts.append(path.read_text(errors="replace").splitlines() if path.exists() else [])
        diff += difflib.unified_diff(*texts, name, name, lineterm="")
    return changed, diff


def summary(changed, diff):
    """The files that differ and how many lines were added and removed, in words."""
    came, went = (sum(line[:1] == sign != line[1:2] for line in diff) for sign in "+-")
    return f"{', '.join(changed)}, +{came} -{went} lines"


# ----------------------------------------------------------------------------------------------------------------- runs

class Side:
    """A version at a size: trained with the settings argv, in cells of the sweep in args.folder."""

    def __init__(self, version, size, argv, args, head=None):
        self.name = version.name
        self.root = version.root
        self.probe = version.probes[size]
        self.steps = args.steps
        self.folder = args.folder
        self.argv = [str(self.root / argv[0]), *argv[1:], f"--dataset={data_path(self.probe['dataset'])}",
                     "--min_lr=0", "--schedule=wsd", "--decay_iters=-1",
                     f"--warmup_iters={max(1, self.steps // 40)}", f"--learning_rate={self.probe['learning_rate']:g}"]
        settings = [self.argv, self.steps, os.environ.get("OMP_NUM_THREADS")]
        self.key = f"{self.root.name}-{short_hash(settings)}"  # identifies code and settings in the names of cells
        self.head = head or self
        self.rows = {}  # name of a cell: its row of results
        self.facts = {}  # {name: value} that all runs must share; HEAD's are those of all versions
        self.ended = None  # the Decision from the first run that diverged or was refused
        self.decision = Decision()  # the Decision at the last look
        self.numbers = {}  # its entry in edit.json
        version.sides[size] = self

    def cell(self, seed, part=1):
        """The cell for 1/part of the budget; a shorter run branches from the full run before its decay."""
        steps = self.steps // part
        argv = [*self.argv, f"--max_iters={steps}", f"--seed={seed}"]
        at = {"stage": "edit", "version": self.key, "against": self.head.key, "steps": steps, "seed": seed}
        cell = runner.Cell(f"{self.key}_seed{seed}", argv, at, root=self.root)
        if seed > 1 or part > 1:
            argv.append("--self_check=off")  # the first pair's runs check this code
        if part > 1:
            argv.append(f"--branch={self.folder}/{cell.name}@{decay_begins(steps)}")
            cell.after = cell.name
            cell.name += f"_1of{part}"
        elif self is self.head and seed <= CURVE_PAIRS:
            argv.append(f"--keep_steps={decay_begins(steps // 4)},{decay_begins(steps // 2)}")
        return cell

    def column(self, key, n, part=1):
        """The values of `key` for the first n runs."""
        return np.array([self.rows[self.cell(seed, part).name][key] for seed in range(1, n + 1)])

    def results(self, n):
        """What `compare.decide` needs of the first n pairs: (differences from HEAD (n,), HEAD's curves (k, 2))."""
        heads = self.head.column("val_loss", n)
        k = min(n, CURVE_PAIRS)
        shorter = np.array([self.head.column("val_loss", k, part) for part in (4, 2)])
        return self.column("val_loss", n) - heads, (shorter - heads[:k]).T

    def notes(self):
        """Lines for the report: what else differs by more than 1%, and how many parameters start from other values."""
        ours, heads = self.probe, self.head.probe
        lines = []
        for key in ("parameters", "FLOPs per token", "state", "learning_rate"):
            if abs(ours[key] - heads[key]) > 0.01 * heads[key]:
                line = f"{key} {number(ours[key])}, {self.head.name} {number(heads[key])}"
                if key != "learning_rate":
                    line += ": better per token is not better per second"
                lines.append(line)
        other = sum(draw[0] for name, draw in ours["draws"].items() if draw != heads["draws"].get(name))
        if other:
            lines.append(f"{other / ours['parameters']:.1%} of the edit's parameters start from other values than "
                         f"{self.head.name}'s, so the pairs share less noise")
        return lines

    def end(self, seed, verdict, why):
        """Decide about this edit by its run with `seed`."""
        self.ended = self.ended or Decision(verdict, sentence=f"{verdict}: {why}", pairs=seed)

    def check_alike(self, facts):
        """Raises ConfigError if these facts differ from those of HEAD and the other edits, or the code from that of
        earlier runs: such runs would not be judged alike."""
        for key, value in facts.items():
            before = (self if key == "code" else self.head).facts.setdefault(key, value)
            if value != before:
                raise ConfigError(f"{key} of {self.name}: {value}, where others have {before}: make it the same for "
                                  "all versions, or choose another --out")

    def check_measure(self, cell, allowed):
        """Raises ConfigError if the loss of a run is not measured like any other model's, within `allowed` nats."""
        nats = ask(JUDGE, self.name, self.root, self.folder / cell.name, *cell.argv)
        unlike = f"{self.name} is not measured as others are: "
        if not abs(nats["reported"] - nats["plain"]) < ROUNDING:
            raise ConfigError(f"{unlike}its loss is {nats['reported']:.5f} nats, and the cross-entropy of its logits "
                              f"{nats['plain']:.5f}: leave the loss in eval mode alone")
        if not abs(nats["beside"] - nats["alone"]) < allowed:
            raise ConfigError(f"{unlike}with later tokens, other rows and earlier text changed, its loss is "
                              f"{nats['alone']:.4f} nats instead of {nats['beside']:.4f}: let it read only the tokens "
                              "before")


class Comparison:
    """HEAD and edits at one size."""

    def __init__(self, versions, size, argv, args, say):
        self.head = Side(versions[0], size, argv, args)
        self.edits = [Side(version, size, argv, args, self.head) for version in versions[1:]]
        self.args = args
        self.say = say
        self.stopped = False  # True once the user has stopped us
        for side in (self.head, *self.edits):
            with self.refusing(side, 1):
                side.check_alike({key: side.probe[key] for key in ("dataset", "batch_tokens", "eval_block_size")})

    def run(self, engine, edits, first, most):
        """Run as many more pairs of HEAD and these edits as fill the engine; returns the last seed."""
        folder = self.args.folder
        plan = []  # (side, cell)
        unfinished = 0
        for seed in range(first, first + most):
            parts = (1, 4, 2) if seed <= CURVE_PAIRS else (1,)
            pair = [(self.head, self.head.cell(seed, part)) for part in parts]
            pair += [(edit, edit.cell(seed)) for edit in edits if not edit.ended]
            plan += pair
            unfinished += sum(not is_finished(folder / cell.name) for _, cell in pair)
            if unfinished >= min(engine.jobs, 64):
                break
        cells = [cell for _, cell in plan]
        runner.write_plan(folder, cells)
        with append(folder / "runs.txt") as f, contextlib.redirect_stdout(f), contextlib.redirect_stderr(f):
            failed = runner.run_cells(cells, folder, engine)
        for side, cell in plan:
            with self.refusing(side, cell.at["seed"]):
                self.read(side, cell, failed)
        return seed

    @contextlib.contextmanager
    def refusing(self, side, seed):
        """In this context a ConfigError ends the edit at its run with `seed`, and other edits, if any, go on."""
        try:
            yield
        except ConfigError as why:
            if side is self.head or len(self.edits) == 1:
                raise
            side.end(seed, "refused", why)

    def read(self, side, cell, failed):
        """Record the result of a cell, or that the edit diverged. Raises ConfigError if the run failed, is not
        comparable with earlier runs, or is not measured as others are."""
        seed = cell.at["seed"]
        try:
            row = records.read_run(side.folder / cell.name, cell.at)
            with fields():
                row["began"] = datetime.fromisoformat(row["time"]).timestamp()
        except BadRecord as why:
            if side is self.head or "it diverged" not in str(why):
                reason = failed.get(cell.name, why)
                raise ConfigError(f"{side.name} does not run: {reason}; see {side.folder / cell.name}.txt") from None
            return side.end(seed, "worse", f"with seed {seed}, {why}")
        side.rows[cell.name] = row
        if not sys.stdout.isatty():  # then there is no progress bar
            self.say(f"{side.name}, seed {seed}, {row['steps']} steps: loss {row['val_loss']:.4f}")
        facts = {key: value for (group, key), value in row["same"].items() if group == "data"}
        facts |= {key: row[key] for key in ("dtype", "torch", "batch_tokens", "code")}
        side.check_alike(facts | {"held-out files": len(row["val_document_losses"])})
        if seed == 1 and not cell.after:
            side.check_measure(cell, ALIKE[row["dtype"]])


def decay_begins(steps):
    """The step at which a run of `steps` begins its decay to 0: after four fifths."""
    return steps - max(1, round(0.2 * steps))


def number(x):
    return f"{x:,.0f}" if x >= 100 else f"{x:g}"


def in_times(interval):
    """A ratio and its interval as text: 0.98 (0.95 .. 1.01)."""
    at, *ends = (f"{x:.2f}" if x < 1000 else f"{x:.0e}" for x in interval)
    return f"{at} ({' .. '.join(ends)})"


def data_path(dataset):
    """The dataset with absolute paths, since snapshots have no data. Raises ConfigError if a part of it is not
    prepared."""
    parts = [f"{Tokens(find_dataset(name)).folder.resolve()}:{share}" for name, share in parse_mixture(dataset)]
    return ",".join(parts).removesuffix(":1")


class Budget:
    """The pairs or minutes of a comparison. A file records when each pair ended, so a restart continues from there."""

    def __init__(self, path, pairs, minutes):
        self.path = path
        self.pairs = pairs
        self.minutes = minutes
        record = read_json(path) if path.exists() else {"minutes": [], "plans": []}
        with fields(f"{path} cannot be used, delete it: its fields"):
            ends = [*map(float, record["minutes"])]
            self.ends = np.asarray_chkfinite(ends).tolist()  # minutes after which each pair ended
            self.plans = [*map(str, record["plans"])]  # budgets that were asked for
        self.fractions = []  # share of the budget spent, at each look
        self.began = time.monotonic() - 60 * max(self.ends, default=0)

    def spent(self):
        return (time.monotonic() - self.began) / 60

    def left(self, n):
        """Minutes until the end, after n pairs."""
        left = self.ends[n - 1] / n * (self.pairs - n) if self.pairs else self.minutes - self.spent()
        return max(0, left)

    def most(self, n):
        """How many more pairs may run after n pairs; those from before a restart come first."""
        if self.pairs:
            return self.pairs - n
        return len(self.ends) - n or 32

    def ended(self, last):
        """Record that the pairs up to seed `last` have ended, evenly spread over the time since the last record."""
        new = max(1, last - len(self.ends) + 1)
        self.ends += np.linspace(max(self.ends, default=0), self.spent(), new)[1:].tolist()

    def look(self, n):
        """Record the look at n pairs, and the fraction of the budget that they took."""
        plan = f"{self.pairs} pairs" if self.pairs else f"{self.minutes:g} minutes"
        if n > 1 and plan not in self.plans:
            self.plans.append(plan)
        write_json(self.path, {"minutes": self.ends, "plans": self.plans})
        fraction = n / self.pairs if self.pairs else self.ends[n - 1] / self.minutes
        self.fractions.append(min(1, fraction))


# ------------------------------------------------------------------------------------------------------------- verdicts

@dataclass
class Decision:
    """The result of a look: compare.decide's verdict, log of the token ratio, and nats, both with their intervals."""

    verdict: str = "undecided"
    interval: tuple = ()
    nats: tuple = ()
    sentence: str = ""  # for a comparison that needs no interval
    pairs: int = 0
    minutes: float = 0.0

    def times(self, head):
        return f"{in_times(np.exp(self.interval))} times the tokens of {head.name}"

    def so_far(self, head):
        """The decision so far, in words; in nats if the interval is too wide to name tokens."""
        if self.sentence:
            return self.sentence
        if self.interval[2] - self.interval[1] > 2:
            return f"{self.nats[0]:+.4f} nats so far"
        return f"needs {self.times(head)}"


def decide(c, edit, n, bound):
    """The Decision about an edit after n pairs."""
    if edit.ended and edit.ended.pairs <= n:
        return edit.ended
    if n == 1:
        one, other = (side.column("val_document_losses", 1) for side in (c.head, edit))
        if np.allclose(one, other, 0, ROUNDING):
            return Decision("same", sentence="identical runs: the edit changes no bit, or only how losses are rounded")
        return Decision()
    if n == 2 and np.ptp(edit.column("val_loss", 2)) == 0:
        with c.refusing(edit, 2):
            raise ConfigError(f"{edit.name} has the same loss with seeds 1 and 2: let its random numbers follow --seed")
        return edit.ended
    found = compare.decide(*edit.results(n), bound, c.args.margin, c.args.error)
    verdict, *numbers = (x.item() for x in found)
    return Decision(verdict if n >= FEWEST else "undecided", numbers[:3], numbers[3:])


def compare_versions(c, minutes, engine):
    """Run pairs until they decide about each edit, and describe the edits."""
    together = short_hash(sorted(edit.key for edit in c.edits))
    budget = Budget(c.args.folder / f"looks-{together}.json", c.args.pairs, minutes)
    limits = compare.bounds(budget.fractions, c.args.error)
    undecided = list(c.edits)
    ran = 0  # pairs
    try:
        for n in itertools.count(1):
            if n > ran:
                ran = c.run(engine, undecided, n, budget.most(ran))
                budget.ended(ran)
            budget.look(n)
            bound = next(limits)
            for edit in list(undecided):
                edit.decision = decision = decide(c, edit, n, bound)
                decision.pairs = n
                decision.minutes = budget.spent()
                if n > 1:
                    c.say(f"pair {n}: {decision.so_far(c.head)}; {budget.left(n):.0f} minutes left", edit.name)
                if decision.sentence or decision.verdict != "undecided" and not c.args.pairs:
                    undecided.remove(edit)
            if not undecided or budget.fractions[-1] == 1:
                break
    except KeyboardInterrupt:
        c.stopped = True
    for edit in c.edits:
        edit.numbers = describe(c, edit, budget.plans)


def describe(c, edit, plans):
    """The entry in edit.json for an edit at a size: the sentence, the losses, and notes on what the sentence does not
    cover."""
    decision = edit.decision
    n = decision.pairs
    notes = edit.notes()
    facts = edit.head.facts
    numbers = {"verdict": decision.verdict, "pairs": n, "minutes": decision.minutes, "notes": notes, "interval": None,
               "parameters": edit.probe["parameters"], "dtype": facts.get("dtype"), "torch": facts.get("torch")}
    if decision.sentence:
        return numbers | {"sentence": decision.sentence}
    if n < 2:
        return numbers | {"sentence": f"undecided: too few pairs ({n}); rerun, or ask for more"}
    minutes = f"{decision.minutes:.0f} minutes"
    words = {"better": "better,", "worse": "worse,", "same": f"no difference of more than {c.args.margin:.1%}:",
             "undecided": f"{'stopped' if c.stopped else 'undecided'} after {minutes}:"}[decision.verdict]
    few = "" if n >= FEWEST else f", and a verdict needs {FEWEST}"
    differences, curves = edit.results(n)
    low, high = texts = over_texts(c, edit, curves.mean(0))
    if len(plans) > 1:
        notes.append(f"planned {', '.join(plans)}: false verdicts with probability {len(plans) * c.args.alpha:g}")
    notes += speed(c, edit)
    notes += ["loss {:+.4f} ({:+.4f} .. {:+.4f}) nats per token, both at their config's learning rate".format(
                  *decision.nats),
              f"the pair that is farthest from the others: {odd_one(differences)}",
              f"the interval covers seeds on these held-out files, {1 - c.args.error:.4g} wherever it stops; over "
              f"other texts as well: {low:.2f} .. {high:.3g}"]
    return numbers | {"interval": np.exp(decision.interval).tolist(), "nats": decision.nats[0],
                      "nats_interval": decision.nats[1:], "over_texts": texts,
                      "losses": [side.column("val_loss", n).tolist() for side in (c.head, edit)],
                      "curves": curves.tolist(),
                      "sentence": f"{words} needs {decision.times(c.head)} ({n} + {n} runs{few}, {minutes})"}


def over_texts(c, edit, curve):
    """The verdict's interval of tokens with the variance over documents added, so it is never narrower."""
    decision = edit.decision
    heads, ours = (side.column("val_document_losses", decision.pairs) for side in (c.head, edit))
    weights, = c.head.column("val_document_tokens", 1)
    variance, df = compare.document_variance(weights, ours - heads)
    off = special.stdtrit(df, 1 - c.args.error / 2) * max(variance, 0.0) ** 0.5
    at, low, high = decision.interval
    ends = compare.log_tokens(decision.nats[0] + np.array([-off, off]), curve)
    return np.exp([at - np.hypot(at - low, at - ends[0]), at + np.hypot(high - at, ends[1] - at)]).tolist()


def speed(c, edit):
    """One line if pairs that ran side by side show a difference in seconds per token: its factor, and that of the
    seconds to HEAD's loss."""
    decision = edit.decision
    device, began, seconds = ([side.column(key, decision.pairs) for side in (c.head, edit)]
                              for key in ("device", "began", "seconds"))
    together = np.equal(*device) & (abs(np.subtract(*began)) < 10 * sum(seconds))
    heads, ours = np.log(seconds)[:, together, None]
    d = compare.difference(ours, heads, np.ones(1), paired=True)
    if not d or d.low <= 0 <= d.high:
        return []
    tokens = compare.Multiplier(*np.exp(decision.interval).tolist(), beyond=False)
    seconds = compare.times(tokens, d.mean, (d.high - d.low) / 2)
    head = c.head.name
    return [f"a token takes {in_times(np.exp(d[:3]))} times as long as {head}'s, reaching {head}'s loss "
            f"{in_times(seconds[:3])} times as long"]


def odd_one(differences):
    """The difference that is farthest from the median, in words; if there are few pairs, with a warning about rare bad
    runs."""
    at = int(np.argmax(abs(differences - np.median(differences))))
    words = f"{differences[at]:+.4f} nats (seed {at + 1})"
    if len(differences) < 30:
        words += "; so few pairs may not show a rare bad run"
    return words


# ---------------------------------------------------------------------------------------------------------------- pages

def ranked(edits):
    """Sort edits by verdict, then by tokens, the best first."""
    def place(edit):
        first, *_ = edit.sides.values()
        interval = first.numbers["interval"] or [1.0]
        return list(CODES).index(edit.verdict), interval[0], edit.name

    return sorted(edits, key=place)


def row_of(edit, size, of_size):
    """A row of a ranking, in words; of_size: what edit.json says about this size."""
    interval = of_size["interval"]
    tokens = in_times(interval) if interval else of_size["sentence"]
    return {"edit": edit, "size": size, "verdict": of_size["verdict"], "tokens for HEAD's loss, times HEAD's": tokens,
            "pairs": str(of_size["pairs"])}


def write_page(edit, numbers):
    """Write the page and figure of an edit: sentences, training curves, the difference over the run, the diff."""
    sentences = []
    notes = []
    panels = []
    for size, side in edit.sides.items():
        of_size = side.numbers
        sentences.append(f"{size}: {of_size['sentence']}")
        notes += [f"{size}: {note}" for note in of_size["notes"]]
        notes.append(f"{size}: {number(of_size['parameters'])} parameters, products in {of_size['dtype']}, torch "
                     f"{of_size['torch']}, {numbers['machine']}")
        if of_size["pairs"] > 1:
            panels += training(side, size)
    n, error = numbers["edits_tried"], numbers["error"]
    tried = (f"Edits tried against the same code of {numbers['against']}: {n}. An edit that does nothing is called "
             f"better or worse with probability {error:.4g} at most, and at least one of {n} with "
             f"{1 - (1 - error) ** n:.2f} at most.")
    page = pages.Page(sentences, [pages.escaped(numbers["about"]), pages.listed(notes)], panels,
                      [tried, textwrap.indent((edit.out / "edit.diff").read_text(), "    ")])
    pages.write("Did the edit help?", page, edit.out / "edit")


def training(edit, size):
    """Panels: the training losses of an edit's pairs, and their difference with two standard errors."""
    import pandas

    head = edit.head
    runs = {}
    for side in (head, edit):
        for seed in range(1, edit.decision.pairs + 1):
            tokens, losses = points(side.folder / side.cell(seed).name, "train", "train_loss").T
            runs[side.name, seed] = pandas.Series(losses, tokens)
    losses = pandas.DataFrame(runs)
    losses = losses.rolling(max(1, len(losses) // 16)).mean()  # each line of the log has the loss of one step
    change = losses[edit.name] - losses[head.name]
    mean = change.mean(axis=1)
    error = 2 * change.sem(axis=1)
    curves = [Curve(name, name, losses.index, losses[name].mean(axis=1)) for name in (head.name, edit.name)]
    return [Panel(f"{size}: training loss", "tokens", "nats", curves),
            Panel(f"{size}: {edit.name} minus {head.name}, +- 2 standard errors", "tokens", "nats",
                  [Curve(edit.name, "", change.index, mean, mean - error, mean + error)])]


def write_overview(folder):
    """Write edits.md and edits.html into a folder of HEAD's runs: all edits that were ever tried against them."""
    rows = []
    diffs = []
    for path in sorted(folder.glob("edit-*/edit.diff")):
        name = path.parent.name
        edit, _, diff = path.read_text(errors="replace").partition("\n")
        diffs += [f"## {name}: {pages.escaped(edit)}", textwrap.indent(diff, "    ")]
        about = {"edit": edit, "in": name}
        try:
            with fields():
                record = read_json(path.with_name("edit.json"))
                about |= {"on": record["date"], "files": ", ".join(record["changed"])}
                rows += [row_of(edit, *item) | about for item in record["sizes"].items()]
        except BadRecord as error:
            rows.append(about | {"verdict": f"none: {error}"})
    page = pages.Page([f"{len(diffs) // 2} edits were tried against the same version."], [pages.table(rows)], [], diffs)
    pages.write("Edits that were tried", page, folder / "edits")


# -------------------------------------------------------------------------------------------------------------- program

@dataclass
class EditRun(Where):
    edits: list[str] = ()  # a config for the runs (config/longhorn_laptop.py), and what to compare: commits, branches,
    # FILE.patch or .diff on top of --against, or . for the working tree (which is the default)
    against: str = "HEAD"  # the commit to compare with
    data: str = ""  # a prepared dataset (the config's)
    sizes: list[str] = ("460K",)  # 460K, 1.5M, config (its own), or LABEL:key=value,key=value; one verdict for each
    steps: Annotated[int, Range(8)] = 512  # per run; below 512 the curves of families cross
    minutes: Annotated[float, Range(0.01, 1e6)] = 30.0  # for all edits and sizes together
    pairs: Whole = 0  # run exactly this many, even if the verdict is clear earlier; below 6 there is no verdict
    margin: Annotated[float, Range(1e-4, 1)] = 0.02  # largest difference that does not matter
    alpha: Annotated[float, Range(1e-3, 0.5)] = 0.05  # probability of a false verdict about any of the edits
    todays_judge: bool = False  # take evaluation, loader and tokenizer of all versions from the working tree
    out: Path = REPO / "out" / "edit"  # folder for runs and pages
    quiet: bool = False  # print only the sentence

    ARGUMENTS = ("edits",)
    OTHERS = "any other --key=value is train.py's, for all versions"


def config_of(words):
    """The config among words, as a path in the repository. Raises ConfigError if it is elsewhere."""
    given = [word for word in words if word.endswith(".py")] or ["config/longhorn_laptop.py"]
    if len(given) > 1:
        raise ConfigError(f"{' '.join(given)}: give one config")
    name = os.path.relpath(REPO / given[0], REPO)
    if name.startswith(".."):
        raise ConfigError(f"{given[0]} is not in {REPO}, so all versions would share it: copy it there")
    return name


class Edit(Experiment):
    script = "experiments/edit.py"
    settings = EditRun
    sets = {*sweep.SET_BY_THE_SWEEP, "dataset", "decay_iters"} - {"learning_rate", "model", "pattern"}
    see = "--steps, --data and --out"

    def run(self):
        """Compare the versions; returns the exit code. Raises ConfigError."""
        args = self.args
        args.out = args.out.resolve()
        os.environ.setdefault("LONGHORN_BUILD_DIR", str(REPO / "build"))  # built libraries are named by their content
        sizes = self.sizes()
        code = args.out / "code"
        with lock_folder(code, wait=600):
            self.head, *self.edits = versions_of(args, code, sizes)
        args.error = args.alpha / len(self.edits)  # Bonferroni: for the sequential test of each edit
        args.folder = args.out / self.head.root.name
        for edit in self.edits:
            edit.out = args.folder / f"edit-{edit.root.name}"
            edit.changed, diff = changes(self.head, edit)
            edit.out.mkdir(parents=True, exist_ok=True)
            edit.about += f" against {self.head.about}"
            write_text(edit.out / "edit.diff", "\n".join([edit.about, *diff]))
            self.say(f"{edit.about}: {summary(edit.changed, diff)}")
        self.compare(sizes)
        return self.conclude()

    def sizes(self):
        """{size: arguments of train.py}. Removes the config from the edits. Raises ConfigError."""
        args = self.args
        config = config_of(args.edits)
        args.edits = [word for word in args.edits if not word.endswith(".py")]
        settings = [*sweep.PRESETS["duel"].args, "--log_interval=8", "--eval_tokens=655360",
                    "--final_eval_tokens=655360", *args.others]  # 655,360: all of pystdlib
        if args.data:
            settings.append(f"--dataset={data_path(args.data)}")
        sizes = {}
        known = dict(SIZES)
        for text in args.sizes:
            for label, argv in sweep.sizes_of(text, known, self.check_set).items():
                known.setdefault(label, argv)
                sizes[label] = [config, *known[label], *settings]
        return sizes

    def say(self, line, edit=""):
        """Print a line, unless --quiet. If there are several edits, a line about an edit begins with its name."""
        if not self.args.quiet:
            print(printable(self.named(edit) + line), flush=True)

    def named(self, edit):
        return f"{edit}: " if edit and len(self.edits) > 1 else ""

    def compare(self, sizes):
        """Run all sizes, or until the user stops."""
        args = self.args
        jobs, gpus, self.where = runner.placement(args)
        if not args.cluster:
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, runner.cores() // jobs)))
        with runner.driver(args, args.folder, jobs, gpus=gpus) as engine:
            for size, argv in sizes.items():
                c = Comparison([self.head, *self.edits], size, argv, args, self.say)
                self.say(f"{size}, {number(c.head.probe['parameters'])} parameters, on {self.where}")
                compare_versions(c, args.minutes / len(sizes), engine)
                if c.stopped:
                    break

    def conclude(self):
        """Write the records and pages, and print the sentences; returns the exit code."""
        args = self.args
        for edit in self.edits:
            if edit.tree == REPO and not holds(REPO, edit.files):
                self.say(f"the verdict is about {edit.about}; it has changed since")
            self.keep(edit)
            self.say(f"records: {edit.out}/")
            for side in edit.sides.values():
                for line in side.numbers["notes"]:
                    self.say(line, edit.name)
        best, *others = ranked(self.edits)
        if others:
            rows = [row_of(edit.name, size, side.numbers)
                    for edit in (best, *others) for size, side in edit.sides.items()]
            self.say(table([list(rows[0]), *[[*row.values()] for row in rows]]))
            self.say(f"a false verdict about any of the {len(self.edits)} has probability {args.alpha:g} (Bonferroni: "
                     f"{args.error:.2g} each); all edits that were tried: {args.folder}/edits.html")
        for size, side in best.sides.items():
            of = f"{size}: " if len(best.sides) > 1 else ""
            print(printable(f"edit: {self.named(best.name)}{of}{side.numbers['sentence']}"), flush=True)
        return CODES[best.verdict]

    def keep(self, edit):
        """Write the record and the pages of an edit."""
        numbers = {"name": edit.name, "about": edit.about, "verdict": edit.verdict,
                   "sizes": {size: side.numbers for size, side in edit.sides.items()},
                   "alpha": self.args.alpha, "error": self.args.error, "against": self.head.name,
                   "changed": edit.changed, "code": {"head": self.head.root.name, "edit": edit.root.name},
                   "edits_tried": len([*self.args.folder.glob("edit-*/edit.diff")]),
                   "date": time.strftime("%Y-%m-%d"), "machine": f"{cpu_model()}, {self.where}",
                   "command": sys.argv[1:]}
        numbers = json.loads(json.dumps(numbers), parse_constant=lambda name: None)  # infinite: null
        write_json(edit.out / "edit.json", numbers)
        with contextlib.suppress(ConfigError):  # a package of the reports is missing; edit.json has the numbers
            records.check_packages()
            write_page(edit, numbers)
            write_overview(self.args.folder)


main = Edit.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
