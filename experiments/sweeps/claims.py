"""Which process runs which cell, where several processes and machines share a sweep's folder. A claim is a file:

    out/scaling_laptop/<cell>.claim-1     {"machine": ..., "host": "node7", "pid": 4711}

Only one process can create a file that does not exist yet, on network file systems too, so the cell is its own. From
then on it touches the claim every HEARTBEAT seconds. A cell is taken over by creating claim-2, and so on, when

- the claim says that it was given back,
- or it was written on this machine and its lock is free. The cell's process inherits the lock, so after a kill it is
  free once that process has saved and ended; while it is held nobody on this machine takes the cell,
- or, on other machines, nobody touched it in LOST_AFTER looks, HEARTBEAT seconds apart: that machine is lost. No two
  clocks are compared, and a file system that hangs makes looks rare, so that nobody is called lost for it.

Numbers only grow until the cell is finished. So a process that acts on an old look cannot take a cell from the one that
was faster: it finds a higher number beside its own and leaves. A process that was called lost and wakes up finds its
claim deleted, and kills its cell.
"""

import contextlib
import fcntl
import json
import os
import platform
import time
from collections import namedtuple
from pathlib import Path

HEARTBEAT = 5.0  # seconds
LOST_AFTER = 24  # looks: two minutes
BOOT = Path("/proc/sys/kernel/random/boot_id")  # tells machines of the same name apart: Linux draws it at each boot
MACHINE = BOOT.read_text().strip() if BOOT.exists() else platform.node()


# The newest claim on a cell, as somebody else sees it. note: its content; looks: how many found it untouched.
Seen = namedtuple("Seen", "number touched note looks is_held")


class Claims:
    """The claims in a folder."""

    def __init__(self, folder):
        self.folder, self.seen, self.next_count = Path(folder), {}, 0.0

    def path(self, name, number):
        return self.folder / f"{name}.claim-{number}"

    def numbers(self):
        """{name: [numbers]} of all claims."""
        claimed = {}
        for file in self.folder.glob("*.claim-*"):
            name, _, number = file.name.rpartition(".claim-")
            if number.isdecimal():
                claimed.setdefault(name, []).append(int(number))
        return claimed

    def look(self):
        """{name: Seen} of every cell that has a claim. Looks count once per HEARTBEAT, however often this is called."""
        counts = time.monotonic() >= self.next_count
        if counts:
            self.next_count = time.monotonic() + HEARTBEAT
        before, self.seen = self.seen, {}
        for name, numbers in self.numbers().items():
            number, old = max(numbers), before.get(name)
            try:
                note, touched, is_locked = read(self.path(name, number))
            except OSError:  # deleted since; the next look shows by whom
                note, touched, is_locked = {}, -1, None
            untouched = old and (old.number, old.touched) == (number, touched)
            looks = old.looks + counts if untouched else 0
            is_held = not {"free", "failed"} & note.keys() and (
                looks < LOST_AFTER if is_locked is None else is_locked)
            self.seen[name] = Seen(number, touched, note, looks, is_held)
        return self.seen

    def take(self, name):
        """A Claim on a cell that nobody held at the last look; None where somebody did, or was faster."""
        seen = self.seen.get(name)
        if seen and seen.is_held:
            return None
        number = seen.number + 1 if seen else 1
        try:
            claim = Claim(self.path(name, number))
        except FileExistsError:
            return None
        numbers = self.numbers().get(name, [number])
        if max(numbers) > number:
            claim.delete()
            return None
        for old in set(numbers) - {number}:
            self.path(name, old).unlink(missing_ok=True)
        return claim

    @contextlib.contextmanager
    def hold(self, name):
        """`with claims.hold("plan.json")`: one process at a time, the others wait. For what is soon done."""
        claim = None
        while claim is None:
            self.look()
            claim = self.take(name)
            if claim is None:
                time.sleep(0.1)
        try:
            yield
        finally:
            claim.delete()


class Claim:
    """A claim of this process. Raises FileExistsError where the file exists, OSError where it cannot be written.

    handle: the open file, locked; a process that inherits it keeps the lock.
    """

    def __init__(self, path):
        self.path = path
        self.handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(self.handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.write(machine=MACHINE, host=platform.node(), pid=os.getpid())  # after the lock: see `read`

    def write(self, **note):
        with contextlib.suppress(OSError):  # a full disk: what is empty is held until it is old
            os.ftruncate(self.handle, 0)
            os.pwrite(self.handle, json.dumps(note).encode(), 0)

    def touch(self):
        """Show that this process lives. False where another has taken the cell over."""
        try:
            os.utime(self.path)
        except FileNotFoundError:
            return False
        except OSError:  # a server that does not answer now
            pass
        return True

    def leave(self, **note):
        """Give the cell back: free=True, or failed=why."""
        self.write(**note)
        os.close(self.handle)

    def delete(self):
        """The cell is finished."""
        self.path.unlink(missing_ok=True)
        os.close(self.handle)


def read(path):
    """(note, time of the last touch, whether it is locked) of a claim. The lock is None where it cannot be known: a
    claim of another machine, one that is only half written, a file system without locks. Raises OSError."""
    handle = os.open(path, os.O_RDWR)
    try:
        touched, note = os.fstat(handle).st_mtime_ns, {}
        with contextlib.suppress(ValueError):
            note = {**json.loads(os.read(handle, 1 << 16))}
        if note.get("machine") != MACHINE:
            return note, touched, None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return note, touched, False
        except BlockingIOError:
            return note, touched, True
        except OSError:
            return note, touched, None
    finally:
        os.close(handle)
