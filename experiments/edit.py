"""Did my edit help? Trains both versions in pairs of runs until it can tell, and says so in one sentence.

    python experiments/edit.py                        the working tree against HEAD, or --against=COMMIT
    python experiments/edit.py config/kda_laptop.py --data=mine --sizes=460K,1.5M --minutes=60
    edit: better, needs 0.96 (0.93 .. 0.99) times the tokens of HEAD (16 + 16 runs, 3 minutes)

Both versions run from snapshots, so you can go on editing. The runs of a pair share seed, tokens and the initial values
of all parameters that both have, so most of the noise cancels. From the sixth pair on a sequential test says after each
whether to stop; --pairs are run to the end. Kill it at any time and rerun the command. HEAD's runs serve the next edit.

Exit codes: 0 better, 1 worse or diverges, 2 a mistake, 3 no difference above --margin, 4 undecided. Each version trains
at its config's learning rate, scaled to the width of the size. Schedule (wsd, to 0), budget, evaluation and seeds are
set here; a config's own do not count. The loss in LM.forward is what is measured: leave it alone.
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
from typing import Annotated, Literal

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from common.errors import ConfigError  # noqa: E402
from configurator import Range, Whole  # noqa: E402
from experiments import compare, pages, records, sweep  # noqa: E402
from experiments.figures import Curve, Panel  # noqa: E402
from experiments.sweeps import runner  # noqa: E402
from experiments.sweeps.experiment import Experiment, Where  # noqa: E402
from runtime.records import NO_TRACE, BadRecord, cpu_model, is_finished, read_log, write_json  # noqa: E402

CODES = {"better": 0, "worse": 1, "same": 3, "undecided": 4}
NO_CODE = (*NO_TRACE, "experiments/edit", "docs/", "results/", "deploy/")  # edits of these change no run
SIZES = {size: list(s.argv) for size, s in sweep.PRESETS["duel"].sizes.items()} | {"config": []}
CURVE_PAIRS, FEWEST = 4, 6  # pairs whose run of HEAD also ends at 1/4 and 1/2; fewest pairs before a verdict
USUAL_SD, USUAL_SLOPE = 0.009, 0.27  # nats, after 512 steps at 460K: of pairs, and per e-fold of tokens


def git(*args, otherwise="git fails: is it installed, and is this a clone of the repository?"):
    """Output of a git command in the repository. Raises ConfigError(otherwise)."""
    try:
        return subprocess.run(["git", "-C", REPO, *args], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise ConfigError(otherwise) from None


def snapshot(out, commit=None):
    """(folder, {path: hash}) of a copy of a commit, or of the working tree without what git ignores: out/<hash of the
    code>. Raises ConfigError for a submodule with changes."""
    out.mkdir(parents=True, exist_ok=True)
    copy = Path(tempfile.mkdtemp(dir=out, prefix="tmp-"))
    if commit:
        ran = subprocess.run(["tar", "-xf", "-", "-C", copy], input=git("archive", commit), capture_output=True)
        if ran.returncode:
            raise ConfigError(f"no snapshot of {commit[:10]} in {out}: {ran.stderr.decode(errors='replace').strip()}")
    else:
        for path in map(os.fsdecode, git("ls-files", "-coz", "--exclude-standard").split(b"\0")):
            if (REPO / path).is_symlink() or (REPO / path).is_file():  # deleted ones and submodules are listed
                (copy / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(REPO / path, copy / path, follow_symlinks=False)
    for path in (line.split("\t")[1] for line in git("ls-files", "-s").decode().splitlines() if line[:6] == "160000"):
        git("diff", "--quiet", "--ignore-submodules=untracked", commit or "HEAD", "--", path,
            otherwise=f"the submodule {path} has changes: undo them, or compare versions that have the same")
        shutil.copytree(REPO / path, copy / path, ignore=shutil.ignore_patterns(".git"), dirs_exist_ok=True)
    files = {name: hashlib.sha256(path.read_bytes()).hexdigest() for path in copy.rglob("*") if path.is_file()
             and path.suffix != ".md" and not (name := path.relative_to(copy).as_posix()).startswith(NO_CODE)}
    folder = out / hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:8]
    shutil.rmtree(copy) if folder.exists() else copy.rename(folder)
    return folder, files


PROBE = REPO / "experiments" / "edit_probe.py"


class Comparison:
    """Two versions {name: snapshot}, HEAD's first, trained with the settings argv in cells of the sweep in folder."""

    def __init__(self, versions, argv, steps, folder):
        self.head, self.edit = versions
        self.versions = versions
        self.steps = steps
        self.folder = folder
        self.rows = {}  # name of a cell: its row of results
        self.probes = {}  # name of a version: what edit_probe.py says of it
        self.argv = {}
        self.key = {}  # name of a version: of its code and settings, for the names of cells
        self.facts = {}  # what all runs must have alike
        for name, root in versions.items():
            self.probes[name] = about = probe(name, root, argv)
            self.argv[name] = [str(root / argv[0]), *argv[1:], f"--dataset={data_path(about['dataset'])}", "--min_lr=0",
                               "--schedule=wsd", "--decay_iters=-1", f"--warmup_iters={max(1, steps // 40)}",
                               f"--learning_rate={about['learning_rate']:g}"]
            settings = repr([self.argv[name], steps, os.environ.get("OMP_NUM_THREADS")]).encode()
            self.key[name] = f"{root.name}-{hashlib.sha256(settings).hexdigest()[:8]}"
        for key in ("dataset", "batch_tokens", "eval_block_size"):  # or they would not see or be judged by the same
            one, other = self.probes[self.head][key], self.probes[self.edit][key]
            if one != other:
                raise ConfigError(f"{key} is {one} in {self.head} and {other} in the edit: give one for both with "
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
            return runner.Cell(f"{whole}_1of{part}", argv, at, after=whole, root=self.versions[name])
        return runner.Cell(whole, argv, at, root=self.versions[name])

    def run(self, engine, first, most):
        """Run the next pairs, as many as fill the engine; returns their seeds. BadRecord: the edit diverges."""
        seeds, cells, unfinished = [], [], 0
        while not seeds or len(seeds) < most and unfinished < min(engine.jobs, 64):
            seed = first + len(seeds)
            seeds.append(seed)
            cells += [self.cell(name, seed) for name in (self.head, self.edit)]
            if seed <= CURVE_PAIRS:
                cells += [self.cell(self.head, seed, part) for part in (4, 2)]
            unfinished = sum(not is_finished(self.folder / c.name) for c in cells)
        runner.write_plan(self.folder, cells)
        with open(self.folder / "runs.txt", "a") as f, contextlib.redirect_stdout(f), contextlib.redirect_stderr(f):
            failed = runner.run_cells(cells, self.folder, engine)
        for cell in cells:
            self.read(cell, failed)
        return seeds

    def read(self, cell, failed):
        """Keep the row of a cell that has run. Raises BadRecord if the edit diverges, ConfigError if a run failed or
        is not like those before."""
        name = self.head if cell.at["version"] == self.key[self.head] else self.edit
        try:
            if cell.name in failed:
                raise BadRecord(failed[cell.name])
            row = records.read_run(self.folder / cell.name, cell.at)
        except BadRecord as error:
            words = str(error).replace(str(self.folder), "")  # whose name may say anything
            diverged = "it diverged" in words or "loss or gradient not finite" in words
            if diverged and name == self.edit:
                raise BadRecord(f"worse: it diverges with seed {cell.at['seed']} ({error})") from None
            raise ConfigError(f"{name} {'diverges' if diverged else 'does not run'}: {error}") from None
        self.rows[cell.name] = row
        facts = {key: value for (group, key), value in row["same"].items() if group == "data"}
        for key, value in {**facts, "dtype": row["dtype"], "torch": row["torch"]}.items():
            before = self.facts.setdefault(key, value)
            if value != before:
                raise ConfigError(f"{key} of {name}: {value}, where runs before have {before}: make it alike for "
                                  "both versions, or choose another --out")

    def row(self, name, seed, part=1):
        return self.rows[self.cell(name, seed, part).name]

    def column(self, name, key, n):
        """This of the first n runs of a version."""
        return np.array([self.row(name, seed)[key] for seed in range(1, n + 1)])

    def identical(self):
        """True if the first pair's validation losses are the same to the bit, document by document."""
        head, edit = (self.row(name, 1)["val_document_losses"] for name in (self.head, self.edit))
        return np.array_equal(head, edit)

    def results(self, n):
        """(differences (n,), curves (k, 2)) for `compare.decide`, of the first n pairs."""
        differences = self.column(self.edit, "val_loss", n) - self.column(self.head, "val_loss", n)
        curves = []
        for seed in range(1, min(n, CURVE_PAIRS) + 1):
            whole = self.row(self.head, seed)["val_loss"]
            curves.append([self.row(self.head, seed, part)["val_loss"] - whole for part in (4, 2)])
        return differences, np.array(curves)

    def notes(self, n):
        """Lines: what differs beside the loss by more than 1%, and whether the pairs share their draws."""
        head, edit = self.probes[self.head], self.probes[self.edit]
        lines = []
        for key in ("parameters", "FLOPs per token", "state", "learning_rate"):
            if abs(edit[key] - head[key]) > 0.01 * head[key]:
                line = f"{key} {number(edit[key])}, {self.head} {number(head[key])}"
                if key != "learning_rate":
                    line += ": better per token is not better per second"
                lines.append(line)
        other = sum(draw[0] for name, draw in edit["draws"].items() if draw != head["draws"].get(name))
        if other:
            lines.append(f"{other / edit['parameters']:.1%} of the edit's parameters start from other values than "
                         f"{self.head}'s, so the pairs share less noise")
        return lines


def probe(name, root, argv):
    """What a version trains with these arguments. Raises ConfigError with its last words if it does not start."""
    command = [sys.executable, str(PROBE), *argv, str(REPO / "data")]  # where the vocabulary is
    ran = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if ran.returncode:
        raise ConfigError(f"{name} does not start: {(ran.stderr.strip() or 'no output').splitlines()[-1]}")
    return json.loads(ran.stdout.splitlines()[-1])


def decay_begins(steps):
    """The step at which a run of so many begins its decay to 0: after four fifths."""
    return steps - max(1, round(0.2 * steps))


def number(x):
    return f"{x:,.0f}" if x >= 100 else f"{x:g}"


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
            self.ends, self.plans = json.loads(path.read_text()).values()
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


@dataclass
class Decision:
    """What a look says: compare.decide's verdict, log of the ratio of tokens and nats, both with their ends."""

    verdict: str = "undecided"
    interval: tuple = ()
    nats: tuple = ()
    sentence: str = ""  # of a comparison that needs no interval

    def times(self, head):
        return "{:.2f} ({:.2f} .. {:.2f}) times the tokens of {}".format(*np.exp(self.interval), head)


def decide(c, n, bound, args):
    """The Decision after n pairs."""
    if n == 1:
        return Decision("same", sentence="identical runs: the edit changes no bit") if c.identical() else Decision()
    verdict, *numbers = (x.item() for x in compare.decide(*c.results(n), bound, args.margin, args.alpha))
    return Decision(verdict, numbers[:3], numbers[3:])


def compare_versions(c, args, minutes, engine, say, looks):
    """Run pairs until they decide: the numbers of edit.json about this size. looks: file of when each ended."""
    budget = Budget(looks, args.pairs, minutes)
    limits = compare.bounds(budget.fractions, args.alpha)
    n = 0
    decision = Decision()
    done = False
    try:
        while not done:
            seeds = c.run(engine, n + 1, budget.most(n))
            budget.ended(seeds[-1])
            for n in seeds:
                budget.look(n)
                decision = decide(c, n, next(limits), args)
                if n > 1:
                    too_early = decision.interval[2] - decision.interval[1] > 2
                    words = "too early" if too_early else "needs " + decision.times(c.head)
                    say(f"pair {n}: {words}; {budget.left(n):.0f} minutes left")
                clear = decision.verdict != "undecided" and n >= FEWEST and not args.pairs
                done = budget.fractions[-1] == 1 or bool(decision.sentence) or clear
                if done:
                    break
    except BadRecord as error:
        decision = Decision("worse", sentence=str(error))
    except KeyboardInterrupt:
        args.stopped = True
    numbers = {"verdict": decision.verdict, "pairs": n, "minutes": budget.spent(), "notes": c.notes(n)}
    if decision.sentence:
        return numbers | {"sentence": decision.sentence}
    if n < 2:
        return numbers | {"sentence": f"undecided: too few pairs ({n}); rerun, or ask for more"}
    return describe(c, args, n, decision, budget, numbers)


def speed(c, n, interval):
    """A line, if the pairs tell that one version takes longer per token: how much, and what follows for the seconds to
    HEAD's loss. interval: of the log of the ratio of tokens."""
    edit, head = (-np.log(c.column(name, "tokens_per_second", n))[:, None] for name in (c.edit, c.head))
    d = compare.difference(edit, head, np.ones(1), paired=True)
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


def describe(c, args, n, decision, budget, numbers):
    """`numbers`, with the sentence, the losses, and notes about how far the verdict reaches."""
    minutes = f"{budget.spent():.0f} minutes"
    words = {"better": "better,", "worse": "worse,", "same": f"no difference of more than {args.margin:.1%}:",
             "undecided": f"{'stopped' if args.stopped else 'undecided'} after {minutes}:"}[decision.verdict]
    sentence = f"{words} needs {decision.times(c.head)} ({n} + {n} runs, {minutes})"
    differences, curves = c.results(n)
    head, edit = (c.column(name, "val_loss", n) for name in (c.head, c.edit))
    head_texts, edit_texts = (c.column(name, "val_document_losses", n) for name in (c.head, c.edit))
    d = compare.difference(edit_texts, head_texts, c.row(c.head, 1)["val_document_tokens"], paired=True)  # 95%
    texts = [np.exp(compare.log_tokens(x, curves.mean(0))).item() for x in (d.low, d.high)]
    notes = numbers["notes"]
    if len(budget.plans) > 1:
        notes.append(f"planned {', '.join(budget.plans)}: false verdicts with probability "
                     f"{len(budget.plans) * args.alpha:g}")
    notes += speed(c, n, decision.interval)
    without_pairs = (head.var() + edit.var()) / max(differences.var(), 1e-12)
    notes += [f"the losses of pairs correlate by {np.corrcoef(head, edit)[0, 1]:.2f}: without pairs "
              f"{without_pairs:.1f} times as many runs",
              "loss {:+.4f} ({:+.4f} .. {:+.4f}) nats per token, both at their config's learning rate".format(
                  *decision.nats),
              f"the pair that is farthest from the others: {odd_one(differences)}",
              f"on these held-out files; over other texts too: {texts[0]:.2f} .. {texts[1]:.2f}"]
    return numbers | {"interval": np.exp(decision.interval).tolist(), "nats": decision.nats[0],
                      "nats_interval": decision.nats[1:], "over_texts": texts, "losses": [head.tolist(), edit.tolist()],
                      "curves": curves.tolist(), "sentence": sentence}


def write_page(out, numbers, comparisons):
    """The page and its figure: the sentences, training curves, the difference over the run, the diff."""
    sentences = []
    notes = []
    panels = []
    for c, (size, of_size) in zip(comparisons, numbers["sizes"].items(), strict=True):
        sentences.append(f"{size}: {of_size['sentence']}")
        notes += [f"{size}: {note}" for note in of_size["notes"]]
        if of_size["pairs"] > 1:
            panels += training(c, size, of_size["pairs"])
    n, alpha = numbers["edits_tried"], numbers["alpha"]
    tried = (f"Edits tried against the same runs of {c.head}: {n}. One that does nothing is called better or worse "
             f"with probability {alpha:g} at most, one of {n} with up to {1 - (1 - alpha) ** n:.2f}.")
    diff = textwrap.indent((out / "edit.diff").read_text(), "    ")
    pages.write("Did the edit help?", pages.Page(sentences, [pages.listed(notes)], panels, [tried, diff]), out / "edit")


def training(c, size, n):
    """Panels: the training losses of n pairs, and their difference with two standard errors."""
    logs = [[read_log(c.folder / c.cell(name, seed).name, "train") for seed in range(1, n + 1)]
            for name in (c.head, c.edit)]
    lines = min(len(log) for of in logs for log in of)  # a damaged log has fewer
    losses = np.array([[[e["train_loss"] for e in log[:lines]] for log in of] for of in logs], float)
    width = max(1, losses.shape[-1] // 16)  # of a running mean: a line has one step's loss
    losses = np.apply_along_axis(np.convolve, -1, losses, np.ones(width) / width, "valid")
    tokens = [e["tokens"] for e in logs[0][0][:lines]][width - 1:]
    change = losses[1] - losses[0]
    mean = change.mean(0)
    error = 2 * change.std(0, ddof=1) / np.sqrt(n)
    curves = [Curve(name, name, tokens, of.mean(0)) for name, of in zip((c.head, c.edit), losses, strict=True)]
    return [Panel(f"{size}: training loss", "tokens", "nats", curves),
            Panel(f"{size}: {c.edit} minus {c.head}, +- 2 standard errors", "tokens", "nats",
                  [Curve(c.edit, "", tokens, mean, mean - error, mean + error)])]


def changes(head, edit, head_files, edit_files):
    """(names of the files that differ, lines of their diff). Raises ConfigError if none does, or an edit would be
    judged by another measure."""
    changed = sorted({name for name, _ in head_files.items() ^ edit_files.items()})
    if not changed:
        raise ConfigError("no file that training reads differs: save your edit, or give --against=COMMIT")
    judge = [name for name in changed if name.startswith("evaluation/") or Path(name).parent == Path("data")]
    if judge:
        raise ConfigError(f"{', '.join(judge)} differs: evaluation, loader and tokenizer are no part of an edit")
    diff = []
    for name in changed:
        texts = [(root / name).read_text(errors="replace").splitlines() if (root / name).exists() else []
                 for root in (head, edit)]
        diff += difflib.unified_diff(*texts, name, name, lineterm="")
    return changed, diff


def summary(changed, diff):
    """The files that differ and how many lines came and went, in words."""
    names = ", ".join(changed[:9])
    if len(changed) > 9:
        names += ", ..."
    came, went = (sum(line[:1] == sign != line[1:2] for line in diff) for sign in "+-")
    return f"{names}, {came} lines +, {went} lines -"


@dataclass
class EditRun(Where):
    config: str = "config/longhorn_laptop.py"  # of the runs
    against: str = "HEAD"  # the other version, a commit
    data: str = ""  # a prepared dataset (the config's)
    sizes: tuple[Literal[tuple(SIZES)], ...] = ("460K",)  # one verdict for each
    steps: Annotated[int, Range(8)] = 512  # of a run; below 512 families' curves cross
    minutes: Annotated[float, Range(0.01, 1e6)] = 30.0  # for all sizes together
    pairs: Whole = 0  # run this many, even if the verdict is clear before
    margin: Annotated[float, Range(1e-4, 1)] = 0.02  # a difference that would not matter
    alpha: Annotated[float, Range(1e-3, 0.5)] = 0.05  # probability of a false verdict
    gpus: str = ""  # use these, as 0,1 (all)
    out: Path = REPO / "out" / "edit"  # folder
    quiet: bool = False  # print the sentence only

    ARGUMENTS = ("config",)
    OTHERS = "any other --key=value is train.py's, for both versions"


def run(args):
    """Compare the versions; returns the exit code. Raises ConfigError."""
    args.out = args.out.resolve()
    args.stopped = False  # by the user
    config = os.path.relpath((REPO / args.config).resolve(), REPO)
    if config.startswith(".."):
        raise ConfigError(f"{args.config} is not in {REPO}, so both versions would have the same: copy it there")
    code = args.out / "code"
    began = time.strftime("%H:%M")

    def say(line):
        if not args.quiet:
            print(line, flush=True)

    commit = git("rev-parse", "--verify", f"{args.against}^{{commit}}", otherwise=f"--against={args.against}: there is "
                 f"no such commit in {REPO}, or no git").decode().strip()
    if args.out.is_relative_to(REPO):  # or a snapshot would have the snapshots before
        git("check-ignore", "-q", code, otherwise=f"--out={args.out}: git does not ignore it; choose a folder in out/")
    head, head_files = snapshot(code, commit)
    edit, edit_files = snapshot(code)
    changed, diff = changes(head, edit, head_files, edit_files)
    folder = args.out / head.name
    out = folder / f"edit-{edit.name}"
    out.mkdir(parents=True, exist_ok=True)
    (out / "edit.diff").write_text("\n".join(diff))
    say(f"the working tree at {began} against {args.against} ({commit[:10]}): {summary(changed, diff)}")
    versions = {args.against: head, "the edit": edit}
    comparisons, sizes, where = compare_sizes(args, config, versions, folder, out, say)
    with contextlib.suppress(ConfigError, OSError):  # the snapshot fails: the numbers come first
        if snapshot(code)[1] != edit_files:
            say(f"the verdict is about the tree at {began}: it has changed since")
    verdicts = {of_size["verdict"] for of_size in sizes.values()}
    numbers = {"verdict": verdicts.pop() if len(verdicts) == 1 else "undecided", "sizes": sizes, "alpha": args.alpha,
               "against": args.against, "commit": commit, "code": {"head": head.name, "edit": edit.name},
               "changed": changed, "edits_tried": edits_tried(folder, comparisons[0].key[args.against]),
               "date": time.strftime("%Y-%m-%d"), "machine": f"{cpu_model()}, {where}", "command": sys.argv[1:]}
    write_json(out / "edit.json", json.loads(json.dumps(numbers), parse_constant=lambda name: None))  # infinite: null
    with contextlib.suppress(ConfigError):  # a package of the reports is missing; edit.json has the numbers
        records.check_packages()
        write_page(out, numbers, comparisons)
    say(f"records: {out}/")
    for of_size in sizes.values():
        for line in of_size["notes"]:
            say(line)
    for size, of_size in sizes.items():
        of = f"{size}: " if len(sizes) > 1 else ""
        print(f"edit: {of}{of_size['sentence']}", flush=True)
    return CODES[numbers["verdict"]]


def compare_sizes(args, config, versions, folder, out, say):
    """(comparisons, {size: its numbers}, where the runs were, in words), until all sizes are done or the user stops."""
    if args.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = args.gpus
    jobs, gpus, where = runner.placement(args)
    if not args.cluster:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, runner.cores() // jobs)))
    os.environ.setdefault("LONGHORN_BUILD_DIR", str(REPO / "build"))  # libraries are named by their content
    settings = [*sweep.PRESETS["duel"].args, "--log_interval=8", "--eval_tokens=655360", "--final_eval_tokens=655360",
                *args.others]  # 655,360: all of pystdlib
    if args.data:
        settings.append(f"--dataset={data_path(args.data)}")
    minutes = args.minutes / len(args.sizes)
    comparisons, sizes = [], {}
    with runner.driver(args, folder, jobs, gpus=gpus) as engine:
        for size in args.sizes:
            if args.stopped:
                break
            c = Comparison(versions, [config, *SIZES[size], *settings], args.steps, folder)
            comparisons.append(c)
            for line in c.notes(0):
                say(line)
            expected = "" if gpus else f": {expectation(c, args, minutes, jobs or 1)}"
            say(f"{size} on {where}{expected}")
            sizes[size] = compare_versions(c, args, minutes, engine, say, out / f"looks-{c.key[c.edit]}.json")
    return comparisons, sizes, where


def expectation(c, args, minutes, jobs):
    """How many pairs there is time for, and what they usually tell, in words."""
    seconds = sum(4 + p["s/token"] * (args.steps * p["batch_tokens"] + 2e5) for p in c.probes.values())
    n = args.pairs or max(2, int(60 * minutes * jobs / seconds))  # 4 s to start; 2e5: the evaluation
    bound = list(compare.bounds(np.arange(1, n + 1) / n, args.alpha))[-1]
    shown = bound * USUAL_SD / n**0.5 / USUAL_SLOPE
    words = f"which tell tokens to +-{shown:.1%} at 460K" if shown < 1 else "too few"
    return f"about {n} pairs, {words}"


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
        return run(self.args)


main = Edit.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
