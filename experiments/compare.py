"""Compare two families: how much their losses differ, and how many tokens one needs to reach the other's loss.

    difference d = loss of a - loss of b             over seeds that chose no learning rate, on all held-out documents
    variance     = s^2 / n                           s: SD of the differences of n pairs, if both have the same seeds
                   or s^2 (1/n_a + 1/n_b)            s: SD over seeds, pooled over a size's families if they agree
                   + variance over documents         the difference depends on the held-out text: clustered by
                                                     document, minus the noise of the seeds
                   + variance of the chosen rates    another search would choose other rates: see rate_variance
    interval     = d +- t sqrt(variance)             95%, degrees of freedom by Welch and Satterthwaite, from the
                                                     positive variances only

    multiplier m = tokens a needs for b's loss / tokens b had          read off the better family's curve over budgets;
                   its interval combines the interval of d with the error of the curve, both by Student's t

Runs with the same seed are pairs: they see the same tokens in the same order, and parameters of the same name and shape
start from the same values (initialisation.py). The more alike two models are, the more noise they share. If an interval
contains 1, its ends say how far apart the two may still be. experiments/duel_simulation.py measures how often intervals
miss the truth.

A family at a size has these attributes:

    documents       {tokens of the budget: {seed: losses (documents,)}}
    weights         (documents,), the tokens of each document
    search          {rate: {seed: loss}}, inf for a diverged run
    search_noise    (variance over seeds of the reported runs at the search's budget, degrees of freedom)
"""

import math
from collections import namedtuple

import numpy as np
from scipy import special

Difference = namedtuple("Difference", "mean low high se df p seeds_se documents_se rates_se", defaults=(0.0,))
Multiplier = namedtuple("Multiplier", "value low high beyond")  # beyond: outside the budgets of the better family
BestRate = namedtuple("BestRate", "rate beyond tried")  # beyond: the next rate to try if the best is at the edge
Winner = namedtuple("Winner", "family reason")  # name or None; sentence
CONFIDENCE = 0.95


def best_rate(search):
    """The BestRate: the vertex of a parabola in log rate through the best rate and its neighbours.

    search: {rate: {seed: loss}}; inf for a diverged run, which makes its rate the worst.
    Returns None if no rate has a finite mean.
    """
    means = {rate: float(np.mean(list(losses.values()))) for rate, losses in sorted(search.items()) if losses}
    rates = list(means)
    losses = np.array([*means.values()])
    if not np.isfinite(losses).any():
        return None
    i = int(np.argmin(losses))
    rate = rates[i]
    beyond = {len(rates) - 1: rate * 2, 0: rate * 0.5}.get(i)
    three = slice(i - 1, i + 2)
    if not beyond and np.isfinite(losses[three]).all():  # otherwise a neighbour diverged: no parabola
        vertex, _, _ = parabola(np.log(rates[three]), losses[three])
        rate = float(f"{math.exp(vertex):.3g}")
    return BestRate(rate, beyond, means)


def parabola(x, y):
    """(x of the vertex, half the second derivative, derivative of the vertex by each y) of the parabola through
    three points; the middle one is the lowest."""
    p, q, _ = np.linalg.inv(np.vander(x - x[1], 3))
    a, b = p @ y, q @ y
    return x[1] - b / (2 * a), a, (p * b / a - q) / (2 * a)


Searched = namedtuple("Searched", "seeds residuals slopes curvature variance df")


def look_at_search(search, noise):
    """How precisely a search {rate: {seed: loss}} locates the best rate: a Searched, or None if it does not locate one.

    residuals {rate: (seeds,)}; slopes {rate: derivative of the vertex by the loss at that rate}; curvature of the
    parabola; variance of the vertex, and its degrees of freedom df.
    """
    if not search:
        return None
    rates = sorted(search)
    seeds = sorted(set.intersection(*map(set, search.values())))
    if not seeds or len(seeds) == 1 and not noise:
        return None
    losses = np.array([[search[rate][seed] for rate in rates] for seed in seeds])  # (seeds, rates)
    finite = np.isfinite(losses).all(0)
    i = int(np.argmin(losses.mean(0)))
    three = slice(i - 1, i + 2)
    if i in (0, len(rates) - 1) or not finite[three].all():
        return None
    _, curvature, slopes = parabola(np.log(rates[three]), losses[:, three].mean(0))
    residuals = losses[:, finite] - losses[:, finite].mean(0)
    residuals -= residuals.mean(1, keepdims=True)
    df = (len(seeds) - 1) * (finite.sum() - 1)
    if df:
        variance = (residuals**2).sum() / df
    else:
        variance, df = noise
    return Searched(seeds, dict(zip(np.array(rates)[finite].tolist(), residuals.T, strict=True)),
                    dict(zip(rates[three], slopes, strict=True)), curvature,
                    variance * slopes @ slopes / len(seeds), df)


def rate_variance(a, b):
    """The (variance, degrees of freedom) that errors in both chosen learning rates add to a difference of losses. None
    if it is unknown: a best rate is at the edge, or each rate ran once and no noise is known.

    A rate whose logarithm is off by e costs c e^2 nats, where c is the curvature of the search's parabola. The vertex
    is off because the losses of the search are noisy. With several seeds the noise is estimated from the residuals over
    seeds and rates, and two families with the same seeds may share part of it. With one seed it comes from
    `search_noise`. The variance is the second moment of c_a e_a^2 - c_b e_b^2, for normal e.
    """
    variances, dfs = np.transpose([a.search_noise, b.search_noise])
    noise = (variances @ dfs / dfs.sum(), dfs.sum()) if dfs.any() else None
    a = look_at_search(a.search, noise)
    b = look_at_search(b.search, noise)
    if a is None or b is None:
        return None
    covariance = 0.0  # of the errors e_a and e_b
    both = a.residuals.keys() & b.residuals.keys()
    if a.seeds == b.seeds and len(a.seeds) > 1 and len(both) > 1:
        covariance = sum(a.residuals[rate] @ b.residuals[rate] for rate in both)
        covariance /= (len(a.seeds) - 1) * (len(both) - 1) * len(a.seeds)
        covariance *= sum(a.slopes[rate] * b.slopes[rate] for rate in a.slopes.keys() & b.slopes.keys())
    cost_a = a.curvature * a.variance
    cost_b = b.curvature * b.variance
    moment = 3 * (cost_a**2 + cost_b**2) - 2 * cost_a * cost_b - 4 * a.curvature * b.curvature * covariance**2
    df = min(a.df, b.df)
    return max(0.0, moment) / (1 + 2 / df), max(1.0, df / 4)  # products of estimates are too large by 1 + 2 / df


# ----------------------------------------------------------------------------------------------------- two mean losses

def document_variance(tokens, *groups):
    """The (variance, degrees of freedom) of a sum of mean losses, over draws of documents. Each group is (seeds,
    documents); for a difference, negate one of the two.

    The noise of seeds within documents is subtracted, since it is counted with the seeds, so the estimate can be
    negative by chance. tokens: (documents,), the weights.
    """
    w = tokens / tokens.sum()
    share = w * w * (1 - 2 * w + w @ w)  # share of a document's variance in w^2 (d - mean)^2, on average
    scale = (w @ w) / share.sum() if len(w) > 1 else 0.0
    d = sum(x.mean(0) for x in groups)
    clustered = scale * (w * w) @ (d - w @ d) ** 2
    noise = 0.0
    for x in groups:
        if len(x) < 2:
            continue
        off = x - x.mean(0)
        off = off - (off @ w)[:, None]
        noise += (w * w) @ (off**2).sum(0) / (len(x) - 1) / len(x)
    return clustered - noise, max(1.0, 1 / (w @ w) - 1)


def pooled_sd(losses):
    """The (SD, degrees of freedom) over seeds, pooled over families [(seeds,) ...]. None if their SDs differ
    (Bartlett's test at 5%) or no family has two seeds."""
    several = [x for x in losses if len(x) > 1]
    if not several:
        return None
    variances = np.array([np.var(x, ddof=1) for x in several])
    dfs = np.array([len(x) - 1.0 for x in several])
    df = float(dfs.sum())
    pooled = variances @ dfs / df
    if len(dfs) > 1 and variances.min() > 0:
        excess = df * math.log(pooled) - dfs @ np.log(variances)
        excess /= 1 + ((1 / dfs).sum() - 1 / df) / (3 * (len(dfs) - 1))
        if special.chdtrc(len(dfs) - 1, excess) < 0.05:
            return None
    return math.sqrt(pooled), df


def t_sum(parts):
    """Add variances [(variance, df)]: (sum, degrees of freedom by Welch and Satterthwaite, quantile of t).

    A negative variance reduces the sum but not the degrees of freedom. Otherwise the same draw would count twice, and
    with 3 seeds 2 of 4 degrees would remain.
    """
    positive = [(v, df) for v, df in parts if v > 0]
    spread = sum(v * v / df for v, df in positive)
    df = math.inf
    if spread:
        df = float(sum(v for v, _ in positive) ** 2 / spread)
    return sum(v for v, _ in parts), df, float(special.stdtrit(df, (1 + CONFIDENCE) / 2))


def difference(a, b, tokens, pooled=None, paired=False, rates=None):
    """The Difference of the mean losses of a and b, each (seeds, documents). None if there are too few seeds to
    estimate the spread.

    Args:
        tokens: (documents,), the evaluated tokens of each document.
        pooled: from pooled_sd, or None to use each family's own SD.
        paired: a and b have the same seeds in the same order. With three or more seeds (two, if nothing is pooled) the
            SD is that of their differences.
        rates: from rate_variance, or None to leave out the error of the chosen rates.
    """
    w = tokens / tokens.sum()
    x = a @ w
    y = b @ w
    groups = [a, -b]
    samples = [x, y]
    if paired and len(x) > (2 if pooled else 1):
        groups = [a - b]
        samples = [x - y]
        pooled = None
    if pooled:
        sd, df = pooled
        parts = [(sd**2 * (1 / len(x) + 1 / len(y)), df)]
    elif min(map(len, samples)) < 2:
        return None
    else:
        parts = [(np.var(z, ddof=1) / len(z), len(z) - 1) for z in samples]
    of_seeds = sum(v for v, _ in parts)
    of_documents, df = document_variance(tokens, *groups)
    parts.append((max(of_documents, -0.3 * of_seeds), df))  # cutting at 0 would make it too large on average
    of_rates, df = rates or (0.0, 1)
    parts.append((of_rates, df))
    total, df, quantile = t_sum(parts)
    mean = float(x.mean() - y.mean())
    se = max(math.sqrt(total), 1e-12)  # 0 if both are the same runs
    p = float(2 * special.stdtr(df, -abs(mean) / se))
    return Difference(mean, mean - quantile * se, mean + quantile * se, se, df, p, math.sqrt(of_seeds),
                      math.sqrt(max(0.0, of_documents)), math.sqrt(of_rates))


def mean_losses(by_seed, weights):
    """The mean losses (seeds,) of {seed: losses (documents,)}."""
    return np.array(list(by_seed.values())) @ weights / weights.sum()


def difference_of(families, a, b, values_of, rates=None):
    """`difference` of two families in values_of(family), {seed: values (documents,)}. The SD is pooled over all
    families of the size. None if one of the two has no values."""
    of_a = values_of(a)
    of_b = values_of(b)
    if not (of_a and of_b):
        return None
    pooled = pooled_sd([mean_losses(values, a.weights) for values in map(values_of, families) if values])
    x, y = (np.array(list(values.values())) for values in (of_a, of_b))
    return difference(x, y, a.weights, pooled, of_a.keys() == of_b.keys(), rates)


# ---------------------------------------------------------------------------------------------------------- multipliers

def changes(runs, tokens, main):
    """Losses at a budget minus the losses at the main budget, for seeds that ran both: (seeds, documents). runs:
    {tokens: {seed: losses (documents,)}}."""
    common = sorted(runs.get(tokens, {}).keys() & runs.get(main, {}).keys())
    return np.array([runs[tokens][seed] - runs[main][seed] for seed in common])


def point_of_curve(family, tokens, main, families):
    """The point (x, y, se, df) of a Curve at a budget; None if its noise is unknown."""
    w = family.weights / family.weights.sum()
    change = changes(family.documents, tokens, main)
    if not len(change):
        return None
    others = [changes(other.documents, tokens, main) for other in families]
    spread = pooled_sd([other @ w for other in others if len(other)]) or pooled_sd([change @ w])
    if not spread:
        return None
    sd, df = spread
    documents, df_documents = document_variance(family.weights, change)
    total, df, _ = t_sum([(sd**2 / len(change), df), (max(0.0, documents), df_documents)])
    return math.log(tokens / main), float((change @ w).mean()), math.sqrt(total), df


def powers(x, degree):
    """(points, degree + 1): powers of tokens^-0.35 for x = log(tokens)."""
    return np.exp(-0.35 * x)[:, None] ** np.arange(degree + 1)


class Curve:
    """A family's loss at its budgets relative to the main budget, from seeds that ran both.

    main: tokens of the main budget. families: all families of this size; the SD of the change from the main budget is
    pooled over them. x: log(tokens / main), ascending; y: loss minus the loss at the main budget, with se and degrees
    of freedom df. A budget whose noise is unknown (one seed, nothing pooled) is left out. known: True if the loss falls
    with the budget by more than two standard errors.
    """

    def __init__(self, family, main, families):
        points = [(0.0, 0.0, 0.0, 1.0)]
        for tokens in family.documents.keys() - {main}:
            point = point_of_curve(family, tokens, main, families)
            if point:
                points.append(point)
        self.x, self.y, self.se, self.df = np.array(sorted(points)).T
        i = 0 if self.x[0] < 0 else -1  # the shortest budget, or the longest if the main one is the shortest
        self.known = bool(-np.sign(self.x[i]) * self.y[i] > 2 * self.se[i])
        # basis @ y is, on the grid, a parabola in tokens^-0.35 through the points, minus its value at the main budget,
        # where all powers are 1
        self.grid = np.linspace(0, min(self.x[0] - math.log(2), -0.1), 400)
        degree = min(2, len(points) - 1)
        weight = 1 / (0.1 + np.abs(self.x))
        through = np.linalg.pinv(weight[:, None] * powers(self.x, degree)) * weight
        self.basis = (powers(self.grid, degree) - 1) @ through

    def rise(self, x):
        """The loss at x <= 0 minus the loss at the main budget, in nats."""
        return float(np.interp(-x, -self.grid, self.basis @ self.y))

    def log_tokens(self, rise, shift=0.0):
        """The x <= 0 at which the loss is `rise` nats above that at the main budget. The curve's points are moved by
        `shift` (points,)."""
        loss = np.maximum.accumulate(self.basis @ (self.y + shift))
        over = max(0.0, rise - loss[-1]) / max(loss[-1] / -self.grid[-1], 1e-9)  # linear extrapolation beyond the grid
        return float(np.interp(rise, loss, self.grid) - over)


def welch(a, b):
    """The Difference of two lists with one number per seed, with Welch's interval."""
    return difference(np.array(a)[:, None], np.array(b)[:, None], np.ones(1))


def multiplier(d, a, b):
    """The Multiplier: how many times b's tokens a needs to reach b's loss at the main budget.

    d: the Difference there; a, b: their Curves. Returns None if d is None, if a family has no other budget or its loss
    does not clearly fall with the budget, or if the interval reaches a factor of 10,000.
    """
    if d is None or not (a.known and b.known):
        return None

    def log_m(mean, shift=0.0):
        if mean <= 0:
            return a.log_tokens(-mean, shift)
        return -b.log_tokens(mean, shift)

    at = log_m(d.mean)
    low = log_m(d.low)
    high = log_m(d.high)
    better = a if d.mean <= 0 else b
    of_curve = []  # variance of log m for the error of each point
    for shift, df in zip(np.diag(better.se), better.df, strict=True):
        of_curve.append(((log_m(d.mean, shift) - at) ** 2, df))
    _, _, of_d = t_sum([(1.0, d.df)])
    _, _, both = t_sum([(((high - low) / 2 / of_d) ** 2, d.df), *of_curve])
    error = math.sqrt(sum(v for v, _ in of_curve))
    low = at - both * math.hypot((at - low) / of_d, error)
    high = at + both * math.hypot((high - at) / of_d, error)
    if max(abs(at), abs(low), abs(high)) > math.log(1e4):
        return None
    beyond = bool(abs(at) > -better.x[0] + 1e-9)
    return Multiplier(math.exp(at), math.exp(low), math.exp(high), beyond)


def times(m, log_ratio, half=0.0):
    """The Multiplier for another cost, such as seconds, if a token costs family a exp(log_ratio) times as much as b.
    half: half the width of log_ratio's 95% interval."""
    if m is None:
        return None
    at = math.log(m.value)
    low = at - math.hypot(at - math.log(m.low), half)
    high = at + math.hypot(math.log(m.high) - at, half)
    return Multiplier(math.exp(at + log_ratio), math.exp(low + log_ratio), math.exp(high + log_ratio), m.beyond)


def holm(p):
    """Correct {key: p} for the number of tests by Holm's method."""
    keys = sorted(p, key=p.get)
    each = [p[key] * (len(keys) - rank) for rank, key in enumerate(keys)]
    return dict(zip(keys, np.minimum(np.maximum.accumulate(each), 1.0).tolist(), strict=True))


def winner(means, p_of, alpha=0.05):
    """The Winner: the family with the lowest mean loss, if it is significantly better than every other.

    means: {family: loss}; p_of(a, b): p of their Difference, or None. All p, corrected by Holm's method, must be below
    alpha. Choosing the best after looking needs no further correction, since it has to beat all others at once.
    """
    if len(means) < 2:
        return Winner(None, f"{len(means)} families with a loss: nothing to compare")
    best, *others = sorted(means, key=means.get)
    p = {family: p_of(best, family) for family in others}
    untested = [family for family in others if p[family] is None]
    if untested:
        return Winner(None, f"{best} has the lowest loss, but cannot be tested against {', '.join(untested)}: two "
                      "seeds are needed")
    p = holm(p)
    worst = max(others, key=p.get)
    if p[worst] >= alpha:
        return Winner(None, f"{best} has the lowest loss, but not significantly below that of {worst}: p = "
                      f"{p[worst]:.2g}, limit {alpha:g}")
    return Winner(best, f"{best} has a lower loss than every other family, p <= {p[worst]:.2g} after Holm's correction")


# ------------------------------------------------------------------------------------------------ a look at every pair

def bounds(fractions, alpha, walks=100_000):
    """Yield, after each pair, the bound that Student's t of the mean difference has to exceed. All tests together err
    with probability 0.55 alpha; the rest of alpha is for skewed differences.

    fractions: the part of the plan (time, or pairs) that had passed after each pair; the list may grow meanwhile. At a
    fraction f the tests may have spent f^8 of the error (Kim and DeMets 1987, Lan and DeMets 1989). So the last bound
    is only 3% above that of a single test. Little is spent in the first half, when a rare bad run may not have been
    seen yet. Each bound comes from simulated normal differences that have exceeded no earlier bound. If fewer than one
    of the `walks` may exceed a bound, it is that of a single test at this look. It is infinite for one pair, and while
    no time has passed.
    """
    rng = np.random.default_rng(0)
    sums = np.zeros(walks)  # of the walks that have exceeded no bound yet
    squares = np.zeros(walks)
    spent = before = 0
    for n, fraction in enumerate(fractions, 1):
        x = rng.standard_normal(len(sums))
        sums = sums + x
        squares = squares + x * x
        share = 0.55 * alpha * fraction**8
        more = round(walks * share) - spent
        if n == 1 or share == before:
            yield math.inf
        elif more < 1:
            yield float(-special.stdtrit(n - 1, (share - before) / 2))
        else:
            t = abs(sums) / np.sqrt((n * squares - sums**2) / (n - 1))
            bound = np.partition(t, -more)[-more].item()
            sums = sums[t < bound]
            squares = squares[t < bound]
            spent += more
            yield bound
        before = share


def resampled(differences, error, resamples=4000):
    """The interval (low, high) of the mean of differences (..., n) by the bootstrap-t (Efron and Tibshirani 1993,
    section 12.5). It is Student's interval with the quantiles of t over resampled pairs, so it is as skewed as the
    differences. error: the probability of both sides together.
    """
    n = differences.shape[-1]
    mean = differences.mean(-1)
    sd = differences.std(-1, ddof=1)
    z = (differences - mean[..., None]) / np.maximum(sd, 1e-300)[..., None]
    counts = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), resamples).T / n  # the same resamples for all
    means = z @ counts
    variances = (z * z) @ counts - means**2
    t = means * math.sqrt(n - 1) / np.sqrt(np.maximum(variances, 1e-12))
    rank = int(error / 2 * resamples)
    t = np.partition(t, [rank, resamples - 1 - rank], -1)
    error_of_mean = sd / math.sqrt(n)
    return mean - t[..., -1 - rank] * error_of_mean, mean - t[..., rank] * error_of_mean


def log_tokens(difference, curve):
    """log of how many times HEAD's tokens the edit needs if its loss is `difference` (...,) nats higher. It is read off
    the curve E + B / D^k with 2^k = (quarter - half) / half. curve: (..., 2), how much higher HEAD's loss is after a
    quarter and after half of the budget.
    """
    quarter = curve[..., 0]
    half = np.maximum(curve[..., 1], 1e-9)
    ratio = np.clip((quarter - half) / half, 1.001, 4)
    return np.log1p(np.maximum(difference * (ratio - 1) / half, -0.999)) / np.log2(ratio)


def decide(differences, curves, bound, margin=0.02, alpha=0.05, resample=True):
    """Judge the pairs so far: (verdict, log m, its low and high, mean difference, its low and high), each (...,).

    Args:
        differences: (..., n) the edit's loss minus HEAD's per pair, in nats.
        curves: (..., k, 2) HEAD's curves for `log_tokens` from k >= 2 runs. The interval of m, how many times HEAD's
            tokens the edit needs, includes their error (by the jackknife).
        bound: of Student's t at this look, from `bounds`.
        resample: False uses Student's interval alone, in a fraction of the time. If that decides nothing, the wider
            interval decides nothing either.
    The interval of the mean covers both Student's and the bootstrap-t. The verdict is "better" or "worse" if it
    excludes 0, and "same" if m is within `margin`.
    """
    n = differences.shape[-1]
    k = curves.shape[-2]
    mean = differences.mean(-1)
    half = bound * np.maximum(differences.std(-1, ddof=1), 1e-300) / n**0.5  # an infinite bound stays so if the SD is 0
    least, most = mean - half, mean + half
    if resample:
        low, high = resampled(differences, 2 * special.stdtr(n - 1, -bound))
        least, most = np.minimum(least, low), np.maximum(most, high)
    curve = curves.mean(-2)
    at = log_tokens(mean, curve)
    without = [log_tokens(mean, np.delete(curves, i, -2).mean(-2)) for i in range(k)]
    error = special.stdtrit(k - 1, 1 - alpha / 2) * np.sqrt((k - 1) * np.var(without, 0))
    low = at - np.hypot(at - log_tokens(least, curve), error)
    high = at + np.hypot(log_tokens(most, curve) - at, error)
    low = np.where(least > 0, np.maximum(low, 1e-9), low)  # the curve's error does not change the sign
    high = np.where(most < 0, np.minimum(high, -1e-9), high)
    is_same = (low > -np.log1p(margin)) & (high < np.log1p(margin))
    verdict = np.select([most < 0, least > 0, is_same], ["better", "worse", "same"], "undecided")
    return verdict, at, low, high, mean, least, most
