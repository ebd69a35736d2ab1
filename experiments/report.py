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

    at_main = functools.cached_property(lambda self: self.at(self.main))
    losses = property(lambda self: self.at_main.val_loss.tolist())
    mean = property(lambda self: statistics.fmean(self.losses) if self.losses else None)
    sd = property(lambda self: statistics.stdev(self.losses) if len(self.losses) > 1 else None)
    first = functools.cached_property(lambda self: self.at_main.iloc[0])
    weights = property(lambda self: self.first.val_document_tokens)  # tokens of each held-out document
    documents = functools.cached_property(lambda self: self.by_seed("val_document_losses", np.asarray))

    def at(self, tokens):
        return self.runs[self.runs.tokens == tokens].sort_values("seed")

    def by_seed(self, column, show=float):
        """{tokens: {seed: value in the column}}"""
        return {int(tokens): {int(seed): show(value) for seed, value in zip(group.seed, group[column], strict=True)}
                for tokens, group in self.runs.sort_values("seed").groupby("tokens")}

    def trend(self, budgets):
        """{seed: nats by which each document's loss changes per doubling of the tokens}, for seeds with all budgets."""
        x = np.log2(np.array(budgets) / budgets[0])
        slope = (x - x.mean()) / ((x - x.mean()) @ (x - x.mean()))
        seeds = sorted(set.intersection(*(set(self.documents.get(t, ())) for t in budgets)))
        return {seed: slope @ np.array([self.documents[t][seed] for t in budgets]) for seed in seeds}

    def log_seconds(self):
        """log(seconds per token) of each seed."""
        return np.log(self.at_main.seconds / self.at_main.tokens).tolist()


def collect(runs):
    """[Entry], one per family and size in the plan."""
    entries = [entry_of(model, size, cells) for (model, size), cells in runs.groupby(["model", "size"], sort=False)]
    models = [*runs.attrs.get("models", ()), *sorted((e.model for e in entries), key=family_order)]
    order, parameters = list(dict.fromkeys(models)), {}
    for e in entries:
        of_size = [o for o in entries if o.size == e.size and len(o.runs)]
        common = set.intersection(*(set(o.runs.tokens) for o in of_size)) if of_size else ()
        e.main = int(max(common, key=lambda t: (min((o.runs.tokens == t).sum() for o in of_size), t), default=0))
        if of_size and not common:
            e.notes.append("the families of this size have no budget in common: nothing is compared")
        parameters[e.size] = statistics.median([n for o in of_size for n in o.runs.parameters] or [math.inf])
    entries.sort(key=lambda e: (parameters[e.size], e.size, order.index(e.model)))
    searched = {}
    for e in entries:
        if e.search:
            searched[e.model] = e
            if e.main > 3 * e.tried_tokens:  # usually 2
                e.notes.append(f"the learning rate was chosen after {human(e.tried_tokens)} tokens: intervals have the "
                               "error of this search, but longer runs may want another rate")
        elif e.rate and (before := searched.get(e.model)):
            e.search, e.search_noise = before.search, before.search_noise
            e.notes.append(f"the learning rate is that of {before.size}, scaled by 1 / width: intervals have the error "
                           "of its search, not that of the scaling")
    return entries


def entry_of(model, size, cells):
    """The Entry of a family's runs at a size; `main` is set by collect."""
    search, notes, searched = {}, [], cells[cells.stage == "search"]
    for run in searched.itertuples():
        if not run.left_out or "diverged" in run.left_out:
            loss = math.inf if run.left_out else run.loss_of_choosing_files
            search.setdefault(run.learning_rate, {})[run.seed] = loss
    best = compare.best_rate({rate: list(losses.values()) for rate, losses in search.items()})
    if best and best.beyond:
        notes.append(f"the best learning rate, {best.rate:g}, is still at the edge of those tried")
    planned = cells[cells.stage == "seed"]
    runs = planned[planned.left_out == ""]
    rates, missing = Counter(runs.learning_rate), planned.seed.nunique() - runs.seed.nunique()
    rate = max(rates, key=rates.get, default=None)
    if not rates:
        notes.append("no usable run, see below")
    elif len(rates) > 1:
        notes.append(f"seeds ran at several rates, {', '.join(f'{r:g}' for r in rates)}: those at {rate:g} count")
    if rates and missing:
        notes.append(f"{missing} of {planned.seed.nunique()} planned seeds have no usable run yet")
    runs = runs[runs.learning_rate == rate]
    runs = runs.iloc[np.argsort(pandas.factorize(runs.tokens)[0], kind="stable")]  # budget by budget, as planned
    runs.attrs = {}  # pandas copies them deeply with each selection
    tried = {rate: loss if math.isfinite(loss) else None for rate, loss in best.tried.items()} if best else {}
    alike = runs[runs.tokens.isin(searched.tokens)].loss_of_choosing_files
    noise = (alike.var(), len(alike) - 1) if len(alike) > 1 else (0.0, 0)
    return Entry(model, size, runs, rate=rate, tried=tried, tried_tokens=int(searched.tokens.max()) if tried else 0,
                 notes=notes, search=search, search_noise=noise)


# -------------------------------------------------------------------------------------------------------------- numbers

def compared(entries):
    """([dict] of the first family against every other one per size: difference and multipliers at the compared budget,
    the same at every `budgets`, and how the difference changes with them; [dict] of which family is below all others,
    per size)."""
    pairs, winners = [], []
    for size in dict.fromkeys(e.size for e in entries):
        of_size = {name_of(e.model): e for e in entries if e.size == size and e.losses}
        main = next((e.main for e in of_size.values()), 0)
        at_main = lambda a, b, of_size=of_size, main=main: difference(of_size.values(), of_size[a], of_size[b], main)
        won = compare.winner({name: e.mean for name, e in of_size.items()},
                             lambda a, b, at_main=at_main: (d := at_main(a, b)) and d.p)
        winners.append({"size": size, "winner": won.family and of_size[won.family].model, "reason": won.reason,
                        "p": {of_size[name].model: p for name, p in won.p.items()}})
        first = name_of(entries[0].model)
        for other in list(of_size)[1:] if next(iter(of_size), None) == first else ():
            pairs.append(pair(of_size.values(), of_size[first], of_size[other]))
    corrected = compare.holm({i: p["difference"] and p["difference"]["p"] for i, p in enumerate(pairs)})
    return [p | {"p_holm": corrected[i]} for i, p in enumerate(pairs)], winners


def difference(families, a, b, tokens, losses_of=None):
    """The compare.Difference of a's and b's losses at a budget, or of losses_of(Entry), {seed: losses (documents,)};
    families: all of the size, over which the SD is pooled."""
    losses_of = losses_of or (lambda e: e.documents.get(tokens, {}))
    x, y = losses_of(a), losses_of(b)
    if not (x and y):
        return None
    rows = lambda losses: np.array(list(losses.values()))
    pooled = compare.pooled_sd([rows(z) @ a.weights / a.weights.sum() for z in map(losses_of, families) if z])
    rates = rate_variance(a, b) if tokens else None
    return compare.difference(rows(x), rows(y), a.weights, pooled, x.keys() == y.keys(), rates)


def rate_variance(a, b):
    """compare.rate_variance of two Entries."""
    noise = [e.search_noise for e in (a, b)]
    df = sum(df for _, df in noise)
    return compare.rate_variance(a.search, b.search, (sum(v * df for v, df in noise) / df, df) if df else None)


def pair(families, a, b):
    """What the report says of two Entries; families: all of the size."""
    flops = math.log((a.first.flops / a.first.tokens) / (b.first.flops / b.first.tokens))
    seconds, w = compare.welch(a.log_seconds(), b.log_seconds()), a.weights / a.weights.sum()
    budgets, rows = sorted(a.documents.keys() & b.documents.keys()), []
    for tokens in budgets:
        d = difference(families, a, b, tokens)
        pooled = {t: compare.pooled_sd([c @ w for e in families if len(c := compare.changes(e.documents, t, tokens))])
                  for t in budgets}
        curves = [compare.Curve(e.documents, tokens, w, pooled) for e in (a, b)]
        m = compare.multiplier(d, *curves)
        kinds = {"difference": d, "tokens": m, "flops": compare.times(m, flops), "seconds": seconds and compare.times(
            m, seconds.mean, seconds.high - seconds.mean)}
        rows.append({"tokens_each": tokens, "seeds": [len(e.documents[tokens]) for e in (a, b)],
                     **{kind: value and value._asdict() for kind, value in kinds.items()},
                     "of_claim": curves[0].rise(-math.log(CLAIM)) if curves[0].known else None})
    shorter = [t for t in budgets if t <= a.main]
    trend = difference(families, a, b, None, lambda e: e.trend(shorter)) if shorter[1:] else None
    means = [(math.log(r["tokens_each"]), r["difference"]["mean"]) for r in rows if r["difference"]]
    crossings = [math.exp(x + (at - x) * y / (y - above)) for (x, y), (at, above) in itertools.pairwise(means)
                 if y * above < 0]
    return {"size": a.size, "a": a.model, "b": b.model, **next(r for r in rows if r["tokens_each"] == a.main),
            "rates_known": rate_variance(a, b) is not None,
            "trend": trend and trend._asdict(), "crossings": crossings, "budgets": rows}


def cosines(runs, entries):
    """[{"model", "size", "tokens", "cosine", "wsd"}]: losses of both schedules with the same seed, rate and budget."""
    same = ["model", "size", "tokens", "seed", "learning_rate"]
    lines = runs[(runs.left_out == "") & (runs.stage == "cosine")].merge(
        pandas.concat([runs[:0], *(e.runs for e in entries)]), on=same, suffixes=("", "_wsd"))
    return [{"model": r.model, "size": r.size, "tokens": r.tokens, "cosine": r.val_loss, "wsd": r.val_loss_wsd}
            for r in lines.itertuples()]


def hours_of(used):
    """{'GPU hours' or 'CPU hours': processes x hours}; a branch counts from the step it branched at."""
    hours = (1 - used["from"] / used.steps) * used.seconds * used.processes / 3600
    return hours.groupby(np.where(used.device == used.cpu, "CPU hours", "GPU hours")).sum().to_dict()


def wall_hours(used):
    """Hours during which at least one run was under way; None if some run does not say when it began."""
    begun = pandas.to_datetime(used.time, utc=True, errors="coerce")
    if begun.isna().any():
        return None
    spent, last = 0.0, -math.inf
    seconds = (1 - used["from"] / used.steps) * used.seconds
    for begin, end in sorted((t.timestamp(), t.timestamp() + s) for t, s in zip(begun, seconds, strict=True)):
        spent, last = spent + max(0.0, end - max(begin, last)), max(last, end)
    return spent / 3600


def numbers_of(runs, entries, accepted):
    """The content of report.json."""
    used, plan, left_out = runs[runs.left_out == ""], runs.attrs, runs[runs.left_out != ""]
    rows = [{"model": e.model, "size": e.size, "learning_rate": e.rate, "learning_rates_tried": e.tried,
             "learning_rates_tried_tokens": e.tried_tokens,
              "mean_loss": e.mean, "sd_loss": e.sd, "losses": e.by_seed("val_loss").get(e.main, {}),
              "notes": e.notes, "budgets": e.by_seed("val_loss"),
              "paper_loss": PAPER.get(e.model, {}).get(e.size) if plan.get("paper") is True else None}
             | ({"parameters": e.first.parameters, "tokens": e.main, "context": e.first.block_size,
                 "bits_per_byte": e.mean * bits / e.first.val_loss if (bits := e.first.val_bits_per_byte) > 0 else None,
                 "flops": e.first.flops, "tokens_per_second": math.exp(-statistics.fmean(e.log_seconds()))}
                if e.losses else {})
             for e in entries]
    pairs, winners = compared(entries)
    numbers = {
        **{key: plan.get(key) for key in ("name", "preset", "paper", "machine", "cores")},
        "commands": plan.get("commands", []), "planned": len(runs), "runs_used": len(used),
        "left_out": {why: group.run.tolist() for why, group in left_out.groupby("left_out", sort=False)},
        "code": plan["code"], "accepted_code": accepted,
        "files": max(map(len, used.val_document_tokens), default=0), "table": rows, "pairs": pairs,
        "sentences": sentences(pairs), "cosines": cosines(runs, entries), "winners": winners,
        "cost": {"hours": hours_of(used), "wall": wall_hours(used)},
        "begun": sorted(time[:10] for time in used.time if time)[::max(1, len(used) - 1)],
        "devices": sorted({f"{r.device}, {r.processes} process(es)" for r in used.itertuples()}),
        "versions": {key: sorted(set(used[key].dropna())) for key in ("torch", "python")}}
    text = json.dumps(numbers, default=lambda number: number.item())
    return json.loads(text, parse_constant=lambda name: None)  # what is not finite is null


def sentences(pairs):
    """A sentence per pair of families: the result of the sweep."""
    texts = []
    for a, b in dict.fromkeys((p["a"], p["b"]) for p in pairs):
        parts, ends = [], []
        for p in (p for p in pairs[::-1] if (p["a"], p["b"]) == (a, b)):  # largest size first
            d, m = p["difference"], p["tokens"]
            ends.append(m and (m["low"], m["high"]))
            if d is None:
                parts.append(f"has one seed at {p['size']}, which gives no interval")
            elif m is None:
                parts.append(f"ends {d['mean']:+.4f} ({d['low']:+.4f} .. {d['high']:+.4f}) nats from {name_of(b)} at "
                             f"{p['size']}; its budgets do not tell how many tokens that is")
            else:
                beyond = ", beyond the budgets it ran" * m["beyond"]
                if (d["low"] > 0 or d["high"] < 0) and p["p_holm"] >= 0.05:
                    beyond += f", not decided: p = {p['p_holm']:.2g} by Holm's method"
                seconds = p["seconds"] and f", {span(p['seconds'])} times its seconds"
                parts.append(f"needs {span(m)} times {name_of(b)}'s tokens at {p['size']} ({span(p['flops'])} times "
                             f"its FLOPs{seconds or ''}{beyond})")
        equal = all(e and e[0] <= 1 <= e[1] for e in ends)
        within = math.ceil(100 * max(max(1 - low, high - 1) for low, high in ends)) if equal else 0
        tail = f"; they cannot be told apart, and are equal within {within}%" * equal
        texts.append(f"{name_of(a)} {'; '.join(parts)}{tail}.")
    return texts or ["No two families have usable runs at a common budget: there is nothing to compare."]


def span(m):
    """0.98 (0.95 .. 1.01)"""
    digits = 2 if m["value"] < 10 else 0
    return f"{m['value']:.{digits}f} ({m['low']:.{digits}f} .. {m['high']:.{digits}f})"


# --------------------------------------------------------------------------------------------------------------- tables

def loss_table(numbers):
    """Rows of the table of losses; ** marks a loss significantly below all other families of its size."""
    won, rows = {w["size"]: w["winner"] for w in numbers["winners"]}, []
    for e in numbers["table"]:
        rows.append({"family": name_of(e["model"]), "size": e["size"]})
        if e["losses"]:
            mark, bits = "**" * (won[e["size"]] == e["model"]), e["bits_per_byte"]
            spread = f" \u00b1 {e['sd_loss']:.4f}" if e["sd_loss"] is not None else ""
            rows[-1] |= {"parameters": human(e["parameters"], 4), "tokens": human(e["tokens"]),
                         "loss": f"{mark}{e['mean_loss']:.4f}{spread} ({len(e['losses'])})",
                         "bits per byte": f"{bits:.4f}" if bits else DASH, "learning rate": f"{e['learning_rate']:g}",
                         "tokens/s": f"{e['tokens_per_second']:,.0f}"}
            if any(other["paper_loss"] for other in numbers["table"]):
                rows[-1]["the paper's"] = f"{e['paper_loss']:.3f}" if e["paper_loss"] else DASH
    return rows


def pair_table(numbers):
    """Rows of the table of differences and multipliers, one per budget."""
    rows = []
    for p, r in itertools.chain.from_iterable(itertools.product([p], p["budgets"]) for p in numbers["pairs"]):
        d, (n, m) = r["difference"], r["seeds"]
        rows.append({"pair": f"{name_of(p['a'])} / {name_of(p['b'])}", "at": p["size"],
                     "after": human(r["tokens_each"]), "seeds": str(n) if n == m else f"{n}, {m}",
                     "loss minus the other's": nats(d) if d else "one seed: no interval"})
        if d:
            times = {key: r[key.lower()] for key in ("tokens", "FLOPs", "seconds")}
            rows[-1] |= {**{key: span(m) if m else DASH for key, m in times.items()},
                         "p, Holm": f"{p['p_holm']:.2g}" if r["tokens_each"] == p["tokens_each"] else DASH,
                         "SE (df)": f"{d['se']:.4f} ({d['df'] or math.inf:.0f})", "of it seeds, files, rates":
                         ", ".join(f"{d[part + '_se']:.4f}" for part in ("seeds", "documents", "rates"))}
    return rows


def nats(d):
    """+0.0028 (-0.0036 .. +0.0091)"""
    return f"{d['mean']:+.4f} ({d['low']:+.4f} .. {d['high']:+.4f})"


def crossing_lines(numbers):
    """Where the curves of two families cross, and how their difference changes, in sentences."""
    lines, others = [], 0
    for p in numbers["pairs"]:
        d, at = p["difference"], f"{p['size']}, {name_of(p['a'])} / {name_of(p['b'])}"
        if not p["rates_known"]:
            lines.append(f"{at}: the search does not show the error of the chosen rates, so the interval lacks it.")
        if not (d and p["budgets"][1:]):
            continue
        if not (p["crossings"] or d["low"] <= 0 <= d["high"] or len(numbers["pairs"]) <= 3):  # in a duel, all
            others += 1
            continue
        where = f"cross at about {' and '.join(map(human, p['crossings']))} tokens" if p["crossings"] else (
            f"do not cross between {human(p['budgets'][0]['tokens_each'])} and "
            f"{human(p['budgets'][-1]['tokens_each'])} tokens")
        trend = f"; the difference changes by {nats(p['trend'])} nats per doubling of the tokens" if p["trend"] else ""
        lines.append(f"{at}: the mean curves {where}{trend}.")
    return lines + [f"{others} other pairs of mean curves do not cross."] * bool(others)


def paper_lines(numbers):
    """What the paper claims of Longhorn and Mamba, in nats of this sweep, and what its Table 1 amounts to in tokens."""
    pairs = [p for p in numbers["pairs"] if (p["a"], p["b"]) == ("longhorn", "mamba") and p["of_claim"]]
    claimed = [f"{-r['of_claim']:.3f} nats at {p['size']} after {human(r['tokens_each'])} tokens"
               for p in pairs for r in p["budgets"] if r["of_claim"] and r["tokens_each"] >= p["tokens_each"]]
    gaps = {cell: PAPER["mamba"][cell] - loss for cell, loss in PAPER["longhorn"].items()}
    slope = lambda tokens: fit.EPOCH["beta"] * fit.EPOCH["B"] / tokens ** fit.EPOCH["beta"]  # nats per e-fold of tokens
    times = [math.exp(gap / slope(PAPER_TOKENS[cell.split()[0]])) for cell, gap in gaps.items()]
    return pairs and [
        f"The paper says that Longhorn has {CLAIM:g} times Mamba's sample efficiency (Figure 1: 1.3B parameters, 100B "
        f"tokens). Here that would be a difference of {', '.join(claimed)}.",
        f"In the paper's Table 1 Longhorn ends {min(gaps.values()):.3f} to {max(gaps.values()):.3f} nats below Mamba. "
        f"By the law of Besiroglu et al. 2024 this is worth {min(times):.2f} to {max(times):.2f} times the tokens."]


def code_table(numbers):
    return [{"code": c["code"], "commit": (c["commit"] or DASH)[:12], "runs": c["runs"], "used": c["used"],
             "files that differ from the first": DASH if c["changed_files"] is None
             else ", ".join(c["changed_files"]) or "none"} for c in numbers["code"]]


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
    accepted, n = ", ".join(numbers["accepted_code"]), len(numbers["code"])
    code = "A run's code is identified by the content of the files that it imported."
    if accepted:
        code += f" Runs of {escaped(accepted)} are compared with the first because of --accept_code."
    short, notes = [f"{numbers['runs_used']} of {numbers['planned']} runs are used"
                          + ("; the others are listed below with the reason." if numbers["left_out"] else ".")], []
    if n > 1:
        short.append(f"The runs have {n} versions of the code, listed below; " + (
            f"those of {accepted} are compared with the others because of --accept_code." if accepted
            else "only runs of one version are compared."))
    short += [f"{w['size']}: {w['reason']}." for w in numbers["winners"]]
    wall = numbers["cost"]["wall"]
    short += [f"All used runs together took {hours:.2f} {kind}." for kind, hours in numbers["cost"]["hours"].items()]
    short += [f"At least one of them was under way for {runner.hours(3600 * wall)}."] * bool(wall)
    for e in numbers["table"]:
        at = f"{e['size']}, {name_of(e['model'])}"
        tried = ", ".join(rate + (" diverged" if loss is None else f" {loss:.4f}")
                          for rate, loss in e["learning_rates_tried"].items())
        notes += [f"{at}: {note}." for note in e["notes"]]
        if tried:
            tokens = human(e["learning_rates_tried_tokens"])
            notes.append(f"{at}: learning rates tried for {tokens} tokens, with the loss on the first half of the "
                         f"files: {tried}.")
    notes += [f"{c['size']}, {name_of(c['model'])}: a cosine to 0 with the same length, seed and rate ends at "
              f"{c['cosine']:.4f} after {human(c['tokens'])} tokens, this schedule at {c['wsd']:.4f}."
              for c in numbers["cosines"]]
    left_out = [f"{why} ({len(names)}): {', '.join(names)}" for why, names in numbers["left_out"].items()]
    accept = f" --accept_code={','.join(numbers['accepted_code'])}" * bool(numbers["accepted_code"])
    repeat = [*numbers["commands"], "the report, from the records alone: python experiments/sweep.py report "
              f"results/{numbers['name']}.json{accept}",
              "every run: points.csv; every number: report.json, which this writes",
              f"machine: {'; '.join(numbers['devices']) or numbers['machine'] or 'unknown'}",
              f"runs begun: {' to '.join(numbers['begun']) or 'unknown'}",
              "torch {}, Python {}".format(*(", ".join(numbers["versions"][key]) for key in ("torch", "python")))]
    return [
        f"# Scaling sweep {escaped(numbers['name'])}",
        "## In short", *map(bold, numbers["sentences"]), listed(short), picture,
        "## Losses", *(titled(LOSSES.format(files=numbers["files"]), loss_table(numbers)) if numbers["runs_used"] else
                       ["There is no usable run."]), listed(notes),
        *titled(f"## Differences and multipliers\n\n{DIFFERENCES}", pair_table(numbers)),
        listed(crossing_lines(numbers)),
        *(["## Beside the paper", listed(lines)] if (lines := paper_lines(numbers)) else []),
        "## Code and runs left out", code, table(code_table(numbers)),
        "These runs enter no mean and no figure." if left_out else "No run was left out.",
        listed(left_out),
        "## To repeat it", listed(repeat)]


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
    out = Path(out or (REPO / "out" / f"{numbers['name']}_report" if source.is_file() else source))
    out.mkdir(parents=True, exist_ok=True)
    names, alt = ["points.csv", "report.md"], "; ".join(figures.in_words(entries, numbers["pairs"]))
    write_json(out / "report.json", numbers)
    points = runs[list(POINTS)].rename(columns={"val_loss": "loss", "val_bits_per_byte": "bits_per_byte",
                                                "block_size": "context", "left_out": "status"})
    points.assign(status=points.status.mask(points.status == "", "used")).to_csv(out / "points.csv", index=False)
    if alt:
        names.append("figure.png")
        figures.draw(entries, numbers["pairs"], out / "figure.png", style)
    picture = out / "figure.png" if alt else None
    pages.write(out / "report.md", page(numbers, pages.shown(picture, alt) if alt else ""), picture)
    paths = {name: out / name for name in ("report.json", *names, "report.html")}
    if save_it:
        folder = REPO / "results" / numbers["name"]
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            if out.resolve() != folder:
                shutil.copyfile(out / name, folder / name)
        paths |= {"saved": folder.with_name(f"{numbers['name']}.json"), "pages": folder}
        records.save(source, paths["saved"])
    print(*numbers["sentences"], sep="\n")
    return paths
