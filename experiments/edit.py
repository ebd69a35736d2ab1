"""Did my edit help? Trains both versions in pairs of runs until it can tell, and says so in one sentence.

    python experiments/edit.py                        the working tree against HEAD, or --against=COMMIT
    python experiments/edit.py config/kda_laptop.py --data=mine --sizes=460K,1.5M --minutes=60
    python experiments/edit.py A B fix.patch .        several: commits, branches, patches of HEAD, the working tree
    edit: better, needs 0.96 (0.93 .. 0.99) times the tokens of HEAD (16 + 16 runs, 3 minutes)

All versions run from snapshots of the files that training loads, so you can go on editing. The runs of a pair share
seed, tokens and the initial values of all parameters that both have, so most of the noise cancels. From the sixth pair
on, a sequential test after each pair says whether to stop; with --pairs, all are run. Several edits share HEAD's runs,
the minutes and one probability of a false verdict, and are ranked. Kill it at any time and rerun the command. HEAD's
runs are reused for the next edit, and edits.html beside them lists all edits that were tried.

Exit codes: 0 better, 1 worse or diverges, 2 a mistake, 3 no difference above --margin, 4 undecided; for several edits,
that of the best. Each version trains at its config's learning rate, scaled to the width of the size. Schedule (wsd, to
0), budget, evaluation and seeds are set here; a config's own do not count. An edit is refused if its loss is not the
cross-entropy of its logits, or its logits read more than the tokens before (edit_judge.py); several go on without it.
"""

import os
import sys

if __name__ == "__main__":  # an uncaught error would end with exit code 1, which means "worse"
    sys.excepthook = lambda *error: (sys.__excepthook__(*error), os._exit(2))

import contextlib
import difflib
import hashlib
import json
import shutil
import subprocess
import tempfile
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
from scipy import special

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from common.errors import ConfigError, printable  # noqa: E402
from common.files import append, lock_folder, write_text  # noqa: E402
from configurator import Range, Whole  # noqa: E402
from evaluation.tasks import table  # noqa: E402
from experiments import compare, pages, records, sweep  # noqa: E402
from experiments.figures import Curve, Panel  # noqa: E402
from experiments.sweeps import runner  # noqa: E402
from experiments.sweeps.experiment import Experiment, Where  # noqa: E402
from runtime.records import BadRecord, cpu_model, fields, is_finished, read_json, read_log, write_json  # noqa: E402

CODES = {"better": 0, "same": 3, "undecided": 4, "worse": 1, "refused": 2}  # the best verdict first
SIZES = {size: list(s.argv) for size, s in sweep.PRESETS["duel"].sizes.items()} | {"config": []}
CURVE_PAIRS, FEWEST = 4, 6  # pairs that also run HEAD for 1/4 and 1/2 of the budget; fewest pairs before a verdict
PROBE = REPO / "experiments" / "edit_probe.py"
JUDGE = REPO / "experiments" / "edit_judge.py"
ROUNDING = 5e-5  # nats that rounding may put between two sums of the same losses
ALIKE = {"float32": 5e-4, "bfloat16": 2e-3}  # the same for 64 tokens that are computed in other batches


# ------------------------------------------------------------------------------------------------------------- versions

@dataclass
class Version:
    """What is trained: `root` is a snapshot of `files` {path: hash} of a tree. name: for sentences; about: a
    description."""

    name: str
    about: str
    tree: Path
    root: Path = None
    files: dict = None
    probes: dict = field(default_factory=dict)  # {settings of train.py: what edit_probe.py says}

    def probe(self, argv):
        """What edit_probe.py says about the version with these settings. Raises ConfigError if it does not start."""
        argv = (*argv, REPO / "data")  # where the vocabulary is
        if argv not in self.probes:
            self.probes[argv] = ask(PROBE, self.name, self.root or self.tree, *argv)
        return self.probes[argv]


def output(command, otherwise, **how):
    """What a command prints. Raises ConfigError if it fails, with `otherwise` and the last line that it printed."""
    ran = subprocess.run([*map(str, command)], capture_output=True, **how)
    if ran.returncode:
        words = ran.stderr.decode(errors="replace").strip() or "no output"
        raise ConfigError(f"{otherwise}: {words.splitlines()[-1]}")
    return ran.stdout


def ask(program, name, root, *arguments):
    """What edit_probe.py or edit_judge.py says about a version. Raises ConfigError if it fails."""
    said = output([sys.executable, program, *arguments], f"{name} does not start", cwd=root)
    return json.loads(said.splitlines()[-1])


def commit_of(name, option=""):
    """The hash of a commit or branch. Raises ConfigError with the option that named it."""
    return output(["git", "-C", REPO, "rev-parse", "--verify", f"{name}^{{commit}}"],
                  f"{option}{name}: there is no such commit in {REPO}").decode().strip()


def checkout(code, commit, patch=None):
    """A new folder in `code` with the files of a commit, changed by a patch if one is given. Links out of the clone
    keep their targets. Raises ConfigError if the patch does not fit."""
    tree = Path(tempfile.mkdtemp(dir=code, prefix="tmp-"))
    archive = output(["git", "-C", REPO, "archive", commit], "git archive fails")
    output(["tar", "-xf", "-", "-C", tree], f"no snapshot of {commit[:10]} in {code}", input=archive)
    for path in tree.rglob("*"):
        if path.is_symlink() and not path.exists():
            target = REPO / path.parent.relative_to(tree) / os.readlink(path)
            path.unlink()
            path.symlink_to(target)
    if patch:
        outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(code)}  # or git would use the clone above
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
    """Copy the files of a version's tree that training at these sizes loads to code/<their hash>, replacing links by
    what they lead to. An earlier copy that was changed since is made again. Raises ConfigError if the tree is edited
    meanwhile."""
    version.files = {}
    for argv in sizes.values():
        version.files |= version.probe(argv)["files"]
    copy = Path(tempfile.mkdtemp(dir=code, prefix="tmp-"))
    for name in version.files:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(version.tree / name, copy / name)
    if not holds(copy, version.files):
        raise ConfigError(f"{version.name} was edited while this program was starting: start it again")
    version.root = code / short_hash(sorted(version.files.items()))
    if not holds(version.root, version.files):
        with contextlib.suppress(FileNotFoundError):
            version.root.rename(f"{copy}-was")
        copy.rename(version.root)


def holds(folder, files):
    """True if a folder has these files, {path: hash}."""
    for name, known in files.items():
        path = folder / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != known:
            return False
    return True


def short_hash(value):
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


def versions_of(args, code, sizes):
    """[HEAD's Version, an edit's ...] with snapshots in `code`. Raises ConfigError."""
    remove_trees(code)  # left by a kill
    began = time.strftime("%H:%M")
    head = commit_of(args.against, "--against=")
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
    return found


def remove_trees(code):
    for tree in code.glob("tmp-*"):
        shutil.rmtree(tree, ignore_errors=True)


def changes(head, edit):
    """(names of the files that differ, lines of their diff). Raises ConfigError if none does, or if the edit would be
    judged differently."""
    changed = sorted({name for name, _ in head.files.items() ^ edit.files.items()})
    if not changed:
        raise ConfigError(f"{edit.name}: no file that training loads differs from {head.name}'s: save your edit, or "
                          "give --against=COMMIT")
    judge = [name for name in changed if name.startswith("evaluation/") or Path(name).parent == Path("data")]
    if judge:
        raise ConfigError(f"{', '.join(judge)} differs: evaluation, loader and tokenizer are no part of an edit; "
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
    return f"{', '.join(changed)}, {came} lines +, {went} lines -"


# ----------------------------------------------------------------------------------------------------------------- runs

class Side:
    """A version at a size: trained with the settings argv, in cells of the sweep in args.folder."""

    def __init__(self, version, argv, args, head=None):
        self.name = version.name
        self.root = version.root
        self.steps = args.steps
        self.folder = args.folder
        self.probe = version.probe(argv)
        self.argv = [str(self.root / argv[0]), *argv[1:], f"--dataset={data_path(self.probe['dataset'])}",
                     "--min_lr=0", "--schedule=wsd", "--decay_iters=-1",
                     f"--warmup_iters={max(1, self.steps // 40)}", f"--learning_rate={self.probe['learning_rate']:g}"]
        settings = [self.argv, self.steps, os.environ.get("OMP_NUM_THREADS")]
        self.key = f"{self.root.name}-{short_hash(settings)}"  # identifies code and settings in the names of cells
        self.head = head or self
        self.rows = {}  # name of a cell: its row of results
        self.facts = {}  # {name: value} that must be the same in all its runs
        self.ended = ()  # the seed with which it diverged or was refused, Decision

    def cell(self, seed, part=1):
        """The cell for 1/part of the budget; a shorter run branches from the whole one before its decay."""
        steps = self.steps // part
        whole = f"{self.key}_seed{seed}"
        argv = [*self.argv, f"--max_iters={steps}", f"--seed={seed}"]
        if seed > 1 or part > 1:
            argv.append("--self_check=off")  # the first pair's runs check this code
        if part > 1:
            argv.append(f"--branch={self.folder}/{whole}@{decay_begins(steps)}")
        elif self is self.head and seed <= CURVE_PAIRS:
            argv.append(f"--keep_steps={decay_begins(steps // 4)},{decay_begins(steps // 2)}")
        at = {"stage": "edit", "version": self.key, "against": self.head.key, "steps": steps, "seed": seed}
        name, after = (f"{whole}_1of{part}", whole) if part > 1 else (whole, "")
        return runner.Cell(name, argv, at, after=after, root=self.root)

    def row(self, seed, part=1):
        return self.rows[self.cell(seed, part).name]

    def column(self, key, n):
        """The values of `key` for the first n runs."""
        return np.array([self.row(seed)[key] for seed in range(1, n + 1)])

    def check_measure(self, allowed):
        """Raises ConfigError if the loss of the first run is not measured like any other model's, within `allowed`
        nats."""
        cell = self.cell(1)
        nats = ask(JUDGE, self.name, self.root, self.folder / cell.name, *cell.argv)
        if not abs(nats["reported"] - nats["plain"]) < ROUNDING:
            raise ConfigError(f"{self.name} is not measured as others are: its loss is {nats['reported']:.5f} nats, "
                              f"and the cross-entropy of its logits {nats['plain']:.5f}: leave the loss in eval mode "
                              "alone")
        if not abs(nats["beside"] - nats["alone"]) < allowed:
            raise ConfigError(f"{self.name} is not measured as others are: with later tokens, other rows and earlier "
                              f"text changed, its loss is {nats['alone']:.4f} nats instead of {nats['beside']:.4f}: "
                              "let it read nothing but the tokens before")


class Comparison:
    """HEAD and edits at one size."""

    def __init__(self, versions, argv, args, say):
        self.head = Side(versions[0], argv, args)
        self.edits = [Side(version, argv, args, self.head) for version in versions[1:]]
        self.args = args
        self.say = say
        self.facts = {}  # {name: value} that must be the same in all runs
        self.stopped = False  # True once the user has stopped us
        for edit in self.edits:
            for key in ("dataset", "batch_tokens", "eval_block_size"):  # otherwise they would be judged differently
                one, other = self.head.probe[key], edit.probe[key]
                if one != other:
                    raise ConfigError(f"{key} is {one} in {self.head.name} and {other} in {edit.name}: give one for "
                                      f"both with --{key.replace('dataset', 'data')}=...")

    def run(self, engine, edits, first, most):
        """Run the next pairs of HEAD and these edits, as many as fill the engine; returns their seeds."""
        folder = self.args.folder
        seeds = []
        plan = []  # (side, cell)
        unfinished = 0
        while not seeds or len(seeds) < most and unfinished < min(engine.jobs, 64):
            seed = first + len(seeds)
            seeds.append(seed)
            parts = (1, 4, 2) if seed <= CURVE_PAIRS else (1,)
            cells = [(self.head, self.head.cell(seed, part)) for part in parts]
            cells += [(edit, edit.cell(seed)) for edit in edits]
            unfinished += sum(not is_finished(folder / cell.name) for _, cell in cells)
            plan += cells
        cells = [cell for _, cell in plan]
        runner.write_plan(folder, cells)
        with append(folder / "runs.txt") as f, contextlib.redirect_stdout(f), contextlib.redirect_stderr(f):
            failed = runner.run_cells(cells, folder, engine)
        for side, cell in plan:
            with self.refusing(side, cell.at["seed"]):
                self.read(side, cell, failed)
            row = side.rows.get(cell.name)
            if row and not sys.stdout.isatty():  # no progress bar there
                self.say(f"{side.name}, seed {row['seed']}, {row['steps']} steps: loss {row['val_loss']:.4f}")
        if first == 1:
            for side in (self.head, *edits):
                if not side.ended:
                    with self.refusing(side, 1):
                        side.check_measure(ALIKE[self.facts["dtype"]])
        return seeds

    @contextlib.contextmanager
    def refusing(self, side, seed):
        """A ConfigError in here ends this edit at its run with `seed`, and the others go on."""
        try:
            yield
        except ConfigError as why:
            side.ended = side.ended or (seed, self.refusal(side, why))

    def refusal(self, side, why):
        """The Decision about an edit that cannot be judged. Raises `why` if no other edit would go on."""
        if side is self.head or len(self.edits) == 1:
            raise why
        return Decision("refused", sentence=f"refused: {why}")

    def read(self, side, cell, failed):
        """Keep the row of a cell that has run, or why the edit diverges. Raises ConfigError if a run failed or is not
        like those before."""
        try:
            row = records.read_run(side.folder / cell.name, cell.at)
        except BadRecord as error:
            return self.diverges(side, cell, failed, str(error))
        side.rows[cell.name] = row | {"ended": os.path.getmtime(side.folder / cell.name / "result.json")}
        facts = {key: value for (group, key), value in row["same"].items() if group == "data"}
        facts |= {key: row[key] for key in ("dtype", "torch", "batch_tokens", "code")}
        for key, value in facts.items():
            before = (side if key == "code" else self).facts.setdefault(key, value)
            if value != before:
                raise ConfigError(f"{key} of {side.name}: {value}, where earlier runs have {before}: make it the same "
                                  "for all versions, or choose another --out")

    def diverges(self, side, cell, failed, why):
        """Keep why a run of an edit diverged. Raises ConfigError if it failed for another reason, or is HEAD's."""
        seed = cell.at["seed"]
        if "it diverged" not in why:
            raise ConfigError(f"{side.name} does not run: {failed.get(cell.name, why)}")
        if side is self.head:
            raise ConfigError(f"{side.name} diverges with seed {seed} ({why}): see {side.folder / cell.name}")
        short = why.replace("it diverged: ", "").replace(": it diverged", "")
        side.ended = side.ended or (seed, Decision("worse", sentence=f"worse: it diverges with seed {seed} ({short})"))

    def results(self, edit, n):
        """(differences (n,), curves (k, 2)) for `compare.decide`, of the first n pairs."""
        head = self.head
        curves = []
        for seed in range(1, min(n, CURVE_PAIRS) + 1):
            curves.append([head.row(seed, part)["val_loss"] - head.row(seed)["val_loss"] for part in (4, 2)])
        return edit.column("val_loss", n) - head.column("val_loss", n), np.array(curves)

    def notes(self, edit):
        """Lines on what differs by more than 1% besides the loss, and whether the pairs share their draws."""
        ours, heads = edit.probe, self.head.probe
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


def decay_begins(steps):
    """The step at which a run of `steps` begins its decay to 0: after four fifths."""
    return steps - max(1, round(0.2 * steps))


def number(x):
    return f"{x:,.0f}" if x >= 100 else f"{x:g}"


def in_times(interval):
    """A ratio with its ends, in words: 0.98 (0.95 .. 1.01)."""
    at, *ends = (f"{x:.2f}" if x < 1000 else f"{x:.0e}" for x in interval)
    return f"{at} ({' .. '.join(ends)})"


def data_path(dataset):
    """The dataset's folders by their absolute paths: snapshots have no data. Raises ConfigError for what is not
    prepared, before the first run."""
    parts = []
    for name, colon, share in (part.partition(":") for part in dataset.split(",")):
        folder = Path(name) if Path(name).is_dir() else REPO / "data" / name
        if not (folder / "meta.json").exists():
            raise ConfigError(f"{name}: {folder} is not prepared (no meta.json): prepare it first")
        parts.append(f"{folder.resolve()}{colon}{share}")
    return ",".join(parts)


class Budget:
    """The pairs or minutes of a comparison. A file says when each pair ended, so a restart continues from there."""

    def __init__(self, path, pairs, minutes):
        self.path = path
        self.pairs = pairs
        self.minutes = minutes
        record = read_json(path) if path.exists() else {"minutes": [], "plans": []}
        with fields(f"{path} cannot be used, delete it: its fields"):
            self.ends = [*map(float, record["minutes"])]  # minutes after which each pair ended
            self.plans = [*map(str, record["plans"])]  # budgets that were asked for
        self.fractions = []  # of the budget, at each look
        self.began = time.monotonic() - 60 * max(self.ends, default=0)

    def spent(self):
        return (time.monotonic() - self.began) / 60

    def left(self, n):
        """Minutes until the end, after n pairs."""
        left = self.ends[n - 1] / n * (self.pairs - n) if self.pairs else self.minutes - self.spent()
        return max(0, left)

    def most(self, n):
        """How many pairs may run next, after n: those that ran before a restart come first."""
        if self.pairs:
            return self.pairs - n
        return len(self.ends) - n or 32

    def ended(self, last):
        """Note that pairs up to seed `last` have ended, spread evenly over the time since the last one."""
        new = max(1, last - len(self.ends) + 1)
        self.ends += np.linspace(max(self.ends, default=0), self.spent(), new)[1:].tolist()

    def look(self, n):
        """Note the look at n pairs, and the fraction of the budget that they took."""
        plan = f"{self.pairs} pairs" if self.pairs else f"{self.minutes:g} minutes"
        if n > 1 and plan not in self.plans:
            self.plans.append(plan)
        write_json(self.path, {"minutes": self.ends, "plans": self.plans})
        fraction = n / self.pairs if self.pairs else self.ends[n - 1] / self.minutes
        self.fractions.append(min(1, fraction))


# ------------------------------------------------------------------------------------------------------------- verdicts

@dataclass
class Decision:
    """What a look says: compare.decide's verdict, log of the ratio of tokens and nats, both with their ends."""

    verdict: str = "undecided"
    interval: tuple = ()
    nats: tuple = ()
    sentence: str = ""  # of a comparison that needs no interval
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
    if edit.ended and edit.ended[0] <= n:
        return edit.ended[1]
    if n == 1:
        one, other = (side.column("val_document_losses", 1) for side in (c.head, edit))
        if np.allclose(one, other, 0, ROUNDING):
            return Decision("same", sentence="identical runs: the edit changes no bit, or only how losses are rounded")
        return Decision()
    if n == 2 and edit.row(1)["val_loss"] == edit.row(2)["val_loss"]:
        same = f"{edit.name} has the same loss with seeds 1 and 2: let what is random follow --seed"
        return c.refusal(edit, ConfigError(same))
    found = compare.decide(*c.results(edit, n), bound, c.args.margin, c.args.error)
    verdict, *numbers = (x.item() for x in found)
    return Decision(verdict if n >= FEWEST else "undecided", numbers[:3], numbers[3:])


def compare_versions(c, minutes, engine):
    """Run pairs until they decide about each edit: {its name: the numbers of edit.json about this size}."""
    together = short_hash(sorted(edit.key for edit in c.edits))
    budget = Budget(c.args.folder / f"looks-{together}.json", c.args.pairs, minutes)
    limits = compare.bounds(budget.fractions, c.args.error)
    n = 0
    undecided = list(c.edits)
    decisions = dict.fromkeys(c.edits, Decision())
    try:
        while undecided and (n == 0 or budget.fractions[-1] < 1):
            seeds = c.run(engine, undecided, n + 1, budget.most(n))
            budget.ended(seeds[-1])
            for n in seeds:
                budget.look(n)
                bound = next(limits)
                for edit in list(undecided):
                    decisions[edit] = decision = decide(c, edit, n, bound)
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
    return {edit.name: describe(c, edit, budget.plans, decisions[edit]) for edit in c.edits}


def describe(c, edit, plans, decision):
    """What edit.json says about an edit at a size: the sentence, the losses, and notes on what the sentence does not
    cover."""
    n = decision.pairs
    error = c.args.error
    notes = c.notes(edit)
    numbers = {"verdict": decision.verdict, "pairs": n, "minutes": decision.minutes, "notes": notes, "interval": None,
               "parameters": edit.probe["parameters"], "dtype": c.facts.get("dtype"), "torch": c.facts.get("torch")}
    if decision.sentence:
        return numbers | {"sentence": decision.sentence}
    if n < 2:
        return numbers | {"sentence": f"undecided: too few pairs ({n}); rerun, or ask for more"}
    minutes = f"{decision.minutes:.0f} minutes"
    words = {"better": "better,", "worse": "worse,", "same": f"no difference of more than {c.args.margin:.1%}:",
             "undecided": f"{'stopped' if c.stopped else 'undecided'} after {minutes}:"}[decision.verdict]
    few = "" if n >= FEWEST else f", and a verdict needs {FEWEST}"
    sentence = f"{words} needs {decision.times(c.head)} ({n} + {n} runs{few}, {minutes})"
    differences, curves = c.results(edit, n)
    low, high = texts = over_texts(c, edit, decision, curves.mean(0))
    if len(plans) > 1:
        notes.append(f"planned {', '.join(plans)}: false verdicts with probability {len(plans) * c.args.alpha:g}")
    notes += speed(c, edit, decision)
    notes += ["loss {:+.4f} ({:+.4f} .. {:+.4f}) nats per token, both at their config's learning rate".format(
                  *decision.nats),
              f"the pair that is farthest from the others: {odd_one(differences)}",
              f"the interval is over seeds, on these held-out files, {1 - error:.4g} wherever it stops; over other "
              f"texts too: {low:.2f} .. {high:.3g}"]
    return numbers | {"interval": np.exp(decision.interval).tolist(), "nats": decision.nats[0],
                      "nats_interval": decision.nats[1:], "over_texts": texts,
                      "losses": [side.column("val_loss", n).tolist() for side in (c.head, edit)],
                      "curves": curves.tolist(), "sentence": sentence}


def over_texts(c, edit, decision, curve):
    """The verdict's interval of tokens with the variance over documents added, so it is never narrower."""
    heads, ours = (side.column("val_document_losses", decision.pairs) for side in (c.head, edit))
    weights = c.head.row(1)["val_document_tokens"]
    variance, df = compare.document_variance(weights, ours - heads)
    off = special.stdtrit(df, 1 - c.args.error / 2) * max(variance, 0.0) ** 0.5
    at, low, high = decision.interval
    ends = compare.log_tokens(decision.nats[0] + np.array([-off, off]), curve)
    return np.exp([at - np.hypot(at - low, at - ends[0]), at + np.hypot(high - at, ends[1] - at)]).tolist()


def speed(c, edit, decision):
    """A line if the pairs that ran side by side show that one version takes longer per token: how much longer, and how
    many seconds it therefore needs for HEAD's loss."""
    device, ended, seconds = ([side.column(key, decision.pairs) for side in (c.head, edit)]
                              for key in ("device", "ended", "seconds"))
    together = np.equal(*device) & (abs(np.subtract(*ended)) < 10 * sum(seconds))
    heads, ours = np.log(seconds)[:, together, None]
    d = compare.difference(ours, heads, np.ones(1), paired=True)
    if not d or d.low <= 0 <= d.high:
        return []
    tokens = compare.Multiplier(*np.exp(decision.interval).tolist(), beyond=False)
    seconds = compare.times(tokens, d.mean, (d.high - d.low) / 2)
    head = c.head.name
    return [f"a token takes {in_times(np.exp(d[:3]))} times {head}'s seconds, {head}'s loss {in_times(seconds[:3])} "
            "times"]


def odd_one(differences):
    """The difference that is farthest from the median, in words; if there are few pairs, with a warning about rare bad
    runs."""
    at = int(np.argmax(abs(differences - np.median(differences))))
    words = f"{differences[at]:+.4f} nats (seed {at + 1})"
    if len(differences) < 30:
        words += "; so few pairs may not show a rare bad run"
    return words


# ---------------------------------------------------------------------------------------------------------------- pages

def ranked(results):
    """(edit, size, its numbers) of {edit: {size: numbers}}, the best edit first: by verdict, then by tokens."""
    def place(edit):
        verdict = list(CODES).index(verdict_of(results[edit]))
        interval = next(iter(results[edit].values()))["interval"] or [1.0]
        return verdict, interval[0], edit

    return [(edit, size, of_size) for edit in sorted(results, key=place) for size, of_size in results[edit].items()]


def verdict_of(sizes):
    """The verdict of all sizes {size: numbers}; "undecided" if they disagree."""
    verdicts = {of_size["verdict"] for of_size in sizes.values()}
    return verdicts.pop() if len(verdicts) == 1 else "undecided"


def row_of(edit, size, of_size):
    """A row of a ranking, in words."""
    interval = of_size["interval"]
    tokens = in_times(interval) if interval else of_size["sentence"]
    return {"edit": edit, "size": size, "verdict": of_size["verdict"], "tokens for HEAD's loss, times HEAD's": tokens,
            "pairs": str(of_size["pairs"])}


def write_page(folder, numbers, comparisons):
    """The page and figure of an edit: the sentences, training curves, the difference over the run, the diff."""
    sentences = []
    notes = []
    panels = []
    for c, (size, of_size) in zip(comparisons, numbers["sizes"].items(), strict=True):
        edit = next(edit for edit in c.edits if edit.name == numbers["name"])
        sentences.append(f"{size}: {of_size['sentence']}")
        notes += [f"{size}: {note}" for note in of_size["notes"]]
        notes.append(f"{size}: {number(of_size['parameters'])} parameters, products in {of_size['dtype']}, torch "
                     f"{of_size['torch']}, {numbers['machine']}")
        if of_size["pairs"] > 1:
            panels += training(c.head, edit, size, of_size["pairs"])
    n, error = numbers["edits_tried"], numbers["error"]
    tried = (f"Edits tried against the same code of {numbers['against']}: {n}. One that does nothing is called better "
             f"or worse with probability {error:.4g} at most, one of {n} with up to {1 - (1 - error) ** n:.2f}.")
    page = pages.Page(sentences, [pages.escaped(numbers["about"]), pages.listed(notes)], panels,
                      [tried, textwrap.indent((folder / "edit.diff").read_text(), "    ")])
    pages.write("Did the edit help?", page, folder / "edit")


def training(head, edit, size, n):
    """Panels: the training losses of n pairs, and their difference with two standard errors."""
    import pandas

    runs = {}
    for side in (head, edit):
        for seed in range(1, n + 1):
            log = read_log(side.folder / side.cell(seed).name, "train")
            runs[side.name, seed] = pandas.Series({row["tokens"]: row["train_loss"] for row in log}, dtype=float)
    losses = pandas.DataFrame(runs)
    losses = losses.rolling(max(1, len(losses) // 16)).mean()  # a line of the log has one step's loss
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
    pairs: Whole = 0  # run exactly this many, even if the verdict is clear earlier; below 6 there is none
    margin: Annotated[float, Range(1e-4, 1)] = 0.02  # a difference that would not matter
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
        raise ConfigError(f"{given[0]} is not in {REPO}, so all versions would have the same: copy it there")
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
        os.environ.setdefault("LONGHORN_BUILD_DIR", str(REPO / "build"))  # libraries are named by their content
        sizes = self.sizes()
        args.error = args.alpha / max(1, len(args.edits))  # Bonferroni: for the sequential test of each edit
        code = args.out / "code"
        with lock_folder(code, wait=600):
            self.head, *self.edits = versions_of(args, code, sizes)
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
        """Print a line, unless --quiet; one about an edit with its name, if there are several."""
        if not self.args.quiet:
            print(printable(self.named(edit) + line), flush=True)

    def named(self, edit):
        return f"{edit}: " if edit and len(self.edits) > 1 else ""

    def compare(self, sizes):
        """Run all sizes, or until the user stops: results {edit: {size: its numbers}}."""
        args = self.args
        jobs, gpus, self.where = runner.placement(args)
        if not args.cluster:
            os.environ.setdefault("OMP_NUM_THREADS", str(max(1, runner.cores() // jobs)))
        self.comparisons = []
        self.results = {edit.name: {} for edit in self.edits}
        with runner.driver(args, args.folder, jobs, gpus=gpus) as engine:
            for size, argv in sizes.items():
                c = Comparison([self.head, *self.edits], argv, args, self.say)
                self.comparisons.append(c)
                for edit in c.edits:
                    for line in c.notes(edit):
                        self.say(line, edit.name)
                self.say(f"{size}, {number(c.head.probe['parameters'])} parameters, on {self.where}")
                for edit, numbers in compare_versions(c, args.minutes / len(sizes), engine).items():
                    self.results[edit][size] = numbers
                if c.stopped:
                    break

    def conclude(self):
        """Write the records and pages, and print the sentences; returns the exit code."""
        args = self.args
        order = ranked(self.results)
        for edit in self.edits:
            if edit.tree == REPO and not holds(REPO, edit.files):
                self.say(f"the verdict is about {edit.about}: it has changed since")
            self.keep(edit)
            self.say(f"records: {edit.out}/")
            for of_size in self.results[edit.name].values():
                for line in of_size["notes"]:
                    self.say(line, edit.name)
        if len(self.edits) > 1:
            rows = [row_of(*row) for row in order]
            self.say(table([list(rows[0]), *[[*row.values()] for row in rows]]))
            self.say(f"a false verdict about any of the {len(self.edits)} has probability {args.alpha:g} (Bonferroni: "
                     f"{args.error:.2g} each); all edits that were tried: {args.folder}/edits.html")
        best = order[0][0]
        for size, of_size in self.results[best].items():
            of = f"{size}: " if len(self.results[best]) > 1 else ""
            print(printable(f"edit: {self.named(best)}{of}{of_size['sentence']}"), flush=True)
        return CODES[verdict_of(self.results[best])]

    def keep(self, edit):
        """Write the record and the pages of an edit."""
        sizes = self.results[edit.name]
        before = {path.parent for path in edit.out.parent.glob("edit-*/edit.json")}
        numbers = {"name": edit.name, "about": edit.about, "verdict": verdict_of(sizes), "sizes": sizes,
                   "alpha": self.args.alpha, "error": self.args.error, "against": self.head.name,
                   "changed": edit.changed, "code": {"head": self.head.root.name, "edit": edit.root.name},
                   "edits_tried": len(before.union(edit.out for edit in self.edits)),
                   "date": time.strftime("%Y-%m-%d"), "machine": f"{cpu_model()}, {self.where}",
                   "command": sys.argv[1:]}
        numbers = json.loads(json.dumps(numbers), parse_constant=lambda name: None)  # infinite: null
        write_json(edit.out / "edit.json", numbers)
        with contextlib.suppress(ConfigError):  # a package of the reports is missing; edit.json has the numbers
            records.check_packages()
            write_page(edit.out, numbers, self.comparisons)
            write_overview(self.args.folder)


main = Edit.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
