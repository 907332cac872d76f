"""Bundle: a worker's half of a pass over the data that a server hands out in portions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.core.errors import Diverged
from shoal.core.identity import SERVER
from shoal.core.vector import first_bad
from shoal.engine.portions import BUNDLES, NOTHING, Verdict
from shoal.engine.protocol import Push
from shoal.vocabulary.node import Node

CLAIM, DELIVER = 0, 1
"""What a worker's instruction to the first server is about."""


class Turn(NamedTuple):
    """What a worker is to do: a portion of a pass, or None, to push what it holds."""

    number: int  # of the pass
    portion: int | None
    begins: bool  # whether this is the worker's first portion of that pass


class Bundle:
    """The gradients of the portions that a worker has claimed and not pushed yet, added up."""

    def __init__(self, w: Node) -> None:
        self._node = w
        self._engine = w.engine
        self._number = 0  # of the pass
        self._own = w.incarnation * BUNDLES  # the number of the bundle
        self._settled = -1  # the last bundle of this pass that counts
        self._sum = torch.zeros_like(w.x)
        self._portions = 0
        self._samples = 0

    def __len__(self) -> int:
        """Portions in it."""
        return self._portions

    async def turns(self) -> AsyncIterator[Turn]:
        """What to do next, until training is over."""
        work = self._engine.work
        while (granted := await work.next_portion()) is not None:
            number, portion = granted
            begins = number != self._number
            if begins:
                self._number, self._settled = number, -1
                self._throw_away()
            yield Turn(number, None if portion == NOTHING else portion, begins)
            if portion != NOTHING:
                work.finish_step()

    async def claim(self, turn: Turn, g: Tensor, samples: int) -> None:
        """Add the gradient of a portion, unless another worker was first; `samples` are those behind it."""
        assert turn.portion is not None
        loss = inf if first_bad(g) is not None else self._engine.meter.loss
        said = await self._tell(CLAIM, turn.number, turn.portion, self._own, loss, samples)
        if said is Verdict.GRANTED:
            self._sum.add_(g, alpha=samples)
            self._portions += 1
            self._samples += samples
            return
        self._engine.progress.discard(samples)
        self._engine.meter.dropped += 1
        if said is Verdict.VOID:
            self._throw_away()

    async def push(self) -> None:
        """Hand the sum to all servers; it counts once they all have it and the first one knows.

        Raises Diverged if the sum is larger than numbers are.
        """
        if not self._portions:
            return
        if (place := first_bad(self._sum)) is not None:  # a server would refuse it
            raise Diverged(
                f"the sum of the gradients of {self._samples} samples is {float(self._sum[place])} at "
                f"element {place}, though each of them is finite; make the loss smaller"
            )
        numbers = torch.tensor([self._number, self._own, self._settled], dtype=torch.float64)
        like = Push(parts=(self._sum, numbers))
        await self._node.push(SERVER, self._sum, count=self._samples, like=like)
        if await self._tell(DELIVER, self._number, self._own) is Verdict.GRANTED:
            self._settled = self._own
            self._portions = self._samples = 0
        self._throw_away()

    def _throw_away(self) -> None:
        """Begin another bundle; samples of one that does not count are not counted."""
        if self._portions:
            self._engine.progress.discard(self._samples)
        self._sum.zero_()
        self._portions = self._samples = 0
        self._own += 1

    async def _tell(self, *numbers: float) -> Verdict:
        body = torch.tensor(numbers, dtype=torch.float64)
        (answer,) = await self._engine.client.instruct([self._engine.identity.workers], body)
        return Verdict(int(answer))
