"""A run's records: train.py writes them, and every table and figure is made from them.

    out/<run>/config.json    settings, derived values, command, versions, device, data, and every version of the code
                             that trained a part of the run
    out/<run>/log.jsonl      one JSON object per event and line, keys with units
    out/<run>/result.json    the outcome, written only when the run has finished
    out/<run>/loss.png       the loss curve, see tools/loss_curve.py

A killed process can leave a half-written last line in log.jsonl. Readers drop it, and a resumed run cuts the log back
to its checkpoint, so that the log reads as if nothing had happened.
"""

import contextlib
import errno
import glob
import hashlib
import itertools
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from runtime.errors import ConfigError, regular

MOVING = "earlier-being-moved"  # see move_aside
# Files that do not affect a run's numbers: plots, reports, task evaluation, and programs that start runs.
NO_TRACE = ("tools/loss_curve.py", "tests/", "bench/", "sample.py", "evaluate.py", "export.py", "evaluation/tasks.py",
            "evaluation/harness.py", "experiments/records.py", "experiments/pages.py", "experiments/sweeps/",
            "experiments/scaling/", "experiments/recall/mqar.py", "experiments/recall/report.py",
            "experiments/vision/sweep.py", "experiments/vision/report.py", "experiments/vision/wrong_images.py",
            "experiments/extrapolation.py", "experiments/online_learning.py")
NATIVE_SOURCES = ("longhorn_scan.cu", "kernels/conv_norm.cu", "kernels/lanes.h")


def write_json(path, record):
    """Write `record` to `path` through a temporary file and a rename, so that a reader sees all of it or none.

    Non-finite numbers at the top level become null. Raises TypeError for values that JSON cannot hold, OSError if the
    disk refuses; then the old file is untouched.
    """
    with replacing(path) as tmp:
        Path(tmp).write_text(json.dumps(_finite(record), indent=1) + "\n")


class BadRecord(ConfigError):
    """A record that cannot be used; the message says why."""


def read_json(path):
    """The dict in a JSON file. Raises BadRecord. Every record is read by this function, and used inside `fields`."""
    name = os.path.basename(path)
    try:
        return {**json.loads(regular(path).read_bytes())}
    except FileNotFoundError:
        raise BadRecord(f"no {name}") from None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise BadRecord(f"{name} is damaged ({error})") from None


@contextlib.contextmanager
def fields(subject="its records"):
    """`with fields(): record["config"]["seed"] + 1`: a missing key, or a value of another type, raises BadRecord."""
    try:
        yield
    except ConfigError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise BadRecord(f"{subject} {'lack' if isinstance(error, KeyError) else 'are damaged:'} {error}") from None


def finished_records(folder):
    """A run's result.json and config.json, as dicts. Raises BadRecord if the run is not finished or one is damaged."""
    if not os.path.lexists(Path(folder) / "result.json"):
        events = read_log(folder)
        raise BadRecord(f"not finished (step {events[-1]['step']})" if events else "not run")
    return read_json(Path(folder) / "result.json"), read_json(Path(folder) / "config.json")


def is_finished(folder):
    """True if a run has an undamaged result; otherwise it is to be run again, from its last checkpoint."""
    with contextlib.suppress(BadRecord):
        read_json(Path(folder) / "result.json")
        return True
    return False


def lock_folder(folder, wait=0.0):
    """Create `folder`, lock it, and delete files that a killed process left half written. Call this before writing.

    Returns the lock, an open file: closing it, or the end of the process in any way, unlocks. The lock is in the
    folder, so two paths to the same folder share it. It contains "process PID on HOST". Raises BlockingIOError, with
    that text as its strerror, if another process still holds it after `wait` seconds, and OSError.
    """
    os.makedirs(folder, exist_ok=True)
    no_link = lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    lock = open(os.path.join(folder, ".lock"), "a+", opener=no_link, errors="replace")
    began, is_waiting = time.monotonic(), False
    try:
        import fcntl  # not on Windows

        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                lock.seek(0)
                holder = lock.read(200) or "another process"
                if time.monotonic() >= began + wait:
                    raise BlockingIOError(errno.EWOULDBLOCK, holder, os.fspath(folder)) from None
            if not is_waiting:
                print(f"{folder} is in use by {holder}: waiting up to {wait:.0f} s for it to end", flush=True)
            is_waiting = True
            time.sleep(0.1)
        for kind in ("safetensors", "json", "jsonl", "bin"):
            remove_leftovers(os.path.join(glob.escape(os.fspath(folder)), f"*.{kind}"))
        with contextlib.suppress(OSError):  # a full disk
            os.truncate(lock.fileno(), 0)
            os.write(lock.fileno(), f"process {os.getpid()} on {platform.node()}".encode())
    except BlockingIOError:
        raise
    except (ImportError, OSError) as error:  # some network file systems have no locks
        why = getattr(error, "strerror", None) or error
        print(f"{folder} cannot be locked ({why}): make sure that nothing else writes there", flush=True)
    return lock


def remove_leftovers(pattern):
    for leftover in glob.glob(pattern + ".tmp-[0-9]*"):  # left by `replacing` in a killed process
        os.unlink(leftover)


@contextlib.contextmanager
def replacing(path):
    """Yields a temporary name next to `path`; if the block succeeds, that file is flushed and renamed to `path`."""
    remove_leftovers(glob.escape(os.fspath(path)))
    tmp = f"{path}.tmp-{os.getpid()}"
    try:
        yield tmp
        with open(tmp, "rb+") as f:
            os.fsync(f.fileno())  # or a power cut after the rename leaves an empty file
        os.replace(tmp, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(tmp)  # after an error, or if tmp and path were links to one file, which replace() keeps
    sync_folder(os.path.dirname(path) or ".")


def sync_folder(folder):
    """Flush a folder to disk, which makes renames in it durable. Some file systems cannot."""
    handle = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):
        os.fsync(handle)
    os.close(handle)


def run_files(folder):
    """The paths of a run's files in `folder`, which are moved aside when a new run starts there."""
    return [path for path in Path(folder).glob("*") if re.fullmatch(
        r"(config|result)\.json|log\.jsonl|loss\.png|wandb|(best|checkpoint(-\d+)?)\.safetensors", path.name)]


def move_aside(folder, begin=True):
    """Move an earlier run's files in `folder` into its subfolder earlier-1, earlier-2 ..., and return that.

    begin=False finishes a move that a kill interrupted, and returns None if there is none. Until then the remaining
    files do not count as a run (checkpoint.candidates).
    """
    moving = Path(folder, MOVING)
    if begin:
        moving.mkdir(exist_ok=True)
    elif not moving.is_dir():
        return None
    for path in run_files(folder):
        os.rename(path, moving / path.name)
    kept = next(name for n in itertools.count(1) if not (name := Path(folder, f"earlier-{n}")).exists())
    return moving.rename(kept)


def _finite(record):
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def read_log(folder, event=None):
    """The events in a run's log.jsonl, as dicts in order; with `event`, only that kind. Reading stops at the first
    damaged line, usually a torn last one."""
    path = Path(folder) / "log.jsonl"
    events = []
    for line in regular(path).read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            break
        events.append(record)
    return [e for e in events if event in (None, e.get("event"))]


class Log:
    """Appends events to log.jsonl. Opening it at `step` first drops events that a killed run logged after that step.

    `unwritten` holds lines that the disk refused, for example because it is full: the next write retries them in order.
    """

    def __init__(self, folder, step=0):
        self.path = Path(folder) / "log.jsonl"
        kept = [e for e in read_log(folder) if e["step"] <= step] if step else []
        with replacing(self.path) as tmp:
            Path(tmp).write_text("".join(json.dumps(e) + "\n" for e in kept))
        self.file = open(self.path, "ab", buffering=0)
        self.unwritten = []

    def write(self, event, step, **values):
        """Append a line with the event, its step and values; non-finite numbers become null, which JSON can hold.

        Raises OSError if the disk refuses it; the line is then kept in `unwritten`, and no line in the file is torn.
        """
        record = _finite({"event": event, "step": step, **values})
        self.unwritten.append(json.dumps(record).encode() + b"\n")
        self.flush()
        return record

    def sync(self):
        """Flush the file to disk: no checkpoint may be there before the log that leads to it."""
        with contextlib.suppress(OSError):
            os.fsync(self.file.fileno())

    def flush(self):
        """Write the unwritten lines. Raises OSError like `write`."""
        while self.unwritten:
            end = os.fstat(self.file.fileno()).st_size
            try:
                if self.file.write(self.unwritten[0]) < len(self.unwritten[0]):  # the disk had room for a part only
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.ftruncate(self.file.fileno(), end)
                raise
            del self.unwritten[0]


def code_identity():
    """The code that this process runs: {"code": "v2" and 10 hex digits, "code_files": {path: 12 hex digits}}.

    It hashes the content of every project file that is loaded by now, wherever it was imported, also a user's own, and
    the native sources, except NO_TRACE and empty files. An edited README or plot, or another commit with the same
    sources, keeps the identity; an edited mixer changes it.
    """
    root = Path(__file__).resolve().parents[1]
    loaded = [Path(m.__file__).resolve() for m in list(sys.modules.values()) if getattr(m, "__file__", None)]
    paths = {path.relative_to(root) for path in loaded  # some of PyTorch's modules name files that do not exist
             if path.suffix == ".py" and path.is_relative_to(root) and path.exists()}
    names = sorted(path.as_posix() for path in paths | set(map(Path, NATIVE_SOURCES))
                   if not path.parts[0].startswith("."))  # not .venv
    contents = {name: (root / name).read_bytes() for name in names if not name.startswith(NO_TRACE)}
    files = {name: hashlib.sha256(content).hexdigest()[:12] for name, content in contents.items() if content}
    return {"code": "v2" + hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:10],
            "code_files": files}


def mixed_identities(codes):
    """A line for a report on runs whose codes mix identities from before November 2026 with later ones; else None."""
    codes = set(codes)
    older = sorted(code for code in codes if not code.startswith("v2"))
    if not older or len(older) == len(codes):
        return None
    return (f"The code of {', '.join(older)} was hashed as before November 2026, over a different list of files: "
            "whether it differs from the others' cannot be told.")


def code_version():
    """{"commit": of this checkout, "uncommitted_changes"}; None if git does not know. $LONGHORN_COMMIT names the commit
    of a copy without .git. Changes in results/, where measurements are written, do not count."""
    folder = Path(__file__).resolve().parents[1]

    def git(*args):
        run = subprocess.run(["git", "-C", str(folder), *args], capture_output=True, text=True)
        return run.stdout.strip() if run.returncode == 0 else None

    try:
        commit, changed = git("rev-parse", "HEAD"), git("status", "--porcelain", "--", ".", ":(exclude)results")
    except OSError:  # no git
        commit = changed = None
    return {"commit": commit or os.environ.get("LONGHORN_COMMIT"),
            "uncommitted_changes": None if changed is None else bool(changed)}


def environment():
    """This process's code, commit, versions, machine and command, for config.json."""
    import torch

    return {**code_identity(), **code_version(),
            "command": shlex.join([Path(sys.executable).name, *sys.argv]), "python": platform.python_version(),
            "torch": torch.__version__, "system": platform.platform(), "cpu": cpu_model(), "cores": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "cuda": torch.version.cuda if torch.cuda.is_available() else None}


def cpu_model():
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
