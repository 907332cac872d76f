"""What a server answers, and how: without workers that ask."""

import asyncio
from types import SimpleNamespace

import pytest
import torch

from shoal.core.transport import Message
from shoal.engine.service import Service


class Lending:
    """A transport whose peers could read in place."""

    def share(self, like):
        return like.clone()

    async def lend(self, dst, m):
        raise NotImplementedError

    async def reclaim(self, timeout=None):
        raise NotImplementedError


@pytest.mark.parametrize(("device", "in_place"), [("cpu", True), ("meta", False)])
def test_parameters_are_read_in_place_only_where_peers_can_reach_them(device, in_place):
    lent = []

    async def send(dst, m, lend=False):
        lent.append(lend)

    replica = SimpleNamespace(x=torch.empty(3, device=device))
    node = SimpleNamespace(size=1, transport=Lending(), replica=replica, x=replica.x, send=send)
    service = Service(node, None, None)
    service.begin()
    assert (replica.x is not node.x) == in_place  # it was put where peers can read
    node.x = replica.x
    asyncio.run(service.reply(Message("pull", src=0, count=3), Message("reply", (node.x,))))
    assert lent == [in_place]
