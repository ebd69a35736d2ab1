"""Figure 4 from the records of experiments/recall/mqar.py: recall against width, for each T.

    recall of a point = mean over the seeds at the learning rate whose mean is best; its bar: from worst seed to best
    time to half      = steps until half of the test's queries are right, between two evaluations linearly; a run that
                        never gets there is censored: later than all. Two mixers: Mann and Whitney's test, exact
    difference        = of the recalls of two mixers, with Welch's 95% interval over the seeds

The rate is chosen on the test set that also says when to stop; recall is of other examples, drawn for the report alone.

`mqar.py report FOLDER` reads a sweep and writes report.json (one record of all its runs), report.md and report.png;
`mqar.py report RECORD.json` makes the latter two from such a record alone. The paper's Figure 4 gives no numbers, so
none of the paper's are here.
"""

import json
import math
from collections import Counter
from itertools import combinations
from pathlib import Path
from statistics import mean

from scipy.stats import rankdata

from evaluation.tasks import table
from experiments.scaling.compare import welch
from experiments.sweeps import runner
from runtime.errors import ConfigError
from runtime.records import BadRecord, fields, finished_records, mixed_identities, read_json, read_log, replacing
from tools.loss_curve import save_figure

# Runs are compared where these agree. A length has its own number of pairs and batch, a seed its own examples.
SAME = ("vocab_size", "power_a", "train_examples", "test_examples", "epochs", "stop_at", "optimizer", "weight_decay",
        "schedule", "grad_clip", "n_layer", "dtype")
SAME_AT_A_LENGTH = ("pairs", "batch_examples", "eval_interval")
COORDINATES = {"mixer": "model", "T": "block_size", "n_embd": "n_embd", "learning_rate": "learning_rate",
               "seed": "seed"}  # in the plan -> in config.json
OUTCOME = ("accuracy", "reached", "val_loss", "by_distance", "by_pairs", "steps", "seconds", "parameters", "state_size",
           "memory_bytes", "processes", "device_name")
NAMES = {"attention": "Attention", "based": "Based", "hyena": "Hyena", "rwkv4": "RWKV-4", "baseconv": "BaseConv",
         "mamba": "Mamba", "longhorn": "Longhorn", "deltanet": "DeltaNet", "gla": "GLA",
         "longhorn_exact": "Longhorn, exact", "deltanet_exact": "exact", "deltanet_exact_free": "exact, free keys",
         "deltanet_free": "free keys", "deltanet_implicit": "implicit", "deltanet_implicit_free": "implicit, free keys",
         "gated_deltanet": "Gated DeltaNet", "kda": "KDA", "mamba2": "Mamba-2", "mesa": "Mesa", "swa": "Window"}
COLOURS = dict(zip(NAMES, ("#222222", "tab:brown", "tab:pink", "tab:olive", "tab:gray", "tab:purple", "tab:red",
                           "tab:green", "tab:orange", "tab:blue"), strict=False))  # the others take what is left


def name_of(mixer):
    return NAMES.get(mixer, mixer)


# ---------------------------------------------------------------------------------------------------------------- read

def read_run(folder, at, accept_code=()):
    """One finished run as a flat record. Raises BadRecord where its files are missing, torn or at odds."""
    result, record = finished_records(folder)
    with fields():
        config, ran_in, codes = record["config"], record["environment"], record["code_versions"]
        for key, setting in COORDINATES.items():
            if config[setting] != at[key]:
                raise BadRecord(f"another run's records: {key} is {config[setting]}, {at[key]} in the plan")
        versions = [code for code in codes if code not in accept_code] or codes[-1:]
        if len(versions) > 1:
            raise BadRecord(f"its code changed while it was down: {', then '.join(codes)}")
        accuracy, events = result["accuracy"], read_log(folder, "eval")
        if not isinstance(accuracy, (int, float)) or not 0 <= accuracy <= 1:
            raise BadRecord(f"its accuracy is {accuracy}")
        if not events or (events[-1]["step"], events[-1]["accuracy"]) != (result["steps"], accuracy):
            raise BadRecord("log.jsonl does not end with the accuracy in result.json")
        run = {"name": Path(folder).name, **{key: config[setting] for key, setting in COORDINATES.items()},
               **{key: result[key] for key in OUTCOME}, **{key: config[key] for key in SAME_AT_A_LENGTH},
               "epochs": result["steps"] / record["derived"]["steps_per_epoch"], "data": record["data"]["sha256"],
               "curve": [[e["step"], e["accuracy"], e["val_loss"]] for e in events], "time": record["time"],
               "code": versions[0], "machine": ran_in["gpu"] or ran_in["cpu"],
               "settings": {key: config[key] for key in SAME}}
        markdown({"machines": [], "code": [], "settings": {}, "left_out": {}, "runs": [run]}, summarise([run]))
        return run


def read_sweep(folder, accept_code=()):
    """The record of a sweep: its finished runs that may be compared, and why each other run of its plan is left out.

    Returns {"runs": [...], "planned": how many, "left_out": {name: why}, "preset", "settings", "machines" and "code":
    {which: runs}}. Raises ConfigError where there is no plan.
    """
    plan, runs, left_out = runner.read_plan(folder), {}, {}
    for name, at in plan["cells"].items():
        try:
            runs[name] = read_run(Path(folder) / name, at, accept_code)
        except BadRecord as reason:
            left_out[name] = str(reason)
    codes = Counter(r["code"] for r in runs.values())
    first = max(codes, key=lambda code: (code not in accept_code, codes[code]), default=None)
    for group, values in (
            (lambda r: 0, lambda r: {"code": first if r["code"] in accept_code else r["code"], **r["settings"]}),
            (lambda r: r["T"], lambda r: {key: r[key] for key in SAME_AT_A_LENGTH}),
            (lambda r: (r["T"], r["seed"]), lambda r: r["data"])):
        kinds = {}
        for r in runs.values():
            kinds.setdefault(group(r), Counter())[json.dumps(values(r))] += 1
        for name, r in list(runs.items()):
            most, settings_of = json.loads(kinds[group(r)].most_common(1)[0][0]), values(r)
            if other := [f"{key} {value} where most have {most[key]}" for key, value in settings_of.items()
                         if value != most[key]]:
                left_out[name] = "not comparable: " + ", ".join(other)
                del runs[name]
    settings, machines, codes = ([r.pop(key) for r in runs.values()] for key in ("settings", "machine", "code"))
    return {"preset": plan.get("preset"), "code": Counter(codes), "machines": Counter(machines),
            "planned": len(plan["cells"]), "settings": settings[0] if settings else {}, "left_out": left_out,
            "runs": list(runs.values())}


def read_record(path):
    """What `write` wrote of a sweep. Raises ConfigError for another file."""
    try:
        with fields():
            record = read_json(path)
            markdown(record, summarise(record["runs"]))
            return record
    except BadRecord as error:
        raise ConfigError(f"{path} is not a record of a recall sweep ({error}): give the folder of one, or the .json "
                          "that `report` wrote") from None


# ----------------------------------------------------------------------------------------------------------- summarise

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
        recall = {rate: mean(run["accuracy"] for run in rates[rate]) for rate in sorted(rates)}
        rate = max(rates, key=lambda rate: (len(rates[rate]), recall[rate], -rate))
        best = rates[rate]
        accuracies = [fresh_accuracy(run) for run in best]
        half = {r: sorted(map(time_to_half, rates[r])) for r in sorted(rates)}
        rows.append({"T": T, "n_embd": n_embd, "mixer": mixer, "accuracy": mean(accuracies),
                     "recalls": accuracies, "lowest": min(accuracies), "highest": max(accuracies), "half": half,
                     "seeds": sorted(run["seed"] for run in best), "learning_rate": rate, "rates": recall,
                     **{key: best[0][key] for key in ("pairs", "parameters", "state_size")},
                     **{key: mean(run[key] for run in best) for key in ("epochs", "seconds")},
                     "by_distance": pooled(best, "by_distance", lambda b: f"{b['from']}-{b['to'] - 1}"),
                     "by_pairs": pooled(best, "by_pairs", lambda b: str(b["pairs"]))})
    return rows


def fresh_accuracy(run):
    """Accuracy on the examples that chose nothing, with as many pairs as in training."""
    return next(row["accuracy"] for row in run["by_pairs"] if row["pairs"] == run["pairs"])


def time_to_half(run, level=0.5):
    """Steps until the test's accuracy first is `level`, between two evaluations linearly; inf: never."""
    before = (0, 0.0)
    for step, accuracy, _ in run["curve"]:
        if accuracy >= level:
            part = (level - before[1]) / (accuracy - before[1])
            return before[0] + part * (step - before[0])
        before = step, accuracy
    return math.inf


def mann_whitney(a, b):
    """Two-sided p that two samples of times are of one law, from all ways to divide them; inf ties with inf.

    None where a sample has fewer than two times.
    """
    if min(len(a), len(b)) < 2:
        return None
    rank = rankdata([*a, *b])
    off = lambda chosen: abs(sum(rank[i] for i in chosen) - len(a) * (len(rank) + 1) / 2)
    observed = off(range(len(a)))
    ways = [off(chosen) for chosen in combinations(range(len(rank)), len(a))]
    return sum(way >= observed - 1e-9 for way in ways) / len(ways)


def pooled(runs, key, label):
    """{label: accuracy} over several seeds, weighted by their queries."""
    queries, right = Counter(), Counter()
    for row in (row for run in runs for row in run[key]):
        queries[label(row)] += row["queries"]
        right[label(row)] += row["accuracy"] * row["queries"]
    return {at: right[at] / queries[at] for at in queries}


def steps(time):
    return "never" if time == math.inf else f"{time:.0f}"


def percent(x):
    return f"{100 * x:.1f}"


def markdown(record, points):
    """The report as lines of Markdown."""
    lines = ["# Multi-query associative recall", "", *([record["note"], ""] if record.get("note") else []),
             f"{len(record['runs'])} runs, {', '.join(record['machines'])}, code {' and '.join(record['code'])}. "
             + "; ".join(f"{key} {value}" for key, value in record["settings"].items()) + ".",
             *filter(None, [mixed_identities(record["code"])]),
             "Recall in percent of examples that chose nothing, at the learning rate that was best on the test; \"all "
             "rates\" are of that test. A run stops where it reaches stop_at, so differences above it mean nothing."]
    rows = []
    for p in points:
        seeds = f" ({percent(p['lowest'])} .. {percent(p['highest'])}, {len(p['seeds'])} seeds)"
        rows.append([str(p["T"]), str(p["pairs"]), str(p["n_embd"]), name_of(p["mixer"]),
                     percent(p["accuracy"]) + (seeds if len(p["seeds"]) > 1 else ""), f"{p['learning_rate']:g}",
                     ", ".join(f"{rate:g}: {percent(a)}" for rate, a in p["rates"].items()), f"{p['epochs']:.2f}",
                     f"{p['seconds']:.0f}", f"{p['state_size']:,}", f"{p['parameters']:,}"])
    lines += ["", table([["T", "pairs", "width", "mixer", "recall", "best rate", "all rates", "epochs", "seconds",
                          "state, numbers", "parameters"], *rows])]
    several = [p for p in points if len(p["seeds"]) > 1]
    if several:
        rows = [["T", "width", "mixer", "rate: steps"]]
        rows += [[str(p["T"]), str(p["n_embd"]), name_of(p["mixer"]), "; ".join(
            f"{rate:g}: {', '.join(steps(t) for t in times)}" for rate, times in p["half"].items())] for p in several]
        lines += ["", "Steps to half of the test's queries, each seed's, at every learning rate:", "", table(rows), ""]
    pairs = []
    for p, q in combinations(several, 2):
        chance = mann_whitney(p["half"][p["learning_rate"]], q["half"][q["learning_rate"]])
        if (p["T"], p["n_embd"]) == (q["T"], q["n_embd"]) and chance is not None:
            pairs.append([str(p["T"]), str(p["n_embd"]), f"{name_of(q['mixer'])} minus {name_of(p['mixer'])}",
                          "{} ({} .. {})".format(*map(percent, welch(q["recalls"], p["recalls"])[:3])),
                          f"{chance:.2g}"])
    if pairs:
        lines += ["Two mixers, each at its best rate: the difference of their recalls in points with Welch's 95% "
                  "interval, and p that they need equally long to half of the queries (Mann and Whitney, exact):", "",
                  table([["T", "width", "mixers", "points of recall", "p"], *pairs])]
    for T in dict.fromkeys(p["T"] for p in points):
        width = min(p["n_embd"] for p in points if p["T"] == T)
        group = [p for p in points if (p["T"], p["n_embd"]) == (T, width)]
        for key, title in (("by_distance", "by the tokens from a key to its query"),
                           ("by_pairs", f"by the number of pairs (trained with {group[0]['pairs']})")):
            columns = list(dict.fromkeys(c for p in sorted(group, key=lambda p: -len(p[key])) for c in p[key]))
            rows = [[name_of(p["mixer"]), *(percent(p[key][c]) if c in p[key] else "-" for c in columns)]
                    for p in group]
            lines += ["", f"T = {T}, width {width}, {title}:", "", table([["mixer", *columns], *rows])]
    if record["left_out"]:
        lines += ["", f"Left out, {len(record['left_out'])} of {record['planned']} planned runs:", "",
                  *(f"- {name}: {why}" for name, why in record["left_out"].items())]
    return lines


# -------------------------------------------------------------------------------------------------------------- figure

def draw(points, path):
    """Figure 4: recall for each T, against width; as bars, with the size of the state, where there is one width."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex
    from matplotlib.figure import Figure

    lengths = list(dict.fromkeys(p["T"] for p in points))
    mixers = dict.fromkeys(p["mixer"] for p in points)
    taken = {to_hex(COLOURS[mixer]) for mixer in mixers if mixer in COLOURS}
    spare = (colour for colour in colormaps["tab20"].colors if to_hex(colour) not in taken)
    colours = {mixer: COLOURS.get(mixer) or next(spare) for mixer in mixers}
    figure = Figure(figsize=(max(6.0, 4.1 * len(lengths)), 4.4), dpi=120)
    for T, a in zip(lengths, figure.subplots(1, len(lengths), squeeze=False)[0], strict=True):
        group = [p for p in points if p["T"] == T]
        widths = sorted({p["n_embd"] for p in group})
        states = {w: {p["state_size"] for p in group if p["n_embd"] == w} for w in widths}
        for i, mixer in enumerate(dict.fromkeys(p["mixer"] for p in group)):
            line = [p for p in group if p["mixer"] == mixer]
            y = [p["accuracy"] for p in line]
            spread = [[p["accuracy"] - p["lowest"] for p in line], [p["highest"] - p["accuracy"] for p in line]]
            if len(widths) > 1:
                a.errorbar([p["n_embd"] for p in line], y, spread, color=colours[mixer], capsize=2, marker="o", ms=4,
                           lw=2.4 if mixer == "longhorn" else 1.3, label=name_of(mixer))
            else:
                a.barh(-i, y, xerr=spread, color=colours[mixer], alpha=0.6)
                words = f"{name_of(mixer)} {percent(y[0])}, state {line[0]['state_size']:,}"
                a.text(0.02, 0.2 - i, words, va="center", fontsize=8)
        if len(widths) > 1:
            a.set(xscale="log", xlabel="width", ylabel="recall", ylim=(-0.03, 1.03))
            one = all(len(s) == 1 for s in states.values())  # then it is the state that is compared
            a.set_xticks(widths, [f"{w}\nstate {min(states[w]):,}" for w in widths] if one else widths)
            a.minorticks_off()
            a.legend(fontsize=8)
        else:
            a.set(xlabel="recall", xlim=(0, 1.03), yticks=[], ylim=(0.5 - len(colours), 0.5))
        a.set_title(f"T = {T}, {group[0]['pairs']} pairs" + (f", width {widths[0]}" if len(widths) == 1 else ""))
        a.grid(alpha=0.3)
    figure.tight_layout()
    save_figure(figure, path)


def in_json(record):
    """A sweep's record as text with a line per run."""
    head = json.dumps({key: value for key, value in record.items() if key != "runs"}, indent=1).removesuffix("\n}")
    runs = ",\n".join("  " + json.dumps(run) for run in record["runs"])
    return f'{head},\n "runs": [\n{runs}\n ]\n}}\n'


def write(place, out=None, accept_code=()):
    """The report of a sweep's folder, or of a record that this function wrote; {kind: path}.

    place: the folder, or the .json; out: path of the three files without their endings (default: `report` in the
    folder, or beside the record); accept_code: versions of the code whose runs are compared too. Raises ConfigError.
    """
    place = Path(place)
    if place.suffix == ".json":
        record, out = read_record(place), Path(out or place.with_suffix(""))
    else:
        record, out = read_sweep(place, accept_code), Path(out or place / "report")
    out.parent.mkdir(parents=True, exist_ok=True)
    paths, points = {kind: Path(f"{out}.{kind}") for kind in ("json", "md", "png")}, summarise(record["runs"])
    with replacing(paths["json"]) as tmp:
        Path(tmp).write_text(in_json(record))
    paths["md"].write_text("\n".join(markdown(record, points)) + "\n", encoding="utf-8")
    if not points:
        return {kind: paths[kind] for kind in ("json", "md")}
    draw(points, paths["png"])
    return paths
