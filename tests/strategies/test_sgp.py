"""Stochastic gradient push: worked out on paper, and its identities."""

import pytest
import torch
from central import Drawn
from gossiping import begin, ends, graph, watch

from shoal.engine.engine import Instrument
from shoal.sim import Compute, Faults, Network
from shoal.strategies import SGP, Local, Single
from shoal.testing.problems import Quadratic, Slope, simulate

RING = ["0 -> 1", "1 -> 2", "2 -> 3", "3 -> 4", "4 -> 0"]
DOWN = Slope(lr=0.125)
STAR = ["0 1", "0 2", "0 3"]  # worker 0 gives a quarter to each, the others give it half


class Lead(Instrument):
    """How many steps the first of two workers was ahead at most."""

    def __init__(self):
        self.steps = [0, 0]
        self.most = 0

    def step(self, node):
        self.steps[node.rank] = node.t
        self.most = max(self.most, self.steps[0] - self.steps[1])


def test_two_workers_by_hand():
    # step first, at z; then both keep half and give half: x = z, since the weights stay 1
    x = [8.0, 0.0]
    expected = []
    for _ in range(4):
        moved = [x[0] - 0.5 * (x[0] - 0), x[1] - 0.5 * (x[1] - 4)]
        x = [moved[0] / 2 + moved[1] / 2] * 2
        expected.append(x[0])
    _, paths = watch(SGP(), [8.0, 0.0], Quadratic(lr=0.5, targets=(0.0, 4.0)), steps=4)
    assert paths.x[0] == paths.x[1] == expected
    assert paths.of("weight", 3) == [1.0, 1.0]


def test_uneven_shares_by_hand(tmp_path):
    # the gradient is taken at z = x / w and moves x; all minima are at 0, lr is 1/2
    x, w, z = [16.0, 0.0, 32.0, -16.0], [1.0] * 4, [16.0, 0.0, 32.0, -16.0]
    xs, ws, zs = [], [], []
    for _ in range(3):
        x = [x[k] - 0.5 * z[k] for k in range(4)]
        x = [x[0] / 4 + x[1] / 2 + x[2] / 2 + x[3] / 2, *(x[k] / 2 + x[0] / 4 for k in (1, 2, 3))]
        w = [w[0] / 4 + w[1] / 2 + w[2] / 2 + w[3] / 2, *(w[k] / 2 + w[0] / 4 for k in (1, 2, 3))]
        z = [x[k] / w[k] for k in range(4)]
        xs, ws, zs = [*xs, x], [*ws, w], [*zs, z]
    start = [16.0, 0.0, 32.0, -16.0]
    _, paths = watch(SGP(topology=graph(tmp_path, STAR)), start, Quadratic(lr=0.5), steps=3)
    assert [paths.of("biased", t) for t in range(3)] == xs
    assert [paths.of("weight", t) for t in range(3)] == ws
    assert [paths.at(t) for t in range(3)] == zs
    assert ws[0] == [7 / 4, 3 / 4, 3 / 4, 3 / 4]


def test_the_solution_is_the_sum_of_models_over_the_sum_of_weights(tmp_path):
    # one step of mixing alone: the weights are 7/4 and 3/4, so the mean of z is not that of the models
    start = [16.0, 0.0, 32.0, -16.0]
    run, paths = watch(SGP(topology=graph(tmp_path, STAR)), start, Quadratic(lr=0.0), steps=1)
    assert ends(run) == [8.0] * 4
    assert sum(paths.at(0)) / 4 != 8.0


@pytest.mark.parametrize("overlap", [0, 1, 3])
@pytest.mark.parametrize("topology", ["star", "one_peer", "exponential", "ring"])
def test_mixing_alone_conserves_the_sums_of_models_and_of_weights(topology, overlap, tmp_path):
    # exactly where shares are 1/2 and 1/4, to rounding where they are thirds; at the end nothing is under way
    word = graph(tmp_path, STAR) if topology == "star" else topology
    places = [64.0, -1.0, 3.0, 10.0]
    rough = {"compute": Compute(1.0, jitter=0.5), "network": Network(latency=0.75)}
    run, _ = watch(SGP(topology=word, overlap=overlap), places, steps=7, **rough)
    sums = [
        sum(run.worker(k).variables.state()[name].item() for k in range(4)) for name in ("biased", "weight")
    ]
    exact = topology in ("star", "one_peer")
    # `biased` is what it was before all took the mean of z
    assert sums == ([76.0, 4.0] if exact else pytest.approx([76.0, 4.0], rel=1e-14))


@pytest.mark.parametrize("power", [1, 2, 3, 4])
def test_one_peer_exponential_reaches_the_exact_mean_after_log_n_steps(power):
    places = [float(k * k) for k in range(2**power)]
    _, paths = watch(SGP(topology="one_peer"), places, steps=power)
    assert paths.at(power - 1) == [sum(places) / len(places)] * len(places)
    assert power == 1 or paths.at(power - 2) != paths.at(power - 1)


def test_on_an_irregular_graph_z_tends_to_the_mean_and_the_model_alone_does_not(tmp_path):
    lines = ["0 -> 1", "0 -> 2", "0 -> 3", "1 -> 2", "2 -> 3", "3 -> 0", "3 -> 1"]
    places = [64.0, -1.0, 3.0, 10.0]
    _, paths = watch(SGP(topology=graph(tmp_path, lines)), places, steps=120)
    assert paths.at(119) == pytest.approx([19.0] * 4, rel=1e-12)
    biased = paths.of("biased", 119)
    assert biased == pytest.approx([19.0 * w for w in paths.of("weight", 119)], rel=1e-12)
    assert max(abs(x - 19.0) for x in biased) > 5  # the same uneven shares without weights would end there


@pytest.mark.parametrize("topology", ["one_peer", "exponential", "ring", "torus", "hypercube", "complete"])
def test_on_a_regular_graph_the_weight_stays_one(topology):
    _, paths = watch(SGP(topology=topology), [float(k) for k in range(8)], steps=20)
    for t in range(20):
        assert paths.of("weight", t) == pytest.approx([1.0] * 8, rel=1e-14)


@pytest.mark.parametrize("workers", [2, 4])
def test_the_complete_graph_is_model_averaging_at_every_step(workers):
    problem = Quadratic(lr=0.5, momentum=0.5, targets=(0.0, 4.0, 5.0, -3.0))
    options = {"workers": workers, "steps": 9, "start": [8.0]}
    averaged = simulate(Local(period=1, reset_momentum=False), problem, **options)
    assert torch.equal(simulate(SGP("complete"), problem, **options).worker(0).x, averaged.worker(0).x)


def test_so_it_is_to_the_last_bit_of_rounding_for_any_number_and_any_gradients():
    options = {"workers": 3, "steps": 20, "start": [0.9, -0.4, 0.2]}
    averaged = simulate(Local(period=1, reset_momentum=False), Drawn(lr=0.1, momentum=0.5), **options)
    mixed = simulate(SGP("complete"), Drawn(lr=0.1, momentum=0.5), **options)
    torch.testing.assert_close(mixed.worker(0).x, averaged.worker(0).x, rtol=0, atol=2e-15)


@pytest.mark.parametrize("overlap", [0, 2])
def test_one_worker_is_single_bit_for_bit(overlap):
    options = {"steps": 20, "start": [0.3, 0.7, -0.2]}
    alone = simulate(SGP(overlap=overlap), Drawn(lr=0.1, momentum=0.5), **options)
    serial = simulate(Single(), Drawn(lr=0.1, momentum=0.5), **options)
    assert torch.equal(alone.worker(0).x, serial.worker(0).x)


LATE = {"compute": Compute(1.0), "network": Network(latency=0.75)}


def test_shares_may_be_a_step_late_by_hand():
    # a share takes 3/4 s, a step 1 s: what is given after one step is taken in after the next
    x, w = [0.0, 8.0], [1.0, 1.0]
    under_way = [(0.0, 0.0), (0.0, 0.0)]  # to each of them
    xs, zs = [], []
    for _ in range(4):
        given = [(x[1] / 2, w[1] / 2), (x[0] / 2, w[0] / 2)]
        x = [x[k] / 2 + under_way[k][0] for k in (0, 1)]
        w = [w[k] / 2 + under_way[k][1] for k in (0, 1)]
        under_way = given
        xs, zs = [*xs, x], [*zs, [x[k] / w[k] for k in (0, 1)]]
    run, paths = watch(SGP(overlap=1), [0.0, 8.0], steps=4, **LATE)
    assert [paths.of("biased", t) for t in range(4)] == xs
    assert [paths.at(t) for t in range(4)] == zs
    assert zs[:2] == [[0.0, 8.0], [4 / 0.75, 2 / 0.75]]
    assert ends(run)[0] == pytest.approx(4.0, abs=0.1)


def test_with_overlap_a_step_takes_as_long_as_its_gradient():
    # and then three trips: the word that all are done, the sum, the mean
    assert watch(SGP(overlap=1), [0.0, 8.0], steps=4, **LATE)[0].seconds == 4 * 1.0 + 3 * 0.75
    assert watch(SGP(overlap=0), [0.0, 8.0], steps=4, **LATE)[0].seconds == 4 * 1.75 + 3 * 0.75


def test_a_share_that_is_there_is_taken_in_at_once_whatever_may_be_late():
    # worker 1 is twice as fast: its first share is there when worker 0 has done its first step, at 1 s;
    # so is its second, but that is of a round which worker 0 has not come to
    _, paths = watch(SGP(overlap=3), [0.0, 8.0], steps=3, compute=Compute(1.0, slow={1: 0.5}))
    assert paths.kept[0][0] == {"biased": 0 / 2 + 8 / 2, "weight": 1 / 2 + 1 / 2, "issue": 0}
    # worker 1 has given three times and heard nothing by then; after its third step worker 0's first is there
    assert paths.kept[1][0] == {"biased": 8 / 2, "weight": 1 / 2, "issue": 0}
    assert paths.kept[1][2] == {"biased": 8 / 8 + 0 / 2, "weight": 1 / 8 + 1 / 2, "issue": 0}


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_nobody_is_further_ahead_of_whom_it_hears_from_than_the_overlap_allows(overlap):
    lead = Lead()
    simulate(
        SGP(overlap=overlap),
        Quadratic(lr=0.1),
        workers=2,
        steps=9,
        compute=Compute(1.0, slow={1: 5.0}),
        observers=[lead],
    )
    assert lead.most == overlap


def test_the_share_of_a_worker_that_has_gone_stays(tmp_path):
    # worker 1 dies in its second step; worker 0 keeps all it has from when it knows, and z stays an average
    faults = Faults(noticed_after=0.0).crash(rank=1, step=1)
    run, paths = watch(SGP(), [0.0, 8.0], steps=4, compute=Compute(1.0), faults=faults)
    assert paths.x[0] == [4.0] * 4
    assert run.worker(0).x.item() == 4.0


def test_in_a_one_way_ring_that_is_broken_all_keep_their_weight(tmp_path):
    # without worker 4 nothing that 0, 1 and 2 give comes back: one hears it of the other, in as many rounds
    faults = Faults(noticed_after=0.1).crash(rank=4, step=3)
    run, paths = watch(
        SGP(topology=graph(tmp_path, RING)), [0.0] * 5, DOWN, steps=80, faults=faults, compute=Compute(1.0)
    )
    assert [paths.kept[k][t]["weight"] for k in range(4) for t in (20, 79)] == [1.0] * 8
    assert [run.worker(k).x.item() for k in range(4)] == pytest.approx([-10.0] * 4, abs=0.25)


def test_in_a_one_way_ring_that_is_whole_again_all_give_to_all_again(tmp_path):
    # worker 4 is away shortly; a ring in which one edge carries nothing would leave the others where they are
    faults = Faults(noticed_after=0.1, restart_after=1.0).kill(4, 1.5)
    places = [0.0, 8.0, 16.0, 24.0, 32.0]
    _, paths = watch(
        SGP(topology=graph(tmp_path, RING)), places, steps=60, faults=faults, compute=Compute(1.0)
    )
    lasts = [paths.x[k][-2] for k in range(5)]  # after the last step all have the mean
    assert max(lasts) - min(lasts) < 0.01
    assert [paths.kept[k][-1]["weight"] for k in range(5)] == pytest.approx([1.0] * 5, abs=1e-4)


@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_steps_are_as_long_as_the_learning_rate_says_after_a_death(overlap):
    # one of four dies in its sixth step, with shares to and from it under way: 80 steps of 1/8 all the same
    late = {"compute": Compute(1.0), "network": Network(latency=overlap + 0.5)}
    faults = Faults(noticed_after=0.1).kill(3, 5.5)
    run, _ = watch(SGP("complete", overlap), [0.0] * 4, DOWN, steps=80, faults=faults, **late)
    assert run.worker(0).x.item() == pytest.approx(-10.0, abs=0.125 * (1 + overlap))


def test_two_that_have_more_to_do_than_the_others_keep_their_weight():
    # 0 gives to 1, and no way leads back once 2 and 3 are done
    run, paths = begin(SGP(), [0.0] * 4, DOWN, steps=80, compute=Compute(1.0, jitter=0.2))
    for node in run.nodes[2:]:
        node.work.last_step = 20
    run.run()
    assert min(run.worker(k).variables.state()["weight"].item() for k in (0, 1)) > 0.1
    assert [paths.x[k][-1] for k in (0, 1)] == pytest.approx([-10.0] * 2, abs=0.25)


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match="overlap=-1 must be at least 0"):
        SGP(overlap=-1)
    with pytest.raises(ValueError, match=r"unknown topology 'onepeer'. Did you mean 'one_peer'"):
        SGP(topology="onepeer")
