"""runtime/torch_private.py: each private hook of PyTorch still exists, and does what we use it for."""

import inspect

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim._muon import muon as torch_muon
from torch.utils._python_dispatch import TorchDispatchMode

from runtime import torch_private


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **kwargs or {})


def test_modes_and_transforms_are_seen():
    assert torch_private.dispatch_modes() == 0 and not torch_private.transformed()
    with Seen():
        assert torch_private.dispatch_modes() == 1
    seen = []

    def f(a):
        seen.append((torch_private.is_batched(a), torch_private.transformed()))
        return a.sin()

    torch.func.vmap(f)(torch.ones(2))
    f(torch.ones(2))
    with torch.autograd.forward_ad.dual_level():
        f(torch.ones(2))
    assert seen == [(True, True), (False, False), (False, True)]


def test_marks_for_the_compiler():
    """torch.compile must look at these attributes: the names must be the ones that its own decorators set."""
    constant = torch_private.constant_when_compiled(lambda: 1)
    assert vars(constant).keys() == vars(torch.compiler.assume_constant_result(lambda: 1)).keys()
    ours, theirs = (vars(of(lambda: 1)) for of in (torch_private.not_compiled, torch.compiler.disable))
    assert ours.items() >= {"_torchdynamo_disable": True}.items() <= theirs.items()


def test_compiled_once_per_width(monkeypatch):
    torch.compiler.reset()
    graphs, real = [], torch.compile
    count = lambda graph, _: graphs.append(graph) or graph.forward
    monkeypatch.setattr(torch, "compile", lambda f, **kwargs: real(f, backend=count, **kwargs))
    run = torch_private.compiled_for_any_rows(lambda a, b, factor: a.sum(1) * b * factor)
    for V in (8, 16):
        for n in (3, 5, 2, 9):
            assert torch.equal(run(torch.ones(n, V), torch.ones(n), 2), torch.full((n,), 2.0 * V))
    assert len(graphs) == 2


def test_assert_async():
    torch_private.assert_async(torch.tensor(True), "right")
    with pytest.raises(RuntimeError, match="wrong"):
        torch_private.assert_async(torch.tensor(False), "wrong")


def test_fast_apply_is_a_functions_apply():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return 2 * a

        @staticmethod
        def backward(ctx, dy):
            return 2 * dy

    a = torch.ones(3, requires_grad=True)
    torch_private.fast_apply(Double)(a).sum().backward()
    assert torch.equal(a.grad, torch.full((3,), 2.0))


def test_muon_is_the_step_of_torchs():
    torch.manual_seed(0)
    p, q = (torch.nn.Parameter(torch.eye(4, 6)) for _ in range(2))
    optimizer = torch.optim.Muon([p], lr=0.1, weight_decay=0.1)
    p.grad = torch.randn(4, 6)
    optimizer.step()
    group = {key: value for key, value in optimizer.param_groups[0].items() if key not in ("params", "initial_lr")}
    with torch.no_grad():
        torch_private.muon([q], [p.grad], [torch.zeros(4, 6)], **group, has_complex=False)
    assert torch.equal(p, q) and group.keys() | {"has_complex"} <= inspect.signature(torch_muon).parameters.keys()


def test_ddp_has_the_switch():
    """tests/test_distributed.py shows what it does: micro-batches of two processes."""
    assert "self.require_backward_grad_sync" in inspect.getsource(DistributedDataParallel.forward) + inspect.getsource(
        DistributedDataParallel._pre_forward)


def test_map_tensors():
    tree = {"a": [torch.ones(2), None], "b": (1, torch.zeros(1))}
    mapped = torch_private.map_tensors(lambda a: a + 1, tree)
    assert mapped["a"][1] is None and mapped["b"][0] == 1
    assert torch.equal(mapped["a"][0], torch.full((2,), 2.0)) and mapped["b"][1] == 1
