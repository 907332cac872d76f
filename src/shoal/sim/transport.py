"""SimTransport: messages in virtual time, over a simulated network."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from struct import Struct

from torch import Tensor

from shoal.core.seeds import derive
from shoal.core.transport import JOINED, LEFT, LOST, NOTICES, Message
from shoal.sim.faults import Weather
from shoal.sim.hardware import Machine
from shoal.sim.kernel import Kernel, Process, suspended
from shoal.sim.links import Links
from shoal.sim.models import Network, Wires
from shoal.sim.processors import Processors
from shoal.sim.vector_work import VectorWork
from shoal.sim.window import Window

_ENTRY = Struct("<dddqqq")  # of the fingerprint, beside the tag: when, samples, from whom, to whom, how much
_NOTHING = nullcontext()


class Switch:
    """Connects the simulated nodes: delivers each message after the time that the network takes for it."""

    def __init__(
        self,
        kernel: Kernel,
        network: Network,
        seed: int,
        weather: Weather | None = None,
        machine: Machine | None = None,
        kind: type[SimTransport] | None = None,
    ) -> None:
        self.kernel = kernel
        self.machine, self._kind = machine, kind or SimTransport
        self._hosts: dict[int, Processors] = {}
        self.ends: list[SimTransport] = []
        self.links = Links(kernel, self.ends)
        self.windows: dict[int, Window] = {}
        self._weather = weather
        self._dice = random.Random(derive(seed, "weather"))
        self.network = network
        self._wires = Wires(network, seed)
        self._trace = hashlib.blake2b(digest_size=16)

    def add(self) -> SimTransport:
        """Add a node with the next rank, and return its transport."""
        end = self._kind(self, len(self.ends))
        self.ends.append(end)
        return end

    def host_of(self, rank: int) -> Processors | None:
        """The host of a node; None where nothing but gradients and wires takes time."""
        if self.machine is None:
            return None
        return self._hosts.setdefault(rank // self.machine.per_host, Processors(self.kernel, self.machine))

    def carry(self, src: int, dst: int, m: Message) -> None:
        """Deliver `m` after its time on the network. Bad weather may lose, duplicate or delay it."""
        weather, dice = self._weather, self._dice
        if weather is None or m.tag in NOTICES or self.kernel.now >= weather.until:
            arrive = self.arrival(src, dst, m) if self.links.is_used else partial(self.ends[dst].deliver, m)
            self.transfer(src, dst, m, arrive)
            return
        for _ in range(2 if dice.random() < weather.double else 1):
            if dice.random() >= weather.loss:
                late = dice.random() * weather.delay
                copy = m.copied(m.src, tuple(p.clone() for p in m.parts))
                arrive = self.arrival(src, dst, copy)
                self.kernel.after(late, partial(self.transfer, src, dst, copy, arrive))

    def arrival(self, src: int, dst: int, m: Message) -> Callable[[], None]:
        """What happens when `m`, sent now, comes to the end of its way."""
        links = self.links
        if not links.is_used or src == dst:
            return partial(self.ends[dst].deliver, m)
        return partial(links.arrive, src, dst, links.connection(src, dst), m)

    def transfer(self, src: int, dst: int, m: Message, then: Callable[[], None]) -> None:
        """Occupy the network with `m`, and call `then` when it has arrived."""
        now, nbytes = self.kernel.now, m.nbytes
        head, length = self._wires.leave(src, dst, nbytes, now) if src != dst else (now, 0.0)
        self._trace.update(_ENTRY.pack(now, head, m.count, src, dst, nbytes) + m.tag.encode())
        self.kernel.at(head, partial(self._receive, dst, length, then) if length else then)

    def _receive(self, dst: int, length: float, then: Callable[[], None]) -> None:
        """The head of a message has arrived: call `then` when its tail has."""
        self.kernel.at(self._wires.enter(dst, length, self.kernel.now), then)

    def digest(self) -> str:
        """A fingerprint of every message so far: its times, source, destination, tag, count and size."""
        return self._trace.hexdigest()


class SimTransport:
    """The transport of one simulated node."""

    def __init__(self, switch: Switch, rank: int) -> None:
        self.rank = rank
        self.process: Process | None = None  # set when the node's coroutine is spawned
        self.seconds_per_byte = 1 / switch.network.bandwidth
        self._switch = switch
        self._kernel = switch.kernel
        self._mailbox: deque[Message] = deque()
        self._parked = False
        self._farewell: str | None = None  # LEFT or LOST, once this node has gone
        self._noticed_at = 0.0
        self._life = 0  # number of restarts
        self.incarnations: dict[int, int] = {}
        self._acquainted: set[int] = set()  # peers to notify when this node goes or restarts
        self._told: set[int] = set()  # peers that have been notified
        self._ahead = 0.0  # seconds that its clock is ahead of virtual time
        self._busy_until = 0.0  # when its disk has done what it was given
        self._machine, self._host = switch.machine, switch.host_of(rank)
        self._owed = 0.0  # seconds of work that the node has done and that have not passed yet
        vectors = None if self._machine is None else self._machine.vectors
        self.vector_work = VectorWork(self._touch) if vectors else None

    @property
    def size(self) -> int:
        """Nodes in the simulation, servers included."""
        return len(self._switch.ends)

    @property
    def has_left(self) -> bool:
        """Whether this node has closed its transport, rather than crashed."""
        return self._farewell == LEFT

    @property
    def is_gone(self) -> bool:
        """Whether this node has closed its transport or crashed."""
        return self._farewell is not None

    @property
    def is_writing(self) -> bool:
        """Whether this node waits for its disk."""
        return self._busy_until > self._kernel.now

    def now(self) -> float:
        """Virtual seconds since the start, as the clock of this node has it."""
        return self._kernel.now + self._ahead

    def move_clock(self, by: float) -> None:
        """The clock of this node leaps."""
        self._ahead += by

    def write_until(self, moment: float) -> None:
        """The node waits for its disk until that virtual second: nothing leaves or enters it before."""
        self._busy_until = moment

    async def send(self, dst: int, m: Message) -> None:
        """Hand `m` to the network, copied unless it is settled; the sender waits for its own disk alone."""
        if self._busy_until > self._kernel.now:
            await self._written()
        if self._machine is not None:
            await self._spend(self._machine.send.of(m.nbytes))
        peer = self._switch.ends[dst]
        if dst not in self._acquainted:
            self.acquaint(peer)
        if peer._farewell is not None:
            peer._tell(self.rank)
            return
        if self.vector_work is None:
            parts = _copies(m)
        else:
            with self.vector_work.apart():
                parts = _copies(m)
        self._switch.carry(self.rank, dst, m.copied(self.rank, parts))

    async def recv(self, timeout: float | None = None) -> Message:
        """Wait for the next message to arrive. Raises TimeoutError after `timeout` virtual seconds."""
        if self._busy_until > self._kernel.now:
            await self._written()
        if self._owed:
            await self._spend()
        deadline = None if timeout is None else self._kernel.now + timeout
        if timeout is not None and not self._mailbox:
            self._kernel.after(timeout, self._wake)
        while not self._mailbox:
            if deadline is not None and self._kernel.now >= deadline:
                raise TimeoutError
            self._parked = True
            await suspended()
        m = self._mailbox.popleft()
        if self._machine is not None and m.tag not in NOTICES:
            await self._spend(self._machine.receive.of(m.nbytes))
        return m

    def drain(self) -> Iterator[Message]:
        """Yield the messages that have arrived, without waiting."""
        while self._mailbox:
            m = self._mailbox.popleft()
            if self._machine is not None and m.tag not in NOTICES:
                self._owed += self._machine.receive.of(m.nbytes)
            yield m

    def charge(self, work: str, nbytes: int) -> None:
        """The node does this work before it does anything else; see `Machine`."""
        if self._machine is not None:
            rate: float = getattr(self._machine, work)
            self._owed += rate * nbytes

    def counts_work(self) -> bool:
        """Whether what the node computes on vectors takes time."""
        return self.vector_work is not None

    def apart(self) -> AbstractContextManager[None]:
        """While inside, what the node computes on vectors takes no time by itself."""
        return _NOTHING if self.vector_work is None else self.vector_work.apart()

    def _touch(self, nbytes: int) -> None:
        assert self._machine is not None
        self._owed += self._machine.vectors.of(nbytes)

    async def work(self, seconds: float) -> None:
        """Occupy a processor of the node's host, if it has one; else let the time pass."""
        if self._host is not None:
            await self._spend(seconds)
        else:
            assert self.process is not None
            self._kernel.at(self._kernel.now + seconds, self.process.resume)
            await suspended()

    def begin_work(self, seconds: float) -> float:
        """Occupy a processor of the node's host without waiting; how long that takes as things are now."""
        if self._host is None:
            return seconds
        (seconds, self._owed), speed = (seconds + self._owed, 0.0), self._host.speed
        self._host.run(seconds, lambda: None)
        return seconds / speed

    async def _spend(self, seconds: float = 0.0) -> None:
        """Let the time pass that this work, and all that the node owes, takes on its host."""
        assert self.process is not None
        assert self._host is not None
        seconds, self._owed = seconds + self._owed, 0.0
        if seconds:
            self._host.run(seconds, self.process.resume)
            await suspended()

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds` of virtual time."""
        assert self.process is not None
        self._kernel.at(self._kernel.now + seconds, self.process.resume)
        await suspended()

    async def _written(self) -> None:
        """Wait until the disk has done what it was given."""
        await self.sleep(self._busy_until - self._kernel.now)

    async def close(self) -> None:
        """Leave, and notify the peers of this node."""
        if self._owed:
            await self._spend()
        self._go(LEFT, 0.0)

    def vanish(self, noticed_after: float) -> None:
        """Crash: the peers of this node are notified after `noticed_after` seconds."""
        self._go(LOST, noticed_after)

    def stay_away(self) -> None:
        """This node is not there yet: `revive` begins its first life. Nobody misses it."""
        self._farewell = LOST
        self._told = set(range(self.size))

    def revive(self, incarnation: int) -> None:
        """Restart with an empty mailbox. Peers receive the notice of the crash, then that of the restart.

        This node in turn receives a notice of each peer that has gone meanwhile.
        """
        peers = [self._switch.ends[rank] for rank in sorted(self._acquainted - {self.rank})]
        for peer in peers:
            self._say_farewell(peer.rank)  # a peer that has not noticed the crash does so now
            self._switch.carry(self.rank, peer.rank, Message(JOINED, src=self.rank, incarnation=incarnation))
        self._farewell = None
        self._life += 1
        there = [
            p for p in peers if p._farewell is None and not self._switch.links.is_broken(self.rank, p.rank)
        ]
        self.incarnations = {end.rank: end._life for end in (self, *there)}
        self._parked = False
        self._told.clear()
        self._mailbox.clear()
        self._busy_until = self._owed = 0.0
        for peer in peers:
            if self._switch.links.is_broken(self.rank, peer.rank):
                self.hear_of(peer, LOST)
            elif peer._farewell is not None:
                peer._told.discard(self.rank)
                peer._tell(self.rank)

    async def open_window(self, owner: int, x: Tensor) -> Tensor:
        """Expose the owner's vector. Sends nothing."""
        if self.rank == owner:
            self._switch.windows[owner] = Window(x)
        return x

    async def fetch(self, owner: int, out: Tensor) -> int:
        """Read a peer's vector into `out` in one round trip. Returns the number of additions to it so far."""
        await self._trip(owner, Message("fetch"))
        window = self._switch.windows[owner]
        with self.apart():
            count, copy = window.count, window.x.clone()
        await self._trip(owner, Message("fetched", (copy,)), back=True)
        out.copy_(copy)
        return count

    async def accumulate(self, owner: int, v: Tensor) -> int:
        """Add `v` to a peer's vector in one round trip. Returns the number of additions before this one."""
        with self.apart():
            copy = v.clone()
        await self._trip(owner, Message("add", (copy,)))
        window = self._switch.windows[owner]
        window.x.add_(copy)
        window.count += 1
        before = window.count - 1
        await self._trip(owner, Message("added"), back=True)
        return before

    async def _trip(self, peer: int, m: Message, back: bool = False) -> None:
        """Wait for the time that `m` takes to `peer`, or from it (`back`); the peer does nothing."""
        assert self.process is not None
        if self._owed:
            await self._spend()
        ends = (peer, self.rank) if back else (self.rank, peer)
        self._switch.transfer(*ends, m, self.process.resume)
        await suspended()

    def deliver(self, m: Message) -> None:
        """Put `m` into the mailbox, and wake the node if it waits for a message."""
        if self._farewell is None:
            self._mailbox.append(m)
            if self._parked and self.process is not None:  # as `_wake`, one call less for each message
                self._parked = False
                self.process.resume()

    def hear_of(self, peer: SimTransport, tag: str) -> None:
        """Take in a notice about a peer whose connection broke, or is there again."""
        if tag == JOINED:
            peer._told.discard(self.rank)
        self.deliver(Message(tag, src=peer.rank, incarnation=peer._life))

    def knows(self, peer: int) -> bool:
        """Whether this node is notified when that one goes."""
        return peer in self._acquainted

    def acquaint(self, peer: SimTransport) -> None:
        """Have each of the two nodes notified when the other goes, even if they never exchange a message."""
        self._acquainted.add(peer.rank)
        peer._acquainted.add(self.rank)

    def watch(self, peer: int) -> None:
        """Have this node notified when `peer` goes, or at once if it has gone."""
        other = self._switch.ends[peer]
        self.acquaint(other)
        if other._farewell is not None:
            other._tell(self.rank)

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
        life, moment = self._life, max(self._kernel.now, self._noticed_at)
        if peer not in self._told:
            self._kernel.at(moment, lambda: self._say_farewell(peer) if life == self._life else None)

    def _say_farewell(self, peer: int) -> None:
        if peer not in self._told and self._farewell is not None:
            self._told.add(peer)
            self._switch.carry(self.rank, peer, Message(self._farewell, src=self.rank))


def _copies(m: Message) -> tuple[Tensor, ...]:
    if m.is_settled or not m.parts:
        return m.parts
    return tuple([p.detach().clone() if p.requires_grad else p.clone() for p in m.parts])
