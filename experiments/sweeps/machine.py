"""Plans a sweep for GPUs that need not be here: hours, memory and disk.

    seconds = tokens F / (share P G)          F FLOPs per token, P the GPU's bf16 peak, G the GPUs of a run
    memory = 16 N + t (60 L d + 2 V)          bytes: float32 weights, gradients, AdamW's moments; t tokens per
                                              micro-batch, L layers of width d, V the vocabulary (docs/scale.md)

share and memory come from results/h200 if a record has the family, size, context and micro-batch. Else the share is
ASSUMED, and memory follows the formula above, measured for Longhorn. Left out: communication between GPUs, and
evaluations.
"""

import heapq
from collections import Counter
from pathlib import Path

from common import gpus
from common.errors import ConfigError
from evaluation.tasks import table
from experiments.pages import human
from experiments.sweeps import runner
from runtime.records import read_json

RECORDS = Path(__file__).resolve().parents[2] / "results" / "h200"
ASSUMED = 0.25  # share of the peak if nothing was measured: a little less than Longhorn's
PER_NODE = 8  # GPUs
COLUMNS = ["model", "size", "parameters", "tokens", "micro-batch", "memory", "of the peak", "a run", "runs"]


def torchrun(nproc):
    """The words before train.py that start a run of `nproc` processes."""
    if nproc <= PER_NODE:
        return f"torchrun --standalone --nproc_per_node={nproc}"
    nodes = -(-nproc // PER_NODE)
    return f"torchrun --nnodes={nodes} --node_rank=$RANK --master_addr=$HOST --nproc_per_node={PER_NODE}"


def measured():
    """{(family, parameters, context, sequences per micro-batch): (share of the peak, bytes)} of the newest records."""
    found = {}
    for record in sorted(map(read_json, RECORDS.glob("training*.json")), key=lambda record: record["date"]):
        shape = record["shape"]
        for row in record["rows"]:
            at = row["family"], row["parameters"], shape["block_size"], shape["batch_size"]
            found[at] = row["mfu"], row["peak_bytes"]
    return found


def place(cell, config, nproc, gpu, records):
    """Set the `seconds` of a cell on nproc GPUs, and the micro-batch that fits in its arguments; returns its row.
    Raises ConfigError if a step cannot be shared."""
    peak, available = gpus.peak_flops(gpu), gpus.memory(gpu)
    at, source = cell.at, "assumed"
    in_step = config.batch_tokens // config.block_size
    if in_step % nproc:
        raise ConfigError(f"{nproc} GPUs cannot share the {in_step} sequences of a step: choose --gpus={in_step} or "
                          "another divisor, or another --batch_tokens")
    sequences = min(config.micro_batch_size, in_step // nproc)
    fixed = 16 * at["parameters"]
    per_token = 60 * config.n_layer * config.n_embd + 2 * config.vocab_size
    share, memory = ASSUMED, fixed + sequences * config.block_size * per_token
    if (record := (at["model"], at["parameters"], config.block_size, sequences)) in records:
        share, memory = records[record]
        source = "measured"
    while memory > 0.95 * available and sequences > 1:
        memory = (memory + fixed) / 2
        sequences //= 2
        share, source = ASSUMED, "assumed"
    if sequences < config.micro_batch_size:
        cell.argv = [word for word in cell.argv if not word.startswith("--micro_batch_size=")]
        cell.argv.append(f"--micro_batch_size={sequences}")
    cell.seconds = at["flops"] / (share * peak * nproc)
    return [at["model"], at["size"], human(at["parameters"]), human(at["tokens"]), str(sequences),
            f"{memory / 1e9:.0f} of {available / 1e9:.0f} GB", f"{share:.0%}, {source}", runner.hours(cell.seconds)]


def say_plan(cells, configs, gpu, count, nproc):
    """Print the plan of cells with these configs on `count` GPUs named `gpu`, nproc of them per run. Raises ConfigError
    for an unknown name."""
    name = gpus.named(gpu)
    if name is None:
        raise ConfigError(f"--gpu={gpu}: known are {', '.join(gpus.GPUS)}")
    if nproc > count:
        raise ConfigError(f"--nproc={nproc}: more than --gpus={count}")
    records = measured()
    rows, kept = Counter(), 0
    for cell, config in zip(cells, configs, strict=True):
        rows[tuple(place(cell, config, nproc, gpu, records))] += 1
        kept += 12 * cell.at["parameters"] * (config.keep_checkpoints + 1)  # plus the best one
    print(table([COLUMNS, *([*row, str(runs)] for row, runs in rows.items())]))
    flops, tokens = (sum(cell.at[key] for cell in cells) for key in ("flops", "tokens"))
    at_once = max(1, count // nproc)
    ends = [0.0] * at_once  # when its GPUs are free again, of each run at a time
    for cell in cells:
        heapq.heapreplace(ends, ends[0] + cell.seconds)
    print(f"{len(cells)} runs, {human(tokens)} tokens, {flops:.2g} FLOPs on {count} x {name}, {at_once} at a time: "
          f"about {runner.hours(max(ends))} in all")
    if min(cell.seconds for cell in cells) < 60:
        print("a run of less than a minute takes longer: these times leave out its start, and waiting for Python")
    print(f"measured: on one H200 (results/h200); assumed: {ASSUMED:.0%}, which small models do not reach, and a "
          "loop over time in Python not by far; both are shares of this GPU's peak, without communication and "
          "evaluations; memory that is assumed is what Longhorn would take: run a family of your own there with "
          "--max_iters=20")
    bytes_per_token = 4 if configs[0].vocab_size > 2**16 else 2
    longest = max(cell.at["tokens"] for cell in cells) * bytes_per_token
    print(f"disk: {kept / 1e9:,.0f} GB for checkpoints; {longest / 1e9:,.0f} GB of tokens, so that the longest run "
          "reads none twice")
