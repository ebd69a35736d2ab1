"""What stands between the two wide projections of a Mamba or Longhorn block as one operator, for training.

    x, z = halves of xz
    c = silu(causal_conv(x))
    r, k, q = split(W_x c);  dt = W_dt r
    y = scan(c, dt, k, q, z)

model.ScanBlock spells it out and takes this where nothing is asked of it that only the parts can do. Forwards both are the
same to the bit.

The surprise: backwards, nothing that autograd would put together is ever apart. The scan writes dz and the convolution dx
into the two halves of one tensor, and the product with W_x adds to the scan's gradient of c in place. By count (NOTES.md) that
is 12 bytes a token and channel in bfloat16 which need not move, of the 70 that move beside matrix products and scan.

Check it: python -m pytest tests/test_scan_block.py    Measure it: python bench/step.py --families=longhorn,mamba
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

import native
import ops
from scan import scan_backward, scan_forward


def can_run(xz, W, backend=None):
    """Whether the kernels of the scan and of the convolution of width W run on xz, and in its dtype.

    Raises ValueError and RuntimeError for a `backend` as `longhorn_scan` does.
    """
    dtype = native.autocast_dtype(xz.device.type) or xz.dtype
    converted = dtype == torch.float16 and xz.device.type == "cpu"
    not_native = dtype not in native.DTYPES or converted or W > native.MAX_WIDTH
    return native.choose("scan", backend, xz.device.type, not_native) != "torch"


def scan_block(xz, conv_weight, conv_bias, x_weight, dt_weight, A, D, dt_bias, update):
    """The lines above, differentiable once: xz (B, T, 2 d) -> y (B, T, d) in its dtype, or in autocast's.

    Args:
        conv_weight: (d, W); conv_bias: (d,); x_weight: W_x (R + 2 N, d); dt_weight: W_dt (d, R).
        A: (d, N), Mamba's rates; None for Longhorn. D, dt_bias: (d,).
        update: of the scan: "longhorn", "exact", "mamba_softplus" or "mamba".

    Raises ValueError for shapes that do not fit, and where `can_run` says no.
    """
    xz = xz.to(native.autocast_dtype(xz.device.type) or xz.dtype)
    d, W, R, both = xz.shape[-1] // 2, conv_weight.shape[-1], dt_weight.shape[-1], x_weight.shape[0]
    N = (both - R) // 2
    wanted = {"xz": (xz, (*xz.shape[:2], 2 * d)), "conv_weight": (conv_weight, (d, W)), "conv_bias": (conv_bias, (d,)),
              "x_weight": (x_weight, (R + 2 * N, d)), "dt_weight": (dt_weight, (d, R)), "A": (A, (d, N)), "D": (D, (d,)),
              "dt_bias": (dt_bias, (d,))}
    for name, (a, shape) in wanted.items():
        if a is not None and (tuple(a.shape) != shape or min(a.shape) < 1):
            raise ValueError(f"scan_block: {name} must be {shape} beside xz {tuple(xz.shape)}, got {tuple(a.shape)}")
    if N < 1 or (A is None) == update.startswith("mamba"):
        raise ValueError(f"scan_block: {N} states and {'no ' if A is None else ''}A do not go with update {update!r}")
    if not can_run(xz, W):
        raise ValueError(f"scan_block: no kernels for {xz.dtype} on {xz.device} and width {W}: see can_run")
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
def _scan_block(xz: Tensor, conv_weight: Tensor, conv_bias: Tensor, x_weight: Tensor, dt_weight: Tensor, A: Tensor | None,
                D: Tensor, dt_bias: Tensor, update: str, save: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
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
    rows = lambda width: native.empty(xz, B, T, width, dtype=xz.dtype)
    N = (both - dt_weight.shape[1]) // 2
    chunks = (B * -(-T // native.CHUNK), native.kept_states(xz, N), d) if save else (0,)
    return rows(d), rows(d), rows(both), rows(d), native.empty(xz, *chunks)


@torch.library.custom_op("longhorn::scan_block_backward", mutates_args=())
def _scan_block_backward(dy: Tensor, xz: Tensor, conv_weight: Tensor, conv_bias: Tensor, x_weight: Tensor, dt_weight: Tensor,
                         A: Tensor | None, D: Tensor, dt_bias: Tensor, c: Tensor, p: Tensor, dt: Tensor, chunks: Tensor,
                         update: str) -> list[Tensor]:
    """The gradients of the eight tensors behind dy, in their order; an empty one for an absent A."""
    x, z = xz.chunk(2, -1)
    r, k, q = _parts(p, dt_weight)
    dxz, others = (native.empty(xz, *xz.shape, dtype=xz.dtype) for _ in range(2))
    dx, dz = dxz.chunk(2, -1)
    dc, ddt = others.chunk(2, -1)  # not contiguous, because the scan writes its three gradients with one stride
    _, _, dk, dq, dA, dD, _, ddt_bias, _ = scan_backward(dy, None, c, dt, k, q, A, D, z, dt_bias, None, None, chunks, update,
                                                         into=(dc, ddt, dz))
    dp = native.empty(p, *p.shape, dtype=p.dtype)
    tokens = lambda a: a.flatten(0, 1)  # (B T, ...), a view of all that comes here
    for part, g in zip(_parts(dp, dt_weight), (tokens(ddt) @ dt_weight, dk, dq), strict=True):
        part.copy_(g.view(part.shape))
    ddt_weight, dx_weight = tokens(ddt).t() @ tokens(r), tokens(dp).t() @ tokens(c)
    tokens(dc).addmm_(tokens(dp), x_weight)
    _, dconv_weight, dconv_bias, _ = ops.conv_backward(dc, x, conv_weight, conv_bias, None, True, into=dx)
    return [dxz, dconv_weight, dconv_bias, dx_weight, ddt_weight, native.empty(xz, 0) if dA is None else dA, dD, ddt_bias]


@_scan_block_backward.register_fake
def _(dy, xz, conv_weight, conv_bias, x_weight, dt_weight, A, D, dt_bias, c, p, dt, chunks, update):
    given = (xz, conv_weight, conv_bias, x_weight, dt_weight, A, D, dt_bias)
    return [native.empty(xz, 0) if a is None else native.empty(xz, *a.shape, dtype=a.dtype) for a in given]


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


# For torch.utils.flop_counter: the matrix products inside, as it counts those outside. It passes shapes.

def _flops(xz, conv_weight, conv_bias, x_weight, dt_weight, *_):
    return 2 * xz[0] * xz[1] * (x_weight[0] * x_weight[1] + dt_weight[0] * dt_weight[1])


register_flop_formula(torch.ops.longhorn.scan_block)(lambda *tensors, **_: _flops(*tensors))
register_flop_formula(torch.ops.longhorn.scan_block_backward)(lambda dy, *tensors, **_: 2 * _flops(*tensors))
