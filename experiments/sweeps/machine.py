"""The plan of a sweep for GPUs that are named and need not be here: hours, memory and disk.

    seconds = tokens F / (share P G)          F FLOPs per token, P the GPU's bf16 peak, G the GPUs of a run
    memory = 16 N + t (60 L d + 2 V)          bytes: float32 weights, gradients, AdamW's moments; t tokens per
                                              micro-batch, L layers of width d, V the vocabulary (docs/scale.md)

share and memory are those of results/h200 where a record has the family, size, context and micro-batch; else the share
is ASSUMED, and memory is as above, measured for Longhorn. Left out: communication between GPUs, and evaluations.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from common import gpus
from common.errors import ConfigError
from evaluation.tasks import table
from experiments.pages import human
from experiments.sweeps import runner
from runtime.records import read_json

RECORDS = Path(__file__).resolve().parents[2] / "results" / "h200"
ASSUMED = 0.25  # of the peak, where nothing was measured: a little less than Longhorn's
USABLE = 0.95  # of a GPU's memory
GPUS_PER_NODE = 8


@dataclass
class Machine:
    """`count` GPUs of a name of gpus.GPUS, `nproc` of them per run."""

    name: str
    count: int
    nproc: int

    @property
    def peak(self):
        """FLOP/s of a run's GPUs."""
        return gpus.GPUS[self.name][0] * self.nproc

    @property
    def memory(self):
        """Bytes that a run can use on a GPU."""
        return gpus.GPUS[self.name][1] * USABLE

    @property
    def at_once(self):
        return max(1, self.count // self.nproc)

    def torchrun(self):
        """How to start a run: the words before train.py."""
        nodes = -(-self.nproc // GPUS_PER_NODE)
        where = "--standalone"
        if nodes > 1:
            where = f"--nnodes={nodes} --node_rank=$RANK --master_addr=$HOST"
        return f"torchrun {where} --nproc_per_node={min(self.nproc, GPUS_PER_NODE)}"


def named(name, count, nproc):
    """The Machine of a GPU's name. Raises ConfigError."""
    known = gpus.named(name)
    if known is None:
        raise ConfigError(f"--gpu={name}: known are {', '.join(gpus.GPUS)}")
    if nproc > count:
        raise ConfigError(f"--nproc={nproc}: more than --gpus={count}")
    return Machine(known, count, nproc)


def measured():
    """{(family, parameters, context, sequences per micro-batch): (share of the peak, bytes)} of the newest records."""
    found = {}
    for record in sorted(map(read_json, RECORDS.glob("training*.json")), key=lambda record: record["date"]):
        for row in record["rows"]:
            at = row["family"], row["parameters"], record["shape"]["block_size"], record["shape"]["batch_size"]
            found[at] = row["mfu"], row["peak_bytes"]
    return found


def estimated_memory(config, parameters, sequences):
    """Bytes on a GPU, by the formula above."""
    tokens = sequences * config.block_size
    return 16 * parameters + tokens * (60 * config.n_layer * config.n_embd + 2 * config.vocab_size)


def place(machine, cell, config, records):
    """Set the `seconds` of a cell, and the micro-batch that fits in its arguments; returns its row. Raises ConfigError
    where GPUs cannot share a step."""
    parameters = cell.at["parameters"]
    in_step = config.batch_tokens // config.block_size
    if in_step % machine.nproc:
        raise ConfigError(f"{machine.nproc} GPUs cannot share the {in_step} sequences of a step: choose another --gpus")
    sequences = min(config.micro_batch_size, in_step // machine.nproc)
    record = records.get((cell.at["model"], parameters, config.block_size, sequences))
    share, memory = record or (ASSUMED, estimated_memory(config, parameters, sequences))
    rest = (memory - 16 * parameters) / sequences  # bytes per sequence
    if memory > machine.memory:
        while sequences > 1 and 16 * parameters + rest * sequences > machine.memory:
            sequences //= 2
        cell.argv.append(f"--micro_batch_size={sequences}")
        record, share, memory = None, ASSUMED, 16 * parameters + rest * sequences
    cell.seconds = cell.at["flops"] / (share * machine.peak)
    return (cell.at["model"], cell.at["size"], human(parameters), human(cell.at["tokens"]), str(sequences),
            f"{memory / 1e9:.0f} GB" + (", too much" if memory > machine.memory else ""),
            f"{share:.0%}, {'measured' if record else 'assumed'}", runner.hours(cell.seconds))


def say_plan(machine, cells, configs):
    """Print the plan of cells with these configs."""
    records = measured()
    rows = Counter(place(machine, cell, config, records) for cell, config in zip(cells, configs, strict=True))
    head = "model", "size", "parameters", "tokens", "micro-batch", "per GPU", "of the peak", "a run", "runs"
    print(table([head, *((*row, str(runs)) for row, runs in rows.items())]))
    flops = sum(cell.at["flops"] for cell in cells)
    tokens = sum(cell.at["tokens"] for cell in cells)
    seconds = sum(cell.seconds for cell in cells) / machine.at_once
    print(f"{len(cells)} runs, {human(tokens)} tokens, {flops:.2g} FLOPs on {machine.count} x {machine.name}, "
          f"{machine.at_once} at a time: about {runner.hours(seconds)} in all")
    print(f"measured: on one H200 (results/h200); assumed: {ASSUMED:.0%}, which small models do not reach; both are "
          "shares of this GPU's peak, without communication and evaluations")
    kept = 0
    for cell, config in zip(cells, configs, strict=True):
        kept += 12 * cell.at["parameters"] * (config.keep_checkpoints + 1)  # and the best
    longest = max(cell.at["tokens"] for cell in cells)
    wide = 4 if configs[0].vocab_size > 2**16 else 2
    print(f"disk: {kept / 1e9:,.0f} GB for checkpoints; {longest * wide / 1e9:,.0f} GB of tokens, so that the longest "
          "run reads none twice")
