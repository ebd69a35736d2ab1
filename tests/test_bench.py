"""bench/scan.py --device=cuda and bench/gpu.py as far as a machine without a GPU can tell: counts, shapes, failures, budgets.

The surprise: dry runs execute the same code on the CPU at tiny sizes, with a stand-in for the GPU's clock. Their numbers
mean nothing, and both scripts refuse to write them to results/.

    python -m pytest tests/test_bench.py
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import records
from bench import checkpoint as bench_checkpoint
from bench import generate, gpu, instructions, measure, online_learning, scan, scan_cuda, step
from bench.gpu import Context, Skip, Stage
from bench.scan_cuda import LeftOut, Shape
from configurator import ConfigError

ROOT = Path(gpu.__file__).resolve().parent.parent
BF16 = torch.bfloat16
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


# -------------------------------------------------------------------------------------------------------------- counts

def test_bytes_by_hand():
    # B=2, T=64, D=8, N=4, bfloat16: a wide tensor has 2*64*8*2 = 2048 bytes, a narrow one 1024, the states of 2 chunks
    # 4*2*2*8*4 = 512
    counted = scan_cuda.counted_bytes("longhorn_scan", Shape(2, 64, 8, 4), 2)
    assert counted["forward"] == 4 * 2048 + 2 * 1024  # x, dt, z in, y out; k, q
    assert counted["backward"] == 7 * 2048 + 4 * 1024 + 512  # x, dt, z, dy in, dx, ddt, dz out; k, q, dk, dq; states read
    assert counted["forward_backward"] == counted["forward"] + counted["backward"] + 512  # states written
    assert scan_cuda.counted_bytes("mamba_ssm", Shape(2, 64, 8, 4), 2) == counted
    assert scan_cuda.counted_bytes("attention", Shape(2, 64, 8, 4), 2) == {
        "forward": 4 * 2048, "backward": 8 * 2048, "forward_backward": 12 * 2048}
    # one head of 4 keys: q, k, g of 1024 bytes
    assert scan_cuda.counted_bytes("fla_chunk_gla", Shape(2, 64, 8, 4), 2) == {
        "forward": 3 * 1024 + 2 * 2048, "backward": 6 * 1024 + 3 * 2048, "forward_backward": 9 * 1024 + 5 * 2048}


def test_flops_by_hand():
    counted = measure.work(2, 64, 8, 4, 2, True)
    assert counted["forward"]["flops"] == 1024 * (7 * 4 + 30)
    assert counted["forward_backward"]["flops"] == 1024 * (31 * 4 + 100)


def test_floors_of_the_papers_shape():
    # 512K tokens x 1536 channels: 8 bytes each and k, q; 100 instructions on 32 lanes, 132 x 4 schedulers at 1.98 GHz
    shape, issue = Shape(512, 1024, 1536, 16), 132 * 4 * 1.98e9
    floor = scan_cuda.floors(shape, 2, 4.3e12, issue)
    assert floor["forward"]["memory"] == pytest.approx((8 * 1536 + 64) * 524288 / 4.3e12) == pytest.approx(1.5e-3, rel=0.01)
    assert floor["forward"]["issue"] == pytest.approx(100 * 524288 * 1536 / 32 / issue) == pytest.approx(2.4e-3, rel=0.01)
    assert floor["backward"]["issue"] == pytest.approx(4 * floor["forward"]["issue"])
    assert floor["forward_backward"]["issue"] == pytest.approx(5 * floor["forward"]["issue"])
    given = scan_cuda.floors(shape, 2, None, issue, forward=50, backward=60)
    assert given["forward"] == {"memory": None, "issue": pytest.approx(floor["forward"]["issue"] / 2)}
    assert given["forward_backward"]["issue"] == pytest.approx(1.1 * floor["forward"]["issue"])
    assert scan_cuda.instructions(64)["forward"] == 4 * 64 + 36


def test_equal_state_of_gla():
    for shape in scan_cuda.shapes("paper"):
        assert scan_cuda.gla_heads(shape) * shape.N * 128 == shape.D * shape.N


# -------------------------------------------------------------------------------------------------------------- shapes

def test_shapes_are_those_asked_for_and_the_most_telling_first():
    found = scan_cuda.shapes("paper")
    assert len(found) == len(set(found)) == 24
    assert {s.tokens for s in found} == {65536, 524288} and {s.T for s in found} == {1024, 4096, 32768}
    assert {s.D for s in found} == {1536, 2048} and {s.N for s in found} == {16, 64}
    assert [str(s) for s in found[:2]] == ["B=64 T=1024 D=1536 N=16", "B=16 T=4096 D=1536 N=16"]
    assert scan_cuda.shapes("quick") == found[:4]


def test_cases_of_the_check_reach_the_extremes():
    cases = [case for case, _ in scan_cuda.cases()]
    assert any(c.get("key") == 1000 for c in cases) and any(c.get("logit") == 1000 for c in cases)
    assert {c["dtype"] for c in cases} == {torch.float32, BF16, torch.float16} and {c["N"] for c in cases} == {16, 64}
    a = measure.make_inputs(1, 3, 4, 2, torch.float32, key=1000.0, logit=1000.0)
    assert set(a["dt"].abs().flatten().tolist()) == {1000.0} and a["k"].abs().max() > 100


def test_comparison():
    true = {"y": torch.ones(4, dtype=torch.float64), "dk": torch.zeros(3, dtype=torch.float64)}
    found = measure.compare({"y": torch.ones(4), "dk": torch.zeros(3)}, true, 1e-6)
    assert all(r["right"] for r in found.values())
    found = measure.compare({"y": torch.full((4,), 1.01), "dk": torch.full((3,), torch.nan)}, true, 1e-6)
    assert not found["y"]["right"] and not found["dk"]["right"]
    assert found["y"]["relative_error"] == pytest.approx(0.01, rel=1e-3)
    assert measure.compare({"y": torch.ones(4, dtype=BF16)}, {"y": true["y"]}, 1e-6)["y"]["tolerance"] == 1e-6 + 2**-8


def test_a_wrong_kernel_is_named(monkeypatch):
    right = scan_cuda.scans

    def wrong(family, backend):
        kernels, loop = right(family, backend)
        return (lambda **a: tuple(1.5 * r for r in kernels(**a))) if family == "mamba" else kernels, loop

    monkeypatch.setattr(scan_cuda, "scans", wrong)
    cases = scan_cuda.cases(tiny=True)[1:2]
    monkeypatch.setattr(scan_cuda, "cases", lambda tiny: cases)
    rows, found = scan_cuda.check(scan_cuda.DryRun(), tiny=True, say=lambda *a, **k: None)
    assert list(found) == ["selective_scan"] and "WRONG" in found["selective_scan"]
    assert {r["family"]: r["right"] for r in rows} == {"longhorn": True, "mamba": False}


# ---------------------------------------------------------------------------------------------------------- contenders

def tiny_shape(contenders, rounds=2, without=None, device=None):
    return scan_cuda.measure_shape(Shape(1, 16, 64, 4), BF16, device or scan_cuda.DryRun(), {"bandwidth": 1e9, "issue": 1e9},
                                   rounds, without, contenders)


def fails(error, after=0):
    calls = []

    def call():
        calls.append(1)
        if len(calls) > after:
            raise error
        return torch.ones(1, requires_grad=True)

    x = torch.ones(1, requires_grad=True)
    return lambda *_: scan_cuda.Pass(lambda: call() * x, [x], torch.ones(1))


def test_what_fails_is_recorded_with_its_reason_and_the_rest_goes_on():
    def not_there(*_):
        return scan_cuda.imported("no_such_package.at_all", "f")

    rows, _ = tiny_shape({"missing": not_there, "breaks": fails(ValueError("first line\nsecond line")),
                          "too large": fails(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")),
                          "breaks later": fails(RuntimeError("late"), after=4), "excluded": scan_cuda.our_mamba,
                          "longhorn_scan": scan_cuda.our_longhorn}, without={"excluded": "left out by --without"})
    assert [(r["contender"], r.get("reason")) for r in rows] == [
        ("missing", "not installed"), ("breaks", "ValueError: first line"), ("too large", "out of memory"),
        ("breaks later", "RuntimeError: late"), ("excluded", "left out by --without"), ("longhorn_scan", None)]
    assert rows[-1]["forward"]["runs"] == 2


def test_a_broken_installation_is_a_reason_too(tmp_path, monkeypatch):
    (tmp_path / "half_built.py").write_text("raise OSError('undefined symbol: _ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LeftOut, match="OSError: undefined symbol"):
        scan_cuda.imported("half_built", "f")


def test_a_lost_context_ends_the_measurement():
    class Lost(scan_cuda.DryRun):
        def alive(self):
            return False

    with pytest.raises(scan_cuda.Lost, match="--without='breaks'") as caught:
        tiny_shape({"breaks": fails(RuntimeError("an illegal memory access was encountered"))}, device=Lost())
    assert "illegal memory access" in caught.value.rows[0]["reason"]


def test_a_lost_context_is_said_and_the_rest_left_out(tmp_path, monkeypatch):
    def lost(*args, **kw):
        raise scan_cuda.Lost("mamba_ssm", [{"contender": "mamba_ssm", "reason": "RuntimeError: illegal"}, {"peak": 1}])

    monkeypatch.setattr(scan_cuda, "check", lambda *a, **k: ([], {}))
    monkeypatch.setattr(scan_cuda, "measure_shape", lost)
    assert scan_cuda.main(scan.parse(["--device=cuda", "--dry_run", f"--out={tmp_path}/r.json"])) == 1
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["finished"] is False and len(record["left_out"]) == 3 and len(record["shapes"]) == 1
    assert "--without='mamba_ssm'" in record["left_out"][0]["reason"]


def test_layouts_and_limits_of_contenders(monkeypatch):
    shape, device = Shape(2, 8, 128, 4), scan_cuda.DryRun()
    a, dy = measure.make_inputs(*shape, BF16), torch.ones(2, 8, 128, dtype=BF16)
    with pytest.raises(LeftOut, match="64K tokens"):
        scan_cuda.torch_loop(Shape(16, 4096, 1536, 16), a, dy, device)
    with pytest.raises(LeftOut, match="heads of 64"):
        scan_cuda.attention(Shape(2, 8, 100, 4), a, dy, device)
    seen = {}
    monkeypatch.setattr(scan_cuda, "imported", lambda *_: lambda **kw: seen.update(kw) or (kw.get("v", 0), None))
    p = scan_cuda.mamba_ssm(shape, a, dy, device)
    p.call()
    assert seen["u"].shape == (2, 128, 8) and seen["u"].is_contiguous() and seen["B"].shape == (2, 4, 8)
    assert seen["A"].shape == (128, 4) and seen["A"].dtype == seen["delta_bias"].dtype == torch.float32
    assert p.dy.shape == (2, 128, 8) and len(p.wanted) == 8 and torch.equal(seen["B"].transpose(1, 2), a["k"])
    p = scan_cuda.fla_chunk_gla(shape, a, dy, device)
    p.call()
    assert seen["q"].shape == seen["g"].shape == (2, 8, 1, 4) and seen["v"].shape == p.dy.shape == (2, 8, 1, 128)
    assert seen["g"].max() <= 0


def test_the_record_of_a_contender():
    (row,), floor = tiny_shape({"longhorn_scan": scan_cuda.our_longhorn}, rounds=4)
    assert set(row) == {"contender", "peak_bytes_above_inputs", *scan_cuda.PASSES, "tokens_per_second"}
    for what in scan_cuda.PASSES:
        t = row[what]
        low, high = t["quartile_seconds"]
        assert 0 < t["fastest_seconds"] <= low <= t["median_seconds"] <= high and t["runs"] == 4
        moved = scan_cuda.counted_bytes("longhorn_scan", Shape(1, 16, 64, 4), 2)[what]
        assert t["bytes_per_second"] == pytest.approx(moved / t["median_seconds"])
        assert t["memory_floor_share"] == pytest.approx(floor[what]["memory"] / t["median_seconds"])
        assert t["issue_floor_share"] == pytest.approx(floor[what]["issue"] / t["median_seconds"])
    assert row["tokens_per_second"] == pytest.approx(16 / row["forward_backward"]["median_seconds"])


class FakeEvent:
    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        FakeEvent.now += 2.0
        self.at = FakeEvent.now

    def elapsed_time(self, other):
        return other.at - self.at  # milliseconds


def test_the_clock_and_the_counters_of_a_gpu(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA H200, 580.10, 1980, [N/A]'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert scan_cuda.nvidia_smi("name", "driver_version", "clocks.max.sm", "power.limit") == {
        "name": "NVIDIA H200", "driver_version": "580.10", "clocks.max.sm": 1980.0}
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 350)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    device, steps = object.__new__(scan_cuda.Gpu), []
    device.flushed = torch.ones(10, dtype=torch.uint8)
    device.properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=1 << 37)
    assert device.laps(lambda: steps.append(device.flushed.sum().item()), lambda: steps.append("second")) == [0.002, 0.002]
    assert steps == [0, "second"]  # the cache was flushed first
    assert device.peak_above(lambda: None) == 250
    monkeypatch.setattr(scan_cuda, "nvidia_smi", lambda *fields: {"clocks.max.sm": 1980.0})
    assert device.describe()["warp_instructions_per_second"] == 132 * 4 * 1980e6
    monkeypatch.setattr(scan_cuda, "nvidia_smi", lambda *fields: None)
    assert device.describe()["warp_instructions_per_second"] is None and device.describe()["capability"] == "9.0"


def test_budgets():
    assert scan_cuda.fits(100, 90, 10) and not scan_cuda.fits(100, 90.1, 10) and scan_cuda.fits(float("inf"), 1e9, 1e9)
    assert scan_cuda.runs_for(0.001, 10) == 10 and scan_cuda.runs_for(0.4, 10) == 5
    assert scan_cuda.runs_for(100, 10) == 3 and scan_cuda.runs_for(100, 2) == 2 and scan_cuda.runs_for(0, 10) == 10


# ---------------------------------------------------------------------------------------------------------- instructions

# As nvdisasm writes it: 2 instructions, then chunks of 4 and in each, states of 10, then 2, and what stands behind EXIT.
SASS = """
.section\t.text.selective_scan,"ax",@progbits
.text.selective_scan:
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/              @!P0 BRA `(.L_x_9) ;
.L_x_1:
        /*0020*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0030*/                   MUFU.EX2 R2, R2 ;
.L_x_2:
        /*0040*/                   MUFU.EX2 R3, R3 ;
        /*0050*/               @P1 BRA `(.L_x_3) ;
        /*0060*/                   LDS.64 R4, [R5+0x10] ;
        /*0070*/                   BRA.DIV UR4, `(.L_x_10) ;
.L_x_11:
        /*0080*/                   SHFL.UP PT, R4, R4, 0x1, RZ ;
        /*0090*/              @!P2 STS.64 [R5+0x10], R4 ;
.L_x_3:
        /*00a0*/               @P3 BRA `(.L_x_4) ;
        /*00b0*/                   REDG.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR20][R78.64], R4 ;
.L_x_4:
        /*00c0*/                   LDL.LU R4, [R1+0x4]                                     (*"SpillRefill"*) ;
        /*00d0*/               @P4 BRA `(.L_x_2) ;
        /*00e0*/                   LDS R4, [R5] ;
        /*00f0*/               @P5 BRA `(.L_x_1) ;
.L_x_9:
        /*0100*/                   STG.E.64 desc[UR8][R28.64], R36 ;
        /*0110*/                   EXIT ;
.L_x_10:
        /*0120*/                   SHFL.UP PT, R4, R4, 0x1, RZ ;
        /*0130*/                   BRA `(.L_x_11) ;
"""


def test_instructions_are_counted_by_loop():
    code = instructions.kernels(SASS)["selective_scan"]
    assert len(code.instructions) == 18 and code.in_all == 20 and code.loops == [(2, 15), (4, 13)]
    assert code.skipped == [(2, 15), (6, 9), (11, 11)]  # not BRA.DIV, which leads behind EXIT
    found = code.totals(code.weights(0.5, 1, 4))
    assert found["instructions"] == 4 * 0.5 + 4 * 1 + 10 * 4
    assert found["pipes"] == {"special": 1 + 4, "shuffles": 4, "shared": 4 * 2 + 1, "copies": 0, "local": 4, "atomics": 4,
                              "barriers": 1}
    with pytest.raises(ValueError, match="2 loops in the disassembly of a kernel that has 3"):
        code.weights(1, 1, 1, 1)


def test_what_one_sub_chunk_enters_is_counted_once_a_chunk():
    copies = ["LDGSTS.E.BYPASS.128 [R1], desc[UR2][R2.64]"] * 3
    #      0-2                 3-6 skipped: states   7-11: an if with its else, rows       loop's ends
    code = [*["FADD R1, R1, R2"] * 2, "BRA.U UP0, x", *copies, "FADD R1, R1, R2", *copies, "BRA `(.L_x_1)", "BRA y", "BRA z"]
    code = instructions.Code(code, len(code), [(0, 12), (1, 11)], [(3, 6), (7, 10), (0, 12)])
    assert instructions.once_a_chunk(code) == {3, 4, 5, 6}


def test_instructions_of_mamba_ssm():
    # 128 threads of 16 tokens, T = 4096: two chunks; 64 states. LDS, BRA.DIV, SHFL and STS are for one warp of four, REDG for all
    found = instructions.ssm_count(instructions.kernels(SASS)["selective_scan"], 64, 128, 4096)
    assert found["all_entered"] == round(4 / 32 + 4 / 16 + 10 * 4, 1) == 40.4
    assert found["instructions"] == round(4 / 32 + 4 / 16 + 6 * 4 + 4 * 4 / 4, 1) == 28.4
    assert found["pipes"] == {"special": 4.1, "shuffles": 1, "shared": 2.1, "copies": 0, "local": 4, "atomics": 4,
                              "barriers": 0.1}
    assert [instructions.ssm_threads(T) for T in instructions.SSM_T] == [64, 128, 128]
    row = lambda forward, backward: {"forward": {"instructions": forward}, "backward": {"instructions": backward}}
    assert instructions.ratios(row(100, 500), row(400, 800)) == {"forward": 0.25, "backward": 0.625, "both": 0.5}


def test_instructions_say_what_is_missing(tmp_path, monkeypatch):
    assert "has no csrc/selective_scan: unpack" in instructions.ssm_missing(tmp_path)
    (tmp_path / "csrc" / "selective_scan").mkdir(parents=True)
    (tmp_path / "csrc" / "selective_scan" / "selective_scan_bwd_kernel.cuh").write_text("")
    monkeypatch.setattr(instructions.native_cuda, "nvcc", lambda: None)
    assert "--mamba_ssm needs nvcc" in instructions.ssm_missing(tmp_path)


# ------------------------------------------------------------------------------------------------ bench/scan.py, outside

def test_dry_run_of_the_benchmark(tmp_path, capsys):
    arguments = ["--device=cuda", "--dry_run", "--rounds=1", "--T=8", "--B=2", "--D=64", "--N=4"]
    assert scan_cuda.main(scan.parse([*arguments, f"--out={tmp_path}/new/record.json"])) == 0
    said = capsys.readouterr().out
    record = json.loads((tmp_path / "new" / "record.json").read_text())
    assert record["dry_run"] is True and record["finished"] is True and record["seconds"] > 0
    assert {"longhorn_scan.cu", "scan.py", "kernels/build.py"} <= set(record["sources"]) and record["copy_bytes_per_second"] > 0
    assert {"commit", "torch", "gpu"} <= set(record["environment"]) and record["device"]["name"].startswith("dry run")
    assert len(record["correctness"]) == 16 and all(row["right"] for row in record["correctness"])
    (entry,) = record["shapes"]
    assert entry["shape"] == {"B": 2, "T": 8, "D": 64, "N": 4, "name": "B=2 T=8 D=64 N=4"} and entry["tokens"] == 16
    assert [r["contender"] for r in entry["rows"]] == list(scan_cuda.CONTENDERS)
    assert "longhorn_scan" in said and "in short: B=2 T=8" in said and (tmp_path / "new" / "record.png").exists()


@pytest.mark.parametrize("loop", (False, True))
def test_shapes_beyond_the_budget_are_named(tmp_path, monkeypatch, capsys, loop):
    monkeypatch.setattr(scan_cuda, "check", lambda *a, **k: ([], {}))
    late = [0.0]  # seconds that the clock runs ahead: each shape takes 100 of them

    def measure_shape(shape, *a, **k):
        late[0] += 100
        row = {"contender": "longhorn_scan torch", "forward_backward": {"median_seconds": 1.0}}
        return [row] * (loop and late[0] == 100), {}  # the loop runs at the first shape alone, so its seconds foretell no other's

    clock = SimpleNamespace(**vars(time) | {name: lambda name=name: getattr(time, name)() + late[0]
                                            for name in ("perf_counter", "monotonic")})
    monkeypatch.setattr(scan_cuda, "time", clock)
    monkeypatch.setattr(scan_cuda, "measure_shape", measure_shape)
    monkeypatch.setattr(scan_cuda, "print_shape", lambda entry: None)
    budget = 150 if loop else 250
    args = scan.parse(["--device=cuda", "--dry_run", f"--budget_s={budget}", f"--out={tmp_path}/r.json"])
    scan_cuda.main(args)
    record = json.loads((tmp_path / "r.json").read_text())
    assert 1 + loop <= len(record["shapes"]) < 4 and len(record["shapes"]) + len(record["left_out"]) == 4
    assert f"budget of {budget} s" in record["left_out"][0]["reason"] and "left out: B=" in capsys.readouterr().out


def test_refusals(tmp_path, monkeypatch, capsys):
    args = SimpleNamespace(out=str(ROOT / "results" / "x.json"), save=False, without="", dry_run=True)
    assert scan_cuda.main(args) == 1 and "does not belong in results/" in capsys.readouterr().err
    args = SimpleNamespace(out=None, save=True, without="", dry_run=True)
    assert scan_cuda.main(args) == 1 and "does not belong in results/" in capsys.readouterr().err
    args = SimpleNamespace(out=None, save=False, without="rnn", dry_run=True)
    assert scan_cuda.main(args) == 1 and "--without=rnn: no such contender; they are longhorn_scan" in capsys.readouterr().err
    assert gpu.main(["--dry_run", f"--out={ROOT}/results"]) == 1 and "do not belong in results/" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        gpu.parse(["--stages=tests,magic"])
    assert "--stages=magic: no such stage; they are environment, build" in capsys.readouterr().err
    assert not (ROOT / "results" / "x.json").exists()


@pytest.fixture
def uncommitted(monkeypatch):
    monkeypatch.setattr(measure, "code_version", lambda: {"uncommitted_changes": True})


def test_results_take_no_record_of_an_uncommitted_tree(uncommitted, tmp_path, monkeypatch):
    for out in ("results/x.json", "results/folder/x.json", "results", "bench/../results/x.json"):
        with pytest.raises(ConfigError, match="^results/ is for records of a commit.*: commit them, or give --other$"):
            measure.refuse_uncommitted(ROOT / out, "--other")
    for out in (None, tmp_path / "x.json", str(ROOT / "out" / "results" / "x.json"), ROOT / "resultsx.json"):
        measure.refuse_uncommitted(out)
    for known in (False, None):  # committed; and where there is no git, nobody knows
        monkeypatch.setattr(measure, "code_version", lambda known=known: {"uncommitted_changes": known})
        measure.refuse_uncommitted(ROOT / "results" / "x.json")


@pytest.mark.parametrize("main, arguments", [
    (scan.main, "--save"), (scan.main, "--save --memory"), (scan.main, "--out=results/y.json"),
    (scan.main, "--save --device=cuda"), (bench_checkpoint.main, "--save"), (instructions.main, "--save"),
    (generate.main, "--save"), (step.main, "--save"), (online_learning.main, "--save"), (gpu.main, "")])
def test_every_script_says_so_before_it_measures(uncommitted, monkeypatch, main, arguments):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["script", *arguments.split()])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in arguments or main is gpu.main)
    monkeypatch.setattr(instructions.native_cuda, "missing", lambda: None)
    monkeypatch.setattr(instructions, "nvdisasm", lambda: "nvdisasm")
    monkeypatch.setattr(records, "environment", lambda: pytest.fail("it went on"))
    with pytest.raises(ConfigError, match="uncommitted changes"):
        main()


def test_a_copy_without_git_is_measured_all_the_same(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(records, "environment", dict)
    asked = []
    monkeypatch.setattr(gpu, "run_all", lambda stages, context, *_, **__: asked.append(context) or [
        {"stage": "a", "status": "ok", "seconds": 0.0}])
    monkeypatch.setenv("PATH", "")  # no git
    assert gpu.main([]) == 0 and asked == [Context(ROOT / "results", False)]
    assert gpu.main(["--dry-run"]) == 0 and asked[1:] == [Context(ROOT / "out" / "gpu_dry", True)]


@no_gpu
def test_without_a_device_there_is_one_line_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    args = SimpleNamespace(out=str(tmp_path / "a" / "r.json"), save=False, without="", dry_run=False)
    assert scan_cuda.main(args) == 1
    assert capsys.readouterr().err == "bench/scan.py: PyTorch sees no GPU (use --device=cpu, or --dry_run to try the code)\n"
    assert gpu.main([f"--out={tmp_path}/b"]) == 1 and list(tmp_path.iterdir()) == []
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "sees no GPU here; nothing was run and nothing written" in said.err


@pytest.mark.parametrize("parse,words", [(scan.parse, "--budget_s"), (gpu.parse, "--stages")])
def test_help(parse, words, capsys):
    with pytest.raises(SystemExit) as end:
        parse(["--help"])
    assert end.value.code == 0 and words in capsys.readouterr().out


def test_the_scripts_start():
    run = subprocess.run([sys.executable, str(ROOT / "bench" / "scan.py"), "--memory", "--device=cuda"], capture_output=True,
                         text=True, timeout=100, cwd="/")
    assert run.returncode == 2 and "--memory is for --device=cpu" in run.stderr
    run = subprocess.run([sys.executable, str(ROOT / "bench" / "gpu.py"), "--stages=magic"], capture_output=True, text=True,
                         timeout=100, cwd="/")
    assert run.returncode == 2 and "no such stage" in run.stderr


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
              Stage("absent", 20, skip), Stage("no program", 20, lambda c: ["/no/such/program"]), Stage("look", 20, look),
              Stage("crash", 20, python("import os; os.abort()")),
              Stage("odd", 20, python("print('2 of 3')"), verdict=lambda status, text: ("failed", text.strip()))]
    start = time.monotonic()
    results = gpu.run_all(stages, Context(tmp_path, True), 60, about={"environment": {"commit": "abc"}})
    assert time.monotonic() - start < 20
    assert [r["status"] for r in results] == ["ok", "failed", "over time", "skipped", "failed", "ok", "failed", "failed"]
    good, bad, slow, absent, program, _, crash, odd = results
    assert good["summary"] == "n is 3, all well" and good["exit_status"] == 0 and bad["reason"] == "out of luck"
    assert slow["records"][0]["n"] == 3 and slow["exit_status"] is None and "killed at its limit of 1 s" in slow["reason"]
    assert 1 <= slow["seconds"] < 6 and absent["reason"].startswith("pytest") and "No such file" in program["reason"]
    assert odd["reason"] == "2 of 3" and crash["reason"] == "ended by signal 6 (SIGABRT)"
    assert [s["stage"] for s in seen[0]["stages"]] == ["good", "bad", "slow", "absent", "no program"]
    assert seen[0]["finished"] is False
    record = json.loads((tmp_path / "gpu.json").read_text())
    assert record["finished"] is True and record["dry_run"] is True and record["environment"] == {"commit": "abc"}
    assert record["stages"][0]["records"] == [{"x": None, "n": 3}]
    assert "out of luck" in (tmp_path / "gpu.log").read_text() and gpu.worst(results) == 1 and gpu.worst([good, absent]) == 0
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
    for _ in range(50):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("the grandchild lives on")


def test_the_budget_of_all_stages(tmp_path, monkeypatch):
    limits = []
    monkeypatch.setattr(gpu, "run_stage", lambda stage, context, limit_s, *_: limits.append(limit_s) or
                        {"stage": stage.name, "status": "ok", "seconds": 0.0, "records": []})
    stages = [Stage("a", 10, None), Stage("b", 30, None)]
    gpu.run_all(stages, Context(tmp_path, True), 30)
    assert limits == [10, pytest.approx(30, abs=1)]
    limits.clear()
    gpu.run_all(stages, Context(tmp_path, True), 80)  # few stages may take longer each
    assert limits == [20, 60]
    results = gpu.run_all(stages, Context(tmp_path, True), 3)
    assert [r["status"] for r in results] == ["left out", "left out"] and "--stages=a runs it alone" in results[0]["reason"]
    assert gpu.worst(results) == 1
    assert gpu.BUDGET_S <= 540


def test_a_torn_record_is_dropped(tmp_path):
    (tmp_path / "r").write_text('{"a": 1}\n{"b": ')
    assert gpu.read_records(tmp_path / "r") == [{"a": 1}] and gpu.read_records(tmp_path / "none") == []


def test_what_stages_run(tmp_path, monkeypatch):
    context = Context(tmp_path, False, seconds=120, record="/r")
    commands = {s.name: s.command for s in gpu.STAGES}
    assert commands["benchmark"](context)[1:] == ["bench/scan.py", "--device=cuda", "--preset=paper", "--even_if_wrong",
                                                  "--budget_s=110", f"--out={tmp_path}/scan_cuda.json"]
    assert commands["tests"](context)[-2:] == ["-k", "test_gpu"]
    assert commands["training"](context)[2:] == ["--stage=training", "--record=/r", "--budget_s=120"]
    monkeypatch.setattr(gpu, "tool", lambda name: "/cuda/compute-sanitizer")
    assert commands["racecheck"](context)[2:5] == ["/cuda/compute-sanitizer", "--tool", "racecheck"]
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
    assert gpu.tests_verdict(5, "")[1] == "no test is called test_gpu..."
    assert "test_on_a_gpu" in gpu.tests_verdict(1, "FAILED tests/test_cuda.py::test_on_a_gpu - x")[1]
    assert gpu.tests_summary([], "x\n== 3 passed, 2 deselected in 1.2s ==\n") == "3 passed, 2 deselected in 1.2s"


def test_inner_stages_on_the_cpu(tmp_path):
    found = []
    gpu.small(lambda **r: found.append(r), True, 10)
    assert len(found) == len(gpu.SMALL) + 3  # and three convolutions
    gpu.GRADIENTS, before = gpu.GRADIENTS[:1] + gpu.GRADIENTS[3:4], gpu.GRADIENTS
    try:
        found.clear()
        gpu.gradients(lambda **r: found.append(r), True, 100)
    finally:
        gpu.GRADIENTS = before
    assert [r["right"] for r in found] == [True, True] and found[1]["key"] == 1000 and found[0]["two_runs_agree_to_the_bit"]
    assert "2 of 2 right" in gpu.gradients_summary(found, "")


def test_training_step_on_the_cpu():
    row = gpu.train_steps("longhorn", 16, False, 2, True, lambda name: None)
    assert row["tokens_per_second"] > 0 and row["mfu"] is None and row["last_loss"] == row["last_loss"]
    rows = [{**row, "model": f"{family}_120m", "T": 16, "compiled": False, "tokens_per_second": rate}
            for family, rate in (("longhorn", 3000.0), ("llama", 4000.0))]
    assert gpu.training_summary(rows, "") == "tokens/s longhorn / llama: T=16 3k / 4k = 0.75"
    rows += [{**rows[0], "compiled": True, "tokens_per_second": 6000.0}]  # whose LLaMA has not run
    assert gpu.training_summary(rows, "") == "tokens/s longhorn / llama: T=16 3k / 4k = 0.75, T=16 6k compiled / -"
    rows[1] = {**rows[1], "batch_size": 1}
    assert "3k / 4k," in gpu.training_summary(rows, "")  # no ratio: fewer rows fill a GPU less


def test_training_takes_what_memory_holds_for_all_runs_of_a_length(monkeypatch):
    tried = []

    def steps(family, T, compile_, batch_size, *_):
        tried.append((family, T, compile_, batch_size))
        if family == "longhorn" and batch_size * T > 131072 // 64 // 2:  # a 64th of each length, dry
            raise torch.OutOfMemoryError
        return {"batch_size": batch_size, "tokens_per_second": 1e3, "mfu": None, "peak_bytes": None, "first_loss": 1.0,
                "last_loss": 1.0}

    monkeypatch.setattr(gpu, "train_steps", steps)
    found = []
    gpu.training(lambda **record: found.append(record), True, 1000.0)
    assert tried[:3] == [("longhorn", 16, False, 128), ("longhorn", 16, False, 64), ("llama", 16, False, 64)]
    assert [t[::3] for t in tried if t[1] == 64] == [("longhorn", 32), ("longhorn", 16), ("llama", 16)]
    assert "T=16 1k / 1k = 1.00" in gpu.training_summary(found, "")


@pytest.mark.skipif(not (ROOT / "Makefile").exists() or os.name != "posix", reason="make is for Unix")
def test_make_takes_the_interpreter_it_is_given():
    ours = ("PYTHON", "OUT", "ARGS", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")  # the last three where make runs these tests
    lines = lambda *arguments: subprocess.run(["make", "-n", "-B", "gpu", *arguments], cwd=ROOT, capture_output=True, text=True,
                                              env={k: v for k, v in os.environ.items() if k not in ours}).stdout
    given = lines("PYTHON=python3", "OUT=elsewhere", "ARGS=--stages=tests")
    assert given.split() == ["python3", "bench/gpu.py", "--out=elsewhere", "--stages=tests"]
    assert ".venv/bin/python bench/gpu.py" in lines() and "pip install" in lines()
