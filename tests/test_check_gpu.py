"""bench/check_gpu.py: honest records are accepted, and what a person or a bug may have changed in them is named.

    python -m pytest tests/test_check_gpu.py
"""

import copy
import hashlib
import json
import subprocess

import pytest

from bench import check_gpu, measure, scan_cuda
from runtime.errors import ConfigError
from runtime.records import NATIVE_SOURCES

DEVICE = {"name": "NVIDIA H100 80GB HBM3", "capability": "9.0", "multiprocessors": 132, "torch": "2.11.0",
          "nvidia_smi": {"driver_version": "580.1", "clocks.max.sm": "1980"}}
LOG = "tests/test_cuda.py::test_gpu_a PASSED [ 50%]\ntests/test_cuda.py::test_gpu_b PASSED [100%]\n"


def sha(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """(A git repository with the native sources, its first commit, a second one with another scan)."""
    root = tmp_path_factory.mktemp("repository")
    git = lambda *words: subprocess.run(["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b", *words],
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
    return root, *commits


def times(seconds, **more):
    return measure.spread([seconds, 1.01 * seconds, 1.02 * seconds]) | more


@pytest.fixture(scope="module")
def honest(repository):
    """{file: record} of a machine with an H100, as bench/gpu.py, scan.py and step.py write them."""
    _, commit, _ = repository
    files = {path: sha(f"{path}, one".encode())[:12] for path in sorted(NATIVE_SOURCES)}
    ran = {"commit": commit, "uncommitted_changes": False, "code_files": files,
           "code": "v2" + sha(json.dumps(files, sort_keys=True).encode())[:10], "python": "3.12.3", "torch": "2.11.0",
           "cuda": "13.0", "gpu": DEVICE["name"], "cpu": "AMD EPYC"}
    new = lambda benchmark, date, **more: {"benchmark": benchmark, "finished": True, "environment": dict(ran),
                                           "date": f"2026-11-20T{date}+00:00", **more}
    stage = lambda name, status="ok", records=(): {"stage": name, "status": status, "records": list(records),
                                                   "exit_status": int(status == "failed")}
    first = new("gpu", "10:00:00", dry_run=False, stages=[
        stage("environment", records=[{"device": DEVICE}]), stage("build"),
        stage("tests", records=[{"passed": 2, "skipped": 0, "failed": []}]), stage("memcheck", "skipped"),
        stage("racecheck"), stage("mamba_ssm", "failed")])

    shape, copied = scan_cuda.Shape(64, 1024, 1536, 16), 3e12
    moved = scan_cuda.bytes_of_passes(shape, 2)
    milliseconds = {"forward": 0.4, "backward": 2.0, "forward_backward": 2.4}
    row = {name: times(ms / 1e3) for name, ms in milliseconds.items()}
    for name, timed in row.items():
        timed["share_of_bandwidth"] = moved[name] / copied / timed["median_seconds"]
    result = {"relative_error": 1e-7, "tolerance": 1e-6, "right": True}
    correctness = [{"family": family, **dict(zip("BTDN", size, strict=True)), "dtype": dtype, **extreme, "right": True,
                    "two_runs_agree": True,
                    "results": {n: dict(result) for n in ("y", "du" if family == "mamba" else "dx")}}
                   for family, size, dtype, extreme in scan_cuda.cases()]
    scan = new("scan_cuda", "10:10:00", dry_run=False, device=DEVICE, correctness=correctness, wrong={},
               copy_bytes_per_second=copied, shapes=[{"shape": shape._asdict(), "dtype": "bfloat16", "rows": [
                   {"contender": "longhorn_scan", **row}, {"contender": "mamba_ssm", "reason": "not installed"}]}])
    step = new("step", "10:20:00", device=DEVICE["name"], shape={"batch_size": 32, "block_size": 1024}, rows=[
        {"name": "longhorn", "seconds": times(0.11), "tokens_per_second": 32768 / times(0.11)["median_seconds"],
         "flops_per_token": 8e8, "first_loss": 11.0, "last_loss": 9.0}])
    speed = new("gpu", "10:05:00", dry_run=False, stages=[first["stages"][0], stage("benchmark")])
    return {"gpu_correctness.json": first, "gpu_speed.json": speed, "scan_cuda.json": scan, "training.json": step}


def check(records, repository, folder, log=LOG):
    for name, record in records.items():
        (folder / name).write_text(json.dumps(record))
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
    (doctored("training, environment, commit", "0" * 40), "is not in this repository"),
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
    (doctored(f"{ROW}, share_of_bandwidth", 0.9), "does not follow from its median"),
    (faster, "longhorn_scan forward at B=64 T=1024 D=1536 N=16 in 0.1 ms: it takes"),
    (fewer_instructions, "longhorn_scan forward at B=64 T=1024 D=1536 N=64 in 0.4 ms: it takes"),
    (doctored("training, rows, 0, tokens_per_second", 400000), "do not follow from its median"),
    (doctored("training, rows, 0, flops_per_token", 8e9), "is faster than the device"),
    (doctored("training, rows, 0, last_loss", 12.0), "its loss does not fall")])
def test_doctored_records_are_refused(change, words, honest, repository, tmp_path):
    records = copy.deepcopy(honest)
    change(records)
    assert any(words in line and "\n" not in line for line in check(records, repository, tmp_path))


def test_another_commit_is_refused_even_if_all_records_name_it(honest, repository, tmp_path):
    records = copy.deepcopy(honest)
    for record in records.values():
        record["environment"]["commit"] = repository[2]
    assert any("is another file than at its commit" in line for line in check(records, repository, tmp_path))


def test_a_missing_log_and_a_damaged_record_are_one_line(honest, repository, tmp_path):
    assert check(honest, repository, tmp_path, log=None) == [
        "gpu_correctness.json: gpu_correctness.log is missing"]
    (tmp_path / "scan_cuda.json").write_text('{"benchmark": "scan_cuda"}')
    with pytest.raises(ConfigError, match="^scan_cuda.json lack"):
        list(check_gpu.faults(tmp_path, root=repository[0]))
