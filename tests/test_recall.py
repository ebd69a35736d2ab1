"""experiments/recall/: the examples, the mixers, a run and its records, and a sweep from its plan to the figure.

Examples are compared with the benchmark's description, and mixers with sums over all pairs of positions. Statistical
tests have fixed seeds: a p-value below 1e-4 fails.

    python -m pytest tests/test_recall.py
"""

import functools
import json
import math
from itertools import combinations, permutations, product
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from helpers import no_picture, record, refuse, table
from scipy import stats
from torch.testing import assert_close

import optim
from experiments import records
from experiments.recall import cell, models, mqar, report
from experiments.recall.models import MIXERS, Recall
from experiments.recall.task import Examples, Task, distinct, generate
from inspection import counting
from model import ModelConfig
from runtime.records import read_log

pytestmark = pytest.mark.usefixtures("one_thread")
OWN_MIXERS = pytest.mark.parametrize("mixer", ["attention", "based", "hyena", "baseconv", "longhorn"])
NEW = {"short BaseConv": models.BaseConv, "long BaseConv": models.LongBaseConv, "Hyena": models.Hyena,
       "Based": models.TaylorAttention, "attention": models.OneHead}


# ------------------------------------------------------------------------------------------------------------ the task

@pytest.mark.parametrize("task", [Task(64), Task(101, 3, 9, 1.0), Task(16, 4, 2**17, -0.5), Task(4, 1, 4)], ids=str)
def test_every_key_comes_once_before_its_query_and_every_label_is_right(task):
    examples, P, half = generate(task, 2500, seed=1), task.pairs, task.vocab_size // 2
    backwards = np.arange(2500)[::-1]
    idx, targets = examples.batch(backwards, "cpu")
    rows = zip(idx.tolist(), targets.tolist(), examples.distances()[backwards].tolist(), strict=True)
    for tokens, labels, distances in rows:
        keys = tokens[0:2 * P:2]
        pairs = dict(zip(keys, tokens[1:2 * P:2], strict=True))
        assert len(pairs) == len(set(pairs.values())) == P and len(tokens) == task.T
        assert all(1 <= key < half <= value < task.vocab_size for key, value in pairs.items())
        queries = [t for t in range(2 * P, task.T) if tokens[t]]
        assert sorted(keys) == sorted(tokens[t] for t in queries) and all(t % 2 == 0 for t in queries)
        assert labels == [pairs[token] if t in queries else -1 for t, token in enumerate(tokens)]
        assert distances == [t - 2 * keys.index(tokens[t]) for t in queries]


def chi_square(counts, p):
    """The p-value of counts under p; cells that expect fewer than 20 are merged into one."""
    group = np.where(p * counts.sum() >= 20, np.arange(len(p)), len(p))
    got, want = np.bincount(group, counts), np.bincount(group, p) * counts.sum()
    assert (want > 0).sum() > 3
    return stats.chisquare(got[want > 0], want[want > 0]).pvalue


@pytest.mark.parametrize("T, pairs, a", [(64, 4, 0.01), (32, 4, 2.5)])
def test_gaps_follow_the_power_law(T, pairs, a):
    slots = (generate(Task(T, pairs, power_a=a), 100_000, seed=5).where.astype(int) - 2 * pairs) // 2
    p = np.array([i ** (a - 1) for i in range(1, (T - 2 * pairs) // 2 + 1)])
    counts = np.bincount(slots[:, 0], minlength=len(p))
    assert chi_square(counts, p / p.sum()) > 1e-4
    # given the first pair's gap, the second follows the same law over the remaining slots
    first = counts.argmax()
    second = np.bincount(slots[slots[:, 0] == first, 1], minlength=len(p))
    p[first] = 0
    assert second[first] == 0 and chi_square(second, p / p.sum()) > 1e-4


@pytest.mark.parametrize("k, n", [(2, 4), (3, 5), (2, 7)])  # repeats are drawn again; a large k is permuted
def test_distinct_numbers_come_in_every_order_equally_often(k, n):
    x = distinct(np.random.default_rng(3), 40_000, k, n)
    counts = np.array([(x == order).all(1).sum() for order in permutations(range(n), k)])
    assert counts.sum() == len(x) and stats.chisquare(counts).pvalue > 1e-4


def test_examples_depend_on_seed_split_and_task_alone():
    task = Task(64)
    some = generate(task, 5000, seed=1)
    more = generate(task, 9000, seed=1)
    assert Examples(more.tokens[:5000], more.where[:5000], more.values[:5000]).sha256() == some.sha256()
    assert (more.where[:5000] == some.where).all()
    splits = ("train", "test", "pairs")
    assert len({generate(task, 50, seed, split).sha256() for seed in (0, 1, 2) for split in splits}) == 9
    # another random generator in numpy would silently change every record
    assert some.tokens[0, :8].tolist() == [2379, 4836, 2220, 5676, 1241, 6281, 342, 4362]
    assert some.where[0].tolist() == [24, 16, 10, 8]


# ---------------------------------------------------------------------------------------------------------- the mixers

def mixer_of(name):
    """A mixer with weights large enough to matter, in float64, for which the convolution has no kernel."""
    torch.manual_seed(3)
    mixer = NEW[name](ModelConfig(n_layer=2, n_head=1, n_embd=12, block_size=24, backend="torch"), 1).double()
    with torch.no_grad():
        for p in mixer.parameters():
            p.copy_(torch.randn_like(p) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 0.5))
    return mixer.eval()


def convolved(u, taps, bias=0.0):
    """y_t = bias + sum_lag taps[lag] u_{t - lag}, one product after another: u (B, T, d), taps (lags, d)."""
    y = torch.zeros_like(u) + bias
    for t in range(u.shape[1]):
        for lag in range(min(t + 1, len(taps))):
            y[:, t] += taps[lag] * u[:, t - lag]
    return y


def taps_by_hand(conv, T, d):
    """The taps (T, d) of a long convolution, computed one lag at a time from the parameters of its network."""
    w = dict(conv.named_parameters())
    layer = lambda name, a: w[f"{name}.weight"] @ a + w.get(f"{name}.bias", 0)
    delta = torch.linspace(math.log(0.01) / 1.5, math.log(0.01) / 0.3, d, dtype=torch.float64)
    taps = []
    for lag in range(T):
        t, angle = lag / (T - 1), 1e-4 * 2 * math.pi * lag / T
        a = torch.tensor([t, math.cos(angle), -math.sin(angle)], dtype=torch.float64)
        if "frequency" in w:  # Hyena
            for i in range(3):
                a = torch.sin(w["frequency"] * layer(f"hidden.{i}", a))
            taps.append(layer("out", a) * torch.exp(-t * delta.abs()))
        else:
            taps.append(layer("out", layer("hidden.0", a).relu()))
    return torch.stack(taps)


def by_hand(name, m, x):
    """The output of a mixer by its definition, with direct convolutions and weights for all pairs of positions."""
    T, d = x.shape[1:]
    short = lambda u: convolved(u, m.conv_weight.T.flip(0), m.conv_bias)
    averaged = lambda weights, v: weights.tril() @ v / weights.tril().sum(-1, keepdim=True)
    if name == "short BaseConv":
        return short(x) * m.proj(x) + x
    if name == "long BaseConv":
        return (convolved(x, taps_by_hand(m.filter, T, d)) + x) * m.proj(x) + x
    if name == "Hyena":
        x1, x2, v = short(m.in_proj(x)).split(d, -1)
        u = x1 * v
        return m.out_proj(x2 * (convolved(u, taps_by_hand(m.filter, T, d)) + m.D * u))
    if name == "attention":
        q, k, v = m.qkv(x).split(d, -1)
        return m.out_proj(averaged(torch.exp(q @ k.mT / math.sqrt(d)), v))
    q, k = m.qk(x).split(8, -1)
    s = q @ k.mT / math.sqrt(8)
    return m.out_proj(averaged(1 + s + s**2 / 2, m.v(x)))


@pytest.mark.parametrize("name", NEW)
def test_mixers_agree_with_direct_sums(name):
    g = torch.Generator().manual_seed(4)
    x, dy = torch.randn(2, 2, 24, 12, dtype=torch.float64, generator=g)
    m, x = mixer_of(name), x.requires_grad_()
    y, true = m(x), by_hand(name, m, x)
    assert_close(y, true, rtol=1e-6, atol=1e-7)
    assert_close(*(torch.autograd.grad(a, x, dy)[0] for a in (y, true)), rtol=1e-5, atol=1e-6)
    if name == "Hyena":
        with pytest.raises(ValueError, match="25 tokens, but the long convolution has 24 taps"):
            m(x.new_zeros(2, 25, 12))


def config_of(mixer, **settings):
    settings = {"n_embd": 16, "block_size": 24, "pairs": 3, "vocab_size": 32, **settings}
    return cell.load([f"--model={mixer}", *(f"--{key}={value}" for key, value in settings.items())])


def tiny(mixer):
    torch.manual_seed(0)
    m = Recall(config_of(mixer)).eval()
    named = dict(m.named_parameters())
    with torch.no_grad():
        for name in optim.decayed(m):
            named[name].normal_(0, 0.3 if "embed" in name or "positions" in name else named[name].shape[1] ** -0.5)
    return m


def test_state_sizes_are_those_counted_by_hand():
    sizes = {"attention": 2 * 2 * 24 * 16, "based": 2 * 16 + 73 * 17, "hyena": 2 * (24 * 16 + 6 * 16),
             "baseconv": 2 * 16 + 24 * 16}
    assert {mixer: counting.state_size(tiny(mixer), 24) for mixer in sizes} == sizes


@OWN_MIXERS
@torch.no_grad()
def test_the_loss_is_taken_at_the_queries(mixer):
    m, idx = tiny(mixer), torch.randint(32, (2, 24), generator=torch.Generator().manual_seed(1))
    everywhere, _ = m(idx)
    targets = torch.full((2, 24), -1)
    targets[0, [3, 20]], targets[1, [7, 8]] = torch.tensor([5, 6]), torch.tensor([7, 31])
    logits, loss = m(idx, targets)
    assert_close(logits, everywhere[[0, 0, 1, 1], [3, 20, 7, 8]])
    assert_close(loss, -logits.log_softmax(1)[range(4), [5, 6, 7, 31]].sum() / 4)
    assert_close(m(idx, targets, loss_only=True)[1], loss)
    every = 3 * (counting.forward_flops(m.modules(), 24) + 2 * 32 * 16)  # with the head at all 24 positions, not at 3
    assert 24 * (every - counting.flops_per_token(m)["total"]) == pytest.approx(21 * 6 * 32 * 16)


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_parameter_learns(mixer):
    model = tiny(mixer)
    idx, targets = generate(Task(24, 3, 32), 64, 1).batch(slice(None), "cpu")
    model(idx, targets, loss_only=True)[1].backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0] == []


@pytest.mark.parametrize("mixer", ["attention", "based", "hyena"])
def test_maps_to_the_residual_stream_start_at_the_scale_of_two_branches(mixer):
    last = Recall(config_of(mixer, n_embd=64)).layers[1].branches[0].mixer
    assert last.out_proj.weight.std().item() == pytest.approx(0.02 * 2**-0.5, rel=0.1)
    if mixer == "hyena":
        assert (last.filter.frequency == 1).all()


@pytest.mark.parametrize("mixer", ["attention", "based", "longhorn"])
@torch.no_grad()
def test_a_tenth_of_the_embedding_is_dropped_only_in_training(mixer):
    model, idx = tiny(mixer), torch.randint(32, (8, 24))
    first, entering = model.layers[0].branches[0], []
    first.register_forward_pre_hook(lambda branch, args: entering.append(args[0]))
    model(idx)
    model.train()(idx)
    whole, kept = entering
    if mixer == "longhorn":
        assert torch.equal(kept, whole)
    else:
        assert (kept == 0).double().mean().item() == pytest.approx(0.1, abs=0.02)
        assert_close(kept[kept != 0], whole[kept != 0] / 0.9)
    assert torch.equal(first(whole)[0], first(whole)[0]) == (mixer != "attention")  # attention also drops some weights


# ------------------------------------------------------------------------------------------------------------- one run

@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    monkeypatch.setattr("runtime.telemetry.draw_loss", no_picture)


SMALL = ["--n_embd=16", "--block_size=16", "--pairs=2", "--vocab_size=32", "--train_examples=600", "--test_examples=50",
         "--batch_examples=50", "--device=cpu", "--dtype=float32", "--self_check=off"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(command line, folder of the sweep, folder of the run), for a sweep whose only cell has finished."""
    folder = tmp_path_factory.mktemp("recall") / "x"
    settings = [a for a in SMALL if not a.startswith(("--block_size=", "--n_embd"))]
    line = ["run", "--mixers=based", "--Ts=16", "--widths=16", "--lrs=1e-2", "--seeds=3", f"--out={folder}", *settings,
            "--epochs=2", "--eval_interval=5", "--self_check=on"]
    (planned,) = mqar.RecallSweep(line).plan()
    cell.main([*planned.argv, f"--out_dir={folder / planned.name}"])
    assert np.random.get_state()[1][0] == 3  # seeded with 3, and nothing draws from it
    return line, folder, folder / planned.name


def test_the_records_of_a_run_are_right(ran):
    line, _, out = ran
    result, config, log = record(out), record(out, "config"), read_log(out, "eval")
    assert [e["step"] for e in log] == [5, 10, 15, 20, 24]
    assert [e["lr"] for e in read_log(out, "train")] == [0.005] * 2  # steps 20 and 24, of the second epoch
    assert (result["steps"], result["tokens"], result["reached"]) == (24, 24 * 50 * 16, False)
    assert config["config"]["max_iters"] == 24 and config["derived"]["steps_per_epoch"] == 12
    (planned,) = mqar.RecallSweep(line).plan()
    assert planned.at["flops"] == result["flops"] == pytest.approx(planned.seconds / 3e-11)
    assert result["state_size"] == 2 * 16 + 73 * 17 and [b["pairs"] for b in result["by_pairs"]] == [2, 4]
    right = sum(b["queries"] * b["accuracy"] for b in result["by_distance"])
    assert right == pytest.approx(100 * result["accuracy"]) and log[-1]["accuracy"] == result["accuracy"]
    assert config["data"]["sha256"]["test"] == generate(Task(16, 2, 32), 50, 3, "test").sha256()


def test_a_sweep_runs_from_its_plan_to_its_report(ran, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    line, folder, out = ran
    assert mqar.main([*line, f"--out={folder}/none", "--dry-run"]) == 0 and not (folder / "none").exists()
    printed = capsys.readouterr().out
    assert "1 runs" in printed and "experiments/recall/cell.py --model=based --block_size=16" in printed
    assert " s at most, going by" in printed
    assert mqar.main(line) == 0 and "report.png" in capsys.readouterr().out  # a finished run does not run again
    for source in (folder, folder / "report.json"):
        (run,) = records.read(source).itertuples()
        assert run.curve == [[e["step"], e["accuracy"], e["val_loss"]] for e in read_log(out, "eval")]
        assert (run.left_out, run.epochs, run.recall) == ("", 2, record(out)["by_pairs"][0]["accuracy"])
    assert "<td>Based</td>" in (folder / "report.html").read_text()


def test_it_learns_and_stops_at_the_accuracy_asked_for(tmp_path):
    cell.main([*SMALL, f"--out_dir={tmp_path / 'a'}", "--model=deltanet", "--n_embd=32", "--vocab_size=64",
               "--train_examples=20000", "--epochs=4", "--eval_interval=25", "--stop_at=0.4"])
    result = record(tmp_path / "a")
    assert result["reached"] and 0.4 <= result["accuracy"] and result["steps"] < 4 * 400


def test_the_rate_is_a_cosine_stepped_once_per_epoch():
    config = config_of("baseconv", train_examples=600, batch_examples=50, epochs=4)
    wanted = [1.0, 0.5 + 0.5 * math.sqrt(0.5), 0.5, 0.5 - 0.5 * math.sqrt(0.5)]
    np.testing.assert_allclose([cell.rate_factor(step, config) for step in range(48)], np.repeat(wanted, 12))
    config.schedule = "constant"
    assert cell.rate_factor(47, config) == 1.0


def test_accuracy_is_the_same_one_example_at_a_time():
    config = config_of("attention", test_examples=40, train_examples=50, dtype="float32", micro_batch_size=16)
    model, data = tiny("attention").train(), cell.RecallData(config, torch.device("cpu"))
    answers = functools.partial(cell.answers, config, model, device=torch.device("cpu"))
    right, loss = answers(data.test)
    assert model.training
    model.eval()
    nats = []
    for n in range(40):
        idx, targets = data.test.batch([n], "cpu")
        labels = targets[targets >= 0]
        chances = model(idx)[0][targets >= 0].log_softmax(-1)
        assert right[n].tolist() == (chances.argmax(-1) == labels).tolist()
        nats += (-chances[range(3), labels]).tolist()
    assert loss == pytest.approx(np.mean(nats), rel=1e-5)
    rows = {(b["from"], b["to"]): b["accuracy"] for b in cell.by_distance(right, data.test.distances())}
    assert rows[4, 8] == right[(data.test.distances() >= 4) & (data.test.distances() < 8)].mean()
    fresh = generate(config.task(4), 60, config.seed, "pairs")  # in neither set
    row = next(row for row in cell.by_pairs(config, model, data.device, 60) if row["pairs"] == 4)
    assert row == {"pairs": 4, "queries": 240, "accuracy": answers(fresh)[0].mean()}
    config.stop_at = right.mean()  # reached exactly
    assert cell.evaluate(config, data, model)["reached"]


def test_an_epoch_has_every_example_once_however_many_processes_share_it():
    config = config_of("attention", train_examples=101, test_examples=1, batch_examples=50, seed=2)
    data = cell.RecallData(config, torch.device("cpu"))
    row = {r.tobytes(): i for i, r in enumerate(data.train.tokens.astype(np.int64))}
    assert config.steps_per_epoch == 3
    for world, size in ((1, 50), (2, 8), (3, 50)):
        seen, weights = [], np.zeros(3)
        for step, rank in product(range(3), range(world)):
            batches = [*data.micro_batches(step, rank, world, size)]
            # also in the last step of an epoch, which has a row for one process only
            assert batches and all(len(idx) for idx, *_ in batches)
            for idx, _, weight in batches:
                seen += [row[r.tobytes()] for r in idx.numpy()] if weight else []
                weights[step] += weight / world  # processes are averaged
        assert sorted(seen) == list(range(101)) and weights == pytest.approx(1)

    def begun(step, rank=0):
        """The first tokens of a step, and the numbers that dropout would draw."""
        idx, *_ = next(data.micro_batches(step, rank, 2, 50))
        return idx.tolist(), torch.rand(4).tolist()

    first, other_epoch, other_rank = begun(0), begun(3), begun(0, 1)
    torch.manual_seed(99)
    assert begun(0) == first
    for i in (0, 1):
        assert first[i] not in (other_epoch[i], other_rank[i])


# ----------------------------------------------------------------------------------------------------------- the sweep

def test_the_plan_has_the_papers_448_runs_as_specified():
    for preset, runs in (("laptop", (9 + 3) * 2), ("sooner", 2 * 3 * 6), ("steps", 2 * 6 * 2 * 3), ("gpu", 3 * 4)):
        planned = mqar.RecallSweep(["run", f"--preset={preset}"]).plan()
        assert len(planned) == runs, preset
    assert {(c.at["T"], c.at["n_embd"]) for c in planned} == {(512, 64)}  # the cells of preset gpu
    cells = mqar.RecallSweep(["run", "--preset=paper", "--widths=64"]).plan()
    assert mqar.PRESETS["paper"].widths == (64, 128, 256, 512) and len({c.name for c in cells}) == len(cells) == 448 / 4
    assert {c.at["mixer"] for c in cells} == {"attention", "based", "hyena", "rwkv4", "baseconv", "mamba", "longhorn"}
    same = dict(epochs=64, stop_at=0.99, weight_decay=0.1, vocab_size=8192, train_examples=100_000, test_examples=3000,
                power_a=0.01, dtype="float32", beta2=0.999, grad_clip=0.0, schedule="epochs")
    sizes = {64: (4, 512), 128: (8, 512), 256: (16, 256), 512: (64, 128)}
    for c in cells:
        config = cell.load(c.argv)
        assert (config.pairs, config.batch_examples) == sizes[config.block_size]
        assert vars(config) | same == vars(config)
        assert config.eval_interval == config.steps_per_epoch and config.learning_rate in (1e-4, 4.6e-4, 2.2e-3, 1e-2)


# ---------------------------------------------------------------------------------------------------------- the report

RESULTS = Path(report.__file__).resolve().parents[2] / "results"


@pytest.mark.parametrize("section, changes, word", [
    ("result", {"accuracy": 1.5}, "accuracy is 1.5"), ("result", {"by_pairs": []}, "lack"),
    ("config", {"batch_examples": 9}, "batch_examples 9 where most have 128"),
    ("data", {"sha256": {"test": "0"}}, "not comparable: test 0 where")])
def test_a_bad_record_is_named_and_left_out(tmp_path, section, changes, word):
    saved = record(RESULTS, "recall_steps")
    bad, path = next(iter(saved["cells"])), tmp_path / "changed.json"
    saved["cells"][bad][section] |= changes
    path.write_text(json.dumps(saved))
    runs = records.read(path)
    assert word in runs[runs.run == bad].left_out.item() and (runs.left_out == "").sum() == 70


def test_a_run_of_a_saved_sweep_can_be_read_twice():
    _, runs = records.load(RESULTS / "recall_steps.json")
    read = next(iter(runs.values()))
    assert read() == read()


@pytest.mark.parametrize("name", ["laptop", "steps"])
def test_each_number_on_a_page_comes_from_its_records(name, tmp_path):
    """One page has a single width, with a line over seeds for each mixer. The other has several widths."""
    assert report.write(RESULTS / f"recall_{name}.json", tmp_path / f"recall_{name}")["png"].stat().st_size > 10_000
    assert (tmp_path / f"recall_{name}.md").read_text() == (RESULTS / f"recall_{name}.md").read_text()


def runs_of(*rows):
    """Runs at one point, from rows of (learning rate, seed, accuracy). A run without an accuracy diverged."""
    runs = pandas.DataFrame(rows, columns=["learning_rate", "seed", "accuracy"]).astype({"accuracy": float})
    diverged = runs.accuracy.isna()
    runs = runs.assign(
        left_out=np.where(diverged, "it diverged", ""), recall=runs.accuracy / 2,
        steps_to_half=(100 * runs.seed).mask(diverged),
        by_distance=[{"4-7": (10 * seed, seed**2)} for seed in runs.seed], by_pairs=[{}] * len(runs),
        T=64, n_embd=16, mixer="longhorn", epochs=1, seconds=1, pairs=4, parameters=1, state_size=1)
    runs.attrs["settings"] = {}
    return runs


@pytest.mark.parametrize("rows, rate", [
    ([(0.1, 1, 0.9), (0.1, 2, 0.5), (0.2, 1, 0.8), (0.2, 2, 0.8)], 0.2),
    ([(0.1, 1, 0.9), (0.1, 2, None), (0.2, 1, 0.6), (0.2, 2, 0.6)], 0.2),  # a diverged run counts as 0
    ([(0.1, 1, 0.9), (0.2, 1, 0.6), (0.2, 2, 0.6)], 0.2),  # the rate with more seeds wins
    ([(0.1, 1, 0.6), (0.2, 1, 0.6)], 0.1)])  # equally good: the lower one
def test_the_rate_with_the_best_mean_over_all_seeds_is_chosen(rows, rate):
    point, = report.summarise(runs_of(*rows)).itertuples()
    assert point.learning_rate == rate


def test_a_point_agrees_with_one_by_hand():
    point, = report.summarise(runs_of((0.1, 2, 0.4), (0.1, 1, 0.8), (0.1, 3, None), (0.2, 1, 0.1))).itertuples()
    assert point.recalls == [0.4, 0.2, 0] and point.shown == "20.0% (0.0% .. 40.0%, 3 seeds)"
    assert point.half[0.1] == [100, 200, math.inf] and point.at_all_rates == "0.1: 40.0%, 0.2: 10.0%"
    assert point.by_distance == {"4-7": (1 + 4) / (10 + 20)}


def test_a_page_without_a_point_says_so():
    """One run finished, and more seeds diverged at another rate."""
    page = report.page(runs_of((0.1, 1, None), (0.1, 2, None), (0.2, 1, 0.5)))
    assert page.sentences == ["No run at a best rate has ended."] and not page.panels and not page.below


def test_steps_to_half_are_compared_over_all_ways_to_split_them():
    never = math.inf
    assert report.mann_whitney([never] * 3, [never] * 3) == 1
    tied, other = [1, 2, 2, 3, never], [2, 3, 3, never]
    off = lambda a: abs(sum(stats.rankdata(tied + other)[list(a)]) - 25)
    ways = [off(a) for a in combinations(range(9), 5)]
    assert report.mann_whitney(tied, other) == pytest.approx(np.mean([way >= off(range(5)) for way in ways]))
    assert report.mann_whitney(range(20), range(20, 40)) == pytest.approx(2 / math.comb(40, 20))  # 2 of 1.4e11 splits


REFUSED = """
mqar.py run --mixers=longhorm --dry-run          unknown mixer
mqar.py run --seed=3                             the sweep sets seed
mqar.py run --Ts=100 --dry-run                   give --pairs
mqar.py run --mixers=gla --widths=31 --dry-run   n_head
cell.py --pairs=5                                at least four times the pairs
cell.py --vocab_size=4                           give at least 6
cell.py --vocab_size=6                           of 50 test examples are also
cell.py --power_a=99                             power_a 99.0 must be at most 2.5
cell.py --model=longhorm                         unknown mixer
cell.py --mixer=x                                --model
cell.py --pattern=mamba                          not for recall
cell.py --batch_tokens=4096                      batch_examples
cell.py --backend=gpu                            unknown backend
"""


@pytest.mark.parametrize("line, words", table(REFUSED))
def test_mistakes_get_one_line(line, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    program, *argv = line.split()
    if program == "cell.py":
        argv = [*SMALL, *argv]
    refuse(argv, words, program=f"experiments/recall/{program}")
    assert not list(tmp_path.glob("out/[!.]*"))
