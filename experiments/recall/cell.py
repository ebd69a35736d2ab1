"""One run of the recall benchmark: a mixer, a length, a width, a learning rate, a seed. mqar.py runs many.

    python experiments/recall/cell.py --model=longhorn --block_size=64 --learning_rate=1e-2 --out_dir=out/one
    python experiments/recall/cell.py --help

    loss = mean over the queries of -log softmax(h E^T)[value]         E the embedding, h (n_embd,) at a query
    rate(epoch) = learning_rate (1 + cos(pi epoch / epochs)) / 2       no warmup, no clipping

The loop, records, resuming and multiple processes are train.py's; this file has the configuration, data and evaluation.
A run stops at the first evaluation whose accuracy on the test queries is at least `stop_at`. So the test examples
decide when to stop and, in Figure 4, which learning rate counts. The examples of `by_pairs` decide neither.
"""

import contextlib
import functools
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import configurator  # noqa: E402
import train  # noqa: E402
from common.errors import ConfigError, is_out_of_memory  # noqa: E402
from configurator import Count, NotNegative, Positive, Range, Seed, Whole  # noqa: E402
from data.epochs import EpochData  # noqa: E402
from experiments.recall.models import Recall  # noqa: E402
from experiments.recall.task import PAIRS, Task, generate, overlap  # noqa: E402
from inspection.counting import state_size  # noqa: E402
from runtime import checkpoint, distributed  # noqa: E402


@dataclass
class RecallConfig(train.TrainConfig):
    # --- model
    model: str = "longhorn"  # mixer of the layers: a key of MIXERS in experiments/recall/models.py
    n_layer: int = 2  # layers, one residual branch each
    n_head: int = 0  # heads (mixers with heads); 0: n_embd / 64, at least 1
    n_embd: Count = 64  # width of the residual stream
    block_size: Count = 64  # T, tokens per example
    vocab_size: Whole = 8192  # half keys, half values
    # --- task
    pairs: int = 0  # key-value pairs per example, each queried once; 0: the benchmark's number for T
    power_a: Annotated[float, Range(-0.5, 2.5)] = 0.01  # a of p(i) ~ i^(a-1), the distribution of query positions
    train_examples: Count = 100_000  # generated once, seen in every epoch
    test_examples: Count = 3000  # per evaluation
    dataset: str = "recall"  # not used: examples are generated
    out_dir: str = ""  # folder for the records; empty: out/recall_ and the settings
    seed: Seed = 1  # of the weights, the examples, their order and the dropout
    # --- training
    batch_examples: Whole = 0  # per optimiser step; 0: the benchmark's, 512 up to T = 128, then 65536 / T
    batch_tokens: Whole = 0  # not set: batch_examples times T
    micro_batch_size: Count = 512  # examples per micro-batch on each process
    epochs: Count = 64  # length of the cosine
    max_iters: Whole = 0  # optimiser steps; 0: all epochs
    stop_at: float = 0.99  # stop at this accuracy; above 1: never
    learning_rate: Positive = 1e-2  # in the first epoch
    schedule: Literal["epochs", "cosine", "wsd", "constant"] = "epochs"  # epochs: a cosine stepped once per epoch
    warmup_iters: Whole = 0  # steps of linear warmup, not with schedule=epochs
    beta2: Annotated[float, Range(0, below=1)] = 0.999  # AdamW
    grad_clip: NotNegative = 0.0  # maximum gradient norm; 0: no clipping
    eval_interval: Whole = 0  # steps between evaluations; 0: one epoch
    log_interval: Count = 20  # steps between log lines

    FIRST = ("model", "block_size", "pairs", "n_embd", "d_state", "learning_rate", "epochs", "batch_examples", "seed",
             "out_dir")
    RENAMED = {**train.TrainConfig.RENAMED, "mixer": "model", "T": "block_size", "batch_size": "batch_examples"}

    @property
    def families(self):
        return [self.model] * self.n_layer

    @property
    def n_branches(self):
        return self.n_layer

    @property
    def steps_per_epoch(self):
        return math.ceil(self.train_examples / self.batch_examples)

    def task(self, pairs=None):
        """The Task of this config. Raises ConfigError for impossible sizes."""
        pairs = pairs or self.pairs or PAIRS.get(self.block_size)
        if not pairs:
            raise ConfigError(f"the benchmark has no number of pairs for T={self.block_size}, only for "
                              f"{', '.join(map(str, PAIRS))}: give --pairs")
        return Task(self.block_size, pairs, self.vocab_size, self.power_a)


def load(argv):
    """The RecallConfig of a command line, with zeros replaced by the benchmark's values. Raises ConfigError."""
    config = configurator.load(RecallConfig, argv, prog="cell.py")
    train.check_not_set(config, train.TEXT_ONLY, "is not for recall: leave it out; choose a model of MIXERS and "
                        "batch_examples, and evaluations read all test examples")
    config.pairs = config.task().pairs
    config.n_head = config.n_head or max(1, config.n_embd // 64)
    config.batch_examples = config.batch_examples or min(512, max(1, 65536 // config.block_size))
    config.batch_tokens = config.batch_examples * config.block_size
    config.max_iters = config.max_iters or config.steps_per_epoch * config.epochs
    config.eval_interval = config.eval_interval or config.steps_per_epoch
    config.out_dir = config.out_dir or (f"out/recall_{config.model}_T{config.block_size}_d{config.n_embd}"
                                        f"_lr{config.learning_rate:g}_seed{config.seed}")
    train.check(config)
    return config


def rate_factor(step, config):
    """Learning rate at optimiser step 0, 1 ..., as a fraction of learning_rate."""
    if config.schedule != "epochs":
        return train.learning_rate_factor(step, config)
    return 0.5 * (1 + math.cos(math.pi * (step // config.steps_per_epoch) / config.epochs))


# ---------------------------------------------------------------------------------------------------------------- data

class RecallData(EpochData):
    """A run's examples, for train.py's loop. Raises ConfigError if a test example is also a training example."""

    def __init__(self, config, device):
        super().__init__(config, device, config.train_examples, config.batch_examples, config.steps_per_epoch)
        self.train = generate(config.task(), config.train_examples, config.seed)
        self.test = generate(config.task(), config.test_examples, config.seed, "test")
        if shared := overlap(self.train, self.test):
            raise ConfigError(f"{shared} of {config.test_examples} test examples are also in the training set: use "
                              "more pairs or a larger vocab_size")
        self.identity = {"train": self.train.sha256(), "test": self.test.sha256()}
        self.meta = {"dataset": "recall", "sha256": self.identity}

    def batch(self, places):
        return self.train.batch([row for *_, row in places], self.device)


# ---------------------------------------------------------------------------------------------------------- evaluation

def evaluate(config, data, model, final=False):
    """Accuracy on the test examples, on every process; at the end also by distance and by number of pairs."""
    right, loss = answers(config, model, data.test, data.device)
    accuracy = right.mean().item()
    reached = accuracy >= config.stop_at
    metrics = {"val_loss": loss, "accuracy": accuracy, "stop": reached}
    if final or reached:
        metrics |= {"reached": reached, "state_size": state_size(model),
                    "by_distance": by_distance(right, data.test.distances()),
                    "by_pairs": by_pairs(config, model, data.device)}
    return metrics


@torch.no_grad()
def answers(config, model, examples, device):
    """((n, P) float64, 1.0 for right answers, in the order of query positions; the mean loss in nats)."""
    model.eval()
    right = []
    total = 0.0
    for i in range(0, len(examples), config.micro_batch_size):
        idx, targets = examples.batch(slice(i, i + config.micro_batch_size), device)
        with distributed.autocast(config, device):
            logits, loss = model(idx, targets)  # (queries, vocab_size)
        right.append((logits.argmax(-1) == targets[targets >= 0]).view(len(idx), -1).double().cpu())
        total += loss.item() * len(idx)
    model.train()
    return torch.cat(right).numpy(), total / len(examples)


def by_pairs(config, model, device, examples=1000):
    """Accuracy on new examples with fewer and more pairs than in training: [{"pairs", "queries", "accuracy"}]."""
    rows = []
    for pairs in sorted({config.pairs, *(2**i for i in range(2, 20) if 4 * 2**i <= config.block_size)}):
        with contextlib.suppress(ConfigError):  # the vocabulary has too few keys
            fresh = generate(config.task(pairs), examples, config.seed, "pairs")
            right, _ = answers(config, model, fresh, device)
            rows.append({"pairs": pairs, "queries": right.size, "accuracy": right.mean().item()})
    return rows


def by_distance(right, distances):
    """Accuracy by distance from key to query in tokens, both (n, P), in bins of powers of two:
    [{"from", "to" (exclusive), "queries", "accuracy"}]."""
    power = np.log2(distances).astype(int)
    return [{"from": 2**i, "to": 2 ** (i + 1), "queries": int((power == i).sum()),
             "accuracy": right[power == i].mean().item()} for i in np.unique(power).tolist()]


def build_model(config, device):
    """The config's Recall model. Raises ConfigError for an unknown mixer, or sizes that do not fit together."""
    try:
        return Recall(config).to(device)
    except (ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(error) from None


def main(argv):
    config = load(argv)
    device = distributed.open_device(config)
    config.dtype = str(distributed.pick_dtype(config.dtype, device)).removeprefix("torch.")
    train.seed_all(config.seed)
    model, data = build_model(config, device), RecallData(config, device)
    distributed.say(checkpoint.Initial(config).load(model, data))
    train.train(config, model, data, functools.partial(evaluate, config, data), rate_factor)


if __name__ == "__main__":
    sys.exit(distributed.launch("cell.py", main))
