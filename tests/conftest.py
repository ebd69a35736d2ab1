import contextlib
import gc
import os
import signal
import sys
import types
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for `poison` on a GPU
LIBRARIES = "causal_conv1d", "fla", "flash_attn", "mamba_ssm"


def pytest_configure():
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that terminated tests still show what failed


def pytest_collection():
    """Hide other libraries' kernels, except from test_fused.py. Otherwise transformers would run them on CPU tensors,
    and it does not catch errors when it imports them."""
    if "TRITON_INTERPRET" not in os.environ:
        sys.modules.update(dict.fromkeys(LIBRARIES))


def pytest_collection_finish():
    gc.freeze()  # gc.collect() then skips PyTorch and the tests, and takes 0.02 s instead of 0.3


@pytest.fixture(scope="session")
def nursery():
    """A process to fork from that has imported everything, so `launch` starts a run in a twentieth of a second."""
    import multiprocessing.forkserver  # not at the top: most tests do not fork
    from unittest import mock

    folders = os.pathsep.join(str(folder) for folder in Path(__file__).resolve().parents[:2])
    multiprocessing.forkserver._forkserver._stop()  # only one can run; a test of bench/step.py may have left its own
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["faults", "torch._dynamo"])  # DistributedDataParallel imports torch._dynamo
    with mock.patch.dict(os.environ, PYTHONPATH=folders, OMP_NUM_THREADS="1"):
        multiprocessing.forkserver.ensure_running()
    return context  # its process ends with this one


@pytest.fixture
def launch(nursery, tmp_path_factory):
    """launch(argv, world=1) starts a Run (see faults.py), which is killed at the end of its test."""
    from faults import Run

    runs = []

    def launch(argv, world=1, env=None, **patches):
        runs.append(Run(nursery, tmp_path_factory.mktemp("said"), argv, world, env or {}, patches))
        return runs[-1]
    yield launch
    for r in runs:
        r.kill()


@pytest.fixture
def start(tmp_path):
    """start(command) starts a process in the repository's root, with its output in a file. The process is killed at the
    end of its test."""
    import subprocess

    started = []

    def start(command, **env):
        output = tmp_path / f"said{len(started)}.txt"
        with open(output, "w") as f:
            process = subprocess.Popen(command, cwd=Path(__file__).resolve().parents[1], stdout=f, stderr=f,
                                       start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1", **env})
        process.said, process.alive = output.read_text, lambda: process.poll() is None
        started.append(process)
        return process
    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):  # its own children may still be running
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def stand_in(tmp_path):
    """The path of a program that stands in for train.py and takes no time."""
    from faults import STAND_IN

    path = tmp_path / "stand_in.py"
    path.write_text(STAND_IN)
    return str(path)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A prepared folder of words."""
    from helpers import write_data

    return write_data(tmp_path_factory.mktemp("data") / "words")


@pytest.fixture
def out(tmp_path):
    """The folder for a run, not created yet."""
    return tmp_path / "run"


@pytest.fixture(scope="session")
def builds(tmp_path_factory):
    """A folder for build._cached that all test processes share, so that each source is compiled once."""
    mine = tmp_path_factory.getbasetemp()
    return (mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine) / "builds"


@pytest.fixture
def library(monkeypatch):
    """library(op, function) puts a function for the CPU in place of the library's operator. library.said: the lines
    printed by say_once."""
    from kernels import build, fused

    monkeypatch.setattr(fused, "GPU", "cpu")
    fused.missing.cache_clear()

    def library(op, function):
        _, module, name, _ = fused.LIBRARIES[op]
        for i in range(1, module.count(".") + 2):
            monkeypatch.setitem(sys.modules, ".".join(module.split(".")[:i]), types.ModuleType(module))
        setattr(sys.modules[module], name, function)

    library.said = []
    monkeypatch.setattr(build, "say_once", library.said.append)
    yield library
    fused.missing.cache_clear()


@pytest.fixture
def poison():
    """Have PyTorch fill new memory with NaN, which reveals what a kernel does not write."""
    import torch  # not at the top: the tests of the configuration need no PyTorch

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="module")
def one_thread():
    """Use one thread: sums have the same order as in one-threaded processes, and nothing waits on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def threads():
    """torch.set_num_threads, undone after the test."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
