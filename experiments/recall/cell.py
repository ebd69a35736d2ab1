"""One run of the recall benchmark: a mixer, a length, a width, a learning rate, a seed. experiments/recall/mqar.py runs many.

    python experiments/recall/mqar.py cell --mixer=longhorn --T=64 --n_embd=64 --learning_rate=1e-2 --out_dir=out/one
    python experiments/recall/mqar.py cell --help

    loss = mean over the queries of -log softmax(h E^T)[value]         E the embedding, h (B, P, d) at the P queries alone
    rate(epoch) = learning_rate (1 + cos(pi epoch / epochs)) / 2       AdamW, no warmup, no clipping

The surprise: a step costs what its labels cost. The head over 8192 tokens is computed at 4 positions of 64, where a language
model's loss would take all and be nine tenths of the step's FLOPs.

It stops where `stop_at` of the test's queries are answered right, at an evaluation: after each epoch as the benchmark does, or
every eval_interval steps. The test's examples decide when to stop, and in Figure 4 which learning rate counts, so that they are
no untouched test; the examples behind `by_pairs` are.

Records as train.py's (records.py): config.json, log.jsonl, result.json as the last act. SIGTERM saves and stops; --resume=auto
goes on, with the same batches in the same order.
"""

import contextlib
import dataclasses
import datetime
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import checkpoint  # noqa: E402
import configurator  # noqa: E402
from configurator import ConfigError  # noqa: E402
from experiments.recall.models import recall_model  # noqa: E402
from experiments.recall.task import Task, generate, overlap  # noqa: E402
from faults import Stop, keep_earlier, take  # noqa: E402
from records import Log, environment, write_json  # noqa: E402
from train import device_name, open_device, peak_memory, pick_dtype  # noqa: E402


@dataclass
class RecallConfig:
    # --- model
    mixer: str = "longhorn"  # of both layers: a key of MIXERS in experiments/recall/models.py
    n_embd: int = 64  # width
    scan_backend: str = ""  # of the native kernels: cpu, cuda or torch; empty: the fastest there is
    kernel: str = ""  # of the mixer: torch (plain) or fused; empty: the best that runs here
    # --- task
    T: int = 64  # tokens of an example
    pairs: int = 0  # keys with values in it, each asked for once; 0: the benchmark's for T
    vocab_size: int = 8192  # half of it keys, half values
    power_a: float = 0.01  # a of p(i) ~ i^(a-1) by which queries follow the pairs
    train_examples: int = 100_000  # drawn once, seen every epoch
    test_examples: int = 3000  # of every evaluation
    # --- training
    learning_rate: float = 1e-2  # of the first epoch
    batch_size: int = 0  # examples a step; 0: the benchmark's, 512 up to T = 128, then 65536 / T
    epochs: int = 64  # at most, and the length of the cosine
    stop_at: float = 0.99  # accuracy to stop at; above 1: never
    weight_decay: float = 0.1  # on matrices of linear maps and the embedding only
    seed: int = 1  # of the weights, the examples and their order
    # --- evaluation and records
    eval_interval: int = 0  # steps between evaluations; 0: an epoch
    log_interval: int = 20  # steps between lines of the log
    checkpoint_seconds: float = 60.0  # between checkpoints
    out_dir: str = ""  # folder of the records; empty: out/mqar_ and what the run is
    resume: Literal["never", "auto", "must"] = "never"  # go on from the checkpoint in out_dir: auto if there is one
    # --- system
    device: str = "auto"  # auto: cuda if there is a GPU, else cpu
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of matrix products; auto: bfloat16 where it is fast


HARMLESS = {"out_dir", "resume", "device", "log_interval", "checkpoint_seconds", "scan_backend", "kernel"}


def check(config):
    """The run's Task, and 0 filled in where it stands for the benchmark's value. Raises ConfigError."""
    task = Task(config.T, config.pairs, config.vocab_size, config.power_a)
    config.pairs = task.pairs
    config.batch_size = config.batch_size or min(512, max(1, 65536 // config.T))
    for name in ("batch_size", "epochs", "train_examples", "test_examples", "log_interval"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} {getattr(config, name)} must be at least 1")
    for name in ("eval_interval", "weight_decay", "checkpoint_seconds"):
        if getattr(config, name) < 0:
            raise ConfigError(f"{name} {getattr(config, name)} must be 0 or more")
    if config.learning_rate <= 0 or config.stop_at <= 0:
        raise ConfigError(f"learning_rate {config.learning_rate} and stop_at {config.stop_at} must be above 0")
    if not 0 <= config.seed < 2**32:
        raise ConfigError(f"seed {config.seed} must be in 0 .. {2**32 - 1}")
    return task


def rate_of_epoch(epoch, config):
    """The learning rate of epoch 0 <= epoch < epochs: a cosine that is stepped once an epoch."""
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * epoch / config.epochs))


def batch_order(config, epoch):
    """The training examples in the order of an epoch, (train_examples,): a function of (seed, epoch) alone."""
    return torch.from_numpy(np.random.default_rng([config.seed, 3, epoch]).permutation(config.train_examples))


class OnDevice:
    """Examples as tensors of one device; `labels` are int64."""

    def __init__(self, examples, device):
        self.tokens, self.where = (torch.from_numpy(a).to(device) for a in (examples.tokens, examples.where))
        self.labels = torch.from_numpy(examples.values).to(device).long()
        self.distances = torch.from_numpy(examples.distances())

    def __len__(self):
        return len(self.tokens)


def logits(model, tokens, where):
    """Over the vocabulary, at the queries: (B, P, V)."""
    return F.linear(model(tokens, where), model.embed.weight)


@torch.no_grad()
def evaluate(model, examples, batch_size, autocast):
    """Which queries are answered right, and the mean loss in nats: ((n, P) bool on the CPU, float)."""
    model.eval()
    right, total = [], torch.zeros((), dtype=torch.float64, device=examples.labels.device)
    for tokens, where, labels in zip(*(a.split(batch_size) for a in (examples.tokens, examples.where, examples.labels)),
                                     strict=True):
        with autocast:
            out = logits(model, tokens, where)
        right.append(out.argmax(-1) == labels)
        total += F.cross_entropy(out.float().flatten(0, 1), labels.flatten(), reduction="sum")
    model.train()
    return torch.cat(right).cpu(), total.item() / examples.labels.numel()


def by_distance(right, distances):
    """Accuracy by the tokens from a key to its query, in powers of two: [{"from", "to" (not in it), "queries", "accuracy"}]."""
    rows, low = [], 1
    while low <= distances.max():
        here = right[(distances >= low) & (distances < 2 * low)]
        if len(here):
            rows.append({"from": low, "to": 2 * low, "queries": len(here), "accuracy": here.float().mean().item()})
        low *= 2
    return rows


def by_pairs(model, config, batch_size, autocast, device, examples=1000):
    """Accuracy on fresh examples with fewer and with more pairs than in training: [{"pairs", "queries", "accuracy"}]."""
    rows = []
    for pairs in sorted({config.pairs, *(2**i for i in range(2, 20) if 4 * 2**i <= config.T)}):
        with contextlib.suppress(ConfigError):  # more keys than the vocabulary has
            task = Task(config.T, pairs, config.vocab_size, config.power_a)
            fresh = OnDevice(generate(task, examples, config.seed, "pairs", torch.get_num_threads()), device)
            right = evaluate(model, fresh, batch_size, autocast)[0]
            rows.append({"pairs": pairs, "queries": right.numel(), "accuracy": right.float().mean().item()})
    return rows


def main(argv):
    config = configurator.load(RecallConfig, argv, prog="mqar.py cell")
    task = check(config)
    config.out_dir = config.out_dir or (f"out/mqar_{config.mixer}_T{config.T}_d{config.n_embd}_lr{config.learning_rate:g}"
                                        f"_seed{config.seed}")
    device, _, _ = open_device(config)
    out, dtype = Path(config.out_dir), pick_dtype(config.dtype, device)
    dtype = torch.float32 if dtype == torch.float16 else dtype  # which would need its loss scaled
    config.dtype = str(dtype).removeprefix("torch.")
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)

    began = time.perf_counter()
    drawn = {split: generate(task, n, config.seed, split, torch.get_num_threads())
             for split, n in (("train", config.train_examples), ("test", config.test_examples))}
    if shared := overlap(drawn["train"], drawn["test"]):
        raise ConfigError(f"{shared} of {config.test_examples} test examples stand in the training set too: give more pairs or a "
                          "larger vocab_size")
    data = {f"{split}_sha256": examples.sha256() for split, examples in drawn.items()}
    train, test = (OnDevice(drawn[split], device) for split in ("train", "test"))
    drawing = time.perf_counter() - began

    torch.manual_seed(config.seed)
    try:
        model = recall_model(config.mixer, config.n_embd, config.T, config.vocab_size, config.kernel, config.scan_backend)
        model.to(device)
        with torch.no_grad(), autocast:  # as a trial: a kernel that cannot run here says so now, in a line
            model(test.tokens[:1], test.where[:1])
    except (ValueError, RuntimeError) as error:
        raise ConfigError(error) from None
    optimizer = torch.optim.AdamW(model.optimizer_groups(config.weight_decay), lr=config.learning_rate, fused=True)
    an_epoch = -(-len(train) // config.batch_size)
    settings = {**dataclasses.asdict(config), "max_iters": an_epoch * config.epochs}

    # where it left off
    path, start, spent = out / "checkpoint.safetensors", 0, 0.0
    if config.resume == "must" and not path.exists():
        raise ConfigError(f"resume=must: there is no {path}; start with --resume=auto")
    if config.resume != "never" and (out / "result.json").exists():
        print(f"{out} is finished already; to train again use --resume=never", flush=True)
        return
    resuming = config.resume != "never" and path.exists()
    if resuming:
        tensors, meta = checkpoint.load(path)
        changed = {key: (meta["config"].get(key), value) for key, value in settings.items()
                   if meta["config"].get(key) != value and key not in HARMLESS}
        if changed or meta["data"] != data:
            what = ", ".join(f"{key} {old!r} -> {new!r}" for key, (old, new) in changed.items()) or "its examples differ"
            raise ConfigError(f"the checkpoint in {out} belongs to another run: {what}; put that back, or choose another "
                              "out_dir")
        state = checkpoint.unflatten(tensors, meta["skeleton"])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        checkpoint.set_rng_state(state["rng"])
        start, spent = meta["step"], meta["seconds"]
        print(f"going on from {path} at step {start}", flush=True)
    try:
        lock = take(out)  # noqa: F841  held until the process ends
        if not resuming:
            keep_earlier(out)
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {out} ({error.strerror}): choose another out_dir") from None

    derived = {"steps_an_epoch": an_epoch, "max_iters": settings["max_iters"], "parameters": model.parameter_count()["total"],
               "state_size": model.state_size(config.T), "flops_an_example": model.step_flops(config.T, config.pairs),
               "decayed": model.decayed(), "device": str(device), "device_name": device_name(device),
               "threads": torch.get_num_threads(), "drawing_seconds": round(drawing, 3)}
    where = environment()
    write_json(out / "config.json", {"config": settings, "derived": derived, "environment": where, "data": data,
                                     "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds")})
    log, stop = Log(out, start), Stop()
    print(f"{config.mixer}: {derived['parameters']:,} parameters, state of {derived['state_size']:,} numbers at T = {config.T}; "
          f"{config.pairs} pairs; at most {settings['max_iters']:,} steps of {config.batch_size} examples; "
          f"{derived['device_name']}, {config.dtype}", flush=True)

    # training
    began = saved = time.perf_counter()
    right, diverged, ended, done = None, None, False, start
    seconds = lambda: round(spent + time.perf_counter() - began, 3)

    def save():
        tensors, skeleton = checkpoint.flatten({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                                                "rng": checkpoint.rng_state()})
        checkpoint.save(path, tensors, {"skeleton": skeleton, "step": done, "seconds": seconds(), "config": settings,
                                        "data": data})

    while done < settings["max_iters"] and not ended:
        epoch, at = divmod(done, an_epoch)
        if at == 0 or done == start:
            order = batch_order(config, epoch).to(device)
            for group in optimizer.param_groups:
                group["lr"] = rate_of_epoch(epoch, config)
        rows = order[at * config.batch_size:(at + 1) * config.batch_size]
        with autocast:
            out_logits = logits(model, train.tokens[rows], train.where[rows])
        loss = F.cross_entropy(out_logits.float().flatten(0, 1), train.labels[rows].flatten())
        del out_logits  # or it would live on into the next forward
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done += 1

        due = done % (config.eval_interval or an_epoch) == 0 or done == settings["max_iters"]
        if due or done % config.log_interval == 0:
            value, rate = loss.item(), optimizer.param_groups[0]["lr"]
            log.write("train", done, epoch=done / an_epoch, train_loss=value, lr=rate, seconds=seconds())
            if not math.isfinite(value):
                diverged = done
                break
        if due:
            right, test_loss = evaluate(model, test, config.batch_size, autocast)
            accuracy = right.float().mean().item()
            log.write("eval", done, epoch=done / an_epoch, accuracy=accuracy, test_loss=test_loss, seconds=seconds())
            print(f"step {done:6d}  epoch {done / an_epoch:6.2f}  loss {value:.4f}  accuracy {accuracy:.4f}  {seconds():.0f} s",
                  flush=True)
            ended = accuracy >= config.stop_at
        finished = ended or done == settings["max_iters"]
        if not finished and (stop.signal is not None or time.perf_counter() - saved > config.checkpoint_seconds):
            save()
            saved = time.perf_counter()
            if stop.signal is not None:
                print(f"stopped after step {done} of at most {settings['max_iters']} and saved {path}; the same command with "
                      "--resume=auto goes on", flush=True)
                return

    # the outcome
    result = {"mixer": config.mixer, "T": config.T, "pairs": config.pairs, "n_embd": config.n_embd, "seed": config.seed,
              "learning_rate": config.learning_rate, "accuracy": None, "reached": False, "diverged_at_step": diverged}
    if diverged is None:
        if right is None:
            right, _ = evaluate(model, test, config.batch_size, autocast)
        accuracy = right.float().mean().item()
        result |= {"accuracy": accuracy, "reached": accuracy >= config.stop_at, "by_distance": by_distance(right, test.distances),
                   "by_pairs": by_pairs(model, config, config.batch_size, autocast, device)}
    result |= {"steps": done, "epochs": done / an_epoch, "seconds": seconds(), "parameters": derived["parameters"],
               "state_size": derived["state_size"],
               "memory_bytes": peak_memory(device), "device_name": derived["device_name"], "dtype": config.dtype,
               "commit": where["commit"]}
    write_json(out / "result.json", result)
    how = f"diverged at step {diverged}" if diverged else f"{accuracy:.2%} of {right.numel():,} queries right"
    print(f"{how} after {result['epochs']:.2f} epochs in {result['seconds']:.0f} s; records in {out}/", flush=True)


if __name__ == "__main__":
    with configurator.main_error("mqar.py cell", checkpoint.CheckpointError):
        main(sys.argv[1:])
