"""Table 1 and Figure 5 of the paper, at a scale you can afford: plan the runs, run them, report.

    python experiments/scaling/table1.py run --preset=laptop             six families, three sizes: an hour on two cores
    python experiments/scaling/table1.py run --preset=gpu                a ladder meant for 20 minutes of one large GPU
    python experiments/scaling/table1.py run --preset=paper --dry-run    the paper's 24 cells, with their torchrun lines
    python experiments/scaling/table1.py report out/table1_laptop        from the records alone: tables, figures, fits
    python experiments/scaling/table1.py report out/table1_laptop --save       and the sweep as one file in results/
    python experiments/scaling/table1.py report results/table1_laptop.json     the same report from that file

Stop it at any moment: the same command resumes. A sweep grows in the same way: what has finished is not run again.

    python experiments/scaling/table1.py run --seeds=1337,1338,1339,1340                            one more seed
    python experiments/scaling/table1.py run --sizes=460K --sizes=250K:n_layer=2,n_embd=96          one more size
    python experiments/scaling/table1.py run --steps=1024,640                                       one more budget
    python experiments/scaling/table1.py run --models=longhorn,slow_longhorn --sizes=460K           one more family

A model of your own takes part with its entry in model.py's FAMILIES and its config/<model>_laptop.py. Any other
--key=value goes to every run (`--wandb=offline`, `--dtype=float32`).

The learning rate is chosen for each family and size before anything else, on the first seed; the other seeds and
budgets follow at the best rate. One rate for all would favour the family whose optimum it happens to be.
"""

import argparse
import dataclasses
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

import configurator  # noqa: E402
from configurator import ConfigError  # noqa: E402
from experiments.scaling import sweep  # noqa: E402
from experiments.scaling.runs import SAME_IN_A_SWEEP, read_run  # noqa: E402
from experiments.scaling.sweep import BadRecord, Cell, hours, names, numbers  # noqa: E402
from records import environment  # noqa: E402

FAMILIES = ("longhorn", "mamba", "llama", "gla", "retnet", "rwkv")  # of Table 1
SET_BY_THE_SWEEP = ("out_dir", "resume", "model", "seed", "max_iters", "block_size", "learning_rate")


@dataclass
class Preset:
    """A ladder of runs. `sizes` maps a label to what it changes in config/<model>_<config>.py."""

    sizes: dict
    contexts: tuple
    config: str = ""  # empty: the size's label in small letters
    steps: int = None  # optimizer steps of the table's runs, the same for every size; None: the config's
    ladder: dict = dataclasses.field(default_factory=dict)  # size -> other numbers of steps, for the fit: one seed
    lrs: tuple = ()  # peak learning rates to choose from; none: the config's own
    seeds: tuple = (1337,)
    models: tuple = FAMILIES
    args: tuple = ()  # for every run


PRESETS = {
    # Windows of 256 bytes, 4 per step. A third of the steps, and for the smallest size three times as many: 3.2 is also
    # about the ratio of one size's FLOPs per token to the next, so the runs of equal compute lie on a diagonal.
    "laptop": Preset(
        config="laptop", contexts=(256,), steps=1024, lrs=(1e-3, 3e-3, 9e-3), seeds=(1337, 1338, 1339),
        sizes={"130K": ("--n_layer=2", "--n_head=1", "--n_embd=64"),
               "460K": ("--n_layer=2", "--n_head=2", "--n_embd=128"),
               "1.5M": ("--n_layer=3", "--n_head=3", "--n_embd=192")},
        ladder={"130K": (320, 3200), "460K": (320,), "1.5M": (320,)},
        args=("--eval_block_size=0", "--eval_tokens=131072", "--final_eval_tokens=131072", "--log_interval=32")),
    "gpu": Preset(
        config="120m", contexts=(1024,), steps=512, lrs=(2e-3,),
        sizes={"3M": ("--n_layer=4", "--n_head=4", "--n_embd=256"),
               "11M": ("--n_layer=6", "--n_head=6", "--n_embd=384"),
               "25M": ("--n_layer=8", "--n_head=8", "--n_embd=512")},
        ladder={"3M": (160, 1600), "11M": (160,), "25M": (160,)},
        args=("--dataset=pystdlib", "--vocab_size=0", "--mlp_multiple=64", "--batch_tokens=32768",
              "--micro_batch_size=32", "--compile=false", "--eval_tokens=0", "--log_interval=20")),
    "paper": Preset(sizes={"120M": (), "350M": ()}, contexts=(1024, 4096)),
}


# ----------------------------------------------------------------------------------------------------------------- plan

def config_arguments(preset, model, size):
    """A model's config file at a size, and what the preset changes in it. Raises ConfigError where there is no file."""
    kind = preset.config or size.lower()
    name = f"config/{model}_{kind}.py"
    if not (REPO / name).exists():
        known = sorted(p.stem.removesuffix(f"_{kind}") for p in REPO.glob(f"config/*_{kind}.py"))
        raise ConfigError(f"{name} does not exist: write it, as config/longhorn_laptop.py shows, or choose models of "
                          f"{', '.join(known)}")
    return [name, *preset.sizes[size], *preset.args]


def load(argv):
    """The settings that `argv` gives train.py, with paths relative to the repository."""
    from train import TrainConfig

    paths = [str(REPO / a) if a.endswith(".py") and not a.startswith("--") else a for a in argv]
    return configurator.load(TrainConfig, paths)


def cell(preset, extra, stage, model, size, context, steps, rate, seed):
    """One Cell; steps and rate None: the config's."""
    argv = [*config_arguments(preset, model, size), *extra]
    config = load(argv)
    if config.model != model:
        raise ConfigError(f"{argv[0]} sets model to {config.model}: write model = {model!r} there")
    steps = steps or config.max_iters
    rate = float(f"{rate or config.learning_rate:g}")  # as in the name
    argv += [f"--block_size={context}", f"--max_iters={steps}", f"--learning_rate={rate:g}", f"--seed={seed}"]
    if context != config.block_size and config.micro_batch_size:  # as many tokens in memory as before
        argv.append(f"--micro_batch_size={max(1, config.micro_batch_size * config.block_size // context)}")
    if "eval_interval" not in "".join(extra) and preset.steps:
        argv.append(f"--eval_interval={-(-steps // 3)}")
    at = {"stage": stage, "model": model, "size": size, "context": context, "steps": steps, "learning_rate": rate,
          "seed": seed}
    return Cell(f"{model}_{size}_{context}_{steps}steps_lr{rate:g}_seed{seed}", argv, at)


def place(at):
    return at["model"], at["size"], at["context"]


def first_cells(preset, extra=()):
    """The runs that come first: every family, size, context and learning rate, on the first seed."""
    return [cell(preset, extra, "rate", model, size, context, preset.steps, rate, preset.seeds[0])
            for context in preset.contexts for size in preset.sizes for rate in preset.lrs or (None,)
            for model in preset.models]


def more_cells(preset, best, extra=()):
    """The runs that follow at the best rates: further seeds, then other budgets.

    best: {(model, size, context): rate}. What is missing from it (its runs failed) has nothing to follow.
    """
    wanted = [("seed", preset.steps, seed, size) for seed in preset.seeds[1:] for size in preset.sizes]
    wanted += [("ladder", steps, preset.seeds[0], size)
               for size in preset.sizes for steps in preset.ladder.get(size, ())]
    return [cell(preset, extra, stage, model, size, context, steps, best[model, size, context], seed)
            for stage, steps, seed, size in wanted for context in preset.contexts for model in preset.models
            if (model, size, context) in best]


def best_rates(cells, folder):
    """{(model, size, context): rate} of the lowest validation loss among the finished of `cells`.

    The rates that an earlier command tried for the same runs take part.
    """
    same_run = lambda at: tuple(at.get(key) for key in ("model", "size", "context", "steps", "seed"))
    asked, tried = {same_run(c.at) for c in cells}, {c.name: c.at for c in cells}
    plan = sweep.read_plan(folder)["cells"] if (Path(folder) / "plan.json").exists() else {}
    tried |= {name: at for name, at in plan.items() if at.get("stage") == "rate" and same_run(at) in asked}
    losses = {}
    for name, at in tried.items():
        try:
            loss = read_run(Path(folder) / name, at).loss
        except BadRecord:
            continue
        losses.setdefault(place(at), []).append((loss, at["learning_rate"]))
    return {key: min(found)[1] for key, found in losses.items()}


# ------------------------------------------------------------------------------------------------------------- estimate

# Fitted to the runs of results/table1_laptop.json: one core of an AMD EPYC (Zen 4) per run, shared with other work.
CPU_SECONDS_PER_TOKEN, CPU_SECONDS_PER_FLOP = 3.9e-5, 1.12e-11
START_SECONDS = 5.0  # imports, the check at the start


def estimate(cells, on_gpu=False):
    """Set parameters, tokens and flops of every cell, and `seconds`, by which the time left is shared among cells.

    Raises ConfigError where a config does not make a model.
    """
    import torch

    from model import LM, ModelConfig

    for c in cells:
        config = load(c.argv)
        settings = {**dataclasses.asdict(config), "vocab_size": config.vocab_size or 256}
        try:
            with torch.device("meta"):
                model = LM(ModelConfig(**{f.name: settings[f.name] for f in dataclasses.fields(ModelConfig)}))
        except ValueError as error:
            raise ConfigError(f"{c.argv[0]}: {error}") from None
        tokens = config.max_iters * config.batch_tokens
        flops = model.flops_per_token()["total"] * tokens
        c.at |= {"parameters": model.parameter_count()["total"], "tokens": tokens, "flops": flops}
        c.seconds = START_SECONDS + CPU_SECONDS_PER_FLOP * flops + (0 if on_gpu else CPU_SECONDS_PER_TOKEN * tokens)


def print_plan(cells, later, jobs, nproc, gpus):
    """The plan as a table: a line per family, size, context and budget; then the whole."""
    print(f"{'model':15}{'size':>6}{'context':>9}{'parameters':>13}{'tokens':>10}{'FLOPs':>11}  runs")
    lines = {}
    for c in cells + later:
        lines.setdefault((*place(c.at), c.at["steps"]), []).append(c)
    for (model, size, context, _), group in lines.items():
        a = group[0].at
        rates = sorted({c.at["learning_rate"] for c in group if c.at["stage"] == "rate"})
        seeds = sum(c.at["stage"] != "rate" for c in group)
        what = [f"rates {', '.join(f'{r:g}' for r in rates)}"] * bool(rates)
        what += [f"{seeds} {'more ' if rates else ''}at the best rate"] * bool(seeds)
        print(f"{model:15}{size:>6}{context:>9,}{a['parameters'] / 1e6:>12.3g}M{a['tokens'] / 1e6:>9,.3g}M"
              f"{a['flops']:>11.2g}  {' + '.join(what)}")
    every = cells + later
    where = f"{len(gpus)} GPU(s)" if gpus else f"{sweep.cores()} CPU core(s)"
    print(f"{len(every)} runs, {sum(c.at['flops'] for c in every):.2g} FLOPs on {where}, {jobs} at a time"
          + f" by {nproc} processes each" * (nproc > 1))
    if not gpus:
        time = hours(sum(c.seconds for c in every) / jobs)
        print(f"at most about {time} on such cores as results/table1_laptop.json had")


# --------------------------------------------------------------------------------------------------------- command line

def sizes(text):
    """{label: arguments} of LABEL:key=value,key=value; {label: None} for labels of the preset, joined by commas."""
    if ":" not in text:
        return dict.fromkeys(names(text))
    label, changes = text.split(":", 1)
    changes = changes.split(",")
    if not re.fullmatch(r"[\w.-]+", label) or not all("=" in c for c in changes):
        raise argparse.ArgumentTypeError(f"{text!r}: give a size as LABEL:key=value,key=value, or labels of the preset")
    for key in (c.split("=")[0] for c in changes):
        if key in SET_BY_THE_SWEEP:
            raise argparse.ArgumentTypeError(f"{text!r}: a size cannot set {key}")
    return {label: tuple(f"--{c}" for c in changes)}


def parser():
    exact = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}  # --seed is train.py's
    top = argparse.ArgumentParser(prog="table1.py", description=__doc__, **exact)
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="plan the runs and run those that have not finished",
                              epilog="any other --key=value is train.py's and goes to every run", **exact)
    labels = "; ".join(f"{name}: {', '.join(p.sizes)}" for name, p in PRESETS.items())
    run.add_argument("--preset", choices=PRESETS, default="laptop")
    run.add_argument("--models", type=names, help="families, joined by commas (default: the six of Table 1)")
    run.add_argument("--sizes", type=sizes, action="append", help="labels of the preset, joined by commas, or a new "
                     f"size as LABEL:key=value,key=value; give the option once per new size ({labels})")
    run.add_argument("--contexts", type=numbers(int), help="tokens per training window")
    run.add_argument("--seeds", type=numbers(int, least=0), help="the first one also chooses the learning rate")
    run.add_argument("--lrs", type=numbers(float), help="peak learning rates to choose from, for each family and size")
    run.add_argument("--steps", type=numbers(int), help="optimizer steps of the table's runs, then of other budgets "
                     "for the fit, joined by commas")
    run.add_argument("--jobs", type=int, default=0, help="runs at a time (default: one per GPU; on a CPU one per core)")
    run.add_argument("--nproc", type=int, default=0, help="processes per run (default 1; paper: one per GPU)")
    run.add_argument("--out", type=Path, help="folder of the sweep (default: out/table1_<preset>)")
    run.add_argument("--dry-run", "--dry_run", action="store_true", help="print the plan and stop")
    show = commands.add_parser("report", help="tables, figures, fits and report.html, from the records alone", **exact)
    show.add_argument("folder", type=Path, nargs="?", default=REPO / "out/table1_laptop",
                      help="a sweep's folder (default: out/table1_laptop), or a file that --save wrote")
    show.add_argument("--out", type=Path, help="where to write (default: the sweep's folder, or out/<name>_report)")
    show.add_argument("--save", action="store_true", help="write the sweep to results/<name>.json, table and figures "
                      "to results/<name>/")
    for command in (run, show):
        command.add_argument("--accept_code", "--accept-code", type=names, default=(), metavar="HASH,HASH",
                             help="compare runs of this other code with the rest; the report says so")
    return top


def chosen(args):
    """The preset as the command line changes it. Raises ConfigError."""
    preset = PRESETS[args.preset]
    changes = {key: getattr(args, key) for key in ("models", "contexts", "seeds", "lrs") if getattr(args, key)}
    given = {label: argv for each in args.sizes or () for label, argv in each.items()}
    for label, argv in given.items():
        if argv is None and label not in preset.sizes:
            raise ConfigError(f"--sizes={label}: preset {args.preset} has {', '.join(preset.sizes)}; define another "
                              f"size as --sizes={label}:n_layer=2,n_embd=96")
        if argv is not None and label in preset.sizes:
            raise ConfigError(f"--sizes={label}:...: preset {args.preset} has a size {label}: choose another label")
    if given:
        changes["sizes"] = {label: argv or preset.sizes[label] for label, argv in given.items()}
    if args.steps:
        labels = changes.get("sizes", preset.sizes)
        changes |= {"steps": args.steps[0], "ladder": dict.fromkeys(labels, args.steps[1:])}
    return dataclasses.replace(preset, **changes)


def run(args, extra):
    """Plan, run and report; returns the exit code."""
    preset = chosen(args)
    folder = args.out or REPO / "out" / f"table1_{args.preset}"
    if args.nproc < 0:
        raise ConfigError(f"--nproc={args.nproc}: 0 or more")
    extra = [f"--dataset={Path(e[10:]).resolve()}" if e.startswith("--dataset=") and Path(e[10:]).is_dir() else e
             for e in extra]
    gpus = sweep.visible_gpus()
    nproc = args.nproc or (max(1, len(gpus)) if args.preset == "paper" else 1)
    jobs = args.jobs or (1 if nproc > 1 else len(gpus) or sweep.cores())
    first = first_cells(preset, extra)
    check_data(first, args.dry_run)
    check_settings(first)
    about = about_sweep(args, preset, folder, extra)
    sweep.say_changed_code(folder)

    # what follows is planned with the first rate in place of the best one
    later = more_cells(preset, {place(c.at): c.at["learning_rate"] for c in first}, extra)
    estimate(first + later, bool(gpus))
    print_plan(first, later, jobs, nproc, gpus)
    if args.dry_run:
        if args.preset == "paper":
            print("on a machine with 8 GPUs, one after another (this command without --dry-run does the same):")
            for c in first:
                print(" ", " ".join(["torchrun --standalone --nproc_per_node=8", *c.command(folder)[1:]]))
        else:
            print(f"nothing was run; the first command would be: python {' '.join(first[0].command(folder)[1:])}")
        return 0

    sweep.write_plan(folder, first, **about)
    failed = sweep.run_cells(first, folder, jobs, nproc)
    follow = more_cells(preset, best_rates(first, folder), extra)
    estimate(follow, bool(gpus))
    sweep.write_plan(folder, follow)
    failed |= sweep.run_cells(follow, folder, jobs, nproc)
    sweep.say_written(write_report(folder, None, args.accept_code))
    return sweep.say_failed(failed, first + follow)


def about_sweep(args, preset, folder, extra):
    """What plan.json says of the whole sweep. Raises ConfigError where an earlier command had another size of a
    label."""
    before = sweep.read_plan(folder) if (folder / "plan.json").exists() else {}
    known = before.get("sizes", {})
    for label, argv in preset.sizes.items():
        if known.get(label, [*argv]) != [*argv]:
            raise ConfigError(f"{folder} has a size {label} of {' '.join(known[label])}: choose another label or --out")
    where = environment()
    command = shlex.join(["python", "experiments/scaling/table1.py", *sys.argv[1:]])
    is_paper = args.preset == "paper" and not (args.steps or args.lrs or args.sizes or extra)
    return {"preset": args.preset, "paper": is_paper and before.get("paper", True),
            "sizes": known | {label: [*argv] for label, argv in preset.sizes.items()},
            "commands": list(dict.fromkeys([*before.get("commands", ()), command])),
            "machine": where["gpu"] or where["cpu"], "cores": sweep.cores()}


def check_data(cells, dry_run):
    """Open the data of every context: what is missing is said now, in one line, and not by every run."""
    from data.loader import DataError, Tokens

    for dataset, context in {(load(c.argv).dataset, c.at["context"]) for c in cells}:
        try:
            Tokens(Path(dataset) if Path(dataset).is_dir() else REPO / "data" / dataset, block_size=context)
        except DataError as error:
            if not dry_run:
                raise ConfigError(error) from None
            print(f"before it can run: {error}")


def check_settings(cells):
    """Raises ConfigError where train.py would, and where configs differ in what must not differ within a sweep."""
    from train import check

    found = {}
    for c in cells:
        config = load(c.argv)
        check(config)
        for key in SAME_IN_A_SWEEP:
            value = getattr(config, key, None)
            other, known = found.setdefault(key, (c.at["model"], value))
            if value != known:
                raise ConfigError(f"{key} is {known} in {other}'s config and {value} in {c.at['model']}'s: such runs "
                                  f"are not compared; give --{key}=... for all, or change a config")


def write_report(folder, out=None, accept_code=(), save=False):
    from experiments.scaling import report

    return report.write(folder, out, accept_code=accept_code, save_it=save)


def main(argv):
    args, extra = parser().parse_known_args(argv)
    write = lambda folder, out: write_report(folder, out, args.accept_code, args.save)
    return sweep.run_or_report("table1.py", args, extra, run, write, SET_BY_THE_SWEEP,
                               "--models, --seeds, --steps, --contexts, --lrs, --out")


if __name__ == "__main__":
    with configurator.main_error("table1.py"):
        sys.exit(main(sys.argv[1:]))
