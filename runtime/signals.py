"""On SIGTERM, SIGINT (Ctrl-C) or SIGUSR1 (Slurm's warning) a run finishes the step, saves and exits; on a second SIGINT
it exits at once."""

import contextlib
import os
import signal
import threading
import time


class Signals:
    """`with Signals() as signals`: the first signal asks to finish the step, a SIGINT after it ends the process. A
    thread watches for the second, because Python's own handlers wait until a collective returns.

    requested: this process was asked to stop. stopping: any process was; `agree` (runtime/distributed.py) sets it on
    all of them, so that they stop after the same step.
    """

    asked_at = None  # when a signal came, of this process's current Signals, see data/images.py

    def __init__(self):
        self.requested = self.stopping = False
        Signals.asked_at = None

    def __enter__(self):
        reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        self.before = {number: signal.signal(number, self.request)
                       for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
        threading.Thread(target=self.listen, args=(reader,), daemon=True).start()
        return self

    def request(self, *_):
        self.requested, Signals.asked_at = True, Signals.asked_at or time.monotonic()

    def listen(self, reader):
        asked = False
        while numbers := os.read(reader, 1):
            if asked and numbers[0] == signal.SIGINT:
                with contextlib.suppress(OSError):
                    os.write(2, b"interrupted at once: nothing saved since the last checkpoint\n")
                os._exit(130)  # sys.exit would wait for other processes
            asked = asked or numbers[0] in self.before
        os.close(reader)

    def __exit__(self, kind, error, trace):
        """Give the signals back to Python. Not after an error: torchrun's SIGTERM would end this process before it says
        which ranks did not answer."""
        if error is None:
            for number, handler in self.before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(-1)
            os.close(self.writer)  # ends the thread
