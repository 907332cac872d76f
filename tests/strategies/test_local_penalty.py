"""EDiT's penalty on model averages: worked out on paper, and its identities."""

from dataclasses import dataclass
from math import exp, inf, nan, sin, sqrt

import pytest
import torch

from sampling import mostly_soak
from shoal.core.vector import Layout
from shoal.engine.engine import Instrument
from shoal.sim import Compute, Faults, Network
from shoal.strategies import Local
from shoal.testing.problems import Problem, Slope, simulate

ONE = {"period": 1, "penalty": 1.0}


def moved(strategy, *gradients, start=(0.0,), **options):
    """Where the average stands after one step of a worker for each of these slopes."""
    problem = Slope(gradients=gradients)
    run = simulate(strategy, problem, workers=len(gradients), steps=1, start=start, **options)
    return run.worker(0).x


def test_a_worker_that_went_further_counts_less_by_hand():
    # norms 1 and 3, their median 2: weights e^(-1/2) and e^(-3/2), over their sum
    near, far = exp(-0.5), exp(-1.5)
    expected = -(near * 1 + far * 3) / (near + far)
    assert moved(Local(**ONE), 1.0, 3.0).item() == pytest.approx(expected)
    assert expected == pytest.approx(-1.5379, abs=1e-4)  # the plain mean is -2


def test_the_temperature_says_how_much_less():
    near, far = exp(-0.5 / 4), exp(-1.5 / 4)
    expected = -(near * 1 + far * 3) / (near + far)
    assert moved(Local(period=1, penalty=4.0), 1.0, 3.0).item() == pytest.approx(expected)
    assert moved(Local(period=1, penalty=1e9), 1.0, 3.0).item() == pytest.approx(-2.0)


def test_a_long_step_is_clipped_in_each_layer():
    layout = Layout(("a.weight", "b.weight"), (torch.Size([2]), torch.Size([2])))
    found = moved(Local(**ONE, clip=1.0), 4.0, start=[0.0] * 4, layout=layout)
    assert found.tolist() == pytest.approx([-1 / sqrt(2)] * 4, rel=1e-6)  # (4, 4) has a norm of 5.7


def test_each_layer_has_weights_of_its_own():
    # layer a: norms 1 and 3 as above; layer b: equal norms, the plain mean
    @dataclass(frozen=True)
    class Layers(Problem):
        def gradient(self, rank, step, x):
            return torch.tensor([[1.0, 2.0], [3.0, 2.0]][rank], dtype=x.dtype)

    layout = Layout(("a.weight", "b.weight"), (torch.Size([1]), torch.Size([1])))
    run = simulate(Local(**ONE), Layers(), workers=2, steps=1, start=[0.0] * 2, layout=layout)
    assert run.worker(0).x.tolist() == pytest.approx([-1.5379, -2.0], abs=1e-4)


def test_equal_norms_are_the_plain_mean():
    @dataclass(frozen=True)
    class Apart(Problem):
        def gradient(self, rank, step, x):
            return torch.tensor([[3.0, 4.0], [5.0, 0.0]][rank], dtype=x.dtype)

    run = simulate(Local(**ONE), Apart(), workers=2, steps=1, start=[0.0] * 2)
    assert run.worker(0).x.tolist() == pytest.approx([-4.0, -2.0])


def test_one_worker_far_too_far_out_has_no_weight():
    assert moved(Local(**ONE), 1.0, 1.0, 1e6).item() == pytest.approx(-1.0)


def test_one_worker_is_alone():
    assert moved(Local(**ONE), 3.0).item() == pytest.approx(-3.0)


def test_samples_do_not_change_the_weights():
    run = simulate(Local(**ONE), Slope(gradients=(1.0, 3.0), counts=(1, 5)), workers=2, steps=1)
    assert run.worker(0).x.item() == pytest.approx(-1.5379, abs=1e-4)
    assert run.worker(0).merged == 6


@dataclass(frozen=True)
class Spikes(Problem):
    """Gradients of about 1; in one step they are five times as large, of some workers."""

    at: int = 125
    of: tuple[int, ...] = (1,)

    def gradient(self, rank, step, x):
        size = 1 + 0.1 * torch.sin(torch.tensor(1.7 * step + rank))
        return torch.full_like(x, float(size) * (5 if step == self.at and rank in self.of else 1))


class Steps(Instrument):
    """How far the average goes in each step."""

    def __init__(self):
        self.x = [0.0]

    def step(self, node):
        if node.rank == 0:
            self.x.append(node.x.item())

    def length(self, step):
        return abs(self.x[step + 1] - self.x[step])


def lengths(problem, steps=130):
    seen = Steps()
    simulate(Local(period=1, penalty=1e9), problem, workers=2, steps=steps, observers=[seen])
    return seen


def test_an_outlier_is_left_out_once_there_are_enough_norms_to_know_one():
    late, early = lengths(Spikes(at=125)), lengths(Spikes(at=60))
    assert 0.85 < late.length(125) < 1.15  # worker 0's alone
    assert early.length(60) > 2.5  # the mean of about 1 and 5
    assert late.length(126) == pytest.approx(1.0, abs=0.15)


def test_where_all_are_outliers_nobody_moves():
    assert lengths(Spikes(at=125, of=(0, 1))).length(125) == 0.0


def test_the_others_go_on_without_a_dead_worker():
    faults = Faults(noticed_after=0.1).kill(rank=1, moment=1.5)
    slopes = Slope(gradients=(1.0, 3.0))
    options = {"workers": 2, "steps": 2, "compute": Compute(1.0), "faults": faults, "elastic": True}
    assert simulate(Local(**ONE), slopes, **options).worker(0).x.item() == pytest.approx(-2.5379, abs=1e-4)


def test_who_dies_between_the_weights_and_the_mean_leaves_weights_that_sum_to_one():
    # norms arrive at 1.1; from then on the displacements travel, until 1.3
    faults = Faults(noticed_after=0.1).kill(rank=1, moment=1.15)
    options = {"compute": Compute(1.0), "network": Network(latency=0.1), "faults": faults, "elastic": True}
    seen = Steps()
    simulate(Local(**ONE), Slope(gradients=(1.0, 3.0)), workers=2, steps=2, observers=[seen], **options)
    assert seen.x == pytest.approx([0.0, -1.0, -2.0])


def test_warm_up_steps_are_plain_means_and_tell_nothing_of_blocks():
    @dataclass(frozen=True)
    class Noise(Problem):
        def gradient(self, rank, step, x):
            return torch.full_like(x, 1 + 0.1 * sin(1.7 * step + rank))

    run = simulate(Local(period=4, warmup=130, penalty=1.0), Noise(), workers=2, steps=330)
    assert run.worker(0).x.item() == pytest.approx(-330, rel=0.01)
    warm = simulate(Local(period=4, warmup=1, penalty=1.0), Slope(gradients=(1.0, 3.0)), workers=2, steps=1)
    assert warm.worker(0).x.item() == -2.0


def test_a_lasting_rise_in_norms_does_not_stop_training():
    @dataclass(frozen=True)
    class Rise(Problem):
        def gradient(self, rank, step, x):
            return torch.full_like(x, (1 if step < 150 else 2) + 0.05 * sin(1.7 * step + rank))

    seen = lengths(Rise(), steps=200)
    assert seen.length(150) == 0.0
    assert all(seen.length(step) > 1.9 for step in range(175, 200))


@pytest.mark.parametrize("value", mostly_soak([nan, inf], few=1))
def test_a_displacement_that_is_not_finite_has_no_weight_and_is_forgotten(value):
    @dataclass(frozen=True)
    class Broken(Problem):
        def gradient(self, rank, step, x):
            return torch.full_like(x, value if rank == 1 and step in (0, 125) else 1 + 0.01 * (step % 3))

    seen = lengths(Broken())
    assert [seen.length(step) for step in (0, 1, 125, 126)] == pytest.approx([1.0, 1.01, 1.02, 1.0])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"penalty": 0.0}, "penalty=0.0 must be above 0"),
        ({"penalty": 1.0, "clip": 0.0}, "clip"),
        ({"clip": 1.0}, "clip=1 belongs to a penalty"),
    ],
)
def test_options_that_cannot_work_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        Local(**options)
