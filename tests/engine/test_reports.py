"""Reports reach a keeper that was away, and nobody is suspected twice in an epoch."""

from parts import nothing, play
from shoal.engine.elastic_messages import Settled
from shoal.engine.reports import Reports


async def hear(p):
    """What the keeper is told: tag, rank, epoch."""
    await p.channel.transport.sleep(5.0)
    p.mailbox.has_arrived()
    return [(m.tag, m.seq, m.version) for tag in ("suspects", "settled") for m in p.mailbox.poll(tag)]


def heard(tell):
    """What the keeper hears of worker 0, which has these reports and does that with them."""

    async def worker(p):
        await tell(Reports(p.me.keeper, p.channel))

    return play(worker, nothing, hear, keeper=True)[2]


def test_each_is_suspected_once_in_an_epoch():
    async def tell(reports):
        reports.begin_epoch(3)
        await reports.suspect([2, 1])
        await reports.suspect([1, 4])
        assert reports.suspected == {1, 2, 4}

    assert heard(tell) == [("suspects", rank, 3) for rank in (1, 2, 4)]


def test_a_new_epoch_begins_without_suspicion():
    async def tell(reports):
        reports.begin_epoch(3)
        await reports.suspect([1])
        reports.begin_epoch(4)
        assert not reports.suspected
        await reports.suspect([1])

    assert heard(tell) == [("suspects", 1, 3), ("suspects", 1, 4)]


def test_a_keeper_that_is_back_hears_all_of_this_epoch_again_and_nothing_older():
    async def tell(reports):
        reports.begin_epoch(3)
        await reports.suspect([1])
        reports.begin_epoch(4)
        await reports.tell(Settled(version=4))
        await reports.suspect([2])
        await reports.repeat()

    assert heard(tell) == [("suspects", 1, 3), *[("suspects", 2, 4)] * 2, *[("settled", 0, 4)] * 2]
