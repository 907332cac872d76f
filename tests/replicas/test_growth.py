"""Batches that grow instead of a rate that falls: how many updates, at which rate, with which noise."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import shoal
from sampling import mostly_soak
from shoal.core.growth import Growth
from shoal.core.seeds import stream
from shoal.core.task import Data, Task
from shoal.engine.engine import Instrument
from shoal.replicas.batches import Batches
from shoal.replicas.module import build_model, build_replica, steps_of
from shoal.sim import Compute, Simulation
from shoal.strategies import BMUF, STRATEGIES, Single, Sync
from shoal.testing import blobs

TWICE = Growth.parse("2@2,2@3")


# -- the schedule ----------------------------------------------------------------------------------


def test_the_batch_grows_after_the_epochs_that_are_named():
    growth = Growth.parse("2@10, 1.5@20")
    assert [growth.batch(32, epoch) for epoch in (0, 9, 10, 19, 20, 100)] == [32, 32, 64, 64, 96, 96]
    assert {growth.rate(32, epoch) for epoch in range(30)} == {1.0}
    assert str(growth) == "2@10,1.5@20"


def test_beyond_the_largest_batch_the_rate_is_divided_instead():
    growth = Growth.parse("2@1,4@2,2@3", largest=96)
    assert [growth.batch(32, epoch) for epoch in range(4)] == [32, 64, 96, 96]
    assert [growth.rate(32, epoch) for epoch in range(4)] == [1.0, 1.0, 96 / 256, 96 / 512]
    noise = [growth.rate(32, epoch) / growth.batch(32, epoch) for epoch in range(4)]
    assert noise == [1 / 32, 1 / 64, 1 / 256, 1 / 512]  # as if the rate had been divided by 2, 4 and 2


def test_nothing_grows_unless_told():
    assert not Growth()
    assert (Growth().batch(7, 100), Growth().rate(7, 100)) == (7, 1.0)


@pytest.mark.parametrize(
    ("text", "largest", "says"),
    [
        ("2", None, "'2' in grow_batch '2' is not a factor and an epoch, as in 2@10"),
        ("2@ten", None, "is not a factor and an epoch"),
        ("2@0", None, "name epochs from 1 on, each once and in their order"),
        ("2@20,2@10", None, "each once and in their order"),
        ("2@10,2@10", None, "each once"),
        ("1@10", None, "a batch grows by factors above 1"),
        ("0.5@10", None, "above 1"),
        (None, 64, "largest_batch=64 belongs to a batch that grows; say how"),
    ],
)
def test_schedules_that_cannot_be_are_refused(text, largest, says):
    with pytest.raises(ValueError, match=says):
        Growth.parse(text, largest)


def test_a_largest_batch_below_the_first_is_refused():
    with pytest.raises(ValueError, match="largest_batch=8 is below the first batch, 16"):
        shoal.run(blobs(), "sync", grow_batch="2@1", largest_batch=8)


def test_blocks_of_a_fixed_length_are_refused():
    with pytest.raises(ValueError, match=r"grow_batch .* blocks"):
        shoal.run(blobs(), BMUF(blocks=4), grow_batch="2@1", transport="sim")


# -- the data --------------------------------------------------------------------------------------


def rows(samples: int) -> Tensor:
    return torch.arange(samples)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_every_sample_comes_once_in_every_epoch_whatever_the_batch(workers, fixed):
    x = rows(100)
    each = [
        Batches(x, x, batch=4, rank=k, workers=workers, seed=0, fixed=fixed, growth=TWICE)
        for k in range(workers)
    ]
    for epoch, batch in enumerate((4, 4, 8, 16, 16)):
        task = Task("rows", nn.Identity, lambda: None, batch=batch)
        steps = steps_of(task, Sync(), 100, workers, 1)
        seen = [[own.next()[0] for _ in range(steps)] for own in each]
        assert torch.equal(torch.cat([part for own in seen for part in own]).sort().values, x), epoch
        assert all(abs(len(part) - batch) <= batch for own in seen for part in own)
    assert all(own.position == each[0].position for own in each)


def test_where_the_batch_stands_follows_from_the_position_alone():
    straight = Batches(rows(64), rows(64), batch=4, rank=0, workers=1, seed=0, growth=TWICE)
    sizes = [len(straight.next()[0]) for _ in range(16 + 16 + 8 + 4)]
    assert sizes == [4] * 32 + [8] * 8 + [16] * 4
    resumed = Batches(rows(64), rows(64), batch=4, rank=0, workers=1, seed=0, growth=TWICE)
    resumed.position = 39
    straight.position = 39
    assert all(torch.equal(straight.next()[0], resumed.next()[0]) for _ in range(20))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_number_of_updates_is_the_sum_over_phases_of_epochs_times_samples_over_batch(workers):
    task = replace(blobs(), data=even, batch=8, growth=TWICE)
    result = shoal.run(task, "sync", workers=workers, epochs=5, transport="sim")
    updates = (2 * 256 / 8 + 1 * 256 / 16 + 2 * 256 / 32) / workers
    assert {node["steps"] for node in result.nodes} == {updates}
    assert result.samples == 5 * 256


def even() -> Data:
    data = blobs().data()
    return Data(data.x[:256], data.y[:256], data.test_x, data.test_y)


class Rates(Instrument):
    """The learning rate of every step of worker 0."""

    def __init__(self):
        self.seen = []

    def step(self, node):
        if node.rank == 0:
            self.seen.append(node.replica.lr)


def simulate(task, strategy, workers, epochs, observers):
    data, model = task.data(), build_model(task, 0)
    steps = steps_of(task, strategy, len(data.x), workers, epochs)
    return Simulation(
        strategy,
        lambda rank: build_replica(task, model, data, strategy, rank, workers, 0),
        workers=workers,
        steps=steps,
        observers=observers,
    ).run()


def test_the_learning_rate_is_divided_where_the_batch_may_not_grow():
    task = replace(blobs(), data=even, batch=32, lr=0.5, growth=Growth.parse("2@1,2@2,2@3", largest=64))
    rates = Rates()
    simulate(task, Sync(), 1, 4, [rates])
    assert rates.seen == [0.5] * 8 + [0.5] * 4 + [0.25] * 4 + [0.125] * 4


# -- under every strategy --------------------------------------------------------------------------

PORTIONED = ("sandblaster",)  # its batches are portions of one sum: it refuses


def weights(result: shoal.Result) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("word", mostly_soak([w for w in STRATEGIES if w not in PORTIONED], 6))
def test_it_works_under_every_strategy(word):
    workers = 1 if word == "single" else 2
    settings = {"workers": workers, "epochs": 4, "transport": "sim", "batch": 8}
    result = shoal.run(blobs(), word, grow_batch="2@1,2@2", largest_batch=16, **settings)
    assert result.samples == 4 * 300
    assert result.test_accuracy > 70
    assert result.config["grow_batch"] == "2@1,2@2" and result.config["largest_batch"] == 16


@pytest.mark.parametrize(
    "strategy",
    mostly_soak([BMUF(period=4), Sync(), shoal.EASGD(period=4, synchronous=True)], few=1),
    ids=repr,
)
def test_resuming_across_a_milestone_is_bit_equal(strategy, tmp_path):
    settings = {"workers": 3, "transport": "sim", "grow_batch": "2@1,2@2", "largest_batch": 40}
    shoal.run(blobs(), strategy, epochs=1, checkpoint=tmp_path, **settings)
    resumed = shoal.run(blobs(), strategy, epochs=4, checkpoint=tmp_path, every=2, **settings)
    straight = shoal.run(blobs(), strategy, epochs=4, **settings)
    assert torch.equal(weights(resumed), weights(straight))
    assert resumed.samples == straight.samples == 4 * 300


def test_another_schedule_is_another_run(tmp_path):
    settings = {"workers": 2, "transport": "sim", "checkpoint": tmp_path}
    shoal.run(blobs(), "sync", **settings)
    with pytest.raises(shoal.CheckpointError, match=r"grow_batch=None \(now '2@1'\)"):
        shoal.run(blobs(), "sync", epochs=2, grow_batch="2@1", **settings)


def test_in_virtual_time_a_gradient_takes_time_in_proportion_to_its_samples():
    task = replace(blobs(), data=even, batch=16)
    settings = {"epochs": 2, "transport": "sim", "compute": Compute(1.0)}
    assert shoal.run(task, "single", grow_batch="2@1", **settings).seconds == 16 * 1.0 + 8 * 2.0


@pytest.mark.slow
def test_real_processes_learn_the_same():
    settings = {"workers": 2, "epochs": 3, "grow_batch": "2@1", "largest_batch": 24, "collective": "stripes"}
    real, virtual = (shoal.run(blobs(), "sync", transport=t, **settings) for t in ("processes", "sim"))
    assert torch.equal(weights(real), weights(virtual))


# -- noise -----------------------------------------------------------------------------------------


class Point(nn.Module):
    """A point that is drawn to the samples: a quadratic, whose gradient is the distance to their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        return self.at - x


def cloud() -> Data:
    x = torch.randn(16384, 64, generator=stream(0, "cloud"))
    x -= x.mean(dim=0)
    return Data(x, torch.zeros(len(x)), x[:0], torch.zeros(0))


def half_square(out: Tensor, y: Tensor) -> Tensor:
    return out.square().sum(dim=1).mean() / 2


class Spread(Instrument):
    """The mean square of the point's coordinates after every step."""

    def __init__(self):
        self.squares = []

    def step(self, node):
        self.squares.append(node.x.square().mean().item())


@pytest.mark.slow
@pytest.mark.soak
def test_the_stationary_variance_depends_on_rate_over_batch_only_to_first_order():
    """On a noisy quadratic it is lr / (2 - lr) / B, in each of 64 coordinates, about lr / 2B.

    A square forgets itself in about 1 / lr steps, so the fewest here, 412 steps at lr = 1/20, are worth
    64 * 412 / 20 = 1300 independent squares: a standard error of at most sqrt(2 / 1300) = 4 %. The limit of
    16 % is four of them: of 10,000 other draws, fewer than one would fail in each comparison.
    """
    first = {"batch": 16, "lr": 0.05}
    variance = {}
    for name, largest in (("batch grows", None), ("rate falls", 16)):
        growth = Growth.parse("2@1", largest)
        task = Task("cloud", Point, cloud, loss=half_square, growth=growth, **first)
        seen = Spread()
        simulate(task, Single(), 1, 2, [seen])
        before, after = seen.squares[:1024], seen.squares[1024:]
        assert len(after) == (512 if largest is None else 1024)
        variance[name] = sum(after[100:]) / len(after[100:])
        expected = 0.05 / (2 - 0.05) / 16
        assert sum(before[200:]) / len(before[200:]) == pytest.approx(expected, rel=0.16)
    assert variance["batch grows"] == pytest.approx(expected / 2, rel=0.16)
    assert variance["rate falls"] == pytest.approx(variance["batch grows"], rel=0.16 * 2**0.5)
