"""Wire: what a message costs the two processors and the link between them, on average."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.collectives import LinkCost
from shoal.core.transport import HEADER_BYTES
from shoal.sim import Network
from shoal.sim.hardware import Machine

MOST_LOSSES = 8  # in a row: more are too rare to matter


@dataclass(frozen=True)
class Wire:
    """A network and the machines at its ends, `busy` of whose processes work at the same time."""

    network: Network
    machine: Machine
    busy: int = 1

    @property
    def slower(self) -> float:
        """How many times as long a processor takes because others are busy on its host."""
        return 1 / self.machine.speed(min(self.busy, self.machine.per_host))

    def sending(self, nbytes: float) -> float:
        """Processor seconds of the sender."""
        send = self.machine.send
        return self.slower * (send.message + (nbytes + HEADER_BYTES) * send.byte)

    def receiving(self, nbytes: float) -> float:
        """Processor seconds of the receiver."""
        receive = self.machine.receive
        return self.slower * (receive.message + (nbytes + HEADER_BYTES) * receive.byte)

    def merging(self, nbytes: float) -> float:
        """Processor seconds to add a vector to another."""
        return self.slower * nbytes * self.machine.merge

    def leaving(self, nbytes: float) -> float:
        """Seconds for which a message occupies its sender's port."""
        return (nbytes + HEADER_BYTES) / self.network.bandwidth

    def entering(self, nbytes: float) -> float:
        """Seconds for which a message occupies its receiver's port, if that is never idle."""
        return self.leaving(nbytes) / self.network.download

    def trip(self, nbytes: float) -> float:
        """Seconds from the call that sends a message to the end of the one that receives it."""
        way = self.network.latency + self.leaving(nbytes)
        return self.sending(nbytes) + way + self.receiving(nbytes) + self.delay(1)

    def delay(self, messages: int) -> float:
        """Seconds that lost messages add to the slowest of so many that are sent at the same time."""
        loss = self.network.loss
        late = sum(1 - (1 - loss**again) ** messages for again in range(1, MOST_LOSSES))
        return self.network.retry * late if loss else 0.0

    @property
    def link(self) -> LinkCost:
        """The network alone: by it the workers choose a collective."""
        return LinkCost.of_network(self.network.latency, self.network.bandwidth)

    @property
    def whole(self) -> LinkCost:
        """A message whose receiver waits for it and merges it: processors and link together."""
        each = 1 / self.network.bandwidth + self.slower * (
            self.machine.send.byte + self.machine.receive.byte + self.machine.merge
        )
        message = self.slower * (self.machine.send.message + self.machine.receive.message)
        return LinkCost(self.network.latency + message + HEADER_BYTES * each, each)
