"""Whether all workers have the same weights: before each step of `sync`, and after the last average of any.

A loop that does something at one worker alone, such as lowering its learning rate, makes them differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from math import sqrt

import torch
from torch import Tensor

from shoal.core.errors import PeerLost, ShoalError
from shoal.core.transport import Message
from shoal.core.vector import Layout
from shoal.engine.engine import Engine
from shoal.engine.group import Group
from shoal.replicas.attached import AttachedReplica

WEIGHTS = "weights"

SAMPLED = 16
"""Elements that are compared of each parameter."""

STEPS_BETWEEN_LOOKS = 100

ROUNDING = 64
"""Rounding errors of the largest weight by which one step may differ: not all hosts compute alike."""

MOST_ROUNDING = 0.1
"""What those of all steps may add up to, as a part of the largest weight."""


class SameWeights:
    """Compares a sample of this worker's weights with that of the others. `name` is the strategy's."""

    def __init__(self, engine: Engine, replica: AttachedReplica, name: str) -> None:
        self._engine = engine
        self._replica = replica
        self._name = name
        self._places = _places(replica.layout).to(replica.x.device)
        self._own: dict[int, Tensor] = {}  # the samples of the last two looks, by step

    async def look(self) -> None:
        """Before a step: raise ShoalError if the weights differ from worker 0's, or did so at the last look.

        Worker 0 sends its sample to the others. Nobody waits for it.
        """
        engine, step = self._engine, self._engine.t
        if not step or step % STEPS_BETWEEN_LOOKS:
            return
        if engine.rank == 0:
            sample = self._sample()
            for rank in engine.members[1:]:
                await engine.channel.tell(rank, Message(WEIGHTS, (sample,), seq=step))
            return
        self._own = {t: own for t, own in self._own.items() if t >= step - STEPS_BETWEEN_LOOKS}
        self._own[step] = self._sample()
        for m in engine.mailbox.poll(WEIGHTS):
            if m.seq in self._own and differ(m.body, self._own[m.seq], m.seq):
                raise self._refusal(m.seq, 0, [engine.rank])

    async def compare(self) -> None:
        """All have ended: raise ShoalError, at all workers, if the weights of one differ from the first's."""
        engine, found = self._engine, torch.empty(0)
        formation = partial(_differing, engine.group, engine.rank, self._sample(), engine.t)
        if engine.membership is not None:
            found, _ = await engine.membership.form(formation)
        else:
            with suppress(PeerLost):  # it has its model, and whoever started the processes tells of its end
                found, _ = await formation()
        if found.numel() > 1:
            first, *others = found.tolist()
            raise self._refusal(engine.t, first, others)

    def _sample(self) -> Tensor:
        return self._replica.x[self._places].cpu()

    def _refusal(self, step: int, first: int, others: Iterable[int]) -> ShoalError:
        name_of = self._engine.identity.name_of
        return ShoalError(
            f"{', '.join(map(name_of, others))} and {name_of(first)} have different weights at step {step}, "
            f"and {self._name} keeps them equal: the loop does something at one worker alone, such as "
            "ReduceLROnPlateau on the worker's own loss, a skipped batch or a loaded optimizer state; do "
            "the same at all workers"
        )


def _places(layout: Layout) -> Tensor:
    """Where the elements lie that are compared, at even distances in each parameter."""
    pieces = layout.pieces(0, layout.numel)
    return torch.cat([torch.arange(p.begin, p.end, -(-p.size // SAMPLED)) for p in pieces])


def differ(first: Tensor, own: Tensor, steps: int) -> bool:
    """Whether two samples differ by more than rounding makes of so many steps."""
    part = min(MOST_ROUNDING, ROUNDING * torch.finfo(own.dtype).eps * sqrt(steps))
    first, own = first.cpu().double(), own.double()
    slack = part * float(first.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return not torch.allclose(own, first, rtol=0, atol=slack, equal_nan=True)


async def _differing(group: Group, rank: int, own: Tensor, steps: int) -> tuple[Tensor, float]:
    """The rank of the group's first worker, then those of the workers whose samples differ from its own."""
    if group.rank:
        await group.send(0, Message(WEIGHTS, (own,)))
        return (await group.take(WEIGHTS, 0)).body.clone(), 1.0
    theirs = [await group.take(WEIGHTS, other) for other in range(1, group.size)]
    found = torch.tensor([rank, *(m.src for m in theirs if differ(own, m.body, steps))])
    for other in range(1, group.size):
        await group.send(other, Message(WEIGHTS, (found,)))
    return found, 1.0
