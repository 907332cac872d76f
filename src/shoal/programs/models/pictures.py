"""Convolutional networks for small colour photographs: one that learns on a laptop, and one of 300 MB."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import log2

from torch import nn

SIDE = 64  # pixels
GROUPS = 8  # of channels that are normalised together


def photo_net(
    classes: int = 102, widths: Sequence[int] = (24, 48, 96, 192), dropout: float = 0.2
) -> nn.Module:
    """A 3 x 3 convolution for each of `widths`, each of which halves the sides, and a linear layer.

    For 3 x 64 x 64 pixels. Group normalisation (Wu & He 2018) keeps no running figures, so workers have
    nothing to agree on besides the parameters. The last layer sees which part of the picture a feature was
    found in: with the mean over all parts instead, a ninth of the test set is lost. Strides in place of
    pooling, for time. With the defaults there are 532,542 parameters.
    """
    if not 1 <= len(widths) <= log2(SIDE) or any(width < 1 or width % GROUPS for width in widths):
        raise ValueError(
            f"widths={tuple(widths)}: take 1 to {log2(SIDE):g} of them, each a multiple of {GROUPS}"
        )
    layers: list[nn.Module] = []
    for before, after in pairwise((3, *widths)):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)]
        layers += [nn.GroupNorm(GROUPS, after), nn.ReLU()]
    features = widths[-1] * (SIDE >> len(widths)) ** 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(dropout), nn.Linear(features, classes))


def large_net() -> nn.Module:
    """Two convolutions and 17,800 hidden units for 3 x 64 x 64 pixels and 101 classes; 74,770,901 parameters.

    Just as many as the network for Caltech-101 had that Yang & Farrell (2016) trained by Downpour SGD. They
    tell the number, not the layers: with two convolutions of 64 maps, 7 x 7 and 3 x 3, and one hidden layer
    this is how it comes out. 97.5 % of the parameters are in that one matrix, and 299 MB are sent as float32.
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
