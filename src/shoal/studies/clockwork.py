"""Clockwork: a task that computes nothing, for runs that only keep time."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from shoal.core.task import Data, Task


def clockwork(name: str, parameters: int, rows: int, batch: int) -> Task:
    """So many parameters whose gradient is nought, and so many rows of nothing."""
    return Task(
        name=name,
        model=partial(Clockwork, parameters),
        data=partial(blank, rows),
        loss=nought,
        batch=batch,
    )


class Clockwork(nn.Module):
    """Parameters, of which the first is multiplied by what comes in."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(parameters))

    def forward(self, rows: Tensor) -> Tensor:
        return self.x[:1] * rows


def nought(out: Tensor, _: Tensor) -> Tensor:
    """A loss of nothing, whatever comes out."""
    return 0.0 * out.sum()


def blank(rows: int) -> Data:
    """Zeros, of which the first is the test set as well."""
    x, y = torch.zeros(rows, 1), torch.zeros(rows)
    return Data(x, y, x[:1], y[:1])
