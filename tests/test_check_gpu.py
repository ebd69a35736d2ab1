"""bench/check_gpu.py: honest records are accepted, and what a person or a bug may have changed in them is named.

    python -m pytest tests/test_check_gpu.py
"""

import copy
import hashlib
import json
import math
import os
import subprocess

import pytest

from bench import check_gpu, measure, scan_cuda
from runtime.errors import ConfigError
from runtime.records import NATIVE_SOURCES

DEVICE = {"name": "NVIDIA H100 80GB HBM3", "capability": "9.0", "multiprocessors": 132, "torch": "2.11.0",
          "cuda": "13.0", "nvidia_smi": {"driver_version": "580.1", "clocks.max.sm": "1980"}}
LOG = """===== tests: python -m pytest
[gw0] [ 50%] PASSED tests/test_cuda.py::test_gpu_a
[gw1] [100%] PASSED tests/test_cuda.py::test_gpu_b

===== fused: python -m pytest
[gw0] [100%] PASSED tests/test_fused.py::test_c
"""
DATE = "2026-11-20T{}+00:00"


RESULTS = "y hT dx ddt dk dq dD dz ddt_bias", "y hT du ddelta dA dB dC dD dz ddelta_bias"


def sha(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """(A git repository with the native sources, its first commit, a second one with another scan, and a third one that
    no branch has)."""
    root = tmp_path_factory.mktemp("repository")
    git = lambda *words: subprocess.run(["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b", *words],
                                        env={**os.environ, "GIT_COMMITTER_DATE": DATE.format("09:00:00")},
                                        check=True, capture_output=True, text=True).stdout.strip()
    git("init", "-q")
    commits = []
    for version in ("one", "two"):
        for path in NATIVE_SOURCES:
            (root / path).parent.mkdir(exist_ok=True)
            (root / path).write_text(f"{path}, {version}")
        git("add", ".")
        git("commit", "-q", "-m", version)
        commits.append(git("rev-parse", "HEAD"))
    return root, *commits, git("commit-tree", "-m", "three", "HEAD^{tree}")


def times(seconds, **more):
    return measure.spread([seconds, 1.01 * seconds, 1.02 * seconds]) | more


@pytest.fixture(scope="module")
def honest(repository):
    """{file: record} of a machine with an H100, as bench/gpu.py, scan.py and step.py write them."""
    commit = repository[1]
    files = {path: sha(f"{path}, one".encode())[:12] for path in sorted(NATIVE_SOURCES)}
    ran = {"commit": commit, "uncommitted_changes": False, "code_files": files,
           "code": "v2" + sha(json.dumps(files, sort_keys=True).encode())[:10], "python": "3.12.3", "torch": "2.11.0",
           "cuda": "13.0", "gpu": DEVICE["name"], "cpu": "AMD EPYC"}
    new = lambda benchmark, date, **more: {"benchmark": benchmark, "finished": True, "environment": dict(ran),
                                           "date": DATE.format(date), **more}
    stage = lambda name, status="ok", records=(), summary="": {
        "stage": name, "status": status, "records": list(records), "exit_status": int(status == "failed"),
        "summary": summary}
    both = [stage("environment", records=[{"device": DEVICE}],
                  summary="NVIDIA H100 80GB HBM3, torch 2.11.0, CUDA 13.0; not found: nothing"),
            stage("build", records=[{"kernels": 3, "seconds": 30.0}],
                  summary="3 kernels in 30.0 s (0.0: compiled before)")]
    first = new("gpu", "10:00:00", dry_run=False, stages=[
        *both, stage("tests", records=[{"passed": 2, "skipped": 0, "failed": []}],
                     summary="2 passed, 0 skipped, 0 failed"),
        stage("memcheck", "skipped"), stage("racecheck"), stage("mamba_ssm", "failed"),
        stage("fused", records=[{"passed": 1, "skipped": 0, "failed": []}], summary="1 passed, 0 skipped, 0 failed")])

    shape, copied = scan_cuda.Shape(64, 1024, 1536, 16), 3e12
    moved = scan_cuda.bytes_of_passes(shape, 2)
    milliseconds = {"forward": 0.4, "backward": 2.0, "forward_backward": 2.4}
    row = {name: times(ms / 1e3) for name, ms in milliseconds.items()}
    for name, timed in row.items():
        timed["share_of_bandwidth"] = moved[name] / copied / timed["median_seconds"]
    result = {"relative_error": 1e-7, "tolerance": 1e-6, "right": True}
    correctness = [{"family": family, **dict(zip("BTDN", size, strict=True)), "dtype": dtype, **extreme, "right": True,
                    "two_runs_agree": True,
                    "results": {n: dict(result) for n in RESULTS[family == "mamba"].split()}}
                   for family, size, dtype, extreme in scan_cuda.cases()]
    scan = new("scan_cuda", "10:10:00", dry_run=False, device=DEVICE, correctness=correctness, wrong={},
               copy_bytes_per_second=copied, left_out=[
                   {"shape": str(other), "reason": "time"} for other in scan_cuda.shapes() if other != shape],
               shapes=[{"shape": {**shape._asdict(), "name": str(shape)}, "dtype": "bfloat16", "rows": [
                   {"contender": name, **(row if name == "longhorn_scan" else {"reason": "not installed"})}
                   for name in scan_cuda.CONTENDERS]}])
    in_short = (f"{len(correctness)} of {len(correctness)} comparisons with the loop in float64 are right; B=64 T=1024 "
                "D=1536 N=16 forward + backward: longhorn_scan 2.42 ms, longhorn_scan's forward at 67% of the copy "
                "bandwidth")
    model = lambda name, seconds, ratio: {
        "name": name, "seconds": times(seconds), "tokens_per_second": 32768 / (1.01 * seconds), "flops_per_token": 8e8,
        "flops_per_second": 8e8 * 32768 / (1.01 * seconds), "mfu": 8e8 * 32768 / (1.01 * seconds) / 989e12,
        "times_llama": ratio, "first_loss": 11.0, "last_loss": 9.0}
    step = new("step", "10:20:00", device=DEVICE["name"], dtype="bfloat16", peak_flops=989e12,
               shape={"batch_size": 32, "block_size": 1024},
               rows=[model("longhorn", 0.11, 1.1), model("llama", 0.1, 1.0)])
    conv = {"contender": "cuda", "B": 64, "T": 1024, "D": 1536, "copy_bytes_per_second": copied}
    for name, passes, seconds in (("forward", 2, 2e-4), ("backward", 3, 3e-4), ("forward_backward", 5, 5e-4)):
        share = passes * 64 * 1024 * 1536 * 2 / copied / (1.01 * seconds)
        conv[name] = times(seconds, **({"share_of_bandwidth": share} if passes < 5 else {}))
    ours = {"defines": "", "contender": "ours", "B": 64, "T": 1024, "D": 1536, "N": 16, **{
        name: times(ms / 1e3) for name, ms in milliseconds.items()}}
    speed = new("gpu", "10:05:00", dry_run=False, stages=[
        *both, stage("benchmark", summary=in_short), stage("profile", "skipped"),
        stage("convolution", records=[conv], summary="ms forward / backward: cuda 0.20 / 0.30"),
        stage("loss", "skipped"),
        stage("variants", records=[ours], summary="ms forward / backward: as it is 0.40 / 2.02")])
    train = new("gpu", "10:20:00", dry_run=False, finished=False, stages=[*both, stage(
        "training", summary="tokens/s: longhorn 294,941 (MFU 23.9%), llama 324,436 (MFU 26.2%)")])
    return {"gpu_correctness.json": first, "gpu_speed.json": speed, "gpu_training.json": train, "scan_cuda.json": scan,
            "training.json": step}


def check(records, repository, folder, log=LOG):
    for name, record in records.items():
        (folder / name).write_text(record if isinstance(record, str) else json.dumps(record))
    if log is not None:
        (folder / "gpu_correctness.log").write_text(log)
    check_gpu.committed.cache_clear()
    return list(check_gpu.faults(folder, root=repository[0]))


def test_honest_records_are_accepted(honest, repository, tmp_path):
    assert check(honest, repository, tmp_path) == []
    assert any("it is no dry run" in line for line in check_gpu.faults(tmp_path, True, repository[0]))


def doctored(path, value):
    """A function that sets a value in the records. path: 'file, key, key ...'; numbers are indices."""
    name, *keys = path.split(", ")

    def change(records):
        place = records[f"{name}.json"]
        for key in keys[:-1]:
            place = place[int(key) if isinstance(place, list) else key]
        last = int(keys[-1]) if isinstance(place, list) else keys[-1]
        place[last] = value(place[last]) if callable(value) else value

    return change


def renamed(record, name):
    """The record as if its device had another name, wherever it stands."""
    record["environment"]["gpu"] = name
    devices = [r["device"] for s in record.get("stages", []) for r in s["records"] if "device" in r]
    for device in [*devices, *([record["device"]] if record["benchmark"] == "scan_cuda" else [])]:
        device["name"] = name
    if record["benchmark"] == "step":
        record["device"] = name


def faster(records):
    """Every forward in half of the time that its bytes take, with samples and share that agree."""
    row = records["scan_cuda.json"]["shapes"][0]["rows"][0]
    share = row["forward"]["share_of_bandwidth"] * row["forward"]["median_seconds"]
    row["forward"] = times(1e-4)
    row["forward"]["share_of_bandwidth"] = share / row["forward"]["median_seconds"]


def fewer_instructions(records):
    """With 64 states the arithmetic takes longer than the bytes: twice as fast as that, and slower than these."""
    entry = records["scan_cuda.json"]["shapes"][0]
    entry["shape"]["N"], row = 64, entry["rows"][0]
    moved = scan_cuda.bytes_of_passes(scan_cuda.Shape(64, 1024, 1536, 64), 2)
    for name, seconds in (("forward", 4e-4), ("backward", 4e-3), ("forward_backward", 5e-3)):
        row[name] = times(seconds)
        row[name]["share_of_bandwidth"] = moved[name] / 3e12 / row[name]["median_seconds"]


SCAN, FIRST = "scan_cuda", "gpu_correctness"
ROW = f"{SCAN}, shapes, 0, rows, 0, forward"


@pytest.mark.parametrize("change, words", [
    (lambda records: records.pop("gpu_correctness.json"), "there is no gpu_correctness.json"),
    (doctored(f"{FIRST}, stages", lambda stages: stages[:2]), "stage tests is missing"),
    (doctored(f"{FIRST}, stages, 1, status", "over time"), "stage build is over time"),
    (doctored(f"{FIRST}, stages, 4, status", "failed"), "stage racecheck failed"),
    (doctored(f"{FIRST}, stages, 2, exit_status", 1), "stage tests failed"),
    (doctored(f"{FIRST}, stages", lambda stages: [stages[2], *stages]), "it names a stage twice"),
    (lambda records: records.pop("scan_cuda.json"), "the record of its stage benchmark, scan_cuda.json, is missing"),
    (doctored(f"{FIRST}, stages, 2, records, 0, failed", ["tests/x.py::test_gpu_x"]), "2 tests passed and 1 failed"),
    (doctored(f"{FIRST}, stages, 2, records, 0, passed", 0), "0 tests passed"),
    (doctored(f"{FIRST}, stages, 2, records, 0, passed", 3), "gpu_correctness.log has other tests"),
    (doctored(f"{FIRST}, dry_run", True), "a dry run measures nothing"),
    (doctored(f"{FIRST}, environment, gpu", None), "does not name its gpu"),
    (doctored(f"{FIRST}, stages, 0, records", []), "it describes no device"),
    (doctored("training, device", "AMD EPYC"), "its device is 'AMD EPYC', and not 'NVIDIA H100 80GB HBM3'"),
    (doctored(f"{SCAN}, device", {**DEVICE, "name": "NVIDIA B200"}), "its device is 'NVIDIA B200'"),
    (doctored(f"{SCAN}, device", {**DEVICE, "nvidia_smi": None}), "does not name the driver's version"),
    (doctored("training, environment, torch", "2.12.0"), "its torch is 2.12.0"),
    (doctored("training, environment, python", ""), "does not name its python"),
    (doctored("training, date", "2026-11-20T09:00:00+00:00"), "is before that of gpu_correctness.json"),
    (doctored("training, date", "2999-01-01T00:00:00+00:00"), "or in the future"),
    (doctored("training, environment, commit", "0" * 40), "is not in the history"),
    (doctored("training, environment, uncommitted_changes", True), "uncommitted changes"),
    (doctored("training, environment, code_files", {}), "its files lack kernels/conv_norm.cu"),
    (doctored("training, environment, code_files, longhorn_scan.cu", "0" * 12), "is not the hash of its files"),
    (doctored(f"{SCAN}, correctness", []), "its 0 comparisons with float64"),
    (doctored(f"{SCAN}, correctness, 3, right", False), "wrong: longhorn"),
    (doctored(f"{SCAN}, correctness, 3, two_runs_agree", False), "wrong: longhorn"),
    (doctored(f"{SCAN}, correctness, 5, results, y, relative_error", 0.5), "wrong: mamba"),
    (doctored(f"{SCAN}, correctness, 5, results, y", {"relative_error": 0.5, "tolerance": 1, "right": True}), "wrong"),
    (doctored(f"{SCAN}, correctness, 5, results", {}), "wrong: mamba"),
    (doctored(f"{SCAN}, wrong", {"longhorn_scan": "x"}), "wrong: longhorn_scan"),
    (doctored(f"{SCAN}, copy_bytes_per_second", 4e12), "a copy at 4,000 GB/s is faster than the memory"),
    (doctored(f"{ROW}, median_seconds", 0.00035), "its median, quartiles or count are not those of its samples"),
    (doctored(f"{ROW}, samples_seconds", []), "are no times"),
    (doctored(f"{ROW}, samples_seconds, 0", -1.0), "are no times"),
    (doctored(f"{ROW}, share_of_bandwidth", 0.9), "its share of the bandwidth does not follow"),
    (doctored(f"{SCAN}, finished", False), "the record of its stage benchmark, scan_cuda.json, is cut"),
    (doctored(f"{SCAN}, device", {**DEVICE, "multiprocessors": 264}), "multiprocessors, or gpu_correctness.json has"),
    (doctored(f"{SCAN}, correctness, 5, results, dB, right", False), "wrong: mamba"),
    (doctored("gpu_speed, stages, 2, status", "fine"), "stage benchmark is fine"),
    (faster, "longhorn_scan forward at B=64 T=1024 D=1536 N=16 in 0.1 ms: it takes"),
    (fewer_instructions, "longhorn_scan forward at B=64 T=1024 D=1536 N=64 in 0.4 ms: it takes"),
    (doctored("training, rows, 0, tokens_per_second", 400000), "longhorn: its tokens_per_second does not"),
    (doctored("training, rows, 0, flops_per_token", 8e9), "is faster than the device"),
    (doctored("training, rows, 0, last_loss", 12.0), "its loss does not fall"),
    (doctored(f"{FIRST}, stages", lambda stages: [stages[0], stages[2], stages[1], *stages[3:]]), "its stages are"),
    (doctored("gpu_speed, stages", lambda stages: stages[:4] + stages[5:]), "its stages are"),
    (doctored("gpu_speed, stages", lambda stages: stages[:5]), "its stages are"),
    (doctored("gpu_speed, stages, 2, exit_status", 1), "stage benchmark failed"),
    (doctored(f"{SCAN}, date", "20.11.2026, 10:10"), "its date 20.11.2026, 10:10 is not written as"),
    (doctored(f"{SCAN}, date", "2026-11-20T10:10:00"), "is not written as"),
    (lambda records: [record.update(date=DATE.format("07:00:00")) for record in records.values()],
     "is before its commit's"),
    (doctored(f"{FIRST}, stages, 6, records", []), "the summary of its stage fused is not that of its records"),
    (doctored("training, environment, commit", lambda commit: commit[:10]), "is not in the history"),
    (doctored("training, environment, uncommitted_changes", None), "uncommitted changes, or outside git"),
    (lambda records: [record["environment"].update(torch="2.11.0+cpu") for record in records.values()],
     "its torch 2.11.0+cpu is a CPU's"),
    (doctored(f"{SCAN}, device, torch", "2.9.0"), "its torch is 2.11.0, and its device's 2.9.0"),
    (lambda records: [renamed(record, "AMD EPYC 9V74 80-Core Processor") for record in records.values()],
     "is no GPU of NVIDIA"),
    (lambda records: [records[f"{SCAN}.json"]["device"].pop(name) for name in ("capability", "multiprocessors")],
     "it does not name its device's capability"),
    (doctored(f"{SCAN}, correctness, 5, results, y, relative_error", -1e-9), "results.y.relative_error is -1e-09"),
    (doctored(f"{SCAN}, correctness, 5, results, dB, relative_error", math.nan), "results.dB.relative_error is nan"),
    (doctored(f"{SCAN}, correctness, 5, results", lambda results: {n: r for n, r in results.items() if n != "dC"}),
     "wrong: mamba"),
    (doctored(f"{SCAN}, correctness", lambda rows: rows[:-2]), "the summary of its stage benchmark"),
    (doctored(f"{SCAN}, left_out", lambda shapes: shapes[1:]), "its 23 shapes, with those left out, are not"),
    (doctored(f"{SCAN}, shapes, 0, rows", lambda rows: rows[1:]), "not all contenders have a row at B=64"),
    (doctored(f"{SCAN}, shapes, 0, rows, 0, peak_bytes_above_inputs", -5), "peak_bytes_above_inputs is -5"),
    (doctored("training, rows, 0, flops_per_token", math.nan), "flops_per_token is nan"),
    (doctored("training, rows, 0, mfu", 0.4), "longhorn: its mfu does not follow"),
    (doctored("training, rows, 0, times_llama", 0.9), "longhorn: its times_llama does not follow"),
    (doctored("training, rows, 0, flops_per_second", 8e14), "longhorn: its flops_per_second does not follow"),
    (doctored("training, peak_flops", 2e15), "its peak_flops 2000000000000000.0 are not"),
    (doctored("training, rows", lambda rows: rows[:1]), "the summary of its stage training"),
    (doctored("gpu_speed, stages, 4, records, 0, forward, share_of_bandwidth", 0.99), "does not follow"),
    (doctored("gpu_speed, stages, 4, summary", "ms forward / backward: cuda 0.10 / 0.20"),
     "the summary of its stage convolution"),
    (doctored("gpu_speed, stages, 6, records, 0, forward", times(1e-4)), "ours forward at B=64 T=1024 D=1536 N=16 in"),
    (doctored(f"{FIRST}, stages, 2, seconds", -3.0), "stages[2].seconds is -3.0")])
def test_doctored_records_are_refused(change, words, honest, repository, tmp_path):
    records = copy.deepcopy(honest)
    change(records)
    assert any(words in line and "\n" not in line for line in check(records, repository, tmp_path))


def test_another_commit_is_refused_even_if_all_records_name_it(honest, repository, tmp_path):
    """One with other files, and one that no branch has."""
    for commit, words in ((repository[2], "is another file than at its commit"), (repository[3], "not in the history")):
        records = copy.deepcopy(honest)
        for record in records.values():
            record["environment"]["commit"] = commit
        assert any(words in line for line in check(records, repository, tmp_path))


def test_a_missing_log_and_a_damaged_record_are_one_line(honest, repository, tmp_path):
    assert check(honest, repository, tmp_path, log=None) == [
        "gpu_correctness.json: gpu_correctness.log is missing"]
    (tmp_path / "scan_cuda.json").write_text('{"benchmark": "scan_cuda"}')
    with pytest.raises(ConfigError, match="^scan_cuda.json lack"):
        list(check_gpu.faults(tmp_path, root=repository[0]))


@pytest.mark.parametrize("damage, words", [
    (lambda text: text[:len(text) // 2], "training.json is damaged"),
    (lambda text: text.replace('"python"', '"gpu": "NVIDIA B200", "python"'), "training.json names gpu twice"),
    (lambda text: "[" + text + "]", "training.json is damaged")])
def test_json_that_is_cut_or_says_a_thing_twice_is_one_line(damage, words, honest, repository, tmp_path):
    with pytest.raises(ConfigError, match=words) as refusal:
        check(honest | {"training.json": damage(json.dumps(honest["training.json"]))}, repository, tmp_path)
    assert "\n" not in str(refusal.value)
