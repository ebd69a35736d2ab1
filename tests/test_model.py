"""model.py: the same questions to every family, then LLaMA against another implementation and Longhorn against its paper.

The surprise: counts, FLOPs and initialisation are written down here a second time, by hand. A new family is asked all
the questions by standing in FAMILIES; its row in PARAMETERS (and in FLOPS) is what it has to bring.

    python -m pytest tests/test_model.py
"""

import math
import re

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import model
from model import FAMILIES, LM, SIZES, ModelConfig, sample_token

EACH_FAMILY = pytest.mark.parametrize("family", FAMILIES)


def config(family, **changes):
    small = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 24, "vocab_size": 64}
    return ModelConfig(**{"model": family, **small, **changes})


def tiny(family, seed=0, **changes):
    """A small model whose matrices are large enough that every branch matters to the logits."""
    torch.manual_seed(seed)
    lm = LM(config(family, **changes)).eval()
    matrices = dict(lm.named_parameters())
    with torch.no_grad():
        for name in lm.decayed():
            matrices[name].normal_(0, 0.3 if name == "embed.weight" else matrices[name].shape[1] ** -0.5)
    return lm


def tokens(B, T, vocab_size=64, seed=1):
    return torch.randint(vocab_size, (B, T), generator=torch.Generator().manual_seed(seed))


def close(a, b, tolerance=2e-5):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def numel(state):
    """Numbers in a state: tensors in any nesting of lists and tuples."""
    return state.numel() if isinstance(state, torch.Tensor) else sum(map(numel, state))


# ------------------------------------------------------------------------------------------- sequences, chunks and steps

@EACH_FAMILY
@torch.no_grad()
def test_a_token_changes_nothing_before_it(family):
    lm, idx = tiny(family), tokens(2, 24)
    before = lm(idx)[0]
    for t in (0, 1, 11, 23):
        other = idx.clone()
        other[:, t] = (other[:, t] + 1) % 64
        after = lm(other)[0]
        close(after[:, :t], before[:, :t], 1e-6)
        assert (after[:, t:] - before[:, t:]).abs().amax((0, 2)).min() > 1e-6, "a later position does not see the token"


@EACH_FAMILY
@pytest.mark.parametrize("splits", [[1] * 24, [24], [1, 2, 3, 7, 11], [23, 1], [5, 1, 1, 16, 1]], ids=str)
@torch.no_grad()
def test_chunks_with_their_state_equal_the_whole(family, splits):
    lm, idx = tiny(family), tokens(2, 24)
    whole, state, parts = lm(idx)[0], lm.initial_state(2), []
    for part in idx.split(splits, 1):
        logits, loss, state = lm(part, state=state)
        parts.append(logits)
    assert loss is None
    close(torch.cat(parts, 1), whole)


@EACH_FAMILY
@torch.no_grad()
def test_a_state_is_left_as_it_was(family):
    lm, idx = tiny(family), tokens(1, 8)
    state = lm(idx, state=lm.initial_state(1))[2]
    once, again = lm(idx, state=state)[0], lm(idx, state=state)[0]
    assert torch.equal(once, again)


@EACH_FAMILY
def test_gradients_flow_through_the_state(family):
    """Two halves with the state carried over give the gradients of the whole: truncation would be silent otherwise."""
    lm, idx, targets = tiny(family), tokens(2, 12), tokens(2, 12, seed=2)
    lm(idx, targets)[1].backward()
    whole = {name: p.grad.clone() for name, p in lm.named_parameters()}
    lm.zero_grad()
    _, first, state = lm(idx[:, :5], targets[:, :5], state=lm.initial_state(2))
    _, second, _ = lm(idx[:, 5:], targets[:, 5:], state=state)
    (first * 5 / 12 + second * 7 / 12).backward()
    for name, p in lm.named_parameters():
        close(p.grad, whole[name], 1e-4)


@EACH_FAMILY
@torch.no_grad()
def test_shapes_loss_and_last_only(family):
    lm, idx, targets = tiny(family), tokens(3, 10), tokens(3, 10, seed=2)
    logits, loss = lm(idx)
    assert logits.shape == (3, 10, 64) and loss is None
    logits, loss = lm(idx, targets)
    p = logits.double().log_softmax(-1)
    close(loss.double(), -p.gather(-1, targets[..., None]).mean())
    targets[0], targets[1, 3:] = -1, -1
    keep = targets >= 0
    _, loss = lm(idx, targets)
    close(loss.double(), -p[keep].gather(-1, targets[keep][:, None]).mean())
    last, none = lm(idx, last_only=True)
    assert last.shape == (3, 1, 64) and none is None
    close(last, logits[:, -1:])
    last, none, state = lm(idx, state=lm.initial_state(3), last_only=True)
    assert last.shape == (3, 1, 64) and none is None and len(state) == len(lm.branches) == 4
    close(last, logits[:, -1:])


# ------------------------------------------------------------------------------------------------------------- learning

@EACH_FAMILY
def test_the_first_loss_is_that_of_a_uniform_guess(family):
    torch.manual_seed(0)
    lm = LM(config(family, vocab_size=512))
    logits, loss = lm(tokens(8, 24, 512), tokens(8, 24, 512, seed=2))
    assert abs(loss.item() - math.log(512)) < 0.05
    assert logits.std() < 0.5


@EACH_FAMILY
def test_every_parameter_gets_a_gradient(family):
    lm = tiny(family)
    lm(tokens(4, 24), tokens(4, 24, seed=2))[1].backward()
    for name, p in lm.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name
        assert (p.grad != 0).float().mean() > (0.5 if name != "embed.weight" else 0.99), f"{name}: gradients are mostly zero"


@EACH_FAMILY
def test_it_can_learn_one_batch_by_heart(family):
    torch.manual_seed(0)
    lm, idx, targets = LM(config(family, n_layer=1)), tokens(4, 16), tokens(4, 16, seed=2)
    optimizer = torch.optim.AdamW(lm.optimizer_groups(0.0), lr=1e-2)
    for _ in range(120):
        loss = lm(idx, targets)[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1, f"{family}: {loss.item()}"


@EACH_FAMILY
def test_compiled_equals_eager(family):
    lm, idx, targets = tiny(family), tokens(2, 16), tokens(2, 16, seed=2)
    results = []
    for run in (lm, torch.compile(lm, backend="aot_eager", fullgraph=True)):
        lm.zero_grad()
        logits, loss = run(idx, targets)
        loss.backward()
        results.append((logits.detach(), {name: p.grad.clone() for name, p in lm.named_parameters()}))
    (logits, gradients), (compiled_logits, compiled_gradients) = results
    close(compiled_logits, logits)
    for name, g in gradients.items():
        close(compiled_gradients[name], g)


# ------------------------------------------------------------------------------------------------ counted a second time

def longhorn_parameters(L, H, d, N=16, W=4, mamba=False):
    inner, R = 2 * d, math.ceil(d / 16)
    block = d * 2 * inner + inner * W + inner + inner * (R + 2 * N) + R * inner + inner + inner + inner * d + d
    return 2 * L * (block + (inner * N if mamba else 0))


def swiglu(d):
    return 3 * d * (math.ceil(8 * d / 3 / 256) * 256)


def retnet_parameters(L, H, d):
    wide = int(1.8 * d) // H * H
    return L * (2 * d * d + 3 * d * wide + 3 * d * wide + 2 * d)  # q k, v g o, the GLU's three; two norms


# family -> parameters of the layers (their norms with them) from n_layer, n_head, n_embd; experiments.md and families.md
PARAMETERS = {
    "longhorn": longhorn_parameters,
    "mamba": lambda L, H, d: longhorn_parameters(L, H, d, mamba=True),
    "llama": lambda L, H, d: L * (4 * d * d + swiglu(d) + 2 * d),
    "gla": lambda L, H, d: L * (2 * d * d // 2 + 3 * d * d + d + 16 * d + 16 * d // 2 + d // 2 + swiglu(d) + 2 * d),
    "retnet": retnet_parameters,
    "rwkv": lambda L, H, d: L * (12 * d * d),  # to 0.1%: the vectors left out
}
ROUGH = {"rwkv": 1e-3}  # families whose row above is not exact
TABLE1 = {"retnet": (129.1, 373.2), "gla": (123.8, 361.1), "rwkv": (124.4, 354.8), "mamba": (129.2, 371.5),
          "llama": (124.4, 357.7), "longhorn": (128.6, 369.8)}  # millions, the paper's


@pytest.mark.parametrize("size", SIZES)
@EACH_FAMILY
def test_parameter_count(family, size):
    with torch.device("meta"):
        lm = LM(ModelConfig(model=family, **SIZES[size]))
    L, H, d = SIZES[size]["n_layer"], SIZES[size]["n_head"], SIZES[size]["n_embd"]
    count = sum(p.numel() for p in lm.parameters())
    parts = lm.parameter_count()
    assert parts["total"] == count == sum(n for part, n in parts.items() if part != "total")
    assert parts["embedding"] == 50304 * d
    assert family in PARAMETERS, f"a new family: write into PARAMETERS, by hand, how many {family} has (here {count:,} at {size})"
    assert count == pytest.approx(50304 * d + d + PARAMETERS[family](L, H, d), rel=ROUGH.get(family, 0))
    if family in TABLE1:
        assert count / 1e6 == pytest.approx(TABLE1[family][list(SIZES).index(size)], rel=0.01)


def test_sizes_are_table_5s():
    assert SIZES == {"120M": {"n_layer": 12, "n_head": 12, "n_embd": 768}, "350M": {"n_layer": 24, "n_head": 16, "n_embd": 1024}}


# family -> forward FLOPs a token in the layers, from n_layer, n_embd, T, N; d_conv 4
FLOPS = {
    # in, x, dt and out projections; the convolution; eps k, x - k S, S +=, S q = 1 + 2 + 2 + 2 a state; eps, skip, gate = 8
    "longhorn": lambda L, d, T, N: 2 * L * (2 * (4 * d * d + 2 * d * (math.ceil(d / 16) + 2 * N) + math.ceil(d / 16) * 2 * d
                                                 + 2 * d * d) + 2 * d * (2 * 4 + 7 * N + 8)),
    # q k v o and the MLP; each of the d channels of q and of v meets (T + 1) / 2 tokens on average
    "llama": lambda L, d, T, N: L * (2 * (4 * d * d + swiglu(d)) + 2 * 2 * d * (T + 1) / 2),
}


@EACH_FAMILY
def test_flops_per_token(family):
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 24, "vocab_size": 96}
    lm, B, T = LM(ModelConfig(model=family, **shape)), 2, 24
    flops = lm.flops_per_token()
    assert flops["total"] == flops["forward"] + flops["backward"] and flops["backward"] == 2 * flops["forward"]
    assert lm.flops_per_token(T=24) == flops and lm.flops_per_token(48)["total"] >= flops["total"]
    if family in FLOPS:
        assert flops["forward"] == 2 * 96 * 64 + FLOPS[family](2, 64, T, 16)
        assert lm.flops_per_token(100)["forward"] == 2 * 96 * 64 + FLOPS[family](2, 64, 100, 16)
    # what PyTorch counts: linear maps are mm, forward once and backward twice; mixing is everything else
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):  # the fused attention is not counted
        loss = lm(tokens(B, T, 96), tokens(B, T, 96, seed=2))[1]
    forward = counter.get_flop_counts()["Global"]
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    matrices = [torch.ops.aten.mm, torch.ops.aten.addmm]
    linear = flops["forward"] - sum(b.branch.mixing_flops(T) for b in lm.branches)
    assert sum(forward.get(op, 0) for op in matrices) == B * T * linear
    assert sum(counter.get_flop_counts()["Global"].get(op, 0) for op in matrices) == 2 * B * T * linear
    if family == "llama":  # PyTorch counts the whole square of attention, we the visible half with the diagonal
        square = sum(n for op, n in forward.items() if op not in matrices)
        assert square * (T + 1) / (2 * T) == B * T * sum(b.branch.mixing_flops(T) for b in lm.branches)


@EACH_FAMILY
@torch.no_grad()
def test_state_size_is_that_of_the_state(family):
    for changes in ({}, {"d_state": 4, "n_layer": 1}):
        lm = tiny(family, **changes)
        for T in (1, 10, 24):
            assert numel(lm(tokens(1, T), state=lm.initial_state(1))[2]) == lm.state_size(T)
        assert lm.state_size() == lm.state_size(24)
        assert numel(lm(tokens(3, 10), state=lm.initial_state(3))[2]) == 3 * lm.state_size(10)


@torch.no_grad()
def test_memory_a_token_is_constant_for_longhorn_and_grows_for_llama():
    for family, grows in (("longhorn", False), ("llama", True)):
        lm = tiny(family, n_layer=1)
        state, idx, sizes = lm.initial_state(1), tokens(1, 1000), {}
        for t in range(1000):
            _, _, state = lm(idx[:, t:t + 1], state=state, last_only=True)
            sizes[t + 1] = numel(state)
        assert (sizes[1000] > sizes[10]) is grows and sizes[1000] == lm.state_size(1000)
        assert sizes[1000] == (100 * sizes[10] if grows else sizes[10])
        held = [t.untyped_storage().nbytes() // 4 for s in state for t in s]  # no view that keeps the past alive
        assert sum(held) <= 2 * sizes[1000]


# ------------------------------------------------------------------------------------------- initialisation, weight decay

def expected_init(family, d, L, N=16, W=4):
    """Name of a parameter within its branch -> (kind, scale), by hand from families.md; None: not written down here."""
    residual = 0.02 / math.sqrt(2 * L)  # two residual branches a layer
    kaiming = lambda fan_in: ("uniform", fan_in**-0.5)
    if family == "longhorn":
        return {"in_proj.weight": kaiming(d), "conv_weight": kaiming(W), "conv_bias": kaiming(W), "x_proj.weight": kaiming(2 * d),
                "dt_proj.weight": kaiming(math.ceil(d / 16)), "dt_bias": ("constant", 0), "D": ("constant", 1),
                "out_proj.weight": ("uniform", (2 * d) ** -0.5 / math.sqrt(2 * L))}
    if family == "llama":
        return {"qkv.weight": ("normal", 0.02), "out_proj.weight": ("normal", residual), "w1.weight": ("normal", 0.02),
                "w3.weight": ("normal", 0.02), "w2.weight": ("normal", residual)}
    return None


@EACH_FAMILY
def test_every_parameter_starts_as_the_table_says(family):
    torch.manual_seed(0)
    d, L = 256, 2
    lm = LM(config(family, n_embd=d, n_layer=L, n_head=4, vocab_size=1024))
    table = lm.init_table()
    assert set(table) == {name for name, _ in lm.named_parameters()}
    by_hand = expected_init(family, d, L)
    for name, p in lm.named_parameters():
        kind, scale = table[name]
        p, slack = p.detach().double(), 6 / math.sqrt(p.numel())  # six standard errors, about
        if name == "embed.weight":
            assert (kind, scale) == ("normal", 0.02)
        elif re.fullmatch(r"(branches\.\d+\.)?norm\.weight", name):
            assert (kind, scale) == ("constant", 1)
        elif by_hand is not None:
            expected_kind, expected_scale = by_hand[name.split(".branch.")[1]]
            assert kind == expected_kind and scale == pytest.approx(expected_scale), name
        if kind == "constant":
            assert (p == scale).all(), name
        elif kind == "normal":
            assert p.std() == pytest.approx(scale, rel=slack) and abs(p.mean()) < scale * slack, name
            assert p.abs().max() > 2.3 * scale, f"{name} is not normal"
        elif kind == "uniform":
            assert p.abs().max() <= scale and p.std() == pytest.approx(scale / math.sqrt(3), rel=slack), name
            assert abs(p.mean()) < scale * slack and p.abs().max() > scale * (1 - 30 / p.numel()), name
        else:
            pytest.fail(f"{name}: say here how an initialisation of kind {kind!r} is read back")


@EACH_FAMILY
def test_the_same_seed_gives_the_same_weights(family):
    one, same, other = (LM(config(family)) for seed in (5, 5, 6) if torch.manual_seed(seed))
    equal = lambda a, b: all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert equal(one, same) and not equal(one, other)


@EACH_FAMILY
def test_matrices_and_the_embedding_decay_and_nothing_else(family):
    lm = LM(config(family))
    named, decayed = dict(lm.named_parameters()), lm.decayed()
    free = r"A_log|\bD$|bias|norm|conv|time_|mu|decay|bonus"
    for name, p in named.items():
        assert (name in decayed) == (p.ndim == 2 and not re.search(free, name)), name
    assert "embed.weight" in decayed and len(decayed) == len(set(decayed))
    with_decay, without = lm.optimizer_groups(0.1)
    assert with_decay["weight_decay"] == 0.1 and without["weight_decay"] == 0
    assert {id(p) for p in with_decay["params"]} == {id(named[name]) for name in decayed}
    everything = [id(p) for p in with_decay["params"] + without["params"]]
    assert sorted(everything) == sorted(id(p) for p in lm.parameters())


# ------------------------------------------------------------------------------------------ against other implementations

@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float64, 2e-6)], ids=str)
def test_llama_is_transformers_llama(dtype, tolerance):
    """Logits and gradients. In float64 what remains is the rotary angle, which both sides round to float32."""
    transformers = pytest.importorskip("transformers")
    d, H, L, V, T = 64, 4, 2, 96, 40
    lm = tiny("llama", n_embd=d, n_head=H, n_layer=L, vocab_size=V, block_size=T)
    with torch.no_grad():
        for p in lm.parameters():
            if p.ndim == 1:
                p.uniform_(0.5, 1.5)  # norms: a forgotten weight must show
    lm = lm.to(dtype)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=d, num_attention_heads=H, num_key_value_heads=H, num_hidden_layers=L, intermediate_size=256, vocab_size=V,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=T,
        tie_word_embeddings=True, attention_bias=False, hidden_act="silu", attn_implementation="sdpa")).to(dtype).eval()
    ours = dict(lm.named_parameters())
    names = {"model.embed_tokens.weight": ("embed.weight", slice(None)), "model.norm.weight": ("norm.weight", slice(None))}
    for i in range(L):
        attention, mlp, layer = f"branches.{2 * i}", f"branches.{2 * i + 1}", f"model.layers.{i}"
        for j, letter in enumerate("qkv"):
            names[f"{layer}.self_attn.{letter}_proj.weight"] = (f"{attention}.branch.qkv.weight", slice(j * d, (j + 1) * d))
        for name, here in (("self_attn.o_proj", f"{attention}.branch.out_proj"), ("mlp.gate_proj", f"{mlp}.branch.w1"),
                           ("mlp.up_proj", f"{mlp}.branch.w3"), ("mlp.down_proj", f"{mlp}.branch.w2"),
                           ("input_layernorm", f"{attention}.norm"), ("post_attention_layernorm", f"{mlp}.norm")):
            names[f"{layer}.{name}.weight"] = (f"{here}.weight", slice(None))
    params = dict(theirs.named_parameters())
    assert set(params) == set(names)
    with torch.no_grad():
        for name, (here, rows) in names.items():
            params[name].copy_(ours[here][rows])
    idx, targets = tokens(2, T, V), tokens(2, T, V, seed=2)
    logits, loss = lm(idx, targets)
    expected = theirs(idx).logits
    close(logits, expected, tolerance)
    loss.backward()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    for name, (here, rows) in names.items():
        close(ours[here].grad[rows], params[name].grad, tolerance)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def longhorn_by_hand(u, p, N):
    """Algorithm 1 inside Mamba's block, token by token: u (T, d), p the block's parameters as float64 arrays."""
    inner, W = p["conv_weight"].shape
    R = p["dt_proj.weight"].shape[1]
    S, window, out = np.zeros((inner, N)), np.zeros((W, inner)), []
    for u_t in u:
        x, z = np.split(p["in_proj.weight"] @ u_t, 2)
        window = np.vstack([window[1:], x])  # the last W inputs, the newest at the end
        x = p["conv_bias"] + (p["conv_weight"].T * window).sum(0)
        x = x * sigmoid(x)
        r, k, q = np.split(p["x_proj.weight"] @ x, [R, R + N])
        beta = sigmoid(p["dt_proj.weight"] @ r + p["dt_bias"])
        eps = beta / (1 + beta * (k @ k))  # Eq. 6
        S = (1 - np.outer(eps, k**2)) * S + np.outer(eps * x, k)  # Algorithm 1, step 3
        y = (S @ q + p["D"] * x) * z * sigmoid(z)
        out.append(p["out_proj.weight"] @ y)
    return np.array(out)


@pytest.mark.parametrize("dtype, backend, tolerance", [
    (torch.float32, "", 1e-5), (torch.float32, "torch", 1e-5), (torch.float64, "torch", 1e-12),
], ids=["kernels", "torch", "float64"])
def test_longhorn_block_is_algorithm_1(dtype, backend, tolerance):
    lm = tiny("longhorn", scan_backend=backend, d_state=5, d_conv=3)
    block = lm.branches[0].branch
    with torch.no_grad():
        block.dt_bias.normal_()
        block.D.normal_()
        block.x_proj.weight.mul_(2)  # keys that really forget
        block.to(dtype)
        u = torch.randn(2, 50, 32, dtype=dtype)
        y, state = block(u)
        assert state is None
        p = {name: t.double().numpy() for name, t in block.named_parameters()}
        for b in range(2):
            close(y[b].double(), torch.from_numpy(longhorn_by_hand(u[b].double().numpy(), p, 5)), tolerance)


# ------------------------------------------------------------------------------------------------------------ generation

@EACH_FAMILY
@torch.no_grad()
def test_greedy_generation_is_the_argmax_of_the_whole(family):
    lm, idx = tiny(family), tokens(2, 5)
    out = lm.generate(idx, 30, temperature=0)
    assert out.shape == (2, 35) and torch.equal(out[:, :5], idx)
    for t in range(5, 35):  # past block_size too
        assert torch.equal(out[:, t], lm(out[:, :t])[0][:, -1].argmax(-1))
    streamed = list(lm.stream(idx, 30, temperature=0))
    assert all(token.shape == (2,) for token in streamed) and torch.equal(torch.stack(streamed, 1), out[:, 5:])


@EACH_FAMILY
def test_a_prompt_in_chunks_continues_alike(family):
    lm, idx = tiny(family), tokens(1, 60)
    whole, chunked = ([t.item() for t in lm.stream(idx, 12, temperature=0, chunk=chunk)] for chunk in (4096, 7))
    assert whole == chunked and len(whole) == 12


def test_sampling_is_seeded():
    lm, idx = tiny("longhorn"), tokens(3, 4)
    draw = lambda seed, **how: lm.generate(idx, 20, generator=torch.Generator().manual_seed(seed), **how)
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    assert torch.equal(draw(1, top_k=1), draw(2, temperature=0))
    assert torch.equal(draw(1, top_k=64, top_p=1.0), draw(1))


def test_top_k_and_top_p_cut_the_tail():
    p = torch.tensor([[0.05, 0.4, 0.3, 0.15, 0.1]]).repeat(4000, 1)
    draw = lambda **how: sample_token(p.log(), generator=torch.Generator().manual_seed(0), **how)
    seen = lambda **how: set(draw(**how).tolist())
    assert seen() == {0, 1, 2, 3, 4}
    assert seen(top_k=1) == {1} and seen(top_k=3) == {1, 2, 3} and seen(top_k=99) == {0, 1, 2, 3, 4}
    assert seen(top_p=0.39) == {1} and seen(top_p=0.41) == {1, 2}  # the first that reaches top_p is kept
    assert seen(top_p=0.86) == {1, 2, 3, 4} and seen(top_p=1e-9) == {1} and seen(top_p=1.0) == {0, 1, 2, 3, 4}
    assert seen(top_k=3, top_p=0.5) == {1, 2}
    assert len(sample_token(torch.zeros(100, 2), top_p=0.5).unique()) == 1  # reached exactly: no more is needed
    often = torch.bincount(draw(top_k=2), minlength=5) / 4000
    close(often, torch.tensor([0, 4 / 7, 3 / 7, 0, 0]), 0.03)
    often = torch.bincount(draw(temperature=0.5), minlength=5) / 4000
    close(often, (p[0] ** 2 / (p[0] ** 2).sum()), 0.03)
    assert seen(temperature=1e-3) == {1} and seen(temperature=0, top_k=2) == {1}


@pytest.mark.parametrize("how", [{"temperature": -0.1}, {"top_k": 0}, {"top_p": 0}, {"top_p": 1.1}], ids=str)
def test_sampling_refuses_what_means_nothing(how):
    with pytest.raises(ValueError, match=next(iter(how))):
        sample_token(torch.zeros(1, 4), **how)


# ---------------------------------------------------------------------------------------------------------------- errors

@pytest.mark.parametrize("changes, words", [
    ({"model": "longhron"}, ["longhron", "longhorn", "llama"]),
    ({"n_embd": 0}, ["n_embd 0"]), ({"n_layer": -1}, ["n_layer -1"]), ({"vocab_size": 0}, ["vocab_size 0"]),
    ({"d_state": 0}, ["d_state 0"]), ({"d_conv": 0}, ["d_conv 0"]), ({"dt_rank": -1}, ["dt_rank -1"]),
    ({"model": "llama", "n_head": 0}, ["n_head 0"]),
    ({"model": "llama", "n_head": 3}, ["n_embd 32", "n_head 3", "divides 16"]),
    ({"model": "llama", "n_head": 32}, ["n_embd 32", "n_head 32"]),  # one channel a head has no pair to rotate
], ids=str)
def test_impossible_models_are_refused_in_a_line(changes, words):
    with pytest.raises(ValueError) as caught:
        LM(config(**{"family": changes.pop("model", "longhorn"), **changes}))
    line = str(caught.value)
    assert "\n" not in line and all(word in line for word in words), line


def test_the_table_is_printed(capsys):
    model.main()
    head, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 * len(FAMILIES) and "Table 1" in head
    row = next(r for r in rows if r.startswith("longhorn") and "350M" in r)
    assert "369." in row or "370." in row
    parameters, flops, state = 50304 * 1024 + 1024 + longhorn_parameters(24, 16, 1024), 3 * (
        2 * 50304 * 1024 + FLOPS["longhorn"](24, 1024, 1024, 16)), 48 * 2048 * (16 + 3)
    assert ["longhorn", "350M", f"{parameters / 1e6:.1f}M", "369.8M"] == row.split()[:4]
    assert [f"{flops / 1e6:.0f}M", f"{state / 1e6:.2f}M"] == row.split()[-2:]
