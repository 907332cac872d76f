"""FigureTable: turns progress events of nodes into rows of named numbers, the same for every logger."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

MOST_NODES = 64
"""Nodes up to which a row has the figures of each; of more, those of all together."""

ROW_SECONDS = 0.5
ROWS = 1000
"""Rows are ROW_SECONDS apart; later the gap is a ROWS-th of the time so far, about 5,000 rows a day."""


class Figure(NamedTuple):
    """One figure: the field of a progress event, how nodes are summarised, and what it is."""

    field: str
    of_all: Callable[[Sequence[float]], float]
    of_servers: bool  # whether the total includes servers
    about: str


FIGURES = {
    "loss": Figure("loss", fmean, False, "of the last batch, mean over the workers"),
    "samples_per_second": Figure("samples_per_second", sum, False, "since training began, all workers"),
    "wait_fraction": Figure(
        "wait_fraction", fmean, False, "share of time spent waiting, mean over the workers"
    ),
    "bytes_sent": Figure("bytes_sent", sum, True, "so far, all nodes"),
    "saved_seconds": Figure("saved_seconds", fmean, False, "time that compression saved a worker, estimated"),
    "staleness": Figure("staleness", fmean, True, "versions a push was behind, mean so far"),
}
"""The figures of a run. For one node, `worker_0/loss` is the same figure of that node alone."""

WORKERS_ONLY = ("samples", "samples_per_second", "loss", "wait_fraction", "saved_seconds")
"""Figures that a server does not have."""

COUNTS = {
    "samples": "trained on so far, by all workers",
    "seconds": "since training began; virtual in a simulation",
    "workers": "still there",
}
TESTS = {
    "test_accuracy": "per cent, of the solution at that moment",
    "test_loss": "of the solution at that moment",
}


@dataclass(frozen=True)
class Row:
    """The figures of one moment."""

    step: int
    samples: int
    seconds: float
    figures: dict[str, float]

    @classmethod
    def at(cls, step: float, samples: float, seconds: float, figures: Mapping[str, Any]) -> Row:
        """A row of those of `figures` that are finite numbers, and of the moment itself."""
        known = {name: value for name, value in figures.items() if _is_finite(value)}
        moment = {"samples": round(samples), "seconds": float(seconds)}
        return cls(round(step), round(samples), float(seconds), {**moment, **known})


class FigureTable:
    """The last event of each node of a run, and when the next row is due."""

    def __init__(self, workers: int, servers: int) -> None:
        self._workers = workers
        self._has_nodes = workers + servers <= MOST_NODES
        self._events: dict[int, Mapping[str, Any]] = {}
        self._steps = [(0.0, 0.0)]  # samples and step of the rows so far
        self._began: float | None = None
        self._next = 0.0

    def hear(self, event: Mapping[str, Any]) -> None:
        """Take a progress event; those of the evaluation after training say nothing new."""
        if "tested" not in event and "rank" in event:
            self._events[int(event["rank"])] = event

    def is_due(self, now: float) -> bool:
        """Whether it is time for a row; `now` is any clock in seconds."""
        if self._began is None:
            self._began, self._next = now, now + ROW_SECONDS
        if now < self._next:
            return False
        self._next = now + max(ROW_SECONDS, (now - self._began) / ROWS)
        return True

    def row(self) -> Row | None:
        """The figures as of now; None if no worker has reported."""
        workers = [e for e in self._events.values() if e.get("role") != "server"]
        active = [e for e in workers if not e.get("lost")]
        if not active:
            return None
        step = min(_number(e, "step") for e in active)
        samples = sum(_number(e, "samples") for e in workers)
        self._steps.append((samples, step))
        figures = {**self._of_all(active), "workers": len(active), **dict(self._of_nodes())}
        return Row.at(step, samples, max(_number(e, "seconds") for e in active), figures)

    def tested(self, curve: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
        """The rows of a learning curve, whose models were tested after training."""
        for point in curve:
            figures = {name: point.get(name) for name in TESTS} | dict(point.get("metrics") or {})
            samples = _number(point, "samples")
            yield Row.at(self._step_at(samples), samples, _number(point, "seconds"), figures)

    def _of_all(self, active: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        totals = {}
        for name, figure in FIGURES.items():
            nodes = self._events.values() if figure.of_servers else active
            if known := [e[figure.field] for e in nodes if _is_finite(e.get(figure.field))]:
                totals[name] = figure.of_all(known)
        return totals

    def _of_nodes(self) -> Iterator[tuple[str, Any]]:
        """The figures of each node, by names such as worker_0/loss."""
        for rank, event in sorted(self._events.items()) if self._has_nodes else ():
            is_server = event.get("role") == "server"
            node = f"server_{rank - self._workers}" if is_server else f"worker_{rank}"
            fields = {"step": "step", "samples": "samples"} | {name: f.field for name, f in FIGURES.items()}
            for name, field in fields.items():
                if not (is_server and name in WORKERS_ONLY):
                    yield f"{node}/{name}", event.get(field)

    def _step_at(self, samples: float) -> float:
        """The step at which so many samples were done, between the two nearest rows."""
        later = min(bisect_left(self._steps, (samples, 0.0)), len(self._steps) - 1)
        (s0, t0), (s1, t1) = self._steps[max(0, later - 1)], self._steps[later]
        return t1 if s1 <= s0 else t0 + (t1 - t0) * min(1.0, (samples - s0) / (s1 - s0))


def _number(event: Mapping[str, Any], field: str) -> float:
    value = event.get(field)
    return float(value) if _is_finite(value) else 0.0  # type: ignore[arg-type]


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
