"""Tree, butterfly, ring and Rabenseifner: what comes out, for any number of workers and any length."""

import sys
from dataclasses import dataclass

import pytest
import torch
from adding import add

from shoal.collectives import ALGORITHMS, averaging, exchange, stripes
from shoal.collectives.cube import Cube
from shoal.core.errors import WireError
from shoal.core.replica import Parameters
from shoal.sim import Compute, Link, Network, Simulation
from shoal.strategies import Sync
from shoal.testing.problems import Quadratic, simulate
from shoal.vocabulary.strategy import Strategy

each = pytest.mark.parametrize("name", ALGORITHMS)


def lengths(workers):
    return sorted({0, 1, workers - 1, workers, 10007})


@each
@pytest.mark.parametrize("workers", range(1, 10))
def test_whole_numbers_add_up_exactly(name, workers):
    for length in lengths(workers):
        vectors = [torch.arange(length) % 1000 * (k + 1.0) - 500 for k in range(workers)]
        run = add(name, vectors)
        for node in run.nodes:
            assert torch.equal(node.x, torch.stack(vectors).sum(0))


@each
@pytest.mark.parametrize("workers", range(1, 10))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_workers_get_the_same_bits(name, workers, dtype):
    generator = torch.Generator().manual_seed(workers)
    for length in lengths(workers):
        vectors = [torch.randn(length, dtype=dtype, generator=generator) * 10**k for k in range(workers)]
        run = add(name, vectors)
        for node in run.nodes:
            assert torch.equal(node.x, run.worker(0).x)
        serial = torch.stack(vectors).double().sum(0)
        assert torch.allclose(run.worker(0).x.double(), serial, rtol=1e-5, atol=1e-6 * 10**workers)


@each
def test_where_messages_dawdle_no_sum_takes_in_those_of_the_next(name):
    # three sums: S, then P S, then P P S; a message of the second added to the first would show
    workers = 6
    slow = {(a, b): Link(latency=0.1 * (a + 2 * b), bandwidth=1e4) for a in range(6) for b in range(a)}
    vectors = [torch.full((100,), float(2**k)) for k in range(workers)]
    run = add(name, vectors, times=3, network=Network(latency=0.01, links=slow))
    for node in run.nodes:
        assert node.x.tolist() == [63.0 * 6 * 6] * 100
        assert not node.mailbox.has_arrived()


@pytest.mark.parametrize("workers", [2, 5, 8])
def test_halves_that_are_lent_give_the_same_run_as_copies(workers, monkeypatch):
    generator = torch.Generator().manual_seed(workers)
    vectors = [torch.randn(101, generator=generator) for _ in range(workers)]
    slow = {(a, b): Link(latency=0.1 * (a + 2 * b), bandwidth=1e4) for a in range(8) for b in range(a)}
    options = {"times": 3, "network": Network(latency=0.01, bandwidth=1e5, links=slow)}
    lent = add("rabenseifner", vectors, **options)
    lending = sys.modules["shoal.collectives.rabenseifner"]
    copies = []

    def give(group, dst, tag, v, is_settled=False):
        copies.append(is_settled)
        return exchange.give(group, dst, tag, v)

    monkeypatch.setattr(lending, "give", give)
    assert add("rabenseifner", vectors, **options).digest() == lent.digest()  # every message, time and bit
    assert any(copies)


@dataclass(frozen=True)
class AllInTurn(Strategy):
    """Vectors of different lengths, each by another algorithm; workers come to them at different times."""

    async def worker(self, w):
        sums = []
        for k, name in enumerate([*ALGORITHMS, *reversed(ALGORITHMS)]):
            await w.engine.transport.sleep(0.1 * ((3 * w.rank + k) % 5))
            v = torch.full((10 - k,), float(w.rank))
            await ALGORITHMS[name].sum(w.engine.group, v)
            sums.append(v)
        w.x.copy_(torch.cat(sums))


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_one_may_follow_another(workers):
    run = Simulation(
        AllInTurn(),
        lambda rank: Parameters(torch.zeros(sum(range(3, 11)))),
        workers=workers,
        steps=1,
        network=Network(latency=0.03),
    ).run()
    for node in run.nodes:
        assert set(node.x.tolist()) == {sum(range(workers))}


@each
def test_a_vector_of_another_length_is_refused(name):
    vectors = [torch.zeros(8), torch.zeros(9)]
    with pytest.raises(WireError, match="arrived where"):
        add(name, vectors)


@each
@pytest.mark.parametrize("workers", [2, 3, 4, 7])
def test_an_average_is_that_of_stripes_but_for_rounding(name, workers):
    problem = Quadratic(lr=0.3, targets=(0.1, 0.7, -2.0), counts=(1, 3, 4))
    options = {"workers": workers, "steps": 5, "start": [3.0, -1.0], "compute": Compute(1.0, slow={1: 3.0})}
    striped = simulate(Sync(), problem, mean=stripes, **options)
    run = simulate(Sync(), problem, mean=averaging(ALGORITHMS[name].sum), **options)
    for node in run.nodes:
        assert torch.equal(node.x, run.worker(0).x)
        assert torch.allclose(node.x, striped.worker(0).x, rtol=1e-14)
        assert node.merged == striped.worker(0).merged


def test_what_is_summed_for_an_average_is_the_weighted_vector_and_the_weight():
    seen = []

    async def add_up(node, v):
        seen.append(v.clone())
        v.mul_(2)

    def averaged(v, weight):
        coroutine = averaging(add_up)(None, v, weight)
        with pytest.raises(StopIteration) as end:
            coroutine.send(None)
        return end.value.value

    average, total = averaged(torch.tensor([1.0, -2.5]), 3.0)
    assert seen[-1].tolist() == [3.0, -7.5, 3.0]
    assert (average.tolist(), total) == ([1.0, -2.5], 6.0)

    average, total = averaged(torch.tensor([2.0, 60000.0], dtype=torch.float16), 4.0)  # 240000 is no half
    assert seen[-1].dtype == torch.float32
    assert (average.dtype, average.tolist(), total) == (torch.float16, [2.0, 60000.0], 8.0)

    average, total = averaged(torch.tensor([1.0]), 0.0)
    assert (average.tolist(), total) == ([0.0], 0.0)


@pytest.mark.parametrize("workers", range(1, 40))
def test_every_corner_of_a_cube_has_one_worker(workers):
    cube = Cube(workers)
    at = [cube.worker_at(corner) for corner in range(cube.corners)]
    assert [cube.corner_of(rank) for rank in at] == [*range(cube.corners)]
    left_out = sorted(set(range(workers)) - set(at))
    assert left_out == [2 * k + 1 for k in range(cube.folded)]
    assert cube.corners <= workers < 2 * cube.corners


def test_algorithms_differ_in_the_last_bits():
    half_ulp = 2.0**-53
    vectors = [torch.tensor([v], dtype=torch.float64) for v in (1.0, half_ulp, half_ulp, half_ulp)]
    in_pairs = (1.0 + half_ulp) + (half_ulp + half_ulp)
    in_a_row = ((half_ulp + 1.0) + half_ulp) + half_ulp  # the last part sets out from worker 3
    assert in_pairs == 1.0 + 2.0**-52 != in_a_row == 1.0
    got = {name: add(name, vectors).worker(0).x.item() for name in ALGORITHMS}
    assert got == {"butterfly": in_pairs, "rabenseifner": in_pairs, "tree": in_pairs, "ring": in_a_row}
