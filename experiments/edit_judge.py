"""Is a run's loss the plain cross-entropy of a model that reads only earlier tokens? edit.py runs this at the top of a
snapshot, with its model and weights, on real windows. Prints one line of JSON, all in nats per token.

    python experiments/edit_judge.py RUN CONFIG [--key=value ...]

    reported, plain    the run's loss on the first documents, and the cross-entropy of the model's logits there
    beside, alone      the loss of one token per window: all windows read together; one by one, the last first, with
                       other tokens after it
"""

import json
import os
import sys
from pathlib import Path
from statistics import fmean

sys.path[0] = os.getcwd()  # the snapshot's modules, not those beside this file

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import configurator  # noqa: E402
import train  # noqa: E402
from evaluation.validation import Evaluate, by_document  # noqa: E402
from runtime import checkpoint, distributed  # noqa: E402

TOKENS, ROWS = 2**16, 64  # tokens of the first documents; windows


def main(folder, argv):
    config = configurator.load(train.TrainConfig, argv)
    device = distributed.open_device(config)
    data = train.open_data(config, device)
    config.dtype = str(distributed.pick_dtype(config.dtype, device)).removeprefix("torch.")
    model = train.build_model(config, device)
    _, weights, _, _ = checkpoint.load_first(checkpoint.candidates(folder), weights=True)
    model.load_state_dict(weights)
    forward = model.forward

    def of_tokens(x, y):
        """(B, T), the loss of each token."""
        logits = forward(x)[0].float()  # (B, T, vocab_size)
        return F.cross_entropy(logits.transpose(1, 2), y, ignore_index=-1, reduction="none")

    model.forward = lambda x, y, loss_only: (None, of_tokens(x, y).sum() / (y != -1).sum())
    judge = Evaluate(config, data)
    documents = by_document(judge.final_windows, data)
    ends = np.cumsum([windows[:, 1].sum() for windows in documents])
    plain, _, counts = judge.loss(model, documents[:np.searchsorted(ends, TOKENS) + 1])
    losses = json.loads((folder / "result.json").read_text())["val_document_losses"]
    reported = np.average(losses[:len(counts)], weights=counts)
    x, y = next(data.eval_batches(judge.final_windows, 0, 1, ROWS))
    model.eval()
    with torch.no_grad(), distributed.autocast(config, device):
        together = of_tokens(x, y)
        beside, alone = [], []
        for row in reversed(range(len(x))):
            end = x.shape[1] * (len(x) + row) // (2 * len(x))  # in the second half, a different place for each window
            other = torch.cat([x[row, :end], x[row, end:].flip(0)])
            beside.append(together[row, end - 1].item())
            alone.append(of_tokens(other[None], y[row:row + 1])[0, end - 1].item())
    print(json.dumps({"reported": reported, "plain": plain, "beside": fmean(beside), "alone": fmean(alone)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
