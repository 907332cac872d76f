"""DeMo: worked out on paper, and its identities."""

from dataclasses import dataclass
from math import inf, nan

import pytest
import torch

from shoal.core.errors import Diverged
from shoal.core.parameter_chunks import ParameterChunks
from shoal.core.vector import Layout
from shoal.engine.engine import Instrument
from shoal.sim import Simulation
from shoal.strategies import DecoupledMomentum
from shoal.strategies.decoupled_momentum import put_spectrum, spectrum, wave
from shoal.testing.problems import Problem, simulate
from slopes import Overflowing, Slopes


@dataclass(frozen=True)
class Rough(Problem):
    """Gradients with no short binary form, another one for each worker and step."""

    def gradient(self, rank, step, x):
        return torch.sin(torch.arange(len(x), dtype=x.dtype) * (1.7 + rank) + step + 0.5)


class FirstRough(Problem):
    """The gradient of two elements is uneven in step 0 alone."""

    def gradient(self, rank, step, x):
        return torch.tensor([3.0, 1.0] if step == 0 else [4.0, 4.0], dtype=x.dtype)


class Momenta(Instrument):
    """Where every worker stands after each step, and its momentum."""

    def __init__(self):
        self.x, self.momenta = [], {}

    def step(self, node):
        self.momenta.setdefault(node.rank, []).append(node.variables.state()["momentum"].tolist())
        if node.rank == 0:
            self.x.append(node.x.tolist())


def trained(strategy, problem, workers=2, steps=2, elements=2, **options):
    seen = Momenta()
    start = [0.0] * elements
    run = simulate(strategy, problem, workers=workers, steps=steps, start=start, observers=[seen], **options)
    assert all(torch.equal(node.x, run.nodes[0].x) for node in run.nodes)
    return run.worker(0).x, seen


@pytest.mark.parametrize("value", [inf, nan])
def test_a_momentum_that_is_not_finite_ends_the_run(value):
    problem = Slopes(lr=0.1, gradients=((1.0, 1.0), (1.0, value)))
    with pytest.raises(Diverged, match=r"worker 1: the momentum is no longer finite at step 0: .* smaller"):
        trained(DecoupledMomentum(), problem)


def test_two_steps_by_hand():
    # Two elements (p, q) have the frequencies (p + q) and (p - q), over the root of 2; one of them travels.
    #   worker 0   M = (3, 1): 4, 2       sends the sum, (2, 2),               M = (1, -1)
    #   worker 1   M = (2, -5): -3, 7     sends the difference, (3.5, -3.5),   M = (-1.5, -1.5)
    #   all        u = (2 + 3.5, 2 - 3.5) = (5.5, -1.5)                        x = -sign u = (-1, 1)
    #   worker 0   M = (0.5, -0.5) + (3, 1): 4, 3          sends (2, 2),       M = (1.5, -1.5)
    #   worker 1   M = (-0.75, -0.75) + (2, -5): -4.5, 7   sends (3.5, -3.5),  M = (-2.25, -2.25)
    _, seen = trained(DecoupledMomentum(decay=0.5, kept=1), Slopes(gradients=((3.0, 1.0), (2.0, -5.0))))
    assert seen.x == [[-1.0, 1.0], [-2.0, 2.0]]
    assert seen.momenta[0] == [pytest.approx([1.0, -1.0]), pytest.approx([1.5, -1.5])]
    assert seen.momenta[1] == [pytest.approx([-1.5, -1.5]), pytest.approx([-2.25, -2.25])]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_momentum_decays_though_the_model_is_in_half_precision_by_hand(dtype):
    # (3, 1) in step 0, then (4, 4): the sum travels in each, and the difference stays, (1, -1) in step 0
    problem = FirstRough()
    run = Simulation(
        DecoupledMomentum(decay=0.999, kept=1),
        lambda rank: problem.replica(rank, torch.zeros(2, dtype=dtype)),
        workers=2,
        steps=101,
    ).run()
    momentum = run.worker(0).variables.state()["momentum"]
    assert momentum.tolist() == pytest.approx([0.999**100, -(0.999**100)], rel=1e-4)
    assert run.worker(0).x.tolist() == [-101.0] * 2


@pytest.mark.parametrize(
    ("overflowing", "x", "momentum"),
    [
        ((0, 1), [[-1.0, 1.0], [-1.0, 1.0], [-1.75, 1.75]], [[1.0, -1.0], [1.0, -1.0], [1.5, -1.5]]),
        ((0,), [[-1.0, 1.0], [-1.75, 1.75], [-2.3125, 2.3125]], [[1.0, -1.0], [1.0, -1.0], [1.5, -1.5]]),
        ((1,), [[-1.0, 1.0], [-1.75, -0.25], [-2.3125, 0.8125]], [[1.0, -1.0], [1.5, -1.5], [1.75, -1.75]]),
    ],
)
def test_who_has_no_sample_sends_nothing_and_keeps_its_momentum_by_hand(overflowing, x, momentum):
    # As above in step 0. Without worker 0 in step 1, u = (3.5, -3.5). Without worker 1, u = (2, 2), and in
    # step 2 both step by (2 + 3.5, 2 - 3.5), as all do who go on from there.
    strategy = DecoupledMomentum(decay=0.5, kept=1, weight_decay=0.25)
    problem = Overflowing(gradients=((3.0, 1.0), (2.0, -5.0)), overflowing=overflowing)
    _, seen = trained(strategy, problem, steps=3)
    assert seen.x == x
    assert seen.momenta[0] == [pytest.approx(m) for m in momentum]


def test_weights_decay_before_the_step():
    strategy = DecoupledMomentum(weight_decay=0.5)
    _, seen = trained(strategy, Slopes(lr=0.5, gradients=((3.0, -1.0),)), workers=1)
    assert seen.x == [[-0.5, 0.5], [-0.5 * 0.75 - 0.5, 0.5 * 0.75 + 0.5]]


def test_where_all_frequencies_travel_it_is_sign_sgd_on_the_mean_gradient():
    problem = Rough(lr=0.1)
    x, seen = trained(DecoupledMomentum(kept=6), problem, workers=3, steps=7, elements=6)
    expected = torch.zeros(6, dtype=torch.float64)
    for step in range(7):
        expected -= 0.1 * sum(problem.gradient(k, step, expected) for k in range(3)).sign()
    torch.testing.assert_close(x, expected, rtol=0, atol=1e-12)
    assert max(abs(m) for momenta in seen.momenta.values() for m in momenta[-1]) < 1e-12


def test_a_constant_factor_of_the_rate_changes_the_length_of_steps_alone():
    strategy = DecoupledMomentum(kept=2)
    one, four = (trained(strategy, Rough(lr=lr), workers=3, steps=9, elements=8)[0] for lr in (1.0, 4.0))
    torch.testing.assert_close(4 * one, four, rtol=0, atol=1e-12)


def test_what_nobody_moves_stays():
    layout = Layout(("a", "b"), (torch.Size([4]), torch.Size([4])))
    flat = Slopes(gradients=((1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0),))
    x, _ = trained(DecoupledMomentum(kept=2), flat, elements=8, layout=layout)
    assert x[4:].tolist() == [0.0] * 4 and x[:4].abs().min() > 0


@pytest.mark.parametrize(("height", "width"), [(1, 7), (4, 3), (64, 64)])
def test_the_cosine_transform_is_orthonormal_and_has_an_inverse(height, width):
    chunks = ParameterChunks(0, 2 * height, 3 * width, height, width)
    v = torch.randn(chunks.end, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pair = wave(height, v), wave(width, v)
    found, back = spectrum(chunks, pair, v), torch.empty_like(v)
    put_spectrum(chunks, pair, found, back)
    torch.testing.assert_close(back, v, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.norm(dim=1), chunks.cut(v).norm(dim=1))


def test_a_constant_block_has_one_frequency():
    chunks = ParameterChunks(0, 4, 4, 4, 4)
    v = torch.full((16,), 3.0)
    found = spectrum(chunks, (wave(4, v), wave(4, v)), v)
    assert found[0].tolist() == pytest.approx([12.0] + [0.0] * 15, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"decay": 1.0}, "decay=1.0"),
        ({"decay": -0.1}, "decay"),
        ({"kept": 0}, "kept"),
        ({"chunk": 0}, "chunk"),
    ],
)
def test_options_that_cannot_work_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        DecoupledMomentum(**options)
