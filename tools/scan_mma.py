"""Longhorn's scan as matrix products, forward and backward: a prototype in Triton for tensor cores.

    S_ij += e_i k_j (x_i - k_j S_ij),   y_i = sum_j S_ij q_j         e: the step size eps, as kernels/scan.py defines it

Each channel i and state j forgets at its own rate, 1 - e_i k_j^2, and yet four steps are one product of matrices. Let
g be the largest e of a step over all channels, w = e / g and u = g k^2. Both are between 0 and 1. These equations are
exact:

    1 - e_i k_j^2        =  1 * (1 - u_j)  +  (1 - w_i) * u_j
    product over steps   =  sum over sets of steps   prod (1 - w_i)   *   prod u_j prod (1 - u_j)
                                                     of the set           of the set    of the rest

The brackets are multiplied out, one term for each set of steps. A term is a number of the channel times a number of the
state. Four steps have 16 sets, the inner dimension of one instruction of a tensor core. No term is negative, so
operands may be rounded to TF32. Plain 1 - e k^2 would give terms of both signs. Where a slot is overwritten at each
step, such terms cancel, and in TF32 they lose ten times as much.

The state is multiplied by 1 minus the lost part, which is the sum over steps t of w_t u_t times the product before t.
So a memory that hardly fades still fades at the right rate. The result does not depend on g.

A table has a row for each channel or state and a column for each set. `grow` adds a step to it: columns 2 c and 2 c + 1
are the set c without the step and with it. So the code of a table is written like the recurrence itself, step by step.

    name    columns: a set with last step t, first step s             shape         what it is for
    before  prod (1 - w) of the set without t                         (channels, 16)
    lost    the same times w_t                                        (channels, 16)
    wrote   e_s x_s prod (1 - w) of the set without s                 (channels, 16)
    U       prod u, prod (1 - u) of the rest, for steps up to t       (states, 16)  S -= (lost U') * S
    Q, R    prod u, prod (1 - u) of the rest before t, q_t (and u_t)  (states, 16)  y_t from the state before the chunk
    L       k_s, and prod u, prod (1 - u) for steps after s           (states, 16)  S += wrote L'
    W       sum over states of q_t L, with L after step t             (16, 16)      y_t from the chunk itself: wrote W'
    last    1 where t is the last step of the set                     (16, 16)      sums over the sets of a step

A `d` before a name means its gradient. Sizes are padded to whole blocks with zeros, which change nothing.

    TRITON_INTERPRET=1 python -m pytest tests/test_scan_mma.py
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

C = 4          # steps of a chunk; padded to 2 ** C rows, since no product can be smaller
CHANNELS = 64  # channels per program
SEGMENT = 32   # steps between the states that the forward keeps for the backward


# --------------------------------------------------------------------------------------------------------------- tables

@triton.jit
def grow(without, with_step):
    return tl.reshape(tl.join(without, with_step), (without.shape[0], 2 * without.shape[1]))


@triton.jit
def halves(table):
    """The columns without and with the step that was added last: what `grow` joined."""
    return tl.split(tl.reshape(table, (table.shape[0], table.shape[1] // 2, 2)))


@triton.jit
def empty_set(table):
    return (tl.arange(0, table.shape[1]) == 0).to(tl.float32)[None, :]  # (1, sets)


@triton.jit
def column(p):
    return tl.load(p).to(tl.float32)[:, None]  # (channels or states, 1)


@triton.jit
def last_steps(C: tl.constexpr):
    last = tl.zeros((2 ** C, 1), tl.float32)
    for r in tl.static_range(C):
        last = grow(last, last * 0 + (tl.arange(0, 2 ** C) == r)[:, None])
    return last  # (steps, sets)


@triton.jit
def channel_tables(e, x, g, D, channels, C: tl.constexpr):
    kept = tl.full((channels.shape[0], 1), 1.0, tl.float32)  # prod (1 - w) of the set
    before, lost, wrote = kept * 0, kept * 0, kept * 0
    for r in tl.static_range(C):
        step = column(e + r * D + channels)
        value = column(x + r * D + channels)
        w = step / tl.load(g + r)
        before = grow(before, kept)
        lost = grow(lost, w * kept)
        wrote = grow(wrote, (1 - w) * wrote + step * value * empty_set(wrote))
        kept = grow(kept, (1 - w) * kept)
    return before, lost, wrote


@triton.jit
def state_tables(k, q, g, N, states, C: tl.constexpr):
    K = tl.full((states.shape[0], 1), 1.0, tl.float32)  # prod u of the set, prod (1 - u) of the rest
    U, Q, R, L = K * 0, K * 0, K * 0, K * 0
    W = tl.zeros((2 ** C, 1), tl.float32)
    for r in tl.static_range(C):
        key = column(k + r * N + states)
        query = column(q + r * N + states)
        u = key * key * tl.load(g + r)
        U = grow(U, u * K)
        Q = grow(Q, query * K)
        R = grow(R, query * u * K)
        L = grow((1 - u) * L, u * L + key * empty_set(L))
        K = grow((1 - u) * K, u * K)
        W = tl.where((tl.arange(0, 2 ** C) == r)[:, None], tl.sum(query * L, 0)[None, :], grow(W, W * 0))
    return K, U, Q, R, L, W


@triton.jit
def channel_gradients(e, x, g, D, channels, before, wrote, dbefore, dlost, dwrote, de, dx, C: tl.constexpr):
    """Take the tables apart, last step first, and write de and dx."""
    dkept = dlost * 0
    for i in tl.static_range(C):
        r = C - 1 - i
        step = column(e + r * D + channels)
        value = column(x + r * D + channels)
        most = tl.load(g + r)
        w = step / most
        before, kept = halves(before)
        wrote, _ = halves(wrote)
        dbefore, dbefore1 = halves(dbefore)
        dlost, dlost1 = halves(dlost)
        dwrote, dwrote1 = halves(dwrote)
        dkept, dkept1 = halves(dkept)
        dw = tl.sum(kept * (dlost1 - dkept1) - wrote * dwrote1, 1, keep_dims=True)
        dproduct = tl.sum(dwrote1 * empty_set(dwrote1), 1, keep_dims=True)  # of e x
        tl.store(de + r * D + channels[:, None], dw / most + value * dproduct)
        tl.store(dx + r * D + channels[:, None], step * dproduct)
        dkept += dbefore1 + w * dlost1 + (1 - w) * dkept1
        dwrote += (1 - w) * dwrote1


@triton.jit
def state_gradients(k, q, g, N, states, K, L, dU, dQ, dR, dL, dW, dk, dq, C: tl.constexpr):
    """Take the tables apart, last step first, and write these channels' share of dk and dq."""
    dK = dU * 0
    for i in tl.static_range(C):
        r = C - 1 - i
        key = column(k + r * N + states)
        query = column(q + r * N + states)
        most = tl.load(g + r)
        u = key * key * most
        dw = tl.sum(tl.where((tl.arange(0, 2 ** C) == r)[:, None], dW, 0.0), 0)[None, :]  # (1, sets)
        dquery = tl.sum(L * dw, 1, keep_dims=True)
        dL += query * dw
        dW, _ = halves(dW)
        K0, K1 = halves(K)
        L0, L1 = halves(L)
        K = K0 + K1  # before this step: its terms add up to (1 - u) K + u K
        L = L0 + L1 - key * empty_set(L0)
        dK0, dK1 = halves(dK)
        dL0, dL1 = halves(dL)
        dU, dU1 = halves(dU)
        dQ, dQ1 = halves(dQ)
        dR, dR1 = halves(dR)
        du = tl.sum(K * (dU1 + dK1 - dK0 + query * dR1) + L * (dL1 - dL0), 1, keep_dims=True)
        dkey = tl.sum(dL1 * empty_set(dL1), 1, keep_dims=True)
        dread = dQ1 + u * dR1
        tl.store(dk + r * N + states[:, None], dkey + 2 * key * most * du)
        tl.store(dq + r * N + states[:, None], dquery + tl.sum(K * dread, 1, keep_dims=True))
        dK = (1 - u) * dK0 + u * (dK1 + dU1) + query * dread
        dL = (1 - u) * dL0 + u * dL1


# -------------------------------------------------------------------------------------------------------------- kernels

@triton.jit
def nearest(v, PRECISION: tl.constexpr):
    """`v`, rounded to TF32's 10 bits if PRECISION is "tf32". A tensor core would cut off the other bits, and the
    interpreter would keep them."""
    if PRECISION == "tf32":
        v = ((v.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return v


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    return tl.dot(nearest(a, PRECISION), nearest(b, PRECISION), input_precision=PRECISION)


@triton.jit
def after(S, lost, wrote, U, L, PRECISION: tl.constexpr):
    """The state after a chunk."""
    return S - dot(lost, tl.trans(U), PRECISION) * S + dot(wrote, tl.trans(L), PRECISION)  # (channels, states)


@triton.jit
def forward_kernel(e, x, k, q, g, h0, y, hT, kept, T, D, N: tl.constexpr, PRECISION: tl.constexpr,
                   CHANNELS: tl.constexpr, SEGMENT: tl.constexpr, C: tl.constexpr):
    b = tl.program_id(1).to(tl.int64)
    rows = tl.num_programs(1)
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    states = tl.arange(0, N)
    place = b * D * N + channels[:, None] * N + states[None, :]  # offsets of the states, (channels, states)
    steps = tl.arange(0, 2 ** C)[None, :]
    last = last_steps(C)
    S = tl.load(h0 + place)
    for start in range(0, T, SEGMENT):
        tl.store(kept + start // SEGMENT * rows * D * N + place, S)
        for i in range(SEGMENT // C):
            t = b * T + start + i * C  # counted from the first step of the first row
            before, lost, wrote = channel_tables(e + t * D, x + t * D, g + t, D, channels, C)
            K, U, Q, R, L, W = state_tables(k + t * N, q + t * N, g + t, N, states, C)
            read = before * dot(S, Q, PRECISION) - lost * dot(S, R, PRECISION)  # (channels, sets)
            ys = dot(read, tl.trans(last), PRECISION) + dot(wrote, tl.trans(W), PRECISION)  # (channels, steps)
            tl.store(y + (t + steps) * D + channels[:, None], ys, steps < C)
            S = after(S, lost, wrote, U, L, PRECISION)
    tl.store(hT + place, S)


@triton.jit
def backward_kernel(e, x, k, q, g, kept, dy, dhT, de, dx, dk, dq, dh0, scratch, T, D, N: tl.constexpr,
                    PRECISION: tl.constexpr, CHANNELS: tl.constexpr, SEGMENT: tl.constexpr, C: tl.constexpr):
    """dk and dq get a share from each block of channels. scratch: the states before the chunks of a segment."""
    b = tl.program_id(1).to(tl.int64)
    rows = tl.num_programs(1)
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    states = tl.arange(0, N)
    place = b * D * N + channels[:, None] * N + states[None, :]  # offsets of the states, (channels, states)
    share = tl.program_id(0).to(tl.int64) * rows * T * N
    steps = tl.arange(0, 2 ** C)[None, :]
    last = last_steps(C)
    dS = tl.load(dhT + place)
    for n in range(T // SEGMENT):
        start = T - (n + 1) * SEGMENT
        S = tl.load(kept + start // SEGMENT * rows * D * N + place)
        for i in range(SEGMENT // C):
            tl.store(scratch + i * rows * D * N + place, S)
            t = b * T + start + i * C
            before, lost, wrote = channel_tables(e + t * D, x + t * D, g + t, D, channels, C)
            K, U, Q, R, L, W = state_tables(k + t * N, q + t * N, g + t, N, states, C)
            S = after(S, lost, wrote, U, L, PRECISION)
        tl.debug_barrier()  # a thread reads what others wrote
        for m in range(SEGMENT // C):
            i = SEGMENT // C - 1 - m
            t = b * T + start + i * C
            S = tl.load(scratch + i * rows * D * N + place)
            before, lost, wrote = channel_tables(e + t * D, x + t * D, g + t, D, channels, C)
            K, U, Q, R, L, W = state_tables(k + t * N, q + t * N, g + t, N, states, C)
            dys = tl.load(dy + (t + steps) * D + channels[:, None], steps < C, 0.0).to(tl.float32)  # (channels, steps)
            dread = dot(dys, last, PRECISION)
            dreadQ = dread * before
            dreadR = -dread * lost  # (channels, sets)
            dloss = -dS * S  # (channels, states)
            dbefore = dread * dot(S, Q, PRECISION)
            dlost = dot(dloss, U, PRECISION) - dread * dot(S, R, PRECISION)
            dwrote = dot(dys, W, PRECISION) + dot(dS, L, PRECISION)
            channel_gradients(e + t * D, x + t * D, g + t, D, channels, before, wrote, dbefore, dlost, dwrote,
                              de + t * D, dx + t * D, C)
            dU = dot(tl.trans(dloss), lost, PRECISION)  # (states, sets)
            dQ = dot(tl.trans(S), dreadQ, PRECISION)
            dR = dot(tl.trans(S), dreadR, PRECISION)
            dL = dot(tl.trans(dS), wrote, PRECISION)
            dW = dot(tl.trans(dys), wrote, PRECISION)  # (steps, sets)
            state_gradients(k + t * N, q + t * N, g + t, N, states, K, L, dU, dQ, dR, dL, dW,
                            dk + share + t * N, dq + share + t * N, C)
            dS -= dot(lost, tl.trans(U), PRECISION) * dS
            dS += dot(dreadQ, tl.trans(Q), PRECISION)
            dS += dot(dreadR, tl.trans(R), PRECISION)
        tl.debug_barrier()
    tl.store(dh0 + place, dS)


# ----------------------------------------------------------------------------------------------------------- in PyTorch

class Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, e, x, k, q, h0, precision):
        (B, T, D), N = x.shape, k.shape[2]
        g = e.float().amax(2).clamp_min(1e-20)  # (B, T); if every e is 0, any number will do
        y = torch.empty_like(x)
        hT = torch.empty_like(h0)
        kept = h0.new_empty(T // SEGMENT, B, D, N)
        ctx.grid = D // CHANNELS, B
        ctx.sizes = T, D, N, precision, CHANNELS, SEGMENT, C
        ctx.save_for_backward(e, x, k, q, g, kept)
        forward_kernel[ctx.grid](e, x, k, q, g, h0, y, hT, kept, *ctx.sizes)
        return y, hT

    @staticmethod
    def backward(ctx, dy, dhT):
        e, x, k, q, g, kept = ctx.saved_tensors
        dy = dy.contiguous()
        dhT = dhT.contiguous()
        de = torch.empty_like(e)
        dx = torch.empty_like(x)
        dh0 = torch.empty_like(dhT)
        dk, dq = kept.new_empty(2, ctx.grid[0], *k.shape)
        scratch = kept.new_empty(SEGMENT // C, *dhT.shape)
        backward_kernel[ctx.grid](e, x, k, q, g, kept, dy, dhT, de, dx, dk, dq, dh0, scratch, *ctx.sizes)
        return de, dx, dk.sum(0).to(k.dtype), dq.sum(0).to(q.dtype), dh0, None


def longhorn_scan(e, x, k, q, h0=None, precision="tf32"):
    """(y, hT) of Longhorn's recurrence for given step sizes, with exact gradients.

    e, x: (B, T, D); k, q: (B, T, N), N at most 64; h0: (B, D, N) float32, or None for zeros. e k^2 is at most 1, as in
    Longhorn. precision: the products' operands are "tf32", or "ieee" for float32; all else is float32. y has x's dtype,
    hT is float32.
    """
    (B, T, D), N = x.shape, k.shape[2]
    assert e.shape == x.shape and q.shape == k.shape == (B, T, N), "e and x are (B, T, D), k and q (B, T, N)"
    assert N <= 64, f"at most 64 states per channel fit the registers, got {N}"
    h0 = x.new_zeros(B, D, N, dtype=torch.float32) if h0 is None else h0
    steps = -T % SEGMENT  # to fill a segment; below: to fill blocks
    channels = -D % CHANNELS
    states = max(16, triton.next_power_of_2(N)) - N
    whole = []
    for a, rows, columns in ((e, steps, channels), (x, steps, channels), (k, steps, states), (q, steps, states),
                             (h0, channels, states)):
        if rows or columns:
            a = F.pad(a, (0, columns, 0, rows))
        whole.append(a.contiguous())
    y, hT = Scan.apply(*whole, precision)
    return y[:, :T, :D], hT[:, :D, :N]
