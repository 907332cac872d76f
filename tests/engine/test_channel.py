"""A channel meters what crosses it, and tells who listens."""

from parts import nothing, play, vector
from shoal.core.transport import HEADER_BYTES, Message


def test_bytes_and_messages_are_counted_at_both_ends():
    async def send(p):
        await p.channel.send(1, Message("word", (vector(1.0, 2.0),)))
        return p.channel.meter.bytes_sent, p.channel.meter.messages_sent

    async def take(p):
        m = await p.mailbox.find("word", 0)
        return m.body.tolist(), p.channel.meter.bytes_received, p.channel.meter.wait_seconds

    said = play(send, take)
    assert said == {0: (HEADER_BYTES + 16, 1), 1: ([1.0, 2.0], HEADER_BYTES + 16, 0.25)}


def test_listeners_hear_of_sends_and_faults():
    async def body(p):
        heard = []
        p.channel.on_send = [lambda dst, m: heard.append((dst, m.tag))]
        p.channel.on_fault = [heard.append]
        await p.channel.send(1, Message("word"))
        p.channel.note_fault("a disk is full")
        return heard, p.channel.meter.faults

    assert play(body, nothing)[0] == ([(1, "word"), "a disk is full"], ["a disk is full"])
