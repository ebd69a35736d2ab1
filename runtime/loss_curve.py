"""Plot a run's loss.png from its log.jsonl. train.py does this from time to time and at the end.

    python runtime/loss_curve.py out/longhorn_bpe
"""

import gc
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository root
import configurator  # noqa: E402
from common.errors import ConfigError, main_error  # noqa: E402
from common.files import replacing  # noqa: E402
from runtime.records import read_log  # noqa: E402


def draw_loss(folder):
    """Plot training and validation loss in nats against tokens, to folder/loss.png. Returns its path, or
    None if there is nothing to plot yet."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    train, val = points(folder, "train", "train_loss"), points(folder, "eval", "val_loss")
    losses = np.append(train[:, 1], val[:, 1])
    if not len(losses):
        return None
    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=140)
    axes.plot(*train.T, lw=0.6, alpha=0.35, color="tab:blue", label="training")
    span = len(train) // 25
    if span > 1:  # a step's loss covers only a few windows
        means = np.convolve(train[:, 1], np.ones(span) / span, "valid")
        axes.plot(train[span - 1:, 0], means, lw=1.4, color="tab:blue", label=f"mean of {span} lines of the log")
    if len(val):
        axes.plot(*val.T, "o-", ms=3, color="tab:orange", label=f"validation, {val[-1, 1]:.4f} at last")
    if len(losses) > 20:  # cut off the first steps, which would flatten everything else
        axes.set_ylim(losses.min() - 0.1, min(losses.max(), np.quantile(losses, 0.95) + 0.5))
    title = Path(folder).name.replace("$", r"\$")  # $ starts a formula
    axes.set(xlabel="tokens", ylabel="loss (nats)", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    path = Path(folder) / "loss.png"
    save_figure(figure, path, bbox_inches="tight")
    return path


def points(folder, event, key):
    """(n, 2) float: tokens and the number of each event that has one."""
    pairs = [(line["tokens"], line[key]) for line in read_log(folder, event) if line.get(key) is not None]
    return np.array(pairs, float).reshape(-1, 2)


def save_figure(figure, path, **how):
    """Write a pyplot figure and free it."""
    import matplotlib.pyplot as plt

    with replacing(path) as tmp:  # a kill leaves no half of a picture
        figure.savefig(tmp, format=Path(path).suffix[1:], **how)
    plt.close(figure)
    gc.collect()  # a closed figure leaves reference cycles of megabytes, which Python alone collects too rarely


@dataclass
class Options:
    folder: Path  # of a run


if __name__ == "__main__":
    with main_error("loss_curve.py"):
        folder = configurator.read(Options, sys.argv[1:], __doc__).folder
        path = draw_loss(folder)
        if path is None:
            raise ConfigError(f"{folder} has no log.jsonl with losses to plot: give a run's folder")
        print(path)
