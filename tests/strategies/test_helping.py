"""Who is done does batches of those who are behind: by hand, and nothing left out or done twice."""

from collections import defaultdict

import pytest
import torch
from central import Census, name
from gossiping import watch

from shoal.sim import Compute, Faults, Network
from shoal.strategies import ADPSGD, SGP, Gossip, Sync
from shoal.testing.problems import Problem, Slope, simulate

HELPERS = [Gossip(), ADPSGD(), Gossip(period=3, topology="ring"), ADPSGD(topology="ring")]


class Diary(Problem):
    """Gradients of zero, and who has taken which, as (owner, place)."""

    def __init__(self):
        super().__init__()
        self.done = defaultdict(list)
        self._doers = {}

    def replica(self, rank, x):
        replica = super().replica(rank, x)
        self._doers[replica.x.data_ptr()] = rank
        return replica

    def gradient(self, rank, step, x):
        self.done[self._doers[x.data_ptr()]].append((rank, step))
        return torch.zeros_like(x)


def diary_of(strategy, workers, steps, **options):
    diary = Diary()
    run, _ = watch(strategy, [0.0] * workers, diary, steps=steps, **options)
    return run, diary.done


def test_who_is_done_takes_the_later_half_by_hand():
    # Worker 0 takes 1 s for a batch, worker 1 takes 6.5. At 6 s worker 0 is done; worker 1 has five left
    # beside the one at hand: it keeps 1 and 2, and gives 3, 4 and 5.
    run, done = diary_of(Gossip(period=99), 2, 6, compute=Compute(1.0, slow={1: 6.5}))
    assert done[0][:6] == [(0, place) for place in range(6)]
    # 9 s: worker 1 is at place 1, has 2 left, and gives it
    assert done[0][6:] == [(1, 3), (1, 4), (1, 5), (1, 2)]
    assert done[1] == [(1, 0), (1, 1)]
    assert run.seconds == 13.0
    assert [node.t for node in run.nodes] == [6, 6]
    assert [node.meter.steps for node in run.nodes] == [10, 2]


@pytest.mark.parametrize("strategy", HELPERS, ids=name)
@pytest.mark.parametrize("latency", [0.0, 0.4, 7.0])
@pytest.mark.parametrize("slow", [{}, {0: 5.0}, {2: 50.0}, {1: 0.1, 4: 20.0}], ids=str)
def test_every_batch_is_done_once(strategy, latency, slow):
    options = {"compute": Compute(1.0, jitter=0.3, slow=slow), "network": Network(latency=latency)}
    run, done = diary_of(strategy, 5, 11, **options)
    assert sorted(batch for own in done.values() for batch in own) == [
        (owner, place) for owner in range(5) for place in range(11)
    ]
    assert run.finished == [0, 1, 2, 3, 4]
    assert [node.t for node in run.nodes] == [11] * 5
    assert all(node.merged == 55 for node in run.nodes)


def test_what_was_taken_over_may_be_given_on():
    # worker 3 does one batch in the time in which the others do all theirs: each in turn takes half of it
    _, done = diary_of(ADPSGD(), 4, 40, compute=Compute(1.0, slow={3: 1000.0}))
    taken = {rank: [batch for batch in own if batch[0] != rank] for rank, own in done.items()}
    assert sorted(len(taken[k]) for k in range(3)) == [13, 13, 13]
    assert len(done[3]) == 1


@pytest.mark.parametrize("strategy", [Gossip(), ADPSGD()], ids=name)
def test_a_slow_worker_costs_little_more_than_its_own_speed(strategy):
    # One of four takes five times as long: the ideal is 3.2 batches a second.
    slow = {"compute": Compute(1.0, jitter=0.1, slow={3: 5.0}), "network": Network(latency=0.01)}
    run, _ = watch(strategy, [0.0] * 4, steps=100, **slow)
    assert 400 / run.seconds >= 0.95 * 3.2
    lockstep, _ = watch(SGP(), [0.0] * 4, steps=100, **slow)
    sync = simulate(Sync(), Slope(), workers=4, steps=100, **slow)
    assert 400 / sync.seconds <= 0.26 * 3.2
    assert 400 / lockstep.seconds <= 0.26 * 3.2


@pytest.mark.parametrize("strategy", HELPERS, ids=name)
@pytest.mark.parametrize("moment", [0.0, 2.5, 5.5, 6.5, 7.5, 8.5, 9.5, 12.5])
@pytest.mark.parametrize("victim", [0, 3])
def test_nobody_waits_for_a_helper_or_a_helped_one_that_dies(strategy, moment, victim):
    run, _ = watch(
        strategy,
        [8.0, 0.0, 4.0, -8.0],
        Slope(gradients=(1.0, 2.0)),
        steps=6,
        compute=Compute(1.0, jitter=0.2, slow={3: 5.0}),
        network=Network(latency=0.1),
        faults=Faults(noticed_after=0.2).kill(victim, moment),
    )
    assert {0, 1, 2, 3} - {victim} <= set(run.finished)


def test_the_gradient_is_that_of_the_batch_that_was_taken_over():
    census = Census(steps=8)
    run = simulate(
        Gossip(),
        census,
        workers=3,
        steps=8,
        start=[0.0] * 24,
        compute=Compute(1.0, slow={2: 9.0}, jitter=0.1),
    )
    assert all(share > 0 for share in run.worker(0).x.tolist())


def test_the_last_checkpoint_is_written_when_nothing_is_left_to_take_over():
    saved = defaultdict(list)

    async def boundary(node):
        if node.t == node.work.last_step and not node.work.may_help:
            saved[node.rank].append((node.transport.now(), node.meter.steps))

    watch(Gossip(period=99), [0.0, 0.0], steps=6, compute=Compute(1.0, slow={1: 6.5}), between_steps=boundary)
    # worker 0 has done four of worker 1's by 10 s, worker 1 two of its own by 13 s
    assert saved == {0: [(10.0, 10)], 1: [(13.0, 2)]}
