"""Builds the native libraries on first use, caches them and loads them with ctypes.

A C++ compiler builds longhorn_scan.cu and conv_norm.cu for the CPU. nvcc or NVRTC builds both of them, loss.cu and
sums.cu for a GPU. PyTorch's headers are not needed. Libraries are cached under build/, keyed by a hash of source,
flags, compiler and machine; $LONGHORN_BUILD_DIR sets another folder, $CXX and $NVCC other compilers. A GPU gets one
library per dtype and state shape, convolution width or vocabulary. Each compiles in seconds; all of them would take
minutes.

A library that another user (except root) could have written is never loaded: if others may write to the folder, the
libraries are built in ~/.cache/longhorn instead.
"""

import collections
import contextlib
import ctypes
import fcntl
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
from kernels import cuda

ROOT = Path(__file__).resolve().parent.parent
SCAN = ROOT / "longhorn_scan.cu"
CONV = ROOT / "kernels" / "conv_norm.cu"
LOSS = ROOT / "kernels" / "loss.cu"
SUMS = ROOT / "kernels" / "sums.cu"
HEADER = ROOT / "kernels" / "lanes.h"
CHUNK = 32  # the forward keeps a state every CHUNK steps; CHUNK in longhorn_scan.cu
MAX_WIDTH = 8  # widest convolution that the kernels take; MAX_WIDTH in conv_norm.cu
CUDA_THREADS = 128  # threads per block; THREADS in lanes.h
BLOCK_SUMS = 32  # sums per block of the kernel in sums.cu
CONV_TILE = 64  # steps per thread of the CUDA convolution; CONV_TILE in conv_norm.cu


@functools.cache
def say_once(line):
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":  # once per machine
        with contextlib.suppress(OSError):  # a full disk behind stderr must not end a run
            print(line, file=sys.stderr, flush=True)


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
    """Compile `sources` into one library for this CPU, unless it is cached. Returns (path, compile time in seconds).

    If several processes call it at the same time, one builds and the others wait for a file lock. The library goes
    to `folder`, $LONGHORN_BUILD_DIR or this repository's build/. Raises OSError with the compiler's message.
    """
    compiler = os.environ.get("CXX", "").strip() or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        raise OSError("no C++ compiler found (install g++ or clang++, or set CXX)")
    try:
        return _compile(shlex.split(compiler), _flags(openmp=True), sources, folder)
    except Broken:
        raise  # it would not compile without OpenMP either
    except OSError:  # Apple's clang has no OpenMP
        return _compile(shlex.split(compiler), _flags(openmp=False), sources, folder)


class Broken(OSError):
    """The kernels' source is at fault: a working compiler refuses it, or its structs or constants differ from ours."""


# A smoke test: if the compiler builds this but not the kernels, the kernels' source is at fault.
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
    """Like `build`, for a GPU architecture such as 'sm_90'. update: the scan's, or "conv", "loss" or "sums". shape:
    as in `cuda.defines`. way: one of `cuda.ways`; None: the first that works."""
    if way is None:
        return _first_that_works(architecture, lambda way: build_cuda(update, dtype, shape, architecture, way, source,
                                                                      folder))
    (compiler, kind, target), source = way, source or source_of(update).path
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
    raise OSError("; ".join(errors[:2]))  # the later ways, to PTX, failed for the same reasons


def _cached(name, suffix, key, sources, folder, make):
    """Return (path, seconds) of the file named by a hash of `key` and the sources. If missing, make(path) writes it."""
    folder = _private(Path(folder or os.environ.get("LONGHORN_BUILD_DIR") or ROOT / "build"))
    headers = sorted([*ROOT.glob("*.h"), *HEADER.parent.glob("*.h")])
    read = lambda: b"".join(Path(path).read_bytes() for path in (*headers, *sources))
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
        with contextlib.suppress(OSError):  # some network file systems have no locks; the rename is atomic anyway
            fcntl.flock(lock, fcntl.LOCK_EX)
            remove_leftovers(glob.escape(str(folder / stem)))
        if path := _intact(folder, stem):
            return path, 0.0
        start, tmp = time.perf_counter(), Path(temporary(folder / stem))
        make(tmp)
        if read() != text:  # the file's name would carry the hash of the old text
            os.unlink(tmp)
            raise Broken(f"{' or '.join(Path(path).name for path in sources)} was edited while it was being compiled")
        with open(tmp, "rb+") as f:
            path = folder / f"{stem}_{hashlib.sha256(f.read()).hexdigest()[:16]}{suffix}"
            os.fsync(f.fileno())
        os.chmod(tmp, 0o755)
        os.replace(tmp, path)
        return path, time.perf_counter() - start


def _private(folder):
    """`folder`, or a folder in the user's cache if others may write to `folder`. Raises OSError if they may write to
    both."""
    if not folder.is_dir() or _is_ours(folder):
        return folder
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "longhorn"
    with contextlib.suppress(OSError):
        cache.mkdir(0o700, parents=True, exist_ok=True)
    if not cache.is_dir() or not _is_ours(cache):
        raise OSError(f"other users may write to {folder}, and {cache} is not yours alone: set LONGHORN_BUILD_DIR to "
                      "a folder that only you can write to")
    say_once(f"native kernels: other users may write to {folder}: using {cache} instead")
    return cache


def _is_ours(path):
    """True if only this user or root can have written this file, or into this folder."""
    status = path.stat()
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022


def _intact(folder, stem):
    """The cached file, if it is ours and its content matches the hash in its name, else None. Loading a truncated file
    would raise SIGBUS."""
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
    *decay *dy dy_b dy_t *dhT *dx *ddt *dz dz_t *dk *dq *dA *dskip *dbias *dh0""")
ConvArgs = _struct("ConvArgs", """B T D W dtype silu splits threads *x x_b x_t *weight *bias *state *y
    out_t *dy *dy_again dy_b dy_t dy_again_b dy_again_t *dx *dweight *dbias *dstate""")
NormArgs = _struct("NormArgs", "rows D tasks threads x_dtype y_dtype *x *dy *weight *rstd *y *dx *dweight &eps")
LossArgs = _struct("LossArgs", "V stride train *logits *targets *log_p")
Sum = _struct("Sum", "first parts n columns type *source *to")
SumsArgs = type("SumsArgs", (ctypes.Structure,), {"_fields_": [("of", 5 * Sum)]})  # TENSORS of sums.cu

Source = collections.namedtuple("Source", "path kernels args steps")  # of GPU kernels; steps: per chunk or tile
SOURCES = {"conv": Source(CONV, cuda.CONV_KERNELS, ConvArgs, CONV_TILE),
           "loss": Source(LOSS, cuda.LOSS_KERNELS, LossArgs, 0),
           "sums": Source(SUMS, cuda.SUMS_KERNELS, SumsArgs, 0)}


def source_of(update):
    """The Source of `update`, which is a key of SOURCES or an update of the scan."""
    return SOURCES.get(update, Source(SCAN, cuda.SCAN_KERNELS, ScanArgs, CHUNK))


def load(path):
    """Load the library at `path`. Raises OSError if that fails, Broken if the library's structs or constants differ
    from this file's."""
    lib = ctypes.CDLL(str(path))
    ours = {"longhorn_chunk": CHUNK, "longhorn_max_width": MAX_WIDTH, "scan_args_size": ctypes.sizeof(ScanArgs),
            "conv_args_size": ctypes.sizeof(ConvArgs), "norm_args_size": ctypes.sizeof(NormArgs)}
    for name, number in ours.items():
        getattr(lib, name).restype = ctypes.c_int64
        if getattr(lib, name)() != number:
            raise Broken(cuda.DISAGREE)
    return lib


@functools.cache
def library():
    """The native CPU library, built on first use and announced once. Raises OSError with the compiler's message."""
    path, seconds = build()
    try:
        lib = load(path)
    except OSError:
        path.unlink(missing_ok=True)  # the compiler failed silently: the next run builds it again
        raise
    openmp = "OpenMP" if lib.longhorn_has_openmp() else "one thread (no OpenMP in this compiler)"
    _announce(f"cpu {lib.longhorn_lanes()} lanes", openmp, seconds)
    return lib


@functools.cache
def cuda_module(update, dtype, shape, architecture, device):
    """The kernels of `build_cuda`, built and loaded on first use, in the first way that works. Raises OSError."""
    source = source_of(update)

    def make(way):
        path, seconds = build_cuda(update, dtype, shape, architecture, way)
        with torch.cuda.device(device):
            module = cuda.Module(path.read_bytes(), source.kernels, ctypes.sizeof(source.args), device=device)
        if module.steps != source.steps:
            raise Broken(cuda.DISAGREE)
        _announce(" ".join(way), f"{update} {cuda.TYPES[dtype]} {'x'.join(map(str, shape))}", seconds)
        return module

    return _first_that_works(architecture, make)


def _announce(where, words, seconds):
    say_once(f"native kernels: {where}, {words} ({f'built in {seconds:.1f} s' if seconds else 'cached'})")
