"""The kernels that others wrote for a GPU, asked for by `--kernel=fused`: mamba-ssm, causal-conv1d and flash-attn.

    mamba_conv, mamba_scan   Mamba's convolution and scan in our layout (B, T, D), by causal_conv1d_fn and selective_scan_fn
    attention                softmax(q k^T / sqrt(n)) v over the visible past, by flash_attn_func

The surprise: nothing here is imported before it is asked for; without these packages all families train all the same.

    pip install -r requirements-gpu.txt
"""

import importlib

import torch

from kernels import build

GPU = "cuda"  # where these kernels run


def load(package, module, function):
    """`function` of `module`. Raises RuntimeError, one line, where the package is missing or cannot be loaded."""
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, OSError) as error:
        words = " ".join(str(error).split())
        raise RuntimeError(f"kernel 'fused': {function} of {package} cannot be had ({words}): pip install -r "
                           "requirements-gpu.txt, or leave kernel empty") from None
    build.say_once(f"{function}: {package}'s kernel")
    return found


def check(package, x, dtypes):
    """Raises RuntimeError, one line, for tensors that the package does not take."""
    if x.device.type != GPU or x.dtype not in dtypes:
        names = ", ".join(str(t).removeprefix("torch.") for t in dtypes)
        raise RuntimeError(f"kernel 'fused': {package} takes {names} on a GPU, got {str(x.dtype).removeprefix('torch.')} on "
                           f"{x.device}: choose another dtype or device, or leave kernel empty")


def load_mamba():
    """(selective_scan_fn, causal_conv1d_fn)."""
    return (load("mamba-ssm", "mamba_ssm.ops.selective_scan_interface", "selective_scan_fn"),
            load("causal-conv1d", "causal_conv1d", "causal_conv1d_fn"))


def load_attention():
    """flash_attn_func."""
    return load("flash-attn", "flash_attn", "flash_attn_func")


@torch.compiler.disable  # a C++ extension, opaque to the compiler
def mamba_conv(function, x, weight, bias):
    """silu of the short causal convolution: x (B, T, D), weight (D, W), bias (D,) -> (B, T, D)."""
    check("causal-conv1d", x, build.DTYPES)
    return function(x.transpose(1, 2), weight, bias, activation="silu").transpose(1, 2)


@torch.compiler.disable
def mamba_scan(function, u, delta, A, B, C, D, z, delta_bias):
    """`scan.selective_scan` with softplus from an empty state, the state after it not returned: (B, T, D) in and out."""
    check("mamba-ssm", u, build.DTYPES)
    u, delta, B, C, z = (a.to(u.dtype).transpose(1, 2) for a in (u, delta, B, C, z))  # (B, D, T), B and C (B, N, T)
    return function(u, delta, A, B, C, D, z, delta_bias, delta_softplus=True).transpose(1, 2)


def attention(function, q, k, v):
    """q (B, H, T, n), k and v (B, H, past + T, n) -> (B, H, T, n); the last query sees all keys."""
    check("flash-attn", q, (torch.bfloat16, torch.float16))
    return function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True).transpose(1, 2)
