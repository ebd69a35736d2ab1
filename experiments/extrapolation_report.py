"""The page and the figure of experiments/extrapolation.py, from its record file."""

import functools
import itertools
import math
import re

import numpy as np

from experiments import pages
from experiments.compare import welch
from experiments.figures import Curve, Panel, name_of
from experiments.pages import DASH, escaped, table

PERPLEXITY = """\
Perplexity at each length. Brackets hold the loss minus the loss of the same tokens at the training length (or else the
shortest), in nats. Standard errors are over seeds, or over sequences if there is one seed. In the figure, dashed lines
are training lengths, and bands are standard errors."""


def in_words(text):
    where = "within documents (packages of files)" if text["documents"] else "end to end, across documents"
    return f"{text['sequences']} sequences of {text['longest']} tokens of {text['dataset']}, {where}"


def mean_and_error(values):
    """The mean over the first axis and its standard error, as numbers or lists; NaN if one is not known."""
    values = np.array(values, float)  # None, in a record, is NaN
    n = len(values)
    mean = values.mean(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.sqrt(np.square(values - mean).sum(0) / (n * (n - 1)))
    return mean.tolist(), error.tolist()


def by_length(seeds):
    """{length: [the measurement of each seed]}, for the lengths at which all seeds have been read."""
    found = {}
    for run in seeds:
        for x in run.lengths:
            found.setdefault(x["length"], []).append(x)
    return {T: measured for T, measured in found.items() if len(measured) == len(seeds)}


def over_seeds(measured, key):
    """The mean over the seeds' records and its standard error (over the sequences if there is one seed), both as
    arrays."""
    mean, error = mean_and_error([x[key] for x in measured])
    if len(measured) == 1:
        error = measured[0][f"{key}_standard_error"]
    return np.array([mean, error], float)


def perplexity(measured):
    """A table cell: perplexity over the seeds at a length, the loss if there are several seeds, and the loss minus that
    at the training length."""
    loss, error = over_seeds(measured, "loss")
    cell = f"{np.exp(loss):.3f}"
    if len(measured) > 1:
        cell += f", loss {loss:.3f} \u00b1 {error:.3f}"
    if all("against" in x for x in measured):
        change, error = over_seeds(measured, "difference")
        cell += f" ({change:+.3f} \u00b1 {error:.3f})"
    return cell


def differences(read):
    """Rows of a table: one run's loss minus another's, with Welch's 95% interval over their seeds."""
    rows = []
    losses = lambda measured: np.array([x["loss"] for x in measured], float)  # None is NaN
    for (a, first), (b, second) in itertools.combinations(read.items(), 2):
        row = {}
        for T in sorted(first.keys() & second.keys()):
            if len(first[T]) > 1 and len(second[T]) > 1:
                change, low, high, *_ = welch(losses(second[T]), losses(first[T]))
                row[f"T = {T}"] = f"{change:+.3f} ({low:+.3f} .. {high:+.3f})"
        if row:
            rows.append({"loss, 95% interval over the seeds": f"{b} minus {a}", **row})
    return rows


def page(runs):
    """The Page: perplexity at each length, and differences with intervals over seeds."""
    runs = runs[runs.left_out == ""]
    groups = {}  # name without the seed: one row per seed
    for r in runs.itertuples():
        groups.setdefault(re.sub(r", seed \d+", "", r.run), []).append(r)
    read = {name: by_length(seeds) for name, seeds in groups.items()}
    lengths = sorted(set().union(*read.values()))
    rows = []
    for name, at in read.items():
        cells = {f"T = {T}": perplexity(at[T]) if T in at else DASH for T in lengths}
        rows.append({"run": name, "trained at": groups[name][0].block_size, **cells})
    threads, precisions = (" and ".join(map(str, runs[key].unique())) for key in ("threads", "dtype"))
    most = max(map(len, groups.values()))
    about = f"{in_words(runs.text.iloc[0])}; {threads} threads, {precisions}; up to {most} training seeds each"
    if len({text["sha256"] for text in runs.text}) > 1:
        about += "; NOT all curves are of the same text: do not compare them"
    return pages.Page([], [escaped(f"{about}.")], panels(read, {*runs.block_size}), [
        table(rows),
        PERPLEXITY,
        table(differences(read))])


def panels(read, trained):
    """Perplexity against T (Figure 1, right), and the gain from the longer past, place by place."""
    of_length = []
    of_place = []
    families = {name.partition(", ")[0] for name in read}
    apart = len({family.partition("@")[0] for family in families}) == len(families)
    for name, at in read.items():
        family, comma, limit = name.partition(", ")
        if apart:  # without the settings after their @
            family, *_ = family.split("@")
        label = name_of(family) + comma + limit
        line = "o--" if limit else "o-"
        mean, error = np.transpose([over_seeds(measured, "loss") for measured in at.values()])
        low = np.exp(mean - error)
        high = np.exp(mean + error)
        of_length.append(Curve(family, label, list(at), np.exp(mean), low, high, line))
        *_, longest = at.values()
        last = [x["difference_by_place"] for x in longest if "against" in x]
        if last:
            mean, error = over_seeds(last, "difference")
            middles = [math.sqrt(max(1, low) * high) for low, high in itertools.pairwise(last[0]["edges"])]
            of_place.append(Curve(family, label, middles, mean, mean - error, mean + error, line))
    drawn = [Panel("Perplexity", "sequence length T", "perplexity", of_length, "xy", trained)]
    if of_place:
        drawn.append(Panel("Gain from the longer past", "place in the longest sequence",
                           "loss at the longest T minus at the trained", of_place, "x", trained))
    return drawn


write = functools.partial(pages.report, "extrapolation", "Extrapolation", page)
