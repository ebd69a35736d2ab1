"""Export models to Hugging Face's format, a folder with config.json and model.safetensors, and import them from it.

    python export.py --out_dir=out/llama_120m --to=hf_llama_120m       # then AutoModelForCausalLM.from_pretrained(...)
    python export.py --out_dir=out/longhorn_120m --to=hf_longhorn      # the same, with trust_remote_code=True
    python export.py --from_hf=hf_llama_120m --out_dir=out/imported    # then python sample.py --out_dir=out/imported

LLaMA and Mamba use the names and config of Hugging Face transformers. All other families, and patterns of several, keep
our own names, under the model_type "longhorn". Their folder contains the modelling code: tools/modeling_longhorn.py and
all sources that mixers.py and families/ import. So transformers can load it without this repository. If the tokenizer
is known, the folder contains it too, for AutoTokenizer. `hf upload user/name FOLDER` publishes a folder.

NAMES pairs our tensor names with those of transformers. Our layer has two residual branches, so n_layer of our Mamba
layers are 2 n_layer layers in transformers. A Mamba with an odd number of layers cannot be imported.

One rule holds in both directions: our model and transformers' model are built from the same folder, and nothing is
written unless their logits on random tokens agree. An import recognises a LLaMA or Mamba by the names of its tensors,
whatever its model_type. If our skeleton cannot express something, such as biases or another rotary base, the error
lists all of it (docs/adding-a-model.md has a table). Two kinds of LLaMA or Mamba are exported under model_type
"longhorn", with their code: models whose source is not the committed source (COMMITTED), and models of packed
documents. `--check=FOLDER` repeats the comparison later, on any machine. It runs the code in the folder. An import runs
no code: it opens only JSON and safetensors, and unpickles nothing.
"""

import contextlib
import dataclasses
import hashlib
import importlib.machinery
import importlib.util
import inspect
import json
import math
import modulefinder
import os
import pkgutil
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import safetensors.torch
import torch

import configurator
import sample
from common import errors
from common.errors import ConfigError, regular
from common.files import sync_folder
from data.prepared import DataError
from data.tokenizer import Text
from model import LM, ModelConfig, check_sizes, round_up
from runtime import checkpoint
from runtime.folder import lock_run_dir
from runtime.records import NATIVE_SOURCES, BadRecord, fields, read_json, write_json


@dataclass
class ExportConfig:
    out_dir: str = ""  # a run's folder: exported with --to, created by --from_hf (train.py cannot resume an import)
    to: str = ""  # export: folder to write config.json and model.safetensors to
    from_hf: str = ""  # import: folder to read both files from; LLaMA and Mamba need transformers
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # export: dtype of the weights
    tokenizer: str = "auto"  # import: bytes, tiktoken:NAME or hf:NAME; auto: the folder's own tokenizer
    vocab: str = ""  # folder with a tiktoken vocabulary's files, to work offline
    license: str = ""  # export: licence of the weights for the model card, such as mit or cc-by-4.0
    check: str = ""  # verify this exported folder; runs the code in it
    overwrite: bool = False  # replace an earlier export or import in that folder


ROOT = Path(__file__).resolve().parent
CODE = "modeling_longhorn.py"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
FILES = ("config.json", "model.safetensors", "README.md", CODE, *TOKENIZER)
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mamba": "MambaForCausalLM"}
EMBEDDINGS = {"llama": "model.embed_tokens.weight", "mamba": "backbone.embeddings.weight"}
OURS = "longhorn"  # model_type of our own format
FIXED = {"architectures": ["LonghornForCausalLM"], "model_type": OURS, "tie_word_embeddings": False,
         "auto_map": {"AutoConfig": "modeling_longhorn.LonghornConfig",
                      "AutoModelForCausalLM": "modeling_longhorn.LonghornForCausalLM"}}
TOLERANCE = {"transformers": 1e-5, "longhorn": 1e-4}  # relative to the largest float32 logit, by the class that runs
CHECK_TOKENS = 4096  # random tokens to compare on; at most block_size

# The `source_hash` of the code that was compared with transformers' classes. A model with other code is exported
# together with that code.
COMMITTED = {"llama": "9541d3c131a0", "mamba": "4ff1b042d0f1"}
HASHED = ("model", "mixers", "families", "kernels.ops", "kernels.scan")

# our setting: its name in transformers
COMMON = {"n_layer": "num_hidden_layers", "n_embd": "hidden_size", "vocab_size": "vocab_size",
          "tie_head": "tie_word_embeddings"}
SIZES = {"llama": {**COMMON, "n_head": "num_attention_heads", "block_size": "max_position_embeddings",
                   "norm_eps": "rms_norm_eps"},
         "mamba": {**COMMON, "dt_rank": "time_step_rank", "d_state": "state_size", "d_conv": "conv_kernel",
                   "expand": "expand", "block_size": "block_size", "norm_eps": "layer_norm_epsilon"}}

# Our name, then its names in transformers: three names for the thirds of one matrix. LLaMA's layer i is our layer i,
# Mamba's layer j is branch b of our layer i.
NAMES = {"llama": """
embed.weight                                    model.embed_tokens.weight
norm.weight                                     model.norm.weight
head.weight                                     lm_head.weight
layers.{i}.branches.0.norm.weight               model.layers.{i}.input_layernorm.weight
layers.{i}.branches.0.mixer.qkv.weight          model.layers.{i}.self_attn.q_proj.weight \
    model.layers.{i}.self_attn.k_proj.weight    model.layers.{i}.self_attn.v_proj.weight
layers.{i}.branches.0.mixer.out_proj.weight     model.layers.{i}.self_attn.o_proj.weight
layers.{i}.branches.1.norm.weight               model.layers.{i}.post_attention_layernorm.weight
layers.{i}.branches.1.mixer.w1.weight           model.layers.{i}.mlp.gate_proj.weight
layers.{i}.branches.1.mixer.w3.weight           model.layers.{i}.mlp.up_proj.weight
layers.{i}.branches.1.mixer.w2.weight           model.layers.{i}.mlp.down_proj.weight
""", "mamba": """
embed.weight                                    backbone.embeddings.weight
norm.weight                                     backbone.norm_f.weight
head.weight                                     lm_head.weight
layers.{i}.branches.{b}.norm.weight             backbone.layers.{j}.norm.weight
layers.{i}.branches.{b}.mixer.in_proj.weight    backbone.layers.{j}.mixer.in_proj.weight
layers.{i}.branches.{b}.mixer.conv_weight       backbone.layers.{j}.mixer.conv1d.weight
layers.{i}.branches.{b}.mixer.conv_bias         backbone.layers.{j}.mixer.conv1d.bias
layers.{i}.branches.{b}.mixer.x_proj.weight     backbone.layers.{j}.mixer.x_proj.weight
layers.{i}.branches.{b}.mixer.dt_proj.weight    backbone.layers.{j}.mixer.dt_proj.weight
layers.{i}.branches.{b}.mixer.dt_bias           backbone.layers.{j}.mixer.dt_proj.bias
layers.{i}.branches.{b}.mixer.A_log             backbone.layers.{j}.mixer.A_log
layers.{i}.branches.{b}.mixer.D                 backbone.layers.{j}.mixer.D
layers.{i}.branches.{b}.mixer.out_proj.weight   backbone.layers.{j}.mixer.out_proj.weight
"""}


# ---------------------------------------------------------------------------------------------------------------- names

def family(config):
    """The family of all layers, or "longhorn" for a pattern of several families, which keeps our own names."""
    families = set(config.families)
    return families.pop() if len(families) == 1 else OURS


def names(config, kind):
    """{our name: [its names in the file]} for every tensor of LM(config). kind: a family of NAMES for transformers'
    names, anything else for our own."""
    if kind not in NAMES:
        return {name: [name] for name in weights_of(skeleton(config))}
    found = {}
    for j in range(2 * config.n_layer):
        for line in NAMES[kind].strip().splitlines():
            ours, *theirs = line.format(i=j // 2, b=j % 2, j=j).split()
            found[ours] = theirs
    if config.tie_head:
        del found["head.weight"]
    return found


def skeleton(config):
    """LM(config) without memory for its weights."""
    with torch.device("meta"):
        return LM(config)


def weights_of(lm):
    """The LM's state_dict without the extra state of get_extra_state, which only training needs."""
    return {name: t for name, t in lm.state_dict().items() if not name.endswith("_extra_state")}


def as_in_file(state, config, kind):
    """{name in the file: tensor} from one of our state_dicts; views where possible. Raises Unlike if one is
    missing."""
    tensors = {}
    for ours, theirs in names(config, kind).items():
        if ours not in state:
            raise Unlike(f"the model has no {ours}")
        t = state[ours]
        if ours.endswith("conv_weight") and kind in NAMES:
            t = t.unsqueeze(1)  # (d_inner, 1, d_conv)
        parts = t.chunk(3) if len(theirs) == 3 else [t]
        tensors |= zip(theirs, parts, strict=True)
    return tensors


def filled(config, tensors, kind):
    """LM(config) in evaluation mode, with copies of a file's tensors in float32; the inverse of `as_in_file`. Raises
    ConfigError for a tensor that is missing, has another shape or, in our own format, is left over."""
    expected = as_in_file(skeleton(config).state_dict(), config, kind)
    for name, t in expected.items():
        there = tuple(tensors[name].shape) if name in tensors else "missing"
        if there != tuple(t.shape):
            raise ConfigError(f"the tensor {name} is {there}, but {tuple(t.shape)} in our {kind} with this config.json")
    if kind not in NAMES and (more := tensors.keys() - expected.keys()):
        raise ConfigError(f"the tensor {min(more)} does not exist in our model")
    lm = LM(config)  # not the skeleton: a mixer may hold tensors that no file has
    with torch.no_grad():
        for name, t in as_in_file(lm.state_dict(), config, kind).items():
            t.copy_(tensors[name])
    return lm.eval()


# --------------------------------------------------------------------------------------------------------------- export

def to_hf(lm, dtype=torch.float32, end_of_text=None, kind=None):
    """(config.json's dict, {name: tensor on the CPU}) for a model; tensors are copies of its weights.

    end_of_text: the token that ends a text, where generation stops; kind: "longhorn" for our own names and code, by
    default the model's family. Raises ConfigError if float16 cannot hold a weight.
    """
    kind = kind or family(lm.config)
    tensors = {}
    for name, t in as_in_file(lm.state_dict(), lm.config, kind).items():
        as_written = dtype if t.is_floating_point() else t.dtype
        tensors[name] = t.detach().to("cpu", as_written, copy=True).contiguous()
        if dtype == torch.float16 and tensors[name].isinf().any():
            raise ConfigError(f"{name} is out of range for float16 (largest 65504): use bfloat16")
    # set all three tokens: transformers' defaults would end every text at token 2 or 0
    config = {"dtype": str(dtype).removeprefix("torch."), "eos_token_id": end_of_text, "bos_token_id": end_of_text,
              "pad_token_id": None}
    if kind not in ARCHITECTURES:
        settings = dataclasses.asdict(lm.config)
        if settings["backend"] != "torch":  # its operators may have been edited; other backends depend on the machine
            del settings["backend"]
        return {**FIXED, **config, **settings}, tensors
    return {**config, **theirs_config(lm, kind)}, tensors


def theirs_config(lm, kind):
    """The fields of transformers' config for a LLaMA or a Mamba."""
    c = lm.config
    mixer = lm.layers[0].branches[1].mixer
    config = {"architectures": [ARCHITECTURES[kind]], "model_type": kind, "hidden_act": "silu",
              **{theirs: getattr(c, ours) for ours, theirs in SIZES[kind].items()}}
    if kind == "llama":
        return config | {
            "num_key_value_heads": c.n_head, "head_dim": c.n_embd // c.n_head,
            "intermediate_size": mixer.w1.out_features, "attention_bias": False, "mlp_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return config | {"num_hidden_layers": 2 * c.n_layer, "intermediate_size": mixer.d_inner,
                     "time_step_rank": mixer.R, "use_bias": False, "use_conv_bias": True, "residual_in_fp32": True}


def source_hash(lm):
    """A hash of an LM's source code without comments and docstrings.

    It covers the classes of all its modules, their methods as they are now, and the functions and classes of HASHED
    that this source names.
    """
    todo = [cls for module in lm.modules() for cls in type(module).__mro__]
    sources = {}
    for thing in todo:  # grows during the loop
        if thing in sources or not thing.__module__.startswith(HASHED):
            continue
        source = "".join(map(inspect.getsource, [thing, *filter(inspect.isfunction, vars(thing).values())]))
        sources[thing] = re.sub(r'(?s)\s*(""".*?"""|#[^\n]*)', "", source)
        around = vars(sys.modules[thing.__module__])
        named = [around.get(word) for word in re.findall(r"(\w+)[(,)]", sources[thing])]
        todo += [value for value in named if inspect.isfunction(value) or inspect.isclass(value)]
    return hashlib.sha256("".join(sorted(sources.values())).encode()).hexdigest()[:12]


def modelling_code():
    """tools/modeling_longhorn.py with all sources that mixers.py and families/ import, directly or indirectly."""
    finder = modulefinder.ModuleFinder([str(ROOT)])
    for file in pkgutil.iter_modules([ROOT / "families"]):  # its __init__ imports whatever the folder holds
        finder.import_hook(f"families.{file.name}")
    files = [Path(module.__file__) for module in finder.modules.values() if module.__file__]  # others are built in
    table = "SOURCES = {\n"
    for path in files:
        text = path.read_text().replace("\\", "\\\\").replace("'''", r"\'\'\'")
        table += f"{path.relative_to(ROOT).as_posix()!r}: '''\\\n{text}''',\n"
    native = {path: hashlib.sha256((ROOT / path).read_bytes()).hexdigest() for path in NATIVE_SOURCES}
    code = (ROOT / "tools" / CODE).read_text()
    return code.replace("SOURCES = {}", table + "}").replace("NATIVE = {}", f"NATIVE = {native!r}")


def tokenizer_files(meta, vocab, with_code):
    """({name: text} of the files for AutoTokenizer, the token that ends a text or None, the padding token or None).

    Padding is the token that ends a text. If that token is ordinary text, padding is an id after the vocabulary. The
    exported code never looks this id up; transformers' classes would, so they get no padding. There are no files if the
    tokenizer is unknown or cannot be loaded; a failure to load is printed.
    """
    try:
        text = Text(meta["tokenizer"], meta.get("table"), vocab or None)
        tokenizer_json = text.tokenizer_json()
    except (ValueError, KeyError) as error:
        if meta.get("tokenizer"):
            print(errors.printable(f"no tokenizer files: {error}"), file=sys.stderr)
        end = 50256 if meta.get("tokenizer") == "gpt2" else None
        return {}, end, end
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
                "model_max_length": int(1e30)}
    end = padding = None
    with contextlib.suppress(DataError):  # a tokenizer of Hugging Face without a token that ends a text
        end = text.end_of_text
    if end:
        settings |= {"bos_token": end, "eos_token": end, "pad_token": end}
        end = padding = text.eot_token
    elif with_code:
        padding = text.n_vocab
        settings["pad_token"] = "<|pad|>"
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer_json["added_tokens"].append({"id": padding, "content": "<|pad|>", **flags, "special": True})
    texts = json.dumps(tokenizer_json, ensure_ascii=False), json.dumps(settings, indent=1)
    return dict(zip(TOKENIZER, texts, strict=True)), end, padding


def export_run(config):
    check_target(config.to, FILES, config.overwrite)  # check first: reading may take minutes
    quiet_transformers()
    lm, meta = sample.load_model(config.out_dir)
    kind = family(lm.config)
    if kind in ARCHITECTURES:
        if lm.config.documents == "pack" and lm.config.end_of_text >= 0:
            reason = "it reads on after the token that ends a document (documents=pack)"
        elif source_hash(lm) != COMMITTED[kind]:
            reason = "the source of its classes is not the committed one"
        else:
            try:
                return written(config, lm, meta, kind)
            except Unlike as error:
                reason = error
        print(f"no {ARCHITECTURES[kind]}: {reason}; exported with its own code, which needs trust_remote_code=True")
    try:
        written(config, lm, meta, OURS)
    except Unlike as error:
        raise ConfigError(f"the model cannot be read back from an export: {error}: nothing was written") from None


def written(config, lm, meta, kind):
    """Write and verify the folder, and say so. kind: see to_hf. Raises Unlike before the folder is created."""
    dtype = getattr(torch, config.dtype)
    with_code = kind not in ARCHITECTURES
    files, end_of_text, padding = tokenizer_files(meta, config.vocab, with_code)
    there, tensors = to_hf(lm, dtype, end_of_text, kind)
    if with_code:
        there["pad_token_id"] = padding  # not for LLaMA, where padding gets no gradient
        files[CODE] = modelling_code()
    expected = logits_of(rounded(lm, dtype, kind))
    verified = fingerprint(expected)
    there["run"] = {**{name: meta[name] for name in NOTES}, "verified": verified}
    verified["files"] = checksums(there, files)
    with replacing_folder(config.to, config.overwrite) as tmp:
        write_files(tmp, there, tensors, files)
        difference = compare(expected, logits_from(in_transformers(tmp, kind), len(expected)), kind)
        agreement = (f"read back by transformers, its logits on {len(expected):,} random tokens agree to "
                     f"{difference:.0e} of the largest")
        (tmp / "README.md").write_text(model_card(config, lm, meta, there, agreement), encoding="utf-8")
    count = sum(p.numel() for p in lm.parameters())
    trust = ", trust_remote_code=True" if with_code else ""
    print(f"wrote {config.to}: {count:,} parameters; load it with AutoModelForCausalLM.from_pretrained({config.to!r}"
          f"{trust}); {agreement}")


def write_files(folder, config, tensors, files=()):
    """Write model.safetensors, config.json with the checksum of the weights, and `files`, {name: text}."""
    weights = folder / "model.safetensors"
    checkpoint.save(weights, tensors, {}, kind="pt")  # the only kind that transformers reads
    run = {**config.get("run", {}), "weights_crc32": checkpoint.identity(weights)[0]}
    write_json(folder / "config.json", {**config, "run": run})
    for name, text in dict(files).items():
        (folder / name).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def replacing_folder(folder, overwrite):
    """`with replacing_folder(folder) as tmp`: what the block writes to `tmp` becomes `folder`. After an error `folder`
    stays as it was. Raises ConfigError if `check_target` or the disk refuses."""
    target = Path(folder).resolve()  # a rename cannot replace a link to a folder
    tmp, old = (target.with_name(f".{target.name}.export.{end}") for end in ("tmp", "old"))
    try:
        if old.exists() and not target.exists():  # an export was killed between its two renames
            os.rename(old, target)
        for left_over in tmp, old:
            shutil.rmtree(left_over, ignore_errors=True)
        tmp.mkdir(parents=True)
        try:
            yield tmp
            check_target(folder, FILES, overwrite)  # again: another process may have been faster
            if target.exists():
                os.rename(target, old)
            os.rename(tmp, target)
            shutil.rmtree(old, ignore_errors=True)
            sync_folder(target.parent)
        finally:
            shutil.rmtree(tmp, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}: make room, or choose another folder"
                          ) from None


def check_target(folder, files, overwrite):
    """Raises ConfigError unless `folder` is absent, empty, or holds only `files` and may be overwritten."""
    ignored = {".lock", "__pycache__"}  # left by a run, and by a program that has imported the folder's code
    there = sorted({*os.listdir(folder)} - ignored) if os.path.lexists(folder) else []
    for name in there:
        if name.partition(".tmp-")[0] not in files:
            raise ConfigError(f"{folder} contains other files ({name}), which are never overwritten: choose another "
                              "folder")
    if there and not overwrite:
        raise ConfigError(f"{folder} is not empty: choose another folder, or use --overwrite")


# --------------------------------------------------------------------------------------------------------------- import

# What an import takes from "run" in an exported config.json for sample.py, and the defaults for all other folders.
NOTES = {"tokenizer": None, "table": None, "step": 0, "tokens": 0, "data": None}


def import_folder(config):
    check_target(config.out_dir, ("checkpoint.safetensors",), config.overwrite)
    lm = load(config.from_hf)
    run = config_of(Path(config.from_hf)).get("run", {})
    notes = {name: run.get(name, otherwise) for name, otherwise in NOTES.items()}
    chosen = config.tokenizer
    if chosen == "auto" and not notes["tokenizer"] and Path(config.from_hf, TOKENIZER[0]).exists():
        chosen = f"hf:{config.from_hf}"
    if chosen == "gpt2":
        notes |= {"tokenizer": "gpt2", "table": None}
    elif chosen != "auto":
        text = Text(chosen, vocab=config.vocab or None)
        notes |= {"tokenizer": text.name, "table": text.table}
    tensors, structure = checkpoint.flatten({"model": lm.state_dict()})
    meta = {"skeleton": structure, "config": dataclasses.asdict(lm.config), **notes, "imported_from": config.from_hf}
    path = Path(config.out_dir) / "checkpoint.safetensors"
    with lock_run_dir(path.parent):
        checkpoint.save(path, tensors, meta)
    unlike_defaults = dataclasses.asdict(lm.config).items() - dataclasses.asdict(ModelConfig()).items()
    taken = ", ".join(f"{name}={value}" for name, value in sorted(unlike_defaults))
    unknown = "" if notes["tokenizer"] else " (first import it again with --overwrite and --tokenizer, such as bytes)"
    count = sum(p.numel() for p in lm.parameters())
    print(f"wrote {path}, with {taken}: {lm.config.model}, {count:,} parameters; next: python sample.py "
          f"{shlex.quote(f'--out_dir={config.out_dir}')}{unknown}")


def load(folder):
    """The LM, in evaluation mode, from a folder that export.py or transformers wrote. Raises ConfigError."""
    folder = Path(folder)
    config = config_of(folder)
    try:
        files = weight_files(folder)
        recorded = as_recorded(folder, config, ["config.json"])
        if config.get("model_type") != OURS:
            return beside_theirs(folder)
        if gone := checkpoint.former_setting(config):
            raise ValueError(gone)
        lm = filled(sample.sizes_of(config), tensors_in(files), OURS)
        if recorded:
            compare_with_record(recorded, logits_of(lm, recorded["tokens"]), OURS)
    except (ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder}: not imported: {error}") from None
    return lm


def beside_theirs(folder):
    """Our LM with the weights of transformers' model in a folder, if their logits agree. Raises ConfigError with all
    reasons that are known before the comparison."""
    transformers = quiet_transformers()
    try:
        there = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        check_sizes(ModelConfig(n_layer=there.num_hidden_layers))  # before transformers builds that many
        with torch.device("meta"):  # takes no memory
            model = transformers.AutoModelForCausalLM.from_config(there, trust_remote_code=False)
        tensors = dict(model.named_parameters())
        kind = next((kind for kind, name in EMBEDDINGS.items() if name in tensors), None)
        reasons = reasons_against(there, theirs_sizes(there, kind), tensors, kind) if kind else []
        more = beyond(there, model, kind) if kind else []
    except Exception as error:  # transformers raises a dozen kinds
        raise ConfigError(f"config.json describes no valid model: {' '.join(str(error).split())[:200]}") from None
    if not kind:
        raise ConfigError(f"model_type {there.model_type!r} has the tensor {min(tensors)}, and only LLaMA's names "
                          f"({EMBEDDINGS['llama']}, ...) and Mamba's are known")
    if reasons:
        raise ConfigError(f"our {kind} cannot express {'; '.join([*reasons, *more])}")
    theirs = in_transformers(folder, kind)
    lm = filled(theirs_sizes(there, kind), theirs.state_dict(), kind)
    ours = logits_of(lm)
    compare(logits_from(theirs, len(ours)), ours, kind, more)
    return lm


def theirs_sizes(there, kind):
    """The ModelConfig for transformers' config of a LLaMA or a Mamba."""
    sizes = {ours: getattr(there, theirs, getattr(ModelConfig, ours)) for ours, theirs in SIZES[kind].items()}
    if kind == "llama":
        sizes["mlp_multiple"] = mlp_multiple(there.intermediate_size, there.hidden_size)
    else:
        sizes["n_layer"] //= 2
    return ModelConfig(model=kind, **sizes)


def mlp_multiple(hidden, d):
    """An mlp_multiple that gives this hidden width, if one exists: the default if possible, else the width itself."""
    usual = ModelConfig.mlp_multiple
    return usual if round_up(8 * d / 3, usual) == hidden else hidden


def reasons_against(there, sizes, tensors, kind):
    """The features of transformers' model that ours cannot express, in words. These are fields for which our export has
    another value, and tensors that only one of the models has. there: transformers' config; tensors: {name: tensor} of
    its model."""
    reasons = []
    for key, ours in theirs_config(skeleton(sizes), kind).items():
        value = getattr(there, key, None)
        if isinstance(ours, dict):
            value = ours | (value or {})
        if key not in ("architectures", "model_type") and value not in (None, ours):
            reasons.append(f"{key}={value} ({ours} in ours)")
    window = getattr(there, "sliding_window", None)
    if window and window < sizes.block_size:
        reasons.append(f"sliding_window={window}")
    expected = as_in_file(skeleton(sizes).state_dict(), sizes, kind)
    for words, some in (("the tensors", tensors.keys() - expected), ("no tensors", expected.keys() - tensors.keys())):
        of_one_layer = {re.sub(r"\d+", "*", name): name for name in sorted(some, reverse=True)}
        if some:
            reasons.append(f"{words} {', '.join(sorted(of_one_layer.values()))}")
    return reasons


def beyond(there, model, kind):
    """Further features of transformers' model that its plain LLaMA or Mamba lacks, in words: factors in its config, and
    modules with other code. Some may be harmless: they explain why logits differ, but do not show that they do."""
    plain = getattr(quiet_transformers(), ARCHITECTURES[kind])
    usual = plain.config_class(num_hidden_layers=1)
    with torch.device("meta"):
        known = {module.forward.__code__.co_code for module in plain(usual).modules()}
    others = {type(module).__name__ for module in model.modules() if not any(module.children())
              and type(module).__module__ == type(model).__module__ and module.forward.__code__.co_code not in known}
    return [*(f"{key}={value}" for key, value in there.to_dict().items()
              if key not in usual.to_dict() and isinstance(value, float) and value not in (0, 1)),
            *(f"the module {name}" for name in sorted(others))]


def weight_files(folder):
    """The files of a folder's weights. Raises ConfigError if there are none, or one is damaged or quantised."""
    files = sorted(folder.glob("model.safetensors")) or sorted(folder.glob("model-*.safetensors"))  # like transformers
    if not files:
        raise ConfigError(f"{folder}/model.safetensors: there are no weights to read (a pickle such as "
                          "pytorch_model.bin could run code and is not opened: transformers' from_pretrained(..) and "
                          "save_pretrained(..) make safetensors of it)")
    for path in files:
        try:
            with safetensors.safe_open(regular(path), "pt") as file:
                for name in file.keys():
                    if name.endswith("weight") and "F" not in (kind := file.get_slice(name).get_dtype()):
                        raise ConfigError(f"{path}: the tensor {name} is {kind}: no quantised weights are supported")
        except (OSError, safetensors.SafetensorError) as error:
            raise ConfigError(f"{path}: not readable as safetensors: {error}: fetch it again") from None
    return files


def tensors_in(files):
    """{our name: tensor} from files of weights; tensors may be memory-mapped."""
    tensors = {}
    for path in files:
        tensors |= safetensors.torch.load_file(path)
    if all(name.startswith("model.") for name in tensors):  # transformers' prefix when it saves
        return {name.removeprefix("model."): t for name, t in tensors.items()}
    return tensors


def config_of(folder):
    """The content of a folder's config.json. Raises ConfigError."""
    try:
        return read_json(folder / "config.json")
    except BadRecord as error:
        raise ConfigError(f"{folder}/config.json: {error}: give a folder with config.json and model.safetensors; "
                          f"{checkpoint.DOWNLOAD.format(folder)}") from None


# -------------------------------------------------------------------------------------------------------- verification

class Unlike(ConfigError):
    """A written model differs from the original, or cannot be read back."""


class Uncached(importlib.machinery.SourceFileLoader):
    """Neither reads nor leaves a __pycache__ beside the file, which would be published with the folder."""

    def path_stats(self, path):
        raise OSError


def random_tokens(vocab_size, n):
    """(1, n) int64, the same in every version and on every machine."""
    return torch.from_numpy(np.random.RandomState(0).randint(vocab_size, size=(1, n)))


@torch.inference_mode()
def logits_of(model, n=CHECK_TOKENS):
    """(T, vocab_size) float32: an LM's logits on random tokens, as many as its block_size, at most n."""
    return model(random_tokens(model.config.vocab_size, min(model.config.block_size, n)))[0][0].float()


def rounded(lm, dtype, kind):
    """The LM with its weights rounded to this dtype, as in an exported file."""
    return lm if dtype == torch.float32 else filled(lm.config, to_hf(lm, dtype, kind=kind)[1], kind)


def fingerprint(logits):
    """What --check compares: the last position's logits at up to 64 places, and their logsumexp."""
    last = logits[-1]
    every = math.ceil(len(last) / 64)
    return {"tokens": len(logits), "logits": [*last[::every].tolist(), last.logsumexp(0).item()]}


def checksums(config, texts):
    """{name: sha256} of config.json and of `texts`, {name: text}. config.json does not yet contain the weights'
    checksum, which `write_files` adds."""
    texts = {**texts, "config.json": json.dumps(config, sort_keys=True)}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


def quiet_transformers():
    """The package transformers, which then prints errors only. Raises ConfigError if it is missing."""
    try:
        import transformers
    except ImportError:
        raise ConfigError("the package transformers is missing: pip install --group test") from None

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def in_transformers(folder, kind):
    """Load transformers' model from a folder in float32, with its own class or, for our format, the code in the folder.
    Raises Unlike if it cannot be loaded completely."""
    transformers = quiet_transformers()
    try:
        loader = transformers.AutoModelForCausalLM
        how = {"trust_remote_code": False, "use_safetensors": True}
        if kind not in ARCHITECTURES:  # bypass transformers' cache of code
            path = Path(folder) / CODE
            how = {}
            name = "modeling_longhorn_" + hashlib.sha256(path.read_bytes()).hexdigest()[:12]
            spec = importlib.util.spec_from_file_location(name, path, loader=Uncached(name, str(path)))
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            loader = module.LonghornForCausalLM
        how |= {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}  # raised below
        model, report = loader.from_pretrained(folder, **how)
    except Exception as error:  # transformers raises a dozen kinds
        raise Unlike(f"it cannot be loaded ({' '.join(str(error).split())[:200]})") from error
    for problem, keys in report.items():
        if keys:
            raise Unlike(f"{problem.replace('_', ' ')}: {', '.join(map(str, sorted(keys)))[:200]}")
    return model.eval()


@torch.inference_mode()
def logits_from(model, n):
    """(n, vocab_size) float32: the logits of transformers' model on random tokens."""
    return model(random_tokens(model.config.vocab_size, n)).logits[0].float()


def compare(expected, logits, kind, why=()):
    """The largest difference over the largest expected value. Raises Unlike, with the possible reasons `why`."""
    most = TOLERANCE["transformers" if kind in ARCHITECTURES else OURS]
    difference = float((logits - expected).abs().max() / expected.abs().max())
    if not difference <= most:  # nan, too
        differ = f"its logits differ by {difference:.0e} of the largest; rounding explains at most {most:.0e}"
        if math.isnan(difference):
            differ = "its logits are not finite: look for NaN or infinity in its weights"
        raise Unlike("; ".join([differ, *why]))
    return difference


def compare_with_record(recorded, logits, kind):
    """Like `compare`, but with the logits that an export recorded. Raises Unlike."""
    return compare(torch.tensor(recorded["logits"]), torch.tensor(fingerprint(logits)["logits"]), kind)


def as_recorded(folder, there, files=()):
    """The logits that the export recorded; None if there are none, or another program wrote the weights. Raises
    ConfigError unless the weights and `files`, by default all, are as the export wrote them. there: the content of
    config.json."""
    path = folder / "model.safetensors"
    run = {**(there.get("run") or {})}
    try:
        crc32 = checkpoint.identity(path)[0]
    except checkpoint.CheckpointError:
        return None
    if run.pop("weights_crc32", crc32) != crc32:
        raise Unlike("its weights differ: they are the weights of another export (config.json names another checksum)")
    checkpoint.load(path, prefix="no tensor")
    if "verified" not in run:
        return None
    recorded = run["verified"] = {**run["verified"]}
    sums = recorded.pop("files")
    texts = {}
    for name in sums:
        if (folder / name).is_file():
            texts[name] = (folder / name).read_bytes().decode(errors="replace")
    now = checksums({**there, "run": run}, texts)
    for name in files or sums:
        if now.get(name) != sums[name]:
            raise Unlike(f"its {name} is missing, damaged or edited since the export")
    return recorded


def check_folder(config):
    """Run --check: verify every file but the model card, and compare the logits with those at the export."""
    folder = Path(config.check)
    there = config_of(folder)
    try:
        recorded = as_recorded(folder, there)
        kind = there["model_type"]
        logits = logits_from(in_transformers(folder, kind), min(recorded["tokens"], CHECK_TOKENS))
        difference = compare_with_record(recorded, logits, kind)
    except Unlike as error:
        raise ConfigError(f"{folder} is not the model that was exported: {error}") from None
    except (LookupError, TypeError, AttributeError, RuntimeError):
        raise ConfigError(f"{folder}/config.json does not say what to verify: it was not written by export.py, or by "
                          "an earlier version") from None
    print(f"{folder}: the files' checksums are right; logits agree to {difference:.0e} with those at the export")


# ---------------------------------------------------------------------------------------------------------- model card

CARD = """---
library_name: transformers
license: {license}
pipeline_tag: text-generation
---
# {name}

{model}: {parameters:,} parameters in {dtype}, trained for {steps:,} steps on {tokens:,} tokens.

- data: {data}
- code: {code}
- verified: {verified}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}"{trust})
tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})
```
"""


def model_card(config, lm, meta, there, verified):
    """The README.md of an exported folder: data, licence, commit, and how it was verified."""
    sums = [f"{split} sha256 {str(value)[:16]}" for split, value in (meta["data"] or {}).items()]
    return CARD.format(
        name=Path(config.to).resolve().name,
        license=config.license or "unknown",
        model=lm.config.pattern or lm.config.model,
        parameters=sum(p.numel() for p in lm.parameters()),
        dtype=config.dtype,
        steps=meta["step"] or 0,
        tokens=meta["tokens"] or 0,
        data=f"{meta['config'].get('dataset', 'unknown')} ({', '.join(sums) or 'no checksum'})",
        code=code_of(sample.checkpoint_at(config.out_dir).parent),
        verified=verified,
        trust=", trust_remote_code=True" if there["model_type"] == OURS else "",
    )


def code_of(folder):
    """The code that trained a run, in words."""
    try:
        with fields():
            ran_in = read_json(folder / "config.json")["environment"]
            code = f"commit {ran_in['commit']}, {ran_in['code']}"
            if ran_in["uncommitted_changes"]:
                code += ", with uncommitted changes"
            if sample.code_since(folder):
                code += "; changed between training and export"
            return code
    except BadRecord:
        return "unknown (the run's config.json is missing or damaged)"


def main(argv):
    config = configurator.load(ExportConfig, argv)
    if config.check and not (config.out_dir or config.to or config.from_hf):
        return check_folder(config)
    if not config.out_dir or bool(config.to) == bool(config.from_hf) or config.check:
        raise ConfigError("give --out_dir and either --to, to export its model, or --from_hf, to import a model; or "
                          "--check, to verify an exported folder")
    if config.to and config.tokenizer != "auto" or config.from_hf and "dtype" in config.overrides:
        raise ConfigError("--tokenizer works with --from_hf only, --dtype with --to only: a checkpoint's weights are "
                          "float32")
    if config.to:
        export_run(config)
    else:
        import_folder(config)


if __name__ == "__main__":
    with errors.main_error("export.py", ValueError):
        try:
            main(sys.argv[1:])
        except KeyboardInterrupt:
            sys.exit(130)
