"""Sparse: what is not zero comes back, at the price of the shorter of two forms."""

import pytest
import torch

from sampling import sampled
from shoal.codecs import TopK
from shoal.codecs.sparse import gaps
from shoal.codecs.sparse.codec import Sparse
from shoal.codecs.wire import HEADER, seal
from shoal.core.errors import WireError

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def sent(v, codec=None):
    return (codec or Sparse()).encode(v, {})[0]


def back(v):
    return Sparse().decode(sent(v), torch.full_like(v, 7))


def nbytes(payload):
    return sum(part.nbytes for part in payload)


def drawn(elements, density, seed=0, dtype=torch.float32):
    chance = torch.Generator().manual_seed(seed)
    v = torch.randint(-99, 100, (elements,), generator=chance).to(dtype)
    return torch.where(torch.rand(elements, generator=chance) < density, v, 0)


def test_positions_and_values_by_hand():
    header, stream, values = sent(torch.tensor([0, 0, 5.0, -1.0] + [0] * 9 + [2.0, 0, 0, 0, 3.0] + [0] * 6))
    assert HEADER.unpack(bytes(header.tolist()))[2:6] == (8, 0, 24, 4)
    assert stream.tolist() == [0b11010010, 0b00110011]  # 2, 3, 13, 17: as in the test of gaps
    assert values.tolist() == [5.0, -1.0, 2.0, 3.0]


def test_a_full_vector_travels_whole():
    _, stream, values = sent(torch.tensor([1.0, 2.0, 0.0]))
    assert stream.nbytes + values.nbytes == 1 + 8 < 12
    header, values = sent(torch.tensor([1.0, 2.0, 3.0]))
    assert HEADER.unpack(bytes(header.tolist()))[5] == 3 and values.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("dtype", "density", "elements"),
    sampled(DTYPES, [0.0, 0.001, 0.1, 0.5, 0.9, 0.97, 1.0], [0, 1, 2, 31, 1000, 5000]),
)
def test_every_vector_comes_back(elements, density, dtype):
    v = drawn(elements, density, dtype=dtype)
    before = v.clone()
    assert torch.equal(back(v), v) and torch.equal(v, before)
    assert nbytes(sent(v)) <= 32 + v.nbytes


def test_only_the_sign_of_a_zero_is_lost():
    v = torch.tensor([-0.0] * 50 + [1.0, -2.0, float("inf"), float("nan"), 1e-45])
    got = back(v)
    assert torch.equal(got[:-2], v[:-2]) and got[-2].isnan() and got[-1] == v[-1]
    assert not got[0].signbit()


@pytest.mark.parametrize("density", [0.001, 0.05, 0.5, 0.9])
def test_as_many_bytes_as_the_formula_says(density):
    v = drawn(20_000, density)
    positions = v.nonzero().flatten()
    assert nbytes(sent(v)) == 32 + min(4 * len(positions) + len(gaps.pack(positions, 20_000)), 4 * 20_000)


def test_it_turns_dense_where_that_is_shorter():
    # a position of one that is nearly always there takes a bit, so up to about 32 of 33
    assert len(sent(drawn(33_000, 0.9))) == 3
    assert len(sent(torch.ones(33_000).index_fill_(0, torch.arange(900), 0))) == 2


def test_the_payload_does_not_change_with_the_vector():
    v = torch.ones(10)
    payload = sent(v)
    v.zero_()
    assert Sparse().decode(payload, torch.empty(10)).tolist() == [1.0] * 10


@pytest.mark.parametrize("pattern", ["disjoint", "equal", "overlapping", "empty", "one is dense"])
def test_a_sum_of_sparse_vectors_travels_on_unharmed(pattern):
    place = torch.arange(3000)
    masks = {
        "disjoint": [place % 90 == 3 * k for k in range(4)],
        "equal": [place % 90 == 0] * 4,
        "overlapping": [place % (30 + k) == 0 for k in range(4)],
        "empty": [place < 0] * 4,
        "one is dense": [place >= 0, *[place % 90 == 0] * 3],
    }[pattern]
    vectors = [torch.where(mask, drawn(3000, 1.0, seed), 0) for seed, mask in enumerate(masks)]
    arrived = sum(TopK(density=1.0).decode(sent(v, TopK(density=1.0)), torch.empty(3000)) for v in vectors)
    assert torch.equal(arrived, sum(vectors))
    assert torch.equal(back(arrived), sum(vectors))


# -- hostile ---------------------------------------------------------------------------------------


def bad_payloads():
    stream, values = gaps.pack(torch.tensor([2, 5]), 50), torch.tensor([1.0, 2.0])
    yield seal(8, 50, 3, stream, values)  # more are announced than there are
    yield seal(8, 50, 1, stream, values)
    yield seal(8, 50, 2, stream, values[:1])
    yield seal(8, 50, 2, stream, values.double())
    yield seal(8, 50, 2, stream.int(), values)
    yield seal(8, 50, 2, values, stream)
    yield seal(8, 50, 2, stream)
    yield seal(8, 50, 2)
    yield seal(8, 50, 2, stream, values, values)
    yield seal(8, 50, 2, stream[:-1], values)
    yield seal(8, 50, 2, torch.cat([stream, stream]), values)
    yield seal(8, 50, 2, gaps.pack(torch.tensor([2, 75]), 100)[:3], values)  # past the end
    yield seal(8, 50, 50, values)
    yield seal(8, 50, 50, torch.zeros(50, dtype=torch.float64))
    yield seal(8, 50, 50, stream, values)
    yield seal(8, 50, 51, torch.zeros(51))
    yield seal(8, 50, 2**63, stream, values)
    yield seal(8, 49, 2, stream, values)
    yield seal(9, 50, 2, stream, values)
    yield ()


@pytest.mark.parametrize("payload", [*bad_payloads()])
def test_a_wrong_payload_is_refused(payload):
    with pytest.raises(WireError):
        Sparse().decode(payload, torch.empty(50))


def test_the_payload_those_were_made_of_is_right():
    payload = seal(8, 50, 2, gaps.pack(torch.tensor([2, 5]), 50), torch.tensor([1.0, 2.0]))
    assert Sparse().decode(payload, torch.empty(50)).tolist() == [0, 0, 1.0, 0, 0, 2.0] + [0] * 44
