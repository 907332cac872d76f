"""What a server answers, and how: without workers that ask."""

import asyncio

import pytest
import torch

from shoal.core.identity import NodeIdentity
from shoal.core.replica import Parameters
from shoal.engine.channel import Channel
from shoal.engine.one_sided import OneSided
from shoal.transports.alone import Alone


class Lending(Alone):
    """A transport whose peers could read in place."""

    def share(self, like):
        return like.clone()

    async def lend(self, dst, m):
        raise NotImplementedError

    async def reclaim(self, timeout=None):
        raise NotImplementedError


@pytest.mark.parametrize(("device", "in_place"), [("cpu", True), ("meta", False)])
def test_parameters_are_read_in_place_only_where_peers_can_reach_them(device, in_place):
    me, replica = NodeIdentity(1, 1, servers=1), Parameters(torch.empty(3, device=device))
    one_sided, before = OneSided(replica, me, Channel(Lending(), me)), replica.x
    one_sided.share()
    assert (replica.x is not before) == in_place  # it was put where peers can read
    assert one_sided.lends(replica.x) == in_place
    assert not one_sided.lends(before.clone())
    if not in_place:
        asyncio.run(one_sided.reclaim())  # nobody reads there, so nobody is waited for
