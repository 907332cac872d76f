"""Old gradients (Zhang, Gupta, Lian & Liu 2016): a fixed rate against a rate divided by the staleness."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, ClassVar

from shoal.core.task import Task
from shoal.programs.tasks import TASKS
from shoal.report.findings import Chart, ChartLine, Claim, Findings, Heading, Table
from shoal.sim import Network
from shoal.strategies.softsync import SoftSync
from shoal.studies.calibration import measure_step
from shoal.studies.study import Lab, Study, check_seeds, mean_and_spread, numbers

PUBLISHED = {1: (18.0, 18.0), 15: (90.0, 18.0), 30: (90.0, 18.0)}
"""n of n-softsync -> error in per cent on CIFAR-10 with 30 workers, at a fixed rate and at rate/staleness."""

LATENCY = 20e-6  # links are as wide as they need to be: staleness comes from computing, not from queues
CHANCE = 90.0  # error of a model that knows nothing, of ten classes
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
    """n-softsync on 30 workers: from a certain staleness on a fixed rate fails, a divided one does not.

    `n` is the paper's: a new version for every workers/n gradients, whose mean staleness is then about n.
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
            title="Old gradients: a fixed rate, and a rate divided by the staleness",
            source=self.source,
            tables=[Table(f"{self.workers} workers, batches of {self.batch}, {self.task}", HEADINGS, rows)],
            charts=[chart(rows)],
            claims=list(claims(rows)),
            remarks=[
                "Virtual time on a measured step with a jitter of 10 %; the numbers are computed in full.",
                "Links have a latency of 20 us and carry any number of bytes at once.",
                "A run whose numbers are no longer finite counts as chance, 90 %.",
            ],
            settings={**asdict(self), "step_seconds": compute.mean},
        )

    def _error(
        self, lab: Lab, task: Task, n: int, aware: bool, seed: int, **settings: Any
    ) -> tuple[float, float | None]:
        """Test error in per cent and mean staleness; chance where the run diverged."""
        strategy = SoftSync(collect=max(1, self.workers // n), staleness_aware=aware)
        name = f"{n}-softsync, {'rate/staleness' if aware else 'fixed rate'}, seed {seed}"
        settings |= {"workers": self.workers, "epochs": self.epochs, "seed": seed}
        settings |= {"transport": "sim", "network": Network(latency=LATENCY)}
        result = lab.attempt(name, task, strategy, **settings)
        if result is None:
            return CHANCE, None
        if result.test_accuracy is None:
            raise ValueError(f"task={self.task!r} has no classes to be right about; take mnist")
        return 100 - result.test_accuracy, result.staleness_mean


def row(n: int, late: list[float | None], fixed: list[float], divided: list[float]) -> dict[str, Any]:
    """One line of the table, from the runs of all seeds."""
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
    """What the paper says of them."""
    first, last = rows[0], rows[-1]
    yield Claim(
        f"a fixed rate fails where gradients are old: {last['fixed'][0]:.1f} % error at n = {last['n']}, "
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
