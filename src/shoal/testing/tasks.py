"""A task that needs no data set and trains in a moment."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from shoal.core.seeds import stream
from shoal.core.task import Data, Task


def blobs(dropout: float = 0.1, width: int = 16) -> Task:
    """Three noisy clouds of points in eight dimensions, told apart by a small network with dropout."""
    model = partial(_model, dropout, width)
    return Task("blobs", model, _data, lr=0.1, batch=16, about="three clouds of points, for tests")


def _model(dropout: float, width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 3))


def _data() -> Data:
    draw = stream(0, "blobs")
    y = torch.arange(390) % 3
    centres = torch.randn(3, 8, generator=draw)
    x = centres[y] + 0.7 * torch.randn(390, 8, generator=draw)
    return Data(x[:300], y[:300], x[300:], y[300:])
