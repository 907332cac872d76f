"""Decentralised asynchronous SGD: worked out on paper, and its identities."""

from dataclasses import dataclass

import pytest
import torch
from central import Whole as WholeGradients
from gossiping import ends, watch

from shoal.core.codec import Codec, expect
from shoal.engine.engine import Instrument
from shoal.sim import Compute, Faults, Network
from shoal.strategies import Single, Strom
from shoal.testing.problems import Quadratic, Slope, simulate

SLOWER = Compute(1.0, slow={1: 1.25})


@dataclass(frozen=True)
class Ones(Codec):
    """Sends 1 for whatever is at least 1, -1 for what is at most -1, and keeps the rest."""

    feedback: str = "residual"  # type: ignore[assignment]

    def encode(self, v, state):
        return ((v >= 1).to(torch.int8) - (v <= -1).to(torch.int8),), state

    def decode(self, payload, out):
        (signs,) = expect(payload, (torch.int8, out.numel()))
        return out.copy_(signs)


def test_two_workers_at_their_own_pace_by_hand():
    # Gradients are 1 and 2 everywhere, at a rate of 1, and take 1 and 1.25 s. What has come is taken before
    # the next gradient is begun: worker 0 takes the 2 of 1.25 s at 2 s, worker 1 the 1 of 1 s at 1.25 s.
    run, paths = watch(Strom(), [0.0, 0.0], Slope(gradients=(1.0, 2.0)), steps=3, compute=SLOWER)
    assert paths.x[0] == [-1.0, -2.0, -2.0 - 2.0 - 1.0]
    assert paths.x[1] == [-2.0, -2.0 - 1.0 - 2.0, -5.0 - 1.0 - 2.0]
    assert ends(run) == [-3 * (1.0 + 2.0)] * 2


def test_a_gradient_is_taken_at_what_has_come_so_far_by_hand():
    # minima at 0 and 4, lr 1/2, both begin at 8
    x0 = 8 - 0.5 * 8  # 1.00 s
    first1 = 8 - 0.5 * (8 - 4)  # 1.25 s
    x1 = first1 - 0.5 * 8  # what worker 0 sent at 1 s
    second0 = x0 - 0.5 * x0  # 2.00 s; begun at 1 s, so without the 2 of worker 1
    second1 = x1 - 0.5 * (x1 - 4)
    problem = Quadratic(lr=0.5, targets=(0.0, 4.0))
    _, paths = watch(Strom(), [8.0, 8.0], problem, steps=2, compute=SLOWER)
    assert paths.x == {0: [x0, second0], 1: [first1, second1]}


def test_what_the_codec_keeps_is_sent_later_by_hand():
    # gradients of 3/4: nothing, 1, 1, 1, nothing, ...: 3 in 4 steps, from each of two
    run, paths = watch(
        Strom(), [0.0, 0.0], Slope(gradients=(0.75,)), steps=4, compute=Compute(1.0), codec=Ones()
    )
    assert paths.x[0][0] == 0.0
    assert ends(run) == [-6.0, -6.0]
    assert run.worker(0).coding.states["news"]["rest"].item() == 0.0


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("latency", [0.0, 0.3, 4.0])
@pytest.mark.parametrize("slow", [{}, {0: 7.0}, {1: 0.1}], ids=str)
def test_all_hold_the_same_sum_in_the_end_whatever_order_it_came_in(workers, latency, slow):
    options = {"compute": Compute(1.0, jitter=0.4, slow=slow), "network": Network(latency=latency)}
    run = simulate(Strom(), WholeGradients(lr=1.0), workers=workers, steps=6, start=[0.0] * 7, **options)
    assert all(torch.equal(run.worker(k).x, run.worker(0).x) for k in range(workers))
    assert torch.equal(run.worker(0).x, run.worker(0).x.round())  # a sum of whole numbers, each taken by all
    assert all(run.worker(k).merged == 6 * workers for k in range(workers))


def test_what_was_sent_and_what_is_kept_is_what_was_computed():
    run = simulate(
        Strom(help=False),
        WholeGradients(lr=1.0),
        workers=3,
        steps=9,
        start=[0.0] * 5,
        compute=Compute(1.0, jitter=0.4),
        codec=Ones(),
    )
    kept = sum(run.worker(k).coding.states["news"]["rest"] for k in range(3))
    assert kept.abs().sum() > 0
    assert torch.equal(kept, kept.round())
    assert torch.equal(run.worker(0).x, run.worker(0).x.round())


def test_nobody_waits():
    run = simulate(
        Strom(help=False),
        Slope(),
        workers=3,
        steps=4,
        compute=Compute(1.0, slow={2: 10.0}),
        network=Network(),
    )
    assert run.worker(0).meter.compute_seconds == 4.0
    assert run.seconds == 40.0
    helped = simulate(Strom(), Slope(), workers=3, steps=40, compute=Compute(1.0, slow={2: 10.0}))
    assert 120 / helped.seconds > 0.9 * 2.1


class UnderWay(Instrument):
    """The most messages that were sent and not yet taken at any one time."""

    def __init__(self):
        self.now = self.most = 0

    def send(self, node, dst, m):
        self.now += 1
        self.most = max(self.most, self.now)

    def receive(self, node, m):
        self.now -= 1


def test_where_nothing_takes_time_workers_take_turns_and_messages_do_not_pile_up():
    under_way = UnderWay()
    simulate(Strom(), Slope(), workers=3, steps=50, observers=[under_way])
    assert under_way.most <= 3 * 2 * 2  # of each worker to each other, those of two steps


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("moment", [0.5, 2.5, 4.0, 6.5])
def test_one_that_dies_is_done_without(victim, moment):
    run, _ = watch(
        Strom(),
        [0.0] * 3,
        Slope(),
        steps=5,
        compute=Compute(1.0, jitter=0.3),
        network=Network(latency=0.1),
        faults=Faults(noticed_after=0.2).kill(victim, moment),
    )
    assert {0, 1, 2} - {victim} <= set(run.finished)


def test_one_worker_is_single():
    problem = Quadratic(lr=0.25, targets=(3.0,))
    alone = simulate(Strom(), problem, workers=1, steps=5, start=[8.0])
    assert torch.equal(alone.worker(0).x, simulate(Single(), problem, steps=5, start=[8.0]).worker(0).x)
