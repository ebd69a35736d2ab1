"""Where the cells of a sweep run: as processes on this machine, as Slurm jobs (through submitit), or on Ray.

A cell locks its folder, resumes bit for bit, and is finished once its result.json exists. So an engine may kill,
requeue or move a cell, and keeps no list of finished ones. Every engine has these methods:

    adopt(names, total)     the names of cells that an earlier driver submitted and that still wait or run; total: the
                            number of all cells
    start(name, command)    submit a cell. Raises ConfigError if the cluster refuses it
    look()                  {name: (state, retry)} of the submitted cells. Until a cell ends, retry is None and state is
                            "queued", "running" or the reason why it waits. Then state says how it ended, retry says
                            whether another try may help, and later calls leave the cell out. Raises ConfigError
    stop(kill)              withdraw queued cells; running ones save and stop, or are killed
    close()                 disconnect from the cluster, where jobs continue
"""

import contextlib
import io
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
from pathlib import Path
from types import SimpleNamespace

from common.errors import ConfigError

REPO = Path(__file__).resolve().parents[2]
# Runs a command that receives SIGTERM when the thread that started it dies (Linux).
UNTIL_PARENT_DIES = """
import ctypes, os, signal, sys
pr_set_pdeathsig, parent, *command = 1, *sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != int(parent):  # it died before that
        sys.exit(1)
os.execvp(command[0], command)
"""


def new_process(output, command, **env):
    """Popen of a cell's command, which stops when we die; its output is appended to a file."""
    env = {"PYTHONUNBUFFERED": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300", **os.environ, **env}
    with open(output, "a") as out:
        return subprocess.Popen([sys.executable, "-c", UNTIL_PARENT_DIES, str(os.getpid()), *command], cwd=REPO,
                                env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)


def signal_group(pid, number):
    """Send a signal to a cell's process group; SIGKILL also to its children's groups, which torchrun creates."""
    pids = [pid]
    if number == signal.SIGKILL:
        for path in Path(f"/proc/{pid}/task").glob("*/children"):  # Linux
            with contextlib.suppress(OSError):
                pids += map(int, path.read_text().split())
    for group in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, number)


def ended(code):
    """(state, retry) for an exit code. Below 0 or above 128 it is a signal; 75: another process of the run was lost."""
    number = -code if code < 0 else code - 128 if code > 128 else 0
    how = f"signal {number}" if number else f"exit {code}" if code else "stopped before its end"
    return how, bool(number) or code in (0, 75)


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Local:
    """Processes on this machine, each with its share of the GPUs (ids for CUDA_VISIBLE_DEVICES) or cores."""

    poll_seconds = 0.2

    def __init__(self, folder, jobs, nproc, gpus):
        self.folder, self.jobs, self.nproc, self.gpus, self.cells = folder, jobs, nproc, gpus, {}

    def adopt(self, names, total):
        """Adopts none, since cells stop with their driver. Threads per cell depend on `total`, so a restart does not
        change them."""
        self.threads = max(1, cores() // min(self.jobs, total) // self.nproc)
        return []

    def start(self, name, command):
        slot = min({*range(len(self.cells) + 1)} - {cell.slot for cell in self.cells.values()})
        env = {} if self.gpus else {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(self.threads))}
        if self.gpus:
            devices = dict.fromkeys(self.gpus[(slot * self.nproc + i) % len(self.gpus)] for i in range(self.nproc))
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        process = new_process(self.folder / f"{name}.txt", command, **env)
        self.cells[name] = SimpleNamespace(slot=slot, process=process)

    def look(self):
        states = {}
        for name, cell in list(self.cells.items()):
            code = cell.process.poll()
            if code is None:
                states[name] = "running", None
            else:
                states[name] = ended(code)
                del self.cells[name]
        return states

    def stop(self, kill):
        for cell in self.cells.values():
            if cell.process.poll() is None:
                signal_group(cell.process.pid, signal.SIGKILL if kill else signal.SIGTERM)

    def close(self):
        self.stop(kill=False)  # after an error
        for cell in self.cells.values():
            cell.process.wait()


# ------------------------------------------------------------------------------------------------------------ clusters

def mark(folder):
    """The suffix of a sweep's job names, by which a later driver recognises them."""
    return f"@{zlib.crc32(str(folder).encode()):08x}"


class Slurm:
    """One job per cell; options: those of sbatch. <folder>/slurm/ holds the scripts, and the output of sbatch and
    srun."""

    poll_seconds = 10.0
    ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "FORGOTTEN", "NODE_FAIL", "OUT_OF_MEMORY",
             "PREEMPTED", "TIMEOUT")
    SETUP = ("export PYTHONUNBUFFERED=1 TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300",
             "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((SLURM_CPUS_ON_NODE + NPROC - 1) / NPROC))}",
             '[ -z "$SLURM_CPUS_PER_TASK" ] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK')  # srun drops it

    def __init__(self, folder, options, nproc):
        import submitit

        self.folder, self.mark, self.nproc, self.ids, self.stopping = folder, mark(folder), nproc, {}, False
        self.executor = submitit.SlurmExecutor(folder / "slurm")
        self.executor.update_parameters(time=None, setup=[f"NPROC={nproc}", *self.SETUP], additional_parameters={
            "requeue": True, "chdir": REPO, "signal": "TERM@120", **options})  # default time: the partition's

    def jobs_by_cell(self):
        """{cell: (id, state, reason, exit status)} of each cell's newest job. Raises ConfigError."""
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
            with contextlib.redirect_stderr(io.StringIO()):  # the exception repeats it
                self.ids[name] = self.executor.submit(os.execvp, command[0], command).job_id
        except Exception as error:  # sbatch refused, or its answer has no job number
            raise ConfigError(str(error).replace("sbatch: error: ", "")) from None

    def look(self):
        jobs, states = self.jobs_by_cell(), {}
        for name, job in self.ids.items():
            _, state, reason, status = jobs.get(name, (job, "FORGOTTEN", "", 0))
            if state in ("COMPLETED", "FAILED"):
                states[name] = ended(os.waitstatus_to_exitcode(int(status)))
            elif "requeued held" in reason.replace("_", " "):  # a node could not start it, and Slurm will not try again
                subprocess.run(["scancel", "--quiet", job], capture_output=True)
                states[name] = f"job {job}: {reason}", True
            elif state in self.ENDED:
                states[name] = f"job {job}: {state}", state not in ("CANCELLED", "DEADLINE", "OUT_OF_MEMORY")
            elif state == "PENDING":
                states[name] = "queued" if reason in ("None", "Priority", "Resources", "BeginTime") else reason, None
            else:
                states[name] = "running", None
        self.ids = {name: job for name, job in self.ids.items() if states[name][1] is None}
        if self.stopping and self.nproc == 1:  # repeated, since a job whose step had not begun missed it
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
        """Nothing to close."""


class RayCell:
    """A cell's process, in an actor that outlives the driver and is restarted elsewhere if its node is lost."""

    def __init__(self, *process, **env):
        self.process = new_process(*process, **env)
        threading.Thread(target=self.leave, daemon=True).start()

    def leave(self):
        """Free the node, even if no driver is watching any more."""
        import ray

        self.process.wait()
        time.sleep(60)
        ray.kill(ray.get_runtime_context().current_actor)

    def code(self):
        return self.process.poll()

    def signal(self, number):
        signal_group(self.process.pid, number)


class Ray:
    """One actor per cell; options: those of actors, such as num_cpus and num_gpus.

    address: HOST:PORT or ray://HOST:PORT; "": the cluster that this machine is in, or else this machine alone.
    """

    poll_seconds = 1.0

    def __init__(self, folder, address, options, nproc):
        import ray

        self.folder, self.mark, self.ray, self.cells, self.actor = folder, mark(folder), ray, {}, ray.remote(RayCell)
        options = {"num_cpus": nproc, "num_gpus": 0, **options}
        for key in ("num_cpus", "num_gpus"):
            options[key] = float(options[key])
        self.options = {**options, "lifetime": "detached", "max_restarts": -1}
        self.actor.options(**self.options)
        if address:  # Ray would try for hours if nothing listens there
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address or None, namespace="sweeps", log_to_driver=False, logging_level=logging.ERROR)
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that no node has to import it
        wanted = {"CPU": options["num_cpus"], "GPU": options["num_gpus"]}
        fits = any(all(node["Resources"].get(kind, 0) >= n for kind, n in wanted.items()) for node in ray.nodes())
        self.queued = "queued" if fits else f"Ray has no node with {wanted}"
        self.threads = str(max(1, int(options["num_cpus"]) // nproc))

    def adopt(self, names, total):
        for full_name in self.ray.util.list_named_actors():
            name, known, _ = full_name.partition(self.mark)
            if known and name in names:
                with contextlib.suppress(ValueError):  # the actor has just ended
                    self.watch(name, self.ray.get_actor(full_name))
        return list(self.cells)

    def start(self, name, command):
        full_name = f"{name}{self.mark}{time.time_ns()}"  # Ray frees names late
        self.watch(name, self.actor.options(name=full_name, **self.options).remote(
            self.folder / f"{name}.txt", command, OMP_NUM_THREADS=self.threads))

    def watch(self, name, actor):
        self.cells[name] = SimpleNamespace(actor=actor, state=(self.queued, None), answer=actor.code.remote())

    def look(self):
        """A cell that does not answer keeps its state."""
        states, errors = {}, self.ray.exceptions
        for name, cell in list(self.cells.items()):
            if self.ray.wait([cell.answer], timeout=0)[0]:
                try:
                    code = self.ray.get(cell.answer)
                    cell.state = ("running", None) if code is None else ended(code)
                except errors.ActorUnavailableError:  # its node is lost; the actor restarts elsewhere
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


def cluster_options(cluster, cluster_args):
    """(kind, address, {option: value}) of --cluster and --cluster_args. Raises ConfigError.

    cluster_args: "partition=gpu,nodelist=n1,n2,exclusive=true", where true stands for an option without a value.
    """
    kind, _, address = cluster.partition(":")
    options = dict(part.lstrip("-").split("=", 1) for part in re.split(",(?=[^,]*=)", cluster_args) if "=" in part)
    if kind not in ("", "slurm", "ray") or bool(options) != bool(kind and cluster_args):
        raise ConfigError(f"--cluster={cluster} --cluster_args={cluster_args}: give slurm, ray or ray:HOST:PORT, and "
                          "its options as key=value,key=value")
    return kind, address, {key: value == "true" or value for key, value in options.items()}


def open_engine(cluster, cluster_args, folder, jobs, nproc=1, gpus=()):
    """The engine for --cluster; jobs: cells at a time, on a cluster 0: all. Raises ConfigError if the cluster cannot be
    reached."""
    (kind, address, options), folder = cluster_options(cluster, cluster_args), Path(folder).resolve()
    try:
        engine = (Local(folder, jobs, nproc, gpus) if not kind else
                  Slurm(folder, options, nproc) if kind == "slurm" else Ray(folder, address, options, nproc))
    except ImportError as error:
        raise ConfigError(f"--cluster={cluster}: {error}: pip install --group cluster") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"--cluster={cluster}: {str(error)[:300]}") from None
    engine.jobs, engine.nproc = jobs or math.inf, nproc
    return engine
