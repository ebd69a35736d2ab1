"""The report's figures: panels that stand alone on a phone and side by side in a PNG. experiments/scaling/report.py writes them.

    figure5       loss against tokens, each size; loss against parameters, each context
    efficiency    tokens that the other family needs / tokens that this one needs, against loss
    fit           the runs of every family on the lines of its fitted law

The surprise: lines are named at their ends, not in a legend, and pushed apart where they end close together; a thin stroke leads
from the name to the line.
"""

import contextlib
import math
from functools import partial
from pathlib import Path

import numpy as np

from experiments.scaling import fit
from experiments.scaling.report_cells import columns_of, family_order, human, human3, name_of, where

# ---------------------------------------------------------------------------------------------------------------- figures

class Panel:
    """A plot on axes of its own: `draw(axes)`, and what it shows in words for those who cannot see it."""

    def __init__(self, alt, draw, names=()):
        self.alt, self.draw, self.room = alt, draw, max(map(len, names), default=0)  # for the names of the lines, in letters


STYLE = {"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
         "grid.color": "#e3e3e3", "grid.linewidth": 0.6, "axes.edgecolor": "#777777", "axes.axisbelow": True,
         "xtick.color": "#444444", "ytick.color": "#444444", "xtick.minor.size": 0, "ytick.minor.size": 0,
         "svg.hashsalt": "report", "svg.fonttype": "path", "text.parse_math": False}  # the same records give the same bytes


SIZE, MARGINS = (5.0, 3.4), (0.7, 0.32, 0.5)  # of a panel, in inches; left, top, below


def picture(panels, *paths, columns=1):
    """Draws panels side by side, `columns` of them in a row, into the paths (or file objects of SVG)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows, (w, h), (left, top, below) = -(-len(panels) // columns), SIZE, MARGINS
    right = 0.3 + 0.072 * min(max(p.room for p in panels) + 6, 23)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(rows, columns, figsize=(w * columns, h * rows), squeeze=False, gridspec_kw=dict(
            left=left / w / columns, right=1 - right / w / columns, top=1 - top / h / rows, bottom=below / h / rows,
            wspace=(left + right) / (w - left - right), hspace=(top + below) / (h - top - below)))
        for axes, panel in zip(grid.flat, panels, strict=False):
            panel.draw(axes)
        for axes in grid.flat[len(panels):]:
            axes.remove()
        for path in paths:
            kind = Path(path).suffix[1:] if isinstance(path, (str, Path)) else "svg"
            figure.savefig(path, format=kind, dpi=130, metadata={"Date": None} if kind == "svg" else None)
        plt.close(figure)


def label_ends(axes, ends, gap=0.072):
    """Names the lines at the right of the axes, in their colours, `gap` of its height apart. ends: [(x, y, text, colour)]."""
    ends = sorted(ends, key=lambda e: e[1])
    there = axes.transAxes.inverted().transform(axes.transData.transform([(x, y) for x, y, _, _ in ends]))[:, 1]
    groups = []  # [sum, how many] of heights less the gaps below: neighbours out of order are put where their mean is
    for i, height in enumerate(there):
        groups.append([height - i * gap, 1])
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] > groups[-1][0] / groups[-1][1]:
            total, n = groups.pop()
            groups[-1] = [groups[-1][0] + total, groups[-1][1] + n]
    free = [total / n for total, n in groups for _ in range(n)]
    for i, (x, y, text, colour) in enumerate(ends):
        height = i * gap + min(max(free[i], 0.0), max(0.0, 1 - (len(ends) - 1) * gap))
        text = text if len(text) < 23 else f"{text[:13]}...{text[-6:]}"
        axes.annotate(text, (x, y), (1.06, height), "data", "axes fraction", color=colour, va="center", fontsize=8.5,
                      annotation_clip=False, arrowprops=dict(
                          arrowstyle="-", color=colour, lw=0.6, alpha=0.6, shrinkA=1, shrinkB=3, relpos=(0, 0.5)))


def log_axis(axis, ticks, text=human3):
    """Ticks at these values and nowhere else, less those that would touch the one before."""
    kept = []
    for t in sorted(ticks):
        if not kept or t / kept[-1] > 1.25:
            kept.append(t)
    axis.set_ticks(kept, [text(t) for t in kept])
    axis.set_ticks([], minor=True)


def nice(low, high):
    """1, 2, 5, 10 ... between the two."""
    steps = [m * 10.0**k for k in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1) for m in (1, 2, 5)]
    return [s for s in steps if low * 0.999 <= s <= high * 1.001]


def figure5(entries, fits, style):
    """Panels: loss against tokens for each size and context; loss against parameters for each context."""
    panels = []
    for size, context in columns_of(entries):
        here = [e for e in entries if (e.size, e.context) == (size, context) and len(e.curve()[0])]
        if here:
            panels.append(Panel(
                f"Validation loss against training tokens, {where(entries, size, context)}. At the end: " + ", ".join(
                    f"{name_of(e.model)} {e.mean:.3f}" for e in sorted(here, key=lambda e: e.mean)),
                partial(draw_curves, entries=here, title=where(entries, size, context), style=style),
                [name_of(e.model) for e in here]))
    for context in dict.fromkeys(e.context for e in entries):
        here = [e for e in entries if e.context == context and e.runs]
        if here:
            chosen = [f for f in fits if f["context"] == context and f["fit"]]
            drawn = {f["model"]: f for f in sorted(chosen, key=lambda f: f["embeddings"])}  # with embeddings where there are both
            panels.append(Panel(
                f"Final validation loss against parameters, context {context}. At the largest size: " + ", ".join(
                    f"{name_of(m)} {es[-1].mean:.3f}" for m, es in by_model(here).items()),
                partial(draw_sizes, entries=here, fits=drawn, style=style, context=context),
                [name_of(e.model) for e in here]))
    return panels


def by_model(entries):
    """{family: its entries in order of parameters}."""
    models = sorted({e.model for e in entries}, key=family_order)
    return {m: sorted((e for e in entries if e.model == m), key=lambda e: e.parameters) for m in models}


def draw_curves(axes, entries, title, style):
    ends, starts = [], []
    for e in entries:
        (name, colour, _), (tokens, losses) = style[e.model], e.curve()
        mean = losses.mean(0)
        axes.plot(tokens, mean, color=colour, lw=2 if e.model == "longhorn" else 1.3, marker="o", ms=2.2)
        if len(losses) > 1:
            spread = losses.std(0, ddof=1)
            axes.fill_between(tokens, mean - spread, mean + spread, color=colour, alpha=0.2, lw=0)
        ends.append((tokens[-1], mean[-1], f"{name} {mean[-1]:.3f}", colour))
        starts.append(tokens[0])
    last = max(e[0] for e in ends)
    first = max(min(starts), last / 100)  # before the last two decades it is steep, and would flatten them
    axes.set(xscale="log", xlim=(first, last * 1.01), xlabel="training tokens", ylabel="validation loss (nats a token)",
             title=f"Loss against tokens, {title}")
    seen = [v for e in entries for t, v in zip(*(lambda c: (c[0], c[1].mean(0)))(e.curve()), strict=True) if t >= first]
    axes.set_ylim(min(seen) - 0.06 * (max(seen) - min(seen) or 1), max(seen) + 0.03 * (max(seen) - min(seen) or 1))
    log_axis(axes.xaxis, nice(first, last), human)
    label_ends(axes, ends)


def draw_sizes(axes, entries, fits, style, context):
    ends, counts = [], sorted({e.parameters for e in entries})
    for model, cells in by_model(entries).items():
        name, colour, marker = style[model]
        N, D = np.array([e.parameters for e in cells], float), np.array([e.tokens for e in cells], float)
        for e in cells:
            axes.plot([e.parameters] * len(e.runs), e.losses, "_", color=colour, ms=7, alpha=0.7)
        grid, line = np.geomspace(N[0], N[-1], 40), "-"  # between the cells, where no law can be drawn
        less = 0 if model in fits and fits[model]["embeddings"] else np.interp(grid, N, [e.runs[0].embedding for e in cells])
        with contextlib.suppress(fit.CannotFit, KeyError):
            law = fits[model]["fit"].predict(grid - less, np.exp(np.interp(np.log(grid), np.log(N), np.log(D))))
            axes.plot(grid, law, color=colour, lw=1.1, alpha=0.8)
            line = "none"
        axes.plot(N, [e.mean for e in cells], ls=line, lw=1, color=colour, marker=marker, ms=5.5, markeredgecolor="white",
                  markeredgewidth=0.6, zorder=3)
        ends.append((N[-1], cells[-1].mean, f"{name} {cells[-1].mean:.3f}", colour))
    many = len(counts) > 1 and counts[-1] > 1.2 * counts[0]
    margin = (counts[-1] / counts[0])**0.05 if many else 1.3
    axes.set(xscale="log", xlim=(counts[0] / margin, counts[-1] * margin), xlabel="parameters, embedding included",
             ylabel="validation loss (nats a token)",
             title=f"Loss against parameters, T={context}" + ("" if fits else ", no law fitted"))
    round_numbers = nice(counts[0] / margin, counts[-1] * margin)
    log_axis(axes.xaxis, round_numbers if many and len(round_numbers) > 2 else counts)
    label_ends(axes, ends)


def efficiency_panels(entries, pairs, style):
    panels = []
    for size, context in columns_of(entries):
        here = [p for p in pairs if (p["size"], p["context"]) == (size, context) and p["curve"].at_end is not None]
        if here:
            panels.append(Panel(
                f"Sample efficiency against loss, {where(entries, size, context)}. At the end: " + ", ".join(
                    f"{name_of(p['a'])} over {name_of(p['b'])} {p['curve'].at_end:.2f}" for p in here),
                partial(draw_efficiency, pairs=here, title=where(entries, size, context), style=style),
                [efficiency_label(p, here) for p in here]))
    return panels


def efficiency_label(pair, pairs):
    """What a line is called: the other family, where all pairs share the first."""
    one = len({p["a"] for p in pairs}) == 1
    return name_of(pair["b"]) if one else f"{name_of(pair['a'])} / {name_of(pair['b'])}"


def draw_efficiency(axes, pairs, title, style):
    one = len({p["a"] for p in pairs}) == 1
    ends = []
    for p in pairs:
        colour, found = style[p["b"] if one else p["a"]][1], p["curve"]
        axes.plot(found.loss, found.ratio, color=colour, lw=1.5)
        axes.plot(found.loss[-1:], found.ratio[-1:], "o", color=colour, ms=4)
        ends.append((found.loss[-1], found.ratio[-1], f"{efficiency_label(p, pairs)} {found.at_end:.2f}\u00d7", colour))
    axes.axhline(1, color="#555555", lw=0.9, ls=(0, (4, 3)))
    ratios = np.concatenate([p["curve"].ratio for p in pairs])
    low, high = min(0.93, ratios.min() * 0.95), max(1.25, ratios.max() * 1.05)
    axes.set(yscale="log", ylim=(low, high), xlabel="validation loss (nats a token), falling to the right",
             title=f"Tokens for the same loss, {title}")
    axes.set_ylabel(f"tokens the other needs / {name_of(pairs[0]['a'])} needs" if one else "tokens of the second / of the first")
    log_axis(axes.yaxis, [t for t in (0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.25, 1.6, 2, 2.5, 3.2, 5, 10, 20, 50, 100) if low < t < high],
             lambda t: f"{t:g}\u00d7")
    axes.invert_xaxis()
    label_ends(axes, ends)


def fit_panels(entries, fits, style):
    losses = [r.loss for e in entries for r in e.runs + e.ladder]
    span = max(losses, default=0) - min(losses, default=0) or 1
    limits = (min(losses, default=0) - 0.05 * span, max(losses, default=0) + 0.05 * span)  # the same for all: to be compared
    panels = []
    for f in fits:
        cells = [e for e in entries if (e.model, e.context) == (f["model"], f["context"]) and e.runs]
        if f["fit"] and f["embeddings"] == any(g["embeddings"] for g in fits):
            title = name_of(f["model"]) + (f" at T={f['context']}" if len({g["context"] for g in fits}) > 1 else "")
            panels.append(Panel(
                f"{title}: the final losses of {f['fit'].points} runs against tokens, a line a size from the fitted law",
                partial(draw_fit, entries=cells, row=f, title=title, style=style, limits=limits)))
    return panels


def draw_fit(axes, entries, row, title, style, limits):
    colour, marker = style[row["model"]][1:]
    runs, ends = [r for e in entries for r in e.runs + e.ladder], []
    budgets = sorted({r.tokens for r in runs})
    for i, e in enumerate(sorted(entries, key=lambda e: e.parameters)):
        strength = 0.35 + 0.65 * (i + 1) / len(entries)
        axes.plot([r.tokens for r in e.runs + e.ladder], [r.loss for r in e.runs + e.ladder], marker, ls="none", ms=5,
                  color=colour, alpha=strength, markeredgecolor="white", markeredgewidth=0.5)
        with contextlib.suppress(fit.CannotFit):
            last = max(r.tokens for r in e.runs + e.ladder)  # no further: beyond its runs the line would be a prophecy
            grid = np.geomspace(budgets[0], last, 40) if last > budgets[0] else np.array([last], float)
            law = row["fit"].predict(e.parameters - (0 if row["embeddings"] else e.runs[0].embedding), grid)
            axes.plot(grid, law, color=colour, lw=1.2, alpha=strength)
            ends.append((grid[-1], law[-1], e.size, colour))
    axes.set(xscale="log", xlabel="tokens of the run", ylabel="final loss (nats a token)", title=title, ylim=limits)
    log_axis(axes.xaxis, nice(budgets[0] / 1.1, budgets[-1] * 1.1) or budgets)
    label_ends(axes, ends)

