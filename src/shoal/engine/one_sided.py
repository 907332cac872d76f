"""One-sided access: peers read a server's parameters in place, or read and add to them without its help.

The only writer of `replica.x` as a name: where the parameters lie is decided here.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from shoal.core.errors import Unavailable
from shoal.core.identity import NodeIdentity, slice_of
from shoal.core.replica import Replica
from shoal.core.transport import Lends, Windows, offers
from shoal.engine.channel import Channel

RECLAIM_SECONDS = 5.0
"""How long a reader may take for a vector it reads in place."""


class OneSided:
    """Zero-copy reads of a server's vector, and windows that all nodes open together."""

    def __init__(self, replica: Replica, identity: NodeIdentity, channel: Channel) -> None:
        self.is_open = False  # whether windows are: then pushes and pulls go through them
        self._replica = replica
        self._identity = identity
        self._channel = channel
        transport, is_reachable = channel.transport, replica.x.device.type == "cpu"
        self._lender: Lends | None = None
        if identity.is_server and is_reachable and isinstance(transport, Lends):
            self._lender = transport

    # -- zero-copy reads -----------------------------------------------------------------------

    def share(self) -> None:
        """At a server: move the parameters to where peers can read them, if the transport can do that."""
        if self._lender is not None:
            self._replica.x = self._lender.share(self._replica.x)

    def lends(self, v: Tensor) -> bool:
        """Whether peers can read this tensor in place."""
        return self._lender is not None and v is self._replica.x

    @property
    def can_lend(self) -> bool:
        """Whether peers can read the parameters in place."""
        return self._lender is not None

    async def reclaim(self) -> None:
        """Before the parameters change: wait until nobody reads them."""
        if self._lender is not None:
            await self._lender.reclaim(RECLAIM_SECONDS)

    # -- windows -------------------------------------------------------------------------------

    async def open(self) -> None:
        """Expose the parameters of the first server's shards; all nodes do this together."""
        windows, me, x = self._windows(), self._identity, self._replica.x
        self.is_open = True
        for shard, owner in enumerate(me.server_ranks[: me.shards]):
            if owner == me.rank:
                self._replica.x = await windows.open_window(owner, x)
            else:  # another server has no use for it
                mine = x[:0] if me.is_server else x[slice_of(shard, me.shards, x.numel())]
                await windows.open_window(owner, mine)

    async def fetch(self, owner: int, out: Tensor) -> int:
        """Copy an exposed vector to `out`; how often it had been added to."""
        began = self._channel.now()
        seen = await self._windows().fetch(owner, out)
        self._channel.meter.wait_seconds += self._channel.now() - began
        return seen

    async def accumulate(self, owner: int, v: Tensor, seen: int) -> None:
        """Add to an exposed vector; `seen` is what the last fetch returned."""
        began = self._channel.now()
        before = await self._windows().accumulate(owner, v)
        self._channel.meter.staleness[before - seen] += 1
        self._channel.meter.send_seconds += self._channel.now() - began

    def _windows(self) -> Windows:
        transport = self._channel.transport
        if not offers(type(transport), Windows):
            raise Unavailable(
                f"{type(transport).__name__} has no memory that all reach; "
                "take transport 'processes', 'mpi' or 'sim'"
            )
        return cast(Windows, transport)
