"""Records of runs as a pandas table, one row per run: scaling, recall, images and extrapolation.

    from experiments import records
    runs = records.read("results/scaling_laptop.json")      # or the folder of a sweep: "out/scaling_laptop"
    runs[runs.stage == "seed"].groupby(["size", "model", "tokens"]).val_loss.agg(["mean", "std", "count"])

A folder contains plan.json, and config.json, log.jsonl and result.json of each run; a file is what save() makes of a
folder: the same records, with what runs share written once. A run counts only if its records are complete, agree with
each other and with the plan, and have the code, data and common settings of most runs in the sweep. For other runs the
table has only their place in the plan and, in `left_out`, the reason. `accept_code` admits runs of other versions of
the code, if the changes are known to be harmless.
"""

import importlib.util
import json
import math
from collections import Counter, namedtuple
from pathlib import Path

import numpy as np

from common.errors import ConfigError
from common.files import replacing
from experiments.sweeps import runner
from experiments.sweeps.runner import code_of
from runtime.records import BadRecord, fields, finished_records, read_json, read_log

# What identifies a run within its sweep, as named in the plan; SETTING has other names in config.json
PLACE = {"scaling": ("model", "size", "stage", "seed", "learning_rate", "steps", "from"),
         "recall": ("mixer", "T", "n_embd", "learning_rate", "seed"),
         "images": ("model", "directions", "n_layer", "seed"), "extrapolation": ("run",)}
SETTING = {"mixer": "model", "T": "block_size", "context": "block_size", "steps": "max_iters"}
MEASURE = {"scaling": "val_loss", "recall": "accuracy", "images": "val_accuracy"}  # the log must end with it

# Settings that all runs of a sweep must share to be comparable. In recall each length has its own number of pairs and
# batch size.
SAME = {"scaling": ("batch_tokens", "weight_decay", "beta1", "beta2", "grad_clip", "warmup_iters", "min_lr",
                    "vocab_size", "eval_block_size", "eval_tokens", "final_eval_tokens", "dtype", "init_from",
                    "optimizer", "schedule"),
        "recall": ("vocab_size", "power_a", "train_examples", "test_examples", "epochs", "stop_at", "optimizer",
                   "weight_decay", "schedule", "grad_clip", "n_layer", "dtype"),
        "images": ("dataset", "image_size", "patch_size", "batch_images", "epochs", "learning_rate", "weight_decay",
                   "min_crop", "mirror", "rand_augment", "mixup", "cutmix", "erasing", "repeats", "smoothing",
                   "eval_crop", "ema", "dtype")}
SAME_AT_A_LENGTH = ("pairs", "batch_examples", "eval_interval")

Records = namedtuple("Records", "result config evaluations")  # result.json, config.json, evals of log.jsonl


def check_packages(modules=("pandas", "tabulate", "markdown_it")):
    """Raises ConfigError, with the command to type, if a package is not installed. Default: those of the reports."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"{module} is not installed: pip install -r requirements-experiments.txt")


def stem(model):
    """The family or pattern of a model's name in the plan, without what follows the @."""
    return model.partition("@")[0]


def label_settings(model):
    """[--key=value] of NAME@key=value,key=value, settings of this family's runs only; empty for NAME@WORD."""
    changes = model.partition("@")[2]
    return [f"--{change}" for change in changes.split(",")] if "=" in changes else []


def read(source, accept_code=(), kind=None):
    """The records of a sweep's folder or saved file as a DataFrame, in the order of the plan.

    Columns are the keys of result.json and config.json, and: run, left_out ("" if the run counts), device (name of the
    GPU or CPU), code, commit, cpu, torch, python, time (when it began), and those that of_scaling, recalled and
    of_extrapolation add. attrs: kind, name, the plan's entries about the whole sweep, `settings` that its runs share,
    and `code`: a dict per version of the code, the most frequent first, with its commit, how many `runs` finished, how
    many are `used`, and `changed_files`, which differ from the first version (None: not recorded).

    Args:
        accept_code: versions of the code whose runs also count.
        kind: a key of PLACE, if only this kind is wanted.
    Raises ConfigError if there is no sweep, it is of another kind, accept_code is not a version of its code, or pandas
    is not installed.
    """
    check_packages(["pandas"])
    import pandas

    source = Path(source)
    with fields(f"{source} (did a report write it?): its records"):
        saved = read_json(source) if source.is_file() else {}
        if "extrapolation" in saved:
            this, (rows, about) = "extrapolation", of_extrapolation(saved["extrapolation"])
        elif "runs" in saved:
            this, rows, about = of_older_file(saved)
        else:
            plan, records = load(source)
            this = next((key for key, place in PLACE.items() if all(
                {*place} - {"from"} <= at.keys() for at in plan["cells"].values())), None)
            if this is None:
                raise ConfigError(f"{source}: the plan does not say what its cells are: give the folder of a sweep")
            if this == "extrapolation":  # the folder has the training runs; the evaluations are in a file beside it
                return read(source.with_name(f"{source.name}.json"), kind=kind)
            rows, about = compared(this, plan, records, source, accept_code)
    if kind not in (None, this) and rows:
        raise ConfigError(f"{source} contains records of {this}, not of {kind}: use the report of {this}")
    this = kind or this
    columns = dict.fromkeys(["run", *PLACE[this], "left_out", "device", "code", *(key for row in rows for key in row)])
    is_whole = lambda value: value is None or type(value) is int and value < 2**63
    whole = [key for key in columns if all(is_whole(row.get(key)) for row in rows)]
    runs = pandas.DataFrame(rows, columns=list(columns)).astype(dict.fromkeys(whole, "Int64"))  # ints beside gaps
    runs.attrs = {"name": source.resolve().name.removesuffix(".json"), "kind": this, **about}
    return runs


def compared(kind, plan, records, source, accept_code):
    """(rows, attrs) from the Records of a sweep: which runs are comparable, and why the others are not."""
    rows, known, votes, code = {}, set(), {}, []
    finished = lambda: {name: row for name, row in rows.items() if isinstance(row, dict)}
    for name, at in plan["cells"].items():
        try:
            if isinstance(records[name], BadRecord):
                raise records[name]
            with fields():
                known.update(codes_of(records[name].config))
            rows[name] = checked(kind, name, at, records[name], accept_code)
        except BadRecord as reason:
            rows[name] = str(reason)
    if unknown := [version for version in accept_code if version not in known]:
        raise ConfigError(f"--accept_code={unknown[0]}: the runs of {source} have {', '.join(sorted(known))}")

    ran, versions = finished(), Counter(row["code"] for row in finished().values())
    first = max(versions, key=lambda version: (version not in accept_code, versions[version]), default=None)
    for name, row in ran.items():
        if row["code"] not in {first, *accept_code}:
            rows[name] = f"other code, {row['code']}, than most runs, {first}: --accept_code={row['code']} joins it"
    same = {name: row.pop("same") for name, row in finished().items()}
    for group, values in (item for groups in same.values() for item in groups.items()):
        votes.setdefault(group, Counter())[json.dumps(values)] += 1
    most = {group: json.loads(texts.most_common(1)[0][0]) for group, texts in votes.items()}
    for name, groups in same.items():
        other = [f"{key} {value} where most have {most[group][key]}" for group, values in groups.items()
                 for key, value in values.items() if value != most[group].get(key, value)]
        if other:
            rows[name] = "not comparable: " + ", ".join(other)

    environments = dict.fromkeys(versions, {})  # of a run that began in one version and ended in another: the last's
    environments |= {code_of(environment)[:12]: environment
                     for environment in (records[name].config["environment"] for name in ran)}
    for version in sorted(versions, key=lambda version: (version != first, -versions[version])):
        before, files = (environments[v].get("code_files") for v in (first, version))
        code.append({"code": version, "commit": environments[version].get("commit"), "runs": versions[version],
                     "used": sum(row["code"] == version for row in finished().values()),
                     "changed_files": runner.changed_files(before, files) if before and files else None})
    about = {key: value for key, value in plan.items() if key != "cells"}
    place = lambda name: {"run": name, **{key: plan["cells"][name].get(key, 0) for key in PLACE[kind]}}
    rows = [place(name) | ({"left_out": row} if isinstance(row, str) else row) for name, row in rows.items()]
    return rows, about | {"settings": most.get("settings", {}), "code": code}


def codes_of(record):
    """The versions of the code that a run was trained with, in order, by its config.json."""
    return [code[:12] for code in record.get("code_versions") or [code_of(record["environment"])]]


# ------------------------------------------------------------------------------------------------------------- one run

def read_run(folder, at):
    """The row of a run of a scaling sweep. Raises BadRecord if a file is missing or damaged, or contradicts another
    file or `at`, the run's place in the plan."""
    return checked("scaling", Path(folder).name, at, Records(*finished_records(folder), read_log(folder, "eval")))


def checked(kind, name, at, records, accept_code=()):
    """The row of a finished run at its place in the plan, with `same`, {group: values} that comparable runs share.
    Raises BadRecord."""
    result, record, evaluations = records

    def is_number(value):  # NaN is none
        return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e300

    with fields():
        config, environment, value = record["config"], record["environment"], result[MEASURE[kind]]
        if kind == "scaling" and not (is_number(value) and value < math.log(config["vocab_size"])):
            raise BadRecord(f"its loss is {str(value)[:40]}, and guessing's {math.log(config['vocab_size']):.3f}: it "
                            "diverged")
        if kind != "scaling" and not (value == 0 or is_number(value) and value <= 1):
            raise BadRecord(f"its accuracy is {str(value)[:40]}")
        for key in ("seconds", "flops", "parameters", "processes"):
            if not is_number(result[key]):
                raise BadRecord(f"{key} is {str(result[key])[:40]}: not a number above 0")
        names = {key: SETTING.get(key, key) for key in (*PLACE[kind], "context")}
        ran = {key: config[setting] for key, setting in names.items() if setting in config}
        ran |= {"model": config.get("pattern") or config["model"], "code": code_of(environment), "seed": config["seed"],
                "folder": Path(config["out_dir"]).name}
        if kind == "scaling":
            ran["tokens"] = config["max_iters"] * config["batch_tokens"]
        planned = at | {"folder": Path(name).name, "model": stem(at.get("model", ran["model"]))}
        for source, said in ("result.json", result | {"code": code_of(result)}), ("the plan", planned):
            for key, value in ran.items():
                if said.get(key, value) != value:
                    raise BadRecord(f"another run's records: {key} is {value}, {source} says {said[key]}")
        stretches = codes_of(record)
        codes = [code for code in stretches if code not in accept_code] or stretches[-1:]
        if len(set(codes)) > 1:
            raise BadRecord(f"its code changed while it was down: {', then '.join(stretches)}")
        if not evaluations or any(evaluations[-1][key] != result[key] for key in ("tokens", MEASURE[kind])):
            raise BadRecord(f"log.jsonl does not end with the {MEASURE[kind]} in result.json")
        settings = {key: config.get(key) for key in SAME[kind]
                    if key != "schedule" or at.get("stage") != "cosine"}  # a cosine run differs on purpose
        row = {**config, **result, **{key: at.get(key, 0) for key in PLACE[kind]},
               "device": environment["cpu"] if result["device_name"] == "cpu" else result["device_name"],
               **{key: environment.get(key) or "" for key in ("commit", "cpu", "torch", "python")}, "code": codes[-1],
               "time": str(record.get("time", "")), "left_out": "", "same": {"settings": settings}}
        return {"scaling": of_scaling, "recall": of_recall, "images": of_images}[kind](row, record, evaluations)


def of_scaling(row, record, evaluations):
    """The row with tokens and losses per held-out file as arrays (older records: one entry for all), and the loss on
    the first half of them, which chooses learning rates."""
    tokens = np.array(row.get("val_document_tokens", [row["val_tokens"]]), float)
    losses = np.array(row.get("val_document_losses", [row["val_loss"]]), float)
    if tokens.shape != losses.shape or abs(np.average(losses, weights=tokens) - row["val_loss"]) > 1e-4:
        raise BadRecord("its documents' losses do not make up its loss")
    first = slice(len(tokens) // 2 or None)
    data, embedding = record["data"], record["derived"]["parameters"]["embedding"]
    sha256 = data.get("identity") or {name: split["sha256"] for name, split in data["splits"].items()}  # older ones
    row["same"]["data"] = {f"{name} data": sha256[name] for name in ("train", "val")} | {
        "val_tokens": row["val_tokens"]}
    row["same"][f"size {row['size']}"] = {"tokens per window": row.get("eval_block_size") or row["block_size"]}
    return row | {"val_document_tokens": tokens, "val_document_losses": losses, "embedding": embedding,
                  "loss_of_choosing_files": float(np.average(losses[first], weights=tokens[first]))}


def of_recall(row, record, evaluations):
    """The row with the epochs it ran and the columns of `recalled`. Runs of a seed share their examples."""
    row["same"] |= {f"T = {row['T']}": {key: row[key] for key in SAME_AT_A_LENGTH},
                    f"T = {row['T']}, seed {row['seed']}": record["data"]["sha256"],
                    f"{row['mixer']}, T = {row['T']}, width {row['n_embd']}": settings_of_point("recall", record)}
    curve = [[e["step"], e["accuracy"], e["val_loss"]] for e in evaluations]
    return recalled(row | {"curve": curve, "epochs": row["steps"] / record["derived"]["steps_per_epoch"]})


def settings_of_point(kind, record):
    """What runs must share to be averaged at one point of a figure, beside what all runs of the sweep share."""
    from runtime.folder import MAY_CHANGE_ON_RESUME  # late: it imports PyTorch

    others = {"seed", "learning_rate", *SAME[kind], *SAME_AT_A_LENGTH} | MAY_CHANGE_ON_RESUME - {"max_iters"}
    return {key: value for key, value in record["config"].items() if key not in others | runner.WITHOUT_EFFECT}


def recalled(run):
    """The row with `recall`, on examples that chose nothing; `steps_to_half`; and by_distance and by_pairs as
    {label: (queries, correct answers)}."""
    share = {part["pairs"]: part["accuracy"] for part in run["by_pairs"]}
    right = lambda part: (part["queries"], part["accuracy"] * part["queries"])
    return run | {"recall": float(share[run["pairs"]]), "steps_to_half": steps_to_half(run["curve"]),
                  "by_distance": {f"{part['from']}-{part['to'] - 1}": right(part) for part in run["by_distance"]},
                  "by_pairs": {str(part["pairs"]): right(part) for part in run["by_pairs"]}}


def steps_to_half(curve, level=0.5):
    """Steps until test accuracy first reaches `level`, interpolated between evaluations; inf: never.

    curve: [[step, accuracy, loss]].
    """
    before = (0, 0.0)
    for step, accuracy, _ in curve:
        if accuracy >= level:
            return before[0] + (level - before[1]) / (accuracy - before[1]) * (step - before[0])
        before = step, accuracy
    return math.inf


def of_images(row, record, evaluations):
    place = ", ".join(str(row[key]) for key in PLACE["images"] if key != "seed")
    row["same"] |= {"data": {"images": record["data"]["sha256"]}, place: settings_of_point("images", record)}
    return row


# --------------------------------------------------------------------------------------------- files with a row per run

def of_extrapolation(saved):
    """(rows, attrs) of models evaluated at several lengths: the recorded keys, and loss_T for each length T."""
    rows = [{**r["checkpoint"], **r, "time": r["date"], "left_out": "", "commit": r["environment"]["commit"] or "",
             "torch": r["environment"]["torch"], **{f"loss_{x['length']}": x.get("loss") for x in r["lengths"]}}
            for r in saved]
    return rows, {"code": [{"code": code} for code in sorted({row["code"] for row in rows} - {"unknown"})]}


def of_older_file(saved):
    """(kind, rows, attrs) of a file of recall or images in the format before save()."""
    kind = "recall" if all("mixer" in run for run in saved["runs"]) else "images"
    codes = saved["code"] if isinstance(saved["code"], dict) else {saved["code"]: len(saved["runs"])}
    shared = {"code": " and ".join(codes), "commit": saved.get("commit"), "time": saved.get("time"), "left_out": "",
              "device": saved["machine"] if "machine" in saved else ", ".join(saved["machines"])}
    rows = [shared | {"run": run.get("name", "_".join(str(run[key]) for key in PLACE[kind]))}
            | (recalled(run) if kind == "recall" else run) for run in saved["runs"]]
    rows += [{"run": name, "left_out": reason} for name, reason in saved["left_out"].items()]
    return kind, rows, {key: value for key, value in saved.items() if key not in ("runs", "left_out")} | {
        "code": [{"code": code, "commit": saved.get("commit"), "runs": n, "used": n} for code, n in codes.items()]}


# ------------------------------------------------------------------------------------------------------ the saved sweep

# sections of config.json, and the keys that are not kept
SECTIONS = {"config": (), "environment": ("command", "code_files"), "derived": ("decayed",), "data": ()}
KEPT_OF_LOG = ("step", "tokens", "val_loss", "accuracy", "val_accuracy", "seconds")


def load(source):
    """(plan, {name: Records or BadRecord}) of a sweep's folder, or of a file from save(). Raises ConfigError."""
    source, records = Path(source), {}
    if not source.is_file():
        plan = runner.read_plan(source)
        for name in plan["cells"]:
            try:
                records[name] = Records(*finished_records(source / name), read_log(source / name, "eval"))
            except BadRecord as reason:
                records[name] = reason
        return plan, records
    with fields(f"{source} (did a report write it?): its records"):
        saved = read_json(source)
        for name, cell in saved["cells"].items():
            if "left_out" in cell:
                records[name] = BadRecord(cell["left_out"])
                continue
            config = {k: v for k, v in cell.items() if k not in ("at", "result", "eval", "train")}  # train: older files
            config |= {s: saved["shared"][s] | cell[s] for s in SECTIONS}
            config["config"].setdefault("out_dir", name)  # missing in older files
            config["environment"]["code_files"] = saved["code_files"][code_of(config["environment"])]
            evaluations = [dict(zip(cell["eval"], v, strict=True)) for v in zip(*cell["eval"].values(), strict=True)]
            records[name] = Records(saved["shared"]["result"] | cell["result"], config, evaluations)
        return {**saved["plan"], "cells": {name: dict(cell["at"]) for name, cell in saved["cells"].items()}}, records


def save(source, path):
    """Write a sweep's records to one file: what all runs share, once, then a line per run with what differs.

    Plan, settings, results and evaluations are kept exactly. The command line (the plan has it), the list of tensors
    with weight decay, and the training losses are dropped.
    """
    plan, records = load(source)
    cells, files = {}, {}
    for name in plan["cells"]:
        try:
            if isinstance(records[name], BadRecord):
                raise records[name]
            result, record, evaluations = records[name]
            with fields():
                cell = {key: value for key, value in record.items() if key not in SECTIONS}
                for section, drop in SECTIONS.items():
                    cell[section] = {k: v for k, v in record[section].items() if k not in drop}
                cell["config"]["out_dir"] = Path(cell["config"]["out_dir"]).name
                kept = [key for key in KEPT_OF_LOG if all(key in e for e in evaluations)]
                cell |= {"eval": {key: [e[key] for e in evaluations] for key in kept}, "result": result}
                files[code_of(cell["environment"])] = record["environment"].get("code_files", {})
            cells[name] = cell
        except BadRecord as reason:
            cells[name] = {"left_out": str(reason)}
    whole = [c for c in cells.values() if "left_out" not in c]
    shared = {s: {k: v for k, v in whole[0][s].items() if all(c[s].get(k, ...) == v for c in whole)}
              for s in (*SECTIONS, "result") if whole}
    for c in whole:
        c |= {s: {k: v for k, v in c[s].items() if k not in table} for s, table in shared.items()}
    head = {"plan": {k: v for k, v in plan.items() if k != "cells"}, "code_files": files, "shared": shared}
    lines = (f"  {json.dumps(name)}: {json.dumps({'at': at, **cells[name]})}" for name, at in plan["cells"].items())
    text = json.dumps(head, indent=1).removesuffix("\n}") + ',\n "cells": {\n' + ",\n".join(lines) + "\n }\n}\n"
    with replacing(path) as tmp:
        Path(tmp).write_text(text)
