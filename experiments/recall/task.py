"""Multi-query associative recall (Arora et al. 2023): the examples of Figure 4, drawn by the hundred thousand.

    k_1 v_1 k_2 v_2 ... k_P v_P | 0 0 k_7 0 k_2 0 0 0 k_1 0 ...          T tokens, P pairs
                                      v_7   v_2       v_1                the labels, at the P queries and nowhere else

    keys    P distinct ones of 1 .. V/2 - 1                values    P distinct ones of V/2 .. V - 1
    slots   S = (T - 2 P) / 2, slot i = 1 .. S stands at token 2 P + 2 (i - 1); the queries take P of them one after
            another, the first pair first, each from what is left with p(i) ~ i^(a-1)

There is no loop over the examples. Taking slots one after another without replacement is the same as giving each an
exponential waiting time of rate p(i) and keeping the P that ring first, in their order; one call sorts all clocks.
Distinct keys are drawn with repeats, and only the repeats are drawn again.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from runtime.errors import ConfigError

PAIRS = {64: 4, 128: 8, 256: 16, 512: 64}  # of the benchmark, by T
BLOCK = 2048  # examples per generator: fixed, so that neither their number nor the threads change an example
SPLITS = {"train": 0, "test": 1, "pairs": 2}  # "pairs": for tests with other numbers of pairs


@dataclass(frozen=True)
class Task:
    """The shape and the law of the examples. Raises ConfigError for sizes that cannot be."""

    T: int = 64  # tokens
    pairs: int = 0  # P; 0: the benchmark's
    vocab_size: int = 8192  # V
    power_a: float = 0.01  # a of the power law of the slots

    def __post_init__(self):
        if max(self.T, self.pairs, self.vocab_size) > 2**31 - 1:
            raise ConfigError(f"T={self.T}, pairs={self.pairs}, vocab_size={self.vocab_size}: each at most {2**31 - 1}")
        if not self.pairs:
            if self.T not in PAIRS:
                raise ConfigError(f"the benchmark has no number of pairs for T={self.T}, only for "
                                  f"{', '.join(map(str, PAIRS))}: give --pairs")
            object.__setattr__(self, "pairs", PAIRS[self.T])
        if self.pairs < 1 or self.slots < self.pairs:
            raise ConfigError(f"T={self.T} leaves {max(0, self.slots)} slots for the queries of {self.pairs} pairs: "
                              "give a T of at least four times the pairs")
        if self.vocab_size // 2 - 1 < self.pairs:
            raise ConfigError(f"vocab_size={self.vocab_size} has {max(0, self.vocab_size // 2 - 1)} keys for "
                              f"{self.pairs} pairs: give at least {2 * self.pairs + 2}")
        # beyond 20, rounding would show in the rare slots; `not <` so that NaN is refused
        if not abs(self.power_a - 1) * np.log(self.slots) < 20:
            raise ConfigError(f"power_a={self.power_a} makes one of {self.slots} slots e^20 times as likely as "
                              "another: give one nearer to 1")

    @property
    def slots(self):
        """S, places for queries."""
        return (self.T - 2 * self.pairs) // 2

    def slot_probabilities(self):
        """p(i) of the first query, (S,), float64."""
        p = np.arange(1, self.slots + 1, dtype=np.float64) ** (self.power_a - 1)
        return p / p.sum()


@dataclass
class Examples:
    """n examples: `tokens` (n, T), the input; `where` (n, P), the position of each pair's query; `values` (n, P), its
    label."""

    tokens: np.ndarray
    where: np.ndarray
    values: np.ndarray

    def __len__(self):
        return len(self.tokens)

    def batch(self, rows, device):
        """idx, targets of some examples, (B, T) int64 tensors on the device; targets are -1 where nothing is asked."""
        arrays = (self.tokens, self.where, self.values)
        idx, where, values = (torch.from_numpy(a[rows].astype(np.int64)) for a in arrays)
        return idx.to(device), torch.full_like(idx, -1).scatter_(1, where, values).to(device)

    def distances(self):
        """Tokens from each key to its query, (n, P), the first query of an example first."""
        distances = self.where - 2 * np.arange(self.where.shape[1], dtype=self.where.dtype)
        return np.take_along_axis(distances, self.where.argsort(1), 1)

    def sha256(self):
        """Hash of the inputs and the labels, to tell whether two runs saw the same examples."""
        digest = hashlib.sha256(self.tokens.tobytes())
        digest.update(self.values.tobytes())
        return digest.hexdigest()


def generate(task, n, seed, split="train", threads=0):
    """Examples of the task: a function of (task, seed, split) alone; the first m of n are those of any other n >= m.

    Args:
        n: how many; seed: 0 <= seed < 2**32; split: "train", "test" or "pairs", each with its own random numbers.
        threads: 0: one per core.

    Returns: Examples of 16-bit integers, or 32-bit where V or T need them.
    """
    kind = np.int16 if max(task.vocab_size, task.T) < 2**15 else np.int32
    out = Examples(np.zeros((n, task.T), kind), np.empty((n, task.pairs), kind), np.empty((n, task.pairs), kind))
    # The bits of a positive float64 sort like the number: the last few carry the slot, 40 or more remain for the clock.
    p, mask = task.slot_probabilities(), np.uint64((1 << task.slots.bit_length()) - 1)
    half, P = task.vocab_size // 2, task.pairs

    def draw(block):
        rows = slice(block * BLOCK, min((block + 1) * BLOCK, n))
        m, rng = rows.stop - rows.start, np.random.default_rng([seed, SPLITS[split], block])
        clocks = rng.standard_exponential((BLOCK, task.slots)) / p
        codes = clocks.view(np.uint64) & ~mask | np.arange(task.slots, dtype=np.uint64)
        first = np.sort(np.partition(codes, P - 1, axis=1)[:, :P], axis=1) & mask  # (BLOCK, P), in their order
        keys, values = 1 + distinct(rng, BLOCK, P, half - 1), half + distinct(rng, BLOCK, P, task.vocab_size - half)
        out.where[rows] = (2 * P + 2 * first.astype(np.int64))[:m]
        out.values[rows] = values[:m]
        tokens = out.tokens[rows]
        tokens[:, 0:2 * P:2], tokens[:, 1:2 * P:2] = keys[:m], values[:m]
        np.put_along_axis(tokens, out.where[rows].astype(np.int64), keys[:m].astype(kind), 1)

    with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1)) as pool:  # numpy releases the interpreter's lock
        list(pool.map(draw, range(-(-n // BLOCK))))
    return out


def distinct(rng, rows, k, n):
    """k distinct numbers of 0 .. n - 1 in each row, every ordered choice equally likely: (rows, k) int64."""
    if 2 * k > n:  # drawing repeats again would take many rounds
        return rng.permuted(np.tile(np.arange(n), (rows, 1)), axis=1)[:, :k]
    x, some = rng.integers(0, n, (rows, k)), np.arange(rows)
    while len(some):
        codes = np.sort(x[some] * k + np.arange(k), axis=1)  # by number, then by column
        row, at = np.nonzero(codes[:, 1:] // k == codes[:, :-1] // k)
        column = codes[row, at + 1] % k  # of every number that an earlier column has
        x[some[row], column] = rng.integers(0, n, len(row))
        some = some[np.unique(row)]
    return x


def overlap(train, test):
    """How many of the test's examples stand among the training's."""
    seen = {row.tobytes() for row in test.tokens}
    return len(seen & {row.tobytes() for row in train.tokens})
