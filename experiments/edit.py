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

import argparse
import contextlib
import difflib
import hashlib
import json
import shutil
import subprocess
import tempfile
import textwrap
import time
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from common.errors import ConfigError  # noqa: E402
from experiments import compare, pages, records, sweep  # noqa: E402  # noqa: E402
from experiments.sweeps import runner  # noqa: E402
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


PROBE = """  # run in a snapshot with a config file and settings: prints what this version trains
import hashlib, json, pathlib, sys, timeit, torch, configurator, train
from inspection import counting
plain, config = (configurator.load(train.TrainConfig, argv) for argv in (sys.argv[1:2], sys.argv[1:-1]))
meta = pathlib.Path(sys.argv[-1], config.dataset.split(":")[0], "meta.json")  # of a mixture's first part
vocab = json.loads(meta.read_text())["vocab_size"] if meta.exists() else 256
config.vocab_size = config.vocab_size or -(-vocab // 64) * 64
train.seed_all(1)
model = train.build_model(config, "cpu")
width = plain.n_embd / config.n_embd if "--learning_rate" not in {a.split("=")[0] for a in sys.argv[2:-1]} else 1
idx = torch.randint(config.vocab_size, (config.micro_batch_size, config.block_size))
times = [0] if torch.cuda.is_available() else timeit.repeat(lambda: model(idx, idx)[1].backward(), repeat=4, number=1)
print(json.dumps({"learning_rate": float(f"{config.learning_rate * width:.3g}"), "dataset": config.dataset,
    "batch_tokens": config.batch_tokens, "eval_block_size": config.eval_block_size or config.block_size,
    "s/token": min(times) / idx.numel(), "state": counting.state_size(model),
    "parameters": counting.parameter_count(model)["total"], "FLOPs per token": counting.flops_per_token(model)["total"],
    "draws": {name: [p.numel(), hashlib.sha256(p.detach().float().numpy().tobytes()).hexdigest()]
              for name, p in model.named_parameters()}}))
"""


class Comparison:
    """Two versions {name: snapshot}, HEAD's first, trained with the settings argv in cells of the sweep in folder."""

    def __init__(self, versions, argv, steps, folder):
        (self.head, self.edit), self.versions, self.steps, self.folder = versions, versions, steps, folder
        self.rows, self.probes, self.argv, self.key, self.facts = {}, {}, {}, {}, {}
        for name, root in versions.items():
            command = [sys.executable, "-c", PROBE, *argv, REPO / "data"]  # where the vocabulary is
            ran = subprocess.run(command, cwd=root, capture_output=True, text=True)
            if ran.returncode:
                raise ConfigError(f"{name} does not start: {(ran.stderr.strip() or 'no output').splitlines()[-1]}")
            about = self.probes[name] = json.loads(ran.stdout.splitlines()[-1])
            self.argv[name] = [str(root / argv[0]), *argv[1:], f"--dataset={data_path(about['dataset'])}", "--min_lr=0",
                               "--schedule=wsd", "--decay_iters=-1", f"--warmup_iters={max(1, steps // 40)}",
                               f"--learning_rate={about['learning_rate']:g}"]
            settings = repr([self.argv[name], steps, os.environ.get("OMP_NUM_THREADS")]).encode()
            self.key[name] = f"{root.name}-{hashlib.sha256(settings).hexdigest()[:8]}"
        for key in ("dataset", "batch_tokens", "eval_block_size"):  # or they would not see or be judged by the same
            if (one := self.probes[self.head][key]) != (other := self.probes[self.edit][key]):
                raise ConfigError(f"{key} is {one} in {self.head} and {other} in the edit: give one for both with "
                                  f"--{key.replace('dataset', 'data')}=...")

    def cell(self, name, seed, part=1):
        """A run of 1/part of the budget; a shorter one branches from the whole one before its decay."""
        steps, begins = self.steps // part, lambda steps: steps - max(1, round(0.2 * steps))
        whole, argv = f"{self.key[name]}_seed{seed}", [*self.argv[name], f"--max_iters={steps}", f"--seed={seed}"]
        argv += ["--self_check=off"] * (seed > 1 or part > 1)  # the first pair's runs check this code
        if branch := part > 1:
            argv.append(f"--branch={self.folder.resolve()}/{whole}@{begins(steps)}")
        elif name == self.head and seed <= CURVE_PAIRS:
            argv.append(f"--keep_steps={begins(self.steps // 4)},{begins(self.steps // 2)}")
        at = {"stage": "edit", "version": self.key[name], "against": self.key[self.head], "steps": steps, "seed": seed}
        return runner.Cell(whole + f"_1of{part}" * branch, argv, at, after=whole * branch, root=self.versions[name])

    def run(self, engine, first, most):
        """Run the next pairs, as many as fill the engine; returns their seeds. BadRecord: the edit diverges."""
        seeds, cells = [], []
        while not seeds or len(seeds) < most and sum(
                not is_finished(self.folder / c.name) for c in cells) < min(engine.jobs, 64):
            seeds.append(first + len(seeds))
            cells += [self.cell(name, seeds[-1]) for name in (self.head, self.edit)]
            cells += [self.cell(self.head, seeds[-1], part) for part in (4, 2) if seeds[-1] <= CURVE_PAIRS]
        runner.write_plan(self.folder, cells)
        with open(self.folder / "runs.txt", "a") as f, contextlib.redirect_stdout(f), contextlib.redirect_stderr(f):
            failed = runner.run_cells(cells, self.folder, engine)
        for cell in cells:
            name = self.head if cell.at["version"] == self.key[self.head] else self.edit
            try:
                if cell.name in failed:
                    raise BadRecord(failed[cell.name])
                self.rows[cell.name] = row = records.read_run(self.folder / cell.name, cell.at)
            except BadRecord as error:
                words = str(error).replace(str(self.folder), "")  # whose name may say anything
                diverged = "it diverged" in words or "loss or gradient not finite" in words
                if diverged and name == self.edit:
                    raise BadRecord(f"worse: it diverges with seed {cell.at['seed']} ({error})") from None
                raise ConfigError(f"{name} {'diverges' if diverged else 'does not run'}: {error}") from None
            for key, value in {**row["same"]["data"], "dtype": row["dtype"], "torch": row["torch"]}.items():
                if value != (before := self.facts.setdefault(key, value)):
                    raise ConfigError(f"{key} of {name}: {value}, where runs before have {before}: make it alike for "
                                      "both versions, or choose another --out")
        return seeds

    def row(self, name, seed, part=1):
        return self.rows[self.cell(name, seed, part).name]

    def results(self, n):
        """(differences (n,), curves (k, 2)) for `compare.decide`, of the first n pairs."""
        loss = lambda *run: self.row(*run)["val_loss"]
        curves = [[loss(self.head, seed, part) - loss(self.head, seed) for part in (4, 2)]
                  for seed in range(1, min(n, CURVE_PAIRS) + 1)]
        return np.array([loss(self.edit, s) - loss(self.head, s) for s in range(1, n + 1)]), np.array(curves)

    def notes(self, n):
        """Lines: what differs beside the loss by more than 1%, and whether the pairs share their draws."""
        head, edit, lines = self.probes[self.head], self.probes[self.edit], []
        number = lambda x: f"{x:,.0f}" if x >= 100 else f"{x:g}"
        for about, name in (head, self.head), (edit, self.edit):
            speeds = [self.row(name, s)["tokens_per_second"] for s in range(1, n + 1)] or [0]
            about |= {"tokens/s": np.mean(speeds), "noise": np.std(speeds)}
        for key in ("parameters", "FLOPs per token", "state", "tokens/s", "learning_rate"):
            if abs(edit[key] - head[key]) > max(0.01 * head[key], head["noise"] * (key == "tokens/s")):
                lines.append(f"{key} {number(edit[key])}, {self.head} {number(head[key])}"
                             + ": better per token is not better per second" * (key != "learning_rate"))
        other = sum(draw[0] for name, draw in edit["draws"].items() if draw != head["draws"].get(name))
        return lines + [f"{other / edit['parameters']:.1%} of the edit's parameters start from other values than "
                        f"{self.head}'s, so the pairs share less noise"] * bool(other)


def data_path(dataset):
    """The dataset's folders by their absolute paths: snapshots have no data. Raises ConfigError."""
    parts = []
    for name, colon, share in (part.partition(":") for part in dataset.split(",")):
        folder = Path(name) if Path(name).is_dir() else REPO / "data" / name
        if not (folder / "meta.json").exists():
            raise ConfigError(f"{folder} is not prepared: python data/{name}/prepare.py")
        parts.append(f"{folder.resolve()}{colon}{share}")
    return ",".join(parts)


def compare_versions(c, args, minutes, engine, say, looks):
    """Run pairs until they decide: the numbers of edit.json about this size. looks: file of when each ended."""
    plan = f"{args.pairs} pairs" if args.pairs else f"{minutes:g} minutes"
    ends, plans = json.loads(looks.read_text()).values() if looks.exists() else ([], [])
    began, n, verdict, sentence, done = time.monotonic() - 60 * max(ends, default=0), 0, "undecided", "", False
    spent, limits = lambda: (time.monotonic() - began) / 60, compare.bounds(fractions := [], *args.error)
    try:
        while not done:
            seeds = c.run(engine, n + 1, args.pairs - n if args.pairs else len(ends) - n or 32)
            ends += np.linspace(max(ends, default=0), spent(), max(1, seeds[-1] - len(ends) + 1))[1:].tolist()
            for n in seeds:
                plans += [plan] * (n > 1 and plan not in plans)
                write_json(looks, {"minutes": ends, "plans": plans})
                fractions.append(min(1, n / args.pairs if args.pairs else ends[n - 1] / minutes))
                bound = next(limits)
                if n == 1 and np.array_equal(*(c.row(name, 1)["val_document_losses"] for name in (c.head, c.edit))):
                    verdict, sentence = "same", "identical runs: the edit changes no bit"
                elif n > 1:
                    decided = compare.decide(*c.results(n), bound, args.margin, args.alpha)
                    verdict, *interval, mean, half = (x.item() for x in decided)
                    times = "{:.2f} ({:.2f} .. {:.2f}) times the tokens of {}".format(*np.exp(interval), c.head)
                    left = f"{max(0, spent() / n * (args.pairs - n) if args.pairs else minutes - spent()):.0f} minutes"
                    say(f"pair {n}: {'too early' if interval[2] - interval[1] > 2 else 'needs ' + times}; {left} left")
                if done := fractions[-1] == 1 or sentence or verdict != "undecided" and n >= FEWEST and not args.pairs:
                    break
    except BadRecord as error:
        verdict, sentence = "worse", str(error)
    except KeyboardInterrupt:
        args.stopped = True
    numbers, notes = {"verdict": verdict, "pairs": n, "minutes": spent()}, c.notes(n)
    if n > 1 and not sentence:
        words = {"better": "better,", "worse": "worse,", "same": f"no difference of more than {args.margin:.1%}:",
                 "undecided": f"{'stopped' if args.stopped else 'undecided'} after {spent():.0f} minutes:"}[verdict]
        sentence = f"{words} needs {times} ({n} + {n} runs, {spent():.0f} minutes)"
        differences, curves = c.results(n)
        of = lambda name, key: np.array([c.row(name, seed)[key] for seed in range(1, n + 1)])
        edit, head = ([of(name, key) for key in ("val_loss", "val_document_losses")] for name in (c.edit, c.head))
        d = compare.difference(edit[1], head[1], c.row(c.head, 1)["val_document_tokens"], paired=True)  # 95%
        texts = [np.exp(compare.log_tokens(x, curves.mean(0))).item() for x in (d.low, d.high)]
        numbers |= {"interval": np.exp(interval).tolist(), "nats": mean, "nats_half_width": half, "over_texts": texts,
                    "losses": [head[0].tolist(), edit[0].tolist()], "curves": curves.tolist()}
        if len(plans) > 1:
            notes.append(f"planned {', '.join(plans)}: false verdicts with probability {len(plans) * args.alpha:g}")
        notes += [f"the losses of pairs correlate by {np.corrcoef(head[0], edit[0])[0, 1]:.2f}: without pairs "
                  f"{(head[0].var() + edit[0].var()) / max(differences.var(), 1e-12):.1f} times as many runs",
                  f"loss {mean:+.4f} +- {half:.4f} nats per token, both at their config's learning rate",
                  f"on these held-out files; over other texts too: {texts[0]:.2f} .. {texts[1]:.2f}"]
    return numbers | {"notes": notes, "sentence": sentence or f"undecided: too few pairs ({n}); rerun, or ask for more"}


def write_page(out, numbers, comparisons):
    """The page and its figure: the sentences, training curves, the difference over the run, all pairs, the diff."""
    blocks = ["# Did the edit help?", pages.shown(out / "edit.png", "training losses, and their difference")]
    with pages.figure(out / "edit.png", len(comparisons), 2, 5.2, 3.4, layout="constrained") as (_, axes):
        for (left, right), c, (size, of_size) in zip(axes, comparisons, numbers["sizes"].items(), strict=True):
            blocks += [pages.bold(f"{size}: {of_size['sentence']}"), pages.listed(of_size["notes"])]
            if (n := of_size["pairs"]) < 2:
                continue
            logs = [[read_log(c.folder / c.cell(name, seed).name, "train") for seed in range(1, n + 1)]
                    for name in (c.head, c.edit)]
            lines = min(len(log) for of in logs for log in of)  # a damaged log has fewer
            losses = np.array([[[e["train_loss"] for e in log[:lines]] for log in of] for of in logs], float)
            width = max(1, losses.shape[-1] // 16)  # of a running mean: a line has one step's loss
            losses = np.apply_along_axis(np.convolve, -1, losses, np.ones(width) / width, "valid")
            tokens, change = [e["tokens"] for e in logs[0][0][:lines]][width - 1:], losses[1] - losses[0]
            error = 2 * change.std(0, ddof=1) / np.sqrt(n)
            left.plot(tokens, losses.mean(1).T, label=[c.head, c.edit])
            left.legend(title=f"{size}: training loss in nats by tokens")
            right.plot(tokens, change.mean(0), label=f"{c.edit} minus {c.head}, +- 2 standard errors")
            right.fill_between(tokens, change.mean(0) - error, change.mean(0) + error, alpha=0.3)
            right.legend()
    n, alpha = numbers["edits_tried"], numbers["alpha"]
    blocks.append(f"Edits tried against the same runs of {c.head}: {n}. One that does nothing is called better or "
                  f"worse with probability {alpha:g} at most, one of {n} with up to {1 - (1 - alpha) ** n:.2f}.")
    pages.write(out / "edit.md", [*blocks, textwrap.indent((out / "edit.diff").read_text(), "    ")], out / "edit.png")


def parser():
    p = argparse.ArgumentParser("edit.py", None, __doc__, "any other --key=value is train.py's, for both versions",
                                formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("config", nargs="?", default="config/longhorn_laptop.py", help="(%(default)s)")
    p.add_argument("--against", default="HEAD", metavar="COMMIT", help="the other version (%(default)s)")
    p.add_argument("--data", default="", help="a prepared dataset (the config's)")
    p.add_argument("--sizes", type=runner.names, default=("460K",), help=f"some of {','.join(SIZES)} (460K)")
    p.add_argument("--steps", type=int, default=512, help="of a run (%(default)s); below 512 families' curves cross")
    p.add_argument("--minutes", type=float, default=30, help="for all sizes together (%(default)s)")
    p.add_argument("--pairs", type=int, default=0, help="run this many, even if the verdict is clear before")
    p.add_argument("--margin", type=float, default=0.02, help="a difference that would not matter (%(default)s)")
    p.add_argument("--alpha", type=float, default=0.05, help="probability of a false verdict (%(default)s)")
    p.add_argument("--gpus", default="", metavar="0,1", help="use these (all)")
    p.add_argument("--out", type=lambda s: Path(s).resolve(), default=f"{REPO}/out/edit", help="folder (out/edit)")
    p.add_argument("--quiet", action="store_true", help="print the sentence only")
    p.set_defaults(command="run", stopped=False)
    runner.add_options(p, "one per core or GPU")
    return p


def run(args, extra):
    """Compare the versions; returns the exit code. Raises ConfigError."""
    for key, low, high in (("steps", 8, 2**31), ("minutes", 0.01, 1e6), ("pairs", 0, 10**6), ("margin", 1e-4, 1),
                           ("alpha", 1e-3, 0.5)):
        if not low <= getattr(args, key) <= high:
            raise ConfigError(f"--{key}={getattr(args, key)}: from {low:g} to {high:g}")
    if not SIZES.keys() >= {*args.sizes}:
        raise ConfigError(f"--sizes={','.join(args.sizes)}: choose of {', '.join(SIZES)}")
    config = os.path.relpath((REPO / args.config).resolve(), REPO)
    if config.startswith(".."):
        raise ConfigError(f"{args.config} is not in {REPO}, so both versions would have the same: copy it there")
    args.error = args.alpha, 8 if args.pairs else 2  # for compare.bounds: --pairs run to the end, and spend it there
    say, code, began = lambda line: args.quiet or print(line, flush=True), args.out / "code", time.strftime("%H:%M")
    commit = git("rev-parse", "--verify", f"{args.against}^{{commit}}", otherwise=f"--against={args.against}: there is "
                 f"no such commit in {REPO}, or no git").decode().strip()
    if args.out.is_relative_to(REPO):  # or a snapshot would have the snapshots before
        git("check-ignore", "-q", code, otherwise=f"--out={args.out}: git does not ignore it; choose a folder in out/")
    (head, head_files), (edit, edit_files) = snapshot(code, commit), snapshot(code)
    changed, folder = sorted({name for name, _ in head_files.items() ^ edit_files.items()}), args.out / head.name
    if not changed:
        raise ConfigError("no file that training reads differs: save your edit, or give --against=COMMIT")
    judge = [name for name in changed if name.startswith("evaluation/") or Path(name).parent == Path("data")]
    if not (head / "experiments" / "edit.py").exists():  # older ones all evaluate alike
        judge = git("diff", "--name-only", "HEAD", "--", "evaluation", ":(glob)data/*.py").decode().split()
    if judge:
        raise ConfigError(f"{', '.join(judge)} differs: evaluation, loader and tokenizer are no part of an edit")
    (out := folder / f"edit-{edit.name}").mkdir(parents=True, exist_ok=True)
    text = lambda root, name: (root / name).read_text(errors="replace").splitlines() if (root / name).exists() else []
    diff = [line for name in changed
            for line in difflib.unified_diff(text(head, name), text(edit, name), name, name, lineterm="")]
    (out / "edit.diff").write_text("\n".join(diff))
    say(f"the working tree at {began} against {args.against} ({commit[:10]}): "
        + ", ".join(changed[:9] + ["..."] * (len(changed) > 9)) + ", "
        + ", ".join(f"{sum(line[:1] == sign != line[1:2] for line in diff)} lines {sign}" for sign in "+-"))
    os.environ |= {"CUDA_VISIBLE_DEVICES": args.gpus} if args.gpus else {}
    jobs, gpus, where = runner.placement(args)
    if not args.cluster:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, runner.cores() // jobs)))
    os.environ.setdefault("LONGHORN_BUILD_DIR", str(REPO / "build"))  # libraries are named by their content
    comparisons, sizes, minutes = [], {}, args.minutes / len(args.sizes)
    settings = [*sweep.PRESETS["duel"].args, "--log_interval=8", "--eval_tokens=655360", "--final_eval_tokens=655360",
                *extra, *([f"--dataset={data_path(args.data)}"] if args.data else [])]  # 655,360: all of pystdlib
    with runner.driver(args, folder, jobs, gpus=gpus) as engine:
        for size in args.sizes:
            if args.stopped:
                break
            argv, versions = [config, *SIZES[size], *settings], {args.against: head, "the edit": edit}
            comparisons.append(c := Comparison(versions, argv, args.steps, folder))
            seconds = sum(4 + p["s/token"] * (args.steps * p["batch_tokens"] + 2e5) for p in c.probes.values())
            n = args.pairs or max(2, int(60 * minutes * (jobs or 1) / seconds))  # 4 s to start; 2e5: the evaluation
            shown = list(compare.bounds(np.arange(1, n + 1) / n, *args.error))[-1] * USUAL_SD / n**0.5 / USUAL_SLOPE
            words = f"which tell tokens to +-{shown:.1%} at 460K" if shown < 1 else "too few"
            say("\n".join([*c.notes(0), f"{size} on {where}" + f": about {n} pairs, {words}" * (not gpus)]))
            sizes[size] = compare_versions(c, args, minutes, engine, say, out / f"looks-{c.key[c.edit]}.json")
    with contextlib.suppress(ConfigError, OSError):  # the snapshot fails: the numbers come first
        if snapshot(code)[1] != edit_files:
            say(f"the verdict is about the tree at {began}: it has changed since")
    tried = {at["version"] for name, at in runner.read_plan(folder)["cells"].items()
             if at["against"] == comparisons[0].key[args.against] != at["version"] and is_finished(folder / name)}
    verdicts = {of_size["verdict"] for of_size in sizes.values()}
    numbers = {"verdict": verdicts.pop() if len(verdicts) == 1 else "undecided", "sizes": sizes, "alpha": args.alpha,
               "against": args.against, "commit": commit, "code": {"head": head.name, "edit": edit.name},
               "changed": changed, "edits_tried": max(1, len(tried)), "date": time.strftime("%Y-%m-%d"),
               "machine": f"{cpu_model()}, {where}", "command": sys.argv[1:]}
    write_json(out / "edit.json", json.loads(json.dumps(numbers), parse_constant=lambda name: None))  # infinite: null
    with contextlib.suppress(ConfigError):  # a package of the reports is missing; edit.json has the numbers
        records.check_packages()
        write_page(out, numbers, comparisons)
    say("\n".join([f"records: {out}/", *(line for of_size in sizes.values() for line in of_size["notes"])]))
    for size, of_size in sizes.items():
        print("edit: " + f"{size}: " * (len(sizes) > 1) + of_size["sentence"], flush=True)
    return CODES[numbers["verdict"]]


def main(argv):
    args, extra = parser().parse_known_args(argv)
    fixed = {*sweep.SET_BY_THE_SWEEP, "dataset", "decay_iters"} - {"learning_rate", "model", "pattern"}
    return runner.run_or_report("edit.py", args, extra, run, None, fixed, "--steps, --data and --out")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
