"""Training survives every fault: each is injected for real, and the run must end as if nothing had happened.

    bit for bit = every tensor of the last checkpoint, and every line of log.jsonl except seconds, speed and memory

Most processes here are forked from one that has already imported PyTorch. Each then starts in a twentieth of a second
instead of three seconds. A fork runs train.py as `__main__`; torchrun starts its workers afresh.

    python -m pytest tests/test_chaos.py      the short form of each test: a few seconds at most.
    make chaos                                fifty kills instead of two, torchrun, two hosts with a cable: minutes.
"""

import contextlib
import functools
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from faults import (
    CHAOS,
    LONG_FORM,
    PATIENCE,
    ROOT,
    RUN,
    STEPS,
    Run,
    assert_bit_for_bit,
    disturb_a_sweep,
    dying,
    held_train,
    kill_driver,
    reserve_port,
    torchrun_env,
    until,
)
from helpers import arguments, assert_same_run, events, poisoned, record, saved

import configurator
from data import prepared
from data.pystdlib import prepare as pystdlib
from model import LM
from runtime import checkpoint, telemetry
from runtime.records import write_json
from train import TrainConfig

pytestmark = pytest.mark.usefixtures("one_thread")
KILLS = 50 if CHAOS else 2
root = os.name == "posix" and os.geteuid() == 0


@pytest.fixture(scope="module")
def undisturbed(nursery, data, tmp_path_factory):
    """undisturbed(world, **changes): the folder of RUN, trained by `world` processes without a fault."""
    @functools.cache
    def undisturbed(world, **changes):
        folder = tmp_path_factory.mktemp("undisturbed")
        argv = arguments(data, folder / "run", RUN, micro_batch_size=4 // world, **changes)
        Run(nursery, folder, argv, world, {}, {}).succeed()
        return folder / "run"
    return undisturbed


def writing(out):
    """True if a checkpoint is being written."""
    return any(out.glob("*.safetensors.tmp-*"))


# ------------------------------------------------------------------------------------------------------- kill -9, often

@pytest.mark.parametrize("world, changes", [
    (1, {}), (2, {}), pytest.param(3, {"batch_tokens": 96}, marks=LONG_FORM),  # with three, the order of sums matters
    pytest.param(2, {"parallel": "fsdp"}, marks=LONG_FORM)], ids=["1", "2", "3", "sharded"])
def test_a_run_killed_again_and_again_ends_with_the_same_bits(undisturbed, launch, data, out, world, changes):
    """Kills one process of a run, or all, in the middle of a write, right at the start or anywhere else."""
    chance, torn, kills, whole = random.Random(world), 0, 0, undisturbed(world, **changes)
    argv = arguments(data, out, RUN, micro_batch_size=4 // world, resume="auto", timeout_minutes=1, **changes)
    while kills < KILLS:
        place = ("open", chance.randrange(1, 12)) if kills % 5 == 4 else (
            ("write", chance.randrange(1, 90)) if kills % 2 == 0 else ("step", chance.randrange(1, STEPS // 9)))
        r = launch(argv, world, hold=[place], folder=out)
        ended = not r.held(*range(world if place[0] == "step" else 1))  # rank 0 alone writes
        everyone = world == 1 or kills == 0 or kills > 2 and chance.random() < 0.5
        victims = range(world) if everyone else [chance.randrange(world)]
        r.send(signal.SIGKILL, *victims)
        for rank in victims:
            r.ranks[rank].join()
        r.go()
        codes = r.end()
        if ended and codes == [0] * world:  # the run ended before the kill: start a new one to kill
            assert_bit_for_bit(out, whole)
            shutil.rmtree(out)
            continue
        kills += 1
        torn += writing(out)
        for rank in set(range(world)) - set(victims):
            line = (r.said(rank).splitlines() or [""])[-1]
            met = "micro-batches per step" in r.said(0)  # a rank misses only ranks that it has met
            done = codes[rank] == 0  # the rank had already done its part of the last step
            assert "no answer from rank" in line and "--resume=auto" in line or not met or done, (line, codes)
    if not (out / "result.json").exists():
        launch([*argv, "--timeout_minutes=10"], world).succeed()
    assert_bit_for_bit(out, whole)
    assert torn >= max(1, KILLS // 10), "no kill struck in the middle of a write"


def holding(rank):
    """Returns LM and patches this process: draw_loss leaves main's frame in a reference cycle that nothing collects,
    and destroy_process_group prints how many DistributedDataParallel objects are left."""
    gc.disable()
    destroy = dist.destroy_process_group

    def draw_loss(folder):
        try:
            raise ImportError
        except ImportError as error:
            kept = error  # noqa: F841  frame -> kept -> its traceback -> frame -> all callers' frames

    def last():
        left = sum(type(o) is torch.nn.parallel.DistributedDataParallel for o in gc.get_objects())
        print(f"\nholding: {left}", flush=True)
        destroy()

    telemetry.draw_loss, dist.destroy_process_group = draw_loss, last
    return LM


def test_no_model_is_left_when_the_process_group_ends(launch, data, out):
    r = launch(arguments(data, out, RUN, micro_batch_size=2, max_iters=4), 2, LM=holding).succeed()
    assert [r.said(rank).count("holding: 0\n") for rank in (0, 1)] == [1, 1], r.said()


@pytest.mark.parametrize("world, stopped", [(2, 1), pytest.param(3, 0, marks=LONG_FORM)])  # rank 0 holds the store
def test_a_process_that_hangs_is_named(launch, data, out, world, stopped):
    r = launch(arguments(data, out, RUN, batch_tokens=96, micro_batch_size=2, eval_interval=0), world,
               hold=[("step", 10)], patience=1)
    assert r.held()
    r.send(signal.SIGSTOP, stopped)
    r.go()
    for rank in set(range(world)) - {stopped}:
        r.ranks[rank].join(PATIENCE)
        assert r.ranks[rank].exitcode == 75, r.said(rank)
        line = r.said(rank).splitlines()[-1]
        assert f"rank {rank} on " in line and f"no answer from rank {stopped} within" in line, line


def test_a_process_that_nobody_joins_says_so(launch, data, tmp_path):
    argv = lambda rank: arguments(data, tmp_path / f"run{rank}", RUN, timeout_minutes=0.02)
    ports = [reserve_port() for _ in range(2)]
    alone = [launch(argv(rank), env=torchrun_env(rank, 2, ports[rank].getsockname()[1])) for rank in (0, 1)]
    for rank, r in enumerate(alone):
        assert r.end() == [75], r.said()
        lines = [line for line in r.said().splitlines() if line.startswith("train.py: error: ")]
        assert f"rank {rank}: not all 2 processes met within 0:00:01.2" in lines[-1], r.said()  # 0.02 minutes
        assert "Traceback" not in r.said(), r.said()


def torchrun(gates, places, *how):
    """A torchrun command whose workers run train.py and are held at these places."""
    return [sys.executable, "-m", "torch.distributed.run", *how, held_train(gates, places)]


def worker(pid, rank):
    """The process id of torchrun's worker with this rank."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return next(int(child) for child in children if f"\0RANK={rank}\0" in Path(f"/proc/{child}/environ").read_text())


@LONG_FORM
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_torchrun_brings_a_killed_worker_back(undisturbed, launch, start, data, out, tmp_path):
    """The restarted run continues from the last checkpoint. A SIGTERM to torchrun makes it save and stop; another run
    then finishes."""
    argv = [*arguments(data, out, RUN, micro_batch_size=2), "--resume=auto"]
    gates = tmp_path / "gates"
    held = lambda place: until(agent, lambda: all((gates / f"held-{place}-{rank}").exists() for rank in (0, 1)), "gate")
    agent = start([*torchrun(gates, [("step", 50), ("step", 20)], "--standalone", "--nproc_per_node=2",
                             "--max-restarts=2"), *argv])
    assert held(0), agent.said()
    every = RUN["checkpoint_interval"]
    os.kill(worker(agent.pid, 1), signal.SIGKILL)
    (gates / "go-0").touch()
    assert held(1), agent.said()
    step = int(agent.said().split("continuing from")[1].split(" at step ")[1].split()[0])
    assert step >= 50 - 2 * every and step % every == 0 and "rank 0 on " in agent.said()
    agent.send_signal(signal.SIGTERM)
    (gates / "go-1").touch()
    assert agent.wait(PATIENCE) != 0  # torchrun does not return the workers' exit code of 0
    stopped = saved(out)[1]["step"]
    assert stopped == max(events(out)) and f"stopped after step {stopped} " in agent.said()
    launch(argv, 2).succeed()
    assert_same_run(out, undisturbed(2))


@LONG_FORM
@pytest.mark.skipif(not (root and shutil.which("ip")), reason="needs root and iproute2's network namespaces")
def test_two_hosts_survive_a_cut_cable(undisturbed, start, data, out, tmp_path):
    """A cable joins two network namespaces. Each runs torchrun in a loop, as a service manager would, and both finish
    the run once the cable is back."""
    ip = lambda words: subprocess.run(["ip", *words.split()], check=True, capture_output=True)
    nodes, hosts = [], [f"longhorn_{os.getpid()}_{i}" for i in range(2)]
    said = lambda: "".join(node.said() for node in nodes)
    argv = arguments(data, out, RUN, micro_batch_size=2, max_iters=400, resume="auto", timeout_minutes=0.3)
    loop = 'for i in 1 2 3 4 5 6 7 8; do "$@" && exit 0; sleep 1; done; exit 1'
    try:
        for host in hosts:
            ip(f"netns add {host}")
        ip(f"link add lh0 netns {hosts[0]} type veth peer name lh1 netns {hosts[1]}")
        for i, host in enumerate(hosts):
            ip(f"-n {host} addr add 10.77.0.{i + 1}/24 dev lh{i}")
            for link in (f"lh{i}", "lo"):
                ip(f"-n {host} link set {link} up")
            command = torchrun(tmp_path / "gates", [("step", 100)], "--nnodes=2", "--nproc_per_node=1",
                               "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=chaos",
                               "--rdzv-endpoint=10.77.0.1:29400", f"--local-addr=10.77.0.{i + 1}",
                               f"--rdzv-conf=is_host={1 - i},join_timeout=120,read_timeout=10")
            nodes.append(start(["ip", "netns", "exec", host, "bash", "-c", loop, "_", *command, *argv],
                               GLOO_SOCKET_IFNAME=f"lh{i}", TP_SOCKET_IFNAME=f"lh{i}"))
        gates = [tmp_path / "gates" / f"held-0-{rank}" for rank in (0, 1)]
        assert until(nodes[0], lambda: all(gate.exists() for gate in gates), "gate"), said()
        ip(f"-n {hosts[1]} link set lh1 down")
        (tmp_path / "gates" / "go-0").touch()
        assert until(nodes[0], lambda: "no answer from rank" in said(), "complaint"), said()
        ip(f"-n {hosts[1]} link set lh1 up")
        assert [node.wait(PATIENCE) for node in nodes] == [0, 0] and "continuing from" in said(), said()[-3000:]
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host], capture_output=True)
    assert_same_run(out, undisturbed(2))


def not_finite(of, how, rank):
    """The LM of a rank: its loss or gradient is nan in steps 5, 6 and 12 on rank `of`, or on both ranks (None)."""
    # one batch precedes the steps: see DDP in runtime/distributed.py
    return poisoned({6, 7, 13}, how) if of in (None, rank) else LM


@pytest.mark.parametrize("how", ["loss", "gradient"] if CHAOS else ["loss"])
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_both(launch, data, tmp_path, how):
    """Otherwise the two ranks' weights would differ from then on, and so would the losses."""
    for of in (None, 1, 0) if CHAOS else (None, 1):
        out = tmp_path / str(of)
        argv = arguments(data, out, RUN, micro_batch_size=2, max_iters=16)
        r = launch(argv, 2, LM=partial(not_finite, of, how)).succeed()
        assert list(events(out, "skipped")) == [5, 6, 12] and r.said().count("step skipped") == 3
        assert record(out)["skipped_steps"] == 3
        assert_same_run(out, tmp_path / "None")


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc to limit memory")
def test_running_out_of_memory_is_one_line(launch, data, out):
    """2^21 tokens of 32 numbers each, 268 MB, exceed the limit, and the allocator raises its own error."""
    large = {**RUN, "n_embd": 32, "block_size": 512, "batch_tokens": 2**21, "micro_batch_size": 4096}
    r = launch(arguments(data, out, large), memory=200 << 20)
    assert r.end() == [2] and "Traceback" not in r.said(), r.said()
    line = r.said().splitlines()[-1]
    assert "a micro-batch of 4096 x 512 tokens" in line and "--micro_batch_size=2048 " in line


# --------------------------------------------------------------------------------------------------------------- sweeps


@LONG_FORM  # test_sweep.py does this with stand-ins for runs
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells cells that their driver died")
def test_a_sweep_finishes_though_its_driver_and_cells_are_killed(start, launch, data, tmp_path):
    kill_cell = lambda pid, *_: os.kill(pid, signal.SIGKILL)
    acts = [kill_driver, kill_cell, lambda *at: kill_driver(*at) or kill_cell(*at),
            lambda pid, driver, life: driver.send_signal(signal.SIGTERM), kill_cell]
    disturb_a_sweep(start, launch, data, tmp_path, KILLS, acts)


# -------------------------------------------------------------------------------------------------------------- signals

@pytest.mark.parametrize("silent, env, again", [("process", {}, [signal.SIGTERM]),
                                                ("disk", {"SLURM_JOB_ID": "7"}, [signal.SIGTERM, signal.SIGINT])])
def test_a_second_interrupt_does_not_wait(launch, data, out, silent, env, again):
    """The run waits neither for a stopped process nor for a disk that never finishes a checkpoint. If a process is
    stopped, the main thread runs no Python, yet the first interrupt is answered. Under Slurm, which repeats SIGTERM, a
    SIGTERM ends nothing."""
    world, places = (1, [("step", 10), ("write", 1)]) if silent == "disk" else (2, [("step", 10)])
    argv = arguments(data, out, RUN, micro_batch_size=2, checkpoint_interval=1000, eval_interval=0, max_iters=400)
    r = launch(argv, world, env, hold=places)
    assert r.held()
    r.send(signal.SIGSTOP, 1) if silent == "process" else None
    r.send(signal.SIGINT, 0)
    r.go()
    assert silent == "process" or r.held(place=1), "the first interrupt ended the run"
    assert r.until(lambda: "\nSIGINT: the run stops after this micro-batch" in f"\n{r.said()}", "answer")
    for number in again:
        assert r.alive()
        r.send(number, 0)
        r.ranks[0].join(1)
    r.ranks[0].join(PATIENCE)
    assert r.ranks[0].exitcode == 128 + again[-1] and "interrupted at once" in r.said()


SLURM = {
    "srun": """shift; code=0  # after the options comes the command, here for two tasks
for rank in 0 1; do SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" || code=$?; done; exit $code""",
    "scontrol": '[ $1 = show ] && echo 127.0.0.1 || echo "$@" >> "$TOLD"',
    "python": 'echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR "$@" >> "$TOLD"; exit $CODE'}


@pytest.mark.parametrize("code, again", [(0, True), (75, True), (138, True), (2, False)])
def test_slurm_starts_each_rank_and_requeues_an_unfinished_run(tmp_path, code, again):
    """Stand-ins replace Slurm's commands and Python."""
    for name, does in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    told, out = tmp_path / "told", tmp_path / "run"
    env = {**os.environ, "SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "7", "CODE": str(code),
           "SLURM_JOB_NODELIST": "here", "PATH": f"{tmp_path}:{os.environ['PATH']}", "TOLD": str(told)}
    env.pop("PYTHON", None)
    script = ["bash", str(ROOT / "deploy" / "slurm.sh"), str(out), "--seed=1"]
    started = [f"{rank} {rank} 2 2 127.0.0.1 train.py --seed=1 --out_dir={out} --resume=auto" for rank in (0, 1)]
    for result, requeued in ((None, again), ('{\n "steps": ', again), ("", False)):  # no file, half, whole
        if result is not None:
            out.mkdir(exist_ok=True)
            (out / "result.json").write_text(result)
        if result == "":
            write_json(out / "result.json", {"steps": 1})
        assert subprocess.run(script, env=env).returncode == (0 if requeued else code)
        assert told.read_text().splitlines() == started + ["requeue 7"] * requeued
        told.unlink()


def test_the_kubernetes_job_resumes_and_writes_to_its_volume():
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((ROOT / "deploy" / "kubernetes.yaml").read_text())
    container = job["spec"]["template"]["spec"]["containers"][0]
    command = container["command"]
    config = configurator.load(TrainConfig, [str(ROOT / a) if a.startswith("config/") else a
                                             for a in command[command.index("train.py") + 1:]])
    assert config.resume == "auto" and job["kind"] == "Job"
    assert config.out_dir.startswith(container["volumeMounts"][0]["mountPath"])


# ------------------------------------------------------------------------------------------------------------ full disk

@pytest.fixture
def small_disk(tmp_path, request):
    """small_disk(megabytes): a file system of that size."""
    def small_disk(megabytes):
        folder = tmp_path / "disk"
        folder.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder]
        if not root or sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("only root can mount a small file system, and not everywhere")
        request.addfinalizer(lambda: subprocess.run(["umount", "-l", folder]))
        return folder
    return small_disk


def fill(disk):
    with open(disk / "filler", "ab", buffering=0) as f, contextlib.suppress(OSError):
        while True:
            f.write(bytes(4096))


def test_a_run_survives_a_disk_that_is_full_for_a_while(undisturbed, launch, small_disk, data):
    """The run goes on, and its records are complete. While the disk is full, the run logs 30 lines, more than the last
    page of the log can take."""
    disk, first = small_disk(4), 2 * RUN["checkpoint_interval"] + 7
    out = disk / "run"
    r = launch(arguments(data, out, RUN), hold=[("step", first), ("step", first + 30)])
    assert r.held()
    fill(disk)
    r.go()
    assert r.held(place=1), r.said()
    assert "cannot write log.jsonl" in r.said() and "checkpoint not written" in r.said(), r.said()
    checkpoint.load(out / "checkpoint.safetensors")
    (disk / "filler").unlink()
    r.go(1)
    r.succeed()
    assert "log.jsonl is complete again" in r.said() and r.said().count("cannot write log.jsonl") == 1
    assert_same_run(out, undisturbed(1))


@pytest.mark.parametrize("room", [0, pytest.param(300_000, marks=LONG_FORM)])
def test_a_run_on_a_disk_that_stays_full_stops_and_can_be_resumed(launch, small_disk, data, tmp_path, room):
    """The run says that the disk is full, and a resumed run finishes. If there is room for the small records but not
    for a checkpoint, result.json must not say that the run is finished."""
    disk, large = small_disk(12), {**RUN, "n_embd": 64, "max_iters": 120}
    out = disk / "run"
    r = launch(arguments(data, out, large), hold=[("step", 40)])
    assert r.held()
    fill(disk)
    os.truncate(disk / "filler", (disk / "filler").stat().st_size - room)
    r.go()
    assert r.end() == [2] and not (out / "result.json").exists(), r.said()
    line, step = r.said().splitlines()[-1], saved(out)[1]["step"]
    assert f"the last is from step {step}: make room" in line and "--resume=auto" in line
    (disk / "filler").unlink()
    assert f"at step {step}" in launch([*arguments(data, out, large), "--resume=auto"]).succeed().said()
    launch(arguments(data, tmp_path / "whole", large)).succeed()
    assert_same_run(out, tmp_path / "whole")


def test_preparing_data_on_a_full_disk_ends_in_one_line(small_disk):
    disk = small_disk(2)
    command = [sys.executable, str(ROOT / "data" / "pystdlib" / "prepare.py"), "--out", str(disk / "d")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "No space left" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert not any(p.name != ".lock" for p in (disk / "d").iterdir())


STEP = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")  # audit events that change a folder


def test_a_killed_preparation_leaves_a_folder_whole_or_unfinished(tmp_path, monkeypatch):
    """Kills the preparation at each step, or in the short form before each rename, while it replaces the finished files
    of another source of the same size. A second preparation is killed over what is left. After each kill the folder is
    either whole or unfinished. test_data.py does the same for data/tokens."""
    for name, value in (("FULL_CHECK_TOKENS", 0), ("SPOT_CHECKS", 2), ("SPOT_TOKENS", 2)):
        monkeypatch.setattr(prepared, name, value)  # the test itself compares the content
    folder, sound, kills = tmp_path / "d", {}, 0
    prepare = lambda source, at=0: dying(
        at, partial(pystdlib.prepare, folder, stdlib=source, val_fraction=0.2), folder, STEP if CHAOS else STEP[1:2])
    for source in (tmp_path / "of", tmp_path / "if"):
        for i in range(40):
            (source / f"p{i % 4}").mkdir(parents=True, exist_ok=True)
            (source / f"p{i % 4}/m{i}.py").write_text(f"# {i} {source.name}\n" * 50)
        code, steps = prepare(source)
        sound[source] = prepared.Tokens(folder).sha256
    first, second = sound
    assert code == 0 and steps >= 3 and sound[first] != sound[second]
    for at in range(1, steps + 1):
        prepare(first)
        for source in (second, first):
            kills += prepare(source, at)[0] != 0
            try:
                left = prepared.Tokens(folder)
            except prepared.DataError as error:
                assert "prepare" in str(error)
            else:
                left.verify()
                assert left.sha256 in sound.values()
    assert kills > steps and prepare(second)[0] == 0
    assert prepared.Tokens(folder).sha256 == sound[second]
    assert {p.name for p in folder.iterdir()} == {"train.bin", "val.bin", "meta.json", ".lock"}
