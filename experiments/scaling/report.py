"""The report of a sweep: Table 1, Figure 5, sample efficiency, the fitted law, what it cost. Needs no GPU and no torch.

    report.json   every number
    report.html   all of them in one file that opens from disk, with every run
    table1.md     the same as Markdown, beside figure5.png and efficiency.png

A family's learning rate at a size is the one whose first seed ended lowest; mean and standard deviation are over all
seeds at that rate. A run that cannot be trusted enters no number, and every run that is missing has a reason that the
report gives.

The words are in report.j2, which writes both pages from report.json and the tables made here. Jinja2 escapes every
value, so that no name in a record can become a tag.

    python experiments/scaling/table1.py report out/table1_laptop
"""

import base64
import io
import math
import os
import re
import shutil
import statistics
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import numpy as np

from configurator import ConfigError
from experiments.scaling import compare, figures, fit
from experiments.scaling.figures import family_order, name_of
from experiments.scaling.runs import read_sweep, save
from records import write_json

REPO = Path(__file__).resolve().parents[2]

# The paper's Table 1: family -> size -> (parameters in millions, loss at context 1024, at 4096; nats per token)
PAPER = {"retnet": {"120M": (129.1, 3.569, 3.492), "350M": (373.2, 3.362, 3.227)},
         "gla": {"120M": (123.8, 3.381, 3.364), "350M": (361.1, 3.018, 3.001)},
         "rwkv": {"120M": (124.4, 3.291, 3.276), "350M": (354.8, 2.983, 2.931)},
         "mamba": {"120M": (129.2, 3.238, 3.231), "350M": (371.5, 2.902, 2.868)},
         "llama": {"120M": (124.4, 3.247, 3.273), "350M": (357.7, 2.891, 2.883)},
         "longhorn": {"120M": (128.6, 3.225, 3.192), "350M": (369.8, 2.888, 2.859)}}
PAPER_CONTEXTS = {1024: 1, 4096: 2}  # where a context's loss stands in these
ISOFLOP_TOLERANCE = 0.2  # runs whose FLOPs are this close, as a share, have one budget
DASH = "\u2013"


# --------------------------------------------------------------------------------------------------------------- choose

@dataclass
class Entry:
    """A cell of the table: a family at a size and context, with the runs that count for it."""

    model: str
    size: str
    context: int
    runs: list = field(default_factory=list)  # [Run] at the chosen rate and full budget, one per seed
    ladder: list = field(default_factory=list)  # [Run] at the chosen rate and other budgets
    rate: float = None
    tried: list = field(default_factory=list)  # rates whose first seed ended or diverged
    lost: list = field(default_factory=list)  # rates that were planned and have no usable record
    planned: int = 0  # seeds that the plan has at the chosen rate
    notes: list = field(default_factory=list)

    column = property(lambda self: (self.size, self.context))
    losses = property(lambda self: [r.loss for r in self.runs])
    mean = property(lambda self: statistics.fmean(self.losses) if self.runs else None)
    sd = property(lambda self: statistics.stdev(self.losses) if len(self.runs) > 1 else None)
    parameters = property(lambda self: self.runs[0].parameters if self.runs else None)
    tokens = property(lambda self: self.runs[0].tokens if self.runs else None)

    @property
    def edge(self):
        """Which of the tried rates the chosen one is, where a better one may lie beyond it; or None."""
        if not self.runs or min(self.tried + self.lost) < self.rate < max(self.tried + self.lost):
            return None
        return "only one" if len(self.tried) == 1 else "lowest" if self.rate == min(self.tried) else "highest"

    def curve(self):
        """(tokens (points,), losses (seeds, points)) where every seed has an evaluation with a finite loss."""
        seen = [{t: v for t, v in r.curve if v is not None} for r in self.runs]
        tokens = sorted(set.intersection(*map(set, seen))) if seen else []
        return np.array(tokens, float), np.array([[s[t] for t in tokens] for s in seen], float)


def collect(sweep):
    """[Entry] of every family, size and context in the plan, in the table's order. Adds to sweep.left_out."""
    once, groups = {}, {}
    for run in sweep.runs:
        key = (run.model, run.size, run.context, run.tokens, run.learning_rate, run.seed)
        if once.setdefault(key, run) is not run:  # a seed counted twice would make the spread too small
            sweep.left_out[run.name] = f"the same run as {once[key].name}: counted once"
    for name, at in sweep.plan["cells"].items():
        if all(isinstance(at.get(key), kind) for key, kind in (("model", str), ("size", str), ("context", int))):
            groups.setdefault((at["model"], at["size"], at["context"]), {})[name] = at
        else:
            sweep.left_out.setdefault(name, "the plan does not say its model, size and context")
    sweep.runs = [r for r in sweep.runs if r.name not in sweep.left_out]
    of = {key: [r for r in sweep.runs if (r.model, r.size, r.context) == key] for key in groups}
    entries = []
    for key, cells in groups.items():
        seen = [{r.tokens for r in runs if r.at.get("stage") != "ladder"} for k, runs in of.items() if k[1:] == key[1:]]
        common = set.intersection(*filter(None, seen)) if any(seen) else ()  # budgets that every family has
        entries.append(choose(key, cells, of[key], sweep.left_out, max(common, default=None)))
    medians = {e.size: statistics.median(o.parameters for o in entries if o.size == e.size and o.runs)
               for e in entries if e.runs}
    return sorted(entries, key=lambda e: (medians.get(e.size, math.inf), e.size, e.context, family_order(e.model)))


def choose(key, cells, runs, left_out, budget):
    """The Entry of a family, size and context: the rate whose first seed ended lowest, with all its seeds and budgets.

    budget: tokens of the runs that count; None: the most that this family saw.
    """
    entry = Entry(*key)
    full = [r for r in runs if r.at.get("stage") != "ladder"]
    if not full:
        return entry
    budget = budget or max(r.tokens for r in full)
    entry.notes += [f"{r.name} saw {r.tokens:,} tokens where others saw {budget:,}: not averaged"
                    for r in full if r.tokens != budget]
    full = [r for r in full if r.tokens == budget]
    rates = {seed: {r.learning_rate: r.loss for r in full if r.seed == seed} for seed in sorted({r.seed for r in full})}
    searched = [r.seed for r in full if r.at.get("stage") == "rate"]
    first = searched[0] if searched else max(rates, key=lambda seed: len(rates[seed]))
    entry.rate = min(rates[first], key=rates[first].get)
    followed = {r.learning_rate for r in full if r.at.get("stage") == "seed"} - set(rates[first])
    if followed:  # otherwise a lost record would put a worse rate into the table
        entry.rate = max(followed, key=lambda rate: sum(r.learning_rate == rate for r in full))
        entry.notes.append(f"seed {first} has no usable run at learning rate {entry.rate:g}, the best when the further "
                           "seeds were planned: this rate is used without that seed")
    diverged = [at["learning_rate"] for name, at in cells.items() if "diverged" in left_out.get(name, "")]
    entry.tried = sorted({*rates[first], *diverged, entry.rate})
    entry.lost = sorted({at["learning_rate"] for at in cells.values() if at.get("stage") == "rate"} - {*entry.tried})
    if entry.lost:
        entry.notes.append(f"learning rate {', '.join(f'{r:g}' for r in entry.lost)} was planned and has no usable run")
    entry.runs = sorted((r for r in full if r.learning_rate == entry.rate), key=lambda r: r.seed)
    others = {r.learning_rate for r in full if r.seed != first} - {entry.rate}
    if others:
        entry.notes.append(f"further seeds ran at {', '.join(f'{r:g}' for r in sorted(others))}, which is not the best "
                           f"rate of seed {first} any more ({entry.rate:g}): not averaged")
    entry.planned = len({at.get("seed") for at in cells.values() if at.get("stage") != "ladder"
                         and at.get("learning_rate") == entry.rate})
    if len(entry.runs) < entry.planned:
        entry.notes.append(f"{len(entry.runs)} of {entry.planned} planned seeds are usable")
    ladder = [r for r in runs if r.at.get("stage") == "ladder"]
    entry.ladder = [r for r in ladder if r.learning_rate == entry.rate]
    if len(entry.ladder) < len(ladder):
        entry.notes.append(f"{len(ladder) - len(entry.ladder)} run(s) of other budgets have another rate than "
                           f"{entry.rate:g}: not in the fit")
    return entry


# -------------------------------------------------------------------------------------------------------------- numbers

def winners(entries):
    """{(size, context): compare.Winner} over the families that have a run there."""
    found = {}
    for column in dict.fromkeys(e.column for e in entries):
        here = [e for e in entries if e.column == column and e.runs]
        found[column] = compare.winner({e.model: e.losses for e in here})
        if len({e.tokens for e in here}) > 1:
            found[column] = compare.Winner(None, "the families saw different numbers of tokens: nothing to compare", {})
    return found


def laws(entries, bootstrap):
    """A dict per family, context and count of N (with and without the embedding): the fit.Fit, or why there is none."""
    found = []
    for (model, context), runs in runs_of_families(entries).items():
        for embeddings in (True, False):
            row = {"model": model, "context": context, "embeddings": embeddings, "cannot": None, "warnings": []}
            found.append(row)
            try:
                row["fit"] = fit.fit_loss([r.parameters - (0 if embeddings else r.embedding) for r in runs],
                                          [r.tokens for r in runs], [r.loss for r in runs], bootstrap=bootstrap,
                                          untrained=math.log(max((r.config["vocab_size"] for r in runs), default=2)))
                row["warnings"] = [with_names(w, runs) for w in row["fit"].warnings]
            except fit.CannotFit as error:
                row["cannot"] = with_names(str(error), runs)
    return found


def isoflops(entries):
    """A dict per family and context: the vertices of its isoFLOP parabolas, N with the embedding."""
    found = []
    for (model, context), runs in runs_of_families(entries).items():
        columns = ([getattr(r, key) for r in runs] for key in ("parameters", "loss", "flops"))
        found.append({"model": model, "context": context, **fit.isoflop(*columns, ISOFLOP_TOLERANCE)})
    return found


def runs_of_families(entries):
    """{(model, context): [Run] of all sizes, seeds and budgets}."""
    keys = dict.fromkeys((e.model, e.context) for e in sorted(entries, key=lambda e: family_order(e.model)))
    return {key: [r for e in entries if (e.model, e.context) == key for r in e.runs + e.ladder] for key in keys}


def with_names(sentence, runs):
    """`run 3` of fit.py's sentences as that run's name."""
    return re.sub(r"\brun (\d+)\b", lambda m: f"run {runs[int(m[1])].name}", sentence)


def efficiencies(entries):
    """Sample efficiency of Longhorn, or else the first family, over every other one, at each size and context.

    curve: along the runs of the table. budgets: between the ends of runs of several lengths, each with its own
    schedule of the learning rate; None where a family has one length.
    """
    found, models = [], sorted({e.model for e in entries if e.runs}, key=family_order)
    first = "longhorn" if "longhorn" in models else models[0] if models else None
    for column in dict.fromkeys(e.column for e in entries):
        here = {e.model: e for e in entries if e.column == column and e.runs}
        for other in models if first in here else ():
            if other == first or other not in here:
                continue
            along, ends = [], []
            for e in (here[first], here[other]):
                tokens, losses = e.curve()
                along += [tokens, losses.mean(0) if len(tokens) else tokens]
                ends.append(sorted({e.tokens: e.mean, **{r.tokens: r.loss for r in e.ladder}}.items()))
            budgets = [values for end in ends for values in zip(*end, strict=True)]
            found.append({"size": column[0], "context": column[1], "a": first, "b": other,
                          "curve": compare.sample_efficiency(*along),
                          "budgets": compare.sample_efficiency(*budgets) if min(map(len, ends)) > 1 else None})
    return found


def hours_of(runs):
    """{'GPU hours' or 'CPU hours': processes x hours}."""
    kinds = Counter()
    for r in runs:
        kinds["GPU hours" if r.on_gpu else "CPU hours"] += r.seconds * r.processes / 3600
    return dict(kinds)


def bits(entry):
    """Mean bits per byte over the seeds, or None where the data do not say how long a token is."""
    values = [r.bits_per_byte for r in entry.runs]
    return statistics.fmean(values) if values and None not in values else None


def paper_loss(entry, plan):
    """The paper's loss for this cell, or None where the sweep is another experiment than the paper's."""
    known = PAPER.get(entry.model, {}).get(entry.size)
    return known[PAPER_CONTEXTS[entry.context]] if plan.get("paper") is True and known and (
        entry.context in PAPER_CONTEXTS) else None


def finite(value):
    """`value` as JSON can hold it: what is not finite becomes null, arrays become lists."""
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [finite(v) for v in value]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def numbers_of(sweep, entries, accepted, won, laws, isoflops, pairs):
    """The content of report.json."""
    plan, runs, reasons = sweep.plan, sweep.runs, {}
    for name, why in sweep.left_out.items():
        reasons.setdefault(why, []).append(name)
    table = [{"model": e.model, "size": e.size, "context": e.context, "parameters": e.parameters, "tokens": e.tokens,
              "embedding_parameters": e.runs[0].embedding if e.runs else None, "learning_rate": e.rate,
              "learning_rates_tried": e.tried, "learning_rate_is": e.edge, "mean_loss": e.mean, "sd_loss": e.sd,
              "losses": {r.seed: r.loss for r in e.runs}, "bits_per_byte": bits(e), "paper_loss": paper_loss(e, plan),
              "flops": e.runs[0].flops if e.runs else None, "notes": e.notes,
              "hours": {kind: hours / len(e.runs) for kind, hours in hours_of(e.runs).items()},
              "seconds": statistics.fmean(r.seconds for r in e.runs) if e.runs else None} for e in entries]
    drop = ("residuals", "warnings", "left_out", "_model", "_theta")
    law = [{k: v for k, v in row.items() if k != "fit"} | {
        k: v for k, v in (vars(row["fit"]) if "fit" in row else {}).items() if k not in drop} for row in laws]
    return finite({
        "name": sweep.folder.resolve().name.removesuffix(".json"), "preset": plan.get("preset"),
        "paper": plan.get("paper"), "machine": plan.get("machine"), "commands": plan.get("commands", []),
        "planned": len(plan["cells"]), "runs_used": len(runs), "left_out": reasons, "code": sweep.code,
        "accepted_code": accepted, "table": table,
        "winners": [{"size": s, "context": c, "winner": w.family, "reason": w.reason, "p": w.p}
                    for (s, c), w in won.items()],
        "fits": law, "isoflops": isoflops,
        "sample_efficiency": [{**{k: p[k] for k in ("size", "context", "a", "b")}, "along_the_runs": vars(p["curve"]),
                               "between_budgets": vars(p["budgets"]) if p["budgets"] else None} for p in pairs],
        "cost": {"flops": sum(r.flops for r in runs), "seconds": sum(r.seconds for r in runs), "hours": hours_of(runs)},
        "begun": sorted(r.time[:10] for r in runs if r.time)[::max(1, len(runs) - 1)],
        "devices": sorted({f"{r.device}, {r.processes} process(es)" for r in runs}),
        "versions": {key: sorted({str(r.environment[key]) for r in runs if r.environment.get(key)})
                     for key in ("torch", "python")}})


# --------------------------------------------------------------------------------------------------------------- pages

def human(n, digits=3):
    """1485888 as 1.49M."""
    n = float(f"{n:.{digits}g}")
    unit, scale = next((u for u in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)) if n >= u[1]), ("", 1))
    return f"{n / scale:g}{unit}"


def power(x):
    """5.8e+14 as 5.8e14."""
    return f"{x:.3g}".replace("e+", "e")


def interval(row, name):
    """'0.35 (0.31 .. 0.39)'; a dash for a constant that the runs do not determine. In report.json null stands for
    inf."""
    if row[name] is None:
        return DASH
    bounds = ["inf" if b is None else f"{b:.3g}" for b in row["intervals"].get(name) or ()]
    return f"{row[name]:.3g}" + (f" ({bounds[0]} .. {bounds[1]})" if bounds else "")


def in_families(sentence, models):
    """The identifiers of families in a sentence as their names."""
    pattern = "|".join(re.escape(m) for m in sorted(models, key=len, reverse=True))
    return re.sub(rf"(?<!\w)({pattern})(?!\w)", lambda m: name_of(m[1]), sentence) if models else sentence


def grid(cells, index, values):
    """Rows of a table, the head first: one per cell[index], a column per cell["column"] and each of `values`."""
    columns = dict.fromkeys(c["column"] for c in cells)
    rows = [[index, *(f"{column}: {v}" for column in columns for v in values)]]
    for name in dict.fromkeys(c[index] for c in cells):
        here = {c["column"]: c for c in cells if c[index] == name}
        rows.append([name, *(here.get(column, {}).get(v) or DASH for column in columns for v in values)])
    return rows


def table1(numbers, title):
    """Rows of Table 1; ** begins a loss that is significantly below every other family's."""
    won, cells = {(w["size"], w["context"]): w["winner"] for w in numbers["winners"]}, []
    for e in numbers["table"]:
        cells.append({"model": name_of(e["model"]), "column": title(e)})
        if not e["losses"]:
            continue
        bold = "**" if won[e["size"], e["context"]] == e["model"] else ""
        spread = f" \u00b1 {e['sd_loss']:.4f}" if e["sd_loss"] is not None else ""
        loss = f"{bold}{e['mean_loss']:.4f}{spread} ({len(e['losses'])})"
        parameters = human(e["parameters"], 4)
        if e["paper_loss"] is not None:
            loss += f"; paper {e['paper_loss']:.3f}"
            parameters += f"; paper {PAPER[e['model']][e['size']][0]}M"
        edge = f", {e['learning_rate_is']}" if e["learning_rate_is"] else ""
        cells[-1] |= {"parameters": parameters, "loss": loss, "learning rate": f"{e['learning_rate']:g}{edge}",
                      "bits per byte": e["bits_per_byte"] and f"{e['bits_per_byte']:.4f}"}
    bits = any(c.get("bits per byte") for c in cells)
    return grid(cells, "model", ["parameters", "loss", *["bits per byte"] * bits, "learning rate"])


def efficiency_table(numbers, title):
    """Rows of the table of sample efficiency."""
    kinds = {"along_the_runs": "along the runs", "between_budgets": "between budgets"}
    cells = [{"pair": f"{name_of(p['a'])} over {name_of(p['b'])}", "column": title(p)} | {
        words: f"{p[key]['at_end']:.2f}\u00d7 at {p[key]['loss_at_end']:.3f}"
        for key, words in kinds.items() if p[key] and p[key]["at_end"]} for p in numbers["sample_efficiency"]]
    return grid(cells, "pair", kinds.values())


def law_notes(numbers):
    """{sentence about a fit: {families that it concerns}}; of hardly determined constants the table has the
    interval."""
    said = {}
    for f in numbers["fits"]:
        for sentence in [f"cannot be fitted: {f['cannot']}"] * bool(f["cannot"]) + f["warnings"]:
            if " is hardly determined" in sentence:
                sentence = f"{sentence.split(' ')[0]} is hardly determined: its interval is wider than its value"
            said.setdefault(sentence, {})[name_of(f["model"])] = None
    return said


def run_rows(sweep, out):
    """Rows of every cell in the plan; the first column has a link to the run's folder, relative to `out`."""
    by_name, rows = {r.name: r for r in sweep.runs}, [["run", "stage", "loss", "seconds", "status"]]
    for name, at in sweep.plan["cells"].items():
        run, folder = by_name.get(name), sweep.folder / name
        link = quote(Path(os.path.relpath(folder, out)).as_posix()) if folder.is_dir() else None
        rows.append([(name, link), str(at.get("stage", "")), f"{run.loss:.4f}" if run else DASH,
                     f"{run.seconds:,.0f}" if run else DASH, "used" if run else sweep.left_out.get(name, "left out")])
    return rows


def markdown_escape(value):
    """A value in report.j2 as Markdown shows it literally; what a macro has made stays as it is."""
    from markupsafe import Markup

    if isinstance(value, Markup):
        return value
    text = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;")
    return Markup(re.sub(r"([|*\[\]`\\])", r"\\\1", text))


def svg(panel):
    """A panel as SVG, in base64."""
    drawn = io.BytesIO()
    figures.picture([panel], drawn, "svg")
    return base64.b64encode(drawn.getvalue()).decode()


def page(kind, **values):
    """report.j2 as "html" or "md". Raises for a name that it lacks, so that no sentence goes missing."""
    import jinja2

    made = jinja2.Environment(loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True,
                              lstrip_blocks=True, extensions=["jinja2.ext.do"], undefined=jinja2.StrictUndefined,
                              finalize=markdown_escape if kind == "md" else None)
    made.globals |= {"human": human, "power": power, "interval": interval, "name_of": name_of, "svg": svg}
    return made.get_template("report.j2").render(html=kind == "html", DASH=DASH, **values)


def write(source, out=None, bootstrap=200, accept_code=(), save_it=False):
    """Write the report of a sweep's folder or saved file. Returns {name: path} of what it wrote.

    Args:
        out: where to; default: the sweep's folder, or out/<name>_report of a saved file.
        bootstrap: simulated sweeps behind the intervals of the fits.
        accept_code: versions of the code to compare with that of most runs.
        save_it: also write results/<name>.json, and table and figures to results/<name>/.
    Raises ConfigError where there is no sweep, or where `out` cannot be written.
    """
    source = Path(source)
    found = read_sweep(source, accept_code)
    entries = collect(found)
    fits, pairs = laws(entries, bootstrap), efficiencies(entries)
    numbers = numbers_of(found, entries, list(accept_code), winners(entries), fits, isoflops(entries), pairs)
    out = Path(out or (REPO / "out" / f"{numbers['name']}_report" if source.is_file() else source))
    style = figures.looks({e.model for e in entries})
    panels = {"figure5": figures.figure5(entries, fits, style), "efficiency": figures.efficiency(entries, pairs, style)}
    several = len({e.context for e in entries}) > 1
    title = lambda row: f"{row['size']} at T={row['context']}" if several else row["size"]
    values = {"numbers": numbers, "title": title, "several": several, "panels": panels, "paper": PAPER,
              "table1": table1(numbers, title), "efficiency": efficiency_table(numbers, title),
              "law_notes": law_notes(numbers), "run_rows": run_rows(found, out), "isoflop_bias": fit.ISOFLOP_BIAS,
              "colours": {name: colour for name, colour, _ in style.values()}, "tolerance": ISOFLOP_TOLERANCE,
              "in_families": lambda sentence: in_families(sentence, style)}
    try:
        out.mkdir(parents=True, exist_ok=True)
        paths = {name: out / name for name in ("report.json", "table1.md", "report.html")}
        write_json(paths["report.json"], numbers)
        for name, drawn in panels.items():
            if drawn:
                paths[f"{name}.png"] = out / f"{name}.png"
                figures.picture(drawn, paths[f"{name}.png"])
        paths["table1.md"].write_text(page("md", **values), encoding="utf-8")
        paths["report.html"].write_text(page("html", **values), encoding="utf-8")
        if save_it:
            paths |= save_to(REPO / "results", numbers["name"], source, paths)
    except OSError as error:
        raise ConfigError(f"cannot write to {out} ({error.strerror}): choose another --out") from None
    return paths


def save_to(results, name, source, paths):
    """Save the sweep to results/<name>.json, its table and figures to results/<name>/. Returns {name: path}."""
    (results / name).mkdir(parents=True, exist_ok=True)
    saved = {f"{name}.json": results / f"{name}.json"}
    save(source, saved[f"{name}.json"])
    for file in sorted({"table1.md", "figure5.png", "efficiency.png"} & paths.keys()):
        saved[f"{name}/{file}"] = results / name / file
        if paths[file].resolve() != saved[f"{name}/{file}"].resolve():
            shutil.copyfile(paths[file], saved[f"{name}/{file}"])
    return saved
