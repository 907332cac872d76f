"""Codec: what a compressor of differences answers. State goes in and comes out; a codec holds none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.errors import WireError

Payload = tuple[Tensor, ...]
"""Up to four flat tensors: what travels instead of a vector."""

State = dict[str, Tensor]
"""What a codec must remember between two calls for one stream of vectors; empty where nothing."""


@dataclass(frozen=True)
class Codec(ABC):
    """A way to write a vector down shorter. Frozen: options only.

    `exact` says that decode(encode(v)) is v, bit for bit, so that the codec may be skipped.
    """

    exact: ClassVar[bool] = False

    def init(self, like: Tensor) -> State:
        """The state before the first vector shaped like `like`."""
        return {}

    @abstractmethod
    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        """What travels for `v`, and the state for the next vector. `v` is left as it was."""

    @abstractmethod
    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        """The vector that `payload` stands for, written into `out` or taken from the payload itself.

        Raises WireError if the payload does not fit `out`.
        """


@dataclass(frozen=True)
class Identity(Codec):
    """No compression: every vector travels as it is."""

    exact: ClassVar[bool] = True

    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        return (v,), state

    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        (v,) = expect(payload, (out.dtype, out.numel()))
        return v


def expect(payload: Payload, *parts: tuple[torch.dtype, int]) -> Payload:
    """The payload itself if its parts have these dtypes and lengths; raises WireError otherwise."""
    got = [(p.dtype, p.numel()) for p in payload]
    if got != list(parts):
        raise WireError(f"a payload of {got} arrived where {list(parts)} was expected")
    return payload
