"""The figure in a sweep's report: panels side by side.

    loss against tokens over budgets, a panel per size; token multipliers of the first family relative to the others

Lines are labelled at their ends, in their colours, because nine families in a legend are hard to tell apart.
"""

import math

from experiments import pages
from experiments.pages import human

# family: (name, colour, marker), the same in every figure; in the order of the paper's Table 1, then others
LOOKS = {"retnet": ("RetNet", "#7a7a7a", "v"), "gla": ("GLA", "#d98c00", "^"), "rwkv": ("RWKV", "#159a6f", "D"),
         "mamba": ("Mamba", "#1f6fb4", "s"), "llama": ("LLaMA", "#222222", "P"),
         "longhorn": ("Longhorn", "#c8252c", "o"), "rwkv4": ("RWKV-4", "#74c69d", "d"),
         "deltanet": ("DeltaNet", "#a259b5", "X"), "longhorn_exact": ("Longhorn, exact", "#8c4a2f", "h")}
SPARE = ("#17a2b8", "#bcbd22", "#e377c2", "#5b5bd6", "#a0522d")  # for families not in LOOKS


def name_of(model):
    family, at, word = str(model).partition("@")
    return (LOOKS[family][0] if family in LOOKS else family) + at + word


def family_order(model):
    return (list(LOOKS).index(model), "") if model in LOOKS else (len(LOOKS), model)


def panels_of(entries, pairs):
    """({size: [Entry]} with losses, pairs with a multiplier): a panel per size, and one for all pairs."""
    sizes = {}
    for e in entries:
        if e.losses:
            sizes.setdefault(e.size, []).append(e)
    return sizes, [p for p in pairs if p["tokens"]]


def in_words(entries, pairs):
    """A sentence per panel, as alternative text."""
    sizes, known = panels_of(entries, pairs)
    said = []
    for size, of_size in sizes.items():
        ends = ", ".join(f"{name_of(e.model)} {e.mean:.3f}" for e in sorted(of_size, key=lambda e: e.mean))
        said.append(f"Loss after {human(of_size[0].main)} tokens, {size}: {ends}")
    if known:
        times = ", ".join(f"{name_of(p['b'])} {p['size']} {p['tokens']['value']:.2f}" for p in known)
        said.append(f"Times the tokens of another family that {name_of(known[0]['a'])} needs: {times}")
    return said


def draw(entries, pairs, path, style=None):
    """Plot the panels side by side to a file; `style`: a .mplstyle file applied over pages.STYLE."""
    looks = dict(LOOKS)
    for i, model in enumerate(sorted({e.model for e in entries} - LOOKS.keys())):
        looks[model] = model, SPARE[i % len(SPARE)], "o"
    sizes, known = panels_of(entries, pairs)
    count = len(sizes) + bool(known)
    columns = 2 if count == 4 else min(count, 3)
    rows = math.ceil(count / columns)
    most = max(len(known), *map(len, sizes.values()))
    height = max(3.4, 0.26 * most)  # room for labels
    with pages.figure(path, rows, columns, 5.2, height, style) as (_, grid):
        for i, axes in enumerate(grid.flat):
            left = i % columns / columns
            bottom = 1 - (i // columns + 1) / rows
            axes.set_position([left + 0.13 / columns, bottom + 0.15 / rows, 0.52 / columns, 0.75 / rows])
        for axes, (size, of_size) in zip(grid.flat, sizes.items(), strict=False):
            draw_losses(axes, size, of_size, looks)
        if known:
            draw_multipliers(grid.flat[len(sizes)], known, looks)
        for axes in grid.flat[count:]:
            axes.remove()


def draw_losses(axes, size, entries, looks):
    axes.set(xscale="log", xlabel="training tokens, each point a budget with its own decay",
             ylabel="loss on the held-out files (nats)", title=f"Loss against tokens, {size}")
    ends = []
    for e in sorted(entries, key=lambda e: family_order(e.model)):
        name, colour, marker = looks[e.model]
        losses = e.runs.groupby("tokens").val_loss
        mean = losses.mean()
        x = mean.index.to_numpy(float)
        y = mean.to_numpy()
        band = losses.std().fillna(0).to_numpy()
        axes.plot(x, y, color=colour, lw=1.3, marker=marker, ms=5, markeredgecolor="white")
        axes.fill_between(x, y - band, y + band, color=colour, alpha=0.2, lw=0)
        ends.append((x[-1], y[-1], colour, f"{name} {y[-1]:.3f}"))
    label(axes, ends)


def draw_multipliers(axes, pairs, looks):
    axes.set(xscale="log", yticks=[], ylim=(0.6 - len(pairs), 0.6), title="Tokens for the same loss, 95%",
             xlabel=f"tokens that {name_of(pairs[0]['a'])} needs / tokens of the other")
    axes.plot([1, 1], [-len(pairs), 1], color="#555555", lw=0.9, ls=(0, (4, 3)))
    ends = []
    for i, p in enumerate(pairs):
        name, colour, marker = looks[p["b"]]
        m = p["tokens"]
        axes.plot([m["low"], m["high"]], [-i, -i], color=colour, lw=2.2)
        axes.plot([m["value"]], [-i], color=colour, marker=marker, ms=6)
        ends.append((m["value"], -i, colour, f"{name} {p['size']}"))
    label(axes, ends)


def label(axes, ends, inches=0.18):
    """Set plain-number ticks, and label lines at the right of the axes, at least `inches` apart; ends: [(x, y, colour,
    name)]."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = axes.xaxis.get_view_interval()
    if high / low > 4:
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
    else:  # LogLocator would give one tick or none
        axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(EngFormatter(sep="") if low > 10 else FuncFormatter(lambda v, _: f"{v:.3g}"))
    axes.xaxis.set_minor_locator(NullLocator())

    gap = inches * axes.figure.dpi / axes.get_window_extent().height  # of the axes' height
    ends = sorted(ends, key=lambda end: end[1])
    axes.autoscale_view()  # otherwise the limits are still those of an empty plot
    places = axes.transData.transform([end[:2] for end in ends])
    heights = axes.transAxes.inverted().transform(places)[:, 1]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    for i in reversed(range(len(heights))):
        room_above = (len(heights) - 1 - i) * gap
        heights[i] = min(heights[i], 1 - room_above)
    line = dict(arrowstyle="-", lw=0.6, alpha=0.6, shrinkA=1, shrinkB=3, relpos=(0, 0.5))
    for (x, y, colour, name), height in zip(ends, heights, strict=True):
        text = name if len(name) < 26 else f"{name[:16]}...{name[-6:]}"
        axes.annotate(text, (x, y), (1.06, height), "data", "axes fraction", color=colour, va="center", fontsize=8.5,
                      annotation_clip=False, arrowprops={**line, "color": colour})
