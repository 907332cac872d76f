"""A mailbox finds messages behind others, answers to requests, and who is gone."""

import pytest

from parts import nothing, play
from shoal.core.errors import PeerLost
from shoal.core.transport import Message
from shoal.engine.protocol import Ack, Pull, Push


def test_a_message_is_found_behind_others_and_none_is_lost():
    async def speak(p):
        for tag in ("a", "b", "c"):
            await p.channel.send(1, Message(tag))

    async def listen(p):
        return [(await p.mailbox.find(tag, 0)).tag for tag in ("c", "a", "b")]

    assert play(speak, listen)[1] == ["c", "a", "b"]


def test_an_answer_belongs_to_its_request():
    async def ask(p):
        first = await p.mailbox.ask(1, Push(count=1.0))
        second = await p.mailbox.ask(1, Push(count=2.0))
        later, sooner = await p.mailbox.answer(second), await p.mailbox.answer(first)
        return later.version, sooner.version

    async def serve(p):
        for _ in range(2):
            m = await p.mailbox.next()
            assert isinstance(m, Push)
            await p.channel.send(0, Ack(seq=m.seq, version=int(10 * m.count)))

    assert play(ask, serve, servers=1)[0] == (20, 10)


def test_a_peer_that_leaves_is_named():
    async def wait(p):
        with pytest.raises(PeerLost, match="worker 1 left before it sent 'word' to worker 0"):
            await p.mailbox.find("word", 1)
        return [p.progress.works(rank) for rank in range(2)]

    assert play(wait, nothing)[0] == [True, False]


def test_requests_are_numbered_from_where_a_checkpoint_left_off():
    async def body(p):
        p.mailbox.load({"1": 41})
        _, number = await p.mailbox.ask(1, Push())
        return number, p.mailbox.state()

    assert play(body, nothing, servers=1)[0] == (42, {"1": 42})


def test_a_pull_under_way_at_a_checkpoint_takes_its_number_again():
    async def body(p):
        for request in (Push(), Pull(), Push()):
            await p.mailbox.ask(1, request)
        return p.mailbox.state()

    assert play(body, nothing, servers=1)[0] == {"1": 2}
