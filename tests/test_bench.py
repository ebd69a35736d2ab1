"""bench/scan.py, scan_cuda.py and gpu.py as far as a machine without a GPU can tell: counts, failures, budgets.

Dry runs execute the same code on the CPU at tiny sizes, with a stand-in for the GPU's clock. Their numbers mean
nothing, and both scripts refuse to write them to results/.
"""

import gc
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import generate, gpu, measure, scan, scan_cuda, step
from bench.gpu import Context, Skip, Stage
from bench.scan_cuda import Shape
from experiments import extrapolation, online_learning
from runtime import records
from runtime.errors import ConfigError

ROOT = Path(gpu.__file__).resolve().parent.parent
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def no_search(monkeypatch):
    """A search of all that PyTorch and the tests hold takes 0.3 s, before each time taken; and no time counts here."""
    monkeypatch.setattr(gc, "collect", lambda *_: 0)


# -------------------------------------------------------------------------------------------- what all benchmarks share

def test_bytes_by_hand():
    # B=2, T=64, D=8, N=4, bfloat16: a wide tensor has 2*64*8*2 = 2048 bytes, a narrow one 1024, the states of 2 chunks
    # 4*2*2*8*4 = 512
    moved = measure.bytes_moved(2, 64, 8, 4, 2)
    assert moved["forward"] == 4 * 2048 + 2 * 1024  # x, dt, z in, y out; k, q
    backward = 7 * 2048 + 4 * 1024 + 512  # x, dt, z, dy in, dx, ddt, dz out; k, q, dk, dq; states read
    assert moved["forward_backward"] == moved["forward"] + backward + 512  # states written
    assert measure.bytes_moved(2, 64, 8, 4, 2, extras=False)["forward"] == 3 * 2048 + 2 * 1024


def test_comparison():
    true = {"y": torch.ones(4, dtype=torch.float64), "dk": torch.zeros(3, dtype=torch.float64)}
    found = measure.compare({"y": torch.ones(4), "dk": torch.zeros(3)}, true, 1e-6)
    assert all(r["right"] for r in found.values())
    found = measure.compare({"y": torch.full((4,), 1.01), "dk": torch.full((3,), torch.nan)}, true, 1e-6)
    assert not found["y"]["right"] and not found["dk"]["right"]
    assert found["y"]["relative_error"] == pytest.approx(0.01, rel=1e-3)
    in_bf16 = measure.compare({"y": torch.ones(4, dtype=BF16)}, {"y": true["y"]}, 1e-6)
    assert in_bf16["y"]["tolerance"] == 1e-6 + 2**-8


def test_contenders_take_turns():
    calls = []
    timed = {name: lambda name=name: calls.append(name) or len(calls) for name in "abc"}
    assert measure.in_turn(timed, {"a": 3, "b": 1, "c": 2}) == {"a": [1, 4, 6], "b": [2], "c": [3, 5]}
    assert "".join(calls) == "abcaca"
    assert measure.spread([3.0, 1.0, 2.0]) == {"median_seconds": 2.0, "quartile_seconds": [1.5, 2.5],
                                               "fastest_seconds": 1.0, "runs": 3}


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="the system does not report peaks")
def test_the_peak_is_what_was_used_since():
    peak = measure.Peak()
    used = peak.bytes()
    if used is None:
        pytest.skip("/proc cannot be written to")
    more = torch.ones(32 << 18)
    del more
    assert used < 8 << 20 and 30 << 20 <= peak.bytes() < 48 << 20


@pytest.fixture
def uncommitted(monkeypatch):
    monkeypatch.setattr(measure, "code_version", lambda: {"uncommitted_changes": True})


def test_results_take_no_record_of_an_uncommitted_tree(uncommitted, tmp_path, monkeypatch):
    for out in ("results/x.json", "results/folder/x.json", "results", "bench/../results/x.json"):
        with pytest.raises(ConfigError, match="^results/ is for records of a commit.*: commit them, or give --other$"):
            measure.check_out(ROOT / out, "--other")
    for out in (None, tmp_path / "x.json", str(ROOT / "out" / "results" / "x.json"), ROOT / "resultsx.json"):
        measure.check_out(out)
    for known in (False, None):  # committed; and where there is no git, it is unknown
        monkeypatch.setattr(measure, "code_version", lambda known=known: {"uncommitted_changes": known})
        measure.check_out(ROOT / "results" / "x.json")


def test_where_a_record_cannot_go_is_said_before_anything_is_measured(tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "x.json", tmp_path, tmp_path / ("x" * 250), "/proc/self/x.json"):
        with pytest.raises(ConfigError, match="cannot write .* give another --out"):
            measure.check_out(out)
    measure.check_out(tmp_path / "new" / "x.json")
    assert os.listdir(tmp_path / "new") == []


@pytest.mark.parametrize("main, arguments", [
    (scan.main, "--save"), (scan.main, "--save --memory"), (scan.main, "--out=results/y.json"),
    (scan.main, "--save --device=cuda"), (generate.main, "--save"), (step.main, "--save"),
    (online_learning.main, "--save"), (gpu.main, ""),
    (lambda: extrapolation.main(sys.argv[1:]), "run --preset=laptop --save")])
def test_every_script_says_so_before_it_measures(uncommitted, monkeypatch, main, arguments):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["script", *arguments.split()])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in arguments or main is gpu.main)
    monkeypatch.setattr(records, "environment", lambda: pytest.fail("it went on"))
    with pytest.raises(ConfigError, match="uncommitted changes"):
        main()


# -------------------------------------------------------------------------------------------------------- bench/scan.py

def test_a_wrong_kernel_is_not_timed(monkeypatch, capsys):
    honest = scan.longhorn_scan
    monkeypatch.setattr(scan, "longhorn_scan", lambda *a, **kw: tuple(1.01 * r for r in honest(*a, **kw)))
    with pytest.raises(SystemExit, match="wrong in y .*nothing was timed"):
        scan.main(["--B=1", "--T=4", "--D=8", "--N=4"])


def test_records_of_time_and_memory_on_a_cpu(tmp_path, capsys):
    a = measure.make_inputs(2, 5, 8, 4, torch.float32)
    for name in ("plain_loop", "loop_over_eq1"):  # they compute what the kernels compute
        assert torch.allclose(getattr(scan, name)(**a), scan.longhorn_scan(**a), atol=1e-5)
    arguments = ["--B=1", "--T=8", "--D=8", "--N=4", "--repeats=2", "--slow_repeats=3"]
    assert scan.main([*arguments, f"--out={tmp_path}/time.json"]) is None
    bare, full = json.loads((tmp_path / "time.json").read_text())["rows"]
    assert not bare["with_D_z_dt_bias"] and full["with_D_z_dt_bias"] and "dD" in full["relative_error"]
    runs = {name: times["forward"]["runs"] for name, times in full["seconds"].items()}
    assert runs == {"loop over Eq. 1": 2, "plain loop": 3, "longhorn_scan_ref": 3, "torch": 3, "cpu": 6}
    assert full["times_the_native_kernels"]["cpu"] == {"forward": 1, "forward_backward": 1}
    assert scan.main([*arguments[:4], "--memory", f"--out={tmp_path}/memory.json"]) is None
    (row,) = json.loads((tmp_path / "memory.json").read_text())["rows"]
    assert row["kept_bytes"] == row["input_bytes"] + row["chunk_state_bytes"] and row["chunk_state_bytes"] == 4 * 8 * 4
    assert "4 B T D N" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------ bench/scan.py --device=cuda

def test_a_wrong_or_unsteady_kernel_is_named(monkeypatch, capsys):
    right, factors = scan_cuda.scans, iter([1.0, 1.0 + 1e-7])

    def wrong(family, backend):
        f = right(family, backend)
        if backend == "torch":
            return f
        factor = 1.5 if family == "mamba" else next(factors)
        return lambda **a: tuple(factor * r for r in f(**a))

    monkeypatch.setattr(scan_cuda, "scans", wrong)
    case = ((2, 40, 24, 16), "float32", {})
    monkeypatch.setattr(scan_cuda, "cases", lambda tiny: [("longhorn", *case), ("mamba", *case)])
    rows, found = scan_cuda.check(scan_cuda.DryRun(), tiny=True)
    assert "two runs differ" in found["longhorn_scan"] and rows[0]["two_runs_agree"] is False
    assert "WRONG, largest error" in found["selective_scan"]
    assert len(scan_cuda.check(scan_cuda.DryRun(), True, budget_s=-1)[0]) == 0
    assert "2 more comparisons are left out" in capsys.readouterr().out


def fails(error, after=0):
    calls = []

    def call():
        calls.append(1)
        if len(calls) > after:
            raise error
        return torch.ones(1, requires_grad=True)

    x = torch.ones(1, requires_grad=True)
    return lambda: scan_cuda.Pass(lambda: call() * x, [x], torch.ones(1))


def test_what_fails_is_recorded_with_its_reason_and_the_rest_goes_on(tmp_path, monkeypatch):
    (tmp_path / "half_built.py").write_text("raise OSError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    contenders = {"missing": lambda: measure.imported("no_such_package.at_all", "f"),
                  "half built": lambda: measure.imported("half_built", "f"),
                  "breaks": fails(ValueError("first line\nsecond line")),
                  "too large": fails(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")),
                  "breaks later": fails(RuntimeError("late"), after=4), "excluded": None, "works": fails(None, 99)}
    rows = scan_cuda.time_contenders(contenders, scan_cuda.DryRun(), 2, {"excluded": "left out by --without"})
    assert [(r["contender"], r.get("reason")) for r in rows] == [
        ("missing", "not installed"), ("half built", "OSError: undefined symbol: _ZN3c10"),
        ("breaks", "ValueError: first line"), ("too large", "out of memory"),
        ("breaks later", "RuntimeError: late"), ("excluded", "left out by --without"), ("works", None)]
    assert rows[-1]["forward"]["runs"] == 2


def test_an_unusable_gpu_ends_the_measurement(tmp_path, monkeypatch):
    class Lost(scan_cuda.DryRun):
        def alive(self):
            return False

    broken = {"breaks": fails(RuntimeError("an illegal memory access was encountered"))}
    with pytest.raises(scan_cuda.Lost, match="illegal memory access.*--without='breaks'"):
        scan_cuda.time_contenders(broken, Lost())

    def lost(*args):
        raise scan_cuda.Lost("mamba_ssm made the GPU unusable")

    monkeypatch.setattr(scan_cuda, "check", lambda *a: ([], {}))
    monkeypatch.setattr(scan_cuda, "measure_shape", lost)
    assert scan.main(["--device=cuda", "--dry_run", f"--out={tmp_path}/r.json"]) == 1
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["finished"] is False and len(record["left_out"]) == 4 and record["shapes"] == []
    assert all("mamba_ssm made the GPU unusable" in left["reason"] for left in record["left_out"])


class FakeEvent:
    clock = itertools.count(0, 2)

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = next(self.clock)

    def elapsed_time(self, other):
        return other.at - self.at  # milliseconds


def test_the_clock_and_the_counters_of_a_gpu(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA H200, 580.10'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert scan_cuda.nvidia_smi("name", "driver_version") == {"name": "NVIDIA H200", "driver_version": "580.10"}
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    for name, value in dict(synchronize=None, memory_allocated=100, max_memory_allocated=350, empty_cache=None,
                            reset_peak_memory_stats=None).items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    device, steps = object.__new__(scan_cuda.Gpu), []
    device.flushed = torch.ones(10, dtype=torch.uint8)
    passes = (lambda: steps.append(device.flushed.sum().item()), lambda: steps.append("second"))
    assert device.laps(*passes) == [0.002, 0.002]
    assert steps == [0, "second"]  # the cache was flushed first
    assert device.peak_above(lambda: None) == 250


def test_dry_run_of_the_benchmark(tmp_path, capsys):
    arguments = ["--device=cuda", "--dry_run", "--rounds=1", "--T=8", "--B=2", "--D=64", "--N=4"]
    assert scan.main([*arguments, f"--out={tmp_path}/new/record.json"]) == 0
    printed = capsys.readouterr().out
    record = json.loads((tmp_path / "new" / "record.json").read_text())
    assert record["dry_run"] is True and record["finished"] is True and record["seconds"] > 0
    assert {"commit", "torch", "gpu"} <= set(record["environment"]) and record["device"]["name"].startswith("dry run")
    assert len(record["correctness"]) == 16 and all(row["right"] for row in record["correctness"])
    (entry,) = record["shapes"]
    assert entry["shape"] == {"B": 2, "T": 8, "D": 64, "N": 4, "name": "B=2 T=8 D=64 N=4"} and entry["tokens"] == 16
    assert [r["contender"] for r in entry["rows"]] == list(scan_cuda.CONTENDERS)
    rows = {r["contender"]: r for r in scan_cuda.measure_shape(
        Shape(1, 64, 64, 4), BF16, scan_cuda.DryRun(), 1e9, 4, {})}
    for what, moved in zip(scan_cuda.PASSES, (33792, 61440, 97280), strict=True):
        t = rows["longhorn_scan"][what]
        low, high = t["quartile_seconds"]
        assert 0 < t["fastest_seconds"] <= low <= t["median_seconds"] <= high and t["runs"] == 4
        assert t["share_of_bandwidth"] == pytest.approx(moved / 1e9 / t["median_seconds"])
        assert rows["attention"][what]["share_of_bandwidth"] is None
    assert "in short: 16 of 16 comparisons" in printed and "in short: B=2 T=8" in printed


def test_shapes_beyond_the_budget_and_contenders_that_are_wrong_are_named(tmp_path, monkeypatch, capsys):
    late, without = [0.0], []  # seconds that the clock runs ahead: each shape takes 100 of them

    def measure_shape(*arguments):
        late[0] += 100
        without.append(arguments[-1])
        return []

    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + late[0])
    monkeypatch.setattr(scan_cuda, "time", clock)
    monkeypatch.setattr(scan_cuda, "check", lambda *a: ([], {"selective_scan": "WRONG"}))
    monkeypatch.setattr(scan_cuda, "measure_shape", measure_shape)
    arguments = ["--device=cuda", "--dry_run", "--without=attention", "--budget_s=150", f"--out={tmp_path}/r.json"]
    assert scan.main(arguments) == 1
    record = json.loads((tmp_path / "r.json").read_text())
    assert len(record["shapes"]) == len(record["left_out"]) == 2
    assert "of 150 s are spent" in record["left_out"][0]["reason"]
    assert without[0] == {"attention": "left out by --without", "selective_scan": "WRONG"}
    printed = capsys.readouterr()
    assert "left out: B=" in printed.out and "selective_scan was not timed: WRONG" in printed.err


def test_refusals(tmp_path, capsys):
    cuda = ["--device=cuda", "--dry_run"]
    for arguments, words in (([f"--out={ROOT}/results/x.json"], "does not belong in results/"),
                             (["--save"], "does not belong in results/"),
                             (["--without=rnn"], "--without=rnn: no such contender; they are longhorn_scan")):
        with pytest.raises(ConfigError, match=words):
            scan.main([*cuda, *arguments])
    with pytest.raises(ConfigError, match="do not belong in results/"):
        gpu.main(["--dry_run", f"--out={ROOT}/results"])
    assert not (ROOT / "results" / "x.json").exists()
    for parse, arguments, words in ((scan.parse, "--memory --device=cuda", "--memory is for --device=cpu"),
                                    (scan.parse, "--rounds=0", "--rounds=0: must be at least 1"),
                                    (gpu.parse, "--stages=tests,magic", "--stages=magic: no such call or stage"),
                                    (gpu.parse, "--budget_s=nan", "--budget_s=nan: must be at least 1")):
        with pytest.raises(SystemExit) as end:
            parse(arguments.split())
        assert end.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_device_there_is_one_line_and_nothing_is_written(tmp_path):
    with pytest.raises(ConfigError, match=r"PyTorch sees no GPU \(use --device=cpu, or --dry_run to try the code\)"):
        scan.main(["--device=cuda", f"--out={tmp_path}/a/r.json"])
    with pytest.raises(ConfigError, match="sees no GPU here; nothing was run and nothing written"):
        gpu.main([f"--out={tmp_path}/b"])
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------------------- bench/gpu.py

def python(code):
    return lambda context: [sys.executable, "-c", code.replace("RECORD", repr(context.record))]


WRITES = "import json; f = open(RECORD, 'w'); f.write(json.dumps({'x': float('nan'), 'n': 3}) + chr(10)); f.flush(); "


def test_stages_succeed_fail_are_killed_and_skipped(tmp_path, capsys):
    def skip(context):
        raise Skip("pytest is not installed in this Python")

    seen = []

    def look(context):  # what a kill at this moment would leave
        seen.append(json.loads((tmp_path / "gpu.json").read_text()))
        return [sys.executable, "-c", ""]

    describe = lambda found, text: f"n is {found[0]['n']}, {text.strip()}"
    stages = [Stage("good", 20, python(WRITES + "print('all well')"), describe),
              Stage("bad", 20, python("print('before'); raise SystemExit('out of luck')")),
              Stage("slow", 1, python(WRITES + "import time; time.sleep(60)")),
              Stage("absent", 20, skip), Stage("no program", 20, lambda c: ["/no/such/program"]),
              Stage("look", 20, look),
              Stage("crash", 20, python("import os; os.abort()")),
              Stage("odd", 20, python("print('2 of 3')"), verdict=lambda status, text: ("failed", text.strip()))]
    start = time.monotonic()
    about = {"finished": False, "environment": {"commit": "abc"}}
    results = gpu.run_all(stages, Context(tmp_path, True), 60, about)
    assert time.monotonic() - start < 30
    statuses = "ok, failed, over time, skipped, failed, ok, failed, failed"
    assert ", ".join(r["status"] for r in results) == statuses
    good, bad, slow, absent, program, _, crash, odd = results
    assert good["summary"] == "n is 3, all well" and good["exit_status"] == 0 and bad["reason"] == "out of luck"
    assert slow["records"][0]["n"] == 3 and slow["exit_status"] is None
    assert "killed at its limit of 1 s" in slow["reason"] and 1 <= slow["seconds"] < 10
    assert absent["reason"].startswith("pytest") and "No such file" in program["reason"]
    assert odd["reason"] == "2 of 3" and crash["reason"] == "ended by signal 6 (SIGABRT)"
    assert [s["stage"] for s in seen[0]["stages"]] == ["good", "bad", "slow", "absent", "no program"]
    assert seen[0]["finished"] is False
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record["finished"] is True and record["dry_run"] is True and record["environment"] == {"commit": "abc"}
    assert record["stages"][0]["records"] == [{"x": None, "n": 3}]
    assert "out of luck" in (tmp_path / "gpu.log").read_text()
    gpu.print_summary(results, tmp_path)
    assert "slow        over time" in capsys.readouterr().out


def test_what_a_killed_stage_started_ends_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "PATIENCE_S", 0.5)
    # the child ignores SIGTERM and has a child of its own
    code = ("import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
            "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); print(p.pid, flush=True); "
            "time.sleep(60)")
    status, seconds = gpu.run_limited([sys.executable, "-c", code], 1, tmp_path / "log")
    assert status is None and seconds < 10
    pid = int((tmp_path / "log").read_text())
    state, end = Path(f"/proc/{pid}/stat"), time.monotonic() + 5
    while state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < end, "the grandchild lives on"
        time.sleep(0.1)


def test_the_budget_of_all_stages(tmp_path, monkeypatch):
    limits = []
    monkeypatch.setattr(gpu, "run_stage", lambda stage, context, limit_s, *_: limits.append(limit_s) or
                        {"stage": stage.name, "status": "ok", "seconds": 0.0, "records": []})
    stages = [Stage("a", 10, None), Stage("b", 30, None)]
    gpu.run_all(stages, Context(tmp_path, True), 30, {})
    assert limits == [10, pytest.approx(30, abs=1)]
    limits.clear()
    gpu.run_all(stages, Context(tmp_path, True), 80, {})  # a few stages alone may take longer each
    assert limits == [20, 60]
    results = gpu.run_all(stages, Context(tmp_path, True), 3, {})
    assert [r["status"] for r in results] == ["left out", "left out"]
    assert "--stages=a runs it alone" in results[0]["reason"] and gpu.BUDGET_S <= 540


def test_records_go_where_they_should_and_a_failed_stage_is_an_exit_status(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(records, "environment", dict)
    contexts, status = [], ["ok"]
    monkeypatch.setattr(gpu, "run_all", lambda stages, context, *_: contexts.append(context) or [
        {"stage": "a", "status": status[0], "seconds": 0.0}])
    monkeypatch.setenv("PATH", "")  # no git: nothing is refused
    assert gpu.main([]) == 0 and contexts == [Context(ROOT / "results", False)]
    assert gpu.main(["--dry-run"]) == 0 and contexts[1:] == [Context(ROOT / "out" / "gpu_dry", True)]
    for status[0] in ("failed", "over time", "left out"):
        assert gpu.main([f"--out={tmp_path}"]) == 1


def test_a_call_is_its_stages_and_ends_where_the_kernels_are_wrong(tmp_path):
    args = gpu.parse(["--stages=correctness", "--dry_run"])
    assert args.name == "gpu_correctness" and args.stages == list(gpu.CALLS["correctness"])
    assert {stage for call in gpu.CALLS.values() for stage in call} == {stage.name for stage in gpu.STAGES}
    stages = [Stage(name, 5, python(f"raise SystemExit({name != 'b'})")) for name in ("a", "build", "b")]
    results = gpu.run_all(stages, Context(tmp_path, True, name=args.name), 60, {})
    assert [r["status"] for r in results] == ["failed"] * 2 + ["left out"] and results[2]["reason"] == "build: failed"
    assert len(json.loads((tmp_path / "gpu_correctness.json").read_text())["stages"]) == 3


def test_what_stages_run(tmp_path, monkeypatch):
    context = Context(tmp_path, False, seconds=120, record="/r")
    commands = {s.name: s.command for s in gpu.STAGES}
    assert commands["benchmark"](context)[1:] == ["bench/scan.py", "--device=cuda", "--budget_s=90",
                                                  f"--out={tmp_path}/scan_cuda.json"]
    assert commands["tests"](context)[-2:] == ["-k", "test_gpu"]
    assert commands["convolution"](context)[2:] == ["--stage=convolution", "--record=/r", "--budget_s=120"]
    for name, T, extra in (("training", 1024, []), ("training_compiled", 1024, ["--compile"])):
        _, script, *arguments, out = commands[name](context)
        args = step.parse(["--device=cpu" if a == "--device=cuda" else a for a in arguments])
        assert script == "bench/step.py" and out == f"--out={tmp_path}/{name}.json"
        assert args.families == ["longhorn", "llama"] and args.n_layer == 12 and args.compile == bool(extra)
        assert args.block_size == T and args.block_size * args.batch_size == 32768
    with pytest.raises(Skip, match="dry run"):
        commands["training_compiled"](context._replace(dry_run=True))
    monkeypatch.setattr(gpu, "tool", lambda name: None)
    with pytest.raises(Skip, match="compute-sanitizer is not installed"):
        commands["memcheck"](context)
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Skip, match="pytest is not installed"):
        commands["tests"](context)


def test_verdicts_on_what_others_print():
    verdict = gpu.sanitizer("memcheck").verdict
    assert verdict(0, "========= ERROR SUMMARY: 0 errors\n") == ("ok", None)
    assert verdict(9, "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)")[0] == "failed"
    assert verdict(1, "========= Error: Device not supported\n") == (
        "skipped", "compute-sanitizer does not work here: ========= Error: Device not supported")
    assert verdict(1, "Traceback\nRuntimeError: x\n========= ERROR SUMMARY: 0 errors")[0] == "failed"
    assert gpu.tests_summary([], "x\n== 3 passed, 2 deselected in 1.2s ==\n") == "3 passed, 2 deselected in 1.2s"
    assert gpu.in_short([], "a\nin short: 1\nb\nin short: 2") == "1; 2"


def test_inner_stages_on_the_cpu(monkeypatch):
    found = []
    emit = lambda **record: found.append(json.loads(json.dumps(record)))
    for stage in ("environment", "build", "small", "convolution"):
        gpu.FUNCTIONS[stage](emit, True, 10)
    assert "dry run on a CPU" in gpu.environment_summary(found[:1], "") and found[0]["device"]["torch"]
    assert sum("scan" in r for r in found) == len(gpu.SMALL)
    rows = [r for r in found if "contender" in r]
    assert [r["contender"] for r in rows] == ["cpu", "torch", "fused"] and rows[0]["forward"]["runs"] == 3
    assert gpu.times_summary(rows, "").startswith("ms forward / backward: cpu ")
    honest = gpu.conv_results
    monkeypatch.setattr(gpu, "conv_results", lambda a, dy, backend: {n: v * (1 + (backend == "cpu"))
                                                                     for n, v in honest(a, dy, backend).items()})
    with pytest.raises(SystemExit, match="wrong at B=2 T=80 D=48: y"):
        gpu.convolution(emit, True, 10)


@pytest.mark.skipif(not (ROOT / "Makefile").exists() or os.name != "posix", reason="make is for Unix")
def test_make_takes_the_interpreter_it_is_given():
    ours = ("PYTHON", "OUT", "ARGS", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")  # the last three where make runs these tests
    env = {k: v for k, v in os.environ.items() if k not in ours}
    lines = lambda *arguments: subprocess.run(["make", "-n", "-B", "gpu", *arguments], cwd=ROOT, capture_output=True,
                                              text=True, env=env).stdout
    given = lines("PYTHON=python3", "OUT=elsewhere", "ARGS=--stages=tests")
    assert given.split() == ["python3", "bench/gpu.py", "--out=elsewhere", "--stages=tests"]
    assert ".venv/bin/python bench/gpu.py" in lines() and "pip install" in lines()
