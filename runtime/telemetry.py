"""A run's output: log.jsonl, the screen, speed, loss.png, Weights & Biases, result.json (see records.py)."""

import dataclasses
import resource
import sys
import time
import uuid
from pathlib import Path

import torch

from common.errors import ConfigError, Stopped, printable
from common.files import writing_to
from common.gpus import peak_flops
from runtime import checkpoint, distributed
from runtime.distributed import resume_command
from runtime.loss_curve import draw_loss
from runtime.records import write_json

PICTURE_SECONDS = 300  # time between plots; one takes 0.3 s, the first 2 s more

SHOWN = {"train_loss": "loss {:.4f}", "lr": "lr {:.2e}", "grad_norm": "norm {:.2f}", "mfu": "mfu {:.1%}",
         "tokens_per_second": "{:,} tokens/s"}  # metrics on the screen; other numbers keep their names


class Telemetry:
    """Writes a run's output, on rank 0: `with Telemetry(config, device) as telemetry`, then `open`.

    val_loss: the loss from the current step's evaluation, to choose the best checkpoint; None without an evaluation.
    """

    def __init__(self, config, device):
        self.config = config
        self.device = device
        self.out = Path(config.out_dir)
        self.is_main = distributed.rank() == 0
        self.world_size = distributed.world_size()
        self.bar = self.metrics = self.val_loss = None
        self.wandb = wandb_module(config) if self.is_main else None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if self.bar is not None:
            self.bar.close()

    def say(self, text):
        """Print a line on rank 0, above the progress bar if there is one."""
        if self.bar is not None:
            self.bar.write(printable(text))
        else:
            distributed.say(text)

    def open(self, found, mixed_by, about_model=()):
        """Begin at found.step (see folder.py), and print a summary of the run. mixed_by: the operators that mix tokens,
        in words. about_model: further lines to print."""
        self.progress = found.progress
        self.derived = found.derived
        self.log_file = found.log
        self.is_complete = found.is_complete
        self.done = found.step
        notes = found.notes
        if not self.is_complete and self.is_main:
            self.commit = found.environment["commit"]
            if self.wandb:
                self.open_wandb(found)
            self.bar = progress_bar(self.config.max_iters, self.done)
            notes = [*self.summary(mixed_by), *about_model, *notes]
        for line in notes:
            self.say(line)
        self.last_log_step = self.done
        self.progress.clock = self.last_log_time = self.picture_time = time.perf_counter()

    def open_wandb(self, found):
        """Open the run in Weights & Biases. A resumed run keeps its id."""
        self.progress.wandb_id = self.progress.wandb_id or uuid.uuid4().hex[:8]
        settings = {**dataclasses.asdict(self.config), **found.derived}
        name = self.config.wandb_run_name or self.out.name
        self.wandb.init(project=self.config.wandb_project, name=name, mode=self.config.wandb, dir=self.out,
                        config=settings, id=self.progress.wandb_id, resume="allow")

    def summary(self, mixed_by):
        """Return two lines about the run: its model and device, then its data."""
        config = self.config
        derived = self.derived
        parts = f", {derived['accumulation']} micro-batches per step" if "accumulation" in derived else ""
        epochs = f" = {derived['epochs']:.2f} epochs" if "epochs" in derived else ""
        return [
            f"{config.pattern or config.model}: {derived['parameters']['total']:,} parameters; "
            f"{derived['device_name']} x {self.world_size}, {config.dtype}; tokens mixed by {mixed_by}",
            f"data: {config.dataset}; {config.max_iters:,} steps of {config.batch_tokens:,} tokens{epochs}{parts}"]

    # ---------------------------------------------------------------------------------------------------- the step

    def steps(self, signals):
        """Yields the remaining steps; ends early if the run is asked to stop or an evaluation says "stop"."""
        while not (self.progress.at_end(self.done) or signals.stopping):
            yield self.done
            self.done += 1
            self.last_log_time += time.perf_counter() - self.logged_at  # evaluating and saving do not count
            if self.bar is not None:
                self.bar.update()

    def log(self, step, **metrics):
        """Log and print a line every log_interval steps: the given metrics, speed, memory and time."""
        config = self.config
        done = step + 1
        self.logged_at = time.perf_counter()
        self.val_loss = None
        if not self.is_main or (done % config.log_interval and done != config.max_iters):
            return
        seconds = max(self.logged_at - self.last_log_time, 1e-9)
        rate = (done - self.last_log_step) * config.batch_tokens / seconds
        self.last_log_time = self.logged_at
        self.last_log_step = done
        shown = {**metrics, "tokens_per_second": round(rate)}
        values = {"tokens": done * config.batch_tokens, **shown, "memory_bytes": peak_memory(self.device),
                  "seconds": self.progress.seconds_now()}
        peak = peak_flops(self.derived["device_name"])
        if peak and config.dtype != "float32":
            mfu = rate * self.derived["flops_per_token"] / (peak * self.world_size)
            shown["mfu"] = values["mfu"] = round(mfu, 4)
        self.write("train", done, **values)
        if self.bar is not None:
            self.bar.set_postfix_str(in_words(shown, " "), refresh=False)
        else:
            self.say(f"step {done:6d}  {in_words(shown)}")
        self.logged_at = time.perf_counter()

    def skip(self, step, loss, grad_norm):
        """Count a step that is skipped because its loss or gradient is not finite. Raises Stopped after too many."""
        progress = self.progress
        done = step + 1
        progress.skipped += 1
        progress.bad += 1
        self.say(f"step {done}: loss {loss}, gradient norm {grad_norm}: step skipped ({progress.bad} in a row)")
        self.write("skipped", done, train_loss=loss, grad_norm=grad_norm)
        if progress.bad >= self.config.max_bad_steps:
            raise Stopped(f"stopped at step {done}: loss or gradient not finite {progress.bad} times in a row; in "
                          f"{self.out} only checkpoints from before step {done - progress.bad} are good; try a lower "
                          "learning_rate")

    # --------------------------------------------------------------------------------------------------- evaluation

    def log_evaluation(self, step, metrics):
        """Log and print an evaluation's metrics, and keep them for the best checkpoint and the result."""
        progress = self.progress
        done = step + 1
        self.metrics = dict(metrics)
        self.val_loss = self.metrics.pop("compare_loss", metrics["val_loss"])
        progress.ended = bool(self.metrics.pop("stop", False))
        if self.done == done:
            return  # repeated because result.json was lost; its line is already in the log
        progress.best_val_loss = min(progress.best_val_loss, self.val_loss)  # if val_loss is NaN, min keeps the first
        self.write("eval", done, tokens=done * self.config.batch_tokens, **self.metrics, seconds=progress.seconds_now())
        self.say(f"step {done:6d}  {in_words(self.metrics)}")
        now = time.perf_counter()
        if self.is_main and now - self.picture_time > PICTURE_SECONDS and not progress.at_end(done):  # see finish
            self.picture_time = now
            self.draw()

    def write(self, event, step, **values):
        """Append a line to log.jsonl. If the write fails, the run continues and retries with the next line."""
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
        if self.wandb and event != "skipped":  # the "train" line has its losses
            self.wandb.log(values, step=step)

    def finish(self, evaluate):
        """Write result.json and return the last metrics, or None if the run was stopped early or was finished before.

        evaluate() computes the final metrics again, if a kill between the evaluation and result.json lost them.
        """
        if self.is_complete:
            self.say(f"{self.out} is already finished; to train again use --resume=never")
            if self.is_main and not (self.out / "loss.png").exists():  # killed after result.json
                self.draw()
            return None
        if not self.progress.at_end(self.done):
            where = f"after step {self.done} of {self.config.max_iters} and saved {self.out / checkpoint.NEWEST}"
            if self.done == 0:
                where = "in the first step, before there was anything to save"
            self.say(f"stopped {where}; continue with: {resume_command('--resume=auto')}")
            return None
        if self.metrics is None:
            self.log_evaluation(self.done - 1, evaluate())
        if self.is_main:
            self.write_result()
        return self.metrics

    def write_result(self):
        """Write result.json and loss.png."""
        result = self.result()
        with writing_to(self.out):
            self.log_file.flush()
            write_json(self.out / "result.json", result)
        self.draw()
        if self.wandb:
            self.wandb.summary.update(result)
            self.wandb.finish()
        self.say(f"finished: {result['tokens']:,} tokens in {result['seconds']:.0f} s; records in {self.out}/")

    def result(self):
        """The contents of result.json."""
        config = self.config
        progress = self.progress
        derived = self.derived
        seconds = progress.seconds_now()
        tokens = self.done * config.batch_tokens
        return {
            "model": config.pattern or config.model, **self.metrics, "best_val_loss": progress.best_val_loss,
            "steps": self.done, "skipped_steps": progress.skipped, "tokens": tokens, "seconds": seconds,
            "tokens_per_second": round(tokens / seconds), "parameters": derived["parameters"]["total"],
            "flops": derived["flops_per_token"] * tokens, "processes": derived["processes"],
            "device_name": derived["device_name"], "dtype": config.dtype, "code": progress.code_versions[-1],
            "seed": config.seed, "memory_bytes": peak_memory(self.device), "commit": self.commit,
        }

    def draw(self):
        """Write loss.png."""
        try:
            draw_loss(self.out)
        except Exception as error:  # a failed plot must not fail the run
            self.say(f"no loss.png: {error} (it needs matplotlib; when the run has ended, --resume=auto draws it)")


def progress_bar(total, step):
    """A tqdm bar if stderr is a terminal, else None."""
    if not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    return tqdm(total=total, initial=step, dynamic_ncols=True, smoothing=0.05,
                bar_format="{percentage:3.0f}% <{remaining}{postfix}")  # fits in 80 columns with the metrics


def wandb_module(config):
    """The Weights & Biases module, logged in; None with wandb=off. Raises ConfigError."""
    if config.wandb == "off":
        return None
    try:
        import wandb

        if config.wandb == "online":
            wandb.login()
        return wandb
    except Exception as error:  # not installed, no key, no network
        raise ConfigError(f"wandb={config.wandb}: {error}; run pip install wandb, log locally with "
                          "--wandb=offline, or disable it with --wandb=off") from None


def in_words(metrics, gap="  "):
    """Format the numbers among the metrics for the screen."""
    words = []
    for key, value in metrics.items():
        if isinstance(value, (int, float)):
            otherwise = key + (" {:.4f}" if isinstance(value, float) else " {:,}")
            words.append(SHOWN.get(key, otherwise).format(value))
    return gap.join(words)


def peak_memory(device):
    """Peak memory so far in bytes: the GPU's allocations, or the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
