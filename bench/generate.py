"""The cost of a token after a long text: prefill and decode speed, state size and peak memory, per family.

    python bench/generate.py                                               # contexts of 1K, 4K, 16K and 64K tokens
    python bench/generate.py --families=llama,longhorn --contexts=1024,8192 --out=record.json
    python bench/generate.py --device=cuda --size=350M --save              # results/generate_cuda_350m.json and .png

First each family's state is checked: a short text, read in pieces and continued greedily, must give the same logits,
and so the same tokens, as one forward pass over the whole text. A family that fails is not timed. Then a text of random
tokens is read in chunks and, at each context length, continued greedily by --new_tokens tokens, a few at a time, all
families in turn. LLaMA, whose state is a cache of all keys and values, is the contrast. A context that would take a
family over --budget_s is left out, with a line that says so.

LLaMA's cache has spare room, up to a quarter of its tokens, so that most new tokens copy nothing. While reading,
attention also needs a mask of (chunk, past + chunk), so its peak grows with --chunk times the context.

Each family runs in its own process, as in bench/step.py. Weights are random: the cost does not depend on them.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import measure  # noqa: E402
from bench.measure import DTYPES, LeftOut  # noqa: E402
from bench.step import Worker, add_options, finish, model_config, settle, start  # noqa: E402
from common.errors import main_error  # noqa: E402
from model import LM, ModelConfig, tensors_of  # noqa: E402
from runtime.loss_curve import save_figure  # noqa: E402

TOLERANCE = 1e-4  # for logits in float32, relative, 2-norm; all families stay below 1e-5
BURSTS = 4  # the new tokens after each context are written in so many turns
PIECES = (31, 1, 16)  # the check reads its text in these pieces, then one token at a time


# ---------------------------------------------------------------------------------------------- one family, in a worker

@torch.no_grad()
def check(lm, dtype="float32", new_tokens=16):
    """(how text from the state differs from a whole forward pass, or None; the relative error of the logits).

    Every new token must be the most likely one in the whole pass, up to the tolerance. In bfloat16 the reference is the
    whole pass in float32 with backend torch, and the error may be four times that of the whole pass in bfloat16.
    """
    device, tolerance = lm.embed.weight.device, TOLERANCE
    with torch.autocast(device.type, DTYPES[dtype], enabled=dtype != "float32"):
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
            plain = LM(replace(lm.config, backend="torch")).eval()
        plain.load_state_dict(lm.state_dict())
        true = plain(text[:, :-1])[0][:, -new_tokens:]
        whole, tolerance = true, max(tolerance, 4 * ((whole - true).norm() / true.norm()).item())
    error = ((got - whole).norm() / whole.norm()).item()
    if not error <= tolerance:  # `not` catches NaN
        return f"the state is wrong: logits differ by {error:.1e} from a whole pass (at most {tolerance:.0e})", error
    chosen = whole.gather(-1, got.argmax(-1, keepdim=True))[..., 0]
    if (whole.max(-1).values - chosen > tolerance * whole.abs().amax(-1)).any():
        return "the state is wrong: a new token is not the most likely one in a whole forward pass", error
    return None, error


class Reader:
    """A family reading a text, in a worker. spec: name, config, batch_size, device, dtype, threads, chunk."""

    def __init__(self, spec):
        self.spec, self.device, self.B = spec, torch.device(spec["device"]), spec["batch_size"]
        torch.set_num_threads(spec["threads"])
        torch.manual_seed(0)
        small = dict(n_layer=2, n_embd=128, n_head=2, vocab_size=256)
        with self.device:
            tiny = LM(ModelConfig(**vars(spec["config"]) | small)).eval()
            check(tiny, spec["dtype"])  # warm-up: keeps one-time builds and loads out of the times
            self.lm = LM(spec["config"]).eval()
        wrong, self.error = check(self.lm, spec["dtype"])
        if wrong:
            raise LeftOut(wrong)
        self.state, self.past, self.chunks = self.lm.initial_state(self.B), 0, []

    def about(self):
        return {"parameters": sum(p.numel() for p in self.lm.parameters()), "relative_error": self.error}

    def forward(self, tokens, state):
        """(the most likely next token (B, 1), state, seconds)."""
        start = time.perf_counter()
        with torch.autocast(self.device.type, DTYPES[self.spec["dtype"]], enabled=self.spec["dtype"] != "float32"):
            logits, _, state = self.lm(tokens, state=state, last_only=True)
        token = logits[:, -1].argmax(-1, keepdim=True)  # (B, 1)
        token[0, 0].item()  # waits for the device
        return token, state, time.perf_counter() - start

    @torch.no_grad()
    def read(self, context):
        """Read on until the text has `context` tokens. 'seconds' counts the whole text."""
        self.token = self.later = None  # frees the previous context's continuation
        peak = measure.Peak(self.device)
        while self.past < context:
            size = min(self.spec["chunk"], context - self.past)
            g = torch.Generator().manual_seed(self.past)
            tokens = torch.randint(self.lm.config.vocab_size, (self.B, size), generator=g).to(self.device)
            self.token, self.state, seconds = self.forward(tokens, self.state)
            self.chunks.append(seconds)
            self.past += size
        self.later = self.state
        state = tensors_of(self.state)
        held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in state}
        return {"seconds": sum(self.chunks), "last_chunk_seconds": self.chunks[-1], "peak_bytes": peak.bytes(),
                "state_bytes": sum(t.numel() * t.element_size() for t in state), "state_bytes_held": sum(held.values())}

    @torch.no_grad()
    def write(self, new_tokens):
        """Continue the text greedily: 'seconds' per token. The state of the text itself is kept."""
        peak, seconds = measure.Peak(self.device), []
        for _ in range(new_tokens):
            self.token, self.later, spent = self.forward(self.token, self.later)
            seconds.append(spent)
        return {"seconds": seconds, "peak_bytes": peak.bytes()}


# ------------------------------------------------------------------------------------------------------------- contexts

def run_contexts(specs, contexts, new_tokens, budget_s):
    """One row per family: {'family', ..., 'contexts': [{'context', 'prefill', 'decode', ...} or with 'left_out']}."""
    from tqdm import tqdm

    rows = [{"family": s["name"], "contexts": []} for s in specs]
    readers, spent, slowest = [], [0.0] * len(specs), [0.0] * len(specs)  # seconds in total, and for the last chunk

    def ask(i, method, argument):
        start = time.perf_counter()
        answer = readers[i].ask(method, argument, limit_s=1.5 * max(budget_s - spent[i], 0.0) + 10)
        spent[i] += time.perf_counter() - start
        if "reason" in answer:
            rows[i]["reason"] = f"{method} of {argument} tokens: {answer['reason']}"
        return answer

    try:
        with tqdm(total=len(specs) * (1 + len(contexts)), leave=False, disable=not sys.stderr.isatty()) as bar:
            for spec, row in zip(specs, rows, strict=True):
                readers.append(Worker(Reader, spec))
                row |= readers[-1].begun
                bar.update()
            for before, context in zip([0, *contexts], contexts, strict=False):
                reached = []
                for i, spec in enumerate(specs):
                    bar.set_description(f"{spec['name']} at {context} tokens")
                    bar.update()
                    needed = slowest[i] * -(-(context - before) // spec["chunk"])  # a lower bound: attention slows down
                    if "reason" in rows[i]:
                        continue
                    if spent[i] + needed > budget_s or any("left_out" in c for c in rows[i]["contexts"]):
                        left = f"{needed:.0f} s or more needed, {max(0, budget_s - spent[i]):.0f} s left (--budget_s)"
                        rows[i]["contexts"].append({"context": context, "left_out": left})
                        continue
                    answer = ask(i, "read", context)
                    if "reason" not in answer:
                        slowest[i] = answer.pop("last_chunk_seconds")
                        prefill = {n: answer.pop(n) for n in ("seconds", "peak_bytes")}
                        prefill["tokens_per_second"] = spec["batch_size"] * context / prefill["seconds"]
                        rows[i]["contexts"].append({"context": context, "prefill": prefill, **answer})
                        reached.append(i)
                bursts = [len(part) for part in torch.arange(new_tokens).chunk(BURSTS)]
                answers = {i: [] for i in reached}
                for n in bursts:
                    for i in reached:
                        if "reason" not in rows[i] and not (answers[i] and spent[i] > budget_s):
                            answers[i].append(ask(i, "write", n))
                for i in reached:
                    done = [a for a in answers[i] if "reason" not in a]
                    if done:
                        t = measure.spread(sum((a["seconds"] for a in done), []))
                        peaks = [a["peak_bytes"] for a in done]
                        rows[i]["contexts"][-1]["decode"] = {
                            "new_tokens": t["runs"], "seconds": t, "peak_bytes": None if None in peaks else max(peaks),
                            "tokens_per_second": specs[i]["batch_size"] / t["median_seconds"]}
    finally:
        for reader in readers:
            reader.end()
    return rows


# --------------------------------------------------------------------------------------------------------------- output

def mib(b):
    return "-" if b is None else f"{b / 2**20:.2f}" if b < 100 * 2**20 else f"{b / 2**20:.0f}"


def print_rows(rows):
    print(f"\n{'':16}{'context':>8}{'prefill tok/s':>14}{'decode tok/s':>13}{'ms per token':>13}{'quartiles':>18}"
          f"{'state MiB':>10}{'peak above model MiB: read':>27}{'write':>8}")
    for row in rows:
        for c in row["contexts"]:
            line = f"  {row['family']:14}{c['context']:8}"
            if "left_out" in c:
                print(f"{line}  left out: {c['left_out']}")
                continue
            line += f"{c['prefill']['tokens_per_second']:14,.0f}"
            d = c.get("decode")
            if d:
                line += f"{d['tokens_per_second']:13,.1f}{1e3 * d['seconds']['median_seconds']:13.2f}"
                line += f"{measure.quartiles(d['seconds'], 2):>18}"
            else:
                line += f"{'-':>13}{'-':>13}{'-':>18}"
            read, write = mib(c["prefill"]["peak_bytes"]), mib(d and d["peak_bytes"])
            print(f"{line}{mib(c['state_bytes']):>10}{read:>27}{write:>8}")
        if "reason" in row:
            print(f"  {row['family']:14}  {row['reason']}")


def draw(record, path):
    """Plot milliseconds per new token and state size against context, log-log. False if nothing was timed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    timed = {r["family"]: [c for c in r["contexts"] if "decode" in c] for r in record["rows"]}
    if not any(timed.values()):
        return False
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), dpi=130)
    for i, (family, points) in enumerate(timed.items()):
        contexts = [c["context"] for c in points]
        colour = plt.cm.tab20(i % 20)
        style = dict(color=colour, marker="o", ms=4, label=family, lw=2.4 if family == "llama" else 1.2)
        seconds = [c["decode"]["seconds"] for c in points]
        left.plot(contexts, [1e3 * s["median_seconds"] for s in seconds], **style)
        low, high = ([1e3 * s["quartile_seconds"][j] for s in seconds] for j in (0, 1))
        left.fill_between(contexts, low, high, color=colour, alpha=0.15, lw=0)
        right.plot(contexts, [c["state_bytes"] for c in points], **style)
    ticks = sorted({c["context"] for points in timed.values() for c in points})
    for axes, label in ((left, "ms per new token, median and quartiles"), (right, "bytes of the state")):
        axes.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel=label)
        axes.set_xticks(ticks, [f"{t // 1024}K" if t % 1024 == 0 else str(t) for t in ticks])
        axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axes.grid(alpha=0.3, which="both")
    right.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    shape = record["shape"]
    figure.suptitle(f"{record['device']}, {record['threads']} threads, {record['dtype']}, {shape['n_layer']} layers of "
                    f"{shape['n_embd']}, batch {shape['batch_size']}, {record['date'][:10]}", fontsize=10)
    figure.tight_layout()
    save_figure(figure, path)
    return True


# ----------------------------------------------------------------------------------------------------------------- main

def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, 120.0, batch_size=1)
    parser.add_argument("--contexts", default="1024,4096,16384,65536", help="comma-separated lengths (%(default)s)")
    parser.add_argument("--new_tokens", type=int, default=64, help="tokens written after each context (%(default)s)")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens read at a time (%(default)s)")
    args = settle(parser, parser.parse_args(argv), ["new_tokens", "chunk"])
    try:
        args.contexts = sorted({int(c) for c in args.contexts.split(",")})
    except ValueError:
        parser.error(f"--contexts={args.contexts}: must be whole numbers separated by commas, such as 1024,4096")
    if args.contexts[0] < 1 or args.contexts[-1] > 10**9:
        parser.error(f"--contexts={args.contexts[0]} .. {args.contexts[-1]}: must be in 1 .. {10**9:,}")
    return args


def main(argv=None):
    args = parse(argv)
    out, record = start(args, "generate", contexts=args.contexts, new_tokens=args.new_tokens, chunk=args.chunk,
                        budget_seconds=args.budget_s)
    shared = {name: getattr(args, name) for name in ("batch_size", "device", "dtype", "threads", "chunk")}
    specs = [{"name": family, "config": model_config(family, args), **shared} for family in args.families]
    record["rows"] = run_contexts(specs, args.contexts, args.new_tokens, args.budget_s)
    print_rows(record["rows"])
    finish(out, record)
    if out is not None and draw(record, out.with_suffix(".png")):
        print(f"figure: {out.with_suffix('.png')}")
    return int(any("reason" in r for r in record["rows"]))


if __name__ == "__main__":
    with main_error("bench/generate.py"):
        try:
            sys.exit(main())
        except KeyboardInterrupt:
            sys.exit("bench/generate.py: interrupted; nothing written")
