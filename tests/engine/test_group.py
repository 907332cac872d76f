"""A group is how a collective sees the workers."""

import pytest

from parts import nothing, play, vector
from shoal.core.errors import PeerLost
from shoal.core.transport import Message


def test_messages_go_to_the_next_worker_first():
    async def body(p):
        return p.group.others

    assert play(*[body] * 4)[2] == [3, 0, 1]


def test_a_vector_is_taken_from_a_worker():
    async def give(p):
        await p.group.send(1, Message("part", (vector(1.0, 2.0),)))

    async def take(p):
        before = p.group.holds("part", [0])
        m = await p.group.take("part", 0)
        return before, m.body.tolist()

    assert play(give, take)[1] == (False, [1.0, 2.0])


def test_a_worker_that_leaves_does_not_hang_its_peers():
    async def wait(p):
        with pytest.raises(PeerLost, match="worker 1 left"):
            await p.group.recv("part", 1)
        return True

    assert play(wait, nothing)[0]
