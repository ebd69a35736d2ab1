"""Two families side by side: the tokens each needs for a loss, and whether a difference over seeds is more than luck.

    ratio(loss) = tokens that b needs for it / tokens that a needs            above 1, a learns from fewer

No family is called the winner for being lowest. It has to be below every other one at once, by Welch's
test over seeds with Holm's correction for the number of comparisons; with one seed nobody can win.

`python experiments/scaling/table1.py report` prints both, fit.py fits the curves.
"""

import math
from collections import namedtuple
from dataclasses import dataclass
from warnings import catch_warnings, simplefilter

import numpy as np
from scipy import stats

from experiments.scaling.fit import CannotFit, column

# ---------------------------------------------------------------------------------------------------- sample efficiency

@dataclass
class SampleEfficiency:
    """loss (m,) falling, and at each the tokens b needs over the tokens a needs, ratio (m,); at_end is the last: at
    the loss loss_at_end that the worse of the two ends with (its lowest). Empty and None where reason says why."""

    loss: np.ndarray
    ratio: np.ndarray
    at_end: float | None
    loss_at_end: float | None
    reason: str | None


def sample_efficiency(tokens_a, loss_a, tokens_b, loss_b):
    """How many times the tokens of family a that family b needs for the same loss. Returns a SampleEfficiency.

    Above 1, a learns from fewer tokens. A curve counts as having reached a loss when it first goes below it (its
    running minimum), between two evaluations linearly in log tokens; losses that are None or not finite are left out.
    The running minimum favours the noisier curve and the one that was evaluated more often: give both the same
    evaluations. Raises CannotFit on tokens that are not positive numbers or lengths that differ.
    """
    curves = []
    for name, tokens, loss in (("a", tokens_a, loss_a), ("b", tokens_b, loss_b)):
        tokens, loss = column(f"tokens_{name}", tokens), column(f"loss_{name}", loss)
        if len(tokens) != len(loss):
            raise CannotFit(f"tokens_{name}, loss_{name} have {len(tokens)} and {len(loss)} values: give a loss each")
        tokens, loss = tokens[np.isfinite(loss)], loss[np.isfinite(loss)]
        bad = tokens[~((tokens > 0) & np.isfinite(tokens))]
        if len(bad):
            raise CannotFit(f"tokens_{name} holds {bad[0]:g}: not a positive number")
        order = np.lexsort((loss, tokens))  # of two losses at one count the lower, as it would be with a finer clock
        curves.append((np.log(tokens[order]), np.minimum.accumulate(loss[order])))
    nothing = np.array([])
    for name, (_, loss) in zip("ab", curves, strict=True):
        if not len(loss):
            return SampleEfficiency(nothing, nothing, None, None, f"family {name} has no loss")
    (xa, la), (xb, lb) = curves
    top, end = min(la[0], lb[0]), max(la[-1], lb[-1])
    if end > top:
        better, worse = "ab" if la[-1] < lb[-1] else "ba"
        reason = f"family {better} starts below {end:.4g}, the lowest loss of family {worse}: evaluate it earlier"
        return SampleEfficiency(nothing, nothing, None, None, reason)
    loss = np.unique(np.concatenate([la, lb, [top, end]]))[::-1]
    loss = loss[(loss <= top) & (loss >= end)]
    with np.errstate(over="ignore"):
        ratio = np.exp(_reached(xb, lb, loss) - _reached(xa, la, loss))
    return SampleEfficiency(loss, ratio, float(ratio[-1]), float(end), None)


def _reached(x, envelope, loss):
    """log tokens at which a falling envelope first is at or below each of `loss`."""
    j = np.searchsorted(-envelope, -loss, side="left")
    i = np.maximum(j - 1, 0)
    drop = envelope[i] - envelope[j]
    part = np.where(drop > 0, (envelope[i] - loss) / np.where(drop > 0, drop, 1), 1)
    return x[i] + part * (x[j] - x[i])


# ----------------------------------------------------------------------------------------------------------- over seeds

Winner = namedtuple("Winner", "family reason p")  # name or None; sentence; {other family: p by Holm's method, or None}


def _seeds(losses):
    values = column("losses", losses)
    return values[np.isfinite(values)]


def compare(losses_a, losses_b):
    """p of Welch's two-sided t test that two families have the same mean loss over seeds; None and NaN are holes.

    None with fewer than two seeds on a side, and when no seed changed anything but the families differ: then there is
    no spread to judge by. 1 when all losses are the same number.

    Not paired, though a seed fixes the data order for both: with three seeds pairing halves the degrees of freedom, it
    needs the two lists aligned run by run, and holes break that. What the common order makes equal in both families
    makes Welch's p too large, not too small, so a claim that passes here stands. The choice is made here, before any
    result is seen: to take the smaller of two tests' p would be no test.
    """
    a, b = _seeds(losses_a), _seeds(losses_b)
    if min(len(a), len(b)) < 2:
        return None
    if max(np.ptp(a), np.ptp(b)) <= 1e-12 * max(np.abs(a).max(), np.abs(b).max()):  # rounding is not a spread
        return 1.0 if abs(a.mean() - b.mean()) <= 1e-12 * np.abs(a).max() else None
    with catch_warnings():
        simplefilter("ignore", RuntimeWarning)  # losses that nearly agree: p is no worse than they are
        p = float(stats.ttest_ind(a, b, equal_var=False).pvalue)
    return p if math.isfinite(p) else None


def winner(cells, alpha=0.05):
    """The family with the lowest mean loss if it is significantly better than every other: a Winner.

    cells {family: losses over seeds}. Each comparison of the best with another is Welch's, the p are corrected by
    Holm's method for their number, and all must be below alpha. That the best was chosen by looking costs nothing
    extra: to be named it has to beat all the others at once.
    """
    seeds = {family: _seeds(losses) for family, losses in cells.items()}
    means = {family: float(values.mean()) for family, values in seeds.items() if len(values)}
    if len(means) < 2:
        return Winner(None, f"{len(means)} families with a loss: nothing to compare", {})
    best = min(means, key=means.get)
    others = sorted((f for f in seeds if f != best), key=lambda f: means.get(f, math.inf))
    p = {family: compare(seeds[best], seeds[family]) for family in others}
    rank, floor = 0, 0.0
    for family in sorted((f for f in others if p[f] is not None), key=p.get):
        floor = max(floor, min(1.0, p[family] * (len(others) - rank)))
        p[family], rank = floor, rank + 1
    for family in others:
        if p[family] is None:
            short = [f"{f} has {len(seeds[f])}" for f in (best, family) if len(seeds[f]) < 2]
            return Winner(None, f"{best} is lowest, but cannot be tested against {family}: " + (
                f"{' and '.join(short)} of the two seeds needed" if short else "their seeds all gave the same loss"), p)
    worst = max(others, key=p.get)
    if p[worst] >= alpha:
        return Winner(None, f"{best} is lowest, but not significantly below {worst}: p = {p[worst]:.2g}, limit "
                      f"{alpha:g}", p)
    return Winner(best, f"{best} is below every other family, p <= {p[worst]:.2g} after Holm's correction", p)
