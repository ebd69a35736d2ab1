"""Fit the scaling law of families: constants, tokens and compute of one relative to another, losses of further runs.

    L(N, D) = E + (A / N^alpha + B / (D - D0)^beta)^gamma

    N parameters without the embedding, D tokens, L nats per token

    additive  D0 = 0, gamma = 1        Hoffmann et al. 2022, approach 3
    offset    gamma = 1                the tokens of the warmup teach less
    gamma     D0 = 0                   arXiv 2510.02228

Means over seeds of log L are fitted by generalised least squares. The covariance along a trunk has a fixed shape
(`shape`); a sweep has too few trunks to estimate more than its scale. No form is chosen: in simulated sweeps, choosing
by the loss of a larger size finds the true form less than 60% of the time. Ratios of tokens are read off curves per
size, cubic in log D. Intervals are quantiles over sweeps simulated from the fits of all forms. They include the noise
of seeds (by Student's t), the cost of errors in the learning rates, and the misfit beyond both.

`fit_loss` alone fits any runs, by the summed Huber loss of log L, as Hoffmann et al. and Besiroglu et al. did.
experiments/law.py applies this to the records of a sweep; experiments/law_simulation.py counts how many of the
intervals hold the truth.
"""

import itertools
import math
from collections import namedtuple

import numpy as np
from scipy import linalg, optimize

DELTA = 1e-3  # Huber's threshold in log L
EPOCH = dict(E=1.8172, A=482.0, alpha=0.3478, B=2085.4, beta=0.3658)  # Besiroglu et al. 2024, tokens of text
MB = 2**20
FORMS = {"additive": (), "offset": (5,), "gamma": (6,)}  # the constants that are free in addition to the first five
PER_DOUBLING, FALL = 0.7, 0.4  # correlation of log L along a trunk; its SD falls as D^-0.4: duels at 460K and 1.5M
QUANTILES = {0.05: "lower", 0.5: "nearest", 0.95: "higher"}  # quantiles, and how each is rounded to a draw


class CannotFit(ValueError):
    """The law cannot be fitted to these points; the message is one line: the value, the limit, what to do."""


Fit = namedtuple("Fit", "E A alpha B beta D0 gamma cost")  # cost: half the sum of squares, or the summed Huber loss
# Runs of a family, sizes and budgets ascending. sizes: their labels; N, flops (sizes,): parameters without the
# embedding, FLOPs per token; D (sizes, budgets) tokens; log_L (seeds, sizes, budgets); rate_cost (sizes,): what errors
# of the rates cost in log L, on average
Family = namedtuple("Family", "sizes N flops D log_L rate_cost")


# -------------------------------------------------------------------------------------------------------------- the law

def law(N, D, E, A, alpha, B, beta, D0=0.0, gamma=1.0):
    return E + (A / N**alpha + B / (D - D0) ** beta) ** gamma


def fit_loss(N, D, L, form="additive", whiten=None, start=None):
    """Fit a form of the law to runs: N, D, L (runs,) are parameters, tokens and loss in nats, all above 0.

    An E of 0 says that these runs show no floor, not that there is none. Raises CannotFit.

    Args:
        whiten: (runs, runs), multiplies the residuals of log L before they are squared; None: Huber's loss.
        start: a Fit to begin from; None: many starts.
    """
    N, D, L = positive(N=N, D=D, L=L)
    check_design(N, D)
    free = [0, 1, 2, 3, 4, *FORMS[form]]
    centre_N = np.log(N).mean()
    centre_D = np.log(D).mean()
    x = np.log(N) - centre_N

    def terms(theta):
        """The seven constants, the terms of A and B, their sum, and log(D - D0). theta has the logs of both terms at
        the centre of the runs, where the constants correlate less, and D0 in units of the fewest tokens."""
        constants = np.array([0, 0, 0, 0, 0, 0, 1.0])
        constants[free] = theta
        _, log_A, alpha, log_B, beta, D0, _ = constants
        y = np.log(D - D0 * D.min()) - centre_D
        of_A = np.exp(log_A - alpha * x)
        of_B = np.exp(log_B - beta * y)
        return constants, of_A, of_B, of_A + of_B, y

    def residuals(theta):
        constants, _, _, both, _ = terms(theta)
        off = np.log(constants[0] + both ** constants[6]) - np.log(L)
        return off if whiten is None else whiten @ off

    def jacobian(theta):
        (E, _, _, _, beta, D0, gamma), of_A, of_B, both, y = terms(theta)
        power = both**gamma
        slope = gamma * power / both
        columns = np.array([
            np.ones_like(x),
            slope * of_A,
            -x * slope * of_A,
            slope * of_B,
            -y * slope * of_B,
            slope * of_B * beta * D.min() / (D - D0 * D.min()),
            power * np.log(both)])
        matrix = columns[free].T / (E + power)[:, None]
        return matrix if whiten is None else whiten @ matrix

    limits = np.array([
        [0, L.min()],
        [-50, 50],
        [1e-3, 5],
        [-50, 50],
        [1e-3, 5],
        [0, 0.9],
        [0.2, 5]])
    low, high = limits[free].T

    def search(theta, evaluations):
        inside = np.clip(theta, low + 1e-9, high - 1e-9)
        loss = "huber" if whiten is None else "linear"
        return optimize.least_squares(residuals, inside, jacobian, (low, high), x_scale="jac", loss=loss,
                                      f_scale=DELTA, xtol=1e-10, ftol=1e-10, gtol=1e-10, max_nfev=evaluations)

    if start is None:
        short = []
        for share, change_N, change_D in itertools.product((0.05, 0.5, 0.9), (0.1, 0.6), (0.1, 0.6)):
            floor = share * L.min()
            rest = math.log((np.median(L) - floor) / 2)
            alpha = change_N / x.std()
            beta = change_D / np.log(D).std()
            theta = np.array([floor, rest, alpha, rest, beta, 0, 1])
            short.append(search(theta[free], 30))
        short.sort(key=lambda result: result.cost)
        best = min((search(result.x, 2000) for result in short[:2]), key=lambda result: result.cost)
    else:
        E, A, alpha, B, beta, D0, gamma, _ = start
        log_A = math.log(A) - alpha * centre_N
        log_B = math.log(B) - beta * centre_D
        theta = np.array([E, log_A, alpha, log_B, beta, D0 / D.min(), gamma])
        best = search(theta[free], 2000)
    E, log_A, alpha, log_B, beta, D0, gamma = terms(best.x)[0].tolist()
    with np.errstate(over="ignore"):
        A = np.exp(log_A + alpha * centre_N).item()
        B = np.exp(log_B + beta * centre_D).item()
    return Fit(E, A, alpha, B, beta, float(D0 * D.min()), gamma, float(best.cost))


def positive(**columns):
    """The columns as flat float arrays of one length. Raises CannotFit unless all are positive numbers."""
    arrays = [np.asarray(values, float).ravel() for values in columns.values()]
    for name, column in zip(columns, arrays, strict=True):
        if len(column) != len(arrays[0]):
            raise CannotFit(f"{len(column)} values of {name} for {len(arrays[0])} runs: give one for each")
        for i, value in enumerate(column):
            if not 0 < value < math.inf:
                raise CannotFit(f"{name}[{i}] = {value:g}: give positive numbers")
    return arrays


def check_design(N, D):
    """Raises CannotFit if no runs at these N and D could determine the five constants."""
    sizes = len(np.unique(N))
    counts = len(np.unique(D))
    if sizes < 3 or counts < 3:
        raise CannotFit(f"{sizes} sizes N and {counts} token counts D are too few for five constants: train 3 of each")
    distinct = len(set(zip(N, D, strict=True)))
    if distinct < 5:
        raise CannotFit(f"{distinct} distinct (N, D) are fewer than five constants: add {5 - distinct} or more")
    correlation = abs(np.corrcoef(np.log(N), np.log(D))[0, 1])
    if correlation >= 0.999:
        raise CannotFit(f"log N and log D are {correlation:.4f} correlated, so A / N^alpha and B / D^beta cannot be "
                        "separated (limit 0.999): train each size at more than one budget")


# ------------------------------------------------------------------------------------------------------ a family's fits

def shape(D):
    """The covariance of log L over budgets D (budgets,) along a trunk, in units of the variance at 1 MB."""
    doublings = np.log2(np.asarray(D) / MB)
    apart = doublings[:, None] - doublings
    return 2.0 ** (-FALL * (doublings[:, None] + doublings)) * PER_DOUBLING ** abs(apart)


def whitening(D):
    return np.linalg.inv(np.linalg.cholesky(shape(D)))


def seed_noise(family):
    """(variance of log L over seeds at 1 MB, degrees of freedom)."""
    seeds, sizes, budgets = family.log_L.shape
    off = family.log_L - family.log_L.mean(0)
    squares = 0.0
    for i, D in enumerate(family.D):
        squares += ((off[:, i] @ whitening(D).T) ** 2).sum()
    df = (seeds - 1) * sizes * budgets
    return squares / df, df


def grid(family):
    """N and D, (cells,) each, of the family's means."""
    return np.repeat(family.N, family.D.shape[1]), family.D.ravel()


def fit_family(family, form, log_L=None, start=None):
    """Fit a form to the means over seeds, or to other log_L (sizes, budgets)."""
    if log_L is None:
        log_L = family.log_L.mean(0)
    whiten = linalg.block_diag(*map(whitening, family.D))
    return fit_loss(*grid(family), np.exp(log_L).ravel(), form, whiten, start)


def log_law(fitted, N, D):
    return np.log(law(N, D, *fitted[:7]))


def around(family, form, fitted):
    """(variance of the means of log L around a fit, degrees of freedom)."""
    off = family.log_L.mean(0) - log_law(fitted, family.N[:, None], family.D)
    df = off.size - 5 - len(FORMS[form])
    return (off**2).sum() / df, df


def misfit(rng, family, variance, df):
    """Draw the variance of the means around the law that seeds and the rates' costs do not explain, 0 or more.
    variance, df: of the sample, from `around`."""
    units = np.mean([np.diag(shape(D)) for D in family.D])
    of_seeds = scale(rng, family) ** 2 * units / len(family.log_L)
    return max(0.0, variance * df / rng.chisquare(df) - of_seeds - 2 * (family.rate_cost**2).mean())


def per_token(family, N):
    """FLOPs per token at N parameters; between the family's sizes, FLOPs per parameter are linear in log N."""
    return N * np.interp(np.log(N), np.log(family.N), family.flops / family.N)


def computes(family):
    """(9,) FLOPs, from those of the family's smallest run to those of its largest."""
    return np.geomspace(family.flops[0] * family.D[0, 0], family.flops[-1] * family.D[-1, -1], 9)


def optimum(fitted, family, N):
    """(N, loss), (9,) each: for each of `computes`, the best candidate N and its loss."""
    N = N[:, None]
    D = np.maximum(computes(family) / per_token(family, N), fitted.D0 * 1.001 + 1)
    losses = law(N, D, *fitted[:7])
    return N[losses.argmin(0), 0], losses.min(0)


def allocation(fitted, family):
    """The exponent a of N_opt ~ C^a over the compute C of the family's runs."""
    best, _ = optimum(fitted, family, np.geomspace(family.N[0] / 30, family.N[-1] * 30, 2000))
    return np.polyfit(np.log(computes(family)), np.log(best), 1)[0]


def sizes_between(family):
    """(300,) parameters, from those of the smallest size to those of the largest."""
    return np.geomspace(family.N[0], family.N[-1], 300)


def frontier_losses(fitted, family):
    """{`frontier I`: log of the lowest loss at the I-th of `computes`}, over parameters between the sizes."""
    _, losses = optimum(fitted, family, sizes_between(family))
    return {f"frontier {i}": loss for i, loss in enumerate(np.log(losses))}


def frontier(fitted, family, levels):
    """The least FLOPs for losses (levels,), over parameters between the sizes."""
    E, A, alpha, B, beta, D0, gamma, _ = fitted
    N = sizes_between(family)[:, None]
    left = np.maximum(levels - E, 0) ** (1 / gamma) - A / N**alpha  # what is left for the term of D
    D = D0 + (B / np.maximum(left, 1e-9)) ** (1 / beta)
    return (per_token(family, N) * D).min(0)


def compute_ratio(a, b, fitted_a, fitted_b):
    """log2 of a's FLOPs over b's for the loss of b's largest run, both on their frontiers. Also its slope per doubling
    of b's FLOPs, down to the loss of b's second size at the middle budget."""
    high = law(b.N[1], b.D[1, b.D.shape[1] // 2], *fitted_b[:7])
    low = law(b.N[-1], b.D[-1, -1], *fitted_b[:7])
    levels = np.geomspace(low, high, 9)
    x = np.log2(frontier(fitted_b, b, levels))
    y = np.log2(frontier(fitted_a, a, levels)) - x
    return {"compute": y[0], "per C": np.polyfit(x, y, 1)[0]}


# ------------------------------------------------------------------------------------------------------ curves per size

def curves(D, log_L):
    """[(log D, log L), (points,) each]: for every size a cubic in log D, continued by half a doubling at both ends. D,
    log_L: (sizes, budgets)."""
    found = []
    for x, y in zip(np.log(D), log_L, strict=True):
        whiten = whitening(np.exp(x))
        cubic, *_ = np.linalg.lstsq(whiten @ np.vander(x - x.mean(), 4), whiten @ y)
        points = np.linspace(x[0] - math.log(2) / 2, x[-1] + math.log(2) / 2, 300)
        found.append((points, np.polyval(cubic, points - x.mean())))
    return found


def log_tokens(points, curve, level):
    """log D at which a falling curve reaches a level of log L; infinite if that is before or after its points."""
    return np.interp(-level, -curve, points, left=-np.inf, right=np.inf)


def tokens_needed(curve_a, curve_b, D):
    """log2 of a's tokens over b's for b's loss at D (budgets,), read off a curve of each."""
    level = np.interp(np.log(D), *curve_b)
    return (log_tokens(*curve_a, level) - np.log(D)) / math.log(2)


def slope_within(y, x, group):
    """The least-squares slope of y on x with a term per group; arrays of one shape, infinite y left out. NaN if no
    group has two x."""
    known = np.isfinite(y)
    of_group = group[known][:, None] == np.unique(group[known])
    slopes, _, rank, _ = np.linalg.lstsq(np.column_stack([x[known], of_group]), y[known])
    return slopes[0] if rank == len(slopes) else math.nan


def ratios(a, b, least):
    """Ratios of tokens, a's over b's, for the same loss: {quantity: log2 of a ratio, or its slope per doubling}. Taken
    at their common sizes (two or more) and at b's budgets of at least `least` tokens.

    b's loss is adjusted to a's parameters.
    """
    both = common_sizes(a, b)
    a = of_sizes(a, both)
    b = of_sizes(b, both)
    D = since(b, least).D
    means = b.log_L.mean(0)
    per_N = np.gradient(means, np.log(b.N), axis=0)
    curves_b = curves(b.D, means + per_N * np.log(a.N / b.N)[:, None])
    curves_a = curves(a.D, a.log_L.mean(0))
    tokens = np.array([tokens_needed(*each) for each in zip(curves_a, curves_b, D, strict=True)])
    found = {f"tokens {both[i]} {D[i, j]:.0f}": tokens[i, j] for i, j in np.ndindex(tokens.shape)}
    sizes, _ = np.indices(tokens.shape)
    found["per D"] = slope_within(tokens, np.log2(D), sizes)
    found["per N"] = slope_within(tokens, np.log2(a.N)[sizes], D)
    return found


def beyond_two(x, points, y):
    """y at x, on the line in log x through the last two points."""
    return y[-1] + (y[-1] - y[-2]) * np.log(x / points[-1]) / np.log(points[-1] / points[-2])


def power(family, N, D):
    """log L by a power law in D through the two largest budgets and, for a new size, in N through the two largest
    sizes."""
    at_D = beyond_two(D, family.D.T, family.log_L.mean(0).T)
    if N in family.N:
        return at_D[list(family.N).index(N)]
    return beyond_two(N, family.N, at_D)


# ------------------------------------------------------------------------------------------------------------ intervals

def since(family, tokens):
    """The family at budgets of at least `tokens` at every size."""
    keep = (family.D >= tokens).all(0)
    return family._replace(D=family.D[:, keep], log_L=family.log_L[:, :, keep])


def of_sizes(family, labels):
    """The family at some of its sizes, in this order."""
    keep = [family.sizes.index(label) for label in labels]
    return Family(labels, family.N[keep], family.flops[keep], family.D[keep], family.log_L[:, keep],
                  family.rate_cost[keep])


def common_sizes(a, b):
    return [label for label in a.sizes if label in b.sizes]


def scale(rng, family):
    """Draw the SD over seeds at 1 MB, given the observed one and its degrees of freedom."""
    variance, df = seed_noise(family)
    return math.sqrt(variance * df / rng.chisquare(df))


def trunks(rng, family, D):
    """Draw the seed noise of log L, with one trunk per row of D (trunks, budgets)."""
    noise = rng.standard_normal(D.shape)
    for row, tokens in zip(noise, D, strict=True):
        row[:] = np.linalg.cholesky(shape(tokens)) @ row
    return scale(rng, family) * noise


def again(rng, family, misfit):
    """Draw how much the means (sizes, budgets) of a repeated sweep may differ; misfit: a variance.

    A rate with a normal error costs the square of that error, whose mean is already in every loss.
    """
    noise = trunks(rng, family, family.D) / math.sqrt(len(family.log_L))
    rates = family.rate_cost * (rng.standard_normal(len(family.N)) ** 2 - 1)
    return noise + rates[:, None] + math.sqrt(misfit) * rng.standard_normal(family.D.shape)


def one_more(rng, family, fitted, misfit, N, D):
    """Draw log L of one more run: of a new size, or of the first seed at a known size, continued to D."""
    expected = log_law(fitted, N, D)
    i = list(family.N).index(N) if N in family.N else -1
    last = family.D[i, -1]
    covariance = scale(rng, family) ** 2 * shape([last, D])
    if N in family.N:
        covariance += 2 * family.rate_cost[i] ** 2 + misfit * np.eye(2)
        pull = covariance[0, 1] / covariance[0, 0]
        expected += pull * (family.log_L[0, i, -1] - log_law(fitted, N, last))
        variance = covariance[1, 1] - pull * covariance[0, 1]
    else:
        expected += family.rate_cost.max() * (rng.standard_normal() ** 2 - 1)
        variance = covariance[1, 1] + misfit
    return expected + math.sqrt(variance) * rng.standard_normal()


def analyse(families, targets=None, least=MB, draws=200, seed=0):
    """Simulate sweeps: {quantity: (low, middle, high)}, the ends of the 90% interval and the median between them.

    The quantities are:

        NAME alpha, NAME a, NAME E, NAME frontier I    of each family
        NAME N D                                       the log of a run's loss, for targets {NAME: [(N, D)]}
        NAME compute, NAME per C                       the first family against NAME, see `compute_ratio`
        NAME tokens SIZE D, NAME per D, NAME per N     the same, see `ratios`; if they share two or more sizes

    The misfit is taken around the form that fits a family best. What another form misses beyond that is in the
    intervals already, since the forms give different values.

    Args:
        families: {name: Family}; the others are compared with the first.
        least: tokens of the smallest budget that is fitted; curves use all budgets.
    """
    rng = np.random.default_rng(seed)
    first, *others = families
    parts = {name: since(family, least) for name, family in families.items()}
    found = {}
    fits = {}
    least_around = {}
    for name, part in parts.items():
        fits[name] = {form: fit_family(part, form) for form in FORMS}
        least_around[name] = min(around(part, form, fitted) for form, fitted in fits[name].items())
    for form, _ in itertools.product(FORMS, range(draws)):
        refits = {}
        for name, part in parts.items():
            fitted = fits[name][form]
            beyond = misfit(rng, part, *least_around[name])
            log_L = log_law(fitted, part.N[:, None], part.D) + again(rng, part, beyond)
            refits[name] = fit_family(part, form, log_L, fitted)
            add(found, name, E=refits[name].E, alpha=refits[name].alpha, a=allocation(refits[name], part),
                **frontier_losses(refits[name], part))
            for N, D in (targets or {}).get(name, ()):
                log_L = one_more(rng, part, refits[name], beyond, N, D)
                add(found, name, **{f"{N:.0f} {D:.0f}": log_L})
        for name in others:
            add(found, name, **compute_ratio(parts[first], parts[name], refits[first], refits[name]))
    for _ in range(draws):
        drawn = {}
        for name, family in families.items():
            off = again(rng, family, misfit(rng, parts[name], *least_around[name]))
            drawn[name] = family._replace(log_L=family.log_L.mean(0, keepdims=True) + off)
        for name in others:
            if len(common_sizes(drawn[first], drawn[name])) > 1:
                add(found, name, **ratios(drawn[first], drawn[name], least))
    return {key: interval(values) for key, values in found.items()}


def interval(values):
    """Quantiles of draws. Infinite draws count; a single NaN makes the interval NaN."""
    found = []
    for quantile, method in QUANTILES.items():
        found.append(np.quantile(values, quantile, method=method).item())
    return found


def add(found, name, **values):
    for key, value in values.items():
        found.setdefault(f"{name} {key}", []).append(value)
