"""What you read is what runs: the tests change lines of functions as an edit would change them.

    python -m pytest tests/test_self_check.py

An edit either changes the training loss and agrees with the state path, or it stops the run with one line that names
the place.
"""

import ctypes
import dataclasses
import functools
import inspect
import os
import pkgutil
import re
import sys
import textwrap
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn as nn
from helpers import arguments, succeed, table
from operators import source_text, with_mistake
from torch.utils._python_dispatch import TorchDispatchMode

import families  # noqa: F401
import kernels.scan
import model
from common.errors import ConfigError
from inspection.self_check import LEAST, OTHER_ORDER, self_check
from kernels import build, fused, ops
from kernels import linear_attention as la
from kernels.compat import selective_scan_fn
from model import FAMILIES, LM, ModelConfig

pytestmark = pytest.mark.usefixtures("one_thread")


def edited(target, old, new):
    """The function with this name, with `new` in place of `old` in its source."""
    original = pkgutil.resolve_name(target)
    source = textwrap.dedent(inspect.getsource(original))
    names = {}
    assert source.count(old) == 1, source
    module = sys.modules[original.__module__]
    exec(compile(source.replace(old, new), module.__file__, "exec"), vars(module), names)
    function = names[original.__name__]
    return function if isinstance(function, staticmethod) else functools.update_wrapper(function, original)


def model_of(pattern, *typed, **settings):
    """A small model of this pattern. `typed` are more settings, as key=value."""
    torch.manual_seed(0)
    sizes = {"n_layer": 4 if "," in pattern else 2, "n_head": 2, "n_embd": 32, "block_size": 40, "vocab_size": 64,
             "mlp_multiple": 16, "end_of_text": 0}
    for pair in typed:
        key, value = pair.split("=")
        settings[key] = int(value) if value.isdecimal() else value
    return LM(ModelConfig(pattern=pattern, **sizes | settings))


@torch.no_grad()
def read(lm):
    """(loss, relative difference between the logits token by token and all at once)."""
    idx = torch.randint(64, (2, 41), generator=torch.Generator().manual_seed(1))
    x = idx[:, :-1]
    y = idx[:, 1:]
    state = lm.initial_state(2)
    parts = []
    for token in x.split(1, 1):
        logits, _, state = lm(token, state=state)
        parts.append(logits)
    whole = lm(x)[0]
    return lm(x, y, loss_only=True)[1].item(), ((torch.cat(parts, 1) - whole).norm() / whole.norm()).item()


@pytest.fixture
def edit(monkeypatch):
    """edit(target, old, new) changes a function until the end of the test."""
    def edit(target, old, new):
        monkeypatch.setattr(target, edited(target, old, new))
    return edit


def stopped(lm, *args, **how):
    with pytest.raises(ConfigError) as stop:
        self_check(lm, *args, **how)
    line = str(stop.value)
    assert line.startswith("self-check: ") and "\n" not in line
    return line


# ------------------------------------------------------------------------------------------------------------- edits

# Edits that change the loss, and sampling with it. Columns: the edit; family, function, old text, new text, settings
TRAINS = table("""
keys  longhorn*2,llama  model.Longhorn.scan  (x, dt, k, q, self.D  (x, dt, k / 2, q, None
decay of GLA  gla  model.GLA.forward  (x))) / 16  (x))) / 8
eps of the norms  llama  model.RMSNorm.forward  self.eps  1e-3
a cap of the logits  llama  model.LM.forward  logits = F.linear(h, head.weight)
    logits = 15 * torch.tanh(F.linear(h, head.weight) / 15)  loss_from_logits=True
the loop alone  longhorn  kernels.scan._step_size  (1 /  (0.5 /  backend=torch
""")
# Edits that change nothing that exists twice; the same columns
STARTS = table("""
dropout  gla  model.GLA.forward  q, k = self.qk(x)  q, k = self.qk(F.dropout(x, 0.1, self.training))
layers[5]  gla  model.LM.forward  check_tokens(idx)  check_tokens(idx); self.layers[5]  n_layer=6
asserts  gla  model.LM.forward  check_tokens(idx)  check_tokens(idx); assert self.config.n_embd == 96  n_embd=96
a term in training  gla  model.LM.forward  loss = cross_entropy(logits, targets)
    loss = cross_entropy(logits, targets) + self.training * logits.logsumexp(-1).square().mean()  loss_from_logits=True
frozen  gla  model.LM.forward  self.norm(h)  self.layers[0].requires_grad_(False) and self.norm(h)
""")
SCAN = "longhorn_scan.cu and kernels/scan.py (longhorn_scan) disagree by"
CONV = "kernels/conv_norm.cu and kernels/ops.py (causal_conv1d) disagree by"
STATE = " over the whole sequence and through the state disagree by"
GLA_STATE = "model.py: GLA.forward (GLA)" + STATE
BESIDE = "model.py: GLA.forward (GLA) beside two different rows disagree by"
AHEAD = "model.py: GLA.forward (GLA) before two different last tokens"
PLAIN_GLA = "model.py: GLA.forward (GLA) with --backend=(empty) and with --backend=torch"
# Edits that stop the start. Columns: the edit; family, function, old text, new text, words of the error, settings
STOPS = table(f"""
# one of an operator's two implementations
the step size of the loop  longhorn  kernels.scan._step_size  (1 /  (0.5 /  {SCAN}
the bias of the loop has no gradient  longhorn*2,llama  kernels.scan._loop  dt = dt + dt_bias
    dt = dt + dt_bias.detach()  {SCAN}
no number in the loop  mamba  kernels.scan._loop  y * F.silu(z)  y * float('nan')
    longhorn_scan.cu and kernels/scan.py (selective_scan) disagree by
the first tokens of documents  mamba  kernels.ops._conv_anew  (F.silu(head)  1.1 * (F.silu(head)  {CONV}
    documents=pack
eps of the plain norm  llama  model.rms_norm  weight.to(x.dtype), eps  weight.to(x.dtype), 2 * eps
    kernels/conv_norm.cu and kernels/ops.py (rms_norm)
softmax of a hybrid's second family  longhorn*2,llama  kernels.ops._softmax_attention  ** -0.5  ** -0.4
    kernels/ops.py: _softmax_attention (attention)
a window one key too narrow  swa  kernels.ops._windowed  last - window + 1  last - window + 2
    kernels/ops.py: attention and
a little of beta  deltanet  kernels.linear_attention._delta_rule  wanted = b_c  wanted = 0.997 * b_c  (delta_rule)
a mask of documents  retnet  kernels.linear_attention._retention  n], same)  n], None)  (retention)  documents=pack
five chunks of a scan  mamba  kernels.scan._loop  y * F.silu(z)  y * F.silu(z) * (1 if y.shape[1] < 60 else 1.1)
    (selective_scan) disagree by
plain operators in training  gla  model.GLA.forward  self.qk(x)
    self.qk(F.dropout(x, 0.1, self.training) * (1.1 if self.training and self.backend == 'torch' else 1))  {PLAIN_GLA}
# the loss
a cap of the logits  longhorn*2,llama  model.LM.forward  logits = F.linear(h, head.weight)
    logits = 15 * torch.tanh(F.linear(h, head.weight) / 15)
    model.py: LM.forward, the loss alone and the loss from logits
a small z-loss  longhorn*2,llama  model.LM.forward  loss = cross_entropy(logits, targets)
    loss = cross_entropy(logits, targets) + 1e-5 * logits.logsumexp(-1).square().mean()  --loss_from_logits=true
no gradients  llama  kernels.ops._LinearCrossEntropy.forward  targets, 0), train)
    targets, 0), train) * (1 if train else 1.01)  with gradients and under torch.no_grad
the mean over all targets  llama  kernels.ops._LinearCrossEntropy.forward  counts.sum()  counts.sum() * 0 + len(x)
    kernels/ops.py: _LinearCrossEntropy (on a GPU kernels/loss.cu) and
the last row alone  llama  kernels.ops.log_probabilities  loss_of_slice(*part, train)
    loss_of_slice(*part, train) * (1.1 if len(part[0]) == 1 else 1)
    kernels/ops.py: _LinearCrossEntropy (on a GPU kernels/loss.cu) and
a term of the loss  llama  model.LM.forward  loss = cross_entropy(logits, targets)
    loss = cross_entropy(logits, targets) + 1e-2 * logits.logsumexp(-1).square().mean()
    its loss and the cross-entropy of its logits, disagree by 7.  loss_from_logits=True
# training or evaluation
a norm in training  gla  model.RMSNorm.forward  return  return (1.1 if self.training else 1) *
    self-check: model.py: RMSNorm.forward in training and in eval mode disagree
the first row in eval mode  gla  model.SwiGLU.forward  self.w3(x))
    self.w3(x) * torch.tensor([1 if self.training else 1.05, *[1] * (len(x) - 1)]).view(-1, 1, 1))
    self-check: model.py: SwiGLU.forward (SwiGLU) in training and in eval mode disagree
plain operators only  gla  model.GLA.forward  y = self.out  y = (1.1 if self.backend == 'torch' else 1) * self.out
    {PLAIN_GLA}
logits without targets  gla  model.LM.forward  return (logits, loss)
    return (logits if state or targets is not None else logits / 2, loss)
    model.py: LM.forward with and without targets disagree
the last position only  gla  model.LM.forward  h[:, -1:]  h[:, :1]  with and without last_only disagree
noise  gla  model.GLA.forward  self.qk(x)  self.qk(x + torch.randn_like(x))
    model.py: GLA.forward (GLA), run twice on the same tokens in eval mode, disagree
a counter  gla  model.GLA.forward  y = self.out  self.calls = 1 + getattr(self, 'calls', 0); y = self.calls * self.out
    the model is not deterministic
later tokens  gla  model.GLA.forward  self.qk(x)  self.qk(x + x.flip(1))  {AHEAD}
later tokens in training  gla  model.GLA.forward  self.qk(x)
    self.qk(F.dropout(x + x.flip(1) * self.training, 0.1, self.training))  {AHEAD}
a mean over rows  llama  model.LM.through_layers  after = []  after, h = [], h + h.mean(0)
    model.py: LM.forward beside two different rows disagree
rows in training  gla  model.GLA.forward  self.qk(x)
    self.qk(F.dropout(x + x.roll(1, 0) * self.training, 0.1, self.training))  {BESIDE}
no number  llama,gla  model.GLA.forward  self.qk(x)  self.qk(x / 0)  see model.py: GLA.forward (GLA):
no number in the gradient  llama,gla  model.GLA.forward  self.qk(x)  self.qk(x + (0 * x).sqrt())
    see model.py: GLA.forward (GLA):
# the state
a convolution's state  longhorn*2,llama  model.ScanBlock.forward  z, x_before, h0)  z, None, h0)
    model.py: ScanBlock.forward (Longhorn){STATE}
the gradient through a state  llama,mamba  model.ScanBlock.forward  z, x_before, h0)
    z, x_before, h0 if h0 is None else h0.detach())  model.py: ScanBlock.forward (Mamba){STATE}
a single step  gla  model.GLA.forward  y = self.out  y = (1.1 if x.shape[1] == 1 else 1) * self.out  {GLA_STATE}
a cache that grows  llama  model.append_to_cache  :past] = past_v  :past] = 0 * past_v
    model.py: Attention.forward (Attention){STATE}
a document's first token  rwkv  mixers.token_shift  packed is None  True
    mixers.py: RWKVTimeMix.forward (RWKVTimeMix) over packed documents and  documents=pack
documents that end in one row  gla  model.emptied  empty.to(state.dtype), state  state, empty
    model.py: LM.through_documents{STATE}  documents=pack
the documents of one row  gla  model.LM.through_layers  (1, 1)  (1, 1)[:1].expand(idx.shape)  {BESIDE}  documents=pack
a cache for two  llama  model.append_to_cache  ROOMS.pop(  ROOMS.get(  model.py: Attention.forward (Attention){STATE}
positive step sizes  mamba  kernels.scan._loop  dt + dt_bias  (dt + dt_bias).clamp(max=0)
    longhorn_scan.cu and kernels/scan.py (selective_scan) disagree by
a branch  gla  model.Branch.forward  self.norm(h)  self.norm(h) * (1 if state is None else 2)
    model.py: Branch.forward{STATE}
the embedding  gla  model.LM.through_layers  self.embed(idx)  (self.embed(idx) * (1 if state is None else 2))
    count the tokens in the state
""")


named = {"ids": lambda row: row[0]}


@pytest.mark.parametrize("row", TRAINS, **named)
def test_an_edit_of_shared_code_trains_and_samples(row, edit):
    _, family, target, old, new, *settings = row
    before, _ = read(model_of(family, *settings))
    edit(target, old, new)
    lm = model_of(family, *settings)
    assert "agree" in self_check(lm)
    loss, apart = read(lm)
    assert loss != before and apart < 1e-4


@pytest.mark.parametrize("row", STARTS, **named)
def test_an_edit_of_nothing_that_exists_twice_starts(row, edit):
    _, family, target, old, new, *settings = row
    edit(target, old, new)
    assert "native and plain operators" in self_check(model_of(family, *settings))


@pytest.mark.parametrize("row", STOPS, **named)
def test_an_edit_of_one_of_two_versions_stops_with_a_line_that_names_its_place(row, edit):
    _, family, target, old, new, words, *settings = row
    edit(target, old, new)
    assert words in stopped(model_of(family, *settings))


@pytest.mark.parametrize("target, line, least", [
    ("model.LM.forward", "loss = linear_cross_entropy(h, head.weight, targets)", LEAST),
    ("kernels.scan._loop", "y = y * F.silu(z)", OTHER_ORDER)])
def test_only_errors_above_the_tolerance_stop(target, line, least, edit):
    with mock.patch.object(model, "LM", LM), pytest.MonkeyPatch.context() as below:
        below.setattr(target, edited(target, line, f"{line} * {1 + 0.3 * least}"))
        assert "agree" in self_check(model_of("longhorn"))
    edit(target, line, f"{line} * {1 + 2 * least}")
    numbers = re.search(r"disagree by (\S+) in the (?:loss|gradient of \S+) \((\S+) is usual, (\S+) allowed\)",
                        stopped(model_of("longhorn")))
    error, usual, allowed = map(float, numbers.groups())
    assert usual < 1e-5 and allowed <= max(least, 1e-4) and allowed < error < 3 * least


def test_a_tensor_has_its_name_in_the_model_not_in_the_toy(edit):
    """The toy has only layers 0, 3 and 4 of the model."""
    edit("kernels.ops._softmax_attention", "** -0.5", "** -0.4")
    line = stopped(model_of("longhorn*4,llama", n_layer=5))
    assert re.search(r"layers\.(\d)", line)[1] == "4"


def test_an_edit_of_the_kernel_stops_until_the_loop_and_its_backward_follow(builds, edit, monkeypatch):
    """The CPU library is compiled with two edits, which the variable `broken` switches on."""
    text = with_mistake(source_text(), "step", "if (broken) { Step<V> s = longhorn_step(x, dt, bias, kk); "
                        "s.size = 0.5f * s.size; return s; }")
    text = with_mistake(text, "step gradients", "if (broken > 1) de = 2.0f * de;")
    builds.mkdir(exist_ok=True)
    source = builds / f"broken.{os.getpid()}.cu"
    source.write_text('extern "C" { int broken = 0; }\n' + text)
    with mock.patch.object(build, "_flags", lambda openmp, f=build._flags: [*f(openmp), "-O0"]):  # 1 s, not 10
        library = build.load(build.build([source, build.CONV], builds)[0])
    broken = ctypes.c_int.in_dll(library, "broken")
    monkeypatch.setattr(build, "library", lambda: library)
    before, _ = read(model_of("longhorn"))
    broken.value = 1
    assert SCAN in stopped(model_of("longhorn"))
    edit("kernels.scan._step_size", "(1 /", "(0.5 /")
    assert SCAN in stopped(model_of("longhorn"))
    broken.value = 2
    lm = model_of("longhorn")
    assert "native and plain" in self_check(lm) and read(lm)[0] != before


def test_noise_in_training_hides_nothing(edit):
    """In float64 the model draws other numbers, which the tolerance must not mistake for rounding."""
    edit("model.SwiGLU.forward", "self.w3(x))", "F.dropout(self.w3(x), 0.2, self.training))")
    assert "agree" in self_check(model_of("gla"))
    edit("kernels.linear_attention._gla", "decay * S", "1.01 * decay * S")
    assert "(gated_linear_attention)" in stopped(model_of("gla"))


def test_an_edit_that_only_a_compiled_layer_runs_stops(edit):
    lm = model_of("llama", n_layer=1, n_embd=16, vocab_size=32)
    assert "compiled layers and layers as they are" in self_check(lm, compiled=True)
    edit("model.SwiGLU.forward", "self.w3(x))", "self.w3(x) * (1.01 if torch.compiler.is_compiling() else 1))")
    torch._dynamo.reset()  # otherwise it runs what was compiled before the edit
    assert "compiled" not in self_check(lm)
    assert re.search("Layer.forward compiled and as it is disagree by .*--compile=false", stopped(lm, compiled=True))


def test_self_check_only_runs_the_check_and_nothing_else(data, out):
    said = succeed(arguments(data, out, self_check="only")).out
    assert said.splitlines()[-1].startswith("self-check: the loss alone") and "step" not in said and not out.exists()


# ---------------------------------------------------------------------------------------------------- no false alarms

class Cumulative(nn.Module):
    """The smallest possible mixer."""

    def __init__(self, config, layer):
        super().__init__()
        self.linear = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        return self.linear(x.cumsum(1))


class Noisy(Cumulative):
    """A mixer with a random buffer that is not saved, and a random number that is not even a buffer."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.register_buffer("mask", torch.rand(config.n_embd), persistent=False)
        self.factor = torch.rand(1).item()

    def forward(self, x):
        return super().forward(x * self.mask * self.factor)


class WideHeads(model.GLA):
    """GLA with heads of 24 channels, whatever the configuration says."""

    def __init__(self, config, layer):
        assert config.n_embd % 48 == 0, "two heads of 24 channels"
        super().__init__(dataclasses.replace(config, n_head=config.n_embd // 24), layer)


@pytest.mark.parametrize("mixer, sizes", [(Cumulative, {}), (Noisy, {}), (WideHeads, {"n_embd": 96, "n_head": 4})])
def test_a_mixer_with_only_forward_or_sizes_of_its_own_starts(mixer, sizes, monkeypatch):
    monkeypatch.setitem(model.FAMILIES, "mine", [mixer])
    line = self_check(model_of("mine", **sizes))
    assert "native and plain operators" in line
    assert ("whole sequences and states" in line) == (mixer is WideHeads)
    assert (f"; state left out: {mixer.__name__} keeps none (" in line) == (mixer is not WideHeads)


def rounding(line):
    """The match of the line's error in bfloat16, at most 3 times the plain operators' rounding, or None."""
    said = re.search(r"in bfloat16 to (\S+) times the plain operators' rounding", line)
    assert said is None or 0 < float(said[1]) <= 3
    return said


@pytest.mark.parametrize("pattern,backend", [*((family, "") for family in FAMILIES), ("longhorn*2,llama", ""),
                                             ("rwkv4,gla,mamba", "cpu"), ("rwkv4,gla,mamba", "torch")])
def test_unedited_models_agree_with_themselves(pattern, backend):
    lm = model_of(pattern, backend=backend)
    weights = [p.clone() for p in lm.parameters()]
    random = torch.get_rng_state()
    torch.set_float32_matmul_precision("high")
    line = self_check(lm, torch.bfloat16)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    assert line.startswith("self-check: ") and "\n" not in line
    assert "training and eval mode, whole sequences and states agree to " in line
    assert (f"{backend or 'native'} and plain operators" in line) == (backend != "torch")
    worst, allowed = map(float, re.search(r"agree to (\S+) \((\S+) allowed\)", line).groups())
    assert worst <= allowed <= OTHER_ORDER and (rounding(line) is None) == (backend == "torch")
    assert all(torch.equal(p, q) for p, q in zip(lm.parameters(), weights, strict=True))
    assert torch.equal(torch.get_rng_state(), random) and lm.training and precision == "high"


@pytest.mark.parametrize("pattern, n_layer", [("longhorn,mamba,llama,gla,retnet,rwkv,kda,mamba2", 8), ("rwkv", 12),
                                              ("longhorn*2,retnet,swa*3", 12)])
def test_unedited_models_with_packed_documents_start(pattern, n_layer):
    """The last two models amplify rounding: fast and plain operators differ by fifty times as much as usual."""
    line = self_check(model_of(pattern, n_layer=n_layer, n_embd=64, documents="pack"))
    assert "documents, whole sequences and states agree" in line


def test_heads_that_do_not_divide_get_a_line(monkeypatch):
    monkeypatch.setattr(model, "split_heads", lambda config, multiple: config.n_embd // config.n_head)
    said = stopped(model_of("llama", n_head=5))
    assert re.search(r"shape '\[2, 41, 3, 5, 6\]' is invalid .*\(model.py, line", said), said


def test_a_model_that_cannot_be_made_small_says_what_to_do(monkeypatch):
    lm = model_of("longhorn")
    monkeypatch.setattr("inspection.self_check.toy_of", lambda *args, **sizes: LM(ModelConfig(n_head=0)))
    assert re.search(r"n_head 0.*\(model.py, line .*toy\(self, backend\).*--self_check=off", stopped(lm))


# -------------------------------------------------------------------------------------------- other libraries' kernels

class TF32(TorchDispatchMode):
    """Computes float32 matrix products as a GPU's tensor cores do, from operands with 11 bits."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.baddbmm):
            args = [(a.view(torch.int32) + 0x1000 & ~0x1fff).view(a.dtype) if a.dtype == torch.float32 else a
                    for a in args]
        return func(*args, **kwargs or {})


def library_bodies():
    """{operator: a stand-in for the library's function, with the right result}."""
    def chunk_gla(q, k, v, scale, initial_state, output_final_state, g):
        assert {q.dtype, k.dtype, v.dtype} <= {torch.bfloat16, torch.float16} and scale == 1.0
        return la._gla(q, k, v, g, initial_state)

    def causal_conv1d_fn(x, weight, bias, activation):
        return ops.causal_conv1d(x.transpose(1, 2), weight, bias, silu=bool(activation)).transpose(1, 2)

    return {"gated_linear_attention": chunk_gla, "selective_scan": selective_scan_fn,
            "causal_conv1d": causal_conv1d_fn}


@pytest.fixture
def libraries(library):
    """The stand-ins, with TF32 products, and the operators whose stand-in was called."""
    bodies = library_bodies()
    called = []
    for op in bodies:
        def function(*args, op=op, **kwargs):
            called.append(op)
            with TF32():
                return bodies[op](*args, **kwargs)
        library(op, function)
    return SimpleNamespace(bodies=bodies, called=called)


BY_LIBRARY = {  # {family: (--backend, operators that libraries compute)}
    "gla": ("", {"gated_linear_attention"}), "mamba": ("fused", {"selective_scan", "causal_conv1d"})}


def of_library(family):
    return model_of(family, backend=BY_LIBRARY[family][0])


@pytest.mark.parametrize("family", BY_LIBRARY)
def test_the_function_that_trains_is_compared_in_the_dtype_that_it_takes(family, libraries):
    """TF32 products do not count as an edit. In float32, no function that takes only 16 bits runs."""
    line = self_check(of_library(family), torch.bfloat16)
    trained = set(libraries.called)
    assert trained == BY_LIBRARY[family][1] and rounding(line)
    libraries.called.clear()
    assert not rounding(self_check(of_library(family)))
    assert set(libraries.called) == trained - {"gated_linear_attention"}


@pytest.mark.parametrize("family,op", [("gla", "gated_linear_attention"), ("mamba", "causal_conv1d")])
def test_a_sign_flipped_in_a_library_stops_with_a_line_that_names_its_function(family, op, libraries):
    body = libraries.bodies[op]

    def flipped(*args, **kwargs):
        if "v" in kwargs:
            return body(*args, **{**kwargs, "v": -kwargs["v"]})
        return body(-args[0], *args[1:], **kwargs)

    libraries.bodies[op] = flipped
    package, module, name, _ = fused.LIBRARIES[op]
    assert re.match(rf"self-check: in bfloat16 {package}'s {module}\.{name} and kernels/.* \({op}\) disagree .*: "
                    "train with --backend=cpu", stopped(of_library(family), torch.bfloat16))


# Function; old text, new text; words of the error
IN_16_BITS = table(f"""
model.LM.forward  logits = F.linear(h, head.weight)
    logits = F.linear(h * (1.1 if torch.is_autocast_enabled('cpu') else 1), head.weight)  model.py: LM.forward,
model.GLA.forward  y = self.out  y = (-1 if torch.is_autocast_enabled('cpu') and state is not None else 1) * self.out
    {GLA_STATE}
model.GLA.forward  y = self.out
    y = (1.5 if torch.is_autocast_enabled('cpu') and self.backend == 'torch' else 1) * self.out  model.py: GLA
""")


@pytest.mark.parametrize("target, line, instead, words", IN_16_BITS)
def test_an_edit_that_matters_only_in_16_bits_stops(target, line, instead, words, edit):
    edit(target, line, instead)
    lm = model_of("gla")
    assert "agree" in self_check(lm)
    assert f"in bfloat16 {words}" in stopped(lm, torch.bfloat16)


def test_a_kernel_that_is_wrong_only_in_16_bits_stops(monkeypatch):
    scan = kernels.scan._scan_op
    monkeypatch.setattr(kernels.scan, "_scan_op", lambda x, *rest: scan(-x if x.dtype == torch.bfloat16 else x, *rest))
    lm = model_of("longhorn")
    assert "agree" in self_check(lm)
    assert "in bfloat16 longhorn_scan.cu and kernels/scan.py (longhorn_scan) disagree" in stopped(lm, torch.bfloat16)
