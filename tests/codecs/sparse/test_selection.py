"""Selection: which elements are the largest, compiled as by torch, whatever the vector is like."""

import pytest
import torch

from sampling import sampled
from shoal.codecs.sparse import cpu as kernel
from shoal.codecs.sparse import selection
from shoal.codecs.sparse.selection import above, how_many, largest

NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=["kernel", "torch"])
def lines(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(selection, "on_cpu", lambda *tensors: False)


def by_torch(monkeypatch, call):
    with monkeypatch.context() as patch:
        patch.setattr(selection, "on_cpu", lambda *tensors: False)
        return call()


def alike(first, second):
    pairs = zip(first, second, strict=True)
    return all(a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7)) for a, b in pairs)


# -- on paper --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("density", "elements", "count"),
    [(0.01, 1000, 10), (0.01, 149, 1), (0.01, 151, 2), (0.01, 5, 1), (0.01, 0, 0), (1.0, 7, 7), (0.5, 3, 2)],
)
def test_how_many_of_so_many(density, elements, count):
    assert how_many(density, elements) == count


def test_the_largest_magnitudes_in_the_order_of_their_positions(lines):
    positions, values = largest(torch.tensor([1.0, -5.0, 2.0, 4.0, -3.0]), 3)
    assert positions.tolist() == [1, 3, 4] and values.tolist() == [-5.0, 4.0, -3.0]


def test_of_equal_ones_the_first(lines):
    assert largest(torch.tensor([1.0, -2.0, 2.0, 3.0, 2.0]), 3)[0].tolist() == [1, 2, 3]
    assert largest(torch.full((10_000,), -2.0), 4)[0].tolist() == [0, 1, 2, 3]


def test_zeros_are_never_chosen(lines):
    assert largest(torch.tensor([0.0, -0.0, 1.0, 0.0]), 3)[0].tolist() == [2]
    assert largest(torch.zeros(5), 2)[0].tolist() == []
    assert above(torch.tensor([0.0, -0.0, 1e-45]), 0.0)[0].tolist() == [2]


def test_what_is_not_a_number_is_as_large_as_infinity(lines):
    v = torch.tensor([1.0, -INF, 3e38, NAN, INF])
    assert largest(v, 1)[0].tolist() == [1]
    assert largest(v, 2)[0].tolist() == [1, 3]
    assert largest(v, 4)[0].tolist() == [1, 2, 3, 4]
    assert above(v, 2.0**127)[0].tolist() == [1, 2, 3, 4]


def test_above_means_above(lines):
    positions, values = above(torch.tensor([1.0, -1.0, 1.5, -1.5]), 1.0)
    assert positions.tolist() == [2, 3] and values.tolist() == [1.5, -1.5]


def test_what_is_added_stays_in_the_vector(lines):
    for choose in (lambda u, v: largest(u, 1, add=v), lambda u, v: above(u, 3.0, add=v)):
        u, v = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 2.0, -1.0])
        positions, values = choose(u, v)
        assert (positions.tolist(), values.tolist()) == ([1], [4.0])
        assert u.tolist() == [2.0, 4.0, 2.0] and v.tolist() == [1.0, 2.0, -1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_every_dtype(dtype):
    v = torch.tensor([1.0, -5.0, 2.0, 4.0, 0.0], dtype=dtype)
    positions, values = largest(v, 2, add=torch.zeros_like(v))
    assert positions.tolist() == [1, 3] and values.dtype == dtype and values.tolist() == [-5.0, 4.0]


# -- compiled as by torch --------------------------------------------------------------------------


def kinds(length):
    chance = torch.Generator().manual_seed(length)
    drawn = torch.randn(length, generator=chance)
    yield drawn
    yield drawn.round()  # many are equal
    yield torch.arange(1.0, length + 1)  # each is larger than all before
    yield torch.arange(float(length), 0.0, -1.0)
    yield torch.full((length,), -2.0)
    yield torch.where(torch.rand(length, generator=chance) < 0.01, drawn, 0.0)
    broken = drawn.clone()
    broken[::3], broken[1::5] = NAN, -INF
    yield broken
    yield torch.where(torch.arange(length) % max(1, length // selection.SAMPLE) == 0, drawn * 100, drawn)


@pytest.mark.parametrize(
    ("length", "share"),
    sampled([1, 2, 9, 4095, 4096, 4097, 20_000, 150_000], [0.0, 0.001, 0.01, 0.3, 1.0]),
)
def test_the_kernel_chooses_what_torch_chooses(length, share, monkeypatch):
    k = max(1, int(share * length))
    for v in kinds(length):
        assert alike(largest(v, k), by_torch(monkeypatch, lambda v=v: largest(v, k)))
        for tau in (0.0, 1.0, 2.5):
            assert alike(above(v, tau), by_torch(monkeypatch, lambda v=v, tau=tau: above(v, tau)))


def test_the_kernel_adds_as_torch_adds(monkeypatch):
    for length in (1, 4097, 20_000):
        for v in kinds(length):
            u = torch.randn(length, generator=torch.Generator().manual_seed(1))
            ours, theirs = u.clone(), u.clone()
            got = largest(ours, 1 + length // 50, add=v)
            want = by_torch(monkeypatch, lambda v=v, t=theirs: largest(t, 1 + len(t) // 50, add=v))
            assert alike((ours, *got), (theirs, *want))


@pytest.mark.parametrize("guess", [0.0, 1.0, 2.0, 50.0])
def test_a_wrong_guess_costs_time_only(guess, monkeypatch):
    # that of far too many, or of none, is mended
    v, add = (torch.randn(50_000, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    want = by_torch(monkeypatch, lambda: largest(v.clone(), 300, add=add))
    u = v.clone()
    got = kernel.largest(u, 300, add, torch.full((1000,), guess))
    assert alike(got, want) and torch.equal(u, v + add)


def test_a_vector_that_is_no_whole_piece_of_memory_goes_by_torch():
    u, add = torch.arange(10.0)[::2], torch.zeros(5)
    assert largest(u, 2, add)[0].tolist() == [3, 4]
