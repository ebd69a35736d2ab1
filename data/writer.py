"""Writing prepared datasets: code shared by every prepare.py, and --adopt for files that other programs wrote.

Each file is written under a temporary name, flushed and renamed, and meta.json comes last: a folder with a meta.json is
complete, no matter when a process was killed.

    with preparing(out) as folder:
        splits = {split: write_split(folder / f"{split}.bin", chunks[split], vocab_size) for split in ("train", "val")}
        tokens = finish(folder, {"dataset": "name", "vocab_size": vocab_size, "tokenizer": "bytes", "splits": splits})
"""

import argparse
import contextlib
import hashlib
import platform
import shlex
import sys
from pathlib import Path

import numpy as np

import data.loader
from data.loader import DTYPES, SPLITS, DataError, Tokens, meta_crc32
from runtime.errors import main_error
from runtime.files import lock_folder, replacing
from runtime.records import write_json


def token_dtype(vocab_size):
    """'uint16', or 'uint32' for a vocabulary above 65,536."""
    if not 1 <= vocab_size <= 2**32:
        raise DataError(f"a vocabulary of {vocab_size} tokens: it must be between 1 and {2**32}")
    return "uint16" if vocab_size <= 2**16 else "uint32"


@contextlib.contextmanager
def preparing(folder):
    """Create `folder` and lock it, so that two processes cannot prepare it at once. The lock ends with the process.

    Raises DataError if another process holds the lock, or the folder cannot be created.
    """
    folder = Path(folder)
    try:
        lock = lock_folder(folder)
    except BlockingIOError:
        raise DataError(f"another process is preparing {folder}: wait for it, or use another --out") from None
    except OSError as error:
        raise DataError(f"cannot write to {folder} ({error.strerror}): choose another folder with --out") from None
    with lock:
        yield folder


def write_split(path, chunks, vocab_size):
    """Stream token ids into a .bin and return its entry for meta.json.

    A meta.json in the folder is removed before the file is replaced, as it describes the old file.

    Args:
        path: .../train.bin or .../val.bin; chunks: iterable of 1-d integer arrays, of which one at a time is in memory.
    Returns: {"tokens", "sha256", "max_token"}; max_token is None for an empty split.
    Raises: DataError for an id outside [0, vocab_size), checked before the cast, which would wrap it.
    """
    path, dtype = Path(path), DTYPES[token_dtype(vocab_size)]
    n_tokens, largest, digest = 0, None, hashlib.sha256()
    with replacing(path) as tmp, open(tmp, "wb") as file:
        for chunk in chunks:
            chunk = np.asarray(chunk)
            if chunk.size == 0:
                continue
            low, high = int(chunk.min()), int(chunk.max())
            if low < 0 or high >= vocab_size:
                bad = low if low < 0 else high
                raise DataError(f"token id {bad} for {path.name} is outside the vocabulary of {vocab_size:,}")
            data = np.ascontiguousarray(chunk, dtype=dtype)
            file.write(data.data)
            digest.update(data.data)
            n_tokens, largest = n_tokens + data.size, high if largest is None else max(largest, high)
        (path.parent / "meta.json").unlink(missing_ok=True)
    return {"tokens": n_tokens, "sha256": digest.hexdigest(), "max_token": largest}


def finish(folder, meta):
    """Write meta.json, the last step of a preparation, and open the folder.

    Args: meta: {"dataset", "vocab_size", "tokenizer", "splits": {"train": ..., "val": ...}, ...}; dtype (unless given),
    the Python and NumPy versions and a checksum are added. Returns: Tokens. Raises: DataError if meta.json does not
    match the files; it is then removed.
    """
    folder = Path(folder)
    versions = {"python": platform.python_version(), "numpy": np.__version__, **meta.get("versions", {})}
    meta = {"dtype": token_dtype(meta["vocab_size"]), **meta, "versions": versions}
    path = folder / "meta.json"
    write_json(path, {**meta, "crc32": meta_crc32(meta)})
    try:
        return Tokens(folder)
    except DataError:
        path.unlink()
        raise


def read_split(path, dtype, vocab_size):
    """The entry for meta.json, as from write_split, for a .bin that another program wrote. Raises DataError."""
    dtype, largest, digest = np.dtype(DTYPES[dtype]), None, hashlib.sha256()
    if not path.is_file():
        raise DataError(f"{path} is missing: give a folder with train.bin and val.bin")
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise DataError(f"{path} is {size:,} bytes, not a whole number of {dtype} tokens: set --dtype")
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


def adopt(folder, vocab_size, dtype=None, tokenizer=None, bytes_per_token=None, table=None):
    """Write a meta.json for an existing train.bin and val.bin of token ids, such as nanoGPT's; return Tokens.

    A meta.pkl is not opened: it is a pickle, which could run code. dtype: of the files; None: uint16, or uint32 if the
    vocabulary needs it. Raises DataError.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}: check the path")
    least = token_dtype(vocab_size)  # raises for an impossible vocabulary size
    if dtype is None and least == "uint16":
        for path in (folder / f"{split}.bin" for split in SPLITS if (folder / f"{split}.bin").is_file()):
            first = np.fromfile(path, least, 4096)
            if len(first) > 64 and not first[1::2].any():
                raise DataError(f"{path}: every second uint16 is 0, as in a file of uint32: give --dtype")
    dtype = dtype or least
    if np.dtype(dtype).itemsize < np.dtype(least).itemsize:
        raise DataError(f"--dtype={dtype} cannot hold a vocabulary of {vocab_size:,}: leave it out")
    if bytes_per_token is not None and not 0 < bytes_per_token <= sys.float_info.max:
        raise DataError(f"--bytes_per_token={bytes_per_token:g}: it must be above 0")
    with preparing(folder):
        if (folder / "meta.json").exists():
            raise DataError(f"{folder / 'meta.json'} already exists: remove it if it does not describe these files")
        meta = {
            "dataset": folder.resolve().name,
            "vocab_size": vocab_size,
            "dtype": dtype,
            "tokenizer": tokenizer,
            "table": table,
            "splits": {split: read_split(folder / f"{split}.bin", dtype, vocab_size) for split in SPLITS},
            "bytes_per_token": bytes_per_token,
            "how": shlex.join(["python", *sys.argv]),
        }
        return finish(folder, meta)


def warn_single_document(split, n_documents, n_tokens, way_out):
    """Print a warning if a split is a single document, whose loss would not represent the data."""
    if n_documents == 1:
        print(f"WARNING: {split}.bin is a single document of {n_tokens:,} tokens: {way_out}", file=sys.stderr)


def finished(folder, inputs):
    """The Tokens of a folder that is already prepared from the same inputs (meta["inputs"]), or None."""
    try:
        tokens = Tokens(folder)
    except DataError:
        return None
    return tokens if tokens.meta.get("inputs") == inputs else None


def run(main):
    """Run a script's main(); a DataError or OSError (disk full) becomes one line on stderr and exit code 2."""
    with main_error(Path(sys.argv[0]).name):
        try:
            main()
        except KeyboardInterrupt:
            print("interrupted: no incomplete file was left under its final name; run the same command again",
                  file=sys.stderr)
            sys.exit(130)


def main():
    """`python data/loader.py FOLDER`."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=data.loader.__doc__, formatter_class=layout)
    parser.add_argument("folder", help="holds train.bin and val.bin")
    parser.add_argument("--adopt", action="store_true", help="write a meta.json for files that another program wrote")
    parser.add_argument("--vocab_size", type=int, help="with --adopt: 50257 for GPT-2's tokens")
    parser.add_argument("--dtype", choices=DTYPES, help="with --adopt: of the files (uint16 if the vocabulary fits)")
    parser.add_argument("--tokenizer", help="with --adopt: bytes, tiktoken:NAME or hf:NAME")
    parser.add_argument("--bytes_per_token", type=float, help="with --adopt: of the text, to report bits per byte")
    args = vars(parser.parse_args())
    if args.pop("adopt"):
        if args["tokenizer"]:
            from data.tokenizer import Text, canonical  # late: tokenizer.py imports data.loader

            name = canonical(args["tokenizer"])
            args["tokenizer"], args["table"] = name, Text(args["tokenizer"]).table if name.startswith("hf:") else None
            if name not in ("bytes", "gpt2") and not name.startswith(("hf:", "tiktoken:")):
                raise DataError(f"--tokenizer {name} is unknown: choose bytes, tiktoken:NAME or hf:NAME")
        if args["vocab_size"] is None:
            raise DataError("--adopt needs --vocab_size: 50257 for GPT-2's tokens")
        tokens, checked = adopt(**args), "meta.json written"
    else:
        tokens, checked = Tokens(args["folder"]), "sha256 verified"
        tokens.verify()
    counts = ", ".join(f"{len(getattr(tokens, split)):,} {split}" for split in SPLITS)
    print(f"{tokens.folder}: {counts} tokens, {tokens.meta['dtype']}, vocabulary {tokens.vocab_size:,}, {checked}")
