"""Convolutional networks: one for handwritten digits (after LeNet-5), two for small colour photographs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import log2

from torch import nn

SIDE = 64  # pixels
GROUPS = 8  # of channels, each normalised together


def digit_cnn() -> nn.Module:
    """Two 5 x 5 convolutions (32 and 64 channels) with max pooling, 1,024 hidden units, 10 classes.

    1,111,946 parameters. Without padding, 28 x 28 pixels become 24 x 24, 12 x 12, 8 x 8 and 4 x 4. The only
    ReLU follows the hidden layer, and there is no dropout. LeCun, Bottou, Bengio & Haffner 1998 have this
    order of layers; the sizes are those of later tutorials.
    """
    return nn.Sequential(
        nn.Conv2d(1, 32, 5),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    )


def photo_net(
    classes: int = 102, widths: Sequence[int] = (24, 48, 96, 192), dropout: float = 0.2
) -> nn.Module:
    """A 3 x 3 convolution of stride 2 for each of `widths`, and a linear layer; for 3 x 64 x 64 pixels.

    Group normalisation (Wu & He 2018) keeps no running statistics, so workers share parameters only. The
    linear layer sees the position of each feature: average pooling instead costs a ninth of the test
    accuracy. With the defaults there are 532,542 parameters.
    """
    if not 1 <= len(widths) <= log2(SIDE) or any(width < 1 or width % GROUPS for width in widths):
        raise ValueError(
            f"widths={tuple(widths)}: take 1 to {log2(SIDE):g} widths, each a multiple of {GROUPS}"
        )
    layers: list[nn.Module] = []
    for before, after in pairwise((3, *widths)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)]
        layers += [nn.GroupNorm(GROUPS, after), nn.ReLU()]
    features = widths[-1] * (SIDE >> len(widths)) ** 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(dropout), nn.Linear(features, classes))


def alex_net(classes: int = 101, hidden: int = 4096) -> tuple[nn.Sequential, nn.Sequential]:
    """Five convolutions, and a classifier of three linear layers, for 3 x 64 x 64 pixels.

    The layers of AlexNet as Krizhevsky (2014) has them, for smaller pictures: with the defaults the
    convolutions have 2,455,872 parameters, and the classifier 33,976,421, 93 % of all.
    """
    features = nn.Sequential(
        *(nn.Conv2d(3, 64, 7, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(192, 384, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(384, 256, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
    )
    classifier = nn.Sequential(
        *(nn.Linear(256 * 4 * 4, hidden), nn.ReLU()),
        *(nn.Linear(hidden, hidden), nn.ReLU()),
        nn.Linear(hidden, classes),
    )
    return features, classifier


def large_net() -> nn.Module:
    """Two convolutions and 17,800 hidden units for 3 x 64 x 64 pixels and 101 classes; 74,770,901 parameters.

    Yang & Farrell (2016) trained a network with that number of parameters on Caltech-101 by Downpour SGD.
    They do not describe its layers; these sizes give the same number. The hidden layer has 97.5 % of the
    parameters, and the whole model is 299 MB as float32.
    """
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 17_800),
        nn.ReLU(),
        nn.Linear(17_800, 101),
    )
