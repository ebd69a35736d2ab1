"""Opens a prepared folder and checks it.

It holds train.bin and val.bin (token ids, uint16 or uint32, without a header), or shards of them, and meta.json, which
describes them. meta.json is written last, so a folder that has one is complete (data/writer.py).

    python data/prepared.py data/pystdlib     # describe a prepared folder and check its sha256
"""

import hashlib
import json
import shlex
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository root
import configurator  # noqa: E402
from common.errors import ConfigError, main_error  # noqa: E402
from data.shards import Shards  # noqa: E402
from runtime.records import BadRecord, fields, read_json  # noqa: E402

SPLITS = ("train", "val")
DTYPES = {"uint16": np.uint16, "uint32": np.uint32}
FULL_CHECK_TOKENS = 200_000_000  # splits up to this size are hashed when opened (a tenth of a second or two)
SPOT_CHECKS, SPOT_TOKENS = 256, 65_536  # number and length of the slices searched for the largest id


class DataError(ConfigError):
    """A problem with data that the user can fix. The message is one line: the value, the limit, what to do."""


def find_dataset(name):
    """The Path of a dataset folder: `name` itself, or data/`name`. If both exist, the prepared one."""
    here, ours = Path(name).expanduser(), Path(__file__).parent / name
    for folder in (here, ours):
        if (folder / "meta.json").exists():
            return folder
    return here if here.exists() else ours


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
        bytes_per_token: float, of the validation split; None if meta.json does not say.
        sha256: {"train": hex, "val": hex} as recorded, for shards a hash of their hashes.

    Raises DataError for a folder that is not prepared, and for files whose size, content or ids do not match meta.json.
    Ids are checked in 256 evenly spaced slices of 65,536 tokens. Content is checked only in splits of up to 200M
    tokens; for larger splits (OpenWebText has 9 billion) we trust the recorded sha256. `verify()` reads everything.
    Raises BadRecord for fields of meta.json that are missing or have the wrong type.
    """

    def __init__(self, folder, vocab_size=None, block_size=None):
        self.folder = Path(folder)
        self.meta = _read_meta(self.folder)
        with fields(f"the fields of {self.folder / 'meta.json'}"):
            self.vocab_size = self.meta["vocab_size"]
            self._again = f"prepare it again ({_prepare_command(self.folder, '--force')})"
            if vocab_size is not None and self.vocab_size > vocab_size:
                raise DataError(
                    f"the vocabulary of {self.folder} ({self.vocab_size:,} tokens) is larger than the model's "
                    f"vocab_size {vocab_size:,}: set vocab_size to at least {self.vocab_size}, or for existing "
                    "weights, prepare the text with their tokenizer"
                )
            self.train = self._open("train", block_size)  # (tokens,)
            self.val = self._open("val", block_size)  # (tokens,)
            self.sha256 = {split: self.meta["splits"][split]["sha256"] for split in SPLITS}
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
                f"{path} has {n_tokens:,} tokens, but a window of block_size + 1 needs {needed:,}: choose a smaller "
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
            if file_sha256(path) != entry["sha256"]:
                raise DataError(f"{path} is not the file that meta.json describes (its sha256 differs): {self._again}")

    def verify(self):
        """Read both splits whole and compare their sha256 with meta.json. Raises DataError if they differ."""
        for split in SPLITS:
            self._check_content(split)

    def _bytes_per_token(self):
        given, val = self.meta.get("bytes_per_token"), self.meta["splits"]["val"]
        if given is None and val.get("bytes"):
            given = val["bytes"] / val["tokens"]
        return given and float(given)


def file_sha256(path):
    """Hex sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def _largest(tokens):
    """The largest token id in evenly spaced slices, which cover all of a split of up to 16 million tokens."""
    starts = np.linspace(0, max(0, len(tokens) - SPOT_TOKENS), SPOT_CHECKS).astype(np.int64)
    return max(int(tokens[start : start + SPOT_TOKENS].max()) for start in set(starts))


def _prepare_command(folder, *options):
    script = Path(folder) / "prepare.py"
    if not script.is_file():
        return "docs/your-data.md shows how"
    return shlex.join(["python", str(script), *options])


# ----------------------------------------------------------------------------------------------------------------------
# meta.json


def _read_meta(folder):
    path = folder / "meta.json"
    how = _prepare_command(folder)
    if folder.is_file():
        raise DataError(f"{folder} is a file; prepare a dataset from it first: python data/tokens/prepare.py "
                        f"--files {shlex.quote(str(folder))} --out data/{shlex.quote(folder.stem)}")
    if not folder.is_dir():
        names = sorted(path.name for path in Path(__file__).parent.glob("[!_]*") if path.is_dir())
        raise DataError("there is no dataset folder "
                        f"{folder}: check the path, or choose one in data/: {', '.join(names)}")
    if not path.exists():
        if (folder / "plan.json").exists():
            raise DataError(f"{folder} is only partly prepared (no meta.json): run the same command again")
        if any(folder.glob("train.[bn][ip][ny]")):
            how += f", or if another program wrote its files, python data/adopt.py {shlex.quote(str(folder))}"
        raise DataError(f"{folder} is not prepared (no meta.json): prepare it first ({how})")
    try:
        return {"tokenizer": None, **read_sealed(path)}
    except BadRecord as error:
        raise DataError(f"{folder}: {error}: prepare again ({how}), or if it is right, set its crc32 to this checksum"
                        ) from None


def read_sealed(path):
    """The dict in a JSON file that data/writer.py sealed with its CRC-32. Raises BadRecord."""
    record = read_json(path)
    crc32, known = meta_crc32(record), record.get("crc32")
    if known != crc32:
        raise BadRecord(f"{path.name} is damaged or edited (its checksum is {crc32}, recorded as {known})")
    return record


def meta_crc32(meta):
    """The CRC-32 of all fields of meta.json but crc32 itself. If it matches, they are as data/writer.py wrote them."""
    rest = {key: value for key, value in meta.items() if key != "crc32"}
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True).encode()):08x}"


def describe(tokens, checked):
    """Print one line about a folder's contents, which ends with the text `checked`."""
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
