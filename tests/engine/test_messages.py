"""How nodes are called, and what a message says of itself when it is taken for another."""

import pytest
import torch

from shoal.core.errors import WireError
from shoal.core.identity import NodeIdentity
from shoal.core.transport import Message


def test_a_server_alone_is_the_server_and_several_are_counted_from_0():
    one, two = NodeIdentity(0, workers=2, servers=1), NodeIdentity(0, workers=1, servers=1, shards=2)
    assert [one.name_of(rank) for rank in range(3)] == ["worker 0", "worker 1", "the server"]
    assert [two.name_of(rank) for rank in range(3)] == ["worker 0", "server 0", "server 1"]


@pytest.mark.parametrize("parts", [0, 2])
def test_a_message_without_the_one_part_that_is_asked_for_says_which_it_is(parts):
    m = Message("fewer", (torch.zeros(1),) * parts, src=3)
    with pytest.raises(
        WireError, match=f"message 'fewer' of node 3 has {parts} parts where one is asked for"
    ):
        _ = m.body
