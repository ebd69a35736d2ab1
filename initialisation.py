"""Initialisation: declared where a parameter is created, drawn when the whole model is built.

    self.in_proj = linear(d, 2 * d_inner, start=uniform(d ** -0.5), parts=[d_inner, d_inner])
    self.dt_bias = parameter(d_inner, start=constant(0.0))

A start is a function that fills a tensor in place. `draw` gives each parameter its own random stream, seeded by its
name. So if you edit one parameter, all others start from the same values as before. A parameter with a start is NaN
until `draw`. Writing to it in a constructor is refused, because `draw` would overwrite it. An nn.Linear or nn.Parameter
without a start keeps its values.
"""

import itertools
import math

import numpy as np
import torch
import torch.nn as nn

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
COUNT = itertools.count()


def linear(n_in, n_out, start=None, bias=None, parts=None):
    """Return an nn.Linear(n_in, n_out). start, bias: starts of its weight and bias; bias None: no bias.

    parts: the number of rows of each map, if one matrix fuses several maps (Muon treats each map separately); None: one
    map. Raises ValueError unless the parts add up to n_out.
    """
    if parts and sum(parts) != n_out:
        raise ValueError(f"parts {parts} must add up to the {n_out} rows of the linear map")
    module = nn.Linear(n_in, n_out, bias=bias is not None)
    module.parts = parts
    if start is not None:
        to_draw(module.weight, start)
    if bias is not None:
        to_draw(module.bias, bias)
    return module


def parameter(*shape, start):
    """Return an nn.Parameter of this shape, NaN until `draw`."""
    return to_draw(nn.Parameter(torch.empty(shape)), start)


def to_draw(p, start):
    """Fill the parameter p with NaN until `draw`, and return it. Raises ValueError unless start is a function.

    Each parameter gets a NaN with bits of its own. Any arithmetic changes these bits, even p.data.mul_(0.5), so `draw`
    can tell if p was written to.
    """
    if not callable(start):
        raise ValueError(f"start={str(start)[:40]} is not a function of the parameter: give one, such as constant(0.0)")
    steps = 0.25 / torch.finfo(p.dtype).eps
    p.undrawn = int(next(COUNT) % steps - 3 * steps)
    bits_of(p).fill_(p.undrawn)
    p.start = start
    return p


def bits_of(p):
    """A view of p as integers."""
    return p.data.view(INTEGERS[p.element_size()])


def seed_device(tensor, seed):
    """torch.manual_seed(seed), but only on the CPU if the tensor is there. For each unused device PyTorch would format
    the stack, which takes 0.4 ms or more."""
    (torch.default_generator if tensor.is_cpu else torch).manual_seed(seed)


@torch.no_grad()
def draw(model, seed):
    """Fill every parameter that has a start, each from its random stream of (seed, name). seed: a tensor () of int64;
    on the meta device nothing is drawn. Raises ValueError if a parameter has already been written to."""
    if seed.is_meta:
        return
    before = torch.get_rng_state()
    for name, p in model.named_parameters():
        start = getattr(p, "start", None)
        if start is not None:
            if (bits_of(p) != p.undrawn).any():
                raise ValueError(f"{place(model, name)} has been written to, but its start would overwrite that: "
                                 "write start=..., or drop one of the two")
            stream = int(np.random.SeedSequence([seed.item(), *name.encode()]).generate_state(1)[0])
            seed_device(p, stream)
            start(p)
            del p.start  # it may keep a tensor alive
    torch.set_rng_state(before)


def place(model, name):
    """Name a parameter by its mixer's class, or the model's: 'GLA.out_proj.weight'."""
    branch, _, inner = name.rpartition(".mixer.")
    module = model.get_submodule(f"{branch}.mixer") if branch else model
    return f"{type(module).__name__}.{inner}"


# -------------------------------------------------------------------------------------------------------------- starts

def constant(value):
    return lambda p: p.fill_(value)


def normal(std):
    return lambda p: p.normal_(0.0, std)


def uniform(bound):
    """Uniform in +-bound."""
    return lambda p: p.uniform_(-bound, bound)


def values(tensor):
    return lambda p: p.copy_(tensor)


def arange(*args):
    """torch.arange in float64, on the CPU: on the meta device it imports torch._dynamo, which takes 2 s."""
    return torch.arange(*args, dtype=torch.float64, device="cpu")


def log_uniform(low, high):
    """The logarithm of a number drawn uniformly from low .. high (at least 1e-4)."""
    return lambda p: p.uniform_(low, high).clamp_(min=1e-4).log_()


def step_size(low, high):
    """Mamba's dt_bias: its softplus is log-uniform in low .. high (at least 1e-4)."""
    def start(p):
        step = p.uniform_(math.log(low), math.log(high)).exp().clamp(min=1e-4)
        p.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
    return start


def dense(fan_in):
    """PyTorch's default for a linear map: uniform in +-1/sqrt(fan_in)."""
    return uniform(fan_in**-0.5)


def xavier(fan_out, fan_in, gain):
    """Glorot's uniform distribution for a map (fan_out, fan_in), times `gain`."""
    return uniform(gain * math.sqrt(6 / (fan_in + fan_out)))


def to_residual(config):
    """GPT-2's scale for maps that write to the residual stream. It keeps the stream's variance from growing with the
    number of branches."""
    return normal(0.02 / math.sqrt(config.n_branches))
