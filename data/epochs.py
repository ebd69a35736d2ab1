"""Labelled examples in epochs, for train.py's loop: images, and the recall benchmark."""

import functools

import numpy as np
import torch


@functools.lru_cache(maxsize=2)
def epoch_order(seed, epoch, n, repeats=1):
    """The n rows of an epoch, in order. repeats > 1: each comes `repeats` times in succession (repeated augmentation,
    Hoffer et al. 2020). A batch then has several crops of an image, and an epoch only n / repeats different images."""
    return np.repeat(np.random.default_rng([seed, 3, epoch]).permutation(n), repeats)[:n]


class EpochData:
    """Yields n examples in a new order every epoch, `per_step` at a time. A subclass defines batch(places) -> (x, y) on
    the device, `identity` and `meta`."""

    def __init__(self, config, device, n, per_step, steps_per_epoch, repeats=1):
        self.config, self.device = config, device
        self.n, self.per_step, self.steps_per_epoch, self.repeats = n, per_step, steps_per_epoch, repeats

    def derived(self, config, world_size):
        return {"steps_per_epoch": self.steps_per_epoch, "epochs": config.max_iters / self.steps_per_epoch}

    def check_unchanged(self):
        """Does nothing: examples are in memory, and a missing image is an error when it is read."""

    def places(self, step):
        """[(epoch, place in it, row)] of a step's examples on all processes: a function of (seed, step) alone. The last
        step of an epoch may have fewer examples."""
        epoch, at = divmod(step, self.steps_per_epoch)
        order = epoch_order(self.config.seed, epoch, self.n, self.repeats)
        first = at * self.per_step
        return [(epoch, first + i, row) for i, row in enumerate(order[first:first + self.per_step].tolist())]

    def micro_batches(self, step, rank, world_size, micro_batch_size):
        """Yields one process's (x, y, weight) for a step, as in data/loader.py.

        Processes can have unequal shares: the weights of each add up to its share of the step times world_size. Also
        seeds PyTorch, so that a resumed run draws the same dropout and augmentation on every process.
        """
        torch.manual_seed(int(np.random.SeedSequence([self.config.seed, 4, step, rank]).generate_state(1)[0]))
        places = self.places(step)
        mine = places[rank::world_size]
        for i in range(0, max(1, len(mine)), micro_batch_size):
            part = mine[i:i + micro_batch_size]
            # a process without examples takes one of weight 0: every process must join the gradient's mean
            yield *self.batch(part or places[:1]), len(part) * world_size / len(places)
