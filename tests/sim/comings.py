"""Schedules of workers and keepers that die and come back, drawn from a seed, and what must be true then.

python tests/sim/comings.py 17      # run one again
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass

from tally import at_the_end, tally

from shoal.collectives import stripes
from shoal.core.codec import Identity
from shoal.launch.join import choose_mean
from shoal.sim import Compute, Faults, Network

COLLECTIVES = ("stripes", "ring", "tree", "butterfly", "rabenseifner")


@dataclass(frozen=True)
class Schedule:
    """Who dies when, and what the run is like. One worker is spared: somebody must be left."""

    seed: int
    workers: int
    samples: int
    batch: int
    epochs: int
    period: int
    faults: Faults
    network: Network
    compute: Compute
    collective: str

    @classmethod
    def draw(cls, seed: int) -> Schedule:
        """The schedule of that seed."""
        dice = random.Random(seed)
        workers = dice.randint(2, 6)
        faults = Faults(
            noticed_after=dice.choice([0.0, 0.05, 0.5, 3.0]), restart_after=dice.choice([0.1, 0.5, 2.0, 8.0])
        )
        spared = dice.randrange(workers)
        mortal = [rank for rank in range(workers + 1) if rank != spared]  # the last is the keeper
        for _ in range(dice.randint(0, 8)):
            faults = faults.kill(dice.choice(mortal), dice.uniform(0, 15))
        return cls(
            seed,
            workers,
            dice.randint(2 * workers, 80),
            dice.randint(1, 4),
            dice.randint(1, 3),
            dice.choice([1, 1, 2, 3, 7]),
            faults,
            Network(latency=dice.choice([1e-4, 0.05, 0.4]), bandwidth=dice.choice([1e9, 1e4])),
            Compute(mean=1.0, jitter=dice.choice([0.0, 0.1, 0.5])),
            dice.choice(COLLECTIVES),
        )


def verdict(schedule: Schedule) -> str:
    """What is wrong at the end of a run with this schedule; empty if nothing is."""
    mean = choose_mean(schedule.collective, None, Identity(), schedule.workers, None)
    try:
        run = tally(
            schedule.faults,
            workers=schedule.workers,
            samples=schedule.samples,
            batch=schedule.batch,
            epochs=schedule.epochs,
            period=schedule.period,
            seed=schedule.seed,
            network=schedule.network,
            compute=schedule.compute,
            mean=stripes if schedule.collective == "stripes" else mean,
        )
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    workers = at_the_end(run)
    if not workers:
        return "nobody got to the end"
    for w in workers:
        wrong = {i: n for i, n in enumerate(w.x.tolist()) if n != schedule.epochs}
        if wrong:
            return f"{w.name} has samples {schedule.epochs} times but for {wrong}"
    rounds = {w.membership.completed for w in workers}
    return f"workers completed different numbers of rounds: {rounds}" if len(rounds) > 1 else ""


if __name__ == "__main__":
    for seed in map(int, sys.argv[1:]):
        print(seed, verdict(Schedule.draw(seed)) or "well")
