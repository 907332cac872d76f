"""Packing: which bit of which word a number is."""

import pytest
import torch

from sampling import sampled
from shoal.codecs.packing import packed, unpacked, words


def test_one_bit_each_row_by_row():
    # numbers 0 and 2 are in the first row, 17 is the second of the next; word 1 has it in bit 1
    numbers = torch.zeros(18, dtype=torch.int64)
    numbers[[0, 2, 17]] = 1
    assert packed(numbers, 1).tolist() == [1, 2, 1] + 13 * [0]


def test_two_bits_each_row_by_row():
    # 3 in the first row; 2 in the second, so two bits further up; 3 as number 255 is the top of the last word
    numbers = torch.zeros(256, dtype=torch.int64)
    numbers[[0, 16, 255]] = torch.tensor([3, 2, 3])
    assert packed(numbers, 2).tolist() == [3 + (2 << 2)] + 14 * [0] + [-(1 << 30)]


@pytest.mark.parametrize(
    ("bits", "length"), sampled([1, 2], [0, 1, 15, 16, 17, 255, 256, 257, 511, 512, 513, 5000])
)
def test_what_is_packed_comes_back(bits, length):
    numbers = torch.randint(0, 2**bits, (length,), generator=torch.Generator().manual_seed(length))
    full = 512 // bits
    assert len(packed(numbers, bits)) == words(length, bits) == 16 * ((length + full - 1) // full)
    assert torch.equal(unpacked(packed(numbers, bits), bits, length), numbers)
