"""The native libraries: longhorn_scan.cu and conv_norm.cu built on first use, by the C++ compiler for the CPU, by nvcc for a GPU.

The surprise: nothing is built at install time, and no PyTorch header is used; what comes out is loaded through ctypes. A
library is kept under build/ by a hash of source, flags, compiler and machine; a second process, or a second run, finds
it there. $LONGHORN_BUILD_DIR puts it elsewhere, $CXX and $NVCC name other compilers. For a GPU there is one library a
dtype and shape of the state (`cuda_shape`) or width of the convolution: seconds each, where all would take minutes.

    python kernels/build.py            # build now, and say what came out
"""

import contextlib
import ctypes
import functools
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

from kernels import cuda, fused

ROOT = Path(__file__).resolve().parent.parent
SCAN, CONV = ROOT / "longhorn_scan.cu", ROOT / "kernels" / "conv_norm.cu"
SOURCES, HEADER = (SCAN, CONV), ROOT / "kernels" / "lanes.h"
DTYPES = fused.ALL
BACKENDS = ("torch", "cpu", "cuda", "fused")
CHUNK = 32  # steps between the states that the forward keeps; CHUNK of longhorn_scan.cu
MAX_WIDTH = 8  # of the convolution; MAX_WIDTH of conv_norm.cu
CUDA_THREADS = 128  # THREADS of lanes.h
CONV_TILE = 64  # steps that one thread of the CUDA convolution takes; CONV_TILE of conv_norm.cu
SEGMENT = 128  # steps: the least that T is split into on a GPU
LONE, JOINING = 1.5, {"forward": 0.9, "backward": 0.25}  # see cuda_segments
UPDATES = ("longhorn", "exact", "mamba")  # the enum of longhorn_scan.cu
FETCHED = {  # by the kernels that have a variant for whole chunks and blocks: these rows
    "forward_kernel": ("x", "dt", "z"), "backward_kernel": ("x", "dt", "z", "dy"), "ends_kernel": ("x", "dt"),
    "pulls_kernel": ("dt", "z", "dy"),
}


# ------------------------------------------------------------------------------------------------------ which body runs

BODIES = {  # operator: (where its fast body is written, where its plain PyTorch body is)
    "longhorn_scan": ("longhorn_scan.cu: Longhorn", "kernels/scan.py: _longhorn_step"),
    "selective_scan": ("longhorn_scan.cu: Mamba", "kernels/scan.py: _mamba_step"),
    "causal_conv1d": ("kernels/conv_norm.cu: conv_forward", "kernels/ops.py: _conv_torch"),
    "rms_norm": ("kernels/conv_norm.cu: rms_norm_forward_cpu", "kernels/ops.py: rms_norm"),
    "linear_cross_entropy": ("kernels/ops.py: _LinearCrossEntropy", "kernels/ops.py: linear_cross_entropy"),
    "attention": ("kernels/ops.py: attention", "kernels/ops.py: _softmax_attention"),
    "gated_linear_attention": ("kernels/linear_attention.py: _gla",
                               "kernels/linear_attention.py: gated_linear_attention_ref"),
    "retention": ("kernels/linear_attention.py: _retention", "kernels/linear_attention.py: retention_ref"),
    "delta_rule": ("kernels/linear_attention.py: _delta_rule", "kernels/linear_attention.py: delta_rule_ref"),
    "wkv4": ("kernels/linear_attention.py: _wkv4", "kernels/linear_attention.py: wkv4_ref"),
}
NATIVE = ("longhorn_scan", "selective_scan", "causal_conv1d", "rms_norm")  # the rest is PyTorch on every device
NO_LIBRARY = {"longhorn_scan": "no library has Longhorn's scan", "wkv4": "no library has RWKV-4's wkv"}
_forced_plain = set()


@contextlib.contextmanager
def plain(*ops):
    """Inside this context the named operators (keys of BODIES) run their plain PyTorch body, whatever `backend` says.

    Forward and backward must both lie inside: activation checkpointing chooses again in the backward. Not for code
    that torch.compile has compiled. Raises ValueError for an unknown name.
    """
    unknown = sorted(set(ops) - set(BODIES))
    if unknown:
        raise ValueError(f"plain: unknown operator {unknown[0]!r}: choose from {', '.join(BODIES)}")
    before = set(_forced_plain)
    _forced_plain.update(ops)
    try:
        yield
    finally:
        _forced_plain.clear()
        _forced_plain.update(before)


def constant_when_compiled(function):
    """torch.compiler.assume_constant_result, which would import torch._dynamo: 2 s of CPU at every start."""
    function._dynamo_marked_constant = True
    return function


def not_compiled(function):
    """torch.compiler.disable, applied only once torch._dynamo has been imported, for the same reason."""
    @functools.wraps(function)
    def run(*args, **kwargs):
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not hasattr(function, "disabled"):
            function.disabled = torch.compiler.disable(function)
        return function.disabled(*args, **kwargs)

    run._torchdynamo_disable = True  # a graph that reaches this function breaks here
    return run


def transformed():
    """Whether a transform of torch.func or forward-mode AD is active: the kernels have no rules for these."""
    return torch.autograd.forward_ad._current_level >= 0 or _in_torch_func()


@constant_when_compiled  # inside torch.func the tensors are of another kind, so that torch.compile makes a new graph
def _in_torch_func():
    return torch._C._functorch.peek_interpreter_stack() is not None


def choose(op, backend, device, dtype=None, cannot=None, library_cannot=None):
    """Which body of operator `op` runs: 'torch' (plain PyTorch), 'fused' (a library's GPU kernel), or the device itself
    ('cpu', 'cuda') for this repository's own body there. Every operator asks here.

    Args:
        op: a key of BODIES.
        backend: one of BACKENDS; None or "" for the fastest that runs here.
        device: the type of the tensors' device, such as "cuda".
        dtype: the tensors' dtype; None: one that every body takes.
        cannot, library_cannot: other reasons why the native kernels and the library cannot take these tensors, or None.

    Inside torch.func and forward-mode AD native operators run in plain PyTorch: the kernels have no rules there and
    would silently drop tangents.

    Raises ValueError for an unknown backend, RuntimeError for a named backend that cannot run here, with the reason.
    """
    return _choose(op, backend or "", device, dtype, cannot, library_cannot, op in _forced_plain, transformed())


@constant_when_compiled
def _choose(op, backend, device, dtype, cannot, library_cannot, forced_plain, inside):
    if backend not in ("", *BACKENDS):
        raise ValueError(f"{op}: unknown backend {backend!r}: choose one of {', '.join(BACKENDS)}, or leave it empty")
    if backend == "torch" or forced_plain:
        return "torch"
    if backend == "fused" and op in NO_LIBRARY:
        raise RuntimeError(f"{op}: {NO_LIBRARY[op]}: leave backend empty")
    if op in fused.LIBRARIES and (backend == "fused" or not backend and op not in NATIVE and op != "attention"):
        package = fused.LIBRARIES[op][0]
        reason = f"the tensors are on {device}" if device != fused.GPU else None
        reason = reason or fused.refusal(op, dtype) or library_cannot or fused.missing(op)
        if reason is None:
            say_once(f"{op}: {package}")
            return "fused"
        if backend:
            raise RuntimeError(f"{op}: backend 'fused' cannot run here: {reason}: leave backend empty, or pip install -r "
                               "requirements-gpu.txt on a machine with a GPU")
        if device == "cuda":
            say_once(f"{op}: chunks in PyTorch ({reason})")
    if backend == "fused":  # an operator for which PyTorch's or this repository's own is as good
        backend = ""
    if op not in NATIVE:
        if backend not in ("", device):
            raise RuntimeError(f"{op}: backend {backend!r} cannot run here: the tensors are on {device}")
        return device
    if inside:
        if backend:
            raise RuntimeError(f"{op}: backend {backend!r} has no forward-mode derivative and no rules for torch.func: "
                               "use backend='torch'")
        say_once("native kernels: none inside torch.func and forward-mode AD; plain PyTorch runs there, much slower")
        return "torch"
    if dtype not in (None, *DTYPES):
        cannot = f"the kernels take {fused.names(DTYPES)}, got {fused.names([dtype])}"
    if not backend and cannot:
        return "torch"
    wanted = backend or device
    reason = unavailable(wanted) if wanted in ("cpu", "cuda") else f"there are no kernels for {wanted}"
    if reason is None and wanted != device:
        reason = f"the tensors are on {device}"
    if reason is None and cannot:
        reason = f"{cannot}: use backend='torch'"
    if reason is None:
        return wanted
    if backend:
        raise RuntimeError(f"{op}: backend {backend!r} cannot run here: {reason}")
    say_once(f"native kernels: none ({reason}); plain PyTorch runs instead, much slower")
    return "torch"


@functools.cache
def say_once(line):
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):  # a full disk behind stderr: nothing to end a run for
            print(line, file=sys.stderr, flush=True)


@functools.cache
def unavailable(device):
    """None if the kernels of `device` can run, else the reason, in one line."""
    if device == "cuda":
        if not torch.cuda.is_available():
            return "PyTorch sees no GPU"
        if torch.cuda.get_device_capability() < (8, 0):
            return "the kernels need a GPU of compute capability 8.0 (Ampere) or later"
        return cuda.missing()
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


def build(sources=SOURCES, folder=None):
    """Compile `sources` into one library for this CPU unless that was done before; returns (its path, seconds of building).

    Several processes may call it at once: one builds under a file lock, the others wait and find the file.
    The folder is `folder`, or $LONGHORN_BUILD_DIR, or build/ beside this file. Raises OSError with the compiler's words.
    """
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if compiler is None:
        raise OSError("no C++ compiler found (install g++ or clang++, or set CXX)")
    try:
        return _compile([*shlex.split(compiler), *_flags(openmp=sys.platform != "darwin")], "cpu", _cpu_name(), sources, folder)
    except OSError:
        if sys.platform == "darwin":  # Apple's clang has no OpenMP: it was not asked for
            raise
    return _compile([*shlex.split(compiler), *_flags(openmp=False)], "cpu", _cpu_name(), sources, folder)


def build_cuda(update, dtype, shape, architecture, source=SCAN, folder=None):
    """The same for a GPU: (path of a cubin, seconds), for one update, dtype and `cuda_shape`, for 'sm_90' or such."""
    name = f"longhorn_scan_{architecture}_{update}_{cuda.TYPES[dtype]}_{'x'.join(map(str, shape))}"
    return _cubin(name, architecture, cuda.defines(update, dtype, *shape), source, folder)


def build_cuda_conv(dtype, W, architecture, source=CONV, folder=None):
    """The same for the convolution of one dtype and width."""
    name = f"causal_conv_{architecture}_{cuda.TYPES[dtype]}_{W}"
    return _cubin(name, architecture, cuda.conv_defines(dtype, W), source, folder)


def _cubin(name, architecture, macros, source, folder):
    make = lambda to: cuda.compile_cubin(source, to, architecture, macros)
    return _cached(name, ".cubin", [cuda.compiler_version(), architecture, *macros], (source,), folder, make)


def _compile(command, tag, machine, sources, folder):
    try:
        prefix = command[:next(i for i, word in enumerate(command) if word.startswith("-"))]  # $CXX may be "ccache g++"
        version = subprocess.run([*prefix, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise OSError(f"the compiler {command[0]!r} does not run: {error}") from None

    def make(to):
        run = subprocess.run([*command, *map(str, sources), "-o", str(to)], capture_output=True, text=True)
        if run.returncode:
            names = " and ".join(Path(source).name for source in sources)
            raise OSError(f"{command[0]} could not build {names}: {run.stderr.strip()[:500]}")

    return _cached(f"longhorn_scan_{tag}", ".so", [version, machine, *command], sources, folder, make)


def _cached(name, suffix, key, sources, folder, make):
    """(path, seconds): what `make` once built from `sources`, kept by a hash of `key` and all text, built under a lock."""
    folder = Path(folder or os.environ.get("LONGHORN_BUILD_DIR") or ROOT / "build")
    text = b"".join(Path(source).read_bytes() for source in (HEADER, *sources))
    path = folder / f"{name}_{hashlib.sha256(chr(0).join(key).encode() + text).hexdigest()[:16]}{suffix}"
    if path.exists():  # it was renamed into place whole, so this needs no lock, and no right to write
        return path, 0.0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / f"{path.name}.lock", "w")
    except OSError as error:
        raise OSError(f"cannot write to {folder} ({error.strerror}): set LONGHORN_BUILD_DIR to a writable folder") from None
    with lock:
        _lock(lock)
        if path.exists():
            return path, 0.0
        start, temporary = time.perf_counter(), path.with_suffix(f".{os.getpid()}.tmp")
        make(temporary)
        os.replace(temporary, path)
        return path, time.perf_counter() - start


def _lock(file):
    import fcntl  # not on Windows, where there is no native build either

    fcntl.flock(file, fcntl.LOCK_EX)


def _struct(name, fields):
    """A ctypes mirror of a struct of the sources; * marks a pointer, & a double, the rest are int64."""
    kinds = {"*": ctypes.c_void_p, "&": ctypes.c_double}
    fields = [(f.strip("*&"), kinds.get(f[0], ctypes.c_int64)) for f in fields.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


ScanArgs = _struct("ScanArgs", """B T D N update softplus dtype splits threads segments segment_T reverse *cu *x *dt *k *q *z
    x_b x_t dt_b dt_t k_b k_t q_b q_t z_b z_t *A *skip *bias *h0 *y *hT *chunks *decay
    *dy dy_b dy_t *dhT *dx *ddt *dz dx_t *dk *dq *dA *dskip *dbias *dh0""")
ConvArgs = _struct("ConvArgs", """B T D W dtype silu splits threads *x x_b x_t *weight *bias *state *y
    *dy dy_b dy_t *dx dx_t *dweight *dbias *dstate""")
NormArgs = _struct("NormArgs", "rows D tasks threads x_dtype y_dtype *x *dy *weight *rstd *y *dx *dweight &eps")


def load(path):
    """The library at `path`, checked against the structs above. Raises OSError if it is not of this kernels/build.py."""
    lib = ctypes.CDLL(str(path))
    structs = {"scan_args_size": ScanArgs, "conv_args_size": ConvArgs, "norm_args_size": NormArgs}
    for name in ("longhorn_chunk", "longhorn_lanes", "longhorn_max_width", *structs):
        getattr(lib, name).restype = ctypes.c_int64
    if any(getattr(lib, name)() != ctypes.sizeof(struct) for name, struct in structs.items()):
        raise OSError(cuda.DISAGREE)
    return lib


@functools.cache
def library():
    """The native CPU library, built on first use and announced once. Raises OSError with the compiler's words."""
    path, seconds = build()
    lib = load(path)
    simd = {16: "avx512", 8: "8 lanes", 4: "4 lanes"}[lib.longhorn_lanes()]
    openmp = "OpenMP" if lib.longhorn_has_openmp() else "one thread (this compiler has no OpenMP)"
    say_once(f"native kernels: cpu {simd}, {openmp} ({f'built in {seconds:.1f} s' if seconds else 'cached'})")
    return lib


@functools.cache
def cuda_module(update, dtype, shape, architecture, device):
    """The kernels of one update, dtype and shape of the state on a GPU, built on first use, announced once. Raises OSError."""
    built = build_cuda(update, dtype, shape, architecture)
    what = f"{update} {cuda.TYPES[dtype]}, {{}} states of {{2}} channels a lane, which {{1}} lanes share".format(*shape)
    return _load_cuda(what, *built, cuda.SCAN_KERNELS, ScanArgs, architecture, device)


@functools.cache
def cuda_conv_module(dtype, W, architecture, device):
    """The same for the convolution of one dtype and width."""
    built = build_cuda_conv(dtype, W, architecture)
    what = f"convolution {cuda.TYPES[dtype]} of width {W}"
    return _load_cuda(what, *built, cuda.CONV_KERNELS, ConvArgs, architecture, device)


def _load_cuda(what, path, seconds, kernels, args_class, architecture, device):
    with torch.cuda.device(device):
        module = cuda.Module(path.read_bytes(), kernels, ctypes.sizeof(args_class), device=device)
    say_once(f"native kernels: cuda {architecture}, {what} ({f'built in {seconds:.1f} s' if seconds else 'cached'})")
    return module


@functools.cache
def cuda_shape(B, T, D, N, multiprocessors, segments=True):
    """(P, L, C): L lanes share C channels, each with P states of every one (P * L >= N).

    As many lanes as channels, with 16 states each, do the least work. Where that leaves multiprocessors idle, T is split
    (`cuda_segments`, if `segments`), and what is still missing comes from spreading a channel over more lanes, down to 4
    states each. Which number of blocks is enough (2 a multiprocessor) has not been measured.
    """
    if N > 256:  # the backward of more would not find its shared memory on any GPU
        raise ValueError(f"scan: the CUDA kernels take up to 256 states a channel, got {N}: use backend='torch'")
    states = max(4, 1 << (N - 1).bit_length())
    P = min(16, states)
    L = states // P
    most = max(1, T // SEGMENT) if segments else 1
    while P > 4 and L < 32 and most * B * -(-D // (CUDA_THREADS // L)) < 2 * multiprocessors:
        P, L = P // 2, L * 2
    pairs = P > 4 and L < 32  # half the states of two channels instead of all of one: the same registers and blocks
    return (P // 2, L * 2, 2) if pairs else (P, L, 1)


def cuda_channels(shape):
    """How many channels a block of the kernels of a `cuda_shape` takes."""
    _, L, C = shape
    return CUDA_THREADS // L * C


@functools.cache
def cuda_segments(blocks, T, multiprocessors, joining):
    """Into how many segments of at least SEGMENT steps T is best split, for a kernel of `blocks` blocks a segment.

    joining: what the pass that joins the segments takes, of the kernel's own time. A multiprocessor with n blocks takes n
    times as long as one of a full GPU, but never less than LONE: a block alone waits for itself. Not measured: by the
    schedules of bench/schedule.py.
    """
    time = lambda n: max(LONE, -(-n // multiprocessors))

    def cost(S):
        S, segment_T = segment_sizes(T, S).values()  # as it comes out in whole chunks; the longest segment is waited for
        return (time(S * blocks) + (S > 1) * joining * time((S - 1) * blocks)) * segment_T / T

    every = range(1, max(1, min(T // SEGMENT, 8 * multiprocessors)) + 1)
    best = min(map(cost, every))
    return next(S for S in every if cost(S) <= 1.05 * best)  # each costs memory too


# ------------------------------------------------------------------------------------------------- calling the library

def segment_sizes(T, segments):
    """Whole chunks for all segments but the last, which none is beyond."""
    segment_T = -(-T // (segments * CHUNK)) * CHUNK
    return {"segments": -(-T // segment_T), "segment_T": segment_T}


class Kernels:
    """The library and the argument struct for one call on x (B, T, D); `dtype` is what the kernels compute rows in.

    update: of the scan, one of UPDATES, or None for the convolution; rows: how many there are, if they are packed sequences
    and not the B of x; direction: of the scan, for its segments of T.
    """

    def __init__(self, args_class, x, update=None, rows=None, direction="forward", **sizes):
        (B, T, D), self.device = x.shape, x.device
        B = B if rows is None else rows
        if update is not None:
            sizes["update"] = UPDATES.index(update)
        self.segments = 1  # that T is split into; the convolution's tiles
        if x.is_cuda:
            gpu, threads, self.dtype = torch.cuda.get_device_properties(x.device), 0, x.dtype
            architecture = f"sm_{gpu.major}{gpu.minor}"
            if update is None:
                channels, self.segments = CUDA_THREADS, -(-T // CONV_TILE)
                self.module = cuda_conv_module(x.dtype, sizes["W"], architecture, x.device.index)
            else:
                can_split = rows is None and update != "exact"  # its transition is a matrix, and products of those are N x N
                shape = cuda_shape(B, T, D, sizes["N"], gpu.multi_processor_count, can_split)
                self.module = cuda_module(update, x.dtype, shape, architecture, x.device.index)
                channels = cuda_channels(shape)
                if can_split:
                    blocks = B * -(-D // channels)
                    self.segments = cuda_segments(blocks, T, gpu.multi_processor_count, JOINING[direction])
            # a kernel counts steps in 32 bits, and the bytes from one row to the next, which may be half of a wider tensor
            if T >= 2**31 - CUDA_THREADS or 2 * D * 4 >= 2**31:
                raise ValueError(f"{T} steps of {D} channels: the kernels for a GPU take up to {2**31 - CUDA_THREADS - 1} and "
                                 f"{2**28 - 1}: use backend='torch'")
            splits = -(-D // channels)  # blocks that share a batch row
            if B * self.segments * splits >= 2**31:
                raise ValueError(f"{B} rows of {D} channels take {B * self.segments * splits} blocks, a GPU starts up to "
                                 f"{2**31 - 1}: split the batch")
        else:
            self.library, self.dtype = library(), torch.float32 if x.dtype == torch.float16 else x.dtype
            groups, splits, threads = -(-D // self.library.longhorn_lanes()), 1, torch.get_num_threads()
            while B * splits % threads and B * splits < 4 * threads and splits < groups:  # give every thread the same work
                splits += 1
        if update is not None:
            sizes |= segment_sizes(T, self.segments)
            self.segments = sizes["segments"]
        is_bf16 = int(self.dtype == torch.bfloat16)
        self.args = args_class(B=B, T=T, D=D, splits=splits, threads=threads, dtype=is_bf16, **sizes)

    def __call__(self, function, rows, floats, **buffers):
        """Point the struct at tensors and call a function of the library; absent tensors (None) stay null.

        rows: (B, T, C) each, taken in `dtype` with their strides, copied only if the last dimension is not contiguous.
        floats: taken as contiguous float32. buffers: as they are.
        """
        def in_place(a):
            a = a.to(self.dtype)
            fits = a.stride(1) * a.itemsize < 2**31  # the CUDA kernels step in bytes of 32 bits
            return a if fits and (a.stride(2) == 1 or a.shape[2] == 1) else a.contiguous()

        tensors = {n: in_place(a) for n, a in rows.items() if a is not None}
        for name, a in tensors.items():
            setattr(self.args, name + "_b", a.stride(0))
            setattr(self.args, name + "_t", a.stride(1))
        tensors.update({n: a.float().contiguous() for n, a in floats.items() if a is not None})
        tensors.update({n: a for n, a in buffers.items() if a is not None})
        point(self.args, **tensors)  # the dict keeps the copies alive until the function returns
        self.run(function)

    def run(self, function):
        if self.device.type == "cpu":
            getattr(self.library, function + "_cpu")(ctypes.byref(self.args))
            return
        with torch.cuda.device(self.device):
            self.launch(self.module, function, CUDA_THREADS, torch.cuda.current_stream().cuda_stream)

    def launch(self, module, function, threads, stream):
        a, kernel = self.args, function.removeprefix("longhorn_scan_").removeprefix("causal_") + "_kernel"
        whole = kernel.replace("_kernel", "_whole_kernel")
        if kernel in FETCHED and self.is_whole(module, FETCHED[kernel]) and module.has_room(whole, kernel):
            kernel = whole
        blocks = a.B * -(-a.D * a.N // threads) if kernel == "combine_kernel" else a.B * self.segments * a.splits
        if blocks:
            module.launch(kernel, blocks, a, stream)

    def is_whole(self, module, rows):
        """Whether nothing need be asked a step: whole chunks and blocks, `rows` there and aligned to be fetched by 16 bytes,
        k and q by fours."""
        a, size = self.args, self.dtype.itemsize
        if a.cu or a.T % CHUNK or a.D % module.channels or a.N != module.states:
            return False
        fetched = {**dict.fromkeys(rows, 16), "k": 4 * size, "q": 4 * size}
        stride_b = lambda n: getattr(a, n + "_b") if a.B > 1 else 0  # of one row it may be anything
        return all(getattr(a, n) and not (getattr(a, n) | stride_b(n) * size | getattr(a, n + "_t") * size) % part
                   for n, part in fetched.items())

    def entering(self, rows, floats, own, enters, reverse=0):
        """What enters each segment of T, (rows, segments, D, N): `own` computes each segment's share, combine_kernel joins."""
        a = self.args
        share, decay = (empty(next(iter(rows.values())), a.B * a.segments, a.D, a.N) for _ in range(2))
        self(own, rows, floats, hT=share, decay=decay)
        self.args.reverse = reverse
        self("longhorn_scan_combine", {}, {"dhT" if reverse else "h0": enters}, hT=share, decay=decay)
        return share


def kept_states(x, N):
    """How many states of a channel the kernels for x's device keep at a chunk boundary: on a GPU whole fours."""
    return -(-N // 4) * 4 if x.is_cuda else N


def point(args, **tensors):
    """Write the tensors' addresses into a struct; the caller keeps them alive."""
    for name, a in tensors.items():
        setattr(args, name, a.data_ptr())
    return ctypes.byref(args)


def empty(x, *shape, dtype=torch.float32):
    """An uninitialised tensor on x's device: kernels write every element of what they return."""
    return torch.empty(shape, dtype=dtype, device=x.device)


def autocast_dtype(device):
    """The dtype that autocast asks for on `device`, or None where it is off or, as on meta, does not exist."""
    return torch.get_autocast_dtype(device) if device != "meta" and torch.is_autocast_enabled(device) else None


def compute_dtype(x):
    """The dtype in which autocast has an operator take x: x's own without autocast, and always for float64."""
    return x.dtype if x.dtype == torch.float64 else autocast_dtype(x.device.type) or x.dtype


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
