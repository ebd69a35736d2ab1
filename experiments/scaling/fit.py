"""Scaling-law fits: constants, intervals and warnings in plain sentences.

    L(N, D) = E + A / N^alpha + B / D^beta    Hoffmann et al. 2022, approach 3; N parameters, D tokens, L nats per token
    N_opt ~ C^a, D_opt ~ C^(1-a)              a = beta / (alpha + beta), for C ~ N D

fit_loss minimises the summed Huber loss (delta 1e-3) of log L from a grid of starts. All runs stay in: outliers are
named, and the Huber loss gives them little weight. A constant's interval contains the values that, held fixed, raise
the best Huber loss by less than a critical share, chosen so that a fraction `confidence` of refits to data simulated
from the fit stays below it. The simulated noise has a single SD, the geometric mean over runs of the SD over seeds at
their sizes: a separate SD per size, estimated from a handful of seeds, is often half or twice the true one, and gives
intervals with lower coverage. Percentiles over refits to resampled runs would be too narrow: with delta = 1e-3 below a
noise of about 1%, the curve passes exactly through as many runs as it has constants. From 20 runs per constant on that
no longer matters, and these percentiles are used, because they assume no noise distribution. Each interval is for a
single constant; they hold jointly less often.

    python experiments/scaling/fit.py      how often the intervals contain the truth, in simulated sweeps of presets
"""

import argparse
import math
from collections import namedtuple

import numpy as np
from scipy import optimize, special, stats

DELTA = 1e-3  # Huber's threshold in log L
MANY = 20  # with at least so many runs per constant, intervals come from resampled runs


class CannotFit(ValueError):
    """The law cannot be fitted to these points; the message is one line: the value, the limit, what to do."""


Fit = namedtuple("Fit", "E A alpha B beta a floors intervals huber noise points outliers warnings spread")


class _Model:
    """log L as log sum exp of terms linear in theta, so that the full law and partial ones share a solver.

    full law                   theta = (log E, log A', alpha, log B', beta), A' and B' at the centre of log N and log D
    1 or 2 values of N (or D)  theta = (log floor per value, log B', beta): E + A / N^alpha is one number per value

    terms (terms, points, constants): the terms' exponents are terms @ theta. Raises CannotFit if the runs are too few
    or too similar for any law.
    """

    def __init__(self, N, D):
        logs, levels = {"N": np.log(N), "D": np.log(D)}, {"N": np.unique(N), "D": np.unique(D)}
        few = [name for name in "ND" if len(levels[name]) < 3]
        if len(few) == 2:
            sizes = " and ".join(f"{len(levels[n])} value{'s' * (len(levels[n]) > 1)} of {n}" for n in few)
            raise CannotFit(f"{len(N)} usable runs with {sizes} cannot show how the loss falls: run at least three "
                            "sizes N or three token counts D")
        self.levels, self.few = levels[few[0]] if few else None, few[0] if few else None
        self.centre = {name: x.mean() for name, x in logs.items()}
        self.scale = {name: x.std() or 1.0 for name, x in logs.items()}
        k = len(self.levels) if few else 1
        self.slots = {name: k + 2 * i for i, name in enumerate(n for n in "ND" if n not in few)}  # log A', then alpha
        self.size = k + 2 * len(self.slots)
        distinct = len(set(zip(N, D, strict=True)))
        if distinct < self.size:
            raise CannotFit(f"{distinct} distinct (N, D) are fewer than the {self.size} constants to fit: add "
                            f"{self.size - distinct} or more")
        together = 0 if few else abs(np.corrcoef(logs["N"], logs["D"])[0, 1])
        if not together < 0.999:
            raise CannotFit(f"log N and log D are {together:.4f} correlated, so A / N^alpha and B / D^beta cannot be "
                            "told apart (limit 0.999): train each size at more than one budget")
        self.terms = np.zeros((1 + len(self.slots), len(N), self.size))
        self.terms[0, :, :k] = (N if self.few == "N" else D)[:, None] == self.levels if few else 1
        for t, (name, slot) in enumerate(self.slots.items(), 1):
            self.terms[t, :, slot] = 1
            self.terms[t, :, slot + 1] = self.centre[name] - logs[name]

    def starts(self, loss, count):
        """(S, constants): exponents on a grid, floors of 5, 50 and 90% of the lowest loss, the rest shared equally."""
        rows = []
        steepness = np.geomspace(0.1, 4, count)  # change of a term's logarithm over one standard deviation of log N
        for part in (0.05, 0.5, 0.9):
            floor = part * loss.min()
            share = math.log((np.median(loss) - floor) / len(self.slots))
            for pick in np.array(np.meshgrid(*[steepness] * len(self.slots))).reshape(len(self.slots), -1).T:
                theta = np.full(self.size, math.log(floor))
                for (name, slot), s in zip(self.slots.items(), pick, strict=True):
                    theta[slot:slot + 2] = share, s / self.scale[name]
                rows.append(theta)
        return np.array(rows)

    def quantities(self):
        """{name: vector c} such that c @ theta is the exponent alpha or beta, or the logarithm of another constant."""
        unit = np.eye(self.size)
        out = {"E": unit[0]}
        if self.few:
            out = {f"floor at {self.few} = {v:g}": unit[i] for i, v in enumerate(self.levels)}
        for name, slot in self.slots.items():
            out["A" if name == "N" else "B"] = unit[slot] + self.centre[name] * unit[slot + 1]  # linear, uncentred too
            out["alpha" if name == "N" else "beta"] = unit[slot + 1]
        return out


def _curve(M, theta):
    """log L (S, n) at theta (S, p) for terms M (T, n, p), and each term's share of L (S, T, n)."""
    u = (theta @ M.reshape(-1, M.shape[2]).T).reshape(len(theta), *M.shape[:2])
    top = u.max(1, keepdims=True)
    share = np.exp(u - top)
    total = share.sum(1, keepdims=True)
    return (top + np.log(total))[:, 0], share / total


def objective(theta, M, y, delta=DELTA):
    """Summed Huber loss of log L - y and its gradient with respect to theta (p,), for terms M (T, n, p) and y (n,)."""
    mean, share = _curve(M, theta[None])
    r = mean[0] - y
    return special.huber(delta, r).sum(), np.clip(r, -delta, delta) @ np.einsum("tn,tnp->np", share[0], M)


def _solve(M, y, theta, along=None, keep=None, iterations=80, tolerance=1e-5, delta=DELTA):
    """Minimise S Huber losses at once: iteratively reweighted least squares with Levenberg's damping.

    M (T, n, p), y (S, n) or (n,), theta (S, p); `along` (S, p, k) restricts each search to theta + along @ z, `keep`
    (S, n) is 0 for points to leave out. Returns theta (S, p) and the losses (S,). The weights majorise the Huber loss,
    which is convex in the residual, so the loss never rises. scipy's minimisers take one problem at a time, a hundred
    times slower.
    """
    S, n = len(theta), M.shape[1]
    y = np.broadcast_to(y, (S, n))
    keep = np.broadcast_to(1.0 if keep is None else keep, (S, n))
    theta, damping, live = theta.copy(), np.full(S, 1e-3), np.arange(S)
    mean, share = _curve(M, theta)
    value = (special.huber(delta, mean - y) * keep).sum(1)
    small = np.zeros(S, int)
    for _ in range(iterations):
        J = np.einsum("stn,tnp->snp", share[live], M)
        if along is not None:
            J = J @ along[live]
        r = mean[live] - y[live]
        w = keep[live] / np.maximum(1, np.abs(r) / delta)
        Jw = (J * w[..., None]).transpose(0, 2, 1)
        H, g = Jw @ J, (Jw @ r[..., None])
        diagonal = np.einsum("sii->si", H)
        diagonal *= 1 + damping[live, None]
        diagonal += 1e-14 * diagonal.max(1, keepdims=True) + 1e-300  # a vanished term leaves a column of zeros
        try:
            step = -np.linalg.solve(H, g)
        except np.linalg.LinAlgError:  # rarely, a problem is singular in spite of the damping
            H += 1e-6 * diagonal.max(1)[:, None, None] * np.eye(H.shape[1])
            step = -np.linalg.solve(H, g)
        if along is not None:
            step = along[live] @ step
        trial = theta[live] + np.clip(step[..., 0], -20, 20)
        mean_t, share_t = _curve(M, trial)
        value_t = (special.huber(delta, mean_t - y[live]) * keep[live]).sum(1)
        better = value_t <= value[live]  # False for NaN
        gain = np.where(better, value[live] - value_t, 0)
        small[live] = np.where(gain <= tolerance * value[live], small[live] + 1, 0)
        damping[live] = np.clip(np.where(better, damping[live] / 5, damping[live] * 8), 1e-9, 1e12)
        won = live[better]
        theta[won], mean[won], share[won], value[won] = trial[better], mean_t[better], share_t[better], value_t[better]
        live = live[(small[live] < 3) & (value[live] > 1e-30)]
        if not len(live):
            break
    return theta, value


def _best(model, y, starts):
    """The constants (p,) with the lowest Huber loss over all starts, and that loss."""
    M = model.terms
    theta, value = _solve(M, y, model.starts(np.exp(y), starts), iterations=25)
    first = np.argsort(value)[:8]
    theta, value = _solve(M, y, theta[first], iterations=400, tolerance=1e-10)
    theta, value = theta[value.argmin()], value.min()
    polished = optimize.minimize(objective, theta, args=(M, y), jac=True, method="L-BFGS-B")  # rarely better
    return (polished.x, polished.fun) if polished.fun < value else (theta, value)


def _jacobian(M, theta):
    return np.einsum("tn,tnp->np", _curve(M, theta[None])[1][0], M)


def _outliers(M, y, theta):
    """[(index, measured / predicted - 1)] of runs that normal noise does not explain. Compares each run with the fit to
    the others, removes the worst one and repeats, so that one bad run cannot hide another (Rosner's generalised ESD,
    one false alarm in 10,000 fits)."""
    (n, p), kept, outliers, bad = M.shape[1:], np.arange(len(y)), [], 0
    for k in range(1, min(n // 6, n - p - 2) + 1):
        m, without = len(kept), 1 - np.eye(len(kept))
        fits, _ = _solve(M[:, kept], y[kept], np.repeat(theta[None], m, 0), keep=without)
        mean, share = _curve(M[:, kept], fits)
        J = np.einsum("stn,tnp->snp", share, M[:, kept])
        error = y[kept] - mean
        noise = np.sqrt((without * error**2).sum(1) / (m - 1 - p)) + 1e-9
        left_out = J[range(m), range(m)]
        others = np.linalg.pinv((J * without[..., None]).transpose(0, 2, 1) @ J, hermitian=True)
        t = np.abs(np.diag(error)) / noise / np.sqrt(1 + np.einsum("sp,spq,sq->s", left_out, others, left_out))
        worst = t.argmax()
        outliers.append((kept[worst], np.expm1(error[worst, worst])))
        if t[worst] > stats.t.ppf(1 - 0.5e-4 / m, m - 1 - p):
            bad = k
        theta, kept = fits[worst], np.delete(kept, worst)
    return outliers[:bad]


def _spread(M, y, theta, N, D):
    """(runs,): SD of log L at each run's size, from seeds that share N and D; a single SD if these are few.

    Robust: a run counts as at most 2.5 times the SD derived from the median at its size.
    """
    n, p = M.shape[1:]
    off, df, sizes = np.zeros(n), np.zeros(n), np.unique(N)
    for cell in {(a, b) for a, b in zip(N, D, strict=True)}:
        cell_runs = (N == cell[0]) & (D == cell[1])
        off[cell_runs], df[cell_runs] = y[cell_runs] - np.median(y[cell_runs]), 1 - 1 / cell_runs.sum()
    if min(df[N == size].sum() for size in sizes) >= 3:
        groups = [(N == size) & (df > 0) for size in sizes]
    else:
        off, df, sizes = y - _curve(M, theta[None])[0][0], np.full(n, max(1, n - p) / n), [None]
        groups = [np.full(n, True)]
    out = np.empty(n)
    for size, group in zip(sizes, groups, strict=True):
        size_of = np.sort(np.abs(off[group]))[-max(1, round(df[group].sum())):]  # others lie on the curve or median
        robust = 1.4826 * np.median(size_of)
        sd = math.sqrt((np.minimum(size_of, 2.5 * robust) ** 2).sum() / df[group].sum())
        out[slice(None) if size is None else N == size] = max(sd, 1e-12)
    return out


def _resampled(model, y, theta, names, bootstrap, confidence, rng):
    """{name: (low, high)}: percentiles of fits to runs drawn with replacement (Besiroglu et al. 2024)."""
    runs, draws = len(y), 20 * bootstrap  # percentile ends scatter more than the critical share
    counts = rng.multinomial(runs, np.full(runs, 1 / runs), draws).astype(float)
    fits, _ = _solve(model.terms, y, np.repeat(theta[None], draws, 0), keep=counts, iterations=300, tolerance=1e-8)
    quantities = {name: fits @ c for name, c in model.quantities().items()}
    quantities = {name: x if name in ("alpha", "beta") else np.exp(x) for name, x in quantities.items()}
    if "a" in names:
        quantities["a"] = quantities["beta"] / (quantities["alpha"] + quantities["beta"])
    ends = [(1 - confidence) / 2, (1 + confidence) / 2]
    return {name: tuple(map(float, np.quantile(quantities[name], ends))) for name in names}


def _intervals(model, y, theta, huber, spread, names, bootstrap, confidence, rng):
    """{name: (low, high)} for constants `names`: values whose profiled Huber loss exceeds the minimum by less than the
    share below which a fraction `confidence` of fits to data simulated at theta stay. See the module's docstring."""
    M, p, rows = model.terms, model.size, model.quantities()
    noise = np.exp(np.log(spread).mean())
    zero = np.zeros(p)
    C0 = np.array([rows[n] if n != "a" else np.eye(p)[model.slots["D"] + 1] for n in names])
    C1 = np.array([zero if n != "a" else -np.eye(p)[model.slots["D"] + 1] - np.eye(p)[model.slots["N"] + 1]
                   for n in names])
    K = np.array([n != "a" for n in names])  # constant = value where (C0 + value C1) @ theta = K value
    hat = np.where(K, C0 @ theta, -(C0 @ theta) / np.where(K, 1, C1 @ theta))

    def held(q, value, start, target):
        """Fits (R, p) and their losses with quantity q[r] fixed at value[r], for target y (R, n)."""
        c = C0[q] + value[:, None] * C1[q]
        start = start + c * ((K[q] * value - (c * start).sum(1)) / (c * c).sum(1))[:, None]
        return _solve(M, target, start, np.linalg.svd(c[:, None])[2][:, 1:].transpose(0, 2, 1))

    Q, S = len(names), bootstrap
    made = _curve(M, theta[None])[0] + noise * rng.standard_normal((S, len(y)))
    _, free = _solve(M, made, np.repeat(theta[None], S, 0))
    q = np.repeat(np.arange(Q), S)
    _, fixed = held(q, hat[q], np.repeat(theta[None], Q * S, 0), np.tile(made, (Q, 1)))
    fixed = fixed.reshape(Q, S)
    free = np.minimum(free, fixed.min(0))
    rank = math.ceil(confidence * (S + 1)) - 1
    rank += math.ceil(math.sqrt(S * confidence * (1 - confidence)))  # so that chance does not narrow the intervals
    share = np.sort(fixed / free - 1, axis=1)[:, min(rank, S - 1)].clip(1e-9)
    r = _curve(M, theta[None])[0][0] - y  # outliers count as three SDs, so that they do not widen the intervals
    tame = special.huber(DELTA, np.clip(r, -3 * noise, 3 * noise)).sum()

    # walk outwards from the estimate on both sides until the loss is too high, then narrow down
    q, side = np.tile(np.arange(Q), 2), np.repeat([-1.0, 1.0], Q)
    J = _jacobian(M, theta)
    slope = (C0 + hat[:, None] * C1) / np.where(K, 1, -(C1 @ theta))[:, None]
    step = noise * np.sqrt(np.einsum("qp,pr,qr->q", slope, np.linalg.pinv(J.T @ J, hermitian=True), slope))[q] + 1e-12
    limits = {"E": (math.log(1e-6) + y.min(), y.min() + 1), "a": (0, 1)}
    limits |= {n: (-10 / model.scale[d], 30 / model.scale[d]) for n, d in (("alpha", "N"), ("beta", "D"))}
    limits |= {n: (c @ theta - 300, c @ theta + 300) for n, c in rows.items() if n not in limits}
    limit = np.array([limits[n] for n in names]).T.ravel()  # (2 Q,): lower ones, then upper
    inside, outside, near = hat[q], np.full(2 * Q, np.nan), np.repeat(theta[None], 2 * Q, 0)
    root = np.stack([np.zeros(2 * Q), np.full(2 * Q, np.nan)])  # sqrt(excess / allowed) inside, outside; target: 1

    def step_to(rows, value):
        fit, loss = held(q[rows], value, near[rows], y)
        excess = np.sqrt(np.maximum(loss - huber, 0) / tame / share[q[rows]])
        over = excess > 1
        outside[rows[over]], root[1, rows[over]] = value[over], excess[over]
        inside[rows[~over]], root[0, rows[~over]], near[rows[~over]] = value[~over], excess[~over], fit[~over]
        return over

    walking = np.arange(2 * Q)
    while len(walking):
        value = inside[walking] + side[walking] * step[walking]
        value = np.where(side[walking] * (value - limit[walking]) > 0, limit[walking], value)
        over = step_to(walking, value)
        step[walking] *= 1.6
        walking = walking[~over & (value != limit[walking])]
    ends = np.flatnonzero(np.isfinite(outside))
    for k in range(12):  # near the end the root of the excess is nearly linear, so a chord beats halving
        chord = np.clip((1 - root[0, ends]) / (root[1, ends] - root[0, ends]), 0.05, 0.95)
        step_to(ends, inside[ends] + (0.5 if k < 5 else chord) * (outside[ends] - inside[ends]))
    bound = np.where(np.isfinite(outside), outside, np.where(np.array(names)[q] == "a", limit, side * np.inf))
    low, high = np.minimum(bound[:Q], hat), np.maximum(bound[Q:], hat)
    logs = [n not in ("alpha", "beta", "a") for n in names]
    low, high = [np.where(logs, np.exp(np.minimum(np.where(logs, v, 0), 709)), v) for v in (low, high)]
    high = np.where((high > 1e307) & logs, np.inf, high)
    return {n: (float(lo), float(hi)) for n, lo, hi in zip(names, low, high, strict=True)}


def fit_loss(N, D, L, names=None, starts=6, bootstrap=200, seed=0, confidence=0.9):
    """Fit L(N, D) = E + A / N^alpha + B / D^beta to runs.

    Args:
        N, D, L: (runs,) parameters, tokens, loss in nats, all above 0; names: (runs,) for the warnings.
        starts: grid points of starts per exponent (times three for E).
        bootstrap: simulated datasets for the intervals, 0 for no intervals; `seed` draws their noise.
    Returns a Fit; constants that the points do not determine are None, and so are their intervals:
        E, A, alpha, B, beta: E, A, B in nats (times N^alpha, D^beta), exponents without units; a: N_opt ~ C^a.
        floors: with one or two values of N, E, A and alpha cannot be told apart, so L = floor + B / D^beta is fitted
            with a floor per value, {N: floor}; likewise for D. Otherwise None.
        intervals: {name of a constant: (low, high)}, where bounds may be 0 or inf, or None.
        huber, noise: minimum of the summed Huber loss; standard deviation of log L around the least-squares curve.
        points: number of runs; spread: (points,) standard deviation of log L over seeds at each run's size.
        outliers: {index of a run that normal noise does not explain: measured / predicted by the others - 1}.
        warnings: sentences to be shown with the numbers.
    Raises CannotFit if no fit is possible.
    """
    N, D, L = _positive(N=N, D=D, L=L)
    n, y, names, warnings = len(L), np.log(L), names or range(len(L)), []
    warn = warnings.append
    model = _Model(N, D)
    M, p = model.terms, model.size
    theta, huber = _best(model, y, starts)
    outliers = {int(i): float(off) for i, off in sorted(_outliers(M, y, theta))}
    for i, off in outliers.items():
        warn(f"run {names[i]} (N = {N[i]:g}, D = {D[i]:g}) is an outlier, and stays in the fit: its loss {L[i]:g} lies "
             f"{abs(off):.3g} of its value {'above' if off > 0 else 'below'} what the others predict")

    spread = _spread(M, y, theta, N, D)
    values, shaky = _constants(model, y, theta, warn)
    if model.few:
        lost, varies = {"N": ("E, A and alpha", "D"), "D": ("E, B and beta", "N")}[model.few]
        several = "s" * (len(model.levels) > 1)
        warn(f"{lost} cannot be told apart with {len(model.levels)} value{several} of {model.few}: fitted is how the "
             f"loss falls with {varies}, to a floor for each {model.few}")
    least = _solve(M, y, theta[None], delta=1e3)[0]  # least squares: its residuals estimate the noise best
    noise = math.sqrt(((_curve(M, least)[0] - y) ** 2).sum() / (n - p)) if n > p else None
    intervals = dict.fromkeys(["E", "A", "alpha", "B", "beta", "a"])
    told = [name for name in (*model.quantities(), "a") if values.get(name) is not None and name not in shaky]
    if noise is None:
        warn(f"{n} runs are as many as the constants: the curve passes through all of them, so there is no interval")
    elif noise < 1e-9:
        warn("the runs lie on the curve to rounding: there is no noise to take intervals from")
    elif bootstrap and told:
        rng = np.random.default_rng(seed)
        if n >= MANY * p:
            intervals |= _resampled(model, y, theta, told, bootstrap, confidence, rng)
        else:
            intervals |= _intervals(model, y, theta, huber, spread, told, bootstrap, confidence, rng)
        for name in ("E", "alpha", "beta", "a", "A", "B"):
            low, high = intervals[name] or (0, 0)
            if high - low > abs(values.get(name) or 0) * (1e3 if name in "AB" else 1):
                warn(f"{name} = {values[name]:.4g} is hardly determined: the {confidence:.0%} interval is {low:.3g} .. "
                     f"{high:.3g}")
    off = np.expm1(y - _curve(M, theta[None])[0][0])
    if np.abs(off).max() > 0.1:
        i = np.abs(off).argmax()
        warn(f"the law describes these runs badly: run {names[i]} lies {off[i]:+.0%} off the curve")
    floors = {float(v): values[f"floor at {model.few} = {v:g}"] for v in model.levels} if model.few else None
    return Fit(*map(values.get, ("E", "A", "alpha", "B", "beta", "a")), floors=floors, intervals=intervals,
               huber=float(huber), noise=noise, points=n, outliers=outliers, warnings=warnings, spread=spread)


def _positive(**columns):
    """The columns as flat float arrays. Raises CannotFit unless all are positive numbers."""
    arrays = []
    for name, values in columns.items():
        try:
            arrays.append(np.asarray(values, float).ravel())
        except (TypeError, ValueError, OverflowError) as error:
            raise CannotFit(f"{name} holds something that is not a number: {error}") from None
        for i in np.flatnonzero(~((arrays[-1] > 0) & np.isfinite(arrays[-1]))):
            raise CannotFit(f"{name}[{i}] = {arrays[-1][i]:g} is not a positive number")
    if len({len(a) for a in arrays}) > 1:
        raise CannotFit(f"N, D and L have {', '.join(str(len(a)) for a in arrays)} values: give each run's three")
    return arrays


def _constants(model, y, theta, warn):
    """({name: value or None}, names whose intervals mean nothing); warns of constants at a boundary or undetermined.

    If E has vanished, raises log E in place from minus infinity, so that its profile can be computed.
    """
    share = _curve(model.terms, theta[None])[1][0].max(1)  # each term's largest share of a loss
    values, shaky = {}, set()
    for name, c in model.quantities().items():
        value = float(c @ theta)
        values[name] = value if name in ("alpha", "beta") else math.exp(value) if abs(value) < 700 else None
    J = _jacobian(model.terms, theta)
    size = np.linalg.norm(J, axis=0)
    _, s, V = np.linalg.svd(J / np.where(size > 1e-9, size, 1))
    free = np.abs(V[s < 1e-7 * s[0]]).max(0, initial=0) > 1e-3  # constants that change along a direction of no cost
    for name, c in model.quantities().items():
        if free[c != 0].any() and (size[c != 0] > 1e-9).all():
            values[name] = None
    lost = [name for name, value in values.items() if value is None]
    if lost:
        warn(f"{', '.join(lost)} cannot be told from these runs: other values fit as well")
    if not model.few and share[0] < 1e-5:
        theta[0] = math.log(2e-6) + y.min()
        values["E"] = None
        shaky.add("E")
        warn("E is undetermined: the fit runs to 0, which says that these runs show no floor, not that there is none")
    for t, (d, slot) in enumerate(model.slots.items(), 1):
        factor, power = ("A", "alpha") if d == "N" else ("B", "beta")
        steepness = theta[slot + 1] * model.scale[d]
        if share[t] < 1e-5:
            values[factor], values[power] = 0.0, None
            shaky.add(factor)
            warn(f"{factor} ran to 0: the loss does not fall with {d}, and {power} means nothing")
        elif values[power] is not None and not 0.02 <= steepness <= 8:
            reason = "the term matters at the smallest {} only" if steepness > 8 else (
                "the loss rises with {}" if steepness < 0 else "no power law of {}")
            warn(f"{power} ran to {values[power]:.3g}: {reason.format(d)}")
    if values.get("alpha") is not None and values.get("beta") is not None and min(values["alpha"], values["beta"]) > 0:
        values["a"] = values["beta"] / (values["alpha"] + values["beta"])
    return values, shaky


def coverage(N, D, constants, spread, draws=100, bootstrap=100, outlier=0.0):
    """{constant: share of simulated sweeps whose interval contains the truth} for the runs of a design.

    N, D (runs,); constants: of the true law; spread: SD of log L, a number or (runs,); outlier: raise one random run of
    each sweep by so many SDs. Constants that a design does not determine are absent. Sweeps whose fit leaves a constant
    undetermined do not count for it: for E, these would miss it most often.
    """
    rng, held = np.random.default_rng(0), {}
    truth = constants | {"a": constants["beta"] / (constants["alpha"] + constants["beta"])}
    for i in range(draws):
        off = spread * rng.standard_normal(len(N))
        off[rng.integers(len(N))] += outlier * np.mean(spread)
        fitted = fit_loss(N, D, law(N, D, **constants) * np.exp(off), bootstrap=bootstrap, starts=3, seed=i)
        for name, bounds in fitted.intervals.items():
            if bounds and name in truth:
                held.setdefault(name, []).append(bounds[0] <= truth[name] <= bounds[1])
    return {name: sum(hits) / len(hits) for name, hits in held.items() if len(hits) >= draws / 2}


def law(N, D, E, A, alpha, B, beta):
    return E + A / N**alpha + B / D**beta


EPOCH = dict(E=1.8172, A=482.0, alpha=0.3478, B=2085.4, beta=0.3658)  # Besiroglu et al. 2024, tokens of text
BYTES = dict(E=0.6, A=30.0, alpha=0.35, B=60.0, beta=0.35)  # roughly the losses per byte at the laptop sizes
DESIGNS = {  # preset of sweep.py: [(N, SD of log L, {steps of a budget: seeds})] for a family's sizes
    "laptop": [(467e3, 0.008, {1024: 5, 256: 2, 512: 2}), (1.49e6, 0.004, {1024: 3, 256: 2, 512: 2})],
    "night": [(131e3, 0.012, {2048: 4, 1024: 2, 4096: 2}), (467e3, 0.008, {2048: 4, 1024: 2, 4096: 2}),
              (3.44e6, 0.004, {2048: 3, 1024: 2, 4096: 2})]}


def design(sizes):
    """N, D, SD of log L (runs,) for a row of DESIGNS."""
    return np.array([(n, steps * 1024, sd) for n, sd, budgets in sizes for steps, seeds in budgets.items()
                     for _ in range(seeds)]).T


# ---------------------------------------------------------------------------------------------------- isoFLOP parabolas

def isoflop(N, L, C, tolerance=0.2):
    """The exponent of N_opt ~ C^exponent from parabolas of the loss in log N, one per budget of C FLOPs; None unless
    three budgets have a vertex between their smallest and largest size.

    N, L, C: (runs,) parameters, loss, FLOPs, all above 0. Runs belong to one budget if consecutive sorted C differ by
    at most a share of `tolerance`. Biased even without noise: the loss is a parabola in log N only near its minimum, so
    sizes that are not symmetric around it move the vertex.
    """
    N, L, C = _positive(N=N, L=L, C=C)
    order, vertices = np.argsort(C, kind="stable"), []
    for budget in np.split(order, np.flatnonzero(np.diff(np.log(C[order])) > math.log1p(tolerance)) + 1):
        x, centre = np.log(N[budget]), np.log(N[budget]).mean()
        if len(set(x)) > 2:
            curvature, slope, _ = np.polyfit(x - centre, L[budget] / L[budget].mean(), 2)
            vertex = centre - slope / (2 * curvature) if curvature > 1e-9 else math.nan
            if x.min() <= vertex <= x.max():
                vertices.append((np.log(C[budget]).mean(), vertex))
    return float(stats.linregress(*zip(*vertices, strict=True)).slope) if len(vertices) > 2 else None


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, sizes in DESIGNS.items():
        N, D, spread = design(sizes)
        for words, outlier in (("", 0.0), (", one run 8 SDs off", 8.0)):
            covered = coverage(N, D, BYTES, spread, 200, 200, outlier)
            print(f"{name}, noise by size{words}: 90% intervals cover " + ", ".join(
                f"{key} {share:.1%}" for key, share in covered.items()), flush=True)
