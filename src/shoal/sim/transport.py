"""Messages in virtual time."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from struct import pack

from shoal.core.transport import LEFT, LOST, Message
from shoal.sim.kernel import Kernel, Process, suspended
from shoal.sim.models import Network, Wires


class Switch:
    """What joins the simulated nodes: delivers messages after the time the network takes for them."""

    def __init__(self, kernel: Kernel, network: Network, seed: int) -> None:
        self.kernel = kernel
        self.ends: list[SimTransport] = []
        self._wires = Wires(network, seed)
        self._trace = hashlib.blake2b(digest_size=16)

    def add(self) -> SimTransport:
        """One more node, of the next rank."""
        end = SimTransport(self, len(self.ends))
        self.ends.append(end)
        return end

    def carry(self, src: int, dst: int, m: Message) -> None:
        """Deliver `m` when the network has moved it."""
        now = self.kernel.now
        head, length = self._wires.leave(src, dst, m.nbytes, now) if src != dst else (now, 0.0)
        self._trace.update(pack("<dddqqq", now, head, m.count, src, dst, m.nbytes) + m.tag.encode())
        end = self.ends[dst]
        if length:
            self.kernel.at(head, lambda: self._receive(end, m, length))
        else:
            self.kernel.at(head, lambda: end.deliver(m))

    def _receive(self, end: SimTransport, m: Message, length: float) -> None:
        """The head of `m` has reached its receiver."""
        tail = self._wires.enter(end.rank, length, self.kernel.now)
        self.kernel.at(tail, lambda: end.deliver(m))

    def digest(self) -> str:
        """A fingerprint of every message so far: when, from whom, to whom, what and how much."""
        return self._trace.hexdigest()


class SimTransport:
    """One simulated node's end of the network."""

    def __init__(self, switch: Switch, rank: int) -> None:
        self.rank = rank
        self.process: Process | None = None  # set when the node's coroutine is spawned
        self._switch = switch
        self._kernel = switch.kernel
        self._mailbox: deque[Message] = deque()
        self._parked = False
        self._farewell: str | None = None  # LEFT or LOST, once this node has gone
        self._noticed_at = 0.0
        self._acquainted: set[int] = set()  # whom to tell when this node goes
        self._told: set[int] = set()

    @property
    def size(self) -> int:
        """Nodes in the simulation, servers included."""
        return len(self._switch.ends)

    def now(self) -> float:
        """Virtual seconds since the start."""
        return self._kernel.now

    async def send(self, dst: int, m: Message) -> None:
        """Copy `m` and let the network carry it; takes no time of the sender's."""
        peer = self._switch.ends[dst]
        if peer._farewell is not None:
            peer._tell(self.rank)
            return
        self.acquaint(peer)
        copy = replace(m, src=self.rank, parts=tuple(p.detach().clone() for p in m.parts))
        self._switch.carry(self.rank, dst, copy)

    async def recv(self, timeout: float | None = None) -> Message:
        """The next message in order of arrival. Raises TimeoutError after `timeout` virtual seconds."""
        deadline = None if timeout is None else self._kernel.now + timeout
        if timeout is not None and not self._mailbox:
            self._kernel.after(timeout, self._wake)
        while not self._mailbox:
            if deadline is not None and self._kernel.now >= deadline:
                raise TimeoutError
            self._parked = True
            await suspended()
        return self._mailbox.popleft()

    def drain(self) -> Iterator[Message]:
        """What has arrived so far."""
        while self._mailbox:
            yield self._mailbox.popleft()

    async def sleep(self, seconds: float) -> None:
        """Let virtual time pass."""
        assert self.process is not None
        self._kernel.after(seconds, self.process.resume)
        await suspended()

    async def close(self) -> None:
        """Tell whoever this node talked with that it left."""
        self._go(LEFT, 0.0)

    def vanish(self, noticed_after: float) -> None:
        """Go without a word; those this node talked with are told after a while."""
        self._go(LOST, noticed_after)

    def deliver(self, m: Message) -> None:
        """Put `m` into the mailbox and wake the node if it waits for one."""
        if self._farewell is None:
            self._mailbox.append(m)
            self._wake()

    def acquaint(self, peer: SimTransport) -> None:
        """Have each told when the other goes, though they may never talk."""
        self._acquainted.add(peer.rank)
        peer._acquainted.add(self.rank)

    def _wake(self) -> None:
        if self._parked and self.process is not None:
            self._parked = False
            self.process.resume()

    def _go(self, farewell: str, noticed_after: float) -> None:
        if self._farewell is None:
            self._farewell = farewell
            self._noticed_at = self._kernel.now + noticed_after
            for peer in sorted(self._acquainted - {self.rank}):
                self._tell(peer)

    def _tell(self, peer: int) -> None:
        """Send `peer` the notice that this node has gone, once."""
        if peer not in self._told and self._farewell is not None:
            self._told.add(peer)
            notice = Message(self._farewell, src=self.rank)
            moment = max(self._kernel.now, self._noticed_at)
            self._kernel.at(moment, lambda: self._switch.carry(self.rank, peer, notice))
