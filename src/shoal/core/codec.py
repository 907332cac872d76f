"""Codec: what a compressor of differences answers. State goes in and comes out; a codec holds none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.averaging import Reductions
from shoal.core.errors import WireError
from shoal.core.vector import Piece
from shoal.core.words import FEEDBACK as FEEDBACK

Payload = tuple[Tensor, ...]
"""Up to four flat tensors: what travels instead of a vector."""

State = dict[str, Tensor]
"""What a codec must remember between two calls for one stream of vectors; empty where nothing."""

REST = "rest"
"""Where the state of a stream holds its compression error, under error feedback."""


@dataclass(frozen=True)
class Codec(ABC):
    """A way to write a vector down shorter. Frozen: options only.

    `exact` says that decode(encode(v)) is v, bit for bit, so that the codec may be skipped. One that is
    `for_gradients` does more than write them down, as momentum. One that `needs_products` asks what gradients
    are made of: it is of use only where gradients are averaged over all workers. One that `needs_matrices`
    looks at whole layers, and not at shards of them. Its `code` is in the header of all it writes.

    Averages over all workers are formed in stripes, by `encode` and `decode`. A codec that is `in_flight`
    forms them itself instead, by `average`.
    """

    exact: ClassVar[bool] = False
    for_gradients: ClassVar[bool] = False
    needs_products: ClassVar[bool] = False
    needs_matrices: ClassVar[bool] = False
    code: ClassVar[int] = 0

    @property
    def feedback(self) -> str:
        """One of FEEDBACK; most codecs have an option of that name."""
        return "none"

    @property
    def in_flight(self) -> bool:
        """Whether `average` forms averages out of reductions of what travels: any all-reduce does them."""
        return self.exact

    @property
    def needs_all(self) -> bool:
        """Whether `average` is the only way to use it: then neither stripes nor a server can."""
        return False

    @property
    def cast(self) -> torch.dtype | None:
        """The dtype to which DDP may cast gradients for one all-reduce instead of encoding them, if any."""
        return None

    @property
    def merged(self) -> Codec:
        """What whoever merges writes the average of several such vectors with."""
        return self

    def fit(self, pieces: Sequence[Piece]) -> Codec:
        """The codec for a vector that consists of these pieces of layers; of none where that is not known."""
        return self

    def init(self, like: Tensor, seed: int = 0) -> State:
        """The state before the first vector shaped like `like`; what is drawn at random follows the seed."""
        return {}

    @abstractmethod
    def encode(self, v: Tensor, state: State) -> tuple[Payload, State]:
        """What travels for `v`, and the state for the next vector. `v` is left as it was."""

    def encode_rest(self, v: Tensor, rest: Tensor, state: State) -> tuple[Payload, State]:
        """The same for `v + rest`; leaves in `rest` what the payload lacks of that sum."""
        rest.add_(v)
        payload, state = self.encode(rest, state)
        rest.sub_(self.decode(payload, torch.empty_like(rest)))
        return payload, state

    @abstractmethod
    def decode(self, payload: Payload, out: Tensor) -> Tensor:
        """The vector that `payload` stands for, written into `out` or taken from the payload itself.

        Raises WireError if the payload does not fit `out`.
        """

    async def average(self, v: Tensor, state: State, workers: Reductions) -> tuple[Tensor, State]:
        """The weighted average of `v` over the workers, and the state for the next vector.

        Only where the codec is `in_flight`. All workers return the same bits. `v` and `state` are left as
        they were; the state begins with `init`, and error feedback is the codec's own affair. A worker that
        does not give (`workers.gives`) keeps its error for another time.
        """
        return await workers.mean(v), state

    def stream_key(self, elements: int, part: str) -> str:
        """The name of the state of `average`, in checkpoints and for what is drawn at random.

        Vectors of different lengths have states of their own, and so have parts of a model.
        """
        return f"in flight {elements} {part}"


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
