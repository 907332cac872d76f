"""Decoupled DiLoCo: learners at their own pace, and a syncer that waits for a quorum (arXiv 2604.21428)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.identity import SERVER
from shoal.core.limits import above, at_least, between, one_of
from shoal.core.transport import Message
from shoal.engine.operation import Operation
from shoal.engine.protocol import News, Pull, Push, RolledBack
from shoal.vocabulary.node import Node
from shoal.vocabulary.radial_mean import RadialMean, tensors_of
from shoal.vocabulary.strategy import Sends, Setting, Strategy

CALL = "call"
"""Tells a learner that the round numbered in `seq` has begun."""

MERGES = ("radial", "mean")


@dataclass(frozen=True)
class DecoupledDiLoCo(Strategy):
    """DiLoCo, a fragment at a time, in which a round needs a quorum alone; a learner that is late goes on."""

    sends = Sends.DIFFERENCES

    period: int = 100  # H: inner steps between two turns of a fragment
    fragments: int = 4  # P: parts of the model, each of whole layers
    quorum: int = 1  # K: learners without whom no round ends
    overlap: int = 5  # tau: inner steps between handing a fragment over and taking in what came of it
    grace: float = 0.5  # gamma: share of the overlap in which the others may still come
    mixing: float = 0.5  # alpha: how much of its own fragment a learner keeps then
    rate: float = 0.7  # outer learning rate
    momentum: float = 0.9  # outer momentum
    merge: str = "radial"  # radial-directional averaging, or the weighted mean

    def __post_init__(self) -> None:
        at_least(1, period=self.period, fragments=self.fragments, quorum=self.quorum)
        at_least(0, overlap=self.overlap, grace=self.grace, mixing=self.mixing)
        above(0, rate=self.rate)
        between(0, 1, momentum=self.momentum)
        one_of(MERGES, merge=self.merge)
        for name in ("grace", "mixing"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at most 1")
        if self.period % self.fragments:
            raise ValueError(f"period={self.period} is no multiple of fragments={self.fragments}")
        if self.overlap >= self.gap:
            raise ValueError(f"overlap={self.overlap} must be below period / fragments = {self.gap}")

    @property
    def gap(self) -> int:
        """Inner steps between two rounds."""
        return self.period // self.fragments

    @property
    def servers(self) -> int:
        return 1

    @property
    def mixes_steps(self) -> bool:
        return True  # the server's momentum is of whatever came

    @property
    def looks_at(self) -> str:
        return "the norms of whole tensors" if self.merge == "radial" else ""

    def steps_per_update(self, workers: int) -> float:
        return workers * (1 - self.momentum) / self.rate  # outer momentum lengthens steps on a slope

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if self.quorum > setting.workers:
            raise ValueError(f"quorum={self.quorum}: there are {setting.workers} workers, and never more")
        if setting.shards > 1:
            raise ValueError(
                f"servers={setting.shards}: the server of DecoupledDiLoCo merges whole tensors in rounds "
                "that all of them would have to end at once; take one server"
            )

    async def worker(self, w: Node) -> None:
        learner = Learner(self, w)
        await learner.begin()
        async for t in w.steps():
            if w.is_last(t - 1):  # a batch that another left, after a while
                await learner.take_in()
            before = w.samples
            await w.step()
            learner.count(w.samples - before)
            if w.is_last(t):
                await learner.end(t + 1)
            else:
                await learner.trade(t + 1)

    async def finish(self, w: Node) -> None:
        await Learner(self, w).end(w.t)  # the loop may have ended where nobody could have known
        await w.take_result()

    async def server(self, s: Node) -> None:
        syncer = Syncer(self, s)
        async for m in s.inbox(self.fragments):
            if isinstance(m, Push):
                await syncer.add(m)
            elif isinstance(m, News):
                await syncer.hear(m)
            elif isinstance(m, Pull):
                await syncer.answer(m, s.x)
            elif isinstance(m, RolledBack):
                syncer.forget()
            await syncer.close_if_complete()


def merged_between(before: int, after: int, fragments: int) -> list[int]:
    """The fragments that one of version `before` needs, to have all of version `after`, in that order."""
    if not 0 <= after - before < fragments:  # also where the server has gone back
        return list(range(fragments))
    return [number % fragments for number in range(before, after)]


class Learner:
    """One worker's fragments. It never waits for another learner, unless a quorum is lacking or at the end.

    The version that it has is the number of the round that is open, as far as it knows.
    """

    def __init__(self, options: DecoupledDiLoCo, w: Node) -> None:
        self._options, self._w, self._places = options, w, w.fragments(options.fragments)
        self._start = w.keep("start", w.x)  # Theta, as the syncer last sent it
        counts = w.keep("counts", torch.zeros(2, 2, options.fragments, dtype=torch.float64))
        self._received, self._given = counts  # steps and samples since each fragment was
        place = w.keep("place", torch.zeros(3, dtype=torch.int64))
        self._begun, self._handed, self._under_way = place[:1], place[1:2], place[2:]  # handed: at that step
        self._called = -1  # the newest round that the syncer has called for
        self._pushed: Operation[None] | None = None
        self._coming: Operation[Tensor] | None = None

    async def begin(self) -> None:
        """Take the whole model, unless a checkpoint has restored it."""
        if not self._begun:
            await self._w.pull(SERVER, out=self._w.x)
            self._start.copy_(self._w.x)
            self._begun.fill_(1)

    def count(self, samples: int) -> None:
        """A step is done."""
        for steps_and_samples in (self._received, self._given):
            steps_and_samples += torch.tensor([[1.0], [samples]])

    async def trade(self, done: int) -> None:
        """After `done` steps: take in what is due, and hand over the next fragment if it is time."""
        options, since = self._options, done - int(self._handed)
        if self._under_way and self._coming is None and since >= int(options.grace * options.overlap):
            self._coming = await self._w.begin(self._w.news())
        if self._under_way and since >= options.overlap:
            await self.take_in()
        is_due = since >= options.gap or self._is_called()
        if is_due and not self._under_way and self._received[0, self._turn] > 0:
            await self._hand_over(done)
            if options.overlap == 0:
                await self.take_in()

    async def end(self, done: int) -> None:
        """Hand over all that is left, fragment by fragment, and let everybody come to these rounds."""
        if self._under_way:
            await self.take_in(urgent=False)
        while self._given[0, self._turn] > 0:
            await self._hand_over(done)
            await self.take_in(urgent=False)

    async def take_in(self, urgent: bool = True) -> None:
        """Wait for what has been merged since the version that this learner has, and go on from it."""
        w, before = self._w, self._w.version
        coming, self._coming = self._coming or w.news(urgent), None
        merged = await coming
        for number in merged_between(before, w.version, len(self._places)):
            for part in self._places[number]:
                values, merged = merged.tensor_split([part.stop - part.start])
                self._start[part] = values
                w.x[part] = values.lerp(w.x[part], self._options.mixing)
            self._received[:, number] = 0
        self._under_way.zero_()

    @property
    def _turn(self) -> int:
        """The fragment of the open round."""
        return self._w.version % len(self._places)

    def _is_called(self) -> bool:
        self._called = max([self._called, *(m.seq for m in self._w.poll(CALL))])
        return self._called == self._w.version

    async def _hand_over(self, done: int) -> None:
        w, turn = self._w, self._turn
        if self._pushed is not None:
            await self._pushed  # that of the round before
        moved = torch.cat([self._start[part] - w.x[part] for part in self._places[turn]])
        counted = (
            self._received if self._received[0, turn] > 0 else self._given
        )  # else at the end, what is left
        steps, samples = counted[:, turn].tolist()
        weight = samples**2 / steps  # tokens, times tokens a step
        push = w.push(SERVER, moved, like=Push(rate=weight), key=f"fragment {turn} ")
        self._pushed = await w.begin(push)
        self._given[:, turn] = 0
        self._handed.fill_(done)
        self._under_way.fill_(1)


class Syncer:
    """The server's rounds, one after the other: each merges the next fragment. It asks no clock.

    The grace window of a round ends when the first learner that gave to it asks what came of it.
    """

    def __init__(self, options: DecoupledDiLoCo, s: Node) -> None:
        self._options, self._node = options, s
        self._places = s.fragments(options.fragments)
        pieces, radial = s.pieces, options.merge == "radial"
        self._tensors = [tensors_of(each, pieces, radial) for each in self._places]
        self._mean = RadialMean(s, max(map(len, self._tensors)))
        self._velocity = s.keep("velocity", torch.zeros_like(s.x), shared=True)
        self._samples = s.keep("samples", torch.tensor(0.0, dtype=torch.float64), shared=True)
        self._gave = s.keep("gave", torch.zeros(s.size, dtype=torch.bool))  # to the open round
        self._told = s.keep("told", torch.full((s.size,), -1))  # the version that each has, as far as known
        self._waiting: dict[tuple[int, int], News] = {}  # for the end of the round, by sender and number

    async def add(self, m: Push) -> None:
        """Take in a displacement, unless its round has ended, or it is of a model that was rolled back."""
        s = self._node
        self._samples += m.count  # other fragments have them, or will
        if not m.version == s.version == int(self._told[m.src]):
            return
        if not self._gave.any() and self._options.quorum < len(s.active):
            for rank in sorted(s.active - {m.src}):
                await s.send(rank, Message(CALL, seq=s.version))
        self._mean.add(m.body, m.rate, self._tensors[self._turn])
        self._gave[m.src] = True

    async def hear(self, m: News) -> None:
        """A learner that gave to the open round waits for its end; all others are told what they lack."""
        if self._gave[m.src]:
            self._waiting[m.src, m.seq] = m
        else:
            await self._tell(m)

    async def answer(self, m: Pull, v: Tensor) -> None:
        """Send what a worker asked for; from now on it has the newest version."""
        self._told[m.src] = self._node.version
        await self._node.reply(m, v)

    def forget(self) -> None:
        """This server has gone back: nobody's version is of the same model any more."""
        self._told.fill_(-1)

    async def close_if_complete(self) -> None:
        """End the round if all have given, or if the quorum has and one of them asks."""
        if not self._is_complete():
            return
        s, options, places = self._node, self._options, self._places[self._turn]
        mean = self._mean.take(
            self._tensors[self._turn], s.x.new_empty(sum(part.stop - part.start for part in places))
        )
        for part in places:
            moved, mean = mean.tensor_split([part.stop - part.start])
            velocity = self._velocity[part].mul_(options.momentum).add_(moved)
            s.x[part].sub_(moved.add(velocity, alpha=options.momentum), alpha=options.rate)
        self._gave.zero_()
        s.advance(float(self._samples))
        self._samples.zero_()
        waiting, self._waiting = self._waiting, {}
        for _, m in sorted(waiting.items()):
            await self._tell(m)

    @property
    def _turn(self) -> int:
        return self._node.version % len(self._places)

    def _is_complete(self) -> bool:
        active = self._node.active
        gave = {rank for rank, given in enumerate(self._gave.tolist()) if given}
        if not gave or active <= gave:
            return bool(gave)
        is_urgent = any(m.count for m in self._waiting.values())
        return is_urgent and len(gave) >= min(self._options.quorum, len(active | gave))

    async def _tell(self, m: News) -> None:
        x, lacking = self._node.x, merged_between(m.version, self._node.version, len(self._places))
        parts = [x[part] for number in lacking for part in self._places[number]]
        await self.answer(m, torch.cat(parts) if parts else x[:0])
