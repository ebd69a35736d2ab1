"""How often does a duel's 95% interval miss the truth? Simulated duels, judged by compare.py as a report judges real
ones: the search of both rates and its error, seeds or pairs, pooling, held-out files, the curve over budgets.

    python experiments/duel_simulation.py results/duel_simulation.json      five minutes on two cores

A run's loss = law of its budget + file + seed + seed x file + what its rate costs. Each cell has 20,000 duels.
"""

import json
import math
import sys
import time
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

# About as recorded for Longhorn and Mamba after a million bytes (results/duel_longhorn_mamba_1.5M.json), in nats
B, K = 0.40, 0.49  # loss is E + B (tokens / whole budget)^-K
SEED, SEED_BY_FILE = 0.006, 0.03  # SD of a run's loss over seeds, and further on each file
CHANGE, CHANGE_BY_FILE = 0.005, 0.015  # SD of what a shorter run of a seed has of its own
SEARCH, CURVATURE = 0.009, 0.047  # SD of a search's losses over seeds and rates; nats per squared e-fold of the rate
FILES, BY_FILE = 45, 0.01  # held-out files, and the SD over them of the true difference of two families
BUDGETS = (0.25, 0.5, 1.0)
LOOKS = (8, 11, 14, 16)  # at so many pairs, where seeds are added
RATES = 2e-3 * 2.0 ** (np.arange(6) - 2.5)  # four rates, and one more on either side


def law(budget):
    return 1.4 + B * (budget**-K - 1)


def duel(rng, seeds, times=1.0, correlation=None, search=4):
    """A simulated duel in which a needs `times` b's tokens: (Difference, Multiplier).

    seeds: of each family; correlation: of the noise of two runs with the same seed, which are then compared in pairs,
    also in the search; None: the families have different seeds; search: seeds of the search.
    """
    r, tokens = correlation or 0.0, np.exp(rng.normal(0, 1, FILES))
    w, best = tokens / tokens.sum(), 2e-3 * 2 ** rng.uniform(-0.5, 0.5)
    level, effect = rng.normal(0, 0.25, FILES), BY_FILE * rng.standard_normal(FILES)
    normal = lambda *shape: rng.standard_normal(shape)
    noise_like = lambda *shape: SEED * normal(*shape[:-1], 1) + SEED_BY_FILE * normal(*shape)
    searched, shared = normal(len(RATES), search), noise_like(seeds, FILES)
    runs, searches, half = [], [], []
    for factor, tilt in ((times, effect), (1.0, 0.0)):
        noise_of_search = math.sqrt(r) * searched + math.sqrt(1 - r) * normal(len(RATES), search)
        cost = CURVATURE * np.log(RATES / best) ** 2
        losses = cost[:, None] + normal(1, search) * 2 * SEED + SEARCH * noise_of_search
        searches.append({rate: dict(enumerate(row)) for rate, row in zip(RATES.tolist(), losses.tolist(), strict=True)})
        rate = compare.best_rate({rate: list(by.values()) for rate, by in searches[-1].items()}).rate
        noise = math.sqrt(r) * shared + math.sqrt(1 - r) * noise_like(seeds, FILES)
        noise += level + tilt + CURVATURE * math.log(rate / best) ** 2
        change = lambda: CHANGE * normal(seeds, 1) + CHANGE_BY_FILE * normal(seeds, FILES)
        runs.append({b: law(b / factor) + noise + (change() if b < 1 else 0) for b in BUDGETS})
        half.append(runs[-1][0.5] @ w)
    known = np.mean([np.var(x, ddof=1) for x in half]), 2 * (seeds - 1)
    (a, b), by_seed = runs, [{t: dict(enumerate(x)) for t, x in of.items()} for of in runs]
    pooled = {t: compare.pooled_sd([compare.changes(of, t, 1.0) @ w for of in by_seed]) for t in BUDGETS[:-1]}
    d = compare.difference(a[1.0], b[1.0], tokens, compare.pooled_sd([a[1.0] @ w, b[1.0] @ w]),
                           paired=correlation is not None, rates=compare.rate_variance(*searches, known))
    return d, compare.multiplier(d, *(compare.Curve(of, 1.0, tokens, pooled) for of in by_seed))


def misses(simulations, rng=0, times=1.0, **design):
    """Share of simulated duels whose 95% interval for the multiplier of tokens misses the truth."""
    rng, missed = np.random.default_rng(rng), 0
    for _ in range(simulations):
        d, m = duel(rng, times=times, **design)
        missed += not m.low <= times <= m.high
    return missed / simulations


def grown(simulations, until):
    """Share of duels of equals that end with an interval without 0, if seeds are added up to the last of LOOKS, until
    the interval is "narrow" (half of it at most .007 nats), or until it "decides" (has no 0)."""
    rng, missed, w = np.random.default_rng(0), 0, np.ones(1)
    for _ in range(simulations):
        a, b = 0.01 * rng.standard_normal((2, LOOKS[-1], 1))
        for n in LOOKS:
            d = compare.difference(a[:n], b[:n], w, paired=True)
            excludes = not d.low <= 0 <= d.high
            if excludes if until == "decides" else d.high - d.low <= 0.014:
                break
        missed += excludes
    return missed / simulations


def record(simulations):
    """Every cell, [{"seeds", "correlation", "search", "times", "misses"}], and the two ways to add seeds."""
    designs = [(16, r, 4) for r in (None, 0.0, 0.7, 0.95)] + [(16, None, 2)]
    designs += [(n, r, search) for n in (5, 3) for r, search in ((None, 1), (0.95, 1), (0.95, 2))]
    designs = [(*design, 1.0) for design in designs]
    designs += [(*design, times) for design in ((16, 0.7, 4), (3, None, 1)) for times in (1.05, 1.1, 1.3, 2.0)]
    cells = [dict(zip(("seeds", "correlation", "search", "times"), design, strict=True)) for design in designs]
    with ProcessPoolExecutor() as pool:
        runs = [pool.submit(misses, simulations, rng=i, **cell) for i, cell in enumerate(cells)]
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
