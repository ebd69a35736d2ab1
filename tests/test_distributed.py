"""Sharded training (FSDP2) on a CPU: the losses, the checkpoints and the records are those of one process.

    python -m pytest tests/test_distributed.py
"""

import shutil
import signal

import numpy as np
import pytest
import torch
from test_chaos import LONG_FORM, assert_bit_for_bit, logged
from test_train import LONG, TINY, arguments, events, losses, refuse, saved, state, stops_at, succeed, write_data

import checkpoint
import configurator
import distributed
import train
from model import LM
from optim import build_optimizers
from run import Run

pytestmark = pytest.mark.usefixtures("one_thread")
MIXED = {**TINY, "pattern": "mamba,llama,rwkv", "n_layer": 3, "vocab_size": 257, "max_iters": 6, "eval_interval": 3}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "words")


@pytest.fixture(scope="module")
def one(data, tmp_path_factory):
    """one(**changes): the folder of that run of MIXED by one process."""
    folders = {}

    def one(**changes):
        key = tuple(changes.items())
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("one") / "run"
            succeed(arguments(data, folders[key], MIXED, **changes))
        return folders[key]
    return one


def assert_same_losses(out, other, rtol=1e-6):
    for key in ("train_loss", "grad_norm"):
        np.testing.assert_allclose(losses(out, key), losses(other, key), rtol=rtol)
    a, b = ([e["val_loss"] for e in events(folder, "eval").values()] for folder in (out, other))
    np.testing.assert_allclose(a, b, rtol=rtol)


MACHINES_OF_TWO = {"LOCAL_WORLD_SIZE": "2"}  # four processes are then two machines


@pytest.mark.parametrize("world, changes, same", [
    (2, {"parallel": "fsdp", "micro_batch_size": 4}, {}),  # one and a half micro-batches
    (4, {"parallel": "hsdp", "micro_batch_size": 2, "recompute": "every_other"}, {}),
    (2, {"micro_batch_size": 6, "recompute": "block"}, {}),
    pytest.param(2, {"parallel": "fsdp", "micro_batch_size": 6, "compile": True}, {}, marks=LONG_FORM),
    pytest.param(2, {"parallel": "fsdp", "micro_batch_size": 6, "dtype": "bfloat16"}, {"dtype": "bfloat16"},
                 marks=LONG_FORM)], ids=["fsdp", "hsdp", "ddp", "compiled", "bfloat16"])
def test_processes_train_as_one(launch, one, data, tmp_path, world, changes, same):
    """Six kinds of mixers in three layers, an odd vocabulary, and 22 validation windows of which the last is shorter.
    In bfloat16 gradients are rounded once for each process."""
    r = launch(arguments(data, tmp_path / "run", MIXED, **changes), world, MACHINES_OF_TWO if world == 4 else None)
    assert r.end() == [0] * world, r.said()
    rounding = 5e-3 if "dtype" in changes else 2e-6
    assert_same_losses(tmp_path / "run", one(**same), rounding)
    (a, meta_a), (b, meta_b) = saved(tmp_path / "run"), saved(one(**same))
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
    with Run(config, model, data) as run:
        run.parallelize()
        optimizers = build_optimizers(model, config)
        run.resume(optimizers, train.learning_rate_factor)
        largest = max(p.to_local().numel() / p.numel() for p in model.parameters())
        assert largest <= 0.55, "a process holds more than its part"
        assert all(s["exp_avg"].to_local().numel() <= p.numel() * 0.55 for p, s in optimizers[-1].state.items())
        whole = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
        values = list(map(distributed.whole, checkpoint.in_order(checkpoint.flatten(whole)[0]).values()))
        if run.is_main:
            checkpoint.save(f"{config.out_dir}/again.safetensors", *checkpoint.flatten(whole), values=iter(values))
    distributed.leave()


def test_a_checkpoint_is_the_same_file_for_any_number_of_processes(launch, one, data, tmp_path):
    """Two shards begin, one process goes on, four shards read it and finish. With Muon; AdamW has the rest."""
    out, how = tmp_path / "run", {"optimizer": "muon"}
    argv = lambda world, **more: arguments(data, out, MIXED, resume="auto", micro_batch_size=12 // world, **how, **more)
    r = launch(argv(2, parallel="fsdp"), 2, LM=last_rank_stops)
    assert r.end() == [0, 0] and saved(out)[1]["step"] == 2, r.said()
    assert "stopped after step 4" in succeed(argv(1), LM=stops_at(2)).out
    r = launch(argv(2, parallel="fsdp"), 2, main=again)
    assert r.end() == [0, 0], r.said() + r.said(1)
    before, after = state(out), checkpoint.load(out / "again.safetensors")[0]
    before.pop("rng")
    before = checkpoint.flatten(before)[0]
    assert before.keys() == after.keys() and all(torch.equal(t, after[name]) for name, t in before.items())
    r = launch(argv(4, parallel="fsdp"), 4)
    assert r.end() == [0] * 4 and "continuing from" in r.said(), r.said()
    assert_same_losses(out, one(**how), 1e-4)


SHORT = {**LONG, "max_iters": 30, "checkpoint_interval": 4, "eval_interval": 15, "micro_batch_size": 2,
         "dtype": "float32", "parallel": "fsdp", "timeout_minutes": 1, "resume": "auto"}


@LONG_FORM
def test_a_killed_shard_is_started_again(launch, data, tmp_path):
    """The other says who does not answer, with the exit code that torchrun starts all of them again for."""
    argv = lambda name: arguments(data, tmp_path / name, SHORT)
    r = launch(argv("whole"), 2)
    assert r.end() == [0, 0], r.said()
    r = launch(argv("run"), 2)
    assert r.until(lambda: logged(tmp_path / "run") >= 10, "progress")
    r.send(signal.SIGKILL, 1)
    assert r.end() == [distributed.EXIT_RETRYABLE, -signal.SIGKILL] and "no answer from rank 1" in r.said(), r.said()
    r = launch(argv("run"), 2)
    assert r.end() == [0, 0] and "continuing from" in r.said(), r.said()
    assert_bit_for_bit(tmp_path / "run", tmp_path / "whole")


class Scalar(LM):
    """A model with a parameter that has no dimension to cut."""

    def __init__(self, config):
        super().__init__(config)
        self.temperature = torch.nn.Parameter(torch.ones(()))


def scalar(rank):
    return Scalar


def test_what_cannot_be_sharded_gets_one_line(launch, data, tmp_path):
    refuse(arguments(data, tmp_path / "run", parallel="fsdp"), "parallel=fsdp needs several processes", "torchrun")
    for changes, how, words in [({"parallel": "hsdp"}, {}, "hsdp needs several machines"),
                                ({"parallel": "fsdp", "auto_micro_batch": "true"}, {}, "auto_micro_batch"),
                                ({"parallel": "fsdp"}, {"LM": scalar}, "temperature")]:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        r = launch(arguments(data, tmp_path / "run", micro_batch_size=6, **changes), 2, **how)
        assert set(r.end()) <= {2, distributed.EXIT_RETRYABLE} and 2 in r.end(), r.said()
        last = r.said().splitlines()[-1]
        assert words in last and "train.py: error" in last and "Traceback" not in r.said(), r.said()
