"""The law of a sweep: its families' constants, what one needs of the others' tokens and compute, with 90% intervals.

    python experiments/law.py out/scaling_law                              the first family against the others
    python experiments/law.py results/law/runs.json longhorn llama         from a saved file, of some families
    python experiments/law.py out/scaling_law --predict=predictions.json   before the runs of `sweep.py law_predicted`

`NAME tokens I J`: log2 of the tokens that the first family needs of NAME's, at size I and budget J; `per D`, `per N`:
its slopes per doubling; `NAME compute`, `per C`: the same of the compute, on the frontier. How: experiments/fit.py.
"""

import itertools
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import configurator  # noqa: E402
from common import errors  # noqa: E402
from common.errors import ConfigError  # noqa: E402
from configurator import Count, Positive  # noqa: E402
from experiments import compare, records, sweep  # noqa: E402
from experiments.fit import MB, Family, analyse, power  # noqa: E402
from runtime.records import environment, write_json  # noqa: E402


def rate_costs(searches, rates, widths):
    """What the errors of the learning rates cost in log L on average, (widths,).

    A rate that is off by e of its logarithm costs c e^2; c, and the variance of e, are those of the searches (see
    compare.rate_variance), or of their rates around the line in log width, by which the other sizes have theirs.

    Args:
        searches: {width: {rate: {seed: loss}}}; rates: {width: the rate that was chosen}, of the searched widths.
    """
    looked = {width: compare.look_at_search(search, None) for width, search in searches.items()}
    looked = {width: found for width, found in looked.items() if found}
    if not looked:
        return np.zeros(len(widths))
    best = {width: min(np.mean(list(losses.values())) for losses in searches[width].values()) for width in looked}
    curvature = np.mean([found.curvature / best[width] for width, found in looked.items()])
    variance = np.mean([found.variance for found in looked.values()])
    x = np.log(list(rates))
    apart = x - x.mean()
    if len(x) > 2:
        y = np.log(list(rates.values()))
        off = y - y.mean() - apart * (apart @ y) / (apart @ apart)
        variance = max(variance, off @ off / (len(x) - 2))
    leverage = 1 / len(x) + (np.log(widths) - x.mean()) ** 2 / max(apart @ apart, 1e-9)
    return curvature * variance * np.maximum(1, leverage)


def families_of(source, models=(), with_embedding=False):
    """{model: Family} of a sweep's folder or saved file: the sizes that have all budgets at which some size has two
    seeds or more, with all seeds. Raises ConfigError for a model with fewer than three such sizes.

    with_embedding: N counts its parameters too.
    """
    runs = records.read(source, kind="scaling")
    runs = runs[runs.left_out == ""]
    found = {}
    for model in models or runs.model.unique():
        of_model = runs[runs.model == model].astype({"seed": int, "tokens": float})
        reported = of_model[of_model.stage == "seed"]
        reported = reported[reported.groupby(["size", "tokens"]).seed.transform("nunique") > 1]
        table = reported.pivot_table(index="size", columns=["seed", "tokens"], values="val_loss").dropna()
        if len(table) < 3:
            raise ConfigError(f"{source}: {len(table)} sizes of {model} are complete: run three, or name others")
        about = reported.groupby("size").first().loc[table.index]
        table = table.loc[about.sort_values("parameters").index]
        about = about.loc[table.index]
        searches = {}
        for run in of_model[of_model.stage == "search"].itertuples():
            losses = searches.setdefault(run.n_embd, {}).setdefault(run.learning_rate, {})
            losses[run.seed] = run.loss_of_choosing_files
        chosen = about.learning_rate[about.n_embd.isin(list(searches))]
        rates = dict(zip(about.n_embd[chosen.index], chosen, strict=True))
        seeds = table.columns.levels[0]
        log_L = np.log(table.to_numpy()).reshape(len(table), len(seeds), -1).swapaxes(0, 1)
        N = about.parameters - (0 if with_embedding else about.embedding)
        flops = about.flops / about.tokens
        costs = rate_costs(searches, rates, about.n_embd.to_numpy(float))
        D = table.columns.levels[1]
        found[model] = Family(N.to_numpy(float), flops.to_numpy(float), D.to_numpy(float), log_L, costs)
    return found


def to_predict(families, with_embedding=False):
    """{model: {(N, D): (size, tokens)}} of the runs of `sweep.py law_predicted`."""
    preset = sweep.PRESETS["law_predicted"]
    models = [model for model in preset.models if model in families]
    cells = sweep.reported_cells(preset, dict.fromkeys(itertools.product(models, preset.sizes), 1.0))
    sweep.estimate(cells)
    targets = {}
    for cell in cells:
        embedding = 0 if with_embedding else sweep.vocabulary("pystdlib") * sweep.load(cell.argv).n_embd
        place = float(cell.at["parameters"] - embedding), float(cell.at["tokens"])
        targets.setdefault(cell.at["model"], {})[place] = cell.at["size"], cell.at["tokens"]
    return targets


@dataclass
class Options:
    sweep: Path  # a sweep's folder, or the .json that its report wrote
    models: list[str] = ()  # the first is compared with each other; none: all
    least: Positive = 1.0  # MB of the least budget that is fitted
    embedding: bool = False  # count the embedding's parameters too
    draws: Count = 200  # simulated sweeps per form of the law
    predict: Path = None  # a file: write the losses of `sweep.py law_predicted`

    ARGUMENTS = ("models",)


def main(argv):
    args = configurator.read(Options, argv, __doc__)
    families = families_of(args.sweep, args.models, args.embedding)
    targets = to_predict(families, args.embedding) if args.predict else {}
    found = analyse(families, targets, args.least * MB, args.draws)
    predictions = []
    for model, places in targets.items():
        for (N, D), (size, tokens) in places.items():
            low, loss, high = np.exp(found.pop(f"{model} {N:.0f} {D:.0f}")).tolist()
            by_power = math.exp(power(families[model], N, D))
            predictions.append({"model": model, "size": size, "tokens": tokens, "low": low, "loss": loss, "high": high,
                                "power": by_power})
            print(f"{model} {size} {tokens:,}: {loss:.4f} ({low:.4f} .. {high:.4f}), by a power {by_power:.4f}")
    for key, (low, middle, high) in found.items():
        print(f"{key:32} {middle:9.4f} ({low:.4f} .. {high:.4f})")
    if args.predict:
        write_json(args.predict, {"commit": environment()["commit"], "predictions": predictions, "quantities": found})


if __name__ == "__main__":
    with errors.main_error("law.py"):
        main(sys.argv[1:])
