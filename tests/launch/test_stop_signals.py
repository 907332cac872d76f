"""Signals are handled while there is something to clean up, and only then."""

import os
import signal
from pathlib import Path

import pytest

from shoal.core.errors import Interrupted
from shoal.launch.stop_signals import (
    STOPPING,
    StopSignal,
    number_of,
    signals_raise,
    stop_signals,
    stopped_by,
    temporary_folder,
)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in STOPPING]


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_removes_a_temporary_folder(number):
    before, folders = handlers(), []

    def be_stopped() -> None:
        with temporary_folder() as folder:
            folders.append(Path(folder))
            (folders[0] / "journal").touch()
            os.kill(os.getpid(), number)

    with pytest.raises(StopSignal) as stop:
        be_stopped()
    assert number_of(stop.value) == number
    assert not folders[0].exists()
    assert handlers() == before


@pytest.mark.parametrize("number", STOPPING)
def test_the_first_signal_asks_and_the_second_ends(number):
    asked: list[int] = []
    with stop_signals(lambda: bool(asked), asked.append):
        os.kill(os.getpid(), number)
        assert asked == [number]
        with pytest.raises(StopSignal):
            os.kill(os.getpid(), number)


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with temporary_folder(), stop_signals(lambda: False, pytest.fail):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_handler_of_the_user_s_own_stays():
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with signals_raise():
            os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_plain_keyboard_interrupt_is_ctrl_c():
    assert str(stopped_by(number_of(KeyboardInterrupt()))) == "stopped by Ctrl-C"
    assert number_of(stopped_by(signal.SIGTERM)) == signal.SIGTERM
    assert number_of(Interrupted("stopped before step 3")) == signal.SIGINT
