"""The CUDA kernels without a GPU: run on a CPU by tools/cuda_shim.h, and compiled for GPUs where nvcc is found.

They are called through longhorn_scan and compared as in test_conformance.py: with a float64 recurrence, for every
gradient, in outputs filled with NaN. A block's threads are fibers here; test_ptx.py finds missing barriers.

    python -m pytest tests/test_cuda.py
"""

import contextlib
import ctypes
import functools
import itertools
import re
import struct
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.utils.checkpoint
from operators import (
    BF16,
    COMPILER,
    EPS,
    F16,
    F32,
    OPERATORS,
    PAIRS,
    THREADS,
    cast,
    conv_inputs,
    conv_wrong,
    generator,
    graded,
    in_halves,
    inputs,
    load_shim,
    loss_wrong,
    native_scan,
    on_gpu,
    packed,
    source_of,
    use,
    use_alone,
    with_mistake,
    wrong,
)

from bench.measure import compare, values_and_gradients
from bench.ops import TESTED
from kernels import build, cuda, launch, ops
from kernels.ops import causal_conv1d, linear_cross_entropy
from kernels.scan import longhorn_scan

pytestmark = [pytest.mark.usefixtures("poison"),
              pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="the shim needs g++ on Linux")]

@pytest.fixture(scope="module")
def shim(builds):
    """shim(update, dtype, P, L), shim("conv", dtype, W, channels), shim("loss", dtype, room): a module of kernels."""
    return functools.cache(lambda *key: load_shim(builds, *key))


ROWS = {  # update: dtype, (P, L), then B, T, D, N; each new pair of dtype and (P, L) is compiled
    "longhorn": [(F32, PAIRS, 2, 33, 65, 16), (F32, PAIRS, 1, 33, 1, 10), (F32, (4, 4), 2, 37, 21, 16),
                 (F32, (4, 4), 1, 1, 5, 9), (F32, (4, 2), 1, 8, 66, 3), (F32, (4, 2), 2, 31, 3, 1),
                 (F32, (8, 16), 1, 35, 7, 128), (BF16, (8, 8), 1, 37, 21, 62),
                 # whole chunks, blocks and states: rows fetched for two tensors at once, four, one, or not at all
                 (BF16, PAIRS, 2, 64, 128, 16), (F32, (4, 4), 1, 96, 32, 16), (BF16, (8, 8), 1, 32, 16, 64),
                 (F32, PAIRS, 1, 64, 64, 16), (F32, (4, 2), 1, 32, 64, 4), (F32, (8, 16), 1, 64, 8, 128)],
    "exact": [(F32, (4, 4), 1, 35, 19, 13), (F32, (4, 4), 1, 64, 32, 16)],
    "mamba": [(F32, PAIRS, 1, 37, 65, 16), (F32, PAIRS, 1, 64, 64, 16), (BF16, (4, 4), 1, 35, 19, 13)],
    "mamba without softplus": [(F32, PAIRS, 1, 9, 5, 16)]}
IN_SEGMENTS = [("longhorn", 2, F32, PAIRS, 2, 96, 64, 16), ("longhorn", 3, F32, (4, 4), 1, 96, 32, 16),
               ("longhorn", 2, BF16, (8, 8), 1, 64, 16, 64), ("mamba", 2, F32, PAIRS, 2, 96, 64, 16)]


@pytest.mark.parametrize("update,segments,dtype,shape,B,T,D,N", [
    *((update, 1, *row) for update, rows in ROWS.items() for row in rows), *IN_SEGMENTS])
def test_a_scan_agrees_with_the_loop(shim, monkeypatch, update, segments, dtype, shape, B, T, D, N):
    use(monkeypatch, shim(update.split()[0], dtype, *shape), segments)
    a = inputs(update, B, T, D, N, dtype=dtype)
    assert not wrong(update, a)
    if D in (128, 21, 8) or (segments, dtype) == (2, F32):  # negative strides, for rows fetched ahead or not
        assert not wrong(update, a, run=in_halves(OPERATORS[update].run, "z"), reverse=True)
    if segments > 1 and dtype == F32:
        a["x"] = four_bytes_on(a["x"])
        assert not wrong(update, {n: a[n] for n in a if n not in ("h0", "D", "dt_bias")}, "cpu", "y")


def test_the_forward_may_have_another_layout_than_the_backward(shim, monkeypatch):
    use(monkeypatch, (shim("longhorn", F32, 4, 4), shim("longhorn", F32, *PAIRS)))
    assert not wrong("longhorn", inputs("longhorn", 2, 37, 21, 10))


def four_bytes_on(v):
    """The same float32 numbers, four bytes after an address that is aligned for fetching."""
    return torch.nn.functional.pad(v, (1, 3))[..., 1:-3]


@pytest.mark.parametrize("update", ("longhorn", "mamba"))
def test_packed_sequences_agree_with_the_loop(shim, monkeypatch, update):
    use(monkeypatch, shim(update, F32, *PAIRS))
    a, cu = packed(update, [33, 0, 32, 1], 70, 16)
    assert not wrong(update, a, cu_seqlens=cu)
    assert not wrong(update, a, cu_seqlens=cu, reverse=True)


def test_optional_arguments_may_be_absent(shim, monkeypatch):
    use(monkeypatch, shim("longhorn", F32, 4, 4))
    assert not wrong("longhorn", inputs("longhorn", 1, 35, 18, 16, without=("D", "z", "dt_bias", "h0")))
    assert not wrong("longhorn", inputs("longhorn", 1, 5, 18, 11, without=("h0", "D")), only="y")


def test_nan_in_the_logits_reaches_the_output(shim, monkeypatch):
    use(monkeypatch, shim("longhorn", F32, 4, 4))
    a = inputs("longhorn", 1, 6, 5, 16)
    a["dt"][0, 2, 3] = torch.nan
    y = longhorn_scan(**a, backend="cpu")
    assert y[0, 2:, 3].isnan().all() and y[0, :2].isfinite().all() and y[0, :, :3].isfinite().all()


@pytest.fixture
def launched(monkeypatch):
    """launched(module, segments): a list that fills with the names of the kernels launched from now on."""
    def watch(module, segments=1):
        use(monkeypatch, module, segments)
        names, launch = [], type(module).launch
        monkeypatch.setattr(module, "launch", lambda name, *rest: (names.append(name), launch(module, name, *rest)))
        return names

    return watch


PLAIN, WHOLE = (tuple(f"{direction}{kind}_kernel" for direction in ("forward", "backward")) for kind in ("", "_whole"))
SEGMENTS = ("segment_state_kernel", "combine_kernel", WHOLE[0], "segment_grad_kernel", "combine_kernel", WHOLE[1])


@pytest.mark.parametrize("segments,T,D,N,without,odd,expected", [
    (1, 64, 128, 16, (), None, WHOLE), (1, 63, 64, 16, (), None, PLAIN), (1, 64, 63, 16, (), None, PLAIN),
    (1, 64, 64, 15, (), None, PLAIN), (1, 64, 64, 16, ("z",), None, PLAIN), (2, 64, 64, 16, (), None, SEGMENTS),
    *((1, 32, 64, 16, (), name, PLAIN) for name in ("x", "dt", "z", "k", "q"))])  # rows not aligned for fetching
def test_whole_chunks_blocks_and_a_gate_have_kernels_of_their_own(launched, shim, segments, T, D, N, without, odd,
                                                                  expected):
    names, a = launched(shim("longhorn", F32, *PAIRS), segments), inputs("longhorn", 1, T, D, N, without=without)
    if odd:
        a[odd] = four_bytes_on(a[odd])
    assert not wrong("longhorn", a) and tuple(names) == expected
    if expected is WHOLE:  # packed sequences may end anywhere
        longhorn_scan(**{n: v for n, v in a.items() if n != "h0"}, cu_seqlens=torch.tensor([0, T]), backend="cpu")
        assert names[2] == "forward_kernel"


def test_rows_are_fetched_ahead_only_where_shared_memory_suffices(launched, shim, monkeypatch):
    """The kernel must fit a block, and two blocks must still fit a multiprocessor that holds two without fetching."""
    module = shim("longhorn", F32, *PAIRS)
    names, (plain, fetching) = launched(module), (module.shared[kernels[1]] for kernels in (PLAIN, WHOLE))
    two = lambda size: 2 * (size + cuda.RESERVED)
    for block, multiprocessor, expected in ((fetching, two(fetching), WHOLE), (fetching - 1, two(fetching), PLAIN),
                                            (fetching, two(fetching) - 1, PLAIN), (fetching, two(plain) - 1, WHOLE)):
        names.clear()
        monkeypatch.setattr(module, "room", (block, multiprocessor))
        graded(native_scan, inputs("longhorn", 1, 32, 64, 16))
        assert names[1] == expected[1]


@pytest.mark.parametrize("place", ("forward waits", "backward waits"))
def test_fetched_rows_are_wrong_without_the_wait(builds, monkeypatch, place):
    """With the wait at this place in longhorn_scan.cu removed, a chunk's rows are read too early."""
    source = with_mistake(source_of("longhorn"), place, "if (false)")
    use(monkeypatch, load_shim(builds, "longhorn", BF16, *PAIRS, source=source))
    assert wrong("longhorn", inputs("longhorn", 1, 64, 64, 16, BF16))


@pytest.mark.parametrize("dtype,W,T,D", [
    (F32, 4, 65, 5), (BF16, 4, 62, 150), (F32, 4, 1, 66), (F32, 8, 133, 5), (F32, 8, 2, 5), (F16, 3, 130, 40)])
def test_the_convolution_and_its_gradients_are_right(shim, monkeypatch, dtype, W, T, D):
    use(monkeypatch, shim("conv", dtype, W, 1 if dtype == F32 else 2))
    assert not conv_wrong(dtype, W, 2, T, D)
    in_half = in_halves(OPERATORS["conv"].run, "x")
    assert D == 5 or not conv_wrong(dtype, W, 2, T, D, reverse=True, run=in_half)


def test_a_convolution_of_no_steps_is_empty(shim, monkeypatch):
    use(monkeypatch, shim("conv", F32, 4, 1))
    a = conv_inputs(2, 0, 10, 4)
    empty = graded(causal_conv1d, a)
    assert empty["y"].shape == (2, 0, 10) and not any(empty["d" + n].any() for n in a)


@pytest.mark.parametrize("dtype,room", [(BF16, 10_016), (BF16, 0), (F16, 10_016), (F32, 0)])
def test_the_loss_of_a_row_is_right_wherever_it_lies(shim, monkeypatch, dtype, room):
    """Rows begin and end anywhere, and take one piece, one round of a block or several rounds."""
    use_alone(monkeypatch, shim("loss", dtype, room))
    for n, V in ((1, 1), (3, 2), (9, 15), (3, 64), (9, 301), (2, 2560), (3, 5003)):
        logits = (4 * torch.randn(n, V, generator=generator(V))).to(dtype)
        targets = torch.randint(V, (n,), generator=generator())
        logits[0, 0] += 12
        logits[-1, targets[-1] - 1] = -torch.inf if V > 1 else 0
        assert not loss_wrong(logits, targets), V
    assert not loss_wrong(logits + 1000, targets)
    assert loss_wrong(torch.full((1, 70), torch.nan, dtype=dtype), torch.tensor([3]))


@pytest.mark.parametrize("parts,n,columns", [(1, 1, 0), (12, 70, 1), (40, 64, 4), (0, 24, 3), (33, 31, 0)])
def test_sums_are_right(shim, monkeypatch, parts, n, columns):
    """The parts are integers, whose sum is exact in any order: a part left out or added twice shows."""
    use_alone(monkeypatch, shim("sums", F32, build.BLOCK_SUMS))
    whole = lambda *shape: torch.randint(-9, 9, (parts, *shape), generator=generator()).float()
    given = [whole(columns or 3, n), whole(3 * n), None, whole(5, n), whole(2)]
    first, *others = launch.sums(given, [F32, BF16, F32, F16, F32], columns)
    want = given[0].sum(0)
    assert torch.equal(first, want.t() if columns else want)
    for got, a, dtype in zip(others, given[1:], (BF16, F32, F16, F32), strict=True):
        assert a is None and got is None or torch.equal(got, a.sum(0).to(dtype))


def test_the_loss_of_a_row_with_nan_or_inf_or_only_minus_inf_is_nan(shim, monkeypatch):
    use_alone(monkeypatch, shim("loss", F32, 0))
    for odd, of in ((torch.nan, 1), (torch.inf, 1), (-torch.inf, 70)):
        logits = torch.zeros(2, 70)
        logits[0, :of] = odd
        log_p = ops.log_probabilities(logits, torch.tensor([3, 3]), True)
        assert logits[0].isnan().all() and log_p[0].isnan() and logits[1].isfinite().all() and log_p[1].isfinite()


def test_the_loss_of_a_head_is_right(shim, monkeypatch):
    """Some targets are left out, and another call has no rows."""
    x, weight = torch.randn(6, 4, generator=generator()), torch.randn(70, 4, generator=generator(1))
    targets = torch.tensor([3, -1, 0, 69, -1, 7])
    plain = lambda **a: (linear_cross_entropy(**a, targets=targets, backend="torch"), None)
    want = values_and_gradients(plain, {"x": x, "weight": weight}, torch.float64)
    use_alone(monkeypatch, shim("loss", F32, 0))
    ours = lambda **a: (linear_cross_entropy(**a, targets=targets), None)
    errors = compare(values_and_gradients(ours, {"x": x, "weight": weight}), want, 16 * EPS)
    assert all(row["right"] for row in errors.values())
    assert linear_cross_entropy(x[:0], weight, targets[:0]).isnan()
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        linear_cross_entropy(x, weight, targets + 1)


@pytest.mark.parametrize("dtype,V,shared,kept", [
    (BF16, 50304, 228 << 10, 100_608), (BF16, 50257, 100 << 10, 100_528), (BF16, 128_256, 228 << 10, 0),
    (F32, 50304, 164 << 10, 0)])
def test_a_row_of_logits_is_kept_where_a_block_has_room_for_it(dtype, V, shared, kept):
    assert ops.loss_room(dtype, V, shared) == kept
    assert kept == 0 or kept >= (V + 16 // dtype.itemsize - 1) // (16 // dtype.itemsize) * 16


def test_a_refusal_by_the_driver_names_the_kernel(shim, monkeypatch):
    module = shim("longhorn", F32, 4, 4)
    use(monkeypatch, module)
    module.lib.shim_fail(719)
    with pytest.raises(RuntimeError, match=r"launch of forward_kernel \(1 blocks of 64 .*message of the driver.*719"):
        native_scan(**inputs("longhorn", 1, 5, 3, 4))
    monkeypatch.setitem(module.shared, "backward_kernel", 300_000)
    monkeypatch.setattr(module, "ready", set())
    with pytest.raises(RuntimeError, match="backward_kernel: reserving 293.0 KB of shared memory per block"):
        graded(native_scan, inputs("longhorn", 1, 5, 3, 4))
    with pytest.raises(OSError, match="disagree about a struct"):
        cuda.Module(b"", cuda.SCAN_KERNELS, 8, module.lib)


# ------------------------------------------------------------------------------------------------------- for real GPUs

COMPILERS = {"nvcc": cuda.nvcc(), "nvrtc": cuda.nvrtc()}
CUDA_COMPILERS = [pytest.param(name, marks=pytest.mark.skipif(path is None, reason=f"no {name} here"))
                  for name, path in COMPILERS.items()]


# Shared memory of a multiprocessor, and the most that a block may use. All have 65,536 registers.
ROOM = {"sm_80": (164 << 10, 163 << 10), "sm_89": (100 << 10, 99 << 10), "sm_90": (228 << 10, 227 << 10),
        "sm_120": (100 << 10, 99 << 10)}
COMPILED = [  # update, dtype, (P, L), architecture, blocks at once of forward and backward, the same for whole chunks
    ("longhorn", BF16, PAIRS, "sm_90", (4, 3), (4, 3)), ("longhorn", F32, (4, 2), "sm_120", (4, 2), (3, 1)),
    ("mamba", F32, (4, 8), "sm_80", (3, 3), (3, 2))]
with_nvcc = pytest.mark.skipif(COMPILERS["nvcc"] is None, reason="no nvcc, so no report of registers")


def report(folder, architecture, update, *key):
    """(the cubin, {kernel: registers}, {kernel: bytes of spills}) as compiled by nvcc."""
    command = [COMPILERS["nvcc"], "-cubin", *cuda.OPTIONS["nvcc"], f"-arch={architecture}", "-Xptxas=-v",
               *cuda.defines(update, *key), str(build.source_of(update).path)]
    run = subprocess.run([*command, "-o", str(folder / "out.cubin")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    kernels = re.findall(r"Compiling entry function '(\w+)'", run.stderr)
    registers = map(int, re.findall(r"Used (\d+) registers", run.stderr))
    spills = map(int, re.findall(r"(\d+) bytes spill stores", run.stderr))
    return ((folder / "out.cubin").read_bytes(), dict(zip(kernels, registers, strict=True)),
            dict(zip(kernels, spills, strict=True)))


def blocks_at_once(architecture, registers, shared):
    """The number of blocks of 128 threads that fit a multiprocessor. Each of its four schedulers has 16,384 registers
    and gives each warp a multiple of 256. A block takes a kilobyte besides its shared memory."""
    room, most = ROOM[architecture]
    warps = 16384 // (-(-registers * 32 // 256) * 256)
    return 0 if shared > most else min(room // (shared + 1024), warps)


@with_nvcc
@pytest.mark.parametrize("update,dtype,shape,architecture,blocks,whole", COMPILED)
def test_compiled_kernels_fit_as_many_blocks_as_the_layout_counts_on(tmp_path, update, dtype, shape, architecture,
                                                                     blocks, whole):
    """The kernels do not spill registers."""
    P, L = shape
    cubin, registers, spills = report(tmp_path, architecture, update, dtype, *shape)
    facts = struct.pack("<5q", build.CHUNK, ctypes.sizeof(build.ScanArgs), 128, 2 * 128 // L, P * L)
    shared = struct.unpack_from("<7q", cubin, cubin.index(facts) + len(facts))
    shared = dict(zip(cuda.SCAN_KERNELS, shared, strict=True))
    assert sorted(registers) == sorted(shared) and not any(spills.values())
    for names, counts in ((PLAIN, blocks), (WHOLE, whole)):
        for name, least in zip(names, counts, strict=True):
            fit = blocks_at_once(architecture, registers[name], shared[name])
            assert fit >= least, (name, fit)


@pytest.mark.parametrize("update,shape", [("longhorn", PAIRS), ("longhorn", (8, 16)), ("longhorn", (4, 2)),
                                          ("exact", (4, 4)), ("mamba", PAIRS), ("mamba", (4, 4))])
def test_shared_memory_of_the_backward_is_what_the_layout_counts_on(shim, monkeypatch, update, shape):
    monkeypatch.setattr(build, "CUDA_THREADS", THREADS)
    assert shim(update, F32, *shape).shared["backward_kernel"] == launch.backward_bytes(update, *shape)


@with_nvcc
def test_the_compiled_convolution_fits_five_blocks(tmp_path):
    _, registers, spills = report(tmp_path, "sm_90", "conv", BF16, 4, 2)
    assert sorted(registers) == sorted(cuda.CONV_KERNELS) and not any(spills.values())
    assert max(registers.values()) <= 96


@with_nvcc
@pytest.mark.parametrize("architecture", ("sm_80", "sm_90"))
def test_the_compiled_loss_fits_two_blocks(tmp_path, architecture):
    _, registers, spills = report(tmp_path, architecture, "loss", BF16, 100_608)
    assert registers["loss_kernel"] <= 64 and not any(spills.values())


@pytest.mark.parametrize("room", (228 << 10, 164 << 10, 100 << 10))
@pytest.mark.parametrize("update", launch.UPDATES)
def test_a_chosen_layout_can_be_launched(update, room):
    """With up to 16 states, two backward blocks fit a multiprocessor; up to 128 states work on every GPU."""
    for N in (1, 8, 9, 16, 17, 32, 33, 64, 65, 100, 128, 129, 200, 256):
        for B, T, D in ((1, 1, 1), (1, 1024, 1536), (8, 4096, 1536), (64, 1024, 1536), (2, 32768, 2048)):
            try:
                P, L = launch.cuda_shape(update, B, T, D, N, 128, room)
            except ValueError:
                assert N > 128
                continue
            assert N <= P * L < max(2 * N, 9)
            taken = launch.backward_bytes(update, P, L) + 1024
            assert taken * (2 if N <= 16 else 1) <= room
            assert launch.blocks_at_once(update, (P, L), 3 * taken - 1) == 2


@pytest.mark.parametrize("name", CUDA_COMPILERS)
def test_a_build_for_a_gpu_is_cached(tmp_path, monkeypatch, name):
    monkeypatch.setenv("LONGHORN_CUDA_COMPILER", name)
    # nvcc compiles the scan above
    key, kernels = {"nvcc": (("conv", BF16, (4, 2)), cuda.CONV_KERNELS),
                    "nvrtc": (("longhorn", F32, (4, 2)), cuda.SCAN_KERNELS)}[name]
    make = functools.partial(build.build_cuda, *key, "sm_90", folder=tmp_path)
    path, seconds = make()
    assert seconds > 0 and make() == (path, 0.0)
    cubin = path.read_bytes()
    assert cubin[:4] == b"\x7fELF" and all(symbol.encode() in cubin for symbol in (*kernels, "facts"))


@pytest.mark.parametrize("name", CUDA_COMPILERS)
def test_a_compiler_that_refuses_is_quoted(tmp_path, monkeypatch, name):
    monkeypatch.setenv("LONGHORN_CUDA_COMPILER", name)
    source = tmp_path / "broken.cu"
    source.write_text("this is no kernel")
    with pytest.raises(OSError, match="(?s)could not build broken.cu for sm_90:.*this"):
        build.build_cuda("longhorn", BF16, PAIRS, "sm_90", source=source, folder=tmp_path)
    assert not list(tmp_path.glob("*.cubin"))


def test_another_tuning_or_compiler_builds_another_file(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda, "compile_kernels", lambda source, to, *rest: Path(to).touch())
    monkeypatch.setattr(cuda, "compiler_version", lambda compiler: "1")
    make = lambda kind="cubin": build.build_cuda("longhorn", BF16, PAIRS, "sm_90", ("nvcc", kind, "sm_90"),
                                                 folder=tmp_path)
    paths = [make()[0], make("ptx")[0]]
    for defines in ("FORWARD_BLOCKS=5", "FORWARD_BLOCKS=5 STAGES=4"):
        monkeypatch.setenv("LONGHORN_CUDA_DEFINES", defines)
        paths += [make()[0], make()[0]]
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError("No locks available")))
    monkeypatch.setitem(cuda.OPTIONS, "nvcc", ["-O1"])
    assert len({*paths, make()[0]}) == 5 and make()[1] == 0


@pytest.fixture
def prepare(monkeypatch):
    """prepare(B, T, D, ...): (blocks that share a row, segments of T, bytes that rows are aligned to, steps per
    segment) for a call on an H200. It needs no H200, since the kernels are not loaded."""
    def module(update, dtype, shape, architecture, index):
        assert (architecture, index) == ("sm_90", 0)
        channels, states = (128 * shape[1], 0) if update == "conv" else (2 * 128 // shape[1], shape[0] * shape[1])
        return mock.Mock(threads=128, channels=channels, states=states)

    def prepare(B, T, D, update="longhorn", rows=None, gated=True, backward=False, **sizes):
        struct, sizes = (build.ScanArgs, sizes or {"N": 16}) if update else (build.ConvArgs, sizes)
        prepared = launch._prepare.__wrapped__(struct, (B, T, D), BF16, torch.device("cuda", 0), update, rows, gated,
                                              backward, 1, **sizes)
        a = prepared["args"]
        assert (a.T, a.D, a.B) == (T, D, rows or B)
        return a.splits, prepared["segments"], prepared["aligned"], getattr(a, "segment_T", None)

    h200 = mock.Mock(major=9, minor=0, multi_processor_count=132, shared_memory_per_multiprocessor=228 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    monkeypatch.setattr(build, "cuda_module", module)
    monkeypatch.setattr(launch, "gpu_module", launch.gpu_module.__wrapped__)
    return prepare


def test_a_call_on_an_h200_is_split_and_aligned(prepare):
    assert prepare(2, 32768, 1536) == (12, 16, 16, 2048)  # 3 * 132 // 24 segments of whole chunks
    assert prepare(8, 4096, 1536)[:2] == (24, 1)  # the backward: 12 and 4
    for whole in (dict(gated=False), dict(rows=2), dict(update="exact")):
        assert prepare(2, 32768, 1536, **whole)[:3] == (24, 1, 1)
    assert prepare(2, 32768 - 1, 1536)[1] == prepare(2, 32768, 1536 - 8)[1] == 1
    assert prepare(4, 130, 300, None, W=4) == (2, 3, 4, None)


def test_a_kernel_that_the_driver_does_not_load_is_built_another_way(tmp_path, monkeypatch):
    """First comes nvcc's cubin, then NVRTC's, then PTX for an architecture that the compilers know. Kernels whose CHUNK
    differs from build.py's are refused: they would write outside their tensors."""
    monkeypatch.setattr(cuda, "nvcc", lambda: "nvcc")
    monkeypatch.setattr(cuda, "nvrtc", lambda: "a library")
    tried, kernel = [], tmp_path / "kernel"
    kernel.touch()
    monkeypatch.setattr(build, "build_cuda", lambda *key: (tried.append(key[-1]), (kernel, 0.0))[1])
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    module, other = mock.Mock(steps=build.CHUNK), mock.Mock(steps=build.CHUNK // 2)
    monkeypatch.setattr(cuda, "Module", mock.Mock(side_effect=[RuntimeError("no image"), RuntimeError("no"), module]))
    assert build.cuda_module.__wrapped__("longhorn", BF16, PAIRS, "sm_121", 0) is module
    assert tried == [("nvcc", "cubin", "sm_121"), ("nvrtc", "cubin", "sm_121"), ("nvcc", "ptx", "compute_90")]
    monkeypatch.setattr(cuda, "Module", mock.Mock(side_effect=[other] * 4))
    with pytest.raises(OSError, match="disagree about a struct, CHUNK"):
        build.cuda_module.__wrapped__("longhorn", BF16, PAIRS, "sm_121", 0)
    monkeypatch.setattr(cuda, "Module", mock.Mock(side_effect=RuntimeError("no image")))
    with pytest.raises(OSError, match="nvcc cubin sm_86: no image; nvrtc cubin sm_86: no image$"):
        build.cuda_module.__wrapped__("longhorn", BF16, PAIRS, "sm_86", 0)
    assert tried[-1] == ("nvrtc", "ptx", "compute_80")


def test_of_several_nvrtcs_pytorchs_own_version_is_taken(monkeypatch):
    """A driver as old as PyTorch's CUDA may not load what a newer NVRTC compiles."""
    monkeypatch.setattr(cuda.glob, "glob", lambda pattern: ["libnvrtc.so.13.8", "libnvrtc.so.12.8"])
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda path: mock.Mock(path=path))
    monkeypatch.setattr(cuda, "nvrtc_version", lambda library: library.path[-4:])
    for torchs, taken in (("12.8", "libnvrtc.so.12.8"), ("13.8", "libnvrtc.so.13.8"), ("11.0", "libnvrtc.so.12.8")):
        monkeypatch.setattr(torch.version, "cuda", torchs)
        assert cuda.nvrtc.__wrapped__().path == taken


def test_without_a_cuda_compiler_the_refusal_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(cuda, "nvcc", lambda: None)
    monkeypatch.setattr(cuda, "nvrtc", lambda: None)
    with pytest.raises(OSError, match="no nvcc and no NVRTC found"):
        build.build_cuda("longhorn", BF16, PAIRS, "sm_90", folder=tmp_path)


H200, A100, RTX = (132, 228 << 10), (108, 164 << 10), (128, 100 << 10)  # multiprocessors, shared memory of each


@pytest.mark.parametrize("B,T,splits,segments", [  # 12 blocks share a row if lanes hold 8 states, 24 if 4
    (64, 1024, 12, 1),  # the paper's setting
    (16, 4096, 12, 1),  # 192 blocks for 132 multiprocessors
    (8, 4096, 12, 4),  # 96 blocks per segment: 2.9 per multiprocessor, where three fit
    (1, 65536, 12, 33),  # one long sequence: 12 blocks
    (1, 1024, 24, 8), (1, 200, 24, 1),  # short sequences are spread over lanes
    (16, 200, 24, 1), (22, 200, 12, 1)])  # 1.5 and 2 blocks per multiprocessor
def test_the_layout_fills_an_h200(prepare, B, T, splits, segments):
    assert prepare(B, T, 1536, backward=True)[:2] == (splits, segments)


@pytest.mark.parametrize("gpu,update,N,most", [(RTX, "longhorn", 256, 128), (RTX, "exact", 129, 128),
                                               (A100, "mamba", 256, 128), (H200, "mamba", 257, 256)])
def test_a_state_that_fits_no_block_is_refused_with_the_limit(gpu, update, N, most):
    with pytest.raises(ValueError, match=rf"{gpu[1] >> 10} KB .* {update} take up to {most} states per channel, got "
                                         rf"{N}: use backend='torch'$"):
        launch.cuda_shape(update, 64, 1024, 1536, N, *gpu)


@pytest.mark.parametrize("update", ("longhorn", "mamba"))
def test_once_split_T_fills_the_gpu(update):
    """The backward has as many blocks as the GPU runs at once, or fewer by less than one segment's blocks."""
    for (gpu, least), blocks, dtype in itertools.product(((H200, 3), (A100, 2)), range(1, 200), (F32, BF16)):
        segments = launch.cuda_segments(update, dtype, PAIRS, blocks, 1 << 20, *gpu)
        least = 2 if update == "mamba" or dtype == F32 else least
        assert (segments == 1) == (blocks > gpu[0])
        forward = launch.cuda_segments(update, dtype, PAIRS, blocks, 1 << 20, *gpu, backward=False)
        assert forward == (segments if blocks <= 0.6 * gpu[0] else 1)
        if segments > 1:
            assert least * gpu[0] - blocks < blocks * segments <= least * gpu[0]
    states = [launch.cuda_shape(update, 64, 1024, 1536, N, *RTX)[0] for N in (32, 64)]
    # four states per lane if two blocks, or one that fetches, fit only then: Mamba's with eight takes 102,592 bytes
    assert states == ([8, 4] if update == "mamba" else [4, 8])


def test_the_choice_to_split_can_be_tuned(prepare, monkeypatch):
    monkeypatch.setenv("LONGHORN_CUDA_DEFINES", "P=4 SPLIT_BELOW=3 FILL=12 STAGES=4")
    assert prepare(16, 4096, 1536)[:2] == (24, 4)  # untuned 12 and 1, without FILL 24 and 1
    assert cuda.defines("longhorn", BF16, *PAIRS)[4:] == ["-DSTAGES=4"]  # the compiler gets only its own settings


@pytest.mark.parametrize("T", (1, 31, 32, 33, 1000, 65536))
def test_segments_cover_T_in_whole_chunks(T):
    for wanted in (1, 2, 7, 22):
        S, segment_T = launch.segment_sizes(T, wanted).values()
        assert 1 <= S <= wanted and segment_T % build.CHUNK == 0 and (S - 1) * segment_T < T <= S * segment_T


def gpu_failures(update, a, **kw):
    """{name: error} of the kernels' wrong results; the truth is computed on the GPU too."""
    fast, slow = ((lambda f=f, **a: f(**a, **kw).values()) for f in (OPERATORS[update].run, OPERATORS[update].true))
    a = {n: v.cuda() for n, v in a.items()}
    got = values_and_gradients(functools.partial(fast, backend="cuda"), a)
    # Mamba's decay is an exponential that the hardware approximates: near 1 it is off by 2 ulp, T times over
    drift = 2 * a["x"].shape[1] * EPS if update.startswith("mamba") else 0.0
    errors = compare(got, values_and_gradients(slow, a, torch.float64), 64 * EPS + drift)
    return {n: row for n, row in errors.items() if not row["right"]}


@on_gpu
@pytest.mark.parametrize("update", list(OPERATORS)[:4])
@pytest.mark.parametrize("dtype", (F32, BF16, F16))
@pytest.mark.parametrize("B,T,D,N", TESTED)
def test_gpu_agrees_with_the_loop(update, dtype, B, T, D, N):
    assert not gpu_failures(update, inputs(update, B, T, D, N, dtype=dtype))


@on_gpu
@pytest.mark.parametrize("update", ("longhorn", "mamba"))
def test_gpu_packed_sequences(update):
    a, cu = packed(update, [3, 0, 100, 33, 64], 70, 16)
    assert not gpu_failures(update, a, cu_seqlens=cu.cuda())


@on_gpu
@pytest.mark.parametrize("name, sizes", [("longhorn", {"N": 16}), ("conv", {})])
def test_gpu_runs_agree_to_the_bit_also_on_another_stream_compiled_and_checkpointed(name, sizes):
    row, side = OPERATORS[name], torch.cuda.Stream()
    a = {n: v.cuda() for n, v in cast(row, row.draw(200, B=4, D=300, **sizes), BF16).items()}
    want = graded(row.run, a)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        streamed = graded(row.run, a)
    torch.cuda.current_stream().wait_stream(side)
    again = lambda **a: torch.utils.checkpoint.checkpoint(row.run, **a, use_reentrant=False)
    compiled = torch.compile(row.run, fullgraph=True, backend="aot_eager")
    for got in (graded(row.run, a), streamed, graded(again, a), graded(compiled, a)):
        assert all(torch.equal(got[n], v) for n, v in want.items())


@on_gpu
def test_gpu_graph_replays():
    a = {n: v.cuda() for n, v in inputs("longhorn", 2, 100, 256, 16, dtype=BF16).items()}
    longhorn_scan(**a)  # builds and loads the kernels, which is not allowed while capturing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = longhorn_scan(**a)
    a["x"].normal_()
    graph.replay()
    assert torch.equal(y, longhorn_scan(**a))


@on_gpu
def test_gpu_more_than_two_to_the_31_elements(monkeypatch):
    """With more than 2^31 elements per tensor, the last row of a batch gives the same results and gradients as that row
    alone. The kernels fetch ahead."""
    monkeypatch.setattr(launch, "cuda_segments", lambda *_: 1)  # a single row would be split and round differently
    B, T, D, N = 33, 65536, 1024, 16
    if torch.cuda.mem_get_info()[0] < 100 * 2**30:  # free memory: other tests may use the GPU too
        pytest.skip("needs 100 GB")
    widths = {"x": D, "dt": D, "k": N, "q": N, "z": D}
    a = {n: torch.randn(B, T, width, device="cuda", dtype=BF16).requires_grad_() for n, width in widths.items()}
    row = {n: v[-1:].detach().clone().requires_grad_() for n, v in a.items()}
    y, hT = longhorn_scan(**a, return_state=True)
    y_row, h_row = longhorn_scan(**row, return_state=True)
    assert y.numel() > 2**31 and torch.equal(y[-1:], y_row) and torch.equal(hT[-1:], h_row)
    y.backward(y.detach())  # dy = y needs no memory
    y_row.backward(y_row.detach())
    assert all(torch.equal(a[n].grad[-1:], row[n].grad) for n in a)
