"""Whole layers against transformers' own, with the same weights: outputs and every gradient, in float64.

transformers casts to float32 inside these layers; here that is lifted, so that all compute in float64. Its weights are
made from ours by differentiable functions, so the gradients of both are those of our tensors.

    python -m pytest tests/test_layers.py
"""

from unittest import mock

import pytest
import torch
import transformers
from torch.func import functional_call
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.rwkv import modeling_rwkv

import families  # noqa: F401
from initialisation import draw
from model import FAMILIES, NORMS, Layer, ModelConfig, RMSNorm

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = (1, 3, 64, 130)


class Wide:
    """Stands in for the module torch, with float64 in place of float32."""

    float32 = float = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.fixture(autouse=True)
def without_casts():
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        modules = (modeling_kimi_linear, modeling_mamba2, modeling_qwen3_next, modeling_rwkv)
        patches = [mock.patch.object(module, "torch", Wide()) for module in modules]
        for patch in patches:
            patch.start()
        yield
        for patch in patches:
            patch.stop()


def layer_of(family, **sizes):
    torch.manual_seed(0)
    config = ModelConfig(model=family, n_layer=4, mlp_multiple=8, **sizes)
    layer = Layer(config, FAMILIES[family], 1, NORMS.get(family, RMSNorm))
    draw(layer, torch.tensor(0))
    for p in layer.parameters():  # away from ones and zeros, so that one that is forgotten shows
        torch.nn.init.normal_(p, std=p.shape[1] ** -0.5) if p.dim() > 1 else p.data.uniform_(0.2, 1.0)
    return config, layer.double().eval()


def agree(ours, theirs, weights, d, tolerance, unused=()):
    """ours(x) and theirs(x), a module given `weights(ours)`: {name: tensor}. unused: our parameters that it lacks."""
    theirs = theirs.double().eval()
    names = [n for n, _ in ours.named_parameters() if n not in unused]
    assert weights(ours).keys() == dict(theirs.named_parameters()).keys()
    for T in LENGTHS:
        x = torch.randn(2, T, d, dtype=torch.float64, requires_grad=True)
        leaves = [x, *map(ours.get_parameter, names)]
        outs = []
        for y in (ours(x), functional_call(theirs, weights(ours), (x,))):
            outs.append(y[0] if isinstance(y, tuple) else y)
        dy = torch.randn_like(x)
        got, want = ((y.detach(), *torch.autograd.grad(y, leaves, dy, allow_unused=T == 1)) for y in outs)
        largest = max(a.norm() for a in want if a is not None)
        for name, a, b in zip(["output", "x", *names], got, want, strict=True):
            assert (a is None) == (b is None), (T, name)
            if b is not None:
                assert (a - b).norm() <= tolerance * (b.norm() + 1e-3 * largest), (T, name)


@pytest.mark.parametrize("d, H, W", [(32, 2, 4), (48, 3, 2), (16, 1, 3)])
def test_gated_deltanet_is_qwen3_nexts(d, H, W):
    _, layer = layer_of("gated_deltanet", n_embd=d, n_head=H, d_conv=W)
    ours = layer.branches[0].mixer
    n = d // H // 2
    theirs = modeling_qwen3_next.Qwen3NextGatedDeltaNet(transformers.Qwen3NextConfig(
        hidden_size=d, num_hidden_layers=1, linear_num_value_heads=H, linear_num_key_heads=H, linear_key_head_dim=n,
        linear_value_head_dim=2 * n, linear_conv_kernel_dim=W, rms_norm_eps=1e-5, hidden_act="silu",
        layer_types=["linear_attention"]), 0)

    def weights(m):
        by_head = lambda *maps: torch.cat([a.unflatten(0, (H, -1)) for a in maps], 1).flatten(0, 1)
        q, k, v = m.qkv.weight.split([H * n, H * n, d])
        return {"in_proj_qkvz.weight": by_head(q, k, v, m.gate.weight), "dt_bias": m.dt_bias, "A_log": m.A_log,
                "in_proj_ba.weight": by_head(m.beta.weight, m.forget.weight), "conv1d.weight": m.conv_weight[:, None],
                "norm.weight": m.norm_weight, "out_proj.weight": m.out_proj.weight}

    agree(ours, theirs, weights, d, 1e-12)


@pytest.mark.parametrize("d, H, W", [(32, 2, 4), (48, 3, 2), (16, 1, 3)])
def test_kda_is_kimi_linears(d, H, W):
    """Its output gate has no bias, as in the paper; ours, as in flash-linear-attention, starts at 0."""
    _, layer = layer_of("kda", n_embd=d, n_head=H, d_conv=W)
    ours = layer.branches[0].mixer
    torch.nn.init.zeros_(ours.gate2.bias)
    theirs = modeling_kimi_linear.KimiLinearDeltaAttention(transformers.KimiLinearConfig(
        hidden_size=d, num_hidden_layers=1, linear_num_heads=H, linear_head_dim=d // H, linear_conv_kernel_dim=W,
        rms_norm_eps=1e-5, hidden_act="silu", layer_types=["linear_attention"]), 0)

    def weights(m):
        q, k, v = m.qkv.weight.chunk(3)
        return {"q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v, "conv1d.weight": m.conv_weight[:, None],
                "forget_gate.f_a_proj.weight": m.forget1.weight, "forget_gate.f_b_proj.weight": m.forget2.weight,
                "forget_gate.dt_bias": m.dt_bias, "forget_gate.A_log": m.A_log[None, None, :, None],
                "b_proj.weight": m.beta.weight, "g_a_proj.weight": m.gate1.weight, "g_b_proj.weight": m.gate2.weight,
                "o_norm.weight": m.norm_weight, "o_proj.weight": m.out_proj.weight}

    agree(ours, theirs, weights, d, 1e-12, unused=("gate2.bias",))


@pytest.mark.parametrize("d, H, N, W", [(32, 2, 2, 4), (48, 3, 1, 2), (16, 1, 1, 3)])
def test_mamba2_is_transformers_mamba2_mixer(d, H, N, W):
    _, layer = layer_of("mamba2", n_embd=d, n_head=H, d_state=N, d_conv=W)
    theirs = modeling_mamba2.Mamba2Mixer(transformers.Mamba2Config(
        hidden_size=d, num_heads=2 * H, head_dim=d // H, state_size=8 * N, n_groups=1, num_hidden_layers=1, expand=2,
        conv_kernel=W, chunk_size=32), 0)
    weights = lambda m: {
        "in_proj.weight": m.in_proj.weight, "conv1d.weight": m.conv_weight[:, None], "conv1d.bias": m.conv_bias,
        "dt_bias": m.dt_bias, "A_log": m.A_log, "D": m.skip, "norm.weight": m.norm_weight,
        "out_proj.weight": m.out_proj.weight}
    agree(layer.branches[0].mixer, theirs, weights, d, 1e-12)


@pytest.mark.parametrize("d", [32, 48])
def test_rwkv4_is_transformers_block(d):
    _, layer = layer_of("rwkv4", n_embd=d, n_head=1)
    theirs = modeling_rwkv.RwkvBlock(transformers.RwkvConfig(
        hidden_size=d, attention_hidden_size=d, intermediate_size=layer.branches[1].mixer.key.out_features,
        num_hidden_layers=2, layer_norm_epsilon=1e-5, context_length=200), 1)

    def weights(layer):
        (ln1, time), (ln2, channel) = ((b.norm, b.mixer) for b in layer.branches)
        now = lambda mu: (1 - mu)[None, None]  # theirs weighs the present, ours the past
        r, k, v = map(now, time.mu)
        r2, k2 = map(now, channel.mu)
        maps = {f"attention.{n}.weight": getattr(time, n).weight for n in ("receptance", "key", "value", "output")}
        maps |= {f"feed_forward.{n}.weight": getattr(channel, n).weight for n in ("receptance", "key", "value")}
        return {"ln1.weight": ln1.weight, "ln1.bias": ln1.bias, "ln2.weight": ln2.weight, "ln2.bias": ln2.bias, **maps,
                "attention.time_decay": time.decay, "attention.time_first": time.bonus,
                "attention.time_mix_receptance": r, "attention.time_mix_key": k, "attention.time_mix_value": v,
                "feed_forward.time_mix_receptance": r2, "feed_forward.time_mix_key": k2}

    agree(layer, theirs, weights, d, 1e-12)
