"""`shoal demo`: what Shoal is good for, shown on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.outcome import Outcome

OFFICE = "250Mbit,1ms"


def demo(
    report: Annotated[
        Path, typer.Option(metavar="FILE", help="Write the HTML page to this file.", rich_help_panel="Files")
    ] = Path("demo.html"),
    json: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the figures as JSON.", rich_help_panel="Files"),
    ] = None,
    network: Annotated[
        str, typer.Option(metavar="LINKS", help="Bandwidth and latency of the simulated office link.")
    ] = OFFICE,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Show in three minutes what Shoal is good for, without any data set.

    Two workers on this machine, eight simulated machines on an office link,
    and a run that loses a worker and its server.
    """
    from shoal.sim.models import Network

    Network.parse(network)
    Outcome(json, report)

    from shoal.demo.program import run_demo  # imports torch

    run_demo(network, report, json, quiet)
