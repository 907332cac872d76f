"""Balance shares out each step's samples by the speeds that workers measured."""

import pytest

from parts import play
from shoal.engine.balance import Balance


class Cut:
    """A replica that notes how its share is cut."""

    def __init__(self, replica):
        self.x, self.cuts = replica.x, []

    def weigh(self, speeds):
        self.cuts.append(list(speeds))


def balance_of(p, replica):
    return Balance(p.me, p.channel, p.mailbox, p.progress, p.variables, replica, lambda t: False)


def test_the_speeds_of_all_hold_from_the_next_exchange_on():
    async def body(p):
        replica = Cut(p.replica)
        balance = balance_of(p, replica)
        for _ in range(5):
            balance.measure()
            await balance.share_out()
            p.progress.count_gradient(10)
            p.channel.meter.compute_seconds += 1.0 + 4.0 * p.me.rank
            p.progress.finish_step()
            await p.channel.transport.sleep(1.0)
        return replica.cuts

    said = play(body, body)
    assert said[0] == said[1]
    assert said[0][-1] == [10.0, 2.0]  # samples a second


def test_a_replica_that_cannot_change_its_share_is_refused():
    async def body(p):
        with pytest.raises(TypeError, match="VectorReplica cannot change its share"):
            balance_of(p, p.replica)
        return True

    assert play(body)[0]
