"""LinkCost: the time that a message takes from one worker to another, known or measured."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import torch

from shoal.collectives.exchange import give, take
from shoal.core.transport import HEADER_BYTES
from shoal.engine.group import Group

ROUNDS = 5
BULK_ROUNDS = 2  # the first one includes the allocation of buffers
BULK_BYTES = 1 << 20
"""A size that every transport accepts in one message, however small the model is."""

EMPTY = torch.empty(0)


@dataclass(frozen=True)
class LinkCost:
    """The seconds that an empty message takes, header included, and those of each byte of its payload."""

    latency: float  # L
    seconds_per_byte: float  # G

    @classmethod
    def of_network(cls, latency: float, bandwidth: float) -> LinkCost:
        """The link of a network with this latency in seconds and bandwidth in bytes per second."""
        return cls(latency + HEADER_BYTES / bandwidth, 1 / bandwidth)

    def seconds(self, nbytes: float) -> float:
        """Seconds that a message of `nbytes` takes: L + n G."""
        return self.latency + nbytes * self.seconds_per_byte


async def measure(group: Group) -> LinkCost:
    """Measure the link between workers 0 and 1 at worker 0, and return it at every worker.

    All workers, at least two, must call this together. It takes a few milliseconds after the last has called.
    """
    figures = torch.empty(2, dtype=torch.float64)
    if group.rank == 0:
        figures.copy_(torch.tensor(await _time_trips(group), dtype=torch.float64))
        for rank in range(1, group.size):
            await give(group, rank, "link", figures)
    else:
        if group.rank == 1:
            await _echo(group)
        figures = await take(group, 0, "link", figures)
    latency, seconds_per_byte = figures.tolist()
    return LinkCost(latency, seconds_per_byte)


async def measured(group: Group) -> LinkCost:
    """The cost of a link of this group: what its workers have measured, or measure now, all together."""
    link: LinkCost | None = group.measured.get("link")
    if link is None:
        link = group.measured["link"] = await measure(group)
    return link


async def _time_trips(group: Group) -> tuple[float, float]:
    await take(group, 1, "pong", EMPTY)  # worker 1 is ready
    bulk = torch.zeros(BULK_BYTES // 4)
    empty = median([await _time_trip(group, EMPTY) for _ in range(ROUNDS)])
    full = min([await _time_trip(group, bulk) for _ in range(BULK_ROUNDS)])
    return empty / 2, max(0.0, full - empty) / BULK_BYTES


async def _time_trip(group: Group, v: torch.Tensor) -> float:
    began = group.now()
    await give(group, 1, "ping", v)
    await take(group, 1, "pong", EMPTY)
    return group.now() - began


async def _echo(group: Group) -> None:
    await give(group, 0, "pong", EMPTY)
    bulk = torch.empty(BULK_BYTES // 4)
    for expected in [EMPTY] * ROUNDS + [bulk] * BULK_ROUNDS:
        await take(group, 0, "ping", expected)
        await give(group, 0, "pong", EMPTY)
