"""What sums cost: the formulas, the messages and bytes behind them, and virtual time itself.

Headers take time, too. Each message of a round has one, so they are as much latency: L + 104 G.
"""

from itertools import product
from math import inf, lcm, log2

import pytest
from adding import Arrivals, add, zeros

from sampling import covering
from shoal.collectives import ALGORITHMS, LinkCost
from shoal.collectives.cube import Cube
from shoal.core.transport import HEADER_BYTES
from shoal.sim import Network

POWERS = (1, 2, 4, 8, 16)
OTHERS = (3, 5, 6, 7, 9, 12)
NETWORKS = {
    "both": Network(latency=1e-3, bandwidth=1e6),
    "latency alone": Network(latency=1e-3),
    "bandwidth alone": Network(bandwidth=1e6),
    "mostly latency": Network(latency=1e-2, bandwidth=1e8),
    "mostly bandwidth": Network(latency=1e-5, bandwidth=1e5),
}
TABLE = {  # P a power of two
    "tree": lambda P, n, L, G: 2 * L * log2(P) + 2 * n * G * log2(P),
    "butterfly": lambda P, n, L, G: L * log2(P) + n * G * log2(P),
    "ring": lambda P, n, L, G: 2 * L * (P - 1) + 2 * n * G * (P - 1) / P,
    "rabenseifner": lambda P, n, L, G: 2 * L * log2(P) + 2 * n * G * (P - 1) / P,
}

each = pytest.mark.parametrize("name", ALGORITHMS)
on_each = pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)


def on_some(names, workers):
    """A few networks and numbers of workers for each algorithm, all of them for some; the rest is soak."""
    cases = covering([*product(names, [*product(NETWORKS, workers)])], each=3)
    return pytest.mark.parametrize(("name", "word", "workers"), cases)


def elements(workers):
    """As many doubles as every algorithm divides without a remainder."""
    return 8 * lcm(workers, Cube(workers).corners)


def link_of(network):
    return LinkCost.of_network(network.latency, network.bandwidth)


def lower_bound(workers, nbytes, network):
    return network.latency * log2(workers) + 2 * nbytes / network.bandwidth * (workers - 1) / workers


# -- formulas --------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("workers", POWERS)
def test_the_formulas(name, workers):
    L, G = 3e-5, 7e-9
    for n in (0, 1, 1000, 10**8):
        expected = TABLE[name](workers, n, L, G)
        assert ALGORITHMS[name].cost(workers, n, LinkCost(L, G)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("workers", OTHERS)
def test_the_formulas_for_other_numbers_of_workers(workers):
    L, G, n, corners = 3e-5, 7e-9, 10**5, 2 ** int(log2(workers))
    cost = {name: ALGORITHMS[name].cost(workers, n, LinkCost(L, G)) for name in ALGORITHMS}
    for name in ("butterfly", "rabenseifner"):  # folding
        assert cost[name] == pytest.approx(TABLE[name](corners, n, L, G) + 2 * L + 2 * n * G, rel=1e-12)
    assert cost["tree"] == pytest.approx(TABLE["tree"](2 * corners, n, L, G), rel=1e-12)  # one more level
    assert cost["ring"] == pytest.approx(TABLE["ring"](workers, n, L, G), rel=1e-12)


def test_one_worker_has_nothing_to_pay():
    assert {a.cost(1, 10**9, LinkCost(1.0, 1.0)) for a in ALGORITHMS.values()} == {0.0}


# -- virtual time ----------------------------------------------------------------------------------


@on_some(ALGORITHMS, POWERS)
def test_virtual_time_is_what_the_formula_says(name, word, workers):
    network = NETWORKS[word]
    n = 8 * elements(workers)
    run = add(name, zeros(workers, n // 8), network=network)
    assert run.seconds == pytest.approx(ALGORITHMS[name].cost(workers, n, link_of(network)), rel=1e-9)


@on_each
@pytest.mark.parametrize("workers", OTHERS)
def test_a_ring_takes_what_its_formula_says_whatever_its_length(network, workers):
    n = 8 * elements(workers)
    run = add("ring", zeros(workers, n // 8), network=network)
    assert run.seconds == pytest.approx(ALGORITHMS["ring"].cost(workers, n, link_of(network)), rel=1e-9)


@on_some(["tree", "butterfly", "rabenseifner"], OTHERS)
def test_for_other_numbers_of_workers_a_formula_is_about_what_it_takes_at_most(name, word, workers):
    """Who is not folded begins at once. So rounds overlap, and where they meet in a port somebody waits."""
    network = NETWORKS[word]
    n = 8 * elements(workers)
    run = add(name, zeros(workers, n // 8), network=network)
    assert 0.5 <= run.seconds / ALGORITHMS[name].cost(workers, n, link_of(network)) <= 1.03


@on_some(ALGORITHMS, [*POWERS[1:], *OTHERS])
def test_nothing_beats_the_lower_bound(name, word, workers):
    network = NETWORKS[word]
    for count in (1, elements(workers)):
        run = add(name, zeros(workers, count), network=network)
        assert run.seconds >= lower_bound(workers, 8 * count, network) * (1 - 1e-12)


# -- messages and bytes ----------------------------------------------------------------------------


def traffic(name, workers):
    """For each worker: messages and bytes sent, messages and bytes received; bytes without headers."""
    arrivals = Arrivals()
    run = add(name, zeros(workers, elements(workers)), observers=[arrivals])
    counted = []
    for node in run.nodes:
        sent, got = node.meter.messages_sent, arrivals.messages.get(node.rank, 0)
        payload_out = node.meter.bytes_sent - HEADER_BYTES * sent
        payload_in = node.meter.bytes_received - HEADER_BYTES * got
        counted.append((sent, payload_out, got, payload_in))
    return counted


@pytest.mark.parametrize("workers", POWERS)
def test_messages_and_bytes_are_the_coefficients_of_the_formulas(workers):
    P, n, rounds = workers, 8 * elements(workers), int(log2(workers))
    share = 2 * n * (P - 1) // P
    assert traffic("butterfly", P) == [(rounds, n * rounds) * 2] * P
    assert traffic("ring", P) == [(2 * (P - 1), share) * 2] * P
    assert traffic("rabenseifner", P) == [(2 * rounds, share) * 2] * P
    tree = traffic("tree", P)
    assert tree[0] == (rounds, n * rounds) * 2  # up it hears, down it speaks: 2 log2 P rounds
    assert sum(sent for sent, *_ in tree) == 2 * (P - 1)
    assert sum(nbytes for _, nbytes, *_ in tree) == 2 * (P - 1) * n


@pytest.mark.parametrize("workers", OTHERS)
@pytest.mark.parametrize("name", ["butterfly", "rabenseifner"])
def test_folding_adds_one_message_each_way_for_every_pair(name, workers):
    cube, n = Cube(workers), 8 * elements(workers)
    rounds, pairs = len(cube.bits), cube.folded
    if name == "butterfly":
        inside = (rounds, n * rounds)
    else:
        inside = (2 * rounds, 2 * n * (cube.corners - 1) // cube.corners)
    keeper = (inside[0] + 1, inside[1] + n)
    assert traffic(name, workers) == [keeper * 2, (1, n) * 2] * pairs + [inside * 2] * (workers - 2 * pairs)


@pytest.mark.parametrize("workers", OTHERS)
def test_a_tree_and_a_ring_need_no_folding(workers):
    n = 8 * elements(workers)
    assert traffic("ring", workers) == [(2 * (workers - 1), 2 * n * (workers - 1) // workers) * 2] * workers
    assert sum(sent for sent, *_ in traffic("tree", workers)) == 2 * (workers - 1)


# -- crossovers ------------------------------------------------------------------------------------


def crossover(workers, link):
    """n*: the bytes up to which a butterfly beats Rabenseifner."""
    rounds = log2(workers)
    by_bytes = link.seconds_per_byte * (rounds - 2 * (workers - 1) / workers)
    return link.latency * rounds / by_bytes if by_bytes else inf


def test_where_a_butterfly_and_rabenseifner_meet():
    link = LinkCost(latency=5e-5, seconds_per_byte=1e-9)
    unit = 5e-5 / 1e-9  # L / G
    assert crossover(2, link) == inf
    assert crossover(4, link) == pytest.approx(4 * unit)
    assert crossover(8, link) == pytest.approx(2.4 * unit)
    assert crossover(2**20, link) == pytest.approx(unit, rel=0.12)
    for workers in (4, 8, 16, 64, 1024):
        n = crossover(workers, link)
        swap, halve = ALGORITHMS["butterfly"].cost, ALGORITHMS["rabenseifner"].cost
        assert swap(workers, n, link) == pytest.approx(halve(workers, n, link), rel=1e-12)
        assert swap(workers, 0.99 * n, link) < halve(workers, 0.99 * n, link)
        assert swap(workers, 1.01 * n, link) > halve(workers, 1.01 * n, link)
    assert swap(2, 1e12, link) <= halve(2, 1e12, link)


@pytest.mark.parametrize("workers", [4, 8, 16])
def test_they_meet_there_in_virtual_time(workers):
    network = Network(latency=1e-3, bandwidth=1e6)
    n = crossover(workers, link_of(network))
    for factor, faster in ((0.9, "butterfly"), (1.1, "rabenseifner")):
        vectors = zeros(workers, workers * round(factor * n / 8 / workers))
        seconds = {name: add(name, vectors, network=network).seconds for name in ALGORITHMS}
        assert min(seconds, key=seconds.get) == faster


def test_a_butterfly_takes_half_as_long_as_a_tree_and_a_ring_is_for_odd_crowds():
    link = LinkCost(1e-4, 1e-9)
    for workers in POWERS:
        for n in (10.0, 1e9):
            cost = {name: ALGORITHMS[name].cost(workers, n, link) for name in ALGORITHMS}
            assert cost["tree"] == pytest.approx(2 * cost["butterfly"])
            assert cost["ring"] >= cost["rabenseifner"] * (1 - 1e-12)
    assert ALGORITHMS["ring"].cost(9, 1e9, link) < ALGORITHMS["rabenseifner"].cost(9, 1e9, link)
