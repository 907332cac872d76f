"""How long a step takes where workers talk to a few others, in rounds or at random."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.transport import HEADER_BYTES
from shoal.planning.mean_time import RoundCost
from shoal.planning.message_time import Wire


@dataclass(frozen=True)
class Peers:
    """Workers that send `nbytes` to `degree` others each."""

    workers: int
    degree: int
    nbytes: float
    wire: Wire

    def in_rounds(self, slowest: float, *, overlap: bool) -> RoundCost:
        """Give, compute, take: with `overlap` messages travel meanwhile, else after the step.

        The slowest of those who wait for each other computes for so many seconds.
        """
        wire, n = self.wire, self.nbytes
        sending, taking = self.degree * wire.sending(n), self.degree * wire.receiving(n)
        way = wire.network.latency + self.degree * wire.leaving(n) + wire.delay(self.degree * self.workers)
        seconds = max(sending + slowest, sending + way) if overlap else slowest + sending + way
        return RoundCost(seconds + taking, self._sent)

    def asked(self, step: float) -> RoundCost:
        """Ask one other for its model, which answers while it computes."""
        reply = self.wire.leaving(self.nbytes)
        own = step + self.wire.trip(0) + self.wire.trip(self.nbytes) - reply
        seconds = own + self._at_random(own, reply)
        return RoundCost(seconds, self.workers * (self.nbytes + 2 * HEADER_BYTES))

    def swapped(self, step: float) -> RoundCost:
        """Half of the workers swap models with the other half, computing meanwhile; fast ones do more."""
        wire, n = self.wire, self.nbytes
        busy, way = wire.sending(n) + wire.receiving(n), wire.leaving(n)
        alone = 2 * (wire.trip(n) - way)
        asking = max(step + busy, alone + way + self._at_random(max(step - way, alone + way), way))
        answering = step + busy
        swaps = answering / asking  # of an asking worker, while an answering one takes a step
        seconds = 2 / (1 / asking + 1 / answering)
        return RoundCost(seconds, self.workers * (n + HEADER_BYTES) * 2 * swaps / (1 + swaps))

    def _at_random(self, own: float, service: float) -> float:
        """Seconds at the port of a worker that was drawn, where others that drew it may wait, too."""
        stay, others = service, (self.workers - 1) / self.workers
        for _ in range(20):  # it converges: each time the wait changes by less than half as much
            stay = service * (1 + others * stay / (own + stay)) if own + stay else 0.0
        return stay

    def told(self, step: float) -> RoundCost:
        """Tell all others, and wait for nobody: the port must keep up with the steps."""
        wire, n, others = self.wire, self.nbytes, self.workers - 1
        busy = step + others * (wire.sending(n) + wire.receiving(n))
        return RoundCost(max(busy, others * wire.leaving(n)), self.workers * others * (n + HEADER_BYTES))

    @property
    def _sent(self) -> float:
        return self.workers * self.degree * (self.nbytes + HEADER_BYTES)
