"""Mailbox: the messages that arrived at a node, which peers are gone, and requests with their answers."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from math import inf, isfinite
from typing import TypeAlias, cast

from shoal.core.errors import Fenced, PeerLost
from shoal.core.identity import NodeIdentity
from shoal.core.transport import NOTICES, Message, Watches, offers
from shoal.engine.channel import Channel
from shoal.engine.progress import Progress
from shoal.engine.protocol import (
    Answer,
    FencedOff,
    Handlers,
    Idle,
    Joined,
    Left,
    Lost,
    More,
    Notice,
    Pull,
    Wait,
    typed,
)

Question: TypeAlias = "tuple[int, int]"
"""The rank that a request went to, and the request's number."""


class Mailbox:
    """Arrivals in order, and open requests.

    A request is repeated when its server comes back, and every `retry` seconds where the network may lose
    messages (None where it does not). A lost server is waited for during `recovery` seconds.
    """

    def __init__(
        self,
        channel: Channel,
        identity: NodeIdentity,
        progress: Progress,
        *,
        retry: float | None = None,
        recovery: float = 0.0,
    ) -> None:
        self.gone: dict[int, str] = {}  # rank -> how it went
        self.incarnations: dict[int, int] = {}  # of those that have come back
        self.shown: Container[str] = NOTICES if identity.is_server else ()  # notices to hand on as messages
        self._channel = channel
        self._identity = identity
        self._progress = progress
        transport = channel.transport
        watches = offers(type(transport), Watches)  # others tell of all that go
        self.watch = cast(Watches, transport).watch if watches else lambda rank: None
        self._reasons: Mapping[int, str] = getattr(transport, "reasons", {})
        self._notices_silence = getattr(transport, "notices_silence", True)
        self._retry = retry
        self._recovery = recovery
        self._stash: deque[Message] = deque()  # arrived, not asked for yet
        self._lost_at: dict[int, float] = {}
        self._numbers: dict[int, int] = {}  # rank -> number of the last request
        self._open: dict[Question, Message] = {}
        self._asked_at = 0.0  # when all that is open was asked, or asked again
        self._answers: dict[Question, Message] = {}
        self._returned: set[int] = set()  # peers that came back and have not been asked again
        self._awaited: tuple[str, int | None] | None = None  # what it waits for, and from whom
        self._stale = 0  # what comes with this version or a lower one is dropped, but for 0, which is none
        self._exempt: Container[str] = ()  # tags of messages that are not

    @property
    def waiting(self) -> str:
        """What this node waits for, for messages to people; empty while it does not wait."""
        if self._awaited is None:
            return ""
        what, src = self._awaited
        return f"{what} from {'any node' if src is None else self._identity.name_of(src)}"

    # -- messages ------------------------------------------------------------------------------

    def has_arrived(self) -> bool:
        """Whether a message is there; never waits."""
        for m in self._channel.drain():
            self._sort(m)
        return bool(self._stash)

    async def next(self) -> Message:
        """The next message of any kind but answers; at a server, notices included."""
        while not self._stash:
            m = await self._receive("a message", None, for_ever=self._notices_silence)
            if self._take_in(m):
                return m
        return self._stash.popleft()

    async def sees_a_return(self) -> bool:
        """Wait for a message as long as a lost worker may come back; whether one came."""
        while not self.has_arrived():
            workers = self._identity.workers
            lost_at = max((at for rank, at in self._lost_at.items() if rank < workers), default=-inf)
            left = lost_at + self._recovery - self._channel.waited
            if left <= 0:
                return False
            with suppress(TimeoutError):
                self._sort(await self._channel.recv(left))
        return True

    def poll(self, tag: str) -> Iterator[Message]:
        """The messages with that tag that have arrived; never waits."""
        self.has_arrived()
        for m in [m for m in self._stash if m.tag == tag]:
            self._stash.remove(m)
            yield m

    async def attend(self, handlers: Handlers, seconds: float) -> None:
        """Wait at most `seconds` for a message, and hand those with these tags to their handlers."""
        self.has_arrived()
        if seconds > 0 and not any(m.tag in handlers for m in self._stash):
            with suppress(TimeoutError):
                self._sort(await self._channel.recv(seconds))
        await self._handle(handlers)

    async def attend_to(self, what: str, handlers: Handlers, for_ever: bool = False) -> None:
        """Wait for a message, and hand those with these tags to their handlers; `what` is waited for."""
        self.has_arrived()
        if not any(m.tag in handlers for m in self._stash):
            self._sort(await self._receive(what, None, for_ever=for_ever))
        await self._handle(handlers)

    async def let_pass(self, seconds: float, handlers: Handlers) -> None:
        """Let time pass, and hand what arrives to these handlers."""
        until = self._channel.waited + seconds
        while (left := until - self._channel.waited) > 0:
            await self.attend(handlers, left)

    def holds(self, tag: str, sources: Iterable[int], version: int | None, after: int = -1) -> bool:
        """Whether one of that version, or of any above `after`, has arrived from each; never waits."""
        self.has_arrived()
        fits = [m for m in self._stash if (m.version > after if version is None else m.version == version)]
        return {m.src for m in fits if m.tag == tag}.issuperset(sources)

    async def find(
        self,
        tag: str,
        src: int | None,
        needed: Container[int] = (),
        handlers: Handlers | None = None,
        version: int | None = None,
    ) -> Message:
        """The next message with that tag (from `src`); waits for it. Raises PeerLost if `src` goes first.

        So it does if one of those `needed` is lost, without whom `src` itself may wait for ever. Messages
        that have a handler are handled while it waits. With `version`, only a message of that one will do.
        """

        def wanted(m: Message) -> bool:
            right = version is None or m.version == version
            return m.tag == tag and (src is None or m.src == src) and right

        for i, m in enumerate(self._stash):
            if wanted(m):
                del self._stash[i]
                return m
        if src is not None:
            self.watch(src)
        since = None if src is None else self._channel.waited
        incarnation = None if src is None else self.incarnations.get(src)
        while True:
            if src is not None and self.incarnations.get(src) != incarnation:
                raise PeerLost(f"{self._identity.name_of(src)} was started again before it sent {tag!r}.")
            for rank in self.gone:  # the first to go is the cause
                if rank == src or (rank in needed and rank in self._lost_at):
                    raise self._lost(rank, repr(tag), src)
            if handlers:
                await self._handle(handlers)
            m = await self._receive(repr(tag), src, since=since)
            if m.src == src:
                since = self._channel.waited
            if self._take_in(m):
                if wanted(m):
                    return m
                self._stash.append(m)

    # -- requests ------------------------------------------------------------------------------

    async def ask(self, dst: int, m: Message) -> Question:
        """Send a request; `answer` waits for its answer. Its tensors must not change until then."""
        if m.seq >= 0:  # else it has a number of its own; no two incarnations ask alike
            m.seq = self._numbers[dst] = self._numbers.get(dst, self._identity.incarnation << 40) + 1
        if not self._open:
            self._asked_at = self._channel.waited
        self._open[dst, m.seq] = m
        await self._channel.send(dst, m)
        return dst, m.seq

    def asked(self, question: Question) -> Message:
        """An open request, as it was sent."""
        return self._open[question]

    def has_answer(self, question: Question) -> bool:
        """Whether an open request has been answered, and not fenced off; never waits."""
        self.has_arrived()
        return question in self._answers and not isinstance(self._answers[question], FencedOff)

    async def answer(self, question: Question) -> Message:
        """The answer to an open request. Raises PeerLost if nobody is left to give it, and Fenced."""
        dst, asked = question[0], self._open[question]
        if dst in self.gone:
            self.has_arrived()  # a notice that a lost server is back may have been waiting here
        since, what = self._channel.waited, f"the answer to '{asked.tag}'"
        try:
            while question not in self._answers:
                if self._returned:
                    for rank in sorted({rank for rank, _ in self._open} & self._returned):
                        await self._ask_again(rank)
                if dst in self.gone and not self._may_come_back(dst):
                    raise self._lost(dst, what)
                m = await self._receive(what, dst, isinstance(asked, More), since)
                if m.src == dst:
                    since = self._channel.waited
                self._sort(m)
        finally:
            del self._open[question]
        answer = self._answers.pop(question)
        if isinstance(answer, FencedOff):
            raise Fenced(
                f"{self._identity.name} was given up on by {self._identity.name_of(dst)} before its step "
                f"{self._progress.t}: it was silent for too long, and others have taken its work."
            )
        return answer

    def state(self) -> dict[str, int]:
        """The number of the last request to each server, but for pulls under way: those are made again."""
        open_pulls = Counter(dst for (dst, _), m in self._open.items() if isinstance(m, Pull))
        return {str(rank): number - open_pulls[rank] for rank, number in self._numbers.items()}

    def load(self, state: dict[str, int]) -> None:
        """Number requests from where a checkpoint left off."""
        self._numbers = {int(rank): number for rank, number in state.items()}

    # -- who is gone ---------------------------------------------------------------------------

    def has_lost(self, rank: int) -> bool:
        """Whether that node has vanished and not come back."""
        return rank in self._lost_at

    def lost_for(self, rank: int) -> float:
        """Seconds waited since that node has vanished; 0 if it has not, or has come back."""
        return self._channel.waited - self._lost_at[rank] if rank in self._lost_at else 0.0

    def has_left(self, rank: int) -> bool:
        """Whether that node has ended in order."""
        return rank in self.gone and rank not in self._lost_at

    def fence(self, version: int, exempt: Container[str]) -> None:
        """From now on drop what has this version or a lower one, but for messages with these tags.

        What has none stays: it belongs to no collective.
        """
        self._stale, self._exempt = version, exempt
        self._stash = deque(m for m in self._stash if not self._is_stale(m))

    def forget_departures(self) -> None:
        """Nobody has gone: the run starts over from a checkpoint."""
        self.gone.clear()
        self._lost_at.clear()

    def note(self, m: Message) -> None:
        """Record a departure or a return, or meter any other message."""
        if isinstance(m, Joined):
            self.gone.pop(m.src, None)
            self._lost_at.pop(m.src, None)
            self._returned.add(m.src)
            self.incarnations[m.src] = m.incarnation
            if m.src < self._identity.workers:
                self._progress.note_return(m.src, m.incarnation)
        elif isinstance(m, (Left, Lost)):
            known = m.src in self.gone
            self.gone[m.src] = "left" if isinstance(m, Left) else "was lost"
            self._progress.note_departure(m.src, died=isinstance(m, Lost) and not known)
            if isinstance(m, Left):  # perhaps while it could not be reached
                self._lost_at.pop(m.src, None)
            elif not known:
                self._lost_at[m.src] = self._channel.waited
                self._channel.note_fault(f"{self._identity.name_of(m.src)} was lost")
        else:
            self._channel.count_received(m)

    # -- inside --------------------------------------------------------------------------------

    async def _handle(self, handlers: Handlers) -> None:
        """Hand the messages with these tags to their handlers."""
        while (i := next((i for i, m in enumerate(self._stash) if m.tag in handlers), None)) is not None:
            m = self._stash[i]
            del self._stash[i]
            await handlers[m.tag](m)

    def _sort(self, m: Message) -> None:
        """Record an arrival, and keep it if it is to be asked for."""
        if self._take_in(m):
            self._stash.append(m)

    def _take_in(self, m: Message) -> bool:
        """Record an arrival; whether it belongs with those that wait to be asked for."""
        if type(m) is Message:  # as real transports deliver them
            typed(m)
        if isinstance(m, Notice):
            self.note(m)
            return m.tag in self.shown
        self._channel.count_received(m)
        if m.clock and m.src < self._identity.workers and not self._identity.is_server:
            self._progress.note_place(m.src, m.clock)
        if isinstance(m, Answer):
            question = (m.src, m.seq)
            if question in self._open and question not in self._answers:
                self._answers[question] = m
            elif m.release is not None:  # a second answer, to a request that was repeated
                m.release()
            return False
        return not (isinstance(m, Wait) or self._is_stale(m))

    def _is_stale(self, m: Message) -> bool:
        return 0 < m.version <= self._stale and m.tag not in self._exempt

    def _may_come_back(self, rank: int) -> bool:
        since = self._lost_at.get(rank)
        return since is not None and self._channel.waited < since + self._recovery

    def _lost(self, rank: int, what: str, src: int | None = None) -> PeerLost:
        name_of = self._identity.name_of
        sender = "it" if src is None or src == rank else name_of(src)
        why = self._reasons.get(rank, "") if rank in self._lost_at else ""
        went = f"{self.gone[rank]} ({why})" if why else self.gone[rank]
        return PeerLost(
            f"{name_of(rank)} {went} before {sender} sent {what} to {self._identity.name} "
            f"(which is at step {self._progress.t})."
        )

    async def _ask_again(self, rank: int) -> None:
        """Repeat the open requests to a node. One that is back may not remember that it has answered Idle."""
        is_back = rank in self._returned
        self._returned.discard(rank)
        for question, m in list(self._open.items()):
            stands = question not in self._answers or (is_back and isinstance(m, Idle))
            if question[0] == rank and stands:
                await self._channel.send(rank, m)

    async def _receive(
        self,
        what: str,
        src: int | None,
        reminds: bool = False,
        since: float | None = None,
        for_ever: bool = False,
    ) -> Message:
        """The next message of any kind, with the wait for it metered.

        With `reminds`, the request is repeated meanwhile, to hear at least that the server is alive. `since`
        is when the wait for `src` began: what others say meanwhile makes it no shorter.
        """
        channel = self._channel
        began = channel.now()
        self._awaited = what, src
        if (channel.timeout is None or for_ever) and self._retry is None and src not in self._lost_at:
            m = await channel.recv()
        else:
            m = await self._arrival(channel.waited if since is None else since, src, reminds)
        self._awaited = None
        channel.count_wait(m.src, channel.now() - began)
        return m

    async def _arrival(self, began: float, src: int | None, reminds: bool) -> Message:
        """The next message; requests are repeated meanwhile where the network may have lost them."""
        channel, timeout = self._channel, self._channel.timeout
        deadline = inf if timeout is None else began + timeout
        while True:
            pauses = [deadline - channel.waited]
            if self._retry is not None and self._open:  # whatever arrives meanwhile
                pauses.append(self._asked_at + self._retry - channel.waited)
            if reminds and timeout is not None:
                pauses.append(timeout / 3)
            if src in self._lost_at:
                pauses.append(self._lost_at[src] + self._recovery - channel.waited)
            try:
                pause = max(0.0, min(pauses))
                return await channel.recv(pause if isfinite(pause) else None)
            except TimeoutError:
                if channel.waited >= deadline:
                    raise PeerLost(
                        f"{self._identity.name} waited {timeout:g} s for {self.waiting} at step "
                        f"{self._progress.t}; nothing came."
                    ) from None
                if src in self._lost_at and not self._may_come_back(src):
                    raise self._lost(src, self._awaited[0] if self._awaited else "") from None
                self._asked_at = channel.waited
                for rank in sorted({dst for dst, _ in self._open}):
                    await self._ask_again(rank)
