"""Is a run's loss the plain cross-entropy of a model that reads earlier tokens alone? Run by edit.py at the top of a
snapshot, with its model and weights on real windows; prints one line of JSON, all in nats per token.

    python experiments/edit_judge.py RUN CONFIG [--key=value ...]

    reported, plain    the run's loss of the first documents, and that of the model's logits
    beside, alone      the loss of the first halves of windows: read together; one by one, the last first, with other
                       second halves
"""

import json
import os
import sys
from pathlib import Path

sys.path[0] = os.getcwd()  # the snapshot's modules, not those beside this file

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import configurator  # noqa: E402
import train  # noqa: E402
from evaluation.validation import Evaluate, by_document  # noqa: E402
from runtime import checkpoint, distributed  # noqa: E402

TOKENS, ROWS = 2**16, 16  # of the documents, of the windows


class Plain:
    """A model with a loss that is computed here."""

    def __init__(self, model):
        self.model = model
        self.eval = model.eval
        self.train = model.train
        self.parameters = model.parameters

    def __call__(self, x, y, loss_only=True):
        return None, F.cross_entropy(self.model(x)[0].float().flatten(0, 1), y.flatten(), ignore_index=-1)


def main(folder, argv):
    config = configurator.load(train.TrainConfig, argv)
    device = distributed.open_device(config)
    data = train.open_data(config, device)
    config.dtype = str(distributed.pick_dtype(config.dtype, device)).removeprefix("torch.")
    model = Plain(train.build_model(config, device))
    _, weights, _, _ = checkpoint.load_first(checkpoint.candidates(folder), weights=True)
    model.model.load_state_dict(weights)
    judge = Evaluate(config, data)
    documents, tokens = [], 0
    for windows in by_document(judge.final_windows, data):
        if tokens < TOKENS:
            documents.append(windows)
            tokens += windows[:, 1].sum()
    plain, _, counts = judge.loss(model, documents)
    losses = json.loads((folder / "result.json").read_text())["val_document_losses"]
    reported = sum(n * loss for n, loss in zip(counts, losses, strict=False)) / sum(counts)
    x, y = next(data.eval_batches(judge.final_windows, 0, 1, ROWS))
    half = x.shape[1] // 2
    other = x.clone()
    other[:, half:] = x[:, half:].flip(1)
    model.eval()
    with torch.no_grad(), distributed.autocast(config, device):
        beside = of_first_half(model, x, y)
        alone = [of_first_half(model, other[row:row + 1], y[row:row + 1]) for row in reversed(range(len(x)))]
    print(json.dumps({"reported": reported, "plain": plain, "beside": beside, "alone": sum(alone) / len(alone)}))


def of_first_half(model, x, y):
    """The loss of the first half of each window, with logits of the whole."""
    half = x.shape[1] // 2
    logits = model.model(x)[0][:, :half]
    return F.cross_entropy(logits.float().flatten(0, 1), y[:, :half].flatten(), ignore_index=-1).item()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
