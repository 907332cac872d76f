"""Client: a worker's half of push and pull; `Service` is the server's."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shoal.core.errors import Diverged, PeerLost, advice_on_overflow, describe_refusal
from shoal.core.identity import SERVER, NodeIdentity, slice_of
from shoal.core.replica import Replica
from shoal.core.transport import Message
from shoal.engine.channel import Channel
from shoal.engine.coding import Coding
from shoal.engine.ledger import WINDOW
from shoal.engine.mailbox import Mailbox, Question
from shoal.engine.one_sided import OneSided
from shoal.engine.operation import Completion
from shoal.engine.progress import Progress
from shoal.engine.protocol import (
    Busy,
    Idle,
    Instruction,
    Late,
    Look,
    More,
    News,
    Over,
    Pull,
    Push,
    PushWithNumbers,
    Refused,
    Report,
)

MOST_REFUSALS = 10
"""Updates of a worker that may be refused in a row before it gives up."""

PIECE = 1 << 20
"""Elements of a lent state that are read between two looks for the answers of other shards."""

Batch: TypeAlias = "tuple[int, int, int]"
"""A batch of another worker: owner of the share, place in it, and the clock at which to do it."""


class Client:
    """What a node asks of servers. Each server is several nodes, its shards, that own a slice each."""

    def __init__(
        self,
        identity: NodeIdentity,
        channel: Channel,
        mailbox: Mailbox,
        coding: Coding,
        progress: Progress,
        replica: Replica,
        one_sided: OneSided,
    ) -> None:
        self._identity = identity
        self._channel = channel
        self._mailbox = mailbox
        self._coding = coding
        self._progress = progress
        self._replica = replica
        self._one_sided = one_sided
        self._seen: dict[int, int] = {}  # server -> its version at the last pull
        self._pushed: list[Question] = []  # begun, not completed
        self._streams: dict[Question, str] = {}  # of pushes begun that the server may drop
        self._told: list[Question] = []  # servers that were told that this worker is idle, or busy again
        self._refusals = 0  # in a row
        self._looks = 0
        self.end: int | None = None  # a step after all those of workers that have done batches of others
        self._shards: dict[tuple[int, int], list[tuple[int, slice]]] = {}  # as long as nobody is gone
        self._spare: Tensor | None = None

    # -- push ----------------------------------------------------------------------------------

    async def start_push(
        self,
        server: int,
        v: Tensor,
        count: float | None,
        like: Push | None,
        key: str = "",
        counts: bool = True,
        may_drop: bool = False,
    ) -> Completion[None]:
        """Begin a push; until it is completed `v` must not change. `like` has another rate and numbers.

        With `key`, `v` is no slice of the model but a stream of its own to the codec. Whether it `counts` at
        the server the number of samples does not say: a force counts without any.
        What the codec held back before is kept until it is known whether the server drops `v`, if it may.
        """
        samples = self._progress.take_unmerged() if count is None else count
        if self._one_sided.is_open:
            await self._accumulate(v, samples)
            return self._nothing
        if len(self._pushed) >= WINDOW:  # a server remembers no more answers than that
            await self.settle()
        begun = []
        rate, numbers = (like.rate, like.numbers) if like else (self._replica.lr, self._replica.changed)
        for rank, part in self._shards_of(server, v.numel()):
            begins = None if key else self._coding.begins + (part.start or 0)
            own = self._own_part(v, part)
            stream = f"{key}push.{rank}"
            payload = self._coding.encode(stream, own, begins, counts=counts, under_way=may_drop)
            if numbers is None:
                m = Push(parts=payload, count=samples, clock=self._progress.clock)
            else:
                m = PushWithNumbers(parts=(*payload, numbers), count=samples, clock=self._progress.clock)
            m.version, m.rate = self._seen.get(rank, 0), rate
            begun.append(await self._mailbox.ask(rank, m))
            if may_drop:
                self._streams[begun[-1]] = stream
        self._pushed += begun
        return partial(self._complete, begun)

    async def settle(self) -> None:
        """Complete every push that was begun."""
        await self._complete(self._pushed)

    async def report(self) -> None:
        """Tell the first server that all samples so far are in the model, where no push says so."""
        await self._report(self._progress.take_unmerged())

    # -- pull ----------------------------------------------------------------------------------

    async def start_pull(self, server: int, out: Tensor | None, waits: bool) -> Completion[Tensor]:
        """Begin a pull, into `out` if that is given.

        With `waits` the answer is read at once, so that it may be read in place.
        """
        like = self._replica.x if out is None else out
        if self._one_sided.is_open:
            fetched = torch.empty_like(like) if out is None else out
            await self._fetch(fetched)
            return partial(self._ready, fetched)
        questions = []
        for rank, part in self._shards_of(server, like.numel()):
            m = Pull(count=float(waits), clock=self._progress.clock)
            questions.append((await self._mailbox.ask(rank, m), part))
        return partial(self._pulled, questions, out)

    async def pull(self, server: int, out: Tensor | None) -> Tensor:
        """All of a pull."""
        return await (await self.start_pull(server, out, waits=True))()

    @property
    def version(self) -> int:
        """The version of the first server, or of its first shard, at the last pull."""
        return self._seen.get(self._identity.workers, 0)

    async def start_news(self, urgent: bool) -> Completion[Tensor]:
        """Begin to ask the first server, which is one node, for what has changed since the last pull."""
        rank = self._identity.workers
        m = News(count=float(urgent), clock=self._progress.clock, version=self.version)
        return partial(self._pulled, [(await self._mailbox.ask(rank, m), slice(None))], None)

    async def look(self) -> Tensor:
        """The first server's newest model, which this worker's next push has nothing to do with."""
        out = torch.empty_like(self._replica.x)
        shards = self._shards_of(SERVER, out.numel())
        self._looks += 1  # numbered apart: who resumes may look more often, and must push by the same numbers
        asked = [(rank, part, Look(seq=-self._looks)) for rank, part in shards]
        questions = [(await self._mailbox.ask(rank, m), part) for rank, part, m in asked]
        for question, part in questions:
            out[part].copy_((await self._hear(question)).body)
        return out

    # -- batches of workers that died ----------------------------------------------------------

    async def rest(self) -> None:
        """Tell the servers without a pool that this worker has no more; they close what waited for it first.

        Then the word of the one with a pool, that all workers have ended, is true of all servers.
        """
        await self.settle()
        await self._hear_out()
        clock, others = self._progress.clock, self._identity.server_ranks[1:]
        self._told = [await self._mailbox.ask(rank, Idle(clock=clock)) for rank in others]
        await self._hear_out()

    async def take_more(self) -> Batch | None:
        """A batch that a worker left undone; waits until there is one. None when all are in the model."""
        await self.settle()  # asking for more says that all before it is in the model
        clock = self._progress.clock
        pool, *others = self._identity.server_ranks
        asked = await self._mailbox.ask(pool, More(clock=clock))
        await self._hear_out()
        self._told = [await self._mailbox.ask(rank, Idle(clock=clock)) for rank in others]
        answer = await self._mailbox.answer(asked)
        if isinstance(answer, Over):
            self.end = int(answer.body) if answer.parts else None
            await self._hear_out()
            return None
        self._told += [await self._mailbox.ask(rank, Busy(clock=clock)) for rank in others]
        owner, place, at = answer.body.tolist()
        return owner, place, at

    # -- portions and instructions -------------------------------------------------------------

    async def take_portion(self) -> Batch | None:
        """The pass, the portion and the clock that the first server hands out; None when training is over."""
        answer = await self._answer(self._identity.workers, More(clock=self._progress.clock))
        if isinstance(answer, Over):
            return None
        number, portion, at = answer.body.tolist()
        return number, portion, at

    async def instruct(self, ranks: Sequence[int], body: Tensor) -> list[Tensor]:
        """Have these servers do something, all at the same time; the numbers that each of them answers."""
        clock = self._progress.clock
        asked = [await self._mailbox.ask(rank, Instruction(parts=(body,), clock=clock)) for rank in ranks]
        return [(await self._mailbox.answer(question)).body for question in asked]

    # -- checkpoints ---------------------------------------------------------------------------

    def state(self) -> dict[str, int]:
        """The version of each server at the last pull."""
        return {str(rank): version for rank, version in self._seen.items()}

    def load(self, state: dict[str, int]) -> None:
        """Go on from what `state` gave."""
        self._seen = {int(rank): version for rank, version in state.items()}

    # -- inside --------------------------------------------------------------------------------

    def _shards_of(self, server: int, numel: int) -> list[tuple[int, slice]]:
        """The nodes that make up a server, with the slice of a vector that each of them owns."""
        me, known = self._identity, self._shards.get((server, numel))
        if known is not None and not self._mailbox.gone:
            return known
        first = me.workers + (SERVER - server) * me.shards
        if me.is_server:  # it owns the same slice as its counterpart
            return [(first + me.shard, slice(None))]
        nodes = [self._or_first(first + shard) for shard in range(me.shards)]
        found = [(rank, slice_of(shard, me.shards, numel)) for shard, rank in enumerate(nodes)]
        if not self._mailbox.gone:
            self._shards[server, numel] = found
        return found

    def _own_part(self, v: Tensor, part: slice) -> Tensor:
        """The slice of a vector that a shard owns; all of it where there is one shard: a view takes time."""
        return v[part] if self._identity.shards > 1 else v

    def _or_first(self, rank: int) -> int:
        """The node to ask: the same shard of the first server where another server's is gone."""
        me = self._identity
        return me.workers + (rank - me.workers) % me.shards if rank in self._mailbox.gone else rank

    async def _complete(self, begun: list[Question]) -> None:
        """Wait until these pushes are in the server's state, those that are not yet known to be."""
        open_ones = [question for question in begun if question in self._pushed]
        self._pushed = [question for question in self._pushed if question not in open_ones]
        for question in open_ones:
            answer = await self._hear(question)
            if (stream := self._streams.pop(question, None)) is not None:
                self._coding.complete([stream], counted=not isinstance(answer, (Late, Refused)))
            if isinstance(answer, Refused):
                self._note_refusal(bytes(answer.body.tolist()).decode(errors="replace"))
            else:
                self._refusals = 0

    def _hear(self, question: Question) -> Coroutine[Any, Any, Message]:
        """The answer, if need be from the first server instead of another that dies meanwhile."""
        me = self._identity
        is_first = question[0] < me.workers + me.shards
        return (self._mailbox.answer if is_first or me.is_server else self._hear_any)(question)

    async def _hear_any(self, question: Question) -> Message:
        asked = self._mailbox.asked(question)
        try:
            return await self._mailbox.answer(question)
        except PeerLost:
            rank = question[0]
            if rank == self._or_first(rank):
                raise
            return await self._answer(self._or_first(rank), replace(asked))

    async def _hear_out(self) -> None:
        """Complete what servers were told; one that is gone need not know."""
        told, self._told = self._told, []
        for question in told:
            with suppress(PeerLost):
                await self._mailbox.answer(question)

    async def _answer(self, rank: int, m: Message) -> Message:
        return await self._mailbox.answer(await self._mailbox.ask(rank, m))

    def _note_refusal(self, reason: str) -> None:
        self._channel.note_fault(reason)
        self._refusals += 1
        if self._refusals >= MOST_REFUSALS:
            raise Diverged(
                f"{MOST_REFUSALS} updates in a row were refused; the last: {reason}. "
                f"{advice_on_overflow(self._replica.lr)}"
            )

    async def _pulled(self, questions: list[tuple[Question, slice]], out: Tensor | None) -> Tensor:
        x = self._replica.x
        if out is None and len(questions) == 1:  # an answer that holds all of it is kept as it came
            answers = [await self._state(questions[0][0], torch.clone)]
            whole = answers[0].body.to(x.device)
        else:
            whole = torch.empty_like(x) if out is None else out
            answers = await self._gathered(questions, whole, keeps=out is not None)
        for ((rank, _), _), answer in zip(questions, answers, strict=True):
            if answer.version < self._seen.get(rank, 0):
                name = self._identity.name_of(rank)
                self._channel.note_fault(f"{name} went back to version {answer.version}")
            self._seen[rank] = answer.version
        return whole

    async def _gathered(
        self, questions: list[tuple[Question, slice]], whole: Tensor, keeps: bool
    ) -> list[Message]:
        """The answers of all shards, with their states put into `whole`.

        The last shard may never answer. With `keeps`, `whole` is as it was until all have.
        """
        places = [self._own_part(whole, part) for _, part in questions]

        def read(k: int, lent: Tensor) -> Tensor:
            """Copy a lent state to its place; what is read before all have answered is set aside."""
            later, aside = [question for question, _ in questions[k + 1 :]], lent[:0]
            while keeps and len(aside) < len(lent) and not all(map(self._mailbox.has_answer, later)):
                begin, end = len(aside), len(aside) + PIECE
                aside = self._spare_room(whole)[questions[k][1]][:end]
                aside[begin:].copy_(lent[begin:end])
            places[k][len(aside) :].copy_(lent[len(aside) :])
            return aside

        answers = []
        for k, (question, _) in enumerate(questions):  # no list comprehension: it would be one more coroutine
            answers.append(await self._state(question, partial(read, k)))
        for answer, place in zip(answers, places, strict=True):
            place[: len(answer.body)].copy_(answer.body)
        return answers

    async def _state(self, question: Question, read: Callable[[Tensor], Tensor]) -> Message:
        """The answer to a pull. A lent state is read at once, and the answer has what `read` returns."""
        answer = await self._hear(question)
        while answer.release is not None:
            state = read(answer.body)
            if answer.release():
                answer.parts, answer.release = (state,), None
            else:  # reclaimed before it was read
                answer = await self._answer(question[0], Pull(count=1.0, clock=self._progress.clock))
        return answer

    def _spare_room(self, like: Tensor) -> Tensor:
        """A vector that is kept: to get new memory at every pull would take as long as two copies."""
        kind = like.shape, like.dtype, like.device
        if self._spare is None or (self._spare.shape, self._spare.dtype, self._spare.device) != kind:
            self._spare = torch.empty_like(like)
        return self._spare

    # -- through windows -----------------------------------------------------------------------

    async def _fetch(self, out: Tensor) -> None:
        shards = self._shards_of(SERVER, out.numel())
        into = out if len(shards) == 1 else self._spare_room(out)  # the last may fail: `out` stays whole
        seen = {rank: await self._one_sided.fetch(rank, self._own_part(into, part)) for rank, part in shards}
        self._seen.update(seen)
        if into is not out:
            out.copy_(into)

    async def _accumulate(self, v: Tensor, samples: float) -> None:
        """Add to the servers' memory, unless it would spoil the model: no server looks at it first."""
        if (what := self._coding.flaw(v)) is not None:
            me = self._identity
            self._note_refusal(describe_refusal(me.name, self._progress.clock, what))
        else:
            self._refusals = 0
            for rank, part in self._shards_of(SERVER, v.numel()):
                await self._one_sided.accumulate(rank, v[part], self._seen[rank])
        await self._report(samples)

    async def _report(self, samples: float) -> None:
        m = Report(count=samples, clock=self._progress.clock)
        await self._channel.send(self._identity.workers, m)

    async def _nothing(self) -> None:
        return None

    async def _ready(self, out: Tensor) -> Tensor:
        return out
