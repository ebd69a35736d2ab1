"""A run's folder and its life: what `train` in train.py asks for around a step.

    lock            two runs in one folder would mix their records: the second is refused
    resume          from the newest checkpoint that is whole, bit for bit
    records         config.json, log.jsonl, result.json, loss.png, Weights & Biases (see runtime/records.py)
    checkpoints     after evaluations, every checkpoint_interval steps, at the end, and when asked to stop
    signals         SIGTERM, SIGINT, SIGUSR1: finish the step, save, exit with 0; a second SIGINT exits at once
    what stops it   memory that runs out, max_bad_steps, a data file that changed, a silent process: each is one line
                    that says what is saved and how to continue

Nothing here knows what is trained: losses and metrics come in, decisions go out.
"""

import contextlib
import dataclasses
import datetime
import math
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import optim
from runtime import checkpoint, counting, distributed, records
from runtime.errors import ConfigError, Stopped, is_out_of_memory, main_error
from runtime.records import Log, environment, write_json

# What may differ when a run continues: nothing here changes a loss beyond rounding. Everything else is refused.
MAY_CHANGE_ON_RESUME = {
    "out_dir", "resume", "micro_batch_size", "auto_micro_batch", "eval_interval", "eval_tokens", "final_eval_tokens",
    "eval_block_size", "eval_sets", "eval_tasks", "eval_tasks_interval", "log_interval", "checkpoint_interval",
    "keep_checkpoints", "keep_steps", "wandb", "wandb_project", "device", "compile", "parallel", "recompute",
    "max_bad_steps", "backend", "self_check", "timeout_minutes", "workers",  # of experiments/vision/classify.py
    "init_from", "branch",  # read only where there is no checkpoint
    "dataset",  # its content is compared by its hash instead
    "max_iters",  # where the steps that are done keep their learning rates
}
COMPARED_OVER = {"eval_tokens", "eval_block_size"}  # losses over other tokens cannot be compared with the best so far
LOSS_CURVE = Path(__file__).resolve().parents[1] / "tools" / "loss_curve.py"
PICTURE_SECONDS = 60  # between pictures; importing matplotlib takes 2 s, so a process of its own draws them

# Dense bf16 peak of one device in FLOP/s, from the makers' data sheets; an unknown device gets no MFU.
PEAK_FLOPS = {"H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12,
              "L40S": 362e12, "B200": 2250e12, "RTX 4090": 165e12, "RTX 3090": 71e12}


def launch(prog, main):
    """main(argv) as a program: what goes wrong becomes one line and an exit code, which is returned."""
    with main_error(prog):
        try:
            code = main(sys.argv[1:])
            distributed.leave()
            return code
        except distributed.Lost as error:
            distributed.exit_retryable(prog, error)
        except RuntimeError as error:
            if not distributed.is_communication_error(error):
                raise
            distributed.exit_retryable(prog, distributed.who_is_missing(error))


class Run:
    """One run of `train`: `with Run(config, model, data) as run`. See `train` for what config, model and data offer.

    Raises ConfigError where the folder cannot be used, Stopped where the run cannot continue.
    """

    def __init__(self, config, model, data):
        self.config, self.model, self.data, self.out = config, model, data, Path(config.out_dir)
        self.rank, self.world_size = distributed.rank(), distributed.world_size()
        self.is_main, self.device = self.rank == 0, next(model.parameters()).device
        self.bar = self.wandb = self.picture = self.metrics = None
        self.stopping = False
        self.progress = SimpleNamespace(  # what a checkpoint holds of the run itself
            seconds=0.0, skipped=0, bad=0, best_val_loss=math.inf, ended=False, code_versions=[], wandb_id=None)

    def __enter__(self):
        if self.config.resume == "must" and not checkpoint.candidates(self.out):
            raise ConfigError(f"resume=must: there is no {self.out / checkpoint.NEWEST}; start with --resume=auto")
        if self.is_main:
            with writing_to(self.out):
                self.lock = lock_run_dir(self.out)  # held while this object or the process lives
                self.aside = records.move_aside(self.out, begin=False)
            self.wandb = open_wandb(self.config)
        distributed.barrier()
        self.stop = StopRequest()
        return self

    def __exit__(self, kind, error, trace):
        if error is None:  # or torchrun's SIGTERM would end this process before it says who did not answer
            self.stop.close()
        if self.bar is not None:
            self.bar.close()
        if error is not None and is_out_of_memory(error):
            traceback.clear_frames(trace)  # they keep the activations alive
            size, block_size = self.config.micro_batch_size, self.config.block_size
            smaller = resume_command(f"--micro_batch_size={size // 2}", "--resume=auto")
            raise Stopped(f"memory does not hold a micro-batch of {size} x {block_size} tokens: "
                          + (f"{smaller} (the result is the same; --auto_micro_batch finds one that fits)" if size > 1
                             else "choose a smaller block_size or model, or --dtype=bfloat16")) from None

    def say(self, text):
        """Print a line on rank 0, above the progress bar where there is one."""
        if self.is_main:
            (say if self.bar is None else self.bar.write)(text)

    # ------------------------------------------------------------------------------------------------------ set-up

    def parallelize(self):
        """The model as the loop calls it: compiled, recomputed, sharded, its gradients averaged over all processes."""
        config, self.forward = self.config, self.model
        distributed.prepare_layers(self.model, config)
        if config.auto_micro_batch:
            self.find_micro_batch_size()
        if config.parallel != "ddp":
            distributed.shard(self.model, config, self.device)
        elif self.world_size > 1:
            from torch.nn.parallel import DistributedDataParallel

            ids = [self.device.index] if self.device.type == "cuda" else None
            self.forward = DistributedDataParallel(self.model, device_ids=ids, gradient_as_bucket_view=True)
            # DDP reorders its buckets after the first backward that synchronizes, and gradients added in another order
            # differ in the last bit. A resumed run must equal one that never stopped, so that backward is not a step's.
            self.first_loss().backward()
            self.model.zero_grad(set_to_none=True)
        return self.forward

    def first_loss(self):
        size = self.config.micro_batch_size
        x, y, _ = next(iter(self.data.micro_batches(0, self.rank, self.world_size, size)))
        with self.autocast():
            return self.forward(x, y, loss_only=True)[1]

    def find_micro_batch_size(self):
        """Halve micro_batch_size until forward and backward fit in every process's memory, beside the gradients and
        what AdamW keeps."""
        config, parameters = self.config, list(self.model.parameters())
        if config.parallel != "ddp":
            raise ConfigError(f"auto_micro_batch: what fits beside parallel={config.parallel} is not known before it "
                              "is sharded: give --micro_batch_size")
        config.micro_batch_size = min(config.micro_batch_size, self.data.sequences_per_step // self.world_size or 1)
        reserved_bytes = 3 * sum(p.numel() * p.element_size() for p in parameters)
        while True:
            try:
                reserved = torch.empty(reserved_bytes, dtype=torch.uint8, device=self.device)  # noqa: F841
                torch.autograd.grad(self.first_loss(), parameters, allow_unused=True)
                break
            except (RuntimeError, MemoryError) as error:
                if config.micro_batch_size == 1 or not is_out_of_memory(error):
                    raise
            reserved = None  # noqa: F841  not in the except block, where the traceback keeps the activations alive
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            config.micro_batch_size //= 2
        config.micro_batch_size = min(distributed.all_gather(config.micro_batch_size))

    def resume(self, optimizers, schedule):
        """Restore the newest good checkpoint, if the run is to continue, and open the records.

        Raises ConfigError where the checkpoint belongs to another run.
        """
        config, out, step, path, lines = self.config, self.out, 0, None, []
        self.settings, self.optimizers = dataclasses.asdict(config), optimizers
        self.kept_steps = {int(each) for each in config.keep_steps.split(",") if each}
        self.manager = checkpoint.CheckpointManager(out, config.keep_checkpoints, self.kept_steps)
        found = checkpoint.candidates(out)
        resumes = config.resume != "never" and bool(found)
        if resumes or config.branch:
            path, tensors, meta, damaged = checkpoint.load_first(found if resumes else [self.branch_point()])
            with checkpoint.fitting(path):
                refusal, changes = self.compare(path, meta, schedule)
            if refusal:
                raise ConfigError(refusal)
            if self.is_main and meta.get("file_times") != getattr(self.data, "file_times", None):
                self.data.verify()  # copied, or written to in between; 18 GB take a minute
            with writing_to(out), checkpoint.fitting(path):
                step = self.restore(path, tensors, meta, resumes)
            del tensors  # as large as the model and its optimiser
            lines = [f"skipped: {line}" for line in damaged]
            how = "continuing" if resumes else "branching"
            lines.append("; ".join([f"{how} from {path} at step {step}", *changes]))
        seen = distributed.all_gather((step, config.dtype, self.data.identity))
        if any(s != seen[0] for s in seen):
            raise ConfigError(f"the ranks disagree about step, dtype or data ({seen}): out_dir and the dataset must be "
                              "the same on every node")
        self.done = self.saved_step = step
        self.complete = step > 0 and self.at_end() and records.is_finished(out)
        if self.complete:
            return
        if self.is_main:
            with writing_to(out):
                if not resumes and not self.began_before():
                    self.aside = records.move_aside(out) if records.run_files(out) else self.aside
                if self.aside:
                    self.say(f"the earlier run is kept as {self.aside}")
                if path is not None and not resumes:  # a branch's log begins with its trunk's
                    shutil.copyfile(path.parent / "log.jsonl", out / "log.jsonl")
                (out / "result.json").unlink(missing_ok=True)  # of fewer steps
        self.open_records(lines)
        self.began = self.last_log_time = self.picture_time = time.perf_counter()
        self.last_log_step, self.paused_seconds = step, 0.0

    def began_before(self):
        """Whether the records in out_dir are of this very run, killed before its first checkpoint: it begins again."""
        with contextlib.suppress(records.BadRecord), records.fields():
            config = records.read_json(self.out / "config.json")["config"]
            if self.config.resume == "auto" and not (self.out / "result.json").exists():
                return {**config, "resume": ""} == {**self.settings, "resume": ""}
        return False

    def branch_point(self):
        """The checkpoint that --branch=RUN@STEP names. Raises ConfigError where RUN kept none of that step."""
        trunk, _, step = self.config.branch.rpartition("@")
        found = checkpoint.steps(trunk)
        if not step.isdecimal() or int(step) not in found:
            raise ConfigError(f"branch={self.config.branch}: {trunk or 'RUN@STEP'} keeps checkpoints of steps "
                              f"{', '.join(map(str, sorted(found))) or '(none)'}: name one of them, or train it with "
                              "--keep_steps")
        return found[int(step)]

    def compare(self, path, meta, schedule):
        """(why this run cannot continue from a checkpoint, or None; a phrase for each setting that changed)."""
        config, now, step = self.config, self.settings, meta["step"] + 0
        before = {f.name: meta["config"].get(f.name, f.default) for f in dataclasses.fields(config)}
        longer = before["max_iters"] != config.max_iters
        if config.warmup_iters < 0 and (longer or before["warmup_iters"] >= 0):  # 5% of what was planned at first
            if before["warmup_iters"] < 0:
                before["warmup_iters"] = round(0.05 * before["max_iters"])
            config.warmup_iters = now["warmup_iters"] = before["warmup_iters"]
        changed = [key for key in now if before[key] != now[key]]
        serious = [f"{key} {before[key]!r} -> {now[key]!r}" for key in changed if key not in MAY_CHANGE_ON_RESUME]
        old, refusal = dataclasses.replace(config, max_iters=before["max_iters"]), None
        if serious:
            refusal = f"{path} belongs to another run: {', '.join(serious)}; put these back, or choose another out_dir"
        elif step > config.max_iters or any(schedule(s, old) != schedule(s, config) for s in range(step * longer)):
            refusal = (f"max_iters {old.max_iters} -> {config.max_iters} would change learning rates of the {step} "
                       "steps that are done: a run goes on longer with --schedule=constant, or with --schedule=wsd "
                       "before its decay (--branch)")
        elif meta["data"] != self.data.identity:
            refusal = (f"the data is not what this run was trained on (its sha256 differs from {path}): prepare it as "
                       "before, or choose another out_dir")
        return refusal, [f"{key} was {before[key]!r}, is {now[key]!r}" for key in changed]

    def restore(self, path, tensors, meta, resumes):
        """Put back what `save` saved, in this folder's run or in the trunk of a branch; returns its step."""
        state = checkpoint.unflatten(tensors, meta["skeleton"])
        vars(self.progress).update({key: meta[key] for key in vars(self.progress)})
        if not resumes or any(meta["config"].get(key) != self.settings[key]
                              for key in COMPARED_OVER & self.settings.keys()):
            self.progress.best_val_loss, meta["best"] = math.inf, None
        own, cut = self.model.state_dict(), distributed.cut_like
        self.model.load_state_dict({name: cut(t, own.get(name)) for name, t in state["model"].items()})
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            kept = {i: {key: cut(t, parameters[i]) for key, t in of.items()} for i, of in saved["state"].items()}
            optimizer.load_state_dict({**saved, "state": kept})
        checkpoint.set_rng_state(state["rng"])
        if self.is_main and resumes:
            self.manager.on_resume(path, meta)
        return meta["step"]

    def open_records(self, lines):
        """config.json, log.jsonl, Weights & Biases, the progress bar; and what is said before the first step."""
        config, model, progress = self.config, self.model, self.progress
        device_name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        self.derived = {
            "processes": self.world_size, "tokens": config.max_iters * config.batch_tokens, "device": str(self.device),
            "device_name": device_name, "threads": torch.get_num_threads(),
            "parameters": counting.parameter_count(model),
            "flops_per_token": counting.flops_per_token(model)["total"],
            "decayed": optim.decayed(model, getattr(config, "as_released", False)),
            **self.data.derived(config, self.world_size)}
        if not self.is_main:
            return
        self.environment = environment()
        code, versions = self.environment["code"], progress.code_versions
        if versions and versions[-1] != code:
            lines.append(f"the code was {versions[-1]}, is {code}: config.json names both")
        progress.code_versions = versions + [code] * (versions[-1:] != [code])
        data = {key: value for key, value in self.data.meta.items() if key != "table"}  # which checkpoints keep
        with writing_to(self.out):
            write_json(self.out / "config.json", {
                "config": self.settings, "derived": self.derived, "environment": self.environment,
                "code_versions": progress.code_versions, "data": data,
                "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds")})
            self.log_file = Log(self.out, self.done)
        if self.wandb:
            progress.wandb_id = progress.wandb_id or uuid.uuid4().hex[:8]  # a run that continues keeps its id
            self.wandb.init(project=config.wandb_project, name=self.out.name, mode=config.wandb, dir=self.out,
                            config={**self.settings, **self.derived}, id=progress.wandb_id, resume="allow")
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=config.max_iters, initial=self.done, dynamic_ncols=True, smoothing=0.05,
                            bar_format="{percentage:3.0f}% <{remaining}{postfix}")  # with the metrics, 80 columns
        micro_batches = math.ceil(self.data.sequences_per_step / self.world_size / config.micro_batch_size)
        for line in [
            f"{config.pattern or config.model}: {self.derived['parameters']['total']:,} parameters; {device_name} x "
            f"{self.world_size}, {config.dtype}; tokens mixed by {counting.computed_by(model)}",
            *counting.left_out(model),
            f"data: {config.dataset}; {config.max_iters:,} steps of {config.batch_tokens:,} tokens"
            + (f" = {self.derived['epochs']:.2f} epochs" if "epochs" in self.derived else "")
            + f", {micro_batches} micro-batches per step", *lines]:
            self.say(line)

    # ---------------------------------------------------------------------------------------------------- the step

    def steps(self):
        """The steps that are left; ends early where the run is asked to stop, or an evaluation says "stop"."""
        while not (self.at_end() or self.stopping):
            yield self.done
            self.done += 1
            if self.bar is not None:
                self.bar.update()

    def at_end(self):
        return self.done >= self.config.max_iters or self.progress.ended

    def micro_batches(self, step):
        """(x, y, weight) of this process; gradients are averaged over processes in the last one's backward only."""
        batches = iter(self.data.micro_batches(step, self.rank, self.world_size, self.config.micro_batch_size))
        batch = next(batches)
        while batch is not None:
            following = next(batches, None)
            if self.config.parallel == "hsdp":  # shards are summed after every one: whole gradients are large
                self.model.set_requires_all_reduce(following is None)
            elif self.config.parallel == "ddp" and self.world_size > 1:
                self.forward.require_backward_grad_sync = following is None
            yield batch
            batch = following

    def autocast(self):
        dtype = getattr(torch, self.config.dtype)
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)

    def agree(self, loss, grad_norm):
        """(mean loss over processes, gradient norm) as floats. The same message says whether any process was asked to
        stop, so that all of them stop after the same step."""
        shared = torch.stack([loss / self.world_size, torch.tensor(float(self.stop.requested), device=self.device)])
        if self.world_size > 1:
            dist.all_reduce(shared)
        self.stopping = shared[1].item() > 0
        return shared[0].item(), distributed.whole(grad_norm).item()

    def optimizer_step(self, optimizers):
        for optimizer in optimizers:
            optimizer.step()
        self.progress.bad = 0

    def skip(self, step, loss, grad_norm):
        """Count a step whose loss or gradient is not finite, which is left out. Raises Stopped after too many."""
        progress, newest = self.progress, self.out / checkpoint.NEWEST
        progress.skipped += 1
        progress.bad += 1
        self.say(f"step {step + 1}: loss {loss}, gradient norm {grad_norm}: step skipped ({progress.bad} in a row)")
        self.write_log("skipped", step + 1, train_loss=loss, grad_norm=grad_norm)
        if progress.bad >= self.config.max_bad_steps:
            where = f"; {self.data.where(step, self.rank, self.world_size)}" if hasattr(self.data, "where") else ""
            saved = f"{newest}, step {self.saved_step}" if newest.exists() else "none"
            raise Stopped(f"stopped at step {step + 1}: loss or gradient not finite {progress.bad} times in a row"
                          f"{where}; the last good checkpoint is {saved}; try a lower learning_rate")

    # ----------------------------------------------------------------------------------------------------- records

    def log(self, step, **metrics):
        """A line of the log and the screen every log_interval steps: the metrics given, speed, memory and time."""
        config, done = self.config, step + 1
        if not self.is_main or (done % config.log_interval and not self.is_last(step)):
            return
        now = time.perf_counter()
        seconds = max(now - self.last_log_time - self.paused_seconds, 1e-9)
        rate = (done - self.last_log_step) * config.batch_tokens / seconds
        self.last_log_time, self.last_log_step, self.paused_seconds = now, done, 0.0
        values = {"tokens": done * config.batch_tokens, **metrics, "tokens_per_second": round(rate),
                  "memory_bytes": peak_memory(self.device), "seconds": self.seconds()}
        peak = peak_flops(self.derived["device_name"]) if config.dtype != "float32" else None
        if peak:
            values["mfu"] = round(rate * self.derived["flops_per_token"] / (peak * self.world_size), 4)
        self.write_log("train", done, **values)
        words = in_words({key: v for key, v in values.items() if key not in ("tokens", "memory_bytes", "seconds")})
        if self.bar is not None:
            self.bar.set_postfix_str(" ".join(words), refresh=False)
        else:
            say("  ".join([f"step {done:6d}", *words]))

    def evaluation_due(self, step):
        self.pause, self.compared_loss = time.perf_counter(), None
        interval = self.config.eval_interval
        self.evaluated = self.is_last(step) or bool(interval) and (step + 1) % interval == 0
        if self.evaluated:
            self.data.check_unchanged()
        return self.evaluated

    def is_last(self, step):
        return step + 1 == self.config.max_iters

    def log_evaluation(self, step, metrics):
        """Metrics of an evaluation after `step`: in the log, on the screen, and for the best checkpoint."""
        self.metrics, progress, done = dict(metrics), self.progress, step + 1
        self.compared_loss = self.metrics.pop("compare_loss", metrics["val_loss"])
        sets = self.metrics.pop("sets", {})
        self.metrics |= {f"val_loss_{name}": found["val_loss"] for name, found in sets.items()}
        progress.ended = bool(self.metrics.pop("stop", False))
        if self.done == done:
            return  # made again for a result that was lost; its line is in the log
        if math.isfinite(self.compared_loss):
            progress.best_val_loss = min(progress.best_val_loss, self.compared_loss)
        self.write_log("eval", done, tokens=done * self.config.batch_tokens, **self.metrics, seconds=self.seconds())
        self.say("  ".join([f"step {done:6d}", *in_words(self.metrics)]))
        for name, found in sets.items():
            self.write_log("eval_set", done, set=name, tokens=done * self.config.batch_tokens, **found)
            self.say("  ".join([f"step {done:6d}  {name}:", *in_words(found)]))
        now = time.perf_counter()
        if self.is_main and now - self.picture_time > PICTURE_SECONDS:
            self.picture_time = now
            with contextlib.suppress(OSError):
                self.picture = subprocess.Popen([sys.executable, LOSS_CURVE, self.out],
                                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def tasks_due(self, step):
        interval = self.config.eval_tasks_interval
        return bool(interval) and (self.is_last(step) or (step + 1) % interval == 0)

    def log_tasks(self, step, scores):
        """Scores of tasks after `step`, on the main process: a line of the log and of the screen."""
        if self.is_main:
            self.write_log("tasks", step + 1, tokens=(step + 1) * self.config.batch_tokens, **scores)
            self.say("  ".join([f"step {step + 1:6d}", *in_words(scores)]))

    def write_log(self, event, step, **values):
        """A line of log.jsonl. A disk that refuses it does not end the run: it is tried again with the next."""
        if not self.is_main:
            return
        behind = len(self.log_file.unwritten)
        try:
            self.log_file.write(event, step, **values)
            if behind:
                self.say(f"step {step}: log.jsonl is complete again")
        except OSError as error:
            if not behind:
                self.say(f"step {step}: cannot write log.jsonl ({error.strerror}); keeping the line in memory and "
                         "retrying")
        if self.wandb and event not in ("skipped", "eval_set"):  # the line before has their losses
            self.wandb.log(values, step=step)

    def seconds(self):
        """Training time so far, in seconds, over all stretches of the run."""
        return round(self.progress.seconds + time.perf_counter() - self.began, 3)

    # ------------------------------------------------------------------------------------------------- checkpoints

    def save_if_due(self, step, optimizers):
        """Save by checkpoint_interval or after an evaluation, at the end, and when asked to stop."""
        interval, done = self.config.checkpoint_interval, step + 1
        last = self.is_last(step) or self.stopping or self.progress.ended
        due = last or done in self.kept_steps or (done % interval == 0 if interval else self.evaluated)
        if due:
            self.data.check_unchanged()
            state = {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in optimizers],
                     "rng": checkpoint.rng_state()}
            values = map(distributed.whole, checkpoint.in_order(checkpoint.flatten(state)[0]).values())
            try:
                if self.is_main:
                    self.save(state, values, done)
            finally:
                for _ in values:  # every process takes part in gathering each sharded tensor
                    pass
        if last and self.is_main and self.saved_step < done:
            raise Stopped(f"the checkpoint of step {done} was not written, the last one is of step {self.saved_step}: "
                          f"make room, then {resume_command('--resume=auto')}")
        self.paused_seconds += time.perf_counter() - self.pause

    def save(self, state, values, done):
        """Write the checkpoint of `done` steps; `values`: of the tensors in `state`, in order, and whole."""
        config = self.config
        meta = {"step": done, "tokens": done * config.batch_tokens, "config": self.settings,
                **vars(self.progress), "seconds": self.seconds(), "data": self.data.identity,
                "file_times": getattr(self.data, "file_times", None),
                "tokenizer": self.data.meta.get("tokenizer"), "table": self.data.meta.get("table")}
        self.log_file.sync()  # no checkpoint is on disk before the log that leads to it
        try:
            self.manager.save(state, meta, self.compared_loss, values)
            self.saved_step = done
        except OSError as error:  # a full disk, say: what was saved before is untouched
            self.say(f"step {done}: checkpoint not written ({error}); the one before stays")

    def finish(self, evaluate):
        """The end: result.json and the last metrics; None where the run was stopped before, or is finished already."""
        config, done, progress = self.config, self.done, self.progress
        if self.complete:
            self.say(f"{self.out} is finished already; to train again use --resume=never")
            return None
        if not self.at_end():
            self.say(f"stopped after step {done} of {config.max_iters} and saved {self.out / checkpoint.NEWEST}; "
                     f"continue with: {resume_command('--resume=auto')}")
            return None
        if self.metrics is None:  # killed between the last checkpoint and the result
            self.log_evaluation(done - 1, evaluate(self.model, final=True))
        if not self.is_main:
            return self.metrics
        seconds, tokens = self.seconds(), done * config.batch_tokens
        result = {"model": config.pattern or config.model, **self.metrics, "best_val_loss": progress.best_val_loss,
                  "steps": done, "skipped_steps": progress.skipped, "tokens": tokens, "seconds": seconds,
                  "tokens_per_second": round(tokens / seconds), "parameters": self.derived["parameters"]["total"],
                  "flops": self.derived["flops_per_token"] * tokens, "memory_bytes": peak_memory(self.device),
                  "processes": self.world_size, "device_name": self.derived["device_name"], "dtype": config.dtype,
                  "code": progress.code_versions[-1], "commit": self.environment["commit"], "seed": config.seed}
        with writing_to(self.out):
            self.log_file.flush()
            write_json(self.out / "result.json", result)
        if self.picture:
            self.picture.wait()  # or it would draw over what is drawn now
        try:
            draw_loss(self.out)
        except Exception as error:  # no picture is worth a run
            self.say(f"no loss.png: {error} (python tools/loss_curve.py {self.out} draws it; it needs matplotlib)")
        if self.wandb:
            self.wandb.summary.update(result)
            self.wandb.finish()
        self.say(f"finished: {tokens:,} tokens in {seconds:.0f} s; records in {self.out}/")
        return self.metrics


class StopRequest:
    """Turns the first SIGTERM, SIGUSR1 (Slurm's warning) or SIGINT into a request to finish the step. A SIGINT after
    that ends the process at once; a thread reads it, because Python's own handlers wait for a collective to return."""

    def __init__(self):
        self.requested = False
        reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        self.before = {number: signal.signal(number, lambda *_: setattr(self, "requested", True))
                       for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
        threading.Thread(target=self.listen, args=(reader,), daemon=True).start()

    def listen(self, reader):
        asked = False
        while numbers := os.read(reader, 1):
            if asked and numbers[0] == signal.SIGINT:
                with contextlib.suppress(OSError):
                    os.write(2, b"interrupted at once: nothing saved since the last checkpoint\n")
                os._exit(130)  # sys.exit would wait for other processes
            asked = asked or numbers[0] in self.before
        os.close(reader)

    def close(self):
        """The run is over: a Ctrl-C is Python's again."""
        for number, handler in self.before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(-1)
        os.close(self.writer)  # ends the thread


# ------------------------------------------------------------------------------------------------- folders and machine

def lock_run_dir(out):
    """Lock an out_dir, see lock_folder. Raises ConfigError where another run has it."""
    try:
        return records.lock_folder(out)
    except BlockingIOError:
        raise ConfigError(f"another run writes to {out}: wait for it, or choose another out_dir") from None


@contextlib.contextmanager
def writing_to(out):
    """`with writing_to(out): ...`: an OSError inside becomes a ConfigError, one line."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write to {out} ({error.strerror}): make room and continue with --resume=auto, "
                          "or choose another out_dir") from None


def open_wandb(config):
    """The module of Weights & Biases, logged in; None where it is not wanted. Raises ConfigError."""
    if config.wandb == "off":
        return None
    try:
        import wandb

        if config.wandb == "online":
            wandb.login()
        return wandb
    except Exception as error:  # not installed, no key, no network
        raise ConfigError(f"wandb={config.wandb}: {error}; pip install wandb, --wandb=offline keeps the curves here, "
                          "--wandb=off does without") from None


def resume_command(*changes):
    """The command line that continues from here with some settings changed."""
    names = tuple(change.partition("=")[0] for change in changes)
    if distributed.world_size() > 1:
        return "the same torchrun line with " + " ".join(changes)
    return shlex.join([sys.executable, *(a for a in sys.argv if a.partition("=")[0] not in names), *changes])


def draw_loss(folder):
    from tools.loss_curve import draw_loss  # only now: a change in how pictures are drawn is no other code of the run

    draw_loss(folder)


def say(text):
    """Print a line, if that can be done: standard output may go to a file on the full disk."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def in_words(metrics):
    """The numbers among the metrics as the screen shows them."""
    shown = {"train_loss": "loss {:.4f}", "lr": "lr {:.2e}", "grad_norm": "norm {:.2f}", "mfu": "mfu {:.1%}",
             "tokens_per_second": "{:,} tokens/s"}
    return [shown.get(key, key + (" {:.4f}" if isinstance(value, float) else " {:,}")).format(value)
            for key, value in metrics.items() if isinstance(value, (int, float))]


def peak_flops(device_name):
    """The device's dense bf16 peak in FLOP/s, or None."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in (device_name or "")), None)


def peak_memory(device):
    """Largest number of bytes so far: the GPU's allocations, or the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
