"""Streaming: an average takes a gradient in part by part, while back-propagation computes the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from shoal.core.replica import Gradient
from shoal.engine.group import Group


class Intake(Protocol):
    """Takes a gradient in. `out` is where it goes, times `unit` for each of the samples behind it."""

    out: Tensor
    unit: float

    @property
    def begun(self) -> bool:
        """Whether a part is under way."""
        ...

    def ready(self, part: int) -> None:
        """A part lies in `out`. Parts come in order; the last one is left to `Merging.finish`."""
        ...


@dataclass(slots=True)
class Streamed(Gradient):
    """A gradient that was handed over in parts; its vector is `Intake.out`."""

    changed: bool  # whether parts that were ready have changed since
    fill: Callable[[], object]  # writes all of it to `out` once more


@runtime_checkable
class Streams(Protocol):
    """A replica that hands its gradient over in parts."""

    @property
    def parts(self) -> Sequence[slice]:
        """The parts of the vector, in the order in which back-propagation reaches them."""
        ...

    async def stream(self, intake: Intake) -> Streamed:
        """The gradient at `x` on the next batch, as `gradient` gives it, handed to `intake` in parts."""
        ...


class Merging(Intake, Protocol):
    """An average that is formed while the gradient is still being computed."""

    async def finish(self, gradient: Streamed, weight: float) -> tuple[Tensor, float]:
        """The weighted average over the workers, and the total weight (zeros if that is 0).

        Called again after it has failed, it forms the average over those who are left.
        """
        ...

    def settle(self, total: float) -> None:
        """The average is complete, with this weight, whether this worker has formed it or was given it."""
        ...


@runtime_checkable
class Merges(Protocol):
    """A collective that can begin before the gradient is whole."""

    def begin(self, group: Group, parts: Sequence[slice]) -> Merging:
        """Begin an average."""
        ...
