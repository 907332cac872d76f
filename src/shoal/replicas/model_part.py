"""ModelPart: what a process holds of its worker's model, and how it computes a gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Protocol

import torch
from torch import Tensor, nn

from shoal.core.vector import NO_SHARDS, Flat


class ModelPart(Protocol):
    """A part of a model, or all of it, as a replica trains it."""

    @property
    def is_whole(self) -> bool:
        """Whether back-propagation through this process's parameters is all there is to a gradient."""
        ...

    @property
    def held(self) -> Set[int] | None:
        """The ids of the model's parameters that lie here; None for all."""
        ...

    @property
    def shards(self) -> Mapping[int, nn.Parameter]:
        """By the id of a parameter, the part of it that lies here, where that is not all."""
        ...

    @property
    def stream(self) -> int:
        """Processes of a worker with the same number draw the same random numbers."""
        ...

    def bind(self, flat: Flat) -> None:
        """From now on the parameters are trained through this vector."""
        ...

    def load(self, agree: bool) -> None:
        """The vector has changed: give the model its values; with `agree` those that several hold, alike."""
        ...

    def propagate(self, x: Tensor, y: Tensor) -> float | None:
        """Leave the gradients of a batch in the parameters. Returns its loss, None if there is none."""
        ...


class WholeModel:
    """All of a model; its parameters are the vector."""

    is_whole = True
    held: Set[int] | None = None
    shards = NO_SHARDS
    stream = 0

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._model, self._loss = model, loss

    def bind(self, flat: Flat) -> None:
        """They are views on it already."""

    def load(self, agree: bool) -> None:
        """They are views on it."""

    def propagate(self, x: Tensor, y: Tensor) -> float | None:
        """Forward and backward; None for an empty loss."""
        loss = self._loss(self._model(x), y)
        torch.autograd.backward(loss, torch.ones_like(loss))
        return loss.item() if loss.numel() else None
