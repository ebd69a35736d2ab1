"""Many training runs as one job: plan them, submit them, wait, report.

A sweep is a folder with a plan and a folder per cell, where a cell is one run:

    out/scaling_laptop/plan.json     every cell: its name, what it stands for, its arguments
    out/scaling_laptop/<cell>/       the records that train.py writes (runtime/records.py)
    out/scaling_laptop/<cell>.txt    what it printed

One process drives a sweep: it plans, submits, waits and reports. The cells run on this machine, under Slurm or on Ray
(engines.py). A cell is finished once its result.json exists, which its process renames into place as its last act.
There is no other list of finished cells. So after any kill the same command resumes the cells from their checkpoints,
and later commands add to the plan. experiments/sweep.py plans runs, experiments/records.py reads them; recall, images
and extrapolation use this module too.
"""

import contextlib
import math
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from tqdm import tqdm

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from common.errors import ConfigError, printable  # noqa: E402
from common.files import append, lock_folder  # noqa: E402
from experiments.sweeps.engines import cluster_options, cores, open_engine  # noqa: E402
from runtime.records import BadRecord, changed_files, fields, is_finished, read_json, write_json  # noqa: E402

# Settings that may differ between two runs of one cell without changing its result; some exist in older records only.
WITHOUT_EFFECT = {"micro_batch_size", "batch_size", "eval_batch_size", "eval_interval", "log_interval",
                  "checkpoint_interval", "keep_steps", "branch", "wandb", "wandb_project", "wandb_group"}


@dataclass
class Cell:
    """One run.

    name: its folder; argv: its script's arguments; at: its coordinates (model, size, seed ...); seconds: an estimate;
    after: name of the cell that has to end first; root: another checkout, whose script is run.
    """

    name: str
    argv: list
    at: dict = field(default_factory=dict)
    seconds: float = 0.0
    after: str = ""
    root: Path = None

    def command(self, folder, nproc=1, script="train.py"):
        """Its command line, to be run at the top of the repository."""
        python = [sys.executable]
        if nproc > 1:
            python += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
        return [*python, str(self.root / script) if self.root else script, *self.argv,
                f"--out_dir={os.path.relpath(folder, REPO)}/{self.name}", "--resume=auto"]


# ----------------------------------------------------------------------------------------------------------------- plan

def write_plan(folder, cells, **about):
    """Add cells to folder/plan.json, and facts about the whole sweep (`about`); lists and dicts among them grow.

    A cell that has begun keeps the arguments it began with: cell.argv is set to them. Raises ConfigError if the new
    ones would give another result.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    old = read_plan(folder, new=True)
    for c in cells:
        if not (folder / c.name / "config.json").exists():
            continue
        began = old["cells"].get(c.name, {}).get("argv", c.argv)
        before, now = settings(began, WITHOUT_EFFECT), settings(c.argv, WITHOUT_EFFECT)
        if before != now:
            changed = sorted(f"{key}={value}" for key, value in before.items() ^ now.items())
            raise ConfigError(f"{c.name} in {folder} ran with other arguments ({', '.join(changed)}): "
                              "choose another --out")
        c.argv = began
    about["cells"] = {c.name: {**c.at, "argv": c.argv} for c in cells}
    for key, value in about.items():
        if isinstance(value, list):
            about[key] = list(dict.fromkeys([*old.get(key, ()), *value]))
        if isinstance(value, dict):
            about[key] = old.get(key, {}) | value
    write_json(folder / "plan.json", old | about)


def settings(argv, without=()):
    """{setting: text} of the --key=value in argv, the last if a key comes twice; config files under their own name."""
    values = dict(a[2:].split("=", 1) if a.startswith("--") and "=" in a else (a, "") for a in argv)
    return {key: text for key, text in values.items() if key not in without}


def read_plan(folder, new=False):
    """plan.json of a sweep; new: if there is none yet, one without cells. Raises ConfigError if it is missing or cannot
    be read."""
    path = Path(folder) / "plan.json"
    if not path.exists():
        if new:
            return {"cells": {}}
        raise ConfigError(f"{folder} holds no sweep (no plan.json): give the folder that `run` printed")
    try:
        with fields("it"):
            plan = read_json(path)
            texts = [plan.get(key, ()) for key in ("models", "commands", "uncommitted")]
            texts += plan.get("sizes", {}).values()
            for name, at in plan["cells"].items():
                texts.append(at.get("argv", ()))
                if ".." in Path(name).parts or Path(name).is_absolute():
                    raise BadRecord(f"{name} is not a cell of a sweep")
            for words in texts:
                "".join(words)  # a TypeError unless all are strings
            return plan
    except BadRecord as error:
        raise ConfigError(f"{path} cannot be read ({error}): delete it and run the same command, finished cells "
                          "stay") from None


def code_now():
    """The identity of the code that this checkout's runs import."""
    import train  # noqa: F401  # so that what it imports is known
    from runtime.records import code_identity

    return code_identity()


def uncommitted():
    """The uncommitted changes, as a diff, to files that this checkout's runs import; "" if there are none, or git
    fails."""
    files = code_now()["code_files"]

    def git(*args):
        with contextlib.suppress(OSError):
            return subprocess.run(["git", "-C", REPO, *args], capture_output=True, text=True, errors="replace").stdout
        return ""

    diff = git("diff", "HEAD", "--", *files)
    for name in git("ls-files", "-oz", "--", *files).split("\0")[:-1]:
        diff += git("diff", "--no-index", "/dev/null", name)
    return diff


def say_changed_code(folder, accepted=()):
    """Print a line if this checkout's code differs from that of the runs in `folder`; the sweep goes on all the same.
    Raises ConfigError if no run has a code in `accepted`, since the report would refuse it at the end."""
    now = code_now()
    changed = {}
    for name in read_plan(folder, new=True)["cells"]:
        with contextlib.suppress(BadRecord), fields():
            environment = read_json(Path(folder) / name / "config.json")["environment"]
            changed[environment["code"]] = ", ".join(changed_files(environment["code_files"], now["code_files"]))
    known = {*changed, now["code"]}
    if unknown := [version for version in accepted if version not in known]:
        raise ConfigError(f"--accept_code={unknown[0]}: the code is {', '.join(sorted(known))}")
    if changed and all(changed.values()):
        said = "; ".join(f"{version}: {paths}" for version, paths in changed.items())
        print(printable(f"the code has changed since the runs in {folder} ({said}); new runs have this code, and the "
                        "report compares them with the others only with --accept_code"))


# ------------------------------------------------------------------------------------------------------------------ run

@contextlib.contextmanager
def driver(args, folder, jobs, nproc=1, gpus=()):
    """`with driver(args, folder, jobs) as engine`: the engine for --cluster, while no other process drives the sweep.

    Raises ConfigError if another one does, or the cluster cannot be reached.
    """
    try:
        lock = lock_folder(folder)
    except BlockingIOError as error:
        raise ConfigError(f"{folder} is driven by {error.strerror}: wait for it or stop it; --cluster uses more "
                          "machines") from None
    with lock, contextlib.closing(open_engine(args.cluster, args.cluster_args, folder, jobs, nproc, gpus)) as engine:
        yield engine


def placement(args, nproc=1, per_gpu=1):
    """(cells at a time, 0: all; ids of this machine's GPUs; where the cells run, in words). Raises ConfigError."""
    cluster_options(args.cluster, args.cluster_args)  # refused before anything is planned
    if args.cluster:
        return args.jobs, (), args.cluster
    gpus = visible_gpus()
    where = f"{len(gpus)} GPU(s)" if gpus else f"{cores()} CPU core(s)"
    return args.jobs or (1 if nproc > 1 else len(gpus) * per_gpu or cores()), gpus, where


def run_cells(cells, folder, engine, script="train.py"):
    """Run every unfinished cell, engine.jobs at a time; return {name: reason} of those that failed.

    A cell that was interrupted resumes from its checkpoint. One that was killed, or lost its machine, is submitted
    again if it has saved since it was submitted. If a cell fails, the others go on, and a later call tries it again. On
    SIGINT or SIGTERM the cells save and stop, and KeyboardInterrupt is raised; a second signal kills them.
    """
    if all(is_finished(Path(folder) / c.name) for c in cells):
        return {}
    return Driver(cells, folder, engine, script).run()


def work(cells):
    """The estimated seconds that cells take; a cell without an estimate counts as one second."""
    return sum(c.seconds or 1.0 for c in cells)


class Driver:
    """Cells on their way through an engine: waiting, running, then finished or failed."""

    def __init__(self, cells, folder, engine, script):
        self.cells = cells
        self.folder = Path(folder)
        self.engine = engine
        self.script = script
        self.waiting = [c for c in cells if not is_finished(self.folder / c.name)]
        self.running = {}  # name: its job
        self.failed = {}  # name: reason
        self.signals = []  # the numbers of those that arrived
        self.wake = threading.Event()  # set by a signal
        self.printed = set()
        self.total = work(self.waiting)
        self.began = time.perf_counter()
        self.bar = tqdm(total=len(cells), disable=None, dynamic_ncols=True,
                        bar_format="{percentage:3.0f}% {bar} {postfix}")

    def run(self):
        handlers = {number: signal.signal(number, self.signalled) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self.adopt()
            stops = 0
            while self.running or self.waiting and not self.signals:
                self.submit()
                self.look()
                if len(self.signals) > stops:
                    stops = len(self.signals)
                    self.say("killing the runs" if stops > 1 else "stopping: runs save; a second signal kills them")
                    self.engine.stop(kill=stops > 1)
                self.bar.set_postfix_str(self.counts())
                self.wake.wait(self.engine.poll_seconds)
                self.wake.clear()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self.bar.close()
        if self.signals:
            raise KeyboardInterrupt(f"{len(self.waiting)} of {len(self.cells)} cells are left; the same command "
                                    "resumes")
        print(f"{len(self.cells) - len(self.failed)} of {len(self.cells)} cells are finished", flush=True)
        return self.failed

    def adopt(self):
        """Take over the jobs that an earlier driver submitted."""
        for name in self.engine.adopt([c.name for c in self.waiting], len(self.cells)):
            self.watch(next(c for c in self.waiting if c.name == name))
        at_once = "all at once" if self.engine.jobs == math.inf else f"{self.engine.jobs} at a time"
        before = f"; {len(self.running)} were submitted before" if self.running else ""
        self.say(f"{len(self.waiting) + len(self.running)} of {len(self.cells)} cells to run, {at_once}{before}; "
                 f"records in {self.folder}/")

    def submit(self):
        """Submit waiting cells until the engine is full, each after the cell that has to end before it."""
        for cell in list(self.waiting):
            if self.signals or len(self.running) >= self.engine.jobs:
                return
            if cell.after in self.running or cell.after in [c.name for c in self.waiting]:
                continue
            command = cell.command(self.folder, self.engine.nproc, self.script)
            with append(self.folder / f"{cell.name}.txt") as out:
                print("$", shlex.join(command), file=out)
            try:
                self.engine.start(cell.name, command)
            except ConfigError as error:
                if not self.running:
                    raise
                return self.say(f"no more can be submitted now: {error}")
            self.watch(cell)

    def watch(self, cell):
        self.waiting.remove(cell)
        self.running[cell.name] = SimpleNamespace(cell=cell, state="queued", began=time.time(),
                                                  saved=saved(self.folder, cell))

    def look(self):
        """Ask the engine what became of the running cells."""
        try:
            states = self.engine.look()
        except ConfigError as error:
            return self.say(f"{error}; asking again")
        for name, (state, retry) in states.items():
            job = self.running[name]
            if retry is not None:
                del self.running[name]
                self.end(job, state, retry)
            elif state != job.state:
                job.state = state
                job.began = time.time()
                if state not in ("queued", "running"):
                    self.say(f"waiting: {state}")

    def end(self, job, state, retry):
        """A cell has ended: it is finished, waits for another try, or has failed."""
        cell = job.cell
        seconds = time.time() - job.began
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.folder / cell.name)  # otherwise an NFS client may see no result for a minute
        if is_finished(self.folder / cell.name):
            result = read_json(self.folder / cell.name / "result.json")
            words = next((f"{key} {result[key]:.4f}" for key in ("accuracy", "val_loss") if result.get(key)), "done")
            self.say(f"{cell.name}: {words}, {seconds:.0f} s ({self.counts()})")
        elif self.signals:
            self.waiting.append(cell)
        elif retry and saved(self.folder, cell) != job.saved:
            self.waiting.insert(0, cell)
            self.say(f"{cell.name}: {state} after {seconds:.0f} s: it resumes from its checkpoint")
        else:
            self.failed[cell.name] = last_words(self.folder / f"{cell.name}.txt", state)
            self.say(f"{cell.name}: FAILED: {self.failed[cell.name]}")

    def counts(self):
        """How many cells are queued, running, done and failed, and the time left, in words."""
        running = sum(job.state == "running" for job in self.running.values())
        queued = len(self.waiting) + len(self.running) - running
        done = len(self.cells) - len(self.waiting) - len(self.running) - len(self.failed)
        self.bar.n = done
        text = f"{queued} queued, {running} running, {done} done, {len(self.failed)} failed"
        left = work(self.waiting) + work(job.cell for job in self.running.values())
        if left < self.total:
            seconds = (time.perf_counter() - self.began) * left / (self.total - left)
            text += f", about {hours(seconds)} left"
        return text

    def say(self, line):
        """Print a line once: a cluster may give the same answer time and again."""
        if line not in self.printed:
            self.printed.add(line)
            with tqdm.external_write_mode():
                print(printable(line), flush=True)

    def signalled(self, number, frame):
        self.signals.append(number)
        self.wake.set()


def saved(folder, cell):
    """When a cell last saved a checkpoint, which shows whether it has made progress."""
    return max((path.stat().st_mtime_ns for path in (folder / cell.name).glob("checkpoint*.safetensors")), default=0)


def visible_gpus():
    """Ids of the GPUs that PyTorch sees, as CUDA_VISIBLE_DEVICES names them. Raises ConfigError if it names others,
    too: CUDA stops at the first id that it does not know, and runs would fall back to the CPU."""
    import torch

    named, seen = os.environ.get("CUDA_VISIBLE_DEVICES", ""), torch.cuda.device_count()
    is_none = named.startswith(("-", "No")) or not torch.version.cuda and not seen
    ids = [] if is_none else named.split(",") if named else list(range(seen))
    if len(ids) != seen:
        raise ConfigError(f"of the GPUs {named} (CUDA_VISIBLE_DEVICES, --gpus) PyTorch sees {seen}: name those that "
                          "nvidia-smi lists")
    return ids


def last_words(path, state):
    """Why a cell failed: the last line that it printed, preferably an error, and how it ended (state)."""
    *_, last_try = f"\n{Path(path).read_text(errors='replace')}".split("\n$ ")  # each begins with its command
    lines = [line for line in last_try.splitlines()[1:]
             if line.strip(" =-\t") and not line.startswith("submitit INFO")]
    lines = [line for line in lines if "error:" in line] or lines
    said = textwrap.shorten(lines[-1], 400, placeholder=" ...") if lines else "it printed nothing"
    return f"{said} ({state}; all of it in {path})"


def hours(seconds):
    """A duration in words."""
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:,.1f} h"
