"""How often does a duel's 95% interval miss the truth? Simulates duels and judges them with compare.py, as a report
judges real ones. They include the search for both rates and its error, seeds or pairs, pooling, held-out files, and the
curve over budgets.

    python experiments/duel_simulation.py results/duel_simulation.json      five minutes on two cores

A run's loss = law of its budget + file + seed + seed x file + what its rate costs. Each cell has 20,000 duels.
"""

import json
import math
import sys
import time
from collections import namedtuple
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import configurator  # noqa: E402
from common.errors import main_error  # noqa: E402
from experiments import compare  # noqa: E402
from runtime.records import environment, write_json  # noqa: E402

# Roughly the values for Longhorn and Mamba after a million bytes (results/duel_longhorn_mamba_1.5M.json), in nats
B, K = 0.40, 0.49  # loss is E + B (tokens / whole budget)^-K
SEED, SEED_BY_FILE = 0.006, 0.03  # SD of a run's loss over seeds, and of further noise on each file
CHANGE, CHANGE_BY_FILE = 0.005, 0.015  # SD of the noise that only a seed's shorter run has
SEARCH, CURVATURE = 0.009, 0.047  # SD of a search's losses over seeds and rates; nats per squared e-fold of the rate
FILES, BY_FILE = 45, 0.01  # held-out files, and the SD over them of the true difference of two families
BUDGETS = (0.25, 0.5, 1.0)
LOOKS = (8, 11, 14, 16)  # `grown` looks after these numbers of pairs
RATES = 2e-3 * 2.0 ** (np.arange(6) - 2.5)  # four rates, and one more on either side


def law(budget):
    return 1.4 + B * (budget**-K - 1)


Simulated = namedtuple("Simulated", "documents weights search search_noise")  # a family, as compare.py reads it


def noise(rng, seeds, sd, sd_by_file):
    """Noise of shape (seeds, files)."""
    return sd * rng.standard_normal((seeds, 1)) + sd_by_file * rng.standard_normal((seeds, FILES))


def duel(rng, seeds, times=1.0, correlation=None, search=4):
    """A simulated duel in which a needs `times` as many tokens as b: (Difference, Multiplier).

    Args:
        seeds: reported seeds of each family.
        correlation: of the noise of two runs with the same seed, which are then compared in pairs, also in the search.
            None: the families have different seeds.
        search: seeds of the search.
    """
    shared, own = np.sqrt([correlation or 0.0, 1 - (correlation or 0.0)])
    tokens = np.exp(rng.normal(0, 1, FILES))
    best = 2e-3 * 2 ** rng.uniform(-0.5, 0.5)
    level = rng.normal(0, 0.25, FILES)
    effect = BY_FILE * rng.standard_normal(FILES)
    in_search = shared * rng.standard_normal((len(RATES), search))
    in_runs = shared * noise(rng, seeds, SEED, SEED_BY_FILE)
    families = []
    for factor, tilt, first_seed in (times, effect, 0), (1.0, 0.0, seeds if correlation is None else 0):
        of_search = SEARCH * (in_search + own * rng.standard_normal(in_search.shape))
        of_search += 2 * SEED * rng.standard_normal((1, search)) + CURVATURE * np.log(RATES / best)[:, None] ** 2
        searched = {rate: dict(enumerate(losses)) for rate, losses in zip(RATES.tolist(), of_search, strict=True)}
        off = math.log(compare.best_rate(searched).rate / best)
        losses = level + tilt + CURVATURE * off**2 + in_runs + own * noise(rng, seeds, SEED, SEED_BY_FILE)
        documents = {}
        for budget in BUDGETS:
            change = noise(rng, seeds, CHANGE, CHANGE_BY_FILE) if budget < 1 else 0
            documents[budget] = dict(enumerate(law(budget / factor) + losses + change, first_seed))
        half = compare.mean_losses(documents[0.5], tokens)
        families.append(Simulated(documents, tokens, searched, (half.var(ddof=1), seeds - 1)))
    rates = compare.rate_variance(*families)
    d = compare.difference_of(families, *families, lambda family: family.documents[1.0], rates)
    return d, compare.multiplier(d, *(compare.Curve(family, 1.0, families) for family in families))


def misses(simulations, rng=0, times=1.0, **design):
    """The share of simulated duels in which the 95% interval of the multiplier misses the truth."""
    rng = np.random.default_rng(rng)
    missed = 0
    for _ in range(simulations):
        _, m = duel(rng, times=times, **design)
        missed += not m.low <= times <= m.high
    return missed / simulations


def grown(simulations, until):
    """The share of duels between equals whose final interval excludes 0. Seeds are added, up to the last of LOOKS,
    until the interval is "narrow" (at most 0.007 nats either way) or "decides" (excludes 0)."""
    rng = np.random.default_rng(0)
    missed = 0
    for _ in range(simulations):
        a, b = 0.01 * rng.standard_normal((2, LOOKS[-1], 1))
        for n in LOOKS:
            d = compare.difference(a[:n], b[:n], np.ones(1), paired=True)
            excludes = not d.low <= 0 <= d.high
            if excludes if until == "decides" else d.high - d.low <= 0.014:
                break
        missed += excludes
    return missed / simulations


def record(simulations):
    """Simulate every cell, [{"seeds", "correlation", "search", "times", "misses"}], and the two rules for adding
    seeds."""
    designs = [(16, r, 4) for r in (None, 0.0, 0.7, 0.95)] + [(16, None, 2)]
    designs += [(n, r, search) for n in (5, 3) for r, search in ((None, 1), (0.95, 1), (0.95, 2))]
    designs = [(*design, 1.0) for design in designs]
    designs += [(*design, times) for design in ((16, 0.7, 4), (3, None, 1)) for times in (1.05, 1.1, 1.3, 2.0)]
    cells = [dict(zip(("seeds", "correlation", "search", "times"), design, strict=True)) for design in designs]
    with ProcessPoolExecutor() as pool:
        runs = [pool.submit(misses, simulations, i, **cell) for i, cell in enumerate(cells)]
        added = {until: pool.submit(grown, simulations, until) for until in ("narrow", "decides")}
        for cell, run in zip(cells, runs, strict=True):
            cell["misses"] = run.result()
            print(json.dumps(cell), flush=True)
        return {"cells": cells, "seeds_added": {until: run.result() for until, run in added.items()}}


@dataclass
class Options:
    record: Path  # the file to write


def main(argv):
    args = configurator.read(Options, argv, __doc__)
    where = environment()
    simulations = 20000
    about = {"command": f"python experiments/duel_simulation.py {args.record}", "machine": where["cpu"],
             "commit": where["commit"], "date": time.strftime("%Y-%m-%d", time.gmtime()), "simulations": simulations}
    write_json(args.record, about | record(simulations))


if __name__ == "__main__":
    with main_error("duel_simulation.py"):
        main(sys.argv[1:])
