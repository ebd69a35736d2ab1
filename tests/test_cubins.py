"""What the CUDA compiler makes of the scan's kernels: the table of tools/cubins.py against the choices of build.py.

    python -m pytest tests/test_cubins.py

Compiling the whole table takes 20 minutes: each day compiles another twelve of its cubins again.
"""

import datetime
import random

import pytest

from kernels import build, cuda
from tools import cubins

MADE_WITH, ROWS = cubins.read_table()
NAMES = [cubins.name(*key) for key in cubins.keys()]
LAUNCHED = [cuda.SCAN_KERNELS.index(name) for name in ("forward_kernel", "backward_kernel")]  # if no other fits
BACKWARD = cuda.SCAN_KERNELS.index("backward_kernel")


def check(key, row):
    """The bounds that hold for every cubin, whatever the compiler: no spills up to 64 states but for `exact`, and every
    block that `build` takes to fit does."""
    update, _, (P, L), gpu = key
    assert row["shared"][BACKWARD] == build.backward_bytes(update, P, L)
    if update != "exact" and P * L <= 64:
        assert not any(row["spills"]), (key, row)
    if build.blocks_at_once(update, (P, L), cubins.GPUS[gpu][0]):
        assert all(row["blocks"][i] for i in LAUNCHED), (key, row)
    else:
        assert row["blocks"][BACKWARD] == 0


def test_every_row_is_within_bounds():
    assert ROWS and set(ROWS) <= set(NAMES)
    for key in cubins.keys():
        if cubins.name(*key) in ROWS:
            check(key, ROWS[cubins.name(*key)])


@pytest.mark.parametrize("gpu", cubins.GPUS)
def test_no_layout_is_chosen_that_cannot_be_launched(gpu):
    """Two blocks of the backward per multiprocessor with up to 16 states, as the table counts them."""
    room = cubins.GPUS[gpu][0]
    for update in build.UPDATES:
        for N in (1, 8, 16, 17, 32, 64, 100, 128, 200, 256):
            for B, T, D in ((1, 1, 1), (1, 1024, 1536), (8, 4096, 1536), (64, 1024, 1536), (2, 32768, 2048)):
                try:
                    shape = build.cuda_shape(update, B, T, D, N, 128, room)
                except ValueError:
                    assert N > 128 and not build.blocks_at_once(update, (8, 32), room)
                    continue
                for dtype in build.DTYPES:
                    row = ROWS.get(cubins.name(update, dtype, shape, gpu))
                    assert row is None or all(row["blocks"][i] >= (2 if N <= 16 else 1) for i in LAUNCHED), (N, row)


@pytest.mark.skipif(cuda.nvcc() is None, reason="no nvcc here: nothing is compiled for a GPU with a report")
def test_four_cubins_of_the_day_are_as_the_table_says():
    keys = random.Random(datetime.date.today().toordinal()).sample(cubins.keys(), 4)
    for key in keys:
        row = cubins.measure(*key)
        check(key, row)
        if MADE_WITH == cubins.version():
            assert row == ROWS.get(cubins.name(*key), row)
