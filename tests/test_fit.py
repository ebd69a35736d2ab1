"""Compares fit.py and compare.py with independent truths: known constants, other minimisers, scipy, formulas."""

import itertools
import json
import math
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
from scipy import optimize, stats

from experiments import compare, duel_simulation, fit, law, law_simulation
from experiments.fit import CannotFit, fit_loss


def runs(sizes=5, counts=5, noise=0.0):
    """N, D, L on a grid with N in 1e6 .. 1e9, D in 1e8 .. 1e11 and normal noise in log L."""
    N, D = (v.ravel() for v in np.meshgrid(np.geomspace(1e6, 1e9, sizes), np.geomspace(1e8, 1e11, counts)))
    L = 1.69 + 406.4 / N**0.34 + 410.7 / D**0.28
    return N, D, L * np.exp(noise * np.random.default_rng(2).standard_normal(len(N)))


# -------------------------------------------------------------------------------------------------------------- the law

def huber_of(constants, N, D, L):
    """The Huber loss, written a second time: |r| - delta / 2 beyond delta, r^2 / (2 delta) below, times delta."""
    E, A, alpha, B, beta = constants
    off = np.abs(np.log(E + A / N**alpha + B / D**beta) - np.log(L))
    return np.where(off > 1e-3, 1e-3 * (off - 0.5e-3), off**2 / 2).sum()


def test_no_other_minimiser_finds_a_lower_loss():
    N, D, L = runs(noise=0.003)
    fitted = fit_loss(N, D, L)
    assert fitted.cost == pytest.approx(huber_of(fitted[:5], N, D, L))

    def elsewhere(c):  # in coordinates in which Nelder-Mead makes progress
        constants = abs(c[0]), math.exp(c[1]) * 3e7 ** c[2], c[2], math.exp(c[3]) * 3e9 ** c[4], c[4]
        return huber_of(constants, N, D, L)

    best = optimize.minimize(elsewhere, [1.5, 0.0, 0.3, 0.0, 0.3], method="Nelder-Mead",
                             options=dict(maxiter=3000, adaptive=True))
    assert fitted.cost <= best.fun * (1 + 1e-6)


def test_a_floor_that_the_runs_do_not_show_is_0():
    N, D, _ = runs()
    fitted = fit_loss(N, D, 406.4 / N**0.34 + 410.7 / D**0.28 - 0.001)
    assert fitted.E < 1e-4 and math.isfinite(fitted.A)


def test_epochs_law_makes_chinchilla_optimal():
    """Besiroglu et al. 2024: about 20 tokens per parameter at Chinchilla's 5.76e23 = 6 N D FLOPs."""
    N = np.geomspace(1e10, 1e12, 2001)
    best = N[fit.law(N, 5.76e23 / 6 / N, **fit.EPOCH).argmin()]
    assert 18 < 5.76e23 / 6 / best**2 < 25


SIZES = np.geomspace(1e6, 1e9, 12)


@pytest.mark.parametrize("N, D, L, words", [
    ([1e6, 1e7], [1e8, 1e9], [3.0], "1 values of L for 2 runs"),
    ([1e6, 0], [1e8, 1e9], [3.0, 2.0], r"N\[1\] = 0: give positive numbers"),
    ([1e6], [math.inf], [3.0], r"D\[0\] = inf: give"),
    ([1e6, 1e7] * 3, [1e8, 1e8, 1e9, 1e9, 1e10, 1e10], [4, 3, 3.5, 2.5, 3, 2], "2 sizes N and 3 token counts D"),
    ([1e6, 1e7, 1e8, 1e9], [1e8, 1e11, 1e9, 1e10], [4, 3, 3, 2], "4 distinct .* add 1 or more"),
    (SIZES, 20 * SIZES, SIZES, "1.0000 correlated.*more than one budget")])
def test_runs_that_cannot_be_fitted_are_refused_in_one_line(N, D, L, words):
    with pytest.raises(CannotFit, match=words) as error:
        fit_loss(N, D, L)
    assert "\n" not in str(error.value)


# --------------------------------------------------------------------------------------------------- the law of a sweep

MB = 2**20
CONSTANTS = {"additive": (0.4, 6.0, 0.21, 22.0, 0.25, 0.0, 1.0), "offset": (0.4, 6.0, 0.21, 22.0, 0.25, 6e4, 1.0),
             "gamma": (0.3, 14.0, 0.26, 70.0, 0.32, 0.0, 0.75)}


def family(constants=CONSTANTS["additive"], noise=0.0, budgets=(1, 2, 4, 8, 16), times=1.0):
    N = times * np.array([5e4, 1.2e5, 2.5e5, 4.5e5, 1.4e6])
    D = MB * np.tile(np.array(budgets, float), (5, 1))
    off = noise * np.random.default_rng(1).standard_normal((2, *D.shape))
    log_L = np.log(fit.law(N[:, None], D, *constants)) + off
    return fit.Family(law_simulation.LABELS, N, 6 * N, D, log_L, np.zeros(5))


@pytest.mark.parametrize("form", fit.FORMS)
def test_the_constants_of_every_form_are_recovered_from_its_sweep(form):
    same = family(CONSTANTS[form])
    D = np.array([20, 60, 200]) * same.N[:, None]  # tokens per parameter
    ladder = same._replace(D=D, log_L=np.log(fit.law(same.N[:, None], D, *CONSTANTS[form]))[None])
    for sweep in same, ladder:
        assert fit.fit_family(sweep, form)[:7] == pytest.approx(CONSTANTS[form], rel=2e-3)


def test_the_scale_of_the_noise_along_a_trunk_is_recovered():
    """At twice the tokens the noise has 2^-.4 times the SD and a correlation of .7."""
    shape = np.array([[1, 0.7 * 2**-0.4], [0.7 * 2**-0.4, 2**-0.8]])
    trunks = np.random.default_rng(0).multivariate_normal([1, 2], 1e-4 * shape, (4, 300))
    variance, df = fit.seed_noise(family()._replace(D=np.tile([MB, 2 * MB], (300, 1)), log_L=trunks))
    assert variance == pytest.approx(1e-4, rel=0.06) and df == 3 * 600


def test_the_compute_best_spent_on_parameters_is_as_in_the_formula():
    """Hoffmann et al.: a = beta / (alpha + beta) for C = 6 N D, where alpha A / N^alpha = beta B / D^beta."""
    fitted = fit.Fit(*CONSTANTS["additive"], 0)
    assert fit.allocation(fitted, family()) == pytest.approx(0.25 / 0.46, abs=2e-3)
    N = 2e5
    D = (22 * 0.25 / (6 * 0.21 / N**0.21)) ** 4
    level = fit.law(N, D, *CONSTANTS["additive"])
    assert fit.frontier(fitted, family(), np.array([level])) == pytest.approx([6 * N * D], rel=1e-3)


def test_a_family_that_needs_two_fifths_of_the_tokens_gets_that_ratio():
    """The ratio is the same at every size and budget, so both slopes are 0. The ratio of compute follows from the FLOPs
    per token."""
    E, A, alpha, B, beta, *_ = CONSTANTS["additive"]
    b = family((E, A, alpha, B / 0.4**beta, beta), budgets=(0.5, 1, 2, 4, 8, 16), times=1.1)
    a = family(budgets=(0.25, 0.5, 1, 2, 4, 8, 16))
    a = a._replace(flops=9 * a.N)
    read = fit.ratios(a, b, MB)
    tokens = [value for key, value in read.items() if key.startswith("tokens")]
    assert tokens == pytest.approx([math.log2(0.4)] * 25, abs=0.01)
    assert [read["per D"], read["per N"]] == pytest.approx([0, 0], abs=3e-3)
    fits = fit.Fit(*CONSTANTS["additive"], 0), fit.Fit(E, A, alpha, B / 0.4**beta, beta, 0, 1, 0)
    assert fit.compute_ratio(a, b, *fits) == pytest.approx({"compute": math.log2(0.4 * 1.5), "per C": 0}, abs=1e-3)
    y = np.array([[1, 2, np.nan], [5, 5.5, 6]])  # by hand: within rows slopes of 1 and .5, weighted 1 and 4
    assert fit.slope_within(y, np.array([[0, 1, 2]] * 2), np.indices((2, 3))[0]) == pytest.approx((0.5 + 1) / 2.5)


def test_predictions_of_one_more_run_are_right():
    """Checks mean and SD over draws. A surplus of .01 at 16 MB is .01 x .7 x 2^-.4 at 32 MB, or more if the learning
    rate shares in it."""
    rng = np.random.default_rng(0)
    fitted = fit.Fit(*CONSTANTS["additive"], 0)
    seen = family(noise=0.001)
    seen.log_L[0] += 0.01
    variance, df = fit.seed_noise(seen)
    variance *= df / (df - 2)  # the variance of Student's t
    at_16, both, at_32 = variance * 4**-1.6, variance * 0.7 * 2**-3.6, variance * 4**-2.0
    for cost, shared in ((0.0, 0.0), (0.004, 3.2e-5)):
        pull = (both + shared) / (at_16 + shared)
        for N, surplus, spread in ((seen.N[1], seen.log_L[0, 1, -1] - fit.log_law(fitted, seen.N[1], 16 * MB),
                                    at_32 + shared - pull * (both + shared)), (4e6, 0, at_32 + shared)):
            draws = [fit.one_more(rng, seen._replace(rate_cost=np.full(5, cost)), fitted, 1e-9, N, 32 * MB)
                     for _ in range(1000)]
            expected = pull * surplus + fit.log_law(fitted, N, 32 * MB)
            assert np.mean(draws) == pytest.approx(expected, abs=4e-4)
            assert np.std(draws) == pytest.approx(spread**0.5, rel=0.1)


def test_a_power_law_goes_through_the_two_largest_sizes_and_budgets():
    seen = family()
    straight = seen._replace(log_L=-0.1 * np.log(seen.N[:, None]) - 0.2 * np.log(seen.D)[None])
    for N in (4e6, seen.N[0]):
        assert fit.power(straight, N, 28 * MB) == pytest.approx(-0.1 * math.log(N) - 0.2 * math.log(28 * MB))


def test_the_variance_between_sweeps_is_right():
    """Two seeds halve the variance. Variance beyond this and the cost of the rates is misfit."""
    rng = np.random.default_rng(0)
    seen = family(noise=0.01)
    variance, df = fit.seed_noise(seen)
    off = [fit.again(rng, seen, 4e-6)[:, 0] for _ in range(1000)]
    assert np.var(off) == pytest.approx(variance / 2 * df / (df - 2) + 4e-6, rel=0.05)
    fitted = fit.Fit(*CONSTANTS["additive"], 0)
    off = np.resize([0.02, -0.02], (5, 5))
    squares = 25 / 20 * 4e-4
    exact = family(noise=1e-8)
    assert fit.around(exact._replace(log_L=exact.log_L + off), "additive", fitted) == (pytest.approx(squares), 20)
    assert fit.around(exact, "gamma", fitted)[1] == 19
    of_seeds = variance / 2 * df / (df - 2) * np.mean(4.0 ** (-0.4 * np.arange(5)))
    found = [fit.misfit(rng, seen._replace(rate_cost=np.full(5, 0.003)), squares, 20) for _ in range(1000)]
    assert np.mean(found) == pytest.approx(squares * 20 / 18 - of_seeds - 1.8e-5, rel=0.03)
    assert fit.misfit(rng, seen, 1e-9, 20) == 0


def test_intervals_grow_with_the_noise():
    target = {"b": [(4e6, 16.0 * MB)]}
    widths = []
    for noise in (0.002, 0.02):
        found = fit.analyse({"a": family(noise=noise), "b": family(noise=noise)}, target, draws=4)
        low, middle, high = found["b tokens 250K 4194304"]
        assert low < middle < high and found["b 4000000 16777216"][0] < found["b 4000000 16777216"][2]
        widths.append(high - low)
    assert 4 < widths[1] / widths[0] < 25


def test_the_record_of_simulated_sweeps_counts_each_form(tmp_path):
    """Each form has one sweep, the form gamma has no alpha, and 25 ratios are at equal size."""
    path = tmp_path / "law/simulation.json"
    law_simulation.main([str(path), "--sweeps=3", "--draws=2"])
    record = json.loads(path.read_text())
    assert record["command"].endswith("simulation.json --sweeps=3 --draws=2")
    for form, counts in record["forms"].items():
        assert counts["llama tokens"]["of"] == 25 and counts["llama compute"]["of"] == 1
        assert ("longhorn alpha" in counts) == (form != "gamma")
        assert all(0 <= count["held"] <= count["of"] and count["width"] > 0 for count in counts.values())


def test_a_sweep_becomes_families():
    """Rows come in any order. Sizes and budgets with a single seed do not count, nor do runs that were left out."""
    rows = [("seed", "40", 40, 1001, 9, 1e-3, 9.0), ("seed", "half", 64, 1001, 1, 1e-3, 9.0)]
    for width, seed, tokens in itertools.product((64, 128, 40), (1002, 1001), (3, 2, 1)):
        times = 1 + (width == 40)  # a different ladder of budgets
        rows.append(("seed", str(width), width, seed, times * tokens, 1e-3, 1 + width + tokens + (seed - 1000) / 10))
    for rate, seed in itertools.product((1e-3, 2e-3, 4e-3), (1, 2)):
        rows.append(("search", "64", 64, seed, 1, rate, 2 + math.log(rate / 2e-3) ** 2 + 10 * seed * rate))
    frame = pandas.DataFrame(rows, columns=["stage", "size", "n_embd", "seed", "tokens", "learning_rate", "val_loss"])
    frame = frame.assign(model="x", left_out="", parameters=frame.n_embd * 110, embedding=frame.n_embd * 10,
                         flops=frame.tokens * frame.n_embd * 6, loss_of_choosing_files=frame.val_loss)
    frame = frame.sample(frac=1, random_state=0)
    frame.attrs["sizes"] = ["64", "40", "half", "later"]
    families, missing = law.families_of(frame, ["x", "y"], 0)
    found = families["x"]
    assert found.N.tolist() == [4000, 6400, 12800] and found.flops.tolist() == [240, 384, 768]
    assert found.D.tolist() == [[2, 4, 6], [1, 2, 3], [1, 2, 3]] and found.sizes == ["40", "64", "128"]
    assert np.exp(found.log_L[1, 2]) == pytest.approx([130.2, 131.2, 132.2])
    assert found.rate_cost.shape == (3,) and (found.rate_cost > 0).all()
    assert missing[0] == "x: later not complete" and "; not fitted: 0 sizes" in missing[1]
    assert law.family_of(frame, "x", with_embedding=True).N.tolist() == [4400, 7040, 14080]


@pytest.mark.parametrize("inside, measured, result", [(4, 4, "it passes"), (3, 4, "not decided yet"),
                                                      (1, 4, "it fails")])
def test_two_thirds_of_the_predictions_have_to_lie_inside(inside, measured, result):
    rows = [{"inside": "yes", "measured": 1, "off": -0.01, "power_off": 0.03}] * inside
    rows += [{"inside": "no", "measured": 1, "off": 0.01, "power_off": -0.05}] * (measured - inside)
    told = law.verdict(rows + [{}] * (5 - measured), "of both")
    assert f"{measured} were measured, and {inside} lie in" in told and f"(4 are needed: {result})" in told
    assert "the law is off by 1.00% on average" in told


def test_a_page_says_what_cannot_be_told():
    assert "this ratio rises with C, +100.0% (+41.4 .. +300.0) per doubling" == law.trend([0.5, 1, 2], "C")
    assert "this ratio falls with C, " in law.trend([-2, -1, -0.5], "C")
    for slope in [-1, -0.5, 2], [-math.inf, 1, 2], [math.nan] * 3:
        assert "falls or rises with C cannot be told" in law.trend(slope, "C")
    assert law.in_words([0.1, 0.2, math.inf]) == "cannot be told" and law.in_words([1, 2, 3]) == "2.00 (1.00 .. 3.00)"
    found = {"llama alpha": [0.1, 0.2, 0.3], "llama a": [0.4, 0.5, 0.6], "llama E": [0.009, 0.1, 0.2]}
    assert law.sentence_of_constants(found, "llama").endswith("E cannot be told from 0 (at most 0.20).")
    found["llama E"][0] = 0.011
    assert law.sentence_of_constants(found, "llama").endswith("a 0.50 (0.40 .. 0.60), E 0.01 .. 0.20.")
    beyond = fit.log_tokens([0, 1], np.array([3, 1]), np.array([4, 2, 0]))
    assert beyond.tolist() == [-math.inf, 0.5, math.inf]
    assert fit.interval([-math.inf, *range(9), math.inf]) == [-math.inf, 4, math.inf]


def test_the_ratio_at_half_the_rates_is_reported():
    """If half the rate halves the value of a token for a, a needs twice as many, wherever the curves show it."""
    rows = []
    for (model, times), half, MBs in itertools.product([("a", 1), ("b", 0.5)], (False, True), (0.5, 1, 2, 4)):
        tokens = MBs * MB * times / (1 + (half and model == "a"))
        rows.append((model, "460K" + law.HALF * half, MBs * MB, math.exp(0.5 + 9 * tokens**-0.2)))
    frame = pandas.DataFrame(rows, columns=["model", "size", "tokens", "val_loss"])
    frame = frame.assign(stage="seed", left_out="", seed=1001)
    quiet = family(noise=1e-5)
    (told,) = law.at_half_rate(frame, {"a": quiet, "b": quiet, "c": quiet}, 5)
    assert told.startswith("a's tokens over b's for the same loss at half") and "at 460K: 2.00 (" in told
    (told,) = law.at_half_rate(frame[frame.tokens > 0.5 * MB], {"a": quiet, "b": quiet}, 5)  # too few for a cubic
    assert told.endswith("at 460K: cannot be told.")


# -------------------------------------------------------------------------------------------------------------- compare

def test_the_rate_is_the_vertex_of_a_parabola():
    loss = {rate: 1.4 + 0.05 * math.log(rate / 3.1e-3) ** 2 for rate in (1e-3, 2e-3, 4e-3, 8e-3)}
    best = lambda *rates: compare.best_rate({rate: {1: loss[rate] - 0.1, 2: loss[rate] + 0.1} for rate in rates})[:2]
    assert best(*loss) == (pytest.approx(3.1e-3, rel=0.01), None)
    assert best(4e-3, 8e-3) == (4e-3, 2e-3) and best(1e-3, 2e-3) == (2e-3, 4e-3)
    assert compare.best_rate({1e-3: {1: 1.5}, 2e-3: {1: 1.4}, 4e-3: {1: math.inf, 2: 1.3}})[:2] == (2e-3, None)
    assert compare.best_rate({1e-3: {1: math.inf}}) is None and compare.best_rate({}) is None


W = np.arange(1.0, 10)  # tokens of nine documents


def draw(rng, seeds=4, sd=0.01, shift=0.0):
    """Losses (seeds, documents)."""
    return 1.4 + shift + sd * rng.standard_normal((seeds, 1)) + np.zeros(9)


def assert_is_the_t_test(difference, truth):
    interval = truth.confidence_interval(0.95)
    assert (difference.low, difference.high) == pytest.approx((interval.low, interval.high))
    assert difference.p == pytest.approx(truth.pvalue)


def test_a_difference_is_welchs_or_the_pooled_t_where_documents_agree():
    rng = np.random.default_rng(2)
    a, b = draw(rng), draw(rng, 6, shift=0.01)
    x, y = a[:, 0], b[:, 0]
    pooled = compare.pooled_sd([x, y])
    assert pooled[1] == 8 and compare.pooled_sd([x[:1], y[:1]]) is None
    d = compare.difference(a, b, W)
    assert d.documents_se == 0 and d.mean == pytest.approx(x.mean() - y.mean())
    assert_is_the_t_test(d, stats.ttest_ind(x, y, equal_var=False))
    assert_is_the_t_test(compare.difference(a, b, W, pooled), stats.ttest_ind(x, y))
    assert compare.difference(a[:1], b, W) is None and compare.difference(a[:1], b, W, (0.01, 5)).df == 5


def test_the_difference_of_pairs_is_the_paired_t():
    rng = np.random.default_rng(3)
    a = draw(rng, 6)
    b = a + draw(rng, 6, sd=0.003)  # the same seed gives nearly the same loss
    d = compare.difference(a, b, W, (1.0, 30), paired=True)
    assert_is_the_t_test(d, stats.ttest_rel(a[:, 0], b[:, 0]))
    for n in 1, 2:  # one pair has no SD, and two have hardly any
        assert compare.difference(a[:n], b[:n], W, (0.01, 5), paired=True).df == 5
    texts = a + rng.standard_normal(9)  # some documents are harder than others, for both
    effect = 0.02 * rng.standard_normal(9)  # per document: pairing removes only the noise of seeds
    d = compare.difference(texts + effect, texts, W, paired=True)
    variance, _ = compare.document_variance(W, a[:1] + effect, -a[:1])
    assert d.seeds_se < 1e-9 and d.documents_se == pytest.approx(math.sqrt(variance))


def test_documents_that_disagree_widen_a_difference():
    """Their variance equals that over many draws of documents, with equal and unequal weights, and for equal weights
    the textbook formula."""
    rng = np.random.default_rng(0)
    for w, noise in ((np.arange(1.0, 5), 0.001), (np.ones(40), 0.05), (np.ones(40), 0.01)):
        n, errors, share = len(w), [], w @ w / w.sum() ** 2
        for _ in range(300):
            effect = 0.02 * rng.standard_normal(n)
            a, b = (noise * rng.standard_normal((5, n)) for _ in range(2))
            errors.append(compare.document_variance(w, a + effect, -b)[0])
        assert np.mean(errors) == pytest.approx(0.02**2 * share, rel=0.2)
        assert compare.document_variance(w, a, -b)[1] == pytest.approx(1 / share - 1)
    d = compare.difference(a + effect, b, w, (1e-9, 8))
    clustered = np.std((a + effect - b).mean(0), ddof=1) / math.sqrt(40)
    assert 0.9 * clustered < d.se < clustered  # the noise of five seeds per document is subtracted


def test_a_negative_variance_over_documents_takes_at_most_three_tenths_of_the_seeds():
    rng = np.random.default_rng(1)
    shares = []
    for _ in range(20):
        a, b = 1 + 0.05 * rng.standard_normal((2, 3, 12))
        d = compare.difference(a, b, np.ones(12))
        variance, _ = compare.document_variance(np.ones(12), a, -b)
        shares.append(variance / d.seeds_se**2)
        assert d.se**2 == pytest.approx(d.seeds_se**2 * (1 + max(shares[-1], -0.3)))
    assert min(shares) < -0.3 and any(-0.3 < share < 0 for share in shares)


def trained(documents=None, weights=None, search=None, noise=(0, 0)):
    """A family at one size, as compare.py reads it."""
    return SimpleNamespace(documents=documents, weights=weights, search=search, search_noise=noise)


def curve_of(loss, budgets=(2**18, 2**19, 2**20), noise=0.0, rng=None):
    rng = rng or np.random.default_rng(0)
    runs = {t: {s: loss(t) + noise * rng.standard_normal() + np.zeros(9) for s in range(3)} for t in budgets}
    same = trained(runs, np.ones(9))
    return compare.Curve(same, 2**20, [same])


def power_law(tokens):
    return 1 + 60 * tokens**-0.35


def exactly(mean, half=0.0):
    """A Difference with this mean and half-width."""
    return compare.Difference(mean, mean - half, mean + half, 0, 9, 1, 0, 0)


@pytest.mark.parametrize("times", [0.4, 0.98, 1.0, 1.03, 2.0])
def test_a_multiplier_is_that_of_two_power_laws(times):
    """b at T tokens has a's loss at `times` T, so a needs `times` as many tokens as b, whichever is better."""
    a, b = curve_of(power_law), curve_of(lambda tokens: power_law(times * tokens))
    gap = power_law(2**20) - power_law(times * 2**20)
    m = compare.multiplier(exactly(gap, 0.005), a, b)
    assert m.value == pytest.approx(times, rel=0.02) and m.low < times < m.high and not m.beyond
    back = compare.multiplier(exactly(-gap, 0.005), b, a)
    assert back[:3] == pytest.approx((1 / m.value, 1 / m.high, 1 / m.low))
    half = compare.times(m, math.log(0.5))
    assert half[:3] == pytest.approx([v / 2 for v in m[:3]])
    unsure = compare.times(m, 0.0, 0.1)
    assert unsure.low < m.low and unsure.high > m.high and compare.times(None, 0.0) is None


def test_a_multiplier_that_the_curves_do_not_show_is_none():
    a = curve_of(power_law)
    d = exactly(-0.6, 0.01)
    beyond = compare.multiplier(d, a, a)
    assert beyond.beyond and beyond.value < 0.2
    assert compare.multiplier(None, a, a) is compare.multiplier(d, a, curve_of(power_law, [2**20])) is None
    rising = curve_of(lambda tokens: 1 + 1e-4 * tokens / 2**20)  # overfits: the longest run is the worst
    noisy = curve_of(lambda tokens: 1.0, noise=0.01)
    for curves in (rising, a), (noisy, a), (a, rising):
        assert compare.multiplier(d, *curves) is None
    late = curve_of(lambda tokens: power_law(min(tokens, 2**20)) + (tokens > 2**20), [2**18, 2**19, 2**20, 2**21])
    assert compare.multiplier(d, late, late).value < 0.5  # overfits only beyond this budget
    assert late.rise(0) == 0  # although no parabola goes through four points
    assert compare.multiplier(exactly(-50.0), a, a) is None
    for errors in 1.9, 2.1:
        falls = {s: np.full(9, errors / 3**0.5 + s) for s in (-1, 0, 1)}
        same = trained({2**19: falls, 2**20: dict.fromkeys(falls, np.zeros(9))}, np.ones(9))
        assert compare.Curve(same, 2**20, [same]).known == (errors > 2)


def test_the_error_of_a_curve_is_in_the_multiplier():
    rng = np.random.default_rng(0)
    d = exactly(-0.2)
    truth = compare.multiplier(d, curve_of(power_law), curve_of(power_law)).value
    held = 0
    for _ in range(200):
        noisy = curve_of(power_law, noise=0.004, rng=rng)
        m = compare.multiplier(d, noisy, noisy)
        held += m.low <= truth <= m.high
    assert 0.9 < held / 200 < 0.99  # with three seeds, a normal quantile would miss 15%
    for gap in (0.2, -0.2):  # only the better family's curve is used
        m = compare.multiplier(exactly(gap), noisy, curve_of(power_law))
        assert (m.low < m.value < m.high) == (gap < 0)
    change = 0.02 * rng.standard_normal(40)  # differs by document, so the curve depends on the draw of documents
    same = trained({2**19: {s: 1 + change for s in range(3)}, 2**20: {s: np.ones(40) for s in range(3)}}, np.ones(40))
    other = trained({2**19: {s: 0.1 * s * np.ones(40) for s in range(3)}, 2**20: same.documents[2**20]})
    variance = change.var(ddof=1) / 40
    for families, of_seeds in ([same], 0.0), ([other], 0.1**2 / 3):  # all families of this size
        assert compare.Curve(same, 2**20, families).se[0] ** 2 == pytest.approx(variance + of_seeds)


def search_of(best, noise):
    """A search along a true parabola around `best`, with four seeds at different levels; noise: (seeds, rates)."""
    rates = [1e-3, 2e-3, 4e-3, 8e-3]
    losses = 1.6 + 0.05 * np.log(np.array(rates) / best) ** 2 + np.arange(4)[:, None] + 0.009 * noise
    return {rate: dict(enumerate(column)) for rate, column in zip(rates, losses.T.tolist(), strict=True)}


def test_errors_of_rates_cost_a_sweep_what_the_formula_says():
    """The cost is curvature / loss times a vertex's variance, or times the scatter of three rates around a line."""
    search = search_of(2.8e-3, np.random.default_rng(0).standard_normal((4, 4)))
    known = compare.look_at_search(search, None)
    share = known.curvature / min(np.mean([*losses.values()]) for losses in search.values())
    two = {64: 4e-3, 128: 1e-3}
    costs = law.rate_costs({64: search, 128: search}, two, np.array([64, 4096]))
    assert costs == pytest.approx([share * known.variance] * 2)
    rates = two | {256: 1e-3}
    x = np.log([*rates])
    y = np.log([*rates.values()])
    off = y - np.polyval(np.polyfit(x, y, 1), x)
    away = 1 / 3 + (math.log(4096) - x.mean()) ** 2 / (3 * x.var())  # the line is less certain there
    costs = law.rate_costs({64: search}, rates, np.array([128, 4096]))
    assert costs == pytest.approx(share * (off @ off) * np.array([1, away]))


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_the_error_of_the_chosen_rates_is_what_they_cost(correlation):
    """The truth is what the rates chosen in many searches cost on the true parabola."""
    rng = np.random.default_rng(4)
    costs, told = [], []
    for _ in range(600):
        best = 2.8e-3 * 2 ** rng.uniform(-0.3, 0.3)
        common, *own = rng.standard_normal((3, 4, 4))
        searches = [search_of(best, correlation**0.5 * common + (1 - correlation) ** 0.5 * noise) for noise in own]
        rates = [compare.best_rate(search).rate for search in searches]
        costs.append(0.05 * (math.log(rates[0] / best) ** 2 - math.log(rates[1] / best) ** 2))
        told.append(compare.rate_variance(*(trained(search=search) for search in searches))[0])
    ratio = np.mean(told) / np.mean(np.square(costs))
    assert 0.7 < ratio < (1.4 if correlation == 0 else 2.5)  # shared noise cancels, except in the estimates


def test_the_variance_of_rates_is_that_of_a_parabolas_vertex():
    """With one seed per rate, c (e_a^2 - e_b^2) has the second moment 4 c^2 var(e)^2. Slopes are finite differences."""
    rates, losses = np.array([1e-3, 2e-3, 4e-3, 8e-3]), np.array([1.62, 1.6, 1.61, 1.7])

    def vertex(y):
        a, b, _ = np.polyfit(np.log(rates[:3]), y, 2)
        return -b / (2 * a)

    curvature = np.polyfit(np.log(rates[:3]), losses[:3], 2)[0]
    slopes = np.array([(vertex(losses[:3] + h) - vertex(losses[:3] - h)) / 2e-6 for h in 1e-6 * np.eye(3)])
    once = {rate: {1: loss} for rate, loss in zip(rates, losses, strict=True)}
    quiet, loud = (trained(search=once, noise=noise) for noise in ((0.5e-4, 6), (1.5e-4, 6)))
    variance, df = compare.rate_variance(quiet, loud)
    assert variance == pytest.approx(4 * (curvature * 1e-4 * slopes @ slopes) ** 2 / (1 + 2 / 12), rel=1e-5)
    assert df == 12 / 4


def test_the_error_of_rates_that_a_search_cannot_tell_is_none():
    rng = np.random.default_rng(5)
    inside, edge = (search_of(best, rng.standard_normal((4, 4))) for best in (2.8e-3, 5e-4))
    once = {rate: {1: losses[0]} for rate, losses in inside.items()}
    neighbour = inside | {2e-3: {seed: math.inf for seed in range(4)}}
    for a, b in (inside, edge), (inside, {}), (once, once), (inside, neighbour):
        assert compare.rate_variance(trained(search=a), trained(search=b)) is None
    a, b = draw(rng), draw(rng)
    without, with_it = (compare.difference(a, b, W, rates=rates) for rates in (None, (1e-4, 3.0)))
    assert with_it.se**2 == pytest.approx(without.se**2 + 1e-4) and with_it.rates_se == pytest.approx(0.01)


def test_groups_are_pooled_if_bartletts_test_allows_it():
    rng = np.random.default_rng(6)
    for scale in (1, 1.5, 2.5, 4):
        groups = [rng.standard_normal(6), scale * rng.standard_normal(9), rng.standard_normal(4)]
        assert (compare.pooled_sd(groups) is None) == (stats.bartlett(*groups).pvalue < 0.05)


@pytest.mark.parametrize("design", [dict(seeds=3, correlation=None, search=1),
                                    dict(seeds=16, correlation=0.95, times=1.3)])
def test_an_interval_misses_the_truth_in_one_of_twenty_duels(design):
    assert 0.015 < duel_simulation.misses(500, **design) < 0.085


def test_a_winner_needs_to_beat_every_other_family():
    p = {"near": 0.03, "far": 0.001, "other": 0.02}
    told = lambda a, b: p[b]
    four = {"x": 3.0, "near": 3.1, "far": 3.5, "other": 3.2}
    assert compare.winner({"x": 3.0, "far": 3.5}, told).family == "x"
    best = compare.winner(four, told)
    # Holm by hand: 3 x 0.001, 2 x 0.02, and 0.03, which is raised to the value before it
    assert best.family == "x" and "p <= 0.04 after" in best.reason
    p["other"] = 0.03
    assert compare.winner(four, told).family is None
    assert "1 families with a loss" in compare.winner({"x": 3.0}, told).reason
    p["near"] = None
    assert "cannot be tested against near" in compare.winner({"x": 3.0, "near": 3.1}, told).reason
