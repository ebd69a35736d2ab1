"""What a version of the code trains and loads: run by edit.py at the top of a tree, prints one line of JSON.

    python experiments/edit_probe.py REPEAT CONFIG [--key=value ...] DATA
"""

import hashlib
import json
import os
import sys
import timeit
from modulefinder import ModuleFinder
from pathlib import Path

TREE = os.getcwd()
sys.path[0] = TREE  # the tree's modules, not those beside this file
opened = set()
sys.addaudithook(lambda event, args: opened.add(args[0]) if event == "open" and isinstance(args[0], str) else None)

import torch  # noqa: E402

import configurator  # noqa: E402
import train  # noqa: E402
from inspection import counting  # noqa: E402
from runtime import records  # noqa: E402


def main(repeat, argv, data):
    plain, config = (configurator.load(train.TrainConfig, arguments) for arguments in (argv[:1], argv))
    meta = Path(data, config.dataset.split(":")[0], "meta.json")  # of a mixture's first part
    vocab = json.loads(meta.read_text())["vocab_size"] if meta.exists() else 256
    opened.discard(str(meta))
    config.vocab_size = config.vocab_size or -(-vocab // 64) * 64
    given = {a.split("=")[0] for a in argv[1:]}
    width = 1 if "--learning_rate" in given else plain.n_embd / config.n_embd
    train.seed_all(1)
    model = train.build_model(config, "cpu")
    draws = {}
    for name, p in model.named_parameters():
        draws[name] = [p.numel(), hashlib.sha256(p.detach().float().numpy().tobytes()).hexdigest()]
    idx = torch.randint(config.vocab_size, (config.micro_batch_size, config.block_size))
    times = [0]
    if not torch.cuda.is_available():
        times = timeit.repeat(lambda: model(idx, idx)[1].backward(), repeat=repeat, number=1)
    print(json.dumps({
        "learning_rate": float(f"{config.learning_rate * width:.3g}"), "dataset": config.dataset,
        "batch_tokens": config.batch_tokens, "eval_block_size": config.eval_block_size or config.block_size,
        "s/token": min(times) / idx.numel(), "state": counting.state_size(model),
        "parameters": counting.parameter_count(model)["total"],
        "FLOPs per token": counting.flops_per_token(model)["total"], "draws": draws, "files": files()}))


def files():
    """The tree's files that a run loads: what is opened or imported by now, what these files import late, and the
    sources and headers of the kernels."""
    loaded = {getattr(module, "__dict__", {}).get("__file__") for module in [*sys.modules.values()]}
    names = inside((loaded | opened) - {__file__})
    late = ModuleFinder([TREE])
    for name in names:
        if name.endswith(".py"):
            late.load_file(name)
    native = [*records.NATIVE_SOURCES, *Path("kernels").glob("*.h")]
    return sorted(names | inside(module.__file__ for module in late.modules.values()) | inside(native))


def inside(paths):
    """{paths relative to the tree} of those files that are in it, without packages, caches and what runs make."""
    built = os.path.abspath(os.environ.get("LONGHORN_BUILD_DIR", "build"))
    found = set()
    for path in map(os.path.abspath, filter(None, paths)):
        name = os.path.relpath(path, TREE)
        if name[0] != "." and "-packages" not in name and "__pycache__" not in name and not path.startswith(built):
            if os.path.isfile(path):
                found.add(Path(name).as_posix())
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:-1], sys.argv[-1])
