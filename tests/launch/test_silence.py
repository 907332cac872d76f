"""A process that is frozen is killed after the patience of its run; a run that stops does not wait for it."""

from __future__ import annotations

import logging
import os
import signal
import time
from multiprocessing.connection import Pipe
from typing import Any

import pytest

import shoal
from marks import SAMPLES, marks
from shoal.launch import silence as module
from shoal.launch.crew import Crew
from shoal.launch.member import Member
from shoal.launch.silence import Silence
from shoal.launch.stop_signals import StopSignal

Event = dict[str, Any]


class Process:
    """What a silence needs of a process."""

    killed = False

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test moves on."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def member(name: str = "worker 1") -> Member:
    ours, theirs = Pipe()
    ours.close()
    theirs.close()
    return Member(1, name, Process(), ours)  # type: ignore[arg-type]


def pass_seconds(silence: Silence, clock: list[float], who: Member, seconds: int, stop: int = 0) -> None:
    for _ in range(seconds):
        clock[0] += 1.0
        silence.end_frozen([who], stop)


def test_a_member_that_is_silent_for_too_long_is_killed(clock):
    silence, frozen = Silence(patience=10.0), member()
    frozen.note_progress({"step": 1})
    pass_seconds(silence, clock, frozen, 10)
    assert not frozen.process.killed
    pass_seconds(silence, clock, frozen, 1)
    assert frozen.process.killed
    assert frozen.why_lost == "was killed after 11 s without a sign of life"


def test_nobody_is_judged_before_its_first_report_or_after_its_last(clock):
    silence, early, done = Silence(patience=10.0), member(), member()
    done.note_progress({"step": 1})
    done.report = {"steps": 1}
    for who in (early, done):
        pass_seconds(silence, clock, who, 100)
        assert not who.process.killed


def test_a_launcher_that_was_stopped_itself_blames_nobody(clock):
    silence, alive = Silence(patience=10.0), member()
    alive.note_progress({"step": 1})
    pass_seconds(silence, clock, alive, 5)
    clock[0] += 1000.0
    silence.end_frozen([alive], 0)
    pass_seconds(silence, clock, alive, 4)
    assert not alive.process.killed


def test_a_run_that_is_to_stop_waits_less_for_one_that_is_frozen(clock):
    silence, frozen = Silence(patience=600.0), member()
    frozen.note_progress({"step": 1})
    pass_seconds(silence, clock, frozen, 10, stop=signal.SIGTERM)
    with pytest.raises(StopSignal) as stopped:
        pass_seconds(silence, clock, frozen, 1, stop=signal.SIGTERM)
    assert stopped.value.number == signal.SIGTERM


def freezing(crews: list[Crew], then: int | None = None) -> Any:
    """A listener that stops worker 1 for ever once it trains, and sends this process a signal then."""
    frozen: list[int] = []

    def listen(event: Event) -> None:
        if not frozen and event["rank"] == 1 and event["step"]:
            frozen.append(crews[0].members[1].process.pid)  # type: ignore[attr-defined]
            os.kill(frozen[0], signal.SIGSTOP)
            if then is not None:
                os.kill(os.getpid(), then)

    return listen


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["processes", pytest.param("grpc", marks=pytest.mark.soak)])
def test_the_others_go_on_without_a_worker_that_is_frozen_for_ever(crews, transport, caplog):
    result = shoal.run(
        marks(),
        "asgd",
        workers=2,
        epochs=2,
        transport=transport,
        patience=3.0,
        on_progress=freezing(crews),
    )
    assert result.samples == 2 * SAMPLES
    assert any("worker 1 was killed after" in record.getMessage() for record in caplog.records)


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_ever_for_a_worker_that_is_frozen(crews, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(module, "STOPPING_SECONDS", 2.0)
    began = time.monotonic()
    with caplog.at_level(logging.CRITICAL, logger="shoal"), pytest.raises(shoal.Interrupted):
        shoal.run(
            marks(),
            "sync",
            workers=2,
            epochs=1000,
            checkpoint=tmp_path,
            on_progress=freezing(crews, then=signal.SIGINT),
        )
    assert time.monotonic() - began < 60
