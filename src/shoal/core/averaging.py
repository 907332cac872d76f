"""Reductions: what a codec that forms its averages in flight asks of the workers."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from shoal.core.products import Records


class Given(NamedTuple):
    """What one worker gave, and its weight."""

    parts: tuple[Tensor, ...]
    weight: float


class Reductions(Protocol):
    """All workers, as one of them reaches them while it averages a vector.

    Every worker calls the same verbs in the same order, with vectors of the same lengths and dtypes. A verb
    leaves its vector as it was. Where all weights are 0, the first verb that learns it ends the average.
    """

    @property
    def size(self) -> int:
        """The number of workers."""
        ...

    @property
    def weight(self) -> float:
        """This worker's weight."""
        ...

    @property
    def gives(self) -> bool:
        """Whether this worker has samples; if not, its vector counts for nothing beside the others'."""
        ...

    @property
    def total(self) -> float:
        """The sum of all weights; known after the first `mean`, `largest`, `sum` or `take`."""
        ...

    @property
    def records(self) -> Records | None:
        """What the gradient is made of; None unless the codec `needs_products` and the vector may be one."""
        ...

    async def mean(self, v: Tensor) -> Tensor:
        """The weighted average of `v`, exact but for rounding."""
        ...

    async def largest(self, v: Tensor) -> Tensor:
        """The maximum of each element of `v`, of a floating-point dtype; nan where it is nan at any worker.

        What is infinite may come back as nan.
        """
        ...

    async def sum(self, v: Tensor) -> Tensor:
        """The sum of whole numbers, without weights. Exact: choose a dtype that holds the sum."""
        ...

    async def give(self, tag: str, parts: tuple[Tensor, ...]) -> None:
        """Send up to four flat tensors to all other workers; does not wait. The tag has up to 15 letters.

        Leave the tensors as they are until you `take` under that tag, as you must in the same average.
        """
        ...

    async def take(self, tag: str) -> list[Given]:
        """What all workers gave under that tag, in rank order, your own included; oldest first.

        What others gave may lie in host memory: move what you compute with to the device of your vector.
        Trust nothing that others gave: `expect` raises WireError for tensors that do not fit.
        """
        ...
