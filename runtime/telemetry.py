"""A run's output: log.jsonl, the screen, speed, loss.png, Weights & Biases, result.json (see records.py)."""

import contextlib
import datetime
import math
import re
import resource
import shlex
import subprocess
import sys
import time
import uuid
from pathlib import Path

import torch

import optim
from common.errors import ConfigError, Stopped
from inspection import counting
from runtime import checkpoint, distributed, loss_curve
from runtime.folder import resume_command, writing_to
from runtime.loss_curve import draw_loss
from runtime.records import BadRecord, Log, read_json, write_json

PICTURE_SECONDS = 60  # between plots, drawn by a separate process: importing matplotlib takes 2 s

# Dense bf16 peak per device in FLOP/s, from data sheets; an unknown device gets no MFU.
# The first name in a device's counts, as the end of a word: H100 stands after H100 PCIe.
PEAK_FLOPS = {"H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H20": 148e12, "A100": 312e12,
              "A10G": 70e12, "A10": 125e12, "L40S": 362e12, "B200": 2250e12, "B300": 2250e12, "RTX 5090": 209e12,
              "RTX 4090": 165e12, "RTX 3090": 71e12}


class Telemetry:
    """`with Telemetry(config, model, data, folder) as telemetry`: a run's records, written on rank 0.

    evaluated: the current step was evaluated. compared_loss: its loss, by which the best checkpoint is chosen.
    """

    def __init__(self, config, model, data, folder):
        self.config, self.model, self.data = config, model, data
        self.folder, self.out, self.progress = folder, folder.out, folder.progress
        self.device = next(model.parameters()).device
        self.is_main, self.world_size = distributed.rank() == 0, distributed.world_size()
        self.bar = self.picture = self.metrics = self.compared_loss = None
        self.evaluated = self.complete = False
        self.wandb = open_wandb(config) if self.is_main else None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if self.bar is not None:
            self.bar.close()

    def say(self, text):
        """Print a line on rank 0, above the progress bar if there is one."""
        if self.is_main:
            (say if self.bar is None else self.bar.write)(text)

    def is_complete(self, step):
        """Mark the run as already finished: `finish` will only say so."""
        self.done, self.complete = step, True

    def open(self, step, settings, lines, log_crc32=None):
        """Open the records at `step`: config.json, log.jsonl (compared with the checkpoint's checksum, if any), Weights
        & Biases, the progress bar; and print a summary of the run."""
        config, model, progress = self.config, self.model, self.progress
        self.done, self.last_log_step, self.paused_seconds = step, step, 0.0
        device_name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        self.derived = {
            "processes": self.world_size, "tokens": config.max_iters * config.batch_tokens, "device": str(self.device),
            "device_name": device_name, "threads": torch.get_num_threads(),
            "parameters": counting.parameter_count(model),
            "flops_per_token": counting.flops_per_token(model)["total"],
            "decayed": optim.decayed(model),
            **self.data.derived(config, self.world_size)}
        if self.is_main:
            self.environment = self.folder.environment
            code, versions = self.environment["code"], progress.code_versions
            if versions and versions[-1] != code:
                lines.append(f"the code was {versions[-1]}, is {code}: config.json names both")
            progress.code_versions = versions + [code] * (versions[-1:] != [code])
            data = {key: value for key, value in self.data.meta.items() if key != "table"}  # long; in every checkpoint
            began = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
            if step > 0:  # resumed: it began when it did; a branch has no config.json yet
                with contextlib.suppress(OSError, BadRecord, LookupError):
                    began = read_json(self.out / "config.json")["time"]
            with writing_to(self.out):
                write_json(self.out / "config.json", {
                    "config": settings, "derived": self.derived, "environment": self.environment,
                    "code_versions": progress.code_versions, "time": began,
                    "data": {**data, "identity": self.data.identity}})
                self.log_file = Log(self.out, step, log_crc32)
            lines += [self.log_file.damage] * bool(self.log_file.damage)
            if self.wandb:
                progress.wandb_id = progress.wandb_id or uuid.uuid4().hex[:8]  # a resumed run keeps its id
                self.wandb.init(project=config.wandb_project, name=self.out.name, mode=config.wandb, dir=self.out,
                                config={**settings, **self.derived}, id=progress.wandb_id, resume="allow")
            self.bar = progress_bar(config.max_iters, step)
            for line in [*about_run(config, model, self.data, self.derived), *lines]:
                self.say(line)
        self.began = self.last_log_time = self.picture_time = time.perf_counter()

    # ---------------------------------------------------------------------------------------------------- the step

    def steps(self, signals):
        """Yields the remaining steps; ends early if the run is asked to stop or an evaluation says "stop"."""
        while not (self.folder.at_end(self.done) or signals.stopping):
            yield self.done
            self.done += 1
            self.paused_seconds += time.perf_counter() - self.logged_at  # evaluating and saving
            if self.bar is not None:
                self.bar.update()

    def log(self, step, **metrics):
        """Log and print a line every log_interval steps: the given metrics, speed, memory and time."""
        config, done, self.logged_at = self.config, step + 1, time.perf_counter()
        self.evaluated, self.compared_loss = False, None
        if not self.is_main or (done % config.log_interval and done != config.max_iters):
            return
        seconds = max(self.logged_at - self.last_log_time - self.paused_seconds, 1e-9)
        rate = (done - self.last_log_step) * config.batch_tokens / seconds
        self.last_log_time, self.last_log_step, self.paused_seconds = self.logged_at, done, 0.0
        values = {"tokens": done * config.batch_tokens, **metrics, "tokens_per_second": round(rate),
                  "memory_bytes": peak_memory(self.device), "seconds": self.seconds()}
        peak = peak_flops(self.derived["device_name"]) if config.dtype != "float32" else None
        if peak:
            values["mfu"] = round(rate * self.derived["flops_per_token"] / (peak * self.world_size), 4)
        self.write("train", done, **values)
        words = in_words({key: v for key, v in values.items() if key not in ("tokens", "memory_bytes", "seconds")})
        if self.bar is not None:
            self.bar.set_postfix_str(" ".join(words), refresh=False)
        else:
            say("  ".join([f"step {done:6d}", *words]))
        self.logged_at = time.perf_counter()

    def skip(self, step, loss, grad_norm):
        """Count a step that is skipped because its loss or gradient is not finite. Raises Stopped after too many."""
        progress = self.progress
        progress.skipped += 1
        progress.bad += 1
        self.say(f"step {step + 1}: loss {loss}, gradient norm {grad_norm}: step skipped ({progress.bad} in a row)")
        self.write("skipped", step + 1, train_loss=loss, grad_norm=grad_norm)
        if progress.bad >= self.config.max_bad_steps:
            where = getattr(self.data, "where", None)
            where = f"; {where(step, distributed.rank(), self.world_size)}" if where else ""
            raise Stopped(f"stopped at step {step + 1}: loss or gradient not finite {progress.bad} times in a row"
                          f"{where}; {self.last_good(step + 1 - progress.bad)}; try a lower learning_rate")

    def last_good(self, step):
        """A phrase that names the last checkpoint from before `step`, the first whose next loss was not finite."""
        paths, best = checkpoint.steps(self.out), self.out / checkpoint.BEST
        with contextlib.suppress(checkpoint.CheckpointError):
            paths.setdefault(checkpoint.load(best, prefix="no tensor")[1]["step"], best)
        if good := [saved for saved in paths if saved < step]:
            return f"the last good checkpoint is {paths[max(good)]}, step {max(good)}"
        if not paths:
            return "the last good checkpoint is none"
        first = min(paths)
        return f"no checkpoint is good: the loss after that of {paths[first]}, step {first}, was already not finite"

    # --------------------------------------------------------------------------------------------------- evaluation

    def log_evaluation(self, step, metrics):
        """Log and print an evaluation's metrics, and keep them for the best checkpoint and the result."""
        self.metrics, progress, done, self.evaluated = dict(metrics), self.progress, step + 1, True
        self.compared_loss = self.metrics.pop("compare_loss", metrics["val_loss"])
        sets = self.metrics.pop("sets", {})
        self.metrics |= {f"val_loss_{name}": of_set["val_loss"] for name, of_set in sets.items()}
        progress.ended = bool(self.metrics.pop("stop", False))
        if self.done == done:
            return  # repeated because result.json was lost; its line is already in the log
        if math.isfinite(self.compared_loss):
            progress.best_val_loss = min(progress.best_val_loss, self.compared_loss)
        self.write("eval", done, tokens=done * self.config.batch_tokens, **self.metrics, seconds=self.seconds())
        self.say("  ".join([f"step {done:6d}", *in_words(self.metrics)]))
        for name, of_set in sets.items():
            self.write("eval_set", done, set=name, tokens=done * self.config.batch_tokens, **of_set)
            self.say("  ".join([f"step {done:6d}  {name}:", *in_words(of_set)]))
        now = time.perf_counter()
        if self.is_main and now - self.picture_time > PICTURE_SECONDS and not self.folder.at_end(done):  # see finish
            self.picture_time = now
            with contextlib.suppress(OSError):
                self.picture = subprocess.Popen([sys.executable, Path(loss_curve.__file__), self.out],
                                                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def log_tasks(self, step, scores):
        """Log and print scores on tasks, on rank 0."""
        if self.is_main:
            self.write("tasks", step + 1, tokens=(step + 1) * self.config.batch_tokens, **scores)
            self.say("  ".join([f"step {step + 1:6d}", *in_words(scores)]))

    def write(self, event, step, **values):
        """Append a line to log.jsonl. If the disk refuses it, the run goes on and retries with the next line."""
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
        if self.wandb and event not in ("skipped", "eval_set"):  # the "train" and "eval" lines have their losses
            self.wandb.log(values, step=step)

    def seconds(self):
        """Training time so far in seconds, including the time before the run was resumed."""
        return round(self.progress.seconds + time.perf_counter() - self.began, 3)

    def finish(self, evaluate):
        """Write result.json and return the last metrics; None if the run was stopped early or was finished before."""
        if self.complete:
            self.say(f"{self.out} is already finished; to train again use --resume=never")
            if self.is_main and not (self.out / "loss.png").exists():  # killed after result.json
                self.draw()
            return None
        if not self.folder.at_end(self.done):
            self.say(f"stopped after step {self.done} of {self.config.max_iters} and saved "
                     f"{self.out / checkpoint.NEWEST}; continue with: {resume_command('--resume=auto')}")
            return None
        if self.metrics is None:  # killed between the last checkpoint and result.json
            self.log_evaluation(self.done - 1, evaluate(self.model, final=True))
        if self.is_main:
            self.write_result()
        return self.metrics

    def write_result(self):
        """Write result.json and loss.png."""
        seconds, tokens = self.seconds(), self.done * self.config.batch_tokens
        result = {**outcome(self.config, self.metrics, self.progress, self.derived, self.done, seconds),
                  "memory_bytes": peak_memory(self.device), "commit": self.environment["commit"]}
        with writing_to(self.out):
            self.log_file.flush()
            write_json(self.out / "result.json", result)
        if self.picture:
            self.picture.wait()  # or an older plot would overwrite this one
        self.draw()
        if self.wandb:
            self.wandb.summary.update(result)
            self.wandb.finish()
        self.say(f"finished: {tokens:,} tokens in {seconds:.0f} s; records in {self.out}/")

    def draw(self):
        """Write loss.png."""
        try:
            draw_loss(self.out)
        except Exception as error:  # a failed plot must not fail the run
            command = shlex.join(["python", "runtime/loss_curve.py", str(self.out)])
            self.say(f"no loss.png: {error} ({command} draws it; it needs matplotlib)")


def outcome(config, metrics, progress, derived, steps, seconds):
    """The contents of result.json, except memory and commit."""
    tokens = steps * config.batch_tokens
    return {"model": config.pattern or config.model, **metrics, "best_val_loss": progress.best_val_loss,
            "steps": steps, "skipped_steps": progress.skipped, "tokens": tokens, "seconds": seconds,
            "tokens_per_second": round(tokens / seconds), "parameters": derived["parameters"]["total"],
            "flops": derived["flops_per_token"] * tokens, "processes": derived["processes"],
            "device_name": derived["device_name"], "dtype": config.dtype, "code": progress.code_versions[-1],
            "seed": config.seed}


def progress_bar(total, step):
    """A tqdm bar if stderr is a terminal, else None."""
    if not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    return tqdm(total=total, initial=step, dynamic_ncols=True, smoothing=0.05,
                bar_format="{percentage:3.0f}% <{remaining}{postfix}")  # with the metrics, 80 columns


def about_run(config, model, data, derived):
    """Lines that summarise the run before the first step."""
    micro_batches = math.ceil(data.sequences_per_step / derived["processes"] / config.micro_batch_size)
    return [f"{config.pattern or config.model}: {derived['parameters']['total']:,} parameters; "
            f"{derived['device_name']} x {derived['processes']}, {config.dtype}; tokens mixed by "
            f"{counting.computed_by(model)}", *counting.left_out(model),
            f"data: {config.dataset}; {config.max_iters:,} steps of {config.batch_tokens:,} tokens"
            + (f" = {derived['epochs']:.2f} epochs" if "epochs" in derived else "")
            + f", {micro_batches} micro-batches per step"]


def open_wandb(config):
    """The Weights & Biases module, logged in; None with wandb=off. Raises ConfigError."""
    if config.wandb == "off":
        return None
    try:
        import wandb

        if config.wandb == "online":
            wandb.login()
        return wandb
    except Exception as error:  # not installed, no key, no network
        raise ConfigError(f"wandb={config.wandb}: {error}; pip install wandb, --wandb=offline to log locally, or "
                          "disable it with --wandb=off") from None


def say(text):
    """Print a line, ignoring errors: stdout may go to a file on a full disk."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def in_words(metrics):
    """The numbers among the metrics, formatted for the screen."""
    shown = {"train_loss": "loss {:.4f}", "lr": "lr {:.2e}", "grad_norm": "norm {:.2f}", "mfu": "mfu {:.1%}",
             "tokens_per_second": "{:,} tokens/s"}
    return [shown.get(key, key + (" {:.4f}" if isinstance(value, float) else " {:,}")).format(value)
            for key, value in metrics.items() if isinstance(value, (int, float))]


def peak_flops(device_name):
    """The device's dense bf16 peak in FLOP/s; None if unknown. A laptop's GPU is another one of the same name."""
    named = lambda name: re.search(rf"{name}\b(?!.* Laptop)", device_name or "")
    return next((peak for name, peak in PEAK_FLOPS.items() if named(name)), None)


def peak_memory(device):
    """Peak memory so far in bytes: the GPU's allocations, or the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
