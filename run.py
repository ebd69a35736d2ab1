"""A run's folder and its life: what `train` in train.py asks for around a step.

    lock            two runs in one folder would mix their records: the second is refused
    resume          from the newest checkpoint that is whole, bit for bit
    records         config.json, log.jsonl, result.json, loss.png, Weights & Biases (see records.py)
    checkpoints     after evaluations, every checkpoint_interval steps, at the end, and when asked to stop
    signals         SIGTERM, SIGINT, SIGUSR1: finish the step, save, exit with 0; a second SIGINT exits at once
    what stops it   memory that runs out, max_bad_steps, a data file that changed, a silent process: one line each, which
                    says what is saved and how to continue

Nothing here knows what is trained: losses and metrics come in, decisions go out.

    python -m pytest tests/test_chaos.py          make chaos: the same, for long
"""

import contextlib
import dataclasses
import datetime
import errno
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from pathlib import Path

import torch
import torch.distributed as dist

import checkpoint
import distributed
from configurator import ConfigError, main_error
from data.loader import DataError
from records import Log, draw_loss, environment, read_log, write_json

# What may differ when a run continues: nothing here changes a loss beyond rounding. Everything else is refused.
MAY_CHANGE_ON_RESUME = {
    "out_dir", "resume", "init_from", "micro_batch_size", "auto_micro_batch", "eval_interval", "eval_tokens",
    "final_eval_tokens", "eval_block_size", "log_interval", "checkpoint_interval", "keep_checkpoints", "async_checkpoint",
    "wandb", "wandb_project", "device", "compile", "max_bad_steps", "backend", "self_check", "timeout_minutes",
    "dataset",  # its content is compared by its hash instead
}
COMPARED_OVER = {"eval_tokens", "eval_block_size"}  # losses over other tokens cannot be compared with the best so far
PICTURE_SECONDS = 60  # at most one loss.png in so many; importing matplotlib takes 2 s, so a process of its own draws it

# Dense bf16 peak of one device in FLOP/s, from the makers' data sheets; an unknown device gets no MFU.
PEAK_FLOPS = {"H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12,
              "L40S": 362e12, "B200": 2250e12, "RTX 4090": 165e12, "RTX 3090": 71e12}


class Stopped(RuntimeError):
    """A run that cannot continue by itself; the message, one line, says why, what is saved, and how to continue."""


def launch(prog, main):
    """main(argv) as a program: what goes wrong becomes one line and an exit code, which is returned."""
    with main_error(prog, DataError, checkpoint.CheckpointError, Stopped):
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
        self.config, self.model, self.data = config, model, data
        self.rank, self.world_size = distributed.rank(), distributed.world_size()
        self.is_main = self.rank == 0
        self.device = next(model.parameters()).device
        self.out = Path(config.out_dir)
        # what a checkpoint holds beside weights and optimisers
        self.seconds_before, self.skipped, self.bad, self.best, self.ended = 0.0, 0, 0, math.inf, False
        self.code_versions, self.wandb_id = [], None
        # and what it does not
        self.metrics, self.saved_step, self.not_saved, self.stopping = None, 0, None, False
        self.log_file = self.bar = self.wandb = self.picture = self.resumed_from = None
        self.evaluated, self.began = False, time.perf_counter()
        self.picture_time = self.began

    def __enter__(self):
        if self.is_main:
            with writing_to(self.out):
                self.lock = lock_run_dir(self.out)  # until the process ends; what is read below must not be written to
        distributed.barrier()
        self.stop = StopRequest()
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.config.dtype == "float16")
        return self

    def __exit__(self, kind, error, trace):
        self.stop.close()
        if self.bar is not None:
            self.bar.close()
        if error is not None and is_out_of_memory(error):
            traceback.clear_frames(trace)  # they keep the activations alive
            fewer = max(1, self.config.micro_batch_size // 2)
            raise Stopped(
                f"memory does not hold a micro-batch of {self.config.micro_batch_size} x {self.config.block_size} tokens: "
                + (resume_command(f"--micro_batch_size={fewer}", "--resume=auto") if self.config.micro_batch_size > 1 else
                   "choose a smaller block_size or model, or --dtype=bfloat16")
                + " (--auto_micro_batch finds one that fits; the result is the same)") from None

    def say(self, text):
        """Print a line on rank 0, beside the progress bar where there is one."""
        if self.is_main:
            (self.bar.write if self.bar is not None else say)(text)

    # ------------------------------------------------------------------------------------------------------ set-up

    def parallelize(self):
        """The model as the loop calls it: compiled, and with its gradients averaged over all processes."""
        config, model = self.config, self.model
        if config.auto_micro_batch:
            fits = min(distributed.all_gather(self.find_micro_batch_size()))
            if not fits:
                raise Stopped(f"not even a micro-batch of 1 x {config.block_size} tokens fits in memory: choose a smaller "
                              "block_size or model, or --dtype=bfloat16")
            config.micro_batch_size = fits
        self.settings = dataclasses.asdict(config)
        if config.compile:
            model.compile()
        self.forward = model
        if self.world_size > 1:
            from torch.nn.parallel import DistributedDataParallel

            ids = [self.device.index] if self.device.type == "cuda" else None
            self.forward = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
            # DDP reorders its buckets after its first backward, and gradients added in another order differ in the last
            # bit. A resumed run must equal one that never stopped, so the first backward is not that of a step.
            self.forward_and_backward(*next(iter(self.micro_batches(0)))[:2])
            self.model.zero_grad(set_to_none=True)
        return self.forward

    def forward_and_backward(self, x, y):
        with self.autocast():
            loss = self.forward(x, y, loss_only=True)[1]
        loss.backward()

    def find_micro_batch_size(self):
        """The largest of micro_batch_size, its half, its quarter ... whose forward and backward fit in memory, beside the
        gradients and what AdamW keeps; 0 where not even 1 does."""
        size, parameters = self.config.micro_batch_size, list(self.model.parameters())
        held_bytes = 3 * sum(p.numel() * p.element_size() for p in parameters)
        while size:
            fits = True
            try:
                held = torch.empty(held_bytes, dtype=torch.uint8, device=self.device)  # noqa: F841
                x, y, _ = next(iter(self.data.micro_batches(0, self.rank, self.world_size, size)))
                with self.autocast():
                    loss = self.model(x, y, loss_only=True)[1]
                torch.autograd.grad(loss, parameters, allow_unused=True)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                fits = False
            held = x = y = loss = None  # noqa: F841  free for the next try; a traceback would keep the activations alive
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            if fits:
                return min(size, self.config.micro_batch_size)
            size //= 2
        return 0

    def resume(self, optimizers, schedule):
        """Restore the newest good checkpoint, if the run is to continue, and open the records; returns the step to begin
        with. Raises ConfigError where the checkpoint belongs to another run."""
        config, out, start = self.config, self.out, 0
        self.optimizers = optimizers
        found = checkpoint.candidates(out)
        if config.resume == "must" and not found:
            raise ConfigError(f"resume=must: there is no {out / checkpoint.NEWEST}; start with --resume=auto")
        self.manager = checkpoint.CheckpointManager(out, config.keep_checkpoints, config.async_checkpoint)
        if config.resume != "never" and found:
            path, tensors, meta, damaged = checkpoint.load_first(found)
            with checkpoint.fitting(path):
                start = self.restore(path, tensors, meta, schedule)
            self.resumed_from = path, meta, damaged
            del tensors  # as large as the model and its optimiser
        seen = distributed.all_gather((start, config.dtype, self.data.identity))
        if any(s != seen[0] for s in seen):
            raise ConfigError(f"the ranks disagree about step, dtype or data ({seen}): out_dir and the dataset must be the "
                              "same on every node")
        self.start = self.done = self.saved_step = start
        self.complete = (self.ended or start == config.max_iters) and (out / "result.json").exists() and start > 0
        if not self.complete:
            if self.is_main:
                with writing_to(out):
                    if self.resumed_from:
                        (out / "result.json").unlink(missing_ok=True)  # of fewer steps: the run is not finished any more
                        with checkpoint.fitting(path):
                            self.manager.on_resume(path, meta)
                    else:
                        keep_earlier(out)
                    out.mkdir(parents=True, exist_ok=True)
            distributed.barrier()
            self.open_records()
        self.began = self.last_log_time = time.perf_counter()
        self.last_log_step, self.paused_seconds = start, 0.0
        return start

    def restore(self, path, tensors, meta, schedule):
        """Put back what `save` saved; returns its step."""
        before = dict(meta["config"])
        if "branches.0.norm.weight" in dict(meta["skeleton"]["dict"]).get("model", {}).get("dict", {}):
            raise ConfigError(f"{path} was written before November 2026, when the model's parameters had other names: "
                              "sample.py, export.py and --init_from read its weights; resume it with the commit that "
                              "config.json names")
        self.check_same_run(path, before, meta["step"], schedule)
        if meta["data"] != self.data.identity:
            raise ConfigError(f"the data is not what this run was trained on (its sha256 differs from {path}): prepare it as "
                              "before, or choose another out_dir")
        if self.is_main and meta.get("file_times") != getattr(self.data, "file_times", None):
            self.data.verify()  # copied, or written to in between; 18 GB take a minute
        state = checkpoint.unflatten(tensors, meta["skeleton"])
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.scaler.load_state_dict(state["scaler"])
        checkpoint.set_rng_state(state["rng"])
        self.seconds_before, self.skipped, self.bad, self.best = (
            meta[k] + 0 for k in ("seconds", "skipped", "bad", "best_val_loss"))
        self.ended = meta["ended"] is True
        self.code_versions, self.wandb_id = list(meta["code_versions"]), meta["wandb_id"]
        if any(before.get(key) != self.settings[key] for key in COMPARED_OVER & self.settings.keys()):
            self.best, meta["best"] = math.inf, None
        return meta["step"] + 0

    def check_same_run(self, path, before, step, schedule):
        """Raises ConfigError when settings that alter the run differ from the checkpoint's. Another max_iters is allowed
        where the schedule gives the steps so far the same rates."""
        config, now = self.config, self.settings
        known = {f.name: f.default for f in dataclasses.fields(config)}
        before = {**known, **{key: value for key, value in before.items() if key in known}}
        if before["max_iters"] != config.max_iters:
            old = dataclasses.replace(config, **before)
            if config.warmup_iters < 0 and before["warmup_iters"] < 0:  # 5% of the plan that the run began with
                config.warmup_iters = old.warmup_iters = round(0.05 * old.max_iters)
                now["warmup_iters"] = before["warmup_iters"] = config.warmup_iters
            changed_at = next((s for s in range(step) if s >= config.max_iters or schedule(s, old) != schedule(s, config)),
                              None)
            if changed_at is not None:
                raise ConfigError(f"max_iters {old.max_iters} -> {config.max_iters} would change the learning rate of step "
                                  f"{changed_at}, which is done (the checkpoint is of step {step}): a run can be made longer "
                                  "with --schedule=constant, or with --schedule=wsd before its decay")
        serious = {key: (before[key], value) for key, value in now.items()
                   if before.get(key) != value and key not in MAY_CHANGE_ON_RESUME | {"max_iters"}}
        if serious:
            shown = ", ".join(f"{key} {old!r} -> {new!r}" for key, (old, new) in serious.items())
            raise ConfigError(f"{path} belongs to another run: {shown}; put these back, or choose another out_dir")
        self.changes = [f"{key} was {before[key]!r}, is {value!r}" for key, value in now.items() if before.get(key) != value]

    def open_records(self):
        """config.json, log.jsonl, Weights & Biases; and the lines before the first step."""
        config, model = self.config, self.model
        counts, tokens = model.parameter_count(), config.max_iters * config.batch_tokens
        flops = model.flops_per_token()["total"]
        self.derived = {"processes": self.world_size, "tokens": tokens, "device": str(self.device),
                        "device_name": device_name(self.device), "threads": torch.get_num_threads(), "parameters": counts,
                        "flops_per_token": flops, "decayed": model.decayed(), **self.data.derived(config, self.world_size)}
        if self.is_main:
            self.environment = environment()
            code = self.environment["code"]
            self.code_versions += [code] if self.code_versions[-1:] != [code] else []
            try:
                write_json(self.out / "config.json", {
                    "config": self.settings, "derived": self.derived, "environment": self.environment,
                    "code_versions": self.code_versions, "data": self.data.meta,
                    "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds")})
                self.log_file = Log(self.out, self.start)
            except OSError as error:
                raise ConfigError(f"cannot write the records to {self.out} ({error.strerror}): make room, or choose another "
                                  "out_dir") from None
            self.open_wandb()
            self.bar = Bar(config.max_iters, self.start)
        self.say(f"{config.pattern or config.model}: {counts['total']:,} parameters, {len(self.derived['decayed'])} of "
                 f"{len(list(model.parameters()))} tensors with weight decay; {self.derived['device_name']} x "
                 f"{self.world_size}, {config.dtype}; tokens mixed by {model.computed_by()}")
        for line in model.defaults():
            self.say(line)
        micro_batches = math.ceil(self.data.sequences_per_step / self.world_size / config.micro_batch_size)
        self.say(f"data: {config.dataset}; {config.max_iters:,} steps of {config.batch_tokens:,} tokens = "
                 f"{in_short(tokens)}" + (f" ({self.derived['epochs']:.2f} epochs)" if "epochs" in self.derived else "")
                 + f", {micro_batches} micro-batches per step")
        if self.resumed_from:
            path, meta, damaged = self.resumed_from
            for line in damaged:
                self.say(f"skipped: {line}")
            self.say("; ".join([f"continuing from {path} at step {self.start}", *self.changes]))
            if self.code_versions[:-1] and self.code_versions != meta["code_versions"]:
                self.say(f"the code was {self.code_versions[-2]}, is {self.code_versions[-1]}: config.json names both, and a "
                         "sweep's report keeps the run apart")

    def open_wandb(self):
        if self.config.wandb == "off":
            return
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(f"wandb={self.config.wandb}: {error}: pip install wandb, or --wandb=off") from None
        self.wandb_id = self.wandb_id or uuid.uuid4().hex[:8]  # a run that continues keeps its id
        try:
            if self.config.wandb == "online":
                wandb.login()
            wandb.init(project=self.config.wandb_project, name=self.out.name, mode=self.config.wandb, dir=self.out,
                       config={**self.settings, **self.derived}, id=self.wandb_id, resume="allow")
        except wandb.Error as error:
            raise ConfigError(f"wandb={self.config.wandb}: {error} Or keep it here: --wandb=offline") from None
        self.wandb = wandb

    # ---------------------------------------------------------------------------------------------------- the step

    def steps(self):
        """The steps that are left; ends early where the run is asked to stop, or an evaluation says "stop"."""
        while self.done < self.config.max_iters and not (self.stopping or self.ended):
            yield self.done
            self.done += 1
            if self.bar is not None:
                self.bar.step()

    def micro_batches(self, step):
        """(x, y, weight) of this process; gradients are averaged over processes in the last one's backward only."""
        batches = iter(self.data.micro_batches(step, self.rank, self.world_size, self.config.micro_batch_size))
        batch = next(batches)
        while batch is not None:
            following = next(batches, None)
            if self.world_size > 1:
                self.forward.require_backward_grad_sync = following is None
            yield batch
            batch = following

    def autocast(self):
        dtype = getattr(torch, self.config.dtype)
        return torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def unscale(self, optimizers):
        for optimizer in optimizers:
            self.scaler.unscale_(optimizer)

    def agree(self, loss, grad_norm):
        """(mean loss over processes, gradient norm) as floats. The same message says whether any process was asked to stop,
        so that all of them stop after the same step."""
        shared = torch.stack([loss / self.world_size, torch.tensor(float(self.stop.requested), device=self.device)])
        if self.world_size > 1:
            dist.all_reduce(shared)
        self.stopping = self.stopping or shared[1].item() > 0
        return shared[0].item(), grad_norm.item()

    def optimizer_step(self, optimizers):
        for optimizer in optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        self.bad = 0

    def skip(self, step, loss, grad_norm):
        """Count a step that is left out because its loss or its gradient is not finite. Raises Stopped after too many."""
        overflow = self.scaler.is_enabled() and math.isfinite(loss) and self.scaler.get_scale() > 1  # finding its scale
        if self.scaler.is_enabled():
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)  # finds what is not finite, and does nothing else
            self.scaler.update()
        self.skipped, self.bad = self.skipped + 1, self.bad + (not overflow)
        self.say(f"step {step + 1}: loss {loss}, gradient norm {grad_norm}: step skipped ({self.bad} in a row)")
        self.write_log("skipped", step + 1, train_loss=loss, grad_norm=grad_norm)
        if self.bad >= self.config.max_bad_steps:
            self.settle(wait=True)
            newest = self.out / checkpoint.NEWEST
            saved = f"{newest}, step {self.saved_step}" if newest.exists() else "none"
            raise Stopped(f"stopped at step {step + 1}: loss or gradient not finite {self.bad} times in a row"
                          + (f"; {self.data.where(step, self.rank, self.world_size)}" if hasattr(self.data, "where") else "")
                          + f"; the last good checkpoint is {saved}; try a lower learning_rate")

    # ----------------------------------------------------------------------------------------------------- records

    def log(self, step, **metrics):
        """A line of the log and the screen every log_interval steps: the metrics given, and speed, memory and time."""
        config, done = self.config, step + 1
        if not self.is_main or (done % config.log_interval and done != config.max_iters and not self.stopping):
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
        shown = {"train_loss": "loss {:.4f}", "lr": "lr {:.2e}", "grad_norm": "norm {:.2f}"}
        words = [shown.get(k, k + " {:.4g}").format(v) for k, v in metrics.items()]
        words += [f"{rate:,.0f} tokens/s", *([f"mfu {values['mfu']:.1%}"] if peak else [])]
        self.bar.status(f"step {done:6d}", "  ".join(words))

    def evaluation_due(self, step):
        interval = self.config.eval_interval
        self.evaluated = self.is_last(step) or bool(interval) and (step + 1) % interval == 0
        if self.evaluated:
            self.pause = time.perf_counter()
            self.data.check_unchanged()
        return self.evaluated

    def is_last(self, step):
        return step + 1 == self.config.max_iters

    def log_evaluation(self, step, metrics):
        """Metrics of an evaluation after `step`: in the log, on the screen, and for the best checkpoint."""
        metrics = dict(metrics)
        compared = metrics.pop("compare_loss", metrics["val_loss"])
        self.ended = bool(metrics.pop("stop", False))
        self.best = min(self.best, compared) if math.isfinite(compared) else self.best
        self.metrics, self.compared_loss = metrics, compared
        if any(e["step"] == step + 1 for e in read_log(self.out, "eval")):
            return  # killed between the last checkpoint and the result: the log has it
        self.write_log("eval", step + 1, tokens=(step + 1) * self.config.batch_tokens, **metrics, seconds=self.seconds())
        words = [f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v:,}" if isinstance(v, int) else "" for k, v in
                 metrics.items()]
        self.say(f"step {step + 1:6d}  " + "  ".join(filter(None, words)))
        self.draw()

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
                self.say(f"step {step}: cannot write log.jsonl ({error.strerror}); keeping the line in memory and retrying")
        if self.wandb and event != "skipped":
            self.wandb.log(values, step=step)

    def draw(self):
        """Start a process that draws loss.png, at most once in PICTURE_SECONDS."""
        now = time.perf_counter()
        if self.is_main and now - self.picture_time > PICTURE_SECONDS and (not self.picture or self.picture.poll() is not None):
            self.picture_time = now
            with contextlib.suppress(OSError):
                self.picture = subprocess.Popen([sys.executable, Path(__file__).with_name("records.py"), self.out],
                                                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def seconds(self):
        """Training time so far, in seconds, over all stretches of the run."""
        return round(self.seconds_before + time.perf_counter() - self.began, 3)

    # ------------------------------------------------------------------------------------------------- checkpoints

    def save_if_due(self, step, optimizers):
        """Save after `step` where that is due: by checkpoint_interval or after an evaluation, at the end, when stopping."""
        config, done = self.config, step + 1
        due = done % config.checkpoint_interval == 0 if config.checkpoint_interval else self.evaluated
        last = self.is_last(step) or self.stopping or self.ended
        if due or last:
            if not self.evaluated:
                self.pause = time.perf_counter()
                self.data.check_unchanged()
            self.save(done, optimizers, self.compared_loss if self.evaluated else None)
        self.settle(wait=last)
        if due or last or self.evaluated:
            self.paused_seconds += time.perf_counter() - self.pause

    def save(self, step, optimizers, loss):
        """Begin to save the state after `step`, whose validation loss is `loss` if it is known."""
        if not self.is_main:
            return
        self.settle(wait=True)
        self.manager.save(
            {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in optimizers],
             "scaler": self.scaler.state_dict(), "rng": checkpoint.rng_state()},
            {"step": step, "tokens": step * self.config.batch_tokens, "seconds": self.seconds(), "skipped": self.skipped,
             "bad": self.bad, "ended": self.ended, "best_val_loss": self.best, "config": self.settings, "data": self.data.identity,
             "file_times": getattr(self.data, "file_times", None), "code_versions": self.code_versions,
             "wandb_id": self.wandb_id, "tokenizer": self.data.meta.get("tokenizer"), "table": self.data.meta.get("table")},
            loss, first=self.log_file.sync)

    def settle(self, wait=False):
        """Take note of a checkpoint that is on disk by now, or could not be written."""
        if not self.is_main:
            return
        step, error = self.manager.result(wait) or (self.saved_step, None)
        self.not_saved = error or self.not_saved
        if error:  # a full disk, say: what was saved before is untouched
            self.say(f"step {step}: checkpoint not written ({error}); the one before stays")
        else:
            self.saved_step = step

    def finish(self, evaluate):
        """The end: result.json and the last metrics; None where the run was stopped before its end."""
        config, done = self.config, self.done
        if self.complete:
            self.say(f"{self.out} is finished already; to train again use --resume=never")
            return None
        if done < config.max_iters and not self.ended:
            return self.stopped()
        if self.metrics is None:  # killed between the last checkpoint and the result
            self.log_evaluation(done - 1, evaluate(self.model, final=True))
        if not self.is_main:
            return self.metrics
        again = "make room, then " + resume_command("--resume=auto")
        if self.saved_step < done:
            raise Stopped(f"training is done, but its last checkpoint is of step {self.saved_step} ({self.not_saved}): {again}")
        seconds, tokens = self.seconds(), done * config.batch_tokens
        result = {"model": config.pattern or config.model, **self.metrics, "best_val_loss": self.best, "steps": done,
                  "skipped_steps": self.skipped, "tokens": tokens, "seconds": seconds,
                  "tokens_per_second": round(tokens / seconds), "parameters": self.derived["parameters"]["total"],
                  "flops": self.derived["flops_per_token"] * tokens, "memory_bytes": peak_memory(self.device),
                  "processes": self.world_size, "device_name": self.derived["device_name"], "dtype": config.dtype,
                  "code": self.code_versions[-1], "commit": self.environment["commit"], "seed": config.seed}
        try:
            self.log_file.flush()
            write_json(self.out / "result.json", result)
        except OSError as error:
            raise Stopped(f"training is done and its last checkpoint is of step {self.saved_step}, but the records could not "
                          f"be finished ({error.strerror}): {again}") from None
        try:
            draw_loss(self.out)
        except ImportError as error:
            self.say(f"no loss.png: {error} (pip install matplotlib; then python records.py {self.out})")
        except Exception:  # no picture is worth a run
            pass
        if self.wandb:
            self.wandb.summary.update(result)
            self.wandb.finish()
        self.bar.close()
        words = [f"validation loss {self.metrics['val_loss']:.4f} nats per token"]
        if "val_bits_per_byte" in result:
            words.append(f"{result['val_bits_per_byte']:.4f} bits per byte")
        if "xz9_bits_per_byte" in result:
            words.append(f"xz -9 needs {result['xz9_bits_per_byte']:.4f} for the same bytes")
        say(f"{', '.join(words)}; {in_short(tokens)} tokens in {seconds:.0f} s; records in {self.out}/")
        return self.metrics

    def stopped(self):
        """The last words of a run that was asked to stop."""
        if self.is_main:
            if self.saved_step < self.done:
                raise Stopped(f"stopped after step {self.done} without saving it ({self.not_saved}); the last checkpoint "
                              f"is of step {self.saved_step}")
            self.say(f"stopped after step {self.done} of {self.config.max_iters} and saved "
                     f"{self.out / checkpoint.NEWEST}; continue with: {resume_command('--resume=auto')}")
        return None


class Bar:
    """A progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, total, start):
        self.bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, initial=start, unit="step", dynamic_ncols=True, smoothing=0.05)

    def step(self):
        if self.bar is not None:
            self.bar.update(1)

    def status(self, step, text):
        """The state of training: behind the bar, or as a line."""
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
        else:
            say(f"{step}  {text}")

    def write(self, text):
        if self.bar is not None:
            self.bar.write(text)
        else:
            say(text)

    def close(self):
        if self.bar is not None:
            self.bar.close()
            self.bar = None


class StopRequest:
    """Turns the first SIGTERM, SIGUSR1 (Slurm's warning) or SIGINT into a request to finish the step. A SIGINT after that
    ends the process at once; a thread reads it, because Python's own handlers wait for a collective to return."""

    def __init__(self):
        self.requested, self.before = False, {}
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
            if hasattr(signal, name):
                self.before[getattr(signal, name)] = signal.signal(getattr(signal, name), self.ask)
        threading.Thread(target=self.listen, args=(reader,), daemon=True).start()

    def ask(self, number, frame):
        self.requested = True

    def listen(self, reader):
        asked = False
        while numbers := os.read(reader, 1):
            if asked and numbers[0] == signal.SIGINT:
                with contextlib.suppress(OSError):
                    os.write(2, b"interrupted at once: nothing saved since the last checkpoint\n")
                os._exit(130)  # sys.exit would wait for a checkpoint that is being written, and for other processes
            asked = asked or numbers[0] in self.before

    def close(self):
        """A run is over: a Ctrl-C is Python's again."""
        for number, handler in self.before.items():
            signal.signal(number, handler)


# ------------------------------------------------------------------------------------------------- folders and machine

def lock_run_dir(out):
    """Lock an out_dir for this process, until it ends in whatever way. Raises ConfigError where another run has it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    lock = open(out.parent / f".{out.name}.lock", "w")
    try:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # not a Unix
        pass
    except BlockingIOError:
        raise ConfigError(f"another run writes to {out}: wait for it, or choose another out_dir") from None
    except OSError as error:  # some network file systems have no locks
        say(f"{out} cannot be locked ({error.strerror}): make sure that no other run writes there")
    return lock


@contextlib.contextmanager
def writing_to(out):
    """`with writing_to(out): ...`: an OSError inside becomes a ConfigError, one line."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write to {out} ({error.strerror}): choose another out_dir") from None


def keep_earlier(out):
    """Rename an earlier run's folder, so that nothing is overwritten; into itself where it is a mount point."""
    if not (out / "log.jsonl").exists():
        return
    number = next(n for n in range(1, 10**6) if not Path(f"{out}.{n}").exists() and not (out / f"earlier.{n}").exists())
    kept = Path(f"{out}.{number}")
    try:
        os.rename(out, kept)
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.EXDEV):
            raise
        kept = out / f"earlier.{number}"
        kept.mkdir()
        for entry in list(out.iterdir()):
            if not entry.name.startswith("earlier."):
                os.rename(entry, kept / entry.name)
    say(f"the earlier run is kept as {kept}")


def is_out_of_memory(error):
    """Whether an exception says that memory ran out: PyTorch has a class of its own for a GPU, and only words for a CPU."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or isinstance(error, RuntimeError) and any(
        words in str(error).lower() for words in ("not enough memory", "can't allocate memory", "out of memory"))


def resume_command(*changes):
    """The command line that continues from here with some settings changed."""
    names = tuple(change.partition("=")[0] for change in changes)
    if distributed.world_size() > 1:
        return "the same torchrun line with " + " ".join(changes)
    return shlex.join([sys.executable, *(a for a in sys.argv if a.partition("=")[0] not in names), *changes])


def say(text):
    """Print a line, if that can be done: standard output may go to a file on the full disk."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def in_short(tokens):
    return f"{tokens / 1e6:,.1f}M" if tokens >= 1e5 else f"{tokens:,}"


def peak_flops(device_name):
    """The device's dense bf16 peak in FLOP/s, or None."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in (device_name or "")), None)


def device_name(device):
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def peak_memory(device):
    """Largest number of bytes so far: the GPU's allocations, or the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
