"""A run's folder: locking, moving aside, resuming, saving.

    lock         two runs in one folder would mix their records, so the second is refused
    move aside   when a new run starts, an earlier run's records go to earlier-1, earlier-2 ...
    resume       from the newest intact checkpoint; a resumed run is bit-identical to one that was never interrupted
    save         after evaluations, every checkpoint_interval steps, at the end, and when asked to stop

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

OF_THE_SCHEDULE = {"max_iters", "decay_iters"}  # may change if the learning rates of the steps already done do not
# Settings that may change on resume, because they change a loss only by rounding. Everything else is refused.
MAY_CHANGE_ON_RESUME = {
    "out_dir", "resume", "micro_batch_size", "eval_interval", "eval_tokens", "final_eval_tokens", "eval_block_size",
    "log_interval", "checkpoint_interval", "keep_checkpoints", "keep_steps",
    "wandb", "wandb_project", "wandb_run_name", "device", "compile", "graphs", "parallel", "recompute", "max_bad_steps",
    "backend", "loss_from_logits", "self_check", "timeout_minutes",
    "workers",  # of image runs
    "branch",  # used only without a checkpoint
    "dataset",  # compared by the hash of its content instead
    *OF_THE_SCHEDULE,
}
OF_A_NODE = {"out_dir", "dataset", "device", "micro_batch_size", "workers"}  # may differ from rank to rank
COMPARED_OVER = ("eval_tokens", "eval_block_size")  # a loss over different tokens cannot be compared with the best
LOCK_SECONDS = 300  # the longest wait for the process whose run we resume: it may still be saving
SAVED = ("seconds", "skipped", "bad", "best_val_loss", "ended", "code_versions", "wandb_id")


@dataclass
class Progress:
    """A run's own counters. Those in SAVED are in every checkpoint."""

    max_iters: int
    seconds: float = 0.0  # of training, before the run was resumed
    skipped: int = 0  # steps without a finite loss and gradient
    bad: int = 0  # how many of them in a row
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
    """Where a run begins or continues, from Folder.resume."""

    progress: Progress
    derived: dict  # values that follow from the settings, data, model and machine, for config.json
    step: int = 0  # steps done
    is_complete: bool = False  # it ended before, and has its result
    notes: list = field(default_factory=list)  # lines for the screen
    environment: dict | None = None  # on rank 0: the machine and the code, see records.py
    log: records.Log | None = None  # on rank 0: log.jsonl, open at `step`


class Folder:
    """`with Folder(config, model, data) as folder`: the folder config.out_dir, locked.

    say: prints a line on rank 0. progress: the run's counters. Raises ConfigError if the folder cannot be used, Stopped
    if the run cannot continue.
    """

    def __init__(self, config, model, data, say=print):
        self.config, self.model, self.data = config, model, data
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
        """Unlocks the folder. Running out of memory becomes one line."""
        if self.is_main:
            self.lock.close()
        if error is not None and is_out_of_memory(error):
            traceback.clear_frames(trace)  # they keep the activations alive
            size, block_size = self.config.micro_batch_size, self.config.block_size
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

        counts: what config.json says about the model. Raises ConfigError if the checkpoint belongs to another run.
        """
        config = self.config
        self.optimizers = optimizers
        self.kept_steps = numbers_in(config.keep_steps)
        self.manager = checkpoint.CheckpointManager(self.out, config.keep_checkpoints, self.kept_steps)
        found = Found(self.progress, self.derived(counts))
        if self.is_main:
            found.environment = records.environment()  # may raise, so call it before moving files
        checkpoints = checkpoint.candidates(self.out)
        self.continues = config.resume != "never" and bool(checkpoints)
        path, meta = None, {}
        if self.continues or config.branch:
            path, meta, found.notes = self.restore_first(checkpoints, schedule)
            found.step = meta["step"]
        self.saved_step = found.step if self.continues else 0
        self.check_ranks_agree(step=found.step)
        if found.step > 0 and self.progress.at_end(found.step) and (self.out / "result.json").exists():
            if self.is_result_of(meta):
                found.is_complete = True
                wrong = records.log_until(self.out, found.step, meta.get("log_crc32"))[2]
                found.notes = [wrong] if wrong else []
                return found
            found.notes.append(f"{self.out / 'result.json'} is damaged or belongs to another run: it is made again")
        if self.is_main:
            with writing_to(self.out):
                self.open_records(found, path, meta)
        return found

    def restore_first(self, checkpoints, schedule):
        """Restore the newest intact checkpoint of the run or its trunk: (its path, its meta, lines for the screen)."""
        if not self.continues:
            checkpoints = [branch_point(self.config, self.out)]
        path, tensors, meta, damaged = checkpoint.load_first(checkpoints)
        with checkpoint.fitting(path):
            if self.continues:
                self.keep_more_steps(numbers_in(meta["config"].get("keep_steps", "")))
            else:  # a branch has all of its trunk's weights, whatever init_from says
                meta["config"]["init_from"] = self.config.init_from
            changes = self.compare(path, meta, schedule)
        if self.is_main and meta.get("file_times") != getattr(self.data, "file_times", None):
            self.data.verify()  # the files were copied or changed since; 18 GB take a minute
        with writing_to(self.out), checkpoint.fitting(path):
            self.restore(path, tensors, meta)
        how = "continuing" if self.continues else "branching"
        notes = [f"skipped: {line}" for line in damaged]
        notes.append("; ".join([f"{how} from {path} at step {meta['step']}", *changes]))
        return path, meta, notes

    def keep_more_steps(self, steps):
        """Checkpoints kept on purpose stay, even if keep_steps is not given again."""
        self.kept_steps |= steps
        self.config.keep_steps = ",".join(map(str, sorted(self.kept_steps)))

    def compare(self, path, meta, schedule):
        """A phrase per changed setting. Raises ConfigError if this run cannot continue from the checkpoint."""
        config, step = self.config, meta["step"] + 0
        before = {f.name: meta["config"].get(f.name, f.default) for f in dataclasses.fields(config)}
        self.keep_warmup(before)
        now = self.settings
        changed = [key for key in before if before[key] != now[key]]
        serious = [key for key in changed if key not in MAY_CHANGE_ON_RESUME]
        if serious:
            words = ", ".join(f"{key} {before[key]!r} -> {now[key]!r}" for key in serious)
            raise ConfigError(f"{path} belongs to another run: {words}; undo this, or choose another out_dir")
        planned = {key: before[key] for key in changed if key in OF_THE_SCHEDULE}
        old = dataclasses.replace(config, **planned)
        if step > config.max_iters or planned and any(schedule(s, old) != schedule(s, config) for s in range(step)):
            words = ", ".join(f"{key} {planned[key]} -> {now[key]}" for key in planned)
            raise ConfigError(
                f"{words} would change the learning rates of the {step} steps already done: a run can be extended with "
                "--schedule=constant, or with --schedule=wsd before its decay (--branch)"
            )
        if meta["data"] != self.data.identity:
            raise ConfigError(
                f"this run was trained on different data (its sha256 differs from {path}): prepare it as before, or "
                "choose another out_dir"
            )
        return [f"{key} was {before[key]!r}, is {now[key]!r}" for key in changed]

    def keep_warmup(self, before):
        """An extended run keeps its warmup, 5% of its first max_iters, unless warmup_iters is given."""
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
        """Restore what `save` wrote, in this run or in a branch's trunk."""
        state = checkpoint.unflatten(tensors, meta["skeleton"])
        for name in SAVED:
            setattr(self.progress, name, meta[name])
        if not self.continues:
            self.progress.wandb_id = None  # a branch is a run of its own
        before, now = meta["config"], self.settings
        if not self.continues or any(before.get(key) != now.get(key) for key in COMPARED_OVER):
            self.progress.best_val_loss, meta["best"] = math.inf, None
        current, cut = self.model.state_dict(), distributed.cut_like
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
        """True if result.json is undamaged and belongs to this checkpoint's run; otherwise it is made again."""
        best = meta["best_val_loss"] if math.isfinite(meta["best_val_loss"]) else None
        ours = {"steps": meta["step"], "seed": meta["config"]["seed"], "best_val_loss": best,
                "code": meta["code_versions"][-1]}
        return ours.items() <= self.record("result.json").items()

    def began_before(self):
        """True if out_dir holds records of this same run, killed before its first checkpoint: it then starts over."""
        if self.config.resume != "auto" or (self.out / "result.json").exists():
            return False
        config = self.record("config.json").get("config")
        return isinstance(config, dict) and {**config, "resume": ""} == {**self.settings, "resume": ""}

    def record(self, name):
        """A record in out_dir; empty if it is missing or damaged."""
        with contextlib.suppress(records.BadRecord):
            return records.read_json(self.out / name)
        return {}

    # ------------------------------------------------------------------------------------------------------- records

    def derived(self, counts):
        """Values for config.json that follow from the settings, data, model and machine."""
        config = self.config
        world = distributed.world_size()
        machine = distributed.machine(next(self.model.parameters()).device)
        tokens = config.max_iters * config.batch_tokens
        return {"processes": world, "tokens": tokens, **machine, **counts, **self.data.derived(config, world)}

    def open_records(self, found, path, meta):
        """Move an earlier run aside; write config.json and open the log at the step that was found. Rank 0 only."""
        if not self.continues and not self.began_before() and records.run_files(self.out):
            self.aside = records.move_aside(self.out)
        if self.aside:
            found.notes.insert(0, f"the earlier run is kept as {self.aside}")
        if path is not None and not self.continues:  # a branch's log starts with its trunk's
            shutil.copyfile(path.parent / "log.jsonl", self.out / "log.jsonl")
        (self.out / "result.json").unlink(missing_ok=True)  # from before the run was extended
        code, versions = found.environment["code"], self.progress.code_versions
        if code not in versions[-1:]:
            if versions:
                found.notes.append(f"the code was {versions[-1]}, is now {code}: config.json names both")
            versions.append(code)
        began = self.record("config.json").get("time") if found.step > 0 else None  # a branch has no config.json yet
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        about_data = {key: value for key, value in self.data.meta.items() if key != "table"}  # long; in checkpoints
        records.write_json(self.out / "config.json", {
            "config": self.settings, "derived": found.derived, "environment": found.environment,
            "code_versions": versions, "time": began or now,
            "data": {**about_data, "identity": self.data.identity}})
        self.log = found.log = records.Log(self.out, found.step, meta.get("log_crc32"))
        if self.log.damage:
            found.notes.append(self.log.damage)

    # -------------------------------------------------------------------------------------------------------- saving

    def save_if_due(self, step, val_loss, stopping):
        """Save every checkpoint_interval steps or after an evaluation, at the end, and when asked to stop.

        val_loss: from this step's evaluation, to choose the best checkpoint; None if there was none.
        """
        interval, done = self.config.checkpoint_interval, step + 1
        last = stopping or self.progress.at_end(done)
        due = done % interval == 0 if interval else val_loss is not None
        if done > self.saved_step and (last or due or done in self.kept_steps):
            self.data.check_unchanged()
            self.save(done, val_loss)
        if last and self.is_main and self.saved_step < done:
            raise Stopped(
                f"the checkpoint of step {done} was not written, the last is from step {self.saved_step}: make room, "
                f"then {resume_command('--resume=auto')}"
            )

    def save(self, done, val_loss):
        """Gather the state on rank 0, which writes it, one tensor at a time."""
        state = {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers],
                 "rng": checkpoint.rng_state()}
        values = map(distributed.whole, checkpoint.in_order(checkpoint.flatten(state)[0]).values())
        try:
            if self.is_main:
                self.write(state, values, done, val_loss)
        finally:
            for _ in values:  # every process must take part in gathering each sharded tensor
                pass

    def write(self, state, values, done, val_loss):
        """Write the checkpoint after `done` steps; `values`: the tensors of `state`, in order, gathered."""
        meta = {"step": done, "tokens": done * self.config.batch_tokens, "config": self.settings,
                **{name: getattr(self.progress, name) for name in SAVED}, "seconds": self.progress.seconds_now(),
                "data": self.data.identity, "file_times": getattr(self.data, "file_times", None),
                "tokenizer": self.data.meta.get("tokenizer"), "table": self.data.meta.get("table"),
                "log_crc32": self.log.crc32}
        self.log.sync()  # no checkpoint may be on disk before the log that leads to it
        try:
            self.manager.save(state, meta, val_loss, values)
            self.saved_step = done
        except OSError as error:  # such as a full disk; earlier checkpoints are untouched
            self.say(f"step {done}: checkpoint not written ({error}); the one before stays")


def numbers_in(text):
    """{1, 2} of "1,2"."""
    return {int(number) for number in text.split(",") if number}


def branch_point(config, out):
    """The checkpoint that --branch=RUN@STEP names. Raises ConfigError if RUN has none from that step, or is `out`."""
    trunk, _, step = config.branch.rpartition("@")
    kept = checkpoint.steps(trunk)
    if not step.isdecimal() or int(step) not in kept:
        there = ", ".join(map(str, sorted(kept))) or "(none)"
        raise ConfigError(
            f"branch={config.branch}: {trunk or 'RUN@STEP'} has checkpoints of steps {there}: name one of them, or "
            "train it with --keep_steps"
        )
    path = kept[int(step)]
    if path.parent.resolve() == out.resolve():
        raise ConfigError(
            f"branch={config.branch} is in out_dir, from where it would be moved: choose another out_dir"
        )
    if not (path.parent / "log.jsonl").exists():
        raise ConfigError(
            f"branch={config.branch}: {path.parent} has no log.jsonl, with which the branch's would begin"
        )
    return path


def lock_run_dir(out, wait=0.0):
    """Lock an out_dir, see files.lock_folder. Raises ConfigError if another run holds it after `wait` seconds."""
    try:
        return files.lock_folder(out, wait)
    except BlockingIOError as error:
        raise ConfigError(
            f"another run is writing to {out} ({error.strerror}): wait for it, or choose another out_dir"
        ) from None
