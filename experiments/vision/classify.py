"""Image classifiers on train.py's loop: Longhorn in two directions (ViL), Vision Mamba (ViM), and a ViT.

    tokens     image patches with a class token in their middle, plus learned positions; the class token's normed output
               goes to a linear head
    separate   out = W_out (scan(x, z) + scan'(x, z)) / 2     scan' runs from the last token to the first; each has its
               own convolution, keys and step size; z gates both (Zhu et al. 2024, "v2")
    shared     out = W_out ((RMSNorm(scan(x)) + RMSNorm'(scan'(x))) * silu(z))     one convolution, keys and step size:
               the op that Longhorn's authors published; the paper does not say which of the two Table 3 used
    forward    out = W_out scan(x, z)     the control: the class token sees half of the image

    python experiments/vision/classify.py config/vil_digits.py       real images, no download, a minute on a quiet core
    python experiments/vision/classify.py config/vil_tiny.py --dataset=FOLDER       unpacked ImageNet, or hf:NAME
    python experiments/vision/classify.py --help                     all settings; data/images.py describes datasets
    python experiments/vision/sweep.py run                           families, directions, depths and seeds in one table

A block is one residual branch with RMSNorm in float32; a ViT has LayerNorm, attention and MLP.
"""

import functools
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import configurator  # noqa: E402
import train  # noqa: E402
from common.errors import ConfigError  # noqa: E402
from configurator import Count, Probability, Range, Whole  # noqa: E402
from data.images import ImageData  # noqa: E402
from experiments.attention import Attention  # noqa: E402
from initialisation import constant, dense, draw, linear, normal, parameter, to_residual  # noqa: E402
from inspection import counting  # noqa: E402
from kernels.ops import rms_norm  # noqa: E402
from model import LM, Branch, Longhorn, Mamba, RMSNorm, check_sizes  # noqa: E402
from runtime import checkpoint, distributed  # noqa: E402


@dataclass
class VisionConfig(train.TrainConfig):
    # --- run
    task: Literal["images"] = "images"  # marks config files for image classification
    out_dir: str = ""  # folder for the records; empty: out/<name of the last config file>, or out/<model>_<directions>
    # --- model
    model: str = "vil"  # family: vil (Longhorn), vim (Mamba) or vit (attention)
    directions: Literal["separate", "shared", "forward"] = "separate"  # for vil and vim, see classify.py
    n_layer: int = 24  # layers: one residual branch each, two for vit
    n_head: int = 3  # heads (vit)
    n_embd: int = 192  # width of the residual stream
    image_size: Count = 224  # images are scaled to this many pixels on each side
    patch_size: Count = 16  # pixels on each side of a patch
    channels: int = 3  # 3: colour, 1: grey
    block_size: Whole = 0  # not set: the patches and the class token
    vocab_size: Whole = 0  # not set: the number of classes
    drop_path: Annotated[float, Range(0, 0.99)] = 0.0  # probability of skipping the last branch, per image;
    # proportionally less in earlier ones
    # --- data
    dataset: str = "digits"  # digits, a folder with train/CLASS/ and val/CLASS/, or hf:NAME
    workers: Count = 1  # threads that read images, per process
    batch_images: Count = 1024  # images per optimiser step, over all processes and micro-batches
    batch_tokens: Whole = 0  # not set: batch_images times the tokens per image
    micro_batch_size: Count = 128  # images per micro-batch on each process
    epochs: Count = 300  # passes over the training images
    max_iters: Whole = 0  # optimiser steps; 0: all epochs
    # --- augmentation
    min_crop: Annotated[float, Range(0.01, 1)] = 1.0  # smallest share of an image's area that a random crop
    # keeps; 1: no cropping
    mirror: bool = False  # mirror images with probability 1/2
    rand_augment: Annotated[int, Range(0, 9)] = 0  # magnitude of RandAugment's two operations, 1 to 9 of 10; 0: none
    mixup: Probability = 0.0  # probability of blending a micro-batch's images
    cutmix: Probability = 0.0  # probability of pasting parts of a micro-batch's images into each other
    erasing: Probability = 0.0  # probability of erasing a rectangle, per image
    repeats: Count = 1  # crops of an image in a batch
    smoothing: Annotated[float, Range(0, 0.99)] = 0.0  # label smoothing
    eval_crop: Annotated[float, Range(0.01, 1)] = 1.0  # fraction of the shorter side kept in the validation crop
    # --- optimiser
    ema: Probability = 0.0  # decay per step of an average of the weights, which is also evaluated; 0: none

    FIRST = ("model", "n_layer", "n_embd", "image_size", "dataset", "batch_images", "micro_batch_size", "epochs",
             "learning_rate", "out_dir")
    PROGRAMS = {}  # this is the program for task = "images"

    @property
    def families(self):
        return [self.model] * self.n_layer

    @property
    def n_branches(self):
        return len(FAMILIES[self.model]) * self.n_layer


# -------------------------------------------------------------------------------------------------------------- mixers

class TwoWays(nn.Module):
    """A block of model.py in two directions, see above; a subclass names the block. It runs as in language models,
    except that `separate` replaces its `mix`, or `shared` its `scan`."""

    def __init__(self, config, layer):
        super().__init__()
        self.directions, self.backend = config.directions, config.backend
        self.there = self.block(config, layer)
        if self.directions == "separate":
            self.back = self.block(config, layer)
            del self.back.in_proj, self.back.out_proj  # both directions use the projections of `there`
            self.there.mix = self.separate
        if self.directions == "shared":
            self.norm_weight = parameter(2, self.there.d_inner, start=constant(1.0))
            self.there.scan = self.shared

    def forward(self, u):
        return self.there(u)[0]

    def separate(self, x, z, x_before=None, h0=None):
        y, _ = self.block.mix(self.there, x, z)  # (B, T, d_inner)
        y_back, _ = self.back.mix(x, z, reverse=True)
        return (y + y_back) / 2, None

    def shared(self, x, dt, k, q, z, h0):
        y, y_back = (self.block.scan(self.there, x, dt, k, q, None, None, reverse)[0] for reverse in (False, True))
        y = rms_norm(y, self.norm_weight[0], backend=self.backend)
        y_back = rms_norm(y_back, self.norm_weight[1], backend=self.backend)
        return (y + y_back) * F.silu(z), None

    def flops(self, T):
        return (counting.mixing_flops(self.there, T) or 0) * (1 if self.directions == "forward" else 2)


class LonghornTwoWays(TwoWays):
    block, operator = Longhorn, Longhorn.operator


class MambaTwoWays(TwoWays):
    block, operator = Mamba, Mamba.operator


class MLP(nn.Module):
    """W_2 gelu(W_1 x + b_1) + b_2, hidden width four times n_embd."""

    operator = None  # mixes channels

    def __init__(self, config, layer):
        super().__init__()
        d = config.n_embd
        self.up = linear(d, 4 * d, start=normal(0.02), bias=constant(0.0))
        self.down = linear(4 * d, d, start=to_residual(config), bias=constant(0.0))

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


FAMILIES = {"vil": [LonghornTwoWays], "vim": [MambaTwoWays], "vit": [Attention, MLP]}
NORMS = {"vit": lambda config: nn.LayerNorm(config.n_embd, eps=1e-6)}


# --------------------------------------------------------------------------------------------------------------- model

class ImageBranch(Branch):
    """A branch that in training is skipped for some images, with probability `skip` (Huang et al. 2016)."""

    skip = 0.0

    def forward(self, h):
        y, *more = super().forward(h)
        if self.skip and self.training:
            y = y * (torch.rand(len(y), 1, 1, device=y.device) >= self.skip).to(y.dtype) / (1 - self.skip)
        return y, *more


class Vision(LM):
    """A classifier for a VisionConfig: `logits, loss = model(images, labels)`, with LM's other methods.

    Raises ValueError for sizes that do not fit together.
    """

    rest = "patches, positions and head"  # parameter_count's name for all but mixers and norms

    def __init__(self, config):
        nn.Module.__init__(self)
        if config.model not in FAMILIES:
            raise ValueError(f"unknown model {config.model!r}: choose one of {', '.join(FAMILIES)}")
        if config.image_size % config.patch_size:
            raise ValueError(f"image_size {config.image_size} is not a multiple of patch_size {config.patch_size}: "
                             "choose another of the two")
        config = replace(config, block_size=tokens_of(config))
        check_sizes(config)
        seed = torch.randint(2**31, ())  # first, since constructors of PyTorch consume random numbers
        d, self.config, self.average = config.n_embd, config, None
        norm = NORMS.get(config.model, RMSNorm)
        pixels = config.channels * config.patch_size**2
        self.embed = linear(pixels, d, start=dense(pixels), bias=constant(0.0))
        self.token = parameter(d, start=normal(0.02))
        self.patch_positions = parameter(config.block_size, d, start=normal(0.02))
        self.layers = nn.ModuleList(ImageBranch(norm(config), mixer(config, layer))
                                    for layer in range(config.n_layer) for mixer in FAMILIES[config.model])
        for i, branch in enumerate(self.layers):  # the last with probability drop_path, the first never
            branch.skip = config.drop_path * i / max(1, len(self.layers) - 1)
        self.norm = norm(config)
        self.head = linear(d, config.vocab_size, start=normal(0.02), bias=constant(0.0))
        draw(self, seed)

    def forward(self, images, labels=None, loss_only=False):
        """Classify images.

        Args:
            images: (B, channels, image_size, image_size), normalised; labels: (B,) int64, or (B, classes)
            probabilities; loss_only: return None as logits.

        Returns:
            (logits, loss): (B, classes), and the mean cross-entropy in nats per image, None without labels. Labels are
            smoothed only in training.
        """
        patches = F.pixel_unshuffle(images, self.config.patch_size).flatten(2).transpose(1, 2)  # (B, T - 1, pixels)
        h = self.embed(patches)  # (B, T - 1, n_embd)
        middle = h.shape[1] // 2
        h = torch.cat([h[:, :middle], self.token.to(h.dtype).expand(len(h), 1, -1), h[:, middle:]], 1)
        h = h + self.patch_positions  # (B, T, n_embd), float32, even if the branches are not
        for branch in self.layers:
            h = h + branch(h)[0]
        logits, loss = self.head(self.norm(h[:, middle])), None  # (B, classes)
        if labels is not None:
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            loss = F.cross_entropy(wide, labels, label_smoothing=self.config.smoothing if self.training else 0.0)
        return (None if loss_only else logits), loss

    def toy(self, backend):
        """A small model of the same code, for inspection/self_check.py: 37 tokens, more than one chunk of the scan."""
        return type(self)(replace(self.config, n_layer=min(2, self.config.n_layer), n_embd=32, n_head=2, vocab_size=10,
                                  image_size=6 * self.config.patch_size, backend=backend))

    def toy_batch(self):
        size = self.config.image_size
        return torch.randn(2, self.config.channels, size, size), torch.randint(self.config.vocab_size, (2,))

    def forward_flops(self, T):
        """FLOPs per token; there are T - 1 patches, and the head runs on one token."""
        T = self.config.block_size
        maps = counting.forward_flops([self.embed], T) * (T - 1) + counting.forward_flops([self.head], T)
        return counting.forward_flops(self.layers.modules(), T) + maps / T

    # ---------------------------------------------------------------------------------------- average of the weights

    def keep_average(self):
        """Keep an exponential average of the weights, with decay config.ema, starting from the current ones. Call it on
        the final device."""
        average = AveragedModel(self, multi_avg_fn=get_ema_multi_avg_fn(self.config.ema))
        average.n_averaged += 1  # start from the current weights
        object.__setattr__(self, "average", average)  # as a submodule it would be trained and counted

    def after_step(self):
        if self.average is not None:
            self.average.update_parameters(self)

    def get_extra_state(self):
        """The average as one vector, for checkpoints; empty if there is none."""
        return torch.empty(0) if self.average is None else parameters_to_vector(self.average.parameters()).detach()

    def set_extra_state(self, vector):
        if self.average is not None and vector.numel():
            vector_to_parameters(vector.to(self.token.device), self.average.parameters())


def tokens_of(config):
    """Number of tokens: patches and the class token."""
    return (config.image_size // config.patch_size) ** 2 + 1


# ---------------------------------------------------------------------------------------------------------- evaluation

def evaluate(config, data, model, final=False):
    """{"val_loss": nats per image, "val_accuracy", "val_images"} on all validation images; with ema also "ema_loss",
    "ema_accuracy" of the average."""
    loss, accuracy = outcome(config, data, model)
    metrics = {"val_loss": loss, "val_accuracy": accuracy, "val_images": len(data.val.labels)}
    if model.average is not None:
        metrics["ema_loss"], metrics["ema_accuracy"] = outcome(config, data, model.average.module)
    return metrics


@torch.no_grad()
def outcome(config, data, model):
    """The mean loss in nats and the share of right answers, on every process. The processes share the images."""
    n = len(data.val.labels)
    mine = np.arange(distributed.rank(), n, distributed.world_size())
    answers = torch.zeros(2, n, dtype=torch.float64)  # losses, and 1.0 for right answers; each process has some
    model.eval()
    for rows, x, y in data.eval_batches(mine, config.micro_batch_size):
        with distributed.autocast(config, x.device):
            logits, _ = model(x)
        answers[0, rows] = F.cross_entropy(logits.float(), y, reduction="none").double().cpu()
        answers[1, rows] = (logits.argmax(-1) == y).double().cpu()
    model.train()
    losses, right = distributed.sum_over_ranks(answers, data.device).cpu().numpy()
    return losses.mean().item(), right.mean().item()


# -------------------------------------------------------------------------------------------------------------- set-up

def check(config):
    """Raises ConfigError for settings that cannot work together, with any data."""
    if config.channels not in (1, 3):
        raise ConfigError(f"channels {config.channels} must be 1 (grey) or 3 (colours)")
    if config.rand_augment and config.channels == 1:
        raise ConfigError(f"rand_augment {config.rand_augment} needs channels=3: kornia's changes colours, too")
    if config.mixup + config.cutmix > 1:
        raise ConfigError(f"mixup {config.mixup} and cutmix {config.cutmix} add up to more than 1")
    train.check_not_set(config, (*train.TEXT_ONLY, "block_size", "vocab_size"), "is not for images: leave it out; "
                        "sizes are image_size, patch_size, batch_images, and evaluations read all validation images")


def build_model(config, device):
    """The config's Vision model on the device. Raises ConfigError for sizes that do not fit together and a backend that
    cannot run."""
    try:
        model = Vision(config).to(device)
        counting.computed_by(model)  # chooses the backend of every operator
        return model
    except (ValueError, RuntimeError) as error:
        raise ConfigError(error) from None


def main(config):
    check(config)
    config.out_dir = config.out_dir or f"out/{train.run_name(config, f'{config.model}_{config.directions}')}"
    device = distributed.open_device(config)
    config.dtype = str(distributed.pick_dtype(config.dtype, device)).removeprefix("torch.")
    data = ImageData(config, device)
    config.vocab_size, config.block_size = len(data.classes), tokens_of(config)
    config.batch_tokens = config.batch_images * config.block_size
    config.max_iters = config.max_iters or config.epochs * data.steps_per_epoch
    train.check(config)
    train.seed_all(config.seed)
    model = build_model(config, device)
    distributed.say(checkpoint.Initial(config).load(model, data))
    if config.ema:
        model.keep_average()
    train.train(config, model, data, functools.partial(evaluate, config, data))


if __name__ == "__main__":
    sys.exit(distributed.launch("classify.py", lambda argv: main(configurator.load(VisionConfig, argv))))
