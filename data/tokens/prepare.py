"""Make shards of tokens from any text, a streamed Hugging Face dataset or local files, with any tokenizer.

    python data/tokens/prepare.py fineweb_edu                            # a recipe: into data/fineweb_edu
    python data/tokens/cluster.py fineweb_edu --cluster=slurm            # the same tokens, made on many machines
    python data/tokens/prepare.py allenai/c4 --subset=en --tokenizer=tiktoken:gpt2 --out data/c4
    python data/tokens/prepare.py --files corpus/ --tokenizer=hf:FOLDER --out data/mine  # docs/your-data.md
    python data/openwebtext/prepare.py                                   # the recipe openwebtext
    python data/tokens/prepare.py openwebtext --files owt/ --vocab gpt2_vocab            # without a network
    python train.py config/longhorn_1b3.py --dataset=fineweb_edu         # or --dataset=fineweb_edu:0.8,mine:0.2

Documents stay in the order of their source, since training reads windows in random order anyway. The tokenizer's
end-of-text token follows each document. The source's validation split is held out. If it has none, documents are held
out by the hash of their place. If there are only a few documents, the last tenth of the text is held out, at most a
million characters.

Local files are identified by their sha256, so each start reads them whole, at about 1 GB a second. A folder with tokens
from other content is refused, and so is a file that changes while it is read.

With --shuffle, which openwebtext sets, tokens and order are nanoGPT's: the train_test_split of Hugging Face's datasets
shuffles the documents and holds some out. All documents must then fit on disk, in that library's cache (HF_HOME; 54 GB
for OpenWebText). nanoGPT's OpenWebText has 9,035,582,198 training and 4,434,897 validation tokens; with other counts,
losses cannot be compared with nanoGPT's.

You can kill it at any time; rerun the command to resume after the last shard (about 100M tokens) in plan.json. If a
local file cannot be read, no shard is kept. Tokens depend neither on --workers nor on kills.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import re
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository root
import configurator
from common import old_names
from configurator import Count, Seed, Share
from data.prepared import DTYPES, SPLITS, DataError, file_sha256, read_sealed
from data.shards import shards_sha256
from data.tokenizer import Text, canonical
from data.tokens.sources import (
    OFFICIAL,
    Reading,
    about,
    check_unchanged,
    documents,
    hub_units,
    local_units,
    shuffled_units,
)
from data.writer import finish, finished, preparing, run, token_dtype, write_sealed, write_split
from runtime.records import BadRecord

MISTRAL = "hf:mistralai/Mistral-7B-v0.1"
RECIPES = {  # name: the arguments it stands for
    "openwebtext": {"source": "Skylion007/openwebtext", "tokenizer": "tiktoken:gpt2", "val_fraction": 0.0005,
                    "shuffle": 2357},
    "slimpajama": {"source": "cerebras/SlimPajama-627B", "tokenizer": MISTRAL},
    "slimpajama_reupload": {"source": "gmongaras/SlimPajama-627B_Reupload", "tokenizer": MISTRAL},
    "slimpajama_6b": {"source": "DKYoon/SlimPajama-6B", "tokenizer": MISTRAL},
    "fineweb_edu": {"source": "HuggingFaceFW/fineweb-edu", "subset": "sample-100BT", "tokenizer": "tiktoken:gpt2"},
    "climbmix": {"source": "karpathy/climbmix-400b-shuffle", "tokenizer": "tiktoken:gpt2"},
}
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
SHARD_TOKENS = 100_000_000
BATCH_CHARS = 1 << 20  # characters that a worker encodes at a time
SAMPLE_CHARS = 4096  # characters of each batch that are decoded to see if the text comes back
VAL_FRACTION, MOST_HELD_OUT = 0.0005, 1 << 20  # share of documents; most characters, if documents are few
FEW = 8  # documents per split; with fewer, data/loader.py also divides the split into equal parts
USUAL_MARK = "<|endoftext|>"


# ----------------------------------------------------------------------------------------------------- what is held out

def split_of(official, place, val_fraction):
    """The split of the document at a place ("unit/number"): the source's, else 'val' for val_fraction of all hashes."""
    place = int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "big")
    return official or ("val" if place < (val_fraction or VAL_FRACTION) * 2**64 else "train")


def cut_of_few(units, reading, val_fraction):
    """If `split_of` would give a split fewer than FEW documents, return how many characters to train on; the rest is
    held out. Else return None, without reading much. Raises DataError if either part would be nearly empty."""
    counts = dict.fromkeys(SPLITS, 0)
    chars = 0
    marks = 0
    for unit, source in enumerate(units):
        number = 0
        texts = isinstance(source, list) and reading.kind(source[0]) == "text"
        for official, text, end in documents(source, reading):
            counts[split_of(official, f"{unit}/{number}", val_fraction)] += end and text != ""
            chars += len(text)
            marks += texts and not reading.separator and text.count(USUAL_MARK)
            number += end
            if official and not texts or min(counts.values()) >= FEW:
                return None
    if reading.separator and sum(counts.values()) <= sum(map(len, units)):
        raise DataError(f"--separator={reading.separator!r} is in none of the files: copy it from one, or leave it out")
    if marks:
        print(f"{USUAL_MARK} occurs in the text {marks:,} times and is read as text: give --separator='{USUAL_MARK}' "
              "if it ends documents of .txt files", file=sys.stderr)
    if reading.splits:
        return None
    held_out = int(chars * val_fraction) if val_fraction else min(chars // 10, MOST_HELD_OUT)
    if not 2 <= held_out <= chars - 2:
        raise DataError(f"{chars:,} characters are too few: {held_out:,} would be held out, and both "
                        "parts need at least 2: add text, or choose another --val_fraction")
    print(f"few documents: the last {held_out:,} of {chars:,} characters are held out (--val_fraction changes that)",
          file=sys.stderr)
    return chars - held_out


@dataclass
class Splitting:
    """Decides which split a text goes to: the source's, else by the hash of the document's place. With `cut`, for few
    documents, we train on the first `cut` characters, up to the end of a line or word, and hold out the rest."""

    val_fraction: float
    cut: int
    seen: int = 0  # characters so far

    def parts(self, official, place, text):
        """[(split, part of the text), ...] for the next text."""
        if self.cut is None:
            return [(split_of(official, place, self.val_fraction), text)]
        here = self.cut - self.seen
        self.seen += len(text)
        if here >= len(text):
            return [("train", text)]
        if here <= 0:
            return [("val", text)]
        near = here + (len(text) - here) // 10
        line, word = text.find("\n", here, near), text.find(" ", here, near)
        if line >= 0:
            here = line + 1
        elif word >= 0:
            here = word
        return [("train", text[:here]), ("val", text[here:])]


# ------------------------------------------------------------------------------------------------------------- encoding

@dataclass
class Piece:
    """A piece of a document. before: the character before it, "" where the document begins; end: True if a document
    that is not empty ends with this piece."""

    split: str
    text: str
    before: str
    end: bool = False


def pieces(work, unit):
    """Yields [Piece, ...] for each item of `documents`: two pieces if the splits share a text, else one."""
    number = 0  # of the document in the unit
    before, last = "", None
    for official, text, end in documents(work.units[unit], work.reading):
        of_item = []
        for split, part in work.splitting.parts(official, f"{unit}/{number}", text):
            of_item.append(Piece(split, part, before if split == last else ""))
            before, last = part[-1:], split
        of_item[-1].end = end and text != ""
        if end:
            last = None
            number += 1
        yield of_item


def in_batches(work, share, first, items):
    """Yields (unit, number of its items read so far, [Piece, ...]) per BATCH_CHARS characters of a share of the units.
    Begins after `items` items of unit `first`. Raises DataError."""
    begin_at = first if work.splitting.cut is None else share.start  # the cut counts characters from the first unit on
    for unit in range(begin_at, share.stop):
        batch, chars, n = [], 0, 0
        done = items if unit == first else 0
        for n, of_item in enumerate(pieces(work, unit), 1):
            if unit < first or n <= done:
                continue
            batch += of_item
            chars += sum(len(piece.text) for piece in of_item)
            if chars >= BATCH_CHARS:
                yield unit, n, batch
                batch, chars = [], 0
        if n < done:
            raise DataError(f"file {unit + 1} of the source has changed since its first shards were written: prepare "
                            "again with --force")
        if batch:
            yield unit, n, batch


def token_arrays(text, batch):
    """Return the token ids of each piece in a batch; <|endoftext|> in a text counts as ordinary text."""
    texts = [piece.text for piece in batch]
    if text.kind == "bytes":
        return [np.frombuffer(piece.encode(), np.uint8) for piece in texts]
    if text.kind == "hf":
        if any(piece.before for piece in batch):
            return [text.encode_after(piece.before, piece.text) for piece in batch]
        text.encoding.encode_special_tokens = True
        return [encoding.ids for encoding in text.encoding.encode_batch_fast(texts, add_special_tokens=False)]
    with contextlib.suppress(ValueError):  # tiktoken's regular expression gives up on very many blanks
        if text.kind == "tiktoken":
            return [text.encoding.encode_to_numpy(piece, disallowed_special=()) for piece in texts]
    return [text.encode_ordinary(piece) for piece in texts]


def encode(text, batch, dtype):
    """Encode a batch into {split: (tokens, bytes, documents, empty documents)}. An empty document leaves no tokens.
    bytes is None if a sample's tokens do not decode to the sample."""
    arrays = token_arrays(text, batch)
    exact = text.gives_back(max((piece.text for piece in batch), key=len)[:SAMPLE_CHARS])
    encoded = {}
    for split in SPLITS:
        tokens, size, n, empty = [np.empty(0, dtype)], 0, 0, 0
        for piece, ids in zip(batch, arrays, strict=True):
            if piece.split == split:
                tokens += [np.asarray(ids, dtype), np.array([text.eot_token] * piece.end, dtype)]
                size += len(piece.text.encode("utf-8", "surrogatepass"))
                n += not piece.before
                empty += not piece.text
        encoded[split] = np.concatenate(tokens), size if exact else None, n - empty, empty
    return encoded


def encode_shards(out, part, shards, share, work, workers):
    """Write the shards of a share of the units that come after `shards`, as PART00005.train.bin.

    After each shard, appends {"unit", "items": read from this unit so far, "splits"} to `shards`, and yields.
    """
    from tqdm import tqdm

    text, dtype = work.text, np.dtype(DTYPES[token_dtype(work.text.n_vocab)])
    encoded = {split: [] for split in SPLITS}
    start = (shards[-1]["unit"], shards[-1]["items"]) if shards else (share.start, 0)
    with ThreadPoolExecutor(workers) as pool, tqdm(unit=" tokens", unit_scale=True) as bar:
        # threads: tokenizers are written in Rust, and release the GIL
        submitted = ((unit, items, pool.submit(encode, text, batch, dtype))
                     for unit, items, batch in in_batches(work, share, *start))
        waiting = list(itertools.islice(submitted, 2 * workers))
        while waiting:
            unit, items, batch = waiting.pop(0)
            for split, of_batch in batch.result().items():
                encoded[split].append(of_batch)
                bar.update(len(of_batch[0]))
            waiting += itertools.islice(submitted, 1)
            bar.set_description(f"file {unit + 1} of {len(work.units)}")
            if not waiting or sum(len(ids) for split in SPLITS for ids, *_ in encoded[split]) >= SHARD_TOKENS:
                splits = write_shard(out, f"{part}{len(shards):05d}", encoded, text.n_vocab)
                shards.append({"unit": unit, "items": items, "splits": splits})
                encoded = {split: [] for split in SPLITS}
                yield


def write_shard(out, name, encoded, n_vocab):
    """Write NAME.train.bin and NAME.val.bin, unless they would be empty. Returns {split: its entry for meta.json}.

    encoded: {split: [its result of `encode`, for each batch]}.
    """
    entries = {}
    for split, of_split in encoded.items():
        arrays, sizes, documents_in, empty = zip(*of_split, strict=True)
        if any(map(len, arrays)):
            file = f"{name}.{split}.bin"
            entries[split] = {"file": file, **write_split(out / file, arrays, n_vocab), "bytes": total(sizes),
                              "documents": sum(documents_in), "empty": sum(empty)}
    return entries


def total(sizes):
    """The sum of sizes; None if a size is None."""
    return None if None in sizes else sum(sizes)


def is_whole(out, splits):
    """True if the files of a shard exist and have the recorded content."""
    for entry in splits.values():
        path = out / entry["file"]
        if not path.is_file() or file_sha256(path) != entry["sha256"]:
            return False
    return True


def finish_shards(folder, shards, meta):
    """Write meta.json. shards: [{split: its entry}, ...] in order. Returns Tokens. Raises DataError."""
    splits = {}
    for split in SPLITS:
        entries = [shard[split] for shard in shards if split in shard]
        if not entries:
            raise DataError(f"no document of {folder} is in {split}: choose another --val_fraction, or add documents")
        counts = {key: total([entry.get(key, 0) for entry in entries])
                  for key in ("tokens", "bytes", "documents", "empty")}
        splits[split] = {
            **counts,
            "max_token": max(entry["max_token"] for entry in entries),
            "sha256": shards_sha256([entry["sha256"] for entry in entries]),
            "shards": [{key: entry[key] for key in ("file", "tokens", "sha256")} for entry in entries],
        }
        if counts["empty"]:
            print(f"left out: {counts['empty']:,} empty documents of {split}", file=sys.stderr)
        if counts["bytes"] is None:
            print(f"{meta['tokenizer']} cannot reproduce {split} (lower case, or characters it does not know): no "
                  "bits per byte", file=sys.stderr)
    return finish(folder, {"dataset": folder.resolve().name, **meta, "splits": splits})


@dataclass
class Work:
    """The text that a preparation reads, and how it reads it."""

    units: list  # groups of documents; with --shuffle, groups of local files or None until they are shuffled
    text: Text
    meta: dict  # entries of meta.json; meta["inputs"] is a hash of everything that the tokens depend on
    reading: Reading
    splitting: Splitting


def plan(source=None, subset=None, files=None, tokenizer="tiktoken:gpt2", vocab=None, end_of_text=None,
         text_column="text", encoding=None, separator=None, endings=(), val_fraction=None, shuffle=None, out=None):
    """Plan a preparation: return its Work, and print on stderr what is left out. Raises DataError."""
    if (source is None) == (not files):
        raise DataError("give either --files, or a recipe or a name on Hugging Face's hub")
    reading = Reading(text_column, encoding, separator, endings)
    units = table = None
    if files:
        files = [Path(path) for path in files]
        refuse_inside(out, files)
        units = local_units(files, reading)
    if shuffle is None:
        reading.splits = splits_by_name(reading.files)
    if separator and not any(reading.kind(path) == "text" for path in reading.files):
        raise DataError("--separator is for .txt files and --endings, but there are no such files")
    if canonical(tokenizer) == "char":
        if not files:
            raise DataError("--tokenizer=chars reads all documents for their characters first: it needs --files")
        table = characters(units, reading)
    text = Text(tokenizer, table, vocab, end_of_text)
    end = text.eot_token  # raises if there is none, before much is read
    documents_from = contents(units) if files else [source, subset]
    cut = None
    if shuffle is None:
        if not files:
            units = hub_units(source, subset)
            documents_from.append(len(units))
        cut = cut_of_few(units, reading, val_fraction)
    fraction = val_fraction or VAL_FRACTION
    how = {"encoding": encoding, "separator": separator, "endings": list(endings), "held_out_from": cut}
    inputs = [documents_from, text.name, text.table, text_column, fraction] + [shuffle] * (shuffle is not None)
    if any(how.values()):
        inputs.append(how)
    inputs += reading.splits.values()
    if reading.left_out:
        print(about(reading.left_out), file=sys.stderr)
    recipe = {"source": source, "subset": subset, "files": files and [str(path) for path in files],
              "text_column": text_column, "val_fraction": fraction, "shuffle": shuffle, **how,
              "left_out": {why: len(paths) for why, paths in reading.left_out.items()}}
    meta = {"vocab_size": text.n_vocab, "tokenizer": text.name, "table": text.table, "end_of_text": end,
            "how": shlex.join(["python", *sys.argv]), "recipe": recipe,
            "inputs": hashlib.sha256(json.dumps(inputs).encode()).hexdigest()}
    return Work(units, text, meta, reading, Splitting(val_fraction, cut))


def splits_by_name(paths):
    """Return {path: "train" or "val"} if all paths have such names, and print that. Else return {}: in other folders,
    such as code, these names are chance."""
    splits = {}
    for path in paths:
        called = {path.parent.name.lower(), *re.split("[-._]", path.name.lower())}  # val/a.txt, wiki.valid.tokens
        splits[path] = "val" if called & {*OFFICIAL} else "train" if "train" in called else "neither"
    if {*splits.values()} != {*SPLITS}:
        return {}
    held_out = [path for path in paths if splits[path] == "val"]
    print(f"held out because of their names, and no others: {len(held_out):,} files ({held_out[0]})", file=sys.stderr)
    return splits


def refuse_inside(out, files):
    """Raises DataError if the folder to write would be read as well."""
    for path in files:
        if out is not None and path.is_dir() and Path(out).resolve().is_relative_to(path.resolve()):
            raise DataError(f"--out {out} is inside --files {path}, and would be read as text: choose another --out")


def characters(units, reading):
    """All characters that occur in the documents, and the zero, which ends each document."""
    found = {"\0"}
    for unit in units:
        for _, text, _ in documents(unit, reading):
            found.update(text)
    return "".join(sorted(found))


def contents(units):
    """[[(name, sha256 of the content), ...], ...] for units of local files. Prints duplicates. Raises OSError."""
    paths = list(itertools.chain(*units))
    with ThreadPoolExecutor() as pool:
        sha256 = dict(zip(paths, pool.map(file_sha256, paths), strict=True))
    first = {}
    again = [path for path in paths if first.setdefault(sha256[path], path) != path]
    if again:
        print(f"duplicate files are kept, and may be in both splits: {len(again):,} ({again[0]} "
              f"like {first[sha256[again[0]]]})", file=sys.stderr)
    return [[(path.name, sha256[path]) for path in unit] for unit in units]


def begin(folder, inputs, force):
    """The Tokens of a folder that is already finished, else None. Raises DataError if it was made from other inputs."""
    if force:
        discard(folder)
    elif not {inputs_of(folder / "plan.json"), inputs_of(folder / "meta.json")} <= {None, inputs}:
        raise DataError(f"{folder} holds tokens from other inputs: choose another --out, or --force")
    return finished(folder, inputs)


def discard(folder):
    for path in [folder / "plan.json", folder / "meta.json", *folder.glob(f"{'[0-9]' * 5}[-.]*")]:
        path.unlink(missing_ok=True)


def inputs_of(path):
    """The hash of the inputs that a plan.json or meta.json was made from; None if there is no such file."""
    try:
        return read_sealed(path).get("inputs") or "unknown"
    except BadRecord:
        return "unknown" if path.exists() else None


def recorded(out, part, inputs):
    """The record of a part's progress, from PARTplan.json."""
    path = out / f"{part}plan.json"
    known = read_sealed(path) if inputs_of(path) == inputs else {}
    return {"inputs": inputs, "shards": [], "ended": False, **known}


def prepare_part(out, part, share, work, workers):
    """Write the missing shards of a share of the units: PART00000.train.bin and so on."""
    record = recorded(out, part, work.meta["inputs"])
    shards = list(itertools.takewhile(lambda shard: is_whole(out, shard["splits"]), record["shards"]))
    if record["ended"] and shards == record["shards"]:
        return
    record |= {"shards": shards, "ended": False}
    for _ in encode_shards(out, part, shards, share, work, workers):
        check_unchanged(work.reading)
        write_sealed(out / f"{part}plan.json", record)
    write_sealed(out / f"{part}plan.json", {**record, "ended": True})


def join(out, parts, meta):
    """Write meta.json if all parts have ended. Returns Tokens, or None if a part has not."""
    records = [recorded(out, part, meta["inputs"]) for part in parts]
    if not all(record["ended"] for record in records):
        return None
    return finish_shards(out, [shard["splits"] for record in records for shard in record["shards"]], meta)


def prepare(out, workers=1, force=False, **choices):
    """Write the shards and then meta.json into `out`, unless they are there already. Returns Tokens.

    choices: arguments of `plan`. Raises DataError.
    """
    work = plan(out=out, **choices)
    meta, recipe = work.meta, work.meta["recipe"]
    with preparing(out) as folder:
        if tokens := begin(folder, meta["inputs"], force):
            return tokens
        try:
            if recipe["shuffle"] is not None:
                work.units = shuffled_units(work.units, work.reading, recipe, meta["inputs"])
            prepare_part(folder, "", range(len(work.units)), work, workers)
            return join(folder, [""], meta)
        except DataError:
            if work.reading.files:  # the same local files would fail again, and other files need other shards
                discard(folder)
            raise


@dataclass
class Source:
    """Options of prepare.py and cluster.py."""

    source: str = None  # a recipe (RECIPES in data/tokens/prepare.py), or a dataset's name on Hugging Face's hub
    subset: str = None  # subset of a dataset on the hub, such as sample-10BT
    files: list[Path] = None  # local files, or folders of them; with a recipe, instead of its source
    # --- tokens
    tokenizer: str = "tiktoken:gpt2"  # bytes, chars, tiktoken:NAME, hf:NAME on the hub, or hf:FOLDER
    vocab: Path = None  # folder with a tiktoken encoding's files, for a machine without a network
    end_of_text: str = None  # the token that ends a document in an hf: tokenizer, if its name is unusual
    # --- how text is read
    text_column: str = "text"  # which column of parquet, jsonl or the hub holds the text
    encoding: str = None  # encoding of files that are not UTF-8 and have no byte order mark: latin-1, utf-16-le, ...
    separator: str = None  # text between the documents of a .txt file: "<|endoftext|>", or "\n\n"
    endings: tuple[str, ...] = ()  # other files to read as text, by ending (.md,.py) or name (wiki_*)
    # --- what is written
    val_fraction: Share = None  # share held out if the source has no split; default: 0.0005, or a tenth of a few texts
    out: Path = None  # folder to write; default: data/ and the recipe's name
    force: bool = False  # prepare again from the beginning

    ARGUMENTS = ("source",)
    RENAMED = old_names.PREPARE


@dataclass
class Options(Source):
    shuffle: Seed = None  # shuffle and split as nanoGPT, which uses the seed 2357
    workers: Count = CORES  # threads; the default: one per core


def read(options_class, doc):
    """The arguments of `prepare` from the command line and, if one is named, its recipe. Raises ConfigError."""
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
    say(prepare(**read(Options, __doc__)))


if __name__ == "__main__":
    run(main)
