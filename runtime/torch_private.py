"""What we use of PyTorch that is private, or public by its name only. A new release may move any of it: then a test of
this file fails, and everything that needs a change stands here."""

import functools
import sys

import torch

# ------------------------------------------------------------------------------------------- who watches an operator

# How many modes (fake tensors, say) see every operator: with one, operators must go through torch.library
dispatch_modes = torch._C._len_torch_dispatch_stack

# Whether a tensor is one that torch.func.vmap has wrapped; its type is plain Tensor, so only this tells
is_batched = torch._C._functorch.is_batchedtensor

# Check a tensor's value on the GPU, without waiting for it as `if` would
assert_async = torch._assert_async


def constant_when_compiled(function):
    """torch.compiler.assume_constant_result without importing torch._dynamo, which takes 2 s of CPU at every start."""
    function._dynamo_marked_constant = True
    return function


def not_compiled(function):
    """torch.compiler.disable, applied only once torch._dynamo has been imported, for the same reason."""
    @functools.wraps(function)
    def run(*args, **kwargs):
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not hasattr(function, "disabled"):
            function.disabled = torch.compiler.disable(function)
        return function.disabled(*args, **kwargs)

    run._torchdynamo_disable = True  # a graph that reaches this function breaks at it
    return run


def transformed():
    """Whether a transform of torch.func or forward-mode AD is active: the kernels have no rules for these."""
    return torch.autograd.forward_ad._current_level >= 0 or _in_torch_func()


@constant_when_compiled  # inside torch.func the tensors are of another kind, so that torch.compile makes a new graph
def _in_torch_func():
    return torch._C._functorch.peek_interpreter_stack() is not None


def fast_apply(function):
    """The apply of a torch.autograd.Function without the Python around it, which only transforms need."""
    return super(torch.autograd.Function, function).apply


# ------------------------------------------------------------------------------------------------------------ training

def muon(*tensors, **settings):
    """The step of torch.optim.Muon, as a function of lists of tensors: torch.optim.Muon takes whole parameters only."""
    from torch.optim._muon import muon  # only then: exported models use this file too, and older releases lack Muon

    muon(*tensors, **settings)


def average_gradients(model, average):
    """Whether the next backward of a DistributedDataParallel averages gradients over processes. Its public no_sync() is
    a `with` around forward and backward, which stand in the training loop."""
    model.require_backward_grad_sync = average


def map_tensors(function, tree):
    """`tree`, nested lists, tuples and dicts, with function(tensor) in place of each tensor."""
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, function, tree)
