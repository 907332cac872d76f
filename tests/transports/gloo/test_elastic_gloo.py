"""All-reduces of gloo over whoever is a member: new groups, and sums that are called off."""

import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from harness import LIMIT, drive, in_threads

from shoal.collectives.native import Merged, Native
from shoal.core.errors import PeerLost
from shoal.core.meter import Meter
from shoal.engine.streaming import Streamed
from shoal.engine.variables import Variables
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
        with pytest.raises(PeerLost, match="epoch 1 was broken off"):
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
        with pytest.raises(PeerLost) as lost:
            drive(end.all_reduce(torch.ones(5), timeout=3.0))
        return str(lost.value)

    first, _, third = in_threads(WORKERS, live)
    sentence = ": worker 1 did not come in time"
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


HALVES = [slice(500, 1000), slice(0, 500)]


def test_a_part_is_summed_before_the_rest_is_computed_once_all_have_met(ends):
    turn = threading.Barrier(WORKERS)

    def live(rank: int) -> list[float]:
        end = ends[rank]
        end.regroup((0, 1, 2), 0, never)
        v = torch.zeros(1000)
        drive(end.begin_all_reduce(v, HALVES).finish())  # all meet, and see that they bring the same
        v.fill_(rank + 1.0)
        reduction = end.begin_all_reduce(v, HALVES)
        reduction.start(0)
        deadline = time.monotonic() + PATIENCE
        while v[600] != 6.0 and time.monotonic() < deadline:
            time.sleep(0.001)
        turn.wait(PATIENCE)
        seen = [v[600].item(), v[0].item()]
        reduction.start(1)
        drive(reduction.finish())
        return [*seen, v[0].item()]

    assert in_threads(WORKERS, live) == [[6.0, rank + 1.0, 6.0] for rank in range(WORKERS)]


def group_of(end: ElasticGloo) -> SimpleNamespace:
    """What a gradient that is averaged asks of a group."""
    asked = {"x": torch.zeros(1000), "timeout": PATIENCE, "epoch": 0, "size": WORKERS}
    return SimpleNamespace(transport=end, now=time.monotonic, meter=Meter(), keep=Variables().keep, **asked)


def test_a_gradient_whose_average_somebody_has_left_is_averaged_anew_among_the_others(ends):
    """One part is under way when worker 1 leaves; the others have already added to what they keep in it."""
    has_left = threading.Event()

    def live(rank: int) -> list[float]:
        end, mean = ends[rank], Native()
        end.regroup((0, 1, 2), 0, has_left.is_set)
        group, gradient = group_of(end), torch.full((1000,), rank + 1.0)

        def begun(ready: bool) -> tuple[Merged, Streamed]:
            merged = mean.begin(group, HALVES)
            unit = merged.unit * (rank + 1)  # worker k has k + 1 samples
            torch.mul(gradient, unit, out=merged.out)
            if ready:
                merged.ready(0)
            fill = partial(torch.mul, gradient, unit, out=merged.out)
            return merged, Streamed(merged.out, rank + 1, 0.0, False, fill)

        first, streamed = begun(ready=False)
        average, total = drive(first.finish(streamed, rank + 1.0))
        first.settle(total)
        found = [average[0].item(), average[999].item(), total]
        if rank == 1:
            drive(end.close())
            has_left.set()
            return found
        second, streamed = begun(ready=True)
        with pytest.raises(PeerLost):
            drive(second.finish(streamed, rank + 1.0))
        end.regroup((0, 2), 1, never)
        group.epoch, group.size = 1, 2
        average, total = drive(second.finish(streamed, rank + 1.0))
        return [*found, average[0].item(), average[999].item(), total]

    together, without_1 = [(1 + 4 + 9) / 6, (1 + 4 + 9) / 6, 6.0], [(1 + 9) / 4, (1 + 9) / 4, 4.0]
    results = in_threads(WORKERS, live)
    for rank in range(WORKERS):
        assert results[rank] == pytest.approx(together if rank == 1 else [*together, *without_1])
