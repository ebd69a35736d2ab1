"""The scans: one name each, one signature, several bodies. The plain loops below are the truth; the rest is speed.

    longhorn_scan    eps_i = beta_i / (1 + beta_i |k|^2) = 1 / (1 + exp(-(dt_i + dt_bias_i)) + |k|^2)        Eq. 6
                     S_ij += (eps_i k_j) (x_i - k_j S_ij)                                                    Eq. 7
       exact=True    S_ij += (eps_i k_j) (x_i - sum_l k_l S_il)               the full I - eps k k^T of Eq. 6
    selective_scan   S_ij = exp(delta_i A_ij) S_ij + delta_i x_i k_j,  delta = softplus(dt + dt_bias)       Mamba
    all three        y_i = (sum_j S_ij q_j + D_i x_i) * silu(z_i)                                     Algorithm 1

The surprise: nothing is built at install time. The first call on a CPU tensor has kernels/build.py compile longhorn_scan.cu
with the C++ compiler (seconds, then cached) and says so. Without a compiler the PyTorch path below runs everywhere,
and much slower.

    name        paper    shape      meaning
    x           x_t      (B, T, D)  value to remember
    dt          W_b x_t  (B, T, D)  logit of the step size: beta = sigmoid(dt + dt_bias)
    k, q        k_t, q_t (B, T, N)  key and query, shared by all channels; Mamba's B and C
    D, z        -        (D,), (B, T, D)  skip weight and gate, both optional, as in Mamba
    A           -        (D, N)     Mamba's decay rates, negative
    h0, hT      S_0, S_T (B, D, N)  state before the first and after the last step, float32
    cu_seqlens  -        (S + 1,)   where packed sequences begin and end: 0, ..., T; then B is 1, and h0, hT are (S, D, N)

Check it: python -m pytest tests/test_scan.py    Measure it: python bench/scan.py --device=cpu
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import build, fused, ops

MAX_EXPONENT = 88.0  # exp() of more overflows float32, and inf * 0 would make the gradient NaN; there eps is 0 anyway


# ------------------------------------------------------------------------------------------------ the truth: a loop each

def _step_size(dt, k):
    return (1 / (1 + torch.exp((-dt).clamp(max=MAX_EXPONENT)) + (k * k).sum(-1)))[..., None]  # (B, D, 1)


def _longhorn_step(S, x, dt, k, A):
    return S + (_step_size(dt, k) * k) * (x[..., None] - k * S)


def _exact_step(S, x, dt, k, A):
    return S + (_step_size(dt, k) * k) * (x[..., None] - (k * S).sum(-1, keepdim=True))


def _mamba_step(S, x, dt, k, A):
    return torch.exp(dt[..., None] * A) * S + (dt * x)[..., None] * k


def _mamba_softplus_step(S, x, dt, k, A):
    return _mamba_step(S, x, F.softplus(dt, threshold=50.0), k, A)


STEPS = {"longhorn": _longhorn_step, "exact": _exact_step, "mamba": _mamba_step, "mamba_softplus": _mamba_softplus_step}


def _loop(update, x, dt, k, q, A, D, z, dt_bias, h0):
    """(y, hT): Algorithm 1 with the update of that name, in float64 for float64 inputs and in float32 otherwise."""
    dtype, wide = x.dtype, torch.float64 if x.dtype == torch.float64 else torch.float32
    x, dt, k, q, A, D, z, dt_bias, h0 = (None if a is None else a.to(wide) for a in (x, dt, k, q, A, D, z, dt_bias, h0))
    if dt_bias is not None:
        dt = dt + dt_bias
    S = x.new_zeros(x.shape[0], x.shape[2], k.shape[2]) if h0 is None else h0  # (B, D, N)
    ys = [x[:, :0]]
    for x_t, dt_t, k_t, q_t in zip(x.unbind(1), dt.unbind(1), k.unbind(1), q.unbind(1), strict=True):
        S = STEPS[update](S, x_t, dt_t, k_t[:, None, :], A)  # (B, D, N)
        ys.append((S * q_t[:, None, :]).sum(-1)[:, None])  # (B, 1, D)
    y = torch.cat(ys, 1)  # (B, T, D)
    if D is not None:
        y = y + D * x
    if z is not None:
        y = y * F.silu(z)
    return y.to(dtype), S


def _packed(f, update, x, dt, k, q, A, D, z, dt_bias, h0, cu_seqlens):
    """f, a scan that returns (y, hT), over each of the packed sequences, or over all rows where nothing is packed."""
    if cu_seqlens is None:
        return f(update, x, dt, k, q, A, D, z, dt_bias, h0)
    ends, results = cu_seqlens.tolist(), []
    for s, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        part = [None if a is None else a[:, start:end] for a in (x, dt, k, q, z)]
        results.append(f(update, *part[:4], A, D, part[4], dt_bias, None if h0 is None else h0[s:s + 1]))
    ys, hTs = zip(*results, strict=True)
    return torch.cat(ys, 1), torch.cat(hTs, 0)


def longhorn_scan_ref(x, dt, k, q, D=None, z=None, dt_bias=None, h0=None, return_state=False, cu_seqlens=None, exact=False,
                      backend=None):
    """The scan as a loop over time that can be checked against Algorithm 1 by eye; differentiable.

    Computes in float64 for float64 inputs and in float32 otherwise. Arguments, result and errors are those of
    `longhorn_scan`; `backend` is accepted and ignored.
    """
    _check(x, dt, k, q, None, D, z, dt_bias, h0, cu_seqlens)
    y, hT = _packed(_loop, "exact" if exact else "longhorn", x, dt, k, q, None, D, z, dt_bias, h0, cu_seqlens)
    return (y, hT) if return_state else y


def selective_scan_ref(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False,
                       h0=None, cu_seqlens=None, backend=None):
    """`selective_scan` as a loop over time; differentiable, float64 for float64 inputs. `backend` is ignored."""
    _check(u, delta, B, C, A, D, z, delta_bias, h0, cu_seqlens, mamba=True)
    update = "mamba_softplus" if delta_softplus else "mamba"
    y, hT = _packed(_loop, update, u, delta, B, C, A, D, z, delta_bias, h0, cu_seqlens)
    return (y, hT) if return_last_state else y


def _scan_torch(update, x, dt, k, q, A, D, z, dt_bias, h0):
    """The loop, recomputed piece by piece in the backward: memory stays B x T x D, not B x T x D x N."""
    def loop(x, dt, k, q, z, S):
        return _loop(update, x, dt, k, q, A, D, z, dt_bias, S)

    return ops.in_pieces(loop, (x, dt, k, q, z), h0)


# --------------------------------------------------------------------------------------------------------- public ops

def longhorn_scan(x, dt, k, q, D=None, z=None, dt_bias=None, h0=None, return_state=False, cu_seqlens=None, exact=False,
                  backend=None):
    """Longhorn's recurrence (paper, Algorithm 1 and Eq. 7) over a sequence, with exact gradients.

    Args:
        x, dt, z: (B, T, D); k, q: (B, T, N), any T, D, N >= 1; float32, bfloat16, float16 (or float64: the loop).
            Mixed dtypes are promoted to the widest; under autocast all five are cast to its dtype. Views with any
            strides are taken; only those whose last dimension is not contiguous are copied.
        D, dt_bias: (D,) skip weight and bias of the step size's logit; h0: (B, D, N) initial state. Used as float32.
        return_state: also return the state after the last step.
        cu_seqlens: (S + 1,) integers 0, ..., T where packed sequences begin and end, as flash-attention's: B is 1, each
            sequence starts from its own h0 (S, D, N) or from zero, and hT is (S, D, N).
        exact: the full transition I - eps k k^T of Eq. 6 instead of its diagonal.
        backend: 'cpu' or 'cuda' (the native kernels), or 'torch' (the loop over time); None or "" takes the fastest that
            runs here and prints which at its first use. On a GPU up to 256 states; call it once before capturing a CUDA
            graph, since the first call builds and loads the kernels.

    Returns:
        y (B, T, D) in x's dtype; with return_state also hT (B, D, N), float32. Both are differentiable once; with
        backend='torch', and inside torch.func and forward-mode AD, where that is what runs, any number of times.

    Raises:
        ValueError: a shape, dtype or device that does not fit, with what was seen.
        RuntimeError: the backend cannot run here, with the reason; backend='fused', since no library has this scan.
    """
    _check(x, dt, k, q, None, D, z, dt_bias, h0, cu_seqlens)
    y, hT = _run("exact" if exact else "longhorn", x, dt, k, q, None, D, z, dt_bias, h0, cu_seqlens, backend)
    return (y, hT) if return_state else y


def selective_scan(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False,
                   h0=None, cu_seqlens=None, backend=None):
    """Mamba's selective scan, from the same kernels: S = exp(delta A) S + delta u B, y = (S C + D u) silu(z).

    The signature is that of mamba-ssm's selective_scan_fn, the layout ours: u, delta, z (B, T, D), A (D, N) negative,
    B, C (B, T, N), D, delta_bias (D,). With delta_softplus, delta = softplus(delta + delta_bias). h0 (B, D, N),
    cu_seqlens, backend, dtypes and errors are those of `longhorn_scan`. backend='fused' takes mamba-ssm's kernel; with h0,
    cu_seqlens or return_last_state (which mamba-ssm does not differentiate) this repository's own.

    Returns:
        y (B, T, D) in u's dtype; with return_last_state also the state (B, D, N) after the last step, float32. Both are
        differentiable once, as `longhorn_scan`'s.
    """
    _check(u, delta, B, C, A, D, z, delta_bias, h0, cu_seqlens, mamba=True)
    if backend == "fused":
        if return_last_state or h0 is not None or cu_seqlens is not None:
            backend = None
        elif build.choose("selective_scan", backend, u.device.type, u.dtype) == "fused":
            return _mamba_ssm(u, delta, A, B, C, D, z, delta_bias, delta_softplus)
    y, hT = _run("mamba_softplus" if delta_softplus else "mamba", u, delta, B, C, A, D, z, delta_bias, h0, cu_seqlens, backend)
    return (y, hT) if return_last_state else y


@build.not_compiled  # a C++ extension, opaque to the compiler
def _mamba_ssm(u, delta, A, B, C, D, z, delta_bias, softplus):
    dtype = build.compute_dtype(u)
    u, delta, B, C, z = (None if a is None else a.to(dtype).transpose(1, 2) for a in (u, delta, B, C, z))  # (B, D, T)
    A, D, delta_bias = (None if a is None else a.float() for a in (A, D, delta_bias))
    return fused.call("selective_scan", u, delta, A, B, C, D, z, delta_bias, delta_softplus=softplus).transpose(1, 2)


def _run(update, x, dt, k, q, A, D, z, dt_bias, h0, cu_seqlens, backend):
    dtype = x.dtype
    if any(a is not None and a.dtype != dtype for a in (dt, k, q, z)):
        common = functools.reduce(torch.promote_types, [a.dtype for a in (x, dt, k, q, z) if a is not None])
        x, dt, k, q, z = (None if a is None else a.to(common) for a in (x, dt, k, q, z))
    op = "selective_scan" if update.startswith("mamba") else "longhorn_scan"
    if build.choose(op, backend, x.device.type, x.dtype) == "torch":
        if build.compute_dtype(x) != x.dtype:
            dtype = build.compute_dtype(x)
            x, dt, k, q, z = (None if a is None else a.to(dtype) for a in (x, dt, k, q, z))
        y, hT = _packed(_scan_torch, update, x, dt, k, q, A, D, z, dt_bias, h0, cu_seqlens)
    else:
        A, D, dt_bias, h0 = (None if a is None else a.float() for a in (A, D, dt_bias, h0))
        tensors = (x, dt, k, q, A, D, z, dt_bias, h0)
        save = torch.is_grad_enabled() and any(a is not None and a.requires_grad for a in tensors)
        dtype = build.autocast_dtype(x.device.type) or dtype
        y, hT, _ = torch.ops.longhorn.scan(*tensors, cu_seqlens, update, save)
    return y.to(dtype), hT


def _shape(a):
    return None if a is None else tuple(a.shape)


def _check(x, dt, k, q, A, D, z, dt_bias, h0, cu_seqlens, mamba=False):
    names = ("u", "delta", "B", "C", "delta_bias") if mamba else ("x", "dt", "k", "q", "dt_bias")
    nx, ndt, nk, nq, nbias = names
    given = {nx: x, ndt: dt, nk: k, nq: q, "A": A, "D": D, "z": z, nbias: dt_bias, "h0": h0, "cu_seqlens": cu_seqlens}
    for name, a in given.items():  # first: the shape of what is no strided tensor may be an error of its own
        if a is not None:
            ops.check_tensor("scan", name, a, floats=name != "cu_seqlens")
    if x is None or k is None or x.dim() != 3 or k.dim() != 3 or min(*x.shape, *k.shape) < 1:
        raise ValueError(f"scan: {nx} must be (B, T, D) and {nk} (B, T, N), every size at least 1, got {nx} {_shape(x)}, "
                         f"{nk} {_shape(k)}")
    (B, T, d), N = x.shape, k.shape[2]
    rows = B
    if cu_seqlens is not None:
        rows = _check_cu_seqlens(cu_seqlens, B, T, x.device)
    wanted = {ndt: (dt, (B, T, d)), nk: (k, (B, T, N)), nq: (q, (B, T, N)), "D": (D, (d,)), "z": (z, (B, T, d)),
              nbias: (dt_bias, (d,)), "h0": (h0, (rows, d, N))}
    if mamba:
        wanted["A"] = (A, (d, N))
    for name, (a, shape) in wanted.items():
        if a is None and name not in (ndt, nk, nq, "A"):
            continue
        if _shape(a) != shape:
            raise ValueError(f"scan: {name} must be {shape} beside {nx} {_shape(x)} and {nk} {_shape(k)}, got {_shape(a)}")
        if a.device != x.device:
            raise ValueError(f"scan: {name} is on {a.device}, {nx} on {x.device}: move them to one device")


def _check_cu_seqlens(cu, B, T, device):
    """The number of packed sequences. On a GPU the values are checked there, without waiting for it."""
    if cu.dim() != 1 or len(cu) < 2 or cu.dtype not in (torch.int32, torch.int64) or B != 1:
        raise ValueError(f"scan: cu_seqlens must be (S + 1,) int32 or int64 with S at least 1, beside B = 1, got {_shape(cu)} "
                         f"{cu.dtype} beside B = {B}: flatten (B, T, D) to (1, B T, D)")
    if cu.device != device:
        raise ValueError(f"scan: cu_seqlens is on {cu.device}, the rest on {device}: move them to one device")
    if torch.compiler.is_compiling():
        return len(cu) - 1
    if cu.is_meta:
        raise ValueError("scan: cu_seqlens is on meta, where it has no values: the scan needs them")
    right = (cu[0] == 0) & (cu[-1] == T) & (cu[1:] >= cu[:-1]).all()
    if cu.is_cuda:
        torch._assert_async(right, f"scan: cu_seqlens must rise from 0 to T = {T}")
    elif not right:
        raise ValueError(f"scan: cu_seqlens must rise from 0 to T = {T}, got {cu.tolist()[:8]}{' ...' if len(cu) > 8 else ''}")
    return len(cu) - 1


# ------------------------------------------------------------------------------------------ the kernels, as PyTorch ops

def _kernels(x, k, cu_seqlens, update, direction):
    """The kernels for these arguments, and cu_seqlens as they take it."""
    rows = None if cu_seqlens is None else len(cu_seqlens) - 1
    kernels = build.Kernels(build.ScanArgs, x, update.removesuffix("_softplus"), rows, direction, N=k.shape[2],
                             softplus=int(update.endswith("_softplus")))
    return kernels, None if cu_seqlens is None else cu_seqlens.long().contiguous()


def _sizes(x, k, cu_seqlens):
    """(rows, chunks of all rows): see Row in longhorn_scan.cu."""
    B, T, _ = x.shape
    if cu_seqlens is None:
        return B, B * -(-T // build.CHUNK)
    return len(cu_seqlens) - 1, T // build.CHUNK + len(cu_seqlens) - 1


@torch.library.custom_op("longhorn::scan", mutates_args=())
def _scan(x: Tensor, dt: Tensor, k: Tensor, q: Tensor, A: Tensor | None, D: Tensor | None, z: Tensor | None,
                 dt_bias: Tensor | None, h0: Tensor | None, cu_seqlens: Tensor | None, update: str,
                 save: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(y, hT, states at the chunk boundaries - empty unless `save`)."""
    (B, T, d), N = x.shape, k.shape[2]
    kernels, cu = _kernels(x, k, cu_seqlens, update, "forward")
    rows, n_chunks = _sizes(x, k, cu_seqlens)
    S = kernels.segments
    y, hT = build.empty(x, B, T, d, dtype=kernels.dtype), build.empty(x, rows * S, d, N)
    chunks = build.empty(x, n_chunks, build.kept_states(x, N), d) if save else build.empty(x, 0)
    if S > 1:
        h0 = kernels.entering({"x": x, "dt": dt, "k": k, "q": q}, {"A": A, "bias": dt_bias}, "longhorn_scan_ends", h0)
    kernels("longhorn_scan_forward", {"x": x, "dt": dt, "k": k, "q": q, "z": z},
            {"A": A, "skip": D, "bias": dt_bias, "h0": h0}, y=y, hT=hT, chunks=chunks if save else None, cu=cu)
    return y.to(x.dtype), hT if S == 1 else hT.view(rows, S, d, N)[:, -1].clone(), chunks


@_scan.register_fake
def _(x, dt, k, q, A, D, z, dt_bias, h0, cu_seqlens, update, save):
    (B, T, d), N = x.shape, k.shape[2]
    rows, n_chunks = _sizes(x, k, cu_seqlens)
    chunks = build.empty(x, n_chunks, build.kept_states(x, N), d) if save else build.empty(x, 0)
    return build.empty(x, B, T, d, dtype=x.dtype), build.empty(x, rows, d, N), chunks


@torch.library.custom_op("longhorn::scan_backward", mutates_args=())
def _scan_backward(dy: Tensor, dhT: Tensor | None, x: Tensor, dt: Tensor, k: Tensor, q: Tensor, A: Tensor | None,
                   D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None, h0: Tensor | None, cu_seqlens: Tensor | None,
                   chunks: Tensor, update: str) -> list[Tensor]:
    """[dx, ddt, dk, dq, dA, dD, dz, ddt_bias, dh0]; those of absent arguments are empty."""
    if chunks.numel() == 0:
        raise RuntimeError("scan: the forward kept no states (save=False), so there is nothing to differentiate")
    (B, T, d), N = x.shape, k.shape[2]
    kernels, cu = _kernels(x, k, cu_seqlens, update, "backward")
    rows, _ = _sizes(x, k, cu_seqlens)
    dx, ddt, dz = (build.empty(x, B, T, d, dtype=kernels.dtype) if a is not None else None for a in (x, dt, z))
    kernels.args.dx_t = dx.stride(1)
    dk, dq = (build.empty(x, kernels.args.splits, B, T, N) for _ in range(2))
    S = kernels.segments
    dD, dbias = (build.empty(x, rows * S, d) if a is not None else None for a in (D, dt_bias))
    dA, dh0 = (build.empty(x, rows * S, d, N) if a is not None else None for a in (A, h0))
    if S > 1:
        dhT = kernels.entering({"x": x, "dt": dt, "k": k, "q": q, "z": z, "dy": dy}, {"A": A, "bias": dt_bias},
                               "longhorn_scan_pulls", dhT, reverse=1)
    kernels("longhorn_scan_backward", {"x": x, "dt": dt, "k": k, "q": q, "z": z, "dy": dy},
            {"A": A, "skip": D, "bias": dt_bias, "chunks": chunks, "dhT": dhT},
            dx=dx, ddt=ddt, dz=dz, dk=dk, dq=dq, dA=dA, dskip=dD, dbias=dbias, dh0=dh0, cu=cu)
    if dh0 is not None and S > 1:
        dh0 = dh0.view(rows, S, d, N)[:, 0].clone()
    rows_of_x, sums = lambda g: g.to(x.dtype), lambda g: None if g is None else g.sum(0)
    grads = [rows_of_x(dx), rows_of_x(ddt), rows_of_x(sums(dk)), rows_of_x(sums(dq)), sums(dA), sums(dD),
             None if dz is None else rows_of_x(dz), sums(dbias), dh0]
    return [build.empty(x, 0) if g is None else g for g in grads]


@_scan_backward.register_fake
def _(dy, dhT, x, dt, k, q, A, D, z, dt_bias, h0, cu_seqlens, chunks, update):
    (B, T, d), N = x.shape, k.shape[2]
    rows, _ = _sizes(x, k, cu_seqlens)
    shapes = [(B, T, d), (B, T, d), (B, T, N), (B, T, N), (d, N), (d,), (B, T, d), (d,), (rows, d, N)]
    dtypes = [x.dtype] * 4 + [torch.float32] * 2 + [x.dtype] + [torch.float32] * 2
    given = [x, dt, k, q, A, D, z, dt_bias, h0]
    return [build.empty(x, *(s if a is not None else (0,)), dtype=t if a is not None else torch.float32)
            for s, t, a in zip(shapes, dtypes, given, strict=True)]


def _scan_setup(ctx, inputs, output):
    *tensors, ctx.update, _ = inputs
    ctx.save_for_backward(*tensors, output[2])
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _scan_grad(ctx, dy, dhT, _):
    *tensors, cu_seqlens, chunks = ctx.saved_tensors
    if dy is None and dhT is None:
        return (None,) * 12
    if dy is None:
        dy = torch.zeros_like(tensors[0])
    grads = torch.ops.longhorn.scan_backward(dy, dhT, *tensors, cu_seqlens, chunks, ctx.update)
    return *(g if a is not None else None for g, a in zip(grads, tensors, strict=True)), None, None, None


_scan.register_autograd(_scan_grad, setup_context=_scan_setup)
ops.differentiable_once("scan", _scan_backward)
ops.one_after_another(_scan_backward)
build.register_autocast(torch.ops.longhorn.scan.default, casts=(0, 1, 2, 3, 6))  # x, dt, k, q, z
