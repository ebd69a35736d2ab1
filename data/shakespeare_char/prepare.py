"""Tiny Shakespeare as characters, as in nanoGPT: 1.1 MB, the first 90% for training, the rest held out.

The tokens are the 65 characters that occur; "table" in meta.json lists them. The text is ASCII, so a token is also a
byte. --tokenizer chooses another tokenizer (data/tokenizer.py).

    python data/shakespeare_char/prepare.py                          # downloads the text and checks its sha256
    python data/shakespeare_char/prepare.py --file input.txt         # uses your copy, also checked
    python data/shakespeare_char/prepare.py --file my.txt --any_text # uses another text
"""

import argparse
import hashlib
import shlex
import sys
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository root
from common.errors import regular
from data.prepared import DataError
from data.tokenizer import Text, add_tokenizer, canonical
from data.writer import finish, finished, preparing, replacing, run, write_split

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


def check(content, where, sha256=SHA256):
    """Raises DataError unless `content` is the known text."""
    actual = hashlib.sha256(content).hexdigest()
    if actual != sha256:
        raise DataError(
            f"{where} ({len(content):,} bytes) is not Tiny Shakespeare: sha256 {actual[:12]}..., expected "
            f"{sha256[:12]}...: download it again, or use another text with --file and --any_text"
        )


def prepare(out, file=None, any_text=False, force=False, tokenizer="chars", vocab=None):
    """Write the dataset to `out`, unless it is already there. Returns (Tokens, True if anything was written)."""
    if any_text and file is None:
        raise DataError("--any_text needs --file: name the text to use")
    with preparing(out) as folder:
        copy = folder / "input.txt"
        if file is not None:
            try:
                content = regular(file).read_bytes()
            except OSError as error:
                raise DataError(f"--file {file}: {error.strerror}") from None
        else:
            content = copy.read_bytes() if copy.is_file() else download()
        if not any_text:
            check(content, file or (copy if copy.is_file() else URL))
        inputs = hashlib.sha256(content).hexdigest() + (f" {tokenizer}" if canonical(tokenizer) != "char" else "")
        if canonical(tokenizer).startswith("hf:"):  # its file may change under the same name
            inputs += " " + hashlib.sha256(Text(tokenizer).table.encode()).hexdigest()
        if not force and (tokens := finished(folder, inputs)):
            return tokens, False
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"--file {file} is not UTF-8 text (byte {error.start}): convert it first") from None
        if len(text) < 2:
            raise DataError(f"--file {file} has {len(text)} characters, too few to split: choose a longer text")
        if file is None and not copy.is_file():
            with replacing(copy) as tmp, open(tmp, "wb") as kept:  # so that a rerun needs no network
                kept.write(content)
        table = "".join(sorted(set(text))) if canonical(tokenizer) == "char" else None  # token i is character table[i]
        tokens = Text(tokenizer, table, vocab)
        cut = int(TRAIN_FRACTION * len(text))
        splits = {}
        for split, part in {"train": text[:cut], "val": text[cut:]}.items():
            splits[split] = write_split(folder / f"{split}.bin", [tokens.encode_ordinary(part)], tokens.n_vocab)
            splits[split]["bytes"] = len(part.encode())
        source = {"source": str(file or URL), "source_sha256": inputs.partition(" ")[0]}
        meta = {
            "dataset": "shakespeare_char",
            "vocab_size": tokens.n_vocab,
            "tokenizer": tokens.name,
            "table": tokens.table,
            "splits": splits,
            "how": shlex.join(["python", *sys.argv]),
            "recipe": {**source, "train_fraction": TRAIN_FRACTION},
            "inputs": inputs,
        }
        if tokens.kind == "bytes" or tokens.kind == "char" and len(content) == len(text):  # ASCII
            meta["bytes_per_token"] = 1
        return finish(folder, meta), True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", help="a local copy of the text, instead of downloading it")
    parser.add_argument("--any_text", action="store_true", help="accept a --file that is not Tiny Shakespeare")
    add_tokenizer(parser, "chars")
    parser.add_argument("--out", default=Path(__file__).parent, help="folder to write (default: the script's own)")
    parser.add_argument("--force", action="store_true", help="prepare again even if it is already prepared")
    tokens, new = prepare(**vars(parser.parse_args()))
    done = "" if new else " (already prepared; --force prepares again)"
    print(f"{tokens.folder}: {len(tokens.train):,} tokens to train on, {len(tokens.val):,} held out{done}")
    shown = f": {tokens.meta['table']!r}" if tokens.meta["tokenizer"] == "char" else ""
    print(f"{tokens.meta['tokenizer']}, vocabulary {tokens.vocab_size:,}{shown}")


if __name__ == "__main__":
    run(main)
