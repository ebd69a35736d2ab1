"""Whether the records of `make gpu` can be sent in: one line per fault, and exit status 1, or the lines to send.

    python bench/check_gpu.py results/gpu_nvidia_h100_80gb_hbm3
    python bench/check_gpu.py out/gpu_dry --dry_run     # of a dry run, whose times mean nothing

Correctness comes first: without a record of it that ends well, nothing else counts. Every record must name the same
device, versions and commit, and the code that ran must be that commit's. Everything that follows from something else is
computed again: medians from samples, rates from medians, errors against the tolerances of scan_cuda.py. No time may be
below what the device needs for the bytes and the arithmetic.
"""

import argparse
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

from bench import gpu, measure, scan_cuda  # noqa: E402
from bench.measure import DTYPES  # noqa: E402
from runtime.errors import ConfigError, main_error  # noqa: E402
from runtime.records import NATIVE_SOURCES, fields, read_json  # noqa: E402
from runtime.telemetry import peak_flops  # noqa: E402

FIRST = "gpu_correctness.json"
# The memory's peak in bytes per second, from the data sheets; of other devices, what a copy reached counts alone.
PEAK_BYTES = {"H200": 4.8e12, "H100 PCIe": 2.04e12, "H100 NVL": 3.94e12, "H100": 3.36e12, "A100": 2.04e12,
              "L40S": 0.87e12, "B200": 8e12, "RTX 5090": 1.8e12, "RTX 4090": 1.01e12, "RTX 3090": 1.01e12}
SLACK = 1.15  # of bandwidth: reading is faster than copying, and the last writes may still be in the cache
# Instructions per token, channel and state that no scan can do without: forget, write and read the state; the backward
# recomputes the state, and has the gradients of state, key, query, value and step size.
INSTRUCTIONS = {"forward": 4, "backward": 10, "forward_backward": 14}


def faults(folder, dry_run=False, root=ROOT):
    """Yields a line per fault in a folder of records. root: a git checkout that has the commit. Raises BadRecord for a
    file that cannot be read."""
    records = {path.name: read_json(path) for path in sorted(Path(folder).glob("*.json"))}
    if FIRST not in records:
        yield f"there is no {FIRST}, and nothing counts before correctness: make gpu STAGES=correctness"
        return
    with fields(FIRST):
        yield from (f"{FIRST}: {line}" for line in correctness_faults(records[FIRST], Path(folder), dry_run))
    for name, record in records.items():
        with fields(name):
            kinds = {"gpu": call_faults, "scan_cuda": scan_faults, "step": step_faults}
            lines = [*origin_faults(record, records[FIRST], dry_run, root), *sample_faults(record)]
            lines += kinds[record["benchmark"]](record, dry_run, records)
            yield from (f"{name}: {line}" for line in lines)


def call_faults(record, dry_run, records):
    """A build or a test that failed, and stages whose own record is missing."""
    stages = {stage["stage"]: stage for stage in record["stages"]}
    if len(stages) < len(record["stages"]):
        yield "it names a stage twice"
    for name, stage in stages.items():
        if name in (*gpu.GATES, "environment", "memcheck", "racecheck"):
            if stage["status"] == "failed" or stage["status"] == "ok" and stage["exit_status"]:
                yield f"stage {name} failed"
        own = "scan_cuda.json" if name == "benchmark" else f"{name}.json" if name.startswith("training") else None
        if own and stage["status"] == "ok" and own not in records:
            yield f"the record of its stage {name}, {own}, is missing"


def correctness_faults(record, folder, dry_run):
    """The build and the tests: that they ran, succeeded, and printed what the record says."""
    stages = {stage["stage"]: stage for stage in record["stages"]}
    for name in ("environment", *gpu.GATES):
        if name not in stages or stages[name]["status"] != "ok":
            yield f"stage {name} is {stages[name]['status'] if name in stages else 'missing'}"
    if not described(record):
        yield "it describes no device"
    (counts,) = stages.get("tests", {}).get("records") or [{"passed": 0, "skipped": 0, "failed": []}]
    if counts["failed"] or not counts["passed"] + dry_run * counts["skipped"]:
        yield f"{counts['passed']} tests passed and {len(counts['failed'])} failed"
    log = folder / FIRST.replace(".json", ".log")
    printed = gpu.tests_read(log.read_text(errors="replace")) if log.exists() else None
    if printed != [counts]:
        yield f"{log.name} {'is missing' if printed is None else f'has other tests: {printed[0]}'}"


def origin_faults(record, first, dry_run, root):
    """Device, date, commit and versions."""
    ran, origin = record["environment"], first["environment"]
    if record["benchmark"] != "step" and record["dry_run"] is not dry_run:
        yield "a dry run measures nothing" if record["dry_run"] else "it is no dry run, as --dry_run says"
    needed = ("python", "torch", *(() if dry_run else ("gpu", "cuda")))
    for name in needed:
        if not isinstance(ran[name], str) or not ran[name]:
            yield f"it does not name its {name} ({ran[name]!r})"
    for name in ("python", "torch", "gpu", "cuda", "commit"):
        if ran[name] != origin[name]:
            yield f"its {name} is {ran[name]}, and {FIRST} has {origin[name]}"
    for device in described(record):
        wanted = described(first)[0]["name"] if dry_run and described(first) else ran["gpu"]
        if device["name"] != wanted:
            yield f"its device is {device['name']!r}, and not {wanted!r}"
        if not dry_run and not (device.get("nvidia_smi") or {}).get("driver_version"):
            yield "it does not name the driver's version"
    if record["benchmark"] == "step" and record["device"] != (wanted := ran["cpu" if dry_run else "gpu"]):
        yield f"its device is {record['device']!r}, and not {wanted!r}"
    dates = [datetime.datetime.fromisoformat(r["date"]).timestamp() for r in (first, record)]
    if not dates[0] <= dates[1] <= datetime.datetime.now().timestamp() + 3600:
        yield f"its date {record['date']} is before that of {FIRST} ({first['date']}), or in the future"
    yield from commit_faults(ran, dry_run, root)


def described(record):
    """The devices that a record of bench/gpu.py or bench/scan.py describes."""
    if record["benchmark"] == "scan_cuda":
        return [record["device"]]
    return [r["device"] for stage in record.get("stages", []) for r in stage["records"] if "device" in r]


def commit_faults(ran, dry_run, root):
    commit, files = str(ran["commit"]), ran["code_files"]
    if ran["uncommitted_changes"] is not False and not dry_run:
        yield "it was measured with uncommitted changes, or outside git"
    if hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:10] != ran["code"].removeprefix("v2"):
        yield f"its code {ran['code']} is not the hash of its files"
    if missing := set(NATIVE_SOURCES) - set(files):
        yield f"its files lack {', '.join(sorted(missing))}"
    if not re.fullmatch("[0-9a-f]{40}", commit) or committed(root, commit) is None:
        yield f"its commit {commit} is not in this repository"
    elif ran["uncommitted_changes"] is False:
        other = [path for path, digest in files.items() if committed(root, commit, path) != digest]
        if other:
            yield f"{other[0]} is another file than at its commit {commit[:10]}"


@functools.cache
def committed(root, commit, path=None):
    """12 hex digits of the hash of a file at a commit, as in records.code_identity; without a path "" if the commit is
    there. None if git does not know it."""
    name = f"{commit}^{{commit}}" if path is None else f"{commit}:{path}"
    run = subprocess.run(["git", "-C", str(root), "cat-file", "-e" if path is None else "blob", name],
                         capture_output=True)
    return None if run.returncode else hashlib.sha256(run.stdout).hexdigest()[:12] if path else ""


def sample_faults(record, place=""):
    """Medians, quartiles and counts that are not those of the samples, wherever they stand."""
    if isinstance(record, list):
        for i, entry in enumerate(record):
            yield from sample_faults(entry, f"{place}[{i}]")
    elif isinstance(record, dict):
        if "median_seconds" in record:
            samples = record["samples_seconds"]
            if not samples or not all(0 < s < math.inf for s in samples):
                yield f"{place}: {samples} are no times"
            elif any(record[name] != value for name, value in measure.spread(samples).items()):
                yield f"{place}: its median, quartiles or count are not those of its samples"
        for name, entry in record.items():
            yield from sample_faults(entry, f"{place}.{name}" if place else name)


def scan_faults(record, dry_run, records):
    """Correctness of what was timed, and times that no such device can reach."""
    rows, wanted = record["correctness"], scan_cuda.cases(dry_run)
    checked = [(r["family"], tuple(r[n] for n in "BTDN"), r["dtype"], {n: r[n] for n in ("key", "logit") if n in r})
               for r in rows]
    if checked != wanted[:max(16, len(rows))]:
        yield f"its {len(rows)} comparisons with float64 are not those of bench/scan_cuda.py, from the first on"
    for row in rows:
        most = scan_cuda.slack(row["family"], row["T"], "key" in row or "logit" in row)
        results = row.get("results", {})
        right = {"y", "dx" if row["family"] != "mamba" else "du"} <= set(results) and all(
            r["relative_error"] <= r["tolerance"] <= most + torch.finfo(DTYPES[row["dtype"]]).eps / 2
            for r in results.values())
        if not (right and row["right"] is True and row["two_runs_agree"] is True):
            yield f"wrong: {row['family']} {scan_cuda.describe_case(row)}"
    if record["wrong"]:
        yield f"wrong: {', '.join(record['wrong'])}"
    copied, peak = record["copy_bytes_per_second"], peak_bytes(record["device"]["name"])
    if not 0 < copied <= peak:
        yield f"a copy at {copied / 1e9:,.0f} GB/s is faster than the memory"
    for entry in record["shapes"]:
        shape = scan_cuda.Shape(*(entry["shape"][n] for n in "BTDN"))
        moved = scan_cuda.bytes_of_passes(shape, DTYPES[entry["dtype"]].itemsize)
        for row in entry["rows"]:
            if "reason" in row or row["contender"] not in scan_cuda.SCANS:
                continue
            for direction in scan_cuda.PASSES:
                times, timed = row[direction], f"{row['contender']} {direction} at {shape}"
                floor = max(moved[direction] / copied / SLACK, arithmetic(record["device"], shape, direction))
                if times["fastest_seconds"] < floor:
                    yield f"{timed} in {1e3 * times['fastest_seconds']:.3g} ms: it takes {1e3 * floor:.3g} ms at least"
                share = moved[direction] / copied / times["median_seconds"]
                if not math.isclose(times["share_of_bandwidth"], share, rel_tol=1e-6):
                    yield f"{timed}: its share of the bandwidth does not follow from its median"


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
    """Rates that do not follow from the times, and models that do not learn."""
    tokens, peak = record["shape"]["batch_size"] * record["shape"]["block_size"], peak_flops(record["device"])
    for row in record["rows"]:
        if "reason" in row:
            continue
        rate = tokens / row["seconds"]["median_seconds"]
        if not math.isclose(row["tokens_per_second"], rate, rel_tol=1e-6):
            yield f"{row['name']}: {row['tokens_per_second']:,.0f} tokens/s do not follow from its median"
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
