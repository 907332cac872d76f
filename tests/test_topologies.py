"""Topologies: neighbours agree, weights are doubly stochastic, and errors are one sentence."""

from itertools import product

import pytest
import torch

from shoal.topologies import TOPOLOGIES, both_ways, named, strongly_connected

SIZES = (1, 2, 3, 4, 6, 7, 8, 9, 16)
ROUNDS = range(9)


def fits(text, workers):
    try:
        named(text).check(workers)
    except ValueError:
        return False
    return True


def sizes(text):
    """The numbers of workers that a topology exists for."""
    return [workers for workers in SIZES if fits(text, workers)]


GRAPHS = ["ring", "torus", "hypercube", "exponential", "one_peer", "complete", "random", "random:seed=3"]


def write(folder, text):
    path = folder / "graph.txt"
    path.write_text(text)
    return f"file:{path}"


@pytest.mark.parametrize("text", GRAPHS)
def test_everybody_knows_alike_who_sends_to_whom(text):
    graph = named(text)
    for workers, t in product(sizes(text), ROUNDS):
        sent = {(i, j) for i in range(workers) for j in graph.out_of(i, workers, t)}
        heard = {(i, j) for j in range(workers) for i in graph.into(j, workers, t)}
        assert sent == heard
        assert all(i != j and 0 <= j < workers for i, j in sent)
        assert not graph.symmetric or sent == {(j, i) for i, j in sent}
        for i in range(workers):
            assert graph.out_of(i, workers, t) == sorted(set(graph.out_of(i, workers, t)))


@pytest.mark.parametrize("text", GRAPHS)
def test_news_reach_everybody(text):
    graph = named(text)
    for workers in sizes(text):
        heard = [{k} for k in range(workers)]
        for t in range(64):
            before = [set(known) for known in heard]
            for k in range(workers):
                heard[k].update(*(before[i] for i in graph.into(k, workers, t)))
        assert all(known == set(range(workers)) for known in heard), workers


@pytest.mark.parametrize("text", [text for text in GRAPHS if named(text).static])
def test_a_static_topology_is_the_same_in_every_round(text):
    graph = named(text)
    for workers in sizes(text):
        for k in range(workers):
            assert all(graph.out_of(k, workers, t) == graph.out_of(k, workers, 0) for t in ROUNDS), workers


def matrix(graph, workers, t):
    """W, with what is missing to 1 on the diagonal."""
    w = torch.zeros(workers, workers, dtype=torch.float64)
    for i in range(workers):
        for j, share in graph.weights(i, workers, t).items():
            w[i, j] = share
        w[i, i] = 1 - w[i].sum()
    return w


def assert_doubly_stochastic(w):
    assert torch.equal(w, w.T)
    assert bool((w >= 0).all())
    torch.testing.assert_close(w.sum(0), torch.ones(len(w), dtype=torch.float64), rtol=0, atol=1e-15 * len(w))


@pytest.mark.parametrize("text", [text for text in GRAPHS if named(text).symmetric])
def test_weights_of_symmetric_topologies_are_doubly_stochastic(text):
    for workers, t in product(sizes(text), ROUNDS):
        assert_doubly_stochastic(matrix(named(text), workers, t))


def test_weights_of_an_irregular_graph_are_metropolis_hastings(tmp_path):
    # a star: the middle has three neighbours, each of the others one
    graph = named(write(tmp_path, "0 1\n0 2\n0 3\n"))
    w = matrix(graph, 4, 0)
    assert_doubly_stochastic(w)
    assert w.tolist() == [
        [1 / 4, 1 / 4, 1 / 4, 1 / 4],
        [1 / 4, 3 / 4, 0, 0],
        [1 / 4, 0, 3 / 4, 0],
        [1 / 4, 0, 0, 3 / 4],
    ]


def test_of_the_complete_graph_everybody_takes_the_same_share():
    assert matrix(named("complete"), 4, 0).tolist() == [[1 / 4] * 4] * 4


def test_the_shapes_by_hand():
    assert named("ring").out_of(0, 5, 0) == [1, 4]
    assert named("ring").out_of(0, 2, 0) == [1]
    # 0 1 2 3
    # 4 5 6 7
    # 8 9 10 11
    assert named("torus").out_of(0, 12, 0) == [1, 3, 4, 8]
    assert named("torus").out_of(6, 12, 0) == [2, 5, 7, 10]
    assert named("torus:rows=2").out_of(0, 12, 0) == [1, 5, 6]
    assert named("hypercube").out_of(0b101, 8, 0) == [0b001, 0b100, 0b111]
    assert named("exponential").out_of(5, 8, 0) == [1, 6, 7]  # 5 + 4, 5 + 1, 5 + 2
    assert named("exponential").into(5, 8, 0) == [1, 3, 4]  # 5 - 4, 5 - 2, 5 - 1
    assert [named("one_peer").out_of(5, 8, t) for t in range(4)] == [[6], [7], [1], [6]]
    assert [named("one_peer").into(5, 8, t) for t in range(3)] == [[4], [3], [1]]
    assert [named("one_peer").out_of(0, 6, t) for t in range(4)] == [[1], [2], [4], [1]]
    assert named("complete").out_of(1, 4, 0) == [0, 2, 3]


@pytest.mark.parametrize("workers", [2, 6, 7])
def test_random_pairs_are_pairs_and_change(workers):
    graph, seen = named("random"), set()
    for t in range(40):
        pairs = {frozenset((k, *graph.out_of(k, workers, t))) for k in range(workers)}
        assert sorted(len(pair) for pair in pairs) == [1] * (workers % 2) + [2] * (workers // 2)
        seen |= pairs
    assert sum(len(pair) == 2 for pair in seen) == workers * (workers - 1) // 2  # every pair came up


def test_another_seed_draws_other_pairs():
    draws = [[named(f"random:seed={s}").out_of(0, 16, t) for t in range(9)] for s in (0, 1)]
    assert draws[0] != draws[1]
    assert draws[0] == [named("random").out_of(0, 16, t) for t in range(9)]


@pytest.mark.parametrize("text", TOPOLOGIES)
def test_a_single_worker_fits_everywhere_and_has_no_neighbours(text, tmp_path):
    graph = named(write(tmp_path, "# nobody\n") if text == "file" else text)
    graph.check(1)
    assert graph.out_of(0, 1, 3) == graph.into(0, 1, 3) == []


@pytest.mark.parametrize(
    ("text", "workers", "told"),
    [
        (
            "hypercube",
            6,
            r"a hypercube has 2, 4, 8, ... workers, not 6; take 4 or 8 workers, or topology 'ring'",
        ),
        ("torus", 7, r"7 workers cannot form a torus.*; take topology 'ring', or 8 workers"),
        ("torus", 2, r"2 workers cannot form a torus.*; take topology 'ring', or 4 workers"),
        ("torus:rows=5", 12, r"rows=5 does not divide 12 workers into a torus; take rows=2 or 3 or 4 or 6"),
        ("torus:rows=12", 12, r"rows=12 does not divide"),
    ],
)
def test_a_size_that_does_not_fit_is_refused_with_what_to_take_instead(text, workers, told):
    with pytest.raises(ValueError, match=told):
        named(text).check(workers)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rnig", "unknown topology 'rnig'. Did you mean 'ring'"),
        ("torus:row=2", "topology 'torus' has no option 'row'. Did you mean 'rows'"),
        ("torus:rows=two", "rows='two' should be a whole number"),
        ("file", "needs the path of a file with edges, as in file:graph.txt"),
        ("file:/no/such/file", "topology 'file:/no/such/file' cannot be read: .*No such file"),
    ],
)
def test_a_wrong_word_is_refused_with_the_nearest_one(text, told):
    with pytest.raises(ValueError, match=told):
        named(text)


def test_one_way_topologies_are_refused_where_both_ways_are_needed(tmp_path):
    for text in ("exponential", "one_peer", write(tmp_path, "0 -> 1\n1 -> 0\n1 -> 2\n2 -> 0\n")):
        with pytest.raises(ValueError, match="has edges that lead one way only; take a symmetric topology"):
            both_ways(text)
        with pytest.raises(ValueError, match="one way only, so it has no symmetric weights"):
            named(text).weights(0, 3, 0)


def test_a_file_of_edges(tmp_path):
    graph = named(write(tmp_path, "# a comment\n0 1\n\n1->2  # one way\n2 -> 0\n"))
    graph.check(3)
    assert not graph.symmetric
    assert [graph.out_of(k, 3, 0) for k in range(3)] == [[1], [0, 2], [0]]
    assert [graph.into(k, 3, 0) for k in range(3)] == [[1, 2], [0], [1]]


def test_a_file_whose_arrows_lead_both_ways_is_symmetric(tmp_path):
    assert named(write(tmp_path, "0 -> 1\n1 -> 0\n")).symmetric


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("0 1\n1 2 3\n", r"graph.txt, line 2: '1 2 3' is not an edge; write 'i j' or 'i -> j'"),
        ("0 one\n", r"line 1: '0 one' is not an edge"),
        ("-1 0\n", r"line 1: '-1 0' is not an edge"),
        ("0 1\n2 2\n", r"line 2: an edge cannot join worker 2 with itself"),
        ("0 1\n1 2\n2 5\n", r"line 3: there is no worker 5; the 4 workers are numbered from 0"),
        ("0 1\n1 2\n", r"graph.txt is not connected: no path leads from worker 0 to worker 3"),
        ("0 1\n1 2\n3 -> 2\n", r"not connected: no path leads from worker 0 to worker 3"),
        ("0 1\n1 2\n2 -> 3\n", r"not connected: no path leads from worker 3 to worker 0"),
    ],
)
def test_a_file_that_is_no_graph_of_these_workers_is_refused_in_one_line(lines, told, tmp_path):
    with pytest.raises(ValueError, match=told) as error:
        named(write(tmp_path, lines)).check(4)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "graph.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="cannot be read"):
        named(f"file:{tmp_path / 'graph.txt'}")


@pytest.mark.parametrize("text", GRAPHS)
def test_the_topology_of_all_rounds_has_the_edges_of_each(text):
    topology = named(text)
    for workers in sizes(text):
        ever = {(i, j) for t in range(200) for i in range(workers) for j in topology.out_of(i, workers, t)}
        whole = topology.of_all_rounds
        assert ever == {(i, j) for i in range(workers) for j in whole.out_of(i, workers, 0)}
        assert ever == {(i, j) for j in range(workers) for i in whole.into(j, workers, 0)}


@pytest.mark.parametrize(
    ("rank", "away", "expected"),
    [(0, (), {0, 1, 2, 3}), (0, (3,), {0, 1, 2}), (0, (2, 3), {0}), (1, (2, 3), {1}), (0, (1, 3), {0, 2})],
)
def test_strongly_connected_are_those_from_whom_a_way_leads_back(rank, away, expected):
    # 0 -> 1, 2; 1 -> 2, 3; 2 -> 3, 0; 3 -> 0, 1
    assert strongly_connected(named("one_peer"), rank, 4, away) == expected
