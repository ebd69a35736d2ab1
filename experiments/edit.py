"""Did my edit help? Trains both versions in pairs of runs until it can tell, and says so in one sentence.

    python experiments/edit.py                        the working tree against HEAD, or --against=COMMIT
    python experiments/edit.py config/kda_laptop.py --data=mine --sizes=460K,1.5M --minutes=60
    python experiments/edit.py A B fix.patch .        several: commits, branches, patches of HEAD, the working tree
    edit: better, needs 0.96 (0.93 .. 0.99) times the tokens of HEAD (16 + 16 runs, 3 minutes)

All versions run from snapshots of the files that training loads, so you can go on editing. The runs of a pair share
seed, tokens and the initial values of all parameters that both have, so most of the noise cancels. From the sixth pair
on a sequential test says after each whether to stop; --pairs are run to the end. Several edits share HEAD's runs, the
minutes and one probability of a false verdict, and are ranked. Kill it at any time and rerun the command. HEAD's runs
serve the next edit, and edits.html beside them lists all that were tried.

Exit codes: 0 better, 1 worse or diverges, 2 a mistake, 3 no difference above --margin, 4 undecided; of several edits,
the first one's in the ranking. Each version trains at its config's learning rate, scaled to the width of the size.
Schedule (wsd, to 0), budget, evaluation and seeds are set here; a config's own do not count. A loss that is not the
cross-entropy of the logits, and logits that read more than the tokens before, are refused (edit_judge.py).
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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from scipy import special

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from common.errors import ConfigError, printable, regular  # noqa: E402
from common.files import append, lock_folder, write_text  # noqa: E402
from configurator import Range, Whole  # noqa: E402
from evaluation.tasks import table  # noqa: E402
from experiments import compare, pages, records, sweep  # noqa: E402
from experiments.figures import Curve, Panel  # noqa: E402
from experiments.sweeps import runner  # noqa: E402
from experiments.sweeps.experiment import Experiment, Where  # noqa: E402
from runtime.records import BadRecord, cpu_model, fields, is_finished, read_json, read_log, write_json  # noqa: E402

CODES = {"better": 0, "worse": 1, "same": 3, "undecided": 4}
SIZES = {size: list(s.argv) for size, s in sweep.PRESETS["duel"].sizes.items()} | {"config": []}
CURVE_PAIRS, FEWEST = 4, 6  # pairs whose run of HEAD also ends at 1/4 and 1/2; fewest pairs before a verdict
USUAL_SD, USUAL_SLOPE = 0.009, 0.27  # nats, after 512 steps at 460K: of pairs, and per e-fold of tokens
PROBE = REPO / "experiments" / "edit_probe.py"
JUDGE = REPO / "experiments" / "edit_judge.py"
ALIKE = {"float32": 5e-4, "bfloat16": 2e-3}  # nats by which two ways to measure a version may differ: rounding


# ------------------------------------------------------------------------------------------------------------- versions

@dataclass
class Version:
    """What is trained: `root`, a snapshot of `files` of a tree, {path: hash}. name: in sentences; about: in words."""

    name: str
    about: str
    tree: Path
    root: Path
    files: dict


def git(*args, otherwise="git fails: is it installed, and is this a clone of the repository?"):
    """Output of a git command in the repository. Raises ConfigError(otherwise)."""
    try:
        return subprocess.run(["git", "-C", REPO, *args], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise ConfigError(otherwise) from None


def commit_of(name, option):
    """The hash of a commit or branch. Raises ConfigError with the option that named it."""
    return git("rev-parse", "--verify", f"{name}^{{commit}}", otherwise=f"{option}{name}: there is no such commit in "
               f"{REPO}, or no git").decode().strip()


def checkout(code, commit, patch=None):
    """A new folder in `code` with the files of a commit, changed by a patch if one is given. Submodules are the
    clone's, and links lead where the clone's do. Raises ConfigError for a submodule that differs from the commit's."""
    tree = Path(tempfile.mkdtemp(dir=code, prefix="tmp-"))
    ran = subprocess.run(["tar", "-xf", "-", "-C", tree], input=git("archive", commit), capture_output=True)
    if ran.returncode:
        raise ConfigError(f"no snapshot of {commit[:10]} in {code}: {ran.stderr.decode(errors='replace')}")
    for path in [path for path in tree.rglob("*") if path.is_symlink()]:
        target = os.path.normpath(path.parent.relative_to(tree) / os.readlink(path))
        if target.startswith(".."):
            path.unlink()
            path.symlink_to(REPO / target)
    for line in git("ls-files", "-sz").split(b"\0"):
        if line.startswith(b"160000"):
            path = os.fsdecode(line.split(b"\t")[1])
            git("diff", "--quiet", "--ignore-submodules=untracked", commit, "--", path,
                otherwise=f"the submodule {path} has changes: undo them, or compare versions that have the same")
            shutil.rmtree(tree / path, ignore_errors=True)
            (tree / path).symlink_to(REPO / path)
    if patch:
        outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(code.resolve())}  # or paths would be the clone's
        ran = subprocess.run(["git", "-C", tree, "apply", Path(patch).resolve()], env=outside, capture_output=True)
        if ran.returncode:
            why = ran.stderr.decode(errors="replace").strip().splitlines()[0]
            raise ConfigError(f"{patch} is no change of {commit[:10]}: {why}")
    return tree


def take_todays_judge(tree):
    """Put the working tree's evaluation and loader in place of a version's."""
    for folder in ("evaluation", "data"):
        for path in (tree / folder).glob("*.py"):
            path.unlink()
        for path in (REPO / folder).glob("*.py"):
            shutil.copyfile(path, tree / folder / path.name)


def snapshot(code, tree, names):
    """(folder, {path: hash}) of a copy of these files of a tree, what links lead to in their place, in code/<hash of
    them>. A copy from before that was changed since is made anew."""
    copy = Path(tempfile.mkdtemp(dir=code, prefix="tmp-"))
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(tree / name, copy / name)
    files = hashes(copy)
    folder = code / hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:8]
    if os.path.lexists(folder) and (folder.is_symlink() or hashes(folder) != files):
        folder.rename(tempfile.mkdtemp(dir=code, prefix="tmp-") + "/was")
    if not folder.exists():
        copy.rename(folder)
    return folder, files


def hashes(folder, names=None):
    """{path: hash} of these files in a folder; of all but compiled ones."""
    if names is None:
        found = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        names = [path.relative_to(folder).as_posix() for path in found]
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def ask(program, name, root, *arguments):
    """What edit_probe.py or edit_judge.py says of a version. Raises ConfigError with its last words if it fails."""
    command = [sys.executable, *map(str, (program, *arguments))]
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True, errors="replace")
    if ran.returncode:
        raise ConfigError(f"{name} does not start: {(ran.stderr.strip() or 'no output').splitlines()[-1]}")
    return json.loads(ran.stdout.splitlines()[-1])


def versions_of(args, code, argv):
    """[HEAD's Version, an edit's ...] with snapshots in `code`. Raises ConfigError where nothing is to be compared."""
    found = []
    for left in code.glob("tmp-*"):  # by a kill
        shutil.rmtree(left, ignore_errors=True)
    began = time.strftime("%H:%M")
    head = commit_of(args.against, "--against=")
    for word in (args.against, *(args.edits or ["."])):
        name, tree, about = word, REPO, f"the working tree at {began}"
        if found and word.endswith((".patch", ".diff")):
            tree = checkout(code, head, word)
            about = f"{word}, applied to {head[:10]}"
        elif not found or word != ".":
            commit = commit_of(word, "")
            tree = checkout(code, commit)
            about = f"{word} ({commit[:10]})"
        elif len(args.edits) < 2:
            name = "the edit"
        if args.todays_judge and tree != REPO:
            take_todays_judge(tree)
        files = ask(PROBE, name, tree, 1, *argv, REPO / "data")["files"]  # where the vocabulary is
        found.append(Version(name, about, tree, *snapshot(code, tree, files)))
    for used in code.glob("tmp-*"):
        shutil.rmtree(used, ignore_errors=True)
    return found


def changes(head, edit):
    """(names of the files that differ, lines of their diff). Raises ConfigError if none does, or an edit would be
    judged by another measure."""
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
    """The files that differ and how many lines came and went, in words."""
    names = ", ".join(changed[:9])
    if len(changed) > 9:
        names += ", ..."
    came, went = (sum(line[:1] == sign != line[1:2] for line in diff) for sign in "+-")
    return f"{names}, {came} lines +, {went} lines -"


# ----------------------------------------------------------------------------------------------------------------- runs

class Comparison:
    """Versions, HEAD first, trained with the settings argv in cells of the sweep in folder."""

    def __init__(self, versions, argv, steps, folder):
        self.head, *self.edits = [version.name for version in versions]
        self.steps = steps
        self.folder = folder
        self.roots = {}
        self.probes = {}  # name of a version: what edit_probe.py says of it
        self.argv = {}
        self.key = {}  # name of a version: of its code and settings, for the names of cells
        self.rows = {}  # name of a cell: its row of results
        self.facts = {}  # what all runs must have alike
        self.diverged = {}  # edit: (seed, sentence)
        for version in versions:
            name, root = version.name, version.root
            self.roots[name] = root
            self.probes[name] = about = ask(PROBE, name, root, 4, *argv, REPO / "data")
            self.argv[name] = [str(root / argv[0]), *argv[1:], f"--dataset={data_path(about['dataset'])}", "--min_lr=0",
                               "--schedule=wsd", "--decay_iters=-1", f"--warmup_iters={max(1, steps // 40)}",
                               f"--learning_rate={about['learning_rate']:g}"]
            settings = repr([self.argv[name], steps, os.environ.get("OMP_NUM_THREADS")]).encode()
            self.key[name] = f"{root.name}-{hashlib.sha256(settings).hexdigest()[:8]}"
            for key in ("dataset", "batch_tokens", "eval_block_size"):  # or they would not be judged by the same
                one, other = self.probes[self.head][key], about[key]
                if one != other:
                    raise ConfigError(f"{key} is {one} in {self.head} and {other} in {name}: give one for both with "
                                      f"--{key.replace('dataset', 'data')}=...")

    def cell(self, name, seed, part=1):
        """A run of 1/part of the budget; a shorter one branches from the whole one before its decay."""
        steps = self.steps // part
        whole = f"{self.key[name]}_seed{seed}"
        argv = [*self.argv[name], f"--max_iters={steps}", f"--seed={seed}"]
        if seed > 1 or part > 1:
            argv.append("--self_check=off")  # the first pair's runs check this code
        if part > 1:
            argv.append(f"--branch={self.folder.resolve()}/{whole}@{decay_begins(steps)}")
        elif name == self.head and seed <= CURVE_PAIRS:
            argv.append(f"--keep_steps={decay_begins(self.steps // 4)},{decay_begins(self.steps // 2)}")
        at = {"stage": "edit", "version": self.key[name], "against": self.key[self.head], "steps": steps, "seed": seed}
        if part > 1:
            return runner.Cell(f"{whole}_1of{part}", argv, at, after=whole, root=self.roots[name])
        return runner.Cell(whole, argv, at, root=self.roots[name])

    def run(self, engine, edits, first, most, say):
        """Run the next pairs of HEAD and these edits, as many as fill the engine; returns their seeds."""
        seeds = []
        cells = {}  # name of a run: (version, Cell)
        unfinished = 0
        while not seeds or len(seeds) < most and unfinished < min(engine.jobs, 64):
            seed = first + len(seeds)
            seeds.append(seed)
            parts = (1, 4, 2) if seed <= CURVE_PAIRS else (1,)
            wanted = [(self.head, part) for part in parts] + [(edit, 1) for edit in edits]
            for name, part in wanted:
                cell = self.cell(name, seed, part)
                cells[cell.name] = name, cell
                unfinished += not is_finished(self.folder / cell.name)
        plan = [cell for _, cell in cells.values()]
        runner.write_plan(self.folder, plan)
        with append(self.folder / "runs.txt") as f, contextlib.redirect_stdout(f), contextlib.redirect_stderr(f):
            failed = runner.run_cells(plan, self.folder, engine)
        for name, cell in cells.values():
            self.read(name, cell, failed)
            row = self.rows.get(cell.name)
            if row and not sys.stdout.isatty():  # there is nobody who sees a bar
                say(f"{name}, seed {row['seed']}, {row['steps']} steps: loss {row['val_loss']:.4f}")
        if first == 1:
            for name in (self.head, *edits):
                self.check_measure(name)
        return seeds

    def check_measure(self, name):
        """Raises ConfigError if a version's first run is not measured as any other model is."""
        cell = self.cell(name, 1)
        if cell.name not in self.rows:  # it diverged
            return
        allowed = ALIKE[self.facts["dtype"]]
        nats = ask(JUDGE, name, self.roots[name], self.folder.resolve() / cell.name, *cell.argv)
        if not abs(nats["reported"] - nats["plain"]) < allowed:
            raise ConfigError(f"{name} is not measured as others are: its loss is {nats['reported']:.4f} nats, and the "
                              f"cross-entropy of its logits {nats['plain']:.4f}: leave the loss in eval mode alone")
        if not abs(nats["beside"] - nats["alone"]) < allowed:
            raise ConfigError(f"{name} is not measured as others are: with other later tokens, rows beside it and text "
                              f"before, its loss is {nats['alone']:.4f} nats in place of {nats['beside']:.4f}: let it "
                              "read nothing but the tokens before")

    def read(self, name, cell, failed):
        """Keep the row of a cell that has run, or why the edit diverges. Raises ConfigError if a run failed or is not
        like those before."""
        why = ""
        try:
            row = records.read_run(self.folder / cell.name, cell.at)
        except BadRecord as error:
            why = str(error)
        if "it diverged" in why:
            if name == self.head:
                raise ConfigError(f"{name} diverges with seed {cell.at['seed']} ({why}): see {self.folder / cell.name}")
            short = why.replace("it diverged: ", "").replace(": it diverged", "")
            self.diverged.setdefault(name, (cell.at["seed"], f"it diverges with seed {cell.at['seed']} ({short})"))
            return
        if why:
            raise ConfigError(f"{name} does not run: {failed.get(cell.name, why)}")
        self.rows[cell.name] = row
        facts = {key: value for (group, key), value in row["same"].items() if group == "data"}
        facts |= {"dtype": row["dtype"], "torch": row["torch"], f"the code of {name}'s runs": row["code"]}
        for key, value in facts.items():
            before = self.facts.setdefault(key, value)
            if value != before:
                raise ConfigError(f"{key} of {name}: {value}, where runs before have {before}: make it alike for "
                                  "all versions, or choose another --out")

    def row(self, name, seed, part=1):
        return self.rows[self.cell(name, seed, part).name]

    def column(self, name, key, n):
        """This of the first n runs of a version."""
        return np.array([self.row(name, seed)[key] for seed in range(1, n + 1)])

    def identical(self, edit):
        """True if the first pair's validation losses are the same to the bit, document by document."""
        one, other = (self.row(name, 1)["val_document_losses"] for name in (self.head, edit))
        return np.array_equal(one, other)

    def results(self, edit, n):
        """(differences (n,), curves (k, 2)) for `compare.decide`, of the first n pairs."""
        differences = self.column(edit, "val_loss", n) - self.column(self.head, "val_loss", n)
        curves = []
        for seed in range(1, min(n, CURVE_PAIRS) + 1):
            whole = self.row(self.head, seed)["val_loss"]
            curves.append([self.row(self.head, seed, part)["val_loss"] - whole for part in (4, 2)])
        return differences, np.array(curves)

    def notes(self, edit):
        """Lines: what differs beside the loss by more than 1%, and whether the pairs share their draws."""
        ours, heads = self.probes[edit], self.probes[self.head]
        lines = []
        for key in ("parameters", "FLOPs per token", "state", "learning_rate"):
            if abs(ours[key] - heads[key]) > 0.01 * heads[key]:
                line = f"{key} {number(ours[key])}, {self.head} {number(heads[key])}"
                if key != "learning_rate":
                    line += ": better per token is not better per second"
                lines.append(line)
        other = sum(draw[0] for name, draw in ours["draws"].items() if draw != heads["draws"].get(name))
        if other:
            lines.append(f"{other / ours['parameters']:.1%} of the edit's parameters start from other values than "
                         f"{self.head}'s, so the pairs share less noise")
        return lines


def decay_begins(steps):
    """The step at which a run of so many begins its decay to 0: after four fifths."""
    return steps - max(1, round(0.2 * steps))


def number(x):
    return f"{x:,.0f}" if x >= 100 else f"{x:g}"


def in_times(interval):
    """A ratio with its ends, in words: 0.98 (0.95 .. 1.01)."""
    at, *ends = (f"{x:.2f}" if x < 1000 else f"{x:.0e}" for x in interval)
    return f"{at} ({' .. '.join(ends)})"


def data_path(dataset):
    """The dataset's folders by their absolute paths: snapshots have no data. Raises ConfigError."""
    parts = []
    for name, colon, share in (part.partition(":") for part in dataset.split(",")):
        folder = Path(name) if Path(name).is_dir() else REPO / "data" / name
        if not (folder / "meta.json").exists():
            raise ConfigError(f"{folder} is not prepared: python data/{name}/prepare.py")
        parts.append(f"{folder.resolve()}{colon}{share}")
    return ",".join(parts)


class Budget:
    """Pairs or minutes of a comparison. When each pair ended stands in a file, so a restart goes on where it was."""

    def __init__(self, path, pairs, minutes):
        self.path, self.pairs, self.minutes = path, pairs, minutes
        self.ends, self.plans = [], []  # minutes after which each pair ended; budgets that were asked for
        if path.exists():
            with fields(f"{path}: it"):
                record = read_json(path)
                self.ends, self.plans = [*map(float, record["minutes"])], [*map(str, record["plans"])]
        self.fractions = []  # of the budget, at each look
        self.began = time.monotonic() - 60 * max(self.ends, default=0)

    def spent(self):
        return (time.monotonic() - self.began) / 60

    def left(self, n):
        """Minutes until the end, after n pairs."""
        left = self.spent() / n * (self.pairs - n) if self.pairs else self.minutes - self.spent()
        return max(0, left)

    def most(self, n):
        """How many pairs may run next, after n: those that ran before a restart come first."""
        if self.pairs:
            return self.pairs - n
        return len(self.ends) - n or 32

    def ended(self, last):
        """Pairs up to seed `last` have ended, evenly since the one before."""
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

    def times(self, head):
        return f"{in_times(np.exp(self.interval))} times the tokens of {head}"

    def so_far(self, head):
        """In words; nats where the interval is too wide to name tokens."""
        if self.sentence or not self.interval:
            return self.sentence or "different losses"
        if self.interval[2] - self.interval[1] > 2:
            return f"{self.nats[0]:+.4f} nats so far"
        return f"needs {self.times(head)}"


def decide(c, edit, n, bound, args):
    """The Decision about an edit after n pairs."""
    seed, sentence = c.diverged.get(edit, (n + 1, ""))
    if seed <= n:
        return Decision("worse", sentence=f"worse: {sentence}")
    if n == 1:
        return Decision("same", sentence="identical runs: the edit changes no bit") if c.identical(edit) else Decision()
    verdict, *numbers = (x.item() for x in compare.decide(*c.results(edit, n), bound, args.margin, args.error))
    return Decision(verdict if n >= FEWEST else "undecided", numbers[:3], numbers[3:])


def compare_versions(c, args, minutes, engine, say, looks):
    """Run pairs until they decide about each edit: {edit: the numbers of edit.json about this size}. looks: file of
    when each pair ended."""
    budget = Budget(looks, args.pairs, minutes)
    limits = compare.bounds(budget.fractions, args.error)
    n = 0
    undecided = list(c.edits)
    decisions = {edit: (0, 0.0, Decision()) for edit in c.edits}  # after so many pairs and minutes
    try:
        while undecided and (n == 0 or budget.fractions[-1] < 1):
            seeds = c.run(engine, undecided, n + 1, budget.most(n), say)
            budget.ended(seeds[-1])
            for n in seeds:
                budget.look(n)
                bound = next(limits)
                for edit in list(undecided):
                    decision = decide(c, edit, n, bound, args)
                    decisions[edit] = n, budget.spent(), decision
                    if n > 1:
                        of = f"{edit}, " if len(c.edits) > 1 else ""
                        say(f"{of}pair {n}: {decision.so_far(c.head)}; {budget.left(n):.0f} minutes left")
                    if decision.sentence or decision.verdict != "undecided" and not args.pairs:
                        undecided.remove(edit)
                if not undecided or budget.fractions[-1] == 1:
                    break
    except KeyboardInterrupt:
        args.stopped = True
    return {edit: describe(c, edit, args, budget, *decisions[edit]) for edit in c.edits}


def describe(c, edit, args, budget, n, spent, decision):
    """The numbers of edit.json about an edit at a size: the sentence, the losses, and notes on how far it reaches."""
    notes = c.notes(edit)
    numbers = {"verdict": decision.verdict, "pairs": n, "minutes": spent, "notes": notes, "interval": None,
               "parameters": c.probes[edit]["parameters"], "dtype": c.facts["dtype"], "torch": c.facts["torch"]}
    if decision.sentence:
        return numbers | {"sentence": decision.sentence}
    if n < 2:
        return numbers | {"sentence": f"undecided: too few pairs ({n}); rerun, or ask for more"}
    minutes = f"{spent:.0f} minutes"
    words = {"better": "better,", "worse": "worse,", "same": f"no difference of more than {args.margin:.1%}:",
             "undecided": f"{'stopped' if args.stopped else 'undecided'} after {minutes}:"}[decision.verdict]
    few = "" if n >= FEWEST else f", and a verdict needs {FEWEST}"
    sentence = f"{words} needs {decision.times(c.head)} ({n} + {n} runs{few}, {minutes})"
    differences, curves = c.results(edit, n)
    heads, ours = (c.column(name, "val_loss", n) for name in (c.head, edit))
    texts = over_texts(c, edit, n, decision, curves, args.error)
    if len(budget.plans) > 1:
        notes.append(f"planned {', '.join(budget.plans)}: false verdicts with probability "
                     f"{len(budget.plans) * args.alpha:g}")
    notes += speed(c, edit, n, decision.interval)
    without_pairs = (heads.var() + ours.var()) / max(differences.var(), 1e-12)
    notes += [f"the losses of pairs correlate by {np.corrcoef(heads, ours)[0, 1]:.2f}: without pairs "
              f"{without_pairs:.1f} times as many runs",
              "loss {:+.4f} ({:+.4f} .. {:+.4f}) nats per token, both at their config's learning rate".format(
                  *decision.nats),
              f"the pair that is farthest from the others: {odd_one(differences)}",
              f"the interval is over seeds, on these held-out files, {1 - args.error:.4g} wherever it stops; over "
              f"other texts too: {texts[0]:.2f} .. {texts[1]:.3g}"]
    return numbers | {"interval": np.exp(decision.interval).tolist(), "nats": decision.nats[0],
                      "nats_interval": decision.nats[1:], "over_texts": texts,
                      "losses": [heads.tolist(), ours.tolist()], "curves": curves.tolist(), "sentence": sentence}


def over_texts(c, edit, n, decision, curves, error):
    """The interval of tokens with the variance over documents added to what is in the verdict's, so never narrower."""
    head_texts, edit_texts = (c.column(name, "val_document_losses", n) for name in (c.head, edit))
    weights = c.row(c.head, 1)["val_document_tokens"]
    variance, df = compare.document_variance(edit_texts - head_texts, np.zeros((1, len(weights))), weights)
    off = special.stdtrit(df, 1 - error / 2) * max(variance, 0.0) ** 0.5
    at, low, high = decision.interval
    ends = compare.log_tokens(decision.nats[0] + np.array([-off, off]), curves.mean(0))
    return np.exp([at - np.hypot(at - low, at - ends[0]), at + np.hypot(high - at, ends[1] - at)]).tolist()


def speed(c, edit, n, interval):
    """A line, if the pairs tell that one version takes longer per token: how much, and what follows for the seconds to
    HEAD's loss. interval: of the log of the ratio of tokens."""
    ours, heads = (-np.log(c.column(name, "tokens_per_second", n))[:, None] for name in (edit, c.head))
    d = compare.difference(ours, heads, np.ones(1), paired=True)
    if d.low <= 0 <= d.high:
        return []
    tokens = compare.Multiplier(*np.exp(interval).tolist(), beyond=False)
    seconds = compare.times(tokens, d.mean, (d.high - d.low) / 2)
    ratio, low, high = np.exp([d.mean, d.low, d.high])
    return [f"a token takes {ratio:.2f} ({low:.2f} .. {high:.2f}) times {c.head}'s seconds, {c.head}'s loss "
            f"{seconds.value:.2f} ({seconds.low:.2f} .. {seconds.high:.2f}) times"]


def odd_one(differences):
    """The difference that is farthest from the median, in words; of few pairs, that one like it may not have run."""
    at = int(np.argmax(abs(differences - np.median(differences))))
    words = f"{differences[at]:+.4f} nats (seed {at + 1})"
    if len(differences) < 30:
        words += "; so few pairs may not show a rare bad run"
    return words


# ---------------------------------------------------------------------------------------------------------------- pages

def ranked(results):
    """(edit, size, its numbers) of {edit: {size: numbers}}, the best edit first: by verdict, then by tokens."""
    order = ["better", "same", "undecided", "worse"]

    def place(edit):
        first = next(iter(results[edit].values()))
        return order.index(verdict_of(results[edit])), (first["interval"] or [1.0])[0]

    return [(edit, size, of_size) for edit in sorted(results, key=place) for size, of_size in results[edit].items()]


def verdict_of(sizes):
    """That of all {size: numbers}; "undecided" if they disagree."""
    verdicts = {of_size["verdict"] for of_size in sizes.values()}
    return verdicts.pop() if len(verdicts) == 1 else "undecided"


def row_of(edit, size, of_size):
    """A row of a ranking, in words."""
    interval = of_size["interval"]
    tokens = in_times(interval) if interval else of_size["sentence"]
    return {"edit": edit, "size": size, "verdict": of_size["verdict"], "tokens for HEAD's loss, times HEAD's": tokens,
            "pairs": str(of_size["pairs"])}


def write_page(folder, numbers, comparisons, ranking):
    """The page and figure of an edit: the sentences, training curves, the difference over the run, the diff."""
    name = numbers["name"]
    sentences = []
    notes = []
    panels = []
    for c, (size, of_size) in zip(comparisons, numbers["sizes"].items(), strict=True):
        sentences.append(f"{size}: {of_size['sentence']}")
        notes += [f"{size}: {note}" for note in of_size["notes"]]
        notes.append(f"{size}: {number(of_size['parameters'])} parameters, products in {of_size['dtype']}, torch "
                     f"{of_size['torch']}, {numbers['machine']}")
        if of_size["pairs"] > 1:
            panels += training(c, name, size, of_size["pairs"])
    n, error = numbers["edits_tried"], numbers["error"]
    tried = (f"Edits tried against the same runs of {numbers['against']}: {n}. One that does nothing is called better "
             f"or worse with probability {error:.4g} at most, one of {n} with up to {1 - (1 - error) ** n:.2f}.")
    together = pages.table(ranking) if len(ranking) > len(sentences) else ""
    page = pages.Page(sentences, [pages.escaped(numbers["about"]), together, pages.listed(notes)], panels,
                      [tried, textwrap.indent((folder / "edit.diff").read_text(), "    ")])
    pages.write("Did the edit help?", page, folder / "edit")


def training(c, edit, size, n):
    """Panels: the training losses of n pairs, and their difference with two standard errors."""
    logs = [[read_log(c.folder / c.cell(name, seed).name, "train") for seed in range(1, n + 1)]
            for name in (c.head, edit)]
    lines = min(len(log) for of in logs for log in of)  # a damaged log has fewer, and one that diverged
    if not lines:
        return []
    losses = np.array([[[e["train_loss"] for e in log[:lines]] for log in of] for of in logs], float)
    width = max(1, losses.shape[-1] // 16)  # of a running mean: a line has one step's loss
    losses = np.apply_along_axis(np.convolve, -1, losses, np.ones(width) / width, "valid")
    tokens = [e["tokens"] for e in logs[0][0][:lines]][width - 1:]
    change = losses[1] - losses[0]
    mean = change.mean(0)
    error = 2 * change.std(0, ddof=1) / np.sqrt(n)
    curves = [Curve(name, name, tokens, of.mean(0)) for name, of in zip((c.head, edit), losses, strict=True)]
    return [Panel(f"{size}: training loss", "tokens", "nats", curves),
            Panel(f"{size}: {edit} minus {c.head}, +- 2 standard errors", "tokens", "nats",
                  [Curve(edit, "", tokens, mean, mean - error, mean + error)])]


def write_overview(folder):
    """edits.md and edits.html in a folder of HEAD's runs: all edits that were ever tried against them."""
    rows = []
    diffs = []
    for folder_of_one in sorted(folder.glob("edit-*/")):
        about = {"in": folder_of_one.name}
        try:
            diff = regular(folder_of_one / "edit.diff").read_text(errors="replace")
            about["edit"], _, diff = diff.partition("\n")
            diffs += [f"## {folder_of_one.name}: {pages.escaped(about['edit'])}", textwrap.indent(diff, "    ")]
            with fields():
                record = read_json(folder_of_one / "edit.json")
                about |= {"on": record["date"], "files": ", ".join(record["changed"])}
                rows += [row_of("", *item) | about for item in record["sizes"].items()]
        except (OSError, BadRecord) as error:
            rows.append(about | {"verdict": f"none: {error}"})
    page = pages.Page([f"{len(diffs) // 2} edits were tried against the same version."], [pages.table(rows)], [], diffs)
    pages.write("Edits that were tried", page, folder / "edits")


# -------------------------------------------------------------------------------------------------------------- program

@dataclass
class EditRun(Where):
    edits: list[str] = ()  # a config of the runs (config/longhorn_laptop.py); and what is compared: commits, branches,
    # FILE.patch or .diff of --against, or . for the working tree (the working tree)
    against: str = "HEAD"  # the other version, a commit
    data: str = ""  # a prepared dataset (the config's)
    sizes: list[str] = ("460K",)  # 460K, 1.5M, config (its own), or LABEL:key=value,key=value; one verdict for each
    steps: Annotated[int, Range(8)] = 512  # of a run; below 512 families' curves cross
    minutes: Annotated[float, Range(0.01, 1e6)] = 30.0  # for all edits and sizes together
    pairs: Whole = 0  # run this many, even if the verdict is clear before; below 6 there is none
    margin: Annotated[float, Range(1e-4, 1)] = 0.02  # a difference that would not matter
    alpha: Annotated[float, Range(1e-3, 0.5)] = 0.05  # probability of a false verdict about any of the edits
    todays_judge: bool = False  # take evaluation, loader and tokenizer of all versions from the working tree
    gpus: str = ""  # use these, as 0,1 (all)
    out: Path = REPO / "out" / "edit"  # folder
    quiet: bool = False  # print the sentence only

    ARGUMENTS = ("edits",)
    OTHERS = "any other --key=value is train.py's, for all versions"


def config_of(words):
    """The config among words, as a path in the repository. Raises ConfigError if it is elsewhere."""
    given = [word for word in words if word.endswith(".py")] or ["config/longhorn_laptop.py"]
    if len(given) > 1:
        raise ConfigError(f"{' '.join(given)}: give one config")
    for path in (os.path.abspath(REPO / given[0]), os.path.realpath(REPO / given[0])):
        name = os.path.relpath(path, REPO)
        if not name.startswith(".."):
            return name
    raise ConfigError(f"{given[0]} is not in {REPO}, so all versions would have the same: copy it there")


def run(args):
    """Compare the versions; returns the exit code. Raises ConfigError."""
    args.out = args.out.resolve()
    args.stopped = False  # by the user
    config = config_of(args.edits)
    args.edits = [word for word in args.edits if not word.endswith(".py")]
    args.error = args.alpha / max(1, len(args.edits))  # Bonferroni, of the sequential test of each
    os.environ.setdefault("LONGHORN_BUILD_DIR", str(REPO / "build"))  # libraries are named by their content

    def say(line):
        if not args.quiet:
            print(printable(line), flush=True)

    settings = [*sweep.PRESETS["duel"].args, "--log_interval=8", "--eval_tokens=655360", "--final_eval_tokens=655360",
                *args.others]  # 655,360: all of pystdlib
    if args.data:
        settings.append(f"--dataset={data_path(args.data)}")
    code = args.out / "code"
    with lock_folder(code, wait=600):
        head, *edits = versions = versions_of(args, code, [config, *next(iter(args.sizes.values())), *settings])
    folder = args.out / head.root.name
    for edit in edits:
        edit.out = folder / f"edit-{edit.root.name}"
        edit.out.mkdir(parents=True, exist_ok=True)
        edit.changed, diff = changes(head, edit)
        edit.about += f" against {head.about}"
        write_text(edit.out / "edit.diff", "\n".join([edit.about, *diff]))
        say(f"{edit.about}: {summary(edit.changed, diff)}")
    comparisons, results, where = compare_sizes(args, config, settings, versions, folder, say)
    order = ranked(results)
    ranking = [row_of(*row) for row in order]
    for edit in edits:
        with contextlib.suppress(OSError):  # a file may be gone
            if edit.tree == REPO and hashes(REPO, edit.files) != edit.files:
                say(f"the verdict is about {edit.about}: it has changed since")
        keep(args, head, edit, results[edit.name], comparisons, ranking, where)
        say(f"records: {edit.out}/")
        for of_size in results[edit.name].values():
            for line in of_size["notes"]:
                say(f"{edit.name}: {line}" if len(edits) > 1 else line)
    if len(edits) > 1:
        say(table([list(ranking[0]), *[[*row.values()] for row in ranking]]))
        say(f"a false verdict about any of the {len(edits)} has probability {args.alpha:g} (Bonferroni: "
            f"{args.error:.2g} each); all edits that were tried: {folder}/edits.html")
    best = order[0][0]
    for edit, size, of_size in order:
        if edit == best:
            of = f"{edit}: " if len(edits) > 1 else ""
            of += f"{size}: " if len(args.sizes) > 1 else ""
            print(printable(f"edit: {of}{of_size['sentence']}"), flush=True)
    return CODES[verdict_of(results[best])]


def keep(args, head, edit, sizes, comparisons, ranking, where):
    """Write the record and the pages of an edit, {size: numbers}."""
    folder = edit.out.parent
    numbers = {"name": edit.name, "about": edit.about, "verdict": verdict_of(sizes), "sizes": sizes,
               "alpha": args.alpha, "error": args.error, "against": head.name, "changed": edit.changed,
               "code": {"head": head.root.name, "edit": edit.root.name},
               "edits_tried": edits_tried(folder, comparisons[0].key[head.name]), "date": time.strftime("%Y-%m-%d"),
               "machine": f"{cpu_model()}, {where}", "command": sys.argv[1:]}
    numbers = json.loads(json.dumps(numbers), parse_constant=lambda name: None)  # infinite: null
    write_json(edit.out / "edit.json", numbers)
    with contextlib.suppress(ConfigError):  # a package of the reports is missing; edit.json has the numbers
        records.check_packages()
        write_page(edit.out, numbers, comparisons, ranking)
        write_overview(folder)


def compare_sizes(args, config, settings, versions, folder, say):
    """(comparisons, {edit: {size: its numbers}}, where the runs were, in words), until all sizes are done or the user
    stops."""
    if args.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = args.gpus
    jobs, gpus, where = runner.placement(args)
    if not args.cluster:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, runner.cores() // jobs)))
    minutes = args.minutes / len(args.sizes)
    comparisons = []
    results = {version.name: {} for version in versions[1:]}
    with runner.driver(args, folder, jobs, gpus=gpus) as engine:
        for size, argv in args.sizes.items():
            if args.stopped:
                break
            c = Comparison(versions, [config, *argv, *settings], args.steps, folder)
            comparisons.append(c)
            for edit in c.edits:
                for line in c.notes(edit):
                    say(f"{edit}: {line}" if len(c.edits) > 1 else line)
            expected = "" if gpus else f": {expectation(c, args, minutes, jobs or 1)}"
            say(f"{size}, {number(c.probes[c.head]['parameters'])} parameters, on {where}{expected}")
            together = hashlib.sha256(repr(sorted(c.key[edit] for edit in c.edits)).encode()).hexdigest()[:8]
            of_size = compare_versions(c, args, minutes, engine, say, folder / f"looks-{together}.json")
            for edit, numbers in of_size.items():
                results[edit][size] = numbers
    return comparisons, results, where


def expectation(c, args, minutes, jobs):
    """How many pairs there is time for, and what they usually tell, in words."""
    seconds = sum(4 + p["s/token"] * (args.steps * p["batch_tokens"] + 2e5) for p in c.probes.values())
    n = args.pairs or max(2, int(60 * minutes * jobs / seconds))  # 4 s to start; 2e5: the evaluation
    words = f"about {n} pairs"
    if args.steps == 512 and abs(c.probes[c.head]["parameters"] / 460e3 - 1) < 0.1:
        bound = list(compare.bounds(np.arange(1, n + 1) / n, args.error))[-1]
        shown = bound * USUAL_SD / n**0.5 / USUAL_SLOPE
        words += f", which tell tokens to +-{shown:.1%}" if shown < 1 else ", too few"
    return words


def edits_tried(folder, key):
    """How many edits have a finished run against the version with this key."""
    tried = set()
    for name, at in runner.read_plan(folder)["cells"].items():
        if at["against"] == key != at["version"] and is_finished(folder / name):
            tried.add(at["version"])
    return max(1, len(tried))


class Edit(Experiment):
    script = "experiments/edit.py"
    settings = EditRun
    sets = {*sweep.SET_BY_THE_SWEEP, "dataset", "decay_iters"} - {"learning_rate", "model", "pattern"}
    see = "--steps, --data and --out"

    def run(self):
        sizes = {}
        for text in self.args.sizes:
            for label, argv in sweep.sizes_of(text, SIZES, self.check_set).items():
                sizes[label] = argv or SIZES[label]
        self.args.sizes = sizes
        return run(self.args)


main = Edit.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
