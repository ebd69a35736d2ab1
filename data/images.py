"""Labelled images: sources, training order, reading and augmentation.

    digits        scikit-learn's 1,797 handwritten digits of 8 x 8, which come with the package; a quarter is held out
    FOLDER        train/CLASS/*.jpg and val/CLASS/*.jpg, the layout of ImageNet
    hf:NAME       a Hugging Face dataset, such as hf:uoft-cs/cifar10; its validation split, or else test, is held out

Pillow decodes and crops images in threads, one step ahead. RandAugment, mixup, cutmix and erasing come from kornia and
run on the model's device, with one draw per micro-batch. The images of step s and their crops depend only on (seed, s).
"""

import contextlib
import functools
import hashlib
import itertools
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from common.errors import ConfigError, regular
from data.prepared import DataError
from runtime.signals import Signals

LAYOUT = "an image folder has train/CLASS/*.jpg and val/CLASS/*.jpg"
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's red, green and blue; grey images use 0.5
READ_WHOLE, PIECE = 1 << 30, 4096  # see contents
GRACE_SECONDS = 10.0  # how long to wait for images after a signal
RAND_AUGMENT_GROUP = 16  # images that share RandAugment's operations, which kornia draws once per call


@dataclass
class Split:
    """Labelled images 0 .. n - 1."""

    labels: np.ndarray  # (n,) int64
    open: Callable  # i -> PIL image
    name: Callable  # i -> its name in error messages


def load(name):
    """(training Split, validation Split, class names, the dataset's identity: {"sha256": hex, "contents": hex}).

    sha256: of names, sizes and labels; contents: only of a folder's images (see `contents`).
    Raises DataError if `name` is not an image dataset.
    """
    identity = {}
    if name == "digits":
        train, val, classes, about = digits()
    elif name.startswith("hf:"):
        train, val, classes, about = hub(name)
    else:
        train, val, classes, about, identity["contents"] = folder(name)
    check_classes(name, classes, {"validation": val, "training": train})
    about += repr(classes).encode() + train.labels.tobytes() + val.labels.tobytes()
    return train, val, classes, {"sha256": hashlib.sha256(about).hexdigest(), **identity}


def check_classes(name, classes, splits):
    """Raises DataError if a split lacks a class that the other has."""
    for part, other in itertools.permutations(splits):
        missing = np.setdiff1d(splits[other].labels, splits[part].labels)
        if len(missing):
            raise DataError(f"{name}: {part} has no image of the class {classes[missing[0]]!r}, which {other} has: add "
                            "some, or remove the class")


def digits():
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise DataError("dataset=digits comes with scikit-learn: pip install scikit-learn") from None
    data = load_digits()
    images = np.rint(data.images * (255 / 16)).astype(np.uint8)  # (1797, 8, 8)

    def split(rows):
        rows = sorted(rows)
        return Split(data.target[rows].astype(np.int64), lambda i: Image.fromarray(images[rows[i]]),
                     lambda i: f"digit {rows[i]}")

    train, val = train_test_split(np.arange(len(images)), test_size=0.25, stratify=data.target, random_state=0)
    return split(train), split(val), [str(n) for n in data.target_names], images.tobytes()


def folder(name):
    parts = [images_in(Path(name) / part) for part in ("train", "val")]
    paths = list(itertools.chain(*parts))
    classes, labels = np.unique([path.parent.name for path in paths], return_inverse=True)
    about = []
    for path in paths:
        about.append(f"{path.relative_to(name)} {path.stat().st_size}\n")

    def split(own, labels):
        return Split(labels, lambda i: Image.open(regular(own[i])), own.__getitem__)

    first = len(parts[0])
    train = split(parts[0], labels[:first])
    val = split(parts[1], labels[first:])
    return train, val, classes.tolist(), "".join(about).encode(), contents(paths)


def images_in(root):
    """The paths root/CLASS/*.jpg, sorted by name."""
    if not root.is_dir():
        raise DataError(f"there is no folder {root}: {LAYOUT}; other datasets are digits and hf:NAME")
    endings = Image.registered_extensions()
    found = []
    for of_class in sorted(filter(Path.is_dir, root.iterdir())):
        found += [path for path in sorted(of_class.iterdir()) if path.suffix.lower() in endings]
    if not found:
        raise DataError(f"{root} has no class folders with images: {LAYOUT}")
    return found


def contents(paths):
    """The sha256 over the files: all bytes up to a gigabyte in total, else 4 KB from the middle of each, so that
    starting a run does not read all of ImageNet. Raises DataError for pipes, devices and unreadable files."""
    whole = sum(path.stat().st_size for path in paths) <= READ_WHOLE

    def piece(path):
        try:
            with open(regular(path), "rb") as file:
                if whole:
                    return hashlib.sha256(file.read()).digest()
                file.seek(max(0, os.fstat(file.fileno()).st_size - PIECE) // 2)
                return hashlib.sha256(file.read(PIECE)).digest()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}): replace or remove it") from None

    with ThreadPoolExecutor() as pool:
        return hashlib.sha256(b"".join(pool.map(piece, paths))).hexdigest()


def hub(name):
    import datasets

    try:
        data = datasets.load_dataset(name.removeprefix("hf:"))
        train, val = data["train"], data["validation" if "validation" in data else "test"]
    except Exception as error:  # no network, no such name, access refused, no such split
        raise DataError(f"{name}: {' '.join(str(error).split())[:200]}") from None
    columns = {type(kind): key for key, kind in reversed(train.features.items())}  # the first of each kind
    image, label = columns.get(datasets.Image), columns.get(datasets.ClassLabel)
    if image is None or label is None:
        raise DataError(f"{name}: needs an image and a class label column, but its columns are "
                        f"{', '.join(train.features)}")

    def split(part):
        return Split(np.array(part[label], np.int64), lambda i: part[int(i)][image], lambda i: f"{name} {i}")

    return split(train), split(val), train.features[label].names, name.encode()


# ------------------------------------------------------------------------------------------------------- one image

def read(split, i, config, draw=None):
    """Image i as uint8 (channels, image_size, image_size): for training (`draw` is the seed) a random crop, perhaps
    mirrored; otherwise the centre crop, `eval_crop` of the shorter side. Raises DataError for unreadable images."""
    size, mirrored = config.image_size, False
    try:
        image = split.open(i).convert({1: "L", 3: "RGB"}[config.channels])
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{split.name(i)} cannot be read as an image ({why}): replace or remove it") from None
    if draw is None:
        box = middle(*image.size, config.eval_crop)
    else:
        random = np.random.default_rng(draw)
        box = random_box(*image.size, config.min_crop, random)
        mirrored = config.mirror and random.random() < 0.5
    if box != (0, 0, size, size) or image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BICUBIC, box=box)
    pixels = np.asarray(image).reshape(size, size, config.channels).transpose(2, 0, 1)
    return pixels[:, :, ::-1] if mirrored else pixels


def middle(width, height, part):
    side = min(width, height) * part
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_box(width, height, least, random):
    """A box of random area, at least `least` of the image's, and random aspect ratio, 3:4 to 4:3 (Inception's crop);
    the centre if ten draws do not fit. least = 1: always the centre."""
    for _ in range(10 if least < 1 else 0):
        area = random.uniform(least, 1) * width * height
        shape = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = math.sqrt(area * shape), math.sqrt(area / shape)
        if w <= width and h <= height:
            left, top = random.uniform(0, width - w), random.uniform(0, height - h)
            return left, top, left + w, top + h
    return middle(width, height, 1.0)


# -------------------------------------------------------------------------------------------------------- a run's data

@functools.lru_cache(maxsize=2)
def epoch_order(seed, epoch, n, repeats):
    """The n rows of an epoch. repeats > 1: each comes `repeats` times in a row (repeated augmentation, Hoffer et al.
    2020). A batch then has several crops of an image, and an epoch only n / repeats images."""
    return np.repeat(np.random.default_rng([seed, 3, epoch]).permutation(n), repeats)[:n]


class ImageData:
    """A run's images, for train.py's loop. config: a VisionConfig (experiments/vision/classify.py). Raises DataError,
    ConfigError."""

    def __init__(self, config, device):
        self.config, self.device = config, device
        self.train, self.val, self.classes, self.identity = load(config.dataset)
        self.steps_per_epoch = len(self.train.labels) // config.batch_images  # the remainder is dropped
        if not self.steps_per_epoch:
            raise ConfigError(f"batch_images {config.batch_images} is more than the {len(self.train.labels)} training "
                              f"images of {config.dataset}: choose a smaller one")
        self.meta = {"dataset": config.dataset, **self.identity, "classes": self.classes,
                     "train_images": len(self.train.labels), "val_images": len(self.val.labels)}
        self.augment, self.asked = Augment(config, len(self.classes)), {}
        self.pool = ThreadPoolExecutor(config.workers)

    def derived(self, config, world_size):
        return {"steps_per_epoch": self.steps_per_epoch, "epochs": config.max_iters / self.steps_per_epoch}

    def check_unchanged(self):
        """Does nothing: images on disk are not watched, and a missing one is an error when it is read."""

    def micro_batches(self, step, rank, world_size, micro_batch_size):
        """Yields one process's (images, labels, weight) of a step; the weights add up to its share times world_size.

        Also seeds PyTorch, for augmentation and drop path, so that a resumed run draws the same.
        """
        torch.manual_seed(int(np.random.SeedSequence([self.config.seed, 4, step, rank]).generate_state(1)[0]))
        batch, last = self.config.batch_images, self.config.max_iters - 1
        if batch < world_size:
            raise ConfigError(f"batch_images {batch} is less than one per process ({world_size} processes)")
        self.asked = {s: self.asked.get(s) or self.ask(s, rank, world_size) for s in (step, min(step + 1, last))}
        asked = self.asked[step]
        for i in range(0, len(asked), micro_batch_size):
            part = asked[i:i + micro_batch_size]
            y = torch.tensor([label for label, _ in part], device=self.device)
            yield *self.augment(self.pixels([f for _, f in part]), y), len(part) * world_size / batch

    def ask(self, step, rank, world_size):
        """Start reading this process's images of a step: [(label, future of the image)]."""
        config, (epoch, at) = self.config, divmod(step, self.steps_per_epoch)
        order = epoch_order(config.seed, epoch, len(self.train.labels), config.repeats)
        places = range(at * config.batch_images + rank, (at + 1) * config.batch_images, world_size)
        return [(self.train.labels[order[p]], self.pool.submit(read, self.train, order[p], config,
                                                               [config.seed, 5, epoch, p])) for p in places]

    def eval_batches(self, rows, size):
        """Yields (rows, normalised images, labels) of the validation split, reading one batch ahead."""
        parts = [rows[i:i + size] for i in range(0, len(rows), size)]
        ask = lambda part: [self.pool.submit(read, self.val, i, self.config) for i in part]
        coming = ask(parts[0]) if parts else []
        for part, following in zip(parts, [*parts[1:], ()], strict=True):
            now, coming = coming, ask(following)
            yield part, normalise(self.pixels(now)), torch.from_numpy(self.val.labels[part]).to(self.device)

    def pixels(self, asked):
        """float32 (n, channels, size, size) in 0 .. 1, from futures of images."""
        return torch.from_numpy(np.stack([wait_for(f) for f in asked])).to(self.device).float() / 255


def wait_for(future):
    """future.result(). If a file system hangs, the result never comes: the process then ends GRACE_SECONDS after a
    signal, with exit code 75 and without saving."""
    while not future.done() and not wait([future], timeout=1).done:
        if Signals.asked_at and time.monotonic() - Signals.asked_at > GRACE_SECONDS:
            with contextlib.suppress(OSError):
                os.write(2, b"stopped while waiting for data: nothing saved since the last checkpoint; continue from "
                            b"it with --resume=auto\n")
            os._exit(75)  # sys.exit would wait for the reading thread
    return future.result()


def normalise(x):
    mean, std = (MEAN, STD) if x.shape[1] == 3 else ((0.5,), (0.5,))
    shaped = lambda values: torch.tensor(values, device=x.device)[:, None, None]
    return (x - shaped(mean)) / shaped(std)


class Augment:
    """Images in 0 .. 1 and labels (n,) -> normalised images and labels, or (n, classes) probabilities if images are
    mixed. Raises ConfigError if kornia is needed but missing."""

    def __init__(self, config, classes):
        self.config, self.classes = config, classes
        if not (config.rand_augment or config.mixup or config.cutmix or config.erasing):
            return
        try:
            import kornia.augmentation as K
            from kornia.augmentation.auto import RandAugment
        except ImportError:
            raise ConfigError("rand_augment, mixup, cutmix and erasing need kornia: pip install kornia, or set all "
                              "four to 0") from None
        keys = {"data_keys": ["input", "class"]}
        self.rand_augment = RandAugment(n=2, m=3 * config.rand_augment) if config.rand_augment else None  # m of 30
        self.erase = K.RandomErasing(p=config.erasing)
        self.mixup = K.RandomMixUpV2(**keys)
        self.cutmix = K.RandomCutMixV2(**keys, use_correct_lambda=True)

    def __call__(self, x, y):
        config = self.config
        if config.rand_augment:
            x = torch.cat([self.rand_augment(part) for part in x.split(RAND_AUGMENT_GROUP)])
        x = normalise(x)
        if config.erasing:
            x = self.erase(x)
        if not (config.mixup or config.cutmix):
            return x, y
        draw = torch.rand(()).item()
        if draw >= config.mixup + config.cutmix:
            return x, y
        mix = self.mixup if draw < config.mixup else self.cutmix
        x, mixed = mix(x, y)
        first, second, share = mixed.reshape(-1, 3, 1).unbind(1)  # two labels and a share, (n, 1) each
        if mix is self.cutmix:  # CutMix returns the first label's share, mixup the second's
            first, second = second, first
        one_hot = lambda labels: F.one_hot(labels[:, 0].long(), self.classes).float()
        return x, torch.lerp(one_hot(first), one_hot(second), share)
