"""Replica: one worker's copy of the model with its data and optimizer, as its node sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from shoal.core.identity import NodeIdentity

NOISE = "noise"
"""In a replica's state, its own random stream: a worker that takes over another's state keeps its own."""


class NoMoreSteps(Exception):
    """The training loop ended while the algorithm waited for its next gradient."""


class Counted(Protocol):
    """What a replica computed on one batch."""

    count: int  # samples
    loss: float | None  # their mean; None where the replica cannot tell


@dataclass(slots=True)
class Gradient:
    """The gradient of the mean loss over `count` samples; `loss` is None where the replica cannot tell."""

    vector: Tensor
    count: int
    loss: float | None


class Replica(Protocol):
    """What a node asks of the model it trains; flat vectors in, flat vectors out."""

    x: Tensor

    @property
    def lr(self) -> float:
        """The learning rate of the next local step: that of the optimizer's first group of parameters."""
        ...

    async def gradient(self) -> Gradient:
        """The gradient at `x` on the next batch. The vector may be reused by the next call.

        Raises NoMoreSteps when whoever owns the training loop has ended it.
        """
        ...

    def seek(self, owner: int, place: int) -> None:
        """Take the next batch from another worker's share: the one at `place` of `owner`'s.

        In its own share it goes on from that place.
        """
        ...

    @property
    def changed(self) -> Tensor | None:
        """The numbers in the optimizer's groups, if others than the first rate have changed; else None.

        A server's optimizer takes them over.
        """
        ...

    def descend(self, g: Tensor) -> None:
        """One step of the optimizer along -g."""
        ...

    def reset_momentum(self) -> None:
        """Forget the optimizer's velocity; adaptive second moments stay."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything but `x` that the next step depends on."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        ...


@runtime_checkable
class StepsAlone(Protocol):
    """A replica that can take a local step without its gradient as one vector: a copy less."""

    async def step(self, check: Callable[[float | None], None]) -> int:
        """`descend` along the `gradient` of the next batch, unless `check` raises for its loss.

        Returns the number of samples.
        """
        ...


@dataclass(frozen=True)
class LastDeal:
    """What became of the deal so far when data is dealt to other workers. Steps are by place in that deal."""

    undone: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Steps before the change whose samples come next, once more."""
    done: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """Steps after the change whose samples do not come."""
    was: Sequence[int | None] | None = None
    """Each worker's place in it, for what it has not handed over yet: if it dies, that comes again."""
    end: int | None = None
    """Where it ended, if workers may be past that, having done batches of others."""


@runtime_checkable
class Redeals(Protocol):
    """A replica whose data can be dealt to other workers than before."""

    def redeal(self, place: int, workers: int, step: int, last: LastDeal) -> None:
        """From `step` on deal the data to so many workers, of whom this is number `place`."""
        ...

    def end_of(self, passes: int) -> int:
        """The step after the last of so many passes over the data."""
        ...

    def deal(self) -> dict[str, Any] | None:
        """What has been dealt so far, as plain values.

        None where it is dealt to one number of workers, or where the replica's state says it.
        """
        ...

    def take_deal(self, deal: Any) -> None:
        """Go on from what the `deal` of any worker gave."""
        ...


@runtime_checkable
class TellsPlace(Protocol):
    """A replica whose batches are counted, while a loop of the user's own decides when it takes one."""

    @property
    def place_in_data(self) -> str:
        """Where it is, in words: all workers must be at the same place when workers come or go."""
        ...


@runtime_checkable
class HoldsMore(Protocol):
    """A replica whose model has tensors that are not trained, and that workers begin with alike."""

    @property
    def untrained(self) -> Sequence[Tensor]:
        """Frozen parameters and buffers, to be changed in place."""
        ...


class Parameters:
    """A replica that holds parameters and nothing else: a server's, which steps them by plain SGD."""

    lr = float("nan")
    changed: Tensor | None = None

    def __init__(self, x: Tensor) -> None:
        self.x = x

    @classmethod
    def of_server(cls, me: NodeIdentity, x: Tensor) -> Parameters:
        """A copy of the slice of the whole vector that a server owns."""
        return cls(x[me.own_slice(x.numel())].clone())

    async def gradient(self) -> Gradient:
        """A server has no data."""
        raise TypeError("a server computes no gradient; only a worker may call grad()")

    def seek(self, owner: int, place: int) -> None:
        """A server has no data."""
        raise TypeError("a server has no data to seek in")

    def descend(self, g: Tensor) -> None:
        """A server takes no step of its own accord."""
        raise TypeError("a server steps with a worker's learning rate; call descend(g, push)")

    def apply(self, g: Tensor, rate: float, numbers: Tensor | None, scale: float) -> None:
        """One step along -g, at this learning rate times `scale`: plain SGD.

        `numbers` are those of the sender's optimizer, see `Replica.changed`.
        """
        self.x.sub_(g, alpha=rate * scale)

    def reset_momentum(self) -> None:
        """There is none."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing besides `x`."""
        return {}

    def cut(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state of this slice, of the states of other slices that make up the whole vector, in order."""
        return states[0]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing besides `x`."""
