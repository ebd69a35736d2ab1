import gc
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def pytest_configure():
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends the tests gets to see what failed so far


def pytest_collection_finish():
    gc.freeze()  # what PyTorch and two thousand tests are made of need not be searched: gc.collect() takes 0.02 s then, not 0.3


@pytest.fixture
def poison():
    """PyTorch fills new memory with NaN in this mode: what a kernel does not write is seen."""
    import torch  # not at the top: the tests of the configuration need no PyTorch

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="module")
def one_thread():
    """For a module that says so: sums in the same order as in processes of one thread, and no fight over a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
