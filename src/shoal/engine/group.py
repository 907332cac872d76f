"""Group: the workers as one of them sees them, for collectives; and what a collective is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from copy import copy
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

from torch import Tensor

from shoal.core.identity import NodeIdentity
from shoal.core.replica import Replica
from shoal.core.transport import Message, Shows, offers
from shoal.engine.channel import Channel
from shoal.engine.coding import Coding
from shoal.engine.mailbox import Mailbox
from shoal.engine.protocol import Handlers
from shoal.engine.variables import Variables

PRESENT = 1e-30
"""The weight of a worker without samples that goes on: nothing beside one sample, and more than nothing."""


class Group:
    """One worker's access to all workers, for the average of a vector."""

    def __init__(
        self,
        identity: NodeIdentity,
        channel: Channel,
        mailbox: Mailbox,
        coding: Coding,
        variables: Variables,
        replica: Replica,
    ) -> None:
        self.rank = identity.rank
        self.size = identity.workers
        self.coding = coding
        self.meter = channel.meter
        self.transport = channel.transport
        self.replica = replica
        self.now = channel.now
        self.keep = variables.keep
        self.epoch = 0
        self.measured: dict[str, Any] = {}  # what these workers have found out together
        self.handlers: Handlers = {}  # for messages that come while a collective waits
        self._channel = channel
        self._mailbox = mailbox
        self._identity = identity
        self._members: Sequence[int] = range(identity.workers)  # the ranks of their nodes

    @property
    def x(self) -> Tensor:
        """This worker's parameters."""
        return self.replica.x

    @property
    def timeout(self) -> float | None:
        """Seconds that this worker waits for a message."""
        return self._channel.timeout

    @property
    def others(self) -> list[int]:
        """The other workers, beginning with the next, so that not all send to worker 0 first."""
        return [(self.rank + k) % self.size for k in range(1, self.size)]

    def regroup(self, members: Sequence[int], epoch: int) -> None:
        """From now on these are all workers, in this order. What the codec remembers is forgotten.

        Its streams are of parts of the vector, which is cut by the number of workers.
        """
        self._members, self.epoch = members, epoch
        self.rank, self.size = members.index(self._identity.rank), len(members)
        self.coding.forget()
        self.measured.clear()

    def send(self, dst: int, m: Message) -> Coroutine[Any, Any, None]:
        """Send a message exactly; the caller may change its tensors afterwards, unless they are settled."""
        m.version = self._stamp
        return self._channel.send(self._members[dst], m)

    def can_show(self) -> bool:
        """Whether this worker and each of the others can map each other's memory."""
        transport = self.transport
        if not offers(type(transport), Shows):
            return False
        return all(cast(Shows, transport).can_show(self._members[rank]) for rank in self.others)

    async def show(self, dst: int, m: Message) -> None:
        """Let a worker map the only part of `m`, which came from the transport's `share`; not metered."""
        m.version = self._stamp
        await cast(Shows, self.transport).show(self._members[dst], m)

    def uncompressed(self, like: Tensor) -> Group:
        """The same workers, for vectors of the dtype and device of `like` that travel exactly."""
        group = copy(self)
        group.coding = self.coding.uncompressed(like)
        return group

    def take(self, tag: str, src: int) -> Coroutine[Any, Any, Message]:
        """The next message of `src` with that tag.

        Raises PeerLost as soon as any worker is lost: a sum that lacks one cannot be completed.
        """
        return self._mailbox.find(tag, self._members[src], self._members, self.handlers, self._stamp)

    def recv(self, tag: str, src: int) -> Coroutine[Any, Any, Message]:
        """The next message of `src` with that tag. Raises PeerLost if `src` is lost."""
        return self._mailbox.find(tag, self._members[src], (), self.handlers, self._stamp)

    @property
    def _stamp(self) -> int:
        """The version of what these workers send each other; 0 is left to messages of the algorithm."""
        return self.epoch + 1

    def holds(self, tag: str, sources: Iterable[int]) -> bool:
        """Whether a message with that tag has arrived from each of these; never waits."""
        return self._mailbox.holds(tag, [self._members[src] for src in sources], self._stamp)


Mean: TypeAlias = Callable[[Group, Tensor, float], Awaitable[tuple[Tensor, float]]]
"""A collective: (group, vector, weight) -> (weighted average, total weight), zeros if that is 0."""


class Exchange(Protocol):
    """An average under way."""

    async def progress(self) -> None:
        """Do what can be done without waiting."""
        ...

    async def finish(self) -> tuple[Tensor, float]:
        """The weighted average and the total weight (zeros if that is 0), when all have come."""
        ...


@runtime_checkable
class Starts(Protocol):
    """A collective that goes on while the worker does something else."""

    async def start(self, group: Group, v: Tensor, weight: float, number: int, key: str) -> Exchange:
        """Begin an average; `v` may change afterwards. Every worker gives it the same number.

        Vectors of one key are compressed as one stream.
        """
        ...


@runtime_checkable
class Prepares(Protocol):
    """A collective that needs something of a worker before its first gradient."""

    def prepare(self, group: Group) -> None:
        """See to it."""
        ...
