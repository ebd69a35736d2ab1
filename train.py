"""Train a language model of any family: one loop, on one CPU or many GPUs.

    python train.py config/longhorn_laptop.py
    python train.py config/longhorn_350m.py --micro_batch_size=8
    python train.py config/longhorn_laptop.py --pattern=longhorn,llama --optimizer=muon
    torchrun --standalone --nproc_per_node=8 train.py config/longhorn_350m.py
    torchrun --nnodes=2 --node_rank=$RANK --master_addr=$HOST --nproc_per_node=8 train.py config/longhorn_350m.py
    torchrun --standalone --nproc_per_node=8 --max-restarts=9 train.py config/longhorn_350m.py --resume=auto

The batch size is given in tokens. The micro-batch size and the number of processes change speed and memory, never the
result: the text windows of step s depend only on (seed, s).

`python train.py --help` lists every setting. Records go to out/<name of the config file>/, see runtime/records.py.
Everything around the step is in runtime/: the run's folder (checkpoints, resuming), telemetry (log, speed, plots),
signals and processes. To train something else, call `train` with your own model, data and evaluation, as
experiments/recall/ does.
"""

if __name__ == "__main__":
    from common import start  # before PyTorch

import dataclasses
import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch

import configurator
import families  # noqa: F401
from common import old_names
from common.errors import ConfigError, env_int, is_out_of_memory
from configurator import Count, Minutes, NotNegative, Positive, Range, Seed, Whole
from data.loader import TokenData
from data.mixture import MixtureData, parse_mixture
from data.prepared import Tokens, find_dataset
from evaluation.validation import Evaluate
from inspection.counting import computed_by, cost_of_step, flops_per_token, left_out, parameter_count
from inspection.self_check import self_check
from model import LM, ModelConfig
from optim import build_optimizers, decayed, set_learning_rate
from runtime import checkpoint, distributed, graphs
from runtime.distributed import launch
from runtime.folder import Folder
from runtime.signals import Signals
from runtime.telemetry import Telemetry, in_words


@dataclass
class TrainConfig(ModelConfig):
    # --- run
    out_dir: str = ""  # folder for the records; empty: out/<name of the last config file>, or out/<init_from>_tuned
    resume: Literal["never", "auto", "must"] = "never"  # auto: continue from out_dir's latest checkpoint, if any;
    # must: continue, or stop if there is none
    branch: str = ""  # RUN@STEP: start from that run's state after STEP, with another max_iters; see keep_steps
    init_from: str = ""  # a run's folder or a checkpoint: start from its weights (fine-tuning), with its architecture
    eval_only: bool = False  # only evaluate the weights of init_from, or the latest in out_dir, on their own data
    seed: Seed = 1337  # random seed for the initial weights and the data order
    self_check: Literal["on", "off", "only"] = "on"  # check kernels and states against plain PyTorch; only: then exit
    # --- data
    dataset: str = "pystdlib"  # a prepared folder: its name in data/, or its path; for a mixture: a:0.8,b:0.2
    block_size: Count = 1024  # context length in training, in tokens
    vocab_size: Whole = 0  # tokens in the vocabulary; 0: the dataset's number, rounded up to a multiple of 64
    batch_tokens: Count = 524288  # tokens per optimiser step, over all processes and micro-batches
    micro_batch_size: Count = 8  # sequences per micro-batch on each process: as many as fit in memory
    # --- optimiser
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: Muon for the layers' matrices, AdamW for the rest
    max_iters: Count = 4800  # optimiser steps
    learning_rate: Positive = 6e-4  # peak learning rate
    min_lr: NotNegative = -1.0  # learning rate at the last step (not with schedule=constant); -1: a tenth of the peak
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"  # learning rate after the warmup;
    # wsd: constant, then a 1 - sqrt decay
    warmup_iters: Whole = -1  # steps of linear warmup; -1: 5% of max_iters
    decay_iters: Whole = -1  # steps of decay with schedule=wsd; -1: 20% of max_iters
    weight_decay: NotNegative = 0.1  # applied only to the weights of linear maps and the embedding
    beta1: Annotated[float, Range(0, below=1)] = 0.9  # AdamW: decay rate of the mean gradient
    beta2: Annotated[float, Range(0, below=1)] = 0.95  # AdamW: decay rate of the mean squared gradient
    grad_clip: NotNegative = 1.0  # maximum gradient norm; 0: no clipping
    max_bad_steps: Count = 10  # stop after this many consecutive steps with a non-finite loss or gradient
    # --- evaluation and records
    eval_interval: Whole = 250  # steps between evaluations; 0: only at the end
    eval_tokens: Whole = 0  # validation tokens per evaluation (best_val_loss uses these); 0: all
    final_eval_tokens: Whole = 0  # validation tokens for the final evaluation, reported in result.json; 0: all
    eval_block_size: Whole = 0  # tokens per validation window; 0: block_size
    log_interval: Count = 10  # steps between log lines
    checkpoint_interval: Whole = 0  # steps between checkpoints; 0: after each evaluation and at the end
    keep_checkpoints: Count = 2  # number of latest checkpoints to keep, besides the best
    keep_steps: str = ""  # comma-separated steps whose checkpoints are kept, for --branch
    wandb: Literal["off", "online", "offline"] = "off"  # also log to Weights & Biases
    wandb_project: str = "longhorn"  # project in Weights & Biases
    wandb_run_name: str = ""  # the run's name in Weights & Biases; empty: the name of its folder
    # --- system
    device: str = "auto"  # auto: cuda if there is a GPU, else cpu
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # dtype of matrix products; auto: bfloat16 where it is fast
    compile: bool = False  # torch.compile: slower to start, faster per step
    graphs: bool = False  # replay micro-batches as a CUDA graph, for when Python is the bottleneck; not timed yet
    parallel: Literal["ddp", "fsdp", "hsdp"] = "ddp"  # ddp: replicas; fsdp: shards; hsdp: shards in each machine
    recompute: Literal["none", "block", "every_other"] = "none"  # block, every_other: to save memory,
    # recompute the activations of every layer, or of every other layer, in the backward pass
    timeout_minutes: Minutes = 10.0  # how long processes wait for each other before giving up

    FIRST = ("model", "n_layer", "n_embd", "block_size", "dataset", "batch_tokens", "micro_batch_size", "max_iters",
             "learning_rate", "out_dir")  # --help shows these on top
    RENAMED = old_names.TRAIN
    PROGRAMS = {"images": "experiments/vision/classify.py"}  # a config file's `task` -> the program that reads it


# ------------------------------------------------------------------------------------------------------------ the loop

def train(config, model, data, evaluate, schedule=None):
    """Train `model` as `config` says, from scratch or from the last checkpoint, and write the run's records.

    Args:
        config: a TrainConfig or a subclass, with out_dir, dtype and the sizes filled in.
        model: any nn.Module on its device; model(x, y, loss_only=True) -> (_, mean loss). Unless self_check is "off",
            it must be an LM or have toy() and toy_batch(), see inspection/self_check.py. If it has after_step(), the
            loop calls it after each optimiser step. Whatever after_step changes, such as averaged weights, must be in
            state_dict() to survive a resume. Use a registered buffer, or get_extra_state and set_extra_state as in
            experiments/vision/classify.py. A plain attribute is lost.
        data: micro_batches(step, rank, world_size, micro_batch_size) yields (x, y, weight). The weight is world_size *
            (targets in the micro-batch) / max(1, targets in the step), where targets of -1 do not count. `data` also
            needs identity, meta and derived() for the records, and check_unchanged() (see TokenData).
        evaluate: (model, final) -> {"val_loss": nats, ...}. All other metrics are logged, and the final ones also go to
            result.json. "stop": True ends the run after this step.
        schedule: (step, config) -> learning rate as a fraction of the peak; default: learning_rate_factor.

    Returns the final metrics, or None if the run was stopped early or only checked. Raises ConfigError, or Stopped if
    the run cannot continue (common/errors.py).
    """
    schedule, device = schedule or learning_rate_factor, next(model.parameters()).device
    dtype = getattr(torch, config.dtype)
    if config.self_check == "only":
        line = self_check(model, dtype, config.compile)
        return distributed.say(line)
    with (Telemetry(config, device) as telemetry, Folder(config, model, data, telemetry.say) as folder,
          Signals() as signals):  # Folder turns out-of-memory into a one-line error
        telemetry.say(self_check(model, dtype, config.compile) if config.self_check == "on" else "self-check: off")
        forward = distributed.parallelize(model, config, data)  # torch.compile; DistributedDataParallel or fully_shard
        optimizers = build_optimizers(model, config)
        counts = {"parameters": parameter_count(model), "flops_per_token": flops_per_token(model)["total"],
                  "decayed": decayed(model)}
        found = folder.resume(optimizers, schedule, counts)  # from the newest intact checkpoint, if there is one
        telemetry.open(found, computed_by(model), left_out(model))

        def forward_backward(x, y, weight):
            with distributed.autocast(config, device):
                micro_loss = forward(x, y, loss_only=True)[1] * weight
            micro_loss.backward()
            return micro_loss.detach().float()

        forward_backward = graphs.replayed(forward_backward, forward, config, telemetry.say)
        for step in telemetry.steps(signals):  # ends early when asked to stop
            set_learning_rate(optimizers, schedule(step, config))
            loss = 0.0
            for x, y, weight in distributed.micro_batches(forward, config, data, step, signals):
                loss = loss + forward_backward(x, y, weight)
            if signals.dropped:  # asked to stop mid-step: the step is redone when the run continues
                folder.save_if_due(step - 1, None, True)
                break
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
            loss, grad_norm = distributed.agree(loss, grad_norm, signals)  # floats, the same on every rank
            if math.isfinite(loss) and math.isfinite(grad_norm):
                for optimizer in optimizers:
                    optimizer.step()
                if hasattr(model, "after_step"):  # e.g. weight averaging; use a buffer: plain attributes are not saved
                    model.after_step()
                folder.progress.bad = 0
            else:
                telemetry.skip(step, loss, grad_norm)  # raises Stopped after max_bad_steps in a row
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            telemetry.log(step, train_loss=loss, lr=schedule(step, config) * config.learning_rate, grad_norm=grad_norm)
            if is_due(step, config.eval_interval, config):
                data.check_unchanged()
                telemetry.log_evaluation(step, evaluate(model, final=step + 1 == config.max_iters))
            folder.save_if_due(step, telemetry.val_loss, signals.stopping)
        return telemetry.finish(lambda: evaluate(model, final=True))


def is_due(step, interval, config):
    """True after every `interval` steps (0: never) and after the last step."""
    return step + 1 == config.max_iters or bool(interval) and (step + 1) % interval == 0


# -------------------------------------------------------------------------------------------------------- the schedule

def learning_rate_factor(step, config):
    """Learning rate at step 0 <= step < max_iters as a fraction of the peak: a linear warmup, then `schedule`.

    cosine and wsd reach min_lr at the last step. wsd is constant until the last decay_iters steps. Then it falls as
    1 - sqrt(completed fraction of the decay) (Haegele et al. 2024, arXiv 2405.18392).
    """
    warmup = warmup_steps(config)
    low = 0.1 if config.min_lr < 0 else config.min_lr / config.learning_rate
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "cosine":
        progress = (step + 1 - warmup) / (config.max_iters - warmup)
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))
    if config.schedule == "wsd":
        done = max(0.0, 1 - (config.max_iters - step - 1) / decay_steps(config))  # exactly 1 at the last step
        return low + (1 - low) * (1 - math.sqrt(done))
    return 1.0


def warmup_steps(config):
    return round(0.05 * config.max_iters) if config.warmup_iters < 0 else config.warmup_iters


def decay_steps(config):
    return max(1, round(0.2 * config.max_iters) if config.decay_iters < 0 else config.decay_iters)


# -------------------------------------------------------------------------------------------------------------- set-up

TEXT_ONLY = {"pattern", "batch_tokens", "documents", "end_of_text", "eval_tokens", "final_eval_tokens",
             "eval_block_size", "eval_only"}


def check_not_set(config, names, words):
    """Raises ConfigError if a setting in `names`, which the program cannot use, differs from its default."""
    for field in dataclasses.fields(config):
        if field.name in names and getattr(config, field.name) != field.default:
            raise ConfigError(f"{field.name} {getattr(config, field.name)} {words}")


def check(config):
    """Raises ConfigError for settings that contradict each other, whatever the data or machine."""
    check_schedule(config)
    for step in config.keep_steps.split(","):
        if step and not step.isdecimal():
            raise ConfigError(f"keep_steps {config.keep_steps}: expected comma-separated step numbers")
    if config.init_from and config.branch:
        raise ConfigError(f"init_from={config.init_from} and branch={config.branch}: give one; a branch starts "
                          "from its trunk's weights")
    if config.resume == "never" and env_int("TORCHELASTIC_MAX_RESTARTS", 0) > 0:
        raise ConfigError("resume=never: each restart by torchrun --max-restarts would start from scratch; use "
                          "--resume=auto")


def check_schedule(config):
    warmup, decay = warmup_steps(config), decay_steps(config)
    if config.min_lr > config.learning_rate:
        raise ConfigError(f"min_lr {config.min_lr} is above learning_rate {config.learning_rate}")
    if warmup >= config.max_iters > 1:
        raise ConfigError(f"warmup_iters {config.warmup_iters} must be below max_iters {config.max_iters}: choose a "
                          "shorter warmup or more steps (in a sweep: more --steps; its searches run half of them)")
    if config.schedule == "wsd" and warmup + decay > config.max_iters:
        raise ConfigError(f"warmup of {warmup} and decay of {decay} steps exceed max_iters {config.max_iters}: "
                          "choose smaller warmup_iters or decay_iters")


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def open_data(config, device):
    """Open the dataset or mixture, and fill in the config's vocab_size and end_of_text. Raises ConfigError."""
    parts = []  # (tokens, share)
    for name, share in parse_mixture(config.dataset):
        tokens = Tokens(find_dataset(name), vocab_size=config.vocab_size or None, block_size=config.block_size)
        parts.append((tokens, share))
    first = parts[0][0]
    for tokens, _ in parts[1:]:
        check_same_tokens(first, tokens, config.dataset)
    if config.documents == "pack" and config.end_of_text < 0:
        if first.meta.get("end_of_text") is None:
            raise ConfigError(f"documents=pack: {first.folder / 'meta.json'} does not say which token ends a "
                              "document: give --end_of_text, or use --documents=join")
        config.end_of_text = first.meta["end_of_text"]
    if not -1 <= config.end_of_text < first.vocab_size:
        raise ConfigError(f"end_of_text {config.end_of_text} is not a token of {first.folder}: it must be 0 or more "
                          f"and below {first.vocab_size}, or -1 for the data's own")
    if config.vocab_size == 0:
        config.vocab_size = math.ceil(first.vocab_size / 64) * 64
    if len(parts) == 1:
        return TokenData(first, config.block_size, config.batch_tokens, config.seed, device)
    return MixtureData(parts, config.block_size, config.batch_tokens, config.seed, device)


def check_same_tokens(first, other, dataset):
    """Raises ConfigError if two prepared folders have different tokenizers or vocabularies."""
    for key in ("tokenizer", "table", "vocab_size"):
        if other.meta.get(key) != first.meta.get(key):
            raise ConfigError(f"dataset={dataset}: {other.folder} (tokenizer {other.meta['tokenizer']!r}) and "
                              f"{first.folder} ({first.meta['tokenizer']!r}) have different tokenizers or "
                              "vocabularies: prepare one of them again")


def build_model(config, device):
    """Build the config's LM on the device. Raises ConfigError for impossible sizes or a backend that cannot run."""
    sizes = ModelConfig(**{field.name: getattr(config, field.name) for field in dataclasses.fields(ModelConfig)})
    try:
        sizes.check_pattern()
        with torch.device("meta"):  # takes no memory
            parameters = sum(p.numel() for p in LM(sizes).parameters())
        needed, memory = 4 * parameters, distributed.memory_bytes(device)
        if needed > memory:
            raise ConfigError(f"{parameters:,} parameters take {needed:,} bytes, but {device} has {memory:,}: "
                              "choose a smaller n_embd, vocab_size or n_layer")
        model = LM(sizes).to(device)
        computed_by(model)  # chooses the backend of every operator
        return model
    except (ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(error) from None


def run_name(config, otherwise):
    """Name a run without an out_dir: after its last config file, else after init_from, else `otherwise`."""
    if config.config_files:
        return Path(config.config_files[-1]).stem
    if config.init_from:
        origin = Path(config.init_from).resolve()
        return f"{origin.parent.name if origin.is_file() else origin.name}_tuned"
    return otherwise


def main(argv):
    config = configurator.load(TrainConfig, argv)
    check(config)
    if not config.out_dir:
        config.out_dir = f"out/{run_name(config, config.model)}"
    device = distributed.open_device(config)
    initial = checkpoint.Initial(config, dataclasses.fields(ModelConfig))  # fills in these settings
    data = open_data(config, device)
    config.dtype = str(distributed.pick_dtype(config.dtype, device)).removeprefix("torch.")
    seed_all(config.seed)
    model = build_model(config, device)
    if model.positions is not None and config.eval_block_size > config.block_size:
        raise ConfigError(f"eval_block_size {config.eval_block_size}: {config.model} has positions only up to "
                          f"block_size {config.block_size}: choose that or less")
    distributed.say(initial.load(model, data))
    if config.eval_only:
        return distributed.say(in_words(Evaluate(config, data)(model, final=True)))
    distributed.say(cost_of_step(model, config.batch_tokens))
    train(config, model, data, Evaluate(config, data))


if __name__ == "__main__":
    start.imported()
    sys.exit(launch("train.py", main))
