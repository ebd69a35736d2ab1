"""bench/step.py and bench/generate.py at tiny sizes: options, records, and what happens to a family that fails.

Nearly all of it runs in this process, with a stand-in for the process that a model has of its own; two tests start real
ones. The times mean nothing here, and none goes to results/.
"""

import gc
import json
import math
import os
import time
from types import SimpleNamespace

import pytest
import torch

from bench import generate, step
from bench.measure import LeftOut, imported, in_one_line
from model import FAMILIES, LM, Longhorn, ModelConfig, SwiGLU

TINY = ["--n_layer=1", "--n_embd=32", "--n_head=2", "--block_size=16", "--vocab_size=64", "--threads=1"]


class Here:
    """bench.step.Worker without the process."""

    def __init__(self, make, spec, limit_s=0):
        try:
            self.worker = make(spec)
            self.begun = self.worker.about()
        except Exception as error:
            self.begun = {"reason": str(error) if isinstance(error, LeftOut) else in_one_line(error)}

    def ask(self, method, *arguments, limit_s):
        try:
            return getattr(self.worker, method)(*arguments)
        except Exception as error:
            return {"reason": in_one_line(error)}

    def end(self):
        self.worker = None


@pytest.fixture(autouse=True)
def as_before(monkeypatch, threads):
    monkeypatch.setattr(gc, "collect", lambda *_: 0)  # of all that the tests hold: 0.3 s before each time taken


@pytest.fixture
def here(monkeypatch):
    """Both scripts in this process; keep_freed_memory would last beyond the test."""
    monkeypatch.setattr(step, "keep_freed_memory", lambda: None)
    for module, name in ((step, "run_rounds"), (generate, "run_contexts")):
        f = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, f=f: f(*a, worker=Here))


def config(model="longhorn", **values):
    return ModelConfig(model=model, **dict(n_layer=1, n_embd=32, n_head=2, block_size=16, vocab_size=64) | values)


def test_options():
    assert step.parse([]).families == list(FAMILIES)
    assert step.parse(["--families=mamba,llama,mamba"]).families == ["mamba", "llama"]
    paper = step.parse(["--size=350M", "--batch_size=2"])
    assert (paper.n_layer, paper.n_embd, paper.n_head, paper.vocab_size, paper.batch_size) == (24, 1024, 16, 50304, 2)
    args = generate.parse(["--contexts=64,16,64", "--size=120M"])
    assert args.contexts == [16, 64] and args.batch_size == 1 and args.n_embd == 768


@pytest.mark.parametrize("parse, argument, words", [
    (step.parse, "--families=llama,rnn", "--families=rnn: no such family; they are longhorn, mamba"),
    (step.parse, "--families=", "no such family"),
    (step.parse, "--batch_size=0", "--batch_size=0: must be at least 1"),
    (step.parse, "--rounds=0", "--rounds=0: must be at least 1"),
    (step.parse, "--budget_s=nan", "--budget_s=nan: must be at least 1"),
    (step.parse, "--save --n_embd=64", "--save with --n_embd: results/ holds the named sizes only; choose a file"),
    (step.parse, "--device=cuda", "PyTorch sees no GPU; use --device=cpu"),
    (step.parse, "--threads=0", "--threads=0: must be at least 1"), (step.parse, "--size=1B", "invalid choice"),
    (generate.parse, "--contexts=1K", "--contexts=1K: must be whole numbers"),
    (generate.parse, "--contexts=0", "--contexts=0 .. 0: must be in 1 .. 1,000,000,000"),
    (generate.parse, "--new_tokens=0", "--new_tokens=0: must be at least 1")])
def test_a_bad_option_gets_one_line(parse, argument, words, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        parse(argument.split())
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert end.value.code == 2 and words in last and len(last) < 250


def test_rows_of_a_step(here, tmp_path, capsys):
    out = tmp_path / "step.json"
    assert step.main([*TINY, "--families=longhorn,llama", "--rounds=3", f"--out={out}"]) == 0
    record = json.loads(out.read_text())
    assert record["finished"] and record["benchmark"] == "step" and record["threads"] == 1
    assert record["shape"]["n_embd"] == 32 and "commit" in record["environment"]
    longhorn, llama = record["rows"]
    lm = LM(config("llama"))
    assert llama["parameters"] == lm.parameter_count()["total"]
    assert llama["flops_per_token"] == lm.flops_per_token()["total"]
    assert llama["times_llama"] == 1 and llama["mfu"] is None and llama["seconds"]["runs"] == 3
    ratio = longhorn["seconds"]["median_seconds"] / llama["seconds"]["median_seconds"]
    assert longhorn["times_llama"] == pytest.approx(ratio)
    for r in record["rows"]:
        assert r["last_loss"] < r["first_loss"] < 5 and r["tokens_per_second"] == pytest.approx(
            4 * 16 / r["seconds"]["median_seconds"])
        assert r["flops_per_second"] == pytest.approx(r["tokens_per_second"] * r["flops_per_token"])
    text = capsys.readouterr().out
    assert "GFLOP/s" in text and f"in short: tokens/s: longhorn {longhorn['tokens_per_second']:,.0f}" in text


def test_real_processes_and_a_family_that_raises(tmp_path, capsys):
    # 3 heads do not divide 32 channels: LLaMA's own message is its reason, and Longhorn is measured all the same
    out = tmp_path / "step.json"
    assert step.main([*TINY, "--n_head=3", "--families=llama,longhorn", "--rounds=2", f"--out={out}"]) == 1
    llama, longhorn = json.loads(out.read_text())["rows"]
    assert llama["reason"].startswith("ValueError: n_embd 32 is no multiple of n_head 3") and "seconds" not in llama
    assert longhorn["seconds"]["runs"] == 2 and longhorn["times_llama"] is None
    if os.path.exists("/proc/self/clear_refs"):
        assert longhorn["peak_bytes"] is None or 0 <= longhorn["peak_bytes"] < 2**28
    assert "n_embd 32 is no multiple of n_head 3" in capsys.readouterr().out


class Sleeper:
    def __init__(self, spec):
        if spec == "raise":
            raise LeftOut("not installed")

    def about(self):
        return {}

    def sleep(self, seconds):
        time.sleep(seconds)
        return {"slept": seconds}

    def die(self):
        os._exit(7)


def test_a_worker_that_dies_or_takes_too_long():
    assert step.Worker(Sleeper, "raise").begun["reason"] == "not installed"
    one, two = step.Worker(Sleeper, None), step.Worker(Sleeper, None)
    assert one.ask("sleep", 0, limit_s=20)["slept"] == 0
    assert one.ask("sleep", 60, limit_s=0.3) == {"reason": "ran past its limit of 0 s"} and not one.process.is_alive()
    assert one.ask("sleep", 0, limit_s=1)["reason"].startswith("its process ended")
    assert two.ask("die", limit_s=20)["reason"] == "its process ended with status 7"


def test_a_family_that_learns_nothing_gets_no_time(here, monkeypatch, capsys):
    calm, honest = [], step.Trial.step

    def stuck(self):
        calm.append(honest(self))
        return 4.0 if self.spec["name"] == "llama" else math.nan if len(calm) > 8 else calm[-1]

    monkeypatch.setattr(step.Trial, "step", stuck)
    assert step.main([*TINY, "--families=llama,longhorn", "--rounds=4"]) == 1
    text = capsys.readouterr().out
    assert "the loss does not fall: 4.0000 -> 4.0000" in text and "the loss became nan" in text


def test_slow_models_sit_out(here, monkeypatch, capsys):
    def turn(self, untimed, timed):
        clock[0] += {"llama": 0.5, "longhorn": 40.0}[self.spec["name"]] * (untimed + timed)
        losses = [next(falling) for _ in range(untimed + timed)]
        return {"losses": losses, "seconds": [1.0] * timed, "peak_bytes": None}

    clock, falling = [0.0], iter(range(100, 0, -1))
    monkeypatch.setattr(step.Trial, "turn", turn)
    monkeypatch.setattr(step.time, "perf_counter", lambda: clock[0])
    step.main([*TINY, "--families=llama,longhorn", "--rounds=4", "--budget_s=90"])
    assert "longhorn: 2 of 4 rounds: another would take it over 90 s (--budget_s)" in capsys.readouterr().out


def test_absent_peers_are_said(here, monkeypatch, tmp_path, capsys):
    def missing(module, name):
        raise LeftOut("not installed")

    monkeypatch.setattr(step, "imported", missing)
    out = tmp_path / "step.json"
    assert step.main([*TINY, "--families=mamba", "--rounds=1", "--with_peers", f"--out={out}"]) == 0
    rows = {r["name"]: r for r in json.loads(out.read_text())["rows"]}
    assert list(rows) == ["mamba", "mamba, mambapy", "mamba, transformers"] and "seconds" in rows["mamba"]
    assert rows["mamba, mambapy"]["reason"] == rows["mamba, transformers"]["reason"] == "not installed"
    assert capsys.readouterr().out.count("not installed") == 2
    with pytest.raises(LeftOut, match="not installed"):
        imported("no_such_package.mamba", "Mamba")


@pytest.mark.parametrize("family", ["llama", "mamba", "rwkv4"])
def test_peers_have_our_parameters(family):
    pytest.importorskip("transformers")
    ours = config(family, n_layer=2)
    module, logits = step.peer_model("transformers", ours)
    want, got = LM(ours).parameter_count()["total"], sum(p.numel() for p in module.parameters())
    assert abs(got / want - 1) < 0.01 and logits(torch.zeros(1, 5, dtype=torch.long)).shape == (1, 5, 64)


def trial_of(family="longhorn", peer=None):
    return step.Trial({"name": "x", "config": config(family), "peer": peer, "batch_size": 2, "device": "cpu",
                       "dtype": "float32", "compile": False, "threads": 1})


def decays_matrices_only(trial):
    decayed, rest = trial.optimizer.param_groups
    assert decayed["weight_decay"] == 0.1 and rest["weight_decay"] == 0 and decayed["betas"] == (0.9, 0.95)
    assert all(p.dim() == 2 for p in decayed["params"]) and len(decayed["params"]) > 2
    return decayed["params"]


def test_a_peer_takes_the_same_step():
    pytest.importorskip("transformers")
    trial = trial_of("llama", "transformers")
    decays_matrices_only(trial)
    first = trial.step()
    assert trial.step() < first


def test_a_step_is_train_pys():
    """The optimizer has AdamW's groups, with weight decay on the matrices only."""
    trial = trial_of()
    assert trial.model.embed.weight in set(decays_matrices_only(trial))
    before = [p.detach().clone() for p in trial.model.parameters()]
    first, again = trial.step(), trial.step()
    assert again < first and all(p.grad is None for p in trial.model.parameters())
    assert not any(torch.equal(p, old) for p, old in zip(trial.model.parameters(), before, strict=True))
    tokens = trial.tokens.flatten()
    assert tokens.shape == (2 * 17,) and (tokens < 8).sum() > (tokens >= 32).sum()  # a few tokens are frequent


def test_mfu_and_ratios():
    llama, mamba = ({"name": name, "seconds": {"median_seconds": seconds}, "flops_per_token": 1e6,
                     "tokens_per_second": 1e3 / seconds} for name, seconds in (("llama", 0.01), ("mamba", 0.015)))
    rows = step.derive([llama, mamba, {"name": "gla", "reason": "no"}], peak=1e12)
    assert rows[0]["mfu"] == pytest.approx(0.1) and rows[1]["times_llama"] == pytest.approx(1.5)
    assert "mfu" not in rows[2]
    assert step.derive([mamba], None)[0]["times_llama"] is None


def test_rows_of_generation(here, tmp_path, capsys):
    out = tmp_path / "generate.json"
    assert generate.main([*TINY, "--families=llama,longhorn", "--contexts=8,40", "--chunk=16", "--new_tokens=5",
                          f"--out={out}"]) == 0
    record = json.loads(out.read_text())
    assert record["finished"] and record["contexts"] == [8, 40] and record["chunk"] == 16
    llama, longhorn = record["rows"]
    assert [c["state_bytes"] for c in llama["contexts"]] == [4 * 2 * 32 * 8, 4 * 2 * 32 * 40]
    assert [c["state_bytes"] for c in longhorn["contexts"]] == [4 * LM(config()).state_size()] * 2
    for c in llama["contexts"] + longhorn["contexts"]:
        assert c["decode"]["new_tokens"] == 5 and c["state_bytes_held"] >= c["state_bytes"]
        assert c["decode"]["tokens_per_second"] == pytest.approx(1 / c["decode"]["seconds"]["median_seconds"])
        assert c["prefill"]["tokens_per_second"] == pytest.approx(c["context"] / c["prefill"]["seconds"])
    assert out.with_suffix(".png").stat().st_size > 10000
    assert "ms per token" in capsys.readouterr().out


@pytest.mark.parametrize("family", FAMILIES)
def test_check_of_the_state(family):
    lm = LM(config(family)).eval()
    assert generate.check(lm)[0] is None and generate.check(lm, "bfloat16")[0] is None


def test_check_fails_for_a_broken_state(monkeypatch, here, capsys):
    lm, forward = LM(config()).eval(), Longhorn.forward

    def forgets(self, u, state=None):
        y, after = forward(self, u, state)
        return y, after and (after[0], torch.zeros_like(after[1]))

    monkeypatch.setattr(Longhorn, "forward", forgets)
    for dtype in ("float32", "bfloat16"):
        assert generate.check(lm, dtype)[0].startswith("the state is wrong: logits")
    assert generate.main([*TINY, "--families=longhorn,llama", "--contexts=8", "--new_tokens=2"]) == 1
    text = capsys.readouterr().out
    assert "longhorn        the state is wrong" in text and "llama                8" in text


def test_check_fails_for_another_token():
    """Logits that agree to 4e-5, but with another token on top, by more than their rounding."""

    class Two:
        config, embed = SimpleNamespace(vocab_size=64), SimpleNamespace(weight=torch.zeros(1))

        def initial_state(self, batch_size):
            return []

        def __call__(self, idx, state=None, last_only=False):
            logits = torch.full((*idx.shape, 64), 100.0)
            logits[..., 0 if state is None else 1] += 0.02
            return (logits, None) if state is None else (logits[:, -1:], None, [])

    assert "not the most likely one" in generate.check(Two())[0]


def test_check_fails_for_nan(monkeypatch):
    monkeypatch.setattr(SwiGLU, "forward", lambda self, x, state=None: (x * math.nan, state))
    assert generate.check(LM(config("llama")).eval())[0].startswith("the state is wrong: logits nan")


def test_contexts_over_the_budget_are_left_out(here, monkeypatch, tmp_path, capsys):
    def read(self, context):
        clock[0] += 1.0 * context
        return {"seconds": context, "last_chunk_seconds": 20.0, "state_bytes": 8, "state_bytes_held": 8,
                "peak_bytes": None}

    clock = [0.0]
    monkeypatch.setattr(generate.Reader, "read", read)
    monkeypatch.setattr(generate.Reader, "write", lambda self, n: {"seconds": [0.1] * n, "peak_bytes": None})
    monkeypatch.setattr(generate.time, "perf_counter", lambda: clock[0])
    out = tmp_path / "record.json"
    assert generate.main([*TINY, "--families=longhorn", "--contexts=16,64,256", "--chunk=16", "--budget_s=100",
                          f"--out={out}"]) == 0
    contexts = json.loads(out.read_text())["rows"][0]["contexts"]
    assert ["left_out" in c for c in contexts] == [False, False, True]
    assert "left out: 240 s or more needed, 20 s left (--budget_s)" in capsys.readouterr().out
