"""Streams of numbers: bits by hand, any numbers there and back, and everything else refused."""

import pytest
import torch

from sampling import sampled
from shoal.codecs.qsgd import elias
from shoal.codecs.qsgd.elias import CHAPTER, words
from shoal.core.errors import WireError


@pytest.fixture(params=["kernel", "torch"])
def lines(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(elias, "on_cpu", lambda *tensors: False)


def numbers(n, most, density, seed=0):
    chance = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-most, most + 1, (n,), generator=chance)
    return (drawn * (torch.rand(n, generator=chance) < density)).short()


def packed(text, lengths):
    """A stream from its bits, the first first."""
    bits = text.replace(" ", "")
    bits += "0" * (32 * sum(lengths) - len(bits))
    stream = [int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8)]
    return torch.tensor(stream, dtype=torch.uint8), torch.tensor(lengths, dtype=torch.int32)


# -- on paper --------------------------------------------------------------------------------------


def test_two_numbers_of_thirty_by_hand(lines):
    q = torch.zeros(30, dtype=torch.int16)
    q[2], q[9] = -1, 5
    # distances 3, 7 and, to just behind the end, 21: 11, 111 and 10101 in binary. Before the first digit come
    # as many zeros as there are digits behind it, which follow from the lowest on
    three, seven, twenty_one = "01" + "1", "001" + "11", "00001" + "1010"
    minus_one, five = "1" + "1", "0" + "001" + "10"  # a sign, then 1 and 101
    stream, lengths = elias.pack(q, 15)
    assert lengths.tolist() == [1]
    assert torch.equal(stream, packed(three + minus_one + seven + five + twenty_one, [1])[0])
    assert torch.equal(elias.unpack(stream, lengths, 30, 15), q)


def test_where_most_are_large_each_has_its_own_bits(lines):
    # up to 3 takes 2 bits, and a sign in front: 3 = 0 11, -2 = 1 01, 1 = 0 10, 0 = 0 00; in gamma 4 to 6 bits
    q = torch.tensor([3, -2, 1, 0] * 16, dtype=torch.int16)
    stream, lengths = elias.pack(q, 3)
    assert lengths.tolist() == [words(64, 3)] == [6]
    assert stream.tolist() == packed("011 101 010 000" * 16, [6])[0].tolist()
    assert elias.unpack(stream, lengths, 64, 3).tolist() == q.tolist()


def test_a_chapter_of_zeros_is_one_word(lines):
    q = torch.zeros(2 * CHAPTER + 5, dtype=torch.int16)
    stream, lengths = elias.pack(q, 1)
    assert (stream.numel(), lengths.tolist()) == (12, [1, 1, 1])
    # 8193 is 1 and 13 digits: 0...0 1, then 1 0...0
    assert stream[:4].tolist() == packed("0" * 13 + "1" + "1" + "0" * 12, [1])[0].tolist()
    assert not elias.unpack(stream, lengths, len(q), 1).any()


# -- what it promises ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "n"),
    sampled([1, 2, 7, 15, 127, 1000, elias.LARGEST], [0, 1, 2, 31, 33, CHAPTER - 1, CHAPTER, CHAPTER + 1]),
)
def test_numbers_come_back_and_a_kernel_writes_the_same_bits(monkeypatch, n, most):
    for density in (0, 0.001, 0.05, 0.4, 1):
        q = numbers(n, most, density)
        stream, lengths = elias.pack(q, most)
        assert torch.equal(elias.unpack(stream, lengths, n, most), q)
        with monkeypatch.context() as patch:
            patch.setattr(elias, "on_cpu", lambda *tensors: False)
            plain, sizes = elias.pack(q, most)
            assert torch.equal(plain, stream) and torch.equal(sizes, lengths)
            assert torch.equal(elias.unpack(stream, lengths, n, most), q)


def test_it_is_never_longer_than_the_bits_that_the_largest_needs():
    for density in (0, 0.1, 0.5, 1):
        stream, _ = elias.pack(numbers(3 * CHAPTER, 15, density), 15)
        assert stream.numel() <= 3 * CHAPTER * 5 // 8


def test_how_long_it_is():
    # one in 256: a distance of 1 takes a bit, of 256, with 8 digits behind the first, 17; sign and 1 take 2
    q = (torch.arange(4 * CHAPTER) % 256 == 0).short()
    bits = 1 + 2 + 31 * (17 + 2) + 17
    assert elias.pack(q, 15)[1].tolist() == [-(-bits // 32)] * 4


# -- hostile streams -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("", [1]),  # no distance at all
        ("0" * 31 + "1", [1]),  # one that is far too long
        ("00001 1101", [1]),  # 27: past the end of 20
        ("011 0 1", [1]),  # nothing behind the first number
        ("011 0 00001 0000 00001 0100", [1]),  # a magnitude of 16
        ("00001 1010 1", [1]),  # a one behind the end
        ("00001 1010", [2]),  # a word too many
        ("1 0 1" * 10 + "1 0", [1]),  # the magnitude is behind the end of the chapter
        ("1 0 00001", [1]),  # its digits are missing
    ],
)
def test_a_chapter_that_holds_something_else_is_refused(lines, text, lengths):
    with pytest.raises(WireError):
        elias.unpack(*packed(text, lengths), 20, 15)


def test_a_chapter_without_these_faults_is_read(lines):
    assert elias.unpack(*packed("00001 1010", [1]), 20, 15).tolist() == [0] * 20
    assert elias.unpack(*packed("011 0 1 00001 0100", [1]), 20, 15).tolist() == [0, 0, 1] + [0] * 17


def test_bits_of_their_own_that_stand_for_nothing_are_refused(lines):
    for text in (
        "100" + "000" * 9,  # zero with a sign
        "011" + "000" * 9,  # 3, where 2 is the largest
        "000" * 10 + "01",  # a one behind the end
    ):
        with pytest.raises(WireError):
            elias.unpack(*packed(text, [1]), 10, 2)
    assert not elias.unpack(*packed("000" * 10, [1]), 10, 2).any()


@pytest.mark.parametrize(
    "lengths", [[], [0], [-1], [5], [2**31 - 1], [1, 1], [-(2**31)]], ids=lambda lengths: str(lengths)
)
def test_lengths_that_do_not_fit_are_refused(lines, lengths):
    stream = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(WireError):
        elias.unpack(stream, torch.tensor(lengths, dtype=torch.int32), 20, 15)


def test_other_dtypes_are_refused():
    stream, lengths = elias.pack(numbers(20, 15, 0.1), 15)
    for wrong in ((stream.to(torch.int8), lengths), (stream, lengths.long())):
        with pytest.raises(WireError):
            elias.unpack(*wrong, 20, 15)


def test_any_bytes_are_refused_alike_by_both(monkeypatch):
    # the kernel and the plain reader agree on 1500 streams of chance
    chance, refused = torch.Generator().manual_seed(0), 0
    for _ in range(1500):
        n = int(torch.randint(1, 60, (1,), generator=chance))
        most = (1, 2, 15, 100)[int(torch.randint(4, (1,), generator=chance))]
        length = int(torch.randint(1, words(n, most) + 1, (1,), generator=chance))
        stream = torch.randint(256, (4 * length,), generator=chance, dtype=torch.uint8)
        if torch.rand(1, generator=chance) < 0.5:  # as a last word may end
            stream[-3:] = 0
        found = []
        for plain in (False, True):
            with monkeypatch.context() as patch:
                if plain:
                    patch.setattr(elias, "on_cpu", lambda *tensors: False)
                try:
                    found.append(
                        elias.unpack(stream, torch.tensor([length], dtype=torch.int32), n, most).tolist()
                    )
                except WireError:
                    found.append(None)
        assert found[0] == found[1], (stream.tolist(), n, most)
        refused += found[0] is None
    assert 500 < refused < 1500
