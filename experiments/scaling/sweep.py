"""Many training runs as one job: start them, watch them, go on after any kill, and read their records back.

A sweep is a folder with a plan and a folder a cell:

    out/table1_laptop/plan.json              every cell: its name, what it stands for, its arguments
    out/table1_laptop/<cell>/                the records that train.py writes (records.py)
    out/table1_laptop/<cell>.txt             what it printed

The surprise: there is no list of what is done. A cell is finished when its result.json stands, which its own process
renames into place as its last act; whatever else died, the same command goes on from the cells' checkpoints.

experiments/scaling/table1.py and experiments/extrapolation.py plan and report; running and reading are here.
"""

import argparse
import contextlib
import ctypes
import functools
import importlib.util
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from configurator import ConfigError, main_error  # noqa: E402
from records import environment, read_log, version, write_json  # noqa: E402

# Settings that make two runs comparable: where they differ, something else than the cell's own coordinates was changed.
SAME_IN_A_SWEEP = ("batch_tokens", "weight_decay", "beta1", "beta2", "grad_clip", "warmup_iters", "min_lr", "vocab_size",
                   "eval_block_size", "eval_tokens", "final_eval_tokens", "dtype", "init_from")


# Settings that train.py works out, or that may differ from the command line's without changing the result.
WORKED_OUT = {"vocab_size", "batch_size", "dtype", "device", "dataset", "out_dir", "resume"}


@dataclass
class Cell:
    """One run: `name` is its folder, `argv` what its script gets, `at` its coordinates (model, size, seed ...), and
    `seconds` how long it will take, 0 where nobody knows."""

    name: str
    argv: list
    at: dict = field(default_factory=dict)
    seconds: float = 0.0

    def command(self, folder, nproc=1, script="train.py"):
        """Its command line, to be run at the top of the repository."""
        python = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}", *patience(nproc)]
        return [*(python if nproc > 1 else python[:1]), script, *self.argv, f"--out_dir={beside(folder) / self.name}",
                "--resume=auto"]


@functools.cache
def patience(nproc):
    """torchrun's option that leaves a worker more than 30 s to save when it is asked to stop, where it has that."""
    if nproc == 1:
        return ()
    from torch.distributed.run import get_args_parser

    return ("--shutdown-timeout=300",) if "--shutdown-timeout" in get_args_parser().format_help() else ()


def beside(folder):
    """`folder` as seen from the repository's top, where cells run; a path outside of it stays whole."""
    folder = Path(folder).resolve()
    return folder.relative_to(REPO) if folder.is_relative_to(REPO) else folder


def finished(folder, cell):
    """Whether the cell has its final record."""
    return (Path(folder) / cell.name / "result.json").exists()


# ------------------------------------------------------------------------------------------------------------------ plan

def make_folder(folder):
    """Raises ConfigError where it cannot be: before hours of work go into it."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder} ({error.strerror}): choose another --out") from None


def write_plan(folder, cells, **about):
    """Adds the cells to folder/plan.json, beside those that stand there, with what is true of the whole sweep (`about`).

    Raises ConfigError where a cell of the same name has begun with other arguments.
    """
    folder = Path(folder)
    make_folder(folder)
    old = read_plan(folder) if (folder / "plan.json").exists() else {"cells": {}}
    new = {c.name: {**c.at, "argv": c.argv} for c in cells}
    for c in cells:
        before = old["cells"].get(c.name, {}).get("argv", c.argv)
        if sorted(before) != sorted(c.argv) and (folder / c.name / "config.json").exists():
            other = sorted(set(before) ^ set(c.argv))
            raise ConfigError(f"{c.name} in {folder} ran with other arguments ({' '.join(other)}): choose another --out")
    write_json(folder / "plan.json", {**old, **about, "cells": {**old["cells"], **new}})


def read_plan(folder):
    """plan.json of a sweep. Raises ConfigError where there is none, or none that can be read."""
    path = Path(folder) / "plan.json"
    try:
        plan = json.loads(path.read_text())
        if not isinstance(plan["cells"], dict) or not all(isinstance(c, dict) for c in plan["cells"].values()):
            raise ValueError("cells are not a table")
        if any(Path(name).is_absolute() or ".." in Path(name).parts for name in plan["cells"]):
            raise ValueError("a cell lies outside of the sweep")
        return plan
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no sweep (no plan.json): give the folder that `run` printed") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): delete it and give `run` again, finished cells stay") from None


def same_commit(folder):
    """This checkout's environment. Raises ConfigError where the sweep has runs of other code: they would not compare."""
    where = environment()
    if (folder / "plan.json").exists():
        plan = read_plan(folder)
        begun = any((folder / name / "config.json").exists() for name in plan["cells"])
        if begun and plan.get("commit") != version(where):
            old, new = (c if c is None or "+" not in c else f"{c[:12]} with changes {c.split('+')[1]}"
                        for c in (plan.get("commit"), version(where)))
            raise ConfigError(f"{folder} was begun at commit {old}, this is {new}: runs of different code are not compared; go "
                              "back to that code, or choose another --out")
    return where


# ------------------------------------------------------------------------------------------------------------------- run

def run_cells(cells, folder, jobs=0, nproc=1, script="train.py", gpus=None):
    """Run every unfinished cell in its own process, `jobs` at a time; return {name: why} of those that failed.

    A cell that was interrupted goes on from its checkpoint. A failure does not stop the others. SIGINT or SIGTERM ask
    the running cells to save and stop, and raise KeyboardInterrupt when they have. A second of either kills them.

    Args:
        cells: [Cell]; folder: of the sweep; nproc: processes a cell, by torchrun.
        jobs: cells at a time; 0: one a GPU (with nproc > 1: one at all), and without a GPU one a core.
        gpus: ids, for CUDA_VISIBLE_DEVICES; None: those PyTorch sees. Several jobs may share one.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    waiting = [c for c in cells if not finished(folder, c)]
    if not waiting:
        return {}
    gpus = visible_gpus() if gpus is None else gpus
    jobs = jobs or (1 if nproc > 1 else len(gpus) or cores())
    threads = max(1, cores() // min(jobs, len(waiting)))
    lock = take_sweep(folder)
    running, failed, asked, done = {}, {}, [], len(cells) - len(waiting)

    def ask(number, frame):
        asked.append(number)
        for process, _, _, _ in running.values():
            stop_group(process.pid, signal.SIGTERM if len(asked) == 1 else signal.SIGKILL)

    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    bar = Bar(cells, folder, jobs)
    try:
        while running or waiting and not asked:
            while waiting and not asked and len(running) < jobs:
                slot = next(s for s in range(jobs) if s not in running)
                cell = waiting.pop(0)
                env = {**os.environ, "PYTHONUNBUFFERED": "1"}
                if gpus:
                    mine = dict.fromkeys(gpus[(slot * nproc + i) % len(gpus)] for i in range(nproc))
                    env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, mine))
                else:
                    env.setdefault("OMP_NUM_THREADS", str(max(1, threads // nproc)))
                with open(folder / f"{cell.name}.txt", "a") as out:
                    command = cell.command(folder, nproc, script)
                    print("$", shlex.join(command), file=out, flush=True)
                    running[slot] = (subprocess.Popen(command, cwd=REPO, env=env, stdout=out, stderr=subprocess.STDOUT,
                                                      stdin=subprocess.DEVNULL, start_new_session=True,
                                                      preexec_fn=stop_with_parent, pass_fds=lock), cell, slot,
                                     time.perf_counter())
                if asked:  # since the loop looked
                    stop_group(running[slot][0].pid, signal.SIGTERM)
            time.sleep(0.2)
            for process, cell, slot, began in list(running.values()):
                bar.show([c for _, c, _, _ in running.values()])
                if process.poll() is None:
                    continue
                del running[slot]
                if finished(folder, cell):
                    done += 1
                    bar.end(cell, time.perf_counter() - began, done)
                elif not asked:
                    failed[cell.name] = last_words(folder / f"{cell.name}.txt", process.returncode)
                    bar.line(f"{cell.name}: FAILED: {failed[cell.name]}")
    finally:
        bar.close()
        for s, handler in before.items():
            signal.signal(s, handler)
        for process, _, _, _ in running.values():  # only after an error of our own
            stop_group(process.pid, signal.SIGTERM)
        for fd in lock:
            os.close(fd)
    if asked:
        raise KeyboardInterrupt(f"{len(cells) - done} of {len(cells)} cells are left; the same command goes on")
    return failed


def visible_gpus():
    """Ids of the GPUs that PyTorch sees, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named and torch.cuda.is_available() else list(range(torch.cuda.device_count()))


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def stop_with_parent():
    """In the child: be asked to stop when the sweep's process dies, however it dies (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def stop_group(pid, number):
    """Send a signal to a cell's process group; SIGKILL also to the groups of its children, which torchrun gives their own."""
    found = [pid]
    if number == signal.SIGKILL:
        for path in Path(f"/proc/{pid}/task").glob("*/children"):  # Linux
            with contextlib.suppress(OSError):
                found += map(int, path.read_text().split())
    for each in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(each, number)


def take_sweep(folder):
    """Lock the sweep's folder. The cells inherit the lock: after a kill, the next sweep waits until they have saved."""
    try:
        import fcntl
    except ImportError:  # not a Unix
        return ()
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    for attempt in range(300):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return (handle,)
        except BlockingIOError:
            if attempt == 0:
                print(f"waiting for the runs in {folder} that another sweep left or still has", file=sys.stderr, flush=True)
            time.sleep(0.2)
    os.close(handle)
    raise ConfigError(f"another sweep is at work in {folder}: wait for it, or choose another --out")


def last_words(path, code):
    """Why a cell failed: the last line it printed, of an error if one names it so, and how it ended."""
    lines = [line.strip() for line in Path(path).read_text(errors="replace").splitlines() if line.strip(" =-\t")]
    began = max((i for i, line in enumerate(lines) if line.startswith("$ ")), default=0)
    lines = [line for line in lines[began:] if "error:" in line] or lines[began + 1:]
    how = f"signal {-code}" if code < 0 else f"exit {code}" if code else "stopped before its end"
    return f"{lines[-1][:240] if lines else 'it printed nothing'} ({how}; all of it in {path})"


class Bar:
    """Progress over all cells: a bar on a terminal, a line a cell elsewhere. Time left is by the cells' estimates."""

    def __init__(self, cells, folder, jobs):
        self.cells, self.folder, self.bar = cells, folder, None
        self.total = sum(c.seconds for c in cells) or len(cells)
        self.at_start = self.share([])
        self.began = time.perf_counter()
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=1.0, bar_format="{l_bar}{bar}| {elapsed}{postfix}", dynamic_ncols=True)
        self.line(f"{sum(not finished(folder, c) for c in cells)} of {len(cells)} cells to run, {jobs} at a time; records in "
                  f"{folder}/")

    def share(self, running):
        """The part of all work that is done."""
        weight = (lambda c: c.seconds) if any(c.seconds for c in self.cells) else lambda c: 1.0
        done = sum(weight(c) for c in self.cells if finished(self.folder, c))
        for cell in running:
            with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
                steps = json.loads((self.folder / cell.name / "config.json").read_text())["config"]["max_iters"]
                done += weight(cell) * read_log(self.folder / cell.name)[-1]["step"] / steps
        return done / self.total

    def left(self, running=()):
        """Minutes left, or None before anything is known."""
        now, spent = self.share(running), time.perf_counter() - self.began
        return spent / 60 * (1 - now) / (now - self.at_start) if now > self.at_start else None

    def show(self, running):
        if self.bar is not None and time.perf_counter() - getattr(self, "shown", 0) > 2:
            self.shown, left = time.perf_counter(), self.left(running)
            self.bar.n = min(1.0, self.share(running))
            self.bar.set_postfix_str(", ".join(c.name for c in running) + (f"; {left:.0f} min left" if left else ""))

    def end(self, cell, seconds, done):
        result = json.loads((self.folder / cell.name / "result.json").read_text())
        left = self.left()
        known = [f"{words} {result[key]:.4f}" for key, words in (("val_loss", "validation loss"), ("accuracy", "accuracy"))
                 if isinstance(result.get(key), float)]
        outcome = known[0] if known else "done"
        self.line(f"{cell.name}: {outcome}, {seconds:.0f} s ({done} of {len(self.cells)}"
                  + (f", about {left:.0f} min left)" if left else ")"))

    def line(self, text):
        self.bar.write(text) if self.bar is not None else print(text, flush=True)

    def close(self):
        if self.bar is not None:
            self.bar.close()


# ------------------------------------------------------------------------------------------------------------------ read

@dataclass
class Run:
    """A finished run, read and checked."""

    name: str  # its folder in the sweep
    folder: Path
    model: str
    size: str  # the sweep's label: 120M, 350M ...
    context: int  # tokens of a training window
    tokens: int  # trained on
    learning_rate: float  # peak
    seed: int
    parameters: int  # all, embedding counted once
    embedding: int  # of them in the embedding
    flops: float  # of the whole training
    seconds: float  # of it, evaluation and checkpoints included
    loss: float  # validation, nats a token, at the end
    bits_per_byte: float  # None where the data do not say how long a token is
    curve: list  # [(tokens, validation loss or None)] along the run, its end included
    device: str
    processes: int
    commit: str  # with a + where files were changed since; None outside of git
    data: str  # sha256 of train.bin and val.bin
    config: dict
    result: dict
    environment: dict
    at: dict  # the plan's coordinates


def means(text, value):
    """Whether a setting's text on the command line stands for the value in a record."""
    if isinstance(value, bool):
        return text.lower() in ("true", "yes", "1") if value else text.lower() in ("false", "no", "0")
    if isinstance(value, (int, float)):
        with contextlib.suppress(ValueError):
            return float(text) == value
    return text == str(value)


class BadRecord(ValueError):
    """A run whose records cannot be trusted; the message says why."""


def finished_records(folder):
    """result.json and config.json of a run, as tables. Raises BadRecord where it is not finished, or one is damaged."""
    folder = Path(folder)

    def load(name):
        try:
            record = json.loads((folder / name).read_text())
        except FileNotFoundError:
            raise BadRecord(f"no {name}") from None
        except (OSError, ValueError) as error:
            raise BadRecord(f"{name} is damaged ({' '.join(str(error).split())})") from None
        if not isinstance(record, dict):
            raise BadRecord(f"{name} is damaged (not a table)")
        return record

    if not (folder / "result.json").exists():
        events = read_log(folder)
        raise BadRecord(f"not finished (step {events[-1].get('step')})" if events else "not run")
    return load("result.json"), load("config.json")


def read_run(folder, at):
    """The Run in a folder. Raises BadRecord where a file is missing, torn, or at odds with another or with the plan."""
    folder = Path(folder)

    def number(table, key, least=0.0):
        value = table[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least < value < 1e300:  # NaN is not
            raise BadRecord(f"{key} is {str(value)[:40]}: not a number above {least:g}")
        return value

    result, record = finished_records(folder)
    try:
        lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        curve = [(e["tokens"], e["val_loss"]) for e in lines if e["event"] == "eval"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadRecord(f"log.jsonl is damaged ({error})") from None
    try:
        config, derived, where = record["config"], record["derived"], record["environment"]
        if not isinstance(result["val_loss"], (int, float)) or result["val_loss"] != result["val_loss"]:
            raise BadRecord(f"its loss is {result['val_loss']}: it diverged")
        guessing = math.log(number(config, "vocab_size", 1))
        if number(result, "val_loss") >= guessing:
            raise BadRecord(f"its loss {result['val_loss']:.4g} is no better than guessing, {guessing:.3f}: it diverged")
        for key in ("seconds", "flops", "parameters", "processes", "val_tokens"):
            number(result, key)
        for key, got, wanted in [("model", result["model"], config["model"]), ("seed", result["seed"], config["seed"]),
                                 ("commit", result["commit"], where["commit"]),
                                 ("steps", result["steps"], config["max_iters"]),
                                 ("tokens", result["tokens"], config["max_iters"] * config["batch_tokens"])]:
            if got != wanted:
                raise BadRecord(f"result.json and config.json disagree: {key} {got} and {wanted}")
        for key, name in [("model", "model"), ("context", "block_size"), ("learning_rate", "learning_rate"), ("seed", "seed"),
                          ("steps", "max_iters")]:
            if key in at and at[key] != config[name]:
                raise BadRecord(f"another run's records: {name} is {config[name]}, the plan says {at[key]}")
        given = dict(a[2:].split("=", 1) for a in at.get("argv", ()) if a.startswith("--") and "=" in a)  # the later one wins
        for key, text in given.items():
            if key in config and key not in WORKED_OUT and not means(text, config[key]):
                raise BadRecord(f"another run's records: {key} is {config[key]}, the plan says {text}")
        stretches = record.get("code_versions", [])  # absent in old records
        if len(set(stretches)) > 1:
            raise BadRecord(f"its code changed while it was down: {', then '.join(stretches)}")
        if Path(config["out_dir"]).name != folder.name:
            raise BadRecord(f"another run's records: they were written to {Path(config['out_dir']).name}")
        if any(not isinstance(tokens, int) or tokens < 1 for tokens, _ in curve):
            raise BadRecord("log.jsonl is damaged (tokens that are no number)")
        if not curve or curve[-1] != (result["tokens"], result["val_loss"]):
            raise BadRecord("log.jsonl does not end with the loss in result.json")
        splits, on_cpu = record["data"]["splits"], result["device_name"] == "cpu"
        return Run(name=folder.name, folder=folder, model=config["model"], size=at.get("size", ""), context=config["block_size"],
                   tokens=result["tokens"], learning_rate=config["learning_rate"], seed=config["seed"],
                   parameters=result["parameters"], embedding=derived["parameters"]["embedding"], flops=result["flops"],
                   seconds=result["seconds"], loss=result["val_loss"], bits_per_byte=result.get("val_bits_per_byte"),
                   curve=curve, device=where["cpu"] if on_cpu else result["device_name"], processes=result["processes"],
                   commit=version(where), data=f"{splits['train']['sha256']} {splits['val']['sha256']}", config=config,
                   result=result, environment=where, at=at)
    except (KeyError, TypeError, AttributeError) as error:
        raise BadRecord(f"its records lack {error}") from None


def read_runs(folder):
    """(runs, left_out) of a sweep: [Run] that may be compared, and {name: why} of every other cell in its plan.

    Runs of another commit, other data or other common settings than most are left out, never averaged in. Raises
    ConfigError where there is no plan.
    """
    runs, left_out = [], {}
    for name, at in read_plan(folder)["cells"].items():
        try:
            runs.append(read_run(Path(folder) / name, at))
        except BadRecord as reason:
            left_out[name] = str(reason)

    def sides(run):
        return {"commit": run.commit, "data": run.data, "validation tokens": run.result["val_tokens"],
                **{key: run.config.get(key) for key in SAME_IN_A_SWEEP}}

    if runs:
        kinds = Counter(json.dumps(sides(r)) for r in runs)
        most = json.loads(kinds.most_common(1)[0][0])
        for run in runs:
            other = [f"{key} {value} where most have {most[key]}" for key, value in sides(run).items() if value != most[key]]
            if other:
                left_out[run.name] = "not comparable: " + ", ".join(other)
        runs = [r for r in runs if r.name not in left_out]
    return runs, left_out


# ---------------------------------------------------------------------------------------------------------- command line

def numbers(kind, least=None):
    """A parser of numbers joined by commas, each above 0, or at least `least`."""
    def parse(text):
        try:
            values = tuple(kind(float(v)) if kind is int else kind(v) for v in text.split(","))
        except (ValueError, OverflowError):
            raise argparse.ArgumentTypeError(f"{text!r}: numbers are expected, joined by commas") from None
        if len(set(values)) != len(values) or any(v <= 0 if least is None else v < least for v in values):
            limit = "above 0" if least is None else f"{least} or more"
            raise argparse.ArgumentTypeError(f"{text!r}: each number once, and {limit}")
        return values
    return parse


def names(text):
    return tuple(dict.fromkeys(n for n in text.split(",") if n))


def hours(seconds):
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:,.1f} h"


def run_or_report(prog, args, extra, run, write, sets, see):
    """The main of a sweep's script: its exit code. `run(args, extra)` gets settings for every run as `extra`.

    Args: write(folder, out) draws the report and returns its files; sets: keys that the sweep itself gives each run, and `see`
    the options for them.
    """
    with main_error(prog):
        if args.command == "report":
            if extra:
                raise ConfigError(f"unknown option {extra[0]}: --help lists them")
            need_pictures()
            return say_written(write(args.folder, args.out))
        for e in extra:
            if not e.startswith("--") or "=" not in e:
                raise ConfigError(f"unknown argument {e}: settings of a run are given as --key=value")
            if e[2:].split("=")[0] in sets:
                raise ConfigError(f"{e}: the sweep sets that; see {see}")
        need_pictures()
        if args.jobs < 0:
            raise ConfigError(f"--jobs={args.jobs}: 0 or more")
        try:
            return run(args, extra)
        except KeyboardInterrupt as stopped:
            raise ConfigError(f"stopped: {stopped or 'the same command goes on'}") from None


def need_pictures():
    """Raises ConfigError where a report could not be drawn: not after hours of runs."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("reports are drawn with matplotlib, which is not installed: pip install matplotlib")


def say_written(paths):
    for path in paths.values():
        print(f"wrote {path}")
    return 0


def say_failed(failed, cells):
    """The failures, last of all that a sweep says; its exit code."""
    for name, why in failed.items():
        print(f"FAILED {name}: {why}")
    if failed:
        print(f"{len(failed)} of {len(cells)} runs failed: holes in the report; the same command tries them again")
    return 1 if failed else 0
