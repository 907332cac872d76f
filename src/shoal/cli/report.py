"""`shoal report`: the closing table and the HTML page again, from runs that are on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.outcome import JsonFile, Outcome, ReportFile
from shoal.cli.runs import RunsFolder
from shoal.core.errors import ShoalError
from shoal.records.stored_runs import find_runs, read_records


def report_runs(
    ctx: typer.Context,
    runs: RunsFolder = "",
    json: JsonFile = None,
    report: ReportFile = None,
    target: Annotated[
        float | None,
        typer.Option(metavar="SCORE", help="Time the runs to this test accuracy in per cent, or loss."),
    ] = None,
) -> None:
    """Compare runs that are on disk: one table, and an HTML page with --report.

    RUN is a name that shoal runs lists, or its beginning; last, for the runs
    of the last command; a run's folder; or a file that --json wrote.
    """
    if not ctx.args:
        raise ValueError("name the runs, as in: shoal report last, or: shoal report bmuf sync")
    outcome = Outcome(json, report, target)
    records = gather(ctx.args, runs)
    outcome.write(records)
    outcome.show(records)


def gather(words: Sequence[str], folder: str) -> list[dict[str, Any]]:
    """The figures of all these runs. Says which have none, and raises ShoalError if that is all of them."""
    records: list[dict[str, Any]] = []
    for word in dict.fromkeys(words):
        if word.endswith(".json"):
            records += read_records(Path(word))
            continue
        for run in find_runs(word, folder):
            found = [{**r, "config": {"run": run.name, **r.get("config", {})}} for r in run.records()]
            if not found:
                typer.echo(f"note: {run.name} has no figures: it is {run.state}", err=True)
            records += found
    if not records:
        raise ShoalError("none of these runs has figures yet")
    return records
