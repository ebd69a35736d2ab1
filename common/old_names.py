"""Settings as nanoGPT, transformers or habit call them, and what to type here instead.

A table has a row per old name, or per pattern KEY=VALUE where only that value is foreign; the first match wins. A row
is our setting for the same value, our setting with another value, our setting and the factors to multiply, or a hint in
words.
"""

import difflib
import fnmatch
import functools
import math
import shlex

from common.errors import ConfigError

NONE = "has no counterpart, leave it out"
EPOCHS = "give max_iters = epochs x tokens of the data / batch_tokens (a run says how many epochs it has)"
PRETRAINED = "has no counterpart: python export.py --help says what can be imported, then give its folder"
SAME = {  # our setting: its old names
    "learning_rate": "lr max_lr",
    "micro_batch_size": "batch_size bs device_batch_size per_device_train_batch_size",
    "batch_tokens": "total_batch_size",
    "max_iters": "steps max_steps num_steps train_steps num_iterations iters iterations max_iterations",
    "warmup_iters": "warmup warmup_steps num_warmup_steps",
    "block_size": "seq_len seq_length sequence_length max_seq_len max_length context_length context ctx_len",
    "n_layer": "n_layers num_layers num_hidden_layers layers depth",
    "n_head": "n_heads num_heads num_attention_heads heads",
    "n_embd": "d_model dim hidden_size embed_dim width",
    "weight_decay": "wd",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "compile": "torch_compile",
    "device": "device_type",
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
    "keep_checkpoints": "save_total_limit",
    "wandb_run_name": "run run_name wandb_name",
    "init_from": "pretrained checkpoint ckpt load_from model_name_or_path",
    "backend": "scan_backend kernel",
    "dtype=bfloat16": "bf16 fp16 amp",
    EPOCHS: "epochs num_epochs num_train_epochs",
    NONE: "dropout bias num_workers dataloader_num_workers per_device_eval_batch_size adam_epsilon ddp_timeout tf32 "
          "do_train do_eval eval_strategy evaluation_strategy save_strategy logging_strategy overwrite_output_dir "
          "matrix_lr embedding_lr unembedding_lr scalar_lr core_metric_every sample_every target_param_data_ratio",
}
TRAIN = {
    "config-file=*train_gpt2": "type config/llama_120m.py, of GPT-2's size and data, or config/longhorn_120m.py",
    "config-file=*finetune_*": "type --init_from=RUN --out_dir=out/tuned, after the run's config file, and "
                               "--dataset=FOLDER",
    "config-file=*eval_gpt2*": "type --init_from=RUN --eval_only; GPT-2's weights cannot be imported",
    "config": "give the config file alone, without --config=",
    "init_from=scratch": "leave it out: a run starts from scratch",
    "init_from=resume": "resume=must",
    "init_from=gpt2*": PRETRAINED,
    "device=mps*": "device=cpu",
    "dtype=float16": "dtype=bfloat16",
    "dtype=?p16": "dtype=bfloat16",
    "dtype=bf16": "dtype=bfloat16",
    "optim*=adamw?*": "optimizer=adamw",
    "resume=true": "resume=must",
    "resume=*/*": "type --resume=must --out_dir=RUN",
    "wandb=true": "wandb=online",
    "wandb=false": "wandb=off",
    "report_to=wandb": "wandb=online",
    "report_to": "leave it out: wandb is off",
    "warmup_ratio": ("warmup_iters", "max_iters"),
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
    "start": "it is sample.py's --prompt",
    "gradient_checkpointing": "recompute=block",
    "resume_from_checkpoint": "resume=must",
    "gpus": "start it with torchrun --standalone --nproc_per_node=GPUS",
}
for row, names in SAME.items():
    TRAIN |= dict.fromkeys(names.split(), row)
SAMPLE = {
    "init_from=resume": "leave it out: out_dir is the run's folder",
    "init_from=gpt2*": PRETRAINED + " as out_dir",
    "init_from": "out_dir",
    "device=mps*": "device=cpu",
    "start=FILE:*": "give --prompt=@ and the file's name",
    "start": "prompt",
    "dtype": NONE,
    "compile": NONE,
    "n": "num_samples",
    "length": "max_new_tokens",
    "max_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "temp": "temperature",
}


def row_of(reader, key, value):
    """The row for a key and its value in the program's table; None if both are fine here, or if there is no such
    row."""
    return row_by_text(reader.config_class, key in reader.settings, f"{key}={value}".lower())


@functools.cache  # planning a sweep reads the same settings a thousand times
def row_by_text(config_class, is_known, text):
    for pattern, row in getattr(config_class, "RENAMED", {}).items():
        if "=" not in pattern and not is_known:
            pattern += "=*"
        if fnmatch.fnmatchcase(text, pattern.lower()):
            return row
    return None


def nearest(word, words, prefix="", suffix=""):
    """The hint "did you mean ...?" if a known word is spelled almost the same, else nothing."""
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.85)
    return f": did you mean '{prefix}{near[0]}{suffix}'?" if near else ""


def check(reader):
    """Raises one ConfigError about all mistakes that a configurator.Reader noted, if there are any. Each is (file and
    colon, key, value, row), or for a wrong value (file and colon, None, what is wrong, None)."""
    numbers = reader.values | {row: value for _, _, value, row in reader.mistakes if isinstance(row, str)}
    lines, before = [], ""
    for where, key, value, row in reader.mistakes:
        line = value if key is None else about(reader, key, value, row, numbers, bool(where))
        lines.append(line if where == before else where + line)
        before = where
    if lines:
        raise ConfigError("; ".join(lines))


def about(reader, key, value, row, numbers, in_file):
    """The message about a foreign key or value. numbers: {setting: value}, for a row with factors."""
    dashes = "" if in_file else "--"
    known = f"{dashes}{key}={value}" if key in reader.settings else f"unknown key '{dashes}{key}'"
    if row is None:
        near = nearest(key.lower(), reader.settings, dashes)
        helper = "; a helper's name starts with _" if in_file and not near else ""
        return f"{known}{near or ';'} --help lists all keys{helper}"
    if isinstance(row, tuple):
        row, *factors = row
        try:
            value = math.prod(int(n) for n in (value, *(numbers[factor] for factor in factors)))
        except (ValueError, TypeError):
            row = f"give {row} = {key} x " + " x ".join(factors)
    if " " in row:
        return f"{known}: {row}"
    name, _, constant = row.partition("=")
    if in_file:
        return f"{known}: type {name} = {constant or value!r}"
    return f"{known}: type --{name}={constant or shlex.quote(str(value))}"
