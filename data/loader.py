"""Orders the windows of a prepared dataset, and makes the batches for training and evaluation.

    window w of a split reads tokens [w B, w B + B] : x the first B of them, y the last B     (B = block_size)
    step s of training reads windows permutation(epoch)[s W : (s + 1) W]                       (W = windows per step)

Training order has no state: `step_windows` is a pure function of (seed, step). Every window comes once per epoch, and
neither the number of processes nor the micro-batch size changes the order, so resuming needs only the step.
"""

import functools
import math

import numpy as np

from data.prepared import DataError
from data.shards import Shards, file_stamp, what_changed

# torch is imported only when a batch is made: importing it takes seconds, and `prepare.py --help` should be quick.

SEPARATORS = {"bytes": 0, "gpt2": 50256}  # {tokenizer: token that ends a document}, if meta.json does not say
MAX_WINDOWS = 2**24  # per step; the indices of more would take hundreds of MB


# ----------------------------------------------------------------------------------------------------------------------
# which windows, in which order


def n_windows(n_tokens, block_size):
    """Number of non-overlapping training windows in a split: the last token is only a target."""
    return (n_tokens - 1) // block_size


@functools.lru_cache(maxsize=16)  # a step may straddle two epochs, in each dataset of a mixture
def permutation(n, seed, epoch):
    """The order of n windows in an epoch, (n,) int32 or int64, read-only."""
    order = np.random.default_rng([seed, epoch]).permutation(n)
    order = order.astype(np.int32 if n <= 2**31 else np.int64)  # for 8.8M windows, 35 MB instead of 70
    order.flags.writeable = False  # shared through the cache
    return order


def step_windows(n_windows, windows_per_step, seed, step):
    """The training windows of one optimiser step, over all processes.

    A pure function of its arguments: consecutive steps read consecutive parts of
    `default_rng([seed, epoch]).permutation(n_windows)` for epoch 0, 1, ...; a step may straddle two epochs.

    Args:
        n_windows: windows in the split; windows_per_step: batch_tokens // block_size; seed, step: from 0.
    Returns: (windows_per_step,) int64 window indices.
    Raises: DataError if there are no windows.
    """
    if n_windows < 1:
        raise DataError(f"{n_windows} windows to train on: choose a smaller block or prepare more data")
    assert windows_per_step > 0 and seed >= 0 and step >= 0
    windows = np.empty(windows_per_step, dtype=np.int64)  # (W,)
    position = step * windows_per_step  # a Python integer: no overflow, however long the run
    filled = 0
    while filled < windows_per_step:
        epoch, offset = divmod(position + filled, n_windows)
        part = permutation(int(n_windows), int(seed), epoch)[offset : offset + windows_per_step - filled]
        windows[filled : filled + len(part)] = part
        filled += len(part)
    return windows


def eval_windows(n_tokens, block_size, limit_tokens=0):
    """The fixed windows of an evaluation: non-overlapping, in order, the same for every model, batch and process count.

    Args:
        n_tokens: length of the split; block_size: tokens predicted per window;
        limit_tokens: 0 for the whole split, including a shorter last window: every token but the first is predicted
            once. Otherwise the number of predicted tokens, in windows evenly spaced over the split.
    Returns: (n, 2) int64 array of (start, length): inputs [start, start + length), targets shifted by one. Only the
        last length may be below block_size. The lengths sum to n_tokens - 1, or to min(limit_tokens, n_tokens - 1).
    Raises: DataError if there is nothing to predict.
    """
    total = n_tokens - 1  # predicted tokens
    if total < 1:
        raise DataError(f"{n_tokens} tokens leave nothing to predict: prepare more data")
    assert limit_tokens >= 0
    available = math.ceil(total / block_size)
    if limit_tokens:
        total = min(limit_tokens, total)
    n = math.ceil(total / block_size)
    starts = np.arange(n, dtype=np.int64) * available // n * block_size  # (n,)
    lengths = np.full(n, block_size, dtype=np.int64)
    lengths[-1] = total - (n - 1) * block_size
    return np.stack([starts, lengths], axis=1)


def document_starts(tokens):
    """Where the validation split's documents start, (documents,) int64: confidence intervals resample these documents.

    meta.json lists the documents, or else they end at separators. Neighbours are joined until there are at most 64. If
    there are fewer than eight, the split is divided into eight equal parts instead.
    """
    listed = (tokens.meta.get("documents") or {}).get("val")
    if listed:
        starts = [document["start"] for document in listed]
    else:
        separator = tokens.meta.get("end_of_text", SEPARATORS.get(tokens.meta["tokenizer"], -1))
        ends = np.flatnonzero(tokens.val[:] == separator) + 1
        starts = np.append(0, ends[ends < len(tokens.val)])
    if len(starts) < 8:
        starts = np.linspace(0, len(tokens.val), 8, endpoint=False)
    joined = math.ceil(len(starts) / 64)
    return np.asarray(starts, np.int64)[::joined]


# ----------------------------------------------------------------------------------------------------------------------
# their tokens


def get_batch(tokens, starts, block_size, device="cpu"):
    """Inputs and targets for some windows.

    Args:
        tokens: (n_tokens,) memmap, Shards or array; starts: (W,) first tokens, each followed by block_size more;
        device: a torch device or its name; copies to CUDA are pinned and asynchronous.
    Returns: x, y: (W, block_size) int64 torch tensors; y is x shifted by one token.
    """
    starts = np.asarray(starts, dtype=np.int64)
    assert 0 <= starts.min() <= starts.max() < len(tokens) - block_size  # a negative start would read from the end
    if isinstance(tokens, Shards):
        rows = np.stack([tokens[start : start + block_size + 1] for start in starts.tolist()])
    else:
        rows = np.lib.stride_tricks.sliding_window_view(tokens, block_size + 1)[starts]  # (W, B + 1)
    return inputs_and_targets(rows, device)


def inputs_and_targets(rows, device):
    """rows: (W, B + 1) of any integer dtype -> x, y: (W, B) int64 on the device; y is x shifted by one token."""
    import torch

    xy = np.stack([rows[:, :-1], rows[:, 1:]])
    xy = torch.from_numpy(xy.astype(np.int64))  # (2, W, B): one transfer
    if torch.device(device).type == "cuda":
        xy = xy.pin_memory().to(device, non_blocking=True)
    else:
        xy = xy.to(device)
    return xy[0], xy[1]


def windows_per_step(batch_tokens, block_size):
    """The number of windows in a step. Raises DataError unless it is a whole number of at most 2^24."""
    if batch_tokens < block_size or batch_tokens % block_size:
        nearest = max(1, round(batch_tokens / block_size)) * block_size
        raise DataError(
            f"batch_tokens {batch_tokens} is not a multiple of block_size {block_size}: the nearest is {nearest}"
        )
    windows = batch_tokens // block_size
    if windows > MAX_WINDOWS:
        raise DataError(
            f"batch_tokens {batch_tokens} is {windows:,} windows of {block_size}: at most "
            f"{MAX_WINDOWS:,} per step; choose fewer batch_tokens"
        )
    return windows


class TokenData:
    """A prepared dataset for training: the micro-batches of each step, the batches of an evaluation, its identity.

    Args:
        tokens: Tokens, opened with this block_size; block_size: tokens predicted per training window;
        batch_tokens: tokens per optimiser step over all processes, a multiple of block_size;
        seed: for the order of windows; device: where batches go, a torch device or its name.

    Attributes: identity: the sha256 of both splits: equal data has equal identity;
        meta: dict, meta.json;
        file_times: [[bytes, mtime in ns] of train.bin, of val.bin] at construction.

    Raises DataError if batch_tokens is not a whole number of windows, or more than 2^24 windows.
    """

    def __init__(self, tokens, block_size, batch_tokens, seed, device="cpu"):
        self.windows_per_step = windows_per_step(batch_tokens, block_size)
        self.tokens = tokens
        self.block_size = block_size
        self.batch_tokens = batch_tokens
        self.seed = seed
        self.device = device
        self.identity = tokens.sha256
        self.meta = tokens.meta
        self.n_train_windows = n_windows(len(tokens.train), block_size)
        self._remember([tokens.train, tokens.val])

    def _remember(self, splits):
        self._stamps = [(split, file_stamp(split)) for split in splits]
        self.file_times = [list(stamp[1:]) for _, stamp in self._stamps]

    def rank_slice(self, rank, world_size):
        """The slice of a step's windows that one process reads. Raises DataError if they cannot be shared equally."""
        if self.windows_per_step % world_size:
            more = math.ceil(self.windows_per_step / world_size) * world_size * self.block_size
            raise DataError(
                f"batch_tokens {self.batch_tokens} is {self.windows_per_step} windows of {self.block_size}, which "
                f"{world_size} processes cannot share equally: choose batch_tokens {more} or another number of "
                "processes"
            )
        per_rank = self.windows_per_step // world_size
        return slice(rank * per_rank, (rank + 1) * per_rank)

    def starts(self, step, rank=0, world_size=1):
        """First tokens of this process's windows in a step (from 0), (windows_per_step / world_size,) int64."""
        starts = step_windows(self.n_train_windows, self.windows_per_step, self.seed, step) * self.block_size
        return starts[self.rank_slice(rank, world_size)]

    def batch(self, starts):
        """x, y: (W, block_size) int64 on the device, for the windows that begin at `starts`."""
        return get_batch(self.tokens.train, starts, self.block_size, self.device)

    def micro_batches(self, step, rank, world_size, micro_batch_size):
        """Yields one process's micro-batches of a step, in order, as (x, y, weight).

        x, y: (at most micro_batch_size, block_size) int64 on the device; weight: float, the micro-batch's share of this
        process's windows. A step's weights add up to 1. So the sum of weight x mean loss is the mean over the step,
        even if the last micro-batch is smaller.
        """
        starts = self.starts(step, rank, world_size)
        for i in range(0, len(starts), micro_batch_size):
            part = starts[i : i + micro_batch_size]
            x, y = self.batch(part)
            yield x, y, len(part) / len(starts)

    def eval_batches(self, windows, rank, world_size, batch_size):
        """Yields one process's batches of validation windows: (x, y), (at most batch_size, length) int64 on the device.

        windows: (n, 2) start and length, from eval_windows; process r reads rows r, r + world_size, ... All windows
        in a batch have the same length: the split's shorter last window comes last, by itself.
        """
        windows = windows[rank::world_size]
        lengths = windows[:, 1]
        for length in np.unique(lengths)[::-1].tolist():
            starts = windows[lengths == length, 0]
            for i in range(0, len(starts), batch_size):
                yield get_batch(self.tokens.val, starts[i : i + batch_size], length, self.device)

    def derived(self, config, world_size):
        """Values for config.json that follow from the data and the settings. Raises DataError like `rank_slice`."""
        self.rank_slice(0, world_size)
        return {
            "windows_per_step": self.windows_per_step,
            "accumulation": math.ceil(self.windows_per_step / world_size / config.micro_batch_size),
            "epochs": config.max_iters * self.windows_per_step / self.n_train_windows,
            "train_tokens": len(self.tokens.train),
            "val_tokens": len(self.tokens.val),
        }

    def verify(self):
        """Read both splits whole and compare their sha256 with meta.json. Raises DataError if they differ."""
        self.tokens.verify()

    def check_unchanged(self):
        """Raises DataError if a file has changed since it was opened. This takes one stat() per file.

        A truncated file would kill the process with SIGBUS, and training would not notice a replaced one.
        """
        for split, before in self._stamps:
            now = file_stamp(split)
            if now != before:
                raise DataError(
                    f"{split.filename} changed during the run ({what_changed(before, now)}): put the old file back, or "
                    "prepare it again, and continue from the last checkpoint with --resume=auto"
                )
