"""Any text as shards of tokens: a data set of Hugging Face, streamed, or local files, with any tokenizer.

    python data/tokens/prepare.py fineweb_edu                            # a recipe: into data/fineweb_edu
    python data/tokens/prepare.py openwebtext                            # as python data/openwebtext/prepare.py
    python data/tokens/prepare.py fineweb_edu --part=3/16                # on each of 16 machines, one shared folder
    python data/tokens/prepare.py allenai/c4 --subset=en --tokenizer=tiktoken:gpt2 --out data/c4
    python data/tokens/prepare.py --files corpus/ --tokenizer=hf:FOLDER --out data/mine  # parquet, jsonl(.gz, .zst) ...
    python train.py config/longhorn_1b3.py --dataset=fineweb_edu         # or --dataset=fineweb_edu:0.8,mine:0.2

Documents stay in the order of their source, each followed by the tokenizer's end of text: training reads windows in
random order anyway. A document is held out where the source has a validation split, and else by the hash of its place.
With --seed all documents are shuffled and split as in nanoGPT, by datasets' train_test_split: the recipe openwebtext.
A .txt file is one document, and is encoded in pieces that end with a line.

It may be killed at any time: the same command goes on. The unit of work is a source file (small ones are joined), and
what is kept is a shard of some 100M tokens: UNIT-SHARD.json, written after the tokens, says how far the file was read.
Tokens do not depend on --workers, --part or kills. meta.json comes last, from whichever part is the last to end.
"""

import argparse
import hashlib
import itertools
import json
import os
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository root
from data.loader import DTYPES, SPLITS, DataError, shards_sha256
from data.tokenizer import Text, add_tokenizer
from data.writer import finish, finished, preparing, replacing, run, token_dtype, warn_single_document, write_split

# datasets, pyarrow and tqdm are imported where they are used: they take seconds, and --help should not.

MISTRAL = "hf:mistralai/Mistral-7B-v0.1"
RECIPES = {  # name: the arguments it stands for
    "openwebtext": {"source": "Skylion007/openwebtext", "tokenizer": "tiktoken:gpt2", "seed": 2357},  # nanoGPT's
    "slimpajama": {"source": "cerebras/SlimPajama-627B", "tokenizer": MISTRAL},
    "slimpajama_reupload": {"source": "gmongaras/SlimPajama-627B_Reupload", "tokenizer": MISTRAL},
    "slimpajama_6b": {"source": "DKYoon/SlimPajama-6B", "tokenizer": MISTRAL},
    "fineweb_edu": {"source": "HuggingFaceFW/fineweb-edu", "subset": "sample-100BT", "tokenizer": "tiktoken:gpt2"},
    "climbmix": {"source": "karpathy/climbmix-400b-shuffle", "tokenizer": "tiktoken:gpt2"},
}
ENDINGS = tuple(kind + packed for kind in (".parquet", ".jsonl", ".json", ".txt") for packed in ("", ".gz", ".zst"))
SHARD_TOKENS = 100_000_000
UNIT_BYTES = 1 << 28  # small files are joined up to this
UNIT_DOCUMENTS = 100_000  # of a unit where all documents are shuffled
BATCH_CHARS = 1 << 20  # encoded at a time by a worker
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


def read_file(path, column):
    """The (text, whether a document ends with it) of a file. Raises DataError for what cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet

    try:
        if path.suffix == ".parquet":
            for batch in pa.parquet.ParquetFile(path).iter_batches(1000, columns=[column]):
                yield from ((as_text(value), True) for value in batch.column(0).to_pylist())
            return
        with pa.input_stream(path, compression="detect", buffer_size=1 << 22) as stream:
            if ".txt" in path.suffixes:
                rest = b""
                while piece := stream.read(BATCH_CHARS):
                    lines, newline, rest = (rest + piece).rpartition(b"\n")
                    yield (lines + newline).decode("utf-8", "replace"), False
                yield rest.decode("utf-8", "replace"), True
                return
            rest = b""
            while piece := stream.read(1 << 24):
                *lines, rest = (rest + piece).split(b"\n")
                yield from ((as_text(json.loads(line)[column]), True) for line in lines if line.strip())
            if rest.strip():
                yield as_text(json.loads(rest)[column]), True
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError) as error:
        why = f"no column {column!r}" if isinstance(error, LookupError) else in_short(error)
        raise DataError(f"{path} cannot be read ({why}): repair or leave out the file, or name another "
                        "--text_column") from None


def in_short(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"


def as_text(value):
    """A document, "" for a missing one. Raises TypeError for what is no text."""
    if not isinstance(value, (str, type(None))):
        raise TypeError(f"a document is {type(value).__name__}, not text")
    return value or ""


def shuffled_units(source, subset, files, column, fraction, seed, folder):
    """[(split, documents), ...] of all documents, shuffled and split as nanoGPT does it. `folder`: where those of local
    files are kept until the end. Raises DataError."""
    import datasets

    try:
        if files:
            paths = list(itertools.chain.from_iterable(local_units(files)))
            stamps = [(path, path.stat().st_mtime_ns) for path in paths]  # other files are other documents
            whole = datasets.Dataset.from_generator(whole_documents, gen_kwargs={"stamps": stamps, "column": column},
                                                    cache_dir=str(folder))
        else:
            whole = datasets.load_dataset(source, subset, split="train")
        parts = whole.train_test_split(fraction, seed=seed, shuffle=True)
    except Exception as error:  # the hub's client has a dozen exceptions for "cannot be reached"
        known = next((e for e in (error, error.__cause__) if isinstance(e, DataError)), None)
        raise known or DataError(f"{source or files[0]} cannot be loaded and split ({in_short(error)}): check the name "
                                 "and the network, bring its files here and pass --files, or give another "
                                 "--val_fraction") from None
    return [(split, part.select(range(first, min(first + UNIT_DOCUMENTS, len(part)))))
            for split, part in (("train", parts["train"]), ("val", parts["test"]))
            for first in range(0, len(part), UNIT_DOCUMENTS)]


def whole_documents(stamps, column):
    for path, _ in stamps:
        pieces = []
        for piece, end in read_file(path, column):
            pieces.append(piece)
            if end:
                yield {column: "".join(pieces)}
                pieces = []


def hub_units(source, subset):
    """[(split, streamed shard), ...] of a data set of Hugging Face. Raises DataError."""
    try:
        import datasets

        streams = datasets.load_dataset(source, subset, streaming=True)
        official = next((name for name in OFFICIAL if name in streams), None)
        names = {"train": "train"} | ({"val": official} if official else {})
        return [(split if official else None, streams[name].shard(streams[name].num_shards, i))
                for split, name in names.items() for i in range(streams[name].num_shards)]
    except Exception as error:  # the hub's client has a dozen exceptions for "cannot be reached"
        raise DataError(f"{source} cannot be streamed ({in_short(error)}): check name, --subset and network, or bring "
                        "its files here and pass --files") from None


def documents(unit, column):
    """The (split or None, text, whether a document ends with it) of a unit, in order."""
    if isinstance(unit, list):
        for path in unit:
            yield from ((None, *item) for item in read_file(path, column))
        return
    split, stream = unit
    try:
        for page in stream.iter(100):
            if column not in page:
                raise DataError(f"the documents have no column {column!r} (only {', '.join(page)}): give --text_column")
            yield from ((split, as_text(value), True) for value in page[column])
    except DataError:
        raise
    except Exception as error:  # a network that fails on the way has a dozen exceptions too
        raise DataError(f"the documents cannot be read on ({in_short(error)}): run the same command again") from None


# ------------------------------------------------------------------------------------------------------------- encoding

def held_out(place, fraction):
    """Whether the document at this place, a string, is one of that fraction of all."""
    return int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "big") < fraction * 2**64


def in_batches(items, fraction, name):
    """[(split, text, end), ...] of about BATCH_CHARS characters each."""
    batch, chars, number = [], 0, 0
    for split, text, end in items:
        batch.append((split or ("val" if held_out(f"{name}/{number}", fraction) else "train"), text, end))
        number += end
        chars += len(text)
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def token_arrays(text, pieces):
    """The token ids of each piece of text, in which <|endoftext|> is text like any other."""
    if text.kind == "bytes":
        return [np.frombuffer(piece.encode("utf-8", "surrogatepass"), np.uint8) for piece in pieces]
    if text.kind == "hf":
        return [found.ids for found in text.encoding.encode_batch_fast(pieces, add_special_tokens=False)]
    try:
        return [text.encoding.encode_to_numpy(piece, disallowed_special=()) for piece in pieces]
    except UnicodeEncodeError:  # half a pair of surrogates, which this function of tiktoken's does not replace
        return [text.encode_ordinary(piece) for piece in pieces]


def encode(text, batch, dtype):
    """Per split (its tokens, bytes, documents), and how many items the batch had."""
    eot, found = [text.eot_token], {split: ([np.empty(0, dtype)], 0, 0) for split in SPLITS}
    for (split, piece, end), ids in zip(batch, token_arrays(text, [piece for _, piece, _ in batch]), strict=True):
        arrays, size, n = found[split]
        arrays += [np.asarray(part, dtype) for part in (ids, eot)[:1 + end]]
        found[split] = arrays, size + len(piece.encode("utf-8", "surrogatepass")), n + end
    return {split: (np.concatenate(arrays), size, n) for split, (arrays, size, n) in found.items()}, len(batch)


def encode_unit(folder, number, unit, text, column, fraction, workers, progress):
    """Encode what is left of a unit, shard by shard. Returns the records of its shards."""
    dtype, records = np.dtype(DTYPES[token_dtype(text.n_vocab)]), []
    while True:  # what an earlier process finished
        record = read_record(folder, number, len(records), dtype.itemsize)
        if record is None:
            break
        records.append(record)
        if record["last"]:
            return records
    done = records[-1]["items"] if records else 0
    # of the unit's batches those after the last record; batches end where shards do, so they are cut the same again
    batches = in_batches(documents(unit, column), fraction, number)
    for batch in batches:
        if done == 0:
            batches = itertools.chain([batch], batches)
            break
        done -= len(batch)
    items, parts = (records[-1]["items"] if records else 0), {split: [] for split in SPLITS}
    with ThreadPoolExecutor(workers) as pool:  # threads: tokenizers are written in Rust, and release the GIL
        waiting = [pool.submit(encode, text, batch, dtype) for batch in itertools.islice(batches, 2 * workers)]
        while waiting:
            encoded, n = waiting.pop(0).result()
            waiting += [pool.submit(encode, text, batch, dtype) for batch in itertools.islice(batches, 1)]
            items += n
            for split, part in encoded.items():
                parts[split].append(part)
            progress(sum(len(ids) for ids, _, _ in encoded.values()))
            if not waiting or sum(len(ids) for split in SPLITS for ids, _, _ in parts[split]) >= SHARD_TOKENS:
                records.append(write_shard(folder, number, len(records), parts, items, not waiting, text.n_vocab))
                parts = {split: [] for split in SPLITS}
    if not records or not records[-1]["last"]:  # a unit without documents
        records.append(write_shard(folder, number, len(records), parts, items, True, text.n_vocab))
    return records


def write_shard(folder, unit, shard, parts, items, last, n_vocab):
    """Write UNIT-SHARD.train.bin and .val.bin, those with any tokens, and then their record, which is returned."""
    record = {"items": items, "last": last, "splits": {}}
    for split, of in parts.items():
        name = f"{unit:05d}-{shard:04d}.{split}.bin"
        if sum(len(ids) for ids, _, _ in of):
            entry = write_split(folder / name, (ids for ids, _, _ in of), n_vocab)
            record["splits"][split] = {"file": name, **entry, "bytes": sum(size for _, size, _ in of),
                                       "documents": sum(n for _, _, n in of)}
    with replacing(folder / f"{unit:05d}-{shard:04d}.json") as tmp, open(tmp, "w") as file:
        json.dump(record, file)
    return record


def read_record(folder, unit, shard, itemsize):
    """The record of a finished shard whose files are there in full, or None."""
    try:
        record = json.loads((folder / f"{unit:05d}-{shard:04d}.json").read_text())
        whole = all((folder / entry["file"]).stat().st_size == entry["tokens"] * itemsize
                    for entry in record["splits"].values())
    except (OSError, ValueError, LookupError):
        return None
    return record if whole else None


def finish_all(folder, n_units, meta, text):
    """meta.json, if the shards of all units are there: (Tokens, None), else (None, units that are missing)."""
    itemsize, shards, missing = np.dtype(DTYPES[token_dtype(text.n_vocab)]).itemsize, {s: [] for s in SPLITS}, 0
    for unit in range(n_units):
        for shard in itertools.count():
            record = read_record(folder, unit, shard, itemsize)
            if record is None:
                missing += 1
                break
            for split, entry in record["splits"].items():
                shards[split].append(entry)
            if record["last"]:
                break
    if missing:
        return None, missing
    splits = {}
    for split, entries in shards.items():
        if not entries:
            raise DataError(f"no document of {folder} is in {split}: choose another --val_fraction, or add documents")
        counted = (sum(entry[key] for entry in entries) for key in ("documents", "tokens"))
        warn_single_document(split, *counted, "choose another --val_fraction, or add documents")
        splits[split] = {key: sum(entry[key] for entry in entries) for key in ("tokens", "bytes", "documents")} | {
            "max_token": max(entry["max_token"] for entry in entries), "sha256": shards_sha256(entries),
            "shards": [{key: entry[key] for key in ("file", "tokens", "sha256")} for entry in entries]}
    return finish(folder, {**meta, "splits": splits}), 0


def prepare(out, source=None, subset=None, files=None, tokenizer="tiktoken:gpt2", vocab=None, text_column="text",
            val_fraction=0.0005, seed=None, part="1/1", workers=1, force=False):
    """Write this part's shards into `out`, and meta.json if it was the last. Returns (Tokens or None, what is left).

    Raises DataError, one line.
    """
    try:
        own, parts = map(int, part.split("/"))
    except ValueError:
        own = parts = 0
    if not 1 <= own <= parts:
        raise DataError(f"--part={part}: give it as 3/16, the third of sixteen")
    if not 0 < val_fraction < 1 or workers < 1:
        raise DataError(f"--val_fraction {val_fraction:g} must lie between 0 and 1, --workers {workers} be at least 1")
    if seed is not None and not 0 <= seed < 2**32:
        raise DataError(f"--seed {seed} must be in 0 .. {2**32 - 1}")
    if (source is None) == (not files):
        raise DataError("give a recipe or a name of Hugging Face's hub, or --files, and not both")
    text = Text(tokenizer, vocab=vocab)
    if text.kind == "hf":
        text.encoding.encode_special_tokens = True  # <|endoftext|> in a document is text
    folder, plan, shuffled = Path(out), Path(out) / "plan.json", Path(out) / "documents"
    stamps = [[(p.name, p.stat().st_size) for p in unit] for unit in local_units(files)] if files else [source, subset]
    recipe = {"source": source, "subset": subset, "files": files and [str(path) for path in files],
              "text_column": text_column, "val_fraction": val_fraction, "seed": seed}
    inputs = hashlib.sha256(json.dumps([stamps, text.name, text.table, text_column, val_fraction, seed]).encode())
    inputs = inputs.hexdigest()
    with preparing(folder / f"part-{own}-of-{parts}"):
        if force or plan.exists() and json.loads(plan.read_text())["inputs"] != inputs:
            if not force:
                raise DataError(f"{folder} is being prepared from other inputs: choose another --out, or --force")
            for path in [*folder.glob("*.bin"), *folder.glob("*.json")]:
                path.unlink()
        if tokens := finished(folder, inputs):
            return tokens, 0
        if seed is not None:
            units = shuffled_units(source, subset, files, text_column, val_fraction, seed, shuffled)
        else:
            units = local_units(files) if files else hub_units(source, subset)
        with replacing(plan) as tmp, open(tmp, "w") as file:
            json.dump({"inputs": inputs, "recipe": recipe, "units": len(units)}, file)
        from tqdm import tqdm

        todo = list(enumerate(units))[own - 1::parts]
        with tqdm(unit=" tokens", unit_scale=True) as bar:
            for k, (number, unit) in enumerate(todo):
                bar.set_description(f"file {k + 1} of {len(todo)}")
                encode_unit(folder, number, unit, text, text_column, val_fraction, workers, bar.update)
        meta = {"dataset": folder.resolve().name, "vocab_size": text.n_vocab, "tokenizer": text.name,
                "table": text.table, "end_of_text": text.eot_token, "how": shlex.join(["python", *sys.argv]),
                "recipe": recipe, "inputs": inputs}
        tokens, missing = finish_all(folder, len(units), meta, text)
        if tokens:
            shutil.rmtree(shuffled, ignore_errors=True)
        return tokens, missing


def main(argv):
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", help=f"{', '.join(RECIPES)}, or a name of the hub")
    parser.add_argument("--subset", help="of a data set of the hub, sample-10BT say")
    parser.add_argument("--files", nargs="+", help="local files, or folders of them")
    add_tokenizer(parser, "tiktoken:gpt2")
    parser.add_argument("--text_column", default="text", help="of parquet, jsonl and the hub (default text)")
    parser.add_argument("--val_fraction", type=float, default=0.0005, help="of documents, where no split is official")
    parser.add_argument("--seed", type=int, help="shuffle all documents before they are split, as nanoGPT does")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="this process's part of the files: 3/16")
    parser.add_argument("--workers", type=int, default=cores, help=f"threads (default: one per core, {cores} here)")
    parser.add_argument("--out", help="folder to write (default: data/ and the recipe's name)")
    parser.add_argument("--force", action="store_true", help="prepare again from the beginning")
    recipe = RECIPES.get(next((a for a in argv if a in RECIPES), None), {})
    parser.set_defaults(**{key: value for key, value in recipe.items() if key != "source"})
    args = vars(parser.parse_args(argv))
    if args["out"] is None:
        if args["source"] not in RECIPES:
            raise DataError("give --out, the folder to write")
        args["out"] = Path(__file__).parents[1] / args["source"]
    args["source"] = recipe.get("source", args["source"])
    if recipe and args["files"]:  # the recipe's own, brought from elsewhere
        args["source"] = None
    tokens, missing = prepare(**args)
    if tokens is None:
        print(f"{args['out']}: part {args['part']} is done; {missing} files are left to other parts")
        return None
    counts = (f"{s['tokens']:,} tokens of {s['documents']:,} documents" for s in tokens.meta["splits"].values())
    print(f"{tokens.folder}: {next(counts)} to train on, {next(counts)} for validation")
    return tokens


if __name__ == "__main__":
    run(lambda: main(sys.argv[1:]))
