"""The report of a sweep: who learns from fewer tokens, by how much, how sure. Needs no GPU.

    report.json    every number                       points.csv    every run, a line each
    report.html    the page, with figures inside      table.tex     losses and multipliers, for a paper
    report.md      the same as Markdown, beside figure.png

Learning rates are judged on the first half of the held-out files; every other number is of the second half and of seeds
that chose nothing. The words are in report.j2, which writes both pages from report.json and the tables made here;
Jinja2 escapes every value, so that no name in a record can become a tag.
"""

import base64
import csv
import json
import math
import re
import shutil
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from experiments.scaling import compare, figures, fit
from experiments.scaling.figures import family_order, name_of
from experiments.scaling.runs import halves, read_sweep, save
from runtime.errors import ConfigError
from runtime.records import mixed_identities, write_json

REPO = Path(__file__).resolve().parents[2]

# The paper's Table 1: family -> size of preset paper -> loss, nats per token of OpenWebText
PAPER = {"retnet": {"120M": 3.569, "120M at 4096": 3.492, "350M": 3.362, "350M at 4096": 3.227},
         "gla": {"120M": 3.381, "120M at 4096": 3.364, "350M": 3.018, "350M at 4096": 3.001},
         "rwkv": {"120M": 3.291, "120M at 4096": 3.276, "350M": 2.983, "350M at 4096": 2.931},
         "mamba": {"120M": 3.238, "120M at 4096": 3.231, "350M": 2.902, "350M at 4096": 2.868},
         "llama": {"120M": 3.247, "120M at 4096": 3.273, "350M": 2.891, "350M at 4096": 2.883},
         "longhorn": {"120M": 3.225, "120M at 4096": 3.192, "350M": 2.888, "350M at 4096": 2.859}}
COVERAGE_DRAWS = 40  # simulated sweeps behind "intervals of this plan cover"
DASH = "\u2013"


# -------------------------------------------------------------------------------------------------------------- collect

@dataclass
class Entry:
    """A family at a size: its reported runs by budget, and how its rate was found."""

    model: str
    size: str
    runs: dict = field(default_factory=dict)  # {tokens: {seed: Run}} at the rate
    main: int = None  # tokens of the budget that is compared, the same for every family of the size
    rate: float = None
    tried: dict = field(default_factory=dict)  # {rate: mean loss on the files that choose}; None: diverged
    notes: list = field(default_factory=list)

    at_main = property(lambda self: [run for _, run in sorted(self.runs.get(self.main, {}).items())])
    losses = property(lambda self: [r.half(1) for r in self.at_main])
    mean = property(lambda self: statistics.fmean(self.losses) if self.losses else None)
    sd = property(lambda self: statistics.stdev(self.losses) if len(self.losses) > 1 else None)
    first = property(lambda self: self.at_main[0])
    weights = property(lambda self: halves(self.first.documents)[1][0])  # tokens of each reported document
    matrix = property(lambda self: np.array([halves(r.documents)[1][1] for r in self.at_main]))  # (seeds, documents)

    def curve(self):
        runs = {tokens: {seed: halves(r.documents)[1][1] for seed, r in seeds.items()}
                for tokens, seeds in self.runs.items()}
        return compare.Curve(runs, self.main, self.weights)

    def log_seconds(self):
        """(mean, standard error) of the log of seconds per token."""
        values = [math.log(r.seconds / r.tokens) for r in self.at_main]
        return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)) if values[1:] else 0.0


def collect(sweep):
    """[Entry] of every family and size in the plan."""
    cells, used, entries = {}, {r.name: r for r in sweep.runs}, []
    for name, at in sweep.plan["cells"].items():
        cells.setdefault((at["model"], at["size"]), []).append((at, used.get(name), sweep.left_out.get(name)))
    for (model, size), mine in cells.items():
        entries.append(Entry(model, size))
        fill(entries[-1], [c for c in mine if c[0]["stage"] == "search"], [c for c in mine if c[0]["stage"] == "seed"])
    order = list(dict.fromkeys([*sweep.plan.get("models", ()), *sorted((e.model for e in entries), key=family_order)]))
    parameters = {}
    for e in entries:
        of_size = [o for o in entries if o.size == e.size and o.runs]
        common = set.intersection(*(set(o.runs) for o in of_size)) if of_size else ()
        e.main = max(common, key=lambda t: (min(len(o.runs[t]) for o in of_size), t), default=None)
        if of_size and not common:
            e.notes.append("the families of this size have no budget in common: nothing is compared")
        counts = [r.parameters for o in of_size for seeds in o.runs.values() for r in seeds.values()]
        parameters[e.size] = statistics.median(counts) if counts else math.inf
    return sorted(entries, key=lambda e: (parameters[e.size], e.size, order.index(e.model)))


def fill(entry, search, seeds):
    """Rates and reported runs of an Entry, of its cells [(place in the plan, Run or None, why it was left out)]."""
    losses_by_rate = {}
    for at, run, why in search:
        if run or "diverged" in why:
            losses_by_rate.setdefault(at["learning_rate"], []).append(run.half(0) if run else math.inf)
    best = compare.best_rate(losses_by_rate)
    if best:
        entry.tried = {rate: loss if math.isfinite(loss) else None for rate, loss in best.tried.items()}
        if best.beyond:
            entry.notes.append(f"the best learning rate, {best.rate:g}, is still at the edge of those tried")
    reported = [run for _, run, _ in seeds if run]
    rates = Counter(r.learning_rate for r in reported)
    if not rates:
        entry.notes.append("no usable run, see below")
        return
    entry.rate = max(rates, key=rates.get)
    if len(rates) > 1:
        entry.notes.append(f"seeds ran at several rates, {', '.join(f'{r:g}' for r in rates)}: those at {entry.rate:g} "
                           "count")
    for r in reported:
        if r.learning_rate == entry.rate:
            entry.runs.setdefault(r.tokens, {})[r.seed] = r
    planned = {at["seed"] for at, _, _ in seeds}
    missing = len(planned) - len({r.seed for r in reported})
    if missing:
        entry.notes.append(f"{missing} of {len(planned)} planned seeds have no usable run yet")


# -------------------------------------------------------------------------------------------------------------- numbers

def compared(entries):
    """([dict] of the first family against every other one, at each size: difference and multipliers, with intervals;
    [dict] of who is below every other family, at each size)."""
    pairs, winners = [], []
    for size in dict.fromkeys(e.size for e in entries):
        of_size = {name_of(e.model): e for e in entries if e.size == size and e.losses}
        pooled = compare.pooled_sd([np.array(e.losses) for e in of_size.values()])

        def differ(a, b, of_size=of_size, pooled=pooled):
            return compare.difference(of_size[a].matrix, of_size[b].matrix, of_size[a].weights, pooled)

        won = compare.winner({name: e.mean for name, e in of_size.items()}, lambda a, b: (d := differ(a, b)) and d.p)
        winners.append({"size": size, "winner": won.family and of_size[won.family].model, "reason": won.reason,
                        "p": {of_size[name].model: p for name, p in won.p.items()}})
        first = name_of(entries[0].model)
        for other in list(of_size)[1:] if next(iter(of_size), None) == first else ():
            a, b, d = of_size[first], of_size[other], differ(first, other)
            m = compare.multiplier(d, a.curve(), b.curve())
            flops = math.log((a.first.flops / a.first.tokens) / (b.first.flops / b.first.tokens))
            (at_a, se_a), (at_b, se_b) = a.log_seconds(), b.log_seconds()
            kinds = {"difference": d, "tokens": m, "flops": compare.times(m, flops),
                     "seconds": compare.times(m, at_a - at_b, math.hypot(se_a, se_b))}
            pairs.append({"size": size, "a": a.model, "b": b.model, "tokens_each": a.main,
                          "seeds": [len(a.losses), len(b.losses)], "pooled_sd": pooled and pooled[0],
                          **{kind: value and value._asdict() for kind, value in kinds.items()}})
    return pairs, winners


def laws(entries, bootstrap):
    """[dict] per family: the law of its decayed runs, on all sizes, budgets and seeds; "cannot" where there is none."""
    rows, constants = [], ("E", "A", "alpha", "B", "beta")
    for model in dict.fromkeys(e.model for e in entries if e.runs):
        runs = [r for e in entries if e.model == model for seeds in e.runs.values() for r in seeds.values()]
        row = {"model": model, "cannot": None, "warnings": [], "coverage": None, "isoflop": None}
        N, D, L = np.array([(r.parameters, r.tokens, r.half(1)) for r in runs], float).T
        rows.append(row)
        try:
            law = fit.fit_loss(N, D, L, [r.name for r in runs], bootstrap=bootstrap)
        except fit.CannotFit as error:
            row["cannot"] = str(error)
            continue
        row |= {key: getattr(law, key) for key in (*constants, *"a floors noise points intervals warnings".split())}
        row["outliers"] = {runs[i].name: off for i, off in law.outliers.items()}
        row["isoflop"] = fit.isoflop(N, L, [r.flops for r in runs])
        if bootstrap and all(row[k] for k in constants) and not any(f["coverage"] for f in rows):  # one is enough
            row["coverage"] = fit.coverage(N, D, {k: row[k] for k in constants}, law.spread, COVERAGE_DRAWS, 60)
    return rows


def cosines(sweep, entries):
    """[{"model", "size", "cosine", "wsd"}]: the loss of a cosine run beside that of the same seed, rate and budget."""
    by = {(e.model, e.size): e.runs for e in entries}
    lines = []
    for r in sweep.runs:
        twin = by[r.model, r.size].get(r.tokens, {}).get(r.seed) if r.at["stage"] == "cosine" else None
        if twin and twin.learning_rate == r.learning_rate:
            lines.append({"model": r.model, "size": r.size, "cosine": r.half(1), "wsd": twin.half(1)})
    return lines


def hours_of(runs):
    """{'GPU hours' or 'CPU hours': processes x hours}; a branch counts from where it left its trunk."""
    kinds = Counter()
    for r in runs:
        hours = (1 - r.at.get("from", 0) / r.config["max_iters"]) * r.seconds * r.processes / 3600
        kinds["CPU hours" if r.device == r.environment["cpu"] else "GPU hours"] += hours
    return dict(kinds)


def numbers_of(sweep, entries, accepted, bootstrap):
    """The content of report.json."""
    plan, runs, reasons = sweep.plan, sweep.runs, {}
    for name, why in sweep.left_out.items():
        reasons.setdefault(why, []).append(name)
    table = [{"model": e.model, "size": e.size, "learning_rate": e.rate, "learning_rates_tried": e.tried,
              "mean_loss": e.mean, "sd_loss": e.sd, "losses": {r.seed: r.half(1) for r in e.at_main}, "notes": e.notes,
              "budgets": {t: {s: r.half(1) for s, r in sorted(seeds.items())} for t, seeds in sorted(e.runs.items())},
              "paper_loss": PAPER.get(e.model, {}).get(e.size) if plan.get("paper") is True else None}
             | ({"parameters": e.first.parameters, "tokens": e.main, "context": e.first.context,
                 "bits_per_byte": e.mean / math.log(2) if e.first.bits_per_byte else None,
                 "flops": e.first.flops, "tokens_per_second": math.exp(-e.log_seconds()[0])} if e.losses else {})
             for e in entries]
    pairs, winners = compared(entries)
    numbers = {
        "name": sweep.folder.resolve().name.removesuffix(".json"), "preset": plan.get("preset"),
        "paper": plan.get("paper"), "machine": plan.get("machine"), "cores": plan.get("cores"),
        "commands": plan.get("commands", []), "planned": len(plan["cells"]), "runs_used": len(runs),
        "left_out": reasons, "code": sweep.code, "accepted_code": accepted,
        "mixed_identities": mixed_identities(c["code"] for c in sweep.code),
        "files": max((len(r.documents[0]) for r in runs), default=0), "table": table, "pairs": pairs,
        "sentences": sentences(pairs), "cosines": cosines(sweep, entries), "winners": winners,
        "fits": laws(entries, bootstrap), "cost": {"hours": hours_of(runs)},
        "begun": sorted(r.time[:10] for r in runs if r.time)[::max(1, len(runs) - 1)],
        "devices": sorted({f"{r.device}, {r.processes} process(es)" for r in runs}),
        "versions": {key: sorted({str(r.environment[key]) for r in runs if r.environment.get(key)})
                     for key in ("torch", "python")}}
    return json.loads(json.dumps(numbers), parse_constant=lambda name: None)  # what is not finite is null


def sentences(pairs):
    """A sentence per pair of families: what the sweep was made for."""
    texts = []
    for a, b in dict.fromkeys((p["a"], p["b"]) for p in pairs):
        parts, ends = [], []
        for p in (p for p in pairs[::-1] if (p["a"], p["b"]) == (a, b)):  # the largest size first
            d, m = p["difference"], p["tokens"]
            ends.append(m and (m["low"], m["high"]))
            if d is None:
                parts.append(f"has one seed at {p['size']}, which gives no interval")
            elif m is None:
                parts.append(f"ends {d['mean']:+.4f} ({d['low']:+.4f} .. {d['high']:+.4f}) nats from {name_of(b)} at "
                             f"{p['size']}, with one budget and so no multiplier")
            else:
                beyond = ", beyond the budgets it ran" * m["beyond"]
                parts.append(f"needs {span(m)} times {name_of(b)}'s tokens at {p['size']} ({span(p['flops'])} times "
                             f"its FLOPs, {span(p['seconds'])} times its seconds{beyond})")
        equal = all(e and e[0] <= 1 <= e[1] for e in ends)
        within = f"{max(max(1 - low, high - 1) for low, high in ends):.0%}" if equal else ""
        tail = f"; they cannot be told apart, and are equal within {within}" * equal
        texts.append(f"{name_of(a)} {'; '.join(parts)}{tail}.")
    return texts or ["No two families have usable runs at a common budget: there is nothing to compare."]


def span(m):
    """0.98 (0.95 .. 1.01)"""
    digits = 2 if m["value"] < 10 else 0
    return f"{m['value']:.{digits}f} ({m['low']:.{digits}f} .. {m['high']:.{digits}f})"


# --------------------------------------------------------------------------------------------------------------- tables

def human(n, digits=3):
    """1485888 as 1.49M."""
    n = float(f"{n:.{digits}g}")
    unit, scale = next((u for u in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)) if n >= u[1]), ("", 1))
    return f"{n / scale:g}{unit}"


def interval(row, name):
    """'0.35 (0.31 .. 0.39)'; what the runs do not determine is said to be so."""
    if row[name] is None:
        return "undetermined" if name in ("E", "A", "alpha") and not row["floors"] else DASH
    bounds = ["inf" if b is None else f"{b:.3g}" for b in row["intervals"].get(name) or ()]
    return f"{row[name]:.3g}" + (f" ({bounds[0]} .. {bounds[1]})" if bounds else "")


def loss_rows(numbers):
    """Rows of the table of losses; ** begins one that is significantly below every other family's of its size."""
    won = {w["size"]: w["winner"] for w in numbers["winners"]}
    paper = any(e["paper_loss"] for e in numbers["table"])
    rows = [["family", "size", "parameters", "tokens", "loss", "bits per byte", "learning rate", "tokens/s"]
            + ["the paper's"] * paper]
    for e in numbers["table"]:
        if not e["losses"]:
            rows.append([name_of(e["model"]), e["size"], *[DASH] * (6 + paper)])
            continue
        bold = "**" if won[e["size"]] == e["model"] else ""
        spread = f" \u00b1 {e['sd_loss']:.4f}" if e["sd_loss"] is not None else ""
        rows.append([name_of(e["model"]), e["size"], human(e["parameters"], 4), human(e["tokens"]),
                     f"{bold}{e['mean_loss']:.4f}{spread} ({len(e['losses'])})",
                     f"{e['bits_per_byte']:.4f}" if e["bits_per_byte"] else DASH, f"{e['learning_rate']:g}",
                     f"{e['tokens_per_second']:,.0f}", *[f"{e['paper_loss'] or 0:.3f}"] * paper])
    return rows


def pair_rows(numbers):
    rows = [["at", "pair", "loss minus the other's", "tokens", "FLOPs", "seconds", "SD of seeds", "SE: seeds, files"]]
    for p in numbers["pairs"]:
        d = p["difference"]
        if d is None:
            rows.append([p["size"], f"{name_of(p['a'])} / {name_of(p['b'])}", "one seed: no interval", *[DASH] * 5])
            continue
        rows.append([p["size"], f"{name_of(p['a'])} / {name_of(p['b'])}",
                     f"{d['mean']:+.4f} ({d['low']:+.4f} .. {d['high']:+.4f})",
                     *(span(p[k]) if p[k] else DASH for k in ("tokens", "flops", "seconds")),
                     f"{p['pooled_sd']:.4f}" if p["pooled_sd"] else "they differ",
                     f"{d['seeds_se']:.4f}, {d['documents_se']:.4f}"])
    return rows


def tex(numbers):
    """The tables of losses and of multipliers for a paper, in booktabs' rules."""
    plain = lambda c: re.sub(r"([&%$#_{}])", r"\\\1", str(c).replace("**", "")).replace("\u00b1", r"$\pm$").replace(
        DASH, "--").replace("..", r"\,..\,")
    lines = [f"% {s}" for s in numbers["sentences"]]
    for rows in (loss_rows(numbers), pair_rows(numbers)):
        body = [" & ".join(map(plain, row)) + r" \\" for row in rows]
        lines += [r"\begin{tabular}{ll" + "r" * (len(rows[0]) - 2) + "}", r"\toprule", body[0], r"\midrule", *body[1:],
                  r"\bottomrule", r"\end{tabular}", ""]
    return "\n".join(lines)


def points(sweep, path):
    """points.csv: every run of the plan, one per line, used or not."""
    keys = ("model", "size", "stage", "seed", "learning_rate", "steps", "from")
    columns = ("parameters", "embedding", "tokens", "flops", "seconds", "loss", "bits_per_byte", "context", "device",
               "processes", "code", "time")
    by = {r.name: r for r in sweep.runs}
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(["run", *keys, *columns, "loss_of_reported_files", "loss_of_choosing_files", "commit", "status"])
        for name, at in sweep.plan["cells"].items():
            r = by.get(name)
            values = [getattr(r, c) for c in columns] + [r.half(1), r.half(0), r.environment.get("commit")] if r else (
                [""] * (len(columns) + 3))
            out.writerow([name, *(at.get(k, "") for k in keys), *values, "used" if r else sweep.left_out.get(name, "")])


# ---------------------------------------------------------------------------------------------------------------- pages

def markdown_escape(value):
    """A value in report.j2 as Markdown shows it literally; what a macro has made stays as it is."""
    from markupsafe import Markup

    if isinstance(value, Markup):
        return value
    text = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;")
    return Markup(re.sub(r"([|*\[\]`\\])", r"\\\1", text))


def page(kind, **values):
    """report.j2 as "html" or "md". Raises for a name that it lacks, so that no sentence goes missing."""
    import jinja2

    made = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True,
                              lstrip_blocks=True, extensions=["jinja2.ext.do"], undefined=jinja2.StrictUndefined,
                              finalize=markdown_escape if kind == "md" else None)
    return made.get_template("report.j2").render(html=kind == "html", DASH=DASH, interval=interval, name_of=name_of,
                                                 **values)


def write(source, out=None, bootstrap=200, accept_code=(), save_it=False, style=None):
    """Write the report of a sweep's folder or saved file, print its sentences. Returns {name: path} of what it wrote.

    Args:
        out: where to; default: the sweep's folder, or out/<name>_report of a saved file.
        bootstrap: simulated sweeps behind the intervals of the fits.
        accept_code: versions of the code to compare with that of most runs.
        save_it: also write results/<name>.json, and page, tables and figure to results/<name>/.
        style: a .mplstyle file for the figures, over ours.
    Raises ConfigError where there is no sweep, OSError where `out` cannot be written.
    """
    source = Path(source)
    if style and not Path(style).is_file():
        raise ConfigError(f"--style={style}: there is no such file")
    sweep = read_sweep(source, accept_code)
    entries = collect(sweep)
    numbers = numbers_of(sweep, entries, list(accept_code), bootstrap)
    out = Path(out or (REPO / "out" / f"{numbers['name']}_report" if source.is_file() else source))
    alt = figures.in_words(entries, numbers["pairs"])
    names = ("report.json", "points.csv", "table.tex", *["figure.png"] * bool(alt), "report.md", "report.html")
    paths = {name: out / name for name in names}
    values = {"numbers": numbers, "alt": "; ".join(alt), "losses": loss_rows(numbers), "pairs": pair_rows(numbers)}
    out.mkdir(parents=True, exist_ok=True)
    write_json(paths["report.json"], numbers)
    points(sweep, paths["points.csv"])
    paths["table.tex"].write_text(tex(numbers), encoding="utf-8")
    if alt:
        figures.draw(entries, numbers["pairs"], paths["figure.png"], style)
        values["figure"] = base64.b64encode(paths["figure.png"].read_bytes()).decode()
    for kind in ("md", "html"):
        paths[f"report.{kind}"].write_text(page(kind, **values), encoding="utf-8")
    if save_it:
        folder = REPO / "results" / numbers["name"]
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("points.csv", "table.tex", "report.md", *["figure.png"] * bool(alt)):
            if not (folder / name).exists() or not paths[name].samefile(folder / name):
                shutil.copyfile(paths[name], folder / name)
        paths |= {"saved": folder.with_name(f"{numbers['name']}.json"), "pages": folder}
        save(source, paths["saved"])
    print(*numbers["sentences"], sep="\n")
    return paths
