"""Reports: what a worker tells the keeper in an epoch, and again to a keeper that was away meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

from shoal.core.transport import Message
from shoal.engine.channel import Channel
from shoal.engine.elastic_messages import Suspects


class Reports:
    """One worker's reports in the present epoch, and whom it suspects in it."""

    def __init__(self, keeper: int, channel: Channel) -> None:
        self.suspected: set[int] = set()  # to whom a connection broke
        self._epoch = 0
        self._keeper, self._channel = keeper, channel
        self._told: list[Message] = []  # which the keeper may not have heard

    def begin_epoch(self, epoch: int) -> None:
        """Forget what was of the epoch before."""
        self._epoch = epoch
        self.suspected.clear()
        self._told.clear()

    async def tell(self, m: Message) -> None:
        """Tell the keeper, and tell it again when it was away and is back in the same epoch."""
        self._told.append(m)
        await self._channel.tell(self._keeper, m)

    async def suspect(self, ranks: Iterable[int]) -> None:
        """Tell the keeper, once an epoch, that this worker needs an epoch without these."""
        for rank in sorted({*ranks} - self.suspected):
            self.suspected.add(rank)
            await self.tell(Suspects(seq=rank, version=self._epoch))

    async def repeat(self) -> None:
        """The keeper is back: tell it everything again."""
        for m in list(self._told):
            await self._channel.tell(self._keeper, m)
