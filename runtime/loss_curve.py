"""Plots a run's loss.png from its log.jsonl, now and then and at the end."""

import gc
from pathlib import Path

import numpy as np

from common.files import replacing
from runtime.records import read_log


def draw_loss(folder):
    """Plot training and validation loss in nats against tokens, to folder/loss.png, once the log has a loss."""
    from matplotlib.figure import Figure

    train = points(folder, "train", "train_loss")
    val = points(folder, "eval", "val_loss")
    losses = np.append(train[:, 1], val[:, 1])
    if not len(losses):
        return
    axes = Figure(figsize=(7, 4.2), dpi=140).subplots()
    axes.plot(*train.T, lw=0.6, alpha=0.35, color="tab:blue", label="training")
    span = len(train) // 25
    if span > 1:  # smooth, because a step's loss covers only a few windows
        means = np.convolve(train[:, 1], np.ones(span) / span, "valid")
        axes.plot(train[span - 1:, 0], means, lw=1.4, color="tab:blue", label=f"mean of {span} lines of the log")
    if len(val):
        axes.plot(*val.T, "o-", ms=3, color="tab:orange", label=f"validation, last {val[-1, 1]:.4f}")
    if len(losses) > 20:  # cut off the first steps, which would flatten everything else
        axes.set_ylim(losses.min() - 0.1, min(losses.max(), np.quantile(losses, 0.95) + 0.5))
    title = Path(folder).name.replace("$", r"\$")  # $ starts a formula
    axes.set(title=title, xlabel="tokens", ylabel="loss (nats)")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(axes.figure, Path(folder) / "loss.png", bbox_inches="tight")


def points(folder, event, key):
    """Return (n, 2) floats: tokens and `key` of each event that has both."""
    pairs = np.array([(line.get("tokens"), line.get(key)) for line in read_log(folder, event)], float).reshape(-1, 2)
    return pairs[~np.isnan(pairs).any(1)]


def save_figure(figure, path, **how):
    """Write a pyplot figure and free it."""
    import matplotlib.pyplot as plt

    with replacing(path) as tmp:  # a kill leaves no half-written picture
        figure.savefig(tmp, format=Path(path).suffix[1:], **how)
    plt.close(figure)
    gc.collect()  # a closed figure leaves megabytes in reference cycles, which Python collects too rarely by itself
