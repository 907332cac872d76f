"""Where the figures of finished runs go: a table on the terminal, and JSON and HTML files if asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.core.paths import check_file

if TYPE_CHECKING:
    from shoal.loggers.logger import Logger
    from shoal.planning.plan_check import PlanWatch
    from shoal.planning.training_plan import TrainingPlan
    from shoal.records.run_store import RunStore

JsonFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the figures as JSON.", rich_help_panel="Files")
]
ReportFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write an HTML page with charts.", rich_help_panel="Files")
]


PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        metavar="FILE",
        help="What shoal plan has kept: predictions beside what is measured.",
        rich_help_panel="Files",
    ),
]


def read_plan(file: Path | None) -> TrainingPlan | None:
    """The plan of a file, if one was named."""
    if file is None:
        return None
    from shoal.planning.training_plan import TrainingPlan

    return TrainingPlan.load(file)


@dataclass(frozen=True)
class Outcome:
    """What was asked for. Made before the first run, so that a bad path costs no training."""

    json: Path | None = None
    report: Path | None = None
    target: float | None = None  # the score to which runs are timed
    command: str = ""  # the user's own, to which advice adds an option
    watch: bool = False  # on a live page
    store: RunStore | None = None  # where runs are kept
    loggers: Sequence[Logger] = ()
    named: str = ""  # the option that asks for a store or a logger, if one was given
    plan: TrainingPlan | None = None  # what was predicted

    def __post_init__(self) -> None:
        for option, path in (("--json", self.json), ("--report", self.report)):
            if path is not None:
                check_file(option, path)
        if self.json is not None and self.json == self.report:
            raise ValueError(f"--json and --report both name {self.json}; they need a file each")

    def asked_for(self) -> str | None:
        """What the command line names as a place for figures, if anything."""
        file = self.json or self.report
        if self.watch:
            return "--watch"
        return str(file) if file is not None else self.named or None

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Update the files. Called after every run, so that a failure later loses no figures."""
        from shoal.report import write_html, write_json

        if self.json is not None:
            write_json(records, self.json, self.target)
        if self.report is not None:
            write_html(records, self.report, target=self.target)

    def show(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Print the closing table and the paths of the files."""
        from rich.console import Console

        from shoal.report import advice, closing_table

        console = Console(highlight=False)
        table = closing_table(records, self.target)
        sentences, table.caption = table.caption, None  # a caption would be folded at the table's width
        for part in ("", table, sentences or ""):
            console.print(part)
        if why := advice(records, self.command):
            console.print("\n" + "\n".join(why), markup=False, soft_wrap=True)
        if self.plan is not None:
            self._show_plan(self.plan, records, console)
        files = [
            f"{kind}: {path}"
            for kind, path in (("report", self.report), ("json", self.json), ("kept", self._kept()))
            if path is not None
        ]
        if files:
            console.print("\n" + "\n".join(files), markup=False, soft_wrap=True)

    def _show_plan(self, plan: TrainingPlan, records: Sequence[Mapping[str, Any]], console: Any) -> None:
        """Print what was predicted of these runs beside what came of them."""
        from shoal.planning.plan_check import beside, where

        console.print("\nthe plan:")
        console.print(beside(plan, records))
        if elsewhere := where(plan, records):
            console.print(elsewhere, markup=False, soft_wrap=True)

    def watch_plan(self, say: Callable[[str], None]) -> PlanWatch | None:
        """What hears the progress of runs and says when the plan no longer holds; None without a plan."""
        if self.plan is None:
            return None
        from shoal.planning.plan_check import PlanWatch

        return PlanWatch(self.plan, say)

    def _kept(self) -> str | None:
        """Where the runs are kept."""
        if self.store is None or not self.store.kept:
            return None
        kept = self.store.kept
        return str(kept[0]) if len(kept) == 1 else f"{len(kept)} runs in {self.store.path}"
