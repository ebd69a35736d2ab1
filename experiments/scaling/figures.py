"""The figure of a sweep's report: panels that stand alone on a page and side by side in a PNG.

    loss of every budget against its tokens, a panel per size; how many times another family's tokens the first needs

Lines are named at their ends, in their colours, because nine families in a legend cannot be told apart.
"""

from dataclasses import dataclass, field

import numpy as np

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
    family, at, word = str(model).partition("@")
    return (LOOKS[family][0] if family in LOOKS else family) + at + word


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
        from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, MaxNLocator, NullLocator

        axes.set(**self.axes)
        for line in self.lines:
            axes.plot(line.x, line.y, color=line.colour, **line.look)
            if line.band is not None:
                axes.fill_between(line.x, line.y - line.band, line.y + line.band, color=line.colour, alpha=0.2, lw=0)
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() == "log":
                low, high = axis.get_view_interval()
                # of a narrow axis LogLocator would tick one number, or none
                axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9) if high / low > 4 else MaxNLocator(5))
                plain = FuncFormatter(lambda v, _: f"{v:.3g}")
                axis.set_major_formatter(EngFormatter(sep="") if low > 10 else plain)
                axis.set_minor_locator(NullLocator())
        label_ends(axes, [line for line in self.lines if line.end])


def label_ends(axes, lines, inches=0.18):
    """Write the lines' names at the right of the axes, at least so far apart."""
    gap = inches * axes.figure.dpi / axes.get_window_extent().height  # of the axes' height
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


def picture(panels, path, kind="png", style=None):
    """Draw panels side by side into a path or binary file; `style`: a .mplstyle file over STYLE."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    rows = -(-len(panels) // columns)
    with plt.style.context([STYLE, *([str(style)] if style else [])]):
        height = max(3.4, *(0.26 * sum(bool(line.end) for line in panel.lines) for panel in panels))  # room for labels
        figure, grid = plt.subplots(rows, columns, figsize=(5.2 * columns, height * rows), squeeze=False)
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


def panels(entries, pairs, looks):
    """Loss against tokens, a panel per size, and the multipliers with their intervals; none where no run is usable."""
    found = []
    for size in dict.fromkeys(e.size for e in entries if e.losses):
        here = [e for e in entries if e.size == size and e.losses]
        lines = []
        for e in sorted(here, key=lambda e: family_order(e.model)):
            name, colour, marker = looks[e.model]
            losses = [[r.half(1) for r in seeds.values()] for _, seeds in sorted(e.runs.items())]
            x, y = np.array(sorted(e.runs), float), np.array([np.mean(each) for each in losses])
            band = np.array([np.std(each, ddof=1) if len(each) > 1 else 0.0 for each in losses])
            look = {"lw": 1.3, "marker": marker, "ms": 5, "markeredgecolor": "white"}
            lines.append(Line(x, y, colour, f"{name} {e.mean:.3f}", band, look))
        ends = ", ".join(f"{name_of(e.model)} {e.mean:.3f}" for e in sorted(here, key=lambda e: e.mean))
        found.append(Panel(f"Loss of runs that ended at so many tokens, {size}: {ends}", {
            "xscale": "log", "xlabel": "training tokens, each point a budget with its own decay",
            "ylabel": "loss on the reported files (nats)", "title": f"Loss against tokens, {size}"}, lines))
    known = [p for p in pairs if p["tokens"]]
    if known:
        lines = [Line([1, 1], [-len(known), 1], "#555555", look={"lw": 0.9, "ls": (0, (4, 3))})]
        for i, p in enumerate(known):
            name, colour, marker = looks[p["b"]]
            m = p["tokens"]
            lines.append(Line([m["low"], m["high"]], [-i, -i], colour, look={"lw": 2.2}))
            lines.append(Line([m["value"]], [-i], colour, f"{name} {p['size']}", look={"marker": marker, "ms": 6}))
        said = ", ".join(f"{name_of(p['b'])} {p['size']} {p['tokens']['value']:.2f}" for p in known)
        first = name_of(known[0]["a"])
        found.append(Panel(f"Times the tokens of another family that {first} needs: {said}", {
            "xscale": "log", "yticks": [], "ylim": (0.6 - len(known), 0.6), "title": "Tokens for the same loss, 95%",
            "xlabel": f"tokens that {first} needs / tokens of the other"}, lines))
    return found
