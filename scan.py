"""longhorn_scan(): one name, one signature, several bodies. The plain loop below is the truth; the rest is speed.

    eps_i = beta_i / (1 + beta_i |k|^2) = 1 / (1 + exp(-(dt_i + dt_bias_i)) + |k|^2)      Eq. 6
    S_ij += (eps_i k_j) (x_i - k_j S_ij)                                                  Eq. 7
    y_i   = (sum_j S_ij q_j + D_i x_i) * silu(z_i)                                        Algorithm 1

The surprise: nothing is built at install time. The first call on a CPU tensor has native.py compile longhorn_scan.cu
with the C++ compiler (seconds, then cached) and says so. Without a compiler the PyTorch path below runs everywhere,
and much slower.

    name      paper    shape      meaning
    x         x_t      (B, T, D)  value to remember
    dt        W_b x_t  (B, T, D)  logit of the step size: beta = sigmoid(dt + dt_bias)
    k, q      k_t, q_t (B, T, N)  key and query, shared by all channels
    D, z      -        (D,), (B, T, D)  skip weight and gate, both optional, as in Mamba
    h0, hT    S_0, S_T (B, D, N)  state before the first and after the last step, float32

Check it: python -m pytest tests/test_scan.py    Measure it: python bench/scan.py --device=cpu
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import native

MAX_EXPONENT = 88.0  # exp() of more overflows float32, and inf * 0 would make the gradient NaN; there eps is 0 anyway


# ------------------------------------------------------------------------------------------------- the truth: a loop

def longhorn_scan_ref(x, dt, k, q, D=None, z=None, dt_bias=None, h0=None, return_state=False, backend=None):
    """The scan as a loop over time that can be checked against Algorithm 1 by eye; differentiable.

    Computes in float64 for float64 inputs and in float32 otherwise. Arguments, result and errors are those of
    `longhorn_scan`; `backend` is accepted and ignored.
    """
    _check(x, dt, k, q, D, z, dt_bias, h0)
    dtype, wide = x.dtype, torch.float64 if x.dtype == torch.float64 else torch.float32
    x, dt, k, q, D, z, dt_bias, h0 = (None if a is None else a.to(wide) for a in (x, dt, k, q, D, z, dt_bias, h0))
    if dt_bias is not None:
        dt = dt + dt_bias
    S = x.new_zeros(x.shape[0], x.shape[2], k.shape[2]) if h0 is None else h0  # (B, D, N)
    ys = []
    for x_t, dt_t, k_t, q_t in zip(x.unbind(1), dt.unbind(1), k.unbind(1), q.unbind(1), strict=True):
        k_t, q_t = k_t[:, None, :], q_t[:, None, :]  # (B, 1, N)
        eps = 1 / (1 + torch.exp((-dt_t).clamp(max=MAX_EXPONENT)) + (k_t * k_t).sum(-1))  # (B, D)
        S = S + (eps[..., None] * k_t) * (x_t[..., None] - k_t * S)  # (B, D, N)
        ys.append((S * q_t).sum(-1))  # (B, D)
    y = torch.stack(ys, 1)  # (B, T, D)
    if D is not None:
        y = y + D * x
    if z is not None:
        y = y * F.silu(z)
    y = y.to(dtype)
    return (y, S) if return_state else y


@torch.compiler.disable  # unrolled over time, a graph of it would have thousands of nodes a layer
def _scan_torch(x, dt, k, q, D, z, dt_bias, h0, chunk=64):
    """The loop, chunk by chunk, each recomputed in the backward: memory stays B x T x D, not B x T x D x N."""
    grad = torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in (x, dt, k, q, D, z, dt_bias, h0))
    ys = []
    for t in range(0, x.shape[1], chunk):
        part = [None if a is None else a[:, t:t + chunk] for a in (x, dt, k, q, z)]
        args = (*part[:4], D, part[4], dt_bias, h0, True)
        y, h0 = checkpoint(longhorn_scan_ref, *args, use_reentrant=False) if grad else longhorn_scan_ref(*args)
        ys.append(y)
    return torch.cat(ys, 1), h0


# --------------------------------------------------------------------------------------------------------- public op

def longhorn_scan(x, dt, k, q, D=None, z=None, dt_bias=None, h0=None, return_state=False, backend=None):
    """Longhorn's recurrence (paper, Algorithm 1 and Eq. 7) over a sequence, with exact gradients.

    Args:
        x, dt, z: (B, T, D); k, q: (B, T, N), any T, D, N >= 1; float32, bfloat16, float16 (or float64: the loop).
            Mixed dtypes are promoted to the widest; under autocast all five are cast to its dtype. Views with any
            strides are taken; only those whose last dimension is not contiguous are copied.
        D, dt_bias: (D,) skip weight and bias of the step size's logit; h0: (B, D, N) initial state. Used as float32.
        return_state: also return the state after the last step.
        backend: 'cpu', 'cuda' or 'torch'; None takes the fastest there is, and says which when it is first used.

    Returns:
        y (B, T, D) in x's dtype; with return_state also hT (B, D, N), float32, differentiable.

    Raises:
        ValueError: a shape, dtype or device that does not fit, with what was seen.
        RuntimeError: the backend that was asked for cannot run here, with the reason.
    """
    _check(x, dt, k, q, D, z, dt_bias, h0)
    dtype = x.dtype
    if any(a is not None and a.dtype != dtype for a in (dt, k, q, z)):
        common = functools.reduce(torch.promote_types, [a.dtype for a in (x, dt, k, q, z) if a is not None])
        x, dt, k, q, z = (None if a is None else a.to(common) for a in (x, dt, k, q, z))
    if native.choose("scan", backend, x.device.type, x.dtype not in native.DTYPES) == "torch":
        lower = native.autocast_dtype(x.device.type)
        if lower is not None and x.dtype != torch.float64:
            x, dt, k, q, z = (None if a is None else a.to(lower) for a in (x, dt, k, q, z))
            dtype = lower
        y, hT = _scan_torch(x, dt, k, q, D, z, dt_bias, h0)
    else:
        D, dt_bias, h0 = (None if a is None else a.float() for a in (D, dt_bias, h0))
        save = torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in (x, dt, k, q, D, z, dt_bias, h0))
        dtype = native.autocast_dtype(x.device.type) or dtype
        y, hT, _ = torch.ops.longhorn.scan(x, dt, k, q, D, z, dt_bias, h0, save)
    y = y.to(dtype)
    return (y, hT) if return_state else y


def _shape(a):
    return None if a is None else tuple(a.shape)


def _check(x, dt, k, q, D, z, dt_bias, h0):
    if x is None or k is None or x.dim() != 3 or k.dim() != 3 or min(*x.shape, *k.shape) < 1:
        raise ValueError(f"scan: x must be (B, T, D) and k (B, T, N), every size at least 1, got x {_shape(x)}, k {_shape(k)}")
    (B, T, d), N = x.shape, k.shape[2]
    wanted = {"dt": (dt, (B, T, d)), "k": (k, (B, T, N)), "q": (q, (B, T, N)), "D": (D, (d,)), "z": (z, (B, T, d)),
              "dt_bias": (dt_bias, (d,)), "h0": (h0, (B, d, N))}
    for name, (a, shape) in wanted.items():
        if a is None and name not in ("dt", "k", "q"):
            continue
        if _shape(a) != shape:
            raise ValueError(f"scan: {name} must be {shape} beside x {_shape(x)} and k {_shape(k)}, got {_shape(a)}")
        if a.device != x.device:
            raise ValueError(f"scan: {name} is on {a.device}, x on {x.device}: move them to one device")
    for name, a in {"x": x, **{name: a for name, (a, _) in wanted.items()}}.items():
        if a is not None and not a.dtype.is_floating_point:
            raise ValueError(f"scan: {name} must be floating point, got {a.dtype}")


# ------------------------------------------------------------------------------------------ the kernels, as PyTorch ops

@torch.library.custom_op("longhorn::scan", mutates_args=())
def _scan(x: Tensor, dt: Tensor, k: Tensor, q: Tensor, D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None,
          h0: Tensor | None, save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(y, hT, states at the chunk boundaries - empty unless `save`)."""
    (B, T, d), N = x.shape, k.shape[2]
    kernels = native.Kernels(native.ScanArgs, x, N=N)
    y, hT = native.empty(x, B, T, d, dtype=kernels.dtype), native.empty(x, B, d, N)
    chunks = native.empty(x, B, -(-T // native.CHUNK), N, d) if save else native.empty(x, 0)
    kernels("longhorn_scan_forward", {"x": x, "dt": dt, "k": k, "q": q, "z": z}, {"skip": D, "bias": dt_bias, "h0": h0},
            y=y, hT=hT, chunks=chunks if save else None)
    return y.to(x.dtype), hT, chunks


@_scan.register_fake
def _(x, dt, k, q, D, z, dt_bias, h0, save):
    (B, T, d), N = x.shape, k.shape[2]
    chunks = native.empty(x, B, -(-T // native.CHUNK), N, d) if save else native.empty(x, 0)
    return native.empty(x, B, T, d, dtype=x.dtype), native.empty(x, B, d, N), chunks


@torch.library.custom_op("longhorn::scan_backward", mutates_args=())
def _scan_backward(dy: Tensor, dhT: Tensor | None, x: Tensor, dt: Tensor, k: Tensor, q: Tensor, D: Tensor | None,
                   z: Tensor | None, dt_bias: Tensor | None, h0: Tensor | None, chunks: Tensor) -> list[Tensor]:
    """[dx, ddt, dk, dq, dD, dz, ddt_bias, dh0]; those of absent arguments are empty."""
    if chunks.numel() == 0:
        raise RuntimeError("scan: the forward kept no states (save=False), so there is nothing to differentiate")
    (B, T, d), N = x.shape, k.shape[2]
    kernels = native.Kernels(native.ScanArgs, x, N=N)
    dx, ddt, dz = (native.empty(x, B, T, d, dtype=kernels.dtype) if a is not None else None for a in (x, dt, z))
    dk, dq = (native.empty(x, kernels.args.splits, B, T, N) for _ in range(2))
    dD, dbias = (native.empty(x, B, d) if a is not None else None for a in (D, dt_bias))
    dh0 = native.empty(x, B, d, N) if h0 is not None else None
    kernels("longhorn_scan_backward", {"x": x, "dt": dt, "k": k, "q": q, "z": z, "dy": dy},
            {"skip": D, "bias": dt_bias, "chunks": chunks, "dhT": dhT},
            dx=dx, ddt=ddt, dz=dz, dk=dk, dq=dq, dskip=dD, dbias=dbias, dh0=dh0)
    none = native.empty(x, 0)
    return [dx.to(x.dtype), ddt.to(x.dtype), dk.sum(0).to(x.dtype), dq.sum(0).to(x.dtype),
            none if dD is None else dD.sum(0), none.clone() if dz is None else dz.to(x.dtype),
            none.clone() if dbias is None else dbias.sum(0), none.clone() if dh0 is None else dh0]


@_scan_backward.register_fake
def _(dy, dhT, x, dt, k, q, D, z, dt_bias, h0, chunks):
    (B, T, d), N = x.shape, k.shape[2]
    shapes = [(B, T, d), (B, T, d), (B, T, N), (B, T, N), (d,), (B, T, d), (d,), (B, d, N)]
    dtypes = [x.dtype] * 4 + [torch.float32, x.dtype, torch.float32, torch.float32]
    given = [x, dt, k, q, D, z, dt_bias, h0]
    return [native.empty(x, *(s if a is not None else (0,)), dtype=t if a is not None else torch.float32)
            for s, t, a in zip(shapes, dtypes, given, strict=True)]


def _scan_setup(ctx, inputs, output):
    *tensors, _ = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _scan_grad(ctx, dy, dhT, _):
    *tensors, chunks = ctx.saved_tensors
    if dy is None and dhT is None:
        return (None,) * 9
    if dy is None:
        dy = torch.zeros_like(tensors[0])
    grads = torch.ops.longhorn.scan_backward(dy, dhT, *tensors, chunks)
    return *(g if a is not None else None for g, a in zip(grads, tensors, strict=True)), None


_scan.register_autograd(_scan_grad, setup_context=_scan_setup)
native.register_autocast(torch.ops.longhorn.scan.default, casts=(0, 1, 2, 3, 5))  # x, dt, k, q, z
