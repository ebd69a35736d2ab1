"""mamba-ssm's own scan kernels without its package: compiled from its source, launched as its C++ launches them.

    python bench/mamba_ssm_kernels.py    # fetch the source, compile, and on a GPU compare with the loop in float64

Its package takes 13 minutes to build and must match PyTorch to the version; its kernels take eight seconds and nvcc.
bench/scan_cuda.py measures them beside ours where the package is not installed. None of its code is kept here (it is
Apache-2.0): the sdist, mamba_ssm-*.tar.gz of PyPI (220 KB), lies in wheels/, which git ignores, and travels with the
folder to a machine without a network. The headers that it includes are PyTorch's, which every wheel of PyTorch has, and
CUB, which nvcc has.

Compiled are the instances that selective_scan_fn runs with variable B and C, D, z, delta_bias and softplus, with the
flags of its setup.py. The mirrors of its argument structs are read from its header, and the compiler checks every
offset and size of them against its own. Shared memory and grid are those of its selective_scan_fwd_launch and
_bwd_launch; zeros, empty tensors and casts those of its selective_scan.cpp and SelectiveScanFn.
"""

import argparse
import ctypes
import functools
import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.measure import LeftOut, imported, in_one_line  # noqa: E402
from kernels import build, cuda  # noqa: E402
from runtime.errors import ConfigError, main_error  # noqa: E402

WHEELS = ROOT / "wheels"
URL = ("https://files.pythonhosted.org/packages/af/48/aa7bec0efc7453fa0512276c0069c854bf684219050294266534bfef34bb/"
       "mamba_ssm-2.3.2.post1.tar.gz")
SHA256 = "104cc47e9101e5401a675fa2b784f2952b9b037f3b1dd83b5ac544394e95d028"
SOURCE = "csrc/selective_scan"
FLAGS = ("-O3 -std=c++17 -U__CUDA_NO_HALF_OPERATORS__ -U__CUDA_NO_HALF_CONVERSIONS__ -U__CUDA_NO_BFLOAT16_OPERATORS__ "
         "-U__CUDA_NO_BFLOAT16_CONVERSIONS__ -U__CUDA_NO_BFLOAT162_OPERATORS__ -U__CUDA_NO_BFLOAT162_CONVERSIONS__ "
         "--expt-relaxed-constexpr --expt-extended-lambda --use_fast_math -lineinfo -cubin").split()
TYPES = {torch.bfloat16: "at::BFloat16", torch.float16: "at::Half", torch.float32: "float"}
COMPARED = [(2, 1024, 256, 16), (2, 4096, 256, 64)]  # B, T, D, N; its kernels at 32,768 steps are those of 4,096
KINDS = {"int": ctypes.c_int, "bool": ctypes.c_bool, "index_t": ctypes.c_uint64, "void": ctypes.c_void_p}
# Template arguments: threads, steps per thread, (rows,) whole chunks, variable B, variable C, (softplus,) z, types.
# `facts` is what kernels.cuda.Module reads of every cubin; the last two are bytes of shared memory.
PROGRAM = """#include "selective_scan_fwd_kernel.cuh"
#include "selective_scan_bwd_kernel.cuh"
typedef Selective_Scan_fwd_kernel_traits<{0}, {1}, 1, {2}, true, true, true, {3}, float> Forward;
typedef Selective_Scan_bwd_kernel_traits<{0}, {1}, {2}, true, true, true, true, {3}, float> Backward;
template __global__ void selective_scan_fwd_kernel<Forward>(SSMParamsBase);
template __global__ void selective_scan_bwd_kernel<Backward>(SSMParamsBwd);
extern "C" __device__ long long facts[] = {{{0} * {1}, sizeof(SSMParamsBwd), {0}, 1, MAX_DSTATE,
    Forward::kSmemSize + MAX_DSTATE * sizeof(Forward::scan_t),
    Backward::kSmemSize + MAX_DSTATE * sizeof(Backward::scan_t) + ({0} + 4 * MAX_DSTATE) * sizeof(float)}};
"""


# ------------------------------------------------------------------------------------------------ source and compiling

def find_sdist():
    """The path of mamba-ssm's sdist: the newest in wheels/, else fetched into it. Raises LeftOut."""
    found = sorted(WHEELS.glob("mamba_ssm-*.tar.gz"))
    if found:
        return found[-1]
    try:
        data = urllib.request.urlopen(URL, timeout=20).read()
    except OSError as error:
        raise LeftOut(f"no wheels/mamba_ssm-*.tar.gz, and no network to fetch it ({in_one_line(error)}): run python "
                      "bench/mamba_ssm_kernels.py where there is one, and bring wheels/ along") from None
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise LeftOut(f"{URL} is not the file that is known (SHA-256 {SHA256})")
    WHEELS.mkdir(exist_ok=True)
    path = WHEELS / URL.rsplit("/", 1)[1]
    path.write_bytes(data)
    return path


def sources(sdist):
    """{file name: text} of its CUDA sources. Raises OSError for another file."""
    try:
        with tarfile.open(sdist) as tar:
            members = [m for m in tar.getmembers() if m.isfile() and Path(m.name).parent.match(f"*/{SOURCE}")]
            found = {Path(m.name).name: tar.extractfile(m).read().decode() for m in members}
    except (tarfile.TarError, EOFError) as error:
        raise OSError(f"{sdist} is no whole .tar.gz ({error}): fetch it again") from None
    if "selective_scan.h" not in found:
        raise OSError(f"{sdist} has no {SOURCE}/selective_scan.h: it is not mamba-ssm's sdist")
    return found


@functools.cache
def structs(sdist):
    """ctypes mirrors of SSMParamsBase and SSMParamsBwd, which derives from it, read from selective_scan.h."""
    found, header = [], sources(sdist)["selective_scan.h"]
    for name, body in re.findall(r"struct (SSMParams\w+)[^{;]*\{(.*?)\n\};", header, re.DOTALL):
        lines = re.findall(r"^\s*(int|bool|index_t|void) ([^;=]+);", body, re.MULTILINE)
        fields = [(field.split()[-1].lstrip("*"), KINDS[kind]) for kind, names in lines for field in names.split(",")]
        found.append(type(name, (found[-1] if found else ctypes.Structure,), {"_fields_": fields, "__slots__": ()}))
    return found


def assertions(structs):
    """C++ that does not compile where the mirrors' sizes or offsets are not the compiler's."""
    text = "#include <stddef.h>\n"
    for struct in structs:
        text += f'static_assert(sizeof({struct.__name__}) == {ctypes.sizeof(struct)}, "sizeof {struct.__name__}");\n'
        for field in (name for base in struct.__mro__ for name, _ in vars(base).get("_fields_", ())):
            offset, name = getattr(struct, field).offset, f"{struct.__name__}::{field}"
            text += f'static_assert(offsetof({struct.__name__}, {field}) == {offset}, "offset of {name}");\n'
    return text


def layout(T):
    """(threads, steps per thread, whole chunks?) for T steps, as selective_scan_fwd_cuda and _bwd_cuda choose them."""
    threads, steps = 32 if T <= 512 else 64 if T <= 1024 else 128, 4 if T <= 128 else 8 if T <= 256 else 16
    return threads, steps, T % (threads * steps) == 0


def compiled(sdist, dtype, T, architecture):
    """(path of the cubin for T steps of `dtype`, seconds of compiling), cached. Raises OSError with nvcc's message."""
    if cuda.nvcc() is None:
        raise OSError("mamba-ssm's source needs nvcc, and none was found: install the CUDA toolkit, or set NVCC")
    threads, steps, whole = layout(T)
    program = PROGRAM.format(threads, steps, str(whole).lower(), TYPES[dtype])
    headers = Path(torch.__file__).parent / "include"
    command = [*FLAGS, f"-arch={architecture}", f"-I{headers}", f"-I{headers}/torch/csrc/api/include"]

    def make(to):
        with tempfile.TemporaryDirectory() as folder:
            # the one header that a PyTorch without CUDA lacks; looked for last
            stub = {"stub/c10/cuda/impl/cuda_cmake_macros.h": ""}
            for name, text in (sources(sdist) | stub | {"program.cu": program + assertions(structs(sdist))}).items():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                (Path(folder) / name).write_text(text)
            run = subprocess.run([cuda.nvcc(), *command, f"-I{folder}/stub", f"{folder}/program.cu", "-o", str(to)],
                                 capture_output=True, text=True)
        if run.returncode:
            lines = [line for line in run.stderr.splitlines() if "error" in line] or run.stderr.splitlines() or ["?"]
            raise OSError(f"nvcc could not build {Path(sdist).name} for {architecture}: {lines[0][:400]}")

    name = f"mamba_ssm_{architecture}_{cuda.TYPES[dtype]}_{threads}x{steps}{'' if whole else '_rest'}"
    key = [cuda.compiler_version("nvcc"), torch.__version__, *command, program]
    return build._cached(name, ".cubin", key, (sdist,), None, make)


# ----------------------------------------------------------------------------------------------------------- launching

@functools.cache
def _module(sdist, dtype, T, device):
    """The loaded kernels, and their names: those of C++ templates, found in the cubin."""
    gpu = torch.cuda.get_device_properties(device)
    cubin = compiled(sdist, dtype, T, f"sm_{gpu.major}{gpu.minor}")[0].read_bytes()
    names = [kernel_name(cubin, way) for way in ("fwd", "bwd")]
    with torch.cuda.device(device):
        return cuda.Module(cubin, names, ctypes.sizeof(structs(sdist)[1]), device=device), names


def kernel_name(cubin, way):
    """The mangled name of its kernel `way`; longer ones name its parameters."""
    return min(re.findall(rb"_Z\d+selective_scan_%s_kernel\w+" % way.encode(), cubin), key=len).decode()


def launch(sdist, backward, args, like):
    """Run the forward or backward kernel with `args` on the stream and device of `like` (B, D, T)."""
    module, names = _module(sdist, like.dtype, like.shape[2], like.device.index)
    with torch.cuda.device(like.device):
        stream = torch.cuda.current_stream().cuda_stream
        module.launch(names[backward], like.shape[0], args, stream, like.shape[1])


def point(args, **tensors):
    """Write addresses and strides, in elements, into a struct: those of (B, D, T), of B and C (B, N, T), of A (D, N).
    The caller keeps the tensors alive."""
    for name, a in tensors.items():
        setattr(args, f"{name}_ptr", a.data_ptr())
        rows = ("batch", "dstate") if name in ("B", "C", "dB", "dC") else ("batch", "d")
        for which, stride in zip({2: ("d", "dstate"), 3: rows}.get(a.dim(), ()), a.stride(), strict=False):
            setattr(args, f"{name}_{which}_stride", stride)


class SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sdist, u, delta, A, B, C, D, z, delta_bias):
        (batch, dim, T), N, chunks = u.shape, A.shape[1], -(-u.shape[2] // 2048)
        ctx.sdist, ctx.sizes = sdist, dict(batch=batch, dim=dim, seqlen=T, dstate=N, n_groups=1, n_chunks=chunks,
                                           dim_ngroups_ratio=dim, is_variable_B=1, is_variable_C=1, delta_softplus=1)
        out, out_z = torch.empty_like(delta), torch.empty_like(z)
        x = torch.empty(batch, dim, chunks, 2 * N, device=u.device)  # states and decays at the ends of chunks
        args = structs(sdist)[0](**ctx.sizes)
        point(args, u=u, delta=delta, A=A, B=B, C=C, D=D, z=z, delta_bias=delta_bias, out=out, out_z=out_z, x=x)
        launch(sdist, False, args, u)
        ctx.save_for_backward(u, delta, A, B, C, D, z, delta_bias, x, out)
        return out_z

    @staticmethod
    def backward(ctx, dout):
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        u, delta, A, B, C, D, z, delta_bias, x, out = ctx.saved_tensors
        du, ddelta, dz = map(torch.empty_like, (u, delta, z))
        dA, dD, dbias = map(torch.zeros_like, (A, D, delta_bias))  # the kernel adds to these
        dB, dC = (torch.zeros_like(a, dtype=torch.float32) for a in (B, C))
        args = structs(ctx.sdist)[1](**ctx.sizes)
        point(args, u=u, delta=delta, A=A, B=B, C=C, D=D, z=z, delta_bias=delta_bias, out=out, x=x, dout=dout, du=du,
              ddelta=ddelta, dA=dA, dB=dB, dC=dC, dD=dD, dz=dz, ddelta_bias=dbias)
        launch(ctx.sdist, True, args, u)
        return None, du, ddelta, dA, dB.to(B.dtype), dC.to(C.dtype), dD, dz, dbias


def selective_scan(sdist, u, delta, A, B, C, D, z, delta_bias):
    """y (B, D, T) of mamba-ssm's selective_scan_fn with delta_softplus, differentiable once.

    u, delta, z: (B, D, T); B, C: (B, N, T), all of one dtype with T contiguous; A (D, N), D, delta_bias (D,) float32.
    sdist: of `find_sdist`. Raises OSError where it does not compile, RuntimeError for a launch that failed.
    """
    return SelectiveScan.apply(sdist, u, delta, A, B, C, D, z, delta_bias)


def selective_scan_fn():
    """(f(u, delta, A, B, C, D, z, delta_bias) with softplus, what it is): the package's where it is installed, else its
    kernels alone, then the sdist's path too. Raises LeftOut."""
    try:
        f = imported("mamba_ssm.ops.selective_scan_interface", "selective_scan_fn")
        return functools.partial(f, delta_softplus=True), f"mamba_ssm {sys.modules['mamba_ssm'].__version__}", None
    except LeftOut:
        sdist = find_sdist()
        return functools.partial(selective_scan, sdist), f"kernels of {sdist.name}", sdist


def main(argv=None):
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    from bench import scan_cuda

    try:
        _, words, sdist = selective_scan_fn()
    except LeftOut as reason:
        raise ConfigError(str(reason)) from None
    gpu = scan_cuda.Gpu(flush_bytes=0) if torch.cuda.is_available() else None
    if sdist:
        architecture = f"sm_{gpu.properties.major}{gpu.properties.minor}" if gpu else "sm_90"
        with ThreadPoolExecutor() as pool:
            built = list(pool.map(lambda size: compiled(sdist, torch.bfloat16, size[1], architecture), COMPARED))
        words += f" for {architecture}, compiled in {max(seconds for _, seconds in built):.1f} s (0.0: cached)"
    if not gpu:
        print(f"in short: {words}; no GPU to run them on")
        return
    rows = [scan_cuda.check_case("mamba_ssm", shape, "bfloat16", {}, gpu) for shape in COMPARED]
    print(*map(scan_cuda.describe_case, rows), sep="\n")
    if not all(row["right"] for row in rows):
        raise ConfigError(next(scan_cuda.describe_case(row) for row in rows if not row["right"]))
    print(f"in short: {words}; as the loop in float64 at {len(rows)} shapes")


if __name__ == "__main__":
    with main_error("bench/mamba_ssm_kernels.py", OSError):
        main()
