"""A prepared folder, opened and checked.

It holds train.bin and val.bin (token ids, uint16 or uint32, without a header), or shards of them, and meta.json, which
describes them. meta.json is written last, so a folder that has one is complete (data/writer.py).

    python data/prepared.py data/pystdlib     # describe a prepared folder and check its sha256
"""

import hashlib
import json
import re
import shlex
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePath

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository root
import configurator  # noqa: E402
from common.errors import ConfigError, main_error, regular  # noqa: E402
from data.shards import Shards, shards_sha256  # noqa: E402

SPLITS = ("train", "val")
DTYPES = {"uint16": np.uint16, "uint32": np.uint32}
TOKENIZERS = "bytes|char|gpt2|(tiktoken|hf|bpe):.+"  # their names in meta.json, see data/tokenizer.py
FULL_CHECK_TOKENS = 200_000_000  # splits up to this size are read whole when opened (a tenth of a second or two)
SPOT_CHECKS, SPOT_TOKENS = 256, 65_536  # of longer splits, so many evenly spaced slices of this length are read


class DataError(ConfigError):
    """A problem with data that the user can fix. The message is one line: the value, the limit, what to do."""


def find_dataset(name):
    """The Path of a dataset folder: `name` itself, or data/`name`."""
    return Path(name) if Path(name).is_dir() else Path(__file__).parent / name


class Tokens:
    """A prepared dataset, opened and checked.

    Args:
        folder: holds train.bin, val.bin and meta.json, written by a prepare.py.
        vocab_size: the model's; the dataset's may not be larger.
        block_size: tokens predicted per window; both splits must hold at least one window (block_size + 1 tokens).

    Attributes:
        meta: dict, the content of meta.json.
        vocab_size: int, the dataset's.
        train, val: read-only np.memmap or Shards, (tokens of the split,), uint16 or uint32.
        bytes_per_token: 1.0 if tokens are bytes; else {"train": float, "val": float} if meta.json has the number of
            bytes of each split; else None.
        sha256: {"train": hex, "val": hex} as recorded, else of the files; `verify()` reads the files and compares.

    Raises DataError for a folder that is not prepared, and for files that are not what meta.json describes: of another
    size, with ids outside the vocabulary, of other content. The last two are checked on whole splits of up to 200M
    tokens. For longer ones (OpenWebText has 9 billion) only the ids are checked, in 256 evenly spaced slices of 65,536
    tokens; the rest is trusted as prepare.py recorded it. `verify()` reads everything.
    """

    def __init__(self, folder, vocab_size=None, block_size=None):
        self.folder = Path(folder)
        self.meta = _read_meta(self.folder)
        self.vocab_size = self.meta["vocab_size"]
        self._again = f"prepare it again ({_prepare_command(self.folder, '--force')})"
        if vocab_size is not None and self.vocab_size > vocab_size:
            raise DataError(
                f"the vocabulary of {self.folder} ({self.vocab_size:,} tokens) is larger than the model's vocab_size "
                f"{vocab_size:,}: set vocab_size to at least {self.vocab_size}"
            )
        self.train = self._open("train", block_size)  # (tokens,)
        self.val = self._open("val", block_size)  # (tokens,)
        self.sha256 = {split: self._sha256(split) for split in SPLITS}
        self.bytes_per_token = self._bytes_per_token()

    def _files(self, split):
        """[(Path, entry in meta.json)] of a split's files: train.bin, or the shards."""
        recorded = self.meta["splits"][split]
        entries = recorded.get("shards", [recorded])
        return [(self.folder / entry.get("file", f"{split}.bin"), entry) for entry in entries]

    def _open(self, split, block_size):
        recorded = self.meta["splits"][split]
        n_tokens = recorded["tokens"]
        dtype = np.dtype(DTYPES[self.meta["dtype"]])
        files = self._files(split)
        for path, entry in files:
            self._check_size(path, entry["tokens"] * dtype.itemsize)
        path = files[0][0] if len(files) == 1 else self.folder
        needed = (block_size or 0) + 1
        if n_tokens < needed:
            raise DataError(
                f"{path} has {n_tokens:,} tokens, and a window of block_size + 1 needs {needed:,}: choose a smaller "
                f"block_size, or prepare more data ({_prepare_command(self.folder, '--force')})"
            )
        if "shards" in recorded:
            tokens = Shards(self.folder, [path for path, _ in files], [entry["tokens"] for _, entry in files], dtype)
        else:
            tokens = np.memmap(path, dtype=dtype, mode="r", shape=(n_tokens,))
        largest = max(_largest(tokens), recorded.get("max_token") or 0)
        if largest >= self.vocab_size:
            raise DataError(
                f"{path} holds token id {largest}, outside its vocabulary of {self.vocab_size:,} (ids 0 to "
                f"{self.vocab_size - 1}): {self._again}"
            )
        if n_tokens <= FULL_CHECK_TOKENS:
            self._check_content(split)
        return tokens

    def _check_size(self, path, expected):
        if not path.is_file():
            raise DataError(f"{path} is missing: {self._again}")
        size = path.stat().st_size
        if size != expected:
            problem = "truncated" if size < expected else "longer than recorded"
            raise DataError(f"{path} is {problem}: {size:,} bytes, but meta.json says {expected:,}: {self._again}")

    def _check_content(self, split):
        for path, entry in self._files(split):
            if entry.get("sha256") and file_sha256(path) != entry["sha256"]:
                raise DataError(f"{path} is not the file that meta.json describes (its sha256 differs): {self._again}")

    def verify(self):
        """Read both splits whole and compare their sha256 with meta.json. Raises DataError if they differ."""
        for split in SPLITS:
            self._check_content(split)

    def _sha256(self, split):
        """As recorded; of the files where meta.json has none, a hand-written one."""
        recorded = self.meta["splits"][split]
        if recorded.get("sha256"):
            return recorded["sha256"]
        hashes = [file_sha256(path) for path, _ in self._files(split)]
        if len(hashes) == 1:
            return hashes[0]
        return shards_sha256(hashes)

    def _bytes_per_token(self):
        if self.meta.get("bytes_per_token") is not None:
            return float(self.meta["bytes_per_token"])
        splits = self.meta["splits"]
        if all(splits[split].get("bytes") for split in SPLITS):
            return {split: splits[split]["bytes"] / splits[split]["tokens"] for split in SPLITS}
        return None


def file_sha256(path):
    """Hex sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def _largest(tokens):
    """The largest token id in a split (read whole up to FULL_CHECK_TOKENS, else in evenly spaced slices)."""
    n = len(tokens)
    if n <= FULL_CHECK_TOKENS:
        return int(tokens[:].max())
    starts = np.linspace(0, n - SPOT_TOKENS, SPOT_CHECKS).astype(np.int64)
    return max(int(tokens[start : start + SPOT_TOKENS].max()) for start in starts)


def _prepare_command(folder, *options):
    script = Path(folder) / "prepare.py"
    if not script.is_file():
        return "with its own prepare.py; data/pystdlib/prepare.py shows how"
    return shlex.join(["python", str(script), *options])


# ----------------------------------------------------------------------------------------------------------------------
# meta.json


def _read_meta(folder):
    path = folder / "meta.json"
    how = _prepare_command(folder)
    if not folder.is_dir():
        recipes = sorted(p.parent.name for p in Path(__file__).parent.glob("*/prepare.py"))
        raise DataError(f"there is no dataset folder {folder}: data/ can prepare {', '.join(recipes)}; or check "
                        "the path")
    if not path.exists():
        raise DataError(f"{folder} is not prepared (no meta.json): prepare it first ({how})")
    try:
        meta = json.loads(regular(path).read_bytes())
        wrong = next((name for name, right in _fields(meta) if not right), None)
    except KeyError as error:
        wrong = error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        wrong = "a field"
    if wrong:
        raise DataError(f"{path} is damaged ({wrong} is missing, or of the wrong type or range): prepare again ({how})")
    crc32 = meta_crc32(meta)
    if meta.get("crc32", crc32) != crc32:
        raise DataError(f"{path} is damaged or edited (its checksum is {crc32}, recorded as {meta['crc32']}): prepare "
                        f"again ({how}), or remove crc32 from it if it is right")
    return {"tokenizer": None, **meta}


def meta_crc32(meta):
    """The CRC-32 of all other fields of meta.json; one written by hand need not have it."""
    rest = {key: value for key, value in meta.items() if key != "crc32"}
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True).encode()):08x}"


def _is_count(value, least=0, most=2**63 - 1):
    return type(value) is int and least <= value <= most  # a bool is not a count


def _is_ratio(value):
    return type(value) in (int, float) and 0 < value <= sys.float_info.max


def _is_text(value):
    return isinstance(value, str)


def _fields(meta):
    """Yields (name, True if it has the right type and range) of every field that is used later, so that no run fails
    hours later or logs nonsense. Raises KeyError, TypeError or AttributeError if a field cannot be reached."""
    vocab_size = meta["vocab_size"]
    yield "vocab_size", _is_count(vocab_size, 1, 2**32)
    yield "dtype", meta["dtype"] in DTYPES
    table = meta.get("table")
    if meta.get("tokenizer") == "char":
        yield "table", _is_text(table) and 0 < len(table) == len(set(table)) <= vocab_size
    optional = {
        "bytes_per_token": _is_ratio,
        "xz9_bits_per_byte": _is_ratio,
        "end_of_text": lambda token: _is_count(token, 0, vocab_size - 1),
        "tokenizer": lambda name: re.fullmatch(TOKENIZERS, name),
        "table": _is_text,
    }
    for name, is_right in optional.items():
        yield name, meta.get(name) is None or is_right(meta[name])
    for split in SPLITS:
        for name, is_right in _fields_of_split(meta["splits"][split]):
            yield f"splits.{split}.{name}", is_right
    if meta.get("documents") is not None:
        documents = meta["documents"].get("val") or []
        yield "documents", _are_in_order(documents, meta["splits"]["val"]["tokens"])


def _fields_of_split(entry):
    """As `_fields`, of a split."""
    yield "tokens", _is_count(entry["tokens"])
    for name, is_right in {"max_token": _is_count, "bytes": _is_count, "sha256": _is_text}.items():
        yield name, entry.get(name) is None or is_right(entry[name])
    if "shards" not in entry:
        return
    hashes = []
    paths = []
    for shard in entry["shards"]:
        yield "shards", _is_count(shard["tokens"], 1)
        paths.append(PurePath(shard["file"]))
        if shard.get("sha256") is not None:
            hashes.append(shard["sha256"])
    yield "shards", sum(shard["tokens"] for shard in entry["shards"]) == entry["tokens"]
    yield "shards", len(paths) == len(set(paths))
    yield "shards", not any(path.is_absolute() or ".." in path.parts for path in paths)  # below the folder
    yield "shards", all(map(_is_text, hashes))
    if entry.get("sha256") and len(hashes) == len(paths):
        yield "sha256", entry["sha256"] == shards_sha256(hashes)


def _are_in_order(documents, n_tokens):
    """Whether the documents of the validation split follow each other within it."""
    end = 0
    for document in documents:
        start, length = document["start"], document["tokens"]
        if not (_is_text(document["name"]) and _is_count(start, end) and _is_count(length, 1)):
            return False
        end = start + length
    return end <= n_tokens


def describe(tokens, checked):
    """Print what a folder holds, and that it was `checked`."""
    counts = f"{len(tokens.train):,} train, {len(tokens.val):,} val tokens"
    print(f"{tokens.folder}: {counts}, {tokens.meta['dtype']}, vocabulary {tokens.vocab_size:,}, {checked}")


@dataclass
class Options:
    folder: Path  # holds train.bin, val.bin and meta.json


def main():
    tokens = Tokens(configurator.read(Options, sys.argv[1:], __doc__).folder)
    tokens.verify()
    describe(tokens, "sha256 verified")


if __name__ == "__main__":
    with main_error("prepared.py"):
        main()
