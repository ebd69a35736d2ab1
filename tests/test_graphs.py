"""Micro-batches as CUDA graphs, tested on a CPU. No family asks the GPU for a number. A stand-in replays runs by
repeating the recorded operators on the recorded tensors. This shows that only values of tensors change between
micro-batches, and that these tensors stay in place. Only a GPU can show streams, memory and speed.

    python -m pytest tests/test_graphs.py
"""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import TINY, acting, arguments, assert_same_training, losses, poisoned, record, refuse, succeed, table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import configurator
import train
from kernels import choose
from model import FAMILIES, LM, ModelConfig
from runtime import distributed, graphs

pytestmark = pytest.mark.usefixtures("one_thread")
ON_CPU = sorted(FAMILIES.keys() - {"mesa"})  # on a CPU, its number of steps depends on its keys
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


@contextlib.contextmanager
def recorded():
    """Makes a CPU pass for a GPU, and yields its current stream."""
    current = mock.Mock()
    with mock.patch.multiple(graphs, GPU="cpu", cuda=SimpleNamespace(
            CUDAGraph=Calls, graph=lambda calls, **how: calls, Stream=mock.Mock, current_stream=lambda: current,
            stream=contextlib.nullcontext)):
        yield current


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_waits_for_the_gpu(family):
    """On "meta", where tensors have no values, models run as on a GPU."""
    with torch.device("meta"), Calls() as graph, mock.patch.object(choose, "unavailable", lambda device: None):
        lm = LM(ModelConfig(model=family, n_layer=1, n_embd=64, n_head=2, vocab_size=64))
        tokens = torch.zeros(2, 129, dtype=torch.int64)
        graph.calls.clear()
        lm(tokens[:, 1:], tokens[:, 1:], loss_only=True)[1].backward()
    assert all(a.is_meta for a in tree_leaves(graph.calls) if isinstance(a, torch.Tensor)), "a copy to the GPU"


def replayed(data, out, same=assert_same_training, **changes):
    """The output of a run with graphs, which must train to the same bits as a run without."""
    succeed(arguments(data, out.with_name("eager"), HOW, **changes))
    said = succeed(arguments(data, out, HOW, graphs=True, **changes)).out
    same(out, out.with_name("eager"))
    return said


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replayed_runs_equal_eager_runs_to_the_bit(data, out, dtype):
    """A step has 5, 5 and 2 windows, and only those of 5 are replayed. The first micro-batch is compared once the
    stream that computed it is done."""
    with recorded() as stream:
        said = replayed(data, out, pattern=",".join(ON_CPU), n_layer=len(ON_CPU), dtype=dtype)
    assert said.count("replayed\n") == 1 + 3 * 2 and stream.wait_stream.call_count == 1


def test_a_micro_batch_of_another_weight_is_not_replayed():
    """Random numbers are the same as without recording, also after it."""
    model = torch.nn.Linear(3, 1)
    x = torch.ones(2, 3)

    def compute(x, y, weight):
        loss = (model(x) - y + torch.rand(())).square().sum() * weight
        loss.backward()
        return loss.detach()

    def numbers(compute):
        torch.manual_seed(0)
        model.zero_grad()
        return [*(compute(x, x[:, :1], weight).item() for weight in (1.0, 0.5)), torch.rand(()).item()]

    with recorded():
        assert numbers(graphs.Graph(compute, model)) == numbers(compute)


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_a_first_micro_batch_that_is_not_finite_is_skipped_and_a_later_one_recorded(data, out, how):
    """The first of the next step is recorded: within the same step, recording would forget what was not finite."""
    succeed(arguments(data, out.with_name("eager"), HOW), LM=poisoned([1], how))
    with recorded():
        said = succeed(arguments(data, out, HOW, graphs=True), LM=poisoned(range(graphs.WARM_UPS + 2), how)).out
    assert said.count("replayed\n") == 1 + 2 * 2 and record(out)["skipped_steps"] == 1
    assert_same_training(out, out.with_name("eager"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("model", ["longhorn", "mamba", "llama"])
def test_gpu_replays_are_eager_steps(data, out, model):
    """Training agrees to the bit, except with PyTorch's attention, which adds some gradients in no fixed order."""
    def same(out, other):
        assert losses(out) == pytest.approx(losses(other), rel=graphs.TOLERANCE)

    how = {"same": same} if model == "llama" else {}
    said = replayed(data, out, model=model, max_iters=20, device="cuda", dtype="bfloat16", **how)
    assert "graphs: off" not in said


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


@pytest.mark.parametrize("setting, model, words", table("""
parallel=fsdp         Linear  fsdp gathers layers
recompute=block       Linear  recomputed in the backward
documents=pack        Linear  number of documents varies
micro_batch_size=512  Linear  one micro-batch per step
compile               BatchNorm1d  the model has buffers
compile               Linear  none
"""))
def test_where_there_can_be_no_graph_a_line_says_so(setting, model, words):
    config = configurator.load(train.TrainConfig, ["--graphs", f"--{setting}"])
    model = getattr(torch.nn, model)(1, 1)
    lines = []
    model.require_backward_grad_sync = True
    assert "need a GPU" in graphs.why_not(model, config)
    with recorded():
        assert (graphs.replayed(abs, model, config, lines.append) is abs) == (words != "none")
    assert words in "".join(lines or ["none"])


@pytest.mark.parametrize("changed, words", [
    (lambda n, lm, loss: loss * n, "has the loss"),
    (lambda n, lm, loss: loss + n * (lm.norm.weight - lm.norm.weight.detach()).sum(), "gradients differ by"),
    (lambda n, lm, loss: loss * loss.item(), "cannot be recorded (not while")])
def test_a_model_that_cannot_be_replayed_is_refused(data, out, changed, words):
    with recorded():
        refuse(arguments(data, out, graphs=True), "graphs: ", words, "use --graphs=False", LM=acting(changed))
