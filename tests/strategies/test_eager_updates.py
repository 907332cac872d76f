"""Eager updates of Streaming DiLoCo: worked out on paper, and their identities."""

import pytest
import torch
from blockwise import Bowls

from shoal.codecs import OneBit
from shoal.engine.engine import Instrument
from shoal.sim import Compute, Network
from shoal.strategies import DiLoCo, StreamingDiLoCo
from shoal.testing.problems import Slope, simulate

SLOPES = Slope(lr=0.5, gradients=(1.0, 3.0))  # two steps displace worker 0 by 1, worker 1 by 3


class Seen(Instrument):
    """Where every worker stands after each step."""

    def __init__(self):
        self.x = {}

    def step(self, node):
        self.x.setdefault(node.rank, []).append(node.x.tolist())


def eager(period=2, fragments=1, rate=0.5, momentum=0.0, **options):
    return StreamingDiLoCo(period, fragments, rate=rate, momentum=momentum, eager=True, **options)


def trained(strategy, problem, workers=2, steps=4, start=(0.0,), **options):
    seen = Seen()
    run = simulate(strategy, problem, workers=workers, steps=steps, start=start, observers=[seen], **options)
    assert all(torch.equal(node.x, run.nodes[0].x) for node in run.nodes)
    return run.worker(0).x, seen.x


def test_two_rounds_by_hand():
    # Round 1 has nothing of others yet:   d_k / 2 = 1/2 and 3/2, so -1/4 and -3/4
    # Round 2: D(1) = 2, d_k as before:    2 + 0, so -1/4 - 1 and -3/4 - 1
    # The end: D(2) = 2 less d_k / 2, which is counted already: 3/2 and 1/2 more, so both at -2
    x, seen = trained(eager(), SLOPES)
    assert [seen[0][k] for k in (1, 3)] == [[-0.25], [-1.25]]
    assert [seen[1][k] for k in (1, 3)] == [[-0.75], [-1.75]]
    assert x.tolist() == [-2.0]


def test_two_rounds_by_hand_with_momentum():
    # v = 1/2, W = -1/2 (1/2 + 1/4) = -0.375; then v = 1/4 + 2 = 2.25, W = -0.375 - 1/2 (2 + 1.125) = -1.9375
    # v = 3/2, W = -1/2 (3/2 + 3/4) = -1.125; then v = 3/4 + 2 = 2.75, W = -1.125 - 1/2 (2 + 1.375) = -2.8125
    # the end, as if it had come in time: -1/2 (1 + 1/2) of 3/2 and 1/2, so -3.0625 and -3.1875; their mean
    x, seen = trained(eager(momentum=0.5), SLOPES)
    assert (seen[0][3], seen[1][3]) == ([-1.9375], [-2.8125])
    assert x.tolist() == [(-3.0625 - 3.1875) / 2]


@pytest.mark.parametrize("steps", range(1, 12))
@pytest.mark.parametrize("fragments", [1, 2])
def test_without_momentum_every_step_counts_once(fragments, steps):
    # whatever is under way, all end where averages of every displacement at rate 1/2 would bring them
    x, _ = trained(eager(4, fragments), SLOPES, steps=steps, start=[0.0] * 2)
    assert x.tolist() == pytest.approx([-0.5 * 0.5 * steps * (1 + 3) / 2] * 2, abs=1e-12)


@pytest.mark.parametrize("steps", [6, 7, 8])
def test_one_worker_is_diloco(steps):
    problem, options = Bowls(lr=0.25), {"workers": 1, "steps": steps, "start": [8.0, 1.0]}
    expected = simulate(DiLoCo(2, 0.7, 0.9), problem, **options).worker(0).x
    x, _ = trained(eager(rate=0.7, momentum=0.9), problem, **options)
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-12)


def test_the_mean_of_all_models_follows_the_last_round_and_an_nth_of_this_one():
    problem, workers = Bowls(lr=0.25, curvatures=(1.0, 0.5, 0.75), targets=(0.0, 4.0, -3.0)), 3
    _, seen = trained(eager(rate=0.5), problem, workers, steps=12, start=[8.0])
    places, before = [8.0] * workers, 0.0
    for t in range(1, 12, 2):
        ends = [
            (1 - 0.25 * c) ** 2 * (x - a) + a
            for x, c, a in zip(places, problem.curvatures, problem.targets, strict=True)
        ]
        mean = sum(x - end for x, end in zip(places, ends, strict=True)) / workers
        expected = sum(places) / workers - 0.5 * (mean / workers + (1 - 1 / workers) * before)
        places, before = [seen[k][t][0] for k in range(workers)], mean
        assert sum(places) / workers == pytest.approx(expected, abs=1e-12)


def test_the_warm_up_averages_every_step():
    _, seen = trained(eager(warmup=2), SLOPES)
    assert [seen[k][1] for k in (0, 1)] == [[-2.0], [-2.0]]


def test_an_exchange_may_take_a_whole_period_and_costs_time_at_the_end_alone():
    # an average takes two trips of 3 s; a round of eight steps takes 8 s
    options = {"workers": 2, "steps": 32, "compute": Compute(1.0), "network": Network(latency=3.0)}
    waits = simulate(DiLoCo(8), Slope(), **options).seconds
    hides = simulate(eager(8), Slope(), **options).seconds
    assert waits == pytest.approx(32 + 4 * 6)
    assert hides < 32 + 20


def test_the_last_exchange_of_a_fragment_is_in_the_codec_s_stream_of_it():
    # after ten steps of turns of two, what was done since the last turn of a fragment is exchanged at the end
    run = simulate(eager(4, 2), SLOPES, workers=2, steps=10, start=[0.0] * 2, codec=OneBit())
    assert {key.rpartition(" ")[0] for key in run.worker(0).coding.state()} == {"fragment 0", "fragment 1"}


def test_overlap_and_mixing_are_refused():
    with pytest.raises(ValueError, match="leave out overlap and mixing"):
        StreamingDiLoCo(eager=True, overlap=2)
    with pytest.raises(ValueError, match="leave out overlap and mixing"):
        StreamingDiLoCo(eager=True, mixing=0.0)


def test_its_workers_do_not_go_on_without_one_that_dies():
    assert StreamingDiLoCo().is_elastic and not StreamingDiLoCo(eager=True).is_elastic
