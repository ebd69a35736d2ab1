"""Programs import this before PyTorch: a signal during the import then ends them with a line, and idle OpenMP threads
spin only briefly.

When another program takes a thread's core, the threads that wait for it spin and occupy theirs, so a busy laptop trains
at a third of its speed. On two cores of an EPYC beside one busy process, spinning briefly is 1.7 times as fast; on a
quiet machine it costs a tenth. Only how CPU threads wait changes.
"""

import importlib.util
import os
import signal
import sys

if importlib.util.find_spec("torch") is None:
    sys.exit(f"{sys.executable} has no PyTorch: run `. .venv/bin/activate` first; `make train` sets .venv up")

EARLY = (signal.SIGINT, signal.SIGTERM)

# GNU's OpenMP counts loop iterations; Intel's and LLVM's count milliseconds, and that number is a guess.
SHORT_SPIN = {"GOMP_SPINCOUNT": "3000", "KMP_BLOCKTIME": "1"}


def leave(number, _):
    """End the program, which has not begun, with a line and by this signal: a shell's loop then ends with it."""
    os.write(2, f"{signal.Signals(number).name}: ended before it began\n".encode())
    imported()
    signal.raise_signal(number)


def imported():
    """From now on a signal ends the program even while it waits in an operation of PyTorch."""
    for number in EARLY:
        signal.signal(number, signal.SIG_DFL)


for number in EARLY:
    signal.signal(number, leave)
if not {"OMP_WAIT_POLICY", *SHORT_SPIN} & os.environ.keys():
    os.environ.update(SHORT_SPIN)
