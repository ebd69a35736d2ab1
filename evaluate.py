"""Score a checkpoint on tasks of the lm-evaluation-harness, which `make eval` installs.

    python evaluate.py out/longhorn_bpe                                        # embedded: needs no download
    python evaluate.py out/longhorn_1b3 --tasks=paper                          # the paper's Table 2, zero-shot
    python evaluate.py out/longhorn_1b3/checkpoint-9600.safetensors --tasks=paper   # a step of --keep_steps
    python evaluate.py out/longhorn_1b3 --tasks=lambada_openai,wikitext --include=my_tasks/
    torchrun --standalone --nproc_per_node=8 evaluate.py out/longhorn_1b3 --tasks=paper

Your own task files (*.yaml, in the harness's format) can use local data, with `dataset_path: json` and `data_files`
under `dataset_kwargs`. Such tasks need no network, and neither do the embedded tasks (evaluation/tasks.py). Task files
are programs: the harness runs their templates and the functions that they name.

Results go to eval_tasks.json in the run's folder, or for the checkpoint of a step to eval_tasks-checkpoint-9600.json.
They include standard errors and the versions of tasks and harness. Earlier results on other tasks are kept if
checkpoint, settings and code are the same. evaluation/harness.py explains how contexts and texts are read.
"""

if __name__ == "__main__":
    from common import start  # before PyTorch

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import configurator
import sample
from common import old_names
from common.errors import ConfigError, printable
from configurator import Count, Minutes, Whole
from data.tokenizer import Text, canonical
from evaluation import tasks
from runtime import checkpoint, distributed
from runtime.distributed import launch
from runtime.records import changed_files, environment, write_json

ROOT = Path(__file__).resolve().parent


@dataclass
class EvaluateConfig:
    out_dir: str  # the run's folder, or a checkpoint file
    tasks: str = "embedded"  # comma-separated harness tasks or task files; paper: the tasks of Table 2;
    # embedded: tasks that need no download
    include: str = ""  # folder with your own task files (*.yaml), which can run code: use only files that you trust
    limit: Whole = 0  # documents per task, for a quick try; 0: all
    batch_tokens: Count = 8192  # tokens per forward pass
    max_length: Whole = 0  # context limit in tokens; 0: no limit, even beyond the training block
    dtype: Literal["auto", "float32", "bfloat16"] = "float32"  # dtype of matrix products;
    # auto: bfloat16 where it is fast
    device: str = "auto"  # auto: cuda if there is a GPU, else cpu
    tokenizer: str = ""  # bytes, tiktoken:NAME or hf:NAME, if an imported model's checkpoint names none
    vocab: str = ""  # folder with a tiktoken vocabulary's files, to work offline
    timeout_minutes: Minutes = 60.0  # how long processes wait for each other before giving up

    RENAMED = old_names.EVALUATE


def tokenizer_of(meta, config):
    """The tokenizer, a Text, for a checkpoint's meta. Raises ConfigError if --tokenizer contradicts the meta, or if
    neither names a tokenizer."""
    known = meta.get("tokenizer")
    given = canonical(config.tokenizer) if config.tokenizer else None
    if known and given not in (None, known):
        raise ConfigError(f"{config.out_dir}: its tokenizer is {known!r}, not {given!r}: drop --tokenizer")
    if not (known or given):
        raise ConfigError(f"{config.out_dir} does not name its tokenizer: set --tokenizer")
    text = Text(known or config.tokenizer, meta.get("table"), config.vocab or None)
    if text.n_vocab > meta["config"]["vocab_size"]:
        raise ConfigError(f"{text.name} has {text.n_vocab:,} tokens, the model {meta['config']['vocab_size']:,}: it "
                          "was trained with a different tokenizer")
    return text


def main(argv):
    config = configurator.load(EvaluateConfig, argv)
    if config.include and not Path(config.include).is_dir():
        raise ConfigError(f"include {config.include}: there is no such folder")
    device = distributed.open_device(config)
    lm, meta = sample.load_model(config.out_dir, device)
    path = sample.checkpoint_at(config.out_dir)
    crc32 = checkpoint.identity(path)[0]
    text = tokenizer_of(meta, config)
    harness = tasks.import_harness()
    loaded = harness.load_tasks(tasks.named(config.tasks, ROOT / "data" / "pystdlib"), config.include or None)
    dtype = distributed.pick_dtype(config.dtype, device)
    adapter = harness.HarnessLM(lm, text, config.batch_tokens, config.max_length, dtype)
    where = environment()  # may raise, so call it before hours of scoring
    start = time.perf_counter()
    output = harness.evaluate(adapter, loaded, config.limit)
    longest, longer = zip(*distributed.all_gather((adapter.longest, adapter.longer)), strict=True)
    if output is None:
        return
    results = output["results"]
    block = lm.config.block_size
    print(printable(tasks.results_table(results)))
    if set(tasks.PAPER) <= results.keys():
        print("\n" + tasks.table2(path.parent.name, results))
    if max(longest) > block and not config.max_length:
        print(f"{sum(longer):,} sequences are longer than the training block of {block:,} tokens, up to "
              f"{max(longest):,}: all were read whole (--max_length truncates them)")
    weights = {"crc32": crc32, "seed": meta["config"].get("seed"), "code": (meta.get("code_versions") or [None])[-1]}
    name = "eval_tasks.json" if path.name == checkpoint.NEWEST else f"eval_tasks-{path.stem}.json"
    write(path.with_name(name), {
        "step": meta.get("step"), "tokens": meta.get("tokens"), "checkpoint": weights,
        "limit": config.limit, "max_length": config.max_length, "dtype": str(dtype).removeprefix("torch."),
        "tokenizer": text.name, "tokenizer_sha256": text.table_sha256,
        "longest": max(longest), "seconds": round(time.perf_counter() - start, 1),
        **output, "harness": harness.VERSION, "environment": where})


def write(path, record):
    """Write the record, keeping earlier results on other tasks if they have the same checkpoint, settings and code."""
    same = ("step", "tokens", "checkpoint", "limit", "max_length", "dtype", "tokenizer", "tokenizer_sha256",
            "harness")
    try:
        old = json.loads(path.read_text())
        changed = changed_files(old["environment"]["code_files"], record["environment"]["code_files"])
        if not changed and all(old.get(key) == record[key] for key in same):
            for key in ("results", "versions"):
                record[key] = {**old[key], **record[key]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    write_json(path, record)
    print(f"wrote {path}")


if __name__ == "__main__":
    start.imported()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(launch("evaluate.py", main))
