"""Multi-query associative recall (Arora et al. 2023): generates the examples of Figure 4.

    k_1 v_1 k_2 v_2 ... k_P v_P | 0 0 k_7 0 k_2 0 0 0 k_1 0 ...          T tokens, P pairs
                                      v_7   v_2       v_1                the labels, only at the P queries

    keys    P distinct ones of 1 .. V/2 - 1                values    P distinct ones of V/2 .. V - 1
    slots   S = (T - 2 P) / 2; slot i = 1 .. S is token 2 P + 2 (i - 1). Queries are assigned to slots in the order of
            the pairs, each to a free slot with p(i) ~ i^(a-1)

There is no loop over examples. Drawing slots without replacement is equivalent to giving each slot an exponential
waiting time of rate p(i) and keeping the P shortest, in order. One call sorts those of all examples. Keys and
values are first drawn with repeats, and then only the repeats are drawn again.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from common.errors import ConfigError

PAIRS = {64: 4, 128: 8, 256: 16, 512: 64}  # T -> the benchmark's number of pairs
BLOCK = 2048  # examples per random generator; fixed, so that an example does not depend on n
SPLITS = {"train": 0, "test": 1, "pairs": 2}  # "pairs": tests with other numbers of pairs


@dataclass(frozen=True)
class Task:
    """Sizes and distribution of the examples. Raises ConfigError for impossible sizes."""

    T: int = 64  # tokens
    pairs: int = 4  # P
    vocab_size: int = 8192  # V
    power_a: float = 0.01  # a of the slots' power law, between -0.5 and 2.5: beyond, rounding affects rare slots

    def __post_init__(self):
        if self.pairs < 1 or self.slots < self.pairs:
            raise ConfigError(f"T={self.T} leaves {max(0, self.slots)} slots for the queries of {self.pairs} pairs: "
                              "T must be at least four times the pairs")
        if self.vocab_size // 2 - 1 < self.pairs:
            raise ConfigError(f"vocab_size={self.vocab_size} has {max(0, self.vocab_size // 2 - 1)} keys for "
                              f"{self.pairs} pairs: give at least {2 * self.pairs + 2}")

    @property
    def slots(self):
        """S, the number of slots for queries."""
        return (self.T - 2 * self.pairs) // 2


@dataclass
class Examples:
    """n examples: `tokens` (n, T), the input; `where` (n, P), the position of each pair's query; `values` (n, P), the
    query's label."""

    tokens: np.ndarray
    where: np.ndarray
    values: np.ndarray

    def __len__(self):
        return len(self.tokens)

    def batch(self, rows, device):
        """idx, targets for some examples, (B, T) int64 tensors on the device; targets are -1 except at queries."""
        arrays = (self.tokens, self.where, self.values)
        idx, where, values = (torch.from_numpy(a[rows].astype(np.int64)) for a in arrays)
        return idx.to(device), torch.full_like(idx, -1).scatter_(1, where, values).to(device)

    def distances(self):
        """Tokens from each key to its query, (n, P), in the order of an example's queries."""
        distances = self.where - 2 * np.arange(self.where.shape[1], dtype=self.where.dtype)
        return np.take_along_axis(distances, self.where.argsort(1), 1)

    def sha256(self):
        """Hash of inputs and labels, to check that two runs saw the same examples."""
        digest = hashlib.sha256(self.tokens.tobytes())
        digest.update(self.values.tobytes())
        return digest.hexdigest()


def generate(task, n, seed, split="train"):
    """n Examples of the task, which depend on (task, seed, split) alone; the first m are the same for every n >= m.

    Args:
        seed: 0 <= seed < 2**32; split: a key of SPLITS, each with its own draws.

    Returns: Examples of 16-bit integers, or 32-bit if V or T need them.
    """
    kind = np.int16 if max(task.vocab_size, task.T) < 2**15 else np.int32
    half, P = task.vocab_size // 2, task.pairs
    p = np.arange(1, task.slots + 1, dtype=np.float64) ** (task.power_a - 1)
    p /= p.sum()  # the distribution of the first query
    # The bits of a positive float64 sort like the number: the last few hold the slot, 40 or more the waiting time.
    mask = np.uint64((1 << task.slots.bit_length()) - 1)
    blocks = []
    for block in range(-(-n // BLOCK)):
        rng = np.random.default_rng([seed, SPLITS[split], block])
        clocks = rng.standard_exponential((BLOCK, task.slots)) / p
        codes = clocks.view(np.uint64) & ~mask | np.arange(task.slots, dtype=np.uint64)
        first = np.sort(np.partition(codes, P - 1, axis=1)[:, :P], axis=1) & mask  # (BLOCK, P), in their order
        where = 2 * P + 2 * first.astype(np.int64)
        keys = 1 + distinct(rng, BLOCK, P, half - 1)
        values = half + distinct(rng, BLOCK, P, task.vocab_size - half)
        tokens = np.zeros((BLOCK, task.T), kind)
        tokens[:, 0:2 * P:2] = keys
        tokens[:, 1:2 * P:2] = values
        np.put_along_axis(tokens, where, keys.astype(kind), 1)
        blocks.append([tokens, where.astype(kind), values.astype(kind)])
    return Examples(*(np.concatenate(parts)[:n] for parts in zip(*blocks, strict=True)))


def distinct(rng, rows, k, n):
    """(rows, k) int64: in each row k distinct numbers of 0 .. n - 1, every ordered choice equally likely."""
    if 2 * k > n:  # redrawing repeats would take many rounds
        return rng.permuted(np.tile(np.arange(n), (rows, 1)), axis=1)[:, :k]
    x, some = rng.integers(0, n, (rows, k)), np.arange(rows)
    while len(some):
        codes = np.sort(x[some] * k + np.arange(k), axis=1)  # by number, then by column
        row, at = np.nonzero(codes[:, 1:] // k == codes[:, :-1] // k)
        column = codes[row, at + 1] % k  # columns that repeat the number of an earlier column
        x[some[row], column] = rng.integers(0, n, len(row))
        some = some[np.unique(row)]
    return x


def overlap(train, test):
    """The number of test examples that are also training examples."""
    seen = {row.tobytes() for row in test.tokens}
    return len(seen & {row.tobytes() for row in train.tokens})
