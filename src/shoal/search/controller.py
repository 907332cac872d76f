"""Controller: runs a search. Asks its searcher for pieces, fills the slots, writes everything down.

A slot that is killed costs the epoch it was in: its piece starts again from its last checkpoint. The
controller itself may be killed, too: the journal tells the next one everything.
"""

from __future__ import annotations

import json
import logging
import math
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from shoal.core.errors import CheckpointError, WorkerFailed
from shoal.launch.stop_signals import StopSignal, stop_signals, stopped_by
from shoal.search.search_folder import remove_pieces
from shoal.search.search_journal import SearchJournal
from shoal.search.searcher import FAILED, Searcher, TrialPiece
from shoal.search.slots import Ended, SlotPool

LOG = logging.getLogger("shoal")

LOOK_SECONDS = 0.2

MOST_KILLS = 25
"""How often the slot of one piece may be killed before its trial is given up."""

HOPELESS = 3
"""If the first so many trials all fail for another reason than divergence, the search does."""

Watcher: TypeAlias = Callable[[str, dict[str, Any]], None]
"""Called with what happened (suggest, report, killed) and the journal's event."""


class Controller:
    """One search, from the first piece or from where its journal ends."""

    def __init__(
        self,
        searcher: Searcher,
        pool: SlotPool,
        journal: SearchJournal,
        pieces: Path,
        metric: str = "accuracy",
        watcher: Watcher = lambda what, event: None,
    ) -> None:
        self.searcher = searcher
        self._pool = pool
        self._journal = journal
        self._pieces = pieces
        self._metric = metric
        self._watcher = watcher
        self._stopping = 0  # the number of the signal
        self._told_stopping = False
        self._kills: Counter[int] = Counter()  # by piece
        self._failures: list[dict[str, Any]] = []
        self._waiting: list[TrialPiece] = []  # pieces that were under way when an earlier controller ended
        self._successes = 0
        self._replay()
        self._began = time.monotonic() - self.seconds_before

    def run(self) -> None:
        """Train until the searcher has nothing more. Raises Interrupted after Ctrl-C, once slots are idle.

        A second Ctrl-C, or another signal, ends the pieces under way; they continue from their checkpoints.
        """
        with stop_signals(lambda: bool(self._stopping), self.ask_to_stop):
            try:
                while True:
                    self._tell_if_stopping()
                    self._fill()
                    if not self.searcher.running or (self._stopping and not self._is_busy):
                        break
                    for ended in self._pool.wait(LOOK_SECONDS):
                        self._take(ended)
            except StopSignal as stop:
                raise stopped_by(stop.number) from None
            finally:
                self._pool.close()
        if self._waiting or (self._stopping and self.searcher.has_more):
            raise stopped_by(self._stopping or signal.SIGINT)

    def ask_to_stop(self, number: int = signal.SIGINT) -> None:
        """Start nothing more; `run` returns when the pieces under way are done, with Ctrl-C, else at once."""
        if number != signal.SIGINT:
            raise StopSignal(number)
        self._stopping = number

    @property
    def seconds(self) -> float:
        """Since the search began, without the time between two controllers."""
        return round(time.monotonic() - self._began, 3)

    @property
    def kills(self) -> int:
        """How often a slot was killed."""
        return self._kills.total()

    @property
    def _is_busy(self) -> bool:
        return len(self.searcher.running) > len(self._waiting)

    def _fill(self) -> None:
        """Start pieces while a slot is free: first those that an earlier controller left."""
        while not self._stopping and self._pool.free > 0:
            if self._waiting:
                piece: TrialPiece | None = self._waiting.pop(0)
            else:
                piece = self.searcher.suggest()
                if piece is not None:
                    self._write("suggest", piece.plain())
            if piece is None:
                return
            self._start(piece)

    def _start(self, piece: TrialPiece) -> None:
        self._pool.start(piece, None if piece.origin is None else self.searcher.pieces[piece.origin])

    def _take(self, ended: Ended) -> None:
        piece = self.searcher.pieces[ended.piece]
        if ended.event == "killed":
            self._kills[piece.number] += 1
            self._write("killed", {"piece": piece.number, "trial": piece.trial, **ended.told})
            if self._kills[piece.number] <= MOST_KILLS:
                self._waiting.append(piece)  # the next free slot takes it
                return
            ended = Ended(piece.number, "failed", {"message": f"given up after {MOST_KILLS} kills"})
        self._report(piece, ended)

    def _report(self, piece: TrialPiece, ended: Ended) -> None:
        score = self._score(ended) if ended.event == "done" else FAILED
        told = {"accuracy": None, "loss": None, "seconds": 0.0, "message": "", **ended.told}
        told.pop("details", None)
        self._write(
            "report",
            {
                "piece": piece.number,
                "trial": piece.trial,
                "step": piece.end,
                "score": None if score == FAILED else score,
                **{name: finite(value) for name, value in told.items()},
            },
        )
        self.searcher.report(piece.trial, score, piece.end)
        used = {n for other in self.searcher.running for n in (other.number, other.origin) if n is not None}
        remove_pieces(self._pieces, self.searcher.needed() | used)
        self._count(piece, ended)

    def _score(self, ended: Ended) -> float:
        """The figure that the search maximises."""
        accuracy, loss = ended.told["accuracy"], ended.told["loss"]
        score = accuracy if self._metric == "accuracy" and accuracy is not None else -loss
        return float(score) if math.isfinite(score) else FAILED

    def _count(self, piece: TrialPiece, ended: Ended) -> None:
        """Raise WorkerFailed where every trial fails, and not because it diverges."""
        if ended.event == "done" or ended.told.get("diverged"):
            self._successes += 1
            return
        self._failures.append({"trial": piece.trial, **ended.told})
        LOG.warning("trial %d failed: %s", piece.trial, ended.told.get("message"))
        if not self._successes and len(self._failures) >= HOPELESS:
            first = self._failures[0]
            raise WorkerFailed(
                f"the first {HOPELESS} trials all failed; trial {first['trial']}: {first['message']}",
                first.get("details", ""),
            )

    def _write(self, what: str, event: dict[str, Any]) -> None:
        whole = {"event": what, "time": self.seconds, **event}
        self._journal.append(whole)
        self._watcher(what, whole)

    # -- resuming ------------------------------------------------------------------------------

    def _replay(self) -> None:
        """Bring the searcher to where the journal ends."""
        self.seconds_before = 0.0
        for event in self._journal.events:
            self.seconds_before = max(self.seconds_before, event.get("time", 0.0))
            if event["event"] == "suggest":
                self._check_same(event, self.searcher.suggest())
            elif event["event"] == "report":
                score = FAILED if event["score"] is None else event["score"]
                self.searcher.report(event["trial"], score, event["step"])
                self._successes += event["score"] is not None
            elif event["event"] == "killed":
                self._kills[event["piece"]] += 1
        self._waiting = self.searcher.running

    def _check_same(self, event: dict[str, Any], piece: TrialPiece | None) -> None:
        plain = None if piece is None else json.loads(json.dumps(piece.plain()))
        wanted = {name: value for name, value in event.items() if name not in ("event", "time")}
        if plain != wanted:
            raise CheckpointError(
                f"{self._journal.path} was not written by this search: it goes on with {wanted}, and the "
                f"search would with {plain}. Was it another version of Shoal? Use another folder."
            )

    def _tell_if_stopping(self) -> None:
        """Once, and not in the signal's handler, which may interrupt the watcher itself."""
        if self._stopping and not self._told_stopping:
            self._told_stopping = True
            self._watcher("stopping", {"running": len(self.searcher.running)})


def finite(value: Any) -> Any:
    """The value; None in place of a number that JSON cannot hold."""
    return None if isinstance(value, float) and value - value != 0.0 else value
