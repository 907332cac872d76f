"""Task: a model, its data and its loss; everything a worker needs to make its own replica."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.core.growth import Growth


@dataclass(frozen=True)
class Data:
    """Training and test examples as whole tensors; `x[i]` belongs to `y[i]`."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor

    def __post_init__(self) -> None:
        for name, x, y in (("training", self.x, self.y), ("test", self.test_x, self.test_y)):
            if len(x) != len(y):
                raise ValueError(f"{name} data has {len(x)} inputs but {len(y)} labels")


@dataclass(frozen=True)
class Task:
    """What is trained. The factories are called once in each process, so they must be importable there.

    `model` may draw its initial weights from torch's global generator: it is called with that
    generator seeded alike in every process. `optimizer` is called as `optimizer(parameters, lr=lr)`.
    `batch` samples a worker and step, at first: `growth` says how it grows.
    `imports` names modules that are slow to load: they are loaded once, not once in every process.
    """

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[], Data]
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    lr: float = 0.1
    batch: int = 64
    growth: Growth = field(default_factory=Growth)
    about: str = field(default="", compare=False)
    imports: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch={self.batch}: a batch holds at least 1 sample")
        if not self.lr > 0:
            raise ValueError(f"lr={self.lr}: the learning rate must be positive")
        if self.growth.largest is not None and self.growth.largest < self.batch:
            raise ValueError(f"largest_batch={self.growth.largest} is below the first batch, {self.batch}")

    def but(
        self,
        batch: int | None = None,
        lr: float | None = None,
        grow_batch: str | None = None,
        largest_batch: int | None = None,
    ) -> Task:
        """The same task with these settings instead of its own, where they are given."""
        growth = self.growth
        if grow_batch is not None or largest_batch is not None:
            growth = Growth.parse(grow_batch, largest_batch)
        batch, lr = self.batch if batch is None else batch, self.lr if lr is None else lr
        return replace(self, batch=batch, lr=lr, growth=growth)

    def config(self) -> dict[str, Any]:
        """The task's settings as plain values, for the record of a run."""
        name = getattr(self.optimizer, "__name__", None) or repr(self.optimizer)
        return {
            "task": self.name,
            "lr": self.lr,
            "batch": self.batch,
            "grow_batch": str(self.growth) or None,
            "largest_batch": self.growth.largest,
            "optimizer": name,
        }
