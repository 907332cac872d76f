"""Channel: a node's transport, with everything that crosses it metered and shown to observers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from shoal.core.identity import NodeIdentity
from shoal.core.meter import Meter
from shoal.core.transport import Lends, Message, Transport, Works, offers

Sent = Callable[[int, Message], None]
Received = Callable[[Message], None]
Faulted = Callable[[str], None]

_NOTHING = nullcontext()


class Channel:
    """Sends and receives for one node. `timeout` is how long it waits for a message before it gives up.

    `on_send`, `on_receive` and `on_fault` are called for every message and for every fault.
    """

    def __init__(self, transport: Transport, identity: NodeIdentity, timeout: float | None = None) -> None:
        self.transport = transport
        self.timeout = timeout
        self.meter = Meter()
        self.waited = 0.0  # seconds in all that it has waited with a limit: deadlines are counted in these
        self.now = transport.now
        self.drain = transport.drain  # unmetered; never waits
        self.on_send: Sequence[Sent] = ()
        self.on_receive: Sequence[Received] = ()
        self.on_fault: Sequence[Faulted] = ()
        self._identity = identity
        self._incarnation = identity.incarnation
        self._worker = cast(Works, transport) if offers(type(transport), Works) else None
        self.counts_work = self._worker is not None and self._worker.counts_work()
        self._lender = cast(Lends, transport) if offers(type(transport), Lends) else None

    async def send(self, dst: int, m: Message, lend: bool = False) -> None:
        """Send a message exactly; the caller may change its tensors afterwards.

        With `lend` the receiver reads the tensor in place, where the transport can do that.
        """
        m.incarnation = self._incarnation
        meter, began = self.meter, self.now()
        if lend and self._lender is not None:
            await self._lender.lend(dst, m)
        else:
            await self.transport.send(dst, m)
        meter.send_seconds += self.now() - began
        meter.bytes_sent += m.nbytes
        meter.messages_sent += 1
        for tell in self.on_send:
            tell(dst, m)

    def charge(self, work: str, nbytes: int) -> None:
        """In virtual time, let this work of the node take its time; elsewhere it has taken it."""
        if self._worker is not None:
            self._worker.charge(work, nbytes)

    def apart(self) -> AbstractContextManager[None]:
        """While inside, what the node computes takes no virtual time by itself: it is counted elsewhere."""
        return _NOTHING if self._worker is None else self._worker.apart()

    def call_apart(self, action: Callable[..., None], *about: Any) -> None:
        """Do something, as telling an observer, that takes no virtual time by itself."""
        if not self.counts_work:
            action(*about)
            return
        with self.apart():
            action(*about)

    async def await_apart(self, hook: Callable[..., Awaitable[None]], *about: Any) -> None:
        """Do what is done between two steps, such as saving them; what it computes takes no virtual time."""
        with self.apart():
            await hook(*about)

    def work(self, seconds: float) -> Awaitable[None]:
        """In virtual time, let the node compute for so long."""
        return (self.transport.sleep if self._worker is None else self._worker.work)(seconds)

    def begin_work(self, seconds: float) -> float:
        """As `work`, while the node handles messages: how many seconds that takes."""
        return seconds if self._worker is None else self._worker.begin_work(seconds)

    def recv(self, timeout: float | None = None) -> Coroutine[Any, Any, Message]:
        """The next message, unmetered. Raises TimeoutError after `timeout` seconds.

        `waited` grows by what was waited, and not by what the clock has jumped, as far as that can be told.
        """
        return self.transport.recv() if timeout is None else self._recv_within(timeout)

    async def _recv_within(self, timeout: float) -> Message:
        began = self.now()
        try:
            m = await self.transport.recv(timeout)
        except TimeoutError:
            self.waited += timeout
            raise
        elapsed = self.now() - began
        if 0 <= elapsed <= timeout:  # else the clock has jumped
            self.waited += elapsed
        return m

    async def tell(self, dst: int, m: Message) -> None:
        """Send a word about the run itself, which is not metered: it belongs to no average and no model."""
        m.incarnation = self._incarnation
        await self.transport.send(dst, m)

    def count_received(self, m: Message) -> None:
        """Meter a message that was taken from the transport."""
        self.meter.bytes_received += m.nbytes
        for tell in self.on_receive:
            tell(m)

    def count_wait(self, rank: int, seconds: float) -> None:
        """Meter the time until a message of `rank` came; a server's waiting does not count."""
        if not self._identity.is_server:
            self.meter.wait_seconds += seconds
            self.meter.waited_for[rank] += seconds

    def note_fault(self, text: str) -> None:
        """Record a fault that the node survives."""
        self.meter.faults.append(text)
        for tell in self.on_fault:
            tell(text)
