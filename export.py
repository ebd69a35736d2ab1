"""Weights for others, and theirs for us: a folder with config.json and model.safetensors, written and read.

    python export.py --out_dir=out/llama_120m --to=hf_llama_120m          # then AutoModelForCausalLM.from_pretrained(...)
    python export.py --out_dir=out/longhorn_120m --to=longhorn_120m       # then export.load("longhorn_120m")
    python export.py --from_hf=hf_llama_120m --out_dir=out/imported       # then python sample.py --out_dir=out/imported

LLaMA and Mamba take the names and the config of Hugging Face transformers, which is not needed to write or read them. All
other families, and patterns of several, keep our own names, under the model_type "longhorn".

    here                                           LLaMA there                          Mamba there
    embed.weight (also the head)                   model.embed_tokens                   backbone.embeddings
    layers.i.branches.0 norm, mixer.qkv, out_proj  layers.i input_layernorm, self_attn  layers.2i norm, mixer
    layers.i.branches.1 norm, mixer.w1, w3, w2     post_attention_layernorm, mlp        layers.2i+1 norm, mixer

One of our layers has two residual branches, so n_layer Mamba layers here are 2 n_layer there, and an odd number of layers
cannot be read. What this skeleton cannot express (grouped queries, an untied head, another rotary base) is refused by field
and value, never approximated. Only JSON and safetensors are opened; nothing is unpickled.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import safetensors
import safetensors.torch
import torch

import checkpoint
import configurator
import sample
from configurator import ConfigError
from model import FAMILIES, LM, ModelConfig, current_names, round_up


@dataclass
class ExportConfig:
    out_dir: str = ""  # a run's folder: read with --to; made with --from_hf, for sample.py: train.py cannot resume from it
    to: str = ""  # folder to write config.json and model.safetensors to
    from_hf: str = ""  # folder to read them from, in place of --to
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the weights that --to writes
    tokenizer: Literal["auto", "bytes", "gpt2"] = "auto"  # of the model that --from_hf reads; auto: as its config.json notes
    overwrite: bool = False  # replace what an earlier export or import wrote there


ARCHITECTURES = {"llama": "LlamaForCausalLM", "mamba": "MambaForCausalLM"}
SETTINGS = {f.name: f for f in dataclasses.fields(ModelConfig) if f.name != "backend"}  # that is a machine's choice
OLD_SETTINGS = {"scan_backend", "kernel"}  # of exports until November 2026
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
END_OF_TEXT = {"gpt2": 50256}  # of tokenizers that have one

# field -> (what its absence means in transformers, what this skeleton has); other values would change the function
LLAMA_ONLY = {"hidden_act": ("silu", "silu"), "rms_norm_eps": (1e-6, 1e-5), "tie_word_embeddings": (False, True),
              "attention_bias": (False, False), "mlp_bias": (False, False), "quantization_config": (None, None)}
MAMBA_ONLY = {"hidden_act": ("silu", "silu"), "layer_norm_epsilon": (1e-5, 1e-5), "tie_word_embeddings": (True, True),
              "use_bias": (False, False), "use_conv_bias": (True, True), "quantization_config": (None, None)}


# ---------------------------------------------------------------------------------------------------------------- names

def family(config):
    """The family of all layers, or "longhorn", which keeps our own names, for a pattern of several."""
    families = set(config.families)
    return families.pop() if len(families) == 1 else "longhorn"


def names(config):
    """{name in the file: (name here, None or which third of its rows)} of every tensor of LM(config).

    A qkv matrix (3 d, d) has three names in the file; everything else is one to one.
    """
    layers = range(config.n_layer)
    if family(config) == "llama":
        found = {"model.embed_tokens.weight": ("embed.weight", None), "model.norm.weight": ("norm.weight", None)}
        for i in layers:
            there, (attention, mlp) = f"model.layers.{i}", (f"layers.{i}.branches.{j}" for j in (0, 1))
            for part, letter in enumerate("qkv"):  # rotated as halves on both sides: rows keep their order
                found[f"{there}.self_attn.{letter}_proj.weight"] = (f"{attention}.mixer.qkv.weight", part)
            for name, here in (("input_layernorm", f"{attention}.norm"), ("self_attn.o_proj", f"{attention}.mixer.out_proj"),
                               ("post_attention_layernorm", f"{mlp}.norm"), ("mlp.gate_proj", f"{mlp}.mixer.w1"),
                               ("mlp.up_proj", f"{mlp}.mixer.w3"), ("mlp.down_proj", f"{mlp}.mixer.w2")):
                found[f"{there}.{name}.weight"] = (f"{here}.weight", None)
        return found
    if family(config) == "mamba":
        found = {"backbone.embeddings.weight": ("embed.weight", None), "backbone.norm_f.weight": ("norm.weight", None)}
        mixer = {"A_log": "A_log", "D": "D", "conv1d.weight": "conv_weight", "conv1d.bias": "conv_bias",
                 "dt_proj.weight": "dt_proj.weight", "dt_proj.bias": "dt_bias",
                 **{f"{name}.weight": f"{name}.weight" for name in ("in_proj", "x_proj", "out_proj")}}
        for i in range(2 * config.n_layer):
            branch = f"layers.{i // 2}.branches.{i % 2}"
            found[f"backbone.layers.{i}.norm.weight"] = (f"{branch}.norm.weight", None)
            found.update({f"backbone.layers.{i}.mixer.{name}": (f"{branch}.mixer.{here}", None)
                          for name, here in mixer.items()})
        return found
    return {name: (name, None) for name in skeleton(config).state_dict()}


def skeleton(config):
    """LM(config) without memory for its weights."""
    with torch.device("meta"):
        return LM(config)


def as_in_file(state, config):
    """{name in the file: tensor} of a state_dict of ours; views where they can be."""
    tensors = {}
    for name, (here, part) in names(config).items():
        tensors[name] = state[here] if part is None else state[here].chunk(3)[part]
        if name.endswith("conv1d.weight"):
            tensors[name] = tensors[name].unsqueeze(1)  # (d_inner, 1, d_conv)
    return tensors


# ------------------------------------------------------------------------------------------------------- pure functions

def to_hf(lm, dtype=None, end_of_text=None):
    """(config.json's dict, {name: tensor on the CPU}) of a model, copies of its weights.

    LLaMA and Mamba as transformers has them, any other family in our own names. dtype: a torch dtype, default the model's;
    end_of_text: the token that ends a text, where generation may stop, default none.
    Raises ConfigError where float16 cannot hold a weight.
    """
    c = lm.config
    dtype = dtype or lm.embed.weight.dtype
    tensors = {name: t.detach().to("cpu", dtype, copy=True).contiguous()
               for name, t in as_in_file(lm.state_dict(), c).items()}
    if dtype == torch.float16:
        for name, t in tensors.items():
            if t.isinf().any():
                raise ConfigError(f"{name} does not fit into float16 (largest 65504): use bfloat16")
    shared = {"dtype": str(dtype).removeprefix("torch."), "vocab_size": c.vocab_size, "hidden_size": c.n_embd,
              "hidden_act": "silu", "tie_word_embeddings": True, "use_cache": True, "initializer_range": 0.02,
              # said in full: transformers' own defaults would end every text at token 2, or 0
              "bos_token_id": end_of_text, "eos_token_id": end_of_text, "pad_token_id": None}
    if family(c) == "llama":
        return {"architectures": [ARCHITECTURES["llama"]], "model_type": "llama", **shared,
                "num_hidden_layers": c.n_layer, "num_attention_heads": c.n_head, "num_key_value_heads": c.n_head,
                "head_dim": c.n_embd // c.n_head, "intermediate_size": lm.layers[0].branches[1].mixer.w1.out_features,
                "max_position_embeddings": c.block_size, "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False,
                "attention_dropout": 0.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, tensors
    if family(c) == "mamba":
        block = lm.layers[0].branches[0].mixer
        return {"architectures": [ARCHITECTURES["mamba"]], "model_type": "mamba", **shared,
                "num_hidden_layers": 2 * c.n_layer, "state_size": c.d_state, "conv_kernel": c.d_conv, "expand": c.expand,
                "intermediate_size": block.d_inner, "time_step_rank": block.R, "layer_norm_epsilon": 1e-5,
                "use_bias": False, "use_conv_bias": True, "residual_in_fp32": True, "block_size": c.block_size}, tensors
    return {"architectures": ["LM"], "model_type": "longhorn", "dtype": shared["dtype"],
            **{name: getattr(c, name) for name in SETTINGS}}, tensors


def from_hf(config, tensors):
    """The LM in evaluation mode of a config.json's dict and its tensors, the inverse of `to_hf`.

    The weights are copies: float64 if there is any in `tensors`, else float32, into which half precision is widened.
    Raises ConfigError, one line, for what this skeleton cannot express, naming the field, its value and what it has;
    and for tensors that are missing, left over or of another shape.
    """
    ours = model_config(config)
    if ours.n_layer > len(tensors):  # before a skeleton of so many layers is made
        raise ConfigError(f"the config has {ours.n_layer} layers, more than there are tensors ({len(tensors)})")
    try:
        lm = skeleton(ours)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"no model has these sizes: {error}") from None
    expected = as_in_file(lm.state_dict(), ours)
    tensors = current_names(tensors)
    check_tensors(expected, tensors, ours.model)
    dtype = functools.reduce(torch.promote_types, (tensors[name].dtype for name in expected), torch.float32)
    parts = {}
    for name, (here, _) in names(ours).items():
        parts.setdefault(here, []).append(tensors[name].detach().to("cpu", dtype))
    state = {here: torch.cat(pieces).reshape(lm.get_parameter(here).shape) for here, pieces in parts.items()}  # cat copies
    lm.load_state_dict(state, assign=True)
    return lm.eval()


def check_tensors(expected, tensors, kind):
    """Raises ConfigError unless `tensors` are those of `expected`, by name, shape and a float dtype.

    What is no weight may be there too: a head that equals the embedding, and rotary frequencies of older files.
    """
    for name, t in expected.items():
        if name not in tensors:
            raise ConfigError(f"the tensor {name} is missing: the weights are not those of a {kind} of this config")
        if tensors[name].shape != t.shape:
            raise ConfigError(f"the tensor {name} is {tuple(tensors[name].shape)} where the config asks for {tuple(t.shape)}")
        if tensors[name].dtype not in FLOATS:
            raise ConfigError(f"the tensor {name} is {str(tensors[name].dtype).removeprefix('torch.')}: only float64, "
                              "float32, bfloat16 and float16 are supported, no quantised weights")
    embedding = next(iter(expected))
    for name in sorted(tensors.keys() - expected.keys()):
        if name == "lm_head.weight" and torch.equal(tensors[name], tensors[embedding]):
            continue
        if name == "lm_head.weight":
            raise ConfigError("lm_head.weight differs from the embedding: only a tied head is supported")
        if not name.endswith("rotary_emb.inv_freq"):
            raise ConfigError(f"the tensor {name} has no place in a {kind} of this project (no biases, no further norms)")


def model_config(config):
    """The ModelConfig of a config.json's dict. Raises ConfigError, one line, for what it cannot express."""
    kind = config.get("model_type")
    if kind == "longhorn":
        return own_config(config)
    if kind not in list(ARCHITECTURES):
        raise ConfigError(f"model_type {kind!r} is not supported: only llama, mamba and longhorn, this project's own")
    named = config.get("architectures")
    if named not in (None, [ARCHITECTURES[kind]]):
        raise ConfigError(f"architectures {named} is not supported: only {ARCHITECTURES[kind]}")
    for field, (absent, only) in (LLAMA_ONLY if kind == "llama" else MAMBA_ONLY).items():
        if config.get(field, absent) != only:
            is_absent = "" if field in config else " (it is absent)"
            raise ConfigError(f"{field} {config.get(field, absent)!r}{is_absent} is not supported: only {only!r}")
    return llama_config(config) if kind == "llama" else mamba_config(config)


def llama_config(config):
    d, heads = whole(config, "hidden_size"), whole(config, "num_attention_heads")
    for field, only in (("num_key_value_heads", heads), ("head_dim", d // heads)):
        if config.get(field) not in (None, only):
            raise ConfigError(f"{field} {config[field]!r} is not supported: only {only}, with num_attention_heads {heads} and "
                              f"hidden_size {d}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}  # the latter in older files
    if not isinstance(rope, dict):
        raise ConfigError(f"rope_parameters {rope!r} is not supported: only the default kind")
    rope = {"rope_type": rope.get("type", "default"), **{k: config[k] for k in ("rope_theta", "partial_rotary_factor")
                                                         if k in config}, **rope}
    for field, absent in (("rope_type", "default"), ("rope_theta", 10000), ("partial_rotary_factor", 1)):
        if rope.get(field, absent) not in (None, absent):
            raise ConfigError(f"{field} {rope[field]!r} is not supported: only {absent}")
    hidden = whole(config, "intermediate_size")
    # the last fits any width from 8 d / 3 on, as its first multiple
    multiple = next((m for m in (*(2**i for i in range(8, -1, -1)), hidden) if round_up(8 * d / 3, m) == hidden), None)
    if multiple is None:
        raise ConfigError(f"intermediate_size {hidden} is not supported: only {math.ceil(8 * d / 3)} or more, 8/3 of hidden_size "
                          f"{d}")
    return ModelConfig(model="llama", n_layer=whole(config, "num_hidden_layers"), n_head=heads, n_embd=d,
                       vocab_size=whole(config, "vocab_size"), mlp_multiple=multiple,
                       block_size=whole(config, "max_position_embeddings", 2048))


def mamba_config(config):
    d, layers, expand = whole(config, "hidden_size"), whole(config, "num_hidden_layers"), whole(config, "expand", 2)
    if layers % 2:
        raise ConfigError(f"num_hidden_layers {layers} is not supported: only an even number, two blocks to a layer of ours")
    if config.get("intermediate_size", expand * d) != expand * d:
        raise ConfigError(f"intermediate_size {config['intermediate_size']!r} is not supported: only {expand * d}, expand "
                          f"{expand} times hidden_size {d}")
    rank = 0 if config.get("time_step_rank", "auto") in ("auto", math.ceil(d / 16)) else whole(config, "time_step_rank")
    return ModelConfig(model="mamba", n_layer=layers // 2, n_embd=d, vocab_size=whole(config, "vocab_size"),
                       d_state=whole(config, "state_size", 16), d_conv=whole(config, "conv_kernel", 4), expand=expand,
                       dt_rank=rank, block_size=whole(config, "block_size", ModelConfig.block_size))


def own_config(config):
    known = {"architectures", "model_type", "dtype", "run", "transformers_version"}
    unknown = config.keys() - SETTINGS.keys() - OLD_SETTINGS - known
    if unknown:
        raise ConfigError(f"the setting {min(unknown)} is unknown here: {', '.join(SETTINGS)} are known; a newer version may "
                          "have written this")
    if config.get("model") not in list(FAMILIES):  # a list: what JSON holds may have no hash
        raise ConfigError(f"model {config.get('model')!r} is not supported: only {', '.join(FAMILIES)}")
    if not isinstance(config.get("pattern", ""), str):
        raise ConfigError(f"pattern {config['pattern']!r} is not supported: only a string")
    sizes = {name: config["dt_rank"] if name == "dt_rank" and config["dt_rank"] == 0 else whole(config, name)
             for name in SETTINGS if name in config and name not in ("model", "pattern")}
    ours = ModelConfig(model=config["model"], pattern=config.get("pattern", ""), **sizes)
    try:
        ours.families  # noqa: B018  raises ValueError
    except ValueError as error:
        raise ConfigError(error) from None
    return ours


def whole(config, field, absent=None):
    value = config.get(field, absent)
    if value is None:
        raise ConfigError(f"{field} is missing")
    if type(value) is not int or not 0 < value < 2**31:
        raise ConfigError(f"{field} {value!r} is not supported: only a whole number from 1 to {2**31 - 1}")
    return value


# -------------------------------------------------------------------------------------------------------------- folders

def load(folder):
    """The LM, in evaluation mode, of a folder that export.py wrote, or of a LLaMA or Mamba that transformers saved there.

    Raises ConfigError, one line, for a folder that cannot be read or a model that cannot be expressed here; see `from_hf`.
    """
    config, tensors = read(folder)
    return build(folder, config, tensors)


def build(folder, config, tensors):
    try:
        return from_hf(config, tensors)
    except ValueError as error:
        raise ConfigError(f"{folder}: {error}") from None


def read(folder):
    """(config.json's dict, {name: tensor}) of a folder, its weights in one file or, with an index, in several.

    The tensors may be windows onto the files. Raises ConfigError, one line.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")
    files, index = ["model.safetensors"], folder / "model.safetensors.index.json"
    if not (folder / files[0]).exists() and index.exists():
        where = read_json(index).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(f, str) and f == os.path.basename(f) for f in where.values()):
            raise ConfigError(f"{index}: weight_map is not a table from tensors to files of this folder")
        files = sorted(set(where.values()))
    tensors = {}
    for file in files:
        path = folder / file
        if not path.exists():
            pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
            why = f"{pickles[0]} may be a pickle, which could run code, and is not opened: save it as safetensors first" \
                if pickles else "there are no weights to read"
            raise ConfigError(f"{path}: no such file: {why}")
        try:
            with safetensors.safe_open(path, "pt") as f:
                tensors.update({name: f.get_tensor(name) for name in f.keys()})
        except (OSError, safetensors.SafetensorError) as error:
            raise ConfigError(f"{path}: not readable as safetensors: {error}") from None
    return config, tensors


def read_json(path):
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: give a folder with config.json and model.safetensors") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: not a table of settings")
    return value


def write(folder, config, tensors, overwrite=False):
    """Write config.json and model.safetensors, so that `folder` is at any moment absent, the old one or the new, and whole.

    Written beside (`folder.tmp-<pid>`) and renamed. Raises ConfigError, one line, where `check_target` or the disk refuses.
    """
    check_target(folder, ("config.json", "model.safetensors"), overwrite)
    target = Path(folder).resolve()  # a link to a folder cannot be renamed over
    tmp, old = (target.with_name(f"{target.name}.{kind}-{os.getpid()}") for kind in ("tmp", "old"))
    try:
        try:
            tmp.mkdir(parents=True)
            (tmp / "config.json").write_text(json.dumps(config, indent=2) + "\n")
            safetensors.torch.save_file(tensors, tmp / "model.safetensors", {"format": "pt"})
            shutil.copymode(tmp / "config.json", tmp / "model.safetensors")  # the library leaves 0600
            for path in (*tmp.iterdir(), tmp):
                sync(path)
            if target.exists() and any(target.iterdir()):  # a rename replaces nothing but an empty folder
                os.rename(target, old)
            try:
                os.rename(tmp, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.rename(old, target)
                raise
            sync(target.parent)
        finally:
            shutil.rmtree(tmp, ignore_errors=True)
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"cannot write {folder}: {getattr(error, 'strerror', None) or error}") from None
    shutil.rmtree(old, ignore_errors=True)


def check_target(folder, files, overwrite):
    """Raises ConfigError unless `folder` is absent, empty, or to be overwritten and of nothing but `files`."""
    try:
        there = sorted(os.listdir(folder))
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}: choose another folder") from None
    other = [name for name in there if name not in files and name.partition(".tmp-")[0] not in files]
    if other:
        raise ConfigError(f"{folder} holds other files ({other[0]}), which are never overwritten: choose another folder")
    if there and not overwrite:
        raise ConfigError(f"{folder} is not empty: choose another folder, or --overwrite")


def sync(path):
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -------------------------------------------------------------------------------------------------------------- command

def export_run(config):
    check_target(config.to, ("config.json", "model.safetensors"), config.overwrite)  # before minutes of reading
    try:
        lm, meta = sample.load_model(config.out_dir)
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"{config.out_dir}/checkpoint.safetensors: its weights do not fit its config: "
                          f"{str(error)[:200]}") from None
    there, tensors = to_hf(lm, getattr(torch, config.dtype), END_OF_TEXT.get(meta.get("tokenizer")))
    there["run"] = {key: meta.get(key) for key in ("tokenizer", "table", "step", "tokens", "data")}
    write(config.to, there, tensors, config.overwrite)
    size = os.path.getsize(Path(config.to) / "model.safetensors")
    loader = "AutoModelForCausalLM.from_pretrained" if there["model_type"] in ARCHITECTURES else "export.load"
    print(f"wrote {config.to}: {sum(t.numel() for t in tensors.values()):,} parameters, {size / 1e6:.3g} MB; load it with "
          f"{loader}({config.to!r})")


def check_run(run):
    """config.json's notes on the run, which sample.py goes by. Raises ConfigError where they are not what export.py writes."""
    whole_or_none = lambda v: v is None or type(v) is int and v >= 0
    texts_or_none = lambda v: v is None or isinstance(v, (str, list)) and all(isinstance(c, str) for c in v)
    if not isinstance(run, dict):
        raise ConfigError(f"run {run!r} of config.json is not a table of settings")
    for key, right in (("tokenizer", lambda v: v in (None, "bytes", "gpt2", "char")), ("table", texts_or_none),
                       ("step", whole_or_none), ("tokens", whole_or_none)):
        if not right(run.get(key)):
            raise ConfigError(f"run's {key} {str(run[key])[:80]!r} in config.json is not one that export.py writes")
    return run


def import_folder(config):
    check_target(config.out_dir, ("checkpoint.safetensors",), config.overwrite)
    there, tensors = read(config.from_hf)
    lm = build(config.from_hf, there, tensors)
    run = check_run(there.get("run") or {})
    tokenizer = run.get("tokenizer") if config.tokenizer == "auto" else config.tokenizer
    tensors, structure = checkpoint.flatten({"model": lm.state_dict()})
    meta = {"skeleton": structure, "config": dataclasses.asdict(lm.config), "step": run.get("step") or 0,
            "tokens": run.get("tokens") or 0, "data": run.get("data"), "tokenizer": tokenizer,
            "table": run.get("table") if tokenizer == run.get("tokenizer") else None, "imported_from": config.from_hf}
    path = Path(config.out_dir) / "checkpoint.safetensors"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.save(path, tensors, meta)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None
    then = f"go on with python sample.py --out_dir={config.out_dir}" if tokenizer else \
        "to sample text say which --tokenizer it has, bytes or gpt2"
    print(f"wrote {path}: {lm.config.model}, {lm.parameter_count()['total']:,} parameters, {path.stat().st_size / 1e6:.3g} MB; "
          f"{then}")


def main(argv):
    config = configurator.load(ExportConfig, argv)
    if not config.out_dir or bool(config.to) == bool(config.from_hf):
        raise ConfigError("give --out_dir and either --to, to export its model, or --from_hf, to import one")
    if config.to and config.tokenizer != "auto" or config.from_hf and "dtype" in config.overrides:
        raise ConfigError("tokenizer is a setting of --from_hf, dtype one of --to: a checkpoint's weights are float32")
    (export_run if config.to else import_folder)(config)


if __name__ == "__main__":
    with configurator.main_error("export.py", checkpoint.CheckpointError, ValueError):
        try:
            main(sys.argv[1:])
        except KeyboardInterrupt:
            sys.exit(130)
