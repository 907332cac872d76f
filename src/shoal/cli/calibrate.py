"""`shoal calibrate`: measure this machine for virtual time, print it, and keep it in a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.telling import telling
from shoal.core.paths import check_file

if TYPE_CHECKING:
    from rich.table import Table

    from shoal.sim.hardware import Profile

FILE = "profile.json"


def calibrate(
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="FILE", help="Where to keep it, for --sim --profile FILE.")
    ] = FILE,
) -> None:
    """Measure what costs time on this machine, in about a minute.

    How much processes that train slow each other down, what a message costs
    over each transport, what each codec takes. Leave the machine alone
    meanwhile.
    """
    from rich.console import Console

    from shoal.profiling.measure import measure_profile  # imports torch

    check_file("--out", Path(out))
    console = Console(highlight=False)
    with telling() as tell:
        profile = measure_profile(lambda what: tell(f"measuring {what}"))
    profile.save(out)
    for table in (_messages(profile), _codecs(profile)):
        console.print(table)
    slower = ", ".join(f"{factor:.2f}" for factor in profile.slowdown)
    console.print(f"{profile.cores} cores; a step beside others, from 1 process on: {slower} times as long.")
    console.print(f"Kept in {out}. Next: shoal compare --sim --profile {out}", soft_wrap=True)


def _messages(profile: Profile) -> Table:
    table = _table(
        "messages among workers, and to a server", "transport", "a message", "its bytes", "latency"
    )
    ways = {**profile.transports, **{f"{kind}, server": w for kind, w in profile.servers.items()}}
    for way, wiring in ways.items():
        table.add_row(
            way,
            f"{1e6 * (wiring.send.each + wiring.receive.each):.0f} us",
            _rate(wiring.send.byte + wiring.receive.byte),
            f"{1e6 * wiring.latency:.0f} us",
        )
    return table


def _codecs(profile: Profile) -> Table:
    table = _table("codecs, of the uncompressed vector", "codec", "encoding", "decoding")
    for word, speeds in profile.codecs.items():
        table.add_row(word, _rate(speeds.encode), _rate(speeds.decode))
    return table


def _table(title: str, *columns: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    for name in columns:
        table.add_column(name, justify="left" if name == columns[0] else "right")
    return table


def _rate(seconds_per_byte: float) -> str:
    """How much a second, for people."""
    from shoal.report.units import bytes_text

    return "any" if seconds_per_byte <= 0 else f"{bytes_text(1 / seconds_per_byte)}/s"
