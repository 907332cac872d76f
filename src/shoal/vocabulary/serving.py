"""Serving: the verbs of a server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from torch import Tensor

from shoal.core.transport import Message
from shoal.engine.protocol import Pull, Push
from shoal.vocabulary.any_node import AnyNode


class Serving(AnyNode):
    """What a server does with what workers push and ask for."""

    @property
    def version(self) -> int:
        """Versions of the model since the start, see `advance`; at a worker, as of its last pull or news."""
        return self.engine.progress.version if self.engine.is_server else self.engine.client.version

    @property
    def active(self) -> set[int]:
        """The workers that still contribute: neither gone nor done with all they had to do."""
        return self.engine.service.active

    @property
    def role(self) -> int:
        """Which of the servers that the algorithm names this is a shard of, from 0."""
        return self.engine.identity.role

    def counterpart(self, role: int) -> int:
        """The rank of the node that owns the same slice in another server."""
        me = self.engine.identity
        return me.rank + (role - me.role) * me.shards

    def inbox(self, fragments: int = 1) -> AsyncIterator[Message]:
        """Push and Pull messages in order of arrival, pushes decoded; ends when every worker has left.

        Every push comes once, and none that is not finite. A Fewer message says that a worker contributes
        no more, a RolledBack message that this server restarted from a snapshot. With several `fragments`,
        pushes carry one each: fragment `version % fragments`, by the version that the worker has.
        """
        service = self.engine.service
        if fragments > 1:
            places = self.fragments(fragments)
            service.reader.fragments = [sum(part.stop - part.start for part in each) for each in places]
        return service.messages()

    async def serve(self, apply: Callable[[Push], Any]) -> None:
        """Answer every pull at once, and make a new version with `apply` for every push."""
        async for m in self.inbox():
            if isinstance(m, Pull):
                await self.reply(m, self.x)
            elif isinstance(m, Push):
                apply(m)
                self.advance(m.count)

    async def reply(self, m: Message, v: Tensor, version: int | None = None) -> None:
        """Answer a pull with a state, of this version if it is not the newest. Exact."""
        await self.engine.service.reply(m, v, version)

    def advance(self, samples: float) -> None:
        """The model is a new version, with so many more samples in it."""
        self.engine.progress.advance(samples)
        for tell in self.engine.on_update:
            tell()
