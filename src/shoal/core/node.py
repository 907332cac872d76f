"""Node: one participant of a run, and the verbs an algorithm may use.

A node owns all mutable state of its participant: parameters, kept tensors, optimizer, codec states,
random stream, step. A verb that may wait is `async`, so every `await` in an algorithm marks a point
where others may act. Nothing here knows which driver completes the awaits.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shoal.core.codec import Codec, Payload, State
from shoal.core.errors import Diverged, PeerLost
from shoal.core.instrument import Instrument, Meter
from shoal.core.replica import Replica
from shoal.core.seeds import stream
from shoal.core.transport import LEFT, LOST, Message, Transport

CHECKPOINT = "checkpoint"
"""Tag of a worker's word to the server that it saved its state before the step numbered in `seq`."""

SERVER = -1
"""Stands for the server in `push` and `pull`, whatever rank it has."""

Mean: TypeAlias = "Callable[[Node, Tensor, float], Awaitable[tuple[Tensor, float]]]"
"""How a weighted average is formed: (node, vector, weight) -> (average, total weight)."""

Hook: TypeAlias = "Callable[[Node], Awaitable[None]]"


def name_of(rank: int, workers: int) -> str:
    """How messages to people call the node of that rank in a run of so many workers."""
    return f"worker {rank}" if rank < workers else "the server"


class NoMoreSteps(Exception):
    """The training loop ended while the algorithm waited for its next gradient."""


class Node:
    """A worker (rank below `size`) or a server (rank `size` and up) of a run.

    `size` is the number of workers. `pace` is awaited after each gradient: virtual time passes there.
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
        seed: int = 0,
        steps: int | None = None,
        timeout: float | None = None,
        pace: Hook | None = None,
        boundary: Hook | None = None,
        observers: Sequence[Instrument] = (),
    ) -> None:
        self.rank = transport.rank
        self.size = workers
        self.transport = transport
        self.replica = replica
        self.codec = codec
        self.rng = stream(seed, "algorithm", transport.rank)
        self.last_step = steps
        self.timeout = timeout
        self.meter = Meter()
        self.t = 0  # steps done
        self.version = 0  # server: updates applied
        self.merged = 0.0  # samples in the model this node holds, from all workers
        self.samples_before = 0  # own samples before the checkpoint that this run goes on from
        self.gone: dict[int, str] = {}  # rank -> how it went
        self.working = set(range(workers))  # workers that have not gone
        self.waiting = ""  # for what, while it waits
        self._mean = mean
        self._pace = pace
        self._boundary = boundary
        self._observers = tuple(observers)
        self._kept: dict[str, Tensor] = {}
        self._codec_states: dict[str, State] = {}
        self._stash: deque[Message] = deque()  # arrived, not asked for yet
        self._unmerged = 0.0  # own samples since the last mean or push
        self._seen = 0  # server version of the last pull
        self._seq = 0
        self._asked: Counter[int] = Counter()  # server: step -> workers that saved before it

    # -- who and what --------------------------------------------------------------------------

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
    def name(self) -> str:
        """How messages to people call this node."""
        return self.name_of(self.rank)

    def name_of(self, rank: int) -> str:
        """How messages to people call the node of that rank."""
        return name_of(rank, self.size)

    def keep(self, name: str, start: Tensor) -> Tensor:
        """A variable of the algorithm that is checkpointed: a copy of `start`, or what was restored.

        Change it in place; the node holds on to the same tensor.
        """
        if name not in self._kept:
            self._kept[name] = start.clone()
        return self._kept[name]

    # -- local work ----------------------------------------------------------------------------

    async def steps(self) -> AsyncIterator[int]:
        """Numbers of the steps to do, from where a checkpoint left off."""
        while True:
            if self._boundary is not None:
                await self._boundary(self)
            if self.last_step is not None and self.t >= self.last_step:
                return
            yield self.t
            self.t += 1
            self.meter.steps = self.t
            for observer in self._observers:
                observer.step(self)

    async def blocks(self, period: int, warmup: int = 0) -> AsyncIterator[int]:
        """Local steps, `period` at a time: yields the last step's number after each block.

        The first `warmup` steps are blocks of one. A block that the end of training cuts short counts too.
        """
        open_block = self.t > warmup and (self.t - warmup) % period != 0  # where a checkpoint left off
        try:
            async for t in self.steps():
                self.descend(await self.grad())
                open_block = t >= warmup and (t + 1 - warmup) % period != 0
                if not open_block:
                    yield t
        except NoMoreSteps:
            pass
        if open_block:
            yield self.t - 1

    async def grad(self) -> Tensor:
        """The gradient of the mean loss on the next batch, at `x` as it is now.

        In virtual time it costs time. Raises Diverged when the loss is not finite, and NoMoreSteps when
        whoever owns the training loop has ended it.
        """
        began = self.transport.now()
        gradient = await self.replica.gradient()
        if gradient.loss is not None:
            self.meter.loss = gradient.loss
            if not math.isfinite(gradient.loss):
                raise Diverged(
                    f"{self.name}: the loss became {gradient.loss} at step {self.t}. Try a smaller "
                    f"learning rate (it is {self.lr:g}) or look for inputs that are not finite."
                )
        if self._pace is not None:
            await self._pace(self)
        self._unmerged += gradient.count
        self.meter.samples += gradient.count
        self.meter.compute_seconds += self.transport.now() - began
        return gradient.vector

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
        samples this worker took since it last merged. Raises PeerLost if a worker goes before it took part.
        """
        vector = v if isinstance(v, Tensor) else await v
        own = self._take_unmerged()
        average, total = vector, own
        if self.size > 1:
            average, total = await self._mean(self, vector, own if weight is None else weight)
        self.merged += total if weight is None else own * self.size
        return average

    # -- with a server -------------------------------------------------------------------------

    async def push(self, dst: int, v: Tensor) -> None:
        """Send a difference and go on. Lossy if the codec is."""
        m = Message("push", self.encode(f"push.{dst}", v), count=self._take_unmerged())
        m.version, m.rate = self._seen, self.lr
        await self.send(dst, m)

    async def pull(self, src: int) -> Tensor:
        """The parameters of `src` as they were when it answered.

        Exact: codecs are not applied. Waits one round trip. Raises PeerLost if `src` dies first;
        the caller's own parameters are then untouched.
        """
        self._seq += 1
        seq = self._seq
        await self.send(src, Message("pull", seq=seq))
        answer = await self._find(lambda m: m.tag == "reply" and m.seq == seq, "the answer to 'pull'", src)
        self._seen = answer.version
        return answer.body.to(self.x.device)

    async def reply(self, m: Message, v: Tensor) -> None:
        """Answer a pull with a state. Exact."""
        await self.send(m.src, Message("reply", (v,), seq=m.seq, version=self.version))

    async def inbox(self) -> AsyncIterator[Message]:
        """What workers send, in order of arrival, decoded; ends when every worker has left.

        Counts a version for every push and records how many versions old it was.
        """
        while self.working or self._stash:
            m = self._stash.popleft() if self._stash else await self._next("a message", None)
            if m.tag in (LEFT, LOST):
                continue
            if m.tag == CHECKPOINT:
                await self._save_when_all_ask(m.seq)
                continue
            if m.tag != "push":
                yield m
                continue
            self.meter.staleness[self.version - m.version] += 1
            yield self._decoded(m)
            self.version += 1
            self.merged += m.count
            for observer in self._observers:
                observer.update(self)

    # -- between any two nodes -----------------------------------------------------------------

    async def send(self, dst: int, m: Message) -> None:
        """Send a message as it is, exactly. Does not wait for `dst`; tensors may be changed afterwards."""
        dst = self.size if dst == SERVER else dst
        began = self.transport.now()
        await self.transport.send(dst, m)
        self.meter.send_seconds += self.transport.now() - began
        self.meter.bytes_sent += m.nbytes
        self.meter.messages_sent += 1
        for observer in self._observers:
            observer.send(self, dst, m)

    async def recv(self, tag: str, src: int | None = None) -> Message:
        """The next message with that tag (from `src`); waits for it. Raises PeerLost if `src` goes first."""
        return await self._find(lambda m: m.tag == tag, repr(tag), src)

    def poll(self, tag: str) -> Iterator[Message]:
        """The messages with that tag that have arrived; never waits."""
        for m in self.transport.drain():
            self._note(m)
            if m.tag not in (LEFT, LOST):
                self._stash.append(m)
        waiting = [m for m in self._stash if m.tag == tag]
        self._stash = deque(m for m in self._stash if m.tag != tag)
        yield from waiting

    # -- codecs --------------------------------------------------------------------------------

    def encode(self, key: str, v: Tensor) -> Payload:
        """Compress one vector of the stream called `key`, whose codec state the node keeps."""
        state = self._codec_states.get(key)
        payload, self._codec_states[key] = self.codec.encode(
            v, self.codec.init(v) if state is None else state
        )
        return payload

    def decode(self, payload: Payload, numel: int) -> Tensor:
        """The vector of `numel` elements that a payload stands for."""
        here = tuple(part.to(self.x.device) for part in payload)
        return self.codec.decode(here, torch.empty(numel, dtype=self.x.dtype, device=self.x.device))

    # -- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The node's whole state between two steps."""
        return {
            "x": self.x,
            "kept": self._kept,
            "codec": self._codec_states,
            "replica": self.replica.state_dict(),
            "rng": self.rng.get_state(),
            "numbers": {
                "step": self.t,
                "version": self.version,
                "merged": self.merged,
                "unmerged": self._unmerged,
                "seen": self._seen,
                "seq": self._seq,
                "samples": self.meter.samples,
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken."""
        self.x.copy_(state["x"])
        self._kept = {name: self._here(tensor) for name, tensor in state["kept"].items()}
        self._codec_states = {
            key: {name: self._here(tensor) for name, tensor in memory.items()}
            for key, memory in state["codec"].items()
        }
        self.replica.load_state_dict(state["replica"])
        self.rng.set_state(state["rng"])
        numbers = state["numbers"]
        self.t = self.meter.steps = numbers["step"]
        self.version, self.merged = numbers["version"], numbers["merged"]
        self._unmerged, self._seen, self._seq = numbers["unmerged"], numbers["seen"], numbers["seq"]
        self.meter.samples = self.samples_before = numbers["samples"]

    # -- inside --------------------------------------------------------------------------------

    def _here(self, tensor: Tensor) -> Tensor:
        """A copy of a restored tensor, on the model's device."""
        return tensor.to(self.x.device, copy=True)

    def _take_unmerged(self) -> float:
        taken, self._unmerged = self._unmerged, 0.0
        return taken

    async def _save_when_all_ask(self, step: int) -> None:
        self._asked[step] += 1
        if self._asked[step] == self.size and self._boundary is not None:
            self.t = step
            await self._boundary(self)

    def _decoded(self, m: Message) -> Message:
        m.parts = (self.decode(m.parts, self.x.numel()),)
        return m

    async def _find(self, wanted: Callable[[Message], bool], what: str, src: int | None) -> Message:
        src = self.size if src == SERVER else src
        for i, m in enumerate(self._stash):
            if wanted(m) and (src is None or m.src == src):
                del self._stash[i]
                return m
        while True:
            if src in self.gone:
                raise PeerLost(
                    f"{self.name_of(src)} {self.gone[src]} before it sent {what} to {self.name} "
                    f"(which is at step {self.t})."
                )
            m = await self._next(what, src)
            if wanted(m) and (src is None or m.src == src):
                return m
            if m.tag not in (LEFT, LOST):
                self._stash.append(m)

    async def _next(self, what: str, src: int | None) -> Message:
        """The next message of any kind, with the wait for it accounted for."""
        began = self.transport.now()
        self.waiting = f"{what} from {'any node' if src is None else self.name_of(src)}"
        try:
            m = await self.transport.recv(self.timeout)
        except TimeoutError:
            raise PeerLost(
                f"{self.name} waited {self.timeout:g} s for {self.waiting} at step {self.t}; nothing came."
            ) from None
        self.waiting = ""
        waited = self.transport.now() - began
        if self.rank < self.size:  # a server's business is to wait
            self.meter.wait_seconds += waited
            self.meter.waited_for[m.src] += waited
        self._note(m)
        return m

    def _note(self, m: Message) -> None:
        """Take note of a message that was taken from the transport."""
        if m.tag in (LEFT, LOST):
            self.gone[m.src] = "left" if m.tag == LEFT else "was lost"
            self.working.discard(m.src)
            if m.tag == LOST:
                self.meter.faults.append(f"{self.name_of(m.src)} was lost")
                for observer in self._observers:
                    observer.fault(self, f"{self.name_of(m.src)} was lost")
            return
        self.meter.bytes_received += m.nbytes
        for observer in self._observers:
            observer.receive(self, m)
