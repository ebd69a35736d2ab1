"""The report of a sweep: who learns from fewer tokens, by how much, and how sure can we be? Needs no GPU.

    report.json    every number                       points.csv     a line per run
    report.md      the page, beside figure.png        report.html    the same page, with the figure inside

Learning rates are chosen on the first half of the held-out files, by seeds that are not reported; all other numbers are
on all files.
"""

import functools
import itertools
import json
import math
import shutil
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas

from common.errors import ConfigError
from experiments import compare, figures, fit, pages, records
from experiments.figures import family_order, name_of
from experiments.pages import DASH, bold, escaped, human, listed, table, titled
from experiments.sweeps import runner
from runtime.records import write_json

REPO = Path(__file__).resolve().parents[1]

# The paper's Table 1: family -> size in preset paper -> loss in nats per token of OpenWebText
PAPER = {"retnet": {"120M": 3.569, "120M at 4096": 3.492, "350M": 3.362, "350M at 4096": 3.227},
         "gla": {"120M": 3.381, "120M at 4096": 3.364, "350M": 3.018, "350M at 4096": 3.001},
         "rwkv": {"120M": 3.291, "120M at 4096": 3.276, "350M": 2.983, "350M at 4096": 2.931},
         "mamba": {"120M": 3.238, "120M at 4096": 3.231, "350M": 2.902, "350M at 4096": 2.868},
         "llama": {"120M": 3.247, "120M at 4096": 3.273, "350M": 2.891, "350M at 4096": 2.883},
         "longhorn": {"120M": 3.225, "120M at 4096": 3.192, "350M": 2.888, "350M at 4096": 2.859}}
PAPER_TOKENS = {"120M": 2.5e9, "350M": 7e9}  # Table 5
CLAIM = 1.8  # times Mamba's sample efficiency, Figure 1: 1.3B parameters, 100B tokens
# Columns of points.csv, and other columns used here
POINTS = ("run", *records.PLACE["scaling"], "parameters", "embedding", "tokens", "flops", "seconds", "val_loss",
          "val_bits_per_byte", "block_size", "device", "processes", "code", "time", "loss_of_choosing_files", "commit",
          "left_out")
READ = ("val_document_tokens", "val_document_losses", "cpu", "torch", "python")


# -------------------------------------------------------------------------------------------------------------- collect

@dataclass
class Entry:
    """A family at a size: its reported runs at its learning rate, budget by budget, and how that rate was chosen."""

    model: str
    size: str
    runs: pandas.DataFrame
    main: int = 0  # tokens of the budget that is compared, the same for all families of the size
    rate: float = None
    tried: dict = field(default_factory=dict)  # {rate: mean loss on the choosing files}; None: diverged
    tried_tokens: int = 0  # of each run of the search
    search: dict = field(default_factory=dict)  # {rate: {seed: loss on the choosing files}}; inf: diverged
    search_noise: tuple = (0.0, 0)  # (variance over seeds of a reported run of the search's budget, degrees of freedom)
    notes: list = field(default_factory=list)

    @functools.cached_property
    def at_main(self):
        """The runs of the compared budget, by seed."""
        return self.runs[self.runs.tokens == self.main].sort_values("seed")

    @property
    def first(self):
        return self.at_main.iloc[0]

    @property
    def losses(self):
        return self.at_main.val_loss.tolist()

    @property
    def mean(self):
        return statistics.fmean(self.losses) if self.losses else None

    @property
    def sd(self):
        return statistics.stdev(self.losses) if len(self.losses) > 1 else None

    @property
    def weights(self):
        """(documents,): tokens of each held-out document."""
        return self.first.val_document_tokens

    @functools.cached_property
    def documents(self):
        """{tokens: {seed: losses (documents,)}}"""
        return self.by_seed("val_document_losses", np.asarray)

    def by_seed(self, column, show=float):
        """{tokens: {seed: value in the column}}"""
        values = {}
        for tokens, group in self.runs.sort_values("seed").groupby("tokens"):
            seeds = group.seed.astype(int)
            values[int(tokens)] = dict(zip(seeds, map(show, group[column]), strict=True))
        return values

    def trend(self, budgets):
        """{seed: nats by which each document's loss changes per doubling of the tokens}, for seeds with all budgets."""
        x = np.log2(np.array(budgets) / budgets[0])
        slope = (x - x.mean()) / ((x - x.mean()) @ (x - x.mean()))
        seeds = set.intersection(*(set(self.documents.get(tokens, ())) for tokens in budgets))
        changes = {}
        for seed in sorted(seeds):
            losses = [self.documents[tokens][seed] for tokens in budgets]
            changes[seed] = slope @ np.array(losses)
        return changes

    def log_seconds(self):
        """log(seconds per token) of each seed."""
        return np.log(self.at_main.seconds / self.at_main.tokens).tolist()


def collect(runs):
    """[Entry], one per family and size in the plan: sizes from the smallest on, families in the plan's order."""
    entries = [entry_of(model, size, cells) for (model, size), cells in runs.groupby(["model", "size"], sort=False)]
    models = [*runs.attrs.get("models", ()), *sorted((e.model for e in entries), key=family_order)]
    order = list(dict.fromkeys(models))
    parameters = {}
    for size in dict.fromkeys(e.size for e in entries):
        of_size = [e for e in entries if e.size == size]
        choose_main(of_size)
        counts = [n for e in of_size for n in e.runs.parameters]
        parameters[size] = statistics.median(counts or [math.inf])
    entries.sort(key=lambda e: (parameters[e.size], e.size, order.index(e.model)))
    searched = {}
    for e in entries:
        if e.search:
            searched[e.model] = e
            if e.main > 3 * e.tried_tokens:  # usually 2
                e.notes.append(f"the learning rate was chosen after {human(e.tried_tokens)} tokens: intervals have the "
                               "error of this search, but longer runs may want another rate")
        elif e.rate and e.model in searched:
            before = searched[e.model]
            e.search = before.search
            e.search_noise = before.search_noise
            e.notes.append(f"the learning rate is that of {before.size}, scaled by 1 / width: intervals have the error "
                           "of its search, not that of the scaling")
    return entries


def choose_main(of_size):
    """Set `main` of a size's Entries: the budget of which the family with the fewest seeds has most; of two such, the
    longer one."""
    with_runs = [e for e in of_size if len(e.runs)]
    if not with_runs:
        return
    common = set.intersection(*(set(e.runs.tokens) for e in with_runs))
    for e in of_size:
        if not common:
            e.notes.append("the families of this size have no budget in common: nothing is compared")
            continue
        e.main = int(max(common, key=lambda tokens: (min((o.runs.tokens == tokens).sum() for o in with_runs), tokens)))


def entry_of(model, size, cells):
    """The Entry of a family's runs at a size; `main` is set by choose_main."""
    notes = []
    searched = cells[cells.stage == "search"]
    search = {}
    for run in searched.itertuples():
        if not run.left_out:
            search.setdefault(run.learning_rate, {})[run.seed] = run.loss_of_choosing_files
        elif "diverged" in run.left_out:
            search.setdefault(run.learning_rate, {})[run.seed] = math.inf
    tried = {}
    best = compare.best_rate({rate: list(losses.values()) for rate, losses in search.items()})
    if best:
        tried = {rate: loss if math.isfinite(loss) else None for rate, loss in best.tried.items()}
        if best.beyond:
            notes.append(f"the best learning rate, {best.rate:g}, is still at the edge of those tried")

    planned = cells[cells.stage == "seed"]
    runs = planned[planned.left_out == ""]
    rates = Counter(runs.learning_rate)
    rate = max(rates, key=rates.get, default=None)
    missing = planned.seed.nunique() - runs.seed.nunique()
    if not rates:
        notes.append("no usable run, see below")
    elif len(rates) > 1:
        notes.append(f"seeds ran at several rates, {', '.join(f'{r:g}' for r in rates)}: those at {rate:g} count")
    if rates and missing:
        notes.append(f"{missing} of {planned.seed.nunique()} planned seeds have no usable run yet")
    runs = runs[runs.learning_rate == rate]
    runs = runs.iloc[np.argsort(pandas.factorize(runs.tokens)[0], kind="stable")]  # budget by budget, as planned
    runs.attrs = {}  # pandas copies them deeply with each selection
    noise = (0.0, 0)
    alike = runs[runs.tokens.isin(searched.tokens)].loss_of_choosing_files
    if len(alike) > 1:
        noise = alike.var(), len(alike) - 1
    return Entry(model, size, runs, rate=rate, tried=tried, tried_tokens=int(searched.tokens.max()) if tried else 0,
                 search=search, search_noise=noise, notes=notes)


# -------------------------------------------------------------------------------------------------------------- numbers

def compared(entries):
    """([dict] of the first family against every other one per size: difference and multipliers at the compared budget,
    the same at every `budgets`, and how the difference changes with them; [dict] of which family is below all others,
    per size)."""
    pairs = []
    winners = []
    for size in dict.fromkeys(e.size for e in entries):
        of_size = [e for e in entries if e.size == size and e.losses]
        winners.append({"size": size, **winner(of_size)})
        if of_size and of_size[0].model == entries[0].model:
            pairs += [pair(of_size, of_size[0], other) for other in of_size[1:]]
    known = {i: p["difference"]["p"] for i, p in enumerate(pairs) if p["difference"]}
    corrected = compare.holm(known)
    for i, p in enumerate(pairs):
        p["p_holm"] = corrected.get(i)
    return pairs, winners


def winner(of_size):
    """Which family of a size is below all others, as a dict."""
    by_name = {name_of(e.model): e for e in of_size}

    def p_of(a, b):
        d = difference(of_size, by_name[a], by_name[b], of_size[0].main)
        return d and d.p

    won = compare.winner({name: e.mean for name, e in by_name.items()}, p_of)
    return {"winner": won.family and by_name[won.family].model, "reason": won.reason,
            "p": {by_name[name].model: p for name, p in won.p.items()}}


def difference(families, a, b, tokens):
    """The compare.Difference of two Entries' losses at a budget; families: all of the size, over which the SD is
    pooled."""
    return difference_of(families, a, b, lambda e: e.documents.get(tokens, {}), rate_variance(a, b))


def difference_of(families, a, b, values_of, rates=None):
    """The same of values_of(Entry), {seed: values (documents,)}; rates: their variance from the learning rates."""
    of_a = values_of(a)
    of_b = values_of(b)
    if not (of_a and of_b):
        return None
    over_seeds = []
    for values in map(values_of, families):
        if values:
            over_seeds.append(rows(values) @ a.weights / a.weights.sum())
    paired = of_a.keys() == of_b.keys()
    return compare.difference(rows(of_a), rows(of_b), a.weights, compare.pooled_sd(over_seeds), paired, rates)


def rows(by_seed):
    """(seeds, documents) of {seed: (documents,)}."""
    return np.array(list(by_seed.values()))


def rate_variance(a, b):
    """compare.rate_variance of two Entries."""
    df = a.search_noise[1] + b.search_noise[1]
    noise = None
    if df:
        noise = sum(variance * df_of_one for variance, df_of_one in (a.search_noise, b.search_noise)) / df, df
    return compare.rate_variance(a.search, b.search, noise)


def pair(families, a, b):
    """What the report says of two Entries; families: all of the size."""
    budgets = sorted(a.documents.keys() & b.documents.keys())
    by_budget = [pair_at(families, a, b, tokens, budgets) for tokens in budgets]
    shorter = [tokens for tokens in budgets if tokens <= a.main]
    trend = None
    if len(shorter) > 1:
        trend = difference_of(families, a, b, lambda e: e.trend(shorter))
    at_main = next(row for row in by_budget if row["tokens_each"] == a.main)
    return {"size": a.size, "a": a.model, "b": b.model, **at_main, "rates_known": rate_variance(a, b) is not None,
            "trend": trend and trend._asdict(), "crossings": crossings(by_budget), "budgets": by_budget}


def pair_at(families, a, b, tokens, budgets):
    """The part of `pair` that belongs to one of the budgets."""
    weights = a.weights / a.weights.sum()
    pooled = {}
    for other in budgets:
        changes = [compare.changes(e.documents, other, tokens) for e in families]
        pooled[other] = compare.pooled_sd([change @ weights for change in changes if len(change)])
    curve_a = compare.Curve(a.documents, tokens, weights, pooled)
    curve_b = compare.Curve(b.documents, tokens, weights, pooled)
    d = difference(families, a, b, tokens)
    m = compare.multiplier(d, curve_a, curve_b)
    log_flops = math.log((a.first.flops / a.first.tokens) / (b.first.flops / b.first.tokens))
    log_seconds = compare.welch(a.log_seconds(), b.log_seconds())
    in_seconds = None
    if log_seconds:
        in_seconds = compare.times(m, log_seconds.mean, log_seconds.high - log_seconds.mean)
    row = {"tokens_each": tokens, "seeds": [len(e.documents[tokens]) for e in (a, b)], "difference": d, "tokens": m,
           "flops": compare.times(m, log_flops), "seconds": in_seconds}
    for key in ("difference", "tokens", "flops", "seconds"):
        row[key] = row[key] and row[key]._asdict()
    row["of_claim"] = curve_a.rise(-math.log(CLAIM)) if curve_a.known else None
    return row


def crossings(by_budget):
    """The tokens at which the difference is 0, between two budgets of unlike sign."""
    means = [(math.log(row["tokens_each"]), row["difference"]["mean"]) for row in by_budget if row["difference"]]
    found = []
    for (x, y), (next_x, next_y) in itertools.pairwise(means):
        if y * next_y < 0:
            found.append(math.exp(x + (next_x - x) * y / (y - next_y)))
    return found


def cosines(runs, entries):
    """[{"model", "size", "tokens", "cosine", "wsd"}]: losses of both schedules with the same seed, rate and budget."""
    cosine = runs[(runs.left_out == "") & (runs.stage == "cosine")]
    reported = pandas.concat([runs[:0], *(e.runs for e in entries)])
    lines = cosine.merge(reported, on=["model", "size", "tokens", "seed", "learning_rate"], suffixes=("", "_wsd"))
    return [{"model": r.model, "size": r.size, "tokens": r.tokens, "cosine": r.val_loss, "wsd": r.val_loss_wsd}
            for r in lines.itertuples()]


def seconds_of(used):
    """Seconds that each run took itself: a branch counts from the step it branched at."""
    return (1 - used["from"] / used.steps) * used.seconds


def hours_of(used):
    """{'GPU hours' or 'CPU hours': processes x hours}"""
    hours = seconds_of(used) * used.processes / 3600
    return hours.groupby(np.where(used.device == used.cpu, "CPU hours", "GPU hours")).sum().to_dict()


def wall_hours(used):
    """Hours during which at least one run was under way; None if some run does not say when it began."""
    times = pandas.to_datetime(used.time, utc=True, errors="coerce")
    if times.isna().any():
        return None
    begun = [time.timestamp() for time in times]
    spent = 0.0
    last = -math.inf
    for begin, seconds in sorted(zip(begun, seconds_of(used), strict=True)):
        end = begin + seconds
        spent += max(0.0, end - max(begin, last))
        last = max(last, end)
    return spent / 3600


def row_of(e, is_paper):
    """What report.json says of an Entry."""
    row = {"model": e.model, "size": e.size, "learning_rate": e.rate, "learning_rates_tried": e.tried,
           "learning_rates_tried_tokens": e.tried_tokens, "mean_loss": e.mean, "sd_loss": e.sd,
           "losses": e.by_seed("val_loss").get(e.main, {}), "notes": e.notes, "budgets": e.by_seed("val_loss"),
           "paper_loss": PAPER.get(e.model, {}).get(e.size) if is_paper else None}
    if e.losses:
        first = e.first
        bits = None
        if first.val_bits_per_byte > 0:
            bits = e.mean * first.val_bits_per_byte / first.val_loss
        row |= {"parameters": first.parameters, "tokens": e.main, "context": first.block_size, "bits_per_byte": bits,
                "flops": first.flops, "tokens_per_second": math.exp(-statistics.fmean(e.log_seconds()))}
    return row


def numbers_of(runs, entries, accepted):
    """The content of report.json."""
    used = runs[runs.left_out == ""]
    left_out = runs[runs.left_out != ""]
    plan = runs.attrs
    pairs, winners = compared(entries)
    dates = sorted(time[:10] for time in used.time if time)
    numbers = {
        **{key: plan.get(key) for key in ("name", "preset", "paper", "machine", "cores")},
        "commands": plan.get("commands", []), "planned": len(runs), "runs_used": len(used),
        "left_out": {why: group.run.tolist() for why, group in left_out.groupby("left_out", sort=False)},
        "code": plan["code"], "accepted_code": accepted,
        "files": max(map(len, used.val_document_tokens), default=0),
        "table": [row_of(e, plan.get("paper") is True) for e in entries], "pairs": pairs,
        "sentences": sentences(pairs), "cosines": cosines(runs, entries), "winners": winners,
        "cost": {"hours": hours_of(used), "wall": wall_hours(used)},
        "begun": [*dates[:1], *dates[1:][-1:]],
        "devices": sorted({f"{r.device}, {r.processes} process(es)" for r in used.itertuples()}),
        "versions": {key: sorted(set(used[key].dropna())) for key in ("torch", "python")}}
    text = json.dumps(numbers, default=lambda number: number.item())
    return json.loads(text, parse_constant=lambda name: None)  # what is not finite is null


# ------------------------------------------------------------------------------------------------------------ sentences

def sentences(pairs):
    """A sentence per pair of families: the result of the sweep."""
    texts = []
    for a, b in dict.fromkeys((p["a"], p["b"]) for p in pairs):
        of_both = [p for p in pairs[::-1] if (p["a"], p["b"]) == (a, b)]  # largest size first
        told = "; ".join(map(result, of_both))
        texts.append(f"{name_of(a)} {told}{equality(of_both)}.")
    return texts or ["No two families have usable runs at a common budget: there is nothing to compare."]


def result(p):
    """What the sentence says of a pair at one size."""
    d = p["difference"]
    m = p["tokens"]
    if d is None:
        return f"has one seed at {p['size']}, which gives no interval"
    other = name_of(p["b"])
    if m is None:
        return (f"ends {nats(d)} nats from {other} at {p['size']}; its budgets do not tell how many tokens that is")
    inside = f"{span(p['flops'])} times its FLOPs"
    if p["seconds"]:
        inside += f", {span(p['seconds'])} times its seconds"
    if m["beyond"]:
        inside += ", beyond the budgets it ran"
    excludes_0 = d["low"] > 0 or d["high"] < 0
    if excludes_0 and p["p_holm"] >= 0.05:
        inside += f", not decided: p = {p['p_holm']:.2g} by Holm's method"
    return f"needs {span(m)} times {other}'s tokens at {p['size']} ({inside})"


def equality(of_both):
    """The end of the sentence if two families cannot be told apart at any size."""
    off = 0.0
    for p in of_both:
        m = p["tokens"]
        if not m or not m["low"] <= 1 <= m["high"]:
            return ""
        off = max(off, 1 - m["low"], m["high"] - 1)
    return f"; they cannot be told apart, and are equal within {math.ceil(100 * off)}%"


def span(m):
    """0.98 (0.95 .. 1.01)"""
    digits = 2 if m["value"] < 10 else 0
    return f"{m['value']:.{digits}f} ({m['low']:.{digits}f} .. {m['high']:.{digits}f})"


def nats(d):
    """+0.0028 (-0.0036 .. +0.0091)"""
    return f"{d['mean']:+.4f} ({d['low']:+.4f} .. {d['high']:+.4f})"


# --------------------------------------------------------------------------------------------------------------- tables

def loss_table(numbers):
    """Rows of the table of losses; ** marks a loss significantly below all other families of its size."""
    won = {w["size"]: w["winner"] for w in numbers["winners"]}
    beside_paper = any(e["paper_loss"] for e in numbers["table"])
    lines = []
    for e in numbers["table"]:
        line = {"family": name_of(e["model"]), "size": e["size"]}
        lines.append(line)
        if not e["losses"]:
            continue
        loss = f"{e['mean_loss']:.4f}"
        if e["sd_loss"] is not None:
            loss += f" \u00b1 {e['sd_loss']:.4f}"
        loss += f" ({len(e['losses'])})"
        if won[e["size"]] == e["model"]:
            loss = f"**{loss}"
        bits = e["bits_per_byte"]
        line |= {"parameters": human(e["parameters"], 4), "tokens": human(e["tokens"]), "loss": loss,
                 "bits per byte": f"{bits:.4f}" if bits else DASH, "learning rate": f"{e['learning_rate']:g}",
                 "tokens/s": f"{e['tokens_per_second']:,.0f}"}
        if beside_paper:
            line["the paper's"] = f"{e['paper_loss']:.3f}" if e["paper_loss"] else DASH
    return lines


def pair_table(numbers):
    """Rows of the table of differences and multipliers, one per budget."""
    lines = []
    for p in numbers["pairs"]:
        for row in p["budgets"]:
            d = row["difference"]
            n, m = row["seeds"]
            line = {"pair": f"{name_of(p['a'])} / {name_of(p['b'])}", "at": p["size"],
                    "after": human(row["tokens_each"]), "seeds": str(n) if n == m else f"{n}, {m}",
                    "loss minus the other's": nats(d) if d else "one seed: no interval"}
            lines.append(line)
            if not d:
                continue
            for kind in ("tokens", "FLOPs", "seconds"):
                multiplier = row[kind.lower()]
                line[kind] = span(multiplier) if multiplier else DASH
            is_main = row["tokens_each"] == p["tokens_each"]
            line["p, Holm"] = f"{p['p_holm']:.2g}" if is_main else DASH
            line["SE (df)"] = f"{d['se']:.4f} ({d['df'] or math.inf:.0f})"
            parts = [f"{d[part]:.4f}" for part in ("seeds_se", "documents_se", "rates_se")]
            line["of it seeds, files, rates"] = ", ".join(parts)
    return lines


def code_table(numbers):
    lines = []
    for c in numbers["code"]:
        changed = DASH
        if c["changed_files"] is not None:
            changed = ", ".join(c["changed_files"]) or "none"
        lines.append({"code": c["code"], "commit": (c["commit"] or DASH)[:12], "runs": c["runs"], "used": c["used"],
                      "files that differ from the first": changed})
    return lines


# ---------------------------------------------------------------------------------------------------------------- lists

def short_lines(numbers):
    """What the page says at its top, below the sentences."""
    used = f"{numbers['runs_used']} of {numbers['planned']} runs are used"
    if numbers["left_out"]:
        used += "; the others are listed below with the reason"
    lines = [f"{used}."]
    if len(numbers["code"]) > 1:
        how = "only runs of one version are compared"
        if numbers["accepted_code"]:
            accepted = ", ".join(numbers["accepted_code"])
            how = f"those of {accepted} are compared with the others because of --accept_code"
        lines.append(f"The runs have {len(numbers['code'])} versions of the code, listed below; {how}.")
    for w in numbers["winners"]:
        lines.append(f"{w['size']}: {w['reason']}.")
    for kind, hours in numbers["cost"]["hours"].items():
        lines.append(f"All used runs together took {hours:.2f} {kind}.")
    wall = numbers["cost"]["wall"]
    if wall:
        lines.append(f"At least one of them was under way for {runner.hours(3600 * wall)}.")
    return lines


def note_lines(numbers):
    """What is said of each family's losses, and of the schedule."""
    lines = []
    for e in numbers["table"]:
        at = f"{e['size']}, {name_of(e['model'])}"
        lines += [f"{at}: {note}." for note in e["notes"]]
        tried = [f"{rate} diverged" if loss is None else f"{rate} {loss:.4f}"
                 for rate, loss in e["learning_rates_tried"].items()]
        if tried:
            lines.append(f"{at}: learning rates tried for {human(e['learning_rates_tried_tokens'])} tokens, with the "
                         f"loss on the first half of the files: {', '.join(tried)}.")
    for c in numbers["cosines"]:
        lines.append(f"{c['size']}, {name_of(c['model'])}: a cosine to 0 with the same length, seed and rate ends at "
                     f"{c['cosine']:.4f} after {human(c['tokens'])} tokens, this schedule at {c['wsd']:.4f}.")
    return lines


def crossing_lines(numbers):
    """Where the curves of two families cross, and how their difference changes, in sentences."""
    lines = []
    others = 0
    is_duel = len(numbers["pairs"]) <= 3
    for p in numbers["pairs"]:
        at = f"{p['size']}, {name_of(p['a'])} / {name_of(p['b'])}"
        if not p["rates_known"]:
            lines.append(f"{at}: the search does not show the error of the chosen rates, so the interval lacks it.")
        d = p["difference"]
        if not d or len(p["budgets"]) < 2:
            continue
        may_be_0 = d["low"] <= 0 <= d["high"]
        if not (p["crossings"] or may_be_0 or is_duel):
            others += 1
            continue
        if p["crossings"]:
            where = f"cross at about {' and '.join(map(human, p['crossings']))} tokens"
        else:
            first, *_, last = (human(row["tokens_each"]) for row in p["budgets"])
            where = f"do not cross between {first} and {last} tokens"
        if p["trend"]:
            where += f"; the difference changes by {nats(p['trend'])} nats per doubling of the tokens"
        lines.append(f"{at}: the mean curves {where}.")
    if others:
        lines.append(f"{others} other pairs of mean curves do not cross.")
    return lines


def paper_lines(numbers):
    """What the paper claims of Longhorn and Mamba, in nats of this sweep, and what its Table 1 amounts to in tokens."""
    pairs = [p for p in numbers["pairs"] if (p["a"], p["b"]) == ("longhorn", "mamba") and p["of_claim"]]
    if not pairs:
        return []
    claimed = []
    for p in pairs:
        for row in p["budgets"]:
            if row["of_claim"] and row["tokens_each"] >= p["tokens_each"]:
                claimed.append(f"{-row['of_claim']:.3f} nats at {p['size']} after {human(row['tokens_each'])} tokens")
    gaps = []
    times = []  # tokens that the gap is worth
    beta = fit.EPOCH["beta"]
    for cell, loss in PAPER["longhorn"].items():
        gap = PAPER["mamba"][cell] - loss
        tokens = PAPER_TOKENS[cell.split()[0]]
        slope = beta * fit.EPOCH["B"] / tokens**beta  # nats per e-fold of tokens
        gaps.append(gap)
        times.append(math.exp(gap / slope))
    return [
        f"The paper says that Longhorn has {CLAIM:g} times Mamba's sample efficiency (Figure 1: 1.3B parameters, 100B "
        f"tokens). Here that would be a difference of {', '.join(claimed)}.",
        f"In the paper's Table 1 Longhorn ends {min(gaps):.3f} to {max(gaps):.3f} nats below Mamba. By the law of "
        f"Besiroglu et al. 2024 this is worth {min(times):.2f} to {max(times):.2f} times the tokens."]


def repeat_lines(numbers):
    """How the sweep is repeated: commands, machines, days, versions."""
    again = f"python experiments/sweep.py report results/{numbers['name']}.json"
    if numbers["accepted_code"]:
        again += f" --accept_code={','.join(numbers['accepted_code'])}"
    versions = numbers["versions"]
    return [*numbers["commands"], f"the report, from the records alone: {again}",
            "every run: points.csv; every number: report.json, which this writes",
            f"machine: {'; '.join(numbers['devices']) or numbers['machine'] or 'unknown'}",
            f"runs begun: {' to '.join(numbers['begun']) or 'unknown'}",
            f"torch {', '.join(versions['torch'])}, Python {', '.join(versions['python'])}"]


# ----------------------------------------------------------------------------------------------------------------- page

LOSSES = """\
Nats per token, mean \u00b1 standard deviation over seeds (number of seeds), on all {files} held-out files; the learning
rates were chosen on the first half of them, with other seeds. Where the data does not mark files, eight equal stretches
stand in for them. Every run decayed its learning rate to 0.
Bold: significantly below all other families of its size (5%, with Holm's correction)."""
DIFFERENCES = """\
In brackets: 95% intervals, over seeds, held-out files and the choice of the learning rates: SE times the quantile of
Student's t with these degrees of freedom on either side. The squares of the three parts add up to that of the SE; a
part of files that is estimated below 0 is shown as 0. Tokens: the first family needs this many times the other's tokens
to reach the other's loss at the budget in the row, read off the better one's curve over budgets; below 1 the first is
better. FLOPs and seconds: the same, times the cost per token of each; compare seconds only between runs on an otherwise
idle machine. If the interval contains 1, the two cannot be told apart and are equal within its ends. The intervals are
per pair; p is corrected by Holm's method for all pairs of this page. Only the learning rate was tuned per family."""

def page(numbers, picture):
    """The page as blocks of Markdown; `picture`: the line that shows the figure, if there is one."""
    losses = ["There is no usable run."]
    if numbers["runs_used"]:
        losses = titled(LOSSES.format(files=numbers["files"]), loss_table(numbers))
    beside = []
    if lines := paper_lines(numbers):
        beside = ["## Beside the paper", listed(lines)]
    code = "A run's code is identified by the content of the files that it imported."
    if numbers["accepted_code"]:
        accepted = escaped(", ".join(numbers["accepted_code"]))
        code += f" Runs of {accepted} are compared with the first because of --accept_code."
    left_out = [f"{why} ({len(names)}): {', '.join(names)}" for why, names in numbers["left_out"].items()]
    return [
        f"# Scaling sweep {escaped(numbers['name'])}",
        "## In short", *map(bold, numbers["sentences"]), listed(short_lines(numbers)), picture,
        "## Losses", *losses, listed(note_lines(numbers)),
        *titled(f"## Differences and multipliers\n\n{DIFFERENCES}", pair_table(numbers)),
        listed(crossing_lines(numbers)),
        *beside,
        "## Code and runs left out", code, table(code_table(numbers)),
        "These runs enter no mean and no figure." if left_out else "No run was left out.", listed(left_out),
        "## To repeat it", listed(repeat_lines(numbers))]


def write(source, out=None, accept_code=(), save_it=False, style=None):
    """Write the report on a sweep's folder or saved file and print its sentences. Returns {name: path}.

    Args:
        out: output folder (default: the sweep's folder, or out/<name>_report for a saved file).
        accept_code: versions of the code that are compared with the most frequent one.
        save_it: also write results/<name>.json, and page, table of runs and figure to results/<name>/.
        style: a .mplstyle file applied over pages.STYLE.
    Raises ConfigError if there is no sweep, OSError if `out` cannot be written.
    """
    source = Path(source)
    if style and not Path(style).is_file():
        raise ConfigError(f"--style={style}: there is no such file")
    runs = records.read(source, accept_code, "scaling")
    runs = runs.reindex(columns=list(dict.fromkeys([*runs, *POINTS, *READ])))  # older records lack some
    entries = collect(runs)
    numbers = numbers_of(runs, entries, list(accept_code))
    name = numbers["name"]
    if out is None:
        out = REPO / "out" / f"{name}_report" if source.is_file() else source
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "report.json", numbers)
    points = runs[list(POINTS)].rename(columns={"val_loss": "loss", "val_bits_per_byte": "bits_per_byte",
                                                "block_size": "context", "left_out": "status"})
    points["status"] = points.status.mask(points.status == "", "used")
    points.to_csv(out / "points.csv", index=False)
    kept = ["points.csv", "report.md"]
    shown = ""
    picture = None
    if alt := "; ".join(figures.in_words(entries, numbers["pairs"])):
        kept.append("figure.png")
        picture = out / "figure.png"
        figures.draw(entries, numbers["pairs"], picture, style)
        shown = pages.shown(picture, alt)
    pages.write(out / "report.md", page(numbers, shown), picture)
    paths = {file: out / file for file in ("report.json", *kept, "report.html")}
    if save_it:
        folder = REPO / "results" / name
        folder.mkdir(parents=True, exist_ok=True)
        if out.resolve() != folder:
            for file in kept:
                shutil.copyfile(out / file, folder / file)
        paths |= {"saved": folder.with_name(f"{name}.json"), "pages": folder}
        records.save(source, paths["saved"])
    print(*numbers["sentences"], sep="\n")
    return paths
