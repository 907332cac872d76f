"""Sums over real connections: one after the other, by a link that is measured, and when a peer dies."""

import re

import pytest
import torch
import torch.distributed as dist
from harness import LIMIT, drive, in_threads, sockets_world
from torch import Tensor

from shoal.collectives import ALGORITHMS, LinkCost
from shoal.collectives.link import measure
from shoal.core.codec import Identity
from shoal.core.errors import PeerLost
from shoal.core.identity import NodeIdentity
from shoal.core.replica import Parameters
from shoal.core.transport import Transport
from shoal.engine.engine import Engine
from shoal.launch.join import choose_mean
from shoal.transports.sockets import SocketTransport, connections

PATIENCE = 10.0

each = pytest.mark.parametrize("name", ALGORITHMS)


def node_on(transport: Transport, x: Tensor, collective: str) -> Engine:
    mean = choose_mean(collective, transport, Identity(), transport.size)
    return Engine(
        transport,
        Parameters(x),
        NodeIdentity(transport.rank, transport.size),
        mean=mean,
        codec=Identity(),
        timeout=PATIENCE,
    )


@each
@pytest.mark.parametrize("workers", [2, 5, 8])
def test_large_and_small_sums_one_after_the_other(name: str, workers: int) -> None:
    async def body(t: Transport) -> list[list[float]]:
        node, seen = node_on(t, torch.zeros(1), name), []
        for k, length in enumerate((3, 50_000, 0, 50_000, 1)):  # the long ones go through shared memory
            v = torch.full((length,), float(10**k * (t.rank + 1)))
            await ALGORITHMS[name].sum(node.group, v)
            seen.append(v.unique().tolist())
        return seen

    total = sum(range(workers + 1))
    expected = [[float(total * 10**k)] if k != 2 else [] for k in range(5)]
    assert sockets_world(workers, body) == [expected] * workers


def test_a_link_is_measured_and_all_are_told_the_same() -> None:
    async def body(t: Transport) -> LinkCost:
        return await measure(node_on(t, torch.zeros(1), "auto").group)

    first, *others = sockets_world(3, body)
    assert others == [first] * 2
    assert first.latency > 0
    assert first.seconds_per_byte >= 0


@pytest.mark.slow
def test_nine_workers_without_an_all_reduce_measure_and_agree() -> None:
    async def body(t: Transport) -> list[float]:
        node = node_on(t, torch.zeros(4), "auto")
        for _ in range(3):
            average = await node.averages.mean(torch.full((4,), float(t.rank)), t.rank)
        return average.tolist()

    weighted = sum(k * k for k in range(9)) / sum(range(9))
    first, *others = sockets_world(9, body)
    assert first == pytest.approx([weighted] * 4)
    assert others == [first] * 8


@each
@pytest.mark.parametrize("dead", [0, 1, 4])
def test_all_others_hear_who_died(name: str, dead: int) -> None:
    """They stay where they are, as a script may that survives the exception: nobody waits for their end."""
    workers, store = 5, dist.HashStore()

    def join(rank: int) -> object:
        if rank == dead:
            return connections.connect_all(rank, workers, store, timeout=PATIENCE, host="127.0.0.1")
        return SocketTransport.connect(rank, workers, store, limit_bytes=LIMIT, timeout=PATIENCE)

    ends = in_threads(workers, join)

    def live(rank: int) -> str:
        if rank == dead:
            for connection in ends[rank].take_verified().values():
                connection.sock.close()
            ends[rank].close()
            return ""
        node = node_on(ends[rank], torch.zeros(1), name)
        with pytest.raises(PeerLost) as lost:
            drive(ALGORITHMS[name].sum(node.group, torch.ones(10)))
        return str(lost.value)

    try:
        said = in_threads(workers, live)
    finally:
        in_threads(workers, lambda rank: rank == dead or drive(ends[rank].close()))
    for rank, sentence in enumerate(said):
        assert rank == dead or re.match(rf"worker {dead} was lost \(.+\) before ", sentence), sentence
