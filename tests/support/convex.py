"""A task with one minimum, in double precision: softmax regression with a little noise in the labels."""

from __future__ import annotations

import torch
from torch import nn

from shoal.core.seeds import stream
from shoal.core.task import Data, Task


def convex() -> Task:
    return Task("convex", _model, _data, batch=2)


def _model() -> nn.Module:
    model = nn.Linear(6, 3, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def _data() -> Data:
    draw = stream(0, "convex")
    x = torch.randn(240, 6, generator=draw, dtype=torch.float64)
    y = (x[:, :3] + torch.randn(240, 3, generator=draw, dtype=torch.float64)).argmax(dim=1)
    return Data(x, y, x, y)
