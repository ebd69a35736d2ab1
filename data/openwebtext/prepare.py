"""OpenWebText as GPT-2 tokens: nanoGPT's split and seed, prepared in parallel, and in pieces that survive a kill.

8,013,769 documents; each is encoded with GPT-2's BPE and ends with <|endoftext|> (50256). They are shuffled and split
by datasets' train_test_split(test_size=0.0005, seed=2357), as nanoGPT does it, so losses can be compared:
9,035,582,198 tokens to train on and 4,434,897 for validation. The script warns when its counts differ.

It may be killed at any time. The work is done in shards of 10,000 documents, each written under another name and then
renamed; running the same command again skips finished shards. train.bin appears only at the end.

    python data/openwebtext/prepare.py --workers 16        # 25 GB download, 54 GB cache, 18 GB result, 18 GB shards
    python data/openwebtext/prepare.py --files owt/*.parquet --vocab gpt2_vocab      # a machine without network
    python data/openwebtext/prepare.py --tokenizer hf:mistralai/Mistral-7B-v0.1      # and bytes, chars, tiktoken:NAME
"""

import argparse
import glob
import hashlib
import json
import os
import shlex
import shutil
import signal
import sys
import threading
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository root
from data.loader import DTYPES, DataError
from data.tokenizer import VOCAB_SHA256, Text, add_tokenizer, canonical, gpt2_encoding
from data.writer import (
    finish,
    finished,
    preparing,
    replacing,
    run,
    token_dtype,
    warn_single_document,
    write_split,
)
from records import BadRecord, read_json

# datasets and tqdm are imported where they are used: they take seconds, and --help should not.

HUB = "Skylion007/openwebtext"
N_DOCUMENTS = 8_013_769
PUBLISHED = {"train": 9_035_582_198, "val": 4_434_897}  # tokens, of the whole set with VAL_FRACTION and SEED
VAL_FRACTION, SEED = 0.0005, 2357
SHARD_DOCUMENTS = 10_000  # ~11M tokens: 22 MB, some ten seconds of one core's work
READ_DOCUMENTS = 1_000  # held in memory at a time by a worker
PIECE_TOKENS = 4 << 20  # held in memory at a time when the shards are joined

KINDS = {"parquet": (".parquet",), "json": (".jsonl", ".json", ".jsonl.gz", ".json.gz"), "text": (".txt", ".txt.gz")}


# ----------------------------------------------------------------------------------------------------------------------
# inputs: the documents


def open_tokenizer(tokenizer, vocab, documents):
    """What has encode_ordinary, eot_token, n_vocab: tiktoken's GPT-2, or a Text. Characters: those of all documents."""
    if canonical(tokenizer) == "gpt2":
        return gpt2_encoding(vocab)
    if canonical(tokenizer) != "char":
        return Text(tokenizer, vocab=vocab)
    (column,) = documents.column_names
    pages = (documents[i : i + READ_DOCUMENTS][column] for i in range(0, len(documents), READ_DOCUMENTS))
    return Text("char", "".join(sorted({"\0"}.union(*(text or "" for page in pages for text in page)))))


def load_documents(files, text_column, workers, cache_dir=None):
    """The documents as a datasets.Dataset (memory-mapped from disk). Raises DataError with the way out."""
    datasets = _import("datasets")
    options = {"split": "train", "cache_dir": cache_dir, "num_proc": max(1, min(workers, 8))}
    if files is None:
        try:
            documents = datasets.load_dataset(HUB, **options)
        except Exception as error:  # the hub's client has a dozen exceptions for "cannot be reached"
            raise DataError(
                f"{HUB} cannot be fetched ({_first_line(error)}): check the network (HF_ENDPOINT names a mirror), or "
                "bring its parquet files here and pass --files"
            ) from None
    else:
        kind = kind_of(files)
        options["num_proc"] = min(options["num_proc"], len(files))
        if kind == "text":
            options["sample_by"] = "document"  # a file is a document
        names = [glob.escape(os.path.abspath(path)) for path in files]  # or "x[0].txt" would be taken for a pattern
        try:
            documents = datasets.load_dataset(kind, data_files=names, **options)
        except Exception as error:
            raise _which_file(kind, files, names) or DataError(f"--files: {_first_line(error)}") from None
    if text_column not in documents.column_names:
        found = ", ".join(documents.column_names)
        raise DataError(f"the documents have no column {text_column!r} (only {found}): name one with --text_column")
    kind = documents.features[text_column]
    if getattr(kind, "dtype", None) not in ("string", "large_string"):
        raise DataError(f"the column {text_column!r} holds {kind}, not text: name another one with --text_column")
    return documents.select_columns([text_column])


def expand_files(paths):
    """--files as a list of files: a folder stands for the readable files below it, sorted."""
    files = []
    for path in map(Path, paths):
        below = [p for p in sorted(path.rglob("*")) if _kind(p)] if path.is_dir() else [path]
        if not all(p.is_file() for p in below) or not below:
            raise DataError(f"--files {path}: no such file, or a folder without parquet, jsonl or txt files")
        files += below
    return files


def _kind(path):
    return next((kind for kind, endings in KINDS.items() if path.name.endswith(endings)), None)


def kind_of(files):
    """'parquet', 'json' or 'text'. Raises DataError for others and for a mixture."""
    kinds = {_kind(path) for path in files}
    if len(kinds) > 1 or None in kinds:
        other = next((path for path in files if _kind(path) in (None, *(kinds - {_kind(files[0])}))), files[0])
        endings = ", ".join(ending for endings in KINDS.values() for ending in endings)
        raise DataError(f"--files {other}: files must be of one kind, and end in one of {endings}")
    return kinds.pop()


def split_documents(documents, val_fraction, seed):
    """nanoGPT's split: {"train": Dataset, "val": Dataset}, both shuffled."""
    try:
        parts = documents.train_test_split(test_size=val_fraction, seed=seed, shuffle=True)
    except ValueError as error:
        raise DataError(
            f"{len(documents):,} documents cannot be split at --val_fraction {val_fraction:g} ({_first_line(error)})"
        ) from None
    return {"train": parts["train"], "val": parts["test"]}


def _import(name):
    try:
        return __import__(name)
    except ImportError:
        raise DataError(f"the package {name} is missing: pip install -r requirements.txt") from None


def _which_file(kind, files, names):
    """The DataError that names the file which the datasets package cannot read, and where; its own error does not."""
    for path, name in zip(files, names, strict=True):
        read = 0
        try:
            for _ in _import("datasets").load_dataset(kind, data_files=[name], split="train", streaming=True):
                read += 1
        except Exception as error:
            why = _first_line(error)
            return DataError(f"--files {path}: cannot be read as {kind} after {read:,} documents ({why}): mend it, or "
                             "leave it out")
    return None


def _first_line(error):
    text = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {text if len(text) <= 100 else text[:97] + '...'}"


# ----------------------------------------------------------------------------------------------------------------------
# shards: the unit of work. NAME.bin holds the tokens; NAME.json is written after it and marks it as complete


def encode_documents(texts, encoding, dtype):
    """((tokens,) array of dtype: the documents' ids, <|endoftext|> after each; the number of bytes of the texts)."""
    ids = []
    for text in texts:
        ids += encoding.encode_ordinary(text)  # ordinary: "<|endoftext|>" in a text is not a special token
        ids.append(encoding.eot_token)
    return np.array(ids, dtype=dtype), sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)


def encode_shard(documents, first, last, path, encoding):
    """Encode documents [first, last) into path.bin and path.json; return the number of documents."""
    dtype, tokens, n_bytes = DTYPES[token_dtype(encoding.n_vocab)], 0, 0
    (column,) = documents.column_names
    with replacing(path.with_suffix(".bin")) as tmp, open(tmp, "wb") as file:
        for start in range(first, last, READ_DOCUMENTS):
            texts = [text or "" for text in documents[start : min(start + READ_DOCUMENTS, last)][column]]
            ids, size = encode_documents(texts, encoding, dtype)
            file.write(ids.data)
            tokens, n_bytes = tokens + len(ids), n_bytes + size
    with replacing(path.with_suffix(".json")) as tmp, open(tmp, "wb") as file:
        file.write(json.dumps({"tokens": tokens, "bytes": n_bytes, "documents": last - first}).encode())
    return last - first


def read_shard(path, itemsize):
    """The record of a finished shard, or None."""
    try:
        record = read_json(path.with_suffix(".json"))
        whole = path.with_suffix(".bin").stat().st_size == record["tokens"] * itemsize
    except (OSError, BadRecord, KeyError, TypeError):
        return None
    return record if whole else None


def plan_shards(folder, splits, plan, shard_documents):
    """[(split, first, last, path), ...] of all shards. Shards of another plan (other inputs) are removed first."""
    shards, plan_file = folder / "shards", folder / "shards" / "plan.json"
    if shards.exists() and (not plan_file.is_file() or plan_file.read_bytes() != plan.encode()):
        print(f"{shards}: made from other inputs; starting again")
        shutil.rmtree(shards)
    shards.mkdir(exist_ok=True)
    with replacing(plan_file) as tmp, open(tmp, "wb") as file:
        file.write(plan.encode())
    return [
        (split, first, min(first + shard_documents, len(documents)), shards / f"{split}-{i:05d}")
        for split, documents in splits.items()
        for i, first in enumerate(range(0, len(documents), shard_documents))
    ]


_worker = {}  # the arguments of a worker process


def _start_worker(splits, encoding):
    _worker.update(splits=splits, encoding=encoding)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent():
    parent_process().join()  # returns when the parent is gone, even by SIGKILL
    os._exit(1)


def _work(split, first, last, path):
    return encode_shard(_worker["splits"][split], first, last, path, _worker["encoding"])


def encode_all(todo, splits, encoding, workers, progress):
    """Encode the shards of `todo`, calling `progress(documents)` after each. One worker: in this process."""
    if workers == 1:
        for split, first, last, path in todo:
            progress(encode_shard(splits[split], first, last, path, encoding))
        return
    # spawn, not fork: a forked worker would keep the folder's lock if this process were killed
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (splits, encoding)) as pool:
        waiting = {pool.submit(_work, *shard) for shard in todo}
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    progress(future.result())
        except BrokenProcessPool:
            raise DataError(
                f"a worker died (out of memory?): run the same command again with fewer --workers than {workers}; "
                "finished shards are kept"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


# ----------------------------------------------------------------------------------------------------------------------


def _stream(paths, dtype):
    for path in paths:
        with open(path, "rb") as file:
            while len(piece := np.fromfile(file, dtype, PIECE_TOKENS)):
                yield piece


def count_warning(n_documents, splits, usual):
    """The line to print when the whole of OpenWebText gave other token counts than published, else None.

    Args: splits: of meta.json; usual: whether vocabulary, split and seed are nanoGPT's.
    """
    if not usual or n_documents != N_DOCUMENTS:
        return None
    counts = {split: splits[split]["tokens"] for split in PUBLISHED}
    if counts == PUBLISHED:
        return None
    differ = "; ".join(
        f"{split}: {counts[split]:,} tokens here, {PUBLISHED[split]:,} published"
        for split in PUBLISHED
        if counts[split] != PUBLISHED[split]
    )
    return f"WARNING: THESE ARE NOT THE PUBLISHED TOKEN COUNTS ({differ}): losses cannot be compared with nanoGPT's"


def prepare(
    out,
    files=None,
    workers=1,
    vocab=None,
    encoding=None,
    tokenizer="tiktoken:gpt2",
    text_column="text",
    val_fraction=VAL_FRACTION,
    seed=SEED,
    shard_documents=SHARD_DOCUMENTS,
    cache_dir=None,
    force=False,
):
    """Write the dataset into `out` unless it is there already. Returns (Tokens, whether anything was written).

    Args: files: None for the hub's OpenWebText, or local files and folders; tokenizer, vocab: see data/tokenizer.py;
    encoding: a tiktoken.Encoding with an <|endoftext|>, in their place; cache_dir: of the datasets package.
    Raises: DataError, one line.
    """
    if not 0 < val_fraction < 1:
        raise DataError(f"--val_fraction {val_fraction:g}: it must lie between 0 and 1")
    if workers < 1 or shard_documents < 1:
        raise DataError(f"--workers {workers}, --shard_documents {shard_documents}: both must be at least 1")
    if not 0 <= seed < 2**32:
        raise DataError(f"--seed {seed}: it must be in 0 .. {2**32 - 1}")
    if files is not None:
        files = expand_files(files)
        kind_of(files)
    with preparing(out) as folder:
        name = encoding.name if encoding else canonical(tokenizer)
        # files of the same name, size and time count as the same: hashing 40 GB of text would take too long
        source = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files] if files else HUB
        recipe = {"source": source, "text_column": text_column, "val_fraction": val_fraction, "seed": seed}
        inputs = hashlib.sha256(json.dumps([recipe, name], sort_keys=True).encode()).hexdigest()
        if not force and (tokens := finished(folder, inputs)):
            shutil.rmtree(folder / "shards", ignore_errors=True)  # killed between the last rename and the tidying
            return tokens, False

        if not encoding and name != "char":
            encoding = open_tokenizer(tokenizer, vocab, None)  # first: it fails within a second
        documents = load_documents(files, text_column, workers, cache_dir)
        encoding = encoding or open_tokenizer(tokenizer, vocab, documents)
        if files is None and len(documents) != N_DOCUMENTS:
            print(f"WARNING: {HUB} HAS {len(documents):,} DOCUMENTS, NOT THE {N_DOCUMENTS:,} OF 2019", file=sys.stderr)
        splits = split_documents(documents, val_fraction, seed)
        dtype = np.dtype(DTYPES[token_dtype(encoding.n_vocab)])
        plan = json.dumps({"inputs": inputs, "documents": len(documents), "shard_documents": shard_documents})
        if force:
            shutil.rmtree(folder / "shards", ignore_errors=True)
        shards = plan_shards(folder, splits, plan, shard_documents)
        todo = [shard for shard in shards if not read_shard(shard[3], dtype.itemsize)]
        done = sum(last - first for _, first, last, _ in shards) - sum(last - first for _, first, last, _ in todo)
        with _import("tqdm").tqdm(total=len(documents), initial=done, unit="doc", unit_scale=True) as bar:
            encode_all(todo, splits, encoding, min(workers, max(1, len(todo))), bar.update)

        entries = {}
        for split, part in splits.items():
            paths = [path for of, _, _, path in shards if of == split]
            pieces = _stream([path.with_suffix(".bin") for path in paths], dtype)
            entries[split] = write_split(folder / f"{split}.bin", pieces, encoding.n_vocab)
            entries[split]["bytes"] = sum(read_shard(path, dtype.itemsize)["bytes"] for path in paths)
            entries[split]["documents"] = len(part)
            way_out = f"{'raise' if split == 'val' else 'lower'} --val_fraction (now {val_fraction:g}), or add --files"
            warn_single_document(split, len(part), entries[split]["tokens"], way_out)
        usual = (name, val_fraction, seed) == ("gpt2", VAL_FRACTION, SEED)
        meta = {
            "dataset": "openwebtext",
            "vocab_size": encoding.n_vocab,
            "tokenizer": name,
            "table": getattr(encoding, "table", None),
            "vocabulary": VOCAB_SHA256 if name == "gpt2" else None,  # sha256 of the files that --vocab needs
            "end_of_text": encoding.eot_token,
            "splits": entries,
            "how": shlex.join(["python", *sys.argv]),
            "recipe": {**recipe, "source": [str(path) for path in files] if files else HUB},
            "inputs": inputs,
            "versions": {package: _import(package).__version__ for package in ("datasets", "tiktoken")},
        }
        tokens = finish(folder, meta)
        shutil.rmtree(folder / "shards")
        if warning := count_warning(len(documents), entries, usual):
            print(warning, file=sys.stderr)
        return tokens, True


def main():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", nargs="+", help="parquet, jsonl(.gz) or txt (one document each) files or folders")
    add_tokenizer(parser, "tiktoken:gpt2")
    parser.add_argument("--workers", type=int, default=cores, help=f"processes (default: one per core, {cores} here)")
    parser.add_argument("--text_column", default="text", help="of parquet and jsonl files (default text)")
    parser.add_argument("--val_fraction", type=float, default=VAL_FRACTION, help="of the documents (default 0.0005)")
    parser.add_argument("--seed", type=int, default=SEED, help="of shuffle and split (default 2357)")
    parser.add_argument("--shard_documents", type=int, default=SHARD_DOCUMENTS, help="per shard (default 10000)")
    parser.add_argument("--cache_dir", help="of the datasets package (default: its own, see HF_HOME)")
    parser.add_argument("--out", default=Path(__file__).parent, help="folder to write (default: the script's own)")
    parser.add_argument("--force", action="store_true", help="prepare again even if it is finished")
    args = vars(parser.parse_args())
    tokens, new = prepare(**args)
    splits = tokens.meta["splits"]
    done = "" if new else " (already prepared; --force prepares again)"
    print(
        f"{tokens.folder}: {splits['train']['tokens']:,} tokens of {splits['train']['documents']:,} documents to train "
        f"on, {splits['val']['tokens']:,} of {splits['val']['documents']:,} for validation{done}"
    )
    if isinstance(tokens.bytes_per_token, dict):
        print(f"{tokens.bytes_per_token['val']:.3f} bytes of text per validation token")


if __name__ == "__main__":
    run(main)
