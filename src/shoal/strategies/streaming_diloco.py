"""Streaming DiLoCo: a fragment at a time, exchanged while training goes on (Douillard et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.core.limits import above, at_least, between
from shoal.engine.operation import Operation
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Sends, Strategy

NEW = -1
"""Instead of the number of exchanges under way: this worker has only now begun, or joined."""


@dataclass(frozen=True)
class StreamingDiLoCo(Strategy):
    """DiLoCo in which every fragment of the model has its own turn, and nobody waits for an exchange."""

    sends = Sends.DIFFERENCES
    ends_equal = True
    keeps_changes = False  # its momentum goes beyond them
    period: int = 100  # H: inner steps between two turns of a fragment
    fragments: int = 4  # P: parts of the model, each of whole layers
    overlap: int = 5  # tau: inner steps between handing a fragment over and taking in what came of it
    mixing: float = 0.5  # alpha: how much of its own fragment a worker keeps then
    rate: float = 0.7  # outer learning rate
    momentum: float = 0.9  # outer momentum
    warmup: int = 0  # first steps, averaged one by one
    eager: bool = False  # an exchange may take a whole period; a worker's own part counts at once

    def __post_init__(self) -> None:
        at_least(1, period=self.period, fragments=self.fragments)
        at_least(0, overlap=self.overlap, warmup=self.warmup, mixing=self.mixing)
        above(0, rate=self.rate)
        between(0, 1, momentum=self.momentum)
        if self.mixing > 1:
            raise ValueError(f"mixing={self.mixing} must be at most 1")
        if self.period % self.fragments:
            raise ValueError(f"period={self.period} is no multiple of fragments={self.fragments}")
        kind = type(self)
        if self.eager and (self.overlap, self.mixing) != (kind.overlap, kind.mixing):
            raise ValueError(
                "eager=True: exchanges take a whole period and nothing is mixed; leave out overlap and mixing"
            )
        if not self.eager and self.overlap >= (gap := self.period // self.fragments):
            raise ValueError(f"overlap={self.overlap} must be below period / fragments = {gap}")

    def steps_per_update(self, workers: int) -> float:
        return workers * (1 - self.momentum) / self.rate  # outer momentum lengthens steps on a slope

    @property
    def is_elastic(self) -> bool:
        return super().is_elastic and not self.eager  # models differ by what is under way, of all workers

    async def worker(self, w: Node) -> None:
        if self.eager:
            await self._work_eagerly(w)
            return
        turns, gap = Turns(self, w), self.period // self.fragments
        if turns.is_under_way:  # a checkpoint was written meanwhile
            await turns.hand_over((w.t - self.warmup) // gap - 1, again=True)
        async for t in w.blocks(1):
            done = t + 1 - self.warmup
            if done <= 0:
                await turns.merge_all()
            elif done % gap == 0:
                await turns.hand_over(done // gap - 1)
            if (done - self.overlap) % gap == 0:
                await turns.take_in()
        await turns.take_in()
        for turn in range(self.fragments):  # what was done since the last turn of each
            if w.t > self.warmup and (w.t - self.warmup - gap * (turn + 1)) % self.period:
                await turns.hand_over(turn)
        await turns.take_in()

    async def _work_eagerly(self, w: Node) -> None:
        turns, gap = EagerTurns(self, w), self.period // self.fragments
        await turns.go_on((w.t - self.warmup) // gap)
        async for t in w.blocks(1):
            done = t + 1 - self.warmup
            if done <= 0:
                await turns.merge_all()
            elif done % gap == 0:
                await turns.take(done // gap - 1)
        done = w.t - self.warmup
        for turn in range(self.fragments) if done > 0 else ():
            await turns.end(turn, is_due=bool((done - gap * (turn + 1)) % self.period))

    async def finish(self, w: Node) -> None:
        if self.eager and w.size > 1:
            await w.part()
            self.solution(w).copy_(await w.average(self.solution(w)))
        w.x.copy_(self.solution(w))

    def solution(self, node: Node) -> torch.Tensor:
        return node.keep("start", node.x)


class Turns:
    """One worker's fragments: handed over, under way, taken in."""

    def __init__(self, options: StreamingDiLoCo, w: Node) -> None:
        self._options, self._w, self._places = options, w, w.fragments(options.fragments)
        self._start = w.keep("start", w.x, shared=True)  # theta: the global model
        self._velocity = w.keep("velocity", torch.zeros_like(w.x), shared=True)
        so_far = torch.full((2, options.fragments), w.samples, dtype=torch.float64)
        self._samples = w.keep("samples", so_far)  # own ones at the last turn of each, and at the one before
        self._moved = w.keep("moved", torch.zeros_like(w.x))  # the displacement under way comes first in it
        self._flag = w.keep("under way", torch.full((1,), float(NEW)))
        if self._flag == NEW:  # who joins got theta, and the x of another, whose own steps are in that
            w.x.copy_(self._start)
            self._flag.zero_()
        self._under_way: list[tuple[list[slice], Operation[torch.Tensor]]] = []

    @property
    def is_under_way(self) -> bool:
        return bool(self._flag)

    async def merge_all(self) -> None:
        self._start -= await self._w.mean(self._start - self._w.x)
        self._w.x.copy_(self._start)
        self._samples.fill_(self._w.samples)

    async def hand_over(self, turn: int, again: bool = False) -> None:
        w, turn = self._w, turn % len(self._places)
        moved = self._moved[: sum(part.stop - part.start for part in self._places[turn])]
        if not again:
            torch.cat([self._start[part] - w.x[part] for part in self._places[turn]], out=moved)
            self._flag.fill_(1)
            self._samples[1, turn] = self._samples[0, turn]
            self._samples[0, turn] = w.samples
        weight = float(self._samples[0, turn] - self._samples[1, turn])
        key = f"fragment {turn} " if len(self._places) > 1 else ""
        self._under_way.append((self._places[turn], await w.begin(w.mean(moved, weight, key))))

    async def take_in(self) -> None:
        rate, momentum, mixing = self._options.rate, self._options.momentum, self._options.mixing
        while self._under_way:
            places, pending = self._under_way.pop(0)
            displacements = torch.split(await pending, [part.stop - part.start for part in places])
            for part, displacement in zip(places, displacements, strict=True):
                start, velocity, x = self._start[part], self._velocity[part], self._w.x[part]
                velocity.mul_(momentum).add_(displacement)
                start.sub_(displacement.add(velocity, alpha=momentum), alpha=rate)
                x.copy_(start.lerp(x, mixing))
            self._flag.zero_()


class EagerTurns:
    """One worker's fragments, each under way for a whole period (Kale, Douillard & Donchev 2025).

    Every worker has an outer optimizer of its own. It steps with the others' displacements of the last round
    and its own of this one; what it counted in advance is taken off when that arrives with the others'.
    """

    def __init__(self, options: StreamingDiLoCo, w: Node) -> None:
        self._options, self._w, self._places = options, w, w.fragments(options.fragments)
        self._start = w.keep("start", w.x)  # theta_k
        self._velocity = w.keep("velocity", torch.zeros_like(w.x))
        self._moved = w.keep("moved", torch.zeros_like(w.x))  # d_k of the last turn, of every fragment
        self._flags = w.keep("under way", torch.zeros(options.fragments))
        so_far = torch.full((2, options.fragments), w.samples, dtype=torch.float64)
        self._samples = w.keep("samples", so_far)  # own ones at the last turn of each, and at the one before
        self._under_way: dict[int, Operation[torch.Tensor]] = {}

    async def go_on(self, turns: int) -> None:
        """Begin again what was under way when a checkpoint was written, in the same order."""
        for turn in range(turns - len(self._places), turns):
            fragment = turn % len(self._places)
            if self._flags[fragment]:
                await self._begin(fragment)

    async def merge_all(self) -> None:
        """Average the models of all workers: a step of the warm-up."""
        self._start -= await self._w.mean(self._start - self._w.x)
        self._w.x.copy_(self._start)
        self._samples.fill_(self._w.samples)

    async def take(self, turn: int) -> None:
        """The turn of a fragment: take in its last exchange, begin the next, and step."""
        fragment = turn % len(self._places)
        stale = await self._arrived(fragment)
        own = self._read(self._start - self._w.x, fragment)
        advance = (own - self._read(self._moved, fragment)) / self._w.size
        self._write(self._moved, fragment, own)
        self._count_samples(fragment)
        await self._begin(fragment)
        self._step(fragment, stale + advance)

    async def end(self, fragment: int, is_due: bool) -> None:
        """Take in the last exchange and, if a turn is due, what was done since, without counting twice."""
        missing = await self._arrived(fragment) - self._read(self._moved, fragment) / self._w.size
        if is_due:
            self._count_samples(fragment)
            latest = self._read(self._start - self._w.x, fragment)
            last = await self._w.begin(self._mean(fragment, latest))  # only so does the codec see its key
            self._step(fragment, missing + await last)
        else:  # as if it had come in time for the last step
            reach = self._options.rate * (1 + self._options.momentum)
            self._write(self._start, fragment, self._read(self._start, fragment).sub_(missing, alpha=reach))

    async def _begin(self, fragment: int) -> None:
        self._flags[fragment] = 1
        exchange = self._mean(fragment, self._read(self._moved, fragment))
        self._under_way[fragment] = await self._w.begin(exchange)

    async def _arrived(self, fragment: int) -> torch.Tensor:
        """The mean displacement that is under way; zeros in the first round."""
        if fragment not in self._under_way:
            return torch.zeros_like(self._read(self._moved, fragment))
        self._flags[fragment] = 0
        return await self._under_way.pop(fragment)

    def _mean(self, fragment: int, v: torch.Tensor) -> Operation[torch.Tensor]:
        weight = float(self._samples[0, fragment] - self._samples[1, fragment])
        key = f"fragment {fragment} " if len(self._places) > 1 else ""
        return self._w.mean(v, weight, key)

    def _count_samples(self, fragment: int) -> None:
        self._samples[1, fragment] = self._samples[0, fragment]
        self._samples[0, fragment] = self._w.samples

    def _step(self, fragment: int, displacement: torch.Tensor) -> None:
        """A step of this worker's own outer optimizer."""
        rate, momentum = self._options.rate, self._options.momentum
        velocity = self._read(self._velocity, fragment).mul_(momentum).add_(displacement)
        start = self._read(self._start, fragment)
        start.sub_(displacement.add(velocity, alpha=momentum), alpha=rate)
        self._write(self._velocity, fragment, velocity)
        self._write(self._start, fragment, start)
        self._write(self._w.x, fragment, start)

    def _read(self, v: torch.Tensor, fragment: int) -> torch.Tensor:
        return torch.cat([v[part] for part in self._places[fragment]])

    def _write(self, v: torch.Tensor, fragment: int, values: torch.Tensor) -> None:
        places = self._places[fragment]
        for part, value in zip(places, torch.split(values, [p.stop - p.start for p in places]), strict=True):
            v[part] = value
