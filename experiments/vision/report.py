"""The report of experiments/vision/sweep.py: accuracy by family, direction and depth, next to the paper's Table 3."""

import functools

from experiments import pages
from experiments.figures import Curve, Panel, name_of
from experiments.pages import escaped, table

TABLE3 = """\
The paper's Table 3 (ImageNet-1K, 224 x 224; **the paper's figures, not run here**):

| model     | parameters   | top-1   |
|-----------|--------------|---------|
| ViM-Tiny  | 7M           | 76.1    |
| ViL-Tiny  | 7M           | 76.4    |
| ViM-Small | 26M          | 80.5    |
| ViL-Small | 26M          | 80.7    |"""
COLUMNS = {"model": "{name}", "parameters": "{parameters:,}", "mean": "{mean:.1f}", "spread": "{spread:.1f}",
           "seeds": "{seeds}", "images/s": "{speed}"}
LINES = {"separate": "o-", "shared": "s--", "forward": "^:"}  # Matplotlib's, by direction


def variant_of(at):
    way = "" if at["model"] == "vit" else f", {at['directions']}"
    return f"{name_of(at['model'])}{way}, depth {at['n_layer']}"


def summarise(runs):
    """A dict per variant: its name, parameters, accuracies in percent by seed, their mean and standard deviation."""
    rows = []
    speeds = runs.attrs.get("speed") or {}
    for _, group in runs[runs.left_out == ""].groupby(["model", "directions", "n_layer"], sort=False):
        first = group.iloc[0]
        accuracies = 100 * group.sort_values("seed").val_accuracy
        name = variant_of(first)
        rows.append({"name": name, "accuracies": accuracies.tolist(), "mean": accuracies.mean(),
                     "spread": accuracies.std(), "seeds": ", ".join(f"{share:.1f}" for share in accuracies),
                     "speed": speeds.get(name, "-"), **first[["model", "directions", "n_layer", "parameters"]]})
    return rows


def page(runs):
    rows = summarise(runs)
    dataset = runs.attrs["settings"]["dataset"]
    about = (f"Top-1 accuracy in percent of {runs.val_images.max()} held-out images of {dataset}, by seed. Images per "
             "second are those of forward and backward, on one thread of a CPU or on one GPU.")
    return pages.Page([], [escaped(about)], panels(rows), [table(rows, COLUMNS), TABLE3])


def panels(rows):
    """Accuracy of every variant, a dot per seed; and ViL's against depth, by direction."""
    variants = []
    by_way = {}
    for r in rows:
        low = r["mean"] - r["spread"]
        high = r["mean"] + r["spread"]
        variants.append(Curve(r["model"], r["name"], (), r["accuracies"], [low], [high]))
        if r["model"] == "vil":
            by_way.setdefault(r["directions"], []).append((r["n_layer"], r["mean"], low, high))
    depths = [Curve("vil", way, *zip(*sorted(points), strict=True), LINES[way]) for way, points in by_way.items()]
    accuracy = "held-out accuracy (%)"
    return [Panel("By seed, mean \u00b1 standard deviation", accuracy, "", variants),
            Panel("ViL by depth and direction", "layers", accuracy, depths, log="x")]


write = functools.partial(pages.report, "images", "Images: families, directions and depth", page)
