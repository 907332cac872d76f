"""The two-loop recursion, by hand, as vectors and as coefficients."""

from __future__ import annotations

import torch

from shoal.lbfgs.recursion import Combination, Gram, Pair, two_loop


def dot(a, b):
    return float(torch.dot(a, b))


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


def vector_free(g, pairs):
    """The same by way of the Gram matrix: the direction that the coefficients stand for."""
    named = {"g": g}
    for k, pair in enumerate(pairs):
        named |= {f"s{k}": pair.s, f"y{k}": pair.y}
    gram = Gram()
    missing = gram.missing(list(named))
    gram.learn(missing, [dot(named[a], named[b]) for a, b in missing])
    of = Combination.of
    pairs = [Pair(of(f"s{k}"), of(f"y{k}")) for k in range(len(pairs))]
    direction = two_loop(of("g"), pairs, gram.dot)
    return sum(factor * named[name] for name, factor in direction.factors.items())


def test_without_pairs_it_is_steepest_descent():
    assert two_loop(vector(3.0, -1.0), [], dot).tolist() == [-3.0, 1.0]


def test_one_pair_by_hand():
    # s = (1, 0), y = (2, 0): alpha = s.g / s.y = 4 / 2 = 2; q = (4, 6) - 2 (2, 0) = (0, 6)
    # s.y / y.y = 2 / 4: r = (0, 3); beta = y.r / s.y = 0; r = (0, 3) + (2 - 0) (1, 0) = (2, 3)
    pair = Pair(vector(1.0, 0.0), vector(2.0, 0.0))
    assert two_loop(vector(4.0, 6.0), [pair], dot).tolist() == [-2.0, -3.0]


def test_two_pairs_by_hand():
    # older: s = (1, 0), y = (2, 0); newer: s = (0, 1), y = (0, 4); g = (4, 8)
    # newer first: alpha = 8 / 4 = 2, q = (4, 0); older: alpha = 4 / 2 = 2, q = (0, 0); so r = 0
    # older: beta = 0, r = (2, 0); newer: beta = 0, r = (2, 2): Newton's step where the Hessian is diag(2, 4)
    pairs = [Pair(vector(1.0, 0.0), vector(2.0, 0.0)), Pair(vector(0.0, 1.0), vector(0.0, 4.0))]
    assert two_loop(vector(4.0, 8.0), pairs, dot).tolist() == [-2.0, -2.0]


def test_the_vector_free_form_gives_the_same_direction():
    rng = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(50, generator=rng, dtype=torch.float64)  # noqa: E731
    pairs = []
    for _ in range(5):
        s = draw()
        pairs.append(Pair(s, 2.0 * s + 0.3 * draw()))
    g = draw()
    there, here = two_loop(g, pairs, dot), vector_free(g, pairs)
    assert torch.allclose(there, here, rtol=0, atol=1e-13 * float(there.norm()))  # sums in another order


def test_the_matrix_asks_for_each_product_once_and_again_for_what_has_changed():
    gram = Gram()
    assert gram.missing(["s", "g"]) == [("s", "s"), ("s", "g"), ("g", "g")]
    gram.learn(gram.missing(["s", "g"]), [1.0, 2.0, 3.0])
    assert gram.missing(["g", "s"]) == []
    gram.forget("g")
    assert gram.missing(["s", "g"]) == [("s", "g"), ("g", "g")]


def test_a_combination_adds_multiples_of_names():
    a, b = Combination.of("a"), Combination.of("b")
    assert ((a + b) * 2.0 - a).factors == {"a": 1.0, "b": 2.0}
