"""Comparing two families: the difference in loss, and the tokens that one needs for the other's loss, with intervals.

    difference d = loss of a - loss of b             over seeds, on documents that chose no learning rate
    variance     = s^2 / n                           s: SD of the differences of n pairs, if both have the same seeds
                   or s^2 (1/n_a + 1/n_b)            s: SD over seeds, pooled over a size's families if they agree
                   + variance over documents         other texts would give another difference: clustered by document,
                                                     less the noise of seeds in it
    interval     = d +- t sqrt(variance)             95%, degrees of freedom by Welch and Satterthwaite; of the seeds
                                                     only, if the variance over documents is negative

    multiplier m = tokens a needs for b's loss / tokens b had          read off the curve over budgets of the better
                   one; its interval combines the ends of d's interval and the error of the curve

Runs with the same seed are pairs: they see the same tokens in the same order, and parameters of the same name and shape
start from the same values (runtime/parameters.py). The closer two models are, the more of their noise is shared. An
interval that contains 1 says how far apart the two may be: they are equal only within that.

    python experiments/scaling/compare.py      how often an interval misses 1 when both families are the same
"""

import math
from collections import namedtuple

import numpy as np
from scipy import stats

Difference = namedtuple("Difference", "mean low high se df p seeds_se documents_se")
Multiplier = namedtuple("Multiplier", "value low high beyond")  # beyond: outside the budgets of the better family
BestRate = namedtuple("BestRate", "rate beyond tried")  # beyond: the next rate to try if the best is at the edge
Winner = namedtuple("Winner", "family reason p")  # name or None; sentence; {other family: p by Holm's method, or None}
CONFIDENCE = 0.95


def best_rate(losses_by_rate):
    """The vertex of a parabola in log rate through the best rate and its neighbours: a BestRate, or None without runs.

    losses_by_rate: {rate: losses over seeds}; inf for a diverged run, which makes its rate the worst.
    """
    means = {rate: float(np.mean(losses)) for rate, losses in sorted(losses_by_rate.items()) if len(losses)}
    tried, losses = list(means), list(means.values())
    if not any(map(math.isfinite, losses)):
        return None
    i = int(np.argmin(losses))
    if i in (0, len(tried) - 1):
        return BestRate(tried[i], tried[i] * (0.5 if i == 0 else 2), means)
    x, y = np.log(tried[i - 1:i + 2]), np.array(losses[i - 1:i + 2])
    if not np.isfinite(y).all():  # a neighbour diverged, so no parabola: keep this rate
        return BestRate(tried[i], None, means)
    a, b, _ = np.polyfit(x - x[1], y, 2)
    vertex = x[1] - b / (2 * a) if a > 0 else x[1]
    return BestRate(float(f"{math.exp(vertex):.3g}"), None, means)


# ----------------------------------------------------------------------------------------------------- two mean losses

def document_variance(a, b, tokens):
    """(variance, degrees of freedom) of the mean difference of a (seeds, documents) and b, over draws of documents.

    The noise of seeds within documents is subtracted, as it is counted with the seeds. So the estimate can be negative
    by chance. tokens (documents,) are weights.
    """
    w = tokens / tokens.sum()
    d = a.mean(0) - b.mean(0)
    share = w * w * (1 - 2 * w + w @ w)  # share of a document's variance in w^2 (d - mean)^2, on average
    scale = (w @ w) / share.sum() if len(w) > 1 else 0.0
    clustered, noise = scale * (w * w) @ (d - w @ d) ** 2, 0.0
    for x in (a, b):
        if len(x) > 1:
            off = x - x.mean(0)
            off = off - (off @ w)[:, None]
            noise += (w * w) @ (off**2).sum(0) / (len(x) - 1) / len(x)
    return clustered - noise, max(1.0, 1 / (w @ w) - 1)


def pooled_sd(losses):
    """(SD, degrees of freedom) over seeds, pooled over families [(seeds,) ...]; None if their SDs differ (Bartlett's
    test at 5%) or no family has two seeds."""
    several = [x for x in losses if len(x) > 1]
    spread = min((np.ptp(x) for x in several), default=0.0)
    if not several or len(several) > 1 and spread > 0 and stats.bartlett(*several).pvalue < 0.05:
        return None
    df = sum(len(x) - 1 for x in several)
    return math.sqrt(sum((len(x) - 1) * np.var(x, ddof=1) for x in several) / df), df


def difference(a, b, tokens, pooled=None, paired=False):
    """Difference of the mean losses of a (seeds, documents) and b; None if there are too few seeds to know the spread.

    tokens (documents,): evaluated tokens of each; pooled: from pooled_sd, or None to use each family's own SD; paired:
    a and b have the same seeds, in the same order: with at least two, their differences have the SD.
    """
    w = tokens / tokens.sum()
    x, y = a @ w, b @ w
    if paired and len(x) > 1:
        parts = [(np.var(x - y, ddof=1) / len(x), len(x) - 1)]
        a, b = a - b, np.zeros((1, len(w)))
    elif pooled:
        parts = [(pooled[0] ** 2 * (1 / len(x) + 1 / len(y)), pooled[1])]
    elif min(len(x), len(y)) < 2:
        return None
    else:
        parts = [(np.var(z, ddof=1) / len(z), len(z) - 1) for z in (x, y)]
    seeds = sum(v for v, _ in parts)
    variance, df = document_variance(a, b, tokens)
    parts.append((max(variance, -0.3 * seeds), df))  # cutting at 0 would make it too large on average
    total = sum(v for v, _ in parts)
    mean = float(x.mean() - y.mean())
    if total <= 1e-24:  # the same runs twice
        return Difference(mean, mean, mean, 0.0, math.inf, 1.0 if abs(mean) < 1e-12 else 0.0, 0.0, 0.0)
    # A negative part makes the total smaller. In the degrees of freedom the same draw would count again, and with 3
    # seeds leave 2 of the 4; so only the positive parts count there.
    above = [(v, df) for v, df in parts if v > 0]
    df = sum(v for v, _ in above) ** 2 / sum(v * v / df for v, df in above)
    half, se = stats.t.ppf((1 + CONFIDENCE) / 2, df) * math.sqrt(total), math.sqrt(total)
    return Difference(mean, mean - half, mean + half, se, float(df), float(2 * stats.t.sf(abs(mean) / se, df)),
                      math.sqrt(seeds), math.sqrt(max(0.0, variance)))


# ---------------------------------------------------------------------------------------------------------- multipliers

class Curve:
    """A family's loss at its budgets relative to the main one, from seeds that were run at both.

    runs {tokens: {seed: losses (documents,)}}; main: tokens; weights (documents,). x: log(tokens / main), ascending;
    y: loss minus the loss at the main budget; se: standard error of y.
    """

    def __init__(self, runs, main, weights):
        w, points = weights / weights.sum(), [(0.0, 0.0, 0.0)]
        for tokens, seeds in runs.items():
            common = sorted(seeds.keys() & runs[main].keys())
            if tokens == main or not common:
                continue
            change = np.array([seeds[s] - runs[main][s] for s in common])  # (seeds, documents)
            variance = np.var(change @ w, ddof=1) / len(common) if len(common) > 1 else 0.0
            variance += max(0.0, document_variance(change, np.zeros((1, len(w))), weights)[0])
            points.append((math.log(tokens / main), float((change @ w).mean()), math.sqrt(variance)))
        self.x, self.y, self.se = np.array(sorted(points)).T
        self.known = len(points) > 1 and self.x[0] < 0

    def log_tokens(self, rise, shift=0.0):
        """The x <= 0 at which the loss is `rise` above the main budget's, on a parabola through the points, moved by
        `shift` (points,)."""
        y = self.y + shift
        grid = np.linspace(min(self.x[0] - math.log(2), -0.1), 0, 400)
        fit = np.polyfit(self.x, y, min(2, len(y) - 1), w=1 / (0.1 + np.abs(self.x)))
        loss = np.maximum.accumulate((np.polyval(fit, grid) - np.polyval(fit, 0))[::-1])  # starts at the main budget
        slope = (loss[-1] - loss[0]) / -grid[0]
        over = max(0.0, rise - loss[-1]) / max(slope, 1e-9)  # linear extrapolation beyond the grid
        return float(np.interp(rise, loss, grid[::-1]) - over)


def welch(a, b):
    """`difference` of two lists with a number per seed, which gives Welch's interval."""
    return difference(np.array(a)[:, None], np.array(b)[:, None], np.ones(1))


def multiplier(d, a, b):
    """How many times b's tokens a needs for b's loss at the main budget: a Multiplier, or None.

    d: the Difference there; a, b: their Curves. None if d is None, or a family has no shorter budget.
    """
    if d is None or not (a.known and b.known):
        return None

    def log_m(mean, shift=0.0):
        curve, sign = (a, 1) if mean <= 0 else (b, -1)
        return sign * curve.log_tokens(abs(mean), shift)

    at, low, high = (log_m(mean) for mean in (d.mean, d.low, d.high))
    better = a if d.mean <= 0 else b
    error = sum((log_m(d.mean, shift) - at) ** 2 for shift in np.diag(better.se) if shift.any())
    reach = stats.norm.ppf((1 + CONFIDENCE) / 2) ** 2 * error
    low, high = at - math.hypot(at - low, math.sqrt(reach)), at + math.hypot(high - at, math.sqrt(reach))
    return Multiplier(*(math.exp(v) for v in (at, low, high)), bool(abs(at) > -better.x[0] + 1e-9))


def times(m, log_ratio, se=0.0):
    """The Multiplier of another cost than tokens, of which a token of a costs exp(log_ratio) times a token of b; se: of
    log_ratio."""
    if m is None:
        return None
    at, low, high = map(math.log, m[:3])
    half = stats.norm.ppf((1 + CONFIDENCE) / 2) * se
    values = at, at - math.hypot(at - low, half), at + math.hypot(high - at, half)
    return Multiplier(*(math.exp(v + log_ratio) for v in values), m.beyond)


def winner(means, p_of, alpha=0.05):
    """The family with the lowest mean loss if it is significantly better than every other: a Winner.

    means {family: loss}; p_of(a, b): p of their Difference, or None. The p are corrected by Holm's method, and all must
    be below alpha. Choosing the best after looking needs no further correction: it has to beat all others at once.
    """
    if len(means) < 2:
        return Winner(None, f"{len(means)} families with a loss: nothing to compare", {})
    best, *others = sorted(means, key=means.get)
    p = {family: p_of(best, family) for family in others}
    if None in p.values():
        untested = [f for f in others if p[f] is None]
        return Winner(None, f"{best} is lowest, but cannot be tested against {', '.join(untested)}: two seeds are "
                      "needed", p)
    ranked = sorted(others, key=p.get)
    holm = np.maximum.accumulate([p[family] * (len(others) - rank) for rank, family in enumerate(ranked)])
    p |= zip(ranked, np.minimum(holm, 1.0).tolist(), strict=True)
    worst = max(others, key=p.get)
    if p[worst] >= alpha:
        return Winner(None, f"{best} is lowest, but not significantly below {worst}: p = {p[worst]:.2g}, limit "
                      f"{alpha:g}", p)
    return Winner(best, f"{best} is below every other family, p <= {p[worst]:.2g} after Holm's correction", p)


def null_duels(simulations=2000, seeds=12, documents=27, sd=0.011, document_sd=0.03, budgets=(256, 512, 1024), rng=0,
               correlation=None):
    """Share of simulated duels between two identical families whose 95% interval for the token multiplier misses 1.

    A run's loss on a document = law of its budget + document + seed + seed x document; SDs as recorded on the laptop
    (sd: of a run's loss over seeds; document_sd: additional, of a seed's loss on one document). Document lengths are
    log-normal, like the standard library's. correlation: of the noise of two runs with the same seed, which are then
    compared in pairs; None: the families have different seeds.
    """
    rng, misses, main = np.random.default_rng(rng), 0, budgets[-1]
    law = {b: 1.4 + 60 * ((b * 1024.0) ** -0.35 - (main * 1024.0) ** -0.35) for b in budgets}

    def noise():
        return sd * rng.standard_normal((seeds, 1)) + document_sd * rng.standard_normal((seeds, documents))

    def family(tokens, level, shared):
        r = correlation or 0.0
        noisy = level + math.sqrt(r) * shared + math.sqrt(1 - r) * noise()
        runs = {b: law[b] + noisy + 0.3 * sd * rng.standard_normal((seeds, 1)) * (b != main) for b in budgets}
        return runs[main], Curve({b: dict(enumerate(x)) for b, x in runs.items()}, main, tokens)

    for _ in range(simulations):
        tokens = np.exp(rng.normal(0, 1, documents))
        level, shared = rng.normal(0, 0.3, documents), noise()
        (a, curve_a), (b, curve_b) = family(tokens, level, shared), family(tokens, level, shared)
        w = tokens / tokens.sum()
        d = difference(a, b, tokens, pooled_sd([a @ w, b @ w]), paired=correlation is not None)
        m = multiplier(d, curve_a, curve_b)
        misses += not m.low <= 1 <= m.high
    return misses / simulations


if __name__ == "__main__":
    for seeds, sd in ((16, 0.011), (12, 0.011), (6, 0.006), (5, 0.011), (3, 0.006)):
        for documents, document_sd in ((27, 0.03), (12, 0.03), (60, 0.03), (27, 0.01), (27, 0.06)):
            for correlation in (None, 0.0, 0.95):
                share = null_duels(3000, seeds, documents, sd, document_sd, correlation=correlation)
                pairing = "different seeds" if correlation is None else f"pairs, correlation {correlation}"
                print(f"{seeds:2} seeds of SD {sd}, on one document {document_sd}, {documents} documents, {pairing}: "
                      f"the 95% interval misses 1 in {share:.1%} of 3000 duels of identical families", flush=True)
