"""Ctrl-C ends a run soon, whoever waits for whom, and leaves a whole checkpoint where there can be one."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import sabotage
import shoal
from forked import run_forked
from marks import marks
from shoal.launch.crew import Crew
from shoal.strategies import Hierarchical
from shoal.testing import blobs

Event = dict[str, Any]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60, func_only=True)]


@pytest.fixture(autouse=True, scope="module")
def fork_server_is_ready() -> None:
    """Its imports are not counted as time that a run takes to stop."""
    run_forked([sys.executable, "-c", ""])


@pytest.fixture(autouse=True)
def quietly(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.CRITICAL, logger="shoal"):
        yield


def press_ctrl_c(when: Callable[[Event], bool]) -> Callable[[Event], None]:
    """A listener that presses Ctrl-C once, when that is told."""
    pressed: list[Event] = []

    def listen(event: Event) -> None:
        if not pressed and when(event):
            pressed.append(event)
            os.kill(os.getpid(), signal.SIGINT)

    return listen


def only_worker_1_is_underway(crews: list[Crew]) -> Callable[[Event], bool]:
    return lambda event: bool(event["rank"] == 1 and event["step"] and crews[0].members[0].is_idle)


def test_ctrl_c_when_a_worker_has_done_its_share_lets_the_others_finish(crews: list[Crew], tmp_path):
    result = shoal.run(
        blobs(),
        sabotage.OneIsSlow(),
        workers=2,
        epochs=12,
        checkpoint=tmp_path,
        on_progress=press_ctrl_c(only_worker_1_is_underway(crews)),
    )
    assert result.samples == 12 * 300


def test_ctrl_c_when_a_worker_has_done_its_share_and_nothing_is_saved_stops_at_once(crews: list[Crew]):
    with pytest.raises(shoal.Interrupted):
        shoal.run(
            blobs(),
            sabotage.OneIsSlow(),
            workers=2,
            epochs=12,
            on_progress=press_ctrl_c(only_worker_1_is_underway(crews)),
        )


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize(
    "strategy",
    [Hierarchical(groups=1), shoal.Downpour(warm_start=8), shoal.Downpour(warm_start=2000)],
    ids=["hierarchical", "short warm start", "long warm start"],
)
def test_ctrl_c_while_workers_wait_for_each_other_through_the_server(strategy, saves, tmp_path):
    if saves and strategy == shoal.Downpour(warm_start=2000):
        pytest.skip("a checkpoint needs the end of the warm start, which takes its time")
    with pytest.raises(shoal.Interrupted):
        shoal.run(
            marks(),
            strategy,
            workers=3,
            epochs=1000,
            checkpoint=tmp_path if saves else None,
            on_progress=press_ctrl_c(lambda event: event["rank"] == 0 and event["step"] > 0),
        )
    saved = [{path.stem for path in step.glob("*.json")} for step in tmp_path.glob("step-*")]
    servers = strategy.servers
    whole = {"worker-0", "worker-1", "worker-2", *(f"server-{k}" for k in range(servers))}
    assert saved == ([whole] if saves else [])


@pytest.mark.parametrize("saves", [True, False])
def test_ctrl_c_while_a_server_is_started_again(crews: list[Crew], saves, tmp_path):
    killed = threading.Event()

    def kill_the_server(event: Event) -> None:
        if event["rank"] == 0 and event["step"] > 10 and not killed.is_set():
            killed.set()
            os.kill(crews[0].members[-1].process.pid, signal.SIGKILL)  # type: ignore[attr-defined]

    def press_ctrl_c_meanwhile() -> None:
        killed.wait()
        while crews[0].members[-1].incarnation == 0:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press_ctrl_c_meanwhile)
    presser.start()
    try:
        with pytest.raises(shoal.Interrupted):
            shoal.run(
                blobs(),
                "asgd",
                workers=2,
                epochs=1000,
                checkpoint=tmp_path if saves else None,
                on_progress=kill_the_server,
            )
    finally:
        killed.set()
        presser.join()
    assert len(list(tmp_path.glob("step-*/server-0.json"))) == saves
