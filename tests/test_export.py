"""export.py: weights go to transformers and back, and every family is exported with its code and imported again.

Norms, biases and A_log differ from their initial values, so that a weight under a wrong name changes the logits.
"""

import dataclasses
import functools
import json
import os
import pickle
import re
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
from helpers import ROOT, VOCAB, byte_level_bpe, copied_tree, left_behind, make_run, refused, run_program, table
from torch.nn.utils.rnn import pad_sequence

import export
import families  # noqa: F401
import sample
from bench import step
from common import errors
from data.tokenizer import Text, learn_bpe
from export import to_hf
from inspection import counting
from model import FAMILIES, LM, ModelConfig
from runtime import checkpoint
from runtime.folder import lock_run_dir
from runtime.records import read_json

PARITY = {"llama": {"n_head": 4}, "mamba": {"d_state": 5, "d_conv": 3, "dt_rank": 3}}
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


@pytest.fixture
def leave(tmp_path):
    """leave(lm, how, **meta): exports a run of this model and returns what was printed; run and export are in `run` and
    `hf`."""
    def leave(lm, how=(), **meta):
        return run(out_dir=make_run(tmp_path / "run", lm, **meta), to=tmp_path / "hf", **dict(how))
    return leave


def read(folder):
    """The model that transformers loads from the folder, with the code in it."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


def folder_of(folder, config, tensors):
    """A folder as an export leaves it, without a record of its logits."""
    folder.mkdir(exist_ok=True)
    export.write_files(folder, config, tensors)
    return folder


def theirs_at_random(kind, **changes):
    torch.manual_seed(3)
    small = {"vocab_size": 256, "hidden_size": 48, "num_hidden_layers": 4, "bos_token_id": None, "eos_token_id": None}
    if "mamba" in kind:
        small |= {"state_size": 6, "conv_kernel": 2, "num_heads": 6, "head_dim": 16}
    elif kind not in ("rwkv", "gpt2"):
        small |= {"num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 150, "rms_norm_eps": 1e-5,
                  "max_position_embeddings": 40}
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **{
        **small, **changes}))
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.empty_like(p).uniform_(-0.2, 0.2))
    return theirs.eval()


# Models as docs/adding-a-model.md names them, with their model_type and config.
PUBLISHED = """
LLaMA                           llama    {"tie_word_embeddings": true}
LLaMA, eps 1e-6                 llama    {"tie_word_embeddings": true, "rms_norm_eps": 1e-6}
LLaMA, untied                   llama    {}
LLaMA, grouped queries          llama    {"num_key_value_heads": 1}
LLaMA, attention bias           llama    {"attention_bias": true}
LLaMA, gelu                     llama    {"hidden_act": "gelu"}
LLaMA 3, llama3 rope            llama    {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "llama3", "factor":
 8.0, "rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 20}}
SmolLM-135M                     llama    {"tie_word_embeddings": true, "num_key_value_heads": 1}
SmolLM-1.7B                     llama    {"tie_word_embeddings": true}
Qwen2                           qwen2    {"num_key_value_heads": 1, "rope_parameters": {"rope_type": "default",
 "rope_theta": 1e6}}
Qwen3                           qwen3    {"num_key_value_heads": 1, "head_dim": 16, "rope_parameters": {"rope_type":
 "default", "rope_theta": 1e6}}
Mistral                         mistral  {"num_key_value_heads": 1, "sliding_window": 9}
Mamba                           mamba    {"expand": 3}
Mamba, an odd number of layers  mamba    {"num_hidden_layers": 3}
Mamba-2                         mamba2   {}
FalconMamba                     falcon_mamba   {}
Gemma                           gemma    {"num_key_value_heads": 1, "head_dim": 16}
OLMo                            olmo     {}
RWKV-4                          rwkv     {}
GPT-2                           gpt2     {"n_head": 3}
"""
PUBLISHED = {name: (kind, json.loads("".join(config))) for name, kind, *config in table(PUBLISHED)}
PAGE = (ROOT / "docs" / "adding-a-model.md").read_text()
TOLD = dict(re.findall(r"^\| (.*?) \| ((?:imported|refused).*?) \|$", PAGE, re.M))


@pytest.mark.parametrize("published", {**PUBLISHED, **TOLD})
def test_published_models_become_ours_or_are_refused_as_the_page_says(published, tmp_path):
    """transformers saves them in several files. They are imported and sampled from, then exported again with the same
    tensors."""
    kind, changes = PUBLISHED[published]
    theirs, what, words = theirs_at_random(kind, **changes), *TOLD[published].partition(" ")[::2]
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists()
    result = run(from_hf=tmp_path / "hf", out_dir=tmp_path / "run", tokenizer="bytes")
    words = re.findall("`(.*?)`", words)
    if what == "refused:":
        refused(result, tmp_path / "hf", *words)
        assert words and not (tmp_path / "run").exists()
        return
    lm, meta = sample.load_model(tmp_path / "run")
    assert f"{kind}, {sum(p.numel() for p in lm.parameters()):,} parameters; next: python sample.py" in result.out
    assert all(f"{word}={getattr(lm.config, word)}" in result.out for word in ("vocab_size", *words))
    assert meta["tokenizer"] == "bytes" and lm.config.model == kind
    with torch.no_grad():
        close(lm(TOKENS)[0], theirs(TOKENS).logits, 1e-5)
    written = theirs.generate(TOKENS, max_new_tokens=40, do_sample=False)
    assert torch.equal(sample.generate(lm, TOKENS, 40, temperature=0), written)  # no token ends it
    there = dict(theirs.named_parameters())
    torch.testing.assert_close(to_hf(lm)[1], there, rtol=0, atol=0)


def loaded_by_its_class(folder, kind):
    """A LLaMA or Mamba loaded by transformers: nothing is missing, left over or of another shape."""
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"  # without it older versions of transformers refuse the file
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert type(model).__name__ == export.ARCHITECTURES[kind] and model.dtype == torch.float32
    return model


@pytest.mark.parametrize("family", ["longhorn", *PARITY, "longhorn*2,llama", "mamba*2", ",".join(FAMILIES)],
                         ids=lambda x: x[:20])
def test_an_exported_run_is_imported_as_the_same_model(family, leave, tmp_path):
    """The tokenizer is the same too, and the folder's config says what is in the folder."""
    lm = tiny(family)
    if family not in FAMILIES:
        lm = tiny("longhorn", pattern=family, n_layer=max(3, family.count(",") + 1))
    name = "char"
    table = "abc\n"
    to = tmp_path / "hf"
    if family == "longhorn":  # as `make train`
        name = "bpe:260"
        table = learn_bpe(["abc " * 9], "260")
    said = leave(lm, tokenizer=name, table=table).out
    assert f"{sum(p.numel() for p in lm.parameters()):,} parameters" in said
    assert "logits on 24 random tokens agree to" in said  # block_size
    theirs = family in PARITY or family == "mamba*2"
    assert theirs == ("trust_remote_code" not in said)
    config = read_json(to / "config.json")
    verified = config["run"]["verified"]
    last = lm(export.random_tokens(256, 24))[0][0, -1]  # as many as block_size
    close(torch.tensor(verified["logits"]), torch.cat([last[::4], last.logsumexp(0)[None]]), 1e-4)
    assert verified["tokens"] == 24
    if theirs:
        close(loaded_by_its_class(to, lm.config.families[0])(TOKENS).logits, lm(TOKENS)[0], 1e-5)
    else:
        assert config["model_type"] == "longhorn" and (config["pattern"] or config["model"]) == family
    run(from_hf=to, out_dir=tmp_path / "imported")
    again, meta = sample.load_model(tmp_path / "imported")
    assert [meta[note] for note in export.NOTES] == [name, table, 7, 700, {"train": "ab"}]
    assert again.config.families == lm.config.families
    if "mamba" in lm.config.families:  # it has no heads
        assert again.config.block_size == lm.config.block_size
    else:
        ours = {"model": lm.config.model, "pattern": lm.config.pattern}
        assert dataclasses.replace(again.config, **ours) == lm.config
    torch.testing.assert_close(again.state_dict(), lm.state_dict(), rtol=0, atol=0)
    close(again(TOKENS)[0], lm(TOKENS)[0], 0)


@pytest.mark.parametrize("backend, imported", [("cpu", ""), ("torch", "torch")])  # torch's loops may have been edited
def test_the_backend_of_one_machine_is_not_exported(backend, imported, tmp_path):
    lm = tiny(backend=backend)
    other = export.load(folder_of(tmp_path / "folder", *to_hf(lm)))
    assert other.config == dataclasses.replace(lm.config, backend=imported)


@pytest.mark.parametrize("family, dtype", [("llama", "bfloat16"), ("longhorn", "float16")])
def test_an_export_has_the_chosen_dtype_and_gpt2s_end_of_a_text(family, dtype, leave, tmp_path):
    lm = tiny(family)
    to = tmp_path / "hf"
    leave(lm, {"dtype": dtype}, tokenizer="gpt2")
    written = safetensors.torch.load_file(to / "model.safetensors")
    kind = getattr(torch, dtype)
    assert {t.dtype for t in written.values()} == {kind}
    loaded = export.load(to)
    for name, p in lm.named_parameters():
        assert torch.equal(loaded.get_parameter(name), p.to(kind).float())
    if family == "llama":
        theirs = transformers.AutoModelForCausalLM.from_pretrained(to, dtype="auto")
        assert theirs.dtype == kind
        assert theirs.generation_config.eos_token_id == theirs.generation_config.bos_token_id == 50256


def test_float16_that_overflows_is_refused(leave, tmp_path):
    lm = tiny()
    lm.embed.weight.data[3, 4] = 7e4
    refused(leave(lm, {"dtype": "float16"}), "embed.weight", "bfloat16")
    assert os.listdir(tmp_path) == ["run"]


# A family, changes of its exported config.json, and words of the refusal, if it is refused.
OTHERS = """
llama     {"intermediate_size": 80}             intermediate_size=80
llama     {"hidden_act": "gelu"}                hidden_act=gelu
llama     {"num_hidden_layers": 1000000000}     at most 1024
llama     {"num_hidden_layers": 3}              missing keys
llama     {"num_hidden_layers": 1}              unexpected keys
llama     {"quantization_config": {"bits": 4}}  loaded
llama     {"model_type": ["llama"]}             no valid model
llama     {"model_type": "mistral"}
mamba     {"use_bias": true}                    in_proj.bias
mamba     {"num_hidden_layers": 3}              backbone.layers.2.mixer.D
longhorn  {"n_embd": 64}                        embed.weight is (256, 32)
longhorn  {"n_layer": 1}                        does not exist
longhorn  {"pattern": 5}                        not imported
longhorn  {"as_released": true}                 no longer a setting
longhorn  {"norm_eps": 0.0}                     norm_eps
deltanet  {"normalize_keys": false}
deltanet  {"step": "exact"}
swa       {"window": 3}
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """exported(family): the folder of an export."""
    @functools.cache
    def exported(family):
        folder = tmp_path_factory.mktemp(family)
        run(out_dir=make_run(folder / "run", tiny(family)), to=folder / "to")
        return folder / "to"
    return exported


@pytest.mark.parametrize("family, changes, words", [(*row[:2], row[2:]) for row in table(OTHERS)], ids=str)
def test_an_edited_config_is_refused_but_believed_without_its_record(exported, family, changes, words, tmp_path):
    folder = shutil.copytree(exported(family), tmp_path / "folder")
    config = {**read_json(folder / "config.json"), **json.loads(changes)}
    (folder / "config.json").write_text(json.dumps(config))
    refused(run(from_hf=folder, out_dir=tmp_path / "out"), folder, "config.json is missing, damaged or edited")
    del config["run"]
    (folder / "config.json").write_text(json.dumps(config))
    result = run(from_hf=folder, out_dir=tmp_path / "out")
    if words:
        refused(result, folder, *words)
    assert (tmp_path / "out").exists() == (not words) == (result.code == 0)


def test_quantised_weights_are_refused(tmp_path):
    config, tensors = to_hf(tiny())
    tensors["embed.weight"] = tensors["embed.weight"].to(torch.int8)
    quantised = folder_of(tmp_path / "int8", config, tensors)
    refused(run(from_hf=quantised, out_dir=tmp_path / "out"), "model.safetensors: the tensor embed.weight is I8")
    beside = folder_of(tmp_path / "beside", *to_hf(tiny()))  # transformers reads model.safetensors alone, too
    shutil.copy(quantised / "model.safetensors", beside / "model-00001-of-00002.safetensors")
    assert run(from_hf=beside, out_dir=tmp_path / "out").code == 0


def test_factors_that_change_nothing_are_no_reason_to_refuse():
    there = transformers.GraniteConfig(num_hidden_layers=1, residual_multiplier=0.3)
    with torch.device("meta"):
        model = transformers.GraniteForCausalLM(there)
    assert export.beyond(there, model, "llama") == ["residual_multiplier=0.3"]


def test_nothing_is_overwritten_unasked(tmp_path, monkeypatch):
    """With --overwrite, the second export replaces all of the first one."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    make_run(tmp_path / "run", tiny())
    make_run(tmp_path / "other", tiny("llama"))
    to = tmp_path / "folder"
    to.mkdir()  # an empty folder may be used
    assert run(out_dir=tmp_path / "run", to=to).code == 0
    refused(run(out_dir=tmp_path / "other", to=to), f"{to} is not empty", "--overwrite")
    assert export.load(to).config.model == "longhorn"
    (to / "__pycache__").mkdir()
    assert run(out_dir=tmp_path / "other", to=to, overwrite="true").code == 0
    assert export.load(to).config.model == "llama"
    assert sorted(os.listdir(to)) == sorted({*export.FILES} - {export.CODE})
    (to / "thesis.tex").write_text("my only copy")
    refused(run(out_dir=tmp_path / "run", to=to, overwrite="true"), "thesis.tex", "never overwritten")
    assert (to / "thesis.tex").read_text() == "my only copy"
    assert sorted(os.listdir(tmp_path)) == ["folder", "other", "run"]


def test_an_import_spares_a_training_run_and_cannot_be_resumed(leave, tmp_path):
    leave(tiny("llama"))
    into = {"from_hf": tmp_path / "hf", "out_dir": tmp_path / "imported"}
    assert run(**into).code == 0
    words = rf"imported from {tmp_path}/hf, so it has weights .*another out_dir$"
    with pytest.raises(checkpoint.CheckpointError, match=words):
        checkpoint.load_first(checkpoint.candidates(tmp_path / "imported"))  # as train.py --resume does
    refused(run(**into), "imported is not empty", "--overwrite")
    left_behind(tmp_path / "imported" / "checkpoint.safetensors").touch()
    assert run(**into, overwrite="true").code == 0
    with lock_run_dir(tmp_path / "imported"):
        refused(run(**into, overwrite="true"), "another run is writing to")
    (tmp_path / "imported" / "log.jsonl").touch()
    refused(run(**into, overwrite="true"), "log.jsonl", "never overwritten")


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    to = tmp_path / "folder"
    make_run(tmp_path / "run", tiny())
    for there in (False, True):
        if there:
            run(out_dir=make_run(tmp_path / "first", tiny("gla")), to=to)
        entries = sorted(os.listdir(tmp_path))
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "save", mock.Mock(side_effect=OSError(28, "No space left on device")))
            refused(run(out_dir=tmp_path / "run", to=to, overwrite="true"), "folder", "No space left")
        assert sorted(os.listdir(tmp_path)) == entries
    assert export.load(to).config.model == "gla"
    (tmp_path / ".folder.export.tmp" / "more").mkdir(parents=True)  # left by a kill: the next export deletes it
    run(out_dir=tmp_path / "run", to=to, overwrite="true")
    assert sorted(os.listdir(tmp_path)) == entries and export.load(to).config.model == "longhorn"


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('unpickled')",)


def test_files_that_are_missing_or_damaged_are_refused(leave, tmp_path):
    """The weights of another export are refused too. Weights that transformers has saved, for example after
    fine-tuning, may be imported."""
    hf = tmp_path / "hf"
    into = {"from_hf": tmp_path / "hf", "out_dir": tmp_path / "in"}
    leave(tiny("llama"))
    weights = (hf / "model.safetensors").read_bytes()
    text = (hf / "config.json").read_text()
    for damage in (text[:-5], "[1]", "[" * 100000):
        (hf / "config.json").write_text(damage)
        refused(run(**into), f"{hf}/config.json", "is damaged", "hf download")
    (hf / "config.json").write_text(text)
    flipped = weights[:-9] + bytes([weights[-9] ^ 64]) + weights[-8:]
    for damage, words in ((weights[:100], "not imported"), (weights[:-1], "model.safetensors: "),
                          (flipped, "model.safetensors: damaged"), (pickle.dumps(Bomb()), "not imported")):
        (hf / "model.safetensors").write_bytes(damage)
        refused(run(**into), hf, words)
    (hf / "model.safetensors").rename(hf / "pytorch_model.bin")
    refused(run(**into), "no weights to read", "pytorch_model.bin", "not opened")
    tensors = safetensors.torch.load(weights)
    tensors["model.norm.weight"][5] += 0.5
    checkpoint.save(hf / "model.safetensors", tensors, {}, kind="pt")
    refused(run(**into), "the weights of another export")
    assert not (tmp_path / "in").exists()
    safetensors.torch.save_file(tensors, hf / "model.safetensors", {"format": "pt"})
    assert run(**into).code == 0


# ----------------------------------------------------------------------------------------------- an export is verified

EDITS = {  # appended to a copy of model.py: the class of transformers lacks them all
    "untied_head": """
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
def edited(leave, tmp_path, monkeypatch):
    """edited(text): an LM of this repository's code with `text` at the end of model.py, and what its export says."""
    def edited(text, family="llama", prepare=lambda lm: None):
        root = copied_tree(tmp_path / "copy", model=lambda code: code + text)
        monkeypatch.setattr(export, "ROOT", root)
        namespace = {"__name__": "edited", "__file__": str(root / "edited.py")}
        exec(export.modelling_code(), namespace)
        module = namespace["load_sources"]()[0]
        monkeypatch.setattr(helpers, "LM", module.LM)
        lm = tiny(family)
        prepare(lm)
        monkeypatch.setattr(export, "LM", module.LM)
        monkeypatch.setattr(sample, "load_model", lambda folder: (
            lm, checkpoint.load(os.path.join(folder, "checkpoint.safetensors"))[1]))
        result = leave(lm)
        assert result.code == 0, result.err
        return lm, result.out
    return edited


getsource = functools.cache(export.inspect.getsource)


@functools.cache
def modelling_code(root, code=export.modelling_code):
    return code()


@pytest.fixture(autouse=True)
def as_committed(tmp_path, monkeypatch):
    """Replaces the hashes in export.py, which one test checks, and makes transformers copy code to the test's folder.
    Sources are read once: Python would parse a file anew for each class in it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(export.inspect, "getsource", getsource)
    monkeypatch.setattr(export, "modelling_code", lambda: modelling_code(export.ROOT))
    monkeypatch.setattr(export, "COMMITTED", {family: export.source_hash(tiny(family)) for family in PARITY})


def test_an_edit_of_what_llama_or_mamba_runs_is_compared_with_transformers(monkeypatch):
    """If all other tests here pass, copy the new hashes to export.COMMITTED."""
    now = export.COMMITTED
    monkeypatch.undo()
    assert export.COMMITTED == now


@pytest.mark.parametrize("line, instead, edited_families", [
    ("            h = h + y\n", "            h = 1e4 * torch.tanh((h + y) / 1e4)\n", {"llama", "mamba"}),
    ("(F.silu)\n", "(lambda a: F.silu(a).clamp(max=1e4))\n", {"llama"}),
    ("        v = heads(self.v(x))", "        v = heads(2 * self.v(x))", set()),
    ("            h = h + y\n", "            # a remark\n            h = h + y  # and another\n", set())],
    ids=["Layer", "SwiGLU", "GLA", "comments"])
def test_an_edit_is_seen_in_the_source_whatever_the_logits(line, instead, edited_families, monkeypatch):
    """Two edits are caps that no activation reaches, in the residual stream and in an MLP. One is of another family,
    and one only adds comments."""
    source = export.inspect.getsource
    assert line in (ROOT / "model.py").read_text()
    monkeypatch.setattr(export.inspect, "getsource", lambda thing: source(thing).replace(line, instead))
    assert {kind for kind in PARITY if export.source_hash(tiny(kind)) != export.COMMITTED[kind]} == edited_families
    monkeypatch.setattr("model.Layer.forward", lambda *args: None)
    assert not {export.source_hash(tiny(kind)) for kind in PARITY} & {*export.COMMITTED.values()}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_llama_is_exported_with_its_code(name, edited, tmp_path):
    lm, said = edited(EDITS[name])
    assert "no LlamaForCausalLM: the source of its classes is not the committed one" in said
    close(read(tmp_path / "hf")(TOKENS).logits, lm(TOKENS)[0], 1e-5)


def test_a_llama_of_packed_documents_is_exported_with_its_code(leave, tmp_path):
    """The class of transformers would not stop at the token that ends a document."""
    lm = tiny("llama", documents="pack", end_of_text=10)
    text = torch.tensor([[65, 66, 10, 67, 68, 69]])
    said = leave(lm).out
    assert "no LlamaForCausalLM: " in said and "documents=pack" in said
    close(read(tmp_path / "hf")(text).logits, lm(text)[0], 1e-5)
    make_run(tmp_path / "other", tiny("llama", documents="pack"))  # without such a token no document ends
    assert "trust_remote_code" not in run(out_dir=tmp_path / "other", to=tmp_path / "to").out


def test_files_of_ones_own_are_exported_however_they_are_imported(edited, tmp_path):
    """The copy is not on sys.path, as in a process on another machine."""
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


def test_extra_state_stays_with_the_run(edited, tmp_path):
    """State that a model keeps for training through get_extra_state, in any form, is not a weight."""
    lm, _ = edited("""
class Counting(LM):
    steps = None
    def get_extra_state(self):
        return {"steps": self.steps, "last": torch.ones(3)} if self.steps else None
    def set_extra_state(self, state):
        self.steps = state["steps"]
LM = Counting
""", "gla", lambda lm: setattr(lm, "steps", 5))
    model = read(tmp_path / "hf")
    close(model(TOKENS).logits, lm(TOKENS)[0], 1e-5)
    model.save_pretrained(tmp_path / "again")


def test_a_parameter_with_two_names_stays_one(edited, tmp_path):
    """A layer's branches share a norm, and the head is the embedding. transformers loads them, saves them, and loads
    them again."""
    lm, _ = edited("""
class Shared(LM):
    def __init__(self, config):
        super().__init__(config)
        self.model = nn.Linear(32, 256, bias=False)  # the head, under a name that transformers uses as a prefix
        self.model.weight = self.embed.weight
        for layer in self.layers:
            layer.branches[1].norm = layer.branches[0].norm
LM = Shared
""", "gla")
    for folder in (tmp_path / "hf", tmp_path / "again"):
        model = read(folder)
        close(model(TOKENS).logits, lm(TOKENS)[0], 1e-5)
        assert model.num_parameters() == sum(p.numel() for p in lm.parameters())
        assert model.model.model.weight is model.model.embed.weight
        model.save_pretrained(tmp_path / "again")


def test_without_transformers_nothing_is_done(leave, tmp_path, monkeypatch):
    leave(tiny("llama"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused(run(from_hf=tmp_path / "hf", out_dir=tmp_path / "in"), "pip install --group test")
    refused(run(out_dir=tmp_path / "run", to=tmp_path / "to"), "pip install --group test")
    assert sorted(os.listdir(tmp_path)) == ["hf", "run"]


@pytest.mark.parametrize("times, refusal", [(1 + 3e-4, "logits differ by 3e-04 of the largest"), (1 + 3e-5, None),
                                            (float("nan"), "logits are not finite: look for NaN")])
def test_an_export_that_reads_back_differently_is_deleted(times, refusal, leave, tmp_path, monkeypatch):
    """Logits may differ by a ten-thousandth of the largest one, which is more than kernels differ by."""
    real = export.write_files
    monkeypatch.setattr(export, "write_files", lambda folder, config, tensors, files: real(
        folder, config, {**tensors, "norm.weight": tensors["norm.weight"] * times}, files))
    result = leave(tiny())
    if refusal:
        refused(result, refusal, "nothing was written")
    assert sorted(os.listdir(tmp_path)) == (["run"] if refusal else ["hf", "run"])


def test_a_width_keeps_the_usual_multiple_where_it_can():
    assert [export.mlp_multiple(hidden, 160) for hidden in (512, 450)] == [256, 450]


def test_the_check_uses_the_same_tokens_in_every_version():
    assert export.random_tokens(256, 5).tolist() == [[172, 47, 117, 192, 67]]


@pytest.mark.parametrize("family", ["llama", "longhorn"])
def test_check_finds_any_change_of_an_exported_folder(family, leave, tmp_path):
    to = tmp_path / "hf"
    leave(tiny(family), {"dtype": "bfloat16"})
    weights = (to / "model.safetensors").read_bytes()
    text = (to / "config.json").read_text()
    (to / "model.safetensors").write_bytes(weights[:-1])
    refused(run(check=to), "model.safetensors: ")
    tensors = safetensors.torch.load(weights)
    tensors["embed.weight" if family == "longhorn" else "model.embed_tokens.weight"][250] *= 2
    checkpoint.save(to / "model.safetensors", tensors, {}, kind="pt")  # intact, but of another model
    refused(run(check=to), "not the model that was exported", "differ")
    (to / "model.safetensors").write_bytes(weights)
    for name in {*os.listdir(to)} - {"model.safetensors", "README.md", "config.json"}:
        content = (to / name).read_bytes()
        (to / name).write_bytes(content + b" ")
        refused(run(check=to), name)
        (to / name).unlink()
        refused(run(check=to), name)
        (to / name).write_bytes(content)
    for key, value, words in (("eos_token_id", 7, "its config.json is missing, damaged or edited"),
                              ("run", {}, "does not say what to verify")):
        (to / "config.json").write_text(json.dumps({**json.loads(text), key: value}))
        refused(run(check=to), words)
    (to / "README.md").write_text("mine")
    (to / "config.json").write_text(json.dumps(json.loads(text), indent=1))
    apart = re.search("logits agree to (.*) with those at the export", run(check=to).out)[1]
    assert float(apart) <= 1e-6  # not 0: a CPU's products may depend on where the memory begins


def test_the_model_card_names_the_license_the_code_and_the_training(tmp_path):
    run_dir = make_run(tmp_path / "run", lm := tiny("gla"), step=7000, tokens=700_000)
    environment = {"commit": "0123abc", "uncommitted_changes": True, "code": "v2abc"}
    count = sum(p.numel() for p in lm.parameters())
    for edited, end in ({}, ""), ({"model.py": "0"}, "; changed between training and export"):
        (run_dir / "config.json").write_text(json.dumps({"environment": {**environment, "code_files": edited}}))
        run(out_dir=run_dir, to=tmp_path / "hf", license="cc-by-4.0", overwrite=True)
        card = (tmp_path / "hf" / "README.md").read_text()
        for words in ('AutoTokenizer.from_pretrained("hf", trust_remote_code=True)', "license: cc-by-4.0\n",
                      f"commit 0123abc, v2abc, with uncommitted changes{end}\n",
                      f"gla: {count:,} parameters in float32, trained for 7,000 steps on 700,000 tokens"):
            assert words in card, words


@pytest.mark.parametrize("family", export.ARCHITECTURES)
def test_the_benchmarks_peers_have_our_parameters_and_learn(family):
    config = ModelConfig(model=family, n_layer=2, n_embd=32, n_head=2, block_size=16, vocab_size=64)
    peer = step.Trial({"config": config, "peer": "transformers", "batch_size": 2, "device": "cpu", "dtype": "float32",
                       "compile": False, "graphs": False, "threads": 1})
    total = sum(p.numel() for group in peer.optimizer.param_groups for p in group["params"])
    assert total == pytest.approx(counting.parameter_count(LM(config))["total"], rel=0.01)
    assert peer.step() > peer.step()


# --------------------------------------------------------------------- in transformers, away from this repository

ELSEWHERE = """
import importlib.util
import sys
import torch
sys.modules["flash_attn"] = None  # transformers lets out any error of its import
import transformers
assert importlib.util.find_spec("model") is None, sys.path
prompt = torch.arange(40, 52)[None]
for folder in sys.argv[1:]:
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, report = load(folder, trust_remote_code=True, output_loading_info=True)
    assert not any(report.values()), report
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
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


def test_a_folder_continues_a_prompt_without_this_repository(tmp_path):
    """Longhorn and a layer of every family continue it greedily, as sample.py does. The process cannot see this
    repository."""
    patterns = ["longhorn*2", ",".join(FAMILIES)]
    expected = []
    for i, pattern in enumerate(patterns):
        lm = tiny("longhorn", pattern=pattern, n_layer=len(FAMILIES) if i else 2)
        run(out_dir=make_run(tmp_path / f"run{i}", lm), to=tmp_path / f"hf{i}")
        prompt = torch.arange(40, 52)[None]
        loss = lm(prompt[:, :-1], prompt[:, 1:])[1].item()
        expected.append((loss, sample.generate(lm, prompt, 12, temperature=0)[0].tolist()))
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    folders = [str(tmp_path / f"hf{i}") for i in range(2)]
    command = [sys.executable, "-I", "elsewhere.py", *folders]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"})
    assert said.returncode == 0 and "pad_token_id" not in said.stderr, said.stderr
    for pattern, line, (loss, written) in zip(patterns, said.stdout.split("found ")[1:], expected, strict=True):
        backend, nats, *tokens = line.split("\n")[0].split()
        assert backend == "torch" and float(nats) == pytest.approx(loss, rel=1e-5), pattern
        assert list(map(int, tokens)) == written, pattern


def test_native_kernels_run_where_the_repository_is_importable(leave, tmp_path):
    lm = tiny()
    leave(lm)
    theirs = read(tmp_path / "hf")
    assert counting.computed_by(theirs.model) == counting.computed_by(lm) and type(theirs.model).__module__ != "model"
    close(theirs(TOKENS).logits, lm(TOKENS)[0], 1e-6)
    theirs.save_pretrained(tmp_path / "again")  # and back
    close(export.load(tmp_path / "again")(TOKENS)[0], lm(TOKENS)[0], 1e-6)


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


ROWS = [torch.randint(1, 256, (n,), generator=torch.Generator().manual_seed(n)) for n in (9, 4, 14)]
GREEDY = {"do_sample": False, "pad_token_id": 300}
ALONE = "longhorn,mesa,rwkv4 llama,swa longhorn,llama rwkv_released longhorn longhorn,llama,swa".split()


@pytest.mark.parametrize("family", ALONE)
def test_rows_of_unequal_length_are_read_as_if_alone(family, code):
    """Rows are padded on either side, with and without a cache. The logits and the generated tokens equal the LM's for
    each row alone."""
    rounding = 3e-5 if family == "rwkv_released" else 1e-5  # it divides by each head's deviation, which may be small
    settings = {"documents": "pack", "end_of_text": 115} if family in ALONE[-2:] else {}
    lm = tiny("longhorn", pattern=family, n_layer=max(2, family.count(",") + 1), **settings)
    model = in_code(code, lm)
    rows = [*ROWS[:2], torch.tensor([7, 115, 9, 9])]  # 115 ends a document
    written = [sample.generate(lm, row[None], 4, temperature=0)[0, len(row):] for row in rows]
    for side in ("left", "right"):
        padded = functools.partial(pad_sequence, batch_first=True, padding_side=side)
        ids = padded(rows, padding_value=300)  # beyond the vocabulary: looking it up would be an error
        mask = padded([torch.ones_like(row) for row in rows])
        for use_cache in (False, True):
            with torch.no_grad():
                whole = model(ids, attention_mask=mask, use_cache=use_cache).logits
            for i, row in enumerate(rows):
                close(whole[i, mask[i].bool()], lm(row[None])[0][0], rounding)
            got = model.generate(ids, attention_mask=mask, max_new_tokens=4, use_cache=use_cache, **GREEDY)
            assert torch.equal(got[:, -4:], torch.stack(written)), (side, use_cache)
    for dtype in (torch.bfloat16, torch.float16):
        half = in_code(code, lm.to(dtype)).to(dtype)
        logits = lm(rows[0][None])[0]
        read = half(rows[0][None]).logits
        assert read.dtype == dtype
        close(read, logits, 2 * torch.finfo(dtype).eps)  # a CPU's products may depend on where the memory begins
        half.generate(ids, attention_mask=mask, max_new_tokens=2, **GREEDY)
    if family == "longhorn,llama":
        beams = model.generate(ids, attention_mask=mask, max_new_tokens=4, num_beams=2, **GREEDY)
        for i, row in enumerate(rows):
            alone = model.generate(row[None], max_new_tokens=4, num_beams=2, **GREEDY)
            assert torch.equal(beams[i, -4:], alone[0, -4:])


@pytest.mark.parametrize("family", ["longhorn", "swa", "longhorn,llama"])
def test_a_model_does_what_else_transformers_asks_of_it(family, code):
    """The model takes a cache that is passed on, and returns any number of logits, tuples or a loss."""
    lm = tiny("longhorn", pattern=family)
    model = in_code(code, lm)
    idx = ROWS[2][None]
    logits, _ = lm(idx)
    first = model.generate(idx, max_new_tokens=5, return_dict_in_generate=True, **GREEDY)
    longer = torch.cat([first.sequences, ROWS[1][None]], 1)
    for _ in range(2):  # the cache is not used up
        second = model.generate(longer, past_key_values=first.past_key_values, max_new_tokens=6, **GREEDY)
        assert torch.equal(second, sample.generate(lm, longer, 6, temperature=0))
    some = torch.tensor([2, 5])
    for keep, kept in ((1, logits[:, -1:]), (4, logits[:, -4:]), (some, logits[:, some])):
        close(model(idx, logits_to_keep=keep).logits, kept, 1e-6)
        close(model(idx, logits_to_keep=keep, use_cache=True).logits, kept, 1e-5)
    (alone,) = model(idx, return_dict=False)
    close(alone, logits, 1e-6)
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], idx[0, 1:])
    torch.testing.assert_close(model(idx, labels=idx).loss, loss)
    torch.testing.assert_close(model(idx, labels=idx, num_items_in_batch=26).loss, loss / 2)
    model.config.pad_token_id = 300  # the embedding lacks it, and no mask hides it here
    close(model(torch.cat([idx, torch.full((1, 2), 300)], 1)).logits[:, :14], logits, 1e-6)


TEXTS = ["def main():\n    return 'x'  # ok", "naïve  €uro\t\n\n 123,456 don't", " leading", "😀 a\r\n", "\0ÿĀ\x7f"]


def test_tokenizers_are_exported(tmp_path):
    """AutoTokenizer gives the same tokens and text as data/tokenizer.py. Both ignore truncation, padding and a token at
    the start, which transformers leaves in tokenizer.json: the model never saw them."""
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
        config = read_json(tmp_path / f"to_{kind}" / "config.json")
        end = {"gpt2": 50256, "hf": 0}.get(kind)
        assert config["eos_token_id"] == theirs.eos_token_id == end
        padding = {"bytes": None, "char": len(table)}.get(kind, end)  # LLaMA's class would look up one more token
        assert theirs.pad_token_id == config["pad_token_id"] == padding
        if padding is not None:
            assert theirs(["x", TEXTS[1]], padding=True).input_ids[0][-1] == padding
