"""The controller without processes: what is journaled, replayed, restarted and given up."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from random import Random

import pytest
from asking import LR

from shoal.core.errors import CheckpointError, Interrupted, WorkerFailed
from shoal.search import METHODS
from shoal.search.controller import MOST_KILLS, Controller
from shoal.search.search_folder import JOURNAL
from shoal.search.search_journal import SearchJournal, read_events
from shoal.search.searcher import TrialPiece
from shoal.search.slots import Ended

METHOD = "pbt:population=4"


def accuracy(piece: TrialPiece) -> float:
    return Random(f"{piece.values}{piece.end}").random()


class Desk:
    """A pool that finishes the piece that began last, so that order is not that of starting.

    `ends` decides by the number of the start how it ends; None: done.
    """

    def __init__(self, count: int = 2, ends=lambda start, piece: None, most: int | None = None) -> None:
        self.count, self.ends, self.most = count, ends, most
        self.running: list[tuple[int, TrialPiece]] = []
        self.starts: list[TrialPiece] = []
        self.stop = lambda: None
        self.closed = False

    @property
    def free(self) -> int:
        return self.count - len(self.running)

    def start(self, piece: TrialPiece, origin: TrialPiece | None) -> None:
        assert (origin is None) == (piece.origin is None)
        self.running.append((len(self.starts), piece))
        self.starts.append(piece)
        if self.most is not None and len(self.starts) == self.most:
            self.stop()

    def wait(self, seconds: float) -> list[Ended]:
        start, piece = self.running.pop()
        told = self.ends(start, piece)
        if told is not None:
            return [Ended(piece.number, told.pop("event"), told)]
        return [Ended(piece.number, "done", {"accuracy": accuracy(piece), "loss": 1.0, "seconds": 0.1})]

    def close(self) -> None:
        self.closed = True


def searching(folder: Path, desk: Desk, seed: int = 0, epochs: int = 24) -> Controller:
    """A controller of a search in that folder; close its journal."""
    journal = SearchJournal(folder)
    controller = Controller(METHODS.read(METHOD).searcher(LR, epochs, seed), desk, journal, folder / "pieces")
    desk.stop = controller.ask_to_stop
    return controller


def closing(controller: Controller) -> Controller:
    controller._journal.close()
    return controller


def test_a_search_is_written_down_and_replayed_to_the_same_state(tmp_path):
    first = searching(tmp_path, desk := Desk())
    first.run()
    closing(first)
    assert desk.closed and len(desk.starts) == 24
    events, _ = read_events(tmp_path / JOURNAL)
    assert [e["event"] for e in events].count("report") == 24
    again = closing(searching(tmp_path, Desk()))
    assert again.searcher.state() == first.searcher.state()


@pytest.mark.parametrize("most", [1, 13])
def test_a_stopped_search_goes_on_to_the_end_that_it_would_have_had(tmp_path, most):
    whole = searching(tmp_path / "whole", Desk(count=1))
    whole.run()
    closing(whole)
    stopped = searching(tmp_path / "part", Desk(count=1, most=most))
    with pytest.raises(Interrupted):
        stopped.run()
    closing(stopped)
    assert not stopped.searcher.running  # what was under way was finished first
    resumed = searching(tmp_path / "part", Desk(count=1))
    resumed.run()
    closing(resumed)
    assert resumed.searcher.state() == whole.searcher.state()


def test_ctrl_c_is_told_once_and_not_while_the_signal_is_handled(tmp_path):
    told: list[tuple[str, dict]] = []
    controller = searching(tmp_path, desk := Desk())
    controller._watcher = lambda what, event: told.append((what, event))

    def interrupt(start, piece):
        before = len(told)
        if start == 5:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(100):  # the handler has run by then
                time.sleep(0)
        assert len(told) == before

    desk.ends = interrupt
    with pytest.raises(Interrupted):
        controller.run()
    closing(controller)
    assert [event for what, event in told if what == "stopping"] == [{"running": 1}]


@pytest.mark.parametrize("cut", [1, 4, 9, 30])
def test_wherever_a_controller_dies_no_trial_is_lost(tmp_path, cut):
    """The journal ends after any line, or in the middle of one."""
    first = searching(tmp_path, Desk())
    first.run()
    closing(first)
    path = tmp_path / JOURNAL
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:cut]) + lines[cut][: cut % 7])
    second = searching(tmp_path, desk := Desk())
    pending = second.searcher.running
    second.run()
    closing(second)
    assert desk.starts[: len(pending)] == pending  # those that were under way come first
    assert [trial.epochs > 0 and trial.pending is None for trial in second.searcher.trials] == [True] * 4
    assert second.searcher.spent == 24


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / JOURNAL
    path.write_bytes(b'{"event": "sug\n{"event": "end"}\n')
    with pytest.raises(CheckpointError, match=r"line 1 of .* is damaged"):
        SearchJournal(tmp_path)


def test_the_journal_of_another_search_is_refused(tmp_path):
    first = searching(tmp_path, Desk())
    first.run()
    closing(first)
    journal = SearchJournal(tmp_path)
    with journal, pytest.raises(CheckpointError, match="was not written by this search"):
        Controller(METHODS.read(METHOD).searcher(LR, 24, 1), Desk(), journal, tmp_path)


def test_two_searches_do_not_share_a_folder(tmp_path):
    with SearchJournal(tmp_path), pytest.raises(CheckpointError, match="another search is running"):
        SearchJournal(tmp_path)


def test_a_killed_piece_is_started_again_and_counts_once(tmp_path):
    def every_third_is_killed(start, piece):
        return {"event": "killed", "how": "by SIGKILL"} if start % 3 == 0 else None

    controller = searching(tmp_path, desk := Desk(ends=every_third_is_killed))
    controller.run()
    closing(controller)
    assert controller.kills == len(desk.starts) - 24 > 8
    assert controller.searcher.spent == 24
    assert all(trial.score is not None for trial in controller.searcher.trials)


def test_a_piece_whose_slot_always_dies_is_given_up(tmp_path):
    def trial_0_is_killed(start, piece):
        return {"event": "killed", "how": "by SIGKILL"} if piece.number == 0 else None

    controller = searching(tmp_path, Desk(ends=trial_0_is_killed))
    controller.run()
    closing(controller)
    assert controller.kills == MOST_KILLS + 1
    assert "given up" in json.dumps(read_events(tmp_path / JOURNAL)[0])
    assert controller.searcher.trials[0].epochs > 1  # it took over from another


def test_trials_that_diverge_are_replaced_and_do_not_end_the_search(tmp_path):
    def first_four_diverge(start, piece):
        told = {"event": "failed", "message": "loss is nan", "diverged": True}
        return told if start < 4 else None

    controller = searching(tmp_path, Desk(ends=first_four_diverge))
    controller.run()
    closing(controller)
    assert controller.searcher.best is not None


def test_if_every_trial_fails_the_search_says_why(tmp_path):
    def all_fail(start, piece):
        return {"event": "failed", "message": "KeyError: 'x'", "details": "Traceback"}

    controller = searching(tmp_path, desk := Desk(ends=all_fail))
    with pytest.raises(WorkerFailed, match=r"the first 3 trials all failed; trial .: KeyError") as failure:
        controller.run()
    closing(controller)
    assert failure.value.details == "Traceback" and desk.closed


def test_a_score_that_is_not_a_number_is_a_failure(tmp_path):
    def nan(start, piece):
        return {"event": "done", "accuracy": None, "loss": float("nan")} if start == 0 else None

    controller = searching(tmp_path, Desk(ends=nan))
    controller.run()
    closing(controller)
    reports = [e for e in read_events(tmp_path / JOURNAL)[0] if e["event"] == "report"]
    assert [e["score"] for e in reports].count(None) == 1


def test_folders_of_pieces_that_nobody_needs_are_removed(tmp_path):
    class Disk(Desk):
        def start(self, piece, origin):
            if origin is not None:
                assert (tmp_path / "pieces" / f"{origin.number:06d}").exists()
            (tmp_path / "pieces" / f"{piece.number:06d}").mkdir(parents=True, exist_ok=True)
            super().start(piece, origin)

    controller = searching(tmp_path, Disk())
    controller.run()
    closing(controller)
    left = {int(path.name) for path in (tmp_path / "pieces").iterdir()}
    assert left == controller.searcher.needed() and len(left) <= 9
