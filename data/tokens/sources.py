"""Reads documents from local files, folders and Hugging Face datasets.

A file's ending, in upper or lower case, says what it is: .parquet; .jsonl, .ndjson and .json with an object in each
line; .txt and --endings with text. Files ending in .gz, .zst and .bz2 are unpacked. Folders are read recursively,
following links, each file once. Hidden files (.git, __MACOSX), empty files and files with other endings are left out
and counted.

A byte order mark decides how a file is decoded; else it is UTF-8, or what --encoding says. A text is one document, or
several with a --separator between them. It is read in pieces, cut where tokenizers cut too.
"""

import codecs
import contextlib
import fnmatch
import functools
import itertools
import json
import os
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from data.prepared import DataError
from data.shards import stamp
from data.tokenizer import place_to_cut, whole_characters

# datasets and pyarrow are imported where they are used: they take seconds, and --help should not.

JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
PACKED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
BOMS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF32_LE: "utf-32-le", codecs.BOM_UTF32_BE: "utf-32-be",
        codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}  # UTF-32's begins with UTF-16's
UNIT_BYTES, UNIT_DOCUMENTS = 1 << 28, 200_000  # small files are joined up to this size; documents per unit if shuffled
PIECE_CHARS = 1 << 20  # longest piece of a text
MOST_SAID = 8  # how many reasons for leaving something out are printed
SMALL = 100  # bytes; a smaller file may hold nothing but a byte order mark, or an empty packed file
MOST_OF_A_LINE = 1 << 28  # characters in a line of a jsonl file: lines are read whole
ZERO = "\0", "\ufffd"  # a zero ends a document of bytes, so a zero in a text becomes U+FFFD
OFFICIAL = ("validation", "val", "valid", "dev", "test")  # names of a held-out split


@dataclass
class Reading:
    """How files are read, and which are left out."""

    column: str = "text"  # column with the text, in parquet, jsonl and hub data
    encoding: str = None  # of text that is not UTF-8
    separator: str = None  # between the documents of a text
    endings: tuple = ()  # other files to read as text: .md, or wiki_* for names
    files: dict = field(default_factory=dict)  # {path of a local file: its `stamp`}
    splits: dict = field(default_factory=dict)  # {path: train or val}, if the files' names say so
    left_out: dict = field(default_factory=lambda: defaultdict(list))  # {why: [path, ...]}

    def __post_init__(self):
        for shown, meant in {"\\n": "\n", "\\r": "\r", "\\t": "\t"}.items():
            self.separator = self.separator and self.separator.replace(shown, meant)
        try:
            "".encode(self.encoding or "utf-8")
        except LookupError:
            raise DataError(f"--encoding={self.encoding} is unknown: choose latin-1, cp1252, utf-16-le, shift_jis, "
                            "gb18030 or another of Python's codecs") from None

    def kind(self, path):
        """How to read a file: as "parquet", "json" or "text"; None: leave it out."""
        name = path.name.lower()
        if any(fnmatch.fnmatchcase(unpacked(name), f"*{ending.lower()}") for ending in self.endings):
            return "text"
        if name.endswith(".parquet"):
            return "parquet"
        if unpacked(name).endswith(JSON_ENDINGS):
            return "json"
        return "text" if unpacked(name).endswith(".txt") else None


def unpacked(name):
    """A file's name without .gz or another ending for compression."""
    stem, ending = os.path.splitext(name)
    return stem if ending.lower() in PACKED else name


# -------------------------------------------------------------------------------------------------- where documents are

def local_units(paths, reading):
    """Group the files, including files in folders, into units: [[Path, ...], ...]. Raises DataError."""
    units, size, seen = [], UNIT_BYTES, set()
    for path in paths:
        if not path.is_file() and not path.is_dir():
            raise DataError(f"--files {path} is neither a file nor a folder: check the path, or save a pipe's output "
                            "as a file")
        for file in walk(path, reading, seen):
            n_bytes = file.stat().st_size
            if reading.kind(file) is None:
                ending = os.path.splitext(unpacked(file.name))[1]
                reading.left_out[f"ending in {ending}" if ending else "without an ending"].append(file)
            elif not n_bytes or n_bytes <= SMALL and not any(text for text, _ in read_file(file, reading)):
                reading.left_out["empty"].append(file)
            else:
                if size >= UNIT_BYTES:
                    units.append([])
                    size = 0
                units[-1].append(file)
                size += n_bytes
                reading.files[file] = stamp(file)
    if not units:
        raise DataError(f"--files {' '.join(map(str, paths))}: nothing to read; no file ends in .parquet, "
                        f"{', '.join(JSON_ENDINGS)} or .txt; {about(reading.left_out)}: --endings=.md reads other "
                        "files as text; convert tables, PDFs and archives first: docs/your-data.md")
    return units


def walk(path, reading, seen):
    """Yields the files at and below a path, sorted by name, each once; leaves out hidden files."""
    real = path.resolve()
    if real in seen:
        reading.left_out["met twice"].append(path)
        return
    seen.add(real)
    if path.is_file():
        yield path
    elif not path.is_dir():
        reading.left_out["links to nothing, or no files"].append(path)
    else:
        for name in sorted(os.listdir(path)):
            if name.startswith(".") or name == "__MACOSX":
                reading.left_out["hidden"].append(path / name)
            else:
                yield from walk(path / name, reading, seen)


def about(left_out):
    """Say what was left out, with the most frequent reasons."""
    reasons = sorted(left_out.items(), key=lambda item: -len(item[1]))
    parts = [f"{len(paths):,} {why} ({paths[0]})" for why, paths in reasons[:MOST_SAID]]
    if reasons[MOST_SAID:]:
        parts.append("and others")
    return f"left out: {', '.join(parts)}" if parts else "no file was left out"


def hub_units(source, subset):
    """[(split or None, function that opens a shard), ...] for a dataset on the hub, streamed. Raises DataError."""
    if Path(source).is_file() or any(Path(source).rglob("*.txt*")):
        raise DataError(f"{source} is here, not on the hub: give it as --files {source}")
    try:
        import datasets

        streams = datasets.load_dataset(source, subset, streaming=True)
        if "train" in streams:
            official = next((name for name in OFFICIAL if name in streams), None)
            names = {"train": "train", "val": official} if official else {None: "train"}
            return [(split, functools.partial(streams[name].shard, streams[name].num_shards, i))
                    for split, name in names.items() for i in range(streams[name].num_shards)]
    except Exception as error:  # the hub's client has a dozen exceptions for "cannot be reached"
        raise DataError(f"{source} cannot be streamed ({in_short(error)}): check name, --subset and network, or bring "
                        "its files here and pass --files") from None
    raise DataError(f"{source} has no split train (only {', '.join(streams)}): choose another --subset, or bring its "
                    "files here and pass --files")


def shuffled_units(units, reading, recipe, key):
    """[(split, function that opens a part), ...] from Hugging Face's train_test_split. Raises DataError.

    units: of local files, or None; key: a hash of the inputs, under which the files' documents are cached.
    """
    try:
        import datasets

        if units is None:
            whole = datasets.load_dataset(recipe["source"], recipe["subset"], split="train")
        else:
            whole = datasets.Dataset.from_generator(functools.partial(rows, units, reading), fingerprint=key[:16])
    except Exception as error:
        error = error.__cause__ or error  # raised in a generator, such as a DataError from read_file
        if isinstance(error, DataError):
            raise error from None
        raise DataError(f"{recipe['source'] or 'the files'} cannot be loaded ({in_short(error)}): check name, network "
                        "and disk, or bring its files here and pass --files") from None
    try:
        parts = whole.train_test_split(test_size=recipe["val_fraction"], seed=recipe["shuffle"])
    except ValueError as error:
        raise DataError(f"{len(whole):,} documents cannot be split at --val_fraction {recipe['val_fraction']:g} "
                        f"({in_short(error)})") from None
    return [(split, functools.partial(part.select, range(i, min(i + UNIT_DOCUMENTS, len(part)))))
            for split, part in (("train", parts["train"]), ("val", parts["test"]))
            for i in range(0, len(part), UNIT_DOCUMENTS)]


def rows(units, reading):
    """The documents of local files as rows of a Dataset. Raises DataError."""
    pieces = []
    for unit in units:
        for _, text, end in documents(unit, reading):
            pieces.append(text)
            if end:
                yield {reading.column: "".join(pieces)}
                pieces.clear()
    check_unchanged(reading)  # or the cache would hold other documents under this content's key


def check_unchanged(reading):
    """Raises DataError if a local file has changed since it was found."""
    for path, known in reading.files.items():
        if stamp(path) != known:
            raise DataError(f"{path} changed while it was read: leave it alone, and prepare again")


# ----------------------------------------------------------------------------------------------------------- their text

def documents(unit, reading):
    """Yields (split or None, text, True if a document ends with it) for a unit, in order. Raises DataError."""
    if isinstance(unit, list):
        for path in unit:
            yield from ((reading.splits.get(path), *item) for item in read_file(path, reading))
        return
    split, opened = unit
    try:
        for page in opened().iter(100):
            if reading.column not in page:
                raise ValueError(has_no(reading.column, page))
            yield from ((split, as_text(text, "a row"), True) for text in page[reading.column])
    except ValueError as error:
        raise DataError(f"the documents cannot be read: {error}") from None
    except Exception as error:
        raise DataError(f"reading the documents stopped ({in_short(error)}): run the same command again, or name "
                        "another --text_column") from None


def read_file(path, reading):
    """Yields (text, True if a document ends with it) for a file. Raises DataError if it cannot be read."""
    import pyarrow as pa

    kind = reading.kind(path)
    try:
        if kind == "parquet":
            yield from read_parquet(path, reading.column)
            return
        compression = PACKED.get(path.suffix.lower())
        with stream_of(path, compression) as stream:
            chunks = decoded(stream, encoding_of(path, compression, reading.encoding))
            if kind == "json":
                yield from read_lines(chunks, reading.column)
            elif reading.separator:
                yield from in_pieces(split_at(chunks, reading.separator))
            else:
                yield from in_pieces(itertools.chain(((chunk, False) for chunk in chunks), [("", True)]))
    except (pa.ArrowException, OSError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise DataError(f"{path} cannot be read ({why}): repair it or take it out of --files") from None


@contextlib.contextmanager
def stream_of(path, compression):
    """Open a file as a binary stream of its unpacked content."""
    import pyarrow as pa

    with open(path, "rb") as file:  # opened here, since pyarrow refuses names that are not UTF-8
        yield pa.input_stream(file, compression=compression) if compression else file


def read_parquet(path, column):
    import pyarrow.parquet

    with open(path, "rb") as stream:
        file = pyarrow.parquet.ParquetFile(stream)
        if column not in file.schema_arrow.names:
            raise ValueError(has_no(column, file.schema_arrow.names))
        batches = file.iter_batches(1000, columns=[column])
        values = itertools.chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
        for number, value in enumerate(values, 1):
            yield as_text(value, f"row {number:,}"), True


def read_lines(chunks, column):
    """Yields (document, True) for text with a JSON object in each line. Raises ValueError with the line's number."""
    for number, line in enumerate(lines_of(chunks), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError(f"not an object but a {type(record).__name__}")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number:,}: {error}; each line must be a JSON object (`jq -c '.[]'` makes "
                             "such lines from an array)") from None
        if column not in record:
            raise ValueError(f"line {number:,} {has_no(column, record)}")
        yield as_text(record[column], f"line {number:,}"), True


def lines_of(chunks):
    """Yields the lines of a text. Raises ValueError for a line of more than MOST_OF_A_LINE characters."""
    rest = ""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split("\n")
        yield from lines
        if len(rest) > MOST_OF_A_LINE:
            raise ValueError(f"a line of more than {MOST_OF_A_LINE:,} characters")
    yield rest


NESTED = ("make a column of a nested value first (in JSON lines: jq -c '{text: .a.b}' in.jsonl > out.jsonl; in "
          "parquet: pyarrow's Table.flatten() makes columns named a.b)")


def has_no(column, columns):
    return f"has no column {column!r} (only {', '.join(columns)}): give --text_column, or {NESTED}"


def as_text(value, place):
    """Return a column's value as a document; None is an empty document. Raises ValueError for anything but text."""
    if not isinstance(value, str | None):
        kind = type(value).__name__
        raise ValueError(f"{place}: {str(value)[:20]} is not text but {kind}: name another --text_column, or {NESTED}")
    return whole_characters(value or "").replace(*ZERO)


def in_short(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"


def encoding_of(path, compression, given):
    """Return "utf-8" if the file is UTF-8 and not only ASCII, whatever other files need; else `given`."""
    with contextlib.suppress(ValueError), stream_of(path, compression) as stream:
        if given and not all([chunk.isascii() for chunk in decoded(stream, None)]):  # a list, to read to the end
            return "utf-8"
    return given


def decoded(stream, encoding):
    """The text of a binary stream, in parts. Raises ValueError with the place of a byte that cannot be decoded.

    encoding: used if there is no byte order mark. None: UTF-8 without zeros; a zero would mean UTF-16.
    """
    first = stream.read(4)
    bom = next((bom for bom in BOMS if first.startswith(bom)), b"")
    name = BOMS.get(bom) or encoding or "utf-8"
    decoder = codecs.getincrementaldecoder(name)()
    place = len(bom)
    zeros_are_text = bom or encoding and codecs.lookup(encoding).name == "utf-8"
    for chunk in itertools.chain([first[len(bom):]], iter(lambda: stream.read(PIECE_CHARS), b""), [b""]):
        before = len(decoder.getstate()[0])  # bytes of an incomplete character
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeError as error:
            byte = place - before + getattr(error, "start", 0)
            remedy = "give another --encoding, such as latin-1, cp1252 or utf-16-le"
            if bom:
                remedy = "its byte order mark says that it is, so save it again"
            raise ValueError(f"byte {byte:,} is not {name}: {remedy}") from None
        if "\0" in text and not zeros_are_text:
            raise ValueError(f"byte {place + chunk.find(0):,} is a zero: give another --encoding, such as utf-16-le, "
                             "or utf-8 if it is text")
        yield text.replace(*ZERO)
        place += len(chunk)


def split_at(chunks, separator):
    """Yields (part of the text, True if a document ends with it). Line breaks next to a separator belong to it."""
    text, begins = "", True
    mark = re.compile(re.escape(separator).replace("\\\n", "\r?\n"))  # also match Windows line ends
    for chunk in chunks:
        *whole, text = mark.split(text + chunk)
        for part in whole:
            yield (part.lstrip("\r\n") if begins else part).rstrip("\r\n"), True
            begins = True
        known = text[:max(0, len(text) - 2 * len(separator))].rstrip("\r\n")  # cannot hold the start of a separator
        if known:
            yield known.lstrip("\r\n") if begins else known, False
            text = text[len(known):]
            begins = False
    yield (text.lstrip("\r\n") if begins else text).rstrip("\r\n"), True


def in_pieces(parts):
    """Yields (piece, True if a document ends with it) for parts of documents; nothing for an empty document."""
    rest = ""
    for part, end in parts:
        rest += part
        start = 0
        while len(rest) - start > PIECE_CHARS:
            cut = place_to_cut(rest, start, PIECE_CHARS)
            yield rest[start:cut], False
            start = cut
        rest = rest[start:]
        if end and rest:
            yield rest, True
            rest = ""
