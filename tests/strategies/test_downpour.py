"""Downpour SGD: worked out on paper, and its identities."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from central import Census, Drawn, Reads, Trail

from shoal.core.identity import SERVER
from shoal.engine.engine import Instrument
from shoal.sim import Compute, Faults, Network, Weather
from shoal.strategies import Downpour, Single
from shoal.testing.problems import Problem, Quadratic, Slope, simulate


@dataclass(frozen=True)
class Given(Problem):
    """The same list of gradients for every worker, whatever x is."""

    values: Sequence[float] = ()

    def gradient(self, rank, step, x):
        return torch.full_like(x, self.values[step])


class Pushes(Instrument):
    """What the workers push, in the order they send it."""

    def __init__(self):
        self.bodies = []

    def send(self, node, dst, m):
        if m.tag == "push":
            self.bodies.append(m.body.clone())


def test_one_replica_by_hand():
    x1 = 8 - 0.5 * (8 - 4)
    x2 = x1 - 0.5 * (x1 - 4)
    x3 = x2 - 0.5 * (x2 - 4)
    run = simulate(Downpour(warmup=0), Quadratic(lr=0.5, targets=(4.0,)), steps=3, start=[8.0])
    assert (run.server.x.item(), run.worker(0).x.item()) == (x3, x3) == (4.5, 4.5)


def test_two_replicas_at_their_own_pace_by_hand():
    # Gradients take worker 0 one second and worker 1 a second and a half; messages take none.
    #   0.0 s  both fetch 8
    #   1.0 s  worker 0 pushes the gradient 8, fetches 4
    #   1.5 s  worker 1 pushes the gradient 8 it saw at 8, fetches 0
    #   2.0 s  worker 0 pushes the gradient 4 it saw at 4 and has done its two steps
    #   3.0 s  worker 1 pushes the gradient 0 it saw at 0
    expected = 8 - 0.5 * 8 - 0.5 * 8 - 0.5 * 4 - 0.5 * 0
    compute = Compute(mean=1.0, slow={1: 1.5})
    run = simulate(Downpour(warmup=0), Quadratic(lr=0.5), workers=2, steps=2, start=[8.0], compute=compute)
    assert run.server.x.item() == expected == -2.0
    assert run.worker(1).x.item() == -2.0
    assert run.server.meter.staleness == {0: 1, 1: 3}  # only the first push met the model it was made from
    assert (run.server.version, run.server.merged) == (4, 4.0)


def test_the_model_starts_at_the_server_and_not_at_the_worker():
    run = simulate(Downpour(warmup=0), Slope(lr=0.5), steps=2, start=[100.0], centre=[8.0])
    assert run.server.x.item() == 8 - 0.5 - 0.5


def test_gradients_are_summed_between_pushes_and_every_fetch_forgets_the_local_step():
    # x is fetched anew at each step, so both gradients of a push are taken at the same point
    x2 = 8 - 0.25 * (8 + 8)
    x4 = x2 - 0.25 * (x2 + x2)
    run = simulate(Downpour(n_push=2, warmup=0), Quadratic(lr=0.25), steps=4, start=[8.0])
    assert run.server.x.item() == x4 == 2.0


def test_between_fetches_the_replica_goes_on_alone():
    # two local steps from what was fetched; each gradient reaches the server at once
    g1 = 8.0
    g2 = 8 - 0.25 * g1
    x2 = 8 - 0.25 * g1 - 0.25 * g2
    g3 = x2
    g4 = x2 - 0.25 * g3
    run = simulate(Downpour(n_fetch=2, warmup=0), Quadratic(lr=0.25), steps=4, start=[8.0])
    assert run.server.x.item() == x2 - 0.25 * g3 - 0.25 * g4
    assert run.server.version == 4


def test_the_local_step_between_fetches_follows_the_worker_s_own_optimizer():
    # the local optimizer has momentum, the server's sgd has none
    g1 = 8.0
    g2 = 8 - 0.25 * g1
    g3 = g2 - 0.25 * (0.5 * g1 + g2)
    run = simulate(Downpour(n_fetch=3, warmup=0), Quadratic(lr=0.25, momentum=0.5), steps=3, start=[8.0])
    assert run.server.x.item() == 8 - 0.25 * (g1 + g2 + g3)


@pytest.mark.parametrize("q", [1, 2, 3, 4])
@pytest.mark.parametrize("steps", [1, 5, 12])
def test_one_replica_that_fetches_as_often_as_it_pushes_is_serial_sgd(q, steps):
    problem = Quadratic(lr=0.5, targets=(3.0,))
    serial = simulate(Single(), problem, steps=steps, start=[8.0]).worker(0).x.item()
    run = simulate(Downpour(n_fetch=q, n_push=q, warmup=0), problem, steps=steps, start=[8.0])
    assert (run.server.x.item(), run.worker(0).x.item()) == (serial, serial)


@dataclass(frozen=True)
class Printed(Downpour):
    """The order in which the algorithm is usually printed: it pushes at step 0, and then every n_push."""

    async def worker(self, w):
        accrued = w.keep("accrued", torch.zeros_like(w.x))
        async for t in w.steps():
            if t % self.n_fetch == 0:
                await w.pull(SERVER, out=w.x)
            g = await w.grad()
            accrued += g
            w.descend(g)
            if t % self.n_push == 0 or w.is_last(t):
                await w.push(SERVER, accrued)
                accrued.zero_()


def test_in_the_printed_order_a_fetch_undoes_steps_that_were_not_pushed():
    problem = Quadratic(lr=0.25)
    serial = simulate(Single(), problem, steps=6, start=[8.0]).worker(0).x.item()
    options = {"n_fetch": 2, "n_push": 2, "warmup": 0}
    ours = simulate(Downpour(**options), problem, steps=6, start=[8.0]).server.x.item()
    printed = simulate(Printed(**options), problem, steps=6, start=[8.0]).server.x.item()
    assert ours == serial != printed


def test_what_has_not_been_pushed_at_the_end_is_pushed_then():
    run = simulate(Downpour(n_push=4, warmup=0), Slope(lr=0.5), steps=6)
    assert run.server.x.item() == -0.5 * 4 - 0.5 * 2
    assert run.server.version == 2
    assert run.server.merged == 6


def test_nothing_is_pushed_twice_at_the_end():
    pushes = Pushes()
    simulate(Downpour(n_push=3, warmup=0), Slope(), steps=6, observers=[pushes])
    assert [p.item() for p in pushes.bodies] == [3.0, 3.0]


def test_adagrad_by_hand():
    # squares add up to 3^2, 5^2, 13^2
    run = simulate(
        Downpour(optimizer="adagrad", rate=0.5, warmup=0, eps=0.0), Given(values=(3.0, 4.0, 12.0)), steps=3
    )
    expected = -0.5 * 3 / 3 - 0.5 * 4 / 5 - 0.5 * 12 / 13
    assert run.server.x.item() == pytest.approx(expected, rel=1e-15)


def test_adagrad_takes_the_square_of_what_is_pushed_at_once():
    # pushes of 1 + 2 = 3 and 3 + 1 = 4: the sums are squared, not the single gradients
    adagrad = Downpour(n_push=2, optimizer="adagrad", rate=0.5, warmup=0, eps=0.0)
    run = simulate(adagrad, Given(values=(1.0, 2.0, 3.0, 1.0)), steps=4)
    assert run.server.x.item() == pytest.approx(-0.5 * 3 / 3 - 0.5 * 4 / 5, rel=1e-15)


def test_adagrad_stands_still_where_the_gradient_has_always_been_zero():
    assert (
        simulate(Downpour(optimizer="adagrad", warmup=0), Given(values=(0.0,)), steps=1).server.x.item()
        == 0.0
    )


@pytest.mark.slow  # torch imports its compiler with the first optimizer
def test_one_replica_with_adagrad_is_torch_adagrad():
    x = torch.tensor([8.0, -2.0], dtype=torch.float64)
    serial = torch.optim.Adagrad([x], lr=0.5, eps=1e-8)
    for _ in range(10):
        x.grad = 0.5 * (x - 3)
        serial.step()
    problem = Quadratic(lr=0.125, curvature=0.5, targets=(3.0,))
    adagrad = Downpour(optimizer="adagrad", rate=0.5, warmup=0, eps=1e-8)
    run = simulate(adagrad, problem, steps=10, start=[8.0, -2.0])
    assert torch.allclose(run.server.x, x, rtol=0, atol=1e-14)  # torch may fuse the last multiply and add


def test_the_server_s_rate_grows_over_the_first_pushes():
    ramp = [1 / 4, 2 / 4, 3 / 4, 1, 1, 1]
    ends = [simulate(Downpour(warmup=4), Slope(lr=0.5), steps=k).server.x.item() for k in range(1, 7)]
    assert ends == [-0.5 * sum(ramp[:k]) for k in range(1, 7)]


def test_the_ramp_counts_the_pushes_of_all_workers_together():
    run = simulate(Downpour(warmup=4), Slope(lr=0.5), workers=3, steps=2)
    assert run.server.x.item() == -0.5 * (1 / 4 + 2 / 4 + 3 / 4 + 1 + 1 + 1)


def test_the_server_has_the_worker_s_rate_unless_it_is_given_one():
    assert simulate(Downpour(warmup=0), Slope(lr=0.25), steps=2).server.x.item() == -0.25 * 2
    assert (
        simulate(Downpour(optimizer="sgd", warmup=0, rate=2.0), Slope(lr=0.25), steps=2).server.x.item()
        == -2.0 * 2
    )


@pytest.mark.parametrize("options", [{}, {"n_fetch": 3, "n_push": 2}, {"n_push": 4}])
def test_the_model_moves_by_the_sum_of_all_pushes_and_nothing_else(options):
    # whole numbers, so that any order of arrival gives the same bits
    pushes = Pushes()
    run = simulate(
        Downpour(optimizer="sgd", warmup=0, rate=1.0, **options),
        Quadratic(lr=1.0, targets=(0.0, 4.0, -7.0)),
        workers=3,
        steps=7,
        start=[64.0, 3.0],
        compute=Compute(mean=1.0, jitter=0.5),
        network=Network(latency=0.125, bandwidth=1e3),
        observers=[pushes],
    )
    moved = run.server.x - torch.tensor([64.0, 3.0], dtype=torch.float64)
    assert torch.equal(moved, -torch.stack(pushes.bodies).sum(0))
    assert run.server.version == len(pushes.bodies)
    assert run.server.merged == 3 * 7
    assert moved.abs().min() > 0


@pytest.mark.parametrize("workers", [2, 4])
def test_equal_workers_are_behind_by_one_push_of_each_other_worker(workers):
    # mean staleness tends to N - 1
    run = simulate(
        Downpour(), Slope(lr=0.0), workers=workers, steps=20, compute=Compute(mean=1.0, jitter=0.1)
    )
    pushes = run.server.meter.staleness
    assert sum(pushes.values()) == 20 * workers
    assert sum(late * n for late, n in pushes.items()) / (20 * workers) == pytest.approx(
        workers - 1, abs=0.25
    )


def test_all_workers_leave_with_the_server_s_model_of_that_moment():
    run = simulate(Downpour(warmup=0), Quadratic(lr=0.5), workers=3, steps=4, start=[8.0])
    assert run.worker(2).x.item() == run.server.x.item()


class StepEnds(Instrument):
    """When each worker has ended each of its steps."""

    def __init__(self):
        self.at = {}

    def step(self, node):
        self.at.setdefault(node.rank, []).append(node.transport.now())


# -- the server's momentum -------------------------------------------------------------------------


def test_momentum_by_hand():
    # velocity 3, 0.5 * 3 + 4 = 5.5, 0.5 * 5.5 + 12 = 14.75
    momentum = Downpour(optimizer="momentum", momentum=0.5, warmup=0)
    run = simulate(momentum, Given(lr=0.25, values=(3.0, 4.0, 12.0)), steps=3)
    assert run.server.x.item() == -0.25 * 3 - 0.25 * (0.5 * 3 + 4) - 0.25 * (0.5 * (0.5 * 3 + 4) + 12)


def test_momentum_is_of_all_workers_together_by_hand():
    # Gradients take 1 and 1.5 s; both saw 8 first, then worker 0 saw x1 and worker 1 saw x2.
    v1 = 8.0
    x1 = 8 - 0.25 * v1
    v2 = 0.5 * v1 + 8
    x2 = x1 - 0.25 * v2
    v3 = 0.5 * v2 + x1
    x3 = x2 - 0.25 * v3
    v4 = 0.5 * v3 + x2
    x4 = x3 - 0.25 * v4
    trail = Trail()
    momentum = Downpour(optimizer="momentum", momentum=0.5, warmup=0)
    compute = Compute(mean=1.0, slow={1: 1.5})
    simulate(
        momentum, Quadratic(lr=0.25), workers=2, steps=2, start=[8.0], compute=compute, observers=[trail]
    )
    assert trail.x == [x1, x2, x3, x4]


def test_one_replica_with_momentum_is_serial_sgd_with_momentum():
    momentum = Downpour(optimizer="momentum", momentum=0.9, warmup=0)
    serial = simulate(Single(), Drawn(lr=0.1, momentum=0.9), steps=20, start=[0.3, 0.7])
    run = simulate(momentum, Drawn(lr=0.1), steps=20, start=[0.3, 0.7])
    assert torch.equal(run.server.x, serial.worker(0).x)


def test_no_momentum_is_sgd():
    options = {"workers": 3, "steps": 6, "start": [0.9], "compute": Compute(mean=1.0, jitter=0.3)}
    none = simulate(Downpour(optimizer="momentum", momentum=0.0), Drawn(lr=0.1), **options)
    assert none.digest() == simulate(Downpour(optimizer="sgd"), Drawn(lr=0.1), **options).digest()


# -- overlap ---------------------------------------------------------------------------------------


def test_with_overlap_every_gradient_is_taken_one_fetch_earlier_by_hand():
    # the model is asked for before a gradient is computed and used after it, for the next one
    x = [8.0]
    for t in range(5):
        x.append(x[t] - 0.5 * x[max(0, t - 1)])
    trail = Trail()
    run = simulate(
        Downpour(overlap=True, warmup=0), Quadratic(lr=0.5), steps=5, start=[8.0], observers=[trail]
    )
    assert trail.x == x[1:] == [4.0, 0.0, -2.0, -2.0, -1.0]
    assert run.server.meter.staleness == {0: 1, 1: 4}
    assert run.worker(0).x.item() == -1.0


def test_with_overlap_a_step_takes_as_long_as_its_gradient():
    # A message takes 1/4 s, a gradient 1 s. Without overlap a step is a fetch, a gradient and a push; with it
    # only the first fetch is waited for.
    def ends(overlap):
        seen = StepEnds()
        downpour = Downpour(overlap=overlap)
        latency, compute = Network(latency=0.25), Compute(mean=1.0)
        simulate(downpour, Slope(), steps=4, network=latency, compute=compute, observers=[seen])
        return seen.at[0]

    assert ends(overlap=False) == [2.0, 4.0, 6.0, 8.0]
    assert ends(overlap=True) == [1.5, 2.5, 3.5, 4.5]


def test_with_overlap_a_push_that_takes_longer_than_a_gradient_is_waited_for_before_the_next():
    # a message takes 1 s, so a push is done 2 s after it was begun, a second after the next gradient is ready
    seen, latency = StepEnds(), Network(latency=1.0)
    downpour, compute = Downpour(n_fetch=100, overlap=True), Compute(mean=1.0)
    simulate(downpour, Slope(), steps=4, network=latency, compute=compute, observers=[seen])
    assert seen.at[0] == [3.0, 5.0, 7.0, 9.0]  # fetched at 2 s; pushes are begun at 3, 5, 7 and 9 s


def test_with_overlap_what_is_under_way_does_not_change_when_more_accrues():
    pushes = Pushes()
    downpour = Downpour(n_fetch=100, n_push=2, overlap=True, warmup=0)
    problem, latency = Given(values=(1.0, 2.0, 4.0, 8.0, 16.0)), Network(latency=0.75)
    run = simulate(downpour, problem, steps=5, network=latency, compute=Compute(mean=1.0), observers=[pushes])
    assert [p.item() for p in pushes.bodies] == [1 + 2, 4 + 8, 16]
    assert run.server.x.item() == -31.0


@pytest.mark.parametrize("seed", range(3))
def test_with_overlap_it_does_not_change_either_when_it_has_to_be_sent_again(seed):
    problem = Given(values=(1.0, 2.0, 4.0, 8.0, 16.0))
    run = simulate(
        Downpour(n_push=2, overlap=True, warmup=0),
        problem,
        steps=5,
        compute=Compute(mean=1.0),
        weather=Weather(loss=0.5),
        retry=0.75,
        seed=seed,
    )
    assert run.server.x.item() == -31.0


# -- warm start ------------------------------------------------------------------------------------


def test_the_first_worker_makes_so_many_updates_before_the_others_join_in_by_hand():
    # Gradients take 1 and 1.25 s; the minima are 0 and 4. Worker 1 has asked at 0 s and is answered at 2 s.
    x1 = 8 - 0.5 * (8 - 0)  # 1.00 s
    x2 = x1 - 0.5 * (x1 - 0)  # 2.00 s  worker 1 gets x2
    x3 = x2 - 0.5 * (x2 - 0)  # 3.00 s  worker 0's last
    x4 = x3 - 0.5 * (x2 - 4)  # 3.25 s  worker 1 saw x2
    x5 = x4 - 0.5 * (x4 - 4)  # 4.50 s
    x6 = x5 - 0.5 * (x5 - 4)  # 5.75 s
    trail, reads = Trail(), Reads()
    simulate(
        Downpour(warm_start=2, warmup=0),
        Quadratic(lr=0.5, targets=(0.0, 4.0)),
        workers=2,
        steps=3,
        start=[8.0],
        compute=Compute(mean=1.0, slow={1: 1.25}),
        observers=[trail, reads],
    )
    assert trail.x == [x1, x2, x3, x4, x5, x6] == [4.0, 2.0, 1.0, 2.0, 3.0, 3.5]
    assert reads.at[1][0] == 2.0


def test_the_others_join_in_when_the_first_worker_has_done_all_it_had_to():
    reads = Reads()
    downpour = Downpour(warm_start=100, warmup=0)
    run = simulate(downpour, Slope(), workers=3, steps=4, compute=Compute(mean=1.0), observers=[reads])
    assert (reads.at[1][0], reads.at[2][0]) == (4.0, 4.0)
    assert run.server.x.item() == -12.0


def test_the_others_join_in_when_the_first_worker_dies():
    reads = Reads()
    run = simulate(
        Downpour(warm_start=100, warmup=0),
        Slope(),
        workers=3,
        steps=4,
        compute=Compute(mean=1.0),
        faults=Faults(noticed_after=0.5).crash(rank=0, step=2),
        observers=[reads],
    )
    assert (reads.at[1][0], reads.at[2][0]) == (2.5, 2.5)
    assert run.server.x.item() == -12.0


# -- a worker that dies ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"n_push": 3}, {"n_fetch": 2, "n_push": 2}, {"overlap": True}, {"overlap": True, "n_push": 2}],
)
@pytest.mark.parametrize("step", [0, 4])
def test_every_batch_is_in_the_model_once_though_a_worker_dies(step, options):
    # also those that it had accrued and not pushed
    run = simulate(
        Downpour(warmup=0, **options),
        Census(steps=5),
        workers=3,
        steps=5,
        start=[0.0] * 15,
        compute=Compute(mean=1.0, jitter=0.3),
        faults=Faults().crash(rank=1, step=step),
    )
    assert run.server.x.tolist() == [1.0] * 15


def test_what_a_worker_had_accrued_is_not_lost_when_it_dies_with_its_share_done():
    # its six steps are done at 6 s, the last two are no full push; it dies at 8 s, while the other works
    run = simulate(
        Downpour(n_push=4, warmup=0),
        Slope(),
        workers=2,
        steps=6,
        compute=Compute(mean=1.0, slow={1: 4.0}),
        faults=Faults().kill(rank=0, moment=8.0),
    )
    assert (run.server.x.item(), run.server.merged) == (-12.0, 12.0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"n_fetch": 0}, "n_fetch=0 must be at least 1"),
        ({"n_push": 0}, "n_push=0 must be at least 1"),
        ({"optimizer": "adam"}, "optimizer='adam' must be one of sgd, momentum, adagrad"),
        ({"momentum": 1.0}, "momentum=1.0 must be at least 0 and below 1"),
        ({"warm_start": -1}, "warm_start=-1 must be at least 0"),
        ({"rate": 0.0}, "rate=0.0 must be above 0"),
    ],
)
def test_options_that_cannot_work_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        Downpour(**options)


@pytest.mark.parametrize("options", [{"rate": -1.0}, {"warmup": -1}, {"eps": -1.0}])
def test_options_that_would_train_backwards_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Downpour(**options)
