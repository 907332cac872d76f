"""HALoS: worked out on paper, and its identities."""

from collections import defaultdict

import pytest
import torch
from blockwise import Bowls
from central import Trail

from shoal.engine.engine import Instrument
from shoal.sim import Compute, Faults
from shoal.strategies import AsyncDiLoCo, HALoS
from shoal.testing.problems import Quadratic, Slope, simulate
from shoal.vocabulary.strategy import Setting

SLOPES = Slope(gradients=(1.0, 3.0))
UNEVEN = {"compute": Compute(1.0, slow={1: 1.25})}
PLAIN = {"local_rate": 1.0, "local_momentum": 0.0, "local_buffer": 1}  # a region's model is its worker's


def trained(strategy, problem=SLOPES, workers=2, steps=2, start=0.0, **options):
    """The model above after each of its updates, and the run."""
    seen = Trail()
    run = simulate(
        strategy, problem, workers=workers, steps=steps, start=[start], observers=[seen], **options
    )
    assert all(torch.equal(run.worker(k).x, run.server.x) for k in range(workers))
    return seen.x, run


def regions(run):
    """Where the models of the regions stand."""
    return [node.x.item() for node in run.nodes[run.workers + 1 :]]


# One worker in each of two regions, which trade after two rounds of a step each. A region's momentum is 1/2,
# its rate 1/2, for every round: m = m/2 + g, x = x - 1/2 (m/2 + g). Above, the rate is 1/2, without momentum.
HALVES = HALoS(
    groups=2,
    period=1,
    exchange=2,
    mixing=0.5,
    local_rate=0.5,
    local_momentum=0.5,
    local_buffer=1,
    rate=0.5,
    momentum=0.0,
    buffer=1,
    dynamic=False,
)


def test_an_exchange_of_each_region_by_hand():
    # region 0: m = 1, x = -0.75; m = 1.5, x = -1.625.   U = 1.625, G = -0.8125, x = (x + G) / 2 = -1.21875
    # region 1: m = 3, x = -2.25; m = 4.5, x = -4.875.   U = 4.875, G = -3.25,   x = (x + G) / 2 = -4.0625
    seen, run = trained(HALVES, **UNEVEN)
    assert seen == [-0.8125, -3.25]
    assert regions(run) == [-1.21875, -4.0625]
    assert run.server.merged == 4


def test_what_a_region_holds_at_the_end_is_passed_on():
    seen, run = trained(HALVES, steps=1, **UNEVEN)
    assert seen == [-0.5 * 0.75, -0.5 * (0.75 + 2.25)]
    assert run.server.merged == 2


def test_one_worker_without_momenta_and_mixing_one_is_serial_training():
    serial = HALoS(groups=1, period=1, exchange=1, mixing=1.0, rate=1.0, momentum=0.0, buffer=1, **PLAIN)
    problem, x, expected = Quadratic(lr=0.25, targets=(1.0,)), 5.0, []
    for _ in range(6):
        x -= 0.25 * (x - 1)
        expected.append(x)
    assert trained(serial, problem, workers=1, steps=6, start=5.0)[0] == pytest.approx(expected, abs=1e-12)


def test_a_region_for_each_worker_that_trades_every_round_is_asynchronous_diloco():
    options = {"period": 2, "momentum": 0.5, "buffer": 2, "dynamic": False}
    halos = HALoS(groups=2, exchange=1, mixing=1.0, rate=0.25, **options, **PLAIN)
    expected = Trail()
    simulate(
        AsyncDiLoCo(rate=0.5, **options),
        Bowls(lr=0.25),
        workers=2,
        steps=8,
        start=[8.0],
        observers=[expected],
        **UNEVEN,
    )
    seen, _ = trained(halos, Bowls(lr=0.25), steps=8, start=8.0, **UNEVEN)
    assert seen == pytest.approx(expected.x, abs=1e-12)


def test_without_mixing_regions_never_hear_of_each_other():
    alone = HALoS(groups=2, period=1, exchange=1, mixing=0.0, momentum=0.0, **PLAIN)
    _, run = trained(alone, steps=5, **UNEVEN)
    assert regions(run) == [-5.0, -15.0]


def test_every_sample_is_passed_on_whatever_the_exchange():
    for exchange in (1, 2, 3, 100):
        _, run = trained(HALoS(period=3, exchange=exchange), workers=4, steps=10, compute=Compute(1.0))
        assert run.server.merged == 40


COUNTS = {"period": 2, "mixing": 0.0, "rate": 1.0, "momentum": 0.0, "buffer": 1, "dynamic": False, **PLAIN}


def killed(rank, moment, exchange, workers):
    """Ten steps of everybody on a slope of 1, in which one is killed: the model above counts the samples."""
    faults = Faults(noticed_after=0.1).kill(rank=rank, moment=moment)
    return simulate(
        HALoS(exchange=exchange, **COUNTS),
        Slope(),
        workers=workers,
        steps=10,
        compute=Compute(1.0),
        faults=faults,
    )


def test_workers_whose_region_dies_turn_to_the_server_above():
    # with an exchange at 4.0 it dies holding nothing; without one, two rounds of its two workers are lost
    for exchange, expected in ((2, 40), (100, 40 - 2 * 2 * 2)):
        run = killed(rank=5, moment=4.5, exchange=exchange, workers=4)
        assert {0, 1, 2, 3} <= set(run.finished)
        assert (run.server.merged, run.server.x.item()) == (expected, -expected)


@pytest.mark.parametrize("moment", [2.5, 4.5, 7.5, 9.5])
def test_a_region_passes_on_what_its_last_worker_left(moment):
    for exchange in (3, 100):
        run = killed(rank=1, moment=moment, exchange=exchange, workers=2)
        assert (run.server.merged, run.server.x.item()) == (20, -20)


class Rounds(Instrument):
    """Samples of each push of a worker, by its rank."""

    def __init__(self):
        self.lengths = defaultdict(list)

    def send(self, node, dst, m):
        if m.tag == "push":
            self.lengths[node.rank].append(m.count)


def test_a_slower_worker_takes_fewer_steps_rounded_up():
    # it takes 2.5 times as long: 8 / 2.5 = 3.2, so 4 steps in every round but the first
    pushes = Rounds()
    compute = Compute(1.0, slow={1: 2.5})
    simulate(HALoS(period=8), Slope(), workers=2, steps=24, compute=compute, observers=[pushes])
    assert pushes.lengths[1] == [8, 4, 4, 4, 4]
    assert set(pushes.lengths[0]) == {8}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"groups": 0}, "groups=0"),
        ({"exchange": 0}, "exchange=0"),
        ({"mixing": 1.5}, "mixing=1.5 must be at most 1"),
        ({"local_momentum": 1.0}, "local_momentum"),
        ({"rate": 0.0}, "rate"),
    ],
)
def test_options_that_cannot_work_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        HALoS(**options)


def test_more_regions_than_workers_are_refused():
    with pytest.raises(ValueError, match="more groups than the 2 workers"):
        HALoS(groups=3).check(Setting(workers=2))
