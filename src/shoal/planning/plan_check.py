"""A plan beside the runs that follow it: predicted, measured, how far off; and what would be better now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isclose
from typing import Any

from rich import box
from rich.table import Table

from shoal.planning.contenders import PLANNED, SINGLE, Contender
from shoal.planning.forecasting import score_after
from shoal.planning.plan_text import network_text, speed_up
from shoal.planning.run_time import run_cost
from shoal.planning.surroundings import Machines
from shoal.planning.training_plan import Forecast, TrainingPlan
from shoal.report.reading import Record, is_resumed, run_names
from shoal.report.units import MISSING, bytes_text, finite, ratio_text, seconds_text

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
    given = Contender(word, workers, dotted, codec)
    return replace(given, servers=_shards(config, given))


def _shards(config: Mapping[str, Any], given: Contender) -> int:
    """Shards of each server. The record of a task counts all servers, that of a script the shards of one."""
    told = int(config.get("servers") or 1)
    if "arguments" in config:
        return told
    try:
        return max(1, told // max(1, given.strategy.servers))
    except ValueError:  # a strategy with options of another version, or none of Shoal's
        return 1


def other_batch(plan: TrainingPlan, record: Record) -> str:
    """Which batch a run has that was not planned; nothing that was predicted holds then."""
    batch = finite((record.get("config") or {}).get("batch"))
    if batch is None or batch == plan.workload.batch:
        return ""
    return f"a batch of {batch:g}, not {plan.workload.batch}"


def other_rate(plan: TrainingPlan, record: Record) -> str:
    """Which learning rate a run has that was not planned. Its time and bytes are as predicted even so."""
    config = record.get("config") or {}
    rate = finite(config.get("lr"))
    if rate is None or plan.lr is None:
        return ""
    own, scaled = rate / (finite(config.get("lr_factor")) or 1.0), str(config.get("scale_lr") or "none")
    if not isclose(own, plan.lr, rel_tol=1e-6):
        return f"a learning rate of {own:g}, not {plan.lr:g}"
    if int(config.get("workers") or 1) > 1 and scaled != plan.scale_lr:
        return f"--scale-lr {scaled}, not {plan.scale_lr}"
    return ""


def forecast_of(plan: TrainingPlan, record: Record) -> Forecast | None:
    """What the plan predicted of this run: as it was priced there, or priced now by the same formulas."""
    if other_batch(plan, record):
        return None
    given = contender_of(record)
    same = (f for f in plan.forecasts if f.contender.codec == given.codec and _alike(f.contender, given))
    if (known := next(same, None)) is not None:
        return replace(known, ratio=None) if other_rate(plan, record) else known
    if given.codec not in plan.workload.codecs or given.word not in (*PLANNED, SINGLE.word):
        return None
    site = Machines(plan.profile, plan.network, None, plan.compute)
    try:
        return Forecast(given, run_cost(given, plan.workload, site, plan.objective.epochs))
    except ValueError:  # a strategy with options of another version, or none of Shoal's
        return None


def _alike(planned: Contender, given: Contender) -> bool:
    if (planned.word, planned.workers, planned.servers) != (given.word, given.workers, given.servers):
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
        measured = None if is_resumed(record) else finite(record.get(name))  # else those since then
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
    """A sentence for each run with other settings than planned, and one if they were made elsewhere."""
    told = []
    for record, name in zip(records, run_names(records), strict=True):
        if batch := other_batch(plan, record):
            told.append(f"{name} is not compared with the plan: it has {batch}.")
        elif rate := other_rate(plan, record):
            told.append(f"The accuracy of {name} is not compared with the plan: it has {rate}.")
    if plan.network is not None and any(record.get("transport") != "sim" for record in records):
        told.append(f"The plan was for {network_text(plan.network)}; these runs were made elsewhere.")
    return "\n".join(told)


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
        factors = self._factors()
        slowest = max(factors, key=factors.__getitem__)
        if factors[slowest] > OFF:
            self._tell_step(slowest, factors)
        else:
            self._look_at_link(seconds / done - self._steps[int(event["rank"])])

    def _factors(self) -> dict[int, float]:
        """How many times as long as planned the step of each worker takes."""
        assert self.forecast is not None
        planned, slow = self.forecast.cost.busy, self.plan.compute.slow
        if not planned:
            return dict.fromkeys(self._steps, 1.0)
        return {rank: step / (planned * slow.get(rank, 1.0)) for rank, step in self._steps.items()}

    def _tell_step(self, rank: int, factors: Mapping[int, float]) -> None:
        compute, factor = self.plan.compute, factors[rank]
        typical = sorted(factors.values())[len(factors) // 2]
        if typical > OFF:
            who, compute = "a step", replace(compute, mean=compute.mean * typical)
        else:
            slower = {**compute.slow, rank: factor * compute.slow.get(rank, 1.0)}
            who, compute = f"a step of worker {rank}", replace(compute, slow=slower)
        told = f"{who} takes {ratio_text(factor)} as long as planned"
        self._tell("step", told, Machines(self.plan.profile, self.plan.network, None, compute))

    def _look_at_link(self, between: float) -> None:
        assert self.forecast is not None
        cost, network = self.forecast.cost, self.plan.network
        planned = cost.waiting / cost.steps if cost.steps else 0.0
        is_long = between > OFF * planned and between > (OFF - 1) * cost.busy
        if network is None or not is_long or not planned:
            return
        factor = between / planned
        slower = replace(network, latency=network.latency * factor, bandwidth=network.bandwidth / factor)
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
