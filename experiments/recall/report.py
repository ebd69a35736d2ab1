"""Figure 4 from the records of experiments/recall/mqar.py: recall against width and against state size, for each T.

    recall of a point = mean over the seeds at the learning rate whose mean is best; its bar: from the worst seed to the best

`mqar.py report FOLDER` reads a sweep and writes report.json (one record of all its runs), report.md and report.png;
`mqar.py report RECORD.json` draws the latter two from such a record alone. The paper's Figure 4 gives no numbers, so none
of the paper's stand here.
"""

import json
from collections import Counter
from pathlib import Path
from statistics import mean

from configurator import ConfigError
from experiments.scaling import sweep
from experiments.scaling.sweep import BadRecord
from records import read_log

# Runs are compared where these agree. A length has its own number of pairs and batch, a seed its own examples.
SAME = ("vocab_size", "power_a", "train_examples", "test_examples", "epochs", "stop_at", "optimizer", "weight_decay",
        "schedule", "grad_clip", "n_layer", "dtype")
SAME_AT_A_LENGTH = ("pairs", "batch_examples", "eval_interval")
COORDINATES = {"mixer": "model", "T": "block_size", "n_embd": "n_embd", "learning_rate": "learning_rate", "seed": "seed"}
OUTCOME = ("accuracy", "reached", "val_loss", "by_distance", "by_pairs", "steps", "seconds", "parameters", "state_size",
           "memory_bytes", "processes", "device_name")
NAMES = {"attention": "Attention", "based": "Based", "hyena": "Hyena", "rwkv4": "RWKV-4", "baseconv": "BaseConv",
         "mamba": "Mamba", "longhorn": "Longhorn", "deltanet": "DeltaNet", "gla": "GLA",
         "longhorn_exact": "Longhorn, exact"}
COLOURS = dict(zip(NAMES, ("#222222", "tab:brown", "tab:pink", "tab:olive", "tab:gray", "tab:purple", "tab:red",
                           "tab:green", "tab:orange", "tab:blue"), strict=True))


def name_of(mixer):
    return NAMES.get(mixer, mixer)


# ---------------------------------------------------------------------------------------------------------------- read

def read_cell(folder, at, accept_code=()):
    """One finished run as a flat record. Raises BadRecord where its files are missing, torn or at odds."""
    result, record = sweep.finished_records(folder)
    try:
        config, ran_in = record["config"], record["environment"]
        cell = {key: config[setting] for key, setting in COORDINATES.items()}
        for key, value in cell.items():
            if len({value, at[key], result.get(COORDINATES[key], value)}) > 1:
                raise BadRecord(f"another run's records: {key} is {value} in config.json, {at[key]} in the plan")
        codes = [c for c in record["code_versions"] if c not in accept_code] or record["code_versions"][-1:]
        if len(codes) > 1 or result["code"] != record["code_versions"][-1]:
            raise BadRecord(f"its code changed while it was down: {', then '.join(record['code_versions'])}")
        accuracy, events = result["accuracy"], read_log(folder, "eval")
        if not isinstance(accuracy, (int, float)) or not 0 <= accuracy <= 1:
            raise BadRecord(f"its accuracy is {accuracy}")
        if not events or (events[-1]["step"], events[-1]["accuracy"]) != (result["steps"], accuracy):
            raise BadRecord("log.jsonl does not end with the accuracy in result.json")
        cell |= {"name": Path(folder).name, **{key: result[key] for key in OUTCOME},
                 **{key: config[key] for key in SAME_AT_A_LENGTH}, "time": record["time"],
                 "epochs": result["steps"] / record["derived"]["steps_per_epoch"],
                 "data": record["data"]["sha256"], "curve": [[e["step"], e["accuracy"], e["val_loss"]] for e in events]}
        return cell | {"code": codes[0], "machine": ran_in["gpu"] or ran_in["cpu"],
                       "settings": {key: config[key] for key in SAME}}
    except (KeyError, TypeError, IndexError) as error:
        raise BadRecord(f"its records lack {error}") from None


def read_sweep(folder, accept_code=()):
    """The record of a sweep: its finished runs that may be compared, and why each other run of its plan is left out.

    Returns {"runs": [...], "planned": how many, "left_out": {name: why}, "preset", "machines", "code", "settings"}.
    Raises ConfigError where there is no plan.
    """
    plan, cells, left_out = sweep.read_plan(folder), {}, {}
    for name, at in plan["cells"].items():
        try:
            cells[name] = read_cell(Path(folder) / name, at, accept_code)
        except BadRecord as reason:
            left_out[name] = str(reason)

    def leave_out(group, values):
        """Of the runs of a group, those whose values differ from the most frequent ones."""
        kinds = {}
        for cell in cells.values():
            kinds.setdefault(group(cell), Counter())[json.dumps(values(cell))] += 1
        for name, cell in list(cells.items()):
            most, own = json.loads(kinds[group(cell)].most_common(1)[0][0]), values(cell)
            if other := [f"{key} {own[key]} where most have {most[key]}" for key in own if own[key] != most[key]]:
                left_out[name] = "not comparable: " + ", ".join(other)
                del cells[name]

    codes = Counter(c["code"] for c in cells.values())
    first = max(codes, key=lambda code: (code not in accept_code, codes[code]), default=None)
    leave_out(lambda c: 0, lambda c: {"code": first if c["code"] in accept_code else c["code"], **c["settings"]})
    leave_out(lambda c: c["T"], lambda c: {key: c[key] for key in SAME_AT_A_LENGTH})
    leave_out(lambda c: (c["T"], c["seed"]), lambda c: c["data"])
    runs = list(cells.values())
    return {"preset": plan.get("preset"), "code": {code: codes[code] for code in sorted({c["code"] for c in runs})},
            "settings": runs[0]["settings"] if runs else {}, "machines": sorted({c["machine"] for c in runs}),
            "planned": len(plan["cells"]), "left_out": left_out,
            "runs": [{k: v for k, v in c.items() if k not in ("settings", "code", "machine")} for c in runs]}


def write_record(record, path):
    """A JSON file with one line per run."""
    head = json.dumps({k: v for k, v in record.items() if k != "runs"}, indent=1).removesuffix("\n}")
    runs = ",\n".join("  " + json.dumps(run) for run in record["runs"])
    path.write_text(f'{head},\n "runs": [\n{runs}\n ]\n}}\n')


def read_record(path):
    """What write_record wrote. Raises ConfigError for another file."""
    try:
        record = json.loads(path.read_text())
        if not isinstance(record["runs"], list):
            raise TypeError("runs is not a list")
        return record
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a record of a recall sweep ({error}): give the folder of one, or the .json that "
                          "`report` wrote") from None


# ----------------------------------------------------------------------------------------------------------- summarise

def pooled(rows, *keys):
    """Rows [{*keys, "queries", "accuracy"}] of several seeds as one per key, accuracies weighted by their queries."""
    at = {}
    for row in rows:
        at.setdefault(tuple(row[k] for k in keys), []).append(row)
    out = []
    for key, same in sorted(at.items()):
        queries = sum(r["queries"] for r in same)
        out.append({**dict(zip(keys, key, strict=True)), "queries": queries,
                    "accuracy": sum(r["accuracy"] * r["queries"] for r in same) / queries})
    return out


def summarise(runs):
    """The points of Figure 4: one for each T, width and mixer, in this order, at its best learning rate.

    A rate that fewer seeds have finished than another does not compete with it.
    """
    points = {}
    for run in runs:
        points.setdefault((run["T"], run["n_embd"], run["mixer"]), {}).setdefault(run["learning_rate"], []).append(run)
    order = {mixer: i for i, mixer in enumerate(NAMES)}
    rows = []
    for (T, n_embd, mixer), rates in sorted(points.items(), key=lambda p: (*p[0][:2], order.get(p[0][2], 99), p[0][2])):
        rate = max(rates, key=lambda r: (len(rates[r]), mean(c["accuracy"] for c in rates[r]), -r))
        best = rates[rate]
        accuracies = [c["accuracy"] for c in best]
        rows.append({"T": T, "pairs": best[0]["pairs"], "n_embd": n_embd, "mixer": mixer, "accuracy": mean(accuracies),
                     "lowest": min(accuracies), "highest": max(accuracies), "seeds": sorted(c["seed"] for c in best),
                     "learning_rate": rate,
                     "rates": {f"{r:g}": mean(c["accuracy"] for c in rates[r]) for r in sorted(rates)},
                     "epochs": mean(c["epochs"] for c in best), "seconds": mean(c["seconds"] for c in best),
                     "parameters": best[0]["parameters"], "state_size": best[0]["state_size"],
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


def markdown(record, points):
    """The report as lines of Markdown."""
    lines = ["# Multi-query associative recall", "", *([record["note"], ""] if record.get("note") else []),
             f"{len(record['runs'])} runs, {', '.join(record['machines'])}, code {' and '.join(record['code'])}. "
             + "; ".join(f"{key} {value}" for key, value in record["settings"].items()) + ".",
             "Recall in percent of the test's queries, at the best of the learning rates. A run stops where it reaches "
             "stop_at, so differences above that value mean nothing.", ""]
    cells = []
    for p in points:
        seeds = f" ({percent(p['lowest'])} .. {percent(p['highest'])}, {len(p['seeds'])} seeds)"
        cells.append([str(p["T"]), str(p["pairs"]), str(p["n_embd"]), name_of(p["mixer"]),
                      percent(p["accuracy"]) + (seeds if len(p["seeds"]) > 1 else ""), f"{p['learning_rate']:g}",
                      ", ".join(f"{rate}: {percent(a)}" for rate, a in p["rates"].items()), f"{p['epochs']:.2f}",
                      f"{p['seconds']:.0f}", f"{p['state_size']:,}", f"{p['parameters']:,}"])
    lines += table(["T", "pairs", "width", "mixer", "recall", "best rate", "all rates", "epochs", "seconds",
                    "state, numbers", "parameters"], cells)
    for T in dict.fromkeys(p["T"] for p in points):
        width = min(p["n_embd"] for p in points if p["T"] == T)
        here = [p for p in points if (p["T"], p["n_embd"]) == (T, width)]
        for title, key, label in (
                ("by the tokens from a key to its query", "by_distance", lambda b: f"{b['from']}-{b['to'] - 1}"),
                (f"by the number of pairs (trained with {here[0]['pairs']})", "by_pairs", lambda b: str(b["pairs"]))):
            columns = list(dict.fromkeys(label(b) for p in sorted(here, key=lambda p: -len(p[key])) for b in p[key]))
            rows = []
            for p in here:
                found = {label(b): percent(b["accuracy"]) for b in p[key]}
                rows.append([name_of(p["mixer"]), *(found.get(c, "-") for c in columns)])
            lines += ["", f"T = {T}, width {width}, {title}:", "", *table(["mixer", *columns], rows)]
    if record["left_out"]:
        lines += ["", f"Left out, {len(record['left_out'])} of {record['planned']} planned runs:", "",
                  *(f"- {name}: {why}" for name, why in record["left_out"].items())]
    return lines


# -------------------------------------------------------------------------------------------------------------- figure

def draw(points, path):
    """Figure 4 into `path`: recall for each T, against width; as bars, with the size of the state, where there is one width."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lengths = list(dict.fromkeys(p["T"] for p in points))
    spare = iter(plt.cm.tab20.colors)
    colours = {mixer: COLOURS.get(mixer) or next(spare) for mixer in dict.fromkeys(p["mixer"] for p in points)}
    size = (max(6.0, 4.1 * len(lengths)), 4.4)
    figure, axes = plt.subplots(1, len(lengths), figsize=size, dpi=120, squeeze=False)
    for T, a in zip(lengths, axes[0], strict=True):
        here = [p for p in points if p["T"] == T]
        widths = sorted({p["n_embd"] for p in here})
        a.set_title(f"T = {T}, {here[0]['pairs']} pairs" + (f", width {widths[0]}" if len(widths) == 1 else ""))
        for i, mixer in enumerate(dict.fromkeys(p["mixer"] for p in here)):
            own = [p for p in here if p["mixer"] == mixer]
            y = [p["accuracy"] for p in own]
            spread = [[p["accuracy"] - p["lowest"] for p in own], [p["highest"] - p["accuracy"] for p in own]]
            if len(widths) > 1:
                a.errorbar([p["n_embd"] for p in own], y, spread, color=colours[mixer], capsize=2, marker="o", ms=4,
                           lw=2.4 if mixer == "longhorn" else 1.3, label=name_of(mixer))
            else:
                a.barh(-i, y, xerr=spread, color=colours[mixer], alpha=0.6)
                words = f"{name_of(mixer)} {percent(y[0])}, state {own[0]['state_size']:,}"
                a.text(0.02, 0.2 - i, words, va="center", fontsize=8)
        if len(widths) > 1:
            a.set(xscale="log", xlabel="width", ylabel="recall", ylim=(-0.03, 1.03))
            a.set_xticks(widths, widths)
            a.minorticks_off()
            a.legend(fontsize=8)
        else:
            a.set(xlabel="recall", xlim=(0, 1.03), yticks=[], ylim=(0.5 - len(colours), 0.5))
        a.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def write(place, out=None, accept_code=()):
    """The report of a sweep's folder, or of a record that `write` made of one; {kind: path}.

    place: the folder, or the .json; out: path of the three files without their endings (default: `report` in the folder,
    or beside the record). Raises ConfigError where there is no plan, or no record.
    """
    place = Path(place)
    record = read_record(place) if place.suffix == ".json" else read_sweep(place, accept_code)
    out = Path(out) if out else place.with_suffix("") if place.suffix == ".json" else place / "report"
    out.parent.mkdir(parents=True, exist_ok=True)
    paths = {kind: Path(f"{out}.{kind}") for kind in ("json", "md", "png")}
    points = summarise(record["runs"])
    write_record(record, paths["json"])
    paths["md"].write_text("\n".join(markdown(record, points)) + "\n")
    if points:
        draw(points, paths["png"])
    else:
        del paths["png"]
    return paths
