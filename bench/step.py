"""The cost of a training step of every family: time, tokens/s, MFU and memory, compared with transformers' models.

    python bench/step.py                                                # CPU: 4 layers of width 256, T = 512, batch 4
    python bench/step.py --with_peers --save                            # results/step_cpu.json
    python bench/step.py --device=cuda --size=120M --compile --save     # results/step_cuda_120m.json
    python bench/step.py --families=llama,mamba --rounds=3
    python bench/step.py --families=longhorn --kernels                  # where a step's time goes
    python bench/step.py --device=cuda --size=120M --compile --graphs   # also replayed as CUDA graphs

The step is the one in train.py: forward, backward, clipping, AdamW. The peers are transformers' LLaMA and Mamba with
the same shape and optimizer (pip install transformers).

Each model runs in its own process, so its memory is counted separately. Models take turns, round after round. The batch
is the same in every step, with tokens distributed as unevenly as words, so a working model must learn. A model whose
loss does not fall is not timed.

One of our layers has two residual branches. In transformers and in published figures, each branch of Mamba counts as a
layer. So for 4 of our layers the peer gets 8, and with them the same number of parameters.
"""

import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import configurator  # noqa: E402
from bench import measure  # noqa: E402
from bench.measure import DTYPES, START_S, Threads, Worker, imported, or_dash  # noqa: E402
from common.errors import ConfigError, main_error  # noqa: E402
from common.gpus import peak_flops  # noqa: E402
from configurator import Count, Seconds  # noqa: E402
from export import ARCHITECTURES, skeleton, theirs_config  # noqa: E402
from inspection.counting import flops_per_token  # noqa: E402
from model import FAMILIES, LM, ModelConfig  # noqa: E402
from optim import build_optimizers  # noqa: E402
from runtime import graphs  # noqa: E402
from runtime.distributed import keep_freed_memory, parallelize  # noqa: E402
from tools.parameters import SIZES  # noqa: E402
from train import TrainConfig  # noqa: E402

SHAPE = {"n_layer": 4, "n_embd": 256, "n_head": 4, "block_size": 512, "vocab_size": 256, "batch_size": 4}
PAPER = {"block_size": 1024, "vocab_size": 50304, "batch_size": 8}  # in addition to SIZES
STEPS = {"cpu": (0, 1), "cuda": (1, 5)}  # untimed and timed steps per turn; between turns a GPU's cache is emptied


# --------------------------------------------------------------------------------------------- one family, in a worker

class Model:
    """A family's model in a worker. spec: see spec_of."""

    TINY = {"n_layer": 2, "n_embd": 128, "n_head": 2, "block_size": 64, "vocab_size": 256}  # run first, so that
    # one-time builds, loads and start-ups are neither in times nor in peaks

    def __init__(self, spec):
        self.spec = spec
        self.config = spec["config"]
        self.device = torch.device(spec["device"])
        self.dtype = DTYPES[spec["dtype"]]
        torch.set_num_threads(spec["threads"])
        torch.manual_seed(0)

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)


def left_out(line):
    """Used in place of `say`: a model that cannot be replayed as a graph is not timed."""
    raise measure.LeftOut(line)


def peer_model(config):
    """Return transformers' model in the shape of our config, as (module, idx -> logits). Raises LeftOut without
    transformers."""
    AutoConfig, AutoModel = imported("transformers", "AutoConfig"), imported("transformers", "AutoModelForCausalLM")
    imported("transformers.utils.logging", "set_verbosity_error")()
    settings = theirs_config(skeleton(config), config.model) | {"use_cache": False}
    module = AutoModel.from_config(AutoConfig.for_model(**settings))
    return module, lambda idx: module(input_ids=idx).logits


class Trial(Model):
    """A model in training: ours, or with spec["peer"] transformers'."""

    def __init__(self, spec):
        super().__init__(spec)
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # as train.py does
        else:
            keep_freed_memory()
        self.build(replace(self.config, **self.TINY), 1)
        self.step()
        del self.model, self.optimizer, self.forward_backward, self.tokens
        self.peak = measure.Peak(self.device)
        self.build(self.config, spec["batch_size"], compile=spec["compile"], graphs=spec["graphs"])
        self.losses = []
        self.seconds = []

    def build(self, config, batch_size, **how):
        torch.manual_seed(0)
        settings = TrainConfig(**vars(config), micro_batch_size=batch_size, **how)
        with self.device:
            if self.spec["peer"]:
                self.model, forward = peer_model(config)
                loss_of = lambda x, y: F.cross_entropy(forward(x).float().flatten(0, 1), y.flatten())
            else:
                self.model = LM(config)
                run = parallelize(self.model, settings, data=None)
                loss_of = lambda x, y: run(x, y, loss_only=True)[1]

        def forward_backward(x, y, weight):
            with self.autocast():
                loss = loss_of(x, y) * weight
            loss.backward()
            return loss.detach()

        self.forward_backward = graphs.replayed(forward_backward, self.model, settings, left_out)
        self.model.train()
        (self.optimizer,) = build_optimizers(self.model, settings)
        frequency = 1 / torch.arange(1.0, config.vocab_size + 1)  # Zipf's law
        tokens = torch.multinomial(frequency, batch_size * (config.block_size + 1), replacement=True,
                                   generator=torch.Generator().manual_seed(0))  # the same for all models
        self.tokens = tokens.view(batch_size, -1).to(self.device)  # (B, T + 1)

    def about(self):
        return {"parameters": sum(p.numel() for p in self.model.parameters()),
                "flops_per_token": flops_per_token(skeleton(self.config))["total"]}

    def step(self):
        loss = self.forward_backward(self.tokens[:, :-1], self.tokens[:, 1:], 1.0)
        nn.utils.clip_grad_norm_(self.model.parameters(), TrainConfig.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()  # waits for the device, as train.py does

    def turn(self, untimed, timed):
        """Take some steps. Returns {'losses' of all steps so far, 'seconds' of the timed steps, 'peak_bytes' above the
        process without the model}."""
        for i in range(untimed + timed):
            start = time.perf_counter()
            self.losses.append(self.step())
            if i >= untimed:
                self.seconds.append(time.perf_counter() - start)
        peak = self.peak.bytes()
        if self.device.type == "cuda":
            if not timed:
                torch.cuda.reset_peak_memory_stats()  # the compiler's trials are not part of a step
            torch.cuda.empty_cache()
        return {"losses": self.losses, "seconds": self.seconds, "peak_bytes": peak}

    def kernels(self):
        """Profile three steps, and return averages per step in a dict.

        "kernels"                [[milliseconds, calls, name], ...] for everything that the device ran, slowest first
        "kernel_milliseconds"    the time with at least one kernel running
        "idle_milliseconds"      the time in between with none running
        """
        where = self.device.type.upper()
        with torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, where)]) as profile:
            for _ in range(3):
                self.step()
        time_of = "self_device_time_total" if where == "CUDA" else "self_cpu_time_total"  # in microseconds
        rows = [[getattr(e, time_of) / 3e3, e.count / 3, e.key[:100]] for e in profile.key_averages()]
        there = getattr(torch.autograd.DeviceType, where)
        ran = [e.time_range for e in profile.events() if e.device_type == there]
        busy, idle = busy_and_idle([(span.start, span.end) for span in ran])
        return {"kernels": sorted(rows, reverse=True), "kernel_milliseconds": busy / 3e3,
                "idle_milliseconds": idle / 3e3}


def busy_and_idle(spans):
    """Return (busy, idle): how long at least one of the spans (start, end) was running, and how long none was between
    the first and the last. Kernels of two streams can overlap; that time counts once."""
    busy = idle = 0.0
    until = None
    for start, end in sorted(spans):
        if until is None:
            until = start
        idle += max(0.0, start - until)
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy, idle


# --------------------------------------------------------------------------------------------------------------- rounds

class Entrant(Worker):
    """A model that takes turns with others, until its `budget_s` seconds are used up."""

    def __init__(self, spec, budget_s):
        super().__init__(Trial, spec, name=spec["name"], family=spec["config"].model, peer=spec["peer"],
                         compiled=spec["compile"])
        self.spec = spec
        self.budget_s = budget_s
        self.turns = 0
        self.spent = 0.0
        self.row |= self.ask("turn", 1, 0, limit_s=budget_s + (START_S if spec["compile"] else 0))
        self.row["first_step_seconds"] = self.spent
        self.spent = 0.0

    def turn(self):
        """Take a turn, if it will fit in the budget, judging by earlier turns."""
        if not self.turns or self.spent * (self.turns + 1) / self.turns <= self.budget_s:
            self.row |= self.ask("turn", *STEPS[self.spec["device"]], limit_s=self.budget_s)
            self.turns += 1

    def result(self, peak):
        """Return the row with the times so far and the rates derived from them, or with the reason why there are none.
        peak: the device's FLOP/s, or None."""
        row = dict(self.row)
        losses, seconds = row.pop("losses", []), row.pop("seconds", [])
        reason = row.get("reason") or verdict(losses)
        if reason:
            return row | {"reason": reason}
        times = measure.spread(seconds)
        tokens = self.spec["batch_size"] * self.spec["config"].block_size
        flops = row["flops_per_token"] * tokens / times["median_seconds"]
        return row | {"seconds": times, "first_loss": losses[0], "last_loss": losses[-1],
                      "tokens_per_second": tokens / times["median_seconds"], "flops_per_second": flops,
                      "mfu": flops / peak if peak else None}


def verdict(losses):
    """Return the reason why these losses, in order of steps, show that the model does not learn, or None."""
    for loss in losses:
        if not math.isfinite(loss):
            return f"the loss became {loss}"
    if losses[-1] >= losses[0]:
        return f"the loss does not fall: {losses[0]:.4f} -> {losses[-1]:.4f}"
    return None


def results(entrants, peak):
    rows = [entrant.result(peak) for entrant in entrants]
    seconds = {row["name"]: row["seconds"]["median_seconds"] for row in rows if "seconds" in row}
    for row in rows:
        if row["name"] in seconds:
            row["times_llama"] = seconds[row["name"]] / seconds["llama"] if "llama" in seconds else None
    return rows


def run_rounds(specs, args, record, out):
    """Fill the record's rows, one per spec, in order. All models start, then take turns. The record is written after
    every round.

    A model that has used up --budget_s gets no further turn. If a single turn takes longer than --budget_s, the model
    is stopped. With --kernels, a few steps of each model are profiled at the end.
    """
    from tqdm import tqdm

    entrants = [Entrant(spec, args.budget_s) for spec in specs]
    for _ in tqdm(range(args.rounds), "rounds", leave=False, disable=not sys.stderr.isatty()):
        for entrant in entrants:
            entrant.turn()
        record["rows"] = results(entrants, record["peak_flops"])
        measure.write_record(out, record)
    for entrant, row in zip(entrants, record["rows"], strict=True):
        if "reason" in row:
            continue
        if args.kernels:
            row |= entrant.ask("kernels", limit_s=args.budget_s) or {"no_kernels": entrant.row["reason"]}
        if entrant.turns < args.rounds:
            row["cut"] = (f"{entrant.turns} of {args.rounds} rounds: another one would exceed {args.budget_s:g} s "
                          "(--budget_s)")


# --------------------------------------------------------------------------------------------------------------- output

def print_rows(rows, peak):
    rate = "MFU" if peak else "GFLOP/s"
    print(f"\n{'':20}{'parameters':>11}{'ms per step':>12}{'quartiles':>18}{'tokens/s':>10}{rate:>9}{'peak MiB':>10}"
          f"{'x LLaMA':>9}{'steps':>7}   loss")
    for r in rows:
        line = f"  {r['name']:18}{or_dash(r.get('parameters'), ',.0f'):>11}"
        if "reason" in r:
            print(f"{line}{'-':>12}  {r['reason']}")
            continue
        t = r["seconds"]
        rate = f"{r['mfu']:.1%}" if peak else f"{r['flops_per_second'] / 1e9:.1f}"
        print(f"{line}{1e3 * t['median_seconds']:12.1f}{measure.quartiles(t):>18}{r['tokens_per_second']:10,.0f}"
              f"{rate:>9}{or_dash(r['peak_bytes'], '.0f', 2**20):>10}{or_dash(r['times_llama'], '.2f'):>9}"
              f"{t['runs']:7}   {r['first_loss']:.3f} -> {r['last_loss']:.3f}{' ' + r.get('cut', '')}")
    print("  a peer's FLOPs are taken from our model; the peak includes weights, gradients and optimizer state")
    for r in rows:
        if "no_kernels" in r:
            print(f"{r['name']}: its steps could not be profiled: {r['no_kernels']}")
        if "kernels" in r:
            print(f"\n{r['name']}: kernels run for {r['kernel_milliseconds']:.1f} ms of a step, and none for "
                  f"{r['idle_milliseconds']:.1f} ms; the slowest of {len(r['kernels'])}:")
            for milliseconds, calls, name in r["kernels"][:20]:
                print(f"{milliseconds:9.2f} ms {calls:7.0f} x  {name}")


def in_short(rows):
    """Prints a line with every model's tokens/s."""
    words = []
    for r in rows:
        if "seconds" in r:
            mfu = f" (MFU {r['mfu']:.1%})" if r["mfu"] else ""
            words.append(f"{r['name']} {r['tokens_per_second']:,.0f}{mfu}")
    print(f"in short: tokens/s: {', '.join(words) or 'none'}")


# ----------------------------------------------------------------------------------------------------------------- main

@dataclass
class Shared:
    """Options of bench/step.py and bench/generate.py."""

    families: tuple[Literal[("all", *FAMILIES)], ...] = ("all",)
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = None  # dtype of matrix products (float32; cuda: bfloat16)
    # --- shape
    size: Literal[tuple(SIZES)] = ""  # one of the paper's sizes, instead of the shape below
    n_layer: Count = None  # (4; with --size=120M: 12)
    n_embd: Count = None  # (256; 768)
    n_head: Count = None  # (4; 12)
    block_size: Count = None  # (512; 1024)
    vocab_size: Count = None  # (256; 50304)
    batch_size: Count = None  # (4; 8)
    # --- how it is measured
    backend: Literal["torch", "cpu", "cuda", "fused"] = ""  # (the fastest)
    threads: Threads = None  # threads of PyTorch and the kernels (PyTorch's choice)
    budget_s: Seconds = 60.0  # seconds per family
    out: Path = None  # write the record to this JSON file (in out/, named by device and size)
    save: bool = False  # write it to results/ instead


@dataclass
class Options(Shared):
    compile: bool = False  # torch.compile our models; the peers run as published
    graphs: bool = False  # also time our models with steps that are replayed as CUDA graphs
    kernels: bool = False  # also show where the time of a step goes
    with_peers: bool = False  # also time transformers' models of the same shape
    rounds: Count = 10  # turns per model


def start(options_class, argv, doc, benchmark, *more):
    """Read the options and begin a record. Returns (the options with defaults filled in, the record's path, the
    record). more: further options to record. Prints machine and shape. Raises ConfigError."""
    args = configurator.read(options_class, argv, doc)
    for name, value in (SHAPE | (SIZES[args.size] | PAPER if args.size else {})).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if "all" in args.families:
        args.families = tuple(FAMILIES)
    on_gpu = args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise ConfigError("--device=cuda: PyTorch sees no GPU; use --device=cpu")
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    args.threads = args.threads or torch.get_num_threads()
    torch.set_num_threads(args.threads)
    name = "_".join(filter(None, (benchmark, args.device, args.size.lower())))
    out = measure.record_file(args, name)
    shape = {name: getattr(args, name) for name in SHAPE}
    record = measure.new_record(benchmark, threads=args.threads, dtype=args.dtype, backend=args.backend or None,
                                size=args.size or None, shape=shape, budget_seconds=args.budget_s,
                                **{name: getattr(args, name) for name in more})
    record["device"] = record["environment"]["gpu" if on_gpu else "cpu"]
    words = ", ".join(f"{name} {value}" for name, value in shape.items())
    print(f"{measure.headline(record, record['device'])}\n{words}; {args.dtype}")
    return args, out, record


def spec_of(family, args):
    """Return the spec of a Model: all options, and the family's config at their size."""
    shape = {name: getattr(args, name) for name in SHAPE if name != "batch_size"}
    config = ModelConfig(model=family, backend=args.backend, **shape)
    return {**vars(args), "name": family, "config": config, "peer": None}


def main(argv):
    args, out, record = start(Options, argv, __doc__, "step", "rounds")
    specs = []
    for family in args.families:
        specs.append(spec_of(family, args) | {"graphs": False})
        if args.graphs:
            specs.append(specs[-1] | {"name": f"{family} with graphs", "graphs": True})
        if args.with_peers and family in ARCHITECTURES:
            peer = {"name": f"{family}, transformers", "peer": "transformers", "compile": False, "graphs": False}
            specs.append(spec_of(family, args) | peer)
    record["peak_flops"] = peak_flops(record["device"]) if args.dtype != "float32" else None
    run_rounds(specs, args, record, out)
    print_rows(record["rows"], record["peak_flops"])
    in_short(record["rows"])
    measure.finish(out, record)
    return int(any("reason" in r for r in record["rows"] if r["peer"] is None))


if __name__ == "__main__":
    with main_error("bench/step.py"):
        sys.exit(main(sys.argv[1:]))
