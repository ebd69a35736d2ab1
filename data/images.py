"""Labelled images: sources, training order, reading and augmentation.

    digits        scikit-learn's 1,797 handwritten digits, 8 x 8 pixels, part of that package. A quarter is held out.
    FOLDER        train/CLASS/*.jpg and val/CLASS/*.jpg, the layout of ImageNet.
    hf:NAME       A Hugging Face dataset, such as hf:uoft-cs/cifar10. Its validation split, or else test, is held out.

Pillow decodes and crops images in threads, one step ahead. RandAugment, mixup, cutmix and erasing come from kornia and
run on the model's device. One draw per micro-batch chooses mixup, cutmix or neither. The images of step s and their
crops depend only on (seed, s).
"""

import contextlib
import hashlib
import itertools
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from common.errors import ConfigError, regular
from data.epochs import EpochData
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
    keys: Sequence  # arguments for `open`, one per image
    open: Callable  # key -> PIL image
    name: str = ""  # error messages put this before an image's key


def load(name):
    """Return (training Split, validation Split, class names, identity: {"sha256": hex, "contents": hex}).

    sha256: of classes and labels, and the digits' pixels, a folder's paths and file sizes, or the name on the hub.
    contents: only for a folder, of its images (see `contents`).
    Raises DataError if `name` is not an image dataset.
    """
    if name == "digits":
        train, val, classes, about, identity = digits()
    elif name.startswith("hf:"):
        train, val, classes, about, identity = hub(name)
    else:
        train, val, classes, about, identity = folder(name)
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
    parts = train_test_split(np.arange(len(images)), test_size=0.25, stratify=data.target, random_state=0)
    splits = [Split(data.target[rows].astype(np.int64), rows, lambda row: Image.fromarray(images[row]), "digit ")
              for rows in map(sorted, parts)]
    return *splits, [str(n) for n in data.target_names], images.tobytes(), {}


def folder(name):
    train, val = (images_in(Path(name) / part) for part in ("train", "val"))
    paths = train + val
    classes, labels = np.unique([path.parent.name for path in paths], return_inverse=True)
    about = "".join(f"{path.relative_to(name)} {path.stat().st_size}\n" for path in paths)
    splits = [Split(of_part, part, lambda path: Image.open(regular(path)))
              for of_part, part in zip(np.split(labels, [len(train)]), (train, val), strict=True)]
    return *splits, classes.tolist(), about.encode(), {"contents": contents(paths)}


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
    """Return a sha256 over all bytes of the files, or above 1 GiB in total, over 4 KiB from the middle of each: a run
    should start without reading all of ImageNet. Raises DataError for pipes, devices and unreadable files."""
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
    columns = {type(kind): key for key, kind in reversed(train.features.items())}  # the first column of each kind
    image, label = columns.get(datasets.Image), columns.get(datasets.ClassLabel)
    if image is None or label is None:
        raise DataError(f"{name}: needs an image and a class label column, but its columns are "
                        f"{', '.join(train.features)}")

    def split(part):
        return Split(np.array(part[label], np.int64), range(len(part)), lambda i: part[i][image], f"{name} ")

    return split(train), split(val), train.features[label].names, name.encode(), {}


# ------------------------------------------------------------------------------------------------------- one image

def read(split, i, config, draw=None):
    """Return image i as uint8 (channels, image_size, image_size). Raises DataError if it is unreadable.

    draw: the seed for a random crop, perhaps mirrored, in training. None: the centre crop, `eval_crop` of the shorter
    side.
    """
    size, mirrored = config.image_size, False
    try:
        image = split.open(split.keys[i]).convert({1: "L", 3: "RGB"}[config.channels])
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{split.name}{split.keys[i]} cannot be read as an image ({why}): replace or remove "
                        "it") from None
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
    """Return a box of random area, at least `least` of the image's, and random aspect ratio, 3:4 to 4:3 (Inception's
    crop). If ten draws do not fit, or least = 1, return the centre box."""
    for _ in range(10 if least < 1 else 0):
        area = random.uniform(least, 1) * width * height
        shape = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = math.sqrt(area * shape), math.sqrt(area / shape)
        if w <= width and h <= height:
            left, top = random.uniform(0, width - w), random.uniform(0, height - h)
            return left, top, left + w, top + h
    return middle(width, height, 1.0)


# -------------------------------------------------------------------------------------------------------- a run's data

class ImageData(EpochData):
    """A run's images, for train.py's loop. config: a VisionConfig (experiments/vision/classify.py). Raises DataError,
    ConfigError."""

    def __init__(self, config, device):
        self.train, self.val, self.classes, self.identity = load(config.dataset)
        n = len(self.train.labels)
        steps_per_epoch = n // config.batch_images  # the remainder is dropped
        if not steps_per_epoch:
            raise ConfigError(f"batch_images {config.batch_images} is more than the {n} training images of "
                              f"{config.dataset}: choose a smaller one")
        super().__init__(config, device, n, config.batch_images, steps_per_epoch, config.repeats)
        self.meta = {"dataset": config.dataset, **self.identity, "classes": self.classes, "train_images": n,
                     "val_images": len(self.val.labels)}
        self.augment = Augment(config, len(self.classes))
        self.pool = ThreadPoolExecutor(config.workers)
        self.asked = {}  # {place: the future of its image}

    def micro_batches(self, step, rank, world_size, micro_batch_size):
        """Yields the micro-batches of EpochData, while threads read the images of the next step."""
        coming = []
        for s in (step, min(step + 1, self.config.max_iters - 1)):
            coming += self.places(s)[rank::world_size]
        self.asked = {place: self.asked.get(place) or self.ask(place) for place in coming}
        yield from super().micro_batches(step, rank, world_size, micro_batch_size)

    def ask(self, place):
        """Start reading a training image; returns its future."""
        epoch, at, row = place
        return self.pool.submit(read, self.train, row, self.config, [self.config.seed, 5, epoch, at])

    def batch(self, places):
        futures = [self.asked.get(place) or self.ask(place) for place in places]
        labels = self.train.labels[[row for *_, row in places]]
        return self.augment(self.pixels(futures), torch.from_numpy(labels).to(self.device))

    def eval_batches(self, rows, size):
        """Yields (rows, normalised images, labels) of the validation split, reading one batch ahead."""
        asked = {}
        for i in range(0, len(rows), size):
            for row in rows[i:i + 2 * size]:
                asked[row] = asked.get(row) or self.pool.submit(read, self.val, row, self.config)
            part = rows[i:i + size]
            labels = torch.from_numpy(self.val.labels[part]).to(self.device)
            yield part, normalise(self.pixels(map(asked.pop, part))), labels

    def pixels(self, futures):
        """Wait for images, and return them as float32 (n, channels, size, size) in 0 .. 1."""
        return torch.from_numpy(np.stack([wait_for(f) for f in futures])).to(self.device).float() / 255


def wait_for(future):
    """Return future.result(). If a hung file system never answers, the process ends GRACE_SECONDS after a signal, with
    exit code 75 and without saving."""
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
    """Augments images in 0 .. 1 with labels (n,). Returns normalised images with their labels, or with (n, classes)
    probabilities if images are mixed. Raises ConfigError if kornia is needed but missing."""

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
        self.rand_augment = RandAugment(n=2, m=3 * config.rand_augment) if config.rand_augment else None  # m: 0 .. 30
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
        draw = torch.rand(()).item() if config.mixup or config.cutmix else 1.0
        if draw >= config.mixup + config.cutmix:
            return x, y
        mix = self.mixup if draw < config.mixup else self.cutmix
        x, mixed = mix(x, y)
        first, second, share = mixed.reshape(-1, 3, 1).unbind(1)  # two labels and a share, (n, 1) each
        if mix is self.cutmix:  # CutMix returns the first label's share, mixup the second's
            first, second = second, first
        one_hot = lambda labels: F.one_hot(labels[:, 0].long(), self.classes).float()
        return x, torch.lerp(one_hot(first), one_hot(second), share)
