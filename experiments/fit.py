"""The scaling law of a family's runs, by scipy's least_squares.

    L(N, D) = E + A / N^alpha + B / D^beta    Hoffmann et al. 2022, approach 3; N parameters, D tokens, L nats per token
    N_opt ~ C^a, D_opt ~ C^(1-a)              a = beta / (alpha + beta), for C ~ N D

It minimises the summed Huber loss (delta 1e-3) of log L from a grid of starts. All runs stay in: the Huber loss gives
outliers little weight. There are no intervals: the budgets of a seed branch from one run, so their noise is not
independent, and three sizes do not tell E from alpha. Pages show no fit.

    from experiments import fit, records
    runs = records.read("out/scaling_night").query("model == 'longhorn' and stage == 'seed' and left_out == ''")
    fit.fit_loss(runs.parameters, runs.tokens, runs.val_loss)
"""

import itertools
import math
from collections import namedtuple

import numpy as np
from scipy import optimize, special, stats

DELTA = 1e-3  # Huber's threshold in log L
EPOCH = dict(E=1.8172, A=482.0, alpha=0.3478, B=2085.4, beta=0.3658)  # Besiroglu et al. 2024, tokens of text


class CannotFit(ValueError):
    """The law cannot be fitted to these points; the message is one line: the value, the limit, what to do."""


Fit = namedtuple("Fit", "E A alpha B beta a huber")  # E, A, B in nats; huber: the minimum of the summed Huber loss


def law(N, D, E, A, alpha, B, beta):
    return E + A / N**alpha + B / D**beta


def fit_loss(N, D, L):
    """Fit the law to runs: N, D, L (runs,) are parameters, tokens and loss in nats, all above 0.

    An E that runs to 0 says that these runs show no floor, not that there is none. Raises CannotFit.
    """
    N, D, L = positive(N=N, D=D, L=L)
    check_design(N, D)
    log_L = np.log(L)
    centre_N = np.log(N).mean()
    centre_D = np.log(D).mean()
    x = np.log(N) - centre_N
    y = np.log(D) - centre_D

    def logs_of_terms(theta):
        """(3, runs). theta's A and B are those at the centre of the runs: the constants then correlate less."""
        log_E, log_A, alpha, log_B, beta = theta
        return np.array([log_E + 0 * x, log_A - alpha * x, log_B - beta * y])

    def residuals(theta):
        return special.logsumexp(logs_of_terms(theta), 0) - log_L

    def jacobian(theta):
        of_E, of_A, of_B = special.softmax(logs_of_terms(theta), 0)
        return np.array([of_E, of_A, -x * of_A, of_B, -y * of_B]).T

    def search(start, evaluations):
        return optimize.least_squares(residuals, start, jacobian, loss="huber", f_scale=DELTA, x_scale="jac",
                                      xtol=1e-12, ftol=1e-12, gtol=1e-12, max_nfev=evaluations)

    short = []
    for share, change_N, change_D in itertools.product((0.05, 0.5, 0.9), (0.1, 0.5, 2), (0.1, 0.5, 2)):
        floor = share * L.min()
        rest = math.log((np.median(L) - floor) / 2)
        start = [math.log(floor), rest, change_N / x.std(), rest, change_D / y.std()]
        short.append(search(start, 30))
    short.sort(key=lambda result: result.cost)
    best = min((search(result.x, 2000) for result in short[:3]), key=lambda result: result.cost)
    log_E, log_A, alpha, log_B, beta = best.x.tolist()
    with np.errstate(over="ignore"):
        E, A, B = np.exp([log_E, log_A + alpha * centre_N, log_B + beta * centre_D]).tolist()
    return Fit(E, A, alpha, B, beta, beta / (alpha + beta), float(best.cost))


def positive(**columns):
    """The columns as flat float arrays of one length. Raises CannotFit unless all are positive numbers."""
    arrays = {}
    for name, values in columns.items():
        try:
            column = np.asarray(values, float).ravel()
        except (TypeError, ValueError, OverflowError) as error:
            raise CannotFit(f"{name} holds something that is not a number: {error}") from None
        for i, value in enumerate(column):
            if not 0 < value < math.inf:
                raise CannotFit(f"{name}[{i}] = {value:g} is not a positive number")
        arrays[name] = column
    lengths = [len(column) for column in arrays.values()]
    if len(set(lengths)) > 1:
        raise CannotFit(f"{', '.join(arrays)} have {', '.join(map(str, lengths))} values: give all of each run")
    return arrays.values()


def check_design(N, D):
    """Raises CannotFit where no runs of these N and D could tell the five constants."""
    sizes = len(np.unique(N))
    counts = len(np.unique(D))
    if sizes < 3 or counts < 3:
        raise CannotFit(f"{sizes} sizes N and {counts} token counts D do not tell five constants: train three of each")
    distinct = len(set(zip(N, D, strict=True)))
    if distinct < 5:
        raise CannotFit(f"{distinct} distinct (N, D) are fewer than five constants: add {5 - distinct} or more")
    correlation = abs(np.corrcoef(np.log(N), np.log(D))[0, 1])
    if correlation >= 0.999:
        raise CannotFit(f"log N and log D are {correlation:.4f} correlated, so A / N^alpha and B / D^beta cannot be "
                        "told apart (limit 0.999): train each size at more than one budget")


def isoflop(N, L, C, tolerance=0.2):
    """The exponent of N_opt ~ C^exponent from parabolas of the loss in log N, one per budget of C FLOPs; None unless
    three budgets have a vertex between their smallest and largest size.

    N, L, C: (runs,) parameters, loss, FLOPs, all above 0. Runs belong to one budget if consecutive sorted C differ by
    at most a share of `tolerance`. Biased even without noise: the loss is a parabola in log N only near its minimum, so
    sizes that are not symmetric around it move the vertex.
    """
    N, L, C = positive(N=N, L=L, C=C)
    order = np.argsort(C, kind="stable")
    ends_budget = np.diff(np.log(C[order])) > math.log1p(tolerance)
    log_C = []
    log_N = []
    for budget in np.split(order, np.flatnonzero(ends_budget) + 1):
        x = np.log(N[budget])
        if len(set(x)) < 3:
            continue
        centre = x.mean()
        curvature, slope, _ = np.polyfit(x - centre, L[budget] / L[budget].mean(), 2)
        if curvature <= 1e-9:
            continue
        vertex = centre - slope / (2 * curvature)
        if x.min() <= vertex <= x.max():
            log_C.append(np.log(C[budget]).mean())
            log_N.append(vertex)
    if len(log_C) < 3:
        return None
    return float(stats.linregress(log_C, log_N).slope)
