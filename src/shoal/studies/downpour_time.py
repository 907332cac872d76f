"""Time to accuracy with many replicas: SGD, Downpour, and Downpour with Adagrad (Dean et al. 2012)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, ClassVar, TypeAlias

from shoal.core.task import Task
from shoal.profiling.step import measure_step
from shoal.programs.tasks import TASKS
from shoal.report.findings import Chart, ChartLine, Claim, Findings, Heading, Table
from shoal.sim import Network
from shoal.strategies.downpour import Downpour
from shoal.strategies.single import Single
from shoal.studies.study import Lab, Study, check_seeds, mean_and_spread, time_to
from shoal.vocabulary.strategy import Strategy

Record: TypeAlias = "dict[str, Any] | None"
"""The record of a run; None if it diverged."""

HEADINGS = (
    Heading("method", "method"),
    Heading("replicas", "workers", 0),
    Heading("seconds", "seconds", 3),
    Heading("speed_up", "speed up", 1),
    Heading("paper", "paper rank", 0),
    Heading("rank", "our rank", 0),
    Heading("accuracy", "final accuracy %", 1),
    Heading("staleness", "stale", 0),
    Heading("clock", "clock"),
)


@dataclass(frozen=True)
class Method:
    """A line of the figure: its name, number of replicas and strategy."""

    name: str
    replicas: int
    strategy: Strategy


@dataclass(frozen=True)
class DownpourTime(Study):
    """Virtual seconds until the test accuracy exceeds `accuracy`, with 20 and 200 replicas.

    The order in the paper, slowest first: SGD, Downpour with 20 replicas, the same with Adagrad, Adagrad
    with 200 replicas.
    """

    source: ClassVar[str] = "Dean et al., Large scale distributed deep networks (2012), figures 4 and 5"

    task: str = "mnist"
    accuracy: float = 90.0
    few: int = 20
    many: int = 200
    batch: int = 16
    lr: float = 0.02
    rate: float = 0.005  # of Adagrad with few replicas
    many_rate: float = 0.001  # of Adagrad with many replicas, whose gradients are staler
    servers: int = 4
    epochs: int = 3
    seeds: int = 3
    network: str = "50us"  # unlimited bandwidth: the paper has enough shards to keep up

    def __post_init__(self) -> None:
        check_seeds(self.seeds)

    def run(self, lab: Lab) -> Findings:
        task = replace(TASKS.make(self.task), batch=self.batch, lr=self.lr)
        lab.say("measuring a step")
        compute = replace(measure_step(task).compute(), jitter=0.1)
        settings = {"compute": compute, "network": Network.parse(self.network)}
        found = [(method, self._runs(lab, task, method, **settings)) for method in self.methods()]
        rows = ranked([row(method, runs, self.accuracy) for method, runs in found])
        return Findings(
            study="downpour-time-to-accuracy",
            title=f"Time to {self.accuracy:g} % with many replicas",
            source=self.source,
            tables=[Table(f"{self.task}, {self.servers} shards, {self.network}", HEADINGS, rows)],
            charts=[chart(found)],
            claims=list(claims(rows)),
            remarks=[
                f"Virtual time with a measured step of {1e3 * compute.mean:.2f} ms and a jitter of 10 %; the "
                "models are trained in full.",
                f"SGD and Downpour share the learning rate {self.lr:g}, as in the paper. Adagrad, which the "
                "server uses, has tuned rates of its own.",
                "The paper plots hours for a speech network: only the order of the methods is compared.",
            ],
            settings={**asdict(self), "step_seconds": compute.mean},
        )

    def methods(self) -> Iterable[Method]:
        """The methods of the paper, slowest first."""
        yield Method("SGD", 1, Single())
        yield Method("Downpour", self.few, Downpour(optimizer="sgd"))
        for replicas, rate in ((self.few, self.rate), (self.many, self.many_rate)):
            strategy = Downpour(optimizer="adagrad", rate=rate)
            yield Method("Adagrad", replicas, strategy)

    def _runs(self, lab: Lab, task: Task, method: Method, **settings: Any) -> list[Record]:
        settings |= {"workers": method.replicas, "epochs": self.epochs, "transport": "sim"}
        if method.strategy.servers:
            settings["servers"] = self.servers
        records: list[Record] = []
        for seed in range(self.seeds):
            name = f"{method.name}, {method.replicas} replicas, seed {seed}"
            result = lab.attempt(name, task, method.strategy, seed=seed, **settings)
            records.append(None if result is None else result.record())
        return records


def row(method: Method, runs: Sequence[Record], accuracy: float) -> dict[str, Any]:
    """One row, from the runs of all seeds; no time if a seed never reaches the accuracy."""
    finite = [run for run in runs if run is not None]
    known = [time for run in finite if (time := time_to(accuracy, run["curve"])) is not None]
    ends = [run["test_accuracy"] for run in finite]
    stale = [run["staleness_mean"] for run in finite if run["staleness_mean"] is not None]
    return {
        "method": method.name,
        "replicas": method.replicas,
        "seconds": mean_and_spread(known) if len(known) == len(runs) else None,
        "accuracy": mean_and_spread(ends) if len(ends) == len(runs) else None,
        "staleness": fmean(stale) if stale else None,
        "clock": "virtual",
    }


def ranked(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add ranks by time to the rows, which are in the order of the paper; 1 is the slowest."""
    slowest = sorted(rows, key=lambda line: -line["seconds"][0] if line["seconds"] else float("-inf"))
    first = rows[0]["seconds"]
    for place, line in enumerate(rows, 1):
        line["paper"], line["rank"] = place, slowest.index(line) + 1
        line["speed_up"] = first[0] / line["seconds"][0] if first and line["seconds"] else None
    return rows


def claims(rows: list[dict[str, Any]]) -> Iterable[Claim]:
    """The order of the paper, pair by pair."""
    for slower, faster in pairwise(rows):
        names = [f"{line['method']} ({line['replicas']})" for line in (faster, slower)]
        times = [line["seconds"][0] if line["seconds"] else float("inf") for line in (faster, slower)]
        words = [f"{time:.3g} s" if time < float("inf") else "never" for time in times]
        sentence = f"{names[0]} reaches the accuracy before {names[1]}: {words[0]}, {words[1]}"
        yield Claim(sentence, times[0] < times[1])


def chart(found: Iterable[tuple[Method, Sequence[Record]]]) -> Chart:
    """Accuracy over virtual time for the first seed, unless it diverged."""
    lines = [
        ChartLine(
            f"{method.name}, {method.replicas}",
            [(p["seconds"], p["test_accuracy"]) for p in first["curve"] if p["seconds"] > 0],
        )
        for method, (first, *_) in found
        if first is not None
    ]
    return Chart("Learning curves of the first seed", "virtual seconds", "test accuracy %", lines, log_x=True)
