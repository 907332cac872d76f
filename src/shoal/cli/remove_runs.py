"""`shoal runs rm`: removes the folders of runs, after a question."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

import typer

from shoal.core.errors import ShoalError
from shoal.records.stored_runs import StoredRun, find_runs


def remove(words: Sequence[str], folder: str, asks: bool) -> None:
    """Remove the runs that the words mean: names, beginnings of them, folders, or `last`.

    Raises ValueError for a word that means no run, and for a run that may still be under way.
    """
    if not words:
        raise ValueError("shoal runs rm needs the names of runs; `shoal runs` lists them")
    meant = {run.path.resolve(): run for word in words for run in find_runs(word, folder)}
    runs = list(meant.values())
    for run in runs:
        _check_is_over(run)
    if asks:
        _ask(runs)
    for run in runs:
        try:
            shutil.rmtree(run.path)
        except OSError as error:
            raise ShoalError(f"cannot remove {run.path}: {error.strerror}") from None
        print(f"removed: {run.path}")


def _check_is_over(run: StoredRun) -> None:
    if run.state == "running":
        raise ValueError(f"{run.name} is running; stop it with Ctrl-C first")
    if run.state == "running?":
        raise ValueError(
            f"nobody can tell from here whether {run.name} is still running, on host "
            f"{run.about.get('host', 'unknown')!r}. If it is not, remove its folder: rm -r {run.path}"
        )


def _ask(runs: Sequence[StoredRun]) -> None:
    """Go on if the user says yes; else nothing is removed."""
    for run in runs:
        print(f"{run.path}  {run.state}, started {run.started:%d %b %Y %H:%M}")
    what = "this run" if len(runs) == 1 else f"these {len(runs)} runs"
    try:
        says_yes = typer.confirm(f"Remove {what} for good?")
    except typer.Abort:
        print(file=sys.stderr)
        raise ValueError(
            "nobody answered, so nothing was removed; --yes removes without a question"
        ) from None
    if not says_yes:
        print("Nothing was removed.")
        raise typer.Exit
