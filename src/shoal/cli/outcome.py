"""Where the figures of finished runs go: a table on the terminal, and JSON and HTML files if asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer

from shoal.cli.paths import check_file

P = ParamSpec("P")

JsonFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the figures as JSON.", rich_help_panel="Files")
]
ReportFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write an HTML page with charts.", rich_help_panel="Files")
]


@dataclass(frozen=True)
class Outcome:
    """What was asked for. Made before the first run, so that a bad path costs no training."""

    json: Path | None = None
    report: Path | None = None
    target: float | None = None  # the score to which runs are timed
    watch: bool = False  # on a live page
    command: str = ""  # the user's own, to which advice adds an option

    def __post_init__(self) -> None:
        for option, path in (("--json", self.json), ("--report", self.report)):
            if path is not None:
                check_file(option, path)
        if self.json is not None and self.json == self.report:
            raise ValueError(f"--json and --report both name {self.json}; they need a file each")

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
        files = [
            f"{kind}: {path}"
            for kind, path in (("report", self.report), ("json", self.json))
            if path is not None
        ]
        if files:
            console.print("\n" + "\n".join(files), markup=False, soft_wrap=True)


def both(first: Callable[P, None], second: Callable[P, None]) -> Callable[P, None]:
    """A function that passes its arguments to two, one after the other."""

    def call(*args: P.args, **options: P.kwargs) -> None:
        first(*args, **options)
        second(*args, **options)

    return call


def last_progress(nodes: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A last progress event of each node, from the nodes of a result, so that the display ends complete."""
    for node in nodes:
        seconds = node["seconds"] or float("inf")
        steps = {"step": node["steps"], "steps": node["steps"]} if node["role"] == "worker" else {}
        yield {
            **node,
            **steps,
            "state": "done",
            "samples_per_second": (node["samples"] - node["samples_before"]) / seconds,
            "wait_fraction": node["wait_seconds"] / seconds,
            "compute_fraction": node["compute_seconds"] / seconds,
            "staleness": mean_staleness(node["staleness"]),
            "saved_seconds": node["saved_seconds"] if node["coded_bytes"] else None,
        }


def mean_staleness(counts: Mapping[str, int]) -> float | None:
    """How many versions behind updates were on average, from the counts of each."""
    updates = sum(counts.values())
    return sum(int(late) * count for late, count in counts.items()) / updates if updates else None
