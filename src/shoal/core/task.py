"""Task: a model, its data and its loss; everything a worker needs to make its own replica."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.core.growth import Growth

UNLABELLED = -100  # a label that does not count, as torch's cross-entropy has it

MARKED = 64  # samples by which data is told from other data

Metric = Callable[[Tensor, Tensor], float]
"""A figure made of all outputs and all labels of the test set."""


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

    @property
    def mark(self) -> str:
        """What tells it from other training data: its size, and a digest of some samples."""
        number, digest = min(MARKED, len(self.x)), hashlib.sha256()
        places = [k * (len(self.x) - 1) // max(1, number - 1) for k in range(number)]
        for part in (self.x, self.y):
            taken = part[torch.tensor(places, dtype=torch.int64, device=part.device)].contiguous().cpu()
            digest.update(taken.reshape(-1).view(torch.uint8).numpy().tobytes())
        return f"{len(self.x)} samples, {digest.hexdigest()[:16]}"

    def on(self, device: str | torch.device) -> Data:
        """The same examples in that device's memory."""
        return Data(*(getattr(self, part.name).to(device) for part in fields(self)))


@dataclass(frozen=True)
class Task:
    """What is trained. The factories are called once in each process, so they must be importable there.

    `model` may draw its initial weights from torch's global generator: it is called with that
    generator seeded alike in every process. `optimizer` is called as `optimizer(parameters, lr=lr)`.
    `batch` samples a worker and step, at first: `growth` says how it grows. `augment` changes the inputs of a
    batch before they are learnt from; it may draw from their device's generator, which is lent for it.
    `metrics` are figures of the test set by name, beside loss and accuracy.
    `data_mark` tells a checkpoint's data from other data where `Data.mark`, which reads some, will not do.
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
    augment: Callable[[Tensor], Tensor] | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict, hash=False)
    device: str = "cpu"  # where model and data are: see `on`
    data_mark: str = ""
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

    def on(self, device: str | torch.device) -> Task:
        """The same task with model and data on that device, such as "cuda"."""
        return replace(
            self,
            model=partial(_model_on, self.model, str(device)),
            data=partial(_data_on, self.data, str(device)),
            device=str(device),
        )

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
            **({} if self.device == "cpu" else {"device": self.device}),
            **({"data": self.data_mark} if self.data_mark else {}),
        }


def _model_on(model: Callable[[], nn.Module], device: str) -> nn.Module:
    return model().to(device)


def _data_on(data: Callable[[], Data], device: str) -> Data:
    return data().on(device)


def sequence_loss(out: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of a label at every place of every sequence; the classes are the last dimension."""
    return F.cross_entropy(out.flatten(0, -2), y.flatten(), ignore_index=UNLABELLED)
