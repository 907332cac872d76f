"""Result: the figures of a run and its trained model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from shoal.core.curves import finals
from shoal.engine.engine import Engine


@dataclass(frozen=True)
class Result:
    """The figures of one run and the trained model. `record()` gives the figures alone, for JSON."""

    strategy: str
    codec: str
    transport: str
    workers: int
    test_accuracy: float | None  # percent
    test_loss: float | None
    seconds: float  # of virtual time in a simulation
    samples: int
    samples_per_second: float
    bytes_sent: int
    wait_fraction: float  # share of the workers' time that they spent waiting
    saved_seconds: float | None  # estimate of what compression saved a worker, on average
    staleness_mean: float | None  # in versions of the model; None where it is not counted
    config: dict[str, Any]
    task: str
    parameters: int
    curve: list[dict[str, Any]]
    staleness: dict[str, int]
    nodes: list[dict[str, Any]]
    metrics: dict[str, float] = field(default_factory=dict)  # the task's own, on the test set
    final: dict[str, dict[str, Any]] = field(default_factory=dict)  # means of the last evaluations
    legs: list[dict[str, Any]] = field(default_factory=list)  # of a crew that grows: each with its figures
    memory: int | None = None  # bytes that the fullest process needed beyond libraries and data
    digest: str | None = None  # of a simulation's trace
    model: nn.Module | None = field(default=None, repr=False, compare=False)

    def record(self) -> dict[str, Any]:
        """The figures as plain values."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "model"}


def report(engine: Engine, seconds: float) -> dict[str, Any]:
    """The figures of one node at the end of a run that took `seconds`."""
    return {
        "role": "server" if engine.is_server else "worker",
        "rank": engine.rank,
        **({"serves": engine.identity.role} if engine.is_server else {}),
        "seconds": seconds,
        "parameters": engine.x.numel(),
        "samples_before": engine.progress.samples_before,
        "samples": engine.progress.samples,
        **({"merged": engine.merged} if _counts_for_all(engine) else {}),
        **({} if engine.membership is None else {"recoveries": engine.membership.recoveries}),
        **engine.meter.summary(),
    }


def _counts_for_all(engine: Engine) -> bool:
    """Whether this node knows how many samples are in the model, those of workers that died included."""
    return engine.membership is not None or (engine.is_server and bool(engine.meter.faults))


ADDED = ("parameters", "dense_bytes", "coded_bytes", "bytes_sent", "bytes_received", "messages_sent")
"""The figures of a group that are those of all its processes together."""


def joined(reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One report for each node, of those of its processes: the first one's, with the traffic of all."""
    nodes: dict[tuple[str, int], dict[str, Any]] = {}
    for said in reports:
        first = nodes.setdefault((said["role"], said["rank"]), said)
        if first is not said:
            first |= {name: first[name] + said[name] for name in ADDED}
    return list(nodes.values())


def _in_the_model(reports: Sequence[dict[str, Any]]) -> int:
    """The samples in the final model: those that workers did, unless somebody knows of deaths.

    Workers that went cannot tell how much they did, and a server that died may have lost some of it.
    """
    by_server: dict[int, int] = {}  # of its shards, some may have lost more than others
    for r in reports:
        if r["role"] == "server" and "merged" in r:
            merged, which = round(r["merged"]), r["serves"]
            by_server[which] = min(merged, by_server.get(which, merged))
    if by_server:
        return max(by_server.values())
    done: int = sum(r["samples"] for r in reports if r["role"] == "worker")
    counts: list[int] = [round(r["merged"]) for r in reports if "merged" in r]
    return max([done, *counts])


def summarise(
    config: dict[str, Any],
    reports: list[dict[str, Any]],
    model: nn.Module | None = None,
    digest: str | None = None,
    curve: list[dict[str, Any]] | None = None,
    legs: list[dict[str, Any]] | None = None,
    seconds: float | None = None,
) -> Result:
    """Summarise the reports of all nodes in one result."""
    workers = [r for r in reports if r["role"] == "worker"]
    curve = [] if curve is None else curve
    last = curve[-1] if curve else {}
    seconds = max(r["seconds"] for r in reports) if seconds is None else seconds
    samples = _in_the_model(reports)
    before = sum(r["samples_before"] for r in workers)  # from before a resumed run began
    busy = sum(r["seconds"] for r in workers)
    staleness: Counter[int] = Counter()
    for r in reports:
        staleness.update({int(late): count for late, count in r["staleness"].items()})
    updates = sum(staleness.values())
    compressed = [r["saved_seconds"] for r in workers if r["coded_bytes"]]
    return Result(
        strategy=config["strategy"],
        codec=config["codec"],
        transport=config["transport"],
        workers=len(workers),
        test_accuracy=last.get("test_accuracy"),
        test_loss=last.get("test_loss"),
        seconds=seconds,
        samples=samples,
        samples_per_second=(samples - before) / seconds if seconds else 0.0,
        bytes_sent=sum(r["bytes_sent"] for r in reports),
        wait_fraction=sum(r["wait_seconds"] for r in workers) / busy if busy else 0.0,
        saved_seconds=sum(compressed) / len(compressed) if compressed else None,
        staleness_mean=sum(k * v for k, v in staleness.items()) / updates if updates else None,
        config=config,
        task=config["task"],
        parameters=reports[0]["parameters"],
        curve=curve,
        staleness={str(late): count for late, count in sorted(staleness.items())},
        nodes=reports,
        metrics=last.get("metrics", {}),
        final=finals(curve),
        legs=legs or [],
        memory=max((r["memory"] for r in reports if r.get("memory") is not None), default=None),
        digest=digest,
        model=model,
    )
