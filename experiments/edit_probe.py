"""What a version of the code trains: run by edit.py at the top of a snapshot, prints one line of JSON.

    python experiments/edit_probe.py CONFIG [--key=value ...] DATA
"""

import hashlib
import json
import os
import sys
import timeit
from pathlib import Path

sys.path[0] = os.getcwd()  # the snapshot's modules, not those beside this file

import torch  # noqa: E402

import configurator  # noqa: E402
import train  # noqa: E402
from inspection import counting  # noqa: E402


def main(argv, data):
    plain, config = (configurator.load(train.TrainConfig, arguments) for arguments in (argv[:1], argv))
    meta = Path(data, config.dataset.split(":")[0], "meta.json")  # of a mixture's first part
    vocab = json.loads(meta.read_text())["vocab_size"] if meta.exists() else 256
    config.vocab_size = config.vocab_size or -(-vocab // 64) * 64
    given = {a.split("=")[0] for a in argv[1:]}
    width = 1 if "--learning_rate" in given else plain.n_embd / config.n_embd
    train.seed_all(1)
    model = train.build_model(config, "cpu")
    idx = torch.randint(config.vocab_size, (config.micro_batch_size, config.block_size))
    times = [0]
    if not torch.cuda.is_available():
        times = timeit.repeat(lambda: model(idx, idx)[1].backward(), repeat=4, number=1)
    draws = {}
    for name, p in model.named_parameters():
        draws[name] = [p.numel(), hashlib.sha256(p.detach().float().numpy().tobytes()).hexdigest()]
    print(json.dumps({
        "learning_rate": float(f"{config.learning_rate * width:.3g}"), "dataset": config.dataset,
        "batch_tokens": config.batch_tokens, "eval_block_size": config.eval_block_size or config.block_size,
        "s/token": min(times) / idx.numel(), "state": counting.state_size(model),
        "parameters": counting.parameter_count(model)["total"],
        "FLOPs per token": counting.flops_per_token(model)["total"], "draws": draws}))


if __name__ == "__main__":
    main(sys.argv[1:-1], sys.argv[-1])
