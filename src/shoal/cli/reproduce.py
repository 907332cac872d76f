"""`shoal reproduce`: a published table made again, with the paper's figures beside ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from shoal.cli.outcome import JsonFile
from shoal.cli.saving import check_file
from shoal.report import Progress
from shoal.report.findings import show_findings, write_findings, write_findings_json
from shoal.studies import STUDIES
from shoal.studies.study import Lab


def reproduce(
    study: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Which table; options follow a colon, as bmuf-wer:seeds=3. See: shoal list studies.",
        ),
    ],
    json: JsonFile = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where the page with table and picture goes.",
            show_default="NAME.html",
            rich_help_panel="Files",
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress, only what was found.")] = False,
) -> None:
    """Make a published table again: the paper's figures beside ours.

    Every figure says whether its times are real or virtual.
    """
    chosen = STUDIES.read(study)
    page = report or Path(f"{study.partition(':')[0]}.html")
    check_file("--report", page)
    if json is not None:
        check_file("--json", json)

    def save(records: list[dict[str, Any]]) -> None:
        if json is not None:
            write_findings_json(None, records, json)

    with Progress(enabled=not quiet) as progress:
        lab = Lab(progress, save)
        findings = chosen.run(lab)
    console = Console(highlight=False)
    show_findings(findings, console)
    write_findings(findings, page)
    if json is not None:
        write_findings_json(findings, lab.records, json)
    files = [f"report: {page}", *([f"json: {json}"] if json is not None else [])]
    console.print("\n" + "\n".join(files), markup=False, soft_wrap=True)
