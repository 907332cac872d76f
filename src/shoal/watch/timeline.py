"""Timeline: one run as frames, each the state of all nodes at one moment, made from progress events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.report.units import finite
from shoal.watch.sentence import Standing, pays, speed

MOST_FRAMES = 600
"""Frames that are kept. When there are more, every second one goes: older moments then lie further apart."""

MOST_CELLS = 60_000
"""Nodes times frames that are kept, so that a run of a thousand nodes fits a browser."""

MOST_MARKS = 200
SILENT_SECONDS = 5.0
"""A node that has not reported for so long is shown as silent: it reports once a second at least."""

AWAY = ("dead", "joining")

Event = Mapping[str, Any]
Frame = dict[str, Any]
"""t, loss, samples, bytes, staleness, two sentences, and for each node: state, step, steps, loss, samples/s,
waiting, bytes, what it waits for."""


@dataclass
class Timeline:
    """The frames, marks and scores of one run.

    `baseline` is the speed in samples/s of one worker on the same task, if it is known. `virtual` says that
    the run's seconds are simulated.
    """

    name: str
    workers: int
    servers: int = 0
    virtual: bool = False
    facts: str = ""
    baseline: float | None = None
    frames: list[Frame] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)
    points: list[dict[str, Any]] = field(default_factory=list)  # test scores, once they are known
    phase: str = "starting"  # then running, testing …, and how it ended
    verdict: str = ""
    is_over: bool = False
    _nodes: dict[int, Event] = field(default_factory=dict)
    _heard: dict[int, float] = field(default_factory=dict)  # when, on the clock of `add`
    _bytes: dict[int, tuple[int, int]] = field(default_factory=dict)  # of earlier incarnations, of this one
    _seconds: float = 0.0
    _spacing: float = 0.0

    def add(self, event: Event, now: float | None = None) -> None:
        """Take in a progress event; `now` is when it came, where silence is to be noticed."""
        if "tested" in event:
            self.phase = f"testing copy {int(event['tested']) + 1} of {event['copies']}"
            if event.get("point"):
                self.points.append(dict(event["point"]))
            return
        rank = int(event["rank"])
        self._seconds = max(self._seconds, finite(event.get("seconds")) or finite(event.get("time")) or 0.0)
        if event.get("fault") and len(self.marks) < MOST_MARKS:
            self.marks.append({"t": self._seconds, "text": str(event["fault"]), "rank": rank})
        self._count_bytes(rank, int(event.get("bytes_sent") or 0))
        if "step" not in event:  # the report of a server at its end
            event = {**event, "step": self._nodes.get(rank, {}).get("step")}
        if event.get("lost"):  # its figures are those of its last report
            event = {**self._nodes.get(rank, event), "state": "dead", "awaits": ""}
        self._nodes[rank] = event
        if (reached := finite(event.get("test_accuracy"))) is not None and self._is_first(rank):
            samples = sum(int(node.get("samples") or 0) for node in self._nodes.values())
            self.points.append({"seconds": self._seconds, "samples": samples, "test_accuracy": reached})
        self.phase = "running"
        if now is not None:
            self._heard[rank] = now

    def _is_first(self, rank: int) -> bool:
        """Whether no worker before it is there, whose test of the script's own would be the one to show."""
        return all(self._nodes[k].get("state") in AWAY for k in self._nodes if k < rank)

    def finish(self, how: str, verdict: str = "", points: Sequence[Mapping[str, Any]] = ()) -> None:
        """The run has ended: how, what it shows, and its learning curve."""
        self.phase, self.verdict, self.is_over = how, verdict, True
        if points:
            self.points = [dict(point) for point in points]

    @property
    def seconds(self) -> float:
        """How far the run is, on its own clock."""
        return self._seconds

    def frame(self, now: float | None = None) -> Frame:
        """The state of all nodes now; `now` is on the clock of `add`."""
        standing = Standing(self.workers, self.baseline, self.virtual)
        standing.bytes_sent = sum(map(sum, self._bytes.values()))
        nodes: list[list[Any]] = []
        for rank in range(self.workers + self.servers):
            event = self._nodes.get(rank)
            nodes.append(_cells(event, sum(self._bytes.get(rank, ())), self._is_silent(rank, now)))
            if event is not None:
                standing.count(event, is_worker=rank < self.workers)
        return {
            "t": round(self._seconds, 4),
            "loss": _digits(standing.loss),
            "samples": standing.samples,
            "bytes": standing.bytes_sent,
            "staleness": _digits(standing.staleness),
            "text": speed(standing),
            "pays": pays(standing),
            "nodes": nodes,
        }

    def keep(self, frame: Frame) -> None:
        """Add a frame to those kept; if they are too many, keep every second one."""
        if self.frames and frame["t"] <= self.frames[-1]["t"]:
            self.frames[-1] = frame  # the run's clock stands still: the latest news of this moment
            return
        if len(self.frames) > 1 and frame["t"] - self.frames[-2]["t"] < self._spacing:
            self.frames[-1] = frame
            return
        self.frames.append(frame)
        if len(self.frames) > max(2, min(MOST_FRAMES, MOST_CELLS // max(1, self.workers + self.servers))):
            self.frames = self.frames[::-1][::2][::-1]  # the last one stays
            self._spacing = max(2 * self._spacing, 1.5 * self._seconds / len(self.frames))

    def head(self) -> dict[str, Any]:
        """All but the frames."""
        return {
            "name": self.name,
            "workers": self.workers,
            "servers": self.servers,
            "virtual": self.virtual,
            "facts": self.facts,
            "phase": self.phase,
            "verdict": self.verdict,
            "over": self.is_over,
            "marks": list(self.marks),
            "points": [
                {key: finite(point.get(key)) for key in ("seconds", "samples", "test_accuracy", "test_loss")}
                for point in self.points
            ],
        }

    def _count_bytes(self, rank: int, sent: int) -> None:
        """A node that was restarted counts from zero: what it had sent before counts on."""
        earlier, now = self._bytes.get(rank, (0, 0))
        self._bytes[rank] = (earlier, sent) if sent >= now else (earlier + now, sent)

    def _is_silent(self, rank: int, now: float | None) -> bool:
        return now is not None and rank in self._heard and now - self._heard[rank] > SILENT_SECONDS


def _cells(event: Event | None, bytes_sent: int, silent: bool) -> list[Any]:
    if event is None:
        return ["joining", 0, None, None, None, None, 0, ""]
    state = str(event.get("state") or "computing")
    if silent and state not in ("dead", "done", "joining"):
        state = "silent"
    return [
        state,
        int(event.get("step") or 0),
        event.get("steps"),
        *(_digits(finite(event.get(key))) for key in ("loss", "samples_per_second", "wait_fraction")),
        bytes_sent,
        str(event.get("awaits") or ""),
    ]


def _digits(value: float | None) -> float | None:
    """Four digits: what a page shows."""
    return None if value is None else float(f"{value:.4g}")
