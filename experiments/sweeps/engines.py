"""Where the cells of a sweep run: as processes of this machine, as jobs of Slurm (submitit), or on the nodes of Ray.

A cell locks its folder, resumes bit for bit, and is finished when its result.json exists. So an engine may kill,
requeue and move it, and keeps no list of what is done. Each has these doors:

    adopt(names, total)     which of these cells, of so many, still wait or run for an earlier driver
    start(name, command)    raises ConfigError where the cluster refuses
    look()                  {name: (state, again)}: "queued", "running", why it waits, or how it ended, (told once).
                            again: None before that, then if another start may help. Raises ConfigError
    stop(kill)              withdraw what waits, and ask what runs to save and stop, or kill it
    close()
"""

import contextlib
import io
import itertools
import logging
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

from runtime.errors import ConfigError

REPO = Path(__file__).resolve().parents[2]
# Runs a command that receives SIGTERM when the thread that started it ends, however it ends (Linux).
WITH_PARENT = """
import ctypes, os, signal, sys
pr_set_pdeathsig, parent, *command = 1, *sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before that
        sys.exit(1)
os.execvp(command[0], command)
"""


def new_process(output, command, **env):
    """A Popen of a cell's command, which stops with us; what it prints is added to a file."""
    env = {"PYTHONUNBUFFERED": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300", **os.environ, **env}
    with open(output, "a") as out:
        return subprocess.Popen([sys.executable, "-c", WITH_PARENT, str(os.getpid()), *command], cwd=REPO, env=env,
                                stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)


def signal_group(pid, number):
    """Send a signal to a cell's process group; SIGKILL also to its children's: torchrun gives them their own."""
    pids = [pid]
    if number == signal.SIGKILL:
        for path in Path(f"/proc/{pid}/task").glob("*/children"):  # Linux
            with contextlib.suppress(OSError):
                pids += map(int, path.read_text().split())
    for group in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


def ended(code):
    """(how, again) of an exit code; below 0 or above 128 it is a signal, and 75 says that another process was lost."""
    number = -code if code < 0 else code - 128 if code > 128 else 0
    how = f"signal {number}" if number else f"exit {code}" if code else "stopped before its end"
    return how, bool(number) or code in (0, 75)


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Local:
    """Processes of this machine, each with its share of the GPUs (ids for CUDA_VISIBLE_DEVICES) or cores."""

    poll_seconds = 0.2

    def __init__(self, folder, jobs, nproc=1, gpus=()):
        self.folder, self.jobs, self.nproc, self.gpus = Path(folder).resolve(), jobs, nproc, gpus
        self.pool, self.cells = ThreadPoolExecutor(jobs), {}

    def adopt(self, names, total):
        """None: cells stop with their driver. As many threads after a kill as before it, for the same bits."""
        self.threads = max(1, cores() // min(self.jobs, total) // self.nproc)
        return []

    def start(self, name, command):
        slot = next(s for s in itertools.count() if all(s != cell.slot for cell in self.cells.values()))
        env = {} if self.gpus else {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(self.threads))}
        if self.gpus:
            devices = dict.fromkeys(self.gpus[(slot * self.nproc + i) % len(self.gpus)] for i in range(self.nproc))
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        process = new_process(self.folder / f"{name}.txt", command, **env)
        self.cells[name] = SimpleNamespace(slot=slot, pid=process.pid, code=self.pool.submit(process.wait))

    def look(self):
        states = {name: ended(cell.code.result()) if cell.code.done() else ("running", None)
                  for name, cell in self.cells.items()}
        self.cells = {name: cell for name, cell in self.cells.items() if states[name][1] is None}
        return states

    def stop(self, kill):
        for cell in self.cells.values():
            if not cell.code.done():
                signal_group(cell.pid, signal.SIGKILL if kill else signal.SIGTERM)

    def close(self):
        self.stop(kill=False)  # after an error; the pool then waits for them
        self.pool.shutdown()


# ------------------------------------------------------------------------------------------------------------ clusters

def mark(folder):
    """What the names of a sweep's jobs end with, so that a later driver knows them."""
    return f"@{zlib.crc32(str(folder).encode()):08x}"


class Slurm:
    """A job per cell. options: of sbatch. <folder>/slurm/ has its scripts, and what sbatch and srun said."""

    poll_seconds = 10.0
    ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "FORGOTTEN", "NODE_FAIL", "OUT_OF_MEMORY",
             "PREEMPTED", "TIMEOUT")
    SETUP = ("export PYTHONUNBUFFERED=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300",
             "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((SLURM_CPUS_ON_NODE + NPROC - 1) / NPROC))}",
             '[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK')  # srun forgets it

    def __init__(self, folder, options, nproc=1):
        import submitit

        self.folder, self.mark, self.nproc, self.ids, self.stopping = folder, mark(folder), nproc, {}, False
        self.executor = submitit.SlurmExecutor(folder / "slurm")
        self.executor.update_parameters(time=None, setup=[f"NPROC={nproc}", *self.SETUP], additional_parameters={
            "requeue": True, "chdir": REPO, "signal": "TERM@120", **options})  # no time: the partition's

    def jobs_by_cell(self):
        """{cell: (id, state, reason, exit status)} of the newest job of each. Raises ConfigError."""
        columns = ",".join(f"{column}:|" for column in ("JobID", "State", "Reason", "exit_code", "Name"))
        squeue = subprocess.run(["squeue", "--me", "--states=all", "--noheader", f"--Format={columns}"],
                                capture_output=True, text=True)
        if squeue.returncode:
            raise ConfigError(f"--cluster=slurm: {squeue.stderr}")
        jobs = sorted((line.split("|") for line in squeue.stdout.splitlines()), key=lambda job: int(job[0]))
        return {job[4].removesuffix(self.mark): job[:4] for job in jobs if job[4].endswith(self.mark)}

    def adopt(self, names, total):
        self.ids = {name: job for name, (job, state, *_) in self.jobs_by_cell().items()
                    if name in names and state not in self.ENDED}
        return list(self.ids)

    def start(self, name, command):
        output = f"{self.folder}/{name}.txt".replace("%", "%%")
        self.executor.update_parameters(job_name=name + self.mark, srun_args=[
            "--nodes=1", "--ntasks=1", "--open-mode=append", f"--output={output}", f"--error={output}"])
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # the error has it too
                self.ids[name] = self.executor.submit(os.execvp, command[0], command).job_id
        except Exception as error:  # sbatch refuses, or its answer has no number
            raise ConfigError(str(error).replace("sbatch: error: ", "")) from None

    def look(self):
        jobs, states = self.jobs_by_cell(), {}
        for name, job in self.ids.items():
            _, state, reason, status = jobs.get(name, (job, "FORGOTTEN", "", 0))
            if state in ("COMPLETED", "FAILED"):
                states[name] = ended(os.waitstatus_to_exitcode(int(status)))
            elif state in self.ENDED:
                states[name] = f"job {job} is {state.lower()}", state not in ("CANCELLED", "DEADLINE", "OUT_OF_MEMORY")
            elif state == "PENDING":
                states[name] = "queued" if reason in ("None", "Priority", "Resources", "BeginTime") else reason, None
            else:
                states[name] = "running", None
        self.ids = {name: job for name, job in self.ids.items() if states[name][1] is None}
        if self.stopping and self.nproc == 1:  # again: a job that has no step yet did not hear it
            self.scancel("--signal=TERM")
        return states

    def stop(self, kill):
        self.stopping = True
        self.scancel("--state=PENDING")
        self.scancel("--signal=KILL" if kill else "--signal=TERM")

    def scancel(self, how):
        if self.ids:
            subprocess.run(["scancel", "--quiet", how, *self.ids.values()], capture_output=True)

    def close(self):
        """What waits or runs goes on."""


class RayCell:
    """An actor, which outlives its driver and is made again where its node is lost: the process of a cell."""

    def __init__(self, *process, **env):
        self.process = new_process(*process, **env)
        threading.Thread(target=self.leave, daemon=True).start()

    def leave(self):
        """Free the node, also where no driver looks."""
        import ray

        self.process.wait()
        time.sleep(60)
        ray.kill(ray.get_runtime_context().current_actor)

    def code(self):
        return self.process.poll()

    def signal(self, number):
        signal_group(self.process.pid, number)


class Ray:
    """An actor per cell. options: of actors, such as num_cpus and num_gpus.

    address: HOST:PORT or ray://HOST:PORT; "": the cluster of this machine, or where there is none this machine alone.
    """

    poll_seconds = 1.0

    def __init__(self, folder, address, options, nproc=1):
        import ray

        self.folder, self.mark, self.ray, self.cells, self.actor = folder, mark(folder), ray, {}, ray.remote(RayCell)
        options = {key: float(value) if str(value).isdecimal() else value for key, value in options.items()}
        options = {"num_cpus": nproc, "num_gpus": 0, **options}
        self.options = {**options, "lifetime": "detached", "max_restarts": -1}
        self.actor.options(**self.options)
        if address:  # where nothing listens Ray would try for hours
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address or None, namespace="sweeps", log_to_driver=False, logging_level=logging.ERROR)
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no node has to import it
        wanted = {"CPU": options["num_cpus"], "GPU": options["num_gpus"]}
        fits = any(all(node["Resources"].get(kind, 0) >= n for kind, n in wanted.items()) for node in ray.nodes())
        self.queued = "queued" if fits else f"Ray has no node with {wanted}"
        self.threads = str(max(1, int(options["num_cpus"]) // nproc))

    def adopt(self, names, total):
        for full_name in self.ray.util.list_named_actors():
            name, known, _ = full_name.partition(self.mark)
            if known and name in names:
                self.watch(name, self.ray.get_actor(full_name))
        return list(self.cells)

    def start(self, name, command):
        full_name = f"{name}{self.mark}{time.time_ns()}"  # Ray frees a name some time after its actor
        self.watch(name, self.actor.options(name=full_name, **self.options).remote(
            self.folder / f"{name}.txt", command, OMP_NUM_THREADS=self.threads))

    def watch(self, name, actor):
        self.cells[name] = SimpleNamespace(actor=actor, state=(self.queued, None), answer=actor.code.remote())

    def look(self):
        """A cell that does not answer is as it was."""
        states, errors = {}, self.ray.exceptions
        for name, cell in list(self.cells.items()):
            if self.ray.wait([cell.answer], timeout=0)[0]:
                try:
                    code = self.ray.get(cell.answer)
                    cell.state = ("running", None) if code is None else ended(code)
                except errors.ActorUnavailableError:  # its node is lost; the actor is made again
                    cell.state = ("queued", None)
                except errors.RayError as error:
                    cell.state = (str(error).strip().splitlines()[-1], True)
                cell.answer = cell.actor.code.remote()
            states[name] = cell.state
            if cell.state[1] is not None:
                self.ray.kill(self.cells.pop(name).actor)
        return states

    def stop(self, kill):
        for cell in self.cells.values():
            if cell.state[0] == "running":
                cell.actor.signal.remote(signal.SIGKILL if kill else signal.SIGTERM)
            else:
                self.ray.kill(cell.actor)

    def close(self):
        self.ray.shutdown()


def open_engine(cluster, cluster_args, folder, jobs, nproc=1, gpus=()):
    """The engine of --cluster; jobs: cells at a time, on a cluster 0: all.

    cluster_args: "partition=gpu,nodelist=n1,n2,exclusive=true"; true stands for an option without a value.

    Raises ConfigError where there is no such cluster.
    """
    (kind, _, address), folder = cluster.partition(":"), Path(folder).resolve()
    options = dict(part.lstrip("-").split("=", 1) for part in re.split(",(?=[^,]*=)", cluster_args) if "=" in part)
    options = {key: value == "true" or value for key, value in options.items()}
    if kind not in ("", "slurm", "ray") or bool(options) != bool(kind and cluster_args):
        raise ConfigError(f"--cluster={cluster} --cluster_args={cluster_args}: slurm, ray or ray:HOST:PORT, and its "
                          "options as key=value,key=value")
    try:
        engine = (Local(folder, jobs, nproc, gpus) if not kind else
                  Slurm(folder, options, nproc) if kind == "slurm" else Ray(folder, address, options, nproc))
    except ImportError as error:
        raise ConfigError(f"--cluster={cluster}: {error}: pip install -r requirements-cluster.txt") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"--cluster={cluster}: {str(error)[:300]}") from None
    engine.jobs, engine.nproc = jobs or math.inf, nproc
    return engine
