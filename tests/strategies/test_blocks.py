"""Data in N x M splits: a block of local steps is one pass over a worker's own split."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import shoal
from sampling import mostly_soak
from shoal.core.task import Data, Task
from shoal.engine.engine import Instrument
from shoal.replicas.module import build_model, build_replica, steps_of
from shoal.replicas.splits import Splits, split_steps
from shoal.sim import Simulation
from shoal.strategies import BMUF, Local
from shoal.testing import blobs
from shoal.testing.problems import Slope, simulate
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Setting

SAMPLES = torch.arange(50)


def splits(rank=0, workers=3, blocks=4, batch=2, seed=0, ahead=False, samples=SAMPLES):
    return Splits(
        samples, samples, batch=batch, rank=rank, workers=workers, blocks=blocks, seed=seed, ahead=ahead
    )


def sweep(each, number=0):
    """What one worker sees in a sweep, block by block in the order of its visits."""
    each.position = number * each.steps_per_epoch
    rows = [each.next()[0] for _ in range(each.steps_per_epoch)]
    return [torch.cat(rows[i : i + each.split_steps]) for i in range(0, len(rows), each.split_steps)]


def as_sets(blocks):
    return [set(block.tolist()) for block in blocks]


# -- the partition ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "blocks", "batch"), [(3, 4, 2), (1, 5, 3), (2, 7, 1), (4, 1, 8), (5, 10, 4)]
)
def test_every_sample_comes_once_in_every_sweep(workers, blocks, batch):
    for number in range(3):
        seen = [sweep(splits(rank, workers, blocks, batch), number) for rank in range(workers)]
        everything = torch.cat([block for own in seen for block in own])
        assert torch.equal(everything.sort().values, SAMPLES)


def test_blocks_and_splits_differ_by_at_most_one_sample():
    seen = [as_sets(sweep(splits(rank))) for rank in range(3)]  # 50 samples in 3 x 4 splits
    assert sorted(len(split) for own in seen for split in own) == [4] * 10 + [5] * 2
    whole = [len(set.union(*(own[visit] for own in seen))) for visit in range(4)]
    assert sorted(whole) == [12, 12, 13, 13]


def test_a_split_is_the_same_samples_in_every_sweep_in_another_order():
    first, second = sweep(splits(1), 0), sweep(splits(1), 1)
    assert sorted(map(sorted, as_sets(first))) == sorted(map(sorted, as_sets(second)))
    mine = {frozenset(block.tolist()): block.tolist() for block in first}
    assert any(mine[frozenset(block.tolist())] != block.tolist() for block in second)


def order(rank, number, seed=0):
    """The numbers of the blocks in the order of their visits, as a worker finds them."""
    own = splits(rank, seed=seed)
    known = [set(own.split(rank, block).tolist()) for block in range(4)]
    return [known.index(seen) for seen in as_sets(sweep(own, number))]


def test_the_order_of_blocks_is_the_same_for_all_workers_and_another_in_every_sweep():
    orders = [[order(rank, number) for number in range(12)] for rank in range(3)]
    assert orders[0] == orders[1] == orders[2]
    assert len({tuple(each) for each in orders[0]}) > 6
    assert all(sorted(each) == [0, 1, 2, 3] for each in orders[0])


def test_one_seed_gives_one_order_and_another_seed_another():
    assert [order(0, n) for n in range(4)] == [order(0, n) for n in range(4)]
    assert [order(0, n) for n in range(4)] != [order(0, n, seed=1) for n in range(4)]


def test_all_workers_take_equally_many_steps_and_no_batch_is_empty():
    for workers, blocks, batch in [(3, 4, 2), (7, 7, 1), (2, 3, 100), (5, 10, 1)]:
        each = [splits(rank, workers, blocks, batch) for rank in range(workers)]
        sizes = [[len(own.next()[0]) for _ in range(own.steps_per_epoch)] for own in each]
        assert len({len(own) for own in sizes}) == 1
        assert min(map(min, sizes)) >= 1 and max(map(max, sizes)) <= batch + 1


def test_fewer_samples_than_splits_are_refused():
    with pytest.raises(ValueError, match="50 samples cannot be cut into 3 x 17 splits"):
        splits(blocks=17)


# -- gathered ahead --------------------------------------------------------------------------------


def test_the_next_split_is_ready_before_it_is_needed():
    each = splits(ahead=True)
    try:
        for visit in range(6):
            each.next()
            number, rows = each.coming.number, each.coming.rows.result(timeout=10)  # with the first batch
            assert number == visit + 1
            for _ in range(each.split_steps - 1):
                each.next()
            expected = sweep(splits(), number // 4)[number % 4]
            assert torch.equal(rows[0], expected)
    finally:
        each.close()


def test_what_is_gathered_ahead_changes_nothing_but_the_time():
    plain, ahead = splits(), splits(ahead=True)
    try:
        for _ in range(3 * plain.steps_per_epoch):
            assert all(map(torch.equal, plain.next(), ahead.next()))
    finally:
        ahead.close()


def test_it_goes_on_from_any_place_gathered_ahead_or_not():
    straight = splits()
    for _ in range(11):
        straight.next()
    for resumed in (splits(), splits(ahead=True)):
        try:
            resumed.next()  # what was gathered for another place is not used
            resumed.position = 11
            assert all(map(torch.equal, straight.next(), resumed.next()))
            straight.position = 11
        finally:
            resumed.close()


def test_no_thread_is_started_in_virtual_time():
    each = splits()
    each.next()
    assert each.coming is None


def test_the_thread_is_joined(snapshot):
    before = snapshot()
    each = splits(ahead=True)
    each.next()
    each.close()
    assert before.left_behind(grace_seconds=0) == []


# -- under a strategy ------------------------------------------------------------------------------


class Rows(nn.Module):
    """A weight for every sample, which a sample's own step pushes down by its rate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(26, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight[x]


def rows() -> Data:
    index, nothing = torch.arange(26), torch.zeros(0, dtype=torch.int64)
    return Data(index, torch.ones(26), nothing, torch.zeros(0))


def push(out: Tensor, y: Tensor) -> Tensor:
    return (out * y).mean()


ROWS = Task("rows", Rows, rows, loss=push, lr=1.0, batch=2)


class Averages(Instrument):
    """The global model after each step of worker 0."""

    def __init__(self, strategy):
        self.strategy, self.x = strategy, []

    def step(self, node):
        if node.rank == 0:
            self.x.append(self.strategy.solution(Node(node)).clone())


def train(strategy, task, workers, epochs, **options):
    data, model = task.data(), build_model(task, 0)
    steps = steps_of(task, strategy, len(data.x), workers, epochs)
    simulation = Simulation(
        strategy,
        lambda rank: build_replica(task, model, data, strategy, rank, workers, 0),
        workers=workers,
        steps=steps,
        **options,
    )
    return simulation.run()


@pytest.mark.parametrize(
    "strategy", [Local(blocks=3), BMUF(blocks=3, warmup=0)], ids=lambda s: type(s).__name__
)
def test_a_block_of_local_steps_is_one_pass_over_a_split(strategy):
    seen = Averages(strategy)
    run = train(
        strategy, ROWS, 2, 1, observers=[seen]
    )  # 26 samples in 2 x 3 splits of 4 or 5, in 2 steps each
    assert len(seen.x) == 6
    moved = [(b - a).nonzero().numel() for a, b in zip([torch.zeros(26), *seen.x[:-1]], seen.x, strict=True)]
    assert moved[::2] == [0, 0, 0]  # nothing is merged in the middle of a split
    assert sorted(moved[1::2]) == [8, 9, 9] if isinstance(strategy, Local) else moved[1] in (8, 9)
    assert run.worker(0).merged == 26


def test_uneven_splits_are_weighted_by_their_samples():
    """26 samples in 2 x 3 splits: the block of 9 has 5 at one worker and 4 at the other."""
    run = train(Local(blocks=3), ROWS, 2, 1)
    pushed = -run.worker(0).x
    sizes = sorted(
        len(Splits(SAMPLES[:26], SAMPLES[:26], batch=2, rank=k, workers=2, blocks=3, seed=0).split(k, b))
        for k in (0, 1)
        for b in range(3)
    )
    assert sizes == [4, 4, 4, 4, 5, 5]
    # a split of n in two batches moves a sample by 1 / its batch, and counts n / (n + the other worker's)
    expected = {4: {0.5 * 4 / 8, 0.5 * 4 / 9}, 5: {0.5 * 5 / 9, 1 / 3 * 5 / 9}}
    levels = torch.tensor(sorted(expected[4] | expected[5]), dtype=torch.float64)
    assert (pushed[:, None] - levels).abs().min(dim=1).values.max() < 1e-12
    assert pushed.sum().item() == pytest.approx(
        2 * 3
    )  # every batch pushes by 1 in all, weighted by the worker


def test_the_warm_up_of_bmuf_is_one_split_unless_told():
    seen = Averages(BMUF(blocks=3))
    train(BMUF(blocks=3), ROWS, 2, 1, observers=[seen])
    moved = [not torch.equal(a, b) for a, b in zip([torch.zeros(26), *seen.x[:-1]], seen.x, strict=True)]
    assert moved == [True, True, False, True, False, True]


def test_without_block_momentum_it_is_model_averaging_over_the_same_splits_bit_for_bit():
    settings = {"workers": 3, "epochs": 2, "transport": "sim"}
    bmuf = shoal.run(blobs(), BMUF(blocks=4, momentum=0.0, warmup=0), **settings)
    local = shoal.run(blobs(), Local(blocks=4), **settings)
    assert all(map(torch.equal, bmuf.model.parameters(), local.model.parameters()))
    assert bmuf.samples == local.samples == 600


@pytest.mark.parametrize(
    "strategy", mostly_soak([BMUF(blocks=4), Local(blocks=5)], few=1), ids=lambda s: type(s).__name__
)
def test_resuming_is_bit_equal(strategy, tmp_path):
    settings = {"workers": 3, "transport": "sim"}
    shoal.run(blobs(), strategy, epochs=1, checkpoint=tmp_path, every=3, **settings)
    resumed = shoal.run(blobs(), strategy, epochs=3, checkpoint=tmp_path, every=5, **settings)
    straight = shoal.run(blobs(), strategy, epochs=3, **settings)
    assert all(map(torch.equal, resumed.model.parameters(), straight.model.parameters()))
    assert resumed.samples == straight.samples == 900


@pytest.mark.slow
def test_real_processes_gather_ahead_and_learn_the_same():
    settings = {"workers": 2, "epochs": 2, "collective": "stripes"}
    real = shoal.run(blobs(), BMUF(blocks=5), **settings)
    virtual = shoal.run(blobs(), BMUF(blocks=5), transport="sim", **settings)
    assert all(map(torch.equal, real.model.parameters(), virtual.model.parameters()))


# -- options ---------------------------------------------------------------------------------------


def test_the_steps_of_a_split_follow_from_the_data():
    assert split_steps(samples=26, batch=2, workers=2, blocks=3) == 2
    assert steps_of(ROWS, BMUF(blocks=3), 26, 2, epochs=4) == 4 * 3 * 2


@pytest.mark.parametrize("made", [BMUF, Local])
def test_blocks_and_a_period_are_refused(made):
    with pytest.raises(
        ValueError, match=r"blocks=4 and period=8: .* one pass over a split; leave period out"
    ):
        made(blocks=4, period=8)
    with pytest.raises(ValueError, match="blocks=0 must be at least 1"):
        made(blocks=0)


def test_a_warm_up_that_ends_within_a_split_is_refused():
    with pytest.raises(ValueError, match="warmup=3 ends within a split, which has 2 steps"):
        train(BMUF(blocks=3, warmup=3), ROWS, 2, 1)


def test_blocks_are_refused_in_a_loop_of_one_s_own():
    with pytest.raises(ValueError, match="in a loop of your own, shard"):
        BMUF(blocks=4).check(Setting(4, own_loop=True))
    BMUF().check(Setting(4, own_loop=True))


@dataclass(frozen=True)
class Unchecked(BMUF):
    """One that was not asked."""


def test_a_replica_without_splits_is_no_place_for_blocks():
    with pytest.raises(ValueError, match="the data is not cut into splits"):
        simulate(Unchecked(blocks=4), Slope(), workers=2, steps=4)
