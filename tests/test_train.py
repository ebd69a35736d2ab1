"""train.py from the outside: its command line, its records, and that nothing but the settings decides the result.

Most runs happen in this process, through runpy, because importing torch takes longer than training a tiny model. Tests
that need processes of their own, above all to kill them, are in test_chaos.py.
"""

import contextlib
import dataclasses
import errno
import functools
import io
import itertools
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import (
    ROOT,
    TINY,
    acting,
    arguments,
    assert_same_run,
    assert_same_training,
    events,
    losses,
    no_picture,
    poisoned,
    record,
    refuse,
    run,
    saved,
    state,
    stops_at,
    succeed,
    table,
    write_data,
    write_files,
)

import configurator
import train
from common import errors
from common.errors import ConfigError
from common.gpus import memory, peak_flops
from data import loader, prepared
from evaluation.validation import Evaluate, by_document
from experiments.vision import classify
from inspection import counting
from model import LM, ModelConfig
from runtime import checkpoint, distributed, records
from runtime.folder import MAY_CHANGE_ON_RESUME, lock_run_dir
from runtime.loss_curve import draw_loss
from train import TrainConfig

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def ran(data):
    """ran(out, **changes) trains on words and returns its output; it must succeed. See helpers.run for the rest."""
    def ran(out, base=TINY, LM=LM, draw_loss=no_picture, err=None, **changes):
        return succeed(arguments(data, out, base, **changes), LM, draw_loss=draw_loss, err=err)
    return ran


@pytest.fixture(scope="module")
def whole(ran, tmp_path_factory):
    """The folder of an undisturbed run of TINY."""
    out = tmp_path_factory.mktemp("whole") / "run"
    ran(out, draw_loss=draw_loss)
    return out


# ------------------------------------------------------------------------------------------------------- pure functions

def test_the_default_run_is_the_one_in_its_record():
    """The settings and the size of `make train` are those of results/longhorn_bpe, whose loss README names."""
    config = read_config("longhorn_bpe")
    ran = ROOT / "results/longhorn_bpe"
    settings = record(ran, "config")["config"]
    for name in ("n_layer n_embd d_state block_size batch_tokens max_iters learning_rate min_lr schedule beta2 "
                 "eval_block_size eval_tokens seed weight_decay grad_clip").split():
        assert getattr(config, name) == settings[name], name
    config.vocab_size = settings["vocab_size"]
    parameters = counting.parameter_count(train.build_model(config, torch.device("cpu")))["total"]
    assert parameters == 1_829_952 == record(ran)["parameters"]


def test_records_go_to_a_folder_named_after_the_last_config_file_or_what_it_began_with(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    succeed(arguments(data, "", max_iters=1, model="llama"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["llama"]
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").touch()
    for argv, name in ((["one.py", "two.py"], "two"), (["--init_from=out/llama"], "llama_tuned"),
                       (["--init_from=out/llama/best.safetensors"], "llama_tuned"), ([], "otherwise")):
        assert train.run_name(configurator.load(TrainConfig, argv), "otherwise") == name


def factors(**settings):
    config = TrainConfig(learning_rate=2.0, **settings)
    train.check(config)
    return [train.learning_rate_factor(step, config) for step in range(config.max_iters)]


def test_learning_rates_of_each_schedule_are_right():
    """By hand: the warmup reaches the peak in its last step, and the decay reaches its end in the run's last step."""
    short = {"max_iters": 7, "warmup_iters": 2, "min_lr": 0.4}  # cosine: five steps of a fifth of half a turn
    numbers = lambda text: pytest.approx([*map(float, text.split())], abs=1e-6)
    assert factors(**short) == numbers("0.5 1 0.923607 0.723607 0.476393 0.276393 0.2")
    flat = {"max_iters": 10, "warmup_iters": 3, "min_lr": 0.0}
    wsd = factors(**flat, schedule="wsd", decay_iters=4)
    assert wsd == numbers("0.333333 0.666667 1 1 1 1 0.5 0.292893 0.133975 0")
    assert factors(**flat, schedule="constant") == numbers("0.333333 0.666667 1 1 1 1 1 1 1 1")
    assert factors(**short, schedule="wsd", decay_iters=0)[-2:] == [1, 0.2]  # a decay of one step at least
    assert factors(max_iters=5, warmup_iters=0)[0] < 1 and factors(max_iters=1) == [0.1]
    assert factors(max_iters=5, warmup_iters=4, min_lr=2.0) == [0.25, 0.5, 0.75, 1, 1]  # the shortest schedule
    assert factors(max_iters=6, warmup_iters=2, decay_iters=4, schedule="wsd")[1] == 1


def test_warmup_and_decay_have_defaults():
    """By default they are 5% and 20% of the steps, here 2 and 7 of 33. The rate falls to a tenth of the peak."""
    rates = factors(max_iters=33, schedule="wsd")
    assert rates.index(1.0) == 1 and rates.count(1.0) == 33 - 2 - 7 + 1
    assert rates[-1] == 0.1 == factors(max_iters=33)[-1]


def test_defaults_are_those_written_down():
    """The defaults are nanoGPT's, or those in README and --help. The settings of Table 5 are tested below."""
    literal = {"seed": 1337, "batch_tokens": 524288, "max_iters": 4800, "learning_rate": 6e-4, "min_lr": -1,
               "warmup_iters": -1, "decay_iters": -1, "eval_interval": 250, "log_interval": 10,
               "keep_checkpoints": 2, "max_bad_steps": 10,
               "resume": "never", "self_check": "on", "compile": False, "vocab_size": 0, "d_state": 16, "d_conv": 4,
               "expand": 2, "timeout_minutes": 10}
    config = TrainConfig()
    assert {name: getattr(config, name) for name in literal} == literal


def test_peak_flops_go_by_the_drivers_name():
    known = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "NVIDIA H200": 989e12, None: None,
             "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA H20": 148e12, "NVIDIA A10": 125e12, "NVIDIA A10G": 70e12,
             "NVIDIA RTX A1000": None, "NVIDIA GeForce RTX 4090 Laptop GPU": None}
    assert {name: peak_flops(name) for name in known} == known
    memories = {"A100-40G": 40e9, "A100_40GiB": 40e9, "NVIDIA A10G": 24e9}
    assert {name: memory(name) for name in memories} == memories


CONFIGS = sorted(path.stem for path in (ROOT / "config").glob("*.py"))
IMAGES = [name for name in CONFIGS if name.startswith(("vi", "deit")) or name in ("cifar", "digits", "imagenet")]
TABLE5 = {"120m": {"n_layer": 12, "n_embd": 768, "n_head": 12, "max_iters": 4800, "learning_rate": 6e-4},
          "350m": {"n_layer": 24, "n_embd": 1024, "n_head": 16, "max_iters": 13500, "learning_rate": 3e-4}}
ALL_OF_TABLE5 = {"block_size": 1024, "batch_tokens": 524288, "vocab_size": 50304, "beta1": 0.9, "beta2": 0.95,
                 "weight_decay": 0.1, "grad_clip": 1.0, "dataset": "openwebtext", "schedule": "cosine",
                 "optimizer": "adamw"}


def read_config(name):
    return configurator.load(TrainConfig, [str(ROOT / "config" / f"{name}.py")])


@pytest.mark.parametrize("name", IMAGES)
def test_config_files_of_images_are_for_classify(name):
    file = str(ROOT / "config" / f"{name}.py")
    command = shlex.join(["python", "experiments/vision/classify.py", file, "--seed=2"])
    refuse([file, "--seed=2"], "task = 'images'", command)
    classify.check(configurator.load(classify.VisionConfig, [file]))


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in IMAGES])
def test_config_files_pass_the_check_of_settings(name):
    config = read_config(name)
    train.check(config)
    assert config.batch_tokens % config.block_size == 0


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.endswith(("_120m", "_350m"))])
def test_configs_have_the_settings_of_table_5(name):
    config, (family, _, size) = read_config(name), name.rpartition("_")
    expected = TABLE5[size] | ALL_OF_TABLE5
    if family == "gated_deltanet":  # its own number of heads, for a state as large as Longhorn's
        del expected["n_head"]
    assert {key: getattr(config, key) for key in expected} == expected
    assert family in (config.model, "paper") and train.warmup_steps(config) == config.max_iters // 20
    assert 64 % config.micro_batch_size == 0  # eight GPUs


LARGE = {"longhorn_1b3": 1_331_595_264, "mamba_1b3": 1_334_740_992, "llama_1b3": 1_298_761_728,
         "gla_1b3": 1_300_015_104, "longhorn_340m": 351_224_832, "mamba_340m": 352_797_696, "llama_340m": 341_099_520,
         "gla_340m": 341_726_208, "gated_deltanet_1b3": 1_299_947_904, "gated_deltanet_340m": 341_692_800}


@pytest.mark.parametrize("name", LARGE)
def test_configs_have_the_settings_of_section_5_3(name):
    """1.3B models train on 100B tokens in steps of 2M, with 1B of warmup. 340M models train on 15B in steps of 0.5M,
    with 0.5B of warmup."""
    config = read_config(name)
    tokens, warm = (100e9, 1e9) if name.endswith("1b3") else (15e9, 0.5e9)
    sizes = ModelConfig(**{field.name: getattr(config, field.name) for field in dataclasses.fields(ModelConfig)})
    with torch.device("meta"):
        assert counting.parameter_count(LM(sizes))["total"] == LARGE[name]
    assert config.max_iters * config.batch_tokens == pytest.approx(tokens, rel=2e-4)
    assert config.warmup_iters * config.batch_tokens == pytest.approx(warm, rel=2e-3)


# -------------------------------------------------------------------------------------------------------------- records

def test_a_finished_run_has_its_files(whole):
    assert " ".join(sorted(path.name for path in whole.iterdir())) == (
        ".lock best.safetensors checkpoint-10.safetensors checkpoint.safetensors config.json log.jsonl loss.png "
        "result.json")


def test_config_json_has_settings_derived_numbers_and_data(whole):
    config = record(whole, "config")
    assert set(config["config"]) == {field.name for field in dataclasses.fields(TrainConfig)}
    assert {key: config["config"][key] for key in TINY} == TINY and config["config"]["vocab_size"] == 256
    derived = config["derived"]
    where = config["environment"]
    assert (derived["windows_per_step"], derived["accumulation"], derived["processes"]) == (12, 1, 1)
    assert derived["tokens"] == 12 * 384 and derived["epochs"] == pytest.approx(144 / 124)
    assert "embed.weight" in derived["decayed"] and "--max_iters=12" in where["command"]
    assert config["data"]["splits"]["train"]["sha256"] == config["data"]["identity"]["train"]


def test_the_log_has_every_step_and_evaluation(whole):
    assert list(events(whole, "eval")) == [5, 10, 12] and list(events(whole)) == list(range(1, 13))
    for step, e in events(whole).items():
        assert [*e] == "event step tokens train_loss lr grad_norm tokens_per_second memory_bytes seconds".split()
        assert e["tokens"] == 384 * step
    assert losses(whole)[-1] < losses(whole)[0] - 0.5 and losses(whole, "lr")[-1] == pytest.approx(3e-4)


def test_the_result_of_a_finished_run_agrees_with_its_log(whole):
    """test_records.py computes the other numbers by hand."""
    result = record(whole)
    assert result["val_loss"] == events(whole, "eval")[12]["val_loss"] and result["val_tokens"] == 699
    of_documents = result["val_document_losses"]
    weights = result["val_document_tokens"]
    assert np.average(of_documents, weights=weights) == pytest.approx(result["val_loss"], abs=2e-6)
    assert sum(weights) == 699 and len(weights) > 1
    assert result["best_val_loss"] == min(e["val_loss"] for e in events(whole, "eval").values())
    where = record(whole, "config")["environment"]
    assert (result["code"], result["commit"]) == (where["code"], where["commit"])


def test_only_a_runs_own_files_are_moved_aside(data, ran, tmp_path, monkeypatch):
    """All files of a run are moved, even if its folder is a link. After a kill in the middle, the next command finishes
    the move."""
    out = tmp_path / "folder"
    once = {"max_iters": 2, "checkpoint_interval": 1, "final_eval_tokens": 64}
    (out / "thesis").mkdir(parents=True)
    (out / "best.py").write_text("mine")
    (tmp_path / "link").symlink_to(out)
    ran(tmp_path / "link", seed=1, **once)
    (out / "log.jsonl").unlink()  # checkpoints without a log also count as a run
    monkeypatch.setattr(records.os, "rename", mock.Mock(side_effect=[None, KeyboardInterrupt]))  # moves nothing
    assert run(arguments(data, out, seed=2, **once)).code == 130
    monkeypatch.undo()
    os.rename(out / "config.json", out / records.MOVING / "config.json")
    refuse(arguments(data, out, resume="must"), "resume=must", "no checkpoint was saved here")
    ran(tmp_path / "link", seed=2, resume="auto", **once)
    more = {"wandb", "eval_tasks-piqa.json"}
    for name in more:
        (out / name).touch()
    assert f"the earlier run is kept as {out / 'earlier-2'}\n" in ran(out, seed=3, **once).out
    every = {*("config.json log.jsonl result.json loss.png best.safetensors checkpoint.safetensors "
               "checkpoint-1.safetensors").split()}
    assert {p.name for p in (out / "earlier-1").iterdir()} == every - {"log.jsonl"}
    assert {p.name for p in (out / "earlier-2").iterdir()} == every | more
    assert [record(p)["seed"] for p in (out / "earlier-1", out / "earlier-2", out)] == [1, 2, 3]
    assert (out / "best.py").read_text() == "mine" and (tmp_path / "link").is_symlink()


def test_a_run_killed_before_its_first_checkpoint_leaves_nothing_behind(ran, out):
    """A run that starts again overwrites its own beginning. A result, or another run's beginning, is moved aside."""
    ran(out, max_iters=2)
    for gone, seed, aside in (("result", 1337, 0), ("nothing", 1337, 1), ("result", 2, 2)):
        for path in (*out.glob("*.safetensors"), *out.glob(f"{gone}.json")):
            path.unlink()
        ran(out, max_iters=2, resume="auto", seed=seed)
        assert len(list(out.glob("earlier*"))) == aside


def test_the_screen_shows_what_the_log_has(ran, tmp_path):
    """This holds in a pipe, and on a terminal of 80 columns, where the bar of a resumed run does not start at 0."""
    go = lambda name, **how: ran(tmp_path / name, dtype="bfloat16", max_iters=3, eval_tokens=64, resume="auto", **how)
    screen = io.StringIO()
    screen.isatty = lambda: True
    with (mock.patch("runtime.telemetry.peak_flops", lambda name: 1e9),
          mock.patch.dict(os.environ, COLUMNS="80", LINES="24")):
        piped = go("pipe").out
        go("terminal", LM=stops_at(2))
        terminal = go("terminal", err=screen).err
    e = events(tmp_path / "pipe")[3]
    words = f"loss {e['train_loss']:.4f}  lr 3.00e-04  norm {e['grad_norm']:.2f}  {e['tokens_per_second']:,} tokens/s"
    assert f"step      3  {words}  mfu {e['mfu']:.1%}\n" in piped and e["mfu"] > 0
    last = terminal.replace("\r", "\n").rstrip().splitlines()[-1]
    assert len(last) < 80, last
    assert {*"100% lr norm tokens/s mfu".split()} <= {*last.split()}, last


def test_a_picture_is_drawn_at_times_and_never_ends_a_run(ran, out):
    """A step takes a second, and every second step is evaluated: pictures are drawn after 4, 8 and 12. A killed run
    without a picture gets it at the next start."""
    now = [0.0]
    fails = mock.Mock(side_effect=ImportError("failed to map segment"))

    def tick(n, lm, loss):
        now[0] += 1

    with mock.patch("time.perf_counter", lambda: now[0]), mock.patch("runtime.telemetry.PICTURE_SECONDS", 3):
        said = ran(out, eval_interval=2, eval_tokens=64, LM=acting(tick), draw_loss=fails).out
    assert fails.mock_calls == [mock.call(out)] * 3
    assert said.count("no loss.png: failed to map segment") == 3 and not (out / "loss.png").exists()
    assert "already finished" in ran(out, resume="auto", eval_interval=2, eval_tokens=64, draw_loss=draw_loss).out
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_log_is_on_the_disk_before_its_checkpoint(ran, out):
    flushed = []
    fsync = os.fsync

    def note(handle):
        flushed.append(os.fstat(handle).st_ino)
        fsync(handle)

    with mock.patch("os.fsync", note):
        ran(out, max_iters=3, checkpoint_interval=1, keep_checkpoints=3)
    log = (out / "log.jsonl").stat().st_ino
    steps = sorted(checkpoint.steps(out).items())
    places = [flushed.index(path.stat().st_ino) for _, path in steps]
    assert len(places) == 3 and all(log in flushed[a:b] for a, b in itertools.pairwise(places))


def test_nothing_is_read_before_the_folder_is_locked(ran, out):
    """Otherwise a run that is about to save would seem to have no checkpoint, and be moved aside."""
    candidates = checkpoint.candidates

    def look(folder):
        with pytest.raises(errors.ConfigError):
            lock_run_dir(out)
        return candidates(folder)

    with mock.patch.object(checkpoint, "candidates", side_effect=look) as looked:
        ran(out, max_iters=2, resume="auto")
    assert looked.called


def test_an_out_dir_that_cannot_be_moved_is_refused_but_not_one_without_locks(data, ran, out):
    """A mount point gets one line; a network file system may have no locks."""
    with mock.patch("fcntl.flock", side_effect=OSError(errno.ENOSYS, "No locks")):
        assert "cannot be locked (No locks)" in ran(out, max_iters=2).out
    with mock.patch.object(records.os, "rename", side_effect=OSError(errno.EBUSY, "Device or resource busy")):
        refuse(arguments(data, out, max_iters=2), str(out))


# ------------------------------------------------------------------------------------ what must not change the result

@pytest.mark.parametrize("changes", [{"eval_interval": 0, "final_eval_tokens": 640},
                                     {"eval_interval": 1, "eval_tokens": 100, "checkpoint_interval": 3}])
def test_evaluations_do_not_change_training(whole, ran, out, changes):
    ran(out, **changes)
    assert_same_training(out, whole)


def test_micro_batches_change_only_the_order_of_additions(whole, ran, out):
    """Dividing in AdamW makes the difference larger."""
    ran(out, micro_batch_size=5)
    np.testing.assert_allclose(losses(out), losses(whole), rtol=2e-5)
    np.testing.assert_allclose(losses(out, "grad_norm"), losses(whole, "grad_norm"), rtol=1e-3)
    assert record(out)["val_loss"] == pytest.approx(record(whole)["val_loss"], rel=2e-5)


def evaluated(data, **changes):
    """(a model, its Evaluate)"""
    config = TrainConfig(**{**TINY, "model": "llama", "vocab_size": 256, **changes})
    torch.manual_seed(0)
    tokens = loader.TokenData(prepared.Tokens(data), 32, 384, 0)
    return train.build_model(config, torch.device("cpu")), Evaluate(config, tokens)


def test_the_validation_loss_is_the_mean_over_its_tokens(data, monkeypatch):
    """Batches have one window, are uneven, or hold one document. test_distributed.py uses several ranks."""
    lm, evaluate = evaluated(data, eval_tokens=100)
    tokens = evaluate.data
    assert evaluate.windows[:, 1].tolist() == [32, 32, 32, 4]
    second = evaluate.windows[3, 0]  # a document that begins with a window
    monkeypatch.setattr("evaluation.validation.document_starts", lambda tokens: np.array([0, second]))
    val = torch.from_numpy(np.fromfile(data / "val.bin", dtype=np.uint16).astype(np.int64))
    with torch.no_grad():
        true = sum(n * lm(val[None, i:i + n], val[None, i + 1:i + n + 1])[1].item() for i, n in evaluate.windows) / 100
    for size in (1, 3):
        evaluate.batch_tokens = 32 * size
        mean, nats, of = evaluate.loss(lm, by_document(evaluate.windows, tokens))
        means = [mean, evaluate.loss(lm, [evaluate.windows])[0], np.average(nats, weights=of)]
        assert means == pytest.approx([true] * 3, rel=1e-6) and of == [96, 4]
    x = val[:24].view(3, 1, 8)
    y = val[1:25].clone().view(3, 1, 8)
    y[0] = y[2, :, ::2] = -1
    with mock.patch.object(tokens, "eval_batches", return_value=zip(x, y, strict=True)), torch.no_grad():
        assert evaluate.loss(lm, [evaluate.windows])[0] == pytest.approx(lm(x[:, 0], y[:, 0])[1].item(), rel=1e-6)
    assert lm.training
    _, shorter = evaluated(data, eval_tokens=100, eval_block_size=16)
    assert shorter.windows[:, 1].tolist() == [16] * 6 + [4] and shorter.final_windows[:, 1].max() == 16


def test_the_numbers_of_an_evaluation_are_right(data):
    """Tokens have 3 bytes. The last evaluation also has the loss on the tokens of the earlier ones, if they differ."""
    lm, evaluate = evaluated(data, eval_tokens=64)
    tokens = evaluate.data.tokens
    tokens.bytes_per_token = 3.0
    before = evaluate(lm)
    last = evaluate(lm, final=True)
    for metrics, n in ((before, 64), (last, 699)):
        assert metrics["val_bits_per_byte"] == pytest.approx(metrics["val_loss"] / math.log(2) / 3)
        assert metrics["val_tokens"] == n
    assert last["compare_loss"] == pytest.approx(before["val_loss"]) != last["val_loss"]
    evaluate.final_windows = evaluate.windows
    tokens.bytes_per_token = None
    assert not {"compare_loss", "val_bits_per_byte"} & evaluate(lm, final=True).keys()


def test_gradients_are_clipped_unless_grad_clip_is_0(ran, tmp_path):
    """The log has the norm before clipping."""
    for clip in (0, 1e6, 0.01):
        ran(tmp_path / f"{clip}", grad_clip=clip, max_iters=4)
    assert losses(tmp_path / "0") == losses(tmp_path / "1000000.0") != losses(tmp_path / "0.01")
    assert losses(tmp_path / "0.01", "grad_norm")[0] == losses(tmp_path / "0", "grad_norm")[0] > 0.1


def test_documents_are_packed(whole, ran, out, tmp_path):
    """Here words are documents. The self-check also compares the operators on documents."""
    changes = {"documents": "pack", "end_of_text": 32, "max_iters": 2, "self_check": "on", "recompute": "block"}
    said = ran(out, **changes).out
    assert "documents, whole sequences and states agree to " in said and losses(out)[0] != losses(whole)[0]
    ran(tmp_path / "plain", **{**changes, "recompute": "none", "backend": "torch", "self_check": "off"})
    np.testing.assert_allclose(losses(out), losses(tmp_path / "plain"), rtol=1e-4)


# --------------------------------------------------------------------------------------------------------------- resume

def test_stopping_and_continuing_changes_nothing(whole, ran, out, tmp_path):
    """Slurm's warning stops a hybrid with Muon in the step of an evaluation. Its folder is moved, and it is stopped
    again in the first step after resuming. With a log line every seven steps, a stop adds none, but the end does."""
    changes = {"pattern": "longhorn,llama", "n_layer": 2, "optimizer": "muon", "log_interval": 7}
    ran(tmp_path / "undisturbed", **changes)
    last = ran(out, **changes, resume="auto", LM=stops_at(5, signal.SIGUSR1)).out.splitlines()[-1]
    assert last.startswith("stopped after step 5 of 12") and last.endswith(" --resume=auto")
    assert f"--out_dir={out}" in shlex.split(last) and last.count("--resume=") == 1
    assert 5 in events(out, "eval") and saved(out)[1]["step"] == 5 and not (out / "result.json").exists()
    out = out.rename(tmp_path / "moved")
    (out / "config.json").write_text(json.dumps({"time": "long ago"}))  # everything else is written again
    assert "at step 5" in ran(out, **changes, resume="must", LM=stops_at(1, signal.SIGINT)).out
    assert record(out, "config")["time"] == "long ago" and saved(out)[1]["step"] == 6
    ran(out, **changes, resume="must")
    assert_same_run(out, tmp_path / "undisturbed")
    assert list(events(out)) == [7, 12] and losses(out)[-1] != losses(whole)[-1]


def test_some_settings_may_change_when_a_run_continues(whole, data, ran, out, tmp_path):
    ran(out, resume="auto", LM=stops_at(3))  # nothing there yet: auto starts
    tensors, meta = saved(out)
    meta |= {"best_val_loss": 0.5, "skipped": 2, "seconds": 1000.0}
    checkpoint.save(out / "checkpoint.safetensors", tensors, meta)
    moved = shutil.copytree(data, tmp_path / "moved")
    changes = {"eval_interval": 4, "timeout_minutes": 3.0, "keep_checkpoints": 5, "checkpoint_interval": 6}
    go_on = functools.partial(ran, out, dataset=moved, resume="auto", **changes)
    assert "eval_interval 5 -> 4" in go_on().out and losses(out) == losses(whole)
    assert record(out)["best_val_loss"] == 0.5 and record(out)["skipped_steps"] == 2
    assert 1000 < saved(out)[1]["seconds"] <= record(out)["seconds"] < 2000
    left = {p.name: p.read_bytes() for p in out.iterdir()}
    assert "already finished" in go_on().out
    assert left == {p.name: p.read_bytes() for p in out.iterdir()}


def test_the_best_is_chosen_anew_over_other_tokens(ran, out):
    how = {"final_eval_tokens": 320, "eval_tokens": 64}
    ran(out, **how, LM=stops_at(7))
    tensors, meta = saved(out)
    checkpoint.save(out / "checkpoint.safetensors", tensors, {**meta, "best_val_loss": 0.1, "best": [0.1, 5]})
    ran(out, **{**how, "eval_tokens": 320}, resume="auto")
    later = {step: e["val_loss"] for step, e in events(out, "eval").items() if step > 7}
    assert sorted(later) == [10, 12] and record(out)["best_val_loss"] == min(later.values()) > 0.1
    assert checkpoint.load(out / "best.safetensors")[1]["step"] == min(later, key=later.get)


def test_the_last_evaluation_is_compared_over_the_tokens_of_the_others(ran, out):
    how = {"eval_tokens": 64, "final_eval_tokens": 320}
    ran(out, **how)
    loss, step = checkpoint.load(out / "best.safetensors")[1]["best"]
    assert step == 12 and loss == record(out)["best_val_loss"] != record(out)["val_loss"]
    assert f"compare_loss {loss:.4f}" in ran(out, **how, eval_only=True).out


def damage(path):
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("act, words", [(damage, "skipped: {}: damaged"), (Path.unlink, "")])
def test_a_damaged_checkpoint_is_passed_over(whole, ran, out, act, words):
    """The run continues from the previous checkpoint, and the later part of the log is dropped."""
    shutil.copytree(whole, out)
    newest = out / "checkpoint.safetensors"
    act(newest)
    result = ran(out, resume="auto")
    assert words.format(newest) in result.out
    assert f"continuing from {out / 'checkpoint-10.safetensors'} at step 10" in result.out
    assert_same_run(out, whole)
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in whole.iterdir())


@pytest.mark.parametrize("changes, stop", [({"schedule": "constant"}, 12), ({"schedule": "wsd", "decay_iters": 4}, 7),
                                           ({"schedule": "constant", "warmup_iters": -1, "max_iters": 80}, 1)], ids=str)
def test_a_run_can_be_made_longer_or_shorter(data, ran, out, tmp_path, changes, stop):
    """It then equals, bit for bit, a run planned with this length and warmup from the start."""
    plan = {"warmup_iters": 2, "eval_tokens": 64, **changes}
    longer = {**plan, "max_iters": stop + 4, "resume": "auto"}
    ran(tmp_path / "whole", **{**longer, "warmup_iters": 4 if stop == 1 else 2})
    ran(out, **plan, LM=stops_at(stop))
    assert (out / "result.json").exists() == (stop == plan.get("max_iters", 12))
    said = ran(out, **longer, LM=stops_at(2)).out
    assert f"max_iters {plan.get('max_iters', 12)} -> {stop + 4}" in said
    assert not (out / "result.json").exists(), "this is the result of the shorter run"
    ran(out, **longer)  # the same command again
    assert_same_training(out, tmp_path / "whole")
    assert record(out)["val_loss"] == record(tmp_path / "whole")["val_loss"] and record(out)["steps"] == stop + 4
    refuse(arguments(data, out, **{**longer, "max_iters": stop}), f"max_iters {stop + 4} -> {stop}")
    if stop == 1:
        refuse(arguments(data, out, **{**longer, "max_iters": 3}), "max_iters 3 is within this run's warmup of 4 steps")


def test_a_branch_equals_the_run_from_scratch(trunk, ran, tmp_path):
    """Weights and log are equal bit for bit, also if the branch is stopped on its way and ends after its trunk. A
    branch stopped in its first step has saved the step where it began. An earlier run in its folder stays whole."""
    kept = "best checkpoint checkpoint-10 checkpoint-4 checkpoint-8"
    assert " ".join(sorted(p.stem for p in trunk.glob("*.safetensors"))) == kept
    for step, end, decay in ((4, 5, -1), (10, 16, 5)):
        out = tmp_path / f"branch{end}"
        scratch = tmp_path / f"scratch{end}"
        plan = {**PLAN, "max_iters": end, "decay_iters": decay}
        ran(scratch, **plan)
        go_on = functools.partial(ran, out, **plan, branch=f"{trunk}@{step}", resume="auto")
        if end == 16:
            assert f"branching from {trunk}/checkpoint-10.safetensors at step 10" in go_on(LM=stops_at(2)).out
        go_on()
        assert_same_run(out, scratch)
    ran(tmp_path / "stopped", **PLAN, max_iters=16, branch=f"{trunk}@10", micro_batch_size=4, LM=stops_at(1))
    assert saved(tmp_path / "stopped")[1]["step"] == 10
    (out / "checkpoint-99.safetensors").touch()
    ran(out, **PLAN, branch=f"{trunk}@12")
    assert (out / "earlier-1/checkpoint-99.safetensors").exists()


def test_kept_steps_stay_even_if_they_are_not_named_again(ran, out):
    plan = {"checkpoint_interval": 2, "keep_checkpoints": 1, "schedule": "constant"}
    ran(out, **plan, max_iters=8, keep_steps="2,4")
    for end in 8, 10, 12:
        ran(out, **plan, max_iters=end, resume="auto")
        kept = {p.stem for p in out.glob("checkpoint-*.safetensors")}
        assert kept == {"checkpoint-2", "checkpoint-4"} and record(out, "config")["config"]["keep_steps"] == "2,4"


def test_code_and_machines_that_changed_while_the_run_was_down_are_named(whole, ran, out, monkeypatch):
    """A line says so when the run continues, and config.json keeps it; nothing else changes."""
    versions = lambda: record(out, "config")["code_versions"]

    def go_on(code, LM=LM):
        monkeypatch.setattr(records, "code_identity", lambda: {"code": code, "code_files": {}})
        said = ran(out, resume="auto", LM=LM).out.splitlines()
        return [line for line in said if "the code was" in line]

    assert go_on("\x1b", stops_at(3)) == [] and versions() == ["\x1b"]
    said = go_on("b", stops_at(1))
    assert len(said) == 1 and r"the code was \x1b, is now b" in said[0] and versions() == ["\x1b", "b"]
    monkeypatch.setattr(records, "cpu_model", lambda: "another")
    assert go_on("b", stops_at(1)) == [] and versions() == ["\x1b", "b"]
    assert len(go_on("a")) == 1 and versions() == ["\x1b", "b", "a"] == saved(out)[1]["code_versions"]
    assert record(out)["code"] == "a"
    assert [re.sub("'.*' -> ", "", words) for words in record(out, "config")["changes"]] == ["step 4: cpu 'another'"]
    assert_same_run(out, whole)


def module_of(path):
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    return module


def test_the_identity_of_the_code_covers_what_can_change_a_result(tmp_path, monkeypatch):
    """The identity covers the content of imported files, even a user's own file or a link to one, and of the kernels.
    It leaves out README, packages, other scripts, pictures, reports and task scores, imported or not."""
    apart = ("plots.py README.md .venv/torch.py venv/lib/site-packages/torch.py sample.py runtime/loss_curve.py "
             "evaluation/tasks.py bench/scan.py experiments/recall/report.py experiments/vision/report.py").split()
    inside = ("train.py my_loss.py mine/loss.py experiments/vision/classify.py experiments/recall/cell.py "
              "data/loader.py longhorn_scan.cu kernels/lanes.h").split()
    monkeypatch.setattr(records, "ROOT", tmp_path)
    write_files(tmp_path, {name: name for name in apart + inside})
    for name in apart + inside:
        if name.endswith(".py") and name != "plots.py":
            monkeypatch.setitem(sys.modules, name, module_of(tmp_path / name))
    linked = (tmp_path / "my_loss.py").rename(tmp_path.with_suffix(".py"))
    (tmp_path / "my_loss.py").symlink_to(linked)
    codes = [records.code_identity()]
    for name in apart + inside:
        (tmp_path / name).write_text("edited")
        codes.append(records.code_identity())
    assert len({e["code"] for e in codes[:len(apart) + 1]}) == 1 and len({e["code"] for e in codes}) == len(inside) + 1
    assert all(e["code_files"].keys() == set(inside) for e in codes)
    assert all(e["code"].startswith("v2") and len(e["code"]) == 12 for e in codes)


def test_an_edit_while_a_run_starts_is_noticed(tmp_path, monkeypatch, capsys):
    """Importing, building the kernels and checking take seconds. The run would use the code from before the edit."""
    monkeypatch.setattr(records, "ROOT", tmp_path)
    monkeypatch.setattr(records, "files_at_start", {})
    (tmp_path / "kernels").mkdir()
    for name in (*records.NATIVE_SOURCES, "my_mixer.py"):
        (tmp_path / name).write_text(name)
    monkeypatch.setitem(sys.modules, "my_mixer", module_of(tmp_path / "my_mixer.py"))
    stops = []
    for text in ("my_mixer.py", "edited"):  # saved again as it was, then edited
        with contextlib.suppress(SystemExit):
            def main(argv, text=text):
                (tmp_path / "my_mixer.py").write_text(text)
                records.environment()
                sys.exit(0)  # `launch` would leave the process
            distributed.launch("train.py", main)
        stops.append(capsys.readouterr().err)
    assert stops == ["", "train.py: error: my_mixer.py was edited while this program was starting: start it again\n"]


WATCHED = """
import json, os, pathlib, runpy, sys
from runtime import records, telemetry

telemetry.draw_loss = lambda folder: None

def watched(identity=records.code_identity):
    result = identity()
    files = [getattr(m, "__file__", None) for m in list(sys.modules.values())]
    paths = {pathlib.Path(f).resolve() for f in files if f}
    print(json.dumps({"loaded": [str(p) for p in paths if p.is_file()], "hashed": list(result["code_files"])}))
    return result

records.code_identity = watched
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as stop:
    assert not stop.code
assert not {"torch._dynamo", "sympy"} & sys.modules.keys()
"""


def test_what_a_run_loads_is_part_of_its_identity_or_leaves_no_trace(data, out):
    """The run is a hybrid with Muon. If it loaded torch._dynamo or sympy, every start would take two seconds longer."""
    hybrid = arguments(data, out, max_iters=1, pattern="longhorn,gated_deltanet", n_layer=2, optimizer="muon",
                       self_check="on")
    said = subprocess.check_output([sys.executable, "-c", WATCHED, "train.py", *hybrid], cwd=ROOT, text=True)
    of_run = json.loads([line for line in said.splitlines() if line.startswith('{"loaded"')][-1])
    inside = [Path(p).relative_to(ROOT) for p in of_run["loaded"] if Path(p).is_relative_to(ROOT)]
    loaded = {p.as_posix() for p in inside if not p.parts[0].startswith(".") and (ROOT / p).stat().st_size}
    hashed = set(of_run["hashed"])
    assert {"mixers.py", "kernels/scan.py"} <= hashed & loaded
    assert all(name.startswith(records.NO_TRACE) for name in loaded - hashed)
    assert not any(name.startswith(records.NO_TRACE) for name in hashed)


# ------------------------------------------------------------------------------------------ beginning with old weights

STILL = {**TINY, "max_iters": 1, "learning_rate": 1e-30}  # changes nothing: the result is that of the old weights
TAKEN = {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 32}
BARE = {key: value for key, value in TINY.items() if key not in TAKEN}  # the architecture is the checkpoint's


def test_fine_tuning_begins_with_the_old_weights_and_nothing_else(whole, ran, out, tmp_path):
    source = whole / "checkpoint.safetensors"
    said = ran(out, STILL, init_from=source).out
    assert f"weights from {source} (step 12); taken from it: vocab_size=256\n" in said and "continuing" not in said
    assert record(out)["val_loss"] == record(whole)["val_loss"]
    optimizer, = state(out)["optimizers"]
    assert {s["step"].item() for s in optimizer["state"].values()} == {1.0} and saved(out)[1]["step"] == 1
    assert list(events(out)) == [1] and saved(out)[1]["config"]["init_from"] == str(source)
    folder = shutil.copytree(whole, tmp_path / "source")
    earlier = tmp_path / "earlier"
    damage(folder / "checkpoint.safetensors")
    said = ran(earlier, STILL, init_from=folder, eval_block_size=32, block_size=16, backend="torch").out
    assert said.startswith(f"skipped: {folder / 'checkpoint.safetensors'}: damaged (")
    assert f"weights from {folder / 'checkpoint-10.safetensors'} (step 10); taken from it: vocab_size=256; " in said
    assert "; block_size was 32, is 16\n" in said and "backend was" not in said
    assert record(earlier)["val_loss"] == pytest.approx(events(whole, "eval")[10]["val_loss"])


def test_fine_tuning_that_is_stopped_continues_from_its_own_checkpoint(whole, ran, out, tmp_path):
    """No setting gives the architecture. The old weights do, or the run's own checkpoint once there is one."""
    source = shutil.copytree(whole, tmp_path / "source")
    said = ran(tmp_path / "undisturbed", BARE, init_from=source).out
    assert "; taken from it: " + ", ".join(f"{key}={value}" for key, value in TAKEN.items()) + ", vocab_size" in said
    assert losses(tmp_path / "undisturbed")[0] < losses(whole)[0] - 0.5
    ran(out, BARE, init_from=source, resume="auto", LM=stops_at(7))
    shutil.rmtree(source)
    said = ran(out, BARE, init_from=source, resume="auto").out
    assert "at step 7" in said and "weights from" not in said
    assert_same_run(out, tmp_path / "undisturbed")


def test_ctrl_c_while_pytorch_is_imported_gets_a_line(data, out, start):
    gate = out.with_name("gate")
    held = ("import pathlib, runpy, sys, time\n"
            "def watch(event, args):\n"
            "    if event == 'import' and args[0] == 'torch.nn':\n"
            f"        pathlib.Path({str(gate)!r}).touch()\n"
            "        time.sleep(1000)\n"
            "sys.addaudithook(watch)\n"
            "sys.argv = sys.argv[1:]\n"
            "runpy.run_path(sys.argv[0], run_name='__main__')\n")
    process = start([sys.executable, "-c", held, "train.py", *arguments(data, out)])
    while not gate.exists():
        assert process.alive(), process.said()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(600) == -signal.SIGINT and process.said() == "SIGINT: ended before it began\n"


def test_without_the_packages_a_line_says_how_to_get_them(start):
    process = start([sys.executable, "-S", "train.py"])  # -S: without the packages of .venv
    assert process.wait(600) == 1 and process.said().endswith("PyTorch: run `. .venv/bin/activate` first; `make train` "
                                                              "sets .venv up\n")


@pytest.mark.parametrize("call, done, buffers", [(8, 2, 0), (9, 3, 0), (2, 0, 0), (8, 3, 1)])
def test_a_step_is_left_after_the_micro_batch_and_done_again(ran, out, tmp_path, capfd, call, done, buffers):
    """A step has three micro-batches, and the model draws random numbers in each. Nothing is saved before the first
    step is done. A model with a buffer, which counts micro-batches, finishes its step."""
    def noisy(at=None):
        def act(n, lm, loss):
            if n == at:
                os.kill(os.getpid(), signal.SIGTERM)
            for count in lm.buffers():
                count += 1
            return loss * (1 + 0.1 * torch.rand(()).item())

        class Noisy(acting(act)):
            def __init__(self, config):
                super().__init__(config)
                for i in range(buffers):
                    self.register_buffer(f"count{i}", torch.zeros(()))
        return Noisy

    small = {"micro_batch_size": 4, "max_iters": 5, "resume": "auto"}
    ran(tmp_path / "undisturbed", **small, LM=noisy())
    said = ran(out, **small, LM=noisy(call)).out
    assert capfd.readouterr().err.count("SIGTERM: the run stops after this micro-batch") == 1
    words = f"stopped after step {done} of 5 and saved {out}/checkpoint.safetensors; continue"
    if not done:
        words = "stopped in the first step, before there was anything to save; continue"
    assert words in said and (out / "checkpoint.safetensors").exists() == (done > 0)
    ran(out, **small, LM=noisy())
    assert_same_run(out, tmp_path / "undisturbed")


# -------------------------------------------------------------------- what stops a run: numbers, data, memory, settings

@pytest.mark.parametrize("how", ["loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped_and_counted(ran, out, how):
    changes = {"checkpoint_interval": 1, "keep_checkpoints": 12, "max_bad_steps": 3}
    result = ran(out, **changes, LM=poisoned({3, 4, 7, 8}, how))
    assert result.out.count("step skipped") == 4 and "step 4: " in result.out and "(2 in a row)" in result.out
    assert record(out)["skipped_steps"] == 4 and math.isfinite(record(out)["val_loss"])
    skipped = events(out, "skipped")
    assert list(skipped) == [3, 4, 7, 8] and (skipped[3]["train_loss"] is None) == (how == "loss")
    versions = {step: checkpoint.load(path)[0] for step, path in checkpoint.steps(out).items()}
    weights = [name for name in versions[1] if name.startswith(("model", "optimizers"))]
    equal = lambda a, b: all(torch.equal(a[name], b[name]) for name in weights)
    assert [step for step in range(2, 13) if equal(versions[step], versions[step - 1])] == [3, 4, 7, 8]


def test_a_loss_that_stays_not_finite_ends_the_run(data, out):
    """Each skipped step saves the weights of the last finite step again, and these give the same loss."""
    argv = arguments(data, out, checkpoint_interval=2, max_bad_steps=3)
    words = "3 times in a row", f"in {out} only checkpoints from before step 4 are good"
    refuse(argv, "stopped at step 7", *words, LM=poisoned(range(5, 99)))
    assert not (out / "result.json").exists() and list(events(out, "skipped")) == [5, 6, 7]
    tensors, meta = saved(out)
    assert meta["step"] == 6 and all(t.isfinite().all() for name, t in tensors.items() if name.startswith("model"))
    refuse([*argv, "--resume=auto"], *words, LM=poisoned(range(99)))  # before it has saved anything itself


@pytest.mark.parametrize("change, words", [
    (lambda path: os.truncate(path, 7000), ["train.bin", "8,000 bytes then, 7,000 now"]),
    (lambda path: os.replace(shutil.copy2(path, f"{path}.new"), path), ["train.bin", "replaced"]),
    (lambda path: path.with_name("val.bin").write_bytes(bytes(1400)), ["val.bin", "written to"])],
    ids=["cut", "replaced", "edited"])
def test_data_that_change_during_a_run_end_it(data, out, tmp_path, change, words):
    folder = shutil.copytree(data, tmp_path / "data")

    def act(n, lm, loss):
        if n == 7:
            change(folder / "train.bin")

    argv = arguments(folder, out, checkpoint_interval=4, eval_interval=7 if words[0] == "val.bin" else 0)
    refuse(argv, "changed during the run", "--resume=auto", *words, LM=acting(act))
    assert saved(out)[1]["step"] == 4  # the last good one: an evaluation and a checkpoint check the data first


def test_large_data_that_changed_while_the_run_was_down_are_refused(data, ran, out, tmp_path, monkeypatch):
    """The content of a large file is read only if its size or time differs from the checkpoint's."""
    monkeypatch.setattr(prepared, "FULL_CHECK_TOKENS", 100)
    folder = shutil.copytree(data, tmp_path / "data")
    ran(out, dataset=folder, LM=stops_at(5))
    (folder / "train.bin").write_bytes(b"a" + (data / "train.bin").read_bytes()[1:])
    refuse(arguments(folder, out, resume="auto"), "train.bin is not the file that meta.json describes")
    shutil.copy(data / "train.bin", folder / "train.bin")  # with a new time
    verified = mock.Mock(wraps=prepared.Tokens.verify, side_effect=lambda: None)
    monkeypatch.setattr(prepared.Tokens, "verify", verified)
    for step in 7, 9:
        ran(out, dataset=folder, resume="auto", LM=stops_at(step))
        assert verified.call_count == 1


def test_a_damaged_line_of_a_log_costs_only_that_line(whole, ran, out):
    """A resumed run keeps all other lines of its log and the old file, and a line says so. A torn last line does not
    count as damage."""
    ran(out, LM=stops_at(7))
    lines = (out / "log.jsonl").read_text().splitlines()
    text = "\n".join([*lines[:3], lines[3][:-5], "\0\x1c\u2028" + lines[4], "[1]", *lines[5:], '{"ev'])
    (out / "log.jsonl").write_text(text)
    said = ran(out, resume="auto").out
    assert f"3 lines of {out / 'log.jsonl'} are damaged (the first is line 4)" in said
    assert (out / "log-damaged-1.jsonl").read_text() == text
    lost = [json.loads(line) for line in lines[3:5]]
    kept = [line for line in records.read_log(whole) if not any(
        (line["event"], line["step"]) == (e["event"], e["step"]) for e in lost)]
    assert [(e["event"], e["step"]) for e in records.read_log(out)] == [(e["event"], e["step"]) for e in kept]
    assert out / "log-damaged-1.jsonl" in records.run_files(out)  # moves aside with the run


@pytest.mark.parametrize("kept", [True, False])
def test_another_runs_log_is_noticed(whole, trunk, ran, out, kept):
    """The next start also notices a missing log, even if the run has finished. If it goes on, the other log is kept."""
    shutil.copytree(whole, out)
    (out / "log.jsonl").unlink()
    if kept:
        shutil.copy(trunk / "log.jsonl", out)
    line = f"{out / 'log.jsonl'} is not the log of this checkpoint: lines up to step 12 are missing or from another run"
    assert line in (said := ran(out, resume="auto").out) and "already finished" in said
    (out / "result.json").unlink()
    assert line in ran(out, resume="auto").out
    assert (out / "log-damaged-1.jsonl").exists() == kept


@pytest.mark.parametrize("result", ["", "{", "another run's"])
def test_a_result_that_is_lost_or_not_this_runs_is_made_again(whole, trunk, ran, out, result):
    """Making it again adds no line to the log."""
    shutil.copytree(whole, out)
    (out / "result.json").unlink()
    if result:
        (out / "result.json").write_text(result if result == "{" else (trunk / "result.json").read_text())
    said = ran(out, resume="auto").out
    assert (f"{out / 'result.json'} is damaged or belongs to another run" in said) == bool(result)
    assert_same_run(out, whole)


def test_settings_that_may_change_on_resume_are_those_on_the_page():
    text = (ROOT / "docs/reliability.md").read_text().partition("## Settings that may change on resume\n")[2]
    names = set(re.findall(r"`(\w+)`", text.partition("\n\n")[2].partition("\n\n")[0]))
    assert names == MAY_CHANGE_ON_RESUME


PLAN = {"schedule": "wsd", "warmup_iters": 2, "eval_interval": 0, "min_lr": 0, "keep_checkpoints": 1}  # for `trunk`
# What is typed, or is in the environment of two processes; words of the error. {names} are those of `places`.
REFUSED = """
# settings
--documents=pack                    which token ends a document  --end_of_text
--documents=pack --end_of_text=256  end_of_text 256 is not a token of {data}  below 256
--end_of_text=-2                    end_of_text -2  -1
--pattern=longhorn*3,lama           'lama'
--pattern=longhorn*9,llama          no llama in
--block_size=701 --batch_tokens=701
                                    val.bin has 700 tokens  needs 702  smaller block_size
--backend=cpuu                      'cpuu'
--parallel=fsdp                     parallel=fsdp needs several processes  torchrun
--eval_only=true                    {out}: no checkpoint was saved here
--vocab_size=1e9 --n_embd=10000 --model=llama
                                    10,001,206,430,000 parameters take 40,004,825,720,000  smaller
--batch_tokens=384_000_000_000      batch_tokens
# the environment
WORLD_SIZE=two                      WORLD_SIZE='two'
WORLD_SIZE=-1                       must be a whole number in 1 ..
RANK=2                              in 0 .. 1
MASTER_ADDR=                        start all processes with torchrun
TORCHELASTIC_MAX_RESTARTS=2         resume=never  torchrun --max-restarts  --resume=auto
# data
--dataset=pystdlob                  pystdlob  pystdlib
--dataset={data}:0.5,{gpt2}:0.5     {gpt2}  'gpt2'  'bytes'
# folders, and another run's checkpoint
--out_dir={locked}                  another run is writing to {locked}
--out_dir={data}/train.bin/run      {data}/train.bin  out_dir
--resume=must                       resume=must  {out}/checkpoint.safetensors  --resume=auto
{stopped} --learning_rate=0.001 --batch_tokens=768 --seed=7 --schedule=wsd --warmup_iters=3 --model=llama
                                    {stopped}/checkpoint.safetensors  another run  out_dir
                                    learning_rate 0.003 -> 0.001  batch_tokens 384 -> 768  seed 1337 -> 7
                                    schedule 'cosine' -> 'wsd'  warmup_iters -1 -> 3  model 'longhorn' -> 'llama'
{stopped} --documents=pack --end_of_text=32
                                    another run  documents 'join' -> 'pack'  end_of_text -1 -> 32
{stopped} --init_from={whole}       another run  init_from '' -> '{whole}'
{stopped} --dataset={other}         different data  sha256 differs  another out_dir
{stopped} --dataset={other_val}     different data  sha256 differs
{whole} --max_iters=24              max_iters 12 -> 24  --schedule=constant  --schedule=wsd before its decay
{whole} --max_iters=6               max_iters 12 -> 6
{trunk} {plan} --max_iters=24       max_iters 12 -> 24
{junk}                              {junk}/checkpoint.safetensors: cut short  ; {junk}/best.safetensors:
{bad_step}                          {bad_step}/checkpoint.safetensors: does not fit this run
{short}                             {short}/checkpoint.safetensors: does not fit this run
{released}                          as_released=True is no longer a setting  gla_released
# a branch
{plan} --branch={trunk}@7           {trunk} has checkpoints of steps 4, 8, 10, 12
{plan} --branch={trunk}@8 --max_iters=9          max_iters 12 -> 9  learning rates of the 8 steps
{plan} --branch={trunk}@8 --decay_iters=5        decay_iters -1 -> 5  learning rates of the 8 steps
{plan} --branch={trunk}@4 --seed=2               belongs to another run: seed
{plan} --branch={trunk}@4 --out_dir={trunk}      branch={trunk}@4 is in out_dir  choose another out_dir
{plan} --branch={bare}@4            {bare} has no log.jsonl
# old weights
--init_from={empty}                 {empty}: no checkpoint was saved here  python export.py --from_hf={empty}
--init_from=some/model              no checkpoint was saved here  hf download some/model
--init_from={data}/train.bin        train.bin  not a checkpoint of this project
--init_from={whole} --out_dir={whole}            init_from  is in out_dir
--init_from={whole} --n_embd=64     {whole}/checkpoint.safetensors  n_embd was 32, is 64  leave these settings out
                                    embed.weight is (256, 32) in the checkpoint, (256, 64) in the model
--init_from={whole} --n_layer=2     n_layer was 1, is 2
                                    layers.1.branches.0.norm.weight is missing in the checkpoint, (32,) in the model
--init_from={more}                  do not fit this model: more is (5,) in the checkpoint, missing in the model
--init_from={of_gpt2}               {of_gpt2}/checkpoint.safetensors  {data}  tokenizer 'gpt2', not 'bytes'
--init_from={bad_skeleton}          {bad_skeleton}/checkpoint.safetensors: does not fit
--init_from={bad_step}              {bad_step}/checkpoint.safetensors: does not fit
--init_from={bad_size}              {bad_size}/checkpoint.safetensors: does not fit  its n_layer is 'True'
"""
NO_GPU = "--backend=cuda  cuda  GPU"


@pytest.fixture(scope="module")
def trunk(ran, tmp_path_factory):
    """The folder of an undisturbed run of PLAN, with checkpoints to branch from."""
    out = tmp_path_factory.mktemp("trunk") / "run"
    ran(out, **PLAN, keep_steps="4,8,10")
    for path in checkpoint.steps(out).values():
        tensors, meta = checkpoint.load(path)
        checkpoint.save(path, tensors, {**meta, "best_val_loss": 0.1, "best": [0.1, 4]})  # as if over other tokens
    return out


@pytest.fixture(scope="module")
def places(data, ran, whole, trunk, tmp_path_factory):
    """{name: folder} for the names in REFUSED."""
    class Places(dict):
        def __missing__(self, name):
            return root / name

    root = tmp_path_factory.mktemp("places")
    places = Places(data=data, whole=whole, trunk=trunk)
    (tensors, meta) = saved(whole)
    old = state(whole)
    places["plan"] = root / "plan.py"
    places["plan"].write_text("\n".join(f"{name} = {value!r}" for name, value in PLAN.items()))
    write_data(root / "other", seed=1)
    write_data(root / "gpt2", tokenizer="gpt2")
    write_data(root / "other_val", val=600)  # with the same train.bin

    def write(name, tensors=tensors, **changes):
        (root / name).mkdir()
        checkpoint.save(root / name / "checkpoint.safetensors", tensors, {**meta, **changes})

    write("released", config={**meta["config"], "as_released": True})
    with_more, skeleton = checkpoint.flatten({**old, "model": {**old["model"], "more": torch.ones(5)}})
    write("more", with_more, skeleton=skeleton)
    write("short", {name: t[:5] if name.endswith("embed.weight") else t for name, t in tensors.items()})
    write("of_gpt2", tokenizer="gpt2")
    write("bad_step", step="five")
    write("bad_size", config={**meta["config"], "n_layer": True})
    write("bad_skeleton", skeleton=7)
    (root / "empty").mkdir()
    shutil.copytree(trunk, root / "bare", ignore=shutil.ignore_patterns("log.jsonl"))
    for name in ("checkpoint", "best"):
        (root / "junk").mkdir(exist_ok=True)
        (root / "junk" / f"{name}.safetensors").write_bytes(b"junk")
    ran(root / "stopped", LM=stops_at(3))
    with lock_run_dir(root / "locked"):
        yield places


@pytest.mark.parametrize("typed, words", [
    (typed, words) for typed, *words in table(REFUSED + NO_GPU * (not torch.cuda.is_available()))], ids=str)
def test_mistakes_get_one_line_and_touch_nothing(places, data, out, monkeypatch, typed, words):
    argv = arguments(data, out)
    places["out"] = out
    for word in typed.split():
        name, _, value = word.partition("=")
        if name.isupper():
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
            two = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29877", name: value}
            for key, text in two.items():
                monkeypatch.setenv(key, text)
            argv.append("--timeout_minutes=0.02")
        elif word.startswith("{") and word != "{plan}":
            argv += [f"--out_dir={places[word[1:-1]]}", "--resume=auto"]
        else:
            argv.append(word.format_map(places))
    folder = [word for word in argv if word.startswith("--out_dir=")][-1].partition("=")[2]
    content = lambda: {path: path.read_bytes() for path in Path(folder).rglob("*")
                       if path.is_file() and path.name != ".lock"}
    before = content()
    refuse(argv, *(word.format_map(places) for word in words))
    assert content() == before


FAULTS = [  # where; what goes wrong; sequences in a micro-batch; words of the error
    ("evaluation.validation.Evaluate.loss", MemoryError, 5,
     "micro-batch of 5 x 32  --micro_batch_size=2 --resume=auto"),
    ("optim.AdamW.step", torch.OutOfMemoryError("CUDA out of memory."), 1, "micro-batch of 1 x 32  smaller block_size"),
    ("common.files.os.replace", OSError(errno.EBUSY, "Device or resource busy"), 12,
     "cannot write to {out}/config.json (Device or resource busy)  another out_dir"),
    ("os.fsync", OSError(errno.ENOSPC, "No space left on device"), 12,
     "cannot write to {out}/config.json (No space left on device): make room")]


@pytest.mark.parametrize("place, error, size, words", FAULTS)
def test_an_error_that_ends_a_run_gets_one_line(data, out, place, error, size, words):
    with mock.patch(place, side_effect=error):
        refuse(arguments(data, out, micro_batch_size=size), *words.format(out=out).split("  "))


def test_help_lists_every_key():
    lines = {line.split()[0]: line for line in succeed(["--help"]).out.splitlines() if line.strip()}
    for field in dataclasses.fields(TrainConfig):
        assert len(lines.get(f"--{field.name}", "").split()) > 3, f"--{field.name} is not explained"


def test_wandb_gets_the_run_and_its_losses_if_it_is_asked_for(ran, tmp_path, monkeypatch):
    """In wandb a run has its given name or that of its folder. A resumed run keeps its id; a branch gets another."""
    wandb = mock.Mock(summary={})
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    go = lambda name, **how: ran(tmp_path / name, max_iters=4, final_eval_tokens=64, **how)
    go("quiet")
    assert not wandb.mock_calls
    twice = tmp_path / "twice"
    named = {"wandb": "offline", "wandb_project": "p", "wandb_run_name": "mine"}
    go("twice", **named, LM=stops_at(3))
    go("twice", **named, resume="auto")
    for step, e in events(twice).items():
        wandb.log.assert_any_call({key: v for key, v in e.items() if key not in ("event", "step")}, step=step)
    assert wandb.finish.called and wandb.summary == record(twice)
    go("branch", wandb="offline", branch=f"{twice}@4")
    first, again, branch = (call.kwargs for call in wandb.init.call_args_list)
    assert "{name} {project} {mode} {resume}".format(**first) == "mine p offline allow"
    assert first["config"]["seed"] == 1337 and first["id"] == again["id"] != branch["id"]
    assert branch["name"] == "branch"


def test_eval_only_says_the_loss_of_the_weights_and_touches_nothing(whole, data, ran, out):
    """The weights are this run's last checkpoint, or those that init_from names."""
    result = record(whole)
    content = sorted(path.name for path in whole.iterdir())
    for said in (ran(whole, BARE, eval_only="true", resume="auto"), ran(out, eval_only="true", init_from=whole)):
        origin, line = said.out.splitlines()
        assert origin.startswith(f"weights from {whole / 'checkpoint.safetensors'} (step 12); taken from it: ")
        assert origin.endswith(f"; scored on {data}")
        assert line == (f"val_loss {result['val_loss']:.4f}  val_tokens {result['val_tokens']}  "
                        f"val_bits_per_byte {result['val_bits_per_byte']:.4f}")
    assert not out.exists() and sorted(path.name for path in whole.iterdir()) == content
    bare = succeed([f"--out_dir={whole}", "--eval_only", "--device=cpu", "--dtype=float32"]).out
    assert f"; scored on {data}\nval_loss {result['val_loss']:.4f}" in bare


def test_the_same_vocabulary_may_have_another_name(whole, out):
    config = TrainConfig(**TAKEN, vocab_size=256, init_from=str(whole), out_dir=str(out))
    config.overrides = {}
    initial = checkpoint.Initial(config)
    initial.meta |= {"tokenizer": "hf:a", "table": '{"model":{"vocab":{"a":0}}}'}
    for other in "other", '{"model": {"vocab": {"b": 0}}}':
        with pytest.raises(ConfigError, match="another vocabulary.*table 27 characters of sha256 [0-9a-f]{12}, not "):
            initial.load(LM(config), mock.Mock(meta={"tokenizer": "hf:a", "table": other}))
    theirs = {"tokenizer": "hf:b", "table": '{"model": {"vocab": {"a": 0}}, "ends_documents": "a"}'}
    assert "weights from" in initial.load(LM(config), mock.Mock(meta=theirs))


def test_a_step_that_takes_minutes_on_a_cpu_is_announced(data, out):
    """A core takes 1.12e-11 s per FLOP and 3.9e-5 s per token. A weight of a linear map costs 6 FLOPs per token."""
    argv = arguments(data, out, n_layer=4, n_embd=512, batch_tokens=128000, self_check="on", model="llama")
    with mock.patch("inspection.self_check.self_check", side_effect=ConfigError("it begins")):
        said = run(argv)
        assert "it begins" in said.err and run([*argv, "--batch_tokens=12800"]).out == ""
    assert "128,000 tokens" in said.out and "python train.py config/longhorn_laptop.py" in said.out
    minutes = int(re.search(r"about (\d+) minutes", said.out)[1])
    assert minutes == round(128000 * (1.12e-11 * 6 * (4 * 12 * 512**2 + 256 * 512) + 3.9e-5) / 60)


@pytest.mark.parametrize("module, words", [
    (None, "pip install wandb"), (mock.Mock(**{"login.side_effect": LookupError("no key")}), "no key")])
def test_a_wandb_that_cannot_log_is_refused_before_anything_is_moved(data, out, monkeypatch, module, words):
    monkeypatch.setitem(sys.modules, "wandb", module)
    refuse(arguments(data, out, wandb="online"), "wandb=online", words, "--wandb=offline")
    assert not out.exists() or not [p for p in out.iterdir() if p.name != ".lock"]


# -------------------------------------------------------------------------------- other models, data and evaluations

class Line(torch.nn.Module):
    """The model y = a x + noise, with what `train` needs of a model."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(1, 1))

    def forward(self, x, y, loss_only):
        noise = torch.randn_like(x) + random.gauss(0, 1) + np.random.randn()  # the last two keep a number for later
        return None, (self.a * x - y + 0.01 * noise).square().mean()


class Points:
    identity = {"points": "3x"}
    meta = {}
    derived = lambda self, config, world_size: {}
    check_unchanged = lambda self: None

    def micro_batches(self, step, rank, world_size, micro_batch_size):
        x = torch.linspace(-1, 1, 4) + step
        for part in x.split(micro_batch_size):
            yield part, 3 * part, len(part) / 4


def test_any_model_and_data_can_be_trained(out, tmp_path):
    """The loop, resuming and records are the same. An evaluation's metrics are logged, and it can end the run.
    Afterwards the caller handles signals again."""
    whole = tmp_path / "whole"
    asked = []
    before = signal.getsignal(signal.SIGTERM)
    config = TrainConfig(out_dir=str(whole), max_iters=40, eval_interval=5, learning_rate=0.2, min_lr=0.2,
                         warmup_iters=0, micro_batch_size=3, dtype="float32", self_check="off", log_interval=1,
                         weight_decay=0)

    def evaluate(model, final=False):
        asked.append(final)
        error = abs(model.a.item() - 3)
        return {"val_loss": error, "slope": model.a.item(), "stop": error < 0.5}

    def go_on(seed, config, data, evaluate=evaluate):
        train.seed_all(seed)
        return train.train(config, Line(), data, evaluate)

    stops = Points()
    stops.check_unchanged = lambda: os.kill(os.getpid(), signal.SIGTERM)
    with mock.patch("runtime.telemetry.draw_loss", no_picture):
        metrics = go_on(0, config, Points())
        assert abs(metrics["slope"] - 3) < 0.5 and "stop" not in metrics and metrics["val_loss"] < 0.5
        steps = record(whole)["steps"]
        assert 5 < steps < 40 and steps % 5 == 0 and asked == [False] * (steps // 5)
        assert events(whole, "eval")[steps]["slope"] == record(whole)["slope"] == metrics["slope"]
        config = dataclasses.replace(config, resume="auto")
        (whole / "result.json").unlink()
        go_on(0, config, Points())  # it had ended
        assert record(whole)["steps"] == steps and record(whole)["slope"] == metrics["slope"]
        config = dataclasses.replace(config, out_dir=str(out))
        assert go_on(0, config, stops) is None and saved(out)[1]["step"] in (5, 6)
        go_on(1, config, Points())  # the checkpoint has the random state
        assert_same_training(out, whole)
        assert signal.getsignal(signal.SIGTERM) is before
