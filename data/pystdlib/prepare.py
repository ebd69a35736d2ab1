"""The default dataset: the source of the running interpreter's standard library, as bytes.

It holds every .py file in the standard library's folder, except site-packages and dist-packages. Tokens are bytes
(vocabulary 256), and a zero byte ends each file. Nothing is downloaded. The size is about 31 MB with a Python from
python.org, pyenv, uv, conda or Homebrew, and 11 MB with Debian's, which lacks the library's tests.

--tokenizer=bpe:2048 learns 2,048 tokens from the training files, three bytes long on average
(data/pystdlib_bpe/prepare.py). Files that are not UTF-8 are then skipped, and <|endoftext|> ends each file.

The split is by file. Files are shuffled by sorting them by sha256(relative path); the first ones are the validation
set, until it holds --val_fraction of the bytes. So the split does not depend on the machine. Only one of several equal
files is kept, so no content is in both splits. Files larger than a quarter of the validation set go to train: otherwise
one generated table could be most of the validation set.

meta.json also records the bits per validation byte of `xz -9`: a useful language model needs fewer.

--documents=package joins the same files into long documents, to measure memory over 64K tokens. A document is a
package: all files of a folder and its subfolders, sorted by path. A folder of more than 4 MiB, such as the library
itself or its `test`, is not a package; its files and folders are considered separately. The split is by document,
ordered by sha256(path). Only documents longer than 65,536 bytes are held out, so each has a sequence of that length and
its next token. meta.json lists each held-out document's length and its start in val.bin.

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
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository root
import configurator
from configurator import Share
from data.prepared import SPLITS, DataError, describe
from data.tokenizer import Text, learn_bpe
from data.writer import finish, finished, preparing, run, write_split

RECIPE = 1  # raise this when the same files would give other tokens
SEPARATOR = b"\0"  # ends each file; files that contain it are skipped as binary
VAL_FRACTION = {"file": 0.02, "package": 0.05}  # 2% of the library would be only five long documents
SHELF_BYTES = 4 << 20  # larger folders are not documents: in the standard library only `test`, half of all bytes
LONG = 65_536  # longest sequence, in tokens, that every held-out document must provide
NEVER_ENTERED = {"site-packages", "dist-packages", "__pycache__"}


class Document(NamedTuple):
    name: str  # path of its only file, or of its folder with a slash at the end
    files: list  # contents of its files, each with the zero that ends it
    size: int  # bytes; a single file's zero does not count


# ---------------------------------------------------------------------------------------------------------- which files


def collect(stdlib, text_only):
    """Read the corpus: text files, each content only once.

    Returns: {path below the library, with slashes: content, with SEPARATOR at its end}, sorted by path, and the
    number of files skipped. It skips unreadable, empty or binary files, duplicates, links out of the library and,
    with text_only, files that are not UTF-8.
    """
    paths = []
    for folder, subfolders, names in os.walk(stdlib):
        subfolders[:] = [name for name in subfolders if name not in NEVER_ENTERED]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    name_of = {}  # {content: path below the library}
    for path in sorted(paths, key=lambda path: path.relative_to(stdlib).as_posix()):
        content = content_of(path, text_only) if path.resolve().is_relative_to(stdlib.resolve()) else b""
        if content and SEPARATOR not in content:
            name_of.setdefault(content, path.relative_to(stdlib).as_posix())
    return {name: content + SEPARATOR for content, name in name_of.items()}, len(paths) - len(name_of)


def content_of(path, text_only):
    """The bytes of a file; b"" if it cannot be read, or with text_only if it is not UTF-8."""
    try:
        content = path.read_bytes()
        if text_only:
            content.decode()
        return content
    except (OSError, UnicodeDecodeError):
        return b""


# ------------------------------------------------------------------------------------------- documents, and their split


def join_packages(files):
    """Join files into Documents, one per package; see the top of the file."""
    sizes = Counter()  # bytes in each folder, subfolders included
    for name, content in files.items():
        for folder in folders_above(name):
            sizes[folder] += len(content)
    members = {}
    for name, content in files.items():
        packages = [folder for folder in folders_above(name) if sizes[folder] <= SHELF_BYTES]
        members.setdefault(packages[0] if packages else name, []).append(content)
    return [Document(name, contents, sum(map(len, contents))) for name, contents in members.items()]


def folders_above(name):
    """The folders above a file, from the outermost to its own, without the root, which is not a package."""
    parts = name.split("/")
    return ["/".join(parts[:depth]) + "/" for depth in range(1, len(parts))]


def split_by_name(documents, val_fraction, shortest):
    """Shuffle and split documents deterministically; see the top of the file.

    Args: shortest: fewest bytes of a held-out document.
    Returns: {split: its documents, in shuffled order}. Raises: DataError if a split would be empty.
    """
    total = sum(document.size for document in documents)
    wanted = val_fraction * total
    train = []
    val = []
    held = 0
    for document in sorted(documents, key=lambda document: hashlib.sha256(os.fsencode(document.name)).digest()):
        if held < wanted and shortest <= document.size <= wanted / 4:
            val.append(document)
            held += document.size
        else:
            train.append(document)
    if not val or not train:
        raise DataError(
            f"{len(documents)} documents with {total:,} bytes (held out only if at least {shortest:,} bytes long) do "
            f"not give a train and a validation set at --val_fraction {val_fraction:g}: choose another fraction"
        )
    return {"train": train, "val": val}


# --------------------------------------------------------------------------------------------------------- their tokens


def tokenized(contents, text):
    """Yields each file's tokens and an end-of-text token as (tokens,) arrays."""
    for content in contents:
        if text.kind == "bytes":
            yield np.frombuffer(content, dtype=np.uint8)
        else:
            yield np.array([*text.encode_ordinary(content[:-1].decode()), text.eot_token], dtype=np.uint32)


def xz9_bits_per_byte(contents):
    """Bits per byte that `xz -9` needs for the concatenated files; None if Python was built without lzma."""
    try:
        import lzma
    except ImportError:
        return None
    whole = b"".join(contents)
    return 8 * len(lzma.compress(whole, preset=9)) / len(whole)


def identity(files, val_fraction, documents, tokenizer):
    """A hash of every file's name and content and of the recipe."""
    listing = f"recipe {RECIPE}, val_fraction {val_fraction!r}"
    listing += ", packages\n" if documents == "package" else "\n"
    if tokenizer != "bytes":
        listing += f"{tokenizer}\n"
    for name, content in files.items():
        listing += f"{hashlib.sha256(content[:-1]).hexdigest()} {name}\n"
    return hashlib.sha256(os.fsencode(listing)).hexdigest()


def prepare(out, val_fraction=None, force=False, stdlib=None, documents="file", tokenizer="bytes"):
    """Write the dataset to `out`, unless it is already there. Returns Tokens.

    Args: val_fraction: of the bytes (None: VAL_FRACTION); stdlib: the standard library's folder (default: the running
    interpreter's); documents: 'file' or 'package'; tokenizer: 'bytes' or 'bpe:N'.
    Raises: DataError.
    """
    if val_fraction is None:
        val_fraction = VAL_FRACTION[documents]
    if tokenizer != "bytes" and not tokenizer.startswith("bpe:"):
        raise DataError(f"--tokenizer={tokenizer}: choose bytes or bpe:N here; data/tokens/prepare.py --files "
                        "--endings=.py takes others")
    if tokenizer != "bytes" and documents == "package":
        raise DataError(f"--documents=package counts bytes: drop --tokenizer {tokenizer}")
    stdlib = Path(stdlib or sysconfig.get_paths()["stdlib"])
    with preparing(out) as folder:
        files, skipped = collect(stdlib, text_only=tokenizer != "bytes")
        if not files:
            raise DataError(f"no source files in {stdlib}: this Python comes without library source; use another")
        inputs = identity(files, val_fraction, documents, tokenizer)
        if not force and (tokens := finished(folder, inputs)):
            return tokens
        recipe = {
            "version": RECIPE,
            "source": f"standard library of Python {platform.python_version()}",
            "val_fraction": val_fraction,
            "files": len(files),
            "files_skipped": skipped,
        }
        return write(folder, files, recipe, documents, tokenizer, inputs)


def write(folder, files, recipe, documents, tokenizer, inputs):
    """Split the files, write their tokens and meta.json. Returns Tokens."""
    if documents == "package":
        whole = join_packages(files)
        shortest = LONG + 1
    else:
        whole = [Document(name, [content], len(content) - 1) for name, content in files.items()]
        shortest = 0
    parts = split_by_name(whole, recipe["val_fraction"], shortest)
    contents = {split: [content for document in parts[split] for content in document.files] for split in SPLITS}
    table = None
    if tokenizer != "bytes":
        table = learn_bpe((content[:-1].decode() for content in contents["train"]), tokenizer.removeprefix("bpe:"))
    text = Text(tokenizer, table)
    splits = {}
    for split in SPLITS:
        splits[split] = write_split(folder / f"{split}.bin", tokenized(contents[split], text), text.n_vocab)
        splits[split]["bytes"] = sum(map(len, contents[split]))
        splits[split]["files"] = len(contents[split])
    meta = {
        "dataset": "pystdlib",
        "vocab_size": text.n_vocab,
        "end_of_text": text.eot_token,
        "tokenizer": text.name,
        "table": text.table,
        "splits": splits,
        "xz9_bits_per_byte": xz9_bits_per_byte(contents["val"]),
        "how": shlex.join(["python", *sys.argv]),
        "recipe": recipe,
        "inputs": inputs,
    }
    if documents == "package":
        meta["documents"] = {"val": places(parts["val"])}
    return finish(folder, meta)


def places(documents):
    """Where each document lies in its split; experiments/extrapolation.py cuts its sequences there."""
    listed = []
    start = 0
    for document in documents:
        listed.append({"name": document.name, "start": start, "tokens": document.size})
        start += document.size
    return listed


@dataclass
class Options:
    documents: Literal["file", "package"] = "file"  # what counts as a document
    tokenizer: str = "bytes"  # bytes, or bpe:N for N tokens learned from the training files
    val_fraction: Share = None  # share of bytes to hold out; default: 0.02, or 0.05 for packages
    out: Path = Path(__file__).parent  # folder to write
    force: bool = False  # prepare again even if it is already prepared


def main():
    options = configurator.read(Options, sys.argv[1:], __doc__)
    tokens = prepare(**dataclasses.asdict(options))
    recipe = tokens.meta["recipe"]
    describe(tokens, f"{recipe['files']:,} files of the {recipe['source']}")
    xz = tokens.meta["xz9_bits_per_byte"]
    print(f"xz -9 needs {xz:.3f} bits per held-out byte" if xz else "xz: this Python was built without lzma")


if __name__ == "__main__":
    run(main)
