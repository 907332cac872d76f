"""Advice: why runs end lower than one worker, counted from the runs, and the command to try next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.core.growth import LARGEST_SHARE
from shoal.report.goal import LOSS, end_of, score_of
from shoal.report.reading import Record, baseline_of, run_names, workers_of
from shoal.report.units import count_text, finite


@dataclass(frozen=True)
class Shortfall:
    """A run that took fewer steps than one worker over the same epochs, and ended lower."""

    name: str
    workers: int
    steps: int  # of each worker
    steps_of_one: int
    epochs: int
    scaled: bool  # whether its learning rate was raised already
    crowded: bool  # whether a step of all workers takes so much of the data that a larger rate does little


def advice(records: Sequence[Record], command: str = "") -> list[str]:
    """Why runs end lower for want of steps, and `command` with the option to try next; empty if none does."""
    found = [short for short in _shortfalls(records) if short is not None]
    told = []
    for scaled in (False, True):
        alike = [short for short in found if short.scaled is scaled]
        for steps in sorted({short.steps for short in alike}, reverse=True):
            group = [short for short in alike if short.steps == steps]
            told.append(_because(group[0], [short.name for short in group]))
        if alike:
            told.append(f"Try: {command} {_option(alike)}" if command else f"Try {_option(alike)}.")
    return told


def _because(one: Shortfall, names: Sequence[str]) -> str:
    counted = (
        f"With {one.workers} workers, {one.epochs} epochs are {count_text(one.steps)} steps for each instead "
        f"of {count_text(one.steps_of_one)}, {one.steps_of_one / one.steps:.3g} times fewer."
    )
    s = "s" if len(names) == 1 else ""
    if one.scaled:
        return f"{counted} {_listed(names)} end{s} below one worker although the learning rate is larger."
    return f"{counted} {_listed(names)} average{s} them at the rate of one worker, and end{s} below it."


def _option(alike: Sequence[Shortfall]) -> str:
    longer = f"--epochs {2 * alike[0].epochs}"
    if alike[0].scaled:
        return longer
    return f"--scale-lr auto {longer}" if all(short.crowded for short in alike) else "--scale-lr auto"


def _shortfalls(records: Sequence[Record]) -> list[Shortfall | None]:
    return [
        _shortfall(record, baseline_of(record, records), name, records)
        for record, name in zip(records, run_names(records), strict=True)
    ]


def _shortfall(
    record: Record, baseline: Record | None, name: str, records: Sequence[Record]
) -> Shortfall | None:
    """The run's shortfall, if it averages steps, had the same epochs and ended lower beyond the noise."""
    config = record.get("config") or {}
    if baseline is None or baseline is record or (finite(config.get("steps_per_update")) or 1.0) <= 1:
        return None
    steps, steps_of_one = _steps(record), _steps(baseline)
    epochs_of_one = (baseline.get("config") or {}).get("epochs")
    same = epochs_of_one is not None and config.get("epochs") == epochs_of_one
    if not same or not steps or steps >= steps_of_one or not ends_lower(record, baseline, score_of(records)):
        return None
    workers, epochs = int(config.get("workers") or record.get("workers") or 1), int(config["epochs"])
    share = workers * (finite(config.get("batch")) or 0.0) / (finite(record.get("samples")) or 1.0) * epochs
    scaled = (finite(config.get("lr_factor")) or 1.0) > 1
    return Shortfall(name, workers, steps, steps_of_one, epochs, scaled, crowded=share > LARGEST_SHARE)


def ends_lower(record: Record, baseline: Record, score: str) -> bool:
    """Whether a run ends worse than another by more than the standard errors of both."""
    mine, theirs = end_of(record, score), end_of(baseline, score)
    if mine is None or theirs is None:
        return False
    behind = mine.mean - theirs.mean if score == LOSS else theirs.mean - mine.mean
    return behind > mine.error + theirs.error


def _steps(record: Record) -> int:
    """Steps of the worker that took most."""
    return max((int(node.get("steps") or 0) for node in workers_of(record)), default=0)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
