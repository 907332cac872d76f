"""Study: a program that reproduces a published table. Lab: makes its runs and keeps their records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, ClassVar

from shoal.api.run import run
from shoal.core.errors import Diverged
from shoal.core.task import Task
from shoal.report import ProgressDisplay
from shoal.report.findings import Findings
from shoal.runs.result import Result
from shoal.vocabulary.strategy import Strategy

Saver = Callable[[list[dict[str, Any]]], None]
"""Called with the records of all runs so far after each run, so that a later failure loses nothing."""


class Study(ABC):
    """A table of a paper as a program; a frozen dataclass whose fields are its options.

    Runs train real models, except those that only measure time (clockwork.py). Times come from real
    processes, or from virtual time with a measured step (shoal.profiling); every row says which.
    """

    source: ClassVar[str]  # the paper and its table

    @abstractmethod
    def run(self, lab: Lab) -> Findings:
        """Make the runs and compare them with the published figures."""


class Lab:
    """Makes runs one after the other, shows their progress, and keeps their records."""

    def __init__(self, progress: ProgressDisplay | None = None, save: Saver | None = None) -> None:
        self.records: list[dict[str, Any]] = []
        self._progress = progress or ProgressDisplay(enabled=False)
        self._save = save or (lambda records: None)

    def run(self, name: str, task: Task, strategy: Strategy, **settings: Any) -> Result:
        """One run with the settings of `shoal.run`; its record is kept under `name`."""
        workers, shards = settings.get("workers", 1), settings.get("servers", 1)
        self._progress.start(name, workers, strategy.servers * shards)
        result = run(task, strategy, **settings, on_progress=self._progress.update)
        self.keep(name, result.record())
        return result

    def attempt(self, name: str, task: Task, strategy: Strategy, **settings: Any) -> Result | None:
        """The same; None if the run diverged."""
        try:
            return self.run(name, task, strategy, **settings)
        except Diverged:
            self.keep(name, {"diverged": True})
            return None

    def keep(self, name: str, figures: dict[str, Any]) -> None:
        """Keep figures under a name."""
        self.records.append({"name": name, **figures})
        self._save(self.records)

    def say(self, sentence: str) -> None:
        """Show a sentence about the work between runs."""
        self._progress.start(sentence, 0)


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation over seeds; the deviation of one seed is 0."""
    return fmean(values), stdev(values) if len(values) > 1 else 0.0


def check_seeds(seeds: int) -> None:
    """Raise ValueError unless there is at least 1 seed."""
    if seeds < 1:
        raise ValueError(f"seeds={seeds}: a study needs at least 1 seed")


def numbers(option: str, text: str) -> list[int]:
    """The distinct numbers of an option such as "8/16/32", in ascending order."""
    words = [word.strip() for word in text.split("/") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"{option}={text!r} is not a number, or several with / between, as in 8/16/32")
    return sorted({int(word) for word in words})


def many(option: str, text: str) -> list[int]:
    """The numbers of workers above 1 of such an option; raises ValueError if there are none.

    Every study compares with one worker, so the option need not name it.
    """
    counts = [count for count in numbers(option, text) if count > 1]
    if not counts:
        raise ValueError(f"{option}={text!r}: take 2 or more workers; they are compared with 1")
    return counts


def time_to(accuracy: float, curve: Sequence[Mapping[str, Any]]) -> float | None:
    """Seconds until the test accuracy exceeds `accuracy` per cent; None if it never does.

    Interpolates linearly between the points of the curve.
    """
    before: Mapping[str, Any] | None = None
    for point in curve:
        reached = point["test_accuracy"]
        if reached > accuracy:
            if before is None:
                return float(point["seconds"])
            part = (accuracy - before["test_accuracy"]) / (reached - before["test_accuracy"])
            return float(before["seconds"] + part * (point["seconds"] - before["seconds"]))
        before = point
    return None
