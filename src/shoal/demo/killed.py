"""Act 3: kill -9 for a worker and for the server of a run on real processes, in mid-run."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from shoal.api.run import run
from shoal.core.task import Task
from shoal.report import ProgressDisplay
from shoal.strategies.asgd import ASGD

WORKERS = 3
VICTIMS = (("worker 2", 1 / 3), ("the server", 2 / 3))  # and at which part of the run
NEAR_SECONDS = 1.0  # losses so near to a moment are averaged: a single batch says little
BINS = 40  # points of the loss curve


@dataclass(frozen=True)
class Kill:
    """A process that was killed: its name, its number, and when, in seconds since the first step."""

    name: str
    pid: int
    seconds: float


@dataclass(frozen=True)
class Killed:
    """The figures of act 3. `losses` are pairs (seconds since the first step, loss of a worker's batch)."""

    kills: Sequence[Kill]
    losses: Sequence[tuple[float, float]]
    workers: int  # at the start
    left: int  # at the end
    faults: Sequence[str]  # what the nodes that are left reported
    test_accuracy: float | None
    parameters: int

    def loss_near(self, seconds: float) -> float:
        """The mean loss in the second before that moment; the nearest one if there is none."""
        near = [loss for when, loss in self.losses if seconds - NEAR_SECONDS <= when <= seconds]
        return fmean(near) if near else min(self.losses, key=lambda point: abs(point[0] - seconds))[1]

    @property
    def last_loss(self) -> float:
        """The mean loss of the last second."""
        return self.loss_near(max(when for when, _ in self.losses))

    def curve(self) -> list[tuple[float, float]]:
        """The losses, averaged over short spans of time."""
        width = max(when for when, _ in self.losses) / BINS or 1.0
        spans: dict[int, list[tuple[float, float]]] = {}
        for point in self.losses:
            spans.setdefault(int(point[0] / width), []).append(point)
        return [
            (fmean(when for when, _ in span), fmean(loss for _, loss in span))
            for _, span in sorted(spans.items())
        ]


@dataclass
class Killer:
    """Listens to the progress of a run, notes the losses, and kills each victim when its moment has come."""

    display: ProgressDisplay
    kills: list[Kill] = field(default_factory=list)
    losses: list[tuple[float, float]] = field(default_factory=list)
    _began: float | None = None

    def heard(self, event: Mapping[str, Any]) -> None:
        """Take note of a node's progress."""
        self.display.update(event)
        if event.get("role") != "worker" or event.get("lost") or "tested" in event:
            return
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        if math.isfinite(loss := float(event["loss"])):
            self.losses.append((now - self._began, loss))
        if len(self.kills) < len(VICTIMS):
            name, part = VICTIMS[len(self.kills)]
            if event["step"] >= part * event["steps"]:
                self._kill(name, now - self._began)

    def _kill(self, name: str, seconds: float) -> None:
        victim = next((p for p in multiprocessing.active_children() if p.name == name), None)
        if victim is not None and victim.pid is not None:
            os.kill(victim.pid, signal.SIGKILL)
            self.kills.append(Kill(name, victim.pid, seconds))


def train_and_kill(display: ProgressDisplay, task: Task, epochs: int) -> Killed:
    """Train with a server and kill a worker after a third of the steps, the server after two thirds."""
    strategy = ASGD()
    display.start("act 3 of 3: a run that loses a worker and its server", WORKERS, strategy.servers)
    killer = Killer(display)
    result = run(
        task,
        strategy,
        workers=WORKERS,
        epochs=epochs,
        threads=1,
        durability="journal",
        on_progress=killer.heard,
    )
    faults = [fault for node in result.nodes for fault in node["faults"]]
    return Killed(
        killer.kills, killer.losses, WORKERS, result.workers, faults, result.test_accuracy, result.parameters
    )
