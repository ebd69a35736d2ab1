"""Do models extrapolate beyond their training length? Section 5.4, and Figure 1 on the right.

    python experiments/extrapolation.py --checkpoint out/longhorn_laptop out/llama_laptop --lengths=256,1024,4096
    python experiments/extrapolation.py run --preset=laptop     # trains seven families at 256, reads to 16384: an hour
    python experiments/extrapolation.py run --preset=steps      # the delta rule's three steps, three seeds each
    python experiments/extrapolation.py run --preset=laptop mamba2 "longhorn,swa"   # other families, in the same record
    python experiments/extrapolation.py run --preset=gpu        # at 2048, to 65536; not yet run on a GPU
    python experiments/extrapolation.py report results/extrapolation_laptop.json     # table and picture again

All runs share one record file in out/ (--save: in results/), with a table (.md) and a picture (.png) beside it.

As in the paper, validation text is rearranged into sequences of each length T, here the same text for every T. K
sequences of the longest length M are cut into K M / T of length T. So each token is predicted once at every T, and only
the preceding text differs. The longest sequences lie within one document if the corpus says where documents begin
(data/pystdlib/prepare.py --documents=package) and one is long enough. Otherwise they are laid end to end over the
split.

    loss(T) = mean of the K sequences' mean losses, +- s / sqrt(K); compared with the training length by sequence

Text is read in chunks, and the state is carried from one to the next, so memory grows with T only for LLaMA, whose
state is its cache. If memory runs out at a length, it and all longer ones are left out.

A lower loss at a longer T says little about long memory: with a short T more tokens are near the beginning of a
sequence, with little text before them. More telling is the loss of the same tokens at the longest T minus their loss at
the training length, place by place. There an easy stretch of text cannot look like memory.

LLaMA is evaluated again with its attention limited to the training length (family swa, the same weights). If its loss
then stays low, the text is not harder: only the positions were new to the model.
"""

import dataclasses
import hashlib
import itertools
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.measure import in_one_line, new_record, record_file, write_record  # noqa: E402
from common.errors import ConfigError, is_out_of_memory  # noqa: E402
from configurator import Count, Whole  # noqa: E402
from data.prepared import Tokens, find_dataset  # noqa: E402
from experiments import extrapolation_report, sweep  # noqa: E402
from experiments.extrapolation_report import in_words, mean_and_error  # noqa: E402
from experiments.sweeps import runner  # noqa: E402
from experiments.sweeps.experiment import Experiment, Report, Run  # noqa: E402
from model import LM  # noqa: E402
from runtime.distributed import named_device, pick_dtype  # noqa: E402
from runtime.records import cpu_model, fields, read_json  # noqa: E402
from sample import load_model  # noqa: E402

FAMILIES = ("longhorn", "mamba", "llama", "gla", "retnet", "rwkv", "deltanet")  # the last for Section 5.4
STEPS = ("deltanet", "deltanet@step=implicit", "deltanet@step=exact", "deltanet@normalize_keys=false",
         "deltanet@step=implicit,normalize_keys=false", "deltanet@step=exact,normalize_keys=false")
CORPUS = "pystdlib_packages"
LAPTOP = dict(block_size=256, max_iters=2000, eval_interval=1000, eval_tokens=65536, final_eval_tokens=262144,
              eval_block_size=256)
PRESETS = {
    # 1.5M parameters, 2.0M tokens each
    "laptop": {"lengths": [256 << i for i in range(7)], "eval_tokens": 262144, "train": LAPTOP},
    # 460K parameters, 2.0M tokens each
    "steps": {"lengths": [256, 1024, 4096, 16384], "eval_tokens": 262144, "families": STEPS,
              "seeds": (1, 2, 3), "train": LAPTOP | dict(n_layer=2, n_head=2, n_embd=128, learning_rate=2e-3)},
    # 20M parameters, 39M tokens each
    "gpu": {"lengths": [2048 << i for i in range(6)], "eval_tokens": 0, "train": dict(
        n_layer=6, n_embd=512, n_head=8, d_state=16, mlp_multiple=512, block_size=2048, batch_tokens=65536,
        micro_batch_size=16, max_iters=600, learning_rate=1e-3, eval_interval=300, eval_tokens=262144,
        eval_block_size=2048)},
}


def plan(preset, families=(), seeds=(), extra=()):
    """[runner.Cell] of a preset, with other families or seeds if given; extra: settings for every run. Raises
    ConfigError for an unknown family."""
    preset = PRESETS[preset]
    given = tuple(f"--{key}={value}" for key, value in {"dataset": CORPUS, **preset["train"]}.items())
    families = families or preset.get("families", FAMILIES)
    size = sweep.Preset({"": sweep.Size(given)}, families)
    sweep.check_configs(size)
    cells = []
    for seed, run in itertools.product(seeds or preset.get("seeds", [None]), families):
        argv = [*sweep.base_arguments(size, run, ""), *extra]
        if seed is not None:
            run += f", seed {seed}"
            argv.append(f"--seed={seed}")
        cells.append(runner.Cell(sweep.safe_name(run), argv, {"run": run}))
    return cells


# ------------------------------------------------------------------------------------------------------------- the text

def longest_sequences(n_tokens, documents, longest, eval_tokens=0):
    """(where the longest sequences begin, in order; the names of their documents, or None if they cross documents).

    A sequence reads `longest` tokens and predicts the next token after each. So it takes longest + 1 tokens, and
    neighbours share one.

    Args:
        n_tokens: of the split; documents: [{'name', 'start', 'tokens'}] or None; longest: tokens per sequence.
        eval_tokens: predict at most this many tokens, of sequences taken from all documents in turn; 0: all there are.
    Raises ConfigError if that is less than one sequence.
    """
    inside = []  # (index in its document, start, document): sorting puts the first of each document first
    for document in documents or ():
        for i in range((document["tokens"] - 1) // longest):
            inside.append((i, document["start"] + i * longest, document["name"]))
    inside.sort()
    count = len(inside) or (n_tokens - 1) // longest
    n = min(count, (eval_tokens or n_tokens) // longest)
    if n < 1:
        raise ConfigError(f"--lengths: {longest} tokens, and one more to predict, are longer than the text "
                          f"({n_tokens:,} tokens) or than --eval_tokens={eval_tokens}: choose shorter ones, or prepare "
                          "more data")
    if not inside:
        return [i * count // n * longest for i in range(n)], None  # evenly over the split
    chosen = sorted((start, name) for _, start, name in inside[:n])
    return [start for start, _ in chosen], [name for _, name in chosen]


def bins(T):
    """Edges 0, 1, 2, 4, 8 ... T: bin b holds the positions edges[b] <= p < edges[b + 1]."""
    return [0, *(1 << i for i in range((T - 1).bit_length())), T]


def in_bins(losses):
    """Means (K, bins) of losses (K, T) by bin of position."""
    edges = bins(losses.shape[1])
    return np.add.reduceat(losses, edges[:-1], axis=1) / np.diff(edges)


# -------------------------------------------------------------------------------------------------------------- reading

@torch.no_grad()
def read(lm, x, y, chunk):
    """The losses (B, T) in nats, float64 on the CPU, for tokens x and targets y (B, T)."""
    device = lm.embed.weight.device
    state, losses = lm.initial_state(len(x)), []
    for part, following in zip(x.split(chunk, 1), y.split(chunk, 1), strict=True):
        logits, _, state = lm(part.to(device), state=state)  # (B, t, V)
        piece = F.cross_entropy(logits.float().flatten(0, 1), following.to(device).flatten(), reduction="none")
        del logits  # otherwise it would stay in memory during the next part
        losses.append(piece.view(part.shape).double().cpu())
    return torch.cat(losses, 1)


def read_length(lm, rows, T, chunk, batch_size):
    """The losses (K, M) in nats, float64, of K rows (K, M + 1) of tokens, read as K M / T sequences of length T.

    If T is below the chunk, more than `batch_size` sequences are read at once, so that a call has the same number of
    tokens for every T.
    """
    at_once = batch_size * max(1, chunk // T)
    x, y = (tokens.reshape(-1, T).split(at_once) for tokens in (rows[:, :-1], rows[:, 1:]))  # (at_once, T) each
    losses = [read(lm, part, following, chunk) for part, following in zip(x, y, strict=True)]
    return torch.cat(losses).view(len(rows), -1).numpy()


# --------------------------------------------------------------------------------------------------------- a checkpoint

def with_error(name, values):
    mean, error = mean_and_error(values)
    return {name: mean, f"{name}_standard_error": error}


def summary(losses, T, reference=None):
    """The record of one length from its losses (K, M); reference: (length, losses there) to compare with."""
    K, M = losses.shape
    means = losses.mean(1)
    row = {"length": T, "sequences": K * (M // T), "tokens": K * M, **with_error("loss", means),
           "perplexity": float(np.exp(means.mean())), "losses_of_longest_sequences": means.tolist()}
    if reference:
        against, before = reference
        by_place = with_error("difference", in_bins(losses) - in_bins(before))
        row |= {"against": against, **with_error("difference", means - before.mean(1)),
                "difference_by_place": {"edges": bins(M), **by_place}}
    return row


def measure(lm, rows, lengths, trained, chunk, batch_size):
    """A record per length of rows (K, M + 1) of tokens; trained: the training length. The list ends before the length
    at which memory runs out."""
    measured, reference = [], None
    base = trained if trained in lengths else lengths[0]
    for T in lengths:
        try:
            losses = read_length(lm, rows, T, chunk, batch_size)
        except (RuntimeError, MemoryError) as error:
            if not (measured and is_out_of_memory(error)):
                raise
            print(f"  {T:7} and longer left out: memory ran out ({in_one_line(error)}): take a smaller --batch_size "
                  f"({batch_size}) or --chunk ({chunk})")
            break
        row = summary(losses, T, reference)
        if T == base:
            reference = T, losses
        measured.append(row)
        print(f"  {T:7}  loss {row['loss']:.4f} +- {row['loss_standard_error']:.4f}, "
              f"perplexity {row['perplexity']:.3f}", flush=True)
    return measured


def limited(lm, window):
    """A model with the same weights, whose LLaMA layers attend only to the last `window` tokens."""
    changed = {key: re.sub(r"\bllama\b", "swa", getattr(lm.config, key)) for key in ("model", "pattern")}
    other = LM(dataclasses.replace(lm.config, window=window, **changed))
    other.load_state_dict(lm.state_dict())
    return other.to(lm.embed.weight.device).eval()


def cut_text(lm, dataset, trained_on, folder, args):
    """(rows (K, M + 1) of tokens, lengths, the record of the text) for the checkpoint of the run in `folder`.

    trained_on: the hashes of its data. Raises ConfigError.
    """
    data_folder, trained = find_dataset(dataset), lm.config.block_size
    data = Tokens(data_folder, vocab_size=lm.config.vocab_size)
    same = data.sha256 == trained_on
    if not same and not args.dataset:
        raise ConfigError(f"the data in {data_folder} is not what {folder} was trained on (its sha256 differs), and "
                          "may hold its training text: prepare it as before, or name other text with --dataset")
    documents = (data.meta.get("documents") or {}).get("val")
    lengths = sorted(args.lengths)
    if not lengths:  # 1, 2, 4, 8 and 16 times the training length, within documents
        within = max((d["tokens"] for d in documents or ()), default=len(data.val))
        lengths = [trained << i for i in range(5) if not i or trained << i < within]
    longest = lengths[-1]
    for T in lengths:
        if longest % T:
            raise ConfigError(f"--lengths: {T} does not divide the longest, {longest}, and both must be cut from the "
                              "same tokens: choose one that does")
    starts, names = longest_sequences(len(data.val), documents, longest, args.eval_tokens)
    rows = np.stack([data.val[start:start + longest + 1] for start in starts]).astype(np.int64)
    text = {"dataset": data_folder.name, "val_sha256": data.sha256["val"], "trained_on_this_data": same,
            "starts": starts, "sequences": len(starts), "longest": longest, "documents": names,
            "sha256": hashlib.sha256(rows.astype("<u4").tobytes()).hexdigest()}
    return torch.from_numpy(rows), lengths, text


def evaluate(folder, args, run):
    """The records of one run's checkpoint: as trained, and with limited attention if it has LLaMA layers. run: its
    name. Raises ConfigError."""
    began, device = time.perf_counter(), named_device(args.device)
    lm, meta = load_model(folder, device)
    trained = lm.config.block_size
    with fields(f"{folder}: its records"):
        dtype = pick_dtype(meta["config"]["dtype"], device)
        checkpoint = {"step": meta["step"], "tokens": meta["tokens"], "data": meta["data"], "block_size": trained,
                      "code": meta["code_versions"][-1],
                      "parameters": sum(p.numel() for p in lm.parameters()), "seed": meta["config"]["seed"]}
        dataset = args.dataset or str(meta["config"]["dataset"])
    rows, lengths, text = cut_text(lm, dataset, meta["data"], folder, args)
    batch_size = args.batch_size or (8 if device.type == "cuda" else 1)
    models = {run: lm}
    if "llama" in lm.config.families:
        models[f"{run}, last {trained} tokens"] = limited(lm, trained)
    records = []
    for name, model in models.items():
        print(f"{name}, trained at {trained}: {in_words(text)}, {args.chunk} tokens at a time", flush=True)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32, cache_enabled=False):
            results = measure(model, rows, lengths, trained, args.chunk, batch_size)
        records.append(new_record(
            "extrapolation", family=lm.config.pattern or lm.config.model, run=name,
            device=torch.cuda.get_device_name() if device.type == "cuda" else cpu_model(),
            threads=torch.get_num_threads(), dtype=str(dtype).removeprefix("torch."), chunk=args.chunk,
            batch_size=batch_size, text=text, lengths=results, checkpoint=checkpoint,
            seconds=time.perf_counter() - began) | {"finished": True})
    return records


# -------------------------------------------------------------------------------------------------------- command line

@dataclass
class Reading:
    save: bool = False  # write the record to results/
    chunk: Count = 1024  # tokens read at a time
    batch_size: Count = None  # sequences at a time (1; on a GPU 8)
    device: str = "auto"  # cpu or cuda (a GPU if there is one)


@dataclass
class Eval(Reading):
    checkpoint: list[str] = ()  # folders of runs, each with checkpoint.safetensors
    lengths: tuple[Count, ...] = ()  # tokens (1 to 16 times the training length)
    eval_tokens: Count = None  # tokens to predict at each length (all)
    dataset: str = ""  # a prepared folder, or its name in data/ (that of training)
    out: Path = None  # record file (out/extrapolation.json)


@dataclass
class ExtrapolationRun(Reading, Run):
    families: list[str] = ()  # families or patterns instead of the preset's, also with settings, as in
    # deltanet@step=implicit
    preset: Literal[tuple(PRESETS)] = "laptop"  # see above
    seeds: tuple[Whole, ...] = ()  # one run for each (the preset's)
    out: Path = None  # record file (out/extrapolation_PRESET.json)

    ARGUMENTS = ("families",)


class Extrapolation(Experiment):
    script = "experiments/extrapolation.py"
    settings = {"eval": Eval, "run": ExtrapolationRun, "report": Report}
    name = "extrapolation_{preset}"
    columns = ("run",)
    sets = (*sweep.SET_BY_THE_SWEEP, "dataset")
    see = "FAMILY, --preset, --seeds"

    def run(self):
        args = self.args
        trains = args.command == "run"
        self.record = record_file(args, self.name.format(**vars(args)) if trains else "extrapolation")
        if trains:
            return super().run()
        runs = {Path(folder).resolve().name: folder for folder in args.checkpoint}
        if not runs or len(runs) < len(args.checkpoint):
            raise ConfigError(f"--checkpoint: {len(args.checkpoint)} folders with {len(runs)} names: give folders with "
                              "different names, or use two --out, since a record has one entry per name")
        self.read(runs)
        return 0

    def place(self):
        return runner.REPO / "out" / self.name.format(**vars(self.args))  # --out is the record

    def plan(self):
        return plan(self.args.preset, self.args.families, self.args.seeds, self.args.others)

    def about(self):
        return {"preset": self.args.preset}

    def go(self, cells):
        from data.pystdlib.prepare import prepare

        prepare(ROOT / "data" / CORPUS, documents="package")
        super().go(cells)

    def finish(self):
        preset = PRESETS[self.args.preset]
        self.args.lengths, self.args.eval_tokens, self.args.dataset = preset["lengths"], preset["eval_tokens"], ""
        self.read({c.at["run"]: self.folder / c.name for c in self.cells if c.name not in self.failed})

    def read(self, runs):
        """Evaluate the checkpoints of {name: folder}, replace their earlier results in the record, and report."""
        for name, folder in runs.items():
            new = evaluate(folder, self.args, name)
            with fields(f"{self.record}: its records"):
                before = read_json(self.record)["extrapolation"] if self.record.exists() else []
                others = [r for r in before if r["run"].partition(", last ")[0] != name]  # see `evaluate`
            write_record(self.record, {"extrapolation": others + new})
        self.folder = self.record
        super().finish()

    def report(self, folder, out=None):
        paths = extrapolation_report.write(folder, out)
        print(paths["md"].read_text(encoding="utf-8"))
        return paths


def main(argv):
    if argv and argv[0].startswith("--") and argv[0] != "--help":
        argv = ["eval", *argv]
    return Extrapolation.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
