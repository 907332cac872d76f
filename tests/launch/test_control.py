"""What a node tells its launcher: how far it is, what it does, and for whom it waits."""

from __future__ import annotations

import json
from multiprocessing.connection import Connection, Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.core.meter import Meter
from shoal.engine.progress import Progress
from shoal.launch import control as module
from shoal.launch.control import Activity, Control, Reporter


class Standing(SimpleNamespace):
    """The parts of an engine that a report reads."""

    def __init__(self, is_server: bool = False) -> None:
        super().__init__(
            rank=0,
            is_server=is_server,
            meter=Meter(),
            progress=Progress(2),
            mailbox=SimpleNamespace(waiting=""),
            work=SimpleNamespace(last_step=10),
            channel=SimpleNamespace(now=lambda: self.clock),
            clock=0.0,
        )


def heard(line: Connection) -> dict[str, Any]:
    assert line.poll(20), "nothing came"
    return json.loads(line.recv_bytes())


def test_a_worker_does_what_took_most_of_its_time_since_the_last_report():
    engine, activity = Standing(), Activity()
    engine.meter.compute_seconds = 3.0
    assert activity.now(engine) == ("computing", "")
    engine.meter.wait_seconds, engine.meter.compute_seconds = 2.0, 3.5
    assert activity.now(engine) == ("waiting", "")
    engine.meter.send_seconds = 1.0
    assert activity.now(engine) == ("sending", "")


def test_a_worker_that_waits_says_for_what():
    engine = Standing()
    engine.meter.compute_seconds = 3.0
    engine.mailbox.waiting = "'mean' from worker 1"
    assert Activity().now(engine) == ("waiting", "'mean' from worker 1")


def test_a_server_computes_when_its_model_has_changed():
    engine, activity = Standing(is_server=True), Activity()
    engine.mailbox.waiting = "a message from any node"
    assert activity.now(engine)[0] == "waiting"
    engine.progress.advance(64)
    assert activity.now(engine)[0] == "computing"
    assert activity.now(engine)[0] == "waiting"


def test_a_report_tells_time_state_and_staleness():
    ours, theirs = Pipe()
    engine, control = Standing(), Control(theirs)
    engine.meter.staleness.update({0: 1, 4: 3})
    with ours:
        Reporter(control).step(engine)
        said = heard(ours)
        control.close()
    assert said["staleness"] == 3.0  # (0 + 4 + 4 + 4) / 4
    assert said["state"] == "computing" and said["awaits"] == "" and said["seconds"] == 0.0


@pytest.mark.slow
def test_a_long_step_is_reported_in_the_middle(monkeypatch):
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.3)
    ours, theirs = Pipe()
    engine, control = Standing(), Control(theirs)
    with ours:
        Reporter(control).step(engine)
        assert heard(ours)["state"] == "computing"
        engine.mailbox.waiting = "'mean' from worker 1"
        engine.clock = 5.0
        said = heard(ours)
        assert (said["state"], said["awaits"], said["seconds"]) == ("waiting", "'mean' from worker 1", 5.0)
        control.tell("done")
        while heard(ours)["event"] != "done":
            pass
        assert not ours.poll(1.0)  # nothing comes after the end
        control.close()
