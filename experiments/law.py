"""The law of a sweep: the first family's tokens and compute relative to the others', predicted losses, and constants.

    python experiments/law.py out/scaling_law --predict=results/law/predictions.json     before `sweep.py law_predicted`
    python experiments/law.py out/scaling_law --out=results/law/report                   page, figure, points.csv
    python experiments/law.py results/law/report.json longhorn llama                     from the records alone

The page can be written while a sweep is running: it covers the families with three or more complete sizes, and says
what is missing. It reads predictions.json, and simulation.json of experiments/law_simulation.py, if they are beside it.
experiments/fit.py explains the method.
"""

import functools
import itertools
import math
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import configurator  # noqa: E402
from common import errors  # noqa: E402
from common.errors import ConfigError  # noqa: E402
from configurator import Count, Positive  # noqa: E402
from experiments import compare, fit, pages, records, sweep  # noqa: E402
from experiments.figures import Curve, Panel, name_of  # noqa: E402
from experiments.fit import MB, CannotFit, Family  # noqa: E402
from experiments.pages import human, listed, table  # noqa: E402
from experiments.sweeps.experiment import say_written  # noqa: E402
from runtime.records import environment, fields, read_json, write_json  # noqa: E402

HALF = " rate/2"  # ends the label of a size that trains at half its rate
UNITS = ("tokens read, flops of training, seconds, parameters with those of the embedding, val_loss in nats per token "
         "on all held-out files, loss_of_choosing_files on the first half of them, threads of a run's last start")
A_RUN = ("one run, to the bit: at its commit, on its CPU model and with OMP_NUM_THREADS as in points.csv, type the "
         "command in its config.json")
RATIO = "{:.2f} ({:.2f} .. {:.2f})"
UNKNOWN = "cannot be told"
RATIOS = """\
How many times another family's tokens the first needs for the other's loss at a budget, read off a cubic in log D per
size."""
PREDICTIONS = """\
Losses in nats per token, each of one run and predicted before it began. off: measured relative to predicted. by a
power: by a power law through the two largest sizes or, if the size was trained, through its two largest budgets."""
PREDICTED = {"run": "{name} {size}", "tokens": "{D}", "predicted, 90%": "{loss:.4f} ({low:.4f} .. {high:.4f})",
             "either way": "{half:.1%}", "measured": "{measured:.4f}", "inside": "{inside}", "off": "{off:+.2%}",
             "by a power": "{power:.4f}", "that off": "{power_off:+.2%}"}
CONSTANTS = """\
L = E + (A / N^alpha + B / (D - D0)^beta)^gamma and N_opt ~ C^a, over three forms of the law with equal weight. compute:
how many times the other's FLOPs the first family needs for the loss of the other's largest run; per C: the factor by
which that changes when the FLOPs double."""
COVERAGE = """\
How many of the 90% intervals held the truth in simulated sweeps, by the form of the true law (`{}`). In brackets: half
the mean width of an interval, in log L, in log2 of a ratio, or in the constant itself."""


def rate_costs(searches, rates, widths):
    """The mean cost in log L of errors in the learning rates, (widths,).

    A rate whose logarithm is off by e costs c e^2. The searches give c and the variance of e (see
    compare.rate_variance). With three or more searches, the variance is at least that of their rates around the line in
    log width that sets the rates of the other sizes.

    Args:
        searches: {width: {rate: {seed: loss}}}; rates: {width: the rate that was chosen}, of the searched widths.
    """
    curvatures = []
    variances = []
    for search in searches.values():
        found = compare.look_at_search(search, None)
        if found:
            best = min(np.mean(list(losses.values())) for losses in search.values())
            curvatures.append(found.curvature / best)
            variances.append(found.variance)
    if not curvatures:
        return np.zeros(len(widths))
    variance = np.mean(variances)
    leverage = np.ones(len(widths))
    if len(rates) > 2:
        x = np.log(list(rates))
        squares = len(x) * x.var()
        variance = max(variance, sweep.line_of_rates(rates).stderr ** 2 * squares)
        leverage = np.maximum(1, 1 / len(x) + (np.log(widths) - x.mean()) ** 2 / squares)
    return np.mean(curvatures) * variance * leverage


def reported(runs):
    """The runs of reported seeds, without those left out."""
    return runs[(runs.stage == "seed") & (runs.left_out == "")].astype({"seed": int, "tokens": float})


def family_of(runs, model, with_embedding=False):
    """The Family of a model's runs. A budget counts if it has two or more seeds, a size if it has all seeds at the full
    number of budgets. None if no budget counts. with_embedding: N includes the embedding's parameters."""
    runs = runs[runs.model == model]
    of_seeds = reported(runs)
    of_seeds = of_seeds[of_seeds.groupby(["size", "tokens"]).seed.transform("nunique") > 1]
    if of_seeds.empty:
        return None
    of_seeds = of_seeds.assign(budget=of_seeds.groupby("size").tokens.rank("dense"))
    losses = of_seeds.pivot_table("val_loss", "size", ["seed", "budget"], dropna=False).dropna()
    about = of_seeds.groupby("size").first().loc[losses.index].sort_values("parameters")
    searches = {}
    for width, of_width in runs[runs.stage == "search"].groupby("n_embd"):
        searches[width] = records.search_of(of_width)
    searched = about[about.n_embd.isin(list(searches))]
    rates = dict(zip(searched.n_embd, searched.learning_rate, strict=True))
    costs = rate_costs(searches, rates, about.n_embd.to_numpy(float))
    N = about.parameters - (0 if with_embedding else about.embedding)
    flops = about.flops / about.tokens
    D = of_seeds.pivot_table("tokens", "size", "budget").loc[about.index]
    shape = len(about), *losses.columns.levshape  # sizes, seeds, budgets
    log_L = np.log(losses.loc[about.index].to_numpy(float)).reshape(shape).swapaxes(0, 1)
    return Family(list(about.index), N.to_numpy(float), flops.to_numpy(float), D.to_numpy(float), log_L, costs)


def models_of(runs, named):
    """The named models, or all of the sweep. Raises ConfigError for a model that the sweep lacks."""
    known = list(runs.attrs.get("models") or runs.model.unique())
    for model in named:
        if model not in known:
            raise ConfigError(f"{model} is not in this sweep of {', '.join(known)}")
    return list(named) or known


def families_of(runs, models=(), least=MB, with_embedding=False):
    """({model: Family} of the models with enough runs from `least` tokens on to fit a law, [what each model lacks])."""
    seeds = runs[runs.stage == "seed"].groupby("size").seed.nunique()
    expected = [size for size in runs.attrs.get("sizes", ()) if seeds.get(size) != 1]  # 1: a prediction or control
    families = {}
    missing = []
    for model in models or runs.model.unique():
        family = family_of(runs, model, with_embedding)
        lacks = [size for size in expected if not family or size not in family.sizes]
        said = [f"{', '.join(lacks)} not complete"] if lacks else []
        try:
            fit.check_design(*fit.grid(fit.since(family, least)) if family else ((), ()))
            families[model] = family
            if not family.rate_cost.any():
                said.append("its intervals lack the error of its rates, which no search shows")
        except CannotFit as why:
            said.append(f"not fitted: {why}")
        if said:
            missing.append(f"{name_of(model)}: {'; '.join(said)}")
    return families, missing


# ---------------------------------------------------------------------------------------------------------- predictions

def to_predict(families):
    """A row for each run of `sweep.py law_predicted` that continues a complete size, or has a larger one."""
    preset = sweep.PRESETS["law_predicted"]
    models = [model for model in preset.models if model in families]
    cells = sweep.reported_cells(preset, dict.fromkeys(itertools.product(models, preset.sizes), 1.0))
    sweep.estimate(cells)
    rows = []
    for at in (cell.at for cell in cells):
        family = families[at["model"]]
        known = dict(zip(family.sizes, family.N.tolist(), strict=True))
        N = known.get(at["size"], float(at["parameters"] - at["embedding"]))
        is_larger = N > max(known.values())
        if at["size"] in known or is_larger:
            place = {key: at[key] for key in ("model", "size", "tokens")}
            rows.append({**place, "is_larger": is_larger, "N": N})
    return rows


def predict(path, families, least, draws):
    """Predict the losses of `sweep.py law_predicted` and write them to a file. Raises ConfigError if it exists."""
    if path.exists():
        raise ConfigError(f"--predict={path}: these predictions are final: name another file for other families")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = to_predict(families)
    if not rows:
        raise ConfigError("--predict: `sweep.py law_predicted` has no larger size, and continues no complete one")
    targets = {}
    for row in rows:
        targets.setdefault(row["model"], []).append((row["N"], row["tokens"]))
    found = fit.analyse(families, targets, least, draws)
    for row in rows:
        low, loss, high = np.exp(found["{model} {N:.0f} {tokens:.0f}".format(**row)]).tolist()
        by_power = math.exp(fit.power(families[row["model"]], row["N"], row["tokens"]))
        row |= {"low": low, "loss": loss, "high": high, "power": by_power}
        print("{model} {size} {tokens:,}: {loss:.4f} ({low:.4f} .. {high:.4f}), by a power {power:.4f}".format(**row))
    time = datetime.now(timezone.utc).isoformat(timespec="seconds")
    write_json(path, {"commit": environment()["commit"], "time": time, "predictions": rows})


def measured(runs, folder):
    """The predictions in a folder as rows, with what was measured by runs that began later."""
    rows = []
    for path in sorted(folder.glob("predictions*.json")):
        record = read_json(path)
        with fields(f"{path}: the predictions"):
            rows += [beside_its_run(row, record["time"], runs) for row in record["predictions"]]
    return rows


def beside_its_run(row, time, runs):
    """A prediction made at a time, with the outcome of its run."""
    import pandas  # imported late, so that main can say what to install

    row |= {"name": name_of(row["model"]), "D": human(row["tokens"]), "half": (row["high"] / row["low"]) ** 0.5 - 1}
    run = runs[(runs.model == row["model"]) & (runs["size"] == row["size"]) & (runs.tokens == row["tokens"])]
    began = pandas.to_datetime(run.time, utc=True, errors="coerce").min()
    if len(run) and not began > pandas.Timestamp(time):
        row["inside"] = "its run began before"
    elif len(run):
        loss = run.val_loss.iloc[0]
        row |= {"measured": loss, "inside": "yes" if row["low"] <= loss <= row["high"] else "no",
                "off": loss / row["loss"] - 1, "power_off": loss / row["power"] - 1}
    return row


def verdict(rows, words):
    """A sentence: how many of a group of predictions held; two thirds have to lie in their intervals."""
    known = [row for row in rows if "measured" in row]
    inside = sum(row["inside"] == "yes" for row in known)
    needed = math.ceil(len(rows) * 2 / 3)
    result = "not decided yet"
    if inside >= needed:
        result = "it passes"
    elif inside + len(rows) - len(known) < needed:
        result = "it fails"
    text = (f"Of {len(rows)} predicted losses {words} {len(known)} were measured, and {inside} lie in their 90% "
            f"intervals ({needed} are needed: {result})")
    if known:
        law, power = (np.mean([abs(row[key]) for row in known]) for key in ("off", "power_off"))
        text += f"; the law is off by {law:.2%} on average, a power law through the two largest by {power:.2%}"
    return f"{text}."


# ------------------------------------------------------------------------------------------------------------- the page

def in_words(interval, template=RATIO, of=float):
    """An interval in words, `of` applied to each value; UNKNOWN unless all are finite."""
    if interval is None or not np.isfinite(interval).all():
        return UNKNOWN
    low, middle, high = map(of, interval)
    return template.format(middle, low, high)


def trend(interval, per):
    """What a slope of log2 per doubling means, in percent."""
    words = in_words(interval, "{:+.1f}% ({:+.1f} .. {:+.1f}) per doubling", lambda x: 100 * (2**x - 1))
    if words == UNKNOWN or interval[0] <= 0 <= interval[2]:
        return f"whether this ratio falls or rises with {per} {UNKNOWN}" + f": {words}" * (words != UNKNOWN)
    return f"this ratio {'falls' if interval[2] < 0 else 'rises'} with {per}, {words}"


def sentence_of_tokens(found, families, least, other):
    """A sentence: the first family's tokens over another's, in the middle of the sizes and budgets of both."""
    first, *_ = families
    sizes = fit.common_sizes(families[first], families[other])
    if len(sizes) < 2:
        return f"{name_of(first)} and {name_of(other)} cannot be compared at equal size: they lack two common sizes."
    size = sizes[len(sizes) // 2]
    (D,) = fit.since(fit.of_sizes(families[other], [size]), least).D
    tokens = D[len(D) // 2]
    ratio = in_words(found[f"{other} tokens {size} {tokens:.0f}"], of=np.exp2)
    return (f"{name_of(first)} needs {ratio} times {name_of(other)}'s tokens at {size} and {human(tokens)} tokens; at "
            f"fixed size {trend(found[f'{other} per D'], 'the tokens')}; at fixed tokens "
            f"{trend(found[f'{other} per N'], 'the size')}.")


def sentence_of_compute(found, families, other):
    """A sentence: the first family's compute over another's on the frontier."""
    first, *_ = families
    b = families[other]
    largest = f"{name_of(other)} {b.sizes[-1]} after {human(b.D[-1, -1])} tokens"
    *_, last = (middle for key, (_, middle, _) in found.items() if key.startswith(f"{other} frontier "))
    off = math.exp(b.log_L[:, -1, -1].mean() - last) - 1  # below 0 if the run is better than the law's frontier
    return (f"On the frontier {name_of(first)} needs {in_words(found[f'{other} compute'], of=np.exp2)} times "
            f"{name_of(other)}'s FLOPs for the loss of {largest}; {trend(found[f'{other} per C'], 'the compute')}. "
            f"That run's own loss is {abs(off):.1%} {'below' if off < 0 else 'above'} the frontier.")


def sentence_of_constants(found, model):
    """A sentence: the constants of a family."""
    low, _, high = found[f"{model} E"]
    floor = f"{low:.2f} .. {high:.2f}" if low > 0.01 else f"{UNKNOWN} from 0 (at most {high:.2f})"
    return f"{name_of(model)}: alpha {in_words(found[f'{model} alpha'])}, a {in_words(found[f'{model} a'])}, E {floor}."


def at_half_rate(runs, families, draws):
    """Sentences: how does the ratio of tokens change at half the learning rates? From one seed, with the families'
    noise."""
    first, *others = families
    rng = np.random.default_rng(0)
    runs = reported(runs)
    halves = [size for size in runs["size"].unique() if size.endswith(HALF)]
    sentences = []
    for half, other in itertools.product(halves, others):
        if other not in set(runs.model[runs["size"] == half]):
            continue
        size = half.removesuffix(HALF)
        of_seed = runs[runs.seed == runs[runs["size"] == half].seed.min()]
        losses = of_seed.pivot_table(index=["model", "size"], columns="tokens", values="val_loss")
        losses = losses.reindex([(first, half), (other, half), (first, size), (other, size)]).dropna(axis=1)
        D = np.tile(losses.columns.to_numpy(float), (4, 1))
        changes = []
        for _ in range(draws if D.shape[1] > 3 else 0):  # a cubic needs four budgets
            log_L = np.log(losses.to_numpy(float))
            log_L[0::2] += fit.trunks(rng, families[first], D[:2])
            log_L[1::2] += fit.trunks(rng, families[other], D[:2])
            a_half, b_half, a, b = fit.curves(D, log_L)
            at_half = fit.tokens_needed(a_half, b_half, D[0])
            at_rate = fit.tokens_needed(a, b, D[0])
            known = np.isfinite(at_half) & np.isfinite(at_rate)
            changes.append(np.mean(at_half[known] - at_rate[known]))
        times = in_words(fit.interval(changes), of=np.exp2) if changes else UNKNOWN
        sentences.append(f"{name_of(first)}'s tokens over {name_of(other)}'s for the same loss at half the learning "
                         f"rates, relative to the chosen ones, at {size}: {times}.")
    return sentences


def controls_of(runs, args, families):
    """What the controls say, in sentences."""
    from experiments import report

    sentences = at_half_rate(runs, families, args.draws) if families else []
    if args.control:
        control = records.read(args.control, args.accept_code, "scaling")
        tokens = control.attrs["settings"]["batch_tokens"]
        sentences += [f"With {tokens:,} tokens per step, 95%: {said}" for said in report.page(control).sentences]
    return sentences


def by_other_choices(runs, args, families):
    """{words: quantities} with another smallest budget, and with an N that includes the embedding."""
    found = {}
    for least, with_embedding in (args.least / 2, False), (args.least * 2, False), (args.least, True):
        others, _ = families_of(runs, list(families), least * MB, with_embedding)
        if len(others) == len(families):
            words = f"from {least:g} MB" + ", N with the embedding" * with_embedding
            found[words] = fit.analyse(others, None, least * MB, math.ceil(args.draws / 4))
    return found


def rows_of_ratios(found):
    """A row per other family and size: the ratio at each budget."""
    rows = {}
    for key, interval in found.items():
        model, _, place = key.partition(" tokens ")
        if place:
            size, _, tokens = place.rpartition(" ")
            row = rows.setdefault((model, size), {"of": name_of(model), "at": size})
            row[f"{human(float(tokens))} tokens"] = in_words(interval, of=np.exp2)
    return list(rows.values())


def rows_of_constants(choices):
    """A row per constant of a family, and per quantity of the frontier: its interval by each choice."""
    of = {"alpha": float, "a": float, "E": float, "compute": np.exp2, "per C": np.exp2}
    rows = {}
    for words, found in choices.items():
        for key, interval in found.items():
            model, _, quantity = key.partition(" ")
            if quantity in of:
                row = rows.setdefault(key, {"quantity": f"{name_of(model)} {quantity}"})
                row[words] = in_words(interval, of=of[quantity])
    return list(rows.values())


def coverage(path):
    """The table of a record by law_simulation.py."""
    if not path.exists():
        return "There is no simulation yet: run `python experiments/law_simulation.py results/law/simulation.json`."
    record = read_json(path)
    rows = {}
    for form, counts in record["forms"].items():
        for key, count in counts.items():
            row = rows.setdefault(key, {"quantity": key})
            row[form] = f"{count['held']} of {count['of']} ({count['width'] / 2:.4f})"
    return table(list(rows.values()), None, COVERAGE.format(record["command"]))


def panels(found, families, least, rows):
    """Loss against compute with the frontiers; and the predictions, in units of the predicted loss."""
    curves = []
    for model, family in reversed(families.items()):  # the first family is drawn over the others
        losses = np.exp(family.log_L.mean(0))
        curves.append(Curve(model, "", (family.flops[:, None] * family.D).ravel(), losses.ravel(), line="o"))
        C = fit.computes(fit.since(family, least))
        low, middle, high = np.exp([found[f"{model} frontier {i}"] for i in range(len(C))]).T
        curves.append(Curve(model, name_of(model), C, middle, low, high, line="-"))
    lines = []
    for row in rows:
        of_run = [row["measured"] / row["loss"]] if "measured" in row else []
        lines.append(Curve(row["model"], f"{row['name']} {row['size']} {row['D']}", (), of_run,
                           [row["low"] / row["loss"]], [row["high"] / row["loss"]]))
    drawn = []
    if curves:
        drawn.append(Panel("Loss and compute; frontiers, 90%", "FLOPs of training", "nats per token", curves, "x"))
    if lines:
        drawn.append(Panel("Measured losses, 90% as predicted", "loss / predicted loss", "", lines, marks=(1,)))
    return drawn


def page(runs, args, out):
    """The pages.Page of a sweep; out: its path without ending; predictions and simulation are read from the same
    folder."""
    from experiments.report import POINTS

    least = args.least * MB
    families, missing = families_of(runs, models_of(runs, args.models), least)
    others = list(families)[1:]
    rows = measured(reported(runs), out.parent)
    found = {}
    choices = {}
    if families:
        found = fit.analyse(families, None, least, args.draws)
        choices = {f"from {args.least:g} MB": found, **by_other_choices(runs, args, families)}
    sentences = [sentence_of_tokens(found, families, least, other) for other in others]
    sentences += [sentence_of_compute(found, families, other) for other in others]
    if not others:
        sentences.append(f"There is nothing to compare: the law can be fitted to {len(families)} of the families.")
    for is_larger, words in (True, "of larger sizes"), (False, "of runs continued to more tokens"):
        group = [row for row in rows if row["is_larger"] == is_larger]
        if group:
            sentences.append(verdict(group, words))
    sentences += [sentence_of_constants(found, model) for model in families]
    controls = controls_of(runs, args, families)
    if not rows:
        missing.append(f"no predictions beside {out}: --predict writes them, before sweep.py law_predicted runs")
    if not controls:
        missing.append("no controls: sweep.py law_half, and --control with the folder of sweep.py law_4096")
    points = runs[[*POINTS, "n_embd", "threads"]]
    points.attrs = {"head": f"# schema 1, a line per run, by commit {environment()['commit']}: {UNITS}\n"}
    again = f"the page, from the records alone: python experiments/law.py {out}.json --out={out}"
    if args.control:
        again += f" --control={args.control}"
    blocks = [
        table(rows_of_ratios(found), None, f"## Tokens at equal size\n\n{RATIOS}"),
        table(rows, PREDICTED, f"## Predictions\n\n{PREDICTIONS}"),
        table(rows_of_constants(choices), None, f"## Constants, by other choices\n\n{CONSTANTS}"),
        listed(controls) and f"## Controls\n\n{listed(controls)}",
        "## Do the intervals hold?", coverage(out.with_name("simulation.json")),
        "## To repeat it", listed([*runs.attrs.get("commands", ()), A_RUN, again])]
    return pages.Page(sentences, ["What is missing:", listed(missing)] if missing else [],
                      panels(found, families, least, rows), blocks, {"points": points})


@dataclass
class Options:
    sweep: Path  # a sweep's folder, or the .json that this program or the sweep's report wrote
    models: list[str] = ()  # the first is compared with each of the others (all)
    least: Positive = 1.0  # MB of the smallest budget that is fitted
    draws: Count = 200  # simulated sweeps per form of the law
    out: Path = None  # page, figure and points.csv, path without ending (law/report in the folder, or beside the file)
    control: Path = None  # folder or .json of `sweep.py law_4096`
    accept_code: tuple[str, ...] = ()  # runs of this other code count too; the page says so
    predict: Path = None  # write the predicted losses of `sweep.py law_predicted` to this file, and no page

    ARGUMENTS = ("models",)


def main(argv):
    args = configurator.read(Options, argv, __doc__)
    if args.predict:
        runs = records.read(args.sweep, args.accept_code, "scaling")
        families, missing = families_of(runs, models_of(runs, args.models), args.least * MB)
        if not families:
            raise ConfigError(f"{args.sweep}: no law can be fitted: {'; '.join(missing)}")
        return predict(args.predict, families, args.least * MB, args.draws)
    out = args.out or (args.sweep.with_suffix("") if args.sweep.is_file() else args.sweep / "law" / "report")
    page_of = functools.partial(page, args=args, out=out)
    say_written(pages.report("scaling", "The law", page_of, args.sweep, out, args.accept_code))


if __name__ == "__main__":
    with errors.main_error("law.py"):
        main(sys.argv[1:])
