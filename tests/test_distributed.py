"""Sharded training (FSDP2) on a CPU: the losses, the checkpoints and the records are those of one process.

    python -m pytest tests/test_distributed.py
"""

import contextlib
import functools
import os
import signal
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from faults import LONG_FORM
from helpers import TINY, acting, arguments, events, losses, record, state, stops_at, succeed, table, write_data

import train
from common.errors import ConfigError
from model import LM
from runtime import checkpoint, distributed, records
from runtime.folder import Folder
from runtime.signals import Signals

pytestmark = pytest.mark.usefixtures("one_thread")
MIXED = {**TINY, "pattern": "mamba,llama,rwkv", "n_layer": 3, "vocab_size": 257, "max_iters": 6, "eval_interval": 3,
         "eval_tokens": 32}  # one window, so the other ranks have none; the final evaluation has 22


@pytest.fixture(scope="module")
def one(data, tmp_path_factory):
    """one(**changes): the folder of MIXED with these changes, trained by one process."""
    @functools.cache
    def one(**changes):
        out = tmp_path_factory.mktemp("one") / "run"
        succeed(arguments(data, out, MIXED, **changes))
        return out
    return one


def assert_same_losses(out, other, rtol):
    for key in ("train_loss", "grad_norm"):
        np.testing.assert_allclose(losses(out, key), losses(other, key), rtol=rtol)
    a, b = ([e["val_loss"] for e in events(folder, "eval").values()] for folder in (out, other))
    np.testing.assert_allclose(a, b, rtol=rtol)


@pytest.mark.parametrize("world, changes, same", [
    (2, {"parallel": "fsdp", "micro_batch_size": 4}, {}),  # one and a half micro-batches
    (4, {"parallel": "hsdp", "micro_batch_size": 2, "recompute": "every_other"}, {}),
    (2, {"micro_batch_size": 5, "recompute": "block"}, {}),  # 5 windows and 1
    pytest.param(2, {"parallel": "fsdp", "micro_batch_size": 6, "compile": True}, {}, marks=LONG_FORM),
    pytest.param(2, {"parallel": "fsdp", "micro_batch_size": 6, "dtype": "bfloat16"}, {"dtype": "bfloat16"},
                 marks=LONG_FORM)], ids=["fsdp", "hsdp", "ddp", "compiled", "bfloat16"])
def test_processes_train_as_one(launch, one, data, out, world, changes, same):
    """The three layers have six kinds of mixers, the vocabulary is odd, and the last of 22 validation windows is
    shorter. In bfloat16 every process rounds gradients once. Four processes act as two machines. Only rank 0 prints."""
    r = launch(arguments(data, out, MIXED, **changes), world, {"LOCAL_WORLD_SIZE": "2"}).succeed()
    assert r.said().count("val_loss") == 2 and r.said().count(" parameters; ") == 1
    assert not any(words in r.said(1) for words in ("val_loss", " parameters; ", "step   "))
    other = one(**same)
    derived = record(out, "config")["derived"]
    assert_same_losses(out, other, 5e-3 if "dtype" in changes else 2e-6)
    assert derived["epochs"] == record(other, "config")["derived"]["epochs"]
    assert derived["processes"] == world and derived["accumulation"] == -(-12 // world // changes["micro_batch_size"])
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in other.iterdir())


def counts_graphs(argv):
    """Trains with layers compiled by a backend that only counts graphs. DistributedDataParallel sends gradients as
    early as it can."""
    graphs = []
    compiler = torch.compile
    count = lambda graph, _: graphs.append(graph) or graph.forward
    with (mock.patch("torch.compile", lambda f: compiler(f, backend=count)),
          mock.patch("torch.distributed._DEFAULT_FIRST_BUCKET_BYTES", 1),
          mock.patch("torch.nn.parallel.DistributedDataParallel",
                     functools.partial(torch.nn.parallel.DistributedDataParallel, bucket_cap_mb=1e-3))):
        train.main(argv)
    print("graphs", len(graphs), flush=True)
    distributed.leave()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_compiled_layer_is_one_graph_on_several_processes(launch, data, out, parallel):
    """A layer has one graph for training and one for evaluation. Losses agree with those of eager layers to the bit."""
    how = {"parallel": parallel, "micro_batch_size": 6, "max_iters": 2, "eval_interval": 0, "final_eval_tokens": 64,
           "pattern": "mamba,rwkv", "n_layer": 2}
    launch(arguments(data, out.with_name("eager"), MIXED, **how), 2).succeed()
    said = launch(arguments(data, out, MIXED, compile=True, **how), 2, main=counts_graphs).succeed().said()
    assert "graphs 4\n" in said, said
    assert losses(out) == losses(out.with_name("eager"))


def last_rank_stops(rank):
    """The LM of a rank: the last rank gets two signals at once, as from Slurm."""
    def act(n, lm, loss):
        if rank and n == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)
    return acting(act)


def saves_as_read(argv):
    """Continues a run and at once saves what it has read, gathered from all processes."""
    resume = Folder.resume

    def resume_and_save(folder, optimizers, *how):
        found = resume(folder, optimizers, *how)
        parts = [p.to_local().numel() / p.numel() for p in folder.model.parameters()]
        assert max(parts) <= 0.55, "a process holds more than its part"
        assert all(s["exp_avg"].to_local().numel() <= p.numel() * 0.55 for p, s in optimizers[-1].state.items())
        state = {"model": folder.model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
        tensors, _ = checkpoint.flatten(state)
        values = list(map(distributed.whole, checkpoint.in_order(tensors).values()))
        if distributed.rank() == 0:
            checkpoint.save(folder.out / "again.safetensors", tensors, {}, values=iter(values))
        return found

    with mock.patch.object(Folder, "resume", resume_and_save):
        train.main(argv)
    distributed.leave()


def test_a_checkpoint_is_the_same_file_for_any_number_of_processes(launch, one, data, out):
    """Two sharded processes begin, one process goes on, and four sharded ones read its checkpoint and finish. The
    optimizer is Muon, with AdamW for the other parameters. Whichever rank is told to stop, rank 0 says so."""
    argv = lambda world, **more: arguments(data, out, MIXED, resume="auto", micro_batch_size=12 // world,
                                           optimizer="muon", **more)
    r = launch(argv(2, parallel="fsdp"), 2, LM=last_rank_stops).succeed()
    assert ["stopped after step 2 " in r.said(rank) for rank in (0, 1)] == [True, False], r.said()
    assert "stopped after step 4" in succeed(argv(1), LM=stops_at(2)).out
    before = state(out)
    assert "continuing from" in launch(argv(4, parallel="fsdp"), 4, main=saves_as_read).succeed().said()
    before.pop("rng")
    before = checkpoint.flatten(before)[0]
    after = checkpoint.load(out / "again.safetensors")[0]
    assert before.keys() == after.keys() and all(torch.equal(t, after[name]) for name, t in before.items())
    assert_same_losses(out, one(optimizer="muon"), 1e-4)


def scalar(rank):
    """An LM with a scalar parameter, which cannot be sharded."""
    class Scalar(LM):
        def __init__(self, config):
            super().__init__(config)
            self.temperature = torch.nn.Parameter(torch.ones(()))
    return Scalar


def differs(old, new, argv):
    """Trains with `old` replaced by `new` in rank 1's arguments."""
    of_rank = [a.replace(old, new) for a in argv] if os.environ["RANK"] == "1" else argv
    distributed.launch("train.py", lambda _: train.main(of_rank))


def runs_other_code(argv):
    """Trains while rank 1's checkout has one more file than rank 0's."""
    def main(_):
        if os.environ["RANK"] == "1":
            records.files_at_start["families/mine.py"] = "0" * 12
        train.main(argv)
    distributed.launch("train.py", main)


# A word of rank 0's command, rank 1's word, and the name in the refusal
DIFFERENT = table("""
/words     /others    data
float32    bfloat16   dtype
=0.003     =0.001     learning_rate
n_embd=32  n_embd=48  n_embd
""")
REFUSED = [  # settings of two processes; patches for `launch`; words of the refusal
    ({"parallel": "hsdp"}, {}, "hsdp needs several machines"), ({"parallel": "fsdp"}, {"LM": scalar}, "temperature"),
    ({}, {"LM": scalar}, "the loss does not depend on the parameters temperature:"),
    *(({}, {"main": functools.partial(differs, old, new)}, name) for old, new, name in DIFFERENT),
    ({}, {"main": runs_other_code}, "families/mine.py")]


@pytest.mark.parametrize("changes, how, words", REFUSED)
def test_a_run_that_several_processes_cannot_do_gets_one_line(launch, data, out, changes, how, words):
    if "main" in how:
        words = f"the ranks disagree about {words} ("
    if not data.with_name("others").exists():
        write_data(data.with_name("others"), seed=1)
    r = launch(arguments(data, out, micro_batch_size=6, **changes), 2, **how)
    assert set(r.end()) <= {2, 75} and 2 in r.end(), r.said()
    last = r.said().splitlines()[-1]
    assert words in last and ("on every node" in last) == ("main" in how) and "train.py: error" in last, r.said()
    assert "Traceback" not in r.said()


@pytest.mark.parametrize("weights, right", [((0.75, 0.25), True), ((0.5, 0.5), False), ((1.5, 0.5), False)])
def test_weights_are_shares_of_the_targets(weights, right):
    """Three of the four targets are in the first micro-batch."""
    batches = [(torch.zeros(1, 4), torch.tensor([y]), w) for y, w in zip(([5, -1, 0, 2], [-1, -1, 1, -1]), weights,
                                                                         strict=True)]
    data = SimpleNamespace(micro_batches=lambda *args: batches)
    how = torch.nn.Linear(1, 1), SimpleNamespace(parallel="ddp", micro_batch_size=1), data
    assert len(list(distributed.micro_batches(*how, 1, Signals()))) == 2
    with contextlib.nullcontext() if right else pytest.raises(ConfigError, match="for 3 of 4 targets in"):
        list(distributed.micro_batches(*how, 0, Signals()))


class Counted(torch.nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("recompute, forwards", [("none", [1, 1, 1]), ("block", [2, 2, 2]), ("every_other", [2, 1, 2])])
def test_only_the_chosen_layers_are_computed_again(recompute, forwards):
    layers = torch.nn.Sequential(*(Counted(2, 2) for _ in range(3)))
    distributed.prepare_layers(SimpleNamespace(layers=layers), SimpleNamespace(compile=False, recompute=recompute))
    layers(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert [layer.calls for layer in layers] == forwards


class Around(torch.nn.Module):
    """Layers with different graphs but one forward function, like those of a hybrid."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


def test_all_layers_of_a_hybrid_are_compiled(monkeypatch):
    """PyTorch stops compiling after eight graphs of one function, without an error."""
    compiler = torch.compile
    kinds = "ReLU GELU SiLU ELU SELU CELU Mish Tanh Sigmoid".split()
    monkeypatch.setattr(torch, "compile", lambda f: compiler(f, backend="eager"))
    layers = [Around(getattr(torch.nn, kind)()) for kind in kinds]
    x = torch.ones(2)
    expected = torch.nn.Sequential(*layers)(torch.ones(2))
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=8):
        distributed.prepare_layers(SimpleNamespace(layers=layers), SimpleNamespace(compile=True, recompute="none"))
        for layer in layers:
            x = layer(x)
    assert torch.equal(x, expected)


def test_processes_of_a_machine_share_its_cores(monkeypatch, threads):
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    monkeypatch.setattr(distributed, "join", lambda backend, wait: None)
    distributed.open_device(SimpleNamespace(device="cpu", timeout_minutes=1))
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("flags, dtype", [("avx2 avx512f", torch.float32), ("avx512f avx512_bf16", torch.bfloat16),
                                          ("amx_bf16 amx_tile", torch.bfloat16)])
def test_auto_picks_the_dtype_that_this_processor_is_fast_in(monkeypatch, flags, dtype):
    monkeypatch.setattr("pathlib.Path.read_text", lambda self: flags)
    assert distributed.pick_dtype("auto", torch.device("cpu")) == dtype
    assert distributed.pick_dtype("float32", torch.device("cpu")) == torch.float32
