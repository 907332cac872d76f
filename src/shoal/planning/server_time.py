"""How long a step takes where a server holds the model: nobody waits, all wait, or aggregators between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.core.transport import HEADER_BYTES
from shoal.planning.mean_time import RoundCost
from shoal.planning.message_time import Wire
from shoal.planning.workload import CodecCost


def turn_taking(workers: int, own: float, queues: Sequence[float]) -> float:
    """Seconds of a worker's turn: its own time, and its service in each queue with the wait for it.

    Mean value analysis of a closed network (Reiser and Lavenberg 1980): a worker that arrives finds what the
    others, one fewer, leave there on average. Services are of one length, so half of the one under way is
    over.
    """
    found, used, turn = [0.0] * len(queues), [0.0] * len(queues), own + sum(queues)
    for others in range(workers):
        stays = [each * (1 + max(0.0, n - u / 2)) for each, n, u in zip(queues, found, used, strict=True)]
        turn = max(own + sum(stays), (others + 1) * max(queues))
        found = [(others + 1) * stay / turn for stay in stays] if turn else found
        used = [min(1.0, (others + 1) * each / turn) for each in queues] if turn else used
    return turn


@dataclass(frozen=True)
class Served:
    """Workers of one server, each of whose shards has a slice of the model of `nbytes`."""

    workers: int
    shards: int
    nbytes: float
    codec: CodecCost
    wire: Wire

    @property
    def pushed(self) -> float:
        """Bytes of an update on the wire."""
        return self.codec.ratio * self.nbytes

    def turn(
        self, steps: float, pulls: float = 1.0, pushes: float = 1.0, *, hidden: bool = False
    ) -> RoundCost:
        """The turn of a worker that computes for `steps` seconds, with so many pulls and pushes.

        Nobody waits for another, but for its turn at the server: at its ports and its processor. `hidden`
        exchanges go on while the worker computes.
        """
        wire = self.wire
        coding = wire.slower * self.nbytes * self.codec.encode * pushes
        out = pulls * wire.leaving(self.nbytes / self.shards) + pushes * wire.leaving(0)
        into = pulls * wire.entering(0) + pushes * wire.entering(self.pushed / self.shards)
        queues = [out, into, pulls * self._answering + pushes * self._applying]
        talk = pulls * self.pulling + pushes * self.pushing
        own = max(0.0, (0.0 if hidden else steps + coding) + talk - sum(queues))
        seconds = turn_taking(self.workers, own, queues)
        seconds = max(seconds, steps + coding) if hidden else seconds
        return RoundCost(seconds, self.workers * self._sent(pulls, pushes))

    def gathered(self, slowest: float) -> RoundCost:
        """A step of all workers, of which the slowest computes for so long: the server waits for everyone."""
        wire = self.wire
        answer = max(wire.leaving(self.nbytes / self.shards), self._answering)
        update = max(wire.entering(self.pushed / self.shards), self._applying)
        queue = (self.workers - 1) * max(answer, update)
        coding = wire.slower * self.nbytes * self.codec.encode
        seconds = self.pulling + slowest + coding + self.pushing + queue
        return RoundCost(seconds, self.workers * self._sent(1.0, 1.0))

    def through(self, groups: int, slowest: float) -> RoundCost:
        """The same through aggregators, each of which pushes the mean of its group and pulls the model."""
        above = Served(groups, self.shards, self.nbytes, self.codec, self.wire)
        each = Served(-(-self.workers // groups), self.shards, self.nbytes, self.codec, self.wire)
        near = each.gathered(slowest).seconds - self.wire.trip(0)  # the next pull waits there already
        sent = (self.workers + groups) * self._sent(1.0, 1.0) + self.workers * HEADER_BYTES
        return RoundCost(near + above.gathered(0.0).seconds, sent)

    def windowed(self, steps: float) -> RoundCost:
        """The turn of a worker that reads the server's memory and adds to it, without its help."""
        network, merge = self.wire.network, self.wire.merging(self.nbytes)
        vector, short = self.wire.leaving(self.nbytes), self.wire.leaving(0)
        own = steps + 4 * network.latency + 2 * (merge + self.wire.delay(2))
        queues = [vector + short, self.wire.entering(self.nbytes) + self.wire.entering(0)]
        return RoundCost(turn_taking(self.workers, own, queues), self.workers * self._sent(1.0, 1.0))

    @property
    def pulling(self) -> float:
        """Seconds from a pull to its answer."""
        return self.wire.trip(0) + self.wire.trip(self.nbytes)

    @property
    def pushing(self) -> float:
        """Seconds from an encoded push to its answer."""
        return self.wire.trip(self.pushed) + self._merging + self.wire.trip(0)

    @property
    def _answering(self) -> float:
        """Processor seconds that a pull costs each shard."""
        return self.wire.receiving(0) + self.wire.sending(self.nbytes / self.shards)

    @property
    def _applying(self) -> float:
        """Processor seconds that a push costs each shard."""
        taken = self.wire.receiving(self.pushed / self.shards) + self.wire.sending(0)
        return taken + self._merging / self.shards

    @property
    def _merging(self) -> float:
        return self.wire.merging(self.nbytes) + self.wire.slower * self.nbytes * self.codec.decode

    def _sent(self, pulls: float, pushes: float) -> float:
        """Bytes of a worker's pulls and pushes, and of the answers to them."""
        headers = 2 * HEADER_BYTES * self.shards
        return pulls * (self.nbytes + headers) + pushes * (self.pushed + headers)
