"""Figure 4 from the records of experiments/recall/mqar.py: recall against width, for each T.

    recall of a point = mean over the seeds at the learning rate with the best mean; its bar: from worst to best seed
    steps to half     = steps until half of the test queries are answered, interpolated between evaluations; a run that
                        never gets there is censored, later than all others. Compared by the exact Mann-Whitney test
    difference        = between the recalls of two mixers, with Welch's 95% interval over the seeds

The learning rate is chosen on the test set that also decides when to stop; recall is measured on other examples, drawn
for the report alone.

`mqar.py report FOLDER` reads a sweep and writes report.json (its records in one file), report.md, report.html and
report.png; `mqar.py report FILE.json` makes the pages from such a file. The paper's Figure 4 has no numbers, so none
are compared with here.
"""

import functools
import math
from collections import Counter
from itertools import combinations
from statistics import mean

from scipy.stats import rankdata

from experiments import pages
from experiments.compare import welch
from experiments.pages import escaped, left_out, table, titled

NAMES = {"attention": "Attention", "based": "Based", "hyena": "Hyena", "rwkv4": "RWKV-4", "baseconv": "BaseConv",
         "mamba": "Mamba", "longhorn": "Longhorn", "deltanet": "DeltaNet", "gla": "GLA",
         "longhorn_exact": "Longhorn, exact", "deltanet_exact": "exact", "deltanet_exact_free": "exact, free keys",
         "deltanet_free": "free keys", "deltanet_implicit": "implicit", "deltanet_implicit_free": "implicit, free keys",
         "gated_deltanet": "Gated DeltaNet", "kda": "KDA", "mamba2": "Mamba-2", "mesa": "Mesa", "swa": "Window"}
COLOURS = dict(zip(NAMES, ("#222222", "tab:brown", "tab:pink", "tab:olive", "tab:gray", "tab:purple", "tab:red",
                           "tab:green", "tab:orange", "tab:blue"), strict=False))  # other mixers take unused colours


def name_of(mixer):
    return NAMES.get(mixer, mixer)


# ----------------------------------------------------------------------------------------------------------- summarise

def summarise(runs):
    """The points of Figure 4: one per T, width and mixer, in this order, at its best learning rate.

    Only rates that the largest number of seeds have ended compete. A run that diverged answers nothing and never gets
    there; without it, a rate would be judged by the seeds that survived it.
    """
    diverged = runs.left_out.str.contains("it diverged")
    counted = runs[(runs.left_out == "") | diverged].copy()
    for key, never in ("accuracy", 0.0), ("recall", 0.0), ("steps_to_half", math.inf):
        counted[key] = counted[key].where(counted.left_out == "", never) if key in counted else never
    points = []
    for place, group in counted.groupby(["T", "n_embd", "mixer"]):
        at_rate = {rate: of_rate.sort_values("seed") for rate, of_rate in group.groupby("learning_rate")}
        rates = {rate: mean(of_rate.accuracy) for rate, of_rate in at_rate.items()}
        rate = max(rates, key=lambda rate: (len(at_rate[rate]), rates[rate], -rate))
        best = at_rate[rate]
        ended = best[best.left_out == ""]
        if len(ended):
            half = {rate: sorted(of_rate.steps_to_half) for rate, of_rate in at_rate.items()}
            points.append(point(place, best, ended) | {"learning_rate": rate, "rates": rates, "half": half})
    order = list(NAMES)
    known = lambda mixer: order.index(mixer) if mixer in order else len(order)
    return sorted(points, key=lambda p: (p["T"], p["n_embd"], known(p["mixer"]), p["mixer"]))


def point(place, best, ended):
    """A point from its seeds' rows at the best rate; ended: those that did not diverge."""
    recalls = best.recall.tolist()
    point = dict(zip(("T", "n_embd", "mixer"), place, strict=True))
    point |= {"accuracy": mean(recalls), "recalls": recalls, "lowest": min(recalls), "highest": max(recalls),
              "seeds": best.seed.tolist()}
    for key in ("pairs", "parameters", "state_size"):
        point[key] = ended[key].iloc[0]
    for key in ("epochs", "seconds"):
        point[key] = mean(ended[key])
    for key in ("by_distance", "by_pairs"):
        point[key] = pooled(ended[key])
    return point


def mann_whitney(a, b):
    """Two-sided p that two samples have the same distribution, exact also with ties; inf ties with inf.

    None if a sample has fewer than two values.
    """
    if min(len(a), len(b)) < 2:
        return None
    ranks = (2 * rankdata([*a, *b])).astype(int).tolist()  # doubled, so that those of ties are integers
    ways = [Counter({0: 1})] + [Counter() for _ in a]  # ways[k][s]: how many choices of k ranks have the sum s
    for rank in ranks:
        for k in reversed(range(len(a))):
            for s, n in ways[k].items():
                ways[k + 1][s + rank] += n
    expected = len(a) * (len(ranks) + 1)
    off = abs(sum(ranks[:len(a)]) - expected)
    return sum(n for s, n in ways[-1].items() if abs(s - expected) >= off) / ways[-1].total()


def pooled(shares):
    """{label: accuracy} over several seeds' {label: (queries, correct answers)}."""
    queries, right = Counter(), Counter()
    for of_seed in shares:
        for label, (n, n_right) in of_seed.items():
            queries[label] += n
            right[label] += n_right
    return {label: right[label] / queries[label] for label in queries}


# ----------------------------------------------------------------------------------------------------------------- page

def page(runs, points, picture):
    """The page as blocks of Markdown; `picture`: the line that shows the figure, if there is one."""
    used, about = runs[runs.left_out == ""], runs.attrs
    several = [p for p in points if len(p["seeds"]) > 1]
    codes = [version["code"] for version in about["code"] if version["used"]]
    settings = "; ".join(f"{key} {value}" for key, value in about["settings"].items())
    return [
        "# Multi-query associative recall", escaped(about.get("note", "")),
        escaped(f"{len(used)} runs, {', '.join(used.device.unique())}, code {' and '.join(codes)}. {settings}."),
        "Recall in percent, on examples that chose nothing, at the learning rate that was best on the test set; \"all "
        "rates\" are on that test set. A run stops when it reaches stop_at, so differences above it mean nothing; one "
        "that diverged counts as 0. The tables by distance are on the test set too.",
        picture, table([recall_row(p) for p in points]),
        *titled("Steps to answering half of the test queries, per seed, at every learning rate:",
                [steps_row(p) for p in several]),
        *titled("Pairs of mixers, each at its best rate: the difference in recall in percentage points with Welch's "
                "95% interval, and p that they need equally many steps to half of the queries (exact Mann-Whitney):",
                pair_rows(several)),
        *parts(points), *left_out(runs)]


def percent(x):
    return f"{100 * x:.1f}"


def recall_row(p):
    recall = percent(p["accuracy"])
    if len(p["seeds"]) > 1:
        recall += f" ({percent(p['lowest'])} .. {percent(p['highest'])}, {len(p['seeds'])} seeds)"
    return {"T": p["T"], "pairs": p["pairs"], "width": p["n_embd"], "mixer": name_of(p["mixer"]), "recall": recall,
            "best rate": f"{p['learning_rate']:g}",
            "all rates": ", ".join(f"{rate:g}: {percent(accuracy)}" for rate, accuracy in p["rates"].items()),
            "epochs": f"{p['epochs']:.2f}", "seconds": f"{p['seconds']:.0f}",
            "state, numbers": f"{p['state_size']:,}", "parameters": f"{p['parameters']:,}"}


def steps_row(p):
    texts = []
    for rate, half in p["half"].items():
        steps = ("never" if time == math.inf else f"{time:.0f}" for time in half)
        texts.append(f"{rate:g}: {', '.join(steps)}")
    return {"T": p["T"], "width": p["n_embd"], "mixer": name_of(p["mixer"]), "rate: steps": "; ".join(texts)}


def pair_rows(several):
    """Two mixers of the same T and width: their difference in recall, and whether one gets there sooner."""
    rows = []
    for p, q in combinations(several, 2):
        if (p["T"], p["n_embd"]) == (q["T"], q["n_embd"]):
            chance = mann_whitney(p["half"][p["learning_rate"]], q["half"][q["learning_rate"]])
            more, low, high = map(percent, welch(q["recalls"], p["recalls"])[:3])
            rows.append({"T": p["T"], "width": p["n_embd"],
                         "mixers": f"{name_of(q['mixer'])} minus {name_of(p['mixer'])}",
                         "recall, points": f"{more} ({low} .. {high})", "p": f"{chance:.2g}"})
    return rows


def parts(points):
    """Blocks: for each T, at its smallest width, accuracy by distance and by number of pairs."""
    blocks = []
    for T in dict.fromkeys(p["T"] for p in points):
        width = min(p["n_embd"] for p in points if p["T"] == T)
        group = [p for p in points if (p["T"], p["n_embd"]) == (T, width)]
        for key, title in (("by_distance", "by the tokens from a key to its query"),
                           ("by_pairs", f"by the number of pairs (trained with {group[0]['pairs']})")):
            longest = max(group, key=lambda p: len(p[key]))[key]
            rows = []
            for p in group:
                row = {"mixer": name_of(p["mixer"])}
                for label in {**longest, **p[key]}:
                    row[label] = percent(p[key][label]) if label in p[key] else "-"
                rows.append(row)
            blocks += titled(f"T = {T}, width {width}, {title}:", rows)
    return blocks


# -------------------------------------------------------------------------------------------------------------- figure

def draw(points, path):
    """Figure 4: recall against width, a panel per T; if there is one width, bars with the state size."""
    from matplotlib import colormaps

    lengths = list(dict.fromkeys(p["T"] for p in points))
    colours = {}
    for i, mixer in enumerate(dict.fromkeys(p["mixer"] for p in points)):
        colours[mixer] = COLOURS.get(mixer) or colormaps["tab20"](2 * i % 20 + 1)  # light, where those are dark
    with pages.figure(path, 1, len(lengths), max(6.0 / len(lengths), 4.1), 4.4) as (figure, grid):
        for T, axes in zip(lengths, grid[0], strict=True):
            group = [p for p in points if p["T"] == T]
            several = len({p["n_embd"] for p in group}) > 1
            (draw_lines if several else draw_bars)(axes, group, colours)
        figure.tight_layout()


def spread(group):
    """How far the worst and the best seed are from the mean: (2, points)."""
    return [[p["accuracy"] - p["lowest"] for p in group], [p["highest"] - p["accuracy"] for p in group]]


def draw_lines(axes, group, colours):
    """Recall of one T against width, a line per mixer."""
    for mixer in dict.fromkeys(p["mixer"] for p in group):
        line = [p for p in group if p["mixer"] == mixer]
        axes.errorbar([p["n_embd"] for p in line], [p["accuracy"] for p in line], spread(line), color=colours[mixer],
                      capsize=2, marker="o", ms=4, lw=2.4 if mixer == "longhorn" else 1.3, label=name_of(mixer))
    states = {}
    for p in group:
        states.setdefault(p["n_embd"], set()).add(p["state_size"])
    ticks = {width: str(width) for width in sorted(states)}
    if all(len(sizes) == 1 for sizes in states.values()):  # then the state size can be given per width
        ticks = {width: f"{width}\nstate {min(states[width]):,}" for width in ticks}
    axes.set(xscale="log", xlabel="width", ylabel="recall", ylim=(-0.03, 1.03))
    axes.set_xticks(list(ticks), list(ticks.values()))
    axes.minorticks_off()
    axes.legend(fontsize=8)
    axes.set_title(f"T = {group[0]['T']}, {group[0]['pairs']} pairs")


def draw_bars(axes, group, colours):
    """Recall of one T and width, a bar per mixer."""
    for i, p in enumerate(group):
        axes.barh(-i, p["accuracy"], xerr=spread([p]), color=colours[p["mixer"]], alpha=0.6)
        words = f"{name_of(p['mixer'])} {percent(p['accuracy'])}, state {p['state_size']:,}"
        axes.text(0.02, 0.2 - i, words, va="center", fontsize=8)
    axes.set(xlabel="recall", xlim=(0, 1.03), yticks=[], ylim=(0.5 - len(colours), 0.5))
    axes.set_title(f"T = {group[0]['T']}, {group[0]['pairs']} pairs, width {group[0]['n_embd']}")


write = functools.partial(pages.report, "recall", summarise, page, draw, "recall of each mixer")
