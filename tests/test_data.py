"""data/: the order of windows, the checks of a prepared folder, and each prepare.py, from small inputs, offline."""

import contextlib
import functools
import gzip
import hashlib
import itertools
import json
import lzma
import math
import os
import re
import shutil
import signal
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import datasets
import numpy as np
import pyarrow as pa
import pytest
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
    write_folder,
    write_jsonl,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from data import loader, mixture, prepared, tokenizer, writer
from data.adopt import adopt
from data.loader import TokenData, eval_windows, get_batch, n_windows, step_windows
from data.prepared import DataError, Tokens
from data.pystdlib import prepare as pystdlib
from data.shakespeare_char import prepare as shakespeare
from data.tokenizer import Text
from data.tokens import cluster
from data.tokens import prepare as any_tokens

quick = settings(deadline=None, max_examples=60, database=None)




@pytest.fixture(scope="module")
def folder_1000(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("data") / "d")  # 1,000 tokens to train on, 200 for validation




def edit_meta(folder, **changes):
    path = folder / "meta.json"
    meta = {**json.loads(path.read_text()), **changes}
    meta.pop("crc32", None)
    path.write_text(json.dumps(meta))


def write_files(root, files):
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content, encoding="utf-8")




# ---- the order of windows

@quick
@given(n=st.integers(1, 200), per_step=st.integers(1, 40), seed=st.integers(0, 2**31),
       steps=st.lists(st.integers(0, 12), min_size=1))
def test_the_order_is_the_one_that_past_runs_saw(n, per_step, seed, steps):
    """Permutations end to end, whatever is asked first: another order would resume every checkpoint in the wrong
    place."""
    assert step_windows(10, 10, 1337, 0).tolist() == [7, 6, 3, 5, 2, 8, 4, 9, 0, 1]
    late = np.random.default_rng([1337, 4 * 10**8]).permutation(10)
    assert step_windows(10, 4, 1337, 10**9 + 1).tolist() == late[4:8].tolist()
    epochs = range((max(steps) + 1) * per_step // n + 1)
    stream = np.concatenate([np.random.default_rng([seed, epoch]).permutation(n) for epoch in epochs])
    for step in steps:
        windows = step_windows(n, per_step, seed, step)
        assert windows.dtype == np.int64
        assert windows.tolist() == stream[step * per_step:(step + 1) * per_step].tolist()


def test_more_windows_than_16_bits_count():
    assert (step_windows(70_000, 70_000, 1, 3) == np.random.default_rng([1, 3]).permutation(70_000)).all()


def test_documents_of_the_validation_split(tmp_path):
    """As meta.json lists them, or behind each separator; eight equal stretches where there are fewer, and at most
    64."""
    def starts(lengths, **meta):
        val = np.concatenate([np.append(np.full(n - 1, 97), 0) for n in lengths])
        write_folder(tmp_path, val=val, **{"tokenizer": "bytes", **meta})
        return loader.document_starts(Tokens(tmp_path)).tolist()

    ends = np.cumsum(lengths := list(range(3, 13))).tolist()
    assert starts(lengths) == [0, *ends[:-1]]
    assert starts([10] * 7) == starts([10] * 7, tokenizer="char", table="\0a") == [int(70 * i / 8) for i in range(8)]
    edges = (0, 9, 12, 20, 31, 32, 33, 40, 50)
    listed = [{"name": str(a), "start": a, "tokens": b - a} for a, b in zip(edges, edges[1:], strict=False)]
    assert starts([50], documents={"val": listed}) == [d["start"] for d in listed]
    assert starts([5] * 64) == list(range(0, 320, 5)) and starts([5] * 65) == list(range(0, 325, 10))


@quick
@given(n_tokens=st.integers(2, 5000), block=st.integers(1, 600), limit=st.integers(0, 6000))
def test_an_evaluation_predicts_each_token_once_or_the_stated_number(n_tokens, block, limit):
    windows = eval_windows(n_tokens, block, limit)
    starts, lengths = windows[:, 0], windows[:, 1]
    assert lengths.sum() == min(limit or n_tokens, n_tokens - 1) and (starts + lengths <= n_tokens - 1).all()
    assert (lengths[:-1] == block).all() and 1 <= lengths[-1] <= block
    assert (starts % block == 0).all() and (np.diff(starts) >= block).all()
    if len(starts) > 2:  # evenly: gaps differ by one window at most
        assert np.ptp(np.diff(starts)) <= block
    assert eval_windows(11, 4).tolist() == [[0, 4], [4, 4], [8, 2]]
    assert eval_windows(1001, 10, 30).tolist() == [[0, 10], [330, 10], [660, 10]]


@quick
@given(n_tokens=st.integers(2, 400), block=st.integers(1, 50), seed=st.integers(0, 100))
def test_batch_holds_the_windows_and_their_successors(n_tokens, block, seed):
    tokens = np.random.default_rng(seed).integers(60_000, size=n_tokens).astype(np.uint16)
    n = n_windows(n_tokens, block)
    assert n * block <= n_tokens - 1 < (n + 1) * block
    if n == 0:
        return
    windows = step_windows(n, 3, seed, seed)
    x, y = get_batch(tokens, windows * block, block)
    assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape == (3, block)
    for row, window in enumerate(windows):
        start = window * block
        assert x[row].tolist() == tokens[start : start + block].tolist()
        assert y[row].tolist() == tokens[start + 1 : start + 1 + block].tolist()


# ---- as training reads it

def token_data(folder, batch_tokens=192, **how):
    return TokenData(Tokens(folder, block_size=16), 16, batch_tokens, seed=7, **how)


@pytest.mark.parametrize("processes, micro, step", [(1, 5, 0), (2, 4, 3), (3, 9, 17), (4, 1, 500), (6, 2, 61)])
def test_a_step_is_the_same_however_it_is_shared_and_cut(folder_1000, processes, micro, step):
    data = token_data(folder_1000)
    order = step_windows(n_windows(1000, 16), 12, 7, step) * 16
    x_of_step, y_of_step = get_batch(data.tokens.train, order, 16)
    parts = [list(data.micro_batches(step, rank, processes, micro)) for rank in range(processes)]
    assert torch.equal(torch.cat([x for part in parts for x, _, _ in part]), x_of_step)
    assert torch.equal(torch.cat([y for part in parts for _, y, _ in part]), y_of_step)
    for rank, part in enumerate(parts):
        assert [len(x) for x, _, _ in part[:-1]] == [micro] * (len(part) - 1)
        assert [weight for _, _, weight in part] == [len(x) / (12 / processes) for x, _, _ in part]
        assert data.starts(step, rank, processes).tolist() == order[data.rank_slice(rank, processes)].tolist()


@pytest.mark.parametrize("processes", [1, 2, 5])
@pytest.mark.parametrize("batch, block, limit", [(1, 60, 0), (4, 7, 0), (3, 7, 100), (9, 1, 25), (2, 199, 0)])
def test_eval_batches_hold_each_window_once(folder_1000, processes, batch, block, limit):
    data, windows, rows = token_data(folder_1000), eval_windows(200, block, limit), []
    for rank in range(processes):
        batches = list(data.eval_batches(windows, rank, processes, batch))
        assert all(x.dtype == torch.int64 and x.shape == y.shape and len(x) <= batch for x, y in batches)
        assert sum(len(x) < batch for x, _ in batches) <= 2  # the rest of the whole windows, and a shorter one
        rows += [(*x.tolist(), y[-1].item()) for xs, ys in batches for x, y in zip(xs, ys, strict=True)]
    assert sorted(rows) == sorted(tuple(data.tokens.val[s : s + n + 1].tolist()) for s, n in windows)


# ---- a prepared folder, opened

def test_open_a_folder(tmp_path, monkeypatch):
    folder = write_folder(tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    assert prepared.find_dataset(folder.name) == Path(folder.name) != prepared.find_dataset("pystdlib")
    tokens = Tokens(folder, vocab_size=256, block_size=199)
    assert (len(tokens.train), len(tokens.val), tokens.vocab_size) == (1000, 200, 256)
    assert isinstance(tokens.train, np.memmap) and tokens.train.dtype == np.uint16
    with pytest.raises(ValueError):
        tokens.train[0] = 1  # read-only
    assert tokens.sha256["val"] == hashlib.sha256((folder / "val.bin").read_bytes()).hexdigest()
    tokens.verify()
    assert tokens.bytes_per_token is None
    splits = tokens.meta["splits"]
    splits["train"]["bytes"], splits["val"]["bytes"] = 4500, 860
    edit_meta(folder, splits=splits)
    assert Tokens(folder).bytes_per_token == {"train": 4.5, "val": 4.3}
    null = {"sha256": None, "max_token": None, "bytes": None}  # these need not be there
    edit_meta(folder, splits={name: {**split, **null} for name, split in splits.items()},
              bytes_per_token=None, xz9_bits_per_byte=None, tokenizer=None, table=None)
    assert Tokens(folder).bytes_per_token is None
    edit_meta(folder, bytes_per_token=2.5, xz9_bits_per_byte=1, tokenizer="bytes", table="ab")
    assert Tokens(folder).bytes_per_token == 2.5


def nanogpt(folder, train=(5, 50_256, 7), val=(1, 2), dtype=np.uint16):
    """A folder as nanoGPT's prepare.py leaves it, with a meta.pkl that must not be opened."""
    folder.mkdir()
    for split, tokens in (("train", train), ("val", val)):
        np.array(tokens, dtype).tofile(folder / f"{split}.bin")
    (folder / "meta.pkl").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    return folder


def opened(d, name, change):
    """The folder with one file changed, opened."""
    path = d / "set" / name
    path.write_bytes(change(path.read_bytes()))
    return Tokens(d / "set")


def adopted(d, *how, val=(1, 2, 3), **settings):
    folder = nanogpt(d / "owt", val=() if val is None else val)
    if val is None:
        (folder / "val.bin").unlink()
    try:
        return adopt(folder, *how, **settings)
    finally:
        assert not (folder / "meta.json").exists()


def deep(n):
    return b'{"x":' + b"[" * n + b"]" * n + b"}"


REFUSED = [  # what is done in a folder with `set`, of 1,000 and 120 tokens; words of the line
    (lambda d: step_windows(0, 4, 0, 0), "0 windows", "prepare more data"),
    (lambda d: eval_windows(1, 4), "1 tokens"),
    (lambda d: token_data(d / "set", 100), "batch_tokens 100", "block_size 16", "nearest is 96"),
    (lambda d: token_data(d / "set", 3), "nearest is 16"),
    (lambda d: token_data(d / "set", 16 * (2**24 + 1)), "16,777,217 windows", "at most 16,777,216"),
    (lambda d: token_data(d / "set").rank_slice(0, 5), "12 windows", "5 processes", "batch_tokens 240"),
    (lambda d: Tokens(d / "nothing"), "no dataset folder", "nothing", "pystdlib"),
    (lambda d: Tokens(d / "set", block_size=256), "block_size 256", "val.bin (120 tokens", "smaller"),
    (lambda d: Tokens(d / "set", block_size=120), "block_size 120"),  # a window needs block_size + 1
    (lambda d: Tokens(d / "set", block_size=1000), "train.bin (1,000 tokens"),
    (lambda d: Tokens(d / "set", vocab_size=200), "256", "vocab_size 200", "at least 256"),
    (lambda d: Tokens(d), "no meta.json", "{d}/prepare.py"),
    (lambda d: write_folder(d, val=[]), "val.bin is empty", "more data"),
    (lambda d: opened(d, "train.bin", lambda old: old[:-1]), "truncated", "1,999 bytes", "2,000"),
    (lambda d: opened(d, "train.bin", lambda old: old + b"xx"), "longer than recorded", "2,002"),
    *((lambda d, new=new: opened(d, "meta.json", lambda _: new), "meta.json is damaged", "prepare again")
      for new in (b"{", b"[]", deep(100_000))),
    (lambda d: opened(d, "meta.json", lambda old: old.replace(b"uint16", b"int8")), "dtype is missing, or of"),
    (lambda d: opened(d, "val.bin", lambda old: old[2:] + old[:2]), "val.bin is not the file", "sha256 differs"),
    (lambda d: writer.token_dtype(2**32 + 1), "4294967297"),
    (lambda d: prepared_twice(d), "another process is preparing", "{d}"),
    (lambda d: adopt(d / "nothing", 50_257), "no folder", "nothing"),
    (lambda d: adopted(d, 50_256), "train.bin holds token id 50256 as uint16", "vocabulary of 50,256"),
    (lambda d: adopted(d, 50_257, "uint32"), "train.bin is 6 bytes", "uint32", "--dtype"),
    (lambda d: adopted(d, 0), "vocabulary of 0"),
    (lambda d: adopted(d, 50_257, bytes_per_token=math.nan), "--bytes_per_token=nan"),
    (lambda d: adopted(d, 50_257, val=()), "val.bin is empty"),
    (lambda d: adopted(d, 50_257, val=None), "val.bin is missing", "train.bin and val.bin"),
    (lambda d: shakespeare.prepare(d, d / "latin.txt"), "latin.txt", "not Tiny Shakespeare", "sha"),
    (lambda d: shakespeare.prepare(d, d / "no.txt"), "no.txt", "No such file"),
    (lambda d: shakespeare.prepare(d, any_text=True), "--any_text needs --file"),
    (lambda d: shakespeare.prepare(d, d / "latin.txt", any_text=True), "not UTF-8"),
    (lambda d: shakespeare.download("http://127.0.0.1:9/input.txt"), "cannot download", "--file"),
    *((lambda d, text=text: mixture.parse_mixture(text), f"dataset={text}: ") for text in (
        "a:0.8,b:0.1", "a,b", "a:0.5,b:x", "a:1.2,b:-0.2", ":0.5,b:0.5", "a:0.12345,b:0.87655"))]


def prepared_twice(folder):
    with writer.preparing(folder), writer.preparing(folder):
        pass


@pytest.mark.parametrize("call, words", [(call, words) for call, *words in REFUSED])
def test_mistakes_get_one_line(tmp_path, call, words):
    write_folder(tmp_path / "set", val=120)
    (tmp_path / "prepare.py").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9" * 10)
    rejected(lambda: call(tmp_path), *(word.replace("{d}", str(tmp_path)) for word in words))
    assert not (tmp_path / "meta.json").exists() and not (tmp_path / "nothing").exists()


def test_a_large_folder_is_read_whole_when_it_is_verified(tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "FULL_CHECK_TOKENS", 100)
    path = write_folder(tmp_path) / "val.bin"
    content = path.read_bytes()
    path.write_bytes(content[2:] + content[:2])
    tokens = Tokens(tmp_path)
    rejected(tokens.verify, "val.bin is not the file")
    path.unlink()
    rejected(lambda: Tokens(tmp_path), "val.bin is missing")


WRONG = {  # of meta.json; of its train split
    "vocab_size": ["256", True, None, 256.0, 0, -1, 2**70], "dtype": [None, 16, ["uint16"], {}],
    "bytes_per_token": ["1", True, -1, 0, [1], math.nan, math.inf, 10**400],
    "xz9_bits_per_byte": ["1.5", False, -1.5, 0, {}, math.nan, math.inf, 10**400],
    "tokenizer": [5, ["x"], "", "klingon", "char"], "table": [5, ["x"]], "end_of_text": ["0", -1, 256, 1.0],
    "splits": [None, [], {"train": {"tokens": 1000}}, {"train": 5, "val": 5}],
    "documents": [5, [1], {"val": 5}, {"val": [5]}, {"val": [{}]}, *(
        {"val": [{"name": name, "start": start, "tokens": n} for name, start, n in documents]} for documents in (
            [("a", "0", 9)], [("a", 0, "9")], [(5, 0, 9)], [("a", -1, 9)], [("a", 0, 0)], [("a", 0, 201)],
            [("a", 199, 2)], [("a", 9, 9), ("b", 0, 9)], [("a", 0, 9), ("b", 8, 9)]))],
}
WRONG_IN_SPLIT = {"tokens": ["1000", True, None, -1, 1000.0, 10**400], "bytes": ["1000", True, -1, 1000.0, 10**400],
                  "sha256": [5, ["x"]], "max_token": ["255", True, 255.0, []],
                  "shards": [5, [], [5], [{"file": "train.bin"}], [{"file": 5, "tokens": 1000}],
                             [{"file": "train.bin", "tokens": 999}], [{"file": "train.bin", "tokens": "1000"}],
                             [{"file": "train.bin", "tokens": 500}] * 2, [{"file": "../train.bin", "tokens": 1000}],
                             [{"file": "/train.bin", "tokens": 1000}],
                             [{"file": "train.bin", "tokens": 1000, "sha256": "0" * 64}]]}


@pytest.mark.parametrize("field", [*WRONG, *WRONG_IN_SPLIT])
def test_any_field_of_the_wrong_kind_is_refused_at_once(tmp_path, field):
    path = write_folder(tmp_path) / "meta.json"
    text = path.read_text()
    for wrong in WRONG.get(field) or WRONG_IN_SPLIT[field]:
        meta = json.loads(text)
        del meta["crc32"]
        (meta if field in WRONG else meta["splits"]["train"])[field] = wrong
        path.write_text(json.dumps(meta))
        rejected(lambda: Tokens(tmp_path), "meta.json is damaged", "prepare again")


def test_any_field_that_was_changed_is_refused(tmp_path):
    path = write_folder(tmp_path, bytes_per_token=1.0) / "meta.json"
    path.write_text(path.read_text().replace('"bytes_per_token": 1', '"bytes_per_token": 3'))
    rejected(lambda: Tokens(tmp_path), "meta.json is damaged or edited", "or remove crc32")
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "crc32"}))
    assert Tokens(tmp_path).bytes_per_token == 3


def test_a_description_written_by_hand_needs_little(tmp_path):
    """No tokenizer, which the last evaluation can do without, and no hashes: other tokens are still other data."""
    write_folder(tmp_path)
    files = {split: {"tokens": n} for split, n in (("train", 1000), ("val", 200))}
    (tmp_path / "meta.json").write_text(json.dumps({"vocab_size": 256, "dtype": "uint16", "splits": files}))
    tokens = Tokens(tmp_path)
    assert len(loader.document_starts(tokens)) == 8
    assert tokens.sha256["val"] == hashlib.sha256((tmp_path / "val.bin").read_bytes()).hexdigest()
    half = (tmp_path / "val.bin").read_bytes()
    for name, part in (("a.bin", half[:200]), ("b.bin", half[200:])):
        (tmp_path / name).write_bytes(part)
    shards = [{"file": name, "tokens": 100} for name in ("a.bin", "b.bin")]
    edit_meta(tmp_path, splits={**files, "val": {"tokens": 200, "shards": shards}})
    assert Tokens(tmp_path).val[:].tolist() == tokens.val.tolist()
    edit_meta(tmp_path, splits={**files, "val": {"tokens": 200, "shards": shards[::-1]}})
    assert Tokens(tmp_path).sha256["val"] != Tokens(tmp_path).sha256["train"]


def test_ids_outside_the_vocabulary(tmp_path, monkeypatch):
    write_folder(tmp_path, train=50_000, vocab_size=100)
    tokens = np.memmap(tmp_path / "train.bin", np.uint16, "r+")
    tokens[33_333] = 100  # one is enough, wherever it is
    rejected(lambda: Tokens(tmp_path), "train.bin holds token id 100", "vocabulary of 100")
    for name, value in (("FULL_CHECK_TOKENS", 10_000), ("SPOT_CHECKS", 5), ("SPOT_TOKENS", 10)):
        monkeypatch.setattr(prepared, name, value)  # of a longer split: slices, the first and last tokens among them
    Tokens(tmp_path)
    for place in (0, 49_999, 25_000):
        tokens[place] = 100
        rejected(lambda: Tokens(tmp_path), "token id 100")
        tokens[place] = 0
    splits = json.loads((tmp_path / "meta.json").read_text())["splits"]
    splits["train"]["max_token"] = 100  # recorded by prepare.py, which read them all
    edit_meta(tmp_path, splits=splits)
    rejected(lambda: Tokens(tmp_path), "token id 100")


# ---- writing

def test_dtype_follows_the_vocabulary(tmp_path):
    assert writer.token_dtype(256) == writer.token_dtype(65_536) == "uint16"
    assert writer.token_dtype(65_537) == writer.token_dtype(2**32) == "uint32"
    tokens = Tokens(write_folder(tmp_path, val=[65_536, 5, 70_000, 1], vocab_size=70_001))
    assert tokens.val.dtype == np.uint32 and tokens.val.tolist() == [65_536, 5, 70_000, 1]
    assert get_batch(tokens.val, [0], 3)[1].tolist() == [[5, 70_000, 1]]


@pytest.mark.parametrize("bad", [-1, 256, 65_536 + 7])  # the last one would wrap to 7
def test_ids_are_checked_before_the_cast(tmp_path, bad):
    rejected(lambda: writer.write_split(tmp_path / "val.bin", [[1, 2], [3, bad]], 256), f"token id {bad}", "256")
    assert list(tmp_path.iterdir()) == []
    chunks = [np.arange(5)[::2], [], np.array([9], np.uint8), range(2)]
    entry = writer.write_split(tmp_path / "val.bin", chunks, 10)
    data = (tmp_path / "val.bin").read_bytes()
    assert np.frombuffer(data, np.uint16).tolist() == [0, 2, 4, 9, 0, 1]
    assert entry == {"tokens": 6, "sha256": hashlib.sha256(data).hexdigest(), "max_token": 9}


# ---- pystdlib

@pytest.fixture
def library(tmp_path):
    """A folder of 60 small source files like a standard library, with what is to be skipped."""
    files = {f"package{i % 7}/module{i}.py": f"# module {i}\n" + f"x{i} = {i}\n" * 40 for i in range(60)}
    write_files(tmp_path / "lib", {
        **files, "copy.py": files["package0/module0.py"],  # comes first, so it is the one kept
        "empty.py": "", "binary.py": "a\0b", "notes.txt": "not source", "site-packages/a.py": "a = 1",
        "dist-packages/a.py": "a", "__pycache__/a.py": "a"})
    return tmp_path / "lib"


def text_of(tokens):
    return tokens[:].astype(np.uint8).tobytes()


def test_pystdlib_splits_by_file(library, tmp_path):
    tokens, new = pystdlib.prepare(tmp_path / "out", stdlib=library, val_fraction=0.1)
    assert new and tokens.vocab_size == 256 and tokens.bytes_per_token == 1.0
    train, val = (text_of(part).removesuffix(b"\0").split(b"\0") for part in (tokens.train, tokens.val))
    names = {path.read_bytes(): path.relative_to(library).as_posix() for path in library.glob("package*/*.py")}
    assert set(train) | set(val) == set(names) and len(train) + len(val) == 60  # each content once, nothing else
    names[(library / "copy.py").read_bytes()] = "copy.py"
    shuffled = sorted(names.values(), key=lambda name: hashlib.sha256(name.encode()).digest())
    assert [names[content] for content in val + train] == shuffled  # so small that no file is left out for its size
    assert 0.1 <= len(tokens.val) / (len(tokens.train) + len(tokens.val)) < 0.12
    assert tokens.meta["recipe"]["files_skipped"] == 3 and tokens.meta["splits"]["val"]["files"] == len(val)
    # what earlier runs were trained on: if these change, no earlier checkpoint can be resumed
    assert tokens.meta["inputs"][:16] == "0b0928cd45922f7b" and tokens.sha256["val"][:16] == "b9c7363e707f0293"
    assert pystdlib.VAL_FRACTION["file"] == 0.02


def test_pystdlib_is_deterministic_and_knows_when_it_is_done(library, tmp_path):
    first, _ = pystdlib.prepare(tmp_path / "a", stdlib=library, val_fraction=0.2)
    moved = library.rename(tmp_path / "moved")
    prepare = lambda fraction=0.2, **how: pystdlib.prepare(tmp_path / "b", stdlib=moved, val_fraction=fraction, **how)
    second, _ = prepare()
    assert first.sha256 == second.sha256 and first.meta["inputs"] == second.meta["inputs"]
    stamp = (tmp_path / "b/train.bin").stat().st_mtime_ns
    assert not prepare()[1] and (tmp_path / "b/train.bin").stat().st_mtime_ns == stamp
    assert prepare(force=True)[1] and prepare(0.3)[1]  # another recipe
    (moved / "package1/module1.py").write_text("changed = 1\n")
    assert prepare(0.3)[1]
    (tmp_path / "b/val.bin").unlink()
    assert prepare(0.3)[1]  # damaged


def test_pystdlib_keeps_one_big_file_from_being_the_validation_set(library, tmp_path):
    small, _ = pystdlib.prepare(tmp_path / "a", stdlib=library, val_fraction=0.2)
    names = (f"generated{i}.py" for i in range(1000))
    first = min(names, key=lambda name: hashlib.sha256(name.encode()).digest())  # stands first in the shuffle
    (library / first).write_text("y = 0\n" * 10_000)
    tokens, _ = pystdlib.prepare(tmp_path / "b", stdlib=library, val_fraction=0.2)
    assert b"y = 0" in text_of(tokens.train) and b"y = 0" not in text_of(tokens.val)
    assert len(tokens.val) > len(small.val)


def test_pystdlib_roots_and_refusals(library, tmp_path, monkeypatch):
    """Where links lead out of a root, and what may not be read, is left out; an empty name is not this folder."""
    root, scandir = tmp_path / "kernel", os.scandir
    write_files(root, {"drivers/a.c": "int a;\n" * 30, "module.py": "root = 1\n" * 30, "image.png": "png",
                       "shut/file.py": "shut = 1\n" * 9, "../elsewhere.py": "secret = 1\n" * 9})
    (root / "again.py").symlink_to("module.py")
    (root / "out.py").symlink_to(tmp_path / "elsewhere.py")
    (root / "folder").symlink_to(tmp_path)
    prepare = lambda out="out", **how: pystdlib.prepare(
        tmp_path / out, **{"stdlib": library, "val_fraction": 0.1, "roots": [root], **how})

    def close(name):
        def closed(path):
            if Path(path).name == name:
                raise PermissionError(13, "Permission denied", os.fspath(path))
            return scandir(path)
        monkeypatch.setattr(os, "scandir", closed)

    close("shut")
    both, _ = prepare()
    text, recipe = text_of(both.train) + text_of(both.val), both.meta["recipe"]
    assert b"int a;" in text and b"root = 1" in text and not re.search(b"png|shut|secret", text)
    assert (recipe["roots"], recipe["files"]) == ([str(root)], 62)
    assert recipe["files_skipped"] == 3 + 4  # of the library; three links and a folder
    only_c, new = prepare(extensions=["c"])
    assert new and only_c.meta["recipe"]["files"] == 61
    close("kernel")
    for how, *words in (({}, "--roots", "Permission denied"), ({"roots": [""]}, "is not a folder"),
                        ({"roots": ["/no/where"]}, "/no/where", "not a folder"),
                        ({"val_fraction": 1.5}, "--val_fraction 1.5"),
                        ({"val_fraction": 1e-6, "roots": []}, "1e-06", "another fraction"),
                        ({"stdlib": tmp_path / "nothing", "roots": []}, "no source files")):
        rejected(lambda how=how: prepare("x", **how), *words)
    rejected(lambda: Tokens(tmp_path / "x"), "not prepared")


def test_pystdlib_as_tokens_learned_from_its_training_files(library, tmp_path):
    prepare = lambda out, n=300: pystdlib.prepare(tmp_path / out, stdlib=library, val_fraction=0.2,
                                                  tokenizer=f"bpe:{n}")
    tokens, new = prepare("a")
    text = Text(tokens.meta["tokenizer"], tokens.meta["table"])  # as a checkpoint knows it: no file is read
    assert new and not prepare("a")[1] and tokens.vocab_size == text.n_vocab == 300
    whole, _ = pystdlib.prepare(tmp_path / "bytes", stdlib=library, val_fraction=0.2)
    for tokens_of_split, true in ((tokens.train, whole.train), (tokens.val, whole.val)):
        text.begin()
        written = "".join(text.decode(int(token)) for token in tokens_of_split[:])
        assert written.encode() == text_of(true).replace(b"\0", b"<|endoftext|>")
        assert len(tokens_of_split) < 0.8 * len(true)
    held_out = text_of(whole.val).decode().split("\0")[:-1]
    for path in library.rglob("*.py"):
        if path.read_text() in held_out:  # as long as before: the split stays
            path.write_text(path.read_text().replace(" = ", " @ "))
    other, _ = prepare("b")
    assert other.meta["table"] == tokens.meta["table"] and other.sha256["val"] != tokens.sha256["val"]
    for n in (257, "many", 10**6):
        rejected(lambda n=n: prepare("c", n), f"bpe:{n}", "258 .. 65536")
    rejected(lambda: Text("bpe:300"), "bpe:300 is learned from text", "only data/pystdlib/prepare.py")


def test_another_tokenizer_under_the_same_name_prepares_anew(library, tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 99)
    of_shakespeare = lambda: shakespeare.prepare(tmp_path / "s", tmp_path / "text.txt", any_text=True,
                                                 tokenizer=f"hf:{tmp_path}")
    of_library = lambda: pystdlib.prepare(tmp_path / "p", stdlib=library, val_fraction=0.2, tokenizer=f"hf:{tmp_path}")
    for prepare in of_shakespeare, of_library:
        sizes = []
        for texts in ["x"], ["that is the question " * 9]:
            byte_level_bpe(tmp_path, texts)
            tokens, new = prepare()
            sizes.append(tokens.vocab_size)
            assert new and not prepare()[1]
        assert sizes[0] < sizes[1]


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """The folder of a library of modules, packages, one of them as large as may be, and folders too large to be one;
    and its {document: [file, ...]}"""
    documents = {f"package{i}/": [f"package{i}/{name}" for name in ("a.py", "b.py", "inner/c.py")] for i in range(12)}
    documents |= {f"large/sub{i}/": [f"large/sub{i}/{name}.py" for name in "abc"] for i in range(3)}
    documents |= {name: [name] for i in range(40) for name in (f"large/test_{i}.py", f"module{i}.py")}
    documents |= {"most/": ["most/a.py", "most/b.py"], "over/a.py": ["over/a.py"], "over/b.py": ["over/b.py"]}
    sizes = {"most/a.py": 1499, "most/b.py": 1499, "over/a.py": 1499, "over/b.py": 1500}  # a byte more ends each
    for i, file in enumerate(file for members in documents.values() for file in members):
        write_files(tmp_path / "shelf", {file: f"{i:4}".ljust(sizes.get(file, 254 + 7 * i % 600), "y")})
    monkeypatch.setattr(pystdlib, "SHELF_BYTES", 3000)
    monkeypatch.setattr(pystdlib, "LONG", 700)
    return tmp_path / "shelf", documents


def test_packages_are_whole_documents_in_one_split(shelf, tmp_path):
    root, documents = shelf
    content = {name: b"".join((root / file).read_bytes() + b"\0" for file in files)
               for name, files in documents.items()}
    tokens, _ = pystdlib.prepare(tmp_path / "out", stdlib=root, documents="package", val_fraction=0.3)
    train, val = text_of(tokens.train), text_of(tokens.val)
    held, start = tokens.meta["documents"]["val"], 0
    for d in held:
        whole = content.pop(d["name"])
        assert d == {"name": d["name"], "start": start, "tokens": len(whole)} and len(whole) > 700
        assert val[start:start + len(whole)] == whole
        start += len(whole)
    assert start == len(val) and 0.3 <= start / (start + len(train)) < 0.4
    assert all(whole in train for whole in content.values()) and len(train) == sum(map(len, content.values()))
    order = [d["name"] for d in held]
    assert order == sorted(order, key=lambda name: hashlib.sha256(name.encode()).digest())
    sizes, said = sorted(d["tokens"] for d in held), tokens.meta["splits"]["val"]["documents"]
    assert (said["count"], said["shortest"], said["longest"]) == (len(sizes), sizes[0], sizes[-1])
    assert said["longer_than_700"] == len(sizes) and said["median"] in sizes


def test_packages_are_another_recipe_than_files(shelf, tmp_path, capsys):
    small, packages = tmp_path / "small", {"val_fraction": 0.3, "documents": "package"}
    a, _ = pystdlib.prepare(tmp_path / "a", stdlib=shelf[0], **packages)
    assert not pystdlib.prepare(tmp_path / "a", stdlib=shelf[0], **packages)[1]
    files, new = pystdlib.prepare(tmp_path / "a", stdlib=shelf[0], val_fraction=0.3)
    assert new and files.meta["inputs"] != a.meta["inputs"] and "documents" not in files.meta
    write_files(small, {"short.py": "too short to be held out"})
    rooted, _ = pystdlib.prepare(tmp_path / "c", roots=[shelf[0]], stdlib=small, **packages)
    assert {d["name"].split("/")[0] for d in rooted.meta["documents"]["val"]} == {"1:shelf"}
    rejected(lambda: pystdlib.prepare(tmp_path / "d", stdlib=small, **packages), "at least 701 bytes long")
    assert capsys.readouterr().err == ""
    write_files(small, {"long.py": "x" * 800, **{f"{i}.py": f"{i}" * 600 for i in range(10)}})  # one is long enough
    one, _ = pystdlib.prepare(tmp_path / "e", stdlib=small, val_fraction=0.5, documents="package")
    assert capsys.readouterr().err.startswith(f"WARNING: val.bin is a single document of {len(one.val)} tokens: raise")


def test_the_standard_library_itself(tmp_path):
    """The embedded default, as a user runs it: seconds, two lines, and the sizes that the README speaks of."""
    done = run_python("data/pystdlib/prepare.py", "--out", tmp_path)
    assert done.returncode == 0 and not done.stderr and len(done.stdout.splitlines()) == 2, done
    tokens = Tokens(tmp_path, vocab_size=256, block_size=1024)
    total = len(tokens.train) + len(tokens.val)
    assert total > 8_000_000 and 0.018 < len(tokens.val) / total < 0.022  # Debian's Python has 11 MB, others 30
    xz = lzma.compress(text_of(tokens.val), preset=9)  # the bytes, not the uint16 of the file
    assert tokens.meta["xz9_bits_per_byte"] == pytest.approx(8 * len(xz) / len(tokens.val))
    assert "already prepared" in run_python("data/pystdlib/prepare.py", "--out", tmp_path).stdout
    assert "sha256 verified" in run_python("data/prepared.py", tmp_path).stdout


# ---- adopting what somebody else prepared


def test_adopt_nanogpts_files(tmp_path):
    folder = nanogpt(tmp_path / "owt")
    before = {split: (folder / f"{split}.bin").read_bytes() for split in prepared.SPLITS}
    run_adopt = lambda folder, *settings: run_python("data/adopt.py", folder, *settings)
    said = run_adopt(folder, "--vocab_size=50257", "--tokenizer=gpt2", "--bytes_per_token=4.5")
    assert said.returncode == 0 and "3 train, 2 val tokens, uint16, vocabulary 50,257, meta.json written" in said.stdout
    tokens = Tokens(folder, vocab_size=50_304, block_size=1)
    assert tokens.train.tolist() == [5, 50_256, 7] and tokens.val.tolist() == [1, 2] and tokens.bytes_per_token == 4.5
    assert (tokens.meta["tokenizer"], tokens.meta["dataset"]) == ("gpt2", "owt")
    assert tokens.meta["splits"]["train"]["max_token"] == 50_256
    assert before == {split: (folder / f"{split}.bin").read_bytes() for split in prepared.SPLITS}
    again = run_adopt(folder, "--vocab_size=50257")
    assert again.returncode == 2 and "meta.json already exists" in again.stderr and again.stderr.count("\n") == 1
    tokens = adopt(nanogpt(tmp_path / "llama", [3, 70_000], dtype=np.uint32), 128_256)
    assert tokens.train.tolist() == [3, 70_000]
    with pytest.raises(DataError, match="--dtype=uint16 cannot hold a vocabulary of 128,256"):
        adopt(nanogpt(tmp_path / "halves"), 128_256, "uint16")
    with pytest.raises(DataError, match="train.bin: every second uint16 is 0, as in a file of uint32: give --dtype"):
        adopt(nanogpt(tmp_path / "small", [3, 64] * 99, dtype=np.uint32), 65)
    for name, train in (("wide", [3, 70_000]), ("narrow", [3, 64])):  # the second where our own would be uint16
        tokens = adopt(nanogpt(tmp_path / name, train, dtype=np.uint32), train[1] + 1, "uint32")
        assert tokens.train.tolist() == train and tokens.train.dtype == np.uint32 and tokens.bytes_per_token is None
    tokens = adopt(nanogpt(tmp_path / "long", [9, *[1] * 2**21]), 10)  # read in two pieces
    assert tokens.meta["splits"]["train"]["max_token"] == 9
    bare = run_adopt(nanogpt(tmp_path / "bare"))
    said = "adopt.py: error: give --vocab_size: 50257 for GPT-2's tokens\n"
    assert bare.returncode == 2 and bare.stderr == said


@pytest.mark.parametrize("name", ["pystdlib", "pystdlib_bpe", "openwebtext", "shakespeare_char", "tokens"])
def test_scripts_speak_to_the_user(name, tmp_path):
    helped = run_python(f"data/{name}/prepare.py", "--help")
    assert helped.returncode == 0 and "--force" in helped.stdout and "data/" + name in helped.stdout
    (tmp_path / "file").write_text("")
    source = ["--files", ROOT / "requirements.txt", "--tokenizer=bytes"] if name in ("openwebtext", "tokens") else []
    failed = run_python(f"data/{name}/prepare.py", "--out", tmp_path / "file", *source)
    assert failed.returncode == 2 and failed.stdout == ""
    assert failed.stderr.startswith("prepare.py: error: cannot write to") and len(failed.stderr.splitlines()) == 1


# ---- shakespeare_char

@pytest.mark.parametrize("text", ["Nay, answer me: stand, and unfold yourself.\n", "Straße 🙂 über\n"])
def test_shakespeare_from_a_local_text(tmp_path, text):
    text *= 30
    (tmp_path / "play.txt").write_text(text, encoding="utf-8")
    tokens, new = shakespeare.prepare(tmp_path / "out", tmp_path / "play.txt", any_text=True)
    table = tokens.meta["table"]
    assert new and table == "".join(sorted(set(text))) and tokens.vocab_size == len(table)
    assert "".join(table[i] for i in tokens.train) == text[: int(0.9 * len(text))]
    assert "".join(table[i] for i in tokens.val) == text[int(0.9 * len(text)) :]
    assert tokens.bytes_per_token == 1.0 if text.isascii() else tokens.bytes_per_token["train"] > 1
    assert not shakespeare.prepare(tmp_path / "out", tmp_path / "play.txt", any_text=True)[1]


def test_shakespeare_is_downloaded_once_and_checked(tmp_path, monkeypatch):
    prepare = functools.partial(shakespeare.prepare, tmp_path / "out")
    monkeypatch.setattr(shakespeare, "download", lambda: b"<html>not found</html>")
    rejected(prepare, "not Tiny Shakespeare")
    assert not (tmp_path / "out/input.txt").exists() and not (tmp_path / "out/meta.json").exists()
    monkeypatch.setattr(shakespeare, "download", lambda: b"To be, or not to be, that is the question\n" * 9)
    monkeypatch.setattr(shakespeare, "check", lambda content, where: None)
    assert prepare()[1]
    monkeypatch.setattr(shakespeare, "download", lambda: 1 / 0)  # the download is kept
    assert not prepare()[1] and prepare(force=True)[1]


# ---- data/tokens: shards, openwebtext and other recipes, mixtures







def nanogpt_order(texts, text, fraction, seed=2357):
    """{split: tokens} as nanoGPT's prepare.py has them: datasets' split, each document's tokens and its end."""
    parts = datasets.Dataset.from_dict({"text": texts}).train_test_split(test_size=fraction, seed=seed, shuffle=True)
    encode = lambda part: [i for document in part["text"] for i in [*text.encode_ordinary(document), text.eot_token]]
    return {"train": encode(parts["train"]), "val": encode(parts["test"])}


@pytest.fixture
def small_units(monkeypatch, tmp_path):
    """Shards of 300 tokens, batches of 300 characters, every file a unit; the cache of the datasets package here."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, value in {"SHARD_TOKENS": 300, "BATCH_CHARS": 300, "UNIT_BYTES": 1, "UNIT_DOCUMENTS": 50}.items():
        monkeypatch.setattr(any_tokens, name, value)


def files_of_every_kind(folder, units):
    folder.mkdir()
    for name, texts in zip(("a.jsonl", "b.txt.jsonl.gz", "c.jsonl.zst"), units[:3], strict=True):
        write_jsonl(folder / name, texts)
    parquet.write_table(pa.table({"text": units[3]}), folder / "d.parquet")
    (folder / "e.txt").write_text(*units[4], encoding="utf-8")


@pytest.mark.parametrize("kind, shuffle", [("bytes", None), ("hf", None), ("bytes", 2357)])
def test_any_files_become_shards(small_units, tmp_path, kind, shuffle):
    """Stopped at every shard, and in one go: the same files, of the tokens of each document."""
    texts = [*documents(150), "one text\n" * 100 + "the end"]
    units = [texts[:40], texts[40:80], texts[80:120], texts[120:150], texts[150:]]
    files_of_every_kind(tmp_path / "files", units)
    byte_level_bpe(tmp_path, documents(50))
    kind = {"bytes": "bytes", "hf": f"hf:{tmp_path}"}[kind]
    text, how = Text(kind), {"files": [tmp_path / "files"], "tokenizer": kind, "val_fraction": 0.2, "shuffle": shuffle}
    whole = any_tokens.prepare(tmp_path / "whole", workers=2, **how)
    expected = nanogpt_order(texts, text, 0.2) if shuffle else reference(units, text)
    assert len(whole.meta["splits"]["train"]["shards"]) > 5
    assert whole.train[:].tolist() == expected["train"] and whole.val[:].tolist() == expected["val"]
    assert whole.meta["end_of_text"] == text.eot_token
    assert sum(split["documents"] for split in whole.meta["splits"].values()) == len(texts)
    write, calls = any_tokens.write_shard, []

    def killed(folder, name, *rest):
        calls.append(name)
        if len(calls) % 2:
            raise KeyboardInterrupt
        return write(folder, name, *rest)

    with mock.patch.object(any_tokens, "write_shard", killed):
        for _ in range(100):
            with contextlib.suppress(KeyboardInterrupt):
                any_tokens.prepare(tmp_path / "killed", **how)
                break
    assert len(calls) == 2 * len(set(calls)), "a finished shard was made again"
    assert Tokens(tmp_path / "killed").meta["splits"] == whole.meta["splits"]
    Tokens(tmp_path / "killed").verify()


@pytest.mark.parametrize("words", ["über ", "🙂", "x", " "])
def test_a_text_of_one_long_line_is_cut(small_units, tmp_path, words):
    """Into parts of bounded size, so that time is linear and memory constant: between words if there are any, never in
    a character. Shorter lines stay whole."""
    text = "a line\n" + "long " * 200 + "\n" + words * (40_000 // len(words.encode())) + "\nthe end"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    pieces, ends = zip(*any_tokens.read_file(tmp_path / "a.txt", "text"), strict=True)
    assert "".join(pieces) == text and "\ufffd" not in text and ends == (False,) * (len(pieces) - 1) + (True,)
    assert max(len(piece.encode()) for piece in pieces) <= 5 * any_tokens.BATCH_CHARS + 300 < 40_000 / 20
    assert any("long " * 200 + "\n" in piece for piece in pieces)
    assert words != "über " or all(piece.startswith(" über") and piece.endswith("über") for piece in pieces[3:-2])


def test_shards_are_read_as_one_file(small_units, folder_1000, tmp_path):
    texts = documents(200)
    tokens = any_tokens.prepare(tmp_path / "out", files=[write_jsonl(tmp_path / "a.jsonl", texts)], tokenizer="bytes",
                                val_fraction=0.2)
    joined = write_folder(tmp_path / "joined", train=tokens.train[:], val=tokens.val[:])
    a, b = (token_data(folder, batch_tokens=16 * 40) for folder in (tmp_path / "out", joined))
    one, two = ([*d.micro_batches(0, 0, 2, 7), *d.micro_batches(1, 1, 2, 7),
                 *d.eval_batches(eval_windows(len(d.tokens.val), 16), 0, 1, 9)] for d in (a, b))
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    a.check_unchanged()
    shard = tmp_path / "out" / tokens.meta["splits"]["train"]["shards"][1]["file"]
    content = shard.read_bytes()
    times = lambda: token_data(tmp_path / "out", batch_tokens=16 * 40).file_times
    before, (one, two) = times(), (tmp_path / "out" / f"0000{i}.train.bin" for i in (0, 1))
    os.utime(two, ns=(0, 0))
    assert times() != before  # although the latest time is the same
    shard.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    rejected(a.check_unchanged, "out changed during the run (written to)")
    rejected(lambda: Tokens(tmp_path / "out"), shard.name, "sha256 differs")
    shard.write_bytes(content[:-1])
    rejected(lambda: Tokens(tmp_path / "out"), shard.name, "truncated")
    shard.unlink()
    rejected(lambda: Tokens(tmp_path / "out"), shard.name, "is missing")


def test_tokens_go_on_after_kill_9(small_units, tmp_path, monkeypatch):
    """Before the renames of plan.json and of a shard's files; at last with a shard that the disk lost."""
    out, how = tmp_path / "out", {"tokenizer": "bytes", "val_fraction": 0.2, "workers": 2}
    prepare = functools.partial(any_tokens.prepare, files=[write_jsonl(tmp_path / "a.jsonl", documents(60))], **how)
    whole = prepare(tmp_path / "whole")
    run = lambda at: dying(at, lambda: prepare(out), out, events=["os.rename"])[0]
    assert [run(at) for at in (1, 3, 4, 7)] == [-signal.SIGKILL] * 4 and not (out / "meta.json").exists()
    lost = next(out.glob("00001.*.bin"))
    lost.write_bytes(lost.read_bytes()[:-2])
    assert run(0) == 0
    assert Tokens(out).meta["splits"] == whole.meta["splits"] and not list(out.glob("*.tmp-*"))
    (out / "meta.json").unlink()  # killed before it, and then the shard of another preparation in the place of one
    monkeypatch.setattr(prepared, "FULL_CHECK_TOKENS", 0)
    lost.write_bytes(lost.read_bytes()[::-1])
    assert run(0) == 0
    Tokens(out).verify()


def test_a_data_set_of_the_hub(small_units, tmp_path):
    """Streamed shard by shard, with its own validation split; the documents are left in their order."""
    (tmp_path / "hub").mkdir()
    texts = documents(80)
    for name, part in (("train-0", texts[:40]), ("train-1", texts[40:70]), ("validation-0", texts[70:])):
        write_jsonl(tmp_path / f"hub/{name}.jsonl", part)
    tokens = any_tokens.prepare(tmp_path / "out", source=str(tmp_path / "hub"), tokenizer="bytes")
    assert text_of(tokens.train) == b"".join(text.encode() + b"\0" for text in texts[:70])
    assert text_of(tokens.val) == b"".join(text.encode() + b"\0" for text in texts[70:])


def test_characters_and_a_single_document(small_units, tmp_path, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", ["über", "abc", None, "cab"])
    tokens = any_tokens.prepare(tmp_path / "out", files=[source], tokenizer="chars", shuffle=2357)
    assert tokens.meta["table"] == "\0abcerü" and tokens.vocab_size == 7
    assert sum((part[:] == 0).sum() for part in (tokens.train, tokens.val)) == 4
    assert "val.bin is a single document" in capsys.readouterr().err


def test_what_any_tokens_refuses(small_units, tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "a.jsonl", documents(20))
    how = {"files": [source], "tokenizer": "bytes", "val_fraction": 0.2}
    prepare = lambda **changes: any_tokens.prepare(tmp_path / "out", **{**how, "force": True, **changes})
    for changes, *words in [({"files": None}, "--files"), ({"shuffle": -1}, "--shuffle -1"),
                            ({"val_fraction": 0}, "--val_fraction 0"), ({"workers": 0}, "--workers 0"),
                            ({"text_column": "content"}, "no column 'content'"), ({"text_column": "id"}, "not text"),
                            ({"text_column": "id", "shuffle": 1}, "a.jsonl cannot be read", "not text"),
                            ({"files": [tmp_path / "none"]}, "no such file"), ({"val_fraction": 1e-9}, "in val"),
                            ({"files": [write_jsonl(tmp_path / "one.jsonl", ["a"])], "shuffle": 1}, "1 documents")]:
        rejected(lambda c=changes: prepare(**c), *words)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": ')
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(source.read_bytes())[:-20])
    (tmp_path / "bad.parquet").write_text("not parquet")
    for name in ("bad.jsonl", "cut.jsonl.gz", "bad.parquet"):
        for shuffle in (None, 1):
            rejected(lambda n=name, seed=shuffle: prepare(files=[tmp_path / n], shuffle=seed), f"{name} cannot be read")
    (tmp_path / "long.jsonl").write_text('{"text": "a"}\n{"text": "' + "a " * 50 + '"}')  # a bomb, say
    with monkeypatch.context() as patch:
        patch.setattr(any_tokens, "MOST_OF_A_LINE", 100)
        rejected(lambda: prepare(files=[tmp_path / "long.jsonl"]), "long.jsonl cannot be read", "a line of more than")
    prepare(files=[tmp_path / "long.jsonl"], val_fraction=0.5)
    (tmp_path / "a.csv").write_text("a")
    rejected(lambda: prepare(files=[tmp_path / "a.csv"]), "a.csv", ".parquet")
    prepare()
    rejected(lambda: prepare(val_fraction=0.3, force=False), "from other inputs", "--force")
    (tmp_path / "out/plan.json").unlink()  # nor is a finished folder that another program wrote overwritten
    edit_meta(tmp_path / "out", inputs=None)
    rejected(lambda: prepare(force=False), "from other inputs", "--force")


@pytest.mark.parametrize("shuffle", [None, 2357])
@pytest.mark.parametrize("when", ["finished", "killed", "while it is read"])
def test_files_are_known_by_their_content(small_units, tmp_path, monkeypatch, shuffle, when):
    """Other documents under the same names, in as many bytes, last changed at the same time."""
    (tmp_path / "corpus").mkdir()
    a, b = (write_jsonl(tmp_path / f"corpus/{name}.jsonl", documents(40)) for name in "ab")
    prepare = lambda: any_tokens.prepare(tmp_path / "out", files=[tmp_path / "corpus"], tokenizer="bytes",
                                         val_fraction=0.2, shuffle=shuffle)

    def replace(path=b):
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        path.write_bytes(path.read_bytes().replace(b"words", b"verbs"))
        os.utime(path, ns=times)

    if when == "while it is read":
        read = any_tokens.read_file

        def edited(path, column):
            yield from itertools.islice(read(path, column), 9)
            path.write_bytes(path.read_bytes().replace(b"words", b"verbs"))

        with monkeypatch.context() as patch:
            patch.setattr(any_tokens, "read_file", edited)
            rejected(prepare, "a.jsonl changed while it was read", "--force")
    elif when == "killed":
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(any_tokens, "finish_shards", mock.Mock(side_effect=KeyboardInterrupt))
            prepare()
        replace()
    else:
        prepare()
        (tmp_path / "corpus").rename(tmp_path / "moved")  # where the files are does not matter, nor when they changed
        shutil.copytree(tmp_path / "moved", tmp_path / "corpus", copy_function=shutil.copyfile)
        prepare()
        replace()
    rejected(prepare, "from other inputs", "--force")


def test_many_machines(monkeypatch, tmp_path):
    """What was --part is another program, which says what to install; the rest is in test_data_cluster.py."""
    helped = run_python("data/tokens/cluster.py", "--help")
    assert helped.returncode == 0 and "--cluster_args" in helped.stdout
    gone = run_python("data/tokens/prepare.py", "fineweb_edu", "--part=3/16")
    assert gone.returncode == 2 and "--part is gone: " in gone.stderr and "data/tokens/cluster.py" in gone.stderr
    monkeypatch.setitem(sys.modules, "datatrove.pipeline.tokens", None)
    rejected(lambda: cluster.prepare(tmp_path, files=[tmp_path]), "datatrove is missing", "requirements-cluster.txt")


def test_no_network(small_units, tmp_path, monkeypatch):
    unreachable = mock.Mock(side_effect=ConnectionError("no route to host\nand a long story"))
    monkeypatch.setattr("datasets.load_dataset", unreachable)
    monkeypatch.setattr("tiktoken.load.read_file", unreachable)
    for shuffle in (None, 2357):
        rejected(lambda seed=shuffle: any_tokens.prepare(tmp_path / "hub", source="Skylion007/openwebtext",
                                                        tokenizer="bytes", shuffle=seed),
                "Skylion007/openwebtext", "no route to host", "--files")
    rejected(lambda: tokenizer.tiktoken_encoding("gpt2"), "tiktoken:gpt2", "no route to host", "TIKTOKEN_CACHE_DIR",
            "--vocab")
    rejected(lambda: tokenizer.tiktoken_encoding("gpt2", tmp_path), "has no vocab.bpe")
    (tmp_path / "vocab.bpe").write_text("not it")
    rejected(lambda: tokenizer.tiktoken_encoding("gpt2", tmp_path), "vocab.bpe is not GPT-2's")
    assert (tmp_path / "vocab.bpe").read_text() == "not it"  # the user's file stays


def test_openwebtext_counts_are_compared_with_the_published_ones():
    def warning(val, train_documents=8_009_762, source=None, tokenizer="gpt2", **recipe):
        splits = {"train": {"tokens": 9_035_582_198, "documents": train_documents},
                  "val": {"tokens": val, "documents": 4007}}
        recipe = {"source": source, "val_fraction": 0.0005, "shuffle": 2357, **recipe}
        return any_tokens.count_warning({"splits": splits, "recipe": recipe, "tokenizer": tokenizer})

    line = warning(4_434_000)
    assert "val 4,434,000" in line and "val 4,434,897" in line and "8,013,769 documents here" in line
    assert "8,000,000" not in line and "8,004,007" in warning(4_434_000, 8_000_000, "Skylion007/openwebtext")
    for right in (warning(4_434_897), warning(5, tokenizer="bytes"), warning(5, 1000), warning(5, shuffle=None)):
        assert right is None


def test_openwebtext_with_the_real_vocabulary(tmp_path, monkeypatch):
    """The script as a user without network runs it: nanoGPT's tokens, and ids that GPT-2's users know by heart."""
    source, texts = tmp_path / "docs.jsonl", ["Hello world", *documents(120)]
    done = run_python("data/openwebtext/prepare.py", "--files", write_jsonl(source, texts), "--vocab", VOCAB, "--out",
                      tmp_path / "out", HF_HOME=tmp_path / "hf", TIKTOKEN_CACHE_DIR=tmp_path / "empty")
    assert done.returncode == 0 and "120 documents to train on" in done.stdout, done.stderr
    tokens = Tokens(tmp_path / "out", vocab_size=50304)
    assert tokens.vocab_size == 50257 and tokens.train.dtype == np.uint16
    assert ",15496,995,50256," in "," + ",".join(map(str, tokens.train[:])) + ","
    expected = nanogpt_order(texts, Text("gpt2", vocab=VOCAB), 0.0005)
    assert (tokens.train[:].tolist(), tokens.val[:].tolist()) == (expected["train"], expected["val"])
    assert tokens.bytes_per_token["val"] * len(tokens.val) in [len(text.encode()) for text in texts]


@pytest.mark.parametrize("shares", ["a:0.8,b:0.2", "a:1/3,b:2/3", "a:0.5,b:0.25,c:0.25"])
def test_a_mixture_is_exact_and_stateless(folder_1000, shares):
    """Every cycle has its shares, at places of its own, every epoch of a set each of its windows once, whatever the
    ranks."""
    parts = [(Tokens(folder_1000), share) for _, share in mixture.parse_mixture(shares)]
    data = mixture.MixtureData(parts, 16, 16 * 24, 7)
    windows, cycle = np.concatenate([data.starts(step) for step in range(240)]) // [1, 16], sum(data.counts)
    cycles = [windows[start:start + cycle, 0] for start in range(0, len(windows) - cycle + 1, cycle)]
    assert all(tuple(np.bincount(sets)) == data.counts for sets in cycles)
    assert len({tuple(sets) for sets in cycles}) > 2
    for k, n in enumerate(data.n_windows):
        of_set = windows[windows[:, 0] == k, 1]
        assert all(sorted(of_set[i:i + n]) == list(range(n)) for i in range(0, len(of_set) - n + 1, n))
        assert len(of_set) > n and of_set[:n].tolist() != of_set[n:2 * n].tolist()
    epoch = next(i for i in range(len(windows)) if (np.bincount(windows[:i, 0], minlength=len(parts)) >= 62).any())
    assert data.n_train_windows - 2 * cycle < epoch < data.n_train_windows + 2 * cycle  # the first set is used up
    step = mixture.MixtureData(parts, 16, 16 * 24, 7).starts(200)  # asked first
    assert np.array_equal(step, windows[200 * 24:201 * 24] * [1, 16])
    assert np.array_equal(step, np.concatenate([data.starts(200, rank, 3) for rank in range(3)]))
    (x, y, weight), *_ = data.micro_batches(200, 1, 2, 6)
    assert x.tolist() == [parts[k][0].train[w:w + 16].tolist() for k, w in step[12:18]] and weight == 0.5
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_a_mixture_is_known_by_its_parts(tmp_path):
    """Their content and their shares; a file that changes is said, whichever part it is of."""
    a, b = (Tokens(write_folder(tmp_path / name, train=n)) for name, n in (("a", 1000), ("b", 900)))
    make = lambda sets, *shares: mixture.MixtureData(list(zip(sets, map(Fraction, shares), strict=True)), 16, 64, 7)
    data, again = (make((a, b), "1/2", "1/2") for _ in range(2))
    others = [make((a, b), "1/4", "3/4"), make((a, a), "1/2", "1/2"), token_data(tmp_path / "a")]
    assert len({d.identity["train"] for d in (data, again, *others)}) == 4
    for step in range(8):  # both sets come first in one of them
        k, start = data.starts(step)[0]
        assert data.where(step, 0, 1).endswith(f"token {start:,} of {(tmp_path / 'ab'[k])}")
    assert {data.starts(step)[0][0] for step in range(8)} == {0, 1}
    derived = others[0].derived(SimpleNamespace(max_iters=62, micro_batch_size=4), 1)  # 62 steps of 4 windows
    assert derived["train_tokens"] == 1900 and derived["mixture"] == [
        {"dataset": "a", "share": 0.25, "train_tokens": 1000, "train_sha256": a.sha256["train"], "epochs": 1.0},
        {"dataset": "b", "share": 0.75, "train_tokens": 900, "train_sha256": b.sha256["train"], "epochs": 186 / 56}]
    data.verify(), data.check_unchanged()
    content = (tmp_path / "b/train.bin").read_bytes()
    (tmp_path / "b/train.bin").write_bytes(content[2:] + content[:2])
    assert make((a, b), "1/2", "1/2").file_times != data.file_times == again.file_times  # a resumed run reads all files
    rejected(data.check_unchanged, f"{tmp_path}/b/train.bin changed during the run")
    rejected(data.verify, f"{tmp_path}/b/train.bin is not the file")
