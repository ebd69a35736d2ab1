"""sample.py: text from a checkpoint of random weights, which samples as reproducibly as a trained one."""

import functools
import json
import re
import sys

import pytest
import torch
from helpers import VOCAB, make_run, refused, run_program, table, tiny, write_folder

import sample
import train
from common import errors
from runtime import checkpoint, records
from sample import Text

TABLE = "".join(sorted(set("hello wörld\n")))


def start():
    with errors.main_error("sample.py", ValueError):
        sample.main(sys.argv[1:])


run = functools.partial(run_program, start)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "bytes")


def says(monkeypatch, tokens):
    """Make models say these tokens, whatever the prompt. Returns the prompts, and the screen before each token."""
    prompts = []
    screens = []

    def stream(lm, idx, max_new_tokens, **sampling):
        prompts.append(idx[0].tolist())
        for token in tokens[:max_new_tokens]:
            screens.append(sys.stdout.getvalue())
            yield torch.tensor([token])
    monkeypatch.setattr(sample, "stream", stream)
    return prompts, screens


def test_gpt2_tokens_that_split_a_character_are_joined():
    text = Text("gpt2", vocab=VOCAB)
    a, *smile = tokens = text.encode("a 😀")
    said = [text.decode(token) for token in [*tokens, 50257, smile[0], a]]  # 50257 is not a token
    assert said == ["a", " ", "😀", "", " ", "\ufffda"]


def test_the_same_seed_says_the_same(out):
    text = lambda **how: run(out_dir=out, prompt="Once", max_new_tokens=40, **how).out
    first = text()
    assert first.startswith("Once") and first == text() == text(seed=1337) != text(seed=1)
    both = text(num_samples=2)
    assert both.startswith(f"{first}\n---\nOnce") and not both.endswith(first)
    assert text(temperature=0) == text(temperature=0, seed=5) == text(top_k=1, seed=3) == text(top_p=1e-6)
    assert text(temperature=0) == text(temperature=1e-45) == text(temperature=1e-300, top_k=5, top_p=0.5)


def test_what_is_said_is_what_the_model_generates(out):
    """The text equals that of `generate` on the loaded model, also after a prompt longer than the training context. The
    defaults are one sample of 500 tokens after an empty line, at a temperature of 0.8."""
    lm, meta = sample.load_model(out)
    assert not lm.training and meta["tokenizer"] == "bytes"
    for prompt, n, given in ("\n", 500, False), ("far longer than the context of twenty-four bytes " * 3, 50, True):
        generator = torch.Generator().manual_seed(1337)
        idx = torch.tensor([list(prompt.encode())])
        tokens = sample.generate(lm, idx, n, temperature=0.8, generator=generator)[0].tolist()
        result = run(out_dir=out, **{"prompt": prompt, "max_new_tokens": n} if given else {})
        assert result.code == 0 and result.out == bytes(tokens).decode(errors="replace") + "\n"
        assert f"[{n} tokens after a prompt of {len(prompt)} in " in result.err


def test_text_streams_character_by_character(out, monkeypatch):
    """A character that is cut off at the end does not reach the next sample."""
    _, screens = says(monkeypatch, [*"aé😀b".encode(), 0xE2, 0x82])
    result = run(out_dir=out, prompt="P", max_new_tokens=10, num_samples=2)
    assert result.out == "Paé😀b\ufffd\n\n---\nPaé😀b\ufffd\n"
    assert screens[:8] == ["", "", "Pa", "Paé", "Paé", "Paé", "Paé", "Paé😀"]  # the first two tokens build the kernels
    text = Text("bytes")  # tokens that are not text, or not bytes, do not stop the stream
    assert text.encode("\ud83d") == [0xED, 0xA0, 0xBD]
    assert "".join(text.decode(token) for token in [0xC3, 0x28, 256, 0xFF, 300, 0x61]) == "\ufffd(\ufffda"


def test_prompts_come_from_the_command_line_a_file_or_stdin(out, tmp_path, monkeypatch):
    """Prompts are in UTF-8. A model of bytes also takes bytes that are not text."""
    prompts, _ = says(monkeypatch, [33])
    content = b"\xff\xfea\r\n\x00"
    (tmp_path / "prompt.txt").write_text("from a file €\n", encoding="utf-8")
    (tmp_path / "binary").write_bytes(content)
    for how in ({"prompt": "given = here"}, {"prompt": f"@{tmp_path}/prompt.txt"},
                {"prompt": "-", "stdin": "from ß stdin".encode()}):
        assert run(out_dir=out, **how).code == 0
    assert [bytes(p).decode() for p in prompts] == ["given = here", "from a file €\n", "from ß stdin"]
    for how in ({"prompt": f"@{tmp_path}/binary"}, {"prompt": "-", "stdin": content}):
        assert run(out_dir=out, **how).out == "\ufffd\ufffda\r\n\x00!\n" and bytes(prompts[-1]) == content
    characters = make_run(tmp_path / "char", tiny(vocab_size=len(TABLE)), tokenizer="char", table=TABLE)
    (tmp_path / "lines").write_bytes("wörld\r\n".encode())
    assert run(out_dir=characters, prompt=f"@{tmp_path}/lines").out == "wörld\n\n"  # 33 is not a character of the table


# What is typed; changes to the checkpoint of `out` or to its config; words of the error.
REFUSED = r"""
--out_dir=/nothing     {}                           /nothing/checkpoint.safetensors  no checkpoint
--prompt=              {}                           empty
--prompt=@absent.txt   {}                           absent.txt
--prompt={not UTF-8}   {}                           expected a string of UTF-8
--prompt=Hi            {"tokenizer": "char", "table": "\nb"}      'H'  vocabulary
--prompt=-             {"tokenizer": "char", "table": "\nb"}      sample.py: error: prompt
                                                    'utf-8' codec can't decode byte 0xff in position 0
--prompt=b             {"tokenizer": "gpt2"}        tiktoken is missing  pip install
--prompt=b             {"tokenizer": "tiktoken:p60k"}             'p60k'  gpt2, r50k_base
--prompt=b             {"tokenizer": "hf:/none"}    hf:/none
--prompt=b             {"tokenizer": "words"}       'words'  bytes, gpt2, char
--prompt=b             {"tokenizer": null}          does not name its tokenizer  --tokenizer
--prompt=b             {"tokenizer": 3}             checkpoint.safetensors: does not fit
--prompt=b             {"table": []}                checkpoint.safetensors: does not fit
--prompt=b             {"config": []}               checkpoint.safetensors: does not fit
--prompt=b             {"skeleton": {"dict": []}}   checkpoint.safetensors: does not fit
--prompt=b             {"model": "mamba"}           checkpoint.safetensors: does not fit
--prompt=b             {"vocab_size": 1000000000000}
--prompt=b             {"n_layer": 100000000000000}
--prompt=b             {"n_embd": 1000000}
--prompt=b             {"n_embd": "x"}              n_embd is 'x'
--prompt=b             {"model": "griffin"}         griffin  longhorn, mamba
--prompt=b             {"task": "images"}           checkpoint.safetensors  image classifier
"""
NO_GPU = "--device=cuda  {}  cuda  --device=cpu"


@pytest.mark.parametrize("typed, changes, words", [
    (typed, changes, words) for typed, changes, *words in table(REFUSED + NO_GPU * (not torch.cuda.is_available()))])
def test_mistakes_get_one_line_before_anything_is_said(out, tmp_path, monkeypatch, typed, changes, words):
    changes = json.loads(changes)
    if changes.get("tokenizer") == "gpt2":
        monkeypatch.setitem(sys.modules, "tiktoken", None)  # not installed
    tensors, meta = checkpoint.load(out / "checkpoint.safetensors")
    settings_of_run = {key: changes[key] for key in changes if key not in meta}
    checkpoint.save(tmp_path / "checkpoint.safetensors", tensors,
                    {**meta, "config": {**meta["config"], **settings_of_run}, **changes})
    typed = typed.replace("{not UTF-8}", "\udcff")
    refused(run(f"--out_dir={tmp_path}", "--prompt=b", typed, stdin=b"\xff"), *words)


def test_a_removed_setting_is_ignored_at_its_default_and_else_refused(out, tmp_path):
    tensors, meta = checkpoint.load(out / "checkpoint.safetensors")
    for value in (False, True):
        config = {**meta["config"], "as_released": value, "eval_sets": "a:b"}
        checkpoint.save(tmp_path / "checkpoint.safetensors", tensors, {**meta, "config": config})
        result = run(out_dir=tmp_path, prompt="b", max_new_tokens=9)
        assert value or result.out == run(out_dir=out, prompt="b", max_new_tokens=9).out
    refused(result, "as_released=True is no longer a setting", "rwkv_released")


def test_a_token_that_the_model_does_not_know_is_refused(tmp_path):
    run_dir = make_run(tmp_path / "run", tiny(vocab_size=98))
    refused(run(out_dir=run_dir, prompt="b"), "token 98, but the model's vocab_size is 98")
    assert run(out_dir=run_dir, prompt="a", max_new_tokens=1).code == 0


def test_a_trained_character_model_speaks_its_characters(tmp_path):
    write_folder(tmp_path / "data", vocab_size=len(TABLE), tokenizer="char", table=TABLE)
    train.main([f"--dataset={tmp_path / 'data'}", f"--out_dir={tmp_path / 'run'}", "--pattern=llama", *(
        "--n_layer=1 --n_head=2 --n_embd=32 --block_size=16 --batch_tokens=64 --micro_batch_size=4 --max_iters=1 "
        "--device=cpu --dtype=float32").split()])
    assert sample.load_model(tmp_path / "run")[0].config.vocab_size == 64  # of nine characters, rounded up
    result = run(out_dir=tmp_path / "run", prompt="hello wörld", max_new_tokens=60, temperature=2)
    assert result.code == 0 and result.out.startswith("hello wörld")
    assert re.fullmatch(f"[{TABLE}]+", result.out) and len(result.out) > 20
    text = Text("char", TABLE)
    assert "".join(map(text.decode, text.encode("hello wörld"))) == "hello wörld"


def test_code_that_changed_since_the_training_is_named(tmp_path):
    """Code that only trains is not named: no program that loads the model runs it."""
    out = make_run(tmp_path / "run")
    files = {**records.code_identity()["code_files"], "train.py": "another"}
    environment = {"commit": "$(id)\x1b", "uncommitted_changes": True, "code": "v2abc", "code_files": files}

    def after(config):
        (out / "config.json").write_text(config)
        return sample.code_since(out)

    def edited(name):
        there = {**environment, "code_files": {**files, name: "another"}}
        return after(json.dumps({"environment": there}))

    assert edited("common/errors.py") == edited("README.md") == ""
    assert after("") == after("{}") == after('{"environment": {"code_files": []}}') == ""
    assert "(mixers.py)" in edited("mixers.py")
    for versions, is_other in ((["v2old", "v2abc"], False), (["v2old"], False), (["v2new"], True), (None, False)):
        after(json.dumps({"environment": environment, "code_versions": ["v2old", "v2abc"]}))
        assert ("belongs to another run" in sample.code_since(out, versions)) == is_other
    line = edited("model.py")
    assert "(model.py)" in line and line.endswith("git checkout '$(id)\x1b' (it had uncommitted changes)")
    assert errors.printable(line) in run(out_dir=out, max_new_tokens=1).err.splitlines()
