"""Ranges: the values that one hyper-parameter may have, and how a search draws, moves and reads them.

All draws come from a `random.Random` that the caller owns.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from random import Random
from typing import Any

STEP = 0.2  # standard deviation of a mutation, as a share of the range


class Range(ABC):
    """The values of one hyper-parameter. Ends of `at` and `place` are 0 and 1, whatever the range."""

    @abstractmethod
    def sample(self, rng: Random) -> Any:
        """A value drawn from the prior: uniform, or uniform in the logarithm."""

    @abstractmethod
    def explore(self, value: Any, rng: Random, factor: float) -> Any:
        """A value near this one, as population-based training perturbs it."""

    @abstractmethod
    def mutate(self, value: Any, rng: Random) -> Any:
        """One mutation of the value, as evolution makes it."""

    @abstractmethod
    def ends(self) -> list[Any]:
        """The values at the ends, which a search tries on a plan before anything starts."""

    @abstractmethod
    def text(self) -> str:
        """The range as a search space spells it."""


class Placed(Range):
    """A range whose values have places from 0 to 1, so that a swarm can move in it."""

    @abstractmethod
    def at(self, place: float) -> Any:
        """The value at a place in [0, 1]."""

    @abstractmethod
    def place(self, value: Any) -> float:
        """The place of a value, for pictures and mutations; `at(place(v))` is v."""

    def sample(self, rng: Random) -> Any:
        return self.at(rng.random())


@dataclass(frozen=True)
class Interval(Placed):
    """The numbers from `low` to `high`. With `log` every ratio is as likely; `integer` for whole numbers."""

    low: float
    high: float
    log: bool = False
    integer: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"{self.text()} is no range: the first number must be below the second")
        if self.log and not self.low > 0:
            raise ValueError(f"{self.text()}: a logarithmic range begins above 0")
        if self.integer and not (float(self.low).is_integer() and float(self.high).is_integer()):
            raise ValueError(f"{self.text()}: a range of whole numbers has whole ends")

    def at(self, place: float) -> float | int:
        if self.integer and not self.log:
            count = int(self.high) - int(self.low) + 1
            return int(self.low) + min(count - 1, math.floor(place * count))
        low, high = self._scale(self.low), self._scale(self.high)
        value = low + (high - low) * place
        return self._clamp(math.exp(value) if self.log else value)

    def place(self, value: Any) -> float:
        low, high = self._scale(self.low), self._scale(self.high)
        if self.integer and not self.log:
            return float((value - self.low + 0.5) / (self.high - self.low + 1))
        return float((self._scale(self._clamp(value)) - low) / (high - low))

    def explore(self, value: Any, rng: Random, factor: float) -> float | int:
        """Times 1 + factor or 1 - factor: 1.2 or 0.8 in the paper. A whole number moves by at least 1."""
        sign = 1 if rng.random() < 0.5 else -1
        moved = self._clamp(value * (1 + sign * factor))
        return self._clamp(value + sign) if self.integer and moved == value else moved

    def mutate(self, value: Any, rng: Random) -> float | int:
        moved = self.at(min(1.0, max(0.0, self.place(value) + rng.gauss(0.0, STEP))))
        return self.sample(rng) if moved == value else moved

    def ends(self) -> list[Any]:
        return [self._clamp(self.low), self._clamp(self.high)]

    def text(self) -> str:
        low, high = (f"{end:.0f}" if self.integer else repr(float(end)) for end in (self.low, self.high))
        return f"{'log ' if self.log else ''}{low}..{high}"

    def _scale(self, value: float) -> float:
        return math.log(value) if self.log else value

    def _clamp(self, value: float) -> float | int:
        """Within the bounds; whole numbers are rounded, never cut off, so that small ones can grow again."""
        inside = min(self.high, max(self.low, value))
        return round(inside) if self.integer else float(inside)


@dataclass(frozen=True)
class Choice(Placed):
    """One of several values, in an order that is taken to mean something: neighbours are alike."""

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a choice needs at least one value")
        if len(set(map(repr, self.values))) < len(self.values):
            raise ValueError(f"{self.text()} names a value twice")

    def at(self, place: float) -> Any:
        return self.values[min(len(self.values) - 1, math.floor(place * len(self.values)))]

    def place(self, value: Any) -> float:
        return (self.values.index(value) + 0.5) / len(self.values)

    def explore(self, value: Any, rng: Random, factor: float) -> Any:
        """One place to the left or to the right; it stays at the ends. An unknown value is drawn anew."""
        coin = rng.random() < 0.5
        if value not in self.values:
            return self.sample(rng)
        index = self.values.index(value) + (1 if coin else -1)
        return self.values[min(len(self.values) - 1, max(0, index))]

    def mutate(self, value: Any, rng: Random) -> Any:
        others = [other for other in self.values if other != value]
        return rng.choice(others) if others else value

    def ends(self) -> list[Any]:
        return list(self.values)

    def text(self) -> str:
        return ",".join(
            str(value).lower() if isinstance(value, bool) else str(value) for value in self.values
        )


def read_range(given: Any) -> Range:
    """A range from what a search space may hold; raises ValueError for anything else.

    "log 1e-4..1" and ("log", 1e-4, 1), "0..0.99" and (0.0, 0.99), "1..8" for whole numbers, "16,32,64" and
    [16, 32, 64], or a Range of your own.
    """
    if isinstance(given, Range):
        return given
    if isinstance(given, str):
        return _read_text(given)
    if isinstance(given, tuple) and len(given) == 3 and given[0] == "log":
        return _interval(given[1], given[2], log=True)
    if isinstance(given, tuple) and len(given) == 2 and all(map(_is_number, given)):
        return _interval(*given)
    if isinstance(given, list):
        return Choice(tuple(tuple(value) if isinstance(value, list) else value for value in given))
    if _is_number(given):
        return Choice((given,))
    raise ValueError(f"{given!r} is no range. {FORMS}")


FORMS = 'Write "log 1e-4..1", "0..0.99", "1..8" for whole numbers, or a list such as [16, 32, 64].'


def _read_text(text: str) -> Range:
    words = text.strip()
    log = words.split(maxsplit=1)[:1] == ["log"]
    low, dots, high = (words.removeprefix("log") if log else words).partition("..")
    if dots:
        ends = [_number(low.strip()), _number(high.strip())]
        if any(isinstance(end, str) for end in ends):
            raise ValueError(f"{text!r} is no range: its ends are not numbers. {FORMS}")
        return _interval(ends[0], ends[1], log)
    values = [word.strip() for word in words.split(",")]
    if log or not all(values):
        raise ValueError(f"{text!r} is no range. {FORMS}")
    return Choice(tuple(_number(value) for value in values))


def _interval(low: Any, high: Any, log: bool = False) -> Interval:
    return Interval(low, high, log, isinstance(low, int) and isinstance(high, int))


def _number(text: str) -> Any:
    """The text as a whole number, a number, true or false, or itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
