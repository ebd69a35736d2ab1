"""Adopt token ids that another program wrote, such as nanoGPT's train.bin and val.bin, by writing their meta.json.

    python data/adopt.py FOLDER                                       # characters, listed in nanoGPT's meta.pkl
    python data/adopt.py FOLDER --tokenizer=gpt2                      # bytes, tiktoken:NAME, hf:NAME or hf:FOLDER
    python data/adopt.py FOLDER --vocab_size=50257                    # enough to train, but not to sample

A .bin holds only ids, as numpy's tofile writes them. train.npy and val.npy from numpy.save are copied into .bin files,
and so is llm.c's NAME_train_000001.bin. Only the characters in a meta.pkl are read: no code in it runs.
"""

import contextlib
import dataclasses
import pickle
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository root
import configurator
from configurator import Count, Positive
from data.prepared import DTYPES, SPLITS, DataError, describe, file_sha256
from data.tokenizer import Text, canonical
from data.writer import finish, preparing, run, token_dtype, write_split

NPY = b"\x93NUMPY"
LLM_C = {20240520: "uint16", 20240801: "uint32"}  # the first int32 of an llm.c file: the dtype of its tokens


def adopt(folder, vocab_size=None, dtype=None, tokenizer=None, bytes_per_token=None):
    """Write meta.json and return the folder's Tokens. Raises DataError.

    vocab_size: by default from the tokenizer or meta.pkl. dtype: of the .bin files; by default uint16, or uint32 if the
    vocabulary needs it. tokenizer: by default characters, if there is a meta.pkl.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}: check the path")
    about = vocabulary(folder, tokenizer, vocab_size)
    vocab_size = vocab_size or about["vocab_size"]
    least = token_dtype(vocab_size)  # raises for an impossible vocabulary size
    guessed = dtype is None
    dtype = dtype or least
    if np.dtype(dtype).itemsize < np.dtype(least).itemsize:
        raise DataError(f"--dtype={dtype} cannot hold a vocabulary of {vocab_size:,}: in such files ids above "
                        "65,535 have wrapped and are lost; write them again as uint32")
    with preparing(folder):
        if (folder / "meta.json").exists():
            raise DataError(f"{folder / 'meta.json'} already exists: remove it if it does not describe these files")
        for split in SPLITS:
            copy_foreign(folder, split, vocab_size)
        meta = {
            "dataset": folder.resolve().name,
            **about,
            "vocab_size": vocab_size,
            "dtype": dtype,
            "splits": {split: read_split(folder / f"{split}.bin", dtype, guessed, vocab_size) for split in SPLITS},
            "bytes_per_token": bytes_per_token,
            "how": shlex.join(["python", *sys.argv]),
        }
        return finish(folder, meta)


def vocabulary(folder, tokenizer, vocab_size):
    """The tokenizer's entries in meta.json: {"tokenizer", "table", "vocab_size", "end_of_text"}. Raises DataError."""
    if tokenizer is None and vocab_size:
        return {"tokenizer": None}
    if tokenizer is None or canonical(tokenizer) == "char":
        table = characters_of(folder / "meta.pkl")
        if not table:
            raise DataError(f"{folder} does not say which tokenizer made its tokens: give --tokenizer=gpt2 or another, "
                            "or --vocab_size alone, which is enough to train")
        return {"tokenizer": "char", "table": table, "vocab_size": len(table)}
    name = canonical(tokenizer)
    if name == "gpt2":  # no need for the vocabulary itself, which might have to be downloaded
        return {"tokenizer": name, "table": None, "vocab_size": 50_257, "end_of_text": 50_256}
    text = Text(tokenizer)
    about = {"tokenizer": name, "table": text.table, "vocab_size": text.n_vocab}
    with contextlib.suppress(DataError):
        about["end_of_text"] = text.eot_token
    return about


class Plain(pickle.Unpickler):
    """Unpickles only dicts, numbers and text."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it names {module}.{name}, which could run code")


def characters_of(path):
    """The characters of nanoGPT's meta.pkl in the order of their ids, or None without such a file. Raises DataError."""
    if not path.exists():
        return None
    try:
        with open(path, "rb") as file:
            numbers = Plain(file).load()["stoi"]
        table = "".join(sorted(numbers, key=numbers.get))
        if [numbers[character] for character in table] != list(range(len(numbers))):
            raise ValueError("stoi does not number characters from 0")
        return table
    except Exception as error:  # a damaged pickle raises anything
        raise DataError(f"{path} has no vocabulary of characters ({error}): give --tokenizer or --vocab_size"
                        ) from None


def copy_foreign(folder, split, vocab_size):
    """Write SPLIT.bin from SPLIT.npy, or llm.c's *_SPLIT*.bin in order, if there are any. Raises DataError."""
    npy = folder / f"{split}.npy"
    parts = [read_npy(npy)] if npy.exists() else []
    parts += filter(len, map(read_llm_c, sorted(folder.glob(f"*_{split}*.bin"))))
    if parts:
        chunks = (part[start:start + 2**20] for part in parts for start in range(0, len(part), 2**20))
        write_split(folder / f"{split}.bin", chunks, vocab_size)


def read_npy(path):
    """The tokens in a file from numpy.save. Raises DataError."""
    try:
        tokens = np.load(path, mmap_mode="r")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"it has shape {tokens.shape} and {tokens.dtype}")
        return tokens
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} is not a 1-d array of integers ({error}): save tokens.reshape(-1)") from None


def read_llm_c(path):
    """Return the tokens of an llm.c file, or () for any other file. Raises DataError.

    An llm.c file begins with 256 int32, of which the third is the number of tokens.
    """
    header = np.fromfile(path, np.int32, 256)
    if len(header) < 256 or header[0] not in LLM_C:
        return ()
    tokens = np.memmap(path, LLM_C[header[0]], "r", header.nbytes)
    if len(tokens) != header[2]:
        raise DataError(f"{path} holds {len(tokens):,} tokens, but its header says {header[2]:,}: download it again")
    return tokens


def read_split(path, dtype, guessed, vocab_size):
    """The entry in meta.json for a .bin that another program wrote, as write_split would return it. Raises
    DataError."""
    if not path.is_file():
        others = ", ".join(sorted(other.name for other in path.parent.glob("*.[bn][ip][ny]")))
        raise DataError(f"{path} is missing: name the files train.bin and val.bin, or .npy (found: "
                        f"{others[:200] or 'none'})")
    dtype = np.dtype(DTYPES[dtype])
    size = path.stat().st_size
    if not size or size % dtype.itemsize:
        raise DataError(f"{path} is {size:,} bytes, not a whole number of {dtype} tokens: set --dtype")
    tokens = np.memmap(path, dtype, "r")
    start = tokens[:4].tobytes()
    if start.startswith(NPY):
        raise DataError(f"{path} was written by numpy.save: rename it to {path.stem}.npy")
    if int.from_bytes(start[:4], "little") in LLM_C:
        raise DataError(f"{path} begins with the header of llm.c: rename it to llmc_{path.name}")
    if guessed and dtype == np.uint16 and len(tokens) > 64 and not tokens[1:4096:2].any():
        raise DataError(f"{path}: every second uint16 is 0, as in a file of uint32: give --dtype")
    largest = int(tokens.max())
    if largest >= vocab_size:
        raise DataError(
            f"{path} holds token id {largest} as {dtype}, outside a vocabulary of {vocab_size:,}: set "
            "--vocab_size, --tokenizer or --dtype as in the program that wrote it"
        )
    return {"tokens": len(tokens), "sha256": file_sha256(path), "max_token": largest}


@dataclass
class Options:
    folder: Path  # holds train.bin and val.bin
    vocab_size: Count = None  # number of ids; default: from the tokenizer or nanoGPT's meta.pkl
    dtype: Literal["uint16", "uint32"] = None  # dtype of the .bin files; default: uint16 if the vocabulary fits
    tokenizer: str = None  # gpt2, bytes, tiktoken:NAME or hf:NAME
    bytes_per_token: Positive = None  # average over the text, to report bits per byte


def main():
    options = configurator.read(Options, sys.argv[1:], __doc__)
    tokens = adopt(**dataclasses.asdict(options))
    describe(tokens, f"tokens of {tokens.meta['tokenizer'] or 'an unknown tokenizer'}, meta.json written")


if __name__ == "__main__":
    run(main)
