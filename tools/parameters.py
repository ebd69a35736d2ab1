"""Prints the size of every family at the sizes in config/, next to the counts in the paper's Table 1: parameters, FLOPs
per token (forward and backward) and the state per sequence.

    python tools/parameters.py
    python tools/parameters.py config/longhorn_laptop.py --n_layer=6    # train.py's settings
"""

import dataclasses
import itertools
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import configurator  # noqa: E402
import families  # noqa: E402, F401
from common.errors import main_error  # noqa: E402
from data.prepared import DataError  # noqa: E402
from inspection import counting  # noqa: E402
from model import FAMILIES, LM, ModelConfig  # noqa: E402
from train import TrainConfig, open_data  # noqa: E402

SIZES = {"120M": {"n_layer": 12, "n_head": 12, "n_embd": 768}, "350M": {"n_layer": 24, "n_head": 16, "n_embd": 1024}}
LARGE = {"340M": {**SIZES["350M"], "vocab_size": 32000},  # 340M: used in other papers; 1.3B: the paper's Section 5.3
         "1.3B": {"n_layer": 24, "n_head": 16, "n_embd": 2048, "vocab_size": 32000}}
TABLE1 = {  # the paper's counts
    "longhorn": {"120M": 128.6e6, "350M": 369.8e6}, "mamba": {"120M": 129.2e6, "350M": 371.5e6},
    "llama": {"120M": 124.4e6, "350M": 357.7e6}, "gla": {"120M": 123.8e6, "350M": 361.1e6},
    "retnet": {"120M": 129.1e6, "350M": 373.2e6}, "rwkv": {"120M": 124.4e6, "350M": 354.8e6},
}


def config_settings(family, size):
    """Model settings in config/<family>_<size>.py, if that exists: heads, widths and states."""
    path = ROOT / "config" / f"{family}_{size.lower()}.py"
    if not path.exists():
        return {}
    config = configurator.load(TrainConfig, [str(path)])
    return {name: getattr(config, name) for name in ("n_head", "mlp_multiple", "d_state", "window")}


def shapes(argv):
    """Yields (family, size, {setting: value} of a ModelConfig) for the model in argv; without argv, for every family at
    every size."""
    config = configurator.load(TrainConfig, argv, doc=__doc__)
    if argv:
        try:
            if not config.vocab_size:
                open_data(config, "cpu")
        except DataError as error:
            if any(word.startswith("--dataset") for word in argv):
                raise
            config.vocab_size = ModelConfig.vocab_size
            print(f"{error}: counting with GPT-2's vocabulary, --vocab_size={config.vocab_size}", file=sys.stderr)
        settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(ModelConfig)}
        yield config.pattern or config.model, f"{config.n_layer} x {config.n_embd}", settings
        return
    for family, (size, shape) in itertools.product(FAMILIES, (SIZES | LARGE).items()):
        yield family, size, {"model": family, "block_size": 1024, **shape, **config_settings(family, size)}


def main(argv):
    with torch.device("meta"):
        rows = [(family, size, LM(ModelConfig(**settings))) for family, size, settings in shapes(argv)]
    print("family          size       parameters   Table 1    off  FLOPs/token  state at block_size")
    for family, size, lm in rows:
        count = counting.parameter_count(lm)["total"]
        paper = TABLE1.get(family.removesuffix("_released"), {}).get(size)
        beside = f"{paper / 1e6:8.1f}M {count / paper - 1:+6.1%}" if paper else f"{'-':>9} {'-':>6}"
        print(f"{family:15} {size:8} {count / 1e6:11.2f}M {beside} "
              f"{counting.flops_per_token(lm)['total'] / 1e6:11.0f}M {counting.state_size(lm) / 1e6:13.2f}M")


if __name__ == "__main__":
    with main_error("tools/parameters.py", ValueError):
        main(sys.argv[1:])
