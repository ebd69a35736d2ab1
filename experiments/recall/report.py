"""Figure 4 from the records of experiments/recall/mqar.py: recall against width and against state size, a panel for each T.

    recall of a point = mean over the seeds at the learning rate whose mean is best; its bar: from the worst seed to the best

The surprise: there is nothing to compare with but the paper's picture, which gives no numbers; so none of the paper's is here.

`python experiments/recall/mqar.py report` writes report.json, report.md and figure4.png.
"""

import json
import math
import sys
from collections import Counter
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.scaling import sweep  # noqa: E402
from experiments.scaling.sweep import BadRecord  # noqa: E402
from records import read_log, write_json  # noqa: E402

# Cells are compared where these agree. A length has its own number of pairs and batch size, a seed its own examples.
SAME = ("vocab_size", "power_a", "train_examples", "test_examples", "epochs", "stop_at", "weight_decay", "dtype", "eval_interval")
SAME_AT_A_LENGTH = ("pairs", "batch_size")
COLOURS = {"attention": "#222222", "based": "tab:brown", "hyena": "tab:pink", "rwkv4": "tab:olive", "baseconv": "tab:gray",
           "mamba": "tab:purple", "longhorn": "tab:red", "deltanet": "tab:green", "gla": "tab:orange",
           "longhorn_exact": "tab:blue"}
NAMES = {"attention": "Attention", "based": "Based", "hyena": "Hyena", "rwkv4": "RWKV-4", "baseconv": "BaseConv",
         "mamba": "Mamba", "longhorn": "Longhorn", "deltanet": "DeltaNet", "gla": "GLA", "longhorn_exact": "Longhorn, exact"}


def name_of(mixer):
    return NAMES.get(mixer, mixer)


# -------------------------------------------------------------------------------------------------------------------- read

def read_cell(folder, at):
    """config.json, result.json of a finished run and the plan's coordinates in one table. Raises BadRecord."""
    result, record = sweep.finished_records(folder)
    try:
        config, where = record["config"], record["environment"]
        for key in ("mixer", "T", "n_embd", "learning_rate", "seed"):
            if len({result[key], config[key], at[key]}) > 1:
                raise BadRecord(f"{key} is {result[key]} in result.json, {config[key]} in config.json, {at[key]} in the plan")
        if result["commit"] != where["commit"]:
            raise BadRecord("result.json and config.json are of two commits")
        if result["diverged_at_step"] is not None:
            raise BadRecord(f"diverged at step {result['diverged_at_step']}")
        accuracy = result["accuracy"]
        if not isinstance(accuracy, (int, float)) or not 0 <= accuracy <= 1:
            raise BadRecord(f"its accuracy is {accuracy}")
        events = read_log(folder, "eval")
        if not events or (events[-1]["step"], events[-1]["accuracy"]) != (result["steps"], accuracy):
            raise BadRecord("log.jsonl does not end with the accuracy in result.json")
        return {**result, "config": {key: config[key] for key in (*SAME, *SAME_AT_A_LENGTH)}, "data": record["data"],
                "commit": sweep.version(where), "machine": where["gpu"] or where["cpu"],
                "curve": [(e["epoch"], e["accuracy"]) for e in events]}
    except (KeyError, TypeError) as error:
        raise BadRecord(f"its records lack {error}") from None


def read_cells(folder):
    """(cells, left_out): the finished runs of a sweep that may be compared, and {name: why} of all others in its plan.

    Raises ConfigError where there is no plan.
    """
    cells, left_out = {}, {}
    for name, at in sweep.read_plan(folder)["cells"].items():
        try:
            cells[name] = read_cell(Path(folder) / name, at)
        except BadRecord as reason:
            left_out[name] = str(reason)

    def leave_out(group, values):
        """Of the cells of a group, those whose values are not most's."""
        kinds = {}
        for cell in cells.values():
            kinds.setdefault(group(cell), Counter())[json.dumps(values(cell))] += 1
        for name, cell in list(cells.items()):
            most, own = json.loads(kinds[group(cell)].most_common(1)[0][0]), values(cell)
            if other := [f"{key} {own[key]} where most have {most[key]}" for key in own if own[key] != most[key]]:
                left_out[name] = "not comparable: " + ", ".join(other)
                del cells[name]

    leave_out(lambda c: 0, lambda c: {"commit": c["commit"], **{key: c["config"][key] for key in SAME}})
    leave_out(lambda c: c["T"], lambda c: {key: c["config"][key] for key in SAME_AT_A_LENGTH})
    leave_out(lambda c: (c["T"], c["seed"]), lambda c: c["data"])
    return list(cells.values()), left_out


# --------------------------------------------------------------------------------------------------------------- summarise

def pooled(rows, *keys):
    """Rows [{*keys, "queries", "accuracy"}] of several seeds as one a key, accuracies weighted by their queries."""
    at = {}
    for row in rows:
        at.setdefault(tuple(row[k] for k in keys), []).append(row)
    out = []
    for key, same in sorted(at.items()):
        queries = sum(r["queries"] for r in same)
        out.append({**dict(zip(keys, key, strict=True)), "queries": queries,
                    "accuracy": sum(r["accuracy"] * r["queries"] for r in same) / queries})
    return out


def summarise(cells):
    """The points of Figure 4: one table for each T, width and mixer, in this order, at its best learning rate.

    A rate that fewer seeds have finished than another does not compete with it.
    """
    points = {}
    for cell in cells:
        points.setdefault((cell["T"], cell["n_embd"], cell["mixer"]), {}).setdefault(cell["learning_rate"], []).append(cell)
    order = {mixer: i for i, mixer in enumerate(NAMES)}
    rows = []
    for (T, n_embd, mixer), rates in sorted(points.items(), key=lambda p: (*p[0][:2], order.get(p[0][2], 99), p[0][2])):
        rate = max(rates, key=lambda r: (len(rates[r]), mean(c["accuracy"] for c in rates[r]), -r))
        best = rates[rate]
        accuracies = [c["accuracy"] for c in best]
        rows.append({"T": T, "pairs": best[0]["pairs"], "n_embd": n_embd, "mixer": mixer, "accuracy": mean(accuracies),
                     "lowest": min(accuracies), "highest": max(accuracies), "seeds": sorted(c["seed"] for c in best),
                     "reached": sum(c["reached"] for c in best), "learning_rate": rate,
                     "rates": {f"{r:g}": mean(c["accuracy"] for c in rates[r]) for r in sorted(rates)},
                     "epochs": mean(c["epochs"] for c in best), "steps": mean(c["steps"] for c in best),
                     "seconds": mean(c["seconds"] for c in best), "parameters": best[0]["parameters"],
                     "state_size": best[0]["state_size"],
                     "by_distance": pooled([r for c in best for r in c["by_distance"]], "from", "to"),
                     "by_pairs": pooled([r for c in best for r in c["by_pairs"]], "pairs")})
    return rows


def table(head, rows):
    """Lines of a Markdown table with aligned columns."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    line = lambda row: "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
    return [line(head), "|" + "|".join("-" * (w + 2) for w in widths) + "|", *map(line, rows)]


def percent(x):
    return f"{100 * x:.1f}"


def markdown(report):
    """report.md, a list of lines."""
    rows, left_out = report["points"], report["left_out"]
    lines = ["# Multi-query associative recall", "",
             f"{report['runs']} runs, {', '.join(report['machines'])}, commit {report['commit'] or 'unknown'}. "
             + "; ".join(f"{key} {value}" for key, value in report["settings"].items()) + ".",
             "Recall in percent of the test's queries, at the best of the learning rates; runs stop where they have reached "
             "stop_at, so that values above it say no more than that.", ""]
    cells = []
    for r in rows:
        spread = f" ({percent(r['lowest'])} .. {percent(r['highest'])}, {len(r['seeds'])} seeds)" if len(r["seeds"]) > 1 else ""
        cells.append([str(r["T"]), str(r["pairs"]), str(r["n_embd"]), name_of(r["mixer"]), percent(r["accuracy"]) + spread,
                      f"{r['learning_rate']:g}", ", ".join(f"{k}: {percent(a)}" for k, a in r["rates"].items()),
                      f"{r['epochs']:.2f}", f"{r['seconds']:.0f}", f"{r['state_size']:,}", f"{r['parameters']:,}"])
    lines += table(["T", "pairs", "width", "mixer", "recall", "best rate", "all rates", "epochs", "seconds", "state, numbers",
                    "parameters"], cells)
    for T in dict.fromkeys(r["T"] for r in rows):
        width = min(r["n_embd"] for r in rows if r["T"] == T)
        here = [r for r in rows if (r["T"], r["n_embd"]) == (T, width)]
        for title, key, label in (
                ("by the tokens from a key to its query", "by_distance", lambda b: f"{b['from']}-{b['to'] - 1}"),
                (f"by the number of pairs (trained with {here[0]['pairs']})", "by_pairs", lambda b: str(b["pairs"]))):
            columns = list(dict.fromkeys(label(b) for r in sorted(here, key=lambda r: -len(r[key])) for b in r[key]))
            lines += ["", f"T = {T}, width {width}, {title}:", "", *table(["mixer", *columns], [
                [name_of(r["mixer"]), *({label(b): percent(b["accuracy"]) for b in r[key]}.get(c, "-") for c in columns)]
                for r in here])]
    if left_out:
        lines += ["", f"Left out, {len(left_out)} of {report['planned']} planned runs:", "",
                  *(f"- {name}: {why}" for name, why in left_out.items())]
    return lines


# ------------------------------------------------------------------------------------------------------------------ figure

def draw(report, path):
    """Figure 4 into `path`: above recall against width (bars where there is one width), below against the state, for each T."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = report["points"]
    lengths = list(dict.fromkeys(r["T"] for r in rows))
    mixers = [m for m in dict.fromkeys((*NAMES, *(r["mixer"] for r in rows))) if any(r["mixer"] == m for r in rows)]
    spare = iter(plt.cm.tab20.colors)
    colour = {m: COLOURS.get(m) or next(spare) for m in mixers}
    figure, axes = plt.subplots(2, len(lengths), figsize=(max(6.0, 4.1 * len(lengths)), 7.4), dpi=120, squeeze=False)
    for column, T in enumerate(lengths):
        here = [r for r in rows if r["T"] == T]
        widths = sorted({r["n_embd"] for r in here})
        top, below = axes[:, column]
        for i, m in enumerate(m for m in mixers if any(r["mixer"] == m for r in here)):
            mine = [r for r in here if r["mixer"] == m]
            y, off = [r["accuracy"] for r in mine], [[r["accuracy"] - r["lowest"] for r in mine],
                                                     [r["highest"] - r["accuracy"] for r in mine]]
            thick = {"lw": 2.4 if m == "longhorn" else 1.3, "color": colour[m], "capsize": 2, "marker": "o", "ms": 4}
            if len(widths) > 1:
                top.errorbar([r["n_embd"] for r in mine], y, off, **thick)
            else:
                top.barh(-i, y, xerr=off, color=colour[m], height=0.7)
                top.text(y[0] + 0.02 if y[0] < 0.5 else 0.02, -i, f"{name_of(m)} {percent(y[0])}", va="center", fontsize=8,
                         color="black" if y[0] < 0.5 else "white")
            below.errorbar([r["state_size"] for r in mine], y, off, label=name_of(m), **thick)
        title = f"T = {T}, {here[0]['pairs']} pairs" + ("" if len(widths) > 1 else f", width {widths[0]}")
        if len(widths) > 1:
            top.set(xscale="log", xlabel="width", ylabel="recall", title=title, ylim=(-0.03, 1.03))
            top.set_xticks(widths, widths)
            top.minorticks_off()
        else:
            top.set(xlabel="recall", title=title, xlim=(0, 1.03), yticks=[], ylim=(0.5 - len(mixers), 0.5))
        below.set(xscale="log", xlabel="numbers of state a sequence at T", ylabel="recall", ylim=(-0.03, 1.03))
        below.xaxis.set_minor_formatter("")
        for a in (top, below):
            a.grid(alpha=0.3)
            a.set_axisbelow(True)
            a.axhline(1, color="black", lw=0.4) if a is below or len(widths) > 1 else a.axvline(1, color="black", lw=0.4)
    handles = {}
    for a in axes[1]:
        handles |= dict(zip(*reversed(a.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles, loc="lower center", ncol=min(len(handles), 3 + 2 * len(lengths)), frameon=False,
                  fontsize=8.5)
    figure.tight_layout(rect=(0, 0.03 + 0.03 * math.ceil(len(handles) / (3 + 2 * len(lengths))), 1, 1))
    figure.savefig(path)
    plt.close(figure)


def write(folder, out=None):
    """Report of the sweep in `folder` into `out` (default: the folder itself); {kind: path}, and says what was left out.

    Raises ConfigError where there is no plan.
    """
    folder, out = Path(folder), Path(out or folder)
    cells, left_out = read_cells(folder)
    report = {"runs": len(cells), "planned": len(cells) + len(left_out), "preset": sweep.read_plan(folder).get("preset"),
              "machines": sorted({c["machine"] for c in cells}), "commit": cells[0]["commit"] if cells else None,
              "settings": {key: cells[0]["config"][key] for key in SAME} if cells else {}, "points": summarise(cells),
              "left_out": left_out}
    out.mkdir(parents=True, exist_ok=True)
    paths = {"json": out / "report.json", "markdown": out / "report.md"}
    write_json(paths["json"], report)
    paths["markdown"].write_text("\n".join(markdown(report)) + "\n")
    if report["points"]:
        paths["figure"] = out / "figure4.png"
        draw(report, paths["figure"])
    return paths
