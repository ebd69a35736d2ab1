"""bench/segments.py: what it tries, what it makes of times, and all of it on the CPU, where its numbers mean nothing.

    python -m pytest tests/test_segments.py
"""

import json
from unittest import mock

import pytest

import native
from bench import segments
from bench.scan_cuda import Shape


def test_what_is_tried_can_be_had():
    assert segments.tried(Shape(1, 100, 64, 16), 132) == [1]
    assert segments.tried(Shape(1, 256, 64, 16), 132) == [1, 2]
    assert segments.tried(Shape(1, 1000, 64, 16), 132)[-1] == 7  # of 160 steps, the last of 40
    for T in (300, 4096, 65536):
        for S in segments.tried(Shape(1, T, 64, 16), 132):
            assert native.segment_sizes(T, S)["segments"] == S and T // S >= native.SEGMENT // 2


def test_the_number_is_forced_and_given_back():
    before = native.cuda_segments
    with segments.split_into(7):
        assert native.cuda_segments(1, 65536, 132, 0.25) == 7
    assert native.cuda_segments is before


def rows_of(lone, joining, noise=1.0):
    """Rows whose times follow the model of native.cuda_segments with these constants."""
    rows, i = [], 0
    for shape in (Shape(16, 4096, 1536, 16), Shape(1, 65536, 1536, 16), Shape(2, 4096, 1536, 16), Shape(8, 1024, 1536, 16),
                  Shape(12, 8192, 1536, 16), Shape(3, 2048, 512, 16)):
        blocks = segments.blocks_of(shape, 132)
        time = lambda n: max(lone, -(-n // 132))
        for direction in segments.DIRECTIONS:
            seconds = {}
            for S in range(1, shape.T // native.SEGMENT + 1):
                i += 1
                S, steps = native.segment_sizes(shape.T, S).values()
                cost = (time(S * blocks) + (S > 1) * joining[direction] * time((S - 1) * blocks)) * steps
                seconds[S] = {"median_seconds": 1e-6 * cost * noise ** (i % 3 - 1)}
            rows.append({**shape._asdict(), "direction": direction, "blocks": blocks, "multiprocessors": 132, "seconds": seconds})
    return rows


@pytest.mark.parametrize("lone,joining", [(1.0, {"forward": 0.1, "backward": 1.0}), (3.0, {"forward": 1.5, "backward": 0.5})])
def test_constants_are_found_from_times(lone, joining):
    found = segments.best_constants(rows_of(lone, joining))
    assert found["mean_cost"] < 1.01 and found["mean_cost_now"] > 1.05
    with mock.patch.object(native, "LONE", found["lone"]), mock.patch.object(native, "JOINING", found["joining"]):
        again = segments.best_constants(rows_of(lone, joining, noise=1.001))
    assert again["mean_cost_now"] == pytest.approx(found["mean_cost"], abs=0.01)


def test_constants_that_are_right_stay():
    found = segments.best_constants(rows_of(native.LONE, native.JOINING))
    assert (found["lone"], found["joining"]) == (native.LONE, native.JOINING) and found["mean_cost"] == found["mean_cost_now"]


def test_five_percent_cost_nothing():
    row = {"seconds": {S: {"median_seconds": t} for S, t in ((1, 3.0), (4, 2.0), (8, 2.1), (16, 4.2))}}
    assert [segments.cost(row, S) for S in (1, 4, 8, 16)] == pytest.approx([1.5 / 1.05, 1, 1, 2])


def test_dry_run(tmp_path, capsys):
    out = tmp_path / "new" / "segments.json"
    assert segments.main(["--dry_run", "--rounds=1", "--shapes=1x256x64x16,1x128x64x4", f"--out={out}"]) == 0
    record, said = json.loads(out.read_text()), capsys.readouterr().out
    assert record["finished"] and record["dry_run"]
    assert [sorted(r["seconds"]) for r in record["rows"]] == [["1", "2"]] * 2 + [["1"]] * 2
    assert {seconds["runs"] for row in record["rows"] for seconds in row["seconds"].values()} == {1}  # the first is not counted
    assert said.count("\n") == 8 and "in short: what is chosen takes" in said and str(out) in said


def test_mistakes_get_one_line(capsys, monkeypatch):
    for wrong in (["--shapes=1x2x3"], ["--shapes=axbxcxd"], ["--shapes=0x1x1x1"], ["--rounds=0"]):
        with pytest.raises(SystemExit) as stop:
            segments.main(wrong)
        assert stop.value.code == 2
    capsys.readouterr()
    assert segments.main(["--dry_run", "--save"]) == 1 and "does not belong in results/" in capsys.readouterr().err
    monkeypatch.setattr(segments.torch.cuda, "is_available", lambda: False)
    assert segments.main([]) == 1 and capsys.readouterr().err.count("\n") == 1


def test_a_shape_that_fails_is_left_out_and_said(tmp_path, monkeypatch, capsys):
    time_shape = segments.time_shape
    monkeypatch.setattr(segments, "time_shape", lambda shape, *a: time_shape(shape, *a) if shape.N == 4 else 1 / 0)
    out = tmp_path / "segments.json"
    assert segments.main(["--dry_run", "--rounds=1", "--shapes=1x128x64x16,1x128x64x4", f"--out={out}"]) == 1
    record = json.loads(out.read_text())
    assert [left["reason"] for left in record["left_out"]] == ["ZeroDivisionError: division by zero"] and len(record["rows"]) == 2
    assert "left out: ZeroDivisionError" in capsys.readouterr().out
