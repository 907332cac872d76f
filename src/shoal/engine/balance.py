"""Balance: faster workers get more samples of every step, so that all take equally long for theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch

from shoal.core.identity import NodeIdentity
from shoal.core.replica import Replica
from shoal.engine.channel import Channel
from shoal.engine.mailbox import Mailbox
from shoal.engine.progress import Progress
from shoal.engine.protocol import Speed
from shoal.engine.variables import Variables

EARLY, EVERY = (2, 3, 4, 8), 16
"""Before which steps speeds are exchanged: a few at first, then every so many. The first is not measured."""

NOTHING = -1.0
"""In place of a speed: none has been sent."""

DIGITS = 3
"""Of a speed that is sent: smaller differences are the clock's rounding, and must change nobody's share."""


@runtime_checkable
class Weighs(Protocol):
    """A replica whose share of a step's samples can be changed."""

    def weigh(self, speeds: Sequence[float]) -> None:
        """Cut each step's samples in proportion to these, one for each worker, from now on."""
        ...


class Balance:
    """One worker's part in sharing out the samples of each step.

    Each worker sends all others its speed, in samples per second of computing. Speeds sent before one step
    hold from the next such step on, for all alike: by then they have arrived, and nobody waits.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        channel: Channel,
        mailbox: Mailbox,
        progress: Progress,
        variables: Variables,
        replica: Replica,
        is_last: Callable[[int], bool],
    ) -> None:
        if not isinstance(replica, Weighs):
            raise TypeError(f"{type(replica).__name__} cannot change its share of a step's samples")
        self._replica = replica
        self._identity = identity
        self._channel = channel
        self._mailbox = mailbox
        self._progress = progress
        self._variables = variables
        self._is_last = is_last
        self._before: tuple[int, float] | None = None
        self._is_resumed = False

    def measure(self) -> None:
        """Time the step before this one."""
        if self._before is None:  # the first call: a checkpoint is loaded by now
            size = self._identity.workers
            zeros = torch.zeros(size, dtype=torch.float64)
            self._in_force = self._variables.keep("balance.in_force", zeros)
            own = torch.tensor([0.0, NOTHING, 0.0, 0.0], dtype=torch.float64)
            self._own = self._variables.keep("balance.own", own)  # speed; last sent; samples, seconds since
            self._before = self._totals()
            self._is_resumed = float(self._own[1]) != NOTHING
        before, self._before = self._before, self._totals()
        if self._progress.t > 1:  # the first step loads and allocates
            speed, told, samples, seconds = self._own.tolist()
            samples, seconds = samples + self._before[0] - before[0], seconds + self._before[1] - before[1]
            self._note(speed, told, samples, seconds)

    async def share_out(self) -> None:
        """Where it is due, take in the speeds sent the last time, and send the new ones."""
        speed, told, samples, seconds = self._own.tolist()
        if self._is_resumed:  # speeds under way when the checkpoint was written are sent again
            self._is_resumed = False
            self._cut_by(self._in_force.tolist())
            await self._tell(told)
        if self._is_due(self._progress.t):
            if told != NOTHING:
                self._cut_by([await self._speed_of(rank) for rank in range(self._identity.workers)])
            measured = samples / seconds if seconds > 0 else 0.0
            speed = (speed + measured) / 2 if speed else measured
            told = float(f"{speed:.{DIGITS}g}")
            self._note(speed, told, 0.0, 0.0)
            await self._tell(told)

    def _is_due(self, t: int) -> bool:
        """Whether speeds are exchanged before step `t`."""
        return not self._is_last(t - 1) and (t in EARLY or (t > 0 and t % EVERY == 0))

    def _cut_by(self, speeds: list[float]) -> None:
        """Share out by these speeds, unless one of them is not known."""
        if all(speed > 0 for speed in speeds):
            self._in_force.copy_(torch.tensor(speeds, dtype=torch.float64))
            self._replica.weigh(speeds)

    def _note(self, *own: float) -> None:
        self._own.copy_(torch.tensor(own, dtype=torch.float64))

    async def _speed_of(self, rank: int) -> float:
        """What a worker sent the last time; exact, so that all share out alike."""
        if rank == self._identity.rank:
            return float(self._own[1])
        return (await self._mailbox.find("speed", rank)).count

    async def _tell(self, speed: float) -> None:
        for rank in range(self._identity.workers):
            if rank != self._identity.rank:
                await self._channel.send(rank, Speed(count=speed))

    def _totals(self) -> tuple[int, float]:
        """Samples and seconds of computing so far."""
        return self._progress.samples, self._channel.meter.compute_seconds
