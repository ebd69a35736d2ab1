"""export.py: weights out to transformers and back, and every family through its own folder.

Norms, biases and A_log are away from their start, so that a weight under a wrong name gives other logits.
"""

import dataclasses
import functools
import json
import os
import pickle
import runpy
import subprocess
import sys
from unittest import mock

import pytest
import safetensors.torch
import test_sample
import torch
import transformers
from test_sample import VOCAB, byte_level_bpe, make_run, refused, run_program

import export
import mixers  # noqa: F401  all families
import sample
from data.tokenizer import Text
from export import from_hf, to_hf
from model import FAMILIES
from runtime import checkpoint, counting
from runtime.folder import lock_run_dir

PARITY = {"llama": {"n_head": 4}, "mamba": {"d_state": 5, "d_conv": 3, "dt_rank": 3}, "rwkv4": {}}
TOKENS = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(1))
run = functools.partial(run_program, functools.partial(runpy.run_path, export.__file__, run_name="__main__"))


def tiny(family="longhorn", **changes):
    return test_sample.tiny(family, **{**PARITY.get(family, {}), **changes})


def close(a, b, tolerance):
    assert b.std() > 0.1, "logits too flat to tell models apart"
    assert (a - b).abs().max() <= tolerance * b.abs().max(), (a - b).abs().max() / b.abs().max()


@pytest.mark.parametrize("family", PARITY)
def test_transformers_loads_what_is_written(family, tmp_path):
    """From the run's folder to AutoModelForCausalLM: the same logits, the same most likely tokens."""
    lm = tiny(family)
    count = sum(p.numel() for p in lm.parameters())
    said = f"{count:,} parameters; load it with AutoModelForCausalLM.from_pretrained('{tmp_path}/hf')"
    result = run(out_dir=make_run(tmp_path / "run", lm), to=tmp_path / "hf")
    assert result == (0, f"wrote {tmp_path}/hf: {said}\n", "")
    assert sorted(os.listdir(tmp_path / "hf")) == ["config.json", "model.safetensors", *export.TOKENIZER]
    with safetensors.safe_open(tmp_path / "hf" / "model.safetensors", "pt") as f:
        assert f.metadata()["format"] == "pt"  # without it older versions of transformers refuse the file
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(report.values()), report  # nothing missing, left over or of another shape
    assert type(theirs).__name__ == export.ARCHITECTURES[family] and theirs.dtype == torch.float32
    with torch.no_grad():
        close(theirs(TOKENS).logits, lm(TOKENS)[0], 1e-5)
    idx = TOKENS[:1] if family == "rwkv4" else TOKENS  # transformers' RWKV mixes the rows of a batch when it generates
    written = theirs.generate(idx, max_new_tokens=40, do_sample=False)
    assert torch.equal(written, sample.generate(lm, idx, 40, temperature=0))
    assert written.shape[1] == 60  # nothing ends it


def theirs_at_random(family):
    torch.manual_seed(3)
    config = {
        "llama": transformers.LlamaConfig(vocab_size=256, hidden_size=48, num_attention_heads=3, num_hidden_layers=3,
                                          intermediate_size=150, rms_norm_eps=1e-5, tie_word_embeddings=True,
                                          max_position_embeddings=40),
        "mamba": transformers.MambaConfig(vocab_size=256, hidden_size=40, num_hidden_layers=4, state_size=6, expand=3,
                                          conv_kernel=2),
        "rwkv4": transformers.RwkvConfig(vocab_size=256, hidden_size=40, num_hidden_layers=3, intermediate_size=170,
                                         tie_word_embeddings=True, rescale_every=0, context_length=24)}[family]
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.empty_like(p).uniform_(-0.2, 0.2))
    return theirs.eval()


@pytest.mark.parametrize("family", PARITY)
def test_a_model_of_transformers_becomes_ours(family, tmp_path):
    """Saved by transformers in several files, imported, sampled from; then exported again: the same tensors."""
    theirs = theirs_at_random(family)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    assert "--tokenizer" in run(from_hf=tmp_path / "hf", out_dir=tmp_path / "none").out
    assert sample.load_model(tmp_path / "none")[1]["tokenizer"] is None
    said = run(from_hf=tmp_path / "hf", out_dir=tmp_path / "run", tokenizer="bytes").out
    assert "next: python sample.py" in said and family in said
    lm, meta = sample.load_model(tmp_path / "run")
    assert meta["tokenizer"] == "bytes" and lm.config.model == family
    assert lm.config.n_layer == {"llama": 3, "mamba": 2, "rwkv4": 3}[family]
    with torch.no_grad():
        close(lm(TOKENS)[0], theirs(TOKENS).logits, 1e-5)
    theirs.generation_config.eos_token_id = None
    idx = TOKENS[:1]  # see above
    written = theirs.generate(idx, max_new_tokens=20, do_sample=False)
    assert torch.equal(sample.generate(lm, idx, 20, temperature=0), written)
    there = dict(theirs.state_dict())
    del there["head.weight" if family == "rwkv4" else "lm_head.weight"]
    torch.testing.assert_close(to_hf(lm)[1], there, rtol=0, atol=1e-7 if family == "rwkv4" else 0)


@pytest.mark.parametrize("family", [*FAMILIES, "longhorn*2,llama", "mamba*2", "llama,mamba"])
def test_out_and_in_again(family, tmp_path):
    """A run exported and imported is the same model with the same tokenizer; `load` gives it too."""
    lm, table = tiny(family) if family in FAMILIES else tiny("longhorn", pattern=family, n_layer=3), "abc\n"
    kind = family.removesuffix("*2")
    make_run(tmp_path / "run", lm, tokenizer="char", table=table)
    said = run(out_dir=tmp_path / "run", to=tmp_path / "folder").out
    assert (kind in PARITY) == ("trust_remote_code" not in said)
    config = export.read_json(tmp_path / "folder" / "config.json")
    assert config["run"] == {"tokenizer": "char", "table": table, "step": 7, "tokens": 700, "data": {"train": "ab"}}
    if kind not in PARITY:
        assert config["model_type"] == "longhorn" and config["architectures"] == ["LonghornForCausalLM"]
        assert (config["pattern"] or config["model"]) == family
        assert config.keys() == {*export.SETTINGS, *export.OWN, "dtype", "run", "bos_token_id", "eos_token_id"}
        assert safetensors.torch.load_file(tmp_path / "folder" / "model.safetensors").keys() == lm.state_dict().keys()
    run(from_hf=tmp_path / "folder", out_dir=tmp_path / "imported")
    again, meta = sample.load_model(tmp_path / "imported")
    assert (meta["tokenizer"], meta["table"], meta["step"]) == ("char", table, 7)
    for other in (again, export.load(tmp_path / "folder")):
        assert other.config.families == lm.config.families and other.config.block_size == lm.config.block_size
        torch.testing.assert_close(other.state_dict(), lm.state_dict(), rtol=0, atol=1e-7 if kind == "rwkv4" else 0)
        assert not other.training and all(p.requires_grad for p in other.parameters())
        close(other(TOKENS)[0], lm(TOKENS)[0], 1e-6 if kind == "rwkv4" else 0)


def test_the_machines_own_setting_stays_behind_and_weights_are_copies():
    lm = tiny(backend="torch").double()
    config, tensors = to_hf(lm)
    other = from_hf(config, tensors)
    assert "backend" not in config and other.config == dataclasses.replace(lm.config, backend="")
    for t in tensors.values():
        t.zero_()
    assert lm.embed.weight.all() and torch.equal(lm.embed.weight, other.embed.weight)
    assert {p.dtype for p in other.parameters()} == {torch.float64}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["llama", "longhorn"])
def test_dtypes_and_gpt2s_end_of_a_text(family, dtype, tmp_path):
    lm = tiny(family)
    run(out_dir=make_run(tmp_path / "run", lm, tokenizer="gpt2"), to=tmp_path / "folder", dtype=dtype)
    written = safetensors.torch.load_file(tmp_path / "folder" / "model.safetensors")
    assert {t.dtype for t in written.values()} == {getattr(torch, dtype)}
    assert export.read_json(tmp_path / "folder" / "config.json")["dtype"] == dtype
    loaded = export.load(tmp_path / "folder")
    for name, p in lm.named_parameters():
        assert torch.equal(loaded.get_parameter(name), p.to(getattr(torch, dtype)).float())
    if family == "llama":
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype="auto")
        assert theirs.dtype == getattr(torch, dtype)
        assert theirs.generation_config.eos_token_id == theirs.generation_config.bos_token_id == 50256


def test_float16_that_overflows_is_refused(tmp_path):
    lm = tiny()
    lm.embed.weight.data[3, 4] = 7e4
    run_dir = make_run(tmp_path / "run", lm)
    refused(run(out_dir=run_dir, to=tmp_path / "folder", dtype="float16"), "embed.weight", "bfloat16")
    assert os.listdir(tmp_path) == ["run"]


ONLY = {  # field, another value, what is supported
    "llama": [("num_key_value_heads", 2, 4), ("head_dim", 16, 8), ("attention_bias", True, False),
              ("tie_word_embeddings", False, True), ("hidden_act", "gelu", "'silu'"), ("rms_norm_eps", 1e-6, 1e-5),
              ("intermediate_size", 80, "86 or more"), ("vocab_size", True, "a whole number")],
    "mamba": [("use_bias", True, False), ("use_conv_bias", False, True), ("layer_norm_epsilon", 1e-6, 1e-5),
              ("tie_word_embeddings", False, True), ("num_hidden_layers", 3, "an even"), ("intermediate_size", 96, 64)],
    "rwkv4": [("attention_hidden_size", 64, 32), ("intermediate_size", 100, "128 or more")],
    "longhorn": [("model", "transformer", "longhorn, mamba"), ("pattern", 5, "a string")]}
REFUSED = [
    *((family, {field: value}, f"{field} {value!r}", f"only {only}")
      for family, rows in ONLY.items() for field, value, only in rows),
    ("llama", {"rms_norm_eps": ...}, "rms_norm_eps 1e-06 (the default)"),
    ("llama", {"rope_parameters": {"rope_theta": 5e5}}, "rope_theta 500000.0", "only 10000"),
    ("llama", {"rope_parameters": ..., "rope_theta": 5e5}, "rope_theta 500000.0"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'", "only 'default'"),
    ("llama", {"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5", "only 1"),
    ("llama", {"intermediate_size": 512}, "model.layers.0.mlp.gate_proj.weight", "(256, 32)", "(512, 32)"),
    ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": None}, "n_head 3"),
    ("llama", {"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight", "missing"),
    ("llama", {"num_hidden_layers": 1}, "model.layers.1.", "does not exist"),
    ("llama", {"num_hidden_layers": 10**9}, "1000000000 layers"),
    ("llama", {"hidden_size": 2**30, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": None,
               "intermediate_size": 2**31 - 1}, "8/3 of hidden_size"),
    ("llama", {"hidden_size": ...}, "hidden_size None"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ("llama", {"quantization_config": {"bits": 4}}, "quantization_config {'bits': 4}"),
    ("llama", {"model_type": "mistral"}, "model_type 'mistral'", "llama, mamba, rwkv and"),
    ("llama", {"model_type": "mamba", "architectures": None}, "is not supported"),
    ("mamba", {"time_step_rank": "auto"}, "x_proj.weight is (13, 64)", "(12, 64)"),
    ("mamba", {"conv_kernel": 4}, "conv1d.weight is (64, 1, 3)", "(64, 1, 4)"),
    ("mamba", {"hidden_size": 2**31 - 1, "intermediate_size": ..., "state_size": 2**31 - 1, "expand": 2**31 - 1},
     "no valid model"),
    ("longhorn", {"n_heads": 4}, "unknown setting n_heads"),
    ("longhorn", {"n_embd": 64}, "embed.weight is (256, 32)", "(256, 64)"),
    ("longhorn", {"pattern": "llama,griffin"}, "griffin", "longhorn, mamba"),
]


TENSORS = [  # of a llama: a tensor more, or another in its place; words of the line
    ("lm_head.weight", "only a tied head"), ("model.layers.0.self_attn.q_proj.bias", "q_proj.bias does not exist"),
    ("model.layers.1.self_attn.q_norm.weight", "no further norms"), ("model.layers.1.mlp.up_proj.weight", "torch.int8")]
NOTES = [{"tokenizer": ["x"]}, {"tokenizer": "klingon"}, {"table": 5}, {"step": "abc"}, [1]]
SETTINGS = [  # of the command line
    ({"out_dir": "a"}, "--to", "--from_hf"), ({"out_dir": "a", "to": "a", "from_hf": "b"}, "either"),
    ({"to": "a"}, "--out_dir"), ({"out_dir": "/none", "to": "a"}, "/none/checkpoint.safetensors", "no checkpoint"),
    ({"out_dir": "a", "to": "b", "tokenizer": "gpt2"}, "--from_hf"), ({"out_dir": "a", "two": "a"}, "--to"),
    ({"out_dir": "a", "from_hf": "b", "dtype": "bfloat16"}, "--to"),
    ({"out_dir": "a", "from_hf": "b", "push": "me/longhorn"}, "push", "--to"),
    ({"out_dir": "a", "to": "b", "dtype": "int8"}, "float32, bfloat16, float16")]


def imported(folder, config, tensors):
    """The answer of --from_hf to a folder with this config and these tensors."""
    export.write(folder / "folder", config, tensors)
    result = run(from_hf=folder / "folder", out_dir=folder / "out")
    assert (folder / "out").exists() == (result.code == 0)
    return result


@pytest.mark.parametrize("family, changes, words", [
    *((family, changes, words) for family, changes, *words in REFUSED),
    *(("longhorn", {"run": notes}, ["config.json", notes]) for notes in NOTES)], ids=lambda x: str(x)[:60])
def test_what_cannot_be_expressed_is_named(family, changes, words, tmp_path):
    config, tensors = to_hf(tiny(family))
    config = {k: v for k, v in {**config, **changes}.items() if v is not ...}
    refused(imported(tmp_path, config, tensors), f"{tmp_path}/folder", *words)


@pytest.mark.parametrize("settings, words", [(settings, words) for settings, *words in SETTINGS])
def test_wrong_settings(settings, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(run(**settings), *words)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("name, words", TENSORS)
def test_tensors_left_over_or_quantised_are_refused(name, words, tmp_path):
    config, tensors = to_hf(tiny("llama"))
    more = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone(),  # these may be there
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert from_hf(config, {**tensors, **more}).config.n_layer == 2
    odd = torch.ones(tensors.get(name, tensors["model.embed_tokens.weight"]).shape, dtype=torch.int8)
    refused(imported(tmp_path, config, {**tensors, name: odd}), words)


def test_nothing_is_overwritten_unasked(tmp_path):
    make_run(tmp_path / "run", tiny())
    make_run(tmp_path / "other", tiny("gla"))
    to = tmp_path / "folder"
    to.mkdir()  # an empty one is welcome
    assert run(out_dir=tmp_path / "run", to=to).code == 0
    before = {p.name: p.read_bytes() for p in to.iterdir()}
    refused(run(out_dir=tmp_path / "other", to=to), f"{to} is not empty", "--overwrite")
    assert before == {p.name: p.read_bytes() for p in to.iterdir()}
    assert run(out_dir=tmp_path / "other", to=to, overwrite="true").code == 0
    assert export.load(to).config.model == "gla" and sorted(os.listdir(to)) == sorted(export.FILES)
    (to / "thesis.tex").write_text("my only copy")
    refused(run(out_dir=tmp_path / "run", to=to, overwrite="true"), "thesis.tex", "never overwritten")
    refused(run(out_dir=tmp_path / "run", to=to / "thesis.tex"), "thesis.tex")
    refused(run(out_dir=tmp_path / "run", to=tmp_path / "run", overwrite="true"), "never overwritten")
    assert (to / "thesis.tex").read_text() == "my only copy"
    assert sorted(os.listdir(tmp_path)) == ["folder", "other", "run"]


def test_an_import_spares_a_training_run_and_is_none(tmp_path):
    run(out_dir=make_run(tmp_path / "run", tiny("llama")), to=tmp_path / "hf")
    into = {"from_hf": tmp_path / "hf", "out_dir": tmp_path / "imported"}
    assert run(**into).code == 0
    words = rf"imported from {tmp_path}/hf, so it has weights .*another out_dir$"
    with pytest.raises(checkpoint.CheckpointError, match=words):
        checkpoint.load_first(checkpoint.candidates(tmp_path / "imported"))  # what train.py --resume goes by
    refused(run(**into), "imported is not empty", "--overwrite")
    (tmp_path / "imported" / "checkpoint.safetensors.tmp-999999999").touch()  # of a writer that was killed
    assert run(**into, overwrite="true").code == 0
    assert sorted(os.listdir(tmp_path / "imported")) == [".lock", "checkpoint.safetensors"]
    with lock_run_dir(tmp_path / "imported"):
        refused(run(**into, overwrite="true"), "another run is writing to")
    (tmp_path / "imported" / "log.jsonl").touch()
    refused(run(**into, overwrite="true"), "log.jsonl", "never overwritten")


@pytest.mark.parametrize("name", ["fsync", "rename"])
def test_a_failure_leaves_what_was_there(name, tmp_path, monkeypatch):
    to, real = tmp_path / "folder", getattr(os, name)
    make_run(tmp_path / "run", tiny())
    make_run(tmp_path / "first", tiny("gla"))

    def fail(source, *target):
        if name == "fsync" or ".tmp-" in str(source):
            raise OSError(28, "No space left on device")
        real(source, *target)

    for there in (False, True):
        if there:
            run(out_dir=tmp_path / "first", to=to)
        entries = sorted(os.listdir(tmp_path))
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            refused(run(out_dir=tmp_path / "run", to=to, overwrite="true"), "folder", "No space left")
        assert sorted(os.listdir(tmp_path)) == entries
    assert export.load(to).config.model == "gla"
    os.rename(to, tmp_path / ".folder.export.old-17")  # killed between its two renames: the next command puts the old
    (tmp_path / ".folder.export.tmp-17").mkdir()  # model back, and says that it is there
    refused(run(out_dir=tmp_path / "run", to=to), "folder is not empty", "--overwrite")
    assert sorted(os.listdir(tmp_path)) == entries and export.load(to).config.model == "gla"


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('unpickled')",)


def test_files_that_are_missing_or_damaged(tmp_path):
    folder = tmp_path / "folder"
    result = lambda: run(from_hf=folder, out_dir=tmp_path / "out")
    refused(result(), f"{folder}/config.json", "No such file")
    export.write(folder, *to_hf(tiny()))
    weights, text = (folder / "model.safetensors").read_bytes(), (folder / "config.json").read_text()
    for damage in (b"", weights[:5], weights[:100], weights[:-1], weights + b"0", b"\xff" * 8 + weights[8:],
                   weights[:40] + b"\x00" + weights[41:], pickle.dumps(Bomb())):
        (folder / "model.safetensors").write_bytes(damage)
        refused(result(), f"{folder}/model.safetensors", "not readable as safetensors")
    (folder / "model.safetensors").unlink()
    refused(result(), f"{folder}/model.safetensors", "no weights to read", "pytorch_model.bin", "pickle", "not opened")
    (folder / "model.safetensors").write_bytes(weights)
    for damage in ("", text[:-5], "[1]", "\x00", "[" * 100000):
        (folder / "config.json").write_text(damage)
        refused(result(), f"{folder}/config.json")
    (folder / "config.json").write_bytes(b"\xff\xfe{")
    refused(result(), f"{folder}/config.json", "not a JSON")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("weight_map", [{"a": "../secret.safetensors"}, {"a": "/etc/passwd"}, {"a": 1}, ["a"], None])
def test_an_index_stays_in_its_folder(weight_map, tmp_path):
    export.write(tmp_path / "folder", *to_hf(tiny()))
    (tmp_path / "folder" / "model.safetensors").rename(tmp_path / "secret.safetensors")
    (tmp_path / "folder" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(run(from_hf=tmp_path / "folder", out_dir=tmp_path / "out"), "index.json", "weight_map")


# ------------------------------------------------------------------------------------- in transformers, without this

ELSEWHERE = """
import sys
import torch
sys.modules["flash_attn"] = None  # transformers lets out any error of its import
import transformers
assert not any("longhorn" in path for path in sys.path), sys.path
prompt = torch.arange(40, 52)[None]
for folder in sys.argv[1:]:
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, report = load(folder, trust_remote_code=True, output_loading_info=True)
    assert not any(report.values()), report
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = bytes(range(40, 52)).decode()
    assert torch.equal(tokenizer(text, return_tensors="pt").input_ids, prompt) and tokenizer.decode(prompt[0]) == text
    found = model.generate(prompt, max_new_tokens=12, do_sample=False)
    if folder == sys.argv[1]:
        model.generate(prompt, max_new_tokens=3, do_sample=False, num_beams=2)
    logits = model(prompt, labels=prompt)
    print("found", model.model.config.backend, float(logits.loss), *found[0].tolist())
"""


def test_a_folder_continues_a_prompt_where_this_repository_is_not(tmp_path):
    """Every family of our own, in a process that sees nothing of this repository: greedy, as sample.py."""
    families, expected = [family for family in (*FAMILIES, "longhorn,llama") if family not in PARITY], []
    for i, family in enumerate(families):
        lm = tiny("longhorn", pattern=family)
        run(out_dir=make_run(tmp_path / f"run{i}", lm), to=tmp_path / f"hf{i}")
        prompt = torch.arange(40, 52)[None]
        loss = lm(prompt[:, :-1], prompt[:, 1:])[1].item()
        expected.append((loss, sample.generate(lm, prompt, 12, temperature=0)[0].tolist()))
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    folders = [str(tmp_path / f"hf{i}") for i in range(len(families))]
    command = [sys.executable, "-I", "elsewhere.py", *folders]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"})
    assert said.returncode == 0, said.stderr
    for family, line, (loss, written) in zip(families, said.stdout.split("found ")[1:], expected, strict=True):
        backend, nats, *tokens = line.split("\n")[0].split()
        assert backend == "torch" and float(nats) == pytest.approx(loss, rel=1e-5), family
        assert list(map(int, tokens)) == written, family


def test_the_native_kernels_serve_where_the_repository_is_importable(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    lm = tiny()
    run(out_dir=make_run(tmp_path / "run", lm), to=tmp_path / "hf")
    load = lambda: transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    theirs = load()
    assert counting.computed_by(theirs.model) == counting.computed_by(lm) and type(theirs.model).__module__ != "model"
    assert torch.equal(theirs(TOKENS).logits, lm(TOKENS)[0])
    padded = torch.ones_like(TOKENS)
    padded[0, 0] = 0
    with pytest.raises(ValueError, match="padded"):
        theirs.generate(TOKENS, attention_mask=padded, max_new_tokens=2)
    theirs.save_pretrained(tmp_path / "again")  # and back
    assert torch.equal(export.load(tmp_path / "again")(TOKENS)[0], lm(TOKENS)[0])


TEXTS = ["def main():\n    return 'x'  # ok", "naïve  €uro\t\n\n 123,456 don't", " leading", "😀 a\r\n"]


def test_tokenizers_travel(tmp_path):
    """AutoTokenizer gives the tokens of data/tokenizer.py, and its text."""
    byte_level_bpe(tmp_path, TEXTS)
    table = "".join(sorted(set("".join(TEXTS))))
    for kind, text in {"bytes": Text("bytes"), "char": Text("char", table), "gpt2": Text("gpt2", vocab=VOCAB),
                       "hf": Text(f"hf:{tmp_path}")}.items():
        lm = tiny("llama" if kind == "bytes" else "gla")
        make_run(tmp_path / kind, lm, tokenizer=text.name, table=text.table)
        assert run(out_dir=tmp_path / kind, to=tmp_path / f"to_{kind}", vocab=VOCAB).err == ""
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / f"to_{kind}")
        for words in TEXTS:
            ids = theirs(words).input_ids
            assert ids == text.encode(words) and theirs.decode(ids) == words, (kind, words)
        config = export.read_json(tmp_path / f"to_{kind}" / "config.json")
        assert config["eos_token_id"] == theirs.eos_token_id == {"gpt2": 50256, "hf": 0}.get(kind)


def test_a_push_is_the_hubs_own_client(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", lambda self, name, **how: calls.append(name))
    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", lambda self, **how: calls.append(how))
    make_run(tmp_path / "run", tiny())
    run(out_dir=tmp_path / "run", to=tmp_path / "hf", push="me/longhorn")
    assert calls == ["me/longhorn", {"repo_id": "me/longhorn", "folder_path": str(tmp_path / "hf")}]
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", mock.Mock(side_effect=ConnectionError("no\nnetwork")))
    result = run(out_dir=tmp_path / "run", to=tmp_path / "hf", overwrite=True, push="me/longhorn")
    refused(result._replace(out=""), "push me/longhorn: no network")  # the folder is written, and said to be
