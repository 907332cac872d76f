"""A logger that is slow or broken never slows or ends a run."""

from __future__ import annotations

import threading

import pytest

from logged_figures import node
from shoal.loggers import figures, sending
from shoal.loggers.sending import LoggedRun


class Recorder:
    """No subclass: a class with the three methods is enough."""

    def __init__(self):
        self.rows = 0
        self.state = ""

    def start(self, name, config):
        pass

    def log(self, figures, *, step, samples, seconds):
        self.rows += 1

    def finish(self, state):
        self.state = state


class Broken(Recorder):
    def log(self, figures, **moment):
        super().log(figures, **moment)
        raise OSError("the server is gone")


class Stuck(Recorder):
    def __init__(self):
        super().__init__()
        self.go_on = threading.Event()

    def log(self, figures, **moment):
        self.go_on.wait(60)
        super().log(figures, **moment)


@pytest.fixture(autouse=True)
def a_row_for_every_event(monkeypatch):
    monkeypatch.setattr(figures, "ROW_SECONDS", 0.0)


def train(*loggers, events=5):
    run = LoggedRun(loggers, "sync-1117-0742", {}, workers=1, servers=0)
    for step in range(1, events + 1):
        run.event(node(0, step))
    return run


def test_a_broken_logger_is_left_out_with_one_warning_and_others_go_on(caplog):
    broken, other = Broken(), Recorder()
    train(broken, other).end("done", None, "")
    assert [r.getMessage() for r in caplog.records] == [
        "logger Broken is left out from here on: OSError: the server is gone"
    ]
    assert (broken.rows, broken.state) == (1, "")
    assert other.rows > 4 and other.state == "done"


def test_events_do_not_wait_for_a_stuck_logger(monkeypatch, caplog):
    monkeypatch.setattr(sending, "MOST_WAITING", 10)
    stuck = Stuck()
    run = train(stuck, events=100)  # returns at once
    stuck.go_on.set()
    run.end("interrupted", None, "")
    assert stuck.state == "interrupted"
    (warning,) = caplog.records
    assert "logger Stuck was too slow" in warning.getMessage()


def test_the_end_of_a_run_waits_for_a_logger_only_so_long(monkeypatch, caplog):
    monkeypatch.setattr(sending, "FINISH_SECONDS", 0.05)
    stuck = Stuck()
    run = train(stuck)
    run.end("done", None, "")
    (warning,) = caplog.records
    assert "logger Stuck has not finished after 0.05 s" in warning.getMessage()
    stuck.go_on.set()  # so that its thread ends
