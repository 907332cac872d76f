"""Asynchronous SGD: every gradient is applied as it arrives, however old (Dean et al. 2012)."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Central


@dataclass(frozen=True)
class ASGD(Central):
    """Nobody waits for anybody; a gradient is as many versions old as others pushed meanwhile."""

    async def server(self, s: Node) -> None:
        await s.serve(lambda push: s.descend(push.body, push))
