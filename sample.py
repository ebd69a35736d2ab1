"""Text from a checkpoint, streamed token by token from the recurrent state.

    python sample.py --out_dir=out/longhorn_laptop
    python sample.py --out_dir=out/longhorn_laptop --prompt="def main():" --temperature=0.7 --top_k=50
    cat notes.txt | python sample.py --out_dir=out/longhorn_laptop --prompt=-

The prompt may be far longer than the training context: it is read in chunks through the state. For recurrent families,
memory and time per token do not depend on what came before.
"""

if __name__ == "__main__":  # Ctrl-C while PyTorch is imported ends the process without a traceback
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)

import codecs
import dataclasses
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import checkpoint
import configurator
from configurator import ConfigError
from data.gpt2 import gpt2_encoding
from distributed import named_device
from model import LM, ModelConfig, current_names


@dataclass
class SampleConfig:
    out_dir: str = "out/longhorn_laptop"  # the run's folder, with checkpoint.safetensors
    prompt: str = "\n"  # text to continue; - reads standard input, @FILE reads a file: UTF-8, or any bytes for a model of bytes
    max_new_tokens: int = 500  # tokens to write
    num_samples: int = 1  # how many texts, one after another
    temperature: float = 0.8  # 0 takes the most likely token each time
    top_k: int = 0  # only among the k most likely; 0: all
    top_p: float = 1.0  # only among the most likely that together have this probability
    seed: int = 1337  # of the sampling
    vocab: str = ""  # GPT-2's tokenizer without a network: a folder with vocab.bpe and encoder.json
    device: str = "auto"  # auto: cuda if there is a GPU, else cpu


def load_model(folder, device="cpu"):
    """(LM in evaluation mode, the checkpoint's meta) of a run's folder. Raises CheckpointError, one line."""
    tensors, meta = checkpoint.load(Path(folder) / "checkpoint.safetensors")
    weights = checkpoint.unflatten(tensors, meta["skeleton"])["model"]
    names = {f.name for f in dataclasses.fields(ModelConfig)} - {"backend"}
    backend = "torch" if meta["config"].get("backend") == "torch" else ""  # an edited plain operator; else this machine's choice
    lm = LM(ModelConfig(**{k: v for k, v in meta["config"].items() if k in names}, backend=backend))
    lm.load_state_dict(current_names(weights))
    return lm.to(device).eval(), meta


class Text:
    """Tokens <-> text for the tokenizers that prepare.py scripts name: bytes, gpt2, or a table of characters."""

    def __init__(self, tokenizer, table=None, vocab=None):
        self.kind, self.itos = tokenizer, table
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may span several tokens
        if self.kind == "gpt2":
            self.gpt2 = gpt2_encoding(vocab)
        elif self.kind != "bytes" and not table:
            raise ConfigError(f"the dataset's tokenizer {tokenizer!r} is unknown: sample.py reads bytes, gpt2 and char")

    def encode(self, text):
        if self.kind == "bytes":
            return list(text.encode())
        if self.kind == "gpt2":
            return self.gpt2.encode(text, allowed_special={"<|endoftext|>"})
        unknown = sorted(set(text) - set(self.itos))
        if unknown:
            raise ConfigError(f"prompt: the character {unknown[0]!r} is not in the training text's vocabulary")
        return [self.itos.index(c) for c in text]

    def decode(self, token):
        """The text that this token completes: '' inside a character of several bytes, or for an id beyond the vocabulary."""
        if self.kind == "char":
            return self.itos[token] if token < len(self.itos) else ""
        if self.kind == "bytes":
            piece = bytes([token]) if token < 256 else b""
        else:
            piece = self.gpt2.decode_single_token_bytes(token) if token < self.gpt2.n_vocab else b""
        return self.decoder.decode(piece)


def read_prompt(prompt, text):
    """(the prompt as it is shown, its tokens). Bytes are tokens as they are; all other tokenizers need UTF-8."""
    try:
        content = (sys.stdin.buffer.read() if prompt == "-" else Path(prompt[1:]).read_bytes() if prompt.startswith("@")
                   else os.fsencode(prompt))
        if text.kind == "bytes":
            return content.decode("utf-8", "replace"), list(content)
        shown = content.decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompt {prompt[:200]}: {error}") from None
    return shown, text.encode(shown)


def main(argv):
    config = configurator.load(SampleConfig, argv)
    if config.max_new_tokens < 1 or config.num_samples < 1:
        raise ConfigError(f"max_new_tokens {config.max_new_tokens} and num_samples {config.num_samples} must be at least 1")
    if config.temperature < 0 or config.top_k < 0 or not 0 < config.top_p <= 1:
        raise ConfigError(f"temperature {config.temperature} must be 0 or more, top_k {config.top_k} too, "
                          f"top_p {config.top_p} in (0, 1]")
    if not 0 <= config.seed < 2**63:
        raise ConfigError(f"seed {config.seed} must be in 0 .. {2**63 - 1}")
    device = named_device(config.device)
    lm, meta = load_model(config.out_dir, device)
    text = Text(meta["tokenizer"], meta["table"], config.vocab or None)
    prompt, tokens = read_prompt(config.prompt, text)
    if not tokens:
        raise ConfigError("the prompt is empty: give at least one character")
    idx = torch.tensor([tokens], device=device)  # (1, T)
    generator = torch.Generator(device).manual_seed(config.seed)
    for i in range(config.num_samples):
        if i:
            print("\n---")
        sys.stdout.write(prompt)
        start = time.perf_counter()
        for token in lm.stream(idx, config.max_new_tokens, temperature=config.temperature, top_k=config.top_k or None,
                               top_p=config.top_p, generator=generator):
            sys.stdout.write(text.decode(token.item()))
            sys.stdout.flush()
        print(text.decoder.decode(b"", True))  # what is left of a character that was cut off
        seconds = time.perf_counter() - start
        print(f"[{config.max_new_tokens} tokens after a prompt of {len(tokens)} in {seconds:.2f} s]", file=sys.stderr)


if __name__ == "__main__":
    with configurator.main_error("sample.py", checkpoint.CheckpointError, ValueError, OSError):  # a full disk behind our output
        try:
            main(sys.argv[1:])
        except (KeyboardInterrupt, BrokenPipeError):
            sys.exit(130)
