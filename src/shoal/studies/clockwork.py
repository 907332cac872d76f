"""Clockwork: a task with zero gradients, for runs that only measure time."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from shoal.core.task import Data, Task


def clockwork(name: str, parameters: int, rows: int, batch: int) -> Task:
    """A task of this size whose gradients and data are zero."""
    return Task(
        name=name,
        model=partial(Clockwork, parameters),
        data=partial(zero_data, rows),
        loss=zero_loss,
        batch=batch,
    )


class Clockwork(nn.Module):
    """A vector of parameters whose first element is multiplied by the input."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(parameters))

    def forward(self, rows: Tensor) -> Tensor:
        return self.x[:1] * rows


def zero_loss(out: Tensor, _: Tensor) -> Tensor:
    """A loss of 0 for any output."""
    return 0.0 * out.sum()


def zero_data(rows: int) -> Data:
    """Rows of zeros; the first is also the test set."""
    x, y = torch.zeros(rows, 1), torch.zeros(rows)
    return Data(x, y, x[:1], y[:1])
