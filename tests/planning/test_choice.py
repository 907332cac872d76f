"""Which setting a plan chooses, by figures that were written down, and the plan beside its run."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from shoal.planning.contenders import SINGLE, Contender
from shoal.planning.curves_ahead import Baseline, Estimate, PowerLaw
from shoal.planning.objectives import Objective
from shoal.planning.plan_check import PlanWatch, contender_of, forecast_of, where
from shoal.planning.plan_text import account, commands, pays, row_name, winner
from shoal.planning.pricing import notes
from shoal.planning.run_time import RunCost
from shoal.planning.survivors import survivors, undominated
from shoal.planning.training_plan import Forecast, TrainingPlan
from shoal.planning.workload import UNCOMPRESSED, CodecCost, Workload
from shoal.sim import Compute, Network
from shoal.sim.hardware import Handling, Profile, Wiring

WIRING = Wiring(Handling(5e-5, 1e-9), Handling(5e-5, 1e-9), 1e-4, 1e9)
PROFILE = Profile("here", 2, transports={"grpc": WIRING}, servers={"grpc": WIRING})

COST = RunCost(10.0, 1e6, 1e3, 100.0, 1.0)
LAW = PowerLaw(0.0, 0.5, 5.0, 10, 5.0, 0.01)


def hand_made(objective: Objective | None = None, **seconds: tuple[float, float, float]) -> TrainingPlan:
    """A plan of sync on 4 workers and so on: seconds of an epoch, ratio of samples, doubt about it."""
    forecasts = [Forecast(SINGLE, replace(COST, seconds=30.0, nbytes=0.0), Estimate(1, 1, 1))]
    for word, (epoch, ratio, doubt) in seconds.items():
        estimate = Estimate(ratio, ratio / doubt, ratio * doubt)
        forecasts.append(Forecast(Contender(word, 4), replace(COST, seconds=epoch), estimate))
    workload = Workload("t", 1000, 10, 1000, codecs={"none": UNCOMPRESSED, "one_bit": CodecCost(1 / 32)})
    baseline = Baseline([(1.0, 1.0)], LAW, LAW)
    return TrainingPlan(
        "t",
        None,
        workload,
        PROFILE,
        Network(1e-3, 1e6),
        Compute(0.1),
        objective or Objective(),
        0.05,
        "auto",
        forecasts,
        3,
        (3, "for a reason"),
        baseline=baseline,
    )


def test_no_winner_is_named_within_the_noise():
    clear = hand_made(sync=(10.0, 1.0, 1.05), bmuf=(20.0, 1.0, 1.05))
    assert [f.contender.word for f in clear.equals] == ["sync"]
    assert winner(clear).endswith(": sync-4.")
    vague = hand_made(sync=(10.0, 1.0, 1.5), bmuf=(11.0, 1.0, 1.5))
    assert [f.contender.word for f in vague.equals] == ["sync", "bmuf"]
    assert "there is no winner: sync-4 and bmuf-4 are equal within the noise" in winner(vague)


def test_the_order_depends_on_what_is_asked_for():
    figures = {"sync": (25.0, 1.0, 1.01), "bmuf": (10.0, 1.5, 1.01)}
    assert hand_made(**figures).choice.contender.word == "bmuf"
    assert hand_made(Objective(by_epochs=True), **figures).choice.contender.word in ("single", "sync")
    assert hand_made(Objective(price=1.0), **figures).choice.contender == SINGLE
    assert hand_made(Objective(fewest_bytes=True), **figures).choice.contender.word == "sync"


def test_a_plan_that_cost_more_than_a_tenth_of_its_run_says_so():
    cheap = replace(hand_made(sync=(10.0, 1.0, 1.1)), taken={"trials": 1.0})
    assert account(cheap).endswith("of its run.")
    assert "just try it" in account(replace(cheap, taken={"trials": 1e4}))


def test_a_slow_worker_makes_the_plan_speak_up_once():
    said: list[str] = []
    watch = PlanWatch(hand_made(sync=(11.0, 1.0, 1.01), adpsgd=(12.0, 1.0, 1.01)), said.append)
    watch.begin({"strategy": "sync", "config": {"workers": 4, "codec": "none"}})
    for _ in range(2):
        for rank in range(4):
            busy = 1.0 if rank == 2 else 0.2
            watch.update(
                {"role": "worker", "rank": rank, "step": 20, "seconds": 10.0, "compute_fraction": busy}
            )
    assert len(said) == 1
    assert said[0].startswith("a step of worker 2 takes 5.0 x as long as planned; adpsgd-4 would be better")


def test_nothing_is_said_while_all_goes_as_planned():
    said: list[str] = []
    watch = PlanWatch(hand_made(sync=(10.0, 1.0, 1.01)), said.append)
    watch.begin({"strategy": "sync", "config": {"workers": 4, "codec": "none"}})
    for rank in range(4):
        watch.update({"role": "worker", "rank": rank, "step": 20, "seconds": 2.1, "compute_fraction": 0.95})
    assert not said


def test_only_settings_that_nobody_beats_are_tried():
    fast, gentle, beaten = (Contender("bmuf", n, {"period": p}) for n, p in ((8, 16), (4, 4), (8, 64)))
    costs = {SINGLE: COST, fast: replace(COST, seconds=2.0), gentle: replace(COST, seconds=4.0)}
    costs[beaten] = replace(COST, seconds=3.0)
    assert undominated([fast, gentle, beaten], lambda c: costs[c].seconds) == [fast, gentle]
    sync = Contender("sync", 4)
    costs[sync] = replace(COST, seconds=5.0)
    workload = Workload("t", 100_000, 16, 1000)
    chosen = survivors(costs, workload, Objective(), 1e4, 2)
    assert {c.word for c in chosen} == {"bmuf", "sync"}  # the best of each family comes first


def given_up(plan: TrainingPlan, word: str) -> TrainingPlan:
    """The same plan, with a setting that was given up."""
    rows = [replace(f, given_up=f.contender.word == word) for f in plan.forecasts]
    return replace(plan, forecasts=rows)


def test_what_was_given_up_within_the_noise_is_no_loser():
    vague = given_up(hand_made(sync=(10.0, 1.0, 1.5), bmuf=(9.0, 1.0, 1.5)), "bmuf")
    assert [f.contender.word for f in vague.equals] == ["sync", "bmuf"]
    assert vague.choice.contender.word == "sync"
    assert winner(vague).endswith("The others were given up after a shorter run than sync-4.")
    assert [row_name(f) for f in vague.equals] == ["sync-4", "bmuf-4 (given up)"]


def test_where_one_worker_is_among_equals_it_may_still_pay():
    vague = hand_made(sync=(20.0, 1.0, 2.0))
    assert vague.choice.contender == SINGLE
    assert (
        pays(vague)
        == "Does it pay? Perhaps: sync-4 may be 1.5 x as fast as one worker, within the noise of it."
    )


def test_hardly_faster_within_the_noise_does_not_pay():
    assert pays(hand_made(sync=(29.0, 1.0, 2.0))).endswith("No: one worker is as good as any other setting.")


def test_where_all_that_may_be_chosen_was_given_up_one_of_them_is():
    made = hand_made(Objective(fewest_bytes=True), sync=(10.0, 1.0, 1.5), bmuf=(40.0, 1.0, 1.5))
    assert given_up(made, "sync").choice.contender.word == "sync"  # the only one faster than one worker


def test_what_came_to_nothing_is_never_chosen():
    failed = hand_made(sync=(10.0, inf, 1.0), bmuf=(9.0, inf, 1.0))
    assert not failed.is_by_time
    assert failed.choice.contender == SINGLE
    assert "nothing that was tried learnt" in pays(failed)


def test_after_so_many_epochs_the_soonest_of_equals_wins():
    made = hand_made(Objective(by_epochs=True), sync=(20.0, 1.0, 1.5), bmuf=(10.0, 1.1, 1.5))
    assert made.choice.contender.word == "bmuf"


def test_the_command_has_the_batch_and_the_learning_rate():
    made = replace(hand_made(sync=(10.0, 1.0, 1.01)), lr=0.3)
    (line, *_) = commands(made, Path("p"))
    assert "--batch 10 --lr 0.3 " in line  # as it was written, not with all its digits


CONFIG = {"workers": 4, "batch": 10, "lr": 0.2, "lr_factor": 4.0, "scale_lr": "auto"}


def record_of(**change: object) -> dict[str, Any]:
    """A run of what `hand_made` plans, but for these settings."""
    return {"strategy": "sync", "transport": "sim", "config": {**CONFIG, **change}}


def test_a_run_with_another_batch_is_not_compared():
    made, other = hand_made(sync=(10.0, 1.0, 1.01)), record_of(batch=20)
    assert forecast_of(made, record_of()) is made.forecasts[1]
    assert not where(made, [record_of()])
    assert forecast_of(made, other) is None
    assert where(made, [other]) == "sync is not compared with the plan: it has a batch of 20, not 10."


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"lr": 0.8}, "a learning rate of 0.2, not 0.05"),
        ({"scale_lr": "none", "lr": 0.05, "lr_factor": 1.0}, "--scale-lr none, not auto"),
    ],
)
def test_of_a_run_with_another_learning_rate_only_time_and_bytes_are_compared(
    change: dict[str, Any], told: str
):
    made, other = hand_made(sync=(10.0, 1.0, 1.01)), record_of(**change)
    assert forecast_of(made, other) == replace(made.forecasts[1], ratio=None)
    said = f"The accuracy of sync is not compared with the plan: it has {told}."
    assert where(made, [other]) == said


def test_servers_are_part_of_a_setting():
    config = {"workers": 4, "servers": 6}
    assert contender_of({"strategy": "asgd", "config": config}).servers == 6
    groups = {**config, "strategy.groups": 2}
    nodes = Contender("hierarchical", 4, {"groups": 2}).strategy.servers
    assert contender_of({"strategy": "hierarchical", "config": groups}).servers == 6 // nodes
    assert contender_of({"strategy": "hierarchical", "config": {**groups, "arguments": []}}).servers == 6
    assert contender_of({"strategy": "my own", "config": config}).servers == 1


def test_a_slow_worker_that_was_planned_is_no_news():
    said: list[str] = []
    made = hand_made(sync=(11.0, 1.0, 1.01))
    watch = PlanWatch(replace(made, compute=Compute(0.2, slow={2: 5.0}, fixed=0.5)), said.append)
    watch.begin({"strategy": "sync", "config": {"workers": 4}})
    for rank in (0, 1, 3, 2):  # the last tells of no wait
        event = {"role": "worker", "rank": rank, "step": 20, "seconds": 10.0}
        watch.update({**event, "compute_fraction": 1.0 if rank == 2 else 0.2})
    assert not said


def test_the_fewest_bytes_keep_compression():
    plain, coded = Contender("sync", 4), Contender("sync", 4, codec="one_bit")
    costs = {SINGLE: replace(COST, seconds=50.0), plain: COST, coded: replace(COST, seconds=11.0, nbytes=1e4)}
    workload = Workload("t", 100_000, 16, 1000, codecs={"none": UNCOMPRESSED, "one_bit": CodecCost(1 / 32)})
    assert survivors(costs, workload, Objective(), 1e4, 1) == [plain]
    assert survivors(costs, workload, Objective(fewest_bytes=True), 1e4, 1) == [coded]


def test_post_local_is_not_tried():
    costs = {
        SINGLE: COST,
        Contender("post_local", 4, {"period": 4, "switch": 99}): replace(COST, seconds=1.0),
    }
    assert not survivors(costs, Workload("t", 100_000, 16, 1000), Objective(), 1e4, 8)


def test_processes_of_one_machine_are_not_called_machines():
    made = replace(hand_made(sync=(10.0, 1.0, 1.01)), network=None)
    assert pays(made) == "Does it pay? 3.0 x as fast as one worker, with 4 processes on one machine."


def test_more_than_the_workers_can_do_is_doubted():
    made = hand_made(sync=(5.0, 1.0, 1.01))
    assert "4 workers are predicted to be 6 times as fast as one" in " ".join(notes(made))
