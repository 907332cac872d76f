"""Live progress of a search: a bar and the running trials on a terminal, a plain line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.report.display import begin_live
from shoal.report.units import seconds_text
from shoal.search.search_result import score_text, value_text

REDRAW_SECONDS = 0.1
PLAIN_SECONDS = 10.0
BAR_WIDTH = 30


class SearchDisplay:
    """Draws the events of a search on stderr; a context manager, called with each event.

    On a terminal the display is live. Elsewhere it prints a plain line at most every ten seconds.
    """

    def __init__(
        self,
        title: str,
        epochs: int,
        metric: str,
        enabled: bool = True,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title, self._epochs, self._metric = title, epochs, metric
        self._enabled = enabled
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._drawn = clock()
        self._live: Live | None = None
        self._running: dict[int, Mapping[str, Any]] = {}
        self._done = self._kills = self._trials = 0
        self._best: tuple[float, int] | None = None
        self._seconds = 0.0
        self._is_stopping = False

    def __enter__(self) -> SearchDisplay:
        if self._enabled and self._console.is_terminal:
            self._live = begin_live(self._console, self._display())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._print()

    def __call__(self, what: str, event: Mapping[str, Any]) -> None:
        """Take in an event of the journal; it is drawn now or with a later one."""
        self._seconds = event.get("time", self._seconds)
        if what == "suggest":
            self._running[event["number"]] = event
            self._trials = max(self._trials, event["trial"] + 1)
        elif what == "killed":
            self._kills += 1
        elif what == "stopping":
            self._is_stopping = True
        elif what == "report":
            piece = self._running.pop(event["piece"], None)
            self._done += piece["end"] - piece["begin"] if piece else 0
            if event["score"] is not None and event.get("accuracy", 0.0) is None:
                self._metric = "loss"  # a task without accuracy is scored by its loss, whatever was asked for
            if event["score"] is not None and (self._best is None or event["score"] > self._best[0]):
                self._best = (event["score"], event["trial"])
        self._draw()

    def _draw(self) -> None:
        due = self._drawn + (REDRAW_SECONDS if self._live else PLAIN_SECONDS)
        if not self._enabled or (self._clock() < due and not self._is_stopping):
            return
        self._drawn = self._clock()
        if self._live:
            self._live.update(self._display(), refresh=True)
        elif not self._console.is_terminal:
            self._print()

    def _print(self) -> None:
        line = f"{self._title}: {self._line()}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _line(self) -> str:
        best = "no score yet"
        if self._best is not None:
            best = f"best {score_text(self._best[0], self._metric)} (trial {self._best[1]})"
        told = [f"{self._done}/{self._epochs} epochs", f"{self._trials} trials", best]
        told += [f"{self._kills} killed and continued"] * bool(self._kills)
        if self._is_stopping:
            told.append(f"stopping: {len(self._running)} trials finish first; Ctrl-C again ends them")
        return ", ".join([*told, f"{seconds_text(self._seconds)} s"])

    def _display(self) -> RenderableType:
        bar = ProgressBar(total=float(self._epochs), completed=float(self._done), width=BAR_WIDTH)
        grid = Table.grid(padding=(0, 2))
        for piece in list(self._running.values())[:8]:
            values = "  ".join(f"{name} {value_text(value)}" for name, value in piece["values"].items())
            span = f"epoch {piece['begin']} to {piece['end']}"
            grid.add_row(Text(f"trial {piece['trial']}"), Text(span, "dim"), Text(values, "dim"))
        return Group(Text(self._title, "bold"), bar, Text(self._line()), grid)
