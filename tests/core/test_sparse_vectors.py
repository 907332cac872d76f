"""Sparse vectors: sums by hand, the same bits from both sides, and when they turn dense."""

from dataclasses import replace

import pytest
import torch

from shoal.core.sparse_vectors import SparseVector, joined, most_pairs


def vector(elements, pairs):
    positions = torch.tensor(sorted(pairs), dtype=torch.int64)
    return SparseVector(elements, torch.tensor([pairs[i] for i in sorted(pairs)]), positions)


def test_a_sum_by_hand():
    a, b = vector(30, {2: 1.0, 5: 2.0, 9: 3.0}), vector(30, {0: 10.0, 5: 20.0, 11: 30.0, 29: 40.0})
    for total in (a + b, b + a):
        assert total.positions.tolist() == [0, 2, 5, 9, 11, 29]
        assert total.values.tolist() == [10.0, 1.0, 22.0, 3.0, 30.0, 40.0]


@pytest.mark.parametrize("a", [{}, {3: 1.5}, {0: 1.0, 19: -1.0}])
@pytest.mark.parametrize("b", [{}, {3: -1.5}, {4: 2.0}, {0: 5.0, 3: 6.0, 19: 7.0}])
def test_a_sum_is_that_of_the_whole_vectors(a, b):
    a, b = vector(20, a), vector(20, b)
    a, b = replace(a, values=a.values.float()), replace(b, values=b.values.float())
    expected = a.into(torch.empty(20)) + b.into(torch.empty(20))
    assert torch.equal((a + b).into(torch.empty(20)), expected)
    assert torch.equal((a + SparseVector(20, b.into(torch.empty(20)))).values, expected)
    assert torch.equal((SparseVector(20, a.into(torch.empty(20))) + b).values, expected)


def test_sums_of_random_vectors_have_the_same_bits_from_both_sides():
    generator = torch.Generator().manual_seed(0)
    for density in (0.001, 0.02, 0.2, 0.6):
        a, b = (
            torch.randn(3000, generator=generator) * (torch.rand(3000, generator=generator) < density)
            for _ in range(2)
        )
        both = []
        for x, y in ((a, b), (b, a)):
            x, y = (SparseVector.of(3000, v.nonzero().flatten(), v[v != 0]) for v in (x, y))
            both.append((x + y).into(torch.empty(3000)))
        assert torch.equal(*both) and torch.equal(both[0], a + b)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 100), (torch.float64, 150)])
def test_a_vector_turns_dense_beyond_delta(dtype, most):
    # delta = m s / (8 + s): 300 * 4 / 12 and 300 * 8 / 16
    assert most_pairs(300, dtype.itemsize) == most
    for count in (most, most + 1):
        v = SparseVector.of(300, torch.arange(count), torch.ones(count, dtype=dtype))
        assert (v.positions is None) == (count > most)
        assert v.into(torch.empty(300, dtype=dtype)).tolist() == [1.0] * count + [0.0] * (300 - count)
    half = most // 2
    low, high = torch.arange(half), torch.arange(half, 2 * half)
    a, b = (SparseVector.of(300, at, torch.ones(half, dtype=dtype)) for at in (low, high))
    assert (a + b).positions is not None
    one_more = SparseVector.of(300, torch.tensor([299]), torch.ones(1, dtype=dtype))
    assert (a + b + one_more).positions is None


def test_parts_are_joined_where_they_lie():
    parts = [vector(10, {1: 1.0}), vector(5, {0: 2.0}), vector(9, {}), vector(6, {5: 3.0})]
    parts[2] = replace(parts[2], values=torch.empty(0))
    whole = joined(parts)
    assert (whole.elements, whole.positions.tolist(), whole.values.tolist()) == (30, [1, 10, 29], [1, 2, 3])
    parts[2] = SparseVector(9, torch.full((9,), 4.0))
    assert joined(parts).values.tolist() == [0, 1.0, *[0.0] * 8, 2.0, *[0.0] * 4, *[4.0] * 9, *[0.0] * 5, 3.0]


def test_a_weight_leaves_no_zero_with_a_sign():
    v = vector(30, {1: -1e-30, 2: -0.0, 3: 2.0, 4: float("nan")}).times(1e-30, torch.float32)
    assert v.positions.tolist() == [3, 4]
    whole = SparseVector(3, torch.tensor([-1e-30, -0.0, 2.0])).times(1e-30, torch.float32)
    assert not whole.values.signbit().any()
