"""What a training step of every family costs: time, tokens/s, MFU, memory, side by side, and beside other people's models.

    python bench/step.py                                                # a CPU: 4 layers of 256, T = 512, batch 4
    PYTHONPATH=/tmp/peers python bench/step.py --with_peers --save      # results/step_cpu.json
    python bench/step.py --device=cuda --size=120M --compile --save     # results/step_cuda_120m.json
    python bench/step.py --families=llama,mamba --rounds=3

A step is train.py's: forward, backward, clip, AdamW. The peers are transformers' LLaMA, Mamba and RWKV-4 of the same shape
and optimiser, and mambapy's Mamba; install what is missing beside the project, for this alone:
    pip install transformers;  pip install --no-deps --target /tmp/peers mambapy

Each model lives in a process of its own and one works at a time, round after round: whatever else the machine does falls on
all alike, nobody's memory counts as another's, and a step that takes too long can be ended. The batch is the same in every
step, its tokens as uneven as words are, so that a model that works must learn: one whose loss does not fall gets no time.

The surprise: a layer of ours is two residual branches, so that 4 layers of Mamba are 8 of transformers' or mambapy's, whose
published figures count each as a layer. The peers get 8: the same parameters.
"""

import argparse
import contextlib
import datetime
import hashlib
import io
import math
import multiprocessing
import os
import runpy
import sys
import time
from dataclasses import fields
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import records  # noqa: E402
from bench.measure import DTYPES, finite, in_one_line, refuse_uncommitted, spread  # noqa: E402
from bench.scan import peak_since_reset, reset_peak  # noqa: E402
from bench.scan_cuda import LeftOut, imported  # noqa: E402
from configurator import main_error  # noqa: E402
from model import FAMILIES, LM, SIZES, ModelConfig  # noqa: E402
from train import TrainConfig, keep_memory, peak_flops  # noqa: E402

SHAPE = {"n_layer": 4, "n_embd": 256, "n_head": 4, "block_size": 512, "vocab_size": 256, "batch_size": 4}
PAPER = {"block_size": 1024, "vocab_size": 50304, "batch_size": 8}  # beside model.SIZES
SIZE_NAMES = ("laptop", *SIZES)
PEERS = {"llama": ["transformers"], "mamba": ["mambapy", "transformers"], "rwkv4": ["transformers"]}
STEPS = {"cpu": (0, 1), "cuda": (1, 5)}  # untimed and timed steps of a turn; between turns a GPU's cache is given back
START_S = 600  # for building the kernels, and for torch.compile
SOURCES = ("model.py", "mixers.py", "linear_attention.py", "ops.py", "scan.py", "scan_block.py", "longhorn_scan.cu",
           "conv_norm.cu", "lanes.h", "train.py")


# --------------------------------------------------------------------------------------------------- one process a model

def serve(pipe, make, spec):
    """A worker's life: make(spec), then answer (method, arguments) with what the method returns, until the pipe closes."""
    said = io.StringIO()  # which kernels were chosen: for the record, not between the lines of a table
    try:
        with contextlib.redirect_stderr(said):
            worker = make(spec)
            answer = worker.about()
            while True:
                pipe.send({**answer, "said": said.getvalue().splitlines()[-20:]})
                method, *arguments = pipe.recv()
                answer = getattr(worker, method)(*arguments)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):  # nobody listens any more
        pass
    except LeftOut as error:
        pipe.send({"reason": str(error)})
    except Exception as error:
        pipe.send({"reason": in_one_line(error)})


class Worker:
    """A process that holds make(spec). `begun` is what it says of itself; that and every answer are dicts, with 'reason' where
    something failed, after which the process is gone."""

    def __init__(self, make, spec, limit_s=START_S):
        # forked from a process that has imported torch and run nothing: quick, and neither CUDA nor OpenMP are up yet
        ways = multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("forkserver" if "forkserver" in ways else "spawn")
        if "forkserver" in ways:
            context.set_forkserver_preload(["torch", "model", "train"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, make, spec), daemon=True)
        self.process.start()
        theirs.close()
        self.begun = self.listen(limit_s)

    def ask(self, method, *arguments, limit_s):
        try:
            self.pipe.send((method, *arguments))
        except OSError:
            return self.gone()
        return self.listen(limit_s)

    def listen(self, limit_s):
        try:
            if not self.pipe.poll(limit_s):
                self.end(patience_s=0)
                return {"reason": f"ran past its limit of {limit_s:.0f} s"}
            answer = self.pipe.recv()
        except (EOFError, OSError):
            return self.gone()
        if "reason" in answer:
            self.end()
        return answer

    def gone(self):
        self.process.join(5)
        status = self.process.exitcode
        self.end()
        return {"reason": f"its process ended with status {status}" + (", out of memory perhaps" if status == -9 else "")}

    def end(self, patience_s=5):
        self.pipe.close()  # it hears that, and goes
        self.process.join(patience_s)
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


# ---------------------------------------------------------------------------------------------------------------- models

def model_config(family, args):
    """ModelConfig of a family at the size asked for. Raises LeftOut where there is no such config file."""
    values = {name: getattr(args, name) for name in SHAPE if name != "batch_size"}
    if args.size == "laptop":
        path = ROOT / "config" / f"{family}_laptop.py"
        if not path.exists():
            raise LeftOut(f"there is no config/{path.name}")
        known = runpy.run_path(str(path))
        given = {name: value for name, value in values.items() if name in args.given}
        values |= {f.name: known[f.name] for f in fields(ModelConfig) if f.name in known} | given
    return ModelConfig(**values | {"model": family, "kernel": args.kernel})


def peer_model(package, config):
    """(module, idx -> logits) of `package` with the shape of our config, its head tied as ours. Raises LeftOut."""
    d, layers, V = config.n_embd, config.n_layer, config.vocab_size
    branches = len(FAMILIES["mamba"]) * layers
    if package == "mambapy":
        Mamba, MambaConfig = imported("mambapy.mamba", "Mamba"), imported("mambapy.mamba", "MambaConfig")
        own = MambaConfig(d_model=d, n_layers=branches, dt_rank=config.dt_rank or "auto", d_state=config.d_state,
                          expand_factor=config.expand, d_conv=config.d_conv)
        module = nn.ModuleDict({"embed": nn.Embedding(V, d), "mamba": Mamba(own), "norm": nn.RMSNorm(d, eps=1e-5)})
        nn.init.normal_(module["embed"].weight, 0.0, 0.02)
        return module, lambda idx: F.linear(module["norm"](module["mamba"](module["embed"](idx))), module["embed"].weight)
    names = {"llama": "Llama", "mamba": "Mamba", "rwkv4": "Rwkv"}
    kind = names[config.model]
    Config, Model = imported("transformers", f"{kind}Config"), imported("transformers", f"{kind}ForCausalLM")
    imported("transformers.utils.logging", "set_verbosity_error")()
    own = dict(vocab_size=V, hidden_size=d, tie_word_embeddings=True, use_cache=False)
    with torch.device("meta"):
        mlp = FAMILIES[config.model][1](config, 0)
    if kind == "Llama":
        own |= dict(num_hidden_layers=layers, intermediate_size=mlp.w1.out_features, num_attention_heads=config.n_head,
                    max_position_embeddings=config.block_size, rms_norm_eps=1e-5)
    elif kind == "Mamba":
        own |= dict(num_hidden_layers=branches, state_size=config.d_state, expand=config.expand, conv_kernel=config.d_conv,
                    time_step_rank=config.dt_rank or "auto", use_mambapy=False)
    else:
        own |= dict(num_hidden_layers=layers, attention_hidden_size=d, intermediate_size=mlp.key.out_features,
                    context_length=config.block_size, rescale_every=0)
    module = Model(Config(**own))
    return module, lambda idx: module(input_ids=idx).logits


class Trial:
    """One model in training, in its own process: what `Worker` holds.

    spec: name, config (ModelConfig), peer (a package or None), batch_size, device, dtype, compile, threads.
    """

    def __init__(self, spec):
        self.spec, self.config = spec, spec["config"]
        self.device, self.dtype = torch.device(spec["device"]), DTYPES[spec["dtype"]]
        torch.set_num_threads(spec["threads"])
        if self.device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # as train.py does
        else:
            keep_memory()
        # a tiny model first: what is built, loaded and started once is not in the peak
        small = dict(n_layer=2, n_embd=128, n_head=2, block_size=64, vocab_size=256)
        self.build(ModelConfig(**vars(self.config) | small), 1, False)
        self.step()
        del self.model, self.optimizer, self.loss, self.tokens
        self.before = reset_peak() if self.device.type == "cpu" else None
        self.build(self.config, spec["batch_size"], spec["compile"])

    def build(self, config, batch_size, compiled):
        torch.manual_seed(0)
        with self.device:
            if self.spec["peer"]:
                self.model, forward = peer_model(self.spec["peer"], config)
                self.loss = lambda x, y: F.cross_entropy(forward(x).float().flatten(0, 1), y.flatten())
                groups = plain_groups(self.model)
            else:
                self.model = LM(config)
                run = torch.compile(self.model) if compiled else self.model
                self.loss = lambda x, y: run(x, y, loss_only=True)[1]
                groups = self.model.optimizer_groups(TrainConfig.weight_decay)
        self.model.train()
        self.optimizer = torch.optim.AdamW(groups, lr=TrainConfig.learning_rate, betas=(TrainConfig.beta1, TrainConfig.beta2),
                                           weight_decay=TrainConfig.weight_decay, fused=True)
        rarer = 1 / torch.arange(1.0, config.vocab_size + 1)  # Zipf's law
        tokens = torch.multinomial(rarer, batch_size * (config.block_size + 1), replacement=True,
                                   generator=torch.Generator().manual_seed(0))  # the same for all
        self.tokens = tokens.view(batch_size, -1).to(self.device)  # (B, T + 1)

    def about(self):
        counts = sum(p.numel() for p in self.model.parameters())  # a tied head is one of them, once
        with torch.device("meta"):
            flops = LM(self.config).flops_per_token(self.config.block_size)["total"]
        return {"parameters": counts, "flops_per_token": flops}

    def step(self):
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            loss = self.loss(self.tokens[:, :-1], self.tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), TrainConfig.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()  # waits for the device, as train.py does

    def turn(self, untimed, timed):
        """{'losses' of all steps, 'seconds' of the timed ones, 'peak_bytes'}: the peak since the model was built, for a GPU
        all that is allocated at once, for a CPU the resident memory above that of the process before it had the model."""
        cuda, losses, seconds = self.device.type == "cuda", [], []
        for i in range(untimed + timed):
            start = time.perf_counter()
            losses.append(self.step())
            if i >= untimed:
                seconds.append(time.perf_counter() - start)
        if cuda:
            peak = torch.cuda.max_memory_allocated()
            if not timed:
                torch.cuda.reset_peak_memory_stats()  # a compiler's trials are no part of a step
            torch.cuda.empty_cache()
        else:
            peak = peak_since_reset()
            peak = None if peak is None or self.before is None else peak - self.before
        return {"losses": losses, "seconds": seconds, "peak_bytes": peak}


def plain_groups(module):
    """AdamW's groups for a model that does not name them: weights of linear maps and embeddings decay, the rest does not."""
    decayed = {id(m.weight) for m in module.modules() if isinstance(m, (nn.Linear, nn.Embedding))}
    yes, no = [], []
    for p in module.parameters():
        (yes if id(p) in decayed else no).append(p)
    return [{"params": yes}, {"params": no, "weight_decay": 0.0}]


# ----------------------------------------------------------------------------------------------------------------- rounds

def verdict(untimed, timed):
    """Why these losses are not those of a model that learns, or None. Both lists in the order of the steps."""
    wrong = [loss for loss in untimed + timed if not math.isfinite(loss)]
    if wrong:
        return f"the loss became {wrong[0]}"
    before = timed[0] if len(timed) > 1 else untimed[0]
    return None if timed[-1] < before else f"the loss does not fall: {before:.4f} -> {timed[-1]:.4f}"


def run_rounds(specs, rounds, budget_s, limit_s, worker=Worker):
    """Every spec's row, in order: all start, then each takes a turn, round after round.

    After its first timed turn, one whose steps have taken `budget_s` seconds sits out; a step of more than `limit_s` is ended.
    """
    from tqdm import tqdm

    begun, turn = {}, STEPS[specs[0]["device"]] if specs else None
    rows = {s["name"]: {"name": s["name"], "family": s["config"].model, "peer": s["peer"], "compiled": s["compile"]}
            for s in specs}
    losses = {name: ([], []) for name in rows}  # untimed, timed
    seconds, spent, turns = {name: [] for name in rows}, dict.fromkeys(rows, 0.0), dict.fromkeys(rows, 0)

    def heard(name, answer):
        row = rows[name]
        if "reason" in answer:
            row["reason"] = answer["reason"]
            if answer["reason"].startswith("ran past"):
                row["reason"] = f"cut: a turn {answer['reason']} (--limit_s)"
            return
        row |= {k: v for k, v in answer.items() if k not in ("losses", "seconds")}
        timed = len(answer.get("seconds", []))
        got = answer.get("losses", [])
        losses[name][0].extend(got[:len(got) - timed])
        losses[name][1].extend(got[len(got) - timed:])
        seconds[name].extend(answer.get("seconds", []))

    try:
        with tqdm(total=len(specs) * (rounds + 1), leave=False, disable=not sys.stderr.isatty()) as bar:
            for spec in specs:
                name = spec["name"]
                bar.set_description(f"start of {name}")
                begun[name] = worker(Trial, spec)
                heard(name, begun[name].begun)
                if "reason" not in rows[name]:
                    start = time.perf_counter()
                    heard(name, begun[name].ask("turn", 1, 0, limit_s=limit_s + START_S * spec["compile"]))
                    rows[name]["first_step_seconds"] = time.perf_counter() - start
                bar.update()
            for round_ in range(rounds):
                for name, row in rows.items():
                    bar.set_description(f"round {round_ + 1}, {name}")
                    bar.update()
                    if "reason" in row:
                        continue
                    if turns[name] and spent[name] * (1 + 1 / turns[name]) > budget_s:
                        row["cut"] = f"{turns[name]} of {rounds} rounds: more would take over {budget_s:g} s (--budget_s)"
                        continue
                    start = time.perf_counter()
                    heard(name, begun[name].ask("turn", *turn, limit_s=sum(turn) * limit_s))
                    spent[name], turns[name] = spent[name] + time.perf_counter() - start, turns[name] + 1
    finally:
        for one in begun.values():
            one.end()
    for name, row in rows.items():
        if "reason" not in row:
            why = verdict(*losses[name])
            if why:
                row["reason"] = why
    for spec in specs:
        row, name = rows[spec["name"]], spec["name"]
        if "reason" not in row:
            row |= {"seconds": spread(seconds[name]), "first_loss": losses[name][0][0], "last_loss": losses[name][1][-1]}
            row["tokens_per_second"] = spec["batch_size"] * spec["config"].block_size / row["seconds"]["median_seconds"]
    return list(rows.values())


def derive(rows, peak):
    """Adds what follows from the times: FLOP/s by count, MFU where the peak (FLOP/s) is known, the ratio to LLaMA's step."""
    llama = next((r["seconds"]["median_seconds"] for r in rows if r["name"] == "llama" and "seconds" in r), None)
    for row in rows:
        if "seconds" in row:
            row["flops_per_second"] = row["tokens_per_second"] * row["flops_per_token"]
            row["mfu"] = row["flops_per_second"] / peak if peak else None
            row["times_llama"] = row["seconds"]["median_seconds"] / llama if llama else None
    return rows


# ---------------------------------------------------------------------------------------------------------------- targets

def targets(rows):
    """[{'target', 'met' (True, False, None: not known), 'numbers'}] for 2 CPU cores and SHAPE."""
    by_name = {r["name"]: r for r in rows}
    time_of = lambda name: by_name.get(name, {}).get("seconds", {}).get("median_seconds")
    missing = lambda name: f"{name} has no time ({by_name[name]['reason']})" if name in by_name else f"{name} was not asked for"

    def ratio(target, over, under, met):
        a, b = time_of(over), time_of(under)
        if a is None or b is None:
            return {"target": target, "met": None, "numbers": ", ".join(missing(n) for n in (over, under) if time_of(n) is None)}
        return {"target": target, "met": met(a / b), "ratio": a / b,
                "numbers": f"{a / b:.2f} times: {over} {1e3 * a:.0f} ms, {under} {1e3 * b:.0f} ms"}

    mamba = [ratio("Mamba's step at least 5 times faster than mambapy's", "mamba, mambapy", "mamba", lambda r: r >= 5),
             ratio("Mamba's step at most 1.5 times LLaMA's", "mamba", "llama", lambda r: r <= 1.5)]
    target, llama = "no family's step more than 3 times LLaMA's", time_of("llama")
    without = [missing(family) for family in FAMILIES if family in by_name and time_of(family) is None]
    others = [family for family in FAMILIES if family not in by_name]
    without += [f"not asked for: {' '.join(others)}"] if others else []
    if llama is None:
        return [*mamba, {"target": target, "met": None, "numbers": missing("llama")}]
    found = {family: time_of(family) / llama for family in FAMILIES if time_of(family) is not None}
    slow = {family: r for family, r in found.items() if r > 3}
    shown = slow or dict([max(found.items(), key=lambda item: item[1])])
    words = ", ".join(f"{family} {r:.2f}" for family, r in shown.items()) + ("" if slow else " is the most")
    return [*mamba, {"target": target, "met": False if slow else None if without else True, "ratios": found,
                     "numbers": ", ".join([words, *without])}]


def target_line(t):
    return f"target: {t['target']}: {({True: 'met', False: 'NOT MET', None: 'not known'})[t['met']]}, {t['numbers']}"


def has_targets(args):
    """Whether the targets were set for this run: SHAPE on a CPU, float32, nothing chosen by hand."""
    return args.device == "cpu" and args.dtype == "float32" and not (args.size or args.kernel or args.compile) and all(
        getattr(args, name) == value for name, value in SHAPE.items())


# ----------------------------------------------------------------------------------------------------------------- output

def print_rows(rows, peak):
    print(f"\n{'':20}{'parameters':>11}{'ms a step':>11}{'quartiles':>18}{'tokens/s':>10}{'MFU' if peak else 'GFLOP/s':>9}"
          f"{'peak MiB':>10}{'x LLaMA':>9}{'steps':>7}   loss")
    for r in rows:
        line = f"  {r['name']:18}" + (f"{r['parameters'] / 1e6:10.2f}M" if "parameters" in r else f"{'-':>11}")
        if "reason" in r:
            print(f"{line}{'-':>11}  {r['reason']}")
            continue
        t = r["seconds"]
        low, high = (f"{1e3 * s:.1f}" for s in t["quartile_seconds"])
        rate = f"{r['mfu']:.1%}" if peak else f"{r['flops_per_second'] / 1e9:.1f}"
        memory = "-" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 2**20:.0f}"
        times = "-" if r["times_llama"] is None else f"{r['times_llama']:.2f}"
        print(f"{line}{1e3 * t['median_seconds']:11.1f}{low + ' .. ' + high:>18}{r['tokens_per_second']:10,.0f}{rate:>9}"
              f"{memory:>10}{times:>9}{t['runs']:7}   {r['first_loss']:.3f} -> {r['last_loss']:.3f}")
    for r in rows:
        if "cut" in r:
            print(f"  {r['name']}: {r['cut']}")
    if any("seconds" in r for r in rows):
        print("  FLOPs by model.py's count, the peers' too; the peak has weights, gradients and the optimiser's state in it")


def sources():
    """What ran, by the first digits of each file's sha256: a copy without .git has no commit."""
    return {name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest()[:16] for name in SOURCES if (ROOT / name).exists()}


def load_average():
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def headline(args, benchmark):
    """The record's beginning, printed in two lines: machine, versions, date, commit, shape, and who else is at work."""
    where, date = records.environment(), datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    cuda = args.device == "cuda"
    record = {"benchmark": benchmark, "finished": False, "date": date, "environment": where, "sources": sources(),
              "device": torch.cuda.get_device_name() if cuda else where["cpu"], "threads": args.threads, "dtype": args.dtype,
              "size": args.size or None, "kernel": args.kernel or None, "load_average_before": load_average(),
              "shape": {name: getattr(args, name) for name in SHAPE}}
    print(f"{record['device']}, {args.threads} threads, torch {where['torch']}, {date[:10]}, "
          f"commit {(where['commit'] or 'none')[:10]}")
    shape = ", ".join(f"{name} {value}" for name, value in record["shape"].items())
    laptop = " (as each family's config/*_laptop.py says, where nothing was given)" if args.size == "laptop" else ""
    print(f"{args.size or 'shape'}: {shape}{laptop}; {args.dtype}")
    load = record["load_average_before"]
    if load is not None and load > 0.5:
        print(f"the machine is at work already (load average {load:.1f} on {os.cpu_count()} cores): times will be too long")
    return record


# ------------------------------------------------------------------------------------------------------------------- main

def add_options(parser, budget_s, **shape):
    """The options that bench/generate.py shares."""
    parser.add_argument("--families", default="all", help=f"all, or some of {', '.join(FAMILIES)}, separated by commas")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of matrix products (float32; cuda: bfloat16)")
    parser.add_argument("--size", choices=SIZE_NAMES, default="", help="a size with a name, instead of the shape below")
    for name, value in SHAPE.items():
        paper = SIZES["120M"] | PAPER
        words = f"({shape[name]})" if name in shape else f"({value}; with --size=120M: {paper[name]})"
        parser.add_argument(f"--{name}", type=int, default=shape.get(name), help=words)
    parser.add_argument("--kernel", default="", choices=("torch", "fused"), help="of the mixers (the best that runs here)")
    parser.add_argument("--threads", type=int, help="of PyTorch and the kernels (PyTorch's choice)")
    parser.add_argument("--budget_s", type=float, default=budget_s, help="seconds for each family (%(default)g)")
    parser.add_argument("--out", help="write the record, JSON, to this file")


def settle(parser, args):
    """Fills in what was not given and refuses, in a line, what cannot work."""
    args.given = {name for name in SHAPE if getattr(args, name) != parser.get_default(name)}
    if args.save and not args.out and args.given:
        parser.error(f"--save with --{min(args.given)}: results/ holds the sizes with names only; choose a file with --out")
    known = SHAPE | (SIZES[args.size] | PAPER if args.size in SIZES else {})
    if args.size == "laptop":
        laptop = runpy.run_path(str(ROOT / "config" / "longhorn_laptop.py"))
        known |= {name: laptop[name] for name in SHAPE if name in laptop}
    for name, value in known.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
        if getattr(args, name) < 1:
            parser.error(f"--{name}={getattr(args, name)}: must be at least 1")
    args.families = list(FAMILIES) if args.families == "all" else list(dict.fromkeys(filter(None, args.families.split(","))))
    unknown = [family for family in args.families if family not in FAMILIES]
    if unknown or not args.families:
        parser.error(f"--families={unknown[0] if unknown else ''}: no such family; they are {', '.join(FAMILIES)}, or all")
    args.dtype = args.dtype or {"cpu": "float32", "cuda": "bfloat16"}[args.device]
    for name in ("threads", "budget_s"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            parser.error(f"--{name}={getattr(args, name):g}: must be above 0")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device=cuda: PyTorch sees no GPU; use --device=cpu")
    args.threads = args.threads or torch.get_num_threads()
    return args


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, 60.0)
    parser.add_argument("--compile", action="store_true", help="torch.compile our models; the peers run as published")
    parser.add_argument("--with_peers", action="store_true", help="also transformers' and mambapy's models of the same shape")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each model (%(default)s)")
    parser.add_argument("--limit_s", type=float, default=120.0, help="a step that takes longer is ended (%(default)g)")
    parser.add_argument("--save", action="store_true", help="write the record to results/step_<device>[_<size>].json")
    args = settle(parser, parser.parse_args(argv))
    for name in ("rounds", "limit_s"):
        if not getattr(args, name) >= 1:
            parser.error(f"--{name}={getattr(args, name):g}: must be at least 1")
    return args


def contenders(args):
    """(specs of what runs, rows of what cannot be set up)."""
    specs, rows = [], []
    for family in args.families:
        for peer in [None, *(PEERS.get(family, []) if args.with_peers else [])]:
            name = f"{family}, {peer}" if peer else family
            try:
                config = model_config(family, args)
            except LeftOut as reason:
                rows.append({"name": name, "family": family, "peer": peer, "reason": str(reason)})
                continue
            specs.append({"name": name, "config": config, "peer": peer, "batch_size": args.batch_size, "device": args.device,
                          "dtype": args.dtype, "compile": args.compile and peer is None, "threads": args.threads})
    return specs, rows


def record_path(args, stem):
    """Where --out or --save say that the record goes, or None. Raises ConfigError where results/ does not take it."""
    size = f"_{args.size.lower()}" if args.size else ""
    out = Path(args.out) if args.out else ROOT / "results" / f"{stem}_{args.device}{size}.json" if args.save else None
    refuse_uncommitted(out)
    return out


def write(out, record):
    """Writes the record to `out` unless that is None, prints where, returns the path or None."""
    if out is not None:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            records.write_json(out, finite(record))
        except OSError as error:
            print(f"the record could not be written to {out} ({error.strerror}): choose another --out", file=sys.stderr)
            return None
        print(f"record: {out}")
    return out


def main(argv=None):
    args, began = parse(argv), time.perf_counter()
    out = record_path(args, "step")
    record = headline(args, "step")
    record |= {"rounds": args.rounds, "budget_seconds": args.budget_s, "limit_seconds": args.limit_s}
    specs, rows = contenders(args)
    peak = peak_flops(record["device"]) if args.dtype != "float32" else None
    record |= {"peak_flops": peak, "rows": derive(run_rounds(specs, args.rounds, args.budget_s, args.limit_s) + rows, peak)}
    print_rows(record["rows"], peak)
    if has_targets(args):
        record["targets"] = targets(record["rows"])
        if args.threads != 2:
            print(f"the targets are for 2 cores; this ran on {args.threads}")
        for t in record["targets"]:
            print(target_line(t))
    record |= {"finished": True, "run_seconds": time.perf_counter() - began, "load_average_after": load_average()}
    write(out, record)
    return int(any("reason" in r for r in record["rows"] if r["peer"] is None))


if __name__ == "__main__":
    with main_error("bench/step.py"):
        try:
            sys.exit(main())
        except KeyboardInterrupt:
            sys.exit("bench/step.py: interrupted; nothing written")
