"""Time of a sweep with block momentum: optimise, aggregate, validate (Chen & Huo 2016)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from time import perf_counter, thread_time
from typing import Any, ClassVar

import torch

from shoal.core.task import Data, Task
from shoal.profiling.step import Step, measure_step
from shoal.replicas.module import build_model
from shoal.report.findings import Chart, ChartLine, Claim, Findings, Heading, Table
from shoal.runs.evaluation import evaluate
from shoal.runs.result import Result
from shoal.sim import Network
from shoal.studies.block_momentum import (
    COLLECTIVE,
    DNN,
    MERGING,
    NESTEROV,
    SINGLE,
    SOURCE,
    MomentumSetting,
)
from shoal.studies.study import Lab, Study, many

Row = Mapping[str, Any]
REPEATS = 7
MOST_SHARE = 10.0  # per cent of a sweep that aggregation may take; 5 to 8 in the paper
NAMES = (Heading("method", "method"), Heading("partition", "N x M"), Heading("clock", "clock"))
SECONDS = (
    *NAMES,
    Heading("optimise", "optimise s", 3),
    Heading("aggregate", "aggregate s", 3),
    Heading("validate", "validate s", 4),
    Heading("total", "sum s", 3),
)
SHARES = (
    *NAMES,
    Heading("aggregate_share", "aggregate %", 1),
    Heading("paper_aggregate_share", "paper", 1),
    Heading("validate_share", "validate %", 1),
    Heading("paper_validate_share", "paper", 1),
)


@dataclass(frozen=True)
class BmufTime(Study):
    """Seconds of a sweep spent optimising, aggregating and validating, on N workers.

    `real` gives numbers of processes on this machine, `workers` numbers of workers in virtual time with a
    measured step. Task, batch and block length are those of bmuf-wer.
    """

    source: ClassVar[str] = f"{SOURCE}, table 4"

    task: str = "mnist"
    real: str | None = "2/4"  # none: virtual time alone
    workers: str = "8/16/32/64"
    hidden: int | None = 64  # units of the hidden layer; none: the task's own model
    batch: int = 7
    period: int = 2
    network: str = "56Gbit,2us"  # the paper's InfiniBand

    def __post_init__(self) -> None:
        cases("real", self.real)
        cases("workers", self.workers)

    def run(self, lab: Lab) -> Findings:
        setting = MomentumSetting.of(self.task, self.hidden, self.batch, self.period)
        lab.say("measuring a step")
        step = measure_step(setting.loaded)
        rows = [self._real(lab, setting, *case) for case in cases("real", self.real)]
        rows += [self._virtual(lab, setting, step, *case) for case in cases("workers", self.workers)]
        return Findings(
            study="bmuf-time",
            title="Block momentum: time of a sweep",
            source=self.source,
            tables=[
                Table(f"{setting.task.name}, one sweep over the data", SECONDS, rows),
                Table("Shares of the sum", SHARES, rows),
            ],
            charts=list(charts(rows)),
            claims=list(claims(rows)),
            remarks=self._remarks(setting, step),
            settings={**asdict(self), "step_seconds": step.seconds, "step_jitter": step.jitter},
        )

    def _real(self, lab: Lab, setting: MomentumSetting, method: str, count: int) -> dict[str, Any]:
        name, strategy = f"{method}, {count} processes", setting.strategy(method, count)
        result = lab.run(name, setting.task, strategy, workers=count, collective=COLLECTIVE, threads=1)
        share = validation_seconds(setting.task, setting.data, count, perf_counter)
        return tabulate(setting, method, count, "real", result, share)

    def _virtual(
        self, lab: Lab, setting: MomentumSetting, step: Step, method: str, count: int
    ) -> dict[str, Any]:
        name, strategy = f"{method}, N = {count}", setting.strategy(method, count)
        times: dict[str, Any] = {"network": Network.parse(self.network), "compute": step.compute()}
        times |= {"transport": "sim", "collective": COLLECTIVE}
        result = lab.run(name, setting.loaded, strategy, workers=count, **times)
        share = validation_seconds(setting.task, setting.data, count, thread_time)
        return tabulate(setting, method, count, "virtual", result, share)

    def _remarks(self, setting: MomentumSetting, step: Step) -> list[str]:
        return [
            f"Virtual times: a measured step of {1e3 * step.seconds:.2f} ms with a jitter of "
            f"{step.jitter:.0%}; {self.network}; all-reduce by {COLLECTIVE}. Arithmetic on models takes no "
            "virtual time, so the methods do not differ in it. Real times are of processes with one thread "
            f"each on {os.cpu_count()} cores, which other programs may have used too.",
            "Optimising is computing gradients and steps, averaged over workers; aggregating is the rest of "
            "the sweep, mostly waiting for other workers and for the network.",
            f"Validating is one evaluation per sweep of all {len(setting.data.test_x):,} test samples, "
            "split among the workers as in the paper. It is measured separately and added, because our runs "
            "are evaluated after they end. The paper evaluates 30 hours of speech every 600 of 1,860.",
            f"A block is {setting.split} samples of each worker, as in bmuf-wer; in the paper it is 135,000 "
            "frames, and the model has 63 million parameters.",
        ]


def cases(option: str, text: str | None) -> list[tuple[str, int]]:
    """One worker, then every method with each number of workers of an option."""
    if text is None:
        return []
    return [(SINGLE, 1), *((method, count) for method in MERGING for count in many(option, text))]


def validation_seconds(task: Task, data: Data, workers: int, clock: Callable[[], float]) -> float:
    """Seconds that a worker takes on one thread to evaluate its part of the test set."""
    part = max(1, len(data.test_x) // workers)
    own = Data(data.x[:0], data.y[:0], data.test_x[:part], data.test_y[:part])
    model, before = build_model(task, 0), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        taken = []
        for _ in range(REPEATS):
            began = clock()
            evaluate(model, task, own)
            taken.append(clock() - began)
    finally:
        torch.set_num_threads(before)
    return median(taken)


def tabulate(
    setting: MomentumSetting, method: str, count: int, clock: str, result: Result, validate: float
) -> dict[str, Any]:
    """The row of one run, with the figures of the paper. One worker has nothing to aggregate."""
    alone = method == SINGLE
    optimise = result.seconds if alone else fmean(node["compute_seconds"] for node in result.nodes)
    aggregate = None if alone else result.seconds - optimise
    total = result.seconds + validate
    paper = DNN.get((method, count))
    return {
        "method": method,
        "workers": count,
        "partition": setting.partition(count),
        "clock": clock,
        "optimise": optimise,
        "aggregate": aggregate,
        "validate": validate,
        "total": total,
        "aggregate_share": percent(aggregate, total),
        "validate_share": percent(validate, total),
        "paper_aggregate_share": paper and percent(paper.aggregate, paper.minutes),
        "paper_validate_share": paper and percent(paper.validate, paper.minutes),
    }


def percent(part: float | None, whole: float) -> float | None:
    """A part in per cent of the whole; None if there is no part."""
    return None if part is None else 100.0 * part / whole


def claims(rows: Sequence[Row]) -> Iterator[Claim]:
    """The observations of the paper, for the rows in virtual time."""
    virtual = [row for row in rows if row["clock"] == "virtual"]
    merging = [row for row in virtual if row["method"] in MERGING]
    shares = [row["aggregate_share"] for row in merging]
    paper = [100.0 * (p.aggregate or 0.0) / p.minutes for (method, _), p in DNN.items() if method != SINGLE]
    yield Claim(
        f"aggregation takes at most {MOST_SHARE:g} % of a sweep: {min(shares):.1f} to {max(shares):.1f} % "
        f"(paper {min(paper):.1f} to {max(paper):.1f} %)",
        max(shares) <= MOST_SHARE,
    )
    alone = next(row for row in virtual if row["method"] == SINGLE)
    last = max((row for row in merging if row["method"] == NESTEROV), key=lambda row: row["workers"])
    ratio = alone["total"] / last["total"]
    published = DNN.get((NESTEROV, last["workers"]))
    beside = f" (paper {published.speed_up:g})" if published else ""
    yield Claim(
        f"a sweep with {last['workers']} workers is {ratio:.1f} times as fast as with one{beside}; "
        f"aim {0.8 * last['workers']:.1f}",
        ratio >= 0.8 * last["workers"],
    )


def charts(rows: Sequence[Row]) -> Iterator[Chart]:
    """Shares of a sweep over the number of workers; the figures of the paper are dashed."""
    for key, title in (("aggregate_share", "Aggregating"), ("validate_share", "Validating")):
        lines = []
        for method in MERGING:
            for clock in ("virtual", "real"):
                own = [row for row in rows if row["method"] == method and row["clock"] == clock]
                lines.append(ChartLine(f"{method}, {clock}", [(row["workers"], row[key]) for row in own]))
            paper = [row for row in rows if row["method"] == method and row[f"paper_{key}"] is not None]
            lines.append(
                ChartLine(f"{method}, paper", [(row["workers"], row[f"paper_{key}"]) for row in paper], True)
            )
        there = [line for line in lines if line.points]
        yield Chart(f"{title}, share of a sweep", "workers", "per cent", there, log_x=True)
