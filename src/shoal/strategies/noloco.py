"""NoLoCo: the outer step with one random partner instead of an average over all (Kolehmainen et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.limits import above, at_least, between
from shoal.core.seeds import stream
from shoal.vocabulary.node import Node
from shoal.vocabulary.strategy import Decentral, Setting


@dataclass(frozen=True)
class NoLoCo(Decentral):
    """Local steps inside; outside, momentum on a small group's progress, and a pull towards its mean model.

    Groups are dealt out anew for every round, so that all models follow their common mean.
    """

    in_rounds = True

    period: int = 50  # H: inner steps in a round
    rate: float = 0.7  # outer learning rate
    momentum: float = 0.5  # mu: outer momentum
    pull: float | None = None  # gamma: towards the mean model of the group; None: as `rate`
    group: int = 2  # n: workers that meet in a round; one more where workers are no multiple of it
    seed: int = 0  # of the groups, the same for all

    def __post_init__(self) -> None:
        at_least(1, period=self.period)
        at_least(2, group=self.group)
        above(0, rate=self.rate)
        between(0, 1, momentum=self.momentum)
        at_least(0, pull=self.pull)

    def check(self, setting: Setting) -> None:
        super().check(setting)
        formula, limit = self._limit(setting.workers)
        if setting.workers > 1 and self._gamma >= limit:
            raise ValueError(
                f"pull={self._gamma:g} with momentum={self.momentum:g} drives the models apart: in groups of "
                f"{min(self.group, setting.workers)} it must stay below {formula} = {limit:g}"
            )

    def steps_per_update(self, workers: int) -> float:
        return workers * (1 - self.momentum) / self.rate  # outer momentum lengthens steps on a slope

    async def worker(self, w: Node) -> None:
        slow = self.solution(w)
        async for t in w.rounds():
            await w.step()
            if (t + 1) % self.period == 0:
                partners = w.here(self.partners_of(w.rank, w.size, t))
                await w.give(t, partners, slow, w.x - slow)
                theirs = await w.take(t, partners)
                self._step(w, [m.parts for m in theirs.values()])

    async def finish(self, w: Node) -> None:
        """Take a last short round alone: the mean of all models, which comes next, is the same by it."""
        if w.t % self.period:
            self._step(w, [])
        await super().finish(w)

    def solution(self, node: Node) -> Tensor:
        return node.keep("slow", node.x)  # phi

    def partners_of(self, rank: int, workers: int, t: int) -> list[int]:
        """Whom `rank` meets in the round that ends with step `t`."""
        order = torch.randperm(workers, generator=stream(self.seed, "groups", t // self.period)).tolist()
        groups = max(1, workers // self.group)
        return [k for k in order[order.index(rank) % groups :: groups] if k != rank]

    def _limit(self, workers: int) -> tuple[str, float]:
        """The pull from which on models drift apart in the mean square; a formula, and its value."""
        mu, n = self.momentum, self.group
        if workers // n <= 1:  # all meet in every round
            return "2 (1 + momentum)", 2 * (1 + mu)
        if n == 2:
            return "2 (1 - momentum^2)", 2 * (1 - mu**2)
        formula = "2 (1 - momentum^2) / (1 - momentum + 2 momentum / group)"
        return formula, 2 * (1 - mu**2) / (1 - mu + 2 * mu / n)

    @property
    def _gamma(self) -> float:
        return self.rate if self.pull is None else self.pull

    def _step(self, w: Node, theirs: list[tuple[Tensor, ...]]) -> None:
        """The outer step, with the slow weights and the progress of those who came."""
        slow, velocity = self.solution(w), w.keep("velocity", torch.zeros_like(w.x))  # phi, v
        progress, centre = w.x - slow, slow.clone()  # D and F, of the group
        for their_slow, their_progress in theirs:
            centre += their_slow
            progress += their_progress
        size = 1 + len(theirs)
        velocity.mul_(self.momentum).add_(progress, alpha=self.rate / size)
        velocity.add_(centre.div_(size).sub_(slow), alpha=self._gamma)
        slow += velocity
        w.x.copy_(slow)
