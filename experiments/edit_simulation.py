"""How often does edit.py's verdict err? Its decision function on simulated pairs, looked at after each pair.

    python experiments/edit_simulation.py results/edit_simulation.json      two minutes on one core

Each cell has 20,000 simulated edits. A run's loss is the law of its budget plus noise; the two runs of a pair share a
part of the noise (by default such that the pair's difference has the SD of the cell), and HEAD's shorter runs share the
noise of their trunk.
"""

import functools
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import configurator  # noqa: E402
from common.errors import main_error  # noqa: E402
from experiments.compare import bounds, decide  # noqa: E402
from experiments.edit import CURVE_PAIRS, FEWEST, USUAL_SD  # noqa: E402
from runtime.records import write_json  # noqa: E402

PAIRS = 60
B, K = 0.75, 0.36  # HEAD's loss is E + B (D / whole)^-K nats: Longhorn 460K, 512 steps of 1,024 bytes
PAIRS_IN_15_MINUTES = 36  # of 512 steps at 460K, on two cores at 25 s per pair
NOISE = {  # noise of HEAD and of the edit's runs, of unit variance each; then both are scaled
    "normal": lambda rng, shape: (rng.standard_normal(shape), rng.standard_normal(shape)),
    "heavy tails (t, 3 degrees of freedom)": lambda rng, shape: (rng.standard_t(3, shape), rng.standard_t(3, shape)),
    "skewed (gamma, shape 2)": lambda rng, shape: (gamma(rng, shape), gamma(rng, shape)),
    "unequal (the edit's SD is twice HEAD's)": lambda rng, shape: (
        rng.standard_normal(shape), 2 * rng.standard_normal(shape)),
    "unequal and skewed (3 times, gamma)": lambda rng, shape: (gamma(rng, shape), 3 * gamma(rng, shape)),
    "one pair in five with 3 times the SD": lambda rng, shape: tuple(
        np.where(rng.random((2, *shape)) < 0.2, 3, 1) * rng.standard_normal((2, *shape))),
}


def gamma(rng, shape):
    return (rng.gamma(2, 1, shape) - 2) / 2**0.5


@functools.cache
def planned(pairs, alpha, power):
    return list(bounds(np.arange(1, pairs + 1) / pairs, alpha, power))


def law(times):
    """HEAD's loss after `times` the whole budget, minus that after the whole one."""
    return B * (times**-K - 1)


def simulate(sd, times, noise="normal", simulations=20000, pairs=PAIRS, rng=0, power=2, **limits):
    """Simulated edits that need `times` HEAD's tokens. Returns {"better", "worse", "same", "undecided": shares,
    "covers": share of final intervals that hold the truth, "pairs": mean number, "half_width": median, of log m}.

    sd: of a pair's difference; pairs: planned; power: of `bounds`; limits: margin and alpha of `decide`.
    """
    rng, shape = np.random.default_rng(rng), (simulations, pairs)
    head, edit = NOISE[noise](rng, shape)
    scale = sd / np.std(head - edit)
    head, edit = scale * head, scale * edit
    differences = edit - head + law(1 / times)
    # a shorter run has half of HEAD's noise, from their trunk, and noise of its own: more than it really has
    apart = sd * rng.standard_normal((simulations, CURVE_PAIRS, 2))
    curves = law(np.array([1 / 4, 1 / 2])) + apart - head[:, :CURVE_PAIRS, None] / 2
    open_, ends = np.arange(simulations), np.zeros((simulations, 3))
    verdicts = np.full(simulations, "undecided", object)
    bound = planned(pairs, limits.get("alpha", 0.05), power)
    for n in range(2, pairs + 1):
        verdict, at, low, high, _, _ = decide(differences[open_, :n], curves[open_, :min(n, CURVE_PAIRS)],
                                              bound[n - 1], **limits)
        ends[open_] = np.stack([low, high, np.full(len(open_), n)], -1)
        verdicts[open_] = verdict
        open_ = open_[(verdict == "undecided") | (n < FEWEST)]
        if not len(open_):
            break
    low, high, count = ends.T
    truth = np.log(times)
    shares = {name: float(np.mean(verdicts == name)) for name in ("better", "worse", "same", "undecided")}
    return shares | {"covers": float(np.mean((low <= truth) & (truth <= high))), "pairs": float(count.mean()),
                     "half_width": float(np.median(high - low) / 2)}


def record(simulations=20000):
    """Every cell: [{"sd", "times", "noise", "pairs_at_most", "power", ...}]. With power 8, that of edit.py's --pairs, a
    verdict counts at any pair too, although edit.py goes on: one may read the line and stop it."""
    cells = [(sd, times, noise, PAIRS, 2) for noise in NOISE for sd in (0.003, 0.006, 0.012, 0.03)
             for times in (1.0, 1.05, 1.1)]
    cells += [(factor * USUAL_SD, times, "normal", most, 2) for factor in (1, 2, 3)
              for times, most in ((1.05, PAIRS_IN_15_MINUTES), (1.02, 2 * PAIRS_IN_15_MINUTES),
                                  (1.0, PAIRS_IN_15_MINUTES))]
    cells += [(0.012, 1.0, noise, most, power) for noise in NOISE
              for most, power in ((10, 2), (20, 2), (10, 8), (20, 8), (PAIRS, 8))]
    return [{"sd": sd, "times": times, "noise": noise, "pairs_at_most": pairs, "power": power, **simulate(
        sd, times, noise, simulations, pairs, i, power)} for i, (sd, times, noise, pairs, power) in enumerate(cells)]


@dataclass
class Options:
    record: Path  # the file to write


def main(argv):
    args = configurator.read(Options, argv, __doc__)
    cells = record()
    write_json(args.record, {"simulations": 20000, "cells": cells})
    for cell in cells:
        print(json.dumps(cell))


if __name__ == "__main__":
    with main_error("edit_simulation.py"):
        main(sys.argv[1:])
