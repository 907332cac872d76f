"""The iterations of L-BFGS on functions of a few numbers, without any network."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from shoal.core.errors import Diverged
from shoal.lbfgs.line_search import Wolfe
from shoal.lbfgs.minimizer import Measurement, Minimizer, TrialPoint
from shoal.lbfgs.operations import AbsoluteSum, Combine, Dots


@dataclass
class Driver:
    """All vectors in one place. `function(w, batch)` returns loss and gradient."""

    minimizer: Minimizer
    function: object
    start: list[float]
    passes: int = 1000
    points: list = field(default_factory=list)  # x after each iteration
    trials: list = field(default_factory=list)  # steps
    directions: list = field(default_factory=list)
    batch: int = 0
    dtype: torch.dtype = torch.float64

    def run(self):
        self.vectors = {"x": torch.tensor(self.start, dtype=self.dtype)}
        program = self.minimizer.program()
        answer = None
        try:
            while True:
                asked = program.send(answer)
                answer = self.evaluate(asked) if isinstance(asked, TrialPoint) else self.do(asked)
        except StopIteration as end:
            self.do(self.minimizer.last_operations)
            self.why = end.value
        return self

    @property
    def x(self):
        return self.vectors["x"]

    def do(self, operations):
        numbers = []
        for one in operations:
            if isinstance(one, Combine):
                total = sum((f * self.vectors[n] for f, n in one.terms), torch.zeros_like(self.x))
                self.vectors[one.out] = total
                if one.out == "d":
                    self.directions.append(total)
                if one.out == "x":
                    self.points.append(total)
            elif isinstance(one, Dots):
                numbers += [float(torch.dot(self.vectors[a], self.vectors[b])) for a, b in one.pairs]
            else:
                assert isinstance(one, AbsoluteSum)
                numbers.append(float(self.vectors[one.name].abs().sum()))
        return numbers

    def evaluate(self, trial):
        if len(self.trials) == self.passes:
            self.do(trial.before)
            return None
        self.batch += trial.fresh
        self.do(trial.operations)
        self.trials.append(trial.step)
        loss, new = self.function(self.vectors["point"], self.batch)
        self.vectors["new"] = new
        g, d = (self.vectors.get(name, torch.zeros_like(new)) for name in "gd")
        return Measurement(loss, *(float(torch.dot(new, v)) for v in (d, new, g)))


def quadratic(a, b):
    """w.A.w / 2 - b.w, with its minimum where A w = b."""
    return lambda w, batch: (float(w @ a @ w / 2 - b @ w), a @ w - b)


def drawn(n, seed=0):
    rng = torch.Generator().manual_seed(seed)
    root = torch.randn(n, n, generator=rng, dtype=torch.float64)
    return root @ root.T + torch.eye(n, dtype=torch.float64), torch.randn(
        n, generator=rng, dtype=torch.float64
    )


def exactly(**options):
    """A line search that ends at the minimum along the line."""
    return Minimizer(wolfe=Wolfe(curvature=1e-10), tolerance=1e-9, **options)


def test_the_first_step_by_hand():
    # f = (x^2 + 3 y^2) / 2 from (2, 2): g = (2, 6), |g|_1 = 8, d = -g, first trial 1/8: (1.75, 1.25);
    # f falls from 8 to 3.875, the slope from -40 to -(2 1.75 + 6 3.75) = -26: 26 <= 0.9 40, so it is taken
    a, b = torch.diag(torch.tensor([1.0, 3.0], dtype=torch.float64)), torch.zeros(2, dtype=torch.float64)
    done = Driver(Minimizer(iterations=1), quadratic(a, b), [2.0, 2.0]).run()
    assert done.trials == [0.0, 0.125]
    assert done.directions[0].tolist() == [-2.0, -6.0]
    assert done.x.tolist() == [1.75, 1.25]
    assert done.minimizer.loss == 3.875
    assert done.why == "as many iterations as asked for"


def test_a_quadratic_of_six_is_solved_in_at_most_six_exact_steps():
    a, b = drawn(6)
    done = Driver(exactly(), quadratic(a, b), [0.0] * 6).run()
    assert done.minimizer.iteration <= 6
    assert done.why == "the gradient is small"
    assert torch.allclose(done.x, torch.linalg.solve(a, b), rtol=0, atol=1e-9)


def test_without_history_it_is_steepest_descent():
    a, b = drawn(6)
    done = Driver(exactly(history=0, iterations=5), quadratic(a, b), [0.0] * 6).run()
    x = torch.zeros(6, dtype=torch.float64)
    for direction in done.directions:
        assert torch.allclose(direction, b - a @ x, rtol=1e-9)
        x = x + direction * (direction @ direction / (direction @ a @ direction))
    assert torch.allclose(done.x, x, rtol=1e-8)


def test_a_ring_of_slots_forgets_the_oldest_pair():
    a, b = drawn(30)
    done = Driver(exactly(history=2, iterations=5), quadratic(a, b), [0.0] * 30).run()
    assert sorted(name for name in done.vectors if name[0] in "sy") == ["s0", "s1", "y0", "y1"]
    points = [torch.zeros(30, dtype=torch.float64), *done.points]
    # slots 0, 1, 0, 1, 0: the pair in slot 0 is the fifth
    assert torch.allclose(done.vectors["s0"], points[5] - points[4], atol=1e-14)
    assert torch.allclose(done.vectors["y1"], a @ (points[4] - points[3]), atol=1e-12)


def rosenbrock(w, batch):
    w = w.detach().requires_grad_()
    loss = (100 * (w[1:] - w[:-1] ** 2) ** 2 + (1 - w[:-1]) ** 2).sum()
    (g,) = torch.autograd.grad(loss, w)
    return loss.item(), g


def test_it_finds_the_minimum_of_the_banana_in_about_as_many_iterations_as_torch():
    start = [-1.2, 1.0] * 5
    done = Driver(Minimizer(tolerance=1e-6, iterations=500), rosenbrock, start).run()
    w = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    ends = {"max_iter": 500, "max_eval": 10**6, "tolerance_grad": 1e-6, "tolerance_change": 0.0}
    theirs = torch.optim.LBFGS([w], history_size=10, line_search_fn="strong_wolfe", **ends)

    def closure():
        loss, w.grad = rosenbrock(w, 0)
        return loss

    theirs.step(closure)
    assert torch.allclose(done.x, torch.ones(10, dtype=torch.float64), atol=1e-5)
    assert done.minimizer.iteration <= 1.2 * theirs.state[w]["n_iter"]


def test_where_no_pass_is_left_it_ends_with_the_best_point_it_has_seen():
    a, b = drawn(6)
    function = quadratic(a, b)
    for passes in range(1, 12):
        done = Driver(exactly(), function, [0.0] * 6, passes=passes).run()
        assert done.why == "no pass was left"
        assert function(done.x, 0)[0] == pytest.approx(done.minimizer.loss)
        assert done.minimizer.loss <= 0.0  # the loss at the start


def test_a_batch_of_its_own_for_every_iteration_takes_one_more_pass():
    a, b = drawn(6)
    shifts = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def function(w, batch):
        return quadratic(a, b + 0.01 * shifts[batch % 4])(w, batch)

    done = Driver(Minimizer(rotates=True, iterations=8), function, [0.0] * 6).run()
    assert done.batch == 7 and done.trials.count(0.0) == 8
    assert torch.allclose(done.x, torch.linalg.solve(a, b), atol=0.1)


def test_a_start_that_is_not_finite_is_refused():
    with pytest.raises(Diverged, match="the loss is inf where training starts"):
        Driver(Minimizer(), lambda w, batch: (float("inf"), w), [1.0]).run()


def test_a_batch_whose_loss_is_not_finite_is_refused():
    def function(w, batch):
        return float("nan") if batch == 2 else float(w @ w / 2), w.clone()

    slow = Minimizer(rotates=True, history=0, tolerance=0.0, wolfe=Wolfe(curvature=0.99))
    with pytest.raises(Diverged, match="the loss is nan on the batch of iteration 3"):
        Driver(slow, function, [3.0, 4.0]).run()


@pytest.mark.parametrize("seed", range(8))
def test_a_loss_of_straight_pieces_has_no_curvature_and_ends_all_the_same(seed):
    rng = torch.Generator().manual_seed(seed)
    x, truth = torch.randn(20, 3, generator=rng), torch.randn(3, generator=rng)
    y = x @ truth + 5.0 * torch.randn(20, generator=rng)

    def absolute(w, batch):  # the mean of |x.w - y|, in float32
        error = x @ w - y
        return float(error.abs().mean()), x.T @ error.sign() / len(x)

    done = Driver(Minimizer(iterations=100), absolute, [0.0] * 3, dtype=torch.float32).run()
    assert done.minimizer.loss < absolute(torch.zeros(3), 0)[0]


def test_a_pair_that_turns_out_flat_leaves_the_others():
    minimizer = Minimizer(history=2)
    minimizer._slots = [1, 0]
    names = ("s1", "y1", "s0", "y0", "g")
    minimizer._gram.learn([(a, b) for k, a in enumerate(names) for b in names[k:]], [1.0] * 15)
    minimizer._gram.products["s0", "y0"] = 0.0
    assert list(minimizer._learn_products()) == [] and minimizer._slots == [1]


def test_it_ends_at_once_at_a_minimum():
    done = Driver(Minimizer(), lambda w, batch: (float(w @ w / 2), w.clone()), [0.0, 0.0]).run()
    assert done.why == "the gradient is small" and done.minimizer.iteration == 0
    assert len(done.trials) == 1


def test_it_ends_where_rounding_hides_any_descent():
    coarse = lambda w, batch: (round(float(w @ w / 2)), w.clone())  # noqa: E731
    done = Driver(Minimizer(tolerance=0.0), coarse, [0.3, 0.4]).run()
    assert done.why == "no step has less loss"
