"""Chooses which body of an operator runs (`choose`), and builds the native libraries on first use (called by ctypes).

longhorn_scan.cu and conv_norm.cu are compiled by a C++ compiler for the CPU and by nvcc or NVRTC for a GPU, without
PyTorch's headers. Libraries are cached under build/, keyed by a hash of source, flags, compiler and machine;
$LONGHORN_BUILD_DIR sets another folder, $CXX and $NVCC other compilers. A GPU gets one library per dtype and state
shape or convolution width: each compiles in seconds, all of them would take minutes.

Nothing is loaded that another user (root excepted) could have written: if others may write to the folder, it is built
again in ~/.cache/longhorn.
"""

import contextlib
import ctypes
import functools
import glob
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from common.files import remove_leftovers, temporary
from common.torch_private import constant_when_compiled, raw_stream, transformed
from kernels import cuda, fused

ROOT = Path(__file__).resolve().parent.parent
SCAN = ROOT / "longhorn_scan.cu"
CONV = ROOT / "kernels" / "conv_norm.cu"
HEADER = ROOT / "kernels" / "lanes.h"
DTYPES = fused.ALL
BACKENDS = ("torch", "cpu", "cuda", "fused")
CHUNK = 32  # steps between the states that the forward keeps; CHUNK of longhorn_scan.cu
MAX_WIDTH = 8  # of the convolution kernels; MAX_WIDTH of conv_norm.cu
CUDA_THREADS = 128  # THREADS of lanes.h
CONV_TILE = 64  # steps per thread of the CUDA convolution; CONV_TILE of conv_norm.cu
STEPS_DISAGREE = "CHUNK, MAX_WIDTH or CONV_TILE differs between kernels/build.py and the kernel sources: change both"
SUB = 4  # steps whose states the CUDA backward keeps in registers; SUB of longhorn_scan.cu
SEGMENT = 128  # the shortest segment that T is split into on a GPU, in steps
SPLIT_BELOW = 0.6, 1.0  # T is split if a GPU gets at most so many blocks per multiprocessor: forward, backward
UPDATES = ("longhorn", "exact", "mamba")  # the enum of longhorn_scan.cu
# (P, L) that `cuda_shape` chooses from: L lanes share two channels and hold P states of each
CUDA_SHAPES = ((4, 2), (8, 2), (4, 4), (8, 4), (4, 8), (8, 8), (4, 16), (8, 16), (4, 32), (8, 32))
# Kernels with a variant for whole chunks and blocks -> the rows that it fetches ahead.
FETCHED = {"forward_kernel": ("x", "dt", "z"), "backward_kernel": ("x", "dt", "z", "dy")}
LA = "kernels/linear_attention.py: "
BODIES = {  # operator: (place of its fast body, place of its plain PyTorch body)
    "longhorn_scan": ("longhorn_scan.cu: Longhorn", "kernels/scan.py: _longhorn_step"),
    "selective_scan": ("longhorn_scan.cu: Mamba", "kernels/scan.py: _mamba_step"),
    "causal_conv1d": ("kernels/conv_norm.cu: conv_forward", "kernels/ops.py: _conv_torch"),
    "rms_norm": ("kernels/conv_norm.cu: norm_forward_rows", "kernels/ops.py: rms_norm"),
    "linear_cross_entropy": ("kernels/ops.py: _LinearCrossEntropy", "kernels/ops.py: linear_cross_entropy"),
    "attention": ("kernels/ops.py: attention", "kernels/ops.py: _softmax_attention"),
    "gated_linear_attention": (LA + "_gla", LA + "gated_linear_attention_ref"),
    "retention": (LA + "_retention, _gated_retention", LA + "retention_ref"),
    "delta_rule": (LA + "_delta_rule", LA + "delta_rule_ref"),
    "gated_delta_rule": (LA + "_delta_rule", LA + "delta_rule_ref"),
    "kda": (LA + "_delta_rule", LA + "delta_rule_ref"),
    "mesa": (LA + "_mesa", LA + "mesa_ref"),
    "wkv4": (LA + "_wkv4", LA + "wkv4_ref"),
}
NATIVE = ("longhorn_scan", "selective_scan", "causal_conv1d", "rms_norm")  # the others run in PyTorch on every device
NO_LIBRARY = {"longhorn_scan": "no library has Longhorn's scan", "wkv4": "no library has RWKV-4's wkv"}


# ------------------------------------------------------------------------------------------------------ which body runs

_forced_plain, _libraries_off = set(), False


@contextlib.contextmanager
def plain(*ops):
    """In this context the named operators (keys of BODIES) run their plain PyTorch bodies, whatever `backend` says.

    Keep both forward and backward inside: activation checkpointing chooses again in the backward. Compiled code is not
    affected. Raises ValueError for an unknown name.
    """
    unknown = sorted(set(ops) - set(BODIES))
    if unknown:
        raise ValueError(f"plain: unknown operator {unknown[0]!r}: choose from {', '.join(BODIES)}")
    added = set(ops) - _forced_plain
    _forced_plain.update(added)
    try:
        yield
    finally:
        _forced_plain.difference_update(added)


@contextlib.contextmanager
def without_libraries():
    """In this context operators run this repository's bodies where `backend` would call other libraries' kernels."""
    global _libraries_off
    before, _libraries_off = _libraries_off, True
    try:
        yield
    finally:
        _libraries_off = before


def places(op, backend, device, dtype):
    """(place of the body of `op` that runs for these arguments of `choose`, place of its plain body), for messages."""
    fast, slow = BODIES[op]
    library = op in fused.LIBRARIES and choose(op, backend, device, dtype) == "fused"
    return fused.place(op) if library else fast, slow


def choose(op, backend, device, dtype=None, cannot=None, library_cannot=None):
    """The body of `op` (a key of BODIES) to run: 'torch' (plain PyTorch), 'fused' (a library's GPU kernel), or the
    device ('cpu', 'cuda') for this repository's own body on it. Every operator calls this.

    backend: one of BACKENDS, None or "" for the fastest that runs here. device: the type of the tensors' device. dtype:
    of the tensors; None: one that every body takes. cannot, library_cannot: further reasons why the native kernels or
    the library cannot take these tensors. Inside torch.func and forward-mode AD native operators run in plain PyTorch:
    the kernels have no rules for these and would silently drop tangents.

    Raises ValueError for an unknown backend, RuntimeError with the reason if the given backend cannot run here.
    """
    backend = "" if backend == "fused" and _libraries_off else backend or ""
    return _choose(op, backend, device, dtype, cannot, library_cannot, op in _forced_plain, _libraries_off,
                   transformed())


@constant_when_compiled
def _choose(op, backend, device, dtype, cannot, library_cannot, forced_plain, libraries_off, inside):
    if backend not in ("", *BACKENDS):
        raise ValueError(f"{op}: unknown backend {backend!r}: choose one of {', '.join(BACKENDS)}, or leave it empty")
    if backend == "torch" or forced_plain:
        return "torch"
    if backend == "fused" and op in NO_LIBRARY:
        raise RuntimeError(f"{op}: {NO_LIBRARY[op]}: leave backend empty")
    default = not backend and op in fused.BY_DEFAULT and not libraries_off
    if op in fused.LIBRARIES and (backend == "fused" or default):
        reason = f"the tensors are on {device}" if device != fused.GPU else fused.refusal(op, dtype) or library_cannot
        reason = reason or fused.load(op)[1]
        if reason is None:
            tunes = ", whose kernels are tuned at their first start, for minutes" if op in fused.BY_DEFAULT else ""
            say_once(f"{op}: {fused.LIBRARIES[op][0]}{tunes}")
            return "fused"
        if backend:
            raise RuntimeError(f"{op}: backend 'fused' cannot run here: {reason}: leave backend empty, or pip install "
                               "-r requirements-gpu.txt on a machine with a GPU")
        if device == "cuda":
            say_once(f"{op}: chunks in PyTorch ({reason})")
    if backend == "fused":  # rms_norm and linear_cross_entropy: no library is faster
        backend = ""
    if op not in NATIVE:
        if backend not in ("", device):
            raise RuntimeError(f"{op}: backend {backend!r} cannot run here: the tensors are on {device}")
        return device
    return _choose_native(op, backend, device, dtype, cannot, inside)


def _choose_native(op, backend, device, dtype, cannot, inside):
    if dtype not in (None, *DTYPES):
        cannot = f"the kernels take {fused.names(DTYPES)}, got {fused.names([dtype])}"
    if inside:
        reason = "there is no forward-mode derivative and no rule for torch.func: use backend='torch'"
    elif cannot and not backend:
        return "torch"
    elif backend and backend != device:
        reason = unavailable(backend) or f"the tensors are on {device}"
    else:
        reason = unavailable(device) or (f"{cannot}: use backend='torch'" if cannot else None)
    if reason is None:
        return device
    if backend:
        raise RuntimeError(f"{op}: backend {backend!r} cannot run here: {reason}")
    say_once(f"native kernels: plain PyTorch runs instead, much slower ({reason})")
    return "torch"


@functools.cache
def say_once(line):
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":  # once per machine
        with contextlib.suppress(OSError):  # a full disk behind stderr must not end a run
            print(line, file=sys.stderr, flush=True)


@functools.cache
def unavailable(device):
    """None if the native kernels can run on `device`, else the reason, in one line. Raises RuntimeError if their source
    is at fault and not the machine: a run would go on without an edit of it."""
    if device not in ("cpu", "cuda"):
        return f"there are no kernels for {device}"
    if device == "cuda":
        if not torch.cuda.is_available():
            return "PyTorch sees no GPU"
        if min(map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))) < (8, 0):
            return ("the kernels need GPUs of compute capability 8.0 (Ampere) or later: hide others with "
                    "CUDA_VISIBLE_DEVICES")
        return cuda.missing()
    try:
        library()
    except Broken as error:
        raise RuntimeError(f"{' '.join(str(error).split())}: correct that, or use --backend=torch, plain PyTorch "
                           "everywhere") from None
    except OSError as error:
        return " ".join(str(error).split())
    return None


def autocast_dtype(device):
    """Autocast's dtype on `device`; None if autocast is off, or does not exist there (meta)."""
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


def compute_dtype(x):
    """The dtype in which an operator computes with x: autocast's if it is on, else x's own; float64 stays float64."""
    return x.dtype if x.dtype == torch.float64 else autocast_dtype(x.device.type) or x.dtype


# ------------------------------------------------------------------------------------------------------------- building

def _flags(openmp):
    native = ["-mcpu=native"] if platform.machine() in ("arm64", "aarch64") else ["-march=native"]
    return ["-x", "c++", "-std=c++17", "-O3", *native, "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared",
            "-Wno-unknown-pragmas", *(["-fopenmp"] if openmp else [])]


def _cpu_name():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    except OSError:
        return platform.platform() + platform.processor()


def build(sources=(SCAN, CONV), folder=None):
    """Compile `sources` into one library for this CPU, unless it is cached; returns (path, seconds of compiling).

    If several processes call it at the same time, one builds and the others wait for a file lock. The folder is
    `folder`, $LONGHORN_BUILD_DIR or build/ of this repository. Raises OSError with the compiler's message.
    """
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        raise OSError("no C++ compiler found (install g++ or clang++, or set CXX)")
    if sys.platform != "darwin":  # Apple's clang has no OpenMP
        try:
            return _compile(shlex.split(compiler), _flags(openmp=True), sources, folder)
        except Broken:
            raise  # it would not compile without OpenMP either
        except OSError:
            pass
    return _compile(shlex.split(compiler), _flags(openmp=False), sources, folder)


class Broken(OSError):
    """The kernels' source is at fault: it does not compile, although the compiler works, or contradicts this file."""


# What the sources need of a compiler: if it builds this and not them, the source is at fault.
NEEDED = """
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <initializer_list>
typedef float vec __attribute__((vector_size(32)));
typedef uint32_t uvec __attribute__((vector_size(32)));
typedef uint16_t hvec __attribute__((vector_size(16)));
template <int N> vec widen(hvec h, vec low) {
    vec v = (vec)(__builtin_convertvector(h, uvec) << 16);
    if constexpr (N == 1) return v < low ? 1.0f - (vec){} : v; else return v;
}
template vec widen<1>(hvec, vec);
"""


def _compile(compiler, flags, sources, folder):
    try:
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise OSError(f"the compiler {compiler[0]!r} does not run: {error}") from None
    command = [*compiler, *flags]

    def make(to):
        run = subprocess.run([*command, *map(str, sources), "-o", str(to)], capture_output=True, text=True)
        if run.returncode:
            names = " and ".join(Path(source).name for source in sources)
            known = subprocess.run([*command, "-", "-o", str(to)], input=NEEDED, capture_output=True, text=True)
            raise (OSError if known.returncode else Broken)(
                f"{compiler[0]} could not build {names}: {run.stderr.strip()[:500]}")

    return _cached("longhorn_scan_cpu", ".so", [version, _cpu_name(), *command], sources, folder, make)


def build_cuda(update, dtype, shape, architecture, way=None, source=None, folder=None):
    """`build` for a GPU architecture such as 'sm_90': the scan for one update, dtype and `cuda_shape`, or with update
    "conv" the convolution for one dtype and width shape[0]. way: one of `cuda.ways`; None: the first that works."""
    if way is None:
        return _first_that_works(architecture, lambda way: build_cuda(update, dtype, shape, architecture, way, source,
                                                                      folder))
    (compiler, kind, target), source = way, source or (CONV if update == "conv" else SCAN)
    macros = cuda.defines(update, dtype, *shape)
    name = f"{update}_{target}_{cuda.TYPES[dtype]}_{'x'.join(map(str, shape))}"
    make = lambda to: cuda.compile_kernels(source, to, *way, macros)
    key = [cuda.compiler_version(compiler), *cuda.OPTIONS[compiler], *way, *macros]
    return _cached(name, f".{kind}", key, (source,), folder, make)


def _first_that_works(architecture, make):
    errors = []
    for way in cuda.ways(architecture):
        try:
            return make(way)
        except (OSError, RuntimeError) as error:
            errors.append(f"{' '.join(way)}: {error}")
    raise OSError("; ".join(errors[:2]))  # the rest, PTX, failed for the same reasons


def _cached(name, suffix, key, sources, folder, make):
    """(path, seconds) of the file that make(path) writes, cached by a hash of `key` and the sources."""
    folder = _private(Path(folder or os.environ.get("LONGHORN_BUILD_DIR") or ROOT / "build"))
    read = lambda: b"".join(Path(path).read_bytes() for path in (*sorted(HEADER.parent.glob("*.h")), *sources))
    text = read()
    stem = f"{name}_{hashlib.sha256(chr(0).join(key).encode() + text).hexdigest()[:16]}"
    if path := _intact(folder, stem):  # no lock and no write permission needed
        return path, 0.0
    try:
        folder.mkdir(0o755, parents=True, exist_ok=True)  # whatever the umask
        lock = open(folder / f"{stem}.lock", "a")
    except OSError as error:
        message = f"cannot write to {folder} ({error.strerror}): set LONGHORN_BUILD_DIR to a writable folder"
        raise OSError(message) from None
    with lock:
        import fcntl  # not on Windows, where there is no native build either

        with contextlib.suppress(OSError):  # some network file systems have no locks; the rename is atomic anyway
            fcntl.flock(lock, fcntl.LOCK_EX)
            remove_leftovers(glob.escape(str(folder / stem)))
        if path := _intact(folder, stem):
            return path, 0.0
        start, tmp = time.perf_counter(), Path(temporary(folder / stem))
        make(tmp)
        if read() != text:  # the file's name says that it is of the former text
            os.unlink(tmp)
            raise Broken(f"{' or '.join(Path(path).name for path in sources)} was edited while it was compiled")
        with open(tmp, "rb+") as f:
            path = folder / f"{stem}_{hashlib.sha256(f.read()).hexdigest()[:16]}{suffix}"
            os.fsync(f.fileno())
        os.chmod(tmp, 0o755)
        os.replace(tmp, path)
        return path, time.perf_counter() - start


def _private(folder):
    """`folder`, or one in the user's cache if others may write there. Raises OSError if they may write to both."""
    if not folder.is_dir() or _is_ours(folder):
        return folder
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "longhorn"
    with contextlib.suppress(OSError):
        cache.mkdir(0o700, parents=True, exist_ok=True)
    if not cache.is_dir() or not _is_ours(cache):
        raise OSError(f"other users may write to {folder}, and {cache} is no folder of ours: set LONGHORN_BUILD_DIR to "
                      "a folder that only you can write to")
    say_once(f"native kernels: other users may write to {folder}: using {cache} instead")
    return cache


def _is_ours(path):
    """True if nobody but this user and root can have written the file, or into the folder."""
    status = path.stat()
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022


def _intact(folder, stem):
    """The cached file, if it is ours and its content matches the hash in its name: loading a truncated file would raise
    SIGBUS."""
    for path in folder.glob(f"{stem}_*"):
        with contextlib.suppress(OSError):
            if _is_ours(path) and path.stem.endswith(hashlib.sha256(path.read_bytes()).hexdigest()[:16]):
                return path
    return None


def _struct(name, fields):
    """A ctypes mirror of a struct in the sources; * marks a pointer, & a double, the rest are int64."""
    kinds = {"*": ctypes.c_void_p, "&": ctypes.c_double}
    fields = [(f.strip("*&"), kinds.get(f[0], ctypes.c_int64)) for f in fields.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


ScanArgs = _struct("ScanArgs", """B T D N update softplus dtype splits threads segments segment_T reverse
    *cu *x *dt *k *q *z x_b x_t dt_b dt_t k_b k_t q_b q_t z_b z_t *A *skip *bias *h0 *y out_t *hT *chunks
    *decay *dy dy_b dy_t *dhT *dx *ddt *dz *dk *dq *dA *dskip *dbias *dh0""")
ConvArgs = _struct("ConvArgs", """B T D W dtype silu splits threads *x x_b x_t *weight *bias *state *y
    out_t *dy dy_b dy_t *dx *dweight *dbias *dstate""")
NormArgs = _struct("NormArgs", "rows D tasks threads x_dtype y_dtype *x *dy *weight *rstd *y *dx *dweight &eps")


FUNCTIONS = [f"{operator}_{way}_cpu" for operator in ("longhorn_scan", "causal_conv", "rms_norm")
             for way in ("forward", "backward")]


def load(path):
    """The library at `path`. Raises OSError if a function is missing, Broken if its structs or constants differ from
    those above."""
    lib = ctypes.CDLL(str(path))
    structs = {"scan_args_size": ScanArgs, "conv_args_size": ConvArgs, "norm_args_size": NormArgs}
    try:
        for name in ("longhorn_chunk", "longhorn_lanes", "longhorn_max_width", *structs):
            getattr(lib, name).restype = ctypes.c_int64
        for name in ("longhorn_has_openmp", *FUNCTIONS):
            getattr(lib, name)
    except AttributeError as error:
        raise OSError(error) from None
    if any(getattr(lib, name)() != ctypes.sizeof(struct) for name, struct in structs.items()):
        raise Broken(cuda.DISAGREE)
    if (lib.longhorn_chunk(), lib.longhorn_max_width()) != (CHUNK, MAX_WIDTH):
        raise Broken(STEPS_DISAGREE)
    return lib


@functools.cache
def library():
    """The native CPU library, built on first use and announced once. Raises OSError with the compiler's message."""
    path, seconds = build()
    try:
        lib = load(path)
    except OSError:
        if seconds:
            raise
        path.unlink(missing_ok=True)  # another program's, or of a compiler that failed silently
        path, seconds = build()
        lib = load(path)
    simd = {16: "avx512", 8: "8 lanes", 4: "4 lanes"}[lib.longhorn_lanes()]
    openmp = "OpenMP" if lib.longhorn_has_openmp() else "one thread (no OpenMP in this compiler)"
    _announce(f"cpu {simd}", openmp, seconds)
    return lib


@functools.cache
def cuda_module(update, dtype, shape, architecture, device):
    """The kernels of `build_cuda`, built and loaded on first use, in the first way that works. Raises OSError."""
    kernels, args = (cuda.CONV_KERNELS, ConvArgs) if update == "conv" else (cuda.SCAN_KERNELS, ScanArgs)

    def make(way):
        path, seconds = build_cuda(update, dtype, shape, architecture, way)
        with torch.cuda.device(device):
            module = cuda.Module(path.read_bytes(), kernels, ctypes.sizeof(args), device=device)
        if module.steps != (CONV_TILE if update == "conv" else CHUNK):
            raise Broken(STEPS_DISAGREE)
        _announce(" ".join(way), f"{update} {cuda.TYPES[dtype]} {'x'.join(map(str, shape))}", seconds)
        return module

    return _first_that_works(architecture, make)


def _announce(where, words, seconds):
    say_once(f"native kernels: {where}, {words} ({f'built in {seconds:.1f} s' if seconds else 'cached'})")


# ---------------------------------------------------------------------------------------------------- shapes on a GPU

def backward_bytes(update, P, L):
    """Shared memory of a block that needs the most, the backward without rows fetched ahead: BackwardShared in
    longhorn_scan.cu."""
    keys = 2 * CHUNK * P * L + CHUNK  # k, q, |k|^2
    per_lane = CHUNK // SUB * 2 * P + SUB + (2 * P if update == "mamba" else 1)  # states, gated, rates
    sums = CUDA_THREADS // 32 * SUB * (2 * P * L + 1)  # dk, dq, d|k|^2
    return 4 * (keys + CUDA_THREADS * per_lane + sums)


def blocks_at_once(update, shape, shared):
    """The backward blocks that fit a multiprocessor with `shared` bytes of shared memory; 0: none can be launched."""
    return shared // (backward_bytes(update, *shape) + cuda.RESERVED)


@functools.cache
def cuda_shape(update, B, T, D, N, multiprocessors, shared, may_split=True):
    """(P, L), one of CUDA_SHAPES: L lanes share two channels, and each holds P states of both (P * L is N, padded to a
    power of two >= 8).

    shared: bytes of shared memory per multiprocessor. Eight states per lane take the least work; four, if two
    blocks would fit a multiprocessor with four and not with eight, or multiprocessors would be idle even with T split
    into segments.
    That two blocks per multiprocessor are enough no GPU has confirmed. Raises ValueError if no block fits.
    """
    states = max(8, 1 << (N - 1).bit_length())
    launched = [shape for shape in CUDA_SHAPES if blocks_at_once(update, shape, shared)]
    fitting = [(P, L) for P, L in launched if P * L == states]
    if not fitting:
        most = max(P * L for P, L in launched)
        raise ValueError(f"scan: on this GPU, with {shared >> 10} KB of shared memory per multiprocessor, the CUDA "
                         f"kernels of {update} take up to {most} states per channel, got {N}: use backend='torch'")
    four, eight = min(fitting), max(fitting)
    lanes = D * states // (2 * eight[0])
    most = max(1, T // SEGMENT) if may_split and T % CHUNK == 0 else 1
    idle = most * B * -(-lanes // CUDA_THREADS) < 2 * multiprocessors
    crowded = blocks_at_once(update, eight, shared) < 2 <= blocks_at_once(update, four, shared)
    return four if idle or crowded else eight


def cuda_segments(update, dtype, shape, blocks, T, multiprocessors, shared, backward=True):
    """The number of segments, of at least SEGMENT steps, to split T into; a kernel has `blocks` blocks per segment.

    With more than SPLIT_BELOW blocks per multiprocessor T stays whole. Otherwise blocks would wait for memory, so T is
    split to get as many as fit at once in the backward: registers are there for three in 16 bits, else for two. Joining
    the segments costs the forward about as much again, the backward a quarter of that, for any number of segments. So
    the forward is split later: 8 x 4096 tokens of 1536 channels on an H200, 0.73 blocks per multiprocessor, took 0.38
    ms whole and 0.45 split; the backward 2.06 and 1.22.
    """
    if blocks > cuda.tuning("SPLIT_BELOW", SPLIT_BELOW[backward]) * multiprocessors:
        return 1
    at_once = min(3 if dtype.itemsize == 2 else 2, blocks_at_once(update, shape, shared))
    fill = cuda.tuning("FILL", max(2, at_once))
    return max(1, min(T // SEGMENT, fill * multiprocessors // blocks))


def segment_sizes(T, segments):
    """Whole chunks per segment, the last one shorter; rounding may leave fewer segments."""
    segment_T = -(-T // (segments * CHUNK)) * CHUNK
    return {"segments": -(-T // segment_T), "segment_T": segment_T}


# ------------------------------------------------------------------------------------------------- calling the library

class Kernels:
    """The library and argument struct for one call on x (B, T, D); the kernels read and write `dtype`.

    update: the scan's, one of UPDATES; None: the convolution. rows: the number of packed sequences; None: x's B.
    gated: the scan has z; without it T is not split. backward: the call is the scan's backward.
    With `reversed` set, rows and steps run from last to first in all tensors (B, T, ...) that are read by strides and
    in OUT; tensors without T, or (.., B, T, N), stay in the order in which the kernels run.
    """

    OUT = ("y", "dx", "ddt", "dz")  # (B, T, D) contiguous
    reversed = False

    def __init__(self, args_class, x, update=None, rows=None, gated=False, backward=False, **sizes):
        threads = torch.get_num_threads()
        self.__dict__ |= _prepare(args_class, x.shape, x.dtype, x.device, update, rows, gated, backward, threads,
                                  **sizes)
        self.args = args_class.from_buffer_copy(self.args)

    def __call__(self, function, rows, floats, **buffers):
        """Point the struct at tensors and call a library function; absent tensors (None) stay null.

        rows: (B, T, C) each, read in `dtype` with their strides, copied only if the last dimension is not contiguous or
        the rows of segments are not aligned. floats: read as contiguous float32. buffers: passed unchanged.
        """
        args, size, sign = self.args, self.dtype.itemsize, -1 if self.reversed else 1
        tensors, args.out_t = {n: cast(a, self.dtype) for n, a in rows.items() if a is not None}, sign * args.D
        for name, a in tensors.items():
            b, t, d = a.stride()
            fits = t * size < 2**31 and (d == 1 or a.shape[2] == 1)  # the kernels' strides in bytes have 32 bits
            if not fits or self.aligned > 1 and (a.data_ptr() | b * size | t * size) % self.aligned:
                tensors[name] = a = a.clone(memory_format=torch.contiguous_format)
                b, t, d = a.stride()
            setattr(args, name + "_b", sign * b)
            setattr(args, name + "_t", sign * t)
        tensors |= {n: cast(a).contiguous() for n, a in floats.items() if a is not None}
        tensors |= {n: a for n, a in buffers.items() if a is not None}
        point(args, **tensors)  # the dict keeps the copies alive until the function returns
        for name, a in tensors.items() if self.reversed else ():
            if name in rows or name in self.OUT:  # start at the last row
                last = (a.shape[0] - 1) * a.stride(0) + (a.shape[1] - 1) * a.stride(1)
                setattr(args, name, a.data_ptr() + last * a.itemsize)
        self.run(function)

    def run(self, function):
        if self.module is None:
            return getattr(library(), function + "_cpu")(ctypes.byref(self.args))
        index = self.device.index
        stream = raw_stream(index)
        if index == torch.cuda.current_device():
            return self.launch(function, stream)
        with torch.cuda.device(index):
            self.launch(function, stream)

    def launch(self, function, stream):
        a, module = self.args, self.module
        kernel = function.removeprefix("longhorn_scan_").removeprefix("causal_") + "_kernel"
        whole = kernel.replace("_kernel", "_whole_kernel")
        if kernel in FETCHED and self.is_whole(FETCHED[kernel]) and module.has_room(whole, kernel):
            kernel = whole
        blocks = a.B * -(-a.D * a.N // module.threads) if kernel == "combine_kernel" else a.B * self.segments * a.splits
        if blocks:
            module.launch(kernel, blocks, a, stream)

    def is_whole(self, rows):
        """True if the kernels without bounds checks can run: whole chunks and blocks, `rows` present and aligned for
        16-byte copies, k and q for copies of four numbers."""
        a, size = self.args, self.dtype.itemsize
        if a.cu or a.T % CHUNK or a.D % self.module.channels or a.N != self.module.states:
            return False
        for name, part in (*[(n, 16) for n in rows], ("k", 4 * size), ("q", 4 * size)):
            address, b = getattr(a, name), getattr(a, name + "_b") if a.B > 1 else 0  # with one row, b is arbitrary
            if not address or (address | (b | getattr(a, name + "_t")) * size) % part:
                return False
        return True

    def initial_segment_states(self, rows, floats, function, initial, reverse=0):
        """The state before each segment of T, (rows, segments, D, N): `function` computes each segment's final state
        from a zero state, combine_kernel joins them. In reverse: the gradient after each segment."""
        a = self.args
        states, decay = (empty(next(iter(rows.values())), a.B * a.segments, a.D, a.N) for _ in range(2))
        self(function, rows, floats, hT=states, decay=decay)
        self.args.reverse = reverse
        self("longhorn_scan_combine", {}, {"dhT" if reverse else "h0": initial}, hT=states, decay=decay)
        return states


@functools.lru_cache(1024)
def _prepare(args_class, shape, dtype, device, update, rows, gated, backward, threads, **sizes):
    """The attributes of Kernels that depend only on shapes, dtypes and devices; copy `args`. module: None on a CPU."""
    (B, T, D), module, segments = shape, None, 1  # segments of T; for the convolution, its tiles
    B = B if rows is None else rows
    if device.type == "cuda":
        gpu, threads = torch.cuda.get_device_properties(device), 0
        architecture = f"sm_{gpu.major}{gpu.minor}"
        if update is None:
            module, segments = cuda_module("conv", dtype, (sizes["W"],), architecture, device.index), -(-T // CONV_TILE)
        else:
            # joining segments of `exact` would take products of N x N matrices; segments run only as whole chunks
            may_split = gated and rows is None and update != "exact"
            shared = gpu.shared_memory_per_multiprocessor
            layout = cuda_shape(update, B, T, D, sizes["N"], gpu.multi_processor_count, shared, may_split)
            module = cuda_module(update, dtype, layout, architecture, device.index)
            row_bytes = module.channels // (module.threads // 32) * dtype.itemsize  # per warp, fetched 16 at a time
            whole = T % CHUNK == 0 and D % module.channels == 0 and sizes["N"] == module.states
            if may_split and whole and row_bytes >= 16:
                segments = cuda_segments(update, dtype, layout, B * D // module.channels, T, gpu.multi_processor_count,
                                         shared, backward)
        if T >= 2**31 - CUDA_THREADS or 2 * D * 4 >= 2**31:  # steps; bytes of a row, which may be half of a wider one
            raise ValueError(f"{T} steps of {D} channels: the kernels for a GPU take up to "
                             f"{2**31 - CUDA_THREADS - 1} and {2**28 - 1}: use backend='torch'")
        splits = -(-D // module.channels)  # blocks that share a row
        if B * segments * splits >= 2**31:
            raise ValueError(f"{B} rows of {D} channels take {B * segments * splits} blocks, but a GPU starts up to "
                             f"{2**31 - 1}: split the batch")
    else:
        dtype = torch.float32 if dtype == torch.float16 else dtype
        groups, splits = -(-D // library().longhorn_lanes()), 1
        while B * splits % threads and B * splits < 4 * threads and splits < groups:
            splits += 1  # until all threads have equal work
    if update is not None:
        sizes |= segment_sizes(T, segments) | {"update": UPDATES.index(update)}
        segments = sizes["segments"]
    args = args_class(B=B, T=T, D=D, splits=splits, threads=threads, dtype=int(dtype == torch.bfloat16), **sizes)
    aligned = 16 if update is not None and segments > 1 else 1  # bytes to which fetched rows must be aligned
    return dict(device=device, dtype=dtype, module=module, segments=segments, aligned=aligned, args=args)


def kept_states(x, N):
    """States per channel stored at a chunk boundary: N, on a GPU rounded up to a multiple of four."""
    return -(-N // 4) * 4 if x.is_cuda else N


def cast(a, dtype=torch.float32):
    """a in `dtype`; None stays None. Saves the microseconds that Tensor.to takes even if there is nothing to do."""
    return a if a is None or a.dtype == dtype else a.to(dtype)


def point(args, **tensors):
    """Write the tensors' addresses into a struct; the caller must keep the tensors alive."""
    for name, a in tensors.items():
        setattr(args, name, a.data_ptr())
    return ctypes.byref(args)


def empty(x, *shape, dtype=torch.float32):
    """An uninitialised tensor on x's device: kernels write every element of their results."""
    return torch.empty(shape, dtype=dtype, device=x.device)
