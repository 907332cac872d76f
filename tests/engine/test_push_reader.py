"""What a server reads from a push: a vector, its numbers, or why it would spoil the model."""

import pytest
import torch

from parts import play, vector
from shoal.core.errors import WireError
from shoal.engine.protocol import Push, PushWithNumbers
from shoal.engine.push_reader import PushReader


def reads(m, numel=2, fragments=()):
    """What a reader makes of a push."""

    async def body(p):
        reader = PushReader(p.coding, numel)
        reader.fragments = fragments
        return reader.decode(m)

    return play(body)[0]


def test_a_vector():
    (read,) = reads(Push(parts=(vector(3.0, 4.0),)))
    assert torch.equal(read, vector(3.0, 4.0))


def test_the_numbers_of_the_senders_optimizer_come_last():
    numbers = vector(0.1, 0.9, 0.0)
    read, theirs = reads(PushWithNumbers(parts=(vector(3.0, 4.0), numbers)))
    assert torch.equal(read, vector(3.0, 4.0))
    assert torch.equal(theirs, numbers)


@pytest.mark.parametrize(("version", "length"), [(0, 1), (1, 3), (2, 1), (5, 3)])
def test_a_fragment_is_as_long_as_the_version_says_whose_turn_it_is(version, length):
    (read,) = reads(Push(parts=(torch.ones(length, dtype=torch.float64),), version=version), 4, (1, 3))
    assert len(read) == length


@pytest.mark.parametrize("fragments", [(), (2, 1)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(bad, fragments):
    with pytest.raises(WireError, match="element 1"):
        reads(Push(parts=(vector(3.0, bad),)), fragments=fragments)


@pytest.mark.parametrize("fragments", [(), (2, 1)])
def test_another_length_is_refused(fragments):
    with pytest.raises(WireError):
        reads(Push(parts=(vector(3.0, 4.0, 5.0),)), fragments=fragments)
