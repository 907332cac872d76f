"""Goal: the score to which the runs of a comparison are timed, and how each run ends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shoal.core.curves import Final, best, final, seconds_to
from shoal.report.reading import Record, is_resumed
from shoal.report.units import MISSING, decimal_text, finite

ACCURACY, LOSS = "test_accuracy", "test_loss"


@dataclass(frozen=True)
class Goal:
    """A test accuracy in per cent or, where the labels are not classes, a test loss."""

    score: str
    value: float
    given: bool  # by the user

    @property
    def text(self) -> str:
        """97.31 %, or 0.213 for a loss."""
        return score_text(self.value, self.score)

    def seconds(self, record: Record) -> float | None:
        """When this run was first seen at the goal; None if it never was, or was resumed.

        The curve of a resumed run, and its clock, begin where it was resumed.
        """
        if is_resumed(record):
            return None
        return seconds_to(record.get("curve") or (), self.score, self.value)

    def speed_up(self, record: Record, baseline: Record | None) -> float | None:
        """The baseline's time to the goal over this run's; None if one of the times is not known."""
        mine = self.seconds(record)
        theirs = None if baseline is None else self.seconds(baseline)
        return theirs / mine if mine and theirs is not None else None


def goal_of(records: Sequence[Record], target: float | None = None) -> Goal | None:
    """The goal of these runs: `target`, or else the lowest best score, which all of them reach.

    Runs that diverged have no say. None without evaluations, for runs of several tasks, and for one run.
    """
    if len({record.get("task") for record in records}) != 1:
        return None
    score = score_of(records)
    if target is not None:
        return Goal(score, target, given=True)
    ended = [record for record in records if end_of(record, LOSS) is not None]
    reached = [best(record.get("curve") or (), score) for record in ended]
    known = [value for value in reached if value is not None]
    if len(records) < 2 or not known:
        return None
    return Goal(score, max(known) if score == LOSS else min(known), given=False)


def score_of(records: Iterable[Record]) -> str:
    """What these runs are judged by: the test accuracy, or the test loss if none of them has one."""
    known = any(end_of(record, ACCURACY) is not None for record in records)
    return ACCURACY if known else LOSS


def end_of(record: Record, name: str) -> Final | None:
    """A figure at the end of a run: the mean of its last evaluations, or the only one that is known."""
    curve = record.get("curve") or ()
    if curve:
        return final(curve, name)
    value = finite(record.get(name, (record.get("metrics") or {}).get(name)))
    return None if value is None else Final(value, None, 1)


def end_text(record: Record, name: str) -> str:
    """97.83 ± 0.10, without a spread for one evaluation."""
    end, digits = end_of(record, name), 3 if name == LOSS else 2
    if end is None:
        return MISSING
    mean = decimal_text(end.mean, digits)
    return mean if end.spread is None else f"{mean} ± {decimal_text(end.spread, digits)}"


def score_text(value: float, score: str) -> str:
    """An accuracy with its unit, or a loss."""
    return decimal_text(value, 3) if score == LOSS else f"{decimal_text(value)} %"


def highest_end(records: Sequence[Record]) -> int | None:
    """Index of the run that ends best; of equal ones, the first."""
    score = score_of(records)
    sign = -1.0 if score == LOSS else 1.0
    ends = [(end_of(record, score), -index) for index, record in enumerate(records)]
    known = [(sign * end.mean, index) for end, index in ends if end is not None]
    return -max(known)[1] if known else None
