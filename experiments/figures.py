"""Figures: panels of curves with intervals, side by side, in one style and with one colour per family."""

import collections
import functools
import itertools
import math
import re
from dataclasses import dataclass

import numpy as np

from common.errors import printable
from runtime.loss_curve import save_figure

STYLE = {"font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
         "grid.color": "#e3e3e3", "grid.linewidth": 0.6, "axes.edgecolor": "#777777", "axes.axisbelow": True,
         "xtick.color": "#444444", "ytick.color": "#444444", "xtick.minor.size": 0, "ytick.minor.size": 0,
         "text.parse_math": False}
# family or mixer: (name, colour), in the order of tables
LOOKS = {"attention": ("Attention", "#222222"), "based": ("Based", "#a0522d"), "hyena": ("Hyena", "#e377c2"),
         "rwkv4": ("RWKV-4", "#74c69d"), "baseconv": ("BaseConv", "#bcbd22"), "mamba": ("Mamba", "#1f6fb4"),
         "longhorn": ("Longhorn", "#c8252c"), "deltanet": ("DeltaNet", "#a259b5"), "gla": ("GLA", "#d98c00"),
         "longhorn_exact": ("Longhorn, exact", "#8c4a2f"), "retnet": ("RetNet", "#7a7a7a"),
         "rwkv": ("RWKV", "#159a6f"), "llama": ("LLaMA", "#222222"), "gated_deltanet": ("Gated DeltaNet", "#5b5bd6"),
         "kda": ("KDA", "#17a2b8"), "mamba2": ("Mamba-2", "#7fb0d8"), "mesa": ("Mesa", "#4d7c0f"),
         "swa": ("Sliding window", "#555555"), "longhorn,swa": ("Longhorn + Sliding window", "#006d77"),
         "gated_deltanet,swa": ("Gated DeltaNet + Sliding window", "#c77dff"),
         "vil": ("ViL", "#c8252c"), "vim": ("ViM", "#1f6fb4"), "vit": ("ViT", "#222222")}
# the delta rule's steps, by the names of recall's mixers and of text's families
for mixer, settings, colour in (("implicit", "step=implicit", "#b5179e"), ("exact", "step=exact", "#577590"),
                                ("free", "normalize_keys=false", "#c084d0"),
                                ("implicit_free", "step=implicit,normalize_keys=false", "#e75aa8"),
                                ("exact_free", "step=exact,normalize_keys=false", "#6fa0c4")):
    look = (f"DeltaNet, {mixer.replace('_', ', ')}", colour)
    LOOKS[f"deltanet_{mixer}"] = LOOKS[f"deltanet@{settings}"] = look
SPARE = ("#ff7f50", "#6a994e", "#2a9d8f", "#8d6e63", "#3949ab", "#c0ca33")  # for other families


@dataclass
class Curve:
    """A curve through points (x, y), with an interval from low to high, (points,) each. label: in the legend; family:
    sets the colour; line: Matplotlib's format. NaN and None leave gaps."""

    family: str
    label: str
    x: list
    y: list
    low: list = ()
    high: list = ()
    line: str = "o-"

    def __post_init__(self):
        self.label = printable(self.label)  # Matplotlib would print control characters to the terminal


@dataclass
class Panel:
    """Axes with their curves; log: "x", "y" or "xy"; marks: x of dashed lines.

    If y is empty, each curve is a row: its points `y` lie along x, with one interval from low to high.
    """

    title: str
    x: str
    y: str
    curves: list
    log: str = ""
    marks: tuple = ()

    def __post_init__(self):
        self.title, self.x, self.y = map(printable, (self.title, self.x, self.y))


def name_of(model):
    """The name of a family, or of a pattern of families, with the settings after its @ as they are."""
    if model in LOOKS:
        return LOOKS[model][0]
    pattern, at, word = str(model).partition("@")
    return re.sub(r"\w+", lambda family: LOOKS.get(family[0], family)[0], pattern.replace(",", " + ")) + at + word


def family_order(model):
    return (list(LOOKS).index(model), "") if model in LOOKS else (len(LOOKS), model)


def in_words(panel):
    """What a panel shows, as alternative text."""
    return f"{panel.title}: {', '.join(curve.label for curve in panel.curves if curve.label)}"


def draw(panels, path, style=None):
    """Draw the panels, at most two side by side, to a file; style: a .mplstyle file applied over STYLE."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    spare = functools.partial(next, itertools.cycle(SPARE))
    colours = collections.defaultdict(spare, {family: colour for family, (_, colour) in LOOKS.items()})
    columns = min(len(panels), 2)
    rows = math.ceil(len(panels) / columns)
    most = max(len(panel.curves) for panel in panels)
    height = max(3.4, 0.26 * most)
    width = 3.6 + 0.066 * max((len(curve.label) for panel in panels for curve in panel.curves), default=0)
    with plt.style.context([STYLE, *([str(style)] if style else [])]):
        drawn, grid = plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False,
                                   layout="constrained")
        for axes, panel in itertools.zip_longest(grid.flat, panels):
            if panel is None:
                axes.remove()
                continue
            axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
            for mark in panel.marks:
                axes.axvline(mark, color="#555555", lw=0.9, ls=(0, (4, 3)))
            (draw_curves if panel.y else draw_lines)(axes, panel, colours)
        save_figure(drawn, path, dpi=110)


def draw_curves(axes, panel, colours):
    """Draw curves over x; the legend lists them by their last value, the highest first."""
    ends = []
    places = set()
    for curve in panel.curves:
        x, y, low, high = (np.array(values, float) for values in (curve.x, curve.y, curve.low, curve.high))
        colour = colours[curve.family]
        line, = axes.plot(x, y, curve.line, color=colour, lw=1.3, ms=4, markeredgecolor="white", label=curve.label)
        if len(low):
            axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
        places.update(x.tolist())
        if curve.label:
            ends.append((-np.nan_to_num(y[-1]), len(ends), line))
    if "x" in panel.log:
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.xaxis.set_major_formatter("{x:g}")
        if len(places) < 9:
            axes.set_xticks(sorted(places), [f"{x:g}" if x < 1e5 else f"{x / 1e6:.3g}M" for x in sorted(places)])
    if "y" in panel.log and np.isfinite(axes.yaxis.get_minpos()):  # all may be NaN
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:.6g}")
        axes.yaxis.set_minor_formatter("{x:.6g}")
    axes.legend(handles=[line for *_, line in sorted(ends)], labelcolor="linecolor", frameon=False, fontsize=8.5,
                loc="center left", bbox_to_anchor=(1, 0.5))


def draw_lines(axes, panel, colours):
    """Draw a row per curve, with its points and its interval along x."""
    axes.set_yticks([-i for i in range(len(panel.curves))], [curve.label for curve in panel.curves])
    for i, curve in enumerate(panel.curves):
        axes.plot([curve.low, curve.high], [-i, -i], color=colours[curve.family], lw=2.2)
        axes.plot(curve.y, [-i] * len(curve.y), "o", color=colours[curve.family], ms=6, alpha=0.7)
