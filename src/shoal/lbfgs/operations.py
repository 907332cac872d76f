"""What a coordinator may ask of the shards that hold the vectors: a few operations, and how they travel.

The vectors of one shard are slices of the same elements, so each operation needs nobody else. Whatever it
returns is a partial sum: the sum over all shards is the result for the whole vectors.

x       the parameters, after the last step that was accepted
g       the gradient there
d       the direction of the search
point   the trial point, which workers pull
new     the gradient at the trial point
s0, y0  the pairs of the recursion, in as many slots as it remembers
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from shoal.core.errors import WireError

Terms: TypeAlias = "tuple[tuple[float, str], ...]"
Delivery: TypeAlias = "tuple[int, int]"
"""A bundle of gradients that counts: the worker's rank, and the number of its bundle."""


@dataclass(frozen=True)
class Combine:
    """`out` becomes the sum of multiples of vectors: zero, copy, scale and axpy are special cases."""

    out: str
    terms: Terms


@dataclass(frozen=True)
class Dots:
    """Dot products, in double precision."""

    pairs: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class AbsoluteSum:
    """The sum of the absolute values of a vector."""

    name: str


@dataclass(frozen=True)
class OpenPass:
    """From now on gradients at `point` are added up: those of the pass with this number, and no others."""

    number: int


@dataclass(frozen=True)
class ClosePass:
    """`new` becomes the mean of the gradients of this pass, plus `l2` times `point`.

    A shard adds the bundles that it got last from each worker if they are in `delivered`. All earlier ones
    are known to count, or not to. `samples` are those of the pass.
    """

    samples: float
    delivered: tuple[Delivery, ...]
    l2: float


@dataclass(frozen=True)
class DropPass:
    """Forget the gradients of this pass: its loss is not finite. `samples` are those that were looked at."""

    samples: float


@dataclass(frozen=True)
class EndTraining:
    """No pass follows: what workers pull from now on is the result."""


Operation: TypeAlias = "Combine | Dots | AbsoluteSum | OpenPass | ClosePass | DropPass | EndTraining"

_KINDS = (Combine, Dots, AbsoluteSum, OpenPass, ClosePass, DropPass, EndTraining)
_BY_NAME: dict[str, Callable[..., Operation]] = {kind.__name__: kind for kind in _KINDS}


def encoded(operations: Sequence[Operation]) -> Tensor:
    """Operations as the bytes of a message."""
    text = json.dumps([[type(one).__name__, *astuple(one)] for one in operations], separators=(",", ":"))
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def decoded(data: Tensor) -> list[Operation]:
    """The operations in a message."""
    try:
        found = json.loads(bytes(data.tolist()).decode())
        return [_BY_NAME[name](*map(_tuples, fields)) for name, *fields in found]
    except (KeyError, TypeError, ValueError) as problem:
        raise WireError(f"a command holds no operations on vectors: {problem!r}") from None


def _tuples(value: object) -> object:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
