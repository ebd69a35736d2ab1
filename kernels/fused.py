"""GPU kernels of other libraries, for backend="fused": mamba-ssm, causal-conv1d, flash-attn, flash-linear-attention.

All of these packages are optional, and none is imported before an operator needs it.

    pip install --group gpu
"""

import functools
import importlib
import importlib.metadata
import sys

import torch

GPU = "cuda"  # where these kernels run
HALF = (torch.bfloat16, torch.float16)
ALL = (torch.float32, *HALF)
# operator: (package, module, function, dtypes). flash-linear-attention multiplies float32 matrices in TF32 (11 bits),
# whatever PyTorch's setting. So it gets 16-bit tensors only, and float32 runs as chunks in PyTorch.
LIBRARIES = {
    "selective_scan": ("mamba-ssm", "mamba_ssm.ops.selective_scan_interface", "selective_scan_fn", ALL),
    "causal_conv1d": ("causal-conv1d", "causal_conv1d", "causal_conv1d_fn", ALL),
    "attention": ("flash-attn", "flash_attn", "flash_attn_func", HALF),
    "gated_linear_attention": ("flash-linear-attention", "fla.ops.gla", "chunk_gla", HALF),
    "retention": ("flash-linear-attention", "fla.ops.simple_gla", "chunk_simple_gla", HALF),
    "delta_rule": ("flash-linear-attention", "fla.ops.delta_rule", "chunk_delta_rule", HALF),
    "gated_delta_rule": ("flash-linear-attention", "fla.ops.gated_delta_rule", "chunk_gated_delta_rule", HALF),
    "kda": ("flash-linear-attention", "fla.ops.kda", "chunk_kda", HALF),
    "mesa": ("flash-linear-attention", "fla.ops.mesa_net", "chunk_mesa_net", HALF),
}


# operators that call their library on a GPU even without backend="fused"
BY_DEFAULT = tuple(op for op, (package, *_) in LIBRARIES.items() if package == "flash-linear-attention")


@functools.cache
def missing(op):
    """The reason why the library's function for `op` cannot run here, or None."""
    package, module, name, _ = LIBRARIES[op]
    try:
        getattr(importlib.import_module(module), name)
        problem = wrong_gradients(op)
    except ModuleNotFoundError as error:
        problem = "is not installed" if error.name == module.split(".")[0] else f"needs {error.name}"
    except Exception as error:  # these packages import Triton, which asks for a driver: any error is possible
        problem = f"cannot be imported ({' '.join(str(error).split())[:200]})"
    return f"{package} {problem}" if problem else None


def wrong_gradients(op):
    """What flash-linear-attention needs for correct gradients of `op` on this GPU, or None. For gated operators the
    library itself refuses to run. On an H200 with Triton 3.6.0 one of RetNet's gradients was off by half. With
    fla-core before 0.6.0, in chunks of 64, the delta rule's gradients of k and beta were wrong."""
    if op not in ("retention", "gated_delta_rule", "delta_rule") or not torch.cuda.is_available():
        return None
    if torch.cuda.get_device_capability()[0] != 9:
        return None
    triton = torch.torch_version.TorchVersion(importlib.metadata.version("triton"))
    if op != "delta_rule" and triton >= "3.4" and triton < "3.7.1":
        return f"needs Triton 3.7.1 or later on a Hopper GPU: {triton} computes wrong gradients"
    if op == "delta_rule" and triton >= "3.4":
        version = torch.torch_version.TorchVersion(importlib.metadata.version("fla-core"))
        if version < "0.6.0":
            return f"needs to be 0.6.0 or later on a Hopper GPU: {version} computes wrong gradients"
    return None


def call(op, *args, **kwargs):
    """Call the library's function for `op`; `choose.choose` has checked that it can be loaded."""
    _, module, name, _ = LIBRARIES[op]
    return getattr(sys.modules[module], name)(*args, **kwargs)


def refusal(op, dtype):
    """The reason why the library does not take tensors of `dtype`, or None."""
    package, _, _, dtypes = LIBRARIES[op]
    return None if dtype in (None, *dtypes) else f"{package} takes {names(dtypes)}, got {names([dtype])}"


def place(op):
    """Names the library's function for `op`, for example "flash-linear-attention's fla.ops.gla.chunk_gla"."""
    package, module, name, _ = LIBRARIES[op]
    return f"{package}'s {module}.{name}"


def names(dtypes):
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
