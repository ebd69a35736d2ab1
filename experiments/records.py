"""Records of runs as a pandas table, one row per run: scaling, recall, images and extrapolation.

    from experiments import records
    runs = records.read("results/scaling_laptop.json")      # or the folder of a sweep: "out/scaling_laptop"
    runs[runs.stage == "seed"].groupby(["size", "model", "tokens"]).val_loss.agg(["mean", "std", "count"])

A folder contains plan.json, and config.json, log.jsonl and result.json of each run. A file is what save() makes of a
folder: the same records, with shared values written once. A run counts only if its records are complete and agree with
each other and with the plan. It must also have the code, data and common settings of most runs in the sweep. For other
runs the table has only their place in the plan and, in `left_out`, the reason. `accept_code` admits runs of other
versions of the code, if the changes are known to be harmless.
"""

import functools
import importlib.util
import itertools
import json
import math
import os
import re
from collections import Counter, namedtuple
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import ConfigError
from common.files import write_text
from experiments.sweeps import runner
from runtime.records import BadRecord, fields, read_json, read_log

SETTING = {"mixer": "model", "T": "block_size", "context": "block_size", "steps": "max_iters"}  # {in the plan: setting}
ENVIRONMENT = ("commit", "uncommitted_changes", "cpu", "torch", "python")


@dataclass
class Kind:
    """A row of KINDS: what is specific to the records of an experiment.

    place: what identifies a run, as named in the plan. point: the parts of the place that the runs of one point
    share, along with all settings. same: settings that all runs share. measure: what the log must end with.
    adds(row, record, evaluations): the row with whatever else reports read.
    """

    place: tuple
    measure: str = ""
    same: tuple = ()
    adds: callable = None
    point: tuple = ()


Records = namedtuple("Records", "result config evaluations")  # result.json, config.json, evals of log.jsonl


def check_packages(modules=("pandas", "tabulate", "markdown_it")):
    """Raises ConfigError, with the command to type, if a package is not installed. Default: the packages of the
    reports."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"{module} is not installed: pip install --group experiments")


def stem(model):
    """The family or pattern in a model's name in the plan: the part before the @."""
    return model.partition("@")[0]


def label_settings(model):
    """[--key=value] of NAME@key=value,key=value, settings of this family's runs only; empty for NAME@WORD."""
    changes = model.partition("@")[2]
    return [f"--{change}" for change in changes.split(",")] if "=" in changes else []


def read(source, accept_code=(), kind=None):
    """The records of a sweep's folder or saved file as a DataFrame, in the order of the plan.

    Columns are the keys of result.json and config.json, those that of_scaling, of_recall and of_extrapolation add, and:

        run, code, commit, cpu, torch, python
        left_out    "" if the run counts
        device      name of the GPU or CPU
        time        when it began

    attrs has kind, name, the plan's entries about the whole sweep, the `settings` that its runs share, and `code`. This
    is a dict per version of the code, the most frequent first, with its commit, how many `runs` finished, how many are
    `used`, and the `changed_files` that differ from the first version (None: not recorded).

    Args:
        accept_code: versions of the code whose runs also count.
        kind: a key of KINDS, if only this kind is wanted.
    Raises ConfigError if there is no sweep, it is of another kind, accept_code is not a version of its code, or pandas
    is not installed.
    """
    check_packages(["pandas"])
    source = Path(source)
    with fields(f"{source} (did a report write it?): its records"):
        saved = read_json(source) if source.is_file() else {}
        if "extrapolation" in saved:
            found = "extrapolation"
            rows, about = of_extrapolation(saved["extrapolation"])
        else:
            plan, records = load(source)
            found = kind_of(plan, source)
            if found == "extrapolation":  # the folder has the training runs; the evaluations are in a file beside it
                return read(source.with_name(f"{source.name}.json"), kind=kind)
            rows, about = compared(found, plan, records, source, accept_code)
    if kind not in (None, found) and rows:
        raise ConfigError(f"{source} contains records of {found}, not of {kind}: use the report of {found}")
    runs = frame_of(rows, kind or found)
    runs.attrs = {"name": source.resolve().name.removesuffix(".json"), "kind": kind or found,
                  "accepted": list(accept_code), **about}
    return runs


def kind_of(plan, source):
    """The kind of sweep that has cells like the plan's. Raises ConfigError if there is none."""
    for kind, row in KINDS.items():
        needed = {*row.place} - {"from"}
        if all(needed <= at.keys() for at in plan["cells"].values()):
            return kind
    raise ConfigError(f"{source}: the plan does not say what its cells are: give the folder of a sweep")


def frame_of(rows, kind):
    """The rows as a DataFrame; a column of whole numbers keeps them even if a run lacks its number."""
    import pandas

    first = ["run", *KINDS[kind].place, "left_out", "device", "code", *ENVIRONMENT, "time"]
    columns = list(dict.fromkeys(itertools.chain(first, *rows)))
    whole = [key for key in columns if all(is_whole(row.get(key)) for row in rows)]
    return pandas.DataFrame(rows, columns=columns).astype(dict.fromkeys(whole, "Int64"))


def is_whole(value):
    return value is None or type(value) is int and value < 2**63


# ---------------------------------------------------------------------------------------------- which runs are compared

def compared(kind, plan, records, source, accept_code):
    """(rows, attrs) of a sweep that `load` has read: which runs are comparable, and why the others are not."""
    rows = {}
    reasons = {}
    environments = {}  # {version of the code: environment}; a run with several versions has that of its last
    known = set()
    cells = plan.pop("cells")
    for name, at in cells.items():
        try:
            found = records[name]()
            with fields():
                known.update(found.config["code_versions"])
            rows[name] = checked(KINDS[kind], name, at, found, accept_code)
            environments[found.config["environment"]["code"]] = found.config["environment"]
        except BadRecord as reason:
            reasons[name] = str(reason)
    for version in accept_code:
        if version not in known:
            raise ConfigError(f"--accept_code={version}: the runs of {source} have {', '.join(sorted(known))}")

    finished = Counter(row["code"] for row in rows.values())
    versions = sorted(finished, key=lambda version: (version in accept_code, -finished[version]))
    for name, row in rows.items():
        if row["code"] not in {versions[0], *accept_code}:
            reasons[name] = (f"other code, {row['code']}, than most runs, {versions[0]}: --accept_code={row['code']} "
                             "joins it")
    most, other = compare_settings({name: row.pop("same") for name, row in rows.items() if name not in reasons})
    reasons |= other

    used = Counter(row["code"] for name, row in rows.items() if name not in reasons)
    code = []
    for version in versions:
        before, files = (environments.get(v, {}).get("code_files") for v in (versions[0], version))
        changed = runner.changed_files(before, files) if before and files else None
        code.append({"code": version, "commit": environments.get(version, {}).get("commit"), "used": used[version],
                     "runs": finished[version], "changed_files": changed})
    table = []
    for name, at in cells.items():
        row = {"left_out": reasons[name]} if name in reasons else rows[name]
        table.append({"run": name, **{key: at.get(key, 0) for key in KINDS[kind].place}, **row})
    settings = {key: value for (group, key), value in most.items() if group == "settings"}
    return table, {**plan, "settings": settings, "code": code}


def compare_settings(same):
    """({place: the value of most runs}, {run: why it is not comparable}) from {run: {place: value}}; a place is (group,
    key)."""
    votes = {}
    for settings in same.values():
        for place, value in settings.items():
            votes.setdefault(place, Counter())[json.dumps(value)] += 1
    most = {place: json.loads(texts.most_common(1)[0][0]) for place, texts in votes.items()}
    reasons = {}
    for name, settings in same.items():
        other = [f"{place[1]} {value} where most have {most[place]}" for place, value in settings.items()
                 if value != most[place]]
        if other:
            reasons[name] = "not comparable: " + ", ".join(other)
    return most, reasons


# ------------------------------------------------------------------------------------------------------------- one run

def read_run(folder, at):
    """The row for a run of a scaling sweep. Raises BadRecord if a file is missing or damaged, or contradicts another
    file or `at`, the run's place in the plan."""
    return checked(KINDS["scaling"], Path(folder).name, at, finished_records(Path(folder)))


def finished_records(folder):
    """A run's Records. Raises BadRecord if the run is not finished or one is damaged."""
    if not os.path.lexists(folder / "result.json"):
        raise BadRecord(why_unfinished(folder))
    return Records(read_json(folder / "result.json"), read_json(folder / "config.json"), read_log(folder, "eval"))


def why_unfinished(folder):
    """In words: how far a run without a result got. Raises BadRecord."""
    events = read_log(folder)
    if not events:
        return "not run"
    last = events[-1]["step"]
    skipped = {event["step"] for event in events if event.get("event") == "skipped"}
    if skipped:
        with fields():
            most = read_json(folder / "config.json")["config"]["max_bad_steps"]
            if skipped.issuperset(range(last - most + 1, last + 1)):
                return f"it diverged: loss or gradient not finite up to step {last}"
    return f"not finished (step {last})"


def checked(kind, name, at, records, accept_code=()):
    """The row for a finished run at its place in the plan, with `same`, {group: values} that comparable runs share.
    Raises BadRecord."""
    result, record, evaluations = records
    with fields():
        config, environment = record["config"], record["environment"]
        check_outcome(kind, result, config)
        check_place(kind, name, at, result, record)
        stretches = record["code_versions"]
        codes = [code for code in stretches if code not in accept_code] or stretches[-1:]
        if len(set(codes)) > 1:
            raise BadRecord(f"its code changed while it was down: {', then '.join(stretches)}")
        last = evaluations[-1] if evaluations else {}
        if (last.get("step"), last.get(kind.measure)) != (result["steps"], result[kind.measure]):
            raise BadRecord(f"log.jsonl does not end with the {kind.measure} in result.json")
        same = in_group("settings", {key: config.get(key) for key in kind.same})
        if at.get("stage") == "cosine":  # its schedule differs on purpose
            del same["settings", "schedule"]
        row = {**config, **result}
        for key in kind.place:
            row[key] = at.get(key, 0)
        if kind.point:
            at_point = {**settings_of_point(kind, config), "parameters": result["parameters"]}
            same |= in_group(tuple(row[key] for key in kind.point), at_point)
        row["device"] = environment["cpu"] if result["device_name"] == "cpu" else result["device_name"]
        for key in ENVIRONMENT:
            row[key] = environment.get(key) or ""
        row |= {"code": codes[-1], "time": str(record.get("time", "")), "left_out": "", "same": same}
        return kind.adds(row, record, evaluations)


def check_outcome(kind, result, config):
    """Raises BadRecord if result.json's numbers cannot be those of a run that has learned."""
    value = result[kind.measure]
    if kind.measure == "val_loss":
        guessing = math.log(config["vocab_size"])
        if not (is_number(value) and value < guessing):
            raise BadRecord(f"its loss is {str(value)[:40]}, that of guessing {guessing:.3f}: it diverged")
    elif not (value == 0 or is_number(value) and value <= 1):
        raise BadRecord(f"its accuracy is {str(value)[:40]}")
    for key in ("seconds", "parameters"):
        if not is_number(result[key]):
            raise BadRecord(f"{key} is {str(result[key])[:40]}: not a number above 0")


def is_number(value):
    """True for a number above 0, which NaN is not."""
    return type(value) in (int, float) and 0 < value < 1e300


def check_place(kind, name, at, result, record):
    """Raises BadRecord if config.json belongs to another run than result.json or the plan."""
    config = record["config"]
    ran = {}
    for key in (*kind.place, "context"):
        setting = SETTING.get(key, key)
        if setting in config:
            ran[key] = config[setting]
    ran |= {"model": config.get("pattern") or config["model"], "code": record["environment"]["code"],
            "folder": Path(config["out_dir"]).name, "dtype": config["dtype"]}
    follows = {}  # computed from other numbers of the run; the plan has estimates of them
    if kind.measure == "val_loss":  # other kinds may stop early
        derived = record["derived"]
        tokens = ran["tokens"] = config["max_iters"] * config["batch_tokens"]
        follows = {"tokens_per_second": round(tokens / result["seconds"]), "flops": tokens * derived["flops_per_token"],
                   "parameters": derived["parameters"]["total"], "processes": derived["processes"],
                   "val_tokens": sum(result["val_document_tokens"])}
    ran |= follows
    planned = at | follows | {"folder": Path(name).name, "model": stem(at.get("model", ran["model"]))}
    for source, said in ("result.json", result), ("the plan", planned):
        for key, value in ran.items():
            if said.get(key, value) != value:
                raise BadRecord(f"another run's records: {key} is {value}, {source} says {said[key]}")


def in_group(group, settings):
    """{(group, key): value}, as compare_settings takes them."""
    return {(group, key): value for key, value in settings.items()}


def of_scaling(row, record, evaluations):
    """The row with tokens and losses per held-out file as arrays, with the loss on the files that choose learning
    rates, the first half, and with its threads. Bits per byte are NaN if the data's bytes are unknown."""
    tokens = np.array(row["val_document_tokens"], float)
    losses = np.array(row["val_document_losses"], float)
    if tokens.shape != losses.shape or not abs(np.average(losses, weights=tokens) - row["val_loss"]) <= 1e-4:
        raise BadRecord("its documents' losses do not add up to its loss")
    bits = row.get("val_bits_per_byte")
    first = slice(len(tokens) // 2 or None)
    identity = record["data"]["identity"]
    row["same"] |= {("data", "train data"): identity["train"], ("data", "val data"): identity["val"],
                    ("data", "bytes per token"): bits and round(row["val_loss"] / math.log(2) / bits, 9),
                    (row["size"], "tokens per window"): row.get("eval_block_size") or row["block_size"]}
    return {"val_bits_per_byte": math.nan} | row | {
        "threads": record["derived"].get("threads"),  # of its last start
        "val_document_tokens": tokens, "val_document_losses": losses,
        "embedding": record["derived"]["parameters"]["embedding"],
        "loss_of_choosing_files": float(np.average(losses[first], weights=tokens[first]))}


def of_recall(row, record, evaluations):
    """The row with `curve`, [[step, accuracy, loss]], the epochs it ran, `recall` on examples that chose nothing,
    `steps_to_half`, and by_distance and by_pairs as {label: (queries, correct answers)}."""
    row["same"] |= in_group(row["T"], {key: row[key] for key in SAME_AT_A_LENGTH})
    row["same"] |= in_group((row["T"], row["seed"]), record["data"]["sha256"])
    curve = [[e["step"], e["accuracy"], e["val_loss"]] for e in evaluations]
    share = {part["pairs"]: part["accuracy"] for part in row["by_pairs"]}
    by_distance = {f"{part['from']}-{part['to'] - 1}": answered(part) for part in row["by_distance"]}
    by_pairs = {str(part["pairs"]): answered(part) for part in row["by_pairs"]}
    return row | {"curve": curve, "epochs": row["steps"] / record["derived"]["steps_per_epoch"],
                  "recall": float(share[row["pairs"]]), "steps_to_half": steps_to_half(curve),
                  "by_distance": by_distance, "by_pairs": by_pairs}


def answered(part):
    """(queries, correct answers)"""
    return part["queries"], part["accuracy"] * part["queries"]


def steps_to_half(curve, level=0.5):
    """Steps until test accuracy first reaches `level`, interpolated between evaluations; inf: never.

    curve: [[step, accuracy, loss]].
    """
    before, least = 0, 0.0
    for step, accuracy, _ in curve:
        if accuracy >= level:
            return before + (level - least) / (accuracy - least) * (step - before)
        before, least = step, accuracy
    return math.inf


def of_images(row, record, evaluations):
    row["same"]["data", "images"] = record["data"]["sha256"]
    return row


def settings_of_point(kind, config):
    """The settings that runs must share to be averaged at one point of a figure, beyond those that all runs share."""
    from runtime.folder import MAY_CHANGE_ON_RESUME, OF_THE_SCHEDULE  # late: it imports PyTorch

    others = {"seed", "learning_rate", *kind.same, *SAME_AT_A_LENGTH} | MAY_CHANGE_ON_RESUME - OF_THE_SCHEDULE
    others |= {SETTING.get(key, key) for key in kind.place}
    return {key: value for key, value in config.items() if key not in others | runner.WITHOUT_EFFECT}


def of_extrapolation(saved):
    """(rows, attrs) of models evaluated at several lengths: the recorded keys, and loss_T for each length T."""
    rows = []
    same = {}
    for record in saved:
        environment = record["environment"]
        row = {**record["checkpoint"], **record, "time": record["date"]}
        for key in ENVIRONMENT:
            row[key] = environment.get(key) or ""
        for measured in record["lengths"]:
            row[f"loss_{measured['length']}"] = measured.get("loss")
        rows.append(row)
        name = re.sub(r", seed \d+", "", row["run"])
        same[row["run"]] = {(name, key): row[key] for key in ("parameters", "tokens", "block_size", "data", "dtype")}
    _, reasons = compare_settings(same)
    for row in rows:
        row["left_out"] = reasons.get(row["run"], "")
    return rows, {"code": [{"code": code} for code in sorted({row["code"] for row in rows})]}


SAME_AT_A_LENGTH = ("pairs", "batch_examples", "eval_interval")  # settings of recall
KINDS = {
    "scaling": Kind(("model", "size", "stage", "seed", "learning_rate", "steps", "from"), "val_loss", (
        "batch_tokens", "weight_decay", "beta1", "beta2", "grad_clip", "warmup_iters", "min_lr", "vocab_size",
        "eval_block_size", "eval_tokens", "final_eval_tokens", "dtype", "init_from", "optimizer", "schedule"),
        of_scaling, ("model", "size")),
    "recall": Kind(("mixer", "T", "n_embd", "learning_rate", "seed"), "accuracy", (
        "vocab_size", "power_a", "train_examples", "test_examples", "epochs", "stop_at", "optimizer", "weight_decay",
        "schedule", "grad_clip", "n_layer", "dtype"), of_recall, ("mixer", "T", "n_embd")),
    "images": Kind(("model", "directions", "n_layer", "seed"), "val_accuracy", (
        "dataset", "image_size", "patch_size", "batch_images", "epochs", "learning_rate", "weight_decay", "min_crop",
        "mirror", "rand_augment", "mixup", "cutmix", "erasing", "repeats", "smoothing", "eval_crop", "ema", "dtype"),
        of_images, ("model", "directions", "n_layer")),
    "extrapolation": Kind(("run",))}


def search_of(runs):
    """{learning rate: {seed: loss on the files that choose}} of the runs that search a rate; inf: it diverged."""
    tried = runs[runs.stage == "search"]
    diverged = tried.left_out.str.contains("diverged")
    tried = tried.assign(loss=tried.loss_of_choosing_files.mask(diverged, math.inf)).dropna(subset="loss")
    search = {}
    for rate, at_rate in tried.groupby("learning_rate"):
        search[rate] = dict(zip(at_rate.seed, at_rate.loss, strict=True))
    return search


# ------------------------------------------------------------------------------------------------------ the saved sweep

# sections of config.json, and the keys that are not kept
SECTIONS = {"config": (), "environment": ("command", "code_files"), "derived": ("decayed",), "data": (), "result": ()}
KEPT_OF_LOG = ("step", "tokens", "val_loss", "accuracy", "val_accuracy", "seconds")


def load(source):
    """(plan, {name: function}) of a sweep's folder, or of a file from save(). A function returns the run's Records, or
    raises BadRecord. Raises ConfigError."""
    source = Path(source)
    if not source.is_file():
        plan = runner.read_plan(source)
        return plan, {name: functools.partial(finished_records, source / name) for name in plan["cells"]}
    saved = read_json(source)
    cells = saved["cells"]
    plan = {**saved["plan"], "cells": {name: cell.pop("at") for name, cell in cells.items()}}
    return plan, {name: functools.partial(unpacked, saved, cell) for name, cell in cells.items()}


def unpacked(saved, cell):
    """The Records of a cell of a saved sweep. Raises BadRecord if it was left out."""
    if "left_out" in cell:
        raise BadRecord(cell["left_out"])
    with fields():
        config = {**cell}
        columns = config.pop("eval")
        for section, shared in saved["shared"].items():
            config[section] = shared | cell[section]
        config["environment"]["code_files"] = saved["code_files"][config["environment"]["code"]]
        evaluations = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return Records(config.pop("result"), config, evaluations)


def save(source, path):
    """Write a sweep's records to one file: what all runs share, once, then a line per run with what differs.

    Plan, settings, results and evaluations are kept exactly. The command line (the plan has it), the list of tensors
    with weight decay, and the training losses are dropped.
    """
    plan, records = load(source)
    cells = {}
    finished = []
    files = {}
    for name, at in plan.pop("cells").items():
        try:
            cell = kept(records[name](), files)
            finished.append(cell)
        except BadRecord as reason:
            cell = {"left_out": str(reason)}
        cells[name] = {"at": at, **cell}
    shared = {}
    for section in SECTIONS if finished else ():
        first, *others = (cell[section] for cell in finished)
        shared[section] = {key: value for key, value in first.items()
                           if all(table.get(key, ...) == value for table in others)}
        for cell in finished:
            for key in shared[section]:
                del cell[section][key]
    head = json.dumps({"plan": plan, "code_files": files, "shared": shared}, indent=1).removesuffix("\n}")
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(cell)}" for name, cell in cells.items())
    write_text(path, f'{head},\n "cells": {{\n{lines}\n }}\n}}\n')


def kept(records, files):
    """What the file keeps of a run. The files of its code go to `files`, {version: {path: hash}}. Raises BadRecord."""
    with fields():
        cell = {**records.config, "result": records.result, "eval": {}}
        environment = cell["environment"]
        files[environment["code"]] = environment["code_files"]
        for section, dropped in SECTIONS.items():
            cell[section] = {key: value for key, value in cell[section].items() if key not in dropped}
        cell["config"]["out_dir"] = Path(cell["config"]["out_dir"]).name
        for key in KEPT_OF_LOG:
            if all(key in e for e in records.evaluations):
                cell["eval"][key] = [e[key] for e in records.evaluations]
        return cell
