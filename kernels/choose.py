"""Chooses an operator's implementation: this repository's kernel, another library's, or the plain PyTorch loop."""

import contextlib
import functools

import torch

from common.torch_private import constant_when_compiled, transformed
from kernels import build, cuda, fused

DTYPES = fused.ALL
BACKENDS = ("torch", "cpu", "cuda", "fused")
LA = "kernels/linear_attention.py: "
BODIES = {  # operator: (where its fast code is, where its plain PyTorch code is)
    "longhorn_scan": ("longhorn_scan.cu", "kernels/scan.py"),
    "selective_scan": ("longhorn_scan.cu", "kernels/scan.py"),
    "causal_conv1d": ("kernels/conv_norm.cu", "kernels/ops.py"),
    "rms_norm": ("kernels/conv_norm.cu", "kernels/ops.py"),
    "linear_cross_entropy": ("kernels/ops.py: _LinearCrossEntropy (on a GPU kernels/loss.cu)",
                             "kernels/ops.py: cross_entropy"),
    "attention": ("kernels/ops.py: attention", "kernels/ops.py: _softmax_attention"),
    "gated_linear_attention": (LA + "_gla", LA + "gated_linear_attention_ref"),
    "retention": (LA + "_retention, _gated_retention", LA + "retention_ref"),
    "delta_rule": (LA + "_delta_rule", LA + "delta_rule_ref"),
    "gated_delta_rule": (LA + "_delta_rule", LA + "delta_rule_ref"),
    "kda": (LA + "_delta_rule", LA + "delta_rule_ref"),
    "mesa": (LA + "_mesa", LA + "mesa_ref"),
    "wkv4": (LA + "_wkv4", LA + "wkv4_ref"),
}
NATIVE = ("longhorn_scan", "selective_scan", "causal_conv1d", "rms_norm")  # the others need no compiler
NO_LIBRARY = {"longhorn_scan": "no library has Longhorn's scan", "wkv4": "no library has RWKV-4's wkv"}
_off = set()  # see `plain`


@contextlib.contextmanager
def plain(*ops):
    """Inside this context the named operators (keys of BODIES) run in plain PyTorch, whatever `backend` says. The name
    "libraries" makes all operators run this repository's code instead of other libraries' kernels.

    Keep both forward and backward inside: activation checkpointing chooses again in the backward. Compiled code is not
    affected.
    """
    for op in ops:
        assert op == "libraries" or op in BODIES, f"plain: unknown operator {op!r}: choose from {', '.join(BODIES)}"
    added = set(ops) - _off
    _off.update(added)
    try:
        yield
    finally:
        _off.difference_update(added)


def places(op, backend, device, dtype):
    """For messages: (location of the code that `choose` picks for these arguments, location of the plain code)."""
    fast, slow = BODIES[op]
    library = op in fused.LIBRARIES and choose(op, backend, device, dtype) == "fused"
    return fused.place(op) if library else fast, slow


def choose(op, backend, device, dtype=None, cannot=None, library_cannot=None):
    """Choose what runs `op` (a key of BODIES): 'torch' (plain PyTorch), 'fused' (a library's GPU kernel), or the device
    ('cpu', 'cuda') for this repository's own code. Every operator calls this.

    backend: one of BACKENDS, None or "" for the fastest that runs here. device: the tensors' device type. dtype: the
    tensors' dtype; None if every implementation takes it. cannot, library_cannot: further reasons why the native
    kernels or the library cannot take these tensors. Inside torch.func and forward-mode AD native operators run in
    plain PyTorch: the kernels have no rules for them and would silently drop tangents.

    Raises ValueError for an unknown backend, RuntimeError with the reason if the given backend cannot run here.
    """
    libraries = "libraries" not in _off
    backend = "" if backend == "fused" and not libraries else backend or ""
    return _choose(op, backend, device, dtype, cannot, library_cannot, op in _off, libraries, transformed())


@constant_when_compiled
def _choose(op, backend, device, dtype, cannot, library_cannot, forced_plain, libraries, inside):
    if backend not in ("", *BACKENDS):
        raise ValueError(f"{op}: unknown backend {backend!r}: choose one of {', '.join(BACKENDS)}, or leave it empty")
    if backend == "torch" or forced_plain:
        return "torch"
    if backend == "fused" and op in NO_LIBRARY:
        raise RuntimeError(f"{op}: {NO_LIBRARY[op]}: leave backend empty")
    default = not backend and op in fused.BY_DEFAULT and libraries
    if op in fused.LIBRARIES and (backend == "fused" or default):
        reason = _library_refuses(op, device, dtype, library_cannot)
        if reason is None:
            return "fused"
        if backend:
            raise RuntimeError(f"{op}: backend 'fused' cannot run here: {reason}: leave backend empty, or pip install "
                               "--group gpu on a machine with a GPU")
        if device == "cuda":
            build.say_once(f"{op}: runs as chunks in PyTorch ({reason})")
    if backend == "fused":  # rms_norm and linear_cross_entropy: no library is faster
        backend = ""
    if op not in NATIVE:
        if backend not in ("", device):
            raise RuntimeError(f"{op}: backend {backend!r} cannot run here: the tensors are on {device}")
        return device
    return _choose_native(op, backend, device, dtype, cannot, inside)


def _library_refuses(op, device, dtype, library_cannot):
    """Return why the library cannot run this operator here. If it can, announce that once and return None."""
    if device != fused.GPU:
        return f"the tensors are on {device}"
    reason = fused.refusal(op, dtype) or library_cannot or fused.missing(op)
    if reason is None:
        tunes = ", which spends minutes on tuning its kernels at first use" if op in fused.BY_DEFAULT else ""
        build.say_once(f"{op}: {fused.LIBRARIES[op][0]}{tunes}")
    return reason


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
    build.say_once(f"native kernels: plain PyTorch runs instead, much slower ({reason})")
    return "torch"


@functools.cache
def unavailable(device):
    """None if the native kernels can run on `device`, else the reason, in one line. Raises RuntimeError if their source
    is at fault rather than the machine: falling back would silently ignore an edit."""
    if device not in ("cpu", "cuda"):
        return f"there are no kernels for {device}"
    if device == "cuda":
        if not torch.cuda.is_available():
            return "PyTorch sees no GPU"
        if min(map(torch.cuda.get_device_capability, range(torch.cuda.device_count()))) < (8, 0):
            return ("the kernels need GPUs of compute capability 8.0 (Ampere) or later: hide older ones with "
                    "CUDA_VISIBLE_DEVICES")
        return cuda.missing()
    try:
        build.library()
    except build.Broken as error:
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
