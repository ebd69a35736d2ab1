"""Plans a sweep for GPUs that need not be here: hours, memory and disk.

    seconds = tokens F / (share P G)          F FLOPs per token, P the GPU's bf16 peak, G the GPUs of a run
    memory = 16 N + t (60 L d + 2 V)          bytes: float32 weights, gradients, AdamW's moments; t tokens per
                                              micro-batch, L layers of width d, V the vocabulary (docs/scale.md)

--parallel, --recompute, --optimizer and --dtype change these as docs/scale.md says. share and memory come from the
largest micro-batch in results/h200, if a record has these settings, family, size and context. Otherwise the share is
the family's mean on record, or ASSUMED, and memory follows the formula above, measured for Longhorn. A micro-batch
takes at least as long as Python: per layer, the shortest time on record for the family, or else for the slowest family.
Communication between GPUs and evaluations are left out.
"""

import heapq
import itertools
import math
import statistics
from pathlib import Path

from common import gpus
from common.errors import ConfigError
from experiments.pages import human
from experiments.records import stem
from experiments.sweeps import runner
from experiments.sweeps.experiment import say_kinds
from runtime.records import read_json

RECORDS = Path(__file__).resolve().parents[2] / "results" / "h200"
ASSUMED = 0.25  # share of the peak for families without a record, and without compiling: Longhorn's mean
MEASURED = {"optimizer": "adamw", "parallel": "ddp", "recompute": "none", "compile": True,
            "backend": ""}  # and in bfloat16
START_SECONDS = 8.0  # start and end of a run: imports, the check at the start, the evaluation
PER_NODE = 8  # GPUs
COLUMNS = ("model", "size", "parameters", "tokens", "micro-batch", "memory", "of the peak", "a run")


def torchrun(nproc):
    """The words before train.py that start a run of `nproc` processes."""
    if nproc <= PER_NODE:
        return f"torchrun --standalone --nproc_per_node={nproc}"
    nodes = -(-nproc // PER_NODE)
    return f"torchrun --nnodes={nodes} --node_rank=$RANK --master_addr=$HOST --nproc_per_node={PER_NODE}"


def measured():
    """({(family, parameters, context): (sequences, share of the peak, bytes)} from the newest record of the largest
    micro-batch; {family: the least seconds per layer and micro-batch})."""
    found = {}
    waiting = {}
    for record in sorted(map(read_json, RECORDS.glob("training*.json")), key=lambda record: record["date"]):
        shape = record["shape"]
        for row in record["rows"]:
            family = row["family"]
            at = family, row["parameters"], shape["block_size"]
            if at not in found or shape["batch_size"] >= found[at][0]:
                found[at] = shape["batch_size"], row["mfu"], row["peak_bytes"]
            of_layer = row["seconds"]["median_seconds"] / shape["n_layer"]
            waiting[family] = min(waiting.get(family, math.inf), of_layer)
    return found, waiting


def checkpoint_bytes(at, config):
    """Bytes of float32 weights and their moments: two per parameter, but with Muon one per parameter of a layer."""
    saved = 4 if config.optimizer == "muon" else 0
    return 12 * at["parameters"] - saved * (at["parameters"] - at["embedding"])


def held_bytes(at, config, nproc):
    """Bytes that a GPU holds besides activations: weights, moments and gradients; or its shard of them, the embedding
    with its gradient, and two layers with the gradients of one. Raises ConfigError if there are too few GPUs to shard
    over."""
    states = checkpoint_bytes(at, config) + 4 * at["parameters"]
    if config.parallel == "ddp":
        return states
    least, shards = (2, nproc) if config.parallel == "fsdp" else (2 * PER_NODE, PER_NODE)
    if nproc < least:
        raise ConfigError(f"--parallel={config.parallel} on {nproc} GPU(s): give a run at least {least}, by --gpus and "
                          "--nproc, or use --parallel=ddp")
    return states / shards + 8 * at["embedding"] + 12 * (at["parameters"] - at["embedding"]) / config.n_layer


def place(cell, config, nproc, gpu, records, waiting):
    """Set a cell's `seconds` on nproc GPUs, its --micro_batch_size to one that fits, and COLUMNS in its place.
    records, waiting: from `measured`. Raises ConfigError if a step cannot be shared, or one sequence does not fit."""
    available = gpus.memory(gpu)
    at, source, share = cell.at, "assumed", ASSUMED
    family = stem(at["model"])
    of_family = [share for (name, *_), (_, share, _) in records.items() if name == family]
    if config.compile and not config.backend and of_family:
        share = statistics.mean(of_family)
    L, T = config.n_layer, config.block_size
    in_step = config.batch_tokens // T
    if in_step % nproc:
        near = sorted(range(1, in_step + 1), key=lambda n: (in_step % n > 0, abs(n - nproc)))  # divisors first
        raise ConfigError(f"{nproc} GPUs cannot share the {in_step} sequences of a step: choose "
                          f"{' or '.join(map(str, near[:2]))}, fewer by --nproc, or another --batch_tokens")
    factor = 2 if config.dtype == "float32" else 1  # bytes, and seconds: TF32 has half the peak
    half = (L + 1) // 2
    whole, again = {"none": (L, 0), "every_other": (half, half), "block": (1, L)}[config.recompute]  # layers
    sequences = min(config.micro_batch_size, in_step // nproc)
    fixed = held_bytes(at, config, nproc)
    of_one = T * (factor * (60 * whole * config.n_embd + 2 * config.vocab_size) + 4 * again * config.n_embd)
    record = records.get((family, at["parameters"], T))
    if record and factor == 1 and vars(config).items() >= MEASURED.items():
        largest, share, memory = record
        of_one, source = (memory - fixed) / largest, "measured"
    room = 0.95 * available - fixed
    if of_one > room:
        takes = f"{(fixed + of_one) / 1e9:.1f}"
        raise ConfigError(f"{at['model']} {at['size']} does not fit: one sequence takes {takes} GB, and {gpu} has "
                          f"{available / 1e9:.0f} (5% stay free): choose --recompute=block, "
                          "--parallel=fsdp with more GPUs, a shorter --block_size, another --gpu, or other --sizes")
    while sequences * of_one > room:
        sequences //= 2
    memory = fixed + sequences * of_one
    if sequences < config.micro_batch_size:
        cell.argv = [word for word in cell.argv if not word.startswith("--micro_batch_size=")]
        cell.argv.append(f"--micro_batch_size={sequences}")
    micro_batches = (config.max_iters - at["from"]) * -(-in_step // (nproc * sequences))
    computing = at["flops"] * factor / (share * gpus.peak_flops(gpu) * nproc)
    python = micro_batches * L * waiting.get(family, max(waiting.values()))
    if python > computing:
        share, source = share * computing / python, "waits for Python"
    cell.seconds = START_SECONDS + (1 + again / (3 * L)) * max(computing, python)
    at |= {"micro-batch": sequences, "memory": f"{memory / 1e9:.0f} of {available / 1e9:.0f} GB",
           "of the peak": f"{share:.0%}, {source}", "a run": runner.hours(cell.seconds)}


def seconds_of(cells, at_once, one_by_one):
    """Seconds until the last cell has ended, `at_once` cells at a time. A cell runs after its trunk, and seeds after
    the searches; one_by_one: one family after the other."""
    models = list(dict.fromkeys(cell.at["model"] for cell in cells))
    turn = lambda cell: (one_by_one and models.index(cell.at["model"]), cell.at["stage"] != "search")
    total = 0.0
    for _, of_turn in itertools.groupby(sorted(cells, key=turn), turn):
        group = list(of_turn)
        ended = {cell.after: total for cell in group} | {cell.name: math.inf for cell in group}
        free = [total] * at_once  # when the GPUs of each run are free again
        while group:
            cell = min(group, key=lambda cell: max(free[0], ended[cell.after]))  # the first that may begin soonest
            group.remove(cell)
            ended[cell.name] = max(free[0], ended[cell.after]) + cell.seconds
            heapq.heapreplace(free, ended[cell.name])
        total = max(free)
    return total


def say_plan(cells, configs, gpu, count, nproc, one_by_one=False):
    """Print the plan of cells with these configs on `count` GPUs named `gpu`, nproc of them per run; one_by_one: family
    by family. Raises ConfigError for an unknown name, and for a number of GPUs that is not a whole number of nodes."""
    name = gpus.named(gpu)
    if name is None:
        raise ConfigError(f"--gpu={gpu}: known GPUs are {', '.join(gpus.GPUS)}; --gpus says how many")
    if nproc > count:
        raise ConfigError(f"--nproc={nproc}: more than --gpus={count}")
    records, waiting = measured()
    kept = 0
    for cell, config in zip(cells, configs, strict=True):
        place(cell, config, nproc, gpu, records, waiting)
        files = config.keep_checkpoints + 1 + len(config.keep_steps.replace(",", " ").split())  # 1: the best
        kept += checkpoint_bytes(cell.at, config) * files
    if nproc > PER_NODE and nproc % PER_NODE:
        raise ConfigError(f"{nproc} GPUs for a run are not whole nodes of {PER_NODE}: choose "
                          f"--nproc={nproc - nproc % PER_NODE}")
    say_kinds(cells, COLUMNS)
    flops, tokens = (sum(cell.at[key] for cell in cells) for key in ("flops", "tokens"))
    at_once = max(1, count // nproc)
    order = ", one family after the other" if one_by_one else ""
    print(f"{len(cells)} runs, {human(tokens)} tokens, {flops:.2g} FLOPs on {count} x {name}, {at_once} at a time: "
          f"about {runner.hours(seconds_of(cells, at_once, one_by_one))} in all{order}; "
          f"the start of each, {START_SECONDS:.0f} s, is assumed")
    if any("Python" in cell.at["of the peak"] for cell in cells):
        print("waits for Python: each layer and micro-batch takes its shortest time on an H200, "
              f"{1000 * max(waiting.values()):.1f} ms without a record: larger micro-batches or fewer GPUs cost less")
    print("measured: on one H200 (results/h200), compiled, in bfloat16, with AdamW, ddp and no recompute; assumed: the "
          f"family's mean there, else {ASSUMED:.0%}. Small models do not reach this share, and loops over time or "
          "chunks in plain PyTorch stay far below it. Shares are of this GPU's peak (in float32 half of it), without "
          "communication and evaluations. Assumed memory is what Longhorn takes, compiled: other families differ, so "
          "run each there with --max_iters=20")
    if not all(config.compile for config in configs):
        print("without --compile a run takes more time and memory; how much was not measured")
    bytes_per_token = 4 if configs[0].vocab_size > 2**16 else 2
    longest = max(cell.at["tokens"] for cell in cells) * bytes_per_token
    print(f"disk: {kept / 1e9:,.0f} GB for checkpoints; {longest / 1e9:,.0f} GB of tokens, so that the longest run "
          "reads none twice; prepare.py writes all of a dataset")
