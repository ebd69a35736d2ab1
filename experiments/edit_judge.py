"""Is a run's loss the plain cross-entropy of a model that reads only earlier tokens? edit.py runs this at the top of a
snapshot, with its model and weights, on the run's windows. Prints one line of JSON, with all losses in nats per token.

    python experiments/edit_judge.py RUN CONFIG [--key=value ...]

    reported    the run's loss
    plain       the cross-entropy of the model's logits
    beside      the loss of one token in each of the first windows, with all windows in one batch
    alone       the same, but before anything else, window by window, the last one first, with other tokens after it
"""

import json
import os
import sys
from pathlib import Path

sys.path[0] = os.getcwd()  # the snapshot's modules, not those beside this file

import torch  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from data import loader, mixture, prepared  # noqa: E402

for name in [name for name in sys.modules if name.partition(".")[0] == "data"]:
    del sys.modules[name]  # the version imports its own, and may change them

import configurator  # noqa: E402
import train  # noqa: E402
from runtime import checkpoint, distributed  # noqa: E402

ROWS = 64  # windows at once


def main(folder, argv):
    config = configurator.load(train.TrainConfig, argv)
    device = distributed.open_device(config)
    train.open_data(config, device)  # fills in the vocabulary
    tokens = prepared.Tokens(prepared.find_dataset(mixture.parse_mixture(config.dataset)[0][0]))
    data = loader.TokenData(tokens, config.block_size, config.batch_tokens, config.seed, device)
    windows = loader.eval_windows(len(tokens.val), config.eval_block_size or config.block_size,
                                  config.final_eval_tokens)
    config.dtype = str(distributed.pick_dtype(config.dtype, device)).removeprefix("torch.")
    model = train.build_model(config, device)
    _, weights, _, _ = checkpoint.load_first(checkpoint.candidates(folder), weights=True)
    model.load_state_dict(weights)
    model.eval()

    @torch.no_grad()
    def of_tokens(x, y):
        """The loss of each token, (B, T)."""
        with distributed.autocast(config, device):
            logits = model(x)[0].float()  # (B, T, vocab_size)
        return cross_entropy(logits.transpose(1, 2), y, reduction="none").double()

    x, y = next(data.eval_batches(windows, 0, 1, ROWS))
    rows = torch.arange(len(x))
    ends = x.shape[1] * (len(x) + rows) // (2 * len(x))  # in the second half, a different place for each window
    alone = torch.zeros(len(x))
    for row, end in reversed([*enumerate(ends.tolist())]):
        other = torch.cat([x[row, :end], x[row - 1, end:].flip(0)])
        alone[row] = of_tokens(other[None], y[row:row + 1])[0, end - 1]
    losses = [of_tokens(*batch) for batch in data.eval_batches(windows, 0, 1, ROWS)]
    print(json.dumps({"reported": json.loads((folder / "result.json").read_text())["val_loss"],
                      "plain": torch.cat([loss.flatten() for loss in losses]).mean().item(),
                      "beside": losses[0][rows, ends - 1].mean().item(), "alone": alone.mean().item()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
