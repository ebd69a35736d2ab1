"""How often do the intervals of experiments/fit.py hold the truth? Simulated sweeps of `sweep.py law`, two families.

    python experiments/law_simulation.py results/law/simulation.json

Each form of the law is the truth in a third of the sweeps. Losses are correlated along a trunk. They include the cost
of errors in the learning rates, and a misfit that no form has. Quantities are those of fit.analyse; predicted losses
are those of runs drawn after the prediction. alpha is counted where the true law's term of N is a power.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import configurator  # noqa: E402
from common.errors import main_error  # noqa: E402
from configurator import Count  # noqa: E402
from experiments.fit import FORMS, MB, Family, Fit, allocation, analyse, compute_ratio, law, ratios, shape, since  # noqa: E402
from experiments.law import coverage  # noqa: E402
from runtime.records import write_json  # noqa: E402

LABELS = ["60K", "130K", "250K", "460K", "1.5M"]
SIZES = np.array([47880.0, 114496, 248544, 433792, 1436736, 3373312])  # Longhorn's, without the embedding
FLOPS = np.array([403e3, 873e3, 1.77e6, 2.97e6, 9.30e6])  # FLOPs per token
BUDGETS = np.array([0.25, 0.5, 1, 2, 4, 8, 16]) * MB
LONGER = 28 * MB
PREDICTED = [(SIZES[1], LONGER), (SIZES[3], LONGER), (SIZES[5], LONGER), (SIZES[5], 16 * MB)]  # first seed
SD = {"longhorn": 0.006, "llama": 0.009}  # SD of log L over seeds at 1 MB
COST = np.array([0.0012, 0.0006, 0.0006, 0.0006, 0.0006])  # mean cost in log L of the rates' errors
MISFIT = 0.002  # SD of log L
# E, the terms of N at 433,792 parameters and of D at 1 MB, alpha, beta, D0, gamma: near the losses of the sweeps at
# 460K and 1.5M in results/, Longhorn needing a third of LLaMA's tokens
TRUTHS = {
    "additive": {"longhorn": (0.35, 0.35, 0.684, 0.21, 0.255, 0, 1), "llama": (0.35, 0.35, 0.92, 0.24, 0.25, 0, 1)},
    "offset": {"longhorn": (0.35, 0.35, 0.684, 0.21, 0.24, 0.06, 1), "llama": (0.35, 0.35, 0.92, 0.24, 0.23, 0.1, 1)},
    "gamma": {"longhorn": (0.3, 0.45, 0.8, 0.26, 0.32, 0, 0.75), "llama": (0.3, 0.45, 1.13, 0.3, 0.31, 0, 0.75)}}


def truth(E, of_N, of_D, alpha, beta, D0, gamma):
    """A Fit whose terms have these values at 433,792 parameters and at 1 MB."""
    return Fit(E, of_N * SIZES[3] ** alpha, alpha, of_D * (MB - D0 * MB) ** beta, beta, D0 * MB, gamma, 0.0)


def family_of(D, log_L):
    """The Family of log_L (seeds, sizes, budgets), without the runs that are to be predicted."""
    return Family(LABELS, SIZES[:-1], FLOPS, np.tile(D[:-1], (5, 1)), log_L[:, :-1, :-1], COST)


def another(rng, name, exact, D):
    """Draw log L of two seeds around the exact values (sizes, budgets)."""
    noise = SD[name] * rng.standard_normal((2, *exact.shape)) @ np.linalg.cholesky(shape(D)).T
    rates = np.append(COST, COST[0]) * rng.standard_normal(len(SIZES)) ** 2
    return exact + noise + rates[:, None] + MISFIT * rng.standard_normal(exact.shape)


def simulate(i, draws):
    """Rows of sweep i: the form of the true law, a quantity, whether its interval held the truth, and its width."""
    rng = np.random.default_rng(i)
    form = list(FORMS)[i % len(FORMS)]
    fits = {name: truth(*constants) for name, constants in TRUTHS[form].items()}
    exact = {}
    families = {}
    true = {}
    for name, fitted in fits.items():
        D = np.append(BUDGETS if name == "longhorn" else BUDGETS[1:], LONGER)
        expected = np.log(law(SIZES[:, None], D, *fitted[:7]))
        seen = another(rng, name, expected, D)
        exact[name] = family_of(D, expected[None])
        families[name] = family_of(D, seen)
        true[f"{name} a"] = allocation(fitted, since(exact[name], MB))
        if fitted.gamma == 1:
            true[f"{name} alpha"] = fitted.alpha
        for N, tokens in PREDICTED:
            ((loss,),) = seen[0][np.ix_(SIZES == N, D == tokens)]
            true[f"{name} {N:.0f} {tokens:.0f}"] = loss
    a, b = (since(family, MB) for family in exact.values())
    for key, value in (ratios(*exact.values(), MB) | compute_ratio(a, b, *fits.values())).items():
        true[f"llama {key}"] = value
    rows = []
    for key, (low, _, high) in analyse(families, dict.fromkeys(fits, PREDICTED), draws=draws, seed=i).items():
        if key in true:
            quantity = re.sub(" tokens .*", " tokens", key)
            rows.append({"form": form, "quantity": quantity, "held": low <= true[key] <= high, "width": high - low})
    return rows


def save(rows, args, sweeps):
    forms = {}
    for (form, quantity), group in pandas.DataFrame(rows).groupby(["form", "quantity"], sort=False):
        count = {"held": int(group.held.sum()), "of": len(group), "width": round(group.width.mean(), 5)}
        forms.setdefault(form, {})[quantity] = count
    command = f"python experiments/law_simulation.py {args.record} --sweeps={sweeps} --draws={args.draws}"
    write_json(args.record, {"command": command, "forms": forms})


@dataclass
class Options:
    record: Path  # the file to write
    sweeps: Count = 500  # simulated
    draws: Count = 60  # simulated sweeps of fit.analyse, per form


def main(argv):
    args = configurator.read(Options, argv, __doc__)
    args.record.parent.mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(args.sweeps):
        rows += simulate(i, args.draws)
        if i % 30 == 29 or i + 1 == args.sweeps:  # save as we go: the program may be stopped
            save(rows, args, i + 1)
    print(coverage(args.record))


if __name__ == "__main__":
    with main_error("law_simulation.py"):
        main(sys.argv[1:])
