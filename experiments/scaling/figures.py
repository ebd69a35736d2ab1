"""The figures of a sweep's report: panels that stand alone on a page and side by side in a PNG.

    figure5       loss against tokens, for each size; loss against parameters, for each context
    efficiency    tokens that the other family needs / tokens that this one needs, against loss

Lines are named at their ends, in their colours, because nine families in a legend cannot be told apart.
"""

import contextlib
from dataclasses import dataclass, field

import numpy as np

from experiments.scaling import fit
from tools.loss_curve import save_figure

# family: (name, colour, marker) in the order of the paper's Table 1, then ours; the same in every figure
LOOKS = {"retnet": ("RetNet", "#7a7a7a", "v"), "gla": ("GLA", "#d98c00", "^"), "rwkv": ("RWKV", "#159a6f", "D"),
         "mamba": ("Mamba", "#1f6fb4", "s"), "llama": ("LLaMA", "#222222", "P"),
         "longhorn": ("Longhorn", "#c8252c", "o"), "rwkv4": ("RWKV-4", "#74c69d", "d"),
         "deltanet": ("DeltaNet", "#a259b5", "X"), "longhorn_exact": ("Longhorn, exact", "#8c4a2f", "h")}
SPARE = ("#17a2b8", "#bcbd22", "#e377c2", "#5b5bd6", "#a0522d")  # for families that are not in LOOKS

STYLE = {"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
         "grid.color": "#e3e3e3", "grid.linewidth": 0.6, "axes.edgecolor": "#777777", "axes.axisbelow": True,
         "xtick.color": "#444444", "ytick.color": "#444444", "xtick.minor.size": 0, "ytick.minor.size": 0,
         "svg.hashsalt": "report", "svg.fonttype": "path", "text.parse_math": False}  # the same records, the same bytes


def name_of(model):
    return LOOKS[model][0] if model in LOOKS else str(model)


def family_order(model):
    return (list(LOOKS).index(model), "") if model in LOOKS else (len(LOOKS), model)


def looks(models):
    """{family: (name, colour, marker)}, with spare colours for families that are not in LOOKS."""
    other = sorted(m for m in models if m not in LOOKS)
    return {m: LOOKS.get(m) or (str(m), SPARE[other.index(m) % len(SPARE)], "o") for m in models}


@dataclass
class Line:
    x: np.ndarray
    y: np.ndarray
    colour: str
    end: str = ""  # its name, at the right of the axes
    band: np.ndarray = None  # half the height of a band around it
    look: dict = field(default_factory=dict)  # for axes.plot


@dataclass
class Panel:
    """A plot: `alt` says in words what it shows, `axes` goes to matplotlib's Axes.set, x and y have logarithmic
    ticks."""

    alt: str
    axes: dict
    lines: list

    def draw(self, axes):
        from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullLocator

        axes.set(**self.axes)
        for line in self.lines:
            axes.plot(line.x, line.y, color=line.colour, **line.look)
            if line.band is not None:
                axes.fill_between(line.x, line.y - line.band, line.y + line.band, color=line.colour, alpha=0.2, lw=0)
        times = FuncFormatter(lambda y, _: f"{y:g}\u00d7")
        for axis, form in ((axes.xaxis, EngFormatter(sep="")), (axes.yaxis, times)):
            if axis.get_scale() == "log":
                axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
                axis.set_minor_locator(NullLocator())
                axis.set_major_formatter(form)
        label_ends(axes, [line for line in self.lines if line.end])


def label_ends(axes, lines, gap=0.072):
    """Write the lines' names at the right of the axes, at least `gap` of its height apart."""
    lines = sorted(lines, key=lambda line: line.y[-1])
    axes.autoscale_view()  # or the limits are still those of an empty plot
    points = axes.transData.transform([(line.x[-1], line.y[-1]) for line in lines])
    heights = axes.transAxes.inverted().transform(points)[:, 1]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    for i in range(len(heights))[::-1]:
        heights[i] = min(heights[i], 1 - (len(heights) - 1 - i) * gap)
    for line, height in zip(lines, heights, strict=True):
        text = line.end if len(line.end) < 23 else f"{line.end[:13]}...{line.end[-6:]}"
        axes.annotate(text, (line.x[-1], line.y[-1]), (1.06, height), "data", "axes fraction", color=line.colour,
                      va="center", fontsize=8.5, annotation_clip=False, arrowprops=dict(
                          arrowstyle="-", color=line.colour, lw=0.6, alpha=0.6, shrinkA=1, shrinkB=3, relpos=(0, 0.5)))


def picture(panels, path, kind="png"):
    """Draw panels side by side into a path or binary file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    rows = -(-len(panels) // columns)
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(rows, columns, figsize=(5.2 * columns, 3.4 * rows), squeeze=False)
        room = {"left": 0.13, "right": 0.72, "top": 0.9, "bottom": 0.15}  # of each panel
        for i, axes in enumerate(grid.flat):
            x, y = i % columns / columns, 1 - (i // columns + 1) / rows
            axes.set_position([x + room["left"] / columns, y + room["bottom"] / rows,
                               (room["right"] - room["left"]) / columns, (room["top"] - room["bottom"]) / rows])
            if i < len(panels):
                panels[i].draw(axes)
            else:
                axes.remove()
        save_figure(figure, path, format=kind, dpi=110, metadata={"Date": None} if kind == "svg" else None)


def title_of(entries, size, context):
    """'460K at T=256'; without the context where there is only one."""
    return f"{size} at T={context}" if len({e.context for e in entries}) > 1 else size


def figure5(entries, laws, style):
    """Panels: loss against tokens for each size and context; loss against parameters for each context."""
    panels = []
    for column in dict.fromkeys(e.column for e in entries):
        here = [e for e in entries if e.column == column and len(e.curve()[0])]
        if here:
            panels.append(loss_against_tokens(here, title_of(entries, *column), style))
    for context in dict.fromkeys(e.context for e in entries):
        here = [e for e in entries if e.context == context and e.runs]
        if here:
            fits = {law["model"]: law["fit"] for law in laws
                    if law["context"] == context and law["embeddings"] and "fit" in law}
            panels.append(loss_against_parameters(here, fits, f"T={context}", style))
    return panels


def loss_against_tokens(entries, title, style):
    lines = []
    for e in entries:
        (name, colour, _), (tokens, losses) = style[e.model], e.curve()
        mean, band = losses.mean(0), losses.std(0, ddof=1) if len(losses) > 1 else None
        look = {"lw": 2 if e.model == "longhorn" else 1.3, "marker": "o", "ms": 2.2}
        lines.append(Line(tokens, mean, colour, f"{name} {mean[-1]:.3f}", band, look))
    last = max(line.x[-1] for line in lines)
    first = max(min(line.x[0] for line in lines), last / 100)  # what comes before is steep, and would flatten the rest
    seen = np.concatenate([line.y[line.x >= first] for line in lines])
    margin = 0.05 * (np.ptp(seen) or 1)
    ends = ", ".join(f"{name_of(e.model)} {e.mean:.3f}" for e in sorted(entries, key=lambda e: e.mean))
    return Panel(f"Validation loss against training tokens, {title}. At the end: {ends}", {
        "xscale": "log", "xlim": (first / 1.02, last * 1.02), "ylim": (seen.min() - margin, seen.max() + margin),
        "xlabel": "training tokens", "ylabel": "validation loss (nats per token)",
        "title": f"Loss against tokens, {title}"}, lines)


def loss_against_parameters(entries, fits, title, style):
    lines, families = [], {}
    for e in sorted(entries, key=lambda e: e.parameters):
        families.setdefault(e.model, []).append(e)
    for model, cells in families.items():
        name, colour, marker = style[model]
        N, D = np.array([e.parameters for e in cells], float), np.array([e.tokens for e in cells], float)
        grid, style_of_line = np.geomspace(N[0], N[-1], 40), "-"  # straight lines where there is no law
        with contextlib.suppress(fit.CannotFit, KeyError):
            law = fits[model].predict(grid, np.exp(np.interp(np.log(grid), np.log(N), np.log(D))))
            lines.append(Line(grid, law, colour, look={"lw": 1.1, "alpha": 0.8}))
            style_of_line = "none"
        for e in cells:
            seeds = {"ls": "none", "marker": "_", "ms": 7, "alpha": 0.7}
            lines.append(Line([e.parameters] * len(e.runs), e.losses, colour, look=seeds))
        lines.append(Line(N, np.array([e.mean for e in cells]), colour, f"{name} {cells[-1].mean:.3f}", look={
            "ls": style_of_line, "lw": 1, "marker": marker, "ms": 5.5, "markeredgecolor": "white", "zorder": 3}))
    counts = [e.parameters for e in entries]
    margin = (max(counts) / min(counts))**0.05 if max(counts) > 1.2 * min(counts) else 2
    ends = ", ".join(f"{name_of(m)} {cells[-1].mean:.3f}" for m, cells in families.items())
    return Panel(f"Final validation loss against parameters, {title}. At the largest size: {ends}", {
        "xscale": "log", "xlim": (min(counts) / margin, max(counts) * margin),
        "xlabel": "parameters, embedding included", "ylabel": "validation loss (nats per token)",
        "title": f"Loss against parameters, {title}" + ("" if fits else ", no law fitted")}, lines)


def efficiency(entries, pairs, style):
    """A panel per size and context: the ratio of tokens against the loss, for each pair of families."""
    panels = []
    for size, context in dict.fromkeys(e.column for e in entries):
        here = [p for p in pairs if (p["size"], p["context"]) == (size, context) and p["curve"].at_end is not None]
        if not here:
            continue
        title = title_of(entries, size, context)
        lines = [Line(p["curve"].loss, p["curve"].ratio, style[p["b"]][1],
                      f"{name_of(p['b'])} {p['curve'].at_end:.2f}\u00d7", look={"lw": 1.5}) for p in here]
        loss = np.concatenate([line.x for line in lines])
        lines.append(Line([loss.max(), loss.min()], [1, 1], "#555555", look={"lw": 0.9, "ls": (0, (4, 3))}))
        ratios = np.concatenate([line.y for line in lines])
        first = name_of(here[0]["a"])
        ends = ", ".join(f"{first} over {name_of(p['b'])} {p['curve'].at_end:.2f}" for p in here)
        panels.append(Panel(f"Sample efficiency against loss, {title}. At the end: {ends}", {
            "yscale": "log", "ylim": (min(0.93, ratios.min() * 0.95), max(1.25, ratios.max() * 1.05)),
            "xlim": (loss.max(), loss.min() - 1e-9), "xlabel": "validation loss (nats per token), falling to the right",
            "ylabel": f"tokens the other needs / {first} needs", "title": f"Tokens for the same loss, {title}"}, lines))
    return panels
