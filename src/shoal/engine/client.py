"""Client: the worker's half of push and pull; `Service` is the server's."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

from shoal.core.errors import Diverged, PeerLost, Unavailable
from shoal.core.transport import Message, Windows
from shoal.engine.ledger import REFUSED, WINDOW
from shoal.engine.mailbox import Question
from shoal.engine.service import flaw, refusal

if TYPE_CHECKING:
    from shoal.vocabulary.node import Node

T = TypeVar("T")

FIRST = -1  # the first of the servers that an algorithm names

MOST_REFUSALS = 10
"""Updates of a worker that may be refused in a row before it gives up."""


class Pending(Generic[T]):
    """A request that is under way. Await it, once, to complete it."""

    def __init__(self, complete: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._complete = complete

    def __await__(self) -> Generator[Any, Any, T]:
        return self._complete().__await__()


class Client:
    """What a node asks of servers. Each server is several nodes, its shards, that own a slice each."""

    def __init__(self, node: Node) -> None:
        self.seen: dict[int, int] = {}  # server -> its version at the last pull
        self._node = node
        self._posted: list[Question] = []
        self._told: list[Question] = []  # who was told that this worker is idle, or busy again
        self._refusals = 0  # in a row

    def shards_of(self, server: int, numel: int) -> list[tuple[int, slice]]:
        """The nodes that make up a server, with the slice of a vector that each of them owns."""
        node = self._node
        first = node.size + (-1 - server) * node.shards
        if node.is_server:  # which owns the same slice as its counterpart
            return [(first + (node.rank - node.size) % node.shards, slice(None))]
        nodes = [self._or_first(first + shard) for shard in range(node.shards)]
        return [(rank, slice_of(shard, node.shards, numel)) for shard, rank in enumerate(nodes)]

    async def post(self, server: int, v: Tensor, count: float, rate: float) -> None:
        """Begin a push. A server remembers only so many: beyond them those before are completed first."""
        node = self._node
        if len(self._posted) >= WINDOW:
            await self.settle()
        for rank, part in self.shards_of(server, v.numel()):
            payload = node.coding.encode(f"push.{rank}", v[part], node.begins + (part.start or 0))
            m = Message("push", payload, count=count, clock=node.clock)
            m.version, m.rate = self.seen.get(rank, 0), rate
            self._posted.append(await node.mailbox.ask(rank, m))

    async def settle(self) -> None:
        """Complete every push that was begun."""
        posted, self._posted = self._posted, []
        for question in posted:
            answer = await self._hear(question)
            if answer.tag == REFUSED:
                self._refused(bytes(answer.body.tolist()).decode(errors="replace"))
            else:
                self._refusals = 0

    async def ask(self, server: int, out: Tensor, *, waits: bool) -> Pending[Tensor]:
        """Begin a pull. An answer that the asker waits for may be lent: it is read at once."""
        node, questions = self._node, []
        for rank, part in self.shards_of(server, out.numel()):
            m = Message("pull", count=float(waits), clock=node.clock)
            questions.append((await node.mailbox.ask(rank, m), part))
        return Pending(lambda: self._pulled(questions, out))

    async def take_more(self) -> tuple[int, int, int] | None:
        """A batch that a worker left undone: whose share it is of, its place there, the clock to do it at.

        Waits until there is one; None when every batch is in the model.
        """
        node = self._node
        await self.settle()  # who asks for more says that all before it is in the model
        pool, *others = range(node.size, node.size + node.servers * node.shards)
        asked = await node.mailbox.ask(pool, Message("more", clock=node.clock))
        await self._hear_out()
        self._told = [await node.mailbox.ask(rank, Message("idle", clock=node.clock)) for rank in others]
        answer = await node.mailbox.answer(asked)
        if answer.tag == "over":
            await self._hear_out()
            return None
        self._told += [await node.mailbox.ask(rank, Message("busy", clock=node.clock)) for rank in others]
        owner, place, clock = answer.body.tolist()
        return owner, place, clock

    async def open_window(self) -> None:
        """Expose the parameters of every shard."""
        node, windows = self._node, self._windows()
        for shard in range(node.shards):
            owner = node.size + shard
            if owner == node.rank:
                node.replica.x = await windows.open_window(owner, node.x)
            else:  # another server has no use for it
                mine = node.x[:0] if node.is_server else node.x[slice_of(shard, node.shards, node.x.numel())]
                await windows.open_window(owner, mine)

    async def fetch(self) -> None:
        """Copy what every shard exposes."""
        node, windows = self._node, self._windows()
        began = node.transport.now()
        for rank, part in self.shards_of(FIRST, node.x.numel()):
            self.seen[rank] = await windows.fetch(rank, node.x[part])
        node.meter.wait_seconds += node.transport.now() - began

    def accepts(self, v: Tensor) -> bool:
        """Whether a difference may be added to memory where no server looks at it first."""
        node = self._node
        if (what := flaw(node, v)) is not None:
            self._refused(refusal(node, node.rank, node.clock, what))
            return False
        self._refusals = 0
        return True

    async def accumulate(self, v: Tensor) -> None:
        """Add to what every shard exposes."""
        node, windows = self._node, self._windows()
        began = node.transport.now()
        for rank, part in self.shards_of(FIRST, v.numel()):
            before = await windows.accumulate(rank, v[part])
            node.meter.staleness[before - self.seen[rank]] += 1
        node.meter.send_seconds += node.transport.now() - began

    def _windows(self) -> Windows:
        transport = self._node.transport
        if not isinstance(transport, Windows):
            raise Unavailable(
                f"{type(transport).__name__} has no memory that all reach; "
                "take transport 'processes', 'mpi' or 'sim'"
            )
        return transport

    def _or_first(self, rank: int) -> int:
        """The node to turn to: the same shard of the first server, where another server's is gone."""
        node = self._node
        return node.size + (rank - node.size) % node.shards if rank in node.mailbox.gone else rank

    async def _hear(self, question: Question) -> Message:
        """The answer, if need be from the first server instead of another that dies meanwhile."""
        node, rank = self._node, question[0]
        asked = node.mailbox.asked(question)
        try:
            return await node.mailbox.answer(question)
        except PeerLost:
            if node.is_server or rank == self._or_first(rank):
                raise
            return await self._answer(self._or_first(rank), replace(asked))

    async def _hear_out(self) -> None:
        """Complete what servers were told; one that is gone need not know."""
        told, self._told = self._told, []
        for question in told:
            with suppress(PeerLost):
                await self._node.mailbox.answer(question)

    async def _answer(self, rank: int, m: Message) -> Message:
        return await self._node.mailbox.answer(await self._node.mailbox.ask(rank, m))

    def _refused(self, reason: str) -> None:
        self._node.note_fault(reason)
        self._refusals += 1
        if self._refusals >= MOST_REFUSALS:
            raise Diverged(
                f"{MOST_REFUSALS} updates in a row were refused; the last: {reason}. {self._node.advice}"
            )

    async def _pulled(self, questions: list[tuple[Question, slice]], out: Tensor) -> Tensor:
        node = self._node
        for (rank, number), part in questions:
            answer = await self._hear((rank, number))
            while not _copied(answer, out[part]):
                answer = await self._answer(rank, Message("pull", count=1.0, clock=node.clock))
            if answer.version < self.seen.get(rank, 0):
                node.note_fault(f"{node.name_of(rank)} went back to version {answer.version}")
            self.seen[rank] = answer.version
        return out


def _copied(answer: Message, out: Tensor) -> bool:
    """Copy the state in an answer; False if it was lent and taken back before it was read."""
    out.copy_(answer.body)
    return answer.release is None or answer.release()


def slice_of(shard: int, shards: int, numel: int) -> slice:
    """The part of a vector that one of several servers owns."""
    return slice(shard * numel // shards, (shard + 1) * numel // shards)
