"""Progress on a terminal and elsewhere, with a clock that the test moves."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from shoal.report import ProgressDisplay


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def console(terminal=False, height=25):
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, height=height, color_system=None)


def event(rank=0, step=17, **changes):
    told = {"rank": rank, "role": "worker", "step": step, "steps": 468, "loss": 0.31, "samples": 64 * step}
    return {**told, "samples_per_second": 5_100.0, "wait_fraction": 0.12, "bytes_sent": 123_456, **changes}


def test_elsewhere_it_prints_one_line_in_ten_seconds(clock):
    out = console()
    with ProgressDisplay(console=out, clock=clock) as progress:
        progress.start("bmuf", workers=2, servers=0)
        for second in range(31):
            clock.now = float(second)
            progress.update(event(0, step=4 * second))
            progress.update(event(1, step=4 * second + 1, loss=0.33))
    lines = out.file.getvalue().splitlines()
    # at 10 s worker 0 is at step 40, and worker 1's last word is from second 9: step 37
    assert lines == [
        "bmuf: step 37/468, loss 0.32, 10,200 samples/s",
        "bmuf: step 77/468, loss 0.32, 10,200 samples/s",
        "bmuf: step 117/468, loss 0.32, 10,200 samples/s",
    ]


def test_short_runs_print_nothing_elsewhere(clock):
    out = console()
    with ProgressDisplay(console=out, clock=clock) as progress:
        progress.start("bmuf", workers=1, servers=0)
        clock.now = 9.9
        progress.update(event())
    assert out.file.getvalue() == ""


def test_a_new_run_starts_its_own_ten_seconds(clock):
    out = console()
    progress = ProgressDisplay(console=out, clock=clock)
    progress.start("bmuf", workers=1, servers=0)
    clock.now = 9.0
    progress.start("sync", workers=1, servers=0)
    clock.now = 12.0
    progress.update(event())
    progress.finish()
    assert out.file.getvalue() == ""


@pytest.mark.parametrize("terminal", [False, True])
def test_disabled_it_never_prints(clock, terminal):
    out = console(terminal)
    with ProgressDisplay(enabled=False, console=out, clock=clock) as progress:
        progress.start("bmuf", workers=1, servers=1)
        clock.now = 60.0
        progress.update(event())
    assert out.file.getvalue() == ""


def test_a_terminal_shows_a_line_for_each_node(clock):
    out = console(terminal=True)
    progress = ProgressDisplay(console=out, clock=clock)
    progress.start("downpour", workers=2, servers=1)
    clock.now = 1.0
    progress.update(event(0, step=217))
    clock.now = 2.0
    progress.update({"rank": 2, "role": "server", "step": 90, "steps": None, "bytes_sent": 9_000_000})
    frame = out.file.getvalue().split("downpour")[-1]
    progress.finish()
    worker, silent, server = (
        next(x for x in frame.splitlines() if name in x) for name in ("worker 0", "worker 1", "server")
    )
    assert all(part in worker for part in ("━", "217/468", "0.31", "5,100", "12 %", "123 kB"))
    assert "starting" in silent
    assert "90" in server
    assert "9.00 MB" in server


def test_a_terminal_is_redrawn_at_most_ten_times_a_second(clock):
    out = console(terminal=True)
    with ProgressDisplay(console=out, clock=clock) as progress:
        progress.start("bmuf", workers=1, servers=0)
        size = len(out.file.getvalue())
        clock.now = 0.05
        progress.update(event())
        assert len(out.file.getvalue()) == size
        clock.now = 0.15
        progress.update(event())
        assert len(out.file.getvalue()) > size


def test_a_terminal_keeps_one_line_of_a_finished_run(clock):
    out = console(terminal=True)
    progress = ProgressDisplay(console=out, clock=clock)
    progress.start("bmuf", workers=1, servers=0)
    progress.update(event(step=468))
    progress.finish()
    progress.finish()
    assert out.file.getvalue().endswith("bmuf: step 468/468, loss 0.31, 5,100 samples/s\n")


@pytest.mark.parametrize("terminal", [False, True])
def test_it_says_which_copy_is_tested_when_the_training_is_over(clock, terminal):
    out = console(terminal)
    progress = ProgressDisplay(console=out, clock=clock)
    progress.start("bmuf", workers=1, servers=0)
    progress.update(event(step=468))
    clock.now = 11.0
    progress.update(event(step=468, loss=None, tested=3, copies=21))
    assert "testing, copy 4 of 21" in out.file.getvalue()
    progress.update(event(step=468))
    clock.now = 22.0
    progress.update(event(step=468))
    assert "testing" not in out.file.getvalue().rsplit("bmuf", 1)[-1]
    progress.finish()
    if terminal:  # what stays is about the training
        assert out.file.getvalue().endswith("bmuf: step 468/468, loss 0.31, 5,100 samples/s\n")
    progress.start("sync", workers=1, servers=0)
    clock.now = 33.0
    progress.update(event(step=5))
    assert "testing" not in out.file.getvalue().split("sync")[-1]


def test_a_terminal_shows_at_once_that_testing_has_begun(clock):
    out = console(terminal=True)
    with ProgressDisplay(console=out, clock=clock) as progress:
        progress.start("bmuf", workers=1, servers=0)
        progress.update(event(step=468, tested=0, copies=1))
        assert "testing, copy 1 of 1" in out.file.getvalue()


def test_more_workers_than_lines_are_counted(clock):
    out = console(terminal=True, height=10)
    with ProgressDisplay(console=out, clock=clock) as progress:
        progress.start("gossip", workers=40, servers=0)
        assert "and 34 more" in out.file.getvalue()  # 10 lines, 4 kept free


def test_display_ends_and_cursor_returns_when_the_run_raises(clock):
    out = console(terminal=True)
    progress = ProgressDisplay(console=out, clock=clock)

    def fail():
        with progress:
            progress.start("bmuf", workers=1, servers=0)
            raise RuntimeError("worker 0 failed")

    with pytest.raises(RuntimeError):
        fail()
    assert "\x1b[?25h" in out.file.getvalue()


def test_no_thread_is_started(clock):
    before = threading.active_count()
    with ProgressDisplay(console=console(terminal=True), clock=clock) as progress:
        progress.start("bmuf", workers=1, servers=0)
        assert threading.active_count() == before


def test_sparse_events_and_losses_that_are_not_finite_are_shown(clock):
    out = console()
    progress = ProgressDisplay(console=out, clock=clock)
    progress.start("[b]sync", workers=1, servers=0)
    clock.now = 10.0
    progress.update({"rank": 0, "role": "worker", "step": 3, "steps": None, "loss": float("nan")})
    assert out.file.getvalue() == "[b]sync: step 3, loss \N{EN DASH}, 0 samples/s\n"


def test_a_worker_that_was_lost_holds_up_the_line_no_more(clock):
    out = console()
    progress = ProgressDisplay(console=out, clock=clock)
    progress.start("asgd", workers=2, servers=1)
    progress.update(event(1, step=3))
    progress.update(event(1, step=3, lost=True))
    clock.now = 10.0
    progress.update(event(0, step=40))
    assert out.file.getvalue() == "asgd: step 40/468, loss 0.31, 5,100 samples/s\n"


def test_a_terminal_says_who_was_lost_and_numbers_servers_as_messages_do(clock):
    out = console(terminal=True)
    with ProgressDisplay(console=out, clock=clock) as progress:
        progress.start("asgd", workers=2, servers=2)
        progress.update({"rank": 3, "role": "server", "step": 77, "steps": None})
        progress.update({"rank": 1, "role": "worker", "lost": True})
        clock.now = 1.0
        progress.update(event(0, step=40))
        frame = out.file.getvalue().split("asgd")[-1].splitlines()
    rows = {name: next(row for row in frame if name in row) for name in ("worker 1", "server 0", "server 1")}
    assert "lost" in rows["worker 1"]
    assert "starting" in rows["server 0"]
    assert "77" in rows["server 1"]
