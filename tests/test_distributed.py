"""Sharded training (FSDP2) on a CPU: the losses, the checkpoints and the records are those of one process.

    python -m pytest tests/test_distributed.py
"""

import functools
import shutil

import numpy as np
import pytest
import torch
from test_chaos import LONG_FORM
from test_train import TINY, arguments, events, losses, record, refuse, saved, state, stops_at, succeed

import configurator
import train
from model import LM
from optim import build_optimizers
from runtime import checkpoint, distributed
from runtime.folder import Folder
from runtime.signals import Signals
from runtime.telemetry import Telemetry

pytestmark = pytest.mark.usefixtures("one_thread")
MIXED = {**TINY, "pattern": "mamba,llama,rwkv", "n_layer": 3, "vocab_size": 257, "max_iters": 6, "eval_interval": 3,
         "eval_tokens": 32}  # one window, which leaves nothing for the other ranks; in the end there are 22


@pytest.fixture(scope="module")
def one(data, tmp_path_factory):
    """one(**changes): the folder of that run of MIXED by one process."""
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
    """Six kinds of mixers in three layers, an odd vocabulary, and 22 validation windows of which the last is shorter.
    In bfloat16 gradients are rounded once for each process. Four are two machines. Rank 0 alone speaks."""
    r = launch(arguments(data, out, MIXED, **changes), world, {"LOCAL_WORLD_SIZE": "2"}).succeed()
    assert r.said().count("val_loss") == 2 and r.said().count(" parameters; ") == 1
    assert not any(words in r.said(1) for words in ("val_loss", " parameters; ", "step   "))
    other, derived = one(**same), record(out, "config")["derived"]
    assert_same_losses(out, other, 5e-3 if "dtype" in changes else 2e-6)
    assert derived["processes"] == world and derived["accumulation"] == -(-12 // world // changes["micro_batch_size"])
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in other.iterdir())
    (a, meta_a), (b, meta_b) = saved(out), saved(other)
    assert meta_a["skeleton"] == meta_b["skeleton"] and {n: t.shape for n, t in a.items()} == {
        n: t.shape for n, t in b.items()}


def last_rank_stops(rank):
    return stops_at(2) if rank else LM


def again(argv):
    """Continue a run of several processes, and save before any step is made."""
    config = configurator.load(train.TrainConfig, argv)
    device = distributed.open_device(config)
    tokens = train.Tokens(train.find_dataset(config.dataset))
    data, model = train.TokenData(tokens, 32, config.batch_tokens, 0), train.build_model(config, device)
    with Folder(config, model, data) as folder, Telemetry(config, model, data, folder) as telemetry, Signals():
        distributed.parallelize(model, config, data)
        optimizers = build_optimizers(model, config)
        folder.resume(optimizers, train.learning_rate_factor, telemetry)
        largest = max(p.to_local().numel() / p.numel() for p in model.parameters())
        assert largest <= 0.55, "a process holds more than its part"
        assert all(s["exp_avg"].to_local().numel() <= p.numel() * 0.55 for p, s in optimizers[-1].state.items())
        whole = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
        values = list(map(distributed.whole, checkpoint.in_order(checkpoint.flatten(whole)[0]).values()))
        if distributed.rank() == 0:
            checkpoint.save(f"{config.out_dir}/again.safetensors", *checkpoint.flatten(whole), values=iter(values))
    distributed.leave()


def test_a_checkpoint_is_the_same_file_for_any_number_of_processes(launch, one, data, out):
    """Two shards begin, one process goes on, four shards read it and finish. With Muon; AdamW has the rest."""
    argv = lambda world, **more: arguments(data, out, MIXED, resume="auto", micro_batch_size=12 // world,
                                           optimizer="muon", **more)
    launch(argv(2, parallel="fsdp"), 2, LM=last_rank_stops).succeed()
    assert saved(out)[1]["step"] == 2
    assert "stopped after step 4" in succeed(argv(1), LM=stops_at(2)).out
    launch(argv(2, parallel="fsdp"), 2, main=again).succeed()
    before, after = state(out), checkpoint.load(out / "again.safetensors")[0]
    before.pop("rng")
    before = checkpoint.flatten(before)[0]
    assert before.keys() == after.keys() and all(torch.equal(t, after[name]) for name, t in before.items())
    assert "continuing from" in launch(argv(4, parallel="fsdp"), 4).succeed().said()
    assert_same_losses(out, one(optimizer="muon"), 1e-4)


def scalar(rank):
    """A model with a parameter that has no dimension to cut."""
    class Scalar(LM):
        def __init__(self, config):
            super().__init__(config)
            self.temperature = torch.nn.Parameter(torch.ones(()))
    return Scalar


def test_what_cannot_be_sharded_gets_one_line(launch, data, out):
    refuse(arguments(data, out, parallel="fsdp"), "parallel=fsdp needs several processes", "torchrun")
    for changes, how, words in [({"parallel": "hsdp"}, {}, "hsdp needs several machines"),
                                ({"parallel": "fsdp", "auto_micro_batch": "true"}, {}, "auto_micro_batch"),
                                ({"parallel": "fsdp"}, {"LM": scalar}, "temperature"),
                                ({}, {"LM": scalar}, "the loss does not depend on the parameters temperature:")]:
        shutil.rmtree(out, ignore_errors=True)
        r = launch(arguments(data, out, micro_batch_size=6, **changes), 2, **how)
        assert set(r.end()) <= {2, distributed.EXIT_RETRYABLE} and 2 in r.end(), r.said()
        last = r.said().splitlines()[-1]
        assert words in last and "train.py: error" in last and "Traceback" not in r.said(), r.said()
