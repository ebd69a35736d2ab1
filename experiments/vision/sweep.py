"""Images: ViL beside Vision Mamba and a ViT at equal parameters, by seed, depth and direction; the paper's Table 3.

    python experiments/vision/sweep.py run                  scikit-learn's digits: 27 runs, two hours of one CPU core
    python experiments/vision/sweep.py run --seeds=4,5      more seeds; they add to the same folder
    python experiments/vision/sweep.py report out/vision_digits       pages and figure, from the records alone
    python experiments/vision/sweep.py run --config=cifar   config/{vil,vim,vit}_cifar.py, on a GPU; tiny: ImageNet's

Any other --key=value goes to every run. Stop it at any moment: the same command resumes. The control `forward` has its
class token in the middle and reads no further: where the reverse scan did not run, `separate` would score as it does.
"""

import statistics
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from configurator import Whole  # noqa: E402
from experiments.records import KINDS  # noqa: E402
from experiments.sweeps import runner  # noqa: E402
from experiments.sweeps.experiment import Experiment, Report, Run  # noqa: E402
from experiments.sweeps.runner import Cell  # noqa: E402
from experiments.vision import report  # noqa: E402
from experiments.vision.report import variant_of  # noqa: E402


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
            at = {key: getattr(c, key) for key in KINDS["images"].place}
            cells.append(Cell(f"{c.model}_{way}_{c.n_layer}layers_seed{seed}", argv, at, 96.0 * c.n_layer))
    return cells


def speed(cells, rounds=7):
    """{variant: images per second} of forward and backward of a micro-batch, the variants in turn; the median, by CPU
    time of one thread, which other processes of the machine disturb least, or on a GPU by the clock."""
    import torch

    import configurator
    from experiments.vision.classify import VisionConfig, build_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    models = {}
    for name, cell in {variant_of(c.at): c for c in cells}.items():
        config = configurator.load(VisionConfig, cell.argv)
        config.vocab_size = 10
        models[name] = build_model(config, device)
    x = torch.randn(config.micro_batch_size, config.channels, config.image_size, config.image_size, device=device)
    y = torch.arange(len(x), device=device) % 10
    seconds = {name: [] for name in models}
    for _ in range(rounds + 1):  # the first is a warmup
        for name, model in models.items():
            began = clock()
            model(x, y, loss_only=True)[1].backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[name].append(clock() - began)
    torch.set_num_threads(threads)
    return {name: round(len(x) / statistics.median(taken[1:])) for name, taken in seconds.items()}


# -------------------------------------------------------------------------------------------------------- command line

@dataclass
class ImageRun(Run):
    config: Literal["digits", "cifar", "tiny"] = "digits"  # config/*_CONFIG.py
    seeds: tuple[Whole, ...] = (1, 2, 3)  # of every model


class ImageSweep(Experiment):
    script = "experiments/vision/sweep.py"
    settings = {"run": ImageRun, "report": Report}
    program = "experiments/vision/classify.py"
    name = "vision_{config}"
    columns = ("model", "directions", "n_layer")
    sets = ("model", "directions", "n_layer", "seed", "out_dir", "resume")
    see = "--config, --seeds, --out"

    def plan(self):
        return cells_of(self.args.config, self.args.seeds, self.args.others)

    def finish(self):
        runner.write_plan(self.folder, self.cells, speed=speed(self.cells))
        super().finish()

    def report(self, folder, out=None):
        return report.write(folder, out, self.args.accept_code)


main = ImageSweep.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
