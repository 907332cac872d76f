"""Who sums how: what `auto` takes, what a name pins, and what is refused."""

from dataclasses import replace

import pytest
import torch
from adding import add, zeros
from torch import nn

import shoal
from shoal.codecs import FP16
from shoal.collectives import ALGORITHMS, Cheapest, LinkCost, automatic, cheapest, stripes
from shoal.collectives.link import measure
from shoal.core.codec import Identity
from shoal.core.errors import Unavailable
from shoal.core.words import COLLECTIVES
from shoal.launch.join import choose_mean
from shoal.sim import Network
from shoal.testing import blobs

SLOW_TO_ANSWER = Network(latency=1e-2, bandwidth=1e9)
SLOW_TO_READ = Network(latency=1e-6, bandwidth=1e5)


def link_of(network):
    return LinkCost.of_network(network.latency, network.bandwidth)


@pytest.mark.parametrize("workers", [9, 11, 16])
@pytest.mark.parametrize("network", [SLOW_TO_ANSWER, SLOW_TO_READ], ids=["latency", "bandwidth"])
@pytest.mark.parametrize("count", [1, 5 * 16 * 9 * 11])
def test_what_is_chosen_is_what_is_fastest_in_virtual_time(workers, network, count):
    vectors, link = zeros(workers, count), link_of(network)
    seconds = {name: add(name, vectors, network=network).seconds for name in ALGORITHMS}
    chosen = cheapest(workers, 8 * count, link)
    if workers == 16:
        assert chosen == min(seconds, key=seconds.get)
    else:  # rounds overlap where workers are folded
        assert seconds[chosen] <= 1.05 * min(seconds.values())
    assert add(Cheapest(link), vectors, network=network).seconds == seconds[chosen]


def test_each_size_has_its_own_choice():
    few, many = LinkCost(1e-2, 1e-9), LinkCost(1e-6, 1e-5)
    assert [cheapest(16, n, few) for n in (10, 10**9)] == ["butterfly", "rabenseifner"]
    assert [cheapest(9, n, many) for n in (0, 10**6)] == ["butterfly", "ring"]
    assert cheapest(9, 10**6, LinkCost(0.0, 0.0)) == "butterfly"  # a network that takes no time


def test_up_to_eight_workers_average_in_stripes():
    assert automatic(8) is automatic(2, LinkCost(0.0, 1.0)) is stripes
    assert automatic(9) is not stripes


def test_a_lossy_codec_leaves_no_choice():
    assert choose_mean("auto", None, FP16(), 64) is stripes
    assert choose_mean("stripes", None, FP16(), 64) is stripes
    for name in (*ALGORITHMS, "mapped"):
        with pytest.raises(
            ValueError, match=rf"collective '{name}' .* FP16\(\) is not exact; take 'stripes'"
        ):
            choose_mean(name, None, FP16(), 4)


def test_every_word_can_be_chosen_where_it_fits():
    assert {*COLLECTIVES} == {"auto", "native", "stripes", "mapped", "sparse_doubling", *ALGORITHMS}
    assert choose_mean("stripes", None, Identity(), 64) is stripes
    with pytest.raises(Unavailable, match="this transport has none; take 'stripes'"):
        choose_mean("native", None, Identity(), 4)
    with pytest.raises(Unavailable, match="'mapped' needs transport 'processes'; take 'stripes'"):
        choose_mean("mapped", None, Identity(), 4)
    with pytest.raises(ValueError, match="unknown collective 'rign'"):
        choose_mean("rign", None, Identity(), 4)


# -- measuring -------------------------------------------------------------------------------------


async def note_link(node, v):
    link = await measure(node)
    v.copy_(torch.tensor([link.latency, link.seconds_per_byte], dtype=v.dtype))


@pytest.mark.parametrize("workers", [2, 3, 9])
def test_a_link_is_measured_as_it_is_and_all_are_told_the_same(workers):
    network = Network(latency=2e-3, bandwidth=1e8)
    run = add(note_link, zeros(workers, 2), network=network)
    expected = link_of(network)
    latency, seconds_per_byte = run.worker(0).x.tolist()
    assert latency == pytest.approx(expected.latency, rel=1e-9)
    assert seconds_per_byte == pytest.approx(expected.seconds_per_byte, rel=1e-9)
    for node in run.nodes:
        assert torch.equal(node.x, run.worker(0).x)
    idle = [node.meter.messages_sent for node in run.nodes[2:]]
    assert idle == [0] * (workers - 2)


def test_a_link_is_measured_once():
    network = Network(latency=2e-3, bandwidth=1e8)
    sums = {}

    async def own(node, v):  # each process has its own
        await sums.setdefault(node.rank, Cheapest())(node, v)

    once = add(own, zeros(9, 100), network=network).worker(1).meter.messages_sent
    sums.clear()
    run = add(own, zeros(9, 100), times=3, network=network)
    by_name = add(cheapest(9, 800, link_of(network)), zeros(9, 100), network=network)
    rounds = by_name.worker(1).meter.messages_sent
    assert run.worker(1).meter.messages_sent == once + 2 * rounds
    assert once > rounds


# -- whole runs ------------------------------------------------------------------------------------


def digest(network, **options):
    wide = replace(
        blobs(), model=lambda: nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3)), batch=16
    )
    return shoal.run(wide, "sync", transport="sim", network=network, **options).digest


@pytest.mark.slow
@pytest.mark.parametrize(("network", "name"), [(SLOW_TO_ANSWER, "butterfly"), (SLOW_TO_READ, "rabenseifner")])
def test_auto_is_the_cheapest_of_the_four_beyond_eight_workers(network, name):
    parameters = 8 * 64 + 64 + 64 * 3 + 3
    assert cheapest(16, 4 * (parameters + 1), link_of(network)) == name
    digests = {
        word: digest(network, workers=16, collective=word) for word in ("auto", "stripes", *ALGORITHMS)
    }
    assert [word for word in ALGORITHMS if digests[word] == digests["auto"]] == [name]
    assert len(set(digests.values())) == 5


@pytest.mark.slow
def test_auto_is_stripes_for_few_and_with_a_codec():
    network = Network.parse("1Gbit,100us")
    few = {word: digest(network, workers=3, collective=word) for word in ("auto", "stripes", "tree")}
    assert few["auto"] == few["stripes"] != few["tree"]
    many = [digest(network, workers=9, codec="fp16", collective=word) for word in ("auto", "stripes")]
    assert many[0] == many[1]
