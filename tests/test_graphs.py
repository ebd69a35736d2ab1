"""Micro-batches as CUDA graphs, on a CPU: no family asks the GPU for a number; and runs are replayed by a stand-in that
repeats the recorded operators on the recorded tensors. So all that changes from one micro-batch to the next is in
tensors, and these stay where they are. Streams, memory and speed only a GPU can show.

    python -m pytest tests/test_graphs.py
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import TINY, acting, arguments, assert_same_training, refuse, succeed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import configurator
import train
from kernels import choose
from model import FAMILIES, LM, ModelConfig
from runtime import distributed, graphs

pytestmark = pytest.mark.usefixtures("one_thread")
ON_CPU = sorted(FAMILIES.keys() - {"mesa"})  # whose number of steps depends on a number there, not on a GPU
HOW = {**TINY, "micro_batch_size": 5, "max_iters": 3, "eval_interval": 0, "final_eval_tokens": 32}


class Calls(TorchDispatchMode):
    """Stands in for torch.cuda.CUDAGraph: records the operators that run."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args, kwargs):
        if op is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("not while a graph is recorded")
        self.calls.append((op, args, kwargs, op(*args, **kwargs)))
        return self.calls[-1][-1]

    @torch.no_grad()
    def replay(self):
        for op, args, kwargs, results in self.calls:
            for a, again in zip(tree_leaves(results), tree_leaves(op(*args, **kwargs)), strict=True):
                if isinstance(a, torch.Tensor) and a.data_ptr() != again.data_ptr():
                    a.copy_(again)
        print("replayed")


def recorded():
    """A CPU passes for a GPU."""
    return mock.patch.multiple(graphs, GPU="cpu", cuda=SimpleNamespace(
        CUDAGraph=Calls, graph=lambda calls, **how: calls, Stream=mock.Mock, current_stream=mock.Mock,
        stream=contextlib.nullcontext))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_waits_for_the_gpu(family):
    """On "meta", where no tensor has values, models run as on a GPU."""
    with torch.device("meta"), Calls() as graph, mock.patch.object(choose, "unavailable", lambda device: None):
        lm = LM(ModelConfig(model=family, n_layer=1, n_embd=64, n_head=2, vocab_size=64))
        tokens = torch.zeros(2, 129, dtype=torch.int64)
        graph.calls.clear()
        lm(tokens[:, 1:], tokens[:, 1:], loss_only=True)[1].backward()
    assert all(a.is_meta for a in tree_leaves(graph.calls) if isinstance(a, torch.Tensor)), "a copy to the GPU"


def replayed(data, out, **changes):
    """What a run says with graphs. It trains to the same bits as one without."""
    succeed(arguments(data, out.with_name("eager"), HOW, **changes))
    said = succeed(arguments(data, out, HOW, graphs=True, **changes)).out
    assert_same_training(out, out.with_name("eager"))
    return said


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replayed_runs_are_eager_ones_to_the_bit(data, out, dtype):
    """Steps of 5, 5 and 2 windows; only those of 5 are replayed."""
    with recorded():
        said = replayed(data, out, pattern=",".join(ON_CPU), n_layer=len(ON_CPU), dtype=dtype)
    assert said.count("replayed\n") == 1 + 3 * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("model", ["longhorn", "mamba", "llama"])
def test_gpu_replays_are_eager_steps_to_the_bit(data, out, model):
    assert "graphs: off" not in replayed(data, out, model=model, max_iters=20, device="cuda", dtype="bfloat16")


def replays(argv):
    with recorded():
        train.main(argv)
    distributed.leave()


def test_with_ddp_the_last_micro_batch_is_not_replayed(launch, data, out):
    how = {**HOW, "micro_batch_size": 2}
    launch(arguments(data, out.with_name("eager"), how), 2).succeed()
    said = launch(arguments(data, out, how, graphs=True), 2, main=replays).succeed().said()
    assert said.count("replayed\n") == 1 + 3 * 2
    assert_same_training(out, out.with_name("eager"))


@pytest.mark.parametrize("setting", ["parallel=fsdp", "recompute=block", "documents=pack", "micro_batch_size=512"])
def test_where_there_can_be_no_graph_a_line_says_so(setting):
    config = configurator.load(train.TrainConfig, ["--graphs", f"--{setting}"])
    with recorded():
        assert setting[:5] in graphs.why_not(torch.nn.Linear(1, 1), config)


@pytest.mark.parametrize("factor, words", [(lambda n, loss: n, "has the loss"),
                                           (lambda n, loss: loss.item(), "cannot be recorded (not while")])
def test_a_model_that_cannot_be_replayed_is_refused(data, out, factor, words):
    with recorded():
        refuse(arguments(data, out, graphs=True), "graphs: ", words, "use --graphs=False",
               LM=acting(lambda n, lm, loss: loss * factor(n, loss)))
