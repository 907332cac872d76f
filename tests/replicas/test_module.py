"""A task's model at a worker: its initial weights; balance, by which the fastest do most of the samples."""

from dataclasses import replace

import pytest
import torch

import shoal
from marks import SAMPLES, marks
from sampling import mostly_soak
from shoal.core.replica import NOISE
from shoal.launch.drive import drive
from shoal.replicas.batches import Batches, apportion, part_of
from shoal.replicas.module import build_model, build_replica
from shoal.sim import Compute
from shoal.strategies import Local
from shoal.testing import Slope, blobs, simulate

AVERAGING = [
    shoal.Sync(),
    shoal.Local(period=8),
    shoal.BMUF(period=8, warmup=0),
    shoal.DiLoCo(period=8),
    shoal.EASGD(period=8, synchronous=True),
]
SLOW = Compute(mean=0.02, slow={3: 5.0})
IDEAL = 3.2 / 0.02  # batches a second: the sum of the four workers' own speeds


def weights(result: shoal.Result) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in result.model.parameters()])


# -- shares --------------------------------------------------------------------------------------------


def test_shares_are_in_proportion_to_speeds():
    assert apportion(128, [1.0, 1.0, 1.0, 0.2]) == [40, 40, 40, 8]
    assert apportion(128, [5.0, 5.0, 5.0, 5.0]) == [32, 32, 32, 32]


def test_what_rounding_leaves_goes_to_the_largest_remainders():
    assert apportion(10, [1.0, 1.0, 1.0]) == [4, 3, 3]  # 3.33 each: the first of equals
    assert apportion(10, [2.0, 3.0, 4.0]) == [2, 3, 5]  # 2.22, 3.33, 4.44


def test_everyone_gets_at_least_one():
    assert apportion(5, [100.0, 1.0, 1.0]) == [3, 1, 1]
    assert apportion(3, [100.0, 1.0, 1.0]) == [1, 1, 1]


def test_shares_always_add_up():
    draw = torch.Generator().manual_seed(0)
    for _ in range(300):
        workers = int(torch.randint(1, 9, (1,), generator=draw))
        total = workers + int(torch.randint(0, 200, (1,), generator=draw))
        shares = apportion(total, torch.rand(workers, generator=draw).pow(3).add(1e-3).tolist())
        assert sum(shares) == total
        assert min(shares) >= 1


def test_every_sample_comes_once_an_epoch_also_where_speeds_change_on_the_way():
    x = torch.arange(300)
    workers = [Batches(x, x, batch=16, rank=k, workers=3, seed=0) for k in range(3)]
    seen = []
    for step in range(2 * workers[0].steps_per_epoch):
        for each in workers:
            if step in (2, 9):
                each.weigh([3.0, 1.0, step])
            seen.append(each.next()[0])
    epoch = len(seen) // 2
    assert torch.equal(torch.cat(seen[:epoch]).sort().values, x)
    assert torch.equal(torch.cat(seen[epoch:]).sort().values, x)


# -- in virtual time -----------------------------------------------------------------------------------


def test_a_gradient_takes_time_in_proportion_to_its_samples():
    problem = Slope(counts=(8, 32))
    plain = simulate(Local(), problem, workers=2, steps=1, compute=Compute(mean=1.0))
    scaled = simulate(Local(), problem, workers=2, steps=1, compute=Compute(mean=1.0), batch=16)
    assert [plain.worker(k).meter.compute_seconds for k in range(2)] == [1.0, 1.0]
    assert [scaled.worker(k).meter.compute_seconds for k in range(2)] == [0.5, 2.0]


@pytest.mark.parametrize("strategy", mostly_soak(AVERAGING, few=1), ids=lambda s: type(s).__name__)
def test_most_of_the_ideal_speed_is_kept_beside_a_slow_worker(strategy):
    settings = {"workers": 4, "epochs": 15, "transport": "sim", "compute": SLOW}
    task = blobs()
    balanced = shoal.run(task, strategy, balance=True, **settings)
    equal = shoal.run(task, strategy, **settings)
    assert balanced.samples == equal.samples == 15 * 300
    assert balanced.samples_per_second >= 0.8 * IDEAL * task.batch
    assert equal.samples_per_second < 0.26 * IDEAL * task.batch


def test_sync_learns_the_same_however_a_step_is_cut():
    task = replace(blobs(), model=without_dropout)
    settings = {"workers": 4, "epochs": 5, "transport": "sim", "compute": SLOW}
    balanced, equal = (shoal.run(task, "sync", balance=b, **settings) for b in (True, False))
    assert len({node["samples"] for node in balanced.nodes}) > 1
    assert torch.allclose(weights(balanced), weights(equal), atol=1e-5)  # the same sum in another order


def without_dropout() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def test_a_lossy_codec_does_not_touch_the_speeds():
    settings = {"workers": 4, "epochs": 5, "transport": "sim", "compute": SLOW, "codec": "fp16"}
    result = shoal.run(blobs(), "sync", balance=True, **settings)
    assert result.samples == 5 * 300  # if two workers shared out differently, some would be missing


def test_equal_workers_keep_equal_shares():
    settings = {"workers": 3, "epochs": 5, "transport": "sim"}
    for compute in (Compute(), Compute(mean=0.1)):
        balanced = shoal.run(blobs(), "sync", balance=True, compute=compute, **settings)
        samples = [node["samples"] for node in balanced.nodes]
        assert max(samples) - min(samples) <= 35  # one a step


@pytest.mark.parametrize("compute", mostly_soak([Compute(mean=0.02, jitter=0.3, slow={1: 3.0}), SLOW], few=1))
@pytest.mark.parametrize("strategy", mostly_soak(AVERAGING, few=2))
def test_resuming_is_bit_equal(strategy, compute, tmp_path):
    settings = {"workers": 4, "transport": "sim", "compute": compute, "balance": True}
    shoal.run(blobs(), strategy, epochs=2, checkpoint=tmp_path, **settings)  # 10 steps: speeds are under way
    resumed = shoal.run(blobs(), strategy, epochs=8, checkpoint=tmp_path, **settings)
    straight = shoal.run(blobs(), strategy, epochs=8, **settings)
    assert torch.equal(weights(resumed), weights(straight))
    assert [n["samples"] for n in resumed.nodes] == [n["samples"] for n in straight.nodes]


# -- the initial model -------------------------------------------------------------------------------


def test_building_a_model_leaves_the_user_s_generators_as_they_were(monkeypatch):
    # a seed for CUDA that comes before CUDA starts is kept until it does: the last one counts
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # though another test has started it
    with torch.random.fork_rng():
        torch.manual_seed(7)
        before, seeds[:] = torch.get_rng_state(), []
        first, second = (build_model(blobs(), seed=3) for _ in range(2))
        assert torch.equal(torch.get_rng_state(), before)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert seeds[1::2] == [7, 7] and 7 not in seeds[::2]


# -- on processes --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("transport", mostly_soak(["processes", "gloo"], 1))
def test_real_workers_share_out_every_sample_once(transport):
    settings = {"workers": 3, "epochs": 1, "transport": transport, "threads": 1}
    result = shoal.run(replace(marks(), lr=1.0), "sync", balance=True, **settings)
    assert result.samples == SAMPLES
    # what a sample's mark falls by in a step of 12, and in the last one of 4
    levels = torch.tensor([1 / 12, 1 / 4], dtype=torch.float64)
    assert (weights(result).neg()[:, None] - levels).abs().min(dim=1).values.max() < 1e-12


# -- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["asgd", "easgd", "downpour", "sgp", "adpsgd"])
def test_strategies_whose_workers_keep_no_common_step_are_refused(word):
    with pytest.raises(ValueError, match=f"the workers of '{word}' each go at their own speed"):
        shoal.run(blobs(), word, workers=2, balance=True)


def test_a_worker_that_takes_over_another_s_state_keeps_its_own_random_stream():
    model, data = build_model(blobs(), 0), blobs().data()
    first, second = (build_replica(blobs(), model, data, shoal.Sync(), k, 2, 0) for k in range(2))
    before = second.state_dict()[NOISE]
    left = first.state_dict()
    second.load_state_dict({key: value for key, value in left.items() if key != NOISE})
    assert torch.equal(second.state_dict()[NOISE], before)
    assert not torch.equal(before, left[NOISE])
    second.load_state_dict(left)
    assert torch.equal(second.state_dict()[NOISE], left[NOISE])


def test_a_part_is_what_cutting_all_gives_without_cutting_all():
    samples = torch.arange(11)
    for parts in (1, 3, 4, 11, 12):
        cut = torch.tensor_split(samples, parts)
        assert all(torch.equal(part_of(samples, k, parts), cut[k]) for k in range(parts))


# -- gradients in parts --------------------------------------------------------------------------------


class Intake:
    """Where a gradient goes that is handed over in parts."""

    def __init__(self, elements: int) -> None:
        self.out, self.unit, self.begun = torch.full((elements,), float("nan")), 1.0, False

    def ready(self, part: int) -> None:
        raise AssertionError("an empty batch has no parts")


def test_where_fewer_samples_are_left_than_workers_the_gradient_is_zero_and_has_no_loss(monkeypatch):
    task = blobs()
    replica = build_replica(task, build_model(task, 0), task.data(), shoal.Sync(), 0, 2, 0)
    x, y = replica._next_batch()
    monkeypatch.setattr(replica, "_next_batch", lambda: (x[:0], y[:0]))
    streamed = drive(replica.stream(Intake(replica.x.numel())))
    assert not streamed.vector.any() and (streamed.count, streamed.loss) == (0, None)
