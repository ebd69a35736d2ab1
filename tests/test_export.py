"""export.py: weights out to transformers and back, and every family through its own folder.

Norms, biases and A_log are away from their start, so that a weight under a wrong name gives other logits.
"""

import dataclasses
import functools
import json
import os
import pickle
import shutil
import subprocess
import sys
import types
from unittest import mock

import helpers
import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
from helpers import VOCAB, byte_level_bpe, left_behind, make_run, refused, run_program, tracked

import export
import families  # noqa: F401
import sample
from common import errors
from data.tokenizer import Text
from export import from_hf, to_hf
from inspection import counting
from model import FAMILIES
from runtime import checkpoint
from runtime.folder import lock_run_dir

PARITY = {"llama": {"n_head": 4}, "mamba": {"d_state": 5, "d_conv": 3, "dt_rank": 3}, "rwkv4": {}}
TOKENS = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(1))


def start():
    with errors.main_error("export.py", ValueError):
        export.main(sys.argv[1:])


run = functools.partial(run_program, start)


def tiny(family="longhorn", **changes):
    return helpers.tiny(family, **{**PARITY.get(family, {}), **changes})


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
    assert result.code == 0 and result.out.startswith(f"wrote {tmp_path}/hf: {said}; read back by transformers")
    assert sorted(os.listdir(tmp_path / "hf")) == sorted({*export.FILES} - {export.CODE})
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
    assert config["run"].pop("verified")["tokens"] == 24
    assert config["run"] == {"tokenizer": "char", "table": table, "step": 7, "tokens": 700, "data": {"train": "ab"},
                             "weights_crc32": checkpoint.checksum(tmp_path / "folder" / "model.safetensors")}
    if kind not in PARITY:
        assert config["model_type"] == "longhorn" and config["architectures"] == ["LonghornForCausalLM"]
        assert (config["pattern"] or config["model"]) == family
        tokens = {f"{name}_token_id" for name in ("bos", "eos", "pad")}
        assert config.keys() == {*export.SETTINGS, *export.FIXED, *tokens, "dtype", "run"}
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
    lm = tiny(backend="cpu").double()
    config, tensors = to_hf(lm)
    other = from_hf(config, tensors)
    assert "backend" not in config and other.config == dataclasses.replace(lm.config, backend="")
    assert from_hf(*to_hf(tiny(backend="torch"))).config.backend == "torch"  # its loops may have been edited
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
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),  # beside rope_parameters
    ("llama", {"rope_scaling": {"rope_type": "default", "type": "linear"}}, "type 'linear'"),
    ("llama", {"rope_theta": 5e5}, "rope_theta 500000.0"),
    ("llama", {"rope_parameters": {"rope_type": "default", "factor": 8.0}}, "rope_parameters: factor '8.0'"),
    ("llama", {"rope_scaling": [1]}, "rope_scaling [1]"),
    ("llama", {"logit_scale": 0.5}, "logit_scale '0.5' is not supported"),
    ("mamba", {"sliding_window": 4096}, "sliding_window '4096' is not supported"),
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
    export.write(folder / "folder", {}, tensors)
    (folder / "folder" / "config.json").write_text(json.dumps(config))
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


def test_nothing_is_overwritten_unasked(tmp_path, monkeypatch):
    """An export has no __pycache__, and overwrites one."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    make_run(tmp_path / "run", tiny())
    make_run(tmp_path / "other", tiny("gla"))
    to = tmp_path / "folder"
    to.mkdir()  # an empty one is welcome
    assert run(out_dir=tmp_path / "run", to=to).code == 0
    before = {p.name: p.read_bytes() for p in to.iterdir()}
    refused(run(out_dir=tmp_path / "other", to=to), f"{to} is not empty", "--overwrite")
    assert before == {p.name: p.read_bytes() for p in to.iterdir()}
    (to / "__pycache__").mkdir()
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
    left_behind(tmp_path / "imported" / "checkpoint.safetensors").touch()
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


# ----------------------------------------------------------------------------------------------- an export is verified

EDITS = {  # appended to a copy of model.py: the class of transformers has none of these
    "qk_norm": """
plain_attention = attention
def attention(q, k, v, *args, **how):
    return plain_attention(3 * F.normalize(q, dim=-1), 3 * F.normalize(k, dim=-1), v, *args, **how)
""", "qk_norm_with_weights": """
class Normed(Attention):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.q_norm = nn.RMSNorm(self.n)
        self.qkv.register_forward_hook(self.normed)
    def normed(self, module, args, qkv):
        q, kv = qkv[..., :self.H * self.n], qkv[..., self.H * self.n:]
        return torch.cat([self.q_norm(q.unflatten(-1, (self.H, -1))).flatten(-2), kv], -1)
FAMILIES["llama"] = [Normed, SwiGLU]
""", "layer_scale": """
class Scaled(Layer):
    def __init__(self, *args):
        super().__init__(*args)
        self.scale = nn.Parameter(torch.ones(32))
    def forward(self, h, state=None):
        y, state = super().forward(h, state)
        return h + self.scale * (y - h), state
Layer = Scaled
""", "untied_head": """
class Untied(LM):
    def __init__(self, config):
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, config.n_embd)
        self.embed.forward = lambda idx: self.table(idx)
LM = Untied
""", "experts": """
class Experts(nn.Module):
    operator = None
    def __init__(self, config, layer):
        super().__init__()
        self.router = linear(config.n_embd, 3)
        self.experts = nn.ModuleList(SwiGLU(config, layer) for _ in range(3))
    def forward(self, x, state=None):
        share = self.router(x).softmax(-1)
        share = share * (share == share.amax(-1, keepdim=True))
        return sum(share[..., i:i + 1] * expert(x)[0] for i, expert in enumerate(self.experts)), state
    def initial_state(self, batch_size, device):
        return ()
FAMILIES["llama"] = [Attention, Experts]
""", "window": """
plain_attention = attention
def attention(q, k, v, window=None, **how):
    return plain_attention(q, k, v, window=9, **how)
""", "buffers": """
class Buffered(Attention):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.register_buffer("once", torch.tensor(3))  # a whole number
        self.register_buffer("slope", torch.arange(32.0) / 32, persistent=False)
        self.shift = torch.arange(32.0) / 64
    def forward(self, x, state=None):
        y, state = super().forward(x, state)
        return y * self.slope * self.once + self.shift.to(x.device), state
FAMILIES["llama"] = [Buffered, SwiGLU]
"""}


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """edited(text): an LM of this repository's code with `text` at the end of model.py, in a run's folder that
    export.py reads; its class is that of the edited code, and so is what is exported."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))

    def edited(text, family="llama", prepare=lambda lm: None):
        root = tmp_path / "copy"
        for name in tracked():
            if name.endswith((".py", ".cu", ".h")) and not name.startswith(("tests/", "bench/", "experiments/")):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_bytes((export.ROOT / name).read_bytes())
        with open(root / "model.py", "a") as f:
            f.write(text)
        monkeypatch.setattr(export, "ROOT", root)
        namespace = {"__name__": "edited", "__file__": str(root / "edited.py")}
        exec(export.modelling_code(), namespace)
        module = namespace["load_sources"]()[0]
        monkeypatch.setattr(helpers, "LM", module.LM)
        lm = tiny(family)
        prepare(lm)
        make_run(tmp_path / "run", lm)
        monkeypatch.setattr(export, "LM", module.LM)
        monkeypatch.setattr(sample, "load_model", lambda folder: (
            lm, checkpoint.load(os.path.join(folder, "checkpoint.safetensors"))[1]))
        return lm
    return edited


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_llama_leaves_as_itself(name, edited, tmp_path):
    lm = edited(EDITS[name])
    result = run(out_dir=tmp_path / "run", to=tmp_path / "hf")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert "no LlamaForCausalLM: " in lines[0] and "trust_remote_code=True" in lines[0] and len(lines) == 2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    with torch.no_grad():
        close(theirs(TOKENS).logits, lm(TOKENS)[0], 1e-5)
    assert run(check=tmp_path / "hf").code == run(check=tmp_path / "hf", out_dir=tmp_path / "run").code == 0


@pytest.mark.parametrize("family", PARITY)
def test_packed_documents_leave_with_their_code(family, tmp_path, monkeypatch):
    """The class of transformers would read on after the token that ends a document."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    lm, text = tiny(family, documents="pack", end_of_text=10), torch.tensor([[65, 66, 10, 67, 68, 69]])
    said = run(out_dir=make_run(tmp_path / "run", lm), to=tmp_path / "hf").out
    assert f"no {export.ARCHITECTURES[family]}: " in said and "documents=pack" in said
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    close(theirs(text).logits, lm(text)[0], 1e-5)
    make_run(tmp_path / "other", tiny(family, documents="pack"))  # with no such token there is nothing to end
    assert "trust_remote_code" not in run(out_dir=tmp_path / "other", to=tmp_path / "to").out


def test_rwkv4_may_leave_with_code_that_reads_padded_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    lm = tiny("rwkv4")
    said = run(out_dir=make_run(tmp_path / "run", lm), to=tmp_path / "theirs").out
    assert "attention_mask" in said and "--with_code" in said
    said = run(out_dir=tmp_path / "run", to=tmp_path / "ours", with_code=True).out
    assert "trust_remote_code=True" in said and "attention_mask" not in said
    ids, mask = side_by_side(ROWS, "left")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", trust_remote_code=True)
    for logits, row, real in zip(model(ids, attention_mask=mask).logits, ROWS, mask.bool(), strict=True):
        close(logits[real], lm(row[None])[0][0], 1e-5)


def test_every_way_to_import_a_file_of_ones_own_travels(edited, tmp_path):
    """The copy is not on sys.path, as in a process elsewhere."""
    root = tmp_path / "copy"
    (root / "inner").mkdir(parents=True)
    (root / "ones_own.py").write_text("import math, inner.deep\nSCALE = inner.deep.HALF * math.sqrt(4.0)\n")
    (root / "inner" / "__init__.py").touch()
    (root / "inner" / "deep.py").write_text("HALF = 0.5\n")
    edited("""
import ones_own as oo
import inner.deep as deep  # a remark
import math, ones_own
def scaled(m, x):
    import inner.deep, math
    from inner import (
        deep as again,
    )
    import ones_own
    return RMSNorm.unscaled(m, x) * oo.SCALE * inner.deep.HALF * math.sqrt(ones_own.SCALE + deep.HALF + again.HALF)
RMSNorm.unscaled, RMSNorm.forward = RMSNorm.forward, scaled
""", "gla")
    assert run(out_dir=tmp_path / "run", to=tmp_path / "hf").code == 0


def test_extra_state_stays_with_the_run(edited, tmp_path):
    """What a model keeps for its training through get_extra_state, in any form, is no weight."""
    lm = edited("""
class Counting(LM):
    steps = None
    def get_extra_state(self):
        return {"steps": self.steps, "last": torch.ones(3)} if self.steps else None
    def set_extra_state(self, state):
        self.steps = state["steps"]
LM = Counting
""", "gla", lambda lm: setattr(lm, "steps", 5))
    assert run(out_dir=tmp_path / "run", to=tmp_path / "hf").code == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", trust_remote_code=True)
    close(model(TOKENS).logits, lm(TOKENS)[0], 1e-5)
    model.save_pretrained(tmp_path / "again")
    tensors, meta = checkpoint.load(tmp_path / "run" / "checkpoint.safetensors")
    state = checkpoint.unflatten(tensors, meta["skeleton"])["model"]
    assert state["_extra_state"]["steps"] == 5 and checkpoint.misfit(state, type(lm)(lm.config)) is None


def test_a_parameter_with_two_names_stays_one(edited, tmp_path):
    """A norm shared by a layer's branches, and a head that is the embedding: loaded, saved by transformers, loaded."""
    lm = edited("""
class Shared(LM):
    def __init__(self, config):
        super().__init__(config)
        self.model = nn.Linear(32, 256, bias=False)  # the head, under a name that transformers uses as a prefix
        self.model.weight = self.embed.weight
        for layer in self.layers:
            layer.branches[1].norm = layer.branches[0].norm
LM = Shared
""", "gla")
    run(out_dir=tmp_path / "run", to=tmp_path / "hf")
    for folder in (tmp_path / "hf", tmp_path / "again"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        close(model(TOKENS).logits, lm(TOKENS)[0], 1e-5)
        assert model.num_parameters() == sum(p.numel() for p in lm.parameters())
        assert model.model.model.weight is model.model.embed.weight
        model.save_pretrained(tmp_path / "again")
    close(export.load(tmp_path / "hf")(TOKENS)[0], lm(TOKENS)[0], 0)
    assert run(out_dir=tmp_path / "run", to=tmp_path / "half", dtype="bfloat16").code == 0


def test_code_that_changes_nothing_changes_no_class(edited, tmp_path):
    edited("# a remark\n")
    assert "trust_remote_code" not in run(out_dir=tmp_path / "run", to=tmp_path / "hf").out
    assert export.read_json(tmp_path / "hf" / "config.json")["model_type"] == "llama"


def test_without_transformers_nothing_is_said_to_be_theirs(tmp_path, monkeypatch):
    lm = tiny("llama")
    make_run(tmp_path / "run", lm)
    monkeypatch.setattr(export, "has_transformers", lambda: False)
    said = run(out_dir=tmp_path / "run", to=tmp_path / "hf").out
    assert "pip install transformers" in said and "read back by this repository" in said
    assert torch.equal(export.load(tmp_path / "hf")(TOKENS)[0], lm(TOKENS)[0])
    assert run(check=tmp_path / "hf").code == 0


def test_what_cannot_be_read_back_gets_no_name(tmp_path, monkeypatch):
    """A fault in the writer, which a wrong table of names would be."""
    make_run(tmp_path / "run", tiny())
    real = export.as_in_file

    def exchanged(state, config, kind):
        tensors = real(state, config, kind)
        name = "layers.0.branches.0.mixer.dt_bias"
        return {**tensors, name: tensors[name.replace("dt_bias", "D")]}

    monkeypatch.setattr(export, "as_in_file", exchanged)
    refused(run(out_dir=tmp_path / "run", to=tmp_path / "hf"), "logits differ by", "nothing was written")
    assert os.listdir(tmp_path) == ["run"]


def test_check_sees_what_is_no_longer_what_was_exported(tmp_path):
    for family in ("llama", "longhorn"):
        run_dir, to = make_run(tmp_path / family, tiny(family)), tmp_path / f"hf_{family}"
        run(out_dir=run_dir, to=to, dtype="bfloat16")
        assert run(check=to).code == run(check=to, out_dir=run_dir).code == 0
        lm = tiny(family)
        lm.embed.weight.data[5, 3] += 0.5
        other = make_run(tmp_path / f"other_{family}", lm)
        refused(run(check=to, out_dir=other), "not the model that was exported", "differ")
        weights, text = (to / "model.safetensors").read_bytes(), (to / "config.json").read_text()
        (to / "model.safetensors").write_bytes(weights[:-9] + bytes([weights[-9] ^ 64]) + weights[-8:])
        refused(run(check=to), "model.safetensors: damaged")
        tensors = safetensors.torch.load(weights)
        first = next(name for name in tensors if "embed" in name)
        tensors[first][250] *= 2  # intact, but of another model
        checkpoint.save(to / "model.safetensors", tensors, {}, kind="pt")
        refused(run(check=to), "not the model that was exported", "differ")
        (to / "model.safetensors").write_bytes(weights)
        for name in {*os.listdir(to)} - {"model.safetensors", "README.md"}:
            content = (to / name).read_bytes()
            at = content.index(b"e")
            for damaged in (content[:at] + b"f" + content[at + 1:], None, content[:at] + b"\xff" + content[at + 1:]):
                (to / name).unlink() if damaged is None else (to / name).write_bytes(damaged)
                refused(run(check=to), name)
            (to / name).write_bytes(content)
        (to / "config.json").write_text(json.dumps({**json.loads(text), "eos_token_id": 7}))
        refused(run(check=to), "its config.json is missing, damaged or edited")
        (to / "README.md").write_text("mine")
        (to / "config.json").write_text(json.dumps(json.loads(text), indent=1))
        assert run(check=to).code == 0
        for verified in ({}, {"verified": {"tokens": -1}}, {"verified": {"tokens": 10**12}}):
            (to / "config.json").write_text(json.dumps({**json.loads(text), "run": verified}))
            refused(run(check=to), "does not say what to verify")
    refused(run(check=tmp_path / "nowhere"), "nowhere/config.json")
    refused(run(check=to, to=tmp_path / "a", out_dir=run_dir), "--check")


def test_an_import_takes_no_damaged_weights_and_none_of_another_export(tmp_path):
    for name in ("one", "other"):
        lm = tiny("llama")
        lm.embed.weight.data[5, 3] += len(name)
        run(out_dir=make_run(tmp_path / name, lm), to=tmp_path / f"hf_{name}")
    weights = [(tmp_path / f"hf_{name}/model.safetensors") for name in ("one", "other")]
    content = weights[0].read_bytes()
    weights[0].write_bytes(content[:-9] + bytes([content[-9] ^ 64]) + content[-8:])
    refused(run(from_hf=tmp_path / "hf_one", out_dir=tmp_path / "in"), "hf_one/model.safetensors: damaged")
    shutil.copy(weights[1], weights[0])
    refused(run(from_hf=tmp_path / "hf_one", out_dir=tmp_path / "in"), "the weights of another export")
    tensors = safetensors.torch.load(content)
    safetensors.torch.save_file(tensors, weights[0], {"format": "pt"})  # written by transformers, after fine-tuning say
    assert run(from_hf=tmp_path / "hf_one", out_dir=tmp_path / "in").code == 0


def test_the_model_card(tmp_path):
    run_dir = make_run(tmp_path / "run", tiny("gla"))
    run(out_dir=run_dir, to=tmp_path / "hf")
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "license: unknown" in card and "code: unknown" in card and "train sha256 ab" in card
    environment = {"commit": "0123abc", "uncommitted_changes": True, "code": "v2abc", "code_files": {}}
    (run_dir / "config.json").write_text(json.dumps({"environment": environment}))
    run(out_dir=run_dir, to=tmp_path / "hf", license="cc-by-4.0", overwrite=True)
    card = (tmp_path / "hf" / "README.md").read_text()
    for words in ("license: cc-by-4.0\n", "commit 0123abc, v2abc, with uncommitted changes", "700 tokens",
                  "random tokens agree to", 'from_pretrained("hf", trust_remote_code=True)'):
        assert words in card, words
    assert "changed between" not in card
    environment["code_files"] = {"model.py": "0"}
    (run_dir / "config.json").write_text(json.dumps({"environment": environment}))
    run(out_dir=run_dir, to=tmp_path / "hf", overwrite=True)
    assert "changed between training and export" in (tmp_path / "hf" / "README.md").read_text()
    tensors, meta = checkpoint.load(run_dir / "checkpoint.safetensors")
    checkpoint.save(run_dir / "checkpoint.safetensors", tensors, {**meta, "code_versions": ["v2def"]})
    said = run(out_dir=run_dir, to=tmp_path / "hf", overwrite=True).err
    assert f"{run_dir}/config.json is not of this checkpoint: it names code v2abc, the checkpoint v2def" in said
    assert "code: unknown" in (tmp_path / "hf" / "README.md").read_text()


@pytest.mark.parametrize("overwrite", [False, True])
def test_three_exports_at_once_leave_one_whole_model(overwrite, tmp_path, monkeypatch):
    """The first is held where it has written everything but the name, while two others begin and end."""
    runs = [make_run(tmp_path / f"run{i}", tiny(n_layer=i + 1)) for i in range(3)]
    to, results, compare = tmp_path / "to" / "hf", [], export.compare
    export_as = lambda i: monkeypatch.setattr(os, "getpid", lambda: 1000 + i) or results.append(
        run(out_dir=runs[i], to=to, overwrite=overwrite))

    def held(*args):
        monkeypatch.setattr(export, "compare", compare)
        assert [name for name in os.listdir(to.parent) if name.endswith("tmp-1000")] and not to.exists()
        export_as(1)
        export_as(2)
        monkeypatch.setattr(os, "getpid", lambda: 1000)
        return compare(*args)

    monkeypatch.setattr(export, "compare", held)
    export_as(0)
    second, third, first = results
    assert second.code == 0
    for result in (third, first):
        if overwrite:
            assert result.code == 0
        else:
            refused(result, "is not empty", "--overwrite")
    assert os.listdir(to.parent) == ["hf"] and run(check=to, out_dir=runs[0 if overwrite else 1]).code == 0


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
    half, few = load(folder, trust_remote_code=True, dtype=torch.bfloat16), prompt[:, :3]
    assert half(few).logits.dtype == torch.bfloat16, folder
    assert (half(few).logits - model(few).logits).abs().max() < 0.1 * model(few).logits.abs().max(), folder
    tokens = model.generate(prompt, max_new_tokens=12, do_sample=False)
    if folder == sys.argv[1]:
        writer = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
        how, texts = {"max_new_tokens": 4, "do_sample": False, "return_full_text": False}, [text, "a", text[:5]]
        in_batches = [out[0]["generated_text"] for out in writer(texts, batch_size=2, **how)]
        assert in_batches == [writer(t, **how)[0]["generated_text"] for t in texts], folder
    logits = model(prompt, labels=prompt)
    print("found", model.model.config.backend, float(logits.loss), *tokens[0].tolist())
"""


def test_a_folder_continues_a_prompt_where_this_repository_is_not(tmp_path):
    """Every family of our own, in a process that sees nothing of this repository: greedy, as sample.py."""
    own, expected = [family for family in (*FAMILIES, "longhorn,llama") if family not in PARITY], []
    for i, family in enumerate(own):
        lm = tiny("longhorn", pattern=family)
        run(out_dir=make_run(tmp_path / f"run{i}", lm), to=tmp_path / f"hf{i}")
        prompt = torch.arange(40, 52)[None]
        loss = lm(prompt[:, :-1], prompt[:, 1:])[1].item()
        expected.append((loss, sample.generate(lm, prompt, 12, temperature=0)[0].tolist()))
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    folders = [str(tmp_path / f"hf{i}") for i in range(len(own))]
    command = [sys.executable, "-I", "elsewhere.py", *folders]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"})
    assert said.returncode == 0, said.stderr
    for family, line, (loss, written) in zip(own, said.stdout.split("found ")[1:], expected, strict=True):
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
    theirs.save_pretrained(tmp_path / "again")  # and back
    assert torch.equal(export.load(tmp_path / "again")(TOKENS)[0], lm(TOKENS)[0])


@pytest.fixture(scope="module")
def code():
    """The modelling code of an exported folder, as a module."""
    module = types.ModuleType("exported_code")
    module.__file__ = str(export.ROOT / "exported_code.py")
    sys.modules["exported_code"] = module
    exec(export.modelling_code(), vars(module))
    return module


def in_code(code, lm):
    """The LM as transformers sees it."""
    config, tensors = to_hf(lm, kind="longhorn")
    settings = {key: value for key, value in config.items() if key not in (*export.FIXED, "dtype")}
    model = code.LonghornForCausalLM(code.LonghornConfig(**settings)).eval()
    model.model.load_state_dict(tensors)
    return model


def side_by_side(rows, side, padding=300):  # beyond the vocabulary: looking it up would be an error
    """(ids, mask) (B, T) of rows padded on a side."""
    width = max(map(len, rows))
    before = lambda row: width - len(row) if side == "left" else 0
    ids, mask = torch.full((len(rows), width), padding), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, before(row):before(row) + len(row)] = row
        mask[i, before(row):before(row) + len(row)] = 1
    return ids, mask


ROWS = [torch.randint(1, 256, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 4, 14)]
GREEDY = {"do_sample": False, "pad_token_id": 300}
VARIANTS = [*((family, {}) for family in ("longhorn", "mesa", "rwkv4", "llama", "swa", "longhorn,llama")),
            ("rwkv_released", {}),
            *((family, {"documents": "pack", "end_of_text": 115}) for family in ("longhorn", "swa", "longhorn,llama"))]


@pytest.mark.parametrize("family, settings", VARIANTS, ids=str)
def test_rows_of_unequal_length_are_read_as_if_alone(family, settings, code):
    """Padded on either side, with and without a cache: logits, and what is written, are those of the LM on one row."""
    rounding = 3e-5 if family == "rwkv" else 1e-5  # it divides by the deviation of each head, which may be small
    lm = tiny("longhorn", pattern=family, **settings)
    model, rows = in_code(code, lm), [*ROWS[:2], torch.tensor([7, 115, 9, 9])]  # 115 ends a document
    written = [sample.generate(lm, row[None], 4, temperature=0)[0, len(row):] for row in rows]
    for side in ("left", "right"):
        ids, mask = side_by_side(rows, side)
        for use_cache in (False, True):
            with torch.no_grad():
                whole = model(ids, attention_mask=mask, use_cache=use_cache).logits
                last = model(ids, attention_mask=mask, use_cache=use_cache, logits_to_keep=1).logits
            for i, row in enumerate(rows):
                expected = lm(row[None])[0][0]
                close(whole[i, mask[i].bool()], expected, rounding)
                close(last[i, 0], expected[-1], rounding)
            got = model.generate(ids, attention_mask=mask, max_new_tokens=4, use_cache=use_cache, **GREEDY)
            assert torch.equal(got[:, -4:], torch.stack(written)), (side, use_cache)
    for dtype in (torch.bfloat16, torch.float16):
        half, logits = in_code(code, lm.to(dtype)).to(dtype), lm(rows[0][None])[0]
        assert logits.dtype == dtype and torch.equal(half(rows[0][None]).logits, logits) and logits.isfinite().all()
        assert half.generate(ids, attention_mask=mask, max_new_tokens=2, **GREEDY).shape == (3, ids.shape[1] + 2)
    if family == "longhorn,llama":
        beams = model.generate(ids, attention_mask=mask, max_new_tokens=4, num_beams=2, **GREEDY)
        for i, row in enumerate(rows):
            alone = model.generate(row[None], max_new_tokens=4, num_beams=2, **GREEDY)
            assert torch.equal(beams[i, -4:], alone[0, -4:])


@pytest.mark.parametrize("family", ["longhorn", "swa", "longhorn,llama"])
def test_what_else_transformers_asks_of_a_model(family, code):
    """A cache given on, embeddings, any number of logits, tuples, a loss, activations computed again."""
    lm = tiny("longhorn", pattern=family)
    model, idx, (logits, _) = in_code(code, lm), ROWS[2][None], lm(ROWS[2][None])
    first = model.generate(idx, max_new_tokens=5, return_dict_in_generate=True, **GREEDY)
    longer = torch.cat([first.sequences, ROWS[1][None]], 1)
    for _ in range(2):  # the cache is not used up
        second = model.generate(longer, past_key_values=first.past_key_values, max_new_tokens=6, **GREEDY)
        assert torch.equal(second, sample.generate(lm, longer, 6, temperature=0))
    embeds = model.get_input_embeddings()(idx)
    for use_cache in (False, True):
        written = model.generate(inputs_embeds=embeds, max_new_tokens=5, use_cache=use_cache, **GREEDY)
        assert torch.equal(written, first.sequences[:, 14:])
    close(model(inputs_embeds=embeds).logits, logits, 1e-6)
    some = torch.tensor([2, 5])
    for keep, kept in ((1, logits[:, -1:]), (4, logits[:, -4:]), (0, logits), (some, logits[:, some])):
        close(model(idx, logits_to_keep=keep).logits, kept, 1e-6)
        close(model(idx, logits_to_keep=keep, use_cache=True).logits, kept, 1e-5)
    (alone,) = model(idx, return_dict=False)
    assert torch.equal(alone, logits) and len(model(idx, labels=idx, use_cache=True, return_dict=False)) == 3
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], idx[0, 1:])
    torch.testing.assert_close(model(idx, labels=idx).loss, loss)
    torch.testing.assert_close(model(idx, labels=idx, num_items_in_batch=26).loss, loss / 2)

    def gradients():
        model.zero_grad()
        calls = []
        hooks = [layer.branches[0].register_forward_hook(lambda *_: calls.append(1)) for layer in model.model.layers]
        model(idx, labels=idx).loss.backward()
        for hook in hooks:
            hook.remove()
        return len(calls), [p.grad.clone() for p in model.parameters()]

    model.train()
    once, plain = gradients()
    model.gradient_checkpointing_enable()
    twice, again = gradients()
    model.gradient_checkpointing_disable()
    assert (once, twice, gradients()[0]) == (2, 4, 2) and all(map(torch.equal, plain, again))


TEXTS = ["def main():\n    return 'x'  # ok", "naïve  €uro\t\n\n 123,456 don't", " leading", "😀 a\r\n", "\0ÿĀ\x7f"]


def test_tokenizers_travel(tmp_path):
    """AutoTokenizer gives the tokens of data/tokenizer.py, and its text. Truncation, padding and a token at the start,
    as transformers leaves them in tokenizer.json, are for neither: the model never saw them."""
    byte_level_bpe(tmp_path, TEXTS)
    saved = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    saved.enable_truncation(5)
    saved.enable_padding(length=8)
    start = saved.id_to_token(0)
    saved.post_processor = tokenizers.processors.TemplateProcessing(f"{start} $A", special_tokens=[(start, 0)])
    saved.save(str(tmp_path / "tokenizer.json"))
    table = "".join(sorted(set("".join(TEXTS))))
    for kind, text in {"bytes": Text("bytes"), "char": Text("char", table), "gpt2": Text("gpt2", vocab=VOCAB),
                       "hf": Text(f"hf:{tmp_path}")}.items():
        lm = tiny("llama" if kind == "bytes" else "gla")
        make_run(tmp_path / kind, lm, tokenizer=text.name, table=text.table)
        assert "no tokenizer" not in run(out_dir=tmp_path / kind, to=tmp_path / f"to_{kind}", vocab=VOCAB).err
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / f"to_{kind}")
        for words in TEXTS:
            ids = theirs(words).input_ids
            assert ids == text.encode(words) and theirs.decode(ids) == words, (kind, words)
        config = export.read_json(tmp_path / f"to_{kind}" / "config.json")
        end = {"gpt2": 50256, "hf": 0}.get(kind)
        assert config["eos_token_id"] == theirs.eos_token_id == end
        padding = {"bytes": 255, "char": len(table)}.get(kind, end)  # LLaMA has 256 rows; no text has byte 255
        assert theirs.pad_token_id == padding and config["pad_token_id"] == (None if kind == "bytes" else padding)
        assert theirs(["x", TEXTS[1]], padding=True).input_ids[0][-1] == padding


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
