"""All private parts of PyTorch that this project uses, including some that look public but are not. If a new release
moves one, a test of this file fails, and only this file has to change."""

import functools
import inspect
import sys

import torch

# --------------------------------------------------------------------------------------- modes, transforms, compilation

# The number of active dispatch modes (such as fake tensors): if there are any, operators must go through torch.library
dispatch_modes = torch._C._len_torch_dispatch_stack

# The address of a GPU's current stream: (index of the GPU) -> int. The public way, a Stream inside torch.cuda.device,
# takes as long as launching a kernel: 0.03 ms on an H200's host
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # None in a CPU-only build

# Check a tensor's value on the GPU without waiting for the GPU, which `if` would do
assert_async = torch._assert_async


def constant_when_compiled(function):
    """torch.compiler.assume_constant_result without importing torch._dynamo, which takes 2 s of CPU at every start."""
    function._dynamo_marked_constant = True
    return function


def not_compiled(function):
    """torch.compiler.disable, applied only once torch._dynamo is imported, to save the same 2 s."""
    @functools.wraps(function)
    def run(*args, **kwargs):
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not hasattr(function, "disabled"):
            function.disabled = torch.compiler.disable(function)
        return function.disabled(*args, **kwargs)

    run._torchdynamo_disable = True  # a compiled graph breaks at this function
    return run


def allow_graphs(most):
    """Let torch.compile make up to `most` graphs of one function, and keep each in one piece.

    By default it stops after 8, but one function, Layer.forward, serves the layers of all families, short batches and
    evaluation. Inside DistributedDataParallel it would also cut a layer wherever a 25 MB bucket ends.
    """
    torch._dynamo.config.recompile_limit = max(most, torch._dynamo.config.recompile_limit)
    torch._dynamo.config.optimize_ddp = False


def transformed():
    """True inside torch.func transforms or forward-mode AD, for which the kernels have no rules."""
    return torch.autograd.forward_ad._current_level >= 0 or _in_torch_func()


@constant_when_compiled  # safe: inside torch.func tensors have another type, for which torch.compile makes a new graph
def _in_torch_func():
    return torch._C._functorch.peek_interpreter_stack() is not None


def fast_apply(function):
    """The apply of a torch.autograd.Function without its Python wrapper, which only transforms need."""
    return super(torch.autograd.Function, function).apply


# ------------------------------------------------------------------------------------------------------------ training

def never_compiled(optimizer):
    """A torch.optim class without torch.compile wrappers on its methods: they import torch._dynamo, a second of CPU at
    every start. Its steps run eagerly even if the model is compiled."""
    methods = "add_param_group", "zero_grad", "state_dict", "load_state_dict", "step"
    bare = {name: inspect.unwrap(getattr(optimizer, name)) for name in methods}
    return type(optimizer.__name__, (optimizer,), {**bare, "step": torch.no_grad()(bare["step"])})


def muon(*tensors, **settings):
    """torch.optim.Muon's step as a function of lists of tensors; the class takes whole parameters only."""
    from torch.optim._muon import muon  # imported late: exported models use this file too, and older releases lack Muon

    muon(*tensors, **settings)


def average_gradients(model, average):
    """Choose whether the next backward of a DistributedDataParallel averages gradients over processes. The public
    no_sync() would have to wrap the training loop's forward and backward."""
    model.require_backward_grad_sync = average


def will_average_gradients(model):
    """True if the next backward averages gradients over processes."""
    return getattr(model, "require_backward_grad_sync", False)


def record_averaging():
    """Let CUDA graphs also record the autograd nodes that DistributedDataParallel has since PyTorch 2.13. This changes
    the whole process."""
    if hasattr(torch.autograd.graph, "set_override_stale_capture_stream"):
        torch.autograd.graph.set_override_stale_capture_stream(True)


# Zero a list of tensors; on a GPU with a few kernels instead of one per tensor
set_to_zero = torch._foreach_zero_


def map_tensors(function, tree):
    """Apply function to every tensor in `tree`, nested lists, tuples and dicts."""
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, function, tree)
