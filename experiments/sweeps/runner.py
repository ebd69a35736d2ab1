"""Many training runs as one job: start them, watch them, resume after any kill.

A sweep is a folder with a plan and a folder per cell, where a cell is one run:

    out/scaling_laptop/plan.json     every cell: its name, what it stands for, its arguments
    out/scaling_laptop/<cell>/       the records that train.py writes (runtime/records.py)
    out/scaling_laptop/<cell>.txt    what it printed

Processes on any machines that see this folder share the sweep by claims on its cells (claims.py). No list is kept of
what is done: a cell is finished when its result.json exists, and its process renames that file into place as its last
act. So whatever was killed, the same command resumes the cells from their checkpoints, and later ones add to the plan.
sweep.py plans runs and runs.py reads them back; recall, images and extrapolation use this module too.
"""

import argparse
import contextlib
import ctypes
import functools
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from experiments.sweeps import claims  # noqa: E402
from runtime.errors import ConfigError, main_error  # noqa: E402
from runtime.records import BadRecord, changed_files, fields, is_finished, read_json, write_json  # noqa: E402

# Settings that may differ between two runs of one cell without changing its result; some exist in older records only.
WITHOUT_EFFECT = {"micro_batch_size", "batch_size", "eval_batch_size", "eval_interval", "log_interval",
                  "checkpoint_interval", "keep_steps", "branch", "wandb", "wandb_project", "wandb_group"}


@dataclass
class Cell:
    """One run.

    name: its folder; argv: its script's arguments; at: its coordinates (model, size, seed ...); seconds: an estimate;
    after: name of the cell that has to end before.
    """

    name: str
    argv: list
    at: dict = field(default_factory=dict)
    seconds: float = 0.0
    after: str = ""

    def command(self, folder, nproc=1, script="train.py"):
        """Its command line, to be run at the top of the repository."""
        python = [sys.executable]
        if nproc > 1:
            python += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}", *shutdown_timeout()]
        return [*python, script, *self.argv, f"--out_dir={os.path.relpath(folder, REPO)}/{self.name}", "--resume=auto"]


@functools.cache
def shutdown_timeout():
    """torchrun's option that gives a worker more than 30 s to save when it is asked to stop; older versions lack it."""
    from torch.distributed.run import get_args_parser

    return ("--shutdown-timeout=300",) if "--shutdown-timeout" in get_args_parser().format_help() else ()


# ----------------------------------------------------------------------------------------------------------------- plan

def write_plan(folder, cells, **about):
    """Add cells to folder/plan.json, and what is true of the whole sweep (`about`); one process at a time.

    A cell that has begun keeps the arguments it began with (cell.argv is set to them). Raises ConfigError where the new
    ones would give another result.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with claims.Claims(folder).hold("plan.json"):
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
        new = {c.name: {**c.at, "argv": c.argv} for c in cells}
        write_json(folder / "plan.json", {**old, **about, "cells": {**old["cells"], **new}})


def settings(argv, without=()):
    """{setting: text} of the --key=value in argv, the later one of two; config files under their own name."""
    values = dict(a[2:].split("=", 1) if a.startswith("--") and "=" in a else (a, "") for a in argv)
    return {key: text for key, text in values.items() if key not in without}


def read_plan(folder, new=False):
    """plan.json of a sweep; new: one without cells where there is none yet. Raises ConfigError where it is missing, or
    cannot be read."""
    path = Path(folder) / "plan.json"
    if not path.exists():
        if new:
            return {"cells": {}}
        raise ConfigError(f"{folder} holds no sweep (no plan.json): give the folder that `run` printed")
    try:
        with fields("it"):
            plan = read_json(path)
            for name, at in plan["cells"].items():
                if not isinstance(at, dict) or ".." in Path(name).parts or Path(name).is_absolute():
                    raise BadRecord(f"{name} is no cell of a sweep")
            return plan
    except BadRecord as error:
        raise ConfigError(f"{path} cannot be read ({error}): delete it and run the same command, finished cells "
                          "stay") from None


def code_of(record):
    """The identity of the code in a result.json or a config.json's environment: a hash of the content of what training
    imported. Records of older versions have a commit instead."""
    return record.get("code") or str(record.get("commit"))[:12]


def say_changed_code(folder):
    """Print a line if this checkout's code is not that of the runs in `folder`; the sweep goes on all the same."""
    import train  # noqa: F401  # so that what it imports is known
    from runtime.records import code_identity

    now, changed = code_identity()["code_files"], {}
    for name in read_plan(folder, new=True)["cells"]:
        with contextlib.suppress(BadRecord), fields():
            environment = read_json(Path(folder) / name / "config.json")["environment"]
            changed[environment["code"]] = ", ".join(changed_files(environment["code_files"], now))
    if changed and all(changed.values()):
        said = "; ".join(f"{code}: {paths}" for code, paths in changed.items())
        print(f"the code has changed since the runs in {folder} ({said}); new runs have this code, and the report "
              "compares them with the others only with --accept_code")


# ------------------------------------------------------------------------------------------------------------------ run

def run_cells(cells, folder, jobs=0, nproc=1, script="train.py", gpus=None):
    """Run every unfinished cell in its own process, `jobs` at a time; return {name: why} of those that failed.

    A cell that was interrupted resumes from its checkpoint. Other processes may run this function on the same folder,
    also on other machines: each cell is run by one of them (claims.py), and all of them return when none is left. A
    failure does not stop the others. It is not tried again by those at work, only by a later call. SIGINT or SIGTERM
    ask the running cells to save and stop, and raise KeyboardInterrupt when they have. A second of either kills them.

    Args:
        cells: [Cell]; folder: of the sweep; nproc: processes per cell, by torchrun.
        jobs: cells at a time; 0: one per GPU (with nproc > 1: one in all), and without a GPU one per core.
        gpus: ids, for CUDA_VISIBLE_DEVICES; None: those PyTorch sees. Several jobs may share one.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    waiting = [c for c in cells if not is_finished(folder / c.name)]
    if not waiting:
        return {}
    gpus = visible_gpus() if gpus is None else gpus
    jobs = jobs or (1 if nproc > 1 else len(gpus) or cores())
    threads = max(1, cores() // min(jobs, len(waiting)) // nproc)
    taken = claims.Claims(folder)
    earlier = {name: seen.number for name, seen in taken.look().items() if "failed" in seen.note}
    running, failed, signals = {}, {}, []  # running: {slot: cell, process, claim, when it began, whether it is lost}

    def stop(number, frame):
        signals.append(number)
        for job in running.values():
            stop_group(job.process.pid, signal.SIGTERM if len(signals) == 1 else signal.SIGKILL)

    def start(cell, claim):
        slot = next(s for s in range(jobs) if s not in running)
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        if gpus:
            devices = dict.fromkeys(gpus[(slot * nproc + i) % len(gpus)] for i in range(nproc))
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        else:
            env.setdefault("OMP_NUM_THREADS", str(threads))
        command = cell.command(folder, nproc, script)
        with open(folder / f"{cell.name}.txt", "a") as out:
            print("$", shlex.join(command), file=out, flush=True)
            process = subprocess.Popen(command, cwd=REPO, env=env, stdout=out, stderr=subprocess.STDOUT,
                                       stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=(claim.handle,),
                                       preexec_fn=functools.partial(stop_with_parent, os.getpid()))
        running[slot] = SimpleNamespace(cell=cell, claim=claim, process=process, began=time.time(), is_lost=False)
        if signals:  # one came while the process started
            stop_group(process.pid, signal.SIGTERM)

    def take_cells():
        """Start free cells while there are slots; drop those that other processes have ended."""
        seen = taken.look()
        for cell in list(waiting):
            if signals or len(running) == jobs:
                return
            other, ahead = seen.get(cell.name), {c.name for c in (*waiting, *(job.cell for job in running.values()))}
            if other and "failed" in other.note and other.number > earlier.get(cell.name, 0):
                failed[cell.name] = other.note["failed"]
                waiting.remove(cell)
            elif cell.after not in ahead and (claim := taken.take(cell.name)):
                waiting.remove(cell)
                with contextlib.suppress(FileNotFoundError):
                    os.utime(folder / cell.name)  # or an NFS client may believe for a minute that there is no result
                if is_finished(folder / cell.name):  # another ended it after we looked
                    claim.delete()
                else:
                    start(cell, claim)

    def end(job):
        """Say how a cell's process ended, and let go of the claim."""
        cell = job.cell
        if is_finished(folder / cell.name):
            job.claim.delete()
            left = work(waiting) + work(j.cell for j in running.values())
            left *= (time.perf_counter() - began) / (total - left)
            done = len(cells) - len(waiting) - len(running) - len(failed)
            result = read_json(folder / cell.name / "result.json")
            said = next((f"{key} {result[key]:.4f}" for key in ("accuracy", "val_loss") if result.get(key)), "done")
            print(f"{cell.name}: {said}, {time.time() - job.began:.0f} s ({done} of "
                  f"{len(cells)}, about {hours(left)} left)", flush=True)
        elif signals or job.is_lost:
            job.claim.leave(free=True)
            waiting.append(cell)
        else:
            failed[cell.name] = last_words(folder / f"{cell.name}.txt", job.process.returncode)
            job.claim.leave(failed=failed[cell.name])
            print(f"{cell.name}: FAILED: {failed[cell.name]}", flush=True)

    before = {s: signal.signal(s, stop) for s in (signal.SIGINT, signal.SIGTERM)}
    work = lambda some: sum(c.seconds or 1.0 for c in some)
    total, began, look_at, has_waited = work(waiting), time.perf_counter(), 0.0, False
    print(f"{len(waiting)} of {len(cells)} cells to run, {jobs} at a time; records in {folder}/", flush=True)
    try:
        while running or waiting and not signals:
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + claims.HEARTBEAT
                for job in running.values():
                    if not job.claim.touch() and not job.is_lost:
                        job.is_lost = True
                        stop_group(job.process.pid, signal.SIGKILL)
                take_cells()
                if waiting and not running and not signals and not has_waited:
                    has_waited = True
                    hosts = {seen.note.get("host", "?") for seen in taken.seen.values() if seen.is_held}
                    print(f"waiting for {len(waiting)} cells that others run ({', '.join(sorted(hosts))})", flush=True)
            time.sleep(0.2)
            for slot, job in list(running.items()):
                if job.process.poll() is not None:
                    del running[slot]
                    end(job)
                    look_at = 0.0
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
        for job in running.values():  # only after an error in this function
            stop_group(job.process.pid, signal.SIGTERM)
            os.close(job.claim.handle)  # the cell has the lock until it has saved
    if signals:
        raise KeyboardInterrupt(f"{len(waiting)} of {len(cells)} cells are left; the same command resumes")
    print(f"{len(cells) - len(failed)} of {len(cells)} cells are finished", flush=True)
    return failed


def visible_gpus():
    """Ids of the GPUs that PyTorch sees, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named and torch.cuda.is_available() else list(range(torch.cuda.device_count()))


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def stop_with_parent(parent):
    """In the child: receive SIGTERM when the sweep's process `parent` dies, however it dies (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
        if os.getppid() != parent:  # it died before that
            os._exit(1)


def stop_group(pid, number):
    """Send a signal to a cell's process group; SIGKILL also to its children's: torchrun gives them their own."""
    pids = [pid]
    if number == signal.SIGKILL:
        for path in Path(f"/proc/{pid}/task").glob("*/children"):  # Linux
            with contextlib.suppress(OSError):
                pids += map(int, path.read_text().split())
    for group in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


def last_words(path, code):
    """Why a cell failed: the last line it printed, an error's line first, and how it ended."""
    lines = [line.strip() for line in Path(path).read_text(errors="replace").splitlines() if line.strip(" =-\t")]
    began = max((i for i, line in enumerate(lines) if line.startswith("$ ")), default=0)
    lines = [line for line in lines[began:] if "error:" in line] or lines[began + 1:]
    how = f"signal {-code}" if code < 0 else f"exit {code}" if code else "stopped before its end"
    return f"{lines[-1][:240] if lines else 'it printed nothing'} ({how}; all of it in {path})"


# --------------------------------------------------------------------------------------------------------- command line

def numbers(kind, least=None):
    """A parser of numbers joined by commas, each above 0, or at least `least`."""
    def parse(text):
        with contextlib.suppress(ValueError, OverflowError):
            values = tuple(kind(float(v)) for v in text.split(","))
            if len(set(values)) == len(values) and all(v > 0 if least is None else v >= least for v in values):
                return values
        raise argparse.ArgumentTypeError(f"{text!r}: numbers are expected, joined by commas, each once and "
                                         + ("above 0" if least is None else f"{least} or more"))
    return parse


def names(text):
    """A parser of names joined by commas."""
    parts = tuple(dict.fromkeys(n for n in text.split(",") if n))
    if not parts:  # an empty shell variable is not a wish for the preset
        raise argparse.ArgumentTypeError("a name is expected, or names joined by commas")
    return parts


def hours(seconds):
    """A duration in words."""
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:,.1f} h"


def run_or_report(prog, args, extra, run, write, sets=(), see=""):
    """The main function of a sweep's script; returns its exit code. `run(args, extra)` gets the settings for every run.

    Args:
        write: write(folder, out) draws the report and returns {name: path} of its files.
        sets: settings that the sweep itself gives each run, which `extra` may not; see: the options for them.
    """
    with main_error(prog):
        for e in extra:
            if args.command == "report" or not e.startswith("--") or "=" not in e:
                raise ConfigError(f"unknown option {e}: see --help; settings of a run are given as --key=value")
            if e[2:].split("=")[0] in sets:
                raise ConfigError(f"{e}: the sweep sets that; see {see}")
        if args.command == "report":
            return say_written(write(args.folder, args.out))
        if args.jobs < 0:
            raise ConfigError(f"--jobs={args.jobs}: 0 or more")
        try:
            return run(args, extra)
        except KeyboardInterrupt as stopped:
            raise ConfigError(f"stopped: {stopped or 'the same command resumes'}") from None


def say_written(paths):
    for path in paths.values():
        print(f"wrote {path}")
    return 0


def say_failed(failed, cells):
    """Print the failures, last of all that a sweep prints; return its exit code."""
    for name, why in failed.items():
        print(f"FAILED {name}: {why}")
    if failed:
        print(f"{len(failed)} of {len(cells)} runs failed: holes in the report; the same command tries them again")
    return 1 if failed else 0
