"""Tiny Shakespeare by character, as in nanoGPT: 1.1 MB, the first 90% to train on, the rest held out.

The tokens are the 65 characters that occur, not bytes; "table" in meta.json lists them. Every character of the text is
ASCII, so a token is also a byte.

    python data/shakespeare_char/prepare.py                          # downloads, checks the sha256
    python data/shakespeare_char/prepare.py --file input.txt         # a copy you have; checked as well
    python data/shakespeare_char/prepare.py --file my.txt --any_text # another text
"""

import argparse
import hashlib
import shlex
import sys
import urllib.request
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository root
from data.loader import DataError
from data.writer import finish, finished, preparing, replacing, run, write_split

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"  # 1,115,394 bytes
TRAIN_FRACTION = 0.9


def download(url=URL, seconds=30):
    """The bytes at `url`. Raises DataError where it cannot be reached."""
    try:
        with urllib.request.urlopen(url, timeout=seconds) as answer:
            return answer.read()
    except (OSError, ValueError) as error:
        raise DataError(f"cannot download {url} ({error}): fetch it elsewhere and pass it as --file") from None


def check(content, where, sha256=SHA256):
    """Raises DataError unless `content` is the known text."""
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise DataError(
            f"{where} ({len(content):,} bytes) is not Tiny Shakespeare: sha256 {found[:12]}... where {sha256[:12]}... "
            "is expected: fetch it again, or say --any_text with --file to use another text"
        )


def prepare(out, file=None, any_text=False, force=False):
    """Write the dataset into `out` unless it is there already. Returns (Tokens, whether anything was written)."""
    if any_text and file is None:
        raise DataError("--any_text needs --file: name the text to use")
    with preparing(out) as folder:
        copy = folder / "input.txt"
        if file is not None:
            try:
                content = Path(file).read_bytes()
            except OSError as error:
                raise DataError(f"--file {file}: {error.strerror}") from None
        else:
            content = copy.read_bytes() if copy.is_file() else download()
        if not any_text:
            check(content, file or (copy if copy.is_file() else URL))
        inputs = hashlib.sha256(content).hexdigest()
        if not force and (tokens := finished(folder, inputs)):
            return tokens, False
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"--file {file} is not UTF-8 text (byte {error.start}): convert it first") from None
        if len(text) < 2:
            raise DataError(f"--file {file} holds {len(text)} characters: nothing to split, choose a longer text")
        if file is None and not copy.is_file():
            with replacing(copy) as tmp, open(tmp, "wb") as kept:  # so that a rerun needs no network
                kept.write(content)
        table = sorted(set(text))  # token i is character table[i]
        points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)  # (characters,)
        ids = np.searchsorted(np.array([ord(c) for c in table], dtype=np.uint32), points)  # (characters,)
        cut = int(TRAIN_FRACTION * len(text))
        parts = {"train": (ids[:cut], text[:cut]), "val": (ids[cut:], text[cut:])}
        splits = {}
        for split, (tokens, part) in parts.items():
            splits[split] = write_split(folder / f"{split}.bin", [tokens], len(table))
            splits[split]["bytes"] = len(part.encode())
        meta = {
            "dataset": "shakespeare_char",
            "vocab_size": len(table),
            "tokenizer": "char",
            "table": "".join(table),
            "splits": splits,
            "how": shlex.join(["python", *sys.argv]),
            "recipe": {"source": str(file or URL), "source_sha256": inputs, "train_fraction": TRAIN_FRACTION},
            "inputs": inputs,
        }
        if len(content) == len(text):  # ASCII
            meta["bytes_per_token"] = 1
        return finish(folder, meta), True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", help="a local copy of the text, in place of the download")
    parser.add_argument("--any_text", action="store_true", help="accept a --file that is not Tiny Shakespeare")
    parser.add_argument("--out", default=Path(__file__).parent, help="folder to write (default: the script's own)")
    parser.add_argument("--force", action="store_true", help="prepare again even if it is finished")
    tokens, new = prepare(**vars(parser.parse_args()))
    done = "" if new else " (already prepared; --force prepares again)"
    print(f"{tokens.folder}: {len(tokens.train):,} characters to train on, {len(tokens.val):,} held out{done}")
    print(f"vocabulary {tokens.vocab_size}: {''.join(tokens.meta['table'])!r}")


if __name__ == "__main__":
    run(main)
