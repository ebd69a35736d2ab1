"""The runs of a sweep, read back and checked: from its folder, or from the one file in results/ that it was saved to.

    read_sweep("out/scaling_laptop")              plan.json, and config.json, log.jsonl and result.json of each run
    read_sweep("results/scaling_laptop.json")     a file that save() wrote: the same records without repetition

A run counts only if its records are whole, agree with one another and with the plan, and have the code, data and common
settings that most runs of the sweep have. Every other run is left out, with the reason. `accept_code` joins runs of
code that did change, where the change is known to be harmless.
"""

import json
import math
from collections import Counter, namedtuple
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.sweeps import runner
from experiments.sweeps.runner import code_of
from runtime.errors import ConfigError
from runtime.records import BadRecord, fields, finished_records, mixed_identities, read_json, read_log, replacing

# Settings that make two runs comparable: where they differ, more was changed than the cell's coordinates.
SAME_IN_A_SWEEP = ("batch_tokens", "weight_decay", "beta1", "beta2", "grad_clip", "warmup_iters", "min_lr",
                   "vocab_size", "eval_block_size", "eval_tokens", "final_eval_tokens", "dtype", "init_from",
                   "optimizer", "schedule")

Records = namedtuple("Records", "result config evaluations")  # result.json, config.json, of log.jsonl


@dataclass
class Run:
    """A finished run, read and checked."""

    name: str  # its folder in the sweep
    model: str  # the family as the plan names it: a family, a pattern, NAME@WORD or NAME@key=value
    size: str  # the sweep's label: 120M, 350M ...
    context: int  # tokens per training window
    tokens: int  # trained on
    learning_rate: float  # peak
    seed: int
    parameters: int  # all, embedding counted once
    embedding: int  # of them in the embedding
    flops: float  # of the whole training
    seconds: float  # evaluation and checkpoints included
    loss: float  # validation, nats per token, at the end
    documents: tuple  # (tokens, losses) of its documents, arrays; of older records one of all
    bits_per_byte: float  # None where the data do not say how long a token is
    device: str
    processes: int
    code: str  # runner.code_of
    data: str  # sha256 of train.bin and val.bin, tokens evaluated
    config: dict
    environment: dict
    time: str  # when it began
    at: dict  # the plan's coordinates

    def half(self, which):
        """Mean loss on the first (0) half of the documents, which chooses rates, or the second, which is reported."""
        tokens, losses = halves(self.documents)[which]
        return float(np.average(losses, weights=tokens))


# A sweep as read, of a folder or file. `runs` may be compared; left_out: {name: why} of every other cell of the plan;
# code: a dict per version of the code, that of most runs first, with its commit, how many runs finished and are used,
# and changed_files, those that differ from the first version's, or None where the records do not say
Sweep = namedtuple("Sweep", "folder plan runs left_out code")


def stem(model):
    """The family or pattern behind a name of the plan."""
    return model.partition("@")[0]


def own_settings(model):
    """[--key=value] of NAME@key=value,key=value, which only this family's runs have; of NAME@WORD none."""
    changes = model.partition("@")[2]
    return [f"--{change}" for change in changes.split(",")] if "=" in changes else []


def halves(documents):
    """The documents (tokens, losses) that choose, and those that are reported; a single one is both."""
    n = len(documents[0]) // 2
    return (tuple(v[:n] for v in documents), tuple(v[n:] for v in documents)) if n else (documents, documents)


def read_sweep(source, accept_code=()):
    """The Sweep in a folder or file. Raises ConfigError where there is none, or accept_code names no code of it."""
    plan, records = load(source)
    runs, left_out, known = [], {}, set()
    for name, at in plan["cells"].items():
        try:
            if isinstance(records[name], BadRecord):
                raise records[name]
            with fields():
                known.update(codes_of(records[name].config))
            runs.append(check_run(name, records[name], at, accept_code))
        except BadRecord as reason:
            left_out[name] = str(reason)
    where = {r.code: r.environment for r in runs}
    for code in accept_code:
        if code not in known:
            raise ConfigError(f"--accept_code={code}: the runs of {source} have {', '.join(sorted(known))}")

    versions = Counter(r.code for r in runs)
    first = max(versions, key=lambda code: (code not in accept_code, versions[code]), default=None)
    for r in runs:
        if r.code not in {first, *accept_code}:
            left_out[r.name] = f"other code, {r.code}, than most runs, {first}: --accept_code={r.code} joins it"

    def common(run):  # a cosine of its own is there to differ
        settings = {key: run.config.get(key) for key in SAME_IN_A_SWEEP
                    if key != "schedule" or run.at["stage"] != "cosine"}
        return {"data": run.data, **settings}

    comparable = [r for r in runs if r.name not in left_out]
    most = json.loads(Counter(json.dumps(common(r)) for r in comparable).most_common(1)[0][0]) if comparable else {}
    for run in comparable:
        other = [f"{key} {value} where most have {most[key]}"
                 for key, value in common(run).items() if value != most.get(key, value)]
        if other:
            left_out[run.name] = "not comparable: " + ", ".join(other)
    used = [r for r in comparable if r.name not in left_out]
    code = []
    for version_code in sorted(versions, key=lambda code: (code != first, -versions[code])):
        first_files, there = (where[version].get("code_files") for version in (first, version_code))
        code.append({"code": version_code, "commit": where[version_code].get("commit"), "runs": versions[version_code],
                     "used": sum(r.code == version_code for r in used),
                     "changed_files": runner.changed_files(first_files, there) if first_files and there else None})
    mixed = mixed_identities(r.code for r in runs)
    if mixed:
        print(mixed)
    return Sweep(Path(source), plan, used, left_out, code)


def codes_of(record):
    """Every version of the code that a part of a run was trained with, of its config.json; the oldest name the last."""
    return [code[:12] for code in record.get("code_versions") or [code_of(record["environment"])]]


# ---------------------------------------------------------------------------------------------------------------- check

def read_run(folder, at):
    """The Run in a folder. Raises BadRecord where a file is missing or torn, or contradicts another or the plan."""
    return check_run(Path(folder).name, read_records(folder), at)


def read_records(folder):
    """The Records of a finished run. Raises BadRecord."""
    return Records(*finished_records(folder), read_log(folder, "eval"))


def check_run(name, records, at, accept_code=()):
    """The Run that a cell's Records describe. Raises BadRecord."""
    result, record, evaluations = records

    def is_number(value):  # NaN is none
        return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e300

    with fields():
        config, environment = record["config"], record["environment"]
        loss, guessing = result["val_loss"], math.log(config["vocab_size"])
        if not is_number(loss) or loss >= guessing:
            raise BadRecord(f"its loss is {str(loss)[:40]}, and guessing's {guessing:.3f}: it diverged")
        for key in ("seconds", "flops", "parameters", "processes", "val_tokens"):
            if not is_number(result[key]):
                raise BadRecord(f"{key} is {str(result[key])[:40]}: not a number above 0")
        ran = {"model": config.get("pattern") or config["model"], "seed": config["seed"], "code": code_of(environment),
               "steps": config["max_iters"], "tokens": config["max_iters"] * config["batch_tokens"],
               "context": config["block_size"], "learning_rate": config["learning_rate"],
               "folder": Path(config["out_dir"]).name}
        for source, said in [("result.json", result | {"code": code_of(result)}),
                             ("the plan", at | {"model": stem(at["model"]), "folder": Path(name).name})]:
            for key, value in ran.items():
                if said.get(key, value) != value:
                    raise BadRecord(f"another run's records: {key} is {value}, {source} says {said[key]}")
        stretches = codes_of(record)
        codes = [c for c in stretches if c not in accept_code] or stretches[-1:]
        if len(set(codes)) > 1:
            raise BadRecord(f"its code changed while it was down: {', then '.join(stretches)}")
        if not evaluations or (evaluations[-1]["tokens"], evaluations[-1]["val_loss"]) != (result["tokens"], loss):
            raise BadRecord("log.jsonl does not end with the loss in result.json")
        tokens = np.array(result.get("val_document_tokens", [result["val_tokens"]]), float)
        losses = np.array(result.get("val_document_losses", [loss]), float)
        if tokens.shape != losses.shape or abs(np.average(losses, weights=tokens) - loss) > 1e-4:
            raise BadRecord("its documents' losses do not make up its loss")
        splits, device = record["data"]["splits"], result["device_name"]
        same = {key: result[key] for key in ("tokens", "seed", "parameters", "flops", "seconds", "processes")}
        return Run(name=name, model=at["model"], size=at["size"], context=config["block_size"], **same,
                   learning_rate=config["learning_rate"], embedding=record["derived"]["parameters"]["embedding"],
                   loss=loss, documents=(tokens, losses), bits_per_byte=result.get("val_bits_per_byte"),
                   device=environment["cpu"] if device == "cpu" else device, code=codes[-1],
                   data=f"{splits['train']['sha256']} {splits['val']['sha256']}, {result['val_tokens']} tokens",
                   config=config, environment=environment, time=str(record.get("time", "")), at=at)


# ------------------------------------------------------------------------------------------------------ the saved sweep

# sections of config.json, with what is not kept of each
SECTIONS = {"config": (), "environment": ("command", "code_files"), "derived": ("decayed",), "data": ()}


def load(source):
    """(plan, {name: Records or BadRecord}) of every cell in a folder or saved file. Raises ConfigError."""
    source = Path(source)
    plan, records = load_file(source) if source.is_file() else (runner.read_plan(source), {})
    for name, at in plan["cells"].items():
        if not {"stage", "model", "size", "seed", "learning_rate"} <= at.keys():
            raise ConfigError(f"{source}: the plan does not say what its cell {name} is: give a folder of sweep.py")
        if name not in records:
            try:
                records[name] = read_records(source / name)
            except BadRecord as reason:
                records[name] = reason
    return plan, records


def save(source, path):
    """Write a sweep's records to one file: what all runs share once, then a line per run with what differs.

    Plan, settings, results and evaluations are kept exactly. Dropped are the command line, which the plan has, the list
    of tensors with weight decay, and the training losses along the way.
    """
    plan, records = load(source)
    cells, files = {}, {}
    for name, r in records.items():
        try:
            if isinstance(r, BadRecord):
                raise r
            with fields():
                cell = {key: value for key, value in r.config.items() if key not in SECTIONS}
                for section, drop in SECTIONS.items():
                    cell[section] = {k: v for k, v in r.config[section].items() if k not in drop}
                cell["config"]["out_dir"] = Path(cell["config"]["out_dir"]).name
                cell["eval"] = {k: [e[k] for e in r.evaluations] for k in ("tokens", "val_loss", "seconds")}
                cell["result"] = r.result
                files[code_of(cell["environment"])] = r.config["environment"].get("code_files", {})
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


def load_file(path):
    """What load() gives, of a file that save() wrote. Raises BadRecord where it is none."""
    with fields(f"{path} (did `report --save` write it?): its records"):
        saved, records = read_json(path), {}
        for name, cell in saved["cells"].items():
            if "left_out" in cell:
                records[name] = BadRecord(cell["left_out"])
                continue
            config = {k: v for k, v in cell.items() if k not in ("at", "result", "eval", "train")}  # train: older files
            config |= {s: saved["shared"][s] | cell[s] for s in SECTIONS}
            config["config"].setdefault("out_dir", name)  # older files leave it out
            config["environment"]["code_files"] = saved["code_files"][code_of(config["environment"])]
            evaluations = [dict(zip(cell["eval"], v, strict=True)) for v in zip(*cell["eval"].values(), strict=True)]
            records[name] = Records(saved["shared"]["result"] | cell["result"], config, evaluations)
        return {**saved["plan"], "cells": {name: dict(cell["at"]) for name, cell in saved["cells"].items()}}, records
