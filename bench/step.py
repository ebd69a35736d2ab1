"""The cost of a training step of every family: time, tokens/s, MFU and memory, compared with other projects' models.

    python bench/step.py                                                # CPU: 4 layers of width 256, T = 512, batch 4
    PYTHONPATH=/tmp/peers python bench/step.py --with_peers --save      # results/step_cpu.json
    python bench/step.py --device=cuda --size=120M --compile --save     # results/step_cuda_120m.json
    python bench/step.py --families=llama,mamba --rounds=3
    python bench/step.py --families=longhorn --kernels                  # where a step's time goes

A step is that of train.py: forward, backward, clipping, AdamW. The peers are transformers' LLaMA, Mamba and RWKV-4 with
the same shape and optimizer, and mambapy's Mamba. Install missing ones outside the project, for this comparison only:
    pip install transformers;  pip install --no-deps --target /tmp/peers mambapy

Each model runs in its own process, and they take turns, round after round: other load on the machine affects all of
them alike, and their memory is counted separately. The batch is the same in every step, with tokens distributed as
unevenly as words, so that a working model must learn: a model whose loss does not fall gets no time.

One of our layers has two residual branches, so 4 layers of Mamba are 8 in transformers and mambapy, whose published
figures count each as a layer. The peers get 8 here, and so the same number of parameters.
"""

import contextlib
import io
import math
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import configurator  # noqa: E402
from bench import measure  # noqa: E402
from bench.measure import DTYPES, LeftOut, Threads, imported, in_one_line, or_dash  # noqa: E402
from common.errors import ConfigError, main_error  # noqa: E402
from common.gpus import peak_flops  # noqa: E402
from configurator import Count, Seconds  # noqa: E402
from inspection.counting import flops_per_token  # noqa: E402
from model import FAMILIES, LM, ModelConfig  # noqa: E402
from optim import build_optimizers  # noqa: E402
from runtime.distributed import keep_freed_memory, parallelize  # noqa: E402
from tools.parameters import SIZES  # noqa: E402
from train import TrainConfig  # noqa: E402

SHAPE = {"n_layer": 4, "n_embd": 256, "n_head": 4, "block_size": 512, "vocab_size": 256, "batch_size": 4}
PAPER = {"block_size": 1024, "vocab_size": 50304, "batch_size": 8}  # in addition to SIZES
PEERS = {"llama": ["transformers"], "mamba": ["mambapy", "transformers"], "rwkv4": ["transformers"]}
STEPS = {"cpu": (0, 1), "cuda": (1, 5)}  # untimed and timed steps per turn; between turns a GPU's cache is emptied
START_S = 600  # time limit for building the kernels, and for torch.compile


# ------------------------------------------------------------------------------------------------ one process per model

def serve(pipe, make, spec):
    """A worker's main function: make(spec), then answer (method, arguments) until the pipe closes."""
    output = io.StringIO()  # says which kernels were chosen: goes to the record, not between the lines of the table
    try:
        with contextlib.redirect_stderr(output):
            worker = make(spec)
            answer = worker.about()
            while True:
                lines = output.getvalue().replace(f"{ROOT}/", "").splitlines()
                pipe.send({**answer, "stderr": lines[-20:]})
                method, *arguments = pipe.recv()
                answer = getattr(worker, method)(*arguments)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):  # the other end has closed
        pass
    except LeftOut as error:
        pipe.send({"reason": str(error)})
    except Exception as error:
        pipe.send({"reason": in_one_line(error)})


class Worker:
    """A process that holds make(spec). `begun` is its about(); about() and every answer are dicts.

    An answer with 'reason' says what failed; the process has then ended.
    """

    def __init__(self, make, spec):
        # fork from a process that has only imported torch: quick, and neither CUDA nor OpenMP has started there
        context = multiprocessing.get_context("spawn")
        if "forkserver" in multiprocessing.get_all_start_methods():
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["torch", "model", "train"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, make, spec), daemon=True)
        self.process.start()
        theirs.close()
        self.begun = self.listen(START_S)

    def ask(self, method, *arguments, limit_s):
        with contextlib.suppress(OSError):  # `listen` then says how the process ended
            self.pipe.send((method, *arguments))
        return self.listen(limit_s)

    def listen(self, limit_s):
        try:
            if self.pipe.poll(limit_s):
                answer = self.pipe.recv()
            else:
                answer = {"reason": f"ran past its limit of {limit_s:.0f} s"}
                self.process.kill()
        except (EOFError, OSError):
            self.process.join(5)
            status = self.process.exitcode
            answer = {"reason": f"its process ended with status {status}" + (
                ", perhaps out of memory" if status == -9 else "")}
        if "reason" in answer:
            self.end()
        return answer

    def end(self):
        self.pipe.close()  # the process sees this and ends
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


# --------------------------------------------------------------------------------------------------------------- models

def model_config(family, args):
    """The ModelConfig of a family at the size given by args."""
    return ModelConfig(model=family, backend=args.backend, **{n: getattr(args, n) for n in SHAPE if n != "batch_size"})


def peer_model(package, config):
    """(module, idx -> logits) from `package` in the shape of our config, with a tied head like ours. Raises LeftOut."""
    d, layers, V = config.n_embd, config.n_layer, config.vocab_size
    if package == "mambapy":
        Mamba, MambaConfig = imported("mambapy.mamba", "Mamba"), imported("mambapy.mamba", "MambaConfig")
        settings = MambaConfig(d_model=d, n_layers=config.n_branches, dt_rank=config.dt_rank or "auto",
                          d_state=config.d_state, expand_factor=config.expand, d_conv=config.d_conv)
        module = nn.ModuleDict({"embed": nn.Embedding(V, d), "mamba": Mamba(settings), "norm": nn.RMSNorm(d, eps=1e-5)})
        weight = nn.init.normal_(module["embed"].weight, 0.0, 0.02)
        return module, lambda idx: F.linear(module["norm"](module["mamba"](module["embed"](idx))), weight)
    kind = {"llama": "Llama", "mamba": "Mamba", "rwkv4": "Rwkv"}[config.model]
    Config, Model = imported("transformers", f"{kind}Config"), imported("transformers", f"{kind}ForCausalLM")
    imported("transformers.utils.logging", "set_verbosity_error")()
    settings = dict(vocab_size=V, hidden_size=d, tie_word_embeddings=True, use_cache=False)
    with torch.device("meta"):
        mlp = LM(config).layers[0].branches[1].mixer
    if kind == "Llama":
        settings |= dict(num_hidden_layers=layers, intermediate_size=mlp.w1.out_features,
                         num_attention_heads=config.n_head, max_position_embeddings=config.block_size,
                         rms_norm_eps=1e-5)
    elif kind == "Mamba":
        settings |= dict(num_hidden_layers=config.n_branches, state_size=config.d_state, expand=config.expand,
                    conv_kernel=config.d_conv, time_step_rank=config.dt_rank or "auto", use_mambapy=False)
    else:
        settings |= dict(num_hidden_layers=layers, attention_hidden_size=d, intermediate_size=mlp.key.out_features,
                    context_length=config.block_size, rescale_every=0)
    module = Model(Config(**settings))
    return module, lambda idx: module(input_ids=idx).logits


class Trial:
    """A model in training, in a worker. spec: name, config, peer (a package or None), batch_size, device, dtype,
    compile, threads."""

    def __init__(self, spec):
        self.spec, self.config = spec, spec["config"]
        self.device, self.dtype = torch.device(spec["device"]), DTYPES[spec["dtype"]]
        torch.set_num_threads(spec["threads"])
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # as train.py does
        else:
            keep_freed_memory()
        # Run a tiny model first, so that one-time builds, loads and start-ups are not in the peak.
        small = dict(n_layer=2, n_embd=128, n_head=2, block_size=64, vocab_size=256)
        self.build(ModelConfig(**vars(self.config) | small), 1, False)
        self.step()
        del self.model, self.optimizer, self.loss, self.tokens
        self.peak = measure.Peak(self.device)
        self.build(self.config, spec["batch_size"], spec["compile"])

    def build(self, config, batch_size, compiled):
        torch.manual_seed(0)
        settings = TrainConfig(**vars(config), compile=compiled)
        with self.device:
            if self.spec["peer"]:
                self.model, forward = peer_model(self.spec["peer"], config)
                self.loss = lambda x, y: F.cross_entropy(forward(x).float().flatten(0, 1), y.flatten())
            else:
                self.model = LM(config)
                run = parallelize(self.model, settings, data=None)
                self.loss = lambda x, y: run(x, y, loss_only=True)[1]
        self.model.train()
        (self.optimizer,) = build_optimizers(self.model, settings)
        frequency = 1 / torch.arange(1.0, config.vocab_size + 1)  # Zipf's law
        tokens = torch.multinomial(frequency, batch_size * (config.block_size + 1), replacement=True,
                                   generator=torch.Generator().manual_seed(0))  # the same for all models
        self.tokens = tokens.view(batch_size, -1).to(self.device)  # (B, T + 1)

    def about(self):
        with torch.device("meta"):
            flops = flops_per_token(LM(self.config))["total"]
        return {"parameters": sum(p.numel() for p in self.model.parameters()), "flops_per_token": flops}

    def step(self):
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            loss = self.loss(self.tokens[:, :-1], self.tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), TrainConfig.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()  # waits for the device, as train.py does

    def turn(self, untimed, timed):
        """{'losses' of all steps, 'seconds' of the timed ones, 'peak_bytes' above the process without the model}."""
        losses, seconds = [], []
        for i in range(untimed + timed):
            start = time.perf_counter()
            losses.append(self.step())
            if i >= untimed:
                seconds.append(time.perf_counter() - start)
        peak = self.peak.bytes()
        if self.device.type == "cuda":
            if not timed:
                torch.cuda.reset_peak_memory_stats()  # the compiler's trials are not part of a step
            torch.cuda.empty_cache()
        return {"losses": losses, "seconds": seconds, "peak_bytes": peak}

    def kernels(self):
        """Of a step, over three: {"kernels": [[milliseconds, calls, name], ...] of all that the device ran, slowest
        first; "kernel_milliseconds" while at least one ran; "idle_milliseconds" between them, while none did}."""
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
    """(time in which at least one of the spans (start, end) runs, time between the first and the last in which none
    does), in their unit. Kernels of two streams overlap, and count once."""
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

class Entrant:
    """A model that takes turns with others: its process, what it has measured so far, and the time that it took."""

    def __init__(self, spec, budget_s):
        self.spec = spec
        self.budget_s = budget_s
        self.row = {"name": spec["name"], "family": spec["config"].model, "peer": spec["peer"],
                    "compiled": spec["compile"]}
        self.losses, self.seconds = [], []
        self.turns, self.spent = 0, 0.0
        self.worker = Worker(Trial, spec)
        self.row |= self.worker.begun
        started = time.perf_counter()
        self.ask(1, 0, budget_s + (START_S if spec["compile"] else 0))
        self.row["first_step_seconds"] = time.perf_counter() - started

    def ask(self, untimed, timed, limit_s):
        if "reason" not in self.row:
            answer = self.worker.ask("turn", untimed, timed, limit_s=limit_s)
            self.losses += answer.pop("losses", [])
            self.seconds += answer.pop("seconds", [])
            self.row |= answer

    def turn(self):
        """One turn, if it will fit in the budget: it takes about as long as those before."""
        if self.turns and self.spent * (self.turns + 1) / self.turns > self.budget_s:
            return
        started = time.perf_counter()
        self.ask(*STEPS[self.spec["device"]], self.budget_s)
        self.spent += time.perf_counter() - started
        self.turns += 1

    def profile(self):
        if "reason" not in self.row:
            answer = self.worker.ask("kernels", limit_s=self.budget_s)
            self.row |= {"no_kernels": answer["reason"]} if "reason" in answer else answer

    def result(self, peak):
        """The row with the times so far and what follows from them, or with the reason why there are none. peak: the
        device's FLOP/s, or None."""
        reason = self.row.get("reason") or verdict(self.losses)
        if reason:
            return self.row | {"reason": reason}
        times = measure.spread(self.seconds)
        tokens = self.spec["batch_size"] * self.spec["config"].block_size
        flops = self.row["flops_per_token"] * tokens / times["median_seconds"]
        return self.row | {"seconds": times, "first_loss": self.losses[0], "last_loss": self.losses[-1],
                           "tokens_per_second": tokens / times["median_seconds"], "flops_per_second": flops,
                           "mfu": flops / peak if peak else None}


def verdict(losses):
    """The reason why these losses, in order of steps, show that the model does not learn; or None."""
    for loss in losses:
        if not math.isfinite(loss):
            return f"the loss became {loss}"
    if losses[-1] >= losses[0]:
        return f"the loss does not fall: {losses[0]:.4f} -> {losses[-1]:.4f}"
    return None


def run_rounds(specs, rounds, budget_s, peak=None, save=lambda rows: None, kernels=False):
    """One row per spec, in order. All models start, then take turns, round after round.

    A model that has used up `budget_s` seconds gets no further turn; one that takes longer than that for a single turn
    is stopped. save(rows so far) is called after every round. kernels: at the end, also profile a few steps of each.
    """
    from tqdm import tqdm

    entrants = []

    def results():
        rows = [entrant.result(peak) for entrant in entrants]
        llama = [row["seconds"]["median_seconds"] for row in rows if row["name"] == "llama" and "seconds" in row]
        for row in rows:
            if "seconds" in row:
                row["times_llama"] = row["seconds"]["median_seconds"] / llama[0] if llama else None
        return rows

    try:
        for spec in specs:
            entrants.append(Entrant(spec, budget_s))
        for _ in tqdm(range(rounds), "rounds", leave=False, disable=not sys.stderr.isatty()):
            for entrant in entrants:
                entrant.turn()
            save(results())
        for entrant in entrants:
            if kernels:
                entrant.profile()
            if entrant.turns < rounds and "reason" not in entrant.row:
                entrant.row["cut"] = (f"{entrant.turns} of {rounds} rounds: another one would exceed {budget_s:g} s "
                                      "(--budget_s)")
    finally:
        for entrant in entrants:
            entrant.worker.end()
    return results()


# --------------------------------------------------------------------------------------------------------------- output

def print_rows(rows, peak):
    rate = "MFU" if peak else "GFLOP/s"
    print(f"\n{'':20}{'parameters':>11}{'ms per step':>12}{'quartiles':>18}{'tokens/s':>10}{rate:>9}{'peak MiB':>10}"
          f"{'x LLaMA':>9}{'steps':>7}   loss")
    for r in rows:
        line = f"  {r['name']:18}{or_dash(r.get('parameters'), ',.0f', 1):>11}"
        if "reason" in r:
            print(f"{line}{'-':>12}  {r['reason']}")
            continue
        t = r["seconds"]
        rate = f"{r['mfu']:.1%}" if peak else f"{r['flops_per_second'] / 1e9:.1f}"
        print(f"{line}{1e3 * t['median_seconds']:12.1f}{measure.quartiles(t):>18}{r['tokens_per_second']:10,.0f}"
              f"{rate:>9}{or_dash(r['peak_bytes'], '.0f', 2**20):>10}{or_dash(r['times_llama'], '.2f', 1):>9}"
              f"{t['runs']:7}   {r['first_loss']:.3f} -> {r['last_loss']:.3f}{' ' + r.get('cut', '')}")
    print("  FLOPs as counted for our models, also for the peers; the peak includes weights, gradients and optimizer "
          "state")
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


def start(args, benchmark, **about):
    """(path for the record, or None; the new record). Prints machine and shape. Raises ConfigError, see measure.py."""
    size = f"_{args.size.lower()}" if args.size else ""
    out = args.out
    if args.save and not out:
        out = ROOT / "results" / f"{benchmark}_{args.device}{size}.json"
    measure.check_out(out)
    shape = {name: getattr(args, name) for name in SHAPE}
    record = measure.new_record(benchmark, threads=args.threads, dtype=args.dtype, backend=args.backend or None,
                                size=args.size or None, shape=shape, load_average_before=os.getloadavg()[0], **about)
    record["device"] = record["environment"]["gpu" if args.device == "cuda" else "cpu"]
    torch.set_num_threads(args.threads)
    words = ", ".join(f"{name} {value}" for name, value in shape.items())
    print(f"{measure.headline(record, record['device'])}\n{args.size or 'shape'}: {words}; {args.dtype}")
    if record["load_average_before"] > 0.5:
        print(f"the machine is already busy (load average {record['load_average_before']:.1f} on {os.cpu_count()} "
              "cores): times will be too long")
    return out and Path(out), record


def finish(out, record):
    """Write the finished record to `out`, unless that is None, and print the path. Raises ConfigError."""
    measure.write_record(out, record | {"finished": True, "load_average_after": os.getloadavg()[0]})
    if out:
        print(f"record: {out}")


# ----------------------------------------------------------------------------------------------------------------- main

@dataclass
class Shared:
    """Options of bench/step.py and bench/generate.py."""

    families: tuple[Literal[("all", *FAMILIES)], ...] = ("all",)
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["float32", "bfloat16"] = None  # of matrix products (float32; cuda: bfloat16)
    size: Literal[tuple(SIZES)] = ""  # one of the paper's sizes, instead of this shape:
    n_layer: Count = None  # (4; with --size=120M: 12)
    n_embd: Count = None  # (256; 768)
    n_head: Count = None  # (4; 12)
    block_size: Count = None  # (512; 1024)
    vocab_size: Count = None  # (256; 50304)
    batch_size: Count = None  # (4; 8)
    backend: Literal["torch", "cpu", "cuda", "fused"] = ""  # (the fastest)
    threads: Threads = None  # threads of PyTorch and the kernels (PyTorch's choice)
    budget_s: Seconds = 60.0  # seconds per family
    out: Path = None  # write the record to this JSON file
    save: bool = False  # write the record to results/, named by device and size


@dataclass
class Options(Shared):
    compile: bool = False  # torch.compile our models; the peers run as published
    kernels: bool = False  # also show where the time of a step goes
    with_peers: bool = False  # also time other projects' models of the same shape
    rounds: Count = 10  # turns per model


def read(options_class, argv, doc):
    """The options on the command line, missing ones filled in. Raises ConfigError."""
    args = configurator.read(options_class, argv, doc)
    for name, value in (SHAPE | (SIZES[args.size] | PAPER if args.size else {})).items():
        if args.save and not args.out and name in args.overrides:
            raise ConfigError(f"--save with --{name}: results/ is for the named sizes only; choose a file with --out")
        if getattr(args, name) is None:
            setattr(args, name, value)
    if "all" in args.families:
        args.families = tuple(FAMILIES)
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    args.threads = args.threads or torch.get_num_threads()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device=cuda: PyTorch sees no GPU; use --device=cpu")
    return args


def main(argv):
    args = read(Options, argv, __doc__)
    out, record = start(args, "step", rounds=args.rounds, budget_seconds=args.budget_s)
    shared = {name: getattr(args, name) for name in ("batch_size", "device", "dtype", "threads")}
    specs = []
    for family in args.families:
        config = model_config(family, args)
        specs.append({"name": family, "config": config, "peer": None, "compile": args.compile, **shared})
        for peer in PEERS.get(family, []) if args.with_peers else []:
            specs.append({"name": f"{family}, {peer}", "config": config, "peer": peer, "compile": False, **shared})
    record["peak_flops"] = peak_flops(record["device"]) if args.dtype != "float32" else None

    def save(rows):
        record["rows"] = rows
        measure.write_record(out, record)

    save(run_rounds(specs, args.rounds, args.budget_s, record["peak_flops"], save, args.kernels))
    print_rows(record["rows"], record["peak_flops"])
    in_short(record["rows"])
    finish(out, record)
    return int(any("reason" in r for r in record["rows"] if r["peer"] is None))


if __name__ == "__main__":
    with main_error("bench/step.py"):
        try:
            sys.exit(main(sys.argv[1:]))
        except KeyboardInterrupt:
            sys.exit("bench/step.py: interrupted; the record, if any, has the rounds that ended")
