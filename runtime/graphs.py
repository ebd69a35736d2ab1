"""Replays a micro-batch's forward, loss and backward as one CUDA graph, for when Python is slower than the GPU.

    python train.py config/longhorn_120m.py --compile --micro_batch_size=8 --graphs

A graph reads x and y from fixed tensors, and adds gradients at fixed addresses. Clipping and the optimiser's step stay
outside. A micro-batch whose shape or weight differs from the first one's is not replayed. With ddp, neither is the last
micro-batch of each step, whose backward averages gradients.

The first micro-batch is both computed and replayed, and the losses must be equal. If its loss or gradients are not
finite, the first micro-batch of the next step is recorded instead.
"""

import torch
from torch import cuda
from torch.nn.parallel import DistributedDataParallel

from common import torch_private
from common.errors import ConfigError, is_out_of_memory
from runtime import checkpoint, distributed

GPU = "cuda"
WARM_UPS = 3  # micro-batches before a graph is recorded, in which libraries load, compile and tune
TOLERANCE = 1e-3  # relative to the gradients' norm: PyTorch's attention sums in no fixed order


def replayed(compute, model, config, say=distributed.say):
    """Return `compute`, or a Graph of it with config.graphs. compute(x, y, weight) returns the loss and adds to the
    model's gradients. If graphs cannot be used, `say` gets the reason."""
    if not config.graphs:
        return compute
    reason = why_not(model, config)
    if reason:
        say(f"graphs: off: {reason}")
        return compute
    return Graph(compute, model)


def why_not(model, config):
    """Return why micro-batches cannot be replayed and what to change, or None if they can."""
    tokens = config.micro_batch_size * config.block_size
    reasons = {
        "they need a GPU": next(model.parameters()).device.type != GPU,
        f"{config.parallel} gathers layers in every micro-batch: use --parallel=ddp": config.parallel != "ddp",
        "layers are recomputed in the backward: use --recompute=none": config.recompute != "none",
        "the number of documents varies: use --documents=join": config.documents == "pack",
        "the model has buffers, which its forward may change": next(model.buffers(), None) is not None,
        "a process has one micro-batch per step, whose backward averages gradients: use a smaller --micro_batch_size":
            torch_private.will_average_gradients(model) and config.batch_tokens <= tokens * distributed.world_size()}
    return next((words for words, applies in reasons.items() if applies), None)


class Graph:
    """Works like compute(x, y, weight), but replays micro-batches like the first. The next call overwrites the loss."""

    def __init__(self, compute, model):
        self.compute = compute
        self.model = model
        self.kind = None  # (x's shape, y's shape, weight) of the micro-batches that are replayed
        self.gradients = {}  # parameter -> its gradient, at a fixed address

    def __call__(self, x, y, weight):
        last = torch_private.will_average_gradients(self.model)
        if self.kind is None and not last and all(p.grad is None for p in self.model.parameters()):
            self.record(x, y, weight)
        self.hold_gradients()
        if last or self.kind != (x.shape, y.shape, weight):
            return self.compute(x, y, weight)
        return self.replay(x, y)

    def hold_gradients(self):
        """In a step's first micro-batch, clear the gradients that the graph adds to."""
        if self.gradients and next(iter(self.gradients)).grad is None:
            torch_private.set_to_zero(list(self.gradients.values()))
            for p, gradient in self.gradients.items():
                p.grad = gradient

    def replay(self, x, y):
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        return self.loss

    def record(self, x, y, weight):
        """Record the graph and compare it with `compute`, unless the loss or gradients are not finite. Call it without
        gradients. It leaves them at zero, and the random generators as they were. Raises ConfigError if the model
        cannot be recorded, or if the graph computes something else."""
        before = checkpoint.rng_state()
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            for _ in range(WARM_UPS):
                self.start_anew(before)
                loss = self.compute(x, y, weight)
        cuda.current_stream().wait_stream(side)
        expected = {p: p.grad for p in self.model.parameters() if p.grad is not None}
        size = torch.nn.utils.get_total_norm(expected.values())
        self.start_anew(before)
        if not (loss.isfinite() and size.isfinite()):
            return
        self.gradients = {p: torch.empty_like(gradient) for p, gradient in expected.items()}
        self.hold_gradients()
        self.x = torch.zeros_like(x)
        self.y = torch.zeros_like(y)
        self.graph = cuda.CUDAGraph()
        if isinstance(self.model, DistributedDataParallel):
            torch_private.record_averaging()
        try:
            with cuda.graph(self.graph, stream=side, capture_error_mode="thread_local"):
                self.loss = self.compute(self.x, self.y, weight)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            first = distributed.first_line(error.__context__ or error)
            raise ConfigError(f"graphs: this model cannot be recorded ({first}): use --graphs=False") from None
        self.start_anew(before)
        self.replay(x, y)
        for p, gradient in expected.items():
            gradient -= self.gradients[p]
        error = torch.nn.utils.get_total_norm(expected.values())
        if not (torch.equal(loss, self.loss) and error <= TOLERANCE * size):
            raise ConfigError(f"graphs: a replayed micro-batch has the loss {self.loss:.9g}, not {loss:.9g}, and its "
                              f"gradients differ by {error / size:.1g}: use --graphs=False")
        self.start_anew(before)
        self.kind = x.shape, y.shape, weight

    def start_anew(self, generators):
        """Set the gradients to zero and restore the random generators."""
        self.model.zero_grad(set_to_none=True)
        self.hold_gradients()
        checkpoint.set_rng_state(generators)
