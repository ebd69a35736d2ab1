"""Figure 4 of the paper: multi-query associative recall, nine mixers by length, width and learning rate.

    python experiments/recall/mqar.py run --preset=laptop           T = 64 and 128, width 64: an hour on two CPU cores
    python experiments/recall/mqar.py run --preset=sooner           T = 128, two mixers, six seeds: 2-4 hours
    python experiments/recall/mqar.py run --preset=steps            the delta rule's three steps: 40 minutes
    python experiments/recall/mqar.py run --preset=gpu              the claim: T = 512 at width 64, three mixers
    python experiments/recall/mqar.py run --preset=paper --dry-run  the whole figure: 448 runs
    python experiments/recall/mqar.py report out/recall_laptop      table and figure, from the records alone
    python experiments/recall/cell.py --model=longhorn              one run; --help lists its settings
    python experiments/recall/mqar.py run --mixers=longhorn,mamba --Ts=128 --widths=64,128 --lrs=2.2e-3,1e-2 --seeds=1,2

Any other --key=value goes to every run (`--epochs=8`, `--dtype=float32`). Stop it at any moment: the same command
resumes, and one with more seeds, lengths or mixers adds to the same sweep. Your own mixer takes part with a row in
MIXERS of experiments/recall/models.py.

The published protocol has one seed, and chooses the best of four learning rates on the examples that also decide when
to stop. Here recall is reported on other examples, and `--seeds=1,2,3` shows the spread over seeds. Counting the seeds
that solve a task is coarse: 3 of 3 against 1 of 3 is p = 0.40. The number of steps to half of the queries says more.
"""

import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from configurator import Count, Positive, Whole  # noqa: E402
from experiments.recall import report  # noqa: E402
from experiments.sweeps.experiment import Experiment, Report, Run  # noqa: E402
from experiments.sweeps.runner import Cell  # noqa: E402

STEPS = ("deltanet", "deltanet_implicit", "deltanet_exact", "deltanet_free", "deltanet_implicit_free",
         "deltanet_exact_free")
FIGURE4 = ("attention", "based", "hyena", "rwkv4", "baseconv", "mamba", "longhorn")
RATES = (1e-4, 4.6e-4, 2.2e-3, 1e-2)
SECONDS_PER_FLOP = 3e-11  # on one core, with the overheads of small models: from results/recall_laptop.json


@dataclass
class Preset:
    """Runs: every mixer at every T in `lengths`, width, rate and seed."""

    lengths: dict  # T -> mixers
    widths: tuple
    lrs: tuple = RATES
    seeds: tuple = (1,)
    args: tuple = ()  # for every run


PRESETS = {
    # At equal compute, batches of 128 make four times the steps of the benchmark's 512, and learn more. At a rate of
    # 1e-2 Longhorn answered 89% of the queries right after 200 steps of 128 (seed 1), and 98% after 560 steps of 512.
    "laptop": Preset({64: (*FIGURE4, "deltanet", "gla"), 128: ("attention", "mamba", "longhorn")}, widths=(64,),
                     lrs=(2.2e-3, 1e-2), args=("--batch_examples=128", "--epochs=3", "--eval_interval=130")),
    # Which one learns it sooner: steps to half of the queries, six seeds each.
    "sooner": Preset({128: ("mamba", "longhorn")}, widths=(64,), lrs=(4.6e-3, 1e-2, 2.2e-2), seeds=tuple(range(11, 17)),
                     args=("--batch_examples=128", "--epochs=3", "--eval_interval=65")),
    # States of 256 and 1,024 numbers per layer: the value of a step shows when the state is small.
    "steps": Preset(dict.fromkeys((64, 128), STEPS), widths=(16, 32), lrs=(1e-2,), seeds=(1, 2, 3), args=(
        "--batch_examples=128", "--train_examples=48000", "--epochs=2", "--schedule=cosine", "--warmup_iters=50",
        "--eval_interval=125")),
    "gpu": Preset({512: ("attention", "mamba", "longhorn")}, widths=(64,), args=("--epochs=20",)),
    "paper": Preset(dict.fromkeys((64, 128, 256, 512), FIGURE4), widths=(64, 128, 256, 512), args=("--dtype=float32",)),
}


# -------------------------------------------------------------------------------------------------------- command line

@dataclass
class RecallRun(Run):
    preset: Literal[tuple(PRESETS)] = "laptop"  # see above
    mixers: tuple[str, ...] = ()  # (the preset's at each T)
    Ts: tuple[Count, ...] = ()  # lengths; one that the preset lacks has the mixers of its first length
    widths: tuple[Count, ...] = ()  # (the preset's)
    lrs: tuple[Positive, ...] = ()  # learning rates; the best one counts (the preset's)
    seeds: tuple[Whole, ...] = ()  # (the preset's)


class RecallSweep(Experiment):
    script = "experiments/recall/mqar.py"
    settings = {"run": RecallRun, "report": Report}
    program = "experiments/recall/cell.py"
    write = staticmethod(report.write)
    name = "recall_{preset}"
    columns = ("T", "pairs", "n_embd", "mixer", "steps", "flops")
    estimated = " at most, going by results/recall_laptop.json; a run stops once it answers enough test queries right"
    per_gpu = 4  # small models leave most of a GPU idle
    sets = ("model", "block_size", "n_embd", "learning_rate", "seed", "out_dir", "resume")
    see = "--mixers, --Ts, --widths, --lrs, --seeds, --out"

    def plan(self):
        """The cells of the preset, as the command line changes it; the rates of a point follow one another."""
        import torch

        from experiments.recall import cell
        from inspection.counting import flops_per_token

        args = self.args
        preset = PRESETS[args.preset]
        first, *_ = preset.lengths.values()
        points = []
        for T in args.Ts or preset.lengths:
            points += product([T], args.widths or preset.widths, args.mixers or preset.lengths.get(T, first))
        rates = sorted(args.lrs or preset.lrs, reverse=True)
        cells = []
        flops = {}  # {point: FLOPs of a step}
        for point, seed, rate in product(points, args.seeds or preset.seeds, rates):
            T, width, mixer = point
            argv = [f"--model={mixer}", f"--block_size={T}", f"--n_embd={width}", f"--learning_rate={rate:g}",
                    f"--seed={seed}", *preset.args, *args.others]
            config = cell.load(argv)
            if point not in flops:
                with torch.device("meta"):
                    flops[point] = flops_per_token(cell.build_model(config, "meta"))["total"] * config.batch_tokens
            at = {"mixer": mixer, "T": T, "n_embd": width, "learning_rate": config.learning_rate, "seed": seed,
                  "pairs": config.pairs, "steps": config.max_iters, "flops": flops[point] * config.max_iters}
            name = f"{mixer}_T{T}_d{width}_lr{rate:g}_seed{seed}"
            cells.append(Cell(name, argv, at, SECONDS_PER_FLOP * at["flops"]))
        return cells

    def about(self):
        return {"preset": self.args.preset}


main = RecallSweep.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
