"""The rules of thumb, on three published settings and at their edges."""

from __future__ import annotations

from dataclasses import replace

from shoal.collectives import LinkCost
from shoal.planning.contenders import SINGLE, Contender
from shoal.planning.rules import Situation, reason_for, rule_for, warnings
from shoal.planning.workload import Workload


def link(bits: float, latency: float = 2e-6) -> LinkCost:
    return LinkCost.of_network(latency, bits / 8)


def test_a_large_dnn_on_a_fast_network_does_not_average_dense_gradients_at_every_step():
    situation = Situation(step=0.056, nbytes=253e6, link=link(56e9), workers=8)
    assert 1.0 < situation.ratio < 1.3
    assert rule_for(situation).number in (5, 6)
    assert not rule_for(situation).covers(Contender("sync", 8))


def test_a_cnn_on_office_links_compresses_averages_rarely_or_waits_for_nobody():
    situation = Situation(step=1.2, nbytes=299e6, link=link(1e9, 1e-4), workers=8)
    assert 3 < situation.ratio < 5
    assert rule_for(situation).number in (5, 6, 7)


def test_a_small_cnn_on_a_fast_network_averages_gradients_at_every_step():
    situation = Situation(step=0.005, nbytes=360e3, link=link(56e9), workers=8)
    rule = rule_for(situation)
    assert rule.number == 3
    assert rule.covers(Contender("sync", 8))
    assert not rule.covers(Contender("sync", 8, codec="one_bit"))


USUAL = Situation(step=0.02, nbytes=1e6, link=link(1e9, 1e-4), workers=8)


def test_each_rule_has_its_place():
    assert rule_for(replace(USUAL, fits=False)).number == 1
    assert rule_for(replace(USUAL, workers=1)).number == 2
    assert rule_for(replace(USUAL, step=1e-4)).number == 2
    assert rule_for(replace(USUAL, job=30.0)).number == 2
    assert rule_for(replace(USUAL, nbytes=1e5)).number == 3
    assert rule_for(replace(USUAL, nbytes=1e5, spread=0.3)).number == 4
    assert rule_for(replace(USUAL, nbytes=5e6)).number == 5
    assert rule_for(replace(USUAL, nbytes=1e8)).number == 6
    assert rule_for(replace(USUAL, nbytes=1e5, slowest=3.0)).number == 7
    assert rule_for(replace(USUAL, nbytes=1e8, by_epochs=True)).number == 3


def test_the_first_rule_that_applies_wins():
    small, slow_link = replace(USUAL, nbytes=1e5), replace(USUAL, nbytes=1e8)
    assert rule_for(replace(slow_link, by_epochs=True, spread=0.3, slowest=3.0)).number == 3
    assert rule_for(replace(small, spread=0.3, slowest=3.0)).number == 4
    assert rule_for(replace(USUAL, nbytes=5e6, spread=0.3, slowest=3.0)).number == 5
    assert rule_for(replace(slow_link, spread=0.3, slowest=3.0)).number == 6


def test_averages_now_and_then_need_a_period_of_samples_for_each_pair_of_workers():
    slow = replace(USUAL, nbytes=1e8, batch=4)
    enough = slow.period * 4 * 8**2
    assert "fewer workers" not in rule_for(replace(slow, samples=enough)).because
    assert rule_for(replace(slow, samples=enough - 1, slowest=3.0)).number == 7
    told = rule_for(replace(slow, samples=enough - 1))
    assert told.number == 6
    assert told.because.endswith("take fewer workers")


def test_a_slow_link_asks_for_a_period_that_leaves_averages_a_twentieth_of_the_time():
    slow = replace(USUAL, nbytes=1e8)
    assert slow.ratio / slow.period <= 0.051


def test_every_choice_has_a_reason():
    assert reason_for(SINGLE).number == 2
    assert reason_for(Contender("sync", 4)).number == 3
    assert reason_for(Contender("sync", 4, codec="one_bit")).number == 5
    assert reason_for(Contender("bmuf", 4)).number == 6
    assert reason_for(Contender("sgp", 4)).number == 8


def test_what_to_beware_of():
    small = Workload("t", samples=10_000, batch=64, parameters=1_000_000, connected=1.0)
    told = " ".join(warnings(Contender("asgd", 8), small))
    for part in ("share is 1,250 samples", "1,000,000 parameters", "fully connected", "start from a model"):
        assert part in told
    assert "bmuf adds momentum" in " ".join(warnings(Contender("local", 64), small))
    assert not warnings(SINGLE, replace(small, parameters=1000))
