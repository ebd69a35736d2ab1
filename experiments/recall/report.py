"""Figure 4 from the records of experiments/recall/mqar.py: recall against width, for each T.

    recall of a point = mean over the seeds at the learning rate with the best mean; its interval: worst to best seed
    steps to half     = steps until half of the test queries are answered, interpolated between evaluations; a run that
                        never gets there is censored, later than all others. Compared by the exact Mann-Whitney test
    difference        = between the recalls of two mixers, with Welch's 95% interval over the seeds

The learning rate is chosen on the test set that also decides when to stop; recall is measured on other examples, drawn
for the report alone. The paper's Figure 4 has no numbers, so none are compared with here.
"""

import functools
import math
from collections import Counter
from itertools import combinations

from scipy.stats import rankdata

from experiments import pages
from experiments.compare import welch
from experiments.figures import Curve, Panel, family_order, name_of
from experiments.pages import escaped, table

ABOUT = """\
Recall on examples that chose nothing, at the learning rate that was best on the test set; "all rates" are on that test
set. A run stops when it reaches stop_at, so differences above it mean nothing; one that diverged counts as 0. The
tables by distance are on the test set too."""
HALF = "Steps to answering half of the test queries, per seed, at every learning rate:"
PAIRS = """\
Pairs of mixers, each at its best rate: the difference in recall in percentage points with Welch's 95% interval, and p
that they need equally many steps to half of the queries (exact Mann-Whitney):"""
PLACE = {"T": "{T}", "width": "{n_embd}", "mixer": "{name}"}
COLUMNS = {"T": "{T}", "pairs": "{pairs}", **PLACE, "recall": "{shown}", "best rate": "{learning_rate:g}",
           "all rates": "{at_all_rates}", "epochs": "{epochs:.2f}", "seconds": "{seconds:.0f}",
           "state, numbers": "{state_size:,}", "parameters": "{parameters:,}"}


# ----------------------------------------------------------------------------------------------------------- summarise

def summarise(runs):
    """The points of Figure 4: one per T, width and mixer, in this order, at its best learning rate.

    Only rates that the largest number of seeds have ended compete. A run that diverged answers nothing and never gets
    there; without it, a rate would be judged by the seeds that survived it.
    """
    diverged = runs.left_out.str.contains("it diverged")
    counted = runs[(runs.left_out == "") | diverged].sort_values("seed")
    counted = counted.fillna({"accuracy": 0.0, "recall": 0.0, "steps_to_half": math.inf})
    points = []
    for (T, width, mixer), group in counted.groupby(["T", "n_embd", "mixer"]):
        at_rate = group.groupby("learning_rate")
        rates = at_rate.accuracy.mean().to_dict()
        seeds = at_rate.size()
        rate = max(rates, key=lambda rate: (seeds[rate], rates[rate], -rate))
        best = group[group.learning_rate == rate]
        ended = best[best.left_out == ""]
        if ended.empty:
            continue
        recalls = best.recall.tolist()
        half = at_rate.steps_to_half.agg(sorted).to_dict()
        shown = f"{best.recall.mean():.1%}"
        if len(recalls) > 1:
            shown += f" ({min(recalls):.1%} .. {max(recalls):.1%}, {len(recalls)} seeds)"
        points.append({
            "T": T, "n_embd": width, "mixer": mixer, "name": name_of(mixer), "recalls": recalls, "shown": shown,
            "recall": best.recall.mean(), "learning_rate": rate, "rates": rates,
            "at_all_rates": ", ".join(f"{rate:g}: {share:.1%}" for rate, share in rates.items()),
            "half": half, "steps": "; ".join(f"{rate:g}: {in_words(steps)}" for rate, steps in half.items()),
            "epochs": ended.epochs.mean(), "seconds": ended.seconds.mean(),
            **ended[["pairs", "parameters", "state_size"]].iloc[0],
            "by_distance": pooled(ended.by_distance), "by_pairs": pooled(ended.by_pairs)})
    return sorted(points, key=lambda p: (p["T"], p["n_embd"], *family_order(p["mixer"])))


def in_words(steps):
    return ", ".join("never" if n == math.inf else f"{n:.0f}" for n in steps)


def pooled(shares):
    """{label: accuracy} over several seeds' {label: (queries, correct answers)}."""
    queries = Counter()
    right = Counter()
    for of_seed in shares:
        for label, (n, n_right) in of_seed.items():
            queries[label] += n
            right[label] += n_right
    return {label: right[label] / queries[label] for label in queries}


def mann_whitney(a, b):
    """Two-sided p that two samples have the same distribution, exact also with ties; inf ties with inf."""
    ranks = (2 * rankdata([*a, *b])).astype(int).tolist()  # doubled, so that those of ties are integers
    ways = [Counter({0: 1})] + [Counter() for _ in a]  # ways[k][s]: how many choices of k ranks have the sum s
    for rank in ranks:
        for k in reversed(range(len(a))):
            for s, n in ways[k].items():
                ways[k + 1][s + rank] += n
    expected = len(a) * (len(ranks) + 1)
    off = abs(sum(ranks[:len(a)]) - expected)
    return sum(n for s, n in ways[-1].items() if abs(s - expected) >= off) / ways[-1].total()


# ----------------------------------------------------------------------------------------------------------------- page

def page(runs):
    points = summarise(runs)
    several = [p for p in points if len(p["recalls"]) > 1]
    settings = "; ".join(f"{key} {value}" for key, value in runs.attrs["settings"].items())
    return pages.Page(
        [], [escaped(runs.attrs.get("note", "")), escaped(f"{settings}."), ABOUT], panels(points),
        [table(points, COLUMNS), table(several, PLACE | {"rate: steps": "{steps}"}, HALF),
         table(pairs(several), title=PAIRS), *parts(points)])


def pairs(several):
    """Rows: two mixers of the same T and width, their difference in recall, and whether one gets there sooner."""
    rows = []
    for p, q in combinations(several, 2):
        if (p["T"], p["n_embd"]) == (q["T"], q["n_embd"]):
            chance = mann_whitney(p["half"][p["learning_rate"]], q["half"][q["learning_rate"]])
            more, low, high = (100 * share for share in welch(q["recalls"], p["recalls"])[:3])
            rows.append({"T": p["T"], "width": p["n_embd"], "mixers": f"{q['name']} minus {p['name']}",
                         "recall, points": f"{more:.1f} ({low:.1f} .. {high:.1f})", "p": f"{chance:.2g}"})
    return rows


def parts(points):
    """Tables: for each T, at its smallest width, accuracy by distance and by number of pairs."""
    blocks = []
    for T in dict.fromkeys(p["T"] for p in points):
        width = min(p["n_embd"] for p in points if p["T"] == T)
        group = [p for p in points if (p["T"], p["n_embd"]) == (T, width)]
        for key, title in (("by_distance", "by the tokens from a key to its query"),
                           ("by_pairs", f"by the number of pairs (trained with {group[0]['pairs']})")):
            rows = []
            for p in group:
                shares = {label: f"{share:.1%}" for label, share in p[key].items()}
                rows.append({"mixer": p["name"], **shares})
            blocks.append(table(rows, title=f"T = {T}, width {width}, {title}:"))
    return blocks


def panels(points):
    """Recall against width, a panel per T; of one width, a line per mixer with its seeds."""
    drawn = []
    for T in dict.fromkeys(p["T"] for p in points):
        group = [p for p in points if p["T"] == T]
        widths = {p["n_embd"] for p in group}
        title = f"T = {T}, {group[0]['pairs']} pairs"
        if len(widths) == 1:
            lines = [Curve(p["mixer"], f"{p['name']} {p['recall']:.1%}", (), p["recalls"], [min(p["recalls"])],
                           [max(p["recalls"])]) for p in group]
            drawn.append(Panel(f"{title}, width {min(widths)}", "recall", "", lines))
            continue
        curves = {}
        for p in group:
            point = p["n_embd"], p["recall"], min(p["recalls"]), max(p["recalls"])
            curves.setdefault((p["mixer"], p["name"]), []).append(point)
        curves = [Curve(*of, *zip(*points, strict=True)) for of, points in curves.items()]
        drawn.append(Panel(title, "width", "recall", curves, log="x"))
    return drawn


write = functools.partial(pages.report, "recall", "Multi-query associative recall", page)
