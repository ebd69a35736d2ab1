"""What a sweep's records say, in numbers: the table's cells, who won, the fitted laws, sample efficiency. For experiments/scaling/report.py.

    rate = the one whose first seed ended lowest; mean and standard deviation over all seeds at that rate
    sample efficiency of a over b = tokens that b needs for a loss / tokens that a needs for it

The surprise: a run that cannot be trusted is nowhere in these numbers, and every run that is missing from them has a reason
that is told: in `left_out` or in a cell's `notes`.
"""

import contextlib
import math
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from experiments.scaling import compare, fit  # noqa: E402
from experiments.scaling.sweep import read_plan, read_runs  # noqa: E402

# family: (name, colour, marker) in the order of the paper's Table 1, ours behind it; one look in every figure
LOOKS = {"retnet": ("RetNet", "#7a7a7a", "v"), "gla": ("GLA", "#d98c00", "^"), "rwkv": ("RWKV", "#159a6f", "D"),
         "mamba": ("Mamba", "#1f6fb4", "s"), "llama": ("LLaMA", "#222222", "P"), "longhorn": ("Longhorn", "#c8252c", "o"),
         "rwkv4": ("RWKV-4", "#74c69d", "d"), "deltanet": ("DeltaNet", "#a259b5", "X"),
         "longhorn_exact": ("Longhorn, exact", "#8c4a2f", "h")}
SPARE = ("#17a2b8", "#bcbd22", "#e377c2", "#5b5bd6", "#a0522d")  # for families that are not in LOOKS

# The paper's Table 1: family -> size -> (parameters in millions, nats at context 1024, nats at context 4096)
PAPER = {"retnet": {"120M": (129.1, 3.569, 3.492), "350M": (373.2, 3.362, 3.227)},
         "gla": {"120M": (123.8, 3.381, 3.364), "350M": (361.1, 3.018, 3.001)},
         "rwkv": {"120M": (124.4, 3.291, 3.276), "350M": (354.8, 2.983, 2.931)},
         "mamba": {"120M": (129.2, 3.238, 3.231), "350M": (371.5, 2.902, 2.868)},
         "llama": {"120M": (124.4, 3.247, 3.273), "350M": (357.7, 2.891, 2.883)},
         "longhorn": {"120M": (128.6, 3.225, 3.192), "350M": (369.8, 2.888, 2.859)}}
PAPER_CONTEXTS = {1024: 1, 4096: 2}  # where a context's loss stands in those
PAPER_EFFICIENCY = 1.8  # Longhorn over Mamba, 1.3B parameters, 100B tokens of SlimPajama (Section 5.3)


@dataclass
class Report:
    """Everything that the report tells of a sweep."""

    folder: Path
    plan: dict
    entries: list  # [Entry] of every family, size and context that the plan has
    runs: list  # [Run] that may be compared
    left_out: dict  # {name of a run: why}
    won: dict  # {(size, context): compare.Winner}
    fits: list  # [{model, context, embeddings, fit, cannot, warnings}]
    isoflops: list  # [{model, context, isoflop, cannot}]
    pairs: list  # [{size, context, a, b, curve, budgets}]


@dataclass
class Entry:
    """A cell of the table: a family at a size and a context, with the runs that speak for it."""

    model: str
    size: str
    context: int
    runs: list = field(default_factory=list)  # [Run] at the chosen rate and full budget, a seed each
    ladder: list = field(default_factory=list)  # [Run] at the chosen rate and other budgets
    rate: float = None
    tried: list = field(default_factory=list)  # rates whose first seed ended or diverged
    lost: list = field(default_factory=list)  # rates that were tried and have no usable record
    planned: int = 0  # seeds that the plan has at the chosen rate
    notes: list = field(default_factory=list)

    losses = property(lambda self: [r.loss for r in self.runs])
    mean = property(lambda self: statistics.fmean(self.losses) if self.runs else None)
    sd = property(lambda self: statistics.stdev(self.losses) if len(self.runs) > 1 else None)
    parameters = property(lambda self: self.runs[0].parameters if self.runs else None)
    tokens = property(lambda self: self.runs[0].tokens if self.runs else None)
    hours = property(lambda self: sum(r.seconds * r.processes for r in self.runs) / len(self.runs) / 3600 if self.runs else None)

    @property
    def edge(self):
        """Which of the tried rates the chosen one is, where a better one may lie beyond it; or None."""
        if not self.runs or min(self.tried + self.lost) < self.rate < max(self.tried + self.lost):
            return None
        return "only one" if len(self.tried) == 1 else "lowest" if self.rate == min(self.tried) else "highest"

    def curve(self):
        """(tokens, losses (seeds, points)) where every seed has an evaluation with a finite loss."""
        seen = [{t: v for t, v in r.curve if v is not None} for r in self.runs]
        at = sorted(set.intersection(*map(set, seen))) if seen else []
        return np.array(at, float), np.array([[s[t] for t in at] for s in seen], float)

    def paper(self, plan):
        """The paper's loss for this cell, or None where this cell is another experiment than the paper's."""
        at = PAPER_CONTEXTS.get(self.context)
        known = PAPER.get(self.model, {}).get(self.size)
        return known[at] if plan.get("paper") is True and at and known else None


# ----------------------------------------------------------------------------------------------------------------- choose

def collect(folder):
    """(plan, [Entry] for every family, size and context that the plan has, [Run] that may be compared, {name: why left out}).

    Raises ConfigError where there is no plan.
    """
    plan = read_plan(folder)
    runs, left_out = read_runs(folder)
    left_out, groups, once = dict(left_out), {}, {}
    for run in runs:
        key = (run.model, run.size, run.context, run.tokens, run.learning_rate, run.seed)
        if once.setdefault(key, run) is not run:  # a seed counted twice would make the spread too small
            left_out[run.name] = f"the same run as {once[key].name}: counted once"
    kinds = {"model": str, "size": str, "context": int}
    for name, at in plan["cells"].items():
        if not all(isinstance(at.get(key), kind) for key, kind in kinds.items()):
            left_out.setdefault(name, "the plan does not say its model, size and context: it has no place in the table")
        else:
            groups.setdefault((at["model"], at["size"], at["context"]), []).append((name, at))
    runs = [r for r in runs if r.name not in left_out]
    own = {key: [r for r in runs if (r.model, r.size, r.context) == key] for key in groups}
    entries = [choose(key, cells, own[key], left_out, common_budget(own, *key[1:])) for key, cells in groups.items()]
    entries.sort(key=lambda e: (size_order(entries, e.size), e.context, family_order(e.model)))
    return plan, entries, runs, left_out


def common_budget(own, size, context):
    """The most training tokens that every family with runs of a size and context saw; None where there is no such number."""
    seen = [{r.tokens for r in runs if r.at.get("stage") != "ladder"} for key, runs in own.items() if key[1:] == (size, context)]
    return max(set.intersection(*filter(None, seen)), default=None) if any(seen) else None


def choose(key, cells, runs, left_out, budget=None):
    """The Entry of one family, size and context: the rate whose first seed ended lowest, with all its seeds and budgets.

    budget: tokens of the runs that count; None: the most that this family saw.
    """
    entry = Entry(*key)
    full = [r for r in runs if r.at.get("stage") != "ladder"]
    if not full:
        return entry
    budget = budget or max(r.tokens for r in full)
    for r in full:
        if r.tokens != budget:
            entry.notes.append(f"{r.name} saw {r.tokens:,} tokens where others saw {budget:,}: not averaged")
    full = [r for r in full if r.tokens == budget]
    at_rates = {seed: {r.learning_rate: r for r in full if r.seed == seed} for seed in sorted({r.seed for r in full})}
    searched = [r.seed for r in full if r.at.get("stage") == "rate"]
    first = searched[0] if searched else max(at_rates, key=lambda s: len(at_rates[s]))
    entry.rate = min(at_rates[first].values(), key=lambda r: r.loss).learning_rate
    followed = {r.learning_rate for r in full if r.at.get("stage") == "seed"} - set(at_rates[first])
    if followed:  # without this a lost record would put a worse rate into the table
        entry.rate = max(followed, key=lambda rate: sum(r.learning_rate == rate for r in full))
        entry.notes.append(f"seed {first} has no usable run at learning rate {entry.rate:g}, which was found best when the "
                           "further seeds were planned: it is used without that seed")
    diverged = [at["learning_rate"] for name, at in cells if "diverged" in left_out.get(name, "") and "learning_rate" in at]
    entry.tried = sorted({*at_rates[first], *diverged, entry.rate})
    lost = sorted({at["learning_rate"] for name, at in cells if at.get("stage") == "rate" and "learning_rate" in at}
                  - set(entry.tried))
    entry.lost = lost
    if lost:
        entry.notes.append(f"learning rate {', '.join(f'{r:g}' for r in lost)} was planned and has no usable run")
    entry.runs = sorted((r for r in full if r.learning_rate == entry.rate), key=lambda r: r.seed)
    others = {r.learning_rate for r in full if r.seed != first} - {entry.rate}
    if others:
        entry.notes.append(f"further seeds ran at {', '.join(f'{r:g}' for r in sorted(others))}, which is not the best rate of "
                           f"seed {first} any more ({entry.rate:g}): not averaged")
    entry.planned = len({at.get("seed") for _, at in cells if at.get("stage") != "ladder"
                         and at.get("learning_rate") == entry.rate})
    entry.ladder = [r for r in runs if r.at.get("stage") == "ladder" and r.learning_rate == entry.rate]
    unused = [r.name for r in runs if r.at.get("stage") == "ladder" and r.learning_rate != entry.rate]
    if unused:
        entry.notes.append(f"{len(unused)} run(s) of other budgets are at another rate than {entry.rate:g}: not in the fit")
    return entry


def family_order(model):
    return (list(LOOKS).index(model), "") if model in LOOKS else (len(LOOKS), model)


def size_order(entries, size):
    """Sizes by their parameters; one without a run by the number in its label."""
    counts = [e.parameters for e in entries if e.size == size and e.runs]
    with contextlib.suppress(ValueError, TypeError, IndexError):
        return statistics.median(counts) if counts else float(size[:-1]) * {"K": 1e3, "M": 1e6, "B": 1e9}.get(size[-1], 1)
    return math.inf


def name_of(model):
    return LOOKS[model][0] if model in LOOKS else str(model)


def looks(models):
    """{family: (name, colour, marker)}, those of LOOKS and spare colours for the others."""
    other = sorted(m for m in models if m not in LOOKS)
    return {m: LOOKS.get(m) or (str(m), SPARE[other.index(m) % len(SPARE)], "o") for m in models}


def columns_of(entries):
    """[(size, context)] in the table's order."""
    return list(dict.fromkeys((e.size, e.context) for e in entries))


def on_gpu(run):
    return run.result.get("device_name") not in (None, "cpu")


def where(entries, size, context):
    """'460K at T=256'; without the context where there is only one."""
    return f"{size} at T={context}" if len({e.context for e in entries}) > 1 else f"{size}"


# ---------------------------------------------------------------------------------------------------------------- analyse

def analyse(folder, embeddings=(True, False), pairs=None, bootstrap=200):
    """The Report of a sweep's folder; the arguments are those of report.write. Raises ConfigError where there is no plan."""
    plan, entries, runs, left_out = collect(folder)
    if pairs is None:
        models = sorted({e.model for e in entries if e.runs}, key=family_order)
        one = "longhorn" if "longhorn" in models else models[0] if models else None
        pairs = [(one, m) for m in models if m != one]
    embeddings = (embeddings,) if isinstance(embeddings, bool) else tuple(embeddings)
    return Report(Path(folder), plan, entries, runs, left_out, winners(entries), fits_of(entries, embeddings, bootstrap),
                  isoflops_of(entries), efficiencies(entries, pairs))


def winners(entries):
    """{(size, context): compare.Winner} over the families that have a run there."""
    found = {}
    for column in columns_of(entries):
        budgets = {e.tokens for e in entries if (e.size, e.context) == column and e.runs}
        found[column] = compare.Winner(None, "the families saw different numbers of tokens: nothing to compare", {}) if len(
            budgets) > 1 else compare.winner({e.model: e.losses for e in entries if (e.size, e.context) == column and e.runs})
    return found


def fits_of(entries, embeddings=(True, False), bootstrap=200):
    """[{model, context, embeddings, fit (or None), cannot, warnings}]: the law of each family, N with or without embeddings."""
    found = []
    for model, context in dict.fromkeys((e.model, e.context) for e in sorted(entries, key=lambda e: family_order(e.model))):
        runs = [r for e in entries if (e.model, e.context) == (model, context) for r in e.runs + e.ladder]
        for with_embedding in embeddings:
            row = {"model": model, "context": context, "embeddings": with_embedding, "fit": None, "cannot": None, "warnings": []}
            found.append(row)
            try:
                row["fit"] = fit.fit_loss([r.parameters - (0 if with_embedding else r.embedding) for r in runs],
                                          [r.tokens for r in runs], [r.loss for r in runs], bootstrap=bootstrap,
                                          untrained=math.log(max((r.config["vocab_size"] for r in runs), default=2)))
                row["warnings"] = [in_names(w, runs) for w in row["fit"].warnings]
            except fit.CannotFit as error:
                row["cannot"] = in_names(str(error), runs)
    return found


def in_names(sentence, runs):
    """fit.py's `run 3` as that run's name."""
    words = sentence.split(" ")
    for i, (before, number) in enumerate(zip(words, words[1:], strict=False)):
        if before == "run" and number.isdigit() and int(number) < len(runs):
            words[i + 1] = runs[int(number)].name
    return " ".join(words)


ISOFLOP_TOLERANCE = 0.2  # runs whose FLOPs are this close, as a share, are of one budget


def isoflops_of(entries):
    """[{model, context, isoflop (or None), cannot}]: the parabolas of each family, N with embeddings."""
    found = []
    for model, context in dict.fromkeys((e.model, e.context) for e in sorted(entries, key=lambda e: family_order(e.model))):
        runs = [r for e in entries if (e.model, e.context) == (model, context) for r in e.runs + e.ladder]
        row = {"model": model, "context": context, "isoflop": None, "cannot": None}
        found.append(row)
        try:
            row["isoflop"] = fit.isoflop([r.parameters for r in runs], [r.loss for r in runs], [r.flops for r in runs],
                                         tolerance=ISOFLOP_TOLERANCE)
        except fit.CannotFit as error:
            row["cannot"] = in_names(str(error), runs)
    return found


def efficiencies(entries, pairs):
    """[{size, context, a, b, curve, budgets}] for each pair of families: compare.SampleEfficiency along the runs, and between the
    ends of runs of several budgets, each with its own learning-rate schedule (None with fewer than two budgets)."""
    found = []
    for size, context in columns_of(entries):
        here = {e.model: e for e in entries if (e.size, e.context) == (size, context) and e.runs}
        for a, b in pairs:
            if a not in here or b not in here:
                continue
            along, ends = [], []
            for e in (here[a], here[b]):
                tokens, losses = e.curve()
                along += [tokens, losses.mean(0) if len(tokens) else tokens]
                budgets = sorted({e.tokens: e.mean, **{r.tokens: r.loss for r in e.ladder}}.items())
                ends.append(budgets)
            several = min(map(len, ends)) > 1
            found.append({"size": size, "context": context, "a": a, "b": b, "curve": compare.sample_efficiency(*along),
                          "budgets": compare.sample_efficiency(*(v for end in ends for v in zip(*end, strict=True)))
                          if several else None})
    return found


# ------------------------------------------------------------------------------------------------------------- as numbers

def human(n):
    """1490000 as 1.49M."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if n >= scale:
            return f"{n / scale:.4g}{unit}" if n < 1e3 * scale else f"{n / scale:,.0f}{unit}"
    return f"{n:g}"


def human3(n, digits=3):
    """1485888 as 1.49M."""
    return human(float(f"{n:.{digits}g}"))


def finite(value):
    """`value` as JSON can hold it: what is not finite becomes null, arrays become lists."""
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, np.ndarray)):
        return [finite(v) for v in value]
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value


def hours_of(runs):
    """{'GPU hours' or 'CPU hours': processes x hours}."""
    kinds = {}
    for r in runs:
        kind = "GPU hours" if on_gpu(r) else "CPU hours"
        kinds[kind] = kinds.get(kind, 0) + r.seconds * r.processes / 3600
    return kinds


def as_json(report):
    """report.json: every number of the report."""
    plan, entries, runs = report.plan, report.entries, report.runs
    constants = ("E", "A", "alpha", "B", "beta", "a", "b", "floors", "varies", "intervals", "confidence", "huber", "noise",
                 "points")
    return finite({
        **{key: plan.get(key) for key in ("preset", "paper", "commit", "machine")}, "runs_used": len(runs),
        "left_out": report.left_out,
        "table": [{"model": e.model, "size": e.size, "context": e.context, "parameters": e.parameters, "tokens": e.tokens,
                   "embedding_parameters": e.runs[0].embedding if e.runs else None, "learning_rate": e.rate,
                   "learning_rates_tried": e.tried, "learning_rate_is": e.edge, "mean_loss": e.mean, "sd_loss": e.sd,
                   "losses": {r.seed: r.loss for r in e.runs}, "bits_per_byte": bits(e), "paper_loss": e.paper(plan),
                   "flops": e.runs[0].flops if e.runs else None, "notes": e.notes,
                   "hours": {kind: hours / len(e.runs) for kind, hours in hours_of(e.runs).items()},
                   "seconds": statistics.fmean(r.seconds for r in e.runs) if e.runs else None} for e in entries],
        "winners": [{"size": s, "context": c, "winner": w.family, "reason": w.reason, "p": w.p}
                    for (s, c), w in report.won.items()],
        "fits": [{**{k: f[k] for k in ("model", "context", "embeddings", "cannot", "warnings")},
                  **({k: getattr(f["fit"], k) for k in constants} if f["fit"] else {})} for f in report.fits],
        "isoflops": [{"model": i["model"], "context": i["context"], "cannot": i["cannot"],
                      **(vars(i["isoflop"]) if i["isoflop"] else {})} for i in report.isoflops],
        "sample_efficiency": [{**{k: p[k] for k in ("size", "context", "a", "b")}, "along_the_runs": vars(p["curve"]),
                               "between_budgets": vars(p["budgets"]) if p["budgets"] else None} for p in report.pairs],
        "cost": {"flops": sum(r.flops for r in runs), "seconds": sum(r.seconds for r in runs), "hours": hours_of(runs)}})


def bits(entry):
    """Mean bits per byte over the seeds, or None where the data do not say how long a token is."""
    values = [r.bits_per_byte for r in entry.runs]
    return statistics.fmean(values) if values and None not in values else None

