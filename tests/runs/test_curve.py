"""Learning curves: how many samples each point stands for, also where workers go at their own pace."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import shoal
from shoal import Compute, Network
from shoal.runs.curve import Snapshot, count_all
from shoal.testing import blobs

SLOW = Compute.parse("20ms,0%,0:5x")  # worker 0, which takes the copies


def snapshots(*moments: tuple[float, float]) -> list[Snapshot]:
    return [Snapshot(seconds, samples, torch.zeros(1)) for seconds, samples in moments]


def test_copies_count_what_all_have_done_by_then() -> None:
    copies = snapshots((0.0, 0.0), (1.0, 40.0), (2.0, 80.0), (9.0, 300.0))
    slow, fast = [(0.0, 0), (1.0, 20), (4.0, 80)], [(0.0, 0), (1.5, 150)]
    counted = count_all(copies, [slow, fast])
    # 0 + 0; 20 + two thirds of 150; 20 + a third of the next 60, and 150; the end as it was
    assert [copy.samples for copy in counted] == [0.0, 120.0, 190.0, 300.0]
    assert [copy.seconds for copy in counted] == [0.0, 1.0, 2.0, 9.0]


def test_who_has_done_something_before_the_run_was_resumed_begins_with_that() -> None:
    copies = snapshots((0.0, 100.0), (1.0, 120.0), (2.0, 200.0))
    assert [copy.samples for copy in count_all(copies, [[(0.5, 30), (1.5, 50)]])] == [30.0, 40.0, 200.0]


def test_a_copy_of_all_samples_is_replaced_by_the_last() -> None:
    copies = snapshots((0.0, 0.0), (3.0, 40.0), (4.0, 80.0))
    assert [copy.samples for copy in count_all(copies, [[(0.0, 0), (2.0, 80)]])] == [0.0, 80.0]


def test_without_counts_the_copies_say_how_many() -> None:
    copies = snapshots((0.0, 0.0), (1.0, 40.0))
    assert count_all(copies, []) == copies


@pytest.mark.parametrize("word", ["gossip", "adpsgd", "strom"])
def test_a_slow_worker_counts_what_the_others_do(word: str) -> None:
    """By its own steps, times their number, worker 0 would count less than a third of it."""
    fast = Network.parse("10Gbit,50us")
    curve = shoal.run(
        blobs(), word, workers=4, epochs=4, transport="sim", compute=SLOW, network=fast, threads=1
    ).curve
    rates = [point["samples"] / point["seconds"] for point in curve[1:-1]]
    whole = curve[-1]["samples"] / curve[-1]["seconds"]
    assert rates
    assert all(rate == pytest.approx(whole, rel=0.2) for rate in rates)


@pytest.mark.slow
def test_real_processes_tell_their_counts() -> None:
    result = shoal.run(blobs(), "adpsgd", workers=3, epochs=4)
    assert all(before["samples"] < after["samples"] for before, after in pairwise(result.curve))
    assert result.curve[-1]["samples"] == result.samples
    assert all("counts" not in node for node in result.nodes)


@pytest.mark.parametrize("word", ["gossip", "adpsgd", "strom"])
def test_where_no_time_passes_the_curve_of_workers_at_their_own_pace_has_its_points(word):
    result = shoal.run("digits", word, workers=3, epochs=1, transport="sim")
    samples = [point["samples"] for point in result.curve]
    assert result.seconds == 0.0
    assert samples == sorted(samples) and samples[0] == 0.0 and len(samples) > 10
    assert result.curve[0]["test_accuracy"] < result.curve[-1]["test_accuracy"]
