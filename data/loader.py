"""A prepared dataset: checks its files, orders its windows, and makes the batches for training and evaluation.

A prepared folder holds train.bin and val.bin (token ids, uint16 or uint32, without a header), or shards of them, and
meta.json, which describes them. meta.json is written last, so a folder that has one is complete (data/writer.py).

    window w of a split reads tokens [w B, w B + B] : x the first B of them, y the last B     (B = block_size)
    step s of training reads windows permutation(epoch)[s W : (s + 1) W]                       (W = windows per step)

Training order has no state: `step_windows` is a pure function of (seed, step). Every window comes once per epoch, and
neither the number of processes nor the micro-batch size changes the order, so resuming needs only the step.

    python data/loader.py data/pystdlib     # describe a prepared folder and check its sha256
    python data/loader.py FOLDER --adopt --vocab_size=50257 --tokenizer=gpt2     # use nanoGPT's train.bin and val.bin
"""

import functools
import hashlib
import json
import math
import re
import shlex
import sys
import zlib
from pathlib import Path, PurePath

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository root
from data.shards import Shards, file_stamp, shards_sha256  # noqa: E402
from runtime.errors import ConfigError, regular  # noqa: E402

# torch is imported only when a batch is made: importing it takes seconds, and `prepare.py --help` should be quick.

SPLITS = ("train", "val")
DTYPES = {"uint16": np.uint16, "uint32": np.uint32}
TOKENIZERS = "bytes|char|gpt2|(tiktoken|hf|bpe):.+"  # their names in meta.json, see data/tokenizer.py
SEPARATORS = {"bytes": 0, "gpt2": 50256}  # tokenizer: the token that ends a document
FULL_CHECK_TOKENS = 200_000_000  # splits up to this size are read whole when opened (a tenth of a second or two)
MAX_WINDOWS = 2**24  # per step; the indices of more would take hundreds of MB
SPOT_CHECKS, SPOT_TOKENS = 256, 65_536  # of longer splits, so many evenly spaced slices of this length are read


class DataError(ConfigError):
    """A problem with data that the user can fix. The message is one line: the value, the limit, what to do."""


# ----------------------------------------------------------------------------------------------------------------------
# reading: a prepared folder


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

    Raises DataError for: a missing folder, bin or meta.json, a file whose size differs from the recorded one, an
    unknown dtype, an empty split, a block longer than a split, a vocabulary larger than the model's, token ids outside
    the dataset's own vocabulary, content that differs from what was prepared. The last two are checked on whole splits
    of up to 200M tokens. For longer ones (OpenWebText has 9 billion) only the ids are checked, in 256 evenly spaced
    slices of 65,536 tokens; the rest is trusted as prepare.py recorded it. `verify()` reads everything.
    """

    def __init__(self, folder, vocab_size=None, block_size=None):
        self.folder = Path(folder)
        self.meta = _read_meta(self.folder)
        self.vocab_size = self.meta["vocab_size"]
        if vocab_size is not None and self.vocab_size > vocab_size:
            raise DataError(
                f"the vocabulary of {self.folder} ({self.vocab_size:,} tokens) is larger than the model's vocab_size "
                f"{vocab_size:,}: set vocab_size to at least {self.vocab_size}"
            )
        self.train, self.val = (self._open(split, block_size) for split in SPLITS)  # (tokens,) each
        self.sha256 = {split: self.meta["splits"][split].get("sha256") or self._content(split) for split in SPLITS}
        self.bytes_per_token = self._bytes_per_token()

    def _open(self, split, block_size):
        path, recorded = self.folder / f"{split}.bin", self.meta["splits"][split]
        dtype, n_tokens = np.dtype(DTYPES[self.meta["dtype"]]), recorded["tokens"]
        again = f"prepare it again ({_prepare_command(self.folder, force=True)})"
        for file, entry in self._files(split):
            if not file.is_file():
                raise DataError(f"{file} is missing: {again}")
            size, expected = file.stat().st_size, entry["tokens"] * dtype.itemsize
            if size != expected:
                problem = "truncated" if size < expected else "longer than recorded"
                raise DataError(f"{file} is {problem}: {size:,} bytes, but meta.json says {expected:,}: {again}")
        if n_tokens == 0:
            raise DataError(f"{path} is empty: prepare more data ({_prepare_command(self.folder, force=True)})")
        if block_size is not None and n_tokens < block_size + 1:
            raise DataError(
                f"block_size {block_size} is longer than {split}.bin ({n_tokens:,} tokens; a window needs block_size + "
                "1): choose a smaller block or prepare more data"
            )
        if "shards" in recorded:
            path = self.folder
            tokens = Shards(*zip(*((file, entry["tokens"]) for file, entry in self._files(split)), strict=True), dtype)
        else:
            tokens = np.memmap(path, dtype=dtype, mode="r", shape=(n_tokens,))
        largest = max(_largest(tokens), recorded.get("max_token") or 0)
        if largest >= self.vocab_size:
            raise DataError(
                f"{path} holds token id {largest}, outside its vocabulary of {self.vocab_size:,} (ids 0 to "
                f"{self.vocab_size - 1}): {again}"
            )
        if n_tokens <= FULL_CHECK_TOKENS:
            self._check_content(split)
        return tokens

    def _files(self, split):
        """[(Path, entry in meta.json)] of a split's files: train.bin, or the shards."""
        entries = self.meta["splits"][split].get("shards", [self.meta["splits"][split]])
        return [(self.folder / entry.get("file", f"{split}.bin"), entry) for entry in entries]

    def _content(self, split):
        """The sha256 of a split whose meta.json has none, a hand-written one."""
        hashes = [file_sha256(file) for file, _ in self._files(split)]
        return shards_sha256([{"sha256": sha256} for sha256 in hashes]) if hashes[1:] else hashes[0]

    def _bytes_per_token(self):
        if self.meta.get("bytes_per_token") is not None:
            return float(self.meta["bytes_per_token"])
        splits = self.meta["splits"]
        if all(splits[split].get("bytes") for split in SPLITS):
            return {split: splits[split]["bytes"] / splits[split]["tokens"] for split in SPLITS}
        return None

    def verify(self):
        """Read both splits whole and compare their sha256 with meta.json. Raises DataError if they differ."""
        for split in SPLITS:
            self._check_content(split)

    def _check_content(self, split):
        for path, entry in self._files(split):
            if entry.get("sha256") and file_sha256(path) != entry["sha256"]:
                raise DataError(
                    f"{path} is not the file that meta.json describes (its sha256 differs): prepare it again "
                    f"({_prepare_command(self.folder, force=True)})"
                )


def file_sha256(path):
    """Hex sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def _prepare_command(folder, force=False):
    script = Path(folder) / "prepare.py"
    if not script.is_file():
        return "with its own prepare.py; data/pystdlib/prepare.py shows how"
    return shlex.join(["python", str(script), *["--force"] * force])


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
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        wrong = error if isinstance(error, KeyError) else "a field"
    if wrong:
        raise DataError(f"{path} is damaged ({wrong} is missing, or of the wrong type or range): prepare again ({how})")
    if meta["dtype"] not in DTYPES:
        raise DataError(f"{path}: dtype {meta['dtype']!r} is not {' or '.join(DTYPES)}: prepare again ({how})")
    if meta.get("crc32", crc32 := meta_crc32(meta)) != crc32:
        raise DataError(f"{path} is damaged or edited (its checksum is {crc32}, recorded as {meta['crc32']}): prepare "
                        f"again ({how}), or remove crc32 from it if it is right")
    return {"tokenizer": None, **meta}


def meta_crc32(meta):
    """The CRC-32 of all other fields of meta.json; one written by hand need not have it."""
    rest = {key: value for key, value in meta.items() if key != "crc32"}
    return f"{zlib.crc32(json.dumps(rest, sort_keys=True).encode()):08x}"


def _fields(meta):
    """Yields (name, True if it has the right type and range) of every field that is used later, so that no run fails
    hours later or logs nonsense. Raises KeyError, TypeError or AttributeError if a field cannot be reached."""
    count = lambda n, least=0, most=2**63 - 1: type(n) is int and least <= n <= most  # a bool is not a count
    ratio = lambda x: type(x) in (int, float) and 0 < x <= sys.float_info.max
    text = lambda x: isinstance(x, str)
    maybe = lambda check, x, *limits: x is None or check(x, *limits)
    vocab_size, table, splits = meta["vocab_size"], meta.get("table"), meta["splits"]
    yield "vocab_size", count(vocab_size, 1, 2**32)
    yield "dtype", text(meta["dtype"])
    for key in ("bytes_per_token", "xz9_bits_per_byte"):
        yield key, maybe(ratio, meta.get(key))
    yield "end_of_text", maybe(count, meta.get("end_of_text"), 0, vocab_size - 1)
    yield "tokenizer", maybe(lambda name: re.fullmatch(TOKENIZERS, name), meta.get("tokenizer"))
    yield "table", maybe(text, table)
    if meta.get("tokenizer") == "char":
        yield "table", text(table) and 0 < len(table) == len(set(table)) <= vocab_size
    for split in SPLITS:
        entry = splits[split]
        yield f"splits.{split}.tokens", count(entry["tokens"])
        for key in ("max_token", "bytes"):
            yield f"splits.{split}.{key}", maybe(count, entry.get(key))
        yield f"splits.{split}.sha256", maybe(text, entry.get("sha256"))
        if "shards" in entry:
            shards, name = entry["shards"], f"splits.{split}.shards"
            yield name, all(count(shard["tokens"], 1) and maybe(text, shard.get("sha256")) for shard in shards)
            yield name, sum(shard["tokens"] for shard in shards) == entry["tokens"]
            files = [PurePath(shard["file"]) for shard in shards]  # below the folder, each once
            yield name, len(files) == len(set(files)) and not any(f.is_absolute() or ".." in f.parts for f in files)
            if entry.get("sha256") and all(shard.get("sha256") for shard in shards):
                yield f"splits.{split}.sha256", entry["sha256"] == shards_sha256(shards)
    if meta.get("documents") is not None:  # of the validation split, in order
        end = 0
        for document in meta["documents"].get("val") or ():
            yield "documents", text(document["name"]) and count(document["start"], end) and count(document["tokens"], 1)
            end = document["start"] + document["tokens"]
        yield "documents", end <= splits["val"]["tokens"]


def _largest(tokens):
    """The largest token id in a split (read whole up to FULL_CHECK_TOKENS, else in evenly spaced slices)."""
    n = len(tokens)
    if n <= FULL_CHECK_TOKENS:
        return int(tokens[:].max())
    starts = np.linspace(0, n - SPOT_TOKENS, SPOT_CHECKS).astype(np.int64)
    return max(int(tokens[start : start + SPOT_TOKENS].max()) for start in starts)


# ----------------------------------------------------------------------------------------------------------------------
# which windows, in which order


def n_windows(n_tokens, block_size):
    """Number of non-overlapping training windows in a split: (n_tokens - 1) // block_size."""
    return (n_tokens - 1) // block_size


@functools.lru_cache(maxsize=16)  # a step may straddle two epochs, in each dataset of a mixture
def permutation(n, seed, epoch):
    """The order of n windows in an epoch, (n,) int32 or int64, read-only."""
    order = np.random.default_rng([seed, epoch]).permutation(n)
    order = order.astype(np.int32 if n <= 2**31 else np.int64)  # for 8.8M windows, 35 MB instead of 70
    order.flags.writeable = False  # shared through the cache
    return order


def step_windows(n_windows, windows_per_step, seed, step):
    """The training windows of one optimiser step, over all processes.

    A pure function of its arguments: consecutive steps read consecutive parts of
    `default_rng([seed, epoch]).permutation(n_windows)` for epoch 0, 1, ...; a step may straddle two epochs.

    Args:
        n_windows: windows in the split; windows_per_step: batch_tokens // block_size; seed, step: from 0.
    Returns: (windows_per_step,) int64 window indices.
    Raises: DataError without windows, or for a negative seed or step.
    """
    if n_windows < 1:
        raise DataError(f"{n_windows} windows to train on: choose a smaller block or prepare more data")
    if windows_per_step < 1:
        raise DataError(f"{windows_per_step} windows per step: the batch must hold at least one block")
    if seed < 0 or step < 0:
        raise DataError(f"seed {seed}, step {step}: both must be 0 or more")
    out = np.empty(windows_per_step, dtype=np.int64)  # (W,)
    filled, position = 0, step * windows_per_step  # Python integers: no overflow, however long the run
    while filled < windows_per_step:
        epoch, offset = divmod(position + filled, n_windows)
        take = min(n_windows - offset, windows_per_step - filled)
        out[filled : filled + take] = permutation(int(n_windows), int(seed), epoch)[offset : offset + take]
        filled += take
    return out


def get_batch(tokens, starts, block_size, device="cpu"):
    """Inputs and targets for some windows.

    Args:
        tokens: (n_tokens,) memmap, Shards or array; starts: (W,) first tokens, each followed by block_size more;
        device: a torch device or its name; copies to CUDA are pinned and asynchronous.
    Returns: x, y: (W, block_size) int64 torch tensors; y is x shifted by one token.
    Raises: DataError for a window outside the split (a negative start would silently read from the end).
    """
    starts = np.asarray(starts, dtype=np.int64)
    last = len(tokens) - block_size - 1
    if starts.size and (starts.min() < 0 or starts.max() > last):
        bad = starts.min() if starts.min() < 0 else starts.max()
        raise DataError(f"the window starting at token {bad:,} is outside the split ({len(tokens):,} tokens, windows "
                        f"of {block_size} start at 0 .. {last:,}): check the data order")
    if isinstance(tokens, Shards):
        rows = np.stack([tokens[start:start + block_size + 1] for start in starts.tolist()])
    else:
        rows = np.lib.stride_tricks.sliding_window_view(tokens, block_size + 1)[starts]  # (W, B + 1)
    return inputs_and_targets(rows, device)


def inputs_and_targets(rows, device):
    """rows: (W, B + 1) of any integer dtype -> x, y: (W, B) int64 on the device; y is x shifted by one token."""
    import torch

    xy = torch.from_numpy(np.stack([rows[:, :-1], rows[:, 1:]]).astype(np.int64))  # (2, W, B): one transfer
    if torch.device(device).type == "cuda":
        xy = xy.pin_memory().to(device, non_blocking=True)
    elif torch.device(device).type != "cpu":
        xy = xy.to(device)
    return xy[0], xy[1]


def eval_windows(n_tokens, block_size, limit_tokens=0):
    """The fixed windows of an evaluation: non-overlapping, in order, the same for every model, batch and process count.

    Args:
        n_tokens: length of the split; block_size: tokens predicted per window;
        limit_tokens: 0 for the whole split, including a shorter last window (every token but the first is predicted
            once); otherwise the number of predicted tokens, in windows evenly spaced over the split.
    Returns: (n, 2) int64 array of (start, length): inputs [start, start + length), targets shifted by one. Only the
        last length may be below block_size. The lengths sum to n_tokens - 1, or to min(limit_tokens, n_tokens - 1).
    Raises: DataError if there is nothing to predict.
    """
    predicted = n_tokens - 1
    if predicted < 1:
        raise DataError(f"{n_tokens} tokens leave nothing to predict: prepare more data")
    if limit_tokens < 0:
        raise DataError(f"{limit_tokens} tokens to evaluate on: give 0 for all of them, or a positive number")
    total = min(limit_tokens, predicted) if limit_tokens else predicted
    available, n = math.ceil(predicted / block_size), math.ceil(total / block_size)
    starts = np.arange(n, dtype=np.int64) * available // n * block_size  # (n,)
    lengths = np.full(n, block_size, dtype=np.int64)
    lengths[-1] = total - (n - 1) * block_size
    return np.stack([starts, lengths], axis=1)


def document_starts(tokens, most=64):
    """First tokens of the validation split's documents, (documents,) int64: the units that intervals resample.

    Documents are those in meta.json, or end at separators; neighbours are joined until there are at most `most`. With
    fewer than eight documents, eight equal stretches stand in for them.
    """
    listed = (tokens.meta.get("documents") or {}).get("val")
    ends = np.flatnonzero(tokens.val[:] == SEPARATORS.get(tokens.meta["tokenizer"], -1)) + 1
    starts = [d["start"] for d in listed] if listed else np.append(0, ends[ends < len(tokens.val)])
    if len(starts) < 8:
        starts = np.linspace(0, len(tokens.val), 8, endpoint=False)
    return np.asarray(starts, np.int64)[:: -(-len(starts) // most)]


class TokenData:
    """A prepared dataset for training: the micro-batches of each step, the batches of an evaluation, its identity.

    Args:
        tokens: Tokens, opened with this block_size; block_size: tokens predicted per training window;
        batch_tokens: tokens per optimiser step over all processes, a multiple of block_size;
        seed: of the order of windows; device: where batches go, a torch device or its name.

    Attributes:
        windows_per_step: int, batch_tokens / block_size; n_train_windows: int, windows in the training split;
        identity: {"train": hex, "val": hex}, the sha256 of both splits: equal data has equal identity;
        meta: dict, meta.json; sequences_per_step: int, over all processes;
        file_times: [[bytes, mtime in ns] of train.bin, of val.bin] at construction.

    Raises DataError for a batch that is not a whole number of windows, or has more than 2^24 of them.
    """

    def __init__(self, tokens, block_size, batch_tokens, seed, device="cpu"):
        if batch_tokens < block_size or batch_tokens % block_size:
            nearest = max(1, round(batch_tokens / block_size)) * block_size
            raise DataError(
                f"batch_tokens {batch_tokens} is not a multiple of block_size {block_size}: the nearest is {nearest}"
            )
        self.tokens, self.block_size, self.batch_tokens = tokens, block_size, batch_tokens
        self.seed, self.device = seed, device
        self.windows_per_step = batch_tokens // block_size
        if self.windows_per_step > MAX_WINDOWS:
            raise DataError(
                f"batch_tokens {batch_tokens} is {self.windows_per_step:,} windows of {block_size}: at most "
                f"{MAX_WINDOWS:,} per step; choose fewer batch_tokens"
            )
        self.n_train_windows = n_windows(len(tokens.train), block_size)
        self.identity, self.meta, self.sequences_per_step = tokens.sha256, tokens.meta, self.windows_per_step
        self._stamps = [file_stamp(split) for split in (tokens.train, tokens.val)]
        self.file_times = [list(stamp[1:]) for stamp in self._stamps]

    def rank_slice(self, rank, world_size):
        """The slice of a step's windows that one process reads. Raises DataError if they cannot be shared equally."""
        if self.windows_per_step % world_size:
            more = -(-self.windows_per_step // world_size) * world_size * self.block_size
            raise DataError(
                f"batch_tokens {self.batch_tokens} is {self.windows_per_step} windows of {self.block_size}, which "
                f"{world_size} processes cannot share equally: choose batch_tokens {more} or another number of "
                "processes"
            )
        per_rank = self.windows_per_step // world_size
        return slice(rank * per_rank, (rank + 1) * per_rank)

    def starts(self, step, rank=0, world_size=1):
        """(windows_per_step / world_size,) int64: first tokens of this process's windows in a step (from 0)."""
        starts = step_windows(self.n_train_windows, self.windows_per_step, self.seed, step) * self.block_size
        return starts[self.rank_slice(rank, world_size)]

    def micro_batches(self, step, rank, world_size, micro_batch_size):
        """Yields one process's micro-batches of a step, in order, as (x, y, weight).

        x, y: (at most micro_batch_size, block_size) int64 on the device; weight: float, the micro-batch's share of this
        process's windows. A step's weights add up to 1, so the sum of weight x mean loss is the mean over the step,
        however it is divided, also if the last micro-batch is smaller.
        """
        starts = self.starts(step, rank, world_size)
        for i in range(0, len(starts), micro_batch_size):
            part = starts[i : i + micro_batch_size]
            x, y = get_batch(self.tokens.train, part, self.block_size, self.device)
            yield x, y, len(part) / len(starts)

    def eval_batches(self, windows, rank, world_size, batch_size):
        """Yields one process's batches of validation windows: (x, y), (at most batch_size, length) int64 on the device.

        windows: (n, 2) start and length, from eval_windows; process r reads every world_size-th, from r on. All windows
        in a batch have the same length: the split's shorter last window comes last, by itself.
        """
        windows = windows[rank::world_size]
        whole = windows[windows[:, 1] == windows[:1, 1]]
        shorter = windows[windows[:, 1] != windows[:1, 1]]
        batches = [whole[i : i + batch_size] for i in range(0, len(whole), batch_size)]
        for batch in [*batches, *shorter[:, None]]:
            length = int(batch[0, 1])
            rows = np.stack([self.tokens.val[start : start + length + 1] for start, _ in batch])  # (W, length + 1)
            yield inputs_and_targets(rows, self.device)

    def derived(self, config, world_size):
        """Values for config.json that follow from the data and the settings. Raises DataError like `rank_slice`."""
        self.rank_slice(0, world_size)
        return {
            "windows_per_step": self.windows_per_step,
            "accumulation": math.ceil(self.windows_per_step / world_size / config.micro_batch_size),
            "epochs": config.max_iters * self.windows_per_step / self.n_train_windows,
            "train_tokens": len(self.tokens.train),
            "val_tokens": len(self.tokens.val),
        }

    def where(self, step, rank, world_size):
        """The place of a step's batch, for an error message."""
        first = int(self.starts(step, rank, world_size)[0])
        return f"the last batch began at token {first:,} of {self.tokens.folder / 'train.bin'}"

    def verify(self):
        """Read both splits whole and compare their sha256 with meta.json. Raises DataError if they differ."""
        self.tokens.verify()

    def check_unchanged(self):
        """Raises DataError if train.bin or val.bin is no longer the file that was opened. It takes two calls of stat().

        A truncated file would end the process with SIGBUS, and a different one would be trained on unnoticed.
        """
        for split, before in zip((self.tokens.train, self.tokens.val), self._stamps, strict=True):
            now = file_stamp(split)
            if now == before:
                continue
            if isinstance(now, str):
                change = now
            elif now[1] != before[1]:
                change = f"{before[1]:,} bytes then, {now[1]:,} now"
            else:
                change = "replaced" if now[0] != before[0] else "written to"
            name = getattr(split, "filename", self.tokens.folder)
            raise DataError(
                f"{name} changed during the run ({change}): put the old file back, or prepare it again, and "
                "continue from the last checkpoint with --resume=auto"
            )


def find_dataset(name):
    """The Path of a dataset folder: `name` itself, or data/`name`."""
    return Path(name) if Path(name).is_dir() else Path(__file__).parent / name


if __name__ == "__main__":
    from data import writer  # it imports this file as data.loader, whose DataError it raises

    writer.run(writer.main)
