"""A run as frames: what a page shows at each moment, computed from progress events."""

from __future__ import annotations

from itertools import pairwise

from shoal.watch.timeline import MOST_FRAMES, SILENT_SECONDS, Timeline
from watch_events import report


def test_nodes_that_have_not_reported_are_joining():
    frame = Timeline("sync", 3, 1).frame()
    assert [node[0] for node in frame["nodes"]] == ["joining"] * 4
    assert frame["text"] == frame["pays"] == "" and frame["loss"] is None


def test_a_frame_sums_samples_and_bytes_and_averages_losses():
    run = Timeline("sync", 2)
    run.add(report(0, seconds=1.0, loss=2.0, samples=640, bytes_sent=1000))
    run.add(report(1, seconds=1.5, loss=1.0, samples=600, bytes_sent=3000, state="waiting", awaits="'mean'"))
    frame = run.frame()
    assert (frame["t"], frame["loss"], frame["samples"], frame["bytes"]) == (1.5, 1.5, 1240, 4000)
    assert frame["nodes"][1][0] == "waiting" and frame["nodes"][1][7] == "'mean'"
    assert frame["text"] == (
        "2 workers train 2,000 samples/s. They have waited 10 % of the time and have sent 4.00 kB."
    )


def test_without_one_worker_to_compare_the_page_says_what_is_the_most():
    run = Timeline("sync", 2)
    run.add(report(0, compute_fraction=0.9))
    run.add(report(1, compute_fraction=0.7))
    assert run.frame()["pays"] == (
        "At best 1.6 x one worker: the workers compute 80 % of the time. "
        "There is no run on one worker to compare with."
    )


def test_against_one_worker_that_was_measured_it_pays_or_does_not():
    def pays(baseline: float) -> str:
        run = Timeline("sync", 2, baseline=baseline)
        run.add(report(0))
        run.add(report(1))
        return run.frame()["pays"]

    assert pays(1000.0) == "Yes, in speed: 2.0 x the samples/s of one worker."
    assert pays(4000.0) == "No, in speed: 0.50 x the samples/s of one worker."
    assert pays(2000.0) == "Hardly, in speed: 1.0 x the samples/s of one worker."


def test_one_worker_has_nothing_to_pay_for():
    run = Timeline("single", 1)
    run.add(report(0))
    assert run.frame()["pays"] == "" and run.frame()["text"] == "1 worker trains 1,000 samples/s."


def test_compression_is_part_of_what_pays():
    run = Timeline("sync", 2, baseline=1000.0)
    run.add(report(0, saved_seconds=-2.0))
    run.add(report(1, saved_seconds=-4.0))
    assert run.frame()["pays"].endswith("Compression has cost a worker 3.00 s so far.")


def test_a_lost_worker_is_dead_keeps_its_figures_and_leaves_a_mark():
    run = Timeline("asgd", 2, 1)
    run.add(report(0))
    run.add(report(1, step=70, seconds=3.0))
    run.add({"rank": 1, "role": "worker", "step": 0, "loss": float("nan"), "seconds": 4.0, "lost": True,
             "state": "dead", "fault": "worker 1 was ended by SIGKILL"})  # fmt: skip
    frame = run.frame()
    assert frame["nodes"][1][:2] == ["dead", 70]
    assert run.marks == [{"t": 4.0, "text": "worker 1 was ended by SIGKILL", "rank": 1}]
    assert "1 of 2 workers is lost." in frame["text"]


def test_a_server_that_was_restarted_counts_its_bytes_on():
    run = Timeline("asgd", 1, 1)
    run.add(report(1, role="server", bytes_sent=700))
    run.add(report(1, role="server", bytes_sent=700, state="dead", lost=True))
    run.add(report(1, role="server", bytes_sent=700, state="joining"))
    run.add(report(1, role="server", bytes_sent=50))
    assert run.frame()["bytes"] == 750 and run.frame()["nodes"][1][6] == 750


def test_a_node_that_does_not_report_becomes_silent_but_not_one_that_is_done():
    run = Timeline("sync", 2)
    run.add(report(0), now=100.0)
    run.add(report(1, state="done"), now=100.0)
    states = [node[0] for node in run.frame(100.0 + 2 * SILENT_SECONDS)["nodes"]]
    assert states == ["silent", "done"]
    assert run.frame()["nodes"][0][0] == "computing"  # a replay has no silence


def test_test_scores_come_from_the_launcher_or_from_worker_0s_script():
    run = Timeline("sync", 2)
    run.add(report(0, samples=64, test_accuracy=50.0, seconds=2.0))
    run.add(report(1, samples=64, test_accuracy=51.0, seconds=2.1))
    assert run.head()["points"] == [
        {"seconds": 2.0, "samples": 64.0, "test_accuracy": 50.0, "test_loss": None}
    ]
    run.add({**report(0), "tested": 1, "copies": 5, "point": {"seconds": 1.0, "test_accuracy": 90.0}})
    assert run.phase == "testing copy 2 of 5" and len(run.points) == 2


def test_while_worker_0_is_away_the_next_one_s_script_tells():
    run = Timeline("sync", 2)
    run.add(report(0, lost=True))
    run.add(report(1, samples=64, test_accuracy=51.0))
    assert [point["test_accuracy"] for point in run.points] == [51.0]


def test_a_long_run_keeps_its_beginning_and_its_end_within_the_limit():
    run = Timeline("sync", 1)
    for k in range(1, 10_000):
        run.add(report(0, seconds=k / 2))
        run.keep(run.frame())
    times = [frame["t"] for frame in run.frames]
    assert len(times) <= MOST_FRAMES and times == sorted(set(times))
    assert times[0] < 60 and times[-1] == 9_999 / 2
    assert max(b - a for a, b in pairwise(times)) < 60


def test_a_run_of_a_thousand_nodes_keeps_fewer_frames():
    run = Timeline("sync", 1000)
    for k in range(1, 200):
        run.add(report(k, seconds=float(k)))
        run.keep(run.frame())
    assert len(run.frames) <= 60
