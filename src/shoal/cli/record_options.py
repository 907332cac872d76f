"""--runs and --log: where a run is kept, and which loggers get its figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

KeptRuns = Annotated[
    str | None,
    typer.Option(
        "--runs",
        metavar="DIR",
        help="Keep the run in a folder of DIR, for shoal runs; none keeps nothing.",
        show_default="$SHOAL_RUNS or shoal-runs",
        rich_help_panel="Files",
    ),
]
Loggers = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        metavar="WORD[:WHERE]",
        help="Log to tensorboard:DIR, wandb:PROJECT, mlflow:URI or csv:DIR; several are allowed.",
        rich_help_panel="Files",
    ),
]


def read_records(runs: str | None, log: Sequence[str] | None, command: str) -> dict[str, Any]:
    """The fields of an Outcome that these options set. Raises ValueError or Unavailable for a wrong one."""
    from shoal.loggers.log_option import make_loggers
    from shoal.records.run_store import make_store

    loggers = make_loggers(log or ())
    named = f"--log {log[0]}" if log else f"--runs {runs}" if runs not in (None, "none") else ""
    return {"store": make_store(runs, command), "loggers": loggers, "named": named}
