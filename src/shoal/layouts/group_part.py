"""GroupPart: what one process of a group holds of its worker's model, and computes for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

from torch import Tensor, nn

from shoal.core.vector import Flat
from shoal.replicas.local_shards import LocalShards, Replicated, is_distributed

Compute = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True)
class HeldPiece:
    """A parameter, or the part of it that a process holds: `dimension` is the one that was cut, if any."""

    name: str
    shape: tuple[int, ...]
    dimension: int | None


class GroupPart:
    """A process's part of a model that lies over a group. All processes of the group call it together.

    `compute` leaves the gradients of a whole batch in the parameters, and returns its loss. `held` has the
    ids of the parameters that lie here, None for all. `about` says how the model lies. Processes with the
    same `stream` draw the same random numbers.
    """

    is_whole = False

    def __init__(
        self,
        model: nn.Module,
        compute: Compute,
        held: Set[int] | None = None,
        about: str = "",
        stream: int = 0,
    ) -> None:
        self.held, self.about, self.stream = held, about, stream
        self._compute = compute
        own = [p for p in model.parameters() if held is None or id(p) in held]
        self._local = LocalShards(model, own)
        self._replicated: Replicated | None = None

    @property
    def shards(self) -> Mapping[int, nn.Parameter]:
        """By the id of a parameter that was cut, the part of it that lies here."""
        return self._local.by_id

    def bind(self, flat: Flat) -> None:
        """Train through this vector. From now on `load` keeps alike what several processes hold."""
        self._replicated = Replicated(flat.parameters, flat.tensors)

    def load(self, agree: bool) -> None:
        """The vector has changed: give the model its values; with `agree` those that several hold, alike."""
        if agree and self._replicated is not None:
            self._replicated.agree()
        self._local.write()

    def propagate(self, x: Tensor, y: Tensor) -> float:
        """Compute the gradients of a batch, of which every process gets its part. Returns the loss."""
        loss = self._compute(x, y)
        self._local.read_gradients()
        return loss


def pieces_of(flat: Flat) -> list[HeldPiece]:
    """What a vector is made of, in its order."""
    named = zip(flat.layout.names, flat.layout.shapes, flat.parameters, strict=True)
    return [HeldPiece(name, tuple(shape), _dimension(p)) for name, shape, p in named]


def _dimension(p: Tensor) -> int | None:
    """The dimension along which a parameter was cut."""
    placements = p.placements if is_distributed(p) else ()
    return next((int(placed.dim) for placed in placements if placed.is_shard()), None)  # type: ignore[attr-defined]
