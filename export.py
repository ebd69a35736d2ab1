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

Before an export is done, transformers loads what was written, and its logits on random tokens are compared with the
model's. An edited LLaMA, Mamba or RWKV-4 that transformers' class does not reproduce is exported under model_type
"longhorn", with its code; so is one of packed documents, and any with --with_code. `--check=FOLDER` repeats the
comparison on any later day and machine. That runs the code in the folder; an import runs none.
"""

import contextlib
import dataclasses
import functools
import glob
import hashlib
import importlib.machinery
import importlib.util
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
from model import FAMILIES, LM, ModelConfig, round_up
from runtime import checkpoint
from runtime.folder import lock_run_dir
from runtime.records import NATIVE_SOURCES, BadRecord, code_since, fields, is_of_run, write_json
from runtime.records import read_json as read_record


@dataclass
class ExportConfig:
    out_dir: str = ""  # a run's folder: exported with --to, created by --from_hf (train.py cannot resume that)
    to: str = ""  # export: folder to write config.json and model.safetensors to
    from_hf: str = ""  # import: folder to read them from
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # export: dtype of the weights
    tokenizer: str = "auto"  # import: bytes, tiktoken:NAME or hf:NAME; auto: as in its config.json
    vocab: str = ""  # folder with a tiktoken vocabulary's files, to need no network
    push: str = ""  # export: user/name, also upload the folder to Hugging Face's hub (log in first: hf auth login)
    license: str = ""  # export: licence of the weights for the model card, as mit or cc-by-4.0
    with_code: bool = False  # export: with this project's code, also where transformers has the family
    check: str = ""  # an exported folder: verify it (with --out_dir, against that run's checkpoint); runs its code
    overwrite: bool = False  # replace an earlier export or import in that folder

    RENAMED = {"own_code": "with_code"}


ROOT = Path(__file__).resolve().parent
CODE, TOKENIZER = "modeling_longhorn.py", ("tokenizer.json", "tokenizer_config.json")
FILES = ("config.json", "model.safetensors", "README.md", CODE, *TOKENIZER)
ARCHITECTURES = {"llama": "LlamaForCausalLM", "mamba": "MambaForCausalLM", "rwkv4": "RwkvForCausalLM"}
FIXED = {"architectures": ["LonghornForCausalLM"], "model_type": "longhorn", "tie_word_embeddings": False,
         "auto_map": {"AutoConfig": "modeling_longhorn.LonghornConfig",
                      "AutoModelForCausalLM": "modeling_longhorn.LonghornForCausalLM"}}
SETTINGS = {f.name: f for f in dataclasses.fields(ModelConfig) if f.name != "backend"}  # backend depends on the machine
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {"transformers": 1e-5, "longhorn": 1e-4}  # of the largest logit in float32, for whose class was written
CHECK_TOKENS = 4096  # at most block_size
RWKV = "; RwkvForCausalLM ignores attention_mask and mixes a batch's rows: give it one text at a time, or --with_code"

KINDS = {"llama": "llama", "mamba": "mamba", "rwkv": "rwkv4"}  # model_type in transformers -> our family
# field -> (default in transformers, value that our skeleton has); other values would change the function
ONLY = {"llama": {"hidden_act": ("silu", "silu"), "rms_norm_eps": (1e-6, 1e-5), "tie_word_embeddings": (False, True),
                  "attention_bias": (False, False), "mlp_bias": (False, False)},
        "mamba": {"hidden_act": ("silu", "silu"), "layer_norm_epsilon": (1e-5, 1e-5),
                  "tie_word_embeddings": (True, True), "use_bias": (False, False), "use_conv_bias": (True, True)},
        "rwkv4": {"layer_norm_epsilon": (1e-5, 1e-5), "tie_word_embeddings": (False, True)}}

ROPE = {"rope_type": ("default", "default"), "rope_theta": (1e4, 1e4), "partial_rotary_factor": (1, 1)}
# Fields that model_config reads, and those that do not change the logits: training, generation and bookkeeping.
READ = {"llama": {"num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rope_parameters",
                  "rope_scaling", "max_position_embeddings", *ROPE},
        "mamba": {"expand", "time_step_rank", "intermediate_size", "state_size", "conv_kernel", "block_size"},
        "rwkv4": {"attention_hidden_size", "context_length", "intermediate_size"}}
HARMLESS = {
    "model_type", "architectures", "quantization_config", "hidden_size", "num_hidden_layers", "vocab_size",
    "transformers_version", "_name_or_path", "dtype", "torch_dtype", "run", "initializer_range", "use_cache",
    "return_dict", "id2label", "label2id", "bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout",
    "pretraining_tp", "residual_in_fp32", "time_step_scale", "time_step_min", "time_step_max", "time_step_floor",
    "time_step_init_scheme", "rescale_prenorm_residual", "use_mambapy", "use_associative_scan", "rescale_every"}

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


def names(config, kind):
    """{name in the file: (our name, None, or (i, n) for part i of n of its rows)} for every tensor of LM(config).

    kind: a family of ARCHITECTURES, for transformers' names, in which a qkv matrix (3 d, d) has three names, and so
    have RWKV-4's shifts; any other for our own.
    """
    if kind not in ENDS:
        return {name: (name, None) for name in weights_of(skeleton(config))}
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


def weights_of(lm):
    """The LM's state_dict without what get_extra_state returns, which is for training."""
    return {name: t for name, t in lm.state_dict().items() if not name.endswith("_extra_state")}


def as_in_file(state, config, kind):
    """{name in the file: tensor} from one of our state_dicts; views where possible."""
    tensors = {}
    for name, (our_name, part) in names(config, kind).items():
        tensors[name] = state[our_name] if part is None else state[our_name].chunk(part[1])[part[0]]
        if name.endswith("conv1d.weight"):
            tensors[name] = tensors[name].unsqueeze(1)  # (d_inner, 1, d_conv)
        if ".time_mix_" in name:
            tensors[name] = 1 - tensors[name][None]  # (1, 1, d): the current token's weight
    return tensors


def misfit(lm):
    """Why transformers' class for its family cannot hold an LM's tensors; None if it can, as far as names tell."""
    ours, kind = weights_of(lm), family(lm.config)
    theirs = {our_name for our_name, _ in names(lm.config, kind).values()}
    if kind in ARCHITECTURES and lm.config.documents == "pack" and lm.config.end_of_text >= 0:
        return "it reads on after the token that ends a document (documents=pack)"
    if kind not in ARCHITECTURES or ours.keys() == theirs:
        return None
    odd = next(name for name in [*ours, *theirs] if (name in ours) != (name in theirs))
    return f"the model has {odd}, which {ARCHITECTURES[kind]} lacks" if odd in ours else f"the model has no {odd}"


def to_hf(lm, dtype=None, end_of_text=None, kind=None):
    """(config.json's dict, {name: tensor on the CPU}) for a model; tensors are copies of its weights.

    dtype: a torch dtype, default the model's; end_of_text: the token that ends a text, at which generation stops; kind:
    "longhorn" for our own names and code, default the model's family. Raises ConfigError if float16 cannot hold a
    weight.
    """
    c, dtype, kind = lm.config, dtype or lm.embed.weight.dtype, kind or family(lm.config)
    tensors = as_in_file(lm.state_dict(), c, kind)
    as_written = lambda t: t.detach().to("cpu", dtype if t.is_floating_point() else t.dtype, copy=True).contiguous()
    tensors = {name: as_written(t) for name, t in tensors.items()}
    for name, t in tensors.items():
        if dtype == torch.float16 and t.isinf().any():
            raise ConfigError(f"{name} is out of range for float16 (largest 65504): use bfloat16")
    dtype = str(dtype).removeprefix("torch.")
    if kind not in ARCHITECTURES:
        settings = {name: getattr(c, name) for name in SETTINGS}
        settings |= {"backend": "torch"} if c.backend == "torch" else {}  # its plain operators may have been edited
        return {**FIXED, "dtype": dtype, "eos_token_id": end_of_text, "bos_token_id": end_of_text, **settings}, tensors
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
    kind = "longhorn" if config["model_type"] == "longhorn" else ours.model
    if kind == "longhorn" and all(name.startswith("model.") for name in tensors):  # transformers' prefix when it saves
        tensors = {name.removeprefix("model."): t for name, t in tensors.items()}
    if ours.n_layer > len(tensors):  # check before building a skeleton with so many layers
        raise ConfigError(f"the config has {ours.n_layer} layers, more than there are tensors ({len(tensors)})")
    try:
        lm = skeleton(ours)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"the config describes no valid model: {error}") from None
    expected, skeletons = as_in_file(lm.state_dict(), ours, kind), weights_of(lm)
    check_tensors(expected, tensors, ours.model)
    floats = [tensors[name].dtype for name, t in expected.items() if t.is_floating_point()]
    dtype, parts = functools.reduce(torch.promote_types, floats, torch.float32), {}
    for name, (our_name, _) in names(ours, kind).items():
        t = tensors[name].detach().to("cpu", dtype if expected[name].is_floating_point() else expected[name].dtype)
        parts.setdefault(our_name, []).append(1 - t if ".time_mix_" in name else t)
    state = {name: pieces[0] if len(pieces) == 1 else torch.cat(pieces) for name, pieces in parts.items()}
    lm = LM(ours).to(dtype)  # not the skeleton: a mixer may hold tensors that no file has
    lm.load_state_dict({name: t.reshape(skeletons[name].shape) for name, t in state.items()}, strict=False)
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
        if dtype not in FLOATS and t.is_floating_point():
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
        return longhorn_config(config)
    if kind not in list(KINDS):  # a list, because values from JSON may not be hashable
        raise ConfigError(f"model_type {kind!r} is not supported: only llama, mamba, rwkv and this project's longhorn")
    kind = KINDS[kind]
    named = [ARCHITECTURES[kind]]
    require(config, {"architectures": (named, named), "quantization_config": (None, None), **ONLY[kind]})
    refuse_unknown(config, {*HARMLESS, *ONLY[kind], *READ[kind]})
    d, layers = whole(config, "hidden_size"), whole(config, "num_hidden_layers")
    sizes = {"n_embd": d, "n_layer": layers, "vocab_size": whole(config, "vocab_size")}
    if kind == "rwkv4":
        require(config, {"attention_hidden_size": (d, d)})
        sizes |= {"n_head": 1, "block_size": whole(config, "context_length", 1024),
                  "mlp_multiple": mlp_multiple(whole(config, "intermediate_size", 4 * d), d, 4 * d, "4")}
    elif kind == "llama":
        heads = whole(config, "num_attention_heads")
        require(config, {"num_key_value_heads": (heads, heads), "head_dim": (d // heads, d // heads)})
        check_rope("config", {key: config[key] for key in ROPE if key in config})  # where older files have the base
        for name in ("rope_parameters", "rope_scaling"):  # the latter in older files, and in some beside the former
            check_rope(name, config.get(name) or {})
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


def check_rope(name, rope):
    """Raises ConfigError unless these settings of rotary positions are the default ones."""
    if not isinstance(rope, dict):
        raise ConfigError(f"{name} {rope!r} is not supported: only the default kind")
    require({**rope, "rope_type": rope.get("rope_type") or rope.get("type")}, ROPE)
    require(rope, {"type": ("default", "default")})
    refuse_unknown(rope, {*ROPE, "type"}, f"{name}: ")


def refuse_unknown(config, known, where=""):
    """Raises ConfigError for a field that may change what the model computes, which nothing here reads. Fields that are
    off (false, null, 0, empty) pass."""
    for field in sorted(config.keys() - known):
        if config[field]:
            raise ConfigError(f"{where}{field} {str(config[field])[:80]!r} is not supported: it may change what the "
                              "model computes (remove it if it does not)")


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


def longhorn_config(config):
    known = {*FIXED, "dtype", "run", "backend", "transformers_version", "use_cache",
             *(f"{name}_token_id" for name in ("bos", "eos", "pad"))}
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
    require(config, {"backend": ("", "torch")} if config.get("backend") else {})
    return ModelConfig(**settings, backend=config.get("backend") or "")


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
        check_weights(path, config.get("run"))
    return config, tensors


def check_weights(path, run):
    """Raises ConfigError if weights that `write` wrote are damaged, or not those that "run" in config.json names."""
    try:
        crc32 = checkpoint.checksum(path)
    except checkpoint.CheckpointError:
        return  # others have none
    expected = run.get("weights_crc32", crc32) if isinstance(run, dict) else crc32
    if crc32 != expected:
        raise ConfigError(f"{path}: these are the weights of another export (checksum {crc32}, config.json names "
                          f"{str(expected)[:20]}): take both files from one folder")
    checkpoint.load(path, prefix="no tensor")


def read_json(path):
    try:
        return {**json.loads(regular(path).read_bytes())}
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: give a folder with config.json and model.safetensors") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path}: not a JSON object of settings: {error}") from None


def modelling_code():
    """tools/modeling_longhorn.py with all sources that mixers.py and families/ import, directly or indirectly."""
    finder = modulefinder.ModuleFinder([str(ROOT)])
    for path in (ROOT / "families").glob("*.py"):
        finder.import_hook(f"families.{path.stem}" if path.stem != "__init__" else "families")
    files = [Path(module.__file__) for module in finder.modules.values() if module.__file__]  # others are built in
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}
    quoted = {path: text.replace("\\", "\\\\").replace("'''", r"\'\'\'") for path, text in sources.items()}
    table = "SOURCES = {\n" + "".join(f"{path!r}: '''\\\n{text}''',\n" for path, text in quoted.items()) + "}"
    native = {path: hashlib.sha256((ROOT / path).read_bytes()).hexdigest() for path in NATIVE_SOURCES}
    code = (ROOT / "tools" / CODE).read_text()
    return code.replace("SOURCES = {}", table).replace("NATIVE = {}", f"NATIVE = {native!r}")


def tokenizer_files(meta, vocab=None, most=None):
    """({name: text} of the files for AutoTokenizer, the token that ends a text or None, the one that pads or None).

    Padding is the token that ends a text or, if that is ordinary text, one after the vocabulary, below `most` if given;
    of 256 bytes then byte 255, which no UTF-8 text has. Without files if the tokenizer is unknown, or cannot be loaded
    (which is printed).
    """
    try:
        text = Text(meta["tokenizer"], meta.get("table"), vocab or None)
        tokenizer_json = text.tokenizer_json()
    except (ValueError, KeyError) as error:
        if meta.get("tokenizer"):
            print(f"no tokenizer files: {error}", file=sys.stderr)
        return {}, *[50256 if meta.get("tokenizer") == "gpt2" else None] * 2
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
                "model_max_length": int(1e30)}
    end = padding = None
    with contextlib.suppress(DataError):  # a tokenizer of Hugging Face without a token that ends a text
        end = text.end_of_text
    if end:
        settings |= {"bos_token": end, "eos_token": end, "pad_token": end}
        end = padding = text.eot_token
    elif most is None or text.n_vocab < most or text.kind == "bytes":
        padding, settings["pad_token"] = text.n_vocab, "<|pad|>"
        if padding == most:
            padding, ids = 255, tokenizer_json["model"]["vocab"]
            tokenizer_json["model"]["vocab"] = {token if i < 255 else "<|pad|>": i for token, i in ids.items()}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        tokenizer_json["added_tokens"].append({"id": padding, "content": "<|pad|>", **flags, "special": True})
    texts = json.dumps(tokenizer_json, ensure_ascii=False), json.dumps(settings, indent=1)
    return dict(zip(TOKENIZER, texts, strict=True)), end, padding


def push(folder, name):
    """Upload the folder to Hugging Face's hub as user/name, with its own client. Raises ConfigError."""
    try:
        from huggingface_hub import HfApi

        HfApi().create_repo(name, exist_ok=True)
        HfApi().upload_folder(repo_id=name, folder_path=folder)
    except Exception as error:  # the client raises a dozen kinds: not logged in, no network, no such name
        raise ConfigError(f"push {name}: {' '.join(str(error).split())[:200]} (hf auth login; {folder} is written: "
                          "repeat the command with --overwrite)") from None


def write(folder, config, tensors, overwrite=False, files=(), verified=None):
    """Write config.json, model.safetensors and `files`, {name: text}; at any moment `folder` is absent, or a complete
    old or new one, also if several processes write it at once.

    verified(path): called with the finished folder before it gets its name; returns more files. Raises ConfigError if
    `check_target` or the disk refuses.
    """
    check_target(folder, FILES, overwrite)
    target = Path(folder).resolve()  # a rename cannot replace a link to a folder
    tmp, old = (target.with_name(f".{target.name}.export.{kind}-{os.getpid()}") for kind in ("tmp", "old"))
    try:
        tmp.mkdir(parents=True)
        with locked(tmp):  # so that others see that its writer lives
            checkpoint.save(tmp / "model.safetensors", tensors, {}, kind="pt")  # the only kind that transformers reads
            weights = {"weights_crc32": checkpoint.checksum(tmp / "model.safetensors")}
            write_json(tmp / "config.json", {**config, "run": {**config.get("run", {}), **weights}})
            for more in (lambda: dict(files), lambda: verified(tmp) if verified else {}):
                for name, text in more().items():
                    (tmp / name).write_text(text, encoding="utf-8")
            with locked(target.parent):
                check_target(folder, FILES, overwrite, clean=False)  # again: another process may have been faster
                if target.exists():
                    os.rename(target, old)
                os.rename(tmp, target)
                sync_folder(target.parent)
    except OSError as error:
        if old.exists():
            os.rename(old, target)
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}: make room, or choose another folder"
                          ) from None
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def locked(folder, wait=True):
    """Yields True while this process alone holds a lock on a folder; False if another has it (only with wait=False),
    None if the file system has no locks."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        import fcntl  # not on Windows

        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        held = True
    except BlockingIOError:
        held = False
    except (ImportError, OSError):
        held = None
    try:
        yield held
    finally:
        os.close(handle)


def clean_up(target):
    """Restore or delete whatever a killed `write` left next to its target; a living one holds a lock."""
    leftovers = sorted(target.parent.glob(f".{glob.escape(target.name)}.export.*-[0-9]*"))  # old- before tmp-
    if not leftovers:
        return
    with locked(target.parent):
        for left in leftovers:
            with contextlib.suppress(FileNotFoundError), locked(left, wait=False) as dead:
                if dead is not False and ".export.old-" in left.name and not os.path.lexists(target):
                    os.rename(left, target)
                elif dead:
                    shutil.rmtree(left)


def check_target(folder, files, overwrite, clean=True):
    """Raises ConfigError unless `folder` is absent, empty, or holds only `files` and may be overwritten. First, with
    `clean`, see clean_up."""
    try:
        if clean:
            clean_up(Path(folder).resolve())
        ignored = {".lock", "__pycache__"}  # left by a run, and by a program that has imported the folder's code
        there = sorted({*os.listdir(folder)} - ignored) if os.path.lexists(folder) else []
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}: choose another folder") from None
    other = [name for name in there if name.partition(".tmp-")[0] not in files]
    if other:
        raise ConfigError(f"{folder} contains other files ({other[0]}), which are never overwritten: choose another "
                          "folder")
    if there and not overwrite:
        raise ConfigError(f"{folder} is not empty: choose another folder, or use --overwrite")


# -------------------------------------------------------------------------------------------------------- verification

class Unlike(ConfigError):
    """What was written is another model than the one that was given."""


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


def fingerprint(logits):
    """What --check compares: the last position's logits at up to 64 places, and their logsumexp."""
    return {"tokens": len(logits), "logits": [*logits[-1, :: -(-logits.shape[1] // 64)].tolist(),
                                              logits[-1].logsumexp(0).item()]}


def checksums(config, texts):
    """{name: sha256} of config.json, before `write` adds that of the weights, and of other files, {name: text}."""
    texts = {**texts, "config.json": json.dumps(config, sort_keys=True)}
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


@torch.inference_mode()
def logits_from(folder, config, n):
    """(T, vocab_size) float32 of a written folder on n random tokens, computed by transformers' class or, if that is
    not installed, by this repository; of our own by the code in the folder. Raises Unlike if it cannot be loaded."""
    idx, is_ours = random_tokens(config["vocab_size"], n), config["model_type"] == "longhorn"
    if not has_transformers():
        return load(folder)(idx)[0][0].float()
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    loader = transformers.AutoModelForCausalLM
    try:
        if is_ours:  # not through transformers' cache of code
            path = Path(folder) / CODE
            name = "modeling_longhorn_" + hashlib.sha256(path.read_bytes()).hexdigest()[:12]
            spec = importlib.util.spec_from_file_location(name, path, loader=Uncached(name, str(path)))
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            loader = module.LonghornForCausalLM
        model, report = loader.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        for problem, keys in report.items():
            if keys:
                raise Unlike(f"{problem.replace('_', ' ')}: {', '.join(map(str, sorted(keys)))[:200]}")
        return model.eval()(idx).logits[0].float()
    except (ValueError, RuntimeError, OSError, LookupError, TypeError, AttributeError, ImportError) as error:
        if isinstance(error, Unlike):
            raise
        raise Unlike(f"it cannot be loaded ({' '.join(str(error).split())[:200]})") from error


def has_transformers():
    return importlib.util.find_spec("transformers") is not None


def compare(expected, logits, config):
    """The largest difference over the largest expected value. Raises Unlike."""
    most = TOLERANCE["longhorn" if config["model_type"] == "longhorn" else "transformers"]
    difference = float((logits - expected).abs().max() / expected.abs().max())
    if not difference <= most:  # nan, too
        raise Unlike(f"its logits differ by {difference:.0e} of the largest, and rounding by at most {most:.0e}")
    return difference


def check_folder(config):
    """--check: every file but the model card, and the logits against those at the export, or those of a run."""
    folder = Path(config.check)
    there = read_json(folder / "config.json")
    checkpoint.load(folder / "model.safetensors", prefix="no tensor")
    try:
        recorded = there["run"]["verified"]
        if there["run"].pop("weights_crc32") != checkpoint.checksum(folder / "model.safetensors"):
            raise Unlike("its weights differ (config.json names another checksum)")
        sums = recorded.pop("files")
        present = [folder / name for name in sums if (folder / name).is_file()]
        now = checksums(there, {path.name: path.read_bytes().decode(errors="replace") for path in present})
        for name in sums:
            if now.get(name) != sums[name]:
                raise Unlike(f"its {name} is missing, damaged or edited")
        if not 0 < recorded["tokens"] <= CHECK_TOKENS:
            raise LookupError
        logits = logits_from(folder, there, recorded["tokens"])
        if config.out_dir:
            lm, _ = sample.load_model(config.out_dir)
            expected = logits_of(rounded(lm, getattr(torch, there["dtype"]), there), recorded["tokens"])
        else:
            expected, logits = (torch.tensor(x["logits"]) for x in (recorded, fingerprint(logits)))
        difference = compare(expected, logits, there)
    except Unlike as error:
        raise ConfigError(f"{folder} is not the model that was exported: {error}") from None
    except (LookupError, TypeError, AttributeError, RuntimeError):
        raise ConfigError(f"{folder}/config.json does not say what to verify: it was not written by export.py, or by "
                          "an earlier version") from None
    against = f"{config.out_dir}'s" if config.out_dir else "those at the export"
    print(f"{folder}: the files' checksums are right; logits agree to {difference:.0e} with {against}")


def rounded(lm, dtype, config):
    """The LM with its weights as a file of this dtype holds them."""
    kind = "longhorn" if config["model_type"] == "longhorn" else family(lm.config)
    return lm if dtype == torch.float32 else from_hf(*to_hf(lm, dtype, kind=kind))


# ---------------------------------------------------------------------------------------------------------- model card

CARD = """---
library_name: transformers
license: {license}
pipeline_tag: text-generation
---
# {name}

{model}: {parameters:,} parameters in {dtype}, trained for {steps:,} steps on {tokens:,} tokens.

- data: {data}
- licence of the weights: {licence}
- code: {code}
- verified: {verified}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}"{trust})
tokenizer = AutoTokenizer.from_pretrained("{name}")
```
"""


def model_card(config, lm, meta, there, verified):
    """The README.md of an exported folder: data, licence, commit, and how it was verified."""
    try:
        with fields():
            record = read_record(Path(config.out_dir) / "config.json")
            if not is_of_run(record, meta.get("code_versions")):
                raise BadRecord("another run's")
            ran_in = record["environment"]
            code = f"commit {ran_in['commit']}, {ran_in['code']}"
            code += ", with uncommitted changes" if ran_in["uncommitted_changes"] else ""
            code += "; changed between training and export" if code_since(config.out_dir) else ""
    except BadRecord:
        code = "unknown (the run's config.json is missing, damaged, or another run's)"
    splits = ", ".join(f"{split} sha256 {str(value)[:16]}" for split, value in (meta["data"] or {}).items())
    return CARD.format(
        name=config.push or Path(config.to).resolve().name, license=config.license or "unknown",
        licence=config.license or "not stated (--license)", model=lm.config.pattern or lm.config.model,
        parameters=sum(p.numel() for p in lm.parameters()), dtype=config.dtype, steps=meta["step"] or 0,
        tokens=meta["tokens"] or 0, data=f"{meta['config'].get('dataset', 'unknown')} ({splits or 'no checksum'})",
        code=code, verified=verified, trust=", trust_remote_code=True" * (there["model_type"] == "longhorn"))


def export_run(config):
    check_target(config.to, FILES, config.overwrite)  # check first: reading may take minutes
    lm, meta = sample.load_model(config.out_dir)
    kind, dtype = family(lm.config), getattr(torch, config.dtype)
    if kind in ARCHITECTURES and not config.with_code:
        reason = misfit(lm) or (not has_transformers() and "pip install transformers, which would verify that")
        try:
            if not reason:
                return written(config, lm, meta, kind, dtype)
        except Unlike as error:
            reason = str(error)
        print(f"no {ARCHITECTURES[kind]}: {reason}; exported with its own code, which needs trust_remote_code=True")
    try:
        written(config, lm, meta, "longhorn", dtype)
    except Unlike as error:
        raise ConfigError(f"the model cannot be read back from an export: {error}: nothing was written") from None


def written(config, lm, meta, kind, dtype):
    """Write and verify the folder, and say so; upload it, if asked. kind: see to_hf. Raises Unlike, before the folder
    exists."""
    most = lm.config.vocab_size if kind in ARCHITECTURES else None  # our own code never looks at padding
    files, end_of_text, padding = tokenizer_files(meta, config.vocab, most)
    there, tensors = to_hf(lm, dtype, end_of_text, kind)
    there |= {"pad_token_id": padding} if kind not in ARCHITECTURES else {}  # LLaMA's would get no gradient
    expected = logits_of(rounded(lm, dtype, there))
    there["run"] = {**{key: meta[key] for key in ("tokenizer", "table", "step", "tokens", "data")},
                    "verified": fingerprint(expected)}
    files |= {CODE: modelling_code()} if kind not in ARCHITECTURES else {}
    there["run"]["verified"]["files"] = checksums(there, files)
    agreement = []

    def verified(tmp):
        difference = compare(expected, logits_from(tmp, there, len(expected)), there)
        by = "transformers" if has_transformers() else "this repository"
        agreement.append(f"read back by {by}, its logits on {len(expected):,} random tokens agree to {difference:.0e} "
                         "of the largest")
        return {"README.md": model_card(config, lm, meta, there, agreement[0])}

    write(config.to, there, tensors, config.overwrite, files, verified)
    count, trust = sum(p.numel() for p in lm.parameters()), ", trust_remote_code=True" if CODE in files else ""
    print(f"wrote {config.to}: {count:,} parameters; load it with AutoModelForCausalLM.from_pretrained({config.to!r}"
          f"{trust}); {agreement[0]}{RWKV if kind == 'rwkv4' else ''}")
    if config.push:
        push(config.to, config.push)
        print(f"uploaded to {config.push}")


def import_folder(config):
    check_target(config.out_dir, ("checkpoint.safetensors",), config.overwrite)
    lm = load(config.from_hf)
    run = read_json(Path(config.from_hf) / "config.json").get("run") or {}  # written by export.py, for sample.py
    kinds = {"tokenizer": str, "table": str, "step": int, "tokens": int}
    if (not isinstance(run, dict) or any(not isinstance(run.get(key) or kind(), kind) for key, kind in kinds.items())
            or any(isinstance(run.get(key), bool) or not 0 <= (run.get(key) or 0) < 2**48 for key in ("step", "tokens"))
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
    if config.check and not (config.to or config.from_hf):
        return check_folder(config)
    if not config.out_dir or bool(config.to) == bool(config.from_hf) or config.check:
        raise ConfigError("give --out_dir and either --to, to export its model, or --from_hf, to import one; or "
                          "--check, to verify an exported folder")
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
