"""Holds, kills and disturbs processes at a chosen place."""

import contextlib
import datetime
import multiprocessing
import os
import random
import re
import resource
import runpy
import signal
import socket
import sys
import tempfile
import textwrap
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers import LONG, ROOT, arguments, assert_same_run, no_picture

import model
from runtime import checkpoint, distributed, telemetry

# A program that stands in for a run. It notes its start, its end and its environment, saves when asked to stop, and
# resumes.
STAND_IN = textwrap.dedent(f"""
    import json, os, pathlib, signal, sys, time
    sys.path.insert(0, {str(ROOT)!r})
    from common.files import lock_folder
    settings = dict(a[2:].split("=", 1) for a in sys.argv[1:] if a.startswith("--"))
    out = pathlib.Path(settings["out_dir"]); out.mkdir(parents=True, exist_ok=True)
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    note = lambda event: open(out / "notes", "a").write(f"{{event}} {{time.time()}}\\n")
    note("started")
    lock = lock_folder(out, wait=60)
    at = len(list(out.glob("checkpoint*")))
    note(f"from{{at}}")
    (out / "pid").write_text(str(os.getpid()))
    (out / "env").write_text(json.dumps(dict(os.environ)))
    if "needs" in settings:
        __import__(settings["needs"])
    if "quiet" in settings:
        sys.exit(0)
    if settings.get("fail"):
        print("Traceback ..."); print("out of luck with " + settings["fail"]); sys.exit(3)
    if gate := settings.get("gate"):  # wait for the test, or until asked to stop
        (out / "held").touch()
        while not pathlib.Path(gate).exists() and (not asked or "deaf" in settings):
            time.sleep(0.01)
        if asked:  # a large checkpoint on a slow disk
            (out / "saving").touch()
            while not pathlib.Path(gate).exists():
                time.sleep(0.01)
            (out / f"checkpoint-{{at}}.safetensors").touch(); note("saved"); sys.exit(0)
    while len(list(out.parent.glob("*/pid"))) < int(settings.get("together", 0)):
        time.sleep(0.01)
    (out / "result.json").write_text(json.dumps({{"val_loss": 1.0, "steps": 1}})); note("ended")
""")


def notes(folder, name):
    return [line.split() for line in (folder / name / "notes").read_text().splitlines()]


def cell_events(folder, name):
    return [event for event, _ in notes(folder, name)]


DRIVER = """
import sys; sys.path.insert(0, {repo!r})
from types import SimpleNamespace
from experiments.sweeps import engines, runner
from common.errors import main_error
engines.Slurm.poll_seconds = 0.5
cells = [runner.Cell(name, argv) for name, argv in {cells!r}.items()]
with main_error("driver"):
    try:
        args = SimpleNamespace(cluster={cluster!r}, cluster_args={cluster_args!r})
        with runner.driver(args, {folder!r}, {jobs}) as engine:
            print("failed", runner.run_cells(cells, {folder!r}, engine, {script!r}))
    except KeyboardInterrupt as stopped:
        print("stopped:", stopped)
"""


def drive(start, folder, script, cells, cluster="", cluster_args="", jobs=2):
    """Start a process that drives a sweep of cells {name: argv}. start: the fixture in conftest.py."""
    return start([sys.executable, "-c", DRIVER.format(
        repo=str(ROOT), folder=str(folder), script=str(script), cells=cells, cluster=cluster, cluster_args=cluster_args,
        jobs=jobs)])


def gated(folder, n=4):
    """Return n cells. The first two wait until the file `gate` exists."""
    return {f"c{i}": [f"--gate={folder}/gate"] if i < 2 else [] for i in range(n)}


def wait_until(true, seconds=120):
    end = time.time() + seconds
    while not true():
        assert time.time() < end, "it did not happen in time"
        time.sleep(0.02)


def both_have(folder, name):
    return lambda: all((folder / cell / name).exists() for cell in ("c0", "c1"))


CHAOS = bool(os.environ.get("LONGHORN_CHAOS"))
LONG_FORM = pytest.mark.skipif(not CHAOS, reason="make chaos only")
STEPS = 400 if CHAOS else 80  # per run; a step takes 7 ms with one process, on two cores 20 with two, 40 with four
RUN = {**LONG, "max_iters": STEPS, "eval_interval": STEPS // 4, "checkpoint_interval": STEPS // 20, "dtype": "float32"}
PATIENCE = 600  # seconds; only a hang takes this long, however busy the machine is


def child(argv, env, output, patches):
    """Run train.py ARGV, or patches["main"](ARGV), in this forked process. Other patches hold it at places (see
    Holding), limit its memory, or set LM = patches["LM"](rank)."""
    os.environ.update(env)
    with open(output, "ab") as f:
        os.dup2(f.fileno(), 1), os.dup2(f.fileno(), 2)
    if "hold" in patches:
        Holding(output.parent, patches["hold"], patches.get("folder"), patches.get("patience"))
    if "memory" in patches:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + patches["memory"],) * 2)
    telemetry.draw_loss = no_picture
    if "LM" in patches:
        model.LM = patches["LM"](int(env.get("RANK", 0)))
    if "patience" not in patches:
        distributed.ROLL_CALL_SECONDS = 1.0  # users wait five
    torch.set_num_threads(1)
    sys.argv = ["train.py", *argv]
    if "main" in patches:
        patches["main"](argv)
    else:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")


class Holding:
    """Stops the process that creates it at places [(kind, n), ...], in this order, until the test lets it go on.

        step     in the n-th step of the process, between the backward and the optimiser's step
        write    in the middle of a checkpoint, at the n-th tensor that the process writes
        open     at the n-th opening of a file in `folder`

    At place i it creates held-i-RANK in `gates` and waits for go-i. If go-0 exists when a process starts, the process
    waits at place 1, and so on: a killed run is held at the next place after a restart. `patience`: once released,
    processes wait this many seconds for each other. Before that, a busy machine may need longer.
    """

    def __init__(self, gates, places, folder=None, patience=None):
        self.gates, self.places, self.counts = gates, places, dict.fromkeys(("step", "write", "open"), 0)
        self.patience = patience and datetime.timedelta(seconds=patience)
        self.next = sum((gates / f"go-{i}").exists() for i in range(len(places)))
        clip_grad_norm_, crc32 = torch.nn.utils.clip_grad_norm_, zlib.crc32

        def clip(*args, **kwargs):
            norm = clip_grad_norm_(*args, **kwargs)
            self.reached("step")
            return norm

        def checksum(data, *start):
            if isinstance(data, np.ndarray):  # a tensor being written; a file being read comes as bytes
                self.reached("write")
            return crc32(data, *start)

        def watch(event, args):
            if event == "open" and str(args[0]).startswith(str(folder)):
                self.reached("open")

        torch.nn.utils.clip_grad_norm_, zlib.crc32 = clip, checksum
        if folder:
            sys.addaudithook(watch)

    def reached(self, kind):
        self.counts[kind] += 1
        if self.places[self.next:self.next + 1] == [(kind, self.counts[kind])]:
            go, self.next = self.gates / f"go-{self.next}", self.next + 1
            (self.gates / f"held-{self.next - 1}-{os.environ.get('RANK', 0)}").touch()
            while not go.exists():
                time.sleep(0.002)
            if self.patience:
                dist.distributed_c10d._set_pg_timeout(self.patience, dist.group.WORLD)


def reserve_port():
    """Return a UDP socket whose port is free for TCP. While the socket is open, no other test takes its port, here or
    in another suite. Outgoing connections have higher ports."""
    while True:
        reserved, free = socket.socket(type=socket.SOCK_DGRAM), socket.socket()
        try:
            reserved.bind(("127.0.0.1", random.SystemRandom().randrange(15_000, 32_000)))
            free.bind(("", reserved.getsockname()[1]))
            return reserved
        except OSError:
            reserved.close()
        finally:
            free.close()


def torchrun_env(rank, world, port):
    """The environment variables that torchrun sets for a process."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}


def until(process, condition, event):
    """Wait for the condition. Returns False if a process ended first."""
    deadline = time.time() + PATIENCE
    while not condition():
        if not process.alive():
            return bool(condition())
        assert time.time() < deadline, f"no {event} after {PATIENCE} s: {process.said()[-3000:]}"
        time.sleep(0.002)
    return True


class Run:
    """The processes of one run, to start, hold, watch and kill."""

    until = until

    def __init__(self, context, folder, argv, world, env, patches):
        self.folder, self.output = folder, [folder / f"rank{rank}.txt" for rank in range(world)]
        self.ranks, self.reserved = [], reserve_port()
        for rank, output in enumerate(self.output):
            output.write_text("")
            of_rank = torchrun_env(rank, world, self.reserved.getsockname()[1]) if world > 1 else {}
            self.ranks.append(context.Process(target=child, args=(argv, of_rank | env, output, patches)))
            self.ranks[-1].start()

    def held(self, *ranks, place=0):
        """Wait until these ranks, or all, are held at a place. Returns False if one ended first."""
        gates = [self.folder / f"held-{place}-{rank}" for rank in ranks or range(len(self.ranks))]
        return self.until(lambda: all(gate.exists() for gate in gates), f"{place}th place")

    def go(self, place=0):
        (self.folder / f"go-{place}").touch()

    def send(self, number, *ranks):
        for rank in ranks or range(len(self.ranks)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.ranks[rank].pid, number)

    def alive(self):
        return all(r.is_alive() for r in self.ranks)

    def end(self):
        """Wait until all processes have ended by themselves, and return their exit codes."""
        deadline = time.time() + PATIENCE
        for r in self.ranks:
            r.join(max(0.1, deadline - time.time()))
        codes = [r.exitcode for r in self.ranks]
        assert None not in codes, f"still running after {PATIENCE} s: {codes} {self.said()}"
        return codes

    def succeed(self):
        assert self.end() == [0] * len(self.ranks), self.said()
        return self

    def said(self, rank=0):
        return self.output[rank].read_text()

    def kill(self):
        """Kill the processes that still run."""
        self.send(signal.SIGKILL)
        self.end()
        self.reserved.close()


def assert_bit_for_bit(out, other, stopped=False):
    """Check that two runs are the same, checkpoints included. stopped: a run was asked to stop, and saved at that step.
    Its earlier checkpoints may then be of other steps, so the steps in their names are not compared."""
    assert_same_run(out, other)
    step = r"-\d+" if stopped else "^$"
    names = [sorted(re.sub(step, "", p.name) for p in folder.glob("*.safetensors*")) for folder in (out, other)]
    assert names[0] == names[1], names
    (a, meta_a), (b, meta_b) = (checkpoint.load(folder / "best.safetensors") for folder in (out, other))
    assert meta_a["step"] == meta_b["step"] and all(torch.equal(a[name], t) for name, t in b.items())


def held_train(gates, places):
    """Write a train.py that is held at these places, and return its path."""
    gates.mkdir(exist_ok=True)
    path = gates / "held_train.py"
    path.write_text(f"""import pathlib, runpy, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]
from faults import Holding
Holding(pathlib.Path({str(gates)!r}), {places!r})
runpy.run_path({str(ROOT / 'train.py')!r}, run_name="__main__")
""")
    return str(path)


# train.py as a cell of a sweep. Each process of a cell (a "life") is held at a random place until the test lets it go.
HELD_CELL = f"""
import os, pathlib, random, runpy, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from faults import RUN, Holding
from helpers import no_picture
from runtime import telemetry
telemetry.draw_loss = no_picture
out = pathlib.Path(next(a[10:] for a in sys.argv if a.startswith("--out_dir=")))
lives = out.parent / "lives" / out.name
life = lives / str(len(list(lives.glob("*"))))
life.mkdir(parents=True)
(life / "pid").write_text(str(os.getpid()))
(life / "job").write_text(os.environ.get("SLURM_JOB_ID", ""))
chance = random.Random(f"{{out}} {{life.name}}")
kind, most = chance.choice([("step", RUN["max_iters"] // 9), ("write", 90), ("open", 12)])
if not (out.parent / "lives/calm").exists():
    Holding(life, [(kind, chance.randrange(1, most))], folder=out.resolve())
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
"""


def disturb_a_sweep(start, launch, data, tmp_path, kills, acts, **how):
    """Run sweeps of two held runs, one after the other, until they have been disturbed `kills` times.

    acts: functions of (the id of a held process, the driver, that life's folder), called in turn. A function that
    returns a true value did nothing, and is called again. how: arguments of `drive`. Every cell must finish once, with
    the same bits as an undisturbed run.
    """
    cells, script = {}, tmp_path / "held_cell.py"
    script.write_text(HELD_CELL)
    for seed in (1, 2):
        argv = arguments(data, tmp_path / f"whole{seed}", RUN, micro_batch_size=4, seed=seed)
        launch(argv).succeed()
        cells[f"c{seed}"] = [a for a in argv if not a.startswith("--out_dir=")]

    def pid_of(life):
        """Return the life's process id, or 0 if it has ended: another process may have its number by now."""
        pid = int((life / "pid").read_text())
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the second: between open and read
            return pid if str(script).encode() in Path(f"/proc/{pid}/cmdline").read_bytes() else 0
        return 0

    def held(sweep):
        lives = [gate.parent for gate in sweep.glob("lives/*/*/held-0-0") if not gate.with_name("go-0").exists()]
        return {life: pid for life in lives if (pid := pid_of(life))}

    chance, done = random.Random(0), 0
    try:
        while done < kills:
            sweep = Path(tempfile.mkdtemp(dir=tmp_path, prefix="sweep"))
            while not all((sweep / name / "result.json").exists() for name in cells):
                driver, deadline = drive(start, sweep, script, cells, **how), time.time() + 240
                while driver.alive():
                    assert time.time() < deadline, driver.said()
                    lives = held(sweep)
                    if done < kills and lives:
                        life = chance.choice([*lives])
                        with contextlib.suppress(ProcessLookupError):  # it has just ended
                            done += not acts[done % len(acts)](lives[life], driver, life)
                        lives = [life] if driver.alive() else held(sweep)
                    elif done == kills:
                        (sweep / "lives").mkdir(exist_ok=True)
                        (sweep / "lives/calm").touch()
                    else:
                        lives = []
                    for life in lives:
                        (life / "go-0").touch()
                    time.sleep(0.02)
            for i, name in enumerate(cells):
                assert (sweep / f"{name}.txt").read_text().count("finished:") == 1
                assert_bit_for_bit(sweep / name, tmp_path / f"whole{i + 1}", stopped=True)
    finally:
        for pid in filter(None, map(pid_of, tmp_path.glob("sweep*/lives/*/*"))):  # left by a failed test
            os.kill(pid, signal.SIGKILL)


def kill_driver(pid, driver, life):
    driver.kill()
    driver.wait()


def dying(at, prepare, folder, events):
    """Run a process that calls `prepare` and kills itself at the at-th of these events in the folder. Returns (exit
    code, events seen)."""
    context = multiprocessing.get_context("fork")
    seen = context.RawValue("q", 0)

    def doomed():
        sys.addaudithook(watch)
        prepare()

    def watch(event, args):
        if event in events and str(folder) in str(args[0]):
            seen.value += 1
            if seen.value == at:
                os.kill(os.getpid(), signal.SIGKILL)

    process = context.Process(target=doomed)
    process.start()
    process.join(PATIENCE)
    assert process.exitcode in (0, -signal.SIGKILL), "see what it wrote to standard error above"
    return process.exitcode, seen.value
