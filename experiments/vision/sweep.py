"""Images: ViL against Vision Mamba and a ViT at equal parameters, by seed, depth and direction; the paper's Table 3.

    python experiments/vision/sweep.py run                  scikit-learn's digits: 27 runs, two hours of one CPU core
    python experiments/vision/sweep.py run --seeds=4,5      more seeds; they add to the same folder
    python experiments/vision/sweep.py report out/vision_digits       pages and figure, from the records alone
    python experiments/vision/sweep.py run --config=cifar   config/{vil,vim,vit}_cifar.py, on a GPU; tiny: ImageNet's

Any other --key=value goes to every run. Stop it at any moment: the same command resumes. The control `forward` has its
class token in the middle and reads no further: if the reverse scan did not run, `separate` would score the same.
"""

import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

import configurator  # noqa: E402
from configurator import Whole  # noqa: E402
from experiments.records import KINDS  # noqa: E402
from experiments.sweeps import runner  # noqa: E402
from experiments.sweeps.experiment import Experiment, Report, Run  # noqa: E402
from experiments.sweeps.runner import Cell  # noqa: E402
from experiments.vision import report  # noqa: E402
from experiments.vision.report import variant_of  # noqa: E402


def load(argv):
    """The VisionConfig of a cell's arguments."""
    from experiments.vision.classify import VisionConfig

    return configurator.load(VisionConfig, [str(REPO / argv[0]), *argv[1:]])


def cells_of(config, seeds, extra=()):
    """[Cell]: ViL in three directions, ViM, ViT; then ViL at a half and a quarter of the depth, in two directions."""
    vil, *others = (f"config/{family}_{config}.py" for family in ("vil", "vim", "vit"))
    deep = load([vil, *extra]).n_layer
    variants = [[vil, f"--directions={way}", f"--n_layer={deep}"] for way in ("separate", "shared", "forward")]
    variants += [[file, "--directions=separate"] for file in others if (REPO / file).exists()]
    variants += [[vil, f"--directions={way}", f"--n_layer={deep // part}"]
                 for part in (2, 4) for way in ("separate", "forward")]
    cells = []
    for seed, variant in product(seeds, variants):
        argv = [*variant, f"--seed={seed}", *extra]
        c = load(argv)
        at = {key: getattr(c, key) for key in KINDS["images"].place}
        seconds = 96.0 * c.n_layer if config == "digits" else 0.0  # unknown for the others, which are for a GPU
        cells.append(Cell(f"{c.model}_{c.directions}_{c.n_layer}layers_seed{seed}", argv, at, seconds))
    return cells


def speed(cells):
    """{variant: images per second} of forward and backward on a micro-batch: the median over rounds of all variants. A
    CPU uses one thread."""
    import torch

    from bench.measure import Cpu, Gpu, Pass, time_contenders
    from experiments.vision.classify import build_model

    device = Gpu() if torch.cuda.is_available() else Cpu()
    torch.set_num_threads(1)
    contenders = {}
    for cell in cells:
        config = load(cell.argv)
        config.vocab_size = 10

        def make(config=config):
            model = build_model(config, device.name)
            x = torch.randn(config.micro_batch_size, config.channels, *[config.image_size] * 2, device=device.name)
            y = torch.arange(len(x), device=device.name) % config.vocab_size
            return Pass(lambda: model(x, y, loss_only=True)[1], [*model.parameters()], None)

        contenders[variant_of(cell.at)] = make
    rows = time_contenders(contenders, device)
    return {row["contender"]: round(config.micro_batch_size / row["forward_backward"]["median_seconds"])
            for row in rows if "reason" not in row}


# -------------------------------------------------------------------------------------------------------- command line

@dataclass
class ImageRun(Run):
    config: Literal["digits", "cifar", "tiny"] = "digits"  # config/*_CONFIG.py
    seeds: tuple[Whole, ...] = (1, 2, 3)  # seeds of every model


class ImageSweep(Experiment):
    script = "experiments/vision/sweep.py"
    settings = {"run": ImageRun, "report": Report}
    program = "experiments/vision/classify.py"
    write = staticmethod(report.write)
    name = "vision_{config}"
    columns = ("model", "directions", "n_layer")
    sets = ("model", "directions", "n_layer", "seed", "out_dir", "resume")
    see = "--config, --seeds, --out"

    def plan(self):
        return cells_of(self.args.config, self.args.seeds, self.args.others)

    def finish(self):
        runner.write_plan(self.folder, self.cells, speed=speed(self.cells))
        super().finish()


main = ImageSweep.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
