"""What a token costs after a long text: prefill and decode from the state, the state's bytes and the peak, of all families.

    python bench/generate.py                                               # contexts of 1K, 4K, 16K and 64K tokens
    python bench/generate.py --families=llama,longhorn --contexts=1024,8192 --out=record.json
    python bench/generate.py --device=cuda --size=350M --save              # results/generate_cuda_350m.json and .png

First each family's state is checked: a short text read in odd pieces and continued greedily must give the logits, and so the
tokens, of one forward pass over the whole; a family that fails is not timed. Then a text of random tokens is read in chunks
and, where it has each length, continued by --new_tokens most likely tokens, in bursts taken in turn by all families. LLaMA,
whose state is the cache of all keys and values, is the contrast. What would take more than --budget_s is left out, and said.

LLaMA's cache has room behind it, up to a quarter of its tokens, so that most new tokens copy nothing (mixers.append_to_cache).

The surprise: attention that reads in chunks needs a mask of (chunk, past + chunk) for each, so that LLaMA's peak while it
reads grows with --chunk times the context, beside the cache itself.

Each family is a process of its own, as in bench/step.py. Weights are random: the cost does not depend on them.
"""

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.measure import DTYPES, spread  # noqa: E402
from bench.scan import peak_since_reset, reset_peak  # noqa: E402
from bench.scan_cuda import LeftOut  # noqa: E402
from bench.step import (  # noqa: E402
    START_S,
    Worker,
    add_options,
    headline,
    load_average,
    model_config,
    record_path,
    settle,
    write,
)
from configurator import main_error  # noqa: E402
from model import LM, ModelConfig  # noqa: E402

TOLERANCE = 1e-4  # of the logits in float32, relative, by the 2-norm; all families stay below 1e-5
BURSTS = 4  # turns that a context's new tokens are cut into
PIECES = (31, 1, 16)  # of the check's text, before one token at a time


# ------------------------------------------------------------------------------------------------------------------ check

def tensors(state):
    """All tensors of a nested state."""
    if isinstance(state, torch.Tensor):
        return [state]
    return [t for part in state or () for t in tensors(part)]


def state_bytes(state):
    """(bytes of the state's numbers, bytes of the storages that it keeps alive)."""
    found = tensors(state)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return sum(t.numel() * t.element_size() for t in found), sum(storages.values())


@torch.no_grad()
def check(lm, dtype="float32", new_tokens=16):
    """Why text from the state is not what whole forward passes give, or None; and the relative error of the logits.

    Every new token must be the whole pass's most likely one, up to that error's tolerance. In bfloat16 the truth is the whole
    pass in float32, by the plain kernels, and the state may be four times as far off as the whole pass in bfloat16 is.
    """
    device, tolerance = lm.embed.weight.device, TOLERANCE
    autocast = torch.autocast(device.type, DTYPES[dtype], enabled=dtype != "float32")
    with autocast:
        text = torch.randint(lm.config.vocab_size, (2, sum(PIECES)), device=device)  # (2, T)
        state, seen = lm.initial_state(2), []
        for piece in text.split(PIECES, 1):
            logits, _, state = lm(piece, state=state, last_only=True)
        for _ in range(new_tokens):
            seen.append(logits[:, -1].float())
            text = torch.cat([text, seen[-1].argmax(-1, keepdim=True)], 1)
            logits, _, state = lm(text[:, -1:], state=state, last_only=True)
        whole = lm(text[:, :-1])[0][:, -new_tokens:].float()  # (2, new_tokens, V)
    got = torch.stack(seen, 1)
    if dtype != "float32":
        with device:
            plain = LM(replace(lm.config, kernel="torch", scan_backend="")).eval()
        plain.load_state_dict(lm.state_dict())
        true = plain(text[:, :-1])[0][:, -new_tokens:]
        whole, tolerance = true, max(tolerance, 4 * ((whole - true).norm() / true.norm()).item())
    error = ((got - whole).norm() / whole.norm()).item()
    if not error <= tolerance:  # NaN is not right
        return f"the state is wrong: logits {error:.1e} off those of a whole forward pass (at most {tolerance:.0e})", error
    chosen = whole.gather(-1, got.argmax(-1, keepdim=True))[..., 0]
    if (whole.max(-1).values - chosen > tolerance * whole.abs().amax(-1)).any():
        return "the state is wrong: a new token is not the most likely one of a whole forward pass", error
    return None, error


# ------------------------------------------------------------------------------------------------- one family, in a worker

class Reader:
    """A family and a text: what `bench.step.Worker` holds. spec: name, config, batch_size, device, dtype, threads, chunk."""

    def __init__(self, spec):
        self.spec, self.device = spec, torch.device(spec["device"])
        self.cuda, self.B = self.device.type == "cuda", spec["batch_size"]
        torch.set_num_threads(spec["threads"])
        torch.manual_seed(0)
        small = dict(n_layer=2, n_embd=128, n_head=2, vocab_size=256)
        with self.device:
            tiny = LM(ModelConfig(**vars(spec["config"]) | small)).eval()
            check(tiny, spec["dtype"])  # what is built, loaded and started once is not in the times
            self.lm = LM(spec["config"]).eval()
        wrong, self.error = check(self.lm, spec["dtype"])
        if wrong:
            raise LeftOut(wrong)
        self.state, self.logits = self.lm.initial_state(self.B), None
        self.past, self.seconds, self.chunks = 0, 0.0, []

    def about(self):
        return {"parameters": self.lm.parameter_count()["total"], "relative_error": self.error}

    def reset(self):
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            self.before = reset_peak()

    def peak(self):
        peak = torch.cuda.max_memory_allocated() if self.cuda else peak_since_reset()
        return None if peak is None or self.before is None else peak - self.before

    def forward(self, tokens, state):
        with torch.autocast(self.device.type, DTYPES[self.spec["dtype"]], enabled=self.spec["dtype"] != "float32"):
            logits, _, state = self.lm(tokens, state=state, last_only=True)
        token = logits[:, -1].argmax(-1, keepdim=True)  # (B, 1)
        token[0, 0].item()  # waits for the device
        return token, state

    @torch.no_grad()
    def read(self, context):
        """Goes on to a text of `context` tokens. 'seconds' are those of all of it, 'chunk_seconds' of each chunk so far."""
        self.next = self.token = self.later = None  # the last context's continuation
        self.reset()
        while self.past < context:
            size = min(self.spec["chunk"], context - self.past)
            g = torch.Generator().manual_seed(self.past)
            tokens = torch.randint(self.lm.config.vocab_size, (self.B, size), generator=g).to(self.device)
            start = time.perf_counter()
            self.token, self.state = self.forward(tokens, self.state)
            self.chunks.append(time.perf_counter() - start)
            self.past += size
        self.later = self.state
        numbers, held = state_bytes(self.state)
        return {"seconds": sum(self.chunks), "chunk_seconds": self.chunks, "state_bytes": numbers, "state_bytes_held": held,
                "peak_bytes": self.peak()}

    @torch.no_grad()
    def write(self, new_tokens):
        """Goes on from the text by the most likely tokens: 'seconds' of each. The text's own state stays as it was."""
        self.reset()
        seconds = []
        for _ in range(new_tokens):
            start = time.perf_counter()
            self.token, self.later = self.forward(self.token, self.later)
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds, "peak_bytes": self.peak()}


# --------------------------------------------------------------------------------------------------------------- contexts

def forecast(chunks, tokens, chunk):
    """Seconds that `tokens` more will take, from those of the chunks so far: as long as the last, or growing as they grew."""
    if not chunks:
        return 0.0
    last = statistics.median(chunks[-3:])
    growth = max(0.0, (last - statistics.median(chunks[:3])) / len(chunks)) if len(chunks) > 5 else 0.0
    n = -(-tokens // chunk)
    return n * last + growth * n * (n + 1) / 2


def measure(specs, contexts, new_tokens, budget_s, worker=Worker):
    """Rows of every family: {'family', ..., 'contexts': [{'context', 'prefill', 'decode', ...} or with 'left_out']}."""
    from tqdm import tqdm

    rows = [{"family": s["name"], "contexts": []} for s in specs]
    readers, spent, chunks = [], [0.0] * len(specs), [[] for _ in specs]

    def ask(i, method, argument):
        start, left = time.perf_counter(), budget_s - spent[i]
        answer = readers[i].ask(method, argument, limit_s=1.5 * max(left, 0.0) + 10)
        spent[i] += time.perf_counter() - start
        return answer

    try:
        with tqdm(total=len(specs) * (1 + len(contexts) * (1 + BURSTS)), leave=False, disable=not sys.stderr.isatty()) as bar:
            for spec, row in zip(specs, rows, strict=True):
                bar.set_description(f"start of {spec['name']}")
                readers.append(worker(Reader, spec, START_S))
                row |= readers[-1].begun
                bar.update()
            for at, context in enumerate(contexts):
                more = context - (contexts[at - 1] if at else 0)
                alive = []
                for i, (spec, row) in enumerate(zip(specs, rows, strict=True)):
                    bar.set_description(f"{spec['name']} reads to {context}")
                    bar.update()
                    needed = forecast(chunks[i], more, spec["chunk"])
                    if "reason" in row:
                        continue
                    if any("left_out" in c for c in row["contexts"]) or spent[i] + needed > budget_s:
                        row["contexts"].append({"context": context, "left_out":
                                                f"about {needed:.0f} s needed, {max(0, budget_s - spent[i]):.0f} s of "
                                                f"{budget_s:g} left (--budget_s)"})
                        continue
                    answer = ask(i, "read", context)
                    if "reason" in answer:
                        row["reason"] = f"at {context} tokens: {answer['reason']}"
                        continue
                    chunks[i] = answer.pop("chunk_seconds")
                    found = {"context": context, **{k: answer[k] for k in ("state_bytes", "state_bytes_held")}}
                    found["prefill"] = {"seconds": answer["seconds"], "peak_bytes": answer["peak_bytes"],
                                        "tokens_per_second": spec["batch_size"] * context / answer["seconds"]}
                    row["contexts"].append(found)
                    alive.append((i, found, [], []))
                for n in (len(part) for part in torch.arange(new_tokens).chunk(BURSTS)):
                    for i, _, seconds, peaks in alive:
                        bar.set_description(f"{specs[i]['name']} writes after {context}")
                        bar.update()
                        if "reason" in rows[i] or (seconds and spent[i] > budget_s):
                            continue
                        answer = ask(i, "write", n)
                        if "reason" in answer:
                            rows[i]["reason"] = f"after {context} tokens: {answer['reason']}"
                            continue
                        seconds.extend(answer["seconds"])
                        peaks.append(answer["peak_bytes"])
                for i, found, seconds, peaks in alive:
                    if seconds:
                        t = spread(seconds)
                        found["decode"] = {"new_tokens": len(seconds), "seconds": t,
                                           "peak_bytes": None if None in peaks else max(peaks),
                                           "tokens_per_second": specs[i]["batch_size"] / t["median_seconds"]}
    finally:
        for reader in readers:
            reader.end()
    return rows


# ----------------------------------------------------------------------------------------------------------------- output

def size(b):
    return "-" if b is None else f"{b / 2**20:.2f}" if b < 100 * 2**20 else f"{b / 2**20:.0f}"


def print_rows(rows):
    print(f"\n{'':16}{'context':>8}{'prefill tok/s':>14}{'decode tok/s':>13}{'ms a token':>11}{'quartiles':>18}{'state MiB':>10}"
          f"{'peak above model MiB: read':>27}{'write':>8}")
    for row in rows:
        for c in row["contexts"]:
            line = f"  {row['family']:14}{c['context']:8}"
            if "left_out" in c:
                print(f"{line}  left out: {c['left_out']}")
                continue
            line += f"{c['prefill']['tokens_per_second']:14,.0f}"
            d = c.get("decode")
            if d is None:
                line += f"{'-':>13}{'-':>11}{'-':>18}"
            else:
                low, high = (f"{1e3 * s:.2f}" for s in d["seconds"]["quartile_seconds"])
                line += f"{d['tokens_per_second']:13,.1f}{1e3 * d['seconds']['median_seconds']:11.2f}{low + ' .. ' + high:>18}"
            print(f"{line}{size(c['state_bytes']):>10}{size(c['prefill']['peak_bytes']):>27}{size(d and d['peak_bytes']):>8}")
        if "reason" in row:
            print(f"  {row['family']:14}  {row['reason']}")
    for row in rows:  # a state that is a view of what a chunk computed keeps all of it
        held = [c for c in row["contexts"] if c.get("state_bytes_held", 0) > 1.5 * c.get("state_bytes", 0)]
        if held:
            c = held[-1]
            print(f"  {row['family']}: after {c['context']} tokens its state keeps {size(c['state_bytes_held'])} MiB alive for "
                  f"{size(c['state_bytes'])} MiB of numbers")


def draw(record, path):
    """Milliseconds a token and bytes of the state against the context, log-log. Returns the path, or why there is none."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        return "no picture: matplotlib is not installed"
    measured = {r["family"]: [c for c in r["contexts"] if "decode" in c] for r in record["rows"]}
    if not any(measured.values()):
        return "no picture: nothing was timed"
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), dpi=130)
    for i, (family, points) in enumerate(measured.items()):
        if not points:
            continue
        contexts, style = [c["context"] for c in points], dict(color=f"C{i}", marker="o", ms=4, label=family)
        style |= dict(lw=2.4, zorder=3) if family == "llama" else dict(lw=1.2)
        times = [[1e3 * s for s in (c["decode"]["seconds"]["median_seconds"], *c["decode"]["seconds"]["quartile_seconds"])]
                 for c in points]
        left.plot(contexts, [t[0] for t in times], **style)
        left.fill_between(contexts, [t[1] for t in times], [t[2] for t in times], color=f"C{i}", alpha=0.15, lw=0)
        right.plot(contexts, [c["state_bytes"] for c in points], **style)
    ticks = sorted({c["context"] for points in measured.values() for c in points})
    for axes, label in ((left, "ms a new token, median and quartiles"), (right, "bytes of the state")):
        axes.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel=label)
        axes.set_xticks(ticks, [f"{t // 1024}K" if t % 1024 == 0 else str(t) for t in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3, which="both")
    low, high = left.get_ylim()
    fitting = [n * 10.0**power for power in range(-3, 6) for n in (1, 2, 5) if low <= n * 10.0**power <= high]
    left.set_yticks(fitting, [f"{n:g}" for n in fitting])
    right.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    shape = record["shape"]
    figure.suptitle(f"{record['device']}, {record['threads']} threads, {record['dtype']}, {shape['n_layer']} layers of "
                    f"{shape['n_embd']}, batch {shape['batch_size']}, {record['date'][:10]}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
    return path


# ------------------------------------------------------------------------------------------------------------------- main

def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, 120.0, batch_size=1)
    parser.add_argument("--contexts", default="1024,4096,16384,65536", help="lengths of the text in tokens (%(default)s)")
    parser.add_argument("--new_tokens", type=int, default=64, help="tokens written after each (%(default)s)")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens read at a time (%(default)s)")
    parser.add_argument("--save", action="store_true", help="write the record and the picture to "
                        "results/generate_<device>[_<size>].json and .png")
    args = settle(parser, parser.parse_args(argv))
    try:
        args.contexts = sorted({int(c) for c in args.contexts.split(",") if c})
    except ValueError:
        parser.error(f"--contexts={args.contexts}: must be whole numbers separated by commas, such as 1024,4096")
    if not args.contexts or args.contexts[0] < 1:
        parser.error(f"--contexts={','.join(map(str, args.contexts))}: must be at least one length, of 1 or more")
    for name in ("new_tokens", "chunk"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}={getattr(args, name)}: must be at least 1")
    return args


def main(argv=None):
    args, began = parse(argv), time.perf_counter()
    out = record_path(args, "generate")
    record = headline(args, "generate")
    record |= {"contexts": args.contexts, "new_tokens": args.new_tokens, "chunk": args.chunk, "budget_seconds": args.budget_s}
    specs, rows = [], []
    for family in args.families:
        try:
            specs.append({"name": family, "config": model_config(family, args), "batch_size": args.batch_size,
                          "device": args.device, "dtype": args.dtype, "threads": args.threads, "chunk": args.chunk})
        except LeftOut as reason:
            rows.append({"family": family, "reason": str(reason), "contexts": []})
    record["rows"] = measure(specs, args.contexts, args.new_tokens, args.budget_s) + rows
    print_rows(record["rows"])
    record |= {"finished": True, "run_seconds": time.perf_counter() - began, "load_average_after": load_average()}
    if write(out, record) is not None:
        drawn = draw(record, out.with_suffix(".png"))
        print(drawn if str(drawn).startswith("no ") else f"picture: {drawn}")
    return int(any("reason" in r for r in record["rows"]))


if __name__ == "__main__":
    with main_error("bench/generate.py"):
        try:
            sys.exit(main())
        except KeyboardInterrupt:
            sys.exit("bench/generate.py: interrupted; nothing written")
