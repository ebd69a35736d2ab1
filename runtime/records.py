"""A run's records: train.py writes them, and every table and figure is made from them.

    out/<run>/config.json    settings, derived values, command, versions, device, data, and every version of the code
                             that trained a part of the run
    out/<run>/log.jsonl      one JSON object per event and line, keys with units
    out/<run>/result.json    the outcome, written only when the run has finished
    out/<run>/loss.png       the loss curve, see runtime/loss_curve.py
    out/<run>/eval_tasks.json                                        written by evaluate.py

A killed process can leave a half-written last line in log.jsonl. Readers drop this line. A resumed run cuts the log
back to its checkpoint, so that the log reads as if nothing had happened. Other damaged lines are left out too; a
resumed run then keeps the old file as log-damaged-1.jsonl.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from types import ModuleType

from common.errors import ConfigError, regular
from common.files import replacing, write_text

MOVING = "earlier-being-moved"  # see move_aside
# Files that do not affect a run's numbers: plots, reports, task evaluation, programs that start runs.
NO_TRACE = tuple("""
    tests/ tools/ bench/ sample.py evaluate.py export.py evaluation/tasks.py evaluation/harness.py runtime/loss_curve.py
    experiments/sweep.py experiments/sweeps/ experiments/compare.py experiments/report.py experiments/fit.py
    experiments/figures.py experiments/records.py experiments/pages.py experiments/objectives.py
    experiments/extrapolation.py experiments/extrapolation_report.py experiments/recall/mqar.py
    experiments/recall/report.py experiments/vision/sweep.py experiments/vision/report.py
""".split())
ROOT = Path(__file__).resolve().parents[1]
NATIVE_SOURCES = sorted(path.relative_to(ROOT).as_posix() for folder in (ROOT, ROOT / "kernels")
                        for kind in ("*.cu", "*.h") for path in folder.glob(kind))
STANDARD_LIBRARY = os.path.dirname(os.__file__)
files_at_start = {}  # code_files at the start of `distributed.launch`, right after the imports


def write_json(path, record):
    """Write `record` to `path` through a temporary file and a rename, so that a reader sees all of it or none.

    Non-finite numbers at the top level become null. Raises TypeError for values that JSON cannot hold, OSError if the
    write fails. Either way, the old file is untouched.
    """
    write_text(path, json.dumps(_finite(record), indent=1) + "\n")


class BadRecord(ConfigError):
    """Raised for an unusable record; the message says why."""


def read_json(path):
    """Return the dict in a JSON file. Raises BadRecord. Read every record with this, and use it inside `fields`."""
    name = os.path.basename(path)
    try:
        text = regular(path).read_bytes()
        if b"\\ud" in text.lower():  # lone surrogates, from file names that are not UTF-8, become ?
            text = json.dumps(json.loads(text), ensure_ascii=False).encode(errors="replace")
        return {**json.loads(text)}
    except FileNotFoundError:
        raise BadRecord(f"no {name}") from None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise BadRecord(f"{name} is damaged ({error})") from None


@contextlib.contextmanager
def fields(subject="its records"):
    """`with fields(): record["config"]["seed"] + 1` raises BadRecord for a missing key or a value of another type."""
    try:
        yield
    except ConfigError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise BadRecord(f"{subject} {'lack' if isinstance(error, KeyError) else 'are damaged:'} {error}") from None


def is_finished(folder):
    """True if a run has an undamaged result. Otherwise it must be resumed from its last checkpoint."""
    with contextlib.suppress(BadRecord):
        read_json(Path(folder) / "result.json")
        return True
    return False


def run_files(folder):
    """Return the paths of a run's files in `folder`. A new run that starts there moves them aside."""
    names = (r"(config|result|eval_tasks(-[\w-]+)?)\.json|log(-damaged-\d+)?\.jsonl|loss\.png|wandb|"
             r"(best|checkpoint(-\d+)?)\.safetensors")
    return [path for path in Path(folder).glob("*") if re.fullmatch(names, path.name)]


def move_aside(folder):
    """Move an earlier run's files in `folder` into its subfolder earlier-1, earlier-2 ... Returns the subfolder."""
    moving = Path(folder, MOVING)
    if moving.is_symlink():  # may lead into somebody else's folder
        moving.unlink()
    moving.mkdir(exist_ok=True)
    return finish_moving(folder)


def finish_moving(folder):
    """Finish what `move_aside` began, even if it was killed. Returns the new folder, or None if there is nothing to
    finish. Until the move is finished, the remaining files do not count as a run (checkpoint.candidates)."""
    moving = Path(folder, MOVING)
    if moving.is_symlink() or not moving.is_dir():
        return None
    for path in run_files(folder):
        os.rename(path, moving / path.name)
    return moving.rename(_free(folder, "earlier-{}"))


def _free(folder, name):
    """Put 1, 2 ... in place of {} in `name`, and return the first path that does not exist."""
    for n in itertools.count(1):
        path = Path(folder, name.format(n))
        if not os.path.lexists(path):
            return path


def _finite(record):
    """Return the record with None in place of the non-finite numbers at its top level."""
    return {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in record.items()}


def read_log(folder, event=None):
    """Return the events in a run's log.jsonl as dicts, in order, without damaged lines. `event`: only this kind."""
    return [e for e in _read_lines(folder)[0] if event in (None, e.get("event"))]


def _read_lines(folder):
    """Return (the events in log.jsonl, the numbers of its damaged lines from 1, not counting a torn last line)."""
    path = Path(folder) / "log.jsonl"
    events = []
    damaged = []
    lines = regular(path).read_text(errors="replace").split("\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            event = None
        if isinstance(event, dict) and type(event.get("step")) is int:
            events.append(event)
        elif number < len(lines):  # the last line is empty, or torn by a kill
            damaged.append(number)
    return events, damaged


def log_until(folder, step, crc32=None):
    """Return ([the lines of log.jsonl up to `step`, as bytes], their CRC-32, what is wrong).

    What is wrong is a phrase about damaged lines or about a CRC-32 that differs from the checkpoint's, or "".
    """
    path = Path(folder) / "log.jsonl"
    events, damaged = _read_lines(folder)
    lines = [json.dumps(event).encode() for event in events if event["step"] <= step]
    actual = zlib.crc32(b"".join(lines))
    wrong = ""
    if damaged:
        wrong = f"{len(damaged)} lines of {path} are damaged (the first is line {damaged[0]}) and left out"
    elif crc32 not in (None, actual):
        wrong = f"{path} is not the log of this checkpoint: lines up to step {step} are missing or from another run"
    return lines, actual, wrong


class Log:
    """Appends events to log.jsonl. Opening it at `step` first drops events that a killed run logged after that step.

    `unwritten` holds lines that could not be written, for example to a full disk: the next write retries them in order.
    `crc32`: the checksum of all lines, for the checkpoint. `damage`: what `log_until` finds wrong, and where the old
    file is kept.
    """

    def __init__(self, folder, step=0, crc32=None):
        self.path = Path(folder) / "log.jsonl"
        lines, self.crc32, self.damage = log_until(folder, step, crc32) if step else ([], 0, "")
        if self.damage and self.path.exists():
            aside = _free(folder, "log-damaged-{}.jsonl")
            shutil.copyfile(self.path, aside)
            self.damage += f": the old file is kept as {aside}"
        with replacing(self.path) as tmp:
            Path(tmp).write_bytes(b"".join(line + b"\n" for line in lines))
        self.file = open(self.path, "ab", buffering=0)
        self.unwritten = []

    def write(self, event, step, **values):
        """Append a line with the event, its step and values. Non-finite numbers become null.

        Raises OSError if the write fails. The line is then kept in `unwritten`, and no line in the file is torn.
        """
        record = _finite({"event": event, "step": step, **values})
        line = json.dumps(record).encode()
        self.crc32 = zlib.crc32(line, self.crc32)
        self.unwritten.append(line + b"\n")
        self.flush()
        return record

    def sync(self):
        """Flush the file to disk. A checkpoint must not get there before the log that leads to it."""
        with contextlib.suppress(OSError):
            os.fsync(self.file.fileno())

    def flush(self):
        """Write the unwritten lines. Raises OSError like `write`."""
        while self.unwritten:
            end = os.fstat(self.file.fileno()).st_size
            try:
                if self.file.write(self.unwritten[0]) < len(self.unwritten[0]):  # the disk had room for only part of it
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                os.ftruncate(self.file.fileno(), end)
                raise
            del self.unwritten[0]


def loaded_files():
    """Return the repository's files that this process has imported, as paths relative to the root. For a link, its
    target is listed too. Installed packages are left out."""
    found = set()
    for module in list(sys.modules.values()):
        # plain getattr() would make a lazy module import everything, such as all of transformers
        file = isinstance(module, ModuleType) and object.__getattribute__(module, "__dict__").get("__file__") or ""
        if not file.endswith(".py") or "site-packages" in file or file.startswith(STANDARD_LIBRARY):
            continue
        for path in (os.path.abspath(file), os.path.realpath(file)):
            name = os.path.relpath(path, ROOT)
            if name[0] != ".":  # in the repository and not hidden
                found.add(name)
    return found


def code_identity():
    """Identify the code that this process runs: {"code": "v2" and 10 hex digits, "code_files": {path: 12 hex digits}}.

    The hashes cover the native sources and every project file loaded by now, a user's own included. Empty files and
    those in NO_TRACE are left out. An edited README or plot, or another commit with the same sources, keeps the
    identity; an edited mixer changes it.
    """
    files = {}
    for name in sorted(loaded_files().union(NATIVE_SOURCES)):
        if not name.startswith(NO_TRACE) and (ROOT / name).exists():  # PyTorch names files that do not exist
            content = (ROOT / name).read_bytes()
            if content:
                files[name] = hashlib.sha256(content).hexdigest()[:12]
    code = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:10]
    return {"code": f"v2{code}", "code_files": files}


def changed_files(before, now):
    """Return the sorted paths of files that differ between two {path: hash}. Files in only one of them do not count."""
    return sorted(path for path in before.keys() & now.keys() if before[path] != now[path])


def code_version():
    """Return {"commit", "uncommitted_changes"} of this checkout; both are None without git. $LONGHORN_COMMIT names the
    commit of a copy without .git. Changes in results/, where measurements are written, do not count."""
    def git(*args):
        run = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True)
        return run.stdout.strip() if run.returncode == 0 else None

    try:
        commit = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--", ".", ":(exclude)results")
    except OSError:  # no git
        commit = changed = None
    return {"commit": commit or os.environ.get("LONGHORN_COMMIT"),
            "uncommitted_changes": None if changed is None else bool(changed)}


def environment():
    """Return this process's code, commit, versions, machine and command, for config.json. Raises ConfigError if a file
    was edited after the program was launched, because the old version is running."""
    import torch

    identity = code_identity()
    if edited := changed_files(files_at_start, identity["code_files"]):
        raise ConfigError(f"{', '.join(edited)} was edited while this program was starting: start it again")
    gpu = torch.cuda.is_available()
    threads = os.environ.get("OMP_NUM_THREADS")  # sums over threads are rounded by their number
    command = [f"OMP_NUM_THREADS={threads}"] if threads else []
    return {
        **identity, **code_version(), "command": shlex.join([*command, Path(sys.executable).name, *sys.argv]),
        "python": platform.python_version(), "torch": torch.__version__, "system": platform.platform(),
        "cpu": cpu_model(), "cores": os.cpu_count(), "gpu": torch.cuda.get_device_name() if gpu else None,
        "cuda": torch.version.cuda if gpu else None,
    }


def cpu_model():
    """Return the processor's name as reported by the system."""
    with contextlib.suppress(OSError):
        name = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if name:
            return name[1]
    return platform.processor() or platform.machine()
