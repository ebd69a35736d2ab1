"""The CUDA kernels where there is no GPU: run on a CPU by tests/cuda_shim.h, compiled for GPUs by nvcc where it is found.

The comparison is that of test_scan.py: float64 loop, every gradient, outputs filled with NaN, through longhorn_scan itself.
The surprise: a block's threads are fibers here, and once threads of the machine, under ThreadSanitizer, which finds the
barrier that one test takes out.

    python -m pytest tests/test_cuda.py
"""

import ctypes
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_scan import BF16, EPS, F16, F32, failures, inputs, results

import native
from scan import longhorn_scan, longhorn_scan_ref

SHIM = Path(__file__).with_name("cuda_shim.h")
THREADS = 64  # two warps: enough for sums over warps, and quicker than the 128 of a GPU
COMPILER = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "c++")), None)
CPU_PART = "- CPU vectors\n"  # what follows in longhorn_scan.cu is not the CUDA kernels'

pytestmark = [pytest.mark.usefixtures("poison"),
              pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="the shim needs g++ on Linux")]


def compile_shim(folder, dtype, P, L, source=native.SOURCE, flags=("-O1",), main=None):
    """The kernels of one dtype and shape as a CPU library (or, with `main`, as a program); returns its path."""
    out = Path(folder) / f"shim_{native.CUDA_TYPES[dtype]}_{P}_{L}{'' if main is None else '.exe'}"
    kind = ["-shared", "-fPIC"] if main is None else ["-x", "c++", str(main)]
    command = [COMPILER, *flags, "-std=c++20", "-pthread", "-Wno-unknown-pragmas", "-DLONGHORN_SHIM", f"-DTHREADS={THREADS}",
               f"-DSCAN_TYPE={native.CUDA_TYPES[dtype]}", f"-DSCAN_P={P}", f"-DSCAN_L={L}", "-include", str(SHIM),
               "-x", "c++", str(source), *kind, "-o", str(out)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return out


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """shim(dtype, P, L): the library, built once."""
    folder = tmp_path_factory.mktemp("shim")
    return functools.cache(lambda dtype, P, L: declare(ctypes.CDLL(str(compile_shim(folder, dtype, P, L)))))


def declare(lib):
    for name in ("longhorn_scan_forward_cuda", "longhorn_scan_backward_cuda"):
        getattr(lib, name).restype = ctypes.c_char_p
        getattr(lib, name).argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return lib


def use(monkeypatch, library, L):
    """Have longhorn_scan(backend='cpu') call the CUDA kernels of `library`, as it would on a GPU."""
    class ShimKernels(native.Kernels):
        def __init__(self, args_class, x, **sizes):
            (B, T, D), self.dtype, self.device = x.shape, x.dtype, x.device
            splits = -(-D // (THREADS // L))
            self.args, self.library = args_class(B=B, T=T, D=D, splits=splits, dtype=0, **sizes), None

        def run(self, function):
            return getattr(library, function + "_cuda")(ctypes.addressof(self.args), None)

    monkeypatch.setattr(native, "Kernels", ShimKernels)


SHAPES = [  # dtype, P, L, then B, T, D, N
    (F32, 16, 1, 2, 33, 65, 16), (F32, 16, 1, 1, 65, 7, 16), (F32, 16, 1, 1, 70, 3, 13), (F32, 4, 4, 2, 37, 21, 16),
    (F32, 4, 4, 1, 1, 5, 9), (F32, 4, 1, 1, 8, 66, 3), (F32, 4, 1, 2, 31, 3, 1), (F32, 16, 4, 1, 34, 17, 64),
    (F32, 4, 32, 1, 35, 3, 128), (BF16, 16, 1, 1, 64, 40, 16), (BF16, 8, 4, 1, 33, 18, 32), (F16, 8, 2, 2, 32, 33, 16),
]


@pytest.mark.parametrize("dtype,P,L,B,T,D,N", SHAPES)
def test_agrees_with_the_loop(shim, monkeypatch, dtype, P, L, B, T, D, N):
    use(monkeypatch, shim(dtype, P, L), L)
    assert not failures(inputs(B, T, D, N, dtype))


@pytest.mark.parametrize("without", [("D", "z", "dt_bias", "h0"), ("z",), ("h0", "D")])
def test_optional_arguments(shim, monkeypatch, without):
    use(monkeypatch, shim(F32, 4, 4), 4)
    assert not failures(inputs(1, 35, 18, 16, without=without))
    assert not failures(inputs(1, 5, 18, 11, without=without), "y")


@pytest.mark.parametrize("kw", [dict(key=1e3), dict(logit=1000.0), dict(logit=300.0), dict(key=1e6, logit=1000.0)])
def test_extreme_values(shim, monkeypatch, kw):
    use(monkeypatch, shim(F32, 16, 1), 1)
    a = inputs(1, 40, 17, 16, **kw)
    got = results(native_scan, a)
    assert not [n for n, v in got.items() if not v.isfinite().all()]
    assert not failures(a, slack=dict.fromkeys(got, 2e-5))


def test_nan_in_the_logits_reaches_the_output(shim, monkeypatch):
    use(monkeypatch, shim(F32, 4, 4), 4)
    a = inputs(1, 6, 5, 16)
    a["dt"][0, 2, 3] = torch.nan
    y = longhorn_scan(**a, backend="cpu")
    assert y[0, 2:, 3].isnan().all() and y[0, :2].isfinite().all() and y[0, :, :3].isfinite().all()


def native_scan(**a):
    return longhorn_scan(**a, backend="cpu")


def test_views_need_no_copy_and_change_nothing(shim, monkeypatch):
    use(monkeypatch, shim(F32, 4, 4), 4)
    a = inputs(2, 20, 10, 16)
    views = dict(a)
    views["x"], views["z"] = torch.cat([a["x"], a["z"]], -1).chunk(2, -1)
    views["k"], views["q"] = torch.cat([a["k"], a["q"]], -1).split([16, 16], -1)
    first, second = results(native_scan, a), results(native_scan, views)
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_two_runs_agree_to_the_bit(shim, monkeypatch):
    use(monkeypatch, shim(F32, 16, 1), 1)
    a = inputs(2, 40, 70, 16)
    first, second = results(native_scan, a), results(native_scan, a)
    assert all(torch.equal(first[n], second[n]) for n in first)


MUTANTS = {  # in the CUDA part: a piece of it, and the same with a mistake
    "a warp's sums are left out": ("for (int w = 0; w < WARPS; w++)", "for (int w = 0; w < WARPS - 1; w++)"),
    "butterfly gives the wrong half": ("give = upper ? v[i] : v[i + COUNT / 2]", "give = upper ? v[i + COUNT / 2] : v[i]"),
    "the next tile overwrites this one": ("read_keys(t0 + TILE, buffer ^ 1);", "read_keys(t0 + TILE, buffer);"),
    "dk without the -2k deps term": ("dk - 2.0f * s.k[r][j] * dkk", "dk"),
    "lanes beyond D add to dq": ("const float dyt = in ?", "const float dyt = t0 + r < a.T ?"),
    "sub-chunk states one too late": ("S[j] = s.states[sub][j][tid]", "S[j] = s.states[sub ? sub - 1 : 0][j][tid]"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_broken_kernels_are_caught(tmp_path, monkeypatch, name):
    right, wrong = MUTANTS[name]
    cuda, marker, cpu = native.SOURCE.read_text().partition(CPU_PART)
    assert cuda.count(right) == 1 and marker
    source = tmp_path / "broken.cu"
    source.write_text(cuda.replace(right, wrong) + marker + cpu)
    use(monkeypatch, declare(ctypes.CDLL(str(compile_shim(tmp_path, F32, 16, 1, source, ("-O0",))))), 1)
    assert failures(inputs(1, 40, 70, 16))


RACE = """
#include <vector>
int main() {
    const int64_t B = 1, T = 48, D = 40, N = 4, n = B * T * D, m = B * T * N;
    std::vector<float> x(n, 0.5f), k(m, 0.3f), y(n), chunks(2 * N * D), hT(D * N);
    std::vector<float> g(n, 0.1f), dx(n), ddt(n), dk(8 * m), dq(8 * m);
    ScanArgs a = {};
    a.B = B; a.T = T; a.D = D; a.N = N; a.splits = 8;
    a.x = a.dt = x.data(); a.x_b = a.dt_b = T * D; a.x_t = a.dt_t = D;
    a.k = a.q = k.data(); a.k_b = a.q_b = T * N; a.k_t = a.q_t = N;
    a.y = y.data(); a.hT = hT.data(); a.chunks = chunks.data();
    a.dy = g.data(); a.dy_b = T * D; a.dy_t = D; a.dx = dx.data(); a.ddt = ddt.data(); a.dk = dk.data(); a.dq = dq.data();
    longhorn_scan_forward_cuda(&a, nullptr);
    a.T = 9;  // the backward waits 37 times a step
    longhorn_scan_backward_cuda(&a, nullptr);
    return 0;
}
"""


@pytest.mark.parametrize("planted", [None, "forward", "backward"])
def test_thread_sanitizer_finds_missing_barriers_and_only_those(tmp_path, planted):
    cuda, marker, cpu = native.SOURCE.read_text().partition(CPU_PART)
    if planted:
        at = cuda.index(f"scan_{planted}_kernel")
        end = cuda.index("if (live) {\n        #pragma unroll", at)  # the kernel writes its last state: the barrier before it
        at = cuda.rindex("__syncthreads();", at, end)
        cuda = cuda[:at] + cuda[at:].replace("__syncthreads();", "", 1)
    source = tmp_path / "race.cu"
    source.write_text(cuda + marker + cpu + RACE)
    program = tmp_path / "race"
    command = [COMPILER, "-O1", "-g", "-fsanitize=thread", "-std=c++20", "-pthread", "-Wno-unknown-pragmas", "-DLONGHORN_SHIM",
               "-DSHIM_THREADS", f"-DTHREADS={THREADS}", "-DSCAN_TYPE=float", "-DSCAN_P=4", "-DSCAN_L=1", "-include", str(SHIM),
               "-x", "c++", str(source), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode and "tsan" in built.stderr:
        pytest.skip("this compiler has no ThreadSanitizer runtime")
    assert built.returncode == 0, built.stderr
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    run = subprocess.run([program], capture_output=True, text=True, timeout=120, env=environment)
    if "unexpected memory mapping" in run.stderr:
        pytest.skip("ThreadSanitizer does not run on this kernel (address space layout)")
    assert ("data race" in run.stderr) == (planted is not None), run.stderr[-2000:]


# ------------------------------------------------------------------------------------------------------- for real GPUs

needs_nvcc = pytest.mark.skipif(native._nvcc() is None, reason="no nvcc here: the kernels were not compiled for a GPU")


@needs_nvcc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_nvcc_compiles_without_spills(tmp_path, architecture):
    command = [native._nvcc(), "-O3", "-std=c++17", f"-arch={architecture}", "-Xptxas", "-v", "-cubin", "-DSCAN_TYPE=bf16",
               "-DSCAN_P=16", "-DSCAN_L=1", str(native.SOURCE), "-o", str(tmp_path / "out.cubin")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    kernels = re.findall(r"Compiling entry function '\w*?scan_(forward|backward)_kernel", run.stderr)
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill stores", run.stderr)]
    registers = dict(zip(kernels, (int(n) for n in re.findall(r"Used (\d+) registers", run.stderr)), strict=True))
    assert sorted(kernels) == ["backward", "forward"] and spills == [0, 0]
    assert registers["forward"] <= 102 and registers["backward"] <= 255  # 5 and 2 blocks of 128 threads a multiprocessor


@needs_nvcc
def test_build_for_a_gpu_is_cached_and_loads(tmp_path):
    path, seconds = native.build_cuda(BF16, 16, 1, "sm_90", folder=tmp_path)
    assert seconds > 0 and native.build_cuda(BF16, 16, 1, "sm_90", folder=tmp_path) == (path, 0.0)
    lib = ctypes.CDLL(str(path))
    lib.longhorn_args_size.restype = ctypes.c_int64
    assert lib.longhorn_args_size() == ctypes.sizeof(native.ScanArgs) and lib.longhorn_channels_a_block() == native.CUDA_THREADS


def test_shape_of_the_state():
    for N in range(1, 129):
        for B, D in ((1, 1), (1, 1536), (64, 1536), (512, 2048)):
            P, L = native.cuda_shape(B, D, N, 132)
            assert N <= P * L < max(2 * N, 5) and P in (4, 8, 16) and L in (1, 2, 4, 8, 16, 32)
    assert native.cuda_shape(64, 1536, 16, 132) == (16, 1)  # the paper's shape: one lane a channel
    assert native.cuda_shape(1, 1536, 16, 132) == (4, 4)  # one long sequence: spread over lanes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: nothing ran on one")
@pytest.mark.parametrize("dtype", (F32, BF16, F16))
@pytest.mark.parametrize("B,T,D,N", [(2, 65, 70, 16), (1, 1000, 33, 16), (3, 129, 64, 64), (1, 33, 5, 3), (64, 256, 512, 16)])
def test_on_a_gpu(dtype, B, T, D, N):
    a = {n: v.cuda() for n, v in inputs(B, T, D, N, dtype).items()}
    leaf = lambda wide: {n: v.detach().to(torch.float64 if wide else v.dtype).requires_grad_() for n, v in a.items()}
    for wide, f, out in ((True, longhorn_scan_ref, []), (False, functools.partial(longhorn_scan, backend="cuda"), [])):
        b = leaf(wide)
        y, hT = f(**b, return_state=True)
        loss = (y.double() * torch.cos(torch.arange(y.numel(), device="cuda").view(y.shape))).sum() + hT.double().sum()
        out += [y, hT, *torch.autograd.grad(loss, list(b.values()))]
        if wide:
            true = out
        else:
            eps = torch.finfo(dtype).eps
            for got, want in zip(out, true, strict=True):
                assert (got.double() - want).norm() <= (0.5 * eps + 64 * EPS) * want.norm()
