"""Gaps: positions as bits, worked out on paper, both ways and both by torch and compiled."""

import pytest
import torch

from sampling import sampled
from shoal.codecs.sparse import gaps
from shoal.core.errors import WireError


@pytest.fixture(params=["kernel", "torch"])
def lines(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(gaps, "on_cpu", lambda *tensors: False)


def some(elements, density, seed=0):
    drawn = torch.rand(elements, generator=torch.Generator().manual_seed(seed))
    return (drawn < density).nonzero().flatten()


def signs_for(positions, seed=1):
    return torch.rand(len(positions), generator=torch.Generator().manual_seed(seed)) < 0.5


# -- on paper --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "elements", "k"),
    # log2(ln 2 / density) = 0.47, 2.79, 6.12, 7.59, 9.44; and at density 1 it is below 0
    [(1, 2, 0), (1, 10, 3), (1, 100, 6), (36, 10_000, 8), (1, 1000, 9), (7, 7, 0), (0, 50, 0), (0, 0, 0)],
)
def test_as_many_low_bits_as_suit_the_density(count, elements, k):
    assert gaps.low_bits(count, elements) == k


def test_a_stream_by_hand(lines):
    # 4 of 24, so log2(ln 2 * 6) = 2.06 and k = 2. Gaps from -1: 2 = 0 * 4 + 2, 0 = 0 * 4 + 0, 9 = 2 * 4 + 1,
    # 3 = 0 * 4 + 3. Low bits from the lowest: 01 00 10 11; then 1, 1, 001, 1, filled up with zeros.
    stream = gaps.pack(torch.tensor([2, 3, 13, 17]), 24)
    assert [f"{byte:08b}"[::-1] for byte in stream.tolist()] == ["01001011", "11001100"]
    assert gaps.unpack(stream, 4, 24)[0].tolist() == [2, 3, 13, 17]


def test_a_stream_with_signs_by_hand(lines):
    # the same with +, -, -, +: a bit behind each two, 010 001 101 110
    stream = gaps.pack(torch.tensor([2, 3, 13, 17]), 24, torch.tensor([False, True, True, False]))
    assert [f"{byte:08b}"[::-1] for byte in stream.tolist()] == ["01000110", "11100000", "11001100"]
    positions, signs = gaps.unpack(stream, 4, 24, signed=True)
    assert positions.tolist() == [2, 3, 13, 17] and signs.tolist() == [False, True, True, False]


def test_nothing_takes_no_byte(lines):
    assert gaps.pack(torch.empty(0, dtype=torch.int64), 100).numel() == 0
    assert gaps.unpack(torch.empty(0, dtype=torch.uint8), 0, 100)[0].numel() == 0
    assert gaps.unpack(torch.empty(0, dtype=torch.uint8), 0, 0, signed=True)[1].numel() == 0


def test_everything_takes_a_bit_each(lines):
    assert gaps.pack(torch.arange(80), 80).tolist() == [255] * 10


# -- there and back --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("elements", "density", "signed"),
    sampled([1, 2, 7, 8, 9, 64, 1000, 4097], [0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 1.0], [False, True]),
)
def test_positions_and_signs_come_back_and_torch_writes_the_same_bytes(
    elements, density, signed, monkeypatch
):
    positions = some(elements, density)
    signs = signs_for(positions) if signed else None
    fast = gaps.pack(positions, elements, signs)
    back = gaps.unpack(fast, len(positions), elements, signed=signed)
    monkeypatch.setattr(gaps, "on_cpu", lambda *tensors: False)
    assert torch.equal(gaps.pack(positions, elements, signs), fast)
    for found, negative in (back, gaps.unpack(fast, len(positions), elements, signed=signed)):
        assert torch.equal(found, positions)
        assert signs is None or torch.equal(negative, signs)


@pytest.mark.parametrize("place", [[0], [99_999], [0, 99_999], [0, 1, 2, 99_997, 99_998, 99_999]])
def test_the_first_and_the_last_position(place, lines):
    stream = gaps.pack(torch.tensor(place), 100_000)
    assert gaps.unpack(stream, len(place), 100_000)[0].tolist() == place


def test_more_elements_than_32_bits_count(lines):
    elements = 2**40
    positions = torch.tensor([0, 2**31 - 1, 2**31, 2**32 + 7, 2**39, 2**40 - 1])
    signs = torch.tensor([True, False, True, True, False, True])
    stream = gaps.pack(positions, elements, signs)
    found, negative = gaps.unpack(stream, 6, elements, signed=True)
    assert torch.equal(found, positions) and torch.equal(negative, signs)


# -- length ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.3, 0.01, 0.0036])
def test_as_many_bytes_as_the_formula_says(density):
    positions = some(100_000, density)
    k = gaps.low_bits(len(positions), 100_000)
    q = (torch.diff(positions, prepend=torch.tensor([-1])) - 1) >> k
    length = -(-len(positions) * k // 8) + -(-(len(positions) + int(q.sum())) // 8)
    assert gaps.pack(positions, 100_000).numel() == length


@pytest.mark.parametrize(
    ("density", "bits"), [(0.1, 5.8), (0.01, 9.1), (0.0036, 10.7), (0.001, 12.5), (0.0001, 15.8)]
)
def test_as_few_bits_as_published(density, bits):
    # with the sign; up to 1.5 percent, the chance of this one draw of some hundred positions or more
    positions = some(4_000_000, density)
    stream = gaps.pack(positions, 4_000_000, signs_for(positions))
    assert 8 * len(stream) / len(positions) == pytest.approx(bits, rel=0.015)


# -- hostile ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "count", "elements"),
    [
        ([0b11010010, 0b00110011], 5, 24),  # one more is announced than there is
        ([0b11010010, 0b00110011], 3, 24),  # one less
        ([0b11010010, 0b00110011], 4, 17),  # the last is past the end
        ([0b11010010], 4, 24),  # only the low bits
        ([], 4, 24),
        ([0b11010010, 0b00110011, 0], 4, 24),  # and something besides
        ([0b11010010, 0b00110011, 1], 4, 24),
        ([0b11010010, 0b00010011], 4, 24),  # a one is missing
        ([0b11010010, 0], 4, 24),
        ([255] * 100, 4, 24),  # longer than any such stream
        ([0b11010010, 0b00110011], 25, 24),  # more positions than elements
        ([0b11010010, 0b00110011], 2**63, 24),
        ([1], 0, 24),  # bytes where there is nothing
        ([1], 0, 0),
    ],
)
def test_a_wrong_stream_is_refused(stream, count, elements, lines):
    with pytest.raises(WireError):
        gaps.unpack(torch.tensor(stream, dtype=torch.uint8), count, elements)


def test_the_stream_those_were_made_of_is_right(lines):
    stream = torch.tensor([0b11010010, 0b00110011], dtype=torch.uint8)
    assert gaps.unpack(stream, 4, 24)[0].tolist() == [2, 3, 13, 17]


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.int64])
def test_another_dtype_is_refused(dtype, lines):
    with pytest.raises(WireError, match="which take from 1 to"):
        gaps.unpack(torch.zeros(2, dtype=dtype), 4, 24)


@pytest.mark.parametrize("signed", [False, True])
def test_torch_and_kernel_refuse_the_same(signed, monkeypatch):
    positions = some(400, 0.05)
    honest = gaps.pack(positions, 400, signs_for(positions) if signed else None)
    chance = torch.Generator().manual_seed(2)

    def read(stream):
        try:
            return [part.tolist() for part in gaps.unpack(stream, len(positions), 400, signed=signed)]
        except WireError:
            return None

    streams = []
    for _ in range(300):
        stream = honest.clone()
        stream[int(torch.randint(len(honest), (), generator=chance))] = int(
            torch.randint(256, (), generator=chance)
        )
        streams.append(stream)
    fast = list(map(read, streams))
    monkeypatch.setattr(gaps, "on_cpu", lambda *tensors: False)
    assert list(map(read, streams)) == fast
    assert 20 < fast.count(None) < 280
