"""D-PSGD: worked out on paper, and its identities."""

from collections import defaultdict

import pytest
import torch
from central import Drawn
from gossiping import ends, graph, watch

from shoal.codecs import FP16
from shoal.engine.engine import Instrument
from shoal.sim import Compute, Faults, Network
from shoal.strategies import DPSGD, Local, Single
from shoal.testing.problems import Quadratic, simulate


class Clock(Instrument):
    """When each worker has done each step."""

    def __init__(self):
        self.at = defaultdict(lambda: [0.0] * 6)

    def step(self, node):
        self.at[node.t - 1][node.rank] = node.transport.now()


def test_two_workers_by_hand():
    # targets 0 and 4, lr 1/2; the gradient is taken where the worker stood before it mixed
    x0, x1 = [8.0], [0.0]
    for t in range(4):
        middle = (x0[t] + x1[t]) / 2
        x0.append(middle - 0.5 * (x0[t] - 0))
        x1.append(middle - 0.5 * (x1[t] - 4))
    run, paths = watch(DPSGD(), [8.0, 0.0], Quadratic(lr=0.5, targets=(0.0, 4.0)), steps=4)
    assert (paths.x[0], paths.x[1]) == (x0[1:], x1[1:])
    assert (x0[1], x1[1]) == (0.0, 6.0)
    assert ends(run) == [(x0[4] + x1[4]) / 2] * 2


def test_without_overlap_neighbours_mix_what_the_step_made_of_their_models_by_hand():
    # the gradient is taken first, so both stand in the middle after every step
    x = (8.0, 0.0)
    expected = []
    for _ in range(4):
        moved = (x[0] - 0.5 * (x[0] - 0), x[1] - 0.5 * (x[1] - 4))
        x = (sum(moved) / 2,) * 2
        expected.append(x[0])
    _, paths = watch(DPSGD(overlap=False), [8.0, 0.0], Quadratic(lr=0.5, targets=(0.0, 4.0)), steps=4)
    assert paths.x[0] == paths.x[1] == expected


def test_a_star_mixes_by_its_degrees_by_hand(tmp_path):
    # the middle takes 1/4 of each, the others 1/4 of the middle and 3/4 of themselves
    x = [16.0, 0.0, 32.0, -16.0]
    expected = []
    for _ in range(3):
        middle = x[0] / 4 + (x[1] + x[2] + x[3]) / 4
        x = [middle, *(x[0] / 4 + 3 * x[k] / 4 for k in (1, 2, 3))]
        expected.append(x)
    star = DPSGD(topology=graph(tmp_path, ["0 1", "0 2", "0 3"]))
    _, paths = watch(star, [16.0, 0.0, 32.0, -16.0], steps=3)
    assert [paths.at(t) for t in range(3)] == expected
    assert expected[0] == [8.0, 4.0, 28.0, -8.0]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("topology", ["star", "complete", "random"])
def test_mixing_alone_conserves_the_sum_exactly(topology, overlap, tmp_path):
    word = graph(tmp_path, ["0 1", "0 2", "0 3"]) if topology == "star" else topology
    rough = {"compute": Compute(1.0, jitter=0.5), "network": Network(latency=0.25)}
    _, paths = watch(DPSGD(topology=word, overlap=overlap), [64.0, -1.0, 3.0, 10.0], steps=8, **rough)
    assert [sum(paths.at(t)) for t in range(8)] == [76.0] * 8


@pytest.mark.parametrize("topology", ["ring", "torus", "hypercube", "complete", "random"])
def test_mixing_alone_brings_all_to_the_mean(topology):
    places = [float(k * k) for k in range(8)]
    _, paths = watch(DPSGD(topology=topology), places, steps=60)
    assert paths.at(59) == pytest.approx([sum(places) / 8] * 8, rel=1e-4)


@pytest.mark.parametrize("workers", [2, 4])
def test_the_complete_graph_without_overlap_is_model_averaging_at_every_step(workers):
    # shares of 1/2 and 1/4 are exact, so both round alike on quadratics with whole targets
    problem = Quadratic(lr=0.5, momentum=0.5, targets=(0.0, 4.0, 5.0, -3.0))
    options = {"workers": workers, "steps": 9, "start": [8.0]}
    averaged = simulate(Local(period=1, reset_momentum=False), problem, **options)
    mixed = simulate(DPSGD(topology="complete", overlap=False), problem, **options)
    assert torch.equal(mixed.worker(0).x, averaged.worker(0).x)


def test_so_it_is_to_the_last_bit_of_rounding_for_any_number_and_any_gradients():
    options = {"workers": 3, "steps": 20, "start": [0.9, -0.4, 0.2]}
    averaged = simulate(Local(period=1, reset_momentum=False), Drawn(lr=0.1, momentum=0.5), **options)
    mixed = simulate(DPSGD(topology="complete", overlap=False), Drawn(lr=0.1, momentum=0.5), **options)
    torch.testing.assert_close(mixed.worker(0).x, averaged.worker(0).x, rtol=0, atol=2e-15)


@pytest.mark.parametrize("overlap", [True, False])
def test_one_worker_is_single_bit_for_bit(overlap):
    options = {"steps": 20, "start": [0.3, 0.7, -0.2]}
    alone = simulate(DPSGD(overlap=overlap), Drawn(lr=0.1, momentum=0.5), **options)
    serial = simulate(Single(), Drawn(lr=0.1, momentum=0.5), **options)
    assert torch.equal(alone.worker(0).x, serial.worker(0).x)


def test_models_travel_while_gradients_are_computed():
    slow = {"compute": Compute(1.0), "network": Network(latency=0.75)}
    _, paths = watch(DPSGD(), [0.0, 8.0], steps=4, **slow)
    assert paths.x[0][0] == 4.0
    # the end is three trips more: the word that all are done, sums up the tree, the mean down
    assert watch(DPSGD(), [0.0, 8.0], steps=4, **slow)[0].seconds == 4 * 1.0 + 3 * 0.75
    assert watch(DPSGD(overlap=False), [0.0, 8.0], steps=4, **slow)[0].seconds == 4 * 1.75 + 3 * 0.75


def test_a_delay_spreads_by_one_neighbour_a_step():
    # a ring of six; worker 2 is held up for 5 s in its first step, whose model it had given away before
    clock = Clock()
    simulate(
        DPSGD(),
        Quadratic(),
        workers=6,
        steps=4,
        compute=Compute(1.0),
        faults=Faults().pause(rank=2, step=0, seconds=5.0),
        observers=[clock],
    )
    assert clock.at[0] == [1.0, 1.0, 6.0, 1.0, 1.0, 1.0]
    assert clock.at[1] == [2.0, 6.0, 7.0, 6.0, 2.0, 2.0]
    assert clock.at[2] == [6.0, 7.0, 8.0, 7.0, 6.0, 3.0]


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match="'one_peer' has edges that lead one way only"):
        DPSGD(topology="one_peer")
    with pytest.raises(ValueError, match=r"a hypercube has 2, 4, 8, ... workers, not 3"):
        simulate(DPSGD(topology="hypercube"), Quadratic(), workers=3)
    with pytest.raises(
        ValueError, match=r"DPSGD sends models as they are, so FP16\(\) would do nothing; take 'choco'"
    ):
        simulate(DPSGD(), Quadratic(), workers=2, codec=FP16())
