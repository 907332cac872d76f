"""Elastic averaging: worked out on paper, and its identities."""

from collections import defaultdict

import pytest
import torch

from shoal.engine.engine import Instrument
from shoal.sim import Compute, Network, Simulation
from shoal.strategies import EAMSGD, EASGD, Single
from shoal.testing.problems import Quadratic, Slope, simulate
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Setting


class Paths(Instrument):
    """Where each worker stands after each step: at the end it is given the centre."""

    def __init__(self):
        self.x = defaultdict(list)
        self.centre = defaultdict(list)

    def step(self, node):
        self.x[node.rank].append(node.x.item())
        if "centre" in node.variables.state():
            self.centre[node.rank].append(node.variables.state()["centre"].item())


def watch(strategy, problem, **options):
    paths = Paths()
    return simulate(strategy, problem, observers=[paths], **options), paths


def exchanged(alpha, x, centre):
    """Worker and centre after one exchange. At the end there is one more, so that nothing is left behind."""
    force = alpha * (x - centre)
    return x - force, centre + force


def pulled(alpha, xs, centre):
    """The centre after all workers have pulled at once."""
    return centre + alpha * sum(x - centre for x in xs)


def test_centre_moves_by_the_force_it_receives():
    run, paths = watch(EASGD(rate=0.25, period=1), Slope(gradients=(0.0,)), start=[4.0], centre=[0.0])
    assert paths.x[0] == [4 - 0.25 * (4 - 0)]
    assert run.server.x == 0 + 0.25 * (4 - 0) + 0.25 * (3 - 1)


def test_what_is_done_in_less_than_a_period_is_in_the_centre():
    run = simulate(EASGD(rate=0.25, period=10), Slope(), steps=4)
    assert run.server.x == 0.25 * -4 and run.server.merged == 4
    both = simulate(EASGD(rate=0.25, period=10, synchronous=True), Slope(), workers=2, steps=4)
    assert both.worker(0).x == 2 * 0.25 * -4


def test_one_worker_and_its_centre_by_hand():
    # both moves start from the saved x: x -= (x - 0) / 2 + (x - centre) / 4
    x, centre = 8.0, 0.0
    expected = []
    for _ in range(4):
        force = 0.25 * (x - centre)
        x, centre = x - 0.5 * x - force, centre + force
        expected.append(x)
    _, centre = exchanged(0.25, x, centre)
    run, paths = watch(EASGD(rate=0.25, period=1), Quadratic(lr=0.5), steps=4, start=[8.0], centre=[0.0])
    assert paths.x[0] == expected
    assert expected[:2] == [8 - 4 - 2, 2 - 1 - 0.25 * (2 - 2)]
    assert (run.server.x.item(), run.worker(0).x.item()) == (centre, centre)


def test_exchanges_are_a_period_apart_and_the_first_comes_before_any_step():
    x, centre = 8.0, 0.0
    for t in range(7):
        force = 0.5 * (x - centre) if t in (0, 3, 6) else 0.0
        x, centre = x - 0.5 * (x - 2) - force, centre + force
    _, centre = exchanged(0.5, x, centre)
    problem = Quadratic(lr=0.5, targets=(2.0,))
    run, paths = watch(EASGD(rate=0.5, period=3), problem, steps=7, start=[8.0], centre=[0.0])
    assert paths.x[0][-1] == x
    assert run.server.x.item() == centre
    assert run.server.version == 3 + 1


class HeldCentre(EASGD):
    async def server(self, s):
        await s.serve(lambda push: None)


@pytest.mark.parametrize(("order", "rest"), [("saved", 1 / 2), ("moved", 2 / 3)])
def test_where_the_gradient_is_taken_decides_where_it_comes_to_rest(order, rest):
    # card 45: lr h = alpha = 1/2, the target 1, the centre held at 0; "moved" as seen before an exchange
    easgd, problem = HeldCentre(rate=0.5, period=1, order=order), Quadratic(lr=0.5, targets=(1.0,))
    _, paths = watch(easgd, problem, steps=60, start=[4.0], centre=[0.0])
    assert paths.x[0][-1] == pytest.approx(rest, abs=1e-12)


def test_moved_first_by_hand():
    x, centre, expected = 8.0, 0.0, []
    for t in range(4):
        if t % 2 == 0:
            x, centre = exchanged(0.25, x, centre)
        x -= 0.5 * x
        expected.append(x)
    easgd = EASGD(rate=0.25, period=2, order="moved")
    _, paths = watch(easgd, Quadratic(lr=0.5), steps=4, start=[8.0], centre=[0.0])
    assert paths.x[0] == expected


def test_two_workers_at_their_own_pace_by_hand():
    # A message takes 1/8 s, worker 0's gradient 1 s, worker 1's 2 s; each step goes down by 1.
    # Both fetch 0, so both send 0.5 * (4 - 0) = 2: the centre stands at 4, both workers at 2.
    # Worker 0 is at 1 at 1.5 s and fetches 4; worker 1 is at 1 at 2.5 s and fetches what worker 0 left.
    # Worker 0 has done its last step at 3 s, worker 1 at 5 s; then both exchange once more, at once.
    x0, centre = exchanged(0.5, 1, 4)
    x1, centre = exchanged(0.5, 1, centre)
    x0, x1 = x0 - 1, x1 - 1
    centre += 0.5 * (x0 - centre) + 0.5 * (x1 - centre)
    run, paths = watch(
        EASGD(rate=0.5, period=1),
        Slope(),
        workers=2,
        steps=2,
        start=[4.0],
        centre=[0.0],
        network=Network(latency=0.125),
        compute=Compute(mean=1.0, slow={1: 2.0}),
    )
    assert paths.x == {0: [1.0, x0], 1: [1.0, x1]}
    assert run.server.x.item() == centre


def test_synchronous_two_workers_by_hand():
    # targets 0 and 4, lr 1/4, alpha 1/4, so beta 1/2; all right-hand sides are of time t
    x0, x1, centre = [8.0], [8.0], [8.0]
    for t in range(5):
        x0.append(x0[t] - 0.25 * (x0[t] - 0) - 0.25 * (x0[t] - centre[t]))
        x1.append(x1[t] - 0.25 * (x1[t] - 4) - 0.25 * (x1[t] - centre[t]))
        centre.append((1 - 0.5) * centre[t] + (0.5 / 2) * (x0[t] + x1[t]))
    run, paths = watch(
        EASGD(rate=0.25, period=1, synchronous=True),
        Quadratic(lr=0.25, targets=(0.0, 4.0)),
        workers=2,
        steps=5,
        start=[8.0],
    )
    assert paths.x == {0: x0[1:], 1: x1[1:]}
    assert paths.centre == {0: centre[1:], 1: centre[1:]}
    assert [run.worker(k).x.item() for k in (0, 1)] == [pulled(0.25, (x0[5], x1[5]), centre[5])] * 2
    assert (x0[2], x1[2], centre[2]) == (5.0, 6.5, 7.25)


def test_synchronous_exchanges_are_a_period_apart():
    x0, x1, centre = 8.0, 8.0, 8.0
    for t in range(5):
        pull = 0.25 if t % 2 == 0 else 0.0
        x0, x1, centre = (
            x0 - 0.25 * (x0 - 0) - pull * (x0 - centre),
            x1 - 0.25 * (x1 - 4) - pull * (x1 - centre),
            centre + pull * ((x0 - centre) + (x1 - centre)),
        )
    centre = pulled(0.25, (x0, x1), centre)
    problem = Quadratic(lr=0.25, targets=(0.0, 4.0))
    easgd = EASGD(rate=0.25, period=2, synchronous=True)
    run, paths = watch(easgd, problem, workers=2, steps=5, start=[8.0])
    assert (paths.x[0][-1], paths.x[1][-1], run.worker(0).x.item()) == (x0, x1, centre)


def test_the_force_does_not_depend_on_how_many_samples_a_worker_took():
    options = {"workers": 2, "steps": 4, "start": [8.0]}
    easgd, targets = EASGD(rate=0.25, period=1, synchronous=True), (0.0, 4.0)
    even = watch(easgd, Quadratic(lr=0.25, targets=targets), **options)[1]
    uneven = watch(easgd, Quadratic(lr=0.25, targets=targets, counts=(1, 3)), **options)[1]
    assert even.x == uneven.x


def test_nesterov_momentum_by_hand():
    # v = delta v - lr g(x + delta v); x += v, with no spring
    x, v, expected = 8.0, 0.0, []
    for _ in range(5):
        v = 0.5 * v - 0.5 * (x + 0.5 * v)
        x += v
        expected.append(x)
    _, paths = watch(EAMSGD(rate=0.0, period=1, momentum=0.5), Quadratic(lr=0.5), steps=5, start=[8.0])
    assert paths.x[0] == expected
    assert expected[:3] == [4.0, 1.0, -0.25]


def test_nesterov_momentum_with_the_spring_by_hand():
    x, v, centre, expected = 8.0, 0.0, 0.0, []
    for _ in range(4):
        force = 0.5 * (x - centre)
        v = 0.5 * v - 0.5 * (x + 0.5 * v)
        x, centre = x + v - force, centre + force
        expected.append(x)
    _, centre = exchanged(0.5, x, centre)
    eamsgd = EAMSGD(rate=0.5, period=1, momentum=0.5)
    run, paths = watch(eamsgd, Quadratic(lr=0.5), steps=4, start=[8.0], centre=[0.0])
    assert paths.x[0] == expected
    assert expected[:3] == [8 - 4 - 4, 0 - 1 + 2, 1 - 0.75 + 0.5]  # x + v - force
    assert run.server.x.item() == centre


def test_synchronous_nesterov_momentum_by_hand():
    x, v, centre, expected = [8.0, 8.0], [0.0, 0.0], 8.0, []
    for _ in range(4):
        v = [0.5 * v[k] - 0.25 * (x[k] + 0.5 * v[k] - (0, 4)[k]) for k in (0, 1)]
        new = [x[k] + v[k] - 0.25 * (x[k] - centre) for k in (0, 1)]
        centre += 0.25 * ((x[0] - centre) + (x[1] - centre))
        x = new
        expected.append(x)
    centre = pulled(0.25, x, centre)
    eamsgd = EAMSGD(rate=0.25, period=1, momentum=0.5, synchronous=True)
    run, paths = watch(eamsgd, Quadratic(lr=0.25, targets=(0.0, 4.0)), workers=2, steps=4, start=[8.0])
    assert [list(both) for both in zip(paths.x[0], paths.x[1], strict=True)] == expected
    assert run.worker(0).x.item() == centre


def from_different_places(strategy, observers, **options):
    """Workers on flat ground that begin at 0, 8, 16, ... and a centre at 64."""

    def replica(rank):
        return Slope(gradients=(0.0,)).replica(rank, torch.tensor([8.0 * rank], dtype=torch.float64))

    centre = torch.tensor([64.0], dtype=torch.float64)
    return Simulation(strategy, replica, centre=centre, observers=observers, **options).run()


def test_without_gradients_the_exchange_conserves_centre_plus_workers():
    paths = Paths()
    run = from_different_places(
        EASGD(rate=0.5, period=2),
        [paths],
        workers=3,
        steps=9,
        compute=Compute(mean=1.0, jitter=0.5),
        network=Network(latency=0.25),
    )
    assert run.server.x.item() + sum(paths.x[k][-1] for k in range(3)) == 64 + 0 + 8 + 16
    assert run.server.x.item() != 64


def test_without_gradients_the_synchronous_exchange_conserves_it_too():
    # every worker holds the centre, here as it was given the first one's start
    paths, easgd = Paths(), EASGD(rate=0.25, period=1, synchronous=True)

    def replica(rank):
        return Slope(gradients=(0.0,)).replica(rank, torch.tensor([8.0 * rank], dtype=torch.float64))

    run = Simulation(easgd, replica, workers=2, steps=6, observers=[paths])
    for node in run.nodes:
        node.variables.keep("centre", torch.tensor([64.0], dtype=torch.float64))
    run.run()
    totals = [c + x0 + x1 for c, x0, x1 in zip(paths.centre[0], paths.x[0], paths.x[1], strict=True)]
    assert totals == [64 + 0 + 8] * 6
    assert paths.centre[0][0] == 64 + 0.25 * ((0 - 64) + (8 - 64))


@pytest.mark.slow
def test_on_quadratics_it_comes_to_rest_where_the_card_says():
    # x~ = mean of the targets, x_i = (lr h a_i + alpha x~) / (lr h + alpha)
    lr, h, alpha, targets = 0.5, 0.5, 0.2, (0.0, 4.0, 5.0)
    run, paths = watch(
        EASGD(rate=alpha, period=1, synchronous=True),
        Quadratic(lr=lr, curvature=h, targets=targets),
        workers=3,
        steps=250,
        start=[9.0],
    )
    assert run.worker(0).x.item() == pytest.approx(3.0, abs=1e-9)
    for k, a in enumerate(targets):
        assert paths.x[k][-1] == pytest.approx((lr * h * a + alpha * 3.0) / (lr * h + alpha), abs=1e-9)


@pytest.mark.parametrize("synchronous", [False, True])
def test_without_a_spring_the_workers_are_independent(synchronous):
    problem = Quadratic(lr=0.5, targets=(0.0, 4.0))
    run, paths = watch(EASGD(0.0, 1, synchronous=synchronous), problem, workers=2, steps=6, start=[8.0])
    for k, target in enumerate((0.0, 4.0)):
        alone = simulate(Single(), Quadratic(lr=0.5, targets=(target,)), steps=6, start=[8.0])
        assert paths.x[k][-1] == alone.worker(0).x.item()
    assert run.worker(0).x.item() == 8.0  # the centre, which nothing moved


def test_synchronous_with_beta_one_puts_the_centre_in_the_middle_of_the_workers():
    easgd = EASGD(rate=0.5, period=1, synchronous=True)
    _, paths = watch(easgd, Quadratic(lr=0.25, targets=(0.0, 4.0)), workers=2, steps=5, start=[8.0])
    middle = [(x0 + x1) / 2 for x0, x1 in zip(paths.x[0], paths.x[1], strict=True)]
    assert paths.centre[0][1:] == middle[:-1]
    assert paths.x[0][-1] != paths.x[1][-1]  # the workers are not reset: this is not model averaging


def test_nothing_moves_where_all_agree_and_the_ground_is_flat():
    run, paths = watch(EASGD(rate=0.5, period=1), Slope(gradients=(0.0,)), workers=3, steps=3, start=[5.0])
    assert {x for path in paths.x.values() for x in path} == {5.0} == {run.server.x.item()}


def test_the_spring_is_nine_tenths_over_n_unless_given():
    options = {"workers": 3, "steps": 5, "start": [8.0]}
    problem = Quadratic(lr=0.25, targets=(0.0, 4.0, 5.0))
    for synchronous in (False, True):
        default = simulate(EASGD(period=1, synchronous=synchronous), problem, **options)
        given = simulate(EASGD(0.9 / 3, period=1, synchronous=synchronous), problem, **options)
        assert default.digest() == given.digest()


def test_the_solution_is_the_centre():
    run = simulate(EASGD(0.25, 1, synchronous=True), Quadratic(lr=0.25), steps=3, workers=2, start=[8.0])
    assert (
        run.strategy.solution(Node(run.worker(1))).item() == run.worker(1).x.item() == run.worker(0).x.item()
    )
    run = simulate(EASGD(0.25, 1), Quadratic(lr=0.25), steps=3, workers=2, start=[8.0])
    assert run.strategy.solution(Node(run.server)).item() == run.server.x.item() == run.worker(1).x.item()


def test_a_spring_that_makes_the_centre_overshoot_is_refused():
    with pytest.raises(
        ValueError, match=r"with 4 workers the centre moves by rate \* workers = 1.2"
    ) as error:
        simulate(EASGD(rate=0.3, synchronous=True), Slope(), workers=4)
    assert "Try rate=0.225" in str(error.value)
    EASGD(rate=0.25, synchronous=True).check(Setting(4))  # beta = 1 is the limit
    EASGD(rate=0.3).check(Setting(4))  # asynchronous: each force acts alone


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"period": 0}, "period=0 must be at least 1"),
        ({"rate": 1.0}, "rate=1.0 must be at least 0 and below 1"),
        ({"rate": -0.1}, "rate=-0.1"),
        ({"momentum": 1.0}, "momentum=1.0 must be at least 0 and below 1"),
        ({"order": "first"}, "order='first' must be one of saved, moved"),
        ({"order": "moved", "synchronous": True}, "leave order='moved' out"),
    ],
)
def test_options_that_cannot_work_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        EAMSGD(**options)
