"""How often do the intervals of experiments/fit.py hold the truth? Simulated sweeps of `sweep.py law`, two families.

    python experiments/law_simulation.py results/law/simulation.json

Each form of the law is the truth of a third of the sweeps. Trunks are correlated, runs have the costs of their learning
rates' errors and a misfit that no form has. Quantities are those of fit.analyse; the losses that are predicted are of
runs that are drawn after the prediction. alpha is counted where the truth's term of N is a power.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import configurator  # noqa: E402
from common.errors import main_error  # noqa: E402
from configurator import Count  # noqa: E402
from experiments.fit import FORMS, MB, Family, Fit, allocation, analyse, compute_ratio, law, ratios, shape, since  # noqa: E402
from runtime.records import write_json  # noqa: E402

LABELS = ["60K", "130K", "250K", "460K", "1.5M"]
N = np.array([47880.0, 114496, 248544, 433792, 1436736])  # Longhorn's, without the embedding
FLOPS = np.array([403e3, 873e3, 1.77e6, 2.97e6, 9.30e6])  # per token
BUDGETS = np.array([0.25, 0.5, 1, 2, 4, 8, 16]) * MB
LARGER, LONGER = 3373312.0, 28 * MB
SD = {"longhorn": 0.006, "llama": 0.009}  # of log L over seeds at 1 MB
COST = np.array([0.0012, 0.0006, 0.0006, 0.0006, 0.0006])  # of the rates' errors, on average
MISFIT = 0.002  # SD of log L
# E, the terms of N at 433,792 parameters and of D at 1 MB, alpha, beta, D0, gamma: near the losses of the sweeps at
# 460K and 1.5M in results/, Longhorn needing a third of LLaMA's tokens
TRUTHS = {
    "additive": {"longhorn": (0.35, 0.35, 0.684, 0.21, 0.255, 0, 1), "llama": (0.35, 0.35, 0.92, 0.24, 0.25, 0, 1)},
    "offset": {"longhorn": (0.35, 0.35, 0.684, 0.21, 0.24, 0.06, 1), "llama": (0.35, 0.35, 0.92, 0.24, 0.23, 0.1, 1)},
    "gamma": {"longhorn": (0.3, 0.45, 0.8, 0.26, 0.32, 0, 0.75), "llama": (0.3, 0.45, 1.13, 0.3, 0.31, 0, 0.75)}}


def truth(E, of_N, of_D, alpha, beta, D0, gamma):
    """A Fit whose terms have these values at 433,792 parameters and at 1 MB."""
    return Fit(E, of_N * N[3] ** alpha, alpha, of_D * (MB - D0 * MB) ** beta, beta, D0 * MB, gamma, 0.0)


def simulated(rng, name, fitted):
    """(Family, {(N, D): log L of the runs to predict})."""
    D = np.append(BUDGETS if name == "longhorn" else BUDGETS[1:], LONGER)
    sizes = np.append(N, LARGER)
    exact = np.log(law(sizes[:, None], D, *fitted[:7]))
    noise = SD[name] * rng.standard_normal((2, *exact.shape)) @ np.linalg.cholesky(shape(D)).T
    rates = np.append(COST, COST[0]) * rng.standard_normal(len(sizes)) ** 2
    log_L = exact + noise + rates[:, None] + MISFIT * rng.standard_normal(exact.shape)
    later = {(size, LONGER): log_L[0, i, -1] for i, size in ((1, N[1]), (3, N[3]), (5, LARGER))}
    later[LARGER, 16 * MB] = log_L[0, 5, -2]
    return Family(LABELS, N, FLOPS, np.tile(D[:-1], (5, 1)), log_L[:, :5, :-1], COST), later


def exact_quantities(fits):
    """{quantity: its true value}."""
    families = {}
    for name, fitted in fits.items():
        D = BUDGETS if name == "longhorn" else BUDGETS[1:]
        log_L = np.log(law(N[:, None], D, *fitted[:7]))
        families[name] = Family(LABELS, N, FLOPS, np.tile(D, (5, 1)), log_L[None], COST)
    read = ratios(families["longhorn"], families["llama"], MB)
    parts = {name: since(family, MB) for name, family in families.items()}
    read |= compute_ratio(parts["longhorn"], parts["llama"], fits["longhorn"], fits["llama"])
    found = {f"llama {key}": value for key, value in read.items()}
    for name, fitted in fits.items():
        found[f"{name} a"] = allocation(fitted, parts[name])
        if fitted.gamma == 1:
            found[f"{name} alpha"] = fitted.alpha
    return found


def simulate(counts, i, draws):
    """Add sweep i to counts {form: {quantity: [sweeps whose interval held the truth, sweeps, sum of widths]}}."""
    rng = np.random.default_rng(i)
    form = list(FORMS)[i % len(FORMS)]
    fits = {name: truth(*constants) for name, constants in TRUTHS[form].items()}
    true = exact_quantities(fits)
    families = {}
    targets = {}
    for name, fitted in fits.items():
        families[name], later = simulated(rng, name, fitted)
        targets[name] = list(later)
        true |= {f"{name} {size:.0f} {D:.0f}": value for (size, D), value in later.items()}
    for key, (low, _, high) in analyse(families, targets, draws=draws, seed=i).items():
        if key in true:
            count = counts.setdefault(form, {}).setdefault(re.sub(" tokens .*", " tokens", key), [0, 0, 0.0])
            count[0] += bool(low <= true[key] <= high)
            count[1] += 1
            count[2] += high - low


def save(counts, args, sweeps):
    forms = {}
    for form, quantities in counts.items():
        forms[form] = {}
        for key, (held, of, widths) in quantities.items():
            forms[form][key] = {"held": held, "of": of, "width": round(widths / of, 5)}
    command = f"python experiments/law_simulation.py {args.record} --sweeps={sweeps} --draws={args.draws}"
    write_json(args.record, {"command": command, "forms": forms})


@dataclass
class Options:
    record: Path  # the file to write
    sweeps: Count = 500  # simulated
    draws: Count = 60  # of fit.analyse, per form


def main(argv):
    args = configurator.read(Options, argv, __doc__)
    counts = {}
    args.record.parent.mkdir(parents=True, exist_ok=True)
    for i in range(args.sweeps):
        simulate(counts, i, args.draws)
        if i % 30 == 29 or i + 1 == args.sweeps:  # it may be stopped
            save(counts, args, i + 1)
    for form, quantities in counts.items():
        print(form)
        for key, (held, of, widths) in quantities.items():
            print(f"  {key:30} {held / of:.3f} of {of}, width {widths / of:.4f}")


if __name__ == "__main__":
    with main_error("law_simulation.py"):
        main(sys.argv[1:])
