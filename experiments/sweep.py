"""Is my architecture better, by how much, and how sure can we be? Plan the runs, run them, report.

    python experiments/sweep.py duel longhorn mamba       two families, 1 to 2 hours on two cores: one sentence
    python experiments/sweep.py duel longhorn longhorn,llama             a pattern of layers is a family too
    python experiments/sweep.py laptop                    the paper's six families, 1 to 2 hours on two cores
    python experiments/sweep.py law                       seven families, five sizes, six budgets: days on two cores;
                                                          on GPUs 8M to the paper's 120M (law_gpu)
    python experiments/sweep.py paper --dry-run --gpus=8 --gpu=H100      the paper's 24 cells, planned on any machine
    python experiments/sweep.py report out/duel_longhorn_mamba           from the records alone

Stop it at any moment: the same command resumes. More seeds, sizes, budgets or families join the same folder, and
finished runs are not run again. --cluster=slurm and --cluster=ray run it on many machines. docs/experiments.md explains
the numbers of a preset.

A model of your own takes part once it has an entry in model.py's FAMILIES and a config/<model>_laptop.py. Settings of
one family's runs come after an @: `duel deltanet deltanet@step=implicit,normalize_keys=false`. NAME@WORD is the family
NAME under another name, with other seeds: `duel longhorn longhorn@again` should find no difference. Any other
--key=value goes to every run (`--wandb=offline`, `--dtype=float32`).
"""

import functools
import itertools
import json
import math
import os
import re
import shlex
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

import configurator  # noqa: E402
from common.errors import ConfigError  # noqa: E402
from configurator import Count  # noqa: E402
from experiments.compare import best_rate  # noqa: E402
from experiments.records import KINDS, check_packages, label_settings, read_run, stem  # noqa: E402
from experiments.sweeps import machine, runner  # noqa: E402
from experiments.sweeps.experiment import Experiment, Report, Run  # noqa: E402
from experiments.sweeps.runner import Cell  # noqa: E402
from runtime.records import BadRecord, fields, is_finished  # noqa: E402

FAMILIES = ("longhorn", "mamba", "llama", "gla", "retnet", "rwkv")  # the families in the paper's Table 1
SET_BY_THE_SWEEP = ("out_dir", "resume", "model", "pattern", "seed", "max_iters", "learning_rate", "warmup_iters",
                    "schedule", "min_lr", "branch", "keep_steps")
FIRST_SEED, LABELLED = 1001, 1000  # a search has seeds 1, 2 ...; NAME@WORD has seeds LABELLED higher than NAME's, so
# that its runs differ; NAME@key=value has NAME's seeds, so it sees the same tokens in the same order
EXTENSIONS = 3  # rates that a search may add beyond its edge


@dataclass(frozen=True)
class Size:
    """A size: what it changes in config/<family>_<config>.py, and its runs. Budgets are optimizer steps."""

    argv: tuple = ()
    steps: int = None  # the budget of every reported seed; None: the config's own schedule
    budgets: tuple = ()  # further budgets, for the curve of the multipliers; longer ones only for the first two seeds
    seeds: int = 1  # reported seeds
    search: int = 0  # seeds of the search for a rate; 0: the rate follows from earlier sizes, see rate_by_width
    rates: int = 4  # rates that a search begins with
    search_steps: int = None  # the budget of a search; None: half of `steps`
    times: float = 1.0  # factor on the rate that follows from earlier sizes
    mlp: dict = field(default_factory=dict)  # {family: mlp_multiple}, where rounding makes a family larger or smaller
    config: str = "laptop"


@dataclass(frozen=True)
class Preset:
    sizes: dict  # {label: Size}; a size with a search comes before those whose rate follows from it
    models: tuple = FAMILIES
    warmup: int = 0  # steps of every run, 5% of half the budget; the same for all, so that runs can branch
    rate_times_width: float = 0.36  # centre of the first size's learning-rate grid, times width
    args: tuple = ()  # for every run
    families: dict = field(default_factory=dict)  # {family: fields of its sizes that differ from `sizes`}
    one_by_one: bool = False  # one family and size after the other, no cosine; else seed by seed
    folder: str = ""  # name in out/, unless --out is given; "": scaling_<name>

    def size(self, model, label):
        """The Size of a family."""
        return replace(self.sizes[label], **self.families.get(stem(model), {}))


S = ("--n_layer=2", "--n_head=1", "--n_embd=64")
M = ("--n_layer=2", "--n_head=2", "--n_embd=128")
L = ("--n_layer=3", "--n_head=3", "--n_embd=192")
XL = ("--n_layer=4", "--n_head=4", "--n_embd=256")
# Runs are evaluated once, at the end, on windows as long as in training, and save a checkpoint every half minute.
LAPTOP = ("--eval_block_size=0", "--eval_interval=0", "--eval_tokens=131072", "--final_eval_tokens=131072",
          "--log_interval=32", "--checkpoint_interval=256", "--keep_checkpoints=1")
# Evaluated on all held-out text. Products in float32, which is five times as fast on a CPU without bfloat16 (Zen 3).
LAW_ARGS = (*LAPTOP, "--eval_tokens=0", "--final_eval_tokens=0", "--dtype=float32")
LAW_STEPS, LAW_OTHERS = 16384, (512, 1024, 2048, 4096, 8192)  # 1,024 steps read 1 MB
LAW = {
    "130K": Size(S, LAW_STEPS, LAW_OTHERS, seeds=2, search=2, search_steps=2048,
                 mlp={"llama": 212, "gla": 204, "rwkv": 248, "gated_deltanet": 208}),
    "460K": Size(M, LAW_STEPS, LAW_OTHERS, seeds=2, search=2, search_steps=2048),
    "1.5M": Size(L, LAW_STEPS, LAW_OTHERS, seeds=2, search=1, search_steps=1024, rates=3),
    "60K": Size(("--n_layer=2", "--n_head=1", "--n_embd=40"), LAW_STEPS, LAW_OTHERS, seeds=2,
                mlp={"llama": 144, "gla": 136, "rwkv": 176, "gated_deltanet": 140}),
    "250K": Size(("--n_layer=2", "--n_head=1", "--n_embd=96"), LAW_STEPS, LAW_OTHERS, seeds=2,
                 mlp={"llama": 304, "gla": 296, "rwkv": 352, "gated_deltanet": 300}),
}
LAW_FAMILIES = ("longhorn", "mamba", "llama", "gla", "rwkv", "retnet", "gated_deltanet")
# Ratios need the best families' shorter budgets; GLA and RetNet differ more from seed to seed.
OF_LAW = Preset(LAW, LAW_FAMILIES, warmup=51, args=LAW_ARGS, one_by_one=True, folder="scaling_law", families={
    **dict.fromkeys(("longhorn", "mamba"), {"budgets": (256, *LAW_OTHERS)}),
    **dict.fromkeys(("gla", "retnet"), {"seeds": 4})})


def rung(n_layer, width, millions, **search):
    """A size of the law on GPUs, with 20 to 200 tokens per parameter; search: fields of Size for its search, at 20."""
    argv = (f"--n_layer={n_layer}", f"--n_head={width // 64}", f"--n_embd={width}")
    steps = [round(tokens * millions * 1e6 / 2**19) for tokens in (20, 43, 93, 200)]
    return Size(argv, steps[-1], tuple(steps[:-1]), seeds=2, search_steps=steps[0], config="120m", **search)


PRESETS = {
    "duel": Preset(warmup=26, args=(*LAPTOP, "--eval_tokens=262144", "--final_eval_tokens=262144"), sizes={
        "460K": Size(M, 1024, (256, 512), seeds=16, search=4),
        "1.5M": Size(L, 1024, (256, 512), seeds=16, search=3)}),
    "laptop": Preset(warmup=26, args=LAPTOP, sizes={
        "460K": Size(M, 1024, (256, 512), seeds=5, search=2), "1.5M": Size(L, 1024, (256, 512), seeds=3)}),
    "law": OF_LAW,
    # `law` on GPUs: up to the paper's 120M
    "law_gpu": Preset(models=LAW_FAMILIES, warmup=30, rate_times_width=0.5, one_by_one=True, sizes={
        "8M": rung(7, 128, 8.0, search=2), "15M": rung(10, 192, 14.6, search=2),
        "30M": rung(10, 320, 29.4, search=1, rates=3), "60M": rung(10, 512, 59.3), "120M": rung(12, 768, 128.6)}, args=(
            "--eval_interval=0", "--eval_tokens=0", "--log_interval=20", "--keep_checkpoints=1")),
    # Run this after its losses were predicted: the first seed's runs to 28 MB, and a larger size.
    "law_predicted": replace(OF_LAW, models=("longhorn", "mamba", "llama"), families={}, sizes={
        "130K": replace(LAW["130K"], steps=28672, budgets=(), seeds=1),
        "460K": replace(LAW["460K"], steps=28672, budgets=(), seeds=1),
        "1.5M": replace(LAW["1.5M"], seeds=0),
        "3.5M": Size(XL, 28672, (16384,))}),
    # Two controls: at half the rate; and with four times the tokens per step.
    "law_half": replace(OF_LAW, models=("longhorn", "llama"), families={}, sizes={
        "460K": replace(LAW["460K"], seeds=0), "460K rate/2": Size(M, LAW_STEPS, LAW_OTHERS, times=0.5)}),
    "law_4096": Preset(models=("longhorn", "llama"), warmup=26, one_by_one=True, sizes={
        "460K": Size(M, 1024, (128, 256, 512), seeds=2, search=1, search_steps=1024, rates=3)}, args=(
            *LAW_ARGS, "--batch_tokens=4096", "--micro_batch_size=16")),
    "paper": Preset(sizes={
        "120M": Size(config="120m"), "350M": Size(config="350m"),
        "120M at 4096": Size(("--block_size=4096", "--micro_batch_size=8"), config="120m"),
        "350M at 4096": Size(("--block_size=4096", "--micro_batch_size=4"), config="350m")}),
}


# ----------------------------------------------------------------------------------------------------------------- plan

def load(argv):
    """The settings that `argv` gives train.py, with paths relative to the repository. They are cached, so do not change
    them."""
    paths = [str(REPO / a) if a.endswith(".py") and not a.startswith("--") else a for a in argv]
    return load_once(tuple(paths))


@functools.cache
def load_once(argv):
    from train import TrainConfig

    return configurator.load(TrainConfig, argv)


def config_file(model, config):
    return f"config/{re.split('[*,]', stem(model))[0]}_{config}.py"


def check_configs(preset):
    """Raises ConfigError with the names of all missing config files, of any family at any size."""
    from families import FAMILIES as known

    files = {}
    for model, size in itertools.product(preset.models, preset.sizes.values()):
        files[config_file(model, size.config)] = size.config
    missing = [name for name in files if not (REPO / name).exists()]
    if missing:
        one = files[missing[0]]
        known = sorted(name for name in known if (REPO / config_file(name, one)).exists())
        raise ConfigError(f"missing: {', '.join(missing)}; write each as config/longhorn_{one}.py, with its own "
                          f"model = NAME, or choose families of {', '.join(known)}")


def base_arguments(preset, model, size):
    """The arguments of every run of a family at a size: its config file, and what size, preset and family change in it.
    Raises ConfigError if there is no such file, or it sets another family.
    """
    s = preset.sizes[size]
    family = stem(model)
    name = config_file(model, s.config)
    argv = [name, *s.argv, *preset.args]
    if family in s.mlp:
        argv.append(f"--mlp_multiple={s.mlp[family]}")
    is_pattern = re.search("[*,]", family)
    if is_pattern:
        argv.append(f"--pattern={family}")
    argv += label_settings(model)
    config = load(argv)
    if not is_pattern and config.model != family:
        raise ConfigError(f"{name} sets model to {config.model}: write model = {family!r} there")
    return argv


def safe_name(text):
    """A text made safe as part of a path."""
    return re.sub(r"[^\w.@-]+", "_", text)


def make_cell(preset, stage, model, size, steps, rate, seed):
    """One Cell that is trained from scratch; steps None: by the config's own schedule and rate."""
    argv = base_arguments(preset, model, size)
    if steps:
        schedule = "cosine" if stage == "cosine" else "wsd"
        argv += [f"--schedule={schedule}", f"--warmup_iters={preset.warmup}", "--min_lr=0", f"--max_iters={steps}",
                 f"--learning_rate={rate:g}"]
    argv.append(f"--seed={seed}")
    config = load(argv)
    at = {"stage": stage, "model": model, "size": size, "context": config.block_size, "steps": config.max_iters,
          "learning_rate": config.learning_rate, "seed": seed, "from": 0}
    name = f"{model} {size} {config.max_iters}steps lr{config.learning_rate:g} seed{seed}"
    if stage == "cosine":
        name += " cosine"
    return Cell(safe_name(name), argv, at)


def seed_cells(preset, model, size, rate, seed, budgets, folder=REPO / "out"):
    """The runs of a seed at all budgets: the longest from scratch, or from a checkpoint in `folder`, and the others as
    its branches. Runs that have begun keep their arguments."""
    from train import decay_steps

    cells = [make_cell(preset, "seed", model, size, steps, rate, seed) for steps in sorted(budgets, reverse=True)]
    ends = {c.name: c.at["steps"] - decay_steps(load(c.argv)) for c in cells}  # where another budget can branch off
    plan = runner.read_plan(folder, new=True)["cells"]
    kept = kept_checkpoints(folder, plan, cells[0].at)
    for c in cells:
        if c.name in plan and (folder / c.name / "config.json").exists():
            c.at["from"] = plan[c.name].get("from", 0)
            keep = [] if is_finished(folder / c.name) else steps_to_keep(plan[c.name])
        else:
            base = max((step for step in kept if step <= ends[c.name]), default=0)
            keep = sorted(end for end in {*ends.values()} - kept.keys() if base < end <= ends[c.name])
            if keep:
                c.argv.append(f"--keep_steps={','.join(map(str, keep))}")
            if base:
                c.after = kept[base]
                c.at["from"] = base
                c.argv.append(f"--branch={os.path.relpath(folder, REPO)}/{c.after}@{base}")
        kept |= dict.fromkeys(keep, c.name)
    return cells


def steps_to_keep(cell):
    """The steps of --keep_steps in a cell of the plan."""
    return list(map(int, re.findall(r"\d+", runner.settings(cell["argv"]).get("keep_steps", ""))))


def kept_checkpoints(folder, plan, at):
    """{step: name of a finished cell that kept it}, for cells of the plan with the family, size, rate and seed of
    `at`."""
    from runtime.checkpoint import steps as steps_of

    same = {key: at[key] for key in ("stage", "model", "size", "learning_rate", "seed")}
    kept = {}
    for name, other in plan.items():
        if other.items() >= same.items() and is_finished(folder / name):
            kept |= dict.fromkeys(steps_of(folder / name).keys() & steps_to_keep(other), name)
    return kept


def seed_offset(model):
    return LABELLED if "@" in model and not label_settings(model) else 0


def reported_cells(preset, rates, folder=REPO / "out"):
    """All runs that are reported, at rates {(model, size): rate}: the first seed of everything, then the second ...

    The first family also gets one cosine per size, from scratch: does the schedule change the loss? If a preset is run
    one by one, all of a family's sizes, each with all its seeds, come before the next family.
    """
    sizes = list(preset.sizes)
    places = []
    for model, size in itertools.product(preset.models, sizes):
        if (model, size) in rates:
            places += [(model, size, i) for i in range(preset.size(model, size).seeds)]
    if not preset.one_by_one:
        places.sort(key=lambda place: (place[2], sizes.index(place[1])))
    cells = []
    for model, size, i in places:
        s = preset.size(model, size)
        rate = rates[model, size]
        seed = FIRST_SEED + i + seed_offset(model)
        if not s.steps:
            seed += load(base_arguments(preset, model, size)).seed - FIRST_SEED
            cells.append(make_cell(preset, "seed", model, size, None, None, seed))
            continue
        budgets = {s.steps}
        budgets.update(b for b in s.budgets if b < s.steps or i < 2)  # a shorter one is a branch
        cells += seed_cells(preset, model, size, rate, seed, budgets, folder)
        if i == 0 and model == preset.models[0] and not preset.one_by_one:
            cells.append(make_cell(preset, "cosine", model, size, s.steps, rate, seed))
    return cells


def three_digits(rate):
    return float(f"{rate:.3g}")


def first_rates(n, centre):
    """The n rates that a search begins with, a factor of 2 apart."""
    return [three_digits(centre * 2 ** (i - (n - 1) / 2)) for i in range(n)]


def line_of_rates(found):
    """The least-squares line of log rate on log width, with `slope`, `intercept` and `stderr` of the slope; found:
    {width: rate} of three widths or more."""
    from scipy.stats import linregress

    return linregress(list(map(math.log, found)), list(map(math.log, found.values())))


def rate_by_width(found, width):
    """The rate at a width, from the {width: rate} that searches found: on the line through three or more, else the last
    one scaled by 1 / width."""
    if len(found) < 3:
        last, rate = list(found.items())[-1]
        return rate * last / width
    line = line_of_rates(found)
    return math.exp(line.intercept + line.slope * math.log(width))


def search_cells(preset, model, size, rates):
    s = preset.size(model, size)
    seeds = [1 + i + seed_offset(model) for i in range(s.search)]
    return [make_cell(preset, "search", model, size, s.search_steps or max(2, s.steps // 2), rate, seed)
            for seed in seeds for rate in rates]


def searched(folder, cells):
    """The BestRate of a search, by the first half of the files. None if no run is usable, or while a result is missing,
    since it could change the choice."""
    losses = {}
    for cell in cells:
        try:
            loss = read_run(folder / cell.name, cell.at)["loss_of_choosing_files"]
        except BadRecord as reason:
            if "diverged" not in str(reason):
                return None
            loss = math.inf
        losses.setdefault(cell.at["learning_rate"], {})[cell.at["seed"]] = loss
    return best_rate(losses)


def search(preset, folder, size, grids, go):
    """{model: BestRate or None} at a size; grids {model: the rates to begin with} are extended beyond an edge if the
    best rate is there. Other rates that an earlier command tried do not count, so the choice is the same no matter how
    many times a search is stopped.
    """
    bests = {}
    while grids:
        cells = {model: search_cells(preset, model, size, grid) for model, grid in grids.items()}
        go(list(itertools.chain(*cells.values())))
        for model in cells:
            best = bests[model] = searched(folder, cells[model])
            if best and best.beyond and len(grids[model]) < preset.sizes[size].rates + EXTENSIONS:
                grids[model].append(three_digits(best.beyond))
            else:
                del grids[model]
    return bests


def find_rates(preset, folder, go, plan_only=False):
    """{(model, size): rate}; `go(cells)` runs what a search needs. A rate that reported seeds have used stays.
    plan_only: `go` runs nothing, and a search without a usable run takes its middle rate.
    """
    plan = runner.read_plan(folder, new=True)["cells"]
    with fields(f"{folder}: the plan's cells"):  # the plan may be another program's
        known = {(at["model"], at["size"]): at["learning_rate"] + 0 for at in plan.values() if at["stage"] == "seed"}
    rates = {}
    found = {model: {} for model in preset.models}  # until a search of the family finds none
    for size, s in preset.sizes.items():
        width = {model: load(base_arguments(preset, model, size)).n_embd for model in found}
        grids = {}
        for model, by_width in found.items():
            centre = preset.rate_times_width / width[model]
            if by_width:
                centre = s.times * rate_by_width(by_width, width[model])
            rates[model, size] = known.get((model, size), three_digits(centre))
            if s.search and (model, size) not in known:
                grids[model] = first_rates(s.rates, centre)
        for model, best in search(preset, folder, size, grids, go).items():
            if best:
                rates[model, size] = best.rate
            elif not plan_only:
                del rates[model, size], found[model]
        if s.search:
            for model, by_width in found.items():
                by_width[width[model]] = rates[model, size]
    return rates


BEYOND = ", and more where a search goes beyond its rates"


def vocabulary(dataset):
    """The vocab_size that train.py gives a model for `dataset`; 256, for bytes, if the dataset is not prepared yet."""
    from data.mixture import parse_mixture
    from data.prepared import find_dataset

    try:
        meta = json.loads((find_dataset(parse_mixture(dataset)[0][0]) / "meta.json").read_text())
        return -(-meta["vocab_size"] // 64) * 64
    except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: a run says so
        return 256


def seconds_per_token(config):
    """Seconds of training per token on one core of this machine: the fastest of three micro-batches."""
    import torch

    from model import LM
    from runtime.distributed import autocast, pick_dtype

    torch.set_num_threads(1)  # as many as a run has if each core has one
    device = torch.device("cpu")
    config.dtype = str(pick_dtype(config.dtype, device)).removeprefix("torch.")
    model = LM(config)
    x = torch.randint(config.vocab_size, (config.micro_batch_size, config.block_size))
    seconds = []
    for _ in range(3):  # the first also warms up, and another program may slow any of them down
        began = time.perf_counter()
        with autocast(config, device):
            model(x, x, loss_only=True)[1].backward()
        seconds.append(time.perf_counter() - began)
    return min(seconds) / x.numel()


def estimate(cells, timed=None):
    """Set parameters, embedding, tokens, flops and `seconds` of every cell; `seconds` estimates its share of the time
    left. Raises ConfigError if a config does not make a model.

    timed: {(family, size): seconds per token on this machine}, to which missing small models are added, since FLOPs do
    not show the cost of a loop over time. If None, `seconds` follow from FLOPs.
    """
    import torch

    import families  # noqa: F401
    from inspection.counting import cpu_seconds, flops_per_token, parameter_count
    from model import LM

    counted = {}  # (family, size): parameters, and FLOPs per token
    for c in cells:
        config = load(c.argv)
        key = c.at["model"], c.at["size"]
        if key not in counted:
            sizes = replace(config, vocab_size=config.vocab_size or vocabulary(config.dataset))
            try:
                sizes.check_pattern()
                with torch.device("meta"):
                    model = LM(sizes)
            except ValueError as error:
                raise ConfigError(f"{c.argv[0]}: {error}") from None
            counted[key] = parameter_count(model), flops_per_token(model)["total"]
            if timed is not None and key not in timed and counted[key][0]["total"] < 1e7:
                timed[key] = seconds_per_token(sizes)
        parameters, per_token = counted[key]
        trained = (config.max_iters - c.at["from"]) * config.batch_tokens
        c.at["parameters"] = parameters["total"]
        c.at["embedding"] = parameters["embedding"]
        c.at["tokens"] = config.max_iters * config.batch_tokens
        c.at["flops"] = per_token * trained
        c.seconds = machine.START_SECONDS + cpu_seconds(c.at["flops"], trained)
        if timed and key in timed:
            c.seconds = machine.START_SECONDS + timed[key] * trained


def whole_path(setting):
    """--dataset=FOLDER with an absolute path, since runs start in the repository's folder."""
    key, _, value = setting.partition("=")
    if key == "--dataset" and Path(value).is_dir():
        return f"{key}={Path(value).resolve()}"
    return setting


def check_data(cells, dry_run=False):
    """Open the data, so that a fault in it is reported once and early. If a run reads it more than four times, say how
    many times. dry_run: it need not be prepared."""
    from data.mixture import parse_mixture
    from data.prepared import Tokens, find_dataset

    configs = [load(c.argv) for c in cells]
    longest = max(config.max_iters * config.batch_tokens for config in configs)
    context = max(config.block_size for config in configs)
    vocabulary = min(config.vocab_size for config in configs) or None  # 0: the dataset's
    for dataset in {config.dataset for config in configs}:
        for name, share in parse_mixture(dataset):
            folder = find_dataset(name)
            if dry_run and not (folder / "meta.json").exists():
                print(f"the dataset {name} is not prepared here")
                continue
            tokens = len(Tokens(folder, vocabulary, context).train)
            if longest * share > 4 * tokens:
                print(f"{name} has {tokens:,} tokens to train on: the longest run reads each "
                      f"{float(longest * share / tokens):,.0f} times")


def check_settings(cells):
    """Raises ConfigError if train.py would, or if configs differ in what must not differ within a sweep."""
    from data.loader import windows_per_step
    from train import check

    first = {}  # setting: (family, value)
    for c in cells:
        config = load(c.argv)
        check(config)
        windows_per_step(config.batch_tokens, config.block_size)
        shared = {}
        if c.at["stage"] != "cosine":
            shared = {key: getattr(config, key, None) for key in KINDS["scaling"].same}
        shared[f"eval_block_size at {c.at['size']}"] = config.eval_block_size or config.block_size
        for key, value in shared.items():
            other, known = first.setdefault(key, (c.at["model"], value))
            if value != known:
                raise ConfigError(f"{key} is {known} in {other}'s config and {value} in {c.at['model']}'s: such runs "
                                  f"are not compared; give --{key.split()[0]}=... for all, or change a config")


def sizes_of(text, known, check_set):
    """{label: arguments} of LABEL:key=value,key=value; {label: None} for known labels, joined by commas. Raises
    ConfigError, also if check_set(arguments) does."""
    label, colon, changes = text.partition(":")
    argv = tuple(f"--{change}" for change in changes.split(","))
    if not colon and known.keys() >= {*text.split(",")}:
        return dict.fromkeys(text.split(","))
    if not colon or label in known or not re.fullmatch(r"[\w.-]+", label) or not all("=" in a for a in argv):
        raise ConfigError(f"--sizes={text}: there are {', '.join(known)}; give one of them, or another label with its "
                          "settings, as in --sizes=250K:n_layer=2,n_embd=96")
    check_set(argv)
    return {label: argv}


# --------------------------------------------------------------------------------------------------------- command line

@dataclass
class SweepRun(Run):
    models: list[str] = ()  # families or patterns (the preset's; for duel, two are needed)
    sizes: list[str] = ()  # labels of the preset, joined by commas; SIZE for config/FAMILY_SIZE.py; or a new size as
    # LABEL:key=value,key=value; each new size needs its own --sizes, and has the runs of the preset's first size
    steps: Count = None  # the budget of every seed, in optimizer steps
    budgets: tuple[Count, ...] = ()  # further budgets; longer ones only for the first two seeds
    seeds: Count = None  # number of reported seeds, at every size
    search: Count = None  # seeds of the search for a learning rate, at every size
    nproc: Count = None  # processes per run (1; paper: one per GPU)
    gpu: str = ""  # with --dry-run: plan for such GPUs, which need not be here (H100, A100-40GB, RTX 4090 ...)
    gpus: Count = 8  # how many of them
    style: Path = None  # FILE.mplstyle for the figures, applied over ours

    ARGUMENTS = ("models",)
    OTHERS = "any other --key=value is train.py's and goes to every run"


@dataclass
class SweepReport(Report):
    out: Path = None  # where to write (the sweep's folder, or out/<name>_report)
    save: bool = False  # write the sweep to results/<name>.json, page and figures to results/<name>/
    style: Path = None  # FILE.mplstyle for the figures, applied over ours


class Sweep(Experiment):
    script = "experiments/sweep.py"
    settings = dict.fromkeys(PRESETS, SweepRun) | {"report": SweepReport}
    columns = ("model", "size", "context", "parameters", "tokens", "stage", "learning_rate")
    estimated = f" on cores of an AMD EPYC (Zen 4){BEYOND}"
    too_long = "this takes years here; a plan for GPUs: --dry-run --gpus=8 --gpu=H100"
    sets = SET_BY_THE_SWEEP
    timed = None  # {(family, size): seconds per token}, where runs go to this machine's CPU
    see = "FAMILY, --seeds, --steps, --budgets, --out"

    def run(self):
        args = self.args
        if (args.gpu or "gpus" in args.overrides) and not (args.gpu and args.dry_run):
            raise ConfigError("--gpus and --gpu plan for GPUs that need not be here: give --gpu=NAME and --dry-run")
        gpus = args.gpus if args.gpu else len(runner.visible_gpus())
        if args.command == "law" and gpus and (args.gpu or not args.cluster):
            args.command = "law_gpu"
        self.preset = self.chosen()
        if not (gpus or args.cluster):
            self.timed = {}
        self.nproc = args.nproc or 1
        if args.command == "paper" and not args.nproc:
            self.nproc = max(1, min(gpus, machine.PER_NODE) if args.cluster else gpus)  # a cluster gives a run one node
        return super().run()

    def place(self):
        args = self.args
        name = self.preset.folder or f"scaling_{args.command}"
        if args.command == "duel":
            name = f"duel_{safe_name('_'.join(args.models))}"
        return args.out or REPO / "out" / name

    def plan(self):
        before = runner.read_plan(self.folder, new=True)  # one warmup per sweep, so that its runs can be compared
        self.preset = replace(self.preset, warmup=before.get("warmup", self.preset.warmup))
        searches = []
        rates = find_rates(self.preset, self.folder, searches.extend, plan_only=True)
        expected = [*searches, *reported_cells(self.preset, rates, self.folder)]
        expected = list({c.name: c for c in expected}.values())
        check_settings(expected)
        check_data(expected, self.args.dry_run)
        self.check_sizes(before)
        estimate(expected, self.timed)
        return expected

    def sizes(self):
        """{label: settings} of the chosen sizes."""
        return {label: [*size.argv] for label, size in self.preset.sizes.items()}

    def check_sizes(self, before):
        """Raises ConfigError if an earlier command used a label for another size."""
        known = before.get("sizes", {})
        for label, argv in self.sizes().items():
            if known.get(label, argv) != argv:
                raise ConfigError(f"{self.folder} has a size {label} of {' '.join(known[label])}: choose another label "
                                  "or --out")

    def about(self):
        args = self.args
        before = runner.read_plan(self.folder, new=True)
        command = shlex.join(["python", self.script, *sys.argv[1:]])
        is_paper = args.command == "paper" and not (args.steps or args.sizes or args.others)
        return {"preset": args.command, "paper": is_paper and before.get("paper", True), "warmup": self.preset.warmup,
                "models": [*self.preset.models], "sizes": self.sizes(), "commands": [command]}

    def work(self, planned):
        preset = self.preset
        families = [(model,) for model in preset.models] if preset.one_by_one else [preset.models]
        for models in families:  # each group is searched and reported before the next begins
            part = replace(preset, models=models)
            self.go(reported_cells(part, find_rates(part, self.folder, self.go), self.folder))

    def go(self, cells):
        estimate(cells, self.timed)
        super().go(cells)

    def report(self, folder, out=None):
        check_packages()  # before report.py imports them
        from experiments import report

        return report.write(folder, out, accept_code=self.args.accept_code, save_it=getattr(self.args, "save", False),
                            style=self.args.style)

    def say_plan(self, cells, jobs, where):
        if self.args.gpu:
            configs = [load(c.argv) for c in cells]
            machine.say_plan(cells, configs, self.args.gpu, self.args.gpus, self.nproc, self.preset.one_by_one)
            if self.args.cluster:
                if self.nproc > machine.PER_NODE:
                    raise ConfigError(f"--nproc={self.nproc} --cluster={self.args.cluster}: a run is a job on one "
                                      f"node: choose --nproc={machine.PER_NODE}, or leave out --cluster")
                print(f"{self.args.cluster}: a run is a job on one node, with --nproc={self.nproc} and its GPUs in "
                      f"--cluster_args (slurm: gpus={self.nproc}; ray: num_gpus={self.nproc})")
            return
        if self.timed:
            rates = [f"{model} {size} {1 / seconds:,.0f}" for (model, size), seconds in self.timed.items()]
            are_timed = self.timed.keys() >= {(c.at["model"], c.at["size"]) for c in cells}
            self.estimated = f"{BEYOND if are_timed else Sweep.estimated}; tokens/s, timed here: {', '.join(rates)}"
        super().say_plan(cells, jobs, where)

    def say_commands(self, cells):
        """For the preset paper, print the commands of all cells, for the GPUs of a run."""
        if not cells or self.args.command != "paper" or self.args.cluster:
            return super().say_commands(cells)
        nproc = self.nproc if self.args.gpu else self.args.gpus
        for c in cells:
            print(machine.torchrun(nproc), shlex.join(c.command(self.folder)[1:]))
        if self.args.gpus > nproc and len(cells) > 1:
            print("side by side, each run needs its own GPUs (CUDA_VISIBLE_DEVICES): on that machine, this command "
                  "without --dry-run, --gpu and --gpus assigns them")

    def chosen(self):
        """The preset as the command line changes it. Raises ConfigError."""
        args = self.args
        preset = PRESETS[args.command]
        if args.command == "duel" and len(args.models) < 2:
            raise ConfigError("duel: give two families, as in: duel longhorn mamba")
        models = args.models or preset.models
        self.check_models(models)
        changes = {key: getattr(args, key) for key in ("seeds", "steps", "budgets", "search") if getattr(args, key)}
        given = list(map(whole_path, args.others))
        if not next(iter(preset.sizes.values())).steps:
            if args.budgets or args.search:
                raise ConfigError(f"{args.command}: runs have the schedule and rate of their configs: leave out "
                                  "--budgets and --search, or choose another preset")
            if args.steps:
                given.append(f"--max_iters={changes.pop('steps')}")
        elif args.steps:
            changes["search_steps"] = None
        sizes = {}
        for label, size in self.chosen_sizes(preset, models).items():
            for key in runner.settings(size.argv, ("micro_batch_size",)).keys() & runner.settings(given):
                raise ConfigError(f"--{key}: {label} sets it: choose other --sizes")
            sizes[label] = replace(size, **changes)
        families = {}  # the command line's settings are for all
        for family, changed in preset.families.items():
            families[family] = {key: value for key, value in changed.items() if key not in changes}
        preset = replace(preset, sizes=sizes, models=models, families=families, args=(*preset.args, *given))
        check_configs(preset)
        return preset

    def check_models(self, models):
        """Raises ConfigError for a config file, settings that the sweep sets, and two families with the same seeds."""
        for model in models:
            self.check_set(label_settings(model))
            if model.endswith(".py"):
                raise ConfigError(f"{model}: name a family here, and config/FAMILY_SIZE.py by --sizes=SIZE")
        with_other_seeds = [stem(model) for model in models if seed_offset(model)]
        for family in with_other_seeds:
            if with_other_seeds.count(family) > 1:
                raise ConfigError(f"{family}@WORD twice: both would have the same seeds")

    def chosen_sizes(self, preset, models):
        """{label: Size} of --sizes, with the preset's runs. Raises ConfigError."""
        first = next(iter(preset.sizes.values()))
        known = dict(preset.sizes)
        for path in sorted(REPO.glob(config_file(models[0], "*"))):
            label = path.stem.removeprefix(Path(config_file(models[0], "")).stem)
            known.setdefault(label, replace(first, argv=(), config=label))
        sizes = {}
        for text in self.args.sizes or [",".join(preset.sizes)]:
            for label, argv in sizes_of(text, known, self.check_set).items():
                if argv:
                    known[label] = replace(first, argv=argv)
                sizes[label] = known[label]
        label, size = next(iter(sizes.items()))
        if not size.search:  # its rate would follow from a size that was not chosen
            sizes[label] = replace(size, search=first.search, search_steps=first.search_steps)
        return sizes


main = Sweep.main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
