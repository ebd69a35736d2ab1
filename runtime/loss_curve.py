"""Plot a run's loss.png from its log.jsonl. train.py does this from time to time and at the end.

    python runtime/loss_curve.py out/longhorn_bpe
"""

import argparse
import gc
import math
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from common.errors import ConfigError, main_error  # noqa: E402
from common.files import replacing  # noqa: E402
from runtime.records import read_log  # noqa: E402


def draw_loss(folder):
    """Plot training and validation loss in nats per token (or per image, with validation accuracy) against tokens, to
    folder/loss.png. Returns its path, or None if there is nothing to plot yet."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    train, val = points(folder, "train", "train_loss"), points(folder, "eval", "val_loss")
    accuracy = [(x, 100 * y) for x, y in points(folder, "eval", "val_accuracy") if math.isfinite(y)]
    if not train and not val:
        return None
    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=140)
    if train:
        draw_training(axes, train)
    if val:
        axes.plot(*zip(*val, strict=True), "o-", ms=3, color="tab:orange", label="validation")
        if math.isfinite(val[-1][1]):
            axes.annotate(f"{val[-1][1]:.4f}", val[-1], xytext=(0, 8), textcoords="offset points", ha="right")
    seen = sorted(loss for _, loss in train + val if math.isfinite(loss))
    if len(seen) > 20:  # cut off the first steps, which would flatten everything else
        axes.set_ylim(seen[0] - 0.1, min(seen[-1], seen[int(len(seen) * 0.95)] + 0.5))
    title = Path(folder).name.replace("$", r"\$")  # $ starts a formula
    axes.set(xlabel="tokens", ylabel=f"loss (nats per {'image' if accuracy else 'token'})", title=title)
    if accuracy:
        beside = axes.twinx()
        beside.plot(*zip(*accuracy, strict=True), "s--", ms=3, lw=1, color="tab:green")
        last = f"{accuracy[-1][1]:.1f}%"
        beside.annotate(last, accuracy[-1], xytext=(0, -12), textcoords="offset points", ha="right")
        beside.set_ylabel("validation accuracy (%)", color="tab:green")
    axes.grid(alpha=0.3)
    axes.legend(loc="center right" if accuracy else "best")
    path = Path(folder) / "loss.png"
    save_figure(figure, path, bbox_inches="tight")
    return path


def draw_training(axes, points):
    """The training loss of each line, and a running mean: a step's loss covers only a few windows."""
    tokens, losses = zip(*points, strict=True)
    span = max(1, len(losses) // 25)
    means = []
    for i in range(len(losses)):
        part = losses[max(0, i - span + 1):i + 1]
        means.append(sum(part) / len(part))
    axes.plot(tokens, losses, lw=0.6, alpha=0.35, color="tab:blue")
    label = f"training, mean of {span} lines of the log" if span > 1 else "training"
    axes.plot(tokens, means, lw=1.4, color="tab:blue", label=label)


def points(folder, event, key):
    """[(tokens, number)] of the events; NaN for a number that is missing or none, nothing without tokens."""
    pairs = []
    for line in read_log(folder, event):
        tokens, value = number(line.get("tokens")), number(line.get(key))
        if math.isfinite(tokens):
            pairs.append((tokens, value))
    return pairs


def number(x):
    return float(x) if type(x) in (int, float) and abs(x) < 1e30 else math.nan


def save_figure(figure, path, **how):
    """Write a pyplot figure and free it."""
    import matplotlib.pyplot as plt

    with replacing(path) as tmp:  # a kill leaves no half of a picture
        figure.savefig(tmp, format=Path(path).suffix[1:], **how)
    plt.close(figure)
    gc.collect()  # a closed figure leaves reference cycles of megabytes, which Python alone collects too rarely


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="of a run")
    folder = parser.parse_args().folder
    with main_error("loss_curve.py"):
        path = draw_loss(folder)
        if path is None:
            raise ConfigError(f"{folder} has no log.jsonl with losses to plot: give a run's folder")
        print(path)
