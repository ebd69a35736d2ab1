"""Figure 4 from the records of experiments/recall/mqar.py: recall against width, for each T.

    recall of a point = mean over the seeds at the learning rate with the best mean; its interval: worst to best seed
    steps to half     = steps until half of the test queries are answered, interpolated between evaluations; a run that
                        never gets there counts as later than all others; compared by the exact Mann-Whitney test
    difference        = between the recalls of two mixers, with Welch's 95% interval over the seeds

The learning rate is chosen on the test set that also decides when to stop; recall is measured on other examples, drawn
for the report alone. The paper's Figure 4 gives no numbers to compare with.
"""

import functools
import math
from collections import Counter
from itertools import combinations

import numpy as np
import pandas
from scipy.stats import rankdata

from experiments import pages
from experiments.compare import welch
from experiments.figures import Curve, Panel, family_order, name_of
from experiments.pages import escaped, table

ABOUT = """\
Recall is measured on examples that chose nothing, at the learning rate that was best on the test set. "All rates" and
the tables by distance are measured on the test set. A run stops when it reaches stop_at, so differences above stop_at
mean nothing. A run that diverged counts as 0."""
HALF = "Steps until half of the test queries are answered, per seed, at every learning rate:"
PAIRS = """\
Pairs of mixers, each at its best rate: the difference in recall in percentage points with Welch's 95% interval, and the
p-value for equally many steps to half of the queries (exact Mann-Whitney test):"""
PLACE = {"T": "{T}", "width": "{n_embd}", "mixer": "{name}"}
COLUMNS = {"T": "{T}", "pairs": "{pairs}", **PLACE, "recall": "{shown}", "best rate": "{learning_rate:g}",
           "all rates": "{at_all_rates}", "epochs": "{epochs:.2f}", "seconds": "{seconds:.0f}",
           "state, numbers": "{state_size:,}", "parameters": "{parameters:,}"}


# ----------------------------------------------------------------------------------------------------------- summarise

def summarise(runs):
    """The points of Figure 4: a row per T, width and mixer, in this order, at its best learning rate.

    Only rates at which the largest number of seeds have ended compete. A run that diverged counts as answering nothing
    and never getting there; otherwise a rate would be judged by its surviving seeds.
    """
    diverged = runs.left_out.str.contains("it diverged")
    counted = runs[(runs.left_out == "") | diverged].sort_values("seed")
    counted = counted.fillna({"accuracy": 0.0, "recall": 0.0, "steps_to_half": math.inf})
    points = []
    for (T, width, mixer), group in counted.groupby(["T", "n_embd", "mixer"]):
        at_rate = group.groupby("learning_rate")
        tried = at_rate.accuracy.agg(["size", "mean"])
        rate = tried.sort_values(["size", "mean"], ascending=False, kind="stable").index[0]
        best = at_rate.get_group(rate)
        ended = best[best.left_out == ""]
        if ended.empty:
            continue
        recalls = best.recall.tolist()
        half = at_rate.steps_to_half.agg(sorted)
        shown = f"{best.recall.mean():.1%}"
        if len(recalls) > 1:
            shown += f" ({min(recalls):.1%} .. {max(recalls):.1%}, {len(recalls)} seeds)"
        points.append({
            "T": T, "n_embd": width, "mixer": mixer, "name": name_of(mixer), "recalls": recalls,
            "low": min(recalls), "high": max(recalls), "recall": best.recall.mean(), "shown": shown,
            "learning_rate": rate, "half": half,
            "at_all_rates": ", ".join(f"{rate:g}: {share:.1%}" for rate, share in tried["mean"].items()),
            "steps": "; ".join(f"{rate:g}: {in_words(steps)}" for rate, steps in half.items()),
            "epochs": ended.epochs.mean(), "seconds": ended.seconds.mean(),
            **ended[["pairs", "parameters", "state_size"]].iloc[0],
            "by_distance": pooled(ended.by_distance), "by_pairs": pooled(ended.by_pairs)})
    points.sort(key=lambda point: (point["T"], point["n_embd"], family_order(point["mixer"])))
    return pandas.DataFrame(points)


def in_words(steps):
    return ", ".join("never" if n == math.inf else f"{n:.0f}" for n in steps)


def pooled(shares):
    """{label: accuracy} over several seeds' {label: (queries, correct answers)}."""
    sums = {}
    for of_seed in shares:
        for label, counts in of_seed.items():
            sums[label] = sums.get(label, 0) + np.array(counts)
    return {label: right / queries for label, (queries, right) in sums.items()}


def mann_whitney(a, b):
    """Two-sided p that two samples have the same distribution, exact even with ties; inf ties with inf."""
    ranks = (2 * rankdata([*a, *b])).astype(int).tolist()  # doubled, so that ties have integer ranks
    ways = Counter({(0, 0): 1})  # {(k, s): how many choices of k ranks have the sum s}
    for rank in ranks:
        for (k, s), n in [*ways.items()]:
            ways[k + 1, s + rank] += n
    expected = len(a) * (len(ranks) + 1)
    off = abs(sum(ranks[:len(a)]) - expected)
    as_far = sum(n for (k, s), n in ways.items() if k == len(a) and abs(s - expected) >= off)
    return as_far / math.comb(len(ranks), len(a))


# ----------------------------------------------------------------------------------------------------------------- page

def page(runs):
    points = summarise(runs)
    settings = "; ".join(f"{key} {value}" for key, value in runs.attrs["settings"].items())
    above = [escaped(runs.attrs.get("note", "")), escaped(f"{settings}."), ABOUT]
    if points.empty:
        return pages.Page(["No run at a best rate has ended."], above, [], [])
    several = points[points.recalls.map(len) > 1]
    return pages.Page(
        [], above, panels(points),
        [table(points.to_dict("records"), COLUMNS),
         table(several.to_dict("records"), PLACE | {"rate: steps": "{steps}"}, HALF),
         table(pairs(several), title=PAIRS), *parts(points)])


def pairs(several):
    """A row per two mixers of the same T and width: their difference in recall, and p for equally many steps to
    half."""
    rows = []
    for (T, width), group in several.groupby(["T", "n_embd"]):
        for p, q in combinations(group.itertuples(), 2):
            chance = mann_whitney(p.half[p.learning_rate], q.half[q.learning_rate])
            more, low, high = (100 * share for share in welch(q.recalls, p.recalls)[:3])
            rows.append({"T": T, "width": width, "mixers": f"{q.name} minus {p.name}",
                         "recall, points": f"{more:.1f} ({low:.1f} .. {high:.1f})", "p": f"{chance:.2g}"})
    return rows


def parts(points):
    """Tables: for each T, at its smallest width, accuracy by distance and by number of pairs."""
    blocks = []
    for T, group in points.groupby("T"):
        narrow = group[group.n_embd == group.n_embd.min()]
        of = narrow.iloc[0]
        for key, title in (("by_distance", "by the tokens from a key to its query"),
                           ("by_pairs", f"by the number of pairs (trained with {of.pairs})")):
            rows = []
            for mixer, shares in zip(narrow.name, narrow[key], strict=True):
                rows.append({"mixer": mixer, **{label: f"{share:.1%}" for label, share in shares.items()}})
            blocks.append(table(rows, title=f"T = {T}, width {of.n_embd}, {title}:"))
    return blocks


def panels(points):
    """Recall against width, a panel per T; if there is one width, a line per mixer with its seeds."""
    drawn = []
    for T, group in points.groupby("T"):
        first = group.iloc[0]
        title = f"T = {T}, {first.pairs} pairs"
        if group.n_embd.nunique() > 1:
            curves = [Curve(mixer, name, of.n_embd, of.recall, of.low, of.high)
                      for (mixer, name), of in group.groupby(["mixer", "name"], sort=False)]
            drawn.append(Panel(title, "width", "recall", curves, log="x"))
        else:
            curves = [Curve(of.mixer, f"{of.name} {of.recall:.1%}", (), of.recalls, of.low, of.high)
                      for of in group.itertuples()]
            drawn.append(Panel(f"{title}, width {first.n_embd}", "recall", "", curves))
    return drawn


write = functools.partial(pages.report, "recall", "Multi-query associative recall", page)
