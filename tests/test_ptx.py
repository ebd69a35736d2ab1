"""Tests of the PTX that the CUDA compiler emits, run on a CPU by tools/ptx.py. They need nvcc or NVRTC, but no GPU.

test_cuda.py runs the same source compiled by g++. Here too, results and every gradient are compared with a float64
loop, but at the 128 threads of a GPU. Four faults raise an error that names the instruction and its source line:

- a race in shared memory (a missing barrier),
- an address outside every tensor,
- a misaligned vector,
- lanes that wait for one another forever.

    python -m pytest tests/test_ptx.py
"""

import ctypes
import functools
import sys

import pytest
import torch
from operators import (
    BF16,
    COMPILER,
    F32,
    FLAGS,
    PAIRS,
    conv_inputs,
    conv_wrong,
    generator,
    graded,
    inputs,
    load_shim,
    loss_wrong,
    native_scan,
    packed,
    source_of,
    use,
    use_alone,
    with_mistake,
    wrong,
)

from kernels import build, cuda, launch
from tools import ptx

pytestmark = [pytest.mark.usefixtures("poison"),
              pytest.mark.skipif(cuda.missing() is not None, reason=f"{cuda.missing()}: there is no PTX to run"),
              pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="the shim needs g++ on Linux")]


class Cost(ctypes.Structure):  # of tools/ptx_shim.h
    _fields_ = [(n, ctypes.c_int) for n in ("line", "source", "shared", "writes", "bytes")] + [
        (n, ctypes.c_int64) for n in ("accesses", "units", "least")]


WHOLE = ("forward_whole_kernel", "backward_whole_kernel")
JOINING = ("segment_state_kernel", "segment_grad_kernel", "combine_kernel")
LEFT_OUT = {("longhorn", BF16, *PAIRS): ()}  # all kernels in one build only: compiling takes most of the time


def load_ptx(folder, *key, source=None, left_out=()):
    """Like load_shim, with the PTX of the kernels or of a changed `source`."""
    macros = cuda.defines(*key)
    text = ptx.translate(ptx.compiled(macros, source or source_of(key[0])), left_out)
    # signed integers wrap around, and a multiplication and an addition are not fused
    return load_shim(folder, *key, source=text, flags=(*FLAGS, "-w", "-fwrapv", "-ffp-contract=off"),
                     threads=512 if key[0] == "loss" else build.CUDA_THREADS)


@pytest.fixture(scope="module")
def emitted(builds):
    """emitted(update, dtype, P, L) or emitted("conv", dtype, W, channels): the kernels' PTX as a module, built once."""
    return functools.cache(lambda *key: load_ptx(builds, *key, left_out=LEFT_OUT.get(key, (*WHOLE, *JOINING))))


def run(monkeypatch, module, segments=1):
    """Like `use`, but also tells the translated kernels which tensors each launch gets."""
    use(monkeypatch, module, segments)
    point, given = launch.point, []

    def tell(args, **tensors):
        if not isinstance(args, build.Sum):  # a launch has several sums
            given.clear()
        given.extend(tensors.values())
        last = lambda a: sum((n - 1) * s for n, s in zip(a.shape, a.stride(), strict=True))
        extents = lambda a: a.numel() and (last(a) + 1) * a.itemsize
        known = [n for a in given for n in (a.data_ptr(), extents(a), 0, 0)]
        module.lib.ptx_tensors((ctypes.c_uint64 * len(known))(*known), len(given))
        return point(args, **tensors)

    monkeypatch.setattr(launch, "point", tell)


@pytest.mark.parametrize("update,dtype,B,T,D,N,segments", [
    ("longhorn", BF16, 1, 64, 128, 16, 1), ("longhorn", BF16, 2, 37, 70, 13, 1), ("longhorn", BF16, 1, 96, 128, 16, 3),
    ("mamba", F32, 1, 35, 70, 13, 1)])
def test_scans_agree_with_the_loop(emitted, monkeypatch, update, dtype, B, T, D, N, segments):
    run(monkeypatch, emitted(update.split()[0], dtype, *PAIRS), segments)
    assert not wrong(update, inputs(update, B, T, D, N, dtype))


def test_packed_sequences_agree_with_the_loop(emitted, monkeypatch):
    run(monkeypatch, emitted("mamba", F32, *PAIRS))
    a, cu = packed("mamba", [33, 0, 3], 70, 16)
    assert not wrong("mamba", a, cu_seqlens=cu)


@pytest.mark.parametrize("kw", [dict(logit=300.0), dict(key=1e6, logit=1000.0)])
def test_extreme_values_agree_with_the_loop(emitted, monkeypatch, kw):
    run(monkeypatch, emitted("longhorn", BF16, *PAIRS))
    a = inputs("longhorn", 1, 40, 17, 16, BF16, **kw)
    slack = dict.fromkeys(["y", "h0", *(f"d{n}" for n in a)], 2e-5)
    assert not wrong("longhorn", a, slack=slack)  # a number that is not finite fails


def test_convolution_agrees_with_float64(emitted, monkeypatch):
    run(monkeypatch, emitted("conv", BF16, 4, 2))
    assert not conv_wrong(BF16, 4, 2, 130, 70)
    a = conv_inputs(2, 9, 70, 4, BF16)
    a["x"] = torch.nn.functional.pad(a["x"], (1, 1))[..., 1:-1]  # at 2-byte addresses, where a lane reads 4 bytes
    assert not wrong("conv", a, only="y")


def test_sums_agree_with_pytorchs(emitted, monkeypatch):
    """Some sizes end in the middle of what a lane reads at once."""
    module = emitted("sums", F32, build.BLOCK_SUMS)
    run(monkeypatch, module)
    use_alone(monkeypatch, module)
    a, b = torch.ones(9, 3, 31), torch.ones(9, 40)
    first, second = launch.sums([a, b], [F32, BF16], columns=3)
    assert torch.equal(first, a.sum(0).t()) and torch.equal(second, b.sum(0).to(BF16))


@pytest.mark.parametrize("dtype,room", [(BF16, 1616), (F32, 0)])
def test_loss_agrees_with_pytorchs(emitted, monkeypatch, dtype, room):
    module = emitted("loss", dtype, room)
    run(monkeypatch, module)
    use_alone(monkeypatch, module)
    logits = torch.randn(3, 801, generator=generator()).to(dtype)
    assert not loss_wrong(logits, torch.tensor([0, 799, 5]))


def test_memory_is_reached_whole_sectors_at_a_time_and_without_bank_conflicts(emitted, monkeypatch):
    """Counts every access to shared memory and every row written, in a forward and a backward of whole chunks."""
    module = emitted("longhorn", BF16, *PAIRS)
    run(monkeypatch, module)
    module.lib.ptx_count(1)
    graded(native_scan, inputs("longhorn", 1, 32, 128, 16, BF16))
    room = (Cost * 10_000)()
    accesses = room[:module.lib.ptx_costs(room, len(room))]
    module.lib.ptx_count(0)
    counted = [c for c in accesses if c.shared or c.bytes == 2 and c.writes]
    assert {(c.shared, c.writes) for c in counted} == {(0, 1), (1, 0), (1, 1)}
    assert not [(c.source, c.units, c.least) for c in counted if c.units > c.least]


@pytest.mark.parametrize("place,key,mistake,said", [  # place in the sources, kernel, new text, words of the error
    ("address", ("conv", F32, 4, 1), "b = a;", "not aligned|in no tensor"),
    ("neighbour", ("longhorn", F32, 4, 2), "if (false)", "race: thread .* reads what thread .* wrote"),
    ("forward barrier", ("longhorn", F32, 4, 2), "if (false)", "race: thread .* reads what thread .* wrote"),
    ("loss barrier", ("loss", F32, 0), "if (false)", "race: thread .* overwrites what warp .* read"),
    ("sums barrier", ("sums", F32, build.BLOCK_SUMS), "if (false)", "race: thread .* reads what thread .* wrote")])
def test_faults_that_gcc_never_sees_are_caught(tmp_path, monkeypatch, place, key, mistake, said):
    source = with_mistake(source_of(key[0]), place, mistake)
    module = load_ptx(tmp_path, *key, source=source, left_out=(*WHOLE, *JOINING))
    run(monkeypatch, module)
    with pytest.raises(RuntimeError, match=said):
        if key[0] == "loss":
            use_alone(monkeypatch, module)
            loss_wrong(torch.zeros(1, 70), torch.tensor([3]))
        elif key[0] == "sums":
            use_alone(monkeypatch, module)
            launch.sums([torch.ones(9, 40)], [F32])
        elif key[0] == "conv":
            conv_wrong(*key[1:3], 1, 9, 5)
        else:
            graded(native_scan, inputs("longhorn", 1, 40, 33, 8))
