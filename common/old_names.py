"""What a setting is called in nanoGPT, in transformers or by habit, and what to type here.

A table has a row per old name, or per KEY=VALUE (a pattern) where only that value is foreign; the first that fits
counts. A row is a setting here that takes the value, a setting with its value, a setting and the factors of its number,
or words.
"""

import difflib
import fnmatch
import math
import shlex

from common.errors import ConfigError

NONE = "has no counterpart, leave it out"
EPOCHS = "give max_iters = epochs x tokens of the data / batch_tokens (a run says how many epochs it has)"
PRETRAINED = "has no counterpart: python export.py --help says what can be imported, then give its folder"
SAME = {  # setting: its other names
    "learning_rate": "lr max_lr",
    "micro_batch_size": "batch_size bs device_batch_size per_device_train_batch_size",
    "max_iters": "steps max_steps num_steps train_steps num_iterations iters iterations max_iterations",
    "warmup_iters": "warmup warmup_steps num_warmup_steps",
    "block_size": "seq_len seq_length sequence_length max_seq_len context_length context ctx_len",
    "n_layer": "n_layers num_layers num_hidden_layers layers depth",
    "n_head": "n_heads num_heads num_attention_heads heads",
    "n_embd": "d_model dim hidden_size embed_dim width",
    "weight_decay": "wd",
    "grad_clip": "clip clip_grad max_grad_norm",
    "schedule": "lr_schedule lr_scheduler lr_scheduler_type scheduler",
    "optimizer": "optim",
    "dataset": "data data_dir dataset_name",
    "out_dir": "output_dir save_dir run_dir",
    "model": "arch architecture model_type",
    "dtype": "precision",
    "eval_interval": "eval_steps eval_every val_interval",
    "log_interval": "logging_steps log_every",
    "checkpoint_interval": "save_interval save_steps save_every",
    "wandb_run_name": "run_name wandb_name",
    "init_from": "pretrained checkpoint ckpt load_from",
}
TRAIN = {
    "init_from=scratch": "leave it out: a run starts from scratch",
    "init_from=resume": "resume=must",
    "init_from=gpt2*": PRETRAINED,
    "device=mps*": "device=cpu",
    "dtype=float16": "dtype=bfloat16",
    "dtype=?p16": "dtype=bfloat16",
    "dtype=bf16": "dtype=bfloat16",
    "backend=nccl": "leave it out: processes use nccl on GPUs",
    "backend=gloo": "leave it out: processes use gloo on CPUs",
    "decay_lr=[fn0]*": "schedule=constant",
    "decay_lr": "leave it out: the learning rate decays",
    "wandb_log=[fn0]*": "leave it out: wandb is off",
    "wandb_log": "wandb=online",
    "eval_iters": ("eval_tokens", "micro_batch_size", "block_size"),
    "gradient_accumulation_steps": ("batch_tokens", "micro_batch_size", "block_size"),
    "always_save_checkpoint": "has no counterpart, leave it out: the best checkpoint and the newest are kept",
    "lr_decay_iters": "has no counterpart, leave it out: the learning rate falls until max_iters",
    "dropout": NONE,
    "bias": NONE,
    "num_workers": NONE,
    "epochs": EPOCHS,
    "num_epochs": EPOCHS,
    "num_train_epochs": EPOCHS,
    "start": "it is sample.py's --prompt",
    "bf16": "dtype=bfloat16",
    "fp16": "dtype=bfloat16",
    "amp": "dtype=bfloat16",
    "gradient_checkpointing": "recompute=block",
    "resume_from_checkpoint": "resume=must",
    "gpus": "start it with torchrun --standalone --nproc_per_node=GPUS",
    "scan_backend": "backend",
    "kernel": "backend",
}
for new, names in SAME.items():
    TRAIN |= dict.fromkeys(names.split(), new)
SAMPLE = {
    "init_from=resume": "leave it out: out_dir is the run's folder",
    "init_from=gpt2*": PRETRAINED + " as out_dir",
    "init_from": "out_dir",
    "device=mps*": "device=cpu",
    "start=FILE:*": "give --prompt=@FILE",
    "start": "prompt",
    "dtype": NONE,
    "compile": NONE,
    "n": "num_samples",
    "length": "max_new_tokens",
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "temp": "temperature",
}


class Unknown(ConfigError):
    """A key that a program does not have, or a value that is foreign here."""

    def __init__(self, key, value):
        super().__init__(f"unknown key {key!r}")
        self.key, self.value = key, value


def row_of(reader, key, value):
    """The row for a key with a value by the program's table; None without one, and for a key that exists with a value
    that may."""
    for pattern, row in getattr(reader.config_class, "RENAMED", {}).items():
        if "=" not in pattern:
            if key in reader.settings:
                continue
            pattern += "=*"
        if fnmatch.fnmatchcase(f"{key}={value}".lower(), pattern.lower()):
            return row
    return None


def what_to_type(row, value, numbers, in_file):
    """A row in words; numbers: {setting: value} of all settings, for a row with factors."""
    if isinstance(row, tuple):
        row, *factors = row
        try:
            value = math.prod(int(n) for n in (value, *(numbers[factor] for factor in factors)))
        except (ValueError, TypeError):
            value = " x ".join([str(value), *factors])
    elif " " in row:
        return row
    name, is_set, constant = row.partition("=")
    if is_set:
        value = constant
    return f"type {name} = {value!r}" if in_file else f"type --{name}={shlex.quote(str(value))}"


def nearest(word, words, prefix=""):
    """A guess at what was meant, if it is spelled nearly so."""
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.85)
    return f": did you mean '{prefix}{near[0]}'?" if near else ""


def check(reader):
    """Raises ConfigError, a line about all mistakes that a configurator.Reader noted, unless there is none."""
    numbers = dict(reader.values)
    for _, error in reader.mistakes:
        if isinstance(error, Unknown):
            row = row_of(reader, error.key, error.value)
            if row in reader.settings:
                numbers[row] = error.value
    lines, before, is_known = [], "", True
    for where, error in reader.mistakes:
        line = str(error)
        if isinstance(error, Unknown):
            line, is_answered = answer(reader, error, numbers, bool(where))
            is_known = is_known and is_answered
        lines.append(line if where == before else where + line)
        before = where
    if not lines:
        return
    text = "; ".join(lines)
    if not is_known:
        text += " --help lists all keys" if text.endswith("?") else "; --help lists all keys"
    raise ConfigError(text)


def answer(reader, error, numbers, in_file):
    """(what to do about an unknown key, True if the program's table has it)."""
    dashes = "" if in_file else "--"
    row = row_of(reader, error.key, error.value)
    if error.key in reader.settings:
        line = f"{dashes}{error.key}={error.value}"
    else:
        line = f"unknown key '{dashes}{error.key}'"
    if row is not None:
        return f"{line}: {what_to_type(row, error.value, numbers, in_file)}", True
    near = nearest(error.key.replace("-", "_").lower(), reader.settings, dashes)
    if in_file and not near:
        near = " (a helper's name starts with _)"
    return line + near, False
