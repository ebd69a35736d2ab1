"""A run's records: what train.py writes, and what every table and figure is drawn from.

    out/<run>/config.json    the run as it ran: settings, derived values, command, commit, versions, device, data; and of the
                             code, every version that a part of the run was trained with
    out/<run>/log.jsonl      one JSON object a line and event, keys with their units
    out/<run>/result.json    the outcome, written only when the run finished
    out/<run>/loss.png       the loss curve

The surprise: a killed process leaves a half-written last line in log.jsonl. Readers drop it, and a resumed run cuts the
log back to its checkpoint, so that the log reads as if nothing had happened.

    python records.py out/longhorn_laptop     # draw loss.png again
"""

import contextlib
import errno
import hashlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

from configurator import main_error


def write_json(path, record):
    """Write `record` to `path`, beside and renamed over, so that a reader sees all of it or none.

    A number at the top level that is not finite becomes null, which JSON can hold. Raises TypeError for what JSON cannot
    hold, OSError for the disk's refusals; then the old file is untouched.
    """
    _replace(path, json.dumps(_finite(record), indent=1) + "\n")


def _replace(path, text):
    """Write `text` beside `path` and rename it over, both on the disk when it returns."""
    path = Path(path)
    temporary = Path(f"{path}.tmp-{os.getpid()}")
    try:
        with open(temporary, "w") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())  # or a power cut after the rename leaves an empty file
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder):
    """Flush a folder to disk: a rename in it is there only then. Some file systems cannot; renames are merely less durable."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _finite(record):
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}


def read_log(folder, event=None):
    """The events of a run's log.jsonl, as dicts in order; with `event`, of that kind only. A torn last line is left out,
    and where a disk has damaged an earlier one, all from there on."""
    path = Path(folder) / "log.jsonl"
    events = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(found, dict) or not isinstance(found.get("step"), int):
            break
        events.append(found)
    return [e for e in events if event in (None, e.get("event"))]


class Log:
    """Appends events to log.jsonl; opened at `step`, it first drops what a run that was killed logged beyond it.

    `unwritten` holds the lines that the disk refused, because it is full say: the next write tries them again, in order.
    """

    def __init__(self, folder, step=0):
        self.path = Path(folder) / "log.jsonl"
        kept = [e for e in read_log(folder) if e["step"] <= step] if step else []
        _replace(self.path, "".join(json.dumps(e) + "\n" for e in kept))
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


def code_version():
    """The commit of this checkout and how it differs from that; each None where git does not know. $LONGHORN_COMMIT names the
    commit of a copy without .git, as in a container.

    uncommitted_changes: whether a file that git tracks was changed, those in results/ aside, which a measurement writes and
    none reads; or a Python or native source is there that git does not track. changed_code: a hash of the changes to
    Python and native sources, and of those that git does not track, as a mixer in a file of its own that model.py imports.
    """
    folder = Path(__file__).parent

    def git(*args):
        run = subprocess.run(["git", "-C", str(folder), *args], capture_output=True)
        return run.stdout.strip() if run.returncode == 0 else None

    try:
        commit = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)results")
        code = git("diff", "HEAD", "--", "*.py", "*.cu", "*.h") or b""
        new = git("ls-files", "--others", "--exclude-standard", "-z", "--", "*.py", "*.cu", "*.h") or b""
    except OSError:  # no git
        commit, changed, code, new = None, None, b"", b""
    for name in sorted(filter(None, new.split(b"\0"))):
        code += b"\0" + name + b"\0"
        with contextlib.suppress(OSError):  # a link to nowhere, or gone again
            code += (folder / os.fsdecode(name)).read_bytes()
    return {"commit": commit.decode() if commit else os.environ.get("LONGHORN_COMMIT"),
            "uncommitted_changes": None if changed is None else bool(changed or new),
            "changed_code": hashlib.sha256(code).hexdigest()[:12] if code else None}


def version(ran_in):
    """Of the code that ran: the commit, and a + with a hash where its sources differed; None where neither is known."""
    code = ran_in["changed_code"] if "changed_code" in ran_in else ran_in["uncommitted_changes"] and "changed"
    return ran_in["commit"] and ran_in["commit"] + (f"+{code}" if code else "")


def environment():
    """Commit, versions, machine and command of this process, for config.json."""
    import torch

    return {**code_version(),
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


def draw_loss(folder):
    """Draw folder/loss.png: training and validation loss in nats against tokens. Returns its path, or None if there is
    nothing to draw yet."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def events(kind, loss):  # only those that have what is drawn
        return [e for e in read_log(folder, kind) if isinstance(e.get("tokens"), (int, float))
                and isinstance(e.get(loss, ""), (int, float, type(None)))]

    train, val = events("train", "train_loss"), events("eval", "val_loss")
    if not train and not val:
        return None
    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=140)
    losses = [math.nan if e["train_loss"] is None else e["train_loss"] for e in train]
    span = max(1, len(losses) // 25)  # a step's loss is that of a few windows: the eye needs their running mean
    means = [sum(part) / len(part) for part in (losses[max(0, i - span + 1):i + 1] for i in range(len(losses)))]
    axes.plot([e["tokens"] for e in train], losses, lw=0.6, alpha=0.35, color="tab:blue")
    label = f"training, mean of {span} lines of the log" if span > 1 else "training"
    axes.plot([e["tokens"] for e in train], means, lw=1.4, color="tab:blue", label=label)
    if val:
        axes.plot([e["tokens"] for e in val], [e["val_loss"] for e in val], "o-", ms=3, color="tab:orange", label="validation")
    if val and val[-1]["val_loss"] is not None:
        axes.annotate(f"{val[-1]['val_loss']:.4f}", (val[-1]["tokens"], val[-1]["val_loss"]), xytext=(0, 8),
                      textcoords="offset points", ha="right")
    seen = [loss for loss in (*(e["train_loss"] for e in train), *(e["val_loss"] for e in val)) if loss is not None]
    if len(seen) > 20:  # the first steps would flatten everything else
        axes.set_ylim(min(seen) - 0.1, min(max(seen), sorted(seen)[int(len(seen) * 0.95)] + 0.5))
    axes.set(xlabel="tokens", ylabel="loss (nats per token)", title=Path(folder).name.replace("$", r"\$"))  # $ starts a formula
    axes.grid(alpha=0.3)
    axes.legend()
    path = Path(folder) / "loss.png"
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
    return path


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__.strip())
        sys.exit(0 if "--help" in sys.argv or "-h" in sys.argv else 2)
    with main_error("records.py"):
        print(draw_loss(sys.argv[1]) or f"{sys.argv[1]} has no log.jsonl with losses to draw")
