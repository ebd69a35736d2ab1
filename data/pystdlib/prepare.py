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
library itself, its `test`, a tree in --roots); the files and folders in it are then considered separately. The split is
by document, ordered by sha256(path), and only documents longer than 65,536 bytes are held out: long enough for a
sequence of that length and its next token. meta.json has the documents' lengths and their first tokens in val.bin.

    python data/pystdlib/prepare.py                                        # takes seconds
    python data/pystdlib/prepare.py --roots .venv/lib/python3.11/site-packages ~/linux --out data/big
    python data/pystdlib/prepare.py --documents=package --out data/pystdlib_packages
    python data/pystdlib/prepare.py --tokenizer=bpe:4096 --out data/pystdlib_4096          # half a minute
"""

import argparse
import hashlib
import os
import platform
import shlex
import sys
import sysconfig
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository root
from data.prepared import DataError, file_sha256
from data.tokenizer import Text, add_tokenizer, canonical, learn_bpe
from data.writer import finish, finished, preparing, run, warn_single_document, write_split

RECIPE = 1  # to be raised when the same files would give other tokens
SEPARATOR = b"\0"  # ends each file; files that contain it are skipped as binary
VAL_FRACTION = {"file": 0.02, "package": 0.05}  # 2% of the library would be only five long documents
SHELF_BYTES = 4 << 20  # a larger folder is not a document: in the standard library only `test`, half of all bytes
LONG = 65_536  # longest sequence, in tokens, that every held-out document must provide
ROOT_EXTENSIONS = (
    ".py .pyi .pyx .c .h .cc .cpp .cxx .hh .hpp .cu .cuh .S .rs .go .java .js .ts .tsx .rb .pl .lua .sh .m .swift .kt "
    ".scala .hs .ml .jl .r .sql .proto .cmake .md .rst"
).split()
NEVER_ENTERED = {"site-packages", "dist-packages", "__pycache__", ".git", ".hg", ".svn", "node_modules"}


def source_files(root, extensions):
    """([(path relative to root, with slashes, Path)] of the regular files below root, sorted; how many were left out:
    linked folders, links that lead outside, unreadable files). Raises DataError for an unreadable root."""
    files, left_out, top = [], [], Path(root).resolve()

    def unreadable(error):
        if Path(error.filename) == Path(root) and not isinstance(error, FileNotFoundError):
            raise DataError(f"--roots {root}: {error.strerror}: make it readable, or leave it out")
        left_out.append(error.filename)

    for folder, subfolders, names in os.walk(root, onerror=unreadable):
        left_out += [name for name in subfolders if os.path.islink(os.path.join(folder, name))]
        subfolders[:] = [name for name in subfolders if name not in NEVER_ENTERED]
        for name in names:
            path = Path(folder, name)
            if path.suffix not in extensions:
                continue
            if path.is_file() and path.resolve().is_relative_to(top):
                files.append((path.relative_to(root).as_posix(), path))
            else:
                left_out.append(name)
    return sorted(files), len(left_out)


def collect(roots, text_only=False):
    """List the files of a corpus: readable text, every content once.

    Args: roots: [(prefix, folder, extensions), ...]; prefixes keep equal paths of two roots apart. text_only: skip
    files that are not UTF-8.
    Returns: [(name, Path, bytes, sha256 hex), ...] sorted by root and name, and the number of files skipped
    (unreadable, empty, binary, with the same content as an earlier one, or a link that leads out of its root).
    """
    files, contents, skipped = [], set(), 0
    for prefix, root, extensions in roots:
        paths, left_out = source_files(root, extensions)
        skipped += left_out
        for relative, path in paths:
            try:
                content = path.read_bytes()
            except OSError:
                content = b""
            digest = hashlib.sha256(content).hexdigest()
            if not content or SEPARATOR in content or digest in contents or text_only and not is_utf8(content):
                skipped += 1
                continue
            contents.add(digest)
            files.append((prefix + relative, path, len(content), digest))
    return files, skipped


def is_utf8(content):
    try:
        return bool(content.decode())
    except UnicodeDecodeError:
        return False


def split_by_name(items, val_fraction, shortest=0):
    """Deterministic shuffle and split; see the top of the file.

    Args: items: files or documents, tuples that start with (name, _, bytes); shortest: hold out none with fewer bytes.
    Returns: the lists train, val, in shuffled order. Raises: DataError if one of them would be empty.
    """
    shuffled = sorted(items, key=lambda item: hashlib.sha256(item[0].encode("utf-8", "surrogateescape")).digest())
    wanted = val_fraction * sum(item[2] for item in items)
    train, val, held = [], [], 0
    for item in shuffled:
        if held < wanted and shortest <= item[2] <= wanted / 4:
            val.append(item)
            held += item[2]
        else:
            train.append(item)
    if not val or not train:
        unit = f"documents (held out only if at least {shortest:,} bytes long)" if shortest else "files"
        raise DataError(
            f"{len(items)} {unit} with {sum(item[2] for item in items):,} bytes do not give a train and a validation "
            f"set at --val_fraction {val_fraction:g}: choose another fraction, or add --roots"
        )
    return train, val


def join_packages(files):
    """Join files into documents, one per package; see the top of the file.

    Args: files: from `collect`, names with slashes.
    Returns: [(name, files, bytes), ...]; a folder's name ends in a slash, its files are sorted by name, and its bytes
    include the zero at the end of each file.
    """
    folders = {}  # bytes in each folder, subfolders included
    for name, _, size, _ in files:
        parts = name.split("/")
        for depth in range(len(parts)):
            above = "/".join(parts[:depth] + [""])  # "" is the top
            folders[above] = folders.get(above, 0) + size + len(SEPARATOR)

    def document(name):
        parts = name.split("/")
        paths = ["/".join(parts[:depth] + [""]) for depth in range(1, len(parts))]  # without the top: no package
        return next((path for path in paths if folders[path] <= SHELF_BYTES), name)

    documents = {}
    for file in sorted(files):
        documents.setdefault(document(file[0]), []).append(file)
    return [(name, members, sum(f[2] + len(SEPARATOR) for f in members)) for name, members in documents.items()]


def lengths(documents):
    """Statistics of the documents' lengths in tokens, for meta.json."""
    sizes = sorted(document[2] for document in documents)
    quarters = [sizes[round(q * (len(sizes) - 1))] for q in (0, 0.25, 0.5, 0.75, 1)]
    return dict(zip(("shortest", "quarter", "median", "three_quarters", "longest"), quarters, strict=True)) | {
        "count": len(sizes), f"longer_than_{LONG}": sum(size > LONG for size in sizes)}


def contents(files):
    """Yields each file's bytes and separator as (bytes,) uint8 arrays. Raises DataError if a file has changed."""
    for name, path, _, digest in files:
        try:
            content = path.read_bytes()
        except OSError:
            content = b""
        if hashlib.sha256(content).hexdigest() != digest:
            raise DataError(f"{name} changed during the preparation: run the same command again")
        yield np.frombuffer(content + SEPARATOR, dtype=np.uint8)


def xz9_bits_per_byte(pieces):
    """Bits per byte that `xz -9` needs for the concatenated pieces; None if Python was built without lzma."""
    try:
        import lzma
    except ImportError:
        return None
    squeezer, n_in, n_out = lzma.LZMACompressor(preset=9), 0, 0
    for piece in pieces:
        n_in, n_out = n_in + piece.size, n_out + len(squeezer.compress(piece.tobytes()))
    return 8 * (n_out + len(squeezer.flush())) / n_in


def texts(files):
    """The text of each file, without its separator."""
    return (piece[:-1].tobytes().decode() for piece in contents(files))


def tokenized(files, text):
    """Yields each file's tokens and an end-of-text token as (tokens,) arrays."""
    for content in texts(files):
        yield np.array([*text.encode_ordinary(content), text.eot_token], dtype=np.uint32)


def prepare(out, roots=(), extensions=ROOT_EXTENSIONS, val_fraction=None, force=False, stdlib=None, documents="file",
            tokenizer="bytes", vocab=None):
    """Write the dataset to `out`, unless it is already there. Returns (Tokens, True if anything was written).

    Args: roots: more folders of source; extensions: of their files; val_fraction: of the bytes (None: VAL_FRACTION);
    stdlib: the standard library's folder (default: the running interpreter's); documents: 'file' or 'package';
    tokenizer, vocab: see data/tokenizer.py.
    Raises: DataError.
    """
    val_fraction = VAL_FRACTION[documents] if val_fraction is None else val_fraction
    if not 0 < val_fraction < 1:
        raise DataError(f"--val_fraction {val_fraction:g}: it must be between 0 and 1")
    if tokenizer != "bytes" and documents == "package":
        raise DataError(f"--documents=package counts bytes: drop --tokenizer {tokenizer}")
    stdlib = Path(stdlib or sysconfig.get_paths()["stdlib"])
    for root in roots:
        if not root or not Path(root).is_dir():  # Path("") is the current folder
            raise DataError(f"--roots {root} is not a folder: check the path")
    extensions = sorted({"." + extension.lstrip(".") for extension in extensions})
    sources = [("", stdlib, {".py"})]
    sources += [(f"{i}:{Path(root).resolve().name}/", Path(root), set(extensions)) for i, root in enumerate(roots, 1)]
    with preparing(out) as folder:
        files, skipped = collect(sources, text_only=tokenizer != "bytes")
        if not files:
            raise DataError(f"no source files in {stdlib}: this Python comes without library source; use another")
        listing = f"recipe {RECIPE}, val_fraction {val_fraction!r}" + ", packages" * (documents == "package") + "\n"
        listing += f"{tokenizer}\n" * (tokenizer != "bytes")
        listing += f"{Text(tokenizer).table}\n" if canonical(tokenizer).startswith("hf:") else ""
        listing += "".join(f"{digest} {name}\n" for name, _, _, digest in files)
        inputs = hashlib.sha256(listing.encode("utf-8", "surrogateescape")).hexdigest()
        if not force and (tokens := finished(folder, inputs)):
            return tokens, False
        if documents == "package":
            parts = split_by_name(join_packages(files), val_fraction, LONG + 1)
            train, val = ([file for document in part for file in document[1]] for part in parts)
        else:
            train, val = parts = split_by_name(files, val_fraction)
        kind, _, number = canonical(tokenizer).partition(":")
        if kind == "char":
            table = "".join(sorted({"\0"}.union(*texts(files))))
        else:
            table = learn_bpe(texts(train), number) if kind == "bpe" else None
        text, splits = Text(tokenizer, table, vocab), {}
        for split, members in (("train", train), ("val", val)):
            pieces = contents(members) if tokenizer == "bytes" else tokenized(members, text)
            splits[split] = write_split(folder / f"{split}.bin", pieces, text.n_vocab)
            splits[split] |= {"bytes": sum(file[2] + len(SEPARATOR) for file in members), "files": len(members)}
        for split, part in zip(("train", "val"), parts, strict=True):
            change = "raise" if split == "val" else "lower"
            way_out = f"{change} --val_fraction (now {val_fraction:g}), or add --roots"
            warn_single_document(split, len(part), splits[split]["tokens"], way_out)
        meta = {
            "dataset": "pystdlib",
            "vocab_size": text.n_vocab,
            "end_of_text": text.eot_token,
            "tokenizer": text.name,
            "table": text.table or None,
            "bytes_per_token": 1 if tokenizer == "bytes" else None,
            "splits": splits,
            "xz9_bits_per_byte": xz9_bits_per_byte(contents(val)),
            "how": shlex.join(["python", *sys.argv]),
            "recipe": {
                "version": RECIPE,
                "source": f"standard library of Python {platform.python_version()}",
                "roots": [str(root) for root in roots],
                "extensions": extensions if roots else [".py"],
                "val_fraction": val_fraction,
                "files": len(files),
                "files_skipped": skipped,
                "separator": "a zero byte ends each file",
                "prepare_sha256": file_sha256(__file__),
            },
            "inputs": inputs,  # hash of every file's name and content and of the recipe
        }
        if documents == "package":
            meta["recipe"]["documents"] = f"packages: whole folders of at most {SHELF_BYTES} bytes, and single files"
            for split, part in zip(("train", "val"), parts, strict=True):
                splits[split]["documents"] = lengths(part)
            starts = np.cumsum([0, *(document[2] for document in parts[1])]).tolist()
            meta["documents"] = {"val": [  # experiments/extrapolation.py cuts its sequences from these
                {"name": document[0], "start": start, "tokens": document[2]}
                for document, start in zip(parts[1], starts, strict=False)
            ]}  # fmt: skip
        return finish(folder, meta), True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--roots", nargs="+", default=[], metavar="FOLDER", help="more folders of source to add")
    parser.add_argument(
        "--extensions", nargs="+", default=ROOT_EXTENSIONS, metavar="EXT",
        help="which files in --roots (default: source code)"
    )
    parser.add_argument(
        "--documents", choices=list(VAL_FRACTION), default="file", help="a document is a file (default) or a package"
    )
    add_tokenizer(parser, "bytes", "bpe:N (learned from the training files), ")
    parser.add_argument("--val_fraction", type=float, help="share of bytes to hold out (default 0.02; packages: 0.05)")
    parser.add_argument("--out", default=Path(__file__).parent, help="folder to write (default: the script's own)")
    parser.add_argument("--force", action="store_true", help="prepare again even if it is already prepared")
    args = parser.parse_args()
    tokens, new = prepare(
        args.out, args.roots, args.extensions, args.val_fraction, args.force, documents=args.documents,
        tokenizer=args.tokenizer, vocab=args.vocab,
    )
    recipe, splits = tokens.meta["recipe"], tokens.meta["splits"]
    more = f" and {len(args.roots)} more folder{'s'[: len(args.roots) > 1]}" if args.roots else ""
    done = "" if new else " (already prepared; --force prepares again)"
    if args.roots and recipe["files_skipped"]:
        print(f"left out: {recipe['files_skipped']:,} files and links that are unreadable, empty, binary, have the "
              "same content as another, or lead out of their folder")
    unit = "bytes" if args.tokenizer == "bytes" else f"tokens ({tokens.meta['tokenizer']})"
    print(
        f"{tokens.folder}: {recipe['files']:,} files of the {recipe['source']}{more}: "
        f"{splits['train']['tokens']:,} {unit} to train on, {splits['val']['tokens']:,} held out{done}"
    )
    xz = tokens.meta["xz9_bits_per_byte"]
    if args.documents == "package":
        held = splits["val"]["documents"]
        print(
            f"{splits['train']['documents']['count']:,} documents to train on, {held['count']} held out, of "
            f"{held['shortest']:,} to {held['longest']:,} bytes"
        )
    print(f"xz -9 needs {xz:.3f} bits per held-out byte" if xz else "xz: this Python was built without lzma")


if __name__ == "__main__":
    run(main)
