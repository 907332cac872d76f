"""A plan beside the runs that follow it: predicted, measured, how far off; and what would be better now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich import box
from rich.table import Table

from shoal.planning.contenders import PLANNED, SINGLE, Contender
from shoal.planning.forecasting import score_after
from shoal.planning.plan_text import network_text, speed_up
from shoal.planning.run_time import run_cost
from shoal.planning.surroundings import Machines
from shoal.planning.training_plan import Forecast, TrainingPlan
from shoal.report.reading import Record, run_names
from shoal.report.units import MISSING, bytes_text, finite, ratio_text, seconds_text
from shoal.sim import Compute, Network

FIRST_STEPS = 10  # of a worker, before anything is said of its speed
OFF = 1.5  # times as long as planned: a step, or what lies between steps
BETTER = 1.1  # times as soon: less is not worth a word


def contender_of(record: Record) -> Contender:
    """The setting of a finished run, as a plan names it."""
    config = record.get("config") or {}
    dotted = {
        str(name).removeprefix("strategy."): value
        for name, value in config.items()
        if str(name).startswith("strategy.")
    }
    workers = int(config.get("workers") or record.get("workers") or 1)
    word, codec = str(record.get("strategy")), str(config.get("codec") or "none")
    return Contender(word, workers, dotted, codec)


def forecast_of(plan: TrainingPlan, record: Record) -> Forecast | None:
    """What the plan predicted of this run: as it was priced there, or priced now by the same formulas."""
    given = contender_of(record)
    same = (f for f in plan.forecasts if f.contender.codec == given.codec and _alike(f.contender, given))
    if (known := next(same, None)) is not None:
        return known
    if given.codec not in plan.workload.codecs or given.word not in (*PLANNED, SINGLE.word):
        return None
    site = Machines(plan.profile, plan.network, None, plan.compute)
    try:
        return Forecast(given, run_cost(given, plan.workload, site, plan.objective.epochs))
    except ValueError:  # a strategy with options of another version, or none of Shoal's
        return None


def _alike(planned: Contender, given: Contender) -> bool:
    if (planned.word, planned.workers) != (given.word, given.workers):
        return False
    return planned.word == "single" or planned.strategy == given.strategy


def beside(plan: TrainingPlan, records: Sequence[Record]) -> Table:
    """Predicted, measured and error of each run: seconds, bytes and, where it was tried, accuracy."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1), title_justify="left")
    for header in ("run", "figure", "predicted", "measured", "error"):
        table.add_column(header, justify="left" if header in ("run", "figure") else "right")
    for record, name in zip(records, run_names(records), strict=True):
        forecast = forecast_of(plan, record)
        if forecast is None:
            table.add_row(name, "not in the plan", MISSING, MISSING, MISSING)
            continue
        for row in rows_of(plan, record, forecast):
            table.add_row(name, *row)
            name = ""
    return table


def rows_of(plan: TrainingPlan, record: Record, forecast: Forecast) -> list[tuple[str, str, str, str]]:
    """Figure, predicted, measured, error."""
    samples = finite(record.get("samples")) or 0.0
    epochs = samples / plan.workload.samples
    rows = []
    for name, predicted, text in (
        ("seconds", forecast.cost.seconds * epochs, seconds_text),
        ("bytes_sent", forecast.cost.nbytes * epochs, bytes_text),
    ):
        measured = finite(record.get(name))
        if measured is not None and (predicted or measured):
            rows.append((name.replace("_", " "), text(predicted), text(measured), error(predicted, measured)))
    score = "test_loss" if plan.judged_by_loss else "test_accuracy"
    measured = finite(record.get(score))
    if measured is not None and plan.baseline is not None and forecast.ratio is not None:
        ahead = score_after(samples, forecast.ratio, plan.baseline)
        off = f"{measured - ahead.value:+.2f}"
        told = f"{ahead.value:.2f} ({ahead.low:.2f}–{ahead.high:.2f})"
        rows.append((score.replace("_", " "), told, f"{measured:.2f}", off))
    return rows


def error(predicted: float, measured: float) -> str:
    """How far the prediction is off, of what was measured."""
    return f"{predicted / measured - 1:+.0%}" if measured else MISSING


def where(plan: TrainingPlan, records: Sequence[Record]) -> str:
    """A sentence if the runs were made elsewhere than planned; else nothing."""
    if plan.network is not None and any(record.get("transport") != "sim" for record in records):
        return f"The plan was for {network_text(plan.network)}; these runs were made elsewhere."
    return ""


@dataclass
class PlanWatch:
    """Hears the progress of a run, and says when the plan no longer holds and what would be better now."""

    plan: TrainingPlan
    say: Callable[[str], None]
    forecast: Forecast | None = None
    _steps: dict[int, float] = field(default_factory=dict)  # rank -> seconds of its step
    _said: set[str] = field(default_factory=set)

    def begin(self, record: Record) -> None:
        """A run with these settings starts."""
        self.forecast = forecast_of(self.plan, record)
        self._steps.clear()
        self._said.clear()

    def update(self, event: Mapping[str, Any]) -> None:
        """Take in the progress of one node."""
        done, seconds = int(event.get("step") or 0), finite(event.get("seconds")) or 0.0
        busy = finite(event.get("compute_fraction"))
        if self.forecast is None or event.get("role") != "worker" or done < FIRST_STEPS or busy is None:
            return
        self._steps[int(event["rank"])] = busy * seconds / done
        workers = self.forecast.contender.workers
        if len(self._steps) < workers:
            return
        planned = self.plan.compute.mean
        slowest = max(self._steps, key=self._steps.__getitem__)
        factor = self._steps[slowest] / planned if planned else 1.0
        if factor > OFF:
            self._tell_step(slowest, factor)
        else:
            self._look_at_link(seconds / done - self._steps[int(event["rank"])])

    def _tell_step(self, rank: int, factor: float) -> None:
        typical = sorted(self._steps.values())[len(self._steps) // 2] / self.plan.compute.mean
        all_slow = typical > OFF
        who = "a step" if all_slow else f"a step of worker {rank}"
        compute = replace(self.plan.compute, mean=self.plan.compute.mean * typical)
        if not all_slow:
            compute = Compute(self.plan.compute.mean, self.plan.compute.jitter, {rank: factor})
        told = f"{who} takes {ratio_text(factor)} as long as planned"
        self._tell("step", told, Machines(self.plan.profile, self.plan.network, None, compute))

    def _look_at_link(self, between: float) -> None:
        assert self.forecast is not None
        cost, network = self.forecast.cost, self.plan.network
        planned = cost.waiting / cost.steps if cost.steps else 0.0
        is_long = between > OFF * planned and between > (OFF - 1) * self.plan.compute.mean
        if network is None or not is_long or not planned:
            return
        factor = between / planned
        slower = Network(network.latency * factor, network.bandwidth / factor, network.loss, network.retry)
        told = (
            f"what lies between two steps takes {ratio_text(factor)} as long as planned: the link is slower"
        )
        self._tell("link", told, Machines(self.plan.profile, slower, None, self.plan.compute))

    def _tell(self, kind: str, told: str, site: Machines) -> None:
        """Say it once, with the setting that would be better."""
        if kind in self._said or self.forecast is None:
            return
        self._said.add(kind)
        there = self.plan.reranked(site)
        best = there.ranked[0]
        mine = next((f for f in there.forecasts if f.contender == self.forecast.contender), None)
        if best.contender == self.forecast.contender or mine is None:
            self.say(f"{told}; {self.forecast.contender.name} is still the best.")
            return
        gain = (speed_up(there, best) or 0.0) / (speed_up(there, mine) or 1.0)
        if gain < BETTER:
            self.say(f"{told}; {self.forecast.contender.name} is still as good as any.")
        else:
            self.say(f"{told}; {best.contender.name} would be better now, {ratio_text(gain)} as soon.")
