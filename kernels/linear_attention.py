"""The other families' recurrences: a loop over time each that defines it, and chunks of matrix products for speed.

    gated_linear_attention   S_t = diag(e^{g_t}) S_{t-1} + k_t^T v_t             o_t = q_t S_t               GLA
    retention                S_t = w S_{t-1} + k_t^T v_t                         o_t = q_t S_t               RetNet
                             with a bonus:                         o_t = q_t (S_{t-1} + u k_t^T v_t)         RWKV 5.1
    delta_rule               S_t = (I - b_t k_t^T k_t) S_{t-1} + b_t k_t^T v_t   o_t = q_t S_t               DeltaNet
    wkv4                     o_t = (num_{t-1} + e^{u + k_t} v_t) / (den_{t-1} + e^{u + k_t})                 RWKV-4
                             num_t = e^{-w} num_{t-1} + e^{k_t} v_t,  den_t = e^{-w} den_{t-1} + e^{k_t}

No chunk ever divides by a decay: the textbook form (q e^b)(k e^-b)^T overflows as soon as a gate closes. Here GLA
splits a chunk in halves, again and again, and the later half sees the earlier one through the boundary between them:
both sides carry products of factors <= 1, and the strongest decay is a clean zero.

    name        paper       shape         meaning
    q, k        q_t, k_t    (B, T, H, K)  query and key, not scaled here
    v           v_t         (B, T, H, V)  value
    log_decay   log alpha   (B, T, H, K) in GLA, (H,) in retention; <= 0
    bonus       u           (H,), in wkv4 (D,)
    beta        beta_t      (B, T, H)     step size of the delta rule
    state       S           (B, H, K, V)  float32; wkv4's is (num, den, max), (B, D) each

On a GPU flash-linear-attention's kernels run where they are installed (`build.choose`).

    python -m pytest tests/test_linear_attention.py
"""

import contextlib
import functools

import torch
import torch.nn.functional as F

from kernels import build, fused, ops

CHUNK = 64  # steps: of 16, 32, 64, 128 the fastest for retention and the delta rule at widths 64
GLA_CHUNK = 32  # a power of two, for the halving; 16 and 64 cost a tenth more
NOTHING = -1e38  # the maximum of an empty wkv4 state: e^(NOTHING - anything) is 0, and unlike -inf it makes no NaN


def in_full_precision(f):
    """Call f with float32 tensors (float64 if any is) and autocast off, which would round matrix products to 8 bits;
    its first result is returned in v's dtype."""
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
    return v.new_zeros(q.shape[0], *q.shape[2:], v.shape[3]) if state is None else state  # (B, H, K, V)


@in_full_precision
def gated_linear_attention_ref(q, k, v, log_decay, state=None):
    """`gated_linear_attention` as a loop over time."""
    S, os = _start(q, v, state), []
    for q_t, k_t, v_t, g_t in zip(q.unbind(1), k.unbind(1), v.unbind(1), log_decay.unbind(1), strict=True):
        S = g_t.exp()[..., None] * S + k_t[..., :, None] * v_t[..., None, :]  # (B, H, K, V)
        os.append((q_t[..., None] * S).sum(-2))  # (B, H, V)
    return torch.stack(os, 1), S


@in_full_precision
def retention_ref(q, k, v, log_decay, bonus=None, state=None):
    """`retention` as a loop over time."""
    S, w, os = _start(q, v, state), log_decay.exp()[:, None, None], []
    for q_t, k_t, v_t in zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True):
        kv = k_t[..., :, None] * v_t[..., None, :]  # (B, H, K, V)
        S, before = w * S + kv, S
        seen = S if bonus is None else before + bonus[:, None, None] * kv
        os.append((q_t[..., None] * seen).sum(-2))  # (B, H, V)
    return torch.stack(os, 1), S


@in_full_precision
def delta_rule_ref(q, k, v, beta, state=None):
    """`delta_rule` as a loop over time."""
    S, os = _start(q, v, state), []
    for q_t, k_t, v_t, b_t in zip(q.unbind(1), k.unbind(1), v.unbind(1), beta.unbind(1), strict=True):
        error = v_t - (k_t[..., None] * S).sum(-2)  # (B, H, V), what the state does not yet return for k
        S = S + (b_t[..., None] * k_t)[..., :, None] * error[..., None, :]  # (B, H, K, V)
        os.append((q_t[..., None] * S).sum(-2))  # (B, H, V)
    return torch.stack(os, 1), S


@in_full_precision
def wkv4_ref(k, v, decay, bonus, state=None):
    """`wkv4` as a loop over time."""
    num, den, top = _start4(k, state)
    os = []
    for k_t, v_t in zip(k.unbind(1), v.unbind(1), strict=True):
        seen = torch.maximum(top, bonus + k_t).detach()  # any shift gives the same result: no gradient through it
        old, new = (top - seen).exp(), (bonus + k_t - seen).exp()
        os.append((old * num + new * v_t) / (old * den + new))  # (B, D)
        kept = torch.maximum(top - decay, k_t).detach()
        old, new = (top - decay - kept).exp(), (k_t - kept).exp()
        num, den, top = old * num + new * v_t, old * den + new, kept
    return torch.stack(os, 1), (num, den, top)


def _start4(k, state):
    zero = torch.zeros_like(k[:, 0])
    return (zero, zero, zero + NOTHING) if state is None else state  # (B, D) each


# ---------------------------------------------------------------------------------------------------------- public ops

def gated_linear_attention(q, k, v, log_decay, state=None, backend=None):
    """Gated linear attention (arXiv 2312.06635): S_t = diag(exp(log_decay_t)) S_{t-1} + k_t^T v_t, o_t = q_t S_t.

    Args:
        q, k, log_decay: (B, T, H, K), log_decay <= 0, however strong; v: (B, T, H, V). Any floating point dtype;
            computed in float32, under autocast too, float64 for float64 inputs. Nothing is scaled: scale q.
        state: (B, H, K, V), the S before the first step; None for zeros.
        backend: 'torch' (the loop over time), 'cpu' or 'cuda' (chunks, in PyTorch), 'fused' (flash-linear-attention,
            GPU only); None or "": flash-linear-attention where it can run, else chunks. One step is always the loop's.

    Returns:
        o (B, T, H, V) in v's dtype, and the state (B, H, K, V) after the last step, float32 (float64 for float64).

    Raises:
        ValueError: a shape that does not fit, or an unknown backend, with what was seen.
        RuntimeError: the backend cannot run here, with the reason.
    """
    _check("gated_linear_attention", q, k, v, state, log_decay=(log_decay, tuple(q.shape)))
    library = lambda: _call_fused("gated_linear_attention", q, k, v, state, g=log_decay.float())
    return _run("gated_linear_attention", backend, gated_linear_attention_ref, _gla, (q, k, v, log_decay), (), state,
                library)


def retention(q, k, v, log_decay, bonus=None, state=None, backend=None):
    """Retention (RetNet, arXiv 2307.08621), with a bonus the attention of RWKV 5.1 (arXiv 2404.05892):
    S_t = w S_{t-1} + k_t^T v_t; o_t = q_t S_t, or with a bonus u o_t = q_t (S_{t-1} + u k_t^T v_t).

    Args:
        log_decay: (H,), log w <= 0 of each head, constant in time and differentiable; -1e-3 and -148 are both fine.
        bonus: (H,) or None.
        q, k, v, state, backend, result and errors: as for `gated_linear_attention`.
    """
    _check("retention", q, k, v, state, log_decay=(log_decay, (q.shape[2],)), bonus=(bonus, (q.shape[2],)))
    library = lambda: _fused_retention(q, k, v, log_decay, bonus, state)
    return _run("retention", backend, retention_ref, _retention, (q, k, v), (log_decay, bonus), state, library)


def delta_rule(q, k, v, beta, state=None, backend=None):
    """The delta rule (arXiv 2102.11174; in parallel form 2406.06484): S_t = (I - beta_t k_t^T k_t) S_{t-1}
    + beta_t k_t^T v_t, o_t = q_t S_t.

    Args:
        beta: (B, T, H). With beta |k|^2 in [0, 2] no step lengthens the state; beyond, it grows as the equation says.
        q, k, v, state, backend, result and errors: as for `gated_linear_attention`.
    """
    _check("delta_rule", q, k, v, state, beta=(beta, tuple(q.shape[:3])))
    library = lambda: _call_fused("delta_rule", q, k, v, state, beta=beta)
    wide = f"flash-linear-attention's delta rule takes keys up to a width of 256, not {k.shape[3]}"
    return _run("delta_rule", backend, delta_rule_ref, _delta_rule, (q, k, v, beta), (), state, library,
                wide if k.shape[3] > 256 else None)


def wkv4(k, v, decay, bonus, state=None, backend=None):
    """RWKV-4's attention (arXiv 2305.13048): a weighted mean of the values, channel by channel.

    Args:
        k, v: (B, T, D), any floating point dtype; float32 inside (float64 for float64 inputs), k of +-100 is fine.
        decay: (D,) w > 0, already the exponential of the parameter; bonus: (D,) u.
        state: (num, den, max), (B, D) each, meaning num e^max and den e^max; None for an empty one, which is
            (0, 0, NOTHING), NOTHING = -1e38.
        backend: as for `gated_linear_attention`, without 'fused': no library has this operator.

    Returns:
        o (B, T, D) in v's dtype, and the state after the last step, float32 (float64 for float64). Gradients flow
        through num and den; max is a constant, by which num and den have been divided.

    Errors are those of `gated_linear_attention`.
    """
    B, T, D = _sizes("wkv4", k, "k", "(B, T, D)", 3)
    wanted = {"v": (v, (B, T, D)), "decay": (decay, (D,)), "bonus": (bonus, (D,))}
    if state is not None:
        if len(state) != 3:
            raise ValueError(f"wkv4: state must be (num, den, max), got {len(state)} entries")
        wanted |= {f"state's {name}": (a, (B, D)) for name, a in zip(("num", "den", "max"), state, strict=True)}
    _fits("wkv4", "k", k, wanted)
    return _run("wkv4", backend, wkv4_ref, _wkv4, (k, v), (decay, bonus), state)


def _run(op, backend, loop, chunks, timed, constants, state, library=None, library_cannot=None):
    """loop and chunks take (*timed, *constants, state), of which `timed` are (B, T, ...)."""
    v = timed[1]
    chosen = build.choose(op, backend, v.device.type, build.compute_dtype(v), library_cannot=library_cannot)
    if v.shape[1] == 1:  # a step of generation
        return loop(*timed, *constants, state)
    if chosen == "torch":
        return ops.in_pieces(lambda *a: loop(*a[:-1], *constants, a[-1]), timed, state)
    return library() if chosen == "fused" else chunks(*timed, *constants, state)


def _sizes(op, a, name, letters, dims):
    ops.check_tensor(op, name, a)
    if a.dim() != dims or min(a.shape) < 1:
        raise ValueError(f"{op}: {name} must be {letters}, every size at least 1, got {tuple(a.shape)}")
    return tuple(a.shape)


def _fits(op, name, first, wanted):
    for other, (a, _) in wanted.items():
        if a is not None:
            ops.check_tensor(op, other, a)
    ops.check_shapes(op, f"{name} {tuple(first.shape)}", first.device, wanted, optional=("state", "bonus"))


def _check(op, q, k, v, state, **wanted):
    B, T, H, K = _sizes(op, q, "q", "(B, T, H, K)", 4)
    V = _sizes(op, v, "v", "(B, T, H, V)", 4)[3]
    wanted |= {"k": (k, (B, T, H, K)), "v": (v, (B, T, H, V)), "state": (state, (B, H, K, V))}
    _fits(op, "q", q, wanted)


# -------------------------------------------------------------------------------------------- chunks, in plain PyTorch

@in_full_precision
def _gla(q, k, v, log_decay, state):
    """All chunks at once, since the halving makes many small products. Its levels are kept for the backward: 4 times
    the inputs, as much as retention keeps, and linear in T."""
    T, C = q.shape[1], min(GLA_CHUNK, 1 << (q.shape[1] - 1).bit_length())
    S = _start(q, v, state)
    pad = (0, 0, 0, 0, 0, -T % C)  # k = v = 0 and a decay of 1 change nothing
    in_chunks = lambda a: F.pad(a, pad).unflatten(1, (-1, C)).transpose(2, 3).contiguous()  # (B, n, H, C, K)
    q, k, v, g = map(in_chunks, (q, k, v, log_decay))

    # Blocks of m steps, doubled until one is the chunk. In a block `all_` is the product of its decays, Q the query
    # times those from the block's first step to its own, Key the key times those after its own, A the attention.
    all_ = g.exp()  # (B, n, H, C/m, K)
    Q, Key = (q * all_)[..., None, :], k[..., None, :]  # (B, n, H, C/m, m, K)
    A, m = (q * k).sum(-1)[..., None, None], 1  # (B, n, H, C/m, m, m)
    while m < C:
        (Q1, Q2), (K1, K2), (all1, all2), (A1, A2) = (a.unflatten(3, (-1, 2)).unbind(4) for a in (Q, Key, all_, A))
        across = (Q2 * K1).sum(-1, keepdim=True) if m == 1 else Q2 @ K1.mT  # the decays from key to query are in both
        A = torch.cat([F.pad(A1, (0, m)), torch.cat([across, A2], -1)], -2)
        Q = torch.cat([Q1, Q2 * all1[..., None, :]], -2)
        Key = torch.cat([K1 * all2[..., None, :], K2], -2)
        all_, m = all1 * all2, 2 * m
    A, Q, Key = (a.squeeze(3) for a in (A, Q, Key))  # (B, n, H, C, C), (B, n, H, C, K) twice

    starts = []
    for decay, new in zip(all_.mT.unbind(1), (Key.mT @ v).unbind(1), strict=True):
        starts.append(S)
        S = decay * S + new  # (B, H, K, V)
    o = A @ v + Q @ torch.stack(starts, 1)  # (B, n, H, C, V)
    return o.transpose(2, 3).flatten(1, 2)[:, :T], S


def _chunks(*tensors):
    """Tuples of (B H, C, .) chunks of (B, T, H, .) tensors: one at a time they stay in the cache."""
    return zip(*([c.transpose(1, 2).reshape(-1, c.shape[1], c.shape[3]) for c in a.split(CHUNK, 1)] for a in tensors),
               strict=True)


def _join(os, S, B):
    """o (B, T, H, V) and S (B, H, K, V) of chunks (B H, C, V) and S (B H, K, V)."""
    return torch.cat([o.unflatten(0, (B, -1)).transpose(1, 2) for o in os], 1), S.unflatten(0, (B, -1))


@in_full_precision
def _retention(q, k, v, log_decay, bonus, state):
    B, C = q.shape[0], min(CHUNK, q.shape[1])
    S, os = _start(q, v, state).flatten(0, 1), []
    g, i = log_decay.repeat(B)[:, None], torch.arange(C, device=q.device)  # (B H, 1), (C,)
    late = 0 if bonus is None else 1  # with a bonus a query sees the state before its own step
    apart = i[:, None] - i - late  # clamped where the mask is, or the exponent is positive and its gradient inf * 0
    seen = (apart.clamp(min=0) * g[..., None]).exp() * (apart >= 0)  # (B H, C, C)
    if bonus is not None:
        seen = seen + torch.diag_embed(bonus.repeat(B)[:, None].expand(-1, C))
    fade = ((i + 1) * g).exp()[..., None]  # (B H, C, 1), after 1, 2, ... C steps
    q_fade, k_fade = ((i + 1 - late) * g).exp()[..., None], ((C - 1 - i) * g).exp()[..., None]
    for q_c, k_c, v_c in _chunks(q, k, v):
        n = q_c.shape[1]
        os.append(torch.baddbmm((q_c * q_fade[:, :n]) @ S, q_c @ k_c.mT * seen[:, :n, :n], v_c))  # (B H, n, V)
        S = torch.baddbmm(fade[:, n - 1:n] * S, (k_c * k_fade[:, C - n:]).mT, v_c)  # (B H, K, V)
    return _join(os, S, B)


@in_full_precision
def _delta_rule(q, k, v, beta, state):
    """WY form. The errors e_t = beta_t (v_t - k_t S_{t-1}) of a chunk, S_{t-1} = S + sum_{s<t} k_s^T e_s, solve
    (I + tril(beta k k^T, -1)) e = beta (v - k S)."""
    B = q.shape[0]
    S, os = _start(q, v, state).flatten(0, 1), []
    for q_c, k_c, v_c, b_c in _chunks(q, k, v, beta[..., None]):
        coupling = (b_c * (k_c @ k_c.mT)).tril(-1)  # (B H, n, n)
        wanted = b_c * torch.baddbmm(v_c, k_c, S, alpha=-1)  # (B H, n, V)
        error = torch.linalg.solve_triangular(coupling, wanted, upper=False, unitriangular=True)
        os.append(torch.baddbmm(q_c @ S, (q_c @ k_c.mT).tril(), error))
        S = torch.baddbmm(S, k_c.mT, error)  # (B H, K, V)
    return _join(os, S, B)


@in_full_precision
def _wkv4(k, v, decay, bonus, state):
    """About sqrt(T) chunks of sqrt(T) steps: each step is taken in all chunks at once, then the chunks are joined.
    The running maximum comes first and without gradients; given it, num and den are linear."""
    T, C = k.shape[1], 1 << k.shape[1].bit_length() // 2
    num, den, top = _start4(k, state)
    k, v = (F.pad(a, (0, 0, 0, -T % C), value=fill) for a, fill in ((k, NOTHING), (v, 0.0)))
    chunks = lambda a: a.unflatten(1, (-1, C))  # (B, n, C, D)

    with torch.no_grad():
        m, ms, tops, first = torch.full_like(chunks(k)[:, :, 0], NOTHING), [], [], top
        for k_c in chunks(k).unbind(2):
            m = torch.maximum(m - decay, k_c)
            ms.append(m)  # (B, n, D)
        for m_n in m.unbind(1):
            tops.append(first)
            first = torch.maximum(first - C * decay, m_n)  # (B, D)
        steps = torch.arange(1, C + 1, device=k.device)[:, None]
        m = torch.maximum(torch.stack(ms, 2), torch.stack(tops, 1)[:, :, None] - steps * decay)
        m = m.flatten(1, 2)  # (B, T, D)

    before = torch.cat([top[:, None], m[:, :-1]], 1)  # (B, T, D)
    fade, new = (before - decay - m).exp(), (k - m).exp()  # both <= 1
    x, p, xs, ps = 0.0, 1.0, [], []
    for f_c, new_c in zip(chunks(fade).unbind(2), torch.stack([chunks(new * v), chunks(new)]).unbind(3), strict=True):
        x, p = new_c + f_c * x, f_c * p  # (2, B, n, D) num and den without what went before the chunk, (B, n, D)
        xs.append(x)
        ps.append(p)
    S, starts = torch.stack([num, den]), []
    for x_n, p_n in zip(x.unbind(2), p.unbind(1), strict=True):
        starts.append(S)
        S = x_n + p_n * S  # (2, B, D)
    x = torch.stack(xs, 3) + torch.stack(ps, 2) * torch.stack(starts, 2)[:, :, :, None]  # (2, B, n, C, D)
    after = x.flatten(2, 3)  # (2, B, T, D)
    nums, dens = torch.cat([torch.stack([num, den])[:, :, None], after[:, :, :-1]], 2)

    seen = torch.maximum(before, bonus + k).detach()
    old, new = (before - seen).exp(), (bonus + k - seen).exp()
    o = (old * nums + new * v) / (old * dens + new)  # (B, T, D)
    # copies: views would keep all T alive; padding goes on lowering the maximum, so T - 1 and not the last
    return o[:, :T], tuple(a[:, T - 1].clone() for a in (after[0], after[1], m))


# -------------------------------------------------------------------------------------------------- the fused library

def _call_fused(op, q, k, v, state, **rest):
    dtype, wanted = v.dtype, build.compute_dtype(v)
    q, k, v = (a.to(wanted) for a in (q, k, v))
    if "beta" in rest:
        rest["beta"] = rest["beta"].to(wanted)
    o, S = fused.call(op, q=q, k=k, v=v, scale=1.0, initial_state=None if state is None else state.float(),
                      output_final_state=True, **rest)
    return o.to(dtype), S


def _fused_retention(q, k, v, log_decay, bonus, state):
    g = log_decay.float()
    # the library gives a constant decay no gradient: one that is learnt is given for every step
    rest = {"g": g.expand(*q.shape[:3])} if g.requires_grad and torch.is_grad_enabled() else {"g_gamma": g}
    if bonus is None:
        return _call_fused("retention", q, k, v, state, **rest)
    # The library's query sees its own step, RWKV's only those before it: so each query is given one step early.
    o, S = _call_fused("retention", F.pad(q[:, 1:], (0, 0, 0, 0, 0, 1)), k, v, state, **rest)
    first = torch.zeros_like(o[:, :1])
    if state is not None:
        first = (q[:, 0, ..., None].float() * state.float()).sum(-2)[:, None].to(o.dtype)  # (B, 1, H, V)
    own = (q.float() * k.float()).sum(-1, keepdim=True) * bonus.float()[:, None] * v.float()  # (B, T, H, V)
    return (torch.cat([first, o[:, :-1]], 1) + own).to(v.dtype), S
