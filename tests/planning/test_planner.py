"""Whole plans of a small task, with a profile that was written down, and the file that keeps one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import shoal
from profiles import PROFILE
from shoal.core.task import Data, Task
from shoal.planning import planner, surroundings
from shoal.planning.contenders import SINGLE, Contender
from shoal.planning.objectives import Objective, duration
from shoal.planning.plan_check import contender_of, rows_of
from shoal.planning.plan_page import plan_page
from shoal.planning.plan_text import commands, lines, pays
from shoal.planning.short_runs import Allowance, Bench, TrialRun, needed
from shoal.planning.surroundings import Machines
from shoal.planning.training_plan import TrainingPlan
from shoal.programs.tasks import TASKS
from shoal.sim import Compute, Network
from shoal.sim.hardware import Machine


def blobs() -> Data:
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(4, (3000,), generator=generator)
    x = torch.eye(4)[y].repeat(1, 4) + 1.5 * torch.randn(3000, 16, generator=generator)
    return Data(x[:2400], y[:2400], x[2400:], y[2400:])


def blobs_task(width: int = 16) -> Task:
    """A task with an option."""
    net = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))
    return replace(TASK, model=lambda: net)


TASK = Task("blobs", lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), blobs, batch=16)


@pytest.fixture(scope="module")
def made() -> TrainingPlan:
    """One plan that all tests of the module read; it trains for four seconds at most, if cores are busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "FREE", 4.0)
        return planner.plan(
            TASK,
            4,
            network="1Gbit,200us",
            compute="20ms,10%",
            profile=PROFILE,
            strategies=["sync", "bmuf", "asgd"],
        )


@pytest.mark.slow
def test_a_plan_tries_some_settings_and_orders_them(made: TrainingPlan):
    assert made.looked_at > 15
    assert len(made.tried) >= 2
    assert made.tried[0].seconds is not None
    assert made.choice.contender.workers > 1  # 20 ms steps on an office link: it pays
    keys = [forecast.key(made.objective).value for forecast in made.tried if not forecast.given_up]
    assert keys == sorted(keys)
    assert not made.tried[0].given_up


@pytest.mark.slow
def test_it_says_why_whether_it_pays_what_it_cost_and_what_to_type(made: TrainingPlan):
    told = "\n".join(lines(made, Path("plan.json")))
    for part in ("For the accuracy of one worker", "Does it pay?", "Why: rule", "The plan took", "--plan"):
        assert part in told
    assert commands(made, Path("plan.json"))[0].startswith("shoal compare --task blobs --strategies ")


@pytest.mark.slow
def test_a_plan_is_kept_and_read_again(made: TrainingPlan, tmp_path: Path):
    made.save(tmp_path / "plan.json")
    again = TrainingPlan.load(tmp_path / "plan.json")
    assert [f.contender for f in again.ranked] == [f.contender for f in made.ranked]
    assert again.network == made.network
    assert again.profile.machine("grpc", "one_bit") == made.profile.machine("grpc", "one_bit")
    assert lines(again, Path("p")) == lines(made, Path("p"))


def test_a_file_that_is_no_plan_is_refused_with_its_name(tmp_path: Path):
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match=r"other\.json is no plan"):
        TrainingPlan.load(tmp_path / "other.json")
    with pytest.raises(ValueError, match="cannot be read"):
        TrainingPlan.load(tmp_path / "none.json")


@pytest.mark.slow
def test_the_page_has_the_front_and_the_map(made: TrainingPlan):
    page = plan_page(made, Path("plan.json"))
    assert "Time against accuracy" in page
    assert "What is best where" in page
    assert page.count("<rect") >= 10
    assert 'src="' not in page  # it opens offline
    assert 'href="http' not in page


@pytest.mark.slow
def test_the_run_that_was_planned_is_as_long_as_predicted(made: TrainingPlan):
    choice = made.choice.contender
    result = shoal.run(
        TASK,
        choice.strategy,
        workers=choice.workers,
        codec=choice.codec,
        epochs=3,
        transport="sim",
        network=made.network,
        compute=made.compute,
        profile=made.profile,
        scale_lr="auto",
    )
    record = result.record()
    assert contender_of(record).word == choice.word
    forecast = next(f for f in made.forecasts if f.contender == choice)
    assert forecast.cost.seconds * 3 == pytest.approx(result.seconds, rel=0.25)
    figures = [row[0] for row in rows_of(made, record, forecast)]
    assert figures == ["seconds", "bytes sent", "test accuracy"]


def test_a_profile_of_another_machine_is_refused_unless_its_step_is_known():
    other = replace(PROFILE, host="elsewhere")
    with pytest.raises(ValueError, match="measured on elsewhere, and a step would be timed on"):
        planner.plan(TASK, 4, network="1Gbit,200us", profile=other)
    assert planner.plan(
        TASK, 2, network="1Gbit,200us", profile=other, compute="20ms", trials=False, strategies=["sync"]
    )


@pytest.mark.slow
def test_a_target_that_nobody_reaches_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planner, "FREE", 1.0)
    with pytest.raises(ValueError, match=r"nobody reaches 100 %: one worker would get there"):
        planner.plan(
            TASK,
            2,
            network="1Gbit,200us",
            compute="20ms",
            profile=PROFILE,
            target=1.0,
            strategies=["sync"],
        )


def test_a_model_that_no_machine_holds_is_to_be_cut_first():
    with pytest.raises(ValueError, match="rule 1, cut it first"):
        planner.plan(
            TASK, 2, network="1Gbit,200us", compute="20ms", profile=PROFILE, memory=100, trials=False
        )


def test_a_network_too_slow_for_anything_leaves_one_worker():
    made = planner.plan(
        TASK,
        4,
        network="10kbit,2s",
        compute="1ms",
        profile=PROFILE,
        trials=False,
        strategies=["sync", "asgd"],
    )
    assert made.choice.contender == SINGLE
    assert pays(made).startswith("Does it pay? No: here every other setting takes longer")


def test_what_is_asked_for_is_read_and_checked():
    assert duration("10min") == 600
    assert duration("2h") == 7200
    with pytest.raises(ValueError, match="is not a time limit"):
        duration("10Mbit")
    with pytest.raises(ValueError, match="ask for one of the two"):
        Objective(target=0.9, within=60)
    with pytest.raises(ValueError, match="--fewest-bytes and --price: ask for one"):
        Objective(fewest_bytes=True, price=2.5)
    for wrong in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="an accuracy, or a loss, is a positive number"):
            Objective(target=wrong)
    assert Objective(target=0.97).percent == 97
    assert Objective(target=97).percent == 97


def test_as_many_enter_as_can_take_enough_steps():
    entrants = [Contender("bmuf", 8, {"period": 64}), Contender("sync", 4), Contender("sync", 8)]
    alone = TrialRun(SINGLE, 0, 10_000, [], 1.0, 0.0, taken=1.0)  # 10,000 samples a second
    rich = Allowance(1000.0, 1_000_000, 1e-4).rest(entrants, 10, alone)
    assert rich[0] == entrants
    poor = Allowance(2.5, 1_000_000, 1e-4).rest(entrants, 10, alone)
    assert [c.word for c in poor[0]] == ["sync", "sync"]  # three periods of 64 steps take too long
    assert poor[1] >= needed(Contender("sync", 8), 10)
    assert Allowance(1.0, 1_000_000, 1e-4).rest(entrants, 10, alone) == ([], 0)


def test_a_setting_that_cannot_be_run_does_not_end_the_plan():
    told: list[str] = []
    task = replace(TASK, optimizer=partial(torch.optim.SGD, momentum=0.9))
    bench = Bench(task, Network(1e-3, 1e8), lambda _: Compute(0.02), PROFILE, tell=told.append)
    assert bench.run(Contender("strom", 2, codec="none"), 160, 0).diverged
    assert told[-1].startswith("strom-2, none cannot be run: ")


WHERE = {"network": "1Gbit,200us", "compute": "20ms", "profile": PROFILE, "strategies": ["sync"]}


def test_a_goal_that_only_accuracy_tells_needs_trials():
    for goal in ({"target": 0.9}, {"within": "10s"}):
        with pytest.raises(ValueError, match="asks for an accuracy, which --no-trials leaves unknown"):
            planner.plan(TASK, 2, trials=False, **goal, **WHERE)
    made = planner.plan(TASK, 2, trials=False, epochs=3, **WHERE)
    assert "the best accuracy after 3 epochs plays no part in that order" in made.notes
    assert made.objective.epochs == 3
    assert not made.objective.by_epochs


def test_shared_memory_is_left_out_on_a_network():
    with pytest.raises(ValueError, match="'hogwild' shares the memory of one machine"):
        planner.plan(TASK, 2, trials=False, **{**WHERE, "strategies": ["hogwild"]})


def test_the_command_of_a_plan_names_the_task_with_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(TASKS._entries, "blobs", blobs_task)
    where = {"network": "1Gbit,200us", "compute": "20ms", "profile": PROFILE, "trials": False}
    made = planner.plan("blobs:width=8", 2, **where, strategies=["local:period=8", "sync"], batch=8, lr=0.05)
    assert made.workload.parameters == 16 * 8 + 8 + 8 * 4 + 4
    periods = {f.contender.period for f in made.forecasts if f.contender.word == "local"}
    assert periods == {8}, "what a strategy names itself is looked at alone"
    made.save(tmp_path / "plan.json")
    (line,) = commands(TrainingPlan.load(tmp_path / "plan.json"), Path("plan.json"))
    assert line.startswith("shoal compare --task blobs:width=8 --strategies ")
    assert "--batch 8 --lr 0.05" in line


def test_an_option_that_a_strategy_has_not_is_refused():
    with pytest.raises(ValueError, match=r"strategy 'local' has no option 'perod'\. Did you mean 'period'"):
        planner.plan(TASK, 2, compute="20ms", profile=PROFILE, strategies=["local:perod=8"], trials=False)


def test_one_worker_is_not_compared_with_anything():
    made = planner.plan(TASK, 1, trials=False, **{**WHERE, "strategies": None})
    assert pays(made) == "Does it pay? There is nothing to compare one worker with."


def test_a_step_is_measured_as_virtual_time_does(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[int, int]] = []

    def measured(task: Task, machine: Machine, processes: int, seed: int = 0, threads: int = 1) -> Compute:
        asked.append((processes, threads))
        return Compute(0.01)

    monkeypatch.setattr(surroundings, "compute_here", measured)
    here, apart = Machines(PROFILE, None, TASK), Machines(PROFILE, Network(1e-3, 1e8), TASK)
    for nodes in (1, 2, 4):
        here(nodes, "none")
        apart(nodes, "none")
    assert asked == [(1, 2), (1, 2), (2, 1)]  # processes and threads: two cores here, two of each machine
