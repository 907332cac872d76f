"""A task that needs no data set and trains in a moment."""

from __future__ import annotations

import torch
from torch import nn

from shoal.core.seeds import stream
from shoal.core.task import Data, Task


def blobs() -> Task:
    """Three noisy clouds of points in eight dimensions, told apart by a small network with dropout."""
    return Task("blobs", _model, _data, lr=0.1, batch=16, about="three clouds of points, for tests")


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3))


def _data() -> Data:
    draw = stream(0, "blobs")
    y = torch.arange(390) % 3
    centres = torch.randn(3, 8, generator=draw)
    x = centres[y] + 0.7 * torch.randn(390, 8, generator=draw)
    return Data(x[:300], y[:300], x[300:], y[300:])
