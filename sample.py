"""Generate text from a checkpoint, token by token from the recurrent state.

    python sample.py --out_dir=out/longhorn_bpe
    python sample.py --out_dir=out/longhorn_bpe --prompt="def main():" --temperature=0.7 --top_k=50
    cat notes.txt | python sample.py --out_dir=out/longhorn_bpe --prompt=-

The prompt may be far longer than the training context: it is read in chunks through the state.
"""

if __name__ == "__main__":
    from common import start  # before PyTorch

import contextlib
import dataclasses
import itertools
import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

import configurator
import families  # noqa: F401
from common import errors, old_names
from configurator import Count, NotNegative, Range, Whole
from data.tokenizer import Text
from model import LM, ModelConfig, check_tokens
from runtime import checkpoint, distributed
from runtime.distributed import named_device
from runtime.records import BadRecord, changed_files, code_identity, fields, read_json

# Changes in these files do not change what a trained model computes.
MACHINERY = ("train.py", "optim.py", "configurator.py", "initialisation.py", "common/", "inspection/", "runtime/",
             "evaluation/")


@dataclass
class SampleConfig:
    out_dir: str = "out/longhorn_bpe"  # the run's folder, or a checkpoint file
    prompt: str = "\n"  # text to continue; -: read stdin; @FILE: read a file (UTF-8; any bytes for byte models)
    max_new_tokens: Count = 500  # tokens per sample
    num_samples: Count = 1  # number of samples
    temperature: NotNegative = 0.8  # randomness of sampling; 0: always take the most likely token
    top_k: Whole = 0  # sample from the k most likely tokens only; 0: all
    top_p: Annotated[float, Range(above=0, most=1)] = 1.0  # sample from the most likely tokens that together have this
    # probability
    seed: Whole = 1337  # random seed for sampling
    vocab: str = ""  # folder with a tiktoken vocabulary's files (GPT-2: vocab.bpe, encoder.json), to work offline
    device: str = "auto"  # auto: cuda if there is a GPU, else cpu

    ARGUMENTS = ("out_dir",)
    RENAMED = old_names.SAMPLE


def checkpoint_at(place):
    """The path of a checkpoint: the place itself, or the newest in a run's folder."""
    place = Path(place)
    return place if place.is_file() else place / checkpoint.NEWEST


def load_model(place, device="cpu"):
    """(LM in evaluation mode, the checkpoint's meta) from a run's folder or a checkpoint. Raises CheckpointError. Warns
    on stderr if the code has changed since training."""
    path = checkpoint_at(place)
    tensors, meta = checkpoint.load(path)
    with checkpoint.fitting(path):
        if dict(meta["config"]).get("task") == "images":
            raise checkpoint.CheckpointError(f"{path} is an image classifier and cannot write text: result.json in its "
                                             "folder has its accuracy")
        for key, kind in {"tokenizer": str, "table": str, "step": int, "tokens": int, "data": dict}.items():
            value = meta.setdefault(key)
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"its {key} is {str(value)[:80]!r}")
        sizes = sizes_of(meta["config"])
        weights = checkpoint.unflatten(tensors, meta["skeleton"])["model"]
        with torch.device("meta"):  # takes no memory
            wrong = checkpoint.misfit(weights, LM(sizes))
        if wrong:
            raise ValueError(wrong)
        lm = LM(sizes)
        lm.load_state_dict(weights)
    changed = code_since(path.parent, meta.get("code_versions"))
    if changed and distributed.rank() == 0:
        print(errors.printable(changed), file=sys.stderr)
    return lm.to(device).eval(), meta


def code_since(folder, versions=None):
    """A warning, with the way back, if code that computes the model has changed since the run in `folder` was trained.
    "" if nothing has changed or the run's config.json does not say. Also warns if config.json belongs to another run
    than the checkpoint, which ran with `versions` of the code."""
    with contextlib.suppress(BadRecord), fields():
        record = read_json(Path(folder) / "config.json")
        ran_in = record["environment"]
        if versions and record["code_versions"][:len(versions)] != versions:  # longer if resumed, not saved since
            return (f"{folder}/config.json belongs to another run: it names code {ran_in['code']}, the checkpoint "
                    f"{', then '.join(versions)}; so this may be another model")
        changed = changed_files(ran_in["code_files"], code_identity()["code_files"])
        changed = [path for path in changed if not path.startswith(MACHINERY)]
        back = "its commit is not recorded"
        if ran_in["commit"]:
            back = f"go back with git checkout {shlex.quote(str(ran_in['commit']))}"
        edited = " (it had uncommitted changes)" if ran_in["uncommitted_changes"] else ""
        if changed:
            return (f"the code has changed since {folder} was trained ({', '.join(changed)}), so this may be another "
                    f"model: {back}{edited}")
    return ""


def sizes_of(settings):
    """The ModelConfig for a run's settings, with the fastest backend. A run on the backend torch keeps it, because its
    operators may have been edited. Raises TypeError for a setting of the wrong type."""
    given = checkpoint.settings_of(settings, dataclasses.fields(ModelConfig))
    if given["backend"] != "torch":
        given["backend"] = ""
    return ModelConfig(**given)


def read_prompt(prompt, text):
    """Return (the prompt to print, its tokens). Byte models take any bytes; all other tokenizers need UTF-8."""
    try:
        if prompt == "-":
            content = sys.stdin.buffer.read()
        elif prompt.startswith("@"):
            content = Path(prompt[1:]).read_bytes()
        else:
            content = os.fsencode(prompt)
        if text.kind == "bytes":
            return content.decode("utf-8", "replace"), list(content)
        shown = content.decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise errors.ConfigError(f"prompt {prompt[:200]}: {error}") from None
    return shown, text.encode(shown)


@torch.no_grad()
def stream(lm, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, generator=None, chunk=4096):
    """Yield `max_new_tokens` sampled tokens, tensors (B,), that continue the prompt idx (B, T >= 1) from its state.

    The prompt is read in chunks. After it, time and memory per token are constant for recurrent families, and grow with
    the cache for attention. temperature 0 takes the most likely token; top_k and top_p cut off the tail first.
    """
    check_tokens(idx)
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens {max_new_tokens} must be 0 or more")
    state = lm.initial_state(idx.shape[0])
    for part in idx.split(chunk, 1):
        logits, _, state = lm(part, state=state, last_only=True)
    for i in range(max_new_tokens):
        token = sample_token(logits[:, -1].float(), temperature, top_k, top_p, generator)
        yield token
        if i + 1 < max_new_tokens:
            logits, _, state = lm(token[:, None], state=state, last_only=True)


def generate(lm, idx, max_new_tokens, **sampling):
    """idx (B, T) followed by `max_new_tokens` sampled tokens; see `stream` for the arguments."""
    return torch.cat([idx, *(token[:, None] for token in stream(lm, idx, max_new_tokens, **sampling))], 1)


def sample_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """Sample a token (B,) from logits (B, V). temperature 0: the most likely token. Raises ValueError for bad
    settings."""
    if temperature < 0 or (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
        raise ValueError(f"temperature {temperature} must be >= 0, top_k {top_k} >= 1, top_p {top_p} in (0, 1]")
    if temperature == 0:
        return logits.argmax(-1)
    # subtract the largest, so that a small temperature overflows to -inf, not inf; divide by at least `tiny`: no 0 / 0
    logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, torch.finfo(torch.float32).tiny)
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        p = ordered.softmax(-1)
        ordered = ordered.masked_fill(p.cumsum(-1) - p >= top_p, -torch.inf)  # keeps the token that reaches top_p
        logits = torch.full_like(logits, -torch.inf).scatter(-1, order, ordered)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def main(argv):
    config = configurator.load(SampleConfig, argv)
    device = named_device(config.device)
    lm, meta = load_model(config.out_dir, device)
    if not meta["tokenizer"]:
        raise errors.ConfigError(f"{config.out_dir} does not name its tokenizer, which sampling needs: name "
                                 "it when you import the model (export.py --tokenizer) or prepare its data")
    text = Text(meta["tokenizer"], meta["table"], config.vocab or None)
    prompt, tokens = read_prompt(config.prompt, text)
    if not tokens:
        raise errors.ConfigError("the prompt is empty: give at least one character")
    if max(tokens) >= lm.config.vocab_size:
        raise errors.ConfigError(f"the prompt has token {max(tokens)}, but the model's vocab_size is "
                                 f"{lm.config.vocab_size}: it was not trained with the tokenizer {text.kind!r} that "
                                 "its checkpoint names")
    idx = torch.tensor([tokens], device=device)  # (1, T)
    generator = torch.Generator(device).manual_seed(config.seed)
    for i in range(config.num_samples):
        if i:
            print("\n---")
        start = time.perf_counter()
        said = stream(lm, idx, config.max_new_tokens, temperature=config.temperature, top_k=config.top_k or None,
                      top_p=config.top_p, generator=generator)
        first = list(itertools.islice(said, 2))  # by now kernels are built, and their messages printed
        sys.stdout.write(prompt)
        text.begin(tokens)
        for token in itertools.chain(first, said):
            sys.stdout.write(text.decode(token.item()))
            sys.stdout.flush()
        print(text.decoder.decode(b"", True))  # the rest of an incomplete character
        seconds = time.perf_counter() - start
        print(f"[{config.max_new_tokens} tokens after a prompt of {len(tokens)} in {seconds:.2f} s]", file=sys.stderr)


if __name__ == "__main__":
    start.imported()
    with errors.main_error("sample.py", ValueError):
        main(sys.argv[1:])
