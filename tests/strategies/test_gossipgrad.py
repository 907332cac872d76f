"""GossipGraD: worked out on paper, and its identities."""

import pytest
import torch
from central import Drawn
from gossiping import watch

from shoal.sim import Compute, Network
from shoal.strategies import GossipGraD, Local, Single
from shoal.testing.problems import Quadratic, Slope, simulate

IN_ORDER = {"shuffle": False}


def test_four_workers_by_hand():
    # a step, then the mean with the one before, in the next step with the one two places before
    x, targets, expected = [8.0, 0.0, 4.0, -8.0], (0.0, 4.0, 8.0, 2.0), []
    for hop in (1, 2, 1, 2):
        x = [x[k] - 0.5 * (x[k] - targets[k]) for k in range(4)]
        x = [(x[k] + x[k - hop]) / 2 for k in range(4)]
        expected.append(x)
    problem = Quadratic(lr=0.5, targets=targets)
    _, paths = watch(GossipGraD(**IN_ORDER), [8.0, 0.0, 4.0, -8.0], problem, steps=4)
    assert [paths.at(t) for t in range(4)] == expected
    assert expected[0] == [(4 - 3) / 2, (2 + 4) / 2, (6 + 2) / 2, (-3 + 6) / 2]


def test_the_hypercube_by_hand():
    # 0-1 and 2-3, then 0-2 and 1-3
    x, expected = [8.0, 0.0, 4.0, -8.0], []
    for hop in (1, 2, 1):
        x = [x[k] - 0.5 * x[k] for k in range(4)]
        x = [(x[k] + x[k ^ hop]) / 2 for k in range(4)]
        expected.append(x)
    gossip = GossipGraD(partners="hypercube", **IN_ORDER)
    _, paths = watch(gossip, [8.0, 0.0, 4.0, -8.0], Quadratic(lr=0.5), steps=3)
    assert [paths.at(t) for t in range(3)] == expected


def test_the_mean_of_gradients_by_hand():
    # in the first step worker k hears from k - 1, in the second from k - 2: with two workers from itself
    slope = Slope(lr=0.5, gradients=(1.0, 3.0, 5.0, 11.0))
    g, x, expected = (1.0, 3.0, 5.0, 11.0), [0.0, 8.0, 0.0, 0.0], []
    for hop in (1, 2):
        x = [x[k] - 0.5 * (g[k] + g[k - hop]) / 2 for k in range(4)]
        expected.append(x)
    _, paths = watch(GossipGraD(mode="grad", **IN_ORDER), [0.0, 8.0, 0.0, 0.0], slope, steps=2)
    assert [paths.at(t) for t in range(2)] == expected


def test_with_gradients_alone_the_models_never_meet():
    _, paths = watch(GossipGraD(mode="grad"), [0.0, 8.0], Slope(gradients=(1.0, 3.0)), steps=6)
    assert [b - a for a, b in zip(paths.x[0], paths.x[1], strict=True)] == [8.0] * 6


@pytest.mark.parametrize("partners", ["dissemination", "hypercube"])
@pytest.mark.parametrize("power", [1, 2, 3, 4])
def test_after_log_n_steps_all_hold_the_exact_mean(power, partners):
    places = [float(k * k) for k in range(2**power)]
    _, paths = watch(GossipGraD(partners=partners), places, steps=power)
    assert paths.at(power - 1) == [sum(places) / len(places)] * len(places)


@pytest.mark.parametrize("partners", ["dissemination", "hypercube"])
@pytest.mark.parametrize("workers", [2, 3, 4, 6, 7])
def test_mixing_alone_conserves_the_sum_exactly(workers, partners):
    places = [float(3 * k * k - 7) for k in range(workers)]
    rough = {"compute": Compute(1.0, jitter=0.5), "network": Network(latency=0.25)}
    _, paths = watch(GossipGraD(partners=partners), places, steps=9, **rough)
    assert [sum(paths.at(t)) for t in range(9)] == [sum(places)] * 9


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("partners", ["dissemination", "hypercube"])
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_all_agree_on_who_sends_to_whom(workers, partners, shuffle):
    gossip = GossipGraD(partners=partners, shuffle=shuffle)
    for t in range(20):
        pairs = [gossip.partners_of(k, workers, t) for k in range(workers)]
        sent = {(k, to) for k, (out, _) in enumerate(pairs) for to in out}
        heard = {(source, k) for k, (_, into) in enumerate(pairs) for source in into}
        assert sent == heard
        assert all(a != b for a, b in sent)
        assert all(len(out) <= 1 and len(into) <= 1 for out, into in pairs)
        if partners == "dissemination" and workers > 1:
            assert len(sent) == workers


def test_places_are_dealt_out_anew_after_every_period():
    def partners(gossip, t):
        return [gossip.partners_of(k, 8, t)[0][0] for k in range(8)]

    gossip = GossipGraD()
    blocks = [[partners(gossip, 3 * block + p) for p in range(3)] for block in range(5)]
    assert len({str(block) for block in blocks}) == 5
    assert [partners(GossipGraD(seed=1), t) for t in range(3)] != blocks[0]
    assert [partners(GossipGraD(shuffle=False), t) for t in (0, 3)] == [[1, 2, 3, 4, 5, 6, 7, 0]] * 2


def test_two_workers_are_model_averaging_at_every_step():
    problem, options = (
        Quadratic(lr=0.5, momentum=0.5, targets=(0.0, 4.0)),
        {"workers": 2, "steps": 9, "start": [8.0]},
    )
    averaged = simulate(Local(period=1, reset_momentum=False), problem, **options)
    assert torch.equal(simulate(GossipGraD(), problem, **options).worker(0).x, averaged.worker(0).x)


@pytest.mark.parametrize("mode", ["model", "grad"])
@pytest.mark.parametrize("partners", ["dissemination", "hypercube"])
def test_one_worker_is_single_bit_for_bit(partners, mode):
    options = {"steps": 20, "start": [0.3, 0.7, -0.2]}
    alone = simulate(GossipGraD(partners, mode), Drawn(lr=0.1, momentum=0.5), **options)
    serial = simulate(Single(), Drawn(lr=0.1, momentum=0.5), **options)
    assert torch.equal(alone.worker(0).x, serial.worker(0).x)


def test_a_worker_sends_one_model_a_step_however_many_they_are():
    run, _ = watch(GossipGraD(), [0.0] * 8, steps=30)
    ending = 7 + 3  # the word to each other worker that it is done; three models for the mean at most
    assert all(30 < run.worker(k).meter.messages_sent <= 30 + ending for k in range(8))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"partners": "ring"}, "partners='ring' must be one of dissemination, hypercube"),
        ({"mode": "models"}, "mode='models' must be one of model, grad"),
    ],
)
def test_options_that_cannot_work_are_refused(options, told):
    with pytest.raises(ValueError, match=told):
        GossipGraD(**options)
