"""train.py from the outside: its command line, its records, and that nothing but the settings decides the result.

The surprise: most runs happen in this process, through runpy, as `python train.py ...` would run them, since importing
torch takes longer than training a tiny model. Signals are sent to real processes; several of them, and kills: test_chaos.py.

    python -m pytest tests/test_train.py
"""

import contextlib
import dataclasses
import io
import json
import math
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import checkpoint
import configurator
import export
import faults
import model
import records
import train
from configurator import ConfigError
from data import loader
from experiments.scaling import sweep
from model import LM
from train import TrainConfig

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(train.__file__).resolve().parent
quick = settings(deadline=None, max_examples=200, database=None)

# 12 windows a step, 124 in an epoch: ten steps cross into the second one
TINY = {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 32, "batch_tokens": 384, "batch_size": 12, "max_iters": 12,
        "learning_rate": 3e-3, "eval_interval": 5, "log_interval": 1, "dtype": "float32", "device": "cpu"}
LONG = {**TINY, "n_embd": 16, "block_size": 16, "batch_tokens": 64, "batch_size": 4, "max_iters": 200, "learning_rate": 1e-3,
        "eval_interval": 75, "checkpoint_interval": 20}  # a second or two, to be disturbed


def write_data(folder, seed=0, train=4000, val=700, vocab_size=256, **meta):
    """A prepared folder of bytes with something to learn in them; returns its path."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    words = [rng.integers(97, 123, size=n) for n in rng.integers(2, 7, size=20)]
    text = np.concatenate([np.append(words[i], 32) for i in rng.integers(20, size=train + val)])
    splits = {"train": loader.write_split(folder / "train.bin", [text[:train]], vocab_size),
              "val": loader.write_split(folder / "val.bin", [text[train:train + val]], vocab_size)}
    meta = {"dataset": "words", "vocab_size": vocab_size, "tokenizer": "bytes", "bytes_per_token": 1, "splits": splits, **meta}
    loader.finish(folder, meta)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data") / "words")


def arguments(data, out, base=TINY, **changes):
    return [f"--{key}={value}" for key, value in {"dataset": data, "out_dir": out, **base, **changes}.items()]


def no_picture(folder):
    """For records.draw_loss, which takes longer than most runs here."""
    (Path(folder) / "loss.png").touch()


def run(argv, LM=LM, draw_loss=no_picture):
    """`python train.py ARGV` in this process: its exit code, out, err. `LM` stands in for the model's class."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        with mock.patch.object(sys, "argv", ["train.py", *argv]), mock.patch.object(model, "LM", LM), \
                mock.patch.object(records, "draw_loss", draw_loss), \
                contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return SimpleNamespace(code=code, out=out.getvalue(), err=err.getvalue())


def succeed(argv, LM=LM, **how):
    result = run(argv, LM, **how)
    assert result.code == 0, result.err
    return result


def refuse(argv, *words, LM=LM):
    """The run ends with exit code 2 and one line that holds all the words; returns the line."""
    result = run(argv, LM)
    lines = [line for line in result.err.splitlines() if not line.startswith(("scan:", "native kernels:"))]
    assert result.code == 2 and len(lines) == 1, f"exit code {result.code}: {result.err}"
    for word in words:
        assert word in lines[0], f"{word!r} is not in {lines[0]!r}"
    return lines[0]


@pytest.fixture
def start():
    """start(argv): the same as a process of its own; none outlives its test."""
    started = []

    def start(argv, launcher=(), **env):
        started.append(subprocess.Popen(
            [sys.executable, *launcher, str(ROOT / "train.py"), *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env}, start_new_session=True))
        return started[-1]
    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the launcher's children too
        process.communicate()


def events(out, kind="train"):
    """The log's events of a kind, by step; none twice."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    chosen = [e for e in lines if e["event"] == kind]
    assert len({e["step"] for e in chosen}) == len(chosen), "a step stands in the log twice"
    return {e["step"]: e for e in chosen}


def losses(out, key="train_loss"):
    return [e[key] for e in events(out).values()]


def saved(out):
    return checkpoint.load(out / "checkpoint.safetensors")


def parts(out):
    """((tensors, skeleton) of what a checkpoint holds, its step)."""
    tensors, meta = saved(out)
    return (tensors, meta["skeleton"]), meta["step"]


def assert_same_run(out, undisturbed):
    """Every tensor of the final checkpoints, random generators included, and every number that training logs, bit for bit."""
    (a, step_a), (b, step_b) = (parts(folder) for folder in (out, undisturbed))
    assert step_a == step_b and a[1] == b[1], "a number, or what there is at all, differs"
    assert [name for name in a[0] if not torch.equal(a[0][name], b[0][name])] == []
    for key in ("step", "tokens", "train_loss", "lr", "grad_norm"):
        assert losses(out, key) == losses(undisturbed, key), key
    assert [e["val_loss"] for e in events(out, "eval").values()] == [e["val_loss"] for e in events(undisturbed, "eval").values()]
    both = [json.loads((folder / "result.json").read_text()) for folder in (out, undisturbed)]
    for key in ("val_loss", "val_bits_per_byte", "tokens", "steps", "skipped_steps", "parameters"):
        assert both[0][key] == both[1][key], key


def stops_at(call, number=signal.SIGTERM):
    """An LM that asks its own process to stop during its n-th training forward."""
    class Stopping(LM):
        calls = 0

        def forward(self, idx, targets=None, **how):
            Stopping.calls += self.training
            if self.training and Stopping.calls == call:
                os.kill(os.getpid(), number)
            return super().forward(idx, targets, **how)
    return Stopping


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The folder of an undisturbed run of TINY."""
    out = tmp_path_factory.mktemp("whole") / "run"
    succeed(arguments(data, out), draw_loss=records.draw_loss)
    return out


# ------------------------------------------------------------------------------------------------------- pure functions

@quick
@given(max_iters=st.integers(3, 2000), warmup=st.integers(-1, 300), peak=st.floats(1e-6, 1), low=st.floats(0, 1))
def test_learning_rate(max_iters, warmup, peak, low):
    config = TrainConfig(max_iters=max_iters, warmup_iters=min(warmup, max_iters - 2), learning_rate=peak, min_lr=low * peak)
    rates = [train.learning_rate(step, config) for step in range(max_iters)]
    warm = train.warmup_steps(config)
    assert warm == (round(max_iters / 20) if warmup < 0 else config.warmup_iters)
    assert 0 < rates[0] and rates[-1] == low * peak  # not about
    assert max(rates) <= peak * (1 + 1e-15) and (warm == 0 or rates[warm - 1] == pytest.approx(peak, rel=1e-15))
    assert rates.count(peak) <= 1 or low > 0.999  # the peak is not held
    assert all(a < b for a, b in zip(rates[:warm], rates[1:warm], strict=False))
    assert all(a >= b for a, b in zip(rates[warm:], rates[warm + 1:], strict=False))


def test_learning_rate_by_default_is_the_papers():
    config = TrainConfig(max_iters=4800, learning_rate=6e-4)
    assert train.warmup_steps(config) == 240
    assert train.learning_rate(0, config) == pytest.approx(6e-4 / 240)
    assert train.learning_rate(119, config) == pytest.approx(3e-4)
    assert train.learning_rate(4799, config) == 6e-4 / 10
    middle = (240 + 4799) // 2
    assert train.learning_rate(middle, config) == pytest.approx((6e-4 + 6e-5) / 2, rel=1e-3)


@quick
@given(windows=st.integers(1, 300), world=st.integers(1, 16), block=st.integers(1, 64))
def test_ranks_share_a_step(windows, world, block):
    config = TrainConfig(batch_tokens=windows * block, block_size=block)
    if windows % world:
        with pytest.raises(ConfigError, match=f"{world} processes cannot share") as caught:
            train.share_of_step(config, 0, world)
        better = int(str(caught.value).split("batch_tokens ")[-1].split()[0])
        train.share_of_step(dataclasses.replace(config, batch_tokens=better), 0, world)  # the way out is one
        return
    shares = [train.share_of_step(config, rank, world) for rank in range(world)]
    assert all(count == windows for count, _ in shares)
    assert [w for _, share in shares for w in range(windows)[share]] == list(range(windows))


def test_peak_flops_by_the_drivers_name():
    known = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H200": 989e12, "NVIDIA A100-SXM4-80GB": 312e12,
             "cpu": None, None: None, "NVIDIA GTX 750": None}
    assert {name: train.peak_flops(name) for name in known} == known


def test_what_may_change_on_resume():
    before = {"learning_rate": 1e-3, "n_layer": 2, "eval_interval": 5, "out_dir": "a"}
    assert train.refuse_changes(before, dict(before)) == {}
    older = {key: value for key, value in before.items() if key != "mlp_multiple"}
    assert train.refuse_changes(older, {**older, "mlp_multiple": 256}) == {}  # an option that the checkpoint did not know yet
    with pytest.raises(ConfigError, match="mlp_multiple 256 -> 64"):
        train.refuse_changes(older, {**older, "mlp_multiple": 64})
    harmless = train.refuse_changes(before, {**before, "eval_interval": 7, "out_dir": "b"})
    assert harmless == {"eval_interval": (5, 7), "out_dir": ("a", "b")}
    with pytest.raises(ConfigError, match="learning_rate 0.001 -> 0.01, n_layer 2 -> 3") as caught:
        train.refuse_changes(before, {**before, "learning_rate": 1e-2, "n_layer": 3, "eval_interval": 7})
    assert "eval_interval" not in str(caught.value)
    assert {f.name for f in dataclasses.fields(TrainConfig)} >= train.HARMLESS
    assert not train.HARMLESS & {"model", "n_embd", "block_size", "seed", "batch_tokens", "max_iters", "learning_rate",
                                 "weight_decay", "dtype", "grad_clip", "warmup_iters", "min_lr", "vocab_size", "init_from"}


@pytest.mark.parametrize("file", sorted((ROOT / "config").glob("*.py")), ids=lambda path: path.stem)
def test_config_files(file):
    config = configurator.load(TrainConfig, [str(file)])
    train.check(config)
    train.share_of_step(config, 0, 1)
    if file.stem.endswith(("_120m", "_350m")):
        table5 = {"120m": {"n_layer": 12, "n_embd": 768, "n_head": 12, "max_iters": 4800, "learning_rate": 6e-4},
                  "350m": {"n_layer": 24, "n_embd": 1024, "n_head": 16, "max_iters": 13500, "learning_rate": 3e-4}}
        table5 = {**table5[file.stem[-4:]], "block_size": 1024, "batch_tokens": 524288, "vocab_size": 50304, "beta1": 0.9,
                  "beta2": 0.95, "weight_decay": 0.1, "grad_clip": 1.0, "dataset": "openwebtext"}
        assert {key: getattr(config, key) for key in table5} == table5
        assert config.model == file.stem.split("_")[0]
        assert train.learning_rate(config.max_iters - 1, config) == pytest.approx(config.learning_rate / 10)
        assert train.warmup_steps(config) == config.max_iters // 20
        assert train.share_of_step(config, 7, 8)[1] == slice(448, 512)  # eight GPUs
        assert 64 % config.batch_size == 0
        for world in (1, 2, 4, 8):
            train.share_of_step(dataclasses.replace(config, block_size=4096), 0, world)


# -------------------------------------------------------------------------------------------------------------- records

def test_records_of_a_finished_run(whole, data):
    files = ["best.safetensors", "checkpoint-10.safetensors", "checkpoint.safetensors",
             "config.json", "log.jsonl", "loss.png", "result.json"]
    assert sorted(p.name for p in whole.iterdir()) == files
    record = json.loads((whole / "config.json").read_text())
    assert set(record["config"]) == {f.name for f in dataclasses.fields(TrainConfig)}
    assert {key: record["config"][key] for key in TINY} == TINY
    assert record["config"]["vocab_size"] == 256 and record["config"]["dataset"] == str(data)
    derived, where = record["derived"], record["environment"]
    assert derived["windows_per_step"] == 12 and derived["accumulation"] == 1 and derived["processes"] == 1
    assert derived["tokens"] == 12 * 384 and derived["epochs"] == pytest.approx(144 / 124) and derived["warmup_steps"] == 1
    assert derived["device_name"] == "cpu" and record["config"]["dtype"] == "float32" and derived["train_tokens"] == 4000
    assert "embed.weight" in derived["decayed"] and derived["parameters"]["total"] > 0
    assert {"commit", "uncommitted_changes", "command", "python", "torch", "system", "cpu", "cores", "gpu", "cuda"} <= set(where)
    assert where["torch"] == torch.__version__ and "train.py" in where["command"] and "--max_iters=12" in where["command"]
    assert record["data"]["splits"]["train"]["sha256"] and record["time"]

    log = [json.loads(line) for line in (whole / "log.jsonl").read_text().splitlines()]
    assert [(e["event"], e["step"]) for e in log if e["event"] == "eval"] == [("eval", 5), ("eval", 10), ("eval", 12)]
    trained = events(whole)
    assert list(trained) == list(range(1, 13))
    for step, e in trained.items():
        assert set(e) == {"event", "step", "tokens", "train_loss", "lr", "grad_norm", "tokens_per_second", "memory_bytes",
                          "seconds"}
        assert e["tokens"] == 384 * step and e["grad_norm"] > 0 and e["memory_bytes"] > 1e7 and e["tokens_per_second"] > 0
    assert trained[12]["lr"] == 3e-3 / 10 and trained[12]["train_loss"] < trained[1]["train_loss"] - 0.5
    seconds = losses(whole, "seconds")
    assert seconds == sorted(seconds)
    for e in events(whole, "eval").values():
        assert set(e) == {"event", "step", "tokens", "val_loss", "val_tokens", "seconds"} and e["val_tokens"] == 699

    result = json.loads((whole / "result.json").read_text())
    assert result["val_loss"] == events(whole, "eval")[12]["val_loss"] and result["val_tokens"] == 699
    assert result["val_bits_per_byte"] == pytest.approx(result["val_loss"] / math.log(2))
    assert result["tokens"] == 4608 and result["steps"] == 12 and result["skipped_steps"] == 0
    assert result["seconds"] >= seconds[-1]
    assert result["flops"] == derived["flops_per_token"] * 4608 and result["parameters"] == derived["parameters"]["total"]
    assert result["best_val_loss"] <= result["val_loss"] and result["commit"] == where["commit"]
    assert (whole / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    tensors, meta = saved(whole)
    assert meta["step"] == 12 and meta["tokens"] == 4608 and meta["config"] == record["config"]


def test_the_evaluation_is_the_mean_over_every_validation_token(whole, data):
    tensors, meta = saved(whole)
    lm = LM(model.ModelConfig(**{f.name: meta["config"][f.name] for f in dataclasses.fields(model.ModelConfig)}))
    lm.load_state_dict(checkpoint.unflatten(tensors, meta["skeleton"])["model"])
    val, nats = torch.from_numpy(np.fromfile(data / "val.bin", dtype=np.uint16).astype(np.int64)), 0.0
    with torch.no_grad():
        for i in range(0, 699, 32):
            x, y = val[None, i:i + 32][:, :699 - i], val[None, i + 1:i + 33]
            nats += lm(x, y)[1].item() * y.numel()
    assert json.loads((whole / "result.json").read_text())["val_loss"] == pytest.approx(nats / 699, rel=1e-6)


def test_bits_per_byte_of_tokens_that_are_not_bytes(data, tmp_path):
    for name, bytes_of_val in (("counted", 2100), ("unknown", None)):
        folder, out = tmp_path / name, tmp_path / f"{name}_run"
        shutil.copytree(data, folder)
        meta = json.loads((folder / "meta.json").read_text())
        del meta["bytes_per_token"]
        if bytes_of_val:
            meta["splits"]["val"]["bytes"], meta["splits"]["train"]["bytes"] = bytes_of_val, 9999
        (folder / "meta.json").write_text(json.dumps(meta))
        succeed(arguments(folder, out, max_iters=1, eval_interval=0))
        result = json.loads((out / "result.json").read_text())
        if bytes_of_val:
            assert result["val_bits_per_byte"] == pytest.approx(result["val_loss"] / math.log(2) / (bytes_of_val / 700))
        else:
            assert "val_bits_per_byte" not in result


def test_an_earlier_run_is_kept_aside(data, tmp_path):
    out = tmp_path / "run"
    for seed in (1, 2, 3):
        result = succeed(arguments(data, out, max_iters=1, eval_interval=0, seed=seed))
    assert str(tmp_path / "run.2") in result.out
    seeds = {p.name: json.loads((p / "result.json").read_text())["seed"] for p in tmp_path.iterdir() if p.is_dir()}
    assert seeds == {"run.1": 1, "run.2": 2, "run": 3}


# --------------------------------------------------------------------------- what may not matter for the result, does not

@pytest.mark.parametrize("changes", [
    {"eval_interval": 0}, {"eval_interval": 1, "eval_tokens": 100, "checkpoint_interval": 3},
    {"eval_interval": 4, "eval_batch_size": 1, "final_eval_tokens": 640}], ids=str)
def test_evaluation_does_not_change_training(whole, data, tmp_path, changes):
    succeed(arguments(data, tmp_path / "run", **changes))
    (a, _), (b, _) = saved(tmp_path / "run"), saved(whole)
    assert set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)
    assert losses(tmp_path / "run") == losses(whole)


@pytest.mark.parametrize("changes", [{"batch_size": 1}, {"batch_size": 5, "eval_batch_size": 3}, {"batch_size": 100}], ids=str)
def test_micro_batches_do_not_change_the_losses(whole, data, tmp_path, changes):
    succeed(arguments(data, tmp_path / "run", **changes))
    assert_close_run(tmp_path / "run", whole)


def assert_close_run(out, other):
    """The same losses but for the order of additions, which AdamW's division makes larger."""
    assert list(events(out)) == list(events(other))
    np.testing.assert_allclose(losses(out), losses(other), rtol=2e-5)
    np.testing.assert_allclose(losses(out, "grad_norm"), losses(other, "grad_norm"), rtol=1e-3)
    assert losses(out)[0] == pytest.approx(losses(other)[0], rel=1e-6)
    for step, e in events(other, "eval").items():
        assert events(out, "eval")[step]["val_loss"] == pytest.approx(e["val_loss"], rel=2e-5)


@pytest.mark.parametrize("family", model.FAMILIES)
def test_evaluation_batches_do_not_change_the_validation_loss(family, data):
    """The same weights, cut in every way: one window at a time, uneven batches, several ranks (the last without work)."""
    tokens = loader.Tokens(data).val
    torch.manual_seed(0)
    lm = LM(model.ModelConfig(model=family, n_layer=1, n_head=2, n_embd=32, block_size=32, vocab_size=256))
    windows = loader.eval_windows(len(tokens), 32)[-5:]  # four whole ones and a short one
    autocast, cpu = contextlib.nullcontext(), torch.device("cpu")
    evaluate = lambda batch_size, **ranks: train.evaluate(lm, lm, tokens, windows, batch_size, autocast, cpu, **ranks)
    whole = evaluate(100)
    for batch_size in (1, 2, 3, 4):
        assert evaluate(batch_size) == pytest.approx(whole, rel=1e-6)
    for world in (2, 3, 6):
        sums = []
        with mock.patch.object(train.dist, "all_reduce", sums.append):
            for rank in range(world):
                evaluate(2, rank=rank, world=world)
        nats, count = torch.stack(sums).sum(0).tolist()
        assert count == windows[:, 1].sum() and nats / count == pytest.approx(whole, rel=1e-6)
    assert lm.training


# --------------------------------------------------------------------------------------------------------------- resume

@pytest.mark.parametrize("changes", [{}, {"model": "llama"}, {"dtype": "bfloat16"}, {"dtype": "float16"}], ids=str)
def test_stopping_and_going_on_changes_nothing(whole, data, tmp_path, changes):
    out, undisturbed = tmp_path / "stopped", tmp_path / "undisturbed" if changes else whole
    if changes:
        succeed(arguments(data, undisturbed, **changes))
    result = succeed(arguments(data, out, **changes), LM=stops_at(7))
    assert "stopped after step 7 of 12" in result.out and "--resume=auto" in result.out
    assert saved(out)[1]["step"] == 7 and not (out / "result.json").exists()
    result = succeed(arguments(data, out, **changes, resume="auto"))
    assert "at step 7" in result.out
    assert_same_run(out, undisturbed)
    if changes.get("dtype") == "float16":
        tensors, meta = saved(out)
        scaler = checkpoint.unflatten(tensors, meta["skeleton"])["scaler"]
        assert scaler["scale"] > 0 and scaler["_growth_tracker"] > 0  # the scaler's own, not a new one
        assert math.isfinite(events(out)[12]["train_loss"])


def test_stopped_twice_and_from_another_folder(whole, data, tmp_path):
    """A stop in the step of an evaluation, one in the first step after going on, and a folder that was moved."""
    out = tmp_path / "one"
    succeed(arguments(data, out), LM=stops_at(5))
    assert 5 in events(out, "eval")
    out = out.rename(tmp_path / "two")
    succeed(arguments(data, out, resume="must"), LM=stops_at(1, signal.SIGINT))
    assert saved(out)[1]["step"] == 6
    succeed(arguments(data, out, resume="must"))
    assert_same_run(out, whole)


def test_a_stop_in_the_last_step_is_the_end(whole, data, tmp_path):
    succeed(arguments(data, tmp_path / "run"), LM=stops_at(12))
    assert_same_run(tmp_path / "run", whole)


def test_what_a_resume_refuses_and_what_it_takes(whole, data, tmp_path):
    out = tmp_path / "run"
    line = refuse(arguments(data, out, resume="must"), "resume=must", str(out / "checkpoint.safetensors"), "--resume=auto")
    assert not out.exists(), line
    succeed(arguments(data, out, resume="auto"), LM=stops_at(3))  # nothing there yet: auto starts
    before = (out / "log.jsonl").read_bytes(), (out / "config.json").read_bytes()
    changes = {"learning_rate": (0.003, 0.001), "batch_tokens": (384, 768), "model": ("longhorn", "llama"), "seed": (1337, 7),
               "n_embd": (32, 64), "max_iters": (12, 24), "dtype": ("float32", "bfloat16")}
    for key, (old, new) in changes.items():
        refuse(arguments(data, out, resume="auto", **{key: new}), "another run", f": {key} {old!r} -> {new!r};", "out_dir")
    other = write_data(tmp_path / "other", seed=1)
    refuse(arguments(other, out, resume="auto"), str(other), "sha256 differs")
    assert before == ((out / "log.jsonl").read_bytes(), (out / "config.json").read_bytes()), "a refusal touched the records"
    tensors, meta = saved(out)
    checkpoint.save(out / "checkpoint.safetensors", tensors, {**meta, "best_val_loss": 0.5, "skipped": 2, "seconds": 1000.0})
    moved = tmp_path / "moved"
    shutil.copytree(data, moved)
    result = succeed(arguments(moved, out, resume="auto", eval_interval=4, eval_batch_size=2))
    assert "eval_interval was 5, is 4" in result.out
    assert losses(out) == losses(whole)
    record = json.loads((out / "result.json").read_text())
    assert record["best_val_loss"] == 0.5 and record["skipped_steps"] == 2 and 1000 < record["seconds"] < 1100

    left = {p.name: p.read_bytes() for p in out.iterdir() if p.name != "config.json"}
    result = succeed(arguments(moved, out, resume="auto", eval_interval=4))
    assert "finished already" in result.out
    assert left == {p.name: p.read_bytes() for p in out.iterdir() if p.name != "config.json"}


def test_the_best_is_looked_for_anew_over_other_tokens(data, tmp_path):
    out, same = tmp_path / "run", {"final_eval_tokens": 320}
    succeed(arguments(data, out, **same, eval_tokens=64), LM=stops_at(7))
    tensors, meta = saved(out)
    checkpoint.save(out / "checkpoint.safetensors", tensors, {**meta, "best_val_loss": 0.1, "best": [0.1, 5]})
    succeed(arguments(data, out, **same, eval_tokens=320, resume="auto"))
    later = {step: e["val_loss"] for step, e in events(out, "eval").items() if e["val_tokens"] == 320}
    assert sorted(later) == [10, 12] and json.loads((out / "result.json").read_text())["best_val_loss"] == min(later.values())
    assert checkpoint.load(out / "best.safetensors")[1]["step"] == min(later, key=later.get)

    # over the tokens asked for in the end, also where nothing is left to train or no evaluation comes before the last
    (out / "result.json").unlink()
    succeed(arguments(data, out, **same, eval_tokens=64, resume="auto"))
    for name, changes in (("whole", {"final_eval_tokens": 64}), ("rarely", {"resume": "auto", "eval_interval": 0})):
        if name == "rarely":
            succeed(arguments(data, tmp_path / name, eval_tokens=64), LM=stops_at(7))
        succeed(arguments(data, tmp_path / name, eval_tokens=64, **changes))
    found = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("run", "whole", "rarely")]
    assert found[0]["best_val_loss"] == found[1]["val_loss"] == found[2]["best_val_loss"] != found[2]["val_loss"]


def damage(path):
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["damaged", "cut short", "missing"])
def test_a_damaged_checkpoint_is_not_gone_on_from(whole, data, tmp_path, how):
    """The one before it is, and the rest of the log goes; where no other is left, the run does not start."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    newest = out / "checkpoint.safetensors"
    {"damaged": lambda: damage(newest), "cut short": lambda: os.truncate(newest, 3000), "missing": newest.unlink}[how]()
    result = succeed(arguments(data, out, resume="auto"))
    assert how == "missing" or f"passed over: {newest}: " in result.out and how in result.out
    assert f"going on from {out / 'checkpoint-10.safetensors'} at step 10" in result.out
    assert_same_run(out, whole)
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in whole.iterdir())
    for path in out.glob("*.safetensors"):
        path.write_bytes(b"junk")
    refuse(arguments(data, out, resume="auto"), f"{newest}: cut short", "2 others here cannot be read either")


def test_code_that_changed_while_the_run_was_down(whole, data, tmp_path, monkeypatch):
    """Said when it is gone on with, kept in config.json, and no run to be compared; but for that, nothing changes."""
    out, versions = tmp_path / "run", lambda: json.loads((out / "config.json").read_text())["code_versions"]
    edited = {"changed_code": "12ab"}

    def go_on(commit, LM=LM, **changed):
        version = {"commit": commit, "uncommitted_changes": bool(changed), "changed_code": None, **changed}
        monkeypatch.setattr(records, "code_version", lambda: version)
        said = run(arguments(data, out, resume="auto"), LM)
        return [line.split(": config.json")[0] for line in said.out.splitlines() if line.startswith("the code was")], said.code

    class Crashes(LM):
        def forward(self, *args, **how):
            raise SystemExit(9)

    assert go_on("a" * 40, stops_at(3)) == ([], 0) and versions() == ["a" * 40]
    assert go_on("a" * 40, stops_at(1)) == ([], 0) and versions() == ["a" * 40]
    assert go_on("a" * 40, Crashes, **edited) == ([f"the code was {'a' * 40}, is {'a' * 40}+12ab"], 9)
    assert versions() == ["a" * 40, "a" * 40 + "+12ab"]
    assert go_on("a" * 40, stops_at(1)) == ([], 0) and versions() == ["a" * 40], "what crashed left nothing behind"
    assert go_on(None, stops_at(1)) == ([], 0) and versions() == ["a" * 40], "where there is no git, nothing is known"
    before, (tensors, meta) = (out / "checkpoint.safetensors").read_bytes(), saved(out)
    del meta["code_versions"]  # as an older train.py saved it
    checkpoint.save(out / "checkpoint.safetensors", tensors, meta)
    assert go_on("b", Crashes) == ([], 9) and versions() == ["b"]
    (out / "checkpoint.safetensors").write_bytes(before)
    assert go_on("b", stops_at(1), **edited) == ([f"the code was {'a' * 40}, is b+12ab"], 0)
    assert go_on("b", stops_at(1), **edited) == ([], 0) and versions() == ["a" * 40, "b+12ab"]
    assert go_on("a" * 40) == ([f"the code was b+12ab, is {'a' * 40}"], 0)
    assert versions() == ["a" * 40, "b+12ab", "a" * 40] == saved(out)[1]["code_versions"]
    with pytest.raises(sweep.BadRecord, match=f"^its code changed while it was down: {'a' * 40}, then b.12ab, then {'a' * 40}$"):
        sweep.read_run(out, {})
    assert_same_run(out, whole)
    assert sweep.read_run(whole, {}).loss == json.loads((out / "result.json").read_text())["val_loss"]


# --------------------------------------------------------------------------------------------- beginning with old weights

STILL = {**TINY, "max_iters": 1, "learning_rate": 1e-30}  # a step that changes nothing: the result is that of the old weights


def result_of(out):
    return json.loads((out / "result.json").read_text())["val_loss"]


def test_fine_tuning_begins_with_the_old_weights_and_nothing_else(whole, data, tmp_path):
    out = tmp_path / "run"
    result = succeed(arguments(data, out, STILL, init_from=whole))
    assert f"weights from {whole / 'checkpoint.safetensors'} (step 12)\n" in result.out and "going on" not in result.out
    assert result_of(out) == result_of(whole)
    (old, new), name = (saved(folder)[0] for folder in (whole, out)), "model.embed.weight"
    assert torch.equal(old[name], new[name])
    tensors, meta = saved(out)
    optimizer = checkpoint.unflatten(tensors, meta["skeleton"])["optimizer"]
    assert {s["step"].item() for s in optimizer["state"].values()} == {1.0} and meta["step"] == 1
    assert list(events(out)) == [1] and meta["config"]["init_from"] == str(whole)

    source = shutil.copytree(whole, tmp_path / "source")
    damage(source / "checkpoint.safetensors")
    result = succeed(arguments(data, tmp_path / "earlier", STILL, init_from=source, block_size=16))
    assert f"passed over: {source / 'checkpoint.safetensors'}: " in result.out
    assert f"weights from {source / 'checkpoint-10.safetensors'} (step 10); block_size was 32, is 16\n" in result.out
    succeed(arguments(data, tmp_path / "file", STILL, init_from=source / "checkpoint-10.safetensors"))
    assert result_of(tmp_path / "file") == events(whole, "eval")[10]["val_loss"]


def test_fine_tuning_that_is_stopped_goes_on_from_its_own_checkpoint(whole, data, tmp_path):
    source, out = shutil.copytree(whole, tmp_path / "source"), tmp_path / "run"
    succeed(arguments(data, tmp_path / "undisturbed", init_from=source))
    assert losses(tmp_path / "undisturbed")[0] < losses(whole)[0] - 0.5
    succeed(arguments(data, out, init_from=source, resume="auto"), LM=stops_at(7))
    shutil.rmtree(source)
    refuse(arguments(data, out, resume="auto"), f"another run: init_from '{source}' -> ''")
    result = succeed(arguments(data, out, init_from=source, resume="auto"))
    assert "at step 7" in result.out and "weights from" not in result.out
    assert_same_run(out, tmp_path / "undisturbed")


def test_an_imported_model_is_trained_on(whole, data, tmp_path):
    export.main([f"--out_dir={whole}", f"--to={tmp_path / 'exported'}"])
    export.main([f"--from_hf={tmp_path / 'exported'}", f"--out_dir={tmp_path / 'imported'}"])
    result = succeed(arguments(data, tmp_path / "run", STILL, init_from=tmp_path / "imported"))
    assert f"weights from {tmp_path / 'imported' / 'checkpoint.safetensors'} (step 12)\n" in result.out
    assert result_of(tmp_path / "run") == result_of(whole)


def test_weights_that_do_not_fit_get_one_line(whole, data, tmp_path):
    out, source = tmp_path / "run", tmp_path / "source"
    refused = lambda *words, init_from=whole, **changes: refuse(arguments(data, out, init_from=init_from, **changes), *words)
    newest = str(whole / "checkpoint.safetensors")
    refused(newest, "embed.weight is (256, 32) there, (256, 64) here", "n_embd was 32, is 64", n_embd=64)
    refused(newest, "embed.weight is (256, 32) there, (320, 32) here; vocab_size was 256, is 320", vocab_size=320)
    refused(newest, "branches.2.norm.weight is missing there, (32,) here; n_layer was 1, is 2", n_layer=2)
    refused(newest, "missing there", "model was 'longhorn', is 'llama'", model="llama")
    (tmp_path / "empty").mkdir()
    refused("empty", "there is no checkpoint in this folder", init_from=tmp_path / "empty")
    refused("nowhere", "no checkpoint was saved here", init_from=tmp_path / "nowhere")
    refused("train.bin", "not a checkpoint of this project", init_from=data / "train.bin")
    source.mkdir()
    tensors, meta = saved(whole)
    write = lambda **changes: checkpoint.save(source / "checkpoint.safetensors", tensors, {**meta, **changes})
    write(tokenizer="gpt2")
    refused("source/checkpoint.safetensors: its tokenizer is 'gpt2', the data's 'bytes'", str(data), init_from=source)
    characters = write_data(tmp_path / "characters", table="abc")
    write(table="abd")
    refuse(arguments(characters, out, init_from=source), "its characters are not the data's", str(characters))
    for broken in ({"skeleton": 7}, {"config": 7}, {"step": "x"}):
        write(**broken)
        refused("source/checkpoint.safetensors: does not fit", init_from=source)
    assert not out.exists()
    write(tokenizer=None)  # unknown, as of many an import
    succeed(arguments(data, out, STILL, init_from=source))
    refused("init_from", "lies in out_dir", init_from=out)
    assert not (tmp_path / "run.1").exists(), "a refusal moved the earlier run aside"


# ------------------------------------------------------------------------------------------- signals, on real processes

@pytest.fixture(scope="module")
def long_run(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("long") / "run"
    succeed(arguments(data, out, LONG))
    return out


def test_signals(long_run, data, tmp_path, start):
    """Of two real processes; test_chaos.py kills and stops forked ones."""
    numbers = {"term": signal.SIGTERM, "int": signal.SIGINT}
    processes = {name: start(arguments(data, tmp_path / name, LONG)) for name in numbers}
    told, deadline = set(), time.time() + 300
    while told != set(numbers):
        assert time.time() < deadline, "no step 50 after 300 s"
        for name in set(numbers) - told:
            log = tmp_path / name / "log.jsonl"
            if log.exists() and '"step": 50,' in log.read_text():
                processes[name].send_signal(numbers[name])
                told.add(name)
            assert name in told or processes[name].poll() is None, processes[name].communicate()
        time.sleep(0.005)
    for name, process in processes.items():
        text, err = process.communicate(timeout=300)
        out = tmp_path / name
        assert not (out / "result.json").exists(), "too late: it had finished"
        step = saved(out)[1]["step"]
        assert process.returncode == 0 and "Traceback" not in err
        last = text.splitlines()[-1]
        assert last.startswith(f"stopped after step {step} of 200") and last.endswith("--resume=auto")
        assert f"--out_dir={out}" in last and max(events(out)) == step
        result = succeed(arguments(data, out, LONG, resume="auto"))
        assert f"at step {step}" in result.out
        assert_same_run(out, long_run)
        assert list(events(out)) == list(range(1, 201))


# ------------------------------------------------------------------------------------------------------------ not finite

def poisoned(calls, how="loss"):
    """An LM whose loss, or only whose gradient, is not a number in these training steps (from 1)."""
    class Poisoned(LM):
        step = 0

        def forward(self, idx, targets=None, **kwargs):
            logits, loss = super().forward(idx, targets, **kwargs)
            Poisoned.step += self.training
            if self.training and Poisoned.step in calls:
                loss = loss * math.nan if how == "loss" else loss + 0 * (self.norm.weight * 0).sqrt().sum()
            return logits, loss
    return Poisoned


@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped_and_counted(data, tmp_path, how):
    versions = {}
    save = checkpoint.save

    def keep(path, tensors, meta):
        versions[meta["step"]] = {name: t.clone() for name, t in tensors.items()}
        save(path, tensors, meta)

    out = tmp_path / "run"
    with mock.patch.object(checkpoint, "save", keep):
        result = succeed(arguments(data, out, checkpoint_interval=1, max_bad_steps=3), LM=poisoned({3, 4, 7, 8}, how))
    assert result.out.count("step skipped") == 4 and "step 4: " in result.out and "(2 in a row)" in result.out
    record = json.loads((out / "result.json").read_text())
    assert record["skipped_steps"] == 4 and math.isfinite(record["val_loss"])
    skipped = events(out, "skipped")
    assert list(skipped) == [3, 4, 7, 8] and len(skipped[3]["windows"]) == 8
    assert (skipped[3]["train_loss"] is None) == (how == "loss")
    for step in range(2, 13):
        weights = [name for name in versions[step] if name.startswith(("model", "optimizer"))]
        same = all(torch.equal(versions[step][name], versions[step - 1][name]) for name in weights)
        assert same == (step in (3, 4, 7, 8)), f"step {step}"


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_loss_that_stays_not_finite_ends_the_run(data, tmp_path, dtype):
    out = tmp_path / "run"
    line = refuse(arguments(data, out, checkpoint_interval=2, max_bad_steps=3, dtype=dtype), "step 7", "3 times in a row",
                  f"{out / 'checkpoint.safetensors'}, step", str(data / "train.bin"), "learning_rate", LM=poisoned(range(5, 99)))
    assert not (out / "result.json").exists() and list(events(out, "skipped")) == [5, 6, 7]
    first = loader.step_windows(loader.n_windows(4000, 32), 12, 1337, 6)[0]
    assert f"token {first * 32:,} " in line
    tensors, meta = saved(out)
    assert f"step {meta['step']};" in line
    assert all(t.isfinite().all() for name, t in tensors.items() if name.startswith("model"))


def test_not_finite_from_the_start(data, tmp_path):
    refuse(arguments(data, tmp_path / "run", max_bad_steps=2), "step 2", "checkpoint is none", LM=poisoned(range(99)))


def test_float16_gradients_that_overflow_are_the_scalers_business(data, tmp_path):
    succeed(arguments(data, tmp_path / "run", dtype="float16"), LM=poisoned({2, 3}, "gradient"))
    tensors, meta = saved(tmp_path / "run")
    scaler = checkpoint.unflatten(tensors, meta["skeleton"])["scaler"]
    assert scaler["scale"] <= 2.0**16 / 4  # halved for each
    assert all(t.isfinite().all() for name, t in tensors.items() if name.startswith(("model", "optimizer")))


# -------------------------------------------------------------------------------------------------- the user's mistakes

MISTAKES = [
    ({"learning_rat": 1e-3}, ["--learning_rat'", "--learning_rate"]),
    ({"max_iters": "many"}, ["--max_iters=many", "whole number"]),
    ({"resume": "maybe"}, ["--resume=maybe", "never", "auto", "must"]),
    ({"model": "lama"}, ["'lama'", "longhorn", "llama"]),
    ({"model": "llama", "n_head": 5}, ["n_embd 32", "n_head 5", "divides 16"]),
    ({"n_embd": 0}, ["n_embd 0", "at least 1"]),
    ({"dt_rank": -3}, ["dt_rank -3"]),
    ({"block_size": 701, "batch_tokens": 701}, ["block_size 701", "val.bin (700 tokens", "smaller block or prepare more data"]),
    ({"batch_tokens": 400}, ["batch_tokens 400", "block_size 32", "the nearest is 384"]),
    ({"batch_tokens": 16}, ["batch_tokens 16", "block_size 32", "the nearest is 32"]),
    ({"vocab_size": 100}, ["100", "256"]),
    ({"dataset": "pystdlob"}, ["pystdlob", "pystdlib"]),
    ({"device": "gpu"}, ["'gpu'", "cpu, cuda"]),
    ({"device": "meta"}, ["'meta'", "cpu, cuda"]),
    ({"batch_size": 0}, ["batch_size 0", "at least 1"]),
    ({"eval_interval": -1}, ["eval_interval -1", "0 or more"]),
    ({"learning_rate": 0}, ["learning_rate 0.0"]),
    ({"min_lr": 1}, ["min_lr 1.0", "learning_rate 0.003"]),
    ({"warmup_iters": 12}, ["warmup_iters 12", "max_iters 12"]),
    ({"beta2": 1}, ["beta2 1.0"]),
    ({"seed": -1}, ["seed -1"]),
    ({"scan_backend": "cpuu"}, ["'cpuu'", "cpu, cuda, torch"]),
]


@pytest.mark.parametrize("changes, words", MISTAKES, ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_mistakes_get_one_line(data, tmp_path, changes, words):
    refuse(arguments(**{"data": data, "out": tmp_path / "run", "base": {**TINY, **changes}}), *words)
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(data, tmp_path):
    refuse(arguments(data, tmp_path / "run", device="cuda"), "device cuda", "no GPU", "--device=cpu")
    refuse(arguments(data, tmp_path / "run", scan_backend="cuda"), "cuda", "no GPU")
    refuse(arguments(data, tmp_path / "run", model="gla", kernel="fused"), "kernel 'fused' cannot run here", "kernel='torch'")
    refuse(arguments(data, tmp_path / "run", model="mamba", kernel="fused"), "kernel 'fused'", "requirements-gpu.txt")


def test_more_mistakes_get_one_line(data, tmp_path):
    refuse(["config/longhorn_laptopp.py"], "longhorn_laptopp.py")
    refuse(["--n_layer"], "--n_layer=12")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "prepare.py").write_text("")
    refuse(arguments(tmp_path / "set", tmp_path / "run"), "not prepared", f"python {tmp_path / 'set' / 'prepare.py'}")
    (tmp_path / "file").write_text("")
    refuse(arguments(data, tmp_path / "file" / "run"), str(tmp_path / "file"), "out_dir")
    five = mock.patch.object(train, "open_device", lambda config: (torch.device("cpu"), 0, 5))
    with five, pytest.raises(ConfigError, match="12 windows of 32, which 5 processes cannot share .*: choose batch_tokens 480"):
        train.main(arguments(data, tmp_path / "run"))


def test_from_a_real_shell(data, tmp_path, start):
    process = start(arguments(data, tmp_path / "run", learning_rat=1))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 2 and out == "" and len(err.splitlines()) == 1 and err.startswith("train.py: error: ")


def test_help_lists_every_key():
    result = succeed(["--help"])
    for field in dataclasses.fields(TrainConfig):
        line = next((line for line in result.out.splitlines() if line.split()[:1] == [f"--{field.name}"]), "")
        assert len(line.split()) > 3, f"--{field.name} is not explained"


# ------------------------------------------------------------------------------------------- what must not go unsaid

def test_the_best_is_the_best_on_the_same_tokens(data, tmp_path):
    """The last evaluation is over other tokens: of random ones, say, where the loss is another."""
    for name, changes in (("all", {}), ("same", {"final_eval_tokens": 64})):
        succeed(arguments(data, tmp_path / name, eval_tokens=64, **changes))
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("all", "same")]
    assert results[0]["best_val_loss"] == results[1]["best_val_loss"] == results[1]["val_loss"] != results[0]["val_loss"]
    best = [checkpoint.load(tmp_path / name / "best.safetensors")[1] for name in ("all", "same")]
    assert best[0]["best"] == best[1]["best"] == [results[1]["val_loss"], 12]
    assert [e["val_tokens"] for e in events(tmp_path / "all", "eval").values()] == [64, 64, 699]


def test_a_checkpoint_that_could_not_be_written_is_not_announced_as_saved(data, tmp_path):
    def full(*args):
        raise OSError(28, "No space left on device")

    with mock.patch.object(checkpoint, "save", full):
        result = run(arguments(data, tmp_path / "run"), LM=stops_at(3))
    assert result.code == 2 and "without saving it ([Errno 28] No space left on device); the last checkpoint is of step 0" in (
        result.err)
    assert "No space left" in result.out and "go on with" not in result.out


def test_two_runs_cannot_share_a_folder(data, tmp_path):
    held = faults.take(tmp_path / "run")
    refuse(arguments(data, tmp_path / "run"), "another run writes to", "another out_dir")
    held.close()
    succeed(arguments(data, tmp_path / "run", max_iters=2))


def test_what_wandb_is_told(data, tmp_path, monkeypatch):
    """Asked for, and only then: the run under its folder's name, grouped as a sweep wants it, and the losses that the log has."""
    told = {"log": []}
    stand_in = SimpleNamespace(init=lambda **how: told.update(init=how), finish=lambda: told.update(finished=True),
                               log=lambda values, step: told["log"].append((step, values)), summary={}, Error=KeyError)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    succeed(arguments(data, tmp_path / "quiet"))
    assert told == {"log": []}
    succeed(arguments(data, tmp_path / "loud", wandb="offline", wandb_group="table1", wandb_project="p"))
    how = told["init"]
    assert (how["name"], how["group"], how["project"], how["mode"]) == ("loud", "table1", "p", "offline")
    assert how["config"]["seed"] == 1337 and told["finished"]
    wanted = [(step, e["train_loss"]) for step, e in events(tmp_path / "loud").items()]
    assert [(step, v["train_loss"]) for step, v in told["log"] if "train_loss" in v] == wanted
    assert stand_in.summary == json.loads((tmp_path / "loud" / "result.json").read_text())
    twice = arguments(data, tmp_path / "twice", wandb="offline", resume="auto")
    succeed(twice, LM=stops_at(3))
    first = told["init"]["id"]
    succeed(twice)
    assert told["init"]["id"] == first != how["id"] and told["init"]["resume"] == "allow"


def test_wandb_that_cannot_be_had_is_said_before_anything_is_moved(data, tmp_path, monkeypatch):
    out = tmp_path / "run"
    succeed(arguments(data, out, max_iters=2))
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setitem(sys.modules, "wandb", None)
    refuse(arguments(data, out, wandb="offline"), "wandb=offline", "pip install wandb, or --wandb=off")

    def login():
        raise LookupError("No API key configured.")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(login=login, Error=LookupError))
    refuse(arguments(data, out, wandb="online"), "wandb=online: No API key configured. Or keep it here: --wandb=offline")
    assert sorted(tmp_path.rglob("*")) == before
