"""Images: ViL beside Vision Mamba and a ViT at equal parameters, by seed, depth and direction; the paper's Table 3.

    python experiments/vision/sweep.py run                  scikit-learn's digits: 27 runs, 25 minutes of one CPU core
    python experiments/vision/sweep.py run --seeds=4,5      more seeds; they add to the same folder
    python experiments/vision/sweep.py report               record, table and figure, from the runs' records alone
    python experiments/vision/sweep.py run --config=cifar   config/{vil,vim,vit}_cifar.py, on a GPU; tiny: ImageNet's

Any other --key=value goes to every run. Stop it at any moment: the same command resumes. The control `forward` has its
class token in the middle and reads no further: where the reverse scan did not run, `separate` would score as it does.
"""

import argparse
import json
import statistics
import sys
import time
from itertools import product
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from experiments.recall.report import in_json  # noqa: E402
from experiments.sweeps import runner  # noqa: E402
from experiments.sweeps.runner import Cell, numbers  # noqa: E402
from runtime.records import BadRecord, fields, finished_records  # noqa: E402

TABLE3 = {"ViM-Tiny": (7, 76.1), "ViL-Tiny": (7, 76.4), "ViM-Small": (26, 80.5), "ViL-Small": (26, 80.7)}
NAMES = {"vil": "ViL", "vim": "ViM", "vit": "ViT"}
COLOURS = {"separate": "tab:red", "shared": "tab:orange", "forward": "tab:gray"}
AT = ("model", "directions", "n_layer", "seed")
SAME = ("dataset", "image_size", "patch_size", "batch_images", "epochs", "learning_rate", "weight_decay", "min_crop",
        "mirror", "rand_augment", "mixup", "cutmix", "erasing", "repeats", "smoothing", "eval_crop", "ema", "dtype")


def cells_of(config, seeds, extra=()):
    """[Cell]: ViL in three directions, ViM, ViT; then ViL at a half and a quarter of the depth, in two directions."""
    import configurator
    from experiments.vision.classify import VisionConfig

    load = lambda argv: configurator.load(VisionConfig, [f"config/{argv[0]}.py", *argv[1:], *extra])
    deep = load([f"vil_{config}"]).n_layer
    full = [(f"vil_{config}", way, deep) for way in ("separate", "shared", "forward")]
    full += [(f"{name}_{config}", "separate", None) for name in ("vim", "vit") if config != "tiny" or name == "vim"]
    shallow = [(f"vil_{config}", way, deep // part) for part in (2, 4) for way in ("separate", "forward")]
    cells = []
    for variants, seed in product((full, shallow), seeds):
        for file, way, depth in variants:
            argv = [f"config/{file}.py", f"--directions={way}", *([f"--n_layer={depth}"] if depth else []),
                    f"--seed={seed}", *extra]
            c = load([file, *argv[1:]])
            at = {key: getattr(c, key) for key in AT}
            cells.append(Cell(f"{c.model}_{way}_{c.n_layer}layers_seed{seed}", argv, at, 20.0 * c.n_layer))
    return cells


# -------------------------------------------------------------------------------------------------------------- report

def read_run(folder, at):
    """One finished run as a flat record. Raises BadRecord where its files are missing, torn or at odds."""
    result, record = finished_records(folder)
    with fields():
        config, ran_in = record["config"], record["environment"]
        if any(config[key] != at[key] for key in AT):
            raise BadRecord(f"another run's records: {config}")
        return {**{key: config[key] for key in AT}, **{key: result[key] for key in (
                    "val_accuracy", "val_loss", "val_images", "parameters", "steps", "seconds")},
                "settings": {key: config[key] for key in SAME}, "data": record["data"]["sha256"],
                "time": record["time"], "machine": ran_in["gpu"] or ran_in["cpu"], "code": result["code"],
                "commit": result["commit"]}


def read_sweep(folder):
    """{"runs", "left_out": {name: why}, "planned", "speed"}, and what runs share. Raises ConfigError for no sweep."""
    plan, runs, left_out = runner.read_plan(folder), [], {}
    for name, at in plan["cells"].items():
        try:
            run = read_run(Path(folder) / name, at)
            if runs and any(run[key] != runs[0][key] for key in ("settings", "data", "code")):
                raise BadRecord("other settings, data or code than the first run's")
            runs.append(run)
        except BadRecord as reason:
            left_out[name] = str(reason)
    common = {key: runs[0][key] for key in ("settings", "data", "code", "commit", "machine", "time")} if runs else {}
    rest = [{key: value for key, value in run.items() if key not in common} for run in runs]
    return {"command": "experiments/vision/sweep.py run", **common, "speed": plan.get("speed"),
            "planned": len(plan["cells"]), "left_out": left_out, "runs": rest}


def speed(cells, rounds=7):
    """{variant: images per second} of forward and backward of a micro-batch, the variants in turn; the median, by CPU
    time of one thread, which other processes of the machine disturb least, or on a GPU by the clock."""
    import torch

    import configurator
    from experiments.vision.classify import VisionConfig, build_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock, threads = (time.perf_counter if device.type == "cuda" else time.process_time), torch.get_num_threads()
    torch.set_num_threads(1)
    steps, speeds = {}, {}
    for cell in {variant_of(c.at): c for c in cells}.values():
        config = configurator.load(VisionConfig, cell.argv)
        config.vocab_size = 10
        model = build_model(config, device)
        x = torch.randn(config.micro_batch_size, config.channels, *[config.image_size] * 2, device=device)
        y = torch.arange(len(x), device=device) % 10
        steps[variant_of(cell.at)] = lambda model=model, x=x, y=y: model(x, y, loss_only=True)[1].backward()
    for turn in range(rounds + 1):
        for name, step in steps.items():
            began = clock()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn:
                speeds.setdefault(name, []).append(clock() - began)
    torch.set_num_threads(threads)
    return {name: round(len(x) / statistics.median(seconds)) for name, seconds in speeds.items()}


def variant_of(at):
    way = "" if at["model"] == "vit" else f", {at['directions']}"
    return f"{NAMES[at['model']]}{way}, {at['n_layer']} layers"


def summarise(record):
    """A row per variant: its name, parameters, accuracies in percent by seed, their mean and spread."""
    rows = []
    for name in dict.fromkeys(map(variant_of, record["runs"])):
        runs = [run for run in record["runs"] if variant_of(run) == name]
        accuracy = [100 * run["val_accuracy"] for run in sorted(runs, key=lambda run: run["seed"])]
        rows.append({"name": name, **{key: runs[0][key] for key in ("model", "directions", "n_layer", "parameters")},
                     "accuracies": accuracy, "mean": statistics.mean(accuracy),
                     "spread": statistics.stdev(accuracy) if len(accuracy) > 1 else float("nan"),
                     "images_per_second": (record.get("speed") or {}).get(name)})
    return rows


def markdown(record, rows):
    lines = ["# Images: families, directions and depth", "",
             f"{len(record['runs'])} of {record['planned']} runs on {record['settings']['dataset']}, "
             f"{record['machine']}, commit {(record['commit'] or 'unknown')[:10]}. Top-1 accuracy in percent of "
             f"{record['runs'][0]['val_images']} held-out images, by seed; images per second of forward and backward, "
             "one thread of a CPU or one GPU.", "",
             "| model | parameters | mean | spread | seeds | images/s |", "|---|---|---|---|---|---|"]
    lines += [f"| {r['name']} | {r['parameters']:,} | {r['mean']:.1f} | {r['spread']:.1f} | "
              f"{', '.join(f'{a:.1f}' for a in r['accuracies'])} | {r['images_per_second'] or '-'} |" for r in rows]
    lines += ["", "The paper's Table 3 (ImageNet-1K, 224 x 224; **the paper's figures, not run here**):", "",
              "| model | parameters | top-1 |", "|---|---|---|",
              *(f"| {name} | {size}M | {top1} |" for name, (size, top1) in TABLE3.items())]
    return [*lines, *([""] if record["left_out"] else []), *(f"- {n}: {why}" for n, why in record["left_out"].items())]


def draw(rows, path):
    """Accuracy by family at full depth, one dot per seed; and ViL's against depth, by direction."""
    from matplotlib.figure import Figure

    deep, figure = max(r["n_layer"] for r in rows), Figure(figsize=(8, 3.2), dpi=100)
    left, right = figure.subplots(1, 2, width_ratios=(5, 4))
    full = [r for r in rows if r["model"] != "vil" or r["n_layer"] == deep]
    for i, r in enumerate(full):
        colour = COLOURS[r["directions"]] if r["model"] == "vil" else "tab:blue"
        left.plot(r["accuracies"], [-i] * len(r["accuracies"]), "o", color=colour, alpha=0.5)
        left.plot(r["mean"], -i, "|", color=colour, ms=18)
    left.set_yticks([-i for i in range(len(full))], [r["name"].rsplit(", ", 1)[0] for r in full])
    left.set(xlabel="held-out accuracy (%), dots: seeds", title="full depth")
    for way, colour in COLOURS.items():
        line = sorted((r["n_layer"], r["mean"], r["spread"]) for r in rows
                      if (r["model"], r["directions"]) == ("vil", way))
        if line:
            right.errorbar(*zip(*line, strict=True), marker="o", capsize=2, color=colour, label=way)
    right.set(xlabel="layers", title="ViL by depth and direction",
              xticks=sorted({r["n_layer"] for r in rows if r["model"] == "vil"}))
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def write(place, out=None):
    """Record, table and figure of a sweep's folder, or of a record that this wrote: {kind: path}."""
    place = Path(place)
    from_record = place.suffix == ".json"
    record = json.loads(place.read_text()) if from_record else read_sweep(place)
    out = Path(out or (place.with_suffix("") if from_record else place / "report"))
    paths, rows = {kind: Path(f"{out}.{kind}") for kind in ("json", "md", "png")}, summarise(record)
    paths["json"].write_text(in_json(record))
    if not rows:
        return {"json": paths["json"]}
    paths["md"].write_text("\n".join(markdown(record, rows)) + "\n")
    draw(rows, paths["png"])
    return paths


# -------------------------------------------------------------------------------------------------------- command line

def parser():
    top = argparse.ArgumentParser(prog="experiments/vision/classify.py", description=__doc__,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run what has no final record yet, then report", allow_abbrev=False)
    run.add_argument("--config", choices=("digits", "cifar", "tiny"), default="digits", help="config/*_CONFIG.py")
    run.add_argument("--seeds", type=numbers(int, least=0), default=(1, 2, 3))
    run.add_argument("--jobs", type=int, default=0, help="runs at a time (default: one per core or GPU)")
    run.add_argument("--out", type=Path, help="folder of the sweep (default: out/vision_CONFIG)")
    show = commands.add_parser("report", help="record, table and figure again", allow_abbrev=False)
    show.add_argument("folder", type=Path, nargs="?", default=REPO / "out/vision_digits",
                      help="of the sweep, or the .json that a report wrote (default: out/vision_digits)")
    show.add_argument("--out", type=Path, help="name of the .json, .md and .png (default: report, in the folder)")
    return top


def run(args, extra):
    folder = args.out or REPO / "out" / f"vision_{args.config}"
    cells = cells_of(args.config, args.seeds, extra)
    runner.say_changed_code(folder)
    runner.write_plan(folder, cells)
    failed = runner.run_cells(cells, folder, args.jobs, script="experiments/vision/classify.py")
    runner.write_plan(folder, cells, speed=speed(cells))
    runner.say_written(write(folder))
    return runner.say_failed(failed, cells)


def main(argv):
    args, extra = parser().parse_known_args(argv)
    fixed = ("model", "directions", "n_layer", "seed", "out_dir", "resume")
    return runner.run_or_report("sweep.py", args, extra, run, write, fixed, "--config, --seeds, --out")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
