"""Result: what came of a run, for people, machines and the next line of code."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from shoal.engine.engine import Engine


@dataclass(frozen=True)
class Result:
    """The figures of one run and the trained model. `record()` is the same without the model, for JSON."""

    strategy: str
    codec: str
    transport: str
    workers: int
    test_accuracy: float | None  # percent
    test_loss: float | None
    seconds: float  # virtual in a simulation
    samples: int
    samples_per_second: float
    bytes_sent: int
    wait_fraction: float  # of the workers' time
    saved_seconds: float | None  # of a worker's time, by compression, on average; an estimate
    staleness_mean: float | None  # versions; None where it has no meaning
    config: dict[str, Any]
    task: str
    parameters: int
    curve: list[dict[str, Any]]
    staleness: dict[str, int]
    nodes: list[dict[str, Any]]
    metrics: dict[str, float] = field(default_factory=dict)  # the task's own, of the test set
    digest: str | None = None  # of a simulation's trace
    model: nn.Module | None = field(default=None, repr=False, compare=False)

    def record(self) -> dict[str, Any]:
        """The figures as plain values."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "model"}


def report(engine: Engine, seconds: float) -> dict[str, Any]:
    """What one node has to say of itself when it is done."""
    return {
        "role": "server" if engine.is_server else "worker",
        "rank": engine.rank,
        "seconds": seconds,
        "parameters": engine.x.numel(),
        "samples_before": engine.progress.samples_before,
        "samples": engine.progress.samples,
        **engine.meter.summary(),
    }


def summarise(
    config: dict[str, Any],
    reports: list[dict[str, Any]],
    model: nn.Module | None = None,
    digest: str | None = None,
) -> Result:
    """One result from the reports of all nodes."""
    workers = [r for r in reports if r["role"] == "worker"]
    curve: list[dict[str, Any]] = next((r.pop("curve") for r in reports if "curve" in r), [])
    last = curve[-1] if curve else {}
    seconds = max(r["seconds"] for r in reports)
    samples = sum(r["samples"] for r in workers)
    before = sum(r["samples_before"] for r in workers)  # of a resumed run: not done in these seconds
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
        digest=digest,
        model=model,
    )
