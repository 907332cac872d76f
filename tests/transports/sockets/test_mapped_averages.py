"""Averages in mapped memory: the bits of stripes, whoever is slow, dies or cannot map."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import LIMIT, drive, in_threads, is_shared, shared_memories, sockets_mesh, sockets_world
from torch import Tensor

from shoal.collectives import Mapped, mapped, stripes
from shoal.core.codec import Identity
from shoal.core.errors import PeerLost, Unavailable, WireError
from shoal.core.identity import NodeIdentity
from shoal.core.replica import Parameters
from shoal.core.transport import Transport
from shoal.engine.engine import Engine
from shoal.engine.group import Group, Mean
from shoal.transports.shared_memory import memory
from shoal.transports.sockets import SocketTransport

PATIENCE = 10.0

pytestmark = pytest.mark.skipif(not memory.is_supported(), reason="this system shares no memory")


@pytest.fixture(autouse=True)
def _short_vectors_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "SMALLEST_MAPPED", 8)


def group_on(transport: Transport, x: Tensor, mean: Mean = stripes) -> Group:
    me = NodeIdentity(transport.rank, transport.size)
    return Engine(transport, Parameters(x), me, mean=mean, codec=Identity(), timeout=PATIENCE).group


def bits(v: Tensor) -> list[int]:
    return v.view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_the_bits_are_those_of_stripes(workers: int, dtype: torch.dtype) -> None:
    weights = [[1.0] * workers, [3.0, 0.0, 64.0, 0.5, 7.0][:workers], [0.0] * workers]

    async def body(t: Transport) -> list[bool]:
        draw = torch.Generator().manual_seed(t.rank)
        v = torch.randn(1001, generator=draw).to(dtype) * 10**t.rank
        v[:7] = -0.0
        group, mean, same = group_on(t, v), Mapped(required=True), []
        for given, length in zip(weights, (1001, 500, 4), strict=True):
            brought = v[:length].clone()
            average, total = await mean(group, brought, given[t.rank])
            striped, expected = await stripes(group, brought, given[t.rank])
            same.append(bits(average) == bits(striped) and total == expected)
        assert not is_shared(average)  # it stays what it is
        return same

    assert sockets_world(workers, body) == [[True] * 3] * workers


def test_nobody_waits_for_the_slowest_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 1 copies the first average only when worker 0 has brought its next vector."""
    has_brought = threading.Event()
    cat, slow = torch.cat, threading.local()

    def wait_and_cat(tensors: Any) -> Tensor:
        if getattr(slow, "waits", False):
            slow.waits = False
            assert has_brought.wait(PATIENCE)
        return cat(tensors)

    monkeypatch.setattr(mapped.torch, "cat", wait_and_cat)

    async def body(t: Transport) -> list[list[float]]:
        group, mean, seen = group_on(t, torch.zeros(8)), Mapped(), []
        assert isinstance(t, SocketTransport)
        slow.waits = t.rank == 1
        revise, revised = t.revise, []

        def note(block: Tensor) -> None:
            revise(block)
            revised.append(block)
            if len(revised) == 3:  # vector, stripe, and the next vector
                has_brought.set()

        if t.rank == 0:
            monkeypatch.setattr(t, "revise", note)
        for k in range(3):
            average, _ = await mean(group, torch.full((8,), 10.0**k * (t.rank + 1)), 1.0)
            seen.append(average.unique().tolist())
        return seen

    assert sockets_world(2, body) == [[[1.5], [15.0], [150.0]]] * 2


@pytest.mark.parametrize("phase", [0, 1, 2], ids=["mapping", "merging", "collecting"])
def test_survivors_form_the_average_again_from_what_they_brought(
    monkeypatch: pytest.MonkeyPatch, phase: int
) -> None:
    """Worker 2 dies instead of coming to that meeting; the others are told of a new epoch and go on."""
    meet, meetings = mapped.meet, iter(range(3))

    async def meet_or_die(group: Group, agrees: bool = True) -> bool:
        if group.transport.rank == 2 and next(meetings) == phase:
            raise EOFError
        return await meet(group, agrees)

    monkeypatch.setattr(mapped, "meet", meet_or_die)

    async def body(t: Transport) -> tuple[str, list[float]]:
        assert isinstance(t, SocketTransport)
        group, mean, v = (
            group_on(t, torch.zeros(9)),
            Mapped(required=True),
            3 * torch.arange(9.0) * (t.rank + 1),
        )
        with pytest.raises((EOFError, PeerLost)) as failure:
            await mean(group, v, 1.0 + t.rank)
        if t.rank == 2:
            for connection in t._connections.values():
                connection.cut()
            return "", []
        group.regroup([0, 1], epoch=1)
        average, _ = await mean(group, v, 1.0 + t.rank)
        return str(failure.value), average.tolist()

    for said, average in sockets_world(3, body)[:2]:
        assert "worker 2 was lost" in said
        assert average == (torch.arange(9.0) * (1 + 2 * 2)).tolist()


def test_who_was_left_behind_finds_that_what_it_reads_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 2 is still merging its stripe when the others have formed the average without it."""
    went_on = threading.Barrier(3)
    meet, merge, here = mapped.meet, mapped.Views.merge, threading.local()

    async def meet_unless_told(group: Group, agrees: bool = True) -> bool:
        here.meetings = getattr(here, "meetings", 0) + 1
        if here.meetings == 3 and not here.is_late:  # after merging: the keeper tells of an epoch without 2
            raise EOFError
        return await meet(group, agrees)

    def merge_late(views: mapped.Views, weights: list[float]) -> None:
        if here.is_late:
            went_on.wait(PATIENCE)
        merge(views, weights)

    monkeypatch.setattr(mapped, "meet", meet_unless_told)
    monkeypatch.setattr(mapped.Views, "merge", merge_late)

    async def body(t: Transport) -> float | str:
        group, mean = group_on(t, torch.zeros(9)), Mapped(required=True)
        here.is_late = t.rank == 2
        try:
            await mean(group, torch.ones(9), 1.0)
        except PeerLost as lost:
            return str(lost)
        except EOFError:
            group.regroup([0, 1], epoch=1)
        average, _ = await mean(group, torch.full((9,), 2.0), 1.0)
        went_on.wait(PATIENCE)
        return average.mean().item()

    *others, left_behind = sockets_world(3, body)
    assert others == [2.0, 2.0]
    assert "went on to another average without this one" in str(left_behind)


def test_workers_that_come_are_mapped_too() -> None:
    """Who leaves has read the average before: those who go on write to memory that it may be reading."""
    have_read = threading.Barrier(3, timeout=PATIENCE)

    async def body(t: Transport) -> list[float]:
        group, mean, seen = group_on(t, torch.zeros(9)), Mapped(required=True), []
        for members in ([0, 1], [0, 1, 2], [1, 2]):
            have_read.wait()
            group.regroup(members, epoch=0) if t.rank in members else None
            if t.rank in members:
                average, _ = await mean(group, torch.full((9,), float(t.rank)), 1.0)
                seen.append(average.mean().item())
        return seen

    assert sockets_world(3, body) == [[0.5, 1.0], [0.5, 1.0, 1.5], [1.0, 1.5]]


def test_without_shared_memory_averages_are_formed_by_messages_or_refused() -> None:
    asked: list[int] = []

    async def otherwise(group: Group, v: Tensor, weight: float) -> tuple[Tensor, float]:
        asked.append(group.rank)
        return await stripes(group, v, weight)

    async def body(t: Transport) -> float:
        group = group_on(t, torch.zeros(8))
        with pytest.raises(Unavailable, match="'mapped' needs workers on one host that share memory"):
            await Mapped(required=True)(group, torch.ones(8), 1.0)
        average, _ = await Mapped(otherwise)(group, torch.full((8,), float(t.rank)), 1.0)
        return average.mean().item()

    assert sockets_world(2, body, share_memory=False) == [0.5, 0.5]
    assert sorted(asked) == [0, 1]


def test_if_one_cannot_map_none_does() -> None:
    store = dist.HashStore()

    def node(rank: int) -> float:
        t = SocketTransport.connect(
            rank, 3, store, limit_bytes=LIMIT, timeout=PATIENCE, share_memory=rank != 2
        )
        mean = Mapped()
        try:
            average, _ = drive(mean(group_on(t, torch.zeros(8)), torch.full((8,), float(rank)), 1.0))
            return average.mean().item()
        finally:
            drive(t.close())

    assert in_threads(3, node) == [1.0] * 3


def test_vectors_that_do_not_fit_are_averaged_otherwise() -> None:
    lengths: list[int] = []

    async def otherwise(group: Group, v: Tensor, weight: float) -> tuple[Tensor, float]:
        lengths.append(v.numel())
        return await stripes(group, v, weight)

    async def body(t: Transport) -> None:
        group, mean = group_on(t, torch.zeros(8)), Mapped(otherwise)
        for length in (1, 2, 8, 9):
            await mean(group, torch.ones(length), 1.0)

    sockets_world(2, body)
    assert sorted(lengths) == [1, 1, 9, 9]


def test_a_vector_of_another_length_is_refused() -> None:
    async def body(t: Transport) -> None:
        group = group_on(t, torch.zeros(8))
        with pytest.raises(
            WireError, match=rf"member {1 - t.rank} averages {8 - (1 - t.rank)} x torch.float32"
        ):
            await Mapped()(group, torch.ones(8 - t.rank), 1.0)

    sockets_world(2, body)


def test_the_bytes_that_others_read_count_as_sent() -> None:
    async def body(t: Transport) -> tuple[int, int]:
        group = group_on(t, torch.zeros(900))
        v = torch.ones(900)
        await Mapped()(group, v, 1.0)
        begun = group.meter.bytes_sent
        await Mapped()(group, v, 1.0)
        by_memory = group.meter.bytes_sent - begun
        await stripes(group, v, 1.0)
        return by_memory - 2 * 2 * 104, group.meter.bytes_sent - begun - by_memory - 2 * 2 * 104

    assert sockets_world(3, body) == [(4800, 4800)] * 3


def test_no_memory_is_left_when_all_have_gone() -> None:
    before = shared_memories()
    with sockets_mesh(2) as ends:
        means = [Mapped(), Mapped()]
        groups = [group_on(t, torch.zeros(8)) for t in ends]
        in_threads(2, lambda rank: drive(means[rank](groups[rank], torch.ones(8), 1.0)))
        assert shared_memories() > before
    assert shared_memories() == before
