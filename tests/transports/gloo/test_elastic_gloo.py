"""All-reduces of gloo over whoever is a member: new groups, and sums that are called off."""

import threading

import pytest
import torch
import torch.distributed as dist
from harness import LIMIT, drive, in_threads

from shoal.core.errors import PeerLost
from shoal.transports.gloo import ElasticGloo

WORKERS, PATIENCE = 3, 20.0


@pytest.fixture
def ends():
    store = dist.HashStore()
    ends = in_threads(
        WORKERS, lambda rank: ElasticGloo.connect(rank, WORKERS, store, limit_bytes=LIMIT, timeout=PATIENCE)
    )
    yield ends
    in_threads(WORKERS, lambda rank: drive(ends[rank].close()))


def never() -> bool:
    return False


def total(end: ElasticGloo) -> list[float]:
    """The sum over the members of each one's rank plus one."""
    v = torch.full((5,), end.rank + 1.0)
    drive(end.all_reduce(v))
    return v.tolist()


def test_the_sum_is_over_the_members_of_the_epoch(ends):
    def live(rank: int) -> list[list[float]]:
        sums = []
        for epoch, members in enumerate([(0, 1, 2), (0, 2), (0, 1, 2)]):
            if rank in members:
                ends[rank].regroup(members, epoch, never)
                sums.append(total(ends[rank]))
        return sums

    everybody, without_1 = [6.0] * 5, [4.0] * 5
    both = [everybody, without_1, everybody]
    assert in_threads(WORKERS, live) == [both, [everybody, everybody], both]


def test_a_sum_that_is_called_off_ends_for_all_and_the_next_group_sums_again(ends):
    called_off = threading.Event()

    def live(rank: int) -> list[float]:
        end = ends[rank]
        end.regroup((0, 1, 2), 0, never)
        total(end)
        end.regroup((0, 1, 2), 1, called_off.is_set)
        if rank == 1:  # it never comes
            called_off.set()
            return []
        with pytest.raises(PeerLost, match="epoch 1 was broken off: not all have come"):
            total(end)
        with pytest.raises(PeerLost, match="is broken"):
            total(end)
        end.regroup((0, 2), 2, never)
        return total(end)

    assert in_threads(WORKERS, live) == [[4.0] * 5, [], [4.0] * 5]


def test_who_does_not_come_in_time_is_named(ends):
    def live(rank: int) -> str:
        end = ends[rank]
        end.regroup((0, 1, 2), 0, never)
        total(end)
        if rank == 1:
            return ""
        with pytest.raises(PeerLost, match="was broken off") as lost:
            drive(end.all_reduce(torch.ones(5), timeout=3.0))
        return str(lost.value)

    first, _, third = in_threads(WORKERS, live)
    sentence = ". worker 1 did not come to it within 3 s"
    assert first.endswith(sentence) or third.endswith(sentence)  # who waited longer, or both


def test_who_closes_breaks_off_the_sum_of_the_others(ends):
    def live(rank: int) -> str:
        end = ends[rank]
        end.regroup((0, 1, 2), 0, never)
        total(end)
        if rank == 1:
            drive(end.close())
            return ""
        with pytest.raises(PeerLost, match="was broken off") as lost:
            total(end)
        return type(lost.value).__name__

    assert in_threads(WORKERS, live) == ["PeerLost", "", "PeerLost"]
