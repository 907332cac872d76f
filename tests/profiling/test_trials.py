"""Trials: the step of a task among others, as virtual time takes it."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest

from shoal.collectives import Mapped, stripes
from shoal.core.transport import Shows
from shoal.launch.join import choose_mean
from shoal.profiling import trials
from shoal.profiling.step import Step
from shoal.profiling.trials import compute_here, measure_step_among, net_task, step_seconds
from shoal.programs.tasks import TASKS
from shoal.sim.hardware import Machine
from shoal.strategies.local import Local
from shoal.strategies.sync import Sync


def test_virtual_time_takes_the_step_among_as_many_as_have_a_core(monkeypatch):
    asked = []

    def measured(task, processes, seed, threads):
        asked.append(processes)
        return Step(0.030, 0.1, 50, 0.2)

    monkeypatch.setattr(trials, "measure_step_among", measured)
    machine = Machine(cores=2, per_host=4, slowdown=(1.0, 1.5))
    task = replace(TASKS.make("digits"), lr=0.123)  # no other test has measured this one
    for _ in range(2):
        compute = compute_here(task, machine, 4)
    assert compute.mean == pytest.approx(0.020)  # alone it would take this, and beside another 0.030
    assert (compute.jitter, compute.fixed) == (0.1, 0.2)
    assert asked == [2]  # the same is measured once


def test_a_trial_takes_no_more_data_than_it_needs_and_makes_no_copies_where_there_is_less(monkeypatch):
    taken = []

    def seconds(task, strategy, workers, transport, threads, epochs):
        taken.append((len(task.data().x), epochs))
        return 0.01

    monkeypatch.setattr(trials, "measure_step", lambda *_: Step(0.5, 0.1, 50))
    monkeypatch.setattr(trials, "step_seconds", seconds)
    for samples in (100, 5):  # three steps of one sample in each of four processes are needed
        assert measure_step_among(net_task(2, samples, batch=1), 4).seconds == 0.01
    assert taken == [(12, 1), (5, 3)]


def test_a_trial_over_processes_averages_by_messages_as_virtual_time_does(monkeypatch):
    plans = []

    def run(plan, audience):
        plans.append(plan)
        return SimpleNamespace(seconds=1.0, nodes=[{"role": "worker", "steps": 4}])

    monkeypatch.setattr(trials, "run_processes", run)
    assert step_seconds(net_task(8, 8), Sync(), 2, "processes") == 0.25
    (plan,) = plans
    shows = create_autospec(Shows, instance=True)  # of such a transport "auto" averages in mapped memory
    assert isinstance(choose_mean("auto", shows, plan.codec, 2), Mapped)
    assert choose_mean(plan.collective, shows, plan.codec, 2) is stripes
    assert choose_mean(plan.collective, None, plan.codec, 2) is stripes


@pytest.mark.slow
def test_a_step_among_processes_takes_time(monkeypatch):
    monkeypatch.setattr(trials, "TRIAL_SECONDS", 0.05)
    monkeypatch.setattr("shoal.profiling.step.LEAST_SECONDS", 0.02)
    step = measure_step_among(net_task(8, 40), 2)
    assert 0 < step.seconds < 60
    assert step_seconds(net_task(8, 40), Local(period=4), 2, "processes") > 0
