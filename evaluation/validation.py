"""The validation loss over fixed windows: the same tokens for every model, micro-batch size and number of processes.

train.py calls `Evaluate(config, data)` at each evaluation. To score a checkpoint on tasks, use evaluate.py.
"""

import math

import numpy as np
import torch

from data.loader import document_starts, eval_windows
from runtime import distributed

BATCH_TOKENS = 8192  # fewest tokens per batch; without gradients this many fit


class Evaluate:
    """A language model's metrics on the validation split of its data."""

    def __init__(self, config, data):
        self.config = config
        self.data = data
        block_size = config.eval_block_size or config.block_size
        self.batch_tokens = max(config.micro_batch_size * config.block_size, BATCH_TOKENS)
        self.windows = eval_windows(len(data.tokens.val), block_size, config.eval_tokens)
        self.final_windows = eval_windows(len(data.tokens.val), block_size, config.final_eval_tokens)

    def __call__(self, model, final=False):
        """{"val_loss": nats per token, "val_tokens", "val_bits_per_byte": if the data's bytes are known}. The final
        evaluation adds the loss and tokens of each document; a window belongs to the document it begins in. If its
        windows differ from those of earlier evaluations, "compare_loss" is the loss over the earlier windows."""
        parts = by_document(self.final_windows, self.data) if final else [self.windows]
        loss, losses, tokens = self.loss(model, parts)
        metrics = {"val_loss": loss, "val_tokens": sum(tokens)}
        if self.data.tokens.bytes_per_token:
            metrics["val_bits_per_byte"] = loss / math.log(2) / self.data.tokens.bytes_per_token
        if not final:
            return metrics
        if not np.array_equal(self.final_windows, self.windows):
            metrics["compare_loss"] = self.loss(model, [self.windows])[0]
        metrics["val_document_tokens"] = tokens
        metrics["val_document_losses"] = [round(nats, 6) if math.isfinite(nats) else None for nats in losses]
        return metrics

    @torch.no_grad()
    def loss(self, model, parts):
        """(mean loss in nats per token, [loss per part], [tokens per part]) over parts of the validation split, each an
        array (n, 2) of window starts and lengths. All processes share the work."""
        model.eval()
        rank = distributed.rank()
        world = distributed.world_size()
        device = next(model.parameters()).device
        total = torch.zeros(len(parts), 2, dtype=torch.float64)  # nats, tokens
        batch_size = max(1, self.batch_tokens // int(parts[0][0, 1]))
        for i, windows in enumerate(parts):
            batches = self.data.eval_batches(windows, rank, world, batch_size)
            for x, y, counts in distributed.in_step(batches, device, sharded=self.config.parallel != "ddp"):
                with distributed.autocast(self.config, device):
                    loss = model(x, y, loss_only=True)[1]
                targets = distributed.targets_in(y)
                if counts and targets:
                    total[i, 0] += loss.item() * targets
                    total[i, 1] += targets
        model.train()
        total = distributed.sum_over_ranks(total, device)
        nats, tokens = total.sum(0).tolist()
        return nats / tokens, (total[:, 0] / total[:, 1]).tolist(), total[:, 1].int().tolist()


def by_document(windows, data):
    """[the windows of a document, ...] for the validation documents in which any window begins."""
    document = np.searchsorted(document_starts(data.tokens), windows[:, 0], side="right")
    return [windows[document == d] for d in np.unique(document)]
