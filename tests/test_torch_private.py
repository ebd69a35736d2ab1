"""common/torch_private.py: each private hook of PyTorch still exists, and does what we use it for.

test_optim.py compares `muon` with torch.optim.Muon; every operator with a gradient goes through `fast_apply`.
"""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from common import torch_private


def test_modes_and_transforms_are_seen():
    assert torch_private.dispatch_modes() == 0 and not torch_private.transformed()
    with TorchDispatchMode():
        assert torch_private.dispatch_modes() == 1
    seen = []

    def f(a):
        seen.append(torch_private.transformed())
        return a.sin()

    torch.func.vmap(f)(torch.ones(2))
    f(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        f(torch.ones(2))
    assert seen == [True, False, True]


def test_a_build_for_gpus_knows_their_streams():
    assert (torch_private.raw_stream is not None) == (torch.version.cuda is not None)


def test_marks_for_the_compiler_are_those_of_its_own_decorators():
    """torch.compile looks for these attributes: their names must be those that its own decorators set."""
    constant = torch_private.constant_when_compiled(lambda: 1)
    assert vars(constant).keys() == vars(torch.compiler.assume_constant_result(lambda: 1)).keys()
    ours, theirs = (vars(of(lambda: 1)) for of in (torch_private.not_compiled, torch.compiler.disable))
    assert ours.items() >= {"_torchdynamo_disable": True}.items() <= theirs.items()


def test_the_switch_of_ddp_is_that_of_no_sync(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ddp = DistributedDataParallel(torch.nn.Linear(1, 1))
        state = lambda: {name: value for name, value in vars(ddp).items() if isinstance(value, bool)}
        torch_private.average_gradients(ddp, False)
        off = state()
        torch_private.average_gradients(ddp, True)
        with ddp.no_sync():
            assert off == state()
        assert off != state() and torch_private.will_average_gradients(ddp)
        torch_private.average_gradients(ddp, False)
        assert not torch_private.will_average_gradients(ddp)
    finally:
        dist.destroy_process_group()


def test_graphs_record_what_averages_gradients(monkeypatch):
    switch = mock.Mock()
    monkeypatch.setattr(torch.autograd.graph, "set_override_stale_capture_stream", switch,
                        raising=torch.__version__ >= "2.13")
    torch_private.record_averaging()
    switch.assert_called_once_with(True)


def test_stand_ins_for_public_functions_do_the_same():
    torch_private.assert_async(torch.tensor(True), "right")
    with pytest.raises(RuntimeError, match="wrong"):
        torch_private.assert_async(torch.tensor(False), "wrong")
    zeros = [torch.ones(2), torch.ones(3)]
    torch_private.set_to_zero(zeros)
    assert not any(a.any() for a in zeros)
    tree = {"a": [torch.ones(2), None], "b": (1, torch.zeros(1))}
    mapped = torch_private.map_tensors(lambda a: a + 1, tree)
    assert mapped["a"][1] is None and mapped["b"] == (1, torch.ones(1))
    assert torch.equal(mapped["a"][0], torch.full((2,), 2.0))
