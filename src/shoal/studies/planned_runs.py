"""`shoal plan` beside what really happens: the setting that it names, others, and what it predicted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from shoal.core.catalogue import check_word
from shoal.core.errors import ShoalError
from shoal.planning.forecasting import score_after
from shoal.planning.training_plan import Forecast, TrainingPlan
from shoal.profiling.measure import measure_profile
from shoal.report.findings import Claim, Findings, Heading, Table
from shoal.sim import Network
from shoal.sim.hardware import Profile
from shoal.studies.planned_programs import (
    HERE,
    PROGRAMS,
    WORKERS,
    LinkedMachines,
    Program,
    RealRun,
    candidates,
    planned,
    really_run,
)
from shoal.studies.shaped_hosts import ShapedHosts, obstacle
from shoal.studies.study import Lab, Study

Row = Mapping[str, Any]

AS_FAST = 1.10  # times the best real time that the named setting may take
TIME_OFF, POINTS_OFF, LOSS_OFF, COST = 10.0, 1.0, 3.0, 10.0
"""What may be wrong: time in per cent, accuracy in points, loss in per cent; and what a plan may cost."""

FEWEST_INSIDE = 80.0  # per cent of the cases in which the truth lies inside the 90 % interval

WHERE = (
    "Two workers on {cores} cores. On a network a worker is a process with one thread on a host of its "
    "own, over gRPC; what has one worker is measured beside a busy process. Times are to the goal, without "
    "start-up and tests; of a script, to its end. The score is test accuracy in per cent, or loss, at the "
    "end of the run."
)
QUICK = ("digits", "recurrent_loop")
HEADINGS = (
    Heading("program", "program"),
    Heading("network", "network"),
    Heading("named", "named"),
    Heading("best", "best"),
    Heading("ratio", "named / best", 2),
    Heading("predicted", "s predicted", 2),
    Heading("interval", "90 %"),
    Heading("measured", "s measured", 2),
    Heading("time_off", "off %", 0),
    Heading("score_predicted", "score predicted", 2),
    Heading("score", "score measured", 2),
    Heading("score_off", "off", 2),
    Heading("cost", "plan s", 1),
    Heading("cost_share", "of the run %", 0),
)
RUNS = (
    Heading("program", "program"),
    Heading("network", "network"),
    Heading("setting", "setting"),
    Heading("predicted", "s predicted", 2),
    Heading("to_goal", "s measured", 2),
    Heading("clock_off", "clock off %", 0),
    Heading("score", "score", 2),
)


@dataclass(frozen=True)
class PlannedRuns(Study):
    """Whether the setting that a plan names is the best, and how near its predictions are.

    `only` names programs, with / between them; `networks` are here, processes of this machine, and rates of
    links between two hosts, which need root. `others` of the next best settings are really run, beside the
    one that was named, sync and one worker, each for at most `longest` seconds. `profile` is a file of
    shoal calibrate.
    """

    source: ClassVar[str] = "docs/plan.md"

    only: str | None = None
    networks: str = "here/1Gbit/100Mbit"
    others: int = 1
    longest: float = 20.0
    profile: str | None = None
    quick: bool = False  # a small task and a script, the named setting, sync and one worker alone

    def __post_init__(self) -> None:
        for word in self._only:
            check_word("program", word, [program.name for program in PROGRAMS])
        for word in self._networks:
            if word != HERE:
                Network.parse(word)
        if self.others < 0 or not self.longest > 0:
            raise ValueError(f"others={self.others}, longest={self.longest}: at least 0, and more than 0")

    @property
    def _only(self) -> list[str]:
        named = self.only.split("/") if self.only is not None else []
        return named or list(QUICK if self.quick else (program.name for program in PROGRAMS))

    @property
    def _networks(self) -> list[str]:
        return [word for word in self.networks.split("/") if word]

    def run(self, lab: Lab) -> Findings:
        lab.say("measuring this machine")
        profile = measure_profile() if self.profile is None else Profile.load(self.profile)
        cases = Cases(lab, 0 if self.quick else self.others, self.longest)
        programs = [program for program in PROGRAMS if program.name in self._only]
        for word in self._networks:
            with ExitStack() as stack:
                hosts = None
                if word != HERE:
                    try:
                        if (why := obstacle()) is not None:
                            raise RuntimeError(why)
                        rate = Network.parse(word).bandwidth
                        hosts = stack.enter_context(ShapedHosts(WORKERS, rate))
                    except RuntimeError as refused:
                        cases.miss(f"links of {word} cannot be made here", refused)
                        continue
                for program in programs:
                    cases.add(program, LinkedMachines(word, profile, hosts))
        return Findings(
            study="plan",
            title="Plans beside what really happens",
            source=self.source,
            tables=[
                Table("The setting that a plan names", HEADINGS, cases.rows),
                Table("All runs", RUNS, cases.runs),
            ],
            claims=list(claims(cases.rows)),
            remarks=[*cases.missing, WHERE.format(cores=os.cpu_count())],
            settings=asdict(self),
        )


@dataclass
class Cases:
    """Plans programs, runs what the plans name and others, and keeps what came of it."""

    lab: Lab
    others: int  # of the next best settings that are really run
    longest: float  # seconds of a run
    rows: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    _alone: dict[str, RealRun] = field(default_factory=dict)  # of one worker on a host: no link plays a part

    def add(self, program: Program, machines: LinkedMachines) -> None:
        """A program on a network; one that fails does not end the study."""
        name = f"{program.name}, {machines.name}"
        told = {"program": program.name, "network": machines.name, "clock": "real"}
        try:
            self.lab.say(f"{name}: planning")
            made = planned(program, machines, lambda what: self.lab.say(f"{name}: {what}"))
            done: list[tuple[Forecast, RealRun]] = []
            for forecast in candidates(made, self.others):
                done.append((forecast, self._run(program, machines, made, forecast)))
                self.runs.append({**told, **run_row(made, *done[-1])})
                self.lab.keep(f"{name}, {forecast.contender.name}", self.runs[-1])
        except (ValueError, ShoalError) as problem:
            self.miss(name, problem)
            return
        self.rows.append({**told, **case_row(made, done)})
        self.lab.keep(name, self.rows[-1])

    def miss(self, name: str, problem: Exception) -> None:
        """Tell what could not be measured, and why."""
        self.missing.append(f"{name}: {problem}.")
        self.lab.keep(name, {"failed": str(problem)})

    def _run(
        self, program: Program, machines: LinkedMachines, made: TrainingPlan, forecast: Forecast
    ) -> RealRun:
        """One real run; one worker on a host is run once."""
        self.lab.say(f"{program.name}, {machines.name}: {forecast.contender.name}")
        alone = forecast is made.single and machines.hosts is not None
        if alone and program.name in self._alone:
            return self._alone[program.name]
        real = really_run(program, machines, made, forecast, self.longest)
        if alone:
            self._alone[program.name] = real
        return real


def run_row(made: TrainingPlan, forecast: Forecast, real: RealRun) -> dict[str, Any]:
    """One run beside what was predicted of it. The clock alone: its seconds for the samples that it took."""
    clock = forecast.cost.seconds * real.samples / made.workload.samples
    return {
        "setting": forecast.contender.name,
        "predicted": predicted_seconds(made, forecast, real),
        "to_goal": real.to_goal,
        "seconds": real.seconds,
        "samples": real.samples,
        "clock_off": 100 * (clock / real.seconds - 1),
        "score": real.score,
    }


def predicted_seconds(made: TrainingPlan, forecast: Forecast, real: RealRun) -> float | None:
    """To the goal; of a script, to its end."""
    if made.script is not None:
        return forecast.cost.seconds * real.samples / made.workload.samples
    return None if forecast.seconds is None else forecast.seconds.value


def case_row(made: TrainingPlan, done: Sequence[tuple[Forecast, RealRun]]) -> dict[str, Any]:
    """What was predicted of the choice, which is the first, beside what was measured of it and the others."""
    choice, real = done[0]
    there = [(run.to_goal, run.contender.name) for _, run in done if run.to_goal is not None]
    soonest, best = min(there) if there else (None, None)
    predicted, measured, between = predicted_seconds(made, choice, real), real.to_goal, choice.seconds
    ahead = None
    if made.baseline is not None and choice.ratio is not None:
        ahead = score_after(real.samples, choice.ratio, made.baseline).value
    off = None if ahead is None or real.score is None else ahead - real.score
    cost = sum(made.taken.values())
    return {
        "named": choice.contender.name,
        "best": best,
        "ratio": measured / soonest if measured and soonest else None,
        "predicted": predicted,
        "interval": None if between is None else f"{between.low:.3g}–{between.high:.3g}",
        "inside": None if between is None or measured is None else between.low <= measured <= between.high,
        "measured": measured,
        "time_off": 100 * (predicted / measured - 1) if predicted and measured else None,
        "score_predicted": ahead,
        "score": real.score,
        "score_off": off,
        "is_loss": made.judged_by_loss,
        "cost": cost,
        "taken": dict(made.taken),
        "cost_share": 100 * cost / (measured * choice.machines) if measured else None,
    }


def claims(rows: Sequence[Row]) -> Iterator[Claim]:
    """The aims, and in how many cases they are met."""
    if not rows:
        return
    yield _claim(
        f"the named setting takes at most {AS_FAST} x the best real time", rows, "ratio", _is_as_fast
    )
    yield _claim(f"the time is right within {TIME_OFF:g} %", rows, "time_off", _is_near)
    near = f"the score is right within {POINTS_OFF:g} point, or a loss within {LOSS_OFF:g} %"
    yield _claim(near, rows, "score_off", _is_right)
    yield _claim(f"the plan costs at most {COST:g} % of the run", rows, "cost_share", _is_cheap)
    known = [bool(row["inside"]) for row in rows if row["inside"] is not None]
    if known:
        share = 100 * sum(known) / len(known)
        told = f"the truth lies inside the 90 % interval in {FEWEST_INSIDE:g} % of the cases or more"
        yield Claim(f"{told}: {sum(known)} of {len(known)}", share >= FEWEST_INSIDE)


def _claim(aim: str, rows: Sequence[Row], key: str, is_met: Callable[[Row], bool]) -> Claim:
    """An aim that counts as met if it is in every case that tells; a goal that was not reached is a miss."""
    telling = [row for row in rows if row[key] is not None or row["measured"] is None]
    met = [row for row in telling if row[key] is not None and is_met(row)]
    return Claim(f"{aim}: {len(met)} of {len(telling)}", len(met) == len(telling))


def _is_as_fast(row: Row) -> bool:
    return float(row["ratio"]) <= AS_FAST


def _is_near(row: Row) -> bool:
    return abs(float(row["time_off"])) <= TIME_OFF


def _is_right(row: Row) -> bool:
    most = LOSS_OFF / 100 * row["score"] if row["is_loss"] else POINTS_OFF
    return bool(abs(row["score_off"]) <= most)


def _is_cheap(row: Row) -> bool:
    return float(row["cost_share"]) <= COST
