"""`shoal reproduce`: a published table made again, with the paper's figures beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.outcome import JsonFile
from shoal.core.paths import check_file
from shoal.studies import STUDIES


def reproduce(
    study: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Which table. Options follow a colon, as in bmuf-wer:seeds=3. See: shoal list studies.",
        ),
    ],
    json: JsonFile = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the page with tables and charts to this file.",
            show_default="NAME.html",
            rich_help_panel="Files",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the findings only.")] = False,
) -> None:
    """Make a published table again: the paper's figures beside ours.

    Every row says whether its times are real or virtual.
    """
    STUDIES.check_text(study)
    page = report or Path(f"{study.partition(':')[0]}.html")
    check_file("--report", page)
    if json is not None:
        check_file("--json", json)
    run_study(study, page, json, quiet)


def run_study(study: str, page: Path, json: Path | None, quiet: bool) -> None:
    """Make the runs of a study, print its findings and write its files."""
    from rich.console import Console

    from shoal.report import ProgressDisplay
    from shoal.report.findings import show_findings, write_findings, write_findings_json
    from shoal.studies.study import Lab

    chosen = STUDIES.read(study)

    def save(records: list[dict[str, Any]]) -> None:
        if json is not None:
            write_findings_json(None, records, json)

    with ProgressDisplay(enabled=not quiet) as progress:
        lab = Lab(progress, save)
        findings = chosen.run(lab)
    console = Console(highlight=False)
    show_findings(findings, console)
    write_findings(findings, page)
    if json is not None:
        write_findings_json(findings, lab.records, json)
    files = [f"report: {page}", *([f"json: {json}"] if json is not None else [])]
    console.print("\n" + "\n".join(files), markup=False, soft_wrap=True)
