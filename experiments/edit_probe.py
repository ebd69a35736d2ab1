"""What does a version of the code train and load? edit.py runs this at the top of a tree. Prints one line of JSON.

    python experiments/edit_probe.py CONFIG [--key=value ...] DATA
"""

import hashlib
import json
import os
import re
import sys
from modulefinder import ModuleFinder
from pathlib import Path

TREE = os.getcwd()
opened = set()
if __name__ == "__main__":
    sys.path[0] = TREE  # the tree's modules, not those beside this file
    sys.addaudithook(lambda event, args: opened.add(args[0]) if event == "open" and isinstance(args[0], str) else None)

import configurator  # noqa: E402
import train  # noqa: E402
from inspection import counting  # noqa: E402
from runtime import records  # noqa: E402


def main(argv, data):
    plain, config = (configurator.load(train.TrainConfig, arguments) for arguments in (argv[:1], argv))
    meta = Path(data, config.dataset.split(":")[0], "meta.json")  # in a mixture: of its first part
    vocab = json.loads(meta.read_text())["vocab_size"] if meta.exists() else 256
    opened.discard(str(meta))
    config.vocab_size = config.vocab_size or -(-vocab // 64) * 64
    given = {a.split("=")[0] for a in argv[1:]}
    width = 1 if "--learning_rate" in given else plain.n_embd / config.n_embd
    train.seed_all(1)
    model = train.build_model(config, "cpu")
    draws = {}
    for name, p in model.named_parameters():
        draws[name] = [p.numel(), digest(p.detach().float().numpy().tobytes())]
    print(json.dumps({
        "learning_rate": float(f"{config.learning_rate * width:.3g}"), "dataset": config.dataset,
        "batch_tokens": config.batch_tokens, "eval_block_size": config.eval_block_size or config.block_size,
        "state": counting.state_size(model), "parameters": counting.parameter_count(model)["total"],
        "FLOPs per token": counting.flops_per_token(model)["total"], "draws": draws,
        "files": {name: digest(Path(TREE, name).read_bytes()) for name in files(model)}}))


def digest(content):
    return hashlib.sha256(content).hexdigest()


def files(model):
    """The tree's files that a run loads: those opened or imported so far, those that they import late, and the sources
    and headers of the kernels. Files in families/ that name none of the model's families are left out."""
    loaded = {getattr(module, "__dict__", {}).get("__file__") for module in [*sys.modules.values()]}
    unused = {str(path) for path in Path(TREE, "families").glob("[!_]*.py")
              if not re.search(rf"\b({'|'.join(model.config.families)})\b", path.read_text())}
    names = inside((loaded | opened) - {__file__} - unused)
    late = ModuleFinder([TREE])
    for name in names:
        if name.endswith(".py"):
            late.load_file(name)
    return names | inside(module.__file__ for module in late.modules.values()) | inside(records.NATIVE_SOURCES)


def inside(paths):
    """The paths, relative to the tree, of the files inside it, without packages, caches and files that runs write."""
    built = os.path.abspath(os.environ.get("LONGHORN_BUILD_DIR", "build"))
    found = set()
    for path in map(os.path.abspath, filter(None, paths)):
        name = os.path.relpath(path, TREE)
        if name[0] != "." and "-packages" not in name and "__pycache__" not in name and not path.startswith(built):
            if os.path.isfile(path):
                found.add(Path(name).as_posix())
    return found


if __name__ == "__main__":
    main(sys.argv[1:-1], sys.argv[-1])
