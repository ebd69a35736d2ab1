"""Figure 4 of the paper: multi-query associative recall, nine mixers by length, width and learning rate.

    python experiments/recall/mqar.py run --preset=laptop              T = 64 and 128 at width 64, within an hour on two CPU cores
    python experiments/recall/mqar.py run --preset=gpu                 the claim: T = 512 at width 64, Longhorn, Mamba, attention, four rates
    python experiments/recall/mqar.py run --preset=paper --dry-run     the whole figure, 448 runs, and how long they take here
    python experiments/recall/mqar.py report out/mqar_laptop           from the records alone: table, figure4.png, report.json
    python experiments/recall/mqar.py cell --mixer=longhorn --T=64     one run; cell --help lists its settings

    python experiments/recall/mqar.py run --mixers=longhorn,mamba --Ts=128 --widths=64,128 --lrs=2.2e-3,1e-2 --seeds=1,2,3

What else is given as --key=value goes to every run (`--epochs=8`, `--dtype=float32`). Stop it at any moment: the same command
goes on. A mixer of your own takes part with a line in MIXERS of experiments/recall/models.py.

The surprise: the published protocol is one seed, and the best of four learning rates on the very examples that also say when to
stop. Both are kept, to compare with Figure 4; `--seeds=1,2,3` adds what it does not show, the spread.

The task is in mqar_task.py, the models in mqar_mixers.py, one run in mqar_train.py, the report in mqar_report.py.
"""

import argparse
import dataclasses
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

FIGURE4 = ("attention", "based", "hyena", "rwkv4", "baseconv", "mamba", "longhorn")
RATES = (1e-4, 4.6e-4, 2.2e-3, 1e-2)


@dataclass
class Preset:
    """Runs: every mixer at every T in `lengths`, width, rate and seed."""

    lengths: dict  # T -> mixers
    widths: tuple
    lrs: tuple = RATES
    seeds: tuple = (1,)
    args: tuple = ()  # for every run
    jobs_a_gpu: int = 1  # small models leave most of a GPU idle
    minutes: float = 0  # what it is meant to take at most, 0: nothing promised
    on: str = ""  # on what


PRESETS = {
    # Of the same compute, batches of 128 make four times the steps of the benchmark's 512: of Longhorn's queries at a rate of
    # 1e-2, 89% were right after 200 steps of 128 (seed 1), where 560 steps of 512 had come to 98%. And a cosine of three epochs.
    "laptop": Preset({64: (*FIGURE4, "deltanet", "gla"), 128: ("attention", "mamba", "longhorn")}, widths=(64,),
                     lrs=(2.2e-3, 1e-2), args=("--batch_size=128", "--epochs=3", "--eval_interval=130"), minutes=60,
                     on="two CPU cores"),
    "gpu": Preset({512: ("attention", "mamba", "longhorn")}, widths=(64,), args=("--epochs=20",), jobs_a_gpu=4, minutes=20,
                  on="one large GPU"),
    "paper": Preset(dict.fromkeys((64, 128, 256, 512), FIGURE4), widths=(64, 128, 256, 512), args=("--dtype=float32",),
                    jobs_a_gpu=4),
}


def load(argv):
    """The settings that `argv` gives a run, zeros filled in, with its Task. Raises ConfigError."""
    from experiments.recall.cell import RecallConfig, check

    config = configurator.load(RecallConfig, argv)
    return config, check(config)


def cells_of(preset, extra=()):
    """[Cell] of the preset. The rates of a point follow one another, so that they run together. Raises ConfigError."""
    from experiments.recall.models import MIXERS

    cells = []
    for T, mixers in preset.lengths.items():
        if unknown := [m for m in mixers if m not in MIXERS]:
            raise ConfigError(f"unknown mixer {unknown[0]!r}: choose of {', '.join(MIXERS)}")
        for width in preset.widths:
            for mixer in mixers:
                for seed in preset.seeds:
                    for rate in sorted(preset.lrs, reverse=True):
                        at = {"mixer": mixer, "T": T, "n_embd": width, "learning_rate": rate, "seed": seed}
                        argv = [*(f"--{k}={v:g}" if k == "learning_rate" else f"--{k}={v}" for k, v in at.items()),
                                *preset.args, *extra]
                        load(argv)
                        at["learning_rate"] = float(f"{rate:g}")
                        cells.append(Cell(f"{mixer}_T{T}_d{width}_lr{rate:g}_seed{seed}", ["cell", *argv], at))
    return cells


# ---------------------------------------------------------------------------------------------------------------- estimate

MEASURED_TOKENS = 4096  # of a trial step on a CPU; on a GPU, where a small step takes as long as a large one, the whole batch
START_SECONDS = 10.0  # importing PyTorch, drawing the examples, the tests at the end


def estimate(cells, threads):
    """Sets `seconds` of every cell, at most: all its epochs. Measures a training step of each mixer, T and width; yields these.

    An evaluation costs a third of a training step an example; the trial step is scaled by its examples.
    """
    import torch

    from experiments.recall.cell import OnDevice, logits
    from experiments.recall.models import recall_model
    from experiments.recall.task import generate
    from train import keep_memory, pick_dtype

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    keep_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    speed = {}  # (mixer, T, width) -> (seconds an example, FLOPs an example)
    for c in cells:
        config, task = load(c.argv[1:])
        key = config.mixer, config.T, config.n_embd
        if key not in speed:
            yield key
            B = config.batch_size if device.type == "cuda" else max(1, min(config.batch_size, MEASURED_TOKENS // config.T))
            batch = OnDevice(generate(task, B, 0, threads=threads), device)
            try:
                model = recall_model(config.mixer, config.n_embd, config.T, config.vocab_size).to(device)
            except ValueError as error:
                raise ConfigError(error) from None
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
            dtype, times = pick_dtype(config.dtype, device), []
            for _ in range(4):
                began = time.perf_counter()
                with torch.autocast(device.type, dtype, enabled=dtype == torch.bfloat16):
                    out = logits(model, batch.tokens, batch.where)
                loss = torch.nn.functional.cross_entropy(out.float().flatten(0, 1), batch.labels.flatten())
                del out
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                loss.item()
                times.append(time.perf_counter() - began)
                if len(times) > 1 and sum(times) > 3:
                    break
            speed[key] = median(times[1:]) / B, model.step_flops(config.T, config.pairs)
            del model, optimizer
        seconds, flops = speed[key]
        steps = -(-config.train_examples // config.batch_size) * config.epochs
        evaluations = steps // config.eval_interval if config.eval_interval else config.epochs
        examples = config.train_examples * config.epochs + evaluations * config.test_examples / 3
        c.at |= {"pairs": config.pairs, "steps": steps, "flops": flops * examples}
        c.seconds = seconds * examples + START_SECONDS
    torch.set_num_threads(before)


def print_plan(preset, cells, jobs, gpus):
    """The plan as a table: a line a T, width and mixer; then the whole."""
    print(f"{'T':>4}{'pairs':>7}{'width':>7}  {'mixer':15}{'rates':33}{'seeds':>5}{'steps':>8}{'FLOPs':>9}{'a run at most':>15}")
    lines = {}
    for c in cells:
        lines.setdefault((c.at["T"], c.at["n_embd"], c.at["mixer"]), []).append(c)
    for (T, width, mixer), group in lines.items():
        a = group[0].at
        rates = ", ".join(f"{r:g}" for r in sorted({c.at["learning_rate"] for c in group}))
        print(f"{T:>4}{a['pairs']:>7}{width:>7}  {mixer:15}{rates:33}{len({c.at['seed'] for c in group}):>5}{a['steps']:>8,}"
              f"{a['flops']:>9.2g}{hours(group[0].seconds):>15}")
    total, flops = sum(c.seconds for c in cells), sum(c.at["flops"] for c in cells)
    where = f"{len(gpus)} GPU(s)" if gpus else f"{sweep.cores()} CPU core(s)"
    share = max(1, len(gpus)) if gpus else jobs
    print(f"{len(cells)} runs, {flops:.2g} FLOPs, at most {hours(total / share)} on {where}, {jobs} at a time: a run stops where "
          "it answers enough of the test right (from a short measurement of each"
          + (", as if runs that share a GPU gained nothing by it)" if gpus and jobs > len(gpus) else ")"))
    if preset.minutes and total / share > 60 * preset.minutes * 1.1:
        print(f"that is more than the {preset.minutes:.0f} minutes of {preset.on} that this preset is meant for; --mixers, --Ts, "
              "--lrs, --epochs make it shorter")


# ------------------------------------------------------------------------------------------------------------ command line

def parser():
    top = argparse.ArgumentParser(prog="mqar.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    exact = {"allow_abbrev": False}  # --seed is a run's, not short for --seeds
    commands = top.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="plan the runs and run what has no final record yet",
                              epilog="any other --key=value is a run's and goes to every one: see cell --help", **exact)
    run.add_argument("--preset", choices=PRESETS, default="laptop")
    run.add_argument("--mixers", type=names, help="joined by commas (default: the preset's at each T)")
    run.add_argument("--Ts", type=numbers(int), help="lengths; one that the preset lacks gets the mixers of its first")
    run.add_argument("--widths", type=numbers(int))
    run.add_argument("--lrs", type=numbers(float), help="learning rates, of which the best counts")
    run.add_argument("--seeds", type=numbers(int, least=0))
    run.add_argument("--jobs", type=int, default=0, help="runs at a time (default: one a core; on a GPU the preset's, 1 to 4)")
    run.add_argument("--out", type=Path, help="folder of the sweep (default: out/mqar_<preset>)")
    run.add_argument("--dry-run", "--dry_run", action="store_true", help="print the plan and stop")
    show = commands.add_parser("report", help="table, figure and report.json, from the records alone", **exact)
    show.add_argument("folder", type=Path, nargs="?", default=REPO / "out/mqar_laptop", help="default: out/mqar_laptop")
    show.add_argument("--out", type=Path, help="where to write (default: the sweep's own folder)")
    commands.add_parser("cell", help="one run; cell --help lists its settings", add_help=False)
    return top


def chosen(args):
    """The preset as the command line changes it."""
    preset = PRESETS[args.preset]
    changes = {key: getattr(args, key) for key in ("widths", "lrs", "seeds") if getattr(args, key)}
    lengths = {T: preset.lengths.get(T, next(iter(preset.lengths.values()))) for T in args.Ts or preset.lengths}
    return dataclasses.replace(preset, lengths={T: args.mixers or mixers for T, mixers in lengths.items()}, **changes)


def run(args, extra):
    preset = chosen(args)
    folder = args.out or REPO / "out" / f"mqar_{args.preset}"
    gpus = sweep.visible_gpus()
    jobs = args.jobs or (len(gpus) * preset.jobs_a_gpu if gpus else sweep.cores())
    cells = cells_of(preset, extra)
    where = same_commit(folder)
    if not args.dry_run:
        sweep.make_folder(folder)
    for key in estimate(cells, max(1, sweep.cores() // jobs)):
        if sys.stderr.isatty():
            print(f"\rmeasuring a step: {' '.join(map(str, key))}".ljust(70), end="\r", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(" " * 70, end="\r", file=sys.stderr, flush=True)
    print_plan(preset, cells, jobs, gpus)
    if args.dry_run:
        command = cells[0].command(folder, script="experiments/recall/mqar.py")
        print(f"nothing was run; the first of them would be: python {' '.join(command[1:])}")
        return 0
    sweep.write_plan(folder, cells, preset=args.preset, commit=sweep.version(where), machine=where["gpu"] or where["cpu"],
                     cores=sweep.cores())
    failed = sweep.run_cells(cells, folder, jobs, script="experiments/recall/mqar.py", gpus=gpus)
    sweep.say_written(write_report(folder))
    return sweep.say_failed(failed, cells)


def write_report(folder, out=None):
    from bench import mqar_report

    return mqar_report.write(folder, out)


def main(argv):
    if argv[:1] == ["cell"]:
        import checkpoint
        from bench import mqar_train

        with configurator.main_error("mqar.py cell", checkpoint.CheckpointError):
            mqar_train.main(argv[1:])
        return 0
    args, extra = parser().parse_known_args(argv)
    return sweep.run_or_report("mqar.py", args, extra, run, write_report,
                               ("mixer", "T", "n_embd", "learning_rate", "seed", "out_dir", "resume"),
                               "--mixers, --Ts, --widths, --lrs, --seeds, --out")


if __name__ == "__main__":
    with configurator.main_error("mqar.py"):
        sys.exit(main(sys.argv[1:]))
