"""data/: the order of windows, the checks of a prepared folder, and each prepare.py, from small inputs, offline."""

import base64
import bz2
import functools
import gzip
import hashlib
import itertools
import json
import lzma
import os
import pickle
import re
import shlex
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import datasets
import numpy as np
import pyarrow as pa
import pytest
import tokenizers
import torch
from faults import dying
from helpers import (
    ROOT,
    VOCAB,
    byte_level_bpe,
    documents,
    reference,
    rejected,
    run_python,
    succeed,
    table,
    write_files,
    write_folder,
    write_jsonl,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from common.errors import ConfigError
from data import loader, mixture, prepared, shards, tokenizer, writer
from data.adopt import adopt
from data.loader import TokenData, eval_windows, get_batch, n_windows, step_windows
from data.prepared import Tokens
from data.pystdlib import prepare as pystdlib
from data.shakespeare_char import prepare as shakespeare
from data.tokenizer import Text
from data.tokens import cluster, sources
from data.tokens import prepare as any_tokens

quick = settings(deadline=None, max_examples=60, database=None)


@pytest.fixture(scope="module")
def folder_1000(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("data") / "d")  # 1,000 tokens to train on, 200 for validation


def edit_meta(folder, **changes):
    """Change fields of a meta.json, as another program might."""
    path = folder / "meta.json"
    writer.write_sealed(path, json.loads(path.read_text()) | changes)


# ---- the order of windows

@quick
@given(n=st.integers(1, 200), per_step=st.integers(1, 40), seed=st.integers(0, 2**31), step=st.integers(0, 2**33))
def test_the_order_of_windows_is_that_of_past_runs(n, per_step, seed, step):
    """One permutation of all windows follows another. In any other order every checkpoint would resume wrongly."""
    wanted = []
    for i in range(step * per_step, (step + 1) * per_step):
        wanted.append(np.random.default_rng([seed, i // n]).permutation(n)[i % n])
    windows = step_windows(n, per_step, seed, step)
    assert windows.dtype == np.int64 and windows.tolist() == wanted
    assert step_windows(10, 10, 1337, 0).tolist() == [7, 6, 3, 5, 2, 8, 4, 9, 0, 1]
    assert (step_windows(70_000, 70_000, 1, 3) == np.random.default_rng([1, 3]).permutation(70_000)).all()


def test_documents_of_the_validation_split_are_found(tmp_path):
    """Documents start where meta.json says, or after each separator. Eight equal parts replace fewer than eight
    documents, and at most 64 are used."""
    def starts(lengths, **meta):
        val = np.concatenate([[97] * (n - 1) + [0] for n in lengths])
        write_folder(tmp_path, val=val, **{"tokenizer": "bytes", **meta})
        return loader.document_starts(Tokens(tmp_path)).tolist()

    assert starts(range(3, 11)) == [0, *np.cumsum(range(3, 10))]
    assert starts([10] * 7) == [int(70 * i / 8) for i in range(8)]
    assert starts([5] * 64) == list(range(0, 320, 5)) and starts([5] * 65) == list(range(0, 325, 10))
    assert starts([6] * 9, tokenizer="hf:x", end_of_text=0) == list(range(0, 54, 6))
    assert starts([60], documents={"val": [{"start": start} for start in range(9)]}) == list(range(9))


@quick
@given(n_tokens=st.integers(2, 5000), block=st.integers(1, 600), limit=st.integers(0, 6000))
def test_an_evaluation_predicts_each_token_once_or_the_stated_number(n_tokens, block, limit):
    windows = eval_windows(n_tokens, block, limit)
    starts, lengths = windows.T
    assert lengths.sum() == min(limit or n_tokens, n_tokens - 1) and (starts + lengths <= n_tokens - 1).all()
    assert (lengths[:-1] == block).all() and 1 <= lengths[-1] <= block
    assert (starts % block == 0).all() and (np.diff(starts) >= block).all()
    if len(starts) > 2:  # evenly: gaps differ by one window at most
        assert np.ptp(np.diff(starts)) <= block
    assert eval_windows(11, 4).tolist() == [[0, 4], [4, 4], [8, 2]]
    assert eval_windows(1001, 10, 60)[:, 0].tolist() == [0, 160, 330, 500, 660, 830]


def test_a_last_partial_window_is_left_out():
    assert [n_windows(n, 16) for n in (16, 17, 32, 33)] == [0, 1, 1, 2]


# ---- as training reads it

def token_data(folder, batch_tokens=192):
    return TokenData(Tokens(folder, block_size=16), 16, batch_tokens, seed=7)


@pytest.mark.parametrize("processes, micro, step", [(1, 5, 0), (2, 4, 3), (3, 9, 61)])
def test_a_step_is_the_same_for_any_processes_and_micro_batches(folder_1000, processes, micro, step):
    """The windows of a step are in order, rank after rank; a window is 16 tokens and their successors."""
    data = token_data(folder_1000)
    rows = []
    for rank in range(processes):
        batches = list(data.micro_batches(step, rank, processes, micro))
        assert [len(x) for x, _, _ in batches[:-1]] == [micro] * (len(batches) - 1)
        for x, y, weight in batches:
            assert torch.equal(x[:, 1:], y[:, :-1]) and x.dtype == y.dtype == torch.int64
            assert weight == len(x) / (12 / processes)
            rows += torch.cat([x, y[:, -1:]], 1).tolist()
    starts = step_windows(62, 12, 7, step) * 16
    assert rows == [data.tokens.train[start:start + 17].tolist() for start in starts]


@pytest.mark.parametrize("processes, batch, block, limit", [(1, 4, 7, 0), (2, 3, 7, 100), (5, 2, 60, 0)])
def test_eval_batches_hold_each_window_once(folder_1000, processes, batch, block, limit):
    data, windows = token_data(folder_1000), eval_windows(200, block, limit)
    for rank in range(processes):
        batches = list(data.eval_batches(windows, rank, processes, batch))
        assert all(len(x) == batch for x, _ in batches[:-2])  # then come the last whole windows and a shorter one
        rows = [[*x.tolist(), y[-1].item()] for xs, ys in batches for x, y in zip(xs, ys, strict=True)]
        assert rows == [data.tokens.val[s : s + n + 1].tolist() for s, n in windows[rank::processes]]


# ---- a prepared folder, opened

def test_a_folder_is_found_and_opened(tmp_path, monkeypatch):
    folder = write_folder(tmp_path)
    (tmp_path.parent / "raw").mkdir()  # somebody's files
    (tmp_path / "data/raw").mkdir(parents=True)
    (tmp_path / "data/raw/meta.json").touch()
    with mock.patch.object(prepared, "__file__", f"{tmp_path}/data/prepared.py"):
        monkeypatch.chdir(tmp_path.parent)
        assert prepared.find_dataset("raw") == tmp_path / "data/raw"
        Path("raw/meta.json").touch()
        assert prepared.find_dataset("raw") == Path("raw")
    assert prepared.find_dataset(folder.name) == Path(folder.name)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert prepared.find_dataset(f"~/{folder.name}") == folder
    tokens = Tokens(folder, vocab_size=256, block_size=199)
    with pytest.raises(ValueError):
        tokens.train[0] = 1  # read-only
    assert tokens.sha256["val"] == hashlib.sha256((folder / "val.bin").read_bytes()).hexdigest()
    assert tokens.bytes_per_token is None
    splits = tokens.meta["splits"]
    splits["val"]["bytes"] = 860
    edit_meta(folder, splits=splits)
    assert Tokens(folder).bytes_per_token == 4.3


FILES = [  # a file of a folder of 1,000 and 120 tokens, how it changes, words of the refusal
    ("train.bin", lambda old: old[:-1], "truncated: 1,999 bytes, but meta.json says 2,000"),
    ("train.bin", lambda old: old + b"xx", "longer than recorded: 2,002"),
    ("train.bin", lambda old: b"\0\1" + old[2:], "train.bin holds token id 256, outside its vocabulary of 256"),
    ("val.bin", lambda old: old[2:] + old[:2], "val.bin is not the file that meta.json describes"),
    ("meta.json", lambda old: b"{", "meta.json is damaged"),
    ("meta.json", lambda old: b'{"x":' + b"[" * 10**5 + b"]" * 10**5 + b"}", "meta.json is damaged"),
    ("meta.json", lambda old: b"[1]", "meta.json is damaged"),
    ("meta.json", lambda old: old.replace(b"256", b"257"), "damaged or edited (its checksum"),
    ("meta.json", lambda old: old.replace(b"crc32", b"crc"), "recorded as None"),
]


@pytest.mark.parametrize("name, change, words", FILES)
def test_a_changed_file_is_refused(tmp_path, name, change, words):
    path = write_folder(tmp_path, val=120) / name
    path.write_bytes(change(path.read_bytes()))
    (tmp_path / "prepare.py").touch()
    rejected(lambda: Tokens(tmp_path), words, f"python {tmp_path}/prepare.py")


# A folder, what a model asks of it, words of the refusal.
UNUSABLE = """
set      {"block_size": 120}   val.bin has 120 tokens, but a window of block_size + 1 needs 121
set      {"block_size": 1000}  train.bin has 1,000 tokens
set      {"vocab_size": 255}   at least 256
nothing  {}                    data/nothing: check the path, or choose one in data/: openwebtext, pystdlib
a.txt    {}                    prepare.py --files a.txt --out data/a
.        {}                    no meta.json
"""


@pytest.mark.parametrize("name, how, words", table(UNUSABLE))
def test_a_folder_that_a_model_cannot_use_is_refused(tmp_path, monkeypatch, name, how, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").touch()
    assert len(Tokens(write_folder(tmp_path / "set", val=120), 256, block_size=119).val) == 120
    rejected(lambda: Tokens(prepared.find_dataset(name), **json.loads(how)), words)


def test_sizes_that_cannot_be_divided_are_refused(tmp_path, folder_1000):
    rejected(lambda: write_folder(tmp_path, val=[]), "val.bin has 0 tokens")
    assert not (tmp_path / "meta.json").exists()
    rejected(lambda: step_windows(0, 4, 0, 0), "0 windows")
    rejected(lambda: eval_windows(1, 4), "1 tokens")
    rejected(lambda: token_data(folder_1000).rank_slice(0, 5), "12 windows", "5 processes", "batch_tokens 240")
    for batch_tokens, words in [(100, "nearest is 96"), (3, "nearest is 16"),
                                (16 * (2**24 + 1), "16,777,217 windows of 16: at most 16,777,216")]:
        rejected(lambda n=batch_tokens: token_data(folder_1000, n), words)


@pytest.mark.parametrize("wrong", [{"vocab_size": "256"}, {"splits": {}}])
def test_fields_of_wrong_types_are_refused_despite_the_right_checksum(tmp_path, wrong):
    edit_meta(write_folder(tmp_path), **wrong)
    with pytest.raises(ConfigError, match=f"^the fields of {tmp_path}/meta.json (lack|are damaged)"):
        Tokens(tmp_path)


def test_shards_read_as_one_array(tmp_path, monkeypatch):
    """Slices lie within a file, start at its first token or end at its last, span two files or all, or go beyond the
    end. Few files are open at once."""
    monkeypatch.setattr(shards, "opened", functools.lru_cache(9)(shards.opened.__wrapped__))
    ends = [0, 7, 8, *range(30, 61)]
    for start, stop in itertools.pairwise(ends):
        writer.write_split(tmp_path / f"{start}.bin", [range(start, stop)], 60)
    before = len(os.listdir("/dev/fd"))
    paths = [tmp_path / f"{start}.bin" for start in ends[:-1]]
    both = [shards.Shards(tmp_path, paths, np.diff(ends), np.uint16) for _ in range(2)]  # as in a mixture
    for start, stop in itertools.combinations_with_replacement([*range(32), 58, 60, 99], 2):
        for of_a_mixture in both:
            assert of_a_mixture[start:stop].tolist() == list(range(60))[start:stop]
    assert get_batch(both[0], [5, 0], 9)[1].tolist() == [[*range(6, 15)], [*range(1, 10)]]
    kept = [both[0][start:start + 1] for start in range(60)]  # a micro-batch, until it is stacked
    assert len(kept) == 60 and len(os.listdir("/dev/fd")) - before <= 9


def test_ids_outside_the_vocabulary_are_found_in_a_longer_split(tmp_path, monkeypatch):
    """Opening a folder checks samples, the first and last tokens, and the largest id that prepare.py recorded."""
    write_folder(tmp_path, train=50_000, vocab_size=100)
    for name, value in (("FULL_CHECK_TOKENS", 10_000), ("SPOT_CHECKS", 5), ("SPOT_TOKENS", 10)):
        monkeypatch.setattr(prepared, name, value)
    tokens = np.memmap(tmp_path / "train.bin", np.uint16, "r+")
    for place in (0, 49_999, 25_000):
        tokens[place] = 100
        rejected(lambda: Tokens(tmp_path), "token id 100")
        tokens[place] = 0
    splits = Tokens(tmp_path).meta["splits"]
    splits["train"]["max_token"] = 100
    edit_meta(tmp_path, splits=splits)
    rejected(lambda: Tokens(tmp_path), "token id 100")


# ---- writing

def test_dtype_follows_the_vocabulary(tmp_path):
    dtypes = [writer.token_dtype(n) for n in (1, 65_536, 65_537, 2**32)]
    assert dtypes == ["uint16", "uint16", "uint32", "uint32"]
    rejected(lambda: writer.token_dtype(2**32 + 1), "4294967297")
    tokens = Tokens(write_folder(tmp_path, val=[65_536, 5, 70_000, 1], vocab_size=70_001))
    assert get_batch(tokens.val, [0], 3)[1].tolist() == [[5, 70_000, 1]]


@pytest.mark.parametrize("bad", [-1, 256, 65_536 + 7])  # the last one would wrap to 7
def test_ids_are_checked_before_the_cast(tmp_path, bad):
    rejected(lambda: writer.write_split(tmp_path / "val.bin", [[1, 2], [3, bad]], 256), f"token id {bad}", "256")
    assert list(tmp_path.iterdir()) == []


def test_a_split_is_written_piece_by_piece(tmp_path):
    (tmp_path / "meta.json").touch()
    entry = writer.write_split(tmp_path / "val.bin", [np.arange(5)[::2], [], np.array([9], np.uint8), range(2)], 10)
    data = np.array([0, 2, 4, 9, 0, 1], np.uint16).tobytes()
    assert (tmp_path / "val.bin").read_bytes() == data
    assert entry == {"tokens": 6, "sha256": hashlib.sha256(data).hexdigest(), "max_token": 9}
    assert not (tmp_path / "meta.json").exists()  # it described another file


def test_two_processes_do_not_prepare_one_folder(tmp_path):
    with writer.preparing(tmp_path):
        rejected(lambda: writer.preparing(tmp_path).__enter__(), "another process is preparing", str(tmp_path))


# ---- pystdlib

def shuffled(names):
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())


def split_of(sizes, fraction, shortest=0):
    """(names held out, other names) of {name: bytes}, in order."""
    wanted, val, train = fraction * sum(sizes.values()), [], []
    for name in shuffled(sizes):
        open_yet = sum(sizes[held] for held in val) < wanted
        (val if open_yet and shortest <= sizes[name] <= wanted / 4 else train).append(name)
    return val, train


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A folder of source files like a standard library's, one of them large, with files that must be skipped."""
    monkeypatch.setattr(pystdlib, "xz9_bits_per_byte", lambda files: 1.5)  # it takes hundreds of megabytes
    files = {f"package{i % 7}/module{i}.py": f"# module {i}\n" + f"x{i} = {i}\n" * 40 for i in range(60)}
    large = shuffled(f"generated{i}.py" for i in range(1000))[0]  # comes first, too large to hold out
    write_files(tmp_path / "lib", {
        **files, large: "y = 0\n" * 300, "copy.py": files["package0/module0.py"],  # comes first, so it is the one kept
        "empty.py": "", "binary.py": "a\0b", "notes.txt": "not source", "site-packages/a.py": "a = 1",
        "dist-packages/a.py": "a", "__pycache__/a.py": "a", "../outside.py": "a = 2"})
    (tmp_path / "lib/linked.py").symlink_to(tmp_path / "outside.py")
    return tmp_path / "lib"


def text_of(*splits):
    """The text of splits whose tokens are bytes."""
    return b"".join(tokens[:].astype(np.uint8).tobytes() for tokens in splits)


def test_pystdlib_splits_by_file(library, tmp_path):
    tokens = pystdlib.prepare(tmp_path / "out", stdlib=library, val_fraction=0.2)
    files = {path.relative_to(library).as_posix(): path.read_bytes() for path in library.rglob("[gm]*[0-9].py")}
    files["copy.py"] = files.pop("package0/module0.py")
    val, train = split_of({name: len(content) for name, content in files.items()}, 0.2)
    for split, names in (("train", train), ("val", val)):
        assert text_of(getattr(tokens, split)) == b"".join(files[name] + b"\0" for name in names)
        assert tokens.meta["splits"][split]["files"] == len(names)
    assert train[0].startswith("generated") and tokens.bytes_per_token == 1.0
    assert tokens.meta["recipe"]["files_skipped"] == 4
    # what earlier runs were trained on: if these change, no earlier checkpoint can be resumed
    assert tokens.meta["inputs"][:16] == "9dd49a6b1a9964c0" and tokens.sha256["val"][:16] == "010ab08fe420e80d"


def test_pystdlib_knows_when_it_is_done(library, tmp_path):
    def made(fraction=0.2, **how):
        """True if it writes a file."""
        inodes = lambda: {path: path.stat().st_ino for path in (tmp_path / "a").glob("*.bin")}
        before = inodes()
        pystdlib.prepare(tmp_path / "a", stdlib=library, val_fraction=fraction, **how)
        return inodes() != before

    assert made() and not made() and made(force=True) and made(0.3)  # another recipe
    (tmp_path / "a/val.bin").unlink()
    assert made(0.3)  # damaged
    (library / "package1/module1.py").write_text("changed = 1\n")
    assert made(0.3) and made(0.3, tokenizer="bpe:300") and not made(0.3, tokenizer="bpe:300")


NO_LIBRARY = """
{"val_fraction": 1e-6}                           1e-06
{"stdlib": "/no/where"}                          no source files
{"documents": "package", "tokenizer": "bpe:300"}  counts bytes
{"tokenizer": "bpe:257"}                         258 .. 65536
{"tokenizer": "bpe:65537"}                       258 .. 65536
{"tokenizer": "chars"}                           bytes or bpe:N here
"""


@pytest.mark.parametrize("how, words", table(NO_LIBRARY))
def test_pystdlib_refuses_wrong_settings(library, tmp_path, how, words):
    how = {"stdlib": library, "val_fraction": 0.1, **json.loads(how)}
    rejected(lambda: pystdlib.prepare(tmp_path / "x", **how), words)
    assert not (tmp_path / "x/meta.json").exists()


def test_pystdlib_learns_tokens_from_its_training_files(library, tmp_path):
    prepare = functools.partial(pystdlib.prepare, stdlib=library, val_fraction=0.2)
    (library / "package3/module17.py").write_text("# naïve\n" * 40, encoding="utf-8")  # held out
    tokens, whole = prepare(tmp_path / "a", tokenizer="bpe:300"), prepare(tmp_path / "bytes")
    text = Text(tokens.meta["tokenizer"], tokens.meta["table"])  # as a checkpoint knows it: no file is read
    assert tokens.vocab_size == text.n_vocab == 300
    for split in ("train", "val"):
        ids, true = getattr(tokens, split), text_of(getattr(whole, split))
        text.begin()
        written = "".join(text.decode(int(token)) for token in ids[:])
        assert written.encode() == true.replace(b"\0", b"<|endoftext|>") and len(ids) < 0.8 * len(true)
    assert tokens.bytes_per_token == len(true) / len(ids)  # bytes of val, not characters
    held_out = true.decode().split("\0")[:-1]
    for path in library.rglob("*.py"):
        if path.read_text() in held_out:  # as long as before: the split stays
            path.write_text(path.read_text().replace(" = ", " @ "))
    other = prepare(tmp_path / "b", tokenizer="bpe:300")
    assert other.meta["table"] == tokens.meta["table"] and other.sha256["val"] != tokens.sha256["val"]


def test_packages_are_whole_documents_in_one_split(tmp_path, monkeypatch):
    """`most` is as large as a package may be. `just` is a byte too large and `over` far too large, so that their files
    and folders are the documents. Modules with their zero are as long as LONG, and so not held out."""
    packages = {f"{above}package{i}/": [f"{above}package{i}/{name}.py" for name in ("a", "b", "inner/c")]
                for i in range(12) for above in ("", "over/")}
    packages |= {"most/": ["most/a.py", "most/b.py"], "just/a.py": ["just/a.py"], "just/b.py": ["just/b.py"]}
    packages |= {f"module{i}.py": [f"module{i}.py"] for i in range(40)}
    sizes = {"most/a.py": 1499, "most/b.py": 1499, "just/a.py": 1499, "just/b.py": 1500}  # a zero ends each
    content = {}
    for name, files in packages.items():
        for i, file in enumerate(files):
            text = f"{i} {name}".ljust(699 if name.startswith("module") else sizes.get(file, 300 + 90 * i), "y")
            write_files(tmp_path / "lib", {file: text})
            content[name] = content.get(name, b"") + text.encode() + b"\0"
    monkeypatch.setattr(pystdlib, "SHELF_BYTES", 3000)
    monkeypatch.setattr(pystdlib, "LONG", 700)
    prepare = functools.partial(pystdlib.prepare, tmp_path / "out", stdlib=tmp_path / "lib", val_fraction=0.3)
    tokens = prepare(documents="package")
    val, train = split_of({name: len(text) for name, text in content.items()}, 0.3, shortest=701)
    assert len(val) > 5 and text_of(tokens.train, tokens.val) == b"".join(content[name] for name in train + val)
    for i, document in enumerate(tokens.meta["documents"]["val"]):
        start = sum(len(content[name]) for name in val[:i])
        assert document == {"name": val[i], "start": start, "tokens": len(content[val[i]])}
    assert i == len(val) - 1 and "documents" not in prepare().meta  # another recipe


def test_the_standard_library_is_prepared_as_by_a_user(tmp_path):
    """Runs the program for the default data set, which takes seconds, and checks sizes and the bits of xz."""
    done = run_python("data/pystdlib/prepare.py", "--out", tmp_path)
    assert done.returncode == 0 and not done.stderr, done
    tokens = Tokens(tmp_path, vocab_size=256, block_size=1024)
    total = len(tokens.train) + len(tokens.val)
    assert total > 8_000_000 and 0.018 < len(tokens.val) / total < 0.022  # Debian's Python has 11 MB, others have 30
    xz = lzma.compress(text_of(tokens.val), preset=9)  # the bytes, not the uint16 of the file
    bits = 8 * len(xz) / len(tokens.val)
    assert tokens.meta["xz9_bits_per_byte"] == pytest.approx(bits, rel=1e-4) and f"needs {bits:.3f} bits" in done.stdout


# ---- adopting what somebody else prepared

def nanogpt(folder, train=(5, 50_256, 7), dtype=np.uint16):
    """A folder as nanoGPT's prepare.py leaves it, with a meta.pkl that must not be opened."""
    folder.mkdir()
    np.array(train, dtype).tofile(folder / "train.bin")
    np.array([1, 2], dtype).tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    return folder


def test_files_of_nanogpt_are_adopted(tmp_path):
    folder = nanogpt(tmp_path / "owt")
    rejected(lambda: adopt(folder), "meta.pkl has no vocabulary", "os.system", "--vocab_size")
    adopt(folder, tokenizer="gpt2", bytes_per_token=4.5)
    tokens = Tokens(folder, vocab_size=50_304, block_size=1)
    assert tokens.train.tolist() == [5, 50_256, 7] and tokens.val.tolist() == [1, 2] and tokens.bytes_per_token == 4.5
    assert (tokens.vocab_size, tokens.meta["tokenizer"], tokens.meta["end_of_text"]) == (50_257, "gpt2", 50_256)
    rejected(lambda: adopt(folder, 50_257), "meta.json already exists")


@pytest.mark.parametrize("vocab_size, given", [(128_256, None), (65, "uint32")])  # ours would be uint16
def test_adopted_tokens_are_those_of_the_files(tmp_path, vocab_size, given):
    train = [3] * 3000 + [vocab_size - 1]
    tokens = adopt(nanogpt(tmp_path / "set", train, np.uint32), vocab_size, given)
    assert tokens.train.tolist() == train and tokens.meta["splits"]["train"]["max_token"] == vocab_size - 1


def test_characters_of_nanogpt_are_adopted(tmp_path):
    """meta.pkl is read without running what it names; files of numpy.save are copied."""
    folder = nanogpt(tmp_path / "play", [1, 2, 0])
    (folder / "meta.pkl").write_bytes(pickle.dumps({"stoi": {"\n": 1, "é": 2}}))
    rejected(lambda: adopt(folder), "stoi does not number characters from 0")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"stoi": {"b": 2, "\n": 0, "é": 1}}))
    for rows, words in ([[2, 1, 2, 0]], "(1, 4) and int64"), ([2.0, 1.0], "(2,) and float64"):
        np.save(folder / "val.npy", rows)
        rejected(lambda: adopt(folder), f"val.npy is not a 1-d array of integers (it has shape {words}")
    np.save(folder / "val.npy", [2, 1, 2, 0])
    rejected(lambda: Tokens(folder), "not prepared", f"python data/adopt.py {folder}")
    tokens = adopt(folder, tokenizer="chars")
    assert (tokens.meta["tokenizer"], tokens.meta["table"], tokens.vocab_size) == ("char", "\néb", 3)
    assert tokens.train.tolist() == [1, 2, 0] and tokens.val.tolist() == [2, 1, 2, 0]


@pytest.mark.parametrize("magic, dtype", [(20240520, np.uint16), (20240801, np.uint32)])
def test_files_of_llm_c_are_adopted(tmp_path, magic, dtype):
    """Files are read in the order of their names; a number of tokens that differs from the header is refused."""
    def write(name, ids, count):
        header = np.zeros(256, np.int32)
        header[[0, 2]] = magic, count
        (tmp_path / name).write_bytes(header.tobytes() + np.array(ids, dtype).tobytes())

    write("a_train_000002.bin", [7], 1)
    write("a_train_000001.bin", [5, 6], 2)
    write("a_val_000000.bin", [8, 9], 3)
    rejected(lambda: adopt(tmp_path, tokenizer="gpt2"), "a_val_000000.bin holds 2 tokens, but its header says 3")
    write("a_val_000000.bin", [8, 9], 2)
    tokens = adopt(tmp_path, tokenizer="gpt2")
    assert tokens.train.tolist() == [5, 6, 7] and tokens.val.tolist() == [8, 9]


# The first ids of train.bin, which holds them 41 times, and their dtype; arguments; words of the refusal.
NOT_ADOPTED = """
[5]                   uint16  {"vocab_size": 5}       train.bin holds token id 5 as uint16, outside a vocabulary of 5
[5]                   uint16  {"vocab_size": 70000}   train.bin is 82 bytes, not a whole number of uint32
[]                    uint16  {"vocab_size": 9}       train.bin is 0 bytes
[5]                   uint16  {"vocab_size": 128256, "dtype": "uint16"}   have wrapped and are lost
[20240520, 1, 3]      int32   {"tokenizer": "gpt2"}   header of llm.c
[20115, 19797, 22864]  uint16  {"tokenizer": "gpt2"}   rename it to train.npy
[3, 64]               uint32  {"vocab_size": 65}      every second uint16 is 0, as in a file of uint32
[5]                   uint16  {"vocab_size": 9, "tokenizer": "klingon"}   tokenizer 'klingon' is unknown
null                  uint16  {"vocab_size": 9}       train.bin is missing
"""


@pytest.mark.parametrize("train, dtype, how, words", table(NOT_ADOPTED))
def test_damaged_or_doubtful_files_are_not_adopted(tmp_path, train, dtype, how, words):
    ids = json.loads(train)
    folder = nanogpt(tmp_path / "set", (ids or []) * 41, dtype)
    if ids is None:
        (folder / "train.bin").unlink()
    rejected(lambda: adopt(folder, **json.loads(how)), words)
    assert not (folder / "meta.json").exists()


# ---- shakespeare_char

def test_shakespeare_is_prepared_from_a_download_or_a_file(tmp_path, monkeypatch):
    """The text is known by its sha256 and downloaded once."""
    text = "To be, or not to be, that is the question\n" * 9
    prepare = functools.partial(shakespeare.prepare, tmp_path / "out")
    monkeypatch.setattr(shakespeare, "download", lambda: b"<html>not found</html>")
    rejected(prepare, "not Tiny Shakespeare", "data/tokens/prepare.py")
    monkeypatch.setattr(shakespeare, "SHA256", hashlib.sha256(text.encode()).hexdigest())
    monkeypatch.setattr(shakespeare, "download", text.encode)
    tokens = prepare()
    table = tokens.meta["table"]
    assert table == "".join(sorted(set(text))) and tokens.vocab_size == len(table) and tokens.bytes_per_token == 1
    decoded = ["".join(table[i] for i in split) for split in (tokens.train, tokens.val)]
    assert decoded == [text[:int(0.9 * len(text))], text[int(0.9 * len(text)):]]
    monkeypatch.setattr(shakespeare, "download", lambda: 1 / 0)
    (tmp_path / "input.txt").write_text(text)
    own = prepare(tmp_path / "input.txt", force=True)
    assert prepare().sha256 == own.sha256 == tokens.sha256 and own.meta["recipe"]["source"] == f"{tmp_path}/input.txt"


def test_shakespeare_without_a_network_is_refused_in_one_line():
    rejected(lambda: shakespeare.download("http://127.0.0.1:9/input.txt"), "cannot download", "--file")


# ---- data/tokens: shards, openwebtext and other recipes, mixtures

@pytest.fixture
def small_units(monkeypatch, tmp_path):
    """Sets shards of 300 tokens, batches of 300 characters, a unit per file, and a cache here for `datasets`."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name in "SHARD_TOKENS", "BATCH_CHARS":
        monkeypatch.setattr(any_tokens, name, 300)
    for name, value in {"PIECE_CHARS": 300, "UNIT_BYTES": 1, "UNIT_DOCUMENTS": 50}.items():
        monkeypatch.setattr(sources, name, value)


@pytest.fixture
def prepare(tmp_path):
    """data/tokens/prepare.py's `prepare`, with the usual arguments."""
    return functools.partial(any_tokens.prepare, out=tmp_path / "out", tokenizer="bytes", val_fraction=0.2)


def test_any_files_become_shards(small_units, tmp_path, prepare):
    """The shards hold each document's tokens in order; a text file is one document."""
    texts = ["half a character \ud83d, a zero \0", *documents(149), "one text\n" * 100 + "the end"]
    units = [texts[:40], texts[40:80], texts[80:120], texts[120:150], texts[150:]]
    folder = tmp_path / "files"
    folder.mkdir()
    for unit, name in enumerate(["a.ndjson", "b.txt.jsonl.gz", "c.jsonl.zst"]):
        write_jsonl(folder / name, units[unit])
    parquet.write_table(pa.table({"text": units[3]}), folder / "d.parquet")
    (folder / "e.txt.bz2").write_bytes(bz2.compress(texts[150].encode()))
    byte_level_bpe(tmp_path, documents(50))
    text = Text(f"hf:{tmp_path}")
    whole = prepare(files=[folder], tokenizer=f"hf:{tmp_path}", workers=2)
    expected = reference([[words.replace("\0", "\ufffd") for words in unit] for unit in units], text)
    sizes = 0
    for split, ids in expected.items():
        meta = whole.meta["splits"][split]
        assert getattr(whole, split)[:].tolist() == ids and meta["max_token"] == max(ids)
        assert meta["documents"] == ids.count(text.eot_token)
        content = [(tmp_path / "out" / shard["file"]).read_bytes() for shard in meta["shards"]]
        hashes = "".join(hashlib.sha256(data).hexdigest() for data in content)
        assert whole.sha256[split] == hashlib.sha256(hashes.encode()).hexdigest()
        sizes += meta["bytes"]
    assert sizes == len("".join(texts).encode("utf-8", "surrogatepass")) + 2
    assert len(whole.meta["splits"]["train"]["shards"]) > 5
    assert text.encode_after("w", "ord") == text.encode_ordinary("ord")  # although "word" is one token


def test_a_change_of_any_shard_is_noticed(small_units, tmp_path, prepare):
    prepare(files=[write_jsonl(tmp_path / "a.jsonl", documents(200))])
    data = token_data(tmp_path / "out")
    first, second = tmp_path / "out/00000.train.bin", tmp_path / "out/00001.train.bin"
    data.check_unchanged()
    os.utime(first, ns=(0, 0))
    assert token_data(tmp_path / "out").file_times != data.file_times  # although the latest time is the same
    rejected(data.check_unchanged, "out changed during the run (written to)")
    content = second.read_bytes()
    second.write_bytes(content[2:] + content[:2])
    rejected(lambda: Tokens(tmp_path / "out"), second.name, "sha256 differs")
    size = len(data.tokens.train) * 2
    second.write_bytes(content[2:])
    rejected(data.check_unchanged, f"out changed during the run ({size:,} bytes then, {size - 2:,} now)")
    second.unlink()
    rejected(data.check_unchanged, "out changed during the run (No such file")


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_preparing_tokens_goes_on_after_kill_9(small_units, tmp_path, prepare, kind):
    """Kills `prepare` before the renames of a shard's files and of plan.json; at the end the disk has lost a shard. The
    second of two texts is divided."""
    out, files = tmp_path / "out", [tmp_path / f"{name}.{kind}" for name in "ab"]
    for path, texts in zip(files, (documents(10), documents(80)), strict=True):
        write_jsonl(path, texts) if kind == "jsonl" else path.write_text("".join(texts), encoding="utf-8")
    prepare = functools.partial(prepare, files=files, workers=2)
    whole = prepare(out=tmp_path / "whole").meta["splits"]
    run = lambda at: dying(at, prepare, out, events=["os.rename"])[0]
    assert [run(at) for at in (1, 3, 4, 7, 5)] == [-signal.SIGKILL] * 5 and not (out / "meta.json").exists()
    rejected(lambda: prepare(val_fraction=0.4), "from other inputs")
    rejected(lambda: Tokens(out), "only partly prepared")
    first = (out / "00000.train.bin").stat().st_mtime_ns
    assert run(0) == 0 and Tokens(out).meta["splits"] == whole and not list(out.glob("*.tmp-*"))
    lost = next(out.glob("00001.*.bin"))
    for damaged in lost.read_bytes()[:-2], lost.read_bytes()[::-1]:
        (out / "meta.json").unlink()
        lost.write_bytes(damaged)
        assert run(0) == 0 and Tokens(out).meta["splits"] == whole
        Tokens(out).verify()
    assert (out / "00000.train.bin").stat().st_mtime_ns == first  # a finished shard is not made again


def test_a_data_set_of_the_hub_is_streamed_in_order(small_units, tmp_path, prepare):
    """The set is streamed shard by shard, with its own validation split, and its documents stay in order."""
    (tmp_path / "hub").mkdir()
    texts = documents(80)
    for name, start, stop in (("train-0", 0, 40), ("train-1", 40, 70), ("validation-0", 70, 80), ("test-0", 0, 9)):
        write_jsonl(tmp_path / f"hub/{name}.jsonl", texts[start:stop])
    tokens = prepare(source=str(tmp_path / "hub"))
    assert text_of(tokens.train, tokens.val) == b"".join(text.encode() + b"\0" for text in texts)
    assert tokens.meta["splits"]["val"]["documents"] == 10


def test_characters_become_tokens(small_units, tmp_path, prepare):
    write_files(tmp_path, {"b.txt": "cab" * 150})  # in two pieces
    source = [write_jsonl(tmp_path / "a.jsonl", ["über", "abc", None]), tmp_path / "b.txt"]
    tokens = prepare(files=source, tokenizer="chars", shuffle=2357)
    assert tokens.meta["table"] == "\0abcerü" and tokens.vocab_size == 7
    ids = [*tokens.train[:], *tokens.val[:]]
    assert len(ids) == 4 + 3 + 450 + 3 and ids.count(0) == 3
    assert (Text("char", "a\n\0").eot_token, Text("char", "ab\n").eot_token) == (2, 2)  # the zero, else the line feed


def test_files_of_tiktoken_are_read(tmp_path):
    """tiktoken checks the sha256 of its files."""
    ranks = Text("gpt2", vocab=VOCAB).encoding._mergeable_ranks
    lines = [base64.b64encode(token) + b" %d\n" % ranks[token] for token in sorted(ranks, key=ranks.get)]
    (tmp_path / "r50k_base.tiktoken").write_bytes(b"".join(lines))
    text = Text("tiktoken:r50k_base", vocab=tmp_path)
    assert (text.name, text.n_vocab, text.eot_token) == ("tiktoken:r50k_base", 50257, 50256)
    assert text.encode("<|endoftext|>") == [50256] and 50256 not in text.encode_ordinary("<|endoftext|>")


# ---- data/tokens: files that people bring

def read(*paths, **how):
    """The text of all documents, with a zero after each."""
    reading = sources.Reading(**how)
    items = [item for unit in sources.local_units(paths, reading) for item in sources.documents(unit, reading)]
    return "".join(text + "\0" * end for _, text, end in items)


@pytest.mark.parametrize("texts, fraction, held_out", [
    (["to be or not to be\n"] * 15, 0.2, 57),  # their hashes would hold out seven
    (["one " * 30 + "\n", "two " * 30, "three " * 90], None, 78),
    (["word " * 200, "x"], 0.5, 500),
    (["x" * 1000], 0.3, 300),
    (["line\n" * 5000], None, 2**11),
])
def test_few_documents_are_divided(small_units, tmp_path, prepare, monkeypatch, texts, fraction, held_out):
    """Texts stay in order, each followed by an end of text; the tail, starting at a line or a word, is held out."""
    monkeypatch.setattr(any_tokens, "MOST_HELD_OUT", 2**11)
    write_files(tmp_path, {"small": "a", **{f"texts/{i}.txt": text for i, text in enumerate(texts)}})
    split = lambda name: prepare(files=[tmp_path / name], val_fraction=fraction, endings=("small",))
    rejected(lambda: split("small"), "1 characters are too few", "at least 2")
    tokens = split("texts")  # nothing is left that needs --force
    train, val = text_of(tokens.train), text_of(tokens.val)
    assert tokens.meta["splits"]["val"]["documents"] == val.count(b"\0")
    assert train + val == "".join(f"{text}\0" for text in texts).encode()
    assert held_out * 0.9 <= len(val.replace(b"\0", b"")) <= held_out
    assert val[:1] in b" x" or train.endswith((b"\n", b"\0"))


def test_files_named_val_are_held_out(small_units, tmp_path, prepare, capsys):
    """They are not held out beside a file that is named for neither split, as in code. Empty documents are counted."""
    lines = '{"text": "one"}\n{"text": null}\n{"text": ""}\n'
    write_files(tmp_path / "in", {
        "train.txt": "two", "train-0.jsonl": lines, "Val/a.txt": "3", "w.dev.txt": "4"})
    tokens = prepare(files=[tmp_path / "in"])
    assert text_of(tokens.train, tokens.val) == b"one\0two\x003\x004\0" and len(tokens.val) == 4
    assert tokens.meta["splits"]["train"]["documents"] == 2
    said = capsys.readouterr().err
    assert "held out because of their names, and no others: 2 files" in said and "2 empty documents of train" in said
    write_files(tmp_path / "in", {"model.txt": "d" * 99})
    prepare(files=[tmp_path / "in"], force=True)
    assert "because of their names" not in capsys.readouterr().err


def test_the_choice_of_files_held_out_is_part_of_the_inputs(tmp_path, prepare):
    write_files(tmp_path / "in", {"test/a.txt": "held out", "train/a.txt": "read"})
    assert text_of(prepare(files=[tmp_path / "in"]).val) == b"held out\0"
    (tmp_path / "in/train").rename(tmp_path / "in/val")
    (tmp_path / "in/test").rename(tmp_path / "in/train")
    rejected(lambda: prepare(files=[tmp_path / "in"]), "from other inputs")


def test_a_separator_that_is_missing_or_not_given_is_reported(tmp_path, prepare, capsys):
    write_files(tmp_path / "in", {"train.txt": "a<|endoftext|>b", "test.txt": "c"})
    rejected(lambda: prepare(files=[tmp_path / "in"], separator="<none>"), "is in none of the files")
    prepare(files=[tmp_path / "in"])
    assert "<|endoftext|> occurs in the text 1 times" in capsys.readouterr().err


def test_a_folder_is_read_with_its_subfolders(tmp_path, prepare, capsys):
    """Links are followed once, endings match in upper and lower case, and files left out are counted."""
    corpus = tmp_path / "corpus"
    odd = os.fsdecode(b"\xff.txt") if sys.platform == "linux" else "\U0010ffff.txt"  # which sorts last
    write_files(corpus, {
        odd: "odd", "A.TXT": "A", "d.jsonl/part.Jsonl": '{"text": "d"}', "b.md": "md", "c.py": "py",
        "c/LICENSE": "no ending",
        "empty.txt": "", "bom.txt": "\ufeff", ".git/x.txt": "hidden", "__MACOSX/A.txt": "hidden",
        "same.txt": "twice", "same2.txt": "twice", "../elsewhere/e.txt": "eee"})
    for name, target in (("e1", "../elsewhere"), ("e2", "../elsewhere"), ("loop", "."), ("f.txt", "A.TXT"),
                         ("none.txt", "nowhere")):
        (corpus / name).symlink_to(target)
    (corpus / "z.JSONL.GZ").write_bytes(gzip.compress(b'{"text": "z"}\n'))
    tokens = prepare(files=[corpus, corpus])
    assert text_of(tokens.train, tokens.val) == b"A\0d\0eee\0twice\0twice\0z\0odd\0"
    assert tokens.meta["recipe"]["left_out"] == {
        "ending in .md": 1, "ending in .py": 1, "without an ending": 1, "empty": 2, "hidden": 2, "met twice": 4,
        "links to nothing, or no files": 1}
    assert len(sources.local_units([corpus], sources.Reading())) == 1  # small files are joined
    said = capsys.readouterr().err
    assert f"1 ending in .md ({corpus}/b.md)" in said and f"{corpus}/same2.txt like {corpus}/same.txt" in said
    assert read(corpus, endings=(".MD", "lic*")) == "A\0md\0no ending\0d\0eee\0twice\0twice\0z\0odd\0"


@pytest.mark.parametrize("codec", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_a_byte_order_mark_decides_the_encoding(small_units, tmp_path, codec):
    greek = "αβγ, ünï 🙂\n" * 9
    (tmp_path / "a.txt").write_bytes(("\ufeff" + greek).encode(codec))
    assert read(tmp_path / "a.txt") == greek + "\0"


# The bytes of a file, --encoding, its text, or words of the line that refuses it.
ENCODINGS = """
\xc3\xbcber            latin-1  über
caf\xe9 au lait        latin-1  café au lait
zero\0                utf-8    zero\ufffd
z\0e\0r\0o\0          latin-1  byte 1 is a zero: give another --encoding
z\0e\0r\0o\0          none     byte 1 is a zero: give another --encoding
deux caf\xe9s          none     a.txt cannot be read (byte 8 is not utf-8: give another --encoding
\xef\xbb\xbfcaf\xc3     none     byte 6 is not utf-8: its byte order mark says
a                     klingon  --encoding=klingon is unknown
a                     base64   --encoding=base64 is unknown
"""


@pytest.mark.parametrize("content, encoding, text", table(ENCODINGS))
def test_files_are_decoded_or_refused(tmp_path, monkeypatch, content, encoding, text):
    """A file in UTF-8 is read as UTF-8 even if --encoding names another encoding."""
    monkeypatch.setattr(sources, "PIECE_CHARS", 5)
    (tmp_path / "a.txt").write_bytes(content.encode("latin-1"))
    decoded = lambda: read(tmp_path / "a.txt", encoding=None if encoding == "none" else encoding)
    if "byte" in text or "unknown" in text:
        rejected(decoded, text)
    else:
        assert decoded() == text + "\0"


@pytest.mark.parametrize("most", [5, 64, 10**6])
@pytest.mark.parametrize("separator, between", [("<|endoftext|>", "\n<|endoftext|>\n"), (r"\n\n", "\n\n\n"),
                                                (r"\n\n", "\r\n\r\n"), ("\n--\n", "\r\n\n--\n"), (r"\t|\t", "\t|\t")])
def test_separators_divide_a_file_into_documents(tmp_path, monkeypatch, separator, between, most):
    """It does not matter how the file is cut into parts. Empty documents and line breaks beside a separator are
    dropped."""
    monkeypatch.setattr(sources, "PIECE_CHARS", most)
    texts = [text.strip().replace("<|endoftext|>", "") for text in documents(60)] + ["x" * 99]
    (tmp_path / "a.txt").write_text(between + between.join(texts) + between, encoding="utf-8")
    assert read(tmp_path / "a.txt", separator=separator) == "".join(f"{text}\0" for text in texts)


def metaspace(folder, **special):
    """A tokenizer like Mistral's: it begins each text with a blank, and has dropout and unusual special tokens."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[UNK]", dropout=special.get("dropout")))
    bpe.normalizer = tokenizers.normalizers.Sequence([
        tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁"),
        *([tokenizers.normalizers.Lowercase()] if special.get("lower") else [])])
    bpe.decoder = tokenizers.decoders.Sequence([
        tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", 1, 0)])
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()  # for training only, as in SentencePiece
    bpe.train_from_iterator([SOURCE], tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["[UNK]", "[EOS]", "<|bos|>"], show_progress=False,
        initial_alphabet=[*map(chr, range(9, 127))]))
    bpe.pre_tokenizer = None
    bpe.save(str(folder / "tokenizer.json"))
    return f"hf:{folder}"


SOURCE = (ROOT / "model.py").read_text()[:20_000]


@pytest.mark.parametrize("kind", ["gpt2", "hf"])
def test_a_text_in_pieces_has_the_tokens_of_the_whole(small_units, tmp_path, prepare, kind):
    (tmp_path / "a.txt").write_text(SOURCE)
    how = {"tokenizer": "gpt2", "vocab": VOCAB}
    if kind == "hf":
        how = {"tokenizer": metaspace(tmp_path), "end_of_text": "[EOS]"}
    tokens = prepare(files=[tmp_path / "a.txt"], **how)
    assert len(tokens.meta["splits"]["train"]["shards"]) > 9
    pieces, ends = zip(*sources.read_file(tmp_path / "a.txt", sources.Reading()), strict=True)
    assert "".join(pieces) == SOURCE and max(map(len, pieces)) <= 300 and ends.index(True) == len(pieces) - 1
    n = len(tokens.train) - 9  # of the text before the split
    assert tokens.train[:n].tolist() == Text(**how).encode_ordinary(SOURCE)[:n]


def test_a_million_blanks_too_many_for_tiktoken_are_encoded():
    long, text = "a" + " " * 10**6 + "b", Text("gpt2", vocab=VOCAB)
    assert "".join(map(text.decode, text.encode(long))) == long


def test_tokenizers_of_other_people_work(tmp_path, prepare, capsys):
    words = "To be, or <|bos|> not to be"  # an end-of-text marker within a document is text
    kind = metaspace(tmp_path, dropout=0.9)
    prepare = functools.partial(prepare, files=[write_jsonl(tmp_path / "a.jsonl", [words] * 40)], tokenizer=kind,
                                val_fraction=None)
    rejected(prepare, "no token", "--end_of_text", "[UNK], [EOS], <|bos|>")
    rejected(lambda: prepare(end_of_text="</s>"), "no token </s> to end a text")
    rejected(lambda: prepare(tokenizer="bytes", end_of_text="</s>"), "only for hf: tokenizers")
    tokens = prepare(end_of_text="<|bos|>")
    assert tokens.meta["recipe"]["val_fraction"] == 0.0005 and tokens.bytes_per_token > 1
    (tmp_path / "tokenizer.json").unlink()
    again = Text(tokens.meta["tokenizer"], tokens.meta["table"])  # as a checkpoint knows it
    assert again.end_of_text == "<|bos|>" and again.eot_token == tokens.meta["end_of_text"]
    assert tokenizers.Tokenizer.from_str(json.dumps(again.tokenizer_json())).get_vocab_size() == again.n_vocab
    ordinary, special = again.encode_ordinary(words), again.encode(words)
    assert [*tokens.train[:], *tokens.val[:]] == [*ordinary, again.eot_token] * 40  # no dropout
    assert again.eot_token in {*special} - {*ordinary}
    written = functools.partial(again.encoding.decode, skip_special_tokens=False)
    for n in range(1, len(special)):  # decoding a token at a time after a prompt gives the same text
        again.begin(special[:n])
        assert written(special[:n]) + "".join(map(again.decode, special[n:])) == written(special)
    kind = metaspace(tmp_path, lower=True)  # another tokenizer under the same name
    rejected(lambda: prepare(end_of_text="<|bos|>"), "from other inputs")
    assert prepare(end_of_text="[EOS]", force=True).bytes_per_token is None
    assert "cannot reproduce val" in capsys.readouterr().err
    (tmp_path / "model").mkdir()
    rejected(lambda: Text(f"hf:{tmp_path}/model"), "has no tokenizer.json", "save_pretrained")


def test_decoding_goes_on_after_half_a_character():
    pieces = tokenizers.models.BPE({"<0xC3>": 0, "<0x8B>": 1, "d": 2, "\u2581d": 3}, [], byte_fallback=True)
    encoding, decoders = tokenizers.Tokenizer(pieces), tokenizers.decoders
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    encoding.decoder = decoders.Sequence(steps)
    assert "".join(map(Text("hf:", encoding.to_str()).decode, [2, 0, 1, 0, 3, 2])) == "d\xcb\ufffd dd"


# What is typed, and words of the refusal.
NO_TOKENS = """
--force                                  --files
--files a.jsonl --text_column=id         a.jsonl cannot be read (line 1: 0 is not text but int
--files a.jsonl --text_column=content    (line 1 has no column 'content' (only text, id): give --text_column
--files a.jsonl --text_column=content --shuffle=1    has no column 'content'
--files none                             none is neither a file nor a folder
--files a.csv                            1 ending in .csv (a.csv): --endings=.md reads other files as text; convert
--files empty.txt                        nothing to read
--files pipe                             pipe is neither a file nor a folder
--files a.jsonl --val_fraction=1e-9      0 would be held out
--files a.jsonl --separator=--           --separator is for
--out=. --files .                        --out . is inside --files
--out=a.csv --files a.jsonl              cannot write to a.csv
--files one.jsonl --shuffle=1            1 documents
--files long.jsonl                       a line of more than
--files a.jsonl bad.jsonl                bad.jsonl cannot be read (line 3: Expecting value
--files bad.jsonl --shuffle=1            bad.jsonl cannot be read
--files deep.jsonl                       deep.jsonl cannot be read (line 1: maximum recursion
--files array.json                       array.json cannot be read (line 1: not an object but a list
--files a.parquet                        has no column 'text' (only body, n)
--files a.parquet --text_column=n        (row 2: 3 is not text
--files bad.parquet                      bad.parquet cannot be read
--files cut.jsonl.gz                     cut.jsonl.gz cannot be read
--source=hub                             hub has no split train (only test)
--source=a.jsonl                         --files a.jsonl
"""


@pytest.fixture(scope="module")
def odd_files(tmp_path_factory):
    """A folder of files that people bring but that cannot be read."""
    folder = tmp_path_factory.mktemp("odd")
    source = write_jsonl(folder / "a.jsonl", documents(150))
    write_jsonl(folder / "one.jsonl", ["a"])
    write_files(folder, {"a.csv": "a", "bad.jsonl": '{"text": "a"}\n \n{"text": ', "bad.parquet": "not parquet",
                         "empty.txt": "", "array.json": '[{"text": "a"}]', "hub/test.jsonl": '{"text": "a"}',
                         "deep.jsonl": '{"text": ' + "[" * 100_000,
                         "long.jsonl": '{"text": "a"}\n{"text": "' + "a " * 100_000 + '"}'})  # a bomb, say
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(source.read_bytes())[:-20])
    parquet.write_table(pa.table({"body": ["a", "b"], "n": [None, 3]}), folder / "a.parquet")
    os.mkfifo(folder / "pipe")
    return folder


@pytest.mark.parametrize("typed, words", table(NO_TOKENS))
def test_inputs_that_give_no_tokens_are_refused(small_units, odd_files, tmp_path, monkeypatch, typed, words):
    """A refusal leaves nothing behind that would need --force."""
    monkeypatch.chdir(odd_files)
    monkeypatch.setattr(sources, "MOST_OF_A_LINE", 150_000)
    given = ["prepare.py", f"--out={tmp_path}/out", "--tokenizer=bytes", "--val_fraction=0.2", *typed.split()]
    monkeypatch.setattr(sys, "argv", given)
    rejected(any_tokens.main, words)
    assert not any(path.suffix in (".bin", ".json") for path in tmp_path.glob("out/*"))


def test_files_are_known_by_their_content(small_units, tmp_path, prepare):
    path = write_jsonl(tmp_path / "a.jsonl", documents(90))
    prepare = functools.partial(prepare, files=[path])
    first = prepare().meta
    before = path.stat().st_mtime_ns
    os.utime(path, ns=(0, 0))  # the time of a change does not matter
    assert prepare().meta == first
    path.write_bytes(path.read_bytes().replace(b"words", b"verbs"))
    os.utime(path, ns=(before, before))
    rejected(prepare, "from other inputs", "--force")
    assert prepare(force=True).meta["inputs"] != first["inputs"]
    for other in {"val_fraction": 0.3}, {"shuffle": 2357}, {"encoding": "latin-1"}:
        rejected(lambda other=other: prepare(**other), "from other inputs")
    edit_meta(tmp_path / "out", inputs=None)  # another program wrote it
    rejected(prepare, "from other inputs")


@pytest.mark.parametrize("shuffle", [None, 2357])
def test_a_file_that_changes_while_it_is_read_is_refused(small_units, tmp_path, prepare, monkeypatch, shuffle):
    path = write_jsonl(tmp_path / "a.jsonl", documents(40))
    write_files(tmp_path / "out", {"mine.txt": "not this program's"})
    read = sources.read_file

    def edited(path, reading):
        yield from itertools.islice(read(path, reading), 9)
        path.write_bytes(path.read_bytes().replace(b"words", b"verbs"))

    with monkeypatch.context() as patch:
        patch.setattr(sources, "read_file", edited)
        rejected(lambda: prepare(files=[path], shuffle=shuffle), "a.jsonl changed while it was read")
    assert {*os.listdir(tmp_path / "out")} == {".lock", "mine.txt"}
    write_jsonl(path, documents(40))
    splits = prepare(files=[path], shuffle=shuffle).meta["splits"]  # the refusal left nothing behind
    assert splits["train"]["documents"] + splits["val"]["documents"] >= 40


def test_many_machines_need_a_package(monkeypatch, tmp_path):
    """The rest is in test_data_cluster.py."""
    monkeypatch.setitem(sys.modules, "datatrove.utils.logging", None)
    rejected(lambda: cluster.prepare(tmp_path, files=[tmp_path]), "datatrove is missing", "--group cluster")


def test_without_a_network_the_refusal_names_the_way_out(small_units, tmp_path, prepare, monkeypatch):
    unreachable = mock.Mock(side_effect=ConnectionError("no route to host\nand a long story"))
    monkeypatch.setattr("datasets.load_dataset", unreachable)
    monkeypatch.setattr("tiktoken.load.read_file", unreachable)
    for shuffle in (None, 2357):
        rejected(lambda seed=shuffle: prepare(source="Skylion007/openwebtext", shuffle=seed),
                 "Skylion007/openwebtext", "no route to host", "--files")
    rejected(lambda: tokenizer.tiktoken_encoding("gpt2"), "tiktoken:gpt2", "no route to host", "--vocab")
    rejected(lambda: tokenizer.tiktoken_encoding("gpt2", tmp_path), "No such file", "vocab.bpe")
    write_files(tmp_path, {"vocab.bpe": "not it", "encoder.json": "{}"})
    rejected(lambda: tokenizer.tiktoken_encoding("gpt2", tmp_path), f"cannot be read from --vocab {tmp_path}")


def test_openwebtext_has_the_tokens_of_nanogpt(tmp_path, monkeypatch):
    """Runs the script as a user without a network does, and finds nanoGPT's tokens with GPT-2's well-known ids."""
    source, texts = tmp_path / "docs.jsonl", ["Hello world", *documents(120)]
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    given = ["--files", write_jsonl(source, texts), "--vocab", VOCAB, "--out", tmp_path / "out", "--val_fraction=0.005"]
    assert "120 documents to train on" in succeed(given, program="data/openwebtext/prepare.py").out
    tokens, text = Tokens(tmp_path / "out", vocab_size=50304), Text("gpt2", vocab=VOCAB)
    assert tokens.vocab_size == 50257
    assert ",15496,995,50256," in "," + ",".join(map(str, tokens.train[:])) + ","
    assert tokens.meta["recipe"]["val_fraction"] == 0.005  # as typed, not as in the recipe
    parts = datasets.Dataset.from_dict({"text": texts}).train_test_split(test_size=0.005, seed=2357, shuffle=True)
    for made, part in (tokens.train, parts["train"]), (tokens.val, parts["test"]):
        assert made[:].tolist() == [i for document in part["text"] for i in [*text.encode_ordinary(document), 50256]]
    assert tokens.bytes_per_token * len(tokens.val) == len(parts["test"]["text"][0].encode())


# ---- mixtures

def make_mixture(parts, *shares):
    return mixture.MixtureData(list(zip(parts, map(Fraction, shares), strict=True)), 16, 16 * 24, 7)


@pytest.fixture
def parts(tmp_path):
    """Datasets of 62 and 56 windows, in uint16 and uint32."""
    return [Tokens(write_folder(tmp_path / "a", 1000)), Tokens(write_folder(tmp_path / "b", 900, vocab_size=70_000))]


def windows_one_by_one(sizes, counts):
    """Yields the (dataset, window) of a mixture, straight from the definition."""
    taken = [0, 0]
    for cycle in itertools.count():
        for k in np.random.default_rng([7, cycle, sum(counts)]).permutation(np.repeat([0, 1], counts)):
            epoch, i = divmod(taken[k], sizes[k])
            yield k, np.random.default_rng([7, epoch]).permutation(sizes[k])[i]
            taken[k] += 1


@pytest.mark.parametrize("shares, counts", [(["0.8", "0.2"], [4, 1]), (["1/3", "2/3"], [1, 2])])
def test_a_mixture_takes_its_share_from_each_dataset(parts, shares, counts):
    """Over several epochs the order is that of the definition, whichever step is read first and however many processes
    share it."""
    rows = []
    for k, window in itertools.islice(windows_one_by_one([62, 56], counts), 24 * 21):
        rows.append(parts[k].train[window * 16:window * 16 + 17].tolist())
    data = make_mixture(parts, *shares)
    for step in (20, 0, 7):
        batches = [batch for rank in range(3) for batch in data.micro_batches(step, rank, 3, 5)]
        read = torch.cat([torch.cat([x, y[:, -1:]], 1) for x, y, _ in batches])
        assert read.tolist() == rows[24 * step:24 * (step + 1)]
        assert [weight for _, _, weight in batches] == [5 / 8, 3 / 8] * 3


def test_a_mixture_is_known_by_its_parts(parts, tmp_path):
    """The content, order and shares of its parts count. If a file of any part changes, a line says so."""
    a, b = parts
    data, again = (make_mixture(parts, "1/4", "3/4") for _ in range(2))
    assert again.identity == data.identity and again.file_times == data.file_times
    others = [make_mixture((a, b), "1/2", "1/2"), make_mixture((a, a), "1/4", "3/4"),
              make_mixture((b, a), "3/4", "1/4"), token_data(tmp_path / "a")]
    assert len({other.identity["train"] for other in (data, *others)}) == 5
    derived = data.derived(SimpleNamespace(max_iters=31, micro_batch_size=5), 2)  # 744 windows
    assert derived == {
        "windows_per_step": 24, "accumulation": 3, "train_tokens": 1900, "val_tokens": 200,
        "epochs": 744 / 74,  # b is used up first: its 56 windows are 3/4 of 74.67, so 74
        "mixture": [
            {"dataset": "a", "share": .25, "train_tokens": 1000, "train_sha256": a.sha256["train"], "epochs": 186 / 62},
            {"dataset": "b", "share": .75, "train_tokens": 900, "train_sha256": b.sha256["train"], "epochs": 558 / 56}]}
    data.verify(), data.check_unchanged()
    content = (tmp_path / "b/train.bin").read_bytes()
    (tmp_path / "b/train.bin").write_bytes(content[4:] + content[:4])
    assert make_mixture(parts, "1/4", "3/4").file_times != data.file_times  # a resumed run reads all files
    rejected(data.check_unchanged, f"{tmp_path}/b/train.bin changed during the run")
    rejected(data.verify, f"{tmp_path}/b/train.bin is not the file")


SHARES = """
a:0.8,b:0.1          adding up to 1 (these add up to 0.9)
a,b                  a is not NAME:SHARE
a:0.5,b:x            b:x is not NAME:SHARE
a:0.5,./a:0.5        a dataset is named twice
a:1.2,b:-0.2         a share above 0
a:1,b:0              a share above 0
:0.5,b:0.5           give each dataset a share
a:0.12345,b:0.87655  at most four digits
"""


@pytest.mark.parametrize("text, words", table(SHARES))
def test_shares_that_do_not_add_up_are_refused(text, words):
    rejected(lambda: mixture.parse_mixture(text), f"dataset={text}: ", words)


def test_shares_are_exact():
    assert mixture.parse_mixture("a:0.8, b:1/5") == [("a", Fraction(4, 5)), ("b", Fraction(1, 5))]


# ---- docs/your-data.md

def test_the_commands_of_your_data_print_what_the_page_shows(tmp_path, monkeypatch):
    """Runs the commands as printed, except those that use the hub. Programs run in this process."""
    page = (ROOT / "docs/your-data.md").read_text()
    script = re.search(r'```python\n("""(\S+): .*?)```', page, re.DOTALL)
    write_files(tmp_path, {script[2]: script[1]})
    for name in "README.md", "config":
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    commands = re.findall(r"(?m)^ {4}\$ (.*\n(?: {10}.*\n)*)((?: {4}(?!\$).*\n)*)", page)
    for command, printed in commands:
        words = shlex.split(command.replace("\\\n", ""))
        if not words[1].endswith(".py"):
            subprocess.run(["bash", "-c", command], check=True)
            continue
        own = Path(words[1]).resolve()
        done = succeed(words[2:], program=own if own.exists() else words[1])
        said = (done.out + done.err).replace("\r", "\n").split("\n")
        assert {line[4:] for line in printed.splitlines()} <= {"...", *said}, (command, said)
    assert len(commands) > 10
