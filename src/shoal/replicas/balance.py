"""Balance: faster workers get more samples of every step, so that all take equally long for theirs."""

from __future__ import annotations

import torch

from shoal.core.transport import Message
from shoal.replicas.module import Batches, ModuleReplica
from shoal.vocabulary.node import Hook, Node
from shoal.vocabulary.strategy import Strategy

EARLY, EVERY = (2, 3, 4, 8), 16
"""Before which steps speeds are told: a few at first, then every so many. The first step is not measured."""

NOTHING = -1.0
"""In place of a speed: none is under way."""

SPEED = "speed"
"""Tag of a message that tells one."""

DIGITS = 3
"""Of a speed that is told: what a clock's rounding leaves behind them changes nobody's share."""


def check_balance(strategy: Strategy, word: str) -> None:
    """Raise ValueError for a strategy whose workers do not keep step with each other."""
    if strategy.servers or strategy.survives:
        raise ValueError(
            f"balance shares out the samples of a step that all workers take together; "
            f"those of {word!r} each go at a speed of their own"
        )
    if strategy.fixed_shares or strategy.data_blocks is not None:
        raise ValueError(f"balance cannot share out samples where {word!r} gives every worker its own")


class Balance:
    """What is awaited before each step of a worker: `boundary`, and then this.

    Each worker tells all others its speed in samples per second of computing. Those that were told before
    one step hold from the next such step on, for all alike: by then they have arrived, and nobody waits.
    """

    def __init__(self, boundary: Hook) -> None:
        self._boundary = boundary
        self._parts: dict[int, _Part] = {}  # by rank: in virtual time all workers are here

    async def __call__(self, node: Node) -> None:
        """Raises what the boundary raises; else waits at most for a worker that is several steps behind."""
        if node.rank not in self._parts:
            self._parts[node.rank] = _Part(node)
        part = self._parts[node.rank]
        part.measure()
        await self._boundary(node)  # saves what was measured; what is told from it comes after that
        await part.share_out()


class _Part:
    """One worker's part in it; all of it that lasts is in the checkpoint."""

    def __init__(self, node: Node) -> None:
        assert isinstance(node.replica, ModuleReplica) and isinstance(node.replica.batches, Batches)
        self._node = node
        self._batches = node.replica.batches
        self._in_force = node.keep("balance.in_force", torch.zeros(node.size, dtype=torch.float64))
        own = torch.tensor([0.0, NOTHING, 0.0, 0.0], dtype=torch.float64)
        self._own = node.keep("balance.own", own)  # speed; what was told of it; samples and seconds since
        self._before = self._totals()
        self._is_resumed = float(self._own[1]) != NOTHING

    def measure(self) -> None:
        """Take account of the step before this one."""
        before, self._before = self._before, self._totals()
        if self._node.t > 1:  # the first step loads and allocates
            speed, told, samples, seconds = self._own.tolist()
            self._note(
                speed, told, samples + self._before[0] - before[0], seconds + self._before[1] - before[1]
            )

    async def share_out(self) -> None:
        """Where it is due, take in what was told the last time, and tell anew."""
        speed, told, samples, seconds = self._own.tolist()
        if self._is_resumed:  # what was under way when the checkpoint was written is told again
            self._is_resumed = False
            self._cut_by(self._in_force.tolist())
            await self._tell(told)
        if self._is_due(self._node.t):
            if told != NOTHING:
                self._cut_by([await self._speed_of(rank) for rank in range(self._node.size)])
            measured = samples / seconds if seconds > 0 else 0.0
            speed = (speed + measured) / 2 if speed else measured
            told = float(f"{speed:.{DIGITS}g}")
            self._note(speed, told, 0.0, 0.0)
            await self._tell(told)

    def _is_due(self, t: int) -> bool:
        """Whether speeds are told before step `t`."""
        return not self._node.is_last(t - 1) and (t in EARLY or (t > 0 and t % EVERY == 0))

    def _cut_by(self, speeds: list[float]) -> None:
        """Share out by these speeds, unless one of them is not known."""
        if all(speed > 0 for speed in speeds):
            self._in_force.copy_(torch.tensor(speeds, dtype=torch.float64))
            self._batches.weigh(speeds)

    def _note(self, *own: float) -> None:
        self._own.copy_(torch.tensor(own, dtype=torch.float64))

    async def _speed_of(self, rank: int) -> float:
        """What a worker told the last time; exact, so that all share out alike."""
        return float(self._own[1]) if rank == self._node.rank else (await self._node.recv(SPEED, rank)).count

    async def _tell(self, speed: float) -> None:
        for rank in range(self._node.size):
            if rank != self._node.rank:
                await self._node.send(rank, Message(SPEED, count=speed))

    def _totals(self) -> tuple[int, float]:
        """Samples and seconds of computing so far."""
        return self._node.meter.samples, self._node.meter.compute_seconds
