"""The page and the figure of experiments/extrapolation.py, from its record file."""

import functools
import itertools
import math
import re

import numpy as np

from experiments import pages
from experiments.compare import welch


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


def was_read(run):
    """The measurements of the lengths that were read."""
    return [x for x in run.lengths if "left_out" not in x]


def read_at(seeds, T):
    """The measurements at length T, for the seeds that were read that far."""
    return [x for r in seeds for x in was_read(r) if x["length"] == T]


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


def perplexities(groups, lengths):
    """Rows of a table: a run's perplexity at each length that all of its seeds were read at."""
    rows = []
    for name, seeds in groups.items():
        row = {"run": name, "trained at": seeds[0].block_size}
        for T in lengths:
            at = read_at(seeds, T)
            row[f"T = {T}"] = perplexity(at) if len(at) == len(seeds) else "-"
        rows.append(row)
    return rows


def differences(groups, lengths):
    """Rows of a table: loss of one run minus that of another, with Welch's 95% interval over their seeds."""
    rows = []
    for (a, first), (b, second) in itertools.combinations(groups.items(), 2):
        row = {"loss, 95% interval over the seeds": f"{b} minus {a}"}
        for T in lengths:
            losses = [np.array([x["loss"] for x in read_at(seeds, T)], float) for seeds in (second, first)]
            if min(map(len, losses)) < 2:
                break
            row[f"T = {T}"] = "{:+.3f} ({:+.3f} .. {:+.3f})".format(*welch(*losses)[:3])
        else:
            rows.append(row)
    return rows


def costs(groups):
    """Rows of a table: memory, speed and states of each run's first seed, at the longest length that was read."""
    rows = []
    for name, (run, *_) in groups.items():
        measured, loud = was_read(run), loudest(run.state_norms)
        if measured:
            x = measured[-1]
            rows.append({
                "run": name, "T": x["length"],
                "state at the shortest T, MiB per sequence": mib(measured[0]["state_bytes_per_sequence"], 3),
                "at this T": mib(x["state_bytes_per_sequence"], 3), "peak, MiB": mib(x["peak_bytes"], 0),
                "tokens/s": f"{x['tokens_per_second']:,.0f}",
                "RMS of the state at the training length": rms(loud, run.block_size),
                "RMS at this T": rms(loud, x["length"])})
    return rows


def rms(loud, position):
    return f"{loud[position]:.3g}" if position in loud else "-"


def mib(n_bytes, digits):
    return f"{np.float64(n_bytes) / 2**20:.{digits}f}"  # None is NaN


def loudest(state_norms):
    """{position: largest RMS of the branches' states, NaN if one is not finite}."""
    branches = list(state_norms.values())
    if not branches:
        return {}
    largest = np.array([branch["rms"] for branch in branches], float).max(0)
    return dict(zip(branches[0]["positions"], largest.tolist(), strict=True))


def page(runs, groups, picture):
    """The page as blocks of Markdown: perplexity at each length, differences over seeds, memory and speed."""
    lengths = sorted({x["length"] for lengths in runs.lengths for x in lengths})
    left_out = [f"Left out: {r.run} at {x['length']}: {x['left_out']}."
                for r in runs.itertuples() for x in r.lengths if "left_out" in x]
    return [
        "# Extrapolation", picture, pages.table(perplexities(groups, lengths)),
        "Perplexity; in brackets the loss minus the loss at the training length (or else the shortest), in nats, "
        "paired, with its standard error over seeds, as for the loss, or over sequences where there is one seed.",
        *map(pages.escaped, left_out), pages.table(differences(groups, lengths)), pages.table(costs(groups)),
        pages.escaped(origin(runs, groups))]


def origin(runs, groups):
    """A paragraph: text, machines, versions and training runs."""
    def of_all(key, cut=None):
        return " and ".join(dict.fromkeys(str(value or "none")[:cut] for value in runs[key]))

    words = in_words(runs.text.iloc[0])
    if len({text["sha256"] for text in runs.text}) > 1:
        words += "; NOT all curves are of the same text: do not compare them"
    most = max(map(len, groups.values()))
    seeds = "one training run" if most == 1 else f"up to {most} training seeds"
    return (f"{words}. {of_all('device')}, {of_all('threads')} threads, {of_all('dtype')}, torch {of_all('torch')}, "
            f"{of_all('time', 10)}, commit {of_all('commit', 10)}; {seeds} each, "
            f"code {', '.join(sorted(runs.code.unique()))}.")


# --------------------------------------------------------------------------------------------------------------- figure

def draw(groups, path):
    """Perplexity against T (Figure 1, right), and the gain from the longer past, place by place."""
    first = next(iter(groups.values()))[0]
    with pages.figure(path, 1, 2, 6.5, 4.5) as (figure, ((length, gain),)):
        for i, (name, seeds) in enumerate(groups.items()):
            for r in seeds:
                style = dict(color=f"C{i}", marker="o", ms=3.5, lw=2.4 if r.family == "longhorn" else 1.3)
                draw_run(length, gain, r, style, name if r is seeds[0] else None)
        for axis in (length, gain):
            axis.set_xscale("log", base=2)
            for T in {r.block_size for seeds in groups.values() for r in seeds}:
                axis.axvline(T, color="black", ls="--", lw=0.9)
            axis.xaxis.set_major_formatter("{x:.6g}")
        if np.isfinite(length.yaxis.get_minpos()):  # losses may be NaN
            length.set_yscale("log")
            length.yaxis.set_major_formatter("{x:.6g}")
            length.yaxis.set_minor_formatter("{x:.6g}")
        length.set(xlabel="sequence length T", ylabel="perplexity, with its standard error over sequences")
        gain.set(xlabel="place in the longest sequence", ylabel="loss at the longest T minus at the training length")
        length.legend(fontsize=8)
        figure.suptitle(f"trained at the dashed length; {in_words(first.text)}; {first.device}, {first.time[:10]}",
                        fontsize=10)
        figure.tight_layout()


def draw_run(length, gain, run, style, name):
    """The curves of one training run; name: for the legend, if any."""
    measured = was_read(run)
    if not measured:
        return
    ended = "" if len(measured) == len(run.lengths) else " (memory ended)"
    curve(length, [x["length"] for x in measured], [x["loss"] for x in measured],
          [x["loss_standard_error"] for x in measured], style | {"label": name and name + ended}, np.exp)
    by = measured[-1].get("difference_by_place")
    if by:
        middles = [math.sqrt(max(1, low) * high) for low, high in itertools.pairwise(by["edges"])]
        curve(gain, middles, by["difference"], by["difference_standard_error"], style)


def curve(axis, x, y, error, style, shown=np.positive):
    y, error = np.array(y, float), np.array(error, float)  # None is NaN, a hole
    axis.plot(x, shown(y), **style)
    axis.fill_between(x, shown(y - error), shown(y + error), color=style["color"], alpha=0.12, lw=0)


write = functools.partial(pages.report, "extrapolation", by_name, page, draw,
                          "perplexity, and the gain from the longer past")
