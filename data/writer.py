"""Writing prepared datasets: code shared by every prepare.py.

Each file is written under a temporary name, flushed and renamed. meta.json comes last, so a folder with a meta.json is
complete, no matter when a process was killed.

    with preparing(out) as folder:
        splits = {split: write_split(folder / f"{split}.bin", chunks[split], vocab_size) for split in ("train", "val")}
        tokens = finish(folder, {"dataset": "name", "vocab_size": vocab_size, "tokenizer": "bytes", "splits": splits})
"""

import contextlib
import hashlib
import platform
import sys
from pathlib import Path

import numpy as np

from common.errors import main_error
from common.files import lock_folder, replacing
from data.prepared import DTYPES, DataError, Tokens, meta_crc32
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
        path: .../train.bin or .../val.bin; chunks: iterable of 1-d integer arrays; only one at a time is in memory.
    Returns: {"tokens", "sha256", "max_token"}; max_token is None for an empty split.
    Raises: DataError for an id outside [0, vocab_size), checked before the cast, which would wrap it.
    """
    path = Path(path)
    dtype = DTYPES[token_dtype(vocab_size)]
    n_tokens = 0
    largest = None
    digest = hashlib.sha256()
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
            n_tokens += data.size
            largest = max(largest or 0, high)
        (path.parent / "meta.json").unlink(missing_ok=True)
    return {"tokens": n_tokens, "sha256": digest.hexdigest(), "max_token": largest}


def write_sealed(path, record):
    """Write a dict as JSON with its CRC-32, so `read_sealed` can refuse an edited file."""
    write_json(path, {**record, "crc32": meta_crc32(record)})


def finish(folder, meta):
    """Write meta.json, the last step of a preparation, and open the folder.

    Args: meta: {"dataset", "vocab_size", "tokenizer", "splits": {"train": ..., "val": ...}, ...}; dtype (unless given),
    the Python and NumPy versions and a checksum are added. Returns: Tokens. Raises: DataError if meta.json does not
    match the files; it is then removed.
    """
    path = Path(folder) / "meta.json"
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    write_sealed(path, {"dtype": token_dtype(meta["vocab_size"]), **meta, "versions": versions})
    try:
        return Tokens(folder)
    except DataError:
        path.unlink()
        raise


def finished(folder, inputs):
    """The Tokens of a folder that is already prepared from the same inputs (meta["inputs"]), or None."""
    try:
        tokens = Tokens(folder)
    except DataError:
        return None
    return tokens if tokens.meta.get("inputs") == inputs else None


def run(main):
    """Run a script's main(); a DataError or OSError (a full disk) becomes one line on stderr and exit code 2."""
    with main_error(Path(sys.argv[0]).name):
        main()
