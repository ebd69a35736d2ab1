"""Table 1 and Figure 5 of the paper, at a scale you can afford: plan the runs, run them, report.

    python experiments/scaling/table1.py run --preset=laptop              six families, three sizes, within an hour on two CPU cores
    python experiments/scaling/table1.py run --preset=gpu                 a ladder meant for 20 minutes of one large GPU
    python experiments/scaling/table1.py run --preset=paper --dry-run     the paper's 24 cells, with the torchrun line of each
    python experiments/scaling/table1.py report out/table1_laptop         from the records alone: tables, figures, fits, report.html

    python experiments/scaling/table1.py run --models=longhorn,slow_longhorn --sizes=460K --seeds=1,2,3 --lrs=1e-3,3e-3

A model of your own takes part with its entry in model.py's FAMILIES and its config/<model>_laptop.py. What else is given
as --key=value goes to every run (`--wandb=offline`, `--dtype=float32`). Stop it at any moment: the same command goes on.

The surprise: the learning rate is chosen for each family and size before anything else, on the first seed, and the other
seeds and budgets follow at the rate that won. One rate for all, as published, measures whose optimum it happens to be.
"""

import argparse
import dataclasses
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

import configurator  # noqa: E402
from configurator import ConfigError  # noqa: E402
from experiments.scaling import sweep  # noqa: E402
from experiments.scaling.sweep import Cell, hours, names, numbers, same_commit  # noqa: E402

FAMILIES = ("longhorn", "mamba", "llama", "gla", "retnet", "rwkv")  # of Table 1


@dataclass
class Preset:
    """A ladder of runs. `sizes` maps a label to what it changes in config/<model>_<config>.py; `steps` None: the config's."""

    sizes: dict
    contexts: tuple
    config: str = ""  # empty: the size's label in small letters
    steps: int = None  # optimiser steps of the table's runs, the same for every size
    ladder: dict = None  # size -> other numbers of steps, for the fit: one seed, at the best rate
    lrs: tuple = ()  # peak rates to choose from; none: the config's own
    seeds: tuple = (1337,)
    models: tuple = FAMILIES
    args: tuple = ()  # for every run
    minutes: float = 0  # what it is meant to take, 0: nothing promised


PRESETS = {
    # Windows of 256 bytes, 4 a step. A third of the steps, and for the smallest size three times as many: 3.2 is also about
    # the ratio of one size's FLOPs a token to the next, so the runs of equal compute lie on a diagonal.
    "laptop": Preset(
        config="laptop", contexts=(256,), steps=1024, lrs=(1e-3, 3e-3, 9e-3), seeds=(1337, 1338, 1339), minutes=60,
        sizes={"130K": ("--n_layer=2", "--n_head=1", "--n_embd=64"), "460K": ("--n_layer=2", "--n_head=2", "--n_embd=128"),
               "1.5M": ("--n_layer=3", "--n_head=3", "--n_embd=192")},
        ladder={"130K": (320, 3200), "460K": (320,), "1.5M": (320,)},
        args=("--eval_block_size=0", "--eval_batch_size=32", "--eval_tokens=131072", "--final_eval_tokens=131072",
              "--log_interval=32")),
    "gpu": Preset(
        config="120m", contexts=(1024,), steps=512, seeds=(1337,), minutes=20, lrs=(2e-3,),
        sizes={"3M": ("--n_layer=4", "--n_head=4", "--n_embd=256"), "11M": ("--n_layer=6", "--n_head=6", "--n_embd=384"),
               "25M": ("--n_layer=8", "--n_head=8", "--n_embd=512")},
        ladder={"3M": (160, 1600), "11M": (160,), "25M": (160,)},
        args=("--dataset=pystdlib", "--vocab_size=0", "--mlp_multiple=64", "--batch_tokens=32768", "--batch_size=32",
              "--compile=false", "--eval_tokens=0", "--log_interval=20")),
    "paper": Preset(sizes={"120M": (), "350M": ()}, contexts=(1024, 4096)),
}


def config_arguments(preset, model, size):
    """The config file of a model at a size, and what the preset changes in it. Raises ConfigError where there is no file."""
    name = f"config/{model}_{preset.config or size.lower()}.py"
    if not (REPO / name).exists():
        have = sorted(p.stem.rsplit("_", 1)[0] for p in REPO.glob(f"config/*_{preset.config or size.lower()}.py"))
        raise ConfigError(f"{name} is not there: write it, as config/longhorn_laptop.py shows, or choose models of "
                          f"{', '.join(have)}")
    return [name, *preset.sizes[size], *preset.args]


def load(argv):
    """The settings that `argv` gives train.py, paths as seen from the repository."""
    from train import TrainConfig

    return configurator.load(TrainConfig, [str(REPO / a) if a.endswith(".py") and not a.startswith("--") else a for a in argv])


def cell(preset, extra, stage, model, size, context, steps, rate, seed):
    """One Cell; steps and rate None: as the config has them."""
    argv = [*config_arguments(preset, model, size), *extra]
    given = load(argv)
    if given.model != model:
        raise ConfigError(f"{argv[0]} is to give {model}, but its model is {given.model}: write model = {model!r} there")
    steps, rate = steps or given.max_iters, float(f"{rate or given.learning_rate:g}")  # as the name has it
    argv += [f"--block_size={context}", f"--max_iters={steps}", f"--learning_rate={rate:g}", f"--seed={seed}"]
    if context != given.block_size:  # as many tokens in memory as before
        argv.append(f"--batch_size={max(1, given.batch_size * given.block_size // context)}")
    if "eval_interval" not in "".join(extra) and preset.steps:
        argv.append(f"--eval_interval={-(-steps // 3)}")
    at = {"stage": stage, "model": model, "size": size, "context": context, "steps": steps, "learning_rate": rate, "seed": seed}
    return Cell(f"{model}_{size}_{context}_{steps}steps_lr{rate:g}_seed{seed}", argv, at)


def first_cells(preset, extra=()):
    """The runs that come first: every family, size, context and learning rate, on the first seed."""
    return [cell(preset, extra, "rate", model, size, context, preset.steps, rate, preset.seeds[0])
            for context in preset.contexts for size in preset.sizes for rate in preset.lrs or (None,) for model in preset.models]


def more_cells(preset, best, extra=()):
    """The runs that follow at the best rates: further seeds, then other budgets.

    Args: best: {(model, size, context): rate}; what is missing from it (its runs failed) has nothing to follow.
    """
    def of(stage, steps, seed, size):
        return [cell(preset, extra, stage, model, size, context, steps, best[model, size, context], seed)
                for context in preset.contexts for model in preset.models if (model, size, context) in best]

    cells = [c for seed in preset.seeds[1:] for size in preset.sizes for c in of("seed", preset.steps, seed, size)]
    return cells + [c for size in preset.sizes for steps in (preset.ladder or {}).get(size, ())
                    for c in of("ladder", steps, preset.seeds[0], size)]


def best_rates(cells, folder):
    """{(model, size, context): rate} of the lowest validation loss among the finished cells, those of an earlier command's
    rates included."""
    mine, best = {c.name for c in cells}, {}
    asked = {(c.at["model"], c.at["size"], c.at["context"], c.at["steps"], c.at["seed"]) for c in cells}
    plan = sweep.read_plan(folder)["cells"] if (Path(folder) / "plan.json").exists() else {}
    before = [Cell(name, at["argv"], at) for name, at in plan.items() if name not in mine and at.get("stage") == "rate"
              and tuple(at.get(k) for k in ("model", "size", "context", "steps", "seed")) in asked]
    for c in [*cells, *before]:
        try:
            loss = sweep.read_run(Path(folder) / c.name, c.at).loss
        except sweep.BadRecord:
            continue
        key = c.at["model"], c.at["size"], c.at["context"]
        best[key] = min(best.get(key, (loss, c.at["learning_rate"])), (loss, c.at["learning_rate"]))
    return {key: rate for key, (_, rate) in best.items()}


# -------------------------------------------------------------------------------------------------------------- estimate

MEASURED_FLOPS = {"cpu": 2e11, "cuda": 1e14}  # of one trial step, so that a large model on a small machine takes seconds


def estimate(cells, threads, nproc=1):
    """Sets `seconds` of every cell from a short training step of each model, size and context; yields after each of them.

    A step is measured with as many sequences and tokens as MEASURED_FLOPS buys and scaled by FLOPs; evaluations cost a
    third of a training token; starting a process costs as much as importing PyTorch did here, and more than that.
    """
    import torch

    from model import LM, ModelConfig
    from train import keep_memory, pick_dtype

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    keep_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    speed = {}  # (model, size, context) -> seconds a FLOP
    for c in cells:
        config = load(c.argv)
        key = c.at["model"], c.at["size"], c.at["context"]
        settings = {**dataclasses.asdict(config), "vocab_size": config.vocab_size or 256}
        model_config = ModelConfig(**{f.name: settings[f.name] for f in dataclasses.fields(ModelConfig)})
        try:
            with torch.device("meta"):
                meta = LM(model_config)
        except ValueError as error:
            raise ConfigError(f"{c.argv[0]}: {error}") from None
        flops = meta.flops_per_token()["total"]
        if key not in speed:
            yield key
            model = LM(model_config).to(device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
            room = MEASURED_FLOPS[device.type] / flops  # tokens
            T = min(config.block_size, max(64, 64 * int(room / 64)))
            B = int(max(1, min(config.batch_size, config.batch_tokens // T, room / T)))
            idx = torch.randint(model_config.vocab_size, (B, T + 1), device=device)
            dtype, times = pick_dtype(config.dtype, device), []
            for _ in range(5):
                began = time.perf_counter()
                with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                    loss = model(idx[:, :-1], idx[:, 1:], loss_only=True)[1]
                loss.backward()
                if B * T >= 512:  # beside a few tokens the optimiser would be all of the time
                    optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                loss.item()
                times.append(time.perf_counter() - began)
                if len(times) > 1 and sum(times) > 5:
                    break
            speed[key] = median(times[1:]) / (B * T * model.flops_per_token(T)["total"])
            del model, optimizer
        evaluations = config.max_iters // config.eval_interval if config.eval_interval else 0
        tokens = config.max_iters * config.batch_tokens + (evaluations * config.eval_tokens + config.final_eval_tokens) / 3
        c.at |= {"parameters": meta.parameter_count()["total"], "tokens": config.max_iters * config.batch_tokens,
                 "flops": flops * config.max_iters * config.batch_tokens}
        c.seconds = tokens * flops * speed[key] / nproc + START_SECONDS
    torch.set_num_threads(before)


START_SECONDS = 5.0  # importing PyTorch, reading the data, building or loading the kernels


def print_plan(preset, cells, later, jobs, nproc, gpus):
    """The plan as a table: a line a family, size, context and budget; then the whole."""
    print(f"{'model':15}{'size':>6}{'context':>9}{'parameters':>13}{'tokens':>10}{'FLOPs':>11}{'a run':>12}  runs")
    lines = {}
    for c in cells + later:
        lines.setdefault((c.at["model"], c.at["size"], c.at["context"], c.at["steps"]), []).append(c)
    for (model, size, context, _), group in lines.items():
        a = group[0].at
        rates = sorted({c.at["learning_rate"] for c in group if c.at["stage"] == "rate"})
        seeds = len([c for c in group if c.at["stage"] != "rate"])
        what = " + ".join([f"rates {', '.join(f'{r:g}' for r in rates)}"] * bool(rates)
                          + [f"{seeds} more at the best rate" if rates else f"{seeds} at the best rate"] * bool(seeds))
        print(f"{model:15}{size:>6}{context:>9,}{a['parameters'] / 1e6:>12.3g}M{a['tokens'] / 1e6:>9,.3g}M{a['flops']:>11.2g}"
              f"{hours(group[0].seconds):>12}  {what}")
    total, flops = sum(c.seconds for c in cells + later), sum(c.at["flops"] for c in cells + later)
    where = f"{len(gpus)} GPU(s)" if gpus else f"{sweep.cores()} CPU core(s)"
    print(f"{len(cells + later)} runs, {flops:.2g} FLOPs, about {hours(total / jobs)} on {where}, {jobs} at a time"
          + (f" by {nproc} processes each" if nproc > 1 else "") + " (from a short measurement of each)")
    if preset.minutes and total / jobs > 60 * preset.minutes * 1.1:
        print(f"that is more than the {preset.minutes:.0f} minutes this preset is meant for: fewer --models, --sizes or --seeds, "
              "or less --tokens, make it shorter")


# ---------------------------------------------------------------------------------------------------------- command line

def parser():
    top = argparse.ArgumentParser(prog="table1.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    exact = {"allow_abbrev": False}  # --seed is train.py's, not short for --seeds
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="plan the runs and run what has no final record yet",
                              epilog="any other --key=value is train.py's and goes to every run", **exact)
    run.add_argument("--preset", choices=PRESETS, default="laptop")
    run.add_argument("--models", type=names, help="families, joined by commas (default: the six of Table 1)")
    run.add_argument("--sizes", type=names, help="of the preset: " + "; ".join(f"{n}: {', '.join(p.sizes)}"
                                                                               for n, p in PRESETS.items()))
    run.add_argument("--contexts", type=numbers(int), help="tokens of a training window")
    run.add_argument("--seeds", type=numbers(int, least=0), help="the first one also chooses the learning rate")
    run.add_argument("--lrs", type=numbers(float), help="peak learning rates to choose from, for each family and size")
    run.add_argument("--tokens", type=numbers(int), help="training tokens of a run of the table; other budgets follow in ratio")
    run.add_argument("--jobs", type=int, default=0, help="runs at a time (default: one a GPU; on a CPU one a core)")
    run.add_argument("--nproc", type=int, default=0, help="processes of a run, by torchrun (default 1; paper: one a GPU)")
    run.add_argument("--out", type=Path, help="folder of the sweep (default: out/table1_<preset>)")
    run.add_argument("--dry-run", "--dry_run", action="store_true", help="print the plan and stop")
    show = commands.add_parser("report", help="tables, figures, fits and report.html, from the records alone", **exact)
    show.add_argument("folder", type=Path, nargs="?", default=REPO / "out/table1_laptop", help="default: out/table1_laptop")
    show.add_argument("--out", type=Path, help="where to write (default: the sweep's own folder)")
    return top


def chosen(args):
    """The preset as the command line changes it. Raises ConfigError."""
    preset = PRESETS[args.preset]
    changes = {key: getattr(args, key) for key in ("models", "contexts", "seeds", "lrs") if getattr(args, key)}
    if args.sizes:
        unknown = [s for s in args.sizes if s not in preset.sizes]
        if unknown:
            raise ConfigError(f"--sizes={','.join(unknown)}: preset {args.preset} has {', '.join(preset.sizes)}")
        changes["sizes"] = {s: preset.sizes[s] for s in args.sizes}
    preset = dataclasses.replace(preset, **changes)
    if args.tokens:
        if len(args.tokens) != 1:
            raise ConfigError(f"--tokens={','.join(map(str, args.tokens))}: one number is expected")
        model, size = preset.models[0], next(iter(preset.sizes))
        batch = load(config_arguments(preset, model, size)).batch_tokens
        if args.tokens[0] < batch:
            raise ConfigError(f"--tokens={args.tokens[0]} is less than one step's {batch:,}: give more")
        steps = args.tokens[0] // batch
        ratio = steps / (preset.steps or steps)
        ladder = {size: tuple(max(1, round(s * ratio)) for s in more) for size, more in (preset.ladder or {}).items()}
        preset = dataclasses.replace(preset, steps=steps, ladder=ladder)
    return preset


def run(args, extra):
    preset = chosen(args)
    folder = args.out or REPO / "out" / f"table1_{args.preset}"
    if args.nproc < 0:
        raise ConfigError(f"--nproc={args.nproc}: 0 or more")
    extra = [f"--dataset={Path(e[10:]).resolve()}" if e.startswith("--dataset=") and Path(e[10:]).is_dir() else e for e in extra]
    if any(e.startswith("--wandb=") and not e.endswith("=off") for e in extra):
        extra = [*extra, f"--wandb_group={folder.name}"]
    gpus = sweep.visible_gpus()
    nproc = args.nproc or (max(1, len(gpus)) if args.preset == "paper" else 1)
    jobs = args.jobs or (1 if nproc > 1 else len(gpus) or sweep.cores())
    first = first_cells(preset, extra)
    check_data(first, args.dry_run)
    check_settings(first)
    is_paper = args.preset == "paper" and not args.tokens and not extra and not args.lrs
    where = same_commit(folder)

    # what follows is planned with the first rate in the best one's place: only to tell how long it takes
    guess = {(c.at["model"], c.at["size"], c.at["context"]): c.at["learning_rate"] for c in first}
    later = more_cells(preset, guess, extra)
    for key in estimate(first + later, max(1, sweep.cores() // jobs) if not gpus else sweep.cores(), nproc):
        if sys.stderr.isatty():
            print(f"\rmeasuring a step: {' '.join(map(str, key))}".ljust(70), end="\r", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(" " * 70, end="\r", file=sys.stderr, flush=True)
    print_plan(preset, first, later, jobs, nproc, gpus)
    if args.dry_run:
        if args.preset == "paper":
            print("on a machine with 8 GPUs, one after another (this command without --dry-run does the same):")
            for c in first:
                print(" ", " ".join(["torchrun --standalone --nproc_per_node=8", *c.command(folder)[1:]]))
        else:
            print(f"nothing was run; the first of them would be: python {' '.join(first[0].command(folder)[1:])}")
        return 0

    about = {"preset": args.preset, "paper": is_paper, "commit": sweep.version(where),
             "command": shlex.join(["python", "experiments/scaling/table1.py", *sys.argv[1:]]), "machine": where["gpu"] or where["cpu"],
             "cores": sweep.cores()}
    sweep.write_plan(folder, first, **about)
    failed = sweep.run_cells(first, folder, jobs, nproc)
    seconds = {(c.at["model"], c.at["size"], c.at["context"], c.at["steps"]): c.seconds for c in first + later}
    follow = more_cells(preset, best_rates(first, folder), extra)
    for c in follow:
        c.seconds = seconds[c.at["model"], c.at["size"], c.at["context"], c.at["steps"]]
    sweep.write_plan(folder, follow)
    failed |= sweep.run_cells(follow, folder, jobs, nproc)
    sweep.say_written(write_report(folder))
    return sweep.say_failed(failed, first + follow)


def check_data(cells, dry_run):
    """Open the data every context will train on: what is missing is said now, in a line, and not by every run."""
    from data.loader import DataError, Tokens

    for dataset, context in {(load(c.argv).dataset, c.at["context"]) for c in cells}:
        try:
            Tokens(Path(dataset) if Path(dataset).is_dir() else REPO / "data" / dataset, block_size=context)
        except DataError as error:
            if not dry_run:
                raise ConfigError(error) from None
            print(f"before it can run: {error}")


def check_settings(cells):
    """Raises ConfigError where train.py would, and where the configs differ in what must not differ within a sweep."""
    from train import check

    found = {}
    for c in cells:
        config = load(c.argv)
        check(config)
        for key in sweep.SAME_IN_A_SWEEP:
            other, value = found.setdefault(key, (c.at["model"], getattr(config, key)))
            if value != getattr(config, key):
                raise ConfigError(f"{key} is {value} in {other}'s config and {getattr(config, key)} in {c.at['model']}'s: such "
                                  f"runs are not compared; give --{key}=... for all, or change a config")


def write_report(folder, out=None):
    from experiments.scaling import report

    return report.write(folder, out)


def main(argv):
    args, extra = parser().parse_known_args(argv)
    return sweep.run_or_report("table1.py", args, extra, run, write_report,
                               ("out_dir", "resume", "model", "seed", "max_iters", "block_size", "learning_rate"),
                               "--models, --seeds, --tokens, --contexts, --lrs, --out")


if __name__ == "__main__":
    with configurator.main_error("table1.py"):
        sys.exit(main(sys.argv[1:]))
