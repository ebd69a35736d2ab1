"""The page and the figure of experiments/extrapolation.py, from its record file."""

import functools
import itertools
import math
import re

import numpy as np

from experiments import pages
from experiments.compare import welch
from experiments.figures import Curve, Panel
from experiments.pages import DASH, escaped, table

PERPLEXITY = """\
Perplexity; in brackets the loss minus the loss at the training length (or else the shortest), in nats, paired, with its
standard error over seeds, as for the loss, or over sequences where there is one seed. In the figure, training lengths
are dashed, and the bands are these errors."""
COSTS = {"run": "{name}", "T": "{length}", "state at the shortest T, MiB per sequence": "{first_state:.3f}",
         "at this T": "{state:.3f}", "peak, MiB": "{peak:.0f}", "tokens/s": "{tokens_per_second:,.0f}",
         "RMS of the state at the training length": "{rms_trained:.3g}", "RMS at this T": "{rms:.3g}"}
MIB = 2**20


def in_words(text):
    where = "within documents (packages of files)" if text["documents"] else "end to end, across documents"
    return f"{text['sequences']} sequences of {text['longest']} tokens of {text['dataset']}, {where}"


def mean_and_error(values):
    """The mean over the first axis and its standard error, as numbers or lists; NaN where one is not known."""
    values = np.array(values, float)  # None, in a record, is NaN
    n = len(values)
    mean = values.mean(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.sqrt(np.square(values - mean).sum(0) / (n * (n - 1)))
    return mean.tolist(), error.tolist()


def by_name(runs):
    """{run's name without the seed: its rows, one per seed}"""
    groups = {}
    for r in runs.itertuples():
        groups.setdefault(re.sub(r", seed \d+", "", r.run), []).append(r)
    return groups


def read_at(seeds, T):
    """The measurements at length T, for the seeds that were read that far."""
    return [x for r in seeds for x in r.lengths if x["length"] == T]


def perplexity(measured):
    """A table cell: perplexity over the seeds at a length, the loss if there are several, and the loss minus that at
    the training length."""
    loss, error = mean_and_error([x["loss"] for x in measured])
    cell = f"{np.exp(loss):.3f}"
    if len(measured) > 1:
        cell += f", loss {loss:.3f} \u00b1 {error:.3f}"
    if all("against" in x for x in measured):
        change, error = mean_and_error([x["difference"] for x in measured])
        if len(measured) == 1:
            error = np.float64(measured[0]["difference_standard_error"])  # None is NaN
        cell += f" ({change:+.3f} \u00b1 {error:.3f})"
    return cell


def differences(groups, lengths):
    """Rows of a table: loss of one run minus that of another, with Welch's 95% interval over their seeds."""
    rows = []
    for (a, first), (b, second) in itertools.combinations(groups.items(), 2):
        row = {}
        for T in lengths:
            losses = [np.array([x["loss"] for x in read_at(seeds, T)], float) for seeds in (second, first)]
            if min(map(len, losses)) > 1:
                row[f"T = {T}"] = "{:+.3f} ({:+.3f} .. {:+.3f})".format(*welch(*losses)[:3])
        if row:
            rows.append({"loss, 95% interval over the seeds": f"{b} minus {a}", **row})
    return rows


def costs(groups):
    """Rows of a table: memory, speed and states of each run's first seed, at the longest length that was read."""
    rows = []
    for name, (run, *_) in groups.items():
        x = run.lengths[-1]
        loud = loudest(run.state_norms)
        rows.append({**x, "name": name, "first_state": run.lengths[0]["state_bytes_per_sequence"] / MIB,
                     "state": x["state_bytes_per_sequence"] / MIB, "peak": (x["peak_bytes"] or math.nan) / MIB,
                     "rms_trained": loud.get(run.block_size), "rms": loud.get(x["length"])})
    return rows


def loudest(state_norms):
    """{position: largest RMS of the branches' states, NaN if one is not finite}."""
    branches = list(state_norms.values())
    if not branches:
        return {}
    largest = np.array([branch["rms"] for branch in branches], float).max(0)
    return dict(zip(branches[0]["positions"], largest.tolist(), strict=True))


def page(runs):
    """Perplexity at each length, differences over seeds, memory and speed."""
    groups = by_name(runs)
    lengths = sorted({x["length"] for lengths in runs.lengths for x in lengths})
    rows = []
    for name, seeds in groups.items():
        row = {"run": name, "trained at": seeds[0].block_size}
        for T in lengths:
            at = read_at(seeds, T)
            row[f"T = {T}"] = perplexity(at) if len(at) == len(seeds) else DASH
        rows.append(row)
    threads, precisions = (" and ".join(map(str, runs[key].unique())) for key in ("threads", "dtype"))
    most = max(map(len, groups.values()))
    about = f"{in_words(runs.text.iloc[0])}; {threads} threads, {precisions}; up to {most} training seeds each"
    if len({text["sha256"] for text in runs.text}) > 1:
        about += "; NOT all curves are of the same text: do not compare them"
    return pages.Page([], [escaped(f"{about}.")], panels(groups), [
        table(rows), PERPLEXITY, table(differences(groups, lengths)),
        table(costs(groups), COSTS)])


def panels(groups):
    """Perplexity against T (Figure 1, right), and the gain from the longer past, place by place."""
    of_length = []
    of_place = []
    trained = set()
    for name, seeds in groups.items():
        trained.update(r.block_size for r in seeds)
        lengths = [x["length"] for x in min((r.lengths for r in seeds), key=len)]  # that all seeds have read
        read = [r.lengths[:len(lengths)] for r in seeds]
        losses = over_seeds(read, lambda lengths, key: [x[f"loss{key}"] for x in lengths])
        of_length.append(Curve(name, name, lengths, *map(np.exp, losses)))
        last = [lengths[-1].get("difference_by_place") for lengths in read]
        if all(last):
            middles = [math.sqrt(max(1, low) * high) for low, high in itertools.pairwise(last[0]["edges"])]
            gains = over_seeds(last, lambda by, key: by[f"difference{key}"])
            of_place.append(Curve(name, name, middles, *gains))
    drawn = [Panel("Perplexity", "sequence length T", "perplexity", of_length, "xy", trained)]
    if of_place:
        drawn.append(Panel("Gain from the longer past", "place in the longest sequence",
                           "loss at the longest T minus at the trained", of_place, "x", trained))
    return drawn


def over_seeds(records, values_of):
    """(mean, low, high) over seeds: plus and minus the standard error, or of one seed that over its sequences.

    values_of(record, ""), values_of(record, "_standard_error"): the values of a seed, and their errors.
    """
    mean, error = mean_and_error([values_of(record, "") for record in records])
    if len(records) == 1:
        error = values_of(records[0], "_standard_error")
    mean, error = np.array(mean, float), np.array(error, float)  # None is NaN, a hole
    return mean, mean - error, mean + error


write = functools.partial(pages.report, "extrapolation", "Extrapolation", page)
