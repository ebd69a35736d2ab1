"""The validation loss over fixed windows: the same tokens for every model, micro-batch size and number of processes.

train.py calls `Evaluate(config, data)` at each evaluation; it also handles tasks during training
(--eval_tasks_interval). To score a finished run on tasks use evaluate.py.
"""

import math

import numpy as np
import torch

from data.loader import document_starts, eval_windows
from data.prepared import find_dataset
from data.tokenizer import Text
from evaluation import tasks
from runtime import distributed

BATCH_TOKENS = 8192  # tokens per batch, at least: without gradients they fit


class Evaluate:
    """A language model's metrics on the validation split of its data."""

    def __init__(self, config, data):
        self.config, self.data = config, data
        block, tokens = config.eval_block_size or config.block_size, len(data.tokens.val)
        self.windows = eval_windows(tokens, block, config.eval_tokens)
        self.final_windows = eval_windows(tokens, block, config.final_eval_tokens)
        if config.eval_tasks_interval:  # load now: a mistake would otherwise end the run at the first evaluation
            self.harness, self.scores = tasks.import_harness(), tasks.scores
            self.loaded = self.harness.load_tasks(tasks.named(config.eval_tasks, find_dataset("pystdlib")))
            self.text = Text(data.meta["tokenizer"], data.meta.get("table"))

    def __call__(self, model, final=False):
        """{"val_loss": nats per token, "val_tokens"}; the final evaluation adds bits per byte, loss and tokens of each
        document (a window belongs to the document it begins in), and "compare_loss", the loss over the windows of the
        other evaluations, if the final windows differ from them."""
        windows = self.final_windows if final else self.windows
        loss, losses, tokens = self.loss(model, self.data, windows, by_document=final)
        metrics = {"val_loss": loss, "val_tokens": sum(tokens)}
        if final and not np.array_equal(windows, self.windows):
            metrics["compare_loss"] = self.loss(model, self.data, self.windows)[0]
        if final:
            metrics |= {"val_document_tokens": tokens, "val_document_losses":
                        [round(document_loss, 6) if math.isfinite(document_loss) else None for document_loss in losses]}
            metrics |= bits_per_byte(metrics["val_loss"], self.data)
            if "val_bits_per_byte" in metrics and self.data.meta.get("xz9_bits_per_byte"):
                metrics["xz9_bits_per_byte"] = self.data.meta["xz9_bits_per_byte"]
        return metrics

    def tasks(self, model):
        """Scores on eval_tasks on rank 0, else None: {"perplexity": of right answers, averaged over tasks,
        "<task>_<metric>": ...}, see evaluation/harness.py."""
        dtype = getattr(torch, self.config.dtype)
        tokens = max(self.config.micro_batch_size * self.config.block_size, BATCH_TOKENS)
        model.eval()
        output = self.harness.evaluate(self.harness.HarnessLM(model, self.text, tokens, dtype=dtype), self.loaded)
        model.train()
        return output and self.scores(output["results"])

    @torch.no_grad()
    def loss(self, model, data, windows, by_document=False):
        """(mean loss in nats per token, [loss per document], [tokens per document]) over windows (start, length).
        All processes share the work. Without by_document the windows count as one document."""
        model.eval()
        tokens = max(self.config.micro_batch_size * self.config.block_size, BATCH_TOKENS)
        batch = max(1, tokens // int(windows[0, 1]))
        rank, world, device = distributed.rank(), distributed.world_size(), next(model.parameters()).device
        parts = [windows]
        if by_document:  # a batch holds windows of one document: more and smaller batches
            document = np.searchsorted(document_starts(data.tokens), windows[:, 0], side="right")
            parts = [windows[document == d] for d in np.unique(document)]
        total = torch.zeros(len(parts), 2, dtype=torch.float64)  # nats, tokens
        for i, part in enumerate(parts):
            batches = data.eval_batches(part, rank, world, batch)
            for x, y, counts in distributed.in_step(batches, device, sharded=self.config.parallel != "ddp"):
                with distributed.autocast(self.config, device):
                    loss = model(x, y, loss_only=True)[1]
                if counts:
                    total[i] += torch.tensor([loss.item() * y.numel(), y.numel()], dtype=torch.float64)
        model.train()
        total = distributed.sum_over_ranks(total, device)
        nats, tokens = total.sum(0).tolist()
        return nats / tokens, (total[:, 0] / total[:, 1]).tolist(), total[:, 1].int().tolist()


def bits_per_byte(loss, data):
    """{"val_bits_per_byte"} of a validation loss, or {} if the data does not know its tokens' bytes."""
    sizes = data.tokens.bytes_per_token
    size = sizes["val"] if isinstance(sizes, dict) else sizes
    return {"val_bits_per_byte": loss / math.log(2) / size} if size else {}
