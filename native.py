"""The native library: longhorn_scan.cu built by the C++ compiler on first use, loaded through ctypes.

The surprise: nothing is built at install time, and no PyTorch header is used. The library is kept under build/ by a
hash of source, flags, compiler and CPU; a second process, or a second run, finds it there. $LONGHORN_BUILD_DIR puts it
elsewhere, $CXX names another compiler.

    python native.py            # build now, and say what came out
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("longhorn_scan.cu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BACKENDS = ("cpu", "cuda", "torch")
CHUNK = 32  # steps between the states that the forward keeps; CHUNK of longhorn_scan.cu


# ------------------------------------------------------------------------------------------------------ which body runs

@torch.compiler.assume_constant_result
def choose(op, backend, device, not_native):
    """The one place that decides: 'cpu', 'cuda' or 'torch'."""
    if backend not in (None, *BACKENDS):
        raise ValueError(f"scan: unknown backend {backend!r}: choose one of {', '.join(BACKENDS)}, or None")
    if backend == "torch" or (backend is None and not_native):
        return "torch"
    wanted = backend or device
    reason = unavailable(wanted) if wanted in ("cpu", "cuda") else f"there are no kernels for {wanted}"
    if reason is None and wanted != device:
        reason = f"the tensors are on {device}"
    if reason is None and not_native:
        reason = "the kernels take float32, bfloat16 and float16, and convolutions up to width 8: use backend='torch'"
    if reason is None:
        return wanted
    if backend is not None:
        raise RuntimeError(f"{op}: backend {backend!r} cannot run here: {reason}")
    say_once(f"scan: torch, much slower than the native kernels ({reason})")
    return "torch"


@functools.cache
def say_once(line):
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)


@functools.cache
def unavailable(device):
    """None if the kernels of `device` can run, else the reason, in one line."""
    if device == "cuda":
        return "PyTorch sees no GPU" if not torch.cuda.is_available() else "the CUDA kernels are not written yet"
    try:
        library()
    except OSError as error:
        return " ".join(str(error).split())
    return None


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


def build(source=SOURCE, folder=None):
    """Compile `source` for this CPU unless that was done before; returns (path of the library, seconds spent building).

    Several processes may call it at once: one builds under a file lock, the others wait and find the file.
    The folder is `folder`, or $LONGHORN_BUILD_DIR, or build/ beside this file. Raises OSError with the compiler's words.
    """
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        raise OSError("no C++ compiler found (install g++ or clang++, or set CXX)")
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise OSError(f"the C++ compiler {compiler!r} does not run: {error}") from None
    folder = Path(folder or os.environ.get("LONGHORN_BUILD_DIR") or SOURCE.with_name("build"))
    folder.mkdir(parents=True, exist_ok=True)
    text, seconds, words = Path(source).read_bytes(), 0.0, ""
    attempts = [False] if sys.platform == "darwin" else [True, False]  # Apple's clang has no OpenMP
    for openmp in attempts:
        key = hashlib.sha256("\0".join([version, _cpu_name(), *_flags(openmp)]).encode() + text).hexdigest()[:16]
        path = folder / f"longhorn_scan_cpu_{key}.so"
        with open(folder / "lock", "w") as lock:
            _lock(lock)
            if path.exists():
                return path, seconds
            start, temporary = time.perf_counter(), path.with_suffix(f".{os.getpid()}.tmp")
            run = subprocess.run([compiler, *_flags(openmp), str(source), "-o", str(temporary)], capture_output=True, text=True)
            seconds += time.perf_counter() - start
            if run.returncode == 0:
                os.replace(temporary, path)
                return path, seconds
            words = words or run.stderr
    raise OSError(f"{compiler} could not build {Path(source).name}: {words.strip()[:500]}")


def _lock(file):
    import fcntl  # not on Windows, where there is no native build either

    fcntl.flock(file, fcntl.LOCK_EX)


def _struct(name, fields):
    """A ctypes mirror of a struct of longhorn_scan.cu; * marks a pointer, & a double, the rest are int64."""
    kinds = {"*": ctypes.c_void_p, "&": ctypes.c_double}
    fields = [(f.strip("*&"), kinds.get(f[0], ctypes.c_int64)) for f in fields.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


ScanArgs = _struct("ScanArgs", """B T D N dtype splits threads *x *dt *k *q *z x_b x_t dt_b dt_t k_b k_t q_b q_t z_b z_t
    *skip *bias *h0 *y *hT *chunks *dy dy_b dy_t *dhT *dx *ddt *dz *dk *dq *dskip *dbias *dh0""")
ConvArgs = _struct("ConvArgs", """B T D W dtype silu splits threads *x x_b x_t *weight *bias *state *y
    *dy dy_b dy_t *dx *dweight *dbias *dstate""")
NormArgs = _struct("NormArgs", "rows D tasks threads x_dtype y_dtype *x *dy *weight *rstd *y *dx *dweight &eps")


def load(path):
    """The library at `path`, checked against the structs above. Raises OSError if it is not of this native.py."""
    lib = ctypes.CDLL(str(path))
    for name in ("longhorn_chunk", "longhorn_lanes", "longhorn_max_width", "longhorn_args_size"):
        getattr(lib, name).restype = ctypes.c_int64
    if lib.longhorn_args_size() != (ctypes.sizeof(ScanArgs) * 1000 + ctypes.sizeof(ConvArgs)) * 1000 + ctypes.sizeof(NormArgs):
        raise OSError("native.py and longhorn_scan.cu disagree about the arguments: change the structs together")
    return lib


@functools.cache
def library():
    """The native CPU library, built on first use and announced once. Raises OSError with the compiler's words."""
    path, seconds = build()
    lib = load(path)
    simd = {16: "avx512", 8: "8 lanes", 4: "4 lanes"}[lib.longhorn_lanes()]
    openmp = "OpenMP" if lib.longhorn_has_openmp() else "one thread (this compiler has no OpenMP)"
    say_once(f"scan: cpu {simd}, {openmp} ({f'built in {seconds:.1f} s' if seconds else 'cached'})")
    return lib


# ------------------------------------------------------------------------------------------------- calling the library

def prepare(args_class, x, **sizes):
    """The argument struct for x (B, T, D), with sizes, dtype, threads and splits set, and the dtype the kernel computes in."""
    (B, T, D), threads = x.shape, torch.get_num_threads()
    dtype = torch.float32 if x.dtype == torch.float16 else x.dtype  # float16 is rare on CPUs: converted outside
    groups, splits = -(-D // library().longhorn_lanes()), 1
    while B * splits % threads and B * splits < 4 * threads and splits < groups:  # give every thread the same work
        splits += 1
    is_bf16 = int(dtype == torch.bfloat16)
    return args_class(B=B, T=T, D=D, splits=splits, threads=threads, dtype=is_bf16, **sizes), dtype


def call(function, args, rows, dtype, floats, **buffers):
    """Point `args` at tensors and call a function of the library; absent tensors (None) stay null.

    rows: (B, T, C) each, taken in `dtype` with their strides, copied only if the last dimension is not contiguous.
    floats: taken as contiguous float32. buffers: as they are.
    """
    def in_place(a):
        a = a.to(dtype)
        return a if a.stride(2) == 1 or a.shape[2] == 1 else a.contiguous()

    tensors = {n: in_place(a) for n, a in rows.items() if a is not None}
    for name, a in tensors.items():
        setattr(args, name + "_b", a.stride(0))
        setattr(args, name + "_t", a.stride(1))
    tensors.update({n: a.float().contiguous() for n, a in floats.items() if a is not None})
    tensors.update({n: a for n, a in buffers.items() if a is not None})
    for name, a in tensors.items():  # `tensors` also keeps the copies alive until the function returns
        setattr(args, name, a.data_ptr())
    getattr(library(), function)(ctypes.byref(args))


def autocast_dtype(device):
    """The dtype that autocast asks for on `device`, or None where it is off or, as on meta, does not exist."""
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if on else None


def empty(x, *shape, dtype=torch.float32):
    """An uninitialised tensor on x's device: kernels write every element of what they return."""
    return torch.empty(shape, dtype=dtype, device=x.device)


def register_autocast(op, casts):
    """Under autocast, cast the arguments of `op` at these positions and leave the rest: parameters and states stay
    float32, which torch.library.register_autocast would cast too."""
    for device in ("cpu", "cuda"):
        key = f"Autocast{device.upper()}"
        off = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

        def cast_then_call(*args, device=device, off=off):
            dtype = torch.get_autocast_dtype(device)
            cast = lambda a: a.to(dtype) if a is not None and a.dtype != torch.float64 else a
            with torch._C._ExcludeDispatchKeyGuard(off):
                return op(*(cast(a) if i in casts else a for i, a in enumerate(args)))

        _LIBRARY.impl(op.name().split("::")[1].split(".")[0], cast_then_call, key)


_LIBRARY = torch.library.Library("longhorn", "FRAGMENT")


def main():
    path, seconds = build()
    print(f"{path} ({f'built in {seconds:.1f} s' if seconds else 'built before'})")
    library()


if __name__ == "__main__":
    main()
