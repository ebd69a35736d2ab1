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
are dashed, and the standard error is that over sequences."""
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
        for r in seeds:
            trained.add(r.block_size)
            label = name if r is seeds[0] else ""
            lengths, losses, errors = ([x[key] for x in r.lengths] for key in ("length", "loss", "loss_standard_error"))
            of_length.append(Curve(name, label, lengths, *map(np.exp, interval(losses, errors))))
            by = r.lengths[-1].get("difference_by_place")
            if by:
                middles = [math.sqrt(max(1, low) * high) for low, high in itertools.pairwise(by["edges"])]
                around = interval(by["difference"], by["difference_standard_error"])
                of_place.append(Curve(name, label, middles, *around))
    drawn = [Panel("Perplexity", "sequence length T", "perplexity", of_length, "xy", trained)]
    if of_place:
        drawn.append(Panel("Gain from the longer past", "place in the longest sequence",
                           "loss at the longest T minus at the trained", of_place, "x", trained))
    return drawn


def interval(y, error):
    """(y, low, high)"""
    y = np.array(y, float)  # None is NaN, a hole
    error = np.array(error, float)
    return y, y - error, y + error


write = functools.partial(pages.report, "extrapolation", "Extrapolation", page)
