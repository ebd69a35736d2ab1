"""Imported by a program before PyTorch: Ctrl-C during the import ends it without a traceback, and OpenMP's threads do
not spin for long.

While a thread waits for one that does not run, because another program has its core, it takes the core of others. So a
laptop that is not quiet trains at a third of its speed. On two cores of an EPYC a short spin makes that 1.7 times as
fast beside one busy process, and costs a tenth when it is quiet. Only waiting changes, and only of threads on a CPU.
"""

import os
import signal

# Rounds of a loop in GNU's OpenMP; milliseconds in Intel's and LLVM's, whose number is a guess.
SHORT_SPIN = {"GOMP_SPINCOUNT": "3000", "KMP_BLOCKTIME": "1"}

signal.signal(signal.SIGINT, signal.SIG_DFL)
if not {"OMP_WAIT_POLICY", *SHORT_SPIN} & os.environ.keys():
    os.environ.update(SHORT_SPIN)
