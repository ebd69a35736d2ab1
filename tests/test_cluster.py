"""Sweeps on every engine: processes here, a real Slurm and a real Ray, which lose jobs, nodes and drivers. Also tests
deploy/slurm.sh.

    make slurm                                              as root: all tests, with Slurm on this machine.
    python -m pytest tests/test_cluster.py                  without Slurm; Ray has two nodes on this machine.
"""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults import (
    CHAOS,
    RUN,
    assert_bit_for_bit,
    both_have,
    cell_events,
    disturb_a_sweep,
    drive,
    gated,
    held_train,
    kill_driver,
    wait_until,
)
from helpers import arguments

from experiments.sweeps import engines, runner
from experiments.sweeps.runner import Cell
from runtime.records import is_finished

ROOT = Path(__file__).resolve().parents[1]
SLURM = pytest.mark.skipif("/slurm_cluster/" not in os.environ.get("SLURM_CONF", ""), reason="make slurm, as root")
RAY = pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="pip install --group cluster")


@pytest.fixture(scope="module")
def two_nodes():
    """A Ray cluster of two nodes with one CPU each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


@pytest.fixture(params=["", pytest.param("slurm", marks=SLURM), pytest.param("ray", marks=RAY)])
def engine(request):
    """The arguments of `drive` that choose an engine."""
    if request.param == "slurm":
        return {"cluster": "slurm", "jobs": 0, "cluster_args": "gpus=1,time=9"}
    if request.param == "ray":
        return {"cluster": f"ray:{request.getfixturevalue('two_nodes').address}", "jobs": 0}
    return {}


def scontrol(*words):
    subprocess.run(["scontrol", *words], check=True, capture_output=True)


def set_node(state):
    scontrol("update", "nodename=ALL", f"state={state}", "reason=test")


def no_steps():
    """True if no job has processes on the node. Each step of a job has a socket there."""
    return not list((Path(os.environ["SLURM_CONF"]).parent / "spool").glob("*_[0-9]*.[0-9]*"))


# -------------------------------------------------------------------------------------------------------- every engine

def test_a_driver_adopts_the_jobs_of_the_driver_before_it(engine, start, tmp_path, stand_in):
    if not engine:
        pytest.skip("processes of this machine stop with their driver")
    drive_again = lambda: drive(start, tmp_path, stand_in, gated(tmp_path, 3), **engine)
    driver = drive_again()
    wait_until(both_have(tmp_path, "held"), 240)
    kill_driver(0, driver, None)
    driver = drive_again()
    wait_until(lambda: "submitted before" in driver.said(), 240)
    (tmp_path / "gate").touch()
    assert driver.wait(240) == 0 and "failed {}" in driver.said()
    assert [cell_events(tmp_path, name) for name in ("c0", "c1", "c2")] == [["started", "from0", "ended"]] * 3
    if "slurm" in engine["cluster"]:
        env = json.loads((tmp_path / "c0" / "env").read_text())
        assert env["SLURM_JOB_GPUS"] in "01" and env["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("signals", [1, 2])
def test_a_driver_that_stops_asks_its_cells_to_save(engine, start, tmp_path, stand_in, signals):
    """The waiting cell is withdrawn, and a second signal kills the others. The same command then finishes all three."""
    cells = {**gated(tmp_path, 2), "later": [f"--gate={tmp_path}/gate"]}
    driver = drive(start, tmp_path, stand_in, cells, **engine)
    wait_until(both_have(tmp_path, "held"), 240)
    for number in (signal.SIGINT, signal.SIGTERM)[:signals]:
        driver.send_signal(number)
        wait_until(both_have(tmp_path, "saving"), 240)
    if signals == 1:
        (tmp_path / "gate").touch()
    assert driver.wait(240) == 0 and "stopped: 3 of 3 cells are left" in driver.said()
    assert ("killing the runs" in driver.said()) == (signals == 2)
    assert cell_events(tmp_path, "c0") == ["started", "from0"] + ["saved"] * (signals == 1)
    (tmp_path / "gate").touch()
    driver = drive(start, tmp_path, stand_in, cells, **engine)
    assert driver.wait(240) == 0 and "failed {}" in driver.said() and "submitted before" not in driver.said()
    assert cell_events(tmp_path, "c0")[-1] == "ended" and cell_events(tmp_path, "later")[-2:] == ["from0", "ended"]


def test_a_branch_waits_and_a_failure_stops_no_other_cell(engine, tmp_path, stand_in):
    """A node that lacks a package or the data set is reported in one line."""
    where = engines.open_engine(engine.get("cluster", ""), engine.get("cluster_args", ""), tmp_path, 2)
    where.poll_seconds = 0.5
    cells = [Cell("branch", [], after="trunk"), Cell("after lost", [], after="lost"), Cell("free", [], after="nobody"),
             Cell("trunk", []), Cell("lost", ["--needs=no_such_package"])]
    with contextlib.closing(where):
        failed = runner.run_cells(cells, tmp_path, where, stand_in)
        assert list(failed) == ["lost"] and "exit 1" in failed["lost"]
        assert all(is_finished(tmp_path / name) for name in ("branch", "after lost", "free"))
        assert failed["lost"].startswith("ModuleNotFoundError: No module named 'no_such_package' (")
        failed = runner.run_cells([Cell("data", ["--dataset=/nowhere"])], tmp_path, where)
        assert "train.py: error: " in failed["data"] and "/nowhere" in failed["data"]
    times = [float((tmp_path / name / "notes").read_text().split()[i]) for name, i in (("trunk", -1), ("branch", 1))]
    assert times == sorted(times)


# --------------------------------------------------------------------------------------------------------------- Slurm

@SLURM
def test_a_sweep_finishes_though_slurm_kills_cancels_and_requeues_its_jobs(start, launch, data, tmp_path):
    def node_fails(pid, driver, life):
        set_node("down")
        wait_until(no_steps)
        set_node("resume")

    job = lambda act: lambda pid, driver, life: subprocess.run([*act.split(), (life / "job").read_text()]).returncode
    kill_cell = lambda pid, *_: os.kill(pid, signal.SIGKILL)
    acts = [job("scontrol requeue"), kill_driver, job("scancel"), kill_cell, job("scancel --signal=TERM"),
            lambda pid, driver, life: driver.send_signal(signal.SIGTERM), node_fails]
    disturb_a_sweep(start, launch, data, tmp_path, 20 if CHAOS else len(acts), acts, cluster="slurm",
                    cluster_args="time=30", jobs=0)


@SLURM
@pytest.mark.parametrize("cluster_args, words", [
    ("partition=nowhere", "invalid partition specified: nowhere"), ("gpus=99", "configuration is not available"),
    ("colour=red", "unrecognized option '--colour=red'")])
def test_slurm_refuses_in_one_line(start, tmp_path, stand_in, cluster_args, words):
    driver = drive(start, tmp_path, stand_in, gated(tmp_path, 3), "slurm", cluster_args)
    assert driver.wait(120) == 2
    first, last = driver.said().splitlines()
    assert first.startswith("3 of 3 cells to run") and words in last and last.startswith("driver: error: ")


@SLURM
def test_a_slurm_that_does_not_answer_is_reported_in_one_line(start, tmp_path, stand_in):
    (tmp_path / "slurm.conf").write_text("ClusterName=gone\nSlurmctldHost=gone(127.0.0.1)\nSlurmctldPort=1\n"
                                         "MessageTimeout=2\nNodeName=gone\n")
    driver = drive(lambda command: start(command, SLURM_CONF=str(tmp_path / "slurm.conf")), tmp_path, stand_in,
                   gated(tmp_path), "slurm")
    assert driver.wait(120) == 2 and len(driver.said().splitlines()) == 1, driver.said()
    assert "--cluster=slurm: " in driver.said() and "Unable to contact slurm controller" in driver.said()


@SLURM
def test_a_job_that_slurm_holds_is_reported_in_one_line(start, tmp_path, stand_in):
    """The node failed and came back before the job's first step had ended, so the job cannot start there again."""
    cells = {"a": [f"--gate={tmp_path}/gate"], "b": []}
    driver = drive(start, tmp_path, stand_in, cells, "slurm", "time=9")
    wait_until(lambda: (tmp_path / "a/held").exists() and is_finished(tmp_path / "b"), 240)
    slurmstepd = int(Path("/proc", (tmp_path / "a/pid").read_text(), "stat").read_text().split()[3])  # its parent
    os.kill(slurmstepd, signal.SIGSTOP)
    set_node("down")
    set_node("resume")
    try:
        assert driver.wait(240) == 0 and "failed {'a': 'it printed nothing (job " in driver.said(), driver.said()
        assert ": launch failed requeued held;" in driver.said()
    finally:
        os.kill(slurmstepd, signal.SIGCONT)
        wait_until(no_steps)
        set_node("resume")  # Slurm has drained it


@SLURM
def test_a_cell_survives_the_time_limit_of_slurm(start, tmp_path, stand_in):
    """A cell is warned, saves and goes on in another job. A cell that makes no progress counts as failed, and nobody
    waits for it."""
    cells = {"far": [f"--gate={tmp_path}/gate"], "deaf": [f"--gate={tmp_path}/none", "--deaf="]}
    driver = drive(start, tmp_path, stand_in, cells, "slurm", "time=1,signal=TERM@40")
    wait_until(lambda: (tmp_path / "far" / "saving").exists(), 240)
    (tmp_path / "gate").touch()
    assert driver.wait(300) == 0
    assert cell_events(tmp_path, "far") == ["started", "from0", "saved", "started", "from1", "ended"]
    assert "failed {'deaf': " in driver.said() and ": TIMEOUT;" in driver.said()


@SLURM
def test_deploy_slurm_sh_survives_a_requeue_and_a_warning(launch, data, tmp_path):
    """The job is requeued by hand and later warned of its time limit. It starts again by itself and ends as if nothing
    had happened."""
    argv = lambda out: arguments(data, out, RUN, micro_batch_size=2)
    launch(argv(tmp_path / "whole"), 2).succeed()
    gates, out = tmp_path / "gates", tmp_path / "run"
    script = held_train(gates, [("step", 30), ("step", 20)])
    python = gates / "python"  # runs the held train.py in place of the real one
    python.write_text(f'#!/bin/bash\nshift\nexec {sys.executable} {script} "$@"\n')
    python.chmod(0o755)
    held = lambda place: wait_until(lambda: all((gates / f"held-{place}-{rank}").exists() for rank in (0, 1)), 240)
    state = lambda: subprocess.run(["squeue", "-h", "--states=all", "-o", "%T", "-j", job], capture_output=True,
                                   text=True).stdout.strip()
    job = subprocess.run(
        ["sbatch", "--parsable", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1", "--time=9",
         f"--output={tmp_path}/slurm.txt", "deploy/slurm.sh", str(out), *argv(out)], cwd=ROOT, text=True, check=True,
        stdout=subprocess.PIPE, env={**os.environ, "PYTHON": str(python), "OMP_NUM_THREADS": "1"}).stdout.strip()
    held(0)
    scontrol("requeue", job)
    (gates / "go-0").touch()
    held(1)
    subprocess.run(["scancel", "--signal=USR1", job], check=True)
    time.sleep(1)
    (gates / "go-1").touch()
    wait_until(lambda: state() in ("COMPLETED", "FAILED", "CANCELLED"), 240)
    said = (tmp_path / "slurm.txt").read_text()
    assert state() == "COMPLETED" and said.count("continuing from") == 2 and said.count("finished:") == 1, said
    assert_bit_for_bit(out, tmp_path / "whole")


# ----------------------------------------------------------------------------------------------------------------- Ray

@RAY
def test_cells_of_a_lost_node_of_ray_move_to_another(two_nodes, start, tmp_path, stand_in):
    cells = gated(tmp_path)
    driver = drive(start, tmp_path, stand_in, cells, f"ray:{two_nodes.address}", jobs=0)
    wait_until(both_have(tmp_path, "held"), 240)
    pids = {name: (tmp_path / name / "pid").read_text() for name in ("c0", "c1")}
    two_nodes.remove_node(next(iter(two_nodes.worker_nodes)), allow_graceful=False)  # one of the two ran on it
    try:
        wait_until(lambda: not all(Path(f"/proc/{pid}").exists() for pid in pids.values()), 240)
        lost, = (name for name, pid in pids.items() if not Path(f"/proc/{pid}").exists())
        (tmp_path / lost / "checkpoint-0.safetensors").touch()
        (tmp_path / "gate").touch()
        assert driver.wait(240) == 0 and "failed {}" in driver.said()
        assert cell_events(tmp_path, lost) == ["started", "from0", "started", "from1", "ended"]
        assert all(cell_events(tmp_path, name) == ["started", "from0", "ended"] for name in cells if name != lost)
    finally:
        two_nodes.add_node(num_cpus=1)


@RAY
@pytest.mark.parametrize("cluster, cluster_args, words", [
    ("ray:127.0.0.1:9", "", "Connection refused"), ("ray:somewhere", "", "--cluster=ray"),
    ("ray", "partition=gpu", "Invalid option keyword partition")])
def test_ray_refuses_in_one_line(two_nodes, start, tmp_path, stand_in, cluster, cluster_args, words):
    cluster = f"ray:{two_nodes.address}" if cluster == "ray" else cluster
    driver = drive(start, tmp_path, stand_in, gated(tmp_path), cluster, cluster_args)
    assert driver.wait(120) == 2 and words in driver.said() and len(driver.said().splitlines()) == 1, driver.said()


@RAY
def test_cells_that_no_node_of_ray_can_hold_wait_and_say_so(two_nodes, start, tmp_path, stand_in):
    driver = drive(start, tmp_path, stand_in, gated(tmp_path), f"ray:{two_nodes.address}", "num_gpus=1", jobs=0)
    wait_until(lambda: "waiting: Ray has no node with {'CPU': 1.0, 'GPU': 1.0}" in driver.said(), 240)
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(240) == 0 and "stopped: 4 of 4" in driver.said() and driver.said().count("waiting: ") == 1
