"""A run's folder: locking, moving aside, resuming, saving.

    lock         two runs in one folder would mix their records, so the second is refused
    move aside   when a new run starts, an earlier run's records are moved to earlier-1, earlier-2 ...
    resume       from the newest intact checkpoint; a resumed run is bit-identical to an uninterrupted one
    save         after evaluations or every checkpoint_interval steps, at the end, and when asked to stop

Nothing in this file depends on what is trained.
"""

import contextlib
import dataclasses
import datetime
import math
import shutil
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common import files
from common.errors import ConfigError, Stopped, is_out_of_memory
from common.files import writing_to
from runtime import checkpoint, distributed, records
from runtime.distributed import resume_command

OF_THE_SCHEDULE = {"max_iters", "decay_iters"}  # may change if past steps keep their learning rates
# Settings that may change on resume, because they change a loss only by rounding. Any other change is refused.
MAY_CHANGE_ON_RESUME = {
    "out_dir", "resume", "micro_batch_size", "eval_interval", "eval_tokens", "final_eval_tokens", "eval_block_size",
    "log_interval", "checkpoint_interval", "keep_checkpoints", "keep_steps",
    "wandb", "wandb_project", "wandb_run_name", "device", "compile", "graphs", "parallel", "recompute", "max_bad_steps",
    "backend", "loss_from_logits", "self_check", "timeout_minutes",
    "workers",  # for image runs
    "branch",  # used only without a checkpoint
    "dataset",  # compared by the hash of its content instead
    *OF_THE_SCHEDULE,
}
OF_A_NODE = {"out_dir", "dataset", "device", "micro_batch_size", "workers"}  # may differ from rank to rank
COMPARED_OVER = ("eval_tokens", "eval_block_size")  # losses over different tokens cannot be compared
ON_A_MACHINE = ("processes", "device_name", "threads", "cpu", "torch")  # in config.json; sums are rounded by them
LOCK_SECONDS = 300  # the longest wait for the run's previous process, which may still be saving
SAVED = ("seconds", "skipped", "bad", "best_val_loss", "ended", "code_versions", "wandb_id")


@dataclass
class Progress:
    """A run's own counters. Every checkpoint holds the counters named in SAVED."""

    max_iters: int
    seconds: float = 0.0  # of training, before the run was resumed
    skipped: int = 0  # steps without a finite loss and gradient
    bad: int = 0  # skipped steps in a row, up to now
    best_val_loss: float = math.inf
    ended: bool = False  # an evaluation said "stop"
    code_versions: list = field(default_factory=list)
    wandb_id: str | None = None
    clock: float = 0.0  # time.perf_counter() when the run was resumed

    def at_end(self, done):
        """True if the run ends after `done` steps."""
        return done >= self.max_iters or self.ended

    def seconds_now(self):
        """Training time in seconds, including the time before the run was resumed."""
        return round(self.seconds + time.perf_counter() - self.clock, 3)


@dataclass
class Found:
    """Where a run begins or continues, as found by Folder.resume."""

    progress: Progress
    derived: dict  # values that follow from the settings, data, model and machine, for config.json
    step: int = 0  # steps done
    is_complete: bool = False  # the run has already ended and has its result
    changes: list = field(default_factory=list)  # phrases: what differs from the run's last start
    notes: list = field(default_factory=list)  # lines for the screen
    environment: dict | None = None  # on rank 0: the machine and the code, see records.py
    log: records.Log | None = None  # on rank 0: log.jsonl, open at `step`


class Folder:
    """`with Folder(config, model, data) as folder` locks the folder config.out_dir.

    say: prints a line on rank 0. progress: the run's counters. Raises ConfigError if the folder cannot be used, Stopped
    if the run cannot continue.
    """

    def __init__(self, config, model, data, say=print):
        self.config = config
        self.model = model
        self.data = data
        self.say = say
        self.out = Path(config.out_dir)
        self.is_main = distributed.rank() == 0
        self.aside = None  # where an earlier run's files are now
        self.progress = Progress(config.max_iters)

    def __enter__(self):
        if self.config.resume == "must" and not checkpoint.candidates(self.out):
            raise ConfigError(f"resume=must: {self.out / checkpoint.NEWEST}: {checkpoint.none_here(self.out)}; start "
                              "with --resume=auto")
        if self.is_main:
            wait = min(LOCK_SECONDS, 30 * self.config.timeout_minutes)
            with writing_to(self.out):
                self.lock = lock_run_dir(self.out, 0 if self.config.resume == "never" else wait)
                self.aside = records.finish_moving(self.out)
        settings = {key: value for key, value in self.settings.items() if key not in OF_A_NODE}
        self.check_ranks_agree(**settings, torch=torch.__version__, data=self.data.identity, **records.files_at_start)
        return self

    def __exit__(self, kind, error, trace):
        """Unlock the folder. Running out of memory becomes a one-line error."""
        if self.is_main:
            self.lock.close()
        if is_out_of_memory(error):
            traceback.clear_frames(trace)  # frames keep the activations alive
            size = self.config.micro_batch_size
            block_size = self.config.block_size
            way_out = "choose a smaller block_size or model, or --dtype=bfloat16"
            if size > 1:
                command = resume_command(f"--micro_batch_size={size // 2}", "--resume=auto")
                way_out = f"{command} (the result is the same)"
            raise Stopped(
                f"out of memory with a micro-batch of {size} x {block_size} tokens: {way_out}"
            ) from None

    @property
    def settings(self):
        return dataclasses.asdict(self.config)

    # ------------------------------------------------------------------------------------------------------ resuming

    def resume(self, optimizers, schedule, counts):
        """Restore the newest intact checkpoint if the run continues or branches, and open the records. Returns a Found.

        counts: the model's parameters and FLOPs, for config.json. Raises ConfigError if the checkpoint belongs to
        another run.
        """
        config = self.config
        self.optimizers = optimizers
        self.manager = checkpoint.CheckpointManager(self.out, config.keep_checkpoints, numbers_in(config.keep_steps))
        world = distributed.world_size()
        found = Found(self.progress, {
            "processes": world, "tokens": config.max_iters * config.batch_tokens,
            **distributed.machine(next(self.model.parameters()).device), **counts, **self.data.derived(config, world)})
        if self.is_main:
            found.environment = records.environment()  # may raise, so call it before moving files
        checkpoints = checkpoint.candidates(self.out)
        self.continues = config.resume != "never" and bool(checkpoints)
        path = None
        meta = {}
        if self.continues or config.branch:
            path, meta = self.restore_first(found, checkpoints, schedule)
        self.saved_step = found.step if self.continues else 0
        self.check_ranks_agree(step=found.step)
        if self.progress.at_end(found.step) and (self.out / "result.json").exists():
            if self.is_result_of(meta):
                found.is_complete = True
                found.notes = [records.log_until(self.out, found.step, meta.get("log_crc32"))[2]]
                return found
            found.notes.append(f"{self.out / 'result.json'} is damaged or belongs to another run: it is written again")
        if self.is_main:
            with writing_to(self.out):
                self.open_records(found, path, meta)
        return found

    def restore_first(self, found, checkpoints, schedule):
        """Restore the newest intact checkpoint of the run, or the trunk's. Note it in `found`; return (path, meta)."""
        if not self.continues:
            checkpoints = [branch_point(self.config, self.out)]
        path, tensors, meta, damaged = checkpoint.load_first(checkpoints)
        with checkpoint.fitting(path):
            if self.continues:  # earlier keep_steps stay in force, even if not given again
                kept = self.manager.kept_steps
                kept |= numbers_in(meta["config"].get("keep_steps", ""))
                self.config.keep_steps = ",".join(map(str, sorted(kept)))
            else:  # a branch takes all weights from its trunk, whatever init_from says
                meta["config"]["init_from"] = self.config.init_from
            found.changes = [*self.compare(path, meta, schedule), *self.moved(found)]
        if self.is_main and meta.get("file_times") != getattr(self.data, "file_times", None):
            self.data.verify()  # the files were copied or changed since then; 18 GB take a minute
        with writing_to(self.out), checkpoint.fitting(path):
            self.restore(path, tensors, meta)
        found.step = meta["step"]
        how = "continuing" if self.continues else "branching"
        found.notes = [f"skipped: {line}" for line in damaged]
        found.notes.append("; ".join([f"{how} from {path} at step {found.step}", *found.changes]))
        return path, meta

    def compare(self, path, meta, schedule):
        """Return a phrase per changed setting. Raises ConfigError if this run cannot continue from the checkpoint."""
        config = self.config
        step = meta["step"] + 0
        before = {f.name: meta["config"].get(f.name, f.default) for f in dataclasses.fields(config)}
        self.keep_warmup(before)
        now = self.settings
        changes = {key: f"{key} {before[key]!r} -> {now[key]!r}" for key in before if before[key] != now[key]}
        serious = [words for key, words in changes.items() if key not in MAY_CHANGE_ON_RESUME]
        if serious:
            raise ConfigError(f"{path} belongs to another run: {', '.join(serious)}; undo the change, or choose "
                              "another out_dir")
        planned = sorted(OF_THE_SCHEDULE & changes.keys())
        old = dataclasses.replace(config, **{key: before[key] for key in planned})
        if step > config.max_iters or planned and any(schedule(s, old) != schedule(s, config) for s in range(step)):
            raise ConfigError(
                f"{', '.join(changes[key] for key in planned)} would change the learning rates of the {step} steps "
                "already done: a run can be extended with --schedule=constant, or with --schedule=wsd before its decay "
                "(--branch)"
            )
        if meta["data"] != self.data.identity:
            raise ConfigError(
                f"this run was trained on different data (its sha256 differs from {path}): prepare the data as before, "
                "or choose another out_dir"
            )
        return changes.values()

    def moved(self, found):
        """Return a phrase for each thing on which rounding depends that has changed since the run's last start."""
        before = self.record("config.json") if self.is_main and self.continues else {}
        was = before.get("derived", {}) | before.get("environment", {})
        now = found.derived | (found.environment or {})
        return [f"{key} {was[key]!r} -> {now[key]!r}" for key in ON_A_MACHINE if key in was and was[key] != now[key]]

    def keep_warmup(self, before):
        """Keep an extended run's warmup at 5% of its first max_iters, unless warmup_iters is given."""
        config = self.config
        if config.warmup_iters >= 0:
            return
        if before["warmup_iters"] < 0 and before["max_iters"] != config.max_iters:
            before["warmup_iters"] = round(0.05 * before["max_iters"])
        config.warmup_iters = before["warmup_iters"]
        if config.warmup_iters >= config.max_iters > 1:
            raise ConfigError(f"max_iters {config.max_iters} is within this run's warmup of {config.warmup_iters} "
                              "steps: choose more steps, or another out_dir")

    def restore(self, path, tensors, meta):
        """Restore the state that `save` wrote, in this run or in the trunk of this branch."""
        state = checkpoint.unflatten(tensors, meta["skeleton"])
        for name in SAVED:
            setattr(self.progress, name, meta[name])
        if not self.continues:
            self.progress.wandb_id = None  # a branch is a separate run
        before = meta["config"]
        now = self.settings
        if not self.continues or any(before.get(key) != now.get(key) for key in COMPARED_OVER):
            self.progress.best_val_loss = math.inf
            meta["best"] = None
        current = self.model.state_dict()
        cut = distributed.cut_like
        self.model.load_state_dict({name: cut(t, current.get(name)) for name, t in state["model"].items()})
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for i, of_parameter in saved["state"].items():
                for key, t in of_parameter.items():
                    of_parameter[key] = cut(t, parameters[i])
            optimizer.load_state_dict(saved)
        checkpoint.set_rng_state(state["rng"])
        if self.is_main and self.continues:
            self.manager.on_resume(path, meta)

    def check_ranks_agree(self, **ours):
        """Raises ConfigError, with each rank's value, unless all ranks have the same values."""
        seen = distributed.all_gather(ours)
        for name in sorted(set().union(*seen)):
            values = [of_rank.get(name) for of_rank in seen]
            if any(value != values[0] for value in values):
                raise ConfigError(f"the ranks disagree about {name} ({values}): settings, out_dir, code and dataset "
                                  "must be the same on every node")

    def is_result_of(self, meta):
        """True if result.json is undamaged and belongs to this checkpoint's run; otherwise it is written again."""
        best = meta["best_val_loss"] if math.isfinite(meta["best_val_loss"]) else None
        ours = {"steps": meta["step"], "seed": meta["config"]["seed"], "best_val_loss": best,
                "code": meta["code_versions"][-1]}
        return ours.items() <= self.record("result.json").items()

    def began_before(self):
        """True if out_dir holds the records of this same run, killed before its first checkpoint. It then starts over
        in the same place."""
        if self.config.resume != "auto" or (self.out / "result.json").exists():
            return False
        begun = self.record("config.json").get("config")
        return begun in [{**self.settings, "resume": how} for how in ("never", "auto")]

    def record(self, name):
        """Return a record in out_dir, or {} if it is missing or damaged."""
        with contextlib.suppress(records.BadRecord):
            return records.read_json(self.out / name)
        return {}

    # ------------------------------------------------------------------------------------------------------- records

    def open_records(self, found, path, meta):
        """Move an earlier run aside, write config.json, and open the log at found.step. Rank 0 only."""
        if not self.continues and not self.began_before() and records.run_files(self.out):
            self.aside = records.move_aside(self.out)
        if self.aside:
            found.notes.insert(0, f"the earlier run is kept as {self.aside}")
        if self.config.branch and not self.continues:  # a branch's log starts as a copy of its trunk's
            shutil.copyfile(path.parent / "log.jsonl", self.out / "log.jsonl")
        (self.out / "result.json").unlink(missing_ok=True)  # from before the run was extended
        code = found.environment["code"]
        versions = self.progress.code_versions
        if code not in versions[-1:]:
            if versions:
                found.notes.append(f"the code was {versions[-1]}, is now {code}: config.json names both")
            versions.append(code)
        changes = self.record("config.json").get("changes", []) if self.continues else []
        if found.changes:
            changes.append(f"step {found.step}: {', '.join(found.changes)}")
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        about_data = {key: value for key, value in self.data.meta.items() if key != "table"}  # long, and in checkpoints
        records.write_json(self.out / "config.json", {
            "config": self.settings, "derived": found.derived, "environment": found.environment,
            "code_versions": versions, "changes": changes, "time": self.record("config.json").get("time", now),
            "data": {**about_data, "identity": self.data.identity}})
        self.log = found.log = records.Log(self.out, found.step, meta.get("log_crc32"))
        if self.log.damage:
            found.notes.append(self.log.damage)

    # -------------------------------------------------------------------------------------------------------- saving

    def save_if_due(self, step, val_loss, stopping):
        """Save every checkpoint_interval steps (0: at evaluations), at keep_steps, at the end, and when asked to stop.

        val_loss: from this step's evaluation, to choose the best checkpoint; None if there was none.
        """
        interval = self.config.checkpoint_interval
        done = step + 1
        last = stopping or self.progress.at_end(done)
        due = done % interval == 0 if interval else val_loss is not None
        if done > self.saved_step and (last or due or done in self.manager.kept_steps):
            self.data.check_unchanged()
            self.save(done, val_loss)
        if last and self.is_main and self.saved_step < done:
            raise Stopped(
                f"the checkpoint of step {done} was not written; the last is from step {self.saved_step}: make room, "
                f"then {resume_command('--resume=auto')}"
            )

    def save(self, done, val_loss):
        """Gather the state on rank 0 and write it, one tensor at a time."""
        state = {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers],
                 "rng": checkpoint.rng_state()}
        tensors, skeleton = checkpoint.flatten(state)
        values = map(distributed.whole, checkpoint.in_order(tensors).values())
        try:
            if self.is_main:
                self.write(tensors, skeleton, values, done, val_loss)
        finally:
            for _ in values:  # every process must take part in gathering each sharded tensor
                pass

    def write(self, tensors, skeleton, values, done, val_loss):
        """Write the checkpoint after `done` steps. `values`: an iterator over the gathered tensors, in file order."""
        meta = {"skeleton": skeleton, "step": done, "tokens": done * self.config.batch_tokens, "config": self.settings,
                **{name: getattr(self.progress, name) for name in SAVED}, "seconds": self.progress.seconds_now(),
                "data": self.data.identity, "file_times": getattr(self.data, "file_times", None),
                "tokenizer": self.data.meta.get("tokenizer"), "table": self.data.meta.get("table"),
                "log_crc32": self.log.crc32}
        self.log.sync()  # the log must be on disk before its checkpoint is
        try:
            self.manager.save(tensors, meta, val_loss, values)
            self.saved_step = done
        except OSError as error:  # such as a full disk; earlier checkpoints are untouched
            self.say(f"step {done}: checkpoint not written ({error}); the previous one stays")


def numbers_in(text):
    """Parse "1,2" into {1, 2}."""
    return {int(number) for number in text.split(",") if number}


def branch_point(config, out):
    """Return the checkpoint that --branch=RUN@STEP names. Raises ConfigError if RUN has none from that step, or is
    `out`."""
    trunk, _, step = config.branch.rpartition("@")
    kept = checkpoint.steps(trunk)
    if not step.isdecimal() or int(step) not in kept:
        there = ", ".join(map(str, sorted(kept))) or "(none)"
        raise ConfigError(
            f"branch={config.branch}: {trunk or 'RUN@STEP'} has checkpoints of steps {there}: name one of these "
            "steps, or train the run with --keep_steps"
        )
    path = kept[int(step)]
    if path.parent.resolve() == out.resolve():
        raise ConfigError(
            f"branch={config.branch} is in out_dir, whose files would be moved aside: choose another out_dir"
        )
    if not (path.parent / "log.jsonl").exists():
        raise ConfigError(
            f"branch={config.branch}: {path.parent} has no log.jsonl for the branch to continue: choose another run"
        )
    return path


def lock_run_dir(out, wait=0.0):
    """Lock an out_dir (see files.lock_folder). Raises ConfigError if another run holds it after `wait` seconds."""
    try:
        return files.lock_folder(out, wait)
    except BlockingIOError as error:
        raise ConfigError(
            f"another run is writing to {out} ({error.strerror}): wait for it, or choose another out_dir"
        ) from None
