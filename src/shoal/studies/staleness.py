"""Stale gradients: a fixed learning rate against a rate divided by staleness (Zhang et al. 2016)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, ClassVar

from shoal.core.task import Task
from shoal.profiling.step import measure_step
from shoal.programs.tasks import TASKS
from shoal.report.findings import Chart, ChartLine, Claim, Findings, Heading, Table
from shoal.sim import Network
from shoal.strategies.softsync import SoftSync
from shoal.studies.study import Lab, Study, check_seeds, mean_and_spread, numbers

PUBLISHED = {1: (18.0, 18.0), 15: (90.0, 18.0), 30: (90.0, 18.0)}
"""n of n-softsync -> error % on CIFAR-10 with 30 workers, at a fixed rate and at rate/staleness."""

LATENCY = 20e-6  # bandwidth is unlimited: staleness comes from computing, not from queues
CHANCE = 90.0  # error % of guessing among ten classes
FAILED = 50.0
HEADINGS = (
    Heading("n", "n", 0),
    Heading("staleness", "staleness", 1),
    Heading("fixed", "fixed rate: error %"),
    Heading("published_fixed", "paper", 0),
    Heading("divided", "rate/staleness: error %"),
    Heading("published_divided", "paper", 0),
    Heading("clock", "clock"),
)


@dataclass(frozen=True)
class Staleness(Study):
    """n-softsync on 30 workers: with enough staleness a fixed rate fails and a divided rate does not.

    `n` as in the paper: the server makes a new version from every workers/n gradients, so that the mean
    staleness is about n.
    """

    source: ClassVar[str] = "Zhang, Gupta, Lian & Liu, Staleness-aware async-SGD (2016), CIFAR-10"

    task: str = "mnist"
    n: str = "1/2/15/30"
    workers: int = 30
    batch: int = 4
    lr: float = 0.1
    epochs: int = 1
    seeds: int = 3

    def __post_init__(self) -> None:
        check_seeds(self.seeds)
        if max(numbers("n", self.n)) > self.workers:
            raise ValueError(f"n={self.n!r}: {self.workers} workers give n of at most {self.workers}")

    def run(self, lab: Lab) -> Findings:
        task = replace(TASKS.make(self.task), batch=self.batch, lr=self.lr)
        lab.say("measuring a step")
        compute = replace(measure_step(task).compute(), jitter=0.1)
        rows = []
        for n in numbers("n", self.n):
            fixed, divided = (
                [self._error(lab, task, n, aware, seed, compute=compute) for seed in range(self.seeds)]
                for aware in (False, True)
            )
            rows.append(row(n, [late for _, late in divided], [e for e, _ in fixed], [e for e, _ in divided]))
        return Findings(
            study="staleness",
            title="Stale gradients: a fixed rate, and a rate divided by the staleness",
            source=self.source,
            tables=[Table(f"{self.workers} workers, batches of {self.batch}, {self.task}", HEADINGS, rows)],
            charts=[chart(rows)],
            claims=list(claims(rows)),
            remarks=[
                "Virtual time with a measured step and a jitter of 10 %; the models are trained in full.",
                "Links have a latency of 20 us and unlimited bandwidth.",
                "A run that diverges counts as chance, 90 %.",
            ],
            settings={**asdict(self), "step_seconds": compute.mean},
        )

    def _error(
        self, lab: Lab, task: Task, n: int, aware: bool, seed: int, **settings: Any
    ) -> tuple[float, float | None]:
        """Test error in per cent and mean staleness; chance if the run diverged."""
        strategy = SoftSync(collect=max(1, self.workers // n), staleness_aware=aware)
        name = f"{n}-softsync, {'rate/staleness' if aware else 'fixed rate'}, seed {seed}"
        settings |= {"workers": self.workers, "epochs": self.epochs, "seed": seed}
        settings |= {"transport": "sim", "network": Network(latency=LATENCY)}
        result = lab.attempt(name, task, strategy, **settings)
        if result is None:
            return CHANCE, None
        if result.test_accuracy is None:
            raise ValueError(
                f"task={self.task!r} has no test accuracy; take a task with classes, such as mnist"
            )
        return 100 - result.test_accuracy, result.staleness_mean


def row(n: int, late: list[float | None], fixed: list[float], divided: list[float]) -> dict[str, Any]:
    """One row, from the runs of all seeds."""
    known = [value for value in late if value is not None]
    published = PUBLISHED.get(n, (None, None))
    return {
        "n": n,
        "staleness": fmean(known) if known else None,
        "fixed": mean_and_spread(fixed),
        "published_fixed": published[0],
        "divided": mean_and_spread(divided),
        "published_divided": published[1],
        "clock": "virtual",
    }


def claims(rows: list[dict[str, Any]]) -> Iterable[Claim]:
    """The claims of the paper."""
    first, last = rows[0], rows[-1]
    yield Claim(
        f"a fixed rate fails with stale gradients: {last['fixed'][0]:.1f} % error at n = {last['n']}, "
        f"{first['fixed'][0]:.1f} % at n = {first['n']}",
        last["fixed"][0] >= FAILED > first["fixed"][0],
    )
    worst = max(line["divided"][0] for line in rows)
    yield Claim(
        f"with rate/staleness every n learns: at most {worst:.1f} % error, {first['divided'][0]:.1f} % at "
        f"n = {first['n']}",
        worst < FAILED,
    )
    known = [line for line in rows if line["staleness"] is not None]
    off = max((abs(line["staleness"] - line["n"]) for line in known), default=float("nan"))
    yield Claim(f"the mean staleness of n-softsync is about n, within {off:.1f} (aim 1)", off <= 1)


def chart(rows: list[dict[str, Any]]) -> Chart:
    """Error over n."""
    lines = [
        ChartLine("fixed rate", [(line["n"], line["fixed"][0]) for line in rows]),
        ChartLine("rate/staleness", [(line["n"], line["divided"][0]) for line in rows]),
    ]
    for key, name in (
        ("published_fixed", "fixed rate, paper"),
        ("published_divided", "rate/staleness, paper"),
    ):
        points = [(line["n"], line[key]) for line in rows if line[key] is not None]
        lines += [ChartLine(name, points, published=True)] if points else []
    return Chart("Error", "n of n-softsync", "test error %", lines, log_x=True)
