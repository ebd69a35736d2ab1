"""CUDA without host code: kernels are compiled to a cubin, and ctypes calls the driver to load and launch it.

The compiler is nvcc if there is one, else NVRTC, which comes with PyTorch's CUDA wheels. $NVCC names another nvcc,
$LONGHORN_CUDA_COMPILER=nvrtc skips it. A kernel takes one struct by value, mirrored in kernels/build.py. So one cubin
works with every version of Python and PyTorch.
"""

import contextlib
import ctypes
import ctypes.util
import functools
import glob
import os
import shutil
import subprocess
from pathlib import Path

import torch

SCAN_KERNELS = ("forward_kernel", "forward_whole_kernel", "backward_kernel", "backward_whole_kernel",
                "segment_state_kernel", "segment_grad_kernel", "combine_kernel")
CONV_KERNELS = ("conv_forward_kernel", "conv_backward_kernel")
LOSS_KERNELS = ("loss_kernel",)
SUMS_KERNELS = ("sums_kernel",)
MAX_DYNAMIC_SHARED, CARVE_OUT = 8, 9  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, .._PREFERRED_.._CARVEOUT
ROOM = 97, 81  # bytes: CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, .._PER_MULTIPROCESSOR
RESERVED = 1024  # bytes of shared memory that the system reserves per block
DISAGREE = ("kernels/build.py and the kernel sources disagree about a struct, CHUNK, MAX_WIDTH or CONV_TILE: change "
            "both")
TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}
SIZES = {"conv": ("CONV_WIDTH", "CONV_CHANNELS"), "loss": ("LOSS_ROOM",), "sums": ("NUMBERS",)}


# ----------------------------------------------------------------------------------------------------------- compilers

def homes():
    """The folders where CUDA toolkits may be."""
    return [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ] + ["/usr/local/cuda"]


def nvcc():
    """The path of nvcc, or None; looks at $NVCC, the PATH, $CUDA_HOME and /usr/local/cuda."""
    if os.environ.get("LONGHORN_CUDA_COMPILER") == "nvrtc":
        return None
    folders = [os.environ.get("PATH", os.defpath), *(f"{home}/bin" for home in homes())]
    return shutil.which(os.environ.get("NVCC") or "nvcc", path=os.pathsep.join(folders))


@functools.cache
def nvrtc():
    """Load the NVRTC library, or return None. PyTorch's wheels keep it under nvidia/ next to torch, or in torch/lib.

    A library of PyTorch's own CUDA version comes first: an older driver may not load code from a newer NVRTC.
    """
    packages = Path(torch.__file__).parent.parent
    patterns = [packages / "nvidia/*/lib/libnvrtc.so*", packages / "torch/lib/libnvrtc*.so*",
                *(Path(home) / "lib64/libnvrtc.so*" for home in homes())]
    paths = [path for pattern in patterns for path in sorted(glob.glob(str(pattern))) if "builtins" not in path]
    libraries = []
    for path in filter(None, [*paths, ctypes.util.find_library("nvrtc")]):
        with contextlib.suppress(OSError):
            libraries.append(ctypes.CDLL(path))
    same = [lib for lib in libraries if nvrtc_version(lib) == torch.version.cuda]
    return next(iter([*same, *libraries]), None)


def nvrtc_version(lib):
    """NVRTC's version, such as '13.0'."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def missing():
    """None if the kernels can be compiled, else a line that says what is missing."""
    if nvcc() or nvrtc():
        return None
    return "no nvcc and no NVRTC found (install the CUDA toolkit or nvidia-cuda-nvrtc, or set NVCC)"


def compiler_version(compiler):
    """The compiler's version, part of the cache key."""
    if compiler == "nvcc":
        return subprocess.run([nvcc(), "--version"], capture_output=True, text=True).stdout
    return f"NVRTC {nvrtc_version(nvrtc())}"


def ways(architecture):
    """[(compiler, "cubin" or "ptx", architecture)] to try in turn for a GPU such as 'sm_90'.

    A driver older than nvcc may refuse nvcc's cubin but load one from PyTorch's own NVRTC. If neither compiler knows
    the architecture, the driver compiles PTX for an older one. Raises OSError if there is no compiler.
    """
    compilers = [name for name, available in (("nvcc", nvcc()), ("nvrtc", nvrtc())) if available]
    if not compilers:
        raise OSError(missing())
    older = "compute_90" if int(architecture.removeprefix("sm_")) >= 90 else "compute_80"
    return [*((name, "cubin", architecture) for name in compilers), *((name, "ptx", older) for name in compilers)]


def tunings():
    return os.environ.get("LONGHORN_CUDA_DEFINES", "").split()


def tuning(name, default):
    """The number for `name` in $LONGHORN_CUDA_DEFINES, which tunes launch.py's choices and not the compiled code; else
    the default."""
    return type(default)(dict(word.split("=", 1) for word in tunings() if "=" in word).get(name, default))


def defines(update, dtype, *shape):
    """The macros that select the kernels to compile. `shape` depends on `update`:

    - an update of the scan: (P, L), as in `cuda_shape`
    - "conv": (W, channels per lane)
    - "loss": (bytes of shared memory for a row,)
    - "sums": (sums per block,)

    $LONGHORN_CUDA_DEFINES adds macros to try other tunings, such as "FORWARD_BLOCKS=5 STAGES=4".
    """
    tuning = [f"-D{word}" for word in tunings() if not word.startswith(("P=", "SPLIT_BELOW=", "FILL="))]
    if update in SIZES:
        sizes = [f"-D{name}={size}" for name, size in zip(SIZES[update], shape, strict=True)]
        return [f"-D{update.upper()}_TYPE={TYPES[dtype]}", *sizes, *tuning]
    sizes = [f"-DSCAN_{name}={size}" for name, size in zip("PL", shape, strict=True)]
    return [f"-DSCAN_UPDATE={update.capitalize()}", f"-DSCAN_TYPE={TYPES[dtype]}", *sizes, *tuning]


OPTIONS = {"nvcc": ["-O3", "-std=c++17", "-lineinfo"], "nvrtc": ["--std=c++17", "--generate-line-info"]}


def compile_kernels(source, to, compiler, kind, architecture, macros):
    """Compile `source` with "nvcc" or "nvrtc" into the file `to`: a "cubin" or "ptx".

    architecture: 'sm_90', or 'compute_90' for PTX. Raises OSError with the compiler's message.
    """
    name = Path(source).name
    if compiler == "nvcc":
        options = [f"-{kind}", *OPTIONS[compiler], f"-arch={architecture}", *macros]
        run = subprocess.run([nvcc(), *options, str(source), "-o", str(to)], capture_output=True, text=True)
        if run.returncode:
            raise OSError(f"{nvcc()} could not build {name} for {architecture}: {run.stderr.strip()[:500]}")
        return
    lib = nvrtc()
    options = [f"--gpu-architecture={architecture}", *OPTIONS[compiler], f"-I{Path(source).parent}", *macros]
    options = [option.encode() for option in options]
    program, text = ctypes.c_void_p(), Path(source).read_bytes()
    lib.nvrtcCreateProgram(ctypes.byref(program), text, name.encode(), 0, None, None)
    try:
        if lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            log = _nvrtc_text(lib, program, "ProgramLog").decode().strip()[:500]
            raise OSError(f"NVRTC could not build {name} for {architecture}: {log}")
        Path(to).write_bytes(_nvrtc_text(lib, program, kind.upper()))
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _nvrtc_text(lib, program, part):
    size = ctypes.c_size_t()
    getattr(lib, f"nvrtcGet{part}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(lib, f"nvrtcGet{part}")(program, text)
    return text.raw


# -------------------------------------------------------------------------------------------------------------- driver

@functools.cache
def driver():
    """libcuda, which comes with the GPU's driver. Raises OSError if there is none."""
    return declare(ctypes.CDLL("libcuda.so.1"))


SIGNATURES = """
cuModuleLoadData pointer text
cuModuleGetFunction pointer pointer text
cuModuleGetGlobal_v2 pointer pointer pointer text
cuMemcpyDtoH_v2 pointer pointer size
cuFuncSetAttribute pointer int int
cuDeviceGetAttribute pointer int int
cuLaunchKernel pointer uint uint uint uint uint uint uint pointer pointer pointer
cuCtxSetCurrent pointer
cuDevicePrimaryCtxRetain pointer int
"""


def declare(lib):
    kinds = {"pointer": ctypes.c_void_p, "text": ctypes.c_char_p, "size": ctypes.c_size_t, "int": ctypes.c_int,
             "uint": ctypes.c_uint}
    for line in SIGNATURES.split("\n")[1:-1]:
        name, *arguments = line.split()
        getattr(lib, name).argtypes = [kinds[kind] for kind in arguments]
    return lib


class Module:
    """A loaded cubin with these kernels; `launch` runs one. lib: the driver; tests pass one that runs on the CPU."""

    def __init__(self, cubin, kernels, args_size, lib=None, device=None):
        self.lib, self.context, self.ready = lib or driver(), ctypes.c_void_p(), set()
        if device is not None:  # PyTorch's context for the device, which an autograd thread may not have set yet
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
            self.call("cuCtxSetCurrent", self.context)
        module, at, size = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
        self.call("cuModuleLoadData", ctypes.byref(module), cubin)
        self.functions = {name: ctypes.c_void_p() for name in kernels}
        for name, function in self.functions.items():
            self.call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        self.call("cuModuleGetGlobal_v2", ctypes.byref(at), ctypes.byref(size), module, b"facts")
        facts = (ctypes.c_int64 * (size.value // 8))()
        self.call("cuMemcpyDtoH_v2", facts, at, size.value)
        # steps per chunk or tile, size of the args, threads and channels per block, states per channel with padding
        self.steps, args_size_there, self.threads, self.channels, self.states, *shared = facts
        self.shared = dict(zip(kernels, shared, strict=True))
        self.room = []
        for which in ROOM:
            value = ctypes.c_int()
            self.call("cuDeviceGetAttribute", ctypes.byref(value), which, device or 0)
            self.room.append(value.value)
        if args_size_there != args_size:
            raise OSError(DISAGREE)

    def call(self, function, *arguments):
        """Call a function of the driver. Raises RuntimeError with the driver's message."""
        self.check(getattr(self.lib, function)(*arguments), function)

    def check(self, code, action):
        if code:
            text = ctypes.c_char_p()
            self.lib.cuGetErrorString(code, ctypes.byref(text))
            message = text.value.decode() if text.value else "unknown error"
            raise RuntimeError(f"{action} failed: {message} (CUDA error {code})")

    def has_room(self, name, instead):
        """True if kernel `name` fits this GPU's shared memory, and fits a multiprocessor twice if the kernel `instead`
        does."""
        block, multiprocessor = self.room
        at_once = lambda kernel: min(2, multiprocessor // (self.shared[kernel] + RESERVED))
        return self.shared[name] <= block and at_once(name) >= at_once(instead)

    def launch(self, name, blocks, args, stream):
        """Launch `blocks` blocks of kernel `name` with `args` by value. Raises RuntimeError, which names the launch."""
        function, shared = self.functions[name], self.shared[name]
        if self.context:
            self.check(self.lib.cuCtxSetCurrent(self.context), "cuCtxSetCurrent")
        if name not in self.ready:
            self.check(self.lib.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, shared), f"{name}: reserving "
                       f"{shared / 1024:.1f} KB of shared memory per block, perhaps more than this GPU has,")
            if name.startswith("backward"):  # use as much of the cache as possible for shared memory
                self.lib.cuFuncSetAttribute(function, CARVE_OUT, 100)
            self.ready.add(name)
        params = (ctypes.c_void_p * 1)(ctypes.addressof(args))
        code = self.lib.cuLaunchKernel(function, blocks, 1, 1, self.threads, 1, 1, shared, stream, params, None)
        if code:
            self.check(code, f"the launch of {name} ({blocks} blocks of {self.threads} threads, {shared} bytes of "
                       "shared memory)")
