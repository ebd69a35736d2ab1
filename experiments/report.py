"""The report of a sweep: who learns from fewer tokens, by how much, and how sure can we be? Needs no GPU.

    report.md      the page, beside report.png       points.csv     a line per run
    report.html    the same page, with the figure    pairs.csv      a line per pair of families and budget
                                                     losses.csv     a line per family and size

Learning rates are chosen on the first half of the held-out files, with seeds that are not reported; all other numbers
are on all files.
"""

import itertools
import math
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas

from experiments import compare, fit, pages, records
from experiments.figures import Curve, Panel, family_order, name_of
from experiments.pages import human, listed, table
from experiments.sweeps import runner

REPO = Path(__file__).resolve().parents[1]

# The paper's Table 1: loss in nats per token of OpenWebText, by family and size of the preset paper
PAPER = pandas.DataFrame({
    "retnet": (3.569, 3.492, 3.362, 3.227),
    "gla": (3.381, 3.364, 3.018, 3.001),
    "rwkv": (3.291, 3.276, 2.983, 2.931),
    "mamba": (3.238, 3.231, 2.902, 2.868),
    "llama": (3.247, 3.273, 2.891, 2.883),
    "longhorn": (3.225, 3.192, 2.888, 2.859)}, ["120M", "120M at 4096", "350M", "350M at 4096"])
PAPER_TOKENS = np.array([2.5e9, 2.5e9, 7e9, 7e9])  # Table 5
CLAIM = 1.8  # times Mamba's sample efficiency, Figure 1: 1.3B parameters, 100B tokens
# Columns of points.csv
POINTS = ("run", *records.KINDS["scaling"].place, "parameters", "embedding", "tokens", "flops", "seconds", "val_loss",
          "val_bits_per_byte", "block_size", "device", "processes", "code", "time", "loss_of_choosing_files", "commit",
          "left_out")

LOSSES = """\
Nats per token, mean \u00b1 standard deviation over seeds (number of seeds), on all {files} held-out files. The learning
rates were chosen on the first half of these files, with other seeds. Data that does not mark files is divided into
eight equal parts instead. Every run decayed its learning rate to 0.
Bold: significantly below all other families of its size (5%, with Holm's correction)."""
LOSS_COLUMNS = {
    "family": "{name}", "size": "{size}", "parameters": "{N}", "tokens": "{D}",
    "loss": "{mark}{mean:.4f}{spread} ({seeds})", "bits per byte": "{bits:.4f}", "learning rate": "{rate:g}",
    "tokens/s": "{speed:,.0f}", "the paper's": "{paper:.3f}"}
DIFFERENCES = """\
Brackets hold 95% intervals over seeds, held-out files and the choice of the learning rates: SE times the quantile of
Student's t with df degrees of freedom, either way. The squares of the three parts of the SE add up to its square; a
negative estimate for the files is shown as 0. Tokens: how many times the other family's tokens the first needs to reach
the other's loss at the row's budget. It is read off the better family's curve over budgets; below 1 the first is
better. FLOPs and seconds: the same, times the ratio of the costs per token. Compare seconds only between runs on an
otherwise idle machine. If the interval contains 1, the difference is not significant, and the two are equal within its
ends. Each interval is for one pair; p is corrected by Holm's method for all pairs on this page. If the search cannot
tell the error of the chosen rates, the interval does not include it, and that part is nan. Per doubling: how the
difference changes when the tokens double. Only the learning rate was tuned for each family."""
NATS = "{mean:+.4f} ({low:+.4f} .. {high:+.4f})"
SPAN = {}  # templates for tokens, FLOPs and seconds: 0.98 (0.95 .. 1.01)
for cost in ("tokens", "FLOPs", "seconds"):
    SPAN[cost] = f"{{{cost}:.2f}} ({{{cost}_low:.2f}} .. {{{cost}_high:.2f}})"
PAIR_COLUMNS = {"pair": "{names}", "at": "{size}", "after": "{D}", "seeds": "{seeds}", "loss minus the other's": NATS,
                **SPAN, "p, Holm": "{p_holm:.2g}", "SE (df)": "{se:.4f} ({df:.0f})",
                "of it seeds, files, rates": "{seeds_se:.4f}, {documents_se:.4f}, {rates_se:.4f}",
                "curves cross at": "{crossings}",
                "per doubling": "{trend:+.4f} ({trend_low:+.4f} .. {trend_high:+.4f})"}


# -------------------------------------------------------------------------------------------------------------- collect

@dataclass
class Entry:
    """A family at a size: its reported runs at its learning rate, and how that rate was chosen.

    documents {tokens: {seed: losses (documents,)}}; weights (documents,): tokens of each held-out document.
    """

    model: str
    size: str
    runs: pandas.DataFrame
    rate: float
    search: dict  # {rate: {seed: loss on the choosing files}}; inf: diverged
    searched: int  # tokens of each run of the search
    search_noise: tuple  # (variance over seeds of reported runs at the search's budget, degrees of freedom)
    notes: list
    main: int = 0  # tokens of the budget that is compared, the same for all families of the size
    documents: dict = field(default_factory=dict)
    weights: np.ndarray = None

    def __post_init__(self):
        for tokens, group in self.runs.sort_values("seed").groupby("tokens"):
            self.documents[int(tokens)] = dict(zip(group.seed.astype(int), group.val_document_losses, strict=True))
            self.weights = group.val_document_tokens.iloc[0]

    @property
    def at_main(self):
        """The runs of the compared budget, by seed."""
        return self.runs[self.runs.tokens == self.main].sort_values("seed")

    @property
    def mean(self):
        return self.at_main.val_loss.mean()

    def trend(self, budgets):
        """{seed: change of each document's loss in nats per doubling of the tokens}, for seeds with all budgets."""
        x = np.log2(np.array(budgets) / budgets[0])
        slope = (x - x.mean()) / ((x - x.mean()) @ (x - x.mean()))
        by_budget = [self.documents.get(tokens, {}) for tokens in budgets]
        changes = {}
        for seed in by_budget[0]:
            if all(seed in losses for losses in by_budget):
                changes[seed] = slope @ np.array([losses[seed] for losses in by_budget])
        return changes


def collect(runs):
    """[[Entry] of each size]: the smallest size first, the families in the plan's order."""
    about = runs.attrs
    seconds = (runs.seconds / runs.tokens).astype(float)
    runs = runs.assign(flops_per_token=runs.flops / runs.tokens, log_seconds=np.log(seconds))
    runs.attrs = {}  # pandas copies them deeply with each selection
    models = dict.fromkeys([*about.get("models", ()), *sorted(runs.model.unique(), key=family_order)])
    sizes = []
    for size in runs.groupby("size").parameters.median().sort_values(kind="stable").index:
        by_model = dict(list(runs[runs["size"] == size].groupby("model")))
        families = [entry_of(model, size, by_model[model]) for model in models if model in by_model]
        choose_main(families)
        sizes.append(families)
    searched = {}
    for e in itertools.chain(*sizes):
        if e.search:
            searched[e.model] = e
            if e.main > 3 * e.searched:  # the factor is usually 2
                e.notes.append(f"the learning rate was chosen after {human(e.searched)} tokens: intervals include "
                               "the error of this search, but longer runs may need another rate")
        elif e.rate and e.model in searched:
            before = searched[e.model]
            e.search = before.search
            e.search_noise = before.search_noise
            e.notes.append(f"the learning rate is that of {before.size}, scaled by 1 / width: intervals include the "
                           "error of that search, but not of the scaling")
    return sizes


def choose_main(families):
    """Set `main` of a size's Entries: the budget at which the family with the fewest seeds has the most seeds; if two
    tie, the longer one."""
    with_runs = [e for e in families if e.documents]
    if not with_runs:
        return
    common = set.intersection(*(set(e.documents) for e in with_runs))
    for e in families:
        if common:
            e.main = max(common, key=lambda tokens: (min(len(o.documents[tokens]) for o in with_runs), tokens))
        else:
            e.notes.append("the families of this size have no budget in common: nothing is compared")


def entry_of(model, size, cells):
    """The Entry of a family's runs at a size; choose_main sets its `main`."""
    notes = []
    search = records.search_of(cells)
    tried = cells[cells.stage == "search"].tokens.dropna()
    searched = int(tried.max()) if len(tried) else 0
    best = compare.best_rate(search)
    if best:
        said = [f"{rate} {f'{loss:.4f}' if math.isfinite(loss) else 'diverged'}" for rate, loss in best.tried.items()]
        notes.append(f"learning rates tried for {human(searched)} tokens, with the loss on the first half of the "
                     f"files: {', '.join(said)}")
        if best.beyond:
            notes.append(f"the best learning rate, {best.rate:g}, is at the edge of the rates tried")

    planned = cells[cells.stage == "seed"]
    runs = planned[planned.left_out == ""]
    missing = planned.seed.nunique() - runs.seed.nunique()
    rates = Counter(runs.learning_rate)
    rate = max(rates, key=rates.get, default=None)
    if not rates:
        notes.append("no usable run, see below")
    elif missing:
        notes.append(f"{missing} of {planned.seed.nunique()} planned seeds have no usable run yet")
    if len(rates) > 1:
        notes.append(f"seeds ran at several rates, {', '.join(f'{r:g}' for r in rates)}: only those at {rate:g} count")
    runs = runs[runs.learning_rate == rate]

    cosines = cells[(cells.stage == "cosine") & (cells.left_out == "") & (cells.learning_rate == rate)]
    for c in cosines.itertuples():
        for loss in runs[(runs.tokens == c.tokens) & (runs.seed == c.seed)].val_loss:
            notes.append(f"a cosine to 0 with the same length, seed and rate ends at {c.val_loss:.4f} after "
                         f"{human(c.tokens)} tokens, this schedule at {loss:.4f}")
    noise = (0.0, 0)
    alike = runs[runs.tokens.isin(tried)].loss_of_choosing_files
    if len(alike) > 1:
        noise = alike.var(), len(alike) - 1
    return Entry(model, size, runs, rate, search, searched, noise, notes)


# -------------------------------------------------------------------------------------------------------------- numbers

def pair_rows(families, a, b):
    """A row per budget that two Entries share: the difference in loss; a's tokens, FLOPs and seconds over b's for the
    same loss; and the nats that the paper's claim is worth on a's curve. The row of the main budget also says how the
    difference changes with the budget."""
    budgets = sorted(a.documents.keys() & b.documents.keys())
    rates = compare.rate_variance(a, b)
    rows = []
    for tokens in budgets:
        d = compare.difference_of(families, a, b, lambda e, at=tokens: e.documents.get(at, {}), rates)
        n_a, n_b = (len(e.documents[tokens]) for e in (a, b))
        row = {"size": a.size, "a": a.model, "b": b.model, "names": f"{name_of(a.model)} / {name_of(b.model)}",
               "budget": tokens, "D": human(tokens), "seeds": f"{n_a}" if n_a == n_b else f"{n_a}, {n_b}",
               "is_main": tokens == a.main, **multipliers(families, a, b, tokens, d)}
        if d:
            row |= d._asdict()
            if rates is None:
                row["rates_se"] = math.nan
        rows.append(row)
    main = next(row for row in rows if row["is_main"])
    shorter = [tokens for tokens in budgets if tokens <= a.main]
    if "mean" in main and len(rows) > 1:
        main["crossings"] = crossings(rows)
    if len(shorter) > 1:
        trend = compare.difference_of(families, a, b, lambda e: e.trend(shorter))
        if trend:
            main |= {"trend": trend.mean, "trend_low": trend.low, "trend_high": trend.high}
    return rows


def multipliers(families, a, b, tokens, d):
    """The part of a row of `pair_rows` that is read off the curves over budgets; d: the Difference at `tokens`."""
    curve_a, curve_b = (compare.Curve(e, tokens, families) for e in (a, b))
    m = compare.multiplier(d, curve_a, curve_b)
    flops_a, flops_b = (e.at_main.flops_per_token.iloc[0] for e in (a, b))
    costs = {"tokens": m, "FLOPs": compare.times(m, math.log(flops_a / flops_b))}
    log_seconds = compare.welch(a.at_main.log_seconds, b.at_main.log_seconds)
    if log_seconds:
        costs["seconds"] = compare.times(m, log_seconds.mean, log_seconds.high - log_seconds.mean)
    row = {}
    for cost, times in costs.items():
        if times:
            row |= {cost: times.value, f"{cost}_low": times.low, f"{cost}_high": times.high, "beyond": times.beyond}
    if curve_a.known:
        row["of_claim"] = curve_a.rise(-math.log(CLAIM))
    return row


def crossings(rows):
    """In words: the tokens at which the curves cross, interpolated between budgets with differences of opposite
    sign."""
    found = []
    for row, following in itertools.pairwise([row for row in rows if "mean" in row]):
        if row["mean"] * following["mean"] < 0:
            share = row["mean"] / (row["mean"] - following["mean"])
            found.append(human(row["budget"] ** (1 - share) * following["budget"] ** share))
    return " and ".join(found) or "nowhere"


def loss_row(e, is_winner, is_paper):
    """The row of the table for an Entry."""
    row = {"name": name_of(e.model), "size": e.size, "model": e.model}
    losses = e.at_main.val_loss
    if losses.empty:
        return row
    first = e.at_main.iloc[0]
    row |= {"N": human(first.parameters, 4), "D": human(e.main), "budget": e.main, "mean": e.mean, "sd": losses.std(),
            "seeds": len(losses), "mark": "**" if is_winner else "",
            "spread": f" \u00b1 {losses.std():.4f}" if len(losses) > 1 else "", "rate": e.rate,
            "speed": math.exp(-statistics.fmean(e.at_main.log_seconds))}
    if first.val_bits_per_byte > 0:
        row["bits"] = e.mean * first.val_bits_per_byte / first.val_loss
    if is_paper and e.model in PAPER:
        row["paper"] = PAPER[e.model].get(e.size)
    return row


def winner(families):
    """The compare.Winner of a size: the family whose loss is below all others."""
    by_name = {name_of(e.model): e for e in families if len(e.at_main)}

    def p_of(*names):
        a, b = (by_name[name] for name in names)
        rates = compare.rate_variance(a, b)
        d = compare.difference_of(families, a, b, lambda e: e.documents.get(a.main, {}), rates)
        return d and d.p

    return compare.winner({name: e.mean for name, e in by_name.items()}, p_of)


def cost_lines(used):
    """Lines: the hours that the runs took. A branch counts from its first step, and the hours of all processes add
    up."""
    seconds = (1 - used["from"] / used.steps) * used.seconds
    lines = []
    hours = seconds * used.processes / 3600
    processes = " or ".join(map(str, used.processes.unique()))
    for kind, total in hours.groupby(np.where(used.device == used.cpu, "CPU hours", "GPU hours")).sum().items():
        lines.append(f"All used runs together took {total:.2f} {kind}, with {processes} process(es) each.")
    begun = pandas.to_datetime(used.time, utc=True, errors="coerce")
    if begun.notna().all():  # some older records lack the time
        spent = 0.0
        last = -math.inf
        for begin, of_run in sorted(zip([time.timestamp() for time in begun], seconds, strict=True)):
            spent += max(0.0, begin + of_run - max(begin, last))
            last = max(last, begin + of_run)
        lines.append(f"At least one of them was running for {runner.hours(spent)}.")
    return lines


# ------------------------------------------------------------------------------------------------------------ sentences

def sentences(pairs):
    """The result of the sweep: a sentence per pair of families, from the rows at the compared budget."""
    texts = []
    for a, b in dict.fromkeys((row["a"], row["b"]) for row in pairs):
        of_both = [row for row in pairs[::-1] if (row["a"], row["b"]) == (a, b)]  # largest size first
        told = "; ".join(map(result, of_both))
        off = [max(1 - row["tokens_low"], row["tokens_high"] - 1) for row in of_both
               if row.get("tokens_low", 2) <= 1 <= row["tokens_high"]]
        if len(off) == len(of_both):
            told += f"; the difference is not significant, and they are equal within {math.ceil(100 * max(off))}%"
        texts.append(f"{name_of(a)} {told}.")
    return texts or ["No two families have usable runs at a common budget: there is nothing to compare."]


def result(row):
    """What the sentence says about a pair at one size."""
    if "mean" not in row:
        return f"has one seed at {row['size']}, which gives no interval"
    other = name_of(row["b"])
    if "tokens" not in row:
        return (f"ends {NATS.format(**row)} nats from {other} at {row['size']}; its budgets do not show how many "
                "tokens that is worth")
    inside = [f"{SPAN[cost].format(**row)} times its {cost}" for cost in ("FLOPs", "seconds") if cost in row]
    if row["beyond"]:
        inside.append("beyond the budgets that ran")
    excludes_0 = row["low"] > 0 or row["high"] < 0
    if excludes_0 and row["p_holm"] >= 0.05:
        inside.append(f"not decided: p = {row['p_holm']:.2g} after Holm's correction")
    return f"needs {SPAN['tokens'].format(**row)} times {other}'s tokens at {row['size']} ({', '.join(inside)})"


def paper_lines(rows):
    """Lines: the paper's claim about Longhorn and Mamba in nats for these rows, and how many tokens its Table 1 is
    worth."""
    claimed = [f"{-row['of_claim']:.3f} nats at {row['size']} after {row['D']} tokens" for row in rows
               if (row["a"], row["b"]) == ("longhorn", "mamba") and "of_claim" in row]
    if not claimed:
        return []
    gaps = PAPER["mamba"] - PAPER["longhorn"]
    beta = fit.EPOCH["beta"]
    slopes = beta * fit.EPOCH["B"] / PAPER_TOKENS**beta  # nats per e-fold of tokens
    times = np.exp(gaps / slopes)  # tokens that a gap is worth
    return [
        f"The paper says that Longhorn has {CLAIM:g} times Mamba's sample efficiency (Figure 1: 1.3B parameters, 100B "
        f"tokens). Here that would be a difference of {', '.join(claimed)}.",
        f"In the paper's Table 1 Longhorn ends {min(gaps):.3f} to {max(gaps):.3f} nats below Mamba. By the law of "
        f"Besiroglu et al. 2024 this is worth {min(times):.2f} to {max(times):.2f} times the tokens."]


# ----------------------------------------------------------------------------------------------------------------- page

def page(runs):
    """The pages.Page of a scaling sweep; in `csv` the points, pairs and losses."""
    about = runs.attrs
    used = runs[runs.left_out == ""]
    sizes = collect(runs)
    losses = []
    pairs = []
    above = cost_lines(used)
    notes = []
    for families in sizes:
        won = winner(families)
        above.append(f"{families[0].size}: {won.reason}.")
        losses += [loss_row(e, name_of(e.model) == won.family, about.get("paper") is True) for e in families]
        notes += [f"{e.size}, {name_of(e.model)}: {note}." for e in families for note in e.notes]
        families = [e for e in families if len(e.at_main)]
        if families and families[0].model == sizes[0][0].model:
            for other in families[1:]:
                pairs += pair_rows(families, families[0], other)
    for i, p in compare.holm({i: row["p"] for i, row in enumerate(pairs) if row["is_main"] and "p" in row}).items():
        pairs[i]["p_holm"] = p
    at_main = [row for row in pairs if row["is_main"]]

    again = f"python experiments/sweep.py report results/{about['name']}.json"
    if about["accepted"]:
        again += f" --accept_code={','.join(about['accepted'])}"
    again = [*about.get("commands", []), f"the report, from the records alone: {again}"]
    beside = paper_lines(at_main)
    points = runs[list(POINTS)].rename(columns={"val_loss": "loss", "val_bits_per_byte": "bits_per_byte",
                                                "block_size": "context", "left_out": "status"})
    points["status"] = points.status.replace("", "used")
    files = max(map(len, used.val_document_tokens))
    return pages.Page(
        sentences(at_main), [listed(above)], panels(sizes, at_main), [
            "## Losses", table(losses, LOSS_COLUMNS, LOSSES.format(files=files)), listed(notes),
            table(pairs, PAIR_COLUMNS, f"## Differences and multipliers\n\n{DIFFERENCES}"),
            "## Beside the paper" if beside else "", listed(beside), "## To repeat it", listed(again)],
        {"points": points, "pairs": pandas.DataFrame(pairs), "losses": pandas.DataFrame(losses)})


def panels(sizes, pairs):
    """Loss against tokens, a panel per size; then the multipliers of the first family relative to the others."""
    drawn = []
    for families in sizes:
        curves = []
        for e in families:
            if len(e.at_main):
                losses = e.runs.groupby("tokens").val_loss
                mean = losses.mean()
                spread = losses.std().fillna(0)
                curves.append(Curve(e.model, f"{name_of(e.model)} {e.mean:.3f}", mean.index, mean, mean - spread,
                                    mean + spread))
        if curves:
            drawn.append(Panel(f"Loss after {human(families[0].main)} tokens, {families[0].size}",
                               "training tokens, each point a budget with its own decay",
                               "loss on the held-out files (nats)", curves, "x"))
    known = [row for row in pairs if "tokens" in row]
    lines = [Curve(row["b"], f"{name_of(row['b'])} {row['size']} {row['tokens']:.2f}", (), [row["tokens"]],
                   [row["tokens_low"]], [row["tokens_high"]]) for row in known]
    if lines:
        drawn.append(Panel("Tokens for the same loss, 95%",
                           f"{name_of(known[0]['a'])}'s tokens / the other's", "", lines, marks=(1,)))
    return drawn


def write(source, out=None, accept_code=(), save_it=False, style=None):
    """Write the report on a sweep's folder or saved file and print its sentences. Returns {name: path}.

    Args:
        out: output folder (default: the sweep's folder, or a folder beside the file, with the same name).
        save_it: write the records to results/<name>.json first, and their report to results/<name>/.
        accept_code, style: see pages.report.
    """
    source = Path(source)
    if save_it:
        saved = REPO / "results" / f"{source.resolve().stem}.json"
        records.save(source, saved)
        source = saved
    folder = Path(out or (source.with_suffix("") if source.is_file() else source))
    name = source.resolve().name.removesuffix(".json")
    return pages.report("scaling", f"Scaling sweep {pages.escaped(name)}", page, source, folder / "report", accept_code,
                        style)
