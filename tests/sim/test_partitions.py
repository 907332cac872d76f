"""Partitions, clocks that jump and slow disks in virtual time."""

from dataclasses import dataclass

import pytest
import torch
from tally import Stuck, at_the_end, tally

from shoal.core.transport import Message
from shoal.sim import Compute, Disk, Faults
from shoal.strategies import ASGD, Hogwild
from shoal.testing.problems import Slope, simulate
from shoal.vocabulary.strategy import Sends, Strategy

KEEPER = 4


def cut(*ranks, at=2.5, seconds=4.0, patience=0.5):
    return Faults(patience=patience).partition(ranks, at, seconds)


def finishers(run):
    assert all(w.x.eq(2).all() for w in at_the_end(run))
    return [w.rank for w in at_the_end(run)]


@pytest.mark.parametrize("side", [(1,), (1, 2), (1, 2, 3)], ids=["one", "half", "all but one"])
def test_those_who_are_cut_off_from_the_keeper_wait_and_join_again(side):
    run = tally(cut(*side), samples=80)
    assert finishers(run) == [0, 1, 2, 3]
    assert {run.worker(rank).membership.epoch for rank in range(4)} == {run.keeper.roster.epoch}
    assert run.keeper.roster.epoch >= 2  # they were given up, and came back


def test_training_goes_on_while_the_keeper_is_cut_off_and_nobody_is_given_up():
    cut_off, quiet = tally(cut(KEEPER)), tally()
    assert finishers(cut_off) == [0, 1, 2, 3]
    assert cut_off.keeper.roster.epoch == 0
    assert cut_off.nodes[0].transport.now() == quiet.nodes[0].transport.now()


def test_a_partition_that_is_shorter_than_the_patience_only_delays():
    run = tally(cut(1, 2, seconds=0.4, at=1.9))
    assert finishers(run) == [0, 1, 2, 3]
    assert run.keeper.roster.epoch == 0


def test_who_is_cut_off_to_the_end_ends_without_a_model_when_the_others_have_left():
    run = tally(cut(3, seconds=200.0))
    assert finishers(run) == [0, 1, 2]
    assert 3 in run.finished
    assert run.worker(3).membership.is_joining


@pytest.mark.parametrize("by", [-1e6, -3.0, 3.0, 1e6])
@pytest.mark.parametrize("rank", [0, 2, KEEPER])
def test_a_clock_that_jumps_changes_nothing(rank, by):
    """Worker 2 dies and asks the keeper to join, which is away then: it asks again after a second."""
    faults = Faults(noticed_after=0.1, restart_after=2.0).kill(2, 2.5).kill(KEEPER, 4.4)
    plain, jumped = tally(faults), tally(faults.clock_jump(rank, 4.45, by))
    assert finishers(jumped) == [0, 1, 2, 3]
    assert plain.seconds == jumped.seconds


def test_a_server_s_deadline_is_no_shorter_for_a_clock_that_leaps():
    faults = Faults(restart_after=5.0).kill(rank=1, moment=1.5).clock_jump(0, 3.0, 1000.0)
    run = simulate(
        ASGD(),
        Slope(),
        workers=1,
        steps=4,
        compute=Compute(mean=1.0),
        faults=faults,
        disk=lambda rank: Disk(),
    )
    assert run.server.x.item() == -4.0


def test_a_slow_disk_delays_the_change_and_what_was_not_written_was_not_told():
    kill = Faults(noticed_after=0.1).kill(1, 2.5)
    quick, slow = tally(kill), tally(kill.slow_disk(KEEPER, 2.0, 6.0))
    assert finishers(slow) == [0, 2, 3]
    assert slow.seconds > quick.seconds + 3
    with pytest.raises(Stuck):  # nobody has heard of a change
        tally(kill.slow_disk(KEEPER, 2.0, 6.0).kill(KEEPER, 7.0))


def test_a_server_waits_for_its_disk_before_it_answers():
    seconds = [
        simulate(
            ASGD(), Slope(), workers=1, steps=2, compute=Compute(mean=1.0), faults=f, disk=lambda rank: Disk()
        ).seconds
        for f in (Faults(), Faults().slow_disk(1, 0.5, 3.0))
    ]
    assert seconds == [2.0, 4.5]  # the push of second 1 is answered at 3.5


@dataclass(frozen=True)
class Chatty(Strategy):
    """Averages, and in every step sends a number to the next worker beside that."""

    sends = Sends.DIFFERENCES

    async def worker(self, w):
        async for t in w.steps():
            w.descend(await w.mean(w.grad()))
            if w.rank == 0 and t == 3:
                await w.send(2, Message("hello", (torch.tensor([7.0]),)))
            if w.rank == 2 and t == 5:
                w.x.add_((await w.recv("hello", 0)).body)


def test_what_an_algorithm_sends_beside_its_averages_outlives_a_change():
    """Worker 1 dies after the message arrived and before it is read."""
    faults = Faults(noticed_after=0.1).kill(1, 4.5)
    run = simulate(
        Chatty(), Slope(), workers=3, steps=6, compute=Compute(mean=1.0), faults=faults, elastic=True
    )
    assert run.worker(0).membership.epoch == 1
    assert [run.worker(rank).x.item() for rank in (0, 2)] == [-6.0, 1.0]


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        (Faults().partition([], 1, 1), "has nobody on one side"),
        (Faults().partition([0, 1, 2, 3, 4], 1, 1), "has nobody on one side"),
        (Faults().partition([9], 1, 1), "nodes are 0 to 4"),
        (Faults().partition([1], -1, 1), "begins at 0 or later, and ends"),
        (Faults().partition([1], 1, float("inf")), "begins at 0 or later, and ends"),
        (Faults().clock_jump(9, 1, 1), "nodes are 0 to 4"),
        (Faults().clock_jump(0, 1, float("nan")), "cannot jump by nan s"),
        (Faults().slow_disk(1, 1, 1), "node 1 writes to no disk that could be slow: nodes 4 do"),
        (Faults().slow_disk(KEEPER, 1, 0), "a slow disk from 1 s on, for 0 s"),
    ],
)
def test_what_cannot_happen_is_refused(faults, words):
    with pytest.raises(ValueError, match=words):
        tally(faults)


def test_memory_that_all_share_cannot_be_cut():
    with pytest.raises(ValueError, match="Hogwild shares memory, which a partition cannot cut"):
        simulate(Hogwild(), Slope(), workers=2, steps=2, faults=cut(0))
