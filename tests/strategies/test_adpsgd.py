"""AD-PSGD: worked out on paper, and its identities."""

import pytest
import torch
from central import Drawn
from gossiping import begin, ends, graph, watch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine.engine import Instrument
from shoal.sim import Compute, Faults, Network
from shoal.strategies import ADPSGD, Single
from shoal.testing.problems import Quadratic, Slope, simulate
from shoal.vocabulary.node import Node, NoMoreSteps

SLOWER = {"compute": Compute(1.0, slow={1: 1.25}), "network": Network(latency=0.125)}


def test_two_workers_at_their_own_pace_by_hand():
    # Worker 1 asks when it begins a step, and worker 0, which computes, answers 1/8 s later. Gradients are 1
    # and 2 everywhere and take 1 and 1.25 s.
    public0 = (0 + 8) / 2  # 0.125 s
    x0 = public0 - 1  # 1.000 s
    x1 = (8 + 0) / 2 - 2  # 1.250 s
    public0 = (x0 + x1) / 2  # 1.375 s
    x1_next = (x1 + x0) / 2 - 2  # 2.500 s
    x0_next = public0 - 1  # 2.000 s
    run, paths = watch(ADPSGD(help=False), [0.0, 8.0], Slope(gradients=(1.0, 2.0)), steps=2, **SLOWER)
    assert paths.x == {0: [x0, x0_next], 1: [x1, x1_next]}
    assert (x0_next, x1_next) == (1.5, 0.5)
    assert ends(run) == [(0 + 8 - 2 * 1 - 2 * 2) / 2] * 2


def test_a_gradient_is_taken_at_the_model_as_it_was_by_hand():
    # minima at 0 and 4, lr 1/2: worker 0 computes at 8 while its model becomes (8 + 0) / 2
    x0 = (8 + 0) / 2 - 0.5 * (8 - 0)
    x1 = (0 + 8) / 2 - 0.5 * (0 - 4)
    _, paths = watch(ADPSGD(help=False), [8.0, 0.0], Quadratic(lr=0.5, targets=(0.0, 4.0)), **SLOWER)
    assert paths.x == {0: [x0], 1: [x1]} == {0: [0.0], 1: [6.0]}


def test_who_has_no_step_left_still_answers_by_hand():
    # worker 1 takes 10 s for a step, worker 0 one: it is done at 2 s, and is asked at 10 s
    run, paths = watch(ADPSGD(help=False), [0.0, 8.0], steps=2, compute=Compute(1.0, slow={1: 10.0}))
    assert paths.x == {0: [4.0, 4.0], 1: [4.0, 4.0]}
    assert ends(run) == [4.0, 4.0]
    assert run.seconds == 20.0


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    workers=st.integers(2, 7),
    slow=st.dictionaries(st.integers(0, 6), st.sampled_from([0.1, 0.5, 3.0, 17.0]), max_size=4),
    jitter=st.sampled_from([0.0, 0.5]),
    latency=st.sampled_from([0.0, 0.01, 0.4, 5.0]),
    mean=st.sampled_from([0.0, 1.0]),
    topology=st.sampled_from(["complete", "ring", "random"]),
    seed=st.integers(0, 99),
)
def test_it_never_deadlocks_and_mixing_alone_conserves_the_sum_exactly(
    workers, slow, jitter, latency, mean, topology, seed
):
    places = [float(16 * k * k - 40) for k in range(workers)]
    run, paths = watch(
        ADPSGD(help=False, topology=topology),
        places,
        steps=5,
        compute=Compute(mean, jitter, {k: v for k, v in slow.items() if k < workers}),
        network=Network(latency=latency),
        seed=seed,
    )
    assert all(len(paths.x[k]) == 5 for k in range(workers))
    assert ends(run) == [pytest.approx(sum(places) / workers, rel=1e-15, abs=1e-12)] * workers


def test_nobody_waits_for_a_slow_one():
    class Clock(Instrument):
        def __init__(self):
            self.done_at = {}

        def step(self, node):
            self.done_at[node.rank] = node.transport.now()

    for slowest in (2, 3):  # one that answers, one that asks
        clock = Clock()
        compute, network = Compute(1.0, slow={slowest: 50.0}), Network(latency=0.25)
        options = {"compute": compute, "network": network, "observers": [clock]}
        simulate(ADPSGD(help=False), Slope(), workers=4, steps=4, **options)
        assert clock.done_at == {k: 4.0 * (50 if k == slowest else 1) for k in range(4)}


@pytest.mark.slow
def test_all_come_together():
    places = [float(k * k) for k in range(8)]
    for topology in ("complete", "ring"):
        strategy = ADPSGD(help=False, topology=topology)
        _, paths = watch(strategy, places, steps=80, compute=Compute(1.0, jitter=0.3))
        assert paths.at(79) == pytest.approx([sum(places) / 8] * 8, abs=0.5)


def test_only_odd_ranks_ask_and_only_even_ones_are_asked(tmp_path):
    class Questions(Instrument):
        def __init__(self):
            self.asked = set()

        def send(self, node, dst, m):
            if m.tag == "swap":
                self.asked.add((node.rank, dst))

    seen = Questions()
    lines = ["0 1", "1 2", "2 3", "3 0", "0 2", "1 3"]
    simulate(ADPSGD(topology=graph(tmp_path, lines)), Slope(), workers=4, steps=30, observers=[seen])
    assert seen.asked == {(1, 0), (1, 2), (3, 0), (3, 2)}


@pytest.mark.parametrize("victim", [0, 1])
def test_the_other_goes_on_alone_when_one_dies(victim):
    faults = Faults().crash(rank=victim, step=2)
    run, paths = watch(ADPSGD(help=False), [0.0, 8.0], Slope(), steps=6, compute=Compute(1.0), faults=faults)
    assert len(paths.x[1 - victim]) == 6
    assert run.finished == [1 - victim]


def test_an_exchange_under_way_is_completed_when_the_loop_ends():
    # as in a loop of one's own, which ends when nobody could have known; no half of the sum is lost
    network = Network(latency=0.25)
    run, paths = begin(ADPSGD(help=False), [0.0, 8.0], steps=3, compute=Compute(1.0), network=network)
    node = run.worker(1)
    gradient = node.replica.gradient

    async def until_the_end():
        if node.t == 2:
            raise NoMoreSteps
        return await gradient()

    node.replica.gradient = until_the_end
    assert ends(run.run()) == [4.0, 4.0]
    assert len(paths.x[1]) == 2


def test_one_worker_is_single_bit_for_bit():
    options = {"steps": 20, "start": [0.3, 0.7, -0.2]}
    alone = simulate(ADPSGD(help=False), Drawn(lr=0.1, momentum=0.5), **options)
    serial = simulate(Single(), Drawn(lr=0.1, momentum=0.5), **options)
    assert torch.equal(alone.worker(0).x, serial.worker(0).x)


def test_the_solution_is_what_others_have_made_of_the_model():
    run, _ = watch(ADPSGD(help=False), [0.0, 8.0], steps=1, compute=Compute(1.0))
    assert run.strategy.solution(Node(run.worker(0))).item() == run.worker(0).x.item() == 4.0


def test_a_graph_that_falls_apart_into_pairs_is_refused():
    with pytest.raises(
        ValueError, match="'hypercube' of 8 workers falls apart if only edges between odd and even"
    ):
        simulate(ADPSGD(help=False, topology="hypercube"), Slope(), workers=8)
    simulate(ADPSGD(help=False, topology="hypercube"), Slope(), workers=2)
    with pytest.raises(ValueError, match="one way only"):
        ADPSGD(help=False, topology="one_peer")
