"""Training that nothing can kill: every fault is injected for real, and the run must end as if nothing had happened.

    bit for bit = every tensor of the last checkpoint, and every line of log.jsonl but for seconds, speed and memory

Most processes here are forked from one that has imported PyTorch already, so that a process to kill costs a twentieth
of a second and not three. The fork runs train.py as `__main__`; torchrun's workers are started afresh.

    python -m pytest tests/test_chaos.py      the essence of each in a second or a few
    make chaos                                fifty kills instead of three; torchrun, two hosts with a cable: minutes
"""

import contextlib
import errno
import gc
import json
import os
import random
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from test_train import (
    LONG,
    TINY,
    arguments,
    assert_close_run,
    assert_same_run,
    events,
    losses,
    no_picture,
    poisoned,
    record,
    refuse,
    saved,
    stops_at,
    succeed,
    write_data,
)

import checkpoint
import configurator
import distributed
import model
import run as run_module
from data import loader
from data.pystdlib import prepare as pystdlib
from model import LM
from records import write_json
from run import lock_run_dir
from train import TrainConfig

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(checkpoint.__file__).resolve().parent
CHAOS = bool(os.environ.get("LONGHORN_CHAOS"))
LONG_FORM = pytest.mark.skipif(not CHAOS, reason="make chaos only")
KILLS = 50 if CHAOS else 2
STEPS = 400 if CHAOS else 80  # of a run: one process takes 7 ms for each, two on two cores 20, four 40
TIMING = ("seconds", "tokens_per_second", "memory_bytes")
RUN = {**LONG, "max_iters": STEPS, "eval_interval": STEPS // 4, "checkpoint_interval": STEPS // 20, "dtype": "float32"}
root = os.name == "posix" and os.geteuid() == 0


# ------------------------------------------------------------------------------------------------- processes to disturb

def child(argv, env, output, patches):
    """train.py ARGV in a forked process, or patches["main"](ARGV); `patches` make its disk slow, its memory small, or
    LM = patches["LM"](rank)."""
    os.environ.update(env)
    with open(output, "ab") as f:
        os.dup2(f.fileno(), 1), os.dup2(f.fileno(), 2)
    if "slow_disk" in patches:
        fsync = os.fsync
        os.fsync = lambda fd: (Path(patches.get("once", "/")).exists() and time.sleep(patches["slow_disk"]), fsync(fd))
    if "memory" in patches:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + patches["memory"],) * 2)
    run_module.draw_loss = no_picture
    if "LM" in patches:
        model.LM = patches["LM"](int(env.get("RANK", 0)))
    distributed.ROLL_CALL_SECONDS = 1.0  # test_torchrun_brings... waits five as users do
    torch.set_num_threads(1)
    sys.argv = ["train.py", *argv]
    if "main" in patches:
        patches["main"](argv)
    else:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Run:
    """Ranks of one run: started, watched, killed."""

    def __init__(self, context, folder, argv, world, env, patches):
        self.output = [folder / f"rank{rank}.txt" for rank in range(world)]
        self.ranks = []
        all_know = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": free_port()}
        for rank, output in enumerate(self.output):
            output.write_text("")
            ranks = {"RANK": rank, "LOCAL_RANK": rank, **all_know} if world > 1 else {}
            own = {**{name: str(value) for name, value in ranks.items()}, **env}
            self.ranks.append(context.Process(target=child, args=(argv, own, output, patches)))
            self.ranks[-1].start()

    def send(self, number, *ranks):
        for rank in ranks or range(len(self.ranks)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.ranks[rank].pid, number)

    def alive(self):
        return all(r.is_alive() for r in self.ranks)

    def end(self, timeout=200):
        """Exit codes, once all have ended by themselves."""
        deadline = time.time() + timeout
        for r in self.ranks:
            r.join(max(0.1, deadline - time.time()))
        codes = [r.exitcode for r in self.ranks]
        assert None not in codes, f"still running after {timeout} s: {codes} {self.said()}"
        return codes

    def said(self, rank=0):
        return self.output[rank].read_text()

    def until(self, condition, what, timeout=200):
        """Wait for the condition; False if a rank ended before."""
        deadline = time.time() + timeout
        while not condition():
            if not self.alive():
                return bool(condition())
            assert time.time() < deadline, f"no {what} after {timeout} s: {self.said()}"
            time.sleep(0.002)
        return True


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "words")


@pytest.fixture(scope="module")
def undisturbed(nursery, data, tmp_path_factory):
    """undisturbed(world): the folder of a run of RUN by so many processes that nobody disturbed."""
    folders = {}

    def undisturbed(world):
        if world not in folders:
            folder = tmp_path_factory.mktemp("undisturbed")
            folders[world] = folder / "run"
            r = Run(nursery, folder, arguments(data, folders[world], RUN, micro_batch_size=4 // world), world, {}, {})
            assert r.end() == [0] * world, r.said()
        return folders[world]
    return undisturbed


def log_lines(out):
    """log.jsonl without what depends on the clock; every line must be whole."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in e.items() if k not in TIMING} for e in lines]


def assert_bit_for_bit(out, other):
    assert log_lines(out) == log_lines(other)
    assert_same_run(out, other)
    names = [sorted(p.name for p in folder.glob("*.safetensors*")) for folder in (out, other)]
    assert names[0] == names[1], names
    (a, meta_a), (b, meta_b) = (checkpoint.load(folder / "best.safetensors") for folder in (out, other))
    assert meta_a["step"] == meta_b["step"] and all(torch.equal(a[name], t) for name, t in b.items())


def logged(out):
    with contextlib.suppress(OSError, IndexError, ValueError):
        return json.loads((out / "log.jsonl").read_text().splitlines()[-1])["step"]
    return 0


def writing(out):
    """Whether a checkpoint is on its way to the disk."""
    return any(".tmp-" in name and name.split(".tmp-")[0].endswith(".safetensors")
               for name in (os.listdir(out) if out.exists() else ()))


# ------------------------------------------------------------------------------------------------------- kill -9, often

@pytest.mark.parametrize("world", [1, 2])
def test_killed_again_and_again(undisturbed, launch, data, tmp_path, world):
    """In the middle of a write, right at the start, anywhere; a whole node, or one of two processes."""
    chance, number, torn, kills = random.Random(world), 0, 0, 0
    out = tmp_path / "run0"
    argv = lambda: [*arguments(data, out, RUN, micro_batch_size=4 // world), "--resume=auto", "--timeout_minutes=1"]
    while kills < KILLS:
        r = launch(argv(), world, slow_disk=0.03)
        if kills % 5 == 4:
            time.sleep(chance.uniform(0, 0.5))
        else:
            target = logged(out) + chance.randrange(1, STEPS // 9)
            if r.until(lambda t=target, out=out: logged(out) >= t, "progress") and kills % 2 == 0:
                r.until(lambda out=out: writing(out), "checkpoint")
                time.sleep(chance.uniform(0, 0.02))
        ended = not r.alive()
        everyone = world == 1 or kills == 0 or kills > 2 and chance.random() < 0.5
        victims = range(world) if everyone else [chance.randrange(world)]
        r.send(signal.SIGKILL, *victims)
        codes = r.end()
        if ended and codes == [0] * world:  # it was faster: the next one is killed in a run of its own
            assert_bit_for_bit(out, undisturbed(world))
            number += 1
            out = tmp_path / f"run{number}"
            continue
        kills += 1
        torn += writing(out)
        for rank in set(range(world)) - set(victims):
            line = (r.said(rank).splitlines() or [""])[-1]
            met = "micro-batches per step" in r.said(0)  # a kill before that leaves the other nobody to miss
            done = codes[rank] == 0  # its part of the last step was behind it
            assert "no answer from rank" in line and "--resume=auto" in line or not met or done, (line, codes)
    if not (out / "result.json").exists():
        r = launch(argv(), world)
        assert r.end() == [0] * world, r.said()
    assert_bit_for_bit(out, undisturbed(world))
    assert torn >= max(1, KILLS // 10), "no kill struck in the middle of a write"


THREE = {"batch_tokens": 96, "micro_batch_size": 1, "max_iters": 30, "checkpoint_interval": 5, "eval_interval": 15}


@LONG_FORM
@pytest.mark.parametrize("world, old, changes", [
    (3, False, THREE), (2, True, {"micro_batch_size": 2, "max_iters": STEPS * 3 // 8})], ids=["three", "fine-tuning"])
def test_several_processes_killed_once(undisturbed, launch, data, tmp_path, world, old, changes):
    """Of three gradients the order in which they are added shows. Fine-tuning: on both ranks the old weights, and
    after the kill its own."""
    changes = {**changes, "resume": "auto", **({"init_from": undisturbed(2)} if old else {})}
    argv = lambda name: arguments(data, tmp_path / name, RUN, **changes)
    r = launch(argv("whole"), world)
    assert r.end() == [0] * world and [r.said(i).count("weights from") for i in (0, 1)] == [old, 0], r.said()
    assert not old or losses(tmp_path / "whole")[0] < losses(undisturbed(2))[0] - 0.5
    r = launch(argv("run"), world)
    assert r.until(lambda: logged(tmp_path / "run") >= changes["max_iters"] * 2 // 5, "progress")
    r.send(signal.SIGKILL)
    r.end()
    r = launch(argv("run"), world)
    assert r.end() == [0] * world and "continuing from" in r.said() and "weights from" not in r.said(), r.said()
    assert_bit_for_bit(tmp_path / "run", tmp_path / "whole")


def holding(here):
    """An LM; and beside it, in this process, a draw_loss that leaves main's frame in a cycle, which nobody collects
    unasked, and a destroy_process_group that says how much of DistributedDataParallel there still is."""
    gc.disable()
    destroy = torch.distributed.destroy_process_group

    def draw_loss(folder):
        try:
            raise ImportError
        except ImportError as error:
            kept = error  # noqa: F841  frame -> kept -> its traceback -> frame; and from there to all below

    def last():
        left = sum(type(o) is torch.nn.parallel.DistributedDataParallel for o in gc.get_objects())
        print(f"\nholding: {left}", flush=True)
        destroy()

    run_module.draw_loss, torch.distributed.destroy_process_group = draw_loss, last
    return LM


def test_the_group_is_left_when_nothing_else_holds_it(launch, data, tmp_path):
    r = launch(arguments(data, tmp_path / "run", RUN, micro_batch_size=2, max_iters=4), 2, LM=holding)
    assert r.end() == [0, 0], r.said()
    assert [r.said(rank).count("holding: 0\n") for rank in (0, 1)] == [1, 1], r.said()


def test_other_numbers_of_processes_finish_what_two_began(undisturbed, launch, data, tmp_path):
    """Only the last rank is told to stop: all stop after the same step, and the first says so."""
    out = tmp_path / "run"
    for world, until in ((2, STEPS // 3), (1, 3 * STEPS // 4), (4, STEPS)) if CHAOS else ((2, STEPS // 3), (1, STEPS)):
        r = launch([*arguments(data, out, RUN, micro_batch_size=4 // world), "--resume=auto"], world)
        if until < STEPS:
            assert r.until(lambda u=until: logged(out) >= u, "progress")
            r.send(signal.SIGTERM, world - 1)
        assert r.end() == [0] * world, r.said()
        if until < STEPS:
            stopped = f"stopped after step {saved(out)[1]['step']} "
            assert [stopped in r.said(rank) for rank in range(world)] == [True, False][:world], r.said()
    assert list(events(out)) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(losses(out)[:20], losses(undisturbed(1))[:20], rtol=2e-5)
    worst = max(abs(a / b - 1) for a, b in zip(losses(out), losses(undisturbed(1)), strict=True))
    assert worst < 1e-3, worst  # other batches differ by 0.1 and more


def test_two_processes_train_as_one(launch, data, tmp_path):
    """Six windows a rank, in micro-batches of 5 and 1."""
    out, one = tmp_path / "two", tmp_path / "one"
    succeed(arguments(data, one))
    r = launch(arguments(data, out, micro_batch_size=5), 2)
    assert r.end() == [0, 0], r.said()
    assert_close_run(out, one)
    derived = record(out, "config")["derived"]
    assert derived["processes"] == 2 and derived["accumulation"] == 2
    assert r.said().count("val_loss") == 3 and r.said().count(" parameters; ") == 1
    assert not any(words in r.said(1) for words in ("val_loss", " parameters; ", "step "))  # rank 0 alone speaks
    assert record(out)["val_tokens"] == 699
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in one.iterdir())


@pytest.mark.parametrize("stopped", [1, 0] if CHAOS else [1])
def test_a_process_that_hangs_is_named(launch, data, tmp_path, stopped):
    argv = arguments(data, tmp_path / "run", RUN, micro_batch_size=2, eval_interval=0, timeout_minutes=0.06)
    r = launch(argv, 2)
    assert r.until(lambda: logged(tmp_path / "run") >= 10, "progress")
    began = time.time()
    r.send(signal.SIGSTOP, stopped)
    r.ranks[1 - stopped].join(120)
    assert r.ranks[1 - stopped].exitcode == distributed.EXIT_RETRYABLE and 3 < time.time() - began < 100
    line = r.said(1 - stopped).splitlines()[-1]
    assert f"rank {1 - stopped} on " in line and f"no answer from rank {stopped}" in line and "Timed out" in line, line


def test_a_process_that_nobody_joins_says_so(launch, data, tmp_path):
    alone = []
    for rank in (0, 1):  # both at a time, each at a door of its own
        env = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": str(free_port())}
        alone.append(launch([*arguments(data, tmp_path / f"run{rank}", RUN), "--timeout_minutes=0.02"], env=env))
    for rank, r in enumerate(alone):
        assert r.end() == [distributed.EXIT_RETRYABLE], r.said()
        lines = [line for line in r.said().splitlines() if line.startswith("train.py: error: ")]
        assert f"rank {rank}: not all 2 processes met within" in lines[-1] and "Traceback" not in r.said(), r.said()


# ------------------------------------------------------------------------------------------------------------- torchrun

def torchrun(*how):
    return [sys.executable, "-m", "torch.distributed.run", *how, str(ROOT / "train.py")]


def workers_of(pid):
    """Ids of a process's children, by their rank."""
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            env = dict(e.split("=", 1) for e in Path(f"/proc/{child}/environ").read_text().split("\0") if "=" in e)
            if "RANK" in env:
                found[int(env["RANK"])] = int(child)
    return found


def wait_until(condition, what, process, timeout=240):
    deadline = time.time() + timeout
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode} before {what}: {process.said()[-3000:]}"
        assert time.time() < deadline, f"no {what} after {timeout} s: {process.said()[-3000:]}"
        time.sleep(0.01)


@LONG_FORM
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_torchrun_brings_a_killed_worker_back(undisturbed, launch, start, data, tmp_path):
    """Its second attempt goes on from the last checkpoint; SIGTERM to torchrun itself then saves, and one more ends
    it."""
    out = tmp_path / "run"
    argv = [*arguments(data, out, RUN, micro_batch_size=2), "--resume=auto"]
    agent = start([*torchrun("--standalone", "--nproc_per_node=2", "--max-restarts=2"), *argv])
    wait_until(lambda: logged(out) >= 50, "progress", agent)
    every = RUN["checkpoint_interval"]
    os.kill(workers_of(agent.pid)[1], signal.SIGKILL)
    wait_until(lambda: "continuing from" in agent.said(), "restart", agent)
    step = int(agent.said().split("continuing from")[1].split(" at step ")[1].split()[0])
    assert step >= 50 - 2 * every and step % every == 0 and "rank 0 on " in agent.said()
    wait_until(lambda: logged(out) > step + 20, "progress", agent)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(120) != 0 and "stopped after step" in agent.said()  # torchrun does not pass the workers' 0 on
    stopped = saved(out)[1]["step"]
    assert stopped == max(events(out)) and f"stopped after step {stopped} " in agent.said()
    r = launch(argv, 2)
    assert r.end() == [0, 0], r.said()
    assert log_lines(out) == log_lines(undisturbed(2))
    assert_same_run(out, undisturbed(2))


def test_torchrun_that_would_begin_anew_is_refused(data, tmp_path):
    with mock.patch.dict(os.environ, TORCHELASTIC_MAX_RESTARTS="2"):
        refuse(arguments(data, tmp_path / "run"), "resume=never", "--max-restarts", "--resume=auto")


@LONG_FORM
@pytest.mark.skipif(not (root and shutil.which("ip")), reason="as root, with iproute2's network namespaces")
def test_two_hosts_survive_a_cut_cable(undisturbed, start, data, tmp_path):
    """Two network namespaces joined by a cable; torchrun on each, in a loop as a service manager would have it. Both
    end the run once the cable is back."""
    ip = lambda words: subprocess.run(["ip", *words.split()], check=True, capture_output=True)
    out, nodes, hosts = tmp_path / "run", [], [f"longhorn_{os.getpid()}_{i}" for i in range(2)]
    said = lambda: "".join(node.said() for node in nodes)
    argv = arguments(data, out, RUN, micro_batch_size=2, max_iters=400, resume="auto", timeout_minutes=0.1)
    loop = 'for i in 1 2 3 4 5 6 7 8; do "$@" && exit 0; sleep 1; done; exit 1'
    try:
        for host in hosts:
            ip(f"netns add {host}")
        ip(f"link add lh0 netns {hosts[0]} type veth peer name lh1 netns {hosts[1]}")
        for i, host in enumerate(hosts):
            ip(f"-n {host} addr add 10.77.0.{i + 1}/24 dev lh{i}")
            for link in (f"lh{i}", "lo"):
                ip(f"-n {host} link set {link} up")
            command = torchrun("--nnodes=2", "--nproc_per_node=1", "--max-restarts=3", "--rdzv-backend=c10d",
                               "--rdzv-id=chaos", "--rdzv-endpoint=10.77.0.1:29400", f"--local-addr=10.77.0.{i + 1}",
                               f"--rdzv-conf=is_host={1 - i},join_timeout=120,read_timeout=10")
            nodes.append(start(["ip", "netns", "exec", host, "bash", "-c", loop, "_", *command, *argv],
                               GLOO_SOCKET_IFNAME=f"lh{i}", TP_SOCKET_IFNAME=f"lh{i}"))
        wait_until(lambda: logged(out) >= 100, "progress", nodes[0])
        ip(f"-n {hosts[1]} link set lh1 down")
        wait_until(lambda: "no answer from rank" in said(), "complaint", nodes[0])
        ip(f"-n {hosts[1]} link set lh1 up")
        assert [node.wait(240) for node in nodes] == [0, 0] and "continuing from" in said(), said()[-3000:]
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host], capture_output=True)
    assert log_lines(out) == log_lines(undisturbed(2))
    assert_same_run(out, undisturbed(2))


# ----------------------------------------------------------------------------------------------------------- not finite

def not_finite(of, how, here):
    """The LM of rank `here`, whose loss or gradient is not a number in steps 5, 6 and 12 on rank `of`, or on both
    (None)."""
    # the first batch is before the steps, see DDP in run.py
    return poisoned({6, 7, 13}, how) if of in (None, here) else LM


@pytest.mark.parametrize("how", ["loss", "gradient"] if CHAOS else ["loss"])
def test_what_is_not_finite_on_one_rank_is_skipped_on_both(launch, data, tmp_path, how):
    """Were it not, the weights of the two would part, and all losses after it."""
    for of in (None, 1, 0) if CHAOS else (None, 1):
        out = tmp_path / str(of)
        argv = arguments(data, out, RUN, micro_batch_size=2, max_iters=16)
        r = launch(argv, 2, LM=partial(not_finite, of, how))
        assert r.end() == [0, 0], r.said()
        assert list(events(out, "skipped")) == [5, 6, 12] and r.said().count("step skipped") == 3
        assert record(out)["skipped_steps"] == 3
        assert_same_run(out, tmp_path / "None")


# --------------------------------------------------------------------------------------------------------------- memory

def small_memory(limit):
    """An LM that runs out of memory in training with more than so many sequences, or that computes logits."""
    class Small(LM):
        seen = []

        def forward(self, idx, targets=None, **how):
            if self.training and (len(idx) > limit or not how.get("loss_only")):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            Small.seen.extend([len(idx)] * self.training)
            return super().forward(idx, targets, **how)
    return Small


def test_out_of_memory_says_how_to_go_on(data, tmp_path):
    argv, asks = partial(arguments, data, tmp_path / "run"), ("micro-batch of 12 x 32", "--micro_batch_size=6")
    line = refuse(argv(), *asks, "--resume=auto", "--auto_micro_batch", LM=small_memory(5))
    assert "--micro_batch_size=12" not in line
    refuse(argv(micro_batch_size=1), "1 x 32", "block_size", LM=small_memory(0))
    refuse(argv(auto_micro_batch=True), "1 x 32", "block_size", LM=small_memory(0))

    class Fails(LM):
        def forward(self, idx, targets=None, **how):
            if not self.training:
                raise MemoryError("unable to allocate")
            return super().forward(idx, targets, **how)

    refuse(argv(), *asks, LM=Fails)
    with mock.patch.object(torch.optim.AdamW, "step", side_effect=torch.OutOfMemoryError("CUDA out of memory.")):
        refuse(argv(), *asks)


def test_auto_micro_batch(data, tmp_path):
    LM, out = small_memory(7), tmp_path / "run"
    succeed(arguments(data, out, auto_micro_batch=True, micro_batch_size=64, eval_interval=0), LM=LM)
    config = record(out, "config")
    assert max(LM.seen) <= 7 and config["config"]["micro_batch_size"] == 6 and config["derived"]["accumulation"] == 2
    succeed(arguments(data, tmp_path / "by_hand", micro_batch_size=6, eval_interval=0))
    assert losses(out) == losses(tmp_path / "by_hand")  # the search leaves no trace


def one_is_smaller(here):
    return small_memory(3 - 2 * here)


@LONG_FORM
def test_auto_micro_batch_is_what_fits_on_every_rank(launch, data, tmp_path):
    argv = lambda name, **how: arguments(data, tmp_path / name, RUN, max_iters=8, eval_interval=0, **how)
    r = launch(argv("run", micro_batch_size=2, auto_micro_batch=True), 2, LM=one_is_smaller)
    assert r.end() == [0, 0], r.said()
    config = record(tmp_path / "run", "config")
    assert config["config"]["micro_batch_size"] == 1 and config["derived"]["accumulation"] == 2
    r = launch(argv("by_hand", micro_batch_size=1), 2)
    assert r.end() == [0, 0] and losses(tmp_path / "run") == losses(tmp_path / "by_hand")


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_memory_that_really_runs_out(launch, data, tmp_path):
    """2^21 tokens of 32 numbers, 268 MB, are more than it may take; a real error of the allocator, in its own words."""
    large = {**TINY, "block_size": 512, "batch_tokens": 2**21, "micro_batch_size": 4096, "eval_interval": 0}
    r = launch(arguments(data, tmp_path / "run", large), memory=200 << 20)
    assert r.end() == [2] and "Traceback" not in r.said(), r.said()
    line = r.said().splitlines()[-1]
    assert "a micro-batch of 4096 x 512 tokens" in line and "--micro_batch_size=2048 " in line


# -------------------------------------------------------------------------------------------------------------- signals

def test_a_second_interrupt_ends_at_once(launch, data, tmp_path):
    out = tmp_path / "run"
    argv = arguments(data, out, RUN, checkpoint_interval=1000, eval_interval=0, max_iters=400)
    r = launch(argv, slow_disk=60, once=tmp_path / "slow")
    assert r.until(lambda: logged(out) >= 10, "progress")
    (tmp_path / "slow").touch()
    r.send(signal.SIGINT)
    assert r.until(lambda: writing(out) or (out / "log.jsonl").stat().st_size == 0 or not time.sleep(1), "stop")
    began = time.time()
    r.send(signal.SIGINT)
    assert r.end(40) == [130] and time.time() - began < 40 and "interrupted at once" in r.said()


def test_a_second_interrupt_does_not_wait_for_the_others(launch, data, tmp_path):
    out = tmp_path / "run"
    r = launch(arguments(data, out, RUN, micro_batch_size=2, eval_interval=0, max_iters=400, timeout_minutes=5), 2)
    assert r.until(lambda: logged(out) >= 10, "progress")
    r.send(signal.SIGSTOP, 1)
    time.sleep(0.5)
    r.send(signal.SIGINT, 0)
    time.sleep(0.5)
    assert r.ranks[0].is_alive()
    r.send(signal.SIGINT, 0)
    r.ranks[0].join(20)
    assert r.ranks[0].exitcode == 130 and "interrupted at once" in r.said()


SLURM = {
    "srun": """shift; code=0  # after the options comes the command, here for two tasks
for rank in 0 1; do SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" || code=$?; done; exit $code""",
    "scontrol": '[ $1 = show ] && echo 127.0.0.1 || echo "$@" >> $TOLD',
    "python": 'echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR "$@" >> $TOLD; exit $CODE'}


@pytest.mark.parametrize("code, again", [(0, True), (75, True), (138, True), (2, False)])
def test_what_slurm_starts_and_queues_again(tmp_path, code, again):
    """Under stand-ins for its commands and for Python; test_train.py warns a run."""
    for name, does in SLURM.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    told, out = tmp_path / "told", tmp_path / "run"
    env = {**os.environ, "SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "7", "CODE": str(code),
           "SLURM_JOB_NODELIST": "here", "PATH": f"{tmp_path}:{os.environ['PATH']}", "TOLD": str(told)}
    env.pop("PYTHON", None)
    script = ["bash", str(ROOT / "deploy" / "slurm.sh"), str(out), "--seed=1"]
    started = [f"{rank} {rank} 2 2 127.0.0.1 train.py --seed=1 --out_dir={out} --resume=auto" for rank in (0, 1)]
    assert subprocess.run(script, env=env).returncode == (0 if again else code)
    assert told.read_text().splitlines() == started + ["requeue 7"] * again
    told.unlink()
    out.mkdir()
    (out / "result.json").write_text('{\n "steps": ')  # of a run that a kill or a full disk cut short
    assert subprocess.run(script, env=env).returncode == (0 if again else code)
    told.unlink()
    write_json(out / "result.json", {"steps": 1})
    assert subprocess.run(script, env=env).returncode == code and told.read_text().splitlines() == started


def test_the_kubernetes_job():
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((ROOT / "deploy" / "kubernetes.yaml").read_text())
    container = job["spec"]["template"]["spec"]["containers"][0]
    command = container["command"]
    config = configurator.load(TrainConfig, [str(ROOT / a) if a.startswith("config/") else a
                                             for a in command[command.index("train.py") + 1:]])
    assert config.resume == "auto" and job["kind"] == "Job"
    assert config.out_dir.startswith(container["volumeMounts"][0]["mountPath"])


# ------------------------------------------------------------------------------------------------- the run's own folder

def test_nothing_is_read_before_the_folder_is_locked(data, tmp_path):
    """Or a run that is about to save would be taken for one without a checkpoint, and moved aside."""
    out, candidates, asked = tmp_path / "run", checkpoint.candidates, []

    def look(folder):
        asked.append(folder)
        with pytest.raises(configurator.ConfigError, match="another run writes to"):
            lock_run_dir(out)
        return candidates(folder)

    with mock.patch.object(checkpoint, "candidates", look):
        succeed(arguments(data, out, resume="auto"))
    assert asked
    lock = lock_run_dir(out)
    refuse(arguments(data, out), "another run writes to", str(out))
    lock.close()


def test_an_out_dir_that_cannot_be_moved_locked_or_written_to(data, tmp_path):
    """A mount point gets one line; a network file system may have no locks."""
    out = tmp_path / "run"
    with mock.patch("fcntl.flock", side_effect=OSError(errno.ENOSYS, "No locks")):
        assert "cannot be locked (No locks)" in succeed(arguments(data, out, max_iters=2)).out
    with mock.patch.object(run_module.os, "rename", side_effect=OSError(errno.EBUSY, "Device or resource busy")):
        refuse(arguments(data, out, max_iters=2), f"cannot write to {out} (Device or resource busy)", "another out_dir")
    (tmp_path / "file").write_text("")
    refuse(arguments(data, tmp_path / "file" / "run"), str(tmp_path / "file"), "out_dir")


@pytest.mark.parametrize("world", [1, 2] if CHAOS else [1])
def test_a_result_that_was_lost_is_made_again_without_a_second_evaluation(launch, data, tmp_path, world):
    out = tmp_path / "run"
    argv = arguments(data, out, RUN, micro_batch_size=4 // world, max_iters=8, eval_interval=4)
    assert launch(argv, world).end() == [0] * world
    before, result = log_lines(out), record(out)
    (out / "result.json").unlink()
    assert launch([*argv, "--resume=auto"], world).end() == [0] * world
    assert log_lines(out) == before and all(record(out)[key] == result[key] for key in ("val_loss", "steps"))


@pytest.mark.parametrize("line", ["max_iters = 10**400", "n_embd = 10**24", "vocab_size = 10**19", "grad_clip = 1e999",
                                  "learning_rate = 1e999 - 1e999", "eval_block_size = 10**25",
                                  "batch_tokens = 384 * 10**9"])
def test_numbers_beyond_reason(data, tmp_path, line):
    name = line.split()[0]
    (tmp_path / "c.py").write_text(line + "\n")
    argv = [a for a in arguments(data, tmp_path / "run") if not a.startswith(f"--{name}=")]
    refuse([str(tmp_path / "c.py"), *argv], name)


def test_a_checkpoint_of_another_shape_gets_one_line(data, tmp_path):
    path, once = tmp_path / "run" / "checkpoint.safetensors", {"keep_checkpoints": 1, "eval_interval": 0}
    succeed(arguments(data, path.parent, **once), LM=stops_at(5))
    tensors, meta = checkpoint.load(path)
    for broken in ({**meta, "step": "five"}, {k: v for k, v in meta.items() if k != "bad"}, {**meta, "config": 7}):
        checkpoint.save(path, tensors, broken)
        refuse(arguments(data, path.parent, **once, resume="auto"), str(path))
    name = next(n for n in tensors if n.endswith("embed.weight"))
    checkpoint.save(path, {**tensors, name: tensors[name][:5]}, meta)
    refuse(arguments(data, path.parent, **once, resume="auto"), "does not fit this run")


# ------------------------------------------------------------------------------------------------------------ full disk

@pytest.fixture
def small_disk(tmp_path):
    """small_disk(megabytes): a file system of that size."""
    mounted = []

    def small_disk(megabytes):
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder],
                          capture_output=True).returncode:
            pytest.skip("cannot mount a small file system here")
        mounted.append(folder)
        return folder
    if not root or sys.platform != "linux":
        pytest.skip("only root can mount a small file system")
    yield small_disk
    for folder in mounted:
        subprocess.run(["umount", "-l", folder])


def fill(disk):
    with open(disk / "filler", "ab", buffering=0) as f, contextlib.suppress(OSError):
        while True:
            f.write(bytes(4096))


def test_a_full_disk_while_training(undisturbed, launch, small_disk, data, tmp_path):
    """Full for a while: the run goes on, and its records are whole. Full to the end: it says so, and ends after a
    resume."""
    disk = small_disk(4)

    def fill_under(name):
        r = launch(arguments(data, disk / name, RUN))
        assert r.until(lambda: logged(disk / name) >= 2 * RUN["checkpoint_interval"] + 7, "progress")
        fill(disk)
        return disk / name, r

    out, r = fill_under("run")

    def complaint():
        fill(disk)  # again: a checkpoint that was not written leaves room
        return "cannot write log.jsonl" in r.said() and "checkpoint not written" in r.said()

    assert r.until(complaint, "complaint"), r.said()
    checkpoint.load(out / "checkpoint.safetensors")
    (disk / "filler").unlink()
    assert r.end() == [0], r.said()
    assert "log.jsonl is complete again" in r.said() and r.said().count("cannot write log.jsonl") == 1
    assert log_lines(out) == log_lines(undisturbed(1))
    assert_same_run(out, undisturbed(1))

    out, r = fill_under("again")
    assert r.end() == [2], r.said()
    assert "make room" in r.said().splitlines()[-1] and "--resume=auto" in r.said().splitlines()[-1], r.said()
    assert not (out / "result.json").exists()
    step = saved(out)[1]["step"]
    (disk / "filler").unlink()
    r = launch([*arguments(data, out, RUN), "--resume=auto"])
    assert r.end() == [0] and f"at step {step}" in r.said(), r.said()
    assert log_lines(out) == log_lines(undisturbed(1))
    assert_same_run(out, undisturbed(1))


@LONG_FORM
def test_a_disk_too_full_for_the_last_checkpoint_only(launch, small_disk, data):
    """Where the small records still fit, result.json must not say that the run is finished."""
    disk = small_disk(12)
    out = disk / "run"
    large = {**RUN, "n_embd": 64, "max_iters": 120}
    r = launch(arguments(data, out, large))
    assert r.until(lambda: logged(out) >= 40, "progress")
    fill(disk)
    os.truncate(disk / "filler", (disk / "filler").stat().st_size - 300_000)
    assert r.end() == [2], r.said()
    line = r.said().splitlines()[-1]
    assert "the last one is of step" in line and "--resume=auto" in line and not (out / "result.json").exists()
    (disk / "filler").unlink()
    r = launch([*arguments(data, out, large), "--resume=auto"])
    assert r.end() == [0] and saved(out)[1]["step"] == 120 and (out / "result.json").exists(), r.said()


def test_no_picture_is_worth_a_run(data, tmp_path):
    draw_loss = mock.Mock(side_effect=ImportError("failed to map segment"))
    said = succeed(arguments(data, tmp_path / "run"), draw_loss=draw_loss).out
    assert draw_loss.called and said.count("no loss.png: failed to map segment") == 1
    assert not (tmp_path / "run" / "loss.png").exists()


def test_a_full_disk_while_preparing(small_disk):
    disk = small_disk(2)
    command = [sys.executable, str(ROOT / "data" / "pystdlib" / "prepare.py"), "--out", str(disk / "d")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "No space left" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert not any(p.name != ".lock" for p in (disk / "d").iterdir())


# --------------------------------------------------------------------------------------------- data under a running job

def edit(path):
    with open(path, "r+b") as f:
        f.write(b"a")


@pytest.mark.parametrize("change, words", [
    (lambda path: os.truncate(path, 7000), ["train.bin", "8,000 bytes then, 7,000 now"]),
    (lambda path: path.unlink(), ["train.bin", "No such file"]),
    (lambda path: os.replace(shutil.copy2(path, f"{path}.new"), path), ["train.bin", "replaced"]),
    (lambda path: edit(path.with_name("val.bin")), ["val.bin", "written to"])],
    ids=["cut", "gone", "replaced", "edited"])
def test_data_that_change_under_the_run(data, tmp_path, change, words):
    folder = tmp_path / "data"
    shutil.copytree(data, folder)

    class Changes(LM):
        calls = 0

        def forward(self, idx, targets=None, **keys):
            Changes.calls += self.training
            if self.training and Changes.calls == 7:
                change(folder / "train.bin")
            return super().forward(idx, targets, **keys)

    refuse(arguments(folder, tmp_path / "run"), "changed during the run", "--resume=auto", *words, LM=Changes)
    assert saved(tmp_path / "run")[1]["step"] == 5  # the last good one


def test_large_data_that_changed_while_the_run_was_down(data, tmp_path, monkeypatch):
    """Content of a large file is not looked at whenever it is opened, but where its size or time is not the
    checkpoint's."""
    monkeypatch.setattr(loader, "FULL_CHECK_TOKENS", 100)
    folder, out = tmp_path / "data", tmp_path / "run"
    shutil.copytree(data, folder)
    succeed(arguments(folder, out), LM=stops_at(5))
    times = (folder / "train.bin").stat()
    edit(folder / "train.bin")
    refuse(arguments(folder, out, resume="auto"), "train.bin is not the file meta.json describes")
    shutil.copy(data / "train.bin", folder / "train.bin")  # with a time of its own
    verified = mock.Mock(wraps=loader.Tokens.verify, side_effect=lambda: None)
    monkeypatch.setattr(loader.Tokens, "verify", verified)
    succeed(arguments(folder, out, resume="auto"), LM=stops_at(7))
    assert verified.call_count == 1
    succeed(arguments(folder, out, resume="auto"), LM=stops_at(9))
    assert verified.call_count == 1 and times.st_mtime_ns != (folder / "train.bin").stat().st_mtime_ns


# -------------------------------------------------------------------------------------------------- killed preparations

def doomed(folder, source, at, output):
    """A preparation that ends itself at its n-th opening, renaming or removal of something in the folder; at = 0 counts
    them."""
    seen = 0

    def watch(event, args):
        nonlocal seen
        if event in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir") and str(folder) in str(args[0]):
            seen += 1
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    pystdlib.prepare(folder, stdlib=source, val_fraction=0.2)
    output.write_text(str(seen))


def test_a_preparation_killed_again_and_again(nursery, tmp_path, monkeypatch):
    """At any of its steps, or at four, in turn of two sources that give files of the same sizes: what is left is whole,
    or unfinished. test_data.py kills that of data/tokens."""
    source, steps = [tmp_path / "one", tmp_path / "two"], []
    for folder, word in zip(source, ("of", "if"), strict=True):
        for i in range(40):
            path = folder / f"p{i % 4}" / f"m{i}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"# {i} {word}\n" * 50)
    for name, value in (("FULL_CHECK_TOKENS", 0), ("SPOT_CHECKS", 2), ("SPOT_TOKENS", 2)):
        monkeypatch.setattr(loader, name, value)  # content is for us to look at

    def prepare(folder, source, at=0):
        process = nursery.Process(target=doomed, args=(folder, source, at, tmp_path / "steps"))
        process.start()
        process.join(120)
        assert process.exitcode in (0, -signal.SIGKILL), "see above, what it wrote to standard error"
        return process.exitcode

    for i in (0, 1):
        assert prepare(tmp_path / f"whole{i}", source[i]) == 0
        steps.append(int((tmp_path / "steps").read_text()))
    sound = [loader.Tokens(tmp_path / f"whole{i}").sha256 for i in (0, 1)]
    sizes = [[(tmp_path / f"whole{i}" / f"{split}.bin").stat().st_size for split in loader.SPLITS] for i in (0, 1)]
    assert steps[0] == steps[1] > 8 and sizes[0] == sizes[1] and sound[0] != sound[1]
    folder, kills = tmp_path / "d", 0
    moments = random.Random(0).sample(range(1, steps[0] + 1), steps[0] if CHAOS else 4)
    for i, at in enumerate(moments):
        if i % 3 == 0:  # over a whole one
            assert prepare(folder, source[0]) == 0
            assert loader.Tokens(folder).sha256 == sound[0]
        kills += prepare(folder, source[1 if i % 3 == 0 else i % 2], at) != 0
        try:
            left = loader.Tokens(folder)
        except loader.DataError as error:
            assert "prepare" in str(error)
        else:
            left.verify()
            assert left.sha256 in sound
    assert kills > i / 2 and prepare(folder, source[1]) == 0
    assert loader.Tokens(folder).sha256 == sound[1]
    assert {p.name for p in folder.iterdir()} == {"train.bin", "val.bin", "meta.json", ".lock"}
