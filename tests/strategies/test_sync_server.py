"""Synchronous SGD through a server, with backup workers: worked out on paper, and its identities."""

import pytest
import torch
from central import Census, Drawn, Reads, Trail

from shoal.codecs import CODECS
from shoal.engine.engine import Instrument
from shoal.sim import Compute, Faults, Network
from shoal.strategies import Sync, SyncServer
from shoal.testing.problems import Quadratic, Slope, simulate
from slopes import OneGradient

WELLS = Quadratic(lr=0.5, targets=(0.0, 4.0, -8.0))
PACES = Compute(mean=1.0, slow={1: 1.25, 2: 2.125})


class Path(Instrument):
    """Where worker 0 stands after each step."""

    def __init__(self):
        self.x = []

    def step(self, node):
        if node.rank == 0:
            self.x.append(node.x.tolist())


def test_every_version_is_the_mean_gradient_of_all_by_hand():
    # Gradients take 1, 1.25 and 2.125 s, messages no time; the minima are 0, 4 and -8; 1, 3 and 4 samples.
    x1 = 8 - 0.5 * (1 * (8 - 0) + 3 * (8 - 4) + 4 * (8 + 8)) / 8
    x2 = x1 - 0.5 * (1 * (x1 - 0) + 3 * (x1 - 4) + 4 * (x1 + 8)) / 8
    x3 = x2 - 0.5 * (1 * (x2 - 0) + 3 * (x2 - 4) + 4 * (x2 + 8)) / 8
    reads = Reads()
    problem = Quadratic(lr=0.5, targets=(0.0, 4.0, -8.0), counts=(1, 3, 4))
    run = simulate(SyncServer(), problem, workers=3, steps=3, start=[8.0], compute=PACES, observers=[reads])
    assert reads.x == {rank: [8.0, x1, x2, x3] for rank in range(3)}
    assert reads.at == {rank: [0.0, 2.125, 4.25, 6.375] for rank in range(3)}
    assert (x1, x2, x3) == (2.75, 0.125, -1.1875)
    assert (run.server.version, run.server.merged, run.server.meter.dropped) == (3, 24.0, 0)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("counts", [(1,), (1, 3)])
def test_without_backup_it_is_synchronous_sgd_exactly(workers, counts):
    problem = Quadratic(lr=0.5, targets=(0.0, 4.0, -8.0, 12.0), counts=counts)
    options = {"workers": workers, "steps": 6, "start": [8.0, -2.0]}
    compute = Compute(mean=1.0, jitter=0.5)
    run = simulate(SyncServer(), problem, compute=compute, network=Network(latency=0.1), **options)
    assert torch.equal(run.server.x, simulate(Sync(), problem, **options).worker(0).x)
    assert run.server.meter.staleness == {0: 6 * workers}
    assert run.server.meter.dropped == 0


@pytest.mark.parametrize("workers", [3, 7])
def test_with_awkward_numbers_it_is_synchronous_sgd_up_to_rounding(workers):
    problem = Drawn(lr=0.1, counts=(2, 5, 1))
    options = {"workers": workers, "steps": 5, "start": [0.9, -0.4, 0.2]}
    run = simulate(SyncServer(), problem, compute=Compute(1.0, jitter=0.5), **options)
    assert torch.allclose(run.server.x, simulate(Sync(), problem, **options).worker(0).x, rtol=1e-14)


def test_speed_and_latency_change_nothing_but_the_order_of_a_sum():
    options = {"workers": 4, "steps": 6, "start": [0.9, -0.4]}
    plain = simulate(SyncServer(), Drawn(lr=0.1), **options)
    for loose in ({"compute": Compute(1.0, jitter=0.9)}, {"network": Network(latency=7.0, bandwidth=1e3)}):
        other = simulate(SyncServer(), Drawn(lr=0.1), **options, **loose)
        assert torch.allclose(other.server.x, plain.server.x, rtol=1e-14)


def test_with_one_backup_the_slowest_gradient_is_dropped_by_hand():
    x0 = 8.0
    # 1.250 s worker 1 is the second: both get x1
    x1 = x0 - 0.5 * ((x0 - 0) + (x0 - 4)) / 2
    # 2.125 s worker 2 saw x0: too late; it gets x1. 2.500 s worker 1 is the second again
    x2 = x1 - 0.5 * ((x1 - 0) + (x1 - 4)) / 2
    # 3.750 s worker 1 is the second; both have done their share
    x3 = x2 - 0.5 * ((x2 - 0) + (x2 - 4)) / 2
    # 4.250 s worker 2 saw x1: too late; it gets x3, and at 6.375 s nobody else is there to be first
    x4 = x3 - 0.5 * (x3 + 8)
    trail = Trail()
    run = simulate(
        SyncServer(backup=1), WELLS, workers=3, steps=3, start=[x0], compute=PACES, observers=[trail]
    )
    assert trail.x == [x1, x2, x3, x4] == [5.0, 3.5, 2.75, -2.625]
    assert run.server.meter.dropped == 2
    assert run.server.merged == 7
    assert run.seconds == 6.375


@pytest.mark.parametrize("backup", [1, 2])
def test_with_the_same_survivors_at_each_step_it_is_synchronous_sgd_on_them(backup):
    # the backup workers are so slow that none of their gradients is ever in time
    survivors, steps = 3, 6
    problem, path, trail = Drawn(lr=0.1, counts=(2, 5, 1)), Path(), Trail()
    simulate(Sync(), problem, workers=survivors, steps=steps, start=[0.9, -0.4], observers=[path])
    run = simulate(
        SyncServer(backup=backup),
        problem,
        workers=survivors + backup,
        steps=steps,
        start=[0.9, -0.4],
        compute=Compute(mean=1.0, jitter=0.3, slow={3: 100.0, **({4: 101.0} if backup == 2 else {})}),
        observers=[trail],
    )
    for here, there in zip(trail.x[:steps], path.x, strict=True):
        assert here == pytest.approx(there, rel=1e-14)
    assert run.server.meter.dropped == backup  # the first of each: when the others are done, both count


def test_who_was_late_goes_on_from_the_newest_version():
    reads = Reads()
    compute = Compute(mean=1.0, slow={2: 2.5})
    run = simulate(SyncServer(backup=1), Slope(), workers=3, steps=4, compute=compute, observers=[reads])
    # at 2.5 s two versions have gone by, at 5.0 s all four that the others make
    assert reads.x[2][:3] == [0.0, -2.0, -4.0]
    assert run.server.meter.staleness == {0: 8 + 2, 2: 2}
    assert run.server.meter.dropped == 2


def test_a_backup_makes_a_step_as_long_as_the_second_slowest():
    def first_versions_at(backup):
        reads = Reads()
        strategy = SyncServer(backup=backup)
        simulate(strategy, WELLS, workers=3, steps=4, start=[8.0], compute=PACES, observers=[reads])
        return reads.at[0][:4]

    assert first_versions_at(0) == [0.0, 2.125, 4.25, 6.375]
    assert first_versions_at(1) == [0.0, 1.25, 2.5, 3.75]
    assert first_versions_at(2) == [0.0, 1.0, 2.0, 3.0]


def test_the_others_go_on_without_the_dead_by_hand():
    # Gradients take 1 and 1.25 s. Worker 1 dies at 1.25 s in its second and last step, missed at 3.25 s.
    x1 = 8 - 0.5 * ((8 - 0) + (8 - 4)) / 2
    x2 = x1 - 0.5 * (x1 - 0)  # 3.25 s  worker 0 alone; it gets worker 1's batch
    x3 = x2 - 0.5 * (x2 - 4)  # 4.25 s
    trail = Trail()
    run = simulate(
        SyncServer(),
        WELLS,
        workers=2,
        steps=2,
        start=[8.0],
        compute=Compute(mean=1.0, slow={1: 1.25}),
        faults=Faults(noticed_after=2.0).crash(rank=1, step=1),
        observers=[trail],
    )
    assert trail.x == [x1, x2, x3] == [5.0, 2.5, 3.25]
    assert (run.server.merged, run.seconds) == (4.0, 4.25)


@pytest.mark.parametrize("shards", [1, 2])
def test_what_a_codec_holds_back_is_not_dropped_with_a_late_gradient_by_hand(shards):
    # The first of two counts. Worker 0's gradient travels one element a step, in two shards one of each half;
    # worker 1's is 0, and takes 1.3 s. Worker 0 is first at 1 s and pauses a second in its next step: it is
    # late at 3 s, at 4 s again, and first at 5 and 6 s.
    trail = Trail()
    run = simulate(
        SyncServer(backup=1),
        OneGradient(gradients=[(4.0, 3.0, 2.0, 1.0), (0.0,) * 4]),
        workers=2,
        steps=5,
        start=[0.0] * 4,
        compute=Compute(mean=1.0, slow={1: 1.3}),
        faults=Faults().pause(rank=0, step=1, seconds=1.0),
        codec=CODECS.read("top_k:density=0.25"),
        shards=shards,
        observers=[trail],
    )
    assert run.worker(0).t == run.worker(1).t == 5
    if shards == 1:
        assert trail.x[:3] == [[-4.0, 0.0, 0.0, 0.0]] * 3
        assert trail.x[3:5] == [[-4.0, -3.0, 0.0, 0.0], [-4.0, -3.0, -2.0, 0.0]]
    else:
        assert run.solution.tolist() == [-4.0, -3.0, -2.0, -1.0]


@pytest.mark.parametrize("step", [0, 2, 3])
@pytest.mark.parametrize("rank", [0, 2])
def test_every_batch_is_in_the_model_though_a_worker_dies(rank, step):
    run = simulate(
        SyncServer(),
        Census(steps=4),
        workers=3,
        steps=4,
        start=[0.0] * 12,
        compute=Compute(mean=1.0, jitter=0.3),
        faults=Faults().crash(rank=rank, step=step),
    )
    assert all(share > 0 for share in run.server.x.tolist())
    assert (run.server.merged, run.server.meter.dropped) == (12.0, 0)


def test_a_backup_takes_the_place_of_a_dead_worker_before_it_is_missed():
    # worker 2 dies at once; with a backup the others never wait for it
    reads = Reads()
    simulate(
        SyncServer(backup=1),
        Slope(lr=0.5),
        workers=3,
        steps=3,
        compute=Compute(mean=1.0),
        faults=Faults(noticed_after=50.0).crash(rank=2, step=0),
        observers=[reads],
    )
    assert reads.at[0][:3] == [0.0, 1.0, 2.0]


def test_a_dead_worker_uses_up_a_backup_by_hand():
    # Of 2 + 1 workers the first 2 count. When worker 2 is dead and missed, that is both that are left: none
    # is too slow any more. Gradients take 1 and 1.25 s; the two batches that worker 2 left come last.
    x1 = 8 - 0.5 * ((8 - 0) + (8 - 4)) / 2
    x2 = x1 - 0.5 * ((x1 - 0) + (x1 - 4)) / 2
    x3 = x2 - 0.5 * ((x2 + 8) + (x2 + 8)) / 2
    trail = Trail()
    run = simulate(
        SyncServer(backup=1),
        WELLS,
        workers=3,
        steps=2,
        start=[8.0],
        compute=Compute(mean=1.0, slow={1: 1.25}),
        faults=Faults(noticed_after=0.25).crash(rank=2, step=0),
        observers=[trail],
    )
    assert trail.x == [x1, x2, x3] == [5.0, 3.5, -2.25]
    assert (run.server.meter.dropped, run.server.merged) == (0, 6.0)


@pytest.mark.parametrize("backup", [3, 4])
def test_more_backups_than_workers_can_be_missed_are_refused(backup):
    text = rf"SyncServer\(backup={backup}\) leaves no gradient of 3 workers to use"
    with pytest.raises(ValueError, match=text):
        simulate(SyncServer(backup=backup), Slope(), workers=3)
    simulate(SyncServer(backup=2), Slope(), workers=3)


def test_a_negative_backup_is_refused():
    with pytest.raises(ValueError, match="backup=-1 must be at least 0"):
        SyncServer(backup=-1)
