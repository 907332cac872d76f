"""JoinedLegs: the figures of a run whose crew grew, put together from those of its legs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shoal.core.meter import MOST_PEERS
from shoal.core.task import Data
from shoal.runs.plan import Plan
from shoal.runs.result import Result, summarise

Report = dict[str, Any]

ADDED = (
    *("compute_seconds", "wait_seconds", "send_seconds", "encode_seconds", "decode_seconds", "saved_seconds"),
    *("dense_bytes", "coded_bytes", "bytes_sent", "bytes_received", "messages_sent", "dropped"),
)
"""Figures of a node that add up over the legs in which it took part."""


@dataclass
class LegOutcome:
    """What came of one leg: the reports of its nodes, its learning curve, and the model at its end.

    It began `began` seconds after the run, and `reports` count their seconds from there.
    """

    plan: Plan
    began: float
    reports: Sequence[Report]
    curve: Sequence[dict[str, Any]]
    model: nn.Module
    digest: str | None = None

    @property
    def seconds(self) -> float:
        """How long the leg took."""
        return max(float(r["seconds"]) for r in self.reports)

    def figures(self, lr: float) -> dict[str, Any]:
        """The leg as plain values."""
        workers = [r for r in self.reports if r["role"] == "worker"]
        return {
            "workers": self.plan.workers,
            "step": 0 if self.plan.leg is None else self.plan.leg.begin.step,
            "began": self.began,
            "seconds": self.seconds,
            "samples": sum(r["samples"] - r["samples_before"] for r in workers),
            "bytes_sent": sum(r["bytes_sent"] for r in self.reports),
            "lr": lr,
        }


def summarise_legs(plan: Plan, config: dict[str, Any], legs: Sequence[LegOutcome], data: Data) -> Result:
    """The result of a run from what came of its legs; of a crew that did not grow there is one."""
    reports = join_reports(plan, legs) if plan.crew else list(legs[0].reports)
    figures = [leg.figures(leg.plan.scaled_task(data).lr) for leg in legs] if plan.crew else []
    curve, seconds = join_curves(legs), legs[-1].began + legs[-1].seconds
    return summarise(config, reports, legs[-1].model, _digest(legs), curve, figures, seconds)


def _digest(legs: Sequence[LegOutcome]) -> str | None:
    """The fingerprint of a simulation; of several, that of them all."""
    first, *others = [leg.digest for leg in legs]
    if first is None or not others:
        return first
    return hashlib.blake2b("".join([first, *map(str, others)]).encode(), digest_size=16).hexdigest()


def join_reports(plan: Plan, legs: Sequence[LegOutcome]) -> list[Report]:
    """One report for each node of the last leg; `plan` is that of the whole run.

    A worker that joined later has the steps, seconds and bytes of the legs in which it took part.
    """
    nodes: dict[int, list[Report]] = {}
    for leg in legs:
        shift = plan.workers - leg.plan.workers
        for said in leg.reports:
            moved = _with_final_ranks(said, leg.plan.workers, shift)
            nodes.setdefault(moved["rank"], []).append(moved)
    return [_joined(plan, parts) for _, parts in sorted(nodes.items())]


def join_curves(legs: Sequence[LegOutcome]) -> list[dict[str, Any]]:
    """The learning curve of the whole run.

    Each leg begins with the model that the one before ended with, which is not there twice.
    """
    joined: list[dict[str, Any]] = []
    for leg in legs:
        last = joined[-1]["samples"] if joined else -1
        joined += [point for point in leg.curve if point["samples"] > last]
    return joined


def _with_final_ranks(said: Report, workers: int, shift: int) -> Report:
    """A report in which servers have the ranks of the last leg, after all workers."""

    def final(rank: int) -> int:
        return rank + shift if rank >= workers else rank

    waited = {str(final(int(rank))): seconds for rank, seconds in said["waited_for"].items()}
    return {**said, "rank": final(said["rank"]), "waited_for": waited}


def _joined(plan: Plan, parts: Sequence[Report]) -> Report:
    first, last = parts[0], parts[-1]
    joins = plan.crew.first_step_of(last["rank"]) if last["role"] == "worker" else 0
    return {
        **last,
        "seconds": sum(part["seconds"] for part in parts),
        "samples_before": first["samples_before"],
        "steps": last["steps"] - joins,
        **{name: sum(part[name] for part in parts) for name in ADDED},
        "waited_for": _longest(parts),
        "staleness": {str(late): n for late, n in sorted(_sum(parts, "staleness").items())},
        "faults": [fault for part in parts for fault in part["faults"]],
    }


def _longest(parts: Sequence[Report]) -> dict[str, float]:
    waited = sorted(_sum(parts, "waited_for").items(), key=lambda item: -item[1])[:MOST_PEERS]
    return {str(rank): seconds for rank, seconds in sorted(waited)}


def _sum(parts: Sequence[Mapping[str, Any]], name: str) -> Counter[int]:
    """The sum of dictionaries by whole numbers, which JSON writes as text."""
    total: Counter[int] = Counter()
    for part in parts:
        total.update({int(key): value for key, value in part[name].items()})
    return total
