"""Caltech-101: photographs of 101 kinds of objects and a background class, reduced to 64 x 64 pixels.

Fei-Fei, Fergus & Perona 2004. The file holds all 9,144 pictures as JPEG and marks 3,049 of them as test set.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.core.errors import Unavailable
from shoal.core.task import Data, Task
from shoal.programs.models.convolutional import alex_net, large_net, photo_net
from shoal.programs.tasks.data import Dataset, read

CALTECH = Dataset(
    name="caltech101_64",
    files={"caltech101_64.npz": "4cbc06cca0ed9f85281ff2d934e02e7f078b17211685b55126204ddd79e1017e"},
)
MEAN, STD = (0.5485, 0.5303, 0.5047), (0.3093, 0.3042, 0.3168)  # red, green, blue of the training set
BACKGROUND = 0  # the class of pictures without any of the 101 kinds of objects
ZOOM, SHIFT = 0.1, 0.15  # largest zoom as a share of the size, largest shift as a share of half a side


def caltech() -> Task:
    """A small convolutional network on Caltech-101 and its background class, trained with AdamW."""
    return Task(
        name="caltech",
        model=photo_net,
        data=caltech_data,
        loss=smoothed_loss,
        optimizer=torch.optim.AdamW,
        lr=0.002,
        batch=32,
        augment=augment,
        metrics={"top-5 %": top_5, "per-class %": per_class},
        about="photographs of 102 kinds, 64 x 64 (Caltech-101); four convolutions",
        imports=("PIL.Image",),
    )


def caltech_large() -> Task:
    """A network of 74,770,901 parameters on the 101 kinds of objects; every exchange sends 299 MB."""
    return Task(
        name="caltech-large",
        model=large_net,
        data=objects_data,
        lr=0.01,
        batch=32,
        augment=augment,
        metrics={"top-5 %": top_5, "per-class %": per_class},
        about="photographs of 101 kinds, 64 x 64 (Caltech-101); 74,770,901 parameters, 299 MB a message",
        imports=("PIL.Image",),
    )


def caltech_alexnet(hidden: int = 1024) -> Task:
    """The layers of AlexNet on the 101 kinds of objects: convolutions, then large fully connected layers."""
    return Task(
        name="caltech-alexnet",
        model=AlexNet(hidden),
        data=objects_data,
        lr=0.02,
        batch=32,
        metrics={"top-5 %": top_5},
        about="photographs of 101 kinds, 64 x 64 (Caltech-101); AlexNet, whose linear layers can be cut",
        imports=("PIL.Image",),
    )


@dataclass(frozen=True)
class AlexNet:
    """Makes the network of `alex_net` as one chain. As a Task's factory it equals another of its size."""

    hidden: int

    def __call__(self) -> nn.Module:
        """The network, with 101 classes."""
        features, classifier = alex_net(hidden=self.hidden)
        return nn.Sequential(*features, *classifier)


def caltech_data() -> Data:
    """The official split: 3 x 64 x 64 pixels, each colour normalised, 102 classes."""
    return normalised(*decoded())


def objects_data() -> Data:
    """The same without the background class: 101 classes, numbered from 0."""
    pixels, y, is_test = decoded()
    kept = y != BACKGROUND
    return normalised(pixels[kept], y[kept] - 1, is_test[kept])


def normalised(pixels: Tensor, y: Tensor, is_test: Tensor) -> Data:
    """Normalise pixels given as bytes, and split them into training and test set."""
    mean, std = (torch.tensor(figures).view(3, 1, 1) for figures in (MEAN, STD))

    def part(chosen: Tensor) -> Tensor:
        return pixels[chosen].float().div_(255.0).sub_(mean).div_(std)

    return Data(part(~is_test), y[~is_test], part(is_test), y[is_test])


@lru_cache(maxsize=1)
def decoded() -> tuple[Tensor, Tensor, Tensor]:
    """All pixels as bytes, their classes and the test mask; cached, because decoding takes seconds."""
    try:
        from PIL import Image
    except ImportError as error:
        raise Unavailable(
            "the Caltech-101 tasks need Pillow. Install it with: pip install 'shoal[images]'"
        ) from error
    (contents,) = read(CALTECH).values()
    with np.load(io.BytesIO(contents)) as arrays:
        packed, ends = arrays["jpeg"].tobytes(), arrays["offsets"].tolist()
        labels, split = arrays["labels"], arrays["split"]
    files = (io.BytesIO(packed[begin:end]) for begin, end in pairwise(ends))
    pixels = np.stack([np.asarray(Image.open(file)) for file in files])
    by_colour = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
    return by_colour, torch.from_numpy(labels).long(), torch.from_numpy(split) == 1


def augment(x: Tensor) -> Tensor:
    """Zoom and shift every picture a little and mirror half of them; edges are reflected.

    Draws from the global random generator of the pictures' device.
    """
    draws = torch.rand(5, len(x), device=x.device).mul_(2).sub_(1)  # from -1 to 1
    mirror = draws[0].sign()
    theta = x.new_zeros(len(x), 2, 3)
    theta[:, 0, 0] = mirror * (1 + ZOOM * draws[1])
    theta[:, 1, 1] = 1 + ZOOM * draws[2]
    theta[:, :, 2] = SHIFT * draws[3:].T
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)


def smoothed_loss(out: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy with label smoothing of 0.1 (Szegedy et al. 2016)."""
    return F.cross_entropy(out, y, label_smoothing=0.1)


def top_5(out: Tensor, y: Tensor) -> float:
    """Top-5 accuracy in per cent."""
    likeliest = out.topk(5, dim=1).indices
    return 100.0 * float((likeliest == y[:, None]).any(dim=1).double().mean())


def per_class(out: Tensor, y: Tensor) -> float:
    """Accuracy in per cent averaged over classes, so that rare classes count as much as frequent ones."""
    right = torch.bincount(y[out.argmax(dim=1) == y], minlength=out.shape[1])
    there = torch.bincount(y, minlength=out.shape[1])
    return 100.0 * float((right[there > 0] / there[there > 0]).double().mean())
