"""The newer families, the steps of the delta rule and --as_released, each against a truth of its own: recurrences token
by token with whole matrices, as the papers print them, in float64; transformers' Mamba-2 with the same weights, and its
functions of Qwen3-Next and Kimi Linear; plain masks.

    python -m pytest tests/test_newer_families.py
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from experiments.scaling.parameters import SIZES
from kernels import fused, ops
from kernels import linear_attention as la
from mixers import STEPS
from model import LM, ModelConfig
from tests.test_model import numel, shake, tiny, tokens

F64 = torch.float64
CASES = ("retention", "shared", "delta_rule", "gated_delta_rule", "kda", "mesa")
pytestmark = pytest.mark.usefixtures("one_thread")


# ------------------------------------------------------------------------------------------ operators, token by token

def inputs(case, T, kind="", B=1, H=2, K=4, V=3, seed=0):
    """Arguments in float64. kind: 'closed' gates of 0, 1 and between; 'short' and 'long' keys, with a step to match."""
    g = torch.Generator().manual_seed(seed + T)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=F64)
    uniform = lambda *shape: torch.rand(*shape, generator=g, dtype=F64)
    heads = 1 if case == "shared" else H
    a = {"q": draw(B, T, heads, K), "k": F.normalize(draw(B, T, heads, K), dim=-1), "v": draw(B, T, H, V)}
    if case not in ("retention", "shared"):
        a["beta"] = 2 * uniform(B, T, H)
        if kind == "closed":
            a["beta"] = torch.where(uniform(B, T, H) < 0.3, 1e-9, torch.where(uniform(B, T, H) < 0.3, 2.0, a["beta"]))
        if kind in ("short", "long"):
            a["k"] = a["k"] * {"short": 1e-3, "long": 1e3}[kind]
            if case != "mesa":
                a["beta"] = STEPS["implicit"](a["beta"], a["k"].square().sum(-1))
    if case != "delta_rule":
        log_decay = -(2 * draw(B, T, H, *([K] if case == "kda" else [])) - 2).exp()
        if kind == "closed":
            u = uniform(*log_decay.shape)
            log_decay = torch.where(u < 0.1, -torch.inf, torch.where(u < 0.2, -1e4, torch.where(u < 0.5, 0, log_decay)))
        a["log_decay"] = log_decay
    if case == "mesa":
        a["ridge"] = 0.25 + uniform(H, K)
        root = draw(B, H, K, K)
        a["H"] = root @ root.mT
    return a | {"state": draw(B, H, K, V)}


def by_hand(case, q, k, v, state, beta=None, log_decay=None, ridge=None, H=None):
    """(o, state): the recurrence of the paper with the whole transition matrix of each step."""
    B, T, heads, V = v.shape
    q, k = q.expand(B, T, heads, -1), k.expand(B, T, heads, -1)
    eye, S, os = torch.eye(k.shape[3], dtype=v.dtype), state, []
    alpha = torch.ones(B, T, heads, 1, dtype=v.dtype) if log_decay is None else log_decay.exp()
    alpha = (alpha if alpha.dim() == 4 else alpha[..., None]).expand_as(k)
    for t in range(T):
        K, x = k[:, t, :, :, None], v[:, t, :, None]  # (B, H, K, 1), (B, H, 1, V)
        D = torch.diag_embed(alpha[:, t])
        b = 1.0 if beta is None else beta[:, t, :, None, None]
        if case in ("retention", "shared", "mesa"):
            S = D @ S + b * K @ x
        else:
            S = (eye - b * K @ K.mT) @ D @ S + b * K @ x
        read = q[:, t, :, None]
        if case == "mesa":
            H = D @ H + b * K @ K.mT
            read = read @ torch.linalg.inv(H + torch.diag_embed(ridge))
        os.append((read @ S)[:, :, 0])
    return torch.stack(os, 1), S if H is None else (H, S)


def graded(f, a, dtype=F64):
    """{name: tensor}: o, the state and the gradient of every argument."""
    a = {n: x.detach().to(dtype).requires_grad_() for n, x in a.items()}
    given = dict(a)
    if "H" in a:  # the gradient of a symmetric matrix
        given["H"] = (a["H"] + a["H"].mT) / 2
    o, S = f(**given)
    y = {"o": o, **({"U": S[1], "S": S[0]} if isinstance(S, tuple) else {"S": S})}
    g = torch.Generator().manual_seed(5)
    weights = [torch.randn(x.shape, generator=g, dtype=F64).to(dtype) for x in y.values()]
    grads = torch.autograd.grad(list(y.values()), list(a.values()), weights)
    return {n: x.detach() for n, x in y.items()} | {"d" + n: x for n, x in zip(a, grads, strict=True)}


def operator(case):
    op = la.retention if case == "shared" else getattr(la, case)

    def call(state, H=None, **a):
        return op(**a, state=state if H is None else (H, state))
    return call


def off(got, true):
    """The largest relative error by the 2-norm; a decay's gradient, a sum that cancels, beside the size of o's too."""
    errors = {}
    for n, t in true.items():
        scale = t.norm() + (true["o"].norm() if n == "dlog_decay" else 0)
        errors[n] = ((got[n].double() - t).norm() / (scale + 1e-300)).item()
    return max(e if e == e else math.inf for e in errors.values())


@pytest.mark.parametrize("case, T", [*((case, T) for case in CASES for T in (1, 2, 63, 64, 65, 129)),
                                     ("shared", 1000), ("kda", 1000), ("mesa", 1000)])
def test_values_and_gradients(case, T):
    a = {n: x.float().double() for n, x in inputs(case, T).items()}
    true = graded(lambda **a: by_hand(case, **a), a)
    assert off(graded(operator(case), a), true) < 1e-13 * (10 if T == 1000 else 1) * (10 if case == "mesa" else 1)
    assert off(graded(operator(case), a, torch.float32), true) < 2e-5
    if T in (2, 65):  # the loop that --backend=torch runs
        assert off(graded(lambda **a: operator(case)(**a, backend="torch"), a), true) < 1e-12


@pytest.mark.parametrize("case, kind", [*((c, "closed") for c in CASES if c != "delta_rule"), *(
    (c, kind) for c in CASES[2:] for kind in ("short", "long") if (c, kind) != ("mesa", "long"))])
def test_extremes(case, kind):
    """Decays of 0 and 1, a beta of 0 and 2, keys of length 1e-3 and 1e3: finite and right, gradients too."""
    a = inputs(case, 130, kind)
    true = graded(lambda **a: by_hand(case, **a), a)
    assert all(x.isfinite().all() for x in true.values())
    assert off(graded(operator(case), a), true) < 1e-11
    assert off(graded(operator(case), a, torch.float32), true) < 3e-4


@pytest.mark.parametrize("case", CASES)
def test_pieces_and_bfloat16(case):
    a = inputs(case, 150)
    timed = [n for n, x in a.items() if x.dim() > 2 and x.shape[1] == 150]

    def pieces(state, H=None, **a):
        os = []
        for first, last in ((0, 1), (1, 30), (30, 94), (94, 95), (95, 150)):
            part = {n: x[:, first:last] if n in timed else x for n, x in a.items()}
            o, after = operator(case)(state, **part, **({} if H is None else {"H": H}))
            H, state = after if isinstance(after, tuple) else (None, after)
            os.append(o)
        return torch.cat(os, 1), state if H is None else (H, state)

    assert off(graded(pieces, a), graded(operator(case), a)) < 1e-12
    half = {n: x.bfloat16() for n, x in a.items() if n in ("q", "k", "v", "beta")}
    want = operator(case)(**{n: half.get(n, x).double() for n, x in a.items()})[0]
    got = operator(case)(**{n: half.get(n, x.float()) for n, x in a.items()})[0]
    assert got.dtype == torch.bfloat16 and ((got.double() - want).norm() / want.norm()) < 2**-8  # rounded once


def test_against_transformers_functions():
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    for case, theirs in (("gated_delta_rule", torch_recurrent_gated_delta_rule),
                         ("kda", recurrent_kimi_delta_attention)):
        a = {n: x.float() for n, x in inputs(case, 100).items()}
        o, S = getattr(la, case)(**a)
        args = (a["q"] * a["q"].shape[3] ** 0.5, a["k"], a["v"], a["log_decay"], a["beta"])  # theirs scale q
        wanted, after = theirs(*args, initial_state=a["state"].clone(), output_final_state=True)
        torch.testing.assert_close(o, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(S, after, rtol=1e-4, atol=1e-5)


def test_the_library_is_called_right(monkeypatch):
    """With the arguments of flash-linear-attention's functions, here stand-ins that run the loops."""
    def recurrent(loop):
        def function(q, k, v, *, g, scale, initial_state, output_final_state, **beta):
            assert scale == 1.0 and output_final_state and {q.dtype, k.dtype, v.dtype} == {torch.bfloat16}
            return loop(q, k, v, **beta, log_decay=g, state=initial_state)
        return function

    def chunk_mesa_net(q, k, v, g, beta, lamb, *, h_kk_init, h_kv_init, output_final_state, max_CG_iteration):
        o, (H, U) = la.mesa_ref(q, k, v, beta, g, lamb, state=(h_kk_init, h_kv_init))
        return o, H, U

    library = {"retention": recurrent(la.retention_ref), "gated_delta_rule": recurrent(la.delta_rule_ref),
               "kda": recurrent(la.delta_rule_ref), "mesa": chunk_mesa_net}
    monkeypatch.setattr(fused, "GPU", "cpu")
    monkeypatch.setattr(fused, "load", lambda op: (library[op], None))
    for case in ("retention", "shared", "gated_delta_rule", "kda", "mesa"):
        a = {n: x.to(torch.bfloat16 if n in "qkv" else torch.float32) for n, x in inputs(case, 20).items()}
        got, want = (operator(case)(**a, backend=backend)[0] for backend in ("fused", "torch"))
        assert (got - want).norm() < 2**-6 * want.norm()  # beta goes to them in 16 bits


# ------------------------------------------------------------------------------------------------ the step, and blocks

@pytest.mark.parametrize("step", STEPS)
def test_steps_and_their_gradients(step):
    """In float32 and float64 from |k| of 0 to 1e3, against numpy's long double."""
    size, b = torch.tensor([0.0, 1e-6, 1e-3, 0.03, 0.3, 0.9, 1.0, 1.1, 3.0, 10.0, 1e3], dtype=F64), 0.75
    size = size.float().double()
    kk = size.numpy().astype(np.longdouble) ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        wanted = {"explicit": b + 0 * kk, "implicit": b / (1 + b * kk),
                  "exact": np.where(kk > 0, -np.expm1(-b * kk) / kk, b)}[step]
        exact_slope = np.where(b * kk < 1e-4, -b**2 / 2 + b**3 * kk / 3 - b**4 * kk**2 / 8,
                               (b * kk * np.exp(-b * kk) + np.expm1(-b * kk)) / kk**2)
        slope = {"explicit": 0 * kk, "implicit": -(b**2) / (1 + b * kk) ** 2, "exact": exact_slope}[step]
    for dtype in (F64, torch.float32):
        length, beta = size.clone().to(dtype).requires_grad_(), torch.full_like(size, b, dtype=dtype).requires_grad_()
        eps = STEPS[step](beta, length.square())
        d, = torch.autograd.grad(eps.sum(), length, allow_unused=True)
        d = torch.zeros_like(length) if d is None else d
        tolerance = dict(rtol=64 * torch.finfo(dtype).eps, atol=1e-30)
        torch.testing.assert_close(eps.double(), torch.from_numpy(wanted.astype(np.float64)), **tolerance)
        want = torch.from_numpy((slope * 2).astype(np.float64)) * size
        torch.testing.assert_close(d.double(), want, **tolerance)


def block_by_hand(family, u, p, H, step="explicit", free=False):
    """The mixer of one sequence u (T, d), token by token; p: its parameters in numpy, float64."""
    sigmoid, softplus = lambda x: 1 / (1 + np.exp(-x)), lambda x: np.logaddexp(0, x)
    silu, unit = lambda x: x * sigmoid(x), lambda a: a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6)
    w = p["conv_weight"]
    d, W, wide = u.shape[1], w.shape[1], 2 if family == "gated_deltanet" else 1
    m, n, window, out = d // H, d // H // wide, np.zeros((W, len(w))), []
    S, K = np.zeros((H, n, m)), np.zeros((H, n, n))
    for x in u:
        window = np.vstack([window[1:], p["qkv.weight"] @ x])
        c = silu((w.T * window).sum(0))
        q, k, v = (a.reshape(H, -1) for a in np.split(c, [H * n, 2 * H * n]))
        q, k = unit(q) / math.sqrt(n), k if free else unit(k)
        beta, o = sigmoid(p["beta.weight"] @ x + p.get("beta.bias", 0)), np.zeros((H, m))
        kk = (k**2).sum(1)
        eps = {"explicit": beta, "implicit": beta / (1 + beta * kk), "exact": -np.expm1(-beta * kk) / kk}[step]
        decay = np.ones((H, n))
        if family == "gated_deltanet":
            rate = np.exp(p["A_log"]) * softplus(p["forget.weight"] @ x + p["dt_bias"])
            decay = np.repeat(np.exp(-rate)[:, None], n, 1)
        if family == "kda":
            rate = softplus(p["forget2.weight"] @ (p["forget1.weight"] @ x) + p["dt_bias"]).reshape(H, n)
            decay = np.exp(-np.exp(p["A_log"])[:, None] * rate)
        if family == "mesa":
            decay = np.repeat(sigmoid(p["forget.weight"] @ x + p["forget.bias"])[:, None], n, 1)
        for h in range(H):
            S[h] = decay[h][:, None] * S[h]
            if family == "mesa":
                K[h] = decay[h][:, None] * K[h] + beta[h] * np.outer(k[h], k[h])
                S[h] += beta[h] * np.outer(k[h], v[h])
                o[h] = np.linalg.solve(K[h] + np.diag(softplus(p["ridge"][h]) + 0.25), q[h]) @ S[h]
            else:
                S[h] += eps[h] * np.outer(k[h], v[h] - k[h] @ S[h])
                o[h] = q[h] @ S[h]
        o = (o / np.sqrt((o**2).mean(1, keepdims=True) + 1e-5) * p["norm_weight"]).ravel()
        gate = {"gated_deltanet": lambda x: silu(p["gate.weight"] @ x), "kda": lambda x: sigmoid(
            p["gate2.weight"] @ (p["gate1.weight"] @ x) + p["gate2.bias"])}.get(family, lambda x: 1)
        out.append(p["out_proj.weight"] @ (o * gate(x)))
    return torch.from_numpy(np.array(out))


@pytest.mark.parametrize("family, step, free", [
    ("gated_deltanet", "explicit", False), ("kda", "explicit", False), ("mesa", "explicit", False), *(
        ("deltanet", step, free) for step in STEPS for free in (False, True)), ("gated_deltanet", "implicit", True)])
@torch.no_grad()
def test_a_block_is_its_equations(family, step, free):
    lm = shake(tiny(family, n_head=4, d_conv=3, step=step, normalize_keys=not free))
    block, u = lm.layers[0].branches[0].mixer.double(), torch.randn(2, 70, 32, dtype=F64)
    p = {name: x.numpy() for name, x in block.named_parameters()}
    for got, x in zip(block(u)[0], u, strict=True):
        torch.testing.assert_close(got, block_by_hand(family, x.numpy(), p, 4, step, free), rtol=1e-10, atol=1e-10)


def test_mamba2_is_transformers_mamba2():
    import transformers

    d, L, V = 32, 2, 96
    lm = shake(tiny("mamba2", n_embd=d, n_layer=1, n_head=2, d_state=2, vocab_size=V))
    theirs = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(
        hidden_size=d, num_heads=4, head_dim=16, state_size=16, n_groups=1, num_hidden_layers=L, vocab_size=V, expand=2,
        conv_kernel=4, tie_word_embeddings=True, use_cache=False)).eval()
    names = {"embeddings.weight": "embed.weight", "norm_f.weight": "norm.weight"}
    own = {"in_proj.weight": "in_proj.weight", "conv1d.weight": "conv_weight", "conv1d.bias": "conv_bias", "D": "skip",
           "dt_bias": "dt_bias", "A_log": "A_log", "norm.weight": "norm_weight", "out_proj.weight": "out_proj.weight"}
    for i in range(L):
        here = f"layers.0.branches.{i}"
        names[f"layers.{i}.norm.weight"] = f"{here}.norm.weight"
        names |= {f"layers.{i}.mixer.{n}": f"{here}.mixer.{m}" for n, m in own.items()}
    params, ours = dict(theirs.named_parameters()), dict(lm.named_parameters())
    assert {f"backbone.{n}" for n in names} == set(params) and set(names.values()) == set(ours)
    with torch.no_grad():
        for n, m in names.items():
            params[f"backbone.{n}"].copy_(ours[m].reshape(params[f"backbone.{n}"].shape))
    idx, targets = tokens(2, 75, V), tokens(2, 75, V, seed=2)
    logits, loss = lm(idx, targets)
    wanted = theirs(idx).logits
    torch.testing.assert_close(logits, wanted, rtol=2e-5, atol=2e-5)
    loss.backward()
    F.cross_entropy(wanted.flatten(0, 1), targets.flatten()).backward()
    for n, m in names.items():
        got, true = ours[m].grad, params[f"backbone.{n}"].grad.reshape(ours[m].shape)
        assert (got - true).norm() < 2e-4 * true.norm() + 1e-7, m


# ---------------------------------------------------------------------------------------------------------- the window

@pytest.mark.parametrize("T, past, window", [(1, 0, 1), (130, 0, 5), (200, 70, 64), (150, 9, 100), (3, 90, 8)])
def test_a_window_is_a_mask(T, past, window, monkeypatch):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 4, generator=g, dtype=F64) for n in (T, past + T, past + T))
    i, j = torch.arange(past, past + T)[:, None], torch.arange(past + T)
    scores = (q @ k.mT / 2).masked_fill((j > i) | (j <= i - window), -torch.inf)
    for backend in ("", "torch"):
        torch.testing.assert_close(ops.attention(q, k, v, window, backend=backend), scores.softmax(-1) @ v)
    seen = []
    plain, name = F.scaled_dot_product_attention, "scaled_dot_product_attention"
    monkeypatch.setattr(F, name, lambda *a, **kw: seen.append(a[1].shape[2]) or plain(*a, **kw))
    ops.attention(q, k, v, window)
    assert max(seen) < window + max(window, ops.WINDOW_QUERIES)  # it never looks at the whole text


@torch.no_grad()
def test_the_cache_of_a_window_ends_where_it_ends():
    lm, idx = tiny("swa", n_layer=1, window=5), tokens(2, 60)
    state = lm.initial_state(2)
    for part in idx.split([20, 1, 1, 38], 1):
        logits, _, state = lm(part, state=state)
    assert numel(state) == 2 * 2 * 5 * 32 == 2 * lm.state_size(60) and lm.state_size(3) == 2 * 3 * 32
    torch.testing.assert_close(logits, lm(idx)[0][:, -38:], rtol=1e-5, atol=1e-5)
    recent = lm(idx[:, -5:])[0][:, -1]  # rotary angles are differences: what was read before the window is nothing
    torch.testing.assert_close(logits[:, -1], recent, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("changes, words", [
    ({"model": "swa", "window": -1}, "window -1 must be at least 1"), ({"step": "midpoint"}, "unknown step 'midpoint'"),
    ({"model": "mamba2", "n_head": 3}, "n_head 3"), ({"model": "gated_deltanet", "n_head": 32}, "n_head 32"),
    ({"model": "kda", "n_head": 5}, "n_head 5"), ({"model": "longhorn", "pattern": "kda*3,sw"}, "unknown model 'sw'")])
def test_refused_in_a_line(changes, words):
    with pytest.raises(ValueError, match=words) as caught:
        tiny(changes.pop("model", "deltanet"), **changes)
    assert "\n" not in str(caught.value)


# --------------------------------------------------------------------------------------------------------- as released

@torch.no_grad()
def test_as_released():
    """What differs, written by hand; the counts are those of the released code."""
    with torch.device("meta"):
        lms = [LM(ModelConfig(model="rwkv", as_released=True, **size)) for size in SIZES.values()]
    assert [lm.parameter_count()["total"] for lm in lms] == [124_447_776, 354_797_312]
    lm, idx = shake(tiny("rwkv", as_released=True)), tokens(2, 24)
    state, parts = lm.initial_state(2), []
    for part in idx.split([5, 1, 18], 1):
        logits, _, state = lm(part, state=state)
        parts.append(logits)
    whole = lm(idx)[0]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=2e-5, atol=2e-5)
    h = lm.embed(idx) + lm.positions.weight[:24]
    for layer in lm.layers:
        h, _ = layer(h)
    torch.testing.assert_close(whole, lm.norm(h) @ lm.embed.weight.T)
    with pytest.raises(ValueError, match="^RWKV as released has positions up to block_size 24, not 25: [^\n]*$"):
        lm(idx[:, :1], state=state)
    for family in ("rwkv", "retnet", "gla"):
        lm = LM(ModelConfig(model=family, as_released=True, n_layer=2, n_head=2, n_embd=256, vocab_size=64))
        assert set(lm.decayed()) == {n for n, p in lm.named_parameters() if p.dim() >= 2}
        own = {"rwkv": "1.mixer.value", "retnet": "1.mixer.w2", "gla": "1.mixer.w2"}[family]
        assert lm.get_parameter(f"layers.0.branches.{own}.weight").std().item() == pytest.approx(0.02, rel=0.03)
    retnet = LM(ModelConfig(model="retnet", as_released=True, n_layer=1, n_head=2, n_embd=64, vocab_size=64))
    x = torch.randn(1, 3, 64) * 1e-3
    scale = x.square().mean(-1, keepdim=True)
    torch.testing.assert_close(retnet.norm(x), x / (scale + 1e-6).sqrt())
    mine, theirs = (tiny("gla", n_layer=1, as_released=r).layers[0].branches[0].mixer for r in (False, True))
    inner = {}
    for block in (mine, theirs):
        block.gate.weight.zero_(), block.gate.bias.fill_(1)
        inner[block.as_released] = torch.linalg.solve(block.out_proj.weight, block(torch.ones(1, 3, 32))[0].mT).mT
    rms, layer = (a.unflatten(-1, (2, -1)) / F.silu(torch.ones(())) for a in (inner[False], inner[True]))
    assert (layer.mean(-1).abs() < 1e-4).all() and (rms.mean(-1).abs() > 1e-2).any()
