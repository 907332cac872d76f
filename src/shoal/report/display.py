"""Live progress of a run: one line per worker on a terminal, an occasional plain line elsewhere."""

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

from shoal.report.units import MISSING, bytes_text, count_text, finite, percent_text

Event = Mapping[str, Any]
"""A node's report: rank, role, step, steps, loss, samples_per_second, wait_fraction, bytes_sent,
saved_seconds.

`lost` is true for a worker that died, if the run goes on without it. After training, the saved copies of the
model are tested: `tested` of `copies` are done.
"""

REDRAW_SECONDS = 0.1
PLAIN_SECONDS = 10.0
BAR_WIDTH = 20
LINES_KEPT_FREE = 4  # title, header, the line 'and 3 more', the prompt


class ProgressDisplay:
    """Draws the events of a run on stderr; use it as a context manager, from one thread.

    On a terminal the display is live, and its last state stays as one line. Elsewhere it prints a plain line
    at most every ten seconds, so none for shorter runs. `enabled=False` prints nothing. It starts no thread:
    it draws when an event arrives.
    """

    def __init__(
        self,
        enabled: bool = True,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._enabled = enabled
        self._console = console or Console(stderr=True)
        self._clock = clock
        self._live: Live | None = None
        self._title = ""
        self._counts = {"worker": 0, "server": 0}
        self._nodes: dict[tuple[str, int], Event] = {}
        self._testing = ""
        self._drawn = 0.0

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def start(self, title: str, workers: int, servers: int = 0) -> None:
        """Begin the display of a run, and finish that of the one before."""
        self.finish()
        self._title = title
        self._counts = {"worker": workers, "server": servers}
        self._nodes, self._testing = {}, ""
        self._drawn = self._clock()
        if self._enabled and self._console.is_terminal:
            self._live = begin_live(self._console, self._display())

    def update(self, event: Event) -> None:
        """Process a node's report; it is drawn now or with a later event."""
        if not self._enabled:
            return
        due = self._drawn + (REDRAW_SECONDS if self._live else PLAIN_SECONDS)
        if "tested" in event:
            if self._live and not self._testing:
                due = self._drawn  # draw now: testing the only copy may take long
            self._testing = f"testing, copy {event['tested'] + 1} of {event['copies']}"
        else:
            self._testing = ""
            self._nodes[str(event.get("role") or "worker"), int(event["rank"])] = event
        if (now := self._clock()) < due:
            return
        self._drawn = now
        if self._live:
            self._live.update(self._display(), refresh=True)
        elif not self._console.is_terminal:
            self._print_line(self._testing)

    def say(self, sentence: str) -> None:
        """Print a sentence above the display."""
        if self._enabled:
            self._console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def finish(self) -> None:
        """End the display. On a terminal its last state stays as one line; finishing twice is harmless."""
        if self._live is None:
            return
        self._live.stop()
        self._live = None
        if self._nodes:
            self._print_line()

    def _print_line(self, instead: str = "") -> None:
        line = f"{self._title}: {instead or self._line()}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _line(self) -> str:
        """The run in one line: the slowest worker's step, the mean loss, the total speed."""
        workers = [
            event
            for (role, _), event in self._nodes.items()
            if role == "worker" and not event.get("lost") and event.get("state") != "joining"
        ]
        if not workers:
            return "starting"
        slowest = min(workers, key=lambda event: int(event.get("step") or 0))
        losses = [loss for event in workers if (loss := finite(event.get("loss"))) is not None]
        speed = sum(finite(event.get("samples_per_second")) or 0.0 for event in workers)
        mean = sum(losses) / len(losses) if losses else None
        told = [f"step {_step_text(slowest)}", f"loss {_loss_text(mean)}", f"{count_text(speed)} samples/s"]
        if (saved := finite(slowest.get("saved_seconds"))) is not None:
            told.append(f"compression {'saved' if saved >= 0 else 'cost'} {abs(saved):.1f} s")
        return ", ".join(told)

    def _display(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        for name in ("", "", "step", "loss", "samples/s", "waiting", "sent"):
            grid.add_column(name, justify="right" if name else "left", no_wrap=True)
        grid.add_row(
            "", "", *(Text(name, "dim") for name in ("step", "loss", "samples/s", "waiting", "sent"))
        )
        keys = self._keys()
        room = max(1, self._console.size.height - LINES_KEPT_FREE)
        for role, rank in keys[:room]:
            grid.add_row(*self._cells(role, rank))
        more = [Text(f"and {len(keys) - room} more", "dim")] if len(keys) > room else []
        title = Text.assemble((self._title, "bold"), (f"  {self._testing}", "dim"))
        return Group(title, grid, *more)

    def _keys(self) -> list[tuple[str, int]]:
        """Workers by rank, also those that have not reported yet, then servers."""
        workers, servers = self._counts["worker"], self._counts["server"]
        expected = {("worker" if rank < workers else "server", rank) for rank in range(workers + servers)}
        return sorted(expected | self._nodes.keys(), key=lambda key: (key[0] != "worker", key[1]))

    def _cells(self, role: str, rank: int) -> list[RenderableType]:
        event = self._nodes.get((role, rank))
        name = Text(self._name(role, rank))
        if event is None or event.get("lost") or event.get("state") == "joining":
            return [name, Text("lost" if event and event.get("lost") else "starting", "dim"), *[""] * 5]
        steps = event.get("steps")
        done = float(event.get("step") or 0)
        bar = ProgressBar(total=float(steps), completed=done, width=BAR_WIDTH) if steps else ""
        return [
            name,
            bar,
            _step_text(event),
            _loss_text(event.get("loss")),
            count_text(event.get("samples_per_second")),
            percent_text(event.get("wait_fraction")),
            bytes_text(event.get("bytes_sent")),
        ]

    def _name(self, role: str, rank: int) -> str:
        """The name of a node, as in messages."""
        if role == "worker":
            return f"worker {rank}"
        return f"server {rank - self._counts['worker']}" if self._counts["server"] > 1 else "server"


def _step_text(event: Event) -> str:
    step, steps = int(event.get("step") or 0), event.get("steps")
    return f"{step}/{steps}" if steps else f"{step}"


def _loss_text(loss: Any) -> str:
    value = finite(loss)
    return MISSING if value is None else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


def begin_live(console: Console, picture: RenderableType) -> Live:
    """Draw a picture that changes when it is told to, and vanishes when it is stopped."""
    live = Live(picture, console=console, auto_refresh=False, transient=True, redirect_stdout=False)
    live.start(refresh=True)
    return live
