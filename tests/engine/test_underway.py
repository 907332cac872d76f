"""While work is done elsewhere, a node answers its peers."""

from parts import play
from shoal.core.transport import Message
from shoal.engine.underway import LOOK_SECONDS, attend_until


def test_messages_are_handled_until_the_work_is_done():
    async def works(p):
        heard = []

        async def note(m):
            heard.append((m.count, p.channel.now()))

        await attend_until(lambda: p.channel.now() >= 2.0, p.mailbox, {"word": note})
        late = await p.mailbox.find("word", 1)
        return heard, p.channel.now(), late.count

    async def speaks(p):
        for number in range(3):
            await p.channel.send(0, Message("word", count=number))
            await p.channel.transport.sleep(1.0)

    heard, now, late = play(works, speaks)[0]
    assert heard == [(0, 0.25), (1, 1.25)]
    assert late == 2
    assert 2.0 <= now <= 2.25


def test_work_that_is_done_costs_no_time():
    async def works(p):
        await attend_until(lambda: True, p.mailbox, {})
        return p.channel.now()

    assert play(works)[0] == 0.0


def test_it_looks_often_enough():
    async def works(p):
        await attend_until(lambda: p.channel.now() >= 1.0, p.mailbox, {})
        return p.channel.now()

    assert 1.0 <= play(works)[0] < 1.0 + 2 * LOOK_SECONDS
