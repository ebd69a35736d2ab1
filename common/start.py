"""Programs import this before PyTorch: a signal then ends them with a line, until training answers it (Signals), and
idle OpenMP threads spin only briefly.

When another program takes a thread's core, the threads that wait for it spin and occupy theirs, so a busy laptop trains
at a third of its speed. On two cores of an EPYC beside one busy process, spinning briefly is 1.7 times as fast; on a
quiet machine it costs a tenth. Only how CPU threads wait changes.
"""

import contextlib
import ctypes
import importlib.util
import os
import signal
import sys
import threading

if importlib.util.find_spec("torch") is None:
    sys.exit(f"{sys.executable} has no PyTorch: run `. .venv/bin/activate` first; `make train` sets .venv up")

# GNU's OpenMP counts loop iterations; Intel's and LLVM's count milliseconds, and that number is a guess.
SHORT_SPIN = {"GOMP_SPINCOUNT": "3000", "KMP_BLOCKTIME": "1"}


def leave(number):
    """End the program with a line and by this signal: a shell's loop then ends with it."""
    with contextlib.suppress(OSError):
        os.write(2, f"{signal.Signals(number).name}: ended at once, nothing was being trained\n".encode())
    ctypes.CDLL(None).signal(number, 0)  # to its default; Python's own function is for the main thread
    signal.raise_signal(number)


reader, writer = os.pipe()
os.set_blocking(writer, False)
signal.set_wakeup_fd(writer)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: None)  # it would wait until an operation of PyTorch returns; a thread does not
threading.Thread(target=lambda: leave(*os.read(reader, 1)), daemon=True).start()
if not {"OMP_WAIT_POLICY", *SHORT_SPIN} & os.environ.keys():
    os.environ.update(SHORT_SPIN)
