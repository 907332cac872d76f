"""Staleness-aware asynchronous SGD: the older a gradient, the smaller its step (Zhang et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Central


@dataclass(frozen=True)
class StalenessAware(Central):
    """Asynchronous SGD whose rate is divided, for each gradient, by the versions it is behind."""

    async def server(self, s: Node) -> None:
        async for m in s.inbox():
            if m.tag == "pull":
                await s.reply(m, s.x)
            elif m.tag == "push":
                staleness = s.version - m.version  # sigma
                s.x.sub_(m.body, alpha=m.rate / max(1, staleness))
                s.advance(m.count)
