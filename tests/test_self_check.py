"""What you read is what runs: functions, methods and kernels are replaced as an edit would change them.

    python -m pytest tests/test_self_check.py

An edit either changes the training loss and agrees with the state path, or the start stops with one line that names
both places.
"""

import contextlib
import ctypes
import dataclasses
import functools
import math
import os
import pkgutil
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import arguments, succeed
from operators import source_text, with_mistake
from torch.utils._python_dispatch import TorchDispatchMode

import families  # noqa: F401
import kernels.scan
import model
from common.errors import ConfigError
from inspection.self_check import OTHER_ORDER, self_check
from kernels import build, fused, linear_attention, ops
from kernels import linear_attention as la
from kernels.cache import ROOMS
from kernels.scan import selective_scan
from model import FAMILIES, LM, ModelConfig

pytestmark = pytest.mark.usefixtures("one_thread")


class Cumulative(nn.Module):
    """The least that a mixer can be."""

    def __init__(self, config, layer):
        super().__init__()
        self.linear = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        return self.linear(x.cumsum(1))


def parallel_branches(self, h, state=None):
    outs = [branch(h, s) for branch, s in zip(self.branches, state or [None] * len(self.branches), strict=True)]
    return h + sum(y for y, _ in outs), [s for _, s in outs]


def functional(**changed):
    """torch.nn.functional with other functions in it, for one module."""
    return lambda _: SimpleNamespace(**{**vars(F), **changed})


def cap(h, weight):
    return 15 * torch.tanh(F.linear(h, weight) / 15)


def loss_of(logits, smoothing=0.0):
    """A linear_cross_entropy of the logits that `logits` makes."""
    return lambda f: lambda h, weight, targets, **kw: F.cross_entropy(
        logits(h, weight).flatten(0, 1), targets.flatten(), label_smoothing=smoothing, **kw)


def scan_of(change):
    """longhorn_scan of other arguments: change(x, dt, k, q, D, z) gives them."""
    return {"model.longhorn_scan": lambda f: lambda *args, **kw: f(*change(*args[:6]), *args[6:], **kw)}


# Of the kernels: the place in longhorn_scan.cu, and what is written there.
KERNELS = {"half the step size": ("step", "if (BROKEN) { Step<V> s = longhorn_step(x, dt, bias, kk); "
                                  "s.size = 0.5f * s.size; return s; }"),
           "twice the gradient of the step size": ("step gradients", "if (BROKEN) de = 2.0f * de;")}

# An edit is {the name of a function, method or class: what makes its replacement of it}. "native": of KERNELS.
normed = lambda f: lambda x, *rest, **kw: f(F.rms_norm(x, x.shape[-1:]), *rest, **kw)
half = lambda f: lambda *args, **kw: 0.5 * f(*args, **kw)
K_HALVED = scan_of(lambda x, dt, k, *rest: (x, dt, k / 2, *rest))
CAP = {"model.F": functional(linear=cap)}
SMOOTH = {"model.cross_entropy": lambda f: lambda logits, targets: F.cross_entropy(
    logits.flatten(0, 1), targets.flatten(), ignore_index=-1, label_smoothing=0.1)}
HALF = {"kernels.scan._step_size": half}
HYBRID = "longhorn*2,llama"
TRAINS = {  # what is edited: (family, edits); the loss changes, and sampling follows
    "keys and queries normalised": ("longhorn", {"model.Longhorn.scan": lambda f: lambda self, x, dt, k, q, *rest: f(
        self, x, dt, F.normalize(k, dim=-1), F.normalize(q, dim=-1), *rest)}),
    "no gate and no D": ("longhorn", scan_of(lambda x, dt, k, q, D, z: (x, dt, k, q, None, None))),
    "k / 2": ("longhorn", K_HALVED),
    "a hybrid's mixer": (HYBRID, K_HALVED),
    "x normed before the convolution": ("longhorn", {"model.causal_conv1d": normed, "model.conv_state": normed}),
    "gelu behind the convolution": (
        "longhorn", {"model.causal_conv1d": lambda f: lambda *args, **kw: F.gelu(f(*args, silu=False, **kw))}),
    "half the output": ("mamba", {"model.ScanBlock.forward": lambda f: lambda self, u, state=None: (
        lambda y, after: (0.5 * y, after))(*f(self, u, state))}),
    "A times 2": ("mamba", {"model.selective_scan": lambda f: lambda u, delta, A, *rest, **kw: f(
        u, delta, 2 * A, *rest, **kw)}),
    "label smoothing in both": ("llama", {**SMOOTH, "model.linear_cross_entropy": loss_of(F.linear, 0.1)}),
    "a cap in both": ("llama", {**CAP, "model.linear_cross_entropy": loss_of(cap)}),
    "another eps of the norms": (
        "llama", {"model.rms_norm": lambda f: lambda x, weight, eps, backend: f(x, weight, 1e-6, backend)}),
    "parallel branches": ("llama", {"model.Layer.forward": lambda f: parallel_branches}),
    "decay of GLA": ("gla", {"model.gated_linear_attention": lambda f: lambda q, k, v, g, *rest, **kw: f(
        q, k, v, 2 * g, *rest, **kw)}),
    "half the step size in kernel and loop": ("longhorn", {**HALF, "native": ("half the step size",
                                                                             "twice the gradient of the step size")}),
}
SCANS = ("longhorn_scan.cu: Longhorn", "kernels/scan.py: _longhorn_step")
LOSSES = ("model.py: LM.forward", "kernels/ops.py: _LinearCrossEntropy")
STATE = ("over the whole sequence", "through the state")
BLOCK = ("model.py: ScanBlock.forward", *STATE)
STOPS = {  # what is edited: (family, edits, places that the line names)
    "label smoothing of the logits' loss": ("llama", SMOOTH, LOSSES),
    "a cap of the logits": ("longhorn", CAP, LOSSES),
    "half the step size in the loop": ("longhorn", HALF, SCANS),
    "no number in the loop": ("longhorn", {"kernels.scan._step_size": lambda f: lambda *args, **kw: math.nan * f(
        *args, **kw)}, SCANS),
    "half the step size in the kernel's forward": ("longhorn", {"native": ("half the step size",)}, SCANS),
    "half the step size in loop and kernel, the kernel's backward left": (
        "longhorn", {**HALF, "native": ("half the step size",)}, SCANS),
    # nothing differs at the values that parameters start with
    "dt_bias in the loop": ("longhorn", {"kernels.scan._loop": lambda f: lambda *args: f(
        *args[:8], args[8] - args[8].detach(), args[9])}, SCANS),
    "the state between pieces of the loop, where no kernel runs": (
        "longhorn", {"kernels.choose.unavailable": lambda f: lambda device: "no compiler", "kernels.ops.in_pieces":
                     lambda f: lambda loop, timed, state: f(lambda *args: loop(*args[:-1], None), timed, state)},
        ("LM.forward with --backend=(empty)", "--backend=torch")),
    "gelu in the plain convolution": (
        "mamba", {"kernels.ops._conv_torch": lambda f: lambda *args: F.gelu(f(*args[:-1], False))},
        ("kernels/conv_norm.cu: conv_forward", "kernels/ops.py: _conv_torch")),
    "eps of the plain RMSNorm": (
        "llama", {"kernels.ops.F": functional(rms_norm=lambda x, shape, w, eps: F.rms_norm(x, shape, w, 1e-6))},
        ("kernels/conv_norm.cu: norm_forward_rows", "kernels/ops.py: rms_norm")),
    "decay of GLA's chunks": (
        "gla", {"kernels.linear_attention._gla": lambda f: lambda q, k, v, g, state: f(q, k, v, 2 * g, state)},
        ("linear_attention.py: _gla", "linear_attention.py: gated_linear_attention_ref")),
    "a little of beta in DeltaNet's chunks": (
        "deltanet",
        {"kernels.linear_attention._delta_rule": lambda f: lambda q, k, v, b, *rest: f(q, k, v, 0.997 * b, *rest)},
        ("linear_attention.py: _delta_rule", "linear_attention.py: delta_rule_ref")),
    "x normed for the convolution, not for its state": ("longhorn", {"model.causal_conv1d": normed}, BLOCK),
    "an operator of a hybrid's second family": (
        HYBRID, {"kernels.ops._softmax_attention": half}, ("ops.py: attention", "ops.py: _softmax_attention")),
    "the keys of a window": ("swa", {"kernels.ops._windowed": lambda f: lambda q, k, v, window, i: f(
        q, k, v, window - 1, i)}, ("ops.py: attention", "ops.py: _softmax_attention")),
    "the gradient through a state": ("longhorn", {"model.longhorn_scan": lambda f: lambda *args, **kw: f(
        *args[:7], None if args[7] is None else args[7].detach(), **kw)}, BLOCK),
    "with a state only": ("mamba", {"model.Mamba.scan": lambda f: lambda self, x, dt, k, q, z, h0: f(
        self, x, dt, k, q, z if h0 is None else 0.9 * z, h0)}, BLOCK),
    "in single steps only": ("gla", {"model.gated_linear_attention": lambda f: lambda q, k, *rest, **kw: f(
        q, k * (2 if k.shape[1] == 1 else 1), *rest, **kw)}, ("model.py: GLA.forward", *STATE)),
    "positions begin again": ("llama", {"model.rotary_tables": lambda f: lambda first, last, *rest, **kw: f(
        0, last - first, *rest, **kw)}, ("model.py: Attention.forward", *STATE)),
    "a cache that grows in place": ("llama", {"model.append_to_cache": lambda f: lambda cache, k, v: f(
        cache, k, v if torch.is_grad_enabled() else v / 2)}, ("model.py: Attention.forward", *STATE)),
    "the token before": ("rwkv", {"mixers.token_shift": lambda f: lambda x, last: f(x, None)},
                         ("mixers.py: RWKVTimeMix.forward", "mixers.py: RWKVChannelMix.forward", *STATE)),
}


def read(lm):
    """(losses of two steps of training, how far reading token by token is from reading all at once)."""
    idx = torch.randint(64, (2, 41), generator=torch.Generator().manual_seed(1))
    x, y = idx[:, :-1], idx[:, 1:]
    losses = [lm(x, y, loss_only=True)[1]]
    with torch.no_grad():
        trained = [p for p in lm.parameters() if p.requires_grad]
        for p, grad in zip(trained, torch.autograd.grad(losses[0], trained, allow_unused=True), strict=True):
            p -= 0 if grad is None else grad
        losses.append(lm(x, y, loss_only=True)[1])
        if not all(branch.has_state for _, branch in lm.branches()):
            return torch.stack(losses).tolist(), None
        x, y, state, parts = x[:1], y[:1], lm.initial_state(1), []  # one row: documents of others end elsewhere
        for t in range(40):
            logits, _, state = lm(x[:, t:t + 1], y[:, t:t + 1], state=state)
            parts.append(logits)
        whole = lm(x)[0]
        return torch.stack(losses).tolist(), ((torch.cat(parts, 1) - whole).norm() / whole.norm()).item()


@pytest.fixture(scope="module")
def broken(builds):
    """broken(*names): the CPU library with these edits of KERNELS switched on."""
    text = source_text()
    for i, (place, edit) in enumerate(KERNELS.values()):
        text = with_mistake(text, place, edit.replace("BROKEN", f"(broken >> {i} & 1)"))
    builds.mkdir(exist_ok=True)
    source = builds / f"broken.{os.getpid()}.cu"
    source.write_text('extern "C" { int broken = 0; }\n' + text)
    with mock.patch.object(build, "_flags", lambda openmp, f=build._flags: [*f(openmp), "-O1"]):  # half of -O3's time
        lib = build.load(build.build([source, build.CONV], builds)[0])
    switch = ctypes.c_int.in_dll(lib, "broken")

    def broken(*names):
        switch.value = sum(1 << list(KERNELS).index(name) for name in names)
        return lib
    return broken


def model_of(pattern, backend, **settings):
    torch.manual_seed(0)
    sizes = {"n_layer": 4 if "," in pattern else 2, "n_head": 2, "n_embd": 32, "block_size": 40, "vocab_size": 64,
             "mlp_multiple": 16, "end_of_text": 0}
    return model.LM(ModelConfig(pattern=pattern, backend=backend, **sizes | settings))


@functools.cache
def unedited_losses(pattern, backend=""):
    return read(model_of(pattern, backend))[0]


@pytest.fixture
def probe(request):
    """probe(edits, pattern): what the self-check says of a model with these edits; what `read` gives, if it starts."""
    def probe(edits, pattern, backend="", **settings):
        with contextlib.ExitStack() as edited:
            for target, change in edits.items():
                if target == "native":
                    library = request.getfixturevalue("broken")(*change)
                    edited.enter_context(mock.patch.object(build, "library", lambda library=library: library))
                    continue
                original = pkgutil.resolve_name(target)
                replacement = change(original)
                if callable(original) and not isinstance(replacement, staticmethod):
                    functools.update_wrapper(replacement, original)  # it stands where the original stood
                edited.enter_context(mock.patch(target, replacement))
            lm = model_of(pattern, backend, **settings)
            try:
                line, stopped = self_check(lm), False
            except ConfigError as error:
                line, stopped = str(error), True
            return SimpleNamespace(line=line, stopped=stopped, read=None if stopped else read(lm))

    return probe


@pytest.mark.parametrize("edit", TRAINS)
def test_an_edit_of_what_is_read_trains_and_samples(edit, probe):
    family, edits = TRAINS[edit]
    answer = probe(edits, family)
    assert not answer.stopped, answer.line
    losses, apart = answer.read
    assert all(a != b for a, b in zip(losses, unedited_losses(family), strict=True)), "another model trained"
    assert apart < 1e-4


@pytest.mark.parametrize("edit", STOPS)
def test_an_edit_of_one_of_two_bodies_stops_in_a_line_with_both(edit, probe):
    family, edits, places = STOPS[edit]
    answer = probe(edits, family)
    assert answer.stopped, answer.line
    assert answer.line.startswith("self-check: ") and "\n" not in answer.line and "edit both" in answer.line
    assert all(place in answer.line for place in places), answer.line


def test_with_plain_pytorch_an_edited_loop_trains(probe):
    """--backend=torch is the mode for editing an operator: no native kernel is asked about it."""
    answer = probe(HALF, "longhorn", "torch")
    assert not answer.stopped and answer.read[0] != unedited_losses("longhorn", "torch") and answer.read[1] < 1e-4


def test_a_mixer_with_only_forward_trains(probe, monkeypatch):
    monkeypatch.setitem(model.FAMILIES, "cumulative", [Cumulative])
    answer = probe({}, "cumulative")
    assert not answer.stopped and "; state left out: Cumulative keeps none" in answer.line
    assert answer.read[0][1] < answer.read[0][0]


@pytest.mark.parametrize("pattern,backend", [*((family, "") for family in FAMILIES), (HYBRID, ""),
                                             ("rwkv4,gla,mamba", "cpu"), ("rwkv4,gla,mamba", "torch")])
def test_unedited_all_agrees(pattern, backend):
    torch.manual_seed(0)
    lm = LM(ModelConfig(pattern=pattern, n_layer=3, n_head=4, n_embd=64, vocab_size=96, backend=backend))
    weights, random = [p.clone() for p in lm.parameters()], torch.get_rng_state()
    torch.set_float32_matmul_precision("high")
    line, precision = self_check(lm), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    assert line.startswith("self-check: ") and "\n" not in line
    assert "training and eval mode, whole sequences and states agree to " in line
    assert ("plain operators" in line) == (backend != "torch")
    assert float(line.split("agree to ")[1].split()[0]) <= OTHER_ORDER and " is usual)" in line
    assert all(torch.equal(p, q) for p, q in zip(lm.parameters(), weights, strict=True))
    assert torch.equal(torch.get_rng_state(), random) and lm.training and precision == "high"


def test_a_model_that_cannot_be_made_small_says_what_to_do(monkeypatch):
    lm = LM(ModelConfig(n_layer=1, n_embd=32, vocab_size=64))
    monkeypatch.setattr("inspection.toys.toy_of", lambda model, backend, **sizes: LM(ModelConfig(n_head=0)))
    with pytest.raises(ConfigError, match=r"^self-check: a small version [^\n]*n_head 0[^\n]*\(model.py, line [^\n]*"
                                          r"toy\(self, backend\)[^\n]*--self_check=off[^\n]*$"):
        self_check(lm)


# -------------------------------------------------------------------------- what only some layers, chunks or modes run

def in_training(**replaced):
    """A model.LM.forward that finds these names of model.py replaced, in training mode only."""
    def change(f):
        def forward(self, *args, **kwargs):
            with mock.patch.multiple(model, **replaced) if self.training else contextlib.nullcontext():
                return f(self, *args, **kwargs)
        return forward
    return {"model.LM.forward": change}


def z_loss(weight):
    return lambda logits, targets: weight * logits.logsumexp(-1).square().mean() + F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def in_layer_1(change):
    """GLA.forward, changed where it was built as layer 1."""
    def build(f):
        def __init__(self, config, layer):
            f(self, config, layer)
            self.layer = layer
        return __init__
    return {"model.GLA.__init__": build, "model.GLA.forward": lambda f: lambda self, x, state=None: (
        change if self.layer == 1 else f)(*([f] if self.layer == 1 else []), self, x, state)}


def scaled_gradient(f):
    """The gradient of the keys in the fourth chunk of GLA."""
    def gla(q, k, v, g, state):
        C = linear_attention.GLA_CHUNK
        part = k[:, 3 * C:4 * C]
        return f(q, torch.cat([k[:, :3 * C], 0.25 * part + 0.75 * part.detach(), k[:, 4 * C:]], 1), v, g, state)
    return gla


def after_the_first_rows(f):
    """The loss in slices is wrong as soon as there is a second one."""
    @functools.wraps(f)
    def forward(ctx, x, weight, *rest):
        return f(ctx, x, weight, *rest) * (1.4 if len(x) > ops.LOGITS_AT_ONCE["cpu"] // len(weight) else 1)
    return staticmethod(forward)


def shifted(f):
    return lambda self, x, state=None: f(self, x + 0.5 * F.pad(x, (0, 0, 1, 0))[:, :-1], state)


class Future(Cumulative):
    """A mixer that sees later tokens."""

    def forward(self, x):
        return self.linear(x.flip(1).cumsum(1).flip(1))


def forgets(f):
    """A cache that outgrows its room loses the values that it had."""
    def append(cache, k, v):
        past, room = cache[0].shape[2], ROOMS.get(cache[0])
        full = past and (room is None or past + k.shape[2] > room[0].shape[2])
        return f((cache[0], 0 * cache[1]) if full and not torch.is_grad_enabled() else cache, k, v)
    return append


halved = lambda y: (0.5 * y[0], *y[1:])
GLA_STATE = ("model.py: GLA.forward (GLA)", *STATE)
ONCE = ("deterministic", "--self_check=off")
REACHED = {  # what is edited: (family, edits, what the line has, settings)
    "smoothing in training": ("llama", in_training(cross_entropy=SMOOTH["model.cross_entropy"](None)), LOSSES, {}),
    "a z-loss in training": ("llama", in_training(cross_entropy=z_loss(1e-4)), LOSSES, {}),
    "a small z-loss": ("longhorn,mamba,llama,gla", {"model.cross_entropy": lambda f: z_loss(1e-5)}, LOSSES, {}),
    "the state path of layer 1": ("gla", in_layer_1(lambda f, self, x, state: f(self, x if state is None else 0.9 * x,
                                                                               state)), GLA_STATE, {}),
    "later rows of the loss in slices": ("llama", {"kernels.ops._LinearCrossEntropy.forward": after_the_first_rows},
                                         LOSSES, {}),
    "the fourth chunk": ("gla", {"kernels.linear_attention._gla": scaled_gradient},
                         ("linear_attention.py: _gla", "gated_linear_attention_ref"), {}),
    "a mask of documents": ("retnet", {"kernels.linear_attention._of_documents": lambda f: lambda v, state: (
        (same, old, new, None) for same, old, new, kept in f(v, state))},
                            ("linear_attention.py: _retention", "retention_ref"), {"documents": "pack"}),
    "a shift across documents": ("gla", {"model.GLA.forward": shifted},
                                 ("model.py: GLA.forward (GLA) over packed documents", "--documents=join"),
                                 {"documents": "pack"}),
    "the last position only": ("gla", {"model.LM.forward": lambda f: lambda self, *args, last_only=False, **kw: (
        halved if last_only else tuple)(f(self, *args, last_only=last_only, **kw))},
                               ("model.py: LM.forward with and without last_only",), {}),
    "logits without a loss": ("gla", {"model.LM.forward": lambda f: lambda self, idx, targets=None, *args, **kw: (
        halved if targets is None else tuple)(f(self, idx, targets, *args, **kw))},
                              ("model.py: LM.forward with and without targets",), {}),
    "without gradients": ("gla", {"model.GLA.forward": lambda f: lambda self, x, state=None: f(
        self, x if torch.is_grad_enabled() else 0.9 * x, state)},
                          ("model.py: GLA.forward (GLA) with gradients and under torch.no_grad",), {}),
    "the loss in slices without gradients": (
        "llama", {"kernels.ops._LinearCrossEntropy.forward": lambda f: staticmethod(functools.wraps(f)(
            lambda ctx, *args: f(ctx, *args) * (1 if args[-1] else 1.01)))},
        ("ops.py: _LinearCrossEntropy", "with gradients and under"), {}),
    "a cache that grows": ("llama", {"model.append_to_cache": forgets}, ("model.py: Attention.forward", *STATE), {}),
    "the gradient of a convolution's state": (
        "mamba", {"kernels.ops._conv_op": lambda f: lambda x, weight, bias, state, *rest: f(
            x, weight, bias, state if state is None else (state + state.detach()) / 2, *rest)},
        ("kernels/conv_norm.cu: conv_forward and kernels/ops.py: _conv_torch (causal_conv1d)", *STATE), {}),
    "a norm in training": ("gla", {"model.RMSNorm.forward": lambda f: lambda self, x: f(
        self, x) * (1.02 if self.training else 1)}, ("self-check: model.py: RMSNorm.forward in training and in",), {}),
    "a branch in training": ("gla", {"model.Branch.forward": lambda f: lambda self, h, state=None: (
        halved if self.training else tuple)(f(self, h, state))}, ("self-check: model.py: Branch.forward in training",),
                             {}),
    "packed documents through the state": ("gla", {"model.emptied": lambda f: lambda state, empty, rows: state},
                                           ("model.py: LM.through_documents", *STATE), {"documents": "pack"}),
    "documents longer than a chunk": ("mamba", {"kernels.scan._scan_op": lambda f: lambda x, *rest: f(
        -x if rest[8] is not None and rest[8].diff().max() > 32 else x, *rest)},
                                      ("longhorn_scan.cu: Mamba", "kernels/scan.py: _mamba"), {"documents": "pack"}),
    "a kernel's helper": ("mamba", {"kernels.ops._conv_anew": lambda f: lambda y, *rest: 1.1 * f(y, *rest)},
                          ("conv_norm.cu: conv_forward, kernels/ops.py:", "_conv_anew"), {"documents": "pack"}),
    "token 0 ignored": ("gla", {"model.cross_entropy": lambda f: lambda logits, targets: F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=0)}, LOSSES, {"n_layer": 4}),
    "no numbers in the gradient": ("gla", {"model.GLA.forward": lambda f: lambda self, x, state=None: f(
        self, x + (0 * x).sqrt(), state)}, ("its gradient has no numbers: see model.py: GLA.forward (GLA)",), {}),
    "evaluation only": ("gla", {"model.GLA.forward": lambda f: lambda self, x, state=None: f(
        self, x if self.training else 0.9 * x, state)}, ("model.py: GLA.forward (GLA) in training and in eval",), {}),
    "one operator in training": ("gla", {"model.GLA.forward": lambda f: lambda self, x, state=None: (
        halved if self.training and self.backend != "torch" else tuple)(f(self, x, state))},
                                 ("model.py: GLA.forward (GLA) with --backend=(empty)",), {}),
    "the plain loss": ("llama", {"kernels.ops.cross_entropy": lambda f: lambda *args: 1.1 * f(*args)},
                       ("ops.py: linear_cross_entropy", "ops.py: _LinearCrossEntropy"), {}),
    "the exact form's loop": ("longhorn_exact", {"kernels.scan.STEPS": lambda steps: {**steps, "exact": lambda *args: (
        1.01 * steps["exact"](*args))}}, ("longhorn_scan.cu: Exact,", "_exact_step"), {}),
    "no numbers from the kernel": ("llama", {"kernels.ops._rms_norm_op": lambda f: lambda *args: tuple(
        a * math.nan for a in f(*args))}, ("norm_forward_rows", "_norm_args", "kernels/ops.py: rms_norm ("), {}),
    "the plain loop's own part": ("mamba", {"kernels.scan._loop": lambda f: lambda update, x, *rest: f(
        update, 0.9 * x, *rest)}, ("longhorn_scan.cu: Mamba", "_mamba_step", "_loop"), {}),
    # neither names a place that was not edited
    "a cap of the logits": ("longhorn", CAP, ("--loss_from_logits=true",), {}),
    "dropout that never ends": ("llama", {"model.SwiGLU.forward": lambda f: lambda self, x, state=None: (
        F.dropout(f(self, x, state)[0], 0.1), state)}, (*ONCE, "in eval mode"), {}),
    "noise": ("gla", {"model.GLA.forward": lambda f: lambda self, x, state=None: f(
        self, x + 0.1 * torch.randn_like(x), state)}, (*ONCE, "in eval mode"), {}),
    "a counter": ("gla", {"model.GLA.forward": lambda f: lambda self, x, state=None: (
        setattr(self, "calls", getattr(self, "calls", 0) + 1), f(self, x * self.calls, state))[1]}, ONCE, {}),
    "no numbers": ("llama,gla", {"model.GLA.forward": lambda f: lambda self, x, state=None: f(
        self, x * math.inf, state)}, ("is nan", "first behind layers.1.branches.0 (model.py: GLA.forward (GLA))"),
                   {"n_layer": 2}),
}


@pytest.mark.parametrize("edit", REACHED)
def test_what_is_reached_stops_with_the_cause(edit, probe):
    family, edits, words, settings = REACHED[edit]
    answer = probe(edits, family, **settings)
    assert answer.stopped, answer.line
    assert answer.line.startswith("self-check: ") and "\n" not in answer.line
    assert all(w in answer.line for w in words), answer.line
    assert "_longhorn_step" not in answer.line


def test_noise_in_training_hides_nothing(probe):
    """It draws other numbers in float64, which the tolerance must not take for rounding."""
    noise = in_training(F=SimpleNamespace(**{**vars(F), "silu": lambda x: F.dropout(F.silu(x), 0.2)}))
    assert not probe(noise, "gla").stopped
    answer = probe(noise | {"kernels.linear_attention._gla": lambda f: lambda q, k, v, g, state: f(
        q, k, v, 1.01 * g, state)}, "gla")
    assert answer.stopped and "linear_attention.py: _gla" in answer.line, answer.line


def test_a_failure_says_tensor_disagreement_and_tolerance(probe):
    line = probe(*reversed(STOPS["decay of GLA's chunks"][:2])).line
    error, usual, allowed = map(float, re.search(r"disagree by (\S+) in the gradient of layers\.[01]\.\S+ "
                                                 r"\((\S+) is usual, (\S+) allowed\)", line).groups())
    assert usual < 1e-5 and allowed == 2e-4 < error


def test_a_mixer_that_sees_later_tokens_is_named(probe, monkeypatch):
    monkeypatch.setitem(model.FAMILIES, "future", [Future])
    answer = probe({}, "future")
    assert answer.stopped and "Future.forward (Future) sees later tokens" in answer.line


def test_a_cap_trains_with_the_loss_from_logits(probe):
    settings = {"loss_from_logits": True}
    capped, plain = (probe(edits, "llama", **settings) for edits in (CAP, {}))
    assert not capped.stopped and capped.read[0] != plain.read[0] and capped.read[1] < 1e-4
    assert plain.read[0] == pytest.approx(unedited_losses("llama"), rel=1e-5)


# ---------------------------------------------------------------------------------------------------- no false alarms

class Noisy(Cumulative):
    """With a random buffer that is not saved, and a random number that is not even a buffer."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.register_buffer("mask", torch.rand(config.n_embd), persistent=False)
        self.factor = torch.rand(1).item()

    def forward(self, x):
        return self.linear(x.cumsum(1) * self.mask * self.factor)


class WideHeads(model.GLA):
    """Heads of 24 channels, whatever the configuration says."""

    def __init__(self, config, layer):
        assert config.n_embd % 48 == 0, "two heads of 24 channels"
        super().__init__(dataclasses.replace(config, n_head=config.n_embd // 24), layer)


def ahead(f):
    """Predicts the token after the next one too, in training."""
    def forward(self, idx, targets=None, *args, **kwargs):
        logits, loss, *rest = f(self, idx, targets, *args, **kwargs)
        if self.training and targets is not None:
            h = self.layers[1](self.embed(idx))[0]
            loss = loss + 0.3 * F.cross_entropy(F.linear(h[:, :-1], self.embed.weight).flatten(0, 1),
                                                targets[:, 1:].flatten())
        return logits, loss, *rest
    return forward


def gives_more(f):
    """Branches are given a third value."""
    def forward(self, h, state=None):
        after, first = [], h
        for branch, s in zip(self.branches, state or [None] * len(self.branches), strict=True):
            y, s = branch(h, s, first)
            h = h + y
            after.append(s)
        return h, after
    return forward


def freezes(f):
    def __init__(self, config, layer):
        f(self, config, layer)
        self.gate.weight.requires_grad_(False)
    return __init__


def skips(layer):
    return {"model.LM.forward": lambda f: lambda self, idx, *args, **kw: f(
        self, idx + 0 * len(self.layers[layer].branches), *args, **kw)}


def positions(f):
    """Learned positions that begin again at every call."""
    def forward(self, idx, *args, **kwargs):
        table = torch.randn(128, self.embed.weight.shape[1], generator=torch.Generator().manual_seed(0))
        with mock.patch.object(self.embed, "forward", lambda i: F.embedding(i, self.embed.weight) + table[:i.shape[1]]):
            return f(self, idx, *args, **kwargs)
    return forward


@pytest.mark.parametrize("family, edits, settings", [
    ("noisy", {}, {}), ("wide", {}, {"n_embd": 96, "n_head": 4}), ("gla", {"model.LM.forward": ahead}, {}),
    ("gla", skips(1), {"n_layer": 2}), ("gla", skips(5), {"n_layer": 6}),
    ("gla", {"model.GLA.forward": lambda f: lambda self, x, state=None: f(
        self, F.dropout(x, 0.1, self.training), state)}, {}),
    ("gla", {"model.GLA.__init__": freezes}, {}),
    ("longhorn", {"model.Layer.forward": gives_more, "model.Branch.forward": lambda f: lambda self, h, state, first: f(
        self, h + 0.1 * first, state)}, {}),
    ("gla", {"model.cross_entropy": lambda f: lambda logits, targets: F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum")}, {"loss_from_logits": True}),
    ("longhorn", {"model.LM.__init__": lambda f: lambda self, config: (
        check_that(config.n_embd == 96 and config.block_size == 40), f(self, config))[1]}, {"n_embd": 96})],
    ids=["random buffers", "head width", "prediction of two tokens", "layers[1]", "layers[5]", "dropout", "frozen",
         "a third value", "sum of losses", "asserts"])
def test_these_edits_start(family, edits, settings, probe, monkeypatch):
    for name, mixer in (("noisy", Noisy), ("wide", WideHeads)):
        monkeypatch.setitem(model.FAMILIES, name, [mixer])
    answer = probe(edits, family, **settings)
    assert not answer.stopped and "plain operators" in answer.line, answer.line


def check_that(condition):
    assert condition


def test_positions_that_begin_again_are_told_how_to_go_on(probe):
    answer = probe({"model.LM.forward": positions}, "gla")
    assert answer.stopped and "model.py: LM.forward over the whole" in answer.line
    assert "count the tokens in the state" in answer.line


EIGHT = "longhorn,mamba,llama,gla,retnet,rwkv,kda,mamba2"


@pytest.mark.parametrize("pattern, n_layer, d", [(EIGHT, 8, 64), (EIGHT, 8, 256), ("rwkv", 12, 64),
                                                 ("longhorn*2,retnet,swa*3", 12, 64)])
def test_unedited_models_with_packed_documents_start(pattern, n_layer, d, probe):
    """The last two amplify rounding: fast and plain differ by fifty times what is usual."""
    answer = probe({}, pattern, n_layer=n_layer, n_embd=d, documents="pack")
    assert not answer.stopped, answer.line


def test_what_only_a_compiled_layer_computes_stops(monkeypatch):
    lm = LM(ModelConfig(model="llama", n_layer=2, n_embd=16, n_head=2, vocab_size=32, mlp_multiple=8))
    assert "compiled layers and layers as they are" in self_check(lm, compiled=True)
    honest = model.SwiGLU.forward
    monkeypatch.setattr(model.SwiGLU, "forward", lambda self, x, state=None: honest(
        self, x * (1.01 if torch.compiler.is_compiling() else 1.0), state))
    assert "compiled" not in self_check(lm)
    with pytest.raises(ConfigError, match="Layer.forward compiled and as it is disagree by .*--compile=false"):
        self_check(lm, compiled=True)


def test_only_the_check(data, out):
    said = succeed(arguments(data, out, self_check="only")).out
    assert said.splitlines()[-1].startswith("self-check: the loss alone") and "step" not in said and not out.exists()


# -------------------------------------------------------------------------------------------- other libraries' kernels

class TF32(TorchDispatchMode):
    """Matrix products of float32 numbers as a GPU's tensor cores make them: of operands with 11 bits."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.baddbmm):
            args = [(a.view(torch.int32) + 0x1000 & ~0x1fff).view(a.dtype) if a.dtype == torch.float32 else a
                    for a in args]
        return func(*args, **kwargs or {})


def library_bodies():
    """{operator: a stand-in for the library's function}, which computes what it should with TF32's products."""
    def chunks(body):
        def function(q, k, v, scale, initial_state, output_final_state, **rest):
            assert {q.dtype, k.dtype, v.dtype} <= {torch.bfloat16, torch.float16} and scale == 1.0
            return body(q, k, v, initial_state, **rest)
        return function

    def chunk_simple_gla(q, k, v, state, g=None, g_gamma=None):
        return la._gated_retention(q, k, v, g, state) if g_gamma is None else la._retention(q, k, v, g_gamma, None,
                                                                                            state)

    def chunk_mesa_net(q, k, v, g, beta, lamb, h_kk_init, h_kv_init, output_final_state, max_CG_iteration):
        o, (H, U) = la._mesa(q, k, v, beta, g, lamb, None if h_kk_init is None else (h_kk_init, h_kv_init))
        return o, H, U

    def selective_scan_fn(u, delta, A, B, C, D, z, delta_bias, delta_softplus):
        u, delta, B, C, z = (a.transpose(1, 2) for a in (u, delta, B, C, z))
        return selective_scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus).transpose(1, 2)

    def causal_conv1d_fn(x, weight, bias, activation):
        return ops.causal_conv1d(x.transpose(1, 2), weight, bias, silu=bool(activation)).transpose(1, 2)

    def flash_attn_func(q, k, v, causal, window_size=(-1, -1)):
        q, k, v = (a.transpose(1, 2) for a in (q, k, v))
        return ops.attention(q, k, v, None if window_size[0] < 0 else window_size[0] + 1).transpose(1, 2)

    delta = chunks(lambda q, k, v, state, beta, g=None: la._delta_rule(q, k, v, beta, g, state))
    return {"gated_linear_attention": chunks(lambda q, k, v, state, g: la._gla(q, k, v, g, state)),
            "retention": chunks(chunk_simple_gla), **dict.fromkeys(("delta_rule", "gated_delta_rule", "kda"), delta),
            "mesa": chunk_mesa_net, "selective_scan": selective_scan_fn, "causal_conv1d": causal_conv1d_fn,
            "attention": flash_attn_func}


@pytest.fixture
def libraries(monkeypatch):
    """The stand-ins, where this CPU is taken for the GPU that they need; and what was called."""
    bodies, called = library_bodies(), []

    def load(op):
        def function(*args, **kwargs):
            called.append(op)
            with TF32():
                return bodies[op](*args, **kwargs)
        return function, None

    monkeypatch.setattr(fused, "GPU", "cpu")
    monkeypatch.setattr(fused, "load", load)
    monkeypatch.setattr(fused, "call", lambda op, *args, **kwargs: load(op)[0](*args, **kwargs))
    monkeypatch.setattr(build, "say_once", lambda line: None)
    return SimpleNamespace(bodies=bodies, called=called)


BY_LIBRARY = {  # family: (--backend, operators of libraries that train it)
    "gla": ("", {"gated_linear_attention"}), "retnet": ("", {"retention"}), "rwkv": ("", {"retention"}),
    "mamba2": ("", {"retention"}), "deltanet": ("", {"delta_rule"}), "gated_deltanet": ("", {"gated_delta_rule"}),
    "kda": ("", {"kda"}), "mesa": ("", {"mesa"}), "llama": ("fused", {"attention"}), "swa": ("fused", {"attention"}),
    "mamba": ("fused", {"selective_scan", "causal_conv1d"})}


def small_lm(family):
    torch.manual_seed(0)
    return LM(ModelConfig(pattern=family, n_layer=2, n_head=2, n_embd=32, vocab_size=64, mlp_multiple=16,
                          backend=BY_LIBRARY.get(family, ("", None))[0]))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_body_that_trains_is_compared_in_the_dtype_that_it_takes(family, libraries):
    """TF32's products are no edit: every family starts. In float32 nothing that takes 16 bits runs."""
    line, trained = self_check(small_lm(family), torch.bfloat16), set(libraries.called)
    assert trained == BY_LIBRARY.get(family, ("", set()))[1]
    assert float(re.search(r"in bfloat16 to (\S+) times the plain operators' rounding", line)[1]) <= 3
    libraries.called.clear()
    if "attention" not in trained:  # which the user asks for, and cannot have
        assert "bfloat16" not in self_check(small_lm(family))
        assert set(libraries.called) == trained & {"selective_scan", "causal_conv1d"}


@pytest.mark.parametrize("family,op", [(family, op) for family, (_, ops) in BY_LIBRARY.items() for op in sorted(ops)])
def test_a_sign_flipped_in_a_library_stops_in_a_line_that_names_its_function(family, op, libraries):
    body = libraries.bodies[op]

    def flipped(*args, **kwargs):
        kwargs |= {"v": -kwargs["v"]} if "v" in kwargs else {}
        return body(*args, **kwargs) if "v" in kwargs else body(-args[0], *args[1:], **kwargs)

    libraries.bodies[op] = flipped
    with pytest.raises(ConfigError) as stopped:
        self_check(small_lm(family), torch.bfloat16)
    package, module, name, _ = fused.LIBRARIES[op]
    assert re.match(rf"self-check: in bfloat16 {package}'s {module}\.{name} and kernels/\S+ \S+ \({op}\) disagree .*: "
                    "train with --backend=cpu[^\n]*$", str(stopped.value))


@pytest.mark.parametrize("name, change, words", [
    ("F.linear", lambda h, weight: 0.9 * F.linear(h, weight), "LM.forward and kernels/ops.py: cross_entropy"),
    ("GLA.forward", lambda self, x, state=None, f=model.GLA.forward: f(self, x if state is None else -x, state),
     r"GLA.forward \(GLA\) over the whole sequence and through the state")])
def test_what_differs_in_16_bits_alone_stops(name, change, words, monkeypatch):
    f = pkgutil.resolve_name(f"model.{name}")
    changed = lambda *args, **kw: (change if torch.is_autocast_enabled("cpu") else f)(*args, **kw)
    if name == "F.linear":
        monkeypatch.setattr(model, "F", SimpleNamespace(**{**vars(F), "linear": changed}))
    else:
        monkeypatch.setattr(model.GLA, "forward", functools.update_wrapper(
            lambda self, x, state=None: changed(self, x, state), f))
    lm = small_lm("gla")
    assert "agree" in self_check(lm)
    with pytest.raises(ConfigError, match=f"in bfloat16 model.py: {words}"):
        self_check(lm, torch.bfloat16)


def test_a_kernel_that_is_wrong_in_16_bits_alone_stops(monkeypatch):
    scan = kernels.scan._scan_op
    monkeypatch.setattr(kernels.scan, "_scan_op", lambda x, *rest: scan(-x if x.dtype == torch.bfloat16 else x, *rest))
    lm = small_lm("longhorn")
    assert "agree" in self_check(lm)
    with pytest.raises(ConfigError, match="in bfloat16 longhorn_scan.cu: Longhorn and .*edit both"):
        self_check(lm, torch.bfloat16)
