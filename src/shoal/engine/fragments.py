"""Fragments: the parameters in parts that are exchanged one after the other."""

from __future__ import annotations

from typing import Protocol, cast, runtime_checkable

from shoal.core.replica import Replica
from shoal.core.vector import Layout
from shoal.engine.client import slice_of


@runtime_checkable
class Laid(Protocol):
    """A replica that knows which slice of its vector is which parameter."""

    @property
    def layout(self) -> Layout:
        """Which slice of `x` is which parameter."""
        ...


def fragments(replica: Replica, number: int) -> list[list[slice]]:
    """Fragment k is every `number`-th layer from the k-th on; equal slices where there are too few layers.

    Raises ValueError where there are too few elements.
    """
    whole = replica.x.numel()
    if number > whole:
        raise ValueError(f"{whole} elements cannot be cut into {number} fragments")
    known = cast(object, replica)
    layers = known.layout.layers if isinstance(known, Laid) and number > 1 else []
    if len(layers) >= number:
        return [layers[k::number] for k in range(number)]
    return [[slice_of(k, number, whole)] for k in range(number)]
