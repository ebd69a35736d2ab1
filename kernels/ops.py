"""Memory-bound operators: short convolution, RMSNorm, softmax attention, head and loss.

    causal_conv1d            y_t = silu(b + sum_i w_i x_{t - W + 1 + i})      Mamba, Longhorn
    rms_norm                 y = x / sqrt(mean(x^2) + eps) * w                every family
    attention                softmax(q k^T / sqrt(n)) v                       LLaMA
    linear_cross_entropy     mean of -log softmax(x W^T)[target]              head and loss in one operator

The first two have CPU kernels in conv_norm.cu, because eager PyTorch transposes for the convolution and passes over
memory seventeen times for the norm. The convolution also has a GPU kernel. The loss uses PyTorch's operators in an
order that needs a sixth of the memory; on a GPU it is one kernel, in loss.cu. Code that all operators share is here
too: checks, documents, loops in pieces.

    python -m pytest tests/test_conformance.py tests/test_ops.py
"""

import contextlib
import functools
import inspect

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from common import torch_private
from kernels import build, choose, cuda, fused, launch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PIECE = 64  # a loop over time keeps a state every PIECE steps, from which the backward recomputes
WINDOW_QUERIES = 64  # attention with a window processes at least this many queries at a time
# Logits that PyTorch's loss takes at once. In float32 this many fit in a CPU core's cache; on a GPU they take 2 GB.
LOGITS_AT_ONCE = {"cpu": 2**20, "cuda": 2**28}
LOSS_SUMS = 256  # bytes of shared memory that the loss kernel needs besides a row; SUMS of loss.cu


def check_tensor(op, name, a, floats=True):
    """Raises ValueError unless `a` is a strided tensor, of a floating-point dtype if `floats`."""
    if not isinstance(a, Tensor):
        raise ValueError(f"{op}: {name} must be a torch.Tensor, got {type(a).__name__}")
    if a.layout != torch.strided or a.is_nested:
        raise ValueError(f"{op}: {name} must be a strided tensor, got {'nested' if a.is_nested else a.layout}")
    if floats and a.dtype not in FLOATS:
        raise ValueError(f"{op}: {name} must be floating point of 16, 32 or 64 bits, got {a.dtype}")


def check_shapes(op, beside, device, wanted, optional=()):
    """Raises ValueError unless every tensor is floating point, has its wanted shape and is on this device. wanted:
    {name: (tensor, shape)}; tensors named in `optional` may be None. beside: the shapes that determine `wanted`, for
    the message."""
    for name, (a, shape) in wanted.items():
        if a is None and name in optional:
            continue
        check_tensor(op, name, a)
        if tuple(a.shape) != shape:
            raise ValueError(f"{op}: {name} must be {shape} for {beside}, got {tuple(a.shape)}")
        if a.device != device:
            raise ValueError(f"{op}: {name} is on {a.device}, {beside.split()[0]} on {device}: move them to one device")


@torch_private.not_compiled  # unrolled over time, its graph would have thousands of nodes per layer
def in_pieces(loop, timed, state):
    """Run loop(*timed, state) -> (y, final state) in pieces of PIECE steps. The backward recomputes a piece at a time.

    timed: tensors (B, T, ...) or None. Only the inputs and the states between pieces are kept for the backward.
    """
    T, ys = timed[0].shape[1], []
    # torch.func has no checkpoints
    recompute = torch.is_grad_enabled() and T > PIECE and not torch_private.transformed()
    for t in range(0, T, PIECE):
        part = [None if a is None else a[:, t:t + PIECE] for a in timed]
        y, state = checkpoint(loop, *part, state, use_reentrant=False) if recompute else loop(*part, state)
        ys.append(y)
    return (torch.cat(ys, 1), state) if ys else loop(*timed, state)


# ---------------------------------------------------------------------------------------------------------- documents

class Documents:
    """Where documents begin in rows of tokens. starts: (B, T), True at each document's first token."""

    def __init__(self, starts):
        first_column = torch.zeros(1, dtype=torch.long, device=starts.device)
        self.starts = starts.index_fill(1, first_column, True)  # each row begins a document
        first = self.starts.flatten().nonzero()[:, 0]  # (S,)
        self.cu_seqlens = F.pad(first, (0, 1), value=starts.numel())  # (S + 1,) in the concatenated rows

    def head(self, n):
        """(positions in the concatenated rows, positions in their documents) of each document's first n tokens."""
        offset = torch.arange(n, device=self.starts.device)
        position = self.cu_seqlens[:-1, None] + offset  # (S, n)
        inside = position < self.cu_seqlens[1:, None]
        return position[inside], offset.expand_as(position)[inside]


_documents = None


class documents:
    """In this context every operator called without a state starts from an empty state where starts (B, T) is True. If
    starts is None, it reads rows straight through. Mixers need no code for it. A backward needs this context only if it
    recomputes the forward (`same_documents`)."""

    def __init__(self, starts):
        self.documents = None if starts is None else Documents(starts)

    def __enter__(self):
        global _documents
        self.before, _documents = _documents, self.documents

    def __exit__(self, *error):
        global _documents
        _documents = self.before


def same_documents():
    """A context_fn for torch.utils.checkpoint: returns the contexts for a forward and for its recomputation."""
    return contextlib.nullcontext(), documents(None if _documents is None else _documents.starts)


def documents_of(x):
    """The Documents of x (B, T, ...), or None. Raises ValueError if x and the documents differ in (B, T)."""
    if _documents is not None and x.shape[:2] != _documents.starts.shape:
        raise ValueError(f"the documents have rows {tuple(_documents.starts.shape)}, but an operator got rows "
                         f"{tuple(x.shape[:2])}: use --documents=join")
    return _documents


@torch_private.not_compiled
def by_document(f, tensors, packed):
    """Apply f to each document's tensors (1, its length, ...) and concatenate the results; absent tensors are None.
    Simple, and slow if documents are short."""
    lengths = packed.cu_seqlens.diff().tolist()
    parts = [[None] * len(lengths) if a is None else a.flatten(0, 1).split(lengths) for a in tensors]
    ys = [f(*(None if a is None else a[None] for a in part)) for part in zip(*parts, strict=True)]
    return torch.cat(ys, 1).unflatten(1, packed.starts.shape)[0]


def differentiable(name, forward, backward, fake, tensors, results=1, half=None, twice=False):
    """Register `forward` as the custom op longhorn::name, differentiable once, through `backward`.

    Args:
        tensors: the first `tensors` arguments of forward have gradients; absent tensors are None.
        results: the first `results` results of forward have gradients. The other results, which may be None, are kept
            for the backward.
        backward: backward(*gradients of results, *forward's arguments, *kept) returns a gradient shaped like each of
            the tensors, None for absent tensors.
        half: the index of a tensor that may be one of `halves`. backward then takes a last argument, `into`: None, or
            the memory for that tensor's gradient, which is then not returned.
        twice: the one result may be used `again`; backward then takes a second gradient of it, or None.
        fake: forward for shapes only.

    Returns the function to call. In plain eager mode it calls forward and backward from an autograd.Function, because
    the dispatcher makes a call take about half as long again. A compiled graph holds name_forward and name_backward,
    without gradients of their own: torch.library would check in Python in each call whether gradients are wanted.
    """
    names = results + twice
    fake_backward = lambda *args: fake_gradients(args[names:names + tensors], half, args[0], args[-1])
    run_forward = body_or_op(f"longhorn::{name}_forward", forward, fake)
    run_backward = body_or_op(f"longhorn::{name}_backward", backward, fake_backward)

    class Gradient(torch.autograd.Function):
        """The backward, which refuses to be differentiated itself."""

        @staticmethod
        def forward(ctx, *args):
            return run_backward(*args)

        @staticmethod
        def backward(ctx, *grads):
            raise RuntimeError(f"{name}: the kernels are differentiable once: use backend='torch'")

    class Operator(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            output = run_forward(*args)
            kept = output[results:] if isinstance(output, tuple) else ()
            ctx.others = [None if isinstance(a, Tensor) else a for a in args]
            ctx.save_for_backward(*[a if isinstance(a, Tensor) else None for a in args], *kept)
            ctx.mark_non_differentiable(*[a for a in kept if a is not None])
            ctx.set_materialize_grads(False)
            return (output, output.detach()) if twice else output

        @staticmethod
        def backward(ctx, *grads):
            saved, n = ctx.saved_tensors, len(ctx.others)
            if all([g is None for g in grads[:names]]):
                return (None,) * n
            inputs = [a if other is None else other for a, other in zip(saved, ctx.others, strict=False)]
            dy = torch.zeros_like(inputs[0]) if grads[0] is None else grads[0]
            run = Gradient.apply if torch.is_grad_enabled() else run_backward
            into = memory_of(inputs, half)
            gradients = run(dy, *grads[1:names], *inputs, *saved[n:], *into)
            gradients = [None if a is None else g for a, g in zip(inputs, gradients, strict=False)]
            if into and into[0] is not None:
                gradients[half] = into[0]
            return *gradients, *[None] * (n - tensors)

    def named(apply):
        """`apply`, with its second result stored in the first, for `again`."""
        def run(*args):
            output, second = apply(*args)
            output.second_name = second
            return output

        return run if twice else apply

    apply = named(torch_private.fast_apply(Operator))
    op = custom_op(f"longhorn::{name}", forward, named(Operator.apply), "CompositeImplicitAutograd")

    def run(*args):
        if not is_plain(args[0]):
            return op(*args)
        return apply(*args) if torch.is_grad_enabled() else forward(*args)

    return run


def memory_of(tensors, half):
    """(into,) for a backward that takes that argument, else (): see `half` in `differentiable`."""
    return () if half is None else (half_of_gradient(tensors[half]),)


def fake_gradients(tensors, half, dy, into):
    like = lambda a: None if a is None else torch.empty_like(a, memory_format=torch.contiguous_format)
    gradients = [like(a) for a in tensors]
    if half is not None and into is not None:
        gradients[half] = None
    return tensors_only(dy, tuple(gradients))


def custom_op(qualname, body, run, key="default"):
    """Register `run` as the custom op `qualname` with the signature of `body`, which may write to `into`. Returns the
    op."""
    writes = inspect.signature(body).parameters.keys() & {"into"}
    schema = torch.library.infer_schema(body, mutates_args=writes)
    torch.library.define(qualname, schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.impl(qualname, key, run)
    namespace, name = qualname.split("::")
    return getattr(getattr(torch.ops, namespace), name).default


def body_or_op(qualname, body, fake):
    """Return a function that calls `body` in plain eager mode, and otherwise a custom op of it, without a gradient."""
    op = custom_op(qualname, body, lambda *args: tensors_only(args[0], body(*args)))
    torch.library.register_fake(qualname, fake)
    return lambda *args: (body if is_plain(args[0]) else op)(*args)


def is_plain(a):
    """True if a is an ordinary tensor in plain eager mode (no compile, no modes). No kernel is chosen in transforms."""
    return (type(a) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()
            and not torch_private.dispatch_modes())


def tensors_only(like, tensors):
    """Replace None by an empty tensor: a custom op can only return tensors."""
    empty = lambda a: torch.empty(0, device=like.device) if a is None else a
    return tensors if isinstance(tensors, Tensor) else tuple(map(empty, tensors))


# --------------------------------------------------------------- gradients of two halves, and of a result used again

def halves(both: Tensor) -> tuple[Tensor, Tensor]:
    """both.chunk(2, -1), without a copy in the backward if the halves go straight into operators. The operators write
    their gradients to one buffer, which becomes the gradient of `both`."""
    if not torch.is_grad_enabled() or torch_private.transformed():
        return both.chunk(2, -1)
    return (_Halves.apply if is_plain(both) else _halves_op)(both)


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, both):
        ctx.size, ctx.halves_buffer = both.shape, None
        return both.chunk(2, -1)

    @staticmethod
    def backward(ctx, *grads):
        buffer, ctx.halves_buffer = ctx.halves_buffer, None
        if buffer is not None and list(map(id, grads)) == list(map(id, buffer[1])):
            return buffer[0]
        return torch.cat(grads, -1)


_halves_op = custom_op("longhorn::halves", halves, _Halves.apply, "CompositeImplicitAutograd")


def half_of_gradient(a):
    """The memory for the gradient of `a` (a tensor or None), if `a` is one of `halves`: half of a buffer. It is handed
    out only once, so nobody else writes there. None: the caller has to allocate the gradient."""
    node = getattr(a, "grad_fn", None)
    # on a CPU the kernels compute float16 in float32
    if torch.is_grad_enabled() or not hasattr(node, "halves_buffer") or (a.dtype, a.is_cpu) == (torch.float16, True):
        return None
    if node.halves_buffer is None:
        whole = a.new_empty(node.size)
        parts = whole.chunk(2, -1)
        node.halves_buffer = whole, parts, dict(enumerate(parts))
    return node.halves_buffer[2].pop(a.output_nr, None)


def again(x: Tensor) -> Tensor:
    """Return x for its second use. Autograd would add the gradients of the two uses in an extra kernel. If x comes
    straight out of a convolution, the convolution's backward gets the two gradients separately and adds them as it
    reads them. A hook on x then sees only the gradient of the first use."""
    return (_second_name if is_plain(x) else _again_op)(x)


def _second_name(x):
    second = getattr(x, "second_name", x)
    return second if second.grad_fn is x.grad_fn else x  # different: x was changed in place


_again_op = custom_op("longhorn::again", again, _second_name, "CompositeImplicitAutograd")


def flip(a, reverse, *dims):
    """`a` flipped in dims if `reverse`; None stays None."""
    return a.flip(dims) if reverse and a is not None else a


# -------------------------------------------------------------------------------------------------- short convolution

def causal_conv1d(x, weight, bias=None, state=None, silu=True, reverse=False, backend=None):
    """The short depthwise causal convolution before the scan, with its SiLU: y_t = silu(b + sum_i w_i x_{t-W+1+i}).

    Args:
        x: (B, T, D) float32, bfloat16 or float16 (float64: runs in PyTorch); weight: (D, W), W >= 1; bias: (D,).
        state: (B, W - 1, D), the inputs before the first step; None for zeros.
        silu: apply SiLU to the result.
        reverse: run from the last step to the first, as if x were flipped in T and y flipped back.
        backend: as for `longhorn_scan`. 'fused' calls causal-conv1d, but the native kernel if there is a state, if W is
            not 2 to 4, or if D or a stride is not a multiple of 8. On a GPU, call causal_conv1d once before capturing
            a CUDA graph.

    Returns:
        y (B, T, D) in x's dtype, differentiable once. `conv_state(x, state, W)` is the state after the last step.
    """
    _check_conv(x, weight, bias, state)
    x = x.to(choose.compute_dtype(x))
    W = weight.shape[1]
    if backend == "fused":  # checked only here: under torch.compile a stride may not be a number
        in_eights = all(n % 8 == 0 for n in (x.shape[2], *x.stride()[:2]))
        if state is not None or not 2 <= W <= 4 or not in_eights:
            backend = None
    cannot = f"the kernels take convolutions up to width {build.MAX_WIDTH}" if W > build.MAX_WIDTH else None
    chosen = choose.choose("causal_conv1d", backend, x.device.type, x.dtype, cannot)
    packed = documents_of(x)
    if state is not None:
        packed = None  # a row that continues is one document
    if packed is not None and chosen == "torch":
        return by_document(lambda x: _conv_torch(x, weight, bias, None, silu), [x], packed)
    if chosen == "torch":
        return flip(_conv_torch(flip(x, reverse, 1), weight, bias, state, silu), reverse, 1)
    if chosen == "fused":
        y = flip(_conv_fused(flip(x, reverse, 1), weight, bias, silu), reverse, 1)
    else:
        y = _conv_op(x, launch.cast(weight), launch.cast(bias), launch.cast(state), silu, reverse)
    return y if packed is None else _conv_anew(y, x, weight, bias, silu, packed)


def _check_conv(x, weight, bias, state):
    check_tensor("causal_conv1d", "x", x)
    check_tensor("causal_conv1d", "weight", weight)
    if x.dim() != 3 or weight.dim() != 2 or weight.shape[1] < 1:
        raise ValueError("causal_conv1d: x must be (B, T, D) and weight (D, W) with W at least 1, got x "
                         f"{tuple(x.shape)}, weight {tuple(weight.shape)}")
    B, _, D = x.shape
    W = weight.shape[1]
    check_shapes("causal_conv1d", f"x {tuple(x.shape)}", x.device, optional=("bias", "state"), wanted={
        "weight": (weight, (D, W)), "bias": (bias, (D,)), "state": (state, (B, W - 1, D))})


@torch_private.not_compiled  # the number of documents differs from batch to batch
def _conv_anew(y, x, weight, bias, silu, packed):
    """y, with the first W - 1 outputs of each document recomputed from that document's tokens only."""
    W = weight.shape[1]
    position, offset = packed.head(W - 1)  # (n,), (n,)
    back = torch.arange(W - 1, -1, -1, device=x.device)  # how far back each tap reads
    source = (position[:, None] - back).clamp(min=0)  # (n, W)
    rows = x.flatten(0, 1).index_select(0, source.flatten()).unflatten(0, source.shape)  # (n, W, D)
    head = torch.einsum("nwd,dw->nd", (rows * (back <= offset[:, None])[..., None]).to(weight.dtype), weight)
    head = head if bias is None else head + bias
    head = (F.silu(head) if silu else head).to(y.dtype)
    return y.flatten(0, 1).index_copy(0, position, head).view_as(y)


def _conv_torch(x, weight, bias, state, silu):
    (B, _, D), W = x.shape, weight.shape[1]
    padded = torch.cat([x.new_zeros(B, W - 1, D) if state is None else state.to(x.dtype), x], 1)
    bias = None if bias is None else bias.to(x.dtype)
    y = F.conv1d(padded.transpose(1, 2), weight[:, None].to(x.dtype), bias, groups=D)
    y = y.transpose(1, 2).contiguous()  # the scan reads it in its forward and backward
    return F.silu(y) if silu else y


@torch_private.not_compiled  # a C++ extension, opaque to the compiler
def _conv_fused(x, weight, bias, silu):
    y = fused.call("causal_conv1d", x.transpose(1, 2), weight, bias, activation="silu" if silu else None)
    return y.transpose(1, 2)


def conv_state(x, state, W):
    """The state for the next call: the last W - 1 inputs (B, W - 1, D) of `state` (or zeros) followed by x (B, T, D).

    It is a copy, so keeping the state does not keep all of x alive.
    """
    if x.shape[1] >= W - 1:
        return x[:, x.shape[1] - W + 1:].clone()
    if state is None:
        state = x.new_zeros(x.shape[0], W - 1, x.shape[2])
    return torch.cat([state.to(x.dtype), x], 1)[:, x.shape[1]:]


def _conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, silu: bool, reverse: bool) -> Tensor:
    kernels = launch.Kernels(build.ConvArgs, x, W=weight.shape[1], silu=int(silu))
    kernels.reversed, state = reverse, flip(state, reverse, 0)
    y = launch.empty(x, *x.shape, dtype=kernels.dtype)
    kernels("causal_conv_forward", {"x": x}, {"weight": weight, "bias": bias, "state": state}, y=y)
    return y.to(x.dtype)


def _conv_fake(x, weight, bias, state, silu, reverse):
    return launch.empty(x, *x.shape, dtype=x.dtype)


def _conv_backward(dy: Tensor, dy_again: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None,
                   state: Tensor | None, silu: bool, reverse: bool,
                   into: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias, dstate) for the gradient dy + dy_again. dbias and dstate are None without a bias or state;
    dx is None if it was written to `into`."""
    (B, T, D), W = x.shape, weight.shape[1]
    kernels = launch.Kernels(build.ConvArgs, x, W=W, silu=int(silu))
    kernels.reversed, rows, state = reverse, B * kernels.segments, flip(state, reverse, 0)
    dx = launch.empty(x, B, T, D, dtype=kernels.dtype) if into is None else into
    dweight = launch.empty(x, rows, W, D)
    dbias = launch.empty(x, rows, D) if bias is not None else None
    dstate = torch.zeros(state.shape, device=x.device) if state is not None else None  # zeros: T may be 0
    if dy_again is not None and kernels.dtype != dy.dtype:
        dy, dy_again = dy + dy_again, None  # in float16, which the kernels on a CPU do not have
    kernels("causal_conv_backward", {"x": x, "dy": dy, "dy_again": dy_again},
            {"weight": weight, "bias": bias, "state": state}, dx=dx, dweight=dweight, dbias=dbias, dstate=dstate)
    dweight, dbias = launch.sums([dweight, dbias], [torch.float32] * 2, columns=W)
    return dx.to(x.dtype) if into is None else None, dweight, dbias, flip(dstate, reverse, 0)


_conv_op = differentiable("causal_conv1d", _conv, _conv_backward, _conv_fake, tensors=4, half=0, twice=True)


# ------------------------------------------------------------------------------------------------------------ RMSNorm

def rms_norm(x, weight, eps=1e-5, backend=None):
    """Root mean square norm over the last dimension: x / sqrt(mean(x^2) + eps) * weight.

    The native kernel takes float32 and bfloat16 on a CPU; everything else runs PyTorch's F.rms_norm.

    Args: x (..., D); weight (D,).
    Returns: (..., D) in x's dtype, differentiable once. Under autocast it has autocast's dtype (float64 stays), because
    the linear map that follows would cast it anyway.
    """
    check_tensor("rms_norm", "x", x)
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"rms_norm: x must be (..., D) with D at least 1, got {tuple(x.shape)}")
    check_shapes("rms_norm", f"x {tuple(x.shape)}", x.device, {"weight": (weight, tuple(x.shape[-1:]))})
    out = choose.compute_dtype(x)
    native = x.device.type == "cpu" and {x.dtype, out} <= {torch.float32, torch.bfloat16}
    if not native or choose.choose("rms_norm", backend, "cpu") == "torch":
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps).to(out)
    return _rms_norm_op(x, weight.float(), eps, out)[0]


def _norm_args(x, dtype, eps):
    rows = x.numel() // x.shape[-1]
    tasks = min(rows, 64)  # fixed, so dweight's sum over rows does not depend on the number of threads
    is_bf16 = [int(t == torch.bfloat16) for t in (x.dtype, dtype)]
    return build.NormArgs(rows=rows, D=x.shape[-1], tasks=tasks, threads=torch.get_num_threads(), x_dtype=is_bf16[0],
                          y_dtype=is_bf16[1], eps=eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(y, 1 / root mean square of each row)."""
    args, x, weight = _norm_args(x, dtype, eps), x.contiguous(), weight.contiguous()
    y, rstd = launch.empty(x, *x.shape, dtype=dtype), launch.empty(x, *x.shape[:-1])
    build.library().rms_norm_forward_cpu(launch.point(args, x=x, weight=weight, y=y, rstd=rstd))
    return y, rstd


def _rms_norm_fake(x, weight, eps, dtype):
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype,
                       rstd: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dweight)."""
    args, x, dy, weight = _norm_args(x, dy.dtype, eps), x.contiguous(), dy.contiguous(), weight.contiguous()
    dx, dweight = launch.empty(x, *x.shape, dtype=x.dtype), launch.empty(x, args.tasks, args.D)
    pointers = launch.point(args, x=x, dy=dy, weight=weight, rstd=rstd, dx=dx, dweight=dweight)
    build.library().rms_norm_backward_cpu(pointers)
    return dx, dweight.sum(0)


_rms_norm_op = differentiable("rms_norm", _rms_norm, _rms_norm_backward, _rms_norm_fake, tensors=2)


# ---------------------------------------------------------------------------------------------------------- attention

def attention(q, k, v, window=None, backend=None):
    """Causal softmax attention: softmax(q k^T / sqrt(n)) v; query t of T sees the keys up to position past + t.

    Args:
        q: (B, H, T, n); k, v: (B, H, past + T, n), past >= 0, in any floating-point dtype.
        window: how many keys a query sees, including its own; None: all up to its own.
        backend: 'torch' (a plain softmax, in float32 for half types), 'cpu' or 'cuda' (PyTorch's
            scaled_dot_product_attention), 'fused' (flash-attn: bfloat16 and float16 on a GPU); None or "": PyTorch's.

    Returns: (B, H, T, n) in v's dtype, or autocast's.
    Raises ValueError for mismatched shapes, RuntimeError for a backend that cannot run here.
    """
    _check_attention(q, k, v, window)
    packed = documents_of(q.transpose(1, 2)) if q.shape == k.shape else None
    if packed is not None:
        swap = lambda *tensors: [a.transpose(1, 2) for a in tensors]
        with documents(None):
            one_document = lambda *rows: attention(*swap(*rows), window=window, backend=backend).transpose(1, 2)
            return by_document(one_document, swap(q, k, v), packed).transpose(1, 2)
    chosen = choose.choose("attention", backend, q.device.type, q.dtype)
    if chosen == "torch":
        return _softmax_attention(q, k, v, window)
    if chosen == "fused":
        q, k, v = (a.transpose(1, 2) for a in (q, k, v))
        seen = {} if window is None else {"window_size": (window - 1, 0)}
        return fused.call("attention", q, k, v, causal=True, **seen).transpose(1, 2)
    T, past = q.shape[2], k.shape[2] - q.shape[2]
    if window is not None and window < k.shape[2]:
        return torch.cat([_windowed(q, k, v, window, i) for i in range(0, T, max(window, WINDOW_QUERIES))], 2)
    mask = _visible(T, past, q.device) if past and T > 1 else None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and T > 1)


def _check_attention(q, k, v, window):
    for name, a in (("q", q), ("k", k), ("v", v)):
        check_tensor("attention", name, a)
    fits = q.dim() == k.dim() == 4 and q.shape[2] <= k.shape[2] and k.shape == v.shape
    if not fits or (q.shape[:2], q.shape[3]) != (k.shape[:2], k.shape[3]):
        raise ValueError("attention: q must be (B, H, T, n), k and v (B, H, past + T, n), got q "
                         f"{tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if window is not None and window < 1:
        raise ValueError(f"attention: window must be at least 1, got {window}")


def _windowed(q, k, v, window, i):
    """Attention of max(window, WINDOW_QUERIES) queries, from i on, to all keys that they see."""
    q, last = q[:, :, i:i + max(window, WINDOW_QUERIES)], k.shape[2] - q.shape[2] + i  # last: the key of query i
    keys = slice(max(0, last - window + 1), last + q.shape[2])
    k, v, T = k[:, :, keys], v[:, :, keys], q.shape[2]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=_visible(T, k.shape[2] - T, q.device, window))


def _softmax_attention(q, k, v, window):
    T, S = q.shape[2], k.shape[2]
    scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5  # (B, H, T, S)
    scores = scores.masked_fill(~_visible(T, S - T, q.device, window), -torch.inf)
    return scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(v.dtype) @ v


def _visible(T, past, device, window=None):
    seen = torch.ones(T, past + T, dtype=torch.bool, device=device).tril(past)
    return seen if window is None else seen.triu(past - window + 1)


# ------------------------------------------------------------------------------------------------------ head and loss

def linear_cross_entropy(x, weight, targets, backend=None):
    """The head and its loss: the mean over the targets of -log softmax(x W^T)[target], in nats.

    F.cross_entropy(F.linear(x, weight).float(), ...) takes 12 bytes per logit at its peak. This computes the softmax in
    float32, a few rows at a time, and overwrites the logits with their gradient: 2 bytes per logit in bfloat16. It
    stores the gradient of the sum, because the gradient of the mean may underflow in float16; the backward divides.

    Args:
        x: (..., D); weight: (V, D); both cast to autocast's dtype, or without autocast to x's.
        targets: (...) int64 in [0, V), or -1 for positions without a loss.
        backend: 'torch' runs F.cross_entropy on float32 logits (float64 for float64 inputs).

    Returns: the loss, a float32 scalar (float64 for float64 x), differentiable once. It is nan, with zero gradients, if
    every target is ignored.
    Raises ValueError for mismatched shapes, and PyTorch's own error for a target outside the vocabulary.
    """
    check_tensor("linear_cross_entropy", "x", x)
    check_tensor("linear_cross_entropy", "weight", weight)
    check_tensor("linear_cross_entropy", "targets", targets, floats=False)
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1] or targets.shape != x.shape[:-1]:
        raise ValueError("linear_cross_entropy: x must be (..., D), weight (V, D) and targets (...), got x "
                         f"{tuple(x.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}")
    dtype = choose.compute_dtype(x)
    if choose.choose("linear_cross_entropy", backend, x.device.type) == "torch":
        return cross_entropy(F.linear(x.to(dtype), weight.to(dtype)), targets)
    train = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    x, targets = x.reshape(-1, x.shape[-1]), targets.reshape(-1)
    return _LinearCrossEntropy.apply(x, weight, targets, dtype, train)


def loss_of_slice(logits, targets, train):
    """Return the log-probabilities of the targets, (n,). With `train`, overwrite logits (n, V) with the gradient of the
    loss summed over the rows."""
    log_softmax = torch.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
    log_p = log_softmax.gather(1, targets[:, None])
    if train:
        logits.copy_(log_softmax.exp_())
        logits.scatter_(1, targets[:, None], (log_p.exp() - 1).to(logits.dtype))
    return log_p[:, 0]


@functools.cache
def loss_module(dtype, V, device):
    """The GPU kernel for rows of V logits of `dtype`. None on other devices, for float64, and if the kernels cannot
    run here (a line says why). Raises OSError if it cannot be built."""
    if device.type != "cuda" or dtype not in choose.DTYPES:
        return None
    reason = choose.unavailable("cuda")
    if reason is not None:
        build.say_once(f"linear_cross_entropy: runs in PyTorch's kernels, which takes longer ({reason})")
        return None
    shared = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return launch.gpu_module("loss", dtype, (loss_room(dtype, V, shared),), device)


def loss_room(dtype, V, shared):
    """Bytes of shared memory for the whole pieces of a row; 0 if a multiprocessor with `shared` bytes has no room for
    them."""
    room = -(-V * dtype.itemsize // 16) * 16
    return room if room + LOSS_SUMS + cuda.RESERVED <= shared else 0


def log_probabilities(logits, targets, train):
    """`loss_of_slice` in one GPU kernel if possible. It moves 4 bytes per 16-bit logit; PyTorch's five kernels move 20.
    """
    V = logits.shape[1]
    module = loss_module(logits.dtype, V, logits.device) if is_plain(logits) else None
    if module is None:
        rows = max(1, LOGITS_AT_ONCE.get(logits.device.type, 2**25) // V)
        parts = zip(logits.split(rows), targets.split(rows), strict=True)
        return torch.cat([loss_of_slice(*part, train) for part in parts])
    log_p = logits.gather(1, targets[:, None])[:, 0].float()  # PyTorch's own error for a target outside the vocabulary
    args = build.LossArgs(V=V, stride=logits.stride(0), train=int(train))
    launch.point(args, logits=logits, targets=targets, log_p=log_p)
    if len(logits):
        launch.in_stream(logits.device, functools.partial(module.launch, "loss_kernel", len(logits), args))
    return log_p


def cross_entropy(logits, targets):
    """The loss of `linear_cross_entropy` from its logits (..., V): F.cross_entropy in float32 (float64 for float64)."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, -2), targets.flatten(), ignore_index=-1)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, dtype, train):
        ctx.dtypes, x, weight = (x.dtype, weight.dtype), x.to(dtype), weight.to(dtype)
        counts = targets != -1
        logits = x @ weight.t()  # (n, V); overwritten with their gradient
        log_p = log_probabilities(logits, torch.where(counts, targets, 0), train)
        ctx.count = counts.sum()
        if train:
            ctx.save_for_backward(x, weight, logits, counts)
        return -torch.where(counts, log_p, 0).sum() / ctx.count

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():  # create_graph: once_differentiable would silently drop some second derivatives
            raise RuntimeError("linear_cross_entropy: it is differentiable once: use backend='torch'")
        x, weight, dlogits, counts = ctx.saved_tensors
        dx = dweight = None
        # The mean's factor stays in float32: rounding it to bfloat16 would scale all gradients by up to 0.4%. Its power
        # of two, which is exact, goes into x: otherwise a sum over rows could overflow in float16.
        factor = grad / ctx.count.clamp(min=1)
        power = torch.ldexp(torch.ones_like(factor), torch.frexp(factor).exponent)
        if ctx.needs_input_grad[0]:
            dx = ((dlogits @ weight) * torch.where(counts, factor, 0)[:, None]).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            x = (x * torch.where(counts, power, 0)[:, None]).to(x.dtype)
            dweight = ((dlogits.t() @ x).to(factor.dtype) * (factor / power)).to(ctx.dtypes[1])
        return dx, dweight, None, None, None
