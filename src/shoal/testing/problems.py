"""Problems small enough to work out on paper: Slope and Quadratic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shoal.core.replica import Gradient
from shoal.sim import Simulation
from shoal.vocabulary.strategy import Strategy


@dataclass(frozen=True)
class Problem(ABC):
    """A loss with a gradient in closed form, descended by SGD with momentum; `counts` are samples a step."""

    lr: float = 1.0
    momentum: float = 0.0
    counts: Sequence[int] = (1,)  # worker k takes counts[k % len(counts)] samples a step

    @abstractmethod
    def gradient(self, rank: int, step: int, x: Tensor) -> Tensor:
        """The gradient that worker `rank` sees at `x` in its step number `step`."""

    def loss(self, rank: int, step: int, x: Tensor, gradient: Tensor) -> float:
        """The loss there, whose gradient it is; 0 where nobody wants to know."""
        return 0.0

    def replica(self, rank: int, start: Tensor) -> VectorReplica:
        """A worker's replica that begins at a copy of `start`."""
        return VectorReplica(self, rank, start.clone())


@dataclass(frozen=True)
class Slope(Problem):
    """A constant gradient: what moves is the algorithm alone. `gradients[k % len]` is worker k's."""

    gradients: Sequence[float] = (1.0,)

    def gradient(self, rank: int, step: int, x: Tensor) -> Tensor:
        return torch.full_like(x, self.gradients[rank % len(self.gradients)])

    def loss(self, rank: int, step: int, x: Tensor, gradient: Tensor) -> float:
        return self.gradients[rank % len(self.gradients)] * float(x.sum())


@dataclass(frozen=True)
class Quadratic(Problem):
    """curvature (x - target)^2 / 2; `targets[k % len]` is worker k's minimum."""

    curvature: float = 1.0
    targets: Sequence[float] = (0.0,)

    def gradient(self, rank: int, step: int, x: Tensor) -> Tensor:
        away = x - _number(self.targets[rank % len(self.targets)], x.dtype)
        return away if self.curvature == 1 else away.mul_(self.curvature)

    def loss(self, rank: int, step: int, x: Tensor, gradient: Tensor) -> float:
        return gradient.dot(gradient).item() / self.curvature / 2


@cache
def _number(value: float, dtype: torch.dtype) -> Tensor:
    """A number as a tensor: torch takes twice as long to subtract a number of Python's."""
    return torch.tensor(value, dtype=dtype)


class VectorReplica:
    """A replica whose model is its vector."""

    changed: Tensor | None = None  # its optimizer has one number, the learning rate

    def __init__(self, problem: Problem, rank: int, x: Tensor) -> None:
        self.x = x
        self.lr = problem.lr
        self._problem = problem
        self._rank = rank
        self._step = 0
        self._detour: tuple[int, int] | None = None
        self._velocity = torch.zeros_like(x)

    async def gradient(self) -> Gradient:
        """The gradient at `x`, and the loss."""
        rank, step = self._detour or (self._rank, self._step)
        if self._detour is None:
            self._step += 1
        self._detour = None
        count = self._problem.counts[rank % len(self._problem.counts)]
        gradient = self._problem.gradient(rank, step, self.x)
        return Gradient(gradient, count, self._problem.loss(rank, step, self.x, gradient))

    def seek(self, owner: int, place: int) -> None:
        """Take the next gradient as worker `owner` would in its step `place`; its own go on from there."""
        if owner == self._rank:
            self._step, self._detour = place, None
        else:
            self._detour = owner, place

    def descend(self, g: Tensor) -> None:
        """One step of SGD with heavy-ball momentum."""
        if self._problem.momentum:
            self._velocity.mul_(self._problem.momentum).add_(g)
            g = self._velocity
        self.x.sub_(g, alpha=self.lr)

    def reset_momentum(self) -> None:
        """Forget the velocity."""
        self._velocity.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Velocity and step."""
        return {"velocity": self._velocity, "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self._velocity.copy_(state["velocity"])
        self._step = state["step"]


def simulate(
    strategy: Strategy,
    problem: Problem,
    *,
    workers: int = 1,
    steps: int = 1,
    start: Sequence[float] = (0.0,),
    centre: Sequence[float] | None = None,
    **options: Any,
) -> Simulation:
    """Run `strategy` on a small problem in virtual time, in double precision, and return the simulation.

    The workers begin at `start`, the servers at `centre` (or `start`). Options are those of Simulation.
    """
    begin = torch.tensor(start, dtype=torch.float64)
    middle = None if centre is None else torch.tensor(centre, dtype=torch.float64)
    simulation = Simulation(
        strategy,
        lambda rank: problem.replica(rank, begin),
        workers=workers,
        steps=steps,
        centre=middle,
        **options,
    )
    return simulation.run()
