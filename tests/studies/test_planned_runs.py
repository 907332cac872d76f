"""Plans beside real runs: how figures become a table, and real runs on shaped links."""

from __future__ import annotations

from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from profiles import PROFILE
from shoal.codecs import CODECS
from shoal.core.errors import WorkerFailed
from shoal.planning.contenders import SINGLE, Contender
from shoal.planning.curves_ahead import Baseline, Estimate, PowerLaw
from shoal.planning.objectives import Objective
from shoal.planning.probing import refused_by
from shoal.planning.run_time import RunCost
from shoal.planning.training_plan import Forecast, TrainingPlan
from shoal.planning.workload import Workload
from shoal.programs.tasks import TASKS
from shoal.runs.plan import Plan
from shoal.sim import Compute
from shoal.strategies import STRATEGIES
from shoal.studies import planned_programs, planned_runs
from shoal.studies.host_runs import run_on_hosts
from shoal.studies.planned_programs import (
    PROGRAMS,
    LinkedMachines,
    RealRun,
    candidates,
    epochs_for,
    script_seconds,
    time_to_goal,
    without_server,
)
from shoal.studies.planned_runs import PlannedRuns, claims
from shoal.studies.shaped_hosts import ShapedHosts, obstacle
from shoal.studies.study import Lab

SYNC, BMUF, ASGD = (Contender(word, 2) for word in ("sync", "bmuf", "asgd"))
LAW = PowerLaw(0.0, 0.5, 5.0, 10, 5.0, 0.01)


def forecast(contender: Contender, epoch: float, seconds: float) -> Forecast:
    """Seconds of an epoch and to the goal, 10 % of doubt either way."""
    to_goal = Estimate(seconds, seconds * exp(-0.1), seconds * exp(0.1))
    cost = RunCost(epoch, 1e6, 1e3, 100.0, 1.0)
    return Forecast(contender, cost, Estimate(1.0, 0.9, 1.1), to_goal, epochs=seconds / epoch)


def made_up(**changes: Any) -> TrainingPlan:
    """A plan of 1,000 samples an epoch that names bmuf: 6 s to 95 %."""
    forecasts = [forecast(SINGLE, 5.0, 20.0), forecast(BMUF, 2.0, 6.0), forecast(ASGD, 3.0, 9.0)]
    forecasts.append(Forecast(SYNC, RunCost(4.0, 1e6, 1e3, 100.0, 1.0)))  # known by formulas alone
    plan = TrainingPlan(
        "digits",
        None,
        Workload("digits", 1000, 10, 1000),
        PROFILE,
        None,
        Compute(0.1),
        Objective(4, 95.0),
        0.05,
        "auto",
        forecasts,
        4,
        (3, "for a reason"),
        baseline=Baseline([(1.0, 1.0)], LAW, LAW),
        taken={"trials": 3.0},
    )
    return replace(plan, **changes)


def test_the_choice_the_next_best_sync_and_one_worker_are_run() -> None:
    assert [f.contender for f in candidates(made_up(), 1)] == [BMUF, ASGD, SYNC, SINGLE]
    assert [f.contender for f in candidates(made_up(), 0)] == [BMUF, SYNC, SINGLE]


def test_on_hosts_a_plan_chooses_among_what_every_program_can_run_without_a_server() -> None:
    words = without_server()
    assert {"sync", "bmuf", "diloco", "gossip"} <= set(words) and not {"asgd", "hogwild", "strom"} & {*words}
    for program in (each for each in PROGRAMS if each.target is not None):
        task = TASKS.make(program.name)
        assert not {*words} & {*refused_by(task.optimizer([Parameter(torch.zeros(2, 2))], lr=task.lr))}


def test_a_run_is_longer_than_predicted_but_not_too_long() -> None:
    plan = made_up()
    _, bmuf, _, sync = plan.forecasts
    assert epochs_for(plan, bmuf, longest=60.0) == 5  # half as many again as 3
    assert epochs_for(plan, bmuf, longest=8.0) == 4
    assert epochs_for(plan, sync, longest=60.0) == 6  # it was not tried: as many as one worker's 4


def test_the_goal_lies_between_two_points_of_the_curve() -> None:
    points = [{"seconds": k, "test_accuracy": 80.0 + 10 * k, "test_loss": 2.0 - k} for k in range(3)]
    assert time_to_goal(made_up(), points) == pytest.approx(1.5)
    assert time_to_goal(made_up(objective=Objective(4, 0.999)), points[:2]) is None
    judged = made_up(objective=Objective(4, 1.5, is_loss=True), baseline=Baseline([(1.0, 1.0)], LAW, None))
    assert time_to_goal(judged, points) == pytest.approx(0.5)


@pytest.fixture
def made_up_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program has the same plan and the same real times; asgd is the fastest."""
    times = {BMUF: 6.5, ASGD: 5.0, SYNC: 12.0, SINGLE: 21.0}

    def run(program: Any, machines: Any, made: Any, forecast: Forecast, longest: float) -> RealRun:
        if program.name == "speech":
            raise WorkerFailed("no speech", "")
        return RealRun(forecast.contender, times[forecast.contender], 10.0, 5000.0, 96.0)

    monkeypatch.setattr(planned_runs, "planned", lambda *_: made_up())
    monkeypatch.setattr(planned_runs, "really_run", run)
    monkeypatch.setattr(planned_runs, "obstacle", lambda: "no root")


@pytest.mark.usefixtures("made_up_runs")
def test_a_case_is_a_row_and_what_cannot_be_measured_is_told(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "here.json")
    kept: list[int] = []
    lab = Lab(save=lambda records: kept.append(len(records)))
    study = PlannedRuns(only="digits/speech", networks="here/100Mbit", profile=str(tmp_path / "here.json"))
    findings = study.run(lab)
    (row,), runs = findings.tables[0].rows, findings.tables[1].rows
    assert (row["named"], row["best"], row["ratio"]) == ("bmuf-2", "asgd-2", 1.3)
    assert row["inside"] is True and row["time_off"] == pytest.approx(100 * (6 / 6.5 - 1))
    assert row["cost_share"] == pytest.approx(100 * 3.0 / (2 * 6.5))  # of two machines
    assert row["score_off"] == pytest.approx(row["score_predicted"] - 96.0)
    assert [run["clock_off"] for run in runs][:2] == [0.0, 50.0]  # five epochs of 2 and of 3 s took 10 s
    assert [run["predicted"] for run in runs] == [6.0, 9.0, None, 20.0]
    assert findings.remarks[:2] == [
        "speech, here: no speech.",
        "links of 100Mbit cannot be made here: no root.",
    ]
    assert kept == list(range(1, len(lab.records) + 1)), "everything is kept as soon as it is there"


def row(**figures: Any) -> dict[str, Any]:
    usual = {
        "ratio": 1.0,
        "time_off": 5.0,
        "score_off": 0.5,
        "score": 96.0,
        "cost_share": 5.0,
        "inside": True,
    }
    return {"measured": 3.0, "is_loss": False, **usual, **figures}


def test_aims_are_met_only_in_every_case() -> None:
    assert [claim.met for claim in claims([row()] * 5)] == [True] * 5
    bad = row(ratio=1.2, time_off=-11.0, score_off=-1.1, cost_share=11.0, inside=False)
    assert [claim.met for claim in claims([bad, *[row()] * 2])] == [False] * 5
    assert [claim.met for claim in claims([bad, *[row()] * 4])][4], "four of five intervals are enough"
    loss = row(is_loss=True, score=2.0, score_off=0.07)
    assert [claim.met for claim in claims([loss])][2] is False  # more than 3 %
    never = dict.fromkeys(("measured", "ratio", "time_off", "cost_share", "inside"))
    assert [claim.met for claim in claims([row(**never)])][:2] == [False, False]
    script = row(score_off=None, score=None, inside=None)
    assert len(list(claims([script]))) == 4 and all(claim.met for claim in claims([script]))


def test_wrong_options_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown program 'digit'\. Did you mean 'digits'"):
        PlannedRuns(only="digit")
    with pytest.raises(ValueError, match="has no known unit"):
        PlannedRuns(networks="here/3")
    with pytest.raises(ValueError, match="others=-1"):
        PlannedRuns(others=-1)
    assert PlannedRuns(quick=True)._only == ["digits", "recurrent_loop"]


@pytest.fixture
def hosts() -> Any:
    if (why := obstacle()) is not None:
        pytest.skip(why)
    try:
        with ShapedHosts(2, 12.5e6) as made:
            yield made
    except RuntimeError as refused:  # root in a container may lack the right
        pytest.skip(str(refused))


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_task_trains_over_shaped_links(hosts: ShapedHosts) -> None:
    before = hosts.counted(0)
    settings: dict[str, Any] = {"workers": 2, "epochs": 2, "transport": "grpc", "tests": 4}
    strategy, codec = STRATEGIES.make("sync"), CODECS.read("none")
    result = run_on_hosts(hosts, Plan(TASKS.make("digits"), strategy, codec, **settings))
    assert result.samples == 2 * 1437 and result.seconds > 0
    assert len(result.curve) >= 4 and (result.test_accuracy or 0.0) > 60
    assert hosts.counted(0) - before > result.bytes_sent / 2, "every byte took the link"


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_script_trains_over_shaped_links_and_here(hosts: ShapedHosts) -> None:
    script = next(program for program in PROGRAMS if program.target is None).script
    contender = Contender("local", 2, {"period": 4}, "fp16")
    for there in (hosts, None):
        assert script_seconds(script, LinkedMachines("100Mbit", PROFILE, there), contender, 1) > 0


def test_a_run_that_does_not_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_programs, "LONGEST_SECONDS", 0.2)
    (tmp_path / "train.py").write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(WorkerFailed, match=r"shoal run took more than 0\.2 s"):
        script_seconds(tmp_path / "train.py", LinkedMachines("here", PROFILE), SYNC, 1)


def test_a_script_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_programs, "launched", lambda words: "nothing of the kind")
    with pytest.raises(WorkerFailed, match=r"train\.py did not say how long it took"):
        script_seconds(tmp_path / "train.py", LinkedMachines("here", PROFILE), SYNC, 1)
