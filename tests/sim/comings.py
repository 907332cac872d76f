"""Schedules of workers and keepers that die, are cut off and come back, drawn from a seed.

Clocks jump in them, and the keeper's disk is slow. What must be true at the end is in `verdict`.

python tests/sim/comings.py 17      # run one again
python tests/sim/comings.py late 17 # with means that are taken one block late
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, replace

from tally import at_the_end, tally

from marks import LateTally, Tally
from shoal.collectives import stripes
from shoal.core.codec import Identity
from shoal.launch.join import choose_mean
from shoal.sim import Compute, Faults, Network

KEEPS_FROM = 6000
"""The first seed of those whose keeper may wait for more workers, and may relay their messages."""

COLLECTIVES = ("stripes", "ring", "tree", "butterfly", "rabenseifner")


@dataclass(frozen=True)
class Schedule:
    """Who dies, is cut off or joins when, and what the run is like. One worker never dies.

    `workers` counts places: a run may begin with fewer, and others join it.
    """

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
    begins_with: int
    min_workers: int = 1
    relays: bool = False

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
        faults = draw_partitions(dice, faults, workers + 1)
        for _ in range(dice.choice([0, 0, 1, 2])):
            by = dice.choice([-1, 1]) * dice.choice([0.5, 20.0, 1e6])
            faults = faults.clock_jump(dice.randrange(workers + 1), dice.uniform(0, 15), by)
        for _ in range(dice.choice([0, 0, 1, 3])):
            at, seconds = dice.uniform(0, 15), dice.choice([0.2, 1.0, 4.0])
            faults = faults.slow_disk(workers, at, seconds)
            if dice.random() < 0.5:  # it is killed while it writes
                faults = faults.kill(workers, at + dice.random() * seconds)
        run = cls(
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
            workers,
        )
        if dice.random() < 0.5:
            run = run.beginning_with(dice.randint(spared + 1, workers), dice)
        if dice.random() >= 0.7:
            run = run.leaving([k for k in mortal if k < workers], dice)
        if seed < KEEPS_FROM:
            return run
        if dice.random() < 0.5:
            run = run.waiting_for(dice)
        return replace(run, relays=dice.random() < 0.5)

    def waiting_for(self, dice: random.Random) -> Schedule:
        """The same, where too few wait for more: no more than come back, for those who say goodbye do not."""
        stay = self.begins_with - len({rank for rank, _ in self.faults.leaves})
        return replace(self, min_workers=dice.randint(1, max(1, stay)))

    def leaving(self, mortal: list[int], dice: random.Random) -> Schedule:
        """The same, where one or two say goodbye, unless they have died."""
        faults = self.faults
        for _ in range(dice.randint(1, 2)):
            faults = faults.leave(dice.choice(mortal), dice.uniform(0, 15))
        return replace(self, faults=faults)

    def beginning_with(self, some: int, dice: random.Random) -> Schedule:
        """The same with fewer workers at the start. Most of the others join later."""
        faults = self.faults
        for rank in range(some, self.workers):
            if dice.random() < 0.8:
                faults = faults.join(rank, dice.uniform(0, 15))
        return replace(self, faults=faults, begins_with=some)


def draw_partitions(dice: random.Random, faults: Faults, nodes: int) -> Faults:
    """Add up to three, which may overlap; some leave the keeper, the last node, all alone."""
    faults = replace(faults, patience=dice.choice([0.1, 0.5, 2.0]))
    for _ in range(dice.choice([0, 0, 1, 1, 2, 3])):
        some = dice.sample(range(nodes), dice.randint(1, nodes - 1))
        side = [nodes - 1] if dice.random() < 0.25 else some
        faults = faults.partition(side, dice.uniform(0, 15), dice.choice([0.3, 1.0, 3.0, 6.0]))
    return faults


def verdict(schedule: Schedule, kind: type[Tally] = Tally) -> str:
    """What is wrong at the end of a run with this schedule; empty if nothing is."""
    mean = choose_mean(schedule.collective, None, Identity(), schedule.workers, None)
    try:
        run = tally(
            schedule.faults,
            workers=schedule.workers,
            begins_with=schedule.begins_with,
            min_workers=schedule.min_workers,
            relays=schedule.relays,
            samples=schedule.samples,
            batch=schedule.batch,
            epochs=schedule.epochs,
            strategy=kind(schedule.period),
            seed=schedule.seed,
            network=schedule.network,
            compute=schedule.compute,
            mean=stripes if schedule.collective == "stripes" else mean,
        )
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    workers = at_the_end(run)
    if run.wrong:
        return run.wrong[0]
    if not workers:
        return "" if run.has_lost_the_model else "nobody got to the end"
    for w in workers:
        wrong = {i: n for i, n in enumerate(w.x.tolist()) if n != schedule.epochs}
        if wrong:
            return f"{w.name} has samples {schedule.epochs} times but for {wrong}"
    rounds = {w.membership.completed for w in workers}
    return f"workers completed different numbers of rounds: {rounds}" if len(rounds) > 1 else ""


if __name__ == "__main__":
    kind = LateTally if "late" in sys.argv else Tally
    for seed in map(int, filter(str.isdecimal, sys.argv[1:])):
        print(seed, verdict(Schedule.draw(seed), kind) or "well")
