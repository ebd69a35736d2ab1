"""The cost of a token after a long text: prefill and decode speed, state size and peak memory, per family.

    python bench/generate.py                                               # contexts of 1K, 4K, 16K and 64K tokens
    python bench/generate.py --families=llama,longhorn --contexts=1024,8192 --out=record.json
    python bench/generate.py --device=cuda --size=350M --save              # results/generate_cuda_350m.json

First each family's state is checked: a short text, read in pieces and continued greedily, must give the same logits as
one forward pass over the whole text. A family that fails is not timed. Then a text of random tokens is read in chunks.
At each context length it is continued greedily by --new_tokens tokens, and the families take turns of a few tokens.
LLaMA is there for contrast: its state is a cache of all keys and values. A context that would take a family over
--budget_s is left out, and a line says so.

LLaMA's cache has spare room, up to a quarter of its tokens, so that adding a token rarely copies the cache. While
reading, attention also needs a mask of (chunk, past + chunk), so its peak grows with --chunk times the context.

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
from bench.measure import LeftOut, Worker, or_dash  # noqa: E402
from bench.step import Model, Shared, spec_of, start  # noqa: E402
from common.errors import main_error  # noqa: E402
from configurator import Count, Range, Seconds  # noqa: E402
from model import LM, tensors_of  # noqa: E402

TOLERANCE = 1e-4  # relative error of float32 logits in the 2-norm; all families stay below 1e-5
MIB = 2**20
BURSTS = 4  # turns that the new tokens after each context are divided into
PIECES = (31, 1, 16)  # the check reads its text in these pieces, then one token at a time


# ---------------------------------------------------------------------------------------------- one family, in a worker

class Reader(Model):
    """A model that reads a text and continues it. spec: as for Model, with chunk."""

    def __init__(self, spec):
        super().__init__(spec)
        with self.device:
            self.check(LM(replace(self.config, **self.TINY)).eval())
            self.lm = LM(self.config).eval()
        self.error, tolerance = self.check(self.lm)
        if not self.error <= tolerance:  # `not` catches NaN
            raise LeftOut(f"the state is wrong: logits differ by {self.error:.1e} from one pass over "
                          f"the whole text (at most {tolerance:.0e})")
        self.state = self.lm.initial_state(spec["batch_size"])
        self.past = 0
        self.seconds = 0.0  # spent on reading `past` tokens

    @torch.no_grad()
    def check(self, lm, new_tokens=16):
        """Return (relative error of logits computed through the state, its tolerance). The reference is one pass over
        the whole text.

        In bfloat16, the reference is this pass in float32 with backend torch. The error may then be four times as large
        as for one bfloat16 pass over the whole text.
        """
        with self.autocast():
            text = torch.randint(lm.config.vocab_size, (2, sum(PIECES)), device=self.device)  # (2, T)
            state = lm.initial_state(2)
            seen = []
            for piece in text.split(PIECES, 1):
                logits, _, state = lm(piece, state=state, last_only=True)
            for _ in range(new_tokens):
                seen.append(logits[:, -1].float())
                text = torch.cat([text, seen[-1].argmax(-1, keepdim=True)], 1)
                logits, _, state = lm(text[:, -1:], state=state, last_only=True)
            whole = lm(text[:, :-1])[0][:, -new_tokens:].float()  # (2, new_tokens, V)
        true, tolerance = whole, TOLERANCE
        if self.dtype != torch.float32:
            with self.device:
                plain = LM(replace(lm.config, backend="torch")).eval()
            plain.load_state_dict(lm.state_dict())
            true = plain(text[:, :-1])[0][:, -new_tokens:]
            tolerance = max(tolerance, 4 * distance(whole, true))
        return distance(torch.stack(seen, 1), true), tolerance

    def about(self):
        return {"parameters": sum(p.numel() for p in self.lm.parameters()), "relative_error": self.error}

    def forward(self, tokens, state):
        """Return (the most likely next token (B, 1), state, seconds)."""
        start = time.perf_counter()
        with self.autocast():
            logits, _, state = self.lm(tokens, state=state, last_only=True)
        token = logits[:, -1].argmax(-1, keepdim=True)  # (B, 1)
        token[0, 0].item()  # waits for the device
        return token, state, time.perf_counter() - start

    @torch.no_grad()
    def read(self, context):
        """Read on until the text has `context` tokens. The returned seconds cover the whole text."""
        self.token = self.later = None  # frees the previous context's continuation
        peak = measure.Peak(self.device)
        batch_size = self.spec["batch_size"]
        while self.past < context:
            size = min(self.spec["chunk"], context - self.past)
            g = torch.Generator().manual_seed(self.past)
            tokens = torch.randint(self.lm.config.vocab_size, (batch_size, size), generator=g)
            self.token, self.state, seconds = self.forward(tokens.to(self.device), self.state)
            self.seconds += seconds
            self.past += size
        prefill = {"seconds": self.seconds, "peak_bytes": peak.bytes(),
                   "tokens_per_second": batch_size * context / self.seconds}
        self.later = self.state
        self.written, self.peak = [], measure.Peak(self.device)
        state_bytes = sum(t.numel() * t.element_size() for t in tensors_of(self.state))
        return {"context": context, "prefill": prefill, "last_chunk_seconds": seconds, "state_bytes": state_bytes}

    @torch.no_grad()
    def write(self, new_tokens):
        """Continue the text greedily. Times cover all tokens written at this context; the state of the text itself is
        kept."""
        for _ in range(new_tokens):
            self.token, self.later, spent = self.forward(self.token, self.later)
            self.written.append(spent)
        times = measure.spread(self.written)
        return {"decode": {"new_tokens": times["runs"], "seconds": times, "peak_bytes": self.peak.bytes(),
                           "tokens_per_second": self.spec["batch_size"] / times["median_seconds"]}}


def distance(got, true):
    return ((got - true).norm() / true.norm()).item()


# ------------------------------------------------------------------------------------------------------------- contexts

class Family(Worker):
    """A family that reads and writes more and more tokens until its `budget_s` seconds are used up."""

    def __init__(self, spec):
        super().__init__(Reader, spec, family=spec["name"], contexts=[])
        self.spec = spec
        self.spent = 0.0
        self.chunk_s = 0.0  # seconds for the last chunk; attention slows down, so the next takes at least as long
        self.past = 0

    @property
    def left_s(self):
        return max(0.0, self.spec["budget_s"] - self.spent)

    def read(self, context):
        """Read on to `context` tokens. Returns True if it got there."""
        contexts = self.row["contexts"]
        needed = self.chunk_s * math.ceil((context - self.past) / self.spec["chunk"])
        if needed > self.left_s or contexts and "left_out" in contexts[-1]:
            reason = f"{needed:.0f} s or more needed, {self.left_s:.0f} s left (--budget_s)"
            contexts.append({"context": context, "left_out": reason})
            return False
        answer = self.ask("read", context, limit_s=1.5 * self.left_s + 10)
        if not answer:
            return False
        contexts.append(answer)
        self.past = context
        self.chunk_s = answer["last_chunk_seconds"]
        return True

    def write(self, new_tokens):
        """Continue the text at the last context, unless the time is up."""
        context = self.row["contexts"][-1]
        if self.left_s or "decode" not in context:
            context |= self.ask("write", new_tokens, limit_s=1.5 * self.left_s + 10)


def run_contexts(specs, contexts, new_tokens):
    """Return a row per family: {'family', ..., 'contexts': [{'context', 'prefill', 'decode', ...}]}. A context that was
    left out has 'left_out' instead."""
    from tqdm import tqdm

    families = [Family(spec) for spec in specs]
    for context in tqdm(contexts, "contexts", leave=False, disable=not sys.stderr.isatty()):
        reached = [family for family in families if "reason" not in family.row and family.read(context)]
        for burst in torch.arange(new_tokens).chunk(BURSTS):
            for family in reached:
                family.write(len(burst))
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


# ----------------------------------------------------------------------------------------------------------------- main

@dataclass
class Options(Shared):
    batch_size: Count = 1  # texts at a time
    budget_s: Seconds = 120.0  # seconds per family
    contexts: tuple[Annotated[int, Range(1, 10**9)], ...] = (1024, 4096, 16384, 65536)  # context lengths
    new_tokens: Count = 64  # tokens written after each context
    chunk: Count = 1024  # tokens read at a time


def main(argv):
    args, out, record = start(Options, argv, __doc__, "generate", "contexts", "new_tokens", "chunk")
    contexts = sorted(args.contexts)
    record["rows"] = run_contexts([spec_of(family, args) for family in args.families], contexts, args.new_tokens)
    print_rows(record["rows"])
    measure.finish(out, record)
    return int(any("reason" in r for r in record["rows"]))


if __name__ == "__main__":
    with main_error("bench/generate.py"):
        sys.exit(main(sys.argv[1:]))
