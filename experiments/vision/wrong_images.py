"""Plot wrong.png for an image classifier: the images that it gets wrong, and a table of confused classes.

experiments/vision/classify.py does this at the end of a run.
"""

from pathlib import Path

import numpy as np

SHOWN, CLASSES = 24, 10  # most images shown; number of classes in the table, those with most mistakes


def draw(folder, split, classes, predicted):
    """Plot folder/wrong.png from a data.images.Split, its class names, and predicted (n,). Returns its path."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    labels = split.labels
    wrong = np.flatnonzero(predicted != labels)
    often = np.bincount(np.concatenate([labels[wrong], predicted[wrong]]), minlength=len(classes))
    worst = np.sort(np.argsort(-often, kind="stable")[:CLASSES])
    table = np.array([[np.sum((labels == a) & (predicted == b)) for b in worst] for a in worst])
    figure = plt.figure(figsize=(10, 4.2), dpi=110)
    left, right = figure.subfigures(1, 2, width_ratios=(4, 6))
    axes = left.subplots()
    axes.imshow(np.where(np.eye(len(worst), dtype=bool), 0, table), cmap="Reds")
    for (a, b), count in np.ndenumerate(table):
        axes.text(b, a, count or "", ha="center", va="center", fontsize=7)
    names = [str(classes[c])[:12] for c in worst]
    axes.set_xticks(range(len(worst)), names, fontsize=7, rotation=90 * (max(map(len, names)) > 3))
    axes.set_yticks(range(len(worst)), names, fontsize=7)
    axes.set(xlabel="taken for", ylabel="class", title=f"{len(wrong)} of {len(labels)} wrong")
    for place, axes in enumerate(right.subplots(4, SHOWN // 4, squeeze=False).flat):
        axes.axis("off")
        if place < len(wrong):
            i = wrong[place * len(wrong) // min(SHOWN, len(wrong))]
            axes.imshow(split.open(i), cmap="gray_r")
            axes.set_title(f"{str(classes[labels[i]])[:10]} → {str(classes[predicted[i]])[:10]}", fontsize=7)
    path = Path(folder) / "wrong.png"
    figure.savefig(path)
    plt.close(figure)
    return path
