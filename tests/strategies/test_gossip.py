"""Gossiping SGD: worked out on paper, and its identities."""

import pytest
import torch
from central import Drawn
from gossiping import ends, graph, watch

from shoal.codecs import FP16
from shoal.engine.engine import Instrument
from shoal.sim import Compute, Network
from shoal.strategies import Gossip, Single
from shoal.testing.problems import Slope, simulate


def test_two_workers_at_their_own_pace_by_hand():
    # Gradients take 1 and 1.25 s, a message 1/8 s; every step goes down by 1. Who is asked tells its model as
    # it is at that moment, though it computes.
    a1 = ((8 - 1) + 16) / 2  # 1.000 s  worker 0 asks; worker 1, still in its first step, tells 16
    b1 = ((16 - 1) + a1) / 2  # 1.250 s  worker 1 asks; worker 0 has its answer since 1.25 s
    a2 = ((a1 - 1) + b1) / 2  # 2.250 s
    b2 = ((b1 - 1) + a2) / 2  # 2.750 s  worker 0 is done since 2.5 s, and still tells
    run, paths = watch(
        Gossip(help=False),
        [8.0, 16.0],
        Slope(),
        steps=2,
        compute=Compute(1.0, slow={1: 1.25}),
        network=Network(latency=0.125),
    )
    assert (paths.x[0], paths.x[1]) == ([a1, a2], [b1, b2])
    assert (a1, b1) == (11.5, 13.25)
    assert ends(run) == [(a2 + b2) / 2] * 2


def test_questions_are_a_period_apart():
    run, paths = watch(Gossip(help=False, period=2), [8.0, 0.0], steps=4, compute=Compute(1.0, slow={1: 1.5}))
    assert paths.x[0] == [8, (8 + 0) / 2, 4, (4 + paths.x[1][1]) / 2]
    asked = 2
    told = 2
    assert run.worker(0).meter.messages_sent == asked + told + 2  # that it is done; and the mean for worker 1


def test_who_is_asked_does_not_change_so_the_sum_is_not_conserved():
    _, paths = watch(Gossip(help=False), [8.0, 0.0], steps=1, compute=Compute(1.0, slow={1: 5.0}))
    assert (paths.x[0], paths.x[1]) == ([4.0], [(0 + 4) / 2])


@pytest.mark.slow
def test_where_workers_are_not_in_step_the_mean_moves_about_two_thirds_as_far():
    # Who asks made its last step 1 step ago, who is asked (1 + s^2) / 2, about half, if steps vary
    # by s: the renewal paradox. So x_j - x_i = -(1 - age) v on average, and x_i moves by
    # v = (1 + (1 - age) v) / 2, which is v = 1 / (1 + age): 2 / 3 for s = 0.
    def moved(compute):
        run = simulate(Gossip(help=False), Slope(), workers=8, steps=120, compute=compute)
        return -run.worker(0).x.item()

    for s in (0.3, 0.5):
        age = (1 + s * s) / 2
        assert moved(Compute(1.0, jitter=s)) == pytest.approx(120 / (1 + age), rel=0.03)
    assert moved(Compute(1.0)) == 120  # in step nothing is lost


@pytest.mark.parametrize("topology", ["complete", "ring", "exponential"])
def test_all_come_together(topology):
    places = [float(k * k) for k in range(8)]
    strategy = Gossip(help=False, topology=topology)
    _, paths = watch(strategy, places, steps=60, compute=Compute(1.0, jitter=0.3))
    assert max(paths.at(59)) - min(paths.at(59)) < 0.05


def test_a_worker_asks_its_neighbours_alone(tmp_path):
    class Questions(Instrument):
        def __init__(self):
            self.asked = set()

        def send(self, node, dst, m):
            if m.tag == "ask":
                self.asked.add((node.rank, dst))

    seen = Questions()
    lines = ["0 -> 1", "1 -> 2", "2 -> 0", "2 -> 1"]
    simulate(Gossip(topology=graph(tmp_path, lines)), Slope(), workers=3, steps=30, observers=[seen])
    assert seen.asked == {(0, 1), (1, 2), (2, 0), (2, 1)}


@pytest.mark.parametrize("slow", [{}, {0: 9.0}, {1: 0.1, 3: 7.0}, {0: 3.0, 1: 5.0, 2: 7.0}])
@pytest.mark.parametrize("latency", [0.0, 0.3, 4.0])
def test_it_never_deadlocks(slow, latency):
    run, paths = watch(
        Gossip(help=False),
        [64.0, 0.0, -8.0, 3.0, 1.0],
        steps=12,
        compute=Compute(1.0, jitter=0.4, slow=slow),
        network=Network(latency=latency),
    )
    assert all(len(paths.x[k]) == 12 for k in range(5))
    assert len(set(ends(run))) == 1


def test_nobody_waits_longer_than_a_round_trip():
    # worker 1 takes 100 s for a step, and answers all the same
    slow = {"compute": Compute(1.0, slow={1: 100.0}), "network": Network(latency=0.25)}
    run, _ = watch(Gossip(help=False), [0.0, 8.0], steps=3, **slow)
    # at the end it knows that worker 0 is done, so only the mean goes up and down
    assert run.seconds == 3 * 100 + 3 * 0.5 + 0.5
    assert run.worker(1).meter.waited_for[0] == pytest.approx(3 * 0.5 + 0.5)


def test_one_worker_is_single_bit_for_bit():
    options = {"steps": 20, "start": [0.3, 0.7, -0.2]}
    alone = simulate(Gossip(help=False), Drawn(lr=0.1, momentum=0.5), **options)
    serial = simulate(Single(), Drawn(lr=0.1, momentum=0.5), **options)
    assert torch.equal(alone.worker(0).x, serial.worker(0).x)


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match="period=0 must be at least 1"):
        Gossip(help=False, period=0)
    with pytest.raises(ValueError, match=r"Gossip sends models as they are, so FP16\(\) would do nothing"):
        simulate(Gossip(help=False), Slope(), workers=2, codec=FP16())
