"""State on its way to a worker that joins: a head, then the tensors in pieces that every transport takes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import WireError
from shoal.core.state_tree import harvest, plant
from shoal.core.transport import Message
from shoal.engine.elastic_messages import StateHead, StatePart

PIECE_BYTES = 1 << 20

_DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    )
}


def messages(state: Mapping[str, Any], epoch: int) -> Iterator[Message]:
    """A state as the messages that carry it."""
    tensors: dict[str, Tensor] = {}
    tree = plant(dict(state), tensors, "state")
    shapes = [[name, str(t.dtype), list(t.shape)] for name, t in tensors.items()]
    head = json.dumps({"tree": tree, "tensors": shapes}).encode()
    flat = [t.reshape(-1).view(torch.uint8) for t in tensors.values() if t.numel()]
    pieces = [piece for t in flat for piece in torch.split(t, PIECE_BYTES)]
    yield StateHead(
        parts=(torch.frombuffer(bytearray(head), dtype=torch.uint8),), seq=len(pieces), version=epoch
    )
    for number, piece in enumerate(pieces):
        yield StatePart(parts=(piece,), seq=number, version=epoch)


class StateArrival:
    """The messages of one state, in the order in which they come."""

    def __init__(self, head: Message) -> None:
        told = json.loads(bytes(head.body.tolist()))
        self.epoch = head.version
        self._tree = told["tree"]
        self._shapes = told["tensors"]
        self._awaited = head.seq
        self._pieces: list[Tensor] = []

    def add(self, part: Message) -> None:
        """Take in the next piece."""
        if part.seq != len(self._pieces) or self.is_whole:
            raise WireError(f"piece {part.seq} of a state came when {len(self._pieces)} were there")
        self._pieces.append(part.body)

    @property
    def is_whole(self) -> bool:
        """Whether all of it is there."""
        return len(self._pieces) == self._awaited

    def state(self) -> dict[str, Any]:
        """The state that was sent."""
        pieces = iter(self._pieces)
        tensors: dict[str, Tensor] = {}
        for name, word, shape in self._shapes:
            dtype = _DTYPES[word]
            left, parts = prod(shape) * dtype.itemsize, []
            while left:
                parts.append(next(pieces))
                left -= parts[-1].numel()
            raw = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
            tensors[name] = raw.view(dtype).reshape(shape)
        state: dict[str, Any] = harvest(self._tree, tensors)
        return state
