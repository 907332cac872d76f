"""A run that is kept, shown again: all of it when it has ended, and what is added while it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shoal.records.run_store import RunDescription, RunStore
from shoal.records.stored_runs import read_run
from shoal.watch.feed import Feed
from shoal.watch.replay import Replay
from watch_events import report

ABOUT = RunDescription("digits", "asgd", 2, 1, {"transport": "processes"})
RECORD: dict[str, Any] = {
    "strategy": "asgd", "task": "digits", "workers": 2, "transport": "processes", "seconds": 9.0,
    "samples_per_second": 1500.0, "test_accuracy": 95.0,
    "curve": [{"seconds": 9.0, "samples": 900, "test_accuracy": 95.0, "test_loss": 0.1}],
}  # fmt: skip


def replay_of(path: Path, feed: Feed) -> Replay:
    return Replay(read_run(path), feed)


def test_a_run_under_way_is_followed_to_its_end(tmp_path):
    folder = RunStore(tmp_path).open(ABOUT)
    folder.event(report(0))
    folder.output("worker 0", "epoch 1 | half")
    feed = Feed()
    replay = replay_of(folder.path, feed)
    replay.load()
    assert replay.run.name == "asgd on digits" and (replay.run.workers, replay.run.servers) == (2, 1)
    assert replay.follow() and replay.run.frame()["nodes"][0][0] == "computing"
    folder.event(report(1, seconds=2.0, lost=True, state="dead", fault="worker 1 was ended by SIGKILL"))
    assert replay.follow() and [mark["text"] for mark in replay.run.marks] == [
        "worker 1 was ended by SIGKILL"
    ]
    folder.end("done", RECORD, "")
    assert not replay.follow()
    assert replay.run.phase == "done" and replay.run.points[-1]["test_accuracy"] == 95.0
    assert replay.run.verdict.startswith("asgd: 95.00 % test accuracy")
    subscriber = feed.subscribe()
    assert subscriber is not None
    everything = json.loads(subscriber.first.split(b"data: ")[1])
    assert everything["lines"] == [["worker 0", "epoch 1 | half"]]


def test_a_finished_run_has_frames_from_beginning_to_end(tmp_path):
    folder = RunStore(tmp_path).open(ABOUT)
    for k in range(1, 200):
        for rank in range(3):
            line = json.dumps({"time": k / 10, **report(rank, seconds=k / 10, step=k)})
            folder._events.write(f"{line}\n")
    folder.end("done", RECORD, "")
    replay = replay_of(folder.path, Feed())
    replay.load()
    assert [frame["t"] for frame in replay.run.frames[:2]] == [0.1, 0.2]
    assert replay.run.frames[-1]["t"] == 19.9 and replay.run.frames[-1]["nodes"][2][1] == 199


def test_a_virtual_run_is_shown_on_its_own_clock(tmp_path):
    folder = RunStore(tmp_path).open(RunDescription("digits", "sync", 1, 0, {"transport": "sim"}))
    folder.event(report(0, seconds=1234.5))
    folder.end("done", None, "")
    replay = replay_of(folder.path, Feed())
    replay.load()
    assert replay.run.virtual and replay.run.seconds == 1234.5


def test_a_failed_run_says_why(tmp_path):
    folder = RunStore(tmp_path).open(ABOUT)
    folder.end("failed", None, "Traceback …\nworker 1 failed: out of memory")
    replay = replay_of(folder.path, Feed())
    replay.load()
    assert replay.run.phase == "failed: worker 1 failed: out of memory"


def test_half_a_line_and_a_line_of_nonsense_are_left_out(tmp_path):
    folder = RunStore(tmp_path).open(ABOUT)
    folder._events.write('nonsense\n{"rank": 99}\n[1]\n')
    folder.event(report(0))
    folder._events.write('{"rank": 1, "se')
    folder._events.flush()
    replay = replay_of(folder.path, Feed())
    replay.load()
    assert [node[0] for node in replay.run.frame()["nodes"]] == ["computing", "joining", "joining"]
    folder.close()
