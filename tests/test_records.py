"""runtime/records.py: what a reader finds after a run was killed or resumed. `pytest tests/test_records.py`"""

import errno
import itertools
import json
import math
import os
import platform
import re
import resource
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from helpers import ROOT, left_behind

from common import files
from common.files import lock_folder
from data import images
from runtime import checkpoint, distributed, loss_curve, records, telemetry
from runtime.folder import Folder, Found, Progress
from runtime.records import BadRecord, Log, code_version, environment, read_json, read_log, write_json
from train import TrainConfig


def train_event(step, loss):
    return {"event": "train", "step": step, "tokens": 64 * step, "train_loss": loss}


def write_log(folder, *events, tail=""):
    (folder / "log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events) + tail)


def test_events_come_back_in_order_and_by_kind(tmp_path):
    """A resumed run drops events after its step, and a torn line."""
    log = Log(tmp_path)
    written = [log.write("train", 1, train_loss=2.5), log.write("eval", 1, val_loss=2.0),
               log.write("train", 2, train_loss=2.25)]
    assert read_log(tmp_path) == written  # each line is on disk as soon as it is written
    assert written[0] == {"event": "train", "step": 1, "train_loss": 2.5} and read_log(tmp_path, "eval") == written[1:2]
    assert read_log(tmp_path, "skipped") == read_log(tmp_path / "nowhere") == []
    with open(log.path, "a") as f:
        f.write('{"event": "tr')
    log = Log(tmp_path, step=1)
    assert read_log(tmp_path) == written[:2]
    written[2] = log.write("train", 2, train_loss=0.5)
    assert list(map(json.loads, log.path.read_text().splitlines())) == written
    Log(tmp_path)  # a new run
    assert log.path.read_text() == "" and os.listdir(tmp_path) == ["log.jsonl"]


def test_a_torn_last_line_is_left_out(tmp_path):
    """It is left out however many of its characters a kill left. An event that lacks only its newline counts."""
    events, last = [train_event(1, 3.0), train_event(2, 2.0)], json.dumps(train_event(3, 1.0))
    for cut in range(1, len(last) + 1):
        write_log(tmp_path, *events, tail=last[:cut])
        assert read_log(tmp_path) == events + [json.loads(last)] * (cut == len(last))


def test_numbers_that_are_not_finite_become_null(tmp_path):
    record = Log(tmp_path).write("train", 1, train_loss=math.nan, norm=math.inf, low=-math.inf, lr=0.0, mfu=None)
    line = (tmp_path / "log.jsonl").read_text()
    assert json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")) == record
    assert list(record.values())[2:] == [None, None, None, 0.0, None]


def test_files_are_written_whole_or_not_at_all(tmp_path):
    """If the write of a record, log or checkpoint fails, the old file is unchanged and no temporary file is left."""
    result, weights = tmp_path / "result.json", tmp_path / "c"
    write_log(tmp_path, train_event(1, 3.0))
    write_json(result, {"val_loss": 1.5, "list": [1, 2]})
    assert json.loads(result.read_text()) == {"val_loss": 1.5, "list": [1, 2]} and result.read_text().endswith("\n")
    checkpoint.save(weights, {"x": torch.zeros(3)}, {"step": 1})
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(TypeError):
        write_json(result, {"val_loss": object()})
    writes = [lambda: write_json(result, {}), lambda: Log(tmp_path, step=1),
              lambda: checkpoint.save(weights, {"x": torch.ones(3)}, {"step": 2})]
    for write, place in [*itertools.product(writes, ("os.fsync", "os.replace")), (writes[2], "zlib.crc32")]:
        broken = OSError(errno.EIO, "broken disk")
        with mock.patch(place, side_effect=broken), pytest.raises(OSError, match="broken disk"):
            write()
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_line_that_the_disk_cuts_is_written_again(tmp_path):
    """The file may not grow beyond the middle of the second line. The system then writes as much as fits, as on a full
    disk."""
    log, (limit, most) = Log(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    log.write("train", 1, train_loss=3.0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(log.path) + 9, most))
    try:
        for step in (2, 3):
            with pytest.raises(OSError):
                log.write("train", step, train_loss=2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    assert [e["step"] for e in read_log(tmp_path)] == [1] and log.path.read_bytes().endswith(b"}\n")
    log.write("train", 4, train_loss=1.0)
    assert [e["step"] for e in read_log(tmp_path)] == [1, 2, 3, 4]
    assert Log(tmp_path, 4, log.crc32).damage == ""  # checkpoints hold the checksum of the whole file
    assert "is not the log of this checkpoint" in Log(tmp_path, 3, log.crc32).damage


def test_a_link_in_a_strangers_folder_is_not_written_through(tmp_path):
    run, outside = tmp_path / "run", tmp_path / "outside"
    run.mkdir()
    outside.mkdir()
    for name in ("log-damaged-1.jsonl", "result.json"):
        (run / name).symlink_to(outside / "new")
    (run / "earlier-being-moved").symlink_to(outside)
    write_log(run, train_event(1, 3.0), tail="torn\n")
    assert Log(run, step=1).damage.endswith("log-damaged-2.jsonl")
    write_json(run / "result.json", {})
    assert records.finish_moving(run) is None and records.move_aside(run) == run / "earlier-1"
    assert not any(outside.iterdir()) and (run / "earlier-1" / "log-damaged-2.jsonl").exists()


@pytest.mark.parametrize("content", [b"", b"\0" * 99, b"[1]", b"null", b'{"steps": 1', b"[" * 99999, b"\xff{}", None])
def test_a_damaged_record_is_refused(tmp_path, content):
    path = tmp_path / "result.json"
    os.mkfifo(path) if content is None else path.write_bytes(content)
    with pytest.raises(BadRecord, match="result.json is damaged"):
        read_json(path)
    assert not records.is_finished(tmp_path)
    path.unlink()
    path.write_text(json.dumps({"a": "\udcff\N{GRINNING FACE}"}))  # such as a file name that is not UTF-8
    assert read_json(path) == {"a": "?\N{GRINNING FACE}"}
    for damage in (lambda r: r["b"], lambda r: r["a"]["b"], lambda r: r["a"] + "x", lambda r: r.a, lambda r: [][0]):
        with pytest.raises(BadRecord, match="its records"), records.fields():
            damage({"a": 1})


def test_a_folder_has_one_lock_whatever_it_is_called_and_no_link_is_followed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text("process 123456789 on another-host")
    with lock_folder(tmp_path / "run"):
        for name in ("run", "link", "run/../link/."):
            with pytest.raises(BlockingIOError, match=rf"\] process {os.getpid()} on {platform.node()}: "):
                lock_folder(tmp_path / name)
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "run" / ".lock").unlink()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        lock_folder(tmp_path / "run")
    assert (tmp_path / "precious").read_text() == "kept"


def test_only_what_a_dead_process_of_this_host_left_is_deleted(tmp_path):
    """Two hosts or processes may write to a shared folder: neither may delete what the other is writing."""
    mine, dead = tmp_path / "result.json", left_behind(tmp_path / "result.json")
    host, pid, start = re.fullmatch(r"result.json.tmp-(.+)-(\d+)-(\d+)", dead.name).groups()
    of = lambda *parts: f"result.json.tmp-{'-'.join(map(str, parts))}"
    gone = [dead.name, of(host, os.getpid(), 1)]  # an earlier process with the same number
    kept = [of("elsewhere", pid, start), Path(files.temporary(mine)).name, of(host, os.getppid(),
            files.started(os.getppid())), "result.json.tmp-17", "result.json.tmp-", "mine.tmp-3", "x.json"]
    for clean in (lambda: lock_folder(tmp_path).close(), lambda: write_json(tmp_path / "result.json", {})):
        for name in (*gone, *kept):
            (tmp_path / name).touch()
        clean()
        left = set(os.listdir(tmp_path)) - {".lock", "result.json"}
        assert left in ({*kept}, {*kept} - {Path(files.temporary(mine)).name})  # the writer renames its own file
    other = tmp_path / dead.name.replace("result.json", "train.bin")  # locking clears leftovers of every file
    other.touch()
    lock_folder(tmp_path).close()
    assert not other.exists()


def test_environment_says_where_it_ran(monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--n_layer=2"])
    monkeypatch.setenv("PATH", "")  # no git
    monkeypatch.delenv("LONGHORN_COMMIT", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    where = json.loads(json.dumps(environment()))
    assert re.fullmatch(r"OMP_NUM_THREADS=3 python\S* train.py --n_layer=2", where["command"])
    assert where["cores"] >= 1 and where["cpu"]
    assert where["commit"] is None and where["uncommitted_changes"] is None


@pytest.mark.skipif(shutil.which("git") is None, reason="no git here")
def test_the_code_version_has_the_commit_and_says_if_there_are_changes(tmp_path, monkeypatch):
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "LONGHORN_COMMIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))  # ignores a repository above
    monkeypatch.setattr(records, "ROOT", tmp_path)
    assert code_version() == {"commit": None, "uncommitted_changes": None}
    monkeypatch.setenv("LONGHORN_COMMIT", "abc")  # for a copy without .git
    assert code_version() == {"commit": "abc", "uncommitted_changes": None}
    (tmp_path / "results").mkdir()
    for name in ("model.py", "results/scan.json"):
        (tmp_path / name).write_text("1")
    me = ["-c", "user.name=a", "-c", "user.email=a@b"]
    git = lambda *args: subprocess.run(["git", "-C", tmp_path, *me, *args], check=True)
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    clean = code_version()  # git overrides the variable
    assert len(clean["commit"]) == 40 and clean["uncommitted_changes"] is False
    (tmp_path / "results" / "scan.json").write_text("2")  # a measurement writes there
    assert code_version() == clean
    (tmp_path / "plot.py").write_text("2")
    assert code_version() == {**clean, "uncommitted_changes": True}


def eval_event(step, loss):
    return {"event": "eval", "step": step, "tokens": 64 * step, "val_loss": loss}


def test_a_curve_is_drawn_of_any_events_in_a_folder_of_any_name(tmp_path):
    picture = tmp_path / r"a$\frac$b" / "loss.png"
    picture.parent.mkdir()
    nothing = {**train_event(1, 2.0), "tokens": None}
    long = [train_event(step, None if step % 3 else 9 / step) for step in range(1, 160)]
    for is_drawn, *events in (False, nothing), (True, nothing, eval_event(1, 2.0)), (True, *long, eval_event(60, 2.0)):
        picture.unlink(missing_ok=True)
        write_log(picture.parent, *events)
        loss_curve.draw_loss(picture.parent)
        assert picture.exists() == is_drawn
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_numbers_of_a_resumed_run_are_right(tmp_path, monkeypatch, capsys):
    """The run is resumed at step 3 and logs every second step, so its first line covers one step. A step takes 3 s, the
    pause after it 5 s."""
    now = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(telemetry, "peak_flops", lambda name: 1e6)
    monkeypatch.setattr(telemetry, "draw_loss", lambda folder: None)
    config = TrainConfig(out_dir=str(tmp_path), batch_tokens=700, max_iters=6, log_interval=2, dtype="bfloat16", seed=9)
    progress = Progress(config.max_iters, seconds=50.0, best_val_loss=2.5, skipped=1, code_versions=["a", "b"])
    derived = {"device_name": "cpu", "flops_per_token": 30, "parameters": {"total": 11}, "processes": 2, "epochs": 1.25,
               "accumulation": 2}
    found = Found(progress, derived, 3, environment={"commit": "c0"}, log=Log(tmp_path))
    t = telemetry.Telemetry(config, torch.device("cpu"))
    t.world_size = 2
    t.open(found, "nothing")
    for step in t.steps(SimpleNamespace(stopping=False)):
        now[0] += 3
        t.log(step, train_loss=4.0, lr=1e-3)
        now[0] += 5
    t.log_evaluation(4, {"val_loss": 2.0, "compare_loss": 3.0})  # an earlier step: the last one counts as logged
    assert t.val_loss == 3.0, "the best checkpoint is chosen by compare_loss, always on the same tokens"
    assert t.finish(None) == {"val_loss": 2.0}
    said = capsys.readouterr().out
    assert "6 steps of 700 tokens = 1.25 epochs, 2 micro-batches per step" in said
    assert "finished: 4,200 tokens in 74 s" in said
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    first, second = read_log(tmp_path, "train")
    for line, step, rate, seconds in ((first, 4, 233, 53.0), (second, 6, 233, 69.0)):
        assert (line["step"], line["tokens"], line["seconds"]) == (step, 700 * step, seconds)
        assert line["tokens_per_second"] == rate and line["mfu"] == round(700 / 3 * 30 / 2e6, 4)
        assert 0.98 * peak < line["memory_bytes"] <= peak
    result = read_json(tmp_path / "result.json")
    about = {"steps": 6, "skipped_steps": 1, "tokens": 4200, "seconds": 74.0, "tokens_per_second": 57, "parameters": 11,
             "flops": 126000, "processes": 2, "best_val_loss": 2.5, "val_loss": 2.0, "code": "b", "seed": 9,
             "commit": "c0", "dtype": "bfloat16", "device_name": "cpu"}
    assert result.items() >= about.items() and 0.98 * peak < result["memory_bytes"] <= peak
    config.dtype = "float32"  # the peak is known only for 16 bits
    t.log(7)
    assert t.val_loss is None, "this step has no evaluation"
    assert read_log(tmp_path, "train")[2]["step"] == 8 and "mfu" not in read_log(tmp_path, "train")[2]


@pytest.mark.parametrize("resume, minutes, seconds", [
    ("auto", 2, 60), ("auto", 9.5, 285), ("auto", 10.5, 300), ("never", 2, 0)])
def test_a_run_waits_for_another_that_may_still_save_its_checkpoint(tmp_path, monkeypatch, resume, minutes, seconds):
    """It waits for half of timeout_minutes, at most five minutes."""
    lock = mock.Mock()
    monkeypatch.setattr(files, "lock_folder", lock)
    with Folder(TrainConfig(out_dir=str(tmp_path), resume=resume, timeout_minutes=minutes), None, mock.Mock()):
        lock.assert_called_once_with(tmp_path, seconds)


def test_times_that_tests_shorten_are_those_on_the_page():
    page = (ROOT / "docs/reliability.md").read_text()
    assert "ten seconds after a signal the run ends with exit code 75" in page and images.GRACE_SECONDS == 10
    assert (distributed.ROLL_CALL_SECONDS, telemetry.PICTURE_SECONDS, distributed.EXIT_RETRYABLE) == (5, 300, 75)
