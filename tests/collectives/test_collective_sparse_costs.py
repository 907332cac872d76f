"""What averages of sparse vectors cost: the formulas, virtual time itself, and which way is chosen."""

import pytest
import torch
from sparse_averaging import average

from sampling import mostly_soak, sampled
from shoal.codecs import DGC, Sparse, Threshold, TopK
from shoal.codecs.sparse.codec import position_bits
from shoal.collectives import SparseCheapest, SparseDoubling, stripes
from shoal.collectives.link import LinkCost
from shoal.collectives.sparse_choice import SparseAverages, Traffic
from shoal.core.transport import HEADER_BYTES
from shoal.launch.join import choose_mean
from shoal.sim import Network


def test_the_formulas_by_hand():
    # 8192 elements, 1/64 of them each: k is 5, and a position has 5 + 1 / (1 - (63/64)^32) bits
    bits = 5 + 1 / (1 - (63 / 64) ** 32)
    assert position_bits(1 / 64) == pytest.approx(bits) and 7 < bits < 8
    averages = SparseAverages(TopK(density=1 / 64), Sparse(), 1 / 64, 8192, 4)
    assert averages.union(1) == pytest.approx(1 / 64)
    assert averages.union(3) == pytest.approx(1 - (63 / 64) ** 3)
    one = 32 + 128 * (32 + bits) / 8
    two = 32 + 8192 * averages.union(2) * (32 + position_bits(averages.union(2))) / 8
    assert averages.doubling(2) == Traffic(1, pytest.approx(one))
    assert averages.doubling(4) == Traffic(2, pytest.approx(one + two))
    four = 32 + 2048 * averages.union(4) * (32 + position_bits(averages.union(4))) / 8
    up = 32 + 32 * (32 + bits) / 8
    assert averages.stripes(4) == Traffic(2, pytest.approx(3 * (up + four) + 4 * HEADER_BYTES))
    assert averages.doubling(1) == Traffic(0, 0)
    assert averages.doubling(3).rounds == 3
    dense = SparseAverages(TopK(density=1.0), Sparse(), 1.0, 100, 4)
    assert dense.doubling(2).nbytes == 32 + 400


NETWORKS = {
    "latency": Network(latency=1e-2, bandwidth=1e8),
    "both": Network(latency=1e-4, bandwidth=1e7),
    "bandwidth": Network(latency=1e-6, bandwidth=1e6),
}


def drawn(workers, elements=25_600):
    return [torch.randn(elements, generator=torch.Generator().manual_seed(k)) for k in range(workers)]


@pytest.mark.parametrize(("workers", "network"), sampled([2, 4, 8, 16], [*NETWORKS.values()]))
def test_virtual_time_is_what_the_formulas_say_and_the_cheaper_is_chosen(workers, network):
    # elements lie at random, so what they take is within a few percent of what is expected
    codec, link = TopK(density=0.01), LinkCost.of_network(network.latency, network.bandwidth)
    averages = SparseAverages(codec, Sparse(), 0.01, 25_600, 4)
    vectors = drawn(workers)
    doubled = average(vectors, codec, network=network).seconds
    striped = average(vectors, codec, stripes, network=network).seconds
    assert doubled == pytest.approx(averages.doubling(workers).seconds(link), rel=0.02)
    assert striped == pytest.approx(averages.stripes(workers).seconds(link), rel=0.03)
    chosen = average(vectors, codec, choose_mean("auto", None, codec, workers, link), network=network).seconds
    assert chosen == min(doubled, striped)


@pytest.mark.parametrize("workers", mostly_soak([3, 5, 6, 7, 9], few=2))
def test_folding_takes_about_its_formula_at_most_and_more_than_stripes(workers):
    codec, network = TopK(density=0.01), NETWORKS["both"]
    link = LinkCost.of_network(network.latency, network.bandwidth)
    averages, vectors = SparseAverages(codec, Sparse(), 0.01, 25_600, 4), drawn(workers)
    doubled = average(vectors, codec, network=network).seconds
    striped = average(vectors, codec, stripes, network=network).seconds
    assert striped < doubled < 1.05 * averages.doubling(workers).seconds(link)
    assert averages.stripes(workers).never_exceeds(averages.doubling(workers))


def test_which_is_chosen():
    def better(workers, latency, share=0.001):
        averages = SparseAverages(TopK(density=share), Sparse(), share, 10_000_000, 4)
        link = LinkCost(latency, 8e-9)  # a gigabit a second
        doubling, striped = averages.doubling(workers), averages.stripes(workers)
        return "doubling" if doubling.seconds(link) < striped.seconds(link) else "stripes"

    assert [better(2, latency) for latency in (0.0, 1e-4, 1.0)] == ["doubling"] * 3
    assert [better(4, latency) for latency in (0.0, 1e-4, 1.0)] == ["doubling"] * 3
    assert [better(8, latency) for latency in (0.0, 1e-4, 1e-2)] == ["doubling", "doubling", "stripes"]
    assert [better(3, latency) for latency in (0.0, 1e-4, 1.0)] == ["stripes"] * 3
    assert better(16, 0.0, share=0.5) == "stripes"  # sums are dense soon, and stripes have less to send


@pytest.mark.parametrize(
    ("workers", "measures"), mostly_soak([(3, False), (2, False), (8, True), (4, False)], few=2)
)
def test_a_link_is_measured_only_where_it_decides(workers, measures):
    codec, own = TopK(density=0.01), {}

    async def mean(node, v, weight):  # each process has its own
        return await own.setdefault(node.rank, SparseCheapest(codec, 0.01, Sparse()))(node, v, weight)

    run = average(drawn(workers), codec, mean, times=2, network=Network(latency=1e-3, bandwidth=1e8))
    link = LinkCost.of_network(1e-3, 1e8)
    named = average(drawn(workers), codec, choose_mean("auto", None, codec, workers, link), times=2)
    assert torch.equal(run.worker(0).x, named.worker(0).x)
    sent = [r.worker(1).meter.messages_sent for r in (run, named)]
    assert (sent[0] > sent[1]) == measures


def test_where_nobody_knows_how_many_travel_it_is_stripes():
    for codec in (Sparse(), Threshold(tau=0.1)):
        assert choose_mean("auto", None, codec, 4) is stripes
        assert isinstance(choose_mean("sparse_doubling", None, codec, 4), SparseDoubling)
    assert choose_mean("stripes", None, TopK(), 4) is stripes
    assert isinstance(choose_mean("auto", None, DGC(), 4), SparseCheapest)
