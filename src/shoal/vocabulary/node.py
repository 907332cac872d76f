"""Node: one participant of a run, and the verbs an algorithm may use.

A node owns all mutable state of its participant: parameters, kept tensors, optimizer, codec states,
random stream, step. A verb that may wait is `async`, so every `await` in an algorithm marks a point
where others may act. Nothing here knows which driver completes the awaits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from shoal.core.codec import Codec
from shoal.core.errors import Diverged
from shoal.core.instrument import Instrument, Meter
from shoal.core.replica import Gradient, NoMoreSteps, Replica
from shoal.core.seeds import stream
from shoal.core.transport import Lends, Message, Transport
from shoal.core.vector import Layout
from shoal.engine.averages import Meeting
from shoal.engine.background import Background, Handlers, attentively
from shoal.engine.client import FIRST, Client, Pending
from shoal.engine.coding import Coding
from shoal.engine.fragments import fragments
from shoal.engine.log import Log
from shoal.engine.mailbox import Mailbox
from shoal.engine.pool import Pool
from shoal.engine.rounds import Peers
from shoal.engine.saving import restore, state_of
from shoal.engine.service import NOTED, Service
from shoal.engine.streaming import Coming

SERVER = FIRST
"""Stands for the server in `push` and `pull`, whatever rank it has; -2 is the second server, and so on."""

Mean: TypeAlias = "Callable[[Node, Tensor, float], Awaitable[tuple[Tensor, float]]]"
"""How a weighted average is formed: (node, vector, weight) -> (average, total weight)."""

GradientT = TypeVar("GradientT", bound=Gradient)

Hook: TypeAlias = "Callable[[Node], Awaitable[None]]"


def name_of(rank: int, workers: int, servers: int) -> str:
    """How messages to people call the node of that rank; several servers are counted from 0."""
    if rank < workers:
        return f"worker {rank}"
    return f"server {rank - workers}" if servers > 1 else "the server"


class Node:
    """A worker (rank below `size`) or a server (rank `size` and up) of a run.

    `size` is the number of workers. Each server the algorithm names is `shards` nodes that own a slice of
    the vector each; `begins` is where that slice does. `pace` tells how many seconds of virtual time a
    gradient of so many samples has taken, `background` computes one in another thread while this one answers
    messages.
    `boundary` is awaited before each step of a worker and after the last known one, for checkpoints and
    requests to stop; and at a server when all workers have sent CHECKPOINT for a step, with `t` set to it.
    """

    def __init__(
        self,
        transport: Transport,
        replica: Replica,
        *,
        workers: int,
        mean: Mean,
        codec: Codec,
        servers: int = 0,
        shards: int = 1,
        seed: int = 0,
        steps: int | None = None,
        timeout: float | None = None,
        retry: float | None = None,
        recovery: float = 0.0,
        incarnation: int = 0,
        log: Log | None = None,
        layout: Layout | None = None,
        begins: int = 0,
        pace: Callable[[Node, int], float] | None = None,
        background: Background | None = None,
        boundary: Hook | None = None,
        observers: Sequence[Instrument] = (),
    ) -> None:
        self.rank = transport.rank
        self.size = workers
        self.servers = servers
        self.shards = shards
        self.incarnation = incarnation
        self.transport = transport
        self.replica = replica
        self.rng = stream(seed, "algorithm", transport.rank)
        self.last_step = steps
        self.timeout = timeout
        self.meter = Meter()
        self.t = 0  # steps done
        self.version = 0  # server: versions of the model since the start
        self.merged = 0.0  # samples in the model this node holds, from all workers
        self.samples_before = 0  # own samples before the checkpoint that this run goes on from
        self.working = set(range(workers))  # workers that have not gone
        self.clock = 0  # gradients taken
        self.unmerged = 0.0  # own samples since the last mean or push
        self.has_ended = False  # whether its training loop has, while others may go on
        self.mailbox = Mailbox(self, retry, recovery)
        self.client = Client(self)
        self.peers = Peers(self)
        self.meeting = Meeting(self, mean)
        self.layout = layout  # of the whole model's vector
        self.begins = begins  # where `x` begins in that
        self.coding = Coding(self, codec, seed)
        self._pace = pace
        self._background = background
        self.boundary = boundary
        self._observers = tuple(observers)
        self.kept: dict[str, Tensor] = {}
        self._saved: dict[int, set[int]] = {}  # server: step -> workers that saved before it
        keeps_pool = transport.rank == workers and steps is not None
        self.service = Service(self, Pool(workers, steps or 0) if keeps_pool else None, log)
        if incarnation and steps is not None and not self.is_server:
            self.last_step = 0  # what this worker had to do before it died is the pool's now

    # -- who and what --------------------------------------------------------------------------

    @property
    def is_server(self) -> bool:
        """Whether this node serves."""
        return self.rank >= self.size

    @property
    def x(self) -> Tensor:
        """The parameters: a flat view on the model, changed in place only."""
        return self.replica.x

    @x.setter
    def x(self, value: Tensor) -> None:
        if value is not self.replica.x:  # `w.x -= v` has changed it in place already
            self.replica.x.copy_(value)

    @property
    def lr(self) -> float:
        """The learning rate of the next local step."""
        return self.replica.lr

    @property
    def active(self) -> set[int]:
        """At a server: the workers that still contribute, having neither gone nor done all they had to."""
        return self.service.active

    @property
    def role(self) -> int:
        """At a server: which of the servers that the algorithm names this is a shard of, from 0."""
        return (self.rank - self.size) // self.shards

    @property
    def name(self) -> str:
        """How messages to people call this node."""
        return self.name_of(self.rank)

    def name_of(self, rank: int) -> str:
        """How messages to people call the node of that rank."""
        return name_of(rank, self.size, self.servers * self.shards)

    @property
    def codec(self) -> Codec:
        """What differences are compressed with."""
        return self.coding.codec

    def locate(self, place: int) -> str:
        """How people call an element of `x`."""
        place += self.begins
        return f"element {place}" if self.layout is None else self.layout.locate(place)

    def keep(self, name: str, start: Tensor) -> Tensor:
        """A variable of the algorithm that is checkpointed: a copy of `start`, or what was restored.

        Change it in place; the node holds on to the same tensor.
        """
        if name not in self.kept:
            self.kept[name] = start.clone()
        return self.kept[name]

    # -- local work ----------------------------------------------------------------------------

    async def steps(self, until: int | None = None) -> AsyncIterator[int]:
        """Numbers of the steps to do, from where a checkpoint left off; those before `until`, if it is given.

        With a server it ends when every batch of every worker is in the model: whoever has done its own
        share does what workers that died have left undone; among peers, what those who are behind give it.
        """
        while until is None or self.t < until:
            if self.boundary is not None:
                await self.boundary(self)
            if self.is_last(self.t - 1) and not await self._has_more():
                return
            await self.meeting.progress()
            yield self.t
            self.t += 1
            self.meter.steps = self.t
            for observer in self._observers:
                observer.step(self)

    def is_last(self, t: int) -> bool:
        """Whether no step is known to follow step `t`: what it leaves behind must be in the model by then."""
        return self.last_step is not None and t + 1 >= self.last_step - self.peers.helping.given

    async def blocks(self, period: int, warmup: int = 0) -> AsyncIterator[int]:
        """Local steps, `period` at a time: yields the last step's number after each block.

        The first `warmup` steps are blocks of one. A block that the end of training cuts short counts too.
        """

        def is_whole(done: int) -> bool:
            return done <= warmup or (done - warmup) % period == 0

        try:
            async for t in self.steps():
                self.descend(await self.grad())
                if is_whole(t + 1):
                    yield t
        except NoMoreSteps:
            while self.size > 1:  # others may still have data: `mean` tells when nobody has
                self.t = next(done for done in itertools.count(self.t + 1) if is_whole(done))
                yield self.t - 1
        if not is_whole(self.t):
            yield self.t - 1

    def grad(self, meanwhile: Handlers | None = None) -> Coming:
        """The gradient of the mean loss on the next batch, at `x` as it is when this is awaited.

        What arrives under the tags of `meanwhile` is dealt with while it is computed: leave `x` alone there.
        In virtual time it costs time. Raises NoMoreSteps when whoever owns the training loop has ended it,
        and Diverged when the loss is not finite, unless there is a server to refuse what comes of it.
        """
        return Coming(partial(self._gradient, meanwhile if self.size > 1 else None))

    def descend(self, g: Tensor) -> None:
        """One step of the user's optimizer along -g."""
        began = self.transport.now()
        self.replica.descend(g)
        self.meter.compute_seconds += self.transport.now() - began

    def reset_momentum(self) -> None:
        """Forget the local optimizer's velocity; adaptive second moments stay."""
        self.replica.reset_momentum()

    # -- among the workers ---------------------------------------------------------------------

    async def mean(self, v: Tensor | Awaitable[Tensor], weight: float | None = None) -> Tensor:
        """The average over all workers of a difference, weighted by the samples behind it.

        Lossy if the codec is. Waits for every worker; all get the same bits. `weight` defaults to the
        samples this worker took since it last merged. Raises PeerLost if a worker goes before it took part,
        and NoMoreSteps when nobody has data any more.
        """
        return await self.meeting.mean(v, weight)

    async def start_mean(self, v: Tensor, weight: float, key: str = "") -> Pending[Tensor]:
        """Begin such an average, to compute meanwhile: awaiting what this returns completes it.

        `weight` is the samples behind it. Vectors of one length may share a key; the codec's memory has it.
        """
        return await self.meeting.start(v, weight, key)

    def fragments(self, number: int) -> list[list[slice]]:
        """The vector in so many parts, of whole layers where they are known and are not fewer."""
        return fragments(self.replica, number)

    # -- with a server: the worker's side ------------------------------------------------------

    async def push(self, dst: int, v: Tensor, count: float | None = None, rate: float | None = None) -> None:
        """Have a server take in a difference; returns when it has, and would remember it after a crash.

        Lossy if the codec is. `count` defaults to the samples this worker took since it last merged, `rate`
        to its learning rate. An update that is refused is noted, and training goes on.
        """
        await self.post(dst, v, count, rate)
        await self.settle()

    async def post(self, dst: int, v: Tensor, count: float | None = None, rate: float | None = None) -> None:
        """Begin a push; `settle` completes it. Until then `v` must not change."""
        samples = self.take_unmerged() if count is None else count
        await self.client.post(dst, v, samples, self.lr if rate is None else rate)

    async def settle(self) -> None:
        """Wait until every push that was begun is taken in."""
        await self.client.settle()

    async def pull(self, src: int, out: Tensor | None = None) -> Tensor:
        """The parameters of `src` as they were when it answered, in `out` if that is given.

        Exact: codecs are not applied. Waits one round trip. Raises PeerLost if `src` dies first;
        the caller's own parameters are then untouched.
        """
        return await (
            await self.client.ask(src, torch.empty_like(self.x) if out is None else out, waits=True)
        )

    async def ask(self, src: int) -> Pending[Tensor]:
        """Begin a pull, to compute meanwhile: awaiting what this returns completes it."""
        return await self.client.ask(src, torch.empty_like(self.x), waits=False)

    async def note(self) -> None:
        """Say that all this worker has done so far is in the model, where no push of its own tells so."""
        await self.send(SERVER, Message(NOTED, count=self.take_unmerged(), clock=self.clock))

    # -- with a server: the server's side ------------------------------------------------------

    def inbox(self) -> AsyncIterator[Message]:
        """Pushes and pulls in order of arrival, pushes decoded; ends when every worker has left.

        Every push comes once, and none that is not finite. FEWER says that a worker contributes no more.
        """
        return self.service.messages()

    async def reply(self, m: Message, v: Tensor, version: int | None = None) -> None:
        """Answer a pull with a state, of this version if it is not the newest. Exact."""
        version = self.version if version is None else version
        await self.service.reply(m, Message("reply", (v,), seq=m.seq, version=version))

    def advance(self, samples: float) -> None:
        """Say that the model is a new version: so many samples more are in it."""
        self.version += 1
        self.merged += samples
        for observer in self._observers:
            observer.update(self)

    # -- memory that all reach -----------------------------------------------------------------

    async def open_window(self) -> None:
        """Expose the servers' parameters to `fetch` and `accumulate`; all nodes do this together, first."""
        await self.client.open_window()

    async def fetch(self) -> None:
        """Copy the servers' parameters into `x`; others may be changing them meanwhile."""
        await self.client.fetch()

    async def accumulate(self, v: Tensor) -> None:
        """Add a difference to the servers' parameters, without their help. Exact; refused if not finite."""
        if self.client.accepts(v):
            await self.client.accumulate(v)
        await self.note()

    # -- between any two nodes -----------------------------------------------------------------

    async def send(self, dst: int, m: Message, lend: bool = False) -> None:
        """Send a message as it is, exactly. Does not wait for `dst`; tensors may be changed afterwards."""
        dst = self.size if dst == SERVER else dst
        m.incarnation = self.incarnation
        began = self.transport.now()
        if lend and isinstance(self.transport, Lends):
            await self.transport.lend(dst, m)
        else:
            await self.transport.send(dst, m)
        self.meter.send_seconds += self.transport.now() - began
        self.meter.bytes_sent += m.nbytes
        self.meter.messages_sent += 1
        for observer in self._observers:
            observer.send(self, dst, m)

    async def recv(self, tag: str, src: int | None = None, meanwhile: Handlers | None = None) -> Message:
        """The next message with that tag (from `src`); waits for it. Raises PeerLost if `src` goes first."""
        return await self.mailbox.find(tag, self.size if src == SERVER else src, meanwhile=meanwhile)

    def poll(self, tag: str) -> Iterator[Message]:
        """The messages with that tag that have arrived; never waits."""
        return self.mailbox.poll(tag)

    # -- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The node's whole state between two steps."""
        return state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        restore(self, state)

    async def save_when_all_have(self, step: int, rank: int) -> None:
        """A worker has saved its state before this step: save too once all have, and all are still there."""
        saved = self._saved.setdefault(step, set())
        saved.add(rank)
        if len(saved) == self.size and not self.service.has_lost_a_worker and self.boundary is not None:
            self.t = step
            await self.boundary(self)

    # -- for those who look on -----------------------------------------------------------------

    def received(self, m: Message) -> None:
        """Account for a message that was taken from the transport."""
        self.meter.bytes_received += m.nbytes
        for observer in self._observers:
            observer.receive(self, m)

    def waited_for(self, rank: int, seconds: float) -> None:
        """Account for the time that passed until a message of `rank` came."""
        if not self.is_server:  # a server's business is to wait
            self.meter.wait_seconds += seconds
            self.meter.waited_for[rank] += seconds

    @property
    def advice(self) -> str:
        """What to do about values that are not finite."""
        return f"Try a smaller learning rate (it is {self.lr:g}) or look for inputs that are not finite."

    def note_fault(self, what: str) -> None:
        """Take note of something that went wrong and was survived."""
        self.meter.faults.append(what)
        for observer in self._observers:
            observer.fault(self, what)

    # -- inside --------------------------------------------------------------------------------

    async def _gradient(self, meanwhile: Handlers | None) -> Tensor:
        return (await self.computed(self.replica.gradient, meanwhile)).vector

    async def computed(
        self, compute: Callable[[], Coroutine[Any, Any, GradientT]], meanwhile: Handlers | None = None
    ) -> GradientT:
        """What a replica computes, with what it cost accounted for."""
        began = self.transport.now()
        try:
            gradient = await attentively(compute(), self._background, self.mailbox, meanwhile)
        except NoMoreSteps:
            self.has_ended = True
            raise
        if gradient.loss is not None:
            self.meter.loss = gradient.loss
            if not math.isfinite(gradient.loss) and not self.servers:
                raise Diverged(
                    f"{self.name}: the loss became {gradient.loss} at step {self.t}. {self.advice}"
                )
        if self._pace is not None:
            await self.mailbox.let_pass(self._pace(self, gradient.count), meanwhile)
        self.clock += 1
        self.unmerged += gradient.count
        self.meter.samples += gradient.count
        self.meter.compute_seconds += self.transport.now() - began
        return gradient

    def take_unmerged(self) -> float:
        """The samples that this worker took since it last merged; they count as merged from now on."""
        taken, self.unmerged = self.unmerged, 0.0
        return taken

    async def _has_more(self) -> bool:
        """Whether there is a batch that another worker leaves undone; if so it comes next."""
        work = await (self.client.take_more() if self.servers else self.peers.take_more())
        if work is None:
            return False
        owner, place, self.clock = work
        self.t = self.clock
        self.replica.seek(owner, place)
        return True
