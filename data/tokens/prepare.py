"""Any text as shards of tokens: a data set of Hugging Face, streamed, or local files, with any tokenizer.

    python data/tokens/prepare.py fineweb_edu                            # a recipe: into data/fineweb_edu
    python data/tokens/cluster.py fineweb_edu --cluster=slurm            # the same tokens, made on many machines
    python data/tokens/prepare.py allenai/c4 --subset=en --tokenizer=tiktoken:gpt2 --out data/c4
    python data/tokens/prepare.py --files corpus/ --tokenizer=hf:FOLDER --out data/mine  # parquet, jsonl(.gz, .zst) ...
    python data/openwebtext/prepare.py                                   # the recipe openwebtext
    python data/tokens/prepare.py openwebtext --files owt/ --vocab gpt2_vocab            # a machine without network
    python train.py config/longhorn_1b3.py --dataset=fineweb_edu         # or --dataset=fineweb_edu:0.8,mine:0.2

Documents stay in the order of their source, each followed by the tokenizer's end of text: training reads windows in
random order anyway. A document is held out where the source has a validation split, and else by the hash of its place.
A .txt file is one document, and is encoded in pieces that end with a line, or of a line above 4 MB with a word.

Local files are known by the sha256 of their content, for which each start reads them whole, about 1 GB a second; a
folder with tokens from other content is refused, and so is a file that changes while it is read.

With --shuffle, as in openwebtext, the tokens are those of nanoGPT, in its order: datasets' train_test_split shuffles
the documents and holds some out, which needs all of them on disk, in the cache of datasets (HF_HOME; OpenWebText: 54
GB). OpenWebText gives 9,035,582,198 tokens to train on and 4,434,897 for validation; the script warns of other counts.

It can be killed at any time; rerun the command to resume after the last shard, of some 100M tokens, in plan.json.
Tokens depend neither on --workers nor on kills.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository root
import configurator
from configurator import Count, Seed, Share
from data.prepared import DTYPES, SPLITS, DataError, file_sha256
from data.shards import shards_sha256
from data.tokenizer import Text, canonical
from data.writer import finish, finished, preparing, run, token_dtype, warn_single_document, write_split
from runtime.records import BadRecord, fields, read_json, write_json

# datasets, pyarrow and tqdm are imported where they are used: they take seconds, and --help should not.

MISTRAL = "hf:mistralai/Mistral-7B-v0.1"
OWT, NANOGPT_SPLIT = "Skylion007/openwebtext", {"val_fraction": 0.0005, "shuffle": 2357}
RECIPES = {  # name: the arguments it stands for
    "openwebtext": {"source": OWT, "tokenizer": "tiktoken:gpt2", **NANOGPT_SPLIT},
    "slimpajama": {"source": "cerebras/SlimPajama-627B", "tokenizer": MISTRAL},
    "slimpajama_reupload": {"source": "gmongaras/SlimPajama-627B_Reupload", "tokenizer": MISTRAL},
    "slimpajama_6b": {"source": "DKYoon/SlimPajama-6B", "tokenizer": MISTRAL},
    "fineweb_edu": {"source": "HuggingFaceFW/fineweb-edu", "subset": "sample-100BT", "tokenizer": "tiktoken:gpt2"},
    "climbmix": {"source": "karpathy/climbmix-400b-shuffle", "tokenizer": "tiktoken:gpt2"},
}
OWT_DOCUMENTS, OWT_TOKENS = 8_013_769, {"train": 9_035_582_198, "val": 4_434_897}  # as nanoGPT published them
ENDINGS = (".parquet", *(kind + packed for kind in (".jsonl", ".json", ".txt") for packed in ("", ".gz", ".zst")))
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
SHARD_TOKENS = 100_000_000
UNIT_BYTES, UNIT_DOCUMENTS = 1 << 28, 200_000  # small files are joined up to this; of shuffled documents
BATCH_CHARS = 1 << 20  # encoded at a time by a worker
MOST_OF_A_LINE = 1 << 28  # bytes of a document in a jsonl file, which is read whole
OFFICIAL = ("validation", "val", "valid", "test")  # names of a split that holds documents out


# -------------------------------------------------------------------------------------------------- where documents are

def local_units(paths):
    """[[Path, ...], ...]: the files, folders read through, in units. Raises DataError."""
    units, size = [], UNIT_BYTES
    for path in map(Path, paths):
        below = [p for p in sorted(path.rglob("*")) if p.name.endswith(ENDINGS)] if path.is_dir() else [path]
        if not below or not all(p.is_file() and p.name.endswith(ENDINGS) for p in below):
            raise DataError(f"--files {path}: no such file, or a folder without any, that ends in {', '.join(ENDINGS)}")
        for file in below:
            if size >= UNIT_BYTES:
                units.append([])
                size = 0
            units[-1].append(file)
            size += file.stat().st_size
    return units


def stamps(units):
    """{path: what changes when the file is replaced or written to} of units of local files; {} of other units."""
    paths = [path for unit in units or () if isinstance(unit, list) for path in unit]
    return {path: (s.st_ino, s.st_size, s.st_mtime_ns) for path, s in ((path, path.stat()) for path in paths)}


def check_unchanged(units, before):
    """Raises DataError if a local file is no longer the one whose stamp `before` holds."""
    for path, stamp in stamps(units).items():
        if stamp != before[path]:
            raise DataError(f"{path} changed while it was read: leave it alone, and prepare again with --force")


def contents(units):
    """[[(name, sha256 of the content), ...], ...] of units of local files. Raises OSError."""
    with ThreadPoolExecutor() as pool:
        hashes = pool.map(file_sha256, itertools.chain(*units))
        return [[(path.name, next(hashes)) for path in unit] for unit in units]


def as_text(value):
    """A document as it stands in a column: None is an empty one. Raises TypeError for what is no text."""
    if not isinstance(value, str | None):
        raise TypeError(f"{str(value)[:20]} is not text")
    return value or ""


def in_short(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"


def pieces_of_text(stream):
    """The (bytes, whether it is the last) of a text's pieces: whole lines; a line above 4 BATCH_CHARS is cut before
    spaces, or between characters where there are none."""
    rest, size = [], 0
    while piece := stream.read(BATCH_CHARS):
        lines, newline, last = piece.rpartition(b"\n")
        if newline:
            yield b"".join([*rest, lines, newline]), False
            rest, size = [], 0
        rest.append(last)
        size += len(last)
        if size > 4 * BATCH_CHARS:
            line = b"".join(rest)
            cut = line.rfind(b" ")
            if cut < 1:
                cut = next(i for i in range(size - 1, 0, -1) if line[i] & 0xC0 != 0x80 or i < size - 4)
            yield line[:cut], False
            rest, size = [line[cut:]], size - cut
    yield b"".join(rest), True


def read_file(path, column):
    """The (text, whether a document ends with it) of a file. Raises DataError for what cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        if path.suffix == ".parquet":
            for batch in pa.parquet.ParquetFile(path).iter_batches(1000, columns=[column]):
                yield from ((as_text(text), True) for text in batch.column(0).to_pylist())
            return
        with pa.input_stream(path, compression="detect", buffer_size=1 << 22) as stream:
            if path.name.removesuffix(".gz").removesuffix(".zst").endswith(".txt"):
                for piece, end in pieces_of_text(stream):
                    yield piece.decode("utf-8", "replace"), end
                return
            rest = []  # the parts of a line that is not whole yet
            while piece := stream.read(1 << 24):
                *lines, last = piece.split(b"\n")
                if lines:
                    lines[0], rest = b"".join([*rest, lines[0]]), []
                rest.append(last)
                if sum(map(len, rest)) > MOST_OF_A_LINE:
                    raise ValueError(f"a line of more than {MOST_OF_A_LINE:,} bytes")
                yield from ((as_text(json.loads(line)[column]), True) for line in lines if line.strip())
            if (line := b"".join(rest)).strip():
                yield as_text(json.loads(line)[column]), True
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        why = f"no column {column!r}" if isinstance(error, LookupError) else in_short(error)
        raise DataError(f"{path} cannot be read ({why}): repair or leave out the file, or name another --text_column"
                        ) from None


def hub_units(source, subset):
    """[(split or None, function that opens a shard), ...] of a data set of the hub, streamed. Raises DataError."""
    try:
        import datasets

        streams = datasets.load_dataset(source, subset, streaming=True)
        official = next((name for name in OFFICIAL if name in streams), None)
        names = {"train": "train"} | ({"val": official} if official else {})
        return [(split if official else None, functools.partial(streams[name].shard, streams[name].num_shards, i))
                for split, name in names.items() for i in range(streams[name].num_shards)]
    except Exception as error:  # the hub's client has a dozen exceptions for "cannot be reached"
        raise DataError(f"{source} cannot be streamed ({in_short(error)}): check name, --subset and network, or bring "
                        "its files here and pass --files") from None


def shuffled_units(source, subset, units, column, val_fraction, seed, key, before):
    """[(split, function that opens a part), ...] of datasets' train_test_split. Raises DataError.

    units: of local files, or None; key: the hash of their content, under which their documents are cached; before:
    their stamps.
    """
    try:
        import datasets

        if units is None:
            whole = datasets.load_dataset(source, subset, split="train")
        else:
            whole = datasets.Dataset.from_generator(functools.partial(rows, units, column, before),
                                                    fingerprint=key[:16])
    except Exception as error:
        error = error.__cause__ or error  # that of a generator, a DataError from read_file say
        if isinstance(error, DataError):
            raise error from None
        raise DataError(f"{source or 'the files'} cannot be loaded ({in_short(error)}): check name, network and disk, "
                        "or bring its files here and pass --files") from None
    try:
        parts = whole.train_test_split(test_size=val_fraction, seed=seed)
    except ValueError as error:
        raise DataError(f"{len(whole):,} documents cannot be split at --val_fraction {val_fraction:g} "
                        f"({in_short(error)})") from None
    return [(split, functools.partial(part.select, range(i, min(i + UNIT_DOCUMENTS, len(part)))))
            for split, part in (("train", parts["train"]), ("val", parts["test"]))
            for i in range(0, len(part), UNIT_DOCUMENTS)]


def rows(units, column, before):
    """The documents of local files as rows of a Dataset. Raises DataError."""
    pieces = []
    for unit in units:
        for _, text, end in documents(unit, column):
            pieces.append(text)
            if end:
                yield {column: "".join(pieces)}
                pieces.clear()
    check_unchanged(units, before)  # or the cache would hold other documents under this content's key


def documents(unit, column):
    """The (split or None, text, whether a document ends with it) of a unit, in order. Raises DataError."""
    if isinstance(unit, list):
        for path in unit:
            yield from ((None, *item) for item in read_file(path, column))
        return
    split, opened = unit
    try:
        for page in opened().iter(100):
            if column not in page:
                raise DataError(f"the documents have no column {column!r} (only {', '.join(page)}): give --text_column")
            yield from ((split, as_text(text), True) for text in page[column])
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"the documents cannot be read on ({in_short(error)}): run the same command again, or name "
                        "another --text_column") from None


# ------------------------------------------------------------------------------------------------------------- encoding

def split_of(official, place, fraction):
    """The split of the document at a place ("unit/number"): the source's, or, by hash, 'val' for that fraction."""
    place = int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "big")
    return official or ("val" if place < fraction * 2**64 else "train")


def in_batches(units, column, fraction, first=0, items=0):
    """(unit, items of it so far, [(split, text, end), ...]) per BATCH_CHARS characters, after so many of unit `first`.

    Raises DataError.
    """
    for unit in range(first, len(units)):
        batch, chars, document, n = [], 0, 0, 0
        for n, (official, text, end) in enumerate(documents(units[unit], column), 1):
            if n > items:
                batch.append((split_of(official, f"{unit}/{document}", fraction), text, end))
                chars += len(text)
            document += end
            if chars >= BATCH_CHARS:
                yield unit, n, batch
                batch, chars = [], 0
        if n < items:
            raise DataError(f"file {unit + 1} of the source has changed since its first shards were written: prepare "
                            "again with --force")
        if batch:
            yield unit, n, batch
        items = 0


def token_arrays(text, pieces):
    """The token ids of each piece of text, in which <|endoftext|> is text like any other."""
    if text.kind == "bytes":
        return [np.frombuffer(piece.encode("utf-8", "surrogatepass"), np.uint8) for piece in pieces]
    if text.kind == "char":
        return [text.encode_ordinary(piece) for piece in pieces]
    if text.kind == "hf":
        text.encoding.encode_special_tokens = True
        return [encoding.ids for encoding in text.encoding.encode_batch_fast(pieces, add_special_tokens=False)]
    try:
        return [text.encoding.encode_to_numpy(piece, disallowed_special=()) for piece in pieces]
    except UnicodeEncodeError:  # half a pair of surrogates, which this function of tiktoken's does not replace
        return [text.encode_ordinary(piece) for piece in pieces]


def encode(text, batch, dtype):
    """{split: (its tokens, bytes, documents)} of a batch."""
    eot, encoded = [text.eot_token], {split: ([np.empty(0, dtype)], 0, 0) for split in SPLITS}
    for (split, piece, end), ids in zip(batch, token_arrays(text, [piece for _, piece, _ in batch]), strict=True):
        arrays, size, n = encoded[split]
        arrays += [np.asarray(part, dtype) for part in (ids, eot)[:1 + end]]
        encoded[split] = arrays, size + len(piece.encode("utf-8", "surrogatepass")), n + end
    return {split: (np.concatenate(arrays), size, n) for split, (arrays, size, n) in encoded.items()}


def encode_shards(folder, shards, units, text, column, fraction, workers):
    """Write the shards that follow `shards` and append their records: {"unit", "items" of it so far, "splits"}. Yields
    after each of them."""
    from tqdm import tqdm

    dtype, parts = np.dtype(DTYPES[token_dtype(text.n_vocab)]), {split: [] for split in SPLITS}
    start = (shards[-1]["unit"], shards[-1]["items"]) if shards else ()
    with ThreadPoolExecutor(workers) as pool, tqdm(unit=" tokens", unit_scale=True) as bar:
        # threads: tokenizers are written in Rust, and release the GIL
        submitted = ((unit, items, pool.submit(encode, text, batch, dtype))
                     for unit, items, batch in in_batches(units, column, fraction, *start))
        waiting = list(itertools.islice(submitted, 2 * workers))
        while waiting:
            unit, items, encoded = waiting.pop(0)
            for split, part in encoded.result().items():
                parts[split].append(part)
                bar.update(len(part[0]))
            waiting += itertools.islice(submitted, 1)
            bar.set_description(f"file {unit + 1} of {len(units)}")
            if not waiting or sum(len(ids) for split in SPLITS for ids, _, _ in parts[split]) >= SHARD_TOKENS:
                splits = write_shard(folder, f"{len(shards):05d}.", parts, text.n_vocab)
                shards.append({"unit": unit, "items": items, "splits": splits})
                parts = {split: [] for split in SPLITS}
                yield


def write_shard(folder, prefix, parts, n_vocab):
    """Write PREFIXtrain.bin and PREFIXval.bin, those with any tokens. Returns {split: its entry for meta.json}.

    parts: {split: [(tokens, bytes, documents), ...]}.
    """
    entries = {}
    for split, of in parts.items():
        if any(len(ids) for ids, _, _ in of):
            name = f"{prefix}{split}.bin"
            entries[split] = {"file": name, **write_split(folder / name, (ids for ids, _, _ in of), n_vocab),
                              "bytes": sum(size for _, size, _ in of), "documents": sum(n for _, _, n in of)}
    return entries


def is_whole(folder, splits, n_vocab, read=False):
    """Whether the files of a shard are there in full; with `read`, also whether their content is the recorded one."""
    itemsize = np.dtype(DTYPES[token_dtype(n_vocab)]).itemsize
    files = [(folder / entry["file"], entry["tokens"] * itemsize) for entry in splits.values()]
    return all(path.is_file() and path.stat().st_size == size for path, size in files) and not (
        read and any(file_sha256(folder / entry["file"]) != entry["sha256"] for entry in splits.values()))


def finish_shards(folder, shards, meta):
    """Write meta.json. shards: [{split: its entry}, ...] in order. Returns Tokens. Raises DataError."""
    splits = {}
    for split in SPLITS:
        entries = [shard[split] for shard in shards if split in shard]
        if not entries:
            raise DataError(f"no document of {folder} is in {split}: choose another --val_fraction, or add documents")
        total = {key: sum(entry[key] for entry in entries) for key in ("tokens", "bytes", "documents")}
        splits[split] = {
            **total,
            "max_token": max(entry["max_token"] for entry in entries),
            "sha256": shards_sha256([entry["sha256"] for entry in entries]),
            "shards": [{key: entry[key] for key in ("file", "tokens", "sha256")} for entry in entries],
        }
        warn_single_document(split, total["documents"], total["tokens"],
                             "choose another --val_fraction, or add documents")
    return finish(folder, {"dataset": folder.resolve().name, **meta, "splits": splits})


def count_warning(meta):
    """The line to print where OpenWebText, split as nanoGPT does, gave other counts than published; else None."""
    counts, recipe = {split: meta["splits"][split]["tokens"] for split in SPLITS}, meta["recipe"]
    n = sum(meta["splits"][split]["documents"] for split in SPLITS)
    usual = meta["tokenizer"] == "gpt2" and {key: recipe[key] for key in NANOGPT_SPLIT} == NANOGPT_SPLIT
    if not usual or recipe["source"] != OWT and n != OWT_DOCUMENTS or counts == OWT_TOKENS:
        return None
    return (f"WARNING: THESE ARE NOT THE PUBLISHED TOKEN COUNTS: train {counts['train']:,}, val {counts['val']:,} of "
            f"{n:,} documents here, train {OWT_TOKENS['train']:,}, val {OWT_TOKENS['val']:,} of {OWT_DOCUMENTS:,} "
            "published: losses cannot be compared with nanoGPT's")


def plan(source=None, subset=None, files=None, tokenizer="tiktoken:gpt2", vocab=None, text_column="text",
         val_fraction=0.0005, shuffle=None):
    """What a preparation works on: (units, Text, what meta.json says of them, the files' stamps). Raises DataError.

    The hash meta["inputs"] is that of all that the tokens follow from. With --shuffle the units are those of local
    files, or None: they are shuffled later (`shuffled_units`).
    """
    if (source is None) == (not files):
        raise DataError("give a recipe or a name of Hugging Face's hub, or --files, and not both")
    units, table = local_units(files) if files else None, None
    before = stamps(units)
    if canonical(tokenizer) == "char":
        if not files:
            raise DataError("--tokenizer=chars reads all documents for their characters first: it needs --files")
        table = "".join(sorted({"\0"}.union(*(text for unit in units for _, text, _ in documents(unit, text_column)))))
    text = Text(tokenizer, table, vocab)
    if files:
        documents_from = contents(units)
    elif shuffle is None:
        units = hub_units(source, subset)
        documents_from = [source, subset, len(units)]
    else:
        documents_from = [source, subset]
    inputs = [documents_from, text.name, text.table, text_column, val_fraction] + [shuffle] * (shuffle is not None)
    recipe = {"source": source, "subset": subset, "files": files and [str(path) for path in files],
              "text_column": text_column, "val_fraction": val_fraction, "shuffle": shuffle}
    return units, text, {"vocab_size": text.n_vocab, "tokenizer": text.name, "table": text.table,
                         "end_of_text": text.eot_token, "how": shlex.join(["python", *sys.argv]), "recipe": recipe,
                         "inputs": hashlib.sha256(json.dumps(inputs).encode()).hexdigest()}, before


def begin(folder, inputs, force):
    """The Tokens of a folder that is finished already, else None. Raises DataError where it holds others."""
    if force:
        for path in [folder / "plan.json", folder / "meta.json", *folder.glob(f"{'[0-9]' * 5}[-.]*")]:
            path.unlink(missing_ok=True)
    elif not {inputs_of(folder / "plan.json"), inputs_of(folder / "meta.json")} <= {None, inputs}:
        raise DataError(f"{folder} holds tokens from other inputs: choose another --out, or --force")
    return finished(folder, inputs)


def inputs_of(path):
    """What a plan.json or meta.json was made from; None where there is no such file."""
    try:
        return read_json(path).get("inputs") or "unknown" if path.exists() else None
    except BadRecord:
        return "unknown"


def prepare(out, workers=1, force=False, **choices):
    """Write the shards and then meta.json into `out`, unless they are there. Returns Tokens.

    choices: as `plan` takes them. Raises DataError, one line.
    """
    units, text, meta, before = plan(**choices)
    recipe = meta["recipe"]
    column, fraction, shuffle = recipe["text_column"], recipe["val_fraction"], recipe["shuffle"]
    with preparing(out) as folder:
        if tokens := begin(folder, meta["inputs"], force):
            return tokens
        path, shards = folder / "plan.json", []
        if path.exists():
            with fields(f"{path}: its records"):
                shards += itertools.takewhile(lambda shard: is_whole(folder, shard["splits"], text.n_vocab, True),
                                              read_json(path).get("shards", []))
        save = lambda: write_json(path, {"inputs": meta["inputs"], "shards": shards})
        save()
        if shuffle is not None:
            units = shuffled_units(recipe["source"], recipe["subset"], units, column, fraction, shuffle,
                                   meta["inputs"], before)
        for _ in encode_shards(folder, shards, units, text, column, fraction, workers):
            check_unchanged(units, before)
            save()
        return finish_shards(folder, [shard["splits"] for shard in shards], meta)


@dataclass
class Source:
    """Options of prepare.py and cluster.py."""

    source: str = None  # a recipe (RECIPES in data/tokens/prepare.py), or a name of the hub
    subset: str = None  # of a data set of the hub, sample-10BT say
    files: list[str] = None  # local files, or folders of them; with a recipe, in its place
    tokenizer: str = "tiktoken:gpt2"  # bytes, chars, tiktoken:NAME, hf:NAME on the hub, or hf:FOLDER
    vocab: str = None  # folder with a tiktoken encoding's files, to need no network
    text_column: str = "text"  # of parquet, jsonl and the hub
    val_fraction: Share = 0.0005  # of documents, where no split is official
    out: Path = None  # folder to write; not given: data/ and the recipe's name
    force: bool = False  # prepare again from the beginning

    ARGUMENTS = ("source",)


@dataclass
class Options(Source):
    shuffle: Seed = None  # shuffle and split as nanoGPT does (seed 2357)
    workers: Count = CORES  # threads; the default: one per core


def read(options_class, doc):
    """The arguments of `prepare` on the command line, those of a recipe filled in. Raises ConfigError."""
    options = configurator.read(options_class, sys.argv[1:], doc)
    recipe = RECIPES.get(options.source, {})
    arguments = dataclasses.asdict(options) | recipe | options.overrides
    if arguments["out"] is None:
        if not recipe:
            raise DataError("give --out, the folder to write")
        arguments["out"] = Path(__file__).parents[1] / options.source
    if recipe:
        arguments["source"] = None if options.files else recipe["source"]
    return arguments


def say(tokens):
    """Print what a finished folder holds."""
    counts = (f"{s['tokens']:,} tokens of {s['documents']:,} documents" for s in tokens.meta["splits"].values())
    print(f"{tokens.folder}: {next(counts)} to train on, {next(counts)} for validation")


def main():
    tokens = prepare(**read(Options, __doc__))
    say(tokens)
    if warning := count_warning(tokens.meta):
        print(warning, file=sys.stderr)


if __name__ == "__main__":
    run(main)
