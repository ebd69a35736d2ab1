"""Train a language model of any family: one loop, on one CPU or on many GPUs.

    python train.py config/longhorn_laptop.py
    python train.py config/longhorn_350m.py --batch_size=8
    torchrun --standalone --nproc_per_node=8 train.py config/longhorn_350m.py
    torchrun --nnodes=2 --node_rank=$RANK --master_addr=$HOST --nproc_per_node=8 train.py config/longhorn_350m.py
    torchrun --standalone --nproc_per_node=8 --max-restarts=9 train.py config/longhorn_350m.py --resume=auto

The surprise: the batch is stated in tokens. How many processes there are and what one of them holds at a time decide
speed and memory, never the result: the windows of step s are a function of (seed, s) alone, and accumulation follows.

`python train.py --help` lists every setting. Records go to out/<name of the config file>/, see records.py.
"""

import contextlib
import ctypes
import dataclasses
import datetime
import gc
import math
import os
import platform
import random
import sys
import time
import uuid
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import checkpoint
import configurator
import faults
from configurator import ConfigError
from data.loader import DataError, Tokens, eval_windows, get_batch, n_windows, step_windows
from kernels import build
from model import LM, ModelConfig, mixing_by
from records import Log, draw_loss, environment, read_log, version, write_json


@dataclass
class TrainConfig(ModelConfig):
    # --- run
    out_dir: str = ""  # folder of the records; empty: out/ and the name of the last config file
    resume: Literal["never", "auto", "must"] = "never"  # go on from the checkpoint in out_dir: auto if there is one
    init_from: str = ""  # a run's folder, or a checkpoint: begin with its weights (fine-tuning); all else begins anew
    seed: int = 1337  # of the weights and of the data's order
    # --- data
    dataset: str = "pystdlib"  # a folder of data/, or a path, prepared by its prepare.py
    vocab_size: int = 0  # 0: the dataset's, rounded up to a multiple of 64
    batch_tokens: int = 524288  # tokens of one optimiser step, over all processes and micro-batches
    batch_size: int = 8  # sequences of one micro-batch on one process: as many as fit in memory
    auto_micro_batch: bool = False  # halve batch_size at the start until a micro-batch fits in every process's memory
    # --- optimiser
    max_iters: int = 4800  # optimiser steps
    learning_rate: float = 6e-4  # peak
    min_lr: float = -1.0  # at the last step; -1: a tenth of the peak
    warmup_iters: int = -1  # steps of linear warmup; -1: 5% of max_iters
    weight_decay: float = 0.1  # on matrices of linear maps and the embedding only
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    grad_clip: float = 1.0  # norm that gradients are clipped to; 0: not at all
    max_bad_steps: int = 10  # stop after this many steps in a row whose loss or gradient is not finite, or a spike
    spike_factor: float = 0.0  # roll back at a loss above this x the median of the last 50 steps; 0: never
    # --- evaluation and records
    eval_interval: int = 250  # steps between evaluations; 0: only at the end
    eval_tokens: int = 0  # validation tokens of one; 0: all of them
    final_eval_tokens: int = 0  # of the last one, whose loss is the result's; 0: all of them. The best is told by eval_tokens
    eval_block_size: int = 0  # tokens of a validation window; 0: block_size
    eval_batch_size: int = 0  # validation windows at a time; 0: as many tokens as a micro-batch
    log_interval: int = 10  # steps between lines of the log
    checkpoint_interval: int = 0  # steps between checkpoints; 0: after each evaluation and at the end
    keep_checkpoints: int = 2  # how many of the last are kept, beside the best
    async_checkpoint: bool = True  # write them while training goes on, from a copy in memory
    wandb: Literal["off", "online", "offline"] = "off"  # also log to Weights & Biases
    wandb_project: str = "longhorn"  # its project
    wandb_group: str = ""  # runs shown together there, a sweep's say
    # --- system
    device: str = "auto"  # auto: cuda if there is a GPU, else cpu
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of matrix products; auto: bfloat16 where it is fast
    compile: bool = False  # torch.compile: slower to start, faster a step
    timeout_minutes: float = 10.0  # how long processes wait for one another before they give up
    stop_exit_code: int = 0  # after SIGTERM, SIGINT or SIGUSR1 and a checkpoint; another, where a scheduler starts again by it


# What may differ when a run goes on: nothing here changes a loss beyond rounding. All else is refused.
HARMLESS = {"out_dir", "resume", "batch_size", "eval_interval", "eval_tokens", "final_eval_tokens", "eval_block_size",
            "eval_batch_size", "log_interval", "checkpoint_interval", "wandb", "wandb_project", "wandb_group", "device",
            "compile", "max_bad_steps", "scan_backend", "kernel", "auto_micro_batch", "spike_factor", "keep_checkpoints",
            "async_checkpoint", "timeout_minutes", "stop_exit_code",
            "dataset"}  # its content is compared by its hash instead
EVALUATED = {"eval_tokens", "eval_block_size"}  # which tokens an evaluation during the run is over

# Dense bf16 peak of one device in FLOP/s, from the makers' data sheets; an unknown device gets no MFU.
PEAK_FLOPS = {"H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12,
              "L40S": 362e12, "B200": 2250e12, "RTX 4090": 165e12, "RTX 3090": 71e12}


# ------------------------------------------------------------------------------------------------------ pure functions

def learning_rate(step, config):
    """Rate of optimiser step 0 <= step < max_iters: linear warmup from above zero, then a cosine that ends at min_lr."""
    peak, warmup = config.learning_rate, warmup_steps(config)
    low = peak / 10 if config.min_lr < 0 else config.min_lr
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step + 1 - warmup) / (config.max_iters - warmup)
    return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * progress))


def warmup_steps(config):
    return round(0.05 * config.max_iters) if config.warmup_iters < 0 else config.warmup_iters


def in_short(tokens):
    return f"{tokens / 1e6:,.1f}M" if tokens >= 1e5 else f"{tokens:,}"


def peak_flops(device_name):
    """The device's dense bf16 peak in FLOP/s, or None."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in (device_name or "")), None)


def share_of_step(config, rank, world):
    """(windows a step, this rank's slice of them). Raises ConfigError where the batch cannot be cut so."""
    if config.batch_tokens < config.block_size or config.batch_tokens % config.block_size:
        near = max(1, round(config.batch_tokens / config.block_size)) * config.block_size
        raise ConfigError(f"batch_tokens {config.batch_tokens} is not a multiple of block_size {config.block_size}: "
                          f"the nearest is {near}")
    windows = config.batch_tokens // config.block_size
    if windows > 2**24:
        raise ConfigError(f"batch_tokens {config.batch_tokens} is {windows:,} windows of {config.block_size}: a step takes up to "
                          f"{2**24:,}")
    if windows % world:
        more = -(-windows // world) * world * config.block_size
        raise ConfigError(f"batch_tokens {config.batch_tokens} is {windows} windows of {config.block_size}, which {world} "
                          f"processes cannot share equally: choose batch_tokens {more} or another number of processes")
    each = windows // world
    return windows, slice(rank * each, (rank + 1) * each)


def check(config):
    """Raises ConfigError for values that cannot work, whatever the data and the machine."""
    for name in ("block_size", "batch_tokens", "batch_size", "max_iters", "log_interval", "max_bad_steps", "keep_checkpoints"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} {getattr(config, name)} must be at least 1")
    for name in ("eval_interval", "eval_tokens", "final_eval_tokens", "eval_block_size", "eval_batch_size",
                 "checkpoint_interval", "grad_clip", "weight_decay", "vocab_size"):
        if getattr(config, name) < 0:
            raise ConfigError(f"{name} {getattr(config, name)} must be 0 or more")
    for name, value in dataclasses.asdict(config).items():
        if isinstance(value, (int, float)) and (value != value or abs(value) > 2**48):
            shown = value if isinstance(value, float) or abs(value) < 10**20 else f"of {value.bit_length()} bits"
            raise ConfigError(f"{name} {shown} is out of range: at most {2**48:,}")
    if not 0 <= config.seed < 2**32:
        raise ConfigError(f"seed {config.seed} must be in 0 .. {2**32 - 1}")
    if config.learning_rate <= 0:
        raise ConfigError(f"learning_rate {config.learning_rate} must be above 0")
    if config.min_lr > config.learning_rate:
        raise ConfigError(f"min_lr {config.min_lr} is above learning_rate {config.learning_rate}")
    if warmup_steps(config) >= config.max_iters > 1:
        raise ConfigError(f"warmup_iters {config.warmup_iters} leaves nothing of max_iters {config.max_iters}: choose fewer")
    if not (0 <= config.beta1 < 1 and 0 <= config.beta2 < 1):
        raise ConfigError(f"beta1 {config.beta1} and beta2 {config.beta2} must be in [0, 1)")
    if config.spike_factor and config.spike_factor <= 1:
        raise ConfigError(f"spike_factor {config.spike_factor} must be above 1, or 0 for no roll-back")
    if not 0 < config.timeout_minutes <= 1e6:
        raise ConfigError(f"timeout_minutes {config.timeout_minutes} must be above 0, and at most a million")
    if not 0 <= config.stop_exit_code < 128:
        raise ConfigError(f"stop_exit_code {config.stop_exit_code} must be in 0 .. 127")
    if config.resume == "never" and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
        raise ConfigError("resume=never: each restart by torchrun --max-restarts would begin anew; give --resume=auto")


def refuse_changes(before, now):
    """Raises ConfigError when settings that alter the run differ from the checkpoint's; returns the harmless differences.

    A setting that the checkpoint does not know came later: it ran with what is the default now.
    """
    before = {f.name: f.default for f in dataclasses.fields(TrainConfig)} | before
    changed = {key: (before.get(key), value) for key, value in now.items() if before.get(key) != value}
    serious = {key: values for key, values in changed.items() if key not in HARMLESS}
    if serious:
        shown = ", ".join(f"{key} {old!r} -> {new!r}" for key, (old, new) in serious.items())
        raise ConfigError(f"the checkpoint belongs to another run: {shown}; put these back, or choose another out_dir")
    return changed


# ------------------------------------------------------------------------------------------------------------- machine

def open_device(config):
    """(device, rank, world size); joins torchrun's process group when started by it."""
    rank, local = (int(os.environ.get(name, 0)) for name in ("RANK", "LOCAL_RANK"))
    world = int(os.environ.get("WORLD_SIZE", 1))
    kind = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind.startswith("cuda"):
        if not torch.cuda.is_available():
            raise ConfigError(f"device {kind}: PyTorch sees no GPU; use --device=cpu, or install a CUDA build of torch")
        if kind == "cuda":
            kind = f"cuda:{local}"
        torch.set_float32_matmul_precision("high")
    try:
        device = torch.device(kind)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch.zeros(1, device=device).item()  # meta, say, is known and holds no number
    except (RuntimeError, AssertionError, ValueError, ImportError):
        raise ConfigError(f"device {kind!r} is unknown or not there: use cpu, cuda, cuda:1 ...") from None
    if device.type == "cpu":
        keep_memory()
    if world > 1:
        if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", world))))
        faults.Peers.join("nccl" if device.type == "cuda" else "gloo", datetime.timedelta(minutes=config.timeout_minutes))
    return device, rank, world


def open_wandb(config):
    """The package of Weights & Biases, logged in where its run will be online. Raises ConfigError."""
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(f"wandb={config.wandb}: {error}: pip install wandb, or --wandb=off") from None
    try:
        if config.wandb == "online":
            wandb.login()
    except wandb.Error as error:
        raise ConfigError(f"wandb=online: {error} Or keep it here: --wandb=offline") from None
    return wandb


def keep_memory():
    """Let glibc keep what is freed: handing activations back to the kernel each step costs a page fault per 4 KB again."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        m_trim_threshold, m_mmap_threshold = -1, -3
        if libc.mallopt(m_mmap_threshold, 1 << 30) or libc.mallopt(m_mmap_threshold, 1 << 25):  # the most before glibc 2.35
            libc.mallopt(m_trim_threshold, (1 << 31) - 1)


def pick_dtype(name, device):
    """The dtype of autocast; 'auto' takes bfloat16 on hardware that multiplies it natively."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return torch.float32
    return torch.bfloat16 if "avx512_bf16" in flags or "amx_bf16" in flags else torch.float32


def device_name(device):
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def peak_memory(device):
    """Bytes at the most so far: the GPU's allocations, or the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Bar:
    """A progress bar on a terminal, plain lines elsewhere; silent on ranks other than 0."""

    def __init__(self, config, start, main):
        self.bar = None
        self.main = main
        if main and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=config.max_iters, initial=start, unit="step", dynamic_ncols=True, smoothing=0.05)

    def step(self, text=None):
        if self.bar is not None:
            self.bar.update(1)
            if text:
                self.bar.set_postfix_str(text, refresh=False)

    def line(self, text, beside_bar=True):
        if self.main and self.bar is not None and beside_bar:
            self.bar.write(text)
        elif self.main and self.bar is None:
            faults.say(text)

    def close(self):
        if self.bar is not None:
            self.bar.close()


# ---------------------------------------------------------------------------------------------------------- evaluation

@torch.no_grad()
def evaluate(model, compiled, tokens, windows, batch_size, autocast, device, rank=0, world=1):
    """Mean loss in nats over fixed windows (see eval_windows): the same tokens for every model, batch and rank count.

    `compiled` sees full batches only, so that odd ones at the end do not make it compile again.
    """
    model.eval()
    mine = windows[rank::world]
    total = torch.zeros(2, dtype=torch.float64)  # nats, tokens
    full = [w for w in mine if w[1] == mine[0][1]]
    rest = [w for w in mine if w[1] != mine[0][1]]
    batches = [full[i:i + batch_size] for i in range(0, len(full), batch_size)] + [[w] for w in rest]
    for batch in batches:
        length = int(batch[0][1])
        rows = torch.stack([torch.from_numpy(tokens[s:s + length + 1].astype("int64")) for s, _ in batch]).to(device)
        with autocast:
            loss = (compiled if len(batch) == batch_size else model)(rows[:, :-1], rows[:, 1:], loss_only=True)[1]
        total += torch.tensor([loss.item() * len(batch) * length, len(batch) * length], dtype=torch.float64)
    if world > 1:
        total = total.to(device)
        dist.all_reduce(total)
    model.train()
    return (total[0] / total[1]).item()


# --------------------------------------------------------------------------------------------------------------- a run

class Run:
    """What a run works with, where it stands, and what is done around a step; the loop, and the step itself, are in main.
    Nothing else may hold a Run: see finish_group."""

    def __init__(self, config, device, rank, world):
        self.config, self.device, self.rank, self.world, self.is_main = config, device, rank, world, rank == 0
        self.out = Path(config.out_dir)
        self.path = self.out / checkpoint.NEWEST
        # the data: both splits, whose windows are which, those of an evaluation
        folder = Path(config.dataset) if Path(config.dataset).is_dir() else Path(__file__).parent / "data" / config.dataset
        self.data = Tokens(folder, vocab_size=config.vocab_size or None, block_size=config.block_size)
        self.stamps = {tokens.filename: faults.stamp(tokens) for tokens in (self.data.train, self.data.val)}
        self.written = [list(stamp[1:]) for stamp in self.stamps.values()]  # sizes and times of the two files
        config.vocab_size = config.vocab_size or -(-self.data.vocab_size // 64) * 64
        self.windows_per_step, self.mine = share_of_step(config, rank, world)
        self.per_rank = self.windows_per_step // world
        self.n_train = n_windows(len(self.data.train), config.block_size)
        self.eval_block = config.eval_block_size or config.block_size
        self.final_windows = eval_windows(len(self.data.val), self.eval_block, config.final_eval_tokens)
        self.some_windows = eval_windows(len(self.data.val), self.eval_block, config.eval_tokens)
        # where it stands: what a checkpoint holds beside the weights ...
        self.start, self.spent, self.skipped, self.bad, self.best = 0, 0.0, 0, 0, math.inf
        self.recent = deque(maxlen=faults.SPIKE_MEDIAN)  # losses that a spike is measured by
        # ... and what it does not: the last validation, the step that is saved, why a later one is not
        self.val_loss, self.saved_at, self.unsaved = None, 0, None
        self.resumed = self.begun_with = self.log = None
        self.wandb, self.wandb_id = open_wandb(config) if config.wandb != "off" and self.is_main else None, None
        self.damaged = []  # a line on each checkpoint that was passed over
        self.code_versions = []  # of every stretch of the run, as far as git knows; rank 0's business

    def build(self):
        """The model and its optimiser; and the micro-batch that memory holds, where that is to be found."""
        config, device = self.config, self.device
        random.seed(config.seed), np.random.seed(config.seed), torch.manual_seed(config.seed)
        dtype = pick_dtype(config.dtype, device)
        config.dtype = str(dtype).removeprefix("torch.")
        self.autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
        try:
            self.model = LM(ModelConfig(**{f.name: getattr(config, f.name) for f in dataclasses.fields(ModelConfig)})).to(device)
            if config.scan_backend:
                build.choose("scan", config.scan_backend, device.type, False)
            if config.kernel:  # one token as a trial: what cannot run here says so now, in a line
                with torch.no_grad(), self.autocast:
                    self.model(torch.zeros(1, 1, dtype=torch.long, device=device))
            self.mixing = mixing_by(config, device.type)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(error) from None
        self.optimizer = torch.optim.AdamW(self.model.optimizer_groups(config.weight_decay), lr=config.learning_rate,
                                           betas=(config.beta1, config.beta2), fused=True)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        if config.auto_micro_batch:
            most = torch.tensor(faults.most_that_fit(self.model, min(config.batch_size, self.per_rank), config, self.autocast,
                                                     self.optimizer)).to(device)
            if self.world > 1:
                dist.all_reduce(most, dist.ReduceOp.MIN)
            if most == 0:
                raise faults.Stopped(f"not even a micro-batch of 1 x {config.block_size} tokens fits in memory: {faults.SMALLER}")
            config.batch_size = most.item()
        self.batch_size = config.batch_size
        self.settings = dataclasses.asdict(config)

    def resume(self):
        """Take the folder, and go on from where it left off, if it did; False where it is finished already."""
        config, out, data = self.config, self.out, self.data
        if self.is_main:  # the lock first: what is read here must not be written to
            with faults.writing_to(out):
                self.lock = faults.take(out)  # held until the process ends
        if self.world > 1:
            dist.barrier()
        found = checkpoint.candidates(out)
        if config.resume == "must" and not found:
            raise ConfigError(f"resume=must: there is no {self.path}; start with --resume=auto")
        if config.resume != "never" and found:
            origin, tensors, meta, self.damaged = checkpoint.load_first(found)
            with checkpoint.fitting(origin):
                before, trained_on = dict(meta["config"]), meta["data"]
                self.code_versions = list(meta.get("code_versions", []))  # none in old checkpoints
            self.resumed = origin, meta, refuse_changes(before, self.settings)
            if trained_on != data.sha256:
                raise ConfigError(f"the data in {data.folder} is not what this run was trained on (its sha256 differs): prepare "
                                  "it as before, or choose another out_dir")
            if self.is_main and meta.get("stamps", self.written) != self.written:
                data.verify()  # copied, or written to while nobody looked: of 18 GB that takes a minute
            with checkpoint.fitting(origin):
                self.restore(tensors, meta)
                self.start, self.spent, self.skipped, self.bad, self.best = (
                    meta[k] + 0 for k in ("step", "seconds", "skipped", "bad", "best_val_loss"))
                self.recent.extend(meta.get("recent", []))
                self.wandb_id = meta.get("wandb_id")
            if EVALUATED & self.resumed[2].keys():  # losses over other tokens cannot be compared: the best is looked for anew
                self.best, meta["best"] = math.inf, None
            del tensors  # as large as the model and its optimiser
        elif config.init_from:
            self.begin_with(Path(config.init_from))
        self.saved_at = self.start
        if self.world > 1:
            seen = [None] * self.world
            dist.all_gather_object(seen, (self.start, config.dtype, data.sha256["train"]))
            if any(s != seen[0] for s in seen):
                raise ConfigError(f"the ranks disagree about step, dtype or data ({seen}): out_dir and the dataset must be the "
                                  "same on every node")
        if self.resumed and self.start == config.max_iters and (out / "result.json").exists():
            if self.is_main:
                print(f"{out} is finished already; to train again use --resume=never", flush=True)
            return False
        self.keeper = checkpoint.Keeper(out, config.keep_checkpoints, config.async_checkpoint)
        if self.is_main:
            with faults.writing_to(out):
                if not self.resumed:
                    faults.keep_earlier(out)
                else:
                    with checkpoint.fitting(origin):
                        self.keeper.went_on_from(origin, meta)
                out.mkdir(parents=True, exist_ok=True)
        if self.world > 1:
            dist.barrier()
        return True

    def begin_with(self, place):
        """Take the weights of the newest checkpoint in a folder, or of a checkpoint: another run's, or an imported model's."""
        found = checkpoint.candidates(place) if place.is_dir() else [place]
        if not found:
            raise ConfigError(f"init_from={place}: there is no checkpoint in this folder")
        if found[0].parent.resolve() == self.out.resolve():
            raise ConfigError(f"init_from={place} lies in out_dir, where this run's own checkpoints go: choose another out_dir")
        origin, weights, meta, self.damaged = checkpoint.load_first(found, weights=True)
        for key in ("tokenizer", "table"):
            there, here = meta.get(key), self.data.meta.get(key)
            if there and here and there != here:
                what = f"tokenizer is {there!r}, the data's {here!r}" if key == "tokenizer" else "characters are not the data's"
                raise ConfigError(f"{origin}: its {what}: the weights know other tokens than {self.data.folder} has")
        with checkpoint.fitting(origin):
            sizes = {f.name: f.default for f in dataclasses.fields(ModelConfig) if f.name not in ("scan_backend", "kernel")}
            before = {key: meta["config"].get(key, default) for key, default in sizes.items()}
            changed = [f"{key} was {old!r}, is {getattr(self.config, key)!r}" for key, old in before.items()
                       if getattr(self.config, key) != old]
            wrong = checkpoint.misfit(weights, self.model)
            self.begun_with = origin, meta["step"] + 0, changed
        if wrong:
            raise ConfigError("; ".join([f"{origin}: its weights do not fit this model: {wrong}", *changed]))
        with checkpoint.fitting(origin):
            self.model.load_state_dict(weights)

    def restore(self, tensors, meta):
        """Put back the state that `save` saved."""
        state = checkpoint.unflatten(tensors, meta["skeleton"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        checkpoint.set_rng_state(state["rng"])

    def open_records(self):
        """config.json, the log, Weights & Biases; and what stands on the screen before the first step."""
        config, data, model, out = self.config, self.data, self.model, self.out
        counts, tokens = model.parameter_count(), config.max_iters * config.batch_tokens
        self.derived = derived = {
            "windows_per_step": self.windows_per_step, "accumulation": -(-self.per_rank // self.batch_size),
            "processes": self.world, "tokens": tokens, "epochs": config.max_iters * self.windows_per_step / self.n_train,
            "warmup_steps": warmup_steps(config), "device": str(self.device), "device_name": device_name(self.device),
            "threads": torch.get_num_threads(), "parameters": counts, "flops_per_token": model.flops_per_token()["total"],
            "train_tokens": len(data.train), "val_tokens": len(data.val), "decayed": model.decayed()}
        if self.is_main:
            self.where = environment()
            self.code_versions += [now for now in [version(self.where)] if now and now not in self.code_versions[-1:]]
            try:
                write_json(out / "config.json", {
                    "config": self.settings, "derived": derived, "environment": self.where,
                    "code_versions": self.code_versions, "data": data.meta,
                    "time": datetime.datetime.now().astimezone().isoformat(timespec="seconds")})
                self.log = Log(out, self.start)
            except OSError as error:
                raise ConfigError(f"cannot write the records to {out} ({error.strerror}): make room, or choose another "
                                  "out_dir") from None
            if self.wandb:  # under the same id where it goes on
                self.wandb_id = self.wandb_id or uuid.uuid4().hex[:8]
                self.wandb.init(project=config.wandb_project, group=config.wandb_group or None, name=out.name, mode=config.wandb,
                                dir=out, config={**self.settings, **derived}, id=self.wandb_id, resume="allow")
        self.bar = bar = Bar(config, self.start, self.is_main)
        bar.line(f"{config.model}: {counts['total']:,} parameters, {len(derived['decayed'])} of {len(list(model.parameters()))} "
                 f"tensors with weight decay; {derived['device_name']} x {self.world}, {config.dtype}; tokens mixed by "
                 f"{self.mixing}")
        bar.line(f"data: {data.folder} ({len(data.train):,} training tokens); {config.max_iters:,} steps of "
                 f"{config.batch_tokens:,} tokens = {in_short(tokens)} ({derived['epochs']:.2f} epochs), "
                 f"{derived['accumulation']} micro-batches a step")
        for line in self.damaged:
            bar.line(f"passed over: {line}")
        if self.begun_with:
            origin, step, changed = self.begun_with
            bar.line("; ".join([f"weights from {origin} (step {step})", *changed]))
        if self.resumed:
            origin, meta, changes = self.resumed
            logged = max((e["step"] for e in read_log(out, "train")), default=0) if self.is_main else self.start
            if self.start - logged >= meta["config"]["log_interval"]:
                bar.line(f"log.jsonl lacks what came after step {logged}: the disk did not take it")
            bar.line(f"going on from {origin} at step {self.start}"
                     + "".join(f"; {key} was {old!r}, is {new!r}" for key, (old, new) in changes.items()))
            known = meta.get("code_versions")
            if known and self.code_versions != known:
                bar.line(f"the code was {known[-1]}, is {self.code_versions[-1]}: config.json names both, and a sweep's report "
                         "leaves the run out")

    def begin(self):
        """Start the clock: from here on time is training's."""
        if self.world > 1:
            # DDP orders its buckets anew after its first backward, and three gradients added in another order are not the same
            # to the bit: so that a resumed run has the same order as one that never stopped, the first is none of a step's.
            first = step_windows(self.n_train, self.windows_per_step, self.config.seed, 0)[self.mine][:self.batch_size]
            if self.gradients(first) is None:
                raise faults.Stopped(faults.too_large(self, len(first)))
            self.optimizer.zero_grad(set_to_none=True)
        self.began = self.since = time.perf_counter()
        self.since_step, self.aside = self.start, 0.0  # of the log's last line; seconds since that were not training's

    def record(self, event, step, **values):
        """A line of the log. A disk that does not take it does not end training: it is tried again with the next."""
        try:
            behind = len(self.log.unwritten)
            self.log.write(event, step, **values)
            if behind:
                self.bar.line(f"step {step}: the log is whole again")
        except OSError as error:
            if not behind:
                self.bar.line(f"step {step}: log.jsonl takes no line ({error.strerror}): kept in memory until it does")

    def log_step(self, done, train_loss, lr, norm):
        """The log's line on a step, and the one on the screen."""
        config, derived, now = self.config, self.derived, time.perf_counter()
        rate = (done - self.since_step) * config.batch_tokens / max(now - self.since - self.aside, 1e-9)
        peak = peak_flops(derived["device_name"]) if config.dtype != "float32" else None
        values = {"tokens": done * config.batch_tokens, "train_loss": train_loss, "lr": lr, "grad_norm": norm,
                  "tokens_per_second": round(rate), "memory_bytes": peak_memory(self.device),
                  "seconds": round(self.spent + now - self.began, 3)}
        if peak:
            values["mfu"] = round(rate * derived["flops_per_token"] / (peak * self.world), 4)
        self.since, self.since_step, self.aside = now, done, 0.0
        self.record("train", done, **values)
        if self.wandb:
            self.wandb.log(values, step=done)
        self.bar.line(f"step {done:6d}  loss {train_loss:.4f}  lr {lr:.2e}  norm {norm:.2f}  {rate:,.0f} tokens/s"
                      + (f"  mfu {values['mfu']:.1%}" if peak else ""), beside_bar=False)

    def loss_over(self, windows):
        """`evaluate` on these windows; where memory does not hold it, the run ends with the command line that helps."""
        config, block = self.config, self.eval_block
        at_a_time = config.eval_batch_size or max(1, self.batch_size * config.block_size // block)
        try:
            return evaluate(self.model, self.compiled, self.data.val, windows, at_a_time, self.autocast, self.device, self.rank,
                            self.world)
        except (RuntimeError, MemoryError) as error:
            if not faults.out_of_memory(error):
                raise
        raise faults.Stopped(f"an evaluation of {at_a_time} x {block} tokens at a time does not fit in memory: "
                             + faults.again_with(self.world, f"--eval_batch_size={max(1, at_a_time // 2)}", "--resume=auto"))

    def validate(self, step, windows):
        """The loss over these windows, in the log and on the screen."""
        loss = self.loss_over(windows)
        if self.is_main:
            values = {"tokens": step * self.config.batch_tokens, "val_loss": loss, "val_tokens": int(windows[:, 1].sum()),
                      "seconds": round(self.spent + time.perf_counter() - self.began, 3)}
            self.record("eval", step, **values)
            if self.wandb:
                self.wandb.log(values, step=step)
            self.bar.line(f"step {step:6d}  validation loss {loss:.4f} over {values['val_tokens']:,} tokens")
        return loss

    def draw(self):
        if self.is_main:
            try:
                draw_loss(self.out)
            except ImportError as error:
                build.say_once(f"no loss.png: {error} (pip install matplotlib; then python records.py {self.out})")
            except Exception:  # no picture is worth a run
                pass

    def save(self, step, loss):
        """Begin to save the state after `step`, whose validation loss is `loss` if it is known; `settle` says how it ended."""
        if self.is_main:
            self.settle(wait=True)
            self.keeper.save(
                {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict(),
                 "rng": checkpoint.rng_state()},
                {"step": step, "tokens": step * self.config.batch_tokens,
                 "seconds": self.spent + time.perf_counter() - self.began, "skipped": self.skipped, "bad": self.bad,
                 "best_val_loss": self.best, "recent": list(self.recent), "config": self.settings, "data": self.data.sha256,
                 "stamps": self.written, "code_versions": self.code_versions, "wandb_id": self.wandb_id,
                 "tokenizer": self.data.meta.get("tokenizer"), "table": self.data.meta.get("table")},
                loss, first=self.log.sync)
            self.settle()

    def settle(self, wait=False):
        """Take note of a checkpoint that is on disk by now, or could not be written."""
        step, error = self.keeper.result(wait) or (self.saved_at, None)
        self.unsaved = error or self.unsaved
        if error:  # a full disk, say: what was saved before is untouched
            self.bar.line(f"step {step}: checkpoint not written ({error}); the one before stays")
        else:
            self.saved_at = step

    def evaluate_and_save(self, done, asked, spike):
        """What is due after a step; the last one, and one after which the run was `asked` to stop, save in any case."""
        config, at_end, paused, compared = self.config, done == self.config.max_iters, time.perf_counter(), None
        regular = config.eval_interval and done % config.eval_interval == 0
        if at_end or regular:
            faults.unchanged(self.data.val, self.stamps)
            self.val_loss = compared = self.validate(done, self.final_windows if at_end else self.some_windows)
            compared_before = done > config.eval_interval > 0 or self.best < math.inf  # over eval_tokens
            if at_end and compared_before and not np.array_equal(self.final_windows, self.some_windows):
                compared = self.loss_over(self.some_windows)  # the best is the best on the same tokens
            self.best = min(self.best, compared)
        due = done % config.checkpoint_interval == 0 if config.checkpoint_interval else regular
        if at_end or asked or due and not spike:  # a roll-back leaves nothing new to save
            self.save(done, compared)
        if at_end or regular:
            self.draw()
        self.settle(wait=at_end or asked)
        self.aside += time.perf_counter() - paused

    def stopped(self, done):
        """The last words of a run that was asked to stop; its state is saved, or could not be."""
        self.bar.close()
        if self.is_main and self.saved_at < done:
            raise faults.Stopped(f"stopped after step {done} without saving it ({self.unsaved}); the last checkpoint is of step "
                                 f"{self.saved_at}")
        if self.is_main:
            faults.say(f"stopped after step {done} of {self.config.max_iters} and saved {self.path}; go on with: "
                       + faults.again_with(self.world, "--resume=auto"))

    def finish(self):
        """result.json, once the last checkpoint is there."""
        config, data, derived, windows = self.config, self.data, self.derived, self.final_windows
        if self.val_loss is None:
            # killed between the last checkpoint and the result: the log holds its evaluation, if the disk took it
            same = {"step": config.max_iters, "val_tokens": int(windows[:, 1].sum())}
            known = [next((e.get("val_loss") for e in read_log(self.out, "eval") if same.items() <= e.items()), None)
                     if self.is_main else None]
            if self.world > 1:
                dist.broadcast_object_list(known)
            self.val_loss = self.validate(config.max_iters, windows) if known[0] is None else known[0]
            self.draw()
        if self.best == math.inf:  # looked for anew, and nothing was left to train
            self.best = self.loss_over(self.some_windows)
        self.bar.close()
        if not self.is_main:
            return
        again = "make room, then " + faults.again_with(self.world, "--resume=auto")
        if self.saved_at < config.max_iters:
            raise faults.Stopped(f"training is done, but its last checkpoint is of step {self.saved_at} ({self.unsaved}): "
                                 + again)
        seconds = self.spent + time.perf_counter() - self.began
        result = {"model": config.model, "val_loss": self.val_loss, "val_tokens": int(windows[:, 1].sum()),
                  "best_val_loss": self.best, "steps": config.max_iters, "skipped_steps": self.skipped,
                  "tokens": derived["tokens"], "seconds": round(seconds, 3),
                  "tokens_per_second": round(derived["tokens"] / seconds), "parameters": derived["parameters"]["total"],
                  "flops": derived["flops_per_token"] * derived["tokens"], "memory_bytes": peak_memory(self.device),
                  "processes": self.world, "device_name": derived["device_name"], "dtype": config.dtype,
                  "commit": self.where["commit"], "seed": config.seed}
        text = f"validation loss {self.val_loss:.4f} nats per token"
        size = data.bytes_per_token["val"] if isinstance(data.bytes_per_token, dict) else data.bytes_per_token
        if size:
            result["val_bits_per_byte"] = self.val_loss / math.log(2) / size
            text += f", {result['val_bits_per_byte']:.4f} bits per byte"
            if data.meta.get("xz9_bits_per_byte"):
                result["xz9_bits_per_byte"] = data.meta["xz9_bits_per_byte"]
                text += f" (xz -9 needs {result['xz9_bits_per_byte']:.4f} for the same bytes)"
        try:
            self.log.flush()
            write_json(self.out / "result.json", result)
        except OSError as error:
            raise faults.Stopped(f"training is done and its last checkpoint is of step {self.saved_at}, but the records could "
                                 f"not be finished ({error.strerror}): {again}") from None
        if self.wandb:
            self.wandb.summary.update(result)
            self.wandb.finish()
        faults.say(f"{text}, after {in_short(derived['tokens'])} tokens in {seconds:.0f} s; records in {self.out}/")

    def gradients(self, windows):
        """Adds up the gradients of this process's windows: their share of the loss, or None where memory does not hold a
        micro-batch. What an error's frames held is free again once this has returned."""
        try:
            loss_sum = torch.zeros((), device=self.device)
            for i in range(0, len(windows), self.batch_size):
                part = windows[i:i + self.batch_size]
                x, y = get_batch(self.data.train, part, self.config.block_size, self.device)
                last = i + self.batch_size >= len(windows)
                with contextlib.nullcontext() if self.world == 1 or last else self.ddp.no_sync():
                    with self.autocast:
                        loss = self.ddp(x, y, loss_only=True)[1]
                        loss = loss * (len(part) / self.per_rank)  # the mean over the step's windows, however they are cut
                    self.scaler.scale(loss).backward()
                loss_sum += loss.detach().float()
            return loss_sum
        except (RuntimeError, MemoryError) as error:
            if not faults.out_of_memory(error):
                raise
            return None


# ------------------------------------------------------------------------------------------------------------ training

def main(argv):
    stop = faults.Stop()  # before anything that takes long
    config = configurator.load(TrainConfig, argv)
    check(config)
    name = Path(config.config_files[-1]).stem if config.config_files else config.model
    config.out_dir = config.out_dir or f"out/{name}"
    device, rank, world = open_device(config)
    run = Run(config, device, rank, world)  # with its data
    run.build()  # model and optimiser
    if not run.resume():  # goes on where it left off; False: that was the end
        return
    run.compiled = run.ddp = torch.compile(run.model) if config.compile else run.model
    if world > 1:
        run.ddp = DistributedDataParallel(run.compiled, device_ids=[device.index] if device.type == "cuda" else None,
                                          gradient_as_bucket_view=True)
    run.open_records()
    run.begin()

    model, optimizer, scaler = run.model, run.optimizer, run.scaler
    for step in range(run.start, config.max_iters):
        done, lr = step + 1, learning_rate(step, config)
        for group in optimizer.param_groups:
            group["lr"] = lr
        windows = step_windows(run.n_train, run.windows_per_step, config.seed, step)[run.mine]
        faults.unchanged(run.data.train, run.stamps)
        while (loss_sum := run.gradients(windows)) is None:  # forward and backward; None: memory does not hold them
            faults.smaller_micro_batch(run, done)
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)

        # every rank must take the same turn: one small message with the loss, and with who was asked to stop
        shared = torch.stack([loss_sum / world, torch.tensor(float(stop.signal is not None), device=device)])
        if world > 1:
            dist.all_reduce(shared)
        train_loss, asked, norm = shared[0].item(), shared[1].item() > 0, norm.item()
        spike = faults.is_spike(train_loss, run.recent, config.spike_factor)
        if spike:
            run.bad += 1
            faults.roll_back(run, done, train_loss)
        elif math.isfinite(train_loss) and math.isfinite(norm):
            with faults.memory_or(f"step {done}: no memory for the two moments that AdamW keeps of each weight, whatever the "
                                  "micro-batch: choose a smaller model, or more memory"):
                scaler.step(optimizer)
            run.recent.append(train_loss)
            run.bad = 0
        else:
            faults.skip(run, done, windows, train_loss, norm)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if run.bad >= config.max_bad_steps:
            faults.give_up(run, done, windows)

        if run.is_main and (done % config.log_interval == 0 or done == config.max_iters):
            run.log_step(done, train_loss, lr, norm)
        run.bar.step(f"loss {train_loss:.3f}")
        run.evaluate_and_save(done, asked, spike)
        if asked and done < config.max_iters:
            run.stopped(done)
            return config.stop_exit_code
    run.finish()


def finish_group():
    """Leave the process group; only after main, when its Run's DistributedDataParallel is gone. Were that the last to hold the
    group, it would wait for gloo's threads with Python's lock in hand, and they for the lock: no end, now and then."""
    if dist.is_initialized():
        gc.collect()  # main's frame may live on in a cycle, as with an error that matplotlib's import, below draw, keeps
        dist.destroy_process_group()


if __name__ == "__main__":
    with configurator.main_error("train.py", DataError, checkpoint.CheckpointError, faults.Stopped):
        try:
            code = main(sys.argv[1:])
            finish_group()
            sys.exit(code)
        except faults.Lost as error:
            faults.leave(error)
        except RuntimeError as error:
            if not faults.Peers.are_meant(error):
                raise
            faults.leave(faults.Peers.lost(error))
