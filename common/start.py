"""Programs import this before PyTorch: Ctrl-C during the import then gives no traceback, and idle OpenMP threads spin
only briefly.

When another program takes a thread's core, the threads that wait for it spin and occupy theirs, so a busy laptop trains
at a third of its speed. On two cores of an EPYC beside one busy process, spinning briefly is 1.7 times as fast; on a
quiet machine it costs a tenth. Only how CPU threads wait changes.
"""

import os
import signal

# GNU's OpenMP counts loop iterations; Intel's and LLVM's count milliseconds, and that number is a guess.
SHORT_SPIN = {"GOMP_SPINCOUNT": "3000", "KMP_BLOCKTIME": "1"}

signal.signal(signal.SIGINT, signal.SIG_DFL)
if not {"OMP_WAIT_POLICY", *SHORT_SPIN} & os.environ.keys():
    os.environ.update(SHORT_SPIN)
