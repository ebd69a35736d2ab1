"""A run's folder: locking, moving aside, resuming, saving.

    lock         two runs in one folder would mix their records, so the second is refused
    move aside   when a new run starts, an earlier run's records go to earlier-1, earlier-2 ...
    resume       from the newest intact checkpoint; a resumed run is bit-identical to one that was never interrupted
    save         after evaluations, every checkpoint_interval steps, at the end, and when asked to stop

Nothing in this file depends on what is trained.
"""

import contextlib
import dataclasses
import math
import shlex
import shutil
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

from common import files
from common.errors import ConfigError, Stopped, is_out_of_memory
from runtime import checkpoint, distributed, records

# Settings that may change on resume: none of them changes a loss beyond rounding. Everything else is refused.
MAY_CHANGE_ON_RESUME = {
    "out_dir", "resume", "micro_batch_size", "auto_micro_batch", "eval_interval", "eval_tokens", "final_eval_tokens",
    "eval_block_size", "eval_tasks", "eval_tasks_interval", "log_interval", "checkpoint_interval",
    "keep_checkpoints", "keep_steps", "wandb", "wandb_project", "device", "compile", "parallel", "recompute",
    "max_bad_steps", "backend", "loss_from_logits", "self_check", "timeout_minutes",
    "workers",  # of image runs
    "branch",  # used only if there is no checkpoint
    "dataset",  # compared by the hash of its content instead
    "max_iters",  # if the learning rates of the steps already done do not change
}
COMPARED_OVER = {"eval_tokens", "eval_block_size"}  # a loss over different tokens cannot be compared with the best


class Folder:
    """`with Folder(config, model, data) as folder`: the folder config.out_dir, locked.

    progress: the run's own counters, saved in every checkpoint. Raises ConfigError if the folder cannot be used,
    Stopped if the run cannot continue.
    """

    def __init__(self, config, model, data):
        self.config, self.model, self.data, self.out = config, model, data, Path(config.out_dir)
        self.is_main, self.aside = distributed.rank() == 0, None
        self.progress = SimpleNamespace(
            seconds=0.0, skipped=0, bad=0, best_val_loss=math.inf, ended=False, code_versions=[], wandb_id=None)

    def __enter__(self):
        if self.config.resume == "must" and not checkpoint.candidates(self.out):
            raise ConfigError(f"resume=must: there is no {self.out / checkpoint.NEWEST}; start with --resume=auto")
        if self.is_main:
            with writing_to(self.out):
                wait = min(300, 30 * self.config.timeout_minutes)  # the process that we resume may still be saving
                self.lock = lock_run_dir(self.out, wait * (self.config.resume != "never"))
                self.aside = records.move_aside(self.out, begin=False)
        distributed.barrier()
        return self

    def __exit__(self, kind, error, trace):
        """Unlocks the folder. Running out of memory becomes one line."""
        if self.is_main:
            self.lock.close()
        if error is not None and is_out_of_memory(error):
            traceback.clear_frames(trace)  # they keep the activations alive
            size, block_size = self.config.micro_batch_size, self.config.block_size
            smaller = resume_command(f"--micro_batch_size={size // 2}", "--resume=auto")
            raise Stopped(f"out of memory with a micro-batch of {size} x {block_size} tokens: "
                          + (f"{smaller} (the result is the same; --auto_micro_batch finds one that fits)" if size > 1
                             else "choose a smaller block_size or model, or --dtype=bfloat16")) from None

    def resume(self, optimizers, schedule, telemetry):
        """Restore the newest intact checkpoint, if the run continues or branches, and open the records.

        Raises ConfigError if the checkpoint belongs to another run.
        """
        config, out, step, path, lines, meta = self.config, self.out, 0, None, [], {}
        self.environment = records.environment() if self.is_main else None  # it may raise: before anything is moved
        self.settings, self.optimizers = dataclasses.asdict(config), optimizers
        self.kept_steps = {int(kept) for kept in config.keep_steps.split(",") if kept}
        self.manager = checkpoint.CheckpointManager(out, config.keep_checkpoints, self.kept_steps)
        checkpoints = checkpoint.candidates(out)
        resumes = config.resume != "never" and bool(checkpoints)
        if resumes or config.branch:
            path, tensors, meta, damaged = checkpoint.load_first(checkpoints if resumes else [branch_point(config)])
            with checkpoint.fitting(path):
                if not resumes:  # a branch has all of its trunk's weights, whatever that began with
                    meta["config"]["init_from"] = config.init_from
                else:  # what was kept on purpose stays, also if keep_steps is not given again
                    self.kept_steps |= {int(kept) for kept in meta["config"].get("keep_steps", "").split(",") if kept}
                    config.keep_steps = self.settings["keep_steps"] = ",".join(map(str, sorted(self.kept_steps)))
                refusal, changes = self.compare(path, meta, schedule)
            if not resumes and path.parent.resolve() == out.resolve():
                refusal = f"branch={config.branch} is in out_dir, from where it would be moved: choose another out_dir"
            if not resumes and not (path.parent / "log.jsonl").exists():
                refusal = f"branch={config.branch}: {path.parent} has no log.jsonl, with which the branch's would begin"
            if refusal:
                raise ConfigError(refusal)
            if self.is_main and meta.get("file_times") != getattr(self.data, "file_times", None):
                self.data.verify()  # the files were copied or changed since; 18 GB take a minute
            with writing_to(out), checkpoint.fitting(path):
                step = self.restore(path, tensors, meta, resumes)
            del tensors  # as large as the model and its optimiser state
            lines = [f"skipped: {line}" for line in damaged]
            how = "continuing" if resumes else "branching"
            lines.append("; ".join([f"{how} from {path} at step {step}", *changes]))
            late = {kept for kept in self.kept_steps if kept <= step}
            if late := sorted(late and late - checkpoint.steps(out).keys()):
                lines.append(f"keep_steps {', '.join(map(str, late))}: already done, so no checkpoint of it is kept")
        seen = distributed.all_gather((step, config.dtype, self.data.identity))
        if any(s != seen[0] for s in seen):
            raise ConfigError(f"the ranks disagree about step, dtype or data ({seen}): out_dir and the dataset must be "
                              "the same on every node")
        self.saved_step = step
        if step > 0 and self.at_end(step) and (out / "result.json").exists():
            if self.is_result_of(meta):
                telemetry.is_complete(step)
                if wrong := records.log_until(out, step, meta.get("log_crc32"))[2]:
                    telemetry.say(wrong)
                return
            lines.append(f"{out / 'result.json'} is damaged, or another run's: it is made again")
        if self.is_main:
            with writing_to(out):
                if not resumes and not self.began_before():
                    self.aside = records.move_aside(out) if records.run_files(out) else self.aside
                if self.aside:
                    telemetry.say(f"the earlier run is kept as {self.aside}")
                if path is not None and not resumes:  # a branch's log starts with its trunk's
                    shutil.copyfile(path.parent / "log.jsonl", out / "log.jsonl")
                (out / "result.json").unlink(missing_ok=True)  # from before the run was extended
        telemetry.open(step, self.settings, lines, meta.get("log_crc32"))

    def is_result_of(self, meta):
        """True if result.json is undamaged and of this checkpoint's run; otherwise it is made again."""
        with contextlib.suppress(records.BadRecord), records.fields():
            result = records.read_json(self.out / "result.json")
            best = meta["best_val_loss"] if math.isfinite(meta["best_val_loss"]) else None
            ours = {"steps": meta["step"], "seed": meta["config"]["seed"], "best_val_loss": best,
                    "code": meta["code_versions"][-1]}
            return all(result.get(key, value) == value for key, value in ours.items())
        return False

    def began_before(self):
        """True if out_dir holds records of this same run, killed before its first checkpoint. It then starts over."""
        with contextlib.suppress(records.BadRecord), records.fields():
            config = records.read_json(self.out / "config.json")["config"]
            if self.config.resume == "auto" and not (self.out / "result.json").exists():
                return {**config, "resume": ""} == {**self.settings, "resume": ""}
        return False

    def compare(self, path, meta, schedule):
        """(reason why this run cannot continue from the checkpoint, or None; a phrase per changed setting)."""
        config, now, step = self.config, self.settings, meta["step"] + 0
        before = {f.name: meta["config"].get(f.name, f.default) for f in dataclasses.fields(config)}
        longer = before["max_iters"] != config.max_iters
        if config.warmup_iters < 0 and (longer or before["warmup_iters"] >= 0):  # keep 5% of the first max_iters
            if before["warmup_iters"] < 0:
                before["warmup_iters"] = round(0.05 * before["max_iters"])
            config.warmup_iters = now["warmup_iters"] = before["warmup_iters"]
        changed = [key for key in now if before[key] != now[key]]
        serious = [f"{key} {before[key]!r} -> {now[key]!r}" for key in changed if key not in MAY_CHANGE_ON_RESUME]
        old, refusal = dataclasses.replace(config, max_iters=before["max_iters"]), None
        if serious:
            refusal = f"{path} belongs to another run: {', '.join(serious)}; undo this, or choose another out_dir"
        elif step > config.max_iters or any(schedule(s, old) != schedule(s, config) for s in range(step * longer)):
            refusal = (f"max_iters {old.max_iters} -> {config.max_iters} would change the learning rates of the {step} "
                       "steps already done: a run can be extended with --schedule=constant, or with --schedule=wsd "
                       "before its decay (--branch)")
        elif any(self.data.identity.get(key) != value for key, value in meta["data"].items()):  # older ones have fewer
            refusal = (f"this run was trained on different data (its sha256 differs from {path}): prepare it as "
                       "before, or choose another out_dir")
        sets, sets_before = getattr(self.data, "eval_sets", {}), meta.get("eval_sets", {})
        changes = [f"{key} was {before[key]!r}, is {now[key]!r}" for key in changed]
        both = sorted(sets.keys() & sets_before.keys())
        return refusal, changes + [f"the tokens of eval_sets {name} have changed" for name in both
                                   if sets[name] != sets_before[name]]

    def restore(self, path, tensors, meta, resumes):
        """Restore what `save` wrote, in this run or in a branch's trunk; returns its step."""
        state = checkpoint.unflatten(tensors, meta["skeleton"])
        vars(self.progress).update({key: meta[key] for key in vars(self.progress)})
        self.progress.wandb_id = meta["wandb_id"] if resumes else None  # a branch is a run of its own
        if not resumes or any(meta["config"].get(key) != self.settings[key]
                              for key in COMPARED_OVER & self.settings.keys()):
            self.progress.best_val_loss, meta["best"] = math.inf, None
        current, cut = self.model.state_dict(), distributed.cut_like
        self.model.load_state_dict({name: cut(t, current.get(name)) for name, t in state["model"].items()})
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            kept = {i: {key: cut(t, parameters[i]) for key, t in of.items()} for i, of in saved["state"].items()}
            optimizer.load_state_dict({**saved, "state": kept})
        checkpoint.set_rng_state(state["rng"])
        if self.is_main and resumes:
            self.manager.on_resume(path, meta)
        return meta["step"]

    def at_end(self, done):
        """True if the run ends after `done` steps."""
        return done >= self.config.max_iters or self.progress.ended

    def save_if_due(self, step, telemetry, signals):
        """Save every checkpoint_interval steps or after an evaluation, at the end, and when asked to stop."""
        interval, done = self.config.checkpoint_interval, step + 1
        last = self.at_end(done) or signals.stopping
        due = last or done in self.kept_steps or (done % interval == 0 if interval else telemetry.evaluated)
        if due:
            self.data.check_unchanged()
            state = {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers],
                     "rng": checkpoint.rng_state()}
            values = map(distributed.whole, checkpoint.in_order(checkpoint.flatten(state)[0]).values())
            try:
                if self.is_main:
                    self.save(state, values, done, telemetry)
            finally:
                for _ in values:  # every process must take part in gathering each sharded tensor
                    pass
        if last and self.is_main and self.saved_step < done:
            raise Stopped(f"the checkpoint of step {done} was not written, the last is from step {self.saved_step}: "
                          f"make room, then {resume_command('--resume=auto')}")

    def save(self, state, values, done, telemetry):
        """Write the checkpoint after `done` steps; `values`: the tensors of `state`, in order, gathered."""
        meta = {"step": done, "tokens": done * self.config.batch_tokens, "config": self.settings,
                **vars(self.progress), "seconds": telemetry.seconds(), "data": self.data.identity,
                "file_times": getattr(self.data, "file_times", None),
                "tokenizer": self.data.meta.get("tokenizer"), "table": self.data.meta.get("table"),
                "eval_sets": getattr(self.data, "eval_sets", {}), "log_crc32": telemetry.log_file.crc32}
        telemetry.log_file.sync()  # no checkpoint may be on disk before the log that leads to it
        try:
            self.manager.save(state, meta, telemetry.compared_loss, values)
            self.saved_step = done
        except OSError as error:  # such as a full disk; earlier checkpoints are untouched
            telemetry.say(f"step {done}: checkpoint not written ({error}); the one before stays")


def branch_point(config):
    """The checkpoint that --branch=RUN@STEP names. Raises ConfigError if RUN has none from that step."""
    trunk, _, step = config.branch.rpartition("@")
    kept = checkpoint.steps(trunk)
    if not step.isdecimal() or int(step) not in kept:
        raise ConfigError(f"branch={config.branch}: {trunk or 'RUN@STEP'} has checkpoints of steps "
                          f"{', '.join(map(str, sorted(kept))) or '(none)'}: name one of them, or train it with "
                          "--keep_steps")
    return kept[int(step)]


def lock_run_dir(out, wait=0.0):
    """Lock an out_dir, see files.lock_folder. Raises ConfigError if another run holds it after `wait` seconds."""
    try:
        return files.lock_folder(out, wait)
    except BlockingIOError as error:
        raise ConfigError(f"another run is writing to {out} ({error.strerror}): wait for it, or choose another "
                          "out_dir") from None


@contextlib.contextmanager
def writing_to(out):
    """`with writing_to(out): ...`: an OSError inside becomes a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write to {error.filename or out} ({error.strerror}): make room and continue with "
                          "--resume=auto, or choose another out_dir") from None


def resume_command(*changes):
    """The command line that continues this run with some settings changed."""
    names = tuple(change.partition("=")[0] for change in changes)
    if distributed.world_size() > 1:
        return "the same torchrun command with " + " ".join(changes)
    return shlex.join([sys.executable, *(a for a in sys.argv if a.partition("=")[0] not in names), *changes])
