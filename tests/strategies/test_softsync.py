"""n-softsync: worked out on paper, its identities, and how old its gradients are."""

from dataclasses import dataclass

import pytest
import torch
from central import Census, Drawn, Lateness, Trail, mean

from sampling import mostly_soak
from shoal.codecs import CODECS
from shoal.core.replica import Gradient
from shoal.sim import Compute, Faults, Link, Network
from shoal.strategies import ASGD, Hierarchical, SoftSync, StalenessAware, Sync, SyncServer
from shoal.testing.problems import Quadratic, Slope, simulate
from slopes import OneGradient

PACES = Compute(mean=1.0, slow={1: 1.25, 2: 3.125})
WELLS = Quadratic(lr=0.5, targets=(0.0, 4.0, -8.0))


def test_two_gradients_at_a_time_by_hand():
    # Gradients take 1, 1.25 and 3.125 s, messages no time; nobody waits for a new version.
    x0 = 8.0
    # 1.000 s worker 0 saw x0, sees x0 again; 1.250 s worker 1 saw x0
    x1 = x0 - 0.5 * ((x0 - 0) + (x0 - 4)) / 2
    # 2.000 s worker 0 saw x0: 1 behind; 2.500 s worker 1 saw x1
    x2 = x1 - 0.5 * ((x0 - 0) + (x1 - 4)) / 2
    # 3.000 s worker 0 saw x1: 1 behind; 3.125 s worker 2 saw x0: 2 behind, so half its rate
    x3 = x2 - (0.5 * (x1 - 0) + 0.5 / 2 * (x0 + 8)) / 2
    # 3.750 s worker 1 saw x2: 1 behind; 6.250 s worker 2 saw x3
    x4 = x3 - 0.5 * ((x2 - 4) + (x3 + 8)) / 2
    # 9.375 s worker 2 saw x4, and nobody is left to give a second one
    x5 = x4 - 0.5 * (x4 + 8)
    trail = Trail()
    run = simulate(
        SoftSync(collect=2), WELLS, workers=3, steps=3, start=[x0], compute=PACES, observers=[trail]
    )
    assert [x1, x2, x3, x4, x5] == [5.0, 2.75, -0.5, -2.0625, -5.03125]
    assert trail.x == pytest.approx([x1, x2, x3, x4, x5], rel=1e-15)  # the mean has another order of rounding
    assert run.server.meter.staleness == {0: 5, 1: 3, 2: 1}
    assert run.server.merged == 9


def test_without_regard_to_age_every_gradient_has_the_full_rate():
    x1 = 5.0
    x2 = x1 - 0.5 * (8 + (x1 - 4)) / 2
    x3 = x2 - 0.5 * (x1 + (8 + 8)) / 2
    trail = Trail()
    softsync = SoftSync(collect=2, staleness_aware=False)
    simulate(softsync, WELLS, workers=3, steps=3, start=[8.0], compute=PACES, observers=[trail])
    assert trail.x[:3] == [x1, x2, x3]


def test_who_has_given_waits_for_a_new_version_if_told_so_by_hand():
    # Gradients take 1, 1.25 and 2.125 s.
    x0 = 8.0
    # 1.000 s worker 0 saw x0 and waits; 1.250 s worker 1 saw x0: both get x1
    x1 = x0 - 0.5 * ((x0 - 0) + (x0 - 4)) / 2
    # 2.125 s worker 2 saw x0, 1 behind, and waits; 2.250 s worker 0 saw x1 and is done: worker 2 gets x2
    x2 = x1 - 0.5 * ((x0 + 8) + (x1 - 0)) / 2
    # 2.500 s worker 1 saw x1, 1 behind, and is done; 4.375 s worker 2 saw x2
    x3 = x2 - 0.5 * ((x1 - 4) + (x2 + 8)) / 2
    trail = Trail()
    run = simulate(
        SoftSync(collect=2, wait=True),
        WELLS,
        workers=3,
        steps=2,
        start=[x0],
        compute=Compute(mean=1.0, slow={1: 1.25, 2: 2.125}),
        observers=[trail],
    )
    assert trail.x == [x1, x2, x3] == [5.0, -0.25, -2.4375]
    assert run.server.meter.staleness == {0: 4, 1: 2}
    assert run.seconds == 4.375


def test_the_mean_is_weighted_by_the_samples_behind_each_gradient():
    x1 = 8 - 0.5 * (1 * (8 - 0) + 3 * (8 - 4)) / (1 + 3)
    x2 = x1 - 0.5 * (1 * (x1 - 0) + 3 * (x1 - 4)) / (1 + 3)
    problem = Quadratic(lr=0.5, targets=(0.0, 4.0), counts=(1, 3))
    run = simulate(SoftSync(wait=True), problem, workers=2, steps=2, start=[8.0])
    assert run.server.x.item() == x2 == 4.25


def test_one_worker_that_has_to_give_several_gives_them_all_at_the_same_place():
    x1 = 8 - 0.5 * (8 + 8 + 8 + 8) / 4
    x2 = x1 - 0.5 * (x1 + x1) / 2  # all that was left at the end
    trail = Trail()
    simulate(SoftSync(collect=4), Quadratic(lr=0.5), steps=6, start=[8.0], observers=[trail])
    assert trail.x == [x1, x2] == [4.0, 2.0]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("counts", [(1,), (1, 3)])
def test_collecting_from_all_who_wait_is_synchronous_sgd_exactly(workers, counts):
    problem = Quadratic(lr=0.5, targets=(0.0, 4.0, -8.0, 12.0), counts=counts)
    options = {"workers": workers, "steps": 6, "start": [8.0, -2.0]}
    compute = Compute(mean=1.0, jitter=0.5)
    run = simulate(SoftSync(wait=True), problem, compute=compute, network=Network(latency=0.1), **options)
    assert torch.equal(run.server.x, simulate(Sync(), problem, **options).worker(0).x)
    assert run.server.meter.staleness == {0: 6 * workers}
    assert run.server.version == 6


def test_saying_how_many_workers_there_are_is_the_default():
    options = {"workers": 3, "steps": 5, "start": [0.9], "compute": Compute(1.0, jitter=0.3)}
    given = simulate(SoftSync(collect=3), Drawn(lr=0.1), **options)
    assert given.digest() == simulate(SoftSync(), Drawn(lr=0.1), **options).digest()


@pytest.mark.parametrize(
    ("softsync", "other"),
    [
        (SoftSync(collect=1, staleness_aware=False), ASGD()),
        (SoftSync(collect=1), StalenessAware()),
        (SoftSync(collect=1, wait=True), StalenessAware()),  # there is a new version at once
    ],
)
def test_one_gradient_at_a_time_is_asynchronous_sgd(softsync, other):
    options = {
        "workers": 4,
        "steps": 6,
        "start": [0.9, -0.4],
        "compute": Compute(mean=1.0, jitter=0.3),
        "network": Network(latency=0.1),
    }
    here, there = simulate(softsync, Drawn(lr=0.125), **options), simulate(other, Drawn(lr=0.125), **options)
    assert max(here.server.meter.staleness) > 1
    assert here.server.meter.staleness == there.server.meter.staleness
    # (g * count * rate) / count may round otherwise than g * rate
    assert torch.allclose(here.server.x, there.server.x, rtol=0, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("collect", "average", "oldest"),
    mostly_soak([(30, 0.97, 2), (10, 2.9, 6), (2, 14.5, 30), (1, 29.0, 60)], few=2),
)
def test_thirty_equal_workers_are_behind_by_as_many_versions_as_the_paper_says(collect, average, oldest):
    # n-softsync collects N / n: about n versions, hardly ever more than 2 n
    lateness = Lateness()
    simulate(
        SoftSync(collect=collect),
        Slope(lr=0.0),
        workers=30,
        steps=40,
        compute=Compute(mean=1.0, jitter=0.1),
        observers=[lateness],
    )
    assert mean(lateness.in_the_middle()) == pytest.approx(average, rel=0.03)
    assert mean(lateness.in_the_middle()) == pytest.approx(29 / collect, rel=0.03)
    assert max(lateness.versions) <= oldest
    assert sum(late > 2 * 30 / collect for late in lateness.versions) == 0


def test_collecting_from_all_without_waiting_is_not_synchronous():
    lateness = Lateness()
    compute = Compute(mean=1.0, jitter=0.1)
    simulate(SoftSync(), Slope(lr=0.0), workers=6, steps=10, compute=compute, observers=[lateness])
    assert {0, 1} <= set(lateness.versions) <= {0, 1, 2}


def test_a_worker_that_is_told_that_all_is_done_gets_what_came_last_too():
    # Four gradients, three at a time: worker 1's last is left over. Its word that it has no more is still on
    # the way when the server knows that every batch was done.
    far = Link(latency=0.5)
    run = simulate(
        SoftSync(collect=3),
        Slope(lr=0.5, gradients=(1.0, 8.0)),
        workers=2,
        steps=2,
        compute=Compute(mean=1.0, slow={1: 3.0}),
        network=Network(links={(1, 2): far, (2, 1): far}),
    )
    assert run.server.version == 2
    assert [run.worker(k).x.item() for k in (0, 1)] == [run.server.x.item()] * 2


@pytest.mark.parametrize("softsync", [SoftSync(), SoftSync(wait=True), SoftSync(collect=2, wait=True)])
@pytest.mark.parametrize("step", [0, 2])
def test_every_batch_is_in_the_model_though_a_worker_dies(softsync, step):
    run = simulate(
        softsync,
        Census(steps=4),
        workers=3,
        steps=4,
        start=[0.0] * 12,
        compute=Compute(mean=1.0, jitter=0.3),
        faults=Faults().crash(rank=0, step=step),
    )
    assert all(share > 0 for share in run.server.x.tolist())
    assert run.server.merged == 12


def test_those_who_wait_go_on_without_the_dead_by_hand():
    # Gradients take 1, 1.25 and 1.5 s. Worker 2 dies at 1.5 s in its second step and is missed at 2.5 s, when
    # the others have given theirs. The two that are left over are worker 2's: the others do one each.
    wells, trail = Quadratic(lr=0.5, targets=(0.0, 4.0, -8.0)), Trail()
    x1 = 8 - 0.5 * ((8 - 0) + (8 - 4) + (8 + 8)) / 3
    x2 = x1 - 0.5 * ((x1 - 0) + (x1 - 4)) / 2
    x3 = x2 - 0.5 * ((x2 - 0) + (x2 - 4)) / 2
    x4 = x3 - 0.5 * ((x3 + 8) + (x3 + 8)) / 2
    simulate(
        SoftSync(wait=True),
        wells,
        workers=3,
        steps=3,
        start=[8.0],
        compute=Compute(mean=1.0, slow={1: 1.25, 2: 1.5}),
        faults=Faults().crash(rank=2, step=1),
        observers=[trail],
    )
    assert trail.x == pytest.approx([x1, x2, x3, x4], rel=1e-15)


def test_waiting_for_more_gradients_than_there_are_workers_is_refused():
    with pytest.raises(ValueError, match=r"SoftSync\(collect=5, wait=True\) would wait for ever") as error:
        simulate(SoftSync(collect=5, wait=True), Slope(), workers=4)
    assert "Try collect=4" in str(error.value)
    assert simulate(SoftSync(collect=5), Slope(), workers=4, steps=5).server.version == 4  # nobody waits


def test_collecting_none_is_refused():
    with pytest.raises(ValueError, match="collect=0 must be at least 1"):
        SoftSync(collect=0)


@dataclass(frozen=True)
class Overflowing(Slope):
    """Nothing counts in the first step, as when mixed precision overflows everywhere."""

    def replica(self, rank, start):
        replica = super().replica(rank, start)
        compute = replica.gradient

        async def gradient():
            g = await compute()
            return Gradient(g.vector * 0, 0, g.loss) if replica._step == 1 else g

        replica.gradient = gradient
        return replica


@pytest.mark.parametrize("strategy", [SoftSync(wait=True), SyncServer(), Hierarchical(groups=2)])
def test_what_a_codec_holds_back_is_not_sent_with_a_gradient_of_no_sample(strategy):
    """Worker 0's gradient travels one element a step, but for step 1; half of it counts."""
    problem = OneGradient(gradients=[(4.0, 3.0, 2.0, 1.0), (0.0,) * 4], overflowing=(0,))
    options = {"workers": 2, "start": [0.0] * 4, "codec": CODECS.read("top_k:density=0.25")}
    ends = [simulate(strategy, problem, steps=steps, **options).server.x.tolist() for steps in (2, 3, 5)]
    assert ends == [[-2.0, 0.0, 0.0, 0.0], [-2.0, -1.5, 0.0, 0.0], [-2.0, -1.5, -1.0, -0.5]]


@pytest.mark.parametrize("strategy", [SoftSync(), SyncServer(), Hierarchical(groups=2)])
def test_a_round_without_a_sample_changes_nothing(strategy):
    done = simulate(strategy, Overflowing(gradients=(1.0,)), workers=2, steps=3)
    assert done.server.x == -2.0
