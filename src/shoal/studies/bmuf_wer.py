"""Error and speed-up of model averaging and block momentum on many workers (Chen & Huo 2016)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any, ClassVar

from torch import nn

from shoal.core.task import Data, Task
from shoal.profiling.step import Step, measure_step
from shoal.report.findings import Chart, ChartLine, Claim, Findings, Heading, Table
from shoal.runs.result import Result
from shoal.sim import Network
from shoal.strategies.single import Single
from shoal.studies.block_momentum import (
    AVERAGING,
    CLASSICAL,
    COLLECTIVE,
    MERGING,
    NESTEROV,
    SINGLE,
    SOURCE,
    Case,
    MomentumSetting,
    PublishedRow,
    published,
)
from shoal.studies.study import Lab, Study, check_seeds, many, mean_and_spread

Row = Mapping[str, Any]

BEGINNING = 6  # the first model is trained on a sixth of the data, as the paper's on 309 hours of 1,860
FASTER = {8: 4.0, 16: 8.0, 32: 8.0, 64: 8.0}  # learning rate of averaging over that of one worker
FEW, FEW_POINTS = 16, 0.5
MANY, MANY_POINTS = 64, 1.0
HEADINGS = (  # headings wrap at spaces, so that the table fits a terminal
    Heading("method", "method"),
    Heading("partition", "N x M"),
    Heading("error", "error %"),
    Heading("above", "above single"),
    Heading("speed_up", "speed up", 1),
    Heading("clock", "clock"),
    Heading("paper_wer", "paper WER %", 1),
    Heading("paper_speed_up", "paper speed up", 1),
)


@dataclass(frozen=True)
class BmufWer(Study):
    """Error and speed-up of model averaging and of classical and Nesterov block momentum on N workers.

    All start from the same model, trained by one worker, and see all data equally often; the learning rate
    is halved after every sweep. A block is `period` batches of each worker. Virtual time, with a measured
    step. speech-csc and speech-dblstm are compared with the tables of the DBLSTM, other tasks with the DNN's.
    """

    source: ClassVar[str] = f"{SOURCE}, tables 1 to 3"

    task: str = "mnist"
    workers: str = "8/16/32/64"
    seeds: int = 3
    epochs: int = 4
    hidden: int | None = 64  # units of the hidden layer; none: the task's own model
    batch: int = 7
    period: int = 2
    lr: float = 0.05
    tuned: bool = True  # averaging has learning rates of its own; false: the same as all others
    network: str = "56Gbit,2us"  # the paper's InfiniBand

    def __post_init__(self) -> None:
        check_seeds(self.seeds)
        many("workers", self.workers)

    def run(self, lab: Lab) -> Findings:
        counts = many("workers", self.workers)
        setting = MomentumSetting.of(self.task, self.hidden, self.batch, self.period)
        lab.say("measuring a step")
        step = measure_step(setting.loaded)
        cases = [(SINGLE, 1), *((method, count) for method in MERGING for count in counts)]
        runs: dict[Case, list[Result]] = {case: [] for case in cases}
        for seed in range(self.seeds):
            begun = self._begin(lab, setting, seed)
            for case in cases:
                runs[case].append(self._train(lab, setting, step, begun, case, seed))
        table, paper = published(self.task)
        rows = list(tabulate(setting, runs, paper))
        return Findings(
            study="bmuf-wer",
            title="Block momentum: error and speed-up",
            source=f"{SOURCE}, table {table}",
            tables=[Table(f"{setting.task.name}, mean and spread of {self.seeds} seeds", HEADINGS, rows)],
            charts=[*charts(rows), curves(runs, len(setting.data.x), max(counts))],
            claims=list(claims(rows)),
            remarks=self._remarks(setting, step),
            settings={**asdict(self), "step_seconds": step.seconds, "step_jitter": step.jitter},
        )

    def _begin(self, lab: Lab, setting: MomentumSetting, seed: int) -> Task:
        """The task, starting from a model that one worker trained once on a part of the data."""
        part = beginning_of(setting.data)
        task = replace(setting.task, data=lambda: part)
        settings: dict[str, Any] = {"seed": seed, "lr": self.lr, "transport": "sim"}
        result = lab.run(f"first model, seed {seed}", task, Single(), **settings)
        assert isinstance(result.model, nn.Module)
        return replace(setting.loaded, model=partial(deepcopy, result.model))

    def _train(
        self, lab: Lab, setting: MomentumSetting, step: Step, begun: Task, case: Case, seed: int
    ) -> Result:
        method, count = case
        halvings = ",".join(f"2@{epoch}" for epoch in range(1, self.epochs))
        return lab.run(
            f"{method}, N = {count}, seed {seed}",
            begun,
            setting.strategy(method, count),
            workers=count,
            epochs=self.epochs,
            seed=seed,
            lr=self.lr * (FASTER.get(count, 1.0) if self.tuned and method == AVERAGING else 1.0),
            grow_batch=halvings or None,
            largest_batch=self.batch
            if halvings
            else None,  # the batch cannot grow: the rate is halved instead
            transport="sim",
            collective=COLLECTIVE,
            network=Network.parse(self.network),
            compute=step.compute(),
        )

    def _remarks(self, setting: MomentumSetting, step: Step) -> list[str]:
        factors = ", ".join(f"{factor:g} times that with {count} workers" for count, factor in FASTER.items())
        own = f"Averaging has its own, because the paper tunes every rate: {factors}. It was doubled until "
        own += "that no longer helped on 5,000 images of MNIST held out of the training data. "
        return [
            f"Our times are virtual: a measured step of {1e3 * step.seconds:.2f} ms with a jitter of "
            f"{step.jitter:.0%}; {self.network}; all-reduce by {COLLECTIVE}. Speed-up is in samples/s, "
            "without the first model, which all share, and without evaluation.",
            f"The rule: there should be at least split times N squared samples; a split is {setting.split}. "
            "Equivalently, a sweep has at least as many blocks as workers, M >= N. As in the paper, "
            "the split is the same for all N.",
            f"One learning rate, {self.lr:g}, for one worker and block momentum, halved after each sweep. "
            f"{own if self.tuned else 'Averaging has the same. '}Block momentum is that of the paper, or "
            "1 - 1/N for other N. The optimizer is plain SGD for every task.",
            "The paper has word error rates on Eval2000; ours are classification errors on the test set. "
            "Compare the differences from one worker.",
        ]


def beginning_of(data: Data) -> Data:
    """The part of the data that the first model is trained on."""
    rows = max(1, len(data.x) // BEGINNING)
    return Data(data.x[:rows], data.y[:rows], data.test_x, data.test_y)


def tabulate(
    setting: MomentumSetting, runs: Mapping[Case, Sequence[Result]], table: Mapping[Case, PublishedRow]
) -> Iterator[dict[str, Any]]:
    """A row for each method and number of workers, with the figures of the paper."""
    alone = runs[SINGLE, 1]
    baseline = fmean(errors(alone))
    for (method, count), results in runs.items():
        wrong = errors(results)
        paper, paper_alone = table.get((method, count)), table[SINGLE, 1]
        yield {
            "method": method,
            "workers": count,
            "partition": setting.partition(count),
            "error": mean_and_spread(wrong),
            "above": fmean(wrong) - baseline,
            "speed_up": fmean(r.seconds for r in alone) / fmean(r.seconds for r in results),
            "plenty": setting.plenty(count) if count > 1 else None,
            "clock": "virtual",
            "paper_wer": paper and paper.wer,
            "paper_above": paper and paper.wer - paper_alone.wer,
            "paper_speed_up": paper and paper.speed_up,
        }


def errors(results: Sequence[Result]) -> list[float]:
    """Test error of each result in per cent."""
    return [100.0 - result.test_accuracy for result in results if result.test_accuracy is not None]


def claims(rows: Sequence[Row]) -> Iterator[Claim]:
    """The observations of the paper and our aims."""
    merging = [row for row in rows if row["method"] in MERGING]
    scarce = min(merging, key=lambda row: row["plenty"])
    yield Claim(
        f"there is enough data for every N: {scarce['plenty']:.2f} times what the rule asks for "
        f"with {scarce['workers']} workers",
        scarce["plenty"] >= 1,
    )
    yield degrades([row for row in rows if row["method"] == AVERAGING])
    for method in (CLASSICAL, NESTEROV):
        own = [row for row in rows if row["method"] == method]
        for most, points in ((FEW, FEW_POINTS), (MANY, MANY_POINTS)):
            if there := [row for row in own if row["workers"] <= most]:
                yield stays(method, there, points)


def degrades(rows: Sequence[Row]) -> Claim:
    """Averaging has more errors with more workers: no decrease beyond the spreads, and an overall rise."""
    ordered = sorted(rows, key=lambda row: row["workers"])
    rises = all(
        after["error"][0] >= before["error"][0] - before["error"][1] - after["error"][1]
        for before, after in pairwise(ordered)
    )
    first, last = ordered[0], ordered[-1]
    apart = last["error"][0] - first["error"][0] > first["error"][1] + last["error"][1]
    listed = ", ".join(f"{row['error'][0]:.2f} % with {row['workers']}" for row in ordered)
    return Claim(
        f"averaging gets worse with more workers: {listed}; {last['above']:+.2f} points from one worker",
        rises and apart and last["above"] > 0,
    )


def stays(method: str, rows: Sequence[Row], points: float) -> Claim:
    """Block momentum is at most `points` worse than one worker."""
    listed = ", ".join(f"{row['above']:+.2f} with {row['workers']}" for row in rows)
    most = max(row["workers"] for row in rows)
    return Claim(
        f"{method} is at most {points:.1f} points above one worker up to N = {most}: {listed}",
        all(row["above"] <= points for row in rows),
    )


def charts(rows: Sequence[Row]) -> Iterable[Chart]:
    """Errors and speed-ups relative to one worker; the figures of the paper are dashed."""
    for key, title, y, log_y in (
        ("above", "Errors relative to one worker", "points above one worker", False),
        ("speed_up", "Speed-up, virtual time", "times one worker", True),
    ):
        lines = []
        for method in MERGING:
            own = [row for row in rows if row["method"] == method]
            paper = [row for row in own if row[f"paper_{key}"] is not None]
            lines.append(ChartLine(method, [(row["workers"], row[key]) for row in own]))
            lines.append(
                ChartLine(f"{method}, paper", [(row["workers"], row[f"paper_{key}"]) for row in paper], True)
            )
        yield Chart(title, "workers", y, [line for line in lines if line.points], log_x=True, log_y=log_y)


def curves(runs: Mapping[Case, Sequence[Result]], samples: int, most: int) -> Chart:
    """Error over sweeps with the largest number of workers, averaged over seeds."""
    lines = []
    for (method, count), results in sorted(runs.items(), key=lambda run: run[0] == (SINGLE, 1)):
        if count in (1, most):  # one worker last, so that the others keep the colours of the other charts
            points = zip(*(result.curve for result in results), strict=False)
            lines.append(
                ChartLine(
                    f"{method}, N = {count}",
                    [
                        (row[0]["samples"] / samples, fmean(100.0 - at["test_accuracy"] for at in row))
                        for row in points
                    ],
                )
            )
    return Chart(f"Learning with {most} workers", "sweeps over the data", "error %", lines)
