"""Mailbox: what has arrived at a node, who has gone, and the answers to what it asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from math import inf, isfinite
from typing import TYPE_CHECKING, TypeAlias

from shoal.core.errors import Fenced, PeerLost
from shoal.core.transport import JOINED, LEFT, LOST, NOTICES, Message, Watches
from shoal.engine.background import Handlers
from shoal.engine.ledger import FENCED
from shoal.engine.service import ANSWERS, WAIT

if TYPE_CHECKING:
    from shoal.vocabulary.node import Node

Question: TypeAlias = "tuple[int, int]"
"""Who was asked, and the number of the question."""


class Mailbox:
    """Arrivals, in order, and open questions.

    A question is asked again when whoever has to answer it comes back, and every `retry` seconds where the
    network may lose messages (`retry` is None where it does not). A server that is lost is waited for
    during `recovery` seconds.
    """

    def __init__(self, node: Node, retry: float | None, recovery: float) -> None:
        self.gone: dict[int, str] = {}  # rank -> how it went
        self.waiting = ""  # for what, while it waits
        self._node = node
        self._watch = node.transport.watch if isinstance(node.transport, Watches) else None
        self._retry = retry
        self._recovery = recovery
        self._stash: deque[Message] = deque()  # arrived, not asked for yet
        self._lost_at: dict[int, float] = {}
        self._numbers: dict[int, int] = {}  # rank -> number of the last question
        self._open: dict[Question, Message] = {}
        self._answers: dict[Question, Message] = {}
        self._returned: set[int] = set()  # who came back and has not been asked again

    # -- messages ------------------------------------------------------------------------------

    def has_arrived(self) -> bool:
        """Whether something is there; never waits."""
        for m in self._node.transport.drain():
            if self._take_in(m):
                self._stash.append(m)
        return bool(self._stash)

    async def next(self) -> Message:
        """The next arrival of any kind but answers; notices included."""
        while not self._stash:
            m = await self._receive("a message", None)
            if self._take_in(m):
                return m
        return self._stash.popleft()

    async def sees_a_return(self) -> bool:
        """Wait for a message while a worker that was lost may come back; whether one came."""
        node = self._node
        while not self.has_arrived():
            lost_at = max((at for rank, at in self._lost_at.items() if rank < node.size), default=-inf)
            left = lost_at + self._recovery - node.transport.now()
            if left <= 0:
                return False
            with suppress(TimeoutError):
                m = await node.transport.recv(left)
                if self._take_in(m):
                    self._stash.append(m)
        return True

    def poll(self, tag: str) -> Iterator[Message]:
        """The messages with that tag that have arrived; never waits."""
        self.has_arrived()
        for m in [m for m in self._stash if m.tag == tag]:
            self._stash.remove(m)
            yield m

    async def attend(self, meanwhile: Handlers, seconds: float) -> None:
        """Deal with what comes under these tags, waiting so long for it; returns when anything has come."""
        self.has_arrived()
        if seconds > 0 and not any(m.tag in meanwhile for m in self._stash):
            with suppress(TimeoutError):
                m = await self._node.transport.recv(seconds)
                if self._take_in(m):
                    self._stash.append(m)
        await self._deal_with(meanwhile)

    async def let_pass(self, seconds: float, meanwhile: Handlers | None) -> None:
        """Let time pass, and deal with what comes under these tags."""
        transport = self._node.transport
        if meanwhile is None:
            if seconds:
                await transport.sleep(seconds)
            return
        until = transport.now() + seconds
        while (left := until - transport.now()) > 0:
            await self.attend(meanwhile, left)

    def holds(self, tag: str, sources: Iterable[int]) -> bool:
        """Whether a message with that tag has arrived from each of these; never waits."""
        self.has_arrived()
        return {m.src for m in self._stash if m.tag == tag}.issuperset(sources)

    async def find(
        self, tag: str, src: int | None, needed: Container[int] = (), meanwhile: Handlers | None = None
    ) -> Message:
        """The next message with that tag (from `src`), waiting for it; PeerLost if `src` goes first.

        So it is if one of those `needed` is lost, without whom `src` itself may wait for ever. What comes
        under the tags of `meanwhile` is dealt with while it waits.
        """

        def wanted(m: Message) -> bool:
            return m.tag == tag and (src is None or m.src == src)

        for i, m in enumerate(self._stash):
            if wanted(m):
                del self._stash[i]
                return m
        if self._watch is not None and src is not None:
            self._watch(src)
        while True:
            for rank in self.gone:  # the first to go is the cause
                if rank == src or (rank in needed and rank in self._lost_at):
                    raise self._lost(rank, repr(tag), src)
            await self._deal_with(meanwhile or {})
            m = await self._receive(repr(tag), src)
            if self._take_in(m):
                if wanted(m):
                    return m
                self._stash.append(m)

    # -- questions -----------------------------------------------------------------------------

    async def ask(self, dst: int, m: Message) -> Question:
        """Send a question; `answer` waits for what comes of it. Its tensors must not change until then."""
        before = self._numbers.get(dst, self._node.incarnation << 40)  # no two incarnations ask alike
        m.seq = self._numbers[dst] = before + 1
        self._open[dst, m.seq] = m
        await self._node.send(dst, m)
        return dst, m.seq

    def asked(self, question: Question) -> Message:
        """An open question, as it was asked."""
        return self._open[question]

    async def answer(self, question: Question) -> Message:
        """The answer to an open question. Raises PeerLost if nobody is left to give it, and Fenced."""
        dst, asked = question[0], self._open[question]
        what = f"the answer to '{asked.tag}'"
        self.has_arrived()  # the word that a lost server is back may lie there since long ago
        try:
            while question not in self._answers:
                if dst in self._returned:
                    await self._ask_again(dst)
                if dst in self.gone and not self._may_come_back(dst):
                    raise self._lost(dst, what)
                m = await self._receive(what, dst, reminds=asked.tag == "more")
                if self._take_in(m):
                    self._stash.append(m)
        finally:
            del self._open[question]
        answer = self._answers.pop(question)
        if answer.tag == FENCED:
            raise Fenced(
                f"{self._node.name} was given up on by {self._node.name_of(dst)} before its step "
                f"{self._node.t}: it was silent for too long, and others have taken its work."
            )
        return answer

    def numbers(self) -> dict[str, int]:
        """The number of the last question to each server, for a checkpoint."""
        return {str(rank): number for rank, number in self._numbers.items()}

    def go_on_from(self, numbers: dict[str, int]) -> None:
        """Number questions from where a checkpoint left off."""
        self._numbers = {int(rank): number for rank, number in numbers.items()}

    def has_lost(self, rank: int) -> bool:
        """Whether that node has vanished, and not come back."""
        return rank in self._lost_at

    def forget_departures(self) -> None:
        """Nobody has gone: a run starts over from a checkpoint."""
        self.gone.clear()
        self._lost_at.clear()

    # -- inside --------------------------------------------------------------------------------

    async def _deal_with(self, meanwhile: Handlers) -> None:
        """Hand what lies there under these tags to who deals with it."""
        for m in [m for m in self._stash if m.tag in meanwhile]:
            self._stash.remove(m)
            await meanwhile[m.tag](m)

    def _take_in(self, m: Message) -> bool:
        """Take note of an arrival; whether it is to be kept with the others."""
        self.note(m)
        if m.tag in NOTICES:
            return self._node.is_server
        if m.tag not in ANSWERS:
            return m.tag != WAIT
        question = (m.src, m.seq)
        if question in self._open and question not in self._answers:
            self._answers[question] = m
        elif m.release is not None:  # an answer to a question that was asked twice
            m.release()
        return False

    def note(self, m: Message) -> None:
        """Take note of who has gone or come back, and tell the observers."""
        node = self._node
        if m.tag == JOINED:
            self.gone.pop(m.src, None)
            self._lost_at.pop(m.src, None)
            self._returned.add(m.src)
            if m.src < node.size:
                node.working.add(m.src)
        elif m.tag in (LEFT, LOST):
            known = m.src in self.gone
            self.gone[m.src] = "left" if m.tag == LEFT else "was lost"
            node.working.discard(m.src)
            if m.tag == LOST and not known:
                self._lost_at[m.src] = node.transport.now()
                node.note_fault(f"{node.name_of(m.src)} was lost")
        else:
            node.received(m)

    def _may_come_back(self, rank: int) -> bool:
        since = self._lost_at.get(rank)
        return since is not None and self._node.transport.now() < since + self._recovery

    def _lost(self, rank: int, what: str, src: int | None = None) -> PeerLost:
        node = self._node
        sender = "it" if src is None or src == rank else node.name_of(src)
        return PeerLost(
            f"{node.name_of(rank)} {self.gone[rank]} before {sender} sent {what} to {node.name} "
            f"(which is at step {node.t})."
        )

    async def _ask_again(self, rank: int) -> None:
        self._returned.discard(rank)
        for question, m in list(self._open.items()):
            if question[0] == rank and question not in self._answers:
                await self._node.send(rank, m)

    async def _receive(self, what: str, src: int | None, reminds: bool = False) -> Message:
        """The next message of any kind, with the wait for it accounted for.

        Who `reminds` asks again meanwhile, to hear at least that the other is there.
        """
        node = self._node
        began = node.transport.now()
        self.waiting = f"{what} from {'any node' if src is None else node.name_of(src)}"
        m = await self._arrival(began, src, reminds)
        self.waiting = ""
        node.waited_for(m.src, node.transport.now() - began)
        return m

    async def _arrival(self, began: float, src: int | None, reminds: bool) -> Message:
        """The next message; meanwhile questions are asked again where the network may have lost them."""
        node = self._node
        while True:
            deadline = inf if node.timeout is None else began + node.timeout
            pauses = [deadline - node.transport.now(), inf if self._retry is None else self._retry]
            if reminds and node.timeout is not None:
                pauses.append(node.timeout / 3)
            if src in self._lost_at:
                pauses.append(self._lost_at[src] + self._recovery - node.transport.now())
            try:
                pause = max(0.0, min(pauses))
                return await node.transport.recv(pause if isfinite(pause) else None)
            except TimeoutError:
                if node.transport.now() >= deadline:
                    raise PeerLost(
                        f"{node.name} waited {node.timeout:g} s for {self.waiting} at step {node.t}; "
                        "nothing came."
                    ) from None
                if src in self._lost_at and not self._may_come_back(src):
                    raise self._lost(src, self.waiting.split(" from ")[0]) from None
                for rank in sorted({dst for dst, _ in self._open}):
                    await self._ask_again(rank)
