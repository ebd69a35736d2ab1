"""The report of experiments/vision/sweep.py: accuracy by family, direction and depth, next to the paper's Table 3."""

import functools
import math
import statistics

from experiments import pages
from experiments.pages import escaped, left_out, table, titled

TABLE3 = {"ViM-Tiny": (7, 76.1), "ViL-Tiny": (7, 76.4), "ViM-Small": (26, 80.5), "ViL-Small": (26, 80.7)}
NAMES = {"vil": "ViL", "vim": "ViM", "vit": "ViT"}
COLOURS = {"separate": "tab:red", "shared": "tab:orange", "forward": "tab:gray"}


def variant_of(at):
    way = "" if at["model"] == "vit" else f", {at['directions']}"
    return f"{NAMES[at['model']]}{way}, {at['n_layer']} layers"


def summarise(runs):
    """A dict per variant: its name, parameters, accuracies in percent by seed, their mean and standard deviation."""
    rows, speeds = [], runs.attrs.get("speed") or {}
    for _, group in runs[runs.left_out == ""].groupby(["model", "directions", "n_layer"], sort=False):
        first = group.iloc[0]
        name = variant_of(first)
        accuracies = [100 * share for share in group.sort_values("seed").val_accuracy]
        rows.append({"name": name, **first[["model", "directions", "n_layer", "parameters"]],
                     "accuracies": accuracies, "mean": statistics.mean(accuracies),
                     "spread": statistics.stdev(accuracies) if len(accuracies) > 1 else math.nan,
                     "images_per_second": speeds.get(name)})
    return rows


def page(runs, rows, picture):
    """The page as blocks of Markdown; `picture`: the line that shows the figure, if there is one."""
    used, codes = runs[runs.left_out == ""], runs.attrs["code"]
    about = f"{len(used)} of {len(runs)} runs"
    if rows:
        about += f" on {runs.attrs['settings']['dataset']}, {', '.join(used.device.unique())}, commit "
        about += (f"{(codes[0]['commit'] or 'none')[:10]}. Top-1 accuracy in percent of {used.val_images.max()} "
                  "held-out images, by seed; images per second of forward and backward, one thread of a CPU or one GPU")
    accuracies = []
    for r in rows:
        accuracies.append({"model": r["name"], "parameters": f"{r['parameters']:,}", "mean": f"{r['mean']:.1f}",
                           "spread": f"{r['spread']:.1f}", "seeds": ", ".join(f"{a:.1f}" for a in r["accuracies"]),
                           "images/s": r["images_per_second"] or "-"})
    paper = [{"model": name, "parameters": f"{size}M", "top-1": top1} for name, (size, top1) in TABLE3.items()]
    return ["# Images: families, directions and depth", escaped(f"{about}."), picture, table(accuracies),
            *titled("The paper's Table 3 (ImageNet-1K, 224 x 224; **the paper's figures, not run here**):", paper),
            *left_out(runs)]


def draw(rows, path):
    """Accuracy by family at full depth, a dot per seed; and ViL's against depth, by direction."""
    deep = max(r["n_layer"] for r in rows)
    vil = [r for r in rows if r["model"] == "vil"]
    with pages.figure(path, 1, 2, 4, 3.2, width_ratios=(5, 4)) as (figure, ((left, right),)):
        names = {}
        for r in rows:
            if r not in vil or r["n_layer"] == deep:
                at = -len(names)
                names[at] = r["name"].rsplit(", ", 1)[0]
                colour = COLOURS[r["directions"]] if r in vil else "tab:blue"
                left.plot(r["accuracies"], [at] * len(r["accuracies"]), "o", color=colour, alpha=0.5)
                left.plot(r["mean"], at, "|", color=colour, ms=18)
        left.set_yticks(list(names), list(names.values()))
        left.set(xlabel="held-out accuracy (%), dots: seeds", title="full depth")
        for way, colour in COLOURS.items():
            line = sorted((r["n_layer"], r["mean"], r["spread"]) for r in vil if r["directions"] == way)
            if line:
                depths, means, spreads = zip(*line, strict=True)
                right.errorbar(depths, means, spreads, marker="o", capsize=2, color=colour, label=way)
        right.set(xlabel="layers", title="ViL by depth and direction", xticks=sorted({r["n_layer"] for r in vil}))
        right.legend(fontsize=8)
        figure.tight_layout()


write = functools.partial(pages.report, "images", summarise, page, draw, "accuracy by family, and by depth")
