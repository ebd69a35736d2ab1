"""A run's records: what train.py writes, and what every table and figure is drawn from.

    out/<run>/config.json    the run as it ran: settings, derived values, command, versions, device, data; and every
                             version of the code that a part of the run was trained with
    out/<run>/log.jsonl      one JSON object per event, one per line, keys with their units
    out/<run>/result.json    the outcome, written only when the run finished
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
# Files that leave no trace in the numbers of a run: pictures, reports, scoring of tasks, and programs that start runs.
NO_TRACE = ("tools/loss_curve.py", "tests/", "bench/", "sample.py", "evaluate.py", "export.py", "evaluation/tasks.py",
            "evaluation/harness.py", "experiments/sweeps/", "experiments/scaling/", "experiments/recall/mqar.py",
            "experiments/recall/report.py", "experiments/vision/sweep.py", "experiments/vision/wrong_images.py",
            "experiments/extrapolation.py", "experiments/online_learning.py")
NATIVE_SOURCES = ("longhorn_scan.cu", "kernels/conv_norm.cu", "kernels/lanes.h")


def write_json(path, record):
    """Write `record` to `path`, beside and renamed over, so that a reader sees all of it or none.

    A number at the top level that is not finite becomes null. Raises TypeError for what JSON cannot hold, OSError where
    the disk refuses; then the old file is untouched.
    """
    with replacing(path) as tmp:
        Path(tmp).write_text(json.dumps(_finite(record), indent=1) + "\n")


class BadRecord(ConfigError):
    """A record that cannot be used; the message says why."""


def read_json(path):
    """The table in a JSON file. Raises BadRecord. So, and inside `fields`, is every record read."""
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
    """result.json and config.json of a run, as dicts. Raises BadRecord where it is not finished, or one is damaged."""
    if not os.path.lexists(Path(folder) / "result.json"):
        events = read_log(folder)
        raise BadRecord(f"not finished (step {events[-1]['step']})" if events else "not run")
    return read_json(Path(folder) / "result.json"), read_json(Path(folder) / "config.json")


def is_finished(folder):
    """Whether a run has its result, undamaged; otherwise it is run again, from its last checkpoint."""
    with contextlib.suppress(BadRecord):
        read_json(Path(folder) / "result.json")
        return True
    return False


def lock_folder(folder, wait=0.0):
    """Make `folder`, lock it, and delete what a killed process left half written there. Whoever writes to one does so.

    Returns the lock, an open file: closing it or the end of the process, however it ends, unlocks. It lies in the
    folder, so two names of one folder have one lock, and says who has it. Raises BlockingIOError, whose strerror names
    the other process, where that still has it after `wait` seconds; and OSError.
    """
    os.makedirs(folder, exist_ok=True)
    no_link = lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    lock = open(os.path.join(folder, ".lock"), "a+", opener=no_link, errors="replace")
    began = time.monotonic()
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
    for leftover in glob.glob(pattern + ".tmp-[0-9]*"):  # of `replacing`, in a killed process
        os.unlink(leftover)


@contextlib.contextmanager
def replacing(path):
    """Yield the name of a file to write beside `path`: flushed to disk and renamed over it if the block ends well."""
    remove_leftovers(glob.escape(os.fspath(path)))
    tmp = f"{path}.tmp-{os.getpid()}"
    try:
        yield tmp
        with open(tmp, "rb+") as f:
            os.fsync(f.fileno())  # or a power cut after the rename leaves an empty file
        os.replace(tmp, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(tmp)  # after an error, or of two links to one file, which replace() leaves both
    sync_folder(os.path.dirname(path) or ".")


def sync_folder(folder):
    """Flush a folder to disk: only then is a rename in it durable. Some file systems cannot."""
    handle = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):
        os.fsync(handle)
    os.close(handle)


def run_files(folder):
    """The files of a run that are in `folder`: what is moved aside where another begins there."""
    return [path for path in Path(folder).glob("*") if re.fullmatch(
        r"(config|result)\.json|log\.jsonl|loss\.png|wandb|(best|checkpoint(-\d+)?)\.safetensors", path.name)]


def move_aside(folder, begin=True):
    """Move the files of an earlier run into a folder earlier-1, earlier-2 ... of `folder`, and return that.

    begin=False completes a move that a kill interrupted; what is left until then is no run (checkpoint.candidates).
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
    """The events of a run's log.jsonl, as dicts in order; with `event`, of that kind only. A torn last line is left
    out, and where a disk has damaged an earlier one, all from there on."""
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
    """Appends events to log.jsonl; opened at `step`, it first drops what a run that was killed logged beyond it.

    `unwritten` holds the lines that the disk refused, being full, say: the next write tries them again, in order.
    """

    def __init__(self, folder, step=0):
        self.path = Path(folder) / "log.jsonl"
        kept = [e for e in read_log(folder) if e["step"] <= step] if step else []
        with replacing(self.path) as tmp:
            Path(tmp).write_text("".join(json.dumps(e) + "\n" for e in kept))
        self.file = open(self.path, "ab", buffering=0)
        self.unwritten = []

    def write(self, event, step, **values):
        """One line: the event, its step, and values; numbers that are not finite become null, which JSON can hold.

        Raises OSError where the disk refuses it; the line is then in `unwritten`, and none in the file is torn.
        """
        record = _finite({"event": event, "step": step, **values})
        self.unwritten.append(json.dumps(record).encode() + b"\n")
        self.flush()
        return record

    def sync(self):
        """See what is written to the disk: no checkpoint is to be there before the log that leads to it."""
        with contextlib.suppress(OSError):
            os.fsync(self.file.fileno())

    def flush(self):
        """Write what is unwritten. Raises as `write` does."""
        while self.unwritten:
            end = os.fstat(self.file.fileno()).st_size
            try:
                if self.file.write(self.unwritten[0]) < len(self.unwritten[0]):  # what was left on the disk
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.ftruncate(self.file.fileno(), end)
                raise
            del self.unwritten[0]


def code_identity():
    """What code this process runs: {"code": "v2" and 10 hex digits, "code_files": {path: 12 hex digits}}.

    By content: every file of the project that is loaded by now, wherever it is imported, a user's file too, and the
    native sources; except NO_TRACE and empty files. So a comment in the README, another picture, or another commit of
    the same sources is the same code; an edited mixer is not.
    """
    root = Path(__file__).resolve().parents[1]
    loaded = [Path(m.__file__).resolve() for m in list(sys.modules.values()) if getattr(m, "__file__", None)]
    paths = {path.relative_to(root) for path in loaded  # PyTorch has modules whose file does not exist
             if path.suffix == ".py" and path.is_relative_to(root) and path.exists()}
    names = sorted(path.as_posix() for path in paths | set(map(Path, NATIVE_SOURCES))
                   if not path.parts[0].startswith("."))  # not .venv
    contents = {name: (root / name).read_bytes() for name in names if not name.startswith(NO_TRACE)}
    files = {name: hashlib.sha256(content).hexdigest()[:12] for name, content in contents.items() if content}
    return {"code": "v2" + hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:10],
            "code_files": files}


def mixed_identities(codes):
    """A line for a report over runs of these codes, where some of them are of before November 2026; else None."""
    codes = set(codes)
    older = sorted(code for code in codes if not code.startswith("v2"))
    if not older or len(older) == len(codes):
        return None
    return (f"The code of {', '.join(older)} was identified as before November 2026, by other files: it cannot be told "
            "whether it differs from the others'.")


def code_version():
    """{"commit": of this checkout, "uncommitted_changes"}; each None where git does not know. $LONGHORN_COMMIT names
    the commit of a copy without .git. Changes in results/, which a measurement writes, do not count."""
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
    """Code, commit, versions, machine and command of this process, for config.json."""
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
