"""A model's parameters, FLOPs, state sizes and operators, counted from outside the model.

FLOPs are counted from the formulas, not from the code that runs. A linear map with n weights costs 2 n in the forward
pass. The head counts, the embedding look-up does not. Causal attention counts only the visible half. A recurrence
counts its token-by-token form. The backward pass counts twice the forward pass; recomputation does not count.

A shared layer or map counts its parameters once, but its FLOPs and state once per use. If the model itself has an
nn.Linear of the embedding's shape, this is the head, which is then not tied. An average of the weights belongs in
buffers, which do not count. For a mixture of experts, set `active_share` (such as 2 / 8) on the module that holds the
experts: it scales the FLOPs of their maps. A map whose weight is a bare parameter has no FLOPs here: make it an
nn.Linear.
"""

import math

import torch
import torch.nn as nn

from common.errors import ConfigError
from common.old_names import nearest
from kernels import choose
from model import Branch, tensors_of, where_is


def visible(T, window):
    """Tokens that causal attention sees per token, averaged over T positions."""
    w = min(T, window or T)  # the first w tokens see 1, 2, ..., w tokens, all others w
    return (w * (w + 1) / 2 + (T - w) * w) / T


# Operator -> forward FLOPs per token of a mixer m, without its linear maps and short convolution, averaged over T
# positions. S: the size of its matrix state.
FLOPS = {
    # per state: eps k (1), x - k S (2), S += (2), S q (2); per channel: step size, skip and gate (8). The exact form
    # sums k S over the states (also 2 per state), then subtracts it from x once per channel (1)
    "longhorn_scan": lambda m, T, S: 7 * S + (8 + getattr(m, "exact", False)) * m.d_inner,
    # delta A (1), exp (1), its product (1), S += (2), S q (2); per channel as above
    "selective_scan": lambda m, T, S: 7 * S + 8 * m.d_inner,
    # q k^T and the weighted sum over the visible tokens
    "attention": lambda m, T, S: 4 * m.H * m.n * visible(T, getattr(m, "window", None)),
    # per state: a S (1), k^T v added (2), q S (2)
    "gated_linear_attention": lambda m, T, S: 5 * S,
    # the same, and per channel of a value (5): RWKV's bonus r . u k (3), times v and added (2), or Mamba-2's step size,
    # skip and gate
    "retention": lambda m, T, S: 5 * S + 5 * (m.H * m.n if hasattr(m, "bonus") else m.d_inner if hasattr(m, "skip")
                                              else 0),
    # per channel, output: bonus and maximum (2), two exponentials (4), numerator, denominator, ratio (6);
    # state: decay and maximum (2), two exponentials (4), numerator and denominator (5)
    "wkv4": lambda m, T, S: 23 * m.decay.numel(),
    # per state: k S (2), S += (2), q S (2); per value: the error and beta (2)
    "delta_rule": lambda m, T, S: 6 * S + 2 * m.H * m.n_v,
    "gated_delta_rule": lambda m, T, S: 7 * S + 2 * m.H * m.n_v,  # also a S, in KDA diag(a) S
    # per number in H: a H (1), k^T k added (2), 30 solver steps of p H (60); per number in U: 1, 2, and x U (2); per
    # channel of k: 10 in each solver step
    "mesa": lambda m, T, S: m.H * m.n * (63 * m.n + 300) + 5 * S,
}
FLOPS["kda"] = FLOPS["gated_delta_rule"]


def mixing_flops(mixer, T):
    """A mixer's forward FLOPs per token without its linear maps: from its `flops` (a number or a function of T) or its
    operator; None if it has neither."""
    flops = getattr(mixer, "flops", None)
    if flops is not None:
        try:
            return +(flops(T) if callable(flops) else flops)
        except TypeError:
            raise ConfigError(f"{where_is(type(mixer))}: flops is {flops!r}: give a number, or a function "
                              "of T") from None
    rule = FLOPS.get(getattr(mixer, "operator", None))
    if rule is None:
        return None
    tensors = initial_tensors(mixer)
    S = max(reversed(tensors), key=torch.Tensor.dim).numel() if tensors else None  # the last tensor of most dimensions
    try:
        return rule(mixer, T, S) + (2 * mixer.conv_weight.numel() if hasattr(mixer, "conv_weight") else 0)
    except (AttributeError, TypeError):  # a user's mixer that keeps no state, or has other names for its sizes
        return None


def initial_tensors(mixer):
    """The tensors of a mixer's state before the first token of one sequence; [] for a mixer without a state."""
    if not hasattr(mixer, "initial_state"):
        return []
    device = next((p.device for p in mixer.parameters()), "meta")  # the device of a learned initial state
    return tensors_of(mixer.initial_state(1, device))


def forward_flops(modules, T):
    """Forward FLOPs per token of the linear maps among `modules`, and of the mixers of the branches among them."""
    modules = list(modules)
    share = dict.fromkeys(modules, 1)
    for module in list(share):
        for inner in module.modules() if hasattr(module, "active_share") else ():
            share[inner] = share.get(inner, 1) * module.active_share
    linear = sum(2 * m.weight.numel() * share[m] for m in modules if isinstance(m, nn.Linear))
    return linear + sum((mixing_flops(m.mixer, T) or 0) * share[m] for m in modules if isinstance(m, Branch))


def flops_per_token(model, T=None):
    """FLOPs per token in a sequence of length T (default block_size): {'forward', 'backward', 'total'}. A model whose
    head does not run at every token defines its own forward_flops(T)."""
    T = T or getattr(getattr(model, "config", None), "block_size", 1)
    if hasattr(model, "forward_flops"):
        forward = model.forward_flops(T)
    else:
        embed = getattr(getattr(model, "embed", None), "weight", torch.empty(0))
        untied = any(isinstance(m, nn.Linear) and m.weight.shape == embed.shape for m in model.children())
        running = [m for _, m in model.named_modules(remove_duplicate=False)]
        forward = forward_flops(running, T) + (0 if untied else 2 * embed.numel())
    return {"forward": forward, "backward": 2 * forward, "total": 3 * forward}


# Fitted to a sweep with one shared core of an AMD EPYC (Zen 4) per run; a quiet Zen 5 takes half the time.
CPU_SECONDS_PER_TOKEN = 3.9e-5
CPU_SECONDS_PER_FLOP = 1.12e-11


def cpu_seconds(flops, tokens):
    """Seconds of training on one core."""
    return CPU_SECONDS_PER_FLOP * flops + CPU_SECONDS_PER_TOKEN * tokens


def cost_of_step(model, tokens):
    """A warning, with the way out, if a step of this many tokens takes minutes on a CPU; else ""."""
    flops = flops_per_token(model)["total"] * tokens
    threads = torch.get_num_threads()
    minutes = cpu_seconds(flops, tokens) / threads / 60
    if next(model.parameters()).device.type != "cpu" or minutes < 1:
        return ""
    return (f"a step of {tokens:,} tokens costs {flops:.2g} FLOPs, about {minutes:,.0f} minutes on {threads} core(s); "
            "for a run on a laptop: python train.py config/longhorn_laptop.py")


def parameter_count(model):
    """{part: parameters}: each class of mixers, norms, positions, the embedding (tied with the head), others and the
    total. A model's `rest` names the remaining parameters."""
    total = sum(p.numel() for p in model.parameters())
    if not hasattr(model, "branches"):
        return {"total": total}
    branches = dict(model.branches())
    rest = getattr(model, "rest", "")
    parts = {rest or "embedding": 0, "norms": 0}
    for name, p in model.named_parameters():
        branch, _, in_mixer = name.partition(".mixer.")
        if in_mixer and branch in branches:
            part = type(branches[branch].mixer).__name__
        elif name.startswith(("norm.", "embed_norm.")) or name.partition(".norm.")[0] in branches:
            part = "norms"
        elif name.startswith("positions."):
            part = "positions"
        else:
            part = rest or ("embedding" if name.startswith("embed.") else "others")
        parts[part] = parts.get(part, 0) + p.numel()
    return {**parts, "total": total}


def running_branches(model):
    """A model's branches, a shared branch once per use; [] if the model is not an LM."""
    branches = {branch for _, branch in model.branches()} if hasattr(model, "branches") else ()  # from any model.py
    return [module for _, module in model.named_modules(remove_duplicate=False) if module in branches]


def state_size(model, T=None):
    """The count of numbers kept per sequence after T tokens (default block_size), over all layers.

    It is the size of the initial state. A dimension of 0 is a cache that grows by one per token, up to `window`. A
    mixer without a state must keep its inputs to continue; its `inputs_kept(T)` says how many numbers.
    """
    T = T or model.config.block_size
    total = 0
    for branch in running_branches(model):
        mixer = branch.mixer
        if not branch.has_state:
            total += mixer.inputs_kept(T) if hasattr(mixer, "inputs_kept") else 0
            continue
        length = min(T, getattr(mixer, "window", None) or T)
        conv = getattr(mixer, "conv_weight", None)  # at width 1 its state has a dimension of 0 but is no cache
        before = None if conv is None else (1, conv.shape[1] - 1, conv.shape[0])
        for a in initial_tensors(mixer):
            total += a.numel() if a.shape == before else math.prod(n or length for n in a.shape)
    return total


def computed_by(model):
    """The operators that mix tokens and their backends: 'longhorn_scan (cpu), attention (cpu)'. Raises RuntimeError for
    a backend that cannot run here."""
    words = {}
    for branch in running_branches(model):
        device = next(model.parameters()).device.type
        operator = getattr(branch.mixer, "operator", type(branch.mixer).__name__)
        if operator in choose.BODIES:
            operator += f" ({choose.choose(operator, model.config.backend, device)})"
        words[operator] = None
    return ", ".join(filter(None, words)) or "code of its own"


def left_out(model):
    """A line per class of mixers that lacks a state or FLOPs, with the consequence."""
    lines = []
    for mixer in {type(branch.mixer): branch.mixer for branch in running_branches(model)}.values():
        operator = getattr(mixer, "operator", "")
        words = []
        if not hasattr(mixer, "initial_state"):
            words.append("no initial_state: it cannot sample")
        if operator is not None and mixing_flops(mixer, 1) is None:  # operator = None: linear maps only
            lacks = "sizes to count its operator's FLOPs" if operator in FLOPS else "operator of kernels/"
            lacks += nearest(operator, choose.BODIES)
            words.append(f"no {lacks} and no flops: FLOPs count its linear maps only")
        lines += [f"{where_is(type(mixer))} has {'; '.join(words)}"] if words else []
    return lines
