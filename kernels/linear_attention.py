"""The other families' recurrences. Each has a loop over time that defines it, and chunks of matrix products for speed.

    gated_linear_attention   S_t = diag(e^{g_t}) S_{t-1} + k_t^T v_t             o_t = q_t S_t               GLA
    retention                S_t = w S_{t-1} + k_t^T v_t                         o_t = q_t S_t               RetNet
                             with a w_t per token                                                            Mamba-2
                             with a bonus:                         o_t = q_t (S_{t-1} + u k_t^T v_t)         RWKV 5.1
    delta_rule               S_t = (I - b_t k_t^T k_t) S_{t-1} + b_t k_t^T v_t   o_t = q_t S_t               DeltaNet
    gated_delta_rule         with w_t S_{t-1} in place of S_{t-1}                                      gated DeltaNet
    kda                      with diag(e^{g_t}) S_{t-1} in place of S_{t-1}                         Kimi Linear's KDA
    mesa                     H_t = w_t H_{t-1} + b_t k_t^T k_t,  U_t = w_t U_{t-1} + b_t k_t^T v_t            MesaNet
                             o_t = q_t (H_t + diag(L))^-1 U_t
    wkv4                     o_t = (num_{t-1} + e^{u + k_t} v_t) / (den_{t-1} + e^{u + k_t})                 RWKV-4
                             num_t = e^{-w} num_{t-1} + e^{k_t} v_t,  den_t = e^{-w} den_{t-1} + e^{k_t}

Chunks never divide by a decay: the textbook form (q e^b)(k e^-b)^T overflows as soon as a gate closes. Instead GLA
halves a chunk recursively, and the later half sees the earlier one through the boundary between them. Both sides carry
products of factors <= 1, and a very strong decay is an exact zero. A decay per head is summed afresh between every two
tokens of a chunk: the difference of two running sums would cancel.

    name        paper       shape         meaning
    q, k        q_t, k_t    (B, T, H, K)  query and key, not scaled here
    v           v_t         (B, T, H, V)  value
    log_decay   log alpha   (B, T, H, K) in GLA and KDA, (B, T, H) in the others, (H,) in RetNet; <= 0
    bonus       u           (H,), in wkv4 (D,)
    beta        beta_t      (B, T, H)     step size of the delta rule
    ridge       L           (H, K)        added to the diagonal of H in Mesa, > 0
    state       S           (B, H, K, V)  float32; wkv4: (num, den, max), (B, D) each; Mesa: (H, U)

On a GPU flash-linear-attention's kernels run if installed (`choose.choose`).

    python -m pytest tests/test_conformance.py
"""

import contextlib
import functools
import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from common import torch_private
from kernels import build, choose, fused, ops

CHUNK = 64  # steps: the fastest of 16, 32, 64, 128 for retention and the delta rule at width 64
GLA_CHUNK = 32  # a power of two, for the halving; 16 and 64 take a tenth longer
CG_STEPS = 30  # conjugate gradient steps in Mesa, as in the paper
MOST_CG_STEPS = 300  # limit on a CPU, while the residual is above RESIDUAL; keys of length 30 take this many
RESIDUAL = 1e-4  # allowed norm of the residual, as a fraction of q's
CLOSED = -1e4  # the log of a decay that is 0 in any floating-point type
NOTHING = -1e38  # the maximum of an empty wkv4 state: e^(NOTHING - anything) is 0, and unlike -inf it makes no NaN


def in_full_precision(f):
    """Call f with float32 tensors (float64 if any is), and cast its first result to v's dtype. Autocast is off: it
    would round matrix products to 8 bits."""
    names = f.__code__.co_varnames[:f.__code__.co_argcount]

    @functools.wraps(f)
    def run(*args, **kwargs):
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        v = given["v"]
        double = any(getattr(a, "dtype", None) == torch.float64 for a in given.values())
        widen = lambda a: a.to(torch.float64 if double else torch.float32)
        for name, a in given.items():
            if a is not None:
                given[name] = tuple(map(widen, a)) if name == "state" and not torch.is_tensor(a) else widen(a)
        off = torch.autocast(v.device.type, enabled=False) if v.device.type != "meta" else contextlib.nullcontext()
        with off:
            o, state = f(**given)
        return o.to(v.dtype), state

    return run


# -------------------------------------------------------------------------------------------------- the loops over time

def _start(q, v, state):
    return v.new_zeros(v.shape[0], v.shape[2], q.shape[3], v.shape[3]) if state is None else state  # (B, H, K, V)


def _factor(log_decay):
    """The decays for log decays (H,), (B, T, H) or (B, T, H, K), shaped to multiply states (B, H, K, V)."""
    decay = log_decay.exp()
    return decay[..., None] if decay.dim() == 4 else decay[..., None, None]


@in_full_precision
def retention_ref(q, k, v, log_decay, bonus=None, state=None):
    """`retention` as a loop over time."""
    S = _start(q, v, state)
    os = []
    w = _factor(log_decay).expand(*v.shape[:3], -1, 1)  # (B, T, H, K or 1, 1)
    for q_t, k_t, v_t, w_t in zip(q.unbind(1), k.unbind(1), v.unbind(1), w.unbind(1), strict=True):
        kv = k_t[..., :, None] * v_t[..., None, :]  # (B, H, K, V)
        S, before = w_t * S + kv, S
        seen = S if bonus is None else before + bonus[:, None, None] * kv
        os.append((q_t[..., None] * seen).sum(-2))  # (B, H, V)
    return torch.stack(os, 1), S


def gated_linear_attention_ref(q, k, v, log_decay, state=None):
    """`gated_linear_attention`, and `retention` with a decay per token, as a loop over time."""
    return retention_ref(q, k, v, log_decay, state=state)


@in_full_precision
def delta_rule_ref(q, k, v, beta, log_decay=None, state=None):
    """`delta_rule`, and with decays `gated_delta_rule` and `kda`, as a loop over time."""
    S = _start(q, v, state)
    os = []
    decay = _factor(torch.zeros_like(beta) if log_decay is None else log_decay)
    for q_t, k_t, v_t, b_t, w_t in zip(*(a.unbind(1) for a in (q, k, v, beta, decay)), strict=True):
        S = w_t * S
        error = v_t - (k_t[..., None] * S).sum(-2)  # (B, H, V), v less what the state returns for k
        S = S + (b_t[..., None] * k_t)[..., :, None] * error[..., None, :]  # (B, H, K, V)
        os.append((q_t[..., None] * S).sum(-2))  # (B, H, V)
    return torch.stack(os, 1), S


@in_full_precision
def mesa_ref(q, k, v, beta, log_decay, ridge, state=None):
    """`mesa` as a loop over time, with a direct solve per token."""
    H, U = _start_mesa(q, v, state)
    os = []
    w = log_decay.exp()[..., None, None]
    for q_t, k_t, v_t, b_t, w_t in zip(*(a.unbind(1) for a in (q, k, v, beta, w)), strict=True):
        weighted = (b_t[..., None] * k_t)[..., None]  # (B, H, K, 1)
        H, U = w_t * H + weighted * k_t[..., None, :], w_t * U + weighted * v_t[..., None, :]
        x = torch.linalg.solve(H + torch.diag_embed(ridge), q_t)  # (B, H, K)
        os.append((x[..., None] * U).sum(-2))  # (B, H, V)
    return torch.stack(os, 1), (H, U)


def _start_mesa(q, v, state):
    return (_start(q, q, None), _start(q, v, None)) if state is None else state  # (B, H, K, K), (B, H, K, V)


@in_full_precision
def wkv4_ref(k, v, decay, bonus, state=None):
    """`wkv4` as a loop over time."""
    num, den, top = _start4(k, state)
    os = []
    for k_t, v_t in zip(k.unbind(1), v.unbind(1), strict=True):
        seen = torch.maximum(top, bonus + k_t).detach()  # the result does not depend on the shift: no gradient
        old = (top - seen).exp()
        new = (bonus + k_t - seen).exp()
        os.append((old * num + new * v_t) / (old * den + new))  # (B, D)
        kept = torch.maximum(top - decay, k_t).detach()
        old = (top - decay - kept).exp()
        new = (k_t - kept).exp()
        num = old * num + new * v_t
        den = old * den + new
        top = kept
    return torch.stack(os, 1), (num, den, top)


def _start4(k, state):
    zero = torch.zeros_like(k[:, 0])
    return (zero, zero, zero + NOTHING) if state is None else state  # (B, D) each


# ---------------------------------------------------------------------------------------------------------- public ops

def gated_linear_attention(q, k, v, log_decay, state=None, backend=None):
    """Gated linear attention (arXiv 2312.06635): S_t = diag(exp(log_decay_t)) S_{t-1} + k_t^T v_t, o_t = q_t S_t.

    Args:
        q, k, log_decay: (B, T, H, K), log_decay <= 0, arbitrarily strong; v: (B, T, H, V). Any floating-point dtype;
            computed in float32, also under autocast, and in float64 for float64 inputs. q is not scaled here.
        state: (B, H, K, V), S before the first step; None for zeros.
        backend: 'torch' (the loop over time), 'cpu' or 'cuda' (chunks, in PyTorch), 'fused' (flash-linear-attention,
            GPU only); None or "": flash-linear-attention if it can run, else chunks. A single step always uses the
            loop.

    Returns:
        o (B, T, H, V) in v's dtype, and the state (B, H, K, V) after the last step, float32 (float64 for float64).

    Raises:
        ValueError: a shape does not fit, or the backend is unknown; the message says which.
        RuntimeError: the backend cannot run here; the message says why.
    """
    _check("gated_linear_attention", q, k, v, state, log_decay=(log_decay, tuple(q.shape)))
    library = lambda: _call_fused("gated_linear_attention", q, k, v, state, g=log_decay.float())
    return _run("gated_linear_attention", backend, gated_linear_attention_ref, _gla, (q, k, v, log_decay), (), state,
                library)


def retention(q, k, v, log_decay, bonus=None, state=None, backend=None):
    """Retention (RetNet, arXiv 2307.08621), or with a bonus the attention of RWKV 5.1 (arXiv 2404.05892):
    S_t = w S_{t-1} + k_t^T v_t; o_t = q_t S_t, or with a bonus u, o_t = q_t (S_{t-1} + u k_t^T v_t).

    Args:
        log_decay: log w <= 0, differentiable; -1e-3 and -148 are both fine. (H,): per head, constant in time; or
            (B, T, H): per head and token, as in Mamba-2 (arXiv 2405.21060). With (B, T, H) all heads may share one q
            and k, (B, T, 1, K). The library then gets a copy of q and k for every head, and a line says so.
        bonus: (H,) or None; only with a constant decay.
        q, k, v, state, backend, result and errors: as for `gated_linear_attention`.
    """
    by_token = torch.is_tensor(log_decay) and log_decay.dim() == 3 and bonus is None
    heads = tuple(v.shape[2:3])
    sizes = tuple(q.shape[:2]) + heads if by_token else heads
    _check("retention", q, k, v, state, by_token, log_decay=(log_decay, sizes), bonus=(bonus, heads))
    library = lambda: _fused_retention(q, k, v, log_decay, bonus, state)
    if by_token:
        return _run("retention", backend, gated_linear_attention_ref, _gated_retention, (q, k, v, log_decay), (), state,
                    library)
    return _run("retention", backend, retention_ref, _retention, (q, k, v), (log_decay, bonus), state, library)


def delta_rule(q, k, v, beta, state=None, backend=None):
    """The delta rule (arXiv 2102.11174; in parallel form 2406.06484): S_t = (I - beta_t k_t^T k_t) S_{t-1}
    + beta_t k_t^T v_t, o_t = q_t S_t.

    Args:
        beta: (B, T, H). The recurrence is stable if beta |k|^2 is in [0, 2]; otherwise the state grows.
        q, k, v, state, backend, result and errors: as for `gated_linear_attention`.
    """
    return _any_delta_rule("delta_rule", q, k, v, beta, None, state, backend)


def gated_delta_rule(q, k, v, beta, log_decay, state=None, backend=None):
    """The delta rule on a decayed state (gated DeltaNet, arXiv 2412.06464), with a decay per head and token:
    S_t = (I - beta_t k_t^T k_t) exp(log_decay_t) S_{t-1} + beta_t k_t^T v_t, o_t = q_t S_t.

    Args:
        log_decay: (B, T, H), <= 0, arbitrarily strong.
        the others, result and errors: as for `delta_rule`.
    """
    return _any_delta_rule("gated_delta_rule", q, k, v, beta, log_decay, state, backend)


def kda(q, k, v, beta, log_decay, state=None, backend=None):
    """`gated_delta_rule` with a decay per channel of the keys (Kimi Linear, arXiv 2510.26692): log_decay (B, T, H, K).
    """
    return _any_delta_rule("kda", q, k, v, beta, log_decay, state, backend)


def _any_delta_rule(op, q, k, v, beta, log_decay, state, backend):
    wanted = {"beta": (beta, tuple(q.shape[:3]))}
    if op != "delta_rule":
        wanted["log_decay"] = (log_decay, tuple(q.shape if op == "kda" else q.shape[:3]))
    _check(op, q, k, v, state, **wanted)
    rest = {} if log_decay is None else {"g": log_decay.float()}
    library = lambda: _call_fused(op, q, k, v, state, beta=beta, **rest)
    wide = f"flash-linear-attention's {op} takes keys up to a width of 256, not {k.shape[3]}"
    return _run(op, backend, delta_rule_ref, _delta_rule, (q, k, v, beta, log_decay), (), state, library,
                wide if k.shape[3] > 256 else None)


def mesa(q, k, v, beta, log_decay, ridge, state=None, backend=None):
    """Mesa (arXiv 2506.05233): ridge regression of all values so far on their keys; older values weigh less:
    H_t = w_t H_{t-1} + beta_t k_t^T k_t, U_t = w_t U_{t-1} + beta_t k_t^T v_t, o_t = q_t (H_t + diag(ridge))^-1 U_t.

    The loop solves directly. The chunks solve with CG_STEPS conjugate gradient steps. The gradient is that of the exact
    solution and takes as many steps again. 30 steps are enough if all but a few eigenvalues of H + diag(ridge) are
    within a factor of about 100, as with keys of length 1. On a CPU the chunks stop early at rounding error, and go on
    while the residual is above RESIDUAL. A GPU and flash-linear-attention never take more steps.

    Args:
        beta: (B, T, H) >= 0; log_decay: (B, T, H) <= 0; ridge: (H, K) > 0, per channel of the keys.
        state: (H, U) before the first step, (B, H, K, K), symmetric, and (B, H, K, V); None for zeros.
        q, k, v, backend and errors: as for `gated_linear_attention`; keys of length 1 keep H bounded.

    Returns: o (B, T, H, V) in v's dtype, and the state (H, U) after the last step, float32 (float64 for float64).
    """
    sizes = tuple(q.shape[:3])
    if state is not None and len(state) != 2:
        raise ValueError(f"mesa: state must be (H, U), got {len(state)} entries")
    H, U = state or (None, None)
    _check("mesa", q, k, v, U, beta=(beta, sizes), log_decay=(log_decay, sizes), ridge=(ridge, tuple(q.shape[2:])),
           **{"state's H": (H, (*q.shape[:1], *q.shape[2:], *q.shape[3:]))})
    library = lambda: _fused_mesa(q, k, v, beta, log_decay, ridge, state)
    K, V = q.shape[3], v.shape[3]
    wide = f"flash-linear-attention's mesa takes keys and values of one width, at most 128, not {K} and {V}"
    return _run("mesa", backend, mesa_ref, _mesa, (q, k, v, beta, log_decay), (ridge,), state, library,
                None if K == V <= 128 else wide)


def wkv4(k, v, decay, bonus, state=None, backend=None):
    """RWKV-4's attention (arXiv 2305.13048): a weighted mean of the values per channel.

    Args:
        k, v: (B, T, D), any floating-point dtype; computed in float32 (float64 for float64 inputs); k of +-100 is fine.
        decay: (D,) w > 0, the exponential of the parameter; bonus: (D,) u.
        state: (num, den, max), (B, D) each, standing for num e^max and den e^max; None for an empty state, (0, 0,
            NOTHING) with NOTHING = -1e38.
        backend: as for `gated_linear_attention`, without 'fused': no library has this operator.

    Returns:
        o (B, T, D) in v's dtype, and the state after the last step, float32 (float64 for float64). Gradients flow
        through num and den; max is a constant scale.

    Errors: as for `gated_linear_attention`.
    """
    B, T, D = _sizes("wkv4", k, "k", "(B, T, D)", 3)
    wanted = {"v": (v, (B, T, D)), "decay": (decay, (D,)), "bonus": (bonus, (D,))}
    if state is not None:
        if len(state) != 3:
            raise ValueError(f"wkv4: state must be (num, den, max), got {len(state)} entries")
        wanted |= {f"state's {name}": (a, (B, D)) for name, a in zip(("num", "den", "max"), state, strict=True)}
    ops.check_shapes("wkv4", f"k {tuple(k.shape)}", k.device, wanted)
    return _run("wkv4", backend, wkv4_ref, _wkv4, (k, v), (decay, bonus), state)


def _run(op, backend, loop, chunks, timed, constants, state, library=None, library_cannot=None):
    """Run loop, chunks or library, as chosen. loop and chunks take (*timed, *constants, state); `timed` holds tensors
    (B, T, ...)."""
    v = timed[1]
    packed = ops.documents_of(timed[1]) if state is None else None
    chosen = choose.choose(op, backend, v.device.type, choose.compute_dtype(v), library_cannot=library_cannot)
    if packed is not None and chosen == "torch":
        with ops.documents(None):
            one_document = lambda *rows: _run(op, backend, loop, chunks, rows, constants, None)[0]
            return ops.by_document(one_document, timed, packed), None
    if packed is not None:  # packed documents run in chunks, never in the library's kernels
        chosen = v.device.type
        if len(timed) > 3:  # a document begins with a closed gate
            gates = torch.zeros_like(timed[3]) if timed[-1] is None else timed[-1]  # without gates: zeros (B, T, H)
            starts = packed.starts[(..., *[None] * (gates.dim() - 2))]
            timed = (*timed[:-1], gates.masked_fill(starts, CLOSED))
    if v.shape[1] == 1:  # a step of sampling
        return loop(*timed, *constants, state)
    if chosen == "torch":
        return ops.in_pieces(lambda *a: loop(*a[:-1], *constants, a[-1]), timed, state)
    return library() if chosen == "fused" else chunks(*timed, *constants, state)


def _sizes(op, a, name, letters, dims):
    ops.check_tensor(op, name, a)
    if a.dim() != dims or min(a.shape) < 1:
        raise ValueError(f"{op}: {name} must be {letters}, every size at least 1, got {tuple(a.shape)}")
    return tuple(a.shape)


def _check(op, q, k, v, state, may_share=False, **wanted):
    B, T, G, K = _sizes(op, q, "q", "(B, T, H, K)", 4)
    H, V = _sizes(op, v, "v", "(B, T, H, V)", 4)[2:]
    H = H if may_share and G == 1 else G
    wanted |= {"k": (k, (B, T, G, K)), "v": (v, (B, T, H, V)), "state": (state, (B, H, K, V))}
    ops.check_shapes(op, f"q {tuple(q.shape)}", q.device, wanted, optional=("state", "bonus", "state's H"))


# -------------------------------------------------------------------------------------------- chunks, in plain PyTorch

def _chunked(a, C):
    """Split `a` (B, T, H, K) into chunks (B, n, H, C, K), padded with zeros: k = v = 0 and a decay of 1 change nothing.
    """
    return F.pad(a, (0, 0, 0, 0, 0, -a.shape[1] % C)).unflatten(1, (-1, C)).transpose(2, 3).contiguous()


def _halves(queries, k, g):
    """Apply a decay per channel within chunks (B, n, H, C, K), C a power of two. Returns ([A], [Q], Key, decay).

    For each of `queries`, A (B, n, H, C, C) is its attention to the chunk's keys. Q is the query times the decays from
    the chunk's first step up to its own. Key is the key times the decays after its own step, and decay (B, n, H, 1, K)
    is the product of all decays.
    """
    # computed for blocks of m steps, with m doubling until a block is the whole chunk
    C = k.shape[3]
    m = 1
    decay = g.exp()  # (B, n, H, C/m, K)
    Qs, Key = [(q * decay)[..., None, :] for q in queries], k[..., None, :]  # (B, n, H, C/m, m, K)
    As = [(q * k).sum(-1)[..., None, None] for q in queries]  # (B, n, H, C/m, m, m)
    while m < C:
        (K1, K2), (decay1, decay2) = (a.unflatten(3, (-1, 2)).unbind(4) for a in (Key, decay))
        for i, (Q, A) in enumerate(zip(Qs, As, strict=True)):
            (Q1, Q2), (A1, A2) = (a.unflatten(3, (-1, 2)).unbind(4) for a in (Q, A))
            across = (Q2 * K1).sum(-1, keepdim=True) if m == 1 else Q2 @ K1.mT  # each carries its part of the decay
            As[i] = torch.cat([F.pad(A1, (0, m)), torch.cat([across, A2], -1)], -2)
            Qs[i] = torch.cat([Q1, Q2 * decay1[..., None, :]], -2)
        Key = torch.cat([K1 * decay2[..., None, :], K2], -2)
        decay = decay1 * decay2
        m = 2 * m
    return [A.squeeze(3) for A in As], [Q.squeeze(3) for Q in Qs], Key.squeeze(3), decay


@in_full_precision
def _gla(q, k, v, log_decay, state):
    """Compute all chunks at once, because halving makes many small products. The backward needs every level: 4 times
    the inputs, as much as retention keeps, and linear in T."""
    T = q.shape[1]
    C = min(GLA_CHUNK, 1 << (q.shape[1] - 1).bit_length())
    S = _start(q, v, state)
    starts = []
    q, k, v, g = (_chunked(a, C) for a in (q, k, v, log_decay))
    (A,), (Q,), Key, decays = _halves([q], k, g)
    for decay, new in zip(decays.mT.unbind(1), (Key.mT @ v).unbind(1), strict=True):
        starts.append(S)
        S = decay * S + new  # (B, H, K, V)
    o = A @ v + Q @ torch.stack(starts, 1)  # (B, n, H, C, V)
    return o.transpose(2, 3).flatten(1, 2)[:, :T], S


def _chunks(*tensors, size=None):
    """Yields tuples of chunks (B H, C, .) of tensors (B, T, H, .): processed one at a time, they stay in the cache."""
    chunks = lambda a: (c.transpose(1, 2).reshape(-1, c.shape[1], c.shape[3]) for c in a.split(size or CHUNK, 1))
    return zip(*map(chunks, tensors), strict=True)


def _join(os, S, B):
    """o (B, T, H, V) and S (B, H, K, V) from chunks (B H, C, V) and S (B H, K, V)."""
    return torch.cat([o.unflatten(0, (B, -1)).transpose(1, 2) for o in os], 1), S.unflatten(0, (B, -1))


def _decays(g):
    """Multiply a chunk's decays, from their logs (B H, C, 1). Returns three tensors of products:

    - from the chunk's start to each step, (B H, C, 1)
    - from each column's step to each row's, (B H, C, C), 0 if the row is earlier
    - from each step to the chunk's end, (B H, C, 1)
    """
    between = _Between.apply(g)
    return g.cumsum(1).exp(), between, between[:, -1, :, None]


class _Between(torch.autograd.Function):
    """exp of the sums of g (B H, C, 1) over the steps after column s up to row t. The gradient of g_r is the sum over
    all rows from r on minus the sum over all columns from r on. That takes two sums; autograd would pass over C x C
    nine times."""

    @staticmethod
    def forward(ctx, g):
        C = g.shape[1]
        steps = torch.ones(C, C, dtype=torch.bool, device=g.device)
        sums = torch.where(steps.tril(-1), g, 0.0)  # (B H, C, C), row r has g_r left of the diagonal
        # not exp_: where PyTorch 2.11 compiles this, exp_ silently loses the result's gradient
        between = sums.cumsum_(1).masked_fill_(~steps.tril(), -torch.inf).exp()
        ctx.save_for_backward(between)
        return between

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d):
        d = d * ctx.saved_tensors[0]
        return (d.sum(2) - d.sum(1)).flip(1).cumsum(1).flip(1)[..., None]


@in_full_precision
def _gated_retention(q, k, v, log_decay, state):
    """q and k have G heads, each shared by M heads of values. q k^T is computed once for all M heads; the decays are
    applied per head of values."""
    B, _, H, V = v.shape
    G = q.shape[2]
    M = H // G
    os = []
    S = _start(q, v, state).unflatten(1, (G, M)).transpose(2, 3).reshape(B * G, -1, M * V)
    for q_c, k_c, v_c, g_c in _chunks(q, k, v.unflatten(2, (G, M)).flatten(3), log_decay.unflatten(2, (G, M))):
        v_c = v_c.unflatten(2, (M, V))  # (B G, n, M, V)
        before, between, after = (a.unflatten(0, (-1, M)) for a in _decays(g_c.mT.flatten(0, 1)[..., None]))
        before, after = before.transpose(1, 2), after.transpose(1, 2)  # (B G, n, M, 1)
        within = ((q_c @ k_c.mT)[:, None] * between) @ v_c.transpose(1, 2)  # (B G, M, n, V)
        os.append((within.transpose(1, 2) + before * (q_c @ S).unflatten(2, (M, V))).flatten(2))
        decay = before[:, -1:].expand(-1, -1, -1, V).flatten(2)  # (B G, 1, M V)
        S = torch.baddbmm(decay * S, k_c.mT, (v_c * after).flatten(2))  # (B G, K, M V)
    o = torch.cat([o.unflatten(0, (B, G)).transpose(1, 2) for o in os], 1)  # (B, T, G, M V)
    S = S.unflatten(2, (M, V)).unflatten(0, (B, G)).transpose(2, 3).flatten(1, 2)  # (B, H, K, V)
    return o.unflatten(3, (M, V)).flatten(2, 3), S


def _of_documents(v, state):
    """Return four masks for each chunk of v (B, T, H, .), as factors for (B H, n, .) tensors. They are None if
    documents are not packed, else 1 where these share a document:

    - two tokens of the chunk, (B H, n, n)
    - a token and the token before the chunk, (B H, n, 1)
    - a token and the chunk's last token, (B H, n, 1)
    - the token before the chunk and the chunk's last token, (B H, 1, 1)
    """
    packed = ops.documents_of(v) if state is None else None
    if packed is None:
        return itertools.repeat((None,) * 4)
    heads = lambda mask: mask.to(v.dtype).repeat_interleave(v.shape[2], 0)
    chunks = packed.starts.cumsum(1).split(CHUNK, 1)  # each token's document number, (B, n) per chunk
    before = [torch.zeros_like(chunks[0][:, :1]), *(c[:, -1:] for c in chunks)]
    return [(heads(c[:, :, None] == c[:, None]), heads((c == b)[..., None]), heads((c == c[:, -1:])[..., None]),
             heads((b == c[:, -1:])[..., None])) for c, b in zip(chunks, before, strict=False)]


def _masked(a, mask):
    return a if mask is None else a * mask


@in_full_precision
def _retention(q, k, v, log_decay, bonus, state):
    B = q.shape[0]
    C = min(CHUNK, q.shape[1])
    given = state
    S = _start(q, v, state).flatten(0, 1)
    os = []
    g, i = log_decay.repeat(B)[:, None], torch.arange(C, device=q.device)  # (B H, 1), (C,)
    late = 0 if bonus is None else 1  # with a bonus a query sees the state before its own step
    apart = i[:, None] - i - late  # clamped where masked: a positive exponent would give a gradient of inf * 0
    seen = (apart.clamp(min=0) * g[..., None]).exp() * (apart >= 0)  # (B H, C, C)
    if bonus is not None:
        seen = seen + torch.diag_embed(bonus.repeat(B)[:, None].expand(-1, C))
    fade = ((i + 1) * g).exp()[..., None]  # (B H, C, 1), after 1, 2, ... C steps
    q_fade = ((i + 1 - late) * g).exp()[..., None]
    k_fade = ((C - 1 - i) * g).exp()[..., None]
    for (q_c, k_c, v_c), (same, old, new, kept) in zip(_chunks(q, k, v), _of_documents(v, given), strict=False):
        n = q_c.shape[1]
        before = (q_c * _masked(q_fade[:, :n], old)) @ S
        os.append(torch.baddbmm(before, q_c @ k_c.mT * _masked(seen[:, :n, :n], same), v_c))  # (B H, n, V)
        S = torch.baddbmm(_masked(fade[:, n - 1:n], kept) * S, (k_c * _masked(k_fade[:, C - n:], new)).mT, v_c)
    return _join(os, S, B)


@in_full_precision
def _delta_rule(q, k, v, beta, log_decay, state):
    """WY form: the errors e of a chunk are the solution of a triangular system. D stands for the decays in between:

        e_t = beta_t (v_t - k_t D_t S_{t-1})    S_{t-1} = D S + sum_{s<t} D k_s^T e_s
        (I + tril(beta k D k^T, -1)) e = beta (v - k D S)
    """
    B = q.shape[0]
    S = _start(q, v, state).flatten(0, 1)
    os = []
    channels = log_decay is not None and log_decay.dim() == 4
    C = min(GLA_CHUNK, 1 << (q.shape[1] - 1).bit_length()) if channels else CHUNK
    products = _products_by_channel(q, k, log_decay, C) if channels else _products(q, k, log_decay)
    for (qk, kk, Q, K, Key, decay), (v_c, b_c) in zip(products, _chunks(v, beta[..., None], size=C), strict=True):
        n = v_c.shape[1]  # fewer than C in the last chunk
        wanted = b_c * torch.baddbmm(v_c, K[:, :n], S, alpha=-1)  # (B H, n, V)
        coupling = (b_c * kk[:, :n, :n]).tril(-1)  # (B H, n, n)
        error = torch.linalg.solve_triangular(coupling, wanted, upper=False, unitriangular=True)
        os.append(torch.baddbmm(Q[:, :n] @ S, qk[:, :n, :n], error))
        S = torch.baddbmm(S if decay is None else decay * S, Key[:, :n].mT, error)  # (B H, K, V)
    return _join(os, S, B)


def _products(q, k, log_decay):
    """Yields six tensors for each chunk:

    - q k^T and k k^T with the decays in between, (B H, n, n)
    - q and k times the decays up to their step, (B H, n, K)
    - k times the decays after its step, (B H, n, K)
    - the product of all decays, (B H, 1, 1), or None without decays
    """
    if log_decay is None:
        for q_c, k_c in _chunks(q, k):
            yield (q_c @ k_c.mT).tril(), k_c @ k_c.mT, q_c, k_c, k_c, None
        return
    for q_c, k_c, g_c in _chunks(q, k, log_decay[..., None]):
        before, between, after = _decays(g_c)
        yield q_c @ k_c.mT * between, k_c @ k_c.mT * between, q_c * before, k_c * before, k_c * after, before[:, -1:]


def _products_by_channel(q, k, log_decay, C):
    """`_products` with a decay per channel. It computes all chunks at once, as `_gla` does. The product of all decays
    is (B H, K, 1)."""
    q, k, g = (_chunked(a, C) for a in (q, k, log_decay))
    As, Qs, Key, decay = _halves([q, k], k, g)
    yield from zip(*(a.transpose(0, 1).flatten(1, 2).unbind(0) for a in (*As, *Qs, Key, decay.mT)), strict=True)


@in_full_precision
def _mesa(q, k, v, beta, log_decay, ridge, state):
    B = q.shape[0]
    H, U = (a.flatten(0, 1) for a in _start_mesa(q, v, state))
    os = []
    ridge = ridge.repeat(B, 1)[:, None]  # (B H, 1, K)
    for q_c, k_c, v_c, b_c, g_c in _chunks(q, k, v, beta[..., None], log_decay[..., None]):
        before, between, after = _decays(g_c)
        matrix = k_c, between * b_c.mT, before, H, ridge
        with torch.no_grad():
            x = _solve(q_c, *matrix)
        x = _Solution.apply(q_c - _times(x, *matrix), x, *(a.detach() for a in matrix))  # (B H, n, K)
        o = torch.baddbmm((x * before) @ U, x @ k_c.mT * matrix[1], v_c)
        weighted = (k_c * (b_c * after)).mT
        os.append(o)  # (B H, n, V)
        H = torch.baddbmm(before[:, -1:] * H, weighted, k_c)  # (B H, K, K)
        U = torch.baddbmm(before[:, -1:] * U, weighted, v_c)  # (B H, K, V)
    return _join(os, U, B)[0], (H.unflatten(0, (B, -1)), U.unflatten(0, (B, -1)))


def _times(x, k, weight, before, H, ridge):
    """(H_t + diag(ridge)) x_t for the steps of a chunk, x (B H, n, K), using only the H at the chunk's start."""
    return torch.baddbmm((x * before) @ H.mT, x @ k.mT * weight, k) + ridge * x  # H.mT: H's gradient as in the loop


def _solve(b, *matrix):
    """`_conjugate_gradients` as one node of a compiled graph. Unrolled, a layer's graph would have ten thousand nodes
    at T = 1024 and take minutes to compile."""
    return (_solve_op if torch.compiler.is_compiling() else _conjugate_gradients)(b, *matrix)


def _conjugate_gradients(b, *matrix):
    """Solve _times(x, *matrix) = b for x in CG_STEPS steps, each token by itself. On a CPU the residual may shorten or
    lengthen this."""
    tiny, on_cpu = torch.finfo(b.dtype).tiny, b.device.type == "cpu"  # on a GPU a check takes longer than the steps
    x = torch.zeros_like(b)
    r = b
    p = b
    size = whole = (r * r).sum(-1, keepdim=True)
    for steps in range(1, 1 + (MOST_CG_STEPS if on_cpu else CG_STEPS)):
        Mp = _times(p, *matrix)
        step = size / (p * Mp).sum(-1, keepdim=True).clamp(min=tiny)
        x = torch.addcmul(x, step, p)
        r = torch.addcmul(r, step, Mp, value=-1)
        size, last = (r * r).sum(-1, keepdim=True), size
        enough = torch.finfo(b.dtype).eps if steps < CG_STEPS else RESIDUAL
        if on_cpu and bool((size <= whole * enough ** 2).all()):
            break
        p = torch.addcmul(r, size / last.clamp(min=tiny), p)
    return x


@torch.library.custom_op("longhorn::conjugate_gradients", mutates_args=())
def _solve_op(b: Tensor, k: Tensor, weight: Tensor, before: Tensor, H: Tensor, ridge: Tensor) -> Tensor:
    return _conjugate_gradients(b, k, weight, before, H, ridge).contiguous()


_solve_op.register_fake(lambda b, *matrix: torch.empty_like(b, memory_format=torch.contiguous_format))


class _Solution(torch.autograd.Function):
    """Returns the solution x of x M = q, with the gradient of x + left M^-1. left is the residual q - x M, about 0."""

    @staticmethod
    def forward(ctx, left, x, *matrix):
        ctx.save_for_backward(*matrix)
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dx):
        matrix = ctx.saved_tensors  # read once: a recomputed forward hands them out only once
        return _solve(dx, *matrix), *[None] * (1 + len(matrix))


@in_full_precision
def _wkv4(k, v, decay, bonus, state):
    """Use about sqrt(T) chunks of sqrt(T) steps: each step runs in all chunks at once, then the chunks are joined. The
    running maximum comes first, without gradients; given the maximum, num and den are linear. Where a document begins,
    the maximum so far is set to NOTHING, so earlier tokens weigh nothing."""
    T = k.shape[1]
    C = 1 << k.shape[1].bit_length() // 2
    packed = ops.documents_of(v) if state is None else None
    starts = k.new_zeros(*k.shape[:2], dtype=torch.bool) if packed is None else packed.starts  # (B, T)
    num, den, top = _start4(k, state)
    k, v = (F.pad(a, (0, 0, 0, -T % C), value=fill) for a, fill in ((k, NOTHING), (v, 0.0)))
    starts = F.pad(starts, (0, -T % C))[..., None]  # (B, T, 1)
    chunks = lambda a: a.unflatten(1, (-1, C))  # (B, n, C, D)
    begun = chunks(starts).cumsum(2) > 0  # (B, n, C, 1): a document begins at or before the step, in its chunk
    cut = lambda a, where: a if packed is None else a.masked_fill(where, NOTHING)

    with torch.no_grad():
        m = torch.full_like(chunks(k)[:, :, 0], NOTHING)
        ms = []
        tops = []
        first = top
        for k_c, starts_c in zip(chunks(k).unbind(2), chunks(starts).unbind(2), strict=True):
            m = torch.maximum(cut(m - decay, starts_c), k_c)
            ms.append(m)  # (B, n, D)
        for m_n, begun_n in zip(m.unbind(1), begun[:, :, -1].unbind(1), strict=True):
            tops.append(first)
            first = torch.maximum(cut(first - C * decay, begun_n), m_n)  # (B, D)
        steps = torch.arange(1, C + 1, device=k.device)[:, None]
        m = torch.maximum(torch.stack(ms, 2), cut(torch.stack(tops, 1)[:, :, None] - steps * decay, begun))
        m = m.flatten(1, 2)  # (B, T, D)

    before = cut(torch.cat([top[:, None], m[:, :-1]], 1), starts)  # (B, T, D)
    fade, new = (before - decay - m).exp(), (k - m).exp()  # both <= 1
    x = 0.0
    p = 1.0
    xs = []
    ps = []
    for f_c, new_c in zip(chunks(fade).unbind(2), torch.stack([chunks(new * v), chunks(new)]).unbind(3), strict=True):
        x, p = new_c + f_c * x, f_c * p  # (2, B, n, D) num and den from this chunk's tokens only, (B, n, D)
        xs.append(x)
        ps.append(p)
    S = torch.stack([num, den])
    starts = []
    for x_n, p_n in zip(x.unbind(2), p.unbind(1), strict=True):
        starts.append(S)
        S = x_n + p_n * S  # (2, B, D)
    x = torch.stack(xs, 3) + torch.stack(ps, 2) * torch.stack(starts, 2)[:, :, :, None]  # (2, B, n, C, D)
    after = x.flatten(2, 3)  # (2, B, T, D)
    nums, dens = torch.cat([torch.stack([num, den])[:, :, None], after[:, :, :-1]], 2)

    seen = torch.maximum(before, bonus + k).detach()
    old = (before - seen).exp()
    new = (bonus + k - seen).exp()
    o = (old * nums + new * v) / (old * dens + new)  # (B, T, D)
    # copies, as views would keep all T alive; step T - 1, not the last one: padding lowers the maximum further
    return o[:, :T], tuple(a[:, T - 1].clone() for a in (after[0], after[1], m))


# -------------------------------------------------------------------------------------------------- the fused library

def _call_fused(op, q, k, v, state, **rest):
    dtype = v.dtype
    wanted = choose.compute_dtype(v)
    q, k, v = (a.to(wanted) for a in (q, k, v))
    if "beta" in rest:
        rest["beta"] = rest["beta"].to(wanted)
    o, S = fused.call(op, q=q, k=k, v=v, scale=1.0, initial_state=None if state is None else state.float(),
                      output_final_state=True, **rest)
    return o.to(dtype), S


def _fused_mesa(q, k, v, beta, log_decay, ridge, state):
    H, U = (None, None) if state is None else (a.float() for a in state)
    given = [a.to(choose.compute_dtype(v)) for a in (q, k, v)]
    o, H, U = fused.call("mesa", *given, log_decay.float(), beta.float(), ridge.float(), h_kk_init=H, h_kv_init=U,
                         output_final_state=True, max_CG_iteration=CG_STEPS)
    return o.to(v.dtype), (H, U)


@torch_private.constant_when_compiled
def _say_that_heads_are_copied():
    build.say_once("retention: flash-linear-attention gets a copy of q and k for every head that shares them: 9.7 GB "
                   "in mamba2_120m at 32K tokens; --backend=cuda needs no copies")


def _fused_retention(q, k, v, log_decay, bonus, state):
    if q.shape[2] < v.shape[2]:
        _say_that_heads_are_copied()
    g = log_decay.float()
    # the library has no gradient for a constant decay, so a learned decay is passed per step
    by_step = g.dim() == 3 or g.requires_grad and torch.is_grad_enabled()
    rest = {"g": g.expand(*v.shape[:3])} if by_step else {"g_gamma": g}
    q, k = (a.expand(-1, -1, v.shape[2], -1) for a in (q, k))
    if bonus is None:
        return _call_fused("retention", q, k, v, state, **rest)
    # The library's query sees its own step, RWKV's only earlier steps: so each query is passed one step early.
    o, S = _call_fused("retention", F.pad(q[:, 1:], (0, 0, 0, 0, 0, 1)), k, v, state, **rest)
    first = torch.zeros_like(o[:, :1])
    if state is not None:
        first = (q[:, 0, ..., None].float() * state.float()).sum(-2)[:, None].to(o.dtype)  # (B, 1, H, V)
    bonus_part = (q.float() * k.float()).sum(-1, keepdim=True) * bonus.float()[:, None] * v.float()  # (B, T, H, V)
    return (torch.cat([first, o[:, :-1]], 1) + bonus_part).to(v.dtype), S
