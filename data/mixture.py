"""A mixture of datasets in fixed shares: --dataset=fineweb_edu:0.8,code:0.2."""

import math
from fractions import Fraction

import numpy as np

from data.loader import DataError, TokenData, inputs_and_targets, n_windows, permutation
from data.shards import file_stamp, shards_sha256


class MixtureData(TokenData):
    """Several datasets in fixed shares: which one the run's n-th window comes from depends on (seed, n) alone.

    The shares' common denominator is the length of a cycle, 5 for 0.8 and 0.2: in every cycle each dataset has exactly
    its share of the windows, at shuffled places. Each dataset's windows come in their own order, once per epoch of that
    dataset. The validation split and meta are the first dataset's.

    parts: [(Tokens, share as a Fraction), ...], shares adding up to 1; the rest as for TokenData.
    """

    def __init__(self, parts, block_size, batch_tokens, seed, device="cpu"):
        super().__init__(parts[0][0], block_size, batch_tokens, seed, device)
        self.parts = [tokens for tokens, _ in parts]
        cycle = math.lcm(*(share.denominator for _, share in parts))
        self.counts = [int(share * cycle) for _, share in parts]
        self.n_windows = [n_windows(len(tokens.train), block_size) for tokens in self.parts]
        self.identity = {"train": shards_sha256([{"sha256": f"{tokens.sha256['train']} {count}"} for tokens, count in
                                                 zip(self.parts, self.counts, strict=True)]),
                         "val": self.identity["val"]}
        self._stamps = [file_stamp(tokens.train) for tokens in self.parts] + self._stamps[1:]
        self.file_times = [list(stamp[1:]) for stamp in self._stamps]
        self.n_train_windows = int(min(n / count for n, count in zip(self.n_windows, self.counts, strict=True)) * cycle)

    def windows(self, step, rank=0, world_size=1):
        """(windows_per_step / world_size, 2) int64: (dataset, window in it) for this process's windows in a step."""
        rank_part, per_step, cycle = self.rank_slice(rank, world_size), self.windows_per_step, sum(self.counts)
        out = np.empty((per_step, 2), dtype=np.int64)
        members = np.repeat(np.arange(len(self.counts)), self.counts)  # (cycle,)
        for c in range(step * per_step // cycle, ((step + 1) * per_step - 1) // cycle + 1):
            order = np.random.default_rng([self.seed, c, cycle]).permutation(members)
            place = np.empty(cycle, dtype=np.int64)  # how many windows of the same dataset came before
            for k, count in enumerate(self.counts):
                place[order == k] = c * count + np.arange(count)
            first = max(c * cycle, step * per_step)
            for n in range(first, min((c + 1) * cycle, (step + 1) * per_step)):
                k, at = int(order[n - c * cycle]), int(place[n - c * cycle])
                epoch, at = divmod(at, self.n_windows[k])
                out[n - step * per_step] = k, permutation(self.n_windows[k], self.seed, epoch)[at]
        return out[rank_part]

    def micro_batches(self, step, rank, world_size, micro_batch_size):
        """As in TokenData."""
        windows, B = self.windows(step, rank, world_size), self.block_size
        for start in range(0, len(windows), micro_batch_size):
            part = windows[start:start + micro_batch_size].tolist()
            rows = np.stack([self.parts[k].train[w * B:(w + 1) * B + 1].astype(np.int64) for k, w in part])
            yield *inputs_and_targets(rows, self.device), len(part) / len(windows)

    def derived(self, config, world_size):
        """As in TokenData, with all datasets' tokens, and what each of them is and how often it is read. `epochs` is of
        the one that is used up first."""
        of_one = super().derived(config, world_size)
        read = config.max_iters * self.windows_per_step / sum(self.counts)
        return of_one | {"train_tokens": sum(len(tokens.train) for tokens in self.parts), "mixture": [
            {"dataset": tokens.folder.name, "share": count / sum(self.counts), "train_tokens": len(tokens.train),
             "train_sha256": tokens.sha256["train"], "epochs": read * count / n}
            for tokens, count, n in zip(self.parts, self.counts, self.n_windows, strict=True)]}

    def where(self, step, rank, world_size):
        k, window = self.windows(step, rank, world_size)[0].tolist()
        return f"the last batch began at token {window * self.block_size:,} of {self.parts[k].folder}"

    def verify(self):
        for tokens in self.parts:
            tokens.verify()

    def check_unchanged(self):
        now = [file_stamp(tokens.train) for tokens in self.parts] + [file_stamp(self.tokens.val)]
        for tokens, old, new in zip([*self.parts, self.tokens], self._stamps, now, strict=True):
            if old != new:
                raise DataError(f"{tokens.folder} changed during the run: restore its old files, or prepare it again, "
                                "and continue from the last checkpoint with --resume=auto")


def parse_mixture(text):
    """"fineweb_edu:0.8,code:0.2" as [(name, Fraction), ...]; a single name as [(name, 1)]. Raises DataError."""
    if "," not in text:
        return [(text, Fraction(1))]
    parts = [part.rpartition(":") for part in text.split(",")]
    try:
        sets = [(name.strip(), Fraction(share)) for name, _, share in parts]
    except (ValueError, ZeroDivisionError):
        sets = []
    total = sum(share for _, share in sets)
    if not sets or total != 1 or min(share for _, share in sets) <= 0 or not all(name for name, _ in sets):
        raise DataError(f"dataset={text}: give each dataset a share, as fineweb_edu:0.8,code:0.2, adding up to 1 "
                        f"(these add up to {float(total):g})")
    if math.lcm(*(share.denominator for _, share in sets)) > 10_000:
        raise DataError(f"dataset={text}: shares may have at most four digits")
    return sets
