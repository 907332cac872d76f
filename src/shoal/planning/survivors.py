"""Survivors: the few of many settings that are worth a short run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import log2, sqrt

from shoal.planning.contenders import SINGLE, Contender
from shoal.planning.noise_scale import useful_workers
from shoal.planning.objectives import Objective
from shoal.planning.rules import reason_for
from shoal.planning.run_time import RunCost
from shoal.planning.workload import Workload

FOR_PERIOD = 0.05  # more samples for each doubling of the steps between averages
FOR_CODEC = 0.05  # more samples for each halving of what travels
UNKNOWN_NOISE = 1_000.0  # samples: of the order of small nets early in training

Costs = Mapping[Contender, RunCost]


def guessed_ratio(contender: Contender, workload: Workload, noise: float | None) -> float:
    """How many times as many samples a setting may need. A guess, to choose whom to try.

    Samples to a loss grow with the batch B of a step as 1 + B / B_crit (McCandlish et al. 2018).
    """
    critical = noise or UNKNOWN_NOISE
    moved = max(1.0, contender.strategy.steps_per_update(contender.workers))
    together = workload.batch * sqrt(contender.workers * moved)  # momentum makes up for some of it
    larger = (1 + together / critical) / (1 + workload.batch / critical)
    known = workload.codecs.get(contender.codec)
    lossy = -FOR_CODEC * log2(min(1.0, known.ratio)) if known is not None else 0.0
    return float(larger * (1 + FOR_PERIOD * log2(contender.period) + lossy))


def survivors(
    costs: Costs, workload: Workload, objective: Objective, noise: float | None, number: int
) -> list[Contender]:
    """The best guess of each family, then the best of all, one for each strategy, up to `number`.

    Left out are settings that are beaten in every way by another one of their strategy, and those with more
    workers than the noise of a gradient lets a step use.
    """
    most = useful_workers(noise, workload.batch)[1] if noise else 1 << 30
    # post_local averages models only after its switch, which lies beyond a short run
    inside = [c for c in costs if c.word not in (SINGLE.word, "post_local") and c.workers <= most]
    if objective.fewest_bytes or objective.by_epochs:
        alone = costs[SINGLE].seconds
        inside = [c for c in inside if costs[c].seconds < alone] or inside

    def guess(c: Contender) -> float:
        return objective.key(costs[c], machines(c), guessed_ratio(c, workload, noise))

    def cost(c: Contender) -> float:
        return costs[c].seconds if objective.by_epochs else objective.key(costs[c], machines(c), 1.0)

    ordered = sorted(undominated(inside, cost), key=guess)
    best: dict[int, Contender] = {}
    for contender in ordered:
        best.setdefault(reason_for(contender).number, contender)
    chosen, words = list(best.values()), {c.word for c in best.values()}
    for contender in ordered:
        if contender.word not in words and len(chosen) < number:
            words.add(contender.word)
            chosen.append(contender)
    return sorted(chosen, key=guess)[:number]


def undominated(inside: Sequence[Contender], cost: Callable[[Contender], float]) -> list[Contender]:
    """Those that no other one of their strategy beats in cost, period, workers and codec at once."""
    found = []
    for word in dict.fromkeys(c.word for c in inside):
        front: list[Contender] = []
        for c in sorted((c for c in inside if c.word == word), key=lambda c: _order(c, cost)):
            if not any(_beats(other, c) for other in front):
                front.append(c)
        found += front
    return found


def _order(c: Contender, cost: Callable[[Contender], float]) -> tuple[float, int, int, bool]:
    return cost(c), c.workers, c.period, c.codec != "none"


def _beats(cheaper: Contender, c: Contender) -> bool:
    """Whether a cheaper setting is also at least as gentle: as few workers, as short a period, as exact."""
    gentle = cheaper.workers <= c.workers and cheaper.period <= c.period
    return gentle and cheaper.codec in ("none", c.codec)


def machines(contender: Contender) -> int:
    """Nodes of a run, servers included."""
    return contender.workers + contender.strategy.servers * contender.servers
