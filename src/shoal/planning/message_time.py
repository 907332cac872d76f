"""Wire: what a message costs the two processors and the link between them, on average."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.collectives import LinkCost
from shoal.core.transport import HEADER_BYTES
from shoal.sim import Network
from shoal.sim.hardware import Machine

MERGE_PASSES = 5.0  # over a message that is merged: read, add, write, copy into the result
PASSES_OF_ONE = 2.5  # operation of torch: it reads one or two vectors and writes one
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
        return self.slower * self.machine.send.of(round(nbytes) + HEADER_BYTES)

    def receiving(self, nbytes: float) -> float:
        """Processor seconds of the receiver."""
        return self.slower * self.machine.receive.of(round(nbytes) + HEADER_BYTES)

    def merging(self, nbytes: float) -> float:
        """Processor seconds to add a vector that has arrived to another."""
        return self.touching(nbytes, MERGE_PASSES)

    def touching(self, nbytes: float, passes: float) -> float:
        """Processor seconds of operations that read or write a vector so many times in all."""
        vectors = self.machine.vectors
        return self.slower * (passes / PASSES_OF_ONE * vectors.each + passes * nbytes * vectors.byte)

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
        machine = self.machine
        byte = machine.send.byte + machine.receive.byte + MERGE_PASSES * machine.vectors.byte
        each = 1 / self.network.bandwidth + self.slower * byte
        message = (
            machine.send.each + machine.receive.each + MERGE_PASSES / PASSES_OF_ONE * machine.vectors.each
        )
        return LinkCost(self.network.latency + self.slower * message + HEADER_BYTES * each, each)
