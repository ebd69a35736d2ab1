"""Write files so that a kill, a full disk or a second writer leaves them whole: rename into place, lock the folder."""

import contextlib
import errno
import fcntl
import functools
import glob
import os
import platform
import re
import time
from pathlib import Path

from common.errors import ConfigError


def lock_folder(folder, wait=0.0):
    """Create `folder`, lock it, and delete files that a killed process left half written. Call this before writing.

    Returns the lock, an open file. Closing it unlocks, and so does the end of the process, however it ends. The lock is
    a file in the folder, so two paths to the same folder share it. It contains "process PID on HOST".

    Raises BlockingIOError, with that text as its strerror, if another process still holds the lock after `wait`
    seconds. Raises OSError if the folder cannot be written.
    """
    os.makedirs(folder, exist_ok=True)
    lock = append(os.path.join(folder, ".lock"), "a+")
    until = time.monotonic() + wait
    holder = _lock(lock, folder)
    if holder and wait:
        print(f"{folder} is in use by {holder}: waiting up to {wait:.0f} s for it to end", flush=True)
    while holder:
        if time.monotonic() >= until:
            raise BlockingIOError(errno.EWOULDBLOCK, holder, os.fspath(folder))
        time.sleep(0.1)
        holder = _lock(lock, folder)
    remove_leftovers(os.path.join(glob.escape(os.fspath(folder)), "*"))
    with contextlib.suppress(OSError):  # the disk may be full
        os.truncate(lock.fileno(), 0)
        os.write(lock.fileno(), f"process {os.getpid()} on {platform.node()}".encode())
    return lock


def append(path, mode="a"):
    """Open a file for appending. Raises OSError for a symbolic link, which could point anywhere."""
    opener = lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    return open(path, mode, opener=opener, errors="replace")


def _lock(lock, folder):
    """Lock the open file `lock` and return ""; if another process has locked it, return that holder."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        return lock.read(200) or "another process"
    except OSError as error:  # some network file systems have no locks
        print(f"{folder} cannot be locked ({error.strerror}): make sure that nothing else writes there", flush=True)
    return ""


@contextlib.contextmanager
def replacing(path):
    """Yields a temporary name next to `path`; if the block succeeds, that file is flushed and renamed to `path`."""
    remove_leftovers(glob.escape(os.fspath(path)))
    tmp = temporary(path)
    try:
        yield tmp
        with open(tmp, "rb+") as f:
            os.fsync(f.fileno())  # otherwise a power cut after the rename can leave an empty file
        os.replace(tmp, path)
    except OSError as error:
        error.filename = error.filename or os.fspath(path)  # an error of a write to a full disk names no file
        raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(tmp)  # tmp remains after an error, or if tmp and path are links to one file
    sync_folder(os.path.dirname(path) or ".")


def write_text(path, text):
    """Write a file through a temporary one: a link at this path is replaced, not followed."""
    with replacing(path) as tmp:
        Path(tmp).write_text(text, encoding="utf-8", errors="backslashreplace")


def sync_folder(folder):
    """Flush a folder to disk, which makes renames in it durable. Does nothing on file systems that cannot."""
    handle = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):
        os.fsync(handle)
    os.close(handle)


def temporary(path):
    """The temporary name that this process gives to `path`: path.tmp-HOST-PID-START."""
    return f"{path}.tmp-{this_host()}-{os.getpid()}-{started(os.getpid())}"


def remove_leftovers(pattern):
    """Delete temporary files for paths that match a glob pattern, if a process on this host wrote them and is gone."""
    for leftover in glob.glob(pattern + ".tmp-*"):
        name = re.fullmatch(r".*\.tmp-(.*)-(\d{1,9})-(\d+)", leftover)
        if not name or name[1] != this_host():
            continue
        if started(int(name[2])) != int(name[3]):
            with contextlib.suppress(OSError):  # already deleted by another process, or not ours to delete
                os.unlink(leftover)


@functools.cache
def this_host():
    """The host's name and PID namespace (a container has its own), within which a process id is unique."""
    namespace = Path("/proc/self/ns/pid")
    return f"{platform.node()}-{namespace.stat().st_ino}" if namespace.exists() else platform.node()


def started(pid):
    """The start time of a process on this host, in ticks since boot; None if it is gone or there is no /proc."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[19])


@contextlib.contextmanager
def writing_to(out):
    """`with writing_to(out): ...`: an OSError inside becomes a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write to {error.filename or out} ({error.strerror}): make room and continue with --resume=auto, "
            "or choose another out_dir"
        ) from None
