"""Service: the server's half of push and pull. Every update is taken once, whatever the network repeats.

    push   ->  ack (version) | refused (reason)        taken once, by client, incarnation and seq
    pull   ->  reply (state, version)                  answered by the algorithm, at once or later
    more   ->  work (owner, place, clock) | over       a batch whose worker has gone; held until there is one
    idle   ->  ack                                     tells the servers that keep no pool; so does busy
    anyone ->  fenced                                  to whoever was given up on

A server is a fold over its messages. What the algorithm sees is written to the log first, so a successor
that reads the log comes to the same state; an answer leaves only when what it speaks of would survive.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shoal.core.errors import WireError
from shoal.core.transport import JOINED, LEFT, LOST, NOTICES, Lends, Message
from shoal.engine.ledger import ACK, FENCED, REFUSED, Ledger
from shoal.engine.log import Log
from shoal.engine.pool import Pool

if TYPE_CHECKING:
    from shoal.vocabulary.node import Node

CHECKPOINT = "checkpoint"
"""Tag of a worker's word to the server that it saved its state before the step numbered in `seq`."""

FEWER = "fewer"
"""Tag under which an algorithm hears that fewer workers contribute than before: see `Node.active`."""

ROLLED_BACK = "rolled_back"
"""Tag under which an algorithm hears that its server is back as it once was: what came since is forgotten."""

NOTED = "noted"
"""Tag of a worker's word that it has changed the server's memory by itself."""

ANSWERS = (ACK, REFUSED, FENCED, "reply", "work", "over")
"""Tags of what ends a request."""

WAIT = "wait"
"""Tag of the word to whoever asks for more again that there is none yet, but somebody listens."""

_REQUESTS = ("push", "pull", "more", "idle", "busy")
_SHOWN = ("push", "pull", NOTED)
_OURS = (*_REQUESTS, NOTED, CHECKPOINT, *NOTICES)

RECLAIM_SECONDS = 5.0
"""How long a reader may take for what it was lent."""


class Service:
    """What a server knows of its clients. `pool` is there at the one server that keeps it."""

    def __init__(self, node: Node, pool: Pool | None, log: Log | None) -> None:
        self.active = set(range(node.size))  # workers that still contribute
        self._node = node
        self._ledger = Ledger()
        self._pool = pool
        self._log = log
        self._lost: set[int] = set()
        self._left: set[int] = set()  # in order: they were told that all is done
        self._held: dict[int, Message] = {}  # worker -> its request for more, not answered yet
        self._answers: list[tuple[int, Message]] = []  # to be sent once the log is safe
        self._past: Iterable[Message] = ()
        self._replaying = False
        transport, is_reachable = node.transport, node.x.device.type == "cpu"
        self._lender = transport if isinstance(transport, Lends) and is_reachable else None

    @property
    def has_lost_a_worker(self) -> bool:
        """Whether a worker was ever lost, so that what it had to do is others' now."""
        return self._ledger.has_fenced_any(range(self._node.size))

    def begin(self) -> None:
        """Take the place of a predecessor, if there was one, and put the parameters where peers can read."""
        node = self._node
        if self._log is not None:
            state, self._past = self._log.recover()
            if state is not None:
                node.load_state_dict(state)
            else:
                self._log.snapshot(node.state_dict())  # where everything starts is to be known, too
        if self._lender is not None:
            node.replica.x = self._lender.share(node.x)

    async def messages(self) -> AsyncIterator[Message]:
        """Pushes, pulls, FEWER and ROLLED_BACK, in order of arrival; ends when every worker has left."""
        async for m in self._incoming():
            if m.tag not in _OURS:
                yield m
            elif await self._accepts(m):
                fewer = self._track(m)
                if m.tag in _SHOWN or fewer:
                    await self._reclaim(m)
                    yield m if m.tag in _SHOWN else Message(FEWER, src=m.src)
                await self._settle(m)

    async def reply(self, m: Message, answer: Message) -> None:
        """Send the answer to a pull. What it shows is safe by then."""
        await self._flush()
        if self._replaying:
            return
        node = self._node
        in_place = self._lender is not None and answer.body is node.x and m.count > 0
        await node.send(m.src, answer, lend=in_place)

    def state(self) -> dict[str, Any]:
        """Everything that a message which is yet to come may act upon, as plain values."""
        return {
            "ledger": self._ledger.state(),
            "pool": None if self._pool is None else self._pool.state(),
            "held": [[m.src, m.seq, m.clock, m.incarnation] for m in self._held.values()],
            "active": sorted(self.active),
            "lost": sorted(self._lost),
            "left": sorted(self._left),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._ledger.load(state["ledger"])
        if self._pool is not None and state["pool"] is not None:
            self._pool.load(state["pool"])
        self._held = {
            src: Message("more", src=src, seq=seq, clock=clock, incarnation=incarnation)
            for src, seq, clock, incarnation in state["held"]
        }
        self.active, self._lost = set(state["active"]), set(state["lost"])
        self._left |= set(state["left"])  # who was excused since stays so
        for tag, ranks in ((LOST, state["lost"]), (LEFT, state["left"])):
            for rank in ranks:
                self._node.mailbox.note(Message(tag, src=rank))

    def excuse(self, workers: Iterable[int]) -> None:
        """These have left in order while nobody was here to see it: do not wait for them."""
        self._left.update(workers)

    def resume(self) -> None:
        """Serve workers that all start over from a checkpoint: nobody has gone, done its lot, or waits."""
        for gone in (self._held, self._left, self._lost):
            gone.clear()
        self._node.mailbox.forget_departures()
        self._ledger.forget_all_but(ACK)
        self.active = set(range(self._node.size))
        self._node.working = set(self.active)

    # -- inside --------------------------------------------------------------------------------

    async def _incoming(self) -> AsyncIterator[Message]:
        """What a predecessor had written down, then what arrives."""
        node, log = self._node, self._log
        self._replaying = True
        for m in self._past:
            node.mailbox.note(m)
            yield m
        self._replaying = False
        if node.incarnation and log is not None:
            node.note_fault(self._describe_return(log))
            if not log.keeps_every_update:
                news = Message(ROLLED_BACK, src=node.rank)
                log.append(news)
                yield news
        while await self._is_needed():
            yield await node.mailbox.next()
            if log is not None and log.snapshot_is_due():
                log.snapshot(node.state_dict())
        if log is not None:
            log.close()

    async def _is_needed(self) -> bool:
        """Whether there is more to come. When all are lost, one who comes back is waited for."""
        node = self._node
        if not node.mailbox.has_arrived():
            await self._flush()
        if node.working or node.mailbox.has_arrived():
            return True
        return not self._left and await node.mailbox.sees_a_return()

    def _describe_return(self, log: Log) -> str:
        lost = "nothing" if log.keeps_every_update else "every update after that one"
        return f"{self._node.name} died and came back at version {self._node.version}; {lost} was lost"

    async def _accepts(self, m: Message) -> bool:
        """Whether this message is to be acted on; if so it is written down, and a push is decoded."""
        if m.tag == CHECKPOINT:
            await self._node.save_when_all_have(m.seq, m.src)
            return False
        if m.tag in _REQUESTS and (known := self._ledger.answer_to(m)) is not None:
            await self._answer(m.src, known)
            return False
        if m.tag == NOTED and self._ledger.has_fenced(m):
            return False
        if m.tag == "more" and self._ledger.has_gone_on(m):  # a late copy of what was rolled back
            return False
        vector = None
        if m.tag == "push" and (vector := await self._checked(m)) is None:
            return False
        if self._log is not None and not self._replaying:
            self._log.append(m)
        if vector is not None:
            m.parts = (vector,)
        return True

    async def _checked(self, m: Message) -> Tensor | None:
        """The vector of a push; refused, and None, where it would spoil the model."""
        node = self._node
        try:
            vector = node.coding.decode(m.parts, node.x.numel(), node.begins)
            if (what := flaw(node, vector)) is not None:
                raise WireError(what)
        except WireError as problem:
            text = refusal(node, m.src, m.clock, str(problem))
            node.note_fault(text)
            reason = torch.tensor(list(text.encode()[:400]), dtype=torch.uint8)
            await self._answer(m.src, Message(REFUSED, (reason,), seq=m.seq, version=node.version))
            return None
        node.meter.staleness[max(0, node.version - m.version)] += 1
        return vector

    def _track(self, m: Message) -> bool:
        """Take note of who contributes; whether fewer do than before."""
        if m.tag not in (LEFT, LOST):
            self._meet(m)
        elif m.src not in self._lost:
            self._bury(m)
        if m.tag == "more":
            if m.src in self._held:
                self._answers.append((m.src, Message(WAIT, seq=m.seq)))
            self._held[m.src] = m
        elif m.tag in ("push", NOTED, "busy") and m.src < self._node.size:
            self.active.add(m.src)
        if m.tag in (*_SHOWN, "busy") or m.src not in self.active:
            return False
        self.active.discard(m.src)
        return True

    def _meet(self, m: Message) -> None:
        """A peer is there. It may have died and come back while nobody was here to be told."""
        if self._ledger.is_successor(m):
            loss = Message(LOST, src=m.src, incarnation=m.incarnation - 1)
            self._node.mailbox.note(loss)
            self._bury(loss)
            self.active.discard(m.src)
        if m.src in self._lost:
            self._lost.discard(m.src)
            self._node.mailbox.note(Message(JOINED, src=m.src, incarnation=m.incarnation))

    def _bury(self, m: Message) -> None:
        """A peer has gone: nothing more is taken from it, and what a worker left undone is free."""
        self._held.pop(m.src, None)
        if m.tag == LEFT:
            self._left.add(m.src)
        else:
            self._lost.add(m.src)
            self._ledger.fence(m.src, m.incarnation + 1)
        if self._pool is not None and m.src < self._node.size:
            self._pool.give_up(m.src)

    async def _settle(self, m: Message) -> None:
        """The algorithm has dealt with a message: see to its answer."""
        node = self._node
        if self._pool is not None and m.src < node.size and m.tag in ("push", "more", NOTED):
            self._pool.commit(m.src, m.clock)
        if m.tag == "push":
            self._conclude(m, Message(ACK, seq=m.seq, version=node.version))
        elif m.tag in ("idle", "busy"):  # to say it twice does no harm
            self._answers.append((m.src, Message(ACK, seq=m.seq, version=node.version)))
        self._hand_out()
        if self._log is None or not self._log.keeps_every_update:
            await self._flush()

    def _hand_out(self) -> None:
        """Answer those who asked for more, where there is more or nothing is left to come."""
        if self._pool is None:
            return
        for rank, m in list(self._held.items()):
            if self._pool.finished and not self.active:
                self._conclude(m, Message("over", seq=m.seq))
            elif (work := self._pool.take(rank)) is not None:
                (owner, place), clock = work
                self.active.add(rank)
                self._conclude(m, Message("work", (torch.tensor([owner, place, clock]),), seq=m.seq))
            else:
                continue
            del self._held[rank]

    def _conclude(self, m: Message, answer: Message) -> None:
        self._ledger.record(m, answer)
        self._answers.append((m.src, answer))

    async def _answer(self, dst: int, answer: Message) -> None:
        """Send an answer that changes nothing, after those that are due."""
        self._answers.append((dst, answer))
        await self._flush()

    async def _flush(self) -> None:
        """Make safe what was done, then tell those who asked for it."""
        answers, self._answers = self._answers, []
        if self._replaying:
            return
        if self._log is not None:
            self._log.sync()
        for dst, answer in answers:
            await self._node.send(dst, answer)

    async def _reclaim(self, m: Message) -> None:
        """Before the algorithm may change the parameters: see that nobody reads them."""
        if m.tag != "pull" and self._lender is not None:
            await self._lender.reclaim(RECLAIM_SECONDS)


def flaw(node: Node, vector: Tensor) -> str | None:
    """What is wrong with a vector, and where in the model; None where all of it is finite."""
    place = first_bad(vector)
    return None if place is None else f"{node.locate(place)} is {float(vector[place])}"


def refusal(node: Node, rank: int, clock: int, why: str) -> str:
    """What is said of an update that is not taken."""
    return f"an update of {node.name_of(rank)} at its step {clock} was refused: {why}"


def first_bad(vector: Tensor) -> int | None:
    """The place of the first element that is not finite; None where all are."""
    if bool(torch.isfinite(vector.sum())):  # the one pass that is as fast as memory; NaN and infinity stick
        return None
    bad = (~torch.isfinite(vector)).nonzero()
    return int(bad[0]) if len(bad) else None  # else only the sum was too large
