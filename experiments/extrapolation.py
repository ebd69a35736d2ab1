"""Do models read on beyond the length that they were trained at? Section 5.4, and Figure 1 on the right.

    python experiments/extrapolation.py --checkpoint out/longhorn_laptop out/llama_laptop --lengths=256,1024,4096
    python experiments/extrapolation.py run --preset=laptop     # trains seven families at 256, reads on to 16384: an hour of 2 cores
    python experiments/extrapolation.py run --preset=gpu        # at 2048, on to 65536: 20 minutes of an H200, by count of FLOPs
    python experiments/extrapolation.py report results/extrapolation_laptop     # the picture and the table again, from the records

Records go to out/, with --save to results/.

The paper rearranges validation text into sequences of each length T. So here, and of the same text: K sequences of the longest
length are cut into K M / T of length T, so that each token is predicted once at every T, from more or less of what stands before
it, and nothing but that differs. Longest sequences lie within one document where the corpus says where documents begin
(data/pystdlib/prepare.py --documents=package) and any is long enough; else they lie end to end over all of the split.

    loss(T) = mean of K sequences' mean losses, its spread s / sqrt(K); against the training length paired, by sequence

Text is read in chunks, the state carried from one to the next: memory grows with T for no family but LLaMA, whose cache is its
state. What it needs is reckoned beforehand; where there is not so much, that length is left out and says why.

The surprise: a lower loss at a longer T says little about a long memory, since of a short T's tokens more stand near a beginning,
where nothing can be known yet. Loss by position in the longest T tells more, and what most: the same tokens' loss there less
their loss when cut at the training length, place by place, for then no easy stretch of text can pass for memory. And where a
model fails, the norm of its state along the text often says why.

No part of this file has run on a GPU yet: the 20 minutes there are reckoned from FLOPs, not measured.
"""

import argparse
import contextlib
import datetime
import hashlib
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.generate import state_bytes  # noqa: E402
from bench.measure import DTYPES, finite, in_one_line, refuse_uncommitted  # noqa: E402
from bench.scan import peak_since_reset, reset_peak  # noqa: E402
from checkpoint import CheckpointError  # noqa: E402
from configurator import ConfigError, main_error  # noqa: E402
from data.loader import DataError, Tokens  # noqa: E402
from experiments.scaling.sweep import need_pictures  # noqa: E402
from faults import out_of_memory  # noqa: E402
from mixers import RWKV4TimeMix  # noqa: E402
from records import environment, write_json  # noqa: E402
from sample import load_model  # noqa: E402

GIB = 2**30
FIRST_NORM, NORM_SEQUENCES = 16, 8  # the first position at which states are measured, and of how many sequences at most
FAMILIES = ("longhorn", "mamba", "llama", "gla", "retnet", "rwkv", "deltanet")  # Table 1's, and the contrast of Section 5.4
CORPUS = "pystdlib_packages"
PRESETS = {
    # 1.5M parameters, 2.0M tokens each; reading 7 x 262,144 tokens takes a minute or so, LLaMA more
    "laptop": {"jobs": 2, "lengths": [256 << i for i in range(7)], "eval_tokens": 262144, "train": dict(
        block_size=256, max_iters=2000, eval_interval=1000, eval_tokens=65536, final_eval_tokens=262144, eval_block_size=256,
        eval_batch_size=32)},
    # 20M parameters, 39M tokens: 5e15 FLOPs a family, 100 s at a twentieth of an H200's peak; reading them is 3e14 a family
    "gpu": {"jobs": 1, "lengths": [2048 << i for i in range(6)], "eval_tokens": 0, "train": dict(
        n_layer=6, n_embd=512, n_head=8, d_state=16, mlp_multiple=512, block_size=2048, batch_tokens=65536, batch_size=16,
        max_iters=600, learning_rate=1e-3, eval_interval=300, eval_tokens=262144, eval_block_size=2048, eval_batch_size=16)},
}


def plan(preset):
    """[(name, arguments of train.py)] of a preset's families. Pure."""
    given = [f"--{key}={value}" for key, value in {"dataset": CORPUS, **PRESETS[preset]["train"]}.items()]
    return [(family, [f"config/{family}_laptop.py", *given]) for family in FAMILIES]


# -------------------------------------------------------------------------------------------------------------- the text

def check_lengths(lengths, limit, where):
    """Sorted lengths. Raises ConfigError where one is too long or does not divide the longest."""
    lengths = sorted(set(lengths))
    if not lengths or lengths[0] < 1:
        raise ConfigError(f"--lengths={','.join(map(str, lengths))}: give at least one length of 1 token or more")
    if lengths[-1] > limit:
        raise ConfigError(f"--lengths: {lengths[-1]} is longer than {where} ({limit + 1:,} tokens; a sequence needs its length + "
                          "1): choose shorter ones, or prepare more data")
    odd = [T for T in lengths if lengths[-1] % T]
    if odd:
        raise ConfigError(f"--lengths: {odd[0]} does not divide the longest, {lengths[-1]}, and both must be cut from the same "
                          "tokens: choose one that does")
    return lengths


def longest_sequences(n_tokens, documents, longest, eval_tokens=0):
    """Where the longest sequences begin: (starts in order, the names of their documents or None where they straddle).

    A sequence reads `longest` tokens and predicts the one after each, so that it takes longest + 1, and neighbours share one.

    Args:
        n_tokens: of the split; documents: [{'name', 'start', 'tokens'}] or None; longest: tokens a sequence.
        eval_tokens: predict at most so many tokens, of sequences taken from all documents in turn; 0: all there are.
    """
    of = [(d["start"] + i * longest, i, d["name"]) for d in documents or () for i in range((d["tokens"] - 1) // longest)]
    straddle = not of
    if straddle:
        of = [(i * longest, i, None) for i in range((n_tokens - 1) // longest)]
    n = min(len(of), eval_tokens // longest) if eval_tokens else len(of)
    if n < 1:
        raise ConfigError(f"--eval_tokens={eval_tokens} is less than one sequence of the longest length, {longest}: give more")
    if straddle:
        chosen = [of[i * len(of) // n] for i in range(n)]  # evenly over the split
    else:
        chosen = sorted(sorted(of, key=lambda s: (s[1], s[0]))[:n])  # each document's first, then each one's second ...
    return [s[0] for s in chosen], None if straddle else [s[2] for s in chosen]


def bins(T):
    """(edges, the bin of each position (T,)): 0, 1, 2, 4, 8 ... T; bin b holds the positions edges[b] <= p < edges[b + 1]."""
    edges = [0] + [1 << i for i in range((T - 1).bit_length())] + [T]
    return edges, torch.from_numpy(np.searchsorted(edges, np.arange(T), side="right") - 1)


# --------------------------------------------------------------------------------------------------------------- reading

def piece_ends(T, chunk, also=()):
    """Where the pieces end that T tokens are read in: every `chunk`, and at the positions in `also`."""
    return sorted({T, *range(chunk, T, chunk), *(p for p in also if 0 < p < T)})


@torch.no_grad()
def read(lm, x, y, ends, autocast=contextlib.nullcontext):
    """Yields (end, losses (B, tokens of the piece) float32, state) piece by piece: x, y (B, T); logits of one piece at a time."""
    state, start = lm.initial_state(len(x)), 0
    for end in ends:
        with autocast():
            logits, _, state = lm(x[:, start:end], state=state)  # (B, t, V)
        losses = F.cross_entropy(logits.float().flatten(0, 1), y[:, start:end].flatten(), reduction="none").view(len(x), -1)
        del logits  # else it would stand beside the next piece's
        yield end, losses, state
        start = end


def recurrent(branch, state):
    """The recurrence's part of a branch's state, (B, ...), or None.

    Left out: what grows with the text (a cache), and the last tokens that convolutions and token shifts look back at. RWKV-4
    keeps numerator and denominator over a common exponent that moves; what its output is made of is their ratio.
    """
    if isinstance(branch, RWKV4TimeMix):
        return state[1] / state[2]
    last = lambda s: s[-1] if isinstance(s, tuple) and s else s
    state, first = last(state), last(branch.initial_state(1, "cpu"))
    return state if isinstance(state, torch.Tensor) and state.dim() > 2 and state.shape[1:] == first.shape[1:] else None


def read_length(lm, rows, T, chunk, batch_size, autocast=contextlib.nullcontext):
    """Reads K rows (K, M + 1) of tokens as K M / T sequences of length T, of a T below the chunk more at once than `batch_size`,
    so that a call has as many tokens whatever T is.

    Returns: {'loss' (K,): each row's mean in nats, float64; 'by_position' (K, bins): by position in its sequences of T;
    'by_place' (K, bins): by place in the row, whatever T is; 'state_bytes': of one sequence at its end}. Bins: see `bins`.
    """
    K, M, device = len(rows), rows.shape[1] - 1, lm.embed.weight.device
    x, y = rows[:, :-1].reshape(-1, T), rows[:, 1:].reshape(-1, T)  # (K M / T, T)
    (edges, bin_of), (places, place_of) = bins(T), bins(M)
    sums, placed = (torch.zeros(K, len(e) - 1, dtype=torch.float64) for e in (edges, places))
    B, held = batch_size * max(1, chunk // T), 0
    for at in range(0, len(x), B):
        part, start = slice(at, at + B), 0
        i = torch.arange(at, min(at + B, len(x)))[:, None]  # (b, 1)
        row, offset = i * T // M, i * T % M  # of each sequence: the row that it was cut from, and where
        for end, losses, state in read(lm, x[part].to(device), y[part].to(device), piece_ends(T, chunk), autocast):
            losses = losses.double().cpu()  # (b, t)
            sums.index_put_((row, bin_of[start:end].expand_as(losses)), losses, accumulate=True)
            placed.index_put_((row, place_of[offset + torch.arange(start, end)]), losses, accumulate=True)
            start, held = end, state_bytes(state)[0] // len(losses)
            del state
    sums, placed = sums.numpy(), placed.numpy()
    return {"loss": sums.sum(1) / M, "by_position": sums / np.diff(edges) / (M // T), "by_place": placed / np.diff(places),
            "state_bytes": held}


def state_norms(lm, rows, positions, chunk, autocast=contextlib.nullcontext):
    """{'0 Longhorn': {'positions', 'rms', 'max'}} of every branch with a recurrence, after so many tokens of the rows: the root
    mean square of a row's state, its mean over the rows, and the largest absolute value. {} for a family without."""
    found, device = {}, lm.embed.weight.device
    ends = piece_ends(positions[-1], chunk, positions)
    for end, _, state in read(lm, rows[:, :-1].to(device), rows[:, 1:].to(device), ends, autocast):
        states = {f"{i} {type(r.branch).__name__}": recurrent(r.branch, s)
                  for i, (r, s) in enumerate(zip(lm.branches, state, strict=True))}
        if all(s is None for s in states.values()):
            return {}
        for name, s in states.items():
            if s is not None and end in positions:
                s = s.double().flatten(1)
                values = {"positions": end, "rms": s.square().mean(1).sqrt().mean().item(), "max": s.abs().max().item()}
                for key, value in values.items():
                    found.setdefault(name, {}).setdefault(key, []).append(value)
    return found


# ---------------------------------------------------------------------------------------------------------------- memory

def available_memory(device):
    """Bytes that may still be had on the device: of the machine, or of the control group where that allows less."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = []
    with contextlib.suppress(OSError, StopIteration):
        line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
        found.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):  # 'max' is no number: no limit
        group = Path("/sys/fs/cgroup")
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return min(found, default=math.inf)


def needed_bytes(lm, T, batch_size, chunk, dtype):
    """What reading to T takes beside weights and activations: the state twice, since a call makes the new one beside the old,
    and where it grows with T the mask of attention's last chunk, as truth values and as numbers."""
    grows = lm.state_size(2 * T) > lm.state_size(T)  # a cache has the dtype of the products, a recurrence float32
    itemsize = torch.finfo(dtype).bits // 8 if grows else 4
    B = batch_size * max(1, chunk // T)
    return 2 * B * lm.state_size(T) * itemsize + grows * (T > chunk) * chunk * T * (1 + itemsize)


def reset(device):
    """Starts the peak of memory anew; returns what `peak_above` takes."""
    if device.type != "cuda":
        return reset_peak()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_above(before, device):
    """Bytes at the most since `reset`, above what there was; None where the system does not tell."""
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_since_reset()
    return None if peak is None or before is None else peak - before


# ------------------------------------------------------------------------------------------------------------- a checkpoint

def standard_error(values):
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan


def mib(row, spec, key="state_bytes_a_sequence"):
    return "-" if row[key] is None else format(row[key] / 2**20, spec)


def perplexity(loss):
    return math.exp(loss) if loss < 700 else math.inf if loss == loss else math.nan


def summary(found, T, longest, reference=None):
    """One length's numbers for the record, of what `read_length` found; `reference`: (length, what was found) to compare with."""
    def spread(name, values):  # (K,) or (K, bins)
        error = [standard_error(column) for column in np.atleast_2d(values.T).tolist()]
        return {name: values.mean(0).tolist(), f"{name}_standard_error": error if values.ndim > 1 else error[0]}

    each = found["loss"]
    out = {"length": T, "sequences": len(each) * (longest // T), "tokens": len(each) * longest, **spread("loss", each),
           "perplexity": perplexity(float(each.mean())), "state_bytes_a_sequence": found["state_bytes"],
           "losses_of_longest_sequences": each.tolist(),
           "by_position": {"edges": bins(T)[0], **spread("loss", found["by_position"])}}
    if reference:
        before = reference[1]
        out |= {"against": reference[0], **spread("difference", each - before["loss"]), "difference_by_place": {
            "edges": bins(longest)[0], **spread("difference", found["by_place"] - before["by_place"])}}
    return out


def measure(lm, rows, lengths, trained, chunk, batch_size, dtype, limit, say=print):
    """([one record a length], state norms at the longest): see `summary`; a length left out has 'left_out', the reason."""
    device = lm.embed.weight.device
    autocast = lambda: torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    found, states, reference, base = [], {}, None, trained if trained in lengths else lengths[0]
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    some = rows[:1, : min(chunk, lengths[0]) + 1].to(device)
    for _ in read(lm, some[:, :-1], some[:, 1:], [some.shape[1] - 1], autocast):
        pass  # what is built, loaded and started once is not in the times
    for T in lengths:
        need, reason = needed_bytes(lm, T, batch_size, chunk, dtype), None
        if found and "left_out" in found[-1]:
            reason = f"memory ended at {next(f['length'] for f in found if 'left_out' in f)} tokens already"
        elif need > limit:
            reason = (f"about {need / GIB:.3g} GiB needed for the state, {limit / GIB:.3g} GiB available: give more with "
                      f"--memory_limit, or take a smaller --batch_size ({batch_size}) or --chunk ({chunk})")
        else:
            before = reset(device)
            began = time.perf_counter()
            try:
                got = read_length(lm, rows, T, chunk, batch_size, autocast)
                wait()
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                reason = f"memory ended while reading ({in_one_line(error)}): take a smaller --batch_size ({batch_size})"
                got = error = None
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        if reason:
            found.append({"length": T, "left_out": reason})
            say(f"  {T:7} left out: {reason}")
            continue
        seconds = time.perf_counter() - began
        row = summary(got, T, lengths[-1], reference)
        reference = (T, got) if T == base else reference
        row |= {"seconds": seconds, "tokens_per_second": row["tokens"] / seconds, "peak_bytes": peak_above(before, device),
                "reckoned_state_bytes": need}
        found.append(row)
        change = f"{row['difference']:+.4f} +- {row['difference_standard_error']:.4f}" if "against" in row else ""
        say(f"  {T:7}  loss {row['loss']:.4f}  perplexity {row['perplexity']:8.3f}  {change:19}  state {mib(row, '.3f')} MiB a "
            f"sequence, peak {mib(row, '.0f', 'peak_bytes')} MiB, {row['tokens_per_second']:,.0f} tokens/s")
        if T == lengths[-1]:  # a pass of its own, in other pieces: what was measured above is of whole chunks
            at = sorted(p for p in {T, trained, *(1 << i for i in range(T.bit_length()))} if min(FIRST_NORM, T) <= p <= T)
            states = state_norms(lm, rows[:: -(-len(rows) // NORM_SEQUENCES)], at, chunk, autocast)
    return found, states


def evaluate(folder, args):
    """The record of one run's checkpoint. Raises ConfigError, DataError or CheckpointError, one line."""
    began = time.perf_counter()
    kind = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device=cuda: PyTorch sees no GPU; use --device=cpu")
    device = torch.device(kind)
    if args.threads:
        torch.set_num_threads(args.threads)
    lm, meta = load_model(folder, device)
    config = meta["config"]
    dtype = DTYPES[config["dtype"] if args.dtype == "auto" else args.dtype]
    name = args.dataset or config["dataset"]
    data_folder = Path(name) if Path(name).is_dir() else ROOT / "data" / name
    data = Tokens(data_folder, vocab_size=config["vocab_size"])
    same = data.sha256 == meta["data"]
    if not same and not args.dataset:
        raise ConfigError(f"the data in {data_folder} is not what {folder} was trained on (its sha256 differs), and may hold its "
                          "training text: prepare it as before, or name other text with --dataset")
    documents, limit = (data.meta.get("documents") or {}).get("val"), len(data.val) - 1
    inside = max((d["tokens"] for d in documents or ()), default=limit + 1) - 1  # by itself a length stays within documents
    by_itself = [config["block_size"] << i for i in range(5) if not i or config["block_size"] << i <= min(inside, limit)]
    lengths = check_lengths(args.lengths or by_itself, limit, data_folder / "val.bin")
    starts, names = longest_sequences(len(data.val), documents, lengths[-1], args.eval_tokens)
    rows = torch.from_numpy(np.stack([data.val[s:s + lengths[-1] + 1] for s in starts]).astype(np.int64))  # (K, M + 1)
    batch_size = args.batch_size or (8 if kind == "cuda" else 1)
    limit = args.memory_limit * GIB if args.memory_limit else available_memory(device)
    text = {"dataset": data_folder.name, "val_sha256": data.sha256["val"], "trained_on_this_data": same, "starts": starts,
            "sequences": len(starts), "longest": lengths[-1], "documents": names,
            "sha256": hashlib.sha256(rows.numpy().astype("<u4").tobytes()).hexdigest()}
    print(f"{config['model']} ({folder}), trained at {config['block_size']}: {in_words(text)}, {args.chunk} tokens at a time"
          + ("" if same else "; NOT the data it was trained on"), flush=True)
    results, states = measure(lm, rows, lengths, config["block_size"], args.chunk, batch_size, dtype, limit)
    ran = Path(folder) / "config.json"
    trained_by = json.loads(ran.read_text())["environment"] if ran.exists() else {}
    env = environment()
    return {
        "benchmark": "extrapolation", "finished": True, "family": config["model"], "run": Path(folder).resolve().name,
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"), "environment": env,
        "device": torch.cuda.get_device_name() if kind == "cuda" else env["cpu"], "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."), "chunk": args.chunk, "batch_size": batch_size, "memory_limit_bytes": limit,
        "checkpoint": {**{k: meta[k] for k in ("step", "tokens", "data")}, "commit": trained_by.get("commit"),
                       "parameters": lm.parameter_count()["total"], "block_size": config["block_size"], "seed": config["seed"]},
        "text": text, "lengths": results, "state_norms": states, "seconds": time.perf_counter() - began}


def in_words(text):
    return (f"{text['sequences']} sequences of {text['longest']} tokens of {text['dataset']}, "
            + ("within documents" if text["documents"] else "end to end, over the ends of documents"))


# ---------------------------------------------------------------------------------------------------------------- report

def read_records(folder):
    """The records of a folder, in the order of FAMILIES. Raises ConfigError where there is none."""
    found = []
    for path in sorted(Path(folder).glob("*.json")):
        with contextlib.suppress(ValueError, AttributeError):  # not JSON, or no table: another's
            record = json.loads(path.read_text())
            if record.get("benchmark") == "extrapolation":
                found.append(record)
    if not found:
        raise ConfigError(f"{folder} holds no record of this benchmark: give the folder that eval or run wrote to (--out)")
    order = lambda r: (FAMILIES.index(r["family"]) if r["family"] in FAMILIES else len(FAMILIES), r["family"], r["run"])
    return sorted(found, key=order)


def labels(found):
    """A curve's name: its family, and where one has several its run too."""
    families = [r["family"] for r in found]
    return [r["family"] if families.count(r["family"]) == 1 else f"{r['family']}, {r['run']}" for r in found]


def number(value, spec):
    return "not finite" if value is None else format(value, spec)


def table(found):
    """The records as Markdown: perplexity at each length with the paired difference of the loss, and what reading took."""
    lengths = sorted({x["length"] for r in found for x in r["lengths"]})
    lines = ["| family | trained at | " + " | ".join(f"T = {T}" for T in lengths) + " |", "|---" * (2 + len(lengths)) + "|"]
    holes = []
    for label, r in zip(labels(found), found, strict=True):
        cells, by = [], {x["length"]: x for x in r["lengths"]}
        for T in lengths:
            x = by.get(T, {"left_out": ""})
            if "left_out" in x:
                cells.append("left out" if x["left_out"] else "-")
                holes += [f"{label} at {T}: {x['left_out']}"] if x["left_out"] else []
            else:
                d, error = (number(x.get(k), spec) for k, spec in (("difference", "+.3f"), ("difference_standard_error", ".3f")))
                cells.append(number(x["perplexity"], ".3f") + (f" ({d} ± {error})" if "against" in x else ""))
        lines.append(f"| {label} | {r['checkpoint']['block_size']} | " + " | ".join(cells) + " |")
    lines += ["", "Perplexity; in brackets the loss less that at the training length, in nats, paired, ± its standard error.",
              *(f"Left out: {hole}." for hole in holes), "",
              "| family | T | state at the shortest T, MiB a sequence | at this T | peak, MiB | tokens/s | RMS of the state "
              "at the training length | at this T |", "|---" * 8 + "|"]
    for label, r in zip(labels(found), found, strict=True):
        read = [x for x in r["lengths"] if "left_out" not in x]
        if read:
            last, loud = read[-1], loudest(r)
            rms = [number(loud[p], ".3g") if p in loud else "-" for p in (r["checkpoint"]["block_size"], last["length"])]
            lines.append(f"| {label} | {last['length']} | {mib(read[0], '.3f')} | {mib(last, '.3f')} | "
                         f"{mib(last, '.0f', 'peak_bytes')} | {last['tokens_per_second']:,.0f} | {rms[0]} | {rms[1]} |")
    r, texts = found[0], {x["text"]["sha256"] for x in found}
    lines += ["", in_words(r["text"]) + ("" if len(texts) == 1 else "; NOT all curves are of the same text: do not compare them")
              + f". {r['device']}, {r['threads']} threads, {r['dtype']}, torch {r['environment']['torch']}, {r['date'][:10]}, "
              f"commit {(r['environment']['commit'] or 'none')[:10]}; one run of training each, of commit "
              + ", ".join(sorted({(x["checkpoint"]["commit"] or "none")[:10] for x in found})) + "."]
    return "\n".join(lines) + "\n"


def loudest(record):
    """{position: the largest RMS among the branches' states, None where one is not finite}."""
    found = {}
    for branch in record["state_norms"].values():
        for p, rms in zip(branch["positions"], branch["rms"], strict=True):
            known = found.get(p, 0.0)
            found[p] = None if rms is None or known is None else max(known, rms)
    return dict(sorted(found.items()))


def draw(found, path):
    """Perplexity against T (Figure 1, right), loss by position in the longest T and what the longer past gains at each place, and
    the RMS of the state. Returns the path."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ((length, position), (gain, norm)) = plt.subplots(2, 2, figsize=(13, 9), dpi=110)
    nan = lambda values: np.array([math.nan if v is None else v for v in values], float)
    middles = lambda by: [math.sqrt(max(1, a) * b) for a, b in zip(by["edges"][:-1], by["edges"][1:], strict=True)]
    for i, (label, r) in enumerate(zip(labels(found), found, strict=True)):
        style = dict(color=f"C{i}", marker="o", ms=3.5, lw=2.4 if r["family"] == "longhorn" else 1.3)

        def curve(axis, x, y, error, shown=lambda v: v, i=i, style=style):
            y, error = nan(y), nan(error)
            axis.plot(x, shown(y), **style)
            axis.fill_between(x, shown(y - error), shown(y + error), color=f"C{i}", alpha=0.12, lw=0)

        read = [x for x in r["lengths"] if "left_out" not in x]
        if read:
            columns = [[x[k] for x in read] for k in ("length", "loss", "loss_standard_error")]
            curve(length, *columns, shown=np.exp)
            length.lines[-1].set_label(label + (" (memory ended)" if len(read) < len(r["lengths"]) else ""))
            by = read[-1]["by_position"]
            curve(position, middles(by), by["loss"], by["loss_standard_error"])
            if by := read[-1].get("difference_by_place"):
                curve(gain, middles(by), by["difference"], by["difference_standard_error"])
        if loud := loudest(r):
            norm.plot(list(loud), nan(loud.values()), **style)
    for axis, x, y in ((length, "sequence length T", "perplexity, with its standard error over sequences"),
                       (position, "position in the longest sequence", "loss (nats per token)"),
                       (gain, "place in the longest sequence", "loss at the longest T less that at the training length"),
                       (norm, "position in the longest sequence", "RMS of the state, of the branch where it is largest")):
        axis.set_xscale("log", base=2)
        axis.set(xlabel=x, ylabel=y)
        axis.grid(alpha=0.3)
        for trained in sorted({r["checkpoint"]["block_size"] for r in found}):
            axis.axvline(trained, color="black", ls="--", lw=0.9)
    length.set_yscale("log"), norm.set_yscale("log")
    length.yaxis.set_minor_formatter(lambda y, _: f"{y:g}")
    length.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    length.legend(fontsize=8)
    r = found[0]
    figure.suptitle(f"trained at the dashed length; {in_words(r['text'])}; {r['device']}, {r['date'][:10]}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return path


def report(folder):
    found, folder = read_records(folder), Path(folder)
    (folder / "extrapolation.md").write_text(table(found))
    print(table(found) + f"\npicture: {draw(found, folder / 'extrapolation.png')}, table: {folder / 'extrapolation.md'}")


# ------------------------------------------------------------------------------------------------------------------ main

class Parser(argparse.ArgumentParser):
    """A wrong option is one line, without the usage above it."""

    def error(self, message):
        raise ConfigError(f"{message}; --help lists the options")


def parse(argv):
    argv = ["eval", *argv] if argv and argv[0].startswith("--") and argv[0] != "--help" else argv  # eval may be left out
    parser = Parser(prog="experiments/extrapolation.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_subparsers(dest="what", required=True, metavar="eval | run | report")
    one, all_of_it, again = (what.add_parser(n) for n in ("eval", "run", "report"))
    one.add_argument("--checkpoint", nargs="+", required=True, help="folders of runs, each with checkpoint.safetensors")
    one.add_argument("--lengths", type=whole_numbers, default=[], help="tokens, by commas (trained length x 1, 2, 4, 8, 16)")
    one.add_argument("--eval_tokens", type=int, default=0, help="tokens to predict at each length (0: all the text there is)")
    one.add_argument("--dataset", default="", help="a prepared folder, or its name in data/ (that of training)")
    one.add_argument("--out", default="", help="folder of the records (out/extrapolation)")
    all_of_it.add_argument("--preset", choices=list(PRESETS), required=True)
    all_of_it.add_argument("--runs", default="", help="folder of the runs of training (out/extrapolation_PRESET)")
    all_of_it.add_argument("--jobs", type=int, default=0, help="runs of training at a time (the preset's)")
    all_of_it.add_argument("--out", default="", help="folder of the records (that of the runs)")
    for p, name in ((one, "extrapolation"), (all_of_it, "extrapolation_PRESET")):
        p.add_argument("--save", action="store_true", help=f"write the records to results/{name}/")
        p.add_argument("--chunk", type=int, default=1024, help="tokens read at a time (%(default)s)")
        p.add_argument("--batch_size", type=int, default=0, help="sequences at a time (0: 1, on a GPU 8)")
        p.add_argument("--memory_limit", type=float, default=0.0, help="GiB for the state (0: what is available)")
        p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
        p.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="of matrix products (auto: as in training)")
        p.add_argument("--threads", type=int, default=0, help="of PyTorch and the kernels (0: PyTorch's choice)")
    again.add_argument("folder", help="where eval or run wrote the records")
    args = parser.parse_args(argv)
    for name, least in dict(chunk=1, batch_size=0, eval_tokens=0, memory_limit=0, threads=0, jobs=0).items():
        if not getattr(args, name, least) >= least:
            raise ConfigError(f"--{name}={getattr(args, name)} must be {least} or more")
    return args


def whole_numbers(text):
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers separated by commas, such as 2048,4096") from None


def records_folder(args, name, otherwise):
    """Where the records go: --out, with --save results/<name>, else `otherwise`. Raises ConfigError where they may not."""
    out = Path(args.out or (ROOT / "results" / name if args.save else otherwise))
    refuse_uncommitted(out)
    need_pictures()
    there = next(p for p in (out.resolve(), *out.resolve().parents) if p.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):  # said now, not after the first model has been read
        raise ConfigError(f"cannot write to {out}: choose another --out")
    return out


def save(folder, args, out):
    record = evaluate(folder, args)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / f"{record['run']}.json", finite(record))


def run(args):
    """Trains a preset's families, reads on with each, reports. What has been trained is not trained again."""
    from data.pystdlib.prepare import prepare
    from experiments.scaling.sweep import Cell, run_cells, same_commit, version, write_plan

    preset, name = PRESETS[args.preset], f"extrapolation_{args.preset}"
    runs = Path(args.runs or ROOT / "out" / name)
    out = records_folder(args, name, runs)
    prepare(ROOT / "data" / CORPUS, documents="package")
    cells = [Cell(name, argv) for name, argv in plan(args.preset)]
    write_plan(runs, cells, preset=args.preset, commit=version(same_commit(runs)))  # refuses what other code has begun
    failed = run_cells(cells, runs, args.jobs or preset["jobs"])
    for name, why in failed.items():
        print(f"{name} was not trained: {why}", file=sys.stderr)
    args.lengths, args.eval_tokens, args.dataset = preset["lengths"], preset["eval_tokens"], ""
    for name, _ in plan(args.preset):
        if name not in failed:
            save(runs / name, args, out)
    report(out)
    return int(bool(failed))


def main(argv):
    args = parse(argv)
    if args.what == "report":
        return report(args.folder)
    if args.what == "run":
        return run(args)
    names = [Path(folder).resolve().name for folder in args.checkpoint]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise ConfigError(f"--checkpoint: two folders are named {twice}, and so would their records be: give one another --out")
    out = records_folder(args, "extrapolation", ROOT / "out" / "extrapolation")
    for folder in args.checkpoint:
        save(folder, args, out)
    report(out)


if __name__ == "__main__":
    with main_error("experiments/extrapolation.py", CheckpointError, DataError, OSError):
        try:
            sys.exit(main(sys.argv[1:]))
        except KeyboardInterrupt:
            sys.exit("experiments/extrapolation.py: interrupted; records of the runs that were read stay")
