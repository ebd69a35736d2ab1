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

import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import measure  # noqa: E402
from bench.measure import DTYPES, LeftOut, or_dash  # noqa: E402
from bench.step import Shared, Worker, finish, model_config, read, start  # noqa: E402
from common.errors import main_error  # noqa: E402
from configurator import Count, Range, Seconds  # noqa: E402
from model import LM, ModelConfig, tensors_of  # noqa: E402
from runtime.loss_curve import save_figure  # noqa: E402

TOLERANCE = 1e-4  # for logits in float32, relative, 2-norm; all families stay below 1e-5
MIB = 2**20
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
        self.spec = spec
        self.device = torch.device(spec["device"])
        torch.set_num_threads(spec["threads"])
        torch.manual_seed(0)
        small = {"n_layer": 2, "n_embd": 128, "n_head": 2, "vocab_size": 256}
        with self.device:
            tiny = LM(ModelConfig(**vars(spec["config"]) | small)).eval()
            check(tiny, spec["dtype"])  # warm-up: keeps one-time builds and loads out of the times
            self.lm = LM(spec["config"]).eval()
        wrong, self.error = check(self.lm, spec["dtype"])
        if wrong:
            raise LeftOut(wrong)
        self.state = self.lm.initial_state(spec["batch_size"])
        self.past = 0
        self.seconds = 0.0  # of reading `past` tokens

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
            tokens = torch.randint(self.lm.config.vocab_size, (self.spec["batch_size"], size), generator=g)
            self.token, self.state, seconds = self.forward(tokens.to(self.device), self.state)
            self.seconds += seconds
            self.past += size
        self.later = self.state
        held, size = {}, 0
        for t in tensors_of(self.state):
            held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            size += t.numel() * t.element_size()
        return {"seconds": self.seconds, "last_chunk_seconds": seconds, "peak_bytes": peak.bytes(),
                "state_bytes": size, "state_bytes_held": sum(held.values())}

    @torch.no_grad()
    def write(self, new_tokens):
        """Continue the text greedily: 'seconds' per token. The state of the text itself is kept."""
        peak, seconds = measure.Peak(self.device), []
        for _ in range(new_tokens):
            self.token, self.later, spent = self.forward(self.token, self.later)
            seconds.append(spent)
        return {"seconds": seconds, "peak_bytes": peak.bytes()}


# ------------------------------------------------------------------------------------------------------------- contexts

class Family:
    """A family's process, its row of the record, and the time that it took."""

    def __init__(self, spec, budget_s):
        self.spec = spec
        self.budget_s = budget_s
        self.spent = 0.0
        self.chunk_s = 0.0  # of the last chunk: a lower bound of the next, as attention slows down
        self.past = 0
        self.worker = Worker(Reader, spec)
        self.row = {"family": spec["name"], "contexts": [], **self.worker.begun}

    def ask(self, method, tokens):
        started = time.perf_counter()
        answer = self.worker.ask(method, tokens, limit_s=1.5 * max(self.budget_s - self.spent, 0.0) + 10)
        self.spent += time.perf_counter() - started
        if "reason" in answer:
            self.row["reason"] = f"{method} of {tokens} tokens: {answer['reason']}"
        return answer

    def read(self, context):
        """Read on to `context` tokens; returns whether it got there."""
        contexts = self.row["contexts"]
        if "reason" in self.row:
            return False
        needed = self.chunk_s * math.ceil((context - self.past) / self.spec["chunk"])
        if self.spent + needed > self.budget_s or contexts and "left_out" in contexts[-1]:
            left = max(0.0, self.budget_s - self.spent)
            reason = f"{needed:.0f} s or more needed, {left:.0f} s left (--budget_s)"
            contexts.append({"context": context, "left_out": reason})
            return False
        answer = self.ask("read", context)
        if "reason" in answer:
            return False
        self.chunk_s = answer.pop("last_chunk_seconds")
        self.past = context
        seconds = answer.pop("seconds")
        prefill = {"seconds": seconds, "peak_bytes": answer.pop("peak_bytes"),
                   "tokens_per_second": self.spec["batch_size"] * context / seconds}
        contexts.append({"context": context, "prefill": prefill, **answer})
        return True

    def write(self, new_tokens):
        """Write on, at the last context, unless the time is up; its times count all the tokens written there."""
        context = self.row["contexts"][-1]
        decode = context.get("decode")
        if "reason" in self.row or decode and self.spent > self.budget_s:
            return
        answer = self.ask("write", new_tokens)
        if "reason" in answer:
            return
        times = measure.spread((decode["seconds"]["samples_seconds"] if decode else []) + answer["seconds"])
        peak = answer["peak_bytes"]
        if peak is not None and decode:
            peak = max(peak, decode["peak_bytes"])
        context["decode"] = {"new_tokens": times["runs"], "seconds": times, "peak_bytes": peak,
                             "tokens_per_second": self.spec["batch_size"] / times["median_seconds"]}


def run_contexts(specs, contexts, new_tokens, budget_s):
    """One row per family: {'family', ..., 'contexts': [{'context', 'prefill', 'decode', ...} or with 'left_out']}."""
    from tqdm import tqdm

    families = []
    try:
        for spec in specs:
            families.append(Family(spec, budget_s))
        for context in tqdm(contexts, "contexts", leave=False, disable=not sys.stderr.isatty()):
            reached = [family for family in families if family.read(context)]
            for burst in torch.arange(new_tokens).chunk(BURSTS):
                for family in reached:
                    family.write(len(burst))
    finally:
        for family in families:
            family.worker.end()
    return [family.row for family in families]


# --------------------------------------------------------------------------------------------------------------- output

def print_rows(rows):
    print(f"\n{'':16}{'context':>8}{'prefill tok/s':>14}{'decode tok/s':>13}{'ms per token':>13}{'quartiles':>18}"
          f"{'state MiB':>10}{'peak above model MiB: read':>27}{'write':>8}")
    for row in rows:
        for c in row["contexts"]:
            line = f"  {row['family']:14}{c['context']:8}"
            if "left_out" in c:
                print(f"{line}  left out: {c['left_out']}")
                continue
            decode = f"{'-':>13}{'-':>13}{'-':>18}"
            if "decode" in c:
                times = c["decode"]["seconds"]
                decode = (f"{c['decode']['tokens_per_second']:13,.1f}{1e3 * times['median_seconds']:13.2f}"
                          f"{measure.quartiles(times, 2):>18}")
            write = c["decode"]["peak_bytes"] if "decode" in c else None
            print(f"{line}{c['prefill']['tokens_per_second']:14,.0f}{decode}{or_dash(c['state_bytes'], '.2f', MIB):>10}"
                  f"{or_dash(c['prefill']['peak_bytes'], '.1f', MIB):>27}{or_dash(write, '.1f', MIB):>8}")
        if "reason" in row:
            print(f"  {row['family']:14}  {row['reason']}")


def draw(record, path):
    """Plot milliseconds per new token and state size against context, log-log. False if nothing was timed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), dpi=130)
    ticks = set()
    for i, row in enumerate(record["rows"]):
        points = [c for c in row["contexts"] if "decode" in c]
        contexts = [c["context"] for c in points]
        ticks.update(contexts)
        milliseconds, low, high = [], [], []
        for point in points:
            times = point["decode"]["seconds"]
            milliseconds.append(1e3 * times["median_seconds"])
            low.append(1e3 * times["quartile_seconds"][0])
            high.append(1e3 * times["quartile_seconds"][1])
        style = {"color": plt.cm.tab20(i % 20), "lw": 2.4 if row["family"] == "llama" else 1.2}
        left.plot(contexts, milliseconds, marker="o", ms=4, **style)
        left.fill_between(contexts, low, high, color=style["color"], alpha=0.15, lw=0)
        right.plot(contexts, [c["state_bytes"] for c in points], marker="o", ms=4, label=row["family"], **style)
    if not ticks:
        return False
    names = [f"{tick // 1024}K" if tick % 1024 == 0 else str(tick) for tick in sorted(ticks)]
    for axes, label in ((left, "ms per new token, median and quartiles"), (right, "bytes of the state")):
        axes.set(xscale="log", yscale="log", xlabel="tokens of context", ylabel=label)
        axes.set_xticks(sorted(ticks), names)
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

@dataclass
class Options(Shared):
    batch_size: Count = 1
    budget_s: Seconds = 120.0  # seconds per family
    contexts: tuple[Annotated[int, Range(1, 10**9)], ...] = (1024, 4096, 16384, 65536)  # lengths
    new_tokens: Count = 64  # tokens written after each context
    chunk: Count = 1024  # tokens read at a time


def main(argv):
    args = read(Options, argv, __doc__)
    args.contexts = sorted(args.contexts)
    out, record = start(args, "generate", contexts=args.contexts, new_tokens=args.new_tokens, chunk=args.chunk,
                        budget_seconds=args.budget_s)
    shared = {name: getattr(args, name) for name in ("batch_size", "device", "dtype", "threads", "chunk")}
    specs = [{"name": family, "config": model_config(family, args), **shared} for family in args.families]
    record["rows"] = run_contexts(specs, args.contexts, args.new_tokens, args.budget_s)
    print_rows(record["rows"])
    finish(out, record)
    if out and draw(record, out.with_suffix(".png")):
        print(f"figure: {out.with_suffix('.png')}")
    return int(any("reason" in r for r in record["rows"]))


if __name__ == "__main__":
    with main_error("bench/generate.py"):
        try:
            sys.exit(main(sys.argv[1:]))
        except KeyboardInterrupt:
            sys.exit("bench/generate.py: interrupted; nothing written")
