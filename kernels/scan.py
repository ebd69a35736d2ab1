"""The scans: Longhorn's recurrence, its exact form and Mamba's recurrence, as operators with exact gradients.

    longhorn_scan    eps_i = beta_i / (1 + beta_i |k|^2) = 1 / (1 + exp(-(dt_i + dt_bias_i)) + |k|^2)        Eq. 6
                     S_ij += (eps_i k_j) (x_i - k_j S_ij)                                                    Eq. 7
       exact=True    S_ij += (eps_i k_j) (x_i - sum_l k_l S_il)               the full I - eps k k^T of Eq. 6
    selective_scan   S_ij = exp(delta_i A_ij) S_ij + delta_i x_i k_j,  delta = softplus(dt + dt_bias)       Mamba
    all three        y_i = (sum_j S_ij q_j + D_i x_i) * silu(z_i)                                     Algorithm 1

The loops below are the reference; longhorn_scan.cu computes the same thing faster and is compiled at the first call.
To try another recurrence, edit the loop and run with backend="torch".

    name        paper    shape      meaning
    B, T, D, N  -        -          batch, steps, channels, states per channel
    x           x_t      (B, T, D)  value to remember
    dt          W_b x_t  (B, T, D)  logit of the step size: beta = sigmoid(dt + dt_bias)
    k, q        k_t, q_t (B, T, N)  key and query, shared by all channels; Mamba's B and C
    D, z        -        (D,), (B, T, D)  skip weight and gate, both optional, as in Mamba
    A           -        (D, N)     Mamba's decay rates, negative
    S           S_t      (B, D, N)  state, float32
    h0, hT      S_0, S_T (B, D, N)  state before the first and after the last step, float32
    cu_seqlens  -        (S + 1,)   boundaries of packed sequences: 0, ..., T; then B is 1, h0 and hT (S, D, N)

    python -m pytest tests/test_conformance.py   python bench/scan.py --device=cpu
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from common import torch_private
from kernels import build, choose, fused, launch, ops

MAX_EXPONENT = 88.0  # beyond it exp() overflows float32, and inf * 0 would make the gradient NaN; eps is 0 there anyway


# -------------------------------------------------------------------------------------------------- the loops over time

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
    """(y, hT) of Algorithm 1 with this update (a key of STEPS), in float64 for float64 inputs, else in float32."""
    dtype = x.dtype
    wide = torch.promote_types(x.dtype, torch.float32)
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


def _scan_torch(update, x, dt, k, q, A, D, z, dt_bias, h0, cu_seqlens, reverse):
    """Run the loop over each row, or over each packed sequence."""
    def scan(rows, h0):
        loop = lambda x, dt, k, q, z, S: _loop(update, x, dt, k, q, A, D, z, dt_bias, S)
        y, hT = ops.in_pieces(loop, [ops.flip(a, reverse, 1) for a in rows], h0)
        return ops.flip(y, reverse, 1), hT

    rows = (x, dt, k, q, z)
    if cu_seqlens is None:
        return scan(rows, h0)
    ends = cu_seqlens.tolist()
    results = []
    for s, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        one = [None if a is None else a[:, start:end] for a in rows]
        results.append(scan(one, None if h0 is None else h0[s:s + 1]))
    ys, hTs = zip(*results, strict=True)
    return torch.cat(ys, 1), torch.cat(hTs, 0)


# --------------------------------------------------------------------------------------------------------- public ops

def longhorn_scan(x, dt, k, q, D=None, z=None, dt_bias=None, h0=None, return_state=False, cu_seqlens=None, exact=False,
                  reverse=False, backend=None):
    """Longhorn's recurrence (paper, Algorithm 1 and Eq. 7) over a sequence, with exact gradients.

    Args:
        x, dt, z: (B, T, D); k, q: (B, T, N), any T, D, N >= 1; float32, bfloat16, float16 (or float64: the loop).
            Mixed dtypes are promoted to the widest; under autocast all five are cast to its dtype. Any strides; only
            tensors whose last dimension is not contiguous are copied.
        D, dt_bias: (D,) skip weight and bias of the step size's logit; h0: (B, D, N) initial state. All three are used
            in float32.
        return_state: also return the state after the last step.
        cu_seqlens: (S + 1,) integers 0, ..., T, the boundaries of packed sequences as in flash-attention: B is 1, each
            sequence starts from its own h0 (S, D, N) or from zero, and hT is (S, D, N).
        exact: use the full transition I - eps k k^T of Eq. 6 instead of its diagonal.
        reverse: run from the last step to the first, as if every tensor were flipped in T and y flipped back, but
            without copying. h0 is the state after the last step, hT the state before the first. Used for images.
        backend: 'cpu' or 'cuda' (native kernels) or 'torch' (the loop over time); None or "": the fastest that runs
            here. A GPU takes up to 128 or 256 states, depending on its shared memory. Call the scan once before
            capturing a CUDA graph, because the first call compiles.

    Returns:
        y (B, T, D) in x's dtype; with return_state also hT (B, D, N), float32. Differentiable once; any number of times
        if the loop runs (backend='torch', torch.func, forward-mode AD).

    Raises:
        ValueError: a shape, dtype or device does not fit; the message says which.
        RuntimeError: the backend cannot run here; the message says why. backend='fused': no library has this scan.
    """
    _check(x, dt, k, q, None, D, z, dt_bias, h0, cu_seqlens)
    y, hT = _run("exact" if exact else "longhorn", x, dt, k, q, None, D, z, dt_bias, h0, cu_seqlens, reverse,
                 backend)
    return (y, hT) if return_state else y


def selective_scan(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False,
                   h0=None, cu_seqlens=None, reverse=False, backend=None):
    """Mamba's selective scan (arXiv 2312.00752): S = exp(delta A) S + delta u B, y = (S C + D u) silu(z).

    Takes the arguments of mamba-ssm's selective_scan_fn in another layout: u, delta, z (B, T, D), A (D, N) negative,
    B, C (B, T, N), D, delta_bias (D,). With delta_softplus, delta = softplus(delta + delta_bias). h0 (B, D, N),
    cu_seqlens, reverse, backend, dtypes, results and errors are as for `longhorn_scan`. backend='fused' calls
    mamba-ssm. With h0, cu_seqlens, documents or return_last_state it calls the native kernels, because mamba-ssm lacks
    these or does not differentiate them.
    """
    _check(u, delta, B, C, A, D, z, delta_bias, h0, cu_seqlens, mamba=True)
    if backend == "fused":
        if return_last_state or h0 is not None or cu_seqlens is not None or ops.documents_of(u) is not None:
            backend = None
        elif choose.choose("selective_scan", backend, u.device.type, u.dtype) == "fused":
            u, delta, B, C, z = (ops.flip(a, reverse, 1) for a in (u, delta, B, C, z))
            return ops.flip(_mamba_ssm(u, delta, A, B, C, D, z, delta_bias, delta_softplus), reverse, 1)
    update = "mamba_softplus" if delta_softplus else "mamba"
    y, hT = _run(update, u, delta, B, C, A, D, z, delta_bias, h0, cu_seqlens, reverse, backend)
    return (y, hT) if return_last_state else y


@torch_private.not_compiled  # a C++ extension, opaque to the compiler
def _mamba_ssm(u, delta, A, B, C, D, z, delta_bias, softplus):
    dtype = choose.compute_dtype(u)
    u, delta, B, C, z = (None if a is None else a.to(dtype).transpose(1, 2) for a in (u, delta, B, C, z))  # (B, D, T)
    A, D, delta_bias = (None if a is None else a.float() for a in (A, D, delta_bias))
    return fused.call("selective_scan", u, delta, A, B, C, D, z, delta_bias, delta_softplus=softplus).transpose(1, 2)


def _run(update, x, dt, k, q, A, D, z, dt_bias, h0, cu_seqlens, reverse, backend):
    packed = ops.documents_of(x) if h0 is None and cu_seqlens is None else None
    if packed is not None:  # concatenate the rows; no state is returned: only a row's last document could continue
        flat = [None if a is None else a.flatten(0, 1)[None] for a in (x, dt, k, q, z)]
        y, _ = _run(update, *flat[:4], A, D, flat[4], dt_bias, None, packed.cu_seqlens, reverse, backend)
        return y.view_as(x), None
    rows = [x, dt, k, q, z]
    common = functools.reduce(torch.promote_types, {a.dtype for a in rows if a is not None})
    device = x.device.type
    out = choose.compute_dtype(x)
    if common != torch.float64:
        common = choose.autocast_dtype(device) or common
    x, dt, k, q, z = [launch.cast(a, common) for a in rows]
    op = "selective_scan" if update.startswith("mamba") else "longhorn_scan"
    if choose.choose(op, backend, device, common) == "torch":
        y, hT = _scan_torch(update, x, dt, k, q, A, D, z, dt_bias, h0, cu_seqlens, reverse)
    else:
        A, D, dt_bias, h0 = map(launch.cast, (A, D, dt_bias, h0))
        tensors = (x, dt, k, q, A, D, z, dt_bias, h0)
        save = torch.is_grad_enabled() and any([a is not None and a.requires_grad for a in tensors])
        y, hT, _ = _scan_op(*tensors, cu_seqlens, update, save, reverse)
    return launch.cast(y, out), hT


def _check(x, dt, k, q, A, D, z, dt_bias, h0, cu_seqlens, mamba=False):
    names = ("u", "delta", "B", "C", "delta_bias") if mamba else ("x", "dt", "k", "q", "dt_bias")
    nx, ndt, nk, nq, nbias = names
    ops.check_tensor("scan", nx, x)  # first: even reading the shape of a non-strided tensor may fail
    ops.check_tensor("scan", nk, k)
    beside = f"{nx} {tuple(x.shape)} and {nk} {tuple(k.shape)}"
    if x.dim() != 3 or k.dim() != 3 or min(*x.shape, *k.shape) < 1:
        raise ValueError(f"scan: {nx} must be (B, T, D) and {nk} (B, T, N), every size at least 1, got {beside}")
    B, T, d = x.shape
    N = k.shape[2]
    rows = B if cu_seqlens is None else _check_cu_seqlens(cu_seqlens, B, T, x.device)
    wanted = {ndt: (dt, (B, T, d)), nk: (k, (B, T, N)), nq: (q, (B, T, N)), "D": (D, (d,)), "z": (z, (B, T, d)),
              nbias: (dt_bias, (d,)), "h0": (h0, (rows, d, N)), **({"A": (A, (d, N))} if mamba else {})}
    ops.check_shapes("scan", beside, x.device, wanted, optional=("D", "z", nbias, "h0"))


def _check_cu_seqlens(cu, B, T, device):
    """Check cu_seqlens and return the number of packed sequences. On a GPU the values are checked asynchronously."""
    ops.check_tensor("scan", "cu_seqlens", cu, floats=False)
    if cu.dim() != 1 or len(cu) < 2 or cu.dtype not in (torch.int32, torch.int64) or B != 1:
        raise ValueError("scan: cu_seqlens must be (S + 1,) int32 or int64 with S at least 1, and B must be 1, got "
                         f"{tuple(cu.shape)} {cu.dtype} and B = {B}: flatten (B, T, D) to (1, B T, D)")
    if cu.device != device:
        raise ValueError(f"scan: cu_seqlens is on {cu.device}, the rest on {device}: move them to one device")
    if torch.compiler.is_compiling():
        return len(cu) - 1
    if cu.is_meta:
        raise ValueError("scan: cu_seqlens is on meta, where it has no values: the scan needs them")
    right = (cu[0] == 0) & (cu[-1] == T) & (cu[1:] >= cu[:-1]).all()
    if cu.is_cuda:
        torch_private.assert_async(right, f"scan: cu_seqlens must rise from 0 to T = {T}")
    elif not right:
        values = f"{cu.tolist()[:8]}{' ...' if len(cu) > 8 else ''}"
        raise ValueError(f"scan: cu_seqlens must rise from 0 to T = {T}, got {values}")
    return len(cu) - 1


# ------------------------------------------------------------------------------------------ the kernels, as PyTorch ops

def _kernels(x, k, z, cu_seqlens, update, reverse, backward=False):
    """The kernels for these arguments, and cu_seqlens in the form that the kernels take."""
    rows = None if cu_seqlens is None else len(cu_seqlens) - 1
    kernels = launch.Kernels(build.ScanArgs, x, update.removesuffix("_softplus"), rows, z is not None,
                            backward, N=k.shape[2], softplus=int(update.endswith("_softplus")))
    kernels.reversed = reverse
    if cu_seqlens is not None:
        cu_seqlens = (x.shape[1] - cu_seqlens).flip(0) if reverse else cu_seqlens
        cu_seqlens = cu_seqlens.long().contiguous()
    return kernels, cu_seqlens


def _sizes(x, k, cu_seqlens):
    """(rows, number of chunks in all rows): see Row in longhorn_scan.cu."""
    B, T, _ = x.shape
    if cu_seqlens is None:
        return B, B * -(-T // build.CHUNK)
    return len(cu_seqlens) - 1, T // build.CHUNK + len(cu_seqlens) - 1


def _scan(x: Tensor, dt: Tensor, k: Tensor, q: Tensor, A: Tensor | None, D: Tensor | None, z: Tensor | None,
          dt_bias: Tensor | None, h0: Tensor | None, cu_seqlens: Tensor | None, update: str,
          save: bool, reverse: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(y, hT, states at the chunk boundaries). The states are None without `save`."""
    B, T, d = x.shape
    N = k.shape[2]
    kernels, cu = _kernels(x, k, z, cu_seqlens, update, reverse)
    rows, n_chunks = _sizes(x, k, cu_seqlens)
    S = kernels.segments
    y = launch.empty(x, B, T, d, dtype=kernels.dtype)
    hT = launch.empty(x, rows * S, d, N)
    chunks = launch.empty(x, n_chunks, launch.kept_states(x, N), d) if save else None
    inputs = {"x": x, "dt": dt, "k": k, "q": q}
    h0 = ops.flip(h0, reverse, 0)
    if S > 1:
        h0 = kernels.initial_segment_states(inputs, {"A": A, "bias": dt_bias}, "longhorn_scan_segment_state", h0)
    kernels("longhorn_scan_forward", {**inputs, "z": z}, {"A": A, "skip": D, "bias": dt_bias, "h0": h0},
            y=y, hT=hT, chunks=chunks, cu=cu)
    hT = ops.flip(hT if S == 1 else hT.view(rows, S, d, N)[:, -1].clone(), reverse, 0)
    return launch.cast(y, x.dtype), hT, chunks


def _scan_fake(x, dt, k, q, A, D, z, dt_bias, h0, cu_seqlens, update, save, reverse):
    B, T, d = x.shape
    N = k.shape[2]
    rows, n_chunks = _sizes(x, k, cu_seqlens)
    chunks = launch.empty(x, n_chunks, launch.kept_states(x, N), d) if save else launch.empty(x, 0)
    return launch.empty(x, B, T, d, dtype=x.dtype), launch.empty(x, rows, d, N), chunks


T9 = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _scan_backward(dy: Tensor, dhT: Tensor | None, x: Tensor, dt: Tensor, k: Tensor, q: Tensor, A: Tensor | None,
                   D: Tensor | None, z: Tensor | None, dt_bias: Tensor | None, h0: Tensor | None,
                   cu_seqlens: Tensor | None, update: str, save: bool, reverse: bool, chunks: Tensor,
                   into: Tensor | None) -> T9:
    """(dx, ddt, dk, dq, dA, dD, dz, ddt_bias, dh0); None for absent arguments, and for dz if written to `into`."""
    if chunks is None or not chunks.numel():
        raise RuntimeError("scan: cannot differentiate: the forward kept no states (save=False)")
    B, T, d = x.shape
    N = k.shape[2]
    kernels, cu = _kernels(x, k, z, cu_seqlens, update, reverse, backward=True)
    rows, _ = _sizes(x, k, cu_seqlens)
    S = kernels.segments
    like = lambda a, *shape: None if a is None else launch.empty(x, *shape)
    rows_like = lambda a: None if a is None else launch.empty(x, B, T, d, dtype=kernels.dtype)
    dx, ddt, dz = rows_like(x), rows_like(dt), rows_like(z) if into is None else into
    dk, dq = (launch.empty(x, kernels.args.splits, B, T, N) for _ in range(2))
    dD = like(D, rows * S, d)
    dbias = like(dt_bias, rows * S, d)
    dA = like(A, rows * S, d, N)
    dh0 = like(h0, rows * S, d, N)
    inputs = {"x": x, "dt": dt, "k": k, "q": q, "z": z, "dy": dy}
    dhT = ops.flip(dhT, reverse, 0)
    if S > 1:
        floats = {"A": A, "bias": dt_bias}
        dhT = kernels.initial_segment_states(inputs, floats, "longhorn_scan_segment_grad", dhT, reverse=1)
    kernels("longhorn_scan_backward", inputs, {"A": A, "skip": D, "bias": dt_bias, "chunks": chunks, "dhT": dhT},
            dx=dx, ddt=ddt, dz=dz, dk=dk, dq=dq, dA=dA, dskip=dD, dbias=dbias, dh0=dh0, cu=cu)
    if S > 1 and dh0 is not None:
        dh0 = dh0.view(rows, S, d, N)[:, 0].clone()
    dtypes = [x.dtype] * 2 + [torch.float32] * 3
    dk, dq, dA, dD, dbias = launch.sums([dk, dq, dA, dD, dbias], dtypes)
    dk = ops.flip(dk, reverse, 0, 1)
    dq = ops.flip(dq, reverse, 0, 1)
    dh0 = ops.flip(dh0, reverse, 0)
    dx, ddt, dz = (launch.cast(g, x.dtype) for g in (dx, ddt, dz if into is None else None))
    return dx, ddt, dk, dq, dA, dD, dz, dbias, dh0


_scan_op = ops.differentiable("scan", _scan, _scan_backward, _scan_fake, tensors=9, results=2, half=6)
