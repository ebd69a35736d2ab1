"""The tokens that data/tokens/prepare.py makes, made on many machines by datatrove: by Slurm, Ray, or processes here.

    pip install -r requirements-cluster.txt
    python data/tokens/cluster.py fineweb_edu --cluster=slurm --cluster_args="partition=cpu,time=240"
    python data/tokens/cluster.py slimpajama --cluster=ray --cluster_args="address=auto"
    python data/tokens/cluster.py --files corpus/ --tokenizer=hf:FOLDER --out data/mine --workers=16  # processes here

Recipes and options are prepare.py's, and so are the documents, their order and their split, whatever --tasks is: a task
takes its share of the source's files, in order, and writes a shard of each split. All machines must see --out, --files
and this repository under the same paths. --cluster_args are options of sbatch, or Ray's address and what a task
reserves there (num_cpus=1,memory=2e9).

It can be killed at any time; rerun the command to resume: tasks that ended are kept, others begin again. With Slurm the
command submits and returns, and the last task to end writes meta.json; rerun it to see how many have ended, or to
submit again those that failed. Logs are in the folder datatrove of --out.
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
from types import SimpleNamespace
from typing import Literal

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository root
from configurator import Count
from data.prepared import DTYPES, SPLITS, DataError, read_sealed
from data.tokens import prepare as one_process
from data.tokens.prepare import SAMPLE_CHARS, finish_shards, is_whole, split_of, token_arrays, write_shard
from data.tokens.sources import check_unchanged, documents, in_short
from data.writer import preparing, run, token_dtype, write_sealed
from runtime.records import BadRecord, fields

# datatrove, tqdm and ray are imported where they are used: only this needs them, and --help should not.

ROOT = Path(__file__).resolve().parents[2]
EACH_SAMPLED = 100  # documents of which one is decoded again
MOST_TASKS = 1000  # unless --tasks is given; Slurm's own limit of an array is 1001


class Tokenizer:
    """Any of data/tokenizer.py, with its end of text, as DocumentTokenizer calls one of Hugging Face.

    Theirs would read <|endoftext|> in a document as that token, and tiktoken's encodings and bytes are none of theirs.
    """

    def __init__(self, text):
        self.text = text

    def encode_batch(self, pieces):
        return [SimpleNamespace(ids=[*np.asarray(ids, np.int64).tolist(), self.text.eot_token])
                for ids in token_arrays(self.text, pieces)]

    def get_vocab_size(self):  # above 65,536 DocumentTokenizer writes uint32
        return self.text.n_vocab


class Task:
    """The steps of a task before and after DocumentTokenizer; each is called with (documents, rank, number of tasks).

    folder: --out; work: of `plan`.
    """

    def __init__(self, folder, work):
        self.folder, self.text, self.meta, self.work = folder, work.text, work.meta, work

    def read(self, _, rank, tasks):
        """The documents of the task's units. datatrove's readers leave out empty ones and lines that they cannot parse,
        and number what they stream by task."""
        self.lock = contextlib.ExitStack()  # closed when the shards are written
        self.lock.enter_context(preparing(self.folder / f"task-{rank:05d}"))  # before DocumentTokenizer opens its file
        n_units = len(self.work.units)
        return self.documents(n_units * rank // tasks, n_units * (rank + 1) // tasks)

    def documents(self, first, end):
        from datatrove.data import Document

        for unit in range(first, end):
            for number, (official, text, _) in enumerate(documents(self.work.units[unit], self.work.reading)):
                yield Document(text, f"{unit}/{number}", metadata={"split": official})

    def hold_out(self, documents, rank, tasks):
        """Notes the split and the bytes of each document; None where the tokens of a sample do not give it back."""
        self.notes = []
        for number, document in enumerate(documents):
            split = split_of(document.metadata["split"], document.id, self.meta["recipe"]["val_fraction"])
            size = len(document.text.encode("utf-8", "surrogatepass"))
            if number % EACH_SAMPLED == 0 and not self.text.gives_back(document.text[:SAMPLE_CHARS]):
                size = None
            self.notes.append((split, size))
            yield document

    def write(self, _, rank, tasks):
        """DocumentTokenizer's tokens, and their index of document ends, become a shard of each split and its record."""
        path = self.folder / f"datatrove/tokens/{rank:05d}_unshuffled.ds"
        index = path.with_suffix(".ds.index")
        dtype = DTYPES[token_dtype(self.text.n_vocab)]
        parts = {split: [] for split in SPLITS}
        with self.lock:
            check_unchanged(self.work.before)
            ends = np.fromfile(index, "<u8").astype(np.int64)
            tokens = np.asarray(np.memmap(path, dtype, "r")) if len(ends) else np.empty(0, dtype)
            for (split, size), part in zip(self.notes, np.split(tokens, ends)[:-1], strict=True):
                parts[split].append((part, size, 1))
            shard = write_shard(self.folder, f"task-{rank:05d}/", parts, self.text.n_vocab)
            record = {"inputs": self.meta["inputs"], "splits": shard}
            write_sealed(self.folder / f"task-{rank:05d}/shard.json", record)
            path.unlink()
            index.unlink()
        shards = written(self.folder, tasks, self.work)
        if None not in shards:
            finish_shards(self.folder, shards, self.meta)


def written(folder, tasks, work, read=False):
    """[{split: its entry for meta.json}, ...] of all tasks; None for one whose shard is not there in full, or of other
    inputs, or with `read` of another content."""
    shards = [None] * tasks
    for rank in range(tasks):
        with contextlib.suppress(BadRecord), fields():
            record = read_sealed(folder / f"task-{rank:05d}/shard.json")
            if record["inputs"] == work.meta["inputs"] and is_whole(folder, record["splits"], work.text.n_vocab, read):
                shards[rank] = record["splits"]
    return shards


def run_locally(workers, **how):
    """Each task in a process of its own. LocalPipelineExecutor.run() would wait forever for one that was killed."""
    from datatrove.executor import LocalPipelineExecutor
    from multiprocess import get_context
    from tqdm import tqdm

    executor = LocalPipelineExecutor(**how)
    context = get_context("forkserver")
    context.set_forkserver_preload(["data.tokens.cluster", "datatrove.executor", "datatrove.pipeline.tokens"])

    def run_one(rank):
        process = context.Process(target=run_task, args=(executor, rank), daemon=True)
        with contextlib.suppress(BrokenPipeError):  # killed before it had read its task; "spawn" would wait forever
            process.start()
            process.join()

    ranks = executor.get_incomplete_ranks()
    with ThreadPoolExecutor(workers) as pool:  # threads, which wait
        list(tqdm(pool.map(run_one, ranks), total=how["tasks"], initial=how["tasks"] - len(ranks), unit=" tasks"))


def run_task(executor, rank):
    """A task in this process, which writes to its log alone."""
    sys.stderr = open(os.devnull, "w")
    executor._run_for_rank(rank)


def run_on_slurm(workers, options, name, **how):
    """Submit the tasks. Returns the id of the job, the last one of several. Raises DataError."""
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
        raise DataError("sbatch refused the job, see its line above: change --cluster_args") from None
    return executor.job_id


def is_queued(job):
    """Whether Slurm still has the job whose id is in this file."""
    if not job.exists():
        return False
    return subprocess.run(["squeue", "-h", "-j", job.read_text()], capture_output=True).stdout != b""


def run_on_ray(workers, options, **how):
    """The tasks on the nodes of Ray. Raises DataError."""
    from datatrove.executor import RayPipelineExecutor

    try:
        import ray
    except ImportError:
        raise DataError("the package ray is missing: pip install -r requirements-cluster.txt") from None
    address = options.pop("address", None)
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    try:
        reserved = {key: float(value) for key, value in options.items()}
        ray.init(address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise DataError(f"Ray does not take --cluster_args ({in_short(error)}): give the address of one "
                        "that runs, and numbers: address=auto,num_cpus=1,memory=2e9") from None
    RayPipelineExecutor(workers=workers, ray_remote_kwargs=reserved, **how).run()
    ray.shutdown()


def failure(folder, shards):
    """How many tasks did not end, and why the first of them did not: the last line of its log."""
    rank = shards.index(None)
    log = folder / f"datatrove/logs/task_{rank:05d}.log"
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    if "| ERROR " in text:
        reason = text.split("\n")[-1]
    else:
        reason = "it was killed" if text else "it never began"
    return f"{shards.count(None)} of {len(shards)} tasks did not end, the first of them task {rank} ({reason})"


def prepare(out, cluster=None, cluster_args="", tasks=MOST_TASKS, workers=None, force=False, files=None, shuffle=None,
            **choices):
    """Make the tokens in `out`, unless they are there. Returns Tokens, or None where jobs of Slurm are still to do it.

    Args: as on the command line; choices: as data/tokens/prepare.py's `plan` takes them. Raises DataError, one line.
    """
    tokenizer_class = import_datatrove()
    if shuffle is not None:
        raise DataError("nanoGPT's shuffle and split need one process: python data/openwebtext/prepare.py")
    if files:
        files = [Path(path).absolute() for path in files]
    folder = Path(out).absolute()
    if cluster == "slurm" and shlex.quote(str(folder)) != str(folder):
        raise DataError(f"--out {folder}: choose a path of letters, digits and ./_- for the scripts of Slurm")
    work = one_process.plan(files=files, out=out, **choices)
    refuse_pieces(work)
    meta = work.meta
    tasks = min(tasks, len(work.units))
    meta["inputs"] = hashlib.sha256(f"{meta['inputs']} in {tasks} tasks".encode()).hexdigest()
    job = folder / "datatrove/job"
    if cluster == "slurm" and is_queued(job):
        ended = tasks - written(folder, tasks, work).count(None)
        print(f"{folder}: {ended} of {tasks} tasks have ended; job {job.read_text()} has the others")
        return None
    with preparing(folder):
        if not any(folder.glob("task-*/shard.json")):
            (folder / "plan.json").unlink(missing_ok=True)  # of a preparation that made nothing
        if tokens := one_process.begin(folder, meta["inputs"], force):
            return tokens
        if force:
            for path in [folder / "datatrove", *folder.glob("task-*")]:
                shutil.rmtree(path, ignore_errors=True)
        shards = written(folder, tasks, work, read=True)
        if None in shards:
            if job.exists():
                print(f"{failure(folder, shards)} in job {job.read_text()}: see {folder}/datatrove/slurm_logs")
            mark_ended(folder, shards)
            write_sealed(folder / "plan.json", {"inputs": meta["inputs"]})
            how = pipeline(tokenizer_class, Task(folder, work), tasks)
            run_tasks(cluster, cluster_args, workers, job, how)
            if cluster == "slurm":
                print(f"{folder}: {shards.count(None)} of {tasks} tasks submitted as job {job.read_text()}; rerun this "
                      "command to see how many have ended")
                return None
            shards = written(folder, tasks, work)
        if None in shards:
            raise DataError(f"{failure(folder, shards)}: rerun this command to resume")
        return finish_shards(folder, shards, meta)


def import_datatrove():
    """Its class DocumentTokenizer; it then logs to files alone. Raises DataError."""
    try:
        from datatrove.pipeline.tokens import DocumentTokenizer
        from datatrove.utils.logging import logger
    except ImportError:
        raise DataError("the package datatrove is missing: pip install -r requirements-cluster.txt") from None
    logger.remove()
    return DocumentTokenizer


def refuse_pieces(work):
    for path in work.before:
        if work.reading.kind(path) == "text":
            raise DataError(f"{path} is encoded in pieces: leave .txt files to data/tokens/prepare.py")
    if work.splitting.cut is not None:
        raise DataError("these few documents are divided: leave them to data/tokens/prepare.py")


def mark_ended(folder, shards):
    """datatrove leaves out tasks with a mark."""
    marks = folder / "datatrove/completions"
    for path in (marks, folder / "datatrove/logs"):
        shutil.rmtree(path, ignore_errors=True)
    marks.mkdir(parents=True)
    for rank, shard in enumerate(shards):
        if shard is not None:
            (marks / f"{rank:05d}").touch()


def pipeline(tokenizer_class, task, tasks):
    """What datatrove's executors run."""
    tokenizer = tokenizer_class(str(task.folder / "datatrove/tokens"), task.text.name, save_final_metadata=False,
                                batch_size=100, shuffle_documents=False)
    tokenizer.tokenizer = Tokenizer(task.text)
    return {"pipeline": [task.read, task.hold_out, tokenizer, task.write], "tasks": tasks,
            "logging_dir": str(task.folder / "datatrove")}


def run_tasks(cluster, cluster_args, workers, job, how):
    """Run the tasks without a mark; on Slurm, submit them, and note the id in the file `job`."""
    options = dict(item.partition("=")[::2] for item in cluster_args.split(",") if item)
    if cluster == "slurm":
        job.write_text(run_on_slurm(workers or -1, options, job.parents[1].name, **how))
    elif cluster == "ray":
        run_on_ray(workers or -1, options, **how)
    else:
        run_locally(workers or one_process.CORES, **how)


@dataclass
class Options(one_process.Source):
    cluster: Literal["slurm", "ray"] = None  # where tasks run; not given: processes here
    cluster_args: str = ""  # NAME=VALUE,...: options of sbatch, or of Ray
    tasks: Count = MOST_TASKS  # at most, and not more than the source has files; local ones count once per 256 MB
    workers: Count = None  # tasks at once; not given: all on a cluster, one per core here


def main():
    if tokens := prepare(**one_process.read(Options, __doc__)):
        one_process.say(tokens)


if __name__ == "__main__":
    from data.tokens import cluster  # under the name that tasks import

    run(cluster.main)
