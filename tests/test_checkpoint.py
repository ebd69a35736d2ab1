"""runtime/checkpoint.py under kills, damage and malice."""

import errno
import functools
import io
import json
import math
import os
import pickle
import zlib
from pathlib import Path
from unittest import mock

import pytest
import safetensors.torch
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime import checkpoint
from runtime.checkpoint import CheckpointError, flatten, load, rng_state, save, set_rng_state, unflatten


def bits(x):
    """A value that differs wherever a type, dtype, shape, key order or bit differs."""
    if isinstance(x, torch.Tensor):
        raw = torch.empty(x.numel(), dtype=x.dtype).copy_(x.reshape(-1)).view(torch.uint8)
        return x.dtype, x.shape, raw.numpy().tobytes()
    if isinstance(x, dict):
        return dict, [(bits(key), bits(value)) for key, value in x.items()]
    if isinstance(x, (list, tuple)):
        return type(x), list(map(bits, x))
    return type(x), repr(x)  # -0.0 and nan included


def same(a, b):
    return bits(a) == bits(b)


def through_disk(state, folder):
    tensors, skeleton = flatten(state)
    save(folder / "c.safetensors", tensors, {"skeleton": skeleton})
    tensors, meta = load(folder / "c.safetensors")
    return unflatten(tensors, meta["skeleton"])


def refusal(path):
    with pytest.raises(CheckpointError) as info:
        load(path)
    assert "\n" not in str(info.value) and str(info.value).startswith(str(path))
    return str(info.value)[len(str(path)):]


@pytest.mark.parametrize("dtype", checkpoint.DTYPES)
def test_dtypes_and_shapes_round_trip(tmp_path, dtype):
    shapes = [(), (0,), (3, 0), (1,), (5, 7)]
    tensors = {str(shape): torch.randint(0, 2, (math.prod(shape),)).to(dtype).reshape(shape) for shape in shapes}
    tensors["nans"] = torch.arange(-2**15, 2**15, dtype=torch.int16).view(torch.bfloat16)  # every bit pattern
    save(tmp_path / "c", {**tensors, "odd": torch.ones(3, dtype=torch.uint8)}, {})
    loaded = load(tmp_path / "c")[0]
    assert all(same(loaded[name], t) for name, t in tensors.items())
    content = (tmp_path / "c").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    assert start % 8 == 0
    for name, entry in json.loads(content[8:start]).items():  # each is aligned to its element size
        assert name == "__metadata__" or (start + entry["data_offsets"][0]) % loaded[name].element_size() == 0


def test_loaded_tensors_are_copies_of_the_saved_ones(tmp_path):
    """This holds for views, tied tensors and parameters under any name. Later writes to the file change nothing."""
    w = torch.nn.Parameter(torch.randn(6, 8))
    path = tmp_path / "c"
    meta = {"step": 3, "x": [1.5, None, "ü\n\"\\"], "bytes": "0" * 16, "crc32": "\"crc32\":\"00000000\"",
            "inf": math.inf}
    tensors = {"a": w, "b": w, "t": w.t(), "s": w[::2, 1::3], "e": torch.ones(1).expand(4, 3),
               "one": torch.ones(4)[::3][:1], "none": torch.ones(4, 4).t()[:0], "zero": torch.ones(1).expand(3)[1:2],
               "ü \"": torch.randn(3), "crc32": torch.ones(2, 2), "": torch.zeros(1), "x": torch.ones(4096)}
    save(path, tensors, meta)
    tensors = {name: t.detach().clone() for name, t in sorted(tensors.items())}
    loaded, loaded_meta = load(path)
    assert loaded_meta == meta and same(dict(sorted(safetensors.torch.load_file(path).items())), tensors)
    assert path.stat().st_size < 4 * 4096 + 4096
    path.write_bytes(b"\0" * path.stat().st_size)
    assert same(dict(sorted(loaded.items())), tensors)
    loaded["a"].zero_()
    assert same(loaded["b"], tensors["b"])


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.builds(
    lambda n, d: torch.arange(n).to(d), st.integers(0, 3), st.sampled_from(list(checkpoint.DTYPES)))
keys = st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text(max_size=2)) | st.sampled_from(
    ["a", "a.b", "tensor", "dict", "tuple", "array", "__metadata__", "\ud800", "0", 0, ""])
states = st.recursive(leaves, lambda s: st.lists(s, max_size=3) | st.lists(s, max_size=3).map(tuple)
                      | st.dictionaries(keys, s, max_size=4), max_leaves=12)


one = torch.ones(1)
two = torch.full((1,), 2.0)
names_that_collide = {"a.b": one, "a": {"b": two, 0: one, "0": two}, "\ud800": one, "\\ud800": two, "__metadata__": one}


@settings(max_examples=40, deadline=None)
@given(state=states)
@example(state=names_that_collide)
def test_any_state_round_trips(tmp_path_factory, state):
    assert same(through_disk(state, tmp_path_factory.getbasetemp()), state)


def test_a_state_that_cannot_be_stored_and_a_wrong_skeleton_are_refused(tmp_path):
    with pytest.raises(TypeError, match="model.3.f: cannot store a function in a checkpoint"):
        flatten({"model": {3: {"f": flatten}}})
    for bad in (torch.zeros(2).to_sparse(), torch.zeros(1, dtype=torch.complex64), torch.empty(1, device="meta")):
        with pytest.raises(TypeError, match="cannot store 'x'"):
            save(tmp_path / "c", {"x": bad}, {})
    for tensors, meta in (({"__metadata__": torch.zeros(1)}, {}), ({}, {"x": flatten})):
        with pytest.raises(TypeError):
            save(tmp_path / "c", tensors, meta)
    assert os.listdir(tmp_path) == []
    deep = functools.reduce(lambda inner, _: [inner], range(100_000), [])
    for skeleton in ({"tensor": "x"}, {"foo": 1}, {"dict": 3}, deep):
        with pytest.raises(CheckpointError, match="^out/c: does not fit"), checkpoint.fitting("out/c"):
            unflatten({"t": torch.zeros(8, dtype=torch.uint8), "none": None}, skeleton)


def test_a_state_that_does_not_fit_is_refused_in_one_line():
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())

    def said(act, *arguments):
        with pytest.raises(CheckpointError) as info, checkpoint.fitting("out/c"):
            act(*arguments)
        assert str(info.value).startswith("out/c: does not fit this run (")
        assert "\n" not in str(info.value) and len(str(info.value)) < 250
        return str(info.value)

    assert "size mismatch for weight" in said(model.load_state_dict, torch.nn.Linear(2, 4).state_dict())
    said(model.load_state_dict, {f"layer{i}": torch.zeros(1) for i in range(99)})
    said(optimizer.load_state_dict, {"state": {}, "param_groups": []})
    for part in ("python", "numpy", "torch"):
        for odd in (None, 3, "x", [], (), (3, (-1,) * 625, None), {}):
            said(set_rng_state, {**rng_state(), part: odd})
    for error in (torch.OutOfMemoryError("CUDA out of memory"), KeyboardInterrupt(), OSError()):
        with pytest.raises(type(error)), checkpoint.fitting("out/c"):
            raise error


def test_every_rank_restores_the_state_of_its_own_gpu(monkeypatch):
    """Only rank 0 saves, and it has not used the other GPUs. A rank that took rank 0's state of its GPU would repeat
    its first random numbers."""
    restored = []
    mine = torch.tensor([7], dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: mine)
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored.append)
    set_rng_state(state := rng_state())
    set_rng_state({**state, "cuda": []})  # saved on a CPU
    assert [t.item() for t in restored] == [7]


def test_any_changed_byte_is_refused(tmp_path):
    path = tmp_path / "c"
    save(path, {"w": torch.randn(9), "b": torch.ones(3, dtype=torch.bool)}, {"step": 1})
    good = path.read_bytes()
    for i in range(len(good)):
        for flip in (0x20, 0x80, 0x20 ^ 0x09):  # the last turns a padding blank into a tab, which is still JSON
            path.write_bytes(good[:i] + bytes([good[i] ^ flip]) + good[i + 1:])
            refusal(path)
        path.write_bytes(good[:i])
        refusal(path)


class Malice:
    """Creates a folder when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def forge(meta, entry="", data=b""):
    """The content of a file with the right checksum and this JSON `meta` and `entry` in its header."""
    about = '{"__metadata__":{"version":"1","bytes":"%016d","crc32":"%08x",'
    length = len(about % (0, 0)) + len(f"{meta}}}{entry}}}")
    content = lambda crc: (length.to_bytes(8, "little") + (about % (8 + length + len(data), crc)).encode()
                           + f"{meta}}}{entry}}}".encode() + data)
    return content(zlib.crc32(content(0)))


def test_a_file_that_is_no_checkpoint_is_refused_in_one_line_and_passed_over(tmp_path):
    save(tmp_path / "good", {"w": torch.ones(9)}, {"step": 3})
    good = (tmp_path / "good").read_bytes()
    malice = Malice(tmp_path / "ran")
    huge = f',"x":{{"dtype":"I8","shape":[0,{2**63}],"data_offsets":[0,0]}}'
    other = good.replace(b'"version":"1"', b'"version":"2"')
    foreign = "not a checkpoint of this project (torch.save's pickles could run code and are never opened)"
    torch.save(malice, saved_by_torch := io.BytesIO())
    for content, *words in (
            (good[:-1], f"cut short: {len(good) - 1} bytes, but its header says {len(good)}"),
            (good + b"\0", f"too long: {len(good) + 1} bytes"),
            (good[:-1] + b"\xee", ": damaged (checksum ", "; use an earlier checkpoint-STEP next to it"),
            (other, "version 2 is unknown (this code reads 1)"),
            (pickle.dumps(malice), foreign), (pickle.dumps(malice, 0), foreign), (saved_by_torch.getvalue(), foreign),
            (safetensors.torch.save({"x": torch.zeros(300)}), foreign),
            (b"hello, this is no checkpoint" * 20, foreign), (b"\0" * 999, foreign), (b"\xff" * 999, foreign),
            (forge('"other":"{}"'),), (forge('"meta":"{"'),), (forge('"meta":"[]"'),),
            (forge(f'"meta":"{"[" * 100_000 + "]" * 100_000}"'),), (forge('"meta":"{}"', huge),)):
        (tmp_path / "c").write_bytes(content)
        line = refusal(tmp_path / "c")
        assert all(word in line for word in words) and not (tmp_path / "ran").exists(), line
        path, _, meta, passed = checkpoint.load_first([tmp_path / "c", tmp_path / "good"])
        assert (path, meta, passed) == (tmp_path / "good", {"step": 3}, [f"{tmp_path / 'c'}{line}"])
    assert "no checkpoint was saved here" in refusal(tmp_path / "nowhere")
    assert "not a regular file" in refusal(tmp_path)


def test_a_folder_without_a_checkpoint_names_the_newest_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for time, run in enumerate("out/a c out/b out/d".split()):
        Path(run).mkdir(parents=True)
        Path(run, checkpoint.NEWEST).touch()
        os.utime(Path(run, checkpoint.NEWEST), (0, time))
    assert "was saved here (the newest are in out/d, out/b, out/a)" in refusal(Path("out/none") / checkpoint.NEWEST)
    assert "(the newest are in out/d, out/b, c)" in refusal(Path("none") / checkpoint.NEWEST)


def test_the_traps_were_armed(tmp_path):
    """The pickle refused above runs code when it is opened, and a forged file with a correct header is loaded."""
    pickle.loads(pickle.dumps(Malice(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()
    (tmp_path / "c").write_bytes(forge('"meta":"{}"', ',"x":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}', b"7"))
    assert load(tmp_path / "c") == ({"x": torch.tensor([55], dtype=torch.int8)}, {})


def test_weights_are_loaded_alone(tmp_path):
    """They are those of a run or an imported model. The optimiser's tensors, twice as large, are never created."""
    state = {"model": {"a": torch.ones(2), "b.c": torch.zeros(3)}, "optimizer": {"model.x": torch.ones(4)}}
    tensors, skeleton = checkpoint.flatten(state)
    save(tmp_path / "c", tensors, {"skeleton": skeleton, "step": 3})
    save(tmp_path / "i", tensors, {"skeleton": skeleton, "imported_from": "there"})
    (tmp_path / "junk").write_bytes(b"junk")
    for name in "ci":
        with mock.patch.object(checkpoint, "unflatten", wraps=checkpoint.unflatten) as seen:
            path, weights, meta, passed = checkpoint.load_first([tmp_path / "junk", tmp_path / name], weights=True)
        assert same(weights, state["model"]) and path == tmp_path / name and len(passed) == 1 and "junk" in passed[0]
        assert seen.call_args[0][0].keys() == {"model.a", "model.b.c"}
    with pytest.raises(CheckpointError, match="/i: imported from there.*no optimizer state.*--init_from"):
        checkpoint.load_first([tmp_path / "i"])  # a run cannot continue from it


def test_a_file_is_flushed_before_its_rename_and_the_folder_after_it(tmp_path, monkeypatch):
    calls = mock.Mock()
    for name in ("fsync", "replace"):
        calls.attach_mock(mock.Mock(side_effect=getattr(os, name)), name)
        monkeypatch.setattr(os, name, getattr(calls, name))
    save(tmp_path / "c", {"x": torch.zeros(3)}, {})
    assert [call[0] for call in calls.mock_calls] == ["fsync", "replace", "fsync"]


def files(folder):
    return " ".join(sorted(path.stem for path in folder.iterdir()))


@pytest.mark.parametrize("links", [True, False])
def test_the_last_and_the_best_are_kept(tmp_path, monkeypatch, links):
    """These checkpoints are hard links, or copies on a file system without links. A step kept on purpose stays too."""
    if not links:
        monkeypatch.setattr(os, "link", mock.Mock(side_effect=OSError(errno.EPERM, "no links")))
    manager = checkpoint.CheckpointManager(tmp_path, keep=3, kept_steps={3})
    for step, loss in ((1, math.nan), (2, 1.0), (3, 3.0), (4, None), (5, 2.0), (6, math.inf), (7, 1.0)):
        manager.save({"w": torch.full((2,), step)}, {"step": step}, loss)
    (tmp_path / "checkpoint-1.safetensors").write_bytes(b"junk")
    assert list(checkpoint.steps(tmp_path)) == [7, 6, 5, 3, 2]
    (tmp_path / "checkpoint-1.safetensors").unlink()
    assert files(tmp_path) == "best checkpoint checkpoint-3 checkpoint-5 checkpoint-6"
    assert [load(path)[1]["step"] for path in checkpoint.candidates(tmp_path)] == [7, 6, 5, 3, 2]
    # step 7 has the same loss as step 2, and the first stays the best
    assert load(tmp_path / checkpoint.BEST)[1]["best"] == load(tmp_path / checkpoint.NEWEST)[1]["best"] == [1.0, 2]
    resumed = checkpoint.CheckpointManager(tmp_path, keep=2)
    resumed.on_resume(tmp_path / "checkpoint-5.safetensors", load(tmp_path / "checkpoint-5.safetensors")[1])
    resumed.save({"w": torch.zeros(2)}, {"step": 6}, 1.5)  # step 7, which was damaged, is not kept
    (tmp_path / checkpoint.NEWEST).unlink()  # somebody deletes it
    resumed.save({"w": torch.zeros(2)}, {"step": 6}, 1.5)
    assert files(tmp_path) == "best checkpoint checkpoint-5"
    assert [load(path)[1]["step"] for path in checkpoint.candidates(tmp_path)] == [6, 5, 2]
    full = mock.patch.object(checkpoint, "save", side_effect=OSError(errno.ENOSPC, "full"))
    with full, pytest.raises(OSError, match="full"):
        resumed.save({"w": torch.ones(2)}, {"step": 7}, 0.5)
    assert resumed.best == [1.0, 2] and load(checkpoint.candidates(tmp_path)[0])[1]["step"] == 6


def killed_at(monkeypatch, place, name, save):
    """Interrupts `save` as it calls the function `name` of `place`."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(place, name, mock.Mock(side_effect=KeyboardInterrupt))
        save()


def test_a_resumed_run_finishes_what_a_kill_interrupted(tmp_path, monkeypatch):
    """The kill comes before the best checkpoint has its name, or before the oldest is deleted."""
    manager = checkpoint.CheckpointManager(tmp_path)
    newest = tmp_path / checkpoint.NEWEST
    write = lambda step, **loss: manager.save({"w": torch.zeros(2)}, {"step": step}, **loss)
    go_on = lambda path: checkpoint.CheckpointManager(tmp_path).on_resume(path, load(path)[1])
    killed_at(monkeypatch, os, "link", functools.partial(write, 10, loss=1.0))
    assert files(tmp_path) == "checkpoint"
    go_on(newest)
    assert load(tmp_path / checkpoint.BEST)[1]["step"] == 10 and checkpoint.steps(tmp_path) == {10: newest}
    write(20)
    killed_at(monkeypatch, Path, "unlink", functools.partial(write, 30))
    assert files(tmp_path) == "best checkpoint checkpoint-10 checkpoint-20"
    for path in newest, tmp_path / "checkpoint-20.safetensors":  # the second time nothing is left to delete
        go_on(path)
        assert files(tmp_path) == "best checkpoint checkpoint-20"
