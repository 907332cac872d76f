"""CrewSizes: how many workers train from which step on, where the crew grows during training."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class CrewSizes:
    """From which step on how many workers train; steps are those of each worker, from the run's beginning.

    Empty for a run whose workers are all there from the beginning.
    """

    at: tuple[tuple[int, int], ...] = ()  # step, workers

    def __post_init__(self) -> None:
        if not self.at:
            return
        steps, sizes = [step for step, _ in self.at], [workers for _, workers in self.at]
        if steps[0] != 0:
            raise ValueError(f"crew={str(self)!r}: somebody has to begin; name the workers of step 0 first")
        if steps != sorted(set(steps)):
            raise ValueError(f"crew={str(self)!r}: name each step once, and in their order")
        if sizes[0] < 1:
            raise ValueError(f"crew={str(self)!r}: a run needs at least 1 worker")
        if sizes != sorted(set(sizes)):
            raise ValueError(f"crew={str(self)!r}: a crew grows; name more workers each time")

    @classmethod
    def parse(cls, text: str | None) -> CrewSizes:
        """Read '2@0,4@500': 2 workers from the beginning, 4 from step 500 on."""
        sizes = []
        for part in text.split(",") if text is not None else ():
            match = re.fullmatch(r"\s*([0-9]+)\s*@\s*([0-9]+)\s*", part)
            if match is None:
                raise ValueError(
                    f"{part!r} in crew {text!r} is not a number of workers and a step, as in 4@500"
                )
            sizes.append((int(match[2]), int(match[1])))
        return cls(tuple(sizes))

    def __str__(self) -> str:
        return ",".join(f"{workers}@{step}" for step, workers in self.at)

    def __bool__(self) -> bool:
        return bool(self.at)

    @property
    def largest(self) -> int:
        """The workers that train in the end."""
        return self.at[-1][1]

    def size_of(self, workers: int | None) -> int:
        """The workers that train in the end, where `workers` were asked for; without a crew, those or 1."""
        if not self:
            return 1 if workers is None else workers
        if workers is not None and workers != self.largest:
            raise ValueError(
                f"workers={workers} and crew={str(self)!r}, which ends with {self.largest}: leave workers out"
            )
        return self.largest

    def first_step_of(self, rank: int) -> int:
        """The step at which the worker of that rank joins in."""
        return next((step for step, workers in self.at if rank < workers), 0)
