"""Make the tokens of data/tokens/prepare.py on many machines with datatrove: on Slurm, on Ray, or in local processes.

    pip install --group cluster
    python data/tokens/cluster.py fineweb_edu --cluster=slurm --cluster_args="partition=cpu,time=240"
    python data/tokens/cluster.py slimpajama --cluster=ray --cluster_args="address=auto"
    python data/tokens/cluster.py --files corpus/ --tokenizer=hf:FOLDER --out data/mine --workers=16  # local processes

Recipes, options, documents, their order and their split are the same as with prepare.py, whatever --tasks is. Each task
prepares its share of the source's files, in order. All machines must see --out, --files and this repository under the
same paths. --cluster_args are options of sbatch, or Ray's address and the resources that each task reserves
(num_cpus=1,memory=2e9).

You can kill it at any time; rerun the command, and tasks continue after their last shard. With Slurm the command
submits the tasks and returns; the last task to end writes meta.json. Rerun the command to see how many tasks have
ended, or to resubmit failed tasks. Logs are in OUT/datatrove.
"""

import contextlib
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository root
from configurator import Count
from data.prepared import DataError
from data.tokens import prepare as one_process
from data.tokens.prepare import is_whole, join, prepare_part, recorded
from data.tokens.sources import in_short
from data.writer import preparing, run, write_sealed

# datatrove, tqdm and ray are imported where they are used: --help should work without them.

ROOT = Path(__file__).resolve().parents[2]
MOST_TASKS = 1000  # default of --tasks; Slurm's own limit for an array is 1001


class Tasks:
    """The tasks of a preparation. out: the folder to write; work: from `plan`."""

    def __init__(self, out, work, tasks):
        self.out, self.work = out, work
        self.parts = [f"task-{rank:05d}/" for rank in range(tasks)]

    def do(self, _, rank, tasks):
        """Run one task; datatrove calls this as a pipeline step. The last task to end writes meta.json."""
        n_units = len(self.work.units)
        share = range(n_units * rank // tasks, n_units * (rank + 1) // tasks)
        with preparing(self.out / self.parts[rank]):
            prepare_part(self.out, self.parts[rank], share, self.work, workers=1)
        join(self.out, self.parts, self.work.meta)

    def ended(self, read=False):
        """[True if a task has ended, ...]; with `read`, only if its shards are still on disk."""
        ended = []
        for part in self.parts:
            record = recorded(self.out, part, self.work.meta["inputs"])
            lost = read and not all(is_whole(self.out, shard["splits"]) for shard in record["shards"])
            ended.append(record["ended"] and not lost)
        return ended


def run_locally(workers, **how):
    """Run each task in its own process. LocalPipelineExecutor.run() would wait forever for one that was killed."""
    from datatrove.executor import LocalPipelineExecutor
    from multiprocess import get_context
    from tqdm import tqdm

    executor = LocalPipelineExecutor(**how)
    context = get_context("forkserver")
    context.set_forkserver_preload(["data.tokens.cluster", "datatrove.executor"])

    def run_one(rank):
        process = context.Process(target=run_task, args=(executor, rank), daemon=True)
        with contextlib.suppress(BrokenPipeError):  # killed before it had read its task; "spawn" would wait forever
            process.start()
            process.join()

    ranks = executor.get_incomplete_ranks()
    with ThreadPoolExecutor(workers) as pool:  # threads that only wait
        list(tqdm(pool.map(run_one, ranks), total=how["tasks"], initial=how["tasks"] - len(ranks), unit=" tasks"))


def run_task(executor, rank):
    """Run a task in this process, which writes only to the task's log."""
    sys.stderr = open(os.devnull, "w")
    executor._run_for_rank(rank)


def run_on_slurm(workers, options, name, **how):
    """Submit the tasks. Returns the job's id, or the last id if there are several jobs. Raises DataError."""
    from datatrove.executor import SlurmPipelineExecutor

    if not {"partition", "time"} <= options.keys():
        raise DataError('--cluster=slurm needs the partition and the time of its jobs: '
                        '--cluster_args="partition=NAME,time=MINUTES"')
    programs = shlex.quote(str(Path(sys.executable).parent))
    paths = f'export PATH={programs}:"$PATH" PYTHONPATH={shlex.quote(str(ROOT))}:"$PYTHONPATH"'
    executor = SlurmPipelineExecutor(workers=workers, time=options["time"], partition=options["partition"], qos=None,
                                     sbatch_args=options, job_name=name, with_srun=False, env_command=paths, **how)
    executor.launch_merge_stats = lambda: None  # a job that would wait forever if one of the tasks failed
    try:
        executor.run()
    except FileNotFoundError:
        raise DataError("there is no sbatch here: run this where jobs are submitted") from None
    except subprocess.CalledProcessError:
        raise DataError("sbatch refused the job, see its message above: change --cluster_args") from None
    return executor.job_id


def is_queued(job):
    """True if Slurm still has the job whose id is in the file `job`."""
    if not job.exists():
        return False
    return subprocess.run(["squeue", "-h", "-j", job.read_text()], capture_output=True).stdout != b""


def run_on_ray(workers, options, **how):
    """Run the tasks on Ray's nodes. Raises DataError."""
    from datatrove.executor import RayPipelineExecutor

    try:
        import ray
    except ImportError:
        raise DataError("the package ray is missing: pip install --group cluster") from None
    address = options.pop("address", None)
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    try:
        reserved = {key: float(value) for key, value in options.items()}
        ray.init(address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise DataError(f"Ray refused --cluster_args ({in_short(error)}): give the address of a running "
                        "cluster, and numbers: address=auto,num_cpus=1,memory=2e9") from None
    RayPipelineExecutor(workers=workers, ray_remote_kwargs=reserved, **how).run()
    ray.shutdown()


def failure(folder, ended):
    """Say how many tasks did not end, and why the first of them did not, according to its log."""
    rank = ended.index(False)
    log = folder / f"datatrove/logs/task_{rank:05d}.log"
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    if "| ERROR " in text:
        reason = text.split("\n")[-1]
    else:
        reason = "it was killed" if text else "it never began"
    return f"{ended.count(False)} of {len(ended)} tasks did not end, the first of them task {rank} ({reason})"


def prepare(out, cluster=None, cluster_args="", tasks=MOST_TASKS, workers=None, force=False, files=None, shuffle=None,
            **choices):
    """Make the tokens in `out`, unless they are there already. Returns Tokens, or None while Slurm jobs are still at
    work.

    Args: as on the command line; choices: arguments of `plan` in data/tokens/prepare.py. Raises DataError.
    """
    try:
        from datatrove.utils.logging import logger
    except ImportError:
        raise DataError("the package datatrove is missing: pip install --group cluster") from None
    logger.remove()  # log only to files
    folder = Path(out).absolute()
    if cluster == "slurm" and shlex.quote(str(folder)) != str(folder):
        raise DataError(f"--out {folder}: choose a path of letters, digits and ./_- for Slurm's scripts")
    files = files and [Path(path).absolute() for path in files]
    work = one_process.plan(files=files, out=out, shuffle=shuffle, **choices)
    if shuffle is not None or work.splitting.cut is not None:
        raise DataError("few or shuffled documents need one process: use data/tokens/prepare.py")
    meta = work.meta
    tasks = Tasks(folder, work, min(tasks, len(work.units)))
    n = len(tasks.parts)
    meta["inputs"] = hashlib.sha256(f"{meta['inputs']} in {n} tasks".encode()).hexdigest()
    job = folder / "datatrove/job"
    if cluster == "slurm" and is_queued(job):
        if force or one_process.inputs_of(folder / "plan.json") != meta["inputs"]:
            raise DataError(f"job {job.read_text()} is still at work in {folder}: scancel it, or choose another --out")
        print(f"{folder}: {sum(tasks.ended())} of {n} tasks have ended; job {job.read_text()} has the others")
        return None
    with preparing(folder):
        if tokens := one_process.begin(folder, meta["inputs"], force):
            return tokens
        if force:
            for path in [folder / "datatrove", *folder.glob("task-*")]:
                shutil.rmtree(path, ignore_errors=True)
        ended = tasks.ended(read=True)
        if not all(ended):
            if job.exists():
                print(f"{failure(folder, ended)} in job {job.read_text()}: see {folder}/datatrove/slurm_logs")
            mark_ended(folder, ended)
            write_sealed(folder / "plan.json", {"inputs": meta["inputs"]})
            run_tasks(cluster, cluster_args, workers, job,
                      {"pipeline": [tasks.do], "tasks": n, "logging_dir": str(folder / "datatrove")})
            if cluster == "slurm":
                print(f"{folder}: {ended.count(False)} of {n} tasks submitted as job {job.read_text()}; rerun this "
                      "command to see how many have ended")
                return None
        if tokens := join(folder, tasks.parts, meta):
            return tokens
        raise DataError(f"{failure(folder, tasks.ended())}: rerun this command to resume")


def mark_ended(folder, ended):
    """Mark the tasks that have ended, so that datatrove skips them."""
    marks = folder / "datatrove/completions"
    for path in (marks, folder / "datatrove/logs"):
        shutil.rmtree(path, ignore_errors=True)
    marks.mkdir(parents=True)
    for rank, has_ended in enumerate(ended):
        if has_ended:
            (marks / f"{rank:05d}").touch()


def run_tasks(cluster, cluster_args, workers, job, how):
    """Run the tasks that are not marked; on Slurm, submit them and write the job's id to the file `job`."""
    options = dict(item.partition("=")[::2] for item in cluster_args.split(",") if item)
    if cluster == "slurm":
        job.write_text(run_on_slurm(workers or -1, options, job.parents[1].name, **how))
    elif cluster == "ray":
        run_on_ray(workers or -1, options, **how)
    else:
        run_locally(workers or one_process.CORES, **how)


@dataclass
class Options(one_process.Source):
    cluster: Literal["slurm", "ray"] = None  # where tasks run; default: local processes
    cluster_args: str = ""  # NAME=VALUE,...: options of sbatch, or of Ray
    tasks: Count = MOST_TASKS  # number of tasks, at most one per file of the source or 256 MB of small local files
    workers: Count = None  # tasks at once; default: all on a cluster, one per core in local processes


def main():
    if tokens := prepare(**one_process.read(Options, __doc__)):
        one_process.say(tokens)


if __name__ == "__main__":
    from data.tokens import cluster  # under the name that tasks import

    run(cluster.main)
