"""A mixture of datasets in fixed shares: --dataset=fineweb_edu:0.8,code:0.2."""

import functools
import math
from fractions import Fraction

import numpy as np

from data.loader import TokenData, inputs_and_targets, n_windows, permutation
from data.prepared import DataError, find_dataset
from data.shards import shards_sha256


class MixtureData(TokenData):
    """Several datasets in fixed shares: the dataset of the run's n-th window depends only on (seed, n).

    The shares' common denominator is the length of a cycle: 5 windows for 0.8 and 0.2. In every cycle each dataset has
    exactly its share of the windows, at shuffled places. A dataset's windows come in the same order as without the
    mixture, once per epoch of that dataset. The validation split and meta come from the first dataset.

    parts: [(Tokens, share as a Fraction), ...], shares adding up to 1. Other arguments are as for TokenData.
    """

    def __init__(self, parts, block_size, batch_tokens, seed, device="cpu"):
        super().__init__(parts[0][0], block_size, batch_tokens, seed, device)
        self.parts = [tokens for tokens, _ in parts]
        self.cycle = math.lcm(*(share.denominator for _, share in parts))  # windows
        self.counts = tuple(int(share * self.cycle) for _, share in parts)  # windows of each dataset in a cycle
        self.n_windows = [n_windows(len(tokens.train), block_size) for tokens in self.parts]
        cycles = min(n / count for n, count in zip(self.n_windows, self.counts, strict=True))  # until one runs out
        self.n_train_windows = int(cycles * self.cycle)
        content = [f"{tokens.sha256['train']} {count}" for tokens, count in zip(self.parts, self.counts, strict=True)]
        self.identity = {"train": shards_sha256(content), "val": self.tokens.sha256["val"]}
        self._remember([*(tokens.train for tokens in self.parts), self.tokens.val])

    def starts(self, step, rank=0, world_size=1):
        """(dataset, first token in it) of this process's windows, (windows_per_step / world_size, 2) int64."""
        first = step * self.windows_per_step
        of_step = range(first, first + self.windows_per_step)
        starts = []
        for n in of_step[self.rank_slice(rank, world_size)]:
            cycle, place = divmod(n, self.cycle)
            members, earlier = cycle_order(self.counts, self.seed, cycle)
            k = int(members[place])
            of_dataset = cycle * self.counts[k] + int(earlier[place])  # windows of dataset k before this one
            epoch, i = divmod(of_dataset, self.n_windows[k])
            starts.append((k, permutation(self.n_windows[k], self.seed, epoch)[i] * self.block_size))
        return np.array(starts, dtype=np.int64)

    def batch(self, starts):
        """As in TokenData."""
        rows = [self.parts[k].train[start : start + self.block_size + 1] for k, start in starts.tolist()]
        return inputs_and_targets(np.stack(rows), self.device)

    def derived(self, config, world_size):
        """As in TokenData, with the tokens of all datasets; "mixture" lists each with its share, size and epochs.
        `epochs` counts the dataset that is used up first."""
        derived = super().derived(config, world_size)
        derived["train_tokens"] = sum(len(tokens.train) for tokens in self.parts)
        cycles = config.max_iters * self.windows_per_step / self.cycle
        derived["mixture"] = []
        for tokens, count, n in zip(self.parts, self.counts, self.n_windows, strict=True):
            derived["mixture"].append({
                "dataset": tokens.folder.name,
                "share": count / self.cycle,
                "train_tokens": len(tokens.train),
                "train_sha256": tokens.sha256["train"],
                "epochs": cycles * count / n,
            })
        return derived

    def verify(self):
        for tokens in self.parts:
            tokens.verify()


@functools.lru_cache(maxsize=2)
def cycle_order(counts, seed, cycle):
    """Return the dataset at each place of a cycle, and how many of its windows come earlier in it: two (cycle,) int64.

    counts: windows of each dataset in a cycle.
    """
    in_order = np.repeat(np.arange(len(counts)), counts)
    members = np.random.default_rng([seed, cycle, len(in_order)]).permutation(in_order)
    earlier = np.empty_like(members)
    for k, count in enumerate(counts):
        earlier[members == k] = np.arange(count)
    return members, earlier


def parse_mixture(text):
    """"fineweb_edu:0.8,code:0.2" as [(name, Fraction), ...]; a single name as [(name, 1)]. Raises DataError."""
    if "," not in text:
        return [(text, Fraction(1))]
    parts = []
    try:
        for part in text.split(","):
            name, _, share = part.rpartition(":")
            parts.append((name.strip(), Fraction(share)))
    except (ValueError, ZeroDivisionError):
        raise DataError(f"dataset={text}: {part} is not NAME:SHARE, such as fineweb_edu:0.8") from None
    if len({find_dataset(name).resolve() for name, _ in parts}) < len(parts):
        raise DataError(f"dataset={text}: a dataset is named twice and would be read twice: add up its shares")
    total = sum(share for _, share in parts)
    if total != 1 or any(share <= 0 or not name for name, share in parts):
        raise DataError(f"dataset={text}: give each dataset a share above 0, such as fineweb_edu:0.8,code:0.2, adding "
                        f"up to 1 (these add up to {float(total):g})")
    if math.lcm(*(share.denominator for _, share in parts)) > 10_000:
        raise DataError(f"dataset={text}: shares may have at most four digits: round them")
    return parts
