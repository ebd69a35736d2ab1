"""Settings as nanoGPT, nanochat, transformers, litgpt or habit call them, and what to type here instead.

Each line of a table is `names -> row`. A name is a foreign key, or a pattern KEY=VALUE if only that value is foreign;
the first match wins. A row is our setting for the same value, our setting with another value, our setting and the
factors to multiply, or a hint in words.
"""

import difflib
import fnmatch
import functools
import math
import shlex

from common.errors import ConfigError


def table(text):
    """Parse lines `names -> row` into {name or pattern: row}; a row with factors becomes a tuple."""
    rows = {}
    for line in text.strip().split("\n"):
        names, _, row = line.partition(" -> ")
        row = tuple(row.split(" * ")) if " * " in row else row
        for name in names.split():
            rows.setdefault(name, row)
    return rows


TRAIN = table("""
config-file=*train_gpt2 -> type config/llama_120m.py, of GPT-2's size and data, or config/longhorn_120m.py
config-file=*finetune_* -> type --init_from=RUN --out_dir=out/tuned, after the run's config file, and --dataset=FOLDER
config-file=*eval_gpt2* -> type --init_from=RUN --eval_only; GPT-2's weights cannot be imported
config -> give the config file alone, without --config=
init_from=scratch -> leave it out: a run starts from scratch
init_from=resume resume=true resume_from_checkpoint resume_from resume_from_step -> resume=must
init_from=gpt2* -> has no counterpart: python export.py --help says what can be imported, then give its folder
resume=*/* -> type --resume=must --out_dir=RUN
device=mps* cpu no_cuda use_cpu -> device=cpu
cuda gpu -> device=cuda
dtype=float16 dtype=?p16 dtype=bf16* dtype=16* bf16 fp16 amp -> dtype=bfloat16
dtype=*32* -> dtype=float32
optim*=adamw?* -> optimizer=adamw
wandb=true report_to=wandb -> wandb=online
wandb=false -> wandb=off
report_to wandb_log=[fn0]* -> leave it out: wandb is off
wandb_log -> wandb=online
backend=nccl -> leave it out: processes use nccl on GPUs
backend=gloo -> leave it out: processes use gloo on CPUs
decay_lr=[fn0]* -> schedule=constant
decay_lr -> leave it out: the learning rate decays
always_save_checkpoint -> has no counterpart, leave it out: the best checkpoint and the newest are kept
lr_decay_iters -> has no counterpart, leave it out: the learning rate falls until max_iters
start -> it is sample.py's --prompt
dry_run -> python experiments/sweep.py paper longhorn --sizes=1b3 --dry-run --gpus=8 --gpu=H100 plans such a run
lr max_lr peak_lr -> learning_rate
min_learning_rate lr_min -> min_lr
final_lr_frac -> min_lr * learning_rate
warmup warmup_steps num_warmup_steps lr_warmup_steps -> warmup_iters
warmup_ratio -> warmup_iters * max_iters
warmdown_ratio -> decay_iters * max_iters
batch_size bs device_batch_size per_device_train_batch_size train_batch_size mbs -> micro_batch_size
total_batch_size tokens_per_step -> batch_tokens
global_batch_size -> batch_tokens * block_size
gradient_accumulation_steps grad_accum_steps grad_accum -> batch_tokens * micro_batch_size * block_size
accumulate_grad_batches gradient_accumulation_iters accum_steps -> batch_tokens * micro_batch_size * block_size
eval_iters -> eval_tokens * micro_batch_size * block_size
steps max_steps num_steps train_steps num_iterations iters iterations max_iterations -> max_iters
epochs num_epochs num_train_epochs -> give max_iters = epochs x tokens of the data / batch_tokens
tokens max_tokens num_tokens total_tokens train_tokens -> give max_iters = tokens / batch_tokens
seq_len seq_length sequence_length max_seq_len max_seq_length max_length context_length -> block_size
context context_size ctx_len -> block_size
n_layers num_layers num_hidden_layers layers depth -> n_layer
n_heads nhead num_heads num_attention_heads heads -> n_head
d_model dim hidden_size embed_dim emb_dim model_dim width -> n_embd
vocab n_vocab padded_vocab_size -> vocab_size
wd -> weight_decay
adam_beta1 -> beta1
adam_beta2 -> beta2
betas -> give --beta1 and --beta2
clip clip_grad max_grad_norm -> grad_clip
lr_schedule lr_scheduler lr_scheduler_type scheduler -> schedule
optim -> optimizer
torch_compile -> compile
no_compile -> compile=False
gradient_checkpointing activation_checkpointing -> recompute=block
parallel=fsdp?* strategy=*fsdp* strategy=deepspeed* fsdp deepspeed zero_stage -> parallel=fsdp
strategy -> parallel
gpus num_gpus n_gpus devices num_nodes nproc_per_node -> start it with torchrun --standalone --nproc_per_node=GPUS
device_type -> device
precision -> dtype
scan_backend kernel -> backend
data data_dir data_path dataset_name train_data train_data_path train_file corpus -> dataset
tokenizer tokenizer_name tokenizer_dir tokenizer_path -> belongs to the data: data/tokens/prepare.py has it
val_fraction val_frac val_ratio val_split val_size -> belongs to the data: data/tokens/prepare.py has --val_fraction
arch architecture model_type model_name family mixer -> model
pretrained checkpoint ckpt ckpt_path load load_from checkpoint_dir model_name_or_path -> init_from
output_dir save_dir run_dir -> out_dir
eval_steps eval_every val_interval -> eval_interval
logging_steps log_every -> log_interval
save_interval save_steps save_every -> checkpoint_interval
save_total_limit -> keep_checkpoints
run run_name wandb_name name exp_name experiment_name -> wandb_run_name
project project_name -> wandb_project
wandb_entity entity -> set WANDB_ENTITY in the environment
dropout bias num_workers dataloader_num_workers per_device_eval_batch_size -> has no counterpart, leave it out
adam_epsilon eps ddp_timeout tf32 -> has no counterpart, leave it out
do_train do_eval eval_strategy evaluation_strategy save_strategy logging_strategy -> has no counterpart, leave it out
overwrite_output_dir -> has no counterpart, leave it out
matrix_lr embedding_lr unembedding_lr scalar_lr core_metric_every sample_every -> has no counterpart, leave it out
target_param_data_ratio -> has no counterpart, leave it out
target_flops model_tag window_pattern aspect_ratio fp8 debug verbose tensorboard -> has no counterpart, leave it out
logger_name packing flash_attn -> has no counterpart, leave it out
push_to_hub hub_token hub_model_id load_best_model_at_end auto_find_batch_size -> has no counterpart, leave it out
group_by_length rope_theta -> has no counterpart, leave it out
label_smoothing_factor neftune_noise_alpha n_kv_head n_query_groups -> has no counterpart, leave it out
""")
SAMPLE = table("""
init_from=resume -> leave it out: out_dir is the run's folder
init_from=gpt2* -> has no counterpart: python export.py --help says what can be imported, give that as out_dir
device=mps* -> device=cpu
start=FILE:* -> give --prompt=@ and the file's name
start text input -> prompt
init_from model model_path ckpt ckpt_path checkpoint checkpoint_dir checkpoint_path run -> out_dir
n num_return_sequences -> num_samples
length max_length max_tokens num_tokens -> max_new_tokens
temp -> temperature
greedy -> temperature=0
dtype compile do_sample batch_size interactive repetition_penalty num_beams beams -> has no counterpart, leave it out
tokenizer -> has no counterpart, leave it out
""")
EVALUATE = table("""
model=hf* -> leave it out, and give the run's folder
device=mps* -> device=cpu
init_from model model_path ckpt ckpt_path checkpoint checkpoint_dir checkpoint_path run -> out_dir
task -> tasks
num_samples -> limit
batch_size -> give batch_tokens = sequences x their length
model_args -> give the run's folder, or import a model: python export.py --help
eval_iters eval_only split -> it is a loss: python train.py --init_from=RUN --eval_only
num_fewshot output_path output_dir compile -> has no counterpart, leave it out
""")
PREPARE = table("""
dataset dataset_name repo_id -> source
data data_path data_dir data_files input inputs input_dir input_file input_path file path -> files
output output_dir output_path output_prefix out_dir destination_path -> out
column field text_field text_key json_keys content_key dataset_text_field -> text_column
tokenizer_type tokenizer_name tokenizer_path tokenizer_model tokenizer_name_or_path enc -> tokenizer
eos eos_token eot -> end_of_text
test_size val_size val_split val_ratio val_frac -> val_fraction
num_proc num_workers nproc n_proc -> workers
overwrite -> force
append_eod -> has no counterpart, leave it out
""")


def row_of(reader, key, value):
    """Return the row for a key and its value from the program's table; None if both are fine here, or if there is no
    such row. Only the last word of a dotted key counts, as in litgpt's --train.max_tokens."""
    name = key.rpartition(".")[2]
    if name in reader.settings and (name != key or value in reader.settings[name].choices):
        return name if name != key else None
    return row_by_text(reader.config_class, key in reader.settings, f"{name}={value}".lower())


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
    """Raise one ConfigError about all mistakes that a configurator.Reader noted, if any.

    A mistake is ("FILE: " or "", key, value, row); for a wrong value it is ("FILE: " or "", None, message, None).
    """
    numbers = reader.values | {row: value for _, _, value, row in reader.mistakes if isinstance(row, str)}
    said = {row[0] if isinstance(row, tuple) else row for *_, row in reader.mistakes} | reader.overrides.keys()
    lines = []
    before = ""
    for where, key, value, row in reader.mistakes:
        line = value if key is None else about(reader, key, value, row, numbers, bool(where))
        # batch_tokens is 0 in runs that count images
        if row == "micro_batch_size" and "batch_tokens" not in said and numbers["batch_tokens"]:
            whole = about(reader, key, value, ("batch_tokens", "block_size"), numbers, bool(where))
            line += f" and, for one micro-batch per step,{whole.partition(':')[2]}"
        lines.append(line if where == before else where + line)
        before = where
    if lines:
        raise ConfigError("; ".join(lines) + reader.hint)


def about(reader, key, value, row, numbers, in_file):
    """The message about a foreign key or value. numbers: {setting: value}, for a row with factors."""
    dashes = "" if in_file else "--"
    known = f"{dashes}{key}={value}" if key in reader.settings else f"unknown key '{dashes}{key}'"
    if row is None:
        near = nearest(key.lower(), reader.settings, dashes)
        if not near:
            reader.hint = "; --help lists all keys" + "; start a helper's name with _" * in_file
        return known + near
    if isinstance(row, tuple):
        row, *factors = row
        try:
            value = math.prod(float(n) for n in (value, *(numbers[factor] for factor in factors)))
            value = round(value) if reader.settings[row].kind is int else float(f"{value:.12g}")
        except (ValueError, TypeError, OverflowError):
            row = f"give {row} = {key} x " + " x ".join(factors)
    if " " in row:
        return f"{known}: {row}"
    name, _, constant = row.partition("=")
    if foreign := row_of(reader, name, constant or value):
        return about(reader, key, value, foreign, numbers, in_file)
    if in_file:
        return f"{known}: type {name} = {constant or value!r}"
    return f"{known}: type --{name}={constant or shlex.quote(str(value))}"
