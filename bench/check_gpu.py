"""Whether the records of `make gpu` can be sent in: one line per fault, and exit status 1, or the lines to send.

    python bench/check_gpu.py results/gpu_nvidia_h100_80gb_hbm3
    python bench/check_gpu.py out/gpu_dry --dry_run     # of a dry run, whose times mean nothing

Correctness comes first: without a record of it that ends well, nothing else counts. Every record must name the same
device, versions and commit, and the code that ran must be that commit's. Everything that follows from something else is
computed again: medians from samples, rates from medians, a stage's summary from its record, errors against the
tolerances of scan_cuda.py. No time may be below what the device needs for the bytes and the arithmetic.
"""

import argparse
import copy
import datetime
import functools
import hashlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import gpu, measure, scan_cuda, step  # noqa: E402
from bench.measure import DTYPES  # noqa: E402
from runtime.errors import ConfigError, main_error  # noqa: E402
from runtime.records import NATIVE_SOURCES, BadRecord, fields, read_json  # noqa: E402
from runtime.telemetry import peak_flops  # noqa: E402

FIRST = "gpu_correctness.json"
# The memory's peak in bytes per second, from the data sheets; of other devices, what a copy reached counts alone.
PEAK_BYTES = {"H200": 4.8e12, "H100 PCIe": 2.04e12, "H100 NVL": 3.94e12, "H100": 3.36e12, "H20": 4e12,
              "A100": 2.04e12, "A10": 0.6e12, "L40S": 0.87e12, "B200": 8e12, "B300": 8e12, "RTX 5090": 1.8e12,
              "RTX 4090": 1.01e12, "RTX 3090": 1.01e12}
AN_HOUR = 3600  # in seconds, by which a clock may be wrong
DATE = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d"
SLACK = 1.15  # of bandwidth: reading is faster than copying, and the last writes may still be in the cache
# Instructions per token, channel and state that no scan can do without: forget, write and read the state; the backward
# recomputes the state, and has the gradients of state, key, query, value and step size.
INSTRUCTIONS = {"forward": 4, "backward": 10, "forward_backward": 14}
STAGES = {stage.name: stage for stage in gpu.STAGES}


def faults(folder, dry_run=False, root=ROOT):
    """Yields a line per fault in a folder of records. root: a git checkout that has the commit. Raises BadRecord for a
    file that cannot be read."""
    records = {path.name: read_once(path) for path in sorted(Path(folder).glob("*.json"))}
    if FIRST not in records:
        yield f"there is no {FIRST}, and nothing counts before correctness: make gpu STAGES=correctness"
        return
    with fields(FIRST):
        yield from (f"{FIRST}: {line}" for line in correctness_faults(records[FIRST], Path(folder), dry_run))
    for name in sorted(records, key=lambda name: name.startswith("gpu_")):  # they are compared with the others
        record = records[name]
        with fields(name):
            kinds = {"gpu": call_faults, "scan_cuda": scan_faults, "step": step_faults}
            lines = [*origin_faults(record, records[FIRST], dry_run, root), *number_faults(record)]
            if record["benchmark"] == "gpu":
                lines += stage_faults(record, name.removesuffix(".json"), read_log(folder, name) or "", records)
            lines += kinds[record["benchmark"]](record, dry_run, records)
            yield from (f"{name}: {line}" for line in lines)


def read_once(path):
    """`read_json`. Raises BadRecord also if an object names something twice, of which json would keep the last."""
    def unique(pairs):
        names = [name for name, _ in pairs]
        if twice := [name for name in names if names.count(name) > 1]:
            raise BadRecord(f"{path.name} names {twice[0]} twice")
        return dict(pairs)

    record = read_json(path)
    json.loads(path.read_bytes(), object_pairs_hook=unique)
    return record


def read_log(folder, name):
    """The text of the log beside the record `name`, or None."""
    log = Path(folder) / name.replace(".json", ".log")
    return log.read_text(errors="replace") if log.exists() else None


def stage_faults(record, name, log, records):
    """Stages that are not those of the call `name`, from its first on, in order, or say something else than their
    records and the log."""
    names = [stage["stage"] for stage in record["stages"]]
    if len(set(names)) < len(names):
        yield "it names a stage twice"
    alone = [stage.name for stage in gpu.STAGES if stage.name in names]  # of --stages=build,tests
    call = gpu.CALLS.get(name.removeprefix("gpu_"), alone)
    if names != list(call[:len(names)]) or record["finished"] and len(names) < len(call):
        yield f"its stages are {', '.join(names)}, and not {', '.join(call)}"
    for stage in record["stages"]:
        name, file = stage["stage"], file_written_by(stage["stage"])
        if stage["status"] not in ("ok", "failed", "over time", "skipped", "left out"):
            yield f"stage {name} is {stage['status']}"
        elif stage["status"] == "ok" and file in (None, *records):
            in_short = scan_cuda.in_short if name == "benchmark" else step.in_short
            words = gpu.summary_of(STAGES[name], stage["records"], gpu.output_of(name, log))
            words = "; ".join(in_short(records[file])) if file else words
            if stage["summary"] != words:
                yield f"the summary of its stage {name} is not that of its records: {words}"


def file_written_by(stage):
    """The file of a stage that is another program with its own record, or None."""
    return "scan_cuda.json" if stage == "benchmark" else f"{stage}.json" if stage.startswith("training") else None


def call_faults(record, dry_run, records):
    """A build or a test that failed, stages whose own record is missing or was cut, and times of other stages."""
    for stage in record["stages"]:
        name = stage["stage"]
        gate = name in (*gpu.GATES, "environment", "memcheck", "racecheck")
        if gate and stage["status"] == "failed" or stage["status"] == "ok" and stage["exit_status"] not in (0, 124):
            yield f"stage {name} failed"  # 124: a sweep whose time was up
        file = file_written_by(name)
        if file and stage["status"] == "ok" and records.get(file, {}).get("finished") is not True:
            yield f"the record of its stage {name}, {file}, is {'cut' if file in records else 'missing'}"
        for row in stage["records"]:
            yield from row_faults(name, row, records)


def row_faults(stage, row, records):
    """Times of the convolution and of variants of the scan that no such device can reach, or whose share differs."""
    if "forward" not in row:
        return
    if stage == "variants" and "scan_cuda.json" in records:
        yield from time_faults(row, scan_cuda.Shape(*(row[n] for n in "BTDN")), 2, records["scan_cuda.json"])
    for direction, passes in (("forward", 2), ("backward", 3)) if stage == "convolution" else ():
        share = passes * row["B"] * row["T"] * row["D"] * 2 / row["copy_bytes_per_second"]
        share /= row[direction]["median_seconds"]
        if not math.isclose(row[direction]["share_of_bandwidth"], share, rel_tol=1e-6):
            yield f"{row['contender']}'s convolution, {direction}: its share of the bandwidth does not follow"


def correctness_faults(record, folder, dry_run):
    """The build and the tests: that they ran, succeeded, and printed what the record says."""
    stages = {stage["stage"]: stage for stage in record["stages"]}
    for name in ("environment", *gpu.GATES):
        if name not in stages or stages[name]["status"] != "ok":
            yield f"stage {name} is {stages[name]['status'] if name in stages else 'missing'}"
    if not described(record):
        yield "it describes no device"
    (counts,) = stages.get("tests", {}).get("records") or gpu.tests_read("")
    if counts["failed"] or not counts["passed"] + dry_run * counts["skipped"]:
        yield f"{counts['passed']} tests passed and {len(counts['failed'])} failed"
    log = read_log(folder, FIRST)
    printed = None if log is None else gpu.tests_read(gpu.output_of("tests", log))
    if printed != [counts]:
        name = FIRST.replace(".json", ".log")
        yield f"{name} {'is missing' if printed is None else f'has other tests: {printed[0]}'}"


def origin_faults(record, first, dry_run, root):
    """Device, date, commit and versions."""
    ran, origin = record["environment"], first["environment"]
    if record["benchmark"] != "step" and record["dry_run"] is not dry_run:
        yield "a dry run measures nothing" if record["dry_run"] else "it is no dry run, as --dry_run says"
    needed = ("python", "torch", "cpu", *(() if dry_run else ("gpu", "cuda")))
    for name in needed:
        if not isinstance(ran[name], str) or not ran[name]:
            yield f"it does not name its {name} ({ran[name]!r})"
    for name in ("python", "torch", "gpu", "cuda", "commit"):
        if ran[name] != origin[name]:
            yield f"its {name} is {ran[name]}, and {FIRST} has {origin[name]}"
    if not dry_run and not str(ran["gpu"]).startswith("NVIDIA "):
        yield f"its gpu {ran['gpu']!r} is no GPU of NVIDIA"
    if not dry_run and "+cpu" in str(ran["torch"]):
        yield f"its torch {ran['torch']} is a CPU's"
    for device in described(record):
        wanted = described(first)[0]["name"] if dry_run and described(first) else ran["gpu"]
        if device["name"] != wanted:
            yield f"its device is {device['name']!r}, and not {wanted!r}"
        if not dry_run and not (device.get("nvidia_smi") or {}).get("driver_version"):
            yield "it does not name the driver's version"
        for name in () if dry_run else ("capability", "multiprocessors"):
            if not device.get(name) or [device[name]] != [d.get(name) for d in described(first)]:
                yield f"it does not name its device's {name}, or {FIRST} has another"
        for name in ("torch", "cuda"):
            if device.get(name, ran[name]) != ran[name]:
                yield f"its {name} is {ran[name]}, and its device's {device[name]}"
    if record["benchmark"] == "step" and record["device"] != (wanted := ran["cpu" if dry_run else "gpu"]):
        yield f"its device is {record['device']!r}, and not {wanted!r}"
    if not re.fullmatch(DATE, record["date"]):
        yield f"its date {record['date']} is not written as 2026-11-20T10:00:00+00:00"
        return
    date, earliest = (datetime.datetime.fromisoformat(r["date"]).timestamp() for r in (record, first))
    if not earliest <= date <= datetime.datetime.now().timestamp() + AN_HOUR:
        yield f"its date {record['date']} is before that of {FIRST} ({first['date']}), or in the future"
    if date < (committed(root, ran["commit"]) or 0) - AN_HOUR:
        yield f"its date {record['date']} is before its commit's"
    yield from commit_faults(ran, dry_run, root)


def described(record):
    """The devices that a record of bench/gpu.py or bench/scan.py describes."""
    if record["benchmark"] == "scan_cuda":
        return [record["device"]]
    return [r["device"] for stage in record.get("stages", []) for r in stage["records"] if "device" in r]


def commit_faults(ran, dry_run, root):
    commit, files = ran["commit"], ran["code_files"]
    if ran["uncommitted_changes"] is not False and not dry_run:
        yield "it was measured with uncommitted changes, or outside git"
    if hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:10] != ran["code"].removeprefix("v2"):
        yield f"its code {ran['code']} is not the hash of its files"
    if missing := set(NATIVE_SOURCES) - set(files):
        yield f"its files lack {', '.join(sorted(missing))}"
    if committed(root, commit) is None:
        yield f"its commit {commit} is not in the history of this checkout"
    elif ran["uncommitted_changes"] is False:
        other = [path for path, digest in files.items() if committed(root, commit, path) != digest]
        if other:
            yield f"{other[0]} is another file than at its commit {commit[:10]}"


@functools.cache
def committed(root, commit, path=None):
    """12 hex digits of the hash of a file at a commit, as in records.code_identity; without a path, when it was
    committed, in seconds since 1970. None if HEAD does not have it."""
    def git(*words):
        run = subprocess.run(["git", "-C", str(root), *words], capture_output=True)
        return None if run.returncode else run.stdout

    if path is not None:
        content = git("cat-file", "blob", f"{commit}:{path}")
        return None if content is None else hashlib.sha256(content).hexdigest()[:12]
    whole = re.fullmatch("[0-9a-f]{40}", str(commit))
    return int(git("show", "-s", "--format=%ct", commit)) if whole and git(
        "merge-base", "--is-ancestor", commit, "HEAD") is not None else None


def number_faults(record, place=""):
    """Numbers below 0 or infinite, and medians, quartiles and counts that are not those of the samples, wherever they
    stand."""
    if isinstance(record, list):
        for i, entry in enumerate(record):
            yield from number_faults(entry, f"{place}[{i}]")
    elif isinstance(record, dict):
        if "median_seconds" in record:
            samples = record["samples_seconds"]
            if not samples or not all(0 < s < math.inf for s in samples):
                yield f"{place}: {samples} are no times"
            elif any(record[name] != value for name, value in measure.spread(samples).items()):
                yield f"{place}: its median, quartiles or count are not those of its samples"
        for name, entry in record.items():
            yield from number_faults(entry, f"{place}.{name}" if place else name)
    elif isinstance(record, (int, float)) and not 0 <= record < math.inf and not place.endswith("exit_status"):
        yield f"{place} is {record}"


def scan_faults(record, dry_run, records):
    """Correctness of what was timed, and times that no such device can reach."""
    rows, wanted = record["correctness"], scan_cuda.cases(dry_run)
    checked = [(r["family"], tuple(r[n] for n in "BTDN"), r["dtype"], {n: r[n] for n in ("key", "logit") if n in r})
               for r in rows]
    if checked != wanted[:max(16, len(rows))]:
        yield f"its {len(rows)} comparisons with float64 are not those of bench/scan_cuda.py, from the first on"
    for row in rows:
        most = scan_cuda.slack(row["family"], row["T"], "key" in row or "logit" in row)
        most += torch.finfo(DTYPES[row["dtype"]]).eps / 2
        results = row.get("results", {})
        right = set(results) == results_of(row["family"]) and all(
            r["right"] is True and r["relative_error"] <= r["tolerance"] <= most for r in results.values())
        if not (right and row["right"] is True and row["two_runs_agree"] is True):
            yield f"wrong: {row['family']} {scan_cuda.describe_case(row)}"
    if record["wrong"] != {}:
        yield f"wrong: {', '.join(record['wrong'])}"
    copied, peak = record["copy_bytes_per_second"], peak_bytes(record["device"]["name"])
    if not 0 < copied <= peak:
        yield f"a copy at {copied / 1e9:,.0f} GB/s is faster than the memory"
    measured = [entry["shape"]["name"] for entry in record["shapes"]] + [e["shape"] for e in record["left_out"]]
    if not dry_run and sorted(measured) != sorted(map(str, scan_cuda.shapes())):
        yield f"its {len(measured)} shapes, with those left out, are not those of bench/scan_cuda.py"
    for entry in record["shapes"]:
        shape = scan_cuda.Shape(*(entry["shape"][n] for n in "BTDN"))
        if [row["contender"] for row in entry["rows"]] != list(scan_cuda.CONTENDERS):
            yield f"not all contenders have a row at {shape}"
        for row in entry["rows"]:
            if "reason" not in row and row["contender"] in scan_cuda.SCANS:
                itemsize = DTYPES[entry["dtype"]].itemsize
                yield from time_faults(row, shape, itemsize, record)
                for direction, moved in scan_cuda.bytes_of_passes(shape, itemsize).items():
                    share = moved / copied / row[direction]["median_seconds"]
                    if not math.isclose(row[direction]["share_of_bandwidth"], share, rel_tol=1e-6):
                        yield f"{row['contender']} {direction} at {shape}: its share of the bandwidth does not follow"


def results_of(family):
    """The names of a comparison's results: outputs and the gradient of every argument."""
    a = measure.make_inputs(1, 1, 1, 1, torch.float32)
    return {"y", "hT", *(f"d{name}" for name in (measure.as_mamba(a) if family == "mamba" else a))}


def time_faults(row, shape, itemsize, record):
    """Times of a scan below what the device of `record`, scan_cuda's, needs."""
    moved, copied = scan_cuda.bytes_of_passes(shape, itemsize), record["copy_bytes_per_second"]
    for direction in scan_cuda.PASSES:
        times, timed = row[direction], f"{row['contender']} {direction} at {shape}"
        floor = max(moved[direction] / copied / SLACK, arithmetic(record["device"], shape, direction))
        if times["fastest_seconds"] < floor:
            yield f"{timed} in {1e3 * times['fastest_seconds']:.3g} ms: it takes {1e3 * floor:.3g} ms at least"


def peak_bytes(device):
    return next((peak for name, peak in PEAK_BYTES.items() if name in device), math.inf)


def arithmetic(device, shape, direction):
    """Seconds for a scan's instructions if nothing else took time; 0 for a dry run, on whatever CPU."""
    if "multiprocessors" not in device:
        return 0.0
    major = int(device["capability"].split(".")[0])
    lanes = 64 if device["capability"] == "8.0" else 128 if major < 10 else 256  # float32 per clock; 256: in pairs
    clock = 1e6 * float((device["nvidia_smi"] or {}).get("clocks.max.sm", 3200))
    return INSTRUCTIONS[direction] * math.prod(shape) / (device["multiprocessors"] * lanes * clock)


def step_faults(record, dry_run, records):
    """Values that do not follow from the times, and models that do not learn."""
    tokens, peak = record["shape"]["batch_size"] * record["shape"]["block_size"], peak_flops(record["device"])
    if record["peak_flops"] != (peak if DTYPES[record["dtype"]] != torch.float32 else None):
        yield f"its peak_flops {record['peak_flops']} are not those of its device"
    rows = copy.deepcopy(record["rows"])
    for row in rows:
        if "seconds" in row:
            row["tokens_per_second"] = tokens / row["seconds"]["median_seconds"]
    for row, derived in zip(record["rows"], step.derive(rows, record["peak_flops"]), strict=True):
        if "reason" in row:
            continue
        for name in ("tokens_per_second", "flops_per_second", "mfu", "times_llama"):
            if not math.isclose(row[name] or 0, derived[name] or 0, rel_tol=1e-6):
                yield f"{row['name']}: its {name} does not follow from its median"
        if peak and row["flops_per_token"] * tokens / row["seconds"]["fastest_seconds"] > peak:
            yield f"{row['name']}: a step in {row['seconds']['fastest_seconds']:.3g} s is faster than the device"
        if not row["last_loss"] < row["first_loss"] < math.inf:
            yield f"{row['name']}: its loss does not fall"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help="the records are those of a dry run")
    args = parser.parse_args(argv)
    if not args.folder.is_dir():
        raise ConfigError(f"{args.folder}: no such folder; make gpu prints where its records are")
    lines = list(faults(args.folder, args.dry_run))
    for line in lines:
        print(f"refused: {line}")
    if not lines:
        ran = read_json(args.folder / FIRST)["environment"]
        print(f"accepted: {ran['gpu'] or 'a dry run'}, torch {ran['torch']}, commit {ran['commit'][:10]}")
        print(f"for results/README.md: | `{args.folder.name}/` | `make gpu` | {ran['commit'][:7]} |")
    return int(bool(lines))


if __name__ == "__main__":
    with main_error("bench/check_gpu.py"):
        sys.exit(main())
