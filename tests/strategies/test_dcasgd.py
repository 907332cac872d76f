"""Delay-compensated asynchronous SGD: worked out on paper, and its identities."""

from math import sqrt

import pytest
import torch
from central import Census, Drawn, Trail

from shoal.engine.engine import Instrument
from shoal.sim import Compute, Faults, Network, Weather
from shoal.strategies import ASGD, DCASGD, Single
from shoal.testing.problems import Quadratic, simulate

# Gradients take 1 and 1.5 s, messages no time; the minima are 0 and 4.
#   1.0 s  worker 0 saw x0      2.0 s  worker 0 saw x1, when the model is at x2
#   1.5 s  worker 1 saw x0,     3.0 s  worker 1 saw x2, when the model is at x3
#          when it is at x1
TWO = {"workers": 2, "steps": 2, "start": [8.0], "compute": Compute(mean=1.0, slow={1: 1.5})}
WELLS = Quadratic(lr=0.25, targets=(0.0, 4.0))
LOOSE = {
    "workers": 4,
    "steps": 6,
    "start": [0.9, -0.4],
    "compute": Compute(mean=1.0, jitter=0.3),
    "network": Network(latency=0.1),
}


def test_constant_strength_by_hand():
    def step(x, g, pulled):
        return x - 0.25 * (g + strength * g * g * (x - pulled))

    strength, x0 = 1 / 32, 8.0
    x1 = step(x0, x0 - 0, pulled=x0)
    x2 = step(x1, x0 - 4, pulled=x0)
    x3 = step(x2, x1 - 0, pulled=x1)
    x4 = step(x3, x2 - 4, pulled=x2)
    trail = Trail()
    simulate(DCASGD(strength=strength, adaptive=False), WELLS, observers=[trail], **TWO)
    assert trail.x == [x1, x2, x3, x4]
    assert x2 == 6 - 0.25 * (4 + 16 * (6 - 8) / 32) == 5.25


def test_adaptive_strength_by_hand():
    # the mean square takes the gradient in before it is used
    square, x = 0.0, [8.0]
    for target, pulled in ((0, 0), (4, 0), (0, 1), (4, 2)):
        g = x[pulled] - target
        square = 0.75 * square + 0.25 * g**2
        strength = 0.5 / sqrt(square + 1e-7)
        x.append(x[-1] - 0.25 * (g + strength * g**2 * (x[-1] - x[pulled])))
    trail = Trail()
    simulate(DCASGD(strength=0.5, decay=0.75), WELLS, observers=[trail], **TWO)
    assert trail.x == pytest.approx(x[1:], rel=1e-13)
    # 1.5 s: the squares of 8 and 4 give a mean of 0.75 * 16 + 0.25 * 16
    assert x[2] == pytest.approx(6 - 0.25 * (4 + 0.5 / sqrt(16 + 1e-7) * 16 * (6 - 8)), rel=1e-15)


def test_each_element_is_corrected_by_itself():
    problem, options = Quadratic(lr=0.25, targets=(0.0, 4.0)), {**TWO, "steps": 3}
    together = simulate(DCASGD(), problem, **{**options, "start": [8.0, -3.0]}).server.x.tolist()
    apart = [simulate(DCASGD(), problem, **{**options, "start": [x]}).server.x.item() for x in (8.0, -3.0)]
    assert together == pytest.approx(apart, rel=1e-15)


@pytest.mark.parametrize("adaptive", [False, True])
def test_with_no_strength_it_is_asynchronous_sgd_bit_for_bit(adaptive):
    here = simulate(DCASGD(strength=0.0, adaptive=adaptive), Drawn(lr=0.1), **LOOSE)
    assert max(here.server.meter.staleness) > 1
    assert here.digest() == simulate(ASGD(), Drawn(lr=0.1), **LOOSE).digest()


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("strength", [0.04, 2.0, 1e6])
def test_without_delay_it_is_serial_sgd_for_any_strength(strength, adaptive):
    problem, start = Drawn(lr=0.1), [0.3, 0.7]
    serial = simulate(Single(), problem, steps=15, start=start)
    run = simulate(DCASGD(strength=strength, adaptive=adaptive), problem, steps=15, start=start)
    assert torch.equal(run.server.x, serial.worker(0).x)


@pytest.mark.parametrize(
    ("default", "spelt_out"),
    [
        (DCASGD(), DCASGD(strength=2.0, adaptive=True, decay=0.95)),
        (DCASGD(adaptive=False), DCASGD(strength=0.04, adaptive=False)),
    ],
)
def test_the_strengths_of_the_paper_are_the_defaults(default, spelt_out):
    problem = Drawn(lr=0.1)
    assert simulate(default, problem, **LOOSE).digest() == simulate(spelt_out, problem, **LOOSE).digest()
    assert simulate(default, problem, **LOOSE).digest() != simulate(ASGD(), problem, **LOOSE).digest()


def test_on_a_curve_the_correction_points_to_where_the_gradient_would_be_now():
    # On x^2 / 2 the gradient at the model of now is g + (x - pulled): the correction, where g g strength = 1.
    x0 = 8.0
    x1 = x0 - 0.25 * x0
    x2 = x1 - 0.25 * x1  # as if worker 1 had seen x1 and not x0
    trail = Trail()
    dcasgd = DCASGD(strength=1 / x0**2, adaptive=False)
    simulate(dcasgd, Quadratic(lr=0.25), observers=[trail], **{**TWO, "steps": 1})
    assert trail.x == [x1, x2]


def test_every_batch_is_in_the_model_though_a_worker_dies():
    # each batch has an element of its own, which no other moves: there is nothing to correct
    run = simulate(
        DCASGD(),
        Census(steps=4),
        workers=3,
        steps=4,
        start=[0.0] * 12,
        compute=Compute(mean=1.0, jitter=0.3),
        faults=Faults().crash(rank=0, step=2),
    )
    assert run.server.x.tolist() == [1.0] * 12


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"strength": -0.1}, "strength=-0.1 must be at least 0"),
        ({"decay": 1.0}, "decay=1.0 must be at least 0 and below 1"),
        ({"decay": -0.1}, "decay=-0.1 must be at least 0 and below 1"),
    ],
)
def test_options_that_cannot_work_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        DCASGD(**options)


class Corrections(Instrument):
    """Compares the point that a gradient will be corrected against with the one it was taken at."""

    def __init__(self):
        self.taken_at, self.pushed = {}, set()
        self.right = self.wrong = 0

    def receive(self, node, m):
        if not node.is_server and m.tag == "reply":
            self.taken_at.setdefault((node.rank, m.seq), m.body.clone())
        elif node.is_server and m.tag == "push" and (m.src, m.seq) not in self.pushed:
            self.pushed.add((m.src, m.seq))
            seq = max(seq for rank, seq in self.taken_at if rank == m.src)
            same = torch.equal(node.variables.state()[f"pulled by {m.src}"], self.taken_at[m.src, seq])
            self.right, self.wrong = self.right + same, self.wrong + (not same)


@pytest.mark.parametrize(
    ("weather", "retry"), [(Weather(double=0.3, delay=2.0), None), (Weather(loss=0.2, delay=1.0), 0.75)]
)
def test_a_pull_that_comes_twice_does_not_move_what_a_gradient_is_corrected_against(weather, retry):
    seen = Corrections()
    simulate(DCASGD(), Drawn(), observers=[seen], weather=weather, retry=retry, **{**LOOSE, "steps": 20})
    assert seen.wrong == 0 and seen.right == 80
