"""Growth: larger batches instead of a smaller learning rate (Smith et al. 2018)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

LARGEST_SHARE = 0.05  # of the training samples in a step: beyond, a larger batch bears no larger rate


@dataclass(frozen=True)
class Growth:
    """By which factor the batch grows after which epochs; what is beyond `largest` divides the rate instead.

    So the noise of the steps, which goes with learning rate / batch, falls as if the rate had been divided.
    """

    at: tuple[tuple[int, float], ...] = ()  # epochs done, factor
    largest: int | None = None  # samples a worker and step

    def __post_init__(self) -> None:
        epochs = [epoch for epoch, _ in self.at]
        if any(epoch < 1 for epoch in epochs) or epochs != sorted(set(epochs)):
            raise ValueError(f"grow_batch={str(self)!r}: name epochs from 1 on, each once and in their order")
        if not all(factor > 1 for _, factor in self.at):
            raise ValueError(f"grow_batch={str(self)!r}: a batch grows by factors above 1")
        if self.largest is not None and not self.at:
            raise ValueError(f"largest_batch={self.largest} belongs to a batch that grows; say how")

    @classmethod
    def parse(cls, text: str | None, largest: int | None = None) -> Growth:
        """Read '2@10,1.5@20': twice as large after 10 epochs, and half as large again after 20."""
        steps = []
        for part in text.split(",") if text else ():
            match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*@\s*([0-9]+)\s*", part)
            if match is None:
                raise ValueError(f"{part!r} in grow_batch {text!r} is not a factor and an epoch, as in 2@10")
            steps.append((int(match[2]), float(match[1])))
        return cls(tuple(steps), largest)

    def __str__(self) -> str:
        return ",".join(f"{factor:g}@{epoch}" for epoch, factor in self.at)

    def __bool__(self) -> bool:
        return bool(self.at)

    def batch(self, first: int, epoch: int) -> int:
        """Samples a worker and step of an epoch, where they were `first` at first."""
        wanted = self._wanted(first, epoch)
        return round(wanted if self.largest is None else min(wanted, self.largest))

    def rate(self, first: int, epoch: int) -> float:
        """By which the learning rate is multiplied in an epoch."""
        return 1.0 if self.largest is None else min(1.0, self.largest / self._wanted(first, epoch))

    def _wanted(self, first: int, epoch: int) -> float:
        return first * prod(factor for begin, factor in self.at if begin <= epoch)
