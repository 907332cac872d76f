"""`shoal runs`: the runs that are kept in a folder, newest first."""

from __future__ import annotations

import json as json_format
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.remove_runs import remove
from shoal.core.catalogue import check_word
from shoal.records.places import existing_folder
from shoal.records.stored_runs import StoredRun, read_runs

if TYPE_CHECKING:
    from rich.table import Table

RunsFolder = Annotated[
    str,
    typer.Option(
        "--runs", metavar="DIR", help="The folder of runs.", show_default="$SHOAL_RUNS or shoal-runs"
    ),
]


def show(
    ctx: typer.Context,
    sort: Annotated[
        str,
        typer.Option(
            metavar="COLUMN", help="date, name, task, strategy, workers, state, accuracy, seconds or bytes."
        ),
    ] = "date",
    runs: RunsFolder = "",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With rm: remove without a question.")] = False,
) -> None:
    """List the runs that shoal run and shoal compare have kept, newest first.

    With WORDs, lists only the runs in whose name, task, strategy or state
    each word appears: shoal runs bmuf failed.

    shoal runs rm RUN... removes runs, after a question.
    """
    check_word("column", sort, SORTS)
    if ctx.args[:1] == ["rm"]:
        if json or sort != "date":
            raise ValueError("--json and --sort belong to the list of runs, not to `shoal runs rm RUN...`")
        remove(ctx.args[1:], runs, asks=not yes)
        return
    if yes:
        raise ValueError("--yes belongs to `shoal runs rm RUN...`, and this lists runs")
    folder = existing_folder(runs)
    found = filtered(read_runs(folder), ctx.args)
    key = SORTS[sort]
    if key is not None:
        found = sorted(found, key=lambda run: _last_if_none(key(run)), reverse=sort in HIGHEST_FIRST)
    if json:
        print(
            json_format.dumps(
                [{**run.about, "name": run.name, "state": run.state} for run in found], indent=1
            )
        )
    elif found:
        _print(found, folder)
    else:
        print(f"No run in {folder}{' matches ' + ' '.join(ctx.args) if ctx.args else ''}.")


def filtered(runs: Iterable[StoredRun], words: Sequence[str]) -> list[StoredRun]:
    """The runs in which each word appears."""

    def text(run: StoredRun) -> str:
        return " ".join([run.name, run.state, *(str(run.about.get(k, "")) for k in ("task", "strategy"))])

    return [run for run in runs if all(word in text(run) for word in words)]


def _last_if_none(value: Any) -> tuple[bool, Any]:
    return (value is not None, value if value is not None else 0)


def _about(key: str) -> Callable[[StoredRun], Any]:
    return lambda run: run.about.get(key)


def _figure(name: str) -> Callable[[StoredRun], Any]:
    return lambda run: run.figure(name)


SORTS: dict[str, Callable[[StoredRun], Any] | None] = {
    "date": None,  # as they are read
    "name": lambda run: run.name,
    "task": _about("task"),
    "strategy": _about("strategy"),
    "workers": _about("workers"),
    "state": lambda run: run.state,
    "accuracy": lambda run: run.score("test_accuracy"),
    "seconds": _figure("seconds"),
    "bytes": _figure("bytes_sent"),
}
GAP = 2  # between columns
SHORT_TASK = 8  # to which a task's name may be cut
HIGHEST_FIRST = ("accuracy",)


@dataclass(frozen=True)
class ListColumn:
    """A column of the list."""

    header: str
    text: Callable[[StoredRun], str]
    is_number: bool = False


def columns(runs: Sequence[StoredRun]) -> list[ListColumn]:
    """The columns, in order; the test loss stands in for the accuracy if no run has one."""
    from shoal.report.units import bytes_text, count_text, decimal_text

    has_accuracy = any(run.score("test_accuracy") is not None for run in runs)
    has_loss = any(run.score("test_loss") is not None for run in runs)
    by_loss = ListColumn("loss", lambda run: decimal_text(run.score("test_loss"), 3), is_number=True)
    by_accuracy = ListColumn("acc. %", lambda run: decimal_text(run.score("test_accuracy")), is_number=True)
    return [
        ListColumn("run", lambda run: run.name),
        ListColumn("started", lambda run: date_text(run.started)),
        ListColumn("task", lambda run: str(run.about.get("task", "–"))),
        ListColumn("strategy", lambda run: str(run.about.get("strategy", "–"))),
        ListColumn("n", lambda run: count_text(run.about.get("workers")), is_number=True),
        ListColumn("state", lambda run: run.state),
        by_loss if has_loss and not has_accuracy else by_accuracy,
        ListColumn("seconds", _seconds, is_number=True),
        ListColumn("sent", lambda run: bytes_text(run.figure("bytes_sent")), is_number=True),
    ]


def date_text(moment: datetime) -> str:
    """17 Nov 07:42, or for a run of another year 17 Nov 2025."""
    this_year = moment.year == datetime.now().year
    return f"{moment:%d %b %H:%M}" if this_year else f"{moment:%d %b %Y}"


def _seconds(run: StoredRun) -> str:
    from shoal.report.units import seconds_text

    is_virtual = (run.about.get("config") or {}).get("transport") == "sim" and run.about.get("figures")
    return seconds_text(run.figure("seconds")) + ("v" if is_virtual else "")


def table(runs: Sequence[StoredRun], width: int) -> Table:
    """One row for each run, of at most `width` columns if that is possible.

    Where it is too narrow, the strategy goes, then the date: most names have both. Tasks are cut.
    """
    from rich.table import Table
    from rich.text import Text

    chosen = columns(runs)
    for header in ("strategy", "started"):
        if _width(chosen, runs) > width:
            chosen = [column for column in chosen if column.header != header]
    grid = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="dim")
    for column in chosen:
        may_shrink = column.header == "task"
        grid.add_column(
            column.header, justify="right" if column.is_number else "left", no_wrap=not may_shrink
        )
    for run in runs:
        style = {"failed": "red", "killed": "red", "running": "green"}.get(run.state, "")
        grid.add_row(
            *(
                Text(c.text(run), style if c.header == "state" else "", no_wrap=True, overflow="ellipsis")
                for c in chosen
            )
        )
    return grid


def _width(chosen: Sequence[ListColumn], runs: Sequence[StoredRun]) -> int:
    """The width of these columns, with no task longer than SHORT_TASK."""

    def widest(column: ListColumn) -> int:
        most = SHORT_TASK if column.header == "task" else 1000
        return max(len(column.header), *(min(most, len(column.text(run))) for run in runs))

    return sum(widest(column) for column in chosen) + GAP * (len(chosen) - 1)


def _print(runs: Sequence[StoredRun], folder: Path) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(table(runs, console.width))
    if any(_seconds(run).endswith("v") for run in runs):
        console.print("v: virtual seconds", style="dim")
