"""Uses a train.bin and val.bin of token ids that another program wrote, such as nanoGPT's: writes their meta.json.

    python data/adopt.py FOLDER --vocab_size=50257 --tokenizer=gpt2

A meta.pkl is not opened: it is a pickle, which could run code.
"""

import dataclasses
import hashlib
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository root
import configurator
from configurator import Count, Positive
from data.prepared import DTYPES, SPLITS, DataError, describe
from data.tokenizer import Text, canonical
from data.writer import finish, preparing, run, token_dtype


def adopt(folder, vocab_size, dtype=None, tokenizer=None, bytes_per_token=None):
    """Write the meta.json; return Tokens. Raises DataError.

    dtype: of the files; None: uint16, or uint32 if the vocabulary needs it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}: check the path")
    name, table = _known(tokenizer)
    least = token_dtype(vocab_size)  # raises for an impossible vocabulary size
    if dtype is None and least == "uint16":
        _refuse_halves(folder)
    dtype = dtype or least
    if np.dtype(dtype).itemsize < np.dtype(least).itemsize:
        raise DataError(f"--dtype={dtype} cannot hold a vocabulary of {vocab_size:,}: leave it out")
    with preparing(folder):
        if (folder / "meta.json").exists():
            raise DataError(f"{folder / 'meta.json'} already exists: remove it if it does not describe these files")
        meta = {
            "dataset": folder.resolve().name,
            "vocab_size": vocab_size,
            "dtype": dtype,
            "tokenizer": name,
            "table": table,
            "splits": {split: read_split(folder / f"{split}.bin", dtype, vocab_size) for split in SPLITS},
            "bytes_per_token": bytes_per_token,
            "how": shlex.join(["python", *sys.argv]),
        }
        return finish(folder, meta)


def _known(tokenizer):
    """A tokenizer's name in meta.json and, for Hugging Face's, its table."""
    if tokenizer is None:
        return None, None
    name = canonical(tokenizer)
    if name.startswith("hf:"):
        return name, Text(tokenizer).table
    if name not in ("bytes", "gpt2") and not name.startswith("tiktoken:"):
        raise DataError(f"--tokenizer {name} is unknown: choose bytes, tiktoken:NAME or hf:NAME")
    return name, None


def _refuse_halves(folder):
    """Raises DataError for a file of uint32 that would be read as uint16."""
    for split in SPLITS:
        path = folder / f"{split}.bin"
        first = np.fromfile(path, np.uint16, 4096) if path.is_file() else ()
        if len(first) > 64 and not first[1::2].any():
            raise DataError(f"{path}: every second uint16 is 0, as in a file of uint32: give --dtype")


def read_split(path, dtype, vocab_size):
    """The entry for meta.json, as from write_split, for a .bin that another program wrote. Raises DataError."""
    if not path.is_file():
        raise DataError(f"{path} is missing: give a folder with train.bin and val.bin")
    dtype = np.dtype(DTYPES[dtype])
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise DataError(f"{path} is {size:,} bytes, not a whole number of {dtype} tokens: set --dtype")
    largest = None
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            largest = max(largest or 0, int(np.frombuffer(piece, dtype).max()))
            if largest >= vocab_size:
                raise DataError(
                    f"{path} holds token id {largest} as {dtype}, outside a vocabulary of {vocab_size:,}: set "
                    "--vocab_size or --dtype"
                )
    return {"tokens": size // dtype.itemsize, "sha256": digest.hexdigest(), "max_token": largest}


@dataclass
class Options:
    folder: str  # holds train.bin and val.bin
    vocab_size: Count = None  # 50257 for GPT-2's tokens
    dtype: Literal["uint16", "uint32"] = None  # of the files; not given: uint16 if the vocabulary fits
    tokenizer: str = None  # bytes, tiktoken:NAME or hf:NAME
    bytes_per_token: Positive = None  # of the text, to report bits per byte


def main():
    options = configurator.read(Options, sys.argv[1:], __doc__)
    if options.vocab_size is None:
        raise DataError("give --vocab_size: 50257 for GPT-2's tokens")
    describe(adopt(**dataclasses.asdict(options)), "meta.json written")


if __name__ == "__main__":
    run(main)
