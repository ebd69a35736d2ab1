"""Do models extrapolate beyond their training length? Section 5.4, and Figure 1 on the right.

    python experiments/extrapolation.py --checkpoint out/longhorn_laptop out/llama_laptop --lengths=256,1024,4096
    python experiments/extrapolation.py run --preset=laptop     # trains seven families at 256, reads to 16384: an hour
    python experiments/extrapolation.py run --preset=steps      # the delta rule's three steps, three seeds each
    python experiments/extrapolation.py run --preset=laptop mamba2 "longhorn,swa"   # other families, in the same record
    python experiments/extrapolation.py run --preset=gpu        # at 2048, to 65536; not yet run on a GPU
    python experiments/extrapolation.py report results/extrapolation_laptop.json     # table and picture again

All runs share one record file in out/ (--save: in results/), with a table (.md) and a picture (.png) beside it.

As in the paper, validation text is rearranged into sequences of each length T, here the same text for every T: K
sequences of the longest length M are cut into K M / T of length T, so that each token is predicted once at every T, and
only what precedes it differs. The longest sequences lie within one document where the corpus says where documents begin
(data/pystdlib/prepare.py --documents=package) and any is long enough; otherwise they lie end to end over the split.

    loss(T) = mean of the K sequences' mean losses, +- s / sqrt(K); compared with the training length by sequence

Text is read in chunks, the state carried from one to the next, so memory grows with T for LLaMA only, whose cache is
its state. Where it runs out, that length is left out, and the record says why.

A lower loss at a longer T says little about a long memory: of a short T's tokens more stand near a beginning, where
nothing can be known yet. More telling is the loss of the same tokens in the longest T minus their loss when cut at the
training length, place by place: then no easy stretch of text can look like memory. The norm of the state along the text
is shown too; by itself it explains no failure: RWKV's grows as DeltaNet's does, and its loss does not rise.

LLaMA is read a second time with its attention limited to the training length (family swa, the same weights): where that
holds its loss, it was not the text that had become harder, but positions that training had never shown.
"""

import argparse
import dataclasses
import hashlib
import itertools
import math
import re
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.measure import Peak, check_numbers, check_out, in_one_line, new_record, write_record  # noqa: E402
from common.errors import ConfigError, is_out_of_memory, main_error  # noqa: E402
from data.prepared import Tokens, find_dataset  # noqa: E402
from experiments import pages, sweep  # noqa: E402
from experiments.compare import welch  # noqa: E402
from experiments.sweeps import runner  # noqa: E402
from experiments.sweeps.runner import Cell, numbers  # noqa: E402
from mixers import RWKV4TimeMix  # noqa: E402
from model import LM, tensors_of  # noqa: E402
from runtime.distributed import named_device, pick_dtype  # noqa: E402
from runtime.records import fields, read_json  # noqa: E402
from sample import load_model  # noqa: E402

NORM_SEQUENCES = 8  # at most, whose states are measured
FAMILIES = ("longhorn", "mamba", "llama", "gla", "retnet", "rwkv", "deltanet")  # the last for Section 5.4
STEPS = ("deltanet", "deltanet@step=implicit", "deltanet@step=exact", "deltanet@normalize_keys=false",
         "deltanet@step=implicit,normalize_keys=false", "deltanet@step=exact,normalize_keys=false")
CORPUS = "pystdlib_packages"
LAPTOP = dict(block_size=256, max_iters=2000, eval_interval=1000, eval_tokens=65536, final_eval_tokens=262144,
              eval_block_size=256)
PRESETS = {
    # 1.5M parameters, 2.0M tokens each
    "laptop": {"jobs": 2, "lengths": [256 << i for i in range(7)], "eval_tokens": 262144, "train": LAPTOP},
    # 460K parameters, 2.0M tokens each
    "steps": {"jobs": 2, "lengths": [256, 1024, 4096, 16384], "eval_tokens": 262144, "families": STEPS,
              "seeds": (1, 2, 3), "train": LAPTOP | dict(n_layer=2, n_head=2, n_embd=128, learning_rate=2e-3)},
    # 20M parameters, 39M tokens each
    "gpu": {"jobs": 1, "lengths": [2048 << i for i in range(6)], "eval_tokens": 0, "train": dict(
        n_layer=6, n_embd=512, n_head=8, d_state=16, mlp_multiple=512, block_size=2048, batch_tokens=65536,
        micro_batch_size=16, max_iters=600, learning_rate=1e-3, eval_interval=300, eval_tokens=262144,
        eval_block_size=2048)},
}


def plan(preset, families=(), seeds=()):
    """[Cell] of a preset, of other families or seeds where they are given. Raises ConfigError for an unknown family."""
    preset = PRESETS[preset]
    given = tuple(f"--{key}={value}" for key, value in {"dataset": CORPUS, **preset["train"]}.items())
    size, families = sweep.Preset({"": sweep.Size(given)}), families or preset.get("families", FAMILIES)
    cells = []
    for seed, family in itertools.product(seeds or preset.get("seeds", [None]), families):
        run, argv = family, sweep.base_arguments(size, family, "")
        if seed is not None:
            run, argv = f"{family}, seed {seed}", [*argv, f"--seed={seed}"]
        cells.append(Cell(re.sub(r"[^\w.@-]+", "_", run), argv, {"run": run}))
    return cells


# ------------------------------------------------------------------------------------------------------------- the text

def check_lengths(lengths, limit, where):
    """Sorted lengths. Raises ConfigError where one is too long or does not divide the longest."""
    lengths = sorted(lengths)
    if lengths[-1] > limit:
        raise ConfigError(f"--lengths: {lengths[-1]} is longer than {where} ({limit + 1:,} tokens; a sequence needs "
                          "one more than its length): choose shorter ones, or prepare more data")
    odd = [T for T in lengths if lengths[-1] % T]
    if odd:
        raise ConfigError(f"--lengths: {odd[0]} does not divide the longest, {lengths[-1]}, and both must be cut from "
                          "the same tokens: choose one that does")
    return lengths


def longest_sequences(n_tokens, documents, longest, eval_tokens=0):
    """(where the longest sequences begin, in order; the names of their documents, or None where they cross them).

    A sequence reads `longest` tokens and predicts the one after each: it takes longest + 1, and neighbours share one.

    Args:
        n_tokens: of the split; documents: [{'name', 'start', 'tokens'}] or None; longest: tokens per sequence.
        eval_tokens: predict at most this many tokens, of sequences taken from all documents in turn; 0: all there are.
    """
    inside = [(i, d["start"] + i * longest, d["name"])
              for d in documents or () for i in range((d["tokens"] - 1) // longest)]
    across = [(i, i * longest, None) for i in range((n_tokens - 1) // longest)]
    places = sorted(inside) or across
    n = min(len(places), eval_tokens // longest) if eval_tokens else len(places)
    if n < 1:
        raise ConfigError(f"--eval_tokens={eval_tokens} is less than one sequence of the longest length, {longest}")
    if not inside:
        return [across[i * len(across) // n][1] for i in range(n)], None  # evenly over the split
    _, starts, names = zip(*sorted(places[:n], key=lambda s: s[1]), strict=True)  # each document's first, then ...
    return list(starts), list(names)


def bins(T):
    """Edges 0, 1, 2, 4, 8 ... T: bin b holds the positions edges[b] <= p < edges[b + 1]."""
    return [0, *(1 << i for i in range((T - 1).bit_length())), T]


def in_bins(losses):
    """Means (K, bins) of losses (K, T) by bin of position."""
    edges = bins(losses.shape[1])
    return np.add.reduceat(losses, edges[:-1], axis=1) / np.diff(edges)


# -------------------------------------------------------------------------------------------------------------- reading

@torch.no_grad()
def read(lm, x, y, chunk, also=()):
    """Yield (end, losses (B, tokens of the piece) float32, state) piece by piece, for x and y (B, T) of tokens.

    A piece ends after every `chunk` tokens, and at the positions in `also`.
    """
    T = x.shape[1]
    ends = sorted({T, *range(chunk, T, chunk), *also})
    state, start = lm.initial_state(len(x)), 0
    for end in ends:
        logits, _, state = lm(x[:, start:end], state=state)  # (B, t, V)
        losses = F.cross_entropy(logits.float().flatten(0, 1), y[:, start:end].flatten(), reduction="none")
        del logits  # otherwise it would stay beside the next piece's
        yield end, losses.view(len(x), -1), state
        start = end


def recurrent(branch, state):
    """The recurrence's part of a branch's state, (B, ...), or None.

    Left out are what grows with the text (a cache), and the last tokens that convolutions and token shifts look back
    at. RWKV-4 keeps numerator and denominator over a common exponent that moves; its output depends on their ratio.
    """
    if not branch.has_state:
        return None
    if isinstance(branch.mixer, RWKV4TimeMix):
        return state[1] / state[2]
    last = lambda s: s[-1] if isinstance(s, tuple) and s else s
    state, first = last(state), last(branch.initial_state(1, "cpu"))
    return state if isinstance(state, torch.Tensor) and state.dim() > 2 and state.shape[1:] == first.shape[1:] else None


def read_length(lm, rows, T, chunk, batch_size):
    """Read K rows (K, M + 1) of tokens as K M / T sequences of length T.

    A T below the chunk is read more at once than `batch_size`, so that a call has as many tokens whatever T is.

    Returns: the losses of all tokens in nats, (K, M) float64, and the bytes of one sequence's state at its end.
    """
    x, y, device = rows[:, :-1].reshape(-1, T), rows[:, 1:].reshape(-1, T), lm.embed.weight.device  # (K M / T, T)
    losses, B, held = torch.zeros(x.shape, dtype=torch.float64), batch_size * max(1, chunk // T), 0
    for at in range(0, len(x), B):
        part = slice(at, at + B)
        for end, piece, state in read(lm, x[part].to(device), y[part].to(device), chunk):
            losses[part, end - piece.shape[1]:end] = piece
            held = sum(t.nbytes for t in tensors_of(state)) // len(piece)
            del state
    return losses.view(len(rows), -1).numpy(), held


def state_norms(lm, rows, positions, chunk):
    """{'0 Longhorn': {'positions', 'rms'}} of every branch with a recurrence, after that many tokens of the rows.

    rms: the root mean square of a row's state, its mean over the rows.
    """
    norms, device, branches = {}, lm.embed.weight.device, [branch for _, branch in lm.branches()]
    for end, _, state in read(lm, rows[:, :-1].to(device), rows[:, 1:].to(device), chunk, positions):
        if end not in positions:
            continue
        for i, (branch, s) in enumerate(zip(branches, sum(state, []), strict=True)):
            s = recurrent(branch, s)
            if s is not None:
                entry = norms.setdefault(f"{i} {type(branch.mixer).__name__}", {"positions": [], "rms": []})
                entry["positions"].append(end)
                entry["rms"].append(s.double().flatten(1).square().mean(1).sqrt().mean().item())
        if not norms:
            break  # attention keeps a cache only
    return norms


# --------------------------------------------------------------------------------------------------------- a checkpoint

def mean_and_error(values):
    """The mean over the first axis and its standard error, as numbers or lists; NaN where one is not known."""
    values = np.array(values, float)  # None, in a record, is NaN
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = values.mean(0)
        error = np.sqrt(np.square(values - mean).sum(0) / (len(values) * (len(values) - 1)))
    return mean.tolist(), error.tolist()


def with_error(name, values):
    return dict(zip((name, f"{name}_standard_error"), mean_and_error(values), strict=True))


def summary(losses, T, reference=None):
    """The record of one length from its losses (K, M); reference: (length, losses there) to compare with."""
    (K, M), means = losses.shape, losses.mean(1)
    by_position = in_bins(losses.reshape(-1, T)).reshape(K, M // T, -1).mean(1)
    out = {"length": T, "sequences": K * (M // T), "tokens": K * M, **with_error("loss", means),
           "perplexity": float(np.exp(means.mean())), "losses_of_longest_sequences": means.tolist(),
           "by_position": {"edges": bins(T), **with_error("loss", by_position)}}
    if reference:
        against, before = reference
        out |= {"against": against, **with_error("difference", means - before.mean(1)), "difference_by_place": {
            "edges": bins(M), **with_error("difference", in_bins(losses) - in_bins(before))}}
    return out


def measure(lm, rows, lengths, trained, chunk, batch_size):
    """([a record per length], state norms at the longest) of rows (K, M + 1) of tokens; trained: the training length.

    A length for which memory runs out, and what is longer, has only 'left_out', the reason.
    """
    measured, reference, device, longest = [], None, lm.embed.weight.device, lengths[-1]
    few = min(chunk, lengths[0])
    read_length(lm, rows[:1, : few + 1], few, chunk, 1)  # what is built, loaded and started once is not in the times
    for T in lengths:
        peak, began = Peak(device), time.perf_counter()
        try:
            losses, held = read_length(lm, rows, T, chunk, batch_size)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = (f"memory ran out at {T} tokens ({in_one_line(error)}): take a smaller --batch_size "
                      f"({batch_size}) or --chunk ({chunk})")
            print(f"  {T:7} left out: {reason}")
            return measured + [{"length": left, "left_out": reason} for left in lengths if left >= T], {}
        row = summary(losses, T, reference)
        if T == trained or not measured and trained not in lengths:
            reference = T, losses
        seconds = time.perf_counter() - began
        row |= {"state_bytes_per_sequence": held, "seconds": seconds, "tokens_per_second": row["tokens"] / seconds,
                "peak_bytes": peak.bytes()}
        measured.append(row)
        print(f"  {T:7}  loss {row['loss']:.4f} +- {row['loss_standard_error']:.4f}, "
              f"perplexity {row['perplexity']:.3f}, {row['tokens_per_second']:,.0f} tokens/s", flush=True)
    # separately, in other pieces: what was measured above is of whole chunks
    at = sorted(p for p in {longest, trained, *(16 << i for i in range(24))} if p <= longest)
    return measured, state_norms(lm, rows[:: -(-len(rows) // NORM_SEQUENCES)], at, chunk)


def limited(lm, window):
    """The same weights with attention to the last `window` tokens only, where LLaMA's sees the whole past."""
    changed = {key: re.sub(r"\bllama\b", "swa", getattr(lm.config, key)) for key in ("model", "pattern")}
    other = LM(dataclasses.replace(lm.config, window=window, **changed))
    other.load_state_dict(lm.state_dict())
    return other.to(lm.embed.weight.device).eval()


def evaluate(folder, args, run):
    """The records of one run's checkpoint: as trained, and with limited attention where it has any; `run`: its name.
    Raises ConfigError, one line."""
    began, device = time.perf_counter(), named_device(args.device)
    lm, meta = load_model(folder, device)
    with fields(f"{folder}: its records"):
        dtype, dataset = pick_dtype(meta["config"]["dtype"], device), args.dataset or str(meta["config"]["dataset"])
        checkpoint = {**{k: meta[k] for k in ("step", "tokens", "data")}, "block_size": lm.config.block_size,
                      "code": (meta.get("code_versions") or ["unknown"])[-1],
                      "parameters": sum(p.numel() for p in lm.parameters()), "seed": meta["config"]["seed"]}
    data_folder, trained = find_dataset(dataset), lm.config.block_size
    data = Tokens(data_folder, vocab_size=lm.config.vocab_size)
    same = data.sha256 == meta["data"]
    if not same and not args.dataset:
        raise ConfigError(f"the data in {data_folder} is not what {folder} was trained on (its sha256 differs), and "
                          "may hold its training text: prepare it as before, or name other text with --dataset")
    documents, limit = (data.meta.get("documents") or {}).get("val"), len(data.val) - 1
    inside = max((d["tokens"] for d in documents or ()), default=limit + 1) - 1  # the default stays within documents
    default = [trained << i for i in range(5) if not i or trained << i <= min(inside, limit)]
    lengths = check_lengths(args.lengths or default, limit, data_folder / "val.bin")
    starts, names = longest_sequences(len(data.val), documents, lengths[-1], args.eval_tokens)
    rows = torch.from_numpy(np.stack([data.val[s:s + lengths[-1] + 1] for s in starts]).astype(np.int64))  # (K, M + 1)
    batch_size = args.batch_size or (8 if device.type == "cuda" else 1)
    text = {"dataset": data_folder.name, "val_sha256": data.sha256["val"], "trained_on_this_data": same,
            "starts": starts, "sequences": len(starts), "longest": lengths[-1], "documents": names,
            "sha256": hashlib.sha256(rows.numpy().astype("<u4").tobytes()).hexdigest()}
    records, models = [], {run: lm}
    if "llama" in lm.config.families:
        models[f"{run}, last {trained} tokens"] = limited(lm, trained)
    for name, model in models.items():
        print(f"{name}, trained at {trained}: {in_words(text)}, {args.chunk} tokens at a time"
              f"{'' if same else '; NOT the data it was trained on'}", flush=True)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32, cache_enabled=False):
            results, norms = measure(model, rows, lengths, trained, args.chunk, batch_size)
        record = new_record("extrapolation", family=lm.config.pattern or lm.config.model, run=name)
        ran_on = torch.cuda.get_device_name() if device.type == "cuda" else record["environment"]["cpu"]
        records.append(record | {
            "device": ran_on, "threads": torch.get_num_threads(), "dtype": str(dtype).removeprefix("torch."),
            "chunk": args.chunk, "batch_size": batch_size, "text": text, "lengths": results, "state_norms": norms,
            "checkpoint": checkpoint, "finished": True, "seconds": time.perf_counter() - began})
    return records


def in_words(text):
    return (f"{text['sequences']} sequences of {text['longest']} tokens of {text['dataset']}, "
            + ("within documents (packages of files)" if text["documents"] else "end to end, across documents"))


# --------------------------------------------------------------------------------------------------------------- report

def mib(n_bytes, digits=3):
    return f"{np.float64(n_bytes) / 2**20:.{digits}f}"  # None is NaN


def by_name(runs):
    """{run's name without the seed: its rows, one per seed}"""
    groups = {}
    for r in runs.itertuples():
        groups.setdefault(re.sub(r", seed \d+", "", r.run), []).append(r)
    return groups


def read_at(seeds, T):
    """The measurements at length T, for the seeds that were read that far."""
    return [x for r in seeds for x in r.lengths if x["length"] == T and "left_out" not in x]


def perplexity(measured):
    """A table cell: perplexity over the seeds at a length, the loss if there are several, and the loss minus that at
    the training length."""
    loss, error = mean_and_error([x["loss"] for x in measured])
    cell = f"{np.exp(loss):.3f}" + f", loss {loss:.3f} \u00b1 {error:.3f}" * (len(measured) > 1)
    if all("against" in x for x in measured):
        change, error = mean_and_error([x["difference"] for x in measured])
        error = measured[0]["difference_standard_error"] if len(measured) == 1 else error
        cell += f" ({change:+.3f} \u00b1 {np.float64(error):.3f})"
    return cell


def differences(groups, lengths):
    """Rows of a table: loss of one run minus that of another, with Welch's 95% interval over their seeds."""
    rows = []
    for (a, first), (b, second) in itertools.combinations(groups.items(), 2):
        losses = {T: [np.array([x["loss"] for x in read_at(seeds, T)], float) for seeds in (second, first)]
                  for T in lengths}
        if all(min(len(x), len(y)) > 1 for x, y in losses.values()):
            rows.append({"loss, 95% interval over the seeds": f"{b} minus {a}"} | {
                f"T = {T}": "{:+.3f} ({:+.3f} .. {:+.3f})".format(*welch(x, y)[:3]) for T, (x, y) in losses.items()})
    return rows


def cost(name, run):
    """[row] of the table of costs, at the longest length that was read; [] if none was."""
    measured, loud = [x for x in run.lengths if "left_out" not in x], loudest(run.state_norms)
    return [{"run": name, "T": x["length"],
             "state at the shortest T, MiB per sequence": mib(measured[0]["state_bytes_per_sequence"]),
             "at this T": mib(x["state_bytes_per_sequence"]), "peak, MiB": mib(x["peak_bytes"], 0),
             "tokens/s": f"{x['tokens_per_second']:,.0f}",
             **{key: f"{loud[p]:.3g}" if p in loud else "-" for key, p in (
                 ("RMS of the state at the training length", run.block_size), ("RMS at this T", x["length"]))}}
            for x in measured[-1:]]


def page(runs, groups, picture):
    """The page as blocks of Markdown: perplexity at each length, differences over seeds, memory and speed."""
    lengths = sorted({x["length"] for lengths in runs.lengths for x in lengths})
    table = [{"run": name, "trained at": seeds[0].block_size} | {
        f"T = {T}": perplexity(at) if len(at := read_at(seeds, T)) == len(seeds) else "-" for T in lengths}
        for name, seeds in groups.items()]
    cut = lambda key: 10 if key in ("time", "commit") else None
    of_all = lambda key: " and ".join(dict.fromkeys(str(value or "none")[:cut(key)] for value in runs[key]))
    first, most, texts = next(runs.itertuples()), max(map(len, groups.values())), {text["sha256"] for text in runs.text}
    return [
        "# Extrapolation", picture, pages.table(table),
        "Perplexity; in brackets the loss minus the loss at the training length (or else the shortest), in nats, "
        "paired, with its standard error over seeds, as for the loss, or over sequences where there is one seed.",
        *(pages.escaped(f"Left out: {r.run} at {x['length']}: {x['left_out']}.")
          for r in runs.itertuples() for x in r.lengths if "left_out" in x),
        pages.table(differences(groups, lengths)),
        pages.table([row for name, seeds in groups.items() for row in cost(name, seeds[0])]), pages.escaped(
            in_words(first.text) + "; NOT all curves are of the same text: do not compare them" * (len(texts) > 1)
            + f". {of_all('device')}, {of_all('threads')} threads, {of_all('dtype')}, torch {of_all('torch')}, "
            f"{of_all('time')}, commit {of_all('commit')}; "
            f"{'one training run' if most == 1 else f'up to {most} training seeds'} each, "
            f"code {', '.join(sorted(runs.code.unique()))}.")]


def loudest(state_norms):
    """{position: largest RMS of the branches' states, NaN if one is not finite}."""
    branches = list(state_norms.values())
    rms = np.array([branch["rms"] for branch in branches], float)
    return dict(zip(branches[0]["positions"], rms.max(0).tolist(), strict=True)) if branches else {}


def draw(groups, path):
    """Perplexity against T (Figure 1, right); loss by position; gain from the longer past; RMS of the state."""
    from matplotlib.ticker import LogFormatter

    plain = lambda value, _: f"{value:.6g}"
    middles = lambda by: [math.sqrt(max(1, a) * b) for a, b in zip(by["edges"][:-1], by["edges"][1:], strict=True)]

    def curve(axis, x, y, error, style, shown=lambda v: v):
        y, error = np.array(y, float), np.array(error, float)  # None is NaN, a hole
        axis.plot(x, shown(y), **style)
        axis.fill_between(x, shown(y - error), shown(y + error), color=style["color"], alpha=0.12, lw=0)

    labels = (("sequence length T", "perplexity, with its standard error over sequences"),
              ("position in the longest sequence", "loss (nats per token)"),
              ("place in the longest sequence", "loss at the longest T minus at the training length"),
              ("position in the longest sequence", "RMS of the state, largest of the branches"))
    first = next(iter(groups.values()))[0]
    with pages.figure(path, 2, 2, 6.5, 4.5) as (figure, ((length, position), (gain, norm))):
        for i, (name, seeds) in enumerate(groups.items()):
            for r in seeds:
                style = dict(color=f"C{i}", marker="o", ms=3.5, lw=2.4 if r.family == "longhorn" else 1.3)
                if measured := [x for x in r.lengths if "left_out" not in x]:
                    columns = [[x[k] for x in measured] for k in ("length", "loss", "loss_standard_error")]
                    ended = " (memory ended)" * (len(measured) < len(r.lengths))
                    curve(length, *columns, style | ({"label": name + ended} if r is seeds[0] else {}), np.exp)
                    by = measured[-1]["by_position"]
                    curve(position, middles(by), by["loss"], by["loss_standard_error"], style)
                    if by := measured[-1].get("difference_by_place"):
                        curve(gain, middles(by), by["difference"], by["difference_standard_error"], style)
                loud = loudest(r.state_norms)
                norm.plot(list(loud), list(loud.values()), **style)
        for axis, (x, y) in zip((length, position, gain, norm), labels, strict=True):
            axis.set_xscale("log", base=2)
            positive = np.isfinite(axis.yaxis.get_minpos())  # attention has no state to show, and losses may be NaN
            axis.set(xlabel=x, ylabel=y, yscale="log" if axis in (length, norm) and positive else "linear")
            for trained in sorted({r.block_size for seeds in groups.values() for r in seeds}):
                axis.axvline(trained, color="black", ls="--", lw=0.9)
            axis.xaxis.set_major_formatter(plain)
        length.yaxis.set_minor_formatter(plain)
        if norm.get_yscale() == "log":
            norm.yaxis.set_minor_formatter(LogFormatter())  # only where there is room
        for axis in (length, norm):
            axis.yaxis.set_major_formatter(plain)
        if length.get_legend_handles_labels()[0]:
            length.legend(fontsize=8)
        figure.suptitle(f"trained at the dashed length; {in_words(first.text)}; {first.device}, {first.time[:10]}",
                        fontsize=10)
        figure.tight_layout()


def report(path):
    """Print the page for a file of records, and write it beside the file, with the figure."""
    paths = pages.report("extrapolation", by_name, page, draw, "perplexity, loss by position, states", path)
    print(f"{paths['md'].read_text(encoding='utf-8')}\npicture: {paths['png']}, table: {paths['md']}")


# ----------------------------------------------------------------------------------------------------------------- main

def parse(argv):
    if argv and argv[0].startswith("--") and argv[0] != "--help":
        argv = ["eval", *argv]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="eval | run | report")
    one, several, again = (commands.add_parser(n) for n in ("eval", "run", "report"))
    one.add_argument("--checkpoint", nargs="+", required=True, help="folders of runs, each with checkpoint.safetensors")
    one.add_argument("--lengths", type=numbers(int), default=(), help="tokens, by commas (1 to 16 times trained)")
    one.add_argument("--eval_tokens", type=int, help="tokens to predict at each length (all there are)")
    one.add_argument("--dataset", default="", help="a prepared folder, or its name in data/ (that of training)")
    several.add_argument("families", nargs="*", metavar="FAMILY", help="instead of the preset's: a family or pattern, "
                         "also with settings of its own, as in deltanet@step=implicit")
    several.add_argument("--preset", choices=list(PRESETS), required=True)
    several.add_argument("--seeds", type=numbers(int, least=0), default=(), help="one run for each (the preset's)")
    runner.add_options(several, "the preset's")
    for p, name in ((one, "extrapolation"), (several, "extrapolation_PRESET")):
        p.add_argument("--out", help=f"the record file (out/{name}.json)")
        p.add_argument("--save", action="store_true", help=f"write it to results/{name}.json")
        p.add_argument("--chunk", type=int, default=1024, help="tokens read at a time (%(default)s)")
        p.add_argument("--batch_size", type=int, help="sequences at a time (1, on a GPU 8)")
        p.add_argument("--device", default="auto", help="cpu or cuda (a GPU if there is one)")
    again.add_argument("file", help="the record that eval or run wrote")
    parser.set_defaults(chunk=None, batch_size=None)
    args = parser.parse_args(argv)
    check_numbers(parser, args, "chunk", "batch_size")
    return args


def record_file(args, name):
    """--out, with --save results/<name>.json, else out/<name>.json. Raises ConfigError where it cannot be written."""
    out = Path(args.out or ROOT / ("results" if args.save else "out") / f"{name}.json").resolve()
    if out.suffix != ".json":
        raise ConfigError(f"--out={args.out}: name a .json file; the table and the picture go beside it")
    check_out(out)  # before the first model is read
    return out


def read_runs(runs, args, out):
    """Evaluate the checkpoints of {name: folder}, each added to the file `out` in the place of its records; report."""
    for name, folder in runs.items():
        records = evaluate(folder, args, name)
        old = lambda r, run=name: r["run"] == run or r["run"].startswith(f"{run}, last ")  # see `evaluate`
        with fields(f"{out}: its records"):
            others = [r for r in read_json(out)["extrapolation"] if not old(r)] if out.exists() else []
        write_record(out, {"extrapolation": [*others, *records]})
    pages.after_sweep(report, out, "experiments/extrapolation.py")


def run(args):
    """Train a preset's families, read on with each, report. What has been trained is not trained again."""
    from data.pystdlib.prepare import prepare

    preset, name = PRESETS[args.preset], f"extrapolation_{args.preset}"
    cells = plan(args.preset, args.families, args.seeds)
    out, runs = record_file(args, name), ROOT / "out" / name
    prepare(ROOT / "data" / CORPUS, documents="package")
    jobs, gpus, _ = runner.placement(args)
    with runner.driver(args, runs, args.jobs or preset["jobs"] * (not args.cluster), gpus=gpus) as engine:
        runner.write_plan(runs, cells, preset=args.preset)  # refuses other arguments than a run began with
        failed = runner.run_cells(cells, runs, engine)
    code = runner.say_failed(failed, cells)
    args.lengths, args.eval_tokens, args.dataset = preset["lengths"], preset["eval_tokens"], ""
    read_runs({c.at["run"]: runs / c.name for c in cells if c.name not in failed}, args, out)
    return code


def main(argv):
    args = parse(argv)
    if args.command == "report":
        return report(args.file)
    if args.command == "run":
        return run(args)
    runs = {Path(folder).resolve().name: folder for folder in args.checkpoint}
    if len(runs) < len(args.checkpoint):
        raise ConfigError(f"--checkpoint: two folders of {', '.join(args.checkpoint)} have one name, and so would "
                          "their records: use two --out")
    read_runs(runs, args, record_file(args, "extrapolation"))


if __name__ == "__main__":
    with main_error("experiments/extrapolation.py"):
        try:
            sys.exit(main(sys.argv[1:]))
        except KeyboardInterrupt:
            sys.exit("experiments/extrapolation.py: interrupted; records of the runs that were read are kept")
