"""Objectives: what the best setting is best at, and how to order settings by it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from shoal.planning.run_time import RunCost
from shoal.sim.models import quantity

UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
DEFAULT_EPOCHS = 5


def duration(text: str) -> float:
    """Parse a time limit such as '10min', '90s' or '2h' into seconds."""
    value, unit = quantity(text)
    if unit not in UNITS:
        raise ValueError(f"{text!r} is not a time limit; write it as 90s, 10min or 2h")
    return value * UNITS[unit]


@dataclass(frozen=True)
class Objective:
    """What is asked for. `target` is an accuracy in per cent, or a loss; None: what one worker reaches.

    `within` is a time limit in seconds; `by_epochs` asks for the best accuracy after `epochs`, whatever the
    time; `price` is that of a machine for an hour.
    """

    epochs: int = DEFAULT_EPOCHS
    target: float | None = None
    within: float | None = None
    by_epochs: bool = False
    fewest_bytes: bool = False
    price: float | None = None
    is_loss: bool = False  # whether the target is one

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ValueError(f"--epochs {self.epochs}: a run needs at least 1 epoch")
        if self.target is not None and not 0 < self.target < inf:
            raise ValueError(f"--target {self.target:g}: an accuracy, or a loss, is a positive number")
        if self.within is not None and not self.within > 0:
            raise ValueError(f"--within {self.within:g} s: a time limit is positive")
        if self.price is not None and not self.price > 0:
            raise ValueError(f"--price {self.price:g}: a price is positive")
        asked = {"--target": self.target is not None, "--within": self.within is not None}
        if all(asked.values()):
            raise ValueError("--target and --within: ask for one of the two")
        ways = {
            "--within": self.within is not None,
            "--fewest-bytes": self.fewest_bytes,
            "--price": self.price is not None,
        }
        if sum(ways.values()) > 1:
            named = " and ".join(name for name, given in ways.items() if given)
            raise ValueError(f"{named}: ask for one of them")

    def key(self, cost: RunCost, machines: int, ratio: float) -> float:
        """What is to be small: the ratio of samples needed, times what a sample costs."""
        if self.by_epochs:
            return ratio
        if self.fewest_bytes:
            return ratio * cost.nbytes
        if self.price is not None:
            return ratio * cost.seconds * machines
        return ratio * cost.seconds

    @property
    def by_time(self) -> Objective:
        """What is left to ask for where no accuracy is known."""
        return replace(self, target=None, within=None, by_epochs=False)

    @property
    def asks_score(self) -> bool:
        """Whether accuracy is what is asked for, not time, bytes or money."""
        return self.by_epochs or self.within is not None

    @property
    def percent(self) -> float | None:
        """The target as an accuracy in per cent: 0.97 and 97 are the same."""
        return None if self.target is None else 100 * self.target if self.target <= 1 else self.target

    @property
    def text(self) -> str:
        """What is asked for, in words."""
        if self.within is not None:
            return f"the best accuracy within {self.within:g} s"
        if self.by_epochs:
            return f"the best accuracy after {self.epochs} epochs"
        if self.fewest_bytes:
            return f"{self.goal} with the fewest bytes"
        return f"{self.goal} for the least money" if self.price is not None else f"{self.goal} soonest"

    @property
    def goal(self) -> str:
        """What is to be reached."""
        if self.target is None:
            return f"the accuracy of one worker after {self.epochs} epochs"
        return f"a test loss of {self.target:g}" if self.is_loss else f"{self.percent:g} %"
