"""Export to and import from Hugging Face: a folder with config.json and model.safetensors.

    python export.py --out_dir=out/llama_120m --to=hf_llama_120m       # then AutoModelForCausalLM.from_pretrained(...)
    python export.py --out_dir=out/longhorn_120m --to=hf_longhorn      # the same, with trust_remote_code=True
    python export.py --out_dir=out/longhorn_120m --to=hf_longhorn --overwrite --push=user/longhorn    # and to the hub
    python export.py --from_hf=hf_llama_120m --out_dir=out/imported    # then python sample.py --out_dir=out/imported

LLaMA, Mamba and RWKV-4 use the names and config of Hugging Face transformers, which need not be installed. All other
families, and patterns of several, keep our own names, under the model_type "longhorn"; their folder contains the
modelling code (tools/modeling_longhorn.py and all sources that mixers.py imports), so that transformers can load it
without this repository. If the tokenizer is known, the folder contains it too, for AutoTokenizer.

    our name                                       LLaMA                                Mamba
    embed.weight (also the head)                   model.embed_tokens                   backbone.embeddings
    layers.i.branches.0 norm, mixer.qkv, out_proj  layers.i input_layernorm, self_attn  layers.2i norm, mixer
    layers.i.branches.1 norm, mixer.w1, w3, w2     post_attention_layernorm, mlp        layers.2i+1 norm, mixer

One of our layers has two residual branches, so n_layer Mamba layers of ours are 2 n_layer in transformers, and an odd
number of layers cannot be imported. Transformers stores RWKV-4's shifts as 1 - mu. Anything that our skeleton cannot
express (grouped queries, an untied head, another rotary base) is refused by field and value, never approximated. Only
JSON and safetensors are opened; nothing is unpickled.
"""

import dataclasses
import functools
import glob
import hashlib
import json
import math
import modulefinder
import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import safetensors.torch
import torch

import configurator
import sample
from data.tokenizer import Text
from model import FAMILIES, LM, ModelConfig, round_up
from runtime import checkpoint, errors
from runtime.errors import ConfigError, regular
from runtime.folder import lock_run_dir
from runtime.records import NATIVE_SOURCES, sync_folder, write_json


@dataclass
class ExportConfig:
    out_dir: str = ""  # a run's folder: exported with --to, created by --from_hf (train.py cannot resume that)
    to: str = ""  # export: folder to write config.json and model.safetensors to
    from_hf: str = ""  # import: folder to read them from
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # export: dtype of the weights
    tokenizer: str = "auto"  # import: bytes, tiktoken:NAME or hf:NAME; auto: as in its config.json
    vocab: str = ""  # folder with a tiktoken vocabulary's files, to need no network
    push: str = ""  # export: user/name, also upload the folder to Hugging Face's hub (log in first: hf auth login)
    overwrite: bool = False  # replace an earlier export or import in that folder


ROOT = Path(__file__).resolve().parent
CODE, TOKENIZER = "modeling_longhorn.py", ("tokenizer.json", "tokenizer_config.json")
FILES = ("config.json", "model.safetensors", CODE, *TOKENIZER)
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mamba": "MambaForCausalLM", "rwkv4": "RwkvForCausalLM"}
OWN = {"architectures": ["LonghornForCausalLM"], "model_type": "longhorn", "tie_word_embeddings": False,
       "auto_map": {"AutoConfig": "modeling_longhorn.LonghornConfig",
                    "AutoModelForCausalLM": "modeling_longhorn.LonghornForCausalLM"}}
SETTINGS = {f.name: f for f in dataclasses.fields(ModelConfig) if f.name != "backend"}  # backend depends on the machine
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

KINDS = {"llama": "llama", "mamba": "mamba", "rwkv": "rwkv4"}  # model_type in transformers -> our family
# field -> (default in transformers, value that our skeleton has); other values would change the function
ONLY = {"llama": {"hidden_act": ("silu", "silu"), "rms_norm_eps": (1e-6, 1e-5), "tie_word_embeddings": (False, True),
                  "attention_bias": (False, False), "mlp_bias": (False, False)},
        "mamba": {"hidden_act": ("silu", "silu"), "layer_norm_epsilon": (1e-5, 1e-5),
                  "tie_word_embeddings": (True, True), "use_bias": (False, False), "use_conv_bias": (True, True)},
        "rwkv4": {"layer_norm_epsilon": (1e-5, 1e-5), "tie_word_embeddings": (False, True)}}

# their name -> our name, for tensors before and after the layers (the embedding first), and within a layer
ENDS = {"llama": {"model.embed_tokens.weight": "embed.weight", "model.norm.weight": "norm.weight"},
        "mamba": {"backbone.embeddings.weight": "embed.weight", "backbone.norm_f.weight": "norm.weight"},
        "rwkv4": {"rwkv.embeddings.weight": "embed.weight",
                  "rwkv.blocks.0.pre_ln.weight": "embed_norm.weight", "rwkv.blocks.0.pre_ln.bias": "embed_norm.bias",
                  "rwkv.ln_out.weight": "norm.weight", "rwkv.ln_out.bias": "norm.bias"}}
LLAMA_NAMES = {"input_layernorm": "0.norm", "self_attn.o_proj": "0.mixer.out_proj", "mlp.gate_proj": "1.mixer.w1",
               "post_attention_layernorm": "1.norm", "mlp.up_proj": "1.mixer.w3", "mlp.down_proj": "1.mixer.w2"}
MAMBA_NAMES = {"mixer.conv1d.weight": "mixer.conv_weight", "mixer.conv1d.bias": "mixer.conv_bias",
               "mixer.dt_proj.bias": "mixer.dt_bias",
               **{name: name for name in ("norm.weight", "mixer.A_log", "mixer.D", "mixer.in_proj.weight",
                                          "mixer.x_proj.weight", "mixer.dt_proj.weight", "mixer.out_proj.weight")}}
RWKV_NAMES = {"ln1.weight": "0.norm.weight", "ln1.bias": "0.norm.bias", "attention.time_decay": "0.mixer.decay",
              "attention.time_first": "0.mixer.bonus", "ln2.weight": "1.norm.weight", "ln2.bias": "1.norm.bias",
              **{f"attention.{name}.weight": f"0.mixer.{name}.weight"
                 for name in ("key", "value", "receptance", "output")},
              **{f"feed_forward.{name}.weight": f"1.mixer.{name}.weight" for name in ("key", "value", "receptance")}}
# family: (prefix of layer i, {their name: our name}, [(their name of a part, our name of the whole, the parts)])
LAYERS = {"llama": ("model.layers.{}.", {f"{there}.weight": f"{ours}.weight" for there, ours in LLAMA_NAMES.items()},
                    [("self_attn.{}_proj.weight", "0.mixer.qkv.weight", "qkv")]),  # both rotate by halves
          "mamba": ("backbone.layers.{}.", MAMBA_NAMES, []),
          "rwkv4": ("rwkv.blocks.{}.", RWKV_NAMES,
                    [("attention.time_mix_{}", "0.mixer.mu", ("receptance", "key", "value")),
                     ("feed_forward.time_mix_{}", "1.mixer.mu", ("receptance", "key"))])}


def family(config):
    """The family of all layers; for a pattern of several "longhorn", which keeps our own names."""
    families = set(config.families)
    return families.pop() if len(families) == 1 else "longhorn"


def names(config):
    """{name in the file: (our name, None, or (i, n) for part i of n of its rows)} for every tensor of LM(config).

    A qkv matrix (3 d, d) has three names in the file, and so have RWKV-4's shifts; everything else is one to one.
    """
    kind = family(config)
    if kind not in ENDS:
        return {name: (name, None) for name in skeleton(config).state_dict()}
    mapping = {name: (prefix, None) for name, prefix in ENDS[kind].items()}
    layer, whole_names, fused = LAYERS[kind]
    for i in range(2 * config.n_layer if kind == "mamba" else config.n_layer):
        there = layer.format(i)
        prefix = f"layers.{i // 2}.branches.{i % 2}." if kind == "mamba" else f"layers.{i}.branches."
        for name, whole_name, parts in fused:
            mapping |= {there + name.format(part): (prefix + whole_name, (k, len(parts)))
                        for k, part in enumerate(parts)}
        mapping |= {there + name: (prefix + our_name, None) for name, our_name in whole_names.items()}
    return mapping


def skeleton(config):
    """LM(config) without memory for its weights."""
    with torch.device("meta"):
        return LM(config)


def as_in_file(state, config):
    """{name in the file: tensor} from one of our state_dicts; views where possible."""
    tensors = {}
    for name, (our_name, part) in names(config).items():
        tensors[name] = state[our_name] if part is None else state[our_name].chunk(part[1])[part[0]]
        if name.endswith("conv1d.weight"):
            tensors[name] = tensors[name].unsqueeze(1)  # (d_inner, 1, d_conv)
        if ".time_mix_" in name:
            tensors[name] = 1 - tensors[name][None]  # (1, 1, d): the current token's weight
    return tensors


def to_hf(lm, dtype=None, end_of_text=None):
    """(config.json's dict, {name: tensor on the CPU}) for a model; tensors are copies of its weights.

    dtype: a torch dtype, default the model's; end_of_text: the token that ends a text, at which generation stops.
    Raises ConfigError if float16 cannot hold a weight.
    """
    c, dtype = lm.config, dtype or lm.embed.weight.dtype
    tensors = as_in_file(lm.state_dict(), c)
    tensors = {name: t.detach().to("cpu", dtype, copy=True).contiguous() for name, t in tensors.items()}
    for name, t in tensors.items():
        if dtype == torch.float16 and t.isinf().any():
            raise ConfigError(f"{name} is out of range for float16 (largest 65504): use bfloat16")
    kind, dtype = family(c), str(dtype).removeprefix("torch.")
    if kind not in ARCHITECTURES:
        settings = {name: getattr(c, name) for name in SETTINGS}
        return {**OWN, "dtype": dtype, "eos_token_id": end_of_text, "bos_token_id": end_of_text, **settings}, tensors
    config = {"architectures": [ARCHITECTURES[kind]], "model_type": {"rwkv4": "rwkv"}.get(kind, kind), "dtype": dtype,
              "vocab_size": c.vocab_size, "hidden_size": c.n_embd, "use_cache": True, "initializer_range": 0.02,
              # set all three: transformers' defaults would end every text at token 2 or 0
              "bos_token_id": end_of_text, "eos_token_id": end_of_text, "pad_token_id": None,
              **{field: only for field, (_, only) in ONLY[kind].items()}}
    mixer = lm.layers[0].branches[1].mixer
    if kind == "rwkv4":
        config |= {"num_hidden_layers": c.n_layer, "context_length": c.block_size, "attention_hidden_size": c.n_embd,
                   "intermediate_size": mixer.key.out_features, "rescale_every": 0}
    elif kind == "llama":
        config |= {"num_hidden_layers": c.n_layer, "num_attention_heads": c.n_head, "num_key_value_heads": c.n_head,
                   "head_dim": c.n_embd // c.n_head, "intermediate_size": mixer.w1.out_features,
                   "max_position_embeddings": c.block_size, "attention_dropout": 0.0,
                   "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    else:
        config |= {"num_hidden_layers": 2 * c.n_layer, "state_size": c.d_state, "conv_kernel": c.d_conv,
                   "expand": c.expand, "intermediate_size": mixer.d_inner, "time_step_rank": mixer.R,
                   "residual_in_fp32": True, "block_size": c.block_size}
    return config, tensors


def from_hf(config, tensors):
    """The LM, in evaluation mode, from a config.json's dict and its tensors; the inverse of `to_hf`.

    The weights are copies, in float64 if `tensors` has any, else float32. Raises ConfigError for anything that our
    skeleton cannot express, and for tensors that are missing, left over or of the wrong shape.
    """
    ours = model_config(config)
    if config["model_type"] == "longhorn":  # transformers adds a prefix when it saves
        tensors = {name.removeprefix("model."): t for name, t in tensors.items()}
    if ours.n_layer > len(tensors):  # check before building a skeleton with so many layers
        raise ConfigError(f"the config has {ours.n_layer} layers, more than there are tensors ({len(tensors)})")
    try:
        lm = skeleton(ours)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"the config describes no valid model: {error}") from None
    expected = as_in_file(lm.state_dict(), ours)
    check_tensors(expected, tensors, ours.model)
    dtype = functools.reduce(torch.promote_types, (tensors[name].dtype for name in expected), torch.float32)
    parts = {}
    for name, (our_name, _) in names(ours).items():
        t = tensors[name].detach().to("cpu", dtype)
        parts.setdefault(our_name, []).append(1 - t if ".time_mix_" in name else t)
    state = {our_name: torch.cat(pieces) for our_name, pieces in parts.items()}  # copies
    shaped = {our_name: t.reshape(lm.get_parameter(our_name).shape) for our_name, t in state.items()}
    lm.load_state_dict(shaped, assign=True)
    return lm.eval()


def check_tensors(expected, tensors, kind):
    """Raises ConfigError unless `tensors` match `expected` in name and shape and have a float dtype.

    Extra non-weight tensors are allowed: a head that equals the embedding, and the rotary frequencies of older files.
    """
    for name, t in expected.items():
        if name not in tensors:
            raise ConfigError(f"the tensor {name} is missing: the weights are not from a {kind} with this config")
        shape, dtype = tuple(tensors[name].shape), tensors[name].dtype
        if shape != t.shape:
            raise ConfigError(f"the tensor {name} is {shape}, but the config needs {tuple(t.shape)}")
        if dtype not in FLOATS:
            raise ConfigError(f"the tensor {name} is {dtype}: only float64, float32, bfloat16 and float16 are "
                              "supported, no quantised weights")
    for name in sorted(tensors.keys() - expected.keys()):
        if name in ("lm_head.weight", "head.weight"):
            if not torch.equal(tensors[name], tensors[next(iter(expected))]):  # the embedding
                raise ConfigError(f"{name} differs from the embedding: only a tied head is supported")
        elif not name.endswith("rotary_emb.inv_freq"):
            raise ConfigError(f"the tensor {name} does not exist in our {kind} (no biases, no further norms)")


def model_config(config):
    """The ModelConfig for a config.json's dict. Raises ConfigError for anything that it cannot express."""
    kind = config.get("model_type")
    if kind == "longhorn":
        return own_config(config)
    if kind not in list(KINDS):  # a list, because values from JSON may not be hashable
        raise ConfigError(f"model_type {kind!r} is not supported: only llama, mamba, rwkv and this project's longhorn")
    kind = KINDS[kind]
    named = [ARCHITECTURES[kind]]
    require(config, {"architectures": (named, named), "quantization_config": (None, None), **ONLY[kind]})
    d, layers = whole(config, "hidden_size"), whole(config, "num_hidden_layers")
    sizes = {"n_embd": d, "n_layer": layers, "vocab_size": whole(config, "vocab_size")}
    if kind == "rwkv4":
        require(config, {"attention_hidden_size": (d, d)})
        sizes |= {"n_head": 1, "block_size": whole(config, "context_length", 1024),
                  "mlp_multiple": mlp_multiple(whole(config, "intermediate_size", 4 * d), d, 4 * d, "4")}
    elif kind == "llama":
        heads = whole(config, "num_attention_heads")
        require(config, {"num_key_value_heads": (heads, heads), "head_dim": (d // heads, d // heads)})
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}  # the latter in older files
        if not isinstance(rope, dict):
            raise ConfigError(f"rope_parameters {rope!r} is not supported: only the default kind")
        rope = {"rope_type": rope.get("type"), **config, **rope}  # older files have the base at the top level
        require(rope, {"rope_type": ("default", "default"), "rope_theta": (1e4, 1e4), "partial_rotary_factor": (1, 1)})
        sizes |= {"n_head": heads, "block_size": whole(config, "max_position_embeddings", 2048),
                  "mlp_multiple": mlp_multiple(whole(config, "intermediate_size"), d, 8 * d / 3, "8/3")}
    else:
        if layers % 2:
            raise ConfigError(f"num_hidden_layers {layers} is not supported: only an even number, as each of our "
                              "layers holds two")
        expand, rank = whole(config, "expand", 2), config.get("time_step_rank", "auto")
        require(config, {"intermediate_size": (expand * d, expand * d)})
        sizes |= {"n_layer": layers // 2, "d_state": whole(config, "state_size", 16), "expand": expand,
                  "d_conv": whole(config, "conv_kernel", 4),
                  "dt_rank": 0 if rank in ("auto", math.ceil(d / 16)) else whole(config, "time_step_rank"),
                  "block_size": whole(config, "block_size", ModelConfig.block_size)}
    return ModelConfig(model=kind, **sizes)


def require(config, fields):
    """Raises ConfigError unless each field has its only supported value. fields: {name: (default, that value)}."""
    for field, (absent, only) in fields.items():
        value = absent if config.get(field) is None else config[field]
        if value != only:
            note = "" if field in config else " (the default)"
            raise ConfigError(f"{field} {value!r}{note} is not supported: only {only!r}")


def mlp_multiple(hidden, d, least, times):
    """The largest usual mlp_multiple that gives this hidden width; `hidden` itself fits any width >= `least`."""
    for multiple in (*(2**i for i in range(8, -1, -1)), hidden):
        if round_up(least, multiple) == hidden:
            return multiple
    raise ConfigError(f"intermediate_size {hidden} is not supported: only {math.ceil(least)} or more, {times} of "
                      f"hidden_size {d}")


def own_config(config):
    known = {*OWN, "dtype", "run", "transformers_version", "bos_token_id", "eos_token_id", "pad_token_id", "use_cache"}
    unknown = config.keys() - SETTINGS.keys() - known
    if unknown:
        raise ConfigError(f"unknown setting {min(unknown)}: a newer version may have written this")
    if config.get("model") not in list(FAMILIES):  # a list, because values from JSON may not be hashable
        raise ConfigError(f"model {config.get('model')!r} is not supported: only {', '.join(FAMILIES)}")
    settings = {name: config[name] for name in SETTINGS if name in config}
    for name, value in settings.items():
        default = getattr(ModelConfig, name)
        if type(default) is int:
            whole(config, name, least=min(default, 1))
        elif type(value) is not type(default):
            only = "true or false" if type(default) is bool else "a string"
            raise ConfigError(f"{name} {value!r} is not supported: only {only}")
    return ModelConfig(**settings)


def whole(config, field, absent=None, least=1):
    value = config.get(field, absent)
    if type(value) is not int or not least <= value < 2**31:
        raise ConfigError(f"{field} {value!r} is not supported: only a whole number from {least} to {2**31 - 1}")
    return value


def load(folder):
    """The LM, in evaluation mode, from a folder that export.py or transformers wrote. Raises ConfigError."""
    config, tensors = read(folder)
    try:
        return from_hf(config, tensors)
    except ValueError as error:
        raise ConfigError(f"{folder}: {error}") from None


def read(folder):
    """(config.json's dict, {name: tensor}) from a folder with one file of weights, or several with an index.

    The tensors may be memory-mapped. Raises ConfigError.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")
    files, index = ["model.safetensors"], folder / "model.safetensors.index.json"
    if not (folder / files[0]).exists() and index.exists():
        where = read_json(index).get("weight_map")
        files = list(where.values()) if isinstance(where, dict) else [None]
        if any(not isinstance(file, str) or file != os.path.basename(file) for file in files):
            raise ConfigError(f"{index}: weight_map does not map tensors to files in this folder")
    tensors = {}
    for path in (folder / file for file in sorted(set(files))):
        if not path.exists():
            raise ConfigError(f"{path}: there are no weights to read (a pickle such as pytorch_model.bin could run "
                              "code and is not opened: save it as safetensors first)")
        try:
            tensors |= safetensors.torch.load_file(regular(path))
        except (OSError, safetensors.SafetensorError) as error:
            raise ConfigError(f"{path}: not readable as safetensors: {error}") from None
    return config, tensors


def read_json(path):
    try:
        return {**json.loads(regular(path).read_bytes())}
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: give a folder with config.json and model.safetensors") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}: not a JSON object of settings: {error}") from None


def modelling_code():
    """tools/modeling_longhorn.py with all sources that mixers.py imports, directly or indirectly."""
    finder = modulefinder.ModuleFinder([str(ROOT)], excludes=["experiments"])  # only `python model.py` imports those
    finder.import_hook("mixers")
    files = [Path(module.__file__) for module in finder.modules.values() if module.__file__]  # others are built in
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}
    quoted = {path: text.replace("\\", "\\\\").replace("'''", r"\'\'\'") for path, text in sources.items()}
    table = "SOURCES = {\n" + "".join(f"{path!r}: '''\\\n{text}''',\n" for path, text in quoted.items()) + "}"
    native = {path: hashlib.sha256((ROOT / path).read_bytes()).hexdigest() for path in NATIVE_SOURCES}
    code = (ROOT / "tools" / CODE).read_text()
    return code.replace("SOURCES = {}", table).replace("NATIVE = {}", f"NATIVE = {native!r}")


def tokenizer_files(meta, vocab=None):
    """({name: text} of the files for AutoTokenizer, the token that ends a text or None).

    Without files if the tokenizer is unknown, or cannot be loaded (which is printed).
    """
    try:
        text = Text(meta["tokenizer"], meta.get("table"), vocab or None)
        tokenizer_json = text.tokenizer_json()
    except (ValueError, KeyError) as error:
        if meta.get("tokenizer"):
            print(f"no tokenizer files: {error}", file=sys.stderr)
        return {}, 50256 if meta.get("tokenizer") == "gpt2" else None
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
                "model_max_length": int(1e30)}
    end = text.end_of_text
    if end:
        settings |= {"bos_token": end, "eos_token": end}
    texts = json.dumps(tokenizer_json, ensure_ascii=False), json.dumps(settings, indent=1)
    return dict(zip(TOKENIZER, texts, strict=True)), text.eot_token if end else None


def push(folder, name):
    """Upload the folder to Hugging Face's hub as user/name, with its own client. Raises ConfigError."""
    try:
        from huggingface_hub import HfApi

        HfApi().create_repo(name, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=folder)
    except Exception as error:  # the client raises a dozen kinds: not logged in, no network, no such name
        raise ConfigError(f"push {name}: {' '.join(str(error).split())[:200]} (hf auth login; {folder} is written: "
                          "repeat the command with --overwrite)") from None


def write(folder, config, tensors, overwrite=False, files=()):
    """Write config.json, model.safetensors and `files`, {name: text}; at any moment `folder` is absent, or a complete
    old or new one. Raises ConfigError if `check_target` or the disk refuses."""
    check_target(folder, FILES, overwrite)
    target = Path(folder).resolve()  # a rename cannot replace a link to a folder
    tmp, old = (target.with_name(f".{target.name}.export.{kind}-{os.getpid()}") for kind in ("tmp", "old"))
    try:
        tmp.mkdir(parents=True)
        write_json(tmp / "config.json", config)
        checkpoint.save(tmp / "model.safetensors", tensors, {}, kind="pt")  # the only kind that transformers reads
        for name, text in dict(files).items():
            (tmp / name).write_text(text, encoding="utf-8")
        if target.exists():
            os.rename(target, old)
        os.rename(tmp, target)
        sync_folder(target.parent)
    except OSError as error:
        if old.exists():
            os.rename(old, target)
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def check_target(folder, files, overwrite):
    """Raises ConfigError unless `folder` is absent, empty, or holds only `files` and may be overwritten.

    First restores or deletes whatever a killed `write` left next to it.
    """
    target = Path(folder).resolve()
    for left in sorted(target.parent.glob(f".{glob.escape(target.name)}.export.*-[0-9]*")):  # old- before tmp-
        if ".export.old-" in left.name and not os.path.lexists(target):
            os.rename(left, target)
        else:
            shutil.rmtree(left)
    try:
        there = sorted({*os.listdir(folder)} - {".lock"}) if os.path.lexists(folder) else []  # .lock: of a run
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}: choose another folder") from None
    other = [name for name in there if name.partition(".tmp-")[0] not in files]
    if other:
        raise ConfigError(f"{folder} contains other files ({other[0]}), which are never overwritten: choose another "
                          "folder")
    if there and not overwrite:
        raise ConfigError(f"{folder} is not empty: choose another folder, or use --overwrite")


def export_run(config):
    check_target(config.to, FILES, config.overwrite)  # check first: reading may take minutes
    lm, meta = sample.load_model(config.out_dir)
    files, end_of_text = tokenizer_files(meta, config.vocab)
    there, tensors = to_hf(lm, getattr(torch, config.dtype), end_of_text)
    there["run"] = {key: meta.get(key) for key in ("tokenizer", "table", "step", "tokens", "data")}
    is_ours = there["model_type"] == "longhorn"
    write(config.to, there, tensors, config.overwrite, files | ({CODE: modelling_code()} if is_ours else {}))
    count, trust = sum(t.numel() for t in tensors.values()), ", trust_remote_code=True" if is_ours else ""
    print(f"wrote {config.to}: {count:,} parameters; load it with AutoModelForCausalLM.from_pretrained({config.to!r}"
          f"{trust})")
    if config.push:
        push(config.to, config.push)
        print(f"uploaded to {config.push}")


def import_folder(config):
    check_target(config.out_dir, ("checkpoint.safetensors",), config.overwrite)
    lm = load(config.from_hf)
    run = read_json(Path(config.from_hf) / "config.json").get("run") or {}  # written by export.py, for sample.py
    kinds = {"tokenizer": str, "table": str, "step": int, "tokens": int}
    if (not isinstance(run, dict) or any(not isinstance(run.get(key) or kind(), kind) for key, kind in kinds.items())
            or not re.fullmatch("bytes|gpt2|char|(tiktoken|hf):.+", run.get("tokenizer") or "bytes")):
        raise ConfigError(f"{config.from_hf}/config.json: invalid \"run\", not written by export.py: {str(run)[:200]}")
    if config.tokenizer == "auto":
        tokenizer, table = run.get("tokenizer"), run.get("table")
    else:
        text = Text(config.tokenizer, vocab=config.vocab or None) if config.tokenizer != "gpt2" else None
        tokenizer, table = (text.name, text.table) if text else ("gpt2", None)
    tensors, structure = checkpoint.flatten({"model": lm.state_dict()})
    meta = {"skeleton": structure, "config": dataclasses.asdict(lm.config), "step": run.get("step") or 0,
            "tokens": run.get("tokens") or 0, "data": run.get("data"), "tokenizer": tokenizer,
            "table": table, "imported_from": config.from_hf}
    path = Path(config.out_dir) / "checkpoint.safetensors"
    try:
        with lock_run_dir(path.parent):
            checkpoint.save(path, tensors, meta)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
    unknown = "" if tokenizer else " (first import it again with its --tokenizer, such as bytes or gpt2)"
    print(f"wrote {path}: {lm.config.model}, {sum(p.numel() for p in lm.parameters()):,} parameters; "
          f"next: python sample.py {shlex.quote(f'--out_dir={config.out_dir}')}{unknown}")


def main(argv):
    config = configurator.load(ExportConfig, argv)
    if not config.out_dir or bool(config.to) == bool(config.from_hf):
        raise ConfigError("give --out_dir and either --to, to export its model, or --from_hf, to import one")
    if config.to and config.tokenizer != "auto" or config.from_hf and "dtype" in config.overrides:
        raise ConfigError("--tokenizer works with --from_hf only, --dtype with --to only: a checkpoint's weights are "
                          "float32")
    if config.push and config.from_hf:
        raise ConfigError("--push works with --to only")
    (export_run if config.to else import_folder)(config)


if __name__ == "__main__":
    with errors.main_error("export.py", ValueError):
        try:
            main(sys.argv[1:])
        except KeyboardInterrupt:
            sys.exit(130)
