"""Legs: the stretches of a run between which its crew grows, and where each begins and ends in the data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shoal.core.crew_sizes import CrewSizes
from shoal.core.growth import Growth
from shoal.replicas.batches import DataPosition, steps_per_epoch


@dataclass(frozen=True)
class Leg:
    """A stretch of a run with so many workers; `end.step` is the first step that is not part of it."""

    number: int  # from 0
    workers: int
    begin: DataPosition
    end: DataPosition


@dataclass(frozen=True)
class Course:
    """The data that a run goes through: `samples` in each of `epochs`, in batches that may grow."""

    samples: int
    batch: int
    epochs: int
    growth: Growth

    def legs(self, crew: CrewSizes) -> Iterator[Leg]:
        """The legs of a run with this crew. Raises ValueError for one that would begin after the end."""
        here = DataPosition()
        until = [*crew.at[1:], (None, 0)]
        for number, ((_, workers), (step, next_workers)) in enumerate(zip(crew.at, until, strict=True)):
            there = self._position(here, workers, step, next_workers)
            if step is not None and there.epoch >= self.epochs:
                raise ValueError(
                    f"crew={str(crew)!r}: the crew of {next_workers} would begin at step {step}, and the run "
                    f"ends after {there.step} steps of each worker; take an earlier step, or more epochs"
                )
            yield Leg(number, workers, here, there)
            here = there

    def _position(
        self, here: DataPosition, workers: int, until: int | None, next_workers: int
    ) -> DataPosition:
        """Where these workers stand before step `until`, or at the end of the run.

        What is then left of an epoch goes with the last step if the next crew could not share it.
        """
        step, epoch, taken = here.step, here.epoch, here.taken
        while epoch < self.epochs and (until is None or step < until):
            batch = self.growth.batch(self.batch, epoch)
            steps = steps_per_epoch(self.samples - taken, batch, workers)
            if until is not None and step + steps > until:
                taken += (until - step) * batch * workers
                left = self.samples - taken
                return DataPosition(until, *((epoch, taken) if left >= next_workers else (epoch + 1, 0)))
            step, epoch, taken = step + steps, epoch + 1, 0
        return DataPosition(step, epoch, taken)
