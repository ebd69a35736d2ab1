"""The check at every start: what you read is what runs. Each edit is made in a copy of the sources.

    python -m pytest tests/test_self_check.py

An edit either changes the training loss and agrees with the state path, or the start stops with one line that names
both places. A process that has imported PyTorch forks for every edit, and the child imports the edited copy.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model import FAMILIES, LM, ModelConfig
from runtime.errors import ConfigError
from runtime.self_check import self_check

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("model.py", "mixers.py", "runtime/self_check.py", "configurator.py", "longhorn_scan.cu", "kernels")
CHILD = """
import json, os, sys, torch, torch._dynamo  # which operators and optimisers import, in 2 s
torch.set_num_threads(1)

def probe(folder, config, environment):
    sys.path.insert(0, folder)
    os.environ.update(environment)
    from configurator import ConfigError
    from model import LM, ModelConfig
    from runtime.self_check import self_check
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 40, "vocab_size": 64, "mlp_multiple": 16}
    lm = LM(ModelConfig(**{**sizes, **config}))
    try:
        line, stopped = self_check(lm), False
    except ConfigError as error:
        line, stopped = str(error), True
    idx = torch.randint(64, (2, 41), generator=torch.Generator().manual_seed(1))
    x, y = idx[:, :-1], idx[:, 1:]
    optimizer, losses = torch.optim.SGD(lm.parameters(), lr=1.0), []
    for _ in range(3):
        loss = lm(x, y, loss_only=True)[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = {"line": line, "stopped": stopped, "losses": losses}
    with torch.no_grad():
        if all(branch.has_state for _, branch in lm.branches()):
            state, sum_, parts = lm.initial_state(2), 0.0, []
            for t in range(40):
                logits, loss, state = lm(x[:, t:t + 1], y[:, t:t + 1], state=state)
                sum_ += loss.item() / 40
                parts.append(logits)
            whole = lm(x)[0]
            by_logits = ((torch.cat(parts, 1) - whole).norm() / whole.norm()).item()
            found["state"] = max(by_logits, abs(sum_ / lm(x, y, loss_only=True)[1].item() - 1))
    return found

for line in sys.stdin:
    if os.fork():
        os.wait()
        continue
    print(json.dumps(probe(*json.loads(line))), flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    """probe(edits, **config): {"line", "stopped", "losses", "state"} of a model whose sources have these edits."""
    folder = tmp_path_factory.mktemp("copies")
    (folder / "cxx").write_text('#!/bin/sh\nexec c++ "$@" -O0\n')  # an edited kernel is built in 3 s, not 13
    (folder / "cxx").chmod(0o755)
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             stderr=open(folder / "stderr", "w"), text=True,
                             env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, "OMP_NUM_THREADS": "1"})
    unedited = {"LONGHORN_BUILD_DIR": os.environ.get("LONGHORN_BUILD_DIR", str(ROOT / "build"))}
    edited = {"LONGHORN_BUILD_DIR": str(folder / "build"), "CXX": str(folder / "cxx")}
    known = {}

    def probe(edits=(), **config):
        key = json.dumps([edits, config])
        if key not in known:
            copy = folder / str(len(known))
            for name in SOURCES:
                copy_of = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
                copy.mkdir(exist_ok=True)
                copy_of(ROOT / name, copy / name)
            for file, old, new in edits:
                text = (copy / file).read_text()
                assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times"
                (copy / file).write_text(text.replace(old, new))
            build = edited if any(file.endswith(".cu") for file, _, _ in edits) else unedited
            child.stdin.write(json.dumps([str(copy), config, build]) + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
            assert answer, (folder / "stderr").read_text()[-2000:]
            known[key] = json.loads(answer)
        return known[key]

    yield probe
    child.stdin.close()
    assert child.wait() == 0


SCAN = "        y, hT = self.scan(c, dt, k, q, z, h0)"
CONV = "causal_conv1d(x, self.conv_weight, self.conv_bias, x_before, reverse=reverse, backend=self.backend)"
LONGHORN = "longhorn_scan(x, dt, k, q, self.D, z, self.dt_bias, h0, return_state=True, reverse=reverse,"
LOGITS = "logits = F.linear(h, self.embed.weight)"
LOSS = "F.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=-1)"
ALONE = 'if loss_only and self.config.backend != "torch" and not torch.compiler.is_compiling():'
CAP = ("model.py", LOGITS, "logits = 15 * torch.tanh(F.linear(h, self.embed.weight) / 15)")
SMOOTH = ("model.py", LOSS, LOSS[:-1] + ", label_smoothing=0.1)")
ONE_LOSS = ("model.py", ALONE, "if False:")
HALF = ("kernels/scan.py", "return (1 / (1 + torch.exp(", "return (0.5 / (1 + torch.exp(")
HALF_FORWARD = ("longhorn_scan.cu", "{x, reciprocal(1.0f + e + kk),", "{x, 0.5f * reciprocal(1.0f + e + kk),")
HALF_BACKWARD = ("longhorn_scan.cu", "return {dx, de * (s.size * s.slope), de * s.size};",
                 "return {dx, 2.0f * de * (s.size * s.slope), 2.0f * de * s.size};")
MODEL = lambda old, new: [("model.py", old, new)]
OPS = lambda old, new: [("kernels/ops.py", old, new)]
LINEAR = lambda old, new: [("kernels/linear_attention.py", old, new)]
LOOP = lambda op: (f"linear_attention.py: _{op}", f"linear_attention.py: {op}_ref")
OWN = [("model.py", "FAMILIES = {\n", '''class Own(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.linear = nn.Linear(config.n_embd, config.n_embd)

    def forward(self, x):
        return self.linear(x.cumsum(1))


FAMILIES = {
    "own": [Own],
''')]

IN_PROJ = "x, z = self.in_proj(u).chunk(2, -1)"
OUT = "y = self.out_proj(y)\n        return y, None if state is None else (conv_state"
BRANCH = "            y, s = branch(h, s)\n            h = h + y\n"
LAYER = "    def forward(self, h, state=None):\n        after = []"
HYBRID = {"pattern": "longhorn*3,llama"}
TRAINS = {  # what is edited: (family, edits); the loss changes, and sampling follows
    "keys and queries normalised": (
        "longhorn", MODEL(SCAN, f"        k, q = F.normalize(k, dim=-1), F.normalize(q, dim=-1)\n{SCAN}")),
    "RMSNorm of keys and queries": (
        "mamba", MODEL(SCAN, f"        k, q = (F.rms_norm(a, (self.N,)) for a in (k, q))\n{SCAN}")),
    "no gate": ("longhorn", MODEL(SCAN, SCAN.replace("z, h0", "None, h0"))),
    "x normed before the convolution": (
        "longhorn", MODEL(IN_PROJ, f"{IN_PROJ}\n        x = F.rms_norm(x, x.shape[-1:])")),
    "half the output": ("mamba", MODEL(OUT, OUT.replace("y = ", "y = 0.5 * "))),
    "dt - 0.7": ("longhorn", MODEL(LONGHORN, LONGHORN.replace("dt,", "dt - 0.7,", 1))),
    "no D": ("longhorn", MODEL(LONGHORN, LONGHORN.replace("self.D", "None"))),
    "k / 2": ("longhorn", MODEL(LONGHORN, LONGHORN.replace(" k,", " k / 2,"))),
    "gelu behind the convolution": ("longhorn", MODEL(CONV, f"F.gelu({CONV[:-1]}, silu=False))")),
    "A times 2": ("mamba", MODEL("A = -self.A_log.exp()", "A = -2 * self.A_log.exp()")),
    "label smoothing in both": ("llama", [SMOOTH, ONE_LOSS]),
    "a cap in both": ("llama", [CAP, ONE_LOSS]),
    "another eps of the norms": ("llama", MODEL("self.weight, self.eps, backend", "self.weight, 1e-6, backend")),
    "parallel branches": ("llama", MODEL(BRANCH, BRANCH.replace("(h, s)", "(start, s)")) + MODEL(
        LAYER, LAYER.replace("after = []", "after, start = [], h"))),
    "decay of GLA": ("gla", MODEL("self.forget2(self.forget1(x))) / 16", "self.forget2(self.forget1(x))) / 8")),
    "half the step size in kernel and loop": ("longhorn", [HALF, HALF_FORWARD, HALF_BACKWARD]),
    "a hybrid's mixer": (HYBRID, MODEL(LONGHORN, LONGHORN.replace(" k,", " k / 2,"))),
}
SCANS = ("longhorn_scan.cu: Longhorn", "kernels/scan.py: _longhorn_step")
LOSSES = ("model.py: LM.forward", "kernels/ops.py: _LinearCrossEntropy")
STATE = ("over the whole sequence", "through the state")
BLOCK = ("model.py: ScanBlock.forward", *STATE)
STOPS = {  # what is edited: (family, edits, places that the line names)
    "label smoothing of the logits' loss": ("llama", [SMOOTH], LOSSES),
    "a cap of the logits": ("longhorn", [CAP], LOSSES),
    "half the step size in the loop": ("longhorn", [HALF], SCANS),
    "half the step size in the kernel's forward": ("longhorn", [HALF_FORWARD], SCANS),
    "half the step size in loop and kernel, the kernel's backward left": ("longhorn", [HALF, HALF_FORWARD], SCANS),
    "gelu in the plain convolution": ("mamba", OPS("return F.silu(y) if silu", "return F.gelu(y) if silu"),
                                      ("kernels/conv_norm.cu: conv_forward", "kernels/ops.py: _conv_torch")),
    "eps of the plain RMSNorm": ("llama", OPS("weight.to(x.dtype), eps)", "weight.to(x.dtype), 1e-6)"),
                                 ("kernels/conv_norm.cu: norm_forward_rows", "kernels/ops.py: rms_norm")),
    "decay of GLA's chunks": ("gla", LINEAR("decay = g.exp()", "decay = (2 * g).exp()"),
                              ("linear_attention.py: _gla", "linear_attention.py: gated_linear_attention_ref")),
    "beta of DeltaNet's chunks": (
        "deltanet", LINEAR("coupling = (b_c *", "coupling = (0.9 * b_c *"), LOOP("delta_rule")),
    "x normed for the convolution, not for its state": (
        "longhorn", MODEL(CONV, CONV.replace("(x,", "(F.rms_norm(x, x.shape[-1:]),")), BLOCK),
    "with a state only": ("mamba", MODEL(SCAN, f"        z = z if state is None else 0.9 * z\n{SCAN}"), BLOCK),
    "in single steps only": ("gla", MODEL("self.qk(x).chunk(2, -1)  # (B, T, d/2)",
                                          "((1 + (x.shape[1] == 1)) * self.qk(x)).chunk(2, -1)  # (B, T, d/2)"),
                             ("model.py: GLA.forward", *STATE)),
    "positions begin again": ("llama", MODEL("past = 0 if state is None else state[0].shape[2]", "past = 0"),
                              ("model.py: Attention.forward", *STATE)),
    "a cache that grows in place": (
        "llama", [("mixers.py", "room_v[:, :, past:T] = k, v", "room_v[:, :, past:T] = k, v / 2")],
        ("model.py: Attention.forward", *STATE)),
    "the token before": ("rwkv", [("mixers.py", "if last is None else last[:, None].to(x.dtype)", "")],
                         ("model.py: RWKVTimeMix.forward", "model.py: RWKVChannelMix.forward", *STATE)),
}


def settings(family):
    return family if isinstance(family, dict) else {"model": family}


@pytest.mark.parametrize("edit", TRAINS)
def test_an_edit_of_what_is_read_trains_and_samples(edit, probe):
    family, edits = TRAINS[edit]
    found, before = probe(edits, **settings(family)), probe(**settings(family))
    assert not found["stopped"], found["line"]
    assert found["losses"][0] != before["losses"][0] and found["losses"] != before["losses"], "another model trained"
    assert found["state"] < 1e-4


@pytest.mark.parametrize("edit", STOPS)
def test_an_edit_of_one_of_two_bodies_stops_in_a_line_with_both(edit, probe):
    family, edits, places = STOPS[edit]
    found = probe(edits, **settings(family))
    assert found["stopped"], f"{found}, unedited {probe(**settings(family))}"
    assert found["line"].startswith("self-check: ") and "\n" not in found["line"] and "edit both" in found["line"]
    assert all(place in found["line"] for place in places), found["line"]


def test_with_plain_pytorch_an_edited_loop_trains(probe):
    """--backend=torch is the mode for editing an operator: no native kernel is asked about it."""
    found, before = (probe(edits, model="longhorn", backend="torch") for edits in ([HALF], []))
    assert not found["stopped"] and found["losses"] != before["losses"] and found["state"] < 1e-4


def test_a_mixer_with_only_forward_trains(probe):
    found = probe(OWN, model="own")
    assert not found["stopped"] and "; state left out: Own keeps none" in found["line"]
    assert found["losses"][-1] < found["losses"][0]


@pytest.mark.parametrize("model,backend", [*((family, "") for family in FAMILIES), ("longhorn*3,llama", ""),
                                           ("rwkv4,gla,mamba", "cpu"), ("rwkv4,gla,mamba", "torch")])
def test_unedited_all_agrees(model, backend):
    torch.manual_seed(0)
    lm = LM(ModelConfig(pattern=model, n_layer=3, n_head=4, n_embd=64, vocab_size=96, backend=backend))
    weights, random = [p.clone() for p in lm.parameters()], torch.get_rng_state()
    line = self_check(lm)
    assert line.startswith("self-check: ") and "whole sequences and states agree to " in line and "\n" not in line
    assert ("plain operators" in line) == (backend != "torch")
    assert float(line.split("agree to ")[1].split()[0]) < 1e-5
    assert all(torch.equal(p, q) for p, q in zip(lm.parameters(), weights, strict=True))
    assert torch.equal(torch.get_rng_state(), random) and lm.training


def test_a_model_that_cannot_be_made_small_says_what_to_do(monkeypatch):
    lm = LM(ModelConfig(n_layer=1, n_embd=32, vocab_size=64))
    monkeypatch.setattr(LM, "toy", lambda self, backend: LM(ModelConfig(n_head=0)))
    with pytest.raises(ConfigError, match="^self-check: a small model [^\n]*n_head 0[^\n]*--self_check=off[^\n]*$"):
        self_check(lm)
