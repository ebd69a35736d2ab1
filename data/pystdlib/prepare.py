"""The default dataset: the source of the running interpreter's standard library, as bytes.

It holds every .py file in the standard library's folder, except site-packages and dist-packages. Tokens are bytes
(vocabulary 256), and a zero byte ends each file. Nothing is downloaded. The size is about 31 MB with a Python from
python.org, pyenv, uv, conda or Homebrew, and 11 MB with Debian's, which lacks the library's tests.

--tokenizer chooses another tokenizer (data/tokenizer.py); bpe:2048 learns 2,048 tokens from the training files, three
bytes long on average (data/pystdlib_bpe/prepare.py). Files that are not UTF-8 are then skipped, and the vocabulary's
end-of-text token (for characters the zero) ends each file.

The split is by file. Files are shuffled by sorting them by sha256(relative path); the first ones are the validation
set, until it holds --val_fraction of the bytes. So the split does not depend on the machine, and no content is in both
parts (of files with equal content only one is kept). Files larger than a quarter of the validation set go to train:
otherwise one generated table could be most of the validation set.

meta.json also records the bits per validation byte of `xz -9`: a useful language model needs fewer.

--documents=package joins the same files into long documents, to measure memory over 64K tokens. A document is a
package: all files of a folder and its subfolders, sorted by path. A folder of more than 4 MiB is not a package (the
library itself, its `test`); the files and folders in it are then considered separately. The split is
by document, ordered by sha256(path), and only documents longer than 65,536 bytes are held out: long enough for a
sequence of that length and its next token. meta.json has the held-out documents' lengths and first tokens in val.bin.

    python data/pystdlib/prepare.py                                        # takes seconds
    python data/tokens/prepare.py --files .venv/lib ~/linux --endings=.py,.c --tokenizer=bytes --out data/big    # more
    python data/pystdlib/prepare.py --documents=package --out data/pystdlib_packages
    python data/pystdlib/prepare.py --tokenizer=bpe:4096 --out data/pystdlib_4096          # half a minute
"""

import dataclasses
import hashlib
import os
import platform
import shlex
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository root
import configurator
from configurator import Share
from data.prepared import SPLITS, DataError, file_sha256
from data.tokenizer import Text, canonical, identified, learn_bpe
from data.writer import finish, finished, preparing, run, warn_single_document, write_split

RECIPE = 1  # to be raised when the same files would give other tokens
SEPARATOR = b"\0"  # ends each file; files that contain it are skipped as binary
VAL_FRACTION = {"file": 0.02, "package": 0.05}  # 2% of the library would be only five long documents
SHELF_BYTES = 4 << 20  # a larger folder is not a document: in the standard library only `test`, half of all bytes
LONG = 65_536  # longest sequence, in tokens, that every held-out document must provide
NEVER_ENTERED = {"site-packages", "dist-packages", "__pycache__"}


class File(NamedTuple):
    name: str  # its path below the library, with slashes
    path: Path
    size: int  # bytes
    sha256: str


class Document(NamedTuple):
    name: str  # that of its only file, or of a folder, which ends in a slash
    files: list
    size: int  # bytes


# ---------------------------------------------------------------------------------------------------------- which files


def collect(stdlib, text_only):
    """List the files of the corpus: readable text, every content once.

    Returns: [File, ...] sorted by name, and the number of files skipped: unreadable, empty, binary, with the same
    content as an earlier one, a link that leads out of the library, or, with text_only, not UTF-8.
    """
    paths, skipped = source_files(stdlib)
    files = []
    seen = set()
    for path in paths:
        content = content_of(path, text_only)
        digest = hashlib.sha256(content).hexdigest()
        if not content or SEPARATOR in content or digest in seen:
            skipped += 1
            continue
        seen.add(digest)
        files.append(File(path.relative_to(stdlib).as_posix(), path, len(content), digest))
    return files, skipped


def source_files(root):
    """The .py files below root, sorted, and how many are left out: linked folders, links that lead outside, unreadable
    folders."""
    files = []
    left_out = []
    for folder, subfolders, names in os.walk(root, onerror=left_out.append):
        left_out += [name for name in subfolders if Path(folder, name).is_symlink()]
        subfolders[:] = [name for name in subfolders if name not in NEVER_ENTERED]
        for path in (Path(folder, name) for name in names):
            if path.suffix == ".py":
                inside = path.is_file() and path.resolve().is_relative_to(root.resolve())
                (files if inside else left_out).append(path)
    return sorted(files, key=lambda path: path.relative_to(root).as_posix()), len(left_out)


def content_of(path, text_only=False):
    """The bytes of a file; none if it cannot be read, or with text_only is not UTF-8."""
    try:
        content = path.read_bytes()
        if text_only:
            content.decode()
        return content
    except (OSError, UnicodeDecodeError):
        return b""


# ------------------------------------------------------------------------------------------- documents, and their split


def join_packages(files):
    """[Document, ...], one per package; see the top of the file. Their size counts the zero that ends each file."""
    sizes = {}  # bytes in each folder, subfolders included
    for file in files:
        for folder in folders_above(file.name):
            sizes[folder] = sizes.get(folder, 0) + file.size + len(SEPARATOR)
    members = {}
    for file in sorted(files):
        packages = [folder for folder in folders_above(file.name) if sizes[folder] <= SHELF_BYTES]
        name = packages[0] if packages else file.name
        members.setdefault(name, []).append(file)
    return [Document(name, of, sum(file.size + len(SEPARATOR) for file in of)) for name, of in members.items()]


def folders_above(name):
    """The folders that a file is in, from the outermost to its own; not the root, which is no package."""
    parts = name.split("/")
    return ["/".join(parts[:depth]) + "/" for depth in range(1, len(parts))]


def split_by_name(documents, val_fraction, shortest=0):
    """Deterministic shuffle and split; see the top of the file.

    Args: shortest: hold out no document with fewer bytes.
    Returns: the lists train, val, in shuffled order. Raises: DataError if one of them would be empty.
    """
    place = lambda document: hashlib.sha256(document.name.encode("utf-8", "surrogateescape")).digest()
    total = sum(document.size for document in documents)
    wanted = val_fraction * total
    train = []
    val = []
    held = 0
    for document in sorted(documents, key=place):
        if held < wanted and shortest <= document.size <= wanted / 4:
            val.append(document)
            held += document.size
        else:
            train.append(document)
    if not val or not train:
        unit = f"documents (held out only if at least {shortest:,} bytes long)" if shortest else "files"
        raise DataError(
            f"{len(documents)} {unit} with {total:,} bytes do not give a train and a validation set at --val_fraction "
            f"{val_fraction:g}: choose another fraction"
        )
    return train, val


# --------------------------------------------------------------------------------------------------------- their tokens


def contents(files):
    """Yields each file's bytes. Raises DataError if a file has changed."""
    for file in files:
        content = content_of(file.path)
        if hashlib.sha256(content).hexdigest() != file.sha256:
            raise DataError(f"{file.name} changed during the preparation: run the same command again")
        yield content


def tokenized(files, text):
    """Yields each file's tokens and an end-of-text token as (tokens,) arrays."""
    for content in contents(files):
        if text.kind == "bytes":
            yield np.frombuffer(content + SEPARATOR, dtype=np.uint8)
        else:
            yield np.array([*text.encode_ordinary(content.decode()), text.eot_token], dtype=np.uint32)


def learned_table(tokenizer, files, train):
    """What a tokenizer that is made from the text consists of: characters of all files, pairs of the training files."""
    kind, _, number = canonical(tokenizer).partition(":")
    if kind == "char":
        characters = {"\0"}.union(*(content.decode() for content in contents(files)))
        return "".join(sorted(characters))
    if kind == "bpe":
        return learn_bpe((content.decode() for content in contents(train)), number)
    return None


def xz9_bits_per_byte(files):
    """Bits per byte that `xz -9` needs for the files, one after another; None if Python was built without lzma."""
    try:
        import lzma
    except ImportError:
        return None
    squeezer = lzma.LZMACompressor(preset=9)
    n_in = 0
    n_out = 0
    for content in contents(files):
        piece = content + SEPARATOR
        n_in += len(piece)
        n_out += len(squeezer.compress(piece))
    n_out += len(squeezer.flush())
    return 8 * n_out / n_in


def identity(files, val_fraction, documents, tokenizer):
    """A hash of every file's name and content and of the recipe."""
    listing = f"recipe {RECIPE}, val_fraction {val_fraction!r}"
    listing += ", packages\n" if documents == "package" else "\n"
    if tokenizer != "bytes":
        listing += f"{identified(tokenizer)}\n"
    listing += "".join(f"{file.sha256} {file.name}\n" for file in files)
    return hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()


def prepare(out, val_fraction=None, force=False, stdlib=None, documents="file", tokenizer="bytes", vocab=None):
    """Write the dataset to `out`, unless it is already there. Returns (Tokens, True if anything was written).

    Args: val_fraction: of the bytes (None: VAL_FRACTION); stdlib: the standard library's folder (default: the running
    interpreter's); documents: 'file' or 'package'; tokenizer, vocab: see data/tokenizer.py.
    Raises: DataError.
    """
    if val_fraction is None:
        val_fraction = VAL_FRACTION[documents]
    if tokenizer != "bytes" and documents == "package":
        raise DataError(f"--documents=package counts bytes: drop --tokenizer {tokenizer}")
    stdlib = Path(stdlib or sysconfig.get_paths()["stdlib"])
    with preparing(out) as folder:
        files, skipped = collect(stdlib, text_only=tokenizer != "bytes")
        if not files:
            raise DataError(f"no source files in {stdlib}: this Python comes without library source; use another")
        inputs = identity(files, val_fraction, documents, tokenizer)
        if not force and (tokens := finished(folder, inputs)):
            return tokens, False
        recipe = {
            "version": RECIPE,
            "source": f"standard library of Python {platform.python_version()}",
            "val_fraction": val_fraction,
            "files": len(files),
            "files_skipped": skipped,
            "separator": "a zero byte ends each file",
            "prepare_sha256": file_sha256(__file__),
        }
        return write(folder, files, recipe, documents, tokenizer, vocab, inputs), True


def write(folder, files, recipe, documents, tokenizer, vocab, inputs):
    """Split the files, write their tokens and meta.json. Returns Tokens."""
    val_fraction = recipe["val_fraction"]
    if documents == "package":
        parts = split_by_name(join_packages(files), val_fraction, LONG + 1)
    else:
        parts = split_by_name([Document(file.name, [file], file.size) for file in files], val_fraction)
    parts = dict(zip(SPLITS, parts, strict=True))
    members = {split: [file for document in part for file in document.files] for split, part in parts.items()}
    text = Text(tokenizer, learned_table(tokenizer, files, members["train"]), vocab)
    splits = {}
    for split in SPLITS:
        splits[split] = write_split(folder / f"{split}.bin", tokenized(members[split], text), text.n_vocab)
        splits[split]["bytes"] = sum(file.size + len(SEPARATOR) for file in members[split])
        splits[split]["files"] = len(members[split])
        change = "raise" if split == "val" else "lower"
        way_out = f"{change} --val_fraction (now {val_fraction:g})"
        warn_single_document(split, len(parts[split]), splits[split]["tokens"], way_out)
    meta = {
        "dataset": "pystdlib",
        "vocab_size": text.n_vocab,
        "end_of_text": text.eot_token,
        "tokenizer": text.name,
        "table": text.table or None,
        "bytes_per_token": 1 if tokenizer == "bytes" else None,
        "splits": splits,
        "xz9_bits_per_byte": xz9_bits_per_byte(members["val"]),
        "how": shlex.join(["python", *sys.argv]),
        "recipe": recipe,
        "inputs": inputs,
    }
    if documents == "package":
        recipe["documents"] = f"packages: whole folders of at most {SHELF_BYTES} bytes, and single files"
        meta["documents"] = {"val": places(parts["val"])}
    return finish(folder, meta)


def places(documents):
    """Where each document is in its split; experiments/extrapolation.py cuts its sequences from these."""
    listed = []
    start = 0
    for document in documents:
        listed.append({"name": document.name, "start": start, "tokens": document.size})
        start += document.size
    return listed


@dataclass
class Options:
    documents: Literal["file", "package"] = "file"  # what a document is
    tokenizer: str = "bytes"  # bytes, chars, bpe:N (learned from the training files), tiktoken:NAME, hf:NAME, hf:FOLDER
    vocab: str = None  # folder with a tiktoken encoding's files, to need no network
    val_fraction: Share = None  # share of bytes to hold out; not given: 0.02, of packages 0.05
    out: Path = Path(__file__).parent  # folder to write
    force: bool = False  # prepare again even if it is already prepared


def main():
    options = configurator.read(Options, sys.argv[1:], __doc__)
    tokens, new = prepare(**dataclasses.asdict(options))
    say(tokens, new)


def say(tokens, new):
    """Print what a finished folder holds."""
    meta = tokens.meta
    recipe = meta["recipe"]
    unit = "bytes" if meta["tokenizer"] == "bytes" else f"tokens ({meta['tokenizer']})"
    done = "" if new else " (already prepared; --force prepares again)"
    print(f"{tokens.folder}: {recipe['files']:,} files of the {recipe['source']}: {len(tokens.train):,} {unit} to "
          f"train on, {len(tokens.val):,} held out{done}")
    if "documents" in meta:
        held = [document["tokens"] for document in meta["documents"]["val"]]
        print(f"{len(held)} documents are held out, of {min(held):,} to {max(held):,} bytes")
    xz = meta["xz9_bits_per_byte"]
    print(f"xz -9 needs {xz:.3f} bits per held-out byte" if xz else "xz: this Python was built without lzma")


if __name__ == "__main__":
    run(main)
