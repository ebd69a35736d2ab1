"""Tiny Shakespeare as characters, as in nanoGPT: 1.1 MB, the first 90% for training, the rest held out.

The tokens are the 65 characters that occur; "table" in meta.json lists them. The text is ASCII, so a token is also a
byte. --tokenizer chooses another tokenizer (data/tokenizer.py).

    python data/shakespeare_char/prepare.py                          # downloads the text and checks its sha256
    python data/shakespeare_char/prepare.py --file input.txt         # uses your copy, also checked
    python data/shakespeare_char/prepare.py --file my.txt --any_text # uses another text
"""

import dataclasses
import hashlib
import io
import shlex
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository root
import configurator
from common.errors import regular
from common.files import replacing
from data.prepared import DataError
from data.tokenizer import Text, canonical, identified
from data.tokens.sources import decoded
from data.writer import finish, finished, preparing, run, write_split

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"  # 1,115,394 bytes
TRAIN_FRACTION = 0.9


def download(url=URL, seconds=30):
    """The bytes at `url`. Raises DataError if it cannot be reached."""
    try:
        with urllib.request.urlopen(url, timeout=seconds) as answer:
            return answer.read()
    except (OSError, ValueError) as error:
        raise DataError(f"cannot download {url} ({error}): download it elsewhere and pass it as --file") from None


def read(file, copy):
    """The bytes of the user's file, of our copy, or of the download. Raises DataError."""
    if file is None:
        return copy.read_bytes() if copy.is_file() else download()
    try:
        return regular(file).read_bytes()
    except OSError as error:
        raise DataError(f"--file {file}: {error.strerror}") from None


def check(content, where):
    """Raises DataError unless `content` is the known text."""
    actual = hashlib.sha256(content).hexdigest()
    if actual != SHA256:
        raise DataError(
            f"{where} ({len(content):,} bytes) is not Tiny Shakespeare: sha256 {actual[:12]}..., expected "
            f"{SHA256[:12]}...: download it again, or use another text with --file and --any_text"
        )


def as_text(content, where):
    try:
        text = "".join(decoded(io.BytesIO(content), None))
    except ValueError as error:
        raise DataError(f"{where} cannot be read ({error}; to data/tokens/prepare.py)") from None
    if len(text) < 2:
        raise DataError(f"{where} has {len(text)} characters, too few to split: choose a longer text")
    return text


def prepare(out, file=None, any_text=False, force=False, tokenizer="chars", vocab=None):
    """Write the dataset to `out`, unless it is already there. Returns (Tokens, True if anything was written)."""
    if any_text and file is None:
        raise DataError("--any_text needs --file: name the text to use")
    with preparing(out) as folder:
        copy = folder / "input.txt"
        content = read(file, copy)
        source = str(file or URL)
        if not any_text:
            check(content, source)
        inputs = content_sha256 = hashlib.sha256(content).hexdigest()
        if canonical(tokenizer) != "char":
            inputs += f" {identified(tokenizer)}"
        if not force and (tokens := finished(folder, inputs)):
            return tokens, False
        text = as_text(content, source)
        if file is None and not copy.is_file():
            with replacing(copy) as tmp:
                Path(tmp).write_bytes(content)  # so that a rerun needs no network
        recipe = {"source": source, "source_sha256": content_sha256, "train_fraction": TRAIN_FRACTION}
        return write(folder, text, tokenizer, vocab, recipe, inputs), True


def write(folder, text, tokenizer, vocab, recipe, inputs):
    """Split the text, write its tokens and meta.json. Returns Tokens."""
    table = None
    if canonical(tokenizer) == "char":
        table = "".join(sorted(set(text)))  # token i is character table[i]
    encoding = Text(tokenizer, table, vocab)
    cut = int(TRAIN_FRACTION * len(text))
    splits = {}
    for split, part in {"train": text[:cut], "val": text[cut:]}.items():
        ids = encoding.encode_ordinary(part)
        splits[split] = write_split(folder / f"{split}.bin", [ids], encoding.n_vocab)
        splits[split]["bytes"] = len(part.encode())
    meta = {
        "dataset": "shakespeare_char",
        "vocab_size": encoding.n_vocab,
        "tokenizer": encoding.name,
        "table": encoding.table,
        "splits": splits,
        "how": shlex.join(["python", *sys.argv]),
        "recipe": recipe,
        "inputs": inputs,
    }
    if encoding.kind == "bytes" or encoding.kind == "char" and text.isascii():
        meta["bytes_per_token"] = 1
    return finish(folder, meta)


@dataclass
class Options:
    file: str = None  # a local copy of the text, instead of downloading it
    any_text: bool = False  # accept a --file that is not Tiny Shakespeare
    tokenizer: str = "chars"  # bytes, chars, tiktoken:NAME, hf:NAME on the hub, or hf:FOLDER
    vocab: str = None  # folder with a tiktoken encoding's files, to need no network
    out: Path = Path(__file__).parent  # folder to write
    force: bool = False  # prepare again even if it is already prepared


def main():
    options = configurator.read(Options, sys.argv[1:], __doc__)
    tokens, new = prepare(**dataclasses.asdict(options))
    done = "" if new else " (already prepared; --force prepares again)"
    print(f"{tokens.folder}: {len(tokens.train):,} tokens to train on, {len(tokens.val):,} held out{done}")
    print(f"{tokens.meta['tokenizer']}, vocabulary {tokens.vocab_size:,}")
    if tokens.meta["tokenizer"] == "char":
        print(repr(tokens.meta["table"]))


if __name__ == "__main__":
    run(main)
