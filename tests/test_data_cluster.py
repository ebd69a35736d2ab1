"""data/tokens/cluster.py: tasks of datatrove, here, on Slurm and on Ray, write what tokenising one by one gives.

Tests that need datatrove (pip install --group cluster), Slurm or Ray are skipped without it, with a line under -rs.
"""

import contextlib
import copy
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers import VOCAB, byte_level_bpe, documents, reference, rejected, run_python, table, write_jsonl

from data.prepared import SPLITS, DataError, Tokens
from data.tokenizer import Text
from data.tokens import cluster, sources
from data.tokens import prepare as any_tokens
from data.writer import preparing

pytest.importorskip("datatrove", reason="datatrove is not installed: pip install --group cluster")
TEXTS = [*documents(180), "", "\ufffd no character", "<|endoftext|>", *documents(30)]
UNITS = [TEXTS[i:i + 24] for i in range(0, len(TEXTS), 24)]  # of nine files
HOLD = """
import os, signal, sys
def hold(event, args):
    if event == "open" and os.environ["HOLD"] in str(args[0]) and not os.path.exists(os.environ["HELD"]):
        with open(os.environ["HELD"], "w") as file:
            file.write(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
sys.addaudithook(hold)
"""


@pytest.fixture
def source(tmp_path):
    """Arguments that say what to prepare: a data set of the hub, here in a folder, and a tokenizer trained on it."""
    (tmp_path / "hub").mkdir()
    for i, texts in enumerate(UNITS):
        write_jsonl(tmp_path / f"hub/train-{i}.jsonl", texts)
    byte_level_bpe(tmp_path, TEXTS)
    return [tmp_path / "hub", f"--tokenizer=hf:{tmp_path}", "--val_fraction=0.2"]


def holding(tmp_path, name):
    """(environment, path): in this environment, the first process to open a file with this name writes its pid to the
    path and stops there."""
    (tmp_path / "site").mkdir(exist_ok=True)
    (tmp_path / "site/sitecustomize.py").write_text(HOLD)
    held = tmp_path / f"held-{name.split('/')[-1]}"
    return {"PYTHONPATH": str(tmp_path / "site"), "HOLD": name, "HELD": str(held), "HF_HUB_OFFLINE": "1"}, held


def until(condition, process=None, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end and (process is None or process.poll() is None), process and process.said()
        time.sleep(0.1)


def check(folder, source):
    """Compares the tokens with those of the documents one by one."""
    text, tokens = Text(source[1].removeprefix("--tokenizer=")), Tokens(folder)
    tokens.verify()
    assert {split: getattr(tokens, split)[:].tolist() for split in SPLITS} == reference(UNITS, text)
    assert sum(entry["bytes"] for entry in tokens.meta["splits"].values()) == sum(len(t.encode()) for t in TEXTS)


def has_ended(out, *ranks):
    plans = [out / f"task-0000{rank}/plan.json" for rank in ranks]
    return all(plan.exists() and '"ended": true' in plan.read_text() for plan in plans)


def test_a_task_killed_twice_finishes_beside_another(start, tmp_path, source):
    """The task is killed before its shard has its name, and again before plan.json lists the shard. Then it may finish.
    """
    out = tmp_path / "out"
    command = [sys.executable, "data/tokens/cluster.py", *source, "--tasks=2", "--workers=2", "--out", out]
    for name in ("task-00001/00000.train.bin.tmp", "task-00001/plan.json.tmp"):
        environment, held = holding(tmp_path, name)
        process = start(command, **environment)
        until(held.exists, process)
        until(lambda: has_ended(out, 0), process)
        os.kill(int(held.read_text()), signal.SIGKILL)
        assert process.wait(100) == 2 and not (out / "meta.json").exists()
        assert process.said().split("\n")[-2] == "cluster.py: error: 1 of 2 tasks did not end, the first of them " \
            "task 1 (it was killed): rerun this command to resume"
        made = (out / "task-00000/00000.train.bin").stat().st_mtime_ns
    done = run_python(*command[1:])
    assert done.returncode == 0 and "documents to train on" in done.stdout, done.stderr
    assert made == (out / "task-00000/00000.train.bin").stat().st_mtime_ns
    check(out, source)


DEADLY = """
import signal, sys
from data.tokens import cluster
class Deadly:  # to the process that reads it from a pickle
    def __reduce__(self):
        return signal.raise_signal, (signal.SIGKILL,)
cluster.run_locally(1, pipeline=[Deadly(), bytes(1 << 24)], tasks=1, logging_dir=sys.argv[1])
"""


def test_a_task_killed_before_it_has_read_its_input_blocks_nobody(tmp_path):
    """Its input takes megabytes, like a vocabulary, and does not fit into a pipe. Nobody may wait until it is read."""
    done = run_python("-c", DEADLY, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def in_this_process(monkeypatch):
    """Runs tasks here one by one, the last first, because processes would only cost seconds. Every file is a unit."""
    from datatrove.executor import LocalPipelineExecutor

    def run_locally(workers, **how):
        for rank in reversed(LocalPipelineExecutor(**how).get_incomplete_ranks()):
            with contextlib.suppress(DataError):
                LocalPipelineExecutor(**copy.deepcopy(how))._run_for_rank(rank)

    monkeypatch.setattr(cluster, "run_locally", run_locally)
    monkeypatch.setattr(sources, "UNIT_BYTES", 1)


@pytest.mark.parametrize("tasks", [2, 100])
def test_tasks_make_the_tokens_of_one_process(in_this_process, tmp_path, tasks):
    """One file has no documents, one is a text, there may be more tasks than files, and the disk loses a shard."""
    (tmp_path / "files").mkdir()
    for name, texts in (("a.jsonl", TEXTS[:60]), ("b.jsonl.gz", []), ("c.jsonl.zst", TEXTS[60:])):
        write_jsonl(tmp_path / "files" / name, texts)
    (tmp_path / "files/d.txt").write_text("one text\n" * 100)
    how = {"files": [tmp_path / "files"], "tokenizer": "gpt2", "vocab": VOCAB, "val_fraction": 0.2}
    made, plain = cluster.prepare(tmp_path / "a", tasks=tasks, **how), any_tokens.prepare(tmp_path / "b", **how)
    for split, of_plain in plain.meta["splits"].items():
        assert np.array_equal(getattr(made, split)[:], getattr(plain, split)[:])
        of_made = made.meta["splits"][split]
        assert {key for key in of_plain if of_made[key] != of_plain[key]} <= {"sha256", "shards"}
    (tmp_path / "a/task-00001/00000.train.bin").write_bytes(b"")
    assert cluster.prepare(tmp_path / "a", tasks=tasks, **how).meta["splits"] == made.meta["splits"]


@pytest.fixture
def prepare(tmp_path, in_this_process):
    """cluster.py's `prepare` for two files."""
    source = [write_jsonl(tmp_path / name, TEXTS) for name in ("a.jsonl", "b.jsonl")]
    return functools.partial(cluster.prepare, out=tmp_path / "out", files=source, tokenizer="bytes", val_fraction=0.2)


REFUSED = """
{"shuffle": 2357}                             one process
{"files": ["c.txt"]}                          one process
{"files": ["a.jsonl", "bad.jsonl"]}           1 of 2 tasks  first of them task 1  bad.jsonl cannot be read
{"cluster": "slurm"}                          the partition and the time
{"cluster": "slurm", "cluster_args": "partition=a,time=9"}  no sbatch here
{"cluster": "slurm", "out": "a b"}            a b: choose a path
{"cluster": "ray", "cluster_args": "num_cpus=x"}  Ray refused  'x'
"""


@pytest.mark.parametrize("row", table(REFUSED), ids=" ".join)
def test_work_that_tasks_cannot_do_is_refused(prepare, tmp_path, monkeypatch, row):
    how, *words = row
    how = json.loads(how)
    if how.get("cluster") == "ray":
        pytest.importorskip("ray", reason="ray is not installed: pip install --group cluster")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "c.txt").write_text("text " * 9)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": ')
    rejected(lambda: prepare(**how), *words)


def test_earlier_work_is_refused_or_resumed(prepare, tmp_path, monkeypatch):
    """Earlier tasks may still run on a node believed lost, have a damaged record, or have read other inputs."""
    with preparing(tmp_path / "out/task-00001"):
        rejected(prepare, "1 of 2 tasks", "another process is preparing")
    splits = prepare().meta["splits"]
    rejected(lambda: prepare(tasks=1), "other inputs", "--force")
    with monkeypatch.context() as patch:
        patch.setattr(cluster, "is_queued", lambda job: True)
        (tmp_path / "out/datatrove/job").write_text("7")
        for other in {"tasks": 1}, {"force": True}:
            rejected(lambda: prepare(cluster="slurm", **other), "job 7 is still at work")  # noqa: B023
        assert prepare(cluster="slurm") is None
    (tmp_path / "out/meta.json").unlink()
    plan = tmp_path / "out/task-00001/plan.json"
    plan.write_text(plan.read_text().replace('"bytes": ', '"bytes": 1', 1))
    assert prepare().meta["splits"] == splits
    for name in "meta.json", "plan.json":  # as if killed during --force
        (tmp_path / "out" / name).unlink()
    assert prepare(val_fraction=0.3).meta["splits"] == prepare(force=True, val_fraction=0.3).meta["splits"] != splits


def slurm(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


@pytest.mark.skipif(not shutil.which("sinfo") or not slurm("sinfo", "-h", "-o", "%R"), reason="no Slurm here")
def test_slurm_finishes_though_a_task_is_cancelled_and_then_requeued(tmp_path, source):
    out, partition = tmp_path / "out", slurm("sinfo", "-h", "-o", "%R").split()[0]
    command = ["data/tokens/cluster.py", *source, "--tasks=4", "--out", out, "--cluster=slurm"]
    options, job = f"--cluster_args=partition={partition},time=10,mem-per-cpu=1", None
    for name, n in (("task-00002/00000.train.bin.tmp", 4), ("task-00002/plan.json.tmp", 1)):
        environment, held = holding(tmp_path, name)
        said = run_python(*command, options, **environment)
        assert said.returncode == 0 and f"{n} of 4 tasks submitted as job" in said.stdout, said
        assert n == 4 or f"1 of 4 tasks did not end, the first of them task 2 (it was killed) in job {job}: see " \
            f"{out}/datatrove/slurm_logs\n" in said.stdout
        job = (out / "datatrove/job").read_text()
        until(held.exists)
        until(lambda: slurm("squeue", "-h", "-r", "-j", job).count("\n") == 0)  # noqa: B023
        assert f"3 of 4 tasks have ended; job {job} has the others" in run_python(*command, options).stdout
        if n == 4:
            slurm("scancel", job)
            until(lambda: not slurm("squeue", "-h", "-j", job))  # noqa: B023
    assert not (out / "meta.json").exists()
    subprocess.run(["scontrol", "requeue", f"{job}_0"], check=True)
    until((out / "meta.json").exists)
    check(out, source)
    wrong = run_python(*command, "--force", "--cluster_args=partition=none,time=10")
    assert wrong.returncode == 2 and wrong.stderr.split("\n")[-2] == (
        "cluster.py: error: sbatch refused the job, see its message above: change --cluster_args")


def test_ray_finishes_though_a_node_is_removed(tmp_path, source, start, monkeypatch):
    """The node of a held task goes away; the task starts again on the other node."""
    pytest.importorskip("ray", reason="ray is not installed: pip install --group cluster")
    from ray.cluster_utils import Cluster

    environment, held = holding(tmp_path, "task-00002/00000.train.bin.tmp")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)  # the nodes' processes inherit it
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        first, out = nodes.add_node(num_cpus=1), tmp_path / "out"
        process = start([sys.executable, "data/tokens/cluster.py", *source, "--tasks=4", "--out", out, "--cluster=ray",
                         f"--cluster_args=address={nodes.address},memory=0"])
        until(held.exists, process)
        nodes.add_node(num_cpus=1)
        os.kill(int(held.read_text()), signal.SIGKILL)
        nodes.remove_node(first)
        assert process.wait(300) == 0, process.said()
        check(out, source)
    finally:
        nodes.shutdown()
