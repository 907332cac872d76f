"""Staleness-aware asynchronous SGD: the older a gradient, the smaller its step (Zhang et al. 2016)."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.engine.protocol import Push
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Central


@dataclass(frozen=True)
class StalenessAware(Central):
    """Asynchronous SGD whose rate is divided, for each gradient, by the versions it is behind."""

    async def server(self, s: Node) -> None:
        def apply(push: Push) -> None:
            staleness = s.version - push.version  # sigma
            s.descend(push.body, push, scale=1 / max(1, staleness))

        await s.serve(apply)
