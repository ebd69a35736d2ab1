"""A sweep's records made into pages: Table 1, Figure 5, sample efficiency, the fitted law, its cost. Needs no GPU and no torch.

    report.html   one file that opens from disk, with every table and figure and links to the runs' records
    table1.md     the same as Markdown, with figure5.png, efficiency.png and fit.png (and .svg) beside it
    report.json   every number

What is said is in report_cells.py, what is drawn in report_figures.py; here it is put into words and pages.

The surprise: a report is a list of (heading, blocks) that knows neither Markdown nor HTML. What the records say reaches the page
through one function that escapes it, so that no name of a model can become a tag.

    python experiments/scaling/table1.py report out/table1_laptop
"""

import base64
import contextlib
import html
import io
import json
import os
import statistics
import sys
from collections import Counter
from pathlib import Path
from urllib.parse import quote

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from configurator import ConfigError  # noqa: E402
from experiments.scaling import fit  # noqa: E402
from experiments.scaling.report_cells import (  # noqa: E402
    ISOFLOP_TOLERANCE,
    PAPER,
    PAPER_EFFICIENCY,
    analyse,
    as_json,
    bits,
    columns_of,
    efficiencies,
    family_order,
    hours_of,
    human3,
    looks,
    name_of,
    on_gpu,
    where,
)
from experiments.scaling.report_figures import efficiency_panels, figure5, fit_panels, picture  # noqa: E402
from records import write_json  # noqa: E402

DASH = "\u2013"


# ------------------------------------------------------------------------------------------------------------------- text
# The report is a list of (heading, blocks); a block is ("text", sentence), ("list", sentences), ("table", head, rows), ("figure",
# its name) or ("quiet", heading, blocks): folded up on the page. A cell is a string, Strong, Family, or [(text, link)].

class Strong(str):
    """A cell in bold."""


class Family(str):
    """A cell with a family's name, beside its colour in the figures: `colour`."""


def family(model, style):
    cell = Family(style[model][0])
    cell.colour = style[model][1]
    return cell


def interval(fitted, name, digits=".3g"):
    """'0.35 (0.31 .. 0.39)'; a dash for a constant that the runs do not determine."""
    value, bounds = getattr(fitted, name), fitted.intervals.get(name)
    if value is None:
        return DASH
    return f"{value:{digits}}" + (f" ({bounds[0]:{digits}} .. {bounds[1]:{digits}})" if bounds else "")


def plural(n, thing, things=None):
    return f"{n:,} {thing if n == 1 else things or thing + 's'}"


def listed(names):
    names = list(names)
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def power(x):
    """5.8e+14 as 5.8e14."""
    return f"{x:.3g}".replace("e+", "e")


def loss_text(entry):
    """'1.2345 +- 0.0012 (3)'."""
    spread = f" \u00b1 {entry.sd:.4f}" if entry.sd is not None else ""
    return f"{entry.mean:.4f}{spread} ({len(entry.runs)})"


def in_families(sentence, entries):
    """fit.py's names of families as the tables have them."""
    known = {e.model: name_of(e.model) for e in entries}
    return " ".join(known.get(w) or (known.get(w[:-1], w[:-1]) + w[-1] if w[-1:] in (",", ":") else w)
                    for w in sentence.split(" "))


def in_short(found):
    """The sentences at the top of the report."""
    entries, left, lowest = found.entries, len(found.left_out), {}
    lines = [f"{len(found.runs)} of {plural(len(found.plan['cells']), 'run')} are used" + (
        f"; {left} {'is' if left == 1 else 'are'} left out, each named below with the reason." if left else ".")]
    columns = [c for c in columns_of(entries) if sum(bool(e.runs) for e in entries if (e.size, e.context) == c) > 1]
    for column in columns:
        here = [e for e in entries if (e.size, e.context) == column and e.runs]
        lowest.setdefault(min(here, key=lambda e: e.mean).model, []).append(column)
    for model, there in sorted(lowest.items(), key=lambda item: -len(item[1])):
        sure = [c for c in there if found.won[c].family == model]
        seeds = [len(e.runs) for e in entries if e.model == model and (e.size, e.context) in there]
        seeds = plural(max(seeds), "seed") if min(seeds) == max(seeds) else f"{min(seeds)} to {max(seeds)} seeds"
        names = listed(where(entries, *c) for c in there)
        verdict = f"at none of them significantly below every other family (p < 0.05), with {seeds}"
        if sure:
            at = ("there" if len(there) == 1 else f"at all {len(there)}" if len(sure) == len(there) else
                  "at " + listed(where(entries, *c) for c in sure))
            verdict = f"{at} significantly below every other family (p < 0.05), with {seeds}"
        lines.append(f"{name_of(model)}'s mean loss is the lowest at {len(there)} of "
                     f"{plural(len(columns), 'size and context', 'sizes and contexts')} ({names}): {verdict}.")
    for p in [p for p in found.pairs if p["curve"].at_end and {p["a"], p["b"]} == {"longhorn", "mamba"}][-1:]:
        more, less = ("b", "a") if p["curve"].at_end >= 1 else ("a", "b")
        ratio = max(p["curve"].at_end, 1 / p["curve"].at_end)
        needs = f"{name_of(p[more])} needs {ratio:.2f} times the tokens of {name_of(p[less])}" if ratio > 1.005 else (
            f"{name_of(p[more])} and {name_of(p[less])} need equally many tokens, to half a percent,")
        lines.append(f"For the lowest loss that both reached, {needs} ({where(entries, p['size'], p['context'])}). The paper's "
                     f"{PAPER_EFFICIENCY} times, Longhorn against Mamba, is of another experiment: 1.3B parameters, SlimPajama, "
                     "perplexity on eight tasks.")
    done = len({(f["model"], f["context"]) for f in found.fits if f["fit"]})
    lines.append(f"The law L(N, D) is fitted for {plural(done, 'family', 'families')}." if done else
                 "No law L(N, D) could be fitted: what is missing stands below.")
    if found.runs:
        hours = listed(f"{power(v)} {kind}" for kind, v in hours_of(found.runs).items())
        lines.append(f"All used runs together took {power(sum(r.flops for r in found.runs))} FLOPs and {hours}.")
    return lines


def table1(found, style):
    """The blocks of Table 1 and of the learning rates behind it."""
    plan, entries = found.plan, found.entries
    columns, several = columns_of(entries), len({e.context for e in entries}) > 1
    contexts = {size: [c for s, c in columns if s == size] for size, _ in columns}
    models = sorted({e.model for e in entries}, key=family_order)
    has_bits = any(bits(e) is not None for e in entries)
    entry = {(e.model, e.size, e.context): e for e in entries}
    head, rows = ["model"], []
    for size in contexts:
        head.append(f"{size}: parameters")
        for context in contexts[size]:
            head += [f"{size}{f', T={context}' if several else ''}: loss"] + ["bits per byte"] * has_bits
    for model in models:
        row = [family(model, style)]
        for size in contexts:
            here = [e for c in contexts[size] if (e := entry.get((model, size, c))) and e.runs]
            paper = f"; paper {PAPER[model][size][0]}M" if any(e.paper(plan) for e in here) else ""
            row.append(human3(here[0].parameters, 4) + paper if here else DASH)
            for context in contexts[size]:
                e = entry.get((model, size, context))
                text = loss_text(e) + (f"; paper {e.paper(plan):.3f}" if e.paper(plan) else "") if e and e.runs else DASH
                row.append(Strong(text) if found.won[size, context].family == model else text)
                row += [DASH if not e or bits(e) is None else f"{bits(e):.4f}"] * has_bits
        rows.append(row)
    blocks = [("text", "Validation loss in nats a token: mean \u00b1 standard deviation over the seeds (how many), at the "
                       "learning rates below. Bold: significantly below every other family (Welch's t test over seeds, Holm's "
                       "correction, p < 0.05)." + (" What stands behind the word paper is the paper's figure for that cell."
                                       if plan.get("paper") is True else "")),
              ("table", head, rows), ("list", table_notes(found))]
    used = [e for e in entries if e.runs]
    tried = Counter(tuple(e.tried) for e in used)
    usual = max(tried, key=tried.get, default=())
    rates = [[family(m, style), *((f"{e.rate:g}" + (f", {e.edge}" if e.edge else "")
                                   + ("" if tuple(e.tried) == usual else f" of {', '.join(f'{r:g}' for r in e.tried)}"))
                                  if (e := entry.get((m, *c))) and e.runs else DASH for c in columns)] for m in models]
    text = f"Learning rates: of those tried ({', '.join(f'{r:g}' for r in usual)} where nothing else stands)"
    text += ", the one with which the first seed ended lowest on the validation set."
    if any(len(t) > 1 for t in tried):
        text += " To choose on the set that the table reports flatters that seed a little, the more so the more rates were tried."
    edges, alone = sum(e.edge in ("lowest", "highest") for e in used), sum(e.edge == "only one" for e in used)
    if alone:
        text += f" In {alone} of {plural(len(used), 'cell')} nothing else was tried: a better one may exist."
    if edges:
        text += f" In {edges} of {plural(len(used), 'cell')} it is at the edge of what was tried: a better one may lie beyond."
    return blocks + [("text", text), ("table", ["model", *(where(entries, *c) for c in columns)], rates)]


def table_notes(found):
    """What the table cannot say: who won and why not, which cells are holes or short of seeds."""
    notes = []
    for (size, context), won in found.won.items():
        title = where(found.entries, size, context)
        notes.append(f"{title}: {in_families(won.reason, found.entries)}.")
        for e in (e for e in found.entries if (e.size, e.context) == (size, context)):
            notes += [f"{title}, {name_of(e.model)}: {note}." for note in e.notes]
            if not e.runs:
                why = {found.left_out[n] for n, at in found.plan["cells"].items() if n in found.left_out
                       and at.get("stage") != "ladder"
                       and (at.get("model"), at.get("size"), at.get("context")) == (e.model, size, context)}
                notes.append(f"{title}, {name_of(e.model)}: no usable run ({'; '.join(sorted(why)) or 'none is planned'}).")
            elif len(e.runs) < e.planned:
                notes.append(f"{title}, {name_of(e.model)}: {len(e.runs)} of {e.planned} planned seeds are usable.")
    return notes


def paper_table(style):
    rows = [[family(m, style), *(f"{v:.1f}M" if i in (0, 3) else f"{v:.3f}" for i, v in enumerate(p["120M"] + p["350M"]))]
            for m, p in PAPER.items()]
    return [("text", "The paper's numbers, not ours: its Table 1, validation loss on OpenWebText, one run a cell. They compare "
                     "with a run of ours only where data, vocabulary, size and tokens are the same."),
            ("table", ["the paper's", "120M: parameters", "T=1024", "T=4096", "350M: parameters", "T=1024", "T=4096"], rows)]


def efficiency_blocks(found, style):
    """Sample efficiency of every pair at every size, and how to read it."""
    entries, pairs = found.entries, found.pairs
    if not pairs:
        return [("text", "Sample efficiency needs two families at the same size and context: there are none.")]
    columns = list(dict.fromkeys((p["size"], p["context"]) for p in pairs))
    at = {(p["a"], p["b"], p["size"], p["context"]): p for p in pairs}
    kinds = ["curve", "budgets"] if any(p["budgets"] for p in pairs) else ["curve"]
    rows, missing = [], []
    for a, b in dict.fromkeys((p["a"], p["b"]) for p in pairs):
        row = [f"{name_of(a)} over {name_of(b)}"]
        for c in columns:
            for kind in kinds:
                ratio = at[(a, b, *c)][kind] if (a, b, *c) in at else None
                row.append(f"{ratio.at_end:.2f}\u00d7 at {ratio.loss_at_end:.3f}" if ratio and ratio.at_end else DASH)
                if ratio and ratio.reason:
                    missing.append(f"{row[0]}, {where(entries, *c)}: {ratio.reason}.".replace(
                        "family a", name_of(a)).replace("family b", name_of(b)))
        rows.append(row)
    titles = {"curve": "along the runs", "budgets": "between budgets"}
    text = ("How many times the tokens of the first family the second needs for the same validation loss, here at the lowest "
            "loss that both reached; above 1 the first learns from fewer tokens. Along the runs: from the evaluations of the "
            "table's runs, mean over seeds; all but the last were made before the learning rate had decayed.")
    if "budgets" in kinds:
        text += (" Between budgets: from the final losses of runs of several lengths, each with its own schedule, joined by "
                 "straight lines in log tokens.")
    return [("text", f"{text} The paper reports {PAPER_EFFICIENCY}\u00d7 for Longhorn over Mamba, at 1.3B parameters."),
            ("table", ["pair"] + [f"{where(entries, *c)}: {titles[k]}" for c in columns for k in kinds], rows),
            ("figure", "efficiency"), *([("quiet", "pairs without a figure", [("list", missing)])] if missing else [])]


def matrix_blocks(found, style):
    """Every ordered pair of families at the largest size."""
    size, context = columns_of([e for e in found.entries if e.runs])[-1]
    here = [e for e in found.entries if (e.size, e.context) == (size, context) and e.runs]
    pairs = [(a.model, b.model) for a in here for b in here if a is not b]
    ratio = {(p["a"], p["b"]): p["curve"].at_end for p in efficiencies(here, pairs)}
    rows = [[family(a.model, style), *("1" if a is b else f"{r:.2f}" if (r := ratio[a.model, b.model]) else DASH for b in here)]
            for a in here]
    return [("text", f"Any two families at {where(found.entries, size, context)}, along the runs: tokens that the column's "
                     "family needs over those that the row's needs."), ("table", ["", *(name_of(e.model) for e in here)], rows)]


def fit_blocks(found, style):
    """The fitted laws, what stands against them, and the isoFLOP parabolas with their warning."""
    fits, several = found.fits, len({f["context"] for f in found.fits}) > 1
    rows, said, vague = [], {}, {}
    for f in fits:
        how = "with" if f["embeddings"] else "without"
        who = name_of(f["model"]) + (f" at T={f['context']}" if several else "")
        for sentence in [f"cannot be fitted: {f['cannot']}"] * bool(f["cannot"]) + f["warnings"]:
            if " is hardly determined" in sentence:  # the table has the interval
                vague.setdefault(who, {})[sentence.split(" ")[0]] = None
                continue
            said.setdefault(sentence, {}).setdefault(who, []).append(how)
        if f["fit"]:
            rows.append([family(f["model"], style), *([str(f["context"])] * several), how,
                         *(interval(f["fit"], c) for c in ("E", "A", "alpha", "B", "beta", "a")), str(f["fit"].points),
                         DASH if f["fit"].noise is None else f"{f['fit'].noise:.2%}"])
    share = next((f["fit"].confidence for f in fits if f["fit"]), 0.9)
    blocks = [("text", "L(N, D) = E + A / N^alpha + B / D^beta by the summed Huber loss (delta 0.001) of log L, from many "
                       f"starts, over the seeds and budgets of each family; in brackets {share:.0%} intervals, by refits to "
                       "simulated "
                       "runs. a: N_opt ~ C^a. N with and without the embedding, because the exponents depend on it.")]
    if rows:
        blocks += [("table", ["model", *(["context"] * several), "embedding in N", "E", "A", "alpha", "B", "beta", "a", "runs",
                              "noise"], rows)]
    if said:
        ways, families = len({f["embeddings"] for f in fits}), len({(f["model"], f["context"]) for f in fits})
        whom = lambda whose: "every family" if 2 < families == len(whose) and all(len(h) == ways for h in whose.values()) else (
            listed(who if len(hows) == ways else f"{who} ({hows[0]} embedding)" for who, hows in whose.items()))
        blocks += [("list", [f"{whom(whose)}: {sentence}." for sentence, whose in said.items()])]
    if vague:
        blocks += [("text", "Hardly determined, with an interval wider than the value: "
                    + "; ".join(f"{who} {', '.join(names)}" for who, names in vague.items()) + ".")]
    blocks += [("figure", "fit")] if rows else []
    rows, said = [], {}
    for i in found.isoflops:
        who = name_of(i["model"]) + (f" at T={i['context']}" if several else "")
        for sentence in [i["cannot"]] if i["cannot"] else i["isoflop"].warnings[1:]:
            said.setdefault(sentence, []).append(who)
        rows += [[family(i["model"], style), power(b["C"]), str(b["sizes"]), human3(b["N_opt"]), f"{b['loss']:.4f}",
                  DASH if i["isoflop"].exponent is None else f"{i['isoflop'].exponent:.2f}"]
                 for b in (i["isoflop"].budgets if i["isoflop"] else ()) if b["N_opt"]]
    blocks += [("text", f"IsoFLOP parabolas, over runs within {ISOFLOP_TOLERANCE:.0%} of each other's FLOPs. Warning: "
                        f"{fit.ISOFLOP_BIAS}." + ("" if rows else " No family has a budget with a vertex."))]
    blocks += [("table", ["model", "FLOPs", "sizes", "N_opt", "loss there", "a of N_opt ~ C^a"], rows)] if rows else []
    return blocks + ([("quiet", "budgets without a parabola",
                       [("list", [f"{listed(who)}: {s}." for s, who in said.items()])])] if said else [])


def cost_blocks(found, style):
    gpu = any(on_gpu(r) for r in found.runs)
    kind = "GPU hours" if gpu else "CPU hours"
    rows = [[family(e.model, style), where(found.entries, e.size, e.context), human3(e.tokens), power(e.runs[0].flops),
             f"{statistics.fmean(r.seconds for r in e.runs):,.0f}", power(e.hours),
             f"{statistics.fmean(r.tokens / max(r.seconds, 1e-9) for r in e.runs):,.0f}"] for e in found.entries if e.runs]
    return [("text", f"One run of the table, mean over its seeds. Seconds include evaluations and checkpoints; {kind}: seconds x "
                     "processes / 3600" + ("." if gpu else ", without a GPU; runs side by side slow one another.")),
            ("table", ["model", "size", "tokens", "FLOPs", "seconds", kind, "tokens a second"], rows)]


def run_blocks(found, out, style):
    """Every cell of the plan with links to its records, as seen from `out`."""
    by_name, rows = {r.name: r for r in found.runs}, []
    for name, at in found.plan["cells"].items():
        run, records = by_name.get(name), [found.folder / name / n for n in ("config.json", "log.jsonl", "result.json")]
        links = [(p.name, quote(Path(os.path.relpath(p, out)).as_posix())) for p in records if p.is_file()]
        rows.append([name, str(at.get("stage", "")), f"{run.loss:.4f}" if run else DASH, f"{run.seconds:,.0f}" if run else DASH,
                     links or DASH, "used" if run else found.left_out.get(name, "left out")])
    return [("quiet", f"{plural(len(rows), 'run')} and their records",
             [("table", ["run", "stage", "loss", "seconds", "records", "status"], rows)])]


def left_out_blocks(left_out):
    reasons = {}
    for name, why in left_out.items():
        reasons.setdefault(why, []).append(name)
    if not reasons:
        return [("text", "No run was left out.")]
    return [("text", "The numbers of these runs are in no mean, fit or figure of this report."),
            ("list", [f"{why} ({len(names)}): {', '.join(names)}" for why, names in reasons.items()])]


def reproduce_blocks(found):
    plan, runs, days = found.plan, found.runs, []
    for r in runs:
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            days.append(str(json.loads((r.folder / "config.json").read_text())["time"])[:10])
    commits = sorted({r.commit for r in runs if r.commit}) or [str(plan.get("commit") or "unknown")]
    devices = sorted({f"{r.device}, {plural(r.processes, 'process', 'processes')}" for r in runs})
    lines = [f"run: {plan.get('command') or 'python experiments/scaling/table1.py run --preset=' + str(plan.get('preset') or '...')}",
             f"report, from the records alone: python experiments/scaling/table1.py report {found.folder.name}",
             f"commit: {listed(commits)}" + (" (+: with changes that were not committed)" if "+" in commits[0] else ""),
             f"machine: {listed(devices) if devices else plan.get('machine') or 'unknown'}",
             f"runs begun: {min(days)} to {max(days)}" if days else "runs begun: unknown"]
    for key in ("torch", "python"):
        versions = sorted({str(r.environment[key]) for r in runs if r.environment.get(key)})
        lines += [f"{key}: {listed(versions)}"] if versions else []
    return [("list", lines)]


def sections(found, out, style):
    """[(heading, blocks)] of the whole report."""
    have = any(e.runs for e in found.entries)
    empty = [("text", "There is no usable run.")]
    return [("In short", [("list", in_short(found))]),
            ("Table 1", table1(found, style) if found.entries else empty),
            ("The paper's Table 1", paper_table(looks(PAPER))),
            ("Figure 5: loss against tokens and parameters",
             [("text", "Lines: mean over seeds, with a band of one standard deviation. Right of them the loss at the end. "
                       "Against parameters: the mean, a dash for each seed, and where a law is fitted its line at the table's "
                       "budget."),
              ("figure", "figure5")] if have else empty),
            ("Sample efficiency", efficiency_blocks(found, style) + (matrix_blocks(found, style) if have else [])),
            ("The law L(N, D)", fit_blocks(found, style) if have else empty),
            ("Cost", cost_blocks(found, style) if have else empty),
            ("Left out", left_out_blocks(found.left_out)),
            ("Runs", run_blocks(found, out, style)),
            ("Once more", reproduce_blocks(found))]


# ----------------------------------------------------------------------------------------------------------------- render

def as_markdown(title, parts, pictures):
    def safe(text):
        text = html.escape(" ".join(str(text).split()), quote=False)
        return "".join("\\" + c if c in "|*[]`" else c for c in text)

    def cell(c):
        if isinstance(c, list):
            return " ".join(f"[{safe(text)}]({link})" for text, link in c)
        return f"**{safe(c)}**" if isinstance(c, Strong) else safe(c)

    def blocks(them):
        lines = []
        for kind, *rest in them:
            if kind == "text":
                lines += [safe(rest[0]), ""]
            elif kind == "list":
                lines += [*(f"- {safe(line)}" for line in rest[0]), ""]
            elif kind == "table":
                head, rows = rest
                lines += ["| " + " | ".join(map(safe, head)) + " |", "|" + "---|" * len(head),
                          *("| " + " | ".join(map(cell, row)) + " |" for row in rows), ""]
            elif kind == "figure" and pictures.get(rest[0]):
                lines += [f"![{safe('; '.join(p.alt for p in pictures[rest[0]]))}]({rest[0]}.png)", ""]
            elif kind == "quiet":
                lines += [f"### {safe(rest[0])}", "", *blocks(rest[1])]
        return lines

    lines = [f"# {safe(title)}", ""]
    for heading, them in parts:
        lines += [f"## {heading}", "", *blocks(them)]
    return "\n".join(lines)


CSS = """
:root { color-scheme: light dark;
 --ink: #1d1d1f; --soft: #5c5f66; --line: #d9dbe0; --page: #ffffff; --shade: #f5f6f8; --link: #0b57b0 }
@media (prefers-color-scheme: dark) {
 :root { --ink: #e8e8ea; --soft: #a4a8b0; --line: #3b3e45; --page: #17181b; --shade: #212328; --link: #8ab8f5 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 66rem; padding: 1.2rem 1rem 4rem; color: var(--ink); background: var(--page);
 font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; overflow-wrap: break-word }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .2rem 0 } h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem }
p, ul { max-width: 46rem } ul { padding-left: 1.15rem } li { margin: .25rem 0 } .about, figcaption { color: var(--soft) }
a { color: var(--link) } nav a { margin-right: .9rem; white-space: nowrap } .short { background: var(--shade);
 border-radius: .5rem; padding: .7rem 1rem .7rem 2rem; max-width: none }
.scroll { overflow-x: auto; margin: .8rem 0 1.2rem; border: 1px solid var(--line); border-radius: .5rem }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; width: 100% }
th, td { padding: .38rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line) }
th { background: var(--shade); font-weight: 600; vertical-align: bottom; white-space: normal; min-width: 4.5rem }
tr:last-child td { border-bottom: 0 } th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
 background: var(--page); min-width: 0 } th:first-child { background: var(--shade) }
table.runs td:first-child { position: static } table.runs td { text-align: left } table.runs td:last-child { white-space: normal }
i.dot { display: inline-block; width: .65em; height: .65em; border-radius: 50%; margin-right: .5em;
 border: 1px solid var(--soft) }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 27rem), 1fr)); gap: .8rem; margin: 1rem 0 }
.panels img { width: 100%; height: auto; display: block; background: #fff; border-radius: .5rem; border: 1px solid var(--line);
 padding: .3rem } summary { cursor: pointer; color: var(--link); margin: .6rem 0 }
"""


def as_html(title, about, parts, pictures):
    """The page: no script, no request, every figure inside."""
    safe = lambda text: html.escape(str(text), quote=True)
    key = lambda heading: "".join(c if c.isalnum() else "-" for c in heading.lower())

    def cell(c):
        if isinstance(c, list):
            return " ".join(f'<a href="{safe(link)}">{safe(text)}</a>' for text, link in c)
        if isinstance(c, Family):
            return f'<i class="dot" style="background:{c.colour}"></i>{safe(c)}'
        return f"<strong>{safe(c)}</strong>" if isinstance(c, Strong) else safe(c)

    def blocks(them, name=""):
        for kind, *rest in them:
            if kind == "text":
                yield f"<p>{safe(rest[0])}</p>"
            elif kind == "list" and rest[0]:
                yield f'<ul class="{name}">' + "".join(f"<li>{safe(line)}</li>" for line in rest[0]) + "</ul>"
            elif kind == "table":
                head, rows = rest
                yield (f'<div class="scroll" tabindex="0"><table class="{"runs" if "records" in head else ""}"><thead><tr>'
                       + "".join(f'<th scope="col">{safe(h)}</th>' for h in head) + "</tr></thead><tbody>"
                       + "".join("<tr>" + "".join(f"<td>{cell(c)}</td>" for c in row) + "</tr>" for row in rows)
                       + "</tbody></table></div>")
            elif kind == "figure":
                yield '<div class="panels">' + "".join(
                    f'<img alt="{safe(p.alt)}" src="data:image/svg+xml;base64,{base64.b64encode(p.svg).decode()}">'
                    for p in pictures.get(rest[0], ())) + "</div>"
            elif kind == "quiet":
                yield f"<details><summary>{safe(rest[0])}</summary>" + "".join(blocks(rest[1])) + "</details>"

    body = "".join(f'<section><h2 id="{key(h)}">{safe(h)}</h2>' + "".join(blocks(them, "short" if h == "In short" else ""))
                   + "</section>\n" for h, them in parts)
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{safe(title)}</title>\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
            f"<style>{CSS}</style></head>\n<body><header><h1>{safe(title)}</h1><p class=\"about\">{safe(about)}</p><nav>"
            + " ".join(f'<a href="#{key(h)}">{safe(h.split(":")[0])}</a>' for h, _ in parts) + "</nav></header>\n"
            f"{body}</body></html>\n")


# ------------------------------------------------------------------------------------------------------------------- main

def write(folder, out=None, embeddings=(True, False), pairs=None, bootstrap=200):
    """Writes the report of a sweep's folder into `out` (default: the folder itself). Returns {name: path} of what it wrote.

    Args:
        embeddings: True, False or both: whether N of the fits counts the embedding.
        pairs: [(a, b)] of families for the sample efficiency; default: Longhorn, or else the first family, over every other.
        bootstrap: simulated sweeps behind the intervals of the fits.
    Raises ConfigError where there is no plan, or where `out` cannot be written.
    """
    found, out = analyse(folder, embeddings, pairs, bootstrap), Path(out or folder)
    plan, style = found.plan, looks({e.model for e in found.entries})
    pictures = {"figure5": figure5(found.entries, found.fits, style), "fit": fit_panels(found.entries, found.fits, style),
                "efficiency": efficiency_panels(found.entries, found.pairs, style)}
    title = f"Scaling sweep {found.folder.resolve().name}"
    about = "; ".join(str(v) for v in (plan.get("machine"), f"commit {str(plan['commit'])[:12]}" if plan.get("commit") else None,
                                       f"{len(found.runs)} runs used, {len(found.left_out)} left out") if v)
    try:
        out.mkdir(parents=True, exist_ok=True)
        paths = draw(pictures, out)
        parts = sections(found, out, style)
        paths |= {name: out / name for name in ("table1.md", "report.json", "report.html")}
        write_json(paths["report.json"], as_json(found))
        paths["table1.md"].write_text(as_markdown(title, parts, pictures), encoding="utf-8")
        paths["report.html"].write_text(as_html(title, about, parts, pictures), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write to {out} ({error.strerror}): choose another --out") from None
    return paths


def draw(pictures, out):
    """Draws every figure into `out` as PNG and SVG, and every panel into `panel.svg` for the page. Returns {name: path}."""
    paths = {}
    for name, panels in pictures.items():
        columns = min(max(len(panels), 1), 2 if len(panels) == 4 else 3)
        if panels:
            paths |= {f"{name}.{kind}": out / f"{name}.{kind}" for kind in ("png", "svg")}
            picture(panels, *(out / f"{name}.{kind}" for kind in ("png", "svg")), columns=columns)
        for panel in panels:
            drawn = io.BytesIO()
            picture([panel], drawn)
            panel.svg = drawn.getvalue()
        if not panels:  # of an earlier report
            for kind in ("png", "svg"):
                (out / f"{name}.{kind}").unlink(missing_ok=True)
    return paths
