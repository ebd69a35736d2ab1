"""How often is edit.py's verdict wrong? Its decision function is applied to simulated pairs, after each pair.

    python experiments/edit_simulation.py results/edit_simulation.json      half an hour on one core

Each cell has 20,000 simulated edits. A run's loss is the law of its budget plus noise. The two runs of a pair share
part of the noise; by default the pair's difference has the SD of the cell. HEAD's shorter runs share the noise of
their trunk.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import configurator  # noqa: E402
from common.errors import main_error  # noqa: E402
from experiments.compare import bounds, decide  # noqa: E402
from experiments.edit import CURVE_PAIRS, FEWEST  # noqa: E402
from runtime.records import write_json  # noqa: E402

PAIRS = 60
ALPHA = 0.05
USUAL_SD = 0.009  # nats, of pairs of 512 steps at 460K
B, K = 0.75, 0.36  # HEAD's loss is E + B (D / whole)^-K nats: Longhorn 460K, 512 steps of 1,024 bytes
PAIRS_IN_15_MINUTES = 36  # 25 s per pair of 512 steps at 460K, on two cores


def downwards(noise):
    return lambda rng, shape: -noise(rng, shape)


def exponential(rng, shape):
    return rng.exponential(1, shape) - 1


def lognormal(sigma):
    return lambda rng, shape: rng.lognormal(0, sigma, shape) - np.exp(sigma**2 / 2)


def rare(sd):
    """One pair in ten is off by `sd`."""
    return lambda rng, shape: rng.standard_normal(shape) + sd * (rng.random(shape) < 0.1) - 0.1 * sd


NOISE = {  # noise of a pair's difference, of mean 0; it is scaled to the SD of the cell
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "heavy tails (t, 3 degrees of freedom)": lambda rng, shape: rng.standard_t(3, shape),
    "unequal (the edit's SD is twice HEAD's)": lambda rng, shape: (
        2 * rng.standard_normal(shape) - rng.standard_normal(shape)),
    "exponential": exponential,
    "exponential, downwards": downwards(exponential),
    "lognormal (sigma 0.5)": lognormal(0.5),
    "lognormal (sigma 1)": lognormal(1),
    "lognormal (sigma 1), downwards": downwards(lognormal(1)),
    "one pair in ten 4 SD higher": rare(4),
    "one pair in ten 4 SD lower": rare(-4),
}


def law(times):
    """HEAD's loss after `times` the budget, minus its loss after the whole budget."""
    return B * (times**-K - 1)


def simulate(sd, times, noise="normal", simulations=20000, pairs=PAIRS, rng=0):
    """Simulate edits that need `times` as many tokens as HEAD; sd: of a pair's difference; pairs: planned.

    Returns a dict:
        better, worse, same, undecided: the share of edits with this verdict.
        covers: the share of final intervals that hold the truth.
        pairs: the mean number of pairs.
        half_width: the median half-width of the interval of log m.
    """
    rng = np.random.default_rng(rng)
    noises = [NOISE[noise](rng, (simulations, pairs)) for _ in range(2)]  # noise of a pair's difference, and of its sum
    difference, total = (sd / np.std(x) * x for x in noises)
    differences = difference + law(1 / times)
    head = (total - difference) / 2
    # a shorter run has half of HEAD's noise, from the shared trunk, and more noise of its own than real runs have
    apart = sd * rng.standard_normal((simulations, CURVE_PAIRS, 2))
    curves = law(np.array([1 / 4, 1 / 2])) + apart - head[:, :CURVE_PAIRS, None] / 2
    limits = list(bounds(np.arange(1, pairs + 1) / pairs, ALPHA))
    verdicts = np.full(simulations, "undecided", object)
    ends = np.zeros((simulations, 3))  # low, high, pairs
    going = np.arange(simulations)
    for n in range(2, pairs + 1):
        seen = differences[going, :n], curves[going, :n]
        verdict, _, low, high, *_ = decide(*seen, limits[n - 1], resample=False)
        told = np.flatnonzero(verdict != "undecided")
        for part in np.array_split(told, len(told) // 1000 + 1):  # 4,000 resamples of each take memory
            verdict[part], _, low[part], high[part], *_ = decide(*(x[part] for x in seen), limits[n - 1])
        ends[going] = np.stack([low, high, np.full(len(going), n)], -1)
        verdicts[going] = verdict
        going = going[(verdict == "undecided") | (n < FEWEST)]
        if not len(going):
            break
    low, high, count = ends.T
    truth = np.log(times)
    shares = {name: float(np.mean(verdicts == name)) for name in ("better", "worse", "same", "undecided")}
    return shares | {"covers": float(np.mean((low <= truth) & (truth <= high))), "pairs": float(count.mean()),
                     "half_width": float(np.median(high - low) / 2)}


def record():
    """Simulate all cells: [{"sd", "times", "noise", "pairs_at_most", ...}].

    They show false verdicts about edits that do nothing, with each kind of noise; whether the interval holds the truth;
    and which effects are found. A verdict after any pair counts, even where edit.py would go on because of --pairs: a
    user may read the line and stop it."""
    cells = [(0.03, 1.0, noise, pairs) for noise in NOISE for pairs in (12, PAIRS_IN_15_MINUTES, PAIRS)]
    cells += [(sd, times, noise, PAIRS) for noise in NOISE for sd in (0.003, 0.012) for times in (1.0, 1.05, 1.1)]
    cells += [(factor * USUAL_SD, times, "normal", most) for factor in (1, 2, 3)
              for times, most in ((1.05, PAIRS_IN_15_MINUTES), (1.02, 2 * PAIRS_IN_15_MINUTES),
                                  (1.0, PAIRS_IN_15_MINUTES))]
    return [{"sd": sd, "times": times, "noise": noise, "pairs_at_most": pairs,
             **simulate(sd, times, noise, pairs=pairs, rng=i)} for i, (sd, times, noise, pairs) in enumerate(cells)]


@dataclass
class Options:
    record: Path  # the file to write


def main(argv):
    args = configurator.read(Options, argv, __doc__)
    write_json(args.record, {"simulations": 20000, "cells": record()})


if __name__ == "__main__":
    with main_error("edit_simulation.py"):
        main(sys.argv[1:])
