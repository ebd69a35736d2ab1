"""Stops a run on SIGTERM, SIGINT (Ctrl-C) or SIGUSR1 (Slurm's warning).

The run answers at once, finishes the micro-batch, saves and exits. With several processes, or if the model has buffers,
it finishes the step. A second SIGINT or SIGTERM ends it at once.
"""

import contextlib
import os
import select
import signal
import threading
import time

# Signals this close together count as one request: `timeout` signals a process and then its group.
ONE_REQUEST_SECONDS = 0.05
# Variables of managers that send SIGTERM repeatedly. Under these managers only a second SIGINT ends a process at once.
MANAGERS = {"TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"}


class Signals:
    """`with Signals() as signals`: the first signal asks to stop, a second one ends the process. A thread answers,
    because Python's own handlers wait until an operation of PyTorch or a collective returns.

    requested    this process was asked to stop
    stopping     some process was asked to stop; `agree` (runtime/distributed.py) sets it on all in the same step
    dropped      the only process has left its step unfinished
    """

    asked_at = None  # time of this process's first signal, or None; see data/images.py

    def __init__(self):
        self.requested = self.stopping = self.dropped = False
        Signals.asked_at = None

    def __enter__(self):
        reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        self.before = {number: signal.signal(number, self.request)
                       for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
        self.thread = threading.Thread(target=self.listen, args=(reader,), daemon=True)
        self.thread.start()
        return self

    def request(self, *_):
        self.requested = True
        Signals.asked_at = Signals.asked_at or time.monotonic()

    def listen(self, reader):
        """Answer the signals whose numbers come through a pipe, until its other end is closed."""
        ends = {signal.SIGINT, signal.SIGTERM}
        second = "one"
        if MANAGERS & os.environ.keys():
            ends = {signal.SIGINT}
            second = "Ctrl-C"
        asked = False
        while True:
            select.select([reader], [], [])
            time.sleep(ONE_REQUEST_SECONDS)
            numbers = os.read(reader, 4096)
            if not numbers:
                break
            came = self.before.keys() & numbers
            for number in came:
                if asked and number in ends:
                    write("interrupted at once: nothing saved since the last checkpoint")
                    os._exit(128 + number)  # sys.exit would wait for other processes
            if came and not asked:
                asked = True
                name = signal.Signals(min(came)).name
                write(f"{name}: the run stops after this micro-batch, step or evaluation, and saves; a second {second} "
                      "ends it at once")
        os.close(reader)

    def __exit__(self, kind, error, trace):
        """Restore Python's handlers, but not after an error: torchrun's SIGTERM would then end this process before it
        names the ranks that did not answer."""
        if error is None:
            for number, handler in self.before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(-1)
            os.close(self.writer)  # ends the thread
            if self.requested:
                self.thread.join()  # a run with fast steps may end before the thread has answered


def write(line):
    """Write a line to stderr, below a progress bar if there is one; once per machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        start = "\n" if os.isatty(2) else ""
        with contextlib.suppress(OSError):
            os.write(2, f"{start}{line}\n".encode())
