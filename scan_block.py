"""What stands between the two wide projections of a Mamba or Longhorn block as one operator, for training.

    x, z = halves of xz
    c = silu(causal_conv(x))
    r, k, q = split(W_x c);  dt = W_dt r
    y = scan(c, dt, k, q, z)

model.ScanBlock spells it out and takes this where nothing is asked of it that only the parts can do. Forwards both are the
same to the bit.

The surprise: backwards, what autograd would put together from wide parts is never apart. The scan writes dz and the
convolution dx into the two halves of one tensor, and the product with W_x adds to the scan's gradient of c in place. By count
(NOTES.md) that is 12 bytes a token and channel in bfloat16 which need not move, of the 70 that move beside matrix products and
scan.

Check it: python -m pytest tests/test_scan_block.py    Measure it: python bench/step.py --families=longhorn,mamba
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kernels import build, ops
from kernels.scan import STEPS, scan_backward, scan_forward


def also_in_scan_block(update):
    """Marks a block's `conv`, or its `scan` with the update below, as what this operator does too: then it trains with the
    operator. Who edits such a method takes the mark off; one that replaces it has none."""
    def mark(method):
        method.in_scan_block = update
        return method

    return mark


def marked(method):
    """The update in a method's own mark, or None: a wrapper that `functools.wraps` made has the mark of what it wraps."""
    update = getattr(method, "in_scan_block", None)
    return update if isinstance(update, str) and not hasattr(method, "__wrapped__") else None


def is_plain(linear):
    """Whether a linear map is its weight and nothing else: no bias, no hook, no other class or `forward`."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return (type(linear) is nn.Linear and linear.bias is None and "forward" not in vars(linear)
            and not any(getattr(linear, name) for name in hooks))


def can_run(xz, W, backend=None):
    """Whether the kernels of the scan and of the convolution of width W run on xz, and in its dtype.

    Raises ValueError and RuntimeError for a `backend` as `longhorn_scan` does.
    """
    dtype = _dtype(xz)
    converted = dtype == torch.float16 and xz.device.type == "cpu"  # the parts do that, where they write rows of their own
    not_native = dtype not in build.DTYPES or W > build.MAX_WIDTH
    return build.choose("scan", backend, xz.device.type, not_native) != "torch" and not converted


def _dtype(xz):
    """What the block computes rows in: autocast leaves float64 as it is."""
    return xz.dtype if xz.dtype == torch.float64 else build.autocast_dtype(xz.device.type) or xz.dtype


def scan_block(xz, conv_weight, conv_bias, x_weight, dt_weight, A, D, dt_bias, update):
    """The lines above, differentiable once: xz (B, T, 2 d) -> y (B, T, d) in its dtype, or in autocast's.

    Args:
        conv_weight: (d, W); conv_bias: (d,) or None; x_weight: W_x (R + 2 N, d); dt_weight: W_dt (d, R).
        A: (d, N), Mamba's rates; None for Longhorn. D, dt_bias: (d,), or None.
        update: of the scan: "longhorn", "exact", "mamba_softplus" or "mamba".

    Raises ValueError for shapes that do not fit, and where `can_run` says no.
    """
    matrices = {"conv_weight": conv_weight, "x_weight": x_weight, "dt_weight": dt_weight}
    given = {"xz": xz, **matrices, "conv_bias": conv_bias, "A": A, "D": D, "dt_bias": dt_bias}
    for name, a in given.items():
        if a is not None or name in ("xz", *matrices):
            ops.check_tensor("scan_block", name, a)
    if xz.dim() != 3 or any(a.dim() != 2 for a in matrices.values()) or min(*xz.shape, *conv_weight.shape, *dt_weight.shape) < 1:
        seen = ", ".join(f"{name} {tuple(given[name].shape)}" for name in ("xz", *matrices))
        raise ValueError("scan_block: xz must be (B, T, 2 d), conv_weight (d, W), x_weight (R + 2 N, d), dt_weight (d, R), every "
                         f"size at least 1, got {seen}")
    xz = xz.to(_dtype(xz))
    d, W, R, both = xz.shape[-1] // 2, conv_weight.shape[-1], dt_weight.shape[-1], x_weight.shape[0]
    N = (both - R) // 2
    wanted = {"xz": (*xz.shape[:2], 2 * d), "conv_weight": (d, W), "x_weight": (R + 2 * N, d), "dt_weight": (d, R),
              "conv_bias": (d,), "A": (d, N), "D": (d,), "dt_bias": (d,)}
    for name, a in given.items():
        if a is not None and tuple(a.shape) != wanted[name]:
            raise ValueError(f"scan_block: {name} must be {wanted[name]} beside xz {tuple(xz.shape)}, got {tuple(a.shape)}")
        if a is not None and a.device != xz.device:
            raise ValueError(f"scan_block: {name} is on {a.device}, xz on {xz.device}: move them to one device")
    if update not in STEPS:
        raise ValueError(f"scan_block: unknown update {update!r}: choose one of {', '.join(STEPS)}")
    if N < 1 or (A is None) == update.startswith("mamba"):
        raise ValueError(f"scan_block: {N} states and {'no ' if A is None else ''}A do not go with update {update!r}")
    if not can_run(xz, W):
        raise ValueError(f"scan_block: its kernels do not run here on {xz.dtype}, {xz.device} and width {W}: ask can_run before")
    narrow = [a.to(xz.dtype) for a in (x_weight, dt_weight)]
    floats = [None if a is None else a.float() for a in (conv_weight, conv_bias, A, D, dt_bias)]
    tensors = (xz, *floats[:2], *narrow, *floats[2:])
    save = torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in tensors)
    return torch.ops.longhorn.scan_block(*tensors, update, save)[0]


def _parts(p, dt_weight):
    """(r, k, q) of p (B, T, R + 2 N): views (B, T, R), (B, T, N), (B, T, N)."""
    R = dt_weight.shape[1]
    N = (p.shape[-1] - R) // 2
    return p.split([R, N, N], -1)


@torch.library.custom_op("longhorn::scan_block", mutates_args=())
def _scan_block(xz: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, x_weight: Tensor, dt_weight: Tensor,
                A: Tensor | None, D: Tensor | None, dt_bias: Tensor | None, update: str,
                save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(y, c, p = W_x c, dt, the scan's states at the chunk boundaries)."""
    x, z = xz.chunk(2, -1)
    c = ops.conv_forward(x, conv_weight, conv_bias, None, True)
    p = F.linear(c, x_weight)
    r, k, q = _parts(p, dt_weight)
    dt = F.linear(r, dt_weight)
    y, _, chunks = scan_forward(c, dt, k, q, A, D, z, dt_bias, None, None, update, save)
    return y, c, p, dt, chunks


@_scan_block.register_fake
def _(xz, conv_weight, conv_bias, x_weight, dt_weight, A, D, dt_bias, update, save):
    (B, T, _), (both, d) = xz.shape, x_weight.shape
    rows = lambda width: build.empty(xz, B, T, width, dtype=xz.dtype)
    N = (both - dt_weight.shape[1]) // 2
    chunks = (B * -(-T // build.CHUNK), build.kept_states(xz, N), d) if save else (0,)
    return rows(d), rows(d), rows(both), rows(d), build.empty(xz, *chunks)


@torch.library.custom_op("longhorn::scan_block_backward", mutates_args=())
def _scan_block_backward(dy: Tensor, xz: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, x_weight: Tensor,
                         dt_weight: Tensor, A: Tensor | None, D: Tensor | None, dt_bias: Tensor | None, c: Tensor, p: Tensor,
                         dt: Tensor, chunks: Tensor, update: str) -> list[Tensor]:
    """The gradients of the eight tensors behind dy, in their order; those of absent ones are empty."""
    x, z = xz.chunk(2, -1)
    r, k, q = _parts(p, dt_weight)
    dxz, others = (build.empty(xz, *xz.shape, dtype=xz.dtype) for _ in range(2))
    dx, dz = dxz.chunk(2, -1)
    dc, ddt = others.chunk(2, -1)  # not contiguous, because the scan writes its three gradients with one stride
    _, _, dk, dq, dA, dD, _, ddt_bias, _ = scan_backward(dy, None, c, dt, k, q, A, D, z, dt_bias, None, None, chunks, update,
                                                         into=(dc, ddt, dz))
    tokens = lambda a: a.flatten(0, 1)  # (B T, ...), a view of all that comes here
    dp = torch.cat([tokens(ddt) @ dt_weight, tokens(dk), tokens(dq)], 1)  # (B T, R + 2 N)
    ddt_weight, dx_weight = tokens(ddt).t() @ tokens(r), dp.t() @ tokens(c)
    tokens(dc).addmm_(dp, x_weight)
    _, dconv_weight, dconv_bias, _ = ops.conv_backward(dc, x, conv_weight, conv_bias, None, True, into=dx)
    grads = [dxz, dconv_weight, dconv_bias, dx_weight, ddt_weight, dA, dD, ddt_bias]
    return [build.empty(xz, 0) if g is None else g for g in grads]


@_scan_block_backward.register_fake
def _(dy, xz, conv_weight, conv_bias, x_weight, dt_weight, A, D, dt_bias, c, p, dt, chunks, update):
    given = (xz, conv_weight, conv_bias, x_weight, dt_weight, A, D, dt_bias)
    return [build.empty(xz, 0) if a is None else build.empty(xz, *a.shape, dtype=a.dtype) for a in given]


def _setup(ctx, inputs, output):
    *tensors, ctx.update, _ = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _grad(ctx, dy, *_):
    tensors = ctx.saved_tensors
    if dy is None:
        return (None,) * 10
    grads = torch.ops.longhorn.scan_block_backward(dy, *tensors, ctx.update)
    return *(g if a is not None else None for g, a in zip(grads, tensors[:8], strict=True)), None, None


_scan_block.register_autograd(_grad, setup_context=_setup)
ops.differentiable_once("scan", _scan_block_backward)
ops.one_after_another(_scan_block_backward)


# For torch.utils.flop_counter: the matrix products inside, as it counts those outside. It passes shapes.

def _flops(xz, conv_weight, conv_bias, x_weight, dt_weight, *_):
    return 2 * xz[0] * xz[1] * (x_weight[0] * x_weight[1] + dt_weight[0] * dt_weight[1])


register_flop_formula(torch.ops.longhorn.scan_block)(lambda *tensors, **_: _flops(*tensors))
register_flop_formula(torch.ops.longhorn.scan_block_backward)(lambda dy, *tensors, **_: 2 * _flops(*tensors))
