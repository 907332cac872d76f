"""What messages must cost for virtual time to take as long as a real run, found in virtual time."""

from dataclasses import replace
from itertools import product

import pytest

from sampling import mostly_soak
from shoal.profiling import fitting
from shoal.profiling.fitting import VirtualTrial, beside_silent, solve
from shoal.sim.hardware import Handling, Profile, Wiring
from shoal.strategies.asgd import ASGD
from shoal.strategies.local import Local
from shoal.strategies.sync import Sync

PROFILE = Profile("here", 2, (1.0, 1.25), Handling(1e-6, 1e-10))


@pytest.mark.parametrize(("strategy", "steps"), mostly_soak([*product([ASGD(), Sync()], [3, 10])], few=1))
def test_costs_are_found_again_from_the_time_that_they_made(strategy, steps, monkeypatch):
    monkeypatch.setattr(fitting, "VIRTUAL_STEPS", steps)
    true = Handling(2e-4, 3e-10, 5e-5)
    wiring = Wiring(true, true)
    found = Wiring()
    for part, width in fitting.FITS:
        trial = VirtualTrial(PROFILE, part, width, silent=2e-3)
        found = trial.fitted(found, strategy, trial.step_seconds(wiring, strategy))
    assert found.send == found.receive
    assert found.send.each == pytest.approx(true.each, rel=0.05)
    assert found.send.byte == pytest.approx(true.byte, rel=0.1)
    assert found.send.large == pytest.approx(true.large, rel=0.3)


def test_a_run_that_takes_less_than_its_gradients_costs_nothing():
    trial = VirtualTrial(PROFILE, "each", fitting.SHORT, silent=2e-3)
    assert trial.fitted(Wiring(), Sync(), real=1e-3) == Wiring()


def test_a_cost_is_solved_for():
    assert solve(lambda cost: 3.0 + 2.0 * cost, 11.0, 1.0) == pytest.approx(4.0)
    assert solve(lambda cost: 3.0 + cost**1.2, 3.0 + 5.0**1.2, 1.0) == pytest.approx(5.0, rel=0.02)
    assert solve(lambda cost: 3.0, 11.0, 1.0) == 0.0  # it makes no difference
    assert solve(lambda cost: 3.0 + cost, 2.0, 1.0) == 0.0


def test_the_machine_s_slowdown_is_in_the_silent_step_already():
    trial = VirtualTrial(PROFILE, "each", fitting.SHORT, silent=2e-3)
    free = replace(PROFILE, vectors=Handling())
    free_trial = VirtualTrial(free, "each", fitting.SHORT, silent=2e-3)
    assert free_trial.step_seconds(Wiring(), Sync()) == pytest.approx(2e-3)
    assert trial.step_seconds(Wiring(), Sync()) > 2e-3


def test_a_core_that_changes_its_speed_between_rounds_changes_no_ratio():
    silent, sync = (8, fitting.SILENT, Local), (8, "processes", Sync)
    taken = {silent: [1.0, 2.0, 1.5], sync: [3.0, 6.0, 4.5]}  # at half the speed in the second round
    assert beside_silent(taken) == {silent: 1.5, sync: 4.5}
    taken[sync][1] = 60.0  # somebody else was busy then
    assert beside_silent(taken)[sync] == 4.5


def test_every_round_tries_everything_and_what_is_silent_once(monkeypatch):
    asked = []

    def seconds(task, strategy, workers, transport):
        asked.append((type(strategy), transport))
        return 0.01

    monkeypatch.setattr(fitting, "step_seconds", seconds)
    found = fitting.real_steps(["processes", "grpc"], lambda _: None)
    assert len(asked) == fitting.ROUNDS * len(fitting.STEPS) * 5
    assert asked[:3] == [(Local, "processes"), (Sync, "processes"), (ASGD, "processes")]
    assert set(found.values()) == {0.01} and len(found) == 15
