"""experiments/vision/ and data/images.py: the models, the images, the runs and the report.

Directions are compared with flipped images, and ViT with PyTorch's encoder. Folders of images are made here."""

import functools
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from helpers import (
    ROOT,
    assert_same_training,
    events,
    log_lines,
    no_picture,
    record,
    refuse,
    run,
    saved,
    state,
    succeed,
    table,
)
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import configurator
from data import images
from data.epochs import epoch_order
from experiments import figures, records
from experiments.vision import report
from experiments.vision import sweep as sweep_of_images
from experiments.vision.classify import Vision, VisionConfig, build_model, evaluate, outcome
from inspection import counting
from kernels.scan import longhorn_scan
from model import Longhorn, Mamba
from runtime import distributed, signals

PROGRAM = "experiments/vision/classify.py"
run = functools.partial(run, program=PROGRAM)
succeed = functools.partial(succeed, program=PROGRAM, draw_loss=no_picture)
refuse = functools.partial(refuse, program=PROGRAM)
pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = {"n_layer": 2, "n_embd": 32, "n_head": 2, "d_state": 4, "max_iters": 12, "eval_interval": 5, "log_interval": 1,
         "device": "cpu", "dtype": "float32"}


def config_of(file="vil_digits", classes=10, **changes):
    c = configurator.load(VisionConfig, [f"config/{file}.py", *(f"--{k}={v}" for k, v in changes.items())])
    c.vocab_size = classes
    return c


def small(**changes):
    return config_of(**{**SMALL, **changes})


def data_of(**changes):
    return images.ImageData(small(**changes), torch.device("cpu"))


def arguments(out, file="vil_digits", **changes):
    return [f"config/{file}.py", *(f"--{k}={v}" for k, v in {**SMALL, "out_dir": out, **changes}.items())]


# --------------------------------------------------------------------------------------------------------------- model

@pytest.mark.parametrize("file,directions,count", [
    ("vim_tiny", "separate", 7_148_008), ("vil_tiny", "separate", 6_853_096), ("vil_tiny", "shared", 6_290_920),
    ("vim_small", "separate", 25_796_584), ("vil_small", "separate", 25_206_760),
    ("deit_tiny", "separate", 5_717_416), ("deit_small", "separate", 22_050_664)])  # the last two are timm's
def test_models_have_the_right_number_of_parameters(file, directions, count):
    with torch.device("meta"):
        parts = counting.parameter_count(Vision(config_of(file, 1000, directions=directions)))
        task = "cifar" if directions == "shared" else "digits"  # the three families of a task have about one size
        equal = [counting.parameter_count(Vision(config_of(f"{f}_{task}")))["total"] for f in ("vil", "vim", "vit")]
    assert parts["total"] == sum(n for name, n in parts.items() if name != "total") == count
    assert max(equal) < 1.02 * min(equal)


@pytest.mark.parametrize("size, changes", [
    ("tiny", {"batch_images": 1024, "weight_decay": 0.1, "drop_path": 0}),
    ("small", {"batch_images": 512, "weight_decay": 0.05, "drop_path": 0.05})])
def test_the_papers_models_have_the_recipe_of_vision_mamba(size, changes):
    wanted = changes | dict(
        epochs=300, learning_rate=1e-3, min_lr=1e-5, schedule="cosine", beta1=0.9, beta2=0.999, grad_clip=0,
        patch_size=16, rand_augment=9, erasing=0.25, smoothing=0.1, ema=0.99996, eval_crop=0.875,
        warmup_iters=5 * (1_281_167 // changes["batch_images"]))  # five epochs
    for family in ("vil", "vim"):
        c = vars(config_of(f"{family}_{size}"))
        assert c | wanted == c


def test_flops_are_those_that_pytorch_counts():
    """The FLOPs of a ViT are those of the matrix products that PyTorch counts. A second direction adds one scan."""
    vit, x = Vision(small(model="vit")), torch.randn(1, 1, 8, 8)
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):  # counts this backend's products
        vit(x)
    assert 17 * counting.flops_per_token(vit)["forward"] == pytest.approx(counted.get_total_flops())
    forward, separate = (Vision(small(directions=directions)) for directions in ("forward", "separate"))
    scan = counting.mixing_flops(forward.layers[0].mixer, 17)
    assert counting.mixing_flops(separate.layers[0].mixer, 17) == 2 * scan > 0


def agree(mixer, u, y):
    """Assert that y is mixer(u), with every gradient of a random linear loss."""
    dy, leaves = torch.randn_like(y), [u, *mixer.parameters()]
    got, want = ((a.detach(), *torch.autograd.grad(a, leaves, dy)) for a in (mixer(u), y))
    assert all((a - b).norm() < 1e-12 * b.norm() for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("model,block", [("vil", Longhorn), ("vim", Mamba)])
def test_separate_directions_are_two_blocks_one_of_them_on_the_flipped_image(model, block):
    c = small(model=model, backend="torch")
    mixer, u = Vision(c).double().layers[0].mixer, torch.randn(2, 37, 32, dtype=torch.float64, requires_grad=True)

    def one(way, u):
        plain, weights = block(c, 0).double(), dict(mixer.there.named_parameters()) | dict(way.named_parameters())
        plain.out_proj = nn.Identity()
        del weights["out_proj.weight"]
        return torch.func.functional_call(plain, weights, (u,))[0]

    y = (one(mixer.there, u) + one(mixer.back, u.flip(1)).flip(1)) / 2
    agree(mixer, u, mixer.there.out_proj(y))


def test_shared_directions_are_the_published_op():
    mixer = Vision(small(directions="shared", backend="torch")).double().layers[0].mixer
    m, u = mixer.there, torch.randn(2, 37, 32, dtype=torch.float64, requires_grad=True)
    nn.init.normal_(mixer.norm_weight)
    x, z = m.in_proj(u).chunk(2, -1)
    c = F.silu(F.conv1d(F.pad(x.mT, (3, 0)), m.conv_weight[:, None], m.conv_bias, groups=64).mT)
    r, k, q = m.x_proj(c).split([2, 4, 4], -1)
    rows = c, m.dt_proj(r), k, q
    scan = lambda rows: longhorn_scan(*rows, m.D, dt_bias=m.dt_bias, backend="torch")
    norm = lambda y, w: y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * w
    there, back = scan(rows), scan([a.flip(1) for a in rows]).flip(1)
    y = (norm(there, mixer.norm_weight[0]) + norm(back, mixer.norm_weight[1])) * F.silu(z)
    agree(mixer, u, m.out_proj(y))


def test_vit_is_pytorchs_encoder():
    vit, x = Vision(small(model="vit")), torch.randn(3, 1, 8, 8)
    one = nn.TransformerEncoderLayer(32, 2, 128, 0.0, "gelu", 1e-6, batch_first=True, norm_first=True)
    reference = nn.TransformerEncoder(one, 2, nn.LayerNorm(32, eps=1e-6), enable_nested_tensor=False)
    for p in vit.parameters():
        nn.init.normal_(p, std=0.1)
    with torch.no_grad():
        for i, layer in enumerate(reference.layers):
            (n1, at), (n2, mlp) = ((b.norm, b.mixer) for b in vit.layers[2 * i:2 * i + 2])
            theirs = [layer.norm1, layer.norm2, layer.self_attn.out_proj, layer.linear1, layer.linear2]
            for to, module in zip(theirs, (n1, n2, at.out_proj, mlp.up, mlp.down), strict=True):
                to.load_state_dict(module.state_dict())
            layer.self_attn.in_proj_weight.copy_(at.qkv.weight), layer.self_attn.in_proj_bias.copy_(at.qkv.bias)
        reference.norm.load_state_dict(vit.norm.state_dict())
        h = vit.embed(F.unfold(x, 2, stride=2).mT)
        h = torch.cat([h[:, :8], vit.token.expand(3, 1, -1), h[:, 8:]], 1) + vit.patch_positions
        want = vit.head(reference(h)[:, 8])
        assert torch.allclose(vit(x)[0], want, atol=1e-5)


@pytest.mark.parametrize("model,directions", [
    ("vil", "separate"), ("vil", "shared"), ("vil", "forward"), ("vit", "separate")])
def test_only_the_control_is_blind_behind_the_class_token(model, directions):
    vision, x = Vision(small(model=model, directions=directions)), torch.randn(2, 1, 8, 8, requires_grad=True)
    seen = torch.autograd.grad(vision(x, torch.tensor([1, 2]))[1], x)[0].abs().sum((0, 1, 3))  # by rows of pixels
    assert (seen > 0).tolist() == [True] * 4 + [directions != "forward"] * 4


def test_average_drop_path_and_smoothing_are_right():
    torch.manual_seed(0)
    vision, x = build_model(small(ema=0.9, drop_path=0.5, smoothing=0.2), "cpu"), torch.randn(64, 1, 8, 8)
    y = torch.arange(64) % 10
    vision.keep_average()
    weight = vision.head.weight
    mean = weight.detach().clone()
    for _ in range(3):
        nn.init.normal_(weight)
        vision.after_step()
        mean = 0.9 * mean + 0.1 * weight.detach()
    assert torch.allclose(vision.average.module.head.weight, mean, atol=1e-6)
    assert counting.parameter_count(vision) == counting.parameter_count(Vision(small()))
    logits, smoothed = vision(x, y)
    want = F.cross_entropy(logits, F.one_hot(y, 10) * 0.8 + 0.02)
    assert torch.isclose(smoothed, want) and not torch.equal(logits, vision(x)[0])
    first, last = vision.layers
    for layer in vision.layers:
        layer.norm, layer.mixer = nn.Identity(), nn.Identity()
    ones = torch.ones(10000, 3, 2)
    dropped, *_ = last(ones)
    assert set(dropped.unique().tolist()) == {0.0, 2.0} and abs(dropped.mean() - 1) < 0.05
    assert torch.equal(first(ones)[0], ones)
    logits, loss = vision.eval()(x, y)
    assert torch.isclose(loss, F.cross_entropy(logits, y)) and torch.equal(last(ones)[0], ones)  # only in training


# -------------------------------------------------------------------------------------------------------------- images

@pytest.fixture
def shelf(tmp_path):
    """A folder of images whose classes are shades: 6 x 4 pixels, or 4 x 8 in validation."""
    for part, size, n in (("train", (6, 4), 6), ("val", (4, 8), 2)):
        for shade, name in ((40, "dark"), (200, "light")):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(n):
                Image.new("RGB", size, (shade + i, shade, shade)).save(tmp_path / part / name / f"{i}.png")
    (tmp_path / "train/dark/notes.txt").touch()  # not an image
    return tmp_path


def test_a_folder_of_images_is_read_by_two_ranks(shelf):
    data = data_of(dataset=shelf, channels=3, batch_images=4, repeats=2, mirror=True, min_crop=0.3)
    assert data.classes == ["dark", "light"] and data.val.labels.tolist() == [0, 0, 1, 1] and data.steps_per_epoch == 3
    order = epoch_order(1337, 0, 12, 2)
    assert (order[::2] == order[1::2]).all() and len(set(order.tolist())) == 6
    batches = [[b for rank in range(2) for b in data.micro_batches(step, rank, 2, 1)] for step in (0, 1, 2, 0)]
    for step, batch in enumerate(batches[:3]):
        rows = order[4 * step:4 * step + 4][[0, 2, 1, 3]]  # those of rank 0, then those of rank 1
        for row, (x, y, weight) in zip(rows, batch, strict=True):
            mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])
            shades = 255 * (x[0].mean((1, 2)) * std + mean)
            shade = (40, 200)[row // 6]
            assert shades.tolist() == pytest.approx([shade + row % 6, shade, shade], abs=1e-2)
            assert (y.item(), weight) == (row // 6, 0.5)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(batches[3], batches[0], strict=True))
    (rows, x, y), (last, _, _) = data.eval_batches(np.arange(1, 4), 2)
    assert [*rows, *last] == [1, 2, 3] and y.tolist() == [0, 1] and x.shape == (2, 3, 8, 8)
    (shelf / "train/dark/5.png").rename(shelf / "train/dark/9.png")
    assert images.load(str(shelf))[3]["sha256"] != data.identity["sha256"]


@pytest.mark.parametrize("most", [images.READ_WHOLE, 1000], ids=["whole", "pieces"])
def test_images_are_known_by_their_content(shelf, monkeypatch, most):
    """An image changed in place, with the same size and time, makes another dataset."""
    monkeypatch.setattr(images, "READ_WHOLE", most)
    path = shelf / "val/dark/0.bmp"
    Image.effect_noise((60, 60), 50).save(path)
    known = images.load(str(shelf))[3]
    before, times = path.read_bytes(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    path.write_bytes(before[:2500] + bytes([before[2500] ^ 255]) + before[2501:])
    os.utime(path, ns=times)
    assert images.load(str(shelf))[3] != known


@pytest.mark.parametrize("before", (True, False))
def test_a_wait_for_data_ends_after_a_signal(before):
    """The reader never answers, as on a file system that hangs; a signal before or during the wait ends the process."""
    process = multiprocessing.get_context("fork").Process(target=wait_for_ever, args=(before,))
    process.start()
    process.join(60)
    assert process.exitcode == 75


def wait_for_ever(before):
    images.GRACE_SECONDS = 0.1
    with signals.Signals(), ThreadPoolExecutor(1) as pool:
        assert images.wait_for(pool.submit(int, "5")) == 5
        threading.Timer(0 if before else 1.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        time.sleep(0.3 if before else 0)
        images.wait_for(pool.submit(threading.Event().wait))


def test_crops_look_where_they_say():
    ramp = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(1, 64).repeat(32, 0))  # 64 wide, 32 high
    split = images.Split(np.zeros(1, np.int64), [ramp], lambda image: image)
    middle = images.read(split, 0, small(eval_crop=0.5))[0, 0].astype(float)
    assert abs(middle.mean() - 31.5) < 1 and abs(middle[-1] - middle[0] - 14) <= 1  # 16 of 64 columns
    c = small(min_crop=0.1, mirror=True)
    ends = np.array([images.read(split, 0, c, [seed])[0, 0, [0, -1]] for seed in range(200)]).astype(int)
    assert 60 < (ends[:, 0] > ends[:, 1]).sum() < 140 and ends.min() < 4 and ends.max() > 60
    boxes = np.array([images.random_box(64, 64, 0.1, np.random.default_rng(seed)) for seed in range(200)])
    width, height = (boxes[:, 2:] - boxes[:, :2]).T
    areas, shapes = width * height / 64**2, width / height
    assert 0.1 <= areas.min() < 0.12 and areas.max() > 0.9 and boxes.min() >= 0 and boxes.max() <= 64
    assert 0.75 <= shapes.min() < 0.8 and 1.25 < shapes.max() < 1.34


def test_crops_differ_from_epoch_to_epoch_and_validation_has_none():
    def raw(split, rows):
        pixels = np.stack([split.open(split.keys[i]) for i in rows])[:, None]
        return torch.from_numpy(pixels / np.float32(127.5)) - 1

    data, seen = data_of(batch_images=150, min_crop=0.3, mirror=True, max_iters=2, eval_crop=1.0), []
    assert data.identity["sha256"].startswith("a1278e238f61")  # the held-out images are those of results/
    data.n, data.steps_per_epoch = 150, 1
    for epoch in (0, 1):
        ((x, _, _),) = data.micro_batches(epoch, 0, 1, 150)
        seen.append(x[epoch_order(1337, epoch, 150).argsort()])  # in the order of the files
    for other in (seen[1], raw(data.train, range(150))):
        assert torch.isclose(seen[0], other, atol=1e-5).flatten(1).all(1).float().mean() < 0.1
    for rows, x, _ in data.eval_batches(np.arange(1, 450, 60), 3):
        torch.testing.assert_close(x, raw(data.val, rows))


def test_datasets_gives_what_the_folder_gives(shelf, monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    shutil.copytree(shelf / "train", shelf / "test")  # not read if there is val
    of = lambda data: [data[2], *((s.labels.tolist(), np.asarray(s.open(s.keys[3])).tolist()) for s in data[:2])]
    assert of(images.load(str(shelf))) == of(images.load(f"hf:{shelf}"))
    with pytest.raises(images.DataError, match="^hf:[^\n]*$"):
        images.load(f"hf:{shelf}/none")


@pytest.mark.parametrize("kind", ("mixup", "cutmix"))
def test_labels_are_mixed_as_the_pixels_are(kind):
    """kornia mixes images of one shade each, so the mean of a mixed image gives the shares."""
    torch.manual_seed(0)
    y, shades = torch.arange(10), torch.linspace(0, 1, 10)
    flat = shades[:, None, None, None].expand(10, 1, 16, 16)
    x, mixed = images.Augment(small(**{kind: 1.0}), 10)(flat.clone(), y)
    assert torch.allclose(mixed.sum(1), torch.ones(10)) and (mixed.max(1)[0] < 0.99).any()
    assert torch.allclose(x.mean((1, 2, 3)) * 0.5 + 0.5, mixed @ shades, atol=1e-5)
    both = images.Augment(small(mixup=0.5, cutmix=0.5), 10)
    assert all(both(flat.clone(), y)[1].dim() == 2 for _ in range(20))  # always one of the two


def test_augmentations_of_pixels_leave_the_labels():
    x, y = torch.rand(10, 3, 16, 16), torch.arange(10)
    for changes in ({"rand_augment": 9}, {"erasing": 0.5}):
        changed, labels = images.Augment(small(channels=3, **changes), 10)(x, y)
        assert changed.shape == x.shape and changed.isfinite().all() and torch.equal(labels, y)
        assert not torch.equal(changed, images.normalise(x))
    assert images.Augment(small(rand_augment=9), 10).rand_augment.m == 27  # of 30, as 9 of 10


REFUSED = """
--image_size=9             patch_size 2
--model=vis                vil, vim, vit
--dataset=/none            /none/train
--batch_images=13          12 training images
--channels=2               channels 2
--rand_augment=3 --channels=1   rand_augment 3 needs channels=3
--mixup=0.6 --cutmix=0.6   mixup 0.6
--mixup=0.5                pip install kornia
--eval_tokens=9            not for images
"""


@pytest.mark.parametrize("line, words", table(REFUSED))
def test_a_wrong_setting_gets_one_line(shelf, tmp_path, monkeypatch, line, words):
    monkeypatch.setitem(sys.modules, "kornia.augmentation", None)  # not installed
    argv = arguments(tmp_path / "out", dataset=shelf, channels=3, batch_images=4)
    refuse([*argv, *line.split()], words)


def test_a_damaged_folder_of_images_gets_one_line(shelf, tmp_path):
    """Each mistake is found before the one above it."""
    argv, short = arguments(tmp_path / "out", dataset=shelf, channels=3, batch_images=4), shelf / "train/light/3.png"
    short.write_bytes(short.read_bytes()[:50])
    refuse(argv, "train/light/3.png")
    (shelf / "val/dark").rename(shelf / "val/dim")
    refuse(argv, "validation has no image of the class 'dark'")
    os.mkfifo(shelf / "val/light/pipe.png")
    refuse(argv, "not a regular file")
    (shelf / "val").rename(shelf / "test")
    (shelf / "val").mkdir()
    refuse(argv, "has no class folders")


# ---------------------------------------------------------------------------------------------------------------- runs

@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("vision") / "whole"
    return out, succeed(arguments(out, ema=0.9, drop_path=0.3, checkpoint_interval=2))


def test_the_records_of_a_run_are_right(whole):
    out, said = whole
    assert "agree to " in said.out and "states" not in said.out and "no initial_state" in said.out
    result, last = record(out), events(out, "eval")[12]
    assert list(events(out, "eval")) == [5, 10, 12] and result["tokens"] == 12 * 64 * 17
    assert {"val_accuracy", "ema_accuracy", "ema_loss"} <= last.keys() and result["val_images"] == 450
    data = data_of()
    vision, y = build_model(small(ema=0.9), "cpu"), torch.from_numpy(data.val.labels)
    vision.keep_average()
    vision.load_state_dict(state(out)["model"])
    x = torch.from_numpy(np.stack([images.read(data.val, i, small()) for i in range(450)]) / np.float32(127.5) - 1)
    for name, model in (("val", vision), ("ema", vision.average.module)):
        with torch.no_grad():
            logits = model.eval()(x)[0]
        assert result[f"{name}_accuracy"] == pytest.approx((logits.argmax(-1) == y).double().mean().item())
        assert result[f"{name}_loss"] == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-5)
    assert result["val_accuracy"] != result["ema_accuracy"]
    evaluate(small(), data, vision.train())
    assert vision.training


def test_fine_tuning_begins_with_the_old_weights_and_an_average_of_them(whole, tmp_path):
    """The new run has two epochs of one step each."""
    succeed(arguments(tmp_path / "run", ema=0.9, batch_images=1000, epochs=2, max_iters=0, learning_rate=1e-30,
                      self_check="off", init_from=whole[0]))
    before, after = record(whole[0]), record(tmp_path / "run")
    for name in ("val_loss", "ema_loss"):
        assert after[name] == pytest.approx(before["val_loss"], rel=1e-6)
    assert abs(before["val_loss"] - before["ema_loss"]) > 0.001
    derived = record(tmp_path / "run", "config")["derived"]
    assert after["steps"] == 2 and (derived["steps_per_epoch"], derived["epochs"]) == (1, 2)


def test_records_go_to_a_folder_named_after_the_model_and_its_directions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    how = {**SMALL, "max_iters": 1, "image_size": 16, "channels": 1}
    succeed([f"--{key}={value}" for key, value in how.items()] + ["--directions=shared"])
    assert os.listdir("out") == ["vil_shared"]


def test_a_stopped_and_resumed_run_is_the_same_bit_for_bit(whole, tmp_path, monkeypatch):
    out, parts = whole[0], tmp_path / "whole"
    argv = arguments(parts, ema=0.9, drop_path=0.3, checkpoint_interval=2, self_check="off")
    batches = images.ImageData.micro_batches

    def stop(data, step, *given):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return batches(data, step, *given)

    with monkeypatch.context() as patch:
        patch.setattr(images.ImageData, "micro_batches", stop)
        run(argv)
    assert not (parts / "result.json").exists() and max(events(parts)) == 4
    succeed([*argv, "--resume=auto"])
    assert log_lines(parts) == log_lines(out)
    assert_same_training(parts, out)
    assert saved(parts)[0]["model._extra_state"].numel() > 1000  # the average


def test_processes_share_the_validation_images(monkeypatch):
    c, data, answers = small(), data_of(), []
    model = build_model(c, "cpu")
    whole = outcome(c, data, model)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "sum_over_ranks", lambda a, device: answers.append(a) or sum(answers))
    for rank in (0, 1):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        shared = outcome(c, data, model)
    assert shared == pytest.approx(whole, rel=1e-6) and all(0 < (a != 0).sum() < 700 for a in answers)


def test_a_sweep_is_planned_run_and_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "draw", lambda panels, path, style: path.touch())
    short = [f"--{k}={v}" for k, v in {**SMALL, "self_check": "off", "max_iters": 2}.items() if k != "n_layer"]
    cells = sweep_of_images.cells_of("digits", (1, 2), short)
    assert len({c.name for c in cells}) == len(cells) == 18
    assert 1.5 * sum(c.seconds for c in cells) == 2 * 3600  # for three seeds
    assert [c.at["n_layer"] for c in cells if c.at["seed"] == 1] == [4, 4, 4, 4, 3, 2, 2, 1, 1]
    sweep_of_images.runner.write_plan(tmp_path, cells, speed={"ViL, separate, depth 4": 735})
    with mock.patch("runtime.records.code_version", lambda: {"commit": None, "uncommitted_changes": None}):
        for c in (cells[9], cells[4]):  # ViL's second seed, ViT's first
            succeed([*c.argv, f"--out_dir={tmp_path / c.name}"])
    assert sweep_of_images.main(["report", str(tmp_path)]) == 0
    text = re.sub(" +", " ", (tmp_path / "report.md").read_text())
    accuracy = 100 * record(tmp_path / cells[9].name)["val_accuracy"]
    row, = re.findall(r"\| ViL, separate, depth 4 \|.*", text)
    assert row.endswith(f"| {accuracy:.1f} | nan | {accuracy:.1f} | 735 |") and "| ViL-Tiny | 7M | 76.4 |" in text
    assert "![By seed, mean" in text
    assert "2 of 18 runs" in text and "- not run (16): vil" in text and (tmp_path / "report.png").exists()


def test_images_per_second_are_those_of_a_micro_batch(monkeypatch):
    cells = sweep_of_images.cells_of("digits", (1,), ["--n_embd=16", "--micro_batch_size=6"])[:2]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def laps(cpu, *steps):
        assert torch.get_num_threads() == 1
        return [(step(), 0.25)[1] for step in steps]

    monkeypatch.setattr("bench.measure.Cpu.laps", laps)
    assert sweep_of_images.speed(cells) == {"ViL, separate, depth 4": 12, "ViL, shared, depth 4": 12}


def test_the_spread_is_the_standard_deviation_over_seeds():
    for row in report.summarise(records.read(ROOT / "results/vision_digits.json")):
        seeds = row["accuracies"]
        assert len(seeds) == 3 and 85 < min(seeds) < max(seeds) <= 100
        assert (row["mean"], row["spread"]) == pytest.approx((np.mean(seeds), np.std(seeds, ddof=1)))
